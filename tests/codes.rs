//! The documented error codes: each can be provoked, with its status, in the documented envelope or in the engine's own words.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod support;

use std::collections::BTreeSet;

use reqwest::{Method, Response};
use serde_json::{Value, json};
use support::*;

const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";
const DOCUMENTATION: &str = include_str!("../docs/reference/api.md");

/// Whether the table of codes names this one: in full, or as the end of a leg's code.
fn is_documented(code: &str) -> bool {
    let suffix = code.split_once('_').map(|(_, suffix)| format!("`_{suffix}`"));
    let of_leg = code.starts_with("prefill_") || code.starts_with("decode_");
    DOCUMENTATION.contains(&format!("`{code}`"))
        || of_leg && suffix.is_some_and(|it| DOCUMENTATION.contains(&it))
        || code.starts_with("decode_") && is_documented(&code.replace("decode_", "prefill_"))
}

/// Checks an error that the gateway answers in its own words.
async fn assert_own(response: Response, status: u16, code: &str) {
    let (found, headers) = (response.status().as_u16(), response.headers().clone());
    let text = response.text().await.unwrap();
    assert_eq!((found, headers["x-smg-error-code"].to_str().unwrap()), (status, code), "{text}");
    assert_eq!(headers["content-type"], "application/json", "{code}");
    let body: Value = serde_json::from_str(&text).unwrap();
    let error = body["error"].as_object().unwrap();
    assert_eq!(error.keys().map(String::as_str).collect::<BTreeSet<_>>(), ["code", "message", "param", "type"].into());
    assert_eq!(error["code"], code);
    assert!(error["type"].is_string() && error["message"].as_str().is_some_and(|words| !words.is_empty()), "{text}");
    assert!(is_documented(code), "{code} is not documented");
}

/// Checks an engine's error that passed through.
async fn assert_passed(response: Response, status: u16, code: &str, words: &str) {
    assert_eq!((response.status().as_u16(), response.headers()["x-smg-error-code"].to_str().unwrap()), (status, code));
    assert_eq!(response.headers()["content-type"], "application/json");
    assert_eq!(response.text().await.unwrap(), words);
    assert!(is_documented(code), "{code} is not documented");
}

fn with(mut body: Value, field: &str, value: Value) -> Value {
    body[field] = value;
    body
}

#[tokio::test]
async fn what_the_gateway_refuses_has_its_code_and_envelope() {
    let (smg, _prefill, _decode) = sglang_pair(&["--max-payload-size", "100000"]).await;
    let ask = async |path: &str, body: Value| smg.post(path, &body).await;
    assert_own(smg.post_bytes(CHAT, "{").await, 400, "json_parse_error").await;
    assert_own(ask(CHAT, with(chat(), "stream", json!("yes"))).await, 400, "invalid_type").await;
    assert_own(ask(COMPLETIONS, with(completion(), "n", json!(2))).await, 400, "parallel_sampling_unsupported").await;
    assert_own(ask(CHAT, with(chat(), "n", json!(5000))).await, 400, "too_many_samples").await;
    assert_own(ask(CHAT, with(chat(), "model", json!("unheard-of"))).await, 404, "model_not_found").await;
    assert_own(ask("/v1/chat", chat()).await, 404, "unknown_url").await;
    let put = smg.client.request(Method::PUT, format!("{}{CHAT}", smg.url)).json(&chat()).send().await.unwrap();
    assert_own(put, 405, "method_not_allowed").await;
    assert_own(ask(CHAT, with(chat(), "x", json!("x".repeat(100_000)))).await, 413, "request_body_too_large").await;
    assert_own(ask("/v1/embeddings", json!({"model": MODEL, "input": "hi"})).await, 501, "pd_route_unsupported").await;
    let other = MockEngine::builder().engine(Engine::Sglang).model("other").start().await.unwrap();
    smg.register(&spec(&other, "regular")).await;
    assert_own(ask(CHAT, json!({"messages": []})).await, 400, "missing_required_parameter").await;

    let empty = Smg::launch(&[]).await;
    assert_own(empty.post(CHAT, &chat()).await, 503, "no_available_workers").await;
    assert_own(empty.get("/get_server_info").await, 503, "no_prefill_servers").await;
    assert_own(empty.get("/v1/models").await, 503, "no_models_available").await;
    let (nixl, mooncake) = (vllm(Role::Prefill, Connector::Nixl).await, vllm(Role::Decode, Connector::Mooncake).await);
    empty.register(&spec_with(&nixl, "prefill", json!({"kv_connector": "NixlConnector"}))).await;
    empty.register(&spec_with(&mooncake, "decode", json!({"kv_connector": "MooncakeConnector"}))).await;
    assert_own(empty.post(CHAT, &chat()).await, 503, "no_compatible_pd_pair").await;
}

#[tokio::test]
async fn what_breaks_behind_the_gateway_has_the_code_of_its_leg() {
    let flags = ["--disable-retries", "--cb-failure-threshold", "100", "--disable-health-check"];
    let broken = Fault::generation().reset_unanswered();
    let cut = Fault::generation().status(200, "{}").close_after_bytes(0);
    for dispatch in DISPATCHES {
        let serving = Serving::scripted(dispatch, &flags).await;
        let leg = if dispatch == Dispatch::Regular { "worker" } else { "decode" };
        for (fault, what) in [(&broken, "request_failed"), (&cut, "read_failed")] {
            serving.output.clear_faults();
            serving.output.set_fault(fault.clone());
            assert_own(serving.smg.post(CHAT, &chat()).await, 502, &format!("{leg}_{what}")).await;
        }
        let Some(prefill) = &serving.prefill else { continue };
        serving.output.clear_faults();
        serving.output.set_fault(Fault::generation().hang());
        for (fault, what) in [(&broken, "request_failed"), (&cut, "read_failed")] {
            prefill.clear_faults();
            prefill.set_fault(fault.clone());
            // Under parallel dispatch only the head of the prefill's answer counts.
            if dispatch == Dispatch::Sequential || what == "request_failed" {
                assert_own(serving.smg.post(CHAT, &chat()).await, 502, &format!("prefill_{what}")).await;
            }
        }
        let path = "/v1/messages/count_tokens";
        prefill.set_fault(Fault::path(path).reset_unanswered());
        let response = serving.smg.post(path, &chat()).await;
        assert_eq!(response.status(), 502);
        assert_eq!(response.headers()["x-smg-error-code"], "prefill_count_tokens_failed");
        assert!(is_documented("prefill_count_tokens_failed"));
    }
}

#[tokio::test]
async fn what_engines_answer_passes_with_the_code_of_its_leg_and_status() {
    let flags = ["--disable-retries", "--disable-circuit-breaker"];
    let statuses = [
        (400, "bad_request"),
        (404, "not_found"),
        (500, "internal_error"),
        (502, "bad_gateway"),
        (503, "unavailable"),
        (401, "error"),
        (429, "error"),
    ];
    let words = r#"{"error":{"message":"from the engine","type":"T","code":7}}"#;
    for dispatch in DISPATCHES {
        let serving = Serving::scripted(dispatch, &flags).await;
        for (status, name) in statuses {
            for engine in serving.engines() {
                let is_output = std::ptr::eq(engine, &serving.output);
                serving.engines().for_each(MockEngine::clear_faults);
                serving.engines().for_each(|engine| engine.set_fault(instant_prefill()));
                engine.clear_faults();
                engine.set_fault(Fault::generation().status(status, words));
                let code = match (dispatch, is_output) {
                    (Dispatch::Regular, _) => "worker_upstream_error".to_owned(),
                    (Dispatch::Sequential, false) => "prefill_upstream_error".to_owned(),
                    (Dispatch::Parallel, false) => format!("prefill_{name}"),
                    (_, true) => format!("decode_{name}"),
                };
                for body in [chat(), chat_stream()] {
                    assert_passed(serving.smg.post(CHAT, &body).await, status, &code, words).await;
                }
            }
        }
    }
}
