//! What this member answers to others.

use std::sync::Arc;
use std::time::Duration;

use openraft::errors::RaftError;
use openraft::raft::{AppendEntriesResponse, TransferLeaderRequest};
use smg_services::raft as pb;
use smg_services::raft::peer_server::{Peer, PeerServer};
use smg_state::{Command, Envelope, codec};
use tokio::time::timeout;
use tonic::{Request, Response, Status, Streaming};
use uuid::Uuid;

use super::RaftStore;
use super::convert;
use super::identity::{Call, PROTOCOL, Refused, same_history};
use super::links::MAX_MESSAGE;
use super::parts::Assembly;
use super::propose::{Local, LocalRead};
use super::snapshot;
use super::types::{TypeConfig, Vote};
use super::wire::{self, Unclear};
use crate::cluster::{ChangeError, MemberChange, Refusal};
use crate::{ClusterStore, StoreError};

/// Between two parts of a snapshot.
const PART_TIMEOUT: Duration = Duration::from_secs(10);

/// The service for other members. Cheap to clone.
#[derive(Debug, Clone)]
pub struct PeerService {
    store: Arc<RaftStore>,
}

impl RaftStore {
    /// The service for other members, to be served at the address that [`super::RaftOptions::address`] names.
    pub fn peer_service(self: &Arc<Self>) -> PeerServer<PeerService> {
        PeerServer::new(PeerService { store: Arc::clone(self) })
            .max_decoding_message_size(MAX_MESSAGE)
            .max_encoding_message_size(MAX_MESSAGE)
    }
}

impl PeerService {
    /// Refuses a call that is not for this member or not from one.
    fn admit<T>(&self, request: &Request<T>) -> Result<Call, Status> {
        let call = Call::read(request.metadata()).and_then(|call| {
            let (membership, state) = (self.store.membership(), self.store.local());
            call.admit(&self.store.identity(), membership.membership(), &state)?;
            Ok(call)
        });
        call.map_err(|refused| self.refuse(&refused))
    }

    fn refuse(&self, refused: &Refused) -> Status {
        self.store.refusals.log(refused);
        refused.status()
    }
}

fn stopped(error: &dyn std::fmt::Display) -> Status {
    Status::unavailable(error.to_string())
}

fn broken<E: std::error::Error>(error: RaftError<TypeConfig, E>) -> Status {
    stopped(&error)
}

fn required<T>(value: Option<T>, field: &str) -> Result<T, Status> {
    value.ok_or_else(|| Status::invalid_argument(format!("'{field}' is missing")))
}

fn unclear(error: &Unclear) -> Status {
    Status::invalid_argument(error.to_string())
}

fn vote(vote: Option<smg_messages::disk::Vote>) -> Result<Vote, Status> {
    Ok(convert::vote_from_pb(&required(vote, "vote")?))
}

#[tonic::async_trait]
impl Peer for PeerService {
    async fn append(&self, request: Request<pb::AppendRequest>) -> Result<Response<pb::AppendResponse>, Status> {
        self.admit(&request)?;
        let request = wire::append_from_pb(request.into_inner()).map_err(|error| unclear(&error))?;
        let answer = self.store.raft.append_entries(request).await.map_err(broken)?;
        if !matches!(answer, AppendEntriesResponse::HigherVote(_)) {
            self.store.heard();
        }
        Ok(Response::new(wire::appended_to_pb(&answer)))
    }

    async fn vote(&self, request: Request<pb::VoteRequest>) -> Result<Response<pb::VoteResponse>, Status> {
        self.admit(&request)?;
        let request = request.into_inner();
        let ask = wire::vote_from_pb(&request).map_err(|error| unclear(&error))?;
        let raft = &self.store.raft;
        let answer = if request.pre_vote { raft.pre_vote(ask).await } else { raft.vote(ask).await }.map_err(broken)?;
        Ok(Response::new(wire::voted_to_pb(&answer)))
    }

    async fn install(
        &self,
        request: Request<Streaming<pb::SnapshotPart>>,
    ) -> Result<Response<pb::InstallResponse>, Status> {
        let call = self.admit(&request)?;
        let mut parts = request.into_inner();
        // One at a time: each may be large.
        let _turn = self.store.installing.lock().await;
        let mut assembly = Assembly::default();
        loop {
            let next = timeout(PART_TIMEOUT, parts.message()).await;
            match next.map_err(|_| Status::deadline_exceeded("the next part did not come in time"))?? {
                Some(part) => assembly.take(part).map_err(|error| Status::data_loss(error.to_string()))?,
                None => break,
            }
        }
        let (head, bytes) = assembly.finish().map_err(|error| Status::data_loss(error.to_string()))?;
        let length = bytes.len();
        let decoded = tokio::task::spawn_blocking(move || snapshot::decode(&bytes)).await;
        let decoded = decoded.map_err(|error| stopped(&error))?;
        let decoded = decoded.map_err(|error| Status::data_loss(format!("the snapshot {error}")))?;
        let leader = vote(head.vote)?;
        tracing::info!(target: "smg", from = call.from, bytes = length, revision = decoded.snapshot.revision(), "installing a snapshot");
        let answer = self.store.raft.install_full_snapshot(leader, decoded).await.map_err(|error| stopped(&error))?;
        self.store.heard();
        Ok(Response::new(pb::InstallResponse { vote: Some(convert::vote_to_pb(&answer.vote)) }))
    }

    async fn transfer_leader(
        &self,
        request: Request<pb::TransferRequest>,
    ) -> Result<Response<pb::TransferResponse>, Status> {
        self.admit(&request)?;
        let request = request.into_inner();
        let last = request.last.as_ref().map(convert::log_id_from_pb);
        let transfer = TransferLeaderRequest::new(vote(request.from_leader)?, request.to, last);
        let answer = self.store.raft.handle_transfer_leader(transfer).await.map_err(|error| stopped(&error))?;
        let refused = answer.err().map(|error| error.to_string()).unwrap_or_default();
        Ok(Response::new(pb::TransferResponse { refused }))
    }

    async fn propose(&self, request: Request<pb::ProposeRequest>) -> Result<Response<pb::ProposeResponse>, Status> {
        self.admit(&request)?;
        let envelope = required(request.into_inner().envelope, "envelope")?;
        let envelope = codec::envelope_from_pb(envelope);
        let envelope = envelope.map_err(|error| Status::invalid_argument(format!("the command: {error}")))?;
        use pb::propose_response::Result as Pb;
        let result = match self.store.propose_here(envelope).await {
            Local::Done(outcome) => Pb::Outcome(codec::outcome_to_pb(&outcome)),
            Local::NotLeader(leader) => Pb::NotLeader(pb::NotLeader { leader: leader.unwrap_or_default() }),
            Local::Unknown(why) => Pb::Unknown(why),
            Local::Refused(error) => Pb::Unavailable(error.to_string()),
        };
        Ok(Response::new(pb::ProposeResponse { result: Some(result) }))
    }

    async fn read_index(
        &self,
        request: Request<pb::ReadIndexRequest>,
    ) -> Result<Response<pb::ReadIndexResponse>, Status> {
        self.admit(&request)?;
        use pb::read_index_response::Result as Pb;
        let result = match self.store.read_index_here().await {
            LocalRead::Index(index) => Pb::Index(index),
            LocalRead::NotLeader(leader) => Pb::NotLeader(pb::NotLeader { leader: leader.unwrap_or_default() }),
            LocalRead::Refused(error) => Pb::Unavailable(error.to_string()),
        };
        Ok(Response::new(pb::ReadIndexResponse { result: Some(result) }))
    }

    async fn change(&self, request: Request<pb::ChangeRequest>) -> Result<Response<pb::ChangeResponse>, Status> {
        self.admit(&request)?;
        let request = request.into_inner();
        let rehearse = request.rehearse;
        let change = change_from_pb(request)?;
        use pb::change_response::Result as Pb;
        let result = if self.store.leads() {
            match self.store.change_here(change, rehearse).await {
                Ok(node_ids) => Pb::Done(pb::Voters { node_ids }),
                Err(ChangeError::Refused { code, message }) => Pb::Refused(pb::Refusal { code: code as i32, message }),
                Err(ChangeError::Store(StoreError::Unknown(why))) => Pb::Unknown(why),
                Err(ChangeError::Store(_)) => Pb::NotLeader(pb::NotLeader::default()),
            }
        } else {
            Pb::NotLeader(pb::NotLeader { leader: self.store.leader().unwrap_or_default() })
        };
        Ok(Response::new(pb::ChangeResponse { result: Some(result) }))
    }

    async fn status(&self, request: Request<pb::StatusRequest>) -> Result<Response<pb::StatusResponse>, Status> {
        self.admit(&request)?;
        Ok(Response::new(super::status::to_pb(&self.store.status_here())))
    }

    async fn gateways(&self, request: Request<pb::GatewaysRequest>) -> Result<Response<pb::GatewaysResponse>, Status> {
        self.admit(&request)?;
        let json = self.store.gateways.get().map(|report| report()).unwrap_or_default();
        Ok(Response::new(pb::GatewaysResponse { json }))
    }

    async fn join(&self, request: Request<pb::JoinRequest>) -> Result<Response<pb::JoinResponse>, Status> {
        let request = request.into_inner();
        if request.protocol != PROTOCOL {
            return Err(self.refuse(&Refused::Protocol(request.protocol)));
        }
        let ours = self.store.identity().cluster_id;
        if !request.cluster_id.is_empty() {
            let theirs = Uuid::from_slice(&request.cluster_id).unwrap_or_default();
            if theirs != ours {
                return Err(self.refuse(&Refused::Cluster { theirs, ours }));
            }
        }
        let storage_id = Uuid::from_slice(&request.storage_id)
            .map_err(|_| Status::invalid_argument("storage_id must be a UUID of 16 bytes"))?;
        let history_id = Uuid::from_slice(&request.history_id).unwrap_or_default();
        same_history(request.node_id.unwrap_or_default(), storage_id, history_id, &self.store.local())
            .map_err(|refused| self.refuse(&refused))?;
        let envelope = Envelope {
            command_id: Uuid::new_v4(),
            actor: format!("member at {}", request.peer_address),
            proposed_at_unix_ms: super::unix_millis(),
            expected_revision: None,
            command: Command::RegisterMember {
                node_id: request.node_id,
                storage_id,
                peer_address: request.peer_address.clone(),
                api_address: request.api_address,
            },
        };
        let outcome = self.store.propose(envelope).await.map_err(|error| stopped(&error))?;
        let outcome = outcome.accepted().map_err(|rejection| Status::failed_precondition(rejection.message))?;
        let node_id = required(outcome.node_id, "node_id")?;
        tracing::info!(target: "smg", member = node_id, address = request.peer_address, "a member has its number");
        Ok(Response::new(pb::JoinResponse { cluster_id: ours.as_bytes().to_vec(), node_id }))
    }
}

fn change_from_pb(request: pb::ChangeRequest) -> Result<MemberChange, Status> {
    use pb::change_request::Change as Pb;
    Ok(match required(request.change, "change")? {
        Pb::Promote(promote) => MemberChange::Promote { node_ids: promote.node_ids, allow_even: promote.allow_even },
        Pb::Remove(remove) => MemberChange::Remove { node_ids: remove.node_ids, allow_even: remove.allow_even },
        Pb::Replace(replace) => MemberChange::Replace { old: replace.old, new: replace.new },
    })
}

/// A change as a request to the leader.
pub(crate) fn change_to_pb(change: &MemberChange) -> pb::ChangeRequest {
    use pb::change_request::Change as Pb;
    let change = match change.clone() {
        MemberChange::Promote { node_ids, allow_even } => Pb::Promote(pb::Promote { node_ids, allow_even }),
        MemberChange::Remove { node_ids, allow_even } => Pb::Remove(pb::Remove { node_ids, allow_even }),
        MemberChange::Replace { old, new } => Pb::Replace(pb::Replace { old, new }),
    };
    pb::ChangeRequest { change: Some(change), rehearse: false }
}

/// A refusal that came from the leader.
pub(crate) fn refusal_from_pb(refusal: pb::Refusal) -> ChangeError {
    let code = Refusal::ALL.into_iter().find(|code| *code as i32 == refusal.code).unwrap_or(Refusal::Unsupported);
    ChangeError::refused(code, refusal.message)
}
