//! MoRI-IO dispatch (SMG PD docs, MoRI-IO): no decode output reaches the client unless its handoff was checked.
//!
//! READ pairs, and WRITE pairs by default, run one leg after the other. A concurrent WRITE pair runs both at once: decode allocates blocks
//! and waits, prefill pushes into them. The first leg to fail ends the attempt and the other leg's connection, which is how its engine
//! learns of it, and the dropped leg says nothing about its worker. A decode response, even a complete one, is held back until the handoff
//! has passed: a decode engine without its push would wait for ever, and what it says before is not to be trusted.

use std::sync::Arc;
use std::time::Instant as StdInstant;

use axum::body::Body;
use bytes::Bytes;
use http::Response;
use smg_engines::PromptLogprobs;
use smg_engines::moriio::{HandoffError, Pair, TransferId, check_request};
use smg_engines::vllm::{self, Connector};
use smg_telemetry::SMG;
use uuid::Uuid;

use super::leg::LegBody;
use super::race::{self, Lost};
use super::scope::Scope;
use super::sequential::{HandedOver, run_decode, run_prefill};
use super::{Failed, Job, LegCodes, logprobs, respond};
use crate::fleet::worker::InFlight;
use crate::front::error::GatewayError;
use crate::front::request_id::REQUEST_ID;
use crate::resilience::breaker::Verdict;

pub(super) async fn run(
    job: &Job<'_>,
    mut prefill: InFlight,
    decode: InFlight,
    scope: &mut Option<Scope>,
) -> Result<Response<Body>, Failed> {
    let request = job.request;
    let (prefill_worker, decode_worker) = (Arc::clone(prefill.worker()), Arc::clone(decode.worker()));
    let pair = Pair::check(prefill_worker.moriio.as_ref(), decode_worker.moriio.as_ref()).map_err(|refusal| {
        job.core.metrics.pd_kv_transfer_failures.inc();
        tracing::warn!(
            target: SMG,
            request_id = %request.request_id,
            prefill = %prefill_worker.url,
            decode = %decode_worker.url,
            reason = %refusal,
            "this MoRI-IO pair is misconfigured"
        );
        Failed::gateway(GatewayError::MoriioPair, None)
    })?;
    // The client's own ids too, though only the accepted one goes out: whoever sends such an id means harm, or is misled.
    let ids = request.headers.get_all(REQUEST_ID).iter().map(|id| id.as_bytes());
    check_request(&request.body, ids.chain([request.request_id.as_bytes()]))
        .map_err(|refusal| Failed::gateway(GatewayError::MoriioRequest(refusal), None))?;
    let transfer_id = TransferId::new(Uuid::now_v7());
    let mode = Connector::Moriio.mode_label();
    job.core.metrics.pd_kv_connector_mode.with_label_values(&[mode]).inc();
    job.note(|attempt, _| {
        (attempt.connector_mode, attempt.transfer_id) = (Some(mode), Some(transfer_id.to_string()));
        if pair.is_concurrent() {
            attempt.dispatch = "concurrent";
        }
    });
    if pair.is_concurrent() {
        return concurrent(job, &pair, &transfer_id, prefill, decode, scope).await;
    }
    let started = StdInstant::now();
    let (handoff, told) = prefill_and_check(job, &pair, &transfer_id, &mut prefill).await?;
    drop(prefill);
    let handed_over = Some(HandedOver::new(job, handoff));
    run_decode(job, decode, handed_over, told, (prefill_worker.engine(), started), scope).await
}

/// Runs the prefill leg and takes its handoff, if it is one for this request, and what it tells of the prompt.
async fn prefill_and_check(
    job: &Job<'_>,
    pair: &Pair<'_>,
    transfer_id: &TransferId,
    claim: &mut InFlight,
) -> Result<(Bytes, Option<Bytes>), Failed> {
    let leg = pair.prefill_leg(&job.request.body, job.client_fields, transfer_id);
    let (answer, _) = run_prefill(job, claim, leg, None).await?;
    let checked = pair.check_handoff(&answer, transfer_id);
    job.note(|attempt, _| attempt.kv_handoff = Some(checked.is_ok()));
    let handoff = checked.map_err(|error| refuse_handoff(job, claim, error))?;
    Ok((handoff, logprobs::of_prompt(job, answer)))
}

fn refuse_handoff(job: &Job<'_>, claim: &mut InFlight, error: HandoffError) -> Failed {
    job.core.metrics.pd_kv_transfer_failures.inc();
    let worker = claim.worker();
    tracing::warn!(
        target: SMG,
        request_id = %job.request.request_id,
        worker = %worker.url,
        reason = %error,
        "a MoRI-IO prefill returned no usable handoff"
    );
    let blamed = Some(worker.id());
    // It answered, so its breaker has nothing to open for, but it did not serve either.
    claim.judge(Verdict::Neutral);
    Failed::gateway(GatewayError::MoriioHandoff(error), blamed)
}

async fn concurrent(
    job: &Job<'_>,
    pair: &Pair<'_>,
    transfer_id: &TransferId,
    mut prefill: InFlight,
    mut decode: InFlight,
    scope: &mut Option<Scope>,
) -> Result<Response<Body>, Failed> {
    let started = StdInstant::now();
    let raced = {
        let decode_leg = async {
            let params = pair.decode_params(transfer_id);
            let asked = PromptLogprobs::of(&job.request.body) == PromptLogprobs::Apart;
            let leg = vllm::decode_leg(&job.request.body, job.client_fields, Some(&params), asked);
            job.note(|attempt, now| attempt.decode_sent_ms = Some(now));
            let head = job.send(&mut decode, LegBody::Spliced(leg, None), LegCodes::DECODE).await?;
            job.note(|attempt, now| attempt.decode_head_ms = Some(now));
            // Held until the handoff passes. Should the client leave meanwhile, that says nothing about the worker.
            decode.judge(Verdict::Neutral);
            Ok(head)
        };
        race::both(prefill_and_check(job, pair, transfer_id, &mut prefill), decode_leg).await
    };
    let (told, head) = match raced {
        Ok(((_, told), head)) => (told, head),
        Err(Lost::Prefill(failed)) => {
            decode.judge(Verdict::Neutral);
            return Err(failed);
        }
        Err(Lost::Decode { failed, prefill_done }) => {
            if !prefill_done {
                prefill.judge(Verdict::Neutral);
            }
            return Err(failed);
        }
    };
    decode.judge_status(head.status());
    let metrics = &job.core.metrics;
    let labels = ["pd", &*job.model, prefill.worker().engine().as_str()];
    drop(prefill);
    let first_output = vec![
        (metrics.pd_ttft.with_label_values(&labels), started),
        (metrics.pd_decode_ttft.with_label_values(&labels), started),
    ];
    if let Some(told) = told {
        return Box::pin(logprobs::respond_with_prompt(job, told, (head, decode), scope, first_output)).await;
    }
    respond::relay(job, head, decode, scope, first_output, None).await
}
