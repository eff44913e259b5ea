//! What the gRPC pipeline answers instead of output.

use http::StatusCode;
use thiserror::Error;

use super::leg::Part;
use super::status::{FailureKind, LegFailure};

/// An answer that is no output, with its documented code.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{message}")]
pub struct Refusal {
    /// The status.
    pub status: StatusCode,
    /// The code.
    pub code: &'static str,
    /// What is wrong, for the client.
    pub message: String,
    /// Seconds after which trying again makes sense.
    pub retry_after: Option<u32>,
    /// Whether another attempt on other workers may succeed.
    pub retryable: bool,
    /// Whether only one on another pair may.
    pub elsewhere: bool,
    /// Whether the request was refused for what workers over gRPC, or the gateway on their behalf, cannot do: workers that speak HTTP see
    /// the request as the client sent it, and may.
    pub of_the_wire: bool,
}

impl Refusal {
    /// A fault of the request, which no worker would serve.
    pub fn bad(code: &'static str, message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, code, message)
    }

    /// Any refusal that trying again does not change.
    pub fn new(status: StatusCode, code: &'static str, message: impl Into<String>) -> Self {
        let message = message.into();
        Self { status, code, message, retry_after: None, retryable: false, elsewhere: false, of_the_wire: false }
    }

    /// The same, said before any leg was sent: of workers that speak HTTP this says nothing.
    #[must_use]
    pub fn of_the_wire(self) -> Self {
        Self { of_the_wire: true, ..self }
    }

    /// The selected engine has no prefill/decode protocol.
    pub fn runtime() -> Self {
        Self::bad("runtime_pd_not_supported", "This runtime does not support PD disaggregated mode")
    }

    /// MoRI-IO needs fields that only HTTP carries.
    pub fn moriio() -> Self {
        let message = "MoRIIOConnector PD is supported by the HTTP PD router only";
        Self::new(StatusCode::NOT_IMPLEMENTED, "moriio_grpc_pd_unsupported", message)
    }

    /// The prompt does not fit.
    pub fn context_length(limit: u64, tokens: usize) -> Self {
        let message = format!(
            "This model's maximum context length is {limit} tokens. However, your request has {tokens} input tokens. \
             Please reduce the length of the input."
        );
        Self::bad("context_length_exceeded", message)
    }

    /// The decode worker runs as many requests as it can.
    pub fn shed(message: String, retry_after_secs: u32) -> Self {
        let code = "worker_overload_protection_shed";
        Self { retry_after: Some(retry_after_secs), ..Self::new(StatusCode::SERVICE_UNAVAILABLE, code, message) }
    }

    /// A leg that failed before its first reply.
    pub fn not_started(part: Part, failure: &LegFailure) -> Self {
        let (code, who) = match part {
            Part::Prefill => ("prefill_worker_failed_to_start", "Prefill worker"),
            Part::Decode => ("decode_worker_failed_to_start", "Decode worker"),
            Part::Regular => ("worker_failed_to_start", "Worker"),
        };
        if failure.kind == FailureKind::Incomplete {
            return Self::of_leg("no_responses_from_server", format!("{who}: {}", failure.message), failure);
        }
        Self::of_leg(code, format!("{who} failed to start: {}", failure.message), failure)
    }

    /// A prefill leg that broke off before there was a decode leg.
    pub fn prefill_stream(failure: &LegFailure) -> Self {
        Self::of_leg("prefill_stream_error", format!("Prefill stream error: {}", failure.message), failure)
    }

    /// A leg that broke off while its whole output was being collected.
    pub fn collected(part: Part, failure: &LegFailure) -> Self {
        if failure.kind == FailureKind::Incomplete {
            return Self::of_leg("no_responses_from_server", failure.message.clone(), failure);
        }
        let who = match part {
            Part::Prefill => "Prefill stream",
            Part::Decode => "Decode stream",
            Part::Regular => "Stream",
        };
        Self::of_leg("worker_stream_failed", format!("{who} failed: {}", failure.message), failure)
    }

    fn of_leg(code: &'static str, message: String, failure: &LegFailure) -> Self {
        let code = failure.code.unwrap_or(code);
        let (retryable, elsewhere) = (failure.retryable, failure.elsewhere);
        Self { retryable, elsewhere, ..Self::new(failure.status, code, message) }
    }
}

impl From<smg_apis::Refusal> for Refusal {
    fn from(refusal: smg_apis::Refusal) -> Self {
        let status = StatusCode::from_u16(refusal.status).unwrap_or(StatusCode::BAD_REQUEST);
        Self::new(status, refusal.code, refusal.message)
    }
}
