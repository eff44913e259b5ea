//! The account of one routed request: its metrics and its decision record, closed exactly once whatever way it ends.

use std::sync::Arc;
use std::time::Instant;

use http::StatusCode;
use smg_engines::Route;
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
    started: Instant,
    closed: bool,
}

impl Scope {
    /// Opens the account.
    pub fn open(
        metrics: Arc<Metrics>,
        decision: Decision,
        model: Arc<str>,
        route: Route,
        backend: Backend,
        stream: bool,
    ) -> Self {
        let streaming = if stream { "true" } else { "false" };
        metrics
            .router_requests
            .with_label_values(&["http", backend.as_str(), "http", &model, route.endpoint_label(), streaming])
            .inc();
        Self { metrics, decision, model, route, backend, started: Instant::now(), closed: false }
    }

    /// The request was served with `status`.
    pub fn complete(&mut self, status: StatusCode) {
        self.close("completed", Some(status), None);
    }

    /// The request failed.
    pub fn fail(&mut self, status: StatusCode, code: &'static str) {
        if !self.closed {
            self.metrics
                .router_request_errors
                .with_label_values(&[
                    "http",
                    self.backend.as_str(),
                    "http",
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
        self.metrics
            .router_request_duration
            .with_label_values(&["http", self.backend.as_str(), "http", &self.model, self.route.endpoint_label()])
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
