//! The type parameters of openraft, and short names for what they make of its types.

use openraft::RaftTypeConfig;
use openraft::type_config::alias;
use smg_state::{Envelope, Outcome};
use uuid::Uuid;

/// A member, as the membership in the log names it.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Peer {
    /// `HOST:PORT` at which other members reach it.
    pub address: String,
    /// Its disk; nil = unknown.
    pub storage_id: Uuid,
}

openraft::declare_raft_types!(
    /// Commands go in, outcomes come out; entries that are no command (blanks, memberships) have no outcome. A leader is named by
    /// (term, node id), which is totally ordered.
    pub TypeConfig:
        D = Envelope,
        R = Option<Outcome>,
        NodeId = u64,
        Node = Peer,
        Term = u64,
        LeaderId = openraft::impls::leader_id_adv::LeaderId<Self::Term, Self::NodeId>,
);

/// Any configuration with these types, whatever its runtime: the log and the state machine serve each of them, so that a simulation of a
/// cluster runs the code that is shipped.
pub(crate) trait Config:
    RaftTypeConfig<
        D = Envelope,
        R = Option<Outcome>,
        NodeId = u64,
        Node = Peer,
        Term = u64,
        LeaderId = alias::LeaderIdOf<TypeConfig>,
        Vote = Vote,
        Payload = alias::PayloadOf<TypeConfig>,
        Entry = Entry,
    >
{
}

impl<C> Config for C where
    C: RaftTypeConfig<
            D = Envelope,
            R = Option<Outcome>,
            NodeId = u64,
            Node = Peer,
            Term = u64,
            LeaderId = alias::LeaderIdOf<TypeConfig>,
            Vote = Vote,
            Payload = alias::PayloadOf<TypeConfig>,
            Entry = Entry,
        >
{
}

pub(crate) type LogId = alias::LogIdOf<TypeConfig>;
pub(crate) type Vote = alias::VoteOf<TypeConfig>;
pub(crate) type Entry = alias::EntryOf<TypeConfig>;
pub(crate) type Membership = openraft::Membership<u64, Peer>;
pub(crate) type StoredMembership = alias::StoredMembershipOf<TypeConfig>;
pub(crate) type SnapshotMeta = alias::SnapshotMetaOf<TypeConfig>;
