#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
//! Whole requests over scripted engines: what reaches whom, what the client gets, and that nothing stays behind.

mod engine;

use std::collections::BTreeMap;

use bytes::Bytes;
use http::{HeaderMap, StatusCode};
use http_body_util::BodyExt;
use serde_json::{Value, json};
use smg_engines::{ClientBody, Route};
use smg_fleet::worker::{Facts, Health, Intent, ModelCard, Origin, WorkerSpec};
use smg_fleet::{Snapshot, WorkerId, WorkerType};
use smg_telemetry::Metrics;
use uuid::Uuid;

use super::*;
use crate::GatewayOptions;
use engine::{Act, Engine};

/// A gateway over scripted engines.
struct Gateway {
    core: Arc<Core>,
    _tokenizer: tempfile::TempDir,
}

const PATIENCE: Duration = Duration::from_secs(20);

async fn eventually(what: &str, mut condition: impl FnMut() -> bool) {
    let deadline = StdInstant::now() + PATIENCE;
    while !condition() {
        assert!(StdInstant::now() < deadline, "not in time: {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

impl Gateway {
    fn over(engines: &[(&Engine, WorkerType)]) -> Self {
        Self::labelled(engines, &[])
    }

    fn labelled(engines: &[(&Engine, WorkerType)], labels: &[(&str, &str)]) -> Self {
        let tokenizer = engine::tokenizer();
        let core = Core::new(GatewayOptions::default(), Arc::new(Metrics::default()));
        let mut workers = BTreeMap::new();
        for (number, (engine, role)) in engines.iter().enumerate() {
            let mut spec = WorkerSpec::new(engine.url(), *role);
            spec.bootstrap_port = (*role == WorkerType::Prefill).then_some(9000);
            spec.kv_connector = engine.connector.map(str::to_owned);
            let mut reported: BTreeMap<String, String> =
                labels.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
            reported.insert("tokenizer_path".to_owned(), tokenizer.path().to_str().unwrap().to_owned());
            let facts = Facts {
                wire: Wire::Grpc,
                runtime: engine.runtime,
                labels: reported,
                models: vec![ModelCard { id: "m".to_owned(), ..ModelCard::default() }],
                ..Facts::default()
            };
            let id = WorkerId(Uuid::from_u128(number as u128 + 1));
            let worker = Worker {
                id,
                spec,
                facts: Some(facts),
                health: Health::Ready,
                intent: Intent::Active,
                origin: Origin::Api,
                job: None,
                create_revision: 1,
                mod_revision: 1,
            };
            workers.insert(id, Arc::new(worker));
        }
        crate::sync::install(&core, Snapshot { revision: 1, workers, ..Snapshot::default() }).unwrap();
        Self { core, _tokenizer: tokenizer }
    }

    async fn send(&self, route: Route, body: Value) -> Response<Body> {
        let body = ClientBody::parse(Bytes::from(body.to_string()), route).unwrap();
        let inbound = Inbound {
            route,
            headers: HeaderMap::new(),
            body,
            request_id: Arc::from("asked"),
            arrived: StdInstant::now(),
            trace: None,
            explain: false,
        };
        crate::dispatch::serve(&self.core, inbound).await
    }

    async fn json(&self, route: Route, body: Value) -> (StatusCode, Value) {
        let response = self.send(route, body).await;
        let status = response.status();
        let bytes = response.into_body().collect().await.unwrap().to_bytes();
        (status, serde_json::from_slice(&bytes).unwrap_or_else(|_| panic!("{bytes:?}")))
    }

    async fn text(&self, route: Route, body: Value) -> (StatusCode, String) {
        let response = self.send(route, body).await;
        let status = response.status();
        let bytes = response.into_body().collect().await.unwrap().to_bytes();
        (status, String::from_utf8(bytes.to_vec()).unwrap())
    }

    /// Waits until no leg is left, and looks whether all that legs hold has been given back.
    async fn is_idle(&self) {
        eventually("every leg is over", || self.core.background.is_empty()).await;
        assert!(self.core.rooms.is_empty());
        for worker in self.core.table.load().runtimes() {
            assert_eq!((worker.load(), worker.window.in_use()), (0, 0), "{}", worker.url());
        }
    }
}

fn chat() -> Value {
    json!({"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 50})
}

fn with(mut body: Value, name: &str, value: Value) -> Value {
    body[name] = value;
    body
}

async fn sglang() -> (Engine, Engine) {
    let prefill = Engine::sglang().await;
    let decode = Engine::sglang().await.meeting(&prefill);
    (prefill, decode)
}

#[tokio::test]
async fn a_sglang_pair_meets_in_one_room_and_the_decodes_output_is_the_answer() {
    let (prefill, decode) = sglang().await;
    let gateway = Gateway::over(&[(&prefill, WorkerType::Prefill), (&decode, WorkerType::Decode)]);
    let (status, answer) = gateway.json(Route::ChatCompletions, chat()).await;
    assert_eq!(status, StatusCode::OK, "{answer}");
    assert_eq!(answer["choices"][0]["message"]["content"], "hello world");
    assert_eq!(answer["choices"][0]["finish_reason"], "stop");
    assert_eq!(answer["usage"]["prompt_tokens_details"]["cached_tokens"], 3, "as the prefill says");
    let (sent, received) = (prefill.requests(), decode.requests());
    assert_eq!((sent.len(), received.len()), (1, 1));
    assert_eq!(sent[0].id, received[0].id, "both legs go by one id");
    assert_eq!(sent[0].room, received[0].room);
    assert_eq!(sent[0].bootstrap, Some(("127.0.0.1".to_owned(), 9000)));
    assert_eq!(sent[0].prompt, b"user:hi\na:");
    gateway.is_idle().await;
    assert_eq!((prefill.aborts().len(), decode.aborts().len()), (0, 0));
}

#[tokio::test]
async fn a_stream_is_sent_as_it_comes_and_ends_with_done() {
    let (prefill, decode) = sglang().await;
    let gateway = Gateway::over(&[(&prefill, WorkerType::Prefill), (&decode, WorkerType::Decode)]);
    let (status, text) = gateway.text(Route::ChatCompletions, with(chat(), "stream", json!(true))).await;
    assert_eq!(status, StatusCode::OK, "{text}");
    assert!(text.ends_with("data: [DONE]\n\n"), "{text}");
    let mut content = String::new();
    for event in text.lines().filter_map(|line| line.strip_prefix("data: {")) {
        let event: Value = serde_json::from_str(&format!("{{{event}")).unwrap();
        content.push_str(event["choices"][0]["delta"]["content"].as_str().unwrap_or_default());
    }
    assert_eq!(content, "hello world");
    gateway.is_idle().await;
    let metrics = String::from_utf8(gateway.core.metrics.render().unwrap()).unwrap();
    assert!(metrics.contains("smg_pd_ttft_seconds_count{backend_type=\"pd\",model=\"m\",runtime=\"sglang\"} 1"));
    assert!(metrics.contains("smg_router_ttft_seconds_count{backend_type=\"pd\""), "{metrics}");
}

#[tokio::test]
async fn several_samples_are_as_many_dispatches_each_in_its_room() {
    let (prefill, decode) = sglang().await;
    let gateway = Gateway::over(&[(&prefill, WorkerType::Prefill), (&decode, WorkerType::Decode)]);
    let (status, answer) = gateway.json(Route::ChatCompletions, with(chat(), "n", json!(4))).await;
    assert_eq!(status, StatusCode::OK, "{answer}");
    let choices = answer["choices"].as_array().unwrap();
    let indices: Vec<_> = choices.iter().map(|choice| choice["index"].as_u64().unwrap()).collect();
    assert_eq!(indices, [0, 1, 2, 3]);
    let (sent, received) = (prefill.requests(), decode.requests());
    let rooms: std::collections::BTreeSet<_> = sent.iter().map(|request| request.room).collect();
    assert_eq!((sent.len(), received.len(), rooms.len()), (4, 4, 4));
    for sample in 0..4 {
        assert!(sent.iter().any(|request| request.id.ends_with(&format!("-{sample}"))));
    }
    gateway.is_idle().await;
}

#[tokio::test]
async fn a_prefill_that_does_not_start_answers_at_once_and_its_decode_is_aborted_at_once() {
    let (prefill, decode) = sglang().await;
    prefill.set(Act::Fail(tonic::Code::InvalidArgument, "too hot"));
    decode.set(Act::Silent);
    let gateway = Gateway::over(&[(&prefill, WorkerType::Prefill), (&decode, WorkerType::Decode)]);
    let (status, answer) = gateway.json(Route::ChatCompletions, chat()).await;
    assert_eq!(status, StatusCode::BAD_REQUEST, "{answer}");
    assert_eq!(answer["error"]["code"], "prefill_worker_failed_to_start");
    assert_eq!(answer["error"]["message"], "Prefill worker failed to start: too hot");
    gateway.is_idle().await;
    assert_eq!(prefill.aborts().len(), 0);
    assert_eq!(decode.requests().len(), decode.aborts().len().min(1), "what arrived was aborted");
    let metrics = String::from_utf8(gateway.core.metrics.render().unwrap()).unwrap();
    let failures = format!("smg_worker_cb_outcomes_total{{outcome=\"failure\",worker=\"{}\"}} 0", decode.url());
    assert!(metrics.contains(&failures), "the decode is not to blame: {metrics}");
}

#[tokio::test]
async fn a_decode_that_does_not_start_aborts_its_prefill() {
    let (prefill, decode) = sglang().await;
    prefill.set(Act::Silent);
    decode.set(Act::Fail(tonic::Code::InvalidArgument, "no"));
    let gateway = Gateway::over(&[(&prefill, WorkerType::Prefill), (&decode, WorkerType::Decode)]);
    let (status, answer) = gateway.json(Route::ChatCompletions, chat()).await;
    assert_eq!((status, &answer["error"]["code"]), (StatusCode::BAD_REQUEST, &json!("decode_worker_failed_to_start")));
    gateway.is_idle().await;
    assert_eq!(prefill.requests().len(), prefill.aborts().len().min(1));
}

#[tokio::test]
async fn a_client_that_leaves_aborts_the_prefill_at_once_and_the_decode_with_its_first_reply() {
    let (prefill, decode) = sglang().await;
    prefill.set(Act::Silent);
    decode.set(Act::Silent);
    let gateway = Gateway::over(&[(&prefill, WorkerType::Prefill), (&decode, WorkerType::Decode)]);
    let answer = gateway.send(Route::ChatCompletions, with(chat(), "stream", json!(true)));
    let arrived = eventually("both legs arrive", || prefill.requests().len() == 1 && decode.requests().len() == 1);
    tokio::select! {
        _ = answer => panic!("engines that say nothing were answered for"),
        () = arrived => {}
    }
    eventually("the prefill is aborted", || prefill.aborts().len() == 1).await;
    assert_eq!(decode.aborts().len(), 0, "its engine may be receiving the KV cache");
    assert_eq!(gateway.core.rooms.len(), 1, "the room is held as long as the decode");
    decode.set(Act::Serve);
    eventually("the decode is aborted", || decode.aborts().len() == 1).await;
    gateway.is_idle().await;
}

#[tokio::test]
async fn a_vllm_prefill_hands_over_what_the_decode_gets_verbatim() {
    let (prefill, decode) = (Engine::vllm().await, Engine::vllm().await);
    let gateway = Gateway::over(&[(&prefill, WorkerType::Prefill), (&decode, WorkerType::Decode)]);
    let (status, answer) = gateway.json(Route::ChatCompletions, chat()).await;
    assert_eq!(status, StatusCode::OK, "{answer}");
    assert_eq!(answer["choices"][0]["message"]["content"], "hello world");
    let (sent, received) = (&prefill.requests()[0], &decode.requests()[0]);
    assert_eq!(sent.handoff.as_deref(), Some(r#"{"do_remote_decode":true,"do_remote_prefill":false}"#));
    assert_eq!((sent.max_tokens, sent.stream), (Some(1), false));
    assert_eq!(received.handoff.as_deref(), Some(engine::HANDOFF));
    assert_eq!((sent.id.as_str(), received.max_tokens), (received.id.as_str(), Some(50)));
    gateway.is_idle().await;
    let metrics = String::from_utf8(gateway.core.metrics.render().unwrap()).unwrap();
    assert!(metrics.contains("smg_pd_kv_connector_mode_total{mode=\"nixl\"} 1"), "{metrics}");
}

#[tokio::test]
async fn a_failed_vllm_prefill_never_reaches_the_decode() {
    let (prefill, decode) = (Engine::vllm().await, Engine::vllm().await);
    prefill.set(Act::Fail(tonic::Code::NotFound, "no adapter"));
    let gateway = Gateway::over(&[(&prefill, WorkerType::Prefill), (&decode, WorkerType::Decode)]);
    let (status, answer) = gateway.json(Route::ChatCompletions, chat()).await;
    assert_eq!((status, &answer["error"]["code"]), (StatusCode::NOT_FOUND, &json!("prefill_worker_failed_to_start")));
    assert_eq!(decode.requests().len(), 0);
    gateway.is_idle().await;
}

#[tokio::test]
async fn an_attempt_on_a_broken_pair_is_followed_by_one_with_a_new_id() {
    let (prefill, decode) = (Engine::vllm().await, Engine::vllm().await);
    prefill.set(Act::FailOnce(tonic::Code::Unavailable, "draining"));
    let gateway = Gateway::over(&[(&prefill, WorkerType::Prefill), (&decode, WorkerType::Decode)]);
    let (status, answer) = gateway.json(Route::ChatCompletions, chat()).await;
    assert_eq!(status, StatusCode::OK, "{answer}");
    let sent = prefill.requests();
    assert_eq!(sent.len(), 2);
    assert_ne!(sent[0].id, sent[1].id);
    gateway.is_idle().await;
}

#[tokio::test]
async fn a_prompt_longer_than_the_smaller_window_reaches_no_engine() {
    let (prefill, decode) = sglang().await;
    let engines = [(&prefill, WorkerType::Prefill), (&decode, WorkerType::Decode)];
    let gateway = Gateway::labelled(&engines, &[("context_length", "9")]);
    let (status, answer) = gateway.json(Route::ChatCompletions, chat()).await;
    assert_eq!((status, &answer["error"]["code"]), (StatusCode::BAD_REQUEST, &json!("context_length_exceeded")));
    let message = "This model's maximum context length is 9 tokens. However, your request has 10 input tokens. \
                   Please reduce the length of the input.";
    assert_eq!(answer["error"]["message"], message);
    assert_eq!((prefill.requests().len(), decode.requests().len()), (0, 0));
    gateway.is_idle().await;
}

#[tokio::test]
async fn a_full_decode_window_sheds_and_reaches_no_engine() {
    let (prefill, decode) = sglang().await;
    let engines = [(&prefill, WorkerType::Prefill), (&decode, WorkerType::Decode)];
    let gateway = Gateway::labelled(&engines, &[("max_running_requests", "2")]);
    let response = gateway.send(Route::ChatCompletions, with(chat(), "n", json!(3))).await;
    assert_eq!(response.status(), StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(response.headers()["x-smg-error-code"], "worker_overload_protection_shed");
    assert!(response.headers().contains_key(header::RETRY_AFTER));
    assert_eq!((prefill.requests().len(), decode.requests().len()), (0, 0));
    gateway.is_idle().await;
}

#[tokio::test]
async fn tokens_are_counted_without_any_worker() {
    let (prefill, decode) = sglang().await;
    let gateway = Gateway::over(&[(&prefill, WorkerType::Prefill), (&decode, WorkerType::Decode)]);
    let body = json!({"model": "m", "messages": [{"role": "user", "content": "hi"}]});
    let (status, answer) = gateway.json(Route::CountTokens, body).await;
    assert_eq!((status, answer), (StatusCode::OK, json!({"input_tokens": 10})));
    assert_eq!((prefill.requests().len(), decode.requests().len()), (0, 0));
}

#[tokio::test]
async fn routes_that_generate_nothing_are_refused_before_any_leg() {
    let (prefill, decode) = sglang().await;
    let gateway = Gateway::over(&[(&prefill, WorkerType::Prefill), (&decode, WorkerType::Decode)]);
    for route in [Route::Rerank, Route::Embeddings, Route::Classify] {
        let (status, _) =
            gateway.json(route, json!({"model": "m", "query": "a", "documents": ["b"], "input": "c"})).await;
        assert_eq!(status, StatusCode::NOT_IMPLEMENTED, "{route:?}");
    }
    assert_eq!((prefill.requests().len(), decode.requests().len()), (0, 0));
}

#[tokio::test]
async fn a_stop_string_that_the_engine_does_not_know_ends_the_answer_and_the_engine() {
    let (prefill, decode) = sglang().await;
    decode.set(Act::Forever);
    let gateway = Gateway::over(&[(&prefill, WorkerType::Prefill), (&decode, WorkerType::Decode)]);
    let (status, answer) = gateway.json(Route::ChatCompletions, with(chat(), "stop", json!(["o w"]))).await;
    assert_eq!(status, StatusCode::OK, "{answer}");
    assert_eq!(answer["choices"][0]["message"]["content"], "hell");
    assert_eq!(answer["choices"][0]["finish_reason"], "stop");
    gateway.is_idle().await;
    assert_eq!(decode.aborts().len(), 1);
}

#[tokio::test]
async fn a_stream_that_breaks_ends_with_an_error_event() {
    let (prefill, decode) = sglang().await;
    decode.set(Act::BreakAfterFirst);
    let gateway = Gateway::over(&[(&prefill, WorkerType::Prefill), (&decode, WorkerType::Decode)]);
    let (status, text) = gateway.text(Route::ChatCompletions, with(chat(), "stream", json!(true))).await;
    assert_eq!(status, StatusCode::OK);
    assert!(text.contains("\"type\":\"stream_error\"") && text.ends_with("data: [DONE]\n\n"), "{text}");
    gateway.is_idle().await;
}

#[tokio::test]
async fn a_pair_of_another_engine_is_refused() {
    let (mut prefill, mut decode) = sglang().await;
    (prefill.runtime, decode.runtime) = (Runtime::Trtllm, Runtime::Trtllm);
    let gateway = Gateway::over(&[(&prefill, WorkerType::Prefill), (&decode, WorkerType::Decode)]);
    let (status, answer) = gateway.json(Route::ChatCompletions, chat()).await;
    assert_eq!((status, &answer["error"]["code"]), (StatusCode::BAD_REQUEST, &json!("runtime_pd_not_supported")));
    assert_eq!(answer["error"]["message"], "This runtime does not support PD disaggregated mode");
    assert_eq!((prefill.requests().len(), decode.requests().len()), (0, 0));
}
