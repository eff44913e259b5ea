//! What the legs of a request look like on the wire of each engine, and what comes back.
//!
//! Everything here is a function of its arguments: no sockets, no clock, no randomness, no choice of workers. The
//! gateway reads a request with [`ClientBody`], asks the adapter of the chosen pair for the bodies of its legs
//! ([`sglang`]: both at once around a rendezvous; [`vllm`]: prefill, then decode with what prefill handed over;
//! [`moriio`]: one or the other, with every handoff checked; [`regular`]: one leg), sends them with
//! [`headers::leg_headers`], and names failures with [`errors`]. What goes over gRPC is in [`grpc`].

pub mod body;
pub mod errors;
pub mod field;
pub mod grpc;
pub mod headers;
mod json;
pub mod logprobs;
pub mod moriio;
pub mod prompt_logprobs;
pub mod regular;
pub mod sglang;
pub mod splice;
pub mod vllm;

pub use body::{BodyError, ClientBody, Legs, Prompt, Route};
pub use field::{Field, HANDOFF_FIELDS};
pub use prompt_logprobs::PromptLogprobs;
pub use smg_fleet::policy::ClientHandoffFields;
pub use splice::{Edits, SplicedBody};
