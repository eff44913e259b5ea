//! Decode admission: a request that decode cannot take yet waits in the gateway, not in the engine, where it would hold its
//! prefill's KV cache until the bootstrap deadline.
//!
//! Pure: no clock, no tasks, no randomness. [`window`] is the ledger of one gateway for one decode worker.

pub mod window;

pub use window::{Claim, Ticket, Window};
