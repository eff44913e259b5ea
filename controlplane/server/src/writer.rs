//! The one way to change the state: a command with its identity, its author and its conditions.
//!
//! A store may answer that the outcome is unknown. Retrying with the same command id is then safe, so this is done here once for all, within
//! a deadline.

use std::sync::Arc;
use std::time::Duration;

use smg_fleet::Revision;
use smg_state::{Command, CommandId, Envelope, Outcome, Rejection};
use smg_store::{ClusterStore, StoreError};
use smg_telemetry::Metrics;
use thiserror::Error;
use tokio::time::{Instant, sleep, timeout_at};
use uuid::Uuid;

/// How long one write or one barrier may take.
const DEADLINE: Duration = Duration::from_secs(5);
/// Pause before the outcome of a command is asked for again.
const RETRY_PAUSE: Duration = Duration::from_millis(100);

/// Why a write did not happen, or may not have.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum WriteError {
    /// The store did not answer.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The state refused the command.
    #[error("{0}")]
    Rejected(Rejection),
}

/// A command and what surrounds it.
#[derive(Debug, Clone)]
pub struct Write {
    /// Identity for retries; minted when absent.
    pub command_id: Option<CommandId>,
    /// Who asks.
    pub actor: String,
    /// The object's `mod_revision` that the author saw.
    pub expected_revision: Option<Revision>,
    /// The change.
    pub command: Command,
}

impl Write {
    /// An unconditional write of a part of this process.
    pub fn of(actor: &str, command: Command) -> Self {
        Self { command_id: None, actor: actor.to_owned(), expected_revision: None, command }
    }

    /// The command as it is proposed, now.
    pub(crate) fn envelope(self) -> Envelope {
        Envelope {
            command_id: self.command_id.unwrap_or_else(Uuid::now_v7),
            actor: self.actor,
            proposed_at_unix_ms: smg_net::unix_millis(),
            expected_revision: self.expected_revision,
            command: self.command,
        }
    }
}

/// A handle on the store for those who change the state. Cheap to clone.
#[derive(Clone)]
pub struct Writer {
    store: Arc<dyn ClusterStore>,
    metrics: Arc<Metrics>,
}

impl Writer {
    /// A writer to `store`.
    pub fn new(store: Arc<dyn ClusterStore>, metrics: Arc<Metrics>) -> Self {
        Self { store, metrics }
    }

    /// The store, for reads.
    pub fn store(&self) -> &Arc<dyn ClusterStore> {
        &self.store
    }

    /// Makes a change durable.
    ///
    /// # Errors
    /// [`WriteError::Rejected`] when the state refused it, [`WriteError::Store`] when the store did not answer within five seconds.
    pub async fn write(&self, write: Write) -> Result<Outcome, WriteError> {
        let began = Instant::now();
        let outcome = self.propose(write.envelope(), began + DEADLINE).await;
        if outcome.is_ok() {
            self.metrics.store_write_duration.observe(began.elapsed().as_secs_f64());
        }
        let outcome =
            outcome.map_err(WriteError::Store).and_then(|outcome| outcome.accepted().map_err(WriteError::Rejected));
        let became = match &outcome {
            Ok(_) => "happened",
            Err(WriteError::Rejected(_)) => "rejected",
            Err(WriteError::Store(StoreError::Unknown(_))) => "unknown",
            Err(WriteError::Store(_)) => "did_not_happen",
        };
        self.metrics.store_writes.with_label_values(&[became]).inc();
        outcome
    }

    /// Waits until the local state holds every write that was acknowledged before the call.
    ///
    /// # Errors
    /// When the store cannot say so within five seconds.
    pub async fn barrier(&self) -> Result<Revision, StoreError> {
        match timeout_at(Instant::now() + DEADLINE, self.store.read_barrier()).await {
            Ok(answer) => answer,
            Err(_) => Err(StoreError::Unavailable("the store did not confirm a read in time".to_owned())),
        }
    }

    async fn propose(&self, envelope: Envelope, deadline: Instant) -> Result<Outcome, StoreError> {
        // Once an attempt may have happened, "it did not" is no answer any more, whatever later ones come to.
        let mut unknown = None;
        loop {
            let attempt = timeout_at(deadline, self.store.propose(envelope.clone())).await;
            match attempt.unwrap_or_else(|_| Err(StoreError::Unknown("the store did not answer in time".to_owned()))) {
                Err(StoreError::Unknown(why)) if Instant::now() + RETRY_PAUSE < deadline => {
                    unknown = Some(why);
                    sleep(RETRY_PAUSE).await;
                }
                Err(error) => return Err(unknown.map_or(error, StoreError::Unknown)),
                Ok(outcome) => return Ok(outcome),
            }
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::testing::TestStore;
    use smg_store::Leadership;

    #[tokio::test]
    async fn what_may_have_happened_is_never_said_not_to_have() {
        let store = TestStore::new(Leadership::Leader);
        let writer = Writer::new(store.clone(), Arc::new(Metrics::default()));
        let write = || Write::of("test", Command::PutPolicy { model: "m".to_owned(), document: Box::default() });
        let lost = || StoreError::Unknown("the leader is lost".to_owned());
        let later = [
            StoreError::Unavailable("no leader".to_owned()),
            StoreError::Closed,
            StoreError::Failed("disk".to_owned()),
        ];
        for error in later {
            store.fail(vec![error.clone(), lost()]);
            assert_eq!(writer.write(write()).await, Err(WriteError::Store(lost())), "then {error}");
            store.fail(vec![error.clone()]);
            assert_eq!(writer.write(write()).await, Err(WriteError::Store(error)));
        }
        store.fail(vec![lost()]);
        assert!(writer.write(write()).await.is_ok(), "asked again, it is known");
    }
}
