//! Writes and reads, on any member.
//!
//! A command is put into the queue, the writer moves it to the log, and this member answers when it has applied it. What is known:
//! * *happened*: it was applied;
//! * *did not happen*: it never reached etcd, or it was taken out of the queue again;
//! * *unknown*: everything else.

use std::time::Duration;

use prost::Message;
use smg_fleet::Revision;
use smg_messages::disk;
use smg_state::{Envelope, Outcome, codec};
use tokio::sync::oneshot;
use tokio::time::{Instant, sleep, timeout_at};
use uuid::Uuid;

use super::EtcdStore;
use super::keys;
use crate::StoreError;
use crate::call::CallError;
use crate::frame::{frame, unframe};

/// How long a command may wait for its outcome, and a read for its confirmation.
const DEADLINE: Duration = Duration::from_millis(3_500);
/// For finding out what became of a command afterwards. Callers wait longer than both, so that they learn what is known.
const AFTERWARDS: Duration = Duration::from_millis(1_000);
/// Before another attempt.
const PAUSE: Duration = Duration::from_millis(50);
/// Largest command, in bytes of its message. A request to etcd may have 1.5 MiB unless it is told otherwise.
const MAX_COMMAND: usize = 1 << 20;

/// Whether a command is in etcd.
enum Put {
    Confirmed,
    Perhaps(String),
}

impl EtcdStore {
    /// Refuses what has not begun once the store failed or stops.
    pub(crate) fn check(&self) -> Result<(), StoreError> {
        match self.shared.failure.reason() {
            Some(reason) => Err(StoreError::Failed(reason)),
            None if self.shared.stop.is_cancelled() => Err(StoreError::Closed),
            None => Ok(()),
        }
    }

    pub(crate) async fn propose_here(&self, envelope: Envelope) -> Result<Outcome, StoreError> {
        self.check()?;
        let message = codec::envelope_to_pb(&envelope);
        if message.encoded_len() > MAX_COMMAND {
            return Err(StoreError::TooLarge(MAX_COMMAND));
        }
        let Ok(_permit) = self.in_flight.try_acquire() else {
            return Err(StoreError::Unavailable("too many writes in flight".to_owned()));
        };
        let id = envelope.command_id;
        let waiter = self.shared.waiters.wait(id);
        let outcome = self.carry(waiter, &frame(&message)).await;
        self.shared.waiters.forget(id);
        outcome.map_err(|error| match error {
            StoreError::Unknown(why) => StoreError::Unknown(format!("command {id}: {why}")),
            other => other,
        })
    }

    async fn carry(&self, mut waiter: oneshot::Receiver<Outcome>, command: &[u8]) -> Result<Outcome, StoreError> {
        let deadline = Instant::now() + DEADLINE;
        let key = self.shared.keys.waiting(Uuid::new_v4());
        let put = self.enqueue(&key, command, deadline).await?;
        let stop = self.shared.stop.clone();
        let mut failure = self.shared.failure.subscribe();
        let why = tokio::select! {
            outcome = timeout_at(deadline, &mut waiter) => match outcome {
                Ok(Ok(outcome)) => return Ok(outcome),
                _ => "no writer took it in time",
            },
            () = stop.cancelled() => "the store is shutting down",
            _ = failure.wait_for(Option::is_some) => "the store has stopped",
        };
        let afterwards = Instant::now() + AFTERWARDS;
        let taken_back = timeout_at(afterwards, self.etcd.delete(key, Vec::new())).await;
        match (taken_back, put) {
            (Ok(Ok(1..)), _) => Err(StoreError::Unavailable(why.to_owned())),
            // It left the queue: into the log, or with the lease of this member.
            (Ok(Ok(_)), Put::Confirmed) => {
                let read = self.barrier_until(afterwards).await;
                match (waiter.try_recv(), read) {
                    (Ok(outcome), _) => Ok(outcome),
                    (Err(_), Ok(_)) => Err(StoreError::Unavailable("this member has lost its lease".to_owned())),
                    (Err(_), Err(error)) => Err(StoreError::Unknown(error.to_string())),
                }
            }
            (Ok(Ok(_)), Put::Perhaps(reason)) => waiter.try_recv().map_err(|_| StoreError::Unknown(reason)),
            (Ok(Err(error)), _) => waiter.try_recv().map_err(|_| StoreError::Unknown(error.message().to_owned())),
            (Err(_), _) => waiter.try_recv().map_err(|_| StoreError::Unknown("etcd does not answer".to_owned())),
        }
    }

    /// Puts a command into the queue.
    async fn enqueue(&self, key: &[u8], command: &[u8], deadline: Instant) -> Result<Put, StoreError> {
        let mut last = "this member has no lease of etcd".to_owned();
        while Instant::now() < deadline {
            self.check()?;
            if let Some(lease) = self.keeper.now() {
                match timeout_at(deadline, self.etcd.put(key.to_vec(), command.to_vec(), lease)).await {
                    Ok(Ok(_)) => return Ok(Put::Confirmed),
                    Ok(Err(CallError::Lost(reason))) => return Ok(Put::Perhaps(reason)),
                    Ok(Err(CallError::NotSent(reason) | CallError::Refused(reason))) => last = reason,
                    Err(_) => return Ok(Put::Perhaps("etcd does not answer".to_owned())),
                }
            }
            sleep(PAUSE).await;
        }
        self.check()?;
        Err(StoreError::Unavailable(last))
    }

    pub(crate) async fn barrier(&self) -> Result<Revision, StoreError> {
        self.check()?;
        self.barrier_until(Instant::now() + DEADLINE).await
    }

    async fn barrier_until(&self, deadline: Instant) -> Result<Revision, StoreError> {
        let applied = self.shared.applied.borrow().index;
        let found = self.etcd.range(keys::one(self.shared.keys.head()), deadline).await?;
        let head =
            found.kvs.first().map_or(Ok(0), |head| unframe::<disk::EtcdHead>(&head.value).map(|head| head.index));
        let failed = |reason: String| {
            self.shared.failure.fail(&reason);
            Err(StoreError::Failed(reason))
        };
        let head = match head {
            Ok(head) if head < applied => {
                return failed(format!("the log in etcd ends with entry {head}, entry {applied} was in it before"));
            }
            Ok(head) => head,
            Err(error) => return failed(format!("the log's head in etcd: {error}")),
        };
        if self.shared.until_applied(head, deadline).await {
            return Ok(self.shared.published.state.load().revision());
        }
        self.check()?;
        Err(StoreError::Unavailable("this member is behind".to_owned()))
    }
}
