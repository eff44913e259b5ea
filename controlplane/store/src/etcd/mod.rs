//! The log in etcd: the same state machine, without disks of its own.
//!
//! Problem: a fleet that runs an etcd cluster already wants no second quorum to look after. So the log of commands lies in etcd, one member
//! appends to it and all apply it; what a command means is decided by [`State::apply`] alone, as with the Raft store.
//!
//! How the parts share the work: [`keys`] says where things lie, [`client`] calls etcd, [`watch`] follows keys, [`lease`] keeps what a
//! member holds, [`log`] reads and applies, [`writer`] appends and writes snapshots ([`snapshot`]), [`propose`] takes writes and reads on any
//! member, [`ask`] lets members ask each other, [`restore`] makes a fleet of a backup.
//!
//! Invariants
//! * an entry, the log's head and the end of the command's waiting are one transaction, which checks that its author still is the writer;
//! * a command that was taken back from the queue did not happen, and never will;
//! * entries are applied in order, each once; a gap is read again, never passed over;
//! * etcd going back in time stops the store: acknowledged writes are gone then, and only people can say what is to be done.

use std::sync::atomic::AtomicU64;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use futures::FutureExt;
use futures::future::BoxFuture;
use parking_lot::Mutex;
use smg_fleet::Revision;
use smg_messages::disk;
use smg_net::tls::ClientConfig;
use smg_services::etcd as pb;
use smg_state::{Command, Envelope, NodeId, Outcome, State, codec};
use thiserror::Error;
use tokio::sync::{Notify, Semaphore, watch as values};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, timeout_at};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::cluster::{ChangeError, ClusterStatus, GatewayAnswer, GatewayReport, MemberChange, Refusal};
use crate::failure::Failure;
use crate::frame::frame;
use crate::published::Published;
use crate::{ClusterStore, Leadership, StoreError};

mod ask;
mod client;
mod keys;
mod lease;
mod log;
mod propose;
mod restore;
mod snapshot;
#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
mod tests;
mod watch;
mod writer;

pub use restore::restore;

use ask::Answering;
use client::Etcd;
use keys::Keys;
use lease::Keeper;
use log::{Applied, Follower, Shared, Waiters};
use writer::{Cadence, Writer};

/// Most writes of a member on their way.
const MAX_IN_FLIGHT: usize = 256;
/// How long etcd may take until this member has a number and the whole log.
const START: Duration = Duration::from_secs(30);
/// Before another attempt to start.
const PAUSE: Duration = Duration::from_millis(100);
/// How long handing the writing over may take.
const HAND_OVER: Duration = Duration::from_secs(2);

/// How to open a store on etcd.
#[derive(Debug, Clone)]
pub struct EtcdOptions {
    /// Members of the etcd cluster: `http://HOST:PORT` or `https://HOST:PORT`.
    pub endpoints: Vec<String>,
    /// What every key of this fleet begins with.
    pub prefix: String,
    /// What `https://` endpoints must present and are presented; none = none is trusted.
    pub tls: Option<ClientConfig>,
    /// Whether a new fleet may be founded where there is none. Without effect where there is one.
    pub bootstrap: bool,
    /// `host:port` under which operators and gateways reach this member; shown to them.
    pub api_address: String,
    /// How long after its last sign of life a member is gone, in whole seconds.
    pub lease: Duration,
    /// Entries between two snapshots.
    pub snapshot_every: u64,
    /// Entries to keep behind a snapshot.
    pub keep_entries: u64,
    /// Whether etcd is told to forget old revisions. They are those of all its users, not of this fleet alone.
    pub compact: bool,
}

impl EtcdOptions {
    /// The usual cadence.
    pub fn new(endpoints: Vec<String>, prefix: impl Into<String>) -> Self {
        Self {
            endpoints,
            prefix: prefix.into(),
            tls: None,
            bootstrap: false,
            api_address: String::new(),
            lease: Duration::from_secs(4),
            snapshot_every: 2_000,
            keep_entries: 2_000,
            compact: true,
        }
    }
}

/// Why a store on etcd did not open.
#[derive(Debug, Error)]
pub enum EtcdError {
    /// There is no fleet, and no order to found one.
    #[error("there is no fleet in etcd under {0}: check --etcd-prefix, or found a new fleet with --bootstrap")]
    Empty(String),
    /// There is something where a fleet was to be restored.
    #[error("there is something in etcd under {0} already: choose another --etcd-prefix")]
    Taken(String),
    /// What is there cannot be used.
    #[error("the fleet's data in etcd cannot be used: {0}")]
    Damaged(String),
    /// etcd did not answer, or not as it should.
    #[error("etcd: {0}")]
    Start(String),
}

/// The store on etcd.
pub struct EtcdStore {
    etcd: Arc<Etcd>,
    shared: Arc<Shared>,
    keeper: Arc<Keeper>,
    node_id: NodeId,
    in_flight: Semaphore,
    leadership: values::Sender<Leadership>,
    resigned: CancellationToken,
    /// What other members are told of this one's gateways.
    gateways: Arc<OnceLock<GatewayReport>>,
    lease: Duration,
    tasks: Mutex<Vec<JoinHandle<()>>>,
}

impl std::fmt::Debug for EtcdStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("EtcdStore").field("node_id", &self.node_id).finish_non_exhaustive()
    }
}

impl Drop for EtcdStore {
    fn drop(&mut self) {
        self.shared.stop.cancel();
    }
}

impl EtcdStore {
    /// Joins the fleet under a prefix, and has its state when this returns. Must be called within a tokio runtime.
    ///
    /// # Errors
    /// When etcd does not answer within half a minute, there is no fleet, or its data cannot be used.
    pub async fn open(options: EtcdOptions) -> Result<Arc<Self>, EtcdError> {
        let deadline = Instant::now() + START;
        let failure = Arc::new(Failure::default());
        let etcd =
            Etcd::new(&options.endpoints, options.tls.as_ref(), Arc::clone(&failure)).map_err(EtcdError::Start)?;
        let (etcd, keys) = (Arc::new(etcd), Keys::new(&options.prefix));
        found(&etcd, &keys, &options, deadline).await?;
        let stop = CancellationToken::new();
        let shared = Arc::new(Shared {
            keys,
            failure: Arc::clone(&failure),
            published: Published::new(Arc::default()),
            applied: values::Sender::new(Applied::default()),
            snapshot_index: AtomicU64::new(0),
            waiters: Waiters::default(),
            read_again: Notify::new(),
            heard: Mutex::default(),
            stop: stop.clone(),
        });
        let ends_with_an_error = stop.clone().drop_guard();
        let keeper = Keeper::start(&options, failure, stop).map_err(EtcdError::Start)?;
        let member = Member { id: Uuid::new_v4(), api_address: options.api_address.clone() };
        let node_id = member.enter(&etcd, &shared.keys, &keeper, deadline).await?;
        let keeper = Arc::new(keeper);
        let leadership = values::Sender::new(Leadership::Follower);
        let (resigned, gateways) = (CancellationToken::new(), Arc::<OnceLock<GatewayReport>>::default());
        let cadence = Cadence { every: options.snapshot_every, keep: options.keep_entries, compact: options.compact };
        let follower = Follower::new(Arc::clone(&etcd), Arc::clone(&shared));
        let mut tasks = vec![smg_net::spawn("etcd-log", follower.run())];
        let mut applied = shared.applied.subscribe();
        let mut failed = shared.failure.subscribe();
        tokio::select! {
            reached = timeout_at(deadline, applied.wait_for(|applied| applied.index > 0)) => {
                reached.map_err(|_| EtcdError::Start("the log could not be read in time".to_owned()))
                    .and_then(|reached| reached.map(drop).map_err(|error| EtcdError::Start(error.to_string())))?;
            }
            reason = failed.wait_for(Option::is_some) => {
                return Err(EtcdError::Damaged(reason.ok().and_then(|reason| reason.clone()).unwrap_or_default()));
            }
        }
        let writer = Writer {
            etcd: Arc::clone(&etcd),
            shared: Arc::clone(&shared),
            keeper: Arc::clone(&keeper),
            node_id,
            cadence,
            leadership: leadership.clone(),
            resigned: resigned.clone(),
        };
        let answering = Answering {
            etcd: Arc::clone(&etcd),
            shared: Arc::clone(&shared),
            node_id,
            gateways: Arc::clone(&gateways),
        };
        let listed = member.stay(Arc::clone(&etcd), Arc::clone(&shared), Arc::clone(&keeper), node_id);
        tasks.push(smg_net::spawn("etcd-writer", writer.run()));
        tasks.push(smg_net::spawn("etcd-answers", answering.run()));
        tasks.push(smg_net::spawn("etcd-member", listed));
        ends_with_an_error.disarm();
        Ok(Arc::new(Self {
            etcd,
            shared,
            keeper,
            node_id,
            in_flight: Semaphore::new(MAX_IN_FLIGHT),
            leadership,
            resigned,
            gateways,
            lease: options.lease,
            tasks: Mutex::new(tasks),
        }))
    }

    /// The number of this member, which no other one ever had.
    pub fn node_id(&self) -> NodeId {
        self.node_id
    }
}

/// Founds the fleet if there is none and that is asked for.
async fn found(etcd: &Etcd, keys: &Keys, options: &EtcdOptions, deadline: Instant) -> Result<(), EtcdError> {
    let start = |error: &dyn std::fmt::Display| EtcdError::Start(error.to_string());
    loop {
        let head = etcd.range(keys::one(keys.head()), deadline).await.map_err(|error| start(&error))?;
        if !head.kvs.is_empty() {
            return Ok(());
        }
        if !options.bootstrap {
            return Err(EtcdError::Empty(options.prefix.clone()));
        }
        let envelope = Envelope {
            command_id: Uuid::new_v4(),
            actor: "bootstrap".into(),
            proposed_at_unix_ms: smg_net::unix_millis(),
            expected_revision: None,
            command: Command::InitCluster { cluster_id: Uuid::new_v4(), history_id: Uuid::new_v4() },
        };
        let entry = disk::EtcdEntry { index: 1, envelope: Some(codec::envelope_to_pb(&envelope)) };
        // Of several that found at once, one does.
        let founded = etcd
            .txn(pb::TxnRequest {
                compare: vec![keys::created_at(keys.head(), 0)],
                success: vec![
                    keys::write(keys.entry(1), frame(&entry), 0),
                    keys::write(keys.head(), frame(&disk::EtcdHead { index: 1 }), 0),
                ],
                failure: Vec::new(),
            })
            .await;
        match founded {
            Ok(_) => return Ok(()),
            Err(error) if Instant::now() >= deadline => return Err(start(&error.message())),
            Err(_) => sleep(PAUSE).await,
        }
    }
}

/// This process as a member.
struct Member {
    id: Uuid,
    api_address: String,
}

impl Member {
    fn record(&self, node_id: NodeId) -> Vec<u8> {
        frame(&disk::EtcdMember {
            node_id,
            storage_id: self.id.as_bytes().to_vec(),
            api_address: self.api_address.clone(),
        })
    }

    /// Takes the next number.
    async fn enter(&self, etcd: &Etcd, keys: &Keys, keeper: &Keeper, deadline: Instant) -> Result<NodeId, EtcdError> {
        let start = |error: &dyn std::fmt::Display| EtcdError::Start(error.to_string());
        let mut held = keeper.held();
        let lease = match timeout_at(deadline, held.wait_for(Option::is_some)).await {
            Ok(Ok(lease)) => lease.unwrap_or_default(),
            _ => return Err(start(&"it gave this member no lease in time")),
        };
        loop {
            let last = etcd.range(keys::one(keys.last_member()), deadline).await.map_err(|error| start(&error))?;
            let (last, changed_at) = match last.kvs.first() {
                None => (0, 0),
                Some(last) => match std::str::from_utf8(&last.value).ok().and_then(|last| last.parse::<u64>().ok()) {
                    Some(number) => (number, last.mod_revision),
                    None => return Err(EtcdError::Damaged("the number of the last member is none".to_owned())),
                },
            };
            let node_id = last + 1;
            let taken = etcd
                .txn(pb::TxnRequest {
                    compare: vec![keys::changed_at(keys.last_member(), changed_at)],
                    success: vec![
                        keys::write(keys.last_member(), node_id.to_string().into_bytes(), 0),
                        keys::write(keys.member(node_id), self.record(node_id), lease),
                    ],
                    failure: Vec::new(),
                })
                .await;
            match taken {
                Ok(taken) if taken.succeeded => return Ok(node_id),
                // Another one was first, or an answer was lost: numbers may be left out, never given out twice.
                Ok(_) => {}
                Err(error) if Instant::now() >= deadline => return Err(start(&error.message())),
                Err(_) => sleep(PAUSE).await,
            }
        }
    }

    /// Stays listed: each new lease needs it anew.
    async fn stay(self, etcd: Arc<Etcd>, shared: Arc<Shared>, keeper: Arc<Keeper>, node_id: NodeId) {
        let mut held = keeper.held();
        let mut written = None;
        loop {
            let lease = *held.borrow_and_update();
            if let Some(lease) = lease.filter(|_| lease != written) {
                match etcd.put(shared.keys.member(node_id), self.record(node_id), lease).await {
                    Ok(_) => written = Some(lease),
                    Err(_) => {
                        tokio::select! {
                            () = sleep(PAUSE) => continue,
                            () = shared.stop.cancelled() => return,
                        }
                    }
                }
            }
            tokio::select! {
                changed = held.changed() => if changed.is_err() { return },
                () = shared.stop.cancelled() => return,
            }
        }
    }
}

const COME_AND_GO: &str =
    "members on etcd come and go by being started and stopped; those of etcd itself are changed with etcdctl";

impl ClusterStore for EtcdStore {
    fn propose(&self, envelope: Envelope) -> BoxFuture<'_, Result<Outcome, StoreError>> {
        self.propose_here(envelope).boxed()
    }

    fn read_barrier(&self) -> BoxFuture<'_, Result<Revision, StoreError>> {
        self.barrier().boxed()
    }

    fn local(&self) -> Arc<State> {
        self.shared.published.state.load_full()
    }

    fn changes(&self) -> values::Receiver<Revision> {
        self.shared.published.revision.subscribe()
    }

    fn leadership(&self) -> values::Receiver<Leadership> {
        self.leadership.subscribe()
    }

    fn failure(&self) -> values::Receiver<Option<String>> {
        self.shared.failure.subscribe()
    }

    fn cluster(&self, local: bool) -> BoxFuture<'_, Result<ClusterStatus, StoreError>> {
        self.status(local).boxed()
    }

    fn change_members(&self, _: MemberChange) -> BoxFuture<'_, Result<Vec<NodeId>, ChangeError>> {
        std::future::ready(Err(ChangeError::refused(Refusal::Unsupported, COME_AND_GO))).boxed()
    }

    fn rehearse_members(&self, change: MemberChange) -> BoxFuture<'_, Result<Vec<NodeId>, ChangeError>> {
        self.change_members(change)
    }

    fn tell_gateways(&self, report: GatewayReport) {
        // There is one control plane in a process, which says so once.
        let _ = self.gateways.set(report);
    }

    fn ask_gateways(&self) -> BoxFuture<'_, Vec<GatewayAnswer>> {
        self.gateways_elsewhere().boxed()
    }

    fn in_contact(&self) -> bool {
        let heard = *self.shared.heard.lock();
        self.keeper.now().is_some() && heard.is_some_and(|heard| heard.elapsed() < self.lease + watch::SILENCE)
    }

    fn step_down(&self) -> BoxFuture<'_, ()> {
        async {
            // First of all: the next writer has the duties as soon as it is one.
            self.resigned.cancel();
            self.leadership.send_replace(Leadership::Follower);
            let resigning = writer::resign(&self.etcd, &self.shared.keys, self.node_id);
            let _ = tokio::time::timeout(HAND_OVER, resigning).await;
        }
        .boxed()
    }

    fn shutdown(&self) -> BoxFuture<'_, ()> {
        async {
            self.shared.stop.cancel();
            let tasks = std::mem::take(&mut *self.tasks.lock());
            for task in tasks {
                // A task that panicked has ended too.
                let _ = task.await;
            }
            self.keeper.ended().await;
        }
        .boxed()
    }
}
