//! Following the log: every member reads it, in order, and applies each entry once.
//!
//! * A cycle: what is there is read, then what comes is watched, from the revision at which was read. When the watch ends, for whatever
//!   reason, the next cycle begins; an entry that is known already is passed over, and a gap ends the watch. So no event that etcd did not
//!   deliver is ever missed for good.
//! * Where the log no longer begins where this member stands, the snapshot takes it further.
//! * What cannot be true - a log that is shorter than it was, an entry that is missing, damaged or of a newer version - stops the store.
//! * Who waits for a command is answered when it was applied, after the state that contains it is published.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use smg_messages::disk;
use smg_services::etcd as pb;
use smg_state::{CommandId, Outcome, State, codec};
use tokio::sync::{Notify, oneshot, watch};
use tokio::time::{Instant, sleep};
use tokio_util::sync::CancellationToken;

use super::client::Etcd;
use super::keys::{self, Keys};
use super::snapshot::{self, Loaded};
use super::watch::Watcher;
use crate::StoreError;
use crate::failure::Failure;
use crate::frame::unframe;
use crate::published::Published;

/// Entries that are read at once.
const PAGE: i64 = 32;
/// For reading all of it.
const READ: Duration = Duration::from_secs(30);
/// Before the log is read again after that failed.
const PAUSE: Duration = Duration::from_millis(200);

/// Those who wait for the outcomes of commands.
#[derive(Debug, Default)]
pub(crate) struct Waiters(Mutex<BTreeMap<CommandId, Vec<oneshot::Sender<Outcome>>>>);

impl Waiters {
    /// Waits for the next outcome of a command.
    pub fn wait(&self, id: CommandId) -> oneshot::Receiver<Outcome> {
        let (sender, receiver) = oneshot::channel();
        self.0.lock().entry(id).or_default().push(sender);
        receiver
    }

    /// Forgets whoever no longer waits for a command.
    pub fn forget(&self, id: CommandId) {
        let mut waiting = self.0.lock();
        if let Some(senders) = waiting.get_mut(&id) {
            senders.retain(|sender| !sender.is_closed());
            if senders.is_empty() {
                waiting.remove(&id);
            }
        }
    }

    fn ids(&self) -> Vec<CommandId> {
        self.0.lock().keys().copied().collect()
    }

    fn answer(&self, id: CommandId, outcome: &Outcome) {
        for sender in self.0.lock().remove(&id).unwrap_or_default() {
            let _ = sender.send(outcome.clone());
        }
    }
}

/// The state with its place in the log.
#[derive(Debug, Clone, Default)]
pub(crate) struct Applied {
    /// The last entry in it; 0 before the first was read.
    pub index: u64,
    pub state: Arc<State>,
}

/// What followers share with the rest of the store.
#[derive(Debug)]
pub(crate) struct Shared {
    pub keys: Keys,
    pub failure: Arc<Failure>,
    pub published: Published,
    pub applied: watch::Sender<Applied>,
    /// The newest snapshot that was read or written.
    pub snapshot_index: std::sync::atomic::AtomicU64,
    pub waiters: Waiters,
    /// Makes the follower read the log anew.
    pub read_again: Notify,
    /// When etcd was heard last by who follows the log.
    pub heard: Mutex<Option<Instant>>,
    pub stop: CancellationToken,
}

impl Shared {
    /// Waits until an entry is in the state.
    pub async fn until_applied(&self, index: u64, deadline: Instant) -> bool {
        /// etcd says at once what is new; where it does not, it is asked.
        const PATIENCE: Duration = Duration::from_millis(300);
        let mut applied = self.applied.subscribe();
        loop {
            let patience = (Instant::now() + PATIENCE).min(deadline);
            let waited = tokio::time::timeout_at(patience, applied.wait_for(|applied| applied.index >= index)).await;
            match waited {
                Ok(reached) => return reached.is_ok(),
                Err(_) if Instant::now() >= deadline => return false,
                Err(_) => self.read_again.notify_one(),
            }
        }
    }
}

/// Who follows.
pub(crate) struct Follower {
    etcd: Arc<Etcd>,
    shared: Arc<Shared>,
    state: State,
    index: u64,
}

/// Why a cycle ends.
enum End {
    /// The store failed, or stops.
    ForGood,
    /// Something that the next cycle may not meet again.
    Again(String),
}

impl From<StoreError> for End {
    fn from(error: StoreError) -> Self {
        match error {
            StoreError::Failed(_) | StoreError::Closed => Self::ForGood,
            other => Self::Again(other.to_string()),
        }
    }
}

impl Follower {
    pub fn new(etcd: Arc<Etcd>, shared: Arc<Shared>) -> Self {
        Self { etcd, shared, state: State::default(), index: 0 }
    }

    /// Follows the log until the store stops.
    pub async fn run(mut self) {
        let stop = self.shared.stop.clone();
        let mut complaint = None;
        loop {
            let end = tokio::select! {
                end = self.cycle() => end,
                () = stop.cancelled() => return,
            };
            let Err(End::Again(reason)) = end else { return };
            if complaint.as_ref() != Some(&reason) {
                tracing::info!(target: "smg", reason, "reading the log in etcd anew");
                complaint = Some(reason);
            }
            if self.shared.heard.lock().is_none_or(|heard| heard.elapsed() > PAUSE) {
                tokio::select! {
                    () = sleep(PAUSE) => {}
                    () = stop.cancelled() => return,
                }
            }
        }
    }

    async fn cycle(&mut self) -> Result<(), End> {
        let revision = self.read().await?;
        self.heard();
        let etcd = Arc::clone(&self.etcd);
        let opened = Watcher::open(&etcd, self.shared.keys.log(), revision + 1).await;
        let mut watcher = opened.map_err(End::Again)?;
        loop {
            let shared = Arc::clone(&self.shared);
            let events = tokio::select! {
                events = watcher.next() => events.map_err(End::Again)?,
                () = shared.read_again.notified() => return Err(End::Again("it may be behind".to_owned())),
            };
            self.heard();
            let entries = events.into_iter().filter(|event| event.r#type() == pb::event::EventType::Put);
            self.take(entries.filter_map(|event| event.kv))?;
        }
    }

    fn heard(&self) {
        *self.shared.heard.lock() = Some(Instant::now());
    }

    fn fail(&self, reason: String) -> End {
        self.shared.failure.fail(reason);
        End::ForGood
    }

    /// Reads what is there. Returns the revision at which all of it was.
    async fn read(&mut self) -> Result<i64, End> {
        let deadline = Instant::now() + READ;
        loop {
            let path = self.shared.keys.log();
            let page = keys::from(self.shared.keys.entry(self.index + 1), &path, PAGE);
            let txn = pb::TxnRequest {
                success: vec![keys::read(keys::one(self.shared.keys.head())), keys::read(page)],
                ..pb::TxnRequest::default()
            };
            let answer = self.etcd.txn(txn).await.map_err(|error| End::Again(error.message().to_owned()))?;
            let revision = answer.header.as_ref().map_or(0, |header| header.revision);
            let mut found = keys::reads(answer);
            let (head, page) = (found.next().unwrap_or_default(), found.next().unwrap_or_default());
            let head = match head.kvs.first() {
                None => 0,
                Some(head) => match unframe::<disk::EtcdHead>(&head.value) {
                    Ok(head) => head.index,
                    Err(error) => return Err(self.fail(format!("the log's head in etcd: {error}"))),
                },
            };
            if head < self.index {
                let reason = format!("the log in etcd ends with entry {head}, entry {} was in it before", self.index);
                return Err(self.fail(reason));
            }
            if head == self.index {
                return Ok(revision);
            }
            let follows = page.kvs.first().is_some_and(|first| first.key == self.shared.keys.entry(self.index + 1));
            if follows {
                let more = page.more;
                self.take(page.kvs.into_iter())?;
                if !more {
                    return Ok(revision);
                }
            } else {
                self.load(deadline).await?;
            }
        }
    }

    /// Goes on from the newest snapshot.
    async fn load(&mut self, deadline: Instant) -> Result<(), End> {
        match snapshot::load(&self.etcd, &self.shared.keys, deadline).await? {
            Loaded::State(index, state) if index > self.index => {
                let named = self.state.cluster_id();
                if self.index > 0 && state.cluster_id() != named {
                    return Err(self.fail(format!("the snapshot in etcd is of another cluster than {named}")));
                }
                (self.index, self.state) = (index, *state);
                self.shared.snapshot_index.fetch_max(index, std::sync::atomic::Ordering::Relaxed);
                // Commands that somebody waits for may be in it.
                let waiting = self.shared.waiters.ids();
                let outcome = |id: CommandId| self.state.outcome(id).map(|outcome| (id, outcome.clone()));
                self.publish(waiting.into_iter().filter_map(outcome).collect());
                Ok(())
            }
            Loaded::Replaced => Ok(()),
            Loaded::Damaged(reason) => Err(self.fail(reason)),
            Loaded::None | Loaded::State(..) => {
                Err(self.fail(format!("entry {} is missing from the log in etcd", self.index + 1)))
            }
        }
    }

    /// Applies entries that follow, and publishes the state.
    fn take(&mut self, entries: impl Iterator<Item = pb::KeyValue>) -> Result<(), End> {
        let mut outcomes = Vec::new();
        let mut gap = None;
        for entry in entries {
            let read = unframe::<disk::EtcdEntry>(&entry.value).map_err(|error| error.to_string());
            let read = read.and_then(|entry| match entry.envelope {
                Some(envelope) => Ok((entry.index, envelope)),
                None => Err("it holds no command".to_owned()),
            });
            let (index, envelope) = match read {
                Ok(read) => read,
                Err(error) => return Err(self.fail(format!("entry {} in etcd: {error}", keys::name(&entry.key)))),
            };
            if index <= self.index {
                continue;
            }
            if index != self.index + 1 {
                gap = Some(index);
                break;
            }
            let envelope = match codec::envelope_from_pb(envelope) {
                Ok(envelope) => envelope,
                Err(error) => return Err(self.fail(format!("entry {index} in etcd cannot be read: {error}"))),
            };
            // A panic may have left the state half changed: nothing of it is published.
            let applied = catch_unwind(AssertUnwindSafe(|| self.state.apply(&envelope)));
            match applied {
                Ok(outcome) => outcomes.push((envelope.command_id, outcome)),
                Err(_) => return Err(self.fail(format!("applying entry {index}, {envelope}, panicked"))),
            }
            self.index = index;
        }
        if !outcomes.is_empty() {
            self.publish(outcomes);
        }
        match gap {
            None => Ok(()),
            Some(index) => Err(End::Again(format!("entry {index} came after entry {}", self.index))),
        }
    }

    fn publish(&self, outcomes: Vec<(CommandId, Outcome)>) {
        let state = Arc::new(self.state.clone());
        self.shared.published.publish(Arc::clone(&state));
        for (id, outcome) in &outcomes {
            self.shared.waiters.answer(*id, outcome);
        }
        // Last: who sees that an entry was applied and has no outcome of a command concludes that it is not among the entries.
        self.shared.applied.send_replace(Applied { index: self.index, state });
    }
}
