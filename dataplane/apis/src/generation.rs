//! One request for generated text, whatever API it came by.

use serde_json::{Map, Value};

/// What a client asks for.
#[derive(Debug, Clone, PartialEq)]
pub struct Generation {
    /// The model, when one is named.
    pub model: Option<String>,
    /// The id that the client gives the request (`rid`).
    pub request_id: Option<String>,
    /// What to go on from.
    pub prompt: Prompt,
    /// How tokens are drawn. Unset fields are the model's or the engine's business.
    pub sampling: Sampling,
    /// Samples per prompt (`n`); at least 1.
    pub samples: u32,
    /// Whether the answer is a stream of events.
    pub stream: bool,
    /// Whether the stream ends with the usage.
    pub stream_usage: bool,
    /// Log probabilities, when asked for.
    pub logprobs: Option<Logprobs>,
    /// What the output must look like, at most one kind.
    pub constraint: Option<Constraint>,
    /// How the output is taken apart.
    pub reading: Reading,
}

/// What to go on from.
#[derive(Debug, Clone, PartialEq)]
pub enum Prompt {
    /// A conversation, which the model's chat template turns into text.
    Chat(ChatPrompt),
    /// Texts, one dispatch for each.
    Texts(Vec<String>),
    /// Token ids, one dispatch for each.
    Tokens(Vec<Vec<u32>>),
}

/// A conversation as a chat template wants it: the shapes are those of the OpenAI chat API.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct ChatPrompt {
    /// `messages`: objects with `role`, `content` (a string or parts) and what else the client gave.
    pub messages: Vec<Value>,
    /// `tools`: objects with `type` and `function`; empty when the client gave none or chose none.
    pub tools: Vec<Value>,
    /// Further variables of the template (`chat_template_kwargs`, `reasoning_effort`, ...).
    pub variables: Map<String, Value>,
    /// Whether the last message is one of the assistant's that is to be continued.
    pub continue_final_message: bool,
}

/// How tokens are drawn; `None` = the client left it open.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Sampling {
    /// Temperature, 0 and up.
    pub temperature: Option<f32>,
    /// Nucleus.
    pub top_p: Option<f32>,
    /// Number of candidates; -1 = all.
    pub top_k: Option<i32>,
    /// Least probability relative to the likeliest.
    pub min_p: Option<f32>,
    /// Frequency penalty.
    pub frequency_penalty: Option<f32>,
    /// Presence penalty.
    pub presence_penalty: Option<f32>,
    /// Repetition penalty.
    pub repetition_penalty: Option<f32>,
    /// Most tokens to generate.
    pub max_tokens: Option<u32>,
    /// Fewest tokens to generate.
    pub min_tokens: Option<u32>,
    /// Strings that end the output.
    pub stop: Vec<String>,
    /// Tokens that end the output.
    pub stop_token_ids: Vec<u32>,
    /// Whether the end-of-sequence token does not end the output.
    pub ignore_eos: bool,
    /// Whether the stop string or token stays in the output.
    pub keep_stop: bool,
    /// Seed of the draw.
    pub seed: Option<i64>,
    /// Token id (as text) to bias.
    pub logit_bias: Vec<(u32, f32)>,
}

/// Log probabilities wanted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Logprobs {
    /// Candidates listed beside each token.
    pub top: u32,
    /// First token of the prompt for which they are wanted; `None` = output only.
    pub prompt_from: Option<u32>,
}

/// What the output must look like.
#[derive(Debug, Clone, PartialEq)]
pub enum Constraint {
    /// A JSON schema, as JSON text.
    JsonSchema(String),
    /// A regular expression.
    Regex(String),
    /// A grammar in EBNF.
    Grammar(String),
    /// A structural tag, as JSON text.
    StructuralTag(String),
    /// One of these strings.
    Choice(Vec<String>),
}

/// How the output is taken apart.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Reading {
    /// Whether tool calls are looked for, and which.
    pub tools: ToolChoice,
    /// Whether reasoning is told apart from the content.
    pub separate_reasoning: bool,
    /// Whether special tokens leave no text.
    pub skip_special_tokens: bool,
}

/// Which tools the model may call.
#[derive(Debug, Clone, PartialEq, Default)]
pub enum ToolChoice {
    /// None is offered, or none may be called: text that looks like a call is text.
    #[default]
    None,
    /// As the model likes.
    Auto,
    /// At least one.
    Required,
    /// This one.
    Function(String),
}
