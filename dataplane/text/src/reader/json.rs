//! JSON read character by character.
//!
//! [`Scanner`] knows where a value ends and whether it is JSON at all; it keeps nothing but how deep it is. The functions
//! of [`Cursor`] below read with it: values passed on as they are, strings decoded, and whole tool calls, of which the
//! arguments are passed on while they arrive.

use smg_apis::Piece;

use super::Calls;
use super::cursor::{Cursor, Malformed, Sink};

/// Levels of arrays and objects that a value may have.
const DEPTH: usize = 128;
/// Bytes of a name or key.
pub(super) const NAME: usize = 1024;
/// Bytes of a call that may be held back because its name has not come yet.
const HELD: usize = 1 << 20;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Expect {
    Value,
    ValueOrEnd,
    Key,
    KeyOrEnd,
    Colon,
    CommaOrEnd,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Token {
    /// Between tokens.
    None,
    Text {
        key: bool,
        escape: Escape,
    },
    Number(Number),
    /// What is left of `true`, `false` or `null`.
    Word(&'static str),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Escape {
    None,
    Begun,
    /// Hexadecimal digits that are missing.
    Unicode(u8),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Number {
    Minus,
    Zero,
    Integer,
    Point,
    Fraction,
    Exponent,
    ExponentSign,
    ExponentDigits,
}

impl Number {
    fn step(self, next: char) -> Option<Self> {
        Some(match (self, next) {
            (Self::Minus, '0') => Self::Zero,
            (Self::Minus | Self::Integer, '0'..='9') => Self::Integer,
            (Self::Zero | Self::Integer, '.') => Self::Point,
            (Self::Point | Self::Fraction, '0'..='9') => Self::Fraction,
            (Self::Zero | Self::Integer | Self::Fraction, 'e' | 'E') => Self::Exponent,
            (Self::Exponent, '+' | '-') => Self::ExponentSign,
            (Self::Exponent | Self::ExponentSign | Self::ExponentDigits, '0'..='9') => Self::ExponentDigits,
            _ => return None,
        })
    }

    fn complete(self) -> bool {
        matches!(self, Self::Zero | Self::Integer | Self::Fraction | Self::ExponentDigits)
    }
}

/// What a character is to the value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Step {
    /// Part of it.
    Inside,
    /// Its last character.
    Last,
    /// The value ended before this character.
    After,
}

/// One JSON value, of which the characters are seen one after the other.
#[derive(Debug)]
pub(super) struct Scanner {
    /// The open arrays (false) and objects (true).
    open: Vec<bool>,
    expect: Expect,
    token: Token,
}

impl Scanner {
    pub(super) fn new() -> Self {
        Self { open: Vec::new(), expect: Expect::Value, token: Token::None }
    }

    /// Whether the last character was inside a string.
    pub(super) fn in_text(&self) -> bool {
        matches!(self.token, Token::Text { .. })
    }

    /// Looks at the next character. Control characters in strings are let through: models write them.
    pub(super) fn step(&mut self, next: char) -> Result<Step, Malformed> {
        match self.token {
            Token::Text { key, escape } => self.text(key, escape, next),
            Token::Number(number) => match number.step(next) {
                Some(number) => {
                    self.token = Token::Number(number);
                    Ok(Step::Inside)
                }
                None if !number.complete() => Err(Malformed),
                None => {
                    self.token = Token::None;
                    if self.ended() == Step::Last { Ok(Step::After) } else { self.between(next) }
                }
            },
            Token::Word(rest) => {
                let rest = rest.strip_prefix(next).ok_or(Malformed)?;
                if rest.is_empty() {
                    self.token = Token::None;
                    return Ok(self.ended());
                }
                self.token = Token::Word(rest);
                Ok(Step::Inside)
            }
            Token::None => self.between(next),
        }
    }

    /// Whether the text may end here: only a number does not say itself where it ends.
    pub(super) fn may_end(&self) -> bool {
        self.open.is_empty() && matches!(self.token, Token::Number(number) if number.complete())
    }

    fn text(&mut self, key: bool, escape: Escape, next: char) -> Result<Step, Malformed> {
        let escape = match (escape, next) {
            (Escape::None, '"') => {
                self.token = Token::None;
                if key {
                    self.expect = Expect::Colon;
                    return Ok(Step::Inside);
                }
                return Ok(self.ended());
            }
            (Escape::None, '\\') => Escape::Begun,
            (Escape::None, _) => Escape::None,
            (Escape::Begun, 'u') => Escape::Unicode(4),
            (Escape::Begun, '"' | '\\' | '/' | 'b' | 'f' | 'n' | 'r' | 't') => Escape::None,
            (Escape::Unicode(1), digit) if digit.is_ascii_hexdigit() => Escape::None,
            (Escape::Unicode(missing), digit) if digit.is_ascii_hexdigit() => Escape::Unicode(missing - 1),
            _ => return Err(Malformed),
        };
        self.token = Token::Text { key, escape };
        Ok(Step::Inside)
    }

    fn between(&mut self, next: char) -> Result<Step, Malformed> {
        use Expect::{Colon, CommaOrEnd, Key, KeyOrEnd, Value, ValueOrEnd};
        match (self.expect, next) {
            (_, ' ' | '\t' | '\n' | '\r') => {}
            (Value | ValueOrEnd, '{' | '[') => {
                if self.open.len() == DEPTH {
                    return Err(Malformed);
                }
                self.open.push(next == '{');
                self.expect = if next == '{' { KeyOrEnd } else { ValueOrEnd };
            }
            (Value | ValueOrEnd, '"') => self.token = Token::Text { key: false, escape: Escape::None },
            (Value | ValueOrEnd, '-') => self.token = Token::Number(Number::Minus),
            (Value | ValueOrEnd, '0') => self.token = Token::Number(Number::Zero),
            (Value | ValueOrEnd, '1'..='9') => self.token = Token::Number(Number::Integer),
            (Value | ValueOrEnd, 't') => self.token = Token::Word("rue"),
            (Value | ValueOrEnd, 'f') => self.token = Token::Word("alse"),
            (Value | ValueOrEnd, 'n') => self.token = Token::Word("ull"),
            (Key | KeyOrEnd, '"') => self.token = Token::Text { key: true, escape: Escape::None },
            (Colon, ':') => self.expect = Value,
            (CommaOrEnd, ',') => self.expect = if self.open.last() == Some(&true) { Key } else { Value },
            (CommaOrEnd | KeyOrEnd, '}') if self.open.last() == Some(&true) => return Ok(self.close()),
            (CommaOrEnd | ValueOrEnd, ']') if self.open.last() == Some(&false) => return Ok(self.close()),
            _ => return Err(Malformed),
        }
        Ok(Step::Inside)
    }

    fn close(&mut self) -> Step {
        self.open.pop();
        self.ended()
    }

    /// A value ended: the outermost, or one within.
    fn ended(&mut self) -> Step {
        self.expect = Expect::CommaOrEnd;
        if self.open.is_empty() { Step::Last } else { Step::Inside }
    }
}

/// The fields of a call in JSON.
#[derive(Debug, Clone, Copy)]
pub(super) struct Fields {
    pub name: &'static [&'static str],
    pub arguments: &'static [&'static str],
}

/// What nearly all models write.
pub(super) const FIELDS: Fields = Fields { name: &["name"], arguments: &["arguments", "parameters"] };

impl Cursor {
    /// Passes one JSON value on as it is, control characters in strings escaped.
    pub(super) async fn value(&mut self, sink: Sink) -> Result<(), Malformed> {
        let mut scanner = Scanner::new();
        while let Some(next) = self.peek().await {
            let within = scanner.in_text();
            let step = scanner.step(next)?;
            if step == Step::After {
                return Ok(());
            }
            self.take(next);
            let mut utf8 = [0; 4];
            match next {
                '\n' if within => self.write(sink, "\\n"),
                '\t' if within => self.write(sink, "\\t"),
                '\r' if within => self.write(sink, "\\r"),
                '\0'..='\x1f' if within => self.write(sink, &format!("\\u{:04x}", u32::from(next))),
                _ => self.write(sink, next.encode_utf8(&mut utf8)),
            }
            if step == Step::Last {
                return Ok(());
            }
        }
        if scanner.may_end() { Ok(()) } else { Err(Malformed) }
    }

    /// One JSON value as text.
    async fn value_text(&mut self) -> Result<String, Malformed> {
        let mut scanner = Scanner::new();
        let mut text = String::new();
        while let Some(next) = self.peek().await {
            let step = scanner.step(next)?;
            if step == Step::After {
                return Ok(text);
            }
            self.take(next);
            text.push(next);
            if text.len() > HELD {
                return Err(Malformed);
            }
            if step == Step::Last {
                return Ok(text);
            }
        }
        if scanner.may_end() { Ok(text) } else { Err(Malformed) }
    }

    /// A JSON string, decoded.
    pub(super) async fn string(&mut self) -> Result<String, Malformed> {
        if self.peek().await != Some('"') {
            return Err(Malformed);
        }
        let text = self.value_text().await?;
        serde_json::from_str(&text).map_err(|_| Malformed)
    }

    /// A JSON object that is a call: a name and arguments, in any order and beside other fields. Written are the call, as
    /// soon as its name is known and its arguments begin, and these as they arrive. [`Malformed`] leaves the trail.
    pub(super) async fn call(&mut self, calls: &mut Calls, fields: Fields) -> Result<(), Malformed> {
        self.expect("{").await?;
        let mut name: Option<String> = None;
        let mut early: Option<String> = None;
        let mut index = None;
        self.space().await;
        let mut more = !self.follows("}").await;
        while more {
            self.space().await;
            let key = self.string().await?;
            self.space().await;
            self.expect(":").await?;
            self.space().await;
            let key = key.as_str();
            if fields.name.contains(&key) && name.is_none() {
                name = Some(self.string().await?);
            } else if fields.arguments.contains(&key) && index.is_none() && early.is_none() {
                match &name {
                    Some(name) => {
                        index = Some(calls.begin(self, name, None)?);
                        self.arguments(index.unwrap_or(0)).await?;
                    }
                    None => early = Some(self.value_text().await?),
                }
            } else if calls.strict && !["type", "id"].contains(&key) {
                // Any JSON looks like a call at first: the sooner it is known to be none, the less is held back.
                return Err(Malformed);
            } else {
                self.value(Sink::Dropped).await?;
            }
            self.space().await;
            more = self.follows(",").await;
            if !more {
                self.expect("}").await?;
            }
            if index.is_none() && self.trail() > HELD {
                return Err(Malformed);
            }
        }
        if index.is_none() {
            let index = calls.begin(self, name.as_deref().ok_or(Malformed)?, None)?;
            self.write(Sink::Arguments(index), &settled(early.as_deref()));
        }
        Ok(())
    }

    /// The value of a call's arguments: an object, or the same as a string; nothing (`null`) is an empty object.
    pub(super) async fn arguments(&mut self, index: usize) -> Result<(), Malformed> {
        match self.peek().await {
            Some('"') => {
                let text = self.value_text().await?;
                self.write(Sink::Arguments(index), &settled(Some(&text)));
                Ok(())
            }
            Some('n') => {
                self.expect("null").await?;
                self.write(Sink::Arguments(index), "{}");
                Ok(())
            }
            _ => self.value(Sink::Arguments(index)).await,
        }
    }
}

/// Arguments that are known as a whole, as JSON text of their own.
fn settled(value: Option<&str>) -> String {
    let value = value.unwrap_or("null").trim();
    match serde_json::from_str::<serde_json::Value>(value) {
        Ok(serde_json::Value::Null) => "{}".to_owned(),
        Ok(serde_json::Value::String(text)) => text,
        _ => value.to_owned(),
    }
}

/// The pieces of one call known as a whole.
pub(super) fn whole(cursor: &mut Cursor, calls: &mut Calls, name: &str, arguments: &str) -> Result<(), Malformed> {
    let index = calls.begin(cursor, name, None)?;
    cursor.piece(Piece::ToolArguments { index, fragment: arguments.to_owned() });
    Ok(())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The length of the value at the beginning of `text`, in characters.
    fn scan(text: &str) -> Result<usize, Malformed> {
        let mut scanner = Scanner::new();
        for (at, next) in text.chars().enumerate() {
            match scanner.step(next)? {
                Step::Inside => {}
                Step::Last => return Ok(at + 1),
                Step::After => return Ok(at),
            }
        }
        if scanner.may_end() { Ok(text.chars().count()) } else { Err(Malformed) }
    }

    fn json() -> impl Strategy<Value = serde_json::Value> {
        let leaf = prop_oneof![
            Just(serde_json::Value::Null),
            any::<bool>().prop_map(Into::into),
            any::<i64>().prop_map(Into::into),
            any::<f64>().prop_filter("finite", |number| number.is_finite()).prop_map(Into::into),
            "[a\"\\\\{}\\[\\]é\n]{0,6}".prop_map(Into::into),
        ];
        leaf.prop_recursive(4, 24, 4, |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..4).prop_map(Into::into),
                prop::collection::btree_map("[a\"é]{0,3}", inner, 0..4)
                    .prop_map(|map| serde_json::Value::Object(map.into_iter().collect())),
            ]
        })
    }

    proptest! {
        #[test]
        fn every_json_value_ends_where_it_ends(value in json(), pretty: bool) {
            let text = if pretty { serde_json::to_string_pretty(&value) } else { serde_json::to_string(&value) }.unwrap();
            prop_assert_eq!(scan(&format!("{text} }}x")), Ok(text.chars().count()));
        }

        #[test]
        fn what_is_taken_for_json_is_json(text in "[-0-9eE.+\\[\\]{}\",:tfn \\\\u]{0,12}") {
            if let Ok(length) = scan(&text) {
                let value: String = text.chars().take(length).collect();
                prop_assert!(serde_json::from_str::<serde::de::IgnoredAny>(&value).is_ok(), "{}", value);
            }
        }
    }

    #[test]
    fn nesting_has_a_limit() {
        assert_eq!(scan(&"[".repeat(DEPTH + 1)), Err(Malformed));
        let deep = "[".repeat(DEPTH) + &"]".repeat(DEPTH);
        assert_eq!(scan(&deep), Ok(2 * DEPTH));
    }
}
