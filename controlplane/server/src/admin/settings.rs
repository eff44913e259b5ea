//! `/fleet/settings`: settings of the cluster as a whole.

use axum::Json;
use axum::body::Body;
use axum::extract::State;
use axum::http::request::Parts;
use axum::response::Response;
use serde_json::json;
use smg_fleet::ClusterSettings;
use smg_state::Command;

use super::error::ApiError;
use super::{Admin, at_revision, intake, tagged};

pub(super) async fn show(State(admin): State<Admin>, parts: Parts) -> Result<Response, ApiError> {
    let state = admin.read(intake::consistency(&parts.uri)?).await?;
    let (settings, mod_revision) = state.settings();
    let body = json!({"settings": settings, "mod_revision": mod_revision});
    Ok(tagged(mod_revision, at_revision(state.revision(), Json(body))))
}

pub(super) async fn put(State(admin): State<Admin>, parts: Parts, body: Body) -> Result<Response, ApiError> {
    let bytes = intake::body(&parts, body, admin.max_body_bytes).await?;
    let settings: ClusterSettings = intake::json(&parts, &bytes)?;
    settings.validate().map_err(|error| ApiError::BadRequest(error.to_string()))?;
    let command = Command::PutSettings { settings: settings.clone() };
    let outcome = admin.writer.write(intake::write(&parts, &bytes, command)?).await?;
    let body = json!({"settings": settings, "mod_revision": outcome.revision});
    Ok(tagged(outcome.revision, at_revision(outcome.revision, Json(body))))
}
