//! Calls as Python writes them: `[weather(city="Oslo", days=2), now()]`.
//!
//! They are the output as a whole or stand at its beginning. A call is output when its last bracket has come, as its values
//! have to be translated from Python to JSON.

use super::Calls;
use super::arguments::quoted;
use super::cursor::{Cursor, Malformed};
use super::json::{NAME, whole};
use crate::markers::Markers;

/// Bytes of one value.
const VALUE: usize = 1 << 20;
/// Levels of lists and dicts in a value.
const DEPTH: usize = 64;

/// Reads the calls at the beginning, and content to the end.
pub(super) async fn read(cursor: &mut Cursor, calls: &mut Calls) {
    cursor.mark();
    cursor.space().await;
    if cursor.follows("<|python_start|>").await {
        cursor.space().await;
    }
    let well = list(cursor, calls).await;
    cursor.conclude(well, calls.count > 0).await;
    cursor.pass_trimmed(&Markers::default(), calls.count > 0).await;
}

async fn list(cursor: &mut Cursor, calls: &mut Calls) -> Result<(), Malformed> {
    cursor.expect("[").await?;
    loop {
        cursor.space().await;
        let (name, _) = cursor.until(&["("], NAME).await?;
        let arguments = arguments(cursor).await?;
        whole(cursor, calls, name.trim(), &arguments)?;
        cursor.mark();
        cursor.space().await;
        if !cursor.follows(",").await {
            cursor.expect("]").await?;
            cursor.mark();
            cursor.space().await;
            return if cursor.follows("<|python_end|>").await { Ok(()) } else { Err(Malformed) };
        }
    }
}

/// The arguments of a call up to its closing bracket, as a JSON object.
async fn arguments(cursor: &mut Cursor) -> Result<String, Malformed> {
    let mut object = String::from("{");
    loop {
        cursor.space().await;
        if cursor.follows(")").await {
            object.push('}');
            return Ok(object);
        }
        let (key, _) = cursor.until(&["="], NAME).await?;
        let key = key.trim();
        if key.is_empty() || !key.chars().all(|next| next.is_alphanumeric() || next == '_') {
            return Err(Malformed);
        }
        let value = expression(cursor).await?;
        let separator = if object.len() > 1 { ", " } else { "" };
        object.push_str(&format!("{separator}{}: {}", quoted(key), to_json(&value)?));
        if object.len() > VALUE {
            return Err(Malformed);
        }
        cursor.follows(",").await;
    }
}

/// The text of a value, up to the comma or bracket behind it, which stays.
async fn expression(cursor: &mut Cursor) -> Result<String, Malformed> {
    let mut text = String::new();
    let (mut depth, mut quote, mut escaped) = (0usize, None, false);
    while let Some(next) = cursor.peek().await {
        match (quote, next) {
            (Some(_), _) if escaped => escaped = false,
            (Some(_), '\\') => escaped = true,
            (Some(open), _) if open == next => quote = None,
            (Some(_), _) => {}
            (None, '"' | '\'') => quote = Some(next),
            (None, '[' | '{' | '(') => depth += 1,
            (None, ',' | ')') if depth == 0 => return Ok(text),
            (None, ']' | '}' | ')') => depth = depth.checked_sub(1).ok_or(Malformed)?,
            (None, _) => {}
        }
        cursor.take(next);
        text.push(next);
        if text.len() > VALUE {
            return Err(Malformed);
        }
    }
    Err(Malformed)
}

/// A Python literal as JSON.
fn to_json(text: &str) -> Result<String, Malformed> {
    let mut literal = Literal { rest: text.trim(), json: String::new() };
    literal.value(0)?;
    if literal.rest.trim().is_empty() { Ok(literal.json) } else { Err(Malformed) }
}

struct Literal<'a> {
    rest: &'a str,
    json: String,
}

impl Literal<'_> {
    fn value(&mut self, depth: usize) -> Result<(), Malformed> {
        self.rest = self.rest.trim_start();
        match self.rest.chars().next().ok_or(Malformed)? {
            _ if depth > DEPTH => Err(Malformed),
            '[' => self.items(']', "[", "]", depth, false),
            '(' => self.items(')', "[", "]", depth, false),
            '{' => self.items('}', "{", "}", depth, true),
            '"' | '\'' => {
                let text = self.text()?;
                self.json.push_str(&quoted(&text));
                Ok(())
            }
            _ => self.word(),
        }
    }

    fn items(&mut self, end: char, open: &str, close: &str, depth: usize, keys: bool) -> Result<(), Malformed> {
        self.rest = &self.rest[1..];
        self.json.push_str(open);
        let mut first = true;
        loop {
            self.rest = self.rest.trim_start();
            if let Some(rest) = self.rest.strip_prefix(end) {
                self.rest = rest;
                self.json.push_str(close);
                return Ok(());
            }
            if !std::mem::take(&mut first) {
                self.json.push_str(", ");
            }
            if keys {
                let key = self.text()?;
                self.json.push_str(&quoted(&key));
                self.rest = self.rest.trim_start().strip_prefix(':').ok_or(Malformed)?;
                self.json.push_str(": ");
            }
            self.value(depth + 1)?;
            self.rest = self.rest.trim_start();
            match self.rest.strip_prefix(',') {
                Some(rest) => self.rest = rest,
                None if self.rest.starts_with(end) => {}
                None => return Err(Malformed),
            }
        }
    }

    fn text(&mut self) -> Result<String, Malformed> {
        let quote = self.rest.chars().next().filter(|next| matches!(next, '"' | '\'')).ok_or(Malformed)?;
        let mut characters = self.rest[1..].char_indices();
        let mut text = String::new();
        while let Some((at, next)) = characters.next() {
            match next {
                _ if next == quote => {
                    self.rest = &self.rest[1 + at + 1..];
                    return Ok(text);
                }
                '\\' => match characters.next().ok_or(Malformed)?.1 {
                    'n' => text.push('\n'),
                    't' => text.push('\t'),
                    'r' => text.push('\r'),
                    'u' => {
                        let mut code = 0;
                        for _ in 0..4 {
                            code = code * 16
                                + characters.next().and_then(|(_, digit)| digit.to_digit(16)).ok_or(Malformed)?;
                        }
                        text.push(char::from_u32(code).unwrap_or(char::REPLACEMENT_CHARACTER));
                    }
                    '\n' => {}
                    plain @ ('\\' | '\'' | '"') => text.push(plain),
                    other => text.extend(['\\', other]),
                },
                _ => text.push(next),
            }
        }
        Err(Malformed)
    }

    /// A number or a constant.
    fn word(&mut self) -> Result<(), Malformed> {
        let end = self.rest.find([',', ']', '}', ')', ':']).unwrap_or(self.rest.len());
        let (word, rest) = self.rest.split_at(end);
        let json = match word.trim() {
            "True" | "true" => "true".to_owned(),
            "False" | "false" => "false".to_owned(),
            "None" | "null" => "null".to_owned(),
            number => {
                let plain = number.replace('_', "");
                let parsed: serde_json::Number = serde_json::from_str(&plain).map_err(|_| Malformed)?;
                parsed.to_string()
            }
        };
        self.json.push_str(&json);
        self.rest = rest;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn python_literals_become_json() {
        let cases = [
            ("'it\\'s \"so\"'", r#""it's \"so\"""#),
            ("[1, 2.5, -3, ]", "[1, 2.5, -3]"),
            ("{'a': True, \"b\": (None,)}", r#"{"a": true, "b": [null]}"#),
            ("1_000", "1000"),
            ("\"\\u00e9\\n\"", "\"é\\n\""),
        ];
        for (python, json) in cases {
            assert_eq!(to_json(python).as_deref(), Ok(json), "{python}");
        }
        for wrong in ["f(x)", "[1", "{1: 2}", "a.b", "'a' 'b'", ""] {
            assert_eq!(to_json(wrong), Err(Malformed), "{wrong}");
        }
        assert_eq!(to_json(&"[".repeat(100_000)), Err(Malformed));
    }
}
