//! Legs and answers over gRPC, where engines take token ids and give token ids.
//!
//! The three engines say the same things in different words. [`Ask`] is one dispatch in words of none of them; the
//! engine modules write it as their engine's request, stamp on it where the legs meet or what was handed over, and read
//! the answers into one [`Message`], whose counts mean the same for all:
//!
//! * [`sglang`] and [`tokenspeed`]: both legs at once around a [`Rendezvous`], one sample each;
//! * [`vllm`]: prefill, then decode with what prefill handed over.
//!
//! [`status`] says what an engine's refusal means to the client and to the breaker. Facts are those of the engines'
//! servicers, release 0.14.1.

pub mod answer;
pub mod rendezvous;
pub mod request;
pub mod sglang;
pub mod status;
pub mod tokenspeed;
pub mod vllm;

pub use answer::{Chunk, Complete, Message, PromptLogprobs, ReadError, Reader, TokenLogprobs};
pub use rendezvous::{Rendezvous, Residue};
pub use request::{Ask, RequestError, SamplingDefaults};
