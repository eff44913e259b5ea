//! `/fleet/gateways`: who follows this node. Waits for the store only where it says so.

use axum::Json;
use axum::extract::State;
use axum::response::Response;
use serde_json::json;

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
