//! A pair behind `smg launch` serves what one engine would, and the process can be killed.
#![allow(clippy::unwrap_used)]

mod support;

use serde_json::Value;
use support::*;

#[tokio::test]
async fn a_pair_answers_byte_for_byte_what_one_engine_answers() {
    let (smg, prefill, decode) = sglang_pair(&[]).await;
    let single = sglang(Role::Regular).await;
    let client = reqwest::Client::new();
    for (path, body) in
        [("/v1/chat/completions", chat()), ("/v1/completions", completion()), ("/v1/chat/completions", chat_stream())]
    {
        let id = "same-id";
        let alone =
            client.post(format!("{}{path}", single.url())).header("x-request-id", id).json(&body).send().await.unwrap();
        let paired =
            smg.client.post(format!("{}{path}", smg.url)).header("x-request-id", id).json(&body).send().await.unwrap();
        assert_eq!(paired.status(), 200);
        assert_eq!(paired.bytes().await.unwrap(), alone.bytes().await.unwrap(), "{path}");
    }
    assert_eq!((prefill.generation_count(), decode.generation_count()), (3, 3));
    smg.until_idle().await;
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
