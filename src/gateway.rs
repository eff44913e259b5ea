//! `smg gateway`: one data-plane gateway that follows a control plane.

use std::sync::Arc;
use std::time::Duration;

use smg_gateway::{Dial, Gateway, GatewayOptions};
use smg_net::serve::{ServeOptions, Server, Shutdown, bind};
use smg_telemetry::trace::Tracer;
use smg_telemetry::{Metrics, SMG};
use uuid::Uuid;

use crate::cli::{EdgeArgs, GatewayArgs};
use crate::process::{self, RunError, Signals};

/// Runs the gateway until it is told to stop.
pub async fn run(args: GatewayArgs) -> Result<(), RunError> {
    let mut signals = Signals::install()?;
    args.warnings.iter().for_each(|warning| tracing::warn!(target: SMG, "{warning}"));
    let metrics = process::metrics(&args.process)?;
    let metrics_address = args.process.prometheus_address(args.edge.host);
    let metrics_address = process::serve_metrics(metrics_address, Arc::clone(&metrics))?;
    tracing::info!(target: SMG, address = %metrics_address, "metrics");
    let gateway_id = args.gateway_id.unwrap_or_else(random_id);
    let options = GatewayOptions {
        tracer: tracer(&args.edge, &gateway_id, &metrics)?,
        gateway_id,
        data_dir: args.data_dir,
        ..options(&args.edge)
    };
    let gateway = Gateway::start(options, Arc::clone(&metrics), Dial::Tcp(args.controlplane));
    let grace = Duration::from_secs(args.process.shutdown_grace_period_secs);
    serve(&gateway, &args.edge, &metrics, grace, &mut signals).await
}

/// A name for a gateway that was given none.
pub fn random_id() -> String {
    format!("gateway-{}", Uuid::new_v4().simple())
}

/// The way to the collector, if traces are wanted.
///
/// # Errors
/// When its address is not usable.
pub fn tracer(edge: &EdgeArgs, gateway_id: &str, metrics: &Arc<Metrics>) -> Result<Option<Tracer>, RunError> {
    let Some(collector) = edge.trace.collector() else { return Ok(None) };
    tracing::info!(target: SMG, collector, "tracing requests");
    let started = Tracer::start(collector, gateway_id, Arc::clone(metrics));
    started.map(Some).map_err(|error| RunError::start("traces", error))
}

/// Longer than any process runs (136 years), and still a time that clocks can count to.
const FOR_EVER: Duration = Duration::from_secs(u32::MAX as u64);

/// The seconds of a flag, of which there may be more than clocks can count.
fn seconds(secs: u64) -> Duration {
    Duration::from_secs(secs).min(FOR_EVER)
}

/// How the flags of the client edge configure a gateway.
pub fn options(edge: &EdgeArgs) -> GatewayOptions {
    let or_for_ever = |secs: u64| if secs == 0 { FOR_EVER } else { seconds(secs) };
    GatewayOptions {
        max_payload_bytes: usize::try_from(edge.max_payload_size).unwrap_or(usize::MAX),
        upload_stall_timeout: or_for_ever(edge.stream_body_stall_timeout_secs),
        request_timeout: seconds(edge.request_timeout_secs),
        pool_idle_timeout: or_for_ever(edge.upstream_pool_idle_timeout_secs),
        sse_keep_alive: seconds(edge.sse_keepalive_secs),
        request_id_headers: edge.request_id_headers(),
        routing_key_headers: edge.routing_key_headers(),
        ..GatewayOptions::default()
    }
}

/// Serves clients until the first signal, then drains.
pub async fn serve(
    gateway: &Gateway,
    edge: &EdgeArgs,
    metrics: &Arc<Metrics>,
    grace: Duration,
    signals: &mut Signals,
) -> Result<(), RunError> {
    let address = edge.address();
    let listener = bind(address).map_err(|error| RunError::start(&format!("clients on {address}"), error))?;
    let bound = listener.local_addr().map_err(|error| RunError::start("clients", error))?;
    let shutdown = Shutdown::default();
    let server = Server::new(serve_options(edge, metrics), shutdown.clone());
    tracing::info!(target: SMG, address = %bound, "serving clients");
    let listening = server.listen(listener, gateway.api());
    let ending = async {
        signals.next().await;
        gateway.begin_drain();
        process::drain(&server, &shutdown, grace, signals).await;
        gateway.close(Duration::from_secs(5)).await;
    };
    tokio::join!(listening, ending);
    tracing::info!(target: SMG, "stopped");
    Ok(())
}

fn serve_options(edge: &EdgeArgs, metrics: &Arc<Metrics>) -> ServeOptions {
    let connections = metrics.http_connections_active.clone();
    // The time to read a head includes the idle time before it: the longer of the two limits holds for both.
    let patience = edge.header_read_timeout_secs.max(edge.idle_connection_timeout_secs);
    let unlimited = edge.header_read_timeout_secs == 0 || edge.idle_connection_timeout_secs == 0;
    ServeOptions {
        header_read_timeout: if unlimited { FOR_EVER } else { seconds(patience) },
        observer: Some(Arc::new(move |change| connections.add(change))),
    }
}
