//! The fleet as this gateway routes it: an immutable [`table::RoutingTable`] per snapshot, and per worker what this gateway knows about
//! it ([`worker::WorkerRuntime`]), which outlives snapshots.
//! What policies did and remember shows in [`policies`].

pub mod policies;
pub mod table;
pub mod worker;
