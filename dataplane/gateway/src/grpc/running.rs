//! A dispatch that runs: its output leg, and beside it the prefill leg until that has ended.
//!
//! Both legs are read at the same time. Nothing of the prefill's output is passed on, but what only the prefill knows is put into the output:
//! how much of the prompt its cache had (a decode engine reports the transferred prompt as cached), and the log probabilities of the prompt,
//! which a decode engine has not computed. An end that comes before the prefill has said so waits for it, but not long.

use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use futures::stream::Stream;
use smg_engines::grpc::{Complete, Message, PromptLogprobs};
use tokio::time::{Sleep, sleep};

use super::leg::{Leg, Part};
use super::status::LegFailure;

/// How long the end of an output waits for the end of its prefill.
const PATIENCE: Duration = Duration::from_secs(5);

/// What a finished prefill knows.
#[derive(Debug, Clone, Default)]
pub struct PrefillReport {
    /// Tokens of the prompt that its cache had.
    pub cached_tokens: Option<u32>,
    /// Log probabilities of the prompt.
    pub prompt_logprobs: Option<PromptLogprobs>,
}

impl PrefillReport {
    /// Reads a message of a prefill.
    pub fn note(&mut self, message: Message) {
        let (cached, logprobs) = match message {
            Message::Chunk(chunk) => (None, chunk.prompt_logprobs),
            Message::Complete(complete) => (Some(complete.usage.cached_tokens), complete.prompt_logprobs),
        };
        self.cached_tokens = cached.or(self.cached_tokens);
        self.prompt_logprobs = logprobs.or_else(|| self.prompt_logprobs.take());
    }
}

/// A dispatch whose legs have answered.
pub struct Running {
    /// The prefill, until its stream has ended.
    prefill: Option<Leg<Message>>,
    report: PrefillReport,
    /// Samples that have been given the prompt's log probabilities.
    given: Vec<u32>,
    output: Leg<Message>,
    part: Part,
    /// The first message of the output.
    first: Option<Message>,
    /// An end that waits for the prefill's.
    end: Option<(Box<Complete>, Pin<Box<Sleep>>)>,
    /// The number of its first sample in the whole answer.
    base: u32,
    /// When the output leg was sent.
    sent: Instant,
}

/// A message of one sample, or which leg failed.
pub type Output = Result<(u32, Message), (Part, LegFailure)>;

impl Running {
    /// A dispatch whose first sample is `base` in the whole answer.
    pub fn new((output, sent): (Leg<Message>, Instant), part: Part, first: Message, base: u32) -> Self {
        Self {
            prefill: None,
            report: PrefillReport::default(),
            given: Vec::new(),
            output,
            part,
            first: Some(first),
            end: None,
            base,
            sent,
        }
    }

    /// With a prefill that may not have ended.
    pub fn with_prefill(mut self, prefill: Option<Leg<Message>>, report: PrefillReport) -> Self {
        (self.prefill, self.report) = (prefill, report);
        self
    }

    /// When its output leg was sent.
    pub fn sent(&self) -> Instant {
        self.sent
    }

    fn poll_prefill(&mut self, cx: &mut Context<'_>) -> Result<(), LegFailure> {
        while let Some(prefill) = &mut self.prefill {
            match prefill.poll_next(cx) {
                Poll::Ready(Some(Ok(message))) => self.report.note(message),
                Poll::Ready(Some(Err(failure))) => {
                    self.prefill = None;
                    return Err(failure);
                }
                Poll::Ready(None) => self.prefill = None,
                Poll::Pending => break,
            }
        }
        Ok(())
    }

    /// The log probabilities of the prompt for a sample: the prefill's, once; if it told none, those of the output leg.
    fn prompt_logprobs(&mut self, sample: u32, own: Option<PromptLogprobs>) -> Option<PromptLogprobs> {
        match &self.report.prompt_logprobs {
            None => own,
            Some(_) if self.given.contains(&sample) => None,
            Some(logprobs) => {
                self.given.push(sample);
                Some(logprobs.clone())
            }
        }
    }

    /// The end of a sample, with what the prefill knows of it.
    fn completed(&mut self, mut complete: Complete) -> Output {
        if let Some(cached) = self.report.cached_tokens {
            complete.usage.cached_tokens = cached;
        }
        complete.prompt_logprobs = self.prompt_logprobs(complete.index, complete.prompt_logprobs);
        Ok((self.base.saturating_add(complete.index), Message::Complete(complete)))
    }
}

impl Stream for Running {
    type Item = Output;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Output>> {
        let this = &mut *self;
        if let Err(failure) = this.poll_prefill(cx) {
            return Poll::Ready(Some(Err((Part::Prefill, failure))));
        }
        if let Some((end, mut patience)) = this.end.take() {
            if this.prefill.is_some() && patience.as_mut().poll(cx).is_pending() {
                this.end = Some((end, patience));
                return Poll::Pending;
            }
            return Poll::Ready(Some(this.completed(*end)));
        }
        let next = match this.first.take() {
            Some(first) => Some(Ok(first)),
            None => match this.output.poll_next(cx) {
                Poll::Ready(next) => next,
                Poll::Pending => return Poll::Pending,
            },
        };
        match next {
            None => Poll::Ready(None),
            Some(Err(failure)) => Poll::Ready(Some(Err((this.part, failure)))),
            Some(Ok(Message::Chunk(mut chunk))) => {
                if let Some(cached) = this.report.cached_tokens {
                    chunk.usage.cached_tokens = cached;
                }
                chunk.prompt_logprobs = this.prompt_logprobs(chunk.index, chunk.prompt_logprobs);
                Poll::Ready(Some(Ok((this.base.saturating_add(chunk.index), Message::Chunk(chunk)))))
            }
            Some(Ok(Message::Complete(complete))) if this.prefill.is_some() => {
                this.end = Some((Box::new(complete), Box::pin(sleep(PATIENCE))));
                cx.waker().wake_by_ref();
                Poll::Pending
            }
            Some(Ok(Message::Complete(complete))) => Poll::Ready(Some(this.completed(complete))),
        }
    }
}
