//! `smg launch`: control plane and gateway in one process.

use std::net::SocketAddr;
use std::path::PathBuf;

use clap::Args;
use smg_fleet::{PolicyDocument, WorkerSpec};
use smg_gateway::{Keys, TextOptions};
use smg_net::tls::ClientFiles;

use super::access::{KeyFlags, TokenArgs, TokenFlags};
use super::error::CliError;
use super::health::HealthFlags;
use super::limits::EdgeArgs;
use super::part_tls::PartTlsFlags;
use super::policy::PolicyFlags;
use super::process::{ProcessArgs, check_ports_differ};
use super::protection::ProtectionFlags;
use super::resilience::ResilienceFlags;
use super::tls::WorkerTlsFlags;
use super::tuning::TuningFlags;
use super::worker::WorkerFlags;

/// The flags of `smg launch` as written.
#[derive(Debug, Clone, Args)]
pub(super) struct LaunchFlags {
    #[command(flatten)]
    workers: WorkerFlags,
    #[command(flatten)]
    policy: PolicyFlags,
    #[command(flatten)]
    tuning: TuningFlags,
    #[command(flatten)]
    resilience: ResilienceFlags,
    #[command(flatten)]
    protection: ProtectionFlags,
    #[command(flatten)]
    health: HealthFlags,
    #[command(flatten)]
    keys: KeyFlags,
    #[command(flatten)]
    tokens: TokenFlags,
    #[command(flatten)]
    edge: EdgeArgs,
    #[command(flatten)]
    worker_tls: WorkerTlsFlags,
    #[command(flatten)]
    process: ProcessArgs,
    #[command(flatten)]
    fleet: FleetFlags,
    #[command(flatten)]
    token_wire: TokenWireFlags,
}

/// What `smg launch` keeps, and who may reach it.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Fleet state")]
struct FleetFlags {
    /// Directory of the durable fleet state [default: a temporary one that dies with the process]
    #[arg(long, value_name = "DIR")]
    data_dir: Option<PathBuf>,
    /// Serve other gateways on this address too; needs --tls-dir or --insecure
    #[arg(long, value_name = "IP:PORT")]
    controlplane_listen: Option<SocketAddr>,
    /// Name of this gateway in the fleet [default: random]
    #[arg(long, value_name = "NAME")]
    gateway_id: Option<String>,
    #[command(flatten)]
    part_tls: PartTlsFlags,
}

/// Flags that concern workers with a gRPC wire only: the gateway turns their clients' words into tokens, and tokens into answers.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "gRPC workers")]
pub(super) struct TokenWireFlags {
    /// Directory of the model whose tokenizer is used where workers report none
    #[arg(long, alias = "model", value_name = "PATH")]
    model_path: Option<PathBuf>,
    /// Directory or file of the tokenizer to use instead
    #[arg(long, value_name = "PATH")]
    tokenizer_path: Option<PathBuf>,
    /// File with a chat template that replaces those of all models
    #[arg(long, value_name = "FILE")]
    chat_template: Option<PathBuf>,
    /// How tool calls are found in the output, unless a worker's label `tool_parser` says so [default: by the model's id]
    #[arg(long, value_name = "NAME")]
    tool_call_parser: Option<String>,
    /// How reasoning is told apart in the output, unless a worker's label `reasoning_parser` says so [default: by the model's id]
    #[arg(long, value_name = "NAME")]
    reasoning_parser: Option<String>,
    /// Time a request waits for a decode slot, in seconds [default: 30]
    #[arg(long, value_name = "SECONDS")]
    pd_admission_wait_secs: Option<u64>,
}

impl TokenWireFlags {
    /// Writes what was given into the start-up policy document.
    fn write_to(&self, document: &mut PolicyDocument) {
        document.pd_admission_wait_secs = self.pd_admission_wait_secs;
    }

    /// Engines give a request up at their bootstrap deadline, 120 s on TokenSpeed: who waits longer in the gateway waits in vain.
    fn wait_warning(&self) -> Option<String> {
        let secs = self.pd_admission_wait_secs.filter(|secs| *secs >= 120)?;
        Some(format!(
            "--pd-admission-wait-secs {secs} is not below the engines' bootstrap deadline (120 s on TokenSpeed)"
        ))
    }

    /// What a gateway without a fleet of its own should know about a flag that belongs to the fleet.
    pub(super) fn fleet_warning(&self) -> Option<String> {
        self.pd_admission_wait_secs?;
        Some("--pd-admission-wait-secs has no effect here: it is fleet-wide (PUT /fleet/policies/default)".to_owned())
    }

    /// How a gateway turns words into tokens.
    pub(super) fn text(&self) -> Result<TextOptions, CliError> {
        let options = TextOptions {
            tokenizer_path: self.tokenizer_path.clone(),
            model_path: self.model_path.clone(),
            chat_template: self.chat_template.clone(),
            tool_parser: self.tool_call_parser.clone(),
            reasoning_parser: self.reasoning_parser.clone(),
            ..TextOptions::default()
        };
        options.check().map_err(|reason| CliError::refused("--tool-call-parser, --reasoning-parser", reason))?;
        Ok(options)
    }
}

/// A checked `smg launch`.
#[derive(Debug, Clone)]
pub struct LaunchArgs {
    /// Metrics, logs, threads, shutdown.
    pub process: ProcessArgs,
    /// The client edge of the gateway.
    pub edge: EdgeArgs,
    /// TLS towards workers.
    pub worker_tls: ClientFiles,
    /// Keys of the client edge.
    pub keys: Keys,
    /// Who may call the admin API.
    pub tokens: TokenArgs,
    /// True when prefill and decode workers were asked for.
    pub pd_disaggregation: bool,
    /// Workers named on the command line, in the order regular, prefill, decode; their URLs are distinct.
    pub startup_workers: Vec<WorkerSpec>,
    /// What the fleet-wide flags ask for; fields of flags that were not given are absent.
    pub startup_policy: PolicyDocument,
    /// Directory of the durable fleet state; none = state dies with the process.
    pub data_dir: Option<PathBuf>,
    /// Where other gateways are served, if at all.
    pub controlplane_listen: Option<SocketAddr>,
    /// Directory of the certificate that they are served with; none = without TLS between parts.
    pub tls_dir: Option<PathBuf>,
    /// Name of this gateway in the fleet, when it was given.
    pub gateway_id: Option<String>,
    /// How requests become tokens where workers speak gRPC.
    pub text: TextOptions,
    /// What the operator should know; to be logged once logging runs.
    pub warnings: Vec<String>,
}

impl LaunchFlags {
    /// Checks the flags against each other.
    pub(super) fn resolve(self, tokens: Option<String>) -> Result<LaunchArgs, CliError> {
        self.process.check()?;
        self.edge.check()?;
        let worker_tls = self.worker_tls.resolve()?;
        let startup_workers = self.workers.specs()?;
        self.policy.check(self.workers.legs())?;
        self.protection.check()?;
        let mut listeners = vec![("--port", self.edge.port), ("--prometheus-port", self.process.prometheus_port)];
        listeners.extend(self.fleet.controlplane_listen.map(|address| ("--controlplane-listen", address.port())));
        check_ports_differ(&listeners)?;
        let tls_dir = match self.fleet.controlplane_listen {
            Some(_) => self.fleet.part_tls.required("--controlplane-listen")?,
            None if self.fleet.part_tls.given() => {
                return Err(CliError::conflict("--tls-dir", "has no use without --controlplane-listen"));
            }
            None => None,
        };
        let mut startup_policy = PolicyDocument::default();
        self.policy.write_to(&mut startup_policy);
        self.token_wire.write_to(&mut startup_policy);
        self.tuning.write_to(&mut startup_policy);
        self.resilience.write_to(&mut startup_policy);
        self.protection.write_to(&mut startup_policy);
        self.health.write_to(&mut startup_policy);
        // What no single flag can know, such as that lengths must ascend.
        startup_policy.validate("").map_err(|error| CliError::conflict("policy flags", error.to_string()))?;
        let (keys, tokens) = (self.keys.resolve()?, self.tokens.resolve(tokens)?);
        let mut warnings = self.warnings();
        warnings.extend(self.edge.open_warning(&keys));
        if keys.gateway.is_some()
            && !startup_workers.is_empty()
            && startup_workers.iter().all(|spec| spec.api_key.is_none())
        {
            let hint = "--api-key is not sent to the workers of --prefill, --decode and --worker-urls; --worker-api-key gives theirs";
            warnings.push(hint.to_owned());
        }
        Ok(LaunchArgs {
            pd_disaggregation: self.workers.pd_disaggregation,
            startup_workers,
            startup_policy,
            process: self.process,
            edge: self.edge,
            worker_tls,
            keys,
            tokens,
            data_dir: self.fleet.data_dir,
            controlplane_listen: self.fleet.controlplane_listen,
            tls_dir,
            gateway_id: self.fleet.gateway_id,
            text: self.token_wire.text()?,
            warnings,
        })
    }

    fn warnings(&self) -> Vec<String> {
        let mut warnings: Vec<String> = self.token_wire.wait_warning().into_iter().collect();
        if !self.workers.pd_disaggregation {
            let unused = self.workers.leg_flags().into_iter();
            warnings.extend(unused.map(|flag| format!("{flag} has no effect without --pd-disaggregation")));
            let early = self.policy.leg_flags().into_iter();
            warnings.extend(early.map(|flag| {
                format!("{flag} without --pd-disaggregation counts only for prefill and decode workers added later")
            }));
        }
        if self.policy.dp_minimum_tokens_scheduler && !self.policy.dp_aware {
            warnings.push("--dp-minimum-tokens-scheduler has no effect without --dp-aware".to_owned());
        }
        if self.fleet.part_tls.insecure {
            warnings.push("--insecure: the parts of the fleet speak without TLS".to_owned());
        }
        warnings
    }
}
