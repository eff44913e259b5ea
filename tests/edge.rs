//! The client edge under pressure: connections that dawdle or grow old, too many requests, pages of other origins, models
//! that only others know.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod support;

use std::time::Duration;

use bytes::Bytes;
use reqwest::{Method, Response, StatusCode};
use serde_json::{Value, json};
use support::*;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

async fn connect(smg: &Smg) -> TcpStream {
    TcpStream::connect(("127.0.0.1", smg.port)).await.unwrap()
}

/// Everything a connection says until it is closed.
async fn until_closed(stream: &mut TcpStream) -> String {
    let mut said = Vec::new();
    // An abrupt end is an end too.
    let _ = tokio::time::timeout(PATIENCE, stream.read_to_end(&mut said)).await.expect("the connection is closed");
    String::from_utf8(said).unwrap()
}

/// One response without a body longer than what comes with its head.
async fn answer(stream: &mut TcpStream) -> String {
    let mut said = Vec::new();
    while !said.windows(4).any(|window| window == b"\r\n\r\n") || !said.ends_with(b"OK") {
        let mut buffer = [0; 1024];
        let read = tokio::time::timeout(PATIENCE, stream.read(&mut buffer)).await.unwrap().unwrap();
        assert_ne!(read, 0, "closed after {:?}", String::from_utf8_lossy(&said));
        said.extend_from_slice(&buffer[..read]);
    }
    String::from_utf8(said).unwrap()
}

const PROBE: &[u8] = b"GET /liveness HTTP/1.1\r\nhost: gateway\r\n\r\n";

/// `--header-read-timeout-secs`, `--idle-connection-timeout-secs`, `smg_http_connection_timeouts_total`.
#[tokio::test]
async fn a_slow_head_and_an_unused_connection_each_have_their_own_limit() {
    let smg = Smg::launch(&["--header-read-timeout-secs", "1", "--idle-connection-timeout-secs", "3"]).await;
    let timeouts = async |kind: &str| smg.metric("smg_http_connection_timeouts_total", &[("timeout", kind)]).await;
    let (mut silent, mut slow, mut idle) = (connect(&smg).await, connect(&smg).await, connect(&smg).await);
    slow.write_all(b"GET /liveness HTTP/1.1\r\nhost:").await.unwrap();
    idle.write_all(PROBE).await.unwrap();
    assert!(answer(&mut idle).await.contains("200 OK"));
    let mut stalled = connect(&smg).await;
    stalled.write_all(PROBE).await.unwrap();
    answer(&mut stalled).await;
    stalled.write_all(b"GET /live").await.unwrap();
    for stream in [&mut silent, &mut slow, &mut stalled] {
        assert_eq!(until_closed(stream).await, "");
    }
    assert_eq!(until_closed(&mut idle).await, "");
    assert_eq!(timeouts("header_read").await, 3.0);
    assert!(timeouts("idle").await >= 1.0, "the connections of other clients may be counted too");
    // What is in flight has neither limit.
    let engine = MockEngine::builder().engine(Engine::Sglang).role(Role::Regular).model(MODEL);
    let engine = engine.token_delay(Duration::from_millis(400)).start().await.unwrap();
    smg.register(&spec(&engine, "regular")).await;
    let mut body = chat_stream();
    body["max_tokens"] = json!(12);
    body["ignore_eos"] = json!(true);
    let text = smg.post("/v1/chat/completions", &body).await.text().await.unwrap();
    assert!(text.ends_with("data: [DONE]\n\n"), "{text}");
}

/// A stream that goes on until it is dropped.
async fn endless(smg: &Smg) -> Response {
    let mut body = chat_stream();
    body["max_tokens"] = json!(100_000);
    body["ignore_eos"] = json!(true);
    let mut response = smg.post("/v1/chat/completions", &body).await;
    assert_eq!(response.status(), StatusCode::OK);
    response.chunk().await.unwrap().unwrap();
    response
}

async fn refused(response: Response) -> (u16, String, String) {
    let header = |name: &str| response.headers().get(name).map(|value| value.to_str().unwrap().to_owned());
    (response.status().as_u16(), header("x-smg-error-code").unwrap(), header("retry-after").unwrap())
}

/// `--max-concurrent-requests`, `--queue-size`, `--queue-timeout-secs`; 429 `admission_queue_full`, 503 `admission_queue_timeout`.
#[tokio::test]
async fn requests_beyond_the_limit_wait_and_those_beyond_the_queue_are_refused() {
    let engine = MockEngine::builder().engine(Engine::Sglang).role(Role::Regular).model(MODEL);
    let engine = engine.token_delay(Duration::from_millis(50)).start().await.unwrap();
    for (queue, expected) in [("1", (503, "admission_queue_timeout")), ("0", (429, "admission_queue_full"))] {
        let flags = ["--max-concurrent-requests", "1", "--queue-size", queue, "--queue-timeout-secs", "1"];
        let smg = Smg::launch(&flags).await;
        smg.register(&spec(&engine, "regular")).await;
        let stream = endless(&smg).await;
        assert_eq!(smg.metric("smg_admission_inflight", &[]).await, 1.0, "a stream counts until its end");
        let before = engine.generation_count();
        let (status, code, retry_after) = refused(smg.post("/v1/chat/completions", &chat()).await).await;
        assert_eq!((status, code.as_str(), retry_after.as_str()), (expected.0, expected.1, "2"));
        assert_eq!(engine.generation_count(), before, "no worker was asked");
        assert_eq!(smg.get("/workers").await.status(), StatusCode::OK, "administration is not limited");
        drop(stream);
        eventually("the place is free again", || async {
            (smg.metric("smg_admission_inflight", &[]).await == 0.0).then_some(())
        })
        .await;
        assert_eq!(smg.post("/v1/chat/completions", &chat()).await.status(), StatusCode::OK);
        let reason = if queue == "1" { "timeout" } else { "full" };
        assert_eq!(smg.metric("smg_admission_queue_rejected_total", &[("reason", reason)]).await, 1.0);
        assert_eq!(smg.metric("smg_http_rate_limit_total", &[("result", "rejected")]).await, 1.0);
        assert_eq!(smg.metric("smg_http_rate_limit_total", &[("result", "allowed")]).await, 2.0);
        assert_eq!(smg.metric("smg_admission_queue_depth", &[]).await, 0.0);
    }
}

/// `--max-connection-age-secs`.
#[tokio::test]
async fn an_old_connection_is_asked_to_close_with_an_answer_and_streams_on_it_end_whole() {
    let smg = Smg::launch(&["--max-connection-age-secs", "1"]).await;
    let mut connection = connect(&smg).await;
    let mut answers = 0;
    let last = loop {
        connection.write_all(PROBE).await.unwrap();
        let answer = answer(&mut connection).await.to_ascii_lowercase();
        answers += 1;
        if answer.contains("connection: close") {
            break answer;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    };
    assert!(last.starts_with("http/1.1 200") && answers > 1, "{last}");
    assert_eq!(until_closed(&mut connection).await, "");
    // HTTP/2 says goodbye to the connection and lets its stream end.
    let engine = MockEngine::builder().engine(Engine::Sglang).role(Role::Regular).model(MODEL);
    let engine = engine.token_delay(Duration::from_millis(150)).start().await.unwrap();
    smg.register(&spec(&engine, "regular")).await;
    let http2 = reqwest::Client::builder().http2_prior_knowledge().no_proxy().build().unwrap();
    let mut body = chat_stream();
    body["max_tokens"] = json!(16);
    body["ignore_eos"] = json!(true);
    let stream = http2.post(format!("{}/v1/chat/completions", smg.url)).json(&body).send().await.unwrap();
    assert!(stream.text().await.unwrap().ends_with("data: [DONE]\n\n"));
    let opened = || smg.metric("smg_http_connections_active", &[]);
    eventually("the old connection has gone", || async { (opened().await <= 1.0).then_some(()) }).await;
    assert_eq!(http2.get(format!("{}/liveness", smg.url)).send().await.unwrap().status(), StatusCode::OK);
}

/// Two fleets that serve each other: 508 `loop_detected`.
#[tokio::test]
async fn a_request_that_comes_back_is_refused_and_multiplies_nothing() {
    const CHAT: &str = "/v1/chat/completions";
    let (one, other) = (Smg::launch(&[]).await, Smg::launch(&[]).await);
    for (at, worker) in [(&one, &other), (&other, &one)] {
        let models = json!([{"id": MODEL}]);
        let spec = json!({"url": worker.url, "worker_type": "regular", "runtime_type": "sglang", "models": models});
        at.register(&spec).await;
    }
    let asked = async |path: &str| {
        let (labels, name) = ([("path", path)], "smg_http_requests_total");
        (one.metric(name, &labels).await, other.metric(name, &labels).await)
    };
    let refused = one.post(CHAT, &chat()).await;
    assert_eq!(refused.status(), StatusCode::LOOP_DETECTED);
    assert_eq!(refused.json::<Value>().await.unwrap()["error"]["code"], "loop_detected");
    assert_eq!(asked(CHAT).await, (2.0, 1.0));
    for (path, status) in [("/get_server_info", 508), ("/health_generate", 503), ("/get_model_info", 508)] {
        let before = asked(path).await;
        assert_eq!(one.get(path).await.status().as_u16(), status, "{path}");
        let after = asked(path).await;
        assert_eq!((after.0 - before.0, after.1 - before.1), (2.0, 1.0), "{path}");
    }
    let flushed = one.post("/flush_cache", &json!({})).await;
    assert_eq!(flushed.status(), StatusCode::PARTIAL_CONTENT);
    assert_eq!(asked("/flush_cache").await, (2.0, 1.0));
    one.until_idle().await;
    other.until_idle().await;
}

#[tokio::test]
async fn a_request_may_come_through_three_gateways_and_not_through_more() {
    let engine = sglang(Role::Regular).await;
    let smg = Smg::launch(&[]).await;
    smg.register(&spec(&engine, "regular")).await;
    for (hops, status, seen) in [("a, b,c", 200, 1), ("a,b,c,d", 508, 1), ("not a name", 200, 2)] {
        let request = smg.client.post(format!("{}/v1/chat/completions", smg.url)).header("x-smg-hops", hops);
        let answer = request.json(&chat()).send().await.unwrap();
        assert_eq!((answer.status().as_u16(), engine.generation_count()), (status, seen), "{hops}");
    }
    let told: Vec<String> =
        engine.generations().iter().map(|seen| seen.header("x-smg-hops").unwrap().to_owned()).collect();
    assert!(told[0].starts_with("a, b, c, ") && told[0].ends_with(&told[1]), "{told:?}");
}

#[tokio::test]
async fn a_client_that_closes_its_sending_half_has_left() {
    let engine = sglang(Role::Regular).await;
    let smg = Smg::launch(&[]).await;
    smg.register(&spec(&engine, "regular")).await;
    engine.set_fault(Fault::generation().hang());
    let mut client = connect(&smg).await;
    let body = chat().to_string();
    let head = "POST /v1/chat/completions HTTP/1.1\r\nhost: g\r\ncontent-type: application/json\r\ncontent-length:";
    client.write_all(format!("{head} {}\r\n\r\n{body}", body.len()).as_bytes()).await.unwrap();
    eventually("the engine has the request", || async { (engine.generation_count() == 1).then_some(()) }).await;
    client.shutdown().await.unwrap();
    assert_eq!(until_closed(&mut client).await, "", "no answer");
    eventually("the engine is told", || async { engine.generations()[0].peer_closed_at.map(drop) }).await;
    smg.until_idle().await;
}

/// What the HTTP library refuses by itself is below the API, without its envelope.
#[tokio::test]
async fn a_length_that_no_body_can_have_is_refused_with_the_head() {
    let smg = Smg::launch(&[]).await;
    for (length, status, code) in
        [(u64::MAX, "431", None), (u64::MAX - 1, "431", None), (u64::MAX - 2, "413", Some("request_body_too_large"))]
    {
        let mut client = connect(&smg).await;
        let head = "POST /v1/chat/completions HTTP/1.1\r\nhost: g\r\nconnection: close\r\ncontent-length:";
        client.write_all(format!("{head} {length}\r\n\r\n").as_bytes()).await.unwrap();
        let said = until_closed(&mut client).await;
        assert_eq!(&said[9..12], status, "{said}");
        assert!(code.map_or_else(|| said.ends_with("\r\n\r\n"), |code| said.contains(code)), "{said}");
    }
}

/// `--cors-allowed-origins`: off, exact origins, any.
#[tokio::test]
async fn pages_of_named_origins_may_call_and_others_may_not() {
    let preflight = async |smg: &Smg, origin: &str| {
        let request = smg.client.request(Method::OPTIONS, format!("{}/v1/chat/completions", smg.url));
        let request = request.header("origin", origin).header("access-control-request-method", "POST");
        request.header("access-control-request-headers", "authorization, content-type").send().await.unwrap()
    };
    let origin_of = |response: &Response| {
        response.headers().get("access-control-allow-origin").map(|value| value.to_str().unwrap().to_owned())
    };
    let smg =
        Smg::launch(&["--api-key", "k", "--cors-allowed-origins", "https://app.example", "http://localhost:3000"])
            .await;
    let allowed = preflight(&smg, "https://app.example").await;
    assert_eq!(allowed.status(), StatusCode::NO_CONTENT);
    assert_eq!(origin_of(&allowed).as_deref(), Some("https://app.example"));
    assert_eq!(allowed.headers()["access-control-allow-methods"], "GET, POST, PATCH, DELETE, OPTIONS");
    assert_eq!(allowed.headers()["access-control-allow-headers"], "authorization, content-type");
    assert_eq!(allowed.headers()["access-control-max-age"], "3600");
    assert_eq!(origin_of(&preflight(&smg, "https://evil.example").await), None);
    // An error is readable too, or a page could not tell why it failed.
    let call = smg.client.post(format!("{}/v1/chat/completions", smg.url)).header("origin", "https://app.example");
    let call = call.json(&chat()).send().await.unwrap();
    assert_eq!((call.status(), origin_of(&call).as_deref()), (StatusCode::UNAUTHORIZED, Some("https://app.example")));
    assert_eq!(call.headers()["vary"], "origin");
    let any = Smg::launch(&["--cors-allowed-origins", "*"]).await;
    assert_eq!(origin_of(&preflight(&any, "https://other.example").await).as_deref(), Some("*"));
    let off = Smg::launch(&[]).await;
    let answer = preflight(&off, "https://app.example").await;
    assert_eq!((answer.status(), origin_of(&answer)), (StatusCode::METHOD_NOT_ALLOWED, None));
}

/// 404 is said only with the control plane's word for it.
#[tokio::test]
async fn a_model_that_a_gateway_does_not_know_is_unknown_only_if_the_control_plane_says_so() {
    let (directory, port) = (tempfile::tempdir().unwrap(), free_port());
    let mut plane = Smg::controlplane(directory.path(), port, &[]).await;
    let address = format!("127.0.0.1:{port}");
    let (one, other) = (Smg::gateway(&address, &[]).await, Smg::gateway(&address, &[]).await);
    let engine = sglang(Role::Regular).await;
    one.register(&spec(&engine, "regular")).await;
    // The other gateway may not have heard of it yet: it asks, and serves.
    let mut last = StatusCode::OK;
    for _ in 0..2 {
        last = other.post("/v1/chat/completions", &chat()).await.status();
        assert_ne!(last, StatusCode::NOT_FOUND);
    }
    assert_eq!(last, StatusCode::OK);
    let mut unknown = chat();
    unknown["model"] = json!("nobody-serves-this");
    let missing = other.post("/v1/chat/completions", &unknown).await;
    assert_eq!(missing.status(), StatusCode::NOT_FOUND);
    assert_eq!(other.get("/v1/models/nobody-serves-this").await.status(), StatusCode::NOT_FOUND);
    plane.kill();
    let cut_off = other.post("/v1/chat/completions", &unknown).await;
    let (status, code, retry_after) = refused(cut_off).await;
    assert_eq!((status, code.as_str(), retry_after.as_str()), (503, "model_not_known_yet", "1"));
    assert_eq!(other.get("/v1/models/nobody-serves-this").await.status(), StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(
        other.post("/v1/chat/completions", &chat()).await.status(),
        StatusCode::OK,
        "known models are served on"
    );
    let listed: Value = other.get_json("/v1/models").await;
    assert_eq!(listed["data"][0]["id"], MODEL);
}

#[tokio::test]
async fn who_does_not_read_keeps_nothing_beyond_the_time_of_the_request() {
    let flags = ["--request-timeout-secs", "4", "--max-concurrent-requests", "2", "--queue-size", "0"];
    let (smg, prefill, decode) = sglang_pair(&flags).await;
    prefill.set_fault(instant_prefill());
    let piece = Bytes::from(format!("data: {}\n\n", "x".repeat(64 * 1024)));
    decode.set_fault(Fault::generation().script((0..1024).map(|_| (Duration::ZERO, piece.clone()))));
    let http1 = reqwest::Client::builder().http1_only().no_proxy().build().unwrap();
    let http2 = reqwest::Client::builder().http2_prior_knowledge().no_proxy().build().unwrap();
    let mut unread = Vec::new();
    for client in [&http1, &http2] {
        let stream = client.post(format!("{}/v1/chat/completions", smg.url)).json(&chat_stream()).send().await.unwrap();
        assert_eq!(stream.status(), StatusCode::OK);
        unread.push(stream);
    }
    let (status, ..) = refused(smg.post("/v1/chat/completions", &chat()).await).await;
    assert_eq!(status, 429);
    eventually("what they held is free again", || async {
        let held = smg.metric("smg_admission_inflight", &[]).await + smg.metric("smg_http_requests_active", &[]).await;
        (held == 0.0).then_some(())
    })
    .await;
    smg.until_idle().await;
    decode.wait_until(Duration::from_secs(20), |engine| engine.active() == 0).await.unwrap();
    let failures = smg.metric("smg_worker_cb_outcomes_total", &[("outcome", "failure")]).await;
    assert_eq!(failures, 0.0, "the engine is not to blame");
    // The other streams of the connection go on.
    assert_eq!(http2.get(format!("{}/liveness", smg.url)).send().await.unwrap().status(), StatusCode::OK);
    for stream in unread {
        // If the socket took some more in the last second, the answer could still say itself that it broke off.
        let error = b"data: {\"error\"";
        let says_so = stream.bytes().await.map(|body| body.windows(error.len()).any(|part| part == error));
        assert!(says_so.unwrap_or(true), "a cut answer does not look whole");
    }
}

#[tokio::test]
async fn what_clients_call_models_is_neither_kept_nor_said_back_at_any_length() {
    let smg = Smg::launch(&[]).await;
    let engine = sglang(Role::Regular).await;
    smg.register(&spec(&engine, "regular")).await;
    let name = "m".repeat(2 * 1024 * 1024);
    let ask = async || {
        let answer = smg.post("/v1/chat/completions", &json!({"model": name, "messages": []})).await;
        assert_eq!(answer.status(), StatusCode::NOT_FOUND);
        assert!(answer.bytes().await.unwrap().len() < 8 * 1024);
    };
    for _ in 0..4 {
        ask().await;
    }
    let before = smg.resident_bytes();
    for _ in 0..40 {
        ask().await;
    }
    let grown = smg.resident_bytes().saturating_sub(before);
    assert!(grown < 32 * 1024 * 1024, "{grown} bytes are kept of 80 MiB of names");
}
