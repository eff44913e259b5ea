//! `smg controlplane`: one member of the control plane.

use std::sync::Arc;
use std::time::Duration;

use smg_controlplane::{ControlPlane, ControlPlaneOptions};
use smg_net::serve::{ServeOptions, Server, Shutdown, bind};
use smg_store::ClusterStore;
use smg_store::raft::{RaftOptions, RaftStore};
use smg_telemetry::SMG;

use crate::cli::ControlPlaneArgs;
use crate::process::{self, RunError, Signals};

/// Where the state lies within the data directory. The same for every way to run a control plane, so that one can follow another.
pub const STATE_DIRECTORY: &str = "controlplane";

/// Runs the member until it is told to stop or its store fails.
pub async fn run(args: ControlPlaneArgs) -> Result<(), RunError> {
    let mut signals = Signals::install()?;
    args.warnings.iter().for_each(|warning| tracing::warn!(target: SMG, "{warning}"));
    let metrics = process::metrics(&args.process)?;
    let metrics_address = args.process.prometheus_address(args.listen.ip());
    let metrics_address = process::serve_metrics(metrics_address, Arc::clone(&metrics))?;
    let options =
        RaftOptions::new(args.data_dir.join(STATE_DIRECTORY), args.peer_listen.to_string()).bootstrap(args.bootstrap);
    let store = RaftStore::open(options).await?;
    let mut failure = store.failure();
    let control_plane = ControlPlane::start(ControlPlaneOptions {
        access: process::access(&args.tokens, None)?,
        worker_tls: Some(process::worker_tls(&args.worker_tls)?),
        ..ControlPlaneOptions::new(Arc::clone(&store) as _, metrics)
    });

    let listener =
        bind(args.listen).map_err(|error| RunError::start(&format!("admin API on {}", args.listen), error))?;
    let bound = listener.local_addr().map_err(|error| RunError::start("admin API", error))?;
    tracing::info!(target: SMG, address = %bound, metrics = %metrics_address, "serving the control plane");
    let shutdown = Shutdown::default();
    let server = Server::new(ServeOptions::default(), shutdown.clone());
    let grace = Duration::from_secs(args.process.shutdown_grace_period_secs).min(Duration::from_secs(10));
    let ending = async {
        let failed = tokio::select! {
            () = signals.next() => None,
            failed = failure.wait_for(Option::is_some) => failed.ok().and_then(|reason| reason.clone()),
        };
        control_plane.stop().await;
        if failed.is_some() {
            shutdown.now();
            server.drain(Duration::from_secs(1)).await;
        } else {
            process::drain(&server, &shutdown, grace, &mut signals).await;
        }
        failed
    };
    let ((), failed) = tokio::join!(server.listen(listener, control_plane.router()), ending);
    store.shutdown().await;
    match failed {
        Some(reason) => Err(RunError::StoreFailed(reason)),
        None => Ok(()),
    }
}
