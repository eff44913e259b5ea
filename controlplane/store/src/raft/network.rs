//! The way to other members. A cluster of one voter has none: every target is unreachable.
//!
//! Unreachable is an answer of its own, different from silence: it never counts as a vote or an acknowledgement.

use std::future::Future;
use std::sync::Arc;

use openraft::errors::{RPCError, ReplicationClosed, StreamingError, Unreachable};
use openraft::network::RPCOption;
use openraft::raft::{
    AppendEntriesRequest, AppendEntriesResponse, SnapshotResponse, TransferLeaderRequest, TransferLeaderResponse,
    VoteRequest, VoteResponse,
};
use openraft::type_config::alias::SnapshotOf;
use openraft::{BasicNode, OptionalSend, RaftNetworkFactory, RaftNetworkV2};
use smg_state::State;
use thiserror::Error;

use super::types::{TypeConfig, Vote};

/// There is no transport to this member.
#[derive(Debug, Clone, Error)]
#[error("member {target} at {address} is unreachable: this process has no connection to other members")]
struct NoRoute {
    target: u64,
    address: String,
}

/// Makes the connections of one node.
#[derive(Debug, Default)]
pub(crate) struct Peers;

/// The connection to one member.
#[derive(Debug)]
pub(crate) struct Peer(NoRoute);

impl Peer {
    fn unreachable(&self) -> Unreachable<TypeConfig> {
        Unreachable::new(&self.0)
    }
}

impl RaftNetworkFactory<TypeConfig> for Peers {
    type Network = Peer;

    async fn new_client(&mut self, target: u64, node: &BasicNode) -> Peer {
        Peer(NoRoute { target, address: node.addr.clone() })
    }
}

impl RaftNetworkV2<TypeConfig> for Peer {
    type SnapshotData = Arc<State>;

    async fn append_entries(
        &mut self,
        _rpc: AppendEntriesRequest<TypeConfig>,
        _option: RPCOption,
    ) -> Result<AppendEntriesResponse<TypeConfig>, RPCError<TypeConfig>> {
        Err(self.unreachable().into())
    }

    async fn vote(
        &mut self,
        _rpc: VoteRequest<TypeConfig>,
        _option: RPCOption,
    ) -> Result<VoteResponse<TypeConfig>, RPCError<TypeConfig>> {
        Err(self.unreachable().into())
    }

    // The default would grant, and make every isolated node an eager candidate.
    async fn pre_vote(
        &mut self,
        _rpc: VoteRequest<TypeConfig>,
        _option: RPCOption,
    ) -> Result<VoteResponse<TypeConfig>, RPCError<TypeConfig>> {
        Err(self.unreachable().into())
    }

    async fn full_snapshot(
        &mut self,
        _vote: Vote,
        _snapshot: SnapshotOf<TypeConfig, Arc<State>>,
        _cancel: impl Future<Output = ReplicationClosed> + OptionalSend + 'static,
        _option: RPCOption,
    ) -> Result<SnapshotResponse<TypeConfig>, StreamingError<TypeConfig>> {
        Err(self.unreachable().into())
    }

    async fn transfer_leader(
        &mut self,
        _request: TransferLeaderRequest<TypeConfig>,
        _option: RPCOption,
    ) -> Result<TransferLeaderResponse<TypeConfig>, RPCError<TypeConfig>> {
        Err(self.unreachable().into())
    }
}
