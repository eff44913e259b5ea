#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use proptest::prelude::*;
use serde_json::json;

use super::*;
use crate::output::{FinishReason, MatchedStop};
use crate::testing::*;

fn request(mut members: Value) -> Result<Request, Refusal> {
    if members.get("prompt").is_none() {
        members["prompt"] = json!("once");
    }
    parse(members.to_string().as_bytes())
}

fn answer(members: Value, script: &[Event]) -> String {
    let prompts = vec!["once".to_owned(), "twice".to_owned()];
    drive(&mut *request(members).unwrap().answer(origin("cmpl-1"), prompts), script)
}

#[test]
fn prompts_come_in_four_shapes() {
    for (prompt, expected) in [
        (json!("a"), Prompt::Texts(vec!["a".to_owned()])),
        (json!(["a", "b"]), Prompt::Texts(vec!["a".to_owned(), "b".to_owned()])),
        (json!([1, 2]), Prompt::Tokens(vec![vec![1, 2]])),
        (json!([[1], [2, 3]]), Prompt::Tokens(vec![vec![1], vec![2, 3]])),
    ] {
        assert_eq!(request(json!({"prompt": prompt})).unwrap().generation.prompt, expected, "{prompt}");
    }
    for prompt in
        [json!(1), json!([]), json!(["a", 1]), json!([1, "a"]), json!([[]]), json!([[1], "a"]), json!([-1]), json!({})]
    {
        assert_eq!(request(json!({"prompt": prompt})).unwrap_err().code, "invalid_type", "{prompt}");
    }
    assert_eq!(parse(b"{}").unwrap_err().code, "missing_required_parameter");
}

#[test]
fn every_documented_field_is_read() {
    let check = |fact: &str, members: Value, holds: fn(&Request) -> bool| {
        let request = request(members).unwrap_or_else(|refusal| panic!("{fact}: {refusal}"));
        assert!(holds(&request), "{fact}: {request:?}");
    };
    check("OpenAI max_tokens, 0 to score a prompt", json!({"max_tokens": 0}), |request| {
        request.generation.sampling.max_tokens == Some(0)
    });
    check("OpenAI logprobs", json!({"logprobs": 0}), |request| {
        request.generation.logprobs == Some(Logprobs { top: 0, prompt_from: None })
    });
    check("OpenAI echo with logprobs", json!({"logprobs": 5, "echo": true}), |request| {
        request.echo && request.generation.logprobs == Some(Logprobs { top: 5, prompt_from: Some(0) })
    });
    check("OpenAI best_of", json!({"best_of": 2, "n": 2}), |request| request.generation.samples == 2);
    check("OpenAI suffix, empty", json!({"suffix": ""}), |_| true);
    check("SGLang skip_special_tokens", json!({"skip_special_tokens": false}), |request| {
        !request.generation.reading.skip_special_tokens
    });
    check("vLLM include_stop_str_in_output", json!({"include_stop_str_in_output": true}), |request| {
        request.generation.sampling.keep_stop
    });
    check("SGLang regex", json!({"regex": "a"}), |request| request.generation.constraint.is_some());
}

#[test]
fn what_cannot_be_served_is_refused_with_its_documented_code() {
    for (members, code) in [
        (json!({"suffix": "end"}), "unsupported_parameter"),
        (json!({"prompt_embeds": "x"}), "unsupported_parameter"),
        (json!({"use_beam_search": true}), "unsupported_parameter"),
        (json!({"best_of": 3}), "invalid_value"),
        (json!({"logprobs": true}), "invalid_type"),
        (json!({"logprobs": 21}), "invalid_value"),
        (json!({"echo": 1}), "invalid_type"),
        (json!({"max_tokens": -1}), "invalid_value"),
        (json!({"n": 0}), "invalid_value"),
        (json!({"n": 128, "prompt": vec!["x"; 17]}), "invalid_value"),
        (json!({"prompt": vec!["x"; 2_049]}), "invalid_value"),
    ] {
        let refusal = request(members.clone()).unwrap_err();
        assert_eq!((refusal.status, refusal.code), (400, code), "{members}");
    }
}

#[test]
fn a_document_numbers_choices_by_prompt_and_sample() {
    let script = [
        step(3, vec![content("d")]),
        step(0, vec![content("a")]),
        stopped_by(0, MatchedStop::Token(7)),
        finish(3, FinishReason::Length),
        finish(1, FinishReason::Stop),
        finish(2, FinishReason::Stop),
    ];
    let members = json!({"prompt": ["once", "twice"], "n": 2, "echo": true});
    let expected = r#"{"id":"cmpl-1","object":"text_completion","created":1700000000,"model":"m","choices":[{"index":0,"text":"oncea","logprobs":null,"finish_reason":"stop","matched_stop":7},{"index":1,"text":"once","logprobs":null,"finish_reason":"stop"},{"index":2,"text":"twice","logprobs":null,"finish_reason":"stop"},{"index":3,"text":"twiced","logprobs":null,"finish_reason":"length"}],"usage":{"prompt_tokens":18,"completion_tokens":16,"total_tokens":34,"prompt_tokens_details":{"cached_tokens":4},"completion_tokens_details":{"reasoning_tokens":4}}}"#;
    assert_eq!(answer(members, &script), expected);
}

#[test]
fn a_stream_echoes_the_prompt_first() {
    let script = [step(0, vec![content("a")]), finish(0, FinishReason::Stop)];
    let stream = answer(json!({"echo": true, "stream": true, "stream_options": {"include_usage": true}}), &script);
    let head = r#"data: {"id":"cmpl-1","object":"text_completion","created":1700000000,"model":"m","choices":["#;
    let chunk = |choice: &str| format!("{head}{choice}],\"usage\":null}}\n\n");
    let usage = r#""usage":{"prompt_tokens":9,"completion_tokens":4,"total_tokens":13,"prompt_tokens_details":{"cached_tokens":2},"completion_tokens_details":{"reasoning_tokens":1}}"#;
    let expected = [
        chunk(r#"{"index":0,"text":"once","logprobs":null,"finish_reason":null}"#),
        chunk(r#"{"index":0,"text":"a","logprobs":null,"finish_reason":null}"#),
        chunk(r#"{"index":0,"text":"","logprobs":null,"finish_reason":"stop"}"#),
        format!("{head}],{usage}}}\n\n"),
        "data: [DONE]\n\n".to_owned(),
    ];
    assert_eq!(stream, expected.concat());
}

/// The prompt's log probabilities: its first token has none.
fn prompt_entries() -> Vec<crate::output::TokenLogprob> {
    let mut first = logprob("on");
    (first.logprob, first.top) = (None, Vec::new());
    vec![first, logprob("ce")]
}

#[test]
fn log_probabilities_come_in_four_lists() {
    let script = [
        logged(0, "é", vec![content("é")]),
        logged(0, "b", vec![]),
        logged(0, "c", vec![content("bc")]),
        logged(0, "STOP", vec![]),
        finish(0, FinishReason::Stop),
    ];
    let top = |text: &str| json!({text: -0.5, "~": -1.5});
    let output = json!({
        "text_offset": [0, 1, 2], "token_logprobs": [-0.5, -0.5, -0.5], "tokens": ["é", "b", "c"],
        "top_logprobs": [top("é"), top("b"), top("c")]
    });
    assert_eq!(document(&answer(json!({"logprobs": 2}), &script))["choices"][0]["logprobs"], output);
    let least = document(&answer(json!({"logprobs": 0}), &script));
    assert_eq!(
        least["choices"][0]["logprobs"]["top_logprobs"][0],
        json!({"é": -0.5}),
        "the drawn token is always told"
    );

    let with_prompt = json!({
        "text_offset": [0, 2, 4, 5, 6], "token_logprobs": [null, -0.5, -0.5, -0.5, -0.5], "tokens": ["on", "ce", "é", "b", "c"],
        "top_logprobs": [null, top("ce"), top("é"), top("b"), top("c")]
    });
    for stream in [false, true] {
        let asked = request(json!({"logprobs": 2, "echo": true, "stream": stream})).unwrap();
        let mut answer = asked.answer(origin("cmpl-1"), vec!["once".to_owned()]);
        answer.prompt_logprobs(0, &prompt_entries());
        let body = drive(&mut *answer, &script);
        let logprobs = match stream {
            false => document(&body)["choices"][0]["logprobs"].clone(),
            true => folded(&body, 1)["choices"][0]["logprobs"].clone(),
        };
        assert_eq!(logprobs, with_prompt, "stream: {stream}");
    }
}

#[test]
fn the_prompts_log_probabilities_may_come_at_the_end_of_a_document() {
    let mut script = vec![logged(0, "a", vec![content("a")]), finish(0, FinishReason::Stop)];
    if let Some(Event::Finish(finish)) = script.last_mut() {
        finish.prompt_logprobs = prompt_entries();
    }
    let told = document(&answer(json!({"logprobs": 1, "echo": true}), &script));
    assert_eq!(told["choices"][0]["logprobs"]["tokens"], json!(["on", "ce", "a"]));
    assert_eq!(told["choices"][0]["logprobs"]["text_offset"], json!([0, 2, 4]));
}

/// The document that a client makes of a stream.
fn folded(stream: &str, choices: usize) -> Value {
    let mut choices = vec![json!({"text": "", "logprobs": null}); choices];
    let mut usage = Value::Null;
    for chunk in data(stream) {
        let Some(told) = chunk["choices"].get(0) else {
            usage = chunk["usage"].clone();
            continue;
        };
        let choice = &mut choices[told["index"].as_u64().unwrap() as usize];
        choice["index"] = told["index"].clone();
        choice["finish_reason"] = told["finish_reason"].clone();
        append(&mut choice["text"], &told["text"]);
        if let Some(lists) = told["logprobs"].as_object() {
            for (name, list) in lists {
                let before = choice["logprobs"].get(name).and_then(Value::as_array).cloned().unwrap_or_default();
                choice["logprobs"][name] = [before, list.as_array().unwrap().clone()].concat().into();
            }
        }
    }
    let created = 1_700_000_000;
    json!({"id": "cmpl-1", "object": "text_completion", "created": created, "model": "m", "choices": choices, "usage": usage})
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn any_cutting_of_an_output_gives_the_same_answer_streamed_or_not((one, other) in scripts(0), echo in any::<bool>()) {
        let whole = document(&answer(json!({"echo": echo}), &one));
        prop_assert_eq!(&document(&answer(json!({"echo": echo}), &other)), &whole);
        let streamed = json!({"echo": echo, "stream": true, "stream_options": {"include_usage": true}});
        for script in [&one, &other] {
            prop_assert_eq!(&folded(&answer(streamed.clone(), script), 1), &whole);
        }
    }
}
