//! Expected wait: how long a request would wait on each candidate, in seconds.
//!
//! For a worker that reports its load it is the work ahead of the request over the worker's speed, plus a penalty that is
//! small until the KV cache is nearly full and then steep:
//!
//! ```text
//! (queued tokens + (running + unaccounted)·p + tokens sent since the report) / throughput + w·k/(1-k)
//! ```
//!
//! `p` is the mean prompt length, `k` the share of KV in use, and *unaccounted* are requests this gateway has in flight that
//! neither the report nor the credit for what was sent since knows. A worker without a report counts as the best of those
//! that have one plus its own requests in flight: it is neither flooded nor starved. Where nobody reports, the
//! requests in flight are all that is known, and they decide.

use smallvec::SmallVec;

use crate::request::{Candidate, LoadReport};
use crate::uniform;

/// Waits that differ by less than this many seconds are equal.
const TIE_SECONDS: f64 = 1e-6;

/// KV use above this counts as this: the penalty stays finite.
const MAX_KV_USAGE: f64 = 0.999;

/// How expected waits are computed.
#[derive(Debug, Clone, PartialEq)]
pub struct WaitTuning {
    /// Weight of the KV penalty, in seconds (`--least-load-kv-pressure-weight`).
    pub kv_pressure_weight: f64,
    /// Tokens per second of a worker that reports none (`--least-load-default-throughput`).
    pub default_throughput: f64,
    /// Tokens of a prompt of unknown length (`--least-load-mean-prefill-tokens`).
    pub mean_prefill_tokens: u64,
}

impl Default for WaitTuning {
    fn default() -> Self {
        Self { kv_pressure_weight: 0.15, default_throughput: 2000.0, mean_prefill_tokens: 1024 }
    }
}

impl WaitTuning {
    fn reported(&self, load: u64, report: &LoadReport) -> f64 {
        let mean = self.mean_prefill_tokens;
        let queued = report.waiting_uncached_tokens.unwrap_or_else(|| report.waiting.saturating_mul(mean));
        let known = report.running.saturating_add(report.waiting).saturating_add(report.dispatched_requests);
        let counted = report.running.saturating_add(load.saturating_sub(known)).saturating_mul(mean);
        let tokens = queued.saturating_add(counted).saturating_add(report.dispatched_tokens);
        let throughput = report.throughput.filter(|speed| speed.is_finite() && *speed > 0.0);
        let kv = kv_usage(report).min(MAX_KV_USAGE);
        tokens as f64 / throughput.unwrap_or_else(|| self.nominal()) + self.kv_pressure_weight * kv / (1.0 - kv)
    }

    fn nominal(&self) -> f64 {
        if self.default_throughput > 0.0 { self.default_throughput } else { 1.0 }
    }
}

/// The share of KV in use, whatever the engine wrote.
pub(crate) fn kv_usage(report: &LoadReport) -> f64 {
    if report.kv_usage.is_finite() { report.kv_usage.clamp(0.0, 1.0) } else { 0.0 }
}

/// One number per candidate, comparable within one call only.
pub(crate) type Waits = SmallVec<[f64; 32]>;

/// The expected wait of each candidate; requests in flight where nobody reports.
pub(crate) fn expected_waits(candidates: &[Candidate<'_>], tuning: &WaitTuning) -> Waits {
    let reported = |candidate: &Candidate<'_>| candidate.report.map(|report| tuning.reported(candidate.load, &report));
    let best = candidates.iter().filter_map(reported).reduce(f64::min);
    let Some(best) = best else {
        return candidates.iter().map(|candidate| candidate.load as f64).collect();
    };
    let unreported =
        |candidate: &Candidate<'_>| best + candidate.load as f64 * tuning.mean_prefill_tokens as f64 / tuning.nominal();
    candidates.iter().map(|candidate| reported(candidate).unwrap_or_else(|| unreported(candidate))).collect()
}

/// The index of the least wait among the eligible; uniform over ties. None if nothing is eligible.
pub(crate) fn least(waits: &[f64], eligible: impl Fn(usize) -> bool, entropy: u64) -> Option<usize> {
    let open = || waits.iter().enumerate().filter(|(index, _)| eligible(*index));
    let minimum = open().map(|(_, wait)| *wait).reduce(f64::min)?;
    let tied = || open().filter(|(_, wait)| **wait <= minimum + TIE_SECONDS);
    tied().nth(uniform(entropy, tied().count())).map(|(index, _)| index)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
mod tests {
    use super::*;

    fn worker(load: u64, report: Option<LoadReport>) -> Candidate<'static> {
        Candidate::new(1, "http://worker", load).with_report(report)
    }

    fn wait(load: u64, report: LoadReport) -> f64 {
        expected_waits(&[worker(load, Some(report))], &WaitTuning::default())[0]
    }

    #[test]
    fn each_term_of_the_formula_counts_in_seconds() {
        let second = |seconds: f64, wait: f64| assert!((wait - seconds).abs() < 1e-9, "{wait} is not {seconds}");
        let none = LoadReport::default();
        second(0.0, wait(0, none));
        second(4.0 * 1024.0 / 2000.0, wait(0, LoadReport { waiting: 4, ..none }));
        second(1.0, wait(0, LoadReport { waiting: 4, waiting_uncached_tokens: Some(2000), ..none }));
        second(2.0 * 1024.0 / 2000.0, wait(0, LoadReport { running: 2, ..none }));
        // Five in flight here: two are in the report, one was sent since (300 tokens), two are not accounted for.
        let partly = LoadReport { running: 2, dispatched_requests: 1, dispatched_tokens: 300, ..none };
        second((4.0 * 1024.0 + 300.0) / 2000.0, wait(5, partly));
        second(1.0, wait(0, LoadReport { dispatched_tokens: 500, throughput: Some(500.0), ..none }));
        second(0.15, wait(0, LoadReport { kv_usage: 0.5, ..none }));
        second(0.15 * 9.0, wait(0, LoadReport { kv_usage: 0.9, ..none }));
    }

    #[test]
    fn a_silent_worker_counts_as_the_best_of_its_peers_plus_its_own_requests() {
        let report = |waiting| Some(LoadReport { waiting, ..Default::default() });
        let waits = expected_waits(
            &[worker(0, report(3)), worker(0, report(1)), worker(0, None), worker(2, None)],
            &WaitTuning::default(),
        );
        assert_eq!(waits[2], waits[1]);
        assert!(waits[3] > waits[1] && waits[3] <= waits[0]);
    }

    #[test]
    fn without_any_report_the_requests_in_flight_decide() {
        let waits = expected_waits(&[worker(7, None), worker(3, None)], &WaitTuning::default());
        assert_eq!(waits.as_slice(), [7.0, 3.0]);
    }

    #[test]
    fn absurd_reports_yield_finite_waits() {
        for kv_usage in [f64::NAN, f64::INFINITY, -3.0, 1.0, 77.0] {
            for throughput in [Some(f64::NAN), Some(0.0), Some(-1.0), None] {
                let report = LoadReport { kv_usage, throughput, running: u64::MAX, ..Default::default() };
                assert!(wait(u64::MAX, report).is_finite());
            }
        }
    }
}
