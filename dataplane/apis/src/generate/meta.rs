//! One sample in SGLang's shape: `{"text", "output_ids", "meta_info"}`, the same at any time of its making.
//!
//! The native API tells all of a sample in every event of a stream. What was told once is kept as it was written, so that an event
//! costs a copy and no more.

use bytes::BytesMut;

use super::Form;
use crate::answer::{Origin, write_matched};
use crate::output::{Finish, FinishReason, MatchedStop, Piece, Step, TokenLogprob, Usage};
use crate::write::Put as _;

/// A sample so far. Lists and texts are the insides of their JSON.
#[derive(Default)]
pub(super) struct Sample {
    text: BytesMut,
    ids: BytesMut,
    tokens: u32,
    input: Listing,
    output: Listing,
    end: Option<(FinishReason, Option<MatchedStop>, Usage)>,
}

/// Log probabilities of tokens, and of their rivals.
#[derive(Default)]
struct Listing {
    drawn: BytesMut,
    rivals: BytesMut,
}

impl Sample {
    /// Takes the entries of the prompt, unless there are some.
    pub fn prompt_logprobs(&mut self, entries: &[TokenLogprob], form: Form) {
        if self.input.drawn.is_empty() {
            self.input.add(entries, form);
        }
    }

    pub fn step(&mut self, step: &Step, form: Form) {
        for piece in &step.pieces {
            if let Piece::Content(text) | Piece::Reasoning(text) = piece {
                self.text.inside(text);
            }
        }
        for id in &step.token_ids {
            let first = self.ids.is_empty();
            self.ids.comma(first).number(*id);
        }
        self.tokens = self.tokens.saturating_add(step.token_ids.len() as u32);
        self.output.add(&step.logprobs, form);
    }

    pub fn finish(&mut self, finish: &Finish, form: Form) {
        self.prompt_logprobs(&finish.prompt_logprobs, form);
        self.end = Some((finish.reason.clone(), finish.matched_stop.clone(), finish.usage));
    }

    /// Writes it, up to and without the brace that closes it.
    pub fn write(&self, index: u32, origin: &Origin, form: Form, out: &mut BytesMut) {
        out.raw("{\"text\":\"").extend_from_slice(&self.text);
        out.raw("\",\"output_ids\":[").extend_from_slice(&self.ids);
        out.raw("],\"meta_info\":{\"id\":\"").inside(&origin.id);
        if form.samples > 1 {
            out.raw("-").number(index);
        }
        out.raw("\",\"finish_reason\":");
        let usage = match &self.end {
            Some((reason, matched, usage)) => {
                write_reason(reason, matched.as_ref(), usage, out);
                *usage
            }
            None => {
                out.raw("null");
                Usage { prompt_tokens: origin.prompt_tokens, completion_tokens: self.tokens, ..Usage::default() }
            }
        };
        out.raw(",\"prompt_tokens\":").number(usage.prompt_tokens);
        out.raw(",\"completion_tokens\":").number(usage.completion_tokens);
        out.raw(",\"cached_tokens\":").number(usage.cached_tokens);
        if usage.reasoning_tokens > 0 {
            out.raw(",\"reasoning_tokens\":").number(usage.reasoning_tokens);
        }
        if let Some(version) = &origin.weight_version {
            out.raw(",\"weight_version\":").string(version);
        }
        if let Some(top) = form.top_logprobs {
            for (name, rivals, listing) in [
                (",\"input_token_logprobs\":[", ",\"input_top_logprobs\":[", &self.input),
                (",\"output_token_logprobs\":[", ",\"output_top_logprobs\":[", &self.output),
            ] {
                out.raw(name).extend_from_slice(&listing.drawn);
                out.raw("]");
                if top > 0 {
                    out.raw(rivals).extend_from_slice(&listing.rivals);
                    out.raw("]");
                }
            }
        }
        out.raw("}");
    }
}

/// `{"type": "stop", "matched": ..}`, `{"type": "length", "length": ..}`, or the engine's word as the type.
fn write_reason(reason: &FinishReason, matched: Option<&MatchedStop>, usage: &Usage, out: &mut BytesMut) {
    out.raw("{\"type\":").string(reason.word());
    if let Some(matched) = matched {
        out.raw(",\"matched\":");
        write_matched(out, matched);
    }
    if *reason == FinishReason::Length {
        out.raw(",\"length\":").number(usage.completion_tokens);
    }
    out.raw("}");
}

impl Listing {
    fn add(&mut self, entries: &[TokenLogprob], form: Form) {
        let Some(top) = form.top_logprobs else { return };
        for entry in entries {
            let first = self.drawn.is_empty();
            write_entry(self.drawn.comma(first), entry.logprob, entry.token_id, &entry.text, form);
            if top == 0 {
                continue;
            }
            self.rivals.comma(first);
            if entry.top.is_empty() {
                // The first token of a prompt has no rivals.
                self.rivals.raw("null");
                continue;
            }
            self.rivals.raw("[");
            for (at, (id, text, logprob)) in entry.top.iter().take(top as usize).enumerate() {
                write_entry(self.rivals.comma(at == 0), Some(*logprob), *id, text, form);
            }
            self.rivals.raw("]");
        }
    }
}

/// `[log probability, id, text]`; the text is `null` unless it was asked for.
fn write_entry(out: &mut BytesMut, logprob: Option<f32>, id: u32, text: &str, form: Form) {
    out.raw("[").float(logprob).raw(",").number(id).raw(",").maybe_string(form.texts.then_some(text)).raw("]");
}
