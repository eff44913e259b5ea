//! SGLang's native generation (`/generate`): one prompt, as text or as token ids.
//!
//! A batch is a way of the native API to send several requests as one; these engines take them one by one, and so does the client
//! (400 `resolve_input_failed`).

mod meta;
mod stream;
mod whole;

use serde_json::Value;

use crate::answer::{Answer, Origin};
use crate::constraint;
use crate::fields::{Fields, token_ids};
use crate::generation::{Generation, Logprobs, Prompt, Reading, Sampling, ToolChoice};
use crate::limits;
use crate::refusal::Refusal;
use crate::sampling::{self, MOST_TOKENS};

/// A request for native generation.
#[derive(Debug, Clone, PartialEq)]
pub struct Request {
    /// What is to be generated.
    pub generation: Generation,
    form: Form,
}

/// What of a request shapes its answer.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Form {
    samples: u32,
    /// Rivals listed beside each token, when log probabilities are wanted.
    top_logprobs: Option<u32>,
    /// Whether the texts of tokens are told beside their ids.
    texts: bool,
}

/// What engines cannot do here and what would change the answer if it were ignored.
const UNSUPPORTED: [&str; 6] = [
    "lora_path",
    "return_hidden_states",
    "custom_logit_processor",
    "session_params",
    "token_ids_logprob",
    "background",
];

/// Reads a body.
pub fn parse(body: &[u8]) -> Result<Request, Refusal> {
    let fields = &mut Fields::parse(body)?;
    for (name, kind) in [("image_data", "image"), ("video_data", "video"), ("audio_data", "audio")] {
        if fields.refuse(&[name]).is_err() {
            return Err(Refusal::media(kind));
        }
    }
    fields.refuse(&UNSUPPORTED)?;
    let prompt = prompt(fields)?;
    for name in ["rid", "sampling_params", "return_logprob", "logprob_start_len", "top_logprobs_num"] {
        if fields.peek(name).is_some_and(Value::is_array) {
            return Err(one_by_one(name));
        }
    }
    let request_id = sampling::request_id(fields)?;
    let mut samples = 1;
    let mut drawing = Sampling::default();
    let mut constraint = None;
    let mut skip_special_tokens = true;
    if let Some(mut params) = fields.object("sampling_params")? {
        params.refuse(&["custom_params"])?;
        constraint = constraint::of_sampling_params(&mut params)?;
        drawing = sampling::read(&mut params)?;
        drawing.max_tokens = params.count("max_new_tokens", 0..=MOST_TOKENS)?;
        samples = sampling::samples(&mut params)?;
        skip_special_tokens = params.boolean("skip_special_tokens")?.unwrap_or(true);
    }
    let logprobs = logprobs(fields)?;
    let form = Form {
        samples,
        top_logprobs: logprobs.map(|logprobs| logprobs.top),
        texts: fields.boolean("return_text_in_logprobs")?.unwrap_or(false),
    };
    let generation = Generation {
        model: fields.string("model")?,
        request_id,
        prompt,
        sampling: drawing,
        samples,
        stream: fields.boolean("stream")?.unwrap_or(false),
        stream_usage: false,
        logprobs,
        constraint,
        reading: Reading { tools: ToolChoice::None, separate_reasoning: false, skip_special_tokens },
    };
    Ok(Request { generation, form })
}

/// A faulty prompt has a code of its own.
fn unresolved(message: impl Into<String>) -> Refusal {
    Refusal::bad("resolve_input_failed", message)
}

fn one_by_one(name: &str) -> Refusal {
    unresolved(format!(
        "field `{name}`: batches are not supported by the engines of this model; send one prompt a request"
    ))
}

fn prompt(fields: &mut Fields) -> Result<Prompt, Refusal> {
    if fields.peek("input_embeds").is_some() {
        return Err(unresolved("field `input_embeds` is not supported by the engines of this model"));
    }
    match (fields.value("text"), fields.value("input_ids")) {
        (Some(_), Some(_)) => Err(unresolved("only one of `text` and `input_ids` can be given")),
        (None, None) => Err(unresolved("one of `text` and `input_ids` must be given")),
        (Some(Value::String(text)), None) => Ok(Prompt::Texts(vec![text])),
        (Some(Value::Array(_)), None) => Err(one_by_one("text")),
        (Some(_), None) => Err(unresolved("field `text` must be a string")),
        (None, Some(Value::Array(ids))) if ids.iter().any(Value::is_array) => Err(one_by_one("input_ids")),
        (None, Some(Value::Array(ids))) => match token_ids(&ids).filter(|ids| !ids.is_empty()) {
            Some(ids) => Ok(Prompt::Tokens(vec![ids])),
            None => Err(unresolved("field `input_ids` must be a non-empty array of token ids")),
        },
        (None, Some(_)) => Err(unresolved("field `input_ids` must be an array of token ids")),
    }
}

fn logprobs(fields: &mut Fields) -> Result<Option<Logprobs>, Refusal> {
    let wanted = fields.boolean("return_logprob")?.unwrap_or(false);
    let top = fields.integer("top_logprobs_num", 0..=limits::TOP_LOGPROBS)?.unwrap_or(0) as u32;
    // -1 = of the output only.
    let from = fields.integer("logprob_start_len", -1..=limits::TOKEN_ID)?.unwrap_or(-1);
    Ok(wanted.then(|| Logprobs { top, prompt_from: u32::try_from(from).ok() }))
}

impl Request {
    /// Begins the answer.
    pub fn answer(&self, origin: Origin) -> Box<dyn Answer> {
        match self.generation.stream {
            true => Box::new(stream::Stream::new(origin, self.form)),
            false => Box::new(whole::Whole::new(origin, self.form)),
        }
    }
}

#[cfg(test)]
mod tests;
