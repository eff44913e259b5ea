//! The load monitor: asks every engine that gets traffic for its load, again and again.
//!
//! A worker is asked as soon as it is there and then once in an interval, a tenth earlier or later so that engines which were registered
//! together do not have to answer together. Over gRPC it is `GetLoads`. Over HTTP SGLang, TokenSpeed and unknown engines are asked for
//! `/v1/loads`; vLLM, and whoever does not know that route, for `/metrics`. What an engine does not have is remembered until it is asked in vain for both.
//!
//! Bounds: at most [`CONCURRENCY`] engines are asked at a time, each has [`TIMEOUT`] to answer, an answer has at most [`MAX_ANSWER`] bytes,
//! and a report counts for three intervals. A failed poll changes nothing: the last report ages. Only an engine that nobody can connect to
//! any more, and that has answered nothing else for a while, leaves rotation by it (SMG docs, `--worker-stall-secs`).

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use http::StatusCode;
use parking_lot::Mutex;
use smg_fleet::policy::PolicyName;
use smg_fleet::tuning::LoadMetric;
use smg_fleet::{Runtime, Settings, Wire, Worker, WorkerId};
use smg_telemetry::{Metrics, SMG};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tonic::Code;

use super::report::{self, RankLoad};
use crate::core::Core;
use crate::fleet::table::RoutingTable;
use crate::fleet::worker::WorkerRuntime;
use crate::front::engines::{Unanswered, ask_for, client_of};
use crate::grpc::loads;
use crate::resilience::ejection;

/// Engines asked at a time.
const CONCURRENCY: usize = 32;
/// How long an engine may take.
const TIMEOUT: Duration = Duration::from_secs(5);
/// Largest answer.
const MAX_ANSWER: usize = 4 * 1024 * 1024;
/// How often it is looked who is to be asked.
const TICK: Duration = Duration::from_millis(200);
/// A report counts for so many intervals …
const LIFETIME: u32 = 3;
/// … and this much longer, so that a slow answer does not make a gap.
const GRACE: Duration = Duration::from_secs(5);
/// An engine that knows neither way is asked again after so many intervals.
const SILENT: u32 = 30;

/// What an engine reported last.
#[derive(Debug, Clone)]
pub struct Reported {
    /// When, in milliseconds since 1970.
    pub at_unix_ms: u64,
    /// By when it counts no more, on the gateway's clock.
    pub expires_ms: u64,
    /// The load of each rank.
    pub ranks: Vec<RankLoad>,
}

/// Where an engine tells its load.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Source {
    Loads,
    Metrics,
    /// `GetLoads` over gRPC.
    Rpc,
}

/// How a poll ended.
enum Polled {
    Report(Source, Vec<RankLoad>),
    /// The engine answers, and tells no load.
    Absent,
    Failed(String),
    /// Nobody answers there.
    Unreachable(String),
}

/// What is known about asking one worker.
#[derive(Debug, Default)]
struct Plan {
    due_ms: u64,
    asking: bool,
    /// The way that worked last.
    source: Option<Source>,
    warned: bool,
}

/// Asks until the gateway closes.
pub async fn watch(core: Arc<Core>) {
    let mut ticks = tokio::time::interval(TICK);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let slots = Arc::new(Semaphore::new(CONCURRENCY));
    let mut plans: BTreeMap<WorkerId, Plan> = BTreeMap::new();
    let mut shown = Shown::default();
    let mut polls: JoinSet<(Arc<Worker>, Polled)> = JoinSet::new();
    loop {
        tokio::select! {
            () = core.closing.cancelled() => return,
            _ = ticks.tick() => {}
            Some(ended) = polls.join_next() => {
                if let Ok((worker, polled)) = ended
                    && let Some(plan) = plans.get_mut(&worker.id)
                {
                    settle(&core, plan, &worker, polled);
                }
                continue;
            }
        }
        let table = core.table.load_full();
        let now = core.clock.now_ms();
        let asked = asked(&core, &table);
        plans.retain(|id, _| {
            let stays = asked.contains_key(id);
            // Whoever gets no traffic is not asked, and what it said before says nothing about the time after.
            if !stays && let Some(worker) = table.snapshot.workers.get(id) {
                for (runtime, _) in table.runtimes_of(worker) {
                    runtime.report.clear();
                    runtime.last_report.clear();
                }
            }
            stays
        });
        for (id, worker) in asked {
            let plan = plans.entry(id).or_default();
            if plan.asking || plan.due_ms > now {
                continue;
            }
            plan.asking = true;
            let (core, slots, source) = (Arc::clone(&core), Arc::clone(&slots), plan.source);
            polls.spawn(async move {
                // The semaphore is never closed.
                let _slot = slots.acquire_owned().await;
                let polled = poll(&core, &worker, source).await;
                (worker, polled)
            });
        }
        shown.refresh(&core.metrics, &table, now);
    }
}

/// The workers to ask.
fn asked(core: &Core, table: &RoutingTable) -> BTreeMap<WorkerId, Arc<Worker>> {
    if core.options.load.only_if_needed && !table.pools().any(|pool| needs_reports(&pool.settings)) {
        return BTreeMap::new();
    }
    let reachable = |worker: &Worker| table.runtimes_of(worker).any(|(runtime, _)| !runtime.is_unreachable());
    let workers = table.snapshot.workers.iter();
    let asked = workers.filter(|(_, worker)| worker.is_routable() && worker.wire() != Wire::Zmq && reachable(worker));
    asked.map(|(id, worker)| (*id, Arc::clone(worker))).collect()
}

/// Whether anything of a model reads load reports.
fn needs_reports(settings: &Settings) -> bool {
    let by_wait = settings.tuning.power_of_two.load_metric.is_none_or(|metric| metric == LoadMetric::ExpectedWait);
    let reads = |policy: &PolicyName| match policy {
        PolicyName::CacheAware | PolicyName::LeastLoad => true,
        PolicyName::PowerOfTwo => by_wait,
        _ => false,
    };
    settings.overload.thresholds.is_some()
        || [settings.regular_policy, settings.prefill_policy, settings.decode_policy].iter().any(reads)
}

/// Asks one engine and stores what it says.
async fn poll(core: &Core, worker: &Worker, known: Option<Source>) -> Polled {
    let runtimes: Vec<_> =
        core.table.load().runtimes_of(worker).map(|(runtime, rank)| (Arc::clone(runtime), rank)).collect();
    let first = known.unwrap_or_else(|| match (worker.wire(), worker.runtime()) {
        (Wire::Grpc, _) => Source::Rpc,
        (_, Runtime::Vllm) => Source::Metrics,
        _ => Source::Loads,
    });
    let other = match first {
        Source::Loads => Some(Source::Metrics),
        Source::Metrics => Some(Source::Loads),
        Source::Rpc => None,
    };
    let mut polled = Polled::Absent;
    for source in [Some(first), other].into_iter().flatten() {
        polled = poll_at(core, worker, source).await;
        if !matches!(polled, Polled::Absent) {
            break;
        }
    }
    if let Polled::Report(_, ranks) = &polled {
        for (runtime, rank) in runtimes {
            store(core, &runtime, rank, ranks);
        }
    }
    polled
}

async fn poll_at(core: &Core, worker: &Worker, source: Source) -> Polled {
    let path = match source {
        Source::Rpc => return poll_rpc(core, worker).await,
        Source::Loads => "/v1/loads?include=core,disagg,queues,memory",
        Source::Metrics => "/metrics",
    };
    let (status, body) = match ask_for(core, worker, path, TIMEOUT, MAX_ANSWER).await {
        Ok(answer) => answer,
        Err(Unanswered { broken: true, reason }) => return Polled::Unreachable(reason),
        Err(Unanswered { reason, .. }) => return Polled::Failed(reason),
    };
    core.table.load().runtimes_of(worker).for_each(|(runtime, _)| runtime.heard());
    let unknown = [StatusCode::NOT_FOUND, StatusCode::METHOD_NOT_ALLOWED, StatusCode::NOT_IMPLEMENTED];
    if !status.is_success() && !unknown.contains(&status) {
        return Polled::Failed(format!("it answered {status}"));
    }
    let ranks = match source {
        _ if !status.is_success() => None,
        Source::Rpc => None,
        Source::Loads => report::from_loads(&body),
        Source::Metrics => std::str::from_utf8(&body).ok().and_then(report::from_metrics).map(|load| vec![load]),
    };
    ranks.map_or(Polled::Absent, |ranks| Polled::Report(source, ranks))
}

async fn poll_rpc(core: &Core, worker: &Worker) -> Polled {
    let Some(client) = client_of(core, worker) else { return Polled::Absent };
    match tokio::time::timeout(TIMEOUT, loads::ask(&client)).await {
        Ok(Ok(ranks)) if ranks.is_empty() => Polled::Absent,
        Ok(Ok(ranks)) => Polled::Report(Source::Rpc, ranks),
        Ok(Err(status)) if status.code() == Code::Unimplemented => Polled::Absent,
        Ok(Err(status)) => Polled::Failed(status.message().to_owned()),
        Err(_) => Polled::Failed("no answer in time".to_owned()),
    }
}

fn store(core: &Core, runtime: &WorkerRuntime, rank: Option<u32>, ranks: &[RankLoad]) {
    let lifetime = core.options.load.interval.saturating_mul(LIFETIME).saturating_add(GRACE);
    let lifetime = u64::try_from(lifetime.as_millis()).unwrap_or(u64::MAX);
    let expires_ms = core.clock.now_ms().saturating_add(lifetime);
    // Metrics tell the load of all ranks together: that is the best that is known of each.
    let known = |rank: &u32| ranks.iter().any(|load| load.dp_rank == u64::from(*rank));
    let rank = rank.filter(known);
    if let Some(report) = report::summarize(ranks, rank) {
        runtime.report.store(&report, expires_ms);
        runtime.report_tokens(report::tokens(ranks, rank));
        let mine = |load: &&RankLoad| rank.is_none_or(|rank| load.dp_rank == u64::from(rank));
        let ranks = ranks.iter().filter(mine).cloned().collect();
        runtime.last_report.set(Reported { at_unix_ms: smg_net::unix_millis(), expires_ms, ranks });
    }
}

/// Takes an engine out of rotation that cannot be asked and has answered nothing else for a while: until a request notices, it would be
/// chosen like any other.
fn leave_rotation(core: &Arc<Core>, worker: &Worker, reason: &str) {
    let table = core.table.load_full();
    for (runtime, _) in table.runtimes_of(worker).filter(|(runtime, _)| runtime.silence() >= core.options.load.stall) {
        let prefills = table.pools().flat_map(|pool| pool.prefills.iter().map(|entry| &entry.worker));
        let others = table.pools().flat_map(|pool| pool.regulars.iter().chain(&pool.decodes));
        if let Some(routed) = prefills.chain(others).find(|routed| Arc::ptr_eq(&routed.runtime, runtime)) {
            ejection::eject(core, routed, reason);
        }
    }
}

/// Notes how a poll ended and when the next one is due.
fn settle(core: &Arc<Core>, plan: &mut Plan, worker: &Worker, polled: Polled) {
    let (mode, intervals) = match &polled {
        Polled::Report(Source::Loads | Source::Rpc, _) => ("loads", 1),
        Polled::Report(Source::Metrics, _) => ("metrics", 1),
        Polled::Absent => ("absent", SILENT),
        Polled::Failed(_) | Polled::Unreachable(_) => ("failed", 1),
    };
    let url = worker.spec.url.as_str();
    core.metrics.engine_load_polls.with_label_values(&[url, mode]).inc();
    match polled {
        Polled::Report(source, _) => plan.source = Some(source),
        Polled::Absent if !plan.warned => {
            plan.warned = true;
            tracing::warn!(
                target: SMG, worker = url,
                "the engine does not report its load: policies count this gateway's own requests in flight"
            );
        }
        Polled::Absent => {}
        Polled::Failed(reason) => {
            tracing::debug!(target: SMG, worker = url, reason, "the engine was asked for its load in vain");
        }
        Polled::Unreachable(reason) => leave_rotation(core, worker, &reason),
    }
    let interval = core.options.load.interval.saturating_mul(intervals).max(TICK);
    let pause = interval.mul_f64(0.9 + 0.2 * rand::random::<f64>());
    plan.due_ms = core.clock.now_ms().saturating_add(u64::try_from(pause.as_millis()).unwrap_or(u64::MAX));
    plan.asking = false;
}

/// The series that are shown now; those that vanish are removed.
#[derive(Debug, Default)]
struct Shown {
    overloaded: BTreeSet<Arc<str>>,
    engines: BTreeMap<WorkerId, ShownEngine>,
}

/// The series of one engine.
#[derive(Debug)]
struct ShownEngine {
    labels: [String; 3],
    at_unix_ms: u64,
    ranks: BTreeSet<u64>,
}

impl Shown {
    fn refresh(&mut self, metrics: &Metrics, table: &RoutingTable, now: u64) {
        let mut models = BTreeSet::new();
        for pool in table.pools() {
            let prefills = pool.prefills.iter().map(|entry| &entry.worker);
            let workers = pool.regulars.iter().chain(prefills).chain(&pool.decodes);
            let overloaded = workers.filter(|worker| worker.is_overloaded(now)).count();
            metrics.workers_overloaded.with_label_values(&[&*pool.model]).set(overloaded as i64);
            models.insert(Arc::clone(&pool.model));
        }
        for gone in self.overloaded.difference(&models) {
            // Removing what is not there is no error worth a word.
            let _ = metrics.workers_overloaded.remove_label_values(&[gone]);
        }
        self.overloaded = models;
        self.engines(metrics, table, now);
    }

    fn engines(&mut self, metrics: &Metrics, table: &RoutingTable, now: u64) {
        let current = |id: &WorkerId| {
            table
                .runtime(*id)
                .and_then(|runtime| runtime.last_report.get())
                .filter(|reported| reported.expires_ms > now)
        };
        self.engines.retain(|id, shown| {
            let stays = current(id).is_some();
            if !stays {
                shown.remove(metrics);
            }
            stays
        });
        for worker in table.workers.values() {
            let Some(reported) = current(&worker.id) else { continue };
            let before = self.engines.remove(&worker.id);
            let shown = match before {
                Some(shown) if shown.at_unix_ms == reported.at_unix_ms => shown,
                before => ShownEngine::show(metrics, worker, &reported, before),
            };
            self.engines.insert(worker.id, shown);
        }
    }
}

impl ShownEngine {
    fn show(metrics: &Metrics, worker: &Worker, reported: &Reported, before: Option<Self>) -> Self {
        let role = worker.spec.worker_type.as_str().to_owned();
        let labels = [worker.spec.url.clone(), worker.model_id().to_owned(), role];
        let ranks: BTreeSet<u64> = reported.ranks.iter().map(|load| load.dp_rank).collect();
        if let Some(before) = before.filter(|before| before.labels != labels || before.ranks != ranks) {
            before.remove(metrics);
        }
        let [url, model, role] = &labels;
        for load in &reported.ranks {
            let rank = load.dp_rank.to_string();
            let of_model = [url.as_str(), model.as_str(), rank.as_str()];
            metrics.engine_running_requests.with_label_values(&of_model).set(load.num_running_reqs as f64);
            metrics.engine_waiting_requests.with_label_values(&of_model).set(load.num_waiting_reqs as f64);
            metrics.engine_token_usage.with_label_values(&of_model).set(load.token_usage);
            metrics.engine_gen_throughput.with_label_values(&of_model).set(load.gen_throughput);
            metrics.engine_cache_hit_rate.with_label_values(&of_model).set(load.cache_hit_rate);
            let of_role = [url.as_str(), role.as_str(), rank.as_str()];
            for (gauge, value) in [
                (&metrics.engine_pd_kv_transfer_latency, load.kv_transfer_latency_ms),
                (&metrics.engine_pd_kv_transfer_speed, load.kv_transfer_speed_gb_s),
                (&metrics.engine_pd_prefill_queue, load.prefill_queue_reqs.map(|count| count as f64)),
                (&metrics.engine_pd_decode_queue, load.decode_queue_reqs.map(|count| count as f64)),
            ] {
                if let Some(value) = value {
                    gauge.with_label_values(&of_role).set(value);
                }
            }
        }
        Self { labels, at_unix_ms: reported.at_unix_ms, ranks }
    }

    fn remove(&self, metrics: &Metrics) {
        let [url, model, role] = &self.labels;
        for rank in self.ranks.iter().map(u64::to_string) {
            for gauge in [
                &metrics.engine_running_requests,
                &metrics.engine_waiting_requests,
                &metrics.engine_token_usage,
                &metrics.engine_gen_throughput,
                &metrics.engine_cache_hit_rate,
            ] {
                // Removing what is not there is no error worth a word.
                let _ = gauge.remove_label_values(&[url, model, &rank]);
            }
            for gauge in [
                &metrics.engine_pd_kv_transfer_latency,
                &metrics.engine_pd_kv_transfer_speed,
                &metrics.engine_pd_prefill_queue,
                &metrics.engine_pd_decode_queue,
            ] {
                let _ = gauge.remove_label_values(&[url, role, &rank]);
            }
        }
    }
}

/// The last report of one worker, for those who show it.
#[derive(Debug, Default)]
pub struct LastReport(Mutex<Option<Arc<Reported>>>);

impl LastReport {
    /// Replaces it.
    pub fn set(&self, reported: Reported) {
        *self.0.lock() = Some(Arc::new(reported));
    }

    /// Forgets it.
    pub fn clear(&self) {
        *self.0.lock() = None;
    }

    /// It, if there is one.
    pub fn get(&self) -> Option<Arc<Reported>> {
        self.0.lock().clone()
    }
}
