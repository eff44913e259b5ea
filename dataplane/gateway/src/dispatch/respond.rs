//! From an engine's response head to the response the client gets.

use std::sync::Arc;
use std::time::{Duration, Instant as StdInstant};

use axum::body::Body;
use bytes::Bytes;
use futures::future::{Either, ready};
use http::{HeaderMap, HeaderValue, Response, StatusCode, header};
use http_body::Frame;
use http_body_util::BodyExt;
use prometheus::Histogram;
use smg_engines::headers::relay_headers;
use smg_fleet::WorkerType;
use tokio::time::Instant;

use super::leg::{LegError, note_error};
use super::scope::Scope;
use super::{Failed, Job};
use crate::connections::Answer;
use crate::core::Core;
use crate::fleet::worker::InFlight;
use crate::front::error::{GatewayError, envelope, mark};
use crate::front::observe::ROUTED_WORKER;
use crate::relay::{Dialect, Ended, OnEnd, Relay, Rewrite, describe};
use crate::resilience::breaker::Verdict;

/// Closes the books of a served request when its body has ended.
struct Served {
    core: Arc<Core>,
    claim: InFlight,
    scope: Option<Scope>,
    status: StatusCode,
    attempt: usize,
    first_output: FirstOutput,
}

impl OnEnd for Served {
    fn first_output(&mut self) {
        for (histogram, since) in self.first_output.drain(..) {
            histogram.observe(since.elapsed().as_secs_f64());
        }
        if let Some(scope) = &self.scope {
            scope.decision.attempt(self.attempt, |attempt, now| attempt.first_output_ms = Some(now));
        }
    }

    fn ended(&mut self, ended: Ended) {
        let scope = self.scope.take();
        match ended {
            // The verdict of the head stands.
            Ended::Complete => {
                if let Some(mut scope) = scope {
                    scope.complete(self.status);
                }
            }
            Ended::ClientLeft { output } => {
                // A worker that was streaming served well; one that had not begun says nothing.
                self.claim.judge(if output { Verdict::Success } else { Verdict::Neutral });
                if let Some(mut scope) = scope {
                    scope.cancel();
                }
            }
            Ended::Broken(message) => {
                self.claim.judge(Verdict::Failure);
                note_error(&self.core, self.claim.worker(), "backend_error");
                fail(scope, self.attempt, StatusCode::BAD_GATEWAY, "stream_error", message);
            }
            Ended::TimedOut => {
                self.claim.judge(Verdict::Failure);
                note_error(&self.core, self.claim.worker(), "timeout");
                fail(scope, self.attempt, StatusCode::GATEWAY_TIMEOUT, "stream_timeout", "timed out".to_owned());
            }
            // A worker that was streaming served well.
            Ended::OutOfTime => {
                self.claim.judge(Verdict::Success);
                fail(scope, self.attempt, StatusCode::GATEWAY_TIMEOUT, "stream_timeout", "out of time".to_owned());
            }
        }
    }
}

fn fail(scope: Option<Scope>, attempt: usize, status: StatusCode, code: &'static str, message: String) {
    if let Some(mut scope) = scope {
        scope.decision.attempt(attempt, |attempt, _| attempt.note_error(&message));
        scope.fail(status, code);
    }
}

/// Histograms of the time to the first output, each with its start.
pub(super) type FirstOutput = Vec<(Histogram, StdInstant)>;

/// A response that was read whole and is answered with this body.
pub(super) fn whole(
    job: &Job<'_>,
    head: http::response::Parts,
    body: Bytes,
    claim: InFlight,
    scope: Option<Scope>,
    first_output: FirstOutput,
) -> Response<Body> {
    let mut headers = relay_headers(&head.headers);
    headers.remove(header::CONTENT_LENGTH);
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    if let Ok(url) = HeaderValue::from_str(claim.worker().url.as_str()) {
        headers.insert(ROUTED_WORKER, url);
    }
    let mut served =
        Served { core: Arc::clone(job.core), claim, scope, status: head.status, attempt: job.attempt, first_output };
    served.first_output();
    served.ended(Ended::Complete);
    let mut response = Response::new(Body::from(body));
    *response.status_mut() = head.status;
    *response.headers_mut() = headers;
    response
}

/// Whether a 2xx response is relayed as a stream of events, and whether the engine calls it one.
fn events(job: &Job<'_>, headers: &HeaderMap, role: WorkerType) -> (bool, bool) {
    let says_events = headers
        .get(header::CONTENT_TYPE)
        .and_then(|value| value.to_str().ok())
        .is_some_and(|value| value.trim_start().starts_with("text/event-stream"));
    // Nothing can be read in an encoded body, and nothing put into it.
    let encoded =
        headers.get(header::CONTENT_ENCODING).is_some_and(|value| !value.as_bytes().eq_ignore_ascii_case(b"identity"));
    // A decode leg whose client asked for a stream sends one, whatever it calls it.
    (job.request.body.stream() && !encoded && (role == WorkerType::Decode || says_events), says_events)
}

/// Relays a 2xx response, taking `scope` along; the data of a stream's first event is rewritten.
///
/// An answer that is no stream of events fails when it breaks off before its first byte. What waits for that byte is kept apart: streams
/// do without it, and the future of a request stays small.
pub(super) fn relay<'a>(
    job: &'a Job<'_>,
    mut response: Response<Answer>,
    mut claim: InFlight,
    scope: &'a mut Option<Scope>,
    first_output: FirstOutput,
    rewrite: Option<Rewrite>,
) -> impl Future<Output = Result<Response<Body>, Failed>> + use<'a> {
    if events(job, response.headers(), claim.worker().role()).0 {
        let relayed = relay_from(job, response, None, claim, scope.take(), first_output, rewrite);
        return Either::Left(ready(Ok(relayed)));
    }
    Either::Right(Box::pin(async move {
        let first = begin(job, &mut response, &mut claim).await?;
        Ok(relay_from(job, response, first, claim, scope.take(), first_output, None))
    }))
}

/// Waits for the first piece of an answer that is no stream of events.
///
/// # Errors
/// When it breaks off before: nothing has reached the client, which can still be told, or another attempt made.
async fn begin(
    job: &Job<'_>,
    response: &mut Response<Answer>,
    claim: &mut InFlight,
) -> Result<Option<Frame<Bytes>>, Failed> {
    let role = claim.worker().role();
    // A worker that has not begun to answer says nothing if the client leaves.
    claim.judge(Verdict::Neutral);
    let first = first_piece(response.body_mut(), job.deadline).await.map_err(|error| {
        claim.judge(Verdict::Failure);
        note_error(job.core, claim.worker(), if error.timed_out { "timeout" } else { "backend_error" });
        let code = match role {
            WorkerType::Decode => "decode_read_failed",
            WorkerType::Prefill => "prefill_read_failed",
            _ => "worker_read_failed",
        };
        Failed::gateway(GatewayError::Leg { code, error }, Some(claim.worker().id()))
    })?;
    claim.judge_status(response.status());
    Ok(first)
}

/// Relays a 2xx response, the rest of it after a piece that was read already.
fn relay_from(
    job: &Job<'_>,
    response: Response<Answer>,
    first: Option<Frame<Bytes>>,
    claim: InFlight,
    scope: Option<Scope>,
    first_output: FirstOutput,
    rewrite: Option<Rewrite>,
) -> Response<Body> {
    let (head, upstream) = response.into_parts();
    let (events, says_events) = events(job, &head.headers, claim.worker().role());
    let mut headers = relay_headers(&head.headers);
    if events && !says_events {
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream"));
    }
    // Whoever asks for log probabilities gets JSON, whatever the engine calls it (SMG PD docs, "Failures, Cancellation, and Streaming").
    if !job.request.body.stream() && claim.worker().role() == WorkerType::Decode && job.request.body.wants_logprobs() {
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    }
    if let Ok(url) = HeaderValue::from_str(claim.worker().url.as_str()) {
        headers.insert(ROUTED_WORKER, url);
    }
    let core = Arc::clone(job.core);
    let served = Served { core, claim, scope, status: head.status, attempt: job.attempt, first_output };
    let keep_alive = Some(job.core.options.sse_keep_alive);
    let dialect = if job.request.route.is_anthropic() { Dialect::Anthropic } else { Dialect::OpenAi };
    let relay = Relay::new(upstream, events.then_some(dialect), job.deadline, keep_alive, served);
    let mut response = Response::new(Body::new(relay.starting_with(first).rewriting(rewrite)));
    *response.status_mut() = head.status;
    *response.headers_mut() = headers;
    response
}

/// The first piece of a body; none when the body is empty.
async fn first_piece(body: &mut Answer, deadline: Instant) -> Result<Option<Frame<Bytes>>, LegError> {
    match tokio::time::timeout_at(deadline, body.frame()).await {
        Ok(piece) => piece.transpose().map_err(|error| LegError { timed_out: false, message: describe(&error) }),
        Err(_) => Err(LegError { timed_out: true, message: "the response did not begin in time".to_owned() }),
    }
}

struct Nothing;

impl OnEnd for Nothing {
    fn first_output(&mut self) {}
    fn ended(&mut self, _: Ended) {}
}

/// An engine's error response: its status, content type and bytes as they are, our code beside them. One that breaks off before its
/// first byte keeps its status and gets our words.
pub(super) async fn pass_error_through(
    core: &Core,
    response: Response<Answer>,
    code: &'static str,
    deadline: Instant,
) -> Response<Body> {
    let (head, mut upstream) = response.into_parts();
    core.metrics.router_upstream_responses.with_label_values(&["http", head.status.as_str(), code]).inc();
    let deadline = deadline.min(Instant::now() + Duration::from_secs(60));
    let first = match first_piece(&mut upstream, deadline).await {
        Ok(first) => first,
        Err(error) => {
            let message = format!("{code}: the engine answered {} without a body: {}", head.status, error.message);
            return envelope(head.status, code, &message);
        }
    };
    let relay = Relay::new(upstream, None, deadline, None, Nothing).starting_with(first);
    let mut response = Response::new(Body::new(relay));
    *response.status_mut() = head.status;
    *response.headers_mut() = relay_headers(&head.headers);
    mark(&mut response, code);
    response
}
