//! Where the control plane's state lives: one replicated log of commands behind one small trait.
//!
//! * [`raft`]: the embedded log on openraft and redb; the only module that names either;
//! * `etcd`: a log that an etcd cluster keeps, with the feature of that name;
//! * [`memory`]: no log at all, for tests and for state that may die with its process.
//!
//! Invariants every store keeps
//! * an outcome is returned only after its command is durable and applied;
//! * any member takes writes and reads and, where it does not lead, asks the leader;
//! * commands are applied in one order, by [`smg_state::State::apply`] alone;
//! * after any storage error the store stops for good: [`StoreError::Failed`] from then on, never a silent retry.

use std::sync::Arc;

use futures::future::BoxFuture;
use smg_fleet::Revision;
use smg_state::{Envelope, Outcome, State};
use thiserror::Error;
use tokio::sync::watch;

mod call;
pub mod cluster;
#[cfg(feature = "etcd")]
pub mod etcd;
mod failure;
mod frame;
pub mod memory;
mod published;
pub mod raft;
#[cfg(test)]
mod suite;

use cluster::{ChangeError, ClusterStatus, GatewayAnswer, GatewayReport, MemberChange, Refusal};
use smg_state::NodeId;

/// Why a store did not answer. The three classes of outcome are kept apart: did not happen, unknown, failed for good.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum StoreError {
    /// The command was not accepted and will not happen: no leader that could take it.
    #[error("the control plane has no leader: {0}")]
    Unavailable(String),
    /// The command will never be accepted: it is larger than this many bytes.
    #[error("the change is larger than {0} bytes")]
    TooLarge(usize),
    /// The command may or may not happen; retry it with the same command id.
    #[error("the outcome is unknown: {0}")]
    Unknown(String),
    /// The store stopped after a storage error. Reads of the applied state still work.
    #[error("the store has stopped: {0}")]
    Failed(String),
    /// The store is shutting down.
    #[error("the store is shutting down")]
    Closed,
}

/// Who may run the duties of a leader (registration jobs, probes).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Leadership {
    /// This node.
    Leader,
    /// Another node, or nobody.
    Follower,
}

/// What the control plane needs from any store.
pub trait ClusterStore: Send + Sync + 'static {
    /// Makes a command durable and applies it. Idempotent by command id.
    fn propose(&self, envelope: Envelope) -> BoxFuture<'_, Result<Outcome, StoreError>>;

    /// Waits until [`ClusterStore::local`] holds everything that was acknowledged before the call.
    fn read_barrier(&self) -> BoxFuture<'_, Result<Revision, StoreError>>;

    /// The applied state of this node; may be stale without a barrier.
    fn local(&self) -> Arc<State>;

    /// The revision of the applied state: a wake-up, the data is in [`ClusterStore::local`].
    fn changes(&self) -> watch::Receiver<Revision>;

    /// Who may run the leader's duties.
    fn leadership(&self) -> watch::Receiver<Leadership>;

    /// `Some(reason)` once the store has stopped after a storage error.
    fn failure(&self) -> watch::Receiver<Option<String>>;

    /// What is known about the members: by the leader, or with `local` by this one.
    fn cluster(&self, local: bool) -> BoxFuture<'_, Result<ClusterStatus, StoreError>>;

    /// Durable commits on this node's disk since the store was opened; 0 = its log is elsewhere.
    fn commits(&self) -> u64 {
        0
    }

    /// Changes the members. Returns the voters after it.
    fn change_members(&self, change: MemberChange) -> BoxFuture<'_, Result<Vec<NodeId>, ChangeError>> {
        let _ = change;
        let message = "this control plane has one member, always";
        Box::pin(std::future::ready(Err(ChangeError::refused(Refusal::Unsupported, message))))
    }

    /// Says what other members are told who ask for this one's gateways.
    fn tell_gateways(&self, report: GatewayReport) {
        let _ = report;
    }

    /// Asks every other member for its gateways, all at once and each for a bounded time.
    fn ask_gateways(&self) -> BoxFuture<'_, Vec<GatewayAnswer>> {
        Box::pin(std::future::ready(Vec::new()))
    }

    /// The voters that there would be after a change of the members, which is not made.
    fn rehearse_members(&self, change: MemberChange) -> BoxFuture<'_, Result<Vec<NodeId>, ChangeError>> {
        let _ = change;
        let message = "this control plane has one member, always";
        Box::pin(std::future::ready(Err(ChangeError::refused(Refusal::Unsupported, message))))
    }

    /// Whether this member hears from a leader: what it has applied is then at most moments old.
    fn in_contact(&self) -> bool {
        true
    }

    /// Hands the leadership to another member, when this one leads and another can. Returns when it has, or soon after it could not.
    fn step_down(&self) -> BoxFuture<'_, ()> {
        Box::pin(std::future::ready(()))
    }

    /// Stops the store and waits until its files are closed.
    fn shutdown(&self) -> BoxFuture<'_, ()>;
}
