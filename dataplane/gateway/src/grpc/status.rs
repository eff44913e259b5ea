//! Why a leg broke off.
//!
//! What an engine's refusal means is the adapters' business ([`smg_engines::grpc::status`]). Here the transport's own failures are told
//! apart from it: a connection that could not be made ejects the worker; one that broke, or over which nonsense came, is the worker's
//! failure and not the gateway's.

use std::error::Error;

use http::StatusCode;
use smg_engines::grpc::ReadError;
use smg_engines::grpc::status::{CONSTRAINT_FAILED, MEDIA_FAULT, Refusal, Replay};
use tonic::Status;

use crate::relay::describe;
use crate::resilience::retry;

/// How the messages of statuses begin by which the client library says that it cannot read what came.
const UNREADABLE: [&str; 2] = ["Error, decoded message length too large", "failed to decode Protobuf message"];
/// Longest message of an engine that is repeated.
const LONGEST_MESSAGE: usize = 4096;

/// Why a leg broke off.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LegFailure {
    /// The status that answers for it.
    pub status: StatusCode,
    /// What happened, in the engine's words where it has any.
    pub message: String,
    /// What kind of failure it is.
    pub kind: FailureKind,
    /// A code of its own, whatever leg it was.
    pub code: Option<&'static str>,
    /// Whether it says something about the worker.
    pub charged: bool,
    /// Whether another attempt may do better.
    pub retryable: bool,
    /// Whether only one on other workers may: this one has given its answer.
    pub elsewhere: bool,
    /// Where the meeting of the two legs broke, as far as the engine's words tell.
    pub phase: Option<&'static str>,
}

/// Kinds of failures, as far as they are treated differently.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FailureKind {
    /// The engine refused or failed the request.
    Engine,
    /// The engine failed one sample of the request.
    Sample,
    /// There is no connection to the worker.
    Unreachable,
    /// The connection broke, or what came over it makes no sense.
    Broken,
    /// The engine ended its stream too early.
    Incomplete,
    /// The request's time was over.
    TimedOut,
}

impl LegFailure {
    fn new(kind: FailureKind, status: StatusCode, message: impl Into<String>) -> Self {
        let (message, retryable) = (message.into(), retry::is_retryable(status));
        Self { status, message, kind, code: None, charged: true, retryable, elsewhere: false, phase: None }
    }

    /// What `status` says.
    pub fn of(status: &Status) -> Self {
        let mut message = status.message().to_owned();
        message.truncate(message.floor_char_boundary(LONGEST_MESSAGE));
        let cause = || status.source().map(describe);
        if is_caused(status, |cause| cause.is::<tonic::ConnectError>()) {
            let message = cause().unwrap_or(message);
            return Self::new(FailureKind::Unreachable, StatusCode::SERVICE_UNAVAILABLE, message);
        }
        let trailer = |name: &str| status.metadata().get(name).and_then(|value| value.to_str().ok());
        let transport = is_caused(status, is_of_the_transport);
        let verdict = Refusal {
            code: status.code() as i32,
            message: &message,
            constraint_failed: trailer(CONSTRAINT_FAILED),
            media_fault: trailer(MEDIA_FAULT),
            transport,
        };
        let phase = verdict.rendezvous_phase();
        let verdict = verdict.verdict();
        if transport {
            return Self::broken(cause().unwrap_or(message));
        }
        if UNREADABLE.iter().any(|beginning| message.starts_with(beginning)) {
            return Self::broken(message);
        }
        let retryable = verdict.replay != Replay::Never && retry::is_retryable(verdict.status);
        Self {
            code: verdict.code,
            charged: verdict.charged,
            retryable,
            elsewhere: retryable && verdict.replay == Replay::Elsewhere,
            phase,
            ..Self::new(FailureKind::Engine, verdict.status, message)
        }
    }

    /// The engine's stream is not what it should be.
    pub fn broken(message: impl Into<String>) -> Self {
        Self::new(FailureKind::Broken, StatusCode::BAD_GATEWAY, message)
    }

    /// The engine failed a sample of the request itself.
    pub fn sample(message: impl Into<String>) -> Self {
        Self::new(FailureKind::Sample, StatusCode::INTERNAL_SERVER_ERROR, message)
    }

    /// The engine ended its stream before its output was complete.
    pub fn incomplete() -> Self {
        let message = "the engine ended the stream before its output was complete";
        Self::new(FailureKind::Incomplete, StatusCode::INTERNAL_SERVER_ERROR, message)
    }

    /// The request's time was over.
    pub fn timed_out() -> Self {
        Self::new(FailureKind::TimedOut, StatusCode::GATEWAY_TIMEOUT, "the worker did not answer in time")
    }

    /// Whether the engine may go on with the request, of which so many samples had not ended: what broke is the way from it to here, or it
    /// failed one of several.
    pub fn leaves_engine_running(&self, unfinished: u32) -> bool {
        match self.kind {
            FailureKind::Broken => true,
            FailureKind::Sample => unfinished > 1,
            _ => false,
        }
    }

    /// The `error_type` label of `smg_worker_errors_total`.
    pub fn label(&self) -> &'static str {
        if self.kind == FailureKind::TimedOut { "timeout" } else { "backend_error" }
    }
}

impl From<ReadError> for LegFailure {
    fn from(error: ReadError) -> Self {
        match error {
            ReadError::EngineFailed => Self::sample(error.to_string()),
            _ => Self::broken(error.to_string()),
        }
    }
}

/// Whether any of the causes of a status is such a one.
fn is_caused(status: &Status, by: impl Fn(&(dyn Error + 'static)) -> bool) -> bool {
    let mut cause = status.source();
    while let Some(error) = cause {
        if by(error) {
            return true;
        }
        cause = error.source();
    }
    false
}

/// Whether a status was made up on this side because the connection failed.
fn is_of_the_transport(cause: &(dyn Error + 'static)) -> bool {
    cause.is::<h2::Error>() || cause.is::<hyper::Error>() || cause.is::<tonic::transport::Error>()
}

#[cfg(test)]
mod tests {
    use tonic::metadata::{MetadataMap, MetadataValue};

    use super::*;

    #[test]
    fn an_engines_refusal_keeps_its_status_and_words() {
        let failure = LegFailure::of(&Status::invalid_argument("top_p must be at most 1"));
        assert_eq!((failure.status.as_u16(), failure.retryable, failure.charged), (400, false, true));
        assert_eq!(failure.message, "top_p must be at most 1");
        assert!(LegFailure::of(&Status::unavailable("busy")).retryable);
        assert!(!LegFailure::of(&Status::unavailable("sidecar_timeout: 30 s")).retryable);
    }

    #[test]
    fn a_grammar_that_the_engine_cannot_follow_is_the_clients_and_not_tried_elsewhere() {
        let mut trailers = MetadataMap::new();
        trailers.insert(CONSTRAINT_FAILED, MetadataValue::from_static("engine"));
        let status = Status::with_metadata(tonic::Code::FailedPrecondition, "no such rule", trailers);
        let failure = LegFailure::of(&status);
        assert_eq!((failure.status.as_u16(), failure.code), (422, Some("constraint_failed")));
        assert!(!failure.retryable && !failure.charged);
    }

    #[test]
    fn what_cannot_be_read_is_the_workers_failure() {
        for message in
            ["Error, decoded message length too large: found 9 bytes", "failed to decode Protobuf message: x"]
        {
            let failure = LegFailure::of(&Status::out_of_range(message));
            assert_eq!((failure.status.as_u16(), failure.kind), (502, FailureKind::Broken), "{message}");
        }
    }

    #[test]
    fn a_long_message_is_cut_between_characters() {
        let failure = LegFailure::of(&Status::internal("ä".repeat(LONGEST_MESSAGE)));
        assert_eq!(failure.message.len(), LONGEST_MESSAGE);
    }
}
