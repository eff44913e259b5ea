//! `/fleet/gateways`: who follows the control plane. Waits for the store only where it says so.

use axum::Json;
use axum::extract::State;
use axum::http::request::Parts;
use axum::response::Response;
use serde_json::json;

use super::error::ApiError;
use super::intake::{self, Consistency};
use super::{Admin, at_revision};
use crate::sync::everywhere::Everywhere;

/// The gateways that are, or lately were, connected to any member; with `consistency=stale` to this one.
pub(super) async fn gateways(State(admin): State<Admin>, parts: Parts) -> Result<Response, ApiError> {
    let local = intake::consistency(&parts.uri)? == Consistency::Stale;
    let Everywhere { gateways, members } = admin.gateways.list(local).await?;
    let revision = admin.writer.store().local().revision();
    let body = json!({"total": gateways.len(), "gateways": gateways, "members": members});
    Ok(at_revision(revision, Json(body)))
}

/// The revision that holds every acknowledged write: a gateway that has it knows all there is to know.
pub(super) async fn revision(State(admin): State<Admin>) -> Result<Response, ApiError> {
    let revision = admin.writer.barrier().await?;
    Ok(at_revision(revision, Json(json!({"revision": revision}))))
}
