//! Anthropic's turns as messages of the chat API, which chat templates know.
//!
//! - `system` becomes the first message.
//! - A user's turn may hold results of tools and text in any order: each result becomes a message of role `tool`, each run of text
//!   between them one of role `user`.
//! - An assistant's turn becomes one message: its texts, its thinking (`reasoning_content`) and its calls.

use serde_json::{Map, Value, json};

use crate::conversation::{not_text, part_type, tool_call};
use crate::fields::Fields;
use crate::limits;
use crate::refusal::Refusal;

/// The messages of a conversation.
pub(super) fn messages(system: Option<Value>, turns: Vec<Value>) -> Result<Vec<Value>, Refusal> {
    if turns.is_empty() {
        return Err(Refusal::value("messages", "must have at least one message"));
    }
    let mut messages = Vec::with_capacity(turns.len() + 1);
    if let Some(system) = system {
        let text = text_of(system, "system")?;
        if !text.is_empty() {
            messages.push(json!({"role": "system", "content": text}));
        }
    }
    for (at, turn) in turns.into_iter().enumerate() {
        let path = format!("messages[{at}]");
        let mut turn = Fields::of(turn, &path)?;
        let role = turn.required_string("role")?;
        let content_path = turn.path("content");
        let content = turn.value("content").ok_or_else(|| Refusal::missing(&content_path))?;
        match role.as_str() {
            "user" => user(content, &content_path, &mut messages)?,
            "assistant" => messages.push(assistant(content, &content_path)?),
            // Instructions in mid-conversation, as some clients write them.
            "system" => messages.push(json!({"role": "system", "content": text_of(content, &content_path)?})),
            _ => return Err(Refusal::messages(format!("{path}: there is no role `{role}`"))),
        }
    }
    Ok(messages)
}

/// The blocks of a content; a string is one block of text.
fn blocks(content: Value, path: &str) -> Result<Vec<Value>, Refusal> {
    match content {
        Value::String(text) => Ok(vec![json!({"type": "text", "text": text})]),
        Value::Array(blocks) if blocks.len() <= limits::PARTS => Ok(blocks),
        Value::Array(_) => Err(crate::fields::too_many(path, limits::PARTS)),
        _ => Err(Refusal::wrong_type(path, "a string or an array of blocks")),
    }
}

/// The text of a content that may hold nothing else. Blocks are set apart by line ends.
fn text_of(content: Value, path: &str) -> Result<String, Refusal> {
    let mut texts = Vec::new();
    for (at, block) in blocks(content, path)?.into_iter().enumerate() {
        let path = format!("{path}[{at}]");
        match part_type(&block, &path)? {
            "text" => texts.push(Fields::of(block, &path)?.required_string("text")?),
            kind => return Err(not_text(&path, kind)),
        }
    }
    Ok(texts.join("\n"))
}

/// Texts as the content of one message: parts, unless it is only one.
fn content_of(mut texts: Vec<String>) -> Value {
    match texts.len() {
        0 => Value::from(""),
        1 => Value::from(texts.remove(0)),
        _ => texts.into_iter().map(|text| json!({"type": "text", "text": text})).collect(),
    }
}

fn user(content: Value, path: &str, messages: &mut Vec<Value>) -> Result<(), Refusal> {
    let mut texts = Vec::new();
    let mut pushed = false;
    for (at, block) in blocks(content, path)?.into_iter().enumerate() {
        let path = format!("{path}[{at}]");
        match part_type(&block, &path)? {
            "text" => texts.push(Fields::of(block, &path)?.required_string("text")?),
            "tool_result" => {
                if !texts.is_empty() {
                    messages.push(json!({"role": "user", "content": content_of(std::mem::take(&mut texts))}));
                }
                let mut block = Fields::of(block, &path)?;
                let id = block.required_string("tool_use_id")?;
                let result = match block.value("content") {
                    Some(content) => text_of(content, &block.path("content"))?,
                    None => String::new(),
                };
                messages.push(json!({"role": "tool", "tool_call_id": id, "content": result}));
                pushed = true;
            }
            kind => return Err(not_text(&path, kind)),
        }
    }
    if !texts.is_empty() || !pushed {
        messages.push(json!({"role": "user", "content": content_of(texts)}));
    }
    Ok(())
}

fn assistant(content: Value, path: &str) -> Result<Value, Refusal> {
    let (mut texts, mut thoughts, mut calls) = (Vec::new(), Vec::new(), Vec::new());
    for (at, block) in blocks(content, path)?.into_iter().enumerate() {
        let path = format!("{path}[{at}]");
        match part_type(&block, &path)? {
            "text" => texts.push(Fields::of(block, &path)?.required_string("text")?),
            "thinking" => thoughts.push(Fields::of(block, &path)?.required_string("thinking")?),
            // Not for these models to read.
            "redacted_thinking" => {}
            "tool_use" => {
                let mut block = Fields::of(block, &path)?;
                let (id, name) = (block.required_string("id")?, block.required_string("name")?);
                let input = Value::Object(block.map("input")?.unwrap_or_default());
                calls.push(tool_call(&id, &name, &input.to_string()));
            }
            kind => return Err(not_text(&path, kind)),
        }
    }
    let mut message = Map::new();
    message.insert("role".to_owned(), "assistant".into());
    message.insert("content".to_owned(), content_of(texts));
    if !thoughts.is_empty() {
        message.insert("reasoning_content".to_owned(), thoughts.join("\n").into());
    }
    if !calls.is_empty() {
        message.insert("tool_calls".to_owned(), calls.into());
    }
    Ok(Value::Object(message))
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
mod tests {
    use super::*;

    fn turns(turns: Value) -> Result<Vec<Value>, Refusal> {
        messages(None, turns.as_array().unwrap().clone())
    }

    #[test]
    fn a_conversation_with_tools_and_thinking_becomes_one_of_the_chat_api() {
        let system = json!([{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "b"}]);
        let turns = json!([
            {"role": "user", "content": "weather?"},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "I look"},
                {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {"a": 1}}]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "sun"}], "is_error": false},
                {"type": "tool_result", "tool_use_id": "toolu_2"},
                {"type": "text", "text": "and"}, {"type": "text", "text": "now?"}]},
        ]);
        let expected = json!([
            {"role": "system", "content": "a\nb"},
            {"role": "user", "content": "weather?"},
            {"role": "assistant", "content": "I look", "reasoning_content": "hm", "tool_calls":
                [{"id": "toolu_1", "type": "function", "function": {"name": "f", "arguments": "{\"a\":1}"}}]},
            {"role": "tool", "tool_call_id": "toolu_1", "content": "sun"},
            {"role": "tool", "tool_call_id": "toolu_2", "content": ""},
            {"role": "user", "content": [{"type": "text", "text": "and"}, {"type": "text", "text": "now?"}]},
        ]);
        let converted = messages(Some(system), turns.as_array().unwrap().clone()).unwrap();
        assert_eq!(Value::from(converted), expected);
    }

    #[test]
    fn turns_that_make_no_conversation_are_refused() {
        let user = |content: Value| json!([{"role": "user", "content": content}]);
        for (given, code) in [
            (json!([]), "invalid_value"),
            (json!(["hi"]), "invalid_type"),
            (json!([{"content": "x"}]), "missing_required_parameter"),
            (json!([{"role": "user"}]), "missing_required_parameter"),
            (json!([{"role": "tool", "content": "x"}]), "process_messages_failed"),
            (user(json!(1)), "invalid_type"),
            (user(json!([{"type": "text"}])), "missing_required_parameter"),
            (user(json!([{"type": "image", "source": {}}])), "multimodal_not_supported"),
            (user(json!([{"type": "document", "source": {}}])), "multimodal_not_supported"),
            (user(json!([{"type": "tool_use", "id": "a", "name": "b"}])), "unsupported_content_part"),
            (user(json!([{"type": "tool_result"}])), "missing_required_parameter"),
            (
                user(json!([{"type": "tool_result", "tool_use_id": "a", "content": [{"type": "image"}]}])),
                "multimodal_not_supported",
            ),
            (
                json!([{"role": "assistant", "content": [{"type": "tool_use", "id": "a"}]}]),
                "missing_required_parameter",
            ),
            (
                json!([{"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "b", "input": 1}]}]),
                "invalid_type",
            ),
        ] {
            let refusal = turns(given.clone()).unwrap_err();
            assert_eq!((refusal.status, refusal.code), (400, code), "{given}");
        }
    }
}
