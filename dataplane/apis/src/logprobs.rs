//! Log probabilities in the shape of OpenAI's chat and responses APIs.
//!
//! Only tokens of the visible content are listed (OpenAI, `logprobs.content`). A token may be drawn before the text that it leads to
//! is let out, since text waits while it may become a stop string; so entries wait for the next visible content. What turns out to
//! be reasoning, a call, or hidden by the stop is dropped.

use bytes::BytesMut;

use crate::output::{Piece, Step, TokenLogprob};
use crate::write::Put as _;

/// Entries that wait for content to become visible, as the inside of a JSON array.
#[derive(Debug, Default)]
pub(crate) struct Waiting(BytesMut);

impl Waiting {
    /// Adds a step's entries, and returns those that its visible content settles.
    pub fn settle(&mut self, step: &Step, top: Option<u32>) -> BytesMut {
        let Some(top) = top else { return BytesMut::new() };
        for entry in &step.logprobs {
            let first = self.0.is_empty();
            write_entry(self.0.comma(first), entry, top as usize);
        }
        let content = step.pieces.iter().any(|piece| matches!(piece, Piece::Content(text) if !text.is_empty()));
        if content {
            return std::mem::take(&mut self.0);
        }
        if step.pieces.iter().any(|piece| !matches!(piece, Piece::Content(_))) {
            self.0.clear();
        }
        BytesMut::new()
    }
}

/// One entry: `{"token", "logprob", "bytes", "top_logprobs"}`.
fn write_entry(out: &mut BytesMut, entry: &TokenLogprob, top: usize) {
    out.raw("{\"token\":").string(&entry.text).raw(",\"logprob\":").float(entry.logprob).raw(",\"bytes\":");
    write_bytes(out, &entry.text);
    out.raw(",\"top_logprobs\":[");
    for (at, (_, text, logprob)) in entry.top.iter().take(top).enumerate() {
        out.comma(at == 0)
            .raw("{\"token\":")
            .string(text)
            .raw(",\"logprob\":")
            .float(Some(*logprob))
            .raw(",\"bytes\":");
        write_bytes(out, text);
        out.raw("}");
    }
    out.raw("]}");
}

fn write_bytes(out: &mut BytesMut, text: &str) {
    out.raw("[");
    for (at, byte) in text.bytes().enumerate() {
        out.comma(at == 0).number(byte);
    }
    out.raw("]");
}

/// `logprobs` of a choice: `null`, or entries.
pub(crate) fn write(out: &mut BytesMut, entries: &[u8]) {
    if entries.is_empty() {
        out.raw("null");
        return;
    }
    out.raw("{\"content\":[");
    out.extend_from_slice(entries);
    out.raw("],\"refusal\":null}");
}
