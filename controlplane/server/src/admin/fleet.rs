//! `/fleet/gateways` and `/fleet/cluster`: what this node knows about the system itself. Never waits for the store.

use axum::Json;
use axum::extract::State;
use axum::response::Response;
use serde_json::json;
use smg_store::Leadership;

use super::{Admin, at_revision};

/// The gateways that are, or lately were, connected to this node.
pub(super) async fn gateways(State(admin): State<Admin>) -> Response {
    let gateways = admin.gateways.list();
    let revision = admin.writer.store().local().revision();
    at_revision(revision, Json(json!({"total": gateways.len(), "gateways": gateways})))
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
