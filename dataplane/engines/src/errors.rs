//! The code (`X-SMG-Error-Code`) for an engine's own error status.
//!
//! Only the code is chosen here. Status, content type and body stay the engine's: a client must be able to tell its own
//! mistake (400, 422) from an overloaded engine (429, 503).

use http::StatusCode;

/// A sequential prefill answered with an error status.
pub const PREFILL_UPSTREAM_ERROR: &str = "prefill_upstream_error";

/// The code for a parallel prefill that answered with `status`.
pub const fn parallel_prefill_code(status: StatusCode) -> &'static str {
    match status.as_u16() {
        400 => "prefill_bad_request",
        404 => "prefill_not_found",
        500 => "prefill_internal_error",
        502 => "prefill_bad_gateway",
        503 => "prefill_unavailable",
        _ => "prefill_error",
    }
}

/// The code for a decode leg, parallel or sequential, that answered with `status`.
pub const fn decode_code(status: StatusCode) -> &'static str {
    match status.as_u16() {
        400 => "decode_bad_request",
        404 => "decode_not_found",
        500 => "decode_internal_error",
        502 => "decode_bad_gateway",
        503 => "decode_unavailable",
        _ => "decode_error",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_status_has_its_documented_code() {
        for (status, suffix) in [
            (StatusCode::BAD_REQUEST, "bad_request"),
            (StatusCode::NOT_FOUND, "not_found"),
            (StatusCode::INTERNAL_SERVER_ERROR, "internal_error"),
            (StatusCode::SERVICE_UNAVAILABLE, "unavailable"),
            (StatusCode::BAD_GATEWAY, "bad_gateway"),
            (StatusCode::TOO_MANY_REQUESTS, "error"),
            (StatusCode::UNPROCESSABLE_ENTITY, "error"),
            (StatusCode::GATEWAY_TIMEOUT, "error"),
        ] {
            assert_eq!(parallel_prefill_code(status), format!("prefill_{suffix}"));
            assert_eq!(decode_code(status), format!("decode_{suffix}"));
        }
    }
}
