//! What happens to every request: an id, metrics, and a log line at its end (SMG, logging: targets `smg::request` and `smg::response`; the
//! query is never logged, it may hold secrets).
//!
//! A request counts as active until its response body has ended, not until its head is sent.

use std::borrow::Cow;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use axum::body::Body;
use axum::extract::{MatchedPath, State};
use axum::middleware::Next;
use bytes::Bytes;
use http::{HeaderName, HeaderValue, Method, Request, Response, StatusCode};
use http_body::{Frame, SizeHint};
use smg_telemetry::Metrics;
use smg_telemetry::ages::Arrival;
use smg_telemetry::trace::{TRACEPARENT, Value};

use super::error::{ErrorCode, in_anthropic_shape};
use super::{Front, request_id};
use crate::trace::RequestTrace;

/// The id of a request, as an extension of it.
#[derive(Debug, Clone)]
pub struct RequestId(pub Arc<str>);

/// Whose answer a response is.
pub(crate) const ROUTED_WORKER: HeaderName = HeaderName::from_static("x-smg-routed-worker-id");
/// Paths of unknown routes are the client's invention: they share one label.
const OTHER: &str = "other";

/// Observes what the router answers.
pub(super) async fn routed(State(front): State<Front>, request: axum::extract::Request, next: Next) -> Response<Body> {
    let matched = request.extensions().get::<MatchedPath>().map(|matched| Cow::Owned(matched.as_str().to_owned()));
    observed(&front, matched.unwrap_or(Cow::Borrowed(OTHER)), request, |mut request, id| {
        request.extensions_mut().insert(RequestId(id));
        next.run(request)
    })
    .await
}

/// Answers a request with `answer`, which gets its id too. `path` is the route, a label. Every request comes through here, whichever way it
/// is answered: what must hold for all of them belongs here.
pub(super) async fn observed<B, F: Future<Output = Response<Body>>>(
    front: &Front,
    path: Cow<'static, str>,
    mut request: Request<B>,
    answer: impl FnOnce(Request<B>, Arc<str>) -> F,
) -> Response<Body> {
    let metrics = Arc::clone(&front.core.metrics);
    let method = method_label(request.method());
    let id = request_id::of(request.headers(), &front.core.options.request_id_headers, request.uri().path());
    let id: Arc<str> = Arc::from(id);
    metrics.http_requests.with_label_values(&[method, &*path]).inc();
    let probe = matches!(&*path, "/health" | "/liveness" | "/readiness");
    let tracer = front.core.options.tracer.as_ref().filter(|_| !probe);
    let trace = tracer.and_then(|tracer| RequestTrace::begin(tracer, request.headers()));
    if let Some(trace) = &trace {
        request.extensions_mut().insert(Arc::clone(trace));
    }
    let mut active = Active::new(metrics, method, path, Arc::clone(&id));
    active.probe = probe;
    if active.path == OTHER {
        active.unknown_path = Some(request.uri().path().into());
    }
    tracing::debug!(target: "smg::request", request_id = %id, method, path = active.shown_path(), "request began");
    active.trace = trace;

    let anthropic_path = request.uri().path().starts_with("/v1/messages");
    let anthropic_client = request.headers().contains_key("anthropic-version");

    let mut response = answer(request, Arc::clone(&id)).await;

    if anthropic_path || (anthropic_client && response.status() == StatusCode::NOT_FOUND) {
        response = in_anthropic_shape(response, &id);
    }

    let status = response.status();
    let code = response.extensions().get::<ErrorCode>().map_or("", |code| code.0);
    active.metrics.http_responses.with_label_values(&[&*active.path, status.as_str(), code]).inc();
    active.answered = Some(Answered { status, code, worker: response.headers().get(ROUTED_WORKER).cloned() });
    if let Ok(value) = HeaderValue::from_str(&id) {
        response.headers_mut().insert(request_id::REQUEST_ID, value);
    }
    if let Some(value) = active.trace.as_ref().and_then(|trace| trace.header()) {
        response.headers_mut().insert(TRACEPARENT, value);
    }
    response.map(|body| Body::new(Counted { body, active }))
}

fn method_label(method: &Method) -> &'static str {
    match *method {
        Method::GET => "GET",
        Method::POST => "POST",
        Method::PUT => "PUT",
        Method::PATCH => "PATCH",
        Method::DELETE => "DELETE",
        Method::HEAD => "HEAD",
        Method::OPTIONS => "OPTIONS",
        _ => OTHER,
    }
}

/// The head of the response.
struct Answered {
    status: StatusCode,
    code: &'static str,
    /// Whose answer it is.
    worker: Option<HeaderValue>,
}

struct Active {
    metrics: Arc<Metrics>,
    method: &'static str,
    path: Cow<'static, str>,
    /// The path of no route, which is no label.
    unknown_path: Option<Box<str>>,
    id: Arc<str>,
    /// It asks for the gateway's health: that is hardly worth a line.
    probe: bool,
    started: Instant,
    trace: Option<Arc<RequestTrace>>,
    answered: Option<Answered>,
    #[allow(dead_code, reason = "held for its drop")]
    arrival: Arrival,
}

impl Active {
    fn new(metrics: Arc<Metrics>, method: &'static str, path: Cow<'static, str>, id: Arc<str>) -> Self {
        metrics.http_requests_active.inc();
        let arrival = metrics.http_inflight_ages.arrive();
        Self {
            metrics,
            method,
            path,
            unknown_path: None,
            id,
            probe: false,
            started: Instant::now(),
            trace: None,
            answered: None,
            arrival,
        }
    }

    fn shown_path(&self) -> &str {
        self.unknown_path.as_deref().unwrap_or(&self.path)
    }

    /// One line at the end of the response body, as loud as its status.
    fn log(&self, duration: Duration) {
        macro_rules! line {
            ($level:ident, $message:literal) => {{
                let answered = self.answered.as_ref();
                tracing::$level!(
                    target: "smg::response",
                    request_id = %self.id,
                    method = self.method,
                    path = self.shown_path(),
                    status = answered.map(|answered| answered.status.as_u16()),
                    code = answered.map(|answered| answered.code).filter(|code| !code.is_empty()),
                    worker = answered.and_then(|answered| answered.worker.as_ref()?.to_str().ok()),
                    duration_ms = duration.as_millis() as u64,
                    $message
                )
            }};
        }
        match self.answered.as_ref().map(|answered| answered.status) {
            _ if self.probe => line!(debug, "request ended"),
            None => line!(info, "the client left before the response"),
            Some(status) if status.is_server_error() => line!(error, "request failed"),
            Some(status) if status.is_client_error() => line!(warn, "request refused"),
            Some(_) => line!(info, "request ended"),
        }
    }
}

impl Drop for Active {
    fn drop(&mut self) {
        let duration = self.started.elapsed();
        self.metrics.http_requests_active.dec();
        self.metrics
            .http_request_duration
            .with_label_values(&[self.method, &*self.path])
            .observe(duration.as_secs_f64());
        self.log(duration);
        if let Some(trace) = self.trace.take() {
            self.record_trace(&trace);
        }
    }
}

impl Active {
    fn record_trace(&self, trace: &RequestTrace) {
        let mut attributes = vec![
            ("http.request.method", Value::from(self.method)),
            ("http.route", (&*self.path).into()),
            ("smg.request_id", (&*self.id).into()),
        ];
        let error = match self.answered {
            None => Some("the client left before the response".to_owned()),
            Some(Answered { status, code, .. }) => {
                attributes.push(("http.response.status_code", u64::from(status.as_u16()).into()));
                let failed = status.is_server_error() || !code.is_empty();
                failed.then(|| if code.is_empty() { status.to_string() } else { code.to_owned() })
            }
        };
        trace.end(attributes, error);
    }
}

/// A response body that keeps its request counted as active.
struct Counted {
    body: Body,
    #[allow(dead_code, reason = "held for its drop")]
    active: Active,
}

impl http_body::Body for Counted {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.body).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
