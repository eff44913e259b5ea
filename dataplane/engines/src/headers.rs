//! Which headers cross the gateway.
//!
//! Towards engines only a closed list goes: credentials, API version, tracing and request ids. Everything else is
//! between the client and the gateway. Towards clients everything goes but what describes one connection.

use http::header::{AUTHORIZATION, CONNECTION, CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue};

const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// Client headers that engines get, besides those that start with `x-request-id-`.
const FORWARDED: [&str; 8] = [
    "authorization",
    "anthropic-version",
    "anthropic-beta",
    "x-request-id",
    "x-correlation-id",
    "traceparent",
    "tracestate",
    "x-smg-routing-key",
];

/// Response headers that are not relayed: those of one connection (RFC 9110 section 7.6.1), the length, which the server states
/// from the body it sends, and what only this gateway may say.
const NOT_RELAYED: [&str; 13] = [
    "connection",
    "content-length",
    "keep-alive",
    "proxy-authenticate",
    "proxy-authorization",
    "proxy-connection",
    "te",
    "trailer",
    "trailers",
    "transfer-encoding",
    "upgrade",
    "x-smg-decision",
    "x-smg-error-code",
];

/// The headers of a leg. All legs of a request carry the same request id, the client's accepted one or a minted one.
///
/// The client's `Authorization` goes before the worker's own key; a caller that used it to authenticate the client to
/// the gateway itself removes it first. Values with bytes outside visible ASCII are dropped, repeated headers are kept.
pub fn leg_headers(client: &HeaderMap, request_id: &str, worker_api_key: Option<&str>) -> HeaderMap {
    let mut headers = HeaderMap::with_capacity(8);
    for (name, value) in client {
        let forwarded = FORWARDED.contains(&name.as_str()) || name.as_str().starts_with("x-request-id-");
        if forwarded && *name != REQUEST_ID && value.to_str().is_ok() {
            headers.append(name.clone(), value.clone());
        }
    }
    if let Ok(id) = HeaderValue::from_str(request_id) {
        headers.insert(REQUEST_ID, id);
    }
    if !headers.contains_key(AUTHORIZATION)
        && let Some(Ok(mut credential)) = worker_api_key.map(|key| HeaderValue::try_from(format!("Bearer {key}")))
    {
        credential.set_sensitive(true);
        headers.insert(AUTHORIZATION, credential);
    }
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    headers
}

/// The headers of an engine's response that its client gets. `content-encoding` stays, because the body is relayed as it is.
/// `content-length` does not: an engine may state one beside a chunked body or for a status that has none, and a client that
/// believed it would read a short answer. Headers that `Connection` names are dropped.
pub fn relay_headers(engine: &HeaderMap) -> HeaderMap {
    let mut headers = HeaderMap::with_capacity(engine.len());
    for (name, value) in engine {
        if !NOT_RELAYED.contains(&name.as_str()) && !named_by_connection(engine, name) {
            headers.append(name.clone(), value.clone());
        }
    }
    headers
}

fn named_by_connection(headers: &HeaderMap, name: &HeaderName) -> bool {
    headers
        .get_all(CONNECTION)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .any(|token| token.trim().eq_ignore_ascii_case(name.as_str()))
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
mod tests {
    use super::*;

    fn map(headers: &[(&str, &str)]) -> HeaderMap {
        let mut map = HeaderMap::new();
        for (name, value) in headers {
            map.append(
                HeaderName::from_bytes(name.as_bytes()).unwrap(),
                HeaderValue::from_bytes(value.as_bytes()).unwrap(),
            );
        }
        map
    }

    fn values<'a>(map: &'a HeaderMap, name: &str) -> Vec<&'a str> {
        map.get_all(name).iter().map(|value| value.to_str().unwrap()).collect()
    }

    #[test]
    fn engines_get_only_the_listed_headers() {
        let client = map(&[
            ("host", "gateway"),
            ("cookie", "c=1"),
            ("user-agent", "sdk"),
            ("accept", "*/*"),
            ("accept-encoding", "gzip"),
            ("content-length", "12"),
            ("content-type", "application/json; charset=utf-8"),
            ("x-smg-target-worker", "0"),
            ("x-forwarded-for", "10.0.0.1"),
            ("anthropic-version", "2023-06-01"),
            ("anthropic-beta", "a"),
            ("anthropic-beta", "b"),
            ("x-request-id", "raw"),
            ("x-request-id-parent", "p"),
            ("x-correlation-id", "c"),
            ("traceparent", "00-1-2-01"),
            ("tracestate", "k=v"),
            ("x-smg-routing-key", "user-1"),
        ]);
        let leg = leg_headers(&client, "accepted", None);
        let expected = map(&[
            ("anthropic-version", "2023-06-01"),
            ("anthropic-beta", "a"),
            ("anthropic-beta", "b"),
            ("x-request-id", "accepted"),
            ("x-request-id-parent", "p"),
            ("x-correlation-id", "c"),
            ("traceparent", "00-1-2-01"),
            ("tracestate", "k=v"),
            ("x-smg-routing-key", "user-1"),
            ("content-type", "application/json"),
        ]);
        assert_eq!(leg, expected);
    }

    #[test]
    fn the_clients_credential_goes_before_the_workers() {
        let client = map(&[("authorization", "Bearer client")]);
        assert_eq!(values(&leg_headers(&client, "r", Some("worker")), "authorization"), ["Bearer client"]);
        let fallback = leg_headers(&HeaderMap::new(), "r", Some("worker"));
        assert_eq!(values(&fallback, "authorization"), ["Bearer worker"]);
        assert!(fallback["authorization"].is_sensitive());
        assert!(!leg_headers(&HeaderMap::new(), "r", None).contains_key("authorization"));
    }

    #[test]
    fn a_request_id_is_sent_even_when_the_client_sent_none() {
        assert_eq!(values(&leg_headers(&HeaderMap::new(), "chatcmpl-1", None), "x-request-id"), ["chatcmpl-1"]);
    }

    #[test]
    fn values_outside_ascii_are_not_forwarded() {
        let client = map(&[("x-smg-routing-key", "schlüssel")]);
        assert!(!leg_headers(&client, "r", None).contains_key("x-smg-routing-key"));
    }

    #[test]
    fn clients_get_every_header_but_those_of_the_connection() {
        let engine = map(&[
            ("connection", "keep-alive, X-Internal"),
            ("keep-alive", "timeout=5"),
            ("transfer-encoding", "chunked"),
            ("trailer", "x-checksum"),
            ("upgrade", "h2c"),
            ("te", "trailers"),
            ("proxy-authenticate", "Basic"),
            ("x-internal", "1"),
            ("x-smg-error-code", "forged"),
            ("content-type", "application/json; charset=utf-8"),
            ("content-encoding", "gzip"),
            ("content-length", "98"),
            ("set-cookie", "a=1"),
            ("set-cookie", "b=2"),
            ("server", "uvicorn"),
        ]);
        let expected = map(&[
            ("content-type", "application/json; charset=utf-8"),
            ("content-encoding", "gzip"),
            ("set-cookie", "a=1"),
            ("set-cookie", "b=2"),
            ("server", "uvicorn"),
        ]);
        assert_eq!(relay_headers(&engine), expected);
    }
}
