//! Whatever clients send and whatever engines' output turns into: nothing panics, every refusal is one of the documented kind, and
//! every answer is well formed.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use bytes::BytesMut;
use proptest::prelude::*;
use serde_json::{Map, Value, json};
use smg_apis::output::TokenLogprob;
use smg_apis::{Api, Failure, Finish, FinishReason, MatchedStop, Origin, Piece, Step, Usage};

const APIS: [Api; 5] = [Api::Chat, Api::Completions, Api::Generate, Api::Messages, Api::Responses];

/// Every name that some API reads.
const NAMES: [&str; 76] = [
    "model",
    "messages",
    "prompt",
    "text",
    "input",
    "input_ids",
    "system",
    "instructions",
    "role",
    "content",
    "type",
    "tools",
    "tool_choice",
    "tool_calls",
    "function",
    "name",
    "arguments",
    "parameters",
    "input_schema",
    "description",
    "strict",
    "id",
    "call_id",
    "tool_use_id",
    "output",
    "thinking",
    "reasoning",
    "summary",
    "effort",
    "response_format",
    "json_schema",
    "schema",
    "format",
    "regex",
    "ebnf",
    "structural_tag",
    "structured_outputs",
    "guided_choice",
    "sampling_params",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "n",
    "best_of",
    "stop",
    "stop_sequences",
    "stop_token_ids",
    "logit_bias",
    "logprobs",
    "top_logprobs",
    "return_logprob",
    "logprob_start_len",
    "top_logprobs_num",
    "max_tokens",
    "max_new_tokens",
    "max_output_tokens",
    "stream",
    "stream_options",
    "include_usage",
    "include",
    "echo",
    "suffix",
    "rid",
    "store",
    "previous_response_id",
    "background",
    "conversation",
    "metadata",
    "truncation",
    "chat_template_kwargs",
    "continue_final_message",
    "mode",
    "allowed_tools",
    "output_config",
];

/// Every word that some API knows.
const WORDS: [&str; 36] = [
    "user",
    "assistant",
    "system",
    "developer",
    "tool",
    "text",
    "input_text",
    "output_text",
    "refusal",
    "image_url",
    "image",
    "tool_use",
    "tool_result",
    "thinking",
    "redacted_thinking",
    "function",
    "custom",
    "function_call",
    "function_call_output",
    "reasoning",
    "message",
    "item_reference",
    "auto",
    "none",
    "required",
    "any",
    "allowed_tools",
    "json_object",
    "json_schema",
    "structural_tag",
    "enabled",
    "disabled",
    "f",
    "",
    "message.output_text.logprobs",
    "web_search",
];

fn json() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        (-2..3_i64).prop_map(Value::from),
        any::<u64>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        prop::sample::select(&WORDS[..]).prop_map(Value::from),
        any::<String>().prop_map(Value::from),
    ];
    leaf.prop_recursive(5, 48, 6, |inner| {
        let name = prop_oneof![8 => prop::sample::select(&NAMES[..]).prop_map(str::to_owned), 1 => any::<String>()];
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..6).prop_map(Value::from),
            prop::collection::vec((name, inner), 0..8).prop_map(|members| Value::Object(members.into_iter().collect())),
        ]
    })
}

/// A request that would be served, with some of its members replaced or added.
fn altered() -> impl Strategy<Value = Value> {
    let members = prop::collection::vec((prop::sample::select(&NAMES[..]), json()), 0..5);
    let sound = json!({
        "model": "m", "messages": [{"role": "user", "content": "x"}], "prompt": ["x", "y"], "text": null, "input_ids": [1, 2],
        "input": "x", "max_tokens": 9, "max_output_tokens": 9
    });
    members.prop_map(move |members| {
        let mut request: Map<String, Value> = sound.as_object().unwrap().clone();
        request.extend(members.into_iter().map(|(name, value)| (name.to_owned(), value)));
        Value::Object(request)
    })
}

fn check_refusals(body: &[u8]) {
    for api in APIS {
        if let Err(refusal) = api.parse(body) {
            assert!(matches!(refusal.status, 400 | 501), "{refusal:?}");
            assert!(!refusal.message.is_empty() && !refusal.code.is_empty());
        }
    }
    let _ = smg_apis::messages::parse_count(body);
}

fn logprob() -> impl Strategy<Value = TokenLogprob> {
    let top = prop::collection::vec((any::<u32>(), any::<String>(), any::<f32>()), 0..4);
    (any::<u32>(), any::<String>(), any::<Option<f32>>(), top).prop_map(|(token_id, text, logprob, top)| TokenLogprob {
        token_id,
        text,
        logprob,
        top,
    })
}

fn piece() -> impl Strategy<Value = Piece> {
    prop_oneof![
        any::<String>().prop_map(Piece::Content),
        any::<String>().prop_map(Piece::Reasoning),
        (0..3_usize, any::<String>(), any::<String>()).prop_map(|(index, id, name)| Piece::ToolCall {
            index,
            id,
            name
        }),
        (0..4_usize, any::<String>()).prop_map(|(index, fragment)| Piece::ToolArguments { index, fragment }),
    ]
}

#[derive(Debug, Clone)]
enum Event {
    Prompt(u32, Vec<TokenLogprob>),
    Step(Step),
    Finish(Finish),
}

fn event() -> impl Strategy<Value = Event> {
    let sample = || 0..6_u32;
    let logprobs = || prop::collection::vec(logprob(), 0..3);
    let step = (sample(), prop::collection::vec(piece(), 0..4), prop::collection::vec(any::<u32>(), 0..4), logprobs())
        .prop_map(|(sample, pieces, token_ids, logprobs)| Event::Step(Step { sample, pieces, token_ids, logprobs }));
    let reason = prop_oneof![
        Just(FinishReason::Stop),
        Just(FinishReason::Length),
        Just(FinishReason::Abort),
        any::<String>().prop_map(FinishReason::Other)
    ];
    let matched = prop::option::of(prop_oneof![
        any::<u32>().prop_map(MatchedStop::Token),
        any::<String>().prop_map(MatchedStop::Text)
    ]);
    let usage = any::<(u32, u32, u32, u32)>().prop_map(
        |(prompt_tokens, completion_tokens, cached_tokens, reasoning_tokens)| Usage {
            prompt_tokens,
            completion_tokens,
            cached_tokens,
            reasoning_tokens,
        },
    );
    let finish = (sample(), reason, matched, usage, logprobs()).prop_map(
        |(sample, reason, matched_stop, usage, prompt_logprobs)| {
            Event::Finish(Finish { sample, reason, matched_stop, usage, prompt_logprobs })
        },
    );
    prop_oneof![
        1 => (sample(), logprobs()).prop_map(|(sample, logprobs)| Event::Prompt(sample, logprobs)),
        6 => step,
        2 => finish,
    ]
}

fn requests(stream: bool) -> Vec<(Api, Value)> {
    let messages = json!([{"role": "user", "content": "x"}]);
    vec![
        (Api::Chat, json!({"messages": messages, "n": 3, "stream": stream, "logprobs": true, "top_logprobs": 2})),
        (Api::Completions, json!({"prompt": ["x", "y"], "n": 2, "stream": stream, "logprobs": 2, "echo": true})),
        (
            Api::Generate,
            json!({"text": "x", "sampling_params": {"n": 3}, "stream": stream, "return_logprob": true,
            "top_logprobs_num": 2, "return_text_in_logprobs": true}),
        ),
        (Api::Messages, json!({"messages": messages, "max_tokens": 9, "stream": stream})),
        (Api::Responses, json!({"input": "x", "stream": stream, "include": ["message.output_text.logprobs"]})),
    ]
}

fn check_stream(out: &[u8]) {
    let text = std::str::from_utf8(out).expect("text");
    for frame in text.split("\n\n").filter(|frame| !frame.is_empty()) {
        let data = frame.lines().last().and_then(|line| line.strip_prefix("data: ")).expect("data");
        assert!(frame.lines().count() <= 2, "{frame}");
        if data != "[DONE]" {
            serde_json::from_str::<Value>(data).unwrap_or_else(|error| panic!("{error}: {data}"));
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn any_bytes_are_read_or_refused(body in prop::collection::vec(any::<u8>(), 0..200)) {
        check_refusals(&body);
    }

    #[test]
    fn any_json_is_read_or_refused(body in json()) {
        check_refusals(body.to_string().as_bytes());
    }

    #[test]
    fn any_alteration_of_a_request_is_read_or_refused(body in altered()) {
        check_refusals(body.to_string().as_bytes());
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn any_output_gives_well_formed_answers(events in prop::collection::vec(event(), 0..12), fails in any::<bool>()) {
        for stream in [false, true] {
            for (api, body) in requests(stream) {
                let request = api.parse(body.to_string().as_bytes()).unwrap();
                let origin = Origin { id: format!("{}\"1", api.id_prefix()), created: 1, model: "m\n".to_owned(), prompt_tokens: 3,
                    weight_version: None };
                let mut answer = request.answer(origin, vec!["x\n".to_owned(), "y".to_owned()]);
                let mut out = BytesMut::new();
                answer.start(&mut out);
                for event in &events {
                    match event {
                        Event::Prompt(sample, logprobs) => answer.prompt_logprobs(*sample, logprobs),
                        Event::Step(step) => answer.step(step, &mut out),
                        Event::Finish(finish) => answer.finish(finish, &mut out),
                    }
                }
                if fails {
                    answer.fail(&Failure::stream("\n\"gone"), &mut out);
                } else {
                    answer.end(&mut out);
                }
                match (stream, fails) {
                    (true, _) => check_stream(&out),
                    (false, true) => prop_assert!(out.is_empty()),
                    (false, false) => drop(serde_json::from_slice::<Value>(&out).expect("a document")),
                }
                answer.stored();
            }
        }
    }
}

#[test]
fn a_deeply_nested_body_is_refused() {
    let body = format!("{}{}", "[".repeat(100_000), "]".repeat(100_000));
    check_refusals(body.as_bytes());
    check_refusals(format!("{{\"messages\":{body}}}").as_bytes());
}
