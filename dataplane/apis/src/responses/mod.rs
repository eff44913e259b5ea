//! OpenAI responses, without tools that the provider runs, background work and conversations (those are refused).
//!
//! A request may go on from an earlier response. Where earlier responses are kept is not known here: the request tells the id
//! ([`Request::previous_response_id`]), whoever keeps them gives the conversation ([`Request::continue_from`]), and the answer hands
//! out what is to be kept ([`Answer::stored`]).

mod entries;
mod input;
mod object;
mod stream;
mod whole;

use bytes::Bytes;
use serde_json::{Map, Value};

use crate::answer::{Answer, Origin};
use crate::constraint;
use crate::fields::Fields;
use crate::generation::{ChatPrompt, Generation, Logprobs, Prompt, Reading};
use crate::limits;
use crate::refusal::Refusal;
use crate::sampling::{self, MOST_TOKENS};
use crate::tools::{self, Choice, Function, Offer};

/// A request for a response.
#[derive(Debug, Clone, PartialEq)]
pub struct Request {
    /// What is to be generated.
    pub generation: Generation,
    /// The response to go on from; whoever keeps responses answers for it (400 `previous_response_not_found`).
    pub previous_response_id: Option<String>,
    /// Whether the response is to be kept for later requests.
    pub store: bool,
    /// Whether the conversation begins with instructions, which later requests do not take over.
    instructions: bool,
    parallel: bool,
    /// Members of the response that repeat the request, as the inside of a JSON object.
    echo: String,
}

/// What later requests may refer to.
#[derive(Debug, Clone, PartialEq)]
pub struct Stored {
    /// The id of the response.
    pub id: String,
    /// The response as the client got it: one JSON document.
    pub response: Bytes,
    /// The conversation up to and with the response, in the shape of the chat API, without instructions.
    pub conversation: Vec<Value>,
}

/// The refusal of a request that goes on from a response that is not kept.
pub fn previous_response_not_found(id: &str) -> Refusal {
    let message = format!("Previous response with id '{id}' not found.");
    Refusal::bad("previous_response_not_found", message)
}

/// Reads a body.
pub fn parse(body: &[u8]) -> Result<Request, Refusal> {
    let fields = &mut Fields::parse(body)?;
    for (name, code) in [("background", "background_not_supported"), ("conversation", "conversation_not_supported")] {
        if fields.refuse(&[name]).is_err() {
            let message = format!("field `{name}` is not supported by the engines of this model");
            return Err(Refusal::not_implemented(code, message));
        }
    }
    fields.refuse(&["prompt", "lora_path", "context_management"])?;
    let instructions = fields.string("instructions")?;
    let missing = || Refusal::missing("input");
    let messages = input::messages(instructions.as_deref(), fields.value("input").ok_or_else(missing)?)?;

    let echo = object::Echo::of(fields, instructions.as_deref());
    let offer = offer(fields)?;
    let mut variables = Map::new();
    if let Some(mut reasoning) = fields.object("reasoning")? {
        if let Some(effort) = reasoning.string("effort")? {
            variables.insert("reasoning_effort".to_owned(), effort.into());
        }
        reasoning.string("summary")?;
    }
    variables.extend(fields.map("chat_template_kwargs")?.unwrap_or_default());

    let mut constraint = constraint::read(fields)?;
    if let Some(format) = fields.object("text")?.and_then(|mut text| text.value("format")) {
        let of_format = constraint::of_format(format, "text.format")?;
        if constraint.is_some() && of_format.is_some() {
            return Err(Refusal::value("text.format", "cannot be given beside another constraint"));
        }
        constraint = of_format.or(constraint);
    }
    let mut sampling = sampling::read(fields)?;
    sampling.max_tokens = fields.count("max_output_tokens", 1..=MOST_TOKENS)?;
    let logprobs = logprobs(fields)?;
    let (stream, _) = sampling::stream(fields)?;
    check_echoed(fields)?;
    let store = fields.boolean("store")?.unwrap_or(true);
    let parallel = fields.boolean("parallel_tool_calls")?.unwrap_or(true);
    let previous_response_id = fields.string("previous_response_id")?;
    let model = fields.string("model")?;
    let echo = echo.finish(&sampling, store, parallel, previous_response_id.as_deref());
    let prompt = ChatPrompt { messages, tools: offer.tools, variables, continue_final_message: false };
    let generation = Generation {
        model,
        request_id: sampling::request_id(fields)?,
        prompt: Prompt::Chat(prompt),
        sampling,
        samples: 1,
        stream,
        stream_usage: false,
        logprobs,
        constraint,
        reading: Reading { tools: offer.choice, separate_reasoning: true, skip_special_tokens: true },
    };
    let instructions = instructions.is_some();
    Ok(Request { generation, previous_response_id, store, instructions, parallel, echo })
}

/// Checks members that only the response repeats.
fn check_echoed(fields: &mut Fields) -> Result<(), Refusal> {
    fields.map("metadata")?;
    fields.string("user")?;
    match fields.string("truncation")?.as_deref() {
        None | Some("auto" | "disabled") => Ok(()),
        Some(_) => Err(Refusal::value("truncation", "must be auto or disabled")),
    }
}

/// Log probabilities are asked for by `include`.
fn logprobs(fields: &mut Fields) -> Result<Option<Logprobs>, Refusal> {
    let include = fields.array("include", limits::PARTS)?.unwrap_or_default();
    let top = fields.integer("top_logprobs", 0..=limits::TOP_LOGPROBS)?.unwrap_or(0) as u32;
    let wanted = include.iter().any(|what| what == "message.output_text.logprobs");
    Ok(wanted.then_some(Logprobs { top, prompt_from: None }))
}

fn offer(fields: &mut Fields) -> Result<Offer, Refusal> {
    let mut functions = Vec::new();
    for (at, tool) in fields.array("tools", limits::TOOLS)?.unwrap_or_default().into_iter().enumerate() {
        let path = format!("tools[{at}]");
        let mut tool = Fields::of(tool, &path)?;
        match tool.string("type")?.as_deref() {
            Some("function") => functions.push(Function::read(&mut tool, "parameters")?),
            Some(kind) => {
                let message = format!("{path}: tools of type `{kind}` are not supported by the engines of this model");
                return Err(Refusal::not_implemented("hosted_tool_not_supported", message));
            }
            None => return Err(Refusal::tools(format!("{path}: a tool must have a `type`"))),
        }
    }
    let choice = match fields.value("tool_choice") {
        Some(choice) => Some(tool_choice(&choice)?),
        None => None,
    };
    tools::settle(functions, choice)
}

fn tool_choice(choice: &Value) -> Result<Choice, Refusal> {
    let name = |choice: &Value| choice.get("name").and_then(Value::as_str).map(str::to_owned);
    match choice {
        Value::String(word) => tools::word_choice(word),
        Value::Object(_) => match choice.get("type").and_then(Value::as_str) {
            Some("function") => name(choice)
                .map(Choice::Function)
                .ok_or_else(|| Refusal::tools("tool_choice: a function must have a `name`")),
            Some("allowed_tools") => tools::among(choice, name),
            _ => Err(Refusal::tools("tool_choice: its `type` must be function or allowed_tools")),
        },
        _ => Err(Refusal::wrong_type("tool_choice", "a string or an object")),
    }
}

impl Request {
    /// Puts the conversation of the earlier response before this request's input.
    pub fn continue_from(&mut self, conversation: &[Value]) {
        if let Prompt::Chat(prompt) = &mut self.generation.prompt {
            let at = usize::from(self.instructions);
            prompt.messages.splice(at..at, conversation.iter().cloned());
        }
    }

    /// Begins the answer. The id is that of the response (`resp_...`); those of its items are made of it.
    pub fn answer(&self, origin: Origin) -> Box<dyn Answer> {
        let form = object::Form {
            parallel: self.parallel,
            top_logprobs: self.generation.logprobs.map(|logprobs| logprobs.top),
            echo: self.echo.clone(),
            conversation: self.conversation(),
        };
        match self.generation.stream {
            true => Box::new(stream::Stream::new(object::Response::new(origin, form))),
            false => Box::new(whole::Whole::new(object::Response::new(origin, form))),
        }
    }

    /// What is to be kept of the conversation so far.
    fn conversation(&self) -> Option<Vec<Value>> {
        match &self.generation.prompt {
            Prompt::Chat(prompt) if self.store => {
                Some(prompt.messages.iter().skip(usize::from(self.instructions)).cloned().collect())
            }
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests;
