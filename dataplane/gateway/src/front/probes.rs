//! Probes, the model list, and decision records.

use axum::body::Body;
use axum::extract::rejection::{PathRejection, QueryRejection};
use axum::extract::{Path, Query, State};
use http::{HeaderMap, HeaderName, HeaderValue, Response, StatusCode, header};
use serde::Deserialize;
use serde_json::{Value, json};
use smg_fleet::snapshot::FLEET_HEADER;

use super::Front;
use super::error::GatewayError;
use crate::fleet::table::UNKNOWN_MODEL;

const FLEET: HeaderName = HeaderName::from_static(FLEET_HEADER);
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

/// Says whose gateway answers a probe: the fleet's own control plane then takes it for no engine.
pub(super) async fn name_the_fleet(State(front): State<Front>, mut response: Response<Body>) -> Response<Body> {
    let fleet = front.core.table.load().snapshot.cluster_id;
    if let Ok(value) = HeaderValue::from_str(&fleet.to_string()) {
        response.headers_mut().insert(FLEET, value);
    }
    response
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

fn model_entry(id: &str, anthropic: bool) -> Value {
    if anthropic {
        return json!({"type": "model", "id": id, "display_name": id, "created_at": "1970-01-01T00:00:00Z"});
    }
    json!({"id": id, "object": "model", "created": 0, "owned_by": "self_hosted"})
}

/// `GET /v1/models`: the models of all registered workers, in the shape of the client's API.
pub(super) async fn models(State(front): State<Front>, headers: HeaderMap) -> Response<Body> {
    let table = front.core.table.load();
    let anthropic = headers.contains_key("anthropic-version");
    let mut ids: Vec<&str> = table.models().map(AsRef::as_ref).collect();
    if ids.is_empty() && table.has_wildcard() {
        ids.push(UNKNOWN_MODEL);
    }
    if ids.is_empty() {
        return GatewayError::NoModels.into_response();
    }
    let data: Vec<Value> = ids.iter().map(|id| model_entry(id, anthropic)).collect();
    let list = if anthropic {
        json!({"data": data, "has_more": false, "first_id": ids.first(), "last_id": ids.last()})
    } else {
        json!({"object": "list", "data": data})
    };
    json_response(StatusCode::OK, &list)
}

/// `GET /v1/models/{id}`: one of them, by its id.
pub(super) async fn model(
    State(front): State<Front>,
    id: Result<Path<String>, PathRejection>,
    headers: HeaderMap,
) -> Response<Body> {
    let id = match id {
        Ok(Path(id)) => id,
        Err(rejection) => return GatewayError::Url(rejection.body_text()).into_response(),
    };
    let known = || front.core.table.load().models().any(|known| **known == *id);
    if !known() {
        let current = front.core.freshness.is_current(&front.core).await;
        if !known() {
            let error = if current { GatewayError::ModelNotFound(id) } else { GatewayError::ModelUnknownYet(id) };
            return error.into_response();
        }
    }
    json_response(StatusCode::OK, &model_entry(&id, headers.contains_key("anthropic-version")))
}

/// Query of `GET /fleet/decisions`.
#[derive(Debug, Deserialize)]
pub(super) struct DecisionQuery {
    request_id: Option<String>,
    limit: Option<usize>,
}

/// `GET /fleet/decisions?request_id=&limit=`: decision records of this gateway, newest first.
pub(super) async fn decisions(
    State(front): State<Front>,
    query: Result<Query<DecisionQuery>, QueryRejection>,
) -> Response<Body> {
    let query = match query {
        Ok(Query(query)) => query,
        Err(rejection) => return GatewayError::Url(rejection.body_text()).into_response(),
    };
    let limit = query.limit.unwrap_or(50).min(MAX_LISTED);
    let records = front.core.decisions.find(query.request_id.as_deref(), limit);
    json_response(StatusCode::OK, &json!({"gateway": front.core.options.gateway_id, "decisions": records}))
}
