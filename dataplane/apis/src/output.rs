//! What becomes of an engine's output before it is written as an answer.

/// A piece of one sample's output, in order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Piece {
    /// Text of the answer.
    Content(String),
    /// Text of the reasoning before it.
    Reasoning(String),
    /// A tool call begins.
    ToolCall {
        /// Its position among the sample's calls, from 0.
        index: usize,
        /// Its id, unique in the conversation.
        id: String,
        /// The tool's name.
        name: String,
    },
    /// More of a tool call's arguments: JSON text in fragments.
    ToolArguments {
        /// The call's position.
        index: usize,
        /// The next fragment.
        fragment: String,
    },
}

/// What one message of an engine adds to a sample.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Step {
    /// The sample: prompt index * samples + sample of the prompt.
    pub sample: u32,
    /// What it adds for the client; empty while text is held back.
    pub pieces: Vec<Piece>,
    /// The tokens themselves, those of held-back text included.
    pub token_ids: Vec<u32>,
    /// Log probabilities of these tokens, when asked for.
    pub logprobs: Vec<TokenLogprob>,
}

/// The log probability of one token and of its rivals.
#[derive(Debug, Clone, PartialEq)]
pub struct TokenLogprob {
    /// The token's id.
    pub token_id: u32,
    /// Its text, special tokens spelled out.
    pub text: String,
    /// Its log probability; `None` for the first token of a prompt.
    pub logprob: Option<f32>,
    /// The likeliest candidates, the likeliest first: id, text, log probability.
    pub top: Vec<(u32, String, f32)>,
}

/// How a sample ended.
#[derive(Debug, Clone, PartialEq)]
pub struct Finish {
    /// The sample.
    pub sample: u32,
    /// Why.
    pub reason: FinishReason,
    /// The stop that matched, when one did.
    pub matched_stop: Option<MatchedStop>,
    /// What it cost.
    pub usage: Usage,
    /// Log probabilities of the prompt, when asked for.
    pub prompt_logprobs: Vec<TokenLogprob>,
}

/// Why a sample ended, as the engine and the stop strings say; whether tools were called shows in its pieces.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FinishReason {
    /// A stop string, a stop token or the end of the sequence.
    Stop,
    /// The limit on tokens.
    Length,
    /// The engine gave it up.
    Abort,
    /// Anything else, as the engine spelled it.
    Other(String),
}

/// What made a sample stop.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum MatchedStop {
    /// A token.
    Token(u32),
    /// A string.
    Text(String),
}

/// Tokens that a sample cost.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Usage {
    /// Tokens of the prompt.
    pub prompt_tokens: u32,
    /// Tokens generated.
    pub completion_tokens: u32,
    /// Prompt tokens that prefill had in its cache.
    pub cached_tokens: u32,
    /// Generated tokens spent on reasoning.
    pub reasoning_tokens: u32,
}

impl FinishReason {
    /// The word for it that engines use.
    pub fn word(&self) -> &str {
        match self {
            Self::Stop => "stop",
            Self::Length => "length",
            Self::Abort => "abort",
            Self::Other(word) => word,
        }
    }
}
