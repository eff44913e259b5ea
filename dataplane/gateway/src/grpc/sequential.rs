//! Sequential dispatch: prefill, then decode with what it handed over (SMG PD docs, "Sequential Dispatch (vLLM)").
//!
//! The prefill's leg is over before the decode's begins, so a failed prefill never reaches the decode worker, nor its breaker. A handoff that
//! came is a handoff that is taken, or, when the client left or the decode's rooms were lost before its leg was sent, told of: the prefill
//! engine holds its blocks for a decode that never comes.

use std::sync::Arc;
use std::time::Instant;

use http::StatusCode;
use smg_engines::grpc::Message;
use smg_engines::grpc::vllm::{self, HandoffSource, Plan, Prefill};
use smg_services::engines::vllm::GenerateRequest;
use smg_telemetry::{ROUTERS, SMG};
use uuid::Uuid;

use super::claim::{Claim, note_orphan};
use super::client::EngineRequest;
use super::dispatch::{Attempt, Share, Side, Tie};
use super::leg::Leg;
use super::refusal::Refusal;
use super::running::{PrefillReport, Running};
use super::status::LegFailure;
use crate::core::Core;
use crate::dispatch::Failed;
use crate::fleet::worker::RoutedWorker;

/// A prefill leg, and the handoff that it brought and nobody has taken yet.
struct Prefilling {
    core: Arc<Core>,
    worker: Arc<RoutedWorker>,
    leg: Leg<Message>,
    handoff: Option<String>,
}

impl Drop for Prefilling {
    fn drop(&mut self) {
        let unread = self.leg.unread().filter_map(|reply| match reply {
            Ok(Message::Complete(complete)) => complete.kv_transfer_params,
            _ => None,
        });
        if let Some(handoff) = unread.last().or_else(|| self.handoff.take()) {
            note_orphan(&self.core, &self.worker, &handoff);
        }
    }
}

/// A dispatch whose prefill has been sent.
pub(super) struct Begun<'a> {
    prefill: &'a Side,
    share: &'a Share,
    request: GenerateRequest,
    plan: Plan,
    prefilling: Prefilling,
    started: Instant,
}

/// Sends the prefill leg.
pub(super) fn begin<'a>(
    attempt: &Attempt<'_>,
    prefill: &'a Side,
    claim: &Claim,
    share: &'a Share,
) -> Result<Begun<'a>, Failed> {
    let (worker, decode) = (&prefill.worker, &attempt.output.worker);
    let failed = |refusal| attempt.failed(prefill, refusal);
    let mooncake = worker.mooncake();
    let side = Prefill {
        connector: worker.connector,
        mooncake: mooncake.as_deref(),
        host: &worker.bootstrap_host,
        bootstrap_port: worker.record.spec.bootstrap_port,
    };
    let plan = vllm::plan(side, decode.connector, share.samples, Uuid::now_v7());
    let plan =
        plan.map_err(|error| failed(Refusal::new(StatusCode::NOT_IMPLEMENTED, error.code(), error.to_string())))?;
    let request = attempt.request.for_vllm(decode, share).map_err(failed)?;
    attempt.job.note(|attempt, now| {
        attempt.connector_mode = Some(worker.connector.mode_label());
        attempt.transfer_id = plan.transfer_id.clone().or_else(|| attempt.transfer_id.take());
        attempt.prefill_sent_ms = attempt.prefill_sent_ms.or(Some(now));
    });
    let started = Instant::now();
    let leg = EngineRequest::Vllm(Box::new(vllm::prefill_leg(&request, &plan, worker.dp_rank)));
    let tie = match &plan.source {
        HandoffSource::Minted(params) => Tie::Handoff(params.clone()),
        _ => Tie::None,
    };
    let leg = attempt.start((prefill, claim), share, leg, 1, tie);
    let (core, worker) = (Arc::clone(attempt.job.core), Arc::clone(worker));
    let prefilling = Prefilling { core, worker, leg, handoff: None };
    Ok(Begun { prefill, share, request, plan, prefilling, started })
}

impl Begun<'_> {
    /// Waits for the prefill, sends the decode and waits until that has answered.
    pub(super) async fn finish(self, attempt: &Attempt<'_>, claim: Claim) -> Result<Running, Failed> {
        let Self { prefill, share, request, plan, mut prefilling, started } = self;
        let (job, decode) = (attempt.job, &attempt.output);
        let (metrics, worker) = (&job.core.metrics, &prefill.worker);
        let mode = worker.connector.mode_label();
        let report = prefilling.drain(attempt, prefill).await?;
        let drained = Instant::now();
        if matches!(plan.source, HandoffSource::Expected | HandoffSource::Minted(_)) && prefilling.handoff.is_none() {
            metrics.pd_kv_transfer_failures.inc();
            let worker = &worker.url;
            tracing::warn!(target: SMG, %worker, mode, "the prefill handed nothing over: decode recomputes the prompt");
        }
        let handed_over = match &plan.source {
            HandoffSource::Expected | HandoffSource::Optional | HandoffSource::Minted(_) => {
                prefilling.handoff.is_some()
            }
            HandoffSource::Legacy { .. } => true,
            HandoffSource::None => false,
        };
        let request_id = &share.request_id;
        tracing::debug!(target: ROUTERS, request_id, mode, relayed = handed_over, "kv_transfer_params");
        job.note(|attempt, now| {
            attempt.prefill_done_ms = Some(now);
            attempt.kv_handoff = Some(handed_over);
            attempt.decode_sent_ms = attempt.decode_sent_ms.or(Some(now));
        });
        claim.dispatch().map_err(|shed| attempt.shed(decode, shed))?;
        let handoff = prefilling.handoff.take();
        let request = vllm::decode_leg(request, &plan.source, handoff, decode.worker.dp_rank);
        let request = EngineRequest::Vllm(Box::new(request));
        let mut output = attempt.start((decode, &claim), share, request, share.samples, Tie::None);
        drop(claim);
        let dispatched = Instant::now();
        let first = attempt.first(decode, &mut output).await?;
        job.note(|attempt, now| attempt.decode_head_ms = attempt.decode_head_ms.or(Some(now)));
        let labels = ["pd", &*job.model, worker.engine().as_str()];
        metrics.pd_kv_connector_mode.with_label_values(&[mode]).inc();
        metrics.pd_prefill_duration.with_label_values(&labels).observe((drained - started).as_secs_f64());
        metrics.pd_kv_transfer_duration.with_label_values(&labels).observe((dispatched - drained).as_secs_f64());
        // Several samples share no handoff: what the prefill's cache had says nothing about them.
        let report = if share.samples == 1 { report } else { PrefillReport { cached_tokens: None, ..report } };
        Ok(Running::new((output, dispatched), decode.part, first, share.base).with_prefill(None, report))
    }
}

impl Prefilling {
    /// Reads the prefill to its end.
    async fn drain(&mut self, attempt: &Attempt<'_>, side: &Side) -> Result<PrefillReport, Failed> {
        let mut report = PrefillReport::default();
        let mut answered = false;
        while let Some(reply) = self.leg.next().await {
            let mut message = match reply {
                Ok(message) => message,
                Err(failure) if answered => return Err(attempt.failed(side, Refusal::prefill_stream(&failure))),
                Err(failure) => return Err(attempt.not_started(side, &failure)),
            };
            if !answered {
                answered = true;
                attempt.job.note(|attempt, now| attempt.prefill_head_ms = attempt.prefill_head_ms.or(Some(now)));
            }
            if let Message::Complete(complete) = &mut message {
                self.handoff = complete.kv_transfer_params.take();
            }
            report.note(message);
        }
        if answered { Ok(report) } else { Err(attempt.not_started(side, &LegFailure::timed_out())) }
    }
}
