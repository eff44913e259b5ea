//! Regular dispatch: one worker serves the whole request.

use axum::body::Body;
use http::Response;
use smg_engines::regular;

use super::leg::LegBody;
use super::scope::Scope;
use super::{Failed, Job, LegCodes, respond};
use crate::fleet::worker::InFlight;

pub(super) async fn run(
    job: &Job<'_>,
    mut worker: InFlight,
    scope: &mut Option<Scope>,
) -> Result<Response<Body>, Failed> {
    let body = regular::leg(&job.request.body, job.client_fields, worker.worker().dp_rank);
    job.note(|attempt, now| attempt.decode_sent_ms = Some(now));
    let response = job.send(&mut worker, LegBody::Spliced(body, None), LegCodes::REGULAR).await?;
    job.note(|attempt, now| attempt.decode_head_ms = Some(now));
    Ok(respond::relay(job, response, worker, scope.take(), false, Vec::new()))
}
