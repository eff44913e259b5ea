//! `/fleet/cluster`: the members of the control plane, and changing them.

use std::collections::BTreeSet;

use axum::Json;
use axum::body::Body;
use axum::extract::State;
use axum::http::request::Parts;
use axum::response::Response;
use serde::Deserialize;
use serde_json::{Value, json};
use smg_state::NodeId;
use smg_store::Leadership;
use smg_store::cluster::{ClusterStatus, MemberChange, MemberStatus};

use super::error::ApiError;
use super::intake::{self, Consistency};
use super::{Admin, at_revision};

/// A member that did not answer the leader for so long counts as unreachable, in milliseconds.
const UNREACHABLE_MS: u64 = 3_000;
/// A member that is further behind counts as lagging, in entries.
const LAGGING: u64 = 100;

/// The members as the leader sees them, and the state of this one. With `consistency=stale`, and while no leader answers, as this one
/// sees them.
pub(super) async fn show(State(admin): State<Admin>, parts: Parts) -> Result<Response, ApiError> {
    let store = admin.writer.store();
    let local = intake::consistency(&parts.uri)? == Consistency::Stale;
    let seen = store.cluster(local).await?;
    let here = store.cluster(true).await?;
    let state = store.local();
    let role = match *store.leadership().borrow() {
        Leadership::Leader => "leader",
        Leadership::Follower => "follower",
    };
    let body = json!({
        "role": role,
        "name": state.settings().0.name,
        "cluster_id": state.cluster_id(),
        "history_id": state.history_id(),
        "revision": state.revision(),
        "store_failure": *store.failure().borrow(),
        "workers": state.workers().count(),
        "gateways": admin.gateways.here().connected(),
        "node_id": here.node_id,
        "in_contact": store.in_contact(),
        "applied_index": here.applied_index,
        "snapshot_index": here.snapshot_index,
        "seen_by": seen.node_id,
        "leader": seen.leader,
        "term": seen.term,
        "last_log_index": seen.last_log_index,
        "committed_index": seen.committed_index,
        "members": seen.members.iter().map(|member| member_view(&seen, member)).collect::<Vec<_>>(),
    });
    Ok(at_revision(state.revision(), Json(body)))
}

fn member_view(seen: &ClusterStatus, member: &MemberStatus) -> Value {
    let leads = seen.leader == Some(member.node_id);
    let role = match member.voter {
        _ if leads => "leader",
        true => "voter",
        false => "learner",
    };
    let lag = member.matched_index.map(|matched| seen.last_log_index.saturating_sub(matched));
    let health = match (member.heard_ms, lag) {
        // Only the leader knows.
        _ if seen.leader != Some(seen.node_id) => "unknown",
        (Some(heard), Some(lag)) if heard < UNREACHABLE_MS && lag <= LAGGING => "ok",
        (Some(heard), _) if heard < UNREACHABLE_MS => "lagging",
        _ => "unreachable",
    };
    json!({
        "node_id": member.node_id,
        "role": role,
        "peer_address": member.peer_address,
        "api_address": member.api_address,
        "storage_id": member.storage_id,
        "matched_index": member.matched_index,
        "lag": lag,
        "heard_ms": member.heard_ms,
        "health": health,
        "trouble": member.trouble,
    })
}

/// The body of a join or a removal.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Members {
    node_ids: Vec<NodeId>,
    /// Whether the number of voters may become even.
    #[serde(default)]
    allow_even: bool,
}

/// The body of a replacement.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Replacement {
    node_id: NodeId,
    /// Absent = the only one that can.
    #[serde(default)]
    with: Option<NodeId>,
}

/// Lets members that follow vote.
pub(super) async fn join(State(admin): State<Admin>, parts: Parts, body: Body) -> Result<Response, ApiError> {
    let bytes = intake::body(&parts, body, admin.max_body_bytes).await?;
    let Members { node_ids, allow_even } = intake::json(&parts, &bytes)?;
    change(&admin, MemberChange::Promote { node_ids, allow_even }).await
}

/// Removes members for good.
pub(super) async fn remove(State(admin): State<Admin>, parts: Parts, body: Body) -> Result<Response, ApiError> {
    let bytes = intake::body(&parts, body, admin.max_body_bytes).await?;
    let Members { node_ids, allow_even } = intake::json(&parts, &bytes)?;
    let node_ids: BTreeSet<NodeId> = node_ids.into_iter().collect();
    change(&admin, MemberChange::Remove { node_ids: node_ids.into_iter().collect(), allow_even }).await
}

/// Replaces a voter by a member that has caught up.
pub(super) async fn replace(State(admin): State<Admin>, parts: Parts, body: Body) -> Result<Response, ApiError> {
    let bytes = intake::body(&parts, body, admin.max_body_bytes).await?;
    let Replacement { node_id, with } = intake::json(&parts, &bytes)?;
    change(&admin, MemberChange::Replace { old: node_id, new: with }).await
}

async fn change(admin: &Admin, change: MemberChange) -> Result<Response, ApiError> {
    let voters = admin.writer.store().change_members(change).await?;
    Ok(at_revision(admin.writer.store().local().revision(), Json(json!({"voters": voters}))))
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
        let health = |status: ClusterStatus| member_view(&status, &status.members[0])["health"].clone();
        assert_eq!(health(status(Some(1), Some(100), Some(499))), "ok");
        assert_eq!(health(status(Some(1), Some(100), Some(99))), "lagging");
        assert_eq!(health(status(Some(1), Some(100), None)), "lagging");
        assert_eq!(health(status(Some(1), Some(9_000), Some(499))), "unreachable");
        assert_eq!(health(status(Some(1), None, None)), "unreachable");
        assert_eq!(health(status(Some(2), None, None)), "unknown");
        assert_eq!(health(status(None, None, None)), "unknown");
    }
}
