//! Regular dispatch: one worker serves the whole request. Token counting is one too: a prefill can do it alone.

use axum::body::Body;
use http::Response;
use smg_engines::regular;
use smg_fleet::WorkerType;

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
    let codes = if worker.worker().role() == WorkerType::Prefill { LegCodes::LONE_PREFILL } else { LegCodes::REGULAR };
    let response = job.send(&mut worker, LegBody::Spliced(body, None), codes).await?;
    job.note(|attempt, now| attempt.decode_head_ms = Some(now));
    respond::relay(job, response, worker, scope, Vec::new(), None).await
}
