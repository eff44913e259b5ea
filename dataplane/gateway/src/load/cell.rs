//! The last load report of one worker, as selection reads it.
//!
//! Every selection reads the report of every candidate, so a report is a handful of numbers without a lock. A reader that meets a report
//! while it is replaced may see numbers of both: each is true of its moment, and none decides alone.
//!
//! What was sent since a report is not credited to it: the requests that a gateway has in flight and the report does not know tell the same
//! without counting those that have ended meanwhile.
//!
//! Invariant: a report that is older than its time to live counts as none.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use smg_policies::LoadReport;

/// Stands for "the engine does not say".
const UNKNOWN: u64 = u64::MAX;

/// See the module's head.
#[derive(Debug)]
pub struct ReportCell {
    /// On the gateway's clock; 0 = there was never a report.
    expires_ms: AtomicU64,
    running: AtomicU64,
    waiting: AtomicU64,
    waiting_uncached_tokens: AtomicU64,
    kv_usage: AtomicU64,
    throughput: AtomicU64,
}

impl Default for ReportCell {
    fn default() -> Self {
        let zero = || AtomicU64::new(0);
        Self {
            expires_ms: zero(),
            running: zero(),
            waiting: zero(),
            waiting_uncached_tokens: zero(),
            kv_usage: zero(),
            throughput: AtomicU64::new(UNKNOWN),
        }
    }
}

impl ReportCell {
    /// Stores a report.
    pub fn store(&self, report: &LoadReport, expires_ms: u64) {
        self.running.store(report.running, Relaxed);
        self.waiting.store(report.waiting, Relaxed);
        self.waiting_uncached_tokens.store(report.waiting_uncached_tokens.unwrap_or(UNKNOWN), Relaxed);
        self.kv_usage.store(report.kv_usage.to_bits(), Relaxed);
        self.throughput.store(report.throughput.map_or(UNKNOWN, f64::to_bits), Relaxed);
        self.expires_ms.store(expires_ms.max(1), Relaxed);
    }

    /// There is no report any more.
    pub fn clear(&self) {
        self.expires_ms.store(0, Relaxed);
    }

    /// Waiting requests and the share of the KV cache in use, where the report still counts.
    pub fn pressure(&self, now_ms: u64) -> Option<(u64, f64)> {
        (self.expires_ms.load(Relaxed) > now_ms)
            .then(|| (self.waiting.load(Relaxed), f64::from_bits(self.kv_usage.load(Relaxed))))
    }

    /// The report, where it still counts.
    pub fn load(&self, now_ms: u64) -> Option<LoadReport> {
        if self.expires_ms.load(Relaxed) <= now_ms {
            return None;
        }
        let known = |value: u64| (value != UNKNOWN).then_some(value);
        Some(LoadReport {
            running: self.running.load(Relaxed),
            waiting: self.waiting.load(Relaxed),
            waiting_uncached_tokens: known(self.waiting_uncached_tokens.load(Relaxed)),
            kv_usage: f64::from_bits(self.kv_usage.load(Relaxed)),
            throughput: known(self.throughput.load(Relaxed)).map(f64::from_bits),
            dispatched_requests: 0,
            dispatched_tokens: 0,
        })
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn report() -> LoadReport {
        LoadReport { running: 3, waiting: 2, kv_usage: 0.25, throughput: Some(100.0), ..Default::default() }
    }

    #[test]
    fn a_report_counts_until_it_expires() {
        let cell = ReportCell::default();
        assert_eq!((cell.load(0), cell.pressure(0)), (None, None));
        cell.store(&report(), 1_000);
        assert_eq!(cell.load(999), Some(report()));
        assert_eq!(cell.pressure(999), Some((2, 0.25)));
        assert_eq!((cell.load(1_000), cell.pressure(1_000)), (None, None));
    }

    #[test]
    fn what_an_engine_does_not_say_stays_unsaid() {
        let cell = ReportCell::default();
        cell.store(&LoadReport { waiting_uncached_tokens: Some(7), throughput: None, ..report() }, 1_000);
        let read = cell.load(0).unwrap();
        assert_eq!((read.waiting_uncached_tokens, read.throughput), (Some(7), None));
        cell.clear();
        assert_eq!(cell.load(0), None);
    }
}
