//! Log probabilities in the shape of OpenAI's completions: four lists side by side.
//!
//! As in the chat API, tokens of hidden text are not listed: entries wait until their step, or a later one, shows text.

use std::collections::HashSet;

use bytes::BytesMut;

use crate::output::TokenLogprob;
use crate::write::Put as _;

/// The insides of the four lists.
#[derive(Debug, Default)]
pub(super) struct Columns {
    offsets: BytesMut,
    logprobs: BytesMut,
    tokens: BytesMut,
    tops: BytesMut,
}

/// The entries of one choice.
#[derive(Debug, Default)]
pub(super) struct Listing {
    /// Entries whose text may still be hidden.
    waiting: Columns,
    /// Characters of all tokens so far.
    offset: u64,
}

impl Listing {
    /// The entries of a choice that begins with its prompt, or does not.
    pub fn after(prompt: Option<&str>) -> Self {
        Self { waiting: Columns::default(), offset: prompt.map_or(0, |prompt| prompt.chars().count() as u64) }
    }

    /// Adds the entries of a step.
    pub fn add(&mut self, entries: &[TokenLogprob], top: u32) {
        for entry in entries {
            let columns = &mut self.waiting;
            let first = columns.tokens.is_empty();
            columns.offsets.comma(first).number(self.offset);
            columns.logprobs.comma(first).float(entry.logprob);
            columns.tokens.comma(first).string(&entry.text);
            write_top(columns.tops.comma(first), entry, top as usize);
            self.offset += entry.text.chars().count() as u64;
        }
    }

    /// The entries so far, now that their text shows.
    pub fn take(&mut self) -> Columns {
        std::mem::take(&mut self.waiting)
    }
}

/// The candidates of one position as an object; the drawn token is always among them (OpenAI: up to `logprobs` + 1 elements).
/// Candidates that read the same count once, with the likeliest. `null` where nothing was drawn: at the start of a prompt.
fn write_top(out: &mut BytesMut, entry: &TokenLogprob, top: usize) {
    if entry.logprob.is_none() && entry.top.is_empty() {
        out.raw("null");
        return;
    }
    let candidates = entry.top.iter().take(top).map(|(_, text, logprob)| (text.as_str(), Some(*logprob)));
    let mut seen = HashSet::new();
    out.raw("{");
    for (text, logprob) in candidates.chain([(entry.text.as_str(), entry.logprob)]) {
        if seen.insert(text) {
            out.comma(seen.len() == 1).string(text).raw(":").float(logprob);
        }
    }
    out.raw("}");
}

impl Columns {
    /// The entries of a prompt.
    pub fn of_prompt(entries: &[TokenLogprob], top: u32) -> Self {
        let mut listing = Listing::default();
        listing.add(entries, top);
        listing.waiting
    }

    pub fn is_empty(&self) -> bool {
        self.tokens.is_empty()
    }

    /// Adds later entries.
    pub fn append(&mut self, later: &Columns) {
        let first = self.is_empty();
        if later.is_empty() {
            return;
        }
        for (column, later) in [
            (&mut self.offsets, &later.offsets),
            (&mut self.logprobs, &later.logprobs),
            (&mut self.tokens, &later.tokens),
            (&mut self.tops, &later.tops),
        ] {
            column.comma(first).extend_from_slice(later);
        }
    }

    /// `logprobs` of a choice: `null`, or the lists.
    pub fn write(&self, out: &mut BytesMut) {
        if self.is_empty() {
            out.raw("null");
            return;
        }
        for (before, column) in [
            ("{\"text_offset\":[", &self.offsets),
            ("],\"token_logprobs\":[", &self.logprobs),
            ("],\"tokens\":[", &self.tokens),
            ("],\"top_logprobs\":[", &self.tops),
        ] {
            out.raw(before).extend_from_slice(column);
        }
        out.raw("]}");
    }
}
