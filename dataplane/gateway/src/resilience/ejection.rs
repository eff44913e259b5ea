//! Immediate ejection of workers that refuse connections.
//!
//! The first connection that cannot be made takes the worker out of this gateway's rotation. A task of its own then probes it after 0.5 s,
//! 1 s, 2 s … at most 5 s, and takes it back on the first success. There is at most one such task a worker; it ends when the worker is
//! back, leaves the fleet, or the gateway closes.
//!
//! What comes back may be another engine: it is asked who it is before it gets a request ([`super::identity`]).

use std::sync::Arc;
use std::time::Duration;

use http::{Request, header};
use smg_fleet::Wire;
use smg_net::backoff::Backoff;
use smg_telemetry::SMG;

use crate::core::Core;
use crate::dispatch::leg::LegBody;
use crate::fleet::worker::RoutedWorker;
use crate::resilience::identity;

const PROBES: Backoff =
    Backoff { initial: Duration::from_millis(500), max: Duration::from_secs(5), multiplier: 2.0, jitter: 0.1 };
const PROBE_TIMEOUT: Duration = Duration::from_secs(5);

/// Ejects a worker that could not be connected to.
pub fn eject(core: &Arc<Core>, worker: &Arc<RoutedWorker>, reason: &str) {
    if !worker.runtime.eject() {
        return;
    }
    tracing::warn!(target: SMG, worker = %worker.url, reason, "worker is unreachable and leaves rotation");
    let (core, worker) = (Arc::clone(core), Arc::clone(worker));
    smg_net::spawn("probe-ejected", async move {
        let mut said = String::new();
        for failure in 0.. {
            let pause = tokio::time::sleep(PROBES.delay(failure, rand::random()));
            tokio::select! {
                () = core.closing.cancelled() => return,
                () = pause => {}
            }
            if core.table.load().runtime(worker.id()).is_none() {
                return;
            }
            if !probe(&core, &worker).await {
                continue;
            }
            match identity::verify(&core, &worker).await {
                Ok(()) => {
                    worker.runtime.readmit();
                    tracing::info!(target: SMG, worker = %worker.url, "worker answers again and returns to rotation");
                    return;
                }
                // Once a reason: it may stand for as long as the engine runs.
                Err(reason) if reason != said => {
                    tracing::warn!(
                        target: SMG, worker = %worker.url, reason,
                        "what answers is not what the fleet knows, and gets no requests until it is"
                    );
                    said = reason;
                }
                Err(_) => {}
            }
        }
    });
}

async fn probe(core: &Core, worker: &RoutedWorker) -> bool {
    if worker.record.wire() == Wire::Grpc {
        // The fleet may know by now that it is another engine than the one that was ejected.
        let known = core.table.load().workers.get(&worker.id()).map(|known| known.runtime());
        let client = core.client_as(worker, known.unwrap_or_else(|| worker.engine()));
        let Some(client) = client else { return false };
        return matches!(tokio::time::timeout(PROBE_TIMEOUT, client.is_healthy()).await, Ok(Ok(true)));
    }
    let endpoint = core.table.load().snapshot.settings("").probe.endpoint;
    let base = worker.record.url().ok();
    let base = base.as_ref().map_or(worker.url.as_str(), |url| url.as_str());
    let mut request = Request::get(format!("{base}{endpoint}"));
    if let Some(key) = &worker.record.spec.api_key {
        request = request.header(header::AUTHORIZATION, format!("Bearer {}", &**key));
    }
    let Ok(request) = request.body(LegBody::Empty) else { return false };
    let answer = tokio::time::timeout(PROBE_TIMEOUT, core.client.request(request)).await;
    matches!(answer, Ok(Ok(response)) if response.status().is_success())
}
