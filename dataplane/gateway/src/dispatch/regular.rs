//! Regular dispatch: one worker serves the whole request.

use axum::body::Body;
use http::Response;
use smg_engines::regular;

use super::leg::{self, LegBody};
use super::scope::Scope;
use super::{Failed, Job, respond};
use crate::fleet::worker::InFlight;
use crate::front::error::GatewayError;

pub(super) async fn run(
    job: &Job<'_>,
    mut worker: InFlight,
    scope: &mut Option<Scope>,
) -> Result<Response<Body>, Failed> {
    let id = worker.worker().id();
    let body = regular::leg(&job.request.body, job.client_fields, worker.worker().dp_rank);
    let headers = job.headers(worker.worker());
    job.note(|attempt, now| attempt.decode_sent_ms = Some(now));
    let body = LegBody::Spliced(body, None);
    let response = leg::send(job.core, &mut worker, job.request.route, headers, body, job.deadline)
        .await
        .map_err(|error| Failed::gateway(GatewayError::Leg { code: "worker_request_failed", error }, Some(id)))?;
    job.note(|attempt, now| attempt.decode_head_ms = Some(now));
    if !response.status().is_success() {
        return Err(Failed::engine(response, "worker_upstream_error", id));
    }
    Ok(respond::relay(job, response, worker, scope.take(), false, Vec::new()))
}
