//! `Retry-After` of engines: whoever asks for a pause gets one. Pure.

use std::time::{Duration, SystemTime};

use http::{HeaderMap, StatusCode, header};

/// Longest pause that is granted. An engine that asks for more is asked again after this time.
const LONGEST: Duration = Duration::from_secs(300);

/// The pause that a worker asks for with this answer: only 429 and 503 can ask. Seconds and HTTP dates are understood (RFC 9110, 10.2.3).
pub fn asked_for(status: StatusCode, headers: &HeaderMap, now: SystemTime) -> Option<Duration> {
    if !matches!(status, StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE) {
        return None;
    }
    let text = headers.get(header::RETRY_AFTER)?.to_str().ok()?.trim();
    let pause = match text.parse::<u64>() {
        Ok(seconds) => Duration::from_secs(seconds),
        Err(_) => httpdate::parse_http_date(text).ok()?.duration_since(now).ok()?,
    };
    Some(pause.min(LONGEST)).filter(|pause| !pause.is_zero())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn asked(status: u16, value: &str) -> Option<u64> {
        let now = SystemTime::UNIX_EPOCH + Duration::from_secs(1_000_000_000);
        let headers = HeaderMap::from_iter([(header::RETRY_AFTER, value.parse().unwrap())]);
        asked_for(StatusCode::from_u16(status).unwrap(), &headers, now).map(|pause| pause.as_secs())
    }

    #[test]
    fn only_a_full_engine_can_ask_for_a_pause() {
        assert_eq!((asked(429, "7"), asked(503, " 7 ")), (Some(7), Some(7)));
        assert_eq!((asked(500, "7"), asked(200, "7")), (None, None));
    }

    #[test]
    fn dates_are_understood_and_nonsense_is_not() {
        assert_eq!(asked(503, "Sun, 09 Sep 2001 01:47:10 GMT"), Some(30));
        for nothing in ["0", "-1", "soon", "1.5", "Sun, 09 Sep 2001 01:46:00 GMT", ""] {
            assert_eq!(asked(503, nothing), None, "{nothing}");
        }
    }

    #[test]
    fn nobody_is_sent_away_for_ever() {
        assert_eq!(asked(503, "18446744073709551615"), Some(300));
    }
}
