//! What openraft says to another member, as the messages on the wire and back.
//!
//! Pure, and the same whatever carries the messages.

use openraft::raft::{AppendEntriesRequest, AppendEntriesResponse, VoteRequest, VoteResponse};
use prost::Message;
use smg_messages::disk;
use smg_services::raft as pb;
use thiserror::Error;

use super::convert;
use super::mutant::{Mutant, planted};
use super::types::{Config, LogId, Vote};

/// Most bytes of entries in one call; at least one entry is always sent.
pub(crate) const BATCH_BYTES: usize = 4 << 20;

/// Why a message means nothing.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub(crate) enum Unclear {
    #[error("'{0}' is missing")]
    Missing(&'static str),
    #[error("an entry cannot be read: {0}")]
    Entry(String),
}

fn vote(vote: Option<disk::Vote>) -> Result<Vote, Unclear> {
    vote.as_ref().map(convert::vote_from_pb).ok_or(Unclear::Missing("vote"))
}

/// How much of what was to be appended is in a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Sent {
    All,
    /// The entries up to this one.
    UpTo(Option<LogId>),
}

/// The message that appends as many of the entries as `limit` bytes hold, at least one.
pub(crate) fn append_to_pb<C: Config>(rpc: &AppendEntriesRequest<C>, limit: usize) -> (pb::AppendRequest, Sent) {
    let (mut bytes, mut entries, mut last) = (0, Vec::new(), None::<LogId>);
    for entry in &rpc.entries {
        let message = convert::entry_to_pb(entry);
        bytes += message.encoded_len();
        if bytes > limit && !entries.is_empty() {
            break;
        }
        last = Some(entry.log_id);
        entries.push(message);
    }
    let all = entries.len() == rpc.entries.len() || planted(Mutant::PartCountsAsAll);
    let message = pb::AppendRequest {
        vote: Some(convert::vote_to_pb(&rpc.vote)),
        previous: rpc.prev_log_id.as_ref().map(convert::log_id_to_pb),
        entries,
        leader_commit: rpc.leader_commit.as_ref().map(convert::log_id_to_pb),
    };
    (message, if all { Sent::All } else { Sent::UpTo(last) })
}

/// What a message appends.
pub(crate) fn append_from_pb<C: Config>(message: pb::AppendRequest) -> Result<AppendEntriesRequest<C>, Unclear> {
    let entries: Result<Vec<_>, _> = message.entries.into_iter().map(convert::entry_from_pb).collect();
    Ok(AppendEntriesRequest {
        vote: vote(message.vote)?,
        prev_log_id: message.previous.as_ref().map(convert::log_id_from_pb),
        entries: entries.map_err(|error| Unclear::Entry(error.to_string()))?,
        leader_commit: message.leader_commit.as_ref().map(convert::log_id_from_pb),
    })
}

/// The answer to an append, as a message.
pub(crate) fn appended_to_pb<C: Config>(answer: &AppendEntriesResponse<C>) -> pb::AppendResponse {
    use pb::append_response::Result as Pb;
    let result = match answer {
        AppendEntriesResponse::Success => Pb::Success(true),
        AppendEntriesResponse::PartialSuccess(Some(upto)) => Pb::Partial(convert::log_id_to_pb(upto)),
        AppendEntriesResponse::PartialSuccess(None) | AppendEntriesResponse::Conflict => Pb::Conflict(true),
        AppendEntriesResponse::HigherVote(vote) => Pb::HigherVote(convert::vote_to_pb(vote)),
    };
    pb::AppendResponse { result: Some(result) }
}

/// The answer to an append of which so much was sent.
pub(crate) fn appended_from_pb<C: Config>(
    message: pb::AppendResponse,
    sent: Sent,
) -> Result<AppendEntriesResponse<C>, Unclear> {
    use pb::append_response::Result as Pb;
    Ok(match (message.result.ok_or(Unclear::Missing("the result"))?, sent) {
        (Pb::Success(_), Sent::All) => AppendEntriesResponse::Success,
        (Pb::Success(_), Sent::UpTo(last)) => AppendEntriesResponse::PartialSuccess(last),
        (Pb::Partial(upto), _) => AppendEntriesResponse::PartialSuccess(Some(convert::log_id_from_pb(&upto))),
        (Pb::Conflict(_), _) => AppendEntriesResponse::Conflict,
        (Pb::HigherVote(vote), _) => AppendEntriesResponse::HigherVote(convert::vote_from_pb(&vote)),
    })
}

/// The message that asks for a vote.
pub(crate) fn vote_to_pb<C: Config>(rpc: &VoteRequest<C>, pre_vote: bool) -> pb::VoteRequest {
    pb::VoteRequest {
        vote: Some(convert::vote_to_pb(&rpc.vote)),
        last: rpc.last_log_id.as_ref().map(convert::log_id_to_pb),
        leadership_transfer: rpc.leadership_transfer,
        pre_vote,
    }
}

/// What a message asks for.
pub(crate) fn vote_from_pb<C: Config>(message: &pb::VoteRequest) -> Result<VoteRequest<C>, Unclear> {
    let mut rpc = VoteRequest::new(vote(message.vote)?, message.last.as_ref().map(convert::log_id_from_pb));
    rpc.leadership_transfer = message.leadership_transfer;
    Ok(rpc)
}

/// The answer to a question for a vote, as a message.
pub(crate) fn voted_to_pb<C: Config>(answer: &VoteResponse<C>) -> pb::VoteResponse {
    pb::VoteResponse {
        vote: Some(convert::vote_to_pb(&answer.vote)),
        granted: answer.vote_granted,
        last: answer.last_log_id.as_ref().map(convert::log_id_to_pb),
    }
}

/// The answer to a question for a vote.
pub(crate) fn voted_from_pb<C: Config>(message: &pb::VoteResponse) -> Result<VoteResponse<C>, Unclear> {
    let last = message.last.as_ref().map(convert::log_id_from_pb);
    Ok(VoteResponse::new(vote(message.vote)?, last, message.granted))
}
