//! The account of one routed request: its metrics and its decision record, closed exactly once whatever way it ends.

use std::sync::Arc;
use std::time::Instant;

use http::StatusCode;
use smg_engines::Route;
use smg_fleet::Wire;
use smg_telemetry::Metrics;

use crate::decision::Decision;
use crate::front::error::error_type;

/// How a request is served, for the `backend_type` label.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Backend {
    /// By one worker.
    Regular,
    /// By a prefill and a decode.
    PrefillDecode,
}

impl Backend {
    /// The label.
    pub fn as_str(self) -> &'static str {
        match self {
            Backend::Regular => "regular",
            Backend::PrefillDecode => "pd",
        }
    }
}

/// The account of one routed request.
pub struct Scope {
    metrics: Arc<Metrics>,
    /// Its decision record.
    pub decision: Decision,
    /// Its model label.
    pub model: Arc<str>,
    route: Route,
    backend: Backend,
    /// The wire of its workers, once that is known.
    wire: Option<Wire>,
    stream: bool,
    started: Instant,
    closed: bool,
}

impl Scope {
    /// Opens the account. `wire` = that of all workers that could serve the request, if they have one in common.
    pub fn open(
        metrics: Arc<Metrics>,
        decision: Decision,
        model: Arc<str>,
        route: Route,
        (backend, wire): (Backend, Option<Wire>),
        stream: bool,
    ) -> Self {
        let started = Instant::now();
        let mut scope = Self { metrics, decision, model, route, backend, wire: None, stream, started, closed: false };
        if let Some(wire) = wire {
            scope.runs_on(wire);
        }
        scope
    }

    /// The request runs over this wire. The first call counts.
    pub fn runs_on(&mut self, wire: Wire) {
        if self.wire.is_some() {
            return;
        }
        self.wire = Some(wire);
        if wire != Wire::Http {
            self.decision.update(|record| record.wire = wire);
        }
        let (wire, backend, endpoint) = (wire.as_str(), self.backend.as_str(), self.route.endpoint_label());
        let streaming = if self.stream { "true" } else { "false" };
        self.metrics.router_requests.with_label_values(&[wire, backend, wire, &self.model, endpoint, streaming]).inc();
    }

    fn wire(&self) -> &'static str {
        self.wire.unwrap_or_default().as_str()
    }

    /// How the request is served.
    pub fn backend(&self) -> Backend {
        self.backend
    }

    /// The request was served with `status`.
    pub fn complete(&mut self, status: StatusCode) {
        self.close("completed", Some(status), None);
    }

    /// The request failed.
    pub fn fail(&mut self, status: StatusCode, code: &'static str) {
        if !self.closed {
            self.runs_on(Wire::Http);
            self.metrics
                .router_request_errors
                .with_label_values(&[
                    self.wire(),
                    self.backend.as_str(),
                    self.wire(),
                    &self.model,
                    self.route.endpoint_label(),
                    error_type(status),
                ])
                .inc();
        }
        self.close("failed", Some(status), Some(code));
    }

    /// The client left.
    pub fn cancel(&mut self) {
        self.close("cancelled", None, None);
    }

    fn close(&mut self, outcome: &'static str, status: Option<StatusCode>, code: Option<&'static str>) {
        if self.closed {
            return;
        }
        self.closed = true;
        self.runs_on(Wire::Http);
        self.metrics
            .router_request_duration
            .with_label_values(&[
                self.wire(),
                self.backend.as_str(),
                self.wire(),
                &self.model,
                self.route.endpoint_label(),
            ])
            .observe(self.started.elapsed().as_secs_f64());
        let finished = self.decision.elapsed();
        self.decision.update(|record| {
            record.outcome = Some(outcome);
            record.finished_ms = Some(finished);
            if let Some(status) = status {
                record.status = Some(status.as_u16());
            }
            record.error_code = code.or(record.error_code);
        });
        self.decision.record_phases();
    }
}

impl Drop for Scope {
    fn drop(&mut self) {
        self.cancel();
    }
}
