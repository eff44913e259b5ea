//! `smg controlplane`: one member of the replicated control plane.

use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4};
use std::path::PathBuf;

use clap::{Args, ValueEnum};
use smg_net::tls::ClientFiles;

use super::access::{TokenArgs, TokenFlags};
use super::error::CliError;
use super::part_tls::PartTlsFlags;
use super::process::{ProcessArgs, check_ports_differ};
use super::tls::WorkerTlsFlags;
use super::values;

/// Why nothing is kept in etcd here.
pub(super) const WITHOUT_ETCD: &str = "this smg was built without etcd: take one built with `--features etcd`";

/// What keeps the fleet state.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
#[value(rename_all = "lower")]
enum StoreName {
    /// The members themselves.
    Raft,
    /// An etcd cluster.
    Etcd,
}

const fn any_address(port: u16) -> SocketAddr {
    SocketAddr::V4(SocketAddrV4::new(Ipv4Addr::UNSPECIFIED, port))
}

/// The flags of `smg controlplane` as written.
#[derive(Debug, Clone, Args)]
pub(super) struct ControlPlaneFlags {
    /// Directory of the durable fleet state; none with --store etcd
    #[arg(long, value_name = "DIR")]
    data_dir: Option<PathBuf>,
    /// Address of the admin API and of the gateways' sync service; port 0 takes a free one
    #[arg(long, value_name = "IP:PORT", default_value_t = any_address(7400))]
    listen: SocketAddr,
    /// Address for the other members; port 0 takes a free one
    #[arg(long, value_name = "IP:PORT", default_value_t = any_address(7401))]
    peer_listen: SocketAddr,
    /// Found a new fleet if the directory, or etcd below the prefix, is empty
    #[arg(long, conflicts_with = "join")]
    bootstrap: bool,
    /// Join the fleet of these members if the directory is empty: their --peer-listen addresses; port 7401 where none is given
    #[arg(long, value_delimiter = ',', num_args = 1.., value_name = "HOST:PORT,…", value_parser = values::peer_address)]
    join: Vec<String>,
    /// Host under which other members, gateways and operators reach this one [default: the address it listens on, or the host's name]
    #[arg(long, value_name = "HOST", value_parser = values::host)]
    advertise: Option<String>,
    /// Time between two signs of life of the leader, in milliseconds
    #[arg(long, value_name = "MILLIS", default_value_t = 250, value_parser = clap::value_parser!(u64).range(10..=10_000))]
    heartbeat_interval_ms: u64,
    /// Time without a sign of life in which nobody stands against the leader, in milliseconds; an election begins 1.5 to 2 times as late
    #[arg(long, value_name = "MILLIS", default_value_t = 1_000, value_parser = clap::value_parser!(u64).range(50..=60_000))]
    election_timeout_ms: u64,
    /// What keeps the fleet state: the members themselves, or an etcd cluster (in builds with the feature etcd)
    #[arg(long, value_enum, default_value = "raft")]
    store: StoreName,
    #[command(flatten)]
    etcd: EtcdFlags,
    /// Leave the compaction of etcd's history to others: it is that of all users of the etcd cluster
    #[arg(long, help_heading = "etcd")]
    etcd_no_compaction: bool,
    #[command(flatten)]
    part_tls: PartTlsFlags,
    #[command(flatten)]
    tokens: TokenFlags,
    #[command(flatten)]
    worker_tls: WorkerTlsFlags,
    #[command(flatten)]
    process: ProcessArgs,
}

/// Which etcd cluster.
#[derive(Debug, Clone, PartialEq, Eq, Args)]
#[command(next_help_heading = "etcd")]
pub struct EtcdFlags {
    /// Members of the etcd cluster
    #[arg(long, value_delimiter = ',', num_args = 1.., value_name = "URL,…")]
    etcd_endpoints: Vec<String>,
    /// What the keys of this fleet begin with
    #[arg(long, value_name = "PREFIX", default_value = "/smg")]
    etcd_prefix: String,
    /// Root of the certificates of etcd besides those of the system; PEM
    #[arg(long, value_name = "FILE")]
    etcd_ca_path: Option<PathBuf>,
    /// Certificate to present to etcd; PEM
    #[arg(long, value_name = "FILE", requires = "etcd_key_path")]
    etcd_cert_path: Option<PathBuf>,
    /// Key of that certificate; PEM
    #[arg(long, value_name = "FILE", requires = "etcd_cert_path")]
    etcd_key_path: Option<PathBuf>,
}

impl EtcdFlags {
    /// Whether an etcd cluster is named.
    pub(super) fn is_given(&self) -> bool {
        !self.etcd_endpoints.is_empty()
    }

    /// Checks the flags. `compact` = etcd is told to forget old revisions.
    pub(super) fn resolve(self, compact: bool) -> Result<EtcdArgs, CliError> {
        if self.etcd_endpoints.is_empty() {
            return Err(CliError::conflict("--store etcd", "needs --etcd-endpoints"));
        }
        let wrong = self.etcd_endpoints.iter().find(|url| !url.starts_with("http://") && !url.starts_with("https://"));
        if let Some(wrong) = wrong {
            return Err(CliError::conflict(
                "--etcd-endpoints",
                format!("{wrong}: http://HOST:PORT or https://HOST:PORT"),
            ));
        }
        Ok(EtcdArgs {
            endpoints: self.etcd_endpoints,
            prefix: self.etcd_prefix,
            tls: ClientFiles {
                roots: self.etcd_ca_path.into_iter().collect(),
                identity: self.etcd_cert_path.zip(self.etcd_key_path),
            },
            compact,
        })
    }
}

/// What keeps the fleet state.
#[derive(Debug, Clone)]
#[cfg_attr(not(feature = "etcd"), allow(dead_code))]
pub enum StoreArgs {
    /// The members themselves, each in a directory.
    Raft {
        /// Directory of the durable fleet state.
        data_dir: PathBuf,
    },
    /// An etcd cluster.
    Etcd(EtcdArgs),
}

/// Which etcd cluster. Never made where it was not built in.
#[derive(Debug, Clone)]
#[cfg_attr(not(feature = "etcd"), allow(dead_code))]
pub struct EtcdArgs {
    /// Its members.
    pub endpoints: Vec<String>,
    /// What the keys of this fleet begin with.
    pub prefix: String,
    /// TLS towards `https://` endpoints.
    pub tls: ClientFiles,
    /// Whether etcd is told to forget old revisions.
    pub compact: bool,
}

/// A checked `smg controlplane`.
#[derive(Debug, Clone)]
pub struct ControlPlaneArgs {
    /// Metrics, logs, threads, shutdown.
    pub process: ProcessArgs,
    /// What keeps the fleet state.
    pub store: StoreArgs,
    /// Address of the admin API and of the sync service.
    pub listen: SocketAddr,
    /// Address for the other members.
    pub peer_listen: SocketAddr,
    /// Directory of this member's certificate; none = without TLS between parts.
    pub tls_dir: Option<PathBuf>,
    /// TLS towards workers.
    pub worker_tls: ClientFiles,
    /// Who may call the admin API.
    pub tokens: TokenArgs,
    /// True when a new fleet may be founded in an empty directory.
    pub bootstrap: bool,
    /// Members whose fleet an empty directory joins, each `HOST:PORT`.
    pub join: Vec<String>,
    /// Host under which others reach this member, when it was given.
    pub advertise: Option<String>,
    /// Time between two signs of life of the leader.
    pub heartbeat_interval_ms: u64,
    /// Time without a sign of life in which nobody stands against the leader.
    pub election_timeout_ms: u64,
    /// What the operator should know; to be logged once logging runs.
    pub warnings: Vec<String>,
}

impl ControlPlaneFlags {
    /// Checks the flags against each other.
    pub(super) fn resolve(self, tokens: Option<String>) -> Result<ControlPlaneArgs, CliError> {
        self.process.check()?;
        let store = match (self.store, self.data_dir) {
            (StoreName::Etcd, _) if !cfg!(feature = "etcd") => {
                let reason = format!("{WITHOUT_ETCD}, or let the members keep the state themselves (--store raft)");
                return Err(CliError::refused("--store etcd", reason));
            }
            (StoreName::Etcd, _) if !self.join.is_empty() => {
                return Err(CliError::conflict("--join", "with --store etcd, members find each other in etcd"));
            }
            (StoreName::Etcd, _) => StoreArgs::Etcd(self.etcd.resolve(!self.etcd_no_compaction)?),
            (StoreName::Raft, _) if self.etcd.is_given() => {
                return Err(CliError::conflict("--etcd-endpoints", "needs --store etcd"));
            }
            (StoreName::Raft, Some(data_dir)) => StoreArgs::Raft { data_dir },
            (StoreName::Raft, None) => {
                return Err(CliError::conflict("--data-dir", "names the directory of the fleet state, and is needed"));
            }
        };
        if self.election_timeout_ms < 3 * self.heartbeat_interval_ms {
            let reason = "must be at least three times --heartbeat-interval-ms, or one lost message is an election";
            return Err(CliError::conflict("--election-timeout-ms", reason));
        }
        let tls_dir = self.part_tls.required("smg controlplane")?;
        check_ports_differ(&[
            ("--listen", self.listen.port()),
            ("--peer-listen", self.peer_listen.port()),
            ("--prometheus-port", self.process.prometheus_port),
        ])?;
        Ok(ControlPlaneArgs {
            worker_tls: self.worker_tls.resolve()?,
            tokens: self.tokens.resolve(tokens)?,
            process: self.process,
            store,
            listen: self.listen,
            peer_listen: self.peer_listen,
            bootstrap: self.bootstrap,
            join: self.join,
            advertise: self.advertise,
            heartbeat_interval_ms: self.heartbeat_interval_ms,
            election_timeout_ms: self.election_timeout_ms,
            warnings: match &tls_dir {
                None => {
                    vec!["--insecure: the control plane is served without TLS, to everybody on the network".to_owned()]
                }
                Some(_) => Vec::new(),
            },
            tls_dir,
        })
    }
}
