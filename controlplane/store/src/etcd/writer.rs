//! Being the writer: one member appends to the log, the others only follow.
//!
//! * The writer is whoever created the writer's key, under its lease; the revision of that is its fence. Each append is a transaction that
//!   checks the fence and that the head is as it was read: a writer that was replaced without noticing appends nothing.
//! * Commands wait in a queue in etcd until the writer moves them to the log, in the same transaction: whoever put one there can take it
//!   back, and knows then that it did not happen.
//! * After an append of which the outcome is not known, head and queue are read anew; nothing is concluded from the silence.
//! * This member has the leader's duties only while it is the writer, its lease holds, and it has applied what was in the log when it became
//!   the writer.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use smg_messages::{disk, state};
use smg_services::etcd as pb;
use smg_state::{NodeId, codec};
use tokio::sync::watch;
use tokio::time::{Instant, sleep};
use tokio_util::sync::CancellationToken;

use super::client::Etcd;
use super::keys::{self, Keys};
use super::lease::Keeper;
use super::log::Shared;
use super::snapshot::{self, Fence};
use super::watch::Watcher;
use crate::call::CallError;
use crate::frame::{frame, unframe};
use crate::{Leadership, StoreError};

/// Most commands of one append. etcd allows 128 steps in a transaction, and each command takes two and a condition.
const BATCH: usize = 40;
/// Largest append, in bytes, unless it is one command. A request may have 1.5 MiB unless etcd is told otherwise.
const BATCH_BYTES: usize = 512 * 1024;
/// Commands of the queue that are read at once.
const PAGE: i64 = 40;
/// For one reading of head and queue, and for one snapshot.
const READ: Duration = Duration::from_secs(5);
const SAVE: Duration = Duration::from_secs(30);
/// Before another attempt.
const PAUSE: Duration = Duration::from_millis(100);
/// Between two snapshots that failed.
const SNAPSHOT_PAUSE: Duration = Duration::from_secs(5);

/// How often snapshots are written, and what is kept.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Cadence {
    pub every: u64,
    pub keep: u64,
    pub compact: bool,
}

/// Who stands for writer, and writes.
pub(crate) struct Writer {
    pub etcd: Arc<Etcd>,
    pub shared: Arc<Shared>,
    pub keeper: Arc<Keeper>,
    pub node_id: NodeId,
    pub cadence: Cadence,
    pub leadership: watch::Sender<Leadership>,
    /// Cancelled once this member hands the writing over: it stands no more.
    pub resigned: CancellationToken,
}

/// The queue as this writer knows it, oldest first: by the revisions at which commands were put there, and their keys. None = this version
/// cannot read the command: it is taken out, and did not happen.
type Queue = BTreeMap<(i64, Vec<u8>), Option<state::Envelope>>;

/// The place at which the next entry goes.
struct Head {
    index: u64,
    changed_at: i64,
}

impl Writer {
    /// Stands for writer, and writes, until the store stops.
    pub async fn run(self) {
        let stop = self.shared.stop.clone();
        let mut failure = self.shared.failure.subscribe();
        tokio::select! {
            () = self.stand() => {}
            () = stop.cancelled() => {}
            _ = failure.wait_for(Option::is_some) => {}
        }
        self.leadership.send_replace(Leadership::Follower);
    }

    async fn stand(&self) {
        loop {
            let mut held = self.keeper.held();
            let Ok(lease) = held.wait_for(Option::is_some).await.map(|held| *held) else { return };
            let Some(lease) = lease else { continue };
            let ended = async move {
                let _ = held.wait_for(|now| *now != Some(lease)).await;
            };
            tokio::select! {
                () = self.hold(lease) => {}
                () = ended => {}
            }
            self.leadership.send_replace(Leadership::Follower);
        }
    }

    /// Stands and writes under one lease.
    async fn hold(&self, lease: i64) {
        loop {
            if self.resigned.is_cancelled() {
                return std::future::pending().await;
            }
            match self.try_become(lease).await {
                Ok(Some(fence)) => {
                    tracing::info!(target: "smg", member = self.node_id, "this member is the writer");
                    let reason = self.write(fence).await;
                    self.leadership.send_replace(Leadership::Follower);
                    tracing::info!(target: "smg", member = self.node_id, reason, "this member is the writer no more");
                }
                Ok(None) => self.until_vacant().await,
                Err(error) => {
                    tracing::debug!(target: "smg", reason = error.message(), "standing for writer");
                    sleep(PAUSE).await;
                }
            }
        }
    }

    /// Becomes the writer if nobody is. Returns the fence.
    async fn try_become(&self, lease: i64) -> Result<Option<i64>, CallError> {
        let key = self.shared.keys.writer();
        let mine = self.node_id.to_string().into_bytes();
        let txn = pb::TxnRequest {
            compare: vec![keys::created_at(key.clone(), 0)],
            success: vec![keys::write(key.clone(), mine.clone(), lease), keys::read(keys::one(key.clone()))],
            failure: vec![keys::read(keys::one(key))],
        };
        let found = keys::reads(self.etcd.txn(txn).await?).next().unwrap_or_default();
        // It may have become it by an attempt whose answer was lost. What lies under a lease that this member has lost counts no more: it
        // may be gone the next moment, and nobody would tell.
        let mine = found.kvs.into_iter().find(|writer| writer.value == mine && writer.lease == lease);
        Ok(mine.map(|writer| writer.create_revision))
    }

    /// Waits until there may be no writer.
    async fn until_vacant(&self) {
        let key = self.shared.keys.writer();
        let Ok(found) = self.etcd.range(keys::one(key.clone()), Instant::now() + READ).await else { return };
        if found.kvs.is_empty() {
            return;
        }
        let revision = found.header.map_or(0, |header| header.revision);
        let Ok(mut watcher) = Watcher::open(&self.etcd, key, revision + 1).await else { return sleep(PAUSE).await };
        while let Ok(events) = watcher.next().await {
            if events.iter().any(|event| event.r#type() == pb::event::EventType::Delete) {
                return;
            }
        }
        sleep(PAUSE).await;
    }

    /// Writes until this member is the writer no more; says why.
    async fn write(&self, fence: i64) -> &'static str {
        loop {
            match self.term(fence).await {
                Ended::Replaced => return "it has handed over, another member is, or its lease has ended",
                Ended::More => {}
                Ended::Again(reason) => {
                    tracing::debug!(target: "smg", reason, "reading head and queue anew");
                    sleep(PAUSE).await;
                }
            }
        }
    }

    async fn term(&self, fence: i64) -> Ended {
        let Look { mut head, mut queue, revision, more } = match self.look(fence).await {
            Ok(found) => found,
            Err(ended) => return ended,
        };
        // Its duties start from everything that was written before.
        if !self.shared.until_applied(head.index, Instant::now() + READ).await {
            return Ended::Again("this member is behind".to_owned());
        }
        if self.resigned.is_cancelled() {
            return Ended::Replaced;
        }
        self.leadership.send_if_modified(|now| std::mem::replace(now, Leadership::Leader) != Leadership::Leader);
        let mut watcher = match Watcher::open(&self.etcd, self.shared.keys.queue(), revision + 1).await {
            Ok(watcher) => watcher,
            Err(reason) => return Ended::Again(reason),
        };
        let mut applied = self.shared.applied.subscribe();
        let mut snapshot_after = Instant::now();
        loop {
            while !queue.is_empty() {
                if let Err(ended) = self.append(fence, &mut head, &mut queue).await {
                    return ended;
                }
            }
            if more {
                return Ended::More;
            }
            let due = self.shared.snapshot_index.load(Ordering::Relaxed) + self.cadence.every;
            let snapshot_is_due = async { applied.wait_for(|applied| applied.index >= due).await.map(drop) };
            tokio::select! {
                events = watcher.next() => match events {
                    Ok(events) => take(&mut queue, events),
                    Err(reason) => return Ended::Again(reason),
                },
                () = self.resigned.cancelled() => return Ended::Replaced,
                Ok(()) = snapshot_is_due, if Instant::now() >= snapshot_after => {
                    if let Err(reason) = self.snapshot(fence).await {
                        tracing::warn!(target: "smg", reason, "a snapshot was not written to etcd");
                        snapshot_after = Instant::now() + SNAPSHOT_PAUSE;
                    }
                }
            }
        }
    }

    /// Reads head and queue, at one revision, if this member is still the writer.
    async fn look(&self, fence: i64) -> Result<Look, Ended> {
        let keys = &self.shared.keys;
        let txn = pb::TxnRequest {
            compare: vec![keys::created_at(keys.writer(), fence)],
            success: vec![keys::read(keys::one(keys.head())), keys::read(keys::oldest_first(keys.queue(), PAGE))],
            failure: Vec::new(),
        };
        let answer = self.etcd.txn(txn).await.map_err(|error| Ended::Again(error.message().to_owned()))?;
        if !answer.succeeded {
            return Err(Ended::Replaced);
        }
        let revision = answer.header.as_ref().map_or(0, |header| header.revision);
        let mut found = keys::reads(answer);
        let (head, waiting) = (found.next().unwrap_or_default(), found.next().unwrap_or_default());
        let head = match head.kvs.first() {
            None => Head { index: 0, changed_at: 0 },
            Some(head) => match unframe::<disk::EtcdHead>(&head.value) {
                Ok(read) => Head { index: read.index, changed_at: head.mod_revision },
                Err(error) => {
                    self.shared.failure.fail(format!("the log's head in etcd: {error}"));
                    return Err(Ended::Replaced);
                }
            },
        };
        let mut queue = Queue::new();
        take(&mut queue, waiting.kvs.into_iter().map(|kv| pb::Event { r#type: 0, kv: Some(kv) }));
        Ok(Look { head, queue, revision, more: waiting.more })
    }

    /// Moves the oldest commands of the queue to the log.
    async fn append(&self, fence: i64, head: &mut Head, queue: &mut Queue) -> Result<(), Ended> {
        let keys = &self.shared.keys;
        let mut compare = vec![keys::created_at(keys.writer(), fence), keys::changed_at(keys.head(), head.changed_at)];
        let (mut success, mut bytes, mut moved, mut index) = (Vec::new(), 0, Vec::new(), head.index);
        for ((created_at, key), envelope) in queue.iter().take(BATCH) {
            if let Some(envelope) = envelope {
                let entry = frame(&disk::EtcdEntry { index: index + 1, envelope: Some(envelope.clone()) });
                if bytes + entry.len() > BATCH_BYTES && !moved.is_empty() {
                    break;
                }
                index += 1;
                bytes += entry.len();
                success.push(keys::write(keys.entry(index), entry, 0));
            }
            compare.push(keys::created_at(key.clone(), *created_at));
            success.push(keys::remove(key.clone(), Vec::new()));
            moved.push((*created_at, key.clone()));
        }
        success.push(keys::write(keys.head(), frame(&disk::EtcdHead { index }), 0));
        let answer = self.etcd.txn(pb::TxnRequest { compare, success, failure: Vec::new() }).await;
        match answer {
            Ok(answer) if answer.succeeded => {
                *head = Head { index, changed_at: answer.header.map_or(0, |header| header.revision) };
                moved.iter().for_each(|key| drop(queue.remove(key)));
                Ok(())
            }
            // One of them was taken back, or this member is not the writer any more: a look tells.
            Ok(_) => Err(Ended::Again("the queue or the head has changed".to_owned())),
            Err(error) => Err(Ended::Again(error.message().to_owned())),
        }
    }

    async fn snapshot(&self, writer: i64) -> Result<(), String> {
        let applied = self.shared.applied.borrow().clone();
        let Cadence { keep, compact, .. } = self.cadence;
        let fence = Fence { writer, keep, compact };
        let deadline = Instant::now() + SAVE;
        let (etcd, keys) = (&self.etcd, &self.shared.keys);
        snapshot::save(etcd, keys, &fence, applied.index, &applied.state, deadline).await?;
        self.shared.snapshot_index.fetch_max(applied.index, Ordering::Relaxed);
        Ok(())
    }
}

/// What a writer reads before it writes.
struct Look {
    head: Head,
    queue: Queue,
    /// Of etcd, when this was so.
    revision: i64,
    /// Whether there is more in the queue.
    more: bool,
}

/// Why a writer stops writing.
enum Ended {
    /// It is the writer no more.
    Replaced,
    /// There is more in the queue than was read.
    More,
    /// What it knows may no longer be so.
    Again(String),
}

/// Takes changes of the queue in.
fn take(queue: &mut Queue, events: impl IntoIterator<Item = pb::Event>) {
    for event in events {
        let put = event.r#type() == pb::event::EventType::Put;
        let Some(kv) = event.kv else { continue };
        if put {
            let envelope = unframe::<state::Envelope>(&kv.value).ok();
            // A command that only a newer version knows would stop every member of this one.
            let envelope = envelope.filter(|envelope| codec::envelope_from_pb(envelope.clone()).is_ok());
            if envelope.is_none() {
                tracing::error!(target: "smg", key = keys::name(&kv.key), "a command of another version is refused");
            }
            queue.insert((kv.create_revision, kv.key), envelope);
        } else {
            queue.retain(|(_, key), _| *key != kv.key);
        }
    }
}

/// Ends being the writer, if `node_id` is it.
pub(crate) async fn resign(etcd: &Etcd, keys: &Keys, node_id: NodeId) -> Result<(), StoreError> {
    let found = etcd.range(keys::one(keys.writer()), Instant::now() + READ).await?;
    let Some(writer) = found.kvs.into_iter().find(|writer| writer.value == node_id.to_string().into_bytes()) else {
        return Ok(());
    };
    let txn = pb::TxnRequest {
        compare: vec![keys::created_at(writer.key.clone(), writer.create_revision)],
        success: vec![keys::remove(writer.key, Vec::new())],
        failure: Vec::new(),
    };
    etcd.txn(txn).await.map(drop).map_err(|error| StoreError::Unavailable(error.message().to_owned()))
}
