//! The replicated log on openraft and redb.
//!
//! Problem: an acknowledged write must survive a crash at any instruction, a full disk and a damaged sector, or the damage must be noticed.
//!
//! How the parts share the work: [`dir`] says who may use a directory, [`database`] verifies the log's file, [`writer`] alone writes it,
//! [`log`] shows it to openraft, [`snapshot`] keeps the state as files, [`machine`] applies commands and publishes the state, [`network`]
//! leads to other members, [`failure`] stops everything after the first storage error.
//!
//! Invariants
//! * openraft is told that a vote or an entry is durable only after the commit that holds it;
//! * what was read was verified: pages and frames at open, frames again at every read, snapshots by checksum;
//! * a proposal that openraft took is never reported as "did not happen".

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use futures::FutureExt;
use futures::future::BoxFuture;
use openraft::async_runtime::WatchReceiver;
use openraft::errors::{ClientWriteError, Fatal, LinearizableReadError, RaftError};
use openraft::raft::ReadPolicy;
use openraft::{BasicNode, Config, Raft, ServerState, SnapshotPolicy};
use smg_fleet::Revision;
use smg_messages::disk as pb;
use smg_state::{Command, Envelope, Outcome, State};
use tokio::sync::{Semaphore, watch};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::{ClusterStore, Leadership, StoreError};

mod convert;
mod database;
mod dir;
mod failure;
mod frame;
mod log;
mod machine;
mod network;
mod snapshot;
mod types;
mod writer;

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
mod tests;

pub use dir::OpenError;
pub use writer::StoreStats;

use failure::Failure;
use log::{LogStore, Shared};
use machine::{Machine, Published};
use snapshot::Snapshots;
use types::TypeConfig;
use writer::WriterThread;

/// How long a write or a barrier may take.
const DEADLINE: Duration = Duration::from_secs(5);
/// How long a lone voter may take to lead again. Milliseconds on any disk that works.
const START_DEADLINE: Duration = Duration::from_secs(30);
/// Most writes on their way.
const MAX_IN_FLIGHT: usize = 1024;

/// Where and how to open a store.
#[derive(Debug, Clone)]
pub struct RaftOptions {
    /// A directory of the store's own.
    pub data_dir: PathBuf,
    /// `host:port` under which other members reach this one. Recorded when the cluster starts.
    pub address: String,
    /// Whether an empty directory may become the first member of a new cluster. Without effect on a directory that has one.
    pub bootstrap: bool,
    /// Entries between two snapshots.
    pub snapshot_every: u64,
    /// Entries to keep behind a snapshot, so that a member that was away for a moment needs no snapshot and a damaged one can be skipped.
    pub keep_entries: u64,
}

impl RaftOptions {
    /// The usual cadence, for a directory that has a cluster already.
    pub fn new(data_dir: impl Into<PathBuf>, address: impl Into<String>) -> Self {
        Self {
            data_dir: data_dir.into(),
            address: address.into(),
            bootstrap: false,
            snapshot_every: 5_000,
            keep_entries: 10_000,
        }
    }

    /// Lets an empty directory become the first member of a new cluster.
    #[must_use]
    pub fn bootstrap(mut self, bootstrap: bool) -> Self {
        self.bootstrap = bootstrap;
        self
    }

    fn config(&self) -> Config {
        Config {
            cluster_name: "smg".into(),
            heartbeat_interval: 250,
            election_timeout_min: 1_000,
            election_timeout_max: 2_000,
            install_snapshot_timeout: 10_000,
            snapshot_policy: SnapshotPolicy::LogsSinceLast(self.snapshot_every),
            max_in_snapshot_log_to_keep: self.keep_entries,
            purge_batch_size: 256,
            api_channel_size: Some(2 * MAX_IN_FLIGHT as u64),
            enable_pre_vote: Some(true),
            // A leader that comes back must be elected again: only a new term proves what was committed.
            enable_leader_restore: Some(false),
            ..Config::default()
        }
    }
}

/// Who a member is, as its directory says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NodeIdentity {
    /// The cluster it belongs to.
    pub cluster_id: Uuid,
    /// Its number in the cluster; never used twice.
    pub node_id: u64,
    /// Its disk: a wiped one is another member.
    pub storage_id: Uuid,
    /// When the directory was created.
    pub created_at_unix_ms: u64,
}

impl NodeIdentity {
    fn from_pb(identity: &pb::NodeIdentity) -> Option<Self> {
        Some(Self {
            cluster_id: Uuid::from_slice(&identity.cluster_id).ok()?,
            node_id: identity.node_id,
            storage_id: Uuid::from_slice(&identity.storage_id).ok()?,
            created_at_unix_ms: identity.created_at_unix_ms,
        })
    }
}

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
    ///
    /// # Errors
    /// When the directory is in use, unusable or damaged, or the member does not come up. See [`OpenError`].
    pub async fn open(options: RaftOptions) -> Result<Arc<Self>, OpenError> {
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
        let raft = match RaftNode::new(identity.node_id, config, network::Peers, log, machine).await {
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
            Ok(()) => Ok(store),
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
            if !options.bootstrap {
                return Err(OpenError::Empty(options.data_dir.clone()));
            }
            // Elects the lone voter at once.
            let members = BTreeMap::from([(id, BasicNode::new(&options.address))]);
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
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let envelope = Envelope {
            command_id: Uuid::new_v4(),
            actor: "bootstrap".into(),
            proposed_at_unix_ms: u64::try_from(now.as_millis()).unwrap_or(u64::MAX),
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

    /// Refuses what has not begun once the store failed or stops.
    fn check(&self) -> Result<(), StoreError> {
        match self.failure.reason() {
            Some(reason) => Err(StoreError::Failed(reason)),
            None if self.stop.is_cancelled() => Err(StoreError::Closed),
            None => Ok(()),
        }
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
        let identity = NodeIdentity::from_pb(&recovered.identity).ok_or_else(|| OpenError::Damaged {
            path: path.to_owned(),
            reason: "the log does not say whose it is".into(),
        })?;
        let snapshots = Arc::new(Snapshots::open(path, &recovered)?);
        let last = recovered.last.max(snapshots.current().and_then(|current| current.meta.last_log_id));
        if let Some(committed) = recovered.committed.filter(|committed| Some(*committed) > last) {
            let held = last.map_or_else(|| "nothing".into(), |last| format!("entries up to {}", last.index()));
            let reason = format!("entry {} was committed, and the log holds {held}", committed.index());
            return Err(OpenError::Damaged { path: path.to_owned(), reason });
        }
        let shared = Arc::new(Shared::new(database, &recovered));
        let writer = WriterThread::spawn(Arc::clone(&shared), Some(lock))
            .map_err(OpenError::io("start the log's writer for", path))?;
        Ok(Self { log: LogStore::new(Arc::clone(&shared), writer.jobs()), shared, writer, snapshots, identity })
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
        async move {
            self.check()?;
            let permit = Arc::clone(&self.in_flight)
                .try_acquire_owned()
                .map_err(|_| StoreError::Unavailable("too many writes in flight".into()))?;
            let id = envelope.command_id;
            let unknown = |why: &dyn std::fmt::Display| StoreError::Unknown(format!("command {id}: {why}"));
            let raft = self.raft.clone();
            // A task of its own: the write stays counted until it is over, whatever becomes of its caller.
            let write = tokio::spawn(async move {
                let result = raft.client_write(envelope).await;
                drop(permit);
                result
            });
            match tokio::time::timeout(DEADLINE, write).await {
                Err(_) => Err(unknown(&format_args!("not confirmed within {} s", DEADLINE.as_secs()))),
                Ok(Err(join)) => Err(unknown(&join)),
                Ok(Ok(Ok(response))) => response.data.ok_or_else(|| unknown(&"it was applied without an outcome")),
                Ok(Ok(Err(RaftError::APIError(ClientWriteError::ForwardToLeader(forward))))) => {
                    Err(StoreError::Unavailable(forward.to_string()))
                }
                Ok(Ok(Err(other))) => Err(unknown(&other)),
            }
        }
        .boxed()
    }

    fn read_barrier(&self) -> BoxFuture<'_, Result<Revision, StoreError>> {
        async move {
            self.check()?;
            let barrier = self.raft.ensure_linearizable(ReadPolicy::ReadIndex);
            match tokio::time::timeout(DEADLINE, barrier).await {
                Err(_) => Err(StoreError::Unavailable(format!("no quorum within {} s", DEADLINE.as_secs()))),
                Ok(Ok(_)) => Ok(self.published.state.load().revision()),
                Ok(Err(RaftError::APIError(
                    error @ (LinearizableReadError::ForwardToLeader(_) | LinearizableReadError::QuorumNotEnough(_)),
                ))) => Err(StoreError::Unavailable(error.to_string())),
                Ok(Err(RaftError::Fatal(fatal))) => {
                    self.check()?;
                    Err(StoreError::Unavailable(fatal.to_string()))
                }
            }
        }
        .boxed()
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

    fn shutdown(&self) -> BoxFuture<'_, ()> {
        async move {
            self.stop.cancel();
            self.stopped.cancelled().await;
        }
        .boxed()
    }
}
