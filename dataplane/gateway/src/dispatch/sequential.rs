//! Sequential dispatch: prefill, then decode with what it handed over (SMG PD docs, "Sequential Dispatch (vLLM)").
//!
//! The prefill's claim is released before decode is sent: a failed prefill never reaches the decode worker, and never its breaker. A
//! handoff that no decode leg took, because the client left in between or the decode worker became overloaded, is counted and logged: the
//! engine keeps its blocks until they expire.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant as StdInstant;

use axum::body::Body;
use bytes::{Bytes, BytesMut};
use http::Response;
use http_body_util::BodyExt;
use smg_engines::SplicedBody;
use smg_engines::vllm::{self, Handoff, HandoffSource, Plan};
use smg_fleet::Runtime;
use smg_telemetry::{Metrics, SMG};
use tokio::time::Instant;
use uuid::Uuid;

use super::leg::{self, LegBody, LegError};
use super::scope::Scope;
use super::{Failed, Job, LegCodes, logprobs, respond};
use crate::connections::Answer;
use crate::fleet::worker::InFlight;
use crate::front::error::GatewayError;
use crate::relay::describe;
use crate::resilience::breaker::Verdict;

/// Largest response that is read whole: a prefill's token and handoff, or log probabilities.
const MAX_PREFILL_RESPONSE: usize = 64 * 1024 * 1024;

pub(super) async fn run(
    job: &Job<'_>,
    mut prefill: InFlight,
    decode: InFlight,
    scope: &mut Option<Scope>,
) -> Result<Response<Body>, Failed> {
    let body = &job.request.body;
    let metrics = &job.core.metrics;
    let worker = Arc::clone(prefill.worker());
    let plan = vllm::plan(body, worker.connector, worker.mooncake().as_deref(), Uuid::now_v7());
    let mode = worker.connector.mode_label();
    metrics.pd_kv_connector_mode.with_label_values(&[mode]).inc();
    let started = StdInstant::now();
    let (handed_over, told) = match plan {
        Plan::DecodeOnly => {
            job.note(|attempt, _| (attempt.connector_mode, attempt.kv_handoff) = (Some(mode), Some(false)));
            (None, None)
        }
        Plan::PrefillThenDecode { tag, source, transfer_id } => {
            job.note(|attempt, _| (attempt.connector_mode, attempt.transfer_id) = (Some(mode), transfer_id));
            let leg = vllm::prefill_leg(body, job.client_fields, tag.as_ref());
            let minted = if let HandoffSource::Minted(params) = &source { Some(params.clone()) } else { None };
            let (answer, minted) = run_prefill(job, &mut prefill, leg, minted).await?;
            let relayed = relayed(metrics, &worker.url, &answer, &source);
            let handed_over = minted.or_else(|| Some(HandedOver::new(job, relayed?)));
            job.note(|attempt, _| attempt.kv_handoff = Some(handed_over.is_some()));
            (handed_over, logprobs::of_prompt(job, answer))
        }
    };
    drop(prefill);
    run_decode(job, decode, handed_over, told, (worker.engine(), started), scope).await
}

/// Runs the prefill leg to the end of its response. `minted` = what was agreed on beforehand: the engine answers when it is done, so from
/// the head of its response on it is handed over.
pub(super) async fn run_prefill<'a>(
    job: &Job<'a>,
    claim: &mut InFlight,
    leg: SplicedBody,
    minted: Option<Bytes>,
) -> Result<(Bytes, Option<HandedOver<'a>>), Failed> {
    let started = StdInstant::now();
    job.note(|attempt, now| attempt.prefill_sent_ms = Some(now));
    let response = job.send(claim, LegBody::Spliced(leg, None), LegCodes::SEQUENTIAL_PREFILL).await?;
    job.note(|attempt, now| attempt.prefill_head_ms = Some(now));
    let minted = minted.map(|params| HandedOver::new(job, params));
    let answer = read_whole(response.into_body(), job.deadline).await.map_err(|error| {
        claim.judge(Verdict::Failure);
        leg::note_error(job.core, claim.worker(), if error.timed_out { "timeout" } else { "backend_error" });
        Failed::gateway(GatewayError::Leg { code: "prefill_read_failed", error }, Some(claim.worker().id()))
    })?;
    let labels = ["pd", &*job.model, claim.worker().engine().as_str()];
    job.core.metrics.pd_prefill_duration.with_label_values(&labels).observe(started.elapsed().as_secs_f64());
    job.note(|attempt, now| attempt.prefill_done_ms = Some(now));
    Ok((answer, minted))
}

/// Sends the decode leg with what the prefill handed over and relays its answer. `told` = the prefill's answer, if log probabilities of
/// the prompt are to be taken from it; `prefill` = its engine, and when its leg was sent.
pub(super) async fn run_decode(
    job: &Job<'_>,
    mut decode: InFlight,
    handed_over: Option<HandedOver<'_>>,
    told: Option<Bytes>,
    prefill: (Runtime, StdInstant),
    scope: &mut Option<Scope>,
) -> Result<Response<Body>, Failed> {
    let metrics = &job.core.metrics;
    let body = &job.request.body;
    let params = handed_over.as_ref().map(|handed_over| &handed_over.params);
    let leg = vllm::decode_leg(body, job.client_fields, params, told.is_some());
    let sent = handed_over.as_ref().map_or_else(Arc::default, |handed_over| Arc::clone(&handed_over.sent));
    job.check_load(&decode)?;
    job.note(|attempt, now| attempt.decode_sent_ms = Some(now));
    let decode_started = StdInstant::now();
    let head = job.send(&mut decode, LegBody::Spliced(leg, Some(sent)), LegCodes::DECODE).await;
    drop(handed_over);
    let head = head?;
    job.note(|attempt, now| attempt.decode_head_ms = Some(now));
    let (engine, started) = prefill;
    let labels = ["pd", &*job.model, engine.as_str()];
    let first_output = vec![
        (metrics.pd_ttft.with_label_values(&labels), started),
        (metrics.pd_decode_ttft.with_label_values(&labels), decode_started),
    ];
    if let Some(told) = told {
        return Box::pin(logprobs::respond_with_prompt(job, told, (head, decode), scope, first_output)).await;
    }
    respond::relay(job, head, decode, scope, first_output, None).await
}

/// Reads the whole body of a leg.
pub(super) async fn read_whole(mut body: Answer, deadline: Instant) -> Result<Bytes, LegError> {
    let broken = |message: String| LegError { timed_out: false, message };
    let read = async {
        let mut whole = BytesMut::new();
        while let Some(frame) = body.frame().await {
            let frame = frame.map_err(|error| broken(describe(&error)))?;
            if let Ok(data) = frame.into_data() {
                if whole.len() + data.len() > MAX_PREFILL_RESPONSE {
                    return Err(broken(format!("the response is larger than {MAX_PREFILL_RESPONSE} bytes")));
                }
                whole.extend_from_slice(&data);
            }
        }
        Ok(whole.freeze())
    };
    let timed_out = LegError { timed_out: true, message: "the response did not end in time".to_owned() };
    tokio::time::timeout_at(deadline, read).await.unwrap_or(Err(timed_out))
}

/// The handoff that the prefill's answer carries, if it is to carry one.
fn relayed(metrics: &Metrics, prefill: &smg_fleet::WorkerUrl, answer: &Bytes, source: &HandoffSource) -> Option<Bytes> {
    if !matches!(source, HandoffSource::Expected | HandoffSource::Optional) {
        return None;
    }
    match vllm::extract_kv_transfer_params(answer) {
        Handoff::Params(params) => Some(params),
        nothing => {
            if *source == HandoffSource::Expected {
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
    }
}

/// A handoff, until a decode engine has been told of it. One that none is told of is counted and named.
pub(super) struct HandedOver<'a> {
    metrics: Arc<Metrics>,
    sent: Arc<AtomicBool>,
    request_id: &'a str,
    params: Bytes,
}

impl<'a> HandedOver<'a> {
    /// What a prefill holds for a decode to come.
    pub(super) fn new(job: &Job<'a>, params: Bytes) -> Self {
        let (metrics, request_id) = (Arc::clone(&job.core.metrics), &*job.request.request_id);
        Self { metrics, sent: Arc::default(), request_id, params }
    }
}

impl Drop for HandedOver<'_> {
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
