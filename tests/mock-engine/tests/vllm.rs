//! vLLM's handoffs are honest, and its answers have the shape of vLLM 0.32.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use std::time::Duration;

use common::*;
use mock_engine::{Connector, MockEngine, Role};
use serde_json::{Value, json};

const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";

async fn pair(connector: Connector) -> (MockEngine, MockEngine) {
    let start = |role| vllm(role, connector.clone()).transfer_deadline(Duration::from_millis(300)).start();
    (start(Role::Prefill).await.unwrap(), start(Role::Decode).await.unwrap())
}

fn tagged(body: &Value) -> Value {
    let tag = json!({"do_remote_decode": true, "do_remote_prefill": false});
    with(body.clone(), json!({"max_tokens": 1, "stream": false, "kv_transfer_params": tag}))
}

/// Runs the prefill and returns the decode leg's body.
async fn handed_over(prefill: &MockEngine, path: &str, body: &Value) -> Value {
    let params = post(prefill, path, &tagged(body)).await.json()["kv_transfer_params"].clone();
    assert!(params.is_object());
    with(body.clone(), json!({"kv_transfer_params": params}))
}

fn by_source(metrics: &str, source: &str) -> f64 {
    let series = format!("vllm:prompt_tokens_by_source_total{{engine=\"0\",model_name=\"m\",source=\"{source}\"}} ");
    let line = metrics.lines().find_map(|line| line.strip_prefix(series.as_str()));
    line.unwrap().parse().unwrap()
}

#[tokio::test]
async fn a_nixl_pair_answers_what_a_single_engine_answers_and_decode_computes_no_prompt() {
    let (prefill, decode) = pair(Connector::Nixl).await;
    let single = vllm(Role::Regular, Connector::None).start().await.unwrap();
    for (path, body) in [(CHAT, chat("a b c")), (COMPLETIONS, completion("a b c"))] {
        for more in
            [json!({}), json!({"stream": true}), json!({"stream": true, "stream_options": {"include_usage": true}})]
        {
            let mut for_prefill = with(body.clone(), more.clone());
            for_prefill.as_object_mut().unwrap().remove("stream_options");
            let params = handed_over(&prefill, path, &for_prefill).await["kv_transfer_params"].clone();
            let body = with(body.clone(), more);
            let leg = with(body.clone(), json!({"kv_transfer_params": params}));
            let answer = post(&decode, path, &leg).await;
            assert_eq!(answer.text, post(&single, path, &body).await.text);
        }
    }
    let metrics = get(&decode, "/metrics").await.text;
    assert_eq!(by_source(&metrics, "local_compute"), 0.0);
    assert_eq!(by_source(&metrics, "external_kv_transfer"), get_local(&prefill).await);
    assert_eq!(prefill.held_kv(), 0);
}

async fn get_local(engine: &MockEngine) -> f64 {
    by_source(&get(engine, "/metrics").await.text, "local_compute")
}

#[tokio::test]
async fn a_decode_without_a_handoff_computes_the_prompt_and_says_so() {
    let (_, decode) = pair(Connector::Nixl).await;
    for params in [Value::Null, json!({})] {
        let body = with(completion("a b c"), json!({"kv_transfer_params": params}));
        assert_eq!(post(&decode, COMPLETIONS, &body).await.status, 200);
    }
    assert_eq!(get_local(&decode).await, 6.0);
    assert_eq!(decode.external_prompt_tokens(), 0);
}

#[tokio::test]
async fn a_prefill_without_a_tag_hands_nothing_over() {
    let (prefill, _) = pair(Connector::Nixl).await;
    let answer = post(&prefill, CHAT, &with(chat("hi"), json!({"max_tokens": 1}))).await;
    assert_eq!(answer.json()["kv_transfer_params"], Value::Null);
    assert_eq!(prefill.held_kv(), 0);
}

#[tokio::test]
async fn an_answer_that_ends_by_itself_hands_nothing_over() {
    let (prefill, _) = pair(Connector::Nixl).await;
    let mut body = tagged(&chat("hi"));
    body.as_object_mut().unwrap().remove("max_tokens");
    let answer = post(&prefill, CHAT, &body).await.json();
    assert_eq!(answer["choices"][0]["finish_reason"], "stop");
    assert_eq!(answer["kv_transfer_params"], Value::Null);
}

#[tokio::test]
async fn wrong_nixl_handoffs_never_get_kv() {
    let (prefill, decode) = pair(Connector::Nixl).await;
    let internal = json!({"error": {"message": "Internal server error", "type": "InternalServerError", "param": null, "code": 500}});
    let good = handed_over(&prefill, COMPLETIONS, &completion("hi")).await;
    let mut bad = Vec::new();
    for (name, value) in
        [("remote_engine_id", json!("another")), ("remote_request_id", json!("stale")), ("remote_port", json!(1))]
    {
        let mut body = good.clone();
        body["kv_transfer_params"][name] = value;
        bad.push(body);
    }
    bad.push(with(good.clone(), json!({"n": 2})));
    for body in &bad {
        let answer = post(&decode, COMPLETIONS, body).await;
        assert_eq!((answer.status, answer.json()), (500, internal.clone()));
    }
    // The last one has fetched the KV for a request that could not use it: it is gone.
    assert_eq!(post(&decode, COMPLETIONS, &good).await.status, 500);

    let good = handed_over(&prefill, COMPLETIONS, &completion("hi")).await;
    let other_prompt = with(good.clone(), json!({"prompt": "ho"}));
    assert_eq!(post(&decode, COMPLETIONS, &other_prompt).await.status, 500);
    assert_eq!(decode.external_prompt_tokens(), 0);
    assert_eq!(decode.local_prompt_tokens(), 0);
}

#[tokio::test]
async fn a_nixl_handoff_serves_one_decode() {
    let (prefill, decode) = pair(Connector::Nixl).await;
    let body = handed_over(&prefill, COMPLETIONS, &completion("hi")).await;
    assert_eq!(post(&decode, COMPLETIONS, &body).await.status, 200);
    assert_eq!(post(&decode, COMPLETIONS, &body).await.status, 500);
}

#[tokio::test]
async fn a_restarted_prefill_has_another_id_and_no_kv() {
    let (prefill, decode) = pair(Connector::Nixl).await;
    let body = handed_over(&prefill, COMPLETIONS, &completion("hi")).await;
    let (id, url) = (prefill.engine_id(), prefill.url());
    prefill.restart().await.unwrap();
    assert_ne!(prefill.engine_id(), id);
    assert_eq!(prefill.url(), url);
    assert_eq!(post(&decode, COMPLETIONS, &body).await.status, 500);
    let body = handed_over(&prefill, COMPLETIONS, &completion("hi")).await;
    assert_eq!(post(&decode, COMPLETIONS, &body).await.status, 200);
}

#[tokio::test]
async fn kv_that_nobody_fetches_expires() {
    let (prefill, decode) = pair(Connector::Nixl).await;
    let body = handed_over(&prefill, COMPLETIONS, &completion("hi")).await;
    prefill.wait_until(SOON, |engine| engine.held_kv() == 0).await.unwrap();
    assert_eq!(post(&decode, COMPLETIONS, &body).await.status, 500);
}

#[tokio::test]
async fn an_incomplete_nixl_handoff_kills_the_decode_engine() {
    let (_, decode) = pair(Connector::Nixl).await;
    let body = with(completion("hi"), json!({"kv_transfer_params": {"do_remote_prefill": true}}));
    let answer = post(&decode, COMPLETIONS, &body).await;
    assert_eq!(answer.status, 500);
    assert_eq!(
        answer.json()["error"]["message"],
        "EngineCore encountered an issue. See stack trace (above) for the root cause."
    );
    let refused = try_post(&decode, COMPLETIONS, &completion("hi")).await.err().unwrap();
    assert!(refused.is_connect());
    decode.restart().await.unwrap();
    assert_eq!(post(&decode, COMPLETIONS, &completion("hi")).await.status, 200);
}

#[tokio::test]
async fn requests_that_vllm_refuses_are_refused() {
    let (prefill, _) = pair(Connector::Nixl).await;
    let tag = tagged(&chat("hi"));
    for body in [
        with(tag.clone(), json!({"stream": true})),
        with(tag.clone(), json!({"n": 2})),
        with(tag.clone(), json!({"min_tokens": 5})),
        with(tag, json!({"stream_options": {"include_usage": true}})),
        with(chat("hi"), json!({"messages": []})),
        with(chat("hi"), json!({"messages": "hi"})),
        with(chat("hi"), json!({"max_tokens": 1_000_000})),
        with(chat("hi"), json!({"max_tokens": 0})),
        with(chat("hi"), json!({"stream": "yes"})),
        json!([]),
    ] {
        let answer = post(&prefill, CHAT, &body).await;
        assert_eq!(answer.status, 400, "{body}");
        assert_eq!(keys(&answer.text), ["error"]);
        assert_eq!(keys(part(&answer.text, "error")), ["message", "type", "param", "code"]);
    }
    let unknown = post(&prefill, CHAT, &with(chat("hi"), json!({"model": "x"}))).await;
    assert_eq!(unknown.status, 404);
    assert_eq!(unknown.json()["error"]["type"], "NotFoundError");
    assert_eq!(post(&prefill, "/generate", &chat("hi")).await.status, 404);
}

fn mooncake_legs(prefill: &MockEngine, body: &Value, id: &str) -> (Value, Value) {
    let bootstrap = format!("http://127.0.0.1:{}", prefill.bootstrap_port().unwrap());
    let mut first = tagged(body);
    first["kv_transfer_params"]["transfer_id"] = json!(id);
    let params = json!({"do_remote_decode": false, "do_remote_prefill": true, "transfer_id": id,
        "remote_engine_id": prefill.engine_id(), "remote_bootstrap_addr": bootstrap});
    (first, with(body.clone(), json!({"kv_transfer_params": params})))
}

#[tokio::test]
async fn a_mooncake_pair_answers_what_a_single_engine_answers_in_any_order() {
    let (prefill, decode) = pair(Connector::Mooncake).await;
    let single = vllm(Role::Regular, Connector::None).start().await.unwrap();
    let body = completion("a b c");
    let expected = post(&single, COMPLETIONS, &body).await.text;

    let (first, second) = mooncake_legs(&prefill, &body, "xfer-1");
    let before = post(&prefill, COMPLETIONS, &first).await;
    assert_eq!(before.json()["kv_transfer_params"], Value::Null);
    assert_eq!(post(&decode, COMPLETIONS, &second).await.text, expected);

    let (first, second) = mooncake_legs(&prefill, &body, "xfer-2");
    let late_prefill = async {
        decode.wait_for_generations(2, SOON).await.unwrap();
        post(&prefill, COMPLETIONS, &first).await
    };
    let (answer, _) = tokio::join!(post(&decode, COMPLETIONS, &second), late_prefill);
    assert_eq!(answer.text, expected);
    assert_eq!(decode.local_prompt_tokens(), 0);
    assert_eq!(decode.external_prompt_tokens(), 6);
}

#[tokio::test]
async fn wrong_mooncake_handoffs_never_get_kv() {
    let (prefill, decode) = pair(Connector::Mooncake).await;
    let (first, second) = mooncake_legs(&prefill, &completion("hi"), "xfer-1");
    assert_eq!(post(&prefill, COMPLETIONS, &first).await.status, 200);
    for (name, value) in [
        ("remote_engine_id", json!("another")),
        ("remote_bootstrap_addr", json!("http://127.0.0.1:1")),
        ("transfer_id", json!("unknown")),
        ("transfer_id", Value::Null),
    ] {
        let mut body = second.clone();
        body["kv_transfer_params"][name] = value;
        assert_eq!(post(&decode, COMPLETIONS, &body).await.status, 500);
    }
    assert_eq!(decode.external_prompt_tokens(), 0);
    assert_eq!(decode.local_prompt_tokens(), 0);
}

#[tokio::test]
async fn the_mooncake_bootstrap_answers_as_the_real_one() {
    let prefill = vllm(Role::Prefill, Connector::Mooncake).engine_id("E1").start().await.unwrap();
    let url = format!("http://127.0.0.1:{}/query", prefill.bootstrap_port().unwrap());
    let answer = read(reqwest::Client::new().get(url)).await.unwrap();
    let worker = format!("tcp://127.0.0.1:{}", prefill.side_channel_port().unwrap());
    assert_eq!(answer.json(), json!({"0": {"engine_id": "E1", "worker_addr": {"0": {"0": worker}}}}));
}

#[tokio::test]
async fn each_data_parallel_rank_has_an_engine_id() {
    let prefill = vllm(Role::Prefill, Connector::Mooncake).engine_id("E1").dp_size(2).start().await.unwrap();
    let decode = vllm(Role::Decode, Connector::Mooncake).start().await.unwrap();
    let (first, mut second) = mooncake_legs(&prefill, &completion("hi"), "xfer-1");
    second["kv_transfer_params"]["remote_engine_id"] = json!("E1_dp1");
    let (_, answer) = tokio::join!(post(&prefill, COMPLETIONS, &first), post(&decode, COMPLETIONS, &second));
    assert_eq!(answer.status, 200);
}

#[tokio::test]
async fn connectors_that_know_no_handoff_ignore_it() {
    let connector = Connector::Other("SharedStorageConnector".to_owned());
    let decode = vllm(Role::Decode, connector).start().await.unwrap();
    let params = json!({"do_remote_prefill": true});
    let body = with(completion("hi"), json!({"kv_transfer_params": params}));
    assert_eq!(post(&decode, COMPLETIONS, &body).await.status, 200);
    assert_eq!(decode.local_prompt_tokens(), 1);
}

#[tokio::test]
async fn whole_answers_have_vllms_fields_in_vllms_order() {
    let (prefill, _) = pair(Connector::Nixl).await;
    let answer = post(&prefill, CHAT, &tagged(&chat("hi"))).await;
    let text = &answer.text;
    assert_eq!(
        keys(text),
        [
            "id",
            "object",
            "created",
            "model",
            "choices",
            "service_tier",
            "system_fingerprint",
            "usage",
            "prompt_logprobs",
            "prompt_token_ids",
            "prompt_text",
            "kv_transfer_params",
            "ec_transfer_params",
            "metrics"
        ]
    );
    assert_eq!(
        keys(part(text, "choices")),
        ["index", "message", "logprobs", "finish_reason", "stop_reason", "token_ids", "routed_experts"]
    );
    assert_eq!(
        keys(part(text, "message")),
        ["role", "content", "refusal", "annotations", "audio", "function_call", "reasoning"]
    );
    assert_eq!(
        keys(part(text, "usage")),
        ["prompt_tokens", "total_tokens", "completion_tokens", "prompt_tokens_details", "completion_tokens_details"]
    );
    assert_eq!(
        keys(part(text, "kv_transfer_params")),
        [
            "do_remote_prefill",
            "do_remote_decode",
            "remote_block_ids",
            "remote_engine_id",
            "remote_request_id",
            "remote_host",
            "remote_port",
            "tp_size",
            "dcp_size",
            "pp_size",
            "remote_num_tokens",
            "remote_blocks_expiry_time",
            "transfer_mode",
            "remote_prefill_cached_tokens"
        ]
    );
    let params = &answer.json()["kv_transfer_params"];
    assert_eq!(params["remote_block_ids"], json!([[1]]));
    let id = params["remote_request_id"].as_str().unwrap();
    assert!(id.starts_with("chatcmpl-one-") && id.len() == "chatcmpl-one-".len() + 8);
    assert_eq!(answer.json()["id"], "chatcmpl-one");

    let text = post(&prefill, COMPLETIONS, &tagged(&completion("hi"))).await.text;
    assert_eq!(
        keys(&text),
        [
            "id",
            "object",
            "created",
            "model",
            "choices",
            "service_tier",
            "system_fingerprint",
            "usage",
            "kv_transfer_params",
            "ec_transfer_params",
            "metrics"
        ]
    );
    assert_eq!(
        keys(part(&text, "choices")),
        [
            "index",
            "text",
            "logprobs",
            "finish_reason",
            "stop_reason",
            "token_ids",
            "prompt_logprobs",
            "prompt_token_ids",
            "routed_experts"
        ]
    );
    assert!(text.contains("\"remote_request_id\":\"cmpl-one-0-"));
}

#[tokio::test]
async fn streamed_answers_have_vllms_fields_in_vllms_order() {
    let engine = vllm(Role::Regular, Connector::None).start().await.unwrap();
    let body = with(chat("hi"), json!({"max_tokens": 2, "stream": true, "stream_options": {"include_usage": true}}));
    let answer = post(&engine, CHAT, &body).await;
    assert_eq!(answer.headers["content-type"], "text/event-stream; charset=utf-8");
    assert_eq!(answer.headers["server"], "uvicorn");
    let events: Vec<&str> = answer.text.split("\n\n").filter_map(|event| event.strip_prefix("data: ")).collect();
    let base = ["id", "object", "created", "model", "choices"];
    let expected: [&[&str]; 4] =
        [&["prompt_token_ids", "prompt_text"], &[], &["system_fingerprint"], &["usage", "system_fingerprint"]];
    for (event, more) in events.iter().zip(expected) {
        assert_eq!(keys(event), [&base, more].concat());
    }
    let choice = |event: usize| keys(part(events[event], "choices"));
    assert_eq!(choice(0), ["index", "delta", "logprobs", "finish_reason"]);
    assert_eq!(choice(1), ["index", "delta", "logprobs", "finish_reason", "token_ids"]);
    assert_eq!(choice(2), ["index", "delta", "logprobs", "finish_reason", "stop_reason", "token_ids"]);
    assert!(events[3].contains("\"choices\":[],"));
    assert_eq!(keys(part(events[3], "usage")), ["prompt_tokens", "total_tokens", "completion_tokens"]);
    assert_eq!(events[4], "[DONE]");

    let body = with(completion("hi"), json!({"max_tokens": 1, "stream": true}));
    let answer = post(&engine, COMPLETIONS, &body).await;
    let event = answer.text.strip_prefix("data: ").unwrap();
    let event = event.split("\n\n").next().unwrap();
    assert_eq!(keys(event), [&base[..], &["system_fingerprint"]].concat());
    assert_eq!(
        keys(part(event, "choices")),
        ["index", "text", "logprobs", "finish_reason", "stop_reason", "prompt_token_ids", "token_ids"]
    );
}

#[tokio::test]
async fn streamed_and_whole_text_are_equal() {
    let engine = vllm(Role::Regular, Connector::None).start().await.unwrap();
    let whole = post(&engine, CHAT, &chat("hi")).await.json();
    let streamed = post(&engine, CHAT, &with(chat("hi"), json!({"stream": true}))).await;
    let joined: String =
        streamed.events().iter().filter_map(|event| event["choices"][0]["delta"]["content"].as_str()).collect();
    assert_eq!(whole["choices"][0]["message"]["content"], joined);
}

#[tokio::test]
async fn probes_answer_as_vllms_do() {
    let engine = vllm(Role::Regular, Connector::None).max_model_len(2048).start().await.unwrap();
    for path in ["/health", "/ping"] {
        let answer = get(&engine, path).await;
        assert_eq!((answer.status, answer.text.as_str()), (200, ""));
        assert_eq!(answer.headers["content-length"], "0");
        assert!(!answer.headers.contains_key("content-type"));
        assert_eq!(answer.headers["vary"], "Origin");
    }
    assert_eq!(get(&engine, "/version").await.text, r#"{"version":"0.32.0"}"#);
    assert_eq!(get(&engine, "/load").await.text, r#"{"server_load":0}"#);
    let models = get(&engine, "/v1/models").await.text;
    assert_eq!(
        keys(part(&models, "data")),
        ["id", "object", "created", "owned_by", "root", "parent", "max_model_len", "permission"]
    );
    assert_eq!(
        keys(part(&models, "permission")),
        [
            "id",
            "object",
            "created",
            "allow_create_engine",
            "allow_sampling",
            "allow_logprobs",
            "allow_search_indices",
            "allow_view",
            "allow_fine_tuning",
            "organization",
            "group",
            "is_blocking"
        ]
    );
    for path in ["/get_server_info", "/server_info", "/get_model_info"] {
        let answer = get(&engine, path).await;
        assert_eq!((answer.status, answer.text.as_str()), (404, r#"{"detail":"Not Found"}"#));
    }
    let metrics = get(&engine, "/metrics").await.text;
    for name in ["num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"] {
        assert!(metrics.contains(&format!("\nvllm:{name}{{engine=\"0\",model_name=\"m\"}} 0.0\n")));
    }
}
