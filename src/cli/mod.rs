//! The command line.
//!
//! Problem: operators move an existing deployment over by changing nothing but the binary. Every flag they may already
//! use must therefore be understood from the first day, and one whose feature is missing must stop the start instead
//! of being silently ignored.
//!
//! Invariants:
//! - Parsing is pure: no file, socket, clock or global is touched. The caller prints and exits.
//! - `smg --flag …` means `smg launch --flag …`, and so does `smg start`.
//! - A flag of the documented gateway is either a field of one of the groups below or a row of [`absent`]; a row
//!   refuses the start unless the flag is set to its "off" value.
//! - Fleet-wide flags are optional everywhere: only what the operator wrote reaches the startup policy document, so that
//!   an absent flag never overrides what was set through the API.

mod absent;
mod access;
mod cluster;
mod controlplane;
mod error;
mod gateway;
mod health;
mod launch;
mod limits;
mod part_tls;
mod policy;
mod process;
mod protection;
mod resilience;
mod target;
#[cfg(test)]
mod tests;
mod tls;
mod trace;
mod tuning;
mod values;
mod verbs;
mod worker;

use std::ffi::OsString;

use clap::{Args as _, FromArgMatches as _};

pub use access::{BOOTSTRAP, TokenArgs};
pub use cluster::{CaVerb, ClusterArgs, ClusterVerb};
#[cfg(feature = "etcd")]
pub use controlplane::EtcdArgs;
pub use controlplane::{ControlPlaneArgs, StoreArgs};
pub use error::{CliError, EXIT_USAGE};
pub use gateway::GatewayArgs;
pub use launch::LaunchArgs;
pub use limits::EdgeArgs;
pub use process::ProcessArgs;
pub use target::{ChangeFlags, OperatorTls, Output, TargetArgs};
pub use verbs::{
    AddFlags, AdminArgs, AuditFlags, ContextArgs, ContextVerb, FollowFlags, PairingFlags, PairingVerb, PatchFlags,
    PoliciesVerb, SpecFlags, TokensVerb, Verb, WorkersVerb,
};

/// The environment variable with admin tokens.
const TOKENS_VARIABLE: &str = "CONTROL_PLANE_API_KEYS";

/// The commands that speak to the admin API.
const OPERATORS: [&str; 9] =
    ["workers", "policies", "pairing", "gateways", "admission", "tokens", "audit", "context", "cluster"];

/// What the process was asked to do.
#[derive(Debug)]
pub enum Invocation {
    /// Control plane and gateway in one process.
    Launch(Box<LaunchArgs>),
    /// One member of the replicated control plane.
    ControlPlane(Box<ControlPlaneArgs>),
    /// One data-plane gateway.
    Gateway(Box<GatewayArgs>),
    /// A look at the control plane's members, or a change of them.
    Cluster(Box<ClusterArgs>),
    /// A look at the fleet, or a change of it.
    Admin(Box<AdminArgs>),
    /// The configuration file of operators.
    Context(Box<ContextArgs>),
    /// Print this text on standard output and exit with success: help or a version.
    Print(String),
}

/// Reads the arguments of the process, the program's name first.
///
/// `environment` gives the value of an environment variable; it is asked only for documented ones that have to do with access.
pub fn parse<I, T>(arguments: I, environment: impl Fn(&str) -> Option<String>) -> Result<Invocation, CliError>
where
    I: IntoIterator<Item = T>,
    T: Into<OsString>,
{
    let mut arguments = command_first(arguments.into_iter().map(Into::into).collect());
    if launches_without_saying_so(arguments.get(1)) {
        let at = arguments.len().min(1);
        arguments.insert(at, OsString::from("launch"));
    }
    let matches = match command().try_get_matches_from(arguments) {
        Ok(matches) => matches,
        Err(shown) if !shown.use_stderr() => return Ok(Invocation::Print(shown.to_string())),
        Err(mistake) => return Err(mistake.into()),
    };
    if matches.get_flag("version_verbose") {
        return Ok(Invocation::Print(verbose_version()));
    }
    match matches.subcommand() {
        Some(("launch", given)) => {
            absent::refuse_given(given)?;
            absent::refuse_environment(&environment)?;
            let flags = launch::LaunchFlags::from_arg_matches(given)?;
            Ok(Invocation::Launch(Box::new(flags.resolve(environment(TOKENS_VARIABLE))?)))
        }
        Some(("gateway", given)) => {
            absent::refuse_given(given)?;
            absent::refuse_environment(&environment)?;
            let flags = gateway::GatewayFlags::from_arg_matches(given)?;
            Ok(Invocation::Gateway(Box::new(flags.resolve()?)))
        }
        Some(("controlplane", given)) => {
            absent::refuse_environment(&environment)?;
            let flags = controlplane::ControlPlaneFlags::from_arg_matches(given)?;
            Ok(Invocation::ControlPlane(Box::new(flags.resolve(environment(TOKENS_VARIABLE))?)))
        }
        Some(("cluster", given)) => {
            let flags = cluster::ClusterFlags::from_arg_matches(given)?;
            Ok(Invocation::Cluster(Box::new(flags.resolve(environment)?)))
        }
        Some(("completions", given)) => {
            let Completions { shell } = Completions::from_arg_matches(given)?;
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut command(), "smg", &mut script);
            Ok(Invocation::Print(String::from_utf8_lossy(&script).into_owned()))
        }
        Some(("context", given)) => {
            let verbs::VerbFlags { verb, target } = verbs::VerbFlags::<ContextVerb>::from_arg_matches(given)?;
            let output = target.output;
            Ok(Invocation::Context(Box::new(ContextArgs { verb, target: target.resolve(environment)?, output })))
        }
        Some((name, given)) => match admin_verb(name, given)? {
            Some((verb, target)) => Ok(Invocation::Admin(Box::new(AdminArgs::new(verb, target, environment)?))),
            None => Ok(Invocation::Print(command().render_help().to_string())),
        },
        None => Ok(Invocation::Print(command().render_help().to_string())),
    }
}

/// `smg completions`.
#[derive(Debug, Clone, clap::Args)]
struct Completions {
    /// The shell
    #[arg(value_enum)]
    shell: clap_complete::Shell,
}

/// A command of operators.
fn admin_verb(name: &str, given: &clap::ArgMatches) -> Result<Option<(Verb, target::TargetFlags)>, CliError> {
    use verbs::{ListFlags, VerbFlags};
    Ok(Some(match name {
        "workers" => {
            let VerbFlags { verb, target } = VerbFlags::from_arg_matches(given)?;
            (Verb::Workers(verb), target)
        }
        "policies" => {
            let VerbFlags { verb, target } = VerbFlags::from_arg_matches(given)?;
            (Verb::Policies(verb), target)
        }
        "pairing" => {
            let VerbFlags { verb, target } = VerbFlags::from_arg_matches(given)?;
            (Verb::Pairing(verb), target)
        }
        "tokens" => {
            let VerbFlags { verb, target } = VerbFlags::from_arg_matches(given)?;
            (Verb::Tokens(verb), target)
        }
        "gateways" => {
            let ListFlags { list, target } = ListFlags::from_arg_matches(given)?;
            (Verb::Gateways(list), target)
        }
        "admission" => {
            let ListFlags { list, target } = ListFlags::from_arg_matches(given)?;
            (Verb::Admission(list), target)
        }
        "audit" => {
            let ListFlags { list, target } = ListFlags::from_arg_matches(given)?;
            (Verb::Audit(list), target)
        }
        _ => return Ok(None),
    }))
}

/// The commands of operators.
fn admin_commands() -> Vec<clap::Command> {
    use verbs::{AdmissionFlags, AuditFlags, GatewaysFlags, ListFlags, VerbFlags};
    fn verbs<V: clap::Subcommand>(name: &'static str, about: &'static str) -> clap::Command {
        let command = VerbFlags::<V>::augment_args(clap::Command::new(name));
        command.about(about).subcommand_required(true).arg_required_else_help(true)
    }
    fn list<F: clap::Args>(name: &'static str, about: &'static str) -> clap::Command {
        ListFlags::<F>::augment_args(clap::Command::new(name)).about(about)
    }
    vec![
        verbs::<WorkersVerb>("workers", "Show, register, change, drain or remove workers"),
        verbs::<PoliciesVerb>("policies", "Show or change policy documents"),
        verbs::<PairingVerb>("pairing", "Show which prefill pairs with which decode, and why others do not"),
        list::<GatewaysFlags>("gateways", "Show the gateways"),
        list::<AdmissionFlags>("admission", "Show which gateway holds how many slots of which decode worker"),
        verbs::<TokensVerb>("tokens", "Show, create or revoke admin tokens"),
        list::<AuditFlags>("audit", "Show who changed what"),
        verbs::<ContextVerb>("context", "Name fleets and how to reach them, in a configuration file"),
        Completions::augment_args(clap::Command::new("completions")).about("Print the completions of a shell"),
    ]
}

/// `smg -o json workers list` means `smg workers -o json list`: what every command of operators takes may stand before it too.
fn command_first(mut arguments: Vec<OsString>) -> Vec<OsString> {
    let flags = target::TargetFlags::augment_args(clap::Command::new("smg").disable_help_flag(true));
    let takes = |before: &[OsString]| flags.clone().try_get_matches_from(before).is_ok();
    let names = |argument: &OsString| OPERATORS.iter().any(|name| argument == name);
    let found = (2..arguments.len()).find(|at| names(&arguments[*at]) && takes(&arguments[..*at]));
    if let Some(at) = found {
        let command = arguments.remove(at);
        arguments.insert(1, command);
    }
    arguments
}

/// True when the first argument is not a subcommand and asks for neither help nor a version.
fn launches_without_saying_so(first: Option<&OsString>) -> bool {
    const OWN: [&str; 5] = ["-h", "--help", "-V", "--version", "--version-verbose"];
    match first.map(|first| first.to_string_lossy()) {
        None => true,
        Some(first) => first.starts_with('-') && !OWN.contains(&first.as_ref()),
    }
}

/// The whole command, with the rows of [`absent`] declared on the subcommands that serve requests.
fn command() -> clap::Command {
    // The descriptions come last: flattening a group would replace them with the group's own.
    let launch = absent::declare(launch::LaunchFlags::augment_args(clap::Command::new("launch")))
        .visible_alias("start")
        .about("Run a control plane and a gateway in one process (the default)");
    let controlplane = controlplane::ControlPlaneFlags::augment_args(clap::Command::new("controlplane"))
        .about("Run one member of the replicated control plane");
    let gateway = absent::declare(gateway::GatewayFlags::augment_args(clap::Command::new("gateway")))
        .about("Run one data-plane gateway");
    let cluster = cluster::ClusterFlags::augment_args(clap::Command::new("cluster"))
        .about("Show or change the members of the control plane, or make the certificates of a fleet")
        .subcommand_required(true)
        .arg_required_else_help(true);
    clap::Command::new("smg")
        .about("Gateway fleet for prefill/decode disaggregated LLM serving")
        .version(env!("CARGO_PKG_VERSION"))
        .propagate_version(true)
        .arg(
            clap::Arg::new("version_verbose")
                .long("version-verbose")
                .global(true)
                .action(clap::ArgAction::SetTrue)
                .help("Print the version with build details"),
        )
        .subcommand(launch)
        .subcommand(controlplane)
        .subcommand(gateway)
        .subcommand(cluster)
        .subcommands(admin_commands())
}

fn verbose_version() -> String {
    let profile = if cfg!(debug_assertions) { "debug" } else { "release" };
    format!(
        "smg {}\nprofile: {profile}\ntarget: {}-{}\nminimum rustc: {}\n",
        env!("CARGO_PKG_VERSION"),
        std::env::consts::ARCH,
        std::env::consts::OS,
        env!("CARGO_PKG_RUST_VERSION"),
    )
}
