#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use proptest::prelude::*;
use serde_json::json;

use super::*;
use crate::generation::Constraint;
use crate::output::{FinishReason, MatchedStop};
use crate::testing::*;

fn request(mut members: Value) -> Result<Request, Refusal> {
    if members.get("text").is_none() && members.get("input_ids").is_none() {
        members["text"] = json!("once");
    }
    parse(members.to_string().as_bytes())
}

fn answer(members: Value, script: &[Event]) -> String {
    drive(&mut *request(members).unwrap().answer(origin("gen-1")), script)
}

#[test]
fn every_documented_field_is_read() {
    let check = |fact: &str, members: Value, holds: fn(&Request) -> bool| {
        let request = request(members).unwrap_or_else(|refusal| panic!("{fact}: {refusal}"));
        assert!(holds(&request), "{fact}: {request:?}");
    };
    let params = |name: &str, value: Value| json!({"sampling_params": {name: value}});
    check("text", json!({"text": "a"}), |request| request.generation.prompt == Prompt::Texts(vec!["a".to_owned()]));
    check("input_ids", json!({"input_ids": [1, 2]}), |request| {
        request.generation.prompt == Prompt::Tokens(vec![vec![1, 2]])
    });
    check("rid", json!({"rid": "r"}), |request| request.generation.request_id.as_deref() == Some("r"));
    check("stream", json!({"stream": true}), |request| request.generation.stream);
    check("max_new_tokens", params("max_new_tokens", json!(0)), |request| {
        request.generation.sampling.max_tokens == Some(0)
    });
    check("min_new_tokens", params("min_new_tokens", json!(2)), |request| {
        request.generation.sampling.min_tokens == Some(2)
    });
    check("n", params("n", json!(3)), |request| request.generation.samples == 3);
    check("stop", params("stop", json!("x")), |request| request.generation.sampling.stop == ["x"]);
    check("no_stop_trim", params("no_stop_trim", json!(true)), |request| request.generation.sampling.keep_stop);
    check("skip_special_tokens", params("skip_special_tokens", json!(false)), |request| {
        !request.generation.reading.skip_special_tokens
    });
    check("json_schema", params("json_schema", json!("{}")), |request| {
        request.generation.constraint == Some(Constraint::JsonSchema("{}".to_owned()))
    });
    check("structural_tag", params("structural_tag", json!("{}")), |request| {
        request.generation.constraint == Some(Constraint::StructuralTag("{}".to_owned()))
    });
    check("return_logprob", json!({"return_logprob": true, "top_logprobs_num": 2}), |request| {
        request.generation.logprobs == Some(Logprobs { top: 2, prompt_from: None })
    });
    check("logprob_start_len", json!({"return_logprob": true, "logprob_start_len": 0}), |request| {
        request.generation.logprobs == Some(Logprobs { top: 0, prompt_from: Some(0) })
    });
    check("no log probabilities unless asked for", json!({"logprob_start_len": 0}), |request| {
        request.generation.logprobs.is_none()
    });
}

#[test]
fn what_cannot_be_served_is_refused_with_its_documented_code() {
    for (members, code) in [
        (json!({"text": ["a", "b"]}), "resolve_input_failed"),
        (json!({"text": 1}), "resolve_input_failed"),
        (json!({"text": "a", "input_ids": [1]}), "resolve_input_failed"),
        (json!({"text": null}), "resolve_input_failed"),
        (json!({"input_ids": [[1], [2]]}), "resolve_input_failed"),
        (json!({"input_ids": []}), "resolve_input_failed"),
        (json!({"input_ids": ["a"]}), "resolve_input_failed"),
        (json!({"input_embeds": [[0.5]]}), "resolve_input_failed"),
        (json!({"rid": ["a"]}), "resolve_input_failed"),
        (json!({"sampling_params": [{}]}), "resolve_input_failed"),
        (json!({"sampling_params": "x"}), "invalid_type"),
        (json!({"sampling_params": {"temperature": "x"}}), "invalid_type"),
        (json!({"sampling_params": {"n": 0}}), "invalid_value"),
        (json!({"sampling_params": {"sampling_seed": -1}}), "invalid_value"),
        (json!({"sampling_params": {"regex": "a", "ebnf": "b"}}), "invalid_value"),
        (json!({"image_data": "x"}), "multimodal_not_supported"),
        (json!({"lora_path": "x"}), "unsupported_parameter"),
        (json!({"return_hidden_states": true}), "unsupported_parameter"),
        (json!({"return_logprob": 1}), "invalid_type"),
    ] {
        let refusal = request(members.clone()).unwrap_err();
        assert_eq!((refusal.status, refusal.code), (400, code), "{members}");
    }
}

fn token(sample: u32, id: u32, text: &str) -> Event {
    let step =
        crate::output::Step { sample, pieces: vec![content(text)], token_ids: vec![id], logprobs: vec![logprob(text)] };
    Event::Step(step)
}

#[test]
fn a_stream_tells_everything_so_far_in_every_event() {
    let script = [token(0, 11, "a"), token(0, 12, "\"b"), stopped_by(0, MatchedStop::Token(7))];
    let expected = [
        r#"data: {"text":"a","output_ids":[11],"meta_info":{"id":"gen-1","finish_reason":null,"prompt_tokens":9,"completion_tokens":1,"cached_tokens":0},"index":0}"#,
        r#"data: {"text":"a\"b","output_ids":[11,12],"meta_info":{"id":"gen-1","finish_reason":null,"prompt_tokens":9,"completion_tokens":2,"cached_tokens":0},"index":0}"#,
        r#"data: {"text":"a\"b","output_ids":[11,12],"meta_info":{"id":"gen-1","finish_reason":{"type":"stop","matched":7},"prompt_tokens":9,"completion_tokens":4,"cached_tokens":2,"reasoning_tokens":1},"index":0}"#,
        "data: [DONE]\n\n",
    ];
    assert_eq!(answer(json!({"stream": true}), &script), expected.join("\n\n"));
}

#[test]
fn a_document_is_a_list_when_several_samples_were_asked_for() {
    let script =
        [token(1, 12, "b"), token(0, 11, "a"), finish(1, FinishReason::Length), finish(0, FinishReason::Abort)];
    let tokens = r#""prompt_tokens":9,"completion_tokens":4,"cached_tokens":2,"reasoning_tokens":1"#;
    let one = format!(
        r#"{{"text":"a","output_ids":[11],"meta_info":{{"id":"gen-1-0","finish_reason":{{"type":"abort"}},{tokens}}}}}"#
    );
    let other = format!(
        r#"{{"text":"b","output_ids":[12],"meta_info":{{"id":"gen-1-1","finish_reason":{{"type":"length","length":4}},{tokens}}}}}"#
    );
    assert_eq!(answer(json!({"sampling_params": {"n": 2}}), &script), format!("[{one},{other}]"));
    let alone = document(&answer(json!({}), &script));
    assert_eq!(alone["meta_info"]["id"], "gen-1");
}

#[test]
fn log_probabilities_are_triples() {
    let script = [token(0, 11, "a"), finish(0, FinishReason::Stop)];
    let mut first = logprob("on");
    (first.logprob, first.top) = (None, Vec::new());
    for stream in [false, true] {
        let asked = json!({"return_logprob": true, "top_logprobs_num": 1, "logprob_start_len": 0,
            "return_text_in_logprobs": true, "stream": stream});
        let mut answer = request(asked).unwrap().answer(origin("gen-1"));
        answer.prompt_logprobs(0, &[first.clone(), logprob("ce")]);
        let body = drive(&mut *answer, &script);
        let documents = if stream { data(&body) } else { vec![document(&body)] };
        for document in documents {
            let meta = &document["meta_info"];
            assert_eq!(meta["input_token_logprobs"], json!([[null, 5, "on"], [-0.5, 5, "ce"]]));
            assert_eq!(meta["input_top_logprobs"], json!([null, [[-0.5, 5, "ce"]]]));
            assert_eq!(meta["output_token_logprobs"], json!([[-0.5, 5, "a"]]));
            assert_eq!(meta["output_top_logprobs"], json!([[[-0.5, 5, "a"]]]));
        }
    }
    let plain = document(&answer(json!({"return_logprob": true}), &script));
    assert_eq!(plain["meta_info"]["output_token_logprobs"], json!([[-0.5, 5, null]]), "texts only when asked for");
    assert_eq!(plain["meta_info"].get("output_top_logprobs"), None);
}

#[test]
fn the_version_of_the_weights_is_told_when_it_is_known() {
    let script = [finish(0, FinishReason::Stop)];
    let origin = Origin { weight_version: Some("v2".to_owned()), ..origin("gen-1") };
    let told = document(&drive(&mut *request(json!({})).unwrap().answer(origin), &script));
    assert_eq!(told["meta_info"]["weight_version"], "v2");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn any_cutting_of_an_output_gives_the_same_answer_streamed_or_not((one, other) in scripts(0)) {
        let whole = document(&answer(json!({}), &one));
        prop_assert_eq!(&document(&answer(json!({}), &other)), &whole);
        for script in [&one, &other] {
            let mut last = data(&answer(json!({"stream": true}), script)).pop().unwrap();
            last.as_object_mut().unwrap().remove("index");
            prop_assert_eq!(&last, &whole);
        }
    }
}
