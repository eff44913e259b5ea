//! Probes, the model list, and decision records.

use axum::body::Body;
use axum::extract::{Query, State};
use http::{HeaderValue, Response, StatusCode, header};
use serde::Deserialize;
use serde_json::{Value, json};

use super::Front;
use super::error::GatewayError;
use crate::fleet::table::UNKNOWN_MODEL;

/// Most decision records in one answer.
const MAX_LISTED: usize = 200;

/// A JSON response.
pub(super) fn json_response(status: StatusCode, body: &Value) -> Response<Body> {
    let mut response = Response::new(Body::from(body.to_string()));
    *response.status_mut() = status;
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}

/// `GET /health`, `GET /liveness`: the process runs.
pub(super) async fn alive() -> &'static str {
    "OK"
}

/// `GET /readiness`: whether a whole request can be served, with the age of the fleet's state.
pub(super) async fn readiness(State(front): State<Front>) -> Response<Body> {
    let census = front.core.table.load().census();
    let reason = if front.core.draining.is_cancelled() {
        Some("draining")
    } else if census.is_ready() {
        None
    } else {
        Some("insufficient healthy workers")
    };
    let control_plane = front.link.status();
    let (status, mut body) = match reason {
        None => (
            StatusCode::OK,
            json!({"status": "ready", "healthy_workers": census.healthy, "total_workers": census.total}),
        ),
        Some(reason) => (StatusCode::SERVICE_UNAVAILABLE, json!({"status": "not ready", "reason": reason})),
    };
    // The documented fields stay as they are; detail is added only when there is something to say.
    if !control_plane.connected {
        body["control_plane"] = json!({
            "connected": false,
            "stale_seconds": control_plane.stale_seconds,
            "revision": *front.core.revision.borrow(),
        });
    }
    if let Some(failure) = control_plane.store_failure {
        body["store_failure"] = json!(failure);
    }
    json_response(status, &body)
}

/// `GET /v1/models`: the models of all registered workers.
pub(super) async fn models(State(front): State<Front>) -> Response<Body> {
    let table = front.core.table.load();
    let entry = |id: &str| json!({"id": id, "object": "model", "created": 0, "owned_by": "self_hosted"});
    let mut data: Vec<Value> = table.models().map(|id| entry(id)).collect();
    if data.is_empty() && table.has_wildcard() {
        data.push(entry(UNKNOWN_MODEL));
    }
    if data.is_empty() {
        return GatewayError::NoModels.into_response();
    }
    json_response(StatusCode::OK, &json!({"object": "list", "data": data}))
}

/// Query of `GET /fleet/decisions`.
#[derive(Debug, Deserialize)]
pub(super) struct DecisionQuery {
    request_id: Option<String>,
    limit: Option<usize>,
}

/// `GET /fleet/decisions?request_id=&limit=`: decision records of this gateway, newest first.
pub(super) async fn decisions(State(front): State<Front>, Query(query): Query<DecisionQuery>) -> Response<Body> {
    let limit = query.limit.unwrap_or(50).min(MAX_LISTED);
    let records = front.core.decisions.find(query.request_id.as_deref(), limit);
    json_response(StatusCode::OK, &json!({"gateway": front.core.options.gateway_id, "decisions": records}))
}
