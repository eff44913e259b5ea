//! The state machine as openraft sees it: the newest state in memory, published after every batch.
//!
//! Nothing is written when an entry is applied: the log has it. After a restart the state is the newest snapshot and the log after it.
//! Outcomes are handed out only after the state that contains them is published, so whoever has an outcome can read its effect.

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use futures::{Stream, TryStreamExt};
use openraft::storage::{EntryResponder, RaftSnapshotBuilder, RaftStateMachine, Snapshot};
use openraft::{EntryPayload, OptionalSend};
use smg_state::{Envelope, Outcome, State};

use super::mutant::{Mutant, planted};
use super::snapshot::{Snapshots, StateSnapshot};
use super::types::{Config, LogId, SnapshotMeta, StoredMembership};
use crate::failure::Failure;
use crate::published::Published;

/// Most entries between two publications, which bounds how long the first of a batch waits for its outcome.
const PUBLISH_EVERY: usize = 256;

/// The state with its place in the log.
#[derive(Debug)]
pub(crate) struct Machine {
    state: State,
    last_applied: Option<LogId>,
    membership: StoredMembership,
    published: Arc<Published>,
    snapshots: Arc<Snapshots>,
    failure: Arc<Failure>,
}

impl Machine {
    /// Continues from the newest snapshot.
    pub fn new(snapshots: Arc<Snapshots>, failure: Arc<Failure>) -> Self {
        let (meta, state) = snapshots
            .current()
            .map_or_else(|| (SnapshotMeta::default(), Arc::default()), |current| (current.meta, current.snapshot));
        Self {
            state: State::clone(&state),
            last_applied: meta.last_log_id,
            membership: meta.last_membership,
            published: Arc::new(Published::new(state)),
            snapshots,
            failure,
        }
    }

    /// Applies a command. A panic may have left the state half changed, so it stops the store before anything of it is published.
    fn apply_command(&mut self, id: LogId, envelope: &Envelope) -> io::Result<Outcome> {
        catch_unwind(AssertUnwindSafe(|| self.state.apply(envelope)))
            .map_err(|_| self.failure.fail(format!("applying entry {}, {envelope}, panicked", id.index())))
    }

    /// Where readers find the applied state.
    pub fn published(&self) -> Arc<Published> {
        Arc::clone(&self.published)
    }
}

impl<C: Config> RaftStateMachine<C> for Machine {
    type SnapshotData = Arc<State>;
    type SnapshotBuilder = Builder;

    async fn applied_state(&mut self) -> Result<(Option<LogId>, StoredMembership), io::Error> {
        Ok((self.last_applied, self.membership.clone()))
    }

    async fn apply<S>(&mut self, mut entries: S) -> Result<(), io::Error>
    where
        S: Stream<Item = Result<EntryResponder<C>, io::Error>> + Unpin + OptionalSend,
    {
        let mut waiting = Vec::new();
        let mut unpublished = 0;
        loop {
            let next = entries.try_next().await?;
            let done = next.is_none();
            if let Some((entry, responder)) = next {
                self.last_applied = Some(entry.log_id);
                let outcome = match entry.payload {
                    EntryPayload::Blank => None,
                    EntryPayload::Normal(envelope) => Some(self.apply_command(entry.log_id, &envelope)?),
                    EntryPayload::Membership(membership) => {
                        self.membership = StoredMembership::new(Some(entry.log_id), membership);
                        None
                    }
                };
                unpublished += 1;
                waiting.extend(responder.map(|responder| (responder, outcome)));
            }
            if unpublished > 0 && (done || unpublished >= PUBLISH_EVERY) {
                unpublished = 0;
                if !planted(Mutant::AnsweredUnpublished) {
                    self.published.publish(Arc::new(self.state.clone()));
                }
                for (responder, outcome) in waiting.drain(..) {
                    responder.send(outcome);
                }
            }
            if done {
                return Ok(());
            }
        }
    }

    async fn get_snapshot_builder(&mut self) -> Builder {
        let last_log_id = match self.last_applied {
            Some(last) if planted(Mutant::SnapshotOfTomorrow) => {
                Some(LogId::new(*last.committed_leader_id(), last.index() + 1))
            }
            last => last,
        };
        Builder {
            snapshot: Snapshot {
                meta: SnapshotMeta { last_log_id, last_membership: self.membership.clone() },
                snapshot: Arc::new(self.state.clone()),
            },
            snapshots: Arc::clone(&self.snapshots),
            failure: Arc::clone(&self.failure),
        }
    }

    async fn install_snapshot(&mut self, meta: &SnapshotMeta, state: Arc<State>) -> Result<(), io::Error> {
        let snapshot = Snapshot { meta: meta.clone(), snapshot: Arc::clone(&state) };
        save(&self.snapshots, &self.failure, snapshot).await?;
        if !planted(Mutant::SnapshotNotInstalled) {
            self.state = State::clone(&state);
        }
        self.last_applied = meta.last_log_id;
        self.membership = meta.last_membership.clone();
        self.published.publish(state);
        Ok(())
    }

    async fn get_current_snapshot(&mut self) -> Result<Option<StateSnapshot>, io::Error> {
        Ok(self.snapshots.current())
    }
}

/// The state as it was when the snapshot was asked for; applying goes on meanwhile.
#[derive(Debug)]
pub(crate) struct Builder {
    snapshot: StateSnapshot,
    snapshots: Arc<Snapshots>,
    failure: Arc<Failure>,
}

impl<C: Config> RaftSnapshotBuilder<C> for Builder {
    type SnapshotData = Arc<State>;

    async fn build_snapshot(&mut self) -> Result<StateSnapshot, io::Error> {
        save(&self.snapshots, &self.failure, self.snapshot.clone()).await?;
        Ok(self.snapshot.clone())
    }
}

async fn save(snapshots: &Arc<Snapshots>, failure: &Failure, snapshot: StateSnapshot) -> io::Result<()> {
    failure.check()?;
    let result = if cfg!(test) && tokio::runtime::Handle::try_current().is_err() {
        // A simulation has no threads.
        snapshots.save(snapshot)
    } else {
        let snapshots = Arc::clone(snapshots);
        let saved = tokio::task::spawn_blocking(move || snapshots.save(snapshot)).await;
        saved.unwrap_or_else(|error| Err(io::Error::other(error)))
    };
    result.map_err(|error| failure.fail(format!("writing a snapshot failed: {error}")))
}
