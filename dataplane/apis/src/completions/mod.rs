//! OpenAI completions: one prompt or many, as text or as token ids, with the extensions that SGLang and vLLM document.

mod columns;
mod stream;
mod whole;

use serde_json::Value;

use crate::answer::{Answer, Origin};
use crate::constraint;
use crate::fields::{Fields, token_ids};
use crate::generation::{Generation, Logprobs, Prompt, Reading, ToolChoice};
use crate::limits;
use crate::output::Piece;
use crate::refusal::Refusal;
use crate::sampling::{self, MOST_TOKENS};

/// A request for completions. Sample `i` of prompt `p` is choice `p * n + i`.
#[derive(Debug, Clone, PartialEq)]
pub struct Request {
    /// What is to be generated.
    pub generation: Generation,
    /// Whether every choice begins with its prompt.
    pub echo: bool,
}

/// What of a request shapes its answer.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Form {
    prompts: usize,
    samples: u32,
    top_logprobs: Option<u32>,
    stream_usage: bool,
}

/// What engines cannot do here and what would change the answer if it were ignored.
const UNSUPPORTED: [&str; 9] = [
    "suffix",
    "prompt_embeds",
    "use_beam_search",
    "lora_path",
    "return_hidden_states",
    "custom_logit_processor",
    "session_params",
    "prompt_logprobs",
    "truncate_prompt_tokens",
];

/// Reads a body.
pub fn parse(body: &[u8]) -> Result<Request, Refusal> {
    let fields = &mut Fields::parse(body)?;
    fields.refuse(&UNSUPPORTED)?;
    let prompt = prompt(fields.value("prompt").ok_or_else(|| Refusal::missing("prompt"))?)?;
    let constraint = constraint::read(fields)?;
    let mut sampling = sampling::read(fields)?;
    sampling.max_tokens = fields.count("max_tokens", 0..=MOST_TOKENS)?;
    let samples = sampling::samples(fields)?;
    if fields.integer("best_of", 0..=limits::SAMPLES)?.is_some_and(|best_of| best_of != i64::from(samples)) {
        return Err(Refusal::value("best_of", "can only be the same as `n`"));
    }
    if count(&prompt).saturating_mul(samples as usize) > limits::SAMPLES_IN_ALL {
        let message = format!("asks for more than {} choices together with `n`", limits::SAMPLES_IN_ALL);
        return Err(Refusal::value("prompt", &message));
    }
    let echo = fields.boolean("echo")?.unwrap_or(false);
    let logprobs = fields
        .integer("logprobs", 0..=limits::TOP_LOGPROBS)?
        .map(|top| Logprobs { top: top as u32, prompt_from: echo.then_some(0) });
    let (stream, stream_usage) = sampling::stream(fields)?;
    let skip_special_tokens = fields.boolean("skip_special_tokens")?.unwrap_or(true);
    let generation = Generation {
        model: fields.string("model")?,
        request_id: sampling::request_id(fields)?,
        prompt,
        sampling,
        samples,
        stream,
        stream_usage,
        logprobs,
        constraint,
        reading: Reading { tools: ToolChoice::None, separate_reasoning: false, skip_special_tokens },
    };
    Ok(Request { generation, echo })
}

fn prompt(value: Value) -> Result<Prompt, Refusal> {
    let wrong = || {
        let expected = "a non-empty string or array of token ids, or a non-empty array of either";
        Refusal::wrong_type("prompt", expected)
    };
    match value {
        Value::String(text) => Ok(Prompt::Texts(vec![text])),
        Value::Array(elements) => match elements.first() {
            Some(Value::String(_)) => {
                elements.into_iter().map(crate::fields::string).collect::<Option<_>>().map(Prompt::Texts)
            }
            Some(Value::Number(_)) => token_ids(&elements).map(|ids| Prompt::Tokens(vec![ids])),
            Some(Value::Array(_)) => {
                let lists = elements.iter().map(|list| list.as_array().filter(|list| !list.is_empty()));
                lists.map(|list| token_ids(list?)).collect::<Option<_>>().map(Prompt::Tokens)
            }
            _ => None,
        }
        .ok_or_else(wrong),
        _ => Err(wrong()),
    }
}

fn count(prompt: &Prompt) -> usize {
    match prompt {
        Prompt::Chat(_) => 1,
        Prompt::Texts(texts) => texts.len(),
        Prompt::Tokens(lists) => lists.len(),
    }
}

impl Request {
    /// Begins the answer. When the prompt is echoed, `prompts` are the texts of all prompts, token ids turned into text; else they are
    /// not looked at.
    pub fn answer(&self, origin: Origin, prompts: Vec<String>) -> Box<dyn Answer> {
        let form = Form {
            prompts: count(&self.generation.prompt),
            samples: self.generation.samples,
            top_logprobs: self.generation.logprobs.map(|logprobs| logprobs.top),
            stream_usage: self.generation.stream_usage,
        };
        let prompts = if self.echo { prompts } else { Vec::new() };
        match self.generation.stream {
            true => Box::new(stream::Stream::new(origin, form, prompts)),
            false => Box::new(whole::Whole::new(origin, form, prompts)),
        }
    }
}

impl Form {
    fn choices(&self) -> usize {
        self.prompts * self.samples as usize
    }

    /// The prompt of a choice, when it is echoed.
    fn prompt_of<'a>(&self, prompts: &'a [String], choice: usize) -> Option<&'a str> {
        prompts.get(choice / self.samples.max(1) as usize).map(String::as_str)
    }
}

/// The text that a piece adds. There are no calls here, and reasoning is not told apart.
fn text_of(piece: &Piece) -> &str {
    match piece {
        Piece::Content(text) | Piece::Reasoning(text) => text,
        Piece::ToolCall { .. } | Piece::ToolArguments { .. } => "",
    }
}

#[cfg(test)]
mod tests;
