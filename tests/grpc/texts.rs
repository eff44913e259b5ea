//! Tokenizers, chat templates, characters, reasoning and tool calls.

use super::*;

#[tokio::test]
async fn a_tokenizer_that_is_not_there_is_waited_for_or_said_to_be_missing() {
    for (fault, code) in [
        (CallFault::method("GetTokenizer").hang(), "tokenizer_not_ready"),
        (CallFault::method("GetTokenizer").refuse(Code::FailedPrecondition, "no path"), "tokenizer_load_failed"),
    ] {
        let (prefill, decode) = (grpc(Engine::Sglang, Role::Prefill).await, grpc(Engine::Sglang, Role::Decode).await);
        for engine in [&prefill, &decode] {
            engine.set_call_fault(fault.clone());
        }
        let pair = Pair::behind(Smg::launch(&[]).await, prefill, decode).await;
        assert_refused(&pair.smg, CHAT, &chat(), 503, code).await;
        assert!(pair.engines().iter().all(|engine| engine.calls().is_empty()));
    }
}

#[tokio::test]
async fn a_tokenizer_on_disk_is_used_before_that_of_an_engine() {
    let path = mock_engine::tokenizer_path().to_str().unwrap();
    let pair = Pair::of(Engine::Sglang, &["--tokenizer-path", path]).await;
    assert_eq!(pair.smg.post(CHAT, &chat()).await.status(), StatusCode::OK);
    assert!(pair.engines().iter().all(|engine| engine.call_count("GetTokenizer") == 0));
}

#[tokio::test]
async fn a_chat_template_on_disk_is_used_before_that_of_the_model() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("chat.jinja");
    std::fs::write(&path, "{% for message in messages %}<{{ message.content }}>{% endfor %}").unwrap();
    let pair = Pair::of(Engine::Sglang, &["--chat-template", path.to_str().unwrap()]).await;
    assert_eq!(pair.smg.post(CHAT, &chat()).await.status(), StatusCode::OK);
    assert_eq!(mock_engine::decode(pair.prefill.calls()[0].token_ids()), "<hi>");
}

#[tokio::test]
async fn reasoning_and_tool_calls_are_told_apart_by_the_parsers_that_flags_name() {
    let flags = ["--reasoning-parser", "qwen3", "--tool-call-parser", "qwen"];
    let call = r#"<tool_call>
{"name": "weather", "arguments": {"city": "Ulm"}}
</tool_call>"#;
    let said = format!("<think>Which city?</think>Let me look.{call}");
    let mut body = chat();
    body["max_tokens"] = json!(500);
    let parameters = json!({"type": "object", "properties": {"city": {"type": "string"}}});
    body["tools"] = json!([{"type": "function", "function": {"name": "weather", "parameters": parameters}}]);
    for engine in PAIRS {
        let pair = Pair::of(engine, &flags).await;
        pair.engines().iter().for_each(|engine| engine.replies_with(Some(&said)));
        let answer: Value = pair.smg.post(CHAT, &body).await.json().await.unwrap();
        let choice = &answer["choices"][0];
        let message = &choice["message"];
        assert_eq!(message["reasoning_content"], "Which city?", "{engine:?} {answer}");
        assert_eq!(message["content"], "Let me look.", "{engine:?} {answer}");
        let function = &message["tool_calls"][0]["function"];
        let arguments: Value = serde_json::from_str(function["arguments"].as_str().unwrap()).unwrap();
        assert_eq!((&function["name"], &arguments), (&json!("weather"), &json!({"city": "Ulm"})), "{engine:?}");
        assert_eq!(choice["finish_reason"], "tool_calls", "{engine:?} {answer}");

        let text = pair.smg.post(CHAT, &streamed(body.clone())).await.text().await.unwrap();
        let joined = |place: &str| -> String {
            let events = events(&text);
            let parts = events.iter().filter_map(|event| event.pointer(place).and_then(Value::as_str));
            parts.collect()
        };
        assert_eq!(joined("/choices/0/delta/reasoning_content"), "Which city?", "{engine:?} {text}");
        assert_eq!(joined("/choices/0/delta/content"), "Let me look.", "{engine:?} {text}");
        let arguments = joined("/choices/0/delta/tool_calls/0/function/arguments");
        assert_eq!(serde_json::from_str::<Value>(&arguments).unwrap(), json!({"city": "Ulm"}), "{engine:?} {text}");
        assert_eq!(joined("/choices/0/finish_reason"), "tool_calls", "{engine:?} {text}");
        pair.is_clean().await;
    }
}

/// An output of a model family, and what it turns into.
#[derive(serde::Deserialize)]
struct Family {
    reasoning_parser: String,
    tool_parser: String,
    text: String,
    reasoning: String,
    content: String,
    calls: Vec<FamilyCall>,
}

#[derive(serde::Deserialize)]
struct FamilyCall {
    name: String,
    arguments: String,
}

fn family(name: &str) -> Family {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/dataplane/text/tests/data/streams");
    serde_json::from_slice(&std::fs::read(format!("{folder}/{name}.json")).unwrap()).unwrap()
}

/// The calls of a streamed chat answer: names and arguments, by index.
fn streamed_calls(events: &[Value]) -> Vec<(String, String)> {
    let mut calls: Vec<(String, String)> = Vec::new();
    for call in events.iter().filter_map(|event| event["choices"][0]["delta"]["tool_calls"].as_array()).flatten() {
        let index = usize::try_from(call["index"].as_u64().unwrap()).unwrap();
        if index == calls.len() {
            assert!(call["id"].is_string() && call["type"] == "function", "{call}");
            calls.push((call["function"]["name"].as_str().unwrap().to_owned(), String::new()));
        }
        calls[index].1.push_str(call["function"]["arguments"].as_str().unwrap_or_default());
    }
    calls
}

/// Each family is a model of one fleet, whose workers name its parsers. Engines send one token or several at a time.
#[tokio::test]
async fn calls_and_reasoning_of_every_family_are_told_apart_streamed_or_not() {
    const FAMILIES: [&str; 8] = ["qwen", "qwen_coder", "llama", "mistral", "deepseek_r1", "kimi_k2", "glm", "gpt_oss"];
    let smg = Smg::launch(&[]).await;
    let tool = |name: &str, parameters: Value| {
        let parameters = json!({"type": "object", "properties": parameters});
        json!({"type": "function", "function": {"name": name, "parameters": parameters}})
    };
    let weather = json!({"city": {"type": "string"}, "days": {"type": "integer"}});
    let tools = json!([tool("weather", weather), tool("now", json!({}))]);
    for (number, name) in FAMILIES.into_iter().enumerate() {
        let family = family(name);
        let engine = PAIRS[number % PAIRS.len()];
        let tokens_per_chunk = [1, 3, 1000][number % 3];
        let start = |role| builder(engine, role).model(name).tokens_per_chunk(tokens_per_chunk).start();
        let (prefill, decode) = (start(Role::Prefill).await.unwrap(), start(Role::Decode).await.unwrap());
        let labels = json!({"reasoning_parser": family.reasoning_parser, "tool_parser": family.tool_parser});
        smg.register(&spec_with(&prefill, "prefill", json!({"labels": labels}))).await;
        smg.register(&spec_with(&decode, "decode", json!({"labels": labels}))).await;
        [&prefill, &decode].iter().for_each(|engine| engine.replies_with(Some(&family.text)));
        let messages = json!([{"role": "user", "content": "How is the weather?"}]);
        let body = json!({"model": name, "messages": messages, "tools": tools, "max_tokens": 1000});
        let expected: Vec<(String, String)> =
            family.calls.iter().map(|call| (call.name.clone(), call.arguments.clone())).collect();

        let answer: Value = smg.post(CHAT, &body).await.json().await.unwrap();
        let message = &answer["choices"][0]["message"];
        let calls = message["tool_calls"].as_array().unwrap_or_else(|| panic!("{name}: {answer}"));
        let called: Vec<(String, String)> = calls
            .iter()
            .map(|call| &call["function"])
            .map(|call| (call["name"].as_str().unwrap().to_owned(), call["arguments"].as_str().unwrap().to_owned()))
            .collect();
        assert_eq!(called, expected, "{name}");
        assert_eq!(message["content"].as_str().unwrap_or_default().trim(), family.content.trim(), "{name}");
        assert_eq!(message["reasoning_content"].as_str().unwrap_or_default().trim(), family.reasoning.trim(), "{name}");
        assert_eq!(answer["choices"][0]["finish_reason"], "tool_calls", "{name}");

        let text = smg.post(CHAT, &streamed(body)).await.text().await.unwrap();
        let events = events(&text);
        let joined = |field: &str| -> String {
            events.iter().filter_map(|event| event["choices"][0]["delta"][field].as_str()).collect()
        };
        assert_eq!(streamed_calls(&events), expected, "{name} {text}");
        assert_eq!(joined("content").trim(), family.content.trim(), "{name}");
        assert_eq!(joined("reasoning_content").trim(), family.reasoning.trim(), "{name}");
        let finish = events.iter().find_map(|event| event["choices"][0]["finish_reason"].as_str());
        assert_eq!(finish, Some("tool_calls"), "{name}");

        // The same output in the shape of the other client's API.
        let tools: Vec<Value> = tools
            .as_array()
            .unwrap()
            .iter()
            .map(|tool| &tool["function"])
            .map(|tool| json!({"name": tool["name"], "input_schema": tool["parameters"]}))
            .collect();
        let body = json!({"model": name, "messages": messages, "tools": tools, "max_tokens": 1000});
        let answer: Value = smg.post("/v1/messages", &body).await.json().await.unwrap();
        let used = answer["content"].as_array().unwrap_or_else(|| panic!("{name}: {answer}"));
        let used: Vec<(String, Value)> = used
            .iter()
            .filter(|block| block["type"] == "tool_use")
            .map(|block| (block["name"].as_str().unwrap().to_owned(), block["input"].clone()))
            .collect();
        let parsed: Vec<(String, Value)> =
            expected.iter().map(|(name, text)| (name.clone(), serde_json::from_str(text).unwrap())).collect();
        assert_eq!(used, parsed, "{name} {answer}");
        assert_eq!(answer["stop_reason"], "tool_use", "{name}");
    }
}

#[tokio::test]
async fn characters_whose_tokens_come_apart_arrive_whole_in_every_api() {
    let said = "你好🙂, größer ∑ e\u{301}";
    let messages = json!([{"role": "user", "content": "hi"}]);
    let requests = [
        (CHAT, json!({"model": MODEL, "messages": messages}), "/choices/0/delta/content"),
        ("/v1/completions", json!({"model": MODEL, "prompt": "hi", "max_tokens": 500}), "/choices/0/text"),
        ("/v1/messages", json!({"model": MODEL, "messages": messages, "max_tokens": 500}), "/delta/text"),
        ("/v1/responses", json!({"model": MODEL, "input": "hi"}), "/delta"),
    ];
    for engine in PAIRS {
        let pair = Pair::of(engine, &[]).await;
        pair.engines().iter().for_each(|engine| engine.replies_with(Some(said)));
        assert!(mock_engine::encode("🙂").len() > 1, "a character of several tokens");
        for (path, body, place) in &requests {
            let text = pair.smg.post(path, &streamed(body.clone())).await.text().await.unwrap();
            let parts: String =
                events(&text).iter().filter_map(|event| event.pointer(place).and_then(Value::as_str)).collect();
            assert_eq!(parts, said, "{engine:?} {path} {text}");
        }
        // SGLang's own API gives the whole text in each event.
        let native = json!({"text": "hi", "sampling_params": {"max_new_tokens": 500}, "stream": true});
        let text = pair.smg.post("/generate", &native).await.text().await.unwrap();
        assert!(!text.contains('\u{fffd}'), "{engine:?} {text}");
        assert_eq!(events(&text).last().unwrap()["text"], said, "{engine:?}");
        pair.is_clean().await;
    }
}

#[tokio::test]
async fn log_probabilities_are_those_of_the_visible_text_streamed_or_not() {
    let said = "<think>Why is it so?</think>Because it is.";
    let mut body = chat();
    (body["max_tokens"], body["logprobs"], body["top_logprobs"]) = (json!(500), json!(true), json!(1));
    for (engine, tokens_per_chunk) in PAIRS.into_iter().zip([1, 3, 1000]) {
        let decode = builder(engine, Role::Decode).tokens_per_chunk(tokens_per_chunk).start().await.unwrap();
        let smg = Smg::launch(&["--reasoning-parser", "qwen3"]).await;
        let pair = Pair::behind(smg, grpc(engine, Role::Prefill).await, decode).await;
        pair.engines().iter().for_each(|engine| engine.replies_with(Some(said)));
        let texts = |entries: &[Value]| -> String {
            entries.iter().map(|entry| entry["token"].as_str().unwrap_or_else(|| panic!("{entry}"))).collect()
        };
        let answer: Value = pair.smg.post(CHAT, &body).await.json().await.unwrap();
        let choice = &answer["choices"][0];
        assert_eq!(choice["message"]["content"], "Because it is.", "{engine:?} {answer}");
        let whole = choice["logprobs"]["content"].as_array().unwrap().clone();
        assert!(texts(&whole).ends_with("Because it is."), "{engine:?} {whole:?}");
        assert!(!texts(&whole).contains("Why"), "{engine:?} {whole:?}");
        let text = pair.smg.post(CHAT, &streamed(body.clone())).await.text().await.unwrap();
        let events = events(&text);
        let entries = events.iter().filter_map(|event| event["choices"][0]["logprobs"]["content"].as_array());
        assert_eq!(entries.flatten().cloned().collect::<Vec<_>>(), whole, "{engine:?} {text}");
        pair.is_clean().await;
    }
}

#[tokio::test]
async fn a_stop_string_within_the_fewest_tokens_that_vllm_is_to_generate_ends_nothing() {
    let pair = Pair::of(Engine::Vllm, &[]).await;
    pair.engines().iter().for_each(|engine| engine.replies_with(Some("one END two END three")));
    let mut body = chat();
    (body["max_tokens"], body["stop"]) = (json!(100), json!(["END"]));
    for (fewest, expected) in [(0, "one "), (mock_engine::encode("one END").len(), "one END two ")] {
        body["min_tokens"] = json!(fewest);
        let answer: Value = pair.smg.post(CHAT, &body).await.json().await.unwrap();
        let choice = &answer["choices"][0];
        assert_eq!((&choice["message"]["content"], &choice["finish_reason"]), (&json!(expected), &json!("stop")));
        let text = pair.smg.post(CHAT, &streamed(body.clone())).await.text().await.unwrap();
        assert_eq!(deltas(&text), expected, "{text}");
    }
    pair.is_clean().await;
}

#[tokio::test]
async fn the_special_tokens_of_a_template_reach_both_legs_as_tokens() {
    let folder = tempfile::tempdir().unwrap();
    for file in std::fs::read_dir(mock_engine::tokenizer_path()).unwrap() {
        let file = file.unwrap();
        std::fs::copy(file.path(), folder.path().join(file.file_name())).unwrap();
    }
    let config = folder.path().join("tokenizer_config.json");
    let mut facts: Value = serde_json::from_slice(&std::fs::read(&config).unwrap()).unwrap();
    facts["bos_token"] = json!("<|im_start|>");
    facts["chat_template"] = json!("{{ bos_token }}{% for m in messages %}<u>{{ m.content + eos_token }}{% endfor %}");
    std::fs::write(&config, facts.to_string()).unwrap();
    let tokenizer: Value =
        serde_json::from_slice(&std::fs::read(folder.path().join("tokenizer.json")).unwrap()).unwrap();
    let special = |content: &str| {
        let found = tokenizer["added_tokens"].as_array().unwrap().iter().find(|token| token["content"] == content);
        u32::try_from(found.unwrap()["id"].as_u64().unwrap()).unwrap()
    };
    let path = folder.path().to_str().unwrap().to_owned();
    let pair = Pair::of(Engine::Sglang, &["--tokenizer-path", &path]).await;
    let messages = json!([{"role": "user", "content": "one"}, {"role": "user", "content": "two"}]);
    let response = pair.smg.post(CHAT, &json!({"model": MODEL, "messages": messages, "max_tokens": 2})).await;
    assert_eq!(response.status(), StatusCode::OK, "{}", response.text().await.unwrap());
    for engine in pair.engines() {
        let calls = engine.calls();
        let ids = calls[0].token_ids();
        assert_eq!((ids[0], *ids.last().unwrap()), (special("<|im_start|>"), special("<|im_end|>")));
        assert_eq!(ids.iter().filter(|id| **id == special("<|im_end|>")).count(), 2);
        assert_eq!(mock_engine::decode(ids), "<u>one<u>two", "special tokens are no text");
    }

    // A model without a template: nobody makes one up.
    facts.as_object_mut().unwrap().remove("chat_template");
    std::fs::write(&config, facts.to_string()).unwrap();
    let pair = Pair::of(Engine::Sglang, &["--tokenizer-path", &path]).await;
    let response = pair.smg.post(CHAT, &chat()).await;
    assert_eq!(response.status(), StatusCode::BAD_REQUEST);
    let answer: Value = response.json().await.unwrap();
    assert!(answer["error"]["message"].as_str().unwrap().contains("chat template"), "{answer}");
    assert!(pair.engines().iter().all(|engine| engine.calls().is_empty()));
    assert_eq!(pair.smg.post("/v1/completions", &completion()).await.status(), StatusCode::OK);
}
