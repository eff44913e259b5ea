//! Immediate ejection of workers that refuse connections.
//!
//! The first connection that cannot be made takes the worker out of this gateway's rotation. A task of its own then probes it after 0.5 s,
//! 1 s, 2 s … at most 5 s, and takes it back on the first success. There is at most one such task a worker; it ends when the worker is
//! back, leaves the fleet, or the gateway closes.
//!
//! What comes back may be another engine process. A Mooncake prefill whose KV engine id was learned from its bootstrap server is asked there
//! again first: under the id of the process that died every decode engine would wait for minutes.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{Request, header};
use http_body_util::{BodyExt, Limited};
use smg_fleet::{Wire, mooncake};
use smg_net::backoff::Backoff;
use smg_telemetry::SMG;

use crate::core::Core;
use crate::dispatch::leg::LegBody;
use crate::fleet::worker::RoutedWorker;

const PROBES: Backoff =
    Backoff { initial: Duration::from_millis(500), max: Duration::from_secs(5), multiplier: 2.0, jitter: 0.1 };
const PROBE_TIMEOUT: Duration = Duration::from_secs(5);
/// Largest answer of a bootstrap server.
const MAX_ANSWER: usize = 4 * 1024 * 1024;

/// Ejects a worker that could not be connected to.
pub fn eject(core: &Arc<Core>, worker: &Arc<RoutedWorker>, reason: &str) {
    if !worker.runtime.eject() {
        return;
    }
    tracing::warn!(target: SMG, worker = %worker.url, reason, "worker is unreachable and leaves rotation");
    let (core, worker) = (Arc::clone(core), Arc::clone(worker));
    smg_net::spawn("probe-ejected", async move {
        for failure in 0.. {
            let pause = tokio::time::sleep(PROBES.delay(failure, rand::random()));
            tokio::select! {
                () = core.closing.cancelled() => return,
                () = pause => {}
            }
            if core.table.load().runtime(worker.id()).is_none() {
                return;
            }
            if probe(&core, &worker).await && knows_its_engine_id(&core, &worker).await {
                worker.runtime.readmit();
                tracing::info!(target: SMG, worker = %worker.url, "worker answers again and returns to rotation");
                return;
            }
        }
    });
}

/// Learns what the engine calls itself by now, where that decides whether its KV is found. False when it does not say, though it did before.
async fn knows_its_engine_id(core: &Core, worker: &RoutedWorker) -> bool {
    let record = &worker.record;
    let query = mooncake::query_url(&record.spec, record.runtime(), &worker.bootstrap_host);
    // Over gRPC an engine tells its id itself.
    let asked = record.wire() == Wire::Http && record.learned_engine_id().is_some();
    let Some(query) = query.filter(|_| asked) else { return true };
    let width = record.label("dp_size").and_then(|size| size.parse().ok()).unwrap_or(1);
    match ask(core, &query).await.and_then(|answer| mooncake::engine_id(&answer, width)) {
        Some(engine_id) => {
            worker.learn_engine_id(&engine_id);
            true
        }
        // An id of the operator's counts either way.
        None => record.spec.kv_engine_id.is_some(),
    }
}

async fn ask(core: &Core, url: &str) -> Option<Bytes> {
    let request = Request::get(url).body(LegBody::Empty).ok()?;
    let exchange = async {
        let response = core.client.request(request).await.ok().filter(|response| response.status().is_success())?;
        Some(Limited::new(response.into_body(), MAX_ANSWER).collect().await.ok()?.to_bytes())
    };
    tokio::time::timeout(PROBE_TIMEOUT, exchange).await.unwrap_or(None)
}

async fn probe(core: &Core, worker: &RoutedWorker) -> bool {
    if worker.record.wire() == Wire::Grpc {
        let Some(client) = core.client_of(worker) else { return false };
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
