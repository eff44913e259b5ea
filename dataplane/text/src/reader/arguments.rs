//! Arguments that a format gives one by one, written as a JSON object.

use serde_json::Value;

use super::Calls;
use super::cursor::{Cursor, Sink};

/// What a format says of a parameter's value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// Text, whatever it looks like.
    Text,
    /// JSON, or text if it is none.
    Json,
    /// Nothing: the tool's schema decides.
    Unsaid,
}

/// The object of one call, parameter by parameter.
#[derive(Debug)]
pub(super) struct Arguments {
    tool: String,
    index: usize,
    empty: bool,
}

impl Arguments {
    /// Of the call at `index`, which has begun.
    pub(super) fn new(tool: &str, index: usize) -> Self {
        Self { tool: tool.to_owned(), index, empty: true }
    }

    /// Writes a parameter, and goes on from behind it.
    pub(super) fn parameter(&mut self, cursor: &mut Cursor, calls: &Calls, name: &str, text: &str, kind: Kind) {
        let schema = calls.schema(&self.tool, name);
        let lead = if std::mem::take(&mut self.empty) { "{" } else { ", " };
        let fragment = format!("{lead}{}: {}", quoted(name), value(text, schema, kind));
        cursor.write(Sink::Arguments(self.index), &fragment);
        cursor.mark();
    }

    /// The last parameter has come.
    pub(super) fn close(&self, cursor: &mut Cursor) {
        cursor.write(Sink::Arguments(self.index), if self.empty { "{}" } else { "}" });
    }
}

/// `text` as a JSON string.
pub(super) fn quoted(text: &str) -> String {
    Value::from(text).to_string()
}

/// The JSON of a value that a model wrote as `text`.
fn value(text: &str, schema: Option<&Value>, kind: Kind) -> String {
    let types = schema.map(types).unwrap_or_default();
    let only_text = !types.is_empty() && types.iter().all(|name| *name == "string");
    if kind == Kind::Text || (kind == Kind::Unsaid && only_text) {
        return quoted(text);
    }
    let trimmed = text.trim();
    match trimmed {
        "True" => return "true".to_owned(),
        "False" => return "false".to_owned(),
        "None" => return "null".to_owned(),
        _ => {}
    }
    match serde_json::from_str::<Value>(trimmed) {
        // Where a string is expected and other things too, what comes quoted keeps its quotes.
        Ok(Value::String(_)) if types.contains(&"string") => quoted(text),
        Ok(_) => trimmed.to_owned(),
        Err(_) => quoted(text),
    }
}

/// The JSON types that a schema allows; empty = it does not say.
fn types(schema: &Value) -> Vec<&str> {
    match schema.get("type") {
        Some(Value::String(name)) => vec![name],
        Some(Value::Array(names)) => names.iter().filter_map(Value::as_str).collect(),
        _ => {
            let either = ["anyOf", "oneOf"].iter().find_map(|key| schema.get(key)?.as_array());
            match (either, schema.get("enum").and_then(Value::as_array)) {
                (Some(either), _) => either.iter().flat_map(types).collect(),
                (None, Some(values)) if values.iter().all(Value::is_string) => vec!["string"],
                _ => Vec::new(),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_schema_decides_between_text_and_other_values() {
        let written = |text, schema: Value| value(text, Some(&schema), Kind::Unsaid);
        assert_eq!(written("42", json!({"type": "string"})), "\"42\"");
        assert_eq!(written("42", json!({"type": "integer"})), "42");
        assert_eq!(written("True", json!({"type": "boolean"})), "true");
        assert_eq!(written("null", json!({"anyOf": [{"type": "string"}, {"type": "null"}]})), "null");
        assert_eq!(written("a \"b\"", json!({"type": "array"})), r#""a \"b\"""#);
        assert_eq!(written("[1]", json!({"enum": ["[1]", "[2]"]})), "\"[1]\"");
        assert_eq!(value("[1, 2]", None, Kind::Unsaid), "[1, 2]");
        assert_eq!(value("so", None, Kind::Unsaid), "\"so\"");
    }

    #[test]
    fn what_the_format_says_counts_more_than_the_schema() {
        assert_eq!(value("42", Some(&json!({"type": "integer"})), Kind::Text), "\"42\"");
        assert_eq!(value("42", Some(&json!({"type": "string"})), Kind::Json), "42");
    }
}
