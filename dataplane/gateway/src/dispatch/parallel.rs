//! Parallel dispatch: both legs at once around a rendezvous (SMG PD docs, "Parallel Dispatch").
//!
//! The response starts when both heads are 2xx. Until then the first failure ends the attempt and closes the other leg. From then on the
//! prefill's body is drained in the background, because closing it early would abort the KV transfer; the drain outlives the client and
//! records the prefill's outcome when it ends. A request for log probabilities waits for the prefill's body instead.

use std::sync::Arc;
use std::time::Instant as StdInstant;

use axum::body::Body;
use http::Response;
use http_body_util::BodyExt;
use smg_engines::sglang::{self, Ranks, Rendezvous, Shape};
use smg_telemetry::SMG;
use tokio::time::Instant;

use super::leg::{self, LegBody};
use super::race::{self, Lost};
use super::scope::Scope;
use super::{Failed, Job, LegCodes, logprobs, respond};
use crate::connections::Answer;
use crate::core::Core;
use crate::decision::Decision;
use crate::fleet::worker::InFlight;
use crate::front::error::GatewayError;
use crate::relay::describe;
use crate::resilience::breaker::Verdict;

pub(super) async fn run(
    job: &Job<'_>,
    mut prefill: InFlight,
    mut decode: InFlight,
    scope: &mut Option<Scope>,
) -> Result<Response<Body>, Failed> {
    let request = job.request;
    let prefill_worker = Arc::clone(prefill.worker());
    let shape = Shape::of(&request.body).map_err(|error| {
        job.core.metrics.pd_bootstrap_failures.inc();
        Failed::gateway(GatewayError::Unsupported(error), None)
    })?;
    let port = prefill_worker.record.spec.bootstrap_port;
    let rendezvous = Rendezvous::mint(&prefill_worker.bootstrap_host, port, shape, rand::random);
    let ranks = Ranks { prefill: prefill_worker.dp_rank, decode: decode.worker().dp_rank };
    let legs = sglang::legs(&request.body, job.client_fields, &rendezvous, ranks);
    job.note(|attempt, now| {
        attempt.bootstrap_rooms = rendezvous.rooms().iter().copied().take(16).collect();
        attempt.prefill_sent_ms = Some(now);
        attempt.decode_sent_ms = Some(now);
    });
    let started = StdInstant::now();
    let raced = {
        let prefill_leg = async {
            let body = LegBody::Spliced(legs.prefill, None);
            let head = job.send(&mut prefill, body, LegCodes::PARALLEL_PREFILL).await?;
            job.note(|attempt, now| attempt.prefill_head_ms = Some(now));
            Ok(head)
        };
        let decode_leg = async {
            let head = job.send(&mut decode, LegBody::Spliced(legs.decode, None), LegCodes::DECODE).await?;
            job.note(|attempt, now| attempt.decode_head_ms = Some(now));
            Ok(head)
        };
        race::both(prefill_leg, decode_leg).await
    };
    let (prefill_head, decode_head) = match raced {
        Ok(heads) => heads,
        // The other leg was cut short by us: that says nothing about its worker.
        Err(Lost::Prefill(failed)) => {
            decode.judge(Verdict::Neutral);
            return Err(failed);
        }
        Err(Lost::Decode { failed, .. }) => {
            prefill.judge(Verdict::Neutral);
            return Err(failed);
        }
    };
    let labels = ["pd", &*job.model, prefill_worker.engine().as_str()];
    let metrics = &job.core.metrics;
    let first_output = vec![
        (metrics.pd_ttft.with_label_values(&labels), started),
        (metrics.pd_decode_ttft.with_label_values(&labels), started),
    ];
    if request.body.wants_logprobs() {
        let duration = metrics.pd_prefill_duration.with_label_values(&labels);
        let answer = logprobs::of_prefill(job, prefill, prefill_head.into_body(), (duration, started)).await;
        return logprobs::respond(job, answer, (decode_head, decode), scope, first_output).await;
    }
    job.note(|attempt, _| attempt.prefill_drains = true);
    let drain = drain_prefill(
        Arc::clone(job.core),
        prefill,
        prefill_head.into_body(),
        metrics.pd_prefill_duration.with_label_values(&labels),
        started,
        (job.decision.clone(), job.attempt),
        job.deadline,
    );
    // Most often all of it is there by now.
    let mut drain = Box::pin(drain);
    if futures::poll!(&mut drain).is_pending() {
        job.core.background.spawn(drain);
    }
    respond::relay(job, decode_head, decode, scope, first_output, None).await
}

/// Reads the prefill's body to its end and records its outcome there.
async fn drain_prefill(
    core: Arc<Core>,
    mut claim: InFlight,
    mut body: Answer,
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
        decision.attempt(attempt, |attempt, _| attempt.note_error(&format!("prefill: {message}")));
    }
    decision.record_drained_prefill(attempt);
}
