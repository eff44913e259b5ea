//! One leg: a request to one worker, until the head of its response.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};
use std::time::SystemTime;

use bytes::Bytes;
use http::{HeaderMap, Request, Response, StatusCode, header};
use http_body::{Body, Frame, SizeHint};
use smg_engines::{Route, SplicedBody};
use smg_telemetry::ROUTERS;
use tokio::time::Instant;

use crate::connections::{Answer, ExchangeError};
use crate::core::Core;
use crate::fleet::worker::{InFlight, RoutedWorker};
use crate::relay::describe;
use crate::resilience::breaker::Verdict;
use crate::resilience::{ejection, pace, stale};

/// The body of a request to a worker. Nearly all are spliced ones: boxing them would cost each request an allocation.
#[allow(clippy::large_enum_variant)]
#[derive(Clone)]
pub enum LegBody {
    /// Nothing.
    Empty,
    /// The client's body, spliced. The flag is raised when the last byte has been handed to the connection.
    Spliced(SplicedBody, Option<Arc<AtomicBool>>),
}

impl Body for LegBody {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        match &mut *self {
            LegBody::Empty => Poll::Ready(None),
            LegBody::Spliced(body, sent) => {
                let polled = Pin::new(&mut *body).poll_frame(cx);
                if let Some(sent) = sent
                    && body.is_end_stream()
                {
                    sent.store(true, Ordering::Release);
                }
                polled
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        match self {
            LegBody::Empty => true,
            LegBody::Spliced(body, _) => body.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            LegBody::Empty => SizeHint::with_exact(0),
            LegBody::Spliced(body, _) => body.size_hint(),
        }
    }
}

/// Why a leg has no response head.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LegError {
    /// Whether the time was over, rather than the connection broken.
    pub timed_out: bool,
    /// What happened.
    pub message: String,
}

impl LegError {
    /// The status that answers for it.
    pub fn status(&self) -> StatusCode {
        if self.timed_out { StatusCode::GATEWAY_TIMEOUT } else { StatusCode::BAD_GATEWAY }
    }
}

/// Sends a leg and waits for the head of its response, at most until `deadline`.
///
/// A transport failure is charged to the worker here; what a status means is the dispatcher's business. Dropping the future closes the
/// connection, which is how engines learn that nobody waits any more. A leg that met a stale connection is sent again once.
///
/// # Errors
/// When there is no head.
pub async fn send(
    core: &Arc<Core>,
    claim: &mut InFlight,
    route: Route,
    headers: impl Fn() -> HeaderMap,
    body: LegBody,
    deadline: Instant,
) -> Result<Response<Answer>, LegError> {
    let worker = Arc::clone(claim.worker());
    let make = |body: LegBody| {
        let mut request = Request::new(body);
        *request.method_mut() = http::Method::POST;
        *request.uri_mut() = worker.target(route);
        *request.headers_mut() = headers();
        request.headers_mut().insert(header::HOST, worker.host.clone());
        request
    };
    let (pool, address) = (worker.runtime.connections(), &worker.address);
    let exchange = async {
        let begun = Instant::now();
        match core.connections.exchange(pool, address, make(body.clone())).await {
            Err(ExchangeError::Stale(error)) if begun.elapsed() < stale::SOON => {
                core.metrics.router_upstream_send_retries.with_label_values(&["http"]).inc();
                tracing::debug!(target: ROUTERS, worker = %worker.url, %error, "the engine had closed the connection: the leg is sent again");
                core.connections.exchange_anew(pool, address, make(body)).await
            }
            answer => answer,
        }
    };
    // In a box: what runs around it would carry its room for both legs to the end of the request.
    let answer = tokio::time::timeout_at(deadline, Box::pin(exchange)).await;
    let error = match answer {
        // 101 is the one status of this class that a client library hands out, and no answer either: nobody asked to switch.
        Ok(Ok(response)) if response.status().is_informational() => {
            LegError { timed_out: false, message: format!("the worker answered {}", response.status()) }
        }
        Ok(Ok(response)) => {
            let status = response.status();
            worker.runtime.heard();
            if let Some(pause) = pace::asked_for(status, response.headers(), SystemTime::now()) {
                worker.runtime.pace(pause);
            }
            claim.judge_status(status);
            note_response(core, &worker, status);
            return Ok(response);
        }
        Ok(Err(error)) => {
            let message = describe(&error);
            if matches!(error, ExchangeError::Connect(_)) {
                ejection::eject(core, &worker, &message);
            }
            LegError { timed_out: false, message }
        }
        Err(_) => LegError { timed_out: true, message: "the worker did not answer in time".to_owned() },
    };
    claim.judge(Verdict::Failure);
    note_error(core, &worker, if error.timed_out { "timeout" } else { "backend_error" });
    Err(error)
}

fn note_response(core: &Core, worker: &RoutedWorker, status: StatusCode) {
    core.metrics.router_upstream_responses.with_label_values(&["http", status.as_str(), ""]).inc();
    if status.is_server_error() {
        note_error(core, worker, "backend_error");
    }
}

/// Counts a failed leg.
pub fn note_error(core: &Core, worker: &RoutedWorker, error_type: &str) {
    core.metrics
        .worker_errors
        .with_label_values(&[worker.role().as_str(), worker.record.wire().as_str(), error_type])
        .inc();
}
