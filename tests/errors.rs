//! Whatever is wrong with a request or a registration is said with a status, a code and words, and harms nothing else.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod support;

use std::time::{Duration, Instant};

use bytes::Bytes;
use futures::stream;
use reqwest::{Method, Response, StatusCode};
use serde_json::{Value, json};
use support::*;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};

const INFERENCE: [&str; 3] = ["/v1/chat/completions", "/v1/completions", "/generate"];

/// Checks an error in the documented envelope and returns its message.
async fn refused(response: Response, status: u16, code: &str) -> String {
    let headers = response.headers().clone();
    let found = response.status().as_u16();
    let text = response.text().await.unwrap();
    assert_eq!(found, status, "{text}");
    assert_eq!(headers["x-smg-error-code"], code, "{text}");
    assert!(headers["content-type"].to_str().unwrap().starts_with("application/json"), "{headers:?}");
    assert!(headers.get("x-request-id").is_some_and(|id| !id.is_empty()), "{headers:?}");
    let body: Value = serde_json::from_str(&text).unwrap();
    let kind = match status {
        403 => "permission_error",
        429 => "rate_limit_error",
        500.. => "server_error",
        _ => "invalid_request_error",
    };
    let message = body["error"]["message"].as_str().unwrap().to_owned();
    assert_eq!(body, json!({"error": {"type": kind, "code": code, "message": message, "param": null}}));
    assert!(!message.is_empty());
    message
}

/// Checks an error of the admin plane and returns its message.
async fn admin_refused(response: Response, status: u16, code: &str) -> String {
    let (found, content_type) = (response.status().as_u16(), response.headers()["content-type"].clone());
    assert!(response.headers().contains_key("x-request-id"));
    let body: Value = response.json().await.unwrap();
    assert_eq!((found, &body["code"]), (status, &json!(code)), "{body}");
    assert!(content_type.to_str().unwrap().starts_with("application/json"));
    body["error"].as_str().filter(|words| !words.is_empty()).unwrap().to_owned()
}

#[tokio::test]
async fn bodies_that_routing_cannot_read_are_refused_and_reach_no_engine() {
    let (smg, prefill, decode) = sglang_pair(&[]).await;
    for path in INFERENCE {
        for body in
            ["", "{", "{\"model\":\"m\"", "{\"model\":\"m\"} x", "nonsense", "{\"a\":1,}", "{'a':1}", "\u{feff}{}"]
        {
            refused(smg.post_bytes(path, body).await, 400, "json_parse_error").await;
        }
        refused(smg.post_bytes(path, &b"{\"model\":\"\xff\xfe\"}"[..]).await, 400, "json_parse_error").await;
        refused(smg.post_bytes(path, "[".repeat(200_000)).await, 400, "json_parse_error").await;
        for body in ["[]", "\"text\"", "1", "null", "true"] {
            let message = refused(smg.post_bytes(path, body).await, 400, "json_parse_error").await;
            assert!(message.contains("object"), "{message}");
        }
        let wrong = [
            ("model", json!(1)),
            ("model", json!(["m"])),
            ("stream", json!("true")),
            ("stream", json!(1)),
            ("n", json!("2")),
            ("n", json!(1.5)),
            ("n", json!([1])),
        ];
        for (field, value) in wrong {
            let mut body = json!({"model": MODEL, "prompt": "hi", "text": "hi", "messages": []});
            body[field] = value;
            let message = refused(smg.post(path, &body).await, 400, "invalid_type").await;
            assert!(message.contains(field), "{message}");
        }
    }
    assert_eq!((prefill.generation_count(), decode.generation_count()), (0, 0));
    // Absent and null are the same, and everything else is the engine's to judge.
    let mut body = chat();
    body["n"] = Value::Null;
    body["stream"] = Value::Null;
    assert_eq!(smg.post(INFERENCE[0], &body).await.status(), StatusCode::OK);
    smg.until_idle().await;
}

#[tokio::test]
async fn bodies_over_the_limit_are_refused_announced_or_not_and_reach_no_engine() {
    let (smg, prefill, decode) = sglang_pair(&["--max-payload-size", "4096"]).await;
    let fitting = |bytes: usize| {
        let mut body = chat();
        body["messages"][0]["content"] = json!("");
        let padding = bytes - body.to_string().len();
        body["messages"][0]["content"] = json!("x".repeat(padding));
        body.to_string()
    };
    for path in INFERENCE {
        refused(smg.post_bytes(path, fitting(4097)).await, 413, "request_body_too_large").await;
        let chunks: Vec<_> = (0..64).map(|_| Ok::<_, std::io::Error>(Bytes::from(vec![b' '; 128]))).collect();
        let chunked = reqwest::Body::wrap_stream(stream::iter(chunks));
        refused(smg.post_bytes(path, chunked).await, 413, "request_body_too_large").await;
    }
    // What is announced as too large is refused before it is sent.
    let mut socket = TcpStream::connect(("127.0.0.1", smg.port)).await.unwrap();
    let head = "POST /v1/completions HTTP/1.1\r\nhost: g\r\ncontent-type: application/json\r\ncontent-length: 99999999999\r\n\r\n";
    socket.write_all(head.as_bytes()).await.unwrap();
    let mut answer = vec![0; 12];
    tokio::time::timeout(PATIENCE, socket.read_exact(&mut answer)).await.unwrap().unwrap();
    assert_eq!(answer, b"HTTP/1.1 413");
    assert_eq!((prefill.generation_count(), decode.generation_count()), (0, 0));
    assert_eq!(smg.post_bytes(INFERENCE[0], fitting(4096)).await.status(), StatusCode::OK);
    let mut spec = spec(&decode, "decode");
    spec["labels"] = json!({"a": "x".repeat(4096)});
    admin_refused(smg.post("/workers", &spec).await, 413, "PAYLOAD_TOO_LARGE").await;
    smg.until_idle().await;
}

#[tokio::test]
async fn an_oversized_upload_costs_no_more_memory_than_the_limit_allows() {
    const LIMIT: usize = 32 * 1024 * 1024;
    let (smg, prefill, decode) = sglang_pair(&["--max-payload-size", &LIMIT.to_string()]).await;
    refused(smg.post_bytes(INFERENCE[0], "x".repeat(LIMIT + 1)).await, 413, "request_body_too_large").await;
    let before = smg.resident_bytes();
    let (mut sent, mut peak) = (0, before);
    let mut socket = TcpStream::connect(("127.0.0.1", smg.port)).await.unwrap();
    let head = "POST /v1/completions HTTP/1.1\r\nhost: g\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n";
    socket.write_all(head.as_bytes()).await.unwrap();
    let chunk = format!("10000\r\n{}\r\n", "x".repeat(65536));
    // Until the gateway has had enough, or it has taken four times the limit.
    while sent < 4 * LIMIT && socket.write_all(chunk.as_bytes()).await.is_ok() {
        sent += 65536;
        peak = peak.max(smg.resident_bytes());
    }
    let grown = peak - before;
    assert!(grown < 2 * LIMIT as u64, "{grown} bytes more for an upload of {sent} bytes");
    assert_eq!((prefill.generation_count(), decode.generation_count()), (0, 0));
    smg.until_idle().await;
}

#[tokio::test]
async fn an_upload_that_stands_still_is_given_up() {
    let (smg, prefill, decode) = sglang_pair(&["--stream-body-stall-timeout-secs", "1"]).await;
    let stalled = stream::once(async { Ok::<_, std::io::Error>(Bytes::from_static(b"{\"model\":")) });
    let body = reqwest::Body::wrap_stream(futures::StreamExt::chain(stalled, stream::pending()));
    let started = Instant::now();
    refused(smg.post_bytes(INFERENCE[0], body).await, 408, "request_body_stalled").await;
    assert!(started.elapsed() >= Duration::from_millis(900), "{:?}", started.elapsed());
    assert_eq!((prefill.generation_count(), decode.generation_count()), (0, 0));
    smg.until_idle().await;
}

/// Sends these bytes and, of a `cut` upload, the end of the connection's other half; returns status, error code and body of the answer.
async fn raw_answer(smg: &Smg, request: &str, cut: bool) -> (u16, Option<String>, Value) {
    let mut socket = TcpStream::connect(("127.0.0.1", smg.port)).await.unwrap();
    socket.write_all(request.as_bytes()).await.unwrap();
    if cut {
        socket.shutdown().await.unwrap();
    }
    let mut answer = String::new();
    tokio::time::timeout(PATIENCE, socket.read_to_string(&mut answer)).await.unwrap().unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap_or_else(|| panic!("no answer: {answer:?}"));
    let code = head.lines().find_map(|line| line.strip_prefix("x-smg-error-code: ")).map(str::to_owned);
    (head[9..12].parse().unwrap(), code, serde_json::from_str(body).unwrap())
}

#[tokio::test]
async fn an_upload_that_breaks_off_is_answered_and_reaches_no_engine() {
    let (smg, prefill, decode) = sglang_pair(&[]).await;
    let head = "host: g\r\ncontent-type: application/json\r\nconnection: close";
    for path in INFERENCE {
        for (request, cut) in [
            (format!("POST {path} HTTP/1.1\r\n{head}\r\ncontent-length: 100\r\n\r\n{{\"model\":"), true),
            (
                format!("POST {path} HTTP/1.1\r\n{head}\r\ntransfer-encoding: chunked\r\n\r\n9\r\n{{\"model\":\r\n"),
                true,
            ),
            (format!("POST {path} HTTP/1.1\r\n{head}\r\ntransfer-encoding: chunked\r\n\r\nno length\r\n"), false),
        ] {
            let (status, code, body) = raw_answer(&smg, &request, cut).await;
            assert_eq!((status, code.as_deref()), (400, Some("request_body_broken")), "{request}");
            let message = body["error"]["message"].as_str().unwrap();
            assert!(message.contains("could not be read"), "{message}");
            let error = json!({"type": "invalid_request_error", "code": code, "message": message, "param": null});
            assert_eq!(body, json!({"error": error}));
        }
    }
    let counted = [("status_code", "400"), ("error_code", "request_body_broken")];
    assert_eq!(smg.metric("smg_http_responses_total", &counted).await, 9.0);
    assert_eq!((prefill.generation_count(), decode.generation_count()), (0, 0));
    smg.until_idle().await;
}

#[tokio::test]
async fn a_prefill_response_that_breaks_off_or_never_ends_is_the_prefills_failure() {
    let flags = ["--disable-retries", "--cb-failure-threshold", "100", "--request-timeout-secs", "2"];
    let serving = Serving::start(Dispatch::Sequential, &flags).await;
    let prefill = serving.prefill.as_ref().unwrap();
    let late = Fault::generation().delay_body(Duration::from_millis(100));
    let mut failed = 0.0;
    for (fault, status) in [
        (late.clone().close_after_bytes(10), 502),
        (late.reset_after_bytes(10), 502),
        (Fault::generation().stall_after_events(0), 504),
    ] {
        prefill.clear_faults();
        prefill.set_fault(fault);
        for body in [chat(), chat_stream()] {
            let message = refused(serving.smg.post(INFERENCE[0], &body).await, status, "prefill_read_failed").await;
            assert!(message.starts_with("prefill_read_failed: "), "{message}");
            failed += 1.0;
            assert_eq!(serving.failures(prefill).await, failed);
        }
    }
    assert_eq!((serving.output.generation_count(), serving.failures(&serving.output).await), (0, 0.0));
    serving.smg.until_idle().await;
}

#[tokio::test]
async fn more_samples_than_rooms_are_minted_for_are_refused_and_reach_no_engine() {
    let serving = Serving::scripted(Dispatch::Parallel, &[]).await;
    serving.output.set_fault(Fault::generation().status(200, "{}"));
    for samples in [4097, u64::MAX] {
        for mut body in [chat(), chat_stream()] {
            body["n"] = json!(samples);
            let message = refused(serving.smg.post(INFERENCE[0], &body).await, 400, "too_many_samples").await;
            assert!(message.contains(&samples.to_string()) && message.contains("4096"), "{message}");
        }
    }
    assert!(serving.engines().all(|engine| engine.generation_count() == 0));
    let mut most = chat();
    most["n"] = json!(4096);
    assert_eq!(serving.smg.post(INFERENCE[0], &most).await.status(), StatusCode::OK);
    let rooms = serving.output.generations()[0].json()["bootstrap_room"].as_array().unwrap().len();
    assert_eq!(rooms, 4096);
    for engine in serving.engines() {
        assert_eq!(serving.failures(engine).await, 0.0);
    }
    serving.smg.until_idle().await;
}

#[tokio::test]
async fn unknown_routes_and_methods_are_named() {
    let (smg, prefill, decode) = sglang_pair(&[]).await;
    for path in ["/", "/v1", "/v1/chat/completions/", "/v1/chat", "/v2/completions", "/workers/a/b", "/nothing?x=1"] {
        for method in [Method::GET, Method::POST, Method::DELETE] {
            let response = smg.client.request(method, format!("{}{path}", smg.url)).body("{}").send().await.unwrap();
            let message = refused(response, 404, "unknown_url").await;
            assert!(message.contains(path.split('?').next().unwrap()), "{message}");
        }
    }
    for (path, method, allowed) in [
        ("/v1/chat/completions", Method::GET, "POST"),
        ("/v1/completions", Method::PUT, "POST"),
        ("/generate", Method::DELETE, "POST"),
        ("/v1/models", Method::POST, "GET"),
        ("/readiness", Method::POST, "GET"),
        ("/fleet/decisions", Method::PATCH, "GET"),
    ] {
        let response = smg.client.request(method.clone(), format!("{}{path}", smg.url)).send().await.unwrap();
        let allow = response.headers()["allow"].to_str().unwrap().to_owned();
        assert!(allow.split(',').any(|name| name.trim() == allowed), "{path}: {allow}");
        let message = refused(response, 405, "method_not_allowed").await;
        assert!(message.contains(method.as_str()), "{message}");
    }
    let head = smg.client.head(format!("{}/generate", smg.url)).send().await.unwrap();
    assert_eq!(
        (head.status(), &head.headers()["x-smg-error-code"]),
        (StatusCode::METHOD_NOT_ALLOWED, &"method_not_allowed".parse().unwrap())
    );
    let removed = smg.client.delete(format!("{}/workers", smg.url)).send().await.unwrap();
    assert!(removed.headers().contains_key("allow"));
    admin_refused(removed, 405, "METHOD_NOT_ALLOWED").await;
    assert_eq!((prefill.generation_count(), decode.generation_count()), (0, 0));
}

#[tokio::test]
async fn a_fleet_that_cannot_serve_a_request_says_what_is_missing() {
    let smg = Smg::launch(&[]).await;
    let response = smg.post(INFERENCE[0], &chat()).await;
    assert_eq!(response.headers()["retry-after"], "1");
    let message = refused(response, 503, "no_available_workers").await;
    assert!(message.contains("No prefill workers available"), "{message}");
    refused(smg.get("/v1/models").await, 503, "no_models_available").await;
    let readiness = smg.get("/readiness").await;
    assert_eq!(readiness.status(), StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(readiness.json::<Value>().await.unwrap()["reason"], "insufficient healthy workers");

    // Half a pair: the message names the leg that is not there.
    let (prefill, decode) = (sglang(Role::Prefill).await, sglang(Role::Decode).await);
    let id = smg.register(&spec(&prefill, "prefill")).await;
    for path in INFERENCE {
        let response = smg.post(path, &json!({"model": MODEL, "messages": [], "prompt": "hi", "text": "hi"})).await;
        assert_eq!(response.headers()["retry-after"], "1");
        let message = refused(response, 503, "no_available_workers").await;
        assert!(message.contains("No decode workers available"), "{message}");
    }
    assert_eq!(smg.get("/readiness").await.status(), StatusCode::SERVICE_UNAVAILABLE);
    let removed = smg.client.delete(format!("{}/workers/{id}", smg.url)).send().await.unwrap();
    assert_eq!(removed.status(), StatusCode::ACCEPTED);
    smg.register(&spec(&decode, "decode")).await;
    eventually("only the decode is left", || async {
        let response = smg.post(INFERENCE[0], &chat()).await;
        let message = refused(response, 503, "no_available_workers").await;
        message.contains("No prefill workers available").then_some(())
    })
    .await;
    assert_eq!((prefill.generation_count(), decode.generation_count()), (0, 0));
}

#[tokio::test]
async fn an_unknown_model_is_not_found_and_one_of_several_must_be_named() {
    let (smg, prefill, decode) = sglang_pair(&[]).await;
    for path in INFERENCE {
        let body = json!({"model": "nobody's", "messages": [], "prompt": "hi", "text": "hi"});
        let message = refused(smg.post(path, &body).await, 404, "model_not_found").await;
        assert!(message.contains("nobody's"), "{message}");
    }
    assert_eq!((prefill.generation_count(), decode.generation_count()), (0, 0));
    // The only model needs no name.
    let mut nameless = chat();
    nameless.as_object_mut().unwrap().remove("model");
    assert_eq!(smg.post(INFERENCE[0], &nameless).await.status(), StatusCode::OK);
    let other = MockEngine::builder().engine(Engine::Sglang).role(Role::Regular).model("other").start().await.unwrap();
    smg.register(&spec(&other, "regular")).await;
    let message = refused(smg.post(INFERENCE[0], &nameless).await, 400, "missing_required_parameter").await;
    assert!(message.contains("model"), "{message}");
    assert_eq!(smg.post(INFERENCE[0], &chat()).await.status(), StatusCode::OK);
    smg.until_idle().await;
}

#[tokio::test]
async fn hints_that_mean_nothing_are_ignored() {
    let (smg, _prefill, decode) = sglang_pair(&[]).await;
    let requests = [
        ("x-smg-target-worker", "99"),
        ("x-smg-target-worker", "not a number"),
        ("x-smg-routing-key", "\u{e9}"),
        ("x-smg-routing-tokens", "1,x,3"),
        ("x-smg-priority", "extreme"),
        ("x-request-id", "has a space"),
        ("traceparent", "00-zz"),
    ];
    for (name, value) in requests {
        let request = smg.client.post(format!("{}{}", smg.url, INFERENCE[0])).header(name, value).json(&chat());
        let response = request.send().await.unwrap();
        assert_eq!(response.status(), StatusCode::OK, "{name}: {value}");
    }
    let long = "k".repeat(5000);
    let request = smg.client.post(format!("{}{}", smg.url, INFERENCE[0])).header("x-smg-routing-key", &long);
    assert_eq!(request.json(&chat()).send().await.unwrap().status(), StatusCode::OK);
    assert_eq!(decode.generation_count(), 8);
}

#[tokio::test]
async fn paths_and_queries_that_do_not_decode_are_refused_in_the_words_of_their_api() {
    let smg = Smg::launch(&[]).await;
    refused(smg.get("/fleet/decisions?limit=-1").await, 400, "invalid_value").await;
    refused(smg.get("/v1/models/%ff").await, 400, "invalid_value").await;
    admin_refused(smg.get("/fleet/policies/%ff").await, 400, "BAD_REQUEST").await;
    admin_refused(smg.get("/workers/%ff").await, 400, "BAD_REQUEST").await;
    // A model's name may contain slashes.
    smg.set_policy("org/model", &json!({"policy": "random"})).await;
    for path in ["/fleet/policies/org/model", "/fleet/policies/org%2Fmodel"] {
        assert_eq!(smg.get_json(path).await["document"]["policy"], "random", "{path}");
    }
}

#[tokio::test]
async fn limits_beyond_what_clocks_can_count_are_no_limits() {
    let flags = ["request-timeout", "sse-keepalive", "header-read-timeout", "stream-body-stall-timeout"];
    let flags: Vec<String> = flags.map(|flag| format!("--{flag}-secs={}", u64::MAX)).to_vec();
    let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
    let (smg, _prefill, _decode) = sglang_pair(&flags).await;
    for body in [chat(), streamed(chat())] {
        let response = smg.post("/v1/chat/completions", &body).await;
        assert_eq!(response.status(), StatusCode::OK);
        assert!(!response.text().await.unwrap().is_empty());
    }
}

#[tokio::test]
async fn malformed_registrations_are_refused_and_leave_nothing() {
    let smg = Smg::launch(&[]).await;
    let post = async |body: &str| smg.post_bytes("/workers", body.to_owned()).await;
    for body in ["", "{", "[]", "1", "{}", "{\"url\":7}", "{\"url\":\"http://127.0.0.1:9\",\"worker_type\":\"other\"}"]
    {
        admin_refused(post(body).await, 400, "BAD_REQUEST").await;
    }
    for (spec, word) in [
        (json!({"url": "ftp://127.0.0.1:9"}), "url"),
        (json!({"url": "http://127.0.0.1:9", "bootstrap_port": 0}), "bootstrap_port"),
        (json!({"url": "http://127.0.0.1:9", "bootstrap_port": 70000}), "u16"),
        (json!({"url": "http://127.0.0.1:9", "cost": 0}), "cost"),
        (json!({"url": "http://127.0.0.1:9", "labels": {"dp_size": "none"}}), "dp_size"),
    ] {
        let message = admin_refused(smg.post("/workers", &spec).await, 400, "BAD_REQUEST").await;
        assert!(message.to_lowercase().contains(word), "{spec}: {message}");
    }
    let plain = smg.client.post(format!("{}/workers", smg.url)).body("{\"url\":\"http://127.0.0.1:9\"}").send().await;
    admin_refused(plain.unwrap(), 400, "BAD_REQUEST").await;
    let provider = json!({"url": "http://127.0.0.1:9", "provider": "openai"});
    admin_refused(smg.post("/workers", &provider).await, 400, "PROVIDER_NOT_COMPILED").await;
    admin_refused(smg.get("/workers/not-an-id").await, 400, "BAD_REQUEST").await;
    admin_refused(smg.get("/workers/00000000-0000-7000-8000-000000000000").await, 404, "WORKER_NOT_FOUND").await;
    let unknown = smg.client.put(format!("{}/fleet/policies/default", smg.url)).json(&json!({"polizy": "random"}));
    admin_refused(unknown.send().await.unwrap(), 400, "BAD_REQUEST").await;
    assert_eq!(smg.get_json("/workers").await["total"], 0);

    let engine = sglang(Role::Decode).await;
    let id = smg.register(&spec(&engine, "decode")).await;
    admin_refused(smg.post("/workers", &spec(&engine, "decode")).await, 409, "WORKER_ALREADY_EXISTS").await;
    let moved = json!({"url": "http://127.0.0.1:9", "worker_type": "decode"});
    let put = smg.client.put(format!("{}/workers/{id}", smg.url)).json(&moved).send().await.unwrap();
    admin_refused(put, 400, "BAD_REQUEST").await;
}

/// Waits until a registration was given up, and returns the reason.
async fn failed_job(smg: &Smg, spec: &Value) -> String {
    let response = smg.post("/workers", spec).await;
    assert_eq!(response.status(), StatusCode::ACCEPTED);
    let location = response.headers()["location"].to_str().unwrap().to_owned();
    let shown = eventually(&format!("the registration of {spec} fails"), || async {
        let shown = smg.get_json(&location).await;
        assert_ne!(shown["is_healthy"], true, "{shown}");
        (shown["job_status"]["status"] == "failed").then_some(shown)
    })
    .await;
    assert_eq!(shown["status"], "failed", "{shown}");
    assert_eq!(shown["job_status"]["job_type"], "AddWorker");
    assert_eq!(shown["job_status"]["worker_url"], spec["url"]);
    shown["job_status"]["message"].as_str().filter(|words| !words.is_empty()).unwrap().to_owned()
}

#[tokio::test]
async fn workers_that_cannot_be_reached_or_never_become_healthy_fail_readably() {
    let smg = Smg::launch(&["--worker-startup-timeout-secs", "1", "--health-check-timeout-secs", "1"]).await;
    let (sick, moved, silent) = (sglang(Role::Decode).await, sglang(Role::Decode).await, sglang(Role::Decode).await);
    sick.set_fault(Fault::health().status(500, "{}"));
    moved.set_fault(Fault::health().status(302, "{}").header("location", &format!("{}/health", smg.url)));
    silent.set_fault(Fault::all().hang());
    let refused_url = format!("http://127.0.0.1:{}", free_port());
    let cases = [
        (refused_url, "refused"),
        ("http://no-such-host.invalid:1".to_owned(), "no-such-host.invalid"),
        (sick.url(), "500"),
        (moved.url(), "302"),
        (silent.url(), "no answer within"),
    ];
    let waiting = cases.iter().map(|(url, word)| {
        let smg = &smg;
        async move {
            let message = failed_job(smg, &json!({"url": url, "worker_type": "decode"})).await;
            assert!(message.contains(word) || *word == "no-such-host.invalid", "{url}: {message}");
        }
    });
    futures::future::join_all(waiting).await;
    assert_eq!(smg.get_json("/workers").await["total"], 5, "a failure stays readable");
    let ipc = smg.post("/workers", &json!({"url": "ipc:///tmp/engine", "worker_type": "prefill"})).await;
    if ipc.status() == StatusCode::ACCEPTED {
        let location = ipc.headers()["location"].to_str().unwrap().to_owned();
        eventually("the ipc registration fails", || async {
            (smg.get_json(&location).await["job_status"]["status"] == "failed").then_some(())
        })
        .await;
    } else {
        admin_refused(ipc, 400, "BAD_REQUEST").await;
    }
}

/// An engine that is healthy and answers everything else with an endless body.
async fn endless_engine() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    tokio::spawn(async move {
        while let Ok((mut socket, _)) = listener.accept().await {
            tokio::spawn(async move {
                let mut head = vec![0; 4096];
                let read = socket.read(&mut head).await.unwrap_or(0);
                if head[..read].starts_with(b"GET /health") {
                    let _ =
                        socket.write_all(b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 0\r\n\r\n").await;
                    return;
                }
                let begin = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n\r\n{\"data\":[";
                let mut alive = socket.write_all(begin).await.is_ok();
                while alive {
                    alive = socket.write_all(&[b' '; 65536]).await.is_ok();
                }
            });
        }
    });
    url
}

#[tokio::test]
async fn workers_that_lie_at_registration_do_no_harm() {
    let (smg, _prefill, _decode) = sglang_pair(&["--worker-startup-timeout-secs", "3"]).await;
    let garbage = vllm(Role::Regular, Connector::None).await;
    garbage.set_fault(Fault::path("/v1/models").status(200, "<html>not JSON</html>"));
    garbage.set_fault(Fault::path("/version").status(200, "[[["));
    let wrong = vllm(Role::Regular, Connector::None).await;
    wrong.set_fault(Fault::path("/v1/models").status(200, r#"{"data":[{"id":7,"owned_by":{}}]}"#));
    let raw = vllm(Role::Regular, Connector::None).await;
    raw.set_fault(Fault::path("/v1/models").raw([(Duration::ZERO, "garbage\r\n\r\n")]));
    let endless = endless_engine().await;
    let cases = [garbage.url(), wrong.url(), raw.url(), endless];
    let mut locations = Vec::new();
    for url in &cases {
        let response =
            smg.post("/workers", &json!({"url": url, "worker_type": "regular", "models": [{"id": "liar"}]})).await;
        assert_eq!(response.status(), StatusCode::ACCEPTED);
        locations.push(response.headers()["location"].to_str().unwrap().to_owned());
    }
    // Each registration ends, one way or the other, with readable facts; whoever was served before is served on.
    for location in &locations {
        let shown = eventually(&format!("the job of {location} ends"), || async {
            let shown = smg.get_json(location).await;
            let ended = shown["is_healthy"] == true || shown["job_status"]["status"] == "failed";
            assert_eq!(smg.post(INFERENCE[0], &chat()).await.status(), StatusCode::OK);
            ended.then_some(shown)
        })
        .await;
        if shown["job_status"]["status"] == "failed" {
            assert!(shown["job_status"]["message"].as_str().is_some_and(|words| !words.is_empty()), "{shown}");
        } else {
            assert_eq!(shown["model_id"], "liar", "{shown}");
        }
    }
    smg.until_idle().await;
}

#[tokio::test]
async fn a_request_that_no_worker_could_ever_serve_leaves_a_record_too() {
    let (smg, _prefill, _decode) = sglang_pair(&[]).await;
    let mut body = chat();
    body["model"] = json!("nobody-serves-this");
    let request = smg.client.post(format!("{}{}", smg.url, INFERENCE[0])).header("x-request-id", "lost").json(&body);
    refused(request.send().await.unwrap(), 404, "model_not_found").await;
    let record = smg.decision("lost").await;
    assert_eq!((&record["error_code"], &record["outcome"]), (&json!("model_not_found"), &json!("failed")));
    assert_eq!(smg.metric("smg_router_request_errors_total", &[("error_type", "no_workers")]).await, 1.0);
    assert!(!smg.metrics().await.contains("nobody-serves-this"));
}
