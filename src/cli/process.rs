//! Flags of one process, whatever it runs: metrics, logs, threads, shutdown.

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;

use clap::{Args, ValueEnum};

use super::error::CliError;
use super::values;

/// Least severity that is logged. `RUST_LOG` wins over it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
#[value(rename_all = "lower")]
pub enum LogLevel {
    /// Everything.
    Trace,
    /// Routing decisions and state changes in detail.
    Debug,
    /// Normal operation.
    Info,
    /// What an operator should look at.
    Warn,
    /// Failures only.
    Error,
}

impl LogLevel {
    /// The name that a log filter understands.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Trace => "trace",
            Self::Debug => "debug",
            Self::Info => "info",
            Self::Warn => "warn",
            Self::Error => "error",
        }
    }
}

/// Metrics, logs, threads, shutdown.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Process")]
pub struct ProcessArgs {
    /// Port of the Prometheus endpoint; 0 takes a free one
    #[arg(long, default_value_t = 29000)]
    pub prometheus_port: u16,
    /// Address of the Prometheus endpoint [default: all addresses of the family of --host]
    #[arg(long, value_name = "IP")]
    pub prometheus_host: Option<IpAddr>,
    /// Bounds of the duration histograms, in seconds, rising
    #[arg(long, num_args = 1.., value_name = "SECONDS", value_parser = values::positive)]
    pub prometheus_duration_buckets: Vec<f64>,
    /// Least severity that is logged; RUST_LOG wins over it
    #[arg(long, value_enum, default_value = "info")]
    pub log_level: LogLevel,
    /// Write logs to files in this directory too, one a day for 14 days; made when it is missing
    #[arg(long, value_name = "PATH")]
    pub log_dir: Option<PathBuf>,
    /// Write logs as JSON lines
    #[arg(long)]
    pub log_json: bool,
    /// Time that running requests get at shutdown, in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 180)]
    pub shutdown_grace_period_secs: u64,
    /// Threads of the runtime [default: one for each core]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub runtime_worker_threads: Option<u16>,
}

impl ProcessArgs {
    pub(super) fn check(&self) -> Result<(), CliError> {
        if self.prometheus_duration_buckets.is_sorted_by(|low, high| low < high) {
            Ok(())
        } else {
            Err(CliError::conflict("--prometheus-duration-buckets", "the bounds must rise"))
        }
    }

    /// Where metrics are served. `api_host` gives the address family when no address was named.
    pub fn prometheus_address(&self, api_host: IpAddr) -> SocketAddr {
        let host = self.prometheus_host.unwrap_or_else(|| unspecified_like(api_host));
        SocketAddr::new(host, self.prometheus_port)
    }
}

fn unspecified_like(host: IpAddr) -> IpAddr {
    match host {
        IpAddr::V4(_) => IpAddr::V4(std::net::Ipv4Addr::UNSPECIFIED),
        IpAddr::V6(_) => IpAddr::V6(std::net::Ipv6Addr::UNSPECIFIED),
    }
}

/// Refuses two listeners on one port, whatever their addresses. Port 0 is a free port and never collides.
pub(super) fn check_ports_differ(listeners: &[(&str, u16)]) -> Result<(), CliError> {
    for (index, (flag, port)) in listeners.iter().enumerate() {
        if let Some((other, _)) = listeners[..index].iter().find(|(_, taken)| taken == port && *port != 0) {
            return Err(CliError::conflict(flag, format!("port {port} is already taken by {other}")));
        }
    }
    Ok(())
}
