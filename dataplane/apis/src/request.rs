//! A request of any API.

use crate::answer::{Answer, Origin};
use crate::generation::Generation;
use crate::refusal::Refusal;
use crate::{chat, completions, generate, messages, responses};

/// The APIs that generate text.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Api {
    /// OpenAI chat completions.
    Chat,
    /// OpenAI completions.
    Completions,
    /// SGLang's native generation.
    Generate,
    /// Anthropic messages.
    Messages,
    /// OpenAI responses.
    Responses,
}

impl Api {
    /// What the id of an answer begins with, when the client gives none.
    pub const fn id_prefix(self) -> &'static str {
        match self {
            Self::Chat => "chatcmpl-",
            Self::Completions => "cmpl_",
            Self::Generate => "gen-",
            Self::Messages => "msg_",
            Self::Responses => "resp_",
        }
    }

    /// Reads a body.
    pub fn parse(self, body: &[u8]) -> Result<Request, Refusal> {
        match self {
            Self::Chat => chat::parse(body).map(Request::Chat),
            Self::Completions => completions::parse(body).map(Request::Completions),
            Self::Generate => generate::parse(body).map(Request::Generate),
            Self::Messages => messages::parse(body).map(Request::Messages),
            Self::Responses => responses::parse(body).map(Request::Responses),
        }
    }
}

/// A request of any API.
#[derive(Debug, Clone, PartialEq)]
pub enum Request {
    /// For a chat completion.
    Chat(chat::Request),
    /// For completions.
    Completions(completions::Request),
    /// For native generation.
    Generate(generate::Request),
    /// For a message.
    Messages(messages::Request),
    /// For a response.
    Responses(responses::Request),
}

impl Request {
    /// What is to be generated.
    pub fn generation(&self) -> &Generation {
        match self {
            Self::Chat(request) => &request.generation,
            Self::Completions(request) => &request.generation,
            Self::Generate(request) => &request.generation,
            Self::Messages(request) => &request.generation,
            Self::Responses(request) => &request.generation,
        }
    }

    /// Whether the answer repeats the prompts, whose texts it then needs.
    pub fn echoes(&self) -> bool {
        matches!(self, Self::Completions(request) if request.echo)
    }

    /// Begins the answer. `prompts` are the texts of all prompts when the request [echoes](Self::echoes) them, else empty.
    pub fn answer(&self, origin: Origin, prompts: Vec<String>) -> Box<dyn Answer> {
        match self {
            Self::Chat(request) => request.answer(origin),
            Self::Completions(request) => request.answer(origin, prompts),
            Self::Generate(request) => request.answer(origin),
            Self::Messages(request) => request.answer(origin),
            Self::Responses(request) => request.answer(origin),
        }
    }
}
