//! What an attempt at a request has in hand, how it sends a leg, and how it fails.

use std::sync::Arc;

use axum::body::Body;
use http::{HeaderMap, HeaderValue, Response, StatusCode};
use smg_engines::Legs;
use smg_engines::errors::{PREFILL_UPSTREAM_ERROR, decode_code, parallel_prefill_code};
use smg_engines::vllm::DATA_PARALLEL_RANK;
use smg_fleet::policy::ClientHandoffFields;
use smg_fleet::{Runtime, WorkerId, WorkerType};
use smg_telemetry::trace::TRACEPARENT;
use tokio::time::Instant;

use super::leg::{self, LegBody};
use super::{Inbound, respond};
use crate::connections::Answer;
use crate::core::Core;
use crate::decision::{Attempt, Decision, Millis};
use crate::fleet::table::ModelPool;
use crate::fleet::worker::{InFlight, RoutedWorker};
use crate::front::error::GatewayError;
use crate::hops::HOPS;
use crate::resilience::retry;
use crate::trace::{self, LegSpans};

/// What an attempt needs besides its workers.
pub(crate) struct Job<'a> {
    pub(crate) core: &'a Arc<Core>,
    pub(crate) request: &'a Inbound,
    pub(crate) pool: &'a ModelPool,
    pub(super) client_fields: ClientHandoffFields,
    pub(crate) deadline: Instant,
    pub(crate) decision: Decision,
    pub(crate) attempt: usize,
    pub(crate) model: Arc<str>,
    pub(crate) spans: Option<LegSpans>,
    /// Whether overloaded workers refuse requests.
    pub(super) sheds: bool,
}

impl Job<'_> {
    /// Refuses to send a leg to a worker that reports too much load by now, where such workers are not merely avoided: time passes between
    /// its selection and its leg, for a decode worker that of a whole prefill.
    pub(super) fn check_load(&self, claim: &InFlight) -> Result<(), Failed> {
        let worker = claim.worker();
        if !self.sheds || !worker.is_overloaded(self.core.clock.now_ms()) {
            return Ok(());
        }
        self.core.metrics.worker_overload_shed.with_label_values(&["dispatch"]).inc();
        let error = GatewayError::OverloadedBeforeDispatch {
            worker: worker.url.as_str().to_owned(),
            model: Arc::clone(&self.model),
            retry_after_secs: self.core.options.load.interval_secs(),
        };
        Err(Failed::gateway(error, None))
    }

    pub(super) fn headers(&self, worker: &RoutedWorker) -> HeaderMap {
        let mut headers = smg_engines::headers::leg_headers(
            &self.request.headers,
            &self.request.request_id,
            worker.record.spec.api_key.as_deref(),
        );
        headers.insert(HOPS, self.core.hops.onward(&self.request.headers));
        if worker.engine() == Runtime::Vllm
            && let Some(rank) = worker.dp_rank
        {
            headers.insert(DATA_PARALLEL_RANK, HeaderValue::from(rank));
        }
        if let Some(spans) = self.spans {
            let lone = self.request.route.legs() != Legs::Pair;
            let span = if worker.role() == WorkerType::Prefill && !lone { spans.prefill } else { spans.output };
            if let Some(value) = trace::header(span) {
                headers.insert(TRACEPARENT, value);
            }
        }
        headers
    }

    pub(crate) fn note(&self, change: impl FnOnce(&mut Attempt, Millis)) {
        self.decision.attempt(self.attempt, change);
    }

    /// Sends a leg and waits for a 2xx head: an error status fails the attempt as a missing head does.
    pub(super) async fn send(
        &self,
        claim: &mut InFlight,
        body: LegBody,
        codes: LegCodes,
    ) -> Result<Response<Answer>, Failed> {
        let worker = Arc::clone(claim.worker());
        let headers = || self.headers(&worker);
        let head = leg::send(self.core, claim, self.request.route, headers, body, self.deadline)
            .await
            .map_err(|error| Failed::gateway(GatewayError::Leg { code: codes.transport, error }, Some(worker.id())))?;
        if !head.status().is_success() {
            let code = (codes.status)(head.status());
            return Err(Failed::engine(head, code, worker.id()));
        }
        Ok(head)
    }
}

/// The codes of a leg's failures.
#[derive(Clone, Copy)]
pub(super) struct LegCodes {
    /// There is no response head.
    pub(super) transport: &'static str,
    /// The head has this error status.
    pub(super) status: fn(StatusCode) -> &'static str,
}

impl LegCodes {
    pub(super) const DECODE: Self = Self { transport: "decode_request_failed", status: decode_code };
    pub(super) const PARALLEL_PREFILL: Self =
        Self { transport: "prefill_request_failed", status: parallel_prefill_code };
    pub(super) const SEQUENTIAL_PREFILL: Self =
        Self { transport: "prefill_request_failed", status: |_| PREFILL_UPSTREAM_ERROR };
    pub(super) const LONE_PREFILL: Self =
        Self { transport: "prefill_count_tokens_failed", status: |_| PREFILL_UPSTREAM_ERROR };
    pub(super) const REGULAR: Self = Self { transport: "worker_request_failed", status: |_| "worker_upstream_error" };
}

/// A failed attempt.
pub(crate) struct Failed {
    pub(super) failure: Failure,
    /// The worker that failed it.
    pub(super) blamed: Option<WorkerId>,
}

pub(super) enum Failure {
    /// The gateway's own words.
    Gateway(GatewayError),
    /// An engine's error response, which passes through as it is.
    Engine { response: Box<Response<Answer>>, code: &'static str },
}

impl Failed {
    pub(crate) fn gateway(error: GatewayError, blamed: Option<WorkerId>) -> Self {
        Self { failure: Failure::Gateway(error), blamed }
    }

    pub(super) fn engine(response: Response<Answer>, code: &'static str, worker: WorkerId) -> Self {
        let blamed = retry::is_retryable(response.status()).then_some(worker);
        Self { failure: Failure::Engine { response: Box::new(response), code }, blamed }
    }

    pub(super) fn is_retryable(&self) -> bool {
        match &self.failure {
            Failure::Gateway(error) => error.is_retryable(),
            Failure::Engine { response, .. } => retry::is_retryable(response.status()),
        }
    }

    /// Whether no further attempt may use the same pair.
    pub(super) fn rules_out_the_pair(&self) -> bool {
        matches!(&self.failure, Failure::Gateway(error) if error.is_of_the_pair())
    }

    /// Whether only workers over gRPC cannot serve the request.
    pub(super) fn is_of_the_wire(&self) -> bool {
        matches!(&self.failure, Failure::Gateway(GatewayError::Refused(refusal)) if refusal.of_the_wire)
    }

    pub(super) fn status(&self) -> StatusCode {
        match &self.failure {
            Failure::Gateway(error) => error.status(),
            Failure::Engine { response, .. } => response.status(),
        }
    }

    pub(super) fn code(&self) -> &'static str {
        match &self.failure {
            Failure::Gateway(error) => error.code(),
            Failure::Engine { code, .. } => code,
        }
    }

    pub(super) fn describe(&self) -> String {
        match &self.failure {
            Failure::Gateway(error) => error.to_string(),
            Failure::Engine { response, code } => format!("{code}: the engine answered {}", response.status()),
        }
    }

    pub(super) async fn into_response(self, core: &Core, deadline: Instant) -> Response<Body> {
        match self.failure {
            Failure::Gateway(error) => error.into_response(),
            Failure::Engine { response, code } => respond::pass_error_through(core, *response, code, deadline).await,
        }
    }
}
