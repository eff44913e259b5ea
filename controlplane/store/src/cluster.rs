//! The members of a store: what is known about them, how they change, and why a change is refused.

use std::sync::Arc;

use smg_state::NodeId;
use thiserror::Error;
use uuid::Uuid;

use crate::StoreError;

/// Most voters. More would make every write wait for more disks and survive little more.
pub const MAX_VOTERS: usize = 5;

/// What a member knows about the cluster.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ClusterStatus {
    /// Who says so. Only the leader knows how far the others are.
    pub node_id: NodeId,
    /// Who leads, as far as that member knows.
    pub leader: Option<NodeId>,
    /// The term of that member.
    pub term: u64,
    /// The last entry of its log; 0 = none.
    pub last_log_index: u64,
    /// The last entry it knows to be committed.
    pub committed_index: u64,
    /// The last entry in its state.
    pub applied_index: u64,
    /// The last entry in its newest snapshot.
    pub snapshot_index: u64,
    /// The members, in the order of their numbers.
    pub members: Vec<MemberStatus>,
}

/// One member.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemberStatus {
    /// Its number.
    pub node_id: NodeId,
    /// Its disk.
    pub storage_id: Uuid,
    /// Where other members reach it.
    pub peer_address: String,
    /// Where operators and gateways reach it; empty = unknown.
    pub api_address: String,
    /// Whether it counts for a quorum; else it only follows.
    pub voter: bool,
    /// The last entry it is known to have; known to the leader only.
    pub matched_index: Option<u64>,
    /// Milliseconds since it answered last; known to the leader only.
    pub heard_ms: Option<u64>,
    /// What went wrong when the answering member called it last.
    pub trouble: Option<String>,
}

/// What a member tells others of its gateways; the store only carries it.
pub type GatewayReport = Arc<dyn Fn() -> Vec<u8> + Send + Sync>;

/// What another member said of its gateways, or why it said nothing.
pub type GatewayAnswer = (NodeId, Result<Vec<u8>, String>);

/// A change of the members, asked for by an operator.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum MemberChange {
    /// Makes members that follow voters.
    Promote {
        /// Which.
        node_ids: Vec<NodeId>,
        /// Whether the number of voters may become even.
        allow_even: bool,
    },
    /// Removes members for good.
    Remove {
        /// Which.
        node_ids: Vec<NodeId>,
        /// Whether the number of voters may become even.
        allow_even: bool,
    },
    /// Puts a member that has caught up in the place of a voter, in one step.
    Replace {
        /// Who leaves for good.
        old: NodeId,
        /// Who takes its place; absent = the only one that can.
        new: Option<NodeId>,
    },
}

/// Why a change of members is not made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(i32)]
pub enum Refusal {
    /// No such member.
    NotAMember = 1,
    /// Too few of the voters that would remain answer now: the cluster could not commit anything more.
    QuorumAtRisk = 2,
    /// An even number of voters survives no more failures than the odd number below it.
    EvenVoters = 3,
    /// There would be more than [`MAX_VOTERS`].
    TooManyVoters = 4,
    /// The member does not have the log yet, or does not answer.
    NotCaughtUp = 5,
    /// Another change is not finished yet.
    InProgress = 6,
    /// This store has one member, always.
    Unsupported = 7,
    /// There is nothing to change.
    Already = 8,
}

impl Refusal {
    /// Every reason.
    pub const ALL: [Self; 8] = [
        Self::NotAMember,
        Self::QuorumAtRisk,
        Self::EvenVoters,
        Self::TooManyVoters,
        Self::NotCaughtUp,
        Self::InProgress,
        Self::Unsupported,
        Self::Already,
    ];
}

/// Why a change of members was not made, or may not have been.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum ChangeError {
    /// It was refused: nothing changed.
    #[error("{message}")]
    Refused {
        /// What kind.
        code: Refusal,
        /// Why, in words for the operator.
        message: String,
    },
    /// The store did not answer.
    #[error(transparent)]
    Store(#[from] StoreError),
}

impl ChangeError {
    /// A refusal.
    pub fn refused(code: Refusal, message: impl Into<String>) -> Self {
        Self::Refused { code, message: message.into() }
    }
}
