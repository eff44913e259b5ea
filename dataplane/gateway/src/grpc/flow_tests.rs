#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
//! Whole requests over mock engines: what reaches whom, what the client gets, and that nothing stays behind.

use std::collections::BTreeMap;

use bytes::Bytes;
use http::{HeaderMap, StatusCode};
use http_body_util::BodyExt;
use mock_engine::{CallFault, Connector, MockEngine, Role};
use serde_json::{Value, json};
use smg_engines::{ClientBody, Route};
use smg_fleet::worker::{Facts, Health, Intent, ModelCard, Origin, WorkerSpec};
use smg_fleet::{Runtime, Snapshot, WorkerId, WorkerType};
use smg_telemetry::Metrics;
use uuid::Uuid;

use super::*;
use crate::GatewayOptions;

/// What engines of these tests say.
const SAID: &str = "hello world";

/// A mock engine, and what the fleet knows of it. It goes on with a request until it is told to stop.
struct Engine {
    mock: MockEngine,
    role: WorkerType,
    runtime: Runtime,
}

impl Engine {
    async fn start(runtime: Runtime, role: WorkerType) -> Self {
        Self::with(runtime, role, |builder| builder).await
    }

    async fn with(
        runtime: Runtime,
        role: WorkerType,
        tune: impl FnOnce(mock_engine::Builder) -> mock_engine::Builder,
    ) -> Self {
        // A decode reports what was transferred as cached.
        let (mock_role, cached) = if role == WorkerType::Prefill { (Role::Prefill, 3) } else { (Role::Decode, 5) };
        let builder =
            MockEngine::builder().grpc().role(mock_role).model("m").cached_tokens(cached).overlooks_dropped_calls(true);
        let builder = match runtime {
            Runtime::Vllm => builder.engine(mock_engine::Engine::Vllm).connector(Connector::Nixl),
            _ => builder.engine(mock_engine::Engine::Sglang),
        };
        let mock = tune(builder).start().await.unwrap();
        mock.replies_with(Some(SAID));
        Self { mock, role, runtime }
    }
}

async fn pair(runtime: Runtime) -> [Engine; 2] {
    [Engine::start(runtime, WorkerType::Prefill).await, Engine::start(runtime, WorkerType::Decode).await]
}

/// A gateway over mock engines.
struct Gateway {
    core: Arc<Core>,
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
    fn over(engines: &[Engine; 2]) -> Self {
        Self::labelled(engines, &[])
    }

    fn labelled(engines: &[Engine; 2], labels: &[(&str, &str)]) -> Self {
        let core = Core::new(GatewayOptions::default(), Arc::new(Metrics::default()));
        let mut workers = BTreeMap::new();
        for (number, engine) in engines.iter().enumerate() {
            let mut spec = WorkerSpec::new(engine.mock.url(), engine.role);
            spec.bootstrap_port = engine.mock.bootstrap_port();
            spec.kv_connector = (engine.runtime == Runtime::Vllm).then(|| "NixlConnector".to_owned());
            let mut reported: BTreeMap<String, String> =
                labels.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
            let tokenizer = mock_engine::tokenizer_path().to_str().unwrap();
            reported.insert("tokenizer_path".to_owned(), tokenizer.to_owned());
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
        Self { core }
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

/// How often engines were called.
fn calls(engines: &[Engine; 2]) -> [usize; 2] {
    engines.each_ref().map(|engine| engine.mock.calls().len())
}

fn room(call: &mock_engine::Call) -> i32 {
    call.sglang().unwrap().disaggregated_params.as_ref().unwrap().bootstrap_room
}

#[tokio::test]
async fn a_sglang_pair_meets_in_one_room_and_the_decodes_output_is_the_answer() {
    let engines = pair(Runtime::Sglang).await;
    let gateway = Gateway::over(&engines);
    let (status, answer) = gateway.json(Route::ChatCompletions, chat()).await;
    assert_eq!(status, StatusCode::OK, "{answer}");
    assert_eq!(answer["choices"][0]["message"]["content"], SAID);
    assert_eq!(answer["choices"][0]["finish_reason"], "stop");
    assert_eq!(answer["usage"]["prompt_tokens_details"]["cached_tokens"], 3, "as the prefill says");
    assert_eq!(calls(&engines), [1, 1]);
    let [sent, received] = engines.each_ref().map(|engine| engine.mock.calls().remove(0));
    assert_eq!(sent.request_id(), received.request_id(), "both legs go by one id");
    assert_eq!(room(&sent), room(&received));
    let meeting = sent.sglang().unwrap().disaggregated_params.clone().unwrap();
    let port = i32::from(engines[0].mock.bootstrap_port().unwrap());
    assert_eq!((meeting.bootstrap_host.as_str(), meeting.bootstrap_port), ("127.0.0.1", port));
    assert_eq!(sent.token_ids(), received.token_ids());
    assert!(mock_engine::decode(sent.token_ids()).contains("hi"));
    gateway.is_idle().await;
    assert!(engines.iter().all(|engine| engine.mock.aborts().is_empty()));
}

#[tokio::test]
async fn a_stream_is_sent_as_it_comes_and_ends_with_done() {
    let engines = pair(Runtime::Sglang).await;
    let gateway = Gateway::over(&engines);
    let (status, text) = gateway.text(Route::ChatCompletions, with(chat(), "stream", json!(true))).await;
    assert_eq!(status, StatusCode::OK, "{text}");
    assert!(text.ends_with("data: [DONE]\n\n"), "{text}");
    let mut content = String::new();
    for event in text.lines().filter_map(|line| line.strip_prefix("data: {")) {
        let event: Value = serde_json::from_str(&format!("{{{event}")).unwrap();
        content.push_str(event["choices"][0]["delta"]["content"].as_str().unwrap_or_default());
    }
    assert_eq!(content, SAID);
    gateway.is_idle().await;
    let metrics = String::from_utf8(gateway.core.metrics.render().unwrap()).unwrap();
    assert!(metrics.contains("smg_pd_ttft_seconds_count{backend_type=\"pd\",model=\"m\",runtime=\"sglang\"} 1"));
    assert!(metrics.contains("smg_router_ttft_seconds_count{backend_type=\"pd\""), "{metrics}");
}

#[tokio::test]
async fn several_samples_are_as_many_dispatches_each_in_its_room() {
    let engines = pair(Runtime::Sglang).await;
    let gateway = Gateway::over(&engines);
    let (status, answer) = gateway.json(Route::ChatCompletions, with(chat(), "n", json!(4))).await;
    assert_eq!(status, StatusCode::OK, "{answer}");
    let choices = answer["choices"].as_array().unwrap();
    let indices: Vec<_> = choices.iter().map(|choice| choice["index"].as_u64().unwrap()).collect();
    assert_eq!(indices, [0, 1, 2, 3]);
    let sent = engines[0].mock.calls();
    let rooms: std::collections::BTreeSet<_> = sent.iter().map(room).collect();
    assert_eq!((calls(&engines), rooms.len()), ([4, 4], 4));
    for sample in 0..4 {
        assert!(sent.iter().any(|call| call.request_id().ends_with(&format!("-{sample}"))));
    }
    gateway.is_idle().await;
}

#[tokio::test]
async fn a_prefill_that_does_not_start_answers_at_once_and_its_decode_is_aborted_at_once() {
    let engines = pair(Runtime::Sglang).await;
    let [prefill, decode] = &engines;
    prefill.mock.set_call_fault(CallFault::generate().refuse(tonic::Code::InvalidArgument, "too hot"));
    let gateway = Gateway::over(&engines);
    let (status, answer) = gateway.json(Route::ChatCompletions, chat()).await;
    assert_eq!(status, StatusCode::BAD_REQUEST, "{answer}");
    assert_eq!(answer["error"]["code"], "prefill_worker_failed_to_start");
    assert_eq!(answer["error"]["message"], "Prefill worker failed to start: too hot");
    gateway.is_idle().await;
    assert_eq!(prefill.mock.aborts().len(), 0);
    assert_eq!(decode.mock.calls().len(), decode.mock.aborts().len().min(1), "what arrived was aborted");
    let metrics = String::from_utf8(gateway.core.metrics.render().unwrap()).unwrap();
    let failures = format!("smg_worker_cb_outcomes_total{{outcome=\"failure\",worker=\"{}\"}} 0", decode.mock.url());
    assert!(metrics.contains(&failures), "the decode is not to blame: {metrics}");
}

#[tokio::test]
async fn a_decode_that_does_not_start_aborts_its_prefill() {
    let engines = pair(Runtime::Sglang).await;
    let [prefill, decode] = &engines;
    decode.mock.set_call_fault(CallFault::generate().refuse(tonic::Code::InvalidArgument, "no"));
    let gateway = Gateway::over(&engines);
    let (status, answer) = gateway.json(Route::ChatCompletions, chat()).await;
    assert_eq!((status, &answer["error"]["code"]), (StatusCode::BAD_REQUEST, &json!("decode_worker_failed_to_start")));
    gateway.is_idle().await;
    assert_eq!(prefill.mock.calls().len(), prefill.mock.aborts().len().min(1));
}

#[tokio::test]
async fn a_client_that_leaves_aborts_the_prefill_at_once_and_the_decode_with_its_first_reply() {
    let engines = pair(Runtime::Sglang).await;
    let [prefill, decode] = &engines;
    prefill.mock.set_call_fault(CallFault::generate().hang());
    // Its first reply comes late, and says nothing.
    decode.mock.set_call_fault(CallFault::generate().delay(Duration::from_secs(3)).empty_message());
    let gateway = Gateway::over(&engines);
    let answer = gateway.send(Route::ChatCompletions, with(chat(), "stream", json!(true)));
    let arrived =
        eventually("both legs arrive", || prefill.mock.calls().len() == 1 && decode.mock.call_count("Generate") == 1);
    tokio::select! {
        _ = answer => panic!("engines that say nothing were answered for"),
        () = arrived => {}
    }
    eventually("the prefill is aborted", || prefill.mock.aborts().len() == 1).await;
    eventually("the decode is aborted", || {
        assert!(gateway.core.rooms.len() == 1 || !decode.mock.aborts().is_empty(), "the decode holds the room");
        !decode.mock.aborts().is_empty()
    })
    .await;
    // Before it replied its engine might have been receiving the KV cache.
    let reply = decode.mock.calls()[0].arrived_at;
    assert!(decode.mock.aborts().iter().all(|abort| abort.at >= reply));
    assert!(prefill.mock.aborts()[0].at < reply, "the prefill was not kept waiting");
    gateway.is_idle().await;
}

#[tokio::test]
async fn a_vllm_prefill_hands_over_what_the_decode_gets_verbatim() {
    let engines = pair(Runtime::Vllm).await;
    let [prefill, decode] = &engines;
    let gateway = Gateway::over(&engines);
    let (status, answer) = gateway.json(Route::ChatCompletions, chat()).await;
    assert_eq!(status, StatusCode::OK, "{answer}");
    assert_eq!(answer["choices"][0]["message"]["content"], SAID);
    let (sent, received) = (prefill.mock.calls().remove(0), decode.mock.calls().remove(0));
    assert_eq!(sent.request_id(), received.request_id());
    let (sent, received) = (sent.vllm().unwrap(), received.vllm().unwrap());
    let asked = r#"{"do_remote_decode":true,"do_remote_prefill":false}"#;
    assert_eq!(sent.kv_transfer_params_json.as_deref(), Some(asked));
    let limit = |request: &smg_services::engines::vllm::GenerateRequest| {
        request.sampling_params.as_ref().and_then(|params| params.max_tokens)
    };
    assert_eq!((limit(sent), sent.stream, limit(received)), (Some(1), false, Some(50)));
    // All fields in the engine's order, those included that a gateway knows nothing of.
    let handed = received.kv_transfer_params_json.as_deref().unwrap();
    let engine_id = format!("]],\"remote_engine_id\":\"{}\",\"remote_request_id\":", prefill.mock.engine_id());
    assert!(
        handed.starts_with(r#"{"do_remote_prefill":true,"do_remote_decode":false,"remote_block_ids":[["#),
        "{handed}"
    );
    assert!(handed.contains(&engine_id), "{handed}");
    assert!(handed.ends_with(r#","transfer_mode":"pull","remote_prefill_cached_tokens":0}"#), "{handed}");
    assert!(decode.mock.external_prompt_tokens() > 0 && decode.mock.local_prompt_tokens() == 0);
    gateway.is_idle().await;
    let metrics = String::from_utf8(gateway.core.metrics.render().unwrap()).unwrap();
    assert!(metrics.contains("smg_pd_kv_connector_mode_total{mode=\"nixl\"} 1"), "{metrics}");
}

#[tokio::test]
async fn a_failed_vllm_prefill_never_reaches_the_decode() {
    let engines = pair(Runtime::Vllm).await;
    engines[0].mock.set_call_fault(CallFault::generate().refuse(tonic::Code::NotFound, "no adapter"));
    let gateway = Gateway::over(&engines);
    let (status, answer) = gateway.json(Route::ChatCompletions, chat()).await;
    assert_eq!((status, &answer["error"]["code"]), (StatusCode::NOT_FOUND, &json!("prefill_worker_failed_to_start")));
    assert_eq!(calls(&engines)[1], 0);
    gateway.is_idle().await;
}

#[tokio::test]
async fn an_attempt_on_a_broken_pair_is_followed_by_one_with_a_new_id() {
    let engines = pair(Runtime::Vllm).await;
    engines[0].mock.set_call_fault(CallFault::generate().refuse(tonic::Code::Unavailable, "draining").times(1));
    let gateway = Gateway::over(&engines);
    let (status, answer) = gateway.json(Route::ChatCompletions, chat()).await;
    assert_eq!(status, StatusCode::OK, "{answer}");
    let sent = engines[0].mock.calls();
    assert_eq!(sent.len(), 2);
    assert_ne!(sent[0].request_id(), sent[1].request_id());
    gateway.is_idle().await;
}

#[tokio::test]
async fn a_prompt_longer_than_the_smaller_window_reaches_no_engine() {
    let engines = pair(Runtime::Sglang).await;
    let (_, counted) = Gateway::over(&engines).json(Route::CountTokens, chat()).await;
    let tokens = counted["input_tokens"].as_u64().unwrap();
    let limit = (tokens - 1).to_string();
    let gateway = Gateway::labelled(&engines, &[("context_length", &limit)]);
    let (status, answer) = gateway.json(Route::ChatCompletions, chat()).await;
    assert_eq!((status, &answer["error"]["code"]), (StatusCode::BAD_REQUEST, &json!("context_length_exceeded")));
    let message = format!(
        "This model's maximum context length is {limit} tokens. However, your request has {tokens} input tokens. \
         Please reduce the length of the input."
    );
    assert_eq!(answer["error"]["message"], message);
    assert_eq!(calls(&engines), [0, 0]);
    gateway.is_idle().await;
    let exact = Gateway::labelled(&engines, &[("context_length", &tokens.to_string())]);
    assert_eq!(exact.json(Route::ChatCompletions, chat()).await.0, StatusCode::OK, "strictly longer");
}

#[tokio::test]
async fn a_full_decode_window_sheds_and_reaches_no_engine() {
    let engines = pair(Runtime::Sglang).await;
    let gateway = Gateway::labelled(&engines, &[("max_running_requests", "2")]);
    let response = gateway.send(Route::ChatCompletions, with(chat(), "n", json!(3))).await;
    assert_eq!(response.status(), StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(response.headers()["x-smg-error-code"], "worker_overload_protection_shed");
    assert!(response.headers().contains_key(header::RETRY_AFTER));
    assert_eq!(calls(&engines), [0, 0]);
    gateway.is_idle().await;
}

#[tokio::test]
async fn tokens_are_counted_without_any_worker_and_are_those_that_engines_get() {
    let engines = pair(Runtime::Sglang).await;
    let gateway = Gateway::over(&engines);
    let (status, answer) = gateway.json(Route::CountTokens, chat()).await;
    assert_eq!((status, calls(&engines)), (StatusCode::OK, [0, 0]));
    gateway.json(Route::ChatCompletions, chat()).await;
    assert_eq!(answer, json!({"input_tokens": engines[0].mock.calls()[0].token_ids().len()}));
}

#[tokio::test]
async fn routes_that_generate_nothing_are_refused_before_any_leg() {
    let engines = pair(Runtime::Sglang).await;
    let gateway = Gateway::over(&engines);
    for route in [Route::Rerank, Route::Embeddings, Route::Classify] {
        let (status, _) =
            gateway.json(route, json!({"model": "m", "query": "a", "documents": ["b"], "input": "c"})).await;
        assert_eq!(status, StatusCode::NOT_IMPLEMENTED, "{route:?}");
    }
    assert_eq!(calls(&engines), [0, 0]);
}

#[tokio::test]
async fn a_stop_string_that_the_engine_does_not_know_ends_the_answer_and_the_engine() {
    let prefill = Engine::start(Runtime::Sglang, WorkerType::Prefill).await;
    let slow = |builder: mock_engine::Builder| builder.token_delay(Duration::from_millis(20));
    let decode = Engine::with(Runtime::Sglang, WorkerType::Decode, slow).await;
    decode.mock.replies_with(Some(&format!("{SAID}{}", " and so on".repeat(100))));
    let engines = [prefill, decode];
    let gateway = Gateway::over(&engines);
    let mut body = with(chat(), "stop", json!(["o w"]));
    body["max_tokens"] = json!(900);
    let (status, answer) = gateway.json(Route::ChatCompletions, body).await;
    assert_eq!(status, StatusCode::OK, "{answer}");
    assert_eq!(answer["choices"][0]["message"]["content"], "hell");
    assert_eq!(answer["choices"][0]["finish_reason"], "stop");
    gateway.is_idle().await;
    assert_eq!(engines[1].mock.aborts().len(), 1);
}

#[tokio::test]
async fn a_stream_that_breaks_ends_with_an_error_event() {
    let engines = pair(Runtime::Sglang).await;
    engines[1].mock.set_call_fault(CallFault::generate().fail_after(1, tonic::Code::Internal, "broke"));
    let gateway = Gateway::over(&engines);
    let (status, text) = gateway.text(Route::ChatCompletions, with(chat(), "stream", json!(true))).await;
    assert_eq!(status, StatusCode::OK);
    assert!(text.contains("\"type\":\"stream_error\"") && text.ends_with("data: [DONE]\n\n"), "{text}");
    gateway.is_idle().await;
}

#[tokio::test]
async fn a_pair_of_another_engine_is_refused() {
    let mut engines = pair(Runtime::Sglang).await;
    engines.iter_mut().for_each(|engine| engine.runtime = Runtime::Trtllm);
    let gateway = Gateway::over(&engines);
    let (status, answer) = gateway.json(Route::ChatCompletions, chat()).await;
    assert_eq!((status, &answer["error"]["code"]), (StatusCode::BAD_REQUEST, &json!("runtime_pd_not_supported")));
    assert_eq!(answer["error"]["message"], "This runtime does not support PD disaggregated mode");
    assert_eq!(calls(&engines), [0, 0]);
}
