//! The one place where errors become responses.
//!
//! Inner layers return typed errors; here each gets its status, its code and its words, in the envelope of the documented system:
//! `{"error":{"type","code","message","param":null}}` with the code in `X-SMG-Error-Code` too.

use std::sync::Arc;

use axum::body::Body;
use http::{HeaderName, HeaderValue, Method, Response, StatusCode, header};
use serde_json::json;
use smg_engines::BodyError;
use smg_engines::moriio::{HandoffError, RequestRefusal};
use smg_engines::sglang::UnsupportedRequest;
use thiserror::Error;

use crate::dispatch::leg::LegError;
use crate::front::admission::NotAdmitted;
use crate::grpc::refusal::Refusal;
use crate::select::SelectError;
use crate::words;

/// Carries the code of every error the gateway answers for.
pub const ERROR_CODE: HeaderName = HeaderName::from_static("x-smg-error-code");

/// The code of a response, kept for metrics.
#[derive(Debug, Clone, Copy)]
pub struct ErrorCode(pub &'static str);

/// Everything the gateway refuses or fails by itself. An engine's own error response is not one of these: it passes through.
#[derive(Debug, Error)]
pub enum GatewayError {
    /// The body is not what routing needs.
    #[error(transparent)]
    Body(#[from] BodyError),
    /// The body is larger than the limit.
    #[error("the request body is larger than {0} bytes")]
    BodyTooLarge(usize),
    /// The upload stood still.
    #[error("the request body did not arrive in time")]
    BodyStalled,
    /// The upload took too long as a whole.
    #[error("the request body was not complete in time")]
    BodyTimeout,
    /// The upload broke off.
    #[error("the request body could not be read: {0}")]
    BodyBroken(String),
    /// Workers declare models, and none is this one.
    #[error("The model '{0}' does not exist")]
    ModelNotFound(String),
    /// No worker known here serves the model, and this gateway may know less than the control plane.
    #[error("The model '{0}' is not known to this gateway, which has not the latest state of the fleet")]
    ModelUnknownYet(String),
    /// Too many requests.
    #[error(transparent)]
    NotAdmitted(#[from] NotAdmitted),
    /// No model named, several served.
    #[error("Missing required parameter: 'model'. Several models are served.")]
    ModelRequired,
    /// Too many requests wait for a prefill worker already.
    #[error("The queue for prefill workers is full")]
    PrefillQueueFull,
    /// No prefill worker had a place in time.
    #[error("No prefill worker had a place within {0} s")]
    PrefillQueueTimeout(u64),
    /// No worker for the request.
    #[error(transparent)]
    Select(#[from] SelectError),
    /// The worker that was selected reports too much load by now, and requests are refused then.
    #[error("Worker '{worker}' for model '{model}' became overloaded before dispatch")]
    OverloadedBeforeDispatch {
        /// Its address.
        worker: String,
        /// Which model.
        model: Arc<str>,
        /// Seconds after which engines will have reported again.
        retry_after_secs: u32,
    },
    /// The engine's handoff cannot serve the request.
    #[error(transparent)]
    Unsupported(#[from] UnsupportedRequest),
    /// The selected workers are no MoRI-IO pair. Why is for the operator, in the log.
    #[error("the selected prefill/decode pair is not configured for MoRI-IO; the gateway's log says why")]
    MoriioPair,
    /// MoRI-IO cannot serve the request.
    #[error(transparent)]
    MoriioRequest(#[from] RequestRefusal),
    /// A MoRI-IO prefill handed over nothing that decode could use.
    #[error(transparent)]
    MoriioHandoff(#[from] HandoffError),
    /// A leg has no response.
    #[error("{code}: {}", .error.message)]
    Leg {
        /// Which leg, and what kind of failure.
        code: &'static str,
        /// What happened.
        error: LegError,
    },
    /// Only regular workers could serve the route, and the model has none.
    #[error("{0} is not supported in prefill/decode mode: the model has no regular worker")]
    NotForPairs(&'static str),
    /// Workers that speak gRPC do not serve the route, and the model has no other.
    #[error("{0} is not supported over gRPC, which is all that the model's workers speak")]
    NotOverGrpc(&'static str),
    /// What the gRPC pipeline refuses or failed to do.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// The request's time was over before a worker was asked.
    #[error("The request timed out before a worker was asked")]
    OutOfTime,
    /// No such route.
    #[error("Invalid URL ({0} {1})")]
    UnknownUrl(String, String),
    /// No such method on the route.
    #[error("Not allowed to {0} on {1}")]
    MethodNotAllowed(String, String),
    /// A part of the URL does not parse.
    #[error("{0}")]
    Url(String),
    /// The request has come through this gateway before, or through more gateways than anybody means.
    #[error(
        "The request goes in circles: the URL of a worker leads back to this gateway, or through more than 3 others"
    )]
    LoopDetected,
    /// No model is served.
    #[error("No models available")]
    NoModels,
}

impl GatewayError {
    /// The status.
    pub fn status(&self) -> StatusCode {
        match self {
            Self::Body(_) | Self::BodyBroken(_) | Self::ModelRequired | Self::Unsupported(_) | Self::Url(_) => {
                StatusCode::BAD_REQUEST
            }
            Self::BodyTooLarge(_) => StatusCode::PAYLOAD_TOO_LARGE,
            Self::BodyStalled | Self::BodyTimeout => StatusCode::REQUEST_TIMEOUT,
            Self::NotAdmitted(NotAdmitted::Full) => StatusCode::TOO_MANY_REQUESTS,
            Self::NotAdmitted(NotAdmitted::Timeout) | Self::ModelUnknownYet(_) => StatusCode::SERVICE_UNAVAILABLE,
            Self::PrefillQueueFull | Self::PrefillQueueTimeout(_) => StatusCode::TOO_MANY_REQUESTS,
            Self::ModelNotFound(_) | Self::UnknownUrl(..) => StatusCode::NOT_FOUND,
            Self::MethodNotAllowed(..) => StatusCode::METHOD_NOT_ALLOWED,
            Self::Select(_) | Self::MoriioPair | Self::NoModels | Self::OverloadedBeforeDispatch { .. } => {
                StatusCode::SERVICE_UNAVAILABLE
            }
            Self::LoopDetected => StatusCode::LOOP_DETECTED,
            Self::NotForPairs(_) | Self::NotOverGrpc(_) => StatusCode::NOT_IMPLEMENTED,
            Self::Refused(refusal) => refusal.status,
            Self::MoriioRequest(refusal) => refusal.status(),
            Self::MoriioHandoff(_) => StatusCode::BAD_GATEWAY,
            Self::OutOfTime => StatusCode::GATEWAY_TIMEOUT,
            Self::Leg { error, .. } => error.status(),
        }
    }

    /// The code.
    pub fn code(&self) -> &'static str {
        match self {
            Self::Body(BodyError::WrongType { .. }) => "invalid_type",
            Self::Body(BodyError::TooLarge) | Self::BodyTooLarge(_) => "request_body_too_large",
            Self::Body(_) => "json_parse_error",
            Self::BodyStalled => "request_body_stalled",
            Self::BodyTimeout => "request_body_timeout",
            Self::BodyBroken(_) => "request_body_broken",
            Self::NotAdmitted(NotAdmitted::Full) => "admission_queue_full",
            Self::NotAdmitted(NotAdmitted::Timeout) => "admission_queue_timeout",
            Self::ModelUnknownYet(_) => "model_not_known_yet",
            Self::ModelNotFound(_) => "model_not_found",
            Self::PrefillQueueFull => "pd_prefill_queue_full",
            Self::PrefillQueueTimeout(_) => "pd_prefill_queue_timeout",
            Self::ModelRequired => "missing_required_parameter",
            Self::Select(SelectError::Incompatible(_)) => "no_compatible_pd_pair",
            Self::Select(SelectError::NoPrefillServers) => "no_prefill_servers",
            Self::Select(SelectError::Overloaded { .. }) | Self::OverloadedBeforeDispatch { .. } => {
                "worker_overload_protection_shed"
            }
            Self::Select(_) => "no_available_workers",
            Self::Unsupported(error) => error.code(),
            Self::MoriioPair => "moriio_pair_misconfigured",
            Self::MoriioRequest(refusal) => refusal.code(),
            Self::MoriioHandoff(_) => "moriio_handoff_invalid",
            Self::Leg { code, .. } => code,
            Self::NotForPairs(_) | Self::NotOverGrpc(_) => "pd_route_unsupported",
            Self::Refused(refusal) => refusal.code,
            Self::OutOfTime => "request_timeout",
            Self::UnknownUrl(..) => "unknown_url",
            Self::MethodNotAllowed(..) => "method_not_allowed",
            Self::Url(_) => "invalid_value",
            Self::LoopDetected => "loop_detected",
            Self::NoModels => "no_models_available",
        }
    }

    /// Seconds after which trying again makes sense.
    fn retry_after(&self) -> Option<u32> {
        match self {
            Self::Select(SelectError::Incompatible(_)) => None,
            Self::Select(SelectError::Overloaded { retry_after_secs, .. })
            | Self::OverloadedBeforeDispatch { retry_after_secs, .. } => Some(*retry_after_secs),
            Self::Select(_) | Self::ModelUnknownYet(_) | Self::PrefillQueueFull | Self::PrefillQueueTimeout(_) => {
                Some(1)
            }
            Self::NotAdmitted(_) => Some(2),
            Self::Refused(refusal) => refusal.retry_after,
            _ => None,
        }
    }

    /// Whether another attempt on another pair may succeed.
    pub fn is_retryable(&self) -> bool {
        matches!(self, Self::Leg { .. })
            || matches!(self, Self::Refused(refusal) if refusal.retryable)
            || self.is_of_the_pair()
    }

    /// Whether another attempt on the same pair would fail in the same way.
    pub fn is_of_the_pair(&self) -> bool {
        match self {
            Self::MoriioPair | Self::MoriioHandoff(_) => true,
            Self::Refused(refusal) => refusal.elsewhere,
            _ => false,
        }
    }

    /// The response.
    pub fn into_response(self) -> Response<Body> {
        let (status, code) = (self.status(), self.code());
        let mut response = envelope(status, code, &self.to_string());
        if let Some(seconds) = self.retry_after() {
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        response
    }
}

/// An error response in the documented envelope.
pub fn envelope(status: StatusCode, code: &'static str, message: &str) -> Response<Body> {
    let kind = match status.as_u16() {
        403 => "permission_error",
        429 => "rate_limit_error",
        500..=599 => "server_error",
        _ => "invalid_request_error",
    };
    let message = words::cut(message.to_owned(), words::SAID);
    let body = json!({"error": {"type": kind, "code": code, "message": message, "param": null}}).to_string();
    let mut response = Response::new(Body::from(body));
    *response.status_mut() = status;
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    mark(&mut response, code);
    response.extensions_mut().insert(OwnWords(message));
    response
}

/// An error response of the admin plane, `{"error", "code"}`, of a change with its `outcome`.
pub fn admin_error(status: StatusCode, code: &str, message: &str, outcome: Option<Outcome>) -> Response<Body> {
    let mut body = json!({"error": message, "code": code});
    if let Some(outcome) = outcome {
        body["outcome"] = json!(outcome.as_str());
    }
    let mut response = Response::new(Body::from(body.to_string()));
    *response.status_mut() = status;
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}

/// What became of a change that was not made, as far as this gateway knows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// Nothing.
    DidNotHappen,
    /// Nobody knows.
    Unknown,
}

impl Outcome {
    /// That of a request that was refused; `None` when it would have changed nothing.
    pub fn of_refused(method: &Method, path: &str) -> Option<Self> {
        let changes = !method.is_safe() && path != "/fleet/pairing/explain";
        changes.then_some(Self::DidNotHappen)
    }

    fn as_str(self) -> &'static str {
        match self {
            Self::DidNotHappen => "did_not_happen",
            Self::Unknown => "unknown",
        }
    }
}

/// The message of an error that the gateway answers itself.
#[derive(Debug, Clone)]
struct OwnWords(String);

/// Gives an error of the gateway the shape of Anthropic's API. Whatever an engine answered stays as it is.
pub fn in_anthropic_shape(mut response: Response<Body>, request_id: &str) -> Response<Body> {
    let Some(OwnWords(message)) = response.extensions_mut().remove::<OwnWords>() else { return response };
    let kind = match response.status().as_u16() {
        401 => "authentication_error",
        403 => "permission_error",
        404 => "not_found_error",
        413 => "request_too_large",
        429 => "rate_limit_error",
        503 | 529 => "overloaded_error",
        504 => "timeout_error",
        500..=599 => "api_error",
        _ => "invalid_request_error",
    };
    let error = json!({"type": "error", "error": {"type": kind, "message": message}, "request_id": request_id});
    *response.body_mut() = Body::from(error.to_string());
    response
}

/// Puts the code on a response, for the client and for metrics.
pub fn mark<B>(response: &mut Response<B>, code: &'static str) {
    response.headers_mut().insert(ERROR_CODE, HeaderValue::from_static(code));
    response.extensions_mut().insert(ErrorCode(code));
}

/// The `error_type` label of a status.
pub fn error_type(status: StatusCode) -> &'static str {
    match status.as_u16() {
        400 => "validation_error",
        404 => "no_workers",
        408 | 504 => "timeout",
        429 => "rate_limit_error",
        500..=599 => "backend_error",
        _ => "internal_error",
    }
}
