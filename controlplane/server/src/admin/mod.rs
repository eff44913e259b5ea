//! The admin API: REST under `/workers` (the documented system's resource) and `/fleet` (what this system adds).
//!
//! * Every answer carries `X-SMG-Revision`: for a write the revision that holds it, for a read the revision that was read. A gateway that
//!   forwards admin calls waits for it, so that its next answer includes the write.
//! * Reads are linearizable unless they say `?consistency=stale`. Single objects carry an `ETag` with their `mod_revision`; writes accept
//!   it back in `If-Match`.
//! * `Idempotency-Key: <uuid>` makes a repeated write the same write: it is answered again and not applied again.
//! * [`access`] decides who may ask; changes carry the name of the token that asked.
//! * Errors are `{"error": "<message>", "code": "<CODE>"}`; [`error`] is the one place that knows codes and statuses.

use std::sync::Arc;

use axum::Router;
use axum::extract::{Request, State};
use axum::http::{HeaderValue, Method, Uri};
use axum::middleware::{Next, from_fn, from_fn_with_state};
use axum::response::Response;
use axum::routing::{get, post};
use smg_fleet::Revision;
use smg_store::StoreError;

use crate::sync::everywhere::AllGateways;
use crate::writer::Writer;

pub mod access;
mod cluster;
pub mod error;
mod fleet;
mod intake;
mod pairing;
mod policies;
mod settings;
#[cfg(test)]
mod tests;
mod tokens;
mod workers;

use access::AccessOptions;
use error::ApiError;

/// Name of the header with the state's revision.
pub const REVISION_HEADER: &str = "x-smg-revision";

/// What handlers share.
#[derive(Clone)]
struct Admin {
    writer: Writer,
    gateways: Arc<AllGateways>,
    max_body_bytes: usize,
    access: Arc<AccessOptions>,
}

/// The routes of the admin API.
pub fn router(writer: Writer, gateways: Arc<AllGateways>, max_body_bytes: usize, access: Arc<AccessOptions>) -> Router {
    let admin = Admin { writer, gateways, max_body_bytes, access };
    Router::new()
        .route("/workers", get(workers::list).post(workers::create))
        .route("/workers/{id}", get(workers::show).put(workers::replace).patch(workers::patch).delete(workers::remove))
        .route("/fleet/policies", get(policies::list))
        .route("/fleet/policies/{*model}", get(policies::show).put(policies::put).delete(policies::delete))
        .route("/fleet/pairing", get(pairing::show))
        .route("/fleet/pairing/explain", post(pairing::explain))
        .route("/fleet/settings", get(settings::show).put(settings::put))
        .route("/fleet/tokens", get(tokens::list).post(tokens::create))
        .route("/fleet/tokens/{id}", get(tokens::show).delete(tokens::revoke))
        .route("/fleet/whoami", get(tokens::whoami))
        .route("/fleet/gateways", get(fleet::gateways))
        .route("/fleet/cluster", get(cluster::show))
        .route("/fleet/cluster/join", post(cluster::join))
        .route("/fleet/cluster/remove", post(cluster::remove))
        .route("/fleet/cluster/replace", post(cluster::replace))
        .fallback(unknown_route)
        .method_not_allowed_fallback(wrong_method)
        .layer(from_fn_with_state(admin.clone(), access::authenticate))
        // A number that tells nothing about the fleet: gateways ask for it on behalf of clients, who are nobody here.
        .merge(Router::new().route("/fleet/revision", get(fleet::revision)).layer(from_fn(access::parts_only)))
        .layer(from_fn_with_state(admin.clone(), with_revision))
        .with_state(admin)
}

impl Admin {
    /// The applied state: after a barrier, or as it is when the request accepts that.
    async fn read(&self, consistency: intake::Consistency) -> Result<Arc<smg_state::State>, StoreError> {
        if consistency == intake::Consistency::Linearizable {
            self.writer.barrier().await?;
        }
        Ok(self.writer.store().local())
    }
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
    if !response.headers().contains_key(REVISION_HEADER) {
        let revision = admin.writer.store().local().revision();
        response.headers_mut().insert(REVISION_HEADER, HeaderValue::from(revision));
    }
    response
}

/// Puts a revision on an answer.
fn at_revision(revision: Revision, response: impl axum::response::IntoResponse) -> Response {
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
