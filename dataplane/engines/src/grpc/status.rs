//! What an engine's refusal means.
//!
//! Engines refuse with gRPC statuses and say the rest in trailers: whether a grammar could not be followed, whose fault a
//! broken medium is. Numbers of statuses are gRPC's.

use http::StatusCode;

/// Trailer of an engine that cannot follow the constraint of a request.
pub const CONSTRAINT_FAILED: &str = "smg-constraint-failed";
/// Trailer of an engine that could not get at a medium: `client` or `transient`.
pub const MEDIA_FAULT: &str = "smg-media-fault";

/// A gRPC status of an engine, or of the connection to it.
#[derive(Debug, Clone, Copy)]
pub struct Refusal<'a> {
    /// The status, as gRPC numbers them.
    pub code: i32,
    /// Its message.
    pub message: &'a str,
    /// [`CONSTRAINT_FAILED`], if it came.
    pub constraint_failed: Option<&'a str>,
    /// [`MEDIA_FAULT`], if it came.
    pub media_fault: Option<&'a str>,
    /// Whether the HTTP/2 connection broke or reset the call (GOAWAY, RST_STREAM), and not the engine answered.
    pub transport: bool,
}

/// What becomes of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Verdict {
    /// The status for the client, and the breaker's sample.
    pub status: StatusCode,
    /// The code for the client, where the refusal has one of its own whatever leg it came from.
    pub code: Option<&'static str>,
    /// Whether it says something about the worker.
    pub charged: bool,
    /// Where it may be tried again.
    pub replay: Replay,
}

/// Where a request may be tried again, if its status is one that is tried again at all.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Replay {
    /// Anywhere.
    Anywhere,
    /// On another worker: this one has given its answer to this payload.
    Elsewhere,
    /// Nowhere.
    Never,
}

impl Refusal<'_> {
    /// What becomes of it.
    pub fn verdict(&self) -> Verdict {
        let plain = |status| Verdict { status, code: None, charged: true, replay: Replay::Anywhere };
        if self.transport {
            return plain(StatusCode::BAD_GATEWAY);
        }
        match self.media_fault {
            Some("client") => return Verdict { charged: false, ..plain(StatusCode::BAD_REQUEST) },
            Some("transient") => return Verdict { charged: false, ..plain(StatusCode::BAD_GATEWAY) },
            _ => {}
        }
        if self.constraint_failed.is_some() {
            let status = StatusCode::UNPROCESSABLE_ENTITY;
            return Verdict { status, code: Some("constraint_failed"), charged: false, replay: Replay::Never };
        }
        let replay = match self.code {
            code::INTERNAL => Replay::Elsewhere,
            code::UNAVAILABLE if self.message.starts_with("sidecar_timeout") => Replay::Never,
            _ => Replay::Anywhere,
        };
        Verdict { replay, ..plain(http_status(self.code)) }
    }

    /// What broke between two legs, as far as the message tells: `phase` of `smg_pd_rendezvous_failures_total`.
    pub fn rendezvous_phase(&self) -> Option<&'static str> {
        let message = self.message.to_lowercase();
        let says = |words: &[&str]| words.iter().any(|word| message.contains(word));
        if says(&["bootstrap", "handshake"]) {
            return Some("bootstrap");
        }
        says(&["transfer failed", "kv transfer", "kvcache from prefill"]).then_some("transfer")
    }
}

/// The statuses of gRPC, by number.
mod code {
    pub(super) const CANCELLED: i32 = 1;
    pub(super) const INVALID_ARGUMENT: i32 = 3;
    pub(super) const DEADLINE_EXCEEDED: i32 = 4;
    pub(super) const NOT_FOUND: i32 = 5;
    pub(super) const ALREADY_EXISTS: i32 = 6;
    pub(super) const PERMISSION_DENIED: i32 = 7;
    pub(super) const RESOURCE_EXHAUSTED: i32 = 8;
    pub(super) const FAILED_PRECONDITION: i32 = 9;
    pub(super) const ABORTED: i32 = 10;
    pub(super) const OUT_OF_RANGE: i32 = 11;
    pub(super) const UNIMPLEMENTED: i32 = 12;
    pub(super) const INTERNAL: i32 = 13;
    pub(super) const UNAVAILABLE: i32 = 14;
    pub(super) const UNAUTHENTICATED: i32 = 16;
}

/// The HTTP status of a gRPC status.
pub const fn http_status(code: i32) -> StatusCode {
    match code {
        code::INVALID_ARGUMENT | code::FAILED_PRECONDITION | code::OUT_OF_RANGE => StatusCode::BAD_REQUEST,
        code::UNAUTHENTICATED => StatusCode::UNAUTHORIZED,
        code::PERMISSION_DENIED => StatusCode::FORBIDDEN,
        code::NOT_FOUND => StatusCode::NOT_FOUND,
        code::ALREADY_EXISTS | code::ABORTED => StatusCode::CONFLICT,
        code::RESOURCE_EXHAUSTED => StatusCode::TOO_MANY_REQUESTS,
        code::UNIMPLEMENTED => StatusCode::NOT_IMPLEMENTED,
        code::CANCELLED => StatusCode::BAD_GATEWAY,
        code::UNAVAILABLE => StatusCode::SERVICE_UNAVAILABLE,
        code::DEADLINE_EXCEEDED => StatusCode::GATEWAY_TIMEOUT,
        _ => StatusCode::INTERNAL_SERVER_ERROR,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal(code: i32, message: &str) -> Refusal<'_> {
        Refusal { code, message, constraint_failed: None, media_fault: None, transport: false }
    }

    #[test]
    fn each_status_of_grpc_has_its_documented_http_status() {
        let expected = [
            (1, 502),
            (2, 500),
            (3, 400),
            (4, 504),
            (5, 404),
            (6, 409),
            (7, 403),
            (8, 429),
            (9, 400),
            (10, 409),
            (11, 400),
            (12, 501),
            (13, 500),
            (14, 503),
            (15, 500),
            (16, 401),
            (99, 500),
        ];
        for (code, status) in expected {
            assert_eq!(http_status(code).as_u16(), status, "{code}");
        }
    }

    #[test]
    fn trailers_override_the_status() {
        let client = Refusal { media_fault: Some("client"), ..refusal(13, "") }.verdict();
        assert_eq!((client.status.as_u16(), client.charged), (400, false));
        let transient = Refusal { media_fault: Some("transient"), ..refusal(3, "") }.verdict();
        assert_eq!((transient.status.as_u16(), transient.charged), (502, false));
        let constraint = Refusal { constraint_failed: Some("engine"), ..refusal(9, "") }.verdict();
        assert_eq!((constraint.status.as_u16(), constraint.code), (422, Some("constraint_failed")));
        assert_eq!((constraint.charged, constraint.replay), (false, Replay::Never));
        assert_eq!(refusal(9, "").verdict().status.as_u16(), 400, "without the trailer it is the client's request");
    }

    #[test]
    fn a_broken_connection_is_a_bad_gateway_whatever_its_status() {
        for code in [1, 13, 14] {
            let verdict = Refusal { transport: true, ..refusal(code, "") }.verdict();
            assert_eq!((verdict.status.as_u16(), verdict.charged), (502, true));
        }
    }

    #[test]
    fn what_an_engine_has_decided_is_not_replayed_there() {
        assert_eq!(refusal(13, "assertion failed").verdict().replay, Replay::Elsewhere);
        assert_eq!(refusal(14, "sidecar_timeout: tokenizer").verdict().replay, Replay::Never);
        assert_eq!(refusal(14, "draining").verdict().replay, Replay::Anywhere);
    }

    #[test]
    fn messages_tell_where_a_rendezvous_broke() {
        assert_eq!(refusal(13, "Bootstrap server unreachable").rendezvous_phase(), Some("bootstrap"));
        assert_eq!(refusal(13, "Handshake with peer timed out").rendezvous_phase(), Some("bootstrap"));
        assert_eq!(refusal(13, "KV transfer failed: x").rendezvous_phase(), Some("transfer"));
        assert_eq!(refusal(13, "failed to get kvcache from prefill").rendezvous_phase(), Some("transfer"));
        assert_eq!(refusal(13, "out of memory").rendezvous_phase(), None);
    }
}
