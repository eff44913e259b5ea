//! Writes and reads on any member: done here by the leader, asked of the leader by the others.
//!
//! A command may be tried more than once within its deadline, always under its id, so it is applied at most once. The three outcomes stay
//! apart: it *happened* when there is an outcome; it *did not happen* when no attempt can have reached a log; everything else is *unknown*,
//! and asking again with the same id finds out.

use std::sync::Arc;
use std::time::Duration;

use openraft::ReadPolicy;
use openraft::errors::{ClientWriteError, LinearizableReadError, RaftError};
use prost::Message;
use smg_fleet::Revision;
use smg_services::raft as pb;
use smg_state::{Envelope, NodeId, Outcome, codec};
use tokio::time::{Instant, sleep, timeout, timeout_at};

use super::RaftStore;
use super::links::Link;
use crate::StoreError;
use crate::call::CallError;

/// How long a write or a barrier may take. Shorter than callers wait, so that they learn what is known.
pub(crate) const DEADLINE: Duration = Duration::from_millis(4_500);
/// How long the leader is given for its part.
const LEADER_DEADLINE: Duration = Duration::from_secs(4);
/// Before the leader is looked for again.
const PAUSE: Duration = Duration::from_millis(25);
/// Least time for another attempt after one whose outcome is unknown.
const WORTHWHILE: Duration = Duration::from_secs(1);
/// Largest command, in bytes of its message.
const MAX_COMMAND: usize = 16 << 20;

/// What became of a command on this member.
#[derive(Debug)]
pub(crate) enum Local {
    Done(Outcome),
    /// It did not happen; who leads, if that is known.
    NotLeader(Option<NodeId>),
    Unknown(String),
    /// It did not happen, and would not at once.
    Refused(StoreError),
}

/// What this member knows about reads.
#[derive(Debug)]
pub(crate) enum LocalRead {
    /// Whoever applied this entry has everything that was acknowledged before.
    Index(u64),
    NotLeader(Option<NodeId>),
    Refused(StoreError),
}

impl RaftStore {
    /// Makes a command durable if this member leads.
    pub(crate) async fn propose_here(&self, envelope: Envelope) -> Local {
        if let Err(error) = self.check() {
            return Local::Refused(error);
        }
        let Ok(permit) = Arc::clone(&self.in_flight).try_acquire_owned() else {
            return Local::Refused(StoreError::Unavailable("too many writes in flight".into()));
        };
        let raft = self.raft.clone();
        // A task of its own: the write stays counted until it is over, whatever becomes of its caller.
        let write = tokio::spawn(async move {
            let result = raft.client_write(envelope).await;
            drop(permit);
            result
        });
        match timeout(LEADER_DEADLINE, write).await {
            Err(_) => Local::Unknown(format!("not confirmed within {} s", LEADER_DEADLINE.as_secs())),
            Ok(Err(join)) => Local::Unknown(join.to_string()),
            Ok(Ok(Ok(response))) => match response.data {
                Some(outcome) => Local::Done(outcome),
                None => Local::Unknown("it was applied without an outcome".into()),
            },
            Ok(Ok(Err(RaftError::APIError(ClientWriteError::ForwardToLeader(forward))))) => {
                Local::NotLeader(forward.leader_id)
            }
            Ok(Ok(Err(other))) => Local::Unknown(other.to_string()),
        }
    }

    /// The index that a read must wait for, if this member leads.
    pub(crate) async fn read_index_here(&self) -> LocalRead {
        if let Err(error) = self.check() {
            return LocalRead::Refused(error);
        }
        let reader = self.raft.get_read_linearizer(ReadPolicy::ReadIndex);
        match timeout(LEADER_DEADLINE, reader).await {
            Err(_) => {
                LocalRead::Refused(StoreError::Unavailable(format!("no quorum within {} s", LEADER_DEADLINE.as_secs())))
            }
            Ok(Ok(reader)) => LocalRead::Index(reader.read_log_id().index()),
            Ok(Err(RaftError::APIError(LinearizableReadError::ForwardToLeader(forward)))) => {
                LocalRead::NotLeader(forward.leader_id)
            }
            Ok(Err(RaftError::APIError(error))) => LocalRead::Refused(StoreError::Unavailable(error.to_string())),
            Ok(Err(RaftError::Fatal(fatal))) => {
                LocalRead::Refused(self.check().err().unwrap_or_else(|| StoreError::Unavailable(fatal.to_string())))
            }
        }
    }

    pub(crate) async fn propose_anywhere(&self, envelope: Envelope) -> Result<Outcome, StoreError> {
        self.check()?;
        let deadline = Instant::now() + DEADLINE;
        let id = envelope.command_id;
        let message = codec::envelope_to_pb(&envelope);
        if message.encoded_len() > MAX_COMMAND {
            return Err(StoreError::TooLarge(MAX_COMMAND));
        }
        // What the last attempt that may have reached a log came to.
        let mut unknown: Option<String> = None;
        let mut last = "no leader is known".to_owned();
        // After an attempt of which nothing is known, a short rest of the time tells nothing new.
        while Instant::now() + if unknown.is_some() { WORTHWHILE } else { Duration::ZERO } < deadline {
            let leader = self.leader();
            let attempt = match leader {
                Some(leader) if leader == self.identity().node_id => {
                    timeout_at(deadline, self.propose_here(envelope.clone())).await
                }
                Some(leader) => timeout_at(deadline, self.propose_to(leader, message.clone())).await,
                None => Ok(Local::NotLeader(None)),
            };
            match attempt {
                Ok(Local::Done(outcome)) => return Ok(outcome),
                Ok(Local::NotLeader(_)) => {}
                Ok(Local::Unknown(why)) => unknown = Some(why),
                Ok(Local::Refused(StoreError::Unavailable(why))) if leader != Some(self.identity().node_id) => {
                    last = why
                }
                Ok(Local::Refused(error)) => match unknown {
                    None => return Err(error),
                    Some(why) => return Err(StoreError::Unknown(format!("command {id}: {why}"))),
                },
                Err(_) => unknown = Some(format!("not confirmed within {} ms", DEADLINE.as_millis())),
            }
            self.check().map_err(|error| match &unknown {
                None => error,
                Some(why) => StoreError::Unknown(format!("command {id}: {why}")),
            })?;
            sleep(PAUSE).await;
        }
        match unknown {
            None => Err(StoreError::Unavailable(last)),
            Some(why) => Err(StoreError::Unknown(format!("command {id}: {why}"))),
        }
    }

    /// The connections to a member, wherever it was last known to be.
    pub(crate) fn link_to(&self, member: NodeId) -> Result<Arc<Link>, String> {
        let stored = self.membership();
        if let Some(peer) = stored.membership().get_node(&member) {
            return self.links.to(member, &peer.address, peer.storage_id);
        }
        match self.published.state.load().member(member) {
            Some(known) => self.links.to(member, &known.peer_address, known.storage_id),
            None => Err(format!("the address of member {member} is not known")),
        }
    }

    async fn propose_to(&self, leader: NodeId, envelope: smg_messages::state::Envelope) -> Local {
        let refused = |why: String| Local::Refused(StoreError::Unavailable(why));
        let link = match self.link_to(leader) {
            Ok(link) => link,
            Err(why) => return refused(why),
        };
        let request = link.request(pb::ProposeRequest { envelope: Some(envelope) });
        let answer = match link.answer(DEADLINE, link.client().propose(request)).await {
            Ok(answer) => answer,
            Err(CallError::Lost(why)) => return Local::Unknown(format!("member {leader}: {why}")),
            Err(error) => return refused(format!("member {leader}: {}", error.message())),
        };
        use pb::propose_response::Result as Pb;
        match answer.result {
            Some(Pb::Outcome(outcome)) => match codec::outcome_from_pb(outcome) {
                Ok(outcome) => Local::Done(outcome),
                Err(error) => Local::Unknown(format!("its outcome cannot be read: {error}")),
            },
            Some(Pb::NotLeader(hint)) => Local::NotLeader(Some(hint.leader).filter(|leader| *leader != 0)),
            Some(Pb::Unavailable(why)) => refused(why),
            Some(Pb::Unknown(why)) => Local::Unknown(why),
            None => Local::Unknown("the leader's answer is not complete".into()),
        }
    }

    pub(crate) async fn read_barrier_anywhere(&self) -> Result<Revision, StoreError> {
        self.check()?;
        let deadline = Instant::now() + DEADLINE;
        let mut last = "no leader is known".to_owned();
        while Instant::now() < deadline {
            let leader = self.leader();
            let attempt = match leader {
                Some(leader) if leader == self.identity().node_id => timeout_at(deadline, self.read_index_here()).await,
                Some(leader) => timeout_at(deadline, self.read_index_of(leader)).await,
                None => Ok(LocalRead::NotLeader(None)),
            };
            match attempt {
                Ok(LocalRead::Index(index)) => return self.applied(index, deadline).await,
                Ok(LocalRead::NotLeader(_)) => {}
                Ok(LocalRead::Refused(StoreError::Unavailable(why))) => last = why,
                Ok(LocalRead::Refused(error)) => return Err(error),
                Err(_) => last = "the leader did not confirm a read in time".into(),
            }
            self.check()?;
            sleep(PAUSE).await;
        }
        Err(StoreError::Unavailable(last))
    }

    async fn read_index_of(&self, leader: NodeId) -> LocalRead {
        let refused = |why: String| LocalRead::Refused(StoreError::Unavailable(why));
        let link = match self.link_to(leader) {
            Ok(link) => link,
            Err(why) => return refused(why),
        };
        let request = link.request(pb::ReadIndexRequest {});
        let answer = match link.answer(LEADER_DEADLINE, link.client().read_index(request)).await {
            Ok(answer) => answer,
            Err(error) => return refused(format!("member {leader}: {}", error.message())),
        };
        use pb::read_index_response::Result as Pb;
        match answer.result {
            Some(Pb::Index(index)) => LocalRead::Index(index),
            Some(Pb::NotLeader(hint)) => LocalRead::NotLeader(Some(hint.leader).filter(|leader| *leader != 0)),
            Some(Pb::Unavailable(why)) => refused(why),
            None => refused("the leader's answer is not complete".into()),
        }
    }

    /// Waits until this member has applied an entry.
    async fn applied(&self, index: u64, deadline: Instant) -> Result<Revision, StoreError> {
        let left = deadline.saturating_duration_since(Instant::now());
        let waited = self.raft.wait(Some(left)).applied_index_at_least(Some(index), "a linearizable read").await;
        match waited {
            Ok(_) => Ok(self.published.state.load().revision()),
            Err(error) => {
                self.check()?;
                Err(StoreError::Unavailable(format!("this member is behind: {error}")))
            }
        }
    }
}
