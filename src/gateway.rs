//! `smg gateway`: one data-plane gateway that follows a control plane.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use smg_gateway::{AdmissionOptions, Dial, Gateway, GatewayOptions, Keys, LoadMonitorOptions};
use smg_net::mutual::identity::Part;
use smg_net::patience::Patience;
use smg_net::serve::{ConnectionEvent, ListenerTls, ServeOptions, Server, Shutdown, bind};
use smg_net::tls::ServerTls;
use smg_telemetry::trace::Tracer;
use smg_telemetry::{Metrics, SMG};
use uuid::Uuid;

use crate::certificates;
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
    let part = |directory: &PathBuf| certificates::of_part(directory, Part::Gateway, &metrics);
    let tls = args.tls_dir.as_ref().map(part).transpose()?;
    let gateway_id = args.gateway_id.unwrap_or_else(random_id);
    let options = GatewayOptions {
        tracer: tracer(&args.edge, &gateway_id, &metrics)?,
        gateway_id,
        alone: false,
        data_dir: args.data_dir,
        guarded: tls.is_some(),
        worker_tls: Some(process::worker_tls(&args.worker_tls)?),
        text: args.text,
        ..options(&args.edge, args.keys)
    };
    let dial = Dial::Tcp { names: args.controlplane, tls };
    let gateway = Gateway::start(options, Arc::clone(&metrics), dial);
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
pub fn options(edge: &EdgeArgs, keys: Keys) -> GatewayOptions {
    let or_for_ever = |secs: u64| if secs == 0 { FOR_EVER } else { seconds(secs) };
    GatewayOptions {
        admission: admission(edge),
        // Checked with the command line.
        cors_origins: edge.cors_origins().unwrap_or_default(),
        upload_timeout: or_for_ever(edge.request_body_timeout_secs),
        max_payload_bytes: usize::try_from(edge.max_payload_size).unwrap_or(usize::MAX),
        upload_stall_timeout: or_for_ever(edge.stream_body_stall_timeout_secs),
        request_timeout: seconds(edge.request_timeout_secs),
        pool_idle_timeout: or_for_ever(edge.upstream_pool_idle_timeout_secs),
        sse_keep_alive: seconds(edge.sse_keepalive_secs),
        load: LoadMonitorOptions {
            interval: seconds(edge.load_monitor_interval),
            only_if_needed: edge.disable_load_monitoring && !edge.engine_metrics,
            stall: seconds(edge.worker_stall_secs),
        },
        request_id_headers: edge.request_id_headers(),
        routing_key_headers: edge.routing_key_headers(),
        keys,
        ..GatewayOptions::default()
    }
}

/// The limit of concurrent requests. Unless a number is given it follows the machine: 1024 for each core, at least 4096.
fn admission(edge: &EdgeArgs) -> Option<AdmissionOptions> {
    let limit = match usize::try_from(edge.max_concurrent_requests) {
        Ok(0) => return None,
        Ok(limit) => limit,
        Err(_) => std::thread::available_parallelism().map_or(1, usize::from).saturating_mul(1024).max(4096),
    };
    let (wait, rate) = (seconds(edge.queue_timeout_secs), edge.rate());
    Some(AdmissionOptions { limit, queue: edge.queue_size, wait, rate })
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
    let tls = edge.tls().map(ServerTls::load).transpose().map_err(|error| RunError::start("TLS", error))?;
    let server = Server::new(serve_options(edge, tls.clone(), metrics), shutdown.clone());
    tracing::info!(target: SMG, address = %bound, tls = tls.is_some(), "serving clients");
    if let Some(tls) = &tls {
        certificates::of_edge(tls, metrics);
    }
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

fn serve_options(edge: &EdgeArgs, tls: Option<Arc<ServerTls>>, metrics: &Arc<Metrics>) -> ServeOptions {
    let or_never = |secs: u64| (secs > 0).then(|| seconds(secs));
    let (open, timeouts) = (metrics.http_connections_active.clone(), metrics.http_connection_timeouts.clone());
    let refused = metrics.tls_refused.with_label_values(&["edge"]);
    let observer = move |event| match event {
        ConnectionEvent::Opened => open.inc(),
        ConnectionEvent::Closed => open.dec(),
        ConnectionEvent::TimedOut(timeout) => timeouts.with_label_values(&[timeout.as_str()]).inc(),
        ConnectionEvent::Refused => refused.inc(),
    };
    ServeOptions {
        patience: Patience {
            header_read: or_never(edge.header_read_timeout_secs),
            idle: or_never(edge.idle_connection_timeout_secs),
            max_age: or_never(edge.max_connection_age_secs),
        },
        tls: tls.map(ListenerTls::Edge),
        observer: Some(Arc::new(observer)),
    }
}
