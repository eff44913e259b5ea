//! What earlier attempts of a request tried, and how strictly the next one avoids it.

use std::sync::Arc;

use smallvec::SmallVec;
use smg_fleet::WorkerId;

use super::Selection;
use crate::decision::Exclusion;
use crate::fleet::table::ModelPool;
use crate::fleet::worker::RoutedWorker;

/// What earlier attempts of the same request tried.
#[derive(Debug, Default)]
pub struct Tried {
    pub(super) failed: SmallVec<[WorkerId; 4]>,
    pairs: SmallVec<[(WorkerId, WorkerId); 4]>,
    ruled_out: SmallVec<[(WorkerId, WorkerId); 4]>,
}

impl Tried {
    /// Notes an attempt. `failed` is the worker that failed it, if one did.
    pub fn note(&mut self, prefill: WorkerId, decode: WorkerId, failed: Option<WorkerId>) {
        self.pairs.push((prefill, decode));
        self.failed.extend(failed);
    }

    /// No further attempt may use this pair: it would fail in the same way.
    pub fn rule_out(&mut self, prefill: WorkerId, decode: WorkerId) {
        self.ruled_out.push((prefill, decode));
    }

    /// The workers that were passed over for `selection` because they failed an earlier attempt.
    pub fn passed_over(&self, pool: &ModelPool, selection: &Selection) -> Vec<Exclusion> {
        if self.failed.is_empty() {
            return Vec::new();
        }
        let chosen = selection.ids();
        let prefills = pool.prefills.iter().map(|entry| &entry.worker);
        let workers = prefills.chain(&pool.decodes).chain(&pool.regulars);
        let failed = workers.filter(|worker| self.failed.contains(&worker.id()) && !chosen.contains(&worker.id()));
        let exclusion = |worker: &Arc<RoutedWorker>| Exclusion {
            worker: worker.url.as_str().to_owned(),
            reason: "failed an earlier attempt of this request",
        };
        failed.map(exclusion).collect()
    }

    /// Whether this is the first attempt.
    pub(super) fn is_empty(&self) -> bool {
        self.pairs.is_empty() && self.ruled_out.is_empty()
    }
}

/// How strictly an attempt avoids what was tried. Tried in this order until something is left.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Avoid {
    FailedWorkers,
    TriedPairs,
    Nothing,
}

impl Avoid {
    /// Whether an attempt may use this pair.
    pub(super) fn allows(self, tried: &Tried, prefill: &RoutedWorker, decode: &RoutedWorker) -> bool {
        let pair = (prefill.id(), decode.id());
        if tried.ruled_out.contains(&pair) {
            return false;
        }
        let pair_is_new = || !tried.pairs.contains(&pair);
        match self {
            Avoid::FailedWorkers => {
                !tried.failed.contains(&prefill.id()) && !tried.failed.contains(&decode.id()) && pair_is_new()
            }
            Avoid::TriedPairs => pair_is_new(),
            Avoid::Nothing => true,
        }
    }
}
