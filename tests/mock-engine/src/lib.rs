//! Mock SGLang, vLLM and TokenSpeed engines that enforce the engines' protocol rules.
//!
//! A gateway for prefill and decode engines can look right and be wrong: a decode engine that was handed no KV computes
//! the prompt again and answers the same. These engines cannot be fooled. A decode leg answers as if it had the KV only
//! when a prefill engine has finished that very prompt and the KV was fetched from it, over a socket, once. The text is
//! a function of the prompt alone, so a pair's answer equals a single engine's byte for byte.
//!
//! Shapes of requests, answers, probes and metrics are those of vLLM 0.32 and SGLang 0.5. Everything received is
//! recorded; faults are switched on per kind of request.
//!
//! Over gRPC ([`Builder::grpc`]) the engines take token ids and give token ids of a real tokenizer ([`tokenizer_path`]).
//! A request is inside the engine until it is done or aborted ([`MockEngine::open_requests`], [`MockEngine::calls`],
//! [`MockEngine::aborts`]); its faults are [`CallFault`]s. The first words of an answer are [`expected_tokens`] of the
//! prompt, unless the engine is told what to say ([`MockEngine::replies_with`]).
//!
//! ```no_run
//! # async fn example() -> std::io::Result<()> {
//! use mock_engine::{Connector, Engine, Fault, MockEngine, Role};
//! let prefill = MockEngine::builder()
//!     .engine(Engine::Vllm)
//!     .role(Role::Prefill)
//!     .connector(Connector::Nixl)
//!     .start()
//!     .await?;
//! prefill.set_fault(Fault::generation().status(503, r#"{"error":"busy"}"#).times(1));
//! println!("{}", prefill.url());
//! # Ok(())
//! # }
//! ```

mod answer;
mod builder;
mod engine;
mod fabric;
mod fault;
mod generate;
mod grpc;
mod http;
mod json;
mod ledger;
mod load;
mod messages;
mod record;
mod responses;
mod sglang;
mod text;
mod vllm;
mod vocabulary;

pub use builder::Builder;
pub use engine::{Connector, Engine, MockEngine, Role, TimedOut};
pub use fault::Fault;
pub use grpc::{Abort, Asked, Call, CallEnd, CallFault, expected_tokens};
pub use record::{Recorded, Tally};
pub use vocabulary::{decode, encode, end_of_answer, tokenizer_path};

/// Creation time in answers, seconds since the epoch. Fixed, so that equal requests have equal answers.
const CREATED: u64 = 1_767_225_600;
/// Version that the vLLM mock reports.
const VERSION_VLLM: &str = "0.32.0";
/// Version that the SGLang mock reports.
const VERSION_SGLANG: &str = "0.5.23";
/// Version that the TokenSpeed mock reports.
const VERSION_TOKENSPEED: &str = "0.4.0";
