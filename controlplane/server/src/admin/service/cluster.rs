//! The members of the control plane, and changing them.

use serde::Serialize;
use smg_fleet::Revision;
use smg_state::NodeId;
use smg_store::Leadership;
use smg_store::cluster::{ClusterStatus, MemberChange, MemberStatus};
use uuid::Uuid;

use super::{Call, Consistency, Service};
use crate::admin::error::ApiError;

/// A member that did not answer the leader for so long counts as unreachable, in milliseconds.
const UNREACHABLE_MS: u64 = 3_000;
/// A member that is further behind counts as lagging, in entries.
const LAGGING: u64 = 100;

/// The members as the leader sees them, and the state of the member that answers.
#[derive(Debug, Clone, Serialize, schemars::JsonSchema)]
pub(crate) struct Cluster {
    /// `leader` or `follower`, of the member that answers.
    pub role: &'static str,
    /// What people call the cluster.
    pub name: Option<String>,
    /// Which cluster.
    pub cluster_id: Uuid,
    /// Which history of it: another one after a restore.
    pub history_id: Uuid,
    /// The revision that the answering member has applied.
    pub revision: Revision,
    /// Why its store has stopped.
    pub store_failure: Option<String>,
    /// How many workers there are.
    pub workers: usize,
    /// How many gateways are connected to it.
    pub gateways: usize,
    /// Who answers.
    pub node_id: NodeId,
    /// Whether it hears a leader.
    pub in_contact: bool,
    /// The last entry in its state.
    pub applied_index: u64,
    /// The last entry in its newest snapshot.
    pub snapshot_index: u64,
    /// Who says what follows.
    pub seen_by: NodeId,
    /// Who leads.
    pub leader: Option<NodeId>,
    /// Since which election.
    pub term: u64,
    /// The last entry of the log.
    pub last_log_index: u64,
    /// The last committed entry.
    pub committed_index: u64,
    /// The members, in the order of their numbers.
    pub members: Vec<ClusterMember>,
}

/// One member.
#[derive(Debug, Clone, Serialize, schemars::JsonSchema)]
pub(crate) struct ClusterMember {
    /// Its number.
    pub node_id: NodeId,
    /// `leader`, `voter` or `learner`.
    pub role: &'static str,
    /// Where other members reach it.
    pub peer_address: String,
    /// Where operators and gateways reach it.
    pub api_address: String,
    /// Its disk.
    pub storage_id: Uuid,
    /// The last entry it has; known to the leader only.
    pub matched_index: Option<u64>,
    /// How many entries it is behind.
    pub lag: Option<u64>,
    /// Milliseconds since it answered the leader.
    pub heard_ms: Option<u64>,
    /// `ok`, `lagging`, `unreachable` or `unknown`.
    pub health: &'static str,
    /// What went wrong when it was called last.
    pub trouble: Option<String>,
}

impl ClusterMember {
    fn of(seen: &ClusterStatus, member: &MemberStatus) -> Self {
        let leads = seen.leader == Some(member.node_id);
        let role = match member.voter {
            _ if leads => "leader",
            true => "voter",
            false => "learner",
        };
        let lag = member.matched_index.map(|matched| seen.last_log_index.saturating_sub(matched));
        // Of a Raft log only the leader knows; where members ask each other, whoever did.
        let knows = seen.leader == Some(seen.node_id) || seen.members.iter().any(|member| member.heard_ms.is_some());
        let health = match (member.heard_ms, lag) {
            _ if !knows => "unknown",
            // The last call failed: it is gone before its silence says so.
            _ if member.trouble.is_some() => "unreachable",
            (Some(heard), Some(lag)) if heard < UNREACHABLE_MS && lag <= LAGGING => "ok",
            (Some(heard), _) if heard < UNREACHABLE_MS => "lagging",
            _ => "unreachable",
        };
        Self {
            node_id: member.node_id,
            role,
            peer_address: member.peer_address.clone(),
            api_address: member.api_address.clone(),
            storage_id: member.storage_id,
            matched_index: member.matched_index,
            lag,
            heard_ms: member.heard_ms,
            health,
            trouble: member.trouble.clone(),
        }
    }
}

impl Service {
    /// The members as the leader sees them, and the state of this one. With [`Consistency::Stale`], and while no leader answers, as this
    /// one sees them.
    pub(crate) async fn cluster(&self, consistency: Consistency) -> Result<Cluster, ApiError> {
        let store = self.writer.store();
        let seen = store.cluster(consistency == Consistency::Stale).await?;
        let here = store.cluster(true).await?;
        let state = store.local();
        let role = match *store.leadership().borrow() {
            Leadership::Leader => "leader",
            Leadership::Follower => "follower",
        };
        let store_failure = store.failure().borrow().clone();
        Ok(Cluster {
            role,
            name: state.settings().0.name.clone(),
            cluster_id: state.cluster_id(),
            history_id: state.history_id(),
            revision: state.revision(),
            store_failure,
            workers: state.workers().count(),
            gateways: self.gateways.here().connected(),
            node_id: here.node_id,
            in_contact: store.in_contact(),
            applied_index: here.applied_index,
            snapshot_index: here.snapshot_index,
            seen_by: seen.node_id,
            leader: seen.leader,
            term: seen.term,
            last_log_index: seen.last_log_index,
            committed_index: seen.committed_index,
            members: seen.members.iter().map(|member| ClusterMember::of(&seen, member)).collect(),
        })
    }

    /// Changes the members. Returns the voters after it: of a rehearsal those that there would be.
    pub(crate) async fn change_members(&self, call: Call, change: MemberChange) -> Result<Vec<NodeId>, ApiError> {
        let described = format!("{change:?}");
        let store = self.writer.store();
        if call.dry_run {
            return Ok(store.rehearse_members(change).await?);
        }
        let voters = store.change_members(change).await?;
        if self.access.audit {
            let actor = call.actor;
            tracing::info!(target: "smg::audit", actor, change = described, ?voters, "the members were changed");
        }
        Ok(voters)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn status(leader: Option<NodeId>, heard_ms: Option<u64>, matched_index: Option<u64>) -> ClusterStatus {
        let member = MemberStatus {
            node_id: 2,
            storage_id: Default::default(),
            peer_address: "b:7401".into(),
            api_address: "b:7400".into(),
            voter: true,
            matched_index,
            heard_ms,
            trouble: None,
        };
        ClusterStatus { node_id: 1, leader, last_log_index: 500, members: vec![member], ..ClusterStatus::default() }
    }

    #[test]
    fn the_health_of_a_member_is_what_the_leader_knows_of_it() {
        let health = |status: ClusterStatus| ClusterMember::of(&status, &status.members[0]).health;
        assert_eq!(health(status(Some(1), Some(100), Some(499))), "ok");
        assert_eq!(health(status(Some(1), Some(100), Some(99))), "lagging");
        assert_eq!(health(status(Some(1), Some(100), None)), "lagging");
        assert_eq!(health(status(Some(1), Some(9_000), Some(499))), "unreachable");
        assert_eq!(health(status(Some(1), None, None)), "unreachable");
        let mut gone = status(Some(1), Some(100), Some(499));
        gone.members[0].trouble = Some("connection refused".into());
        assert_eq!(health(gone), "unreachable");
        assert_eq!(health(status(Some(2), None, None)), "unknown");
        assert_eq!(health(status(None, None, None)), "unknown");
    }
}
