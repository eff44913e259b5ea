//! Registration, re-registration and removal of workers: jobs that the leader runs.
//!
//! A job is part of the state (it is committed with the write that asks for it), so a new leader finds every unfinished one and starts it
//! anew. A task follows each job; it ends when its job is done, has failed, or is no longer the worker's current one.
//!
//! Registration waits for the engine's health endpoint, asks the engine what it is, and commits the facts. While it waits, the last probe
//! error is readable in `job_status.message`. The documented system probes every 30 seconds; here the first probes come quickly and the
//! pauses grow to that interval, so that an engine which is up is registered at once. A failure is final: it stays readable for a while and
//! is then forgotten, together with a worker that never was registered.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use smg_fleet::listing::Contradiction;
use smg_fleet::{JobStatus, WorkerId};
use smg_state::{Command, State};
use smg_telemetry::Metrics;
use tokio::sync::Semaphore;
use tokio::time::{MissedTickBehavior, interval};
use tokio_util::sync::CancellationToken;

use crate::crew::Crew;
use crate::probe::client::ProbeClient;
use crate::probe::engine::{ModelInfo, ServerInfo};
use crate::sync::everywhere::AllGateways;
use crate::writer::{Write, Writer};

mod discover;
mod facts;
mod grpc_facts;
mod support;
mod task;
#[cfg(test)]
mod tests;

pub use discover::Budget;

pub(crate) use support::warn_of_another_engine_id;

/// Everything that can be learned of an engine, within `budget`. `whole` = an engine that speaks gRPC must also say how it
/// was started, or it has said nothing.
///
/// # Errors
/// When it does not say what must be known; the message says what.
pub(crate) async fn facts(
    client: &ProbeClient,
    spec: &smg_fleet::WorkerSpec,
    budget: Budget,
    whole: bool,
) -> Result<smg_fleet::Facts, String> {
    discover::facts(client, spec, budget, whole).await
}

/// How an engine that says this of itself over gRPC differs from the one the worker was registered with. One answer alone is not compared:
/// the other may name things differently.
pub(crate) fn contradiction_over_grpc(
    worker: &smg_fleet::Worker,
    model: Option<&ModelInfo>,
    server: Option<&ServerInfo>,
) -> Option<Contradiction> {
    grpc_facts::contradiction(worker, &grpc_facts::said(Some(model?), Some(server?)))
}

/// How patient jobs are; how long registration may take and how often it probes are the fleet's settings.
#[derive(Debug, Clone, Copy)]
pub struct Timing {
    /// Jobs that talk to an engine at the same time. Jobs that wait for one do not count.
    pub concurrency: usize,
    /// Pause after the first failed probe; it doubles up to the fleet's check interval.
    pub first_pause: Duration,
    /// At most one progress report a job within this time.
    pub report_every: Duration,
    /// How long a failed job stays readable.
    pub failed_for: Duration,
    /// How often failed jobs are looked through.
    pub sweep_every: Duration,
    /// Connect timeout of the bootstrap check.
    pub bootstrap: Duration,
    /// How often a removal looks whether gateways have drained.
    pub drain_look: Duration,
    /// Discovery.
    pub discovery: Budget,
    /// One second of the settings lasts this long. Tests shorten it.
    pub second: Duration,
}

impl Default for Timing {
    fn default() -> Self {
        Self {
            concurrency: 64,
            first_pause: Duration::from_millis(500),
            report_every: Duration::from_secs(5),
            failed_for: Duration::from_secs(300),
            sweep_every: Duration::from_secs(60),
            bootstrap: Duration::from_secs(2),
            drain_look: Duration::from_millis(100),
            discovery: Budget::default(),
            second: Duration::from_secs(1),
        }
    }
}

/// Runs jobs. Cheap to clone.
#[derive(Clone)]
pub struct Runner {
    shared: Arc<Shared>,
}

struct Shared {
    writer: Writer,
    client: ProbeClient,
    metrics: Arc<Metrics>,
    gateways: Arc<AllGateways>,
    timing: Timing,
    slots: Semaphore,
}

impl Runner {
    /// A runner that commits through `writer` and asks `gateways` what they still run.
    pub fn new(
        writer: Writer,
        client: ProbeClient,
        metrics: Arc<Metrics>,
        gateways: Arc<AllGateways>,
        timing: Timing,
    ) -> Self {
        let slots = Semaphore::new(timing.concurrency);
        Self { shared: Arc::new(Shared { writer, client, metrics, gateways, timing, slots }) }
    }

    /// Runs jobs until the term ends.
    pub async fn run(self, term: CancellationToken) {
        tokio::select! {
            ((), ()) = async { tokio::join!(self.follow(), self.forget()) } => {}
            () = term.cancelled() => {}
        }
    }

    /// Keeps one task for each unfinished job.
    async fn follow(&self) {
        let mut crew = Crew::new();
        let mut changes = self.shared.writer.store().changes();
        loop {
            changes.borrow_and_update();
            crew.staff(unfinished(&self.shared.writer.store().local()), |id, number, token| {
                Arc::clone(&self.shared).perform(id, *number, token)
            });
            self.shared.metrics.registration_jobs_active.set(crew.len() as i64);
            tokio::select! {
                alive = changes.changed() => if alive.is_err() { return },
                () = crew.reap() => {}
            }
        }
    }

    /// Forgets failed jobs that were readable long enough.
    async fn forget(&self) {
        let mut sweep = interval(self.shared.timing.sweep_every);
        sweep.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            sweep.tick().await;
            let failed_for = u64::try_from(self.shared.timing.failed_for.as_millis()).unwrap_or(u64::MAX);
            let before = smg_net::unix_millis().saturating_sub(failed_for);
            for (id, number) in failed(&self.shared.writer.store().local(), before) {
                let command = Command::ForgetJob { id, number };
                if let Err(error) = self.shared.writer.write(Write::of("jobs", command)).await {
                    tracing::debug!(target: "smg", worker = %id, %error, "a failed job was not forgotten");
                }
            }
        }
    }
}

/// The number of each worker's unfinished job.
fn unfinished(state: &State) -> BTreeMap<WorkerId, u64> {
    let job = |worker: &Arc<smg_fleet::Worker>| {
        worker.job.as_ref().filter(|job| job.status != JobStatus::Failed).map(|job| (worker.id, job.number))
    };
    state.workers().filter_map(job).collect()
}

/// The jobs that failed before a moment.
fn failed(state: &State, before_unix_ms: u64) -> Vec<(WorkerId, u64)> {
    let job = |worker: &Arc<smg_fleet::Worker>| {
        let job = worker.job.as_ref()?;
        (job.status == JobStatus::Failed && job.at_unix_ms <= before_unix_ms).then_some((worker.id, job.number))
    };
    state.workers().filter_map(job).collect()
}
