//! One sample of an answer: what engines say, as the steps that the client's API is written from.

use std::sync::Arc;

use smg_apis::output::TokenLogprob;
use smg_apis::{Finish, FinishReason, MatchedStop, Piece, Step, Usage};
use smg_engines::grpc::{Message, PromptLogprobs, TokenLogprobs};
use smg_text::tokenizer::Tokenizer;
use smg_text::{Sample, TextModel};

use super::status::LegFailure;

/// One sample while its output arrives.
pub struct Assembly {
    number: u32,
    text: Sample,
    model: Arc<TextModel>,
    prompt_tokens: u32,
    /// The engine does not know the stop strings: it would go on behind one.
    watches_alone: bool,
    prompt_logprobs: bool,
    ended: bool,
}

/// What a message adds to an answer.
#[derive(Debug, Default)]
pub struct Taken {
    /// Log probabilities of the prompt, once.
    pub prompt_logprobs: Option<Vec<TokenLogprob>>,
    /// More output.
    pub step: Option<Step>,
    /// The end of the sample.
    pub finish: Option<Finish>,
}

impl Assembly {
    /// Sample `number` of the answer, of a prompt with so many tokens. `watches_alone` = the engine does not know the stop strings.
    pub fn new(number: u32, text: Sample, model: Arc<TextModel>, prompt_tokens: usize, watches_alone: bool) -> Self {
        let prompt_tokens = u32::try_from(prompt_tokens).unwrap_or(u32::MAX);
        Self { number, text, model, prompt_tokens, watches_alone, prompt_logprobs: false, ended: false }
    }

    /// Takes a message in. An engine that knows what stops the output ends it itself; one that does not is not waited for. What comes after
    /// the end is ignored.
    ///
    /// # Errors
    /// The engine speaks of another vocabulary.
    pub fn take(&mut self, message: Message) -> Result<Taken, LegFailure> {
        if self.ended {
            return Ok(Taken::default());
        }
        let (token_ids, logprobs, prompt_logprobs, usage, end) = match message {
            Message::Chunk(chunk) => (chunk.token_ids, chunk.logprobs, chunk.prompt_logprobs, chunk.usage, None),
            Message::Complete(complete) => {
                let end = Some((complete.reason, complete.matched_stop));
                (complete.token_ids, complete.logprobs, complete.prompt_logprobs, complete.usage, end)
            }
        };
        let was_stopped = self.text.stopped();
        let vocabulary = |error| LegFailure::broken(format!("the engine speaks of another vocabulary: {error}"));
        let mut pieces = self.text.push(&token_ids).map_err(vocabulary)?;
        let stopped_here = self.watches_alone && matches!(self.text.matched_stop(), Some(MatchedStop::Text(_)));
        self.ended = end.is_some() || stopped_here;
        if self.ended {
            let rest = self.text.finish().map_err(vocabulary)?;
            rest.into_iter().for_each(|piece| append(&mut pieces, piece));
        }
        let tokenizer = &self.model.tokenizer;
        let prompt_logprobs =
            prompt_logprobs.filter(|_| !self.prompt_logprobs).map(|logprobs| of_prompt(tokenizer, logprobs));
        self.prompt_logprobs |= prompt_logprobs.is_some();
        let streamed = end.is_none();
        let step = Step {
            sample: self.number,
            pieces,
            token_ids,
            logprobs: logprobs.map(|logprobs| of_output(tokenizer, logprobs)).unwrap_or_default(),
        };
        let says_something = !step.pieces.is_empty() || !was_stopped && (streamed || !step.token_ids.is_empty());
        Ok(Taken {
            prompt_logprobs,
            finish: self.ended.then(|| self.finish(end, usage)),
            step: says_something.then_some(step),
        })
    }

    /// The end: a stop that was found here goes before what the engine says.
    fn finish(&self, end: Option<(FinishReason, Option<MatchedStop>)>, usage: Usage) -> Finish {
        let (reason, matched_stop) = match end {
            Some((reason, matched)) if !self.text.stopped() => (reason, matched),
            Some((_, matched)) => (FinishReason::Stop, self.text.matched_stop().or(matched)),
            None => (FinishReason::Stop, self.text.matched_stop()),
        };
        let usage = Usage {
            prompt_tokens: if usage.prompt_tokens == 0 { self.prompt_tokens } else { usage.prompt_tokens },
            reasoning_tokens: usage.reasoning_tokens.max(self.text.reasoning_tokens()),
            ..usage
        };
        Finish { sample: self.number, reason, matched_stop, usage, prompt_logprobs: Vec::new() }
    }
}

/// Adds a piece; text that goes on joins the piece before.
fn append(pieces: &mut Vec<Piece>, piece: Piece) {
    match (pieces.last_mut(), &piece) {
        (Some(Piece::Content(before)), Piece::Content(text))
        | (Some(Piece::Reasoning(before)), Piece::Reasoning(text)) => before.push_str(text),
        _ => pieces.push(piece),
    }
}

fn of_output(tokenizer: &Tokenizer, logprobs: TokenLogprobs) -> Vec<TokenLogprob> {
    let values = logprobs.logprobs.into_iter().map(Some);
    entries(tokenizer, logprobs.token_ids, values, logprobs.top)
}

fn of_prompt(tokenizer: &Tokenizer, logprobs: PromptLogprobs) -> Vec<TokenLogprob> {
    entries(tokenizer, logprobs.token_ids, logprobs.logprobs.into_iter(), logprobs.top)
}

fn entries(
    tokenizer: &Tokenizer,
    ids: Vec<u32>,
    values: impl Iterator<Item = Option<f32>>,
    top: Vec<Vec<(u32, f32)>>,
) -> Vec<TokenLogprob> {
    let mut top = top.into_iter();
    let entry = |(token_id, logprob)| {
        let rivals = top.next().unwrap_or_default();
        let rivals = rivals.into_iter().map(|(id, logprob)| (id, tokenizer.text_of(id), logprob)).collect();
        TokenLogprob { token_id, text: tokenizer.text_of(token_id), logprob, top: rivals }
    };
    ids.into_iter().zip(values).map(entry).collect()
}
