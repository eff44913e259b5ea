//! A request inside a gRPC engine: where its KV comes from and goes to, and which tokens its answer has.
//!
//! Token `i` of an answer is a function of the prompt (and of the seed, where the engine has one) alone, so that a pair
//! answers as one engine does. The words of the answer include some whose characters are several tokens.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use tokio::sync::mpsc::UnboundedSender;
use tonic::Status;

use crate::engine::{Core, Role};
use crate::fabric::{NoKv, Take, starve};
use crate::ledger::{Hold, Key, Kv};
use crate::load::Running;
use crate::text::{Prompt, mix};
use crate::vocabulary;

/// Words of an answer whose request names no limit.
const DEFAULT_WORDS: usize = 16;

/// What is to be generated, in words of no engine.
pub(super) struct Job {
    pub(super) id: String,
    pub(super) prompt: Prompt,
    pub(super) prompt_ids: Vec<u32>,
    pub(super) samples: u32,
    pub(super) seed: Option<u64>,
    pub(super) max_tokens: Option<usize>,
    pub(super) min_tokens: usize,
    pub(super) stop: Vec<String>,
    pub(super) stop_tokens: Vec<u32>,
    pub(super) ignore_eos: bool,
    /// The token that ended an answer is not part of it.
    pub(super) trims_stop_token: bool,
    pub(super) stream: bool,
    /// Candidates listed beside each token, when log probabilities are wanted at all.
    pub(super) logprobs: Option<usize>,
    /// First prompt token whose log probability is wanted.
    pub(super) prompt_logprobs_from: Option<usize>,
    pub(super) meeting: Meeting,
}

/// Where the KV of a request comes from or goes to.
pub(super) enum Meeting {
    /// Neither: the prompt is computed here and its KV stays here.
    None,
    /// A decode engine waits for it; this one answers when it has been fetched (SGLang, TokenSpeed).
    Serve { key: Key, rank: Option<u64> },
    /// It is held for a decode to come; `named` = the answer says where (vLLM).
    Hold { key: Key, named: bool },
    /// A prefill engine gives it.
    Fetch { source: Source, take: Take },
}

/// Who gives the KV.
pub(super) enum Source {
    /// The engine that listens there.
    Engine { host: String, port: u16 },
    /// An engine that this bootstrap server knows.
    Bootstrap { address: String, engine_id: String },
}

/// What an answer consists of.
#[derive(Clone, Debug)]
pub(super) enum Event {
    Chunk {
        index: u32,
        tokens: Vec<u32>,
        /// All so far, with a stop token that is not part of the answer.
        count: u32,
        cached: u32,
        logprobs: Option<Logprobs>,
        prompt_logprobs: Option<PromptLogprobs>,
    },
    Complete(Box<End>),
}

/// How a sample ended.
#[derive(Clone, Debug)]
pub(super) struct End {
    pub(super) index: u32,
    /// All tokens, or those of the last chunk again when the answer is streamed.
    pub(super) tokens: Vec<u32>,
    pub(super) count: u32,
    pub(super) cached: u32,
    pub(super) reason: &'static str,
    pub(super) matched: Option<Matched>,
    pub(super) logprobs: Option<Logprobs>,
    pub(super) prompt_logprobs: Option<PromptLogprobs>,
    pub(super) kv_transfer_params: Option<String>,
}

impl Event {
    /// Numbers the event as a sample that was not asked for, if `samples` were.
    pub(super) fn renumber(&mut self, samples: u32) {
        match self {
            Event::Chunk { index, .. } => *index += samples,
            Event::Complete(end) => end.index += samples,
        }
    }
}

impl End {
    /// The end of a sample that was aborted.
    pub(super) fn aborted(index: u32) -> Self {
        End {
            index,
            tokens: Vec::new(),
            count: 0,
            cached: 0,
            reason: "abort",
            matched: None,
            logprobs: None,
            prompt_logprobs: None,
            kv_transfer_params: None,
        }
    }
}

/// What ended a sample.
#[derive(Clone, Debug)]
pub(super) enum Matched {
    End(u32),
    Token(u32),
    Text(String),
}

/// Log probabilities of tokens and of candidates.
#[derive(Clone, Debug, Default)]
pub(super) struct Logprobs {
    pub(super) tokens: Vec<u32>,
    pub(super) values: Vec<f32>,
    pub(super) top: Vec<(Vec<u32>, Vec<f32>)>,
}

/// Log probabilities of a prompt's tokens.
#[derive(Clone, Debug, Default)]
pub(super) struct PromptLogprobs {
    pub(super) tokens: Vec<u32>,
    pub(super) values: Vec<Option<f32>>,
    pub(super) top: Vec<(Vec<u32>, Vec<f32>)>,
}

/// Does the work and says what comes of it. Nothing here waits for whoever listens: an engine does not slow down because
/// its caller reads slowly, and the number of events is bounded by the request's tokens.
pub(super) async fn work(
    core: &Arc<Core>,
    job: &Job,
    events: &UnboundedSender<Result<Event, Status>>,
) -> Result<(), Status> {
    let mut ready = meet(core, job).await?;
    for index in 0..job.samples {
        write_sample(core, job, index, &mut ready, events).await;
    }
    Ok(())
}

struct Ready {
    _running: Running,
    cached: u32,
    /// vLLM's handoff, when the answer ends by its limit.
    transfer: Option<String>,
    /// The KV that is held once that has happened.
    hold: Option<Hold>,
}

fn failed(reason: impl std::fmt::Display) -> Status {
    Status::internal(format!("KV transfer failed: {reason}"))
}

/// Gets the prompt's KV in one way or another.
async fn meet(core: &Arc<Core>, job: &Job) -> Result<Ready, Status> {
    let tokens = job.prompt_ids.len();
    let hits = u32::try_from(core.settings.cached_tokens.min(tokens)).unwrap_or(u32::MAX);
    let ready = |running, cached| Ready { _running: running, cached, transfer: None, hold: None };
    match &job.meeting {
        Meeting::None => {
            let running = core.load.run().await;
            core.compute(tokens).await;
            Ok(ready(running, hits))
        }
        Meeting::Serve { key, rank } => {
            let hold = core.ledger().begin(key).map_err(failed)?;
            let running = core.load.run().await;
            core.compute(tokens).await;
            hold.ready(Kv { prompt: job.prompt, rank: *rank });
            // The batch has moved on while the KV waits for its decode engine.
            drop(running);
            hold.taken().await.map_err(failed)?;
            starve_the_rest(core, job).await?;
            Ok(ready(core.load.run().await, hits))
        }
        Meeting::Hold { key, named } => {
            let hold = core.ledger().begin(key).map_err(Status::invalid_argument)?;
            let running = core.load.run().await;
            core.compute(tokens).await;
            let transfer = match key {
                Key::Request(id) if *named => Some(crate::vllm::transfer_params(core, id, tokens)),
                _ => None,
            };
            Ok(Ready { transfer, hold: Some(hold), ..ready(running, hits) })
        }
        Meeting::Fetch { source, take } => {
            let patience = core.settings.patience;
            let kv = match tokio::time::timeout(patience, fetch(core, source, take)).await {
                Ok(Ok(kv)) => kv,
                // Mooncake does not learn that it asked the wrong engine: it waits.
                Ok(Err(NoKv::WrongEngine)) if matches!(source, Source::Bootstrap { .. }) => {
                    starve(patience).await;
                    return Err(failed("no KV in time"));
                }
                Ok(Err(NoKv::WrongEngine)) => return Err(failed("another engine")),
                Ok(Err(NoKv::Unreachable(reason) | NoKv::Refused(reason))) => return Err(failed(reason)),
                Err(_) => return Err(failed("no KV in time")),
            };
            if kv.prompt != job.prompt {
                return Err(failed("the KV belongs to another prompt"));
            }
            starve_the_rest(core, job).await?;
            core.load.external_tokens.fetch_add(tokens as u64, Ordering::Relaxed);
            // To a decode engine the whole transferred prompt looks cached.
            Ok(ready(core.load.run().await, u32::try_from(tokens).unwrap_or(u32::MAX)))
        }
    }
}

/// One piece of KV serves one sample: the others wait for ever.
async fn starve_the_rest(core: &Core, job: &Job) -> Result<(), Status> {
    if job.samples > 1 {
        starve(core.settings.patience).await;
        return Err(failed("samples without KV of their own"));
    }
    Ok(())
}

async fn fetch(core: &Core, source: &Source, take: &Take) -> Result<Kv, NoKv> {
    match source {
        Source::Engine { host, port } => core.fabric.take(host, *port, take).await,
        Source::Bootstrap { address, engine_id } => {
            let (host, port) = core.fabric.query(address, engine_id).await?;
            core.fabric.take(&host, port, take).await
        }
    }
}

/// Generates one sample.
async fn write_sample(
    core: &Core,
    job: &Job,
    index: u32,
    ready: &mut Ready,
    events: &UnboundedSender<Result<Event, Status>>,
) {
    let cached = ready.cached;
    let mut tokens = Tokens::new(core, job, index);
    let mut all: Vec<u32> = Vec::new();
    let mut prompt_logprobs = prompt_logprobs(job);
    let per_chunk = core.settings.tokens_per_chunk.max(1);
    let mut chunk = Vec::new();
    let (reason, matched) = loop {
        if !core.settings.token_delay.is_zero() && !all.is_empty() {
            tokio::time::sleep(core.settings.token_delay).await;
        }
        let (token, stops) = tokens.next();
        let trimmed = job.trims_stop_token && matches!(stops, Some(Matched::End(_) | Matched::Token(_)));
        if !trimmed {
            all.push(token);
            chunk.push(token);
        }
        core.load.generated_tokens.fetch_add(1, Ordering::Relaxed);
        let end = match stops {
            Some(matched) => Some(("stop", Some(matched))),
            None if job.max_tokens.is_some_and(|most| tokens.count >= most) => Some(("length", None)),
            None => None,
        };
        // A sample's first output goes out even when the stop token was all of it.
        let due = chunk.len() >= per_chunk || end.is_some() && (!chunk.is_empty() || all.is_empty());
        if job.stream && due {
            let new = if end.is_some() { chunk.clone() } else { std::mem::take(&mut chunk) };
            let event = Event::Chunk {
                index,
                count: u32::try_from(tokens.count).unwrap_or(u32::MAX),
                cached,
                logprobs: job.logprobs.map(|top| logprobs(job, &new, top)),
                prompt_logprobs: prompt_logprobs.take(),
                tokens: new,
            };
            let _ = events.send(Ok(event));
        }
        if let Some(end) = end {
            break end;
        }
    };
    // An answer that ends by itself is finished for good: only one that was cut has a decode to come.
    let (hold, transfer) = (ready.hold.take(), ready.transfer.take());
    let mut kv_transfer_params = None;
    if let Some(hold) = hold.filter(|_| reason == "length") {
        hold.ready(Kv { prompt: job.prompt, rank: None });
        hold.keep();
        kv_transfer_params = transfer;
    }
    let last = if job.stream { chunk } else { all.clone() };
    let _ = events.send(Ok(Event::Complete(Box::new(End {
        index,
        count: u32::try_from(tokens.count).unwrap_or(u32::MAX),
        cached,
        reason,
        matched,
        logprobs: job.logprobs.map(|top| logprobs(job, &last, top)),
        prompt_logprobs,
        kv_transfer_params,
        tokens: last,
    }))));
}

/// The tokens of one sample, one by one.
struct Tokens<'a> {
    job: &'a Job,
    digest: u64,
    /// Tokens of words begun.
    pending: VecDeque<u32>,
    words: usize,
    /// A scripted answer ends when it has been said, another after some words.
    scripted: bool,
    count: usize,
    /// The end of the text so far, as much as a stop string may need.
    tail: Vec<u8>,
}

impl<'a> Tokens<'a> {
    fn new(core: &Core, job: &'a Job, index: u32) -> Self {
        let script = core.script.lock().clone();
        let seed = job.seed.map_or(0, |seed| mix(seed.wrapping_add(1)));
        Tokens {
            job,
            digest: job.prompt.sample(index as usize).digest ^ seed,
            scripted: script.is_some(),
            pending: script.unwrap_or_default().into(),
            words: 0,
            count: 0,
            tail: Vec::new(),
        }
    }

    /// The next token, and what it ends the answer by.
    fn next(&mut self) -> (u32, Option<Matched>) {
        let may_stop = self.count + 1 >= self.job.min_tokens;
        let over = self.pending.is_empty()
            && (self.scripted || self.job.max_tokens.is_none() && self.words >= DEFAULT_WORDS)
            && may_stop;
        let token = if over && !self.job.ignore_eos { vocabulary::end_of_answer() } else { self.continued() };
        self.count += 1;
        if over && !self.job.ignore_eos {
            return (token, Some(Matched::End(token)));
        }
        if may_stop && self.job.stop_tokens.contains(&token) {
            return (token, Some(Matched::Token(token)));
        }
        let longest = self.job.stop.iter().map(String::len).max().unwrap_or(0);
        let new = vocabulary::bytes_of(token);
        self.tail.extend(new);
        // What is found ends in the new text.
        let excess = self.tail.len().saturating_sub(longest.saturating_sub(1) + new.len());
        self.tail.drain(..excess);
        // A string counts from the token after the fewest on.
        let may_stop = self.count > self.job.min_tokens;
        let found = self.job.stop.iter().find(|stop| memmem(&self.tail, stop.as_bytes())).filter(|_| may_stop);
        (token, found.map(|stop| Matched::Text(stop.clone())))
    }

    fn continued(&mut self) -> u32 {
        if self.pending.is_empty() {
            let word = Prompt { digest: self.digest, tokens: 0 }.word(self.words);
            let spaced = if self.words == 0 { word.to_owned() } else { format!(" {word}") };
            self.pending.extend(vocabulary::encode(&spaced));
            self.words += 1;
        }
        self.pending.pop_front().unwrap_or_default()
    }
}

fn memmem(text: &[u8], wanted: &[u8]) -> bool {
    !wanted.is_empty() && text.windows(wanted.len()).any(|window| window == wanted)
}

/// The answer's first `count` tokens to this prompt, for comparison.
pub(super) fn expected(prompt_ids: &[u32], count: usize) -> Vec<u32> {
    let prompt = Prompt::of_token_ids(prompt_ids);
    let words = (0..count).map(|word| match word {
        0 => prompt.word(0).to_owned(),
        word => format!(" {}", prompt.word(word)),
    });
    let mut tokens: Vec<u32> = words.flat_map(|word| vocabulary::encode(&word)).collect();
    tokens.truncate(count);
    tokens
}

/// A log probability that depends on prompt and token alone.
fn logprob(prompt: Prompt, token: u32) -> f32 {
    -((mix(prompt.digest ^ u64::from(token)) % 1000) as f32) / 1000.0
}

/// The token itself and the ones after it, each less likely than the one before.
fn candidates(job: &Job, token: u32, top: usize) -> (Vec<u32>, Vec<f32>) {
    let first = logprob(job.prompt, token);
    (0..top as u32).map(|step| ((token + step) % vocabulary::size(), first - step as f32)).unzip()
}

fn logprobs(job: &Job, tokens: &[u32], top: usize) -> Logprobs {
    Logprobs {
        tokens: tokens.to_vec(),
        values: tokens.iter().map(|token| logprob(job.prompt, *token)).collect(),
        top: if top == 0 { Vec::new() } else { tokens.iter().map(|token| candidates(job, *token, top)).collect() },
    }
}

fn prompt_logprobs(job: &Job) -> Option<PromptLogprobs> {
    let (top, from) = (job.logprobs.unwrap_or(0), job.prompt_logprobs_from?);
    let tokens: Vec<u32> = job.prompt_ids.iter().skip(from).copied().collect();
    // An engine that took the KV over has not computed the prompt, and knows nothing of its tokens.
    let computed = !matches!(job.meeting, Meeting::Fetch { .. });
    let value =
        |(position, token): (usize, &u32)| (computed && from + position > 0).then(|| logprob(job.prompt, *token));
    Some(PromptLogprobs {
        values: tokens.iter().enumerate().map(value).collect(),
        top: if top == 0 { Vec::new() } else { tokens.iter().map(|token| candidates(job, *token, top)).collect() },
        tokens,
    })
}

/// The tokens that a leg of this role generates: a prefill engine ends after the first.
pub(super) fn limit(role: Role, max_tokens: Option<u32>) -> Option<usize> {
    if role == Role::Prefill { Some(1) } else { max_tokens.map(|most| most as usize) }
}
