//! The control plane: one process's share of it.
//!
//! Operators change the fleet through the admin API, gateways follow it through the sync service, and the node that leads keeps it true:
//! it registers workers, removes them and probes them. All of it stands on one [`ClusterStore`]; nothing here holds state that a restart
//! must bring back, but the list of connected gateways, which reconnect.
//!
//! * [`admin`]: REST under `/workers` and `/fleet`, and the same over gRPC;
//! * [`sync`]: the subscription of gateways;
//! * [`jobs`]: registration and removal, a duty of the leader;
//! * [`probe`]: active health probes, a duty of the leader;
//! * [`slots`]: who may use how much of which decode worker, a duty of the leader;
//! * [`startup`]: what start-up flags say, as commands;
//! * [`backup`]: the whole state as one file;
//! * [`writer`]: the one way by which any of them changes the state.
//!
//! Invariants
//! * a write is answered after its command is durable, never before;
//! * a duty of the leader runs on the leader alone, starts from the stored state and may be repeated: a new leader needs nothing else;
//! * engines are never trusted: each answer is bounded in size and time, and what is stored of it is bounded too.

use std::sync::Arc;

use axum::Router;
use parking_lot::Mutex;
use smg_store::ClusterStore;
use smg_telemetry::Metrics;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

pub mod admin;
pub mod backup;
mod crew;
mod duty;
mod inventory;
pub mod jobs;
pub mod probe;
pub mod slots;
mod standing;
pub mod startup;
pub mod sync;
#[cfg(test)]
mod testing;
pub mod writer;

/// Largest request body of the admin API, in bytes, unless the process is told another limit.
pub const DEFAULT_MAX_BODY_BYTES: usize = 1024 * 1024;

/// What a control plane needs.
pub struct ControlPlaneOptions {
    /// Where the state lives.
    pub store: Arc<dyn ClusterStore>,
    /// The process's metrics.
    pub metrics: Arc<Metrics>,
    /// Ends background tasks and sends gateways away.
    pub shutdown: CancellationToken,
    /// Largest request body of the admin API, in bytes.
    pub max_body_bytes: usize,
    /// Who may call the admin API, besides who is stored.
    pub access: admin::access::AccessOptions,
    /// What connections to `https://` workers trust and present; none = such workers are not trusted.
    pub worker_tls: Option<smg_net::tls::ClientConfig>,
    /// How patient registration jobs are.
    pub jobs: jobs::Timing,
    /// How patient the prober is.
    pub probe: probe::Timing,
    /// How patient the sync service is.
    pub sync: sync::Timing,
    /// How patient the slot ledger is.
    pub slots: slots::Timing,
}

impl ControlPlaneOptions {
    /// The defaults for `store`.
    pub fn new(store: Arc<dyn ClusterStore>, metrics: Arc<Metrics>) -> Self {
        Self {
            store,
            metrics,
            shutdown: CancellationToken::new(),
            max_body_bytes: DEFAULT_MAX_BODY_BYTES,
            access: admin::access::AccessOptions::default(),
            worker_tls: None,
            jobs: jobs::Timing::default(),
            probe: probe::Timing::default(),
            sync: sync::Timing::default(),
            slots: slots::Timing::default(),
        }
    }
}

/// A running control plane.
pub struct ControlPlane {
    writer: writer::Writer,
    sync: sync::SyncService,
    admin: admin::service::Service,
    rpc: Router,
    max_body_bytes: usize,
    access: Arc<admin::access::AccessOptions>,
    shutdown: CancellationToken,
    tasks: Mutex<Vec<JoinHandle<()>>>,
}

impl ControlPlane {
    /// Starts the background tasks. Must be called within a tokio runtime.
    pub fn start(options: ControlPlaneOptions) -> Arc<Self> {
        let ControlPlaneOptions {
            store,
            metrics,
            shutdown,
            max_body_bytes,
            access,
            worker_tls,
            jobs,
            probe,
            sync,
            slots,
        } = options;
        let access = Arc::new(access);
        let writer = writer::Writer::new(store, Arc::clone(&metrics));
        let client = probe::client::ProbeClient::new(worker_tls.as_ref());
        let desk = slots::Desk::new(writer.clone(), client.clone(), Arc::clone(&metrics), slots);
        let (sync, publisher) = sync::SyncService::new(
            Arc::clone(writer.store()),
            desk.clone(),
            Arc::clone(&metrics),
            shutdown.clone(),
            sync,
        );
        let gateways = sync::everywhere::AllGateways::new(Arc::clone(writer.store()), sync.gateways());
        let all = Arc::clone(&gateways);
        let runner = jobs::Runner::new(writer.clone(), client.clone(), Arc::clone(&metrics), all, jobs);
        let prober = probe::Prober::new(writer.clone(), client, Arc::clone(&metrics), probe);
        let store = Arc::clone(writer.store());
        let leading = (Arc::clone(&store), shutdown.clone());
        let jobs = duty::while_leading(leading.0.clone(), leading.1.clone(), move |term| runner.clone().run(term));
        let prober = duty::while_leading(leading.0.clone(), leading.1.clone(), move |term| prober.clone().run(term));
        let slots = duty::while_leading(leading.0.clone(), leading.1.clone(), move |term| desk.clone().run(term));
        let named = (writer.clone(), Arc::clone(&access));
        let tokens = duty::while_leading(leading.0, leading.1, move |term| {
            startup::store_tokens(named.0.clone(), Arc::clone(&named.1), term)
        });
        let tasks = vec![
            smg_net::spawn("sync-publisher", publisher),
            smg_net::spawn("jobs", jobs),
            smg_net::spawn("prober", prober),
            smg_net::spawn("slot-ledger", slots),
            smg_net::spawn("startup-tokens", tokens),
            smg_net::spawn("standing", standing::follow(Arc::clone(&store), Arc::clone(&metrics), shutdown.clone())),
            smg_net::spawn("inventory", inventory::follow(store, metrics, shutdown.clone())),
        ];
        let admin =
            admin::service::Service::new(writer.clone(), gateways, sync.feed(), Arc::clone(&access), shutdown.clone());
        let rpc = admin::rpc::router(admin.clone(), max_body_bytes, shutdown.clone());
        Arc::new(Self { writer, sync, admin, rpc, max_body_bytes, access, shutdown, tasks: Mutex::new(tasks) })
    }

    /// Everything this control plane serves: admin REST, admin gRPC and the sync service on one router, so that one listener or one
    /// in-memory connection (HTTP/1.1 and HTTP/2 with prior knowledge) carries all of them.
    pub fn router(self: &Arc<Self>) -> Router {
        let rest = admin::router(self.admin.clone(), self.max_body_bytes);
        rest.merge(self.rpc.clone()).merge(self.sync.router())
    }

    /// The way to change the state from within the process.
    pub fn writer(&self) -> &writer::Writer {
        &self.writer
    }

    /// Ends the background tasks, sends connected gateways away, and waits until the tasks have ended.
    pub async fn stop(&self) {
        self.shutdown.cancel();
        let tasks = std::mem::take(&mut *self.tasks.lock());
        for task in tasks {
            if let Err(error) = task.await {
                tracing::error!(target: "smg", %error, "a background task of the control plane died");
            }
        }
    }
}
