//! Reads an answer piece by piece and judges it: one that is short or broken must not count as served.
//!
//! Pieces are what the connection yields, so an event may begin in one and end in another.

use memchr::memchr;
use memchr::memmem::Finder;
use serde_json::Value;

use crate::Result;

/// What an answer must hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Expected {
    /// A whole JSON document with a choice that has a message.
    Document,
    /// A stream of so many tokens, one an event, with its proper end.
    Tokens(u64),
    /// A stream of so many tokens by its own count, however they are spread over its events, with its proper end.
    Usage(u64),
}

/// An answer that is being read.
#[derive(Debug)]
pub struct Answer {
    expected: Expected,
    /// What precedes a token's text, or the count of all.
    text: Finder<'static>,
    error: Finder<'static>,
    /// The beginning of a line of a stream, or all of a document so far.
    held: Vec<u8>,
    tokens: u64,
    done: bool,
    failure: Option<String>,
}

impl Answer {
    /// Nothing read yet.
    pub fn new(expected: Expected) -> Self {
        let text = match expected {
            Expected::Usage(_) => Finder::new(br#""completion_tokens":"#),
            Expected::Document | Expected::Tokens(_) => Finder::new(br#""content":""#),
        };
        let error = Finder::new(br#""error":"#);
        Self { expected, text, error, held: Vec::new(), tokens: 0, done: false, failure: None }
    }

    /// Reads the next piece.
    pub fn read(&mut self, mut piece: &[u8]) {
        if self.expected == Expected::Document {
            self.held.extend_from_slice(piece);
            return;
        }
        while let Some((line, rest)) = memchr(b'\n', piece).and_then(|end| piece.split_at_checked(end)) {
            if self.held.is_empty() {
                self.line(line);
            } else {
                let mut whole = std::mem::take(&mut self.held);
                whole.extend_from_slice(line);
                self.line(&whole);
                whole.clear();
                self.held = whole;
            }
            piece = rest.get(1..).unwrap_or_default();
        }
        self.held.extend_from_slice(piece);
    }

    fn line(&mut self, line: &[u8]) {
        let Some(data) = line.strip_prefix(b"data:").map(<[u8]>::trim_ascii) else {
            if line.starts_with(b"event: error") {
                self.fail(line);
            }
            return;
        };
        if self.done || self.error.find(data).is_some() {
            self.fail(data);
        } else if data == b"[DONE]" {
            self.done = true;
        } else if let Some(start) = self.text.find(data) {
            let rest = data.get(start + self.text.needle().len()..).unwrap_or_default();
            if matches!(self.expected, Expected::Usage(_)) {
                let digits = rest.trim_ascii_start().iter().take_while(|byte| byte.is_ascii_digit());
                self.tokens = digits.fold(0, |number: u64, digit| number.saturating_mul(10) + u64::from(digit - b'0'));
            } else {
                // The first event of a stream has a role and an empty text.
                self.tokens += u64::from(rest.first() != Some(&b'"'));
            }
        }
    }

    fn fail(&mut self, what: &[u8]) {
        self.failure.get_or_insert_with(|| String::from_utf8_lossy(what).into_owned());
    }

    /// What is wrong with what was read so far, whether or not there is more to come.
    ///
    /// # Errors
    /// An event that tells of an error, or anything after the end.
    pub fn check(&self) -> Result<()> {
        match &self.failure {
            Some(event) => Err(format!("a stream tells of an error, or goes on after its end: {event}").into()),
            None => Ok(()),
        }
    }

    /// The answer has ended; the number of its tokens.
    ///
    /// # Errors
    /// It is not what was expected.
    pub fn end(self) -> Result<u64> {
        self.check()?;
        match self.expected {
            Expected::Document if has_choice(&self.held) => Ok(0),
            Expected::Document => {
                Err(format!("not JSON with a choice: {}", String::from_utf8_lossy(&self.held)).into())
            }
            Expected::Tokens(expected) | Expected::Usage(expected) if self.done && self.tokens == expected => {
                Ok(self.tokens)
            }
            Expected::Tokens(expected) | Expected::Usage(expected) => {
                let end = if self.done { "with" } else { "without" };
                Err(format!("a stream of {} tokens instead of {expected}, {end} [DONE]", self.tokens).into())
            }
        }
    }
}

/// Whether a document is a chat completion that answers something.
fn has_choice(document: &[u8]) -> bool {
    let document = serde_json::from_slice::<Value>(document).unwrap_or_default();
    document.get("error").is_none_or(Value::is_null)
        && document.pointer("/choices/0/message").is_some_and(Value::is_object)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    const STREAM: &str = concat!(
        "data: {\"choices\":[{\"delta\":{\"role\":\"assistant\",\"content\":\"\"}}]}\n\n",
        "data: {\"choices\":[{\"delta\":{\"content\":\"an \\\"error\\\": \"}}]}\n\n: ping\n\n",
        "data: {\"choices\":[{\"delta\":{\"content\":\"b\"}}]}\r\n\r\n",
        "data: {\"choices\":[{\"delta\":{\"content\":null},\"finish_reason\":\"length\"}]}\n\n",
        "data: [DONE]\n\n",
    );

    fn read(expected: u64, text: &str, piece: usize) -> Result<u64> {
        let mut answer = Answer::new(Expected::Tokens(expected));
        text.as_bytes().chunks(piece).for_each(|piece| answer.read(piece));
        answer.end()
    }

    #[test]
    fn tokens_are_counted_wherever_a_stream_is_cut() {
        for piece in 1..STREAM.len() + 1 {
            assert_eq!(read(2, STREAM, piece).unwrap(), 2, "{piece}");
        }
    }

    #[test]
    fn a_short_long_unfinished_or_broken_stream_fails() {
        let broken = "data: {\"error\":{\"message\":\"gone\"}}\n\n";
        for piece in [1, 7, 1000] {
            assert!(read(3, STREAM, piece).is_err());
            assert!(read(1, STREAM, piece).is_err());
            assert!(read(2, STREAM.trim_end_matches("data: [DONE]\n\n"), piece).is_err());
            assert!(read(2, &format!("{broken}{STREAM}"), piece).is_err());
            assert!(read(2, &format!("{STREAM}{broken}"), piece).is_err());
        }
    }

    #[test]
    fn tokens_that_share_an_event_are_taken_from_the_count_at_the_end() {
        let usage = r#"data: {"choices":[],"usage":{"prompt_tokens":9,"completion_tokens": 256}}"#;
        let text = STREAM.replace("data: [DONE]", &format!("{usage}\n\ndata: [DONE]"));
        for (expected, served) in [(256, true), (255, false)] {
            let mut answer = Answer::new(Expected::Usage(expected));
            text.as_bytes().chunks(5).for_each(|piece| answer.read(piece));
            assert_eq!(answer.end().is_ok(), served);
        }
    }

    #[test]
    fn a_document_needs_a_choice() {
        let whole = r#"{"choices":[{"index":0,"message":{"role":"assistant","content":""}}],"error":null}"#;
        let failed = r#"{"choices":[{"message":{}}],"error":{"message":"gone"}}"#;
        let cut = whole.get(..whole.len() - 1).unwrap();
        let wrong = [r#"{"choices":[]}"#, r#"{"choices":[null]}"#, r#"{"error":{}}"#, failed, cut, ""];
        for (text, served) in wrong.map(|text| (text, false)).into_iter().chain([(whole, true)]) {
            let mut answer = Answer::new(Expected::Document);
            text.as_bytes().chunks(3).for_each(|piece| answer.read(piece));
            assert_eq!(answer.end().is_ok(), served, "{text}");
        }
    }
}
