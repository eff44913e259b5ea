//! SGLang's rendezvous is honest, and its answers have SGLang's shape.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use std::time::Duration;

use common::*;
use mock_engine::{MockEngine, Role};
use serde_json::{Value, json};

async fn pair() -> (MockEngine, MockEngine) {
    let patience = Duration::from_millis(400);
    let prefill = sglang(Role::Prefill).transfer_deadline(patience);
    let decode = sglang(Role::Decode).transfer_deadline(patience);
    (prefill.start().await.unwrap(), decode.start().await.unwrap())
}

fn meet(prefill: &MockEngine, room: impl Into<Value>) -> Value {
    json!({"bootstrap_host": "127.0.0.1", "bootstrap_port": prefill.bootstrap_port().unwrap(), "bootstrap_room": room.into()})
}

async fn both((prefill, decode): &(MockEngine, MockEngine), path: &str, body: &Value) -> (Answer, Answer) {
    tokio::join!(post(prefill, path, body), post(decode, path, body))
}

#[tokio::test]
async fn a_pair_answers_what_a_single_engine_answers() {
    let engines = pair().await;
    let single = sglang(Role::Regular).start().await.unwrap();
    let bodies = [
        ("/v1/chat/completions", chat("one two three")),
        ("/v1/completions", completion("one two three")),
        ("/generate", json!({"text": "one two three", "sampling_params": {"max_new_tokens": 8}})),
        ("/generate", json!({"input_ids": [1, 2, 3]})),
    ];
    let mut room = 0;
    for (path, body) in bodies {
        for stream in [false, true] {
            room += 1;
            let body = with(body.clone(), json!({"stream": stream}));
            let legs = with(body.clone(), meet(&engines.0, room));
            let (first, second) = both(&engines, path, &legs).await;
            assert_eq!(first.status, 200, "{}", first.text);
            assert_eq!(second.text, post(&single, path, &body).await.text);
        }
    }
    assert!(engines.1.external_prompt_tokens() > 0);
    assert_eq!(engines.1.local_prompt_tokens(), 0);
}

#[tokio::test]
async fn a_batch_and_a_chat_with_several_samples_have_a_room_each() {
    let engines = pair().await;
    let single = sglang(Role::Regular).start().await.unwrap();
    let port = engines.0.bootstrap_port().unwrap();
    let lists = |rooms: [u64; 2]| json!({"bootstrap_host": ["127.0.0.1", "127.0.0.1"], "bootstrap_port": [port, port], "bootstrap_room": rooms});
    for (path, body, rooms) in [
        ("/v1/completions", json!({"model": "m", "prompt": ["a", "b"]}), [1, 2]),
        ("/v1/chat/completions", with(chat("hi"), json!({"n": 2})), [3, 4]),
        ("/generate", json!({"input_ids": [[1], [2]]}), [5, 6]),
    ] {
        let (_, second) = both(&engines, path, &with(body.clone(), lists(rooms))).await;
        assert_eq!(second.status, 200, "{}", second.text);
        assert_eq!(second.text, post(&single, path, &body).await.text);
    }
}

#[tokio::test]
async fn a_scalar_room_starves_the_samples_beyond_the_first() {
    let engines = pair().await;
    let body = with(completion("hi"), json!({"n": 2}));
    let (first, second) = both(&engines, "/v1/completions", &with(body, meet(&engines.0, 1))).await;
    assert_eq!((first.status, second.status), (500, 500));
}

#[tokio::test]
async fn a_decode_leg_without_its_prefill_never_answers() {
    let (prefill, decode) = pair().await;
    let path = "/v1/completions";
    // No prefill at all.
    let alone = post(&decode, path, &with(completion("hi"), meet(&prefill, 1))).await;
    assert_eq!(alone.status, 500);
    // A prefill in another room, a prefill of another prompt.
    for (rooms, prompts) in [([2, 3], ["hi", "hi"]), ([4, 4], ["hi", "ho"])] {
        let leg = |side: usize| with(completion(prompts[side]), meet(&prefill, rooms[side]));
        let legs = [leg(0), leg(1)];
        let (first, second) = tokio::join!(post(&prefill, path, &legs[0]), post(&decode, path, &legs[1]),);
        assert_eq!((first.status, second.status), (500, 500));
    }
    assert_eq!(decode.external_prompt_tokens(), 0);
}

#[tokio::test]
async fn a_room_is_used_once() {
    let engines = pair().await;
    let path = "/v1/completions";
    let body = with(completion("hi"), meet(&engines.0, 7));
    let (first, second) = both(&engines, path, &body).await;
    assert_eq!((first.status, second.status), (200, 200));
    let (first, second) = both(&engines, path, &body).await;
    assert_eq!((first.status, second.status), (500, 500));
}

#[tokio::test]
async fn bootstrap_fields_that_cannot_lead_to_a_prefill_are_refused() {
    let (prefill, decode) = pair().await;
    let path = "/v1/chat/completions";
    for (engine, fields, status) in [
        (&decode, json!({}), 400),
        (&prefill, json!({}), 400),
        (&decode, json!({"bootstrap_room": 1}), 500),
        (&decode, json!({"bootstrap_room": 1, "bootstrap_host": "127.0.0.1", "bootstrap_port": null}), 500),
        (&prefill, json!({"bootstrap_room": u64::MAX}), 400),
        (&prefill, json!({"bootstrap_room": -1}), 400),
        (&prefill, json!({"bootstrap_room": "1"}), 400),
        (&prefill, json!({"bootstrap_room": 1.5}), 400),
    ] {
        let answer = post(engine, path, &with(chat("hi"), fields.clone())).await;
        assert_eq!(answer.status, status, "{fields}: {}", answer.text);
        assert_eq!(keys(&answer.text), ["object", "message", "type", "param", "code"]);
    }
}

#[tokio::test]
async fn a_prefill_answers_only_when_its_kv_was_fetched() {
    let (prefill, decode) = pair().await;
    let body = with(completion("hi"), meet(&prefill, 1));
    let mut early = Raw::post(&prefill, "/v1/completions", &body).await;
    prefill.wait_until(SOON, |engine| engine.held_kv() == 1).await.unwrap();
    assert_eq!(prefill.requests()[0].status, None);
    assert_eq!(post(&decode, "/v1/completions", &body).await.status, 200);
    early.until("HTTP/1.1 200 OK").await;
    assert_eq!(prefill.held_kv(), 0);
}

#[tokio::test]
async fn a_prefill_whose_client_leaves_fails_the_decode_that_waits() {
    let patience = Duration::from_secs(60);
    let prefill = sglang(Role::Prefill).prefill_delay(patience).transfer_deadline(patience).start().await.unwrap();
    let decode = sglang(Role::Decode).transfer_deadline(patience).start().await.unwrap();
    let body = with(completion("hi"), meet(&prefill, 1));
    let leaving = Raw::post(&prefill, "/v1/completions", &body).await;
    prefill.wait_for_generations(1, SOON).await.unwrap();
    let waiting = post(&decode, "/v1/completions", &body);
    let leave = async {
        decode.wait_for_generations(1, SOON).await.unwrap();
        drop(leaving);
    };
    let (answer, ()) = tokio::time::timeout(SOON, async { tokio::join!(waiting, leave) }).await.unwrap();
    assert_eq!(answer.status, 500);
    prefill.wait_until(SOON, |engine| engine.active() == 0).await.unwrap();
    assert!(prefill.requests()[0].peer_closed_at.is_some());
}

#[tokio::test]
async fn a_decode_whose_client_leaves_fails_the_prefill() {
    let patience = Duration::from_secs(60);
    let prefill = sglang(Role::Prefill).transfer_deadline(patience).start().await.unwrap();
    let decode = sglang(Role::Decode).transfer_deadline(patience).start().await.unwrap();
    let body = with(completion("hi"), meet(&prefill, 1));
    let leaving = Raw::post(&decode, "/v1/completions", &body).await;
    decode.wait_for_generations(1, SOON).await.unwrap();
    drop(leaving);
    decode.wait_until(SOON, |engine| engine.active() == 0).await.unwrap();
    // The decode engine may have left before it asked: then the prefill's KV stays unfetched, and its client leaves too.
    let prefilled = tokio::time::timeout(Duration::from_millis(500), post(&prefill, "/v1/completions", &body));
    assert!(!matches!(prefilled.await, Ok(answer) if answer.status == 200));
}

#[tokio::test]
async fn ranks_are_checked_and_must_agree() {
    let prefill = sglang(Role::Prefill).dp_size(2).start().await.unwrap();
    let decode = sglang(Role::Decode).dp_size(2).start().await.unwrap();
    let path = "/v1/completions";
    let beyond = with(completion("hi"), with(meet(&prefill, 1), json!({"routed_dp_rank": 2})));
    assert_eq!(post(&prefill, path, &beyond).await.status, 400);
    for (room, believed, status) in [(2, 1, 200), (3, 0, 500)] {
        let body = with(completion("hi"), meet(&prefill, room));
        let of_prefill = with(body.clone(), json!({"routed_dp_rank": 1}));
        let of_decode = with(body, json!({"routed_dp_rank": 0, "disagg_prefill_dp_rank": believed}));
        let (first, second) = tokio::join!(post(&prefill, path, &of_prefill), post(&decode, path, &of_decode));
        assert_eq!((first.status, second.status), (status, status));
    }
}

#[tokio::test]
async fn input_logprobs_come_from_the_prefill_and_output_logprobs_from_the_decode() {
    let engines = pair().await;
    let single = sglang(Role::Regular).start().await.unwrap();
    let body = json!({"text": "a b c", "return_logprob": true, "sampling_params": {"max_new_tokens": 4}});
    let whole = post(&single, "/generate", &body).await.json();
    let legs = with(body, meet(&engines.0, 1));
    let (first, second) = both(&engines, "/generate", &legs).await;
    let (first, second) = (first.json(), second.json());
    let input = |answer: &Value| answer["meta_info"]["input_token_logprobs"].clone();
    let output = |answer: &Value| answer["meta_info"]["output_token_logprobs"].clone();
    assert_eq!(input(&first), input(&whole));
    assert_eq!(input(&first).as_array().unwrap().len(), 3);
    assert_eq!(input(&second), json!([]));
    assert_eq!(output(&second), output(&whole));
}

#[tokio::test]
async fn answers_have_sglangs_shape() {
    let engine = sglang(Role::Regular).start().await.unwrap();
    let answer = post(&engine, "/v1/chat/completions", &chat("hi")).await.text;
    assert_eq!(keys(&answer), ["id", "object", "created", "model", "choices", "usage", "metadata"]);
    assert_eq!(keys(part(&answer, "choices")), ["index", "message", "logprobs", "finish_reason", "matched_stop"]);
    let answer =
        post(&engine, "/generate", &json!({"text": "hi", "sampling_params": {"max_new_tokens": 2}, "stream": true}))
            .await;
    let events = answer.events();
    assert_eq!(events.len(), 2);
    // Text is cumulative.
    let text = |event: usize| events[event]["text"].as_str().unwrap().to_owned();
    assert!(text(1).starts_with(&text(0)) && text(1) != text(0));
    assert_eq!(events[0]["meta_info"]["finish_reason"], Value::Null);
    assert_eq!(events[1]["meta_info"]["finish_reason"], json!({"type": "length", "length": 2}));
}

#[tokio::test]
async fn probes_answer_as_sglangs_do() {
    let engine = sglang(Role::Prefill).max_running(4).server_info("kv_cache_dtype", "fp8").start().await.unwrap();
    let health = get(&engine, "/health").await;
    assert_eq!((health.status, health.text.as_str()), (200, ""));
    assert_eq!(get(&engine, "/v1/models").await.json()["data"][0]["owned_by"], "sglang");
    assert_eq!(get(&engine, "/version").await.status, 404);
    assert_eq!(get(&engine, "/generate").await.status, 405);
    for path in ["/server_info", "/get_server_info"] {
        let info = get(&engine, path).await.json();
        assert_eq!(info["disaggregation_mode"], "prefill");
        assert_eq!(info["max_running_requests"], 4);
        assert_eq!(info["kv_cache_dtype"], "fp8");
        for name in [
            "model_path",
            "served_model_name",
            "tp_size",
            "dp_size",
            "pp_size",
            "load_balance_method",
            "version",
            "is_embedding",
            "context_length",
            "max_total_tokens",
            "enable_dp_attention",
            "weight_version",
            "tokenizer_path",
        ] {
            assert!(!info[name].is_null(), "{name}");
        }
    }
    for path in ["/model_info", "/get_model_info"] {
        let info = get(&engine, path).await.json();
        for name in
            ["is_generation", "has_image_understanding", "has_audio_understanding", "model_type", "architectures"]
        {
            assert!(!info[name].is_null(), "{name}");
        }
    }
    let loads = get(&engine, "/v1/loads?include=core").await.json();
    assert_eq!(loads["loads"][0]["num_running_reqs"], 0);
    assert_eq!(loads["loads"][0]["max_running_requests"], 4);
    let metrics = get(&engine, "/metrics").await.text;
    for name in ["num_running_reqs", "num_queue_reqs", "token_usage"] {
        assert!(metrics.contains(&format!("\nsglang:{name}{{model_name=\"m\"}} 0.0\n")));
    }
}
