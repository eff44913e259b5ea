//! Requests through workers that speak gRPC: SGLang and TokenSpeed in parallel, vLLM in sequence, and workers that serve alone.
//!
//! The mock engines take and give tokens of a real tokenizer, keep a ledger of every KV cache, and remember who aborted what and when. After
//! each test nothing may be left inside them.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod support;

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
async fn a_sample_that_does_not_start_fails_the_request_and_aborts_the_others() {
    let pair = Pair::of(Engine::Sglang, &["--disable-retries"]).await;
    pair.prefill.set_call_fault(CallFault::generate().refuse(Code::ResourceExhausted, "full").times(1));
    pair.prefill.set_call_fault(CallFault::generate().hang());
    let mut body = chat();
    body["n"] = json!(4);
    let response = pair.smg.post(CHAT, &body).await;
    assert_eq!(response.status(), StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(response.headers()["x-smg-error-code"], "prefill_worker_failed_to_start");
    eventually("no prefill is left", || async { pair.prefill.open_requests().is_empty().then_some(()) }).await;
}

#[tokio::test]
async fn a_leg_that_an_engine_refuses_answers_with_its_status_and_words() {
    let flags = ["--disable-retries", "--disable-circuit-breaker"];
    let statuses = [
        (Code::InvalidArgument, 400),
        (Code::NotFound, 404),
        (Code::ResourceExhausted, 429),
        (Code::Internal, 500),
        (Code::Unavailable, 503),
        (Code::DeadlineExceeded, 504),
    ];
    for engine in PAIRS {
        let pair = Pair::of(engine, &flags).await;
        let legs = [
            (&pair.prefill, "Prefill", "prefill_worker_failed_to_start"),
            (&pair.decode, "Decode", "decode_worker_failed_to_start"),
        ];
        for (leg, name, error) in legs {
            for (code, status) in statuses {
                for body in [chat(), chat_stream()] {
                    leg.set_call_fault(CallFault::generate().refuse(code, "because").times(1));
                    let response = pair.smg.post(CHAT, &body).await;
                    assert_eq!(response.status().as_u16(), status, "{engine:?} {name} {code:?}");
                    assert_eq!(response.headers()["x-smg-error-code"], error);
                    let answer: Value = response.json().await.unwrap();
                    assert_eq!(answer["error"]["message"], format!("{name} worker failed to start: because"));
                }
            }
        }
        pair.is_clean().await;
    }
}

#[tokio::test]
async fn a_failed_prefill_is_charged_to_the_prefill_alone() {
    for engine in PAIRS {
        let pair = Pair::of(engine, &["--disable-retries"]).await;
        pair.prefill.set_call_fault(CallFault::generate().refuse(Code::Unavailable, "no"));
        for _ in 0..3 {
            assert_eq!(pair.smg.post(CHAT, &chat()).await.status(), StatusCode::SERVICE_UNAVAILABLE);
        }
        pair.is_clean().await;
        let failures = async |worker: &MockEngine| {
            let labels =
                [("worker", &*worker.url()), ("outcome", "failure")].map(|(name, value)| (name, value.to_owned()));
            let labels: Vec<(&str, &str)> = labels.iter().map(|(name, value)| (*name, value.as_str())).collect();
            pair.smg.metric("smg_worker_cb_outcomes_total", &labels).await
        };
        assert_eq!((failures(&pair.prefill).await, failures(&pair.decode).await), (3.0, 0.0), "{engine:?}");
        if engine == Engine::Vllm {
            assert!(pair.decode.calls().is_empty(), "a failed prefill never reaches the decode");
        }
    }
}

#[tokio::test]
async fn a_prefill_is_aborted_when_the_client_leaves_and_a_silent_decode_is_not_yet() {
    for engine in [Engine::Sglang, Engine::Tokenspeed] {
        let pair = Pair::of(engine, &[]).await;
        pair.prefill.set_call_fault(CallFault::generate().hang());
        pair.decode.set_call_fault(CallFault::generate().delay(Duration::from_secs(3)).hang());
        let request = pair.smg.client.post(format!("{}{CHAT}", pair.smg.url)).json(&chat_stream()).send();
        let arrived = pair.arrived(&pair.prefill, 1);
        tokio::select! {
            _ = request => panic!("nobody answers"),
            () = arrived => {}
        }
        let left = Instant::now();
        eventually("the prefill is aborted", || async { (!pair.prefill.aborts().is_empty()).then_some(()) }).await;
        assert!(pair.decode.aborts().is_empty(), "{engine:?}: its engine may be receiving the KV cache");
        assert!(left.elapsed() < Duration::from_secs(20));
        assert_eq!(pair.smg.metric("smg_grpc_legs", &[("leg", "decode")]).await, 1.0, "the decode holds its place");
    }
}

#[tokio::test]
async fn a_client_that_leaves_a_running_stream_leaves_nothing_inside_the_engines() {
    for engine in PAIRS {
        let decode = builder(engine, Role::Decode).token_delay(Duration::from_millis(20)).start().await.unwrap();
        let pair = Pair::behind(Smg::launch(&[]).await, grpc(engine, Role::Prefill).await, decode).await;
        let mut body = chat_stream();
        body["max_tokens"] = json!(1000);
        let response = pair.smg.post(CHAT, &body).await;
        let mut stream = response.bytes_stream();
        stream.next().await.unwrap().unwrap();
        drop(stream);
        pair.is_clean().await;
        let end = pair.decode.calls()[0].end.clone();
        assert_eq!(end, Some(CallEnd::Aborted), "{engine:?}");
    }
}

#[tokio::test]
async fn what_an_engine_sends_that_makes_no_sense_fails_its_request_alone() {
    for engine in PAIRS {
        let pair = Pair::of(engine, &["--disable-retries", "--disable-circuit-breaker"]).await;
        let faults: [(&str, CallFault); 6] = [
            ("garbage", CallFault::generate().garbage(&[0xff; 40])),
            ("wrong sample", CallFault::generate().wrong_sample()),
            ("empty message", CallFault::generate().empty_message()),
            ("cut", CallFault::generate().cut_after(0)),
            ("too early an end", CallFault::generate().end_after(0)),
            ("too large", CallFault::generate().too_large(65 << 20)),
        ];
        for (what, fault) in faults {
            pair.decode.set_call_fault(fault.times(1));
            let response = pair.smg.post(CHAT, &chat_stream()).await;
            assert!(response.status().is_server_error(), "{engine:?} {what}: {}", response.status());
            eventually("the next request is served", || async {
                (pair.smg.post(CHAT, &chat()).await.status() == StatusCode::OK).then_some(())
            })
            .await;
        }
        pair.is_clean().await;
    }
}

#[tokio::test]
async fn a_stream_that_breaks_says_so_and_is_not_begun_again() {
    for engine in PAIRS {
        let pair = Pair::of(engine, &[]).await;
        pair.decode.set_call_fault(CallFault::generate().fail_after(2, Code::Internal, "the scheduler died").times(1));
        let text = pair.smg.post(CHAT, &chat_stream()).await.text().await.unwrap();
        assert!(text.contains("the scheduler died") && text.contains("stream_error"), "{engine:?} {text}");
        assert!(text.ends_with("data: [DONE]\n\n"), "{text}");
        assert_eq!(pair.decode.calls().len(), 1);
        pair.is_clean().await;
    }
}

#[tokio::test]
async fn an_attempt_that_failed_is_made_again_with_other_ids_and_rooms() {
    for engine in PAIRS {
        let pair = Pair::of(engine, &[]).await;
        pair.prefill.set_call_fault(CallFault::generate().refuse(Code::Unavailable, "draining").times(1));
        let response = pair.smg.post(CHAT, &chat()).await;
        assert_eq!(response.status(), StatusCode::OK, "{engine:?} {}", response.text().await.unwrap());
        let calls = pair.decode.calls();
        let last = calls.last().unwrap();
        assert_eq!(last.end, Some(CallEnd::Completed));
        pair.is_clean().await;
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

/// Asserts that a request is answered with this status and code.
async fn assert_refused(smg: &Smg, path: &str, body: &Value, status: u16, code: &str) {
    let response = smg.post(path, body).await;
    assert_eq!(response.status().as_u16(), status, "{path} {body}");
    assert_eq!(response.headers()["x-smg-error-code"], code, "{path} {body}");
    if code.starts_with("tokenizer_not") {
        assert_eq!(response.headers()["retry-after"], "1");
    }
}

#[tokio::test]
async fn what_engines_do_wrong_has_a_code() {
    let flags = ["--disable-retries", "--disable-circuit-breaker"];
    let pair = Pair::of(Engine::Vllm, &flags).await;
    pair.prefill.set_call_fault(CallFault::generate().fail_after(1, Code::Internal, "late").times(1));
    assert_refused(&pair.smg, CHAT, &chat(), 500, "prefill_stream_error").await;
    let unable = CallFault::generate().refuse(Code::FailedPrecondition, "no such rule");
    pair.decode.set_call_fault(unable.trailer("smg-constraint-failed", "engine").times(1));
    assert_refused(&pair.smg, CHAT, &chat(), 422, "constraint_failed").await;
    pair.is_clean().await;

    let pair = Pair::of(Engine::Sglang, &flags).await;
    pair.decode.set_call_fault(CallFault::generate().fail_after(2, Code::Internal, "late").times(1));
    let mut watched = chat();
    watched["stop"] = json!(["nobody says this"]);
    assert_refused(&pair.smg, CHAT, &watched, 500, "worker_stream_failed").await;
    pair.decode.set_call_fault(CallFault::generate().end_after(2).times(1));
    assert_refused(&pair.smg, CHAT, &watched, 500, "no_responses_from_server").await;
    pair.is_clean().await;

    let worker = grpc(Engine::Sglang, Role::Regular).await;
    let smg = Smg::launch(&flags).await;
    smg.register(&spec(&worker, "regular")).await;
    worker.set_call_fault(CallFault::generate().refuse(Code::Unavailable, "no").times(1));
    assert_refused(&smg, CHAT, &chat(), 503, "worker_failed_to_start").await;
}

#[tokio::test]
async fn a_tokenizer_that_is_not_there_is_waited_for_or_said_to_be_missing() {
    for (fault, code) in [
        (CallFault::method("GetTokenizer").hang(), "tokenizer_not_ready"),
        (CallFault::method("GetTokenizer").refuse(Code::FailedPrecondition, "no path"), "tokenizer_load_failed"),
    ] {
        let (prefill, decode) = (grpc(Engine::Sglang, Role::Prefill).await, grpc(Engine::Sglang, Role::Decode).await);
        for engine in [&prefill, &decode] {
            engine.set_call_fault(fault.clone());
        }
        let pair = Pair::behind(Smg::launch(&[]).await, prefill, decode).await;
        assert_refused(&pair.smg, CHAT, &chat(), 503, code).await;
        assert!(pair.engines().iter().all(|engine| engine.calls().is_empty()));
    }
}

#[tokio::test]
async fn a_tokenizer_on_disk_is_used_before_that_of_an_engine() {
    let path = mock_engine::tokenizer_path().to_str().unwrap();
    let pair = Pair::of(Engine::Sglang, &["--tokenizer-path", path]).await;
    assert_eq!(pair.smg.post(CHAT, &chat()).await.status(), StatusCode::OK);
    assert!(pair.engines().iter().all(|engine| engine.call_count("GetTokenizer") == 0));
}

#[tokio::test]
async fn a_chat_template_on_disk_is_used_before_that_of_the_model() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("chat.jinja");
    std::fs::write(&path, "{% for message in messages %}<{{ message.content }}>{% endfor %}").unwrap();
    let pair = Pair::of(Engine::Sglang, &["--chat-template", path.to_str().unwrap()]).await;
    assert_eq!(pair.smg.post(CHAT, &chat()).await.status(), StatusCode::OK);
    assert_eq!(mock_engine::decode(pair.prefill.calls()[0].token_ids()), "<hi>");
}

#[tokio::test]
async fn reasoning_and_tool_calls_are_told_apart_by_the_parsers_that_flags_name() {
    let flags = ["--reasoning-parser", "qwen3", "--tool-call-parser", "qwen"];
    let call = r#"<tool_call>
{"name": "weather", "arguments": {"city": "Ulm"}}
</tool_call>"#;
    let said = format!("<think>Which city?</think>Let me look.{call}");
    let mut body = chat();
    body["max_tokens"] = json!(500);
    let parameters = json!({"type": "object", "properties": {"city": {"type": "string"}}});
    body["tools"] = json!([{"type": "function", "function": {"name": "weather", "parameters": parameters}}]);
    for engine in PAIRS {
        let pair = Pair::of(engine, &flags).await;
        pair.engines().iter().for_each(|engine| engine.replies_with(Some(&said)));
        let answer: Value = pair.smg.post(CHAT, &body).await.json().await.unwrap();
        let choice = &answer["choices"][0];
        let message = &choice["message"];
        assert_eq!(message["reasoning_content"], "Which city?", "{engine:?} {answer}");
        assert_eq!(message["content"], "Let me look.", "{engine:?} {answer}");
        let function = &message["tool_calls"][0]["function"];
        let arguments: Value = serde_json::from_str(function["arguments"].as_str().unwrap()).unwrap();
        assert_eq!((&function["name"], &arguments), (&json!("weather"), &json!({"city": "Ulm"})), "{engine:?}");
        assert_eq!(choice["finish_reason"], "tool_calls", "{engine:?} {answer}");

        let text = pair.smg.post(CHAT, &streamed(body.clone())).await.text().await.unwrap();
        let joined = |place: &str| -> String {
            let events = events(&text);
            let parts = events.iter().filter_map(|event| event.pointer(place).and_then(Value::as_str));
            parts.collect()
        };
        assert_eq!(joined("/choices/0/delta/reasoning_content"), "Which city?", "{engine:?} {text}");
        assert_eq!(joined("/choices/0/delta/content"), "Let me look.", "{engine:?} {text}");
        let arguments = joined("/choices/0/delta/tool_calls/0/function/arguments");
        assert_eq!(serde_json::from_str::<Value>(&arguments).unwrap(), json!({"city": "Ulm"}), "{engine:?} {text}");
        assert_eq!(joined("/choices/0/finish_reason"), "tool_calls", "{engine:?} {text}");
        pair.is_clean().await;
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

#[tokio::test]
async fn http_and_grpc_workers_serve_one_model_and_never_pair_with_each_other() {
    let pair = Pair::of(Engine::Sglang, &["--policy", "round_robin"]).await;
    let (prefill, decode) = (sglang(Role::Prefill).await, sglang(Role::Decode).await);
    pair.smg.register_pair(&prefill, &decode).await;
    for _ in 0..8 {
        let response = pair.smg.post(CHAT, &chat()).await;
        assert_eq!(response.status(), StatusCode::OK, "{}", response.text().await.unwrap());
    }
    let [grpc_prefills, grpc_decodes] = pair.engines().map(|engine| engine.calls().len());
    assert_eq!(grpc_prefills, grpc_decodes);
    assert!(grpc_prefills > 0 && grpc_prefills < 8, "{grpc_prefills}");
    pair.is_clean().await;
}

#[tokio::test]
async fn the_load_that_engines_report_over_grpc_is_shown() {
    let flags = ["--load-monitor-interval", "1"];
    let pair = Pair::of(Engine::Sglang, &flags).await;
    eventually("both engines have reported", || async {
        let loads = pair.smg.get_json("/loads").await;
        (loads["loads"].as_array().map(Vec::len) == Some(2)).then_some(())
    })
    .await;
}
