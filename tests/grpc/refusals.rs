//! What reaches no engine: windows, prompts that are too long, requests that cannot be served, pairs that cannot meet.

use super::*;

#[tokio::test]
async fn a_decode_window_lets_in_what_the_engine_runs_and_sheds_the_rest() {
    let decode = builder(Engine::Sglang, Role::Decode)
        .max_running(1)
        .token_delay(Duration::from_millis(50))
        .start()
        .await
        .unwrap();
    let smg = Smg::launch(&["--pd-admission-wait-secs", "0"]).await;
    let pair = Pair::behind(smg, grpc(Engine::Sglang, Role::Prefill).await, decode).await;
    let mut body = chat_stream();
    body["max_tokens"] = json!(1000);
    let mut held = pair.smg.post(CHAT, &body).await.bytes_stream();
    held.next().await.unwrap().unwrap();
    let shed = pair.smg.post(CHAT, &chat()).await;
    assert_eq!(shed.status(), StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(shed.headers()["x-smg-error-code"], "worker_overload_protection_shed");
    assert!(shed.headers()["retry-after"].to_str().unwrap().parse::<u32>().unwrap() >= 1);
    assert_eq!(pair.prefill.calls().len(), 1, "no leg was sent");
    assert_eq!(pair.smg.metric("smg_pd_admission_sheds_total", &[]).await, 1.0);
    let url = pair.decode.url();
    assert_eq!(pair.smg.metric("smg_pd_admission_window", &[("worker", &url)]).await, 1.0);
    drop(held);
    pair.is_clean().await;
    assert_eq!(pair.smg.post(CHAT, &chat()).await.status(), StatusCode::OK);
}

#[tokio::test]
async fn requests_beyond_a_decode_window_wait_for_a_place_and_are_all_served() {
    let decode = builder(Engine::Sglang, Role::Decode).max_running(1).token_delay(Duration::from_millis(20));
    let decode = decode.start().await.unwrap();
    let pair = Pair::behind(Smg::launch(&[]).await, grpc(Engine::Sglang, Role::Prefill).await, decode).await;
    let body = chat();
    let asked = (0..5).map(|_| pair.smg.post(CHAT, &body));
    for response in futures::future::join_all(asked).await {
        assert_eq!(response.status(), StatusCode::OK);
    }
    assert_eq!(pair.decode.peak_active(), 1, "the engine was never given more than it runs");
    let waits = pair.smg.metric("smg_pd_admission_waits_total", &[]).await;
    assert!((1.0..=4.0).contains(&waits), "{waits}");
    assert_eq!(pair.smg.metric("smg_pd_admission_sheds_total", &[]).await, 0.0);
    assert_eq!(pair.smg.metric("smg_worker_http2", &[("worker", &pair.decode.url())]).await, 1.0);
    pair.is_clean().await;
}

#[tokio::test]
async fn a_prompt_longer_than_the_smaller_window_reaches_no_engine() {
    let decode = builder(Engine::Sglang, Role::Decode).max_model_len(50).start().await.unwrap();
    let prefill = builder(Engine::Sglang, Role::Prefill).max_model_len(100).start().await.unwrap();
    let pair = Pair::behind(Smg::launch(&[]).await, prefill, decode).await;
    let ids: Vec<u32> = vec![5; 60];
    let response = pair.smg.post("/v1/completions", &json!({"model": MODEL, "prompt": ids, "max_tokens": 4})).await;
    assert_eq!(response.status(), StatusCode::BAD_REQUEST);
    assert_eq!(response.headers()["x-smg-error-code"], "context_length_exceeded");
    assert!(pair.engines().iter().all(|engine| engine.calls().is_empty()));
}

#[tokio::test]
async fn requests_that_cannot_be_served_reach_no_engine() {
    let pair = Pair::of(Engine::Sglang, &[]).await;
    let with = |name: &str, value: Value| {
        let mut body = chat();
        body[name] = value;
        body
    };
    let image = json!([{"type": "image_url", "image_url": {"url": "http://x/y.png"}}]);
    let refused = [
        (
            CHAT,
            json!({"model": MODEL, "messages": [{"role": "user", "content": image}]}),
            400,
            "multimodal_not_supported",
        ),
        (CHAT, json!({"model": MODEL, "messages": []}), 400, "invalid_value"),
        (CHAT, with("continue_final_message", json!(true)), 400, "process_messages_failed"),
        (CHAT, with("tool_choice", json!("required")), 400, "invalid_tool_configuration"),
        (CHAT, with("lora_path", json!("adapter")), 400, "unsupported_parameter"),
        (
            CHAT,
            json!({"model": MODEL, "messages": [{"role": "user", "content": [{"type": "?"}]}]}),
            400,
            "unsupported_content_part",
        ),
        ("/generate", json!({"model": MODEL, "input_ids": [[1], [2]]}), 400, "resolve_input_failed"),
        (
            "/v1/responses",
            json!({"model": MODEL, "input": "hi", "previous_response_id": "resp_x"}),
            400,
            "previous_response_not_found",
        ),
        ("/v1/rerank", json!({"model": MODEL, "query": "a", "documents": ["b"]}), 501, "pd_route_unsupported"),
        ("/v1/embeddings", json!({"model": MODEL, "input": "a"}), 501, "pd_route_unsupported"),
        ("/v1/classify", json!({"model": MODEL, "input": "a"}), 501, "pd_route_unsupported"),
        (CHAT, json!({"model": "unheard-of", "messages": []}), 404, "model_not_found"),
    ];
    for (path, body, status, code) in refused {
        assert_refused(&pair.smg, path, &body, status, code).await;
    }
    assert!(pair.engines().iter().all(|engine| engine.calls().is_empty()));
}

#[tokio::test]
async fn pairs_that_cannot_hand_over_on_this_wire_reach_no_engine() {
    let moriio = |role| builder(Engine::Vllm, role).connector(Connector::MoriioWrite).start();
    let (prefill, decode) = (moriio(Role::Prefill).await.unwrap(), moriio(Role::Decode).await.unwrap());
    let pair = Pair::behind(Smg::launch(&[]).await, prefill, decode).await;
    let response = pair.smg.post(CHAT, &chat()).await;
    assert_eq!(response.status(), StatusCode::NOT_IMPLEMENTED);
    assert_eq!(response.headers()["x-smg-error-code"], "moriio_grpc_pd_unsupported");
    assert!(pair.engines().iter().all(|engine| engine.calls().is_empty()));
}

#[tokio::test]
async fn a_request_that_waits_in_vain_for_a_full_decode_is_shed_when_its_wait_is_over() {
    let decode = builder(Engine::Sglang, Role::Decode)
        .max_running(1)
        .token_delay(Duration::from_millis(50))
        .start()
        .await
        .unwrap();
    let smg = Smg::launch(&["--pd-admission-wait-secs", "2"]).await;
    let pair = Pair::behind(smg, grpc(Engine::Sglang, Role::Prefill).await, decode).await;
    let mut body = chat_stream();
    body["max_tokens"] = json!(10_000);
    let mut held = pair.smg.post(CHAT, &body).await.bytes_stream();
    held.next().await.unwrap().unwrap();
    let begun = Instant::now();
    let shed = pair.smg.post(CHAT, &chat()).await;
    assert!(begun.elapsed() >= Duration::from_millis(1900), "it waits as long as it may");
    assert_eq!(shed.status(), StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(shed.headers()["x-smg-error-code"], "worker_overload_protection_shed");
    assert!(shed.headers()["retry-after"].to_str().unwrap().parse::<u32>().unwrap() >= 1);
    assert_eq!(shed.headers()["content-type"], "application/json");
    let answer: Value = shed.json().await.unwrap();
    let message = format!(
        "Decode worker '{}' for model '{MODEL}' could not admit 1 request(s) within its running window of 1",
        pair.decode.url()
    );
    assert_eq!(answer["error"]["message"], message);
    assert_eq!(pair.smg.metric("smg_pd_admission_sheds_total", &[]).await, 1.0);
    assert_eq!(pair.decode.calls().len(), 1, "no leg was sent");

    // One that waits is served as soon as there is room.
    let body = chat();
    let (answered, ()) = tokio::join!(pair.smg.post(CHAT, &body), async {
        eventually("it waits", || async {
            (pair.smg.metric("smg_http_requests_active", &[]).await >= 2.0).then_some(())
        })
        .await;
        drop(held);
    });
    assert_eq!(answered.status(), StatusCode::OK);
    assert_eq!(pair.smg.metric("smg_pd_admission_waits_total", &[]).await, 1.0);
    pair.is_clean().await;
}

#[tokio::test]
async fn pairs_that_cannot_meet_or_are_not_there_are_refused_in_the_words_of_this_wire() {
    let smg = Smg::launch(&["--disable-retries", "--drain-settle-secs", "1"]).await;
    let prefill = builder(Engine::Sglang, Role::Prefill).server_info("kv_cache_dtype", "fp8").start().await.unwrap();
    smg.register(&spec(&prefill, "prefill")).await;
    let refused = async |code: &str| {
        let response = smg.post(CHAT, &chat()).await;
        assert_eq!(response.status(), StatusCode::SERVICE_UNAVAILABLE);
        assert_eq!(response.headers()["x-smg-error-code"], code);
        response.json::<Value>().await.unwrap()["error"]["message"].as_str().unwrap().to_owned()
    };
    assert_eq!(
        refused("no_available_workers").await,
        "No decode worker is registered for model 'm' at the moment (its other leg is): the pair is incomplete"
    );
    let other = builder(Engine::Sglang, Role::Decode).server_info("kv_cache_dtype", "bf16").start().await.unwrap();
    let id = smg.register(&spec(&other, "decode")).await;
    let message = refused("no_compatible_pd_pair").await;
    let beginning = "No prefill/decode pair for model 'm' shares a KV transfer protocol (mismatch on \
                     [\"kv_cache_dtype\"]; prefill: [\"sglang/";
    assert!(message.starts_with(beginning), "{message}");
    assert!(message.contains("dtype=fp8") && message.contains("dtype=bf16"), "{message}");
    smg.remove(&id).await;

    let decode = builder(Engine::Sglang, Role::Decode).server_info("kv_cache_dtype", "fp8").start().await.unwrap();
    smg.register(&spec(&decode, "decode")).await;
    assert_eq!(smg.post(CHAT, &chat()).await.status(), StatusCode::OK);
    decode.stop().await;
    eventually("the decode is out of rotation", || async {
        let response = smg.post(CHAT, &chat()).await;
        (response.headers()["x-smg-error-code"] == "no_available_workers").then_some(())
    })
    .await;
    assert_eq!(
        refused("no_available_workers").await,
        "All workers for model 'm' are unavailable (unhealthy or circuit breaker open)"
    );
}
