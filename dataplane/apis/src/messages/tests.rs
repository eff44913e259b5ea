#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use proptest::prelude::*;
use serde_json::json;

use super::*;
use crate::testing::*;

fn request(mut members: Value) -> Result<Request, Refusal> {
    let defaults = json!({"model": "m", "max_tokens": 64, "messages": [{"role": "user", "content": "hi"}]});
    for (name, value) in defaults.as_object().unwrap() {
        if members.get(name).is_none() {
            members[name] = value.clone();
        }
    }
    parse(members.to_string().as_bytes())
}

fn answer(members: Value, script: &[Event]) -> String {
    drive(&mut *request(members).unwrap().answer(origin("msg_1")), script)
}

fn prompt(request: &Request) -> &ChatPrompt {
    match &request.generation.prompt {
        Prompt::Chat(prompt) => prompt,
        other => panic!("{other:?}"),
    }
}

#[test]
fn every_documented_field_is_read() {
    let tools = json!([{"name": "f", "description": "d", "input_schema": {"type": "object"}}]);
    let check = |fact: &str, members: Value, holds: fn(&Request) -> bool| {
        let request = request(members).unwrap_or_else(|refusal| panic!("{fact}: {refusal}"));
        assert!(holds(&request), "{fact}: {request:?}");
    };
    check("max_tokens", json!({"max_tokens": 5}), |request| request.generation.sampling.max_tokens == Some(5));
    check("max_tokens 0", json!({"max_tokens": 0}), |request| request.generation.sampling.max_tokens == Some(0));
    check("system", json!({"system": "brief"}), |request| prompt(request).messages[0]["role"] == "system");
    check("stop_sequences", json!({"stop_sequences": ["a"]}), |request| request.generation.sampling.stop == ["a"]);
    check("top_k", json!({"top_k": 5}), |request| request.generation.sampling.top_k == Some(5));
    check("stream", json!({"stream": true}), |request| request.generation.stream);
    check("tools", json!({"tools": tools}), |request| {
        let tool = json!({"type": "function", "function":
            {"name": "f", "description": "d", "parameters": {"type": "object"}}});
        prompt(request).tools == [tool] && request.generation.reading.tools == ToolChoice::Auto
    });
    check("tool_choice any", json!({"tools": tools, "tool_choice": {"type": "any"}}), |request| {
        request.generation.reading.tools == ToolChoice::Required
    });
    check("tool_choice tool", json!({"tools": tools, "tool_choice": {"type": "tool", "name": "f"}}), |request| {
        request.generation.reading.tools == ToolChoice::Function("f".to_owned())
    });
    check("tool_choice none", json!({"tools": tools, "tool_choice": {"type": "none"}}), |request| {
        prompt(request).tools.is_empty() && request.generation.reading.tools == ToolChoice::None
    });
    check(
        "disable_parallel_tool_use",
        json!({"tools": tools, "tool_choice": {"type": "auto", "disable_parallel_tool_use": true}}),
        |request| !request.parallel,
    );
    check("thinking enabled", json!({"thinking": {"type": "enabled", "budget_tokens": 1024}}), |request| {
        prompt(request).variables["enable_thinking"] == true
    });
    check("thinking disabled", json!({"thinking": {"type": "disabled"}}), |request| {
        prompt(request).variables["enable_thinking"] == false
    });
    check("nothing said of thinking", json!({}), |request| prompt(request).variables.is_empty());
    check(
        "prefill of the answer",
        json!({"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "{"}]}),
        |request| prompt(request).continue_final_message,
    );
    check(
        "output_config.format",
        json!({"output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}}}),
        |request| request.generation.constraint == Some(Constraint::JsonSchema(r#"{"type":"object"}"#.to_owned())),
    );
    check("metadata and unknown fields", json!({"metadata": {"user_id": "x"}, "service_tier": "auto", "x": 1}), |_| {
        true
    });
}

#[test]
fn what_cannot_be_served_is_refused_with_its_documented_code() {
    for (members, code) in [
        (json!({"max_tokens": null}), "missing_required_parameter"),
        (json!({"max_tokens": -1}), "invalid_value"),
        (json!({"max_tokens": "5"}), "invalid_type"),
        (json!({"messages": null}), "missing_required_parameter"),
        (json!({"messages": []}), "invalid_value"),
        (json!({"system": 1}), "invalid_type"),
        (json!({"stop_sequences": [1]}), "invalid_type"),
        (json!({"thinking": {"type": "deep"}}), "invalid_value"),
        (json!({"tools": [{"name": "f"}]}), "invalid_tool_configuration"),
        (json!({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}), "invalid_tool_configuration"),
        (json!({"tool_choice": {"type": "any"}}), "invalid_tool_configuration"),
        (json!({"tool_choice": {"type": "some"}}), "invalid_tool_configuration"),
        (json!({"tool_choice": "auto"}), "invalid_type"),
        (json!({"mcp_servers": [{"url": "x"}]}), "unsupported_parameter"),
        (json!({"output_format": {"type": "json_schema"}}), "missing_required_parameter"),
    ] {
        let refusal = request(members.clone()).unwrap_err();
        assert_eq!((refusal.status, refusal.code), (400, code), "{members}");
    }
}

#[test]
fn tokens_are_counted_of_the_same_conversation_without_a_limit() {
    let members = json!({"system": "brief", "tools": [{"name": "f", "input_schema": {}}],
        "messages": [{"role": "user", "content": "hi"}]});
    let count = parse_count(members.to_string().as_bytes()).unwrap();
    assert_eq!(count.prompt, *prompt(&request(members).unwrap()));
    assert_eq!(write_count(12), "{\"input_tokens\":12}");
}

#[test]
fn a_stream_opens_and_closes_every_block() {
    let script = [
        step(0, vec![reasoning("hm")]),
        step(0, vec![content("I "), content("look")]),
        step(0, vec![call(0, "f"), arguments(0, "{\"a\"")]),
        step(0, vec![arguments(0, ":1}")]),
        finish(0, FinishReason::Stop),
    ];
    let expected = r#"event: message_start
data: {"type":"message_start","message":{"id":"msg_1","type":"message","role":"assistant","model":"m","content":[],"stop_reason":null,"stop_sequence":null,"usage":{"input_tokens":9,"cache_creation_input_tokens":0,"cache_read_input_tokens":0,"output_tokens":0}}}

event: content_block_start
data: {"type":"content_block_start","index":0,"content_block":{"type":"thinking","thinking":"","signature":""}}

event: content_block_delta
data: {"type":"content_block_delta","index":0,"delta":{"type":"thinking_delta","thinking":"hm"}}

event: content_block_delta
data: {"type":"content_block_delta","index":0,"delta":{"type":"signature_delta","signature":""}}

event: content_block_stop
data: {"type":"content_block_stop","index":0}

event: content_block_start
data: {"type":"content_block_start","index":1,"content_block":{"type":"text","text":""}}

event: content_block_delta
data: {"type":"content_block_delta","index":1,"delta":{"type":"text_delta","text":"I "}}

event: content_block_delta
data: {"type":"content_block_delta","index":1,"delta":{"type":"text_delta","text":"look"}}

event: content_block_stop
data: {"type":"content_block_stop","index":1}

event: content_block_start
data: {"type":"content_block_start","index":2,"content_block":{"type":"tool_use","id":"call_0","name":"f","input":{}}}

event: content_block_delta
data: {"type":"content_block_delta","index":2,"delta":{"type":"input_json_delta","partial_json":"{\"a\""}}

event: content_block_delta
data: {"type":"content_block_delta","index":2,"delta":{"type":"input_json_delta","partial_json":":1}"}}

event: content_block_stop
data: {"type":"content_block_stop","index":2}

event: message_delta
data: {"type":"message_delta","delta":{"stop_reason":"tool_use","stop_sequence":null},"usage":{"input_tokens":7,"cache_creation_input_tokens":0,"cache_read_input_tokens":2,"output_tokens":4}}

event: message_stop
data: {"type":"message_stop"}

"#;
    assert_eq!(answer(json!({"stream": true}), &script), expected);
}

#[test]
fn a_document_holds_all_blocks() {
    let script = [
        step(0, vec![reasoning("hm"), content("I look"), call(0, "f"), arguments(0, "{\"a\": 1}")]),
        step(0, vec![call(1, "g"), arguments(1, "{\"cut")]),
        finish(0, FinishReason::Length),
    ];
    let expected = r#"{"id":"msg_1","type":"message","role":"assistant","model":"m","content":[{"type":"thinking","thinking":"hm","signature":""},{"type":"text","text":"I look"},{"type":"tool_use","id":"call_0","name":"f","input":{"a": 1}},{"type":"tool_use","id":"call_1","name":"g","input":{}}],"stop_reason":"max_tokens","stop_sequence":null,"usage":{"input_tokens":7,"cache_creation_input_tokens":0,"cache_read_input_tokens":2,"output_tokens":4}}"#;
    assert_eq!(answer(json!({}), &script), expected);
}

#[test]
fn stop_reasons_are_told_in_anthropics_words() {
    let stop =
        |reason, matched_stop| Finish { sample: 0, reason, matched_stop, usage: usage(), prompt_logprobs: Vec::new() };
    let text = || Some(MatchedStop::Text("END".to_owned()));
    for (finish, calls, expected) in [
        (stop(FinishReason::Stop, None), false, ("end_turn", None)),
        (stop(FinishReason::Stop, Some(MatchedStop::Token(7))), false, ("end_turn", None)),
        (stop(FinishReason::Stop, text()), false, ("stop_sequence", Some("END"))),
        (stop(FinishReason::Stop, text()), true, ("tool_use", None)),
        (stop(FinishReason::Length, None), true, ("max_tokens", None)),
        (stop(FinishReason::Abort, None), false, ("end_turn", None)),
    ] {
        assert_eq!(stop_reason(&finish, calls), expected, "{finish:?}");
    }
}

#[test]
fn a_limit_of_zero_gives_an_empty_message() {
    let script = [finish(0, FinishReason::Length)];
    let told = document(&answer(json!({"max_tokens": 0}), &script));
    assert_eq!((&told["content"], &told["stop_reason"]), (&json!([]), &json!("max_tokens")));
}

#[test]
fn a_broken_stream_says_so_in_anthropics_shape() {
    let mut answer = request(json!({"stream": true})).unwrap().answer(origin("x"));
    let mut out = bytes::BytesMut::new();
    answer.fail(&crate::Failure::stream("gone"), &mut out);
    let expected = "event: error\ndata: {\"type\":\"error\",\"error\":{\"type\":\"api_error\",\"message\":\"Stream error: gone\"}}\n\n";
    assert_eq!(&out[..], expected.as_bytes());
}

/// The document that a client makes of a stream.
fn folded(stream: &str) -> Value {
    let mut message = Value::Null;
    let mut inputs = Vec::new();
    let mut open = None;
    for (name, data) in events(stream) {
        assert_eq!(name.as_deref(), data["type"].as_str());
        let index = data["index"].as_u64().map(|index| index as usize);
        match data["type"].as_str().unwrap() {
            "message_start" => message = data["message"].clone(),
            "content_block_start" => {
                assert_eq!((open.replace(index), index), (None, Some(inputs.len())));
                message["content"].as_array_mut().unwrap().push(data["content_block"].clone());
                inputs.push(String::new());
            }
            "content_block_delta" => {
                let (index, delta) = (index.unwrap(), &data["delta"]);
                let block = &mut message["content"][index];
                match delta["type"].as_str().unwrap() {
                    "text_delta" => append(&mut block["text"], &delta["text"]),
                    "thinking_delta" => append(&mut block["thinking"], &delta["thinking"]),
                    "signature_delta" => append(&mut block["signature"], &delta["signature"]),
                    "input_json_delta" => inputs[index].push_str(delta["partial_json"].as_str().unwrap()),
                    other => panic!("{other}"),
                }
            }
            "content_block_stop" => {
                assert_eq!(open.take(), Some(index));
                if !inputs[index.unwrap()].is_empty() {
                    message["content"][index.unwrap()]["input"] = document(&inputs[index.unwrap()]);
                }
            }
            "message_delta" => {
                for (name, value) in data["delta"].as_object().unwrap() {
                    message[name] = value.clone();
                }
                message["usage"] = data["usage"].clone();
            }
            "message_stop" => assert_eq!(open, None),
            other => panic!("{other}"),
        }
    }
    message
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn any_cutting_of_an_output_gives_the_same_answer_streamed_or_not((one, other) in scripts(0)) {
        let whole = document(&answer(json!({}), &one));
        prop_assert_eq!(&document(&answer(json!({}), &other)), &whole);
        for script in [&one, &other] {
            prop_assert_eq!(&folded(&answer(json!({"stream": true}), script)), &whole);
        }
    }
}
