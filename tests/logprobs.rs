//! Log probabilities of the prompt: the prefill's entries reach the client in the decode's answer.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod support;

use std::time::Duration;

use serde_json::json;
use support::*;

const PREFILL: &str = r#"{"text":"","meta_info":{"input_token_logprobs":[[null,1,null],[-0.5,2,null]],"input_top_logprobs":[null,[[-1.25,3,null]]]}}"#;
const DECODE: &str = r#"{"text":" é", "meta_info":{"input_token_logprobs":[],"input_top_logprobs":[],"output_token_logprobs":[[-2.0,4,null]],"e2e":1.50}}"#;
const MERGED: &str = r#"{"text":" é", "meta_info":{"input_token_logprobs":[[null,1,null],[-0.5,2,null]],"input_top_logprobs":[null,[[-1.25,3,null]]],"output_token_logprobs":[[-2.0,4,null]],"e2e":1.50}}"#;

fn answering(body: &'static str) -> Fault {
    Fault::path("/generate").status(200, body).header("content-type", "application/json; charset=utf-8")
}

fn streaming(events: &[&str]) -> Fault {
    let pieces: Vec<(Duration, String)> = events.iter().map(|event| (Duration::ZERO, (*event).to_owned())).collect();
    Fault::path("/generate").script(pieces)
}

#[tokio::test]
async fn the_prefills_entries_are_merged_into_an_answer_of_the_right_length_and_type() {
    let (smg, prefill, decode) = sglang_pair(&[]).await;
    decode.set_fault(answering(DECODE));
    prefill.set_fault(answering(PREFILL));
    let body = json!({"model": MODEL, "text": "hi", "return_logprob": true});
    let answer = smg.post("/generate", &body).await;
    assert_eq!(answer.headers()["content-type"], "application/json");
    assert_eq!(answer.headers()["x-smg-routed-worker-id"], decode.url());
    assert_eq!(answer.content_length(), Some(MERGED.len() as u64));
    assert_eq!(answer.text().await.unwrap(), MERGED);

    // Without logprobs nothing is touched, the content type included.
    let answer = smg.post("/generate", &json!({"model": MODEL, "text": "hi"})).await;
    assert_eq!(answer.headers()["content-type"], "application/json; charset=utf-8");
    assert_eq!(answer.text().await.unwrap(), DECODE);
    smg.until_idle().await;
}

#[tokio::test]
async fn an_answer_that_cannot_be_merged_is_the_decodes_own() {
    let (smg, prefill, decode) = sglang_pair(&[]).await;
    decode.set_fault(answering(DECODE));
    let body = json!({"model": MODEL, "text": "hi", "return_logprob": true});
    for broken in [answering("no json"), answering("{}"), answering(""), answering(PREFILL).close_after_bytes(9)] {
        prefill.clear_faults();
        prefill.set_fault(broken);
        let answer = smg.post("/generate", &body).await;
        assert_eq!(answer.headers()["content-type"], "application/json");
        assert_eq!(answer.text().await.unwrap(), DECODE);
    }
    let failures = smg.metric("smg_worker_cb_outcomes_total", &[("outcome", "failure")]).await;
    assert_eq!(failures, 1.0, "only the prefill that broke off is charged");
    smg.until_idle().await;
}

#[tokio::test]
async fn of_a_stream_the_first_event_gets_them_and_only_that() {
    let (smg, prefill, decode) = sglang_pair(&[]).await;
    let event = |data: &str| format!("data: {data}\n\n");
    prefill.set_fault(streaming(&[&event(PREFILL), "data: [DONE]\n\n"]));
    let (head, tail) = DECODE.split_at(20);
    decode.set_fault(streaming(&[
        ": ping\n\n",
        &format!("data: {head}"),
        &format!("{tail}\n\n"),
        &event(DECODE),
        "data: [DONE]\n\n",
    ]));
    let body = json!({"model": MODEL, "text": "hi", "return_logprob": true, "stream": true});
    let answer = smg.post("/generate", &body).await;
    assert!(answer.headers()["content-type"].to_str().unwrap().starts_with("text/event-stream"));
    let expected = format!(": ping\n\n{}{}data: [DONE]\n\n", event(MERGED), event(DECODE));
    assert_eq!(answer.text().await.unwrap(), expected);
    smg.until_idle().await;
}

#[tokio::test]
async fn each_answer_of_a_streamed_batch_gets_the_entries_of_its_own_prompt() {
    let (smg, prefill, decode) = sglang_pair(&[]).await;
    let event = |index: usize, entries: &str| {
        format!("data: {{\"index\":{index},\"meta_info\":{{\"input_token_logprobs\":[{entries}]}}}}\n\n")
    };
    prefill.set_fault(streaming(&[&event(0, "[-1.0,1]"), &event(1, "[-2.0,2]"), "data: [DONE]\n\n"]));
    decode.set_fault(streaming(&[&event(1, ""), &event(0, ""), &event(1, ""), "data: [DONE]\n\n"]));
    let body = json!({"model": MODEL, "text": ["a", "b"], "return_logprob": true, "stream": true});
    let answer = smg.post("/generate", &body).await.text().await.unwrap();
    let expected = [event(1, "[-2.0,2]"), event(0, "[-1.0,1]"), event(1, ""), "data: [DONE]\n\n".to_owned()].concat();
    assert_eq!(answer, expected);
    smg.until_idle().await;
}

#[tokio::test]
async fn whoever_asks_a_pair_of_any_engine_for_logprobs_gets_json() {
    let (smg, _prefill, decode) = nixl_pair(&[]).await;
    for path in ["/v1/chat/completions", "/v1/completions"] {
        let fault = Fault::path(path).status(200, DECODE).header("content-type", "application/octet-stream");
        decode.set_fault(fault);
        let mut body = json!({"model": MODEL, "prompt": "hi", "messages": [{"role": "user", "content": "hi"}]});
        let asked = smg.post(path, &body).await;
        assert_eq!(asked.headers()["content-type"], "application/octet-stream", "{path}");
        body["logprobs"] = if path == "/v1/chat/completions" { json!(true) } else { json!(1) };
        let asked = smg.post(path, &body).await;
        assert_eq!(asked.headers()["content-type"], "application/json", "{path}");
        assert_eq!(asked.text().await.unwrap(), DECODE);
    }
}

#[tokio::test]
async fn log_probabilities_of_the_prompt_are_a_vllm_prefills_and_the_decode_is_not_asked() {
    let (smg, _prefill, decode) = nixl_pair(&[]).await;
    assert_prompt_logprobs_are_those_of_one_engine(&smg, &decode).await;
    assert_eq!(decode.local_prompt_tokens(), 0);
    smg.until_idle().await;
}

#[tokio::test]
async fn where_only_the_engine_that_answers_can_write_them_it_computes_the_prompt_itself() {
    let (smg, prefill, decode) = nixl_pair(&[]).await;
    let mut echoed = completion();
    (echoed["echo"], echoed["logprobs"]) = (json!(true), json!(1));
    let mut streamed = completion();
    (streamed["stream"], streamed["prompt_logprobs"]) = (json!(true), json!(0));
    for body in [echoed, streamed] {
        let answer = smg.post("/v1/completions", &body).await;
        assert_eq!(answer.status(), 200, "{body}");
        answer.bytes().await.unwrap();
        assert_eq!(decode.generations().pop().unwrap().json(), body, "as the client wrote it");
    }
    assert_eq!(prefill.generation_count(), 0);
    smg.until_idle().await;
}

#[tokio::test]
async fn a_prefill_that_tells_nothing_of_the_prompt_leaves_the_decodes_answer_as_it_is() {
    let (smg, prefill, decode) = nixl_pair(&[]).await;
    let mut body = completion();
    body["prompt_logprobs"] = json!(1);
    prefill.set_fault(Fault::path("/v1/completions").status(200, r#"{"choices":[]}"#));
    decode.set_fault(Fault::path("/v1/completions").status(200, DECODE));
    let answer = smg.post("/v1/completions", &body).await;
    assert_eq!(answer.content_length(), Some(DECODE.len() as u64));
    assert_eq!(answer.text().await.unwrap(), DECODE);
    smg.until_idle().await;
}
