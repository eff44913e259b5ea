//! Flags of every command that speaks to the admin API: whom to ask, as whom, and how results are written.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use smg_fleet::Secret;
use smg_net::mutual::Files;
use uuid::Uuid;

use super::error::CliError;
use super::values;

/// How results are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
#[value(rename_all = "lower")]
pub enum Output {
    /// For people.
    Table,
    /// For people with room.
    Wide,
    /// The answer of the API; of a watch one line each.
    Json,
    /// The same as YAML.
    Yaml,
}

/// Where the admin API is, and how it is spoken to.
#[derive(Debug, Clone, Args)]
pub(super) struct TargetFlags {
    /// Members of the control plane, or gateways, asked in turn until one answers; port 7400 where none is given. With `https://` before it
    /// a server is known by its host name, as gateways are [default: that of the context, else 127.0.0.1:7400]
    #[arg(long, visible_alias = "server", global = true, value_delimiter = ',', value_name = "HOST:PORT,…",
          value_parser = values::admin_address)]
    controlplane: Vec<String>,
    /// Entry of the configuration file that says whom to ask, and as whom; see `smg context` [env: SMG_CONTEXT]
    #[arg(long, global = true, value_name = "NAME")]
    context: Option<String>,
    /// Directory with ca.crt, tls.crt and tls.key, as `smg cluster ca issue --role admin` makes it [env: SMG_TLS_DIR]
    #[arg(long, global = true, value_name = "DIR", conflicts_with_all = ["ca", "cert", "key"])]
    tls_dir: Option<PathBuf>,
    /// Roots of the members' certificates; PEM. With it the members are spoken to over TLS [env: SMG_CA]
    #[arg(long, global = true, value_name = "FILE")]
    ca: Option<PathBuf>,
    /// Certificate to present; PEM [env: SMG_CERT]
    #[arg(long, global = true, value_name = "FILE")]
    cert: Option<PathBuf>,
    /// Key of that certificate; PEM [env: SMG_KEY]
    #[arg(long, global = true, value_name = "FILE")]
    key: Option<PathBuf>,
    /// Token of the admin API; other users of this host can see it, unlike one in a file or in the environment [env: SMG_TOKEN]
    #[arg(long, global = true, value_name = "TOKEN", conflicts_with = "token_file")]
    token: Option<Secret>,
    /// File whose content is a token of the admin API [env: SMG_TOKEN_FILE]
    #[arg(long, global = true, value_name = "FILE")]
    token_file: Option<PathBuf>,
    /// How results are written
    #[arg(short, long, global = true, value_enum, default_value = "table")]
    pub(super) output: Output,
}

/// What is trusted and presented.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OperatorTls {
    /// Roots of the members' certificates.
    pub roots: PathBuf,
    /// Certificate and key.
    pub identity: Option<(PathBuf, PathBuf)>,
}

/// Where the admin API is, and how it is spoken to.
#[derive(Debug, Clone, Default)]
pub struct TargetArgs {
    /// Members of the control plane or gateways, each `HOST:PORT`, or a URL without a path; empty = those of the context.
    pub controlplane: Vec<String>,
    /// TLS; none = without.
    pub tls: Option<OperatorTls>,
    /// A token of the admin API.
    pub token: Option<Secret>,
    /// File with a token of the admin API.
    pub token_file: Option<PathBuf>,
    /// The entry of the configuration file that was asked for.
    pub context: Option<String>,
    /// Where the configuration file is; none = there is no place for one.
    pub configuration: Option<PathBuf>,
}

impl TargetFlags {
    /// Flags win over the environment, and what belongs together comes from one of them.
    pub(super) fn resolve(self, environment: impl Fn(&str) -> Option<String>) -> Result<TargetArgs, CliError> {
        let path = |name: &str| environment(name).map(PathBuf::from);
        let (mut tls_dir, mut ca, mut cert, mut key) = (self.tls_dir, self.ca, self.cert, self.key);
        if tls_dir.is_none() && ca.is_none() && cert.is_none() && key.is_none() {
            (tls_dir, ca, cert, key) = (path("SMG_TLS_DIR"), path("SMG_CA"), path("SMG_CERT"), path("SMG_KEY"));
        }
        let tls = match (tls_dir, ca, cert, key) {
            (Some(directory), ..) => {
                let Files { roots, certificate, key } = Files::within(&directory);
                Some(OperatorTls { roots, identity: Some((certificate, key)) })
            }
            (None, Some(roots), None, None) => Some(OperatorTls { roots, identity: None }),
            (None, Some(roots), Some(cert), Some(key)) => Some(OperatorTls { roots, identity: Some((cert, key)) }),
            (None, None, None, None) => None,
            (None, None, ..) => return Err(CliError::conflict("--cert", "needs --ca")),
            (None, Some(_), Some(_), None) => return Err(CliError::conflict("--cert", "needs --key")),
            (None, Some(_), None, Some(_)) => return Err(CliError::conflict("--key", "needs --cert")),
        };
        let (mut token, mut token_file) = (self.token, self.token_file);
        if token.is_none() && token_file.is_none() {
            (token, token_file) = (environment("SMG_TOKEN").map(Secret::from), path("SMG_TOKEN_FILE"));
        }
        let context = self.context.or_else(|| environment("SMG_CONTEXT"));
        let configuration = configuration(environment);
        Ok(TargetArgs { controlplane: self.controlplane, tls, token, token_file, context, configuration })
    }
}

/// Where the configuration file is: where `SMG_CONFIG` says, else below the place that the XDG base directory specification names.
pub(super) fn configuration(environment: impl Fn(&str) -> Option<String>) -> Option<PathBuf> {
    let given = |name: &str| environment(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let base = || given("XDG_CONFIG_HOME").or_else(|| Some(given("HOME")?.join(".config")));
    given("SMG_CONFIG").or_else(|| Some(base()?.join("smg/config")))
}

/// Flags of every command that changes something.
#[derive(Debug, Clone, Default, PartialEq, Eq, Args)]
pub struct ChangeFlags {
    /// Say what would come of it, and change nothing
    #[arg(long)]
    pub dry_run: bool,
    /// Change it only if it still has this mod_revision
    #[arg(long, value_name = "REVISION")]
    pub expected_revision: Option<u64>,
    /// Identity of this change: given again, it is the same change [default: a new one]
    #[arg(long, value_name = "UUID")]
    pub idempotency_key: Option<Uuid>,
}
