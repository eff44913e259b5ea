//! `/fleet/gateways` and `/fleet/cluster`: what this node knows about the system itself. Waits for the store only where it says so.

use axum::Json;
use axum::extract::State;
use axum::response::Response;
use serde_json::json;
use smg_store::Leadership;

use super::error::ApiError;
use super::{Admin, at_revision};

/// The gateways that are, or lately were, connected to this node.
pub(super) async fn gateways(State(admin): State<Admin>) -> Response {
    let gateways = admin.gateways.list();
    let revision = admin.writer.store().local().revision();
    at_revision(revision, Json(json!({"total": gateways.len(), "gateways": gateways})))
}

/// The revision that holds every acknowledged write: a gateway that has it knows all there is to know.
pub(super) async fn revision(State(admin): State<Admin>) -> Result<Response, ApiError> {
    let revision = admin.writer.barrier().await?;
    Ok(at_revision(revision, Json(json!({"revision": revision}))))
}

/// The state of this node's store.
pub(super) async fn cluster(State(admin): State<Admin>) -> Response {
    let store = admin.writer.store();
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
        "gateways": admin.gateways.connected(),
    });
    at_revision(state.revision(), Json(body))
}
