//! From an engine's response head to the response the client gets.

use std::sync::Arc;
use std::time::{Duration, Instant as StdInstant};

use axum::body::Body;
use bytes::Bytes;
use http::{HeaderName, HeaderValue, Response, StatusCode, header};
use prometheus::Histogram;
use smg_engines::headers::relay_headers;
use tokio::time::Instant;

use super::Job;
use super::leg::note_error;
use super::scope::Scope;
use crate::connections::Answer;
use crate::core::Core;
use crate::fleet::worker::InFlight;
use crate::front::error::mark;
use crate::relay::{Dialect, Ended, OnEnd, Relay, Rewrite};
use crate::resilience::breaker::Verdict;

/// Names the worker whose output this is.
const ROUTED_WORKER: HeaderName = HeaderName::from_static("x-smg-routed-worker-id");

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

/// Relays a 2xx response.
pub(super) fn relay(
    job: &Job<'_>,
    response: Response<Answer>,
    claim: InFlight,
    scope: Option<Scope>,
    pair: bool,
    first_output: FirstOutput,
) -> Response<Body> {
    relay_rewriting(job, response, claim, scope, pair, first_output, None)
}

/// As [`relay`], with the first event of a stream rewritten.
pub(super) fn relay_rewriting(
    job: &Job<'_>,
    response: Response<Answer>,
    claim: InFlight,
    scope: Option<Scope>,
    pair: bool,
    first_output: FirstOutput,
    rewrite: Option<Rewrite>,
) -> Response<Body> {
    let (head, upstream) = response.into_parts();
    let mut headers = relay_headers(&head.headers);
    let says_events = head
        .headers
        .get(header::CONTENT_TYPE)
        .and_then(|value| value.to_str().ok())
        .is_some_and(|value| value.trim_start().starts_with("text/event-stream"));
    // Nothing can be read in an encoded body, and nothing put into it.
    let encoded = head
        .headers
        .get(header::CONTENT_ENCODING)
        .is_some_and(|value| !value.as_bytes().eq_ignore_ascii_case(b"identity"));
    let events = job.request.body.stream() && !encoded && (pair || says_events);
    if events && !says_events {
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream"));
    }
    if let Ok(url) = HeaderValue::from_str(claim.worker().url.as_str()) {
        headers.insert(ROUTED_WORKER, url);
    }
    let served =
        Served { core: Arc::clone(job.core), claim, scope, status: head.status, attempt: job.attempt, first_output };
    let keep_alive = Some(job.core.options.sse_keep_alive);
    let dialect = if job.request.route.is_anthropic() { Dialect::Anthropic } else { Dialect::OpenAi };
    let relay = Relay::new(upstream, events.then_some(dialect), job.deadline, keep_alive, served).rewriting(rewrite);
    let mut response = Response::new(Body::new(relay));
    *response.status_mut() = head.status;
    *response.headers_mut() = headers;
    response
}

struct Nothing;

impl OnEnd for Nothing {
    fn first_output(&mut self) {}
    fn ended(&mut self, _: Ended) {}
}

/// An engine's error response: its status, content type and bytes as they are, our code beside them.
pub(super) fn pass_error_through(
    core: &Core,
    response: Response<Answer>,
    code: &'static str,
    deadline: Instant,
) -> Response<Body> {
    let (head, upstream) = response.into_parts();
    let deadline = deadline.min(Instant::now() + Duration::from_secs(60));
    let relay = Relay::new(upstream, None, deadline, None, Nothing);
    let mut response = Response::new(Body::new(relay));
    *response.status_mut() = head.status;
    *response.headers_mut() = relay_headers(&head.headers);
    core.metrics.router_upstream_responses.with_label_values(&["http", head.status.as_str(), code]).inc();
    mark(&mut response, code);
    response
}
