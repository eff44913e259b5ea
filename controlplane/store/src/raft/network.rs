//! Replication, votes and snapshots, as openraft sends them.
//!
//! Unreachable is an answer of its own, different from silence: it never counts as a vote or an acknowledgement. The pre-vote that the
//! library would grant by default is a real question here, else every isolated member would be an eager candidate.

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use openraft::errors::{NetworkError, RPCError, ReplicationClosed, StreamingError, Timeout, Unreachable};
use openraft::network::RPCOption;
use openraft::raft::{
    AppendEntriesRequest, AppendEntriesResponse, SnapshotResponse, TransferLeaderRequest, TransferLeaderResponse,
    VoteRequest, VoteResponse,
};
use openraft::type_config::alias::SnapshotOf;
use openraft::{OptionalSend, RPCTypes, RaftNetworkFactory, RaftNetworkV2};
use smg_services::raft as pb;
use smg_state::{NodeId, State};

use super::convert;
use super::links::{Link, Links};
use super::parts;
use super::snapshot;
use super::types::{Peer, TypeConfig, Vote};
use super::wire::{self, BATCH_BYTES, Unclear};
use crate::call::CallError;

/// For entries, which the other member answers after its disk has them.
const APPEND_TIMEOUT: Duration = Duration::from_secs(5);
/// For a snapshot, and for each MiB of it on top.
const SNAPSHOT_TIMEOUT: Duration = Duration::from_secs(20);

/// Makes the network of one member.
#[derive(Debug, Clone)]
pub(crate) struct Peers {
    me: NodeId,
    links: Arc<Links>,
}

impl Peers {
    pub fn new(me: NodeId, links: Arc<Links>) -> Self {
        Self { me, links }
    }
}

/// The way to one member, at whatever address it has when it is called.
#[derive(Debug)]
pub(crate) struct PeerNetwork {
    me: NodeId,
    target: NodeId,
    links: Arc<Links>,
}

impl RaftNetworkFactory<TypeConfig> for Peers {
    type Network = PeerNetwork;

    async fn new_client(&mut self, target: NodeId, peer: &Peer) -> PeerNetwork {
        if let Err(reason) = self.links.to(target, &peer.address, peer.storage_id) {
            tracing::error!(target: "smg", member = target, reason, "the address of a member is none");
        }
        PeerNetwork { me: self.me, target, links: Arc::clone(&self.links) }
    }
}

impl PeerNetwork {
    fn link(&self) -> Result<Arc<Link>, Unreachable<TypeConfig>> {
        self.links.known(self.target).ok_or_else(|| Unreachable::from_string("its address is not known"))
    }

    fn failed(&self, action: RPCTypes, limit: Duration, error: CallError) -> RPCError<TypeConfig> {
        match error {
            CallError::NotSent(message) | CallError::Refused(message) => Unreachable::from_string(message).into(),
            CallError::Lost(message) if message.starts_with("no answer") => {
                Timeout { action, id: self.me, target: self.target, timeout: limit }.into()
            }
            CallError::Lost(message) => NetworkError::from_string(message).into(),
        }
    }

    async fn ask_for_vote(
        &self,
        rpc: VoteRequest<TypeConfig>,
        pre_vote: bool,
        option: &RPCOption,
    ) -> Result<VoteResponse<TypeConfig>, RPCError<TypeConfig>> {
        let link = self.link()?;
        let request = link.request(wire::vote_to_pb(&rpc, pre_vote));
        let limit = option.soft_ttl();
        let answer = link.answer(limit, link.client().vote(request)).await;
        let answer = answer.map_err(|error| self.failed(RPCTypes::Vote, limit, error))?;
        wire::voted_from_pb(&answer).map_err(|error| incomplete(&error))
    }
}

fn incomplete(error: &Unclear) -> RPCError<TypeConfig> {
    NetworkError::from_string(format!("the answer is not complete: {error}")).into()
}

impl RaftNetworkV2<TypeConfig> for PeerNetwork {
    type SnapshotData = Arc<State>;

    async fn append_entries(
        &mut self,
        rpc: AppendEntriesRequest<TypeConfig>,
        option: RPCOption,
    ) -> Result<AppendEntriesResponse<TypeConfig>, RPCError<TypeConfig>> {
        let link = self.link()?;
        let (message, sent) = wire::append_to_pb(&rpc, BATCH_BYTES);
        let limit = if message.entries.is_empty() { option.soft_ttl() } else { APPEND_TIMEOUT };
        let request = link.request(message);
        let answer = link.answer(limit, link.client().append(request)).await;
        let answer = answer.map_err(|error| self.failed(RPCTypes::AppendEntries, limit, error))?;
        wire::appended_from_pb(answer, sent).map_err(|error| incomplete(&error))
    }

    async fn vote(
        &mut self,
        rpc: VoteRequest<TypeConfig>,
        option: RPCOption,
    ) -> Result<VoteResponse<TypeConfig>, RPCError<TypeConfig>> {
        self.ask_for_vote(rpc, false, &option).await
    }

    async fn pre_vote(
        &mut self,
        rpc: VoteRequest<TypeConfig>,
        option: RPCOption,
    ) -> Result<VoteResponse<TypeConfig>, RPCError<TypeConfig>> {
        self.ask_for_vote(rpc, true, &option).await
    }

    async fn full_snapshot(
        &mut self,
        vote: Vote,
        snapshot: SnapshotOf<TypeConfig, Arc<State>>,
        cancel: impl Future<Output = ReplicationClosed> + OptionalSend + 'static,
        _option: RPCOption,
    ) -> Result<SnapshotResponse<TypeConfig>, StreamingError<TypeConfig>> {
        let link = self.link()?;
        let encoded = tokio::task::spawn_blocking(move || Arc::<[u8]>::from(snapshot::encode(&snapshot))).await;
        let bytes = encoded.map_err(|error| NetworkError::from_string(error.to_string()))?;
        let mebibytes = u32::try_from(bytes.len() >> 20).unwrap_or(u32::MAX);
        let limit = SNAPSHOT_TIMEOUT + Duration::from_secs(1) * mebibytes;
        let parts = parts::cut(bytes, convert::vote_to_pb(&vote));
        let request = link.request(tokio_stream::iter(parts));
        let mut client = link.bulk_client();
        let answer = pin!(link.answer(limit, client.install(request)));
        let answer = tokio::select! {
            answer = answer => answer,
            closed = cancel => return Err(closed.into()),
        };
        let answer = answer.map_err(|error| self.failed(RPCTypes::InstallSnapshot, limit, error))?;
        let vote = answer.vote.as_ref().map(convert::vote_from_pb);
        let vote = vote.ok_or_else(|| incomplete(&Unclear::Missing("vote")))?;
        Ok(SnapshotResponse::new(vote))
    }

    async fn transfer_leader(
        &mut self,
        request: TransferLeaderRequest<TypeConfig>,
        option: RPCOption,
    ) -> Result<TransferLeaderResponse<TypeConfig>, RPCError<TypeConfig>> {
        let link = self.link()?;
        let request = link.request(pb::TransferRequest {
            from_leader: Some(convert::vote_to_pb(request.from_leader())),
            to: *request.to_node_id(),
            last: request.last_log_id().map(convert::log_id_to_pb),
        });
        let limit = option.soft_ttl();
        let answer = link.answer(limit, link.client().transfer_leader(request)).await;
        let answer = answer.map_err(|error| self.failed(RPCTypes::TransferLeader, limit, error))?;
        if !answer.refused.is_empty() {
            return Err(NetworkError::from_string(answer.refused).into());
        }
        Ok(Ok(()))
    }
}
