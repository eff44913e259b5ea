//! What this member knows about the cluster, and asking others for what only they know.

use std::collections::BTreeMap;
use std::time::Duration;

use openraft::Instant as _;
use openraft::async_runtime::WatchReceiver;
use smg_services::raft as pb;
use smg_state::NodeId;
use uuid::Uuid;

use super::RaftStore;
use crate::StoreError;
use crate::cluster::{ClusterStatus, GatewayAnswer, MemberStatus};

/// For the answer of another member.
const TIMEOUT: Duration = Duration::from_secs(1);

impl RaftStore {
    /// What this member knows.
    pub(crate) fn status_here(&self) -> ClusterStatus {
        let metrics = self.raft.metrics().borrow_watched().clone();
        let me = self.identity();
        let state = self.published.state.load();
        let membership = metrics.membership_config.membership();
        let voters: Vec<NodeId> = membership.voter_ids().collect();
        let mut members: BTreeMap<NodeId, MemberStatus> = BTreeMap::new();
        for (id, peer) in membership.nodes() {
            let known = state.member(*id);
            let matched = metrics.replication.as_ref().and_then(|all| all.get(id)).copied().flatten();
            let heard = metrics.heartbeat.as_ref().and_then(|all| all.get(id)).and_then(Option::as_ref);
            let heard = heard.map(|at| u64::try_from(at.elapsed().as_millis()).unwrap_or(u64::MAX));
            let leads = metrics.current_leader == Some(me.node_id);
            let itself = *id == me.node_id && leads;
            members.insert(
                *id,
                MemberStatus {
                    node_id: *id,
                    storage_id: known.map_or(peer.storage_id, |member| member.storage_id),
                    peer_address: peer.address.clone(),
                    api_address: known.map(|member| member.api_address.clone()).unwrap_or_default(),
                    voter: voters.contains(id),
                    matched_index: if itself { metrics.last_log_index } else { matched.map(|id| id.index()) },
                    heard_ms: if itself { Some(0) } else { heard },
                    trouble: self.links.trouble(*id),
                },
            );
        }
        let index = |id: Option<super::types::LogId>| id.map_or(0, |id| id.index());
        ClusterStatus {
            node_id: me.node_id,
            leader: metrics.current_leader,
            term: metrics.current_term,
            last_log_index: metrics.last_log_index.unwrap_or_default(),
            committed_index: index(metrics.cluster_committed.max(metrics.local_committed)),
            applied_index: index(metrics.last_applied),
            snapshot_index: index(metrics.snapshot),
            members: members.into_values().collect(),
        }
    }

    /// What the leader knows, or this member when it is told to answer itself or no leader answers.
    pub(crate) async fn status_anywhere(&self, local: bool) -> Result<ClusterStatus, StoreError> {
        let here = self.status_here();
        let Some(leader) = here.leader.filter(|leader| !local && *leader != here.node_id) else { return Ok(here) };
        let Ok(link) = self.link_to(leader) else { return Ok(here) };
        let request = link.request(pb::StatusRequest {});
        match link.answer(TIMEOUT, link.client().status(request)).await {
            Ok(answer) if answer.leader == leader => Ok(from_pb(answer)),
            _ => Ok(here),
        }
    }
}

impl RaftStore {
    /// What the other members say of their gateways.
    pub(crate) async fn gateways_elsewhere(&self) -> Vec<GatewayAnswer> {
        let me = self.identity().node_id;
        let membership = self.membership();
        let others = membership.nodes().map(|(id, _)| *id).filter(|id| *id != me);
        futures::future::join_all(others.map(|id| async move { (id, self.gateways_of(id).await) })).await
    }

    async fn gateways_of(&self, member: NodeId) -> Result<Vec<u8>, String> {
        let link = self.link_to(member)?;
        let request = link.request(pb::GatewaysRequest {});
        let answer = link.answer(TIMEOUT, link.client().gateways(request)).await;
        answer.map(|answer| answer.json).map_err(|error| error.message().to_owned())
    }
}

pub(crate) fn to_pb(status: &ClusterStatus) -> pb::StatusResponse {
    pb::StatusResponse {
        node_id: status.node_id,
        leader: status.leader.unwrap_or_default(),
        term: status.term,
        last_log_index: status.last_log_index,
        committed_index: status.committed_index,
        applied_index: status.applied_index,
        snapshot_index: status.snapshot_index,
        members: status
            .members
            .iter()
            .map(|member| pb::MemberStatus {
                node_id: member.node_id,
                storage_id: member.storage_id.as_bytes().to_vec(),
                peer_address: member.peer_address.clone(),
                api_address: member.api_address.clone(),
                role: if member.voter { pb::Role::Voter } else { pb::Role::Learner } as i32,
                matched_index: member.matched_index,
                heard_ms: member.heard_ms,
                trouble: member.trouble.clone().unwrap_or_default(),
            })
            .collect(),
    }
}

fn from_pb(status: pb::StatusResponse) -> ClusterStatus {
    ClusterStatus {
        node_id: status.node_id,
        leader: Some(status.leader).filter(|leader| *leader != 0),
        term: status.term,
        last_log_index: status.last_log_index,
        committed_index: status.committed_index,
        applied_index: status.applied_index,
        snapshot_index: status.snapshot_index,
        members: status
            .members
            .into_iter()
            .map(|member| MemberStatus {
                node_id: member.node_id,
                storage_id: Uuid::from_slice(&member.storage_id).unwrap_or_default(),
                voter: member.role == pb::Role::Voter as i32,
                peer_address: member.peer_address,
                api_address: member.api_address,
                matched_index: member.matched_index,
                heard_ms: member.heard_ms,
                trouble: Some(member.trouble).filter(|trouble| !trouble.is_empty()),
            })
            .collect(),
    }
}
