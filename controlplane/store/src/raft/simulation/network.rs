//! The network: messages that get lost, come late, twice or in another order, and calls that are never answered.
//!
//! What is said is what real members say, in the same messages, with the same checks of who says it. A caller learns as much as over a real
//! connection: that nobody listens, or nothing.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use openraft::async_runtime::WatchReceiver;
use openraft::errors::{NetworkError, RPCError, ReplicationClosed, StreamingError, Unreachable};
use openraft::network::RPCOption;
use openraft::raft::{
    AppendEntriesRequest, AppendEntriesResponse, SnapshotResponse, TransferLeaderRequest, TransferLeaderResponse,
    VoteRequest, VoteResponse,
};
use openraft::type_config::alias::SnapshotOf;
use openraft::{AsyncRuntime, OptionalSend, RaftNetworkFactory, RaftNetworkV2};
use smg_services::raft as pb;
use smg_state::{NodeId, State, codec};
use tokio::sync::oneshot;
use tonic::metadata::MetadataMap;

use super::super::identity::{Call, Refused};
use super::super::options::NodeIdentity;
use super::super::parts::{self, Assembly};
use super::super::propose::{Local, LocalRead};
use super::super::types::{Peer, Vote};
use super::super::{convert, snapshot, wire};
use super::member::{Member, SimConfig};
use super::runtime::{Sim, WORLD};
use super::world::World;
use crate::StoreError;

/// Bytes of entries in one message: few, so that appends are cut.
const BATCH_BYTES: usize = 2_000;
/// For a call that waits for a disk.
const LONG: Duration = Duration::from_secs(5);

/// What one member says to another.
#[derive(Debug, Clone)]
pub(super) enum Message {
    Append(pb::AppendRequest),
    Vote(pb::VoteRequest),
    Install(Vec<pb::SnapshotPart>),
    Transfer(Vote, NodeId, Option<super::super::types::LogId>),
    Propose(Box<smg_messages::state::Envelope>),
    ReadIndex,
}

/// What it answers.
#[derive(Debug)]
pub(super) enum Answer {
    Appended(pb::AppendResponse),
    Voted(pb::VoteResponse),
    Installed(Vote),
    Transferred,
    Proposed(Local),
    Read(LocalRead),
    Refused(Refused),
}

/// Why there is no answer.
#[derive(Debug)]
pub(super) enum NoAnswer {
    NotSent,
    Refused(Refused),
    Lost,
}

impl NoAnswer {
    fn failed(&self) -> RPCError<SimConfig> {
        match self {
            Self::NotSent => Unreachable::from_string("nobody listens").into(),
            Self::Refused(refused) => Unreachable::from_string(refused.to_string()).into(),
            Self::Lost => NetworkError::from_string("no answer").into(),
        }
    }

    /// What became of a command that was sent.
    pub fn of_proposal(self) -> Local {
        match self {
            Self::Lost => Local::Unknown("no answer".into()),
            Self::NotSent | Self::Refused(_) => Local::Refused(StoreError::Unavailable("nobody took it".into())),
        }
    }
}

/// Calls a member and waits for its answer, at most for `limit`.
pub(super) async fn call(
    world: &Arc<World>,
    me: &NodeIdentity,
    to: NodeId,
    message: Message,
    limit: Duration,
) -> Result<Answer, NoAnswer> {
    let storage = world.running(me.node_id).and_then(|member| {
        let metrics = member.metrics();
        metrics.membership_config.membership().get_node(&to).map(|peer| peer.storage_id)
    });
    let history = world.running(me.node_id).map(|member| member.state().history_id());
    let call = Call::new(me, to, storage.unwrap_or_default()).of(history.unwrap_or_default());
    let cut = world.is_cut(call.from, to);
    if !cut && world.running(to).is_none() {
        Sim::sleep(Duration::from_millis(1)).await;
        return Err(NoAnswer::NotSent);
    }
    let (sender, answer) = oneshot::channel();
    let twice = { world.trouble.lock().twice };
    let repeatable = !matches!(message, Message::Propose(_));
    if repeatable && world.chance(twice) {
        travel(world, call, message.clone(), None, limit);
    }
    travel(world, call, message, Some(sender), limit);
    match Sim::timeout(limit, answer).await {
        Ok(Ok(Answer::Refused(refused))) => Err(NoAnswer::Refused(refused)),
        Ok(Ok(answer)) => Ok(answer),
        Ok(Err(_)) | Err(_) => Err(NoAnswer::Lost),
    }
}

/// Sends a message on its way, and the answer on its way back.
fn travel(world: &Arc<World>, call: Call, message: Message, answer: Option<oneshot::Sender<Answer>>, limit: Duration) {
    let there = world.journey(call.from, call.to);
    let world = Arc::clone(world);
    Sim::spawn_as(WORLD, async move {
        let Some(there) = there else {
            // Nobody is told of a lost message, so the way back stays open.
            Sim::sleep(limit + limit).await;
            return drop(answer);
        };
        Sim::sleep(there).await;
        let Some(member) = world.running(call.to) else { return };
        Sim::spawn_as(member.owner, async move {
            let said = receive(&world, &member, call, message).await;
            let Some(answer) = answer else { return };
            let Some(said) = said else { return };
            let back = world.journey(call.to, call.from);
            Sim::spawn_as(WORLD, async move {
                Sim::sleep(back.unwrap_or(limit + limit)).await;
                if back.is_some() {
                    drop(answer.send(said));
                }
            });
        });
    });
}

/// What a member answers. `None` = its process is stopping.
async fn receive(world: &World, member: &Arc<Member>, call: Call, message: Message) -> Option<Answer> {
    let mut head = MetadataMap::new();
    call.sign(&mut head);
    let refused = Call::read(&head).and_then(|call| {
        let membership = member.raft.metrics().borrow_watched().membership_config.clone();
        call.admit(&member.identity, membership.membership(), &member.state())
    });
    if let Err(refused) = refused {
        return Some(Answer::Refused(refused));
    }
    let raft = &member.raft;
    Some(match message {
        Message::Append(message) => {
            let request = wire::append_from_pb(message).unwrap();
            let text = format!("{} to {}: {request}", call.from, call.to);
            let answer = raft.append_entries(request).await.ok()?;
            world.trace(|| format!("{text} = {answer}"));
            Answer::Appended(wire::appended_to_pb(&answer))
        }
        Message::Vote(message) => {
            let ask = wire::vote_from_pb(&message).unwrap();
            let answer = if message.pre_vote { raft.pre_vote(ask).await } else { raft.vote(ask).await };
            Answer::Voted(wire::voted_to_pb(&answer.ok()?))
        }
        Message::Install(parts) => {
            let mut assembly = Assembly::default();
            parts.into_iter().for_each(|part| assembly.take(part).unwrap());
            let (head, bytes) = assembly.finish().unwrap();
            let vote = convert::vote_from_pb(&head.vote.unwrap());
            let answer = raft.install_full_snapshot(vote, snapshot::decode(&bytes).unwrap()).await.ok()?;
            Answer::Installed(answer.vote)
        }
        Message::Transfer(vote, to, last) => {
            drop(raft.handle_transfer_leader(TransferLeaderRequest::new(vote, to, last)).await.ok()?);
            Answer::Transferred
        }
        Message::Propose(envelope) => {
            Answer::Proposed(member.propose_here(codec::envelope_from_pb(*envelope).unwrap()).await)
        }
        Message::ReadIndex => Answer::Read(LocalRead::ask(raft).await),
    })
}

/// Makes the network of one member.
pub(super) struct Peers {
    pub world: Arc<World>,
    pub identity: NodeIdentity,
}

/// The way to one member.
pub(super) struct PeerNetwork {
    world: Arc<World>,
    identity: NodeIdentity,
    target: NodeId,
}

impl RaftNetworkFactory<SimConfig> for Peers {
    type Network = PeerNetwork;

    async fn new_client(&mut self, target: NodeId, _: &Peer) -> PeerNetwork {
        PeerNetwork { world: Arc::clone(&self.world), identity: self.identity, target }
    }
}

impl PeerNetwork {
    async fn call(&self, message: Message, limit: Duration) -> Result<Answer, RPCError<SimConfig>> {
        let answer = call(&self.world, &self.identity, self.target, message, limit).await;
        answer.map_err(|error| error.failed())
    }

    async fn ask_for_vote(
        &self,
        rpc: VoteRequest<SimConfig>,
        pre_vote: bool,
        option: &RPCOption,
    ) -> Result<VoteResponse<SimConfig>, RPCError<SimConfig>> {
        match self.call(Message::Vote(wire::vote_to_pb(&rpc, pre_vote)), option.soft_ttl()).await? {
            Answer::Voted(message) => Ok(wire::voted_from_pb(&message).unwrap()),
            other => unreachable!("{other:?}"),
        }
    }
}

impl RaftNetworkV2<SimConfig> for PeerNetwork {
    type SnapshotData = Arc<State>;

    async fn append_entries(
        &mut self,
        rpc: AppendEntriesRequest<SimConfig>,
        option: RPCOption,
    ) -> Result<AppendEntriesResponse<SimConfig>, RPCError<SimConfig>> {
        let (message, sent) = wire::append_to_pb(&rpc, BATCH_BYTES);
        let limit = if message.entries.is_empty() { option.soft_ttl() } else { LONG };
        match self.call(Message::Append(message), limit).await? {
            Answer::Appended(message) => Ok(wire::appended_from_pb(message, sent).unwrap()),
            other => unreachable!("{other:?}"),
        }
    }

    async fn vote(
        &mut self,
        rpc: VoteRequest<SimConfig>,
        option: RPCOption,
    ) -> Result<VoteResponse<SimConfig>, RPCError<SimConfig>> {
        self.ask_for_vote(rpc, false, &option).await
    }

    async fn pre_vote(
        &mut self,
        rpc: VoteRequest<SimConfig>,
        option: RPCOption,
    ) -> Result<VoteResponse<SimConfig>, RPCError<SimConfig>> {
        self.ask_for_vote(rpc, true, &option).await
    }

    async fn full_snapshot(
        &mut self,
        vote: Vote,
        snapshot: SnapshotOf<SimConfig, Arc<State>>,
        _cancel: impl Future<Output = ReplicationClosed> + OptionalSend + 'static,
        _option: RPCOption,
    ) -> Result<SnapshotResponse<SimConfig>, StreamingError<SimConfig>> {
        let parts = parts::cut(snapshot::encode(&snapshot).into(), convert::vote_to_pb(&vote)).collect();
        match self.call(Message::Install(parts), LONG).await? {
            Answer::Installed(vote) => Ok(SnapshotResponse::new(vote)),
            other => unreachable!("{other:?}"),
        }
    }

    async fn transfer_leader(
        &mut self,
        request: TransferLeaderRequest<SimConfig>,
        option: RPCOption,
    ) -> Result<TransferLeaderResponse<SimConfig>, RPCError<SimConfig>> {
        let last = request.last_log_id().copied();
        let message = Message::Transfer(*request.from_leader(), *request.to_node_id(), last);
        self.call(message, option.soft_ttl()).await?;
        Ok(Ok(()))
    }
}
