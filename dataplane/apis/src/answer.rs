//! How an answer is driven.
//!
//! Whatever the API and whether it streams, the driver does the same: [`Answer::start`] once, then any number of steps and one
//! finish for every sample, in any order between samples, then [`Answer::end`]; or [`Answer::fail`] instead of the rest, as soon as
//! something breaks. A stream writes events as it goes, to be sent at once. Any other answer writes nothing before its end, and
//! then one JSON document.
//!
//! What is kept is bounded by the output: a stream keeps counters and, where the API repeats the whole text at the end or in every
//! event, the text; any other answer keeps its text.

use bytes::BytesMut;

use crate::output::{Finish, MatchedStop, Step, TokenLogprob, Usage};
use crate::responses::Stored;
use crate::write::{DONE, END_OF_EVENT, Put as _};

/// What an answer says about itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Origin {
    /// The id of the answer, in the API's own form.
    pub id: String,
    /// When the request came, in seconds since 1970.
    pub created: u64,
    /// The model that answers.
    pub model: String,
    /// Tokens of the prompt, as counted here; told by APIs that tell it before the engine does.
    pub prompt_tokens: u32,
    /// The version of the weights, when the engine reports one (SGLang, `weight_version`).
    pub weight_version: Option<String>,
}

/// An answer in the making. Steps and finishes of samples that were not asked for are ignored.
pub trait Answer: Send {
    /// Begins it.
    fn start(&mut self, out: &mut BytesMut);

    /// Log probabilities of a sample's prompt, when they are known before its first step. Those of its finish count only when there
    /// were none before.
    fn prompt_logprobs(&mut self, sample: u32, logprobs: &[TokenLogprob]) {
        let _ = (sample, logprobs);
    }

    /// More output of a sample.
    fn step(&mut self, step: &Step, out: &mut BytesMut);

    /// The end of a sample.
    fn finish(&mut self, finish: &Finish, out: &mut BytesMut);

    /// The end of all samples.
    fn end(&mut self, out: &mut BytesMut);

    /// Instead of the rest: what went wrong. A stream ends with an event that says so; any other answer writes nothing, for there is
    /// still time for a status.
    fn fail(&mut self, failure: &Failure, out: &mut BytesMut);

    /// After the end: what later requests may refer to. Only the responses API has such a thing.
    fn stored(&mut self) -> Option<Stored> {
        None
    }
}

/// What broke an answer off.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    /// The kind of error, in OpenAI's words or those of the documented system.
    pub kind: &'static str,
    /// What happened, for the client.
    pub message: String,
}

impl Failure {
    /// An engine's stream broke, or carried an error.
    pub fn stream(message: impl std::fmt::Display) -> Self {
        Self { kind: "stream_error", message: format!("Stream error: {message}") }
    }

    /// The gateway itself failed.
    pub fn internal(message: impl Into<String>) -> Self {
        Self { kind: "internal_error", message: message.into() }
    }

    /// The engine refused what the client asked for, with this HTTP status.
    pub fn refused(status: u16, message: impl Into<String>) -> Self {
        let kind = match status {
            401 => "authentication_error",
            403 => "permission_error",
            404 => "not_found_error",
            429 => "rate_limit_error",
            400..=499 => "invalid_request_error",
            _ => "server_error",
        };
        Self { kind, message: message.into() }
    }

    /// The last two events of a stream of OpenAI's and SGLang's APIs.
    pub(crate) fn write(&self, out: &mut BytesMut) {
        out.raw("data: {\"error\":{\"message\":").string(&self.message).raw(",\"type\":").string(self.kind);
        out.raw("}}").raw(END_OF_EVENT).raw(DONE);
    }
}

/// What all samples cost together.
#[derive(Debug)]
pub(crate) struct Costs {
    /// What each prompt cost: its own tokens once, however many samples it has.
    prompts: Vec<Usage>,
    samples: u32,
}

impl Costs {
    /// For `prompts` prompts of `samples` samples each.
    pub fn new(prompts: usize, samples: u32) -> Self {
        Self { prompts: vec![Usage::default(); prompts], samples: samples.max(1) }
    }

    /// Notes what a sample cost.
    pub fn add(&mut self, sample: u32, usage: &Usage) {
        let Some(sum) = self.prompts.get_mut((sample / self.samples) as usize) else { return };
        sum.prompt_tokens = sum.prompt_tokens.max(usage.prompt_tokens);
        sum.cached_tokens = sum.cached_tokens.max(usage.cached_tokens);
        sum.completion_tokens = sum.completion_tokens.saturating_add(usage.completion_tokens);
        sum.reasoning_tokens = sum.reasoning_tokens.saturating_add(usage.reasoning_tokens);
    }

    /// `usage` as the chat and completions APIs write it.
    pub fn write(&self, out: &mut BytesMut) {
        let sum = |part: fn(&Usage) -> u32| self.prompts.iter().map(|usage| u64::from(part(usage))).sum::<u64>();
        let (prompt, completion) = (sum(|usage| usage.prompt_tokens), sum(|usage| usage.completion_tokens));
        out.raw("{\"prompt_tokens\":").number(prompt).raw(",\"completion_tokens\":").number(completion);
        out.raw(",\"total_tokens\":").number(prompt + completion);
        out.raw(",\"prompt_tokens_details\":{\"cached_tokens\":").number(sum(|usage| usage.cached_tokens));
        out.raw("},\"completion_tokens_details\":{\"reasoning_tokens\":").number(sum(|usage| usage.reasoning_tokens));
        out.raw("}}");
    }
}

/// The members that end a choice: `finish_reason`, and `matched_stop` when something matched (SGLang).
pub(crate) fn write_end_of_choice(out: &mut BytesMut, reason: Option<&str>, matched: Option<&MatchedStop>) {
    out.raw(",\"finish_reason\":").maybe_string(reason);
    if let Some(matched) = matched {
        out.raw(",\"matched_stop\":");
        write_matched(out, matched);
    }
}

/// A stop that matched: the token's id or the string.
pub(crate) fn write_matched(out: &mut BytesMut, matched: &MatchedStop) {
    match matched {
        MatchedStop::Token(id) => out.number(*id),
        MatchedStop::Text(text) => out.string(text),
    };
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
mod tests {
    use super::*;

    #[test]
    fn prompts_count_once_however_many_samples_they_have() {
        let mut costs = Costs::new(2, 2);
        for sample in 0..4 {
            let usage = Usage {
                prompt_tokens: 10 + sample / 2,
                completion_tokens: 3,
                cached_tokens: sample,
                reasoning_tokens: 1,
            };
            costs.add(sample, &usage);
        }
        costs.add(4, &Usage { prompt_tokens: 99, ..Usage::default() });
        let mut out = BytesMut::new();
        costs.write(&mut out);
        let expected = "{\"prompt_tokens\":21,\"completion_tokens\":12,\"total_tokens\":33,\"prompt_tokens_details\":\
            {\"cached_tokens\":4},\"completion_tokens_details\":{\"reasoning_tokens\":4}}";
        assert_eq!(std::str::from_utf8(&out).unwrap(), expected);
    }
}
