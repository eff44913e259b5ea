//! The client APIs, for engines that speak token ids.
//!
//! Over HTTP an engine answers the client's own API and the gateway forwards bytes. Over gRPC an engine takes token ids and
//! returns token ids, so the gateway has to understand what was asked ([`generation`]) and to write the answer itself, from
//! the pieces of text that the output turned into ([`output`]).
//!
//! Everything here is a function of its arguments: no sockets, no clock, no randomness, no tokenizer. Times and ids are
//! passed in.

pub mod generation;
pub mod output;

pub use generation::Generation;
pub use output::{Finish, FinishReason, MatchedStop, Piece, Step, Usage};
