//! `/workers`: the documented system's resource, and `/fleet/workers/{id}/intent`: in rotation or not.
//!
//! Creation, replacement and removal are accepted with 202 once they are durable and carried out by a job; `job_status` of the worker says
//! how it goes. A job that failed stays readable at the worker's location until it is forgotten.

use axum::Json;
use axum::body::Body;
use axum::extract::State;
use axum::http::request::Parts;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::{Value, json};
use smg_fleet::info::{worker_info, worker_list};
use smg_fleet::worker::WorkerPatch;
use smg_fleet::{Intent, WorkerId};

use super::error::ApiError;
use super::intake::PathParameter;
use super::service::Change;
use super::service::watch::Followed;
use super::service::workers::Occupation;
use super::{Admin, at_revision, changed, intake, tagged, watches};

pub(super) async fn list(State(admin): State<Admin>, parts: Parts) -> Result<Response, ApiError> {
    let model = intake::query(&parts.uri, "model")?;
    if watches::is_asked(&parts.uri)? {
        return watches::answer(&admin, &parts.uri, Followed::Workers { model }).await;
    }
    let (state, workers) = admin.service.list_workers(intake::consistency(&parts.uri)?, model.as_deref()).await?;
    Ok(at_revision(state.revision(), Json(worker_list(workers.iter().map(AsRef::as_ref)))))
}

pub(super) async fn show(
    State(admin): State<Admin>,
    PathParameter(id): PathParameter,
    parts: Parts,
) -> Result<Response, ApiError> {
    let id = intake::worker_id(&id)?;
    let (state, worker) = admin.service.worker(intake::consistency(&parts.uri)?, id).await?;
    Ok(tagged(worker.mod_revision, at_revision(state.revision(), Json(worker_info(&worker)))))
}

pub(super) async fn create(State(admin): State<Admin>, parts: Parts, body: Body) -> Result<Response, ApiError> {
    let bytes = intake::body(&parts, body, admin.max_body_bytes).await?;
    let spec = intake::json(&parts, &bytes)?;
    let (change, id, url) = admin.service.create_worker(intake::call(&parts, &bytes)?, spec).await?;
    let location = format!("/workers/{id}");
    let accepted = json!({
        "status": "accepted",
        "worker_id": id,
        "url": url,
        "location": location,
        "message": "Worker addition queued for background processing",
    });
    let made = || (StatusCode::ACCEPTED, [(header::LOCATION, location)], Json(accepted)).into_response();
    Ok(changed(&change, || after(&change, id), made))
}

pub(super) async fn replace(
    State(admin): State<Admin>,
    PathParameter(id): PathParameter,
    parts: Parts,
    body: Body,
) -> Result<Response, ApiError> {
    let id = intake::worker_id(&id)?;
    let bytes = intake::body(&parts, body, admin.max_body_bytes).await?;
    let spec = intake::json(&parts, &bytes)?;
    let change = admin.service.replace_worker(intake::call(&parts, &bytes)?, id, spec).await?;
    Ok(queued(id, &change, "Worker update queued for background processing"))
}

pub(super) async fn patch(
    State(admin): State<Admin>,
    PathParameter(id): PathParameter,
    parts: Parts,
    body: Body,
) -> Result<Response, ApiError> {
    let id = intake::worker_id(&id)?;
    let bytes = intake::body(&parts, body, admin.max_body_bytes).await?;
    let patch: WorkerPatch = intake::json(&parts, &bytes)?;
    let change = admin.service.patch_worker(intake::call(&parts, &bytes)?, id, patch).await?;
    Ok(queued(id, &change, "Worker update queued for background processing"))
}

pub(super) async fn remove(
    State(admin): State<Admin>,
    PathParameter(id): PathParameter,
    parts: Parts,
) -> Result<Response, ApiError> {
    let id = intake::worker_id(&id)?;
    let change = admin.service.remove_worker(intake::call(&parts, &[])?, id).await?;
    Ok(queued(id, &change, "Worker removal queued for background processing"))
}

/// What a worker is after a change; null when it is gone.
fn after(change: &Change, id: WorkerId) -> Value {
    change.state.worker(id).map_or(Value::Null, |worker| worker_info(worker))
}

fn queued(id: WorkerId, change: &Change, message: &str) -> Response {
    let accepted = || json!({"status": "accepted", "worker_id": id, "message": message});
    changed(change, || after(change, id), || (StatusCode::ACCEPTED, Json(accepted())).into_response())
}

/// The body of `PUT /fleet/workers/{id}/intent`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct NewIntent {
    intent: Intent,
}

fn occupation(occupation: &Occupation) -> Value {
    let worker = &occupation.worker;
    json!({
        "worker_id": worker.id,
        "url": worker.spec.url,
        "intent": worker.intent.as_str(),
        "mod_revision": worker.mod_revision,
        "idle": occupation.is_idle(),
        "busy_gateways": occupation.busy_gateways,
        "unheard_members": occupation.unheard_members,
    })
}

/// What an operator wants with a worker, and whether requests still run on one that is out of rotation.
pub(super) async fn show_intent(
    State(admin): State<Admin>,
    PathParameter(id): PathParameter,
    parts: Parts,
) -> Result<Response, ApiError> {
    let id = intake::worker_id(&id)?;
    let (state, found) = admin.service.occupation(intake::consistency(&parts.uri)?, id).await?;
    Ok(tagged(found.worker.mod_revision, at_revision(state.revision(), Json(occupation(&found)))))
}

/// Takes a worker out of rotation (`cordoned`) or brings it back (`active`).
pub(super) async fn put_intent(
    State(admin): State<Admin>,
    PathParameter(id): PathParameter,
    parts: Parts,
    body: Body,
) -> Result<Response, ApiError> {
    let id = intake::worker_id(&id)?;
    let bytes = intake::body(&parts, body, admin.max_body_bytes).await?;
    let NewIntent { intent } = intake::json(&parts, &bytes)?;
    let change = admin.service.set_intent(intake::call(&parts, &bytes)?, id, intent).await?;
    let body = json!({"worker_id": id, "intent": intent.as_str(), "mod_revision": change.outcome.revision});
    Ok(changed(&change, || body.clone(), || Json(&body).into_response()))
}
