//! `least_load`: the candidate with the least expected wait.
//!
//! Looks at every candidate, so the choice is as good as the reports are fresh; what this gateway sent since a report is
//! credited, so that a burst between two reports spreads.

use smg_fleet::policy::PolicyName;

use crate::wait::{WaitTuning, expected_waits, least};
use crate::{Candidate, Policy, RequestView};

/// How `least_load` weighs workers.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct LeastLoadTuning {
    /// How waits are computed.
    pub wait: WaitTuning,
    /// A worker with this many requests waiting, those sent since its report included, is passed over
    /// (`--least-load-max-waiting-requests`). 0 is no cap.
    pub max_waiting_requests: u64,
}

/// The least expected wait, ties at random.
#[derive(Debug, Default)]
pub struct LeastLoad {
    tuning: LeastLoadTuning,
}

impl LeastLoad {
    /// With this tuning.
    pub const fn new(tuning: LeastLoadTuning) -> Self {
        Self { tuning }
    }

    /// A worker that reports nothing is never at the cap.
    fn below_cap(&self, candidate: &Candidate<'_>) -> bool {
        let cap = self.tuning.max_waiting_requests;
        let waiting = candidate.report.map(|report| report.waiting.saturating_add(report.dispatched_requests));
        cap == 0 || waiting.is_none_or(|waiting| waiting < cap)
    }
}

impl Policy for LeastLoad {
    fn name(&self) -> PolicyName {
        PolicyName::LeastLoad
    }

    /// None also when every candidate is at the cap: better an error now than a place at the end of a long queue.
    fn pick(&self, candidates: &[Candidate<'_>], _request: &RequestView<'_>, entropy: u64) -> Option<usize> {
        let waits = expected_waits(candidates, &self.tuning.wait);
        least(&waits, |index| self.below_cap(&candidates[index]), entropy)
    }
}
