//! A pair behind `smg launch` serves what one engine would, and the process can be killed.
#![allow(clippy::unwrap_used)]

mod support;

use serde_json::Value;
use support::*;

/// Checks that a pair answers these requests, whole and streamed, as `single` does.
async fn assert_equal_answers(smg: &Smg, single: &MockEngine, requests: &[(&str, Value)]) {
    for (path, body) in requests {
        for body in [body.clone(), streamed(body.clone())] {
            let ask = async |url: &str| {
                let request = smg.client.post(format!("{url}{path}")).header("x-request-id", "same-id").json(&body);
                let response = request.send().await.unwrap();
                assert_eq!(response.status(), 200, "{path} {body}");
                response.bytes().await.unwrap()
            };
            assert_eq!(ask(&smg.url).await, ask(&single.url()).await, "{path} {body}");
        }
    }
    smg.until_idle().await;
}

#[tokio::test]
async fn a_pair_answers_byte_for_byte_what_one_engine_answers() {
    let (smg, prefill, decode) = sglang_pair(&[]).await;
    let single = sglang(Role::Regular).await;
    assert_equal_answers(&smg, &single, &requests()).await;
    assert_eq!((prefill.generation_count(), decode.generation_count()), (6, 6));
}

#[tokio::test]
async fn a_pair_that_hands_over_answers_byte_for_byte_what_one_engine_answers() {
    let (smg, prefill, decode) = nixl_pair(&[]).await;
    let single = vllm(Role::Regular, Connector::None).await;
    assert_equal_answers(&smg, &single, &requests()[..2]).await;
    assert_eq!((prefill.generation_count(), decode.generation_count()), (4, 4));
}

#[tokio::test]
async fn workers_are_still_registered_after_a_kill() {
    let directory = tempfile::tempdir().unwrap();
    let (prefill, decode) = (sglang(Role::Prefill).await, sglang(Role::Decode).await);
    let mut smg = Smg::durable(directory.path(), &[]).await;
    let ids = smg.register_pair(&prefill, &decode).await;
    smg.kill();
    let smg = Smg::durable(directory.path(), &[]).await;
    smg.until_healthy(&ids.0).await;
    smg.until_healthy(&ids.1).await;
    let answer: Value = smg.post("/v1/chat/completions", &chat()).await.json().await.unwrap();
    assert_eq!(answer["object"], "chat.completion");
}
