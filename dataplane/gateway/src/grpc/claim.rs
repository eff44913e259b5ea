//! What the legs of one worker have in common: its claim, and, of a decode, its rooms in the running window.
//!
//! A request may be several requests of its engines: one for each prompt and sample. They are one request to the breaker (a failure, if any
//! of them failed) and many to the load. Each leg holds the claim until it is over, and the last one gives it back.

use std::sync::Arc;

use parking_lot::Mutex;
use smg_engines::grpc::Message;
use smg_telemetry::{ROUTERS, SMG};

use super::leg::{Account, Part};
use super::rooms::Room;
use super::status::{FailureKind, LegFailure};
use crate::admission::decode::{Permit, Shed};
use crate::core::Core;
use crate::dispatch::leg::note_error;
use crate::fleet::worker::{InFlight, RoutedWorker};
use crate::resilience::breaker::Verdict;
use crate::resilience::ejection;

/// The claim on a worker, shared by all its legs of one attempt.
#[derive(Debug, Clone)]
pub struct Claim(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    worker: Arc<RoutedWorker>,
    claim: Mutex<(InFlight, bool)>,
    /// Given back with the claim.
    permit: Option<Permit>,
}

impl Claim {
    /// Shares a claim, which stands for so many requests of the engine.
    pub fn new(mut claim: InFlight, requests: u32, permit: Option<Permit>) -> Self {
        claim.weigh(requests);
        let worker = Arc::clone(claim.worker());
        Self(Arc::new(Shared { worker, claim: Mutex::new((claim, false)), permit }))
    }

    /// The worker.
    pub fn worker(&self) -> &Arc<RoutedWorker> {
        &self.0.worker
    }

    /// Whether there are rooms in it.
    pub fn is_admitted(&self) -> bool {
        self.0.permit.is_some()
    }

    /// One of its requests is about to be sent.
    ///
    /// # Errors
    /// The rooms are not this gateway's any more.
    pub fn dispatch(&self) -> Result<(), Shed> {
        self.0.permit.as_ref().map_or(Ok(()), |permit| permit.dispatch(1))
    }

    fn answered(&self) {
        let mut claim = self.0.claim.lock();
        if !claim.1 {
            claim.0.judge(Verdict::Success);
        }
    }

    fn failed(&self, failure: &LegFailure) {
        let mut claim = self.0.claim.lock();
        if claim.1 {
            return;
        }
        if failure.charged {
            claim.0.judge_status(failure.status);
            claim.1 = true;
        } else {
            claim.0.judge(Verdict::Neutral);
        }
    }
}

/// What one leg holds.
pub struct Holding {
    core: Arc<Core>,
    claim: Claim,
    part: Part,
    /// Since when the engine surely has the request.
    sure: Option<u64>,
    /// Held by both legs.
    #[allow(dead_code, reason = "held for its drop")]
    room: Option<Arc<Room>>,
}

impl Holding {
    /// Takes a leg's share of `claim` and `room`.
    pub fn new(core: &Arc<Core>, claim: &Claim, part: Part, room: Option<Arc<Room>>) -> Self {
        core.metrics.grpc_legs.with_label_values(&[part.as_str()]).inc();
        Self { core: Arc::clone(core), claim: claim.clone(), part, sure: None, room }
    }
}

impl Account<Message> for Holding {
    fn answered(&mut self) {
        self.claim.answered();
        self.core.metrics.router_upstream_responses.with_label_values(&["grpc", "200", ""]).inc();
    }

    fn is_sure(&mut self, sure: bool) {
        let Some(permit) = &self.claim.0.permit else { return };
        if let Some(since) = self.sure.take() {
            permit.window().is_unsure(since);
        }
        if sure {
            self.sure = Some(permit.window().is_sure());
        }
    }

    fn failed(&mut self, failure: &LegFailure) {
        let worker = self.claim.worker();
        self.claim.failed(failure);
        if failure.kind == FailureKind::Unreachable {
            ejection::eject(&self.core, worker, &failure.message);
        }
        if let Some(phase) = failure.phase.filter(|_| self.part != Part::Regular) {
            self.core.metrics.pd_rendezvous_failures.with_label_values(&[self.part.as_str(), phase]).inc();
        }
        if failure.status.is_server_error() {
            note_error(&self.core, worker, failure.label());
        }
        self.core.metrics.router_upstream_responses.with_label_values(&["grpc", failure.status.as_str(), ""]).inc();
    }

    fn aborted(&mut self, taken: bool) {
        let result = if taken { "taken" } else { "failed" };
        self.core.metrics.grpc_aborts.with_label_values(&[self.part.as_str(), result]).inc();
        let worker = &self.claim.worker().url;
        tracing::debug!(target: ROUTERS, %worker, leg = self.part.as_str(), result, "aborted a request");
    }

    fn discarded(&mut self, reply: Message) {
        let Message::Complete(complete) = reply else { return };
        let Some(handoff) = complete.kv_transfer_params.filter(|_| self.part == Part::Prefill) else { return };
        note_orphan(&self.core, self.claim.worker(), &handoff);
    }
}

/// Tells of a handoff that no decode engine was told about.
pub fn note_orphan(core: &Core, prefill: &RoutedWorker, handoff: &str) {
    core.metrics.pd_orphaned_handoffs.inc();
    let shown = handoff.get(..handoff.floor_char_boundary(512)).unwrap_or_default();
    tracing::warn!(
        target: SMG,
        worker = %prefill.url,
        kv_transfer_params = shown,
        "no decode leg took this handoff: the prefill engine keeps its blocks until they expire"
    );
}

impl Drop for Holding {
    fn drop(&mut self) {
        self.is_sure(false);
        self.core.metrics.grpc_legs.with_label_values(&[self.part.as_str()]).dec();
    }
}
