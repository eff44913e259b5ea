#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use proptest::prelude::*;
use serde_json::json;

use super::*;
use crate::generation::{Constraint, ToolChoice};
use crate::output::FinishReason;
use crate::testing::*;

fn request(mut members: Value) -> Result<Request, Refusal> {
    let defaults = json!({"model": "m", "input": "hi"});
    for (name, value) in defaults.as_object().unwrap() {
        if members.get(name).is_none() {
            members[name] = value.clone();
        }
    }
    parse(members.to_string().as_bytes())
}

fn answer(members: Value, script: &[Event]) -> String {
    drive(&mut *request(members).unwrap().answer(origin("resp_1")), script)
}

fn prompt(request: &Request) -> &ChatPrompt {
    match &request.generation.prompt {
        Prompt::Chat(prompt) => prompt,
        other => panic!("{other:?}"),
    }
}

#[test]
fn every_documented_field_is_read() {
    let tools = json!([{"type": "function", "name": "f", "description": "d", "parameters": {"type": "object"}, "strict": true}]);
    let check = |fact: &str, members: Value, holds: fn(&Request) -> bool| {
        let request = request(members).unwrap_or_else(|refusal| panic!("{fact}: {refusal}"));
        assert!(holds(&request), "{fact}: {request:?}");
    };
    check("instructions", json!({"instructions": "brief"}), |request| {
        prompt(request).messages
            == [json!({"role": "system", "content": "brief"}), json!({"role": "user", "content": "hi"})]
    });
    check("max_output_tokens", json!({"max_output_tokens": 5}), |request| {
        request.generation.sampling.max_tokens == Some(5)
    });
    check("stream", json!({"stream": true}), |request| request.generation.stream);
    check("store, by default", json!({}), |request| request.store);
    check("store false", json!({"store": false}), |request| !request.store);
    check("previous_response_id", json!({"previous_response_id": "resp_0"}), |request| {
        request.previous_response_id.as_deref() == Some("resp_0")
    });
    check("tools", json!({"tools": tools}), |request| {
        let tool = json!({"type": "function", "function":
            {"name": "f", "description": "d", "parameters": {"type": "object"}, "strict": true}});
        prompt(request).tools == [tool] && request.generation.reading.tools == ToolChoice::Auto
    });
    check(
        "tool_choice function",
        json!({"tools": tools, "tool_choice": {"type": "function", "name": "f"}}),
        |request| request.generation.reading.tools == ToolChoice::Function("f".to_owned()),
    );
    check(
        "tool_choice allowed_tools",
        json!({"tools": tools, "tool_choice":
            {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "f"}]}}),
        |request| request.generation.reading.tools == ToolChoice::Required,
    );
    check("parallel_tool_calls", json!({"parallel_tool_calls": false}), |request| !request.parallel);
    check(
        "text.format",
        json!({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "object"}}}}),
        |request| request.generation.constraint == Some(Constraint::JsonSchema(r#"{"type":"object"}"#.to_owned())),
    );
    check("reasoning.effort", json!({"reasoning": {"effort": "low"}}), |request| {
        prompt(request).variables["reasoning_effort"] == "low"
    });
    check("include", json!({"include": ["message.output_text.logprobs"], "top_logprobs": 2}), |request| {
        request.generation.logprobs == Some(Logprobs { top: 2, prompt_from: None })
    });
    check("null and unknown fields", json!({"background": false, "conversation": null, "x": 1}), |_| true);
}

#[test]
fn what_cannot_be_served_is_refused_with_its_documented_code() {
    for (members, status, code) in [
        (json!({"input": null}), 400, "missing_required_parameter"),
        (json!({"input": 1}), 400, "invalid_type"),
        (json!({"instructions": 1}), 400, "invalid_type"),
        (json!({"max_output_tokens": 0}), 400, "invalid_value"),
        (json!({"background": true}), 501, "background_not_supported"),
        (json!({"conversation": "conv_1"}), 501, "conversation_not_supported"),
        (json!({"tools": [{"type": "web_search"}]}), 501, "hosted_tool_not_supported"),
        (json!({"tools": [{"type": "mcp", "server_url": "x"}]}), 501, "hosted_tool_not_supported"),
        (json!({"tools": [{"name": "f"}]}), 400, "invalid_tool_configuration"),
        (json!({"tool_choice": "required"}), 400, "invalid_tool_configuration"),
        (json!({"tool_choice": {"type": "file_search"}}), 400, "invalid_tool_configuration"),
        (json!({"prompt": {"id": "x"}}), 400, "unsupported_parameter"),
        (json!({"text": {"format": {"type": "yaml"}}}), 400, "invalid_value"),
        (json!({"text": {"format": {"type": "json_object"}}, "regex": "a"}), 400, "invalid_value"),
        (json!({"truncation": "some"}), 400, "invalid_value"),
        (json!({"metadata": "x"}), 400, "invalid_type"),
        (json!({"store": "yes"}), 400, "invalid_type"),
        (json!({"previous_response_id": 1}), 400, "invalid_type"),
    ] {
        let refusal = request(members.clone()).unwrap_err();
        assert_eq!((refusal.status, refusal.code), (status, code), "{members}");
    }
    let refusal = previous_response_not_found("resp_9");
    assert_eq!((refusal.status, refusal.code), (400, "previous_response_not_found"));
}

const ECHO: &str = r#""instructions":null,"tools":[],"tool_choice":"auto","text":{"format":{"type":"text"}},"reasoning":{"effort":null,"summary":null},"metadata":{},"user":null,"truncation":"disabled","store":true,"parallel_tool_calls":true,"previous_response_id":null,"temperature":1.0,"top_p":1.0,"max_output_tokens":null"#;
const USAGE: &str = r#""usage":{"input_tokens":9,"input_tokens_details":{"cache_write_tokens":0,"cached_tokens":2},"output_tokens":4,"output_tokens_details":{"reasoning_tokens":1},"total_tokens":13}"#;

#[test]
fn a_document_holds_every_item() {
    let script = [
        step(0, vec![reasoning("hm"), content("I look"), call(0, "f"), arguments(0, "{}")]),
        finish(0, FinishReason::Stop),
    ];
    let output = r#"{"id":"rs_1_0","type":"reasoning","summary":[],"content":[{"type":"reasoning_text","text":"hm"}],"status":"completed"},{"id":"msg_1_1","type":"message","role":"assistant","content":[{"type":"output_text","text":"I look","annotations":[],"logprobs":[]}],"status":"completed"},{"id":"fc_1_2","type":"function_call","call_id":"call_0","name":"f","arguments":"{}","status":"completed"}"#;
    let expected = format!(
        r#"{{"id":"resp_1","object":"response","created_at":1700000000,"status":"completed","background":false,"error":null,"incomplete_details":null,"model":"m","output":[{output}],{ECHO},{USAGE}}}"#
    );
    assert_eq!(answer(json!({}), &script), expected);
}

#[test]
fn a_stream_adds_and_completes_every_item() {
    let script = [
        step(0, vec![content("he"), content("y")]),
        step(0, vec![call(0, "f"), arguments(0, "{}")]),
        finish(0, FinishReason::Stop),
    ];
    let response = |status: &str, output: &str, usage: &str| {
        format!(
            r#"{{"id":"resp_1","object":"response","created_at":1700000000,"status":"{status}","background":false,"error":null,"incomplete_details":null,"model":"m","output":[{output}],{ECHO},{usage}}}"#
        )
    };
    let begun = response("in_progress", "", "\"usage\":null");
    let part = r#"{"type":"output_text","text":"hey","annotations":[],"logprobs":[]}"#;
    let message =
        format!(r#"{{"id":"msg_1_0","type":"message","role":"assistant","content":[{part}],"status":"completed"}}"#);
    let call =
        r#"{"id":"fc_1_1","type":"function_call","call_id":"call_0","name":"f","arguments":"{}","status":"completed"}"#;
    let done = response("completed", &format!("{message},{call}"), USAGE);
    let expected = [
        ("created", format!(r#""response":{begun}"#)),
        ("in_progress", format!(r#""response":{begun}"#)),
        ("output_item.added", r#""output_index":0,"item":{"id":"msg_1_0","type":"message","role":"assistant","content":[],"status":"in_progress"}"#.to_owned()),
        ("content_part.added", r#""item_id":"msg_1_0","output_index":0,"content_index":0,"part":{"type":"output_text","text":"","annotations":[],"logprobs":[]}"#.to_owned()),
        ("output_text.delta", r#""item_id":"msg_1_0","output_index":0,"content_index":0,"delta":"he","logprobs":[]"#.to_owned()),
        ("output_text.delta", r#""item_id":"msg_1_0","output_index":0,"content_index":0,"delta":"y","logprobs":[]"#.to_owned()),
        ("output_text.done", r#""item_id":"msg_1_0","output_index":0,"content_index":0,"text":"hey","logprobs":[]"#.to_owned()),
        ("content_part.done", format!(r#""item_id":"msg_1_0","output_index":0,"content_index":0,"part":{part}"#)),
        ("output_item.done", format!(r#""output_index":0,"item":{message}"#)),
        ("output_item.added", r#""output_index":1,"item":{"id":"fc_1_1","type":"function_call","call_id":"call_0","name":"f","arguments":"","status":"in_progress"}"#.to_owned()),
        ("function_call_arguments.delta", r#""item_id":"fc_1_1","output_index":1,"delta":"{}""#.to_owned()),
        ("function_call_arguments.done", r#""item_id":"fc_1_1","output_index":1,"name":"f","arguments":"{}""#.to_owned()),
        ("output_item.done", format!(r#""output_index":1,"item":{call}"#)),
        ("completed", format!(r#""response":{done}"#)),
    ];
    let event = |(number, (name, members)): (usize, &(&str, String))| {
        format!(
            "event: response.{name}\ndata: {{\"type\":\"response.{name}\",\"sequence_number\":{number},{members}}}\n\n"
        )
    };
    let expected: String = expected.iter().enumerate().map(event).collect();
    assert_eq!(answer(json!({"stream": true}), &script), expected);
}

#[test]
fn a_response_says_how_it_ended() {
    for (reason, status, event) in [
        (FinishReason::Stop, "completed", "response.completed"),
        (FinishReason::Length, "incomplete", "response.incomplete"),
        (FinishReason::Abort, "failed", "response.failed"),
    ] {
        let script = [step(0, vec![content("a")]), finish(0, reason)];
        assert_eq!(document(&answer(json!({}), &script))["status"], status);
        let (name, data) = events(&answer(json!({"stream": true}), &script)).pop().unwrap();
        assert_eq!((name.as_deref(), &data["response"]["status"]), (Some(event), &json!(status)));
    }
    let cut = document(&answer(json!({}), &[step(0, vec![content("a")]), finish(0, FinishReason::Length)]));
    assert_eq!(cut["incomplete_details"], json!({"reason": "max_output_tokens"}));
    assert_eq!(cut["output"][0]["status"], "incomplete");
}

#[test]
fn a_broken_stream_ends_with_a_failed_response() {
    let mut answer = request(json!({"stream": true})).unwrap().answer(origin("resp_1"));
    let mut out = bytes::BytesMut::new();
    answer.start(&mut out);
    let Event::Step(step) = step(0, vec![content("a")]) else { panic!() };
    answer.step(&step, &mut out);
    answer.fail(&crate::Failure::stream("gone"), &mut out);
    let (name, data) = events(std::str::from_utf8(&out).unwrap()).pop().unwrap();
    assert_eq!(name.as_deref(), Some("response.failed"));
    assert_eq!(data["response"]["error"], json!({"code": "server_error", "message": "Stream error: gone"}));
    assert_eq!(answer.stored(), None);
}

#[test]
fn the_request_is_repeated() {
    let members = json!({
        "instructions": "brief", "temperature": 0.5, "top_p": 0.25, "max_output_tokens": 7, "metadata": {"k": "v"}, "user": "u",
        "tools": [{"type": "function", "name": "f"}], "tool_choice": "none", "reasoning": {"effort": "low"}, "truncation": "auto",
        "text": {"format": {"type": "json_object"}}, "store": false, "parallel_tool_calls": false, "previous_response_id": "resp_0"
    });
    let told = document(&answer(members.clone(), &[finish(0, FinishReason::Stop)]));
    for (name, value) in members.as_object().unwrap() {
        assert_eq!(&told[name], value, "{name}");
    }
}

#[test]
fn a_later_request_goes_on_from_a_stored_response() {
    let first = request(json!({"instructions": "brief", "input": "one"})).unwrap();
    let mut answer = first.answer(origin("resp_1"));
    let script = [
        step(0, vec![reasoning("hm"), content("two"), call(0, "f"), arguments(0, "{}")]),
        finish(0, FinishReason::Stop),
    ];
    let body = drive(&mut *answer, &script);
    let stored = answer.stored().unwrap();
    assert_eq!((stored.id.as_str(), &stored.response[..]), ("resp_1", body.as_bytes()));
    assert_eq!(answer.stored(), None, "only once");

    let output = json!([{"type": "function_call_output", "call_id": "call_0", "output": "three"}]);
    let mut second =
        request(json!({"instructions": "longer", "previous_response_id": "resp_1", "input": output})).unwrap();
    second.continue_from(&stored.conversation);
    let expected = json!([
        {"role": "system", "content": "longer"},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "two", "reasoning_content": "hm", "tool_calls":
            [{"id": "call_0", "type": "function", "function": {"name": "f", "arguments": "{}"}}]},
        {"role": "tool", "tool_call_id": "call_0", "content": "three"},
    ]);
    assert_eq!(Value::from(prompt(&second).messages.clone()), expected);

    let mut unstored = request(json!({"store": false})).unwrap().answer(origin("resp_1"));
    drive(&mut *unstored, &script);
    assert_eq!(unstored.stored(), None);
}

#[test]
fn log_probabilities_go_with_their_text() {
    let script = [
        logged(0, "t", vec![reasoning("t")]),
        logged(0, "a", vec![content("a")]),
        logged(0, "b", vec![content("b")]),
        logged(0, "END", vec![]),
        finish(0, FinishReason::Stop),
    ];
    let asked = json!({"include": ["message.output_text.logprobs"], "stream": true});
    let entry = |text: &str| json!({"token": text, "logprob": -0.5, "bytes": text.as_bytes(), "top_logprobs": []});
    let events = events(&answer(asked, &script));
    let deltas: Vec<_> = events
        .iter()
        .filter(|(_, data)| data["type"] == "response.output_text.delta")
        .map(|(_, data)| &data["logprobs"])
        .collect();
    assert_eq!(deltas, [&json!([entry("a")]), &json!([entry("b")])]);
    let last = &events.last().unwrap().1["response"]["output"][1]["content"][0]["logprobs"];
    assert_eq!(*last, json!([entry("a"), entry("b")]));
}

/// Checks that a stream is consistent in itself, and returns its last response.
fn folded(stream: &str) -> Value {
    let events = events(stream);
    let mut texts: Vec<String> = Vec::new();
    for (number, (name, data)) in events.iter().enumerate() {
        assert_eq!(name.as_deref(), data["type"].as_str());
        assert_eq!(data["sequence_number"], number);
        let index = data["output_index"].as_u64().map(|index| index as usize);
        let kind = data["type"].as_str().unwrap();
        if kind == "response.output_item.added" {
            assert_eq!(index, Some(texts.len()));
            texts.push(String::new());
        } else if kind.ends_with(".delta") {
            texts[index.unwrap()].push_str(data["delta"].as_str().unwrap());
        } else if kind == "response.output_item.done" {
            let item = &data["item"];
            let text = item.get("arguments").unwrap_or_else(|| &item["content"][0]["text"]);
            assert_eq!(text, texts[index.unwrap()].as_str());
        } else if let Some(text) = data.get("text").or_else(|| data.get("arguments")) {
            assert_eq!(text, texts[index.unwrap()].as_str());
        }
    }
    let response = events.last().unwrap().1["response"].clone();
    let done: Vec<_> = events
        .iter()
        .filter(|(_, data)| data["type"] == "response.output_item.done")
        .map(|(_, data)| data["item"].clone())
        .collect();
    assert_eq!(response["output"], Value::from(done));
    response
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
