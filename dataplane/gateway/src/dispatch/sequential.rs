//! Sequential dispatch: prefill, then decode with what it handed over (SMG PD docs, "Sequential Dispatch (vLLM)").
//!
//! The prefill's claim is released before decode is sent: a failed prefill never reaches the decode worker, and never its breaker. A
//! handoff that no decode leg took, because the client left in between, is counted and logged: the engine keeps its blocks until they
//! expire.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant as StdInstant;

use axum::body::Body;
use bytes::{Bytes, BytesMut};
use http::Response;
use http_body_util::BodyExt;
use hyper::body::Incoming;
use smg_engines::errors::{PREFILL_UPSTREAM_ERROR, decode_code};
use smg_engines::vllm::{self, Handoff, HandoffSource, Plan};
use smg_telemetry::{Metrics, SMG};
use tokio::time::Instant;
use uuid::Uuid;

use super::leg::{self, LegBody, LegError};
use super::scope::Scope;
use super::{Failed, Job, respond};
use crate::fleet::worker::InFlight;
use crate::front::error::GatewayError;
use crate::relay::describe;
use crate::resilience::breaker::Verdict;

/// Largest accepted prefill response: one token and its handoff.
const MAX_PREFILL_RESPONSE: usize = 64 * 1024 * 1024;

pub(super) async fn run(
    job: &Job<'_>,
    prefill: InFlight,
    mut decode: InFlight,
    scope: &mut Option<Scope>,
) -> Result<Response<Body>, Failed> {
    let request = job.request;
    let metrics = &job.core.metrics;
    let (prefill_worker, decode_worker) = (Arc::clone(prefill.worker()), Arc::clone(decode.worker()));
    let plan = vllm::plan(
        &request.body,
        prefill_worker.connector,
        decode_worker.connector,
        prefill_worker.mooncake.as_ref(),
        Uuid::now_v7(),
    )
    .map_err(|_| {
        metrics.pd_kv_transfer_failures.inc();
        Failed::gateway(GatewayError::Moriio, None)
    })?;
    let mode = prefill_worker.connector.mode_label();
    metrics.pd_kv_connector_mode.with_label_values(&[mode]).inc();
    let labels = ["pd", &*job.model, prefill_worker.engine().as_str()];
    let started = StdInstant::now();
    let params = match plan {
        Plan::DecodeOnly => {
            drop(prefill);
            job.note(|attempt, _| (attempt.connector_mode, attempt.kv_handoff) = (Some(mode), Some(false)));
            None
        }
        Plan::PrefillThenDecode { tag, source, transfer_id } => {
            job.note(|attempt, now| {
                (attempt.connector_mode, attempt.transfer_id) = (Some(mode), transfer_id);
                attempt.prefill_sent_ms = Some(now);
            });
            let answer = run_prefill(job, prefill, tag.as_ref()).await?;
            metrics.pd_prefill_duration.with_label_values(&labels).observe(started.elapsed().as_secs_f64());
            let params = take_handoff(metrics, &prefill_worker.url, &answer, source);
            job.note(|attempt, now| {
                (attempt.prefill_done_ms, attempt.kv_handoff) = (Some(now), Some(params.is_some()));
            });
            params
        }
    };

    let sent = Arc::new(AtomicBool::new(false));
    let orphan = params.as_ref().map(|params| Orphan {
        metrics: Arc::clone(metrics),
        sent: Arc::clone(&sent),
        request_id: &request.request_id,
        params: params.clone(),
    });
    let body = vllm::decode_leg(&request.body, job.client_fields, params.as_ref());
    let headers = job.headers(&decode_worker);
    job.note(|attempt, now| attempt.decode_sent_ms = Some(now));
    let decode_started = StdInstant::now();
    let body = LegBody::Spliced(body, Some(sent));
    let head = leg::send(job.core, &mut decode, request.route, headers, body, job.deadline).await;
    drop(orphan);
    let head = head.map_err(|error| {
        Failed::gateway(GatewayError::Leg { code: "decode_request_failed", error }, Some(decode_worker.id()))
    })?;
    job.note(|attempt, now| attempt.decode_head_ms = Some(now));
    if !head.status().is_success() {
        let code = decode_code(head.status());
        return Err(Failed::engine(head, code, decode_worker.id()));
    }
    let first_output = vec![
        (metrics.pd_ttft.with_label_values(&labels), started),
        (metrics.pd_decode_ttft.with_label_values(&labels), decode_started),
    ];
    Ok(respond::relay(job, head, decode, scope.take(), true, first_output))
}

/// Runs the prefill leg to the end of its response.
async fn run_prefill(job: &Job<'_>, mut claim: InFlight, tag: Option<&Bytes>) -> Result<Bytes, Failed> {
    let worker = Arc::clone(claim.worker());
    let body = LegBody::Spliced(vllm::prefill_leg(&job.request.body, job.client_fields, tag), None);
    let headers = job.headers(&worker);
    let fail = |code, error| Failed::gateway(GatewayError::Leg { code, error }, Some(worker.id()));
    let response = leg::send(job.core, &mut claim, job.request.route, headers, body, job.deadline)
        .await
        .map_err(|error| fail("prefill_request_failed", error))?;
    job.note(|attempt, now| attempt.prefill_head_ms = Some(now));
    if !response.status().is_success() {
        return Err(Failed::engine(response, PREFILL_UPSTREAM_ERROR, worker.id()));
    }
    read_whole(response.into_body(), job.deadline).await.map_err(|error| {
        claim.judge(Verdict::Failure);
        leg::note_error(job.core, &worker, if error.timed_out { "timeout" } else { "backend_error" });
        fail("prefill_read_failed", error)
    })
}

async fn read_whole(mut body: Incoming, deadline: Instant) -> Result<Bytes, LegError> {
    let broken = |message: String| LegError { timed_out: false, message };
    let read = async {
        let mut whole = BytesMut::new();
        while let Some(frame) = body.frame().await {
            let frame = frame.map_err(|error| broken(describe(&error)))?;
            if let Ok(data) = frame.into_data() {
                if whole.len() + data.len() > MAX_PREFILL_RESPONSE {
                    return Err(broken(format!("the prefill response is larger than {MAX_PREFILL_RESPONSE} bytes")));
                }
                whole.extend_from_slice(&data);
            }
        }
        Ok(whole.freeze())
    };
    let timed_out = LegError { timed_out: true, message: "the prefill response did not end in time".to_owned() };
    tokio::time::timeout_at(deadline, read).await.unwrap_or(Err(timed_out))
}

/// The decode leg's `kv_transfer_params`, if there are any.
fn take_handoff(
    metrics: &Metrics,
    prefill: &smg_fleet::WorkerUrl,
    answer: &Bytes,
    source: HandoffSource,
) -> Option<Bytes> {
    let relayed = |required: bool| match vllm::extract_kv_transfer_params(answer) {
        Handoff::Params(params) => Some(params),
        nothing => {
            if required {
                metrics.pd_kv_transfer_failures.inc();
                let malformed = matches!(nothing, Handoff::Malformed);
                tracing::warn!(
                    target: SMG,
                    worker = %prefill,
                    malformed,
                    "a NIXL prefill returned no kv_transfer_params: decode recomputes the prompt"
                );
            }
            None
        }
    };
    match source {
        HandoffSource::Expected => relayed(true),
        HandoffSource::Optional => relayed(false),
        HandoffSource::Minted(params) => Some(params),
        HandoffSource::None => None,
    }
}

/// Notices a handoff that no decode engine was told about.
struct Orphan<'a> {
    metrics: Arc<Metrics>,
    sent: Arc<AtomicBool>,
    request_id: &'a str,
    params: Bytes,
}

impl Drop for Orphan<'_> {
    fn drop(&mut self) {
        if self.sent.load(Ordering::Acquire) {
            return;
        }
        self.metrics.pd_orphaned_handoffs.inc();
        let shown = self.params.get(..self.params.len().min(512)).unwrap_or_default();
        tracing::warn!(
            target: SMG,
            request_id = self.request_id,
            kv_transfer_params = %String::from_utf8_lossy(shown),
            "no decode leg took this handoff: the prefill engine keeps its blocks until they expire"
        );
    }
}
