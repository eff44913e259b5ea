//! The replicated state machine of the control plane.
//!
//! [`State::apply`] is the one function by which the fleet's state changes: a pure function of the state and a command. It reads no clock
//! (time comes in the envelope and is recorded or compared as data only), draws no random number and does no I/O, so every replica that
//! applies the same log has the same bytes. [`command`] holds the closed set of commands, [`codec`] their disk and wire form.
//!
//! Invariants
//! * the revision grows by one with each command that changes the fleet and never otherwise; the registry of members is not part of it;
//! * a command id is applied at most once: a repeated one returns the first outcome;
//! * a rejected command changes nothing but the memory of command ids;
//! * what an operator changed is on record in the state itself ([`audit`]), and what left the fleet lately is named ([`departures`]);
//! * one URL is one worker;
//! * one disk is one member of the control plane, and its number is never given out again.

mod apply;
pub mod audit;
pub mod backup;
pub mod codec;
pub mod command;
pub mod departures;
pub mod members;
mod memory;
mod state;
mod tokens;

pub use audit::{AuditChange, AuditRecord};
pub use command::{Command, CommandId, Envelope, Outcome, Rejection, RejectionCode};
pub use departures::{Departed, Departures};
pub use members::{Member, NodeId};
pub use state::State;
