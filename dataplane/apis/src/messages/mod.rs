//! Anthropic messages, and the counting of their tokens.

mod convert;
mod stream;
mod whole;

use serde_json::{Map, Value};

use crate::answer::{Answer, Origin};
use crate::constraint;
use crate::fields::Fields;
use crate::generation::{ChatPrompt, Constraint, Generation, Prompt, Reading, ToolChoice};
use crate::limits;
use crate::output::{Finish, FinishReason, MatchedStop};
use crate::refusal::Refusal;
use crate::sampling::{self, MOST_TOKENS};
use crate::tools::{self, Choice, Function};

/// A request for a message. With `max_tokens` 0 nothing is to be generated: the prompt is counted, and an answer of a single
/// [`Finish`] with [`FinishReason::Length`] and that count is the whole answer.
#[derive(Debug, Clone, PartialEq)]
pub struct Request {
    /// What is to be generated.
    pub generation: Generation,
    parallel: bool,
}

/// A request to count the tokens of what would be a request for a message.
#[derive(Debug, Clone, PartialEq)]
pub struct Count {
    /// The model, when one is named.
    pub model: Option<String>,
    /// The conversation whose tokens are to be counted, the same as of a request for a message.
    pub prompt: ChatPrompt,
}

/// What engines cannot do here and what would change the answer if it were ignored.
const UNSUPPORTED: [&str; 3] = ["mcp_servers", "container", "lora_path"];

/// Reads a body of `/v1/messages`.
pub fn parse(body: &[u8]) -> Result<Request, Refusal> {
    let fields = &mut Fields::parse(body)?;
    fields.refuse(&UNSUPPORTED)?;
    let max_tokens = fields.count("max_tokens", 0..=MOST_TOKENS)?.ok_or_else(|| Refusal::missing("max_tokens"))?;
    let Conversation { prompt, choice, parallel } = conversation(fields)?;
    let constraint = constraint(fields)?;
    let mut sampling = sampling::read(fields)?;
    sampling.max_tokens = Some(max_tokens);
    sampling.stop.extend(sampling::stop(fields, "stop_sequences")?);
    let (stream, _) = sampling::stream(fields)?;
    let generation = Generation {
        model: fields.string("model")?,
        request_id: sampling::request_id(fields)?,
        prompt: Prompt::Chat(prompt),
        sampling,
        samples: 1,
        stream,
        stream_usage: false,
        logprobs: None,
        constraint,
        reading: Reading { tools: choice, separate_reasoning: true, skip_special_tokens: true },
    };
    Ok(Request { generation, parallel })
}

/// Reads a body of `/v1/messages/count_tokens`.
pub fn parse_count(body: &[u8]) -> Result<Count, Refusal> {
    let fields = &mut Fields::parse(body)?;
    fields.refuse(&UNSUPPORTED)?;
    let Conversation { prompt, .. } = conversation(fields)?;
    Ok(Count { model: fields.string("model")?, prompt })
}

/// The answer to a request to count tokens.
pub fn write_count(tokens: u64) -> String {
    format!("{{\"input_tokens\":{tokens}}}")
}

struct Conversation {
    prompt: ChatPrompt,
    choice: ToolChoice,
    /// Whether several tools may be called at once.
    parallel: bool,
}

fn conversation(fields: &mut Fields) -> Result<Conversation, Refusal> {
    let system = fields.value("system");
    let missing = || Refusal::missing("messages");
    let turns = fields.array("messages", limits::MESSAGES)?.ok_or_else(missing)?;
    let messages = convert::messages(system, turns)?;
    // A last turn of the assistant's is the beginning of the answer (Anthropic, "Prefill Claude's response").
    let continue_final_message =
        messages.last().is_some_and(|last| last["role"] == "assistant" && last.get("tool_calls").is_none());

    let mut functions = Vec::new();
    for (at, tool) in fields.array("tools", limits::TOOLS)?.unwrap_or_default().into_iter().enumerate() {
        let path = format!("tools[{at}]");
        let mut tool = Fields::of(tool, &path)?;
        match tool.string("type")?.as_deref() {
            Some("custom") | None => {}
            Some(kind) => return Err(Refusal::tools(format!("{path}: tools of type `{kind}` are not supported"))),
        }
        if tool.peek("input_schema").is_none() {
            return Err(Refusal::tools(format!("{path}: a tool must have an `input_schema`")));
        }
        functions.push(Function::read(&mut tool, "input_schema")?);
    }
    let (choice, parallel) = match fields.object("tool_choice")? {
        Some(choice) => tool_choice(choice)?,
        None => (None, true),
    };
    let offer = tools::settle(functions, choice)?;
    let variables = thinking(fields)?;
    let prompt = ChatPrompt { messages, tools: offer.tools, variables, continue_final_message };
    Ok(Conversation { prompt, choice: offer.choice, parallel })
}

fn tool_choice(mut fields: Fields) -> Result<(Option<Choice>, bool), Refusal> {
    let choice = match fields.required_string("type").map_err(|refusal| Refusal::tools(refusal.message))?.as_str() {
        "auto" => Choice::Auto,
        "any" => Choice::Required,
        "none" => Choice::None,
        "tool" => Choice::Function(fields.required_string("name").map_err(|refusal| Refusal::tools(refusal.message))?),
        word => return Err(Refusal::tools(format!("tool_choice: `{word}` is not auto, any, tool or none"))),
    };
    Ok((Some(choice), !fields.boolean("disable_parallel_tool_use")?.unwrap_or(false)))
}

/// What the template is told of `thinking`: families of models differ in the name of the switch.
fn thinking(fields: &mut Fields) -> Result<Map<String, Value>, Refusal> {
    let mut variables = Map::new();
    if let Some(mut thinking) = fields.object("thinking")? {
        let on = match thinking.required_string("type")?.as_str() {
            "enabled" | "adaptive" => true,
            "disabled" => false,
            _ => return Err(Refusal::value("thinking.type", "must be enabled, adaptive or disabled")),
        };
        thinking.count("budget_tokens", 0..=MOST_TOKENS)?;
        variables.extend([("enable_thinking".to_owned(), on.into()), ("thinking".to_owned(), on.into())]);
    }
    variables.extend(fields.map("chat_template_kwargs")?.unwrap_or_default());
    Ok(variables)
}

/// Structured output (Anthropic, `output_config.format`, formerly `output_format`), or a constraint in the engines' own dialects.
fn constraint(fields: &mut Fields) -> Result<Option<Constraint>, Refusal> {
    let mut formats = Vec::new();
    if let Some(mut config) = fields.object("output_config")? {
        formats.extend(config.value("format").map(|format| (format, "output_config.format")));
    }
    formats.extend(fields.value("output_format").map(|format| (format, "output_format")));
    let mut found = constraint::read(fields)?;
    for (format, path) in formats {
        let constraint = constraint::of_format(format, path)?;
        if constraint.is_some() && found.is_some() {
            return Err(Refusal::value(path, "cannot be given beside another constraint"));
        }
        found = found.or(constraint);
    }
    Ok(found)
}

impl Request {
    /// Begins the answer.
    pub fn answer(&self, origin: Origin) -> Box<dyn Answer> {
        match self.generation.stream {
            true => Box::new(stream::Stream::new(origin, self.parallel)),
            false => Box::new(whole::Whole::new(origin, self.parallel)),
        }
    }
}

/// `stop_reason` and `stop_sequence`.
fn stop_reason(finish: &Finish, calls: bool) -> (&'static str, Option<&str>) {
    match (&finish.reason, &finish.matched_stop) {
        (FinishReason::Length, _) => ("max_tokens", None),
        (FinishReason::Stop, _) if calls => ("tool_use", None),
        (FinishReason::Stop, Some(MatchedStop::Text(text))) => ("stop_sequence", Some(text)),
        _ => ("end_turn", None),
    }
}

/// `usage`. Tokens that were read from a cache are not counted among the input's (Anthropic, "Prompt caching").
fn write_usage(usage: &crate::output::Usage, out: &mut bytes::BytesMut) {
    use crate::write::Put as _;
    let cached = usage.cached_tokens.min(usage.prompt_tokens);
    out.raw("{\"input_tokens\":").number(usage.prompt_tokens - cached);
    out.raw(",\"cache_creation_input_tokens\":0,\"cache_read_input_tokens\":").number(cached);
    out.raw(",\"output_tokens\":").number(usage.completion_tokens).raw("}");
}

#[cfg(test)]
mod tests;
