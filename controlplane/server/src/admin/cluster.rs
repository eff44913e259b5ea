//! `/fleet/cluster`: the members of the control plane, and changing them.

use std::collections::BTreeSet;

use axum::Json;
use axum::body::Body;
use axum::extract::State;
use axum::http::request::Parts;
use axum::response::Response;
use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::json;
use smg_state::NodeId;
use smg_store::cluster::MemberChange;

use super::error::ApiError;
use super::{Admin, at_revision, intake, rehearsed};

/// The members as the leader sees them, and the state of this one.
pub(super) async fn show(State(admin): State<Admin>, parts: Parts) -> Result<Response, ApiError> {
    let cluster = admin.service.cluster(intake::consistency(&parts.uri)?).await?;
    Ok(at_revision(cluster.revision, Json(cluster)))
}

/// The body of a join or a removal.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct Members {
    node_ids: Vec<NodeId>,
    /// Whether the number of voters may become even.
    #[serde(default)]
    allow_even: bool,
}

/// The body of a replacement.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct Replacement {
    node_id: NodeId,
    /// Absent = the only one that can.
    #[serde(default)]
    with: Option<NodeId>,
}

/// Lets members that follow vote.
pub(super) async fn join(State(admin): State<Admin>, parts: Parts, body: Body) -> Result<Response, ApiError> {
    let bytes = intake::body(&parts, body, admin.max_body_bytes).await?;
    let Members { node_ids, allow_even } = intake::json(&parts, &bytes)?;
    change(&admin, &parts, MemberChange::Promote { node_ids, allow_even }).await
}

/// Removes members for good.
pub(super) async fn remove(State(admin): State<Admin>, parts: Parts, body: Body) -> Result<Response, ApiError> {
    let bytes = intake::body(&parts, body, admin.max_body_bytes).await?;
    let Members { node_ids, allow_even } = intake::json(&parts, &bytes)?;
    let node_ids: BTreeSet<NodeId> = node_ids.into_iter().collect();
    change(&admin, &parts, MemberChange::Remove { node_ids: node_ids.into_iter().collect(), allow_even }).await
}

/// Replaces a voter by a member that has caught up.
pub(super) async fn replace(State(admin): State<Admin>, parts: Parts, body: Body) -> Result<Response, ApiError> {
    let bytes = intake::body(&parts, body, admin.max_body_bytes).await?;
    let Replacement { node_id, with } = intake::json(&parts, &bytes)?;
    change(&admin, &parts, MemberChange::Replace { old: node_id, new: with }).await
}

/// A change of the members is not repeated under an `Idempotency-Key`: one that was made already is refused as such.
async fn change(admin: &Admin, parts: &Parts, change: MemberChange) -> Result<Response, ApiError> {
    let call = intake::call(parts, &[])?;
    let dry_run = call.dry_run;
    let voters = json!({"voters": admin.service.change_members(call, change).await?});
    let revision = admin.service.local().revision();
    Ok(if dry_run { rehearsed(revision, voters) } else { at_revision(revision, Json(voters)) })
}
