//! `smg controlplane`: one member of the control plane.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use smg_controlplane::{ControlPlane, ControlPlaneOptions};
use smg_net::mutual::guard::Guard;
use smg_net::mutual::identity::Part;
use smg_net::mutual::{Callers, MutualTls};
use smg_net::serve::{ListenerTls, ServeOptions, Server, Shutdown, bind};
use smg_store::ClusterStore;
use smg_store::raft::{Patience, RaftOptions, RaftStore};
use smg_telemetry::SMG;

use crate::certificates;
use crate::cli::ControlPlaneArgs;
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
    // Bound first: its port is part of the address that the other members are told.
    let peers = bind(args.peer_listen)
        .map_err(|error| RunError::start(&format!("other members on {}", args.peer_listen), error))?;
    let peer_address = peers.local_addr().map_err(|error| RunError::start("other members", error))?;
    let options = RaftOptions { tls: tls.clone(), ..options(&args, peer_address) };
    tracing::info!(target: SMG, peers = options.address, api = options.api_address, "this member's addresses");
    let store = tokio::select! {
        store = RaftStore::open(options) => store?,
        // It may wait for the cluster that it joins.
        () = signals.next() => return Ok(()),
    };
    let peer_shutdown = Shutdown::default();
    let peer_server = Server::new(listener(&tls, Callers::Certified), peer_shutdown.clone());
    {
        let (server, service) = (peer_server.clone(), Guard::new(store.peer_service(), Part::ControlPlane));
        smg_net::spawn("peers", async move { server.listen(peers, service).await });
    }
    let ended = serve(&args, &store, &tls, metrics, metrics_address, &mut signals).await;
    store.shutdown().await;
    peer_shutdown.now();
    peer_server.drain(Duration::ZERO).await;
    ended
}

/// How a listener serves other parts.
fn listener(tls: &Option<Arc<MutualTls>>, callers: Callers) -> ServeOptions {
    let tls = tls.clone().map(|tls| ListenerTls::Parts(tls, callers));
    ServeOptions { tls, ..ServeOptions::default() }
}

fn options(args: &ControlPlaneArgs, peers: SocketAddr) -> RaftOptions {
    let host = |address: SocketAddr| match &args.advertise {
        Some(host) => host.clone(),
        None if address.ip().is_unspecified() => process::host_name(),
        None if address.is_ipv6() => format!("[{}]", address.ip()),
        None => address.ip().to_string(),
    };
    let mut options =
        RaftOptions::new(args.data_dir.join(STATE_DIRECTORY), format!("{}:{}", host(peers), peers.port()))
            .bootstrap(args.bootstrap);
    options.with_peers = true;
    options.source = Some(args.peer_listen.ip()).filter(|ip| !ip.is_unspecified());
    options.join.clone_from(&args.join);
    if args.listen.port() != 0 {
        options.api_address = format!("{}:{}", host(args.listen), args.listen.port());
    }
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

async fn serve(
    args: &ControlPlaneArgs,
    store: &Arc<RaftStore>,
    tls: &Option<Arc<MutualTls>>,
    metrics: Arc<smg_telemetry::Metrics>,
    metrics_address: SocketAddr,
    signals: &mut Signals,
) -> Result<(), RunError> {
    let (mut failure, mut retired) = (store.failure(), store.retired());
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
        access: process::access(&args.tokens, None)?,
        worker_tls: Some(process::worker_tls(&args.worker_tls)?),
        ..ControlPlaneOptions::new(Arc::clone(store) as _, metrics)
    });
    let socket = bind(args.listen).map_err(|error| RunError::start(&format!("admin API on {}", args.listen), error))?;
    let bound = socket.local_addr().map_err(|error| RunError::start("admin API", error))?;
    tracing::info!(target: SMG, address = %bound, tls = tls.is_some(), metrics = %metrics_address, "serving the control plane");
    let shutdown = Shutdown::default();
    // Operators may show a token instead of a certificate.
    let server = Server::new(listener(tls, Callers::Anybody), shutdown.clone());
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

fn conclude(ended: Ended) -> Result<(), RunError> {
    match ended {
        Ended::Signal => Ok(()),
        Ended::StoreFailed(reason) => Err(RunError::StoreFailed(reason)),
        Ended::Retired => Err(RunError::Retired),
    }
}
