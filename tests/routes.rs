//! Routes beside chat and completions: which legs they reach, with what, and what operators can ask engines.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod support;

use reqwest::{Response, StatusCode};
use serde_json::{Value, json};
use support::*;

const ANSWER: &str = r#"{"answer":42}"#;

/// A SGLang engine that also answers these paths.
async fn sglang_with(role: Role, paths: &[&str]) -> MockEngine {
    let mut builder = MockEngine::builder().engine(Engine::Sglang).role(role).model(MODEL);
    for path in paths {
        builder = builder.override_path(*path, 200, ANSWER);
    }
    builder.start().await.unwrap()
}

fn requests_on(engine: &MockEngine, path: &str) -> Vec<Value> {
    engine.requests().iter().filter(|seen| seen.path == path).map(|seen| seen.json()).collect()
}

#[tokio::test]
async fn messages_responses_and_rerank_reach_both_legs_verbatim_with_a_rendezvous() {
    let paths = ["/v1/messages", "/v1/responses", "/v1/rerank"];
    let (prefill, decode) = (sglang_with(Role::Prefill, &paths).await, sglang_with(Role::Decode, &paths).await);
    let smg = Smg::launch(&[]).await;
    smg.register_pair(&prefill, &decode).await;
    for path in paths {
        let body = json!({"model": MODEL, "max_tokens": 0, "x_future": [1, null], "query": "q", "documents": ["d"]});
        let answer = smg.post(path, &body).await;
        assert_eq!((answer.status(), answer.text().await.unwrap().as_str()), (StatusCode::OK, ANSWER), "{path}");
        for engine in [&prefill, &decode] {
            let mut seen = requests_on(engine, path).pop().unwrap();
            for field in ["bootstrap_host", "bootstrap_port", "bootstrap_room"] {
                assert!(seen.as_object_mut().unwrap().remove(field).is_some(), "{path}: {field}");
            }
            assert_eq!(seen, body, "{path}");
        }
    }
    assert_eq!(smg.post("/rerank", &json!({"model": MODEL, "query": "q"})).await.status(), StatusCode::OK);
    smg.until_idle().await;
}

#[tokio::test]
async fn the_prefill_leg_of_a_response_and_of_a_message_is_capped_in_its_own_field() {
    let engine = |role| async move {
        let builder = MockEngine::builder().engine(Engine::Vllm).role(role).connector(Connector::Nixl).model(MODEL);
        let builder = builder.override_path("/v1/messages", 200, ANSWER);
        builder.override_path("/v1/responses", 200, ANSWER).start().await.unwrap()
    };
    let (prefill, decode) = (engine(Role::Prefill).await, engine(Role::Decode).await);
    let smg = Smg::launch(&[]).await;
    for (engine, role) in [(&prefill, "prefill"), (&decode, "decode")] {
        smg.register(&spec_with(engine, role, json!({"kv_connector": "NixlConnector"}))).await;
    }
    let body = json!({"model": MODEL, "input": "hi", "max_output_tokens": 64, "max_tokens": 9, "stream": false});
    assert_eq!(smg.post("/v1/responses", &body).await.status(), StatusCode::OK);
    let seen = requests_on(&prefill, "/v1/responses").pop().unwrap();
    assert_eq!((&seen["max_output_tokens"], &seen["max_tokens"]), (&json!(1), &json!(9)));
    assert_eq!(requests_on(&decode, "/v1/responses").pop().unwrap(), body);
    let mut message = json!({"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 64});
    for streams in [false, true] {
        message["stream"] = json!(streams);
        assert_eq!(smg.post("/v1/messages", &message).await.status(), StatusCode::OK);
        let seen = requests_on(&prefill, "/v1/messages").pop().unwrap();
        assert_eq!((&seen["max_tokens"], &seen["stream"]), (&json!(1), &json!(false)));
        assert_eq!(seen["messages"], message["messages"]);
        assert_eq!(requests_on(&decode, "/v1/messages").pop().unwrap(), message, "the client's own limit");
    }
}

#[tokio::test]
async fn counting_tokens_takes_one_prefill_and_no_decode() {
    let path = "/v1/messages/count_tokens";
    let (prefill, decode) = (sglang_with(Role::Prefill, &[path]).await, sglang_with(Role::Decode, &[path]).await);
    let smg = Smg::launch(&[]).await;
    smg.register_pair(&prefill, &decode).await;
    let body = json!({"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "bootstrap_room": 7});
    let answer = smg.post(path, &body).await;
    assert_eq!(answer.status(), StatusCode::OK);
    assert_eq!(answer.headers()["x-smg-routed-worker-id"], prefill.url());
    let mut expected = body.clone();
    expected.as_object_mut().unwrap().remove("bootstrap_room");
    assert_eq!(requests_on(&prefill, path), [expected]);
    assert!(requests_on(&decode, path).is_empty());
    prefill.stop().await;
    let answer = smg.post(path, &body).await;
    assert_eq!(answer.headers()["x-smg-error-code"], "prefill_count_tokens_failed");
    let answer = smg.post(path, &body).await;
    assert_eq!(
        (answer.status(), &answer.headers()["x-smg-error-code"]),
        (StatusCode::SERVICE_UNAVAILABLE, &"no_prefill_servers".parse().unwrap())
    );
}

#[tokio::test]
async fn errors_on_messages_have_the_shape_of_that_api() {
    let smg = Smg::launch(&[]).await;
    for (path, body, status, kind) in [
        ("/v1/messages", "[]", 400, "invalid_request_error"),
        ("/v1/messages", r#"{"model":"m"}"#, 503, "overloaded_error"),
        ("/v1/messages/nothing", "{}", 404, "not_found_error"),
    ] {
        let answer = smg.post_bytes(path, body).await;
        assert_eq!(answer.status().as_u16(), status, "{path}");
        let request_id = answer.headers()["x-request-id"].to_str().unwrap().to_owned();
        assert!(answer.headers().contains_key("x-smg-error-code"));
        let error: Value = answer.json().await.unwrap();
        assert_eq!((&error["type"], &error["error"]["type"]), (&json!("error"), &json!(kind)), "{error}");
        assert!(error["error"]["message"].is_string() && error["request_id"] == json!(request_id));
    }
}

#[tokio::test]
async fn embeddings_and_classification_need_a_regular_worker() {
    let (smg, prefill, decode) = sglang_pair(&[]).await;
    for path in ["/v1/embeddings", "/v1/classify"] {
        let refused = smg.post(path, &json!({"model": MODEL, "input": "hi"})).await;
        assert_eq!(refused.status(), StatusCode::NOT_IMPLEMENTED, "{path}");
        assert_eq!(refused.headers()["x-smg-error-code"], "pd_route_unsupported", "{path}");
        let error: Value = refused.json().await.unwrap();
        assert!(error["error"]["message"].as_str().unwrap().contains("prefill/decode mode"), "{error}");
    }
    for engine in [&prefill, &decode] {
        assert!(engine.requests().iter().all(|request| request.method == "GET"), "{:?}", engine.requests());
    }
    assert_eq!(smg.metric("smg_worker_cb_outcomes_total", &[]).await, 0.0);
    let regular = sglang_with(Role::Regular, &["/v1/embeddings", "/v1/classify"]).await;
    smg.register(&spec(&regular, "regular")).await;
    for path in ["/v1/embeddings", "/v1/classify"] {
        let served = smg.post(path, &json!({"model": MODEL, "input": "hi"})).await;
        assert_eq!(served.text().await.unwrap(), ANSWER, "{path}");
    }
}

#[tokio::test]
async fn models_are_listed_and_looked_up_in_the_shape_of_the_clients_api() {
    let (smg, _prefill, _decode) = sglang_pair(&[]).await;
    assert_eq!(smg.get_json(&format!("/v1/models/{MODEL}")).await["object"], "model");
    let missing = smg.get("/v1/models/none").await;
    assert_eq!(
        (missing.status(), missing.headers()["x-smg-error-code"].to_str().unwrap()),
        (StatusCode::NOT_FOUND, "model_not_found")
    );
    let request = smg.client.get(format!("{}/v1/models", smg.url)).header("anthropic-version", "2023-06-01");
    let list: Value = request.send().await.unwrap().json().await.unwrap();
    assert_eq!((&list["data"][0]["type"], &list["last_id"]), (&json!("model"), &json!(MODEL)));
}

/// The gateway refused it with this status, and with this code in the header and in the body.
async fn assert_refused(response: Response, status: u16, code: &str) {
    assert_eq!((response.status().as_u16(), &response.headers()["x-smg-error-code"]), (status, &code.parse().unwrap()));
    assert_eq!(response.json::<Value>().await.unwrap()["error"]["code"], code);
}

#[tokio::test]
async fn operators_can_ask_engines_through_the_gateway() {
    let paths = ["/health_generate", "/flush_cache"];
    let (prefill, decode) = (sglang_with(Role::Prefill, &paths).await, sglang_with(Role::Decode, &paths).await);
    let smg = Smg::launch(&[]).await;
    assert_refused(smg.get("/get_server_info").await, 503, "no_prefill_servers").await;
    assert_refused(smg.get("/health_generate").await, 503, "no_healthy_worker_pair").await;
    assert_refused(smg.get("/engine_metrics").await, 500, "no_engine_metrics").await;
    smg.register_pair(&prefill, &decode).await;
    assert_eq!(smg.get("/get_server_info").await.status(), StatusCode::OK);
    assert_eq!(smg.get("/get_model_info").await.status(), StatusCode::OK);
    assert_eq!(smg.get("/health_generate").await.status(), StatusCode::OK);
    let metrics = smg.get("/engine_metrics").await.text().await.unwrap();
    for engine in [&prefill, &decode] {
        assert!(metrics.contains(&format!("worker_addr=\"{}\"", engine.url())), "{metrics}");
    }
    decode.set_fault(Fault::path("/health_generate").status(503, "{}"));
    assert_refused(smg.get("/health_generate").await, 503, "health_generate_failed").await;
    decode.clear_faults();
    let flushed = smg.client.post(format!("{}/flush_cache", smg.url)).send().await.unwrap();
    assert_eq!(flushed.status(), StatusCode::OK);
    assert_eq!(flushed.json::<Value>().await.unwrap()["workers_flushed"], 2);
    decode.set_fault(Fault::path("/flush_cache").status(500, "{}"));
    let flushed = smg.client.post(format!("{}/flush_cache", smg.url)).send().await.unwrap();
    assert_eq!(flushed.status(), StatusCode::PARTIAL_CONTENT);
    assert_eq!(flushed.json::<Value>().await.unwrap()["failed"][0]["worker"], decode.url());
}

#[tokio::test]
async fn one_engine_cannot_spoil_the_metrics_of_all() {
    let bad = "# HELP x y\nx{worker_addr=\"http://forged\"} 1\ny{ 3\nz NaN extra\n\u{e4}{a=\"b\"} 1\nfoo{a=\"1} 2\n";
    let engine = |body: &'static str| {
        MockEngine::builder().engine(Engine::Sglang).role(Role::Regular).override_path("/metrics", 200, body)
    };
    let (bad, good) = (engine(bad).start().await.unwrap(), engine("x 2\n").start().await.unwrap());
    let smg = Smg::launch(&[]).await;
    for engine in [&bad, &good] {
        smg.register(&spec(engine, "regular")).await;
    }
    let page = smg.get("/engine_metrics").await.text().await.unwrap();
    let expected = format!(
        "# HELP x y\nx{{worker_addr=\"{}\",exported_worker_addr=\"http://forged\"}} 1\nx{{worker_addr=\"{}\"}} 2\n",
        bad.url(),
        good.url()
    );
    let mut lines: (Vec<_>, Vec<_>) = (page.lines().collect(), expected.lines().collect());
    // The order of workers is that of their ids.
    lines.0.sort_unstable();
    lines.1.sort_unstable();
    assert_eq!(lines.0, lines.1);
}

#[tokio::test]
async fn however_many_ask_the_engine_is_asked_once_at_a_time() {
    const CROWD: usize = 64;
    let engine = sglang_with(Role::Regular, &["/health_generate"]).await;
    let smg = Smg::launch(&[]).await;
    smg.register(&spec(&engine, "regular")).await;
    let asked = |path| engine.requests().iter().filter(|seen| seen.path == path).count();
    let path = "/health_generate";
    engine.set_fault(Fault::path(path).hang());
    let all = futures::future::join_all((0..CROWD).map(|_| smg.get(path)));
    let crowded = eventually("all have asked", || async {
        let active = smg.metric("smg_http_requests_active", &[]).await;
        (active >= CROWD as f64 && asked(path) > 0).then_some(())
    });
    tokio::select! {
        _ = all => panic!("the engine does not answer"),
        () = crowded => {}
    }
    assert_eq!(asked(path), 1);
    engine.clear_faults();
    // They have left, and with them the question.
    smg.until_idle().await;
    assert_eq!(smg.get(path).await.status(), StatusCode::OK);
    assert_eq!(asked(path), 2);
}

#[tokio::test]
async fn an_engines_own_error_carries_the_code_of_its_leg_and_status() {
    let code = async |smg: &Smg, status: u16| {
        let answer = smg.post("/v1/chat/completions", &chat()).await;
        assert_eq!(answer.status().as_u16(), status);
        answer.headers()["x-smg-error-code"].to_str().unwrap().to_owned()
    };
    let pair = Serving::start(Dispatch::Parallel, &["--disable-retries"]).await;
    for (status, prefill, decode) in [
        (400, "prefill_bad_request", "decode_bad_request"),
        (404, "prefill_not_found", "decode_not_found"),
        (418, "prefill_error", "decode_error"),
        (500, "prefill_internal_error", "decode_internal_error"),
        (502, "prefill_bad_gateway", "decode_bad_gateway"),
        (503, "prefill_unavailable", "decode_unavailable"),
    ] {
        for (engine, expected) in [(pair.prefill.as_ref().unwrap(), prefill), (&pair.output, decode)] {
            engine.set_fault(Fault::generation().status(status, "{}").times(1));
            assert_eq!(code(&pair.smg, status).await, expected);
        }
    }
    let alone = Serving::start(Dispatch::Regular, &["--disable-retries"]).await;
    alone.output.set_fault(Fault::generation().status(500, "{}").times(1));
    assert_eq!(code(&alone.smg, 500).await, "worker_upstream_error");
    alone.output.stop().await;
    assert_eq!(code(&alone.smg, 502).await, "worker_request_failed");
}

#[tokio::test]
async fn messages_and_responses_of_a_pair_are_those_of_one_engine_whole_and_streamed() {
    let messages = json!({"model": MODEL, "max_tokens": 5, "messages": [{"role": "user", "content": "hi there"}]});
    let input = json!({"model": MODEL, "max_output_tokens": 5, "input": "hi there"});
    for dispatch in [Dispatch::Parallel, Dispatch::Sequential] {
        let pair = Serving::start(dispatch, &[]).await;
        let single = match dispatch {
            Dispatch::Sequential => vllm(Role::Regular, Connector::None).await,
            _ => sglang(Role::Regular).await,
        };
        for (path, body) in [("/v1/messages", &messages), ("/v1/responses", &input)] {
            for body in [body.clone(), streamed(body.clone())] {
                let ask = |url: &str| {
                    let request = pair.smg.client.post(format!("{url}{path}")).header("x-request-id", "same");
                    request.json(&body).send()
                };
                let (served, alone) = (ask(&pair.smg.url).await.unwrap(), ask(&single.url()).await.unwrap());
                assert_eq!((served.status(), alone.status()), (StatusCode::OK, StatusCode::OK), "{path}");
                let (served, alone) = (served.text().await.unwrap(), alone.text().await.unwrap());
                assert!(alone.len() > 100, "{alone}");
                assert_eq!(served, alone, "{dispatch:?} {path}");
            }
        }
        pair.smg.until_idle().await;
    }
}
