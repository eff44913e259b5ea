//! Decision records: why this pair, and what became of it.
//!
//! Every routed request leaves one record in a bounded ring, visible from the moment it is routed, so that an on-call engineer can ask about
//! a request that hangs as well as about one that failed. `GET /fleet/decisions?request_id=` reads it.

use std::collections::VecDeque;
use std::sync::Arc;

use parking_lot::Mutex;
use prometheus::Histogram;
use serde::{Serialize, Serializer};
use smg_fleet::Wire;
use smg_fleet::policy::PolicyName;
use smg_telemetry::Metrics;

use crate::trace::{LegSpans, RequestTrace};
use crate::words;

/// Most records kept.
pub const MAX_DECISIONS: usize = 4096;
/// Most exclusions noted per attempt.
const MAX_EXCLUSIONS: usize = 32;
/// Most decisions of policies noted per attempt.
const MAX_PICKS: usize = 8;

/// A time since a request arrived, in microseconds; shown in milliseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct Millis(u64);

impl Millis {
    /// Seconds from `earlier` to this.
    fn seconds_since(self, earlier: Self) -> f64 {
        self.0.saturating_sub(earlier.0) as f64 / 1e6
    }

    /// Nanoseconds.
    pub fn nanos(self) -> u64 {
        self.0.saturating_mul(1000)
    }
}

impl Serialize for Millis {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_f64(self.0 as f64 / 1000.0)
    }
}

impl std::fmt::Display for Millis {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}.{:03}", self.0 / 1000, self.0 % 1000)
    }
}

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
    /// When its workers began to be chosen, after the pause before a retry.
    pub began_ms: Millis,
    pub selected_ms: Millis,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prefill_sent_ms: Option<Millis>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prefill_head_ms: Option<Millis>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prefill_done_ms: Option<Millis>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub decode_sent_ms: Option<Millis>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub decode_head_ms: Option<Millis>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub first_output_ms: Option<Millis>,
    /// When it failed before its response head.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub failed_ms: Option<Millis>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// The prefill's body is drained in the background and may end after the request.
    #[serde(skip)]
    pub prefill_drains: bool,
    /// Spans of the legs, if the request is traced.
    #[serde(skip)]
    pub spans: Option<LegSpans>,
}

impl Attempt {
    /// Notes what went wrong, beside what is noted already: in parallel dispatch each leg may break off in its own way.
    pub fn note_error(&mut self, message: &str) {
        match &mut self.error {
            Some(error) if error.len() > words::KEPT => {}
            Some(error) => {
                error.push_str("; ");
                error.push_str(&words::cut(message.to_owned(), words::KEPT));
            }
            None => self.error = Some(words::cut(message.to_owned(), words::KEPT)),
        }
    }
}

/// The record of one request.
#[derive(Debug, Clone, Default, Serialize)]
#[allow(missing_docs)]
pub struct Record {
    pub request_id: String,
    /// The trace it belongs to, if it is traced.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub trace_id: Option<String>,
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
    pub finished_ms: Option<Millis>,
    /// When the workers of the next attempt began to be chosen.
    #[serde(skip)]
    pub selecting_since: Millis,
    /// The wire of the workers that served it.
    #[serde(skip)]
    pub wire: Wire,
}

/// A record that is being written.
#[derive(Debug, Clone)]
pub struct Decision {
    record: Arc<Mutex<Record>>,
    arrived: std::time::Instant,
    trace: Option<Arc<RequestTrace>>,
    stages: Arc<[Stages; 2]>,
}

/// Histograms of the phases, by name.
#[derive(Debug)]
struct Stages {
    route: Histogram,
    prefill: Histogram,
    decode: Histogram,
    first_byte: Histogram,
    relay: Histogram,
}

impl Stages {
    /// Those of HTTP and of gRPC.
    fn both(metrics: &Metrics) -> [Self; 2] {
        [Wire::Http, Wire::Grpc].map(|wire| Self::new(metrics, wire))
    }

    fn new(metrics: &Metrics, wire: Wire) -> Self {
        let stage = |name| metrics.router_stage_duration.with_label_values(&[wire.as_str(), name]);
        Self {
            route: stage("route"),
            prefill: stage("prefill"),
            decode: stage("decode"),
            first_byte: stage("first_byte"),
            relay: stage("relay"),
        }
    }

    fn observe(&self, record: &Record) {
        let Some(attempt) = record.attempts.last() else { return };
        let phases = [
            (&self.route, Some(attempt.began_ms), Some(attempt.selected_ms)),
            (&self.prefill, attempt.prefill_sent_ms, attempt.prefill_done_ms),
            (&self.decode, attempt.decode_sent_ms, attempt.decode_head_ms),
            (&self.first_byte, attempt.decode_sent_ms, attempt.first_output_ms),
            (&self.relay, attempt.first_output_ms, record.finished_ms),
        ];
        for (histogram, start, end) in phases {
            if let (Some(start), Some(end)) = (start, end) {
                histogram.observe(end.seconds_since(start));
            }
        }
    }
}

impl Decision {
    /// Time since the request arrived.
    pub fn elapsed(&self) -> Millis {
        Millis(u64::try_from(self.arrived.elapsed().as_micros()).unwrap_or(u64::MAX))
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
    pub fn attempt(&self, attempt: usize, change: impl FnOnce(&mut Attempt, Millis)) {
        let now = self.elapsed();
        if let Some(attempt) = self.record.lock().attempts.get_mut(attempt) {
            change(attempt, now);
        }
    }

    /// The workers of an attempt begin to be chosen.
    pub fn begin_selection(&self) {
        let now = self.elapsed();
        self.record.lock().selecting_since = now;
    }

    /// Reads the record.
    pub fn read<T>(&self, read: impl FnOnce(&Record) -> T) -> T {
        read(&self.record.lock())
    }

    /// The request has ended: its phases are measured and, if it is traced, recorded as spans.
    pub fn record_phases(&self) {
        let record = self.record.lock();
        let [http, grpc] = &*self.stages;
        if record.wire == Wire::Grpc { grpc } else { http }.observe(&record);
        if let Some(trace) = &self.trace {
            trace.record_phases(&record, self.arrived);
        }
    }

    /// The prefill of an attempt has been drained: records its span, if the request is traced.
    pub fn record_drained_prefill(&self, attempt: usize) {
        if let Some(trace) = &self.trace
            && let Some(attempt) = self.record.lock().attempts.get(attempt)
        {
            trace.record_prefill(attempt, self.arrived);
        }
    }

    /// Spans for the legs of an attempt, if the request is traced.
    pub fn leg_spans(&self) -> Option<LegSpans> {
        self.trace.as_ref().map(|trace| trace.leg_spans())
    }

    /// Adds an attempt and returns its number.
    pub fn begin_attempt(&self, mut attempt: Attempt) -> usize {
        attempt.selected_ms = self.elapsed();
        attempt.excluded.truncate(MAX_EXCLUSIONS);
        attempt.picks.truncate(MAX_PICKS);
        let mut record = self.record.lock();
        attempt.began_ms = record.selecting_since;
        record.attempts.push(attempt);
        record.attempts.len() - 1
    }
}

/// The last [`MAX_DECISIONS`] records.
#[derive(Debug)]
pub struct Decisions {
    ring: Mutex<VecDeque<Arc<Mutex<Record>>>>,
    metrics: Arc<Metrics>,
    stages: Arc<[Stages; 2]>,
}

impl Decisions {
    /// An empty ring.
    pub fn new(metrics: Arc<Metrics>) -> Self {
        let stages = Arc::new(Stages::both(&metrics));
        Self { ring: Mutex::new(VecDeque::with_capacity(MAX_DECISIONS)), metrics, stages }
    }

    /// Opens the record of a request.
    pub fn open(&self, mut record: Record, arrived: std::time::Instant, trace: Option<Arc<RequestTrace>>) -> Decision {
        record.trace_id = trace.as_ref().map(|trace| trace.trace_id());
        let record = Arc::new(Mutex::new(record));
        let mut ring = self.ring.lock();
        if ring.len() >= MAX_DECISIONS {
            ring.pop_front();
            self.metrics.decisions_dropped.inc();
        }
        ring.push_back(Arc::clone(&record));
        Decision { record, arrived, trace, stages: Arc::clone(&self.stages) }
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
