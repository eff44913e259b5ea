//! Requests through workers that speak gRPC: SGLang and TokenSpeed in parallel, vLLM in sequence, and workers that serve alone.
//!
//! The mock engines take and give tokens of a real tokenizer, keep a ledger of every KV cache, and remember who aborted what and when. After
//! each test nothing may be left inside them.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod answers;
mod connectors;
mod failures;
mod fleets;
mod leaving;
mod refusals;
#[path = "../support/mod.rs"]
mod support;
mod texts;
mod wires;

use std::time::{Duration, Instant};

use futures::StreamExt;
use mock_engine::{CallEnd, CallFault};
use reqwest::StatusCode;
use serde_json::{Value, json};
use support::*;
use tonic::Code;

const CHAT: &str = "/v1/chat/completions";

/// An engine that speaks gRPC.
async fn grpc(engine: Engine, role: Role) -> MockEngine {
    builder(engine, role).start().await.unwrap()
}

fn builder(engine: Engine, role: Role) -> mock_engine::Builder {
    // A decode reports what was transferred as cached.
    let cached = if role == Role::Decode { 5 } else { 1 };
    // Only an abort stops a request: that its stream was dropped an engine may never learn.
    let builder = MockEngine::builder().grpc().engine(engine).role(role).overlooks_dropped_calls(true);
    let builder = builder.model(MODEL).cached_tokens(cached);
    if engine == Engine::Vllm { builder.connector(Connector::Nixl) } else { builder }
}

/// A pair behind a gateway that was started without workers.
struct Pair {
    smg: Smg,
    prefill: MockEngine,
    decode: MockEngine,
}

impl Pair {
    async fn of(engine: Engine, flags: &[&str]) -> Self {
        Self::behind(Smg::launch(flags).await, grpc(engine, Role::Prefill).await, grpc(engine, Role::Decode).await)
            .await
    }

    async fn behind(smg: Smg, prefill: MockEngine, decode: MockEngine) -> Self {
        smg.register_pair(&prefill, &decode).await;
        Self { smg, prefill, decode }
    }

    fn engines(&self) -> [&MockEngine; 2] {
        [&self.prefill, &self.decode]
    }

    /// Waits until nothing of any request is left, in the gateway or in the engines.
    async fn is_clean(&self) {
        for engine in self.engines() {
            eventually("no request is inside an engine", || async { engine.open_requests().is_empty().then_some(()) })
                .await;
        }
        self.smg.until_idle().await;
        eventually("every leg is over", || async {
            (self.smg.metric("smg_grpc_legs", &[]).await == 0.0).then_some(())
        })
        .await;
    }

    async fn arrived(&self, engine: &MockEngine, calls: usize) {
        eventually("the leg arrives", || async { (engine.calls().len() >= calls).then_some(()) }).await;
    }
}

/// What an engine says to this prompt.
fn expected(engine: &MockEngine, call: usize, tokens: usize) -> String {
    mock_engine::decode(&mock_engine::expected_tokens(engine.calls()[call].token_ids(), tokens))
}

/// The room in which a leg meets its other one.
fn room(call: &mock_engine::Call) -> i64 {
    let sglang = call.sglang().and_then(|request| request.disaggregated_params.as_ref());
    let tokenspeed = call.tokenspeed().and_then(|request| request.kv_bootstrap_info.as_ref());
    let room = sglang.map(|meeting| i64::from(meeting.bootstrap_room));
    room.or_else(|| tokenspeed.map(|meeting| meeting.bootstrap_room)).unwrap()
}

/// The events of a stream, without the end marker.
fn events(text: &str) -> Vec<Value> {
    let data = text.lines().filter_map(|line| line.strip_prefix("data: ")).filter(|data| *data != "[DONE]");
    data.map(|data| serde_json::from_str(data).unwrap()).collect()
}

fn deltas(text: &str) -> String {
    let content = |event: &Value| event["choices"][0]["delta"]["content"].as_str().map(str::to_owned);
    events(text).iter().filter_map(content).collect()
}

const PAIRS: [Engine; 3] = [Engine::Sglang, Engine::Vllm, Engine::Tokenspeed];

/// Asserts that a request is answered with this status and code.
async fn assert_refused(smg: &Smg, path: &str, body: &Value, status: u16, code: &str) {
    let response = smg.post(path, body).await;
    assert_eq!(response.status().as_u16(), status, "{path} {body}");
    assert_eq!(response.headers()["x-smg-error-code"], code, "{path} {body}");
    if code.starts_with("tokenizer_not") {
        assert_eq!(response.headers()["retry-after"], "1");
    }
}
