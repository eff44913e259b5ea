//! Traces: spans of requests, sent to an OpenTelemetry collector over OTLP/gRPC.
//!
//! Problem: a trace must never cost a request anything. A finished span is put into a bounded queue without waiting; a task of its own
//! sends what has gathered, and a collector that is slow, away or refusing costs spans, which are counted, and nothing else.
//!
//! Invariants
//! * the queue holds at most [`QUEUE`] spans, one export at most [`BATCH`]; an export that does not end in [`PATIENCE`] is given up;
//! * every span is either sent or counted in `smg_trace_spans_dropped_total`;
//! * without a [`Tracer`] nothing of this exists.

pub mod context;
mod otlp;

use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use opentelemetry_proto::tonic::collector::trace::v1::trace_service_client::TraceServiceClient;
use thiserror::Error;
use tokio::sync::{mpsc, oneshot};
use tokio::time::Instant;
use tonic::transport::{Channel, Endpoint};

use crate::{Metrics, SMG};
pub use context::{Parent, SpanContext, TRACEPARENT};

/// Most spans that wait to be sent.
const QUEUE: usize = 8192;
/// Most spans of one export.
const BATCH: usize = 64;
/// How long spans gather before they are sent.
const GATHER: Duration = Duration::from_millis(500);
/// Longest export.
const PATIENCE: Duration = Duration::from_secs(10);
/// A failing collector is mentioned in the log at most this often.
const MENTION: Duration = Duration::from_secs(60);

/// The address of the collector is not usable.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("'{address}' is no address of a collector: HOST:PORT or http://HOST:PORT")]
pub struct EndpointError {
    /// What was given.
    address: String,
}

/// What a span stands for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A request that a client sent.
    Server,
    /// A request to a worker.
    Client,
    /// A phase within.
    Internal,
}

/// The value of an attribute.
#[derive(Debug, Clone, PartialEq)]
#[allow(missing_docs)]
pub enum Value {
    Text(String),
    Number(i64),
    Flag(bool),
}

impl From<&str> for Value {
    fn from(text: &str) -> Self {
        Self::Text(text.to_owned())
    }
}

impl From<u64> for Value {
    fn from(number: u64) -> Self {
        Self::Number(i64::try_from(number).unwrap_or(i64::MAX))
    }
}

/// A finished span.
#[derive(Debug, Clone, PartialEq)]
pub struct Span {
    /// Which one.
    pub context: SpanContext,
    /// The span it is part of.
    pub parent: Option<u64>,
    /// What it is called.
    pub name: &'static str,
    /// What it stands for.
    pub kind: Kind,
    /// Start and end, in nanoseconds since the Unix epoch.
    pub start: u64,
    /// The end.
    pub end: u64,
    /// What else is known.
    pub attributes: Vec<(&'static str, Value)>,
    /// What went wrong.
    pub error: Option<String>,
}

enum Message {
    Span(Box<Span>),
    Flush(oneshot::Sender<()>),
}

/// The way to the collector. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Tracer {
    queue: mpsc::Sender<Message>,
    metrics: Arc<Metrics>,
}

impl std::fmt::Debug for Message {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Message")
    }
}

impl Tracer {
    /// Starts the export to the collector at `address`. Must be called within a tokio runtime. Nothing is connected before the first span.
    ///
    /// # Errors
    /// When the address is not usable.
    pub fn start(address: &str, instance: &str, metrics: Arc<Metrics>) -> Result<Self, EndpointError> {
        let endpoint = endpoint(address)?;
        let channel = endpoint.connect_timeout(PATIENCE).timeout(PATIENCE).connect_lazy();
        let (queue, spans) = mpsc::channel(QUEUE);
        let exporter = Exporter {
            client: TraceServiceClient::new(channel),
            instance: instance.to_owned(),
            metrics: Arc::clone(&metrics),
            mentioned: None,
        };
        tokio::spawn(exporter.run(spans));
        Ok(Self { queue, metrics })
    }

    /// Hands a span over. Never waits.
    pub fn record(&self, span: Span) {
        if self.queue.try_send(Message::Span(Box::new(span))).is_err() {
            self.metrics.trace_spans_dropped.with_label_values(&["queue_full"]).inc();
        }
    }

    /// Sends what has gathered, at most until `limit`.
    pub async fn flush(&self, limit: Duration) {
        let flushed = async {
            let (done, flushed) = oneshot::channel();
            if self.queue.send(Message::Flush(done)).await.is_ok() {
                let _ = flushed.await;
            }
        };
        let _ = tokio::time::timeout(limit, flushed).await;
    }
}

/// Checks the address of a collector.
///
/// # Errors
/// When it is not usable.
pub fn endpoint(address: &str) -> Result<Endpoint, EndpointError> {
    let refused = || EndpointError { address: address.to_owned() };
    let uri = if address.contains("://") { address.to_owned() } else { format!("http://{address}") };
    let parsed: http::Uri = uri.parse().map_err(|_| refused())?;
    let usable = parsed.scheme_str() == Some("http") && parsed.port_u16().is_some();
    if usable { Endpoint::from_shared(uri).map_err(|_| refused()) } else { Err(refused()) }
}

/// Nanoseconds since the Unix epoch.
pub fn unix_nanos() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
}

struct Exporter {
    client: TraceServiceClient<Channel>,
    instance: String,
    metrics: Arc<Metrics>,
    mentioned: Option<Instant>,
}

impl Exporter {
    async fn run(mut self, mut messages: mpsc::Receiver<Message>) {
        let mut batch: Vec<Span> = Vec::with_capacity(BATCH);
        let mut due = None;
        loop {
            let message = match due {
                Some(due) => tokio::time::timeout_at(due, messages.recv()).await.ok(),
                None => Some(messages.recv().await),
            };
            let mut waiting = None;
            match message {
                Some(Some(Message::Span(span))) => {
                    batch.push(*span);
                    due.get_or_insert_with(|| Instant::now() + GATHER);
                    if batch.len() < BATCH {
                        continue;
                    }
                }
                Some(Some(Message::Flush(done))) => waiting = Some(done),
                // Nobody can add anything any more.
                Some(None) => {
                    self.export(std::mem::take(&mut batch)).await;
                    return;
                }
                None => {}
            }
            self.export(std::mem::replace(&mut batch, Vec::with_capacity(BATCH))).await;
            due = None;
            if let Some(done) = waiting {
                let _ = done.send(());
            }
        }
    }

    async fn export(&mut self, spans: Vec<Span>) {
        if spans.is_empty() {
            return;
        }
        let count = spans.len() as u64;
        let request = otlp::request(spans, &self.instance);
        let exported = tokio::time::timeout(PATIENCE, self.client.export(request)).await;
        let failure = match exported {
            Ok(Ok(response)) => {
                let rejected = response.into_inner().partial_success.map_or(0, |partial| partial.rejected_spans);
                let rejected = u64::try_from(rejected).unwrap_or(0).min(count);
                self.metrics.trace_spans_exported.inc_by(count - rejected);
                self.metrics.trace_spans_dropped.with_label_values(&["rejected"]).inc_by(rejected);
                return;
            }
            Ok(Err(status)) => format!("{:?}: {}", status.code(), status.message()),
            Err(_) => "it did not answer in time".to_owned(),
        };
        self.metrics.trace_spans_dropped.with_label_values(&["export_failed"]).inc_by(count);
        if self.mentioned.is_none_or(|mentioned| mentioned.elapsed() >= MENTION) {
            self.mentioned = Some(Instant::now());
            tracing::warn!(target: SMG, failure, spans = count, "traces cannot be exported");
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn addresses_need_a_port_and_no_scheme_but_http() {
        for address in ["localhost:4317", "http://collector:4317", "http://[::1]:4317/", "10.0.0.1:1"] {
            assert!(endpoint(address).is_ok(), "{address}");
        }
        for address in ["", "localhost", "https://collector:4317", "http://collector", "a b:1", "grpc://c:1"] {
            assert!(endpoint(address).is_err(), "{address}");
        }
    }

    #[tokio::test]
    async fn spans_that_nobody_takes_are_counted_and_never_waited_for() {
        let metrics = Arc::new(Metrics::default());
        // A port that was free a moment ago: nobody answers there.
        let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let tracer = Tracer::start(&format!("127.0.0.1:{port}"), "g", Arc::clone(&metrics)).unwrap();
        let span = Span {
            context: SpanContext::new_trace(),
            parent: None,
            name: "http_request",
            kind: Kind::Server,
            start: 1,
            end: 2,
            attributes: Vec::new(),
            error: None,
        };
        let total = QUEUE + 500;
        for _ in 0..total {
            tracer.record(span.clone());
        }
        let count = |reason: &str| metrics.trace_spans_dropped.with_label_values(&[reason]).get();
        assert!(count("queue_full") >= 500 - BATCH as u64);
        tracer.flush(Duration::from_secs(60)).await;
        assert_eq!(count("queue_full") + count("export_failed"), total as u64);
        assert_eq!(metrics.trace_spans_exported.get(), 0);
    }
}
