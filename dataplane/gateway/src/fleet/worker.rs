//! One worker as this gateway sees it.
//!
//! [`RoutedWorker`] is the worker of one snapshot with everything a leg needs precomputed. [`WorkerRuntime`] is what this gateway learned:
//! in-flight load, breaker, ejection. It is kept by worker id across snapshots, so a change of the fleet never loses a count.
//!
//! [`InFlight`] is the claim of one leg on one worker. Whatever way a request ends, dropping the claim releases the load and the breaker's
//! admission exactly once.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use http::{HeaderValue, StatusCode, Uri};
use parking_lot::Mutex;
use prometheus::{IntCounter, IntGauge};
use smg_engines::grpc::SamplingDefaults;
use smg_engines::vllm::{Connector, MooncakePeer};
use smg_engines::{Route, moriio, sglang};
use smg_fleet::pairing::Descriptor;
use smg_fleet::protection::Thresholds;
use smg_fleet::settings::Breaker as BreakerSettings;
use smg_fleet::worker::Worker;
use smg_fleet::{Runtime, Settings, WorkerId, WorkerType, WorkerUrl};
use smg_net::tls::ClientConfig;
use smg_telemetry::{Metrics, SMG};
use tonic::transport::Channel;

use crate::admission::Released;
use crate::admission::decode::DecodeWindow;
use crate::admission::lease::Lease;
use crate::clock::Clock;
use crate::connections::Pool;
use crate::load::cell::ReportCell;
use crate::load::monitor::LastReport;
use crate::resilience::breaker::{Admission, Breaker, Phase, Verdict};
use crate::resilience::retry;

/// What this gateway knows about a worker, whatever the snapshot.
#[derive(Debug)]
pub struct WorkerRuntime {
    url: String,
    load: AtomicU64,
    breaker: Mutex<Breaker>,
    unreachable: AtomicBool,
    connections: Arc<Pool>,
    /// The connection over which it speaks gRPC, once it was wanted.
    channel: OnceLock<Channel>,
    /// Until when it asked for a pause, on the gateway's clock.
    paced_until_ms: AtomicU64,
    /// What its engine last reported.
    pub report: ReportCell,
    /// All of it, for those who show it.
    pub last_report: LastReport,
    /// Its rooms, as a decode worker that speaks token ids.
    pub window: Arc<DecodeWindow>,
    /// When its engine last answered anything, on the gateway's clock.
    heard_ms: AtomicU64,
    /// Tokens that its engine reported in its cache and its queue, and those of the prompts sent since.
    tokens: [AtomicU64; 2],
    /// How decode engines name it over Mooncake since it came back, where this gateway learned that before the fleet did.
    mooncake: Mutex<Option<Arc<MooncakePeer>>>,
    /// Its series are removed and must not come back.
    gone: AtomicBool,
    active: IntGauge,
    breaker_state: IntGauge,
    breaker_failures: IntGauge,
    breaker_successes: IntGauge,
    stalled: IntGauge,
    succeeded: IntCounter,
    failed: IntCounter,
    clock: Clock,
    metrics: Arc<Metrics>,
    released: Arc<Released>,
}

impl WorkerRuntime {
    /// A worker nothing is known about yet.
    pub fn new(
        worker: &Worker,
        clock: Clock,
        metrics: Arc<Metrics>,
        released: Arc<Released>,
        lease: Arc<Lease>,
    ) -> Self {
        let (waits, sheds) = (metrics.pd_admission_waits.clone(), metrics.pd_admission_sheds.clone());
        let url = worker.spec.url.as_str();
        let kind = [worker.spec.worker_type.as_str(), worker.wire().as_str()];
        Self {
            url: url.to_owned(),
            load: AtomicU64::new(0),
            breaker: Mutex::default(),
            unreachable: AtomicBool::new(false),
            connections: Arc::new(Pool::new(metrics.worker_connections_active.with_label_values(&kind))),
            channel: OnceLock::new(),
            paced_until_ms: AtomicU64::new(0),
            report: ReportCell::default(),
            last_report: LastReport::default(),
            window: Arc::new(DecodeWindow::new(lease, waits, sheds)),
            heard_ms: AtomicU64::new(clock.now_ms()),
            tokens: Default::default(),
            mooncake: Mutex::default(),
            gone: AtomicBool::new(false),
            active: metrics.worker_requests_active.with_label_values(&[url]),
            breaker_state: metrics.worker_cb_state.with_label_values(&[url]),
            breaker_failures: metrics.worker_cb_consecutive_failures.with_label_values(&[url]),
            breaker_successes: metrics.worker_cb_consecutive_successes.with_label_values(&[url]),
            stalled: metrics.worker_stalled.with_label_values(&[url, "unreachable"]),
            succeeded: metrics.worker_cb_outcomes.with_label_values(&[url, "success"]),
            failed: metrics.worker_cb_outcomes.with_label_values(&[url, "failure"]),
            clock,
            metrics,
            released,
        }
    }

    /// In-flight requests of this gateway.
    pub fn load(&self) -> u64 {
        self.load.load(Ordering::Relaxed)
    }

    /// Connections at rest.
    pub fn connections(&self) -> &Arc<Pool> {
        &self.connections
    }

    /// The connection over which the worker at `url` speaks gRPC, which all its requests share; `None` when it does not. It is made with the
    /// first of them, made anew when it broke, and closed with the last handle, after the worker has left the fleet.
    pub fn channel(&self, url: &str, tls: Option<&ClientConfig>) -> Option<Channel> {
        if let Some(channel) = self.channel.get() {
            return Some(channel.clone());
        }
        let channel = smg_net::engine::channel(url, tls).ok()?;
        Some(self.channel.get_or_init(|| channel).clone())
    }

    /// The breaker's phase.
    pub fn breaker_phase(&self) -> Phase {
        self.breaker.lock().phase()
    }

    /// Whether this gateway ejected the worker.
    pub fn is_unreachable(&self) -> bool {
        self.unreachable.load(Ordering::Acquire)
    }

    /// Ejects the worker; true for the caller that did.
    pub fn eject(&self) -> bool {
        let first = !self.unreachable.swap(true, Ordering::AcqRel);
        if first && !self.is_gone() {
            self.stalled.set(1);
            self.metrics.worker_health.with_label_values(&[self.url.as_str()]).set(0);
            self.metrics.worker_stall_transitions.with_label_values(&[self.url.as_str(), "unreachable"]).inc();
        }
        first
    }

    /// Takes the worker back.
    pub fn readmit(&self) {
        self.unreachable.store(false, Ordering::Release);
        self.stalled.set(0);
        if !self.is_gone() {
            self.metrics.worker_health.with_label_values(&[self.url.as_str()]).set(1);
        }
        self.health_returned();
    }

    /// The worker asked for a pause: it is passed over for this time where others exist.
    pub fn pace(&self, pause: Duration) {
        let until = self.clock.now_ms().saturating_add(u64::try_from(pause.as_millis()).unwrap_or(u64::MAX));
        self.paced_until_ms.fetch_max(until, Ordering::Relaxed);
        if !self.is_gone() {
            self.metrics.worker_paced.with_label_values(&[self.url.as_str()]).inc();
        }
    }

    /// Its engine answered something.
    pub fn heard(&self) {
        self.heard_ms.fetch_max(self.clock.now_ms(), Ordering::Relaxed);
    }

    /// How long its engine has answered nothing.
    pub fn silence(&self) -> Duration {
        Duration::from_millis(self.clock.now_ms().saturating_sub(self.heard_ms.load(Ordering::Relaxed)))
    }

    /// Tokens that it has to do with, as far as is known: what was reported last, and what was sent since.
    pub fn tokens(&self) -> u64 {
        let [reported, sent] = &self.tokens;
        reported.load(Ordering::Relaxed).saturating_add(sent.load(Ordering::Relaxed))
    }

    /// A prompt of so many tokens was sent.
    pub fn add_tokens(&self, count: u64) {
        self.tokens[1].fetch_add(count, Ordering::Relaxed);
    }

    /// So many tokens were reported. What was sent before is among them.
    pub fn report_tokens(&self, count: u64) {
        self.tokens[0].store(count, Ordering::Relaxed);
        self.tokens[1].store(0, Ordering::Relaxed);
    }

    /// Active probes succeed again.
    pub fn health_returned(&self) {
        let transition = self.breaker.lock().health_returned();
        if transition.is_some() && !self.is_gone() {
            self.metrics.worker_cb_health_readmissions.with_label_values(&[self.url.as_str()]).inc();
        }
        self.note_transition(transition);
    }

    fn note_transition(&self, transition: Option<(Phase, Phase)>) {
        if let Some((from, to)) = transition.filter(|_| !self.is_gone()) {
            self.metrics
                .worker_cb_transitions
                .with_label_values(&[self.url.as_str(), from.as_str(), to.as_str()])
                .inc();
            self.breaker_state.set(to.gauge());
            tracing::info!(target: SMG, worker = %self.url, from = from.as_str(), to = to.as_str(), "circuit breaker");
        }
    }

    /// The fleet knows another engine id of it than before: what was learned here is no news any more.
    pub fn forget_mooncake(&self) {
        *self.mooncake.lock() = None;
    }

    /// The worker left the fleet: what still runs on it counts for nothing any more.
    pub fn forget(&self) {
        self.gone.store(true, Ordering::Release);
    }

    fn is_gone(&self) -> bool {
        self.gone.load(Ordering::Acquire)
    }

    /// The address, the `worker` label of its series.
    pub fn url(&self) -> &str {
        &self.url
    }
}

/// How willingly an available worker is chosen: the next kind only where there is none of the kinds before.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Standing {
    /// Nothing speaks against it.
    Fine,
    /// It asked for a pause.
    Paced,
    /// Its engine reports more load than it should have.
    Overloaded,
}

/// A worker of one snapshot.
#[derive(Debug)]
pub struct RoutedWorker {
    /// As the fleet has it.
    pub record: Arc<Worker>,
    /// What this gateway knows.
    pub runtime: Arc<WorkerRuntime>,
    /// The address; of a data-parallel rank with the rank behind it.
    pub url: WorkerUrl,
    /// The pairing descriptor of a prefill or decode.
    pub descriptor: Option<Descriptor>,
    /// The vLLM connector.
    pub connector: Connector,
    /// How decode engines name this prefill over Mooncake, as far as the fleet knows.
    mooncake: Option<Arc<MooncakePeer>>,
    /// What its labels say of MoRI-IO; `None` with another connector.
    pub moriio: Option<Result<moriio::Settings, moriio::LabelError>>,
    /// Host of the bootstrap server.
    pub bootstrap_host: String,
    /// The data-parallel rank the worker is pinned to.
    pub dp_rank: Option<u32>,
    /// Breaker settings of this worker.
    pub breaker: BreakerSettings,
    /// Where it is connected to.
    pub address: Uri,
    /// Its name in requests.
    pub host: HeaderValue,
    /// How tokens are drawn where the client does not say, by its model's publisher.
    pub sampling_defaults: SamplingDefaults,
    /// From which load it is passed over; `None` = from none.
    pub overload: Option<Thresholds>,
    /// Most requests in its prefill phase, and how many there are; `None` = no limit.
    prefill_limit: Option<(u64, IntGauge)>,
    /// Request targets, in the order of [`Route::ALL`]: paths.
    routes: Vec<Uri>,
    requests: IntCounter,
}

impl RoutedWorker {
    /// Prepares a registered worker for routing; `None` when its URL makes no request target.
    pub fn new(
        record: Arc<Worker>,
        runtime: Arc<WorkerRuntime>,
        settings: &Settings,
        metrics: &Metrics,
    ) -> Option<Self> {
        let url = record.url().ok()?;
        let address = url.as_str().parse::<Uri>().ok()?;
        let prefix = address.path().trim_end_matches('/');
        let target = |route: Route| format!("{prefix}{}", route.path()).parse::<Uri>().ok();
        let routes = Route::ALL.into_iter().map(target).collect::<Option<Vec<_>>>()?;
        // The port of the scheme is not named (RFC 9110, section 7.2).
        let host = match url.port().filter(|port| *port != 80) {
            Some(port) => format!("{}:{port}", url.host()),
            None => url.host().to_owned(),
        };
        let bootstrap_host = sglang::bootstrap_host(url.as_str())?;
        let dp_rank = record.label("dp_rank").and_then(|rank| rank.parse().ok());
        let shown = if record.dp_base_url().is_some() { dp_rank.map(|rank| url.clone().with_rank(rank)) } else { None };
        let url = shown.unwrap_or(url);
        let mooncake = mooncake_peer(&record, record.kv_engine_id(), dp_rank, &bootstrap_host);
        let connector = Connector::classify(record.kv_connector());
        let moriio = (connector == Connector::Moriio)
            .then(|| moriio::Settings::read(|name| record.label(name), &bootstrap_host));
        let requests = metrics.worker_requests.with_label_values(&[url.as_str(), record.model_id()]);
        Some(Self {
            descriptor: Descriptor::of(&record),
            connector,
            mooncake,
            moriio,
            bootstrap_host,
            dp_rank,
            breaker: breaker_settings(&record, settings),
            sampling_defaults: SamplingDefaults::parse(record.label("default_sampling_params_json")),
            overload: settings.overload.for_worker(&record.spec),
            prefill_limit: settings
                .prefill_admission
                .limit
                .filter(|_| record.spec.worker_type == WorkerType::Prefill)
                .map(|limit| (limit, metrics.pd_prefill_admission_inflight.with_label_values(&[url.as_str()]))),
            runtime,
            host: HeaderValue::try_from(host).ok()?,
            url,
            address,
            routes,
            requests,
            record,
        })
    }

    /// Identity.
    pub fn id(&self) -> WorkerId {
        self.record.id
    }

    /// Identity as policies know it.
    pub fn key(&self) -> smg_policies::WorkerKey {
        self.record.id.0.as_u128()
    }

    /// Role.
    pub fn role(&self) -> WorkerType {
        self.record.spec.worker_type
    }

    /// Engine.
    pub fn engine(&self) -> Runtime {
        self.record.runtime()
    }

    /// How decode engines name this prefill over Mooncake.
    pub fn mooncake(&self) -> Option<Arc<MooncakePeer>> {
        self.runtime.mooncake.lock().clone().or_else(|| self.mooncake.clone())
    }

    /// Its engine came back and says that it is called so. What an operator wrote counts all the same.
    pub fn learn_engine_id(&self, engine_id: &str) {
        if let Some(registered) = &self.record.spec.kv_engine_id {
            if registered != engine_id {
                tracing::warn!(
                    target: SMG, worker = %self.url, registered, engine = engine_id,
                    "the engine has another kv_engine_id than it was registered with: decode engines will not find its KV; \
                     register it anew, with that id or with none"
                );
            }
            return;
        }
        let peer = mooncake_peer(&self.record, Some(engine_id), self.dp_rank, &self.bootstrap_host);
        if peer != self.mooncake {
            tracing::info!(target: SMG, worker = %self.url, engine = engine_id, "the engine came back under another kv_engine_id");
            *self.runtime.mooncake.lock() = peer;
        }
    }

    /// The request target of a route.
    pub fn target(&self, route: Route) -> Uri {
        self.routes.get(route as usize).cloned().unwrap_or_default()
    }

    /// How willingly it gets a request at `now_ms`, or why it gets none.
    ///
    /// # Errors
    /// The reason, as decision records show it.
    pub fn standing(&self, now_ms: u64) -> Result<Standing, &'static str> {
        if let Some(reason) = self.unavailable(now_ms) {
            return Err(reason);
        }
        let runtime = &self.runtime;
        if self.is_overloaded(now_ms) {
            Ok(Standing::Overloaded)
        } else if runtime.paced_until_ms.load(Ordering::Relaxed) > now_ms {
            Ok(Standing::Paced)
        } else {
            Ok(Standing::Fine)
        }
    }

    /// Whether its engine reports a load above its thresholds.
    pub fn is_overloaded(&self, now_ms: u64) -> bool {
        self.overload.is_some_and(|thresholds| {
            self.runtime.report.pressure(now_ms).is_some_and(|(waiting, usage)| thresholds.exceeded(waiting, usage))
        })
    }

    fn unavailable(&self, now_ms: u64) -> Option<&'static str> {
        if !self.record.is_routable() {
            return Some(if self.record.intent == smg_fleet::Intent::Active { "unhealthy" } else { "cordoned" });
        }
        if self.runtime.is_unreachable() {
            return Some("unreachable");
        }
        if !self.runtime.breaker.lock().is_available(now_ms, &self.breaker) {
            return Some("circuit_open");
        }
        None
    }

    /// Whether it runs as many prefill phases as it may.
    pub fn is_full(&self) -> bool {
        self.prefill_limit.as_ref().is_some_and(|(limit, _)| self.runtime.load() >= *limit)
    }

    /// Claims the worker for a prefill phase: as [`RoutedWorker::claim`], and `None` when it runs as many as it may.
    pub fn claim_prefill(self: &Arc<Self>) -> Option<InFlight> {
        let Some((limit, inflight)) = &self.prefill_limit else { return self.claim() };
        let below = |load: u64| (load < *limit).then_some(load + 1);
        self.runtime.load.fetch_update(Ordering::AcqRel, Ordering::Acquire, below).ok()?;
        let claim = self.admit();
        if claim.is_none() {
            self.runtime.load.fetch_sub(1, Ordering::AcqRel);
        }
        inflight.set(i64::try_from(self.runtime.load()).unwrap_or(i64::MAX));
        claim
    }

    /// Claims the worker for a leg; `None` when its breaker lets nothing through any more.
    pub fn claim(self: &Arc<Self>) -> Option<InFlight> {
        let claim = self.admit()?;
        self.runtime.load.fetch_add(1, Ordering::Relaxed);
        Some(claim)
    }

    /// A claim whose load is counted by the caller.
    fn admit(self: &Arc<Self>) -> Option<InFlight> {
        let now = self.runtime.clock.now_ms();
        let (admission, before, after) = {
            let mut breaker = self.runtime.breaker.lock();
            let before = breaker.phase();
            (breaker.admit(now, &self.breaker)?, before, breaker.phase())
        };
        self.runtime.note_transition((before != after).then_some((before, after)));
        self.runtime.active.inc();
        self.requests.inc();
        Some(InFlight { worker: Arc::clone(self), admission, verdict: Verdict::Neutral, lease: None, weight: 1 })
    }
}

fn mooncake_peer(record: &Worker, engine_id: Option<&str>, rank: Option<u32>, host: &str) -> Option<Arc<MooncakePeer>> {
    let (width, port) = (record.label("dp_size"), record.spec.bootstrap_port);
    MooncakePeer::resolve(engine_id, width, rank, host, port).map(Arc::new)
}

fn breaker_settings(record: &Worker, settings: &Settings) -> BreakerSettings {
    let overrides = &record.spec.resilience;
    let base = &settings.breaker;
    BreakerSettings {
        failure_threshold: match overrides.disable_circuit_breaker {
            Some(true) => None,
            Some(false) => overrides.cb_failure_threshold.or(base.failure_threshold).or(Some(10)),
            None => overrides.cb_failure_threshold.or(base.failure_threshold),
        },
        success_threshold: overrides.cb_success_threshold.unwrap_or(base.success_threshold).max(1),
        timeout_secs: overrides.cb_timeout_secs.unwrap_or(base.timeout_secs),
        window_secs: overrides.cb_window_secs.unwrap_or(base.window_secs),
    }
}

/// The claim of one leg on one worker. Dropping it releases the load and tells the breaker the verdict, neutral unless one was given.
#[derive(Debug)]
pub struct InFlight {
    worker: Arc<RoutedWorker>,
    admission: Admission,
    verdict: Verdict,
    /// What the policy that chose the worker counts by.
    lease: Option<Box<smg_policies::Lease>>,
    /// How many requests of the engine it stands for.
    weight: u32,
}

impl InFlight {
    /// Holds what the policy counts by until the leg is over.
    pub fn hold(&mut self, lease: Option<smg_policies::Lease>) {
        self.lease = lease.map(Box::new);
    }

    /// From now on it stands for so many requests of the engine, at least 1.
    pub fn weigh(&mut self, requests: u32) {
        let requests = requests.max(1);
        let (before, after) = (u64::from(self.weight), u64::from(requests));
        let runtime = &self.worker.runtime;
        runtime.load.fetch_add(after.saturating_sub(before), Ordering::Relaxed);
        runtime.load.fetch_sub(before.saturating_sub(after), Ordering::Relaxed);
        runtime.active.add(i64::from(requests) - i64::from(self.weight));
        self.weight = requests;
    }

    /// The claimed worker.
    pub fn worker(&self) -> &Arc<RoutedWorker> {
        &self.worker
    }

    /// Sets the verdict from a response status of the worker.
    pub fn judge_status(&mut self, status: StatusCode) {
        self.verdict = retry::verdict(status, &self.worker.record.spec.resilience);
    }

    /// Sets the verdict.
    pub fn judge(&mut self, verdict: Verdict) {
        self.verdict = verdict;
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        let runtime = &self.worker.runtime;
        let now = runtime.clock.now_ms();
        let (transition, (failures, successes)) = {
            let mut breaker = runtime.breaker.lock();
            (breaker.record(self.admission, self.verdict, now, &self.worker.breaker), breaker.streaks())
        };
        runtime.breaker_failures.set(i64::from(failures));
        runtime.breaker_successes.set(i64::from(successes));
        match self.verdict {
            Verdict::Success => runtime.succeeded.inc(),
            Verdict::Failure => runtime.failed.inc(),
            Verdict::Neutral => {}
        }
        runtime.note_transition(transition);
        // Last: whoever sees the worker idle sees how its requests ended.
        runtime.load.fetch_sub(u64::from(self.weight), Ordering::AcqRel);
        runtime.active.sub(i64::from(self.weight));
        if let Some((_, inflight)) = &self.worker.prefill_limit {
            inflight.set(i64::try_from(runtime.load()).unwrap_or(i64::MAX));
        }
        runtime.released.announce();
    }
}
