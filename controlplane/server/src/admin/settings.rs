//! `/fleet/settings`: settings of the cluster as a whole.

use axum::Json;
use axum::body::Body;
use axum::extract::State;
use axum::http::request::Parts;
use axum::response::{IntoResponse, Response};
use serde_json::json;
use smg_fleet::ClusterSettings;

use super::error::ApiError;
use super::{Admin, at_revision, changed, intake, tagged};

pub(super) async fn show(State(admin): State<Admin>, parts: Parts) -> Result<Response, ApiError> {
    let state = admin.service.read(intake::consistency(&parts.uri)?).await?;
    let (settings, mod_revision) = state.settings();
    let body = json!({"settings": settings, "mod_revision": mod_revision});
    Ok(tagged(mod_revision, at_revision(state.revision(), Json(body))))
}

pub(super) async fn put(State(admin): State<Admin>, parts: Parts, body: Body) -> Result<Response, ApiError> {
    let bytes = intake::body(&parts, body, admin.max_body_bytes).await?;
    let settings: ClusterSettings = intake::json(&parts, &bytes)?;
    let change = admin.service.put_settings(intake::call(&parts, &bytes)?, settings.clone()).await?;
    let mod_revision = change.outcome.revision;
    let body = json!({"settings": settings, "mod_revision": mod_revision});
    let made = || tagged(mod_revision, Json(&body).into_response());
    Ok(changed(&change, || body.clone(), made))
}
