//! Routes that ask engines something on an operator's behalf: one of them, a pair, or all.
//!
//! Answers of single engines pass through. Fan-outs ask a bounded number at a time and report who failed.

use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::extract::State;
use bytes::Bytes;
use futures::stream::{self, StreamExt};
use http::{HeaderValue, Method, Request, Response, StatusCode, header};
use http_body_util::{BodyExt, Limited};
use serde_json::{Value, json};
use smg_engines::headers::relay_headers;
use smg_fleet::{Wire, Worker, WorkerType};

use super::Front;
use super::error::{GatewayError, envelope};
use super::probes::json_response;
use crate::core::Core;
use crate::dispatch::leg::LegBody;
use crate::grpc::client::Client;
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

struct Answer {
    head: http::response::Parts,
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
    let answer = ask_up_to(core, worker, Method::GET, path, limit, most).await?;
    Ok((answer.head.status, answer.body))
}

async fn ask(core: &Core, worker: &Worker, method: Method, path: &str, limit: Duration) -> Result<Answer, String> {
    ask_up_to(core, worker, method, path, limit, MAX_ANSWER).await.map_err(|unanswered| unanswered.reason)
}

async fn ask_up_to(
    core: &Core,
    worker: &Worker,
    method: Method,
    path: &str,
    limit: Duration,
    most: usize,
) -> Result<Answer, Unanswered> {
    let mut request = Request::builder().method(method).uri(format!("{}{path}", worker.spec.url));
    if let Some(key) = &worker.spec.api_key {
        request = request.header(header::AUTHORIZATION, format!("Bearer {}", &**key));
    }
    let request = request.body(LegBody::Empty).map_err(|error| Unanswered::other(error.to_string()))?;
    let exchange = async {
        let answer = core.client.request(request).await.map_err(|error| Unanswered::broken(describe(&error)));
        let (head, body) = answer?.into_parts();
        if head.status.is_informational() {
            return Err(Unanswered::other(format!("the worker answered {}", head.status)));
        }
        let body = Limited::new(body, most).collect().await.map_err(|error| Unanswered::other(error.to_string()));
        Ok(Answer { head, body: body?.to_bytes() })
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

/// The engine that speaks for all: the first prefill, else regular one, of those over HTTP if there are any.
fn spokesman(core: &Core) -> Option<Arc<Worker>> {
    let workers = able(core);
    let of = |wire, role| workers.iter().find(move |worker| worker.wire() == wire && worker.spec.worker_type == role);
    let roles = [WorkerType::Prefill, WorkerType::Regular];
    [Wire::Http, Wire::Grpc].into_iter().find_map(|wire| roles.into_iter().find_map(|role| of(wire, role))).cloned()
}

async fn tell(front: &Front, subject: Subject) -> Response<Body> {
    let Some(worker) = spokesman(&front.core) else {
        return GatewayError::Select(SelectError::NoPrefillServers).into_response();
    };
    let failed = |reason: String| envelope(StatusCode::BAD_GATEWAY, "prefill_request_failed", &reason);
    if worker.wire() == Wire::Grpc {
        return match tell_over_grpc(&front.core, &worker, subject).await {
            Ok(answer) => json_response(StatusCode::OK, &answer),
            Err(reason) => failed(reason),
        };
    }
    let path = match subject {
        Subject::Server => "/get_server_info",
        Subject::Model => "/get_model_info",
    };
    match ask(&front.core, &worker, Method::GET, path, ASK_TIMEOUT).await {
        Ok(answer) => {
            let mut response = Response::new(Body::from(answer.body));
            *response.status_mut() = answer.head.status;
            *response.headers_mut() = relay_headers(&answer.head.headers);
            response
        }
        Err(reason) => failed(reason),
    }
}

async fn tell_over_grpc(core: &Core, worker: &Worker, subject: Subject) -> Result<Value, String> {
    let client = client_of(core, worker).ok_or("its engine is not known here")?;
    let asked = async {
        match subject {
            Subject::Server => client.server_info().await,
            Subject::Model => client.model_info().await,
        }
    };
    match tokio::time::timeout(ASK_TIMEOUT, asked).await {
        Ok(answer) => answer.map_err(|status| status.message().to_owned()),
        Err(_) => Err("no answer in time".to_owned()),
    }
}

/// `GET /get_server_info`: what the first prefill (else regular) engine says about itself.
pub(super) async fn server_info(State(front): State<Front>) -> Response<Body> {
    tell(&front, Subject::Server).await
}

/// `GET /get_model_info`: what it says about its model.
pub(super) async fn model_info(State(front): State<Front>) -> Response<Body> {
    tell(&front, Subject::Model).await
}

/// `GET /health_generate`: whether both legs of a pair (or a regular engine) generate; over gRPC, whether they are well by their own word.
pub(super) async fn health_generate(State(front): State<Front>) -> Response<Body> {
    let workers = able(&front.core);
    // Legs of one pair are of one wire.
    let pair = [Wire::Http, Wire::Grpc].into_iter().find_map(|wire| {
        let of_wire = |role| workers.iter().find(|worker| worker.wire() == wire && worker.spec.worker_type == role);
        of_wire(WorkerType::Prefill).zip(of_wire(WorkerType::Decode))
    });
    let legs: Vec<&Arc<Worker>> = match (pair, first_of(&workers, WorkerType::Regular)) {
        (Some((prefill, decode)), _) => vec![prefill, decode],
        (None, Some(regular)) => vec![regular],
        (None, None) => {
            return envelope(
                StatusCode::SERVICE_UNAVAILABLE,
                "no_healthy_worker_pair",
                "No healthy worker pair available",
            );
        }
    };
    let asked = legs.iter().map(|worker| generates(&front.core, worker));
    let answers = futures::future::join_all(asked).await;
    let failed = legs.iter().zip(answers).find_map(|(worker, answer)| {
        let reason = answer.err()?;
        Some(format!("{}: {reason}", worker.spec.url))
    });
    match failed {
        None => json_response(StatusCode::OK, &json!({"status": "healthy"})),
        Some(reason) => envelope(StatusCode::SERVICE_UNAVAILABLE, "health_generate_failed", &reason),
    }
}

async fn generates(core: &Core, worker: &Worker) -> Result<(), String> {
    if worker.wire() == Wire::Grpc {
        let client = client_of(core, worker).ok_or("its engine is not known here")?;
        return match tokio::time::timeout(WORK_TIMEOUT, client.is_healthy()).await {
            Ok(Ok(true)) => Ok(()),
            Ok(Ok(false)) => Err("it says that it is not well".to_owned()),
            Ok(Err(status)) => Err(status.message().to_owned()),
            Err(_) => Err("no answer in time".to_owned()),
        };
    }
    let answer = ask(core, worker, Method::GET, "/health_generate", WORK_TIMEOUT).await?;
    if answer.head.status.is_success() { Ok(()) } else { Err(format!("answered {}", answer.head.status)) }
}

/// How a worker that speaks gRPC is spoken to.
pub(crate) fn client_of(core: &Core, worker: &Worker) -> Option<Client> {
    let runtime = core.table.load().runtimes_of(worker).next().map(|(runtime, _)| Arc::clone(runtime))?;
    Client::new(worker.runtime(), runtime.channel(&worker.spec.url, core.options.worker_tls.as_ref())?)
}

async fn flush(core: &Core, worker: &Worker) -> Result<(), String> {
    if worker.wire() == Wire::Grpc {
        let client = client_of(core, worker).ok_or("its engine is not known here")?;
        let flushed = tokio::time::timeout(WORK_TIMEOUT, client.flush_cache(WORK_TIMEOUT)).await;
        return match flushed {
            Ok(flushed) => flushed.map_err(|status| status.message().to_owned()),
            Err(_) => Err("no answer in time".to_owned()),
        };
    }
    let answer = ask(core, worker, Method::POST, "/flush_cache", WORK_TIMEOUT).await?;
    match answer.head.status {
        status if status.is_success() => Ok(()),
        status => Err(format!("answered {status}")),
    }
}

/// `POST /flush_cache`: every engine flushes its cache. 206 when some did not.
pub(super) async fn flush_cache(State(front): State<Front>) -> Response<Body> {
    let core = Arc::clone(&front.core);
    let all: Vec<Arc<Worker>> = core.table.load().snapshot.workers.values().cloned().collect();
    let speaks = |wire| all.iter().filter(|worker| worker.wire() == wire).count();
    let (http, grpc, zmq) = (speaks(Wire::Http), speaks(Wire::Grpc), speaks(Wire::Zmq));
    let asked: Vec<_> = all.iter().filter(|worker| worker.wire() != Wire::Zmq).cloned().collect();
    let results: Vec<(String, Result<(), String>)> = stream::iter(asked)
        .map(|worker| {
            let core = Arc::clone(&core);
            async move { (worker.spec.url.clone(), flush(&core, &worker).await) }
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
pub(super) async fn metrics(State(front): State<Front>) -> Response<Body> {
    let core = Arc::clone(&front.core);
    let answers: Vec<Option<String>> = stream::iter(reachable(&core))
        .map(|worker| {
            let core = Arc::clone(&core);
            async move {
                let answer = ask(&core, &worker, Method::GET, "/metrics", ASK_TIMEOUT).await.ok()?;
                let text =
                    answer.head.status.is_success().then(|| String::from_utf8(answer.body.into()).ok()).flatten()?;
                Some(label_samples(&text, &worker.spec.url))
            }
        })
        .buffered(FAN_OUT)
        .collect()
        .await;
    let texts: Vec<String> = answers.into_iter().flatten().collect();
    if texts.is_empty() {
        return envelope(StatusCode::INTERNAL_SERVER_ERROR, "no_engine_metrics", "no engine answered with metrics");
    }
    let mut response = Response::new(Body::from(merge_families(&texts)));
    let content_type = HeaderValue::from_static(smg_telemetry::metrics::CONTENT_TYPE);
    response.headers_mut().insert(header::CONTENT_TYPE, content_type);
    response
}

/// Adds `worker_addr` to every sample of an exposition text.
fn label_samples(text: &str, worker: &str) -> String {
    let worker = worker.replace('\\', "\\\\").replace('"', "\\\"");
    let mut labelled = String::with_capacity(text.len() + text.len() / 2);
    for line in text.lines() {
        if line.starts_with('#') || line.trim().is_empty() {
            labelled.push_str(line);
        } else if let Some((name, rest)) = line.split_once('{') {
            let separator = if rest.starts_with('}') { "" } else { "," };
            labelled.push_str(&format!("{name}{{worker_addr=\"{worker}\"{separator}{rest}"));
        } else if let Some((name, value)) = line.split_once(' ') {
            labelled.push_str(&format!("{name}{{worker_addr=\"{worker}\"}} {value}"));
        }
        labelled.push('\n');
    }
    labelled
}

/// Joins exposition texts so that each family's lines stand together under one head, as the format demands.
fn merge_families(texts: &[String]) -> String {
    let mut order: Vec<&str> = Vec::new();
    let mut families: std::collections::HashMap<&str, (Vec<&str>, Vec<&str>)> = std::collections::HashMap::new();
    for text in texts {
        let mut current = "";
        for line in text.lines() {
            let head = line.strip_prefix("# HELP ").or_else(|| line.strip_prefix("# TYPE "));
            if let Some(head) = head {
                current = head.split(' ').next().unwrap_or_default();
            } else if line.starts_with('#') || line.is_empty() {
                continue;
            } else if !line.starts_with(current) || current.is_empty() {
                current = line.split(['{', ' ']).next().unwrap_or_default();
            }
            let family = families.entry(current).or_insert_with(|| {
                order.push(current);
                Default::default()
            });
            match head {
                Some(_) if family.0.contains(&line) => {}
                Some(_) => family.0.push(line),
                None => family.1.push(line),
            }
        }
    }
    let mut merged = String::new();
    for family in order.iter().filter_map(|name| families.get(name)) {
        // Engines of two versions may describe a family differently: the first description stands.
        let kinds = ["# HELP ", "# TYPE "];
        let heads = kinds.iter().filter_map(|kind| family.0.iter().find(|line| line.starts_with(kind)));
        for line in heads.chain(&family.1) {
            merged.push_str(line);
            merged.push('\n');
        }
    }
    merged
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_sample_names_its_worker_and_families_stand_together() {
        let one = label_samples("# HELP a Help.\n# TYPE a counter\na{x=\"1\"} 2\na 3\nb{} 4\n", "http://p:1");
        let other = label_samples("# HELP a Help.\n# TYPE a counter\na{x=\"1\"} 5\n", "http://d:1");
        let merged = merge_families(&[one, other]);
        let expected = "# HELP a Help.\n# TYPE a counter\na{worker_addr=\"http://p:1\",x=\"1\"} 2\n\
                        a{worker_addr=\"http://p:1\"} 3\na{worker_addr=\"http://d:1\",x=\"1\"} 5\n\
                        b{worker_addr=\"http://p:1\"} 4\n";
        assert_eq!(merged, expected);
    }
}
