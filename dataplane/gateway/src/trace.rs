//! The spans of one request, made from its decision record.
//!
//! ```text
//!  http_request (server)                         the whole request, as clients see it
//!   ├─ route                                     per attempt: choosing the workers
//!   ├─ prefill (client)                          the leg; its engine gets this span as parent
//!   └─ decode or regular (client)                likewise
//!       ├─ first_byte                            until the first output
//!       └─ relay                                 from there to the end of the response
//! ```
//!
//! Phases are noted in the record anyway, so a request that is traced costs two more ids and, when it has ended, its spans. A request that
//! is not traced costs nothing. A client's trace that is not recorded is passed on to the engines as it came.

use std::sync::Arc;
use std::time::Instant;

use http::{HeaderMap, HeaderValue};
use smg_telemetry::trace::{Kind, Parent, Span, SpanContext, TRACEPARENT, Tracer, Value, unix_nanos};

use crate::decision::{Attempt, Millis, Record};

/// The trace of one request.
#[derive(Debug)]
pub struct RequestTrace {
    tracer: Tracer,
    root: SpanContext,
    parent: Option<u64>,
    started: Instant,
    started_unix: u64,
}

/// The spans of an attempt's legs, minted before they are sent.
#[derive(Debug, Clone, Copy)]
pub struct LegSpans {
    /// The prefill leg.
    pub prefill: SpanContext,
    /// The decode leg, or the only one.
    pub output: SpanContext,
}

impl RequestTrace {
    /// Begins the trace of a request, as part of the client's if it names one; `None` when the client's is not recorded.
    pub fn begin(tracer: &Tracer, headers: &HeaderMap) -> Option<Arc<Self>> {
        let mut named = headers.get_all(TRACEPARENT).iter();
        // Several headers are as malformed as a broken one.
        let named = named.next().filter(|_| named.next().is_none());
        let (root, parent) = match named.and_then(|header| Parent::parse(header.to_str().ok()?)) {
            Some(Parent::NotSampled) => return None,
            Some(Parent::Sampled(parent)) => (parent.sibling(), Some(parent.span_id)),
            None => (SpanContext::new_trace(), None),
        };
        let (started, started_unix) = (Instant::now(), unix_nanos());
        Some(Arc::new(Self { tracer: tracer.clone(), root, parent, started, started_unix }))
    }

    /// The `traceparent` that names this request.
    pub fn header(&self) -> Option<HeaderValue> {
        header(self.root)
    }

    /// The trace, as people search for it.
    pub fn trace_id(&self) -> String {
        format!("{:032x}", self.root.trace_id)
    }

    /// New spans for the legs of an attempt.
    pub fn leg_spans(&self) -> LegSpans {
        LegSpans { prefill: self.root.sibling(), output: self.root.sibling() }
    }

    /// Records the whole request, which ends now.
    pub fn end(&self, attributes: Vec<(&'static str, Value)>, error: Option<String>) {
        self.tracer.record(Span {
            context: self.root,
            parent: self.parent,
            name: "http_request",
            kind: Kind::Server,
            start: self.started_unix,
            end: self.at(Instant::now()),
            attributes,
            error,
        });
    }

    /// Records the phases of a finished record. Prefills that are still drained are recorded by their drain.
    pub fn record_phases(&self, record: &Record, arrived: Instant) {
        let phases = Phases { trace: self, arrived: self.at(arrived) };
        let finished = record.finished_ms.unwrap_or_default();
        for (number, attempt) in record.attempts.iter().enumerate() {
            phases.route(attempt, number);
            if !attempt.prefill_drains {
                phases.prefill(attempt, finished);
            }
            phases.output(attempt, finished);
        }
    }

    /// Records the prefill leg of an attempt, which has been drained by now.
    pub fn record_prefill(&self, attempt: &Attempt, arrived: Instant) {
        Phases { trace: self, arrived: self.at(arrived) }.prefill(attempt, attempt.prefill_done_ms.unwrap_or_default());
    }

    fn at(&self, instant: Instant) -> u64 {
        let since = instant.saturating_duration_since(self.started);
        self.started_unix.saturating_add(u64::try_from(since.as_nanos()).unwrap_or(u64::MAX))
    }
}

/// The `traceparent` of a span.
pub fn header(span: SpanContext) -> Option<HeaderValue> {
    HeaderValue::try_from(span.to_string()).ok()
}

struct Phases<'a> {
    trace: &'a RequestTrace,
    arrived: u64,
}

impl Phases<'_> {
    fn record(
        &self,
        (context, parent): (SpanContext, SpanContext),
        (name, kind): (&'static str, Kind),
        (start, end): (Millis, Millis),
        attributes: Vec<(&'static str, Value)>,
        error: Option<&String>,
    ) {
        self.trace.tracer.record(Span {
            context,
            parent: Some(parent.span_id),
            name,
            kind,
            start: self.arrived.saturating_add(start.nanos()),
            end: self.arrived.saturating_add(end.nanos()),
            attributes,
            error: error.cloned(),
        });
    }

    fn route(&self, attempt: &Attempt, number: usize) {
        let mut attributes = vec![
            ("smg.attempt", Value::from(number as u64 + 1)),
            ("smg.dispatch", attempt.dispatch.into()),
            ("smg.excluded", Value::from(attempt.excluded.len() as u64)),
        ];
        let policies = [("smg.prefill_policy", attempt.prefill_policy), ("smg.decode_policy", attempt.decode_policy)];
        attributes.extend(policies.into_iter().filter_map(|(name, policy)| Some((name, policy?.into()))));
        let error = attempt.error.as_ref().filter(|_| attempt.dispatch == "none");
        let root = self.trace.root;
        let times = (attempt.began_ms, attempt.selected_ms);
        self.record((root.sibling(), root), ("route", Kind::Internal), times, attributes, error);
    }

    fn prefill(&self, attempt: &Attempt, finished: Millis) {
        let (Some(spans), Some(sent)) = (attempt.spans, attempt.prefill_sent_ms) else { return };
        let end = attempt.prefill_done_ms.or(attempt.failed_ms).unwrap_or(finished);
        let mut attributes = vec![("server.address", Value::from(attempt.prefill.as_deref().unwrap_or_default()))];
        attributes.extend(attempt.connector_mode.map(|mode| ("smg.kv_connector_mode", mode.into())));
        attributes.extend(attempt.transfer_id.as_deref().map(|id| ("smg.transfer_id", id.into())));
        let room = attempt.bootstrap_rooms.first();
        attributes.extend(room.map(|room| ("smg.bootstrap_room", Value::Text(room.to_string()))));
        let error =
            attempt.error.as_ref().filter(|error| attempt.decode_sent_ms.is_none() || error.starts_with("prefill"));
        let ids = (spans.prefill, self.trace.root);
        self.record(ids, ("prefill", Kind::Client), (sent, end), attributes, error);
    }

    fn output(&self, attempt: &Attempt, finished: Millis) {
        let (Some(spans), Some(sent)) = (attempt.spans, attempt.decode_sent_ms) else { return };
        let (name, worker) = match &attempt.regular {
            Some(worker) => ("regular", Some(worker)),
            None => ("decode", attempt.decode.as_ref()),
        };
        let end = attempt.failed_ms.unwrap_or(finished);
        let mut attributes = vec![("server.address", Value::from(worker.map(String::as_str).unwrap_or_default()))];
        attributes.extend(attempt.kv_handoff.map(|handed_over| ("smg.kv_handoff", Value::Flag(handed_over))));
        let error = attempt.error.as_ref().filter(|error| !error.starts_with("prefill"));
        self.record((spans.output, self.trace.root), (name, Kind::Client), (sent, end), attributes, error);
        let Some(first) = attempt.first_output_ms else { return };
        for (name, times) in [("first_byte", (sent, first)), ("relay", (first, end))] {
            let ids = (spans.output.sibling(), spans.output);
            self.record(ids, (name, Kind::Internal), times, Vec::new(), None);
        }
    }
}
