//! What the gateway does with text, for engines that speak token ids.
//!
//! Over gRPC an engine takes token ids and returns token ids. Everything between those and the client's words is here:
//! where a model's tokenizer comes from ([`source`]), text to ids and back ([`tokenizer`], [`detokenize`]), conversations to
//! prompts ([`template`]), and output to pieces of an answer: stop strings ([`stop`]), then reasoning and tool calls
//! ([`reader`]). A [`Sample`] strings the latter together for one sample of an engine's output.
//!
//! Invariants:
//! - What comes out of a stream depends on the ids alone, not on how the engine cut them into messages.
//! - Work is linear in the text: nothing is decoded, matched or parsed again for every token.
//! - A hostile prompt, template or output fails its request and nothing else: rendering has a budget, nesting a limit, and
//!   what is held back a bound.
//! - No clock and no randomness: the time of a prompt and the random part of a call's id are passed in.

mod bytes;
pub mod cache;
pub mod detokenize;
pub mod forced;
mod markers;
pub mod model;
pub mod reader;
pub mod sample;
pub mod source;
pub mod stop;
pub mod template;
pub mod tokenizer;

pub use cache::TokenCache;
pub use detokenize::Detokenizer;
pub use model::TextModel;
pub use reader::{OutputReader, Parsers, Reader, Task};
pub use sample::{Sample, SampleRules};
pub use source::Files;
pub use stop::StopMatcher;
pub use template::{ChatTemplate, Prompt};
pub use tokenizer::Tokenizer;
