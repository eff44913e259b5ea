//! One job, from its start to its last command.

use std::sync::Arc;
use std::time::Duration;

use smg_fleet::info::{has_no_bootstrap_port, runs_undeclared_passthrough};
use smg_fleet::pairing::Descriptor;
use smg_fleet::settings::Probe;
use smg_fleet::{
    Facts, Health, Job, JobKind, JobStatus, Origin, Revision, Runtime, Settings, Worker, WorkerId, WorkerSpec,
    WorkerUrl,
};
use smg_state::Command;
use smg_store::StoreError;
use tokio::net::TcpStream;
use tokio::time::{Instant, sleep, timeout};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use super::{Shared, support};
use crate::probe::client::ProbeError;
use crate::probe::engine::{Address, speaks_grpc};
use crate::writer::{Write, WriteError};

/// Pause before a command is tried again that the store did not take.
const COMMIT_PAUSE: Duration = Duration::from_secs(1);

impl Shared {
    /// Performs the worker's job of this number. `cancelled` ends the work, but not its last command: committing that is what makes the
    /// job disappear, and there is more to do afterwards.
    pub async fn perform(self: Arc<Self>, id: WorkerId, number: u64, cancelled: CancellationToken) {
        let Some(worker) = self.writer.store().local().worker(id).cloned() else { return };
        let Some(job) = worker.job.clone().filter(|job| job.number == number) else { return };
        let result = tokio::select! {
            result = self.work(&worker, &job) => result,
            () = cancelled.cancelled() => return,
        };
        let registered = matches!(result, Ok(Some(_)));
        let (command, outcome) = match result {
            Ok(facts) => (Command::CompleteJob { id, number, facts }, "success"),
            Err(message) => {
                tracing::warn!(
                    target: "smg", worker = worker.spec.url, job = %job.kind, reason = message, "a worker job failed"
                );
                (Command::ReportJob { id, number, status: JobStatus::Failed, message }, "failure")
            }
        };
        if self.commit(command).await {
            self.metrics.registration_jobs.with_label_values(&[job.kind.as_str(), outcome]).inc();
            if registered {
                self.after_registration(id).await;
            }
        }
    }

    /// What a job takes: time for a removal, facts for the others.
    async fn work(&self, worker: &Worker, job: &Job) -> Result<Option<Box<Facts>>, String> {
        if job.kind == JobKind::RemoveWorker {
            self.settle(worker, job.number).await;
            return Ok(None);
        }
        let spec = job.proposed.as_deref().unwrap_or(&worker.spec);
        let facts = Box::pin(self.register(worker, spec, job.number)).await?;
        Ok(Some(Box::new(facts)))
    }

    /// Commits the last command of a job. Returns whether it was applied; it is not when the job is no longer the current one.
    async fn commit(&self, command: Command) -> bool {
        let write = Write { command_id: Some(Uuid::now_v7()), ..Write::of("jobs", command) };
        loop {
            match self.writer.write(write.clone()).await {
                Ok(_) => return true,
                Err(WriteError::Store(StoreError::Unavailable(_) | StoreError::Unknown(_))) => {
                    sleep(COMMIT_PAUSE).await
                }
                Err(error) => {
                    tracing::debug!(target: "smg", %error, "a job's outcome was not taken");
                    return false;
                }
            }
        }
    }

    fn settings(&self) -> Settings {
        let state = self.writer.store().local();
        Settings::resolve(None, state.policy("").map(|record| &record.document))
    }

    fn secs(&self, seconds: u64) -> Duration {
        self.timing.second.saturating_mul(u32::try_from(seconds).unwrap_or(u32::MAX))
    }

    /// Gives requests in flight their time: at least the settle time, then until every gateway says that it runs nothing there any more,
    /// at most until the deadline. A worker that gets no traffic leaves at once, and so does every worker where the settle time is 0.
    async fn settle(&self, worker: &Worker, revision: Revision) {
        let probe = self.settings().probe.for_worker(&worker.spec.health);
        if worker.health != Health::Ready || probe.drain_settle_secs == 0 {
            return;
        }
        let begun = Instant::now();
        sleep(self.secs(probe.drain_settle_secs)).await;
        let deadline = begun + self.secs(probe.drain_timeout_secs);
        while !self.gateways.have_drained(worker.id, revision).await {
            if Instant::now() >= deadline {
                let limit = probe.drain_timeout_secs;
                tracing::warn!(target: "smg", worker = worker.spec.url, limit, "a removed worker still runs requests and is forgotten");
                return;
            }
            sleep(self.timing.drain_look).await;
        }
    }

    /// Waits for the engine and asks it what it is.
    async fn register(&self, worker: &Worker, spec: &WorkerSpec, number: u64) -> Result<Facts, String> {
        if let Some(reason) = support::unsupported(spec) {
            return Err(reason);
        }
        let settings = self.settings();
        if worker.origin == Origin::Startup && worker.facts.is_none() {
            sleep(self.secs(settings.registration.delay_secs)).await;
        }
        let progress = Progress { shared: self, id: worker.id, number, last: None };
        self.wait_for_health(spec, &settings, progress).await?;
        // The semaphore is never closed.
        let _slot = self.slots.acquire().await;
        super::facts(&self.client, spec, self.timing.discovery, false).await
    }

    async fn wait_for_health(
        &self,
        spec: &WorkerSpec,
        settings: &Settings,
        mut progress: Progress<'_>,
    ) -> Result<(), String> {
        let probe = settings.probe.for_worker(&spec.health);
        let limit = self.secs(settings.registration.timeout_secs);
        let longest_pause = self.secs(settings.registration.check_interval_secs);
        let deadline = Instant::now() + limit;
        let mut pause = self.timing.first_pause;
        loop {
            let reason = match self.probe_health(spec, &probe).await {
                Ok(()) => return Ok(()),
                Err(NotWell::ForGood(reason)) => return Err(reason),
                Err(NotWell::Yet(reason)) => reason,
            };
            progress.report(&reason).await;
            pause = pause.min(longest_pause);
            if Instant::now() + pause > deadline {
                return Err(format!("not healthy within {} s: {reason}", settings.registration.timeout_secs));
            }
            sleep(pause).await;
            pause *= 2;
        }
    }

    /// One probe of the configured endpoint, or of `/health` when an engine does not have that one.
    async fn probe_health(&self, spec: &WorkerSpec, probe: &Probe) -> Result<(), NotWell> {
        const FALLBACK: &str = "/health";
        // The semaphore is never closed.
        let _slot = self.slots.acquire().await;
        if speaks_grpc(&spec.url) {
            return self.probe_engine(spec, probe).await.map_err(NotWell::Yet);
        }
        let first = self.probe_endpoint(spec, probe, &probe.endpoint).await;
        if !matches!(first, Err(NotWell::Yet(_))) || probe.endpoint == FALLBACK {
            return first;
        }
        match self.probe_endpoint(spec, probe, FALLBACK).await {
            Err(NotWell::Yet(_)) => first,
            second => second,
        }
    }

    /// One health check over gRPC, of whatever engine answers unless it is declared.
    async fn probe_engine(&self, spec: &WorkerSpec, probe: &Probe) -> Result<(), String> {
        let limit = self.secs(probe.timeout_secs);
        let at = Address { url: &spec.url, key: spec.api_key.as_deref(), limit };
        let answer = match spec.runtime {
            Runtime::Unspecified => self.client.engines().detect(at, Runtime::Unspecified).await.map(|_| ()),
            declared => self.client.engines().health(at, declared).await,
        };
        answer.map_err(|error| format!("health check of {} failed: {error}", spec.url))
    }

    async fn probe_endpoint(&self, spec: &WorkerSpec, probe: &Probe, endpoint: &str) -> Result<(), NotWell> {
        let url = format!("{}{endpoint}", spec.url);
        let (fleet, limit) = (self.writer.store().local().cluster_id(), self.secs(probe.timeout_secs));
        match self.client.status(&url, spec.api_key.as_deref(), fleet, limit).await {
            Ok(status) if status.is_success() => Ok(()),
            Ok(status) => Err(NotWell::Yet(format!("health probe of {url} answered {}", status.as_u16()))),
            Err(error @ ProbeError::OwnGateway) => {
                Err(NotWell::ForGood(format!("{url} was probed: {error}; with it, requests would go in circles")))
            }
            Err(error) => Err(NotWell::Yet(format!("health probe of {url} failed: {error}"))),
        }
    }

    /// What operators should hear about a worker that has just been registered. None of it stops anything.
    async fn after_registration(&self, id: WorkerId) {
        let Some(worker) = self.writer.store().local().worker(id).cloned() else { return };
        tracing::info!(
            target: "smg", worker = worker.spec.url, id = %id, role = %worker.spec.worker_type,
            runtime = %worker.runtime(), model = worker.model_id(), "worker registered"
        );
        if runs_undeclared_passthrough(&worker) {
            tracing::warn!(
                target: "smg", worker = worker.spec.url,
                "NO KV CONNECTOR IS DECLARED for this vLLM prefill worker: no KV will move and decode recomputes every prompt, \
                 although every answer looks right. Register it with kv_connector, for example NixlConnector"
            );
        }
        if has_no_bootstrap_port(&worker) {
            let told = worker.label("disaggregation_bootstrap_port");
            tracing::warn!(
                target: "smg", worker = worker.spec.url, told,
                "NO BOOTSTRAP PORT IS REGISTERED for this prefill worker: decode engines may not find it. Register it with bootstrap_port, \
                 the --disaggregation-bootstrap-port of the engine"
            );
        }
        if let (Some(field), Some(label)) = (&worker.spec.pairing_protocol, worker.spec.labels.get("pairing_protocol"))
            && field != label
        {
            tracing::warn!(
                target: "smg", worker = worker.spec.url, field, label,
                "pairing_protocol is set twice and differently: the label holds"
            );
        }
        let reported = worker.facts.as_ref().and_then(|facts| facts.labels.get("pairing_protocol"));
        if let (Some(reported), Some(declared)) = (reported, Descriptor::of(&worker).and_then(|leg| leg.protocol))
            && *reported != declared
        {
            tracing::warn!(
                target: "smg", worker = worker.spec.url, reported, declared,
                "the engine reports another pairing_protocol than was declared: what was declared holds"
            );
        }
        support::warn_of_another_engine_id(&worker);
        self.check_bootstrap(&worker).await;
    }

    async fn check_bootstrap(&self, worker: &Worker) {
        let Some(port) = support::bootstrap_port(worker) else { return };
        if let Some(told) = worker.label("disaggregation_bootstrap_port").filter(|told| *told != port.to_string()) {
            tracing::warn!(
                target: "smg", worker = worker.spec.url, port, told,
                "decode workers are sent to another bootstrap port than the engine says it has: register it with bootstrap_port"
            );
        }
        let Ok(url) = WorkerUrl::parse(&worker.spec.url) else { return };
        let host = url.host().trim_start_matches('[').trim_end_matches(']');
        let reason = match timeout(self.timing.bootstrap, TcpStream::connect((host, port))).await {
            Ok(Ok(_)) => return,
            Ok(Err(error)) => error.to_string(),
            Err(_) => "no answer".to_owned(),
        };
        self.metrics.pd_rendezvous_failures.with_label_values(&[worker.spec.worker_type.as_str(), "probe"]).inc();
        tracing::warn!(
            target: "smg", worker = worker.spec.url, port, reason,
            "the bootstrap port does not answer: decode workers will not find this prefill worker"
        );
    }
}

/// Why a worker cannot be registered.
enum NotWell {
    /// It is not well yet.
    Yet(String),
    /// Waiting would not help.
    ForGood(String),
}

/// Makes the last probe error readable, no more often than it is useful.
struct Progress<'a> {
    shared: &'a Shared,
    id: WorkerId,
    number: u64,
    last: Option<(String, Instant)>,
}

impl Progress<'_> {
    async fn report(&mut self, message: &str) {
        if let Some((last, at)) = &self.last
            && (last == message || at.elapsed() < self.shared.timing.report_every)
        {
            return;
        }
        self.last = Some((message.to_owned(), Instant::now()));
        let (id, number, status) = (self.id, self.number, JobStatus::Processing);
        let command = Command::ReportJob { id, number, status, message: message.to_owned() };
        if let Err(error) = self.shared.writer.write(Write::of("jobs", command)).await {
            tracing::debug!(target: "smg", worker = %id, %error, "a job's progress was not recorded");
        }
    }
}
