//! What answers at a worker's address after a restart may be another engine: it gets nothing until the fleet knows what it is.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod support;

use reqwest::StatusCode;
use serde_json::{Value, json};
use support::*;

const CHAT: &str = "/v1/chat/completions";
/// No active probe helps.
const NO_PROBES: [&str; 4] = ["--disable-health-check", "--load-monitor-interval", "3600", "--disable-retries"];
/// Only active probes look.
const PROBES: [&str; 5] = ["--health-check-interval-secs", "1", "--load-monitor-interval", "3600", "--disable-retries"];

/// Another engine at the address that `gone` had.
async fn in_place_of(gone: &MockEngine, engine: Engine, model: &str) -> MockEngine {
    let other = MockEngine::builder().engine(engine).role(Role::Decode).model(model).port(gone.port());
    let other = if gone.url().starts_with("grpc") { other.grpc() } else { other };
    other.start().await.unwrap()
}

fn times_asked(engine: &MockEngine, path: &str) -> usize {
    engine.requests().iter().filter(|request| request.path == path).count()
}

async fn worker(smg: &Smg, id: &str) -> Value {
    smg.get_json(&format!("/workers/{id}")).await
}

/// A gateway with these flags and a SGLang pair, its decode registered with these fields; and the id of the decode.
async fn pair_with(flags: &[&str], fields: Value) -> (Smg, MockEngine, MockEngine, String) {
    let (prefill, decode) = (sglang(Role::Prefill).await, sglang(Role::Decode).await);
    let smg = Smg::launch(flags).await;
    smg.register(&spec(&prefill, "prefill")).await;
    let id = smg.register(&spec_with(&decode, "decode", fields)).await;
    assert_eq!(smg.post(CHAT, &chat()).await.status(), StatusCode::OK);
    (smg, prefill, decode, id)
}

#[tokio::test]
async fn a_gateway_takes_a_worker_back_only_as_the_engine_it_was() {
    for (engine, model) in [(Engine::Vllm, "other"), (Engine::Sglang, "other"), (Engine::Vllm, MODEL)] {
        let (smg, _prefill, decode, _) = pair_with(&NO_PROBES, json!({})).await;
        decode.stop().await;
        assert_eq!(smg.post(CHAT, &chat()).await.status(), StatusCode::BAD_GATEWAY);
        let other = in_place_of(&decode, engine, model).await;
        // Each time it is found well it is asked who it is; after the second time the first answer has been judged.
        eventually("it was asked twice who it is", || async { (times_asked(&other, "/v1/models") >= 2).then_some(()) })
            .await;
        assert_eq!(smg.post(CHAT, &chat()).await.status(), StatusCode::SERVICE_UNAVAILABLE, "{engine:?} {model}");
        assert_eq!(other.generation_count(), 0, "{engine:?} {model}");
        smg.logged(&["what answers is not what the fleet knows"]).await;
        other.stop().await;
        decode.start_again().await.unwrap();
        eventually("the engine that was registered is taken back", || async {
            (smg.post(CHAT, &chat()).await.status() == StatusCode::OK).then_some(())
        })
        .await;
    }
}

#[tokio::test]
async fn an_engine_that_took_the_place_of_another_becomes_what_it_is() {
    // Nothing refused a connection in between: only the list of models gives it away.
    let (smg, _prefill, decode, id) = pair_with(&PROBES, json!({})).await;
    decode.stop().await;
    let other = in_place_of(&decode, Engine::Vllm, "other").await;
    let known = eventually("the fleet knows what it is", || async {
        let known = worker(&smg, &id).await;
        (known["model_id"] == "other" && known["status"] == "ready").then_some(known)
    })
    .await;
    assert_eq!(known["runtime_type"], "vllm");
    assert_eq!(smg.metric("smg_worker_restarts_total", &[("worker_type", "decode")]).await, 1.0);
    assert_eq!(smg.post(CHAT, &chat()).await.status(), StatusCode::SERVICE_UNAVAILABLE, "the model has no decode left");
    assert_eq!(other.generation_count(), 0);
}

#[tokio::test]
async fn an_engine_that_contradicts_its_registration_leaves_rotation_until_the_right_one_is_back() {
    let declared = json!({"runtime_type": "sglang", "models": [{"id": MODEL}]});
    let (smg, _prefill, decode, id) = pair_with(&PROBES, declared).await;
    for (engine, model) in [(Engine::Vllm, MODEL), (Engine::Sglang, "other")] {
        decode.stop().await;
        let other = in_place_of(&decode, engine, model).await;
        eventually("it leaves rotation", || async { (worker(&smg, &id).await["status"] == "not_ready").then_some(()) })
            .await;
        let before = times_asked(&other, "/v1/models");
        eventually("it was looked at again", || async {
            (times_asked(&other, "/v1/models") >= before + 3).then_some(())
        })
        .await;
        assert_ne!(worker(&smg, &id).await["status"], "ready", "{engine:?} {model}");
        assert_eq!(smg.post(CHAT, &chat()).await.status(), StatusCode::SERVICE_UNAVAILABLE);
        assert_eq!(other.generation_count(), 0, "{engine:?} {model}");
        smg.logged(&["another engine answers than the one that was registered"]).await;
        other.stop().await;
        decode.start_again().await.unwrap();
        eventually("the right one is back", || async {
            (worker(&smg, &id).await["status"] == "ready" && smg.post(CHAT, &chat()).await.status() == StatusCode::OK)
                .then_some(())
        })
        .await;
    }
}

#[tokio::test]
async fn over_grpc_a_gateway_takes_a_worker_back_only_as_the_engine_it_was() {
    let start = |role| MockEngine::builder().engine(Engine::Sglang).role(role).model(MODEL).grpc().start();
    let (prefill, decode) = (start(Role::Prefill).await.unwrap(), start(Role::Decode).await.unwrap());
    let smg = Smg::launch(&NO_PROBES).await;
    smg.register_pair(&prefill, &decode).await;
    assert_eq!(smg.post(CHAT, &chat()).await.status(), StatusCode::OK);
    decode.stop().await;
    // The first call may go out on the connection that the engine is closing, which says nothing of what listens there.
    eventually("a connection was refused", || async {
        assert_ne!(smg.post(CHAT, &chat()).await.status(), StatusCode::OK);
        (smg.metric("smg_worker_stalled", &[("reason", "unreachable")]).await == 1.0).then_some(())
    })
    .await;
    let other = in_place_of(&decode, Engine::Sglang, "other").await;
    eventually("it was asked twice who it is", || async { (other.call_count("GetModelInfo") >= 2).then_some(()) })
        .await;
    assert_eq!(smg.post(CHAT, &chat()).await.status(), StatusCode::SERVICE_UNAVAILABLE);
    assert!(other.calls().is_empty());
    other.stop().await;
    decode.start_again().await.unwrap();
    eventually("the engine that was registered is taken back", || async {
        (smg.post(CHAT, &chat()).await.status() == StatusCode::OK).then_some(())
    })
    .await;
}

#[tokio::test]
async fn over_grpc_another_model_or_engine_at_the_same_address_gets_no_call() {
    let start = |role| MockEngine::builder().engine(Engine::Sglang).role(role).model(MODEL).grpc().start();
    for (engine, model) in [(Engine::Sglang, "other"), (Engine::Vllm, MODEL)] {
        let (prefill, decode) = (start(Role::Prefill).await.unwrap(), start(Role::Decode).await.unwrap());
        let smg = Smg::launch(&PROBES).await;
        smg.register(&spec(&prefill, "prefill")).await;
        let id = smg.register(&spec(&decode, "decode")).await;
        assert_eq!(smg.post(CHAT, &chat()).await.status(), StatusCode::OK);
        decode.stop().await;
        let other = in_place_of(&decode, engine, model).await;
        let runtime = if engine == Engine::Vllm { "vllm" } else { "sglang" };
        eventually("the fleet knows what it is", || async {
            let known = worker(&smg, &id).await;
            (known["model_id"] == model && known["runtime_type"] == runtime && known["status"] == "ready").then_some(())
        })
        .await;
        assert_ne!(smg.post(CHAT, &chat()).await.status(), StatusCode::OK);
        assert!(other.calls().is_empty(), "{engine:?} {model}");
    }
}
