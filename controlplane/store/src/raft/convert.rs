//! Between openraft's types and the messages on disk. Our own messages, so that the disk outlives a change of the library.

use std::collections::{BTreeMap, BTreeSet};

use openraft::EntryPayload;
use smg_fleet::wire::WireError;
use smg_messages::disk as pb;
use smg_state::codec;
use uuid::Uuid;

use super::types::{Entry, LogId, Membership, Peer, SnapshotMeta, StoredMembership, Vote};

type LeaderId = openraft::impls::leader_id_adv::LeaderId<u64, u64>;

pub(crate) fn log_id_to_pb(id: &LogId) -> pb::LogId {
    let leader = id.committed_leader_id();
    pb::LogId { term: leader.term, node_id: leader.node_id, index: id.index() }
}

pub(crate) fn log_id_from_pb(id: &pb::LogId) -> LogId {
    LogId::new(LeaderId { term: id.term, node_id: id.node_id }, id.index)
}

pub(crate) fn vote_to_pb(vote: &Vote) -> pb::Vote {
    let leader = vote.leader_id();
    pb::Vote { term: leader.term, node_id: leader.node_id, committed: vote.is_committed() }
}

pub(crate) fn vote_from_pb(vote: &pb::Vote) -> Vote {
    if vote.committed { Vote::new_committed(vote.term, vote.node_id) } else { Vote::new(vote.term, vote.node_id) }
}

fn peer_to_pb(peer: &Peer) -> pb::Node {
    let storage_id = if peer.storage_id.is_nil() { Vec::new() } else { peer.storage_id.as_bytes().to_vec() };
    pb::Node { address: peer.address.clone(), storage_id }
}

fn peer_from_pb(node: pb::Node) -> Result<Peer, WireError> {
    let storage_id = match node.storage_id.as_slice() {
        [] => Uuid::nil(),
        bytes => Uuid::from_slice(bytes).map_err(|_| WireError::Field("storage_id"))?,
    };
    Ok(Peer { address: node.address, storage_id })
}

fn membership_to_pb(membership: &Membership) -> pb::Membership {
    pb::Membership {
        configs: membership
            .get_joint_config()
            .iter()
            .map(|ids| pb::NodeSet { ids: ids.iter().copied().collect() })
            .collect(),
        nodes: membership.nodes().map(|(id, peer)| (*id, peer_to_pb(peer))).collect(),
    }
}

fn membership_from_pb(membership: pb::Membership) -> Result<Membership, WireError> {
    if membership.configs.is_empty() && membership.nodes.is_empty() {
        // What a node has before it belongs to any cluster; the constructor refuses it.
        return Ok(Membership::default());
    }
    let configs: Vec<BTreeSet<u64>> =
        membership.configs.into_iter().map(|config| config.ids.into_iter().collect()).collect();
    let nodes: BTreeMap<u64, Peer> = membership
        .nodes
        .into_iter()
        .map(|(id, node)| Ok((id, peer_from_pb(node)?)))
        .collect::<Result<_, WireError>>()?;
    Membership::new(configs, nodes).map_err(|_| WireError::Field("membership"))
}

pub(crate) fn stored_membership_to_pb(stored: &StoredMembership) -> pb::StoredMembership {
    pb::StoredMembership {
        log_id: stored.log_id().as_ref().map(log_id_to_pb),
        membership: Some(membership_to_pb(stored.membership())),
    }
}

pub(crate) fn stored_membership_from_pb(stored: pb::StoredMembership) -> Result<StoredMembership, WireError> {
    let membership = membership_from_pb(stored.membership.unwrap_or_default())?;
    Ok(StoredMembership::new(stored.log_id.as_ref().map(log_id_from_pb), membership))
}

pub(crate) fn entry_to_pb(entry: &Entry) -> pb::Entry {
    use pb::entry::Payload;
    let payload = match &entry.payload {
        EntryPayload::Blank => Payload::Blank(pb::Blank {}),
        EntryPayload::Normal(envelope) => Payload::Normal(codec::envelope_to_pb(envelope)),
        EntryPayload::Membership(membership) => Payload::Membership(membership_to_pb(membership)),
    };
    pb::Entry { log_id: Some(log_id_to_pb(&entry.log_id)), payload: Some(payload) }
}

pub(crate) fn entry_from_pb(entry: pb::Entry) -> Result<Entry, WireError> {
    use pb::entry::Payload;
    let log_id = entry.log_id.as_ref().map(log_id_from_pb).ok_or(WireError::Field("log_id"))?;
    let payload = match entry.payload.ok_or(WireError::Field("payload"))? {
        Payload::Blank(_) => EntryPayload::Blank,
        Payload::Normal(envelope) => EntryPayload::Normal(codec::envelope_from_pb(envelope)?),
        Payload::Membership(membership) => EntryPayload::Membership(membership_from_pb(membership)?),
    };
    Ok(Entry { log_id, payload })
}

pub(crate) fn snapshot_meta_from_pb(header: &pb::SnapshotHeader) -> Result<SnapshotMeta, WireError> {
    Ok(SnapshotMeta {
        last_log_id: header.last_log_id.as_ref().map(log_id_from_pb),
        last_membership: stored_membership_from_pb(header.membership.clone().unwrap_or_default())?,
    })
}
