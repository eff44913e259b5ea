//! `smg gateway`: one data-plane gateway that follows a control plane.

use std::path::PathBuf;

use clap::Args;
use smg_gateway::{Keys, TextOptions};
use smg_net::tls::ClientFiles;

use super::access::KeyFlags;
use super::error::CliError;
use super::launch::TokenWireFlags;
use super::limits::EdgeArgs;
use super::part_tls::PartTlsFlags;
use super::process::{ProcessArgs, check_ports_differ};
use super::tls::WorkerTlsFlags;
use super::values;

/// The flags of `smg gateway` as written.
#[derive(Debug, Clone, Args)]
pub(super) struct GatewayFlags {
    #[command(flatten)]
    fleet: FollowerFlags,
    #[command(flatten)]
    keys: KeyFlags,
    #[command(flatten)]
    edge: EdgeArgs,
    #[command(flatten)]
    worker_tls: WorkerTlsFlags,
    #[command(flatten)]
    process: ProcessArgs,
    #[command(flatten)]
    token_wire: TokenWireFlags,
}

/// Which fleet this gateway belongs to.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Fleet")]
struct FollowerFlags {
    /// Members of the control plane; port 7400 where none is given
    #[arg(long, required = true, value_delimiter = ',', num_args = 1.., value_name = "HOST:PORT,…",
          value_parser = values::control_plane_address)]
    controlplane: Vec<String>,
    /// Directory of the last known good snapshot; with it the gateway starts while the control plane is away
    #[arg(long, value_name = "DIR")]
    data_dir: Option<PathBuf>,
    /// Name of this gateway in the fleet [default: random]
    #[arg(long, value_name = "NAME")]
    gateway_id: Option<String>,
    #[command(flatten)]
    part_tls: PartTlsFlags,
}

/// A checked `smg gateway`.
#[derive(Debug, Clone)]
pub struct GatewayArgs {
    /// Metrics, logs, threads, shutdown.
    pub process: ProcessArgs,
    /// The client edge.
    pub edge: EdgeArgs,
    /// Directory of this gateway's certificate; none = without TLS between parts.
    pub tls_dir: Option<PathBuf>,
    /// TLS towards workers.
    pub worker_tls: ClientFiles,
    /// Keys of the client edge.
    pub keys: Keys,
    /// Members of the control plane, each `HOST:PORT`; at least one.
    pub controlplane: Vec<String>,
    /// Directory of the last known good snapshot.
    pub data_dir: Option<PathBuf>,
    /// Name of this gateway in the fleet, when it was given.
    pub gateway_id: Option<String>,
    /// How requests become tokens where workers speak gRPC.
    pub text: TextOptions,
    /// What the operator should know; to be logged once logging runs.
    pub warnings: Vec<String>,
}

impl GatewayFlags {
    /// Checks the flags against each other.
    pub(super) fn resolve(self) -> Result<GatewayArgs, CliError> {
        self.process.check()?;
        self.edge.check()?;
        check_ports_differ(&[("--port", self.edge.port), ("--prometheus-port", self.process.prometheus_port)])?;
        let tls_dir = self.fleet.part_tls.required("smg gateway")?;
        let keys = self.keys.resolve()?;
        let mut warnings: Vec<String> = self.token_wire.fleet_warning().into_iter().collect();
        warnings.extend(self.edge.open_warning(&keys));
        if tls_dir.is_none() {
            warnings.push("--insecure: the control plane is reached without TLS".to_owned());
        }
        Ok(GatewayArgs {
            process: self.process,
            edge: self.edge,
            worker_tls: self.worker_tls.resolve()?,
            keys,
            tls_dir,
            controlplane: self.fleet.controlplane,
            data_dir: self.fleet.data_dir,
            gateway_id: self.fleet.gateway_id,
            text: self.token_wire.text()?,
            warnings,
        })
    }
}
