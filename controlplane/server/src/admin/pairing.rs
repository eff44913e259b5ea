//! `/fleet/pairing`: which prefill pairs with which decode, and why others do not.

use axum::Json;
use axum::body::Body;
use axum::extract::State;
use axum::http::request::Parts;
use axum::response::Response;
use serde::Serialize;
use smg_fleet::Snapshot;
use smg_fleet::matrix::{self, MatrixError, Query};
use smg_fleet::validate::worker_spec;

use super::error::ApiError;
use super::{Admin, at_revision, intake};

impl From<MatrixError> for ApiError {
    fn from(error: MatrixError) -> Self {
        Self::BadRequest(error.to_string())
    }
}

pub(super) async fn show(State(admin): State<Admin>, parts: Parts) -> Result<Response, ApiError> {
    let query = Query::parse(intake::parameters(&parts.uri)?)?;
    answer(&admin, &parts, move |snapshot| matrix::matrix(snapshot, &query)).await
}

/// The body is a worker spec, as for `POST /workers`. Nothing is registered or probed.
pub(super) async fn explain(State(admin): State<Admin>, parts: Parts, body: Body) -> Result<Response, ApiError> {
    let query = Query::parse(intake::parameters(&parts.uri)?)?;
    let bytes = intake::body(&parts, body, admin.max_body_bytes).await?;
    let mut spec: smg_fleet::WorkerSpec = intake::json(&parts, &bytes)?;
    worker_spec(&mut spec).map_err(|error| ApiError::BadRequest(error.to_string()))?;
    answer(&admin, &parts, move |snapshot| matrix::explain(snapshot, spec, &query)).await
}

/// Works out an answer off the runtime's threads: a matrix may have millions of cells to count.
async fn answer<T: Serialize + Send + 'static>(
    admin: &Admin,
    parts: &Parts,
    work_out: impl FnOnce(&Snapshot) -> Result<T, MatrixError> + Send + 'static,
) -> Result<Response, ApiError> {
    let state = admin.read(intake::consistency(&parts.uri)?).await?;
    let revision = state.revision();
    let worked_out = tokio::task::spawn_blocking(move || work_out(&state.snapshot())).await;
    let Ok(answer) = worked_out else { return Err(ApiError::Internal("the matrix could not be worked out")) };
    Ok(at_revision(revision, Json(answer?)))
}
