//! Who calls whom: both sides of every call between members, and when a call is refused.
//!
//! Problem: addresses outlive disks. Behind an address that the membership names there may be a member of another cluster, another member,
//! or a member of that number whose disk was wiped; a vote or an acknowledgement of any of them counts for nothing. So the caller says whom
//! it means, the callee checks that it is meant and that the caller is a member, and neither trusts an address.
//!
//! A callee may be behind: a caller whose number it cannot know yet is let in, because numbers only grow. One that it should know and does
//! not, or knows under another disk, is refused.
//!
//! A cluster that was restored from a backup keeps its id and gets another history. Members of the time before may still run, and call at
//! the addresses they know; each side says its history, so that both logs name the cause.

use http::HeaderMap;
use smg_state::{NodeId, State};
use thiserror::Error;
use tonic::metadata::{MetadataMap, MetadataValue};
use tonic::{Code, Status};
use uuid::Uuid;

use super::mutant::{Mutant, planted};
use super::options::NodeIdentity;
use super::types::Membership;

/// The version of what members say to each other.
pub(crate) const PROTOCOL: u32 = 1;
const IDENTITY: &str = "smg-peer";
const HISTORY: &str = "smg-peer-history";
const REFUSAL: &str = "smg-refusal";
const RETIRED: &str = "retired";

/// The two sides of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Call {
    pub protocol: u32,
    pub cluster_id: Uuid,
    pub from: NodeId,
    pub from_storage: Uuid,
    pub to: NodeId,
    /// Nil = the caller does not know it.
    pub to_storage: Uuid,
    /// Of the caller's state; nil = it has none yet, or does not say.
    pub history_id: Uuid,
}

/// Why a call is refused.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub(crate) enum Refused {
    #[error("the call does not say who makes it")]
    Nameless,
    #[error("it speaks version {0} of the members' protocol, this one {PROTOCOL}")]
    Protocol(u32),
    #[error("it belongs to cluster {theirs}, this member to {ours}")]
    Cluster { theirs: Uuid, ours: Uuid },
    #[error(
        "it looks for member {to} with disk {to_storage}, and this is member {me} with disk {storage}: \
             a wiped member comes back only as a new one"
    )]
    NotMe { to: NodeId, to_storage: Uuid, me: NodeId, storage: Uuid },
    #[error("member {from} has disk {known}, and the caller has {storage}")]
    WrongDisk { from: NodeId, known: Uuid, storage: Uuid },
    #[error("{0} is no member of this cluster")]
    Stranger(NodeId),
    #[error("member {0} was removed from the cluster for good")]
    Retired(NodeId),
    #[error(
        "member {from} is of the time before this cluster was restored from a backup (its history is {theirs}, that of the \
             cluster is {ours} now): stop it for good and empty its directory"
    )]
    Past { from: NodeId, theirs: Uuid, ours: Uuid },
    #[error(
        "member {from} is of history {theirs} of this cluster and this member of {ours}: the cluster was restored from a \
             backup in between. Stop the members of the older history for good and empty their directories"
    )]
    History { from: NodeId, theirs: Uuid, ours: Uuid },
}

/// Whether a member of this history may take part where `state` is applied. Nil says nothing.
pub(crate) fn same_history(from: NodeId, storage: Uuid, theirs: Uuid, state: &State) -> Result<(), Refused> {
    let ours = state.history_id();
    if theirs.is_nil() || ours.is_nil() || theirs == ours {
        return Ok(());
    }
    // A restore retires all members that there were.
    let past = state.member(from).is_some_and(|member| member.retired && member.storage_id == storage);
    Err(if past { Refused::Past { from, theirs, ours } } else { Refused::History { from, theirs, ours } })
}

impl Call {
    /// A call of `me` to a member.
    pub fn new(me: &NodeIdentity, to: NodeId, to_storage: Uuid) -> Self {
        Self {
            protocol: PROTOCOL,
            cluster_id: me.cluster_id,
            from: me.node_id,
            from_storage: me.storage_id,
            to,
            to_storage,
            history_id: Uuid::nil(),
        }
    }

    /// The same call of a member whose state is of this history.
    pub fn of(self, history_id: Uuid) -> Self {
        Self { history_id, ..self }
    }

    /// Names both sides in the head of a request.
    pub fn sign(&self, metadata: &mut MetadataMap) {
        let Self { protocol, cluster_id, from, from_storage, to, to_storage, history_id } = self;
        let text = format!("{protocol} {cluster_id} {from} {from_storage} {to} {to_storage}");
        if let Ok(value) = MetadataValue::try_from(text) {
            metadata.insert(IDENTITY, value);
        }
        if let Ok(value) = MetadataValue::try_from(history_id.to_string()) {
            metadata.insert(HISTORY, value);
        }
    }

    /// Reads both sides.
    pub fn read(metadata: &MetadataMap) -> Result<Self, Refused> {
        let text = metadata.get(IDENTITY).and_then(|value| value.to_str().ok()).ok_or(Refused::Nameless)?;
        let mut words = text.split(' ');
        let mut number = || words.next().and_then(|word| word.parse::<u64>().ok());
        let protocol = number().and_then(|version| u32::try_from(version).ok()).ok_or(Refused::Nameless)?;
        if protocol != PROTOCOL {
            return Err(Refused::Protocol(protocol));
        }
        let history = metadata.get(HISTORY).and_then(|value| value.to_str().ok()?.parse().ok());
        let history_id = history.unwrap_or_default();
        let parsed = (|| {
            let cluster_id = words.next()?.parse().ok()?;
            let from = words.next()?.parse().ok()?;
            let from_storage = words.next()?.parse().ok()?;
            let to = words.next()?.parse().ok()?;
            let to_storage = words.next()?.parse().ok()?;
            let whole = words.next().is_none();
            whole.then_some(Self { protocol, cluster_id, from, from_storage, to, to_storage, history_id })
        })();
        parsed.ok_or(Refused::Nameless)
    }

    /// Whether `me`, who has `membership` in its log and `state` applied, takes the call.
    pub fn admit(&self, me: &NodeIdentity, membership: &Membership, state: &State) -> Result<(), Refused> {
        if self.cluster_id != me.cluster_id {
            return Err(Refused::Cluster { theirs: self.cluster_id, ours: me.cluster_id });
        }
        same_history(self.from, self.from_storage, self.history_id, state)?;
        if planted(Mutant::AnyDisk) {
            return Ok(());
        }
        if self.to != me.node_id || !(self.to_storage.is_nil() || self.to_storage == me.storage_id) {
            return Err(Refused::NotMe {
                to: self.to,
                to_storage: self.to_storage,
                me: me.node_id,
                storage: me.storage_id,
            });
        }
        let disk = |known: Uuid| {
            if known.is_nil() || known == self.from_storage {
                return Ok(());
            }
            Err(Refused::WrongDisk { from: self.from, known, storage: self.from_storage })
        };
        if let Some(peer) = membership.get_node(&self.from) {
            return disk(peer.storage_id);
        }
        match state.member(self.from) {
            Some(member) => {
                disk(member.storage_id)?;
                if member.retired { Err(Refused::Retired(self.from)) } else { Ok(()) }
            }
            None if self.from > state.last_node_id() || membership.nodes().next().is_none() => Ok(()),
            None => Err(Refused::Stranger(self.from)),
        }
    }
}

impl Refused {
    /// The refusal as an answer.
    pub fn status(&self) -> Status {
        let mut headers = HeaderMap::new();
        let kind = if matches!(self, Self::Retired(_)) { RETIRED } else { "identity" };
        headers.insert(REFUSAL, http::HeaderValue::from_static(kind));
        Status::with_metadata(Code::FailedPrecondition, self.to_string(), MetadataMap::from_headers(headers))
    }
}

/// How an answer refuses the caller itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// Wrong cluster, member, disk or version.
    Identity,
    /// The caller is no member any more.
    Retired,
}

/// Whether an answer refuses the caller itself, not only this call.
pub(crate) fn refusal(status: &Status) -> Option<Refusal> {
    let kind = status.metadata().get(REFUSAL)?;
    Some(if kind.as_bytes() == RETIRED.as_bytes() { Refusal::Retired } else { Refusal::Identity })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use smg_state::{Command, Envelope};

    use super::*;
    use crate::raft::types::Peer;

    const CLUSTER: Uuid = Uuid::from_u128(7);
    const HISTORY_ID: Uuid = Uuid::from_u128(8);

    fn disk(n: u64) -> Uuid {
        Uuid::from_u128(100 + u128::from(n))
    }

    fn me(node_id: NodeId) -> NodeIdentity {
        NodeIdentity { cluster_id: CLUSTER, node_id, storage_id: disk(node_id), created_at_unix_ms: 0 }
    }

    fn state(members: u64, retired: &[NodeId]) -> State {
        let mut state = State::default();
        let mut apply = |n: u64, command| {
            let command_id = Uuid::from_u128(u128::from(n));
            let envelope =
                Envelope { command_id, actor: "t".into(), proposed_at_unix_ms: 0, expected_revision: None, command };
            state.apply(&envelope).accepted().unwrap();
        };
        apply(2_000, Command::InitCluster { cluster_id: CLUSTER, history_id: HISTORY_ID });
        for n in 1..=members {
            let (peer_address, api_address) = (format!("h:{n}"), String::new());
            apply(n, Command::RegisterMember { node_id: Some(n), storage_id: disk(n), peer_address, api_address });
        }
        apply(1_000, Command::RetireMembers { node_ids: retired.to_vec() });
        state
    }

    fn membership(ids: &[NodeId]) -> Membership {
        let nodes: BTreeMap<NodeId, Peer> =
            ids.iter().map(|id| (*id, Peer { address: format!("h:{id}"), storage_id: disk(*id) })).collect();
        Membership::new(vec![BTreeSet::from_iter(ids.iter().copied())], nodes).unwrap()
    }

    #[test]
    fn a_call_says_who_makes_it_and_whom_it_means() {
        let call = Call::new(&me(1), 2, disk(2));
        let mut metadata = MetadataMap::new();
        assert_eq!(Call::read(&metadata), Err(Refused::Nameless));
        call.sign(&mut metadata);
        assert_eq!(Call::read(&metadata), Ok(call));
        call.of(HISTORY_ID).sign(&mut metadata);
        assert_eq!(Call::read(&metadata), Ok(call.of(HISTORY_ID)));
        for (text, refused) in [("2 x", Refused::Protocol(2)), ("1 x", Refused::Nameless), ("", Refused::Nameless)] {
            metadata.insert(IDENTITY, text.parse().unwrap());
            assert_eq!(Call::read(&metadata), Err(refused), "{text}");
        }
    }

    #[test]
    fn only_the_member_that_is_meant_answers_and_only_to_members() {
        let (membership, state) = (membership(&[1, 2, 3]), state(4, &[4]));
        let admit = |call: Call| call.admit(&me(2), &membership, &state);
        let call = Call::new(&me(1), 2, disk(2));
        assert_eq!(admit(call), Ok(()));
        assert_eq!(admit(Call { to_storage: Uuid::nil(), ..call }), Ok(()), "a caller may not know the disk yet");
        assert!(matches!(admit(Call { cluster_id: Uuid::nil(), ..call }), Err(Refused::Cluster { .. })));
        assert!(matches!(admit(Call { to: 3, ..call }), Err(Refused::NotMe { .. })));
        assert!(matches!(admit(Call { to_storage: disk(9), ..call }), Err(Refused::NotMe { .. })));
        assert!(matches!(admit(Call { from_storage: disk(9), ..call }), Err(Refused::WrongDisk { .. })));
        assert_eq!(admit(Call::new(&me(4), 2, disk(2))), Err(Refused::Retired(4)));
        let refused = Refused::Retired(4).status();
        assert_eq!(refusal(&refused), Some(Refusal::Retired));
        assert_eq!(refusal(&Refused::Stranger(9).status()), Some(Refusal::Identity));
        assert_eq!(refusal(&Status::unavailable("no")), None);
    }

    #[test]
    fn members_of_another_history_are_told_which_is_the_older_one() {
        let old = state(3, &[]);
        let (new_history, new_disk) = (Uuid::from_u128(9), disk(4));
        let new = old.clone().begin_anew(new_history, new_disk, "h:1".into());
        // An old member looks for another one, at whose address the new one is.
        let call = Call::new(&me(2), 1, disk(1)).of(HISTORY_ID);
        let refused = call.admit(&me(4), &membership(&[4]), &new).unwrap_err();
        assert_eq!(refused, Refused::Past { from: 2, theirs: HISTORY_ID, ours: new_history });
        assert_eq!(
            refusal(&refused.status()),
            Some(Refusal::Identity),
            "it may be the other way round: it does not end by that"
        );
        // The new one calls where an old one is.
        let call = Call::new(&me(4), 2, disk(2)).of(new_history);
        let refused = call.admit(&me(2), &membership(&[1, 2, 3]), &old);
        assert_eq!(refused, Err(Refused::History { from: 4, theirs: new_history, ours: HISTORY_ID }));
        // Who has no state yet has no history.
        let call = Call::new(&me(1), 2, disk(2));
        assert_eq!(call.admit(&me(2), &membership(&[1, 2, 3]), &old), Ok(()));
        assert_eq!(call.of(HISTORY_ID).admit(&me(2), &membership(&[1, 2, 3]), &old), Ok(()));
        let nothing = State::default();
        assert_eq!(call.of(HISTORY_ID).admit(&me(2), &membership(&[1, 2, 3]), &nothing), Ok(()));
    }

    #[test]
    fn a_member_that_is_behind_lets_in_whom_it_cannot_know_yet() {
        let (membership, state) = (membership(&[1, 2, 3]), state(3, &[]));
        assert_eq!(Call::new(&me(9), 2, disk(2)).admit(&me(2), &membership, &state), Ok(()));
        let (fresh, nothing) = (Membership::default(), State::default());
        assert_eq!(Call::new(&me(1), 9, disk(9)).admit(&me(9), &fresh, &nothing), Ok(()));
    }

    #[test]
    fn a_retired_member_is_heard_until_the_membership_is_without_it() {
        let call = Call::new(&me(3), 2, disk(2));
        let state = state(3, &[3]);
        assert_eq!(call.admit(&me(2), &membership(&[1, 2, 3]), &state), Ok(()));
        assert_eq!(call.admit(&me(2), &membership(&[1, 2]), &state), Err(Refused::Retired(3)));
    }
}
