//! The operations of the admin API, whatever carries them: REST ([`super`]) reads a request, calls one method
//! of [`Service`], and writes its answer.
//!
//! * A [`Call`] says who asks, under which identity and condition, and whether it is only a rehearsal. A rehearsal (dry run) applies the
//!   command to a copy of the state: what it refuses, the real one refuses, and what it answers the real one would, unless something else
//!   changes first. Nothing of it is kept.
//! * What was changed is in the state's own record ([`smg_state::audit`]) and, line by line, in the log target `smg::audit`.
//! * Reads are linearizable unless they ask for less.

use std::sync::Arc;
use std::time::Duration;

use smg_fleet::Revision;
use smg_state::{AuditRecord, Command, CommandId, Outcome, State};
use tokio::sync::Semaphore;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

pub(crate) use documents::shown as shown_model;

use super::access::AccessOptions;
use super::error::ApiError;
use crate::sync::everywhere::AllGateways;
use crate::sync::feed::Feed;
use crate::writer::{Write, Writer};

pub(crate) mod backup;
pub(crate) mod cluster;
mod documents;
pub(crate) mod tokens;
pub(crate) mod watch;
pub(crate) mod workers;

/// How long a write waits until this member has applied it, so that the answer shows what was written.
const SETTLE: Duration = Duration::from_secs(2);
/// Most watches of this process at a time.
pub(super) const MAX_WATCHES: usize = 256;
/// Most backups of this process at a time. Each is a copy of the state in memory.
const MAX_BACKUPS: usize = 2;

/// What a read promises.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Consistency {
    /// Everything acknowledged before the read is in it.
    Linearizable,
    /// Whatever this node has applied.
    Stale,
}

/// Who asks for a change, and how.
#[derive(Debug, Clone)]
pub(crate) struct Call {
    /// The author.
    pub actor: String,
    /// Identity for retries; minted when absent.
    pub command_id: Option<CommandId>,
    /// The object's `mod_revision` that the author saw.
    pub expected_revision: Option<Revision>,
    /// Whether it is a rehearsal.
    pub dry_run: bool,
}

/// A change that was made, or rehearsed.
#[derive(Debug, Clone)]
pub(crate) struct Change {
    /// What came of it.
    pub outcome: Outcome,
    /// The state that holds it: of a rehearsal the state as it would be.
    pub state: Arc<State>,
    /// Whether `state` holds it already: a member that follows may be late.
    pub settled: bool,
    /// Whether nothing was changed.
    pub dry_run: bool,
}

/// The operations. Cheap to clone.
#[derive(Clone)]
pub(crate) struct Service {
    pub(in crate::admin) writer: Writer,
    pub(in crate::admin) gateways: Arc<AllGateways>,
    pub(in crate::admin) access: Arc<AccessOptions>,
    feed: Arc<Feed>,
    watches: Arc<Semaphore>,
    backups: Arc<Semaphore>,
    shutdown: CancellationToken,
}

impl Service {
    pub(crate) fn new(
        writer: Writer,
        gateways: Arc<AllGateways>,
        feed: Arc<Feed>,
        access: Arc<AccessOptions>,
        shutdown: CancellationToken,
    ) -> Self {
        let (watches, backups) = (Arc::new(Semaphore::new(MAX_WATCHES)), Arc::new(Semaphore::new(MAX_BACKUPS)));
        Self { writer, gateways, access, feed, watches, backups, shutdown }
    }

    /// The state as this member has it.
    pub(crate) fn local(&self) -> Arc<State> {
        self.writer.store().local()
    }

    /// The applied state: after a barrier, or as it is when the caller accepts that.
    pub(crate) async fn read(&self, consistency: Consistency) -> Result<Arc<State>, ApiError> {
        if consistency == Consistency::Linearizable {
            self.writer.barrier().await?;
        }
        Ok(self.local())
    }

    /// Makes a change, or rehearses it.
    pub(crate) async fn change(&self, call: Call, command: Command) -> Result<Change, ApiError> {
        let Call { actor, command_id, expected_revision, dry_run } = call;
        let command_id = command_id.unwrap_or_else(Uuid::now_v7);
        let write = Write { command_id: Some(command_id), actor, expected_revision, command };
        if dry_run {
            let mut state = State::clone(&*self.read(Consistency::Linearizable).await?);
            let outcome = state.apply(&write.envelope()).accepted().map_err(ApiError::Rejected)?;
            return Ok(Change { outcome, state: Arc::new(state), settled: true, dry_run });
        }
        let outcome = self.writer.write(write).await?;
        let settled = self.settle(outcome.revision).await;
        let state = self.local();
        self.log(&state, command_id, &outcome);
        Ok(Change { outcome, state, settled, dry_run })
    }

    /// Waits until this member has applied `revision`.
    async fn settle(&self, revision: Revision) -> bool {
        let mut applied = self.writer.store().changes();
        matches!(timeout(SETTLE, applied.wait_for(|applied| *applied >= revision)).await, Ok(Ok(_)))
    }

    /// Writes the record of a change to the log. A repeated command is not logged again by this member.
    fn log(&self, state: &State, command_id: CommandId, outcome: &Outcome) {
        if !self.access.audit {
            return;
        }
        let fresh = |record: &&Arc<AuditRecord>| record.revision >= outcome.revision;
        let mut newest = state.audit().rev().take_while(fresh);
        let Some(record) = newest.find(|record| record.command_id == command_id) else { return };
        let AuditRecord { revision, actor, action, object, .. } = &**record;
        let changes: Vec<&str> = record.changes.iter().map(|change| change.field.as_str()).collect();
        tracing::info!(target: "smg::audit", actor, action, object, revision, %command_id, ?changes, "the fleet was changed");
    }

    /// What operators changed, newest first, of those that `wanted` keeps; at most `limit`.
    pub(crate) async fn audit(
        &self,
        consistency: Consistency,
        limit: usize,
        wanted: impl Fn(&AuditRecord) -> bool,
    ) -> Result<(Revision, Vec<Arc<AuditRecord>>), ApiError> {
        let state = self.read(consistency).await?;
        let records = state.audit().rev().filter(|record| wanted(record)).take(limit).cloned().collect();
        Ok((state.revision(), records))
    }
}
