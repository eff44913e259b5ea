//! `bucket`: prompts of like length go to the same prefill worker.
//!
//! A long prompt holds up the short ones behind it; workers that each serve a range of lengths do not mix them. The ranges
//! are quantiles: worker `i` of `n` serves the prompts that lie in the `i`-th `n`-th of all characters of the last window,
//! sorted by length, so that all get the same amount of work, and any set of candidates is covered without gaps. At first
//! the lengths 0..4096 are split evenly. Every `adjust_interval_ms` of the caller's time the ranges are cut anew from the
//! window that ended, if it saw prompts.
//!
//! Where the characters given out in the running window are too uneven, the least laden worker serves instead.
//!
//! Lengths are counted in cells whose width is a 32nd of the length: the state is a few kilobytes whatever the traffic.

use parking_lot::Mutex;
use smg_fleet::policy::PolicyName;

use crate::fingerprint::KeyMap;
use crate::wait::{Waits, least};
use crate::{Candidate, Footprint, Pick, Policy, RequestView, WorkerKey};

/// Lengths up to which the first ranges are cut, in characters.
const INITIAL_LENGTH: u64 = 4096;

/// Cells per power of two.
const CELLS_PER_OCTAVE: u64 = 32;

/// The last cell collects whatever is longer than 2^40 characters.
const CELLS: usize = (CELLS_PER_OCTAVE * 36) as usize;

/// How `bucket` cuts and balances.
#[derive(Debug, Clone, PartialEq)]
pub struct BucketTuning {
    /// How often ranges are cut anew, in milliseconds.
    pub adjust_interval_ms: u64,
    /// Characters are uneven if the most and the least laden worker differ by more than this … (`--balance-abs-threshold`)
    pub balance_abs_threshold: u64,
    /// … and the most laden has more than this multiple of the least (`--balance-rel-threshold`).
    pub balance_rel_threshold: f64,
}

impl Default for BucketTuning {
    fn default() -> Self {
        Self { adjust_interval_ms: 5_000, balance_abs_threshold: 64, balance_rel_threshold: 1.5 }
    }
}

/// Ranges of prompt lengths.
#[derive(Debug, Default)]
pub struct Bucket {
    tuning: BucketTuning,
    window: Mutex<Window>,
}

impl Bucket {
    /// With this tuning.
    pub fn new(tuning: BucketTuning) -> Self {
        Self { tuning, window: Mutex::default() }
    }

    fn uneven(&self, given: &[f64]) -> bool {
        let most = given.iter().copied().fold(0.0, f64::max);
        let least = given.iter().copied().fold(f64::INFINITY, f64::min);
        most - least > self.tuning.balance_abs_threshold as f64 && most > self.tuning.balance_rel_threshold * least
    }
}

impl Policy for Bucket {
    fn name(&self) -> PolicyName {
        PolicyName::Bucket
    }

    fn pick(&self, candidates: &[Candidate<'_>], request: &RequestView<'_>, entropy: u64) -> Option<usize> {
        self.decide(candidates, request, entropy).index
    }

    fn decide(&self, candidates: &[Candidate<'_>], request: &RequestView<'_>, entropy: u64) -> Pick {
        if candidates.is_empty() {
            return Pick::new(None, "no_healthy_workers");
        }
        let mut window = self.window.lock();
        window.advance(request.now_ms, self.tuning.adjust_interval_ms);
        let given: Waits = candidates.iter().map(|candidate| window.given(candidate.id) as f64).collect();
        let least_laden = || least(&given, |_| true, entropy);
        let Some(chars) = request.prompt().map(|prompt| prompt.chars()) else {
            return Pick::new(least_laden(), "no_prompt");
        };
        let (index, branch) = if self.uneven(&given) {
            (least_laden(), "load_balance")
        } else {
            let place = window.share_of_shorter(chars) * candidates.len() as f64;
            (Some((place as usize).min(candidates.len() - 1)), "bucket_hit")
        };
        if let Some(candidate) = index.and_then(|index| candidates.get(index)) {
            window.note(candidate.id, chars);
        }
        Pick::new(index, branch)
    }

    fn reads_prompt(&self) -> bool {
        true
    }

    fn retain(&self, workers: &[WorkerKey]) {
        self.window.lock().given.retain(|worker, _| workers.contains(worker));
    }

    fn footprint(&self) -> Footprint {
        let workers = self.window.lock().given.len();
        Footprint { entries: workers, bytes: 2 * CELLS * size_of::<u64>(), workers, ..Footprint::default() }
    }
}

#[derive(Debug, Default)]
struct Window {
    started_ms: u64,
    /// Characters per cell of the running window; empty before the first prompt.
    cells: Vec<u64>,
    /// Characters of the last window in the cells before each; empty before the first cut.
    before: Vec<u64>,
    /// Characters of the last window.
    total: u64,
    /// Characters given to each worker in the running window.
    given: KeyMap<u64>,
}

impl Window {
    fn given(&self, worker: WorkerKey) -> u64 {
        self.given.get(&worker).copied().unwrap_or(0)
    }

    fn note(&mut self, worker: WorkerKey, chars: u64) {
        self.cells.resize(CELLS, 0);
        let cell = &mut self.cells[cell(chars)];
        *cell = cell.saturating_add(chars);
        let given = self.given.entry(worker).or_insert(0);
        *given = given.saturating_add(chars);
    }

    /// Cuts the ranges anew if the window is over.
    fn advance(&mut self, now_ms: u64, interval_ms: u64) {
        if now_ms.saturating_sub(self.started_ms) < interval_ms {
            return;
        }
        self.started_ms = now_ms;
        self.given.clear();
        let cells = std::mem::take(&mut self.cells);
        if cells.iter().all(|chars| *chars == 0) {
            return;
        }
        self.total = 0;
        self.before.clear();
        for chars in cells {
            self.before.push(self.total);
            self.total = self.total.saturating_add(chars);
        }
    }

    /// The share of the last window's characters in prompts shorter than `chars`, 0 to 1.
    fn share_of_shorter(&self, chars: u64) -> f64 {
        match self.before.get(cell(chars)) {
            Some(before) if self.total > 0 => *before as f64 / self.total as f64,
            _ => chars as f64 / INITIAL_LENGTH as f64,
        }
    }
}

/// The cell of a length: one for each below 32, then 32 for each power of two.
fn cell(chars: u64) -> usize {
    let octave = u64::from(chars.max(1).ilog2()).saturating_sub(5);
    let cell = octave * CELLS_PER_OCTAVE + (chars >> octave);
    (cell as usize).min(CELLS - 1)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
mod tests {
    use super::*;

    #[test]
    fn cells_ascend_with_the_length_and_are_narrow() {
        let mut last = 0;
        for chars in 0..100_000 {
            let cell = cell(chars);
            assert!(cell == last || cell == last + 1, "{chars}: {cell} after {last}");
            last = cell;
        }
        assert_ne!(cell(1_000_000), cell(1_040_000));
        assert_eq!(cell(u64::MAX), CELLS - 1);
    }
}
