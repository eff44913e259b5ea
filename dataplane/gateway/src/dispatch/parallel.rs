//! Parallel dispatch: both legs at once around a rendezvous (SMG PD docs, "Parallel Dispatch").
//!
//! The response starts when both heads are 2xx. Until then the first failure ends the attempt and closes the other leg. From then on the
//! prefill's body is drained in the background, because closing it early would abort the KV transfer; the drain outlives the client and
//! records the prefill's outcome when it ends.

use std::sync::Arc;
use std::time::Instant as StdInstant;

use axum::body::Body;
use http::Response;
use http_body_util::BodyExt;
use hyper::body::Incoming;
use smg_engines::errors::{decode_code, parallel_prefill_code};
use smg_engines::sglang::{self, Ranks, Rendezvous, Shape};
use smg_telemetry::SMG;
use tokio::time::Instant;

use super::leg::{self, LegBody, LegError};
use super::scope::Scope;
use super::{Failed, Job, respond};
use crate::core::Core;
use crate::decision::Decision;
use crate::fleet::worker::InFlight;
use crate::front::error::GatewayError;
use crate::relay::describe;
use crate::resilience::breaker::Verdict;

type Head = Result<Response<Incoming>, LegError>;

pub(super) async fn run(
    job: &Job<'_>,
    mut prefill: InFlight,
    mut decode: InFlight,
    scope: &mut Option<Scope>,
) -> Result<Response<Body>, Failed> {
    let request = job.request;
    let (prefill_worker, decode_worker) = (Arc::clone(prefill.worker()), Arc::clone(decode.worker()));
    let shape = Shape::of(&request.body).map_err(|error| Failed::gateway(GatewayError::Unsupported(error), None))?;
    let port = prefill_worker.record.spec.bootstrap_port;
    let rendezvous = Rendezvous::mint(&prefill_worker.bootstrap_host, port, shape, rand::random);
    let ranks = Ranks { prefill: prefill_worker.dp_rank, decode: decode_worker.dp_rank };
    let legs = sglang::legs(&request.body, job.client_fields, &rendezvous, ranks);
    job.note(|attempt, now| {
        attempt.bootstrap_rooms = rendezvous.rooms().iter().copied().take(16).collect();
        attempt.prefill_sent_ms = Some(now);
        attempt.decode_sent_ms = Some(now);
    });
    let started = StdInstant::now();
    let (prefill_headers, decode_headers) = (job.headers(&prefill_worker), job.headers(&decode_worker));
    let heads = {
        let prefill_leg = leg::send(
            job.core,
            &mut prefill,
            request.route,
            prefill_headers,
            LegBody::Spliced(legs.prefill, None),
            job.deadline,
        );
        let decode_leg = leg::send(
            job.core,
            &mut decode,
            request.route,
            decode_headers,
            LegBody::Spliced(legs.decode, None),
            job.deadline,
        );
        both_heads(job, prefill_leg, decode_leg).await
    };
    let (prefill_head, decode_head) = match heads {
        Heads::Both(prefill_head, decode_head) => (prefill_head, decode_head),
        Heads::PrefillFailed(head) => {
            // The decode leg was cut short by us: that says nothing about its worker.
            decode.judge(Verdict::Neutral);
            return Err(failed(head, prefill_worker.id(), "prefill_request_failed", parallel_prefill_code));
        }
        Heads::DecodeFailed(head) => {
            prefill.judge(Verdict::Neutral);
            return Err(failed(head, decode_worker.id(), "decode_request_failed", decode_code));
        }
    };
    let labels = ["pd", &*job.model, prefill_worker.engine().as_str()];
    let metrics = &job.core.metrics;
    let first_output = vec![
        (metrics.pd_ttft.with_label_values(&labels), started),
        (metrics.pd_decode_ttft.with_label_values(&labels), started),
    ];
    let drain = drain_prefill(
        Arc::clone(job.core),
        prefill,
        prefill_head.into_body(),
        metrics.pd_prefill_duration.with_label_values(&labels),
        started,
        (job.decision.clone(), job.attempt),
        job.deadline,
    );
    job.core.background.spawn(drain);
    Ok(respond::relay(job, decode_head, decode, scope.take(), true, first_output))
}

enum Heads {
    Both(Response<Incoming>, Response<Incoming>),
    PrefillFailed(Head),
    DecodeFailed(Head),
}

/// Waits for both heads, or for the first failure. Dropping the futures closes whichever leg is still waiting.
async fn both_heads(job: &Job<'_>, prefill: impl Future<Output = Head>, decode: impl Future<Output = Head>) -> Heads {
    tokio::pin!(prefill, decode);
    let (mut prefill_head, mut decode_head) = (None, None);
    loop {
        // Prefill first: when both fail in the same instant, the decode's failure is most likely the consequence.
        tokio::select! {
            biased;
            head = &mut prefill, if prefill_head.is_none() => match head {
                Ok(head) if head.status().is_success() => {
                    job.note(|attempt, now| attempt.prefill_head_ms = Some(now));
                    prefill_head = Some(head);
                }
                failed => return Heads::PrefillFailed(failed),
            },
            head = &mut decode, if decode_head.is_none() => match head {
                Ok(head) if head.status().is_success() => {
                    job.note(|attempt, now| attempt.decode_head_ms = Some(now));
                    decode_head = Some(head);
                }
                failed => return Heads::DecodeFailed(failed),
            },
        }
        match (prefill_head, decode_head) {
            (Some(prefill), Some(decode)) => return Heads::Both(prefill, decode),
            (one, other) => (prefill_head, decode_head) = (one, other),
        }
    }
}

fn failed(
    head: Head,
    worker: smg_fleet::WorkerId,
    transport_code: &'static str,
    status_code: fn(http::StatusCode) -> &'static str,
) -> Failed {
    match head {
        Ok(response) => {
            let code = status_code(response.status());
            Failed::engine(response, code, worker)
        }
        Err(error) => Failed::gateway(GatewayError::Leg { code: transport_code, error }, Some(worker)),
    }
}

/// Reads the prefill's body to its end and records its outcome there.
async fn drain_prefill(
    core: Arc<Core>,
    mut claim: InFlight,
    mut body: Incoming,
    duration: prometheus::Histogram,
    started: StdInstant,
    (decision, attempt): (Decision, usize),
    deadline: Instant,
) {
    let drained = tokio::time::timeout_at(deadline, async {
        while let Some(frame) = body.frame().await {
            frame?;
        }
        Ok::<(), hyper::Error>(())
    });
    let failure = match drained.await {
        Ok(Ok(())) => None,
        Ok(Err(error)) => Some(describe(&error)),
        Err(_) => Some("the prefill leg did not end in time".to_owned()),
    };
    duration.observe(started.elapsed().as_secs_f64());
    decision.attempt(attempt, |attempt, now| attempt.prefill_done_ms = Some(now));
    if let Some(message) = failure {
        tracing::warn!(target: SMG, worker = %claim.worker().url, message, "prefill leg broke off after its head");
        claim.judge(Verdict::Failure);
        leg::note_error(&core, claim.worker(), "backend_error");
        decision.attempt(attempt, |attempt, _| attempt.error = Some(format!("prefill: {message}")));
    }
}
