//! `smg controlplane`: one member of the control plane.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use smg_controlplane::admin::access::AccessOptions;
use smg_controlplane::{ControlPlane, ControlPlaneOptions};
use smg_net::mutual::guard::Guard;
use smg_net::mutual::identity::Part;
use smg_net::mutual::{Callers, MutualTls};
use smg_net::serve::{ListenerTls, ServeOptions, Server, Shutdown, bind};
use smg_store::ClusterStore;
#[cfg(feature = "etcd")]
use smg_store::etcd::{EtcdOptions, EtcdStore};
use smg_store::raft::{Patience, RaftOptions, RaftStore};
use smg_telemetry::SMG;

use crate::certificates;
#[cfg(feature = "etcd")]
use crate::cli::EtcdArgs;
use crate::cli::{ControlPlaneArgs, StoreArgs};
use crate::process::{self, RunError, Signals};

/// Where the state lies within the data directory. The same for every way to run a control plane, so that one can follow another.
pub const STATE_DIRECTORY: &str = "controlplane";
/// How long handing the leadership over may take.
const HAND_OVER: Duration = Duration::from_secs(3);

/// Runs the member until it is told to stop, its store fails, or it was removed from the cluster.
pub async fn run(args: ControlPlaneArgs) -> Result<(), RunError> {
    let mut signals = Signals::install()?;
    args.warnings.iter().for_each(|warning| tracing::warn!(target: SMG, "{warning}"));
    let metrics = process::metrics(&args.process)?;
    let metrics_address = args.process.prometheus_address(args.listen.ip());
    let metrics_address = process::serve_metrics(metrics_address, Arc::clone(&metrics))?;
    let part = |directory: &PathBuf| certificates::of_part(directory, Part::ControlPlane, &metrics);
    let tls = args.tls_dir.as_ref().map(part).transpose()?;
    // What is wrong with these files is said before this member is one.
    let access = process::access(&args.tokens, None)?;
    let place = Place { args: &args, tls, access, metrics, metrics_address };
    match &args.store {
        StoreArgs::Raft { data_dir } => place.run_raft(data_dir, &mut signals).await,
        #[cfg(feature = "etcd")]
        StoreArgs::Etcd(etcd) => place.run_etcd(etcd, &mut signals).await,
        #[cfg(not(feature = "etcd"))]
        StoreArgs::Etcd(_) => Err(RunError::start("--store etcd", "this smg was built without etcd")),
    }
}

/// What a member needs, whatever keeps its state.
struct Place<'a> {
    args: &'a ControlPlaneArgs,
    tls: Option<Arc<MutualTls>>,
    access: AccessOptions,
    metrics: Arc<smg_telemetry::Metrics>,
    metrics_address: SocketAddr,
}

impl Place<'_> {
    /// How a listener serves other parts.
    fn listener(&self, callers: Callers, name: &str) -> ServeOptions {
        let tls = self.tls.clone().map(|tls| ListenerTls::Parts(tls, callers));
        let observer = Some(process::count_refusals(&self.metrics, name));
        ServeOptions { tls, observer, ..ServeOptions::default() }
    }

    async fn run_raft(self, data_dir: &Path, signals: &mut Signals) -> Result<(), RunError> {
        let args = self.args;
        // Bound first: its port is part of the address that the other members are told.
        let peers = bind(args.peer_listen)
            .map_err(|error| RunError::start(&format!("other members on {}", args.peer_listen), error))?;
        let peer_address = peers.local_addr().map_err(|error| RunError::start("other members", error))?;
        let options = RaftOptions { tls: self.tls.clone(), ..options(args, data_dir, peer_address) };
        tracing::info!(target: SMG, peers = options.address, api = options.api_address, "this member's addresses");
        let store = tokio::select! {
            store = RaftStore::open(options) => store?,
            // It may wait for the cluster that it joins.
            () = signals.next() => return Ok(()),
        };
        let peer_shutdown = Shutdown::default();
        let peer_server = Server::new(self.listener(Callers::Certified, "peers"), peer_shutdown.clone());
        {
            let (server, service) = (peer_server.clone(), Guard::new(store.peer_service(), Part::ControlPlane));
            smg_net::spawn("peers", async move { server.listen(peers, service).await });
        }
        let ended = self.serve(Arc::clone(&store) as _, store.retired(), signals).await;
        store.shutdown().await;
        peer_shutdown.now();
        peer_server.drain(Duration::ZERO).await;
        ended
    }

    #[cfg(feature = "etcd")]
    async fn run_etcd(self, etcd: &EtcdArgs, signals: &mut Signals) -> Result<(), RunError> {
        let tls = etcd.tls.load().map_err(|error| RunError::start("TLS towards etcd", error))?;
        let options = EtcdOptions {
            tls: Some(tls),
            bootstrap: self.args.bootstrap,
            api_address: api_address(self.args),
            compact: etcd.compact,
            ..EtcdOptions::new(etcd.endpoints.clone(), &etcd.prefix)
        };
        let store = tokio::select! {
            store = EtcdStore::open(options) => store?,
            () = signals.next() => return Ok(()),
        };
        tracing::info!(target: SMG, member = store.node_id(), prefix = etcd.prefix, "the fleet's state is in etcd");
        // Nobody is removed for good: members come and go.
        let (_stays, retired) = tokio::sync::watch::channel(false);
        let ended = self.serve(Arc::clone(&store) as _, retired, signals).await;
        store.shutdown().await;
        ended
    }
}

/// The host under which others reach an address of this member.
fn host(args: &ControlPlaneArgs, address: SocketAddr) -> String {
    match &args.advertise {
        Some(host) => host.clone(),
        None if address.ip().is_unspecified() => process::host_name(),
        None if address.is_ipv6() => format!("[{}]", address.ip()),
        None => address.ip().to_string(),
    }
}

/// Where operators and gateways reach this member; empty = at a port that nobody can know before.
fn api_address(args: &ControlPlaneArgs) -> String {
    match args.listen.port() {
        0 => String::new(),
        port => format!("{}:{port}", host(args, args.listen)),
    }
}

fn options(args: &ControlPlaneArgs, data_dir: &Path, peers: SocketAddr) -> RaftOptions {
    let mut options =
        RaftOptions::new(data_dir.join(STATE_DIRECTORY), format!("{}:{}", host(args, peers), peers.port()))
            .bootstrap(args.bootstrap);
    options.with_peers = true;
    options.source = Some(args.peer_listen.ip()).filter(|ip| !ip.is_unspecified());
    options.join.clone_from(&args.join);
    options.api_address = api_address(args);
    options.patience = Patience {
        heartbeat: Duration::from_millis(args.heartbeat_interval_ms),
        election: Duration::from_millis(args.election_timeout_ms),
    };
    options
}

/// Why a member ends by itself.
enum Ended {
    Signal,
    StoreFailed(String),
    Retired,
}

impl Place<'_> {
    /// Serves operators and gateways on the store, until there is a reason to end.
    async fn serve(
        self,
        store: Arc<dyn ClusterStore>,
        mut retired: tokio::sync::watch::Receiver<bool>,
        signals: &mut Signals,
    ) -> Result<(), RunError> {
        let options = self.listener(Callers::Anybody, "control_plane");
        let Self { args, tls, access, metrics, metrics_address } = self;
        let mut failure = store.failure();
        let mut end = async |signals: &mut Signals| {
            tokio::select! {
                () = signals.next() => Ended::Signal,
                Ok(reason) = failure.wait_for(Option::is_some) => Ended::StoreFailed(reason.clone().unwrap_or_default()),
                Ok(_) = retired.wait_for(|retired| *retired) => Ended::Retired,
            }
        };
        // A member without any state has nothing to show yet: operators and gateways ask another one until it has.
        let mut changes = store.changes();
        let early = tokio::select! {
            _ = changes.wait_for(|revision| *revision > 0) => None,
            ended = end(signals) => Some(ended),
        };
        if let Some(ended) = early {
            return conclude(ended);
        }
        let control_plane = ControlPlane::start(ControlPlaneOptions {
            access,
            worker_tls: Some(process::worker_tls(&args.worker_tls)?),
            ..ControlPlaneOptions::new(Arc::clone(&store), metrics)
        });
        let socket =
            bind(args.listen).map_err(|error| RunError::start(&format!("admin API on {}", args.listen), error))?;
        let bound = socket.local_addr().map_err(|error| RunError::start("admin API", error))?;
        tracing::info!(target: SMG, address = %bound, tls = tls.is_some(), metrics = %metrics_address, "serving the control plane");
        let shutdown = Shutdown::default();
        // Operators may show a token instead of a certificate.
        let server = Server::new(options, shutdown.clone());
        let grace = Duration::from_secs(args.process.shutdown_grace_period_secs).min(Duration::from_secs(10));
        let ending = async {
            let ended = end(signals).await;
            if matches!(ended, Ended::Signal) {
                // First of all, so that no write waits for an election.
                let _ = tokio::time::timeout(HAND_OVER, store.step_down()).await;
            }
            control_plane.stop().await;
            if matches!(ended, Ended::Signal) {
                process::drain(&server, &shutdown, grace, signals).await;
            } else {
                shutdown.now();
                server.drain(Duration::from_secs(1)).await;
            }
            ended
        };
        let ((), ended) = tokio::join!(server.listen(socket, control_plane.router()), ending);
        conclude(ended)
    }
}

fn conclude(ended: Ended) -> Result<(), RunError> {
    match ended {
        Ended::Signal => Ok(()),
        Ended::StoreFailed(reason) => Err(RunError::StoreFailed(reason)),
        Ended::Retired => Err(RunError::Retired),
    }
}
