//! The input of a response as messages of the chat API, which chat templates know.
//!
//! `instructions` become the first message. Items that the model produced in one turn - its reasoning, its text, its calls - become
//! one message; the output of a call becomes a message of role `tool`.

use serde_json::{Map, Value, json};

use crate::conversation::{not_text, part_type, tool_call};
use crate::fields::Fields;
use crate::limits;
use crate::refusal::Refusal;

/// The messages of an input.
pub(super) fn messages(instructions: Option<&str>, input: Value) -> Result<Vec<Value>, Refusal> {
    let mut turns = Turns::default();
    if let Some(instructions) = instructions {
        turns.push("system", instructions.into());
    }
    match input {
        Value::String(text) => turns.push("user", text.into()),
        Value::Array(items) if items.is_empty() => {
            return Err(Refusal::value("input", "must have at least one item"));
        }
        Value::Array(items) if items.len() > limits::MESSAGES => {
            return Err(crate::fields::too_many("input", limits::MESSAGES));
        }
        Value::Array(items) => {
            for (at, item) in items.into_iter().enumerate() {
                turns.item(item, &format!("input[{at}]"))?;
            }
        }
        _ => return Err(Refusal::wrong_type("input", "a string or an array of items")),
    }
    Ok(turns.finish())
}

/// Messages so far, and the turn of the assistant's that further items may add to.
#[derive(Default)]
struct Turns {
    messages: Vec<Value>,
    turn: Option<Turn>,
}

#[derive(Default)]
struct Turn {
    content: Option<Value>,
    reasoning: String,
    calls: Vec<Value>,
}

impl Turns {
    fn item(&mut self, item: Value, path: &str) -> Result<(), Refusal> {
        // A message may leave its type out.
        let kind = match item.get("type") {
            None | Some(Value::Null) if item.is_object() => "message".to_owned(),
            _ => part_type(&item, path)?.to_owned(),
        };
        let mut item = Fields::of(item, path)?;
        match kind.as_str() {
            "message" => self.message(&mut item, path),
            "function_call" => {
                let (id, name) = (item.required_string("call_id")?, item.required_string("name")?);
                let arguments = item.string("arguments")?.unwrap_or_default();
                self.turn.get_or_insert_default().calls.push(tool_call(&id, &name, &arguments));
                Ok(())
            }
            "function_call_output" => {
                let id = item.required_string("call_id")?;
                let missing = Refusal::missing(&item.path("output"));
                let output = content(item.value("output").ok_or(missing)?, &item.path("output"))?;
                self.end_turn();
                self.messages.push(json!({"role": "tool", "tool_call_id": id, "content": output}));
                Ok(())
            }
            "reasoning" => self.reasoning(&mut item),
            kind => {
                Err(Refusal::bad("convert_request_failed", format!("{path}: items of type `{kind}` are not supported")))
            }
        }
    }

    fn message(&mut self, item: &mut Fields, path: &str) -> Result<(), Refusal> {
        let role = item.required_string("role")?;
        let missing = Refusal::missing(&item.path("content"));
        let content = content(item.value("content").ok_or(missing)?, &item.path("content"))?;
        match role.as_str() {
            "assistant" => {
                if self.turn.as_ref().is_some_and(|turn| turn.content.is_some() || !turn.calls.is_empty()) {
                    self.end_turn();
                }
                self.turn.get_or_insert_default().content = Some(content);
            }
            "user" => self.push("user", content),
            // The newer name of the same role; templates know only this one.
            "system" | "developer" => self.push("system", content),
            _ => return Err(Refusal::bad("convert_request_failed", format!("{path}: there is no role `{role}`"))),
        }
        Ok(())
    }

    /// Reasoning belongs to the turn that follows. Summaries stand in for reasoning that is not told.
    fn reasoning(&mut self, item: &mut Fields) -> Result<(), Refusal> {
        let mut texts = Vec::new();
        for name in ["content", "summary"] {
            let path = item.path(name);
            for (at, part) in item.array(name, limits::PARTS)?.unwrap_or_default().into_iter().enumerate() {
                texts.push(Fields::of(part, &format!("{path}[{at}]"))?.required_string("text")?);
            }
            if !texts.is_empty() {
                break;
            }
        }
        if self.turn.as_ref().is_some_and(|turn| turn.content.is_some() || !turn.calls.is_empty()) {
            self.end_turn();
        }
        let reasoning = &mut self.turn.get_or_insert_default().reasoning;
        if !reasoning.is_empty() {
            reasoning.push('\n');
        }
        reasoning.push_str(&texts.join("\n"));
        Ok(())
    }

    fn push(&mut self, role: &str, content: Value) {
        self.end_turn();
        self.messages.push(json!({"role": role, "content": content}));
    }

    fn end_turn(&mut self) {
        if let Some(turn) = self.turn.take() {
            self.messages.extend(turn.into_message());
        }
    }

    fn finish(mut self) -> Vec<Value> {
        self.end_turn();
        self.messages
    }
}

impl Turn {
    /// The message; none for a turn that says nothing but reasoning, and so was never finished.
    fn into_message(self) -> Option<Value> {
        if self.content.is_none() && self.calls.is_empty() {
            return None;
        }
        Some(assistant(self.content.unwrap_or_else(|| "".into()), self.reasoning, self.calls))
    }
}

/// A message of the assistant's.
pub(super) fn assistant(content: Value, reasoning: String, calls: Vec<Value>) -> Value {
    let mut message = Map::new();
    message.insert("role".to_owned(), "assistant".into());
    message.insert("content".to_owned(), content);
    if !reasoning.is_empty() {
        message.insert("reasoning_content".to_owned(), reasoning.into());
    }
    if !calls.is_empty() {
        message.insert("tool_calls".to_owned(), calls.into());
    }
    Value::Object(message)
}

/// A content: a string, or parts that are all text.
fn content(content: Value, path: &str) -> Result<Value, Refusal> {
    let parts = match content {
        Value::String(text) => return Ok(text.into()),
        Value::Array(parts) if parts.len() > limits::PARTS => return Err(crate::fields::too_many(path, limits::PARTS)),
        Value::Array(parts) => parts,
        _ => return Err(Refusal::wrong_type(path, "a string or an array of parts")),
    };
    let mut texts = Vec::with_capacity(parts.len());
    for (at, part) in parts.into_iter().enumerate() {
        let path = format!("{path}[{at}]");
        let name = match part_type(&part, &path)? {
            "input_text" | "output_text" | "text" => "text",
            "refusal" => "refusal",
            kind => return Err(not_text(&path, kind)),
        };
        texts.push(Fields::of(part, &path)?.required_string(name)?);
    }
    Ok(match texts.len() {
        0 => "".into(),
        1 => texts.remove(0).into(),
        _ => texts.into_iter().map(|text| json!({"type": "text", "text": text})).collect(),
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
mod tests {
    use super::*;

    #[test]
    fn a_string_is_a_users_message() {
        let expected = [json!({"role": "system", "content": "brief"}), json!({"role": "user", "content": "hi"})];
        assert_eq!(messages(Some("brief"), json!("hi")).unwrap(), expected);
    }

    #[test]
    fn items_of_one_turn_become_one_message() {
        let input = json!([
            {"role": "developer", "content": "brief"},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "weather?"}]},
            {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "not this"}],
                "content": [{"type": "reasoning_text", "text": "hm"}]},
            {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed",
                "content": [{"type": "output_text", "text": "I look", "annotations": []}]},
            {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
            {"type": "function_call", "call_id": "c2", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": "sun"},
            {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "rain"}]},
            {"role": "assistant", "content": "sun and rain"},
            {"role": "assistant", "content": "mostly"},
            {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
            {"type": "reasoning", "summary": []},
        ]);
        let expected = json!([
            {"role": "system", "content": "brief"},
            {"role": "user", "content": "weather?"},
            {"role": "assistant", "content": "I look", "reasoning_content": "hm",
                "tool_calls": [tool_call("c1", "f", "{}"), tool_call("c2", "f", "{}")]},
            {"role": "tool", "tool_call_id": "c1", "content": "sun"},
            {"role": "tool", "tool_call_id": "c2", "content": "rain"},
            {"role": "assistant", "content": "sun and rain"},
            {"role": "assistant", "content": "mostly"},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        ]);
        assert_eq!(Value::from(messages(None, input).unwrap()), expected);
    }

    #[test]
    fn items_that_make_no_conversation_are_refused() {
        for (input, code) in [
            (json!(1), "invalid_type"),
            (json!([]), "invalid_value"),
            (json!(["hi"]), "invalid_type"),
            (json!([{"content": "x"}]), "missing_required_parameter"),
            (json!([{"role": "user"}]), "missing_required_parameter"),
            (json!([{"role": "robot", "content": "x"}]), "convert_request_failed"),
            (json!([{"role": "user", "content": [{"type": "input_image"}]}]), "multimodal_not_supported"),
            (json!([{"role": "user", "content": [{"type": "input_file"}]}]), "multimodal_not_supported"),
            (json!([{"role": "user", "content": [{"type": "hologram"}]}]), "unsupported_content_part"),
            (json!([{"type": "item_reference", "id": "x"}]), "convert_request_failed"),
            (json!([{"type": "web_search_call", "id": "x"}]), "convert_request_failed"),
            (json!([{"type": "function_call", "name": "f"}]), "missing_required_parameter"),
            (json!([{"type": "function_call_output", "call_id": "c"}]), "missing_required_parameter"),
            (json!([{"type": 1}]), "invalid_type"),
        ] {
            let refusal = messages(None, input.clone()).unwrap_err();
            assert_eq!((refusal.status, refusal.code), (400, code), "{input}");
        }
    }
}
