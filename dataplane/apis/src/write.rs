//! Writing JSON and server-sent events, append only.
//!
//! Answers are written straight into the buffer that goes to the client. Numbers and strings are complete JSON values; everything
//! between them is written by the caller as text.

use std::fmt::Write as _;

use bytes::{BufMut as _, BytesMut};
use serde_json::Value;

/// Stands for what JSON cannot say: the least log probability that is told (OpenAI and vLLM, too, say -9999).
const LEAST_LOGPROB: f32 = -9999.0;

/// Appends pieces of JSON.
pub(crate) trait Put {
    /// Text as it is.
    fn raw(&mut self, text: &str) -> &mut Self;
    /// A string literal.
    fn string(&mut self, text: &str) -> &mut Self;
    /// The inside of a string literal.
    fn inside(&mut self, text: &str) -> &mut Self;
    /// A string literal, or `null`.
    fn maybe_string(&mut self, text: Option<&str>) -> &mut Self;
    /// A whole number.
    fn number(&mut self, number: impl Into<u64>) -> &mut Self;
    /// A float, such as a log probability; `null` when there is none.
    fn float(&mut self, float: Option<f32>) -> &mut Self;
    /// Any value.
    fn value(&mut self, value: &Value) -> &mut Self;
    /// A comma, unless `first`.
    fn comma(&mut self, first: bool) -> &mut Self;
}

impl Put for BytesMut {
    fn raw(&mut self, text: &str) -> &mut Self {
        self.put_slice(text.as_bytes());
        self
    }

    fn string(&mut self, text: &str) -> &mut Self {
        self.put_u8(b'"');
        self.inside(text);
        self.put_u8(b'"');
        self
    }

    fn inside(&mut self, text: &str) -> &mut Self {
        let bytes = text.as_bytes();
        let mut written = 0;
        for (at, byte) in bytes.iter().enumerate() {
            let escape = match byte {
                b'"' => "\\\"",
                b'\\' => "\\\\",
                b'\n' => "\\n",
                b'\r' => "\\r",
                b'\t' => "\\t",
                0..=0x1f => "",
                _ => continue,
            };
            self.put_slice(&bytes[written..at]);
            written = at + 1;
            match escape {
                "" => {
                    let _ = write!(self, "\\u{byte:04x}");
                }
                escape => self.put_slice(escape.as_bytes()),
            }
        }
        self.put_slice(&bytes[written..]);
        self
    }

    fn maybe_string(&mut self, text: Option<&str>) -> &mut Self {
        match text {
            Some(text) => self.string(text),
            None => self.raw("null"),
        }
    }

    fn number(&mut self, number: impl Into<u64>) -> &mut Self {
        // Writing into a growing buffer cannot fail.
        let _ = write!(self, "{}", number.into());
        self
    }

    fn float(&mut self, float: Option<f32>) -> &mut Self {
        match float {
            Some(float) => {
                let told = if float.is_nan() { LEAST_LOGPROB } else { float.clamp(LEAST_LOGPROB, f32::MAX) };
                let _ = write!(self, "{told:?}");
                self
            }
            None => self.raw("null"),
        }
    }

    fn value(&mut self, value: &Value) -> &mut Self {
        let _ = write!(self, "{value}");
        self
    }

    fn comma(&mut self, first: bool) -> &mut Self {
        if !first {
            self.put_u8(b',');
        }
        self
    }
}

/// The end of every event.
pub(crate) const END_OF_EVENT: &str = "\n\n";

/// The event that ends streams of OpenAI's and SGLang's APIs.
pub(crate) const DONE: &str = "data: [DONE]\n\n";

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn any_string_reads_back_as_it_was(text in any::<String>()) {
            let mut out = BytesMut::new();
            out.string(&text);
            prop_assert_eq!(serde_json::from_slice::<String>(&out).unwrap(), text);
            prop_assert!(!out.contains(&b'\n'), "a line end would break an event");
        }

        #[test]
        fn any_log_probability_is_a_json_number(logprob in any::<f32>()) {
            let mut out = BytesMut::new();
            out.float(Some(logprob));
            let read: f64 = serde_json::from_slice(&out).unwrap();
            if logprob.is_finite() && logprob >= LEAST_LOGPROB {
                prop_assert_eq!(read as f32, logprob);
            }
        }
    }

    #[test]
    fn control_characters_are_escaped() {
        let mut out = BytesMut::new();
        out.string("\0\u{1f}\u{7f}\t\"\\/");
        assert_eq!(&out[..], "\"\\u0000\\u001f\u{7f}\\t\\\"\\\\/\"".as_bytes());
    }
}
