//! `/workers`: the documented system's resource.
//!
//! Creation, replacement and removal are accepted with 202 once they are durable and carried out by a job; `job_status` of the worker says
//! how it goes. A job that failed stays readable at the worker's location until it is forgotten.

use axum::Json;
use axum::body::Body;
use axum::extract::State;
use axum::http::request::Parts;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::json;
use smg_fleet::info::{serves, worker_info, worker_list};
use smg_fleet::validate::{worker_patch, worker_spec};
use smg_fleet::worker::WorkerPatch;
use smg_fleet::{Origin, Runtime, WorkerId, WorkerSpec};
use smg_state::{Command, Outcome};
use uuid::Uuid;

use super::error::ApiError;
use super::intake::PathParameter;
use super::{Admin, at_revision, intake, tagged};

pub(super) async fn list(State(admin): State<Admin>, parts: Parts) -> Result<Response, ApiError> {
    let model = intake::query(&parts.uri, "model")?;
    let state = admin.read(intake::consistency(&parts.uri)?).await?;
    let served =
        |worker: &&std::sync::Arc<smg_fleet::Worker>| model.as_deref().is_none_or(|model| serves(worker, model));
    let list = worker_list(state.workers().filter(served).map(AsRef::as_ref));
    Ok(at_revision(state.revision(), Json(list)))
}

pub(super) async fn show(
    State(admin): State<Admin>,
    PathParameter(id): PathParameter,
    parts: Parts,
) -> Result<Response, ApiError> {
    let id = intake::worker_id(&id)?;
    let state = admin.read(intake::consistency(&parts.uri)?).await?;
    let worker = state.worker(id).ok_or_else(|| ApiError::WorkerNotFound(id.to_string()))?;
    Ok(tagged(worker.mod_revision, at_revision(state.revision(), Json(worker_info(worker)))))
}

pub(super) async fn create(State(admin): State<Admin>, parts: Parts, body: Body) -> Result<Response, ApiError> {
    let bytes = intake::body(&parts, body, admin.max_body_bytes).await?;
    let spec = spec(intake::json(&parts, &bytes)?)?;
    let url = spec.url.clone();
    let command = Command::CreateWorker { id: WorkerId(Uuid::now_v7()), spec: Box::new(spec), origin: Origin::Api };
    let outcome = admin.writer.write(intake::write(&parts, &bytes, command)?).await?;
    let Some(id) = outcome.worker_id else {
        return Err(ApiError::BadRequest("the command with this Idempotency-Key created no worker".to_owned()));
    };
    let location = format!("/workers/{id}");
    let accepted = json!({
        "status": "accepted",
        "worker_id": id,
        "url": url,
        "location": location,
        "message": "Worker addition queued for background processing",
    });
    Ok(at_revision(outcome.revision, (StatusCode::ACCEPTED, [(header::LOCATION, location)], Json(accepted))))
}

pub(super) async fn replace(
    State(admin): State<Admin>,
    PathParameter(id): PathParameter,
    parts: Parts,
    body: Body,
) -> Result<Response, ApiError> {
    let id = intake::worker_id(&id)?;
    let bytes = intake::body(&parts, body, admin.max_body_bytes).await?;
    let spec = Box::new(spec(intake::json(&parts, &bytes)?)?);
    let write = intake::write(&parts, &bytes, Command::ReplaceWorker { id, spec })?;
    Ok(queued(id, &admin.writer.write(write).await?, "Worker update queued for background processing"))
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
    worker_patch(&patch).map_err(|error| ApiError::BadRequest(error.to_string()))?;
    let write = intake::write(&parts, &bytes, Command::PatchWorker { id, patch: Box::new(patch) })?;
    Ok(queued(id, &admin.writer.write(write).await?, "Worker update queued for background processing"))
}

pub(super) async fn remove(
    State(admin): State<Admin>,
    PathParameter(id): PathParameter,
    parts: Parts,
) -> Result<Response, ApiError> {
    let id = intake::worker_id(&id)?;
    let write = intake::write(&parts, &[], Command::RemoveWorker { id })?;
    Ok(queued(id, &admin.writer.write(write).await?, "Worker removal queued for background processing"))
}

fn queued(id: WorkerId, outcome: &Outcome, message: &str) -> Response {
    let accepted = json!({"status": "accepted", "worker_id": id, "message": message});
    at_revision(outcome.revision, (StatusCode::ACCEPTED, Json(accepted)).into_response())
}

/// A spec in the form that is stored.
fn spec(mut spec: WorkerSpec) -> Result<WorkerSpec, ApiError> {
    if spec.provider.is_some() || spec.runtime == Runtime::External {
        let message = "this build has no provider routers: a worker must be an engine of its own";
        return Err(ApiError::Provider(message.to_owned()));
    }
    worker_spec(&mut spec).map_err(|error| ApiError::BadRequest(error.to_string()))?;
    Ok(spec)
}
