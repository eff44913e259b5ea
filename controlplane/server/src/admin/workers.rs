//! `/workers`: the documented system's resource.
//!
//! Creation, replacement and removal are accepted with 202 once they are durable and carried out by a job; `job_status` of the worker says
//! how it goes. A job that failed stays readable at the worker's location until it is forgotten.

use std::sync::Arc;

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
use smg_fleet::{Origin, Runtime, Settings, Worker, WorkerId, WorkerSpec, dp};
use smg_state::{Command, Outcome};
use uuid::Uuid;

use super::error::ApiError;
use super::intake::PathParameter;
use super::{Admin, at_revision, intake, tagged};

pub(super) async fn list(State(admin): State<Admin>, parts: Parts) -> Result<Response, ApiError> {
    let model = intake::query(&parts.uri, "model")?;
    let state = admin.read(intake::consistency(&parts.uri)?).await?;
    let served = |worker: &&Arc<Worker>| model.as_deref().is_none_or(|model| serves(worker, model));
    let aware = is_dp_aware(&state);
    let routed = |worker: &Arc<Worker>| {
        if aware { dp::ranks(worker) } else { vec![Arc::clone(worker)] }
    };
    let workers: Vec<_> = state.workers().filter(served).flat_map(routed).collect();
    let list = worker_list(workers.iter().map(AsRef::as_ref));
    Ok(at_revision(state.revision(), Json(list)))
}

pub(super) async fn show(
    State(admin): State<Admin>,
    PathParameter(id): PathParameter,
    parts: Parts,
) -> Result<Response, ApiError> {
    let id = intake::worker_id(&id)?;
    let state = admin.read(intake::consistency(&parts.uri)?).await?;
    let rank = || rank_with(&state, id).map(|(_, rank)| rank);
    let worker = state.worker(id).cloned().or_else(rank).ok_or_else(|| ApiError::WorkerNotFound(id.to_string()))?;
    Ok(tagged(worker.mod_revision, at_revision(state.revision(), Json(worker_info(&worker)))))
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
    if let Some((engine, rank)) = rank_with(&admin.writer.store().local(), id) {
        let message = format!("{} is a rank of worker {engine}: remove that one", rank.spec.url);
        return Err(ApiError::BadRequest(message));
    }
    let write = intake::write(&parts, &[], Command::RemoveWorker { id })?;
    Ok(queued(id, &admin.writer.write(write).await?, "Worker removal queued for background processing"))
}

/// Whether ranks are shown as workers.
fn is_dp_aware(state: &smg_state::State) -> bool {
    Settings::resolve(None, state.policy("").map(|record| &record.document)).dp_aware
}

/// The data-parallel rank with this id, and its engine's id.
fn rank_with(state: &smg_state::State, id: WorkerId) -> Option<(WorkerId, Arc<Worker>)> {
    if !is_dp_aware(state) || state.worker(id).is_some() {
        return None;
    }
    let ranks = |worker: &Arc<Worker>| Some((worker.id, dp::ranks(worker).into_iter().find(|rank| rank.id == id)?));
    state.workers().find_map(ranks)
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
