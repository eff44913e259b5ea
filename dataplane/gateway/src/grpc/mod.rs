//! Serving requests through workers that speak gRPC.
//!
//! Such workers take token ids and give token ids, so the gateway does the rest itself:
//!
//! ```text
//!  prepare    read, render, tokenize                once per request, whatever the attempts
//!     │       (tokenizers: one per model)
//!  select     as for any worker                     crate::select, per attempt
//!     │
//!  serve      context length, rooms of the decode   per attempt
//!     │
//!  dispatch ──► parallel    both legs around a rendezvous              (SGLang, TokenSpeed)
//!     │     ──► sequential  prefill, then decode with its handoff     (vLLM)
//!     │     ──► alone       one worker
//!     │                └──► leg: a task of its own, until its engine is done
//!  respond    running legs ─► text, calls, reasoning ─► the client's API
//! ```
//!
//! A model may have HTTP and gRPC workers at once: which wire a request takes is the wire of the pair that was selected for it.

pub mod assemble;
pub mod claim;
pub mod client;
pub mod describe;
mod dispatch;
pub mod leg;
pub mod loads;
mod parallel;
pub mod prepare;
pub mod refusal;
mod respond;
pub mod responses;
pub mod rooms;
pub mod running;
mod sequential;
pub mod status;
pub mod tokenizers;

use std::sync::Arc;
use std::time::{Duration, Instant as StdInstant};

use axum::body::Body;
use http::{HeaderValue, Response, StatusCode, header};
use smg_engines::vllm::Connector;
use smg_fleet::{Runtime, Wire, Worker};
use tokio::time::Instant;

use crate::admission::decode::Shed;
use crate::core::Core;
use crate::dispatch::scope::Scope;
use crate::dispatch::{Failed, Inbound, Job, deadline};
use crate::fleet::table::ModelPool;
use crate::fleet::worker::{InFlight, RoutedWorker};
use crate::front::error::GatewayError;
use crate::select::Selection;
use claim::Claim;
use client::Client;
use dispatch::{Attempt, Claims, Side};
use leg::Part;
use prepare::Prepared;
use refusal::Refusal;
use respond::Timing;
use running::Running;

impl Core {
    /// How a worker is spoken to over gRPC; `None` when it does not speak it, or not in a way that is known here.
    pub fn client_of(&self, worker: &RoutedWorker) -> Option<Client> {
        self.client_as(worker, worker.engine())
    }

    /// How it is spoken to as an engine of this runtime.
    pub fn client_as(&self, worker: &RoutedWorker, runtime: Runtime) -> Option<Client> {
        let url = worker.record.url().ok()?;
        let channel = worker.runtime.channel(url.as_str(), self.options.worker_tls.as_ref())?;
        Client::new(runtime, channel)
    }
}

/// Prepares a request for the workers of `pool`.
///
/// # Errors
/// The request is at fault, or the model's tokenizer is not there.
pub async fn prepare(core: &Arc<Core>, request: &Inbound, pool: &ModelPool) -> Result<Arc<Prepared>, GatewayError> {
    // Where nobody could serve it the request is not looked at: such engines have no tokenizer to give either.
    let prefills = pool.prefills.iter().map(|entry| &entry.worker);
    if !prefills.chain(&pool.decodes).chain(&pool.regulars).any(|worker| is_spoken(worker.engine())) {
        return Err(Refusal::runtime().into());
    }
    in_time(core, request, prepare::prepare(core, request, pool)).await
}

/// Does what comes before a leg within the request's time. Who asked a worker after it could only blame it.
async fn in_time<T>(
    core: &Core,
    request: &Inbound,
    work: impl Future<Output = Result<T, Refusal>>,
) -> Result<T, GatewayError> {
    match tokio::time::timeout_at(deadline(core, request), work).await {
        Ok(done) => done.map_err(GatewayError::Refused),
        Err(_) => Err(GatewayError::OutOfTime),
    }
}

/// Answers how many tokens a message's prompt has. No worker is asked.
pub async fn count_tokens(core: &Arc<Core>, request: &Inbound, pool: &ModelPool, scope: &mut Scope) -> Response<Body> {
    match in_time(core, request, prepare::count_tokens(core, request, pool)).await {
        Ok(tokens) => {
            scope.complete(StatusCode::OK);
            let mut response = Response::new(Body::from(smg_apis::messages::write_count(tokens)));
            let json = HeaderValue::from_static("application/json");
            response.headers_mut().insert(header::CONTENT_TYPE, json);
            response
        }
        Err(error) => {
            scope.fail(error.status(), error.code());
            error.into_response()
        }
    }
}

/// Serves a request with the workers that were selected for it. `prepared` is filled by the first attempt that needs it.
pub(crate) async fn serve(
    job: &Job<'_>,
    selection: Selection,
    prepared: &mut Option<Arc<Prepared>>,
    scope: &mut Option<Scope>,
) -> Result<Response<Body>, Failed> {
    let refuse = |refusal: Refusal| Failed::gateway(GatewayError::Refused(refusal.of_the_wire()), None);
    let request = match prepared {
        Some(request) => Arc::clone(request),
        None => {
            let prepared_in_time = in_time(job.core, job.request, prepare::prepare(job.core, job.request, job.pool));
            let request = prepared_in_time.await.map_err(|error| match error {
                GatewayError::Refused(refusal) => refuse(refusal),
                error => Failed::gateway(error, None),
            })?;
            Arc::clone(prepared.insert(request))
        }
    };
    let (prefill, output) = match selection {
        Selection::Pair { prefill, decode } => (Some(prefill), decode),
        Selection::Regular(worker) => (None, worker),
    };
    check_runtimes(prefill.as_ref(), &output).map_err(refuse)?;
    check_window(&request, &job.model, prefill.as_ref(), &output).map_err(refuse)?;
    if let Some(scope) = scope {
        scope.runs_on(Wire::Grpc);
    }
    if request.asks_for_nothing() {
        return Ok(respond::nothing(job, &request, scope));
    }
    let admitted = admit(job, &request, prefill, output).await;
    let (attempt, claims) = admitted.map_err(|refusal| Failed::gateway(GatewayError::Refused(refusal), None))?;
    let dispatched = StdInstant::now();
    let worker = Arc::clone(&attempt.output.worker);
    let running = attempt.run(claims).await?;
    let timing = timing(&attempt, scope.as_ref(), &running, dispatched);
    respond::answer(job, &request, running, timing, &worker, scope).await
}

/// Whether it is known how engines of this runtime speak gRPC. One that nobody detected is taken for SGLang.
fn is_spoken(runtime: Runtime) -> bool {
    matches!(runtime, Runtime::Sglang | Runtime::Vllm | Runtime::Tokenspeed | Runtime::Unspecified)
}

/// Only some engines have a way to hand a KV cache over on this wire.
fn check_runtimes(prefill: Option<&InFlight>, output: &InFlight) -> Result<(), Refusal> {
    let Some(prefill) = prefill else { return Ok(()) };
    let workers = [prefill.worker(), output.worker()];
    if workers.iter().any(|worker| worker.connector == Connector::Moriio && worker.engine() == Runtime::Vllm) {
        return Err(Refusal::moriio());
    }
    if workers.iter().all(|worker| is_spoken(worker.engine())) && workers[0].engine() == workers[1].engine() {
        Ok(())
    } else {
        Err(Refusal::runtime())
    }
}

/// The prompt must fit both legs.
fn check_window(request: &Prepared, model: &str, prefill: Option<&InFlight>, output: &InFlight) -> Result<(), Refusal> {
    let windows = prefill.into_iter().chain([output]).filter_map(|leg| context_window(&leg.worker().record, model));
    let tokens = request.longest_prompt();
    match windows.min() {
        Some(limit) if tokens as u64 > limit => Err(Refusal::context_length(limit, tokens)),
        _ => Ok(()),
    }
}

/// How many tokens a worker's context has, as its model card or the engine says.
fn context_window(worker: &Worker, model: &str) -> Option<u64> {
    let card = worker.models().iter().find(|card| card.id == model).and_then(|card| card.context_length);
    let labels = ["context_length", "max_context_length", "max_model_len", "max_total_tokens", "max_seq_len"];
    let label = |name: &&str| worker.label(name)?.trim().parse::<u64>().ok().filter(|window| *window > 0);
    card.filter(|window| *window > 0).or_else(|| labels.iter().find_map(label))
}

/// Waits for rooms on the decode worker, and makes ready what the legs need.
async fn admit<'a>(
    job: &'a Job<'a>,
    request: &'a Prepared,
    prefill: Option<InFlight>,
    output: InFlight,
) -> Result<(Attempt<'a>, Claims), Refusal> {
    let worker = Arc::clone(output.worker());
    let requests = dispatch::engine_requests(request, worker.engine());
    let permit = match &prefill {
        None => None,
        Some(_) => {
            let wait = Duration::from_secs(job.pool.settings.pd_admission_wait_secs);
            let wait = wait.min(job.deadline.saturating_duration_since(Instant::now()));
            let permit = worker.runtime.window.claim(requests, wait).await;
            Some(permit.map_err(|shed| not_admitted(job, &worker, shed))?)
        }
    };
    veto(job, prefill.iter().chain([&output]))?;
    let part = if prefill.is_some() { Part::Decode } else { Part::Regular };
    let side = |claim: &InFlight, part| {
        let worker = Arc::clone(claim.worker());
        let client = job.core.client_of(&worker).ok_or_else(Refusal::runtime)?;
        Ok::<_, Refusal>(Side { worker, client, part })
    };
    let attempt = Attempt {
        job,
        request,
        prefill: prefill.as_ref().map(|claim| side(claim, Part::Prefill)).transpose()?,
        output: side(&output, part)?,
    };
    let claims = Claims {
        prefill: prefill.map(|claim| Claim::new(claim, requests, None)),
        output: Claim::new(output, requests, permit),
    };
    Ok((attempt, claims))
}

/// The decode worker had no rooms in time.
fn not_admitted(job: &Job<'_>, worker: &RoutedWorker, shed: Shed) -> Refusal {
    let message = format!(
        "Decode worker '{}' for model '{}' could not admit {} request(s) within its running window of {}",
        worker.url, job.model, shed.rooms, shed.window
    );
    Refusal::shed(message, job.core.options.load.interval_secs())
}

/// Whoever waited may find that a worker has become overloaded meanwhile. Where requests are refused then, this one is.
fn veto<'a>(job: &Job<'_>, legs: impl Iterator<Item = &'a InFlight>) -> Result<(), Refusal> {
    if !job.pool.settings.overload.shed {
        return Ok(());
    }
    let now = job.core.clock.now_ms();
    let mut workers = legs.map(InFlight::worker);
    let Some(worker) = workers.find(|worker| worker.is_overloaded(now)) else { return Ok(()) };
    job.core.metrics.worker_overload_shed.with_label_values(&["dispatch"]).inc();
    let message = format!("Worker '{}' for model '{}' became overloaded before dispatch", worker.url, job.model);
    Err(Refusal::shed(message, job.core.options.load.interval_secs()))
}

/// What the first output will have taken. The decode's part is measured from when it was sent.
fn timing(attempt: &Attempt<'_>, scope: Option<&Scope>, running: &[Running], dispatched: StdInstant) -> Timing {
    let job = attempt.job;
    let metrics = &job.core.metrics;
    let sent = running.iter().map(Running::sent).min().unwrap_or(dispatched);
    let backend = scope.map_or("pd", |scope| scope.backend().as_str());
    let labels = ["grpc", backend, &*job.model, job.request.route.endpoint_label()];
    let mut first_output = vec![(metrics.router_ttft.with_label_values(&labels), sent)];
    if let Some(prefill) = &attempt.prefill {
        let labels = ["pd", &*job.model, prefill.worker.engine().as_str()];
        first_output.push((metrics.pd_decode_ttft.with_label_values(&labels), sent));
        // Documented for streams of engines whose legs are sent together.
        if prefill.worker.engine() != Runtime::Vllm && attempt.request.generation().stream {
            first_output.push((metrics.pd_ttft.with_label_values(&labels), dispatched));
        }
    }
    Timing { dispatched: sent, first_output }
}

#[cfg(test)]
mod flow_tests;
