//! The client APIs, for engines that speak token ids.
//!
//! Over HTTP an engine answers the client's own API and the gateway forwards bytes. Over gRPC an engine takes token ids and
//! returns token ids, so the gateway has to understand what was asked ([`generation`]) and to write the answer itself
//! ([`answer`]), from the pieces of text that the output turned into ([`output`]). Each API has a module that reads its requests and
//! writes its answers; [`request`] is all of them in one.
//!
//! Everything here is a function of its arguments: no sockets, no clock, no randomness, no tokenizer. Times and ids are
//! passed in.
//!
//! Requests are read leniently where nothing depends on it: members that nobody reads are ignored, `null` is absent. What is read is
//! checked, and refused with the name of the field ([`Refusal`]); what would silently change the answer if it were ignored is
//! refused too.

pub mod answer;
mod blocks;
pub mod chat;
pub mod completions;
mod constraint;
mod conversation;
mod fields;
pub mod generate;
pub mod generation;
pub mod limits;
mod logprobs;
pub mod messages;
pub mod output;
pub mod refusal;
pub mod request;
pub mod responses;
mod sampling;
#[cfg(test)]
mod testing;
mod tools;
mod write;

pub use answer::{Answer, Failure, Origin};
pub use generation::Generation;
pub use output::{Finish, FinishReason, MatchedStop, Piece, Step, Usage};
pub use refusal::Refusal;
pub use request::{Api, Request};
