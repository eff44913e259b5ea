//! What engines answer, in words of none of them.
//!
//! Engines count differently: vLLM says how many tokens are new, the others how many there are so far; and the message
//! that ends a streamed sample repeats the tokens of the last one. A [`Reader`] follows one answer and makes all of it
//! uniform:
//!
//! * a [`Message`]'s tokens and log probabilities are those not delivered before, so that joining them gives the output;
//! * its counts are those so far;
//! * a sample has one [`Complete`], and nothing follows it; nothing is missing before it either, as far as engines tell:
//!   the tokens that the end of a streamed sample repeats are the last ones that chunks brought, and an engine that counts
//!   tokens so far has not counted more than it sent.
//!
//! Engines are not trusted: what does not keep to this is an error, and fails the request that it answers. That a chunk
//! was lost on the way is so noticed with the next message, or, where the engine keeps a stop token to itself, with the
//! one after it; on vLLM, which counts the tokens of each message alone, only if it was the last one.

use smg_apis::output::{FinishReason, MatchedStop, Usage};

/// The next piece of an answer.
#[derive(Debug, Clone, PartialEq)]
pub enum Message {
    /// More of a sample.
    Chunk(Chunk),
    /// The end of a sample.
    Complete(Complete),
}

impl Message {
    /// The same as one message a token, if tokens have log probabilities: those of a token belong to the text that it shows
    /// and to no other. All but the last are chunks.
    pub fn by_token(mut self) -> (Vec<Chunk>, Self) {
        let (index, usage, tokens, logprobs, prompt_logprobs) = match &mut self {
            Self::Chunk(it) => (it.index, it.usage, &mut it.token_ids, &mut it.logprobs, &mut it.prompt_logprobs),
            Self::Complete(it) => (it.index, it.usage, &mut it.token_ids, &mut it.logprobs, &mut it.prompt_logprobs),
        };
        let fit = |logprobs: &TokenLogprobs| logprobs.token_ids.len() == tokens.len() && tokens.len() > 1;
        if !logprobs.as_ref().is_some_and(fit) {
            return (Vec::new(), self);
        }
        let TokenLogprobs { token_ids, logprobs: values, top } = logprobs.take().unwrap_or_default();
        let mut top = top.into_iter();
        let one = |((token, listed), value)| Chunk {
            index,
            token_ids: vec![token],
            usage,
            logprobs: Some(TokenLogprobs {
                token_ids: vec![listed],
                logprobs: vec![value],
                top: top.next().into_iter().collect(),
            }),
            prompt_logprobs: prompt_logprobs.take(),
        };
        let mut chunks: Vec<Chunk> = tokens.drain(..).zip(token_ids).zip(values).map(one).collect();
        if let Some(last) = chunks.pop() {
            (*tokens, *logprobs) = (last.token_ids, last.logprobs);
        }
        (chunks, self)
    }
}

/// More of a sample.
#[derive(Debug, Clone, PartialEq)]
pub struct Chunk {
    /// The sample.
    pub index: u32,
    /// New tokens; a sample's first chunk may have none.
    pub token_ids: Vec<u32>,
    /// Tokens so far.
    pub usage: Usage,
    /// Log probabilities of the new tokens.
    pub logprobs: Option<TokenLogprobs>,
    /// Log probabilities of the prompt, once.
    pub prompt_logprobs: Option<PromptLogprobs>,
}

/// The end of a sample.
#[derive(Debug, Clone, PartialEq)]
pub struct Complete {
    /// The sample.
    pub index: u32,
    /// Tokens that no chunk brought: all of them when the answer is not streamed, none otherwise.
    pub token_ids: Vec<u32>,
    /// Tokens in all.
    pub usage: Usage,
    /// Why it ended.
    pub reason: FinishReason,
    /// The stop that matched, when the engine says so.
    pub matched_stop: Option<MatchedStop>,
    /// Log probabilities of `token_ids`.
    pub logprobs: Option<TokenLogprobs>,
    /// Log probabilities of the prompt, if no chunk brought them.
    pub prompt_logprobs: Option<PromptLogprobs>,
    /// What a prefill hands over: a JSON object, as it came or as it was agreed on before ([`Reader::handing_over`]).
    pub kv_transfer_params: Option<String>,
    /// Version of the model's weights, where the engine says it.
    pub weight_version: Option<String>,
}

/// Log probabilities of generated tokens; entry `i` of each list belongs to token `i`.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct TokenLogprobs {
    /// The tokens.
    pub token_ids: Vec<u32>,
    /// Their log probabilities.
    pub logprobs: Vec<f32>,
    /// Candidates of each, the likeliest first: id and log probability. Empty when none were asked for.
    pub top: Vec<Vec<(u32, f32)>>,
}

/// Log probabilities of a prompt's tokens; entry `i` of each list belongs to token `i`.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct PromptLogprobs {
    /// The tokens.
    pub token_ids: Vec<u32>,
    /// Their log probabilities; the first has none.
    pub logprobs: Vec<Option<f32>>,
    /// Candidates of each. Empty when none were asked for.
    pub top: Vec<Vec<(u32, f32)>>,
}

/// Tokens and values of one position's candidates.
type Top = (Vec<u32>, Vec<f32>);

impl TokenLogprobs {
    pub(super) fn new(
        token_ids: Vec<u32>,
        logprobs: Vec<f32>,
        top: impl Iterator<Item = Top>,
    ) -> Result<Self, ReadError> {
        let top = candidates(top, token_ids.len())?;
        (token_ids.len() == logprobs.len()).then_some(Self { token_ids, logprobs, top }).ok_or(ReadError::Logprobs)
    }
}

impl PromptLogprobs {
    pub(super) fn new(
        token_ids: Vec<u32>,
        logprobs: Vec<Option<f32>>,
        top: impl Iterator<Item = Top>,
    ) -> Result<Self, ReadError> {
        let top = candidates(top, token_ids.len())?;
        (token_ids.len() == logprobs.len()).then_some(Self { token_ids, logprobs, top }).ok_or(ReadError::Logprobs)
    }
}

fn candidates(top: impl Iterator<Item = Top>, positions: usize) -> Result<Vec<Vec<(u32, f32)>>, ReadError> {
    let pairs = |(ids, values): Top| {
        (ids.len() == values.len()).then(|| ids.into_iter().zip(values).collect()).ok_or(ReadError::Logprobs)
    };
    let top: Vec<Vec<(u32, f32)>> = top.map(pairs).collect::<Result<_, _>>()?;
    (top.is_empty() || top.len() == positions).then_some(top).ok_or(ReadError::Logprobs)
}

/// An engine does not keep to its protocol, or says that it failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum ReadError {
    /// A message with nothing in it.
    #[error("the engine sent an empty message")]
    Empty,
    /// A sample that was not asked for.
    #[error("the engine sent sample {index} of {samples}")]
    Index {
        /// The sample.
        index: u32,
        /// Samples asked for.
        samples: u32,
    },
    /// A message of a sample that had ended.
    #[error("the engine went on with sample {index} after its end")]
    AfterEnd {
        /// The sample.
        index: u32,
    },
    /// The end of a streamed sample whose tokens had not come.
    #[error("the engine ended sample {index} before all of its output had come")]
    EndBeforeOutput {
        /// The sample.
        index: u32,
    },
    /// Tokens that the engine counts did not come.
    #[error("the engine counts {counted} tokens of sample {index} and sent {sent}")]
    Lost {
        /// The sample.
        index: u32,
        /// Tokens so far, by the engine's count.
        counted: u32,
        /// Tokens that came.
        sent: u32,
    },
    /// Lists of log probabilities that do not fit together.
    #[error("the engine sent log probabilities that belong to no tokens")]
    Logprobs,
    /// The engine gave up (`finish_reason` "error").
    #[error("engine finished the request with an error (see engine logs)")]
    EngineFailed,
}

/// Engines' messages as they come, once their fields are named alike.
pub(super) mod raw {
    use super::{Counted, MatchedStop, PromptLogprobs, TokenLogprobs};

    pub(in super::super) struct Chunk {
        pub index: u32,
        pub token_ids: Vec<u32>,
        pub prompt_tokens: u32,
        pub completion_tokens: Counted,
        pub cached_tokens: u32,
        pub reasoning_tokens: u32,
        pub logprobs: Option<TokenLogprobs>,
        pub prompt_logprobs: Option<PromptLogprobs>,
    }

    pub(in super::super) struct Complete {
        pub index: u32,
        pub token_ids: Vec<u32>,
        pub finish_reason: String,
        pub prompt_tokens: u32,
        pub completion_tokens: Counted,
        pub cached_tokens: u32,
        pub reasoning_tokens: u32,
        pub matched_stop: Option<MatchedStop>,
        pub logprobs: Option<TokenLogprobs>,
        pub prompt_logprobs: Option<PromptLogprobs>,
        pub kv_transfer_params: Option<String>,
        pub weight_version: Option<String>,
    }
}

/// How an engine counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Counted {
    /// Tokens so far; 0 where it does not count.
    SoFar(u32),
    /// The same, and with them the stop token that ended the sample, although that is not sent unless it was asked for.
    SoFarWithStop(u32),
    /// Tokens of this message.
    New(u32),
}

impl Counted {
    /// How many tokens it counts beyond `sent`.
    fn beyond(self, sent: usize) -> u32 {
        match self {
            Self::SoFar(now) | Self::SoFarWithStop(now) => now.saturating_sub(u32::try_from(sent).unwrap_or(u32::MAX)),
            Self::New(_) => 0,
        }
    }
}

#[derive(Debug, Clone, Default)]
struct Sample {
    /// Tokens so far, as the engine counts them.
    tokens: u32,
    /// Tokens that chunks brought.
    brought: usize,
    /// Those of the last chunk that had any.
    last: Vec<u32>,
    /// One token fewer than counted has come. If it is the stop token, nothing more comes.
    lacks_one: bool,
    streamed: bool,
    prompt_logprobs: bool,
    ended: bool,
}

/// Follows one answer. See the module's head.
#[derive(Debug, Clone)]
pub struct Reader {
    samples: Vec<Sample>,
    streams: bool,
    ended: usize,
    handoff: Option<String>,
}

impl Reader {
    /// A reader of the answer to a request for `samples` samples; at least 1. `streams`: whether chunks were asked for.
    pub fn new(samples: u32, streams: bool) -> Self {
        Self { samples: vec![Sample::default(); samples.max(1) as usize], streams, ended: 0, handoff: None }
    }

    /// For an engine that hands over without saying so (Mooncake): `params` are what its prefill holds for a decode once
    /// it has ended by its limit.
    #[must_use]
    pub fn handing_over(mut self, params: Option<String>) -> Self {
        self.handoff = params;
        self
    }

    /// Whether every sample has ended: there is nothing more to come.
    pub fn is_complete(&self) -> bool {
        self.ended == self.samples.len()
    }

    /// The sample that a [`Complete`] ends when the engine may number all of them 0: the first that has not ended.
    pub(super) fn index_of_complete(&self, index: u32) -> u32 {
        let taken = self.samples.get(index as usize).is_some_and(|sample| sample.ended && !sample.streamed);
        let next = self.samples.iter().position(|sample| !sample.ended).filter(|_| taken);
        next.and_then(|next| u32::try_from(next).ok()).unwrap_or(index)
    }

    fn sample(&mut self, index: u32) -> Result<&mut Sample, ReadError> {
        let samples = u32::try_from(self.samples.len()).unwrap_or(u32::MAX);
        match self.samples.get_mut(index as usize) {
            None => Err(ReadError::Index { index, samples }),
            Some(sample) if sample.ended => Err(ReadError::AfterEnd { index }),
            Some(sample) => Ok(sample),
        }
    }

    pub(super) fn chunk(&mut self, chunk: raw::Chunk) -> Result<Message, ReadError> {
        let index = chunk.index;
        let sample = self.sample(index)?;
        sample.count(chunk.completion_tokens, false);
        sample.note(&chunk.token_ids);
        sample.check_chunk(index, chunk.completion_tokens)?;
        let prompt_logprobs = chunk.prompt_logprobs.filter(|_| !sample.prompt_logprobs);
        sample.prompt_logprobs |= prompt_logprobs.is_some();
        Ok(Message::Chunk(Chunk {
            index,
            token_ids: chunk.token_ids,
            usage: Usage {
                prompt_tokens: chunk.prompt_tokens,
                completion_tokens: sample.tokens,
                cached_tokens: chunk.cached_tokens,
                reasoning_tokens: chunk.reasoning_tokens,
            },
            logprobs: chunk.logprobs,
            prompt_logprobs,
        }))
    }

    pub(super) fn complete(&mut self, complete: raw::Complete) -> Result<Message, ReadError> {
        let (index, streams) = (complete.index, self.streams);
        let sample = self.sample(index)?;
        let comes_too_early = !sample.has(&complete, streams);
        let all_came = sample.check_end(&complete);
        sample.count(complete.completion_tokens, true);
        sample.ended = true;
        let (tokens, streamed, prompt_known) = (sample.tokens, sample.streamed, sample.prompt_logprobs);
        self.ended += 1;
        match complete.finish_reason.as_str() {
            "error" => return Err(ReadError::EngineFailed),
            _ if comes_too_early => return Err(ReadError::EndBeforeOutput { index }),
            _ => all_came?,
        }
        let reason = match complete.finish_reason.as_str() {
            "stop" => FinishReason::Stop,
            "length" => FinishReason::Length,
            "abort" => FinishReason::Abort,
            _ => FinishReason::Other(complete.finish_reason),
        };
        let held = self.handoff.take_if(|_| reason == FinishReason::Length);
        Ok(Message::Complete(Complete {
            index,
            token_ids: if streamed { Vec::new() } else { complete.token_ids },
            usage: Usage {
                prompt_tokens: complete.prompt_tokens,
                completion_tokens: tokens,
                cached_tokens: complete.cached_tokens,
                reasoning_tokens: complete.reasoning_tokens,
            },
            reason,
            matched_stop: complete.matched_stop,
            logprobs: complete.logprobs.filter(|_| !streamed),
            prompt_logprobs: complete.prompt_logprobs.filter(|_| !prompt_known),
            kv_transfer_params: held.or(complete.kv_transfer_params),
            weight_version: complete.weight_version,
        }))
    }
}

impl Sample {
    /// Takes in the tokens of a chunk.
    fn note(&mut self, tokens: &[u32]) {
        self.streamed = true;
        self.brought = self.brought.saturating_add(tokens.len());
        if !tokens.is_empty() {
            self.last.clear();
            self.last.extend_from_slice(tokens);
        }
    }

    /// Whether chunks have brought what the end of a streamed sample tells of: its last tokens or all of them. Servicers send
    /// a chunk before any end; an end without tokens may stand alone all the same, be it that of an abort or of an answer
    /// that was nothing but a stop token.
    fn has(&self, end: &raw::Complete, streams: bool) -> bool {
        let repeated = &end.token_ids;
        if self.streamed {
            return repeated.len() <= self.brought && (self.last.ends_with(repeated) || repeated.ends_with(&self.last));
        }
        !streams
            || repeated.is_empty()
                && !matches!(end.completion_tokens, Counted::SoFar(2..) | Counted::SoFarWithStop(2..))
    }

    /// Checks that all tokens have come which the engine counts with a chunk. One may be lacking, if it is the stop token:
    /// that shows with what follows.
    fn check_chunk(&mut self, index: u32, counted: Counted) -> Result<(), ReadError> {
        let most = u32::from(matches!(counted, Counted::SoFarWithStop(_)) && !self.lacks_one);
        self.lacks_one = counted.beyond(self.brought) > 0;
        self.check(index, counted, self.brought, most)
    }

    /// The same at the end.
    fn check_end(&self, end: &raw::Complete) -> Result<(), ReadError> {
        let keeps_its_stop = matches!(end.completion_tokens, Counted::SoFarWithStop(_))
            && matches!(end.matched_stop, Some(MatchedStop::Token(_)));
        let sent = if self.streamed { self.brought } else { end.token_ids.len() };
        self.check(end.index, end.completion_tokens, sent, u32::from(keeps_its_stop))
    }

    fn check(&self, index: u32, counted: Counted, sent: usize, most: u32) -> Result<(), ReadError> {
        let lacking = counted.beyond(sent);
        let sent = u32::try_from(sent).unwrap_or(u32::MAX);
        if lacking > most {
            Err(ReadError::Lost { index, counted: sent.saturating_add(lacking), sent })
        } else {
            Ok(())
        }
    }

    /// Takes in a count; it never falls. The one at a streamed sample's end repeats the last chunk's, if it counts new
    /// tokens at all.
    fn count(&mut self, counted: Counted, at_end: bool) {
        self.tokens = match counted {
            Counted::SoFar(now) | Counted::SoFarWithStop(now) => now.max(self.tokens),
            Counted::New(_) if at_end && self.streamed => self.tokens,
            Counted::New(new) => self.tokens.saturating_add(new),
        };
    }
}
