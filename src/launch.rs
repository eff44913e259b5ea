//! `smg launch`: control plane and gateway in one process.
//!
//! Both planes are the same code as in separate processes. They meet through the real sync service, over a transport inside the process.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use smg_controlplane::{ControlPlane, ControlPlaneOptions};
use smg_gateway::{Dial, Gateway, GatewayOptions, Link};
use smg_net::memory;
use smg_net::mutual::Callers;
use smg_net::mutual::identity::Part;
use smg_net::serve::{ListenerTls, ServeOptions, Server, Shutdown, bind};
use smg_store::ClusterStore;
use smg_store::raft::{RaftOptions, RaftStore};
use smg_telemetry::SMG;

use crate::certificates;
use crate::cli::LaunchArgs;
use crate::controlplane::STATE_DIRECTORY;
use crate::process::{self, RunError, Signals};
use crate::temporary::Temporary;
use crate::{gateway, process::metrics};

/// How long clients wait outside for the first snapshot: the control plane is in this process, so it comes at once.
const FIRST_SNAPSHOT: Duration = Duration::from_secs(5);

/// Runs both planes until the process is told to stop.
pub async fn run(args: LaunchArgs) -> Result<(), RunError> {
    let mut signals = Signals::install()?;
    args.warnings.iter().for_each(|warning| tracing::warn!(target: SMG, "{warning}"));
    let metrics = metrics(&args.process)?;
    let metrics_address = args.process.prometheus_address(args.edge.host);
    let metrics_address = process::serve_metrics(metrics_address, Arc::clone(&metrics))?;
    let (pd, workers) = (args.pd_disaggregation, args.startup_workers.len());
    tracing::info!(target: SMG, metrics = %metrics_address, pd_disaggregation = pd, startup_workers = workers, "starting");

    let worker_tls = process::worker_tls(&args.worker_tls)?;
    // Without a directory of the operator's, the state dies with the process.
    let (directory, _temporary) = data_directory(args.data_dir.clone())?;
    let state = directory.join(STATE_DIRECTORY);
    let store = RaftStore::open(RaftOptions::new(state, "in-process").bootstrap(true)).await?;
    let control_plane = ControlPlane::start(ControlPlaneOptions {
        access: process::access(&args.tokens, args.keys.gateway)?,
        worker_tls: Some(worker_tls.clone()),
        ..ControlPlaneOptions::new(Arc::clone(&store) as _, Arc::clone(&metrics))
    });
    control_plane
        .apply_startup(args.startup_workers, args.startup_policy)
        .await
        .map_err(|error| RunError::start("start-up flags", error))?;

    let (connector, connections) = memory::transport();
    let inner_shutdown = Shutdown::default();
    let inner = Server::new(ServeOptions::default(), inner_shutdown.clone());
    {
        let (inner, router) = (inner.clone(), control_plane.router());
        smg_net::spawn("in-process", async move { inner.listen_in_memory(connections, router).await });
    }
    let mut outer = None;
    if let Some(address) = args.controlplane_listen {
        let listener = bind(address).map_err(|error| RunError::start(&format!("control plane on {address}"), error))?;
        let bound = listener.local_addr().map_err(|error| RunError::start("control plane", error))?;
        let part = |directory: &PathBuf| certificates::of_part(directory, Part::ControlPlane, &metrics);
        let tls = args.tls_dir.as_ref().map(part).transpose()?;
        tracing::info!(target: SMG, address = %bound, tls = tls.is_some(), "serving the control plane");
        let tls = tls.map(|tls| ListenerTls::Parts(tls, Callers::Anybody));
        let observer = Some(process::count_refusals(&metrics, "control_plane"));
        let options = ServeOptions { tls, observer, ..ServeOptions::default() };
        let server = Server::new(options, inner_shutdown.clone());
        let (listening, router) = (server.clone(), control_plane.router());
        smg_net::spawn("control-plane", async move { listening.listen(listener, router).await });
        outer = Some(server);
    }

    let gateway_id = args.gateway_id.unwrap_or_else(gateway::random_id);
    let options = GatewayOptions {
        tracer: gateway::tracer(&args.edge, &gateway_id, &metrics)?,
        gateway_id,
        // Without that address no other gateway can join.
        alone: args.controlplane_listen.is_none(),
        // The store is durable here: a second copy of its state has no use.
        data_dir: None,
        worker_tls: Some(worker_tls),
        text: args.text,
        ..gateway::options(&args.edge, args.keys)
    };
    let gateway = Gateway::start(options, Arc::clone(&metrics), Dial::Memory(connector));
    smg_net::spawn("store-failure", report_store_failure(Arc::clone(&store), Arc::clone(gateway.link())));

    // Whoever connects first finds the fleet as it was left, not an empty one.
    gateway.synced(FIRST_SNAPSHOT).await;
    let grace = Duration::from_secs(args.process.shutdown_grace_period_secs);
    let served = gateway::serve(&gateway, &args.edge, &metrics, grace, &mut signals).await;
    control_plane.stop().await;
    inner_shutdown.now();
    inner.drain(Duration::from_secs(1)).await;
    if let Some(outer) = outer {
        outer.drain(Duration::from_secs(1)).await;
    }
    store.shutdown().await;
    served
}

/// The directory of the state, and the guard of a temporary one.
fn data_directory(given: Option<PathBuf>) -> Result<(PathBuf, Option<Temporary>), RunError> {
    if let Some(directory) = given {
        return Ok((directory, None));
    }
    let temporary =
        Temporary::create(&std::env::temp_dir()).map_err(|error| RunError::start("temporary state", error))?;
    Ok((temporary.path().to_owned(), Some(temporary)))
}

/// A failed store ends writes, not serving: the gateway routes on with its snapshot and says so.
async fn report_store_failure(store: Arc<RaftStore>, link: Arc<Link>) {
    let mut failure = store.failure();
    if let Ok(reason) = failure.wait_for(Option::is_some).await
        && let Some(reason) = reason.clone()
    {
        tracing::error!(target: SMG, reason, "the store has stopped: serving goes on, changes are refused");
        link.note_store_failure(reason);
    }
}
