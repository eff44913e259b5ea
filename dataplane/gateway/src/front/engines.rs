//! Routes that ask engines something on an operator's behalf: one of them, a pair, or all.
//!
//! Answers of single engines pass through. Fan-outs ask a bounded number at a time and report who failed. What anybody may ask is asked
//! once at a time, however many ask for it; and a question that comes back from a worker is not asked again.

use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::extract::{self, State};
use axum::middleware::Next;
use bytes::Bytes;
use futures::stream::{self, StreamExt};
use http::{HeaderMap, HeaderValue, Method, Request, Response, StatusCode, header};
use http_body_util::{BodyExt, Limited};
use serde_json::{Value, json};
use smg_engines::headers::relay_headers;
use smg_fleet::{Wire, Worker, WorkerType};

use super::error::{GatewayError, envelope};
use super::flight::Flight;
use super::probes::json_response;
use super::{Front, exposition};
use crate::core::Core;
use crate::dispatch::leg::LegBody;
use crate::grpc::client::Client;
use crate::hops::HOPS;
use crate::relay::describe;
use crate::select::SelectError;

/// Largest answer of one engine.
const MAX_ANSWER: usize = 16 * 1024 * 1024;
/// How long one engine may take to tell about itself.
const ASK_TIMEOUT: Duration = Duration::from_secs(5);
/// How long one engine may take to generate a token or to flush its cache.
const WORK_TIMEOUT: Duration = Duration::from_secs(45);
/// Engines asked at a time.
const FAN_OUT: usize = 32;

/// What is asked once at a time.
#[derive(Default)]
pub struct Asks {
    server_info: Flight<Result<Answer, Untold>>,
    model_info: Flight<Result<Answer, Untold>>,
    health: Flight<Result<(), Ill>>,
    metrics: Flight<Option<Bytes>>,
}

/// Refuses a question that has been here before.
pub(super) async fn once(State(front): State<Front>, request: extract::Request, next: Next) -> Response<Body> {
    if front.core.hops.is_loop(request.headers()) {
        return GatewayError::LoopDetected.into_response();
    }
    next.run(request).await
}

/// A question to an engine.
struct Question<'a> {
    method: Method,
    path: &'a str,
    /// The gateways that it has come through, this one included.
    hops: HeaderValue,
    /// How long the answer may take.
    limit: Duration,
    /// How many bytes it may have.
    most: usize,
}

#[derive(Clone)]
struct Answer {
    status: StatusCode,
    headers: HeaderMap,
    body: Bytes,
}

/// Why an engine has not answered.
#[derive(Debug)]
pub(crate) struct Unanswered {
    /// Whether there is no connection to it, or it broke: nobody is there, rather than somebody slow.
    pub broken: bool,
    /// What happened.
    pub reason: String,
}

impl Unanswered {
    fn broken(reason: String) -> Self {
        Self { broken: true, reason }
    }

    fn other(reason: String) -> Self {
        Self { broken: false, reason }
    }
}

/// What an engine answers to `GET path`, its body of at most `most` bytes included.
pub(crate) async fn ask_for(
    core: &Core,
    worker: &Worker,
    path: &str,
    limit: Duration,
    most: usize,
) -> Result<(StatusCode, Bytes), Unanswered> {
    let question = Question { method: Method::GET, path, hops: core.hops.own(), limit, most };
    let answer = ask(core, worker, question).await?;
    Ok((answer.status, answer.body))
}

/// Asks on behalf of a request that came through `hops`.
async fn tell(core: &Core, worker: &Worker, path: &str, hops: HeaderValue) -> Result<Answer, String> {
    let question = Question { method: Method::GET, path, hops, limit: ASK_TIMEOUT, most: MAX_ANSWER };
    ask(core, worker, question).await.map_err(|unanswered| unanswered.reason)
}

/// As [`tell`], where the engine has work with it.
async fn work(core: &Core, worker: &Worker, method: Method, path: &str, hops: HeaderValue) -> Result<(), String> {
    let question = Question { method, path, hops, limit: WORK_TIMEOUT, most: MAX_ANSWER };
    let status = ask(core, worker, question).await.map_err(|unanswered| unanswered.reason)?.status;
    // A gateway answers 206 when some of its engines have not done it.
    let done = status.is_success() && status != StatusCode::PARTIAL_CONTENT;
    if done { Ok(()) } else { Err(format!("answered {status}")) }
}

async fn ask(core: &Core, worker: &Worker, question: Question<'_>) -> Result<Answer, Unanswered> {
    let Question { method, path, hops, limit, most } = question;
    let mut request = Request::builder().method(method).uri(format!("{}{path}", worker.spec.url)).header(HOPS, hops);
    if let Some(key) = &worker.spec.api_key {
        request = request.header(header::AUTHORIZATION, format!("Bearer {}", &**key));
    }
    let request = request.body(LegBody::Empty).map_err(|error| Unanswered::other(error.to_string()))?;
    let exchange = async {
        let answer = core.client.request(request).await.map_err(|error| Unanswered::broken(describe(&error)));
        let (http::response::Parts { status, headers, .. }, body) = answer?.into_parts();
        if status.is_informational() {
            return Err(Unanswered::other(format!("the worker answered {status}")));
        }
        let body = Limited::new(body, most).collect().await.map_err(|error| Unanswered::other(error.to_string()));
        Ok(Answer { status, headers, body: body?.to_bytes() })
    };
    tokio::time::timeout(limit, exchange)
        .await
        .unwrap_or_else(|_| Err(Unanswered::other("no answer in time".to_owned())))
}

/// Workers that can be asked, in the order of their registration.
fn able(core: &Core) -> Vec<Arc<Worker>> {
    let table = core.table.load();
    let asked = |worker: &&Arc<Worker>| {
        let ejected = table.runtime(worker.id).is_some_and(|runtime| runtime.is_unreachable());
        worker.wire() != Wire::Zmq && worker.is_routable() && !ejected
    };
    table.snapshot.workers.values().filter(asked).cloned().collect()
}

/// Those of them that speak HTTP.
fn reachable(core: &Core) -> Vec<Arc<Worker>> {
    let mut workers = able(core);
    workers.retain(|worker| worker.wire() == Wire::Http);
    workers
}

fn first_of(workers: &[Arc<Worker>], role: WorkerType) -> Option<&Arc<Worker>> {
    workers.iter().find(|worker| worker.spec.worker_type == role)
}

/// What an engine is asked about.
#[derive(Clone, Copy)]
enum Subject {
    Server,
    Model,
}

/// Why there is no answer to pass on.
#[derive(Clone)]
enum Untold {
    /// There is nobody to ask.
    Nobody,
    /// Whoever was asked gave none.
    Failed(String),
}

/// The engine that speaks for all: the first prefill, else regular one, of those over HTTP if there are any.
fn spokesman(core: &Core) -> Option<Arc<Worker>> {
    let workers = able(core);
    let of = |wire, role| workers.iter().find(move |worker| worker.wire() == wire && worker.spec.worker_type == role);
    let roles = [WorkerType::Prefill, WorkerType::Regular];
    [Wire::Http, Wire::Grpc].into_iter().find_map(|wire| roles.into_iter().find_map(|role| of(wire, role))).cloned()
}

/// What the engine that speaks for all answers.
async fn spoken(core: Arc<Core>, subject: Subject, hops: HeaderValue) -> Result<Answer, Untold> {
    let worker = spokesman(&core).ok_or(Untold::Nobody)?;
    let answer = match (worker.wire(), subject) {
        (Wire::Grpc, _) => tell_over_grpc(&core, &worker, subject).await,
        (_, Subject::Server) => tell(&core, &worker, "/get_server_info", hops).await,
        (_, Subject::Model) => tell(&core, &worker, "/get_model_info", hops).await,
    };
    answer.map_err(Untold::Failed)
}

async fn tell_over_grpc(core: &Core, worker: &Worker, subject: Subject) -> Result<Answer, String> {
    let client = client_of(core, worker).ok_or("its engine is not known here")?;
    let asked = async {
        match subject {
            Subject::Server => client.server_info().await,
            Subject::Model => client.model_info().await,
        }
    };
    let answer = tokio::time::timeout(ASK_TIMEOUT, asked).await.map_err(|_| "no answer in time".to_owned())?;
    let body = Bytes::from(answer.map_err(|status| status.message().to_owned())?.to_string());
    let headers = HeaderMap::from_iter([(header::CONTENT_TYPE, HeaderValue::from_static("application/json"))]);
    Ok(Answer { status: StatusCode::OK, headers, body })
}

fn pass_through(answer: Result<Answer, Untold>) -> Response<Body> {
    match answer {
        Ok(answer) => {
            let mut response = Response::new(Body::from(answer.body));
            *response.status_mut() = answer.status;
            *response.headers_mut() = relay_headers(&answer.headers);
            response
        }
        Err(Untold::Nobody) => GatewayError::Select(SelectError::NoPrefillServers).into_response(),
        Err(Untold::Failed(reason)) => envelope(StatusCode::BAD_GATEWAY, "prefill_request_failed", &reason),
    }
}

/// `GET /get_server_info`: what the first prefill (else regular) engine says about itself.
pub(super) async fn server_info(State(front): State<Front>, headers: HeaderMap) -> Response<Body> {
    let Front { core, asks, .. } = front;
    let begin = || spoken(Arc::clone(&core), Subject::Server, core.hops.onward(&headers));
    pass_through(asks.server_info.join(begin).await)
}

/// `GET /get_model_info`: what it says about its model.
pub(super) async fn model_info(State(front): State<Front>, headers: HeaderMap) -> Response<Body> {
    let Front { core, asks, .. } = front;
    let begin = || spoken(Arc::clone(&core), Subject::Model, core.hops.onward(&headers));
    pass_through(asks.model_info.join(begin).await)
}

/// `GET /health_generate`: whether both legs of a pair (or a regular engine) generate; over gRPC, whether they are well by their own word.
pub(super) async fn health_generate(State(front): State<Front>, headers: HeaderMap) -> Response<Body> {
    let Front { core, asks, .. } = front;
    match asks.health.join(|| generation(Arc::clone(&core), core.hops.onward(&headers))).await {
        Ok(()) => json_response(StatusCode::OK, &json!({"status": "healthy"})),
        Err(Ill::NoPair) => {
            envelope(StatusCode::SERVICE_UNAVAILABLE, "no_healthy_worker_pair", "No healthy worker pair available")
        }
        Err(Ill::Failed(reason)) => envelope(StatusCode::SERVICE_UNAVAILABLE, "health_generate_failed", &reason),
    }
}

/// Why nothing is generated.
#[derive(Clone)]
enum Ill {
    /// There is nobody to ask.
    NoPair,
    /// A leg does not generate.
    Failed(String),
}

async fn generation(core: Arc<Core>, hops: HeaderValue) -> Result<(), Ill> {
    let workers = able(&core);
    // Legs of one pair are of one wire.
    let pair = [Wire::Http, Wire::Grpc].into_iter().find_map(|wire| {
        let of_wire = |role| workers.iter().find(|worker| worker.wire() == wire && worker.spec.worker_type == role);
        of_wire(WorkerType::Prefill).zip(of_wire(WorkerType::Decode))
    });
    let legs: Vec<&Arc<Worker>> = match (pair, first_of(&workers, WorkerType::Regular)) {
        (Some((prefill, decode)), _) => vec![prefill, decode],
        (None, Some(regular)) => vec![regular],
        (None, None) => return Err(Ill::NoPair),
    };
    let asked = legs.iter().map(|worker| generates(&core, worker, hops.clone()));
    let answers = futures::future::join_all(asked).await;
    let failed = legs.iter().zip(answers).find_map(|(worker, answer)| {
        let reason = answer.err()?;
        Some(format!("{}: {reason}", worker.spec.url))
    });
    failed.map_or(Ok(()), |reason| Err(Ill::Failed(reason)))
}

async fn generates(core: &Core, worker: &Worker, hops: HeaderValue) -> Result<(), String> {
    if worker.wire() == Wire::Grpc {
        let client = client_of(core, worker).ok_or("its engine is not known here")?;
        return match tokio::time::timeout(WORK_TIMEOUT, client.is_healthy()).await {
            Ok(Ok(true)) => Ok(()),
            Ok(Ok(false)) => Err("it says that it is not well".to_owned()),
            Ok(Err(status)) => Err(status.message().to_owned()),
            Err(_) => Err("no answer in time".to_owned()),
        };
    }
    work(core, worker, Method::GET, "/health_generate", hops).await
}

/// How a worker that speaks gRPC is spoken to.
pub(crate) fn client_of(core: &Core, worker: &Worker) -> Option<Client> {
    let runtime = core.table.load().runtimes_of(worker).next().map(|(runtime, _)| Arc::clone(runtime))?;
    Client::new(worker.runtime(), runtime.channel(&worker.spec.url, core.options.worker_tls.as_ref())?)
}

async fn flush(core: &Core, worker: &Worker, hops: HeaderValue) -> Result<(), String> {
    if worker.wire() == Wire::Grpc {
        let client = client_of(core, worker).ok_or("its engine is not known here")?;
        let flushed = tokio::time::timeout(WORK_TIMEOUT, client.flush_cache(WORK_TIMEOUT)).await;
        return match flushed {
            Ok(flushed) => flushed.map_err(|status| status.message().to_owned()),
            Err(_) => Err("no answer in time".to_owned()),
        };
    }
    work(core, worker, Method::POST, "/flush_cache", hops).await
}

/// `POST /flush_cache`: every engine flushes its cache. 206 when some did not.
pub(super) async fn flush_cache(State(front): State<Front>, headers: HeaderMap) -> Response<Body> {
    let core = Arc::clone(&front.core);
    let hops = core.hops.onward(&headers);
    let all: Vec<Arc<Worker>> = core.table.load().snapshot.workers.values().cloned().collect();
    let speaks = |wire| all.iter().filter(|worker| worker.wire() == wire).count();
    let (http, grpc, zmq) = (speaks(Wire::Http), speaks(Wire::Grpc), speaks(Wire::Zmq));
    let asked: Vec<_> = all.iter().filter(|worker| worker.wire() != Wire::Zmq).cloned().collect();
    let results: Vec<(String, Result<(), String>)> = stream::iter(asked)
        .map(|worker| {
            let (core, hops) = (Arc::clone(&core), hops.clone());
            async move { (worker.spec.url.clone(), flush(&core, &worker, hops).await) }
        })
        .buffered(FAN_OUT)
        .collect()
        .await;
    let successful: Vec<&String> = results.iter().filter(|(_, result)| result.is_ok()).map(|(url, _)| url).collect();
    let failed: Vec<Value> = results
        .iter()
        .filter_map(|(url, result)| Some(json!({"worker": url, "error": result.as_ref().err()?})))
        .collect();
    let (status, word) =
        if failed.is_empty() { (StatusCode::OK, "success") } else { (StatusCode::PARTIAL_CONTENT, "partial_success") };
    let message = format!("flushed {} of {} workers", successful.len(), http + grpc);
    let mut body = json!({
        "status": word,
        "message": message,
        "workers_flushed": successful.len(),
        "total_http_workers": http,
        "total_grpc_workers": grpc,
        "total_zmq_workers_skipped": zmq,
        "total_workers": all.len(),
        "successful": successful,
    });
    if !failed.is_empty() {
        body["failed"] = Value::Array(failed);
    }
    json_response(status, &body)
}

/// `GET /engine_metrics`: the metrics of every reachable engine, each sample labelled with its worker.
pub(super) async fn metrics(State(front): State<Front>, headers: HeaderMap) -> Response<Body> {
    let Front { core, asks, .. } = front;
    let page = asks.metrics.join(|| all_metrics(Arc::clone(&core), core.hops.onward(&headers))).await;
    let Some(page) = page else {
        return envelope(StatusCode::INTERNAL_SERVER_ERROR, "no_engine_metrics", "no engine answered with metrics");
    };
    let mut response = Response::new(Body::from(page));
    let content_type = HeaderValue::from_static(smg_telemetry::metrics::CONTENT_TYPE);
    response.headers_mut().insert(header::CONTENT_TYPE, content_type);
    response
}

async fn all_metrics(core: Arc<Core>, hops: HeaderValue) -> Option<Bytes> {
    let texts: Vec<Option<(String, String)>> = stream::iter(reachable(&core))
        .map(|worker| {
            let (core, hops) = (Arc::clone(&core), hops.clone());
            async move {
                let answer =
                    tell(&core, &worker, "/metrics", hops).await.ok().filter(|answer| answer.status.is_success())?;
                Some((worker.spec.url.clone(), String::from_utf8_lossy(&answer.body).into_owned()))
            }
        })
        .buffered(FAN_OUT)
        .collect()
        .await;
    let texts: Vec<(String, String)> = texts.into_iter().flatten().collect();
    (!texts.is_empty()).then(|| Bytes::from(exposition::merge(&texts)))
}
