//! Which failures are tried again. Pure.
//!
//! Only what happened before the first byte reached the client can be tried again. A refusal of the request itself (any 4xx but 408 and
//! 429) would be refused everywhere, so it is not; it says nothing about the worker either.

use std::time::Duration;

use http::StatusCode;
use smg_fleet::settings::Retry;
use smg_fleet::worker::ResilienceOverride;
use smg_net::backoff::Backoff;

use super::breaker::Verdict;

/// Statuses that may pass on another pair.
pub fn is_retryable(status: StatusCode) -> bool {
    matches!(status.as_u16(), 408 | 429 | 500 | 502 | 503 | 504)
}

/// What a leg's status says about its worker: a failure, a success, or (429: it is full, not broken) nothing.
pub fn verdict(status: StatusCode, overrides: &ResilienceOverride) -> Verdict {
    let code = status.as_u16();
    let capacity = if overrides.capacity_status_codes.is_empty() {
        code == 429
    } else {
        overrides.capacity_status_codes.contains(&code)
    };
    if capacity {
        return Verdict::Neutral;
    }
    let failure = if overrides.retryable_status_codes.is_empty() {
        is_retryable(status)
    } else {
        overrides.retryable_status_codes.contains(&code)
    };
    if failure { Verdict::Failure } else { Verdict::Success }
}

/// The delay before attempt number `attempt` (1 = the second one).
pub fn delay(settings: &Retry, attempt: u32, random: f64) -> Duration {
    let backoff = Backoff {
        initial: Duration::from_millis(settings.initial_backoff_ms),
        max: Duration::from_millis(settings.max_backoff_ms),
        multiplier: settings.multiplier,
        jitter: settings.jitter,
    };
    backoff.delay(attempt.saturating_sub(1), random)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_of_the_request_is_neither_retried_nor_charged() {
        for code in [400, 401, 403, 404, 405, 409, 413, 422] {
            let status = StatusCode::from_u16(code).unwrap();
            assert!(!is_retryable(status), "{code}");
            assert_eq!(verdict(status, &ResilienceOverride::default()), Verdict::Success, "{code}");
        }
    }

    #[test]
    fn failures_are_retried_and_charged_but_a_full_engine_is_not_broken() {
        for code in [408, 500, 502, 503, 504] {
            let status = StatusCode::from_u16(code).unwrap();
            assert!(is_retryable(status), "{code}");
            assert_eq!(verdict(status, &ResilienceOverride::default()), Verdict::Failure, "{code}");
        }
        assert!(is_retryable(StatusCode::TOO_MANY_REQUESTS));
        assert_eq!(verdict(StatusCode::TOO_MANY_REQUESTS, &ResilienceOverride::default()), Verdict::Neutral);
    }

    #[test]
    fn a_worker_may_say_which_statuses_mean_what() {
        let overrides = ResilienceOverride {
            retryable_status_codes: vec![500],
            capacity_status_codes: vec![503],
            ..Default::default()
        };
        assert_eq!(verdict(StatusCode::SERVICE_UNAVAILABLE, &overrides), Verdict::Neutral);
        assert_eq!(verdict(StatusCode::BAD_GATEWAY, &overrides), Verdict::Success);
        assert_eq!(verdict(StatusCode::INTERNAL_SERVER_ERROR, &overrides), Verdict::Failure);
    }
}
