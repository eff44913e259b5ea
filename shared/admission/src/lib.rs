//! Decode admission: a request that decode cannot take yet waits in the gateway, not in the engine, where it would hold its
//! prefill's KV cache until the bootstrap deadline.
//!
//! Pure: no clock, no tasks, no randomness.
//!
//! * [`window`]: the rooms of one decode worker as one gateway hands them out;
//! * [`ledger`]: which gateway may use how many of them, as the control plane keeps it; [`pool`] is its part for one worker,
//!   [`allocate`] divides, [`subset`] says who gets a part at all;
//! * [`leader`]: when leases and deadlines are over, and what follows from what engines say; [`pace`]: when it closes a round;
//! * [`share`]: what a gateway may use, by what it was told and by how long ago that was.
//!
//! Two invariants carry the guarantee that an engine never runs more than its window, whatever is lost, delayed, repeated or dead:
//! * INV-1, of the ledger: shares and zombies together never grow past the window;
//! * INV-2, of each process of a gateway: its requests on a worker are at most its share plus its zombies there.

pub mod allocate;
pub mod leader;
pub mod ledger;
mod mutant;
pub mod pace;
pub mod pool;
pub mod share;
pub mod subset;
pub mod window;
pub mod wire;

pub use leader::{Answer, Deadlines, EngineCount, Leader};
pub use ledger::{Event, Grant, Ledger, Report, ReportRow};
pub use pace::Pace;
pub use share::{Shares, Standing, Times, Update};
pub use window::{Claim, Ticket, Window};

/// A decode worker.
pub type WorkerKey = u128;
/// One run of a gateway: a restarted gateway is another process.
pub type ProcessId = u128;

#[cfg(test)]
mod simulation_test;
#[cfg(test)]
mod small_model_test;
#[cfg(test)]
mod traffic_test;
