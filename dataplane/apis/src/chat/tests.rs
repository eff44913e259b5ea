#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;
use crate::generation::{Constraint, ToolChoice};
use crate::output::MatchedStop;
use crate::testing::*;

fn request(mut members: Value) -> Result<Request, Refusal> {
    let defaults = json!({"model": "m", "messages": [{"role": "user", "content": "hi"}]});
    for (name, value) in defaults.as_object().unwrap() {
        if members.get(name).is_none() {
            members[name] = value.clone();
        }
    }
    parse(members.to_string().as_bytes())
}

fn answer(members: Value, script: &[Event]) -> String {
    drive(&mut *request(members).unwrap().answer(origin("chatcmpl-1")), script)
}

fn prompt(request: &Request) -> &ChatPrompt {
    match &request.generation.prompt {
        Prompt::Chat(prompt) => prompt,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_plain_request_leaves_everything_else_open() {
    let plain = request(json!({})).unwrap().generation;
    assert_eq!(plain.model.as_deref(), Some("m"));
    assert_eq!((plain.samples, plain.stream, plain.stream_usage), (1, false, false));
    assert_eq!((plain.logprobs, plain.constraint, plain.request_id), (None, None, None));
    assert_eq!(plain.sampling, Default::default());
    let reading = Reading { tools: ToolChoice::None, separate_reasoning: true, skip_special_tokens: true };
    assert_eq!(plain.reading, reading);
}

#[test]
fn every_documented_field_is_read() {
    let tools = json!([{"type": "function", "function": {"name": "f", "parameters": {}}}]);
    let check = |fact: &str, members: Value, holds: fn(&Request) -> bool| {
        let request = request(members).unwrap_or_else(|refusal| panic!("{fact}: {refusal}"));
        assert!(holds(&request), "{fact}: {request:?}");
    };
    check("OpenAI max_completion_tokens", json!({"max_completion_tokens": 3, "max_tokens": 9}), |request| {
        request.generation.sampling.max_tokens == Some(3)
    });
    check("OpenAI max_tokens", json!({"max_tokens": 9}), |request| request.generation.sampling.max_tokens == Some(9));
    check("OpenAI n", json!({"n": 128}), |request| request.generation.samples == 128);
    check("OpenAI logprobs", json!({"logprobs": true}), |request| {
        request.generation.logprobs == Some(Logprobs { top: 0, prompt_from: None })
    });
    check("OpenAI top_logprobs", json!({"logprobs": true, "top_logprobs": 20}), |request| {
        request.generation.logprobs == Some(Logprobs { top: 20, prompt_from: None })
    });
    check("OpenAI stream_options", json!({"stream": true, "stream_options": {"include_usage": true}}), |request| {
        request.generation.stream && request.generation.stream_usage
    });
    check("no usage without a stream", json!({"stream_options": {"include_usage": true}}), |request| {
        !request.generation.stream_usage
    });
    check("OpenAI tools", json!({"tools": tools}), |request| {
        prompt(request).tools.len() == 1 && request.generation.reading.tools == ToolChoice::Auto
    });
    check("OpenAI tool_choice none", json!({"tools": tools, "tool_choice": "none"}), |request| {
        prompt(request).tools.is_empty() && request.generation.reading.tools == ToolChoice::None
    });
    check("OpenAI response_format", json!({"response_format": {"type": "json_object"}}), |request| {
        matches!(request.generation.constraint, Some(Constraint::JsonSchema(_)))
    });
    check("SGLang regex", json!({"regex": "a"}), |request| {
        matches!(request.generation.constraint, Some(Constraint::Regex(_)))
    });
    check("SGLang rid", json!({"rid": "r1"}), |request| request.generation.request_id.as_deref() == Some("r1"));
    check("SGLang separate_reasoning", json!({"separate_reasoning": false}), |request| {
        !request.generation.reading.separate_reasoning
    });
    check("vLLM include_reasoning", json!({"include_reasoning": false}), |request| !request.form.include_reasoning);
    check("OpenAI parallel_tool_calls", json!({"parallel_tool_calls": false}), |request| {
        !request.form.parallel_tool_calls
    });
    check("special tokens never show", json!({"skip_special_tokens": false}), |request| {
        request.generation.reading.skip_special_tokens
    });
    check(
        "continue_final_message",
        json!({"continue_final_message": true, "messages":
            [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]}),
        |request| prompt(request).continue_final_message,
    );
    check("unknown fields", json!({"no_such_field": {"a": 1}}), |_| true);
}

#[test]
fn the_template_is_told_of_choices_that_it_may_depend_on() {
    let request = request(json!({
        "tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "auto", "reasoning_effort": "low",
        "response_format": {"type": "text"}, "chat_template_kwargs": {"enable_thinking": false, "reasoning_effort": "high"}
    }));
    let expected = json!({
        "tool_choice": "auto", "response_format": {"type": "text"}, "enable_thinking": false, "reasoning_effort": "high"
    });
    assert_eq!(Value::Object(prompt(&request.unwrap()).variables.clone()), expected);
}

#[test]
fn the_model_sees_members_in_the_order_in_which_the_client_wrote_them() {
    let parameters =
        r#"{"type":"object","properties":{"zebra":{"type":"string"},"apple":{"enum":["b","a"]}},"required":["zebra"]}"#;
    let body = format!(
        r#"{{"messages":[{{"role":"user","content":"x","b":1,"a":2}}],
            "tools":[{{"type":"function","function":{{"parameters":{parameters},"name":"f"}}}}],
            "response_format":{{"type":"json_schema","json_schema":{{"schema":{parameters}}}}}}}"#
    );
    let request = parse(body.as_bytes()).unwrap();
    assert_eq!(prompt(&request).messages[0].to_string(), r#"{"role":"user","content":"x","b":1,"a":2}"#);
    let tool = format!(r#"{{"type":"function","function":{{"name":"f","parameters":{parameters}}}}}"#);
    assert_eq!(prompt(&request).tools[0].to_string(), tool);
    assert_eq!(request.generation.constraint, Some(Constraint::JsonSchema(parameters.to_owned())));
}

#[test]
fn what_cannot_be_served_is_refused_with_its_documented_code() {
    for (members, code) in [
        (json!({"messages": null}), "missing_required_parameter"),
        (json!({"messages": "hi"}), "invalid_type"),
        (json!({"messages": []}), "invalid_value"),
        (json!({"messages": vec![json!(0); 16_385]}), "invalid_value"),
        (json!({"model": 1}), "invalid_type"),
        (json!({"n": 0}), "invalid_value"),
        (json!({"n": 129}), "invalid_value"),
        (json!({"max_tokens": 0}), "invalid_value"),
        (json!({"max_tokens": "9"}), "invalid_type"),
        (json!({"logprobs": 1}), "invalid_type"),
        (json!({"top_logprobs": 2}), "invalid_value"),
        (json!({"logprobs": true, "top_logprobs": 21}), "invalid_value"),
        (json!({"stream": "yes"}), "invalid_type"),
        (json!({"stream_options": 1}), "invalid_type"),
        (json!({"rid": ""}), "invalid_value"),
        (json!({"reasoning_effort": 1}), "invalid_type"),
        (json!({"chat_template_kwargs": "x"}), "invalid_type"),
        (json!({"continue_final_message": true}), "process_messages_failed"),
        (json!({"tool_choice": "required"}), "invalid_tool_configuration"),
        (json!({"tools": vec![json!(0); 1_025]}), "invalid_value"),
        (json!({"modalities": ["text", "audio"]}), "multimodal_not_supported"),
        (json!({"functions": [{"name": "f"}]}), "unsupported_parameter"),
        (json!({"lora_path": "x"}), "unsupported_parameter"),
        (json!({"return_hidden_states": true}), "unsupported_parameter"),
        (json!({"seed": -1}), "invalid_value"),
        (json!({"regex": "a", "ebnf": "b"}), "invalid_value"),
    ] {
        let refusal = request(members.clone()).unwrap_err();
        assert_eq!((refusal.status, refusal.code), (400, code), "{members}: {refusal}");
    }
    assert!(request(json!({"functions": [], "return_hidden_states": false, "lora_path": null})).is_ok());
}

#[test]
fn a_stream_tells_the_role_first_and_the_usage_last() {
    let script = [
        step(0, vec![]),
        step(0, vec![reasoning("hm")]),
        step(0, vec![content("a\"b")]),
        stopped_by(0, MatchedStop::Text("END".to_owned())),
    ];
    let stream = answer(json!({"stream": true, "stream_options": {"include_usage": true}}), &script);
    let head =
        r#"data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1700000000,"model":"m","choices":["#;
    let chunk = |choice: &str| format!("{head}{choice}],\"usage\":null}}\n\n");
    let expected = [
        chunk(r#"{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}"#),
        chunk(r#"{"index":0,"delta":{"reasoning_content":"hm"},"logprobs":null,"finish_reason":null}"#),
        chunk(r#"{"index":0,"delta":{"content":"a\"b"},"logprobs":null,"finish_reason":null}"#),
        chunk(r#"{"index":0,"delta":{},"logprobs":null,"finish_reason":"stop","matched_stop":"END"}"#),
        format!("{head}],{}}}\n\n", USAGE),
        "data: [DONE]\n\n".to_owned(),
    ];
    assert_eq!(stream, expected.concat());
}

const USAGE: &str = r#""usage":{"prompt_tokens":9,"completion_tokens":4,"total_tokens":13,"prompt_tokens_details":{"cached_tokens":2},"completion_tokens_details":{"reasoning_tokens":1}}"#;

#[test]
fn a_stream_of_calls_tells_name_and_id_once() {
    let script = [
        step(0, vec![call(0, "f"), arguments(0, "{\"a\"")]),
        step(0, vec![arguments(0, ":1}"), call(1, "g")]),
        finish(0, FinishReason::Stop),
    ];
    let deltas: Vec<_> = data(&answer(json!({"stream": true}), &script))
        .into_iter()
        .map(|chunk| chunk["choices"][0]["delta"].clone())
        .collect();
    let expected = [
        json!({"role": "assistant", "content": ""}),
        json!({"tool_calls": [{"index": 0, "id": "call_0", "type": "function", "function": {"name": "f", "arguments": ""}}]}),
        json!({"tool_calls": [{"index": 0, "function": {"arguments": "{\"a\""}}]}),
        json!({"tool_calls": [{"index": 0, "function": {"arguments": ":1}"}}]}),
        json!({"tool_calls": [{"index": 1, "id": "call_1", "type": "function", "function": {"name": "g", "arguments": ""}}]}),
        json!({}),
    ];
    assert_eq!(deltas, expected);
}

#[test]
fn a_document_holds_every_sample_in_order() {
    let script = [
        step(1, vec![call(0, "f"), arguments(0, "{}")]),
        step(0, vec![reasoning("hm"), content("hello")]),
        finish(1, FinishReason::Stop),
        finish(0, FinishReason::Length),
        step(2, vec![content("nobody asked")]),
        finish(2, FinishReason::Stop),
    ];
    let expected = r#"{"id":"chatcmpl-1","object":"chat.completion","created":1700000000,"model":"m","choices":[{"index":0,"message":{"role":"assistant","content":"hello","refusal":null,"reasoning_content":"hm"},"logprobs":null,"finish_reason":"length"},{"index":1,"message":{"role":"assistant","content":null,"refusal":null,"tool_calls":[{"id":"call_0","type":"function","function":{"name":"f","arguments":"{}"}}]},"logprobs":null,"finish_reason":"tool_calls"}],"usage":{"prompt_tokens":9,"completion_tokens":8,"total_tokens":17,"prompt_tokens_details":{"cached_tokens":2},"completion_tokens_details":{"reasoning_tokens":2}}}"#;
    assert_eq!(answer(json!({"n": 2}), &script), expected);
}

#[test]
fn finish_reasons_are_told_in_openais_words() {
    for (reason, calls, word) in [
        (FinishReason::Stop, false, "stop"),
        (FinishReason::Stop, true, "tool_calls"),
        (FinishReason::Length, true, "length"),
        (FinishReason::Abort, true, "abort"),
        (FinishReason::Other("odd".to_owned()), false, "odd"),
    ] {
        assert_eq!(finish_reason(&reason, calls), word);
    }
}

#[test]
fn log_probabilities_are_those_of_the_visible_content() {
    let script = [
        logged(0, "<think>", vec![]),
        logged(0, "t", vec![reasoning("t")]),
        logged(0, "a", vec![]),
        logged(0, "b", vec![content("ab")]),
        logged(0, "STOP", vec![]),
        finish(0, FinishReason::Stop),
    ];
    let entry = |text: &str, byte: u8| {
        json!({"token": text, "logprob": -0.5, "bytes": [byte], "top_logprobs":
            [{"token": text, "logprob": -0.5, "bytes": [byte]}]})
    };
    let expected = json!({"content": [entry("a", 97), entry("b", 98)], "refusal": null});
    let asked = json!({"logprobs": true, "top_logprobs": 1});
    assert_eq!(document(&answer(asked.clone(), &script))["choices"][0]["logprobs"], expected);

    let mut streamed = asked;
    streamed["stream"] = json!(true);
    let told: Vec<_> = data(&answer(streamed, &script))
        .into_iter()
        .map(|chunk| chunk["choices"][0]["logprobs"].clone())
        .filter(|logprobs| !logprobs.is_null())
        .collect();
    assert_eq!(told, [expected]);
}

#[test]
fn hidden_reasoning_and_further_calls_do_not_show() {
    let script = [
        step(0, vec![reasoning("hm"), call(0, "f"), arguments(0, "{}"), call(1, "g"), arguments(1, "{}")]),
        finish(0, FinishReason::Stop),
    ];
    let asked = json!({"include_reasoning": false, "parallel_tool_calls": false});
    let message = &document(&answer(asked.clone(), &script))["choices"][0]["message"];
    assert_eq!(message["tool_calls"].as_array().unwrap().len(), 1);
    assert_eq!(message.get("reasoning_content"), None);
    let mut streamed = asked;
    streamed["stream"] = json!(true);
    let stream = answer(streamed, &script);
    assert!(!stream.contains("reasoning_content") && !stream.contains("call_1"), "{stream}");
}

#[test]
fn a_broken_stream_says_so_and_ends() {
    let mut answer = request(json!({"stream": true})).unwrap().answer(origin("x"));
    let mut out = bytes::BytesMut::new();
    answer.fail(&crate::Failure::stream("Decode stream error: gone"), &mut out);
    let expected = "data: {\"error\":{\"message\":\"Stream error: Decode stream error: gone\",\"type\":\"stream_error\"}}\n\n\
        data: [DONE]\n\n";
    assert_eq!(&out[..], expected.as_bytes());

    let mut answer = request(json!({})).unwrap().answer(origin("x"));
    let mut out = bytes::BytesMut::new();
    answer.fail(&crate::Failure::internal("x"), &mut out);
    assert!(out.is_empty(), "there is still time for a status");
}

/// The document that a client makes of a stream.
fn folded(stream: &str, samples: usize) -> Value {
    let mut choices = vec![json!({"message": {"content": "", "refusal": null}}); samples];
    let mut usage = Value::Null;
    for chunk in data(stream) {
        let Some(told) = chunk["choices"].get(0) else {
            usage = chunk["usage"].clone();
            continue;
        };
        let index = told["index"].as_u64().unwrap() as usize;
        let choice = &mut choices[index];
        choice["index"] = told["index"].clone();
        for name in ["finish_reason", "logprobs", "matched_stop"] {
            match &told[name] {
                Value::Null if name == "matched_stop" => {}
                value => choice[name] = value.clone(),
            }
        }
        for (name, value) in told["delta"].as_object().unwrap() {
            let message = &mut choice["message"];
            if name == "tool_calls" {
                let call = &value[0];
                let at = call["index"].as_u64().unwrap() as usize;
                if let Some(id) = call.get("id") {
                    if at == 0 {
                        message["tool_calls"] = json!([]);
                    }
                    let function = json!({"name": call["function"]["name"], "arguments": ""});
                    let call = json!({"id": id, "type": "function", "function": function});
                    message["tool_calls"].as_array_mut().unwrap().push(call);
                }
                append(&mut message["tool_calls"][at]["function"]["arguments"], &call["function"]["arguments"]);
            } else {
                append(&mut message[name], value);
            }
        }
    }
    for choice in &mut choices {
        if choice["message"]["content"] == "" && choice["message"].get("tool_calls").is_some() {
            choice["message"]["content"] = Value::Null;
        }
    }
    json!({"id": "chatcmpl-1", "object": "chat.completion", "created": 1_700_000_000, "model": "m", "choices": choices, "usage": usage})
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn any_cutting_of_an_output_gives_the_same_answer_streamed_or_not(
        (one, other) in (scripts(0), scripts(1)).prop_map(|((a, b), (c, d))| ([a, c].concat(), [b, d].concat())),
    ) {
        let whole = document(&answer(json!({"n": 2}), &one));
        prop_assert_eq!(&document(&answer(json!({"n": 2}), &other)), &whole);
        let streamed = json!({"n": 2, "stream": true, "stream_options": {"include_usage": true}});
        for script in [&one, &other] {
            prop_assert_eq!(&folded(&answer(streamed.clone(), script), 2), &whole);
        }
    }
}

#[test]
fn a_sample_that_ends_before_any_step_still_tells_its_role() {
    let script = [finish(0, FinishReason::Length)];
    let chunks = data(&answer(json!({"stream": true}), &script));
    assert_eq!(chunks[0]["choices"][0]["delta"]["role"], "assistant");
    assert_eq!(chunks[1]["choices"][0]["finish_reason"], "length");
}
