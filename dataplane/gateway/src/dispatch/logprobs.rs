//! Answers with log probabilities: the prefill's entries for the prompt are put into the decode's answer.
//!
//! Such a request waits for the prefill's body, which on vLLM is there before the decode leg is sent. An answer that is no stream is read
//! whole and merged; of a stream the first event of each answer of the batch is. When there is nothing to merge the decode's answer stays
//! as it is.

use std::sync::Arc;
use std::time::Instant as StdInstant;

use axum::body::Body;
use bytes::Bytes;
use http::Response;
use prometheus::Histogram;
use smg_engines::logprobs::{self, StreamedAnswers};
use smg_engines::prompt_logprobs::{self, PromptLogprobs};
use smg_telemetry::SMG;

use super::respond::{self, FirstOutput};
use super::scope::Scope;
use super::sequential::read_whole;
use super::{Failed, Job, leg};
use crate::connections::Answer;
use crate::fleet::worker::InFlight;
use crate::front::error::GatewayError;
use crate::relay::Rewrite;
use crate::resilience::breaker::Verdict;

/// Reads the prefill's body to its end; none when it breaks off, which is charged to the prefill and does not end the request.
pub(super) async fn of_prefill(
    job: &Job<'_>,
    mut claim: InFlight,
    body: Answer,
    (duration, started): (Histogram, StdInstant),
) -> Option<Bytes> {
    let read = read_whole(body, job.deadline).await;
    duration.observe(started.elapsed().as_secs_f64());
    job.note(|attempt, now| attempt.prefill_done_ms = Some(now));
    read.inspect_err(|error| {
        let message = &error.message;
        tracing::warn!(target: SMG, worker = %claim.worker().url, message, "prefill leg broke off: no log probabilities of the prompt");
        claim.judge(Verdict::Failure);
        leg::note_error(job.core, claim.worker(), "backend_error");
    })
    .ok()
}

/// Answers with the decode's response, the prefill's entries in it.
pub(super) async fn respond(
    job: &Job<'_>,
    prefill: Option<Bytes>,
    (decode, claim): (Response<Answer>, InFlight),
    scope: &mut Option<Scope>,
    first_output: FirstOutput,
) -> Result<Response<Body>, Failed> {
    let prefill = prefill.and_then(|body| String::from_utf8(body.into()).ok());
    if job.request.body.stream() {
        let rewrite = prefill.map(|prefill| -> Rewrite {
            let mut answers = StreamedAnswers::read(&prefill);
            Box::new(move |event| answers.merge(event))
        });
        return respond::relay(job, decode, claim, scope, first_output, rewrite).await;
    }
    whole(job, prefill, logprobs::merge, (decode, claim), scope, first_output).await
}

/// The answer of a vLLM prefill, if the client is to get its log probabilities of the prompt.
pub(super) fn of_prompt(job: &Job<'_>, prefill: Bytes) -> Option<Bytes> {
    (PromptLogprobs::of(&job.request.body) == PromptLogprobs::Apart).then_some(prefill)
}

/// Answers with a vLLM decode's response, the list of its prefill in it ([`prompt_logprobs`]).
pub(super) async fn respond_with_prompt(
    job: &Job<'_>,
    prefill: Bytes,
    decode: (Response<Answer>, InFlight),
    scope: &mut Option<Scope>,
    first_output: FirstOutput,
) -> Result<Response<Body>, Failed> {
    whole(job, String::from_utf8(prefill.into()).ok(), prompt_logprobs::put, decode, scope, first_output).await
}

/// Reads the decode's answer whole and lets `merge` put into it what the prefill's has.
async fn whole(
    job: &Job<'_>,
    prefill: Option<String>,
    merge: fn(&str, &str) -> Option<String>,
    (decode, mut claim): (Response<Answer>, InFlight),
    scope: &mut Option<Scope>,
    first_output: FirstOutput,
) -> Result<Response<Body>, Failed> {
    let (head, body) = decode.into_parts();
    let body = read_whole(body, job.deadline).await.map_err(|error| {
        claim.judge(Verdict::Failure);
        leg::note_error(job.core, claim.worker(), if error.timed_out { "timeout" } else { "backend_error" });
        let worker = Arc::clone(claim.worker());
        Failed::gateway(GatewayError::Leg { code: "decode_read_failed", error }, Some(worker.id()))
    })?;
    let merged = prefill.and_then(|prefill| merge(&prefill, std::str::from_utf8(&body).ok()?));
    Ok(respond::whole(job, head, merged.map_or(body, Bytes::from), claim, scope.take(), first_output))
}
