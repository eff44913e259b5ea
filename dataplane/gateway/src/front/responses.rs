//! `GET` and `DELETE /v1/responses/{id}`: the responses that this gateway keeps.
//!
//! They need what inference needs. A response that an engine gave over HTTP is the engine's: it is not kept here.

use axum::body::Body;
use axum::extract::rejection::PathRejection;
use axum::extract::{Path, State};
use http::{HeaderMap, HeaderValue, Response, StatusCode, header};
use serde_json::json;

use super::Front;
use super::access;
use super::error::{GatewayError, envelope};
use super::probes::json_response;

type Id = Result<Path<String>, PathRejection>;

fn admitted(front: &Front, mut headers: HeaderMap, id: Id) -> Result<String, Box<Response<Body>>> {
    access::admit(&front.core.options.keys, &mut headers)
        .map_err(|denied| Box::new(access::refuse_inference(denied)))?;
    let unreadable = |rejection: PathRejection| Box::new(GatewayError::Url(rejection.body_text()).into_response());
    id.map(|Path(id)| id).map_err(unreadable)
}

fn not_found(id: &str) -> Response<Body> {
    envelope(StatusCode::NOT_FOUND, "response_not_found", &format!("Response with id '{id}' not found."))
}

/// The response as its client got it.
pub(super) async fn get(State(front): State<Front>, id: Id, headers: HeaderMap) -> Response<Body> {
    let id = match admitted(&front, headers, id) {
        Ok(id) => id,
        Err(refused) => return *refused,
    };
    let Some(stored) = front.core.responses.get(&id) else { return not_found(&id) };
    let mut response = Response::new(Body::from(stored.response.clone()));
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}

/// Forgets a response.
pub(super) async fn delete(State(front): State<Front>, id: Id, headers: HeaderMap) -> Response<Body> {
    let id = match admitted(&front, headers, id) {
        Ok(id) => id,
        Err(refused) => return *refused,
    };
    if !front.core.responses.delete(&id) {
        return not_found(&id);
    }
    json_response(StatusCode::OK, &json!({"id": id, "object": "response.deleted", "deleted": true}))
}
