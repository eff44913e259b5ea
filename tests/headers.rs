//! Engines get the listed headers of the client, and the client an answer as its engine framed it but for what describes the connection.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod support;

use std::collections::HashSet;
use std::time::Duration;

use serde_json::{Value, json};
use support::*;

/// Sends a chat request with these headers.
async fn post_with(serving: &Serving, headers: &[(&str, &str)]) -> reqwest::Response {
    let mut request = serving.smg.client.post(format!("{}/v1/chat/completions", serving.smg.url)).json(&chat());
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    request.send().await.unwrap()
}

#[tokio::test]
async fn engines_get_the_listed_headers_and_no_others() {
    let forwarded = [
        ("authorization", "Bearer client"),
        ("anthropic-version", "2023-06-01"),
        ("anthropic-beta", "a"),
        ("anthropic-beta", "b"),
        ("x-request-id", "abc"),
        ("x-correlation-id", "c"),
        ("traceparent", "00-11111111111111111111111111111111-2222222222222222-01"),
        ("tracestate", "a=b"),
        ("x-smg-routing-key", "user-1"),
        ("x-request-id-parent", "p"),
    ];
    let dropped = [
        ("cookie", "c=1"),
        ("user-agent", "sdk"),
        ("accept", "text/plain"),
        ("accept-encoding", "gzip"),
        ("x-smg-target-worker", "0"),
        ("x-forwarded-for", "10.0.0.1"),
        ("keep-alive", "timeout=5"),
        ("te", "trailers"),
        ("proxy-authorization", "Basic x"),
        ("x-anything", "y"),
    ];
    for dispatch in DISPATCHES {
        let serving = Serving::accepting(dispatch, &[]).await;
        let all: Vec<_> = forwarded.iter().chain(&dropped).copied().collect();
        let response = post_with(&serving, &all).await;
        assert_eq!(response.headers()["x-request-id"], "abc");
        for engine in serving.engines() {
            let request = engine.generations().remove(0);
            for (name, value) in forwarded {
                assert!(request.header_values(name).any(|received| received == value), "{dispatch:?} {name}");
            }
            assert_eq!(request.header_values("anthropic-beta").collect::<Vec<_>>(), ["a", "b"]);
            assert_eq!(request.header("host"), engine.url().strip_prefix("http://"));
            assert_eq!(request.header("content-type"), Some("application/json"));
            let own = ["host", "content-type", "content-length", "x-smg-hops"];
            let expected: HashSet<&str> = forwarded.iter().map(|(name, _)| *name).chain(own).collect();
            let names: HashSet<String> = request.headers.iter().map(|(name, _)| name.to_lowercase()).collect();
            assert_eq!(names.iter().map(String::as_str).collect::<HashSet<_>>(), expected, "{dispatch:?}");
        }
    }
}

#[tokio::test]
async fn one_request_id_is_minted_for_all_legs_and_the_client() {
    for dispatch in DISPATCHES {
        let serving = Serving::accepting(dispatch, &[]).await;
        let response = post_with(&serving, &[]).await;
        let id = response.headers()["x-request-id"].to_str().unwrap().to_owned();
        assert!(id.starts_with("chatcmpl-") && id.len() > 20, "{id}");
        for engine in serving.engines() {
            assert_eq!(engine.generations()[0].header("x-request-id"), Some(&*id), "{dispatch:?}");
        }
        let response = post_with(&serving, &[("x-trace-id", "t-1")]).await;
        assert_eq!(response.headers()["x-request-id"], "t-1", "an id of another accepted header");
        assert_eq!(serving.output.generations()[1].header("x-request-id"), Some("t-1"));
    }
}

#[tokio::test]
async fn a_workers_own_key_is_sent_when_the_client_has_none() {
    let (prefill, decode) = (sglang(Role::Prefill).await, sglang(Role::Decode).await);
    let smg = Smg::launch(&[]).await;
    smg.register(&spec_with(&prefill, "prefill", json!({"api_key": "key-p"}))).await;
    smg.register(&spec_with(&decode, "decode", json!({"api_key": "key-d"}))).await;
    let serving = Serving { smg, prefill: Some(prefill), output: decode };
    serving.engines().for_each(|engine| engine.set_fault(anything()));
    post_with(&serving, &[]).await;
    post_with(&serving, &[("authorization", "Bearer client")]).await;
    for (engine, key) in serving.engines().zip(["key-p", "key-d"]) {
        let requests = engine.generations();
        let credentials: Vec<Vec<&str>> =
            requests.iter().map(|request| request.header_values("authorization").collect()).collect();
        assert_eq!(credentials, [vec![&*format!("Bearer {key}")], vec!["Bearer client"]]);
    }
}

#[tokio::test]
async fn clients_get_the_engines_headers_but_those_of_its_connection() {
    for dispatch in DISPATCHES {
        let serving = Serving::scripted(dispatch, &[]).await;
        let head = "HTTP/1.1 200 OK\r\ncontent-type: application/json; charset=utf-8\r\nset-cookie: a=1\r\nset-cookie: b=2\r\n\
            x-engine: e\r\nx-internal: 1\r\nconnection: keep-alive, x-internal\r\nkeep-alive: timeout=5\r\nupgrade: h2c\r\n\
            proxy-authenticate: Basic\r\nx-smg-error-code: forged\r\nx-request-id: engine\r\n\
            x-smg-routed-worker-id: forged\r\ncontent-length: 2\r\n\r\n{}";
        serving.output.set_fault(Fault::generation().raw([(Duration::ZERO, head)]));
        let response = post_with(&serving, &[("x-request-id", "abc")]).await;
        let headers = response.headers().clone();
        let values =
            |name: &str| -> Vec<&str> { headers.get_all(name).iter().map(|value| value.to_str().unwrap()).collect() };
        assert_eq!(values("content-type"), ["application/json; charset=utf-8"], "{dispatch:?}");
        assert_eq!(values("content-length"), ["2"]);
        assert_eq!(values("set-cookie"), ["a=1", "b=2"]);
        assert_eq!(values("x-engine"), ["e"]);
        assert_eq!(values("x-request-id"), ["abc"]);
        assert_eq!(values("x-smg-routed-worker-id"), [serving.output.url()]);
        for name in ["x-internal", "keep-alive", "upgrade", "proxy-authenticate", "x-smg-error-code"] {
            assert_eq!(values(name), [""; 0], "{dispatch:?} {name}");
        }
        assert_eq!(response.text().await.unwrap(), "{}");
    }
}

#[tokio::test]
async fn a_stream_is_an_event_stream_without_a_length_and_an_answer_is_what_the_engine_says() {
    for dispatch in DISPATCHES {
        let serving = Serving::scripted(dispatch, &[]).await;
        for kind in ["application/json", "application/json; charset=utf-8", "text/plain"] {
            serving.output.clear_faults();
            serving.output.set_fault(Fault::generation().status(200, r#"{"a":1}"#).header("content-type", kind));
            let response = post_with(&serving, &[]).await;
            assert_eq!(response.headers()["content-type"], kind, "{dispatch:?}");
            assert_eq!(response.headers()["content-length"], "7");
            assert_eq!(response.text().await.unwrap(), r#"{"a":1}"#);
        }
        serving.output.clear_faults();
        let stream = "data: {\"a\":1}\n\ndata: [DONE]\n\n";
        // An engine that sends its events with a length.
        serving.output.set_fault(Fault::generation().status(200, stream).header("content-type", "text/event-stream"));
        for (path, body) in requests() {
            let response = serving.smg.post(path, &streamed(body)).await;
            let kind = response.headers()["content-type"].to_str().unwrap().to_owned();
            assert!(kind.starts_with("text/event-stream"), "{dispatch:?} {kind}");
            assert_eq!(response.headers().get("content-length"), None, "{dispatch:?}");
            assert_eq!(response.headers()["x-smg-routed-worker-id"].to_str().unwrap(), serving.output.url());
            assert_eq!(response.text().await.unwrap(), stream);
        }
    }
}

#[tokio::test]
async fn an_answer_is_whole_whatever_length_its_engine_states() {
    let answers = [
        // A length beside chunks: the chunks count (RFC 9112 section 6.3).
        (
            "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 3\r\ntransfer-encoding: chunked\r\n\r\n\
             7\r\n{\"a\":1}\r\n0\r\n\r\n",
            200,
            r#"{"a":1}"#,
        ),
        // The length of a body that this status does not have.
        ("HTTP/1.1 304 Not Modified\r\ncontent-length: 5\r\n\r\n", 304, ""),
    ];
    for dispatch in DISPATCHES {
        let serving = Serving::scripted(dispatch, &[]).await;
        for (answer, status, body) in answers {
            serving.output.clear_faults();
            serving.output.set_fault(Fault::generation().raw([(Duration::ZERO, answer)]));
            let response = post_with(&serving, &[]).await;
            assert_eq!(response.status(), status, "{dispatch:?}");
            assert_eq!(response.text().await.unwrap(), body, "{dispatch:?}");
        }
    }
}

#[tokio::test]
async fn a_switch_of_protocols_that_nobody_asked_for_is_a_failed_leg() {
    for dispatch in DISPATCHES {
        let serving = Serving::scripted(dispatch, &[]).await;
        serving.smg.set_policy("default", &json!({"retry": {"max_retries": 1}})).await;
        let answer = "HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\nhello";
        serving.output.set_fault(Fault::generation().raw([(Duration::ZERO, answer)]));
        let response = post_with(&serving, &[]).await;
        assert_eq!(response.status(), 502, "{dispatch:?}");
        let error: Value = response.json().await.unwrap();
        assert!(error["error"]["message"].as_str().unwrap().contains("101"), "{error}");
        assert_eq!(serving.failures(&serving.output).await, 1.0, "{dispatch:?}");
    }
}

#[tokio::test]
async fn nothing_is_put_into_a_stream_that_is_encoded() {
    for dispatch in DISPATCHES {
        let serving = Serving::scripted(dispatch, &[]).await;
        // It breaks off: into a readable stream the gateway would write an event that says so.
        let answer = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-encoding: gzip\r\ncontent-length: 9\r\n\r\n\u{1f}zipped";
        serving.output.set_fault(Fault::generation().raw([(Duration::ZERO, answer)]));
        let mut response = serving.smg.post("/v1/chat/completions", &streamed(chat())).await;
        assert_eq!(response.headers()["content-encoding"], "gzip", "{dispatch:?}");
        let mut received = Vec::new();
        while let Ok(Some(piece)) = response.chunk().await {
            received.extend_from_slice(&piece);
        }
        assert!(b"\x1fzipped".starts_with(&received), "{dispatch:?}: {}", String::from_utf8_lossy(&received));
        serving.smg.until_idle().await;
    }
}
