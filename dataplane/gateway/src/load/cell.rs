//! The last load report of one worker, as selection reads it.
//!
//! Every selection reads the report of every candidate, so a report is a handful of numbers without a lock. A reader that meets a report
//! while it is replaced may see numbers of both: each is true of its moment, and none decides alone.
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
    /// What this gateway ever sent: requests, and their estimated tokens …
    sent_requests: AtomicU64,
    sent_tokens: AtomicU64,
    /// … and what of it the report knows.
    known_requests: AtomicU64,
    known_tokens: AtomicU64,
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
            sent_requests: zero(),
            sent_tokens: zero(),
            known_requests: zero(),
            known_tokens: zero(),
        }
    }
}

impl ReportCell {
    /// A request of about so many prompt tokens goes to the worker.
    pub fn note_sent(&self, tokens: u64) {
        self.sent_requests.fetch_add(1, Relaxed);
        self.sent_tokens.fetch_add(tokens, Relaxed);
    }

    /// What was sent so far: to be taken before the engine is asked.
    pub fn sent(&self) -> (u64, u64) {
        (self.sent_requests.load(Relaxed), self.sent_tokens.load(Relaxed))
    }

    /// Stores a report of which it is known what had been `sent` when the engine was asked.
    pub fn store(&self, report: &LoadReport, sent: (u64, u64), expires_ms: u64) {
        self.running.store(report.running, Relaxed);
        self.waiting.store(report.waiting, Relaxed);
        self.waiting_uncached_tokens.store(report.waiting_uncached_tokens.unwrap_or(UNKNOWN), Relaxed);
        self.kv_usage.store(report.kv_usage.to_bits(), Relaxed);
        self.throughput.store(report.throughput.map_or(UNKNOWN, f64::to_bits), Relaxed);
        self.known_requests.store(sent.0, Relaxed);
        self.known_tokens.store(sent.1, Relaxed);
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

    /// The report, where it still counts, with what was sent since.
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
            dispatched_requests: self.sent_requests.load(Relaxed).saturating_sub(self.known_requests.load(Relaxed)),
            dispatched_tokens: self.sent_tokens.load(Relaxed).saturating_sub(self.known_tokens.load(Relaxed)),
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
        cell.store(&report(), cell.sent(), 1_000);
        assert_eq!(cell.load(999), Some(report()));
        assert_eq!(cell.pressure(999), Some((2, 0.25)));
        assert_eq!((cell.load(1_000), cell.pressure(1_000)), (None, None));
    }

    #[test]
    fn what_was_sent_after_the_engine_was_asked_is_added() {
        let cell = ReportCell::default();
        cell.note_sent(100);
        let sent = cell.sent();
        cell.note_sent(40);
        cell.store(&LoadReport { waiting_uncached_tokens: Some(7), throughput: None, ..report() }, sent, 1_000);
        cell.note_sent(2);
        let read = cell.load(0).unwrap();
        assert_eq!((read.dispatched_requests, read.dispatched_tokens), (2, 42));
        assert_eq!((read.waiting_uncached_tokens, read.throughput), (Some(7), None));
        cell.clear();
        assert_eq!(cell.load(0), None);
    }
}
