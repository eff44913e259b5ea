//! The prober: active health checks of every registered worker, a duty of the leader.
//!
//! Only transitions are committed, never samples. Each worker has a task of its own; what it probes and how is part of the task's reason,
//! so a change of settings starts it anew.
//!
//! With each probe an engine is also looked at: whether it was started anew, and whether it is still the one that was registered. One that is
//! not leaves rotation at once. It returns as what it is now, or not at all where that contradicts what its operator declared.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use smg_fleet::listing::{self, Contradiction};
use smg_fleet::settings::Probe;
use smg_fleet::{Facts, Health, Intent, Runtime, Secret, Settings, Wire, Worker, WorkerId, WorkerType};
use smg_state::{Command, State};
use smg_telemetry::Metrics;
use tokio::sync::Semaphore;
use tokio::time::{Instant, sleep};
use tokio_util::sync::CancellationToken;

use crate::crew::Crew;
use crate::jobs;
use crate::writer::{Write, Writer};

pub mod client;
pub mod engine;
pub mod judge;
pub mod restart;
#[cfg(test)]
mod tests;

use client::ProbeClient;
use engine::{Address, ServerInfo, speaks_grpc};
use judge::{Judge, PanicRule};
use restart::{Attempts, Restarts};

/// How patient the prober is; intervals and thresholds are the fleet's settings.
#[derive(Debug, Clone, Copy)]
pub struct Timing {
    /// Most probes at once.
    pub concurrency: usize,
    /// First probes are spread over this time, or over the interval when that is shorter.
    pub spread: Duration,
    /// A worker that is not ready is probed at least this often.
    pub unready_interval: Duration,
    /// One second of the settings lasts this long. Tests shorten it.
    pub second: Duration,
    /// Asking an engine anew what it is.
    pub discovery: jobs::Budget,
}

impl Default for Timing {
    fn default() -> Self {
        Self {
            concurrency: 128,
            spread: Duration::from_secs(5),
            unready_interval: Duration::from_secs(5),
            second: Duration::from_secs(1),
            discovery: jobs::Budget::default(),
        }
    }
}

/// What a look at an engine that is well showed.
#[derive(Debug, Default)]
struct Look {
    /// It is another process than last time, as far as it says.
    restarted: bool,
    /// It is another engine than the one that was registered.
    other: Option<Contradiction>,
}

/// What is probed, and how.
#[derive(Debug, Clone, PartialEq)]
struct Target {
    url: String,
    key: Option<Secret>,
    runtime: Runtime,
    /// Whether the operator said so.
    declared: bool,
    worker_type: WorkerType,
    probe: Probe,
}

/// The prober. Cheap to clone.
#[derive(Clone)]
pub struct Prober {
    shared: Arc<Shared>,
}

struct Shared {
    writer: Writer,
    client: ProbeClient,
    metrics: Arc<Metrics>,
    timing: Timing,
    slots: Semaphore,
    panic: Mutex<PanicRule>,
    started: Instant,
}

impl Prober {
    /// A prober that commits through `writer`.
    pub fn new(writer: Writer, client: ProbeClient, metrics: Arc<Metrics>, timing: Timing) -> Self {
        let slots = Semaphore::new(timing.concurrency);
        let (panic, started) = (Mutex::default(), Instant::now());
        Self { shared: Arc::new(Shared { writer, client, metrics, timing, slots, panic, started }) }
    }

    /// Probes until the term ends.
    pub async fn run(self, term: CancellationToken) {
        let mut crew = Crew::new();
        let mut changes = self.shared.writer.store().changes();
        loop {
            changes.borrow_and_update();
            let state = self.shared.writer.store().local();
            crew.staff(targets(&state), |id, target, token| {
                let watch = Arc::clone(&self.shared).watch(id, target.clone());
                async move {
                    tokio::select! {
                        () = token.cancelled() => {}
                        () = watch => {}
                    }
                }
            });
            tokio::select! {
                alive = changes.changed() => if alive.is_err() { return },
                () = crew.reap() => {}
                () = term.cancelled() => return,
            }
        }
    }
}

/// Every registered worker that is to stay.
fn targets(state: &State) -> BTreeMap<WorkerId, Target> {
    let probe = Settings::resolve(None, state.policy("").map(|record| &record.document)).probe;
    let target = |worker: &Arc<Worker>| {
        let target = Target {
            url: worker.spec.url.clone(),
            key: worker.spec.api_key.clone(),
            runtime: worker.runtime(),
            declared: worker.spec.runtime != Runtime::Unspecified,
            worker_type: worker.spec.worker_type,
            probe: probe.for_worker(&worker.spec.health),
        };
        (worker.id, target)
    };
    state.workers().filter(|worker| is_probed(worker)).map(target).collect()
}

fn is_probed(worker: &Worker) -> bool {
    worker.facts.is_some() && worker.intent != Intent::Draining
}

impl Shared {
    /// Probes one worker for ever.
    async fn watch(self: Arc<Self>, id: WorkerId, target: Target) {
        let interval = self.secs(target.probe.check_interval_secs);
        sleep(interval.min(self.timing.spread).mul_f64(rand::random())).await;
        let (mut judge, mut restarts, mut attempts) = (Judge::default(), Restarts::default(), Attempts::default());
        let (mut unconfirmed, mut said) = (false, None);
        // Nobody watched until now: what gave out this id may be gone. Over gRPC each look brings the id.
        let learned = |worker: &Arc<Worker>| worker.learned_engine_id().is_some() && !speaks_grpc(&target.url);
        if !target.probe.disabled && self.writer.store().local().worker(id).is_some_and(learned) {
            attempts = Attempts::after_restart();
        }
        loop {
            let Some(worker) = self.writer.store().local().worker(id).cloned() else { return };
            let mut health = worker.health;
            let verdict = if target.probe.disabled {
                (worker.health != Health::Ready).then_some(Health::Ready)
            } else {
                let (succeeded, look) = self.look(&worker, &target, &mut restarts).await;
                let reason = look.other.as_ref().map(|other| other.reason.clone());
                let is_new = reason.is_some() && reason != said;
                if look.restarted || is_new {
                    self.note_restart(&worker, reason.as_deref());
                }
                if look.restarted || look.other.is_some() {
                    attempts = Attempts::after_restart();
                }
                // Under what the fleet knows of it requests would go wrong, or wait for KV from a process that is gone.
                let misleads = look.other.is_some() || (look.restarted && worker.learned_engine_id().is_some());
                if misleads && health == Health::Ready && self.may_commit(id, health, Health::NotReady, interval) {
                    let command = Command::SetHealth { id, health: Health::NotReady };
                    if self.writer.write(Write::of("prober", command)).await.is_ok() {
                        health = Health::NotReady;
                    }
                }
                said = reason;
                if look.other.is_some_and(|other| other.declared) {
                    if let Some(verdict) =
                        judge.observe(health, false, &target.probe).filter(|_| health != Health::Ready)
                    {
                        let command = Command::SetHealth { id, health: verdict };
                        if let Err(error) = self.writer.write(Write::of("prober", command)).await {
                            tracing::warn!(target: "smg", worker = target.url, %error, "a health change was not committed");
                        }
                    }
                    sleep(interval.min(self.timing.unready_interval)).await;
                    continue;
                }
                judge.observe(worker.health, succeeded, &target.probe)
            };
            if unconfirmed && !attempts.are_due() {
                attempts = Attempts::after_restart();
            }
            // What the engine said of itself may be wrong by now: it is asked before it gets traffic (again).
            let returns = verdict == Some(Health::Ready) && !target.probe.disabled;
            let facts = if returns || attempts.are_due() { self.ask(&worker, &mut attempts).await } else { None };
            if returns && facts.is_none() && !attempts.are_over() {
                sleep(interval.min(self.timing.unready_interval)).await;
                continue;
            }
            if let Some(facts) = facts {
                let known = verdict.unwrap_or(worker.health);
                let command = Command::RefreshFacts { id, facts: Box::new(facts), health: known };
                match self.writer.write(Write::of("prober", command)).await {
                    Ok(_) => {
                        health = known;
                        if let Some(worker) = self.writer.store().local().worker(id) {
                            jobs::warn_of_another_engine_id(worker);
                        }
                    }
                    Err(error) => {
                        tracing::warn!(target: "smg", worker = target.url, %error, "new facts of a worker were not committed");
                    }
                }
                attempts = Attempts::default();
                unconfirmed = false;
            } else if let Some(verdict) = verdict
                && self.may_commit(id, worker.health, verdict, interval)
            {
                let command = Command::SetHealth { id, health: verdict };
                match self.writer.write(Write::of("prober", command)).await {
                    Ok(_) => {
                        health = verdict;
                        attempts = Attempts::default();
                        // It is back with what was known of it: it is asked until it says whether that still holds.
                        unconfirmed |= returns && worker.kv_connector().is_some() && speaks_grpc(&target.url);
                        tracing::info!(target: "smg", worker = target.url, from = %worker.health, to = %verdict, "worker health changed");
                    }
                    Err(error) => {
                        tracing::warn!(target: "smg", worker = target.url, %error, "a health change was not committed");
                    }
                }
            }
            let pause = if health == Health::Ready { interval } else { interval.min(self.timing.unready_interval) };
            // A tenth of jitter keeps workers that were registered together apart.
            sleep(pause.mul_f64(0.95 + 0.1 * rand::random::<f64>())).await;
        }
    }

    /// Probes an engine, and looks at one that is well.
    async fn look(&self, worker: &Worker, target: &Target, restarts: &mut Restarts) -> (bool, Look) {
        match self.probe(target).await {
            None => (false, Look::default()),
            Some(runtime) if runtime != target.runtime => {
                let reason = format!("it is {runtime} now and not {}", target.runtime);
                (true, Look { restarted: false, other: Some(Contradiction { reason, declared: target.declared }) })
            }
            Some(_) if speaks_grpc(&target.url) => (true, self.look_over_grpc(worker, target, restarts).await),
            Some(_) => (true, self.look_over_http(worker, target, restarts).await),
        }
    }

    /// Probes an engine: which one answers if it is well. Over HTTP that is not asked here.
    async fn probe(&self, target: &Target) -> Option<Runtime> {
        // The semaphore is never closed.
        let _slot = self.slots.acquire().await;
        let answer = if speaks_grpc(&target.url) {
            let (at, engines) = (self.address(target), self.client.engines());
            let answer = match target.declared {
                true => engines.health(at, target.runtime).await.map(|()| target.runtime),
                false => engines.detect(at, target.runtime).await,
            };
            answer.map_err(|error| error.to_string())
        } else {
            let url = format!("{}{}", target.url, target.probe.endpoint);
            let (fleet, limit) = (self.writer.store().local().cluster_id(), self.secs(target.probe.timeout_secs));
            match self.client.status(&url, target.key.as_deref(), fleet, limit).await {
                Ok(status) if status.is_success() => Ok(target.runtime),
                Ok(status) => Err(format!("it answered {status}")),
                Err(error) => Err(error.to_string()),
            }
        };
        let result = if answer.is_ok() { "success" } else { "failure" };
        self.metrics.worker_health_checks.with_label_values(&[target.worker_type.as_str(), result]).inc();
        answer
            .inspect_err(|reason| tracing::debug!(target: "smg", worker = target.url, reason, "a health probe failed"))
            .ok()
    }

    fn address<'a>(&self, target: &'a Target) -> Address<'a> {
        Address { url: &target.url, key: target.key.as_deref(), limit: self.secs(target.probe.timeout_secs) }
    }

    async fn look_over_http(&self, worker: &Worker, target: &Target, restarts: &mut Restarts) -> Look {
        let (started, listed) = tokio::join!(self.start_time(target), self.listed(target));
        Look { restarted: restarts.observe(started), other: listing::contradiction(worker, &listed) }
    }

    async fn look_over_grpc(&self, worker: &Worker, target: &Target, restarts: &mut Restarts) -> Look {
        // The semaphore is never closed.
        let _slot = self.slots.acquire().await;
        let engines = self.client.engines();
        let (model, server) = tokio::join!(
            engines.model_info(self.address(target), target.runtime),
            engines.server_info(self.address(target), target.runtime),
        );
        let (model, server) = (model.ok().flatten(), server.ok().flatten());
        let started =
            |uptime: f64| (uptime > 0.0).then(|| Duration::from_millis(smg_net::unix_millis()).as_secs_f64() - uptime);
        let restarted = match &server {
            Some(ServerInfo::Vllm(info)) => {
                let had = worker.facts.as_ref().and_then(|facts| facts.kv_engine_id.as_deref());
                restarts.observe_id(Some(&*info.kv_engine_id).filter(|id| !id.is_empty()), had)
            }
            Some(ServerInfo::Sglang(info)) => restarts.observe(started(info.uptime_seconds)),
            Some(ServerInfo::TokenSpeed(info)) => restarts.observe(started(info.uptime_seconds)),
            None => false,
        };
        Look { restarted, other: jobs::contradiction_over_grpc(worker, model.as_ref(), server.as_ref()) }
    }

    /// The models that an engine lists; none where it has no list.
    async fn listed(&self, target: &Target) -> Vec<listing::ListedModel> {
        // The semaphore is never closed.
        let _slot = self.slots.acquire().await;
        let url = format!("{}{}", target.url, listing::PATH);
        let answer = self.client.get(&url, target.key.as_deref(), self.secs(target.probe.timeout_secs)).await;
        let answer = answer.ok().filter(|answer| answer.status.is_success());
        answer.and_then(|answer| listing::models(&answer.body)).unwrap_or_default()
    }

    /// When the engine's process was started, by its own metrics; not every engine says so.
    async fn start_time(&self, target: &Target) -> Option<f64> {
        // The semaphore is never closed.
        let _slot = self.slots.acquire().await;
        let url = format!("{}/metrics", target.url);
        let answer = self.client.get(&url, target.key.as_deref(), self.secs(target.probe.timeout_secs)).await.ok()?;
        answer.status.is_success().then(|| restart::start_time(&answer.body)).flatten()
    }

    fn note_restart(&self, worker: &Worker, differs: Option<&str>) {
        self.metrics.worker_restarts.with_label_values(&[worker.spec.worker_type.as_str()]).inc();
        match differs {
            Some(reason) => tracing::warn!(
                target: "smg", worker = worker.spec.url, id = %worker.id, reason,
                "another engine answers than the one that was registered: it gets no requests until it is known for what it is; \
                 where that contradicts what was declared, register it anew"
            ),
            None => tracing::warn!(
                target: "smg", worker = worker.spec.url, id = %worker.id, kv_engine_id = worker.kv_engine_id(),
                "the engine was started anew and is asked again what it is; a kv_engine_id given at registration is kept"
            ),
        }
    }

    /// What an engine says of itself; `None` when it says less than it should.
    async fn ask(&self, worker: &Worker, attempts: &mut Attempts) -> Option<Facts> {
        attempts.note();
        // The semaphore is never closed.
        let _slot = self.slots.acquire().await;
        let mut facts = match jobs::facts(&self.client, &worker.spec, self.timing.discovery, true).await {
            Ok(facts) => facts,
            Err(reason) => {
                tracing::debug!(target: "smg", worker = worker.spec.url, reason, "the engine was asked in vain");
                return None;
            }
        };
        let before = worker.facts.as_ref().and_then(|facts| facts.kv_engine_id.clone());
        match (&before, &facts.kv_engine_id) {
            (Some(before), Some(now)) if before != now => {
                tracing::info!(target: "smg", worker = worker.spec.url, before, now, "the engine has a new KV engine id");
            }
            // Over gRPC it may be asked too early; over HTTP, requests would go on under an id that may be another one by now.
            (Some(_), None) if facts.wire == Wire::Http => return None,
            (_, None) => facts.kv_engine_id = before,
            _ => {}
        }
        let known = worker.facts.as_ref().is_some_and(|facts| !facts.labels.is_empty() || !facts.models.is_empty());
        let says_nothing = facts.labels.is_empty() && facts.models.is_empty();
        (!(known && says_nothing)).then_some(facts)
    }

    /// Whether the panic rule lets the verdict through.
    fn may_commit(&self, id: WorkerId, current: Health, verdict: Health, interval: Duration) -> bool {
        if current != Health::Ready || verdict == Health::Ready {
            return true;
        }
        let registered = self.writer.store().local().workers().filter(|worker| is_probed(worker)).count();
        let allowed = self.panic.lock().allows(id, registered, self.started.elapsed(), interval);
        if !allowed {
            self.metrics.health_panic.inc();
            tracing::warn!(
                target: "smg", worker = %id, registered,
                "most of the fleet fails its probes at once: nobody is ejected, the prober is more likely at fault"
            );
        }
        allowed
    }

    fn secs(&self, seconds: u64) -> Duration {
        self.timing.second.saturating_mul(u32::try_from(seconds).unwrap_or(u32::MAX))
    }
}
