//! The messages of a conversation, checked before a chat template sees them.
//!
//! Templates fail in obscure ways on shapes that they do not expect, and engines here get no media. So roles, contents and tool
//! calls are checked; members that templates may know and this code does not are kept. The role `developer`, a newer name of
//! `system`, becomes `system`, the only one of the two that templates know.

use serde_json::{Value, json};

use crate::limits;
use crate::refusal::Refusal;

/// Checks messages of the chat API.
pub(crate) fn check(mut messages: Vec<Value>) -> Result<Vec<Value>, Refusal> {
    if messages.is_empty() {
        return Err(Refusal::value("messages", "must have at least one message"));
    }
    for (at, message) in messages.iter_mut().enumerate() {
        check_message(message, &format!("messages[{at}]"))?;
    }
    Ok(messages)
}

fn check_message(message: &mut Value, path: &str) -> Result<(), Refusal> {
    let Some(members) = message.as_object_mut() else { return Err(Refusal::wrong_type(path, "an object")) };
    let role = match members.get("role") {
        Some(Value::String(role)) => role.clone(),
        None | Some(Value::Null) => return Err(Refusal::missing(&format!("{path}.role"))),
        Some(_) => return Err(Refusal::wrong_type(&format!("{path}.role"), "a string")),
    };
    match role.as_str() {
        "system" | "user" | "assistant" | "tool" | "function" => {}
        "developer" => {
            members.insert("role".to_owned(), Value::from("system"));
        }
        _ => return Err(Refusal::messages(format!("{path}: there is no role `{role}`"))),
    }
    match members.get_mut("content") {
        None | Some(Value::Null) if role == "assistant" => {
            // Templates add the content to text: an absent one must be empty.
            members.insert("content".to_owned(), Value::from(""));
        }
        None | Some(Value::Null) => return Err(Refusal::missing(&format!("{path}.content"))),
        Some(Value::String(_)) => {}
        Some(Value::Array(parts)) => check_parts(parts, &format!("{path}.content"))?,
        Some(_) => return Err(Refusal::wrong_type(&format!("{path}.content"), "a string or an array of parts")),
    }
    for name in ["name", "reasoning_content", "reasoning", "tool_call_id"] {
        if members.get(name).is_some_and(|value| !value.is_null() && !value.is_string()) {
            return Err(Refusal::wrong_type(&format!("{path}.{name}"), "a string"));
        }
    }
    match members.get("tool_calls") {
        None | Some(Value::Null) => {
            members.remove("tool_calls");
            Ok(())
        }
        Some(Value::Array(calls)) => {
            calls.iter().enumerate().try_for_each(|(at, call)| check_call(call, &format!("{path}.tool_calls[{at}]")))
        }
        Some(_) => Err(Refusal::wrong_type(&format!("{path}.tool_calls"), "an array")),
    }
}

fn check_parts(parts: &mut [Value], path: &str) -> Result<(), Refusal> {
    if parts.len() > limits::PARTS {
        return Err(crate::fields::too_many(path, limits::PARTS));
    }
    for (at, part) in parts.iter_mut().enumerate() {
        let place = format!("{path}[{at}]");
        // vLLM takes a bare string for a part of text.
        if let Value::String(text) = part {
            *part = json!({"type": "text", "text": text});
            continue;
        }
        let text = match part_type(part, &place)? {
            "text" => part.get("text"),
            "refusal" => part.get("refusal"),
            kind => return Err(not_text(&place, kind)),
        };
        match text {
            Some(Value::String(text)) => *part = json!({"type": "text", "text": text}),
            _ => return Err(Refusal::wrong_type(&format!("{place}.text"), "a string")),
        }
    }
    Ok(())
}

/// The type of a part or block.
pub(crate) fn part_type<'a>(part: &'a Value, path: &str) -> Result<&'a str, Refusal> {
    if !part.is_object() {
        return Err(Refusal::wrong_type(path, "an object"));
    }
    match part.get("type") {
        Some(Value::String(kind)) => Ok(kind),
        None | Some(Value::Null) => Err(Refusal::missing(&format!("{path}.type"))),
        Some(_) => Err(Refusal::wrong_type(&format!("{path}.type"), "a string")),
    }
}

/// The refusal of a part that is no text, in any API.
pub(crate) fn not_text(path: &str, kind: &str) -> Refusal {
    match kind {
        "image_url" | "image" | "input_image" | "image_embeds" | "image_pil" => Refusal::media("image"),
        "input_audio" | "audio_url" | "audio" | "audio_embeds" => Refusal::media("audio"),
        "video_url" | "video" | "input_video" => Refusal::media("video"),
        "file" | "input_file" | "document" => Refusal::media("file"),
        kind => Refusal::part(path, kind),
    }
}

/// A tool call as the model made it earlier: `{"id", "type", "function": {"name", "arguments"}}`.
fn check_call(call: &Value, path: &str) -> Result<(), Refusal> {
    let Some(function) = call.get("function").filter(|function| function.is_object()) else {
        return Err(Refusal::messages(format!("{path}: a tool call must have a `function`")));
    };
    if !function.get("name").is_some_and(Value::is_string) {
        return Err(Refusal::wrong_type(&format!("{path}.function.name"), "a string"));
    }
    match function.get("arguments") {
        None | Some(Value::Null | Value::String(_) | Value::Object(_)) => Ok(()),
        Some(_) => Err(Refusal::wrong_type(&format!("{path}.function.arguments"), "a string of JSON")),
    }
}

/// A call that the model made, in the shape of the chat API.
pub(crate) fn tool_call(id: &str, name: &str, arguments: &str) -> Value {
    json!({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}})
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
mod tests {
    use super::*;

    #[test]
    fn conversations_are_kept_as_they_are() {
        let messages = vec![
            json!({"role": "system", "content": "be brief"}),
            json!({"role": "user", "content": [{"type": "text", "text": "hi"}], "name": "ann"}),
            json!({"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls":
                [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]}),
            json!({"role": "tool", "tool_call_id": "c", "content": "ok", "extra": [1]}),
        ];
        assert_eq!(check(messages.clone()), Ok(messages));
    }

    #[test]
    fn shapes_that_templates_do_not_know_are_made_such_as_they_do() {
        let checked = check(vec![
            json!({"role": "developer", "content": "be brief"}),
            json!({"role": "assistant", "content": null, "tool_calls": null}),
            json!({"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}, "never"]}),
        ]);
        let expected = vec![
            json!({"role": "system", "content": "be brief"}),
            json!({"role": "assistant", "content": ""}),
            json!({"role": "assistant", "content": [{"type": "text", "text": "no"}, {"type": "text", "text": "never"}]}),
        ];
        assert_eq!(checked, Ok(expected));
    }

    #[test]
    fn messages_that_make_no_conversation_are_refused() {
        for (message, code) in [
            (json!("hi"), "invalid_type"),
            (json!({"content": "x"}), "missing_required_parameter"),
            (json!({"role": 1, "content": "x"}), "invalid_type"),
            (json!({"role": "robot", "content": "x"}), "process_messages_failed"),
            (json!({"role": "user"}), "missing_required_parameter"),
            (json!({"role": "user", "content": 1}), "invalid_type"),
            (json!({"role": "user", "content": [1]}), "invalid_type"),
            (json!({"role": "user", "content": [{"text": "x"}]}), "missing_required_parameter"),
            (json!({"role": "user", "content": [{"type": "text"}]}), "invalid_type"),
            (json!({"role": "user", "content": [{"type": "hologram"}]}), "unsupported_content_part"),
            (json!({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}), "multimodal_not_supported"),
            (json!({"role": "user", "content": [{"type": "input_audio"}]}), "multimodal_not_supported"),
            (json!({"role": "user", "content": [{"type": "video_url"}]}), "multimodal_not_supported"),
            (json!({"role": "user", "content": [{"type": "file"}]}), "multimodal_not_supported"),
            (json!({"role": "user", "content": "x", "name": 1}), "invalid_type"),
            (json!({"role": "assistant", "tool_calls": 1}), "invalid_type"),
            (json!({"role": "assistant", "tool_calls": [1]}), "process_messages_failed"),
            (json!({"role": "assistant", "tool_calls": [{"function": {"name": 1}}]}), "invalid_type"),
            (json!({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 1}}]}), "invalid_type"),
        ] {
            let refusal = check(vec![message.clone()]).unwrap_err();
            assert_eq!((refusal.status, refusal.code), (400, code), "{message}");
        }
        assert_eq!(check(Vec::new()).unwrap_err().code, "invalid_value");
    }
}
