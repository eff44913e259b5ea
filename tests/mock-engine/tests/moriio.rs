//! MoRI-IO handoffs are honest: no KV, no right text; a wrong handoff is not forgiven.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use std::time::Duration;

use common::*;
use mock_engine::{Connector, MockEngine, Role};
use serde_json::{Value, json};

const CHAT: &str = "/v1/chat/completions";

async fn pair(connector: Connector) -> (MockEngine, MockEngine) {
    let start = |role| vllm(role, connector.clone()).transfer_deadline(Duration::from_millis(300)).start();
    (start(Role::Prefill).await.unwrap(), start(Role::Decode).await.unwrap())
}

/// The prefill leg; in WRITE mode it is told where the decode engine listens.
fn prefill_leg(body: &Value, transfer_id: &str, decode: Option<&MockEngine>) -> Value {
    let mut tag = json!({"do_remote_decode": true, "do_remote_prefill": false, "transfer_id": transfer_id});
    if let Some(decode) = decode {
        tag = with(tag, side_channel(decode));
    }
    with(body.clone(), json!({"max_tokens": 1, "stream": false, "ignore_eos": true, "kv_transfer_params": tag}))
}

fn side_channel(engine: &MockEngine) -> Value {
    json!({
        "remote_host": "127.0.0.1",
        "remote_handshake_port": engine.side_channel_port(),
        "remote_notify_port": engine.notify_port(),
    })
}

async fn handed_over(prefill: &MockEngine, leg: &Value) -> Value {
    post(prefill, CHAT, leg).await.json()["kv_transfer_params"].clone()
}

async fn alone(body: &Value) -> Answer {
    post(&vllm(Role::Regular, Connector::None).start().await.unwrap(), CHAT, body).await
}

#[tokio::test]
async fn a_read_decode_pulls_the_kv_once() {
    let (prefill, decode) = pair(Connector::MoriioRead).await;
    let body = chat("a b c");
    let params = handed_over(&prefill, &prefill_leg(&body, "t1", None)).await;
    let leg = with(body.clone(), json!({"kv_transfer_params": params}));
    let right = alone(&body).await.text;
    assert_eq!(post(&decode, CHAT, &leg).await.text, right);
    assert_eq!((decode.local_prompt_tokens(), decode.external_prompt_tokens()), (0, prefill.local_prompt_tokens()));
    let again = post(&decode, CHAT, &leg).await;
    assert!(again.status == 200 && again.text != right, "the KV is gone, and nothing says so");
}

#[tokio::test]
async fn a_read_decode_without_kv_answers_with_other_text() {
    let (prefill, decode) = pair(Connector::MoriioRead).await;
    let body = chat("a b c");
    let params = handed_over(&prefill, &prefill_leg(&body, "t1", None)).await;
    let right = alone(&body).await.text;
    for params in [
        Value::Null,
        with(params.clone(), json!({"transfer_id": "t2"})),
        with(params.clone(), json!({"remote_handshake_port": 1})),
    ] {
        let answer = post(&decode, CHAT, &with(body.clone(), json!({"kv_transfer_params": params}))).await;
        assert!(answer.status == 200 && answer.text != right);
    }
    assert_eq!(decode.local_prompt_tokens(), 0);
}

#[tokio::test]
async fn a_write_decode_waits_for_the_push_before_or_after_it_came() {
    let (prefill, decode) = pair(Connector::MoriioWrite).await;
    let body = chat("a b c");
    let right = alone(&body).await.text;
    let params = handed_over(&prefill, &prefill_leg(&body, "t1", Some(&decode))).await;
    let leg = with(body.clone(), json!({"kv_transfer_params": params}));
    assert_eq!(post(&decode, CHAT, &leg).await.text, right);

    let mut minted = json!({"do_remote_prefill": true, "transfer_id": "t2", "remote_engine_id": null});
    minted = with(minted, side_channel(&prefill));
    let leg = with(body.clone(), json!({"kv_transfer_params": minted}));
    let for_prefill = prefill_leg(&body, "t2", Some(&decode));
    let (first, second) = tokio::join!(post(&decode, CHAT, &leg), async {
        decode.wait_for_generations(2, SOON).await.unwrap();
        post(&prefill, CHAT, &for_prefill).await
    });
    assert_eq!((first.text, second.status), (right, 200));
    assert_eq!(decode.local_prompt_tokens(), 0);
}

#[tokio::test]
async fn a_write_decode_whose_push_never_comes_gets_no_text() {
    let (prefill, decode) = pair(Connector::MoriioWrite).await;
    let minted = with(json!({"do_remote_prefill": true, "transfer_id": "t"}), side_channel(&prefill));
    let unreachable = with(minted.clone(), json!({"remote_handshake_port": 1}));
    for params in [Value::Null, minted, unreachable] {
        let answer = post(&decode, CHAT, &with(chat("a"), json!({"kv_transfer_params": params}))).await;
        assert_eq!(answer.status, 500);
    }
}

#[tokio::test]
async fn an_answer_that_may_end_by_itself_hands_nothing_over() {
    let (prefill, _) = pair(Connector::MoriioRead).await;
    let leg = prefill_leg(&chat("a"), "t", None);
    for (number, change) in
        [json!({"ignore_eos": false}), json!({"stop": ["x"]}), json!({"stop_token_ids": [1]})].into_iter().enumerate()
    {
        let mut leg = with(leg.clone(), change);
        leg["kv_transfer_params"]["transfer_id"] = json!(format!("t{number}"));
        assert_eq!(handed_over(&prefill, &leg).await, Value::Null);
    }
}

#[tokio::test]
async fn a_handoff_of_a_wrong_shape_kills_the_decode_engine() {
    for change in [
        json!({"remote_block_ids": "1"}),
        json!({"remote_block_ids": [1, "2"]}),
        json!({"remote_engine_id": ""}),
        json!({"remote_host": "a b"}),
        json!({"remote_notify_port": 0}),
        json!({"remote_dp_size": "x"}),
    ] {
        let (prefill, decode) = pair(Connector::MoriioRead).await;
        let params = with(handed_over(&prefill, &prefill_leg(&chat("a"), "t", None)).await, change);
        let leg = with(chat("a"), json!({"kv_transfer_params": params}));
        assert_eq!(post(&decode, CHAT, &leg).await.status, 500);
        assert!(try_post(&decode, CHAT, &chat("a")).await.is_err(), "it has stopped listening");
    }
}
