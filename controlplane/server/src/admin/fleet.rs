//! `/fleet/gateways`: who follows the control plane. Waits for the store only where it says so.

use axum::Json;
use axum::extract::State;
use axum::http::request::Parts;
use axum::response::Response;
use serde_json::{Value, json};
use smg_fleet::Revision;

use super::error::ApiError;
use super::service::Consistency;
use super::service::watch::Followed;
use super::{Admin, at_revision, intake, watches};
use crate::sync::everywhere::{Everywhere, Seen};

/// A gateway, and how far it is behind `revision`.
pub(super) fn gateway(seen: &Seen, revision: Revision) -> Value {
    let record = &seen.record;
    let mut shown = json!(seen);
    shown["behind"] = json!(revision.saturating_sub(record.acked_revision));
    shown["silent_ms"] = json!(smg_net::unix_millis().saturating_sub(record.last_seen_unix_ms));
    shown
}

/// The gateways that are, or lately were, connected to any member; with `consistency=stale` to this one.
pub(super) async fn gateways(State(admin): State<Admin>, parts: Parts) -> Result<Response, ApiError> {
    if watches::is_asked(&parts.uri)? {
        return watches::answer(&admin, &parts.uri, Followed::Gateways).await;
    }
    let local = intake::consistency(&parts.uri)? == Consistency::Stale;
    let Everywhere { gateways, members } = admin.service.gateways.list(local).await?;
    let revision = admin.service.local().revision();
    let gateways: Vec<Value> = gateways.iter().map(|seen| gateway(seen, revision)).collect();
    let body = json!({"total": gateways.len(), "gateways": gateways, "members": members});
    Ok(at_revision(revision, Json(body)))
}

/// The revision that holds every acknowledged write: a gateway that has it knows all there is to know.
pub(super) async fn revision(State(admin): State<Admin>) -> Result<Response, ApiError> {
    let revision = admin.service.writer.barrier().await?;
    Ok(at_revision(revision, Json(json!({"revision": revision}))))
}
