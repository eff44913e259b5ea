//! The admin API: REST under `/workers` (the documented system's resource) and `/fleet` (what this system adds).
//!
//! * [`service`] holds the operations; the files beside it read requests and write answers.
//! * Every answer carries `X-SMG-Revision`: for a write the revision that holds it, for a read the revision that was read. A gateway that
//!   forwards admin calls waits for it, so that its next answer includes the write.
//! * Reads are linearizable unless they say `?consistency=stale`. Single objects carry an `ETag` with their `mod_revision`; writes accept
//!   it back in `If-Match`.
//! * `Idempotency-Key: <uuid>` makes a repeated write the same write: it is answered again and not applied again.
//! * `?dry_run=true` rehearses a write: 200 with `{"dry_run": true, "revision", "result"}`, and nothing is changed.
//! * `?watch=true` on a list answers with a line of JSON per change ([`watches`]).
//! * [`operations`] is the one list of them all: the router is built from it, and so is `docs/reference/openapi.json`.
//! * [`access`] decides who may ask; changes carry the name of the token that asked.
//! * Errors are `{"error": "<message>", "code": "<CODE>"}`, of changes with `outcome`; [`error`] is the one place that knows them.

use axum::extract::{Request, State};
use axum::http::{HeaderName, HeaderValue, Method, Uri};
use axum::middleware::{Next, from_fn, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::{Json, Router};
use serde_json::{Value, json};
use smg_fleet::Revision;

pub mod access;
mod admission;
mod audit;
mod backups;
mod cluster;
pub mod error;
mod fleet;
mod intake;
mod operations;
#[cfg(test)]
mod operations_test;
mod pairing;
mod policies;
pub(crate) mod rpc;
#[cfg(test)]
mod rpc_test;
pub(crate) mod service;
mod settings;
mod shapes;
#[cfg(test)]
mod tests;
mod tokens;
mod watches;
mod workers;

use error::ApiError;
use service::{Change, Service};

/// Name of the header with the state's revision.
pub const REVISION_HEADER: &str = "x-smg-revision";

/// What handlers share.
#[derive(Clone)]
struct Admin {
    service: Service,
    max_body_bytes: usize,
}

/// The routes of the admin API.
pub(crate) fn router(service: Service, max_body_bytes: usize) -> Router {
    let admin = Admin { service, max_body_bytes };
    operations::router(false)
        .fallback(unknown_route)
        .method_not_allowed_fallback(wrong_method)
        .layer(from_fn_with_state(admin.clone(), access::authenticate))
        // A number that tells nothing about the fleet: gateways ask for it on behalf of clients, who are nobody here.
        .merge(operations::router(true).layer(from_fn(access::parts_only)))
        .layer(from_fn(error::with_fate))
        .layer(from_fn_with_state(admin.clone(), with_revision))
        .with_state(admin)
}

async fn unknown_route(method: Method, uri: Uri) -> ApiError {
    ApiError::UnknownRoute(format!("no such resource: {method} {}", uri.path()))
}

async fn wrong_method(method: Method, uri: Uri) -> ApiError {
    ApiError::WrongMethod(format!("{method} is not allowed on {}", uri.path()))
}

/// Answers that did not name a revision get the local one.
async fn with_revision(State(admin): State<Admin>, request: Request, next: Next) -> Response {
    let mut response = next.run(request).await;
    let revision = admin.service.local().revision();
    response.headers_mut().entry(HeaderName::from_static(REVISION_HEADER)).or_insert(HeaderValue::from(revision));
    response
}

/// Puts a revision on an answer.
fn at_revision(revision: Revision, response: impl IntoResponse) -> Response {
    let mut response = response.into_response();
    response.headers_mut().insert(REVISION_HEADER, HeaderValue::from(revision));
    response
}

/// Puts the object's own revision on an answer.
fn tagged(mod_revision: Revision, mut response: Response) -> Response {
    if let Ok(tag) = HeaderValue::from_str(&format!("\"{mod_revision}\"")) {
        response.headers_mut().insert(axum::http::header::ETAG, tag);
    }
    response
}

/// The answer to a rehearsal, with what the change would lead to; null = nothing would be left.
fn rehearsed(revision: Revision, result: Value) -> Response {
    Json(json!({"dry_run": true, "revision": revision, "result": result})).into_response()
}

/// The answer to a change: of a rehearsal with `result`, else as `made` says.
fn changed(change: &Change, result: impl FnOnce() -> Value, made: impl FnOnce() -> Response) -> Response {
    if change.dry_run {
        rehearsed(change.outcome.revision, result())
    } else {
        at_revision(change.outcome.revision, made())
    }
}
