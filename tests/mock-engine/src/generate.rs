//! A generation request, read once, and the order in which its answer comes.
//!
//! What differs between the engines is the writing of an event and of a whole answer; what a request asks for, how many
//! samples it has and which token follows which is the same and lies here.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use serde_json::json;

use crate::http::{Pieces, Request};
use crate::json::{Invalid, Object, quoted};
use crate::load::Running;
use crate::text::{self, Prompt};

/// The endpoint a request came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Api {
    /// `/v1/chat/completions`
    Chat,
    /// `/v1/completions`
    Completions,
    /// `/generate`, SGLang's own
    Generate,
    /// `/v1/messages`, Anthropic's
    Messages,
    /// `/v1/responses`
    Responses,
}

impl Api {
    pub(crate) fn of(path: &str) -> Option<Self> {
        match path {
            "/v1/chat/completions" => Some(Api::Chat),
            "/v1/completions" => Some(Api::Completions),
            "/generate" => Some(Api::Generate),
            "/v1/messages" => Some(Api::Messages),
            "/v1/responses" => Some(Api::Responses),
            _ => None,
        }
    }

    fn id_prefix(self) -> &'static str {
        match self {
            Api::Chat => "chatcmpl-",
            Api::Completions => "cmpl-",
            Api::Generate => "",
            Api::Messages => "msg_",
            Api::Responses => "resp_",
        }
    }
}

/// Tokens of an answer whose request names no limit.
const DEFAULT_LENGTH: u64 = 16;

/// What is to be generated.
pub(crate) struct Job {
    pub(crate) api: Api,
    /// The answer's id: from `X-Request-Id` when the client sent one, as vLLM does.
    pub(crate) id: String,
    /// The id as a JSON string.
    pub(crate) id_json: String,
    /// Model name as a JSON string.
    pub(crate) model: String,
    /// One per choice.
    pub(crate) samples: Vec<Prompt>,
    /// Prompts, each of which has the same number of samples.
    pub(crate) prompts: usize,
    /// The prompts came as a list.
    pub(crate) batch: bool,
    /// Tokens per sample.
    pub(crate) length: usize,
    /// The request's limit ended the answer (finish reason `length`), not the model (`stop`).
    pub(crate) capped: bool,
    pub(crate) stream: bool,
    pub(crate) include_usage: bool,
    pub(crate) logprobs: bool,
    /// The prompt's own log probabilities are known here.
    pub(crate) input_logprobs: bool,
    /// They are wanted in vLLM's `prompt_logprobs`.
    pub(crate) prompt_logprobs: bool,
}

impl Job {
    /// Reads a request. `longest` is the model's context in tokens.
    pub(crate) fn read(
        api: Api,
        request: &Request,
        object: &Object<'_>,
        model: &str,
        longest: usize,
    ) -> Result<Self, Invalid> {
        let model = object.string("model")?.unwrap_or(std::borrow::Cow::Borrowed(model));
        let missing = |name: &str| format!("{name}: field required");
        let sampling = object.object("sampling_params")?;
        let (prompts, batch, n, length, logprobs) = match api {
            Api::Chat => {
                let messages = object.get("messages").ok_or_else(|| missing("messages"))?;
                let length = object.count("max_completion_tokens")?.or(object.count("max_tokens")?);
                let logprobs = object.flag("logprobs")?;
                let prompts = vec![text::chat(messages)?];
                (prompts, false, object.count("n")?, length, logprobs)
            }
            Api::Completions => {
                let prompt = object.get("prompt").ok_or_else(|| missing("prompt"))?;
                let (prompts, batch) = text::prompts("prompt", prompt)?;
                let logprobs = object.get("logprobs").is_some();
                let length = object.count("max_tokens")?;
                (prompts, batch, object.count("n")?, length, logprobs)
            }
            Api::Messages => {
                let messages = object.get("messages").ok_or_else(|| missing("messages"))?;
                let length = object.count("max_tokens")?.ok_or_else(|| missing("max_tokens"))?;
                (vec![text::chat(messages)?], false, None, Some(length), false)
            }
            Api::Responses => {
                let input = object.get("input").ok_or_else(|| missing("input"))?;
                let prompts = match text::chat(input) {
                    Ok(prompt) => vec![prompt],
                    Err(_) => text::prompts("input", input)?.0.into_iter().take(1).collect(),
                };
                (prompts, false, None, object.count("max_output_tokens")?, false)
            }
            Api::Generate => {
                let (name, prompt) = ["text", "input_ids"]
                    .into_iter()
                    .find_map(|name| object.get(name).map(|value| (name, value)))
                    .ok_or_else(|| missing("text"))?;
                let (prompts, batch) = text::prompts(name, prompt)?;
                let length = sampling.count("max_new_tokens")?;
                let logprobs = object.flag("return_logprob")?;
                (prompts, batch, sampling.count("n")?, length, logprobs)
            }
        };
        let n = match n.filter(|_| !matches!(api, Api::Messages | Api::Responses)) {
            Some(0) => return Err("n must be at least 1, got 0.".to_owned()),
            Some(n) if n > 1024 => return Err(format!("n must be at most 1024, got {n}.")),
            n => n.unwrap_or(1) as usize,
        };
        if length == Some(0) {
            return Err("max_tokens must be at least 1, got 0.".to_owned());
        }
        let prompt_tokens = prompts.iter().map(|prompt| prompt.tokens).max();
        let wanted = length.unwrap_or(DEFAULT_LENGTH) as usize + prompt_tokens.unwrap_or(0);
        if wanted > longest {
            return Err(format!("prompt and output need {wanted} tokens, the model has a context of {longest}"));
        }
        let samples = prompts.iter().flat_map(|prompt| (0..n).map(|number| prompt.sample(number))).collect();
        let id = match request.header("x-request-id") {
            Some(id) if !id.is_empty() => format!("{}{id}", api.id_prefix()),
            _ => format!("{}{:016x}", api.id_prefix(), rand::random::<u64>()),
        };
        Ok(Job {
            api,
            id_json: quoted(&id),
            id,
            model: quoted(&model),
            samples,
            prompts: prompts.len(),
            batch,
            length: length.unwrap_or(DEFAULT_LENGTH) as usize,
            capped: length.is_some(),
            stream: object.flag("stream")?,
            include_usage: object.object("stream_options")?.flag("include_usage")?,
            logprobs,
            input_logprobs: true,
            prompt_logprobs: object.get("prompt_logprobs").is_some(),
        })
    }

    /// Cuts the answer to the one token that a prefill engine computes.
    pub(crate) fn only_first_token(&mut self) {
        self.length = 1;
        self.capped = true;
    }

    /// Samples per prompt.
    pub(crate) fn n(&self) -> usize {
        self.samples.len() / self.prompts.max(1)
    }

    /// Tokens of all prompts, each counted once.
    pub(crate) fn prompt_tokens(&self) -> usize {
        self.samples.iter().step_by(self.n().max(1)).map(|prompt| prompt.tokens).sum()
    }

    /// Tokens of all samples.
    pub(crate) fn completion_tokens(&self) -> usize {
        self.length * self.samples.len()
    }

    /// Appends the OpenAI `logprobs` of some tokens of a sample, `null` when none were asked for.
    pub(crate) fn write_logprobs(&self, prompt: Prompt, tokens: Range<usize>, out: &mut Vec<u8>) {
        if !self.logprobs {
            out.extend_from_slice(b"null");
            return;
        }
        let token = |index| {
            let mut token = Vec::new();
            prompt.write_token(index, &mut token);
            String::from_utf8_lossy(&token).into_owned()
        };
        let value = match self.api {
            Api::Chat => {
                let content: Vec<_> = tokens
                    .map(|index| {
                        let token = token(index);
                        json!({
                            "token": token,
                            "logprob": logprob(prompt.token_id(index)),
                            "bytes": token.as_bytes(),
                            "top_logprobs": [],
                        })
                    })
                    .collect();
                json!({ "content": content })
            }
            _ => {
                let texts: Vec<String> = tokens.clone().map(token).collect();
                let logprobs: Vec<f64> = tokens.map(|index| logprob(prompt.token_id(index))).collect();
                json!({ "tokens": texts, "token_logprobs": logprobs })
            }
        };
        out.extend_from_slice(value.to_string().as_bytes());
    }

    /// Appends vLLM's `prompt_logprobs` of a sample, `null` when none were asked for. An engine that took the prompt's KV over
    /// lists memory that was never written.
    pub(crate) fn write_prompt_logprobs(&self, prompt: Prompt, out: &mut Vec<u8>) {
        if !self.prompt_logprobs {
            out.extend_from_slice(b"null");
            return;
        }
        let entry = |index: usize| {
            let (token_id, logprob) =
                if self.input_logprobs { (prompt.token_id(index), logprob(prompt.token_id(index))) } else { (0, 7e33) };
            json!({ (token_id.to_string()): { "logprob": logprob, "rank": 1, "decoded_token": null } })
        };
        let rest = (1..prompt.tokens).map(entry);
        let list: Vec<serde_json::Value> = std::iter::once(serde_json::Value::Null).chain(rest).collect();
        out.extend_from_slice(json!(list).to_string().as_bytes());
    }

    pub(crate) fn finish_reason(&self) -> &'static str {
        if self.capped { "length" } else { "stop" }
    }
}

/// The log probability that a token is said to have.
pub(crate) fn logprob(token_id: usize) -> f64 {
    -(token_id as f64 + 1.0) / 64.0
}

/// One event of a streamed answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// Before the first token of a sample.
    Open { sample: usize },
    /// A token.
    Token { sample: usize, index: usize },
    /// After the last token of a sample.
    Close { sample: usize },
    /// After all samples.
    Usage,
    /// The end marker.
    Done,
}

/// Writes the event of a step; writing nothing skips it.
pub(crate) type WriteStep = fn(&Job, Step, &mut Vec<u8>);

/// The events of an answer, one at a time.
pub(crate) struct Events {
    job: Arc<Job>,
    next: Option<Step>,
    write: WriteStep,
    token_delay: Duration,
    /// The place in the engine's running batch, given back when the answer is out or abandoned.
    _running: Running,
}

impl Events {
    pub(crate) fn new(job: Arc<Job>, write: WriteStep, token_delay: Duration, running: Running) -> Self {
        Events { _running: running, job, next: Some(Step::Open { sample: 0 }), write, token_delay }
    }

    fn after(&self, step: Step) -> Option<Step> {
        let samples = self.job.samples.len();
        let step = match step {
            Step::Open { sample } if sample + 1 < samples => Step::Open { sample: sample + 1 },
            Step::Open { .. } => Step::Token { sample: 0, index: 0 },
            Step::Token { sample, index } if sample + 1 < samples => Step::Token { sample: sample + 1, index },
            Step::Token { index, .. } if index + 1 < self.job.length => Step::Token { sample: 0, index: index + 1 },
            Step::Token { .. } => Step::Close { sample: 0 },
            Step::Close { sample } if sample + 1 < samples => Step::Close { sample: sample + 1 },
            Step::Close { .. } => Step::Usage,
            Step::Usage => Step::Done,
            Step::Done => return None,
        };
        Some(step)
    }
}

impl Pieces for Events {
    fn next(&mut self, out: &mut Vec<u8>) -> Option<Duration> {
        let start = out.len();
        loop {
            let step = self.next?;
            self.next = self.after(step);
            (self.write)(&self.job, step, out);
            if out.len() > start {
                let later = matches!(step, Step::Token { sample: 0, index } if index > 0);
                return Some(if later { self.token_delay } else { Duration::ZERO });
            }
        }
    }
}
