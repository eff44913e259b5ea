//! Writes and reads on any member: done here by the leader, asked of the leader by the others.
//!
//! A command may be tried more than once within its deadline, always under its id, so it is applied at most once. The three outcomes stay
//! apart: it *happened* when there is an outcome; it *did not happen* when no attempt can have reached a log; everything else is *unknown*,
//! and asking again with the same id finds out.

use std::sync::Arc;
use std::time::Duration;

use openraft::errors::{ClientWriteError, LinearizableReadError, RaftError};
use openraft::raft::ClientWriteResponse;
use openraft::storage::RaftStateMachine;
use openraft::{Raft, ReadPolicy};
use prost::Message;
use smg_fleet::Revision;
use smg_services::raft as pb;
use smg_state::{CommandId, Envelope, NodeId, Outcome, codec};
use tokio::time::{Instant, sleep, timeout, timeout_at};

use super::RaftStore;
use super::links::Link;
use super::mutant::{Mutant, planted};
use super::types::Config;
use crate::StoreError;
use crate::call::CallError;

/// How long a write or a barrier may take. Shorter than callers wait, so that they learn what is known.
pub(crate) const DEADLINE: Duration = Duration::from_millis(4_500);
/// How long the leader is given for its part.
pub(crate) const LEADER_DEADLINE: Duration = Duration::from_secs(4);
/// Before the leader is looked for again.
pub(crate) const PAUSE: Duration = Duration::from_millis(25);
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

impl Local {
    /// What became of a write that openraft was given.
    pub fn of<C: Config>(result: Result<ClientWriteResponse<C>, RaftError<C, ClientWriteError<C>>>) -> Self {
        match result {
            Ok(response) => match response.data {
                Some(outcome) => Self::Done(outcome),
                None => Self::Unknown("it was applied without an outcome".into()),
            },
            Err(RaftError::APIError(ClientWriteError::ForwardToLeader(forward))) => Self::NotLeader(forward.leader_id),
            Err(other) => Self::Unknown(other.to_string()),
        }
    }

    /// What became of one that took longer than anybody waits.
    pub fn unconfirmed() -> Self {
        let reason = format!("not confirmed within {} s", LEADER_DEADLINE.as_secs());
        if planted(Mutant::UnknownMeansNo) {
            return Self::Refused(StoreError::Unavailable(reason));
        }
        Self::Unknown(reason)
    }
}

impl LocalRead {
    /// Asks openraft, which asks a quorum whether this member still leads.
    pub async fn ask<C: Config, SM: RaftStateMachine<C>>(raft: &Raft<C, SM>) -> Self {
        match raft.get_read_linearizer(ReadPolicy::ReadIndex).await {
            Ok(reader) => Self::Index(reader.read_log_id().index()),
            Err(RaftError::APIError(LinearizableReadError::ForwardToLeader(forward))) => {
                Self::NotLeader(forward.leader_id)
            }
            Err(error) => Self::Refused(StoreError::Unavailable(error.to_string())),
        }
    }
}

/// The attempts to have one command done, and what they leave to be said.
///
/// Once an attempt may have reached a log, "it did not happen" is no answer any more, whatever later attempts come to.
#[derive(Debug)]
pub(crate) struct Attempts {
    id: CommandId,
    /// What the last attempt that may have reached a log came to.
    unknown: Option<String>,
    last: String,
}

impl Attempts {
    pub fn new(id: CommandId) -> Self {
        Self { id, unknown: None, last: "no leader is known".to_owned() }
    }

    /// How much time another attempt is worth having: after one of which nothing is known, a short rest of the time tells nothing new.
    pub fn worthwhile(&self) -> Duration {
        if self.unknown.is_some() { WORTHWHILE } else { Duration::ZERO }
    }

    /// Takes what an attempt came to, on this member or on another one. Returns the answer, if there is one.
    pub fn take(&mut self, attempt: Local, here: bool) -> Option<Result<Outcome, StoreError>> {
        match attempt {
            Local::Done(outcome) => return Some(Ok(outcome)),
            Local::NotLeader(_) => {}
            Local::Unknown(why) => self.unknown = Some(why),
            Local::Refused(StoreError::Unavailable(why)) if !here => self.last = why,
            Local::Refused(error) => return Some(Err(self.or_unknown(error))),
        }
        None
    }

    /// This error, unless an attempt may have reached a log.
    pub fn or_unknown(&self, error: StoreError) -> StoreError {
        match &self.unknown {
            None => error,
            Some(why) => StoreError::Unknown(format!("command {}: {why}", self.id)),
        }
    }

    /// What is to be said when there is no more time.
    pub fn end(self) -> StoreError {
        self.or_unknown(StoreError::Unavailable(self.last.clone()))
    }
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
            Err(_) => Local::unconfirmed(),
            Ok(Err(join)) => Local::Unknown(join.to_string()),
            Ok(Ok(result)) => Local::of(result),
        }
    }

    /// The index that a read must wait for, if this member leads.
    pub(crate) async fn read_index_here(&self) -> LocalRead {
        if let Err(error) = self.check() {
            return LocalRead::Refused(error);
        }
        match timeout(LEADER_DEADLINE, LocalRead::ask(&self.raft)).await {
            Err(_) => {
                LocalRead::Refused(StoreError::Unavailable(format!("no quorum within {} s", LEADER_DEADLINE.as_secs())))
            }
            Ok(read @ LocalRead::Refused(_)) => self.check().err().map_or(read, LocalRead::Refused),
            Ok(read) => read,
        }
    }

    pub(crate) async fn propose_anywhere(&self, envelope: Envelope) -> Result<Outcome, StoreError> {
        self.check()?;
        let deadline = Instant::now() + DEADLINE;
        let mut attempts = Attempts::new(envelope.command_id);
        let message = codec::envelope_to_pb(&envelope);
        if message.encoded_len() > MAX_COMMAND {
            return Err(StoreError::TooLarge(MAX_COMMAND));
        }
        while Instant::now() + attempts.worthwhile() < deadline {
            let leader = self.leader();
            let here = leader == Some(self.identity().node_id);
            let attempt = match leader {
                Some(_) if here => timeout_at(deadline, self.propose_here(envelope.clone())).await,
                Some(leader) => timeout_at(deadline, self.propose_to(leader, message.clone())).await,
                None => Ok(Local::NotLeader(None)),
            };
            let attempt =
                attempt.unwrap_or_else(|_| Local::Unknown(format!("not confirmed within {} ms", DEADLINE.as_millis())));
            if let Some(answer) = attempts.take(attempt, here) {
                return answer;
            }
            self.check().map_err(|error| attempts.or_unknown(error))?;
            sleep(PAUSE).await;
        }
        Err(attempts.end())
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
