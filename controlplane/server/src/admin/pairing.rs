//! `/fleet/pairing`: which prefill pairs with which decode, and why others do not.

use axum::Json;
use axum::body::Body;
use axum::extract::State;
use axum::http::request::Parts;
use axum::response::Response;
use smg_fleet::matrix::Query;

use super::error::ApiError;
use super::{Admin, at_revision, intake};

pub(super) async fn show(State(admin): State<Admin>, parts: Parts) -> Result<Response, ApiError> {
    let query = Query::parse(intake::parameters(&parts.uri)?)?;
    let (revision, matrix) = admin.service.pairing(intake::consistency(&parts.uri)?, query).await?;
    Ok(at_revision(revision, Json(matrix)))
}

/// The body is a worker spec, as for `POST /workers`. Nothing is registered or probed.
pub(super) async fn explain(State(admin): State<Admin>, parts: Parts, body: Body) -> Result<Response, ApiError> {
    let query = Query::parse(intake::parameters(&parts.uri)?)?;
    let bytes = intake::body(&parts, body, admin.max_body_bytes).await?;
    let spec = intake::json(&parts, &bytes)?;
    let consistency = intake::consistency(&parts.uri)?;
    let (revision, explanation) = admin.service.explain_pairing(consistency, query, spec).await?;
    Ok(at_revision(revision, Json(explanation)))
}
