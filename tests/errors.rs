//! Whatever is wrong with a request or a registration is said with a status, a code and words, and harms nothing else.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod support;

use std::time::Duration;

use reqwest::{Method, StatusCode};
use serde_json::{Value, json};
use support::refusals::*;
use support::*;

const INFERENCE: [&str; 3] = ["/v1/chat/completions", "/v1/completions", "/generate"];

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
