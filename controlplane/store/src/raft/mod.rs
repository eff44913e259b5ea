//! The replicated log on openraft and redb.
//!
//! Problem: an acknowledged write must survive a crash at any instruction, a full disk and a damaged sector, or the damage must be noticed.
//!
//! How the parts share the work: [`dir`] says who may use a directory, [`database`] verifies the log's file, [`writer`] alone writes it,
//! [`log`] shows it to openraft, [`snapshot`] keeps the state as files, [`machine`] applies commands and publishes the state, [`crate::failure`]
//! stops everything after the first storage error.
//!
//! Between members: [`identity`] says whose calls count, [`links`] keeps the connections, [`network`] sends what openraft says and [`peer`]
//! answers it, both in the messages of [`wire`], [`parts`] carries snapshots, [`propose`] takes writes and reads to the leader, [`join`] lets new members in, [`plan`] decides
//! how the membership changes and [`members`] changes it, [`status`] tells of it.
//!
//! Invariants
//! * openraft is told that a vote or an entry is durable only after the commit that holds it;
//! * what was read was verified: pages and frames at open, frames again at every read, snapshots by checksum;
//! * a proposal that openraft took, or that may have reached another member, is never reported as "did not happen";
//! * a call between members counts only if both are who they mean each other to be.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use futures::FutureExt;
use futures::future::BoxFuture;
use openraft::async_runtime::WatchReceiver;
use openraft::errors::Fatal;
use openraft::{Instant as _, Raft, ServerState};
use parking_lot::Mutex;
use smg_fleet::Revision;
use smg_state::members::FOUNDER;
use smg_state::{Command, Envelope, NodeId, Outcome, State};
use tokio::sync::{Semaphore, watch};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::cluster::{ChangeError, ClusterStatus, GatewayAnswer, GatewayReport, MemberChange};
use crate::failure::Failure;
use crate::published::Published;
use crate::{ClusterStore, Leadership, StoreError};

mod convert;
mod database;
mod dir;
mod identity;
mod join;
mod links;
mod log;
mod machine;
mod members;
mod mutant;
mod network;
mod options;
mod parts;
mod peer;
mod plan;
mod propose;
mod restore;
mod snapshot;
mod status;
mod types;
mod wire;
mod writer;

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
mod simulation;
#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
mod tests;

pub use dir::OpenError;
pub use options::{NodeIdentity, Patience, RaftOptions};
pub use peer::PeerService;
pub use restore::restore;
pub use writer::StoreStats;

use database::Recovered;
use identity::Refused;
use join::Addresses;
use links::{Links, Way};
use log::{LogStore, Shared};
use machine::Machine;
use options::MAX_IN_FLIGHT;
use snapshot::Snapshots;
use types::{Peer, StoredMembership, TypeConfig};
use writer::WriterThread;

/// How long a lone voter may take to lead again. Milliseconds on any disk that works.
const START_DEADLINE: Duration = Duration::from_secs(30);

type RaftNode = Raft<TypeConfig, Machine>;

/// The embedded, durable store.
pub struct RaftStore {
    raft: RaftNode,
    identity: NodeIdentity,
    shared: Arc<Shared>,
    published: Arc<Published>,
    failure: Arc<Failure>,
    leadership: watch::Sender<Leadership>,
    in_flight: Arc<Semaphore>,
    links: Arc<Links>,
    patience: Patience,
    settle: Duration,
    with_peers: bool,
    /// When the leader was heard last.
    heard_at: Mutex<Instant>,
    /// Held while the membership is changed.
    kept_up: tokio::sync::Mutex<members::KeptUp<TypeConfig>>,
    /// Held while a snapshot comes in.
    installing: tokio::sync::Mutex<()>,
    refusals: Refusals,
    /// What other members are told of this one's gateways.
    gateways: OnceLock<GatewayReport>,
    /// Cancelled when the store is told to stop, or dropped.
    stop: CancellationToken,
    /// Cancelled once its files are closed.
    stopped: CancellationToken,
}

impl std::fmt::Debug for RaftStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RaftStore").field("identity", &self.identity).finish_non_exhaustive()
    }
}

impl Drop for RaftStore {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

impl RaftStore {
    /// Opens a directory and starts its member. A lone voter leads, and has applied everything it acknowledged before, when this returns.
    /// A new member waits until the cluster it joins has given it a number; it has no state yet then.
    ///
    /// # Errors
    /// When the directory is in use, unusable or damaged, or the member does not come up. See [`OpenError`].
    pub async fn open(options: RaftOptions) -> Result<Arc<Self>, OpenError> {
        if !options.join.is_empty() && !options.bootstrap {
            join::enter(&options).await?;
        }
        let files = {
            let options = options.clone();
            tokio::task::spawn_blocking(move || Files::open(&options)).await
        };
        Self::run(files.unwrap_or_else(|error| Err(OpenError::Start(error.to_string())))?, options).await
    }

    async fn run(files: Files, options: RaftOptions) -> Result<Arc<Self>, OpenError> {
        let Files { shared, log, writer, snapshots, identity } = files;
        let failure = Arc::clone(&shared.failure);
        let machine = Machine::new(snapshots, Arc::clone(&failure));
        let published = machine.published();
        let start = |error: &dyn std::fmt::Display| match failure.reason() {
            Some(reason) => OpenError::Start(reason),
            // The parts are whole but do not fit together, such as a log that ends before what was committed.
            None => OpenError::Damaged { path: options.data_dir.clone(), reason: error.to_string() },
        };
        let config = match options.config().validate() {
            Ok(config) => Arc::new(config),
            Err(error) => return Err(OpenError::Start(error.to_string())),
        };
        let links = Arc::new(Links::new(identity, Arc::clone(&published), Way::of(&options)));
        let peers = network::Peers::new(identity.node_id, Arc::clone(&links));
        let raft = match RaftNode::new(identity.node_id, config, peers, log, machine).await {
            Ok(raft) => raft,
            Err(error) => {
                let error = start(&error);
                writer.close().await;
                return Err(error);
            }
        };
        let store = Arc::new(Self {
            raft,
            identity,
            shared,
            published,
            failure: Arc::clone(&failure),
            leadership: watch::Sender::new(Leadership::Follower),
            in_flight: Arc::new(Semaphore::new(MAX_IN_FLIGHT)),
            links,
            patience: options.patience,
            settle: options.settle,
            with_peers: options.with_peers,
            heard_at: Mutex::new(Instant::now()),
            kept_up: tokio::sync::Mutex::default(),
            installing: tokio::sync::Mutex::default(),
            refusals: Refusals::default(),
            gateways: OnceLock::new(),
            stop: CancellationToken::new(),
            stopped: CancellationToken::new(),
        });
        tokio::spawn(
            Supervisor {
                raft: store.raft.clone(),
                writer,
                failure,
                leadership: store.leadership.clone(),
                stop: store.stop.clone(),
                stopped: store.stopped.clone(),
            }
            .run(),
        );
        match store.start(&options).await {
            Ok(()) => {
                if options.with_peers {
                    tokio::spawn(members::tend(Arc::downgrade(&store)));
                    let announce = members::announce(Arc::downgrade(&store), Addresses::of(&options), options.join);
                    tokio::spawn(announce);
                }
                Ok(store)
            }
            Err(error) => {
                let error = store.failure.reason().map_or(error, OpenError::Start);
                store.shutdown().await;
                Err(error)
            }
        }
    }

    /// Finishes what a bootstrap began, and makes a lone voter lead.
    async fn start(&self, options: &RaftOptions) -> Result<(), OpenError> {
        let failed = |error: &dyn std::fmt::Display| OpenError::Start(error.to_string());
        let id = self.identity.node_id;
        if !self.raft.is_initialized().await.map_err(|error| failed(&error))? {
            if id != FOUNDER {
                // It has joined and waits for the leader.
                return Ok(());
            }
            if !options.bootstrap {
                return Err(OpenError::Empty(options.data_dir.clone()));
            }
            // Elects the lone voter at once.
            let members =
                BTreeMap::from([(id, Peer { address: options.address.clone(), storage_id: self.identity.storage_id })]);
            self.raft.initialize(members).await.map_err(|error| failed(&error))?;
        } else if self.raft.voter_ids().eq([id]) {
            // Nobody else could win, so there is no reason to wait for the election timeout.
            self.raft.trigger().elect(false).await.map_err(|error| failed(&error))?;
        } else {
            return Ok(());
        }
        let (mut leadership, mut failure) = (self.leadership.subscribe(), self.failure.subscribe());
        tokio::select! {
            _ = leadership.wait_for(|now| *now == Leadership::Leader) => {}
            _ = failure.wait_for(Option::is_some) => {}
            () = tokio::time::sleep(START_DEADLINE) => return Err(OpenError::Start("it was not elected".into())),
        }
        self.read_barrier().await.map_err(|error| failed(&error))?;
        let cluster_id = self.local().cluster_id();
        if cluster_id.is_nil() {
            self.name_cluster().await?;
        } else if cluster_id != self.identity.cluster_id {
            return Err(OpenError::Damaged {
                path: options.data_dir.clone(),
                reason: format!("its state is of cluster {cluster_id}, its log of {}", self.identity.cluster_id),
            });
        }
        Ok(())
    }

    async fn name_cluster(&self) -> Result<(), OpenError> {
        let envelope = Envelope {
            command_id: Uuid::new_v4(),
            actor: "bootstrap".into(),
            proposed_at_unix_ms: unix_millis(),
            expected_revision: None,
            command: Command::InitCluster { cluster_id: self.identity.cluster_id, history_id: Uuid::new_v4() },
        };
        let outcome = self.propose(envelope).await.map_err(|error| OpenError::Start(error.to_string()))?;
        outcome.accepted().map(drop).map_err(|rejection| OpenError::Start(rejection.to_string()))
    }

    /// Who this member is.
    pub fn identity(&self) -> NodeIdentity {
        self.identity
    }

    /// What the log's writer has done since the store was opened.
    pub fn stats(&self) -> StoreStats {
        self.shared.counters.stats()
    }

    /// Writes on their way: proposed and not answered.
    pub fn in_flight(&self) -> usize {
        MAX_IN_FLIGHT - self.in_flight.available_permits()
    }

    /// Turns true when this member was removed from the cluster: it should stop, and its directory is of no more use.
    pub fn retired(&self) -> watch::Receiver<bool> {
        self.links.retired().subscribe()
    }

    /// The membership in this member's log.
    fn membership(&self) -> Arc<StoredMembership> {
        Arc::clone(&self.raft.metrics().borrow_watched().membership_config)
    }

    /// Who leads, as far as this member knows.
    fn leader(&self) -> Option<NodeId> {
        self.raft.metrics().borrow_watched().current_leader
    }

    fn leads(&self) -> bool {
        self.raft.metrics().borrow_watched().state == ServerState::Leader
    }

    /// Notes a sign of life of the leader.
    fn heard(&self) {
        *self.heard_at.lock() = Instant::now();
    }

    /// Whether the leader was heard lately; a leader hears itself while a quorum answers.
    fn contact(&self) -> bool {
        let lately = 3 * self.patience.election;
        if !self.with_peers || self.heard_at.lock().elapsed() < lately {
            return true;
        }
        let metrics = self.raft.metrics();
        let metrics = metrics.borrow_watched();
        metrics.state == ServerState::Leader
            && (metrics.membership_config.voter_ids().eq([self.identity.node_id])
                || metrics.last_quorum_acked.as_ref().is_some_and(|at| at.elapsed() < lately))
    }

    /// Refuses what has not begun once the store failed or stops.
    fn check(&self) -> Result<(), StoreError> {
        match self.failure.reason() {
            Some(reason) => Err(StoreError::Failed(reason)),
            None if self.stop.is_cancelled() => Err(StoreError::Closed),
            None => Ok(()),
        }
    }
}

/// Milliseconds since the Unix epoch, for records that people read.
fn unix_millis() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

/// Logs refused calls: each kind at once, the same one again only after a while.
#[derive(Debug, Default)]
struct Refusals(Mutex<Option<(Refused, Instant)>>);

impl Refusals {
    fn log(&self, refused: &Refused) {
        let mut last = self.0.lock();
        if last.as_ref().is_some_and(|(known, at)| known == refused && at.elapsed() < Duration::from_secs(30)) {
            return;
        }
        tracing::warn!(target: "smg", reason = %refused, "refusing a call of another member");
        *last = Some((refused.clone(), Instant::now()));
    }
}

/// What opening a directory leads to, before there is a member.
struct Files {
    shared: Arc<Shared>,
    log: LogStore,
    writer: WriterThread,
    snapshots: Arc<Snapshots>,
    identity: NodeIdentity,
}

impl Files {
    fn open(options: &RaftOptions) -> Result<Self, OpenError> {
        let opened = dir::open(&options.data_dir, options.bootstrap)?;
        Self::new(&options.data_dir, opened)
    }

    fn new(path: &Path, opened: dir::Opened) -> Result<Self, OpenError> {
        let dir::Opened { database, recovered, lock } = opened;
        let (identity, snapshots) = Self::fit(path, &recovered)?;
        let shared = Arc::new(Shared::new(database, &recovered));
        let writer = WriterThread::spawn(Arc::clone(&shared), Some(lock))
            .map_err(OpenError::io("start the log's writer for", path))?;
        Ok(Self { log: LogStore::new(Arc::clone(&shared), writer.jobs()), shared, writer, snapshots, identity })
    }

    /// Whether the log and the snapshots of a directory fit together: whose they are, and the snapshots.
    fn fit(path: &Path, recovered: &Recovered) -> Result<(NodeIdentity, Arc<Snapshots>), OpenError> {
        let identity = NodeIdentity::from_pb(&recovered.identity).ok_or_else(|| OpenError::Damaged {
            path: path.to_owned(),
            reason: "the log does not say whose it is".into(),
        })?;
        let snapshots = Arc::new(Snapshots::open(path, recovered)?);
        let last = recovered.last.max(snapshots.current().and_then(|current| current.meta.last_log_id));
        if let Some(committed) = recovered.committed.filter(|committed| Some(*committed) > last) {
            let held = last.map_or_else(|| "nothing".into(), |last| format!("entries up to {}", last.index()));
            let reason = format!("entry {} was committed, and the log holds {held}", committed.index());
            return Err(OpenError::Damaged { path: path.to_owned(), reason });
        }
        Ok((identity, snapshots))
    }
}

/// Watches over a running member, and stops it.
struct Supervisor {
    raft: RaftNode,
    writer: WriterThread,
    failure: Arc<Failure>,
    leadership: watch::Sender<Leadership>,
    stop: CancellationToken,
    stopped: CancellationToken,
}

impl Supervisor {
    async fn run(self) {
        let mut metrics = self.raft.metrics();
        let mut failure = self.failure.subscribe();
        loop {
            let (leads, running) = {
                let metrics = metrics.borrow_and_update();
                (metrics.state == ServerState::Leader, metrics.running_state.clone())
            };
            self.lead(leads);
            match running {
                Ok(()) | Err(Fatal::Stopped) => {}
                Err(fatal) => drop(self.failure.fail(fatal)),
            }
            tokio::select! {
                () = self.stop.cancelled() => break,
                _ = failure.wait_for(Option::is_some) => break,
                changed = metrics.changed() => if changed.is_err() { break },
            }
        }
        self.lead(false);
        // Joins the member's task; a panic in there is a failure that the loop has seen.
        let _ = self.raft.shutdown().await;
        self.stop.cancelled().await;
        self.writer.close().await;
        self.stopped.cancel();
    }

    fn lead(&self, leads: bool) {
        let now = if leads { Leadership::Leader } else { Leadership::Follower };
        self.leadership.send_if_modified(|known| std::mem::replace(known, now) != now);
    }
}

impl ClusterStore for RaftStore {
    fn propose(&self, envelope: Envelope) -> BoxFuture<'_, Result<Outcome, StoreError>> {
        self.propose_anywhere(envelope).boxed()
    }

    fn read_barrier(&self) -> BoxFuture<'_, Result<Revision, StoreError>> {
        self.read_barrier_anywhere().boxed()
    }

    fn local(&self) -> Arc<State> {
        self.published.state.load_full()
    }

    fn changes(&self) -> watch::Receiver<Revision> {
        self.published.revision.subscribe()
    }

    fn leadership(&self) -> watch::Receiver<Leadership> {
        self.leadership.subscribe()
    }

    fn failure(&self) -> watch::Receiver<Option<String>> {
        self.failure.subscribe()
    }

    fn cluster(&self, local: bool) -> BoxFuture<'_, Result<ClusterStatus, StoreError>> {
        self.status_anywhere(local).boxed()
    }

    fn commits(&self) -> u64 {
        self.stats().commits
    }

    fn change_members(&self, change: MemberChange) -> BoxFuture<'_, Result<Vec<NodeId>, ChangeError>> {
        self.change_anywhere(change, false).boxed()
    }

    fn rehearse_members(&self, change: MemberChange) -> BoxFuture<'_, Result<Vec<NodeId>, ChangeError>> {
        self.change_anywhere(change, true).boxed()
    }

    fn tell_gateways(&self, report: GatewayReport) {
        // There is one control plane to a store.
        let _ = self.gateways.set(report);
    }

    fn ask_gateways(&self) -> BoxFuture<'_, Vec<GatewayAnswer>> {
        self.gateways_elsewhere().boxed()
    }

    fn in_contact(&self) -> bool {
        self.contact()
    }

    fn step_down(&self) -> BoxFuture<'_, ()> {
        self.step_down_here().boxed()
    }

    fn shutdown(&self) -> BoxFuture<'_, ()> {
        async move {
            self.stop.cancel();
            self.stopped.cancelled().await;
        }
        .boxed()
    }
}
