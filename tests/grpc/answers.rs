//! What clients get: every API, streamed or not, of pairs and of single workers.

use std::collections::BTreeSet;

use super::*;

#[tokio::test]
async fn pairs_registered_at_run_time_answer_what_their_decode_says_streamed_or_not() {
    for engine in PAIRS {
        let pair = Pair::of(engine, &[]).await;
        let response = pair.smg.post_as("mine", CHAT, &chat()).await;
        assert_eq!(response.status(), StatusCode::OK, "{engine:?} {}", response.text().await.unwrap());
        assert_eq!(response.headers()["x-smg-routed-worker-id"], pair.decode.url());
        let answer: Value = response.json().await.unwrap();
        let words = expected(&pair.decode, 0, 8);
        assert_eq!(answer["choices"][0]["message"]["content"], words, "{engine:?}");
        assert_eq!(answer["choices"][0]["finish_reason"], "length");
        assert_eq!(answer["usage"]["completion_tokens"], 8);
        assert_eq!(answer["usage"]["prompt_tokens"], pair.decode.calls()[0].token_ids().len());
        assert_eq!(answer["usage"]["prompt_tokens_details"]["cached_tokens"], 1, "the prefill's count");
        let streamed = pair.smg.post(CHAT, &chat_stream()).await.text().await.unwrap();
        assert!(streamed.ends_with("data: [DONE]\n\n"), "{streamed}");
        assert_eq!(deltas(&streamed), words, "{engine:?}");
        let [prefill, decode] = pair.engines().map(|engine| engine.calls());
        for (sent, received) in prefill.iter().zip(&decode) {
            assert_eq!(sent.request_id(), received.request_id(), "both legs go by one id");
        }
        assert_ne!(prefill[0].request_id(), prefill[1].request_id());
        pair.is_clean().await;
        assert!(pair.engines().iter().all(|engine| engine.aborts().is_empty()), "{engine:?}: nothing was aborted");
        let record = pair.smg.decision("mine").await;
        let dispatch = if engine == Engine::Vllm { "sequential" } else { "parallel" };
        assert_eq!(record["attempts"][0]["dispatch"], dispatch);
        assert_eq!(record["outcome"], "completed");
    }
}

#[tokio::test]
async fn every_api_that_generates_is_served() {
    for engine in PAIRS {
        let pair = Pair::of(engine, &[]).await;
        let messages = json!([{"role": "user", "content": "hi"}]);
        let native = json!({"model": MODEL, "text": "hi", "sampling_params": {"max_new_tokens": 8}});
        let requests = [
            ("/v1/completions", completion(), "/choices/0/text"),
            ("/generate", native, "/text"),
            ("/v1/messages", json!({"model": MODEL, "messages": messages, "max_tokens": 8}), "/content/0/text"),
            (
                "/v1/responses",
                json!({"model": MODEL, "input": "hi", "max_output_tokens": 8}),
                "/output/0/content/0/text",
            ),
        ];
        for (path, body, place) in requests {
            pair.decode.clear_requests();
            let response = pair.smg.post(path, &body).await;
            let status = response.status();
            let answer: Value = response.json().await.unwrap();
            assert_eq!(status, StatusCode::OK, "{engine:?} {path} {answer}");
            let text = answer.pointer(place).unwrap_or_else(|| panic!("{engine:?} {path} {answer}"));
            assert_eq!(text, &expected(&pair.decode, 0, 8), "{engine:?} {path}");
            let streamed = pair.smg.post(path, &streamed(body)).await;
            assert_eq!(streamed.headers()["content-type"], "text/event-stream");
            let text = streamed.text().await.unwrap();
            assert!(!text.contains("\"error\":{"), "{engine:?} {path} {text}");
        }
        pair.is_clean().await;
    }
}

#[tokio::test]
async fn a_worker_that_serves_alone_needs_no_partner() {
    for engine in PAIRS {
        let worker = grpc(engine, Role::Regular).await;
        let smg = Smg::launch(&[]).await;
        smg.register(&spec(&worker, "regular")).await;
        let answer: Value = smg.post(CHAT, &chat()).await.json().await.unwrap();
        assert_eq!(answer["choices"][0]["message"]["content"], expected(&worker, 0, 8), "{engine:?} {answer}");
        eventually("idle", || async { worker.open_requests().is_empty().then_some(()) }).await;
    }
}

#[tokio::test]
async fn samples_are_dispatches_of_their_own_and_come_back_as_one_answer() {
    for engine in [Engine::Sglang, Engine::Tokenspeed] {
        let pair = Pair::of(engine, &[]).await;
        let mut body = chat();
        body["n"] = json!(4);
        let answer: Value = pair.smg.post(CHAT, &body).await.json().await.unwrap();
        let choices = answer["choices"].as_array().unwrap_or_else(|| panic!("{answer}"));
        let indices: Vec<u64> = choices.iter().map(|choice| choice["index"].as_u64().unwrap()).collect();
        assert_eq!(indices, [0, 1, 2, 3]);
        let rooms = |engine: &MockEngine| -> BTreeSet<i64> { engine.calls().iter().map(room).collect() };
        assert_eq!(rooms(&pair.prefill).len(), 4, "{engine:?}: each sample has a room of its own");
        assert_eq!(rooms(&pair.prefill), rooms(&pair.decode), "{engine:?}");
        for leg in pair.engines() {
            let ids: Vec<String> = leg.calls().iter().map(|call| call.request_id().to_owned()).collect();
            assert_eq!(ids.len(), 4, "{engine:?}");
            for sample in 0..4 {
                assert!(ids.iter().any(|id| id.ends_with(&format!("-{sample}"))), "{ids:?}");
            }
        }
        pair.is_clean().await;
    }
    let pair = Pair::of(Engine::Vllm, &[]).await;
    let mut body = chat();
    body["n"] = json!(3);
    let answer: Value = pair.smg.post(CHAT, &body).await.json().await.unwrap();
    assert_eq!(answer["choices"].as_array().map(Vec::len), Some(3), "{answer}");
    let calls = pair.engines().map(|engine| engine.calls());
    assert_eq!((calls[0].len(), calls[1].len()), (1, 1), "vLLM draws its samples itself");
    assert_eq!(calls[0][0].vllm().unwrap().kv_transfer_params_json, None, "and there is no handoff then");
    pair.is_clean().await;
}

#[tokio::test]
async fn the_native_api_tells_the_version_of_the_weights() {
    let weighted = |role| builder(Engine::Sglang, role).server_info("weight_version", "7").start();
    let (prefill, decode) = (weighted(Role::Prefill).await.unwrap(), weighted(Role::Decode).await.unwrap());
    let pair = Pair::behind(Smg::launch(&[]).await, prefill, decode).await;
    let answer: Value = pair.smg.post("/generate", &generate()).await.json().await.unwrap();
    assert_eq!(answer["meta_info"]["weight_version"], "7", "{answer}");
}

#[tokio::test]
async fn the_log_probabilities_of_a_prompt_are_those_of_the_engine_that_computed_it() {
    for engine in [Engine::Sglang, Engine::Vllm] {
        let pair = Pair::of(engine, &[]).await;
        let (smg, worker) = (Smg::launch(&[]).await, grpc(engine, Role::Regular).await);
        smg.register(&spec(&worker, "regular")).await;
        let mut body = completion();
        (body["echo"], body["logprobs"]) = (json!(true), json!(2));
        let mut several = body.clone();
        several["n"] = json!(2);
        for body in [&body, &several] {
            let answers: [Value; 2] = [
                pair.smg.post("/v1/completions", body).await.json().await.unwrap(),
                smg.post("/v1/completions", body).await.json().await.unwrap(),
            ];
            let told = answers[0]["choices"][0]["logprobs"]["token_logprobs"].as_array().unwrap();
            let prompt = answers[0]["usage"]["prompt_tokens"].as_u64().unwrap();
            assert_eq!(told.len() as u64, prompt + 8, "{engine:?} {}", answers[0]);
            assert!(told[0].is_null() && told[1..].iter().all(Value::is_number), "{engine:?} {told:?}");
            assert_eq!(answers[0]["choices"], answers[1]["choices"], "{engine:?}");
        }
        let body = streamed(body);
        let choices = async |smg: &Smg| -> Vec<Value> {
            let text = smg.post("/v1/completions", &body).await.text().await.unwrap();
            events(&text).iter().map(|event| event["choices"].clone()).collect()
        };
        assert_eq!(choices(&pair.smg).await, choices(&smg).await, "{engine:?}");
        pair.is_clean().await;
    }
}

#[tokio::test]
async fn tokens_and_the_time_they_take_are_shown_under_the_documented_names() {
    for engine in PAIRS {
        let pair = Pair::of(engine, &[]).await;
        assert_eq!(pair.smg.post(CHAT, &chat()).await.status(), StatusCode::OK);
        assert_eq!(pair.smg.post(CHAT, &chat_stream()).await.text().await.unwrap().matches("[DONE]").count(), 1);
        pair.is_clean().await;
        let prompt = pair.decode.calls()[0].token_ids().len() as f64;
        let of = |more: &[(&'static str, &'static str)]| {
            [&[("backend_type", "pd"), ("model", MODEL), ("endpoint", "chat")][..], more].concat()
        };
        for (kind, tokens) in [("input", 2.0 * prompt), ("output", 16.0)] {
            let labels = of(&[("token_type", kind)]);
            assert_eq!(pair.smg.metric("smg_router_tokens_total", &labels).await, tokens, "{engine:?} {kind}");
        }
        for (name, at_least) in [
            ("smg_router_generation_duration_seconds_count", 2.0),
            ("smg_router_ttft_seconds_count", 1.0),
            ("smg_router_tpot_seconds_count", 1.0),
        ] {
            let count = pair.smg.metric(name, &of(&[])).await;
            assert!((at_least..=2.0).contains(&count), "{engine:?} {name}: {count}");
        }
    }
}

#[tokio::test]
async fn the_time_between_a_handoff_and_its_decode_is_measured_where_legs_are_sequential() {
    for (engine, handoffs) in [(Engine::Vllm, 1.0), (Engine::Sglang, 0.0)] {
        let pair = Pair::of(engine, &[]).await;
        assert_eq!(pair.smg.post(CHAT, &chat()).await.status(), StatusCode::OK);
        let measured = pair.smg.metric("smg_pd_kv_transfer_duration_seconds_count", &[]).await;
        assert_eq!(measured, handoffs, "{engine:?}");
    }
}

#[tokio::test]
async fn tokens_are_counted_by_the_gateway() {
    let pair = Pair::of(Engine::Vllm, &[]).await;
    let messages = json!([{"role": "user", "content": "How many tokens is this?"}]);
    let counted = pair.smg.post("/v1/messages/count_tokens", &json!({"model": MODEL, "messages": messages})).await;
    let counted: Value = counted.json().await.unwrap();
    assert!(pair.engines().iter().all(|engine| engine.calls().is_empty()));
    let message = json!({"model": MODEL, "messages": messages, "max_tokens": 4});
    let answer: Value = pair.smg.post("/v1/messages", &message).await.json().await.unwrap();
    // Of a message's tokens, those from the cache are told apart.
    let usage = ["input_tokens", "cache_read_input_tokens"].map(|name| answer["usage"][name].as_u64().unwrap());
    assert_eq!(counted["input_tokens"], usage[0] + usage[1], "{answer}");
    assert_eq!(counted["input_tokens"], pair.decode.calls()[0].token_ids().len());
}

#[tokio::test]
async fn a_kept_response_can_be_read_gone_on_from_and_deleted() {
    let pair = Pair::of(Engine::Sglang, &[]).await;
    let first = json!({"model": MODEL, "input": "hi", "max_output_tokens": 8});
    let first: Value = pair.smg.post("/v1/responses", &first).await.json().await.unwrap();
    let id = first["id"].as_str().unwrap();
    assert!(id.starts_with("resp_"), "{first}");
    let path = format!("/v1/responses/{id}");
    assert_eq!(pair.smg.get_json(&path).await, first);
    let next = json!({"model": MODEL, "input": "and", "max_output_tokens": 8, "previous_response_id": id});
    assert_eq!(pair.smg.post("/v1/responses", &next).await.status(), StatusCode::OK);
    let calls = pair.decode.calls();
    let told = mock_engine::decode(calls[1].token_ids());
    let said = first["output"][0]["content"][0]["text"].as_str().unwrap();
    assert!(told.contains("hi") && told.contains(said) && told.contains("and"), "{told}");
    let deleted = pair.smg.client.delete(format!("{}{path}", pair.smg.url)).send().await.unwrap();
    assert_eq!(deleted.json::<Value>().await.unwrap()["deleted"], true);
    let gone = pair.smg.get(&path).await;
    assert_eq!(gone.status(), StatusCode::NOT_FOUND);
    assert_eq!(gone.headers()["x-smg-error-code"], "response_not_found");
}
