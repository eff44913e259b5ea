//! Decision records: why this pair, and what became of it.
//!
//! Every routed request leaves one record in a bounded ring, visible from the moment it is routed, so that an on-call engineer can ask about
//! a request that hangs as well as about one that failed. `GET /fleet/decisions?request_id=` reads it.

use std::collections::VecDeque;
use std::sync::Arc;

use parking_lot::Mutex;
use serde::Serialize;
use smg_fleet::policy::PolicyName;
use smg_telemetry::Metrics;

/// Most records kept.
pub const MAX_DECISIONS: usize = 4096;
/// Most exclusions noted per attempt.
const MAX_EXCLUSIONS: usize = 32;
/// Most decisions of policies noted per attempt.
const MAX_PICKS: usize = 8;

/// A worker that was passed over.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Exclusion {
    /// Its URL.
    pub worker: String,
    /// Why.
    pub reason: &'static str,
}

/// A decision of a policy.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Picked {
    /// `regular`, `prefill` or `decode`.
    pub leg: &'static str,
    /// The policy.
    pub policy: PolicyName,
    /// Which of its rules decided.
    pub branch: &'static str,
    /// The share of the prompt that its record of prompts knew, 0 to 1, if it asked one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub match_ratio: Option<f64>,
}

/// One attempt to serve a request. Times are milliseconds since the request arrived.
#[derive(Debug, Clone, Default, Serialize)]
#[allow(missing_docs)]
pub struct Attempt {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prefill: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub decode: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub regular: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prefill_policy: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub decode_policy: Option<&'static str>,
    /// `parallel`, `sequential`, `concurrent` (MoRI-IO WRITE) or `regular`.
    pub dispatch: &'static str,
    /// vLLM connector mode.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub connector_mode: Option<&'static str>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub bootstrap_rooms: Vec<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub transfer_id: Option<String>,
    /// Whether the decode leg carried a KV handoff; absent when that is not known to the gateway.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kv_handoff: Option<bool>,
    /// What policies decided, in order; a leg occurs again if the worker picked first let nobody in.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub picks: Vec<Picked>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub excluded: Vec<Exclusion>,
    pub selected_ms: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prefill_sent_ms: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prefill_head_ms: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prefill_done_ms: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub decode_sent_ms: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub decode_head_ms: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub first_output_ms: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

impl Attempt {
    /// Notes what went wrong, beside what is noted already: in parallel dispatch each leg may break off in its own way.
    pub fn note_error(&mut self, message: &str) {
        match &mut self.error {
            Some(error) => {
                error.push_str("; ");
                error.push_str(message);
            }
            None => self.error = Some(message.to_owned()),
        }
    }
}

/// The record of one request.
#[derive(Debug, Clone, Default, Serialize)]
#[allow(missing_docs)]
pub struct Record {
    pub request_id: String,
    pub arrived_at_unix_ms: u64,
    pub endpoint: &'static str,
    pub model: String,
    pub streaming: bool,
    /// The fleet revision it was routed with.
    pub revision: u64,
    /// Workers of the model: regular, prefill, decode.
    pub candidates: [usize; 3],
    pub attempts: Vec<Attempt>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub status: Option<u16>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error_code: Option<&'static str>,
    /// `completed`, `failed` or `cancelled` (the client left).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub outcome: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub finished_ms: Option<u64>,
}

/// A record that is being written.
#[derive(Debug, Clone)]
pub struct Decision {
    record: Arc<Mutex<Record>>,
    arrived: std::time::Instant,
}

impl Decision {
    /// Milliseconds since the request arrived.
    pub fn elapsed_ms(&self) -> u64 {
        u64::try_from(self.arrived.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    /// When the request arrived.
    pub fn arrived(&self) -> std::time::Instant {
        self.arrived
    }

    /// Changes the record.
    pub fn update(&self, change: impl FnOnce(&mut Record)) {
        change(&mut self.record.lock());
    }

    /// Changes attempt number `attempt`, given the time since arrival.
    pub fn attempt(&self, attempt: usize, change: impl FnOnce(&mut Attempt, u64)) {
        let now = self.elapsed_ms();
        if let Some(attempt) = self.record.lock().attempts.get_mut(attempt) {
            change(attempt, now);
        }
    }

    /// Adds an attempt and returns its number.
    pub fn begin_attempt(&self, mut attempt: Attempt) -> usize {
        attempt.selected_ms = self.elapsed_ms();
        attempt.excluded.truncate(MAX_EXCLUSIONS);
        attempt.picks.truncate(MAX_PICKS);
        let mut record = self.record.lock();
        record.attempts.push(attempt);
        record.attempts.len() - 1
    }
}

/// The last [`MAX_DECISIONS`] records.
#[derive(Debug)]
pub struct Decisions {
    ring: Mutex<VecDeque<Arc<Mutex<Record>>>>,
    metrics: Arc<Metrics>,
}

impl Decisions {
    /// An empty ring.
    pub fn new(metrics: Arc<Metrics>) -> Self {
        Self { ring: Mutex::new(VecDeque::with_capacity(MAX_DECISIONS)), metrics }
    }

    /// Opens the record of a request.
    pub fn open(&self, record: Record, arrived: std::time::Instant) -> Decision {
        let record = Arc::new(Mutex::new(record));
        let mut ring = self.ring.lock();
        if ring.len() >= MAX_DECISIONS {
            ring.pop_front();
            self.metrics.decisions_dropped.inc();
        }
        ring.push_back(Arc::clone(&record));
        Decision { record, arrived }
    }

    /// The newest records, at most `limit`, those of `request_id` only if one is given. Newest first.
    pub fn find(&self, request_id: Option<&str>, limit: usize) -> Vec<Record> {
        let records: Vec<_> = self.ring.lock().iter().rev().cloned().collect();
        let matching = |record: &Arc<Mutex<Record>>| {
            let record = record.lock();
            request_id.is_none_or(|id| record.request_id == id).then(|| record.clone())
        };
        records.iter().filter_map(matching).take(limit).collect()
    }
}
