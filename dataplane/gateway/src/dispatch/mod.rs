//! Serving one request: attempts over selected workers, each run by the protocol of its pair.
//!
//! ```text
//!  select ──► crate::grpc whatever the pair, where its workers speak gRPC
//!         ──► parallel    both legs at once around a rendezvous           (SGLang and other non-vLLM prefills)
//!         ──► sequential  prefill, then decode with what it handed over   (vLLM prefills)
//!         ──► moriio      either, with pair, request and handoff checked  (MoRI-IO on either side)
//!         ──► regular     one leg
//! ```
//!
//! Invariants
//! * each leg holds a claim on its worker, so every failure is charged to the leg that failed and every exit releases what it took;
//! * an attempt that failed before its response head may be followed by another on workers not tried yet; after that nothing is retried;
//! * dropping the future (the client left) closes both legs.

pub mod explain;
mod job;
pub mod leg;
mod logprobs;
mod moriio;
mod parallel;
mod race;
mod regular;
mod respond;
pub mod scope;
mod sequential;
mod wire;

use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use http::{HeaderMap, Response};
use smg_engines::vllm::Connector;
use smg_engines::{ClientBody, Legs, Route};
use smg_fleet::{Runtime, Wire};
use smg_net::overdue::EndBy;
use smg_policies::Leg;
use smg_telemetry::ROUTERS;
use tokio::time::Instant;

use crate::core::Core;
use crate::decision::{Attempt, Decision, Record};
use crate::fleet::policies;
use crate::fleet::table::{Lookup, ModelPool, UNKNOWN_MODEL};
use crate::fleet::worker::RoutedWorker;
use crate::front::error::GatewayError;
use crate::grpc;
use crate::grpc::prepare::Prepared;
use crate::heavy;
use crate::hints::Hints;
use crate::resilience::retry;
use crate::select::{self, Choice, SelectError, Selection, Tried};
use crate::trace::RequestTrace;
use crate::words;
use job::LegCodes;
pub(crate) use job::{Failed, Job};
use scope::{Backend, Scope};

/// Policies may read the prompt of a body larger than this for longer than others should wait.
const LARGE: usize = 512 * 1024;

/// A request that has been read.
pub struct Inbound {
    /// Its route.
    pub route: Route,
    /// Its headers.
    pub headers: HeaderMap,
    /// Its body.
    pub body: ClientBody,
    /// Its id: the client's or a minted one.
    pub request_id: Arc<str>,
    /// When it arrived.
    pub arrived: std::time::Instant,
    /// Its trace, if it has one.
    pub trace: Option<Arc<RequestTrace>>,
    /// Whether the client asks for the decision on it, and may have it.
    pub explain: bool,
}

/// Serves one request.
pub async fn serve(core: &Arc<Core>, request: Inbound) -> Response<Body> {
    let (decision, mut response) = route(core, &request).await;
    // A client that does not read cannot keep what the request holds beyond its time.
    response.extensions_mut().insert(EndBy(deadline(core, &request)));
    if request.explain
        && let Some(value) = decision.read(explain::header)
    {
        response.headers_mut().insert(explain::DECISION, value);
    }
    response
}

/// When the request's time is over.
pub(crate) fn deadline(core: &Core, request: &Inbound) -> Instant {
    Instant::from_std(request.arrived) + core.options.request_timeout
}

async fn route(core: &Arc<Core>, request: &Inbound) -> (Decision, Response<Body>) {
    let mut found = core.table.load().lookup(request.body.model());
    let mut current = true;
    if let Lookup::UnknownModel = found {
        // Another gateway may know it already: only what the control plane confirms is unknown.
        current = core.freshness.is_current(core).await;
        found = core.table.load().lookup(request.body.model());
    }
    let pool = match found {
        Lookup::Pool(pool) if request.route.legs() == Legs::RegularOnly && pool.regulars.is_empty() => {
            return refuse(core, request, GatewayError::NotForPairs(request.route.path()));
        }
        Lookup::Pool(pool) if wire::needs_http(request.route) && !wire::speaks_http(request.route, &pool) => {
            return refuse(core, request, GatewayError::NotOverGrpc(request.route.path()));
        }
        Lookup::Pool(pool) => pool,
        Lookup::UnknownModel => {
            let model = request.body.model().unwrap_or_default().to_owned();
            let error = if current { GatewayError::ModelNotFound(model) } else { GatewayError::ModelUnknownYet(model) };
            return refuse(core, request, error);
        }
        Lookup::ModelRequired => return refuse(core, request, GatewayError::ModelRequired),
        Lookup::NoWorkers => return refuse(core, request, GatewayError::Select(SelectError::Empty("prefill"))),
    };
    let mut record = open_record(core, request, &pool.model);
    record.candidates = [pool.regulars.len(), pool.prefills.len(), pool.decodes.len()];
    let decision = core.decisions.open(record, request.arrived, request.trace.clone());
    let response = if request.route == Route::CountTokens && !pool.wires.http {
        let mut scope = open_scope(core, request, &pool, &decision, Backend::PrefillDecode);
        Box::pin(grpc::count_tokens(core, request, &pool, &mut scope)).await
    } else {
        run_attempts(core, request, pool, decision.clone()).await
    };
    (decision, response)
}

fn open_record(core: &Core, request: &Inbound, model: &str) -> Record {
    Record {
        request_id: request.request_id.to_string(),
        arrived_at_unix_ms: smg_net::unix_millis(),
        endpoint: request.route.endpoint_label(),
        model: model.to_owned(),
        streaming: request.body.stream(),
        revision: *core.revision.borrow(),
        ..Record::default()
    }
}

/// Answers a request that no pool can serve. Its model is the client's invention: series and record do not repeat it.
fn refuse(core: &Core, request: &Inbound, error: GatewayError) -> (Decision, Response<Body>) {
    let record = open_record(core, request, UNKNOWN_MODEL);
    let decision = core.decisions.open(record, request.arrived, request.trace.clone());
    let message = words::cut(error.to_string(), words::KEPT);
    decision.begin_attempt(Attempt { dispatch: "none", error: Some(message), ..Attempt::default() });
    let backend = if request.route.legs() == Legs::RegularOnly { Backend::Regular } else { Backend::PrefillDecode };
    let metrics = Arc::clone(&core.metrics);
    let stream = request.body.stream();
    let model = Arc::from(UNKNOWN_MODEL);
    let mut scope = Scope::open(metrics, decision.clone(), model, request.route, (backend, Some(Wire::Http)), stream);
    scope.fail(error.status(), error.code());
    (decision, error.into_response())
}

async fn run_attempts(
    core: &Arc<Core>,
    request: &Inbound,
    mut pool: Arc<ModelPool>,
    decision: Decision,
) -> Response<Body> {
    let deadline = deadline(core, request);
    // Counting tokens is cheap to ask again: the client may.
    let attempts = if request.route == Route::CountTokens { 1 } else { pool.settings.retry.attempts };
    let only_regular = request.route.legs() == Legs::RegularOnly
        || pool.prefills.is_empty() && pool.decodes.is_empty() && !pool.regulars.is_empty();
    let mut scope = Some(open_scope(
        core,
        request,
        &pool,
        &decision,
        if only_regular { Backend::Regular } else { Backend::PrefillDecode },
    ));
    let mut prepared = None;
    if !pool.wires.http {
        match Box::pin(grpc::prepare(core, request, &pool)).await {
            Ok(request) => prepared = Some(request),
            Err(error) => {
                note_refusal(&decision, &pool, &error, select::Trace::default());
                if let Some(mut scope) = scope {
                    scope.fail(error.status(), error.code());
                }
                return error.into_response();
            }
        }
    }
    pool.budget.earn();
    let mut wire = wire::sole(core, request, &pool);
    let mut tried = Tried::default();
    let mut last: Option<Failed> = None;
    let (mut attempt, mut refused) = (0, false);
    while attempt < attempts {
        if attempt > 0 && !std::mem::take(&mut refused) {
            if !pool.budget.spend(core.clock.now_ms(), &pool.settings.retry) {
                let endpoint = request.route.endpoint_label();
                core.metrics.worker_retries_refused.with_label_values(&[worker_type(&pool), endpoint]).inc();
                break;
            }
            if !pause(core, request, &pool, attempt, deadline).await {
                break;
            }
            // The fleet may have changed while this request waited.
            if let Lookup::Pool(newer) = core.table.load().lookup(request.body.model()) {
                pool = newer;
            }
        }
        if Instant::now() >= deadline {
            // A worker that is asked now could only be blamed for what it had no time to do.
            last = last.or_else(|| Some(Failed::gateway(GatewayError::OutOfTime, None)));
            break;
        }
        decision.begin_selection();
        // What policies remember of prompts is to be of one kind.
        let tokens = prepared.as_deref().filter(|_| !pool.wires.http).and_then(Prepared::first_prompt);
        let wish = Wish { tried: &tried, wire, tokens };
        let (selection, trace) = match admit(core, request, &mut pool, wish, deadline).await {
            (Ok(selection), trace) => (selection, trace),
            (Err(error), trace) => {
                note_refusal(&decision, &pool, &error, trace);
                // A retry that finds nobody left answers with what the attempt before it met.
                last = last.or_else(|| Some(Failed::gateway(error, None)));
                break;
            }
        };
        let job = begin(core, request, &pool, &decision, &selection, trace, deadline);
        let [prefill, decode] = selection.ids();
        let selected = selection.wire();
        let served = match selected {
            Wire::Grpc => Box::pin(grpc::serve(&job, selection, &mut prepared, &mut scope)).await,
            _ => run(&job, selection, &mut scope).await,
        };
        match served {
            Ok(response) => return response,
            Err(failed) => {
                let (status, message) = (failed.status(), failed.describe());
                tracing::debug!(target: ROUTERS, request_id = %request.request_id, %status, message, "attempt failed");
                let message = words::cut(message, words::KEPT);
                job.note(|attempt, now| (attempt.error, attempt.failed_ms) = (Some(message), Some(now)));
                if failed.is_of_the_wire() && wire.is_none() && pool.serves_over(Wire::Http) {
                    // No leg was sent: this was no attempt.
                    (wire, refused) = (Some(Wire::Http), true);
                    continue;
                }
                if let Some(scope) = &mut scope {
                    scope.runs_on(selected);
                }
                attempt += 1;
                tried.note(prefill, decode, failed.blamed);
                if failed.rules_out_the_pair() {
                    tried.rule_out(prefill, decode);
                }
                let again = failed.is_retryable();
                last = Some(failed);
                if !again {
                    break;
                }
            }
        }
    }
    let Some(failed) = last else {
        return GatewayError::Select(SelectError::Unavailable("prefill")).into_response();
    };
    if failed.is_retryable() && attempts > 1 {
        let endpoint = request.route.endpoint_label();
        core.metrics.worker_retries_exhausted.with_label_values(&[worker_type(&pool), endpoint]).inc();
    }
    if let Some(mut scope) = scope {
        scope.fail(failed.status(), failed.code());
    }
    failed.into_response(core, deadline).await
}

/// What an attempt wants of its workers.
#[derive(Clone, Copy)]
struct Wish<'a> {
    /// What earlier attempts tried.
    tried: &'a Tried,
    /// The wire that they must speak, if only one will do.
    wire: Option<Wire>,
    /// The prompt, where the gateway has tokenized it.
    tokens: Option<&'a [u32]>,
}

/// Selects the workers of an attempt, and waits in line where prefill workers are limited and all of them are busy.
async fn admit(
    core: &Core,
    request: &Inbound,
    pool: &mut Arc<ModelPool>,
    wish: Wish<'_>,
    deadline: Instant,
) -> (Result<Selection, GatewayError>, select::Trace) {
    let admission = pool.settings.prefill_admission;
    let limited = admission.limit.is_some() && request.route.legs() == Legs::Pair;
    if !limited || !pool.queue.is_busy() {
        let (selection, trace) = choose(core, request, pool, wish);
        match selection {
            Err(SelectError::PrefillFull) => {}
            selection => return (selection.map_err(GatewayError::Select), trace),
        }
    }
    let metrics = &core.metrics;
    let refuse = |error: GatewayError, reason: &str| {
        metrics.pd_prefill_admission_rejections.with_label_values(&[reason]).inc();
        (Err(error), select::Trace::default())
    };
    let queue = Arc::clone(&pool.queue);
    let Some(waiting) = queue.join(admission.queue_size) else {
        return refuse(GatewayError::PrefillQueueFull, "queue_full");
    };
    let begun = Instant::now();
    let limit = begun + Duration::from_secs(admission.queue_timeout_secs);
    let chosen = waiting.until(limit.min(deadline), || {
        // The fleet may have changed meanwhile.
        if let Lookup::Pool(newer) = core.table.load().lookup(request.body.model()) {
            *pool = newer;
        }
        let (selection, trace) = choose(core, request, pool, wish);
        (!matches!(selection, Err(SelectError::PrefillFull))).then_some((selection, trace))
    });
    let chosen = chosen.await;
    metrics.pd_prefill_admission_wait.observe(begun.elapsed().as_secs_f64());
    match chosen {
        Some((Ok(selection), trace)) => (Ok(selection), trace),
        Some((Err(error), trace)) => {
            metrics.pd_prefill_admission_rejections.with_label_values(&["unavailable"]).inc();
            (Err(GatewayError::Select(error)), trace)
        }
        None => refuse(GatewayError::PrefillQueueTimeout(admission.queue_timeout_secs), "queue_timeout"),
    }
}

/// Selects the workers of an attempt. What policies read of the request is dropped at once: a prompt may be large, and legs run long.
fn choose(
    core: &Core,
    request: &Inbound,
    pool: &ModelPool,
    wish: Wish<'_>,
) -> (Result<Selection, SelectError>, select::Trace) {
    let bytes = request.body.bytes().len();
    heavy::in_place(bytes, LARGE, || choose_here(core, request, pool, wish))
}

fn choose_here(
    core: &Core,
    request: &Inbound,
    pool: &ModelPool,
    wish: Wish<'_>,
) -> (Result<Selection, SelectError>, select::Trace) {
    let Wish { tried, wire, tokens } = wish;
    let hints = Hints::new(&request.headers, &request.body, &core.options.routing_key_headers).with_tokens(tokens);
    let mut trace = select::Trace::default();
    let load_interval_secs = core.options.load.interval_secs();
    let choice = Choice { pool, tried, hints: &hints, wire, now_ms: core.clock.now_ms(), load_interval_secs };
    let selection = match request.route.legs() {
        Legs::Pair => select::select(&choice, rand::random, &mut trace),
        legs => select::select_one(&choice, legs, rand::random, &mut trace),
    };
    let over_grpc = pool.wires.only() == Some(Wire::Grpc);
    let selection = selection.map_err(|error| if over_grpc { error.over_grpc(&pool.model) } else { error });
    if let Ok(selection) = &selection {
        trace.exclusions.extend(tried.passed_over(pool, selection));
    }
    policies::count(&core.metrics, &hints, &trace.picks);
    if trace.picks.iter().any(|pick| pick.branch == select::OVERLOAD_FALLBACK) {
        core.metrics.worker_overload_fallback.with_label_values(&["selection"]).inc();
    }
    if let Err(SelectError::Overloaded { .. }) = &selection {
        core.metrics.worker_overload_shed.with_label_values(&["selection"]).inc();
    }
    (selection, trace)
}

fn worker_type(pool: &ModelPool) -> &'static str {
    if pool.prefills.is_empty() { "regular" } else { "pd" }
}

fn open_scope(core: &Core, request: &Inbound, pool: &ModelPool, decision: &Decision, backend: Backend) -> Scope {
    Scope::open(
        Arc::clone(&core.metrics),
        decision.clone(),
        Arc::clone(&pool.model),
        request.route,
        (backend, pool.wires.only()),
        request.body.stream(),
    )
}

/// Waits before another attempt. False when the request's time would be over by then.
async fn pause(core: &Core, request: &Inbound, pool: &ModelPool, attempt: u32, deadline: Instant) -> bool {
    let delay = retry::delay(&pool.settings.retry, attempt, rand::random());
    if deadline.saturating_duration_since(Instant::now()) <= delay {
        return false;
    }
    let endpoint = request.route.endpoint_label();
    core.metrics.worker_retries.with_label_values(&[worker_type(pool), endpoint]).inc();
    core.metrics.worker_retry_backoff.with_label_values(&[&attempt.to_string()]).observe(delay.as_secs_f64());
    tokio::time::sleep(delay).await;
    true
}

fn note_refusal(decision: &Decision, pool: &ModelPool, error: &GatewayError, trace: select::Trace) {
    if let GatewayError::Select(SelectError::Incompatible(_)) = error {
        tracing::warn!(target: ROUTERS, model = %pool.model, %error, "no compatible pair");
    } else {
        tracing::debug!(target: ROUTERS, model = %pool.model, %error, "nothing to select");
    }
    decision.begin_attempt(Attempt {
        dispatch: "none",
        picks: trace.picks,
        excluded: trace.exclusions,
        error: Some(words::cut(error.to_string(), words::KEPT)),
        ..Attempt::default()
    });
}

fn begin<'a>(
    core: &'a Arc<Core>,
    request: &'a Inbound,
    pool: &'a ModelPool,
    decision: &Decision,
    selection: &Selection,
    trace: select::Trace,
    deadline: Instant,
) -> Job<'a> {
    let count = |worker: &RoutedWorker, policy: &'static str| {
        let labels = [worker.role().as_str(), worker.record.wire().as_str(), &*pool.model, policy];
        core.metrics.worker_selection.with_label_values(&labels).inc();
    };
    let spans = decision.leg_spans();
    let mut attempt = Attempt { picks: trace.picks, excluded: trace.exclusions, spans, ..Attempt::default() };
    match selection {
        Selection::Regular(worker) => {
            let policy = pool.policies.of(Leg::Regular).name().as_str();
            count(worker.worker(), policy);
            attempt.regular = Some(worker.worker().url.as_str().to_owned());
            attempt.dispatch = "regular";
            tracing::debug!(
                target: ROUTERS,
                request_id = %request.request_id,
                model = %pool.model,
                worker = %worker.worker().url,
                "selected worker"
            );
        }
        Selection::Pair { prefill, decode } => {
            let [prefill_policy, decode_policy] = [Leg::Prefill, Leg::Decode].map(|leg| pool.policies.of(leg).name());
            count(prefill.worker(), prefill_policy.as_str());
            count(decode.worker(), decode_policy.as_str());
            attempt.prefill = Some(prefill.worker().url.as_str().to_owned());
            attempt.decode = Some(decode.worker().url.as_str().to_owned());
            attempt.prefill_policy = Some(prefill_policy.as_str());
            attempt.decode_policy = Some(decode_policy.as_str());
            attempt.dispatch = match Protocol::of(prefill.worker(), decode.worker()) {
                Protocol::Parallel => "parallel",
                // A concurrent MoRI-IO pair says so once it has been checked.
                Protocol::Sequential | Protocol::Moriio => "sequential",
            };
            tracing::debug!(
                target: ROUTERS,
                request_id = %request.request_id,
                model = %pool.model,
                prefill = %prefill.worker().url,
                decode = %decode.worker().url,
                "selected pair"
            );
        }
    }
    Job {
        core,
        request,
        pool,
        client_fields: pool.settings.client_handoff_fields,
        deadline,
        attempt: decision.begin_attempt(attempt),
        decision: decision.clone(),
        model: Arc::clone(&pool.model),
        spans,
        sheds: pool.settings.overload.shed,
    }
}

/// How the legs of a pair meet.
enum Protocol {
    Parallel,
    Sequential,
    Moriio,
}

impl Protocol {
    /// A MoRI-IO worker on either side settles it: its rules refuse what no other protocol could run safely. Otherwise vLLM prefills run
    /// sequentially, and every other engine meets its decode at a rendezvous.
    fn of(prefill: &RoutedWorker, decode: &RoutedWorker) -> Self {
        if prefill.connector == Connector::Moriio || decode.connector == Connector::Moriio {
            Self::Moriio
        } else if prefill.engine() == Runtime::Vllm {
            Self::Sequential
        } else {
            Self::Parallel
        }
    }
}

async fn run(job: &Job<'_>, selection: Selection, scope: &mut Option<Scope>) -> Result<Response<Body>, Failed> {
    match selection {
        Selection::Regular(worker) => {
            job.check_load(&worker)?;
            regular::run(job, worker, scope).await
        }
        Selection::Pair { prefill, decode } => {
            job.check_load(&prefill)?;
            job.check_load(&decode)?;
            match Protocol::of(prefill.worker(), decode.worker()) {
                Protocol::Moriio => moriio::run(job, prefill, decode, scope).await,
                Protocol::Sequential => sequential::run(job, prefill, decode, scope).await,
                Protocol::Parallel => parallel::run(job, prefill, decode, scope).await,
            }
        }
    }
}
