//! Who belongs to the cluster: the leader brings the membership in line with the registry, and makes the changes operators ask for.
//!
//! A change that an operator asks for is checked, then recorded in the registry, then made. If the leader dies in between, the next one
//! reads the registry and finishes it; so a removal that was recorded is never half done for long, and never undone.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Weak};
use std::time::Duration;

use openraft::async_runtime::WatchReceiver;
use openraft::errors::{ClientWriteError, RaftError};
use openraft::type_config::TypeConfigExt;
use openraft::type_config::alias::InstantOf;
use openraft::{ChangeMembers, Instant as _, RaftMetrics};
use smg_services::raft as pb;
use smg_state::{Command, Envelope, Member, NodeId};
use tokio::time::{Instant, MissedTickBehavior, interval, sleep, timeout};
use uuid::Uuid;

use super::RaftStore;
use super::peer::{change_to_pb, refusal_from_pb};
use super::plan::{Step, View};
use super::propose::{DEADLINE, Local};
use super::types::{Config, Peer, TypeConfig};
use crate::StoreError;
use crate::call::CallError;
use crate::cluster::{ChangeError, MemberChange, Refusal};

/// Between two looks at the membership.
const TICK: Duration = Duration::from_millis(250);
/// How far a member may be behind and still count as caught up, in entries.
const CLOSE: u64 = 100;
/// For one change of the membership; a joint one writes two entries.
const CHANGE_TIMEOUT: Duration = Duration::from_secs(10);

/// Since when each member has kept up.
pub(crate) type KeptUp<C> = BTreeMap<NodeId, InstantOf<C>>;

/// What a member that leads sees, given its metrics and who is registered. `None` while a change is under way or it does not lead. Who
/// answered within `fresh` is reachable; who has kept up for `settle` is settled.
pub(crate) fn view<C: Config>(
    metrics: &RaftMetrics<C>,
    registered: Vec<Arc<Member>>,
    kept_up: &mut KeptUp<C>,
    fresh: Duration,
    settle: Duration,
) -> Option<View> {
    let (replication, heartbeat) = (metrics.replication.as_ref()?, metrics.heartbeat.as_ref()?);
    let under_way = metrics.membership_config != metrics.committed_membership_config;
    if under_way || metrics.membership_config.get_joint_config().len() > 1 {
        return None;
    }
    let me = metrics.id;
    let membership = metrics.membership_config.membership();
    let reachable: BTreeSet<NodeId> = heartbeat
        .iter()
        .filter(|(_, at)| at.as_ref().is_some_and(|at| at.elapsed() < fresh))
        .map(|(id, _)| *id)
        .chain([me])
        .collect();
    let last = metrics.last_log_index.unwrap_or_default();
    let close = |id: &NodeId| {
        let matched = replication.get(id).copied().flatten();
        matched.is_some_and(|matched| last.saturating_sub(matched.index()) <= CLOSE)
    };
    let caught_up: BTreeSet<NodeId> =
        membership.nodes().map(|(id, _)| *id).filter(|id| *id == me || (reachable.contains(id) && close(id))).collect();
    let now = C::now();
    kept_up.retain(|id, _| caught_up.contains(id));
    for id in &caught_up {
        kept_up.entry(*id).or_insert(now);
    }
    let settled = kept_up.iter().filter(|(_, since)| now - **since >= settle).map(|(id, _)| *id).collect();
    Some(View {
        voters: membership.voter_ids().collect(),
        peers: membership.nodes().map(|(id, peer)| (*id, peer.clone())).collect(),
        registered,
        reachable,
        caught_up,
        settled,
    })
}

/// A step as openraft takes it.
pub(crate) fn change_of(step: Step) -> ChangeMembers<NodeId, Peer> {
    match step {
        Step::Add(peers) => ChangeMembers::AddNodes(peers),
        Step::Move(peers) => ChangeMembers::SetNodes(peers),
        Step::Forget(ids) => ChangeMembers::RemoveNodes(ids),
        Step::Voters(ids) => ChangeMembers::ReplaceAllVoters(ids),
    }
}

impl RaftStore {
    fn view(&self, kept_up: &mut KeptUp<TypeConfig>, fresh: Duration) -> Option<View> {
        let metrics = self.raft.metrics().borrow_watched().clone();
        let registered = self.published.state.load().members().cloned().collect();
        view(&metrics, registered, kept_up, fresh, self.settle)
    }

    /// Makes one change of the membership. Goes on in the background when it takes longer than its caller can wait.
    async fn change_membership(&self, change: ChangeMembers<NodeId, Peer>) -> Result<(), ChangeError> {
        let raft = self.raft.clone();
        let change = tokio::spawn(async move { raft.change_membership(change, false).await });
        let unknown = |why: &dyn std::fmt::Display| ChangeError::Store(StoreError::Unknown(why.to_string()));
        match timeout(CHANGE_TIMEOUT, change).await {
            Err(_) => Err(unknown(&"the change of the membership goes on in the background")),
            Ok(Err(join)) => Err(unknown(&join)),
            Ok(Ok(Ok(_))) => Ok(()),
            Ok(Ok(Err(RaftError::APIError(error)))) => Err(match error {
                ClientWriteError::ForwardToLeader(_) => StoreError::Unavailable(error.to_string()).into(),
                ClientWriteError::ChangeMembershipError(error) => {
                    ChangeError::refused(Refusal::InProgress, error.to_string())
                }
                error => unknown(&error),
            }),
            Ok(Ok(Err(fatal))) => Err(unknown(&fatal)),
        }
    }

    /// Asks all members for a sign of life. Returns the time within which those that are there have answered.
    async fn roll_call(&self) -> Duration {
        let asked = Instant::now();
        let limit = 2 * self.patience.election;
        // A member that leads no more has nobody to ask; the view says so.
        let _ = self.raft.trigger().heartbeat().await;
        loop {
            sleep(self.patience.heartbeat / 4).await;
            let all = {
                let metrics = self.raft.metrics();
                let metrics = metrics.borrow_watched();
                let me = self.identity().node_id;
                let answered = |at: &Option<_>| at.as_ref().is_some_and(|at| since(at) < asked.elapsed());
                let heard = metrics.heartbeat.as_ref();
                heard.is_none_or(|heard| heard.iter().all(|(id, at)| *id == me || answered(at)))
            };
            if all || asked.elapsed() > limit {
                return asked.elapsed();
            }
        }
    }

    /// Makes an operator's change, if this member leads; a rehearsal stops before it is made.
    pub(crate) async fn change_here(&self, change: MemberChange, rehearse: bool) -> Result<Vec<NodeId>, ChangeError> {
        let mut kept_up = self.kept_up.lock().await;
        let fresh = self.roll_call().await;
        let Some(view) = self.view(&mut kept_up, fresh) else {
            return Err(ChangeError::refused(Refusal::InProgress, "another change of the members is not finished yet"));
        };
        let (leaving, voters) = view.check(&change)?;
        if rehearse {
            return Ok(voters.into_iter().collect());
        }
        let recorded = view.registered.iter().map(|member| member.node_id).filter(|id| leaving.contains(id));
        let recorded: Vec<NodeId> = recorded.collect();
        if !recorded.is_empty() {
            self.retire(recorded).await?;
        }
        if voters != view.voters {
            self.change_membership(ChangeMembers::ReplaceAllVoters(voters.clone())).await?;
        }
        let followers: BTreeSet<NodeId> = leaving.difference(&view.voters).copied().collect();
        if !followers.is_empty() {
            self.change_membership(ChangeMembers::RemoveNodes(followers)).await?;
        }
        tracing::info!(target: "smg", ?voters, ?leaving, "the members have changed");
        Ok(voters.into_iter().collect())
    }

    async fn retire(&self, node_ids: Vec<NodeId>) -> Result<(), ChangeError> {
        let envelope = self.own_envelope(Command::RetireMembers { node_ids });
        match self.propose_here(envelope).await {
            Local::Done(outcome) => match outcome.rejection {
                None => Ok(()),
                Some(rejection) => Err(ChangeError::refused(Refusal::NotAMember, rejection.message)),
            },
            Local::NotLeader(_) => Err(StoreError::Unavailable("this member no longer leads".into()).into()),
            Local::Unknown(why) => Err(StoreError::Unknown(why).into()),
            Local::Refused(error) => Err(error.into()),
        }
    }

    fn own_envelope(&self, command: Command) -> Envelope {
        Envelope {
            command_id: Uuid::new_v4(),
            actor: format!("member {}", self.identity().node_id),
            proposed_at_unix_ms: super::unix_millis(),
            expected_revision: None,
            command,
        }
    }

    /// Makes an operator's change, or rehearses it, here or on the member that leads.
    pub(crate) async fn change_anywhere(
        &self,
        change: MemberChange,
        rehearse: bool,
    ) -> Result<Vec<NodeId>, ChangeError> {
        self.check()?;
        if !self.with_peers {
            return Err(ChangeError::refused(Refusal::Unsupported, "this control plane has one member, always"));
        }
        let deadline = Instant::now() + DEADLINE;
        loop {
            match self.try_change(&change, rehearse).await {
                // It did not happen; an election may be under way.
                Err(ChangeError::Store(StoreError::Unavailable(_))) if Instant::now() < deadline => sleep(TICK).await,
                ended => return ended,
            }
        }
    }

    async fn try_change(&self, change: &MemberChange, rehearse: bool) -> Result<Vec<NodeId>, ChangeError> {
        let unavailable = |why: String| ChangeError::Store(StoreError::Unavailable(why));
        let Some(leader) = self.leader() else { return Err(unavailable("no leader is known".into())) };
        if leader == self.identity().node_id {
            return self.change_here(change.clone(), rehearse).await;
        }
        let link = self.link_to(leader).map_err(unavailable)?;
        let request = link.request(pb::ChangeRequest { rehearse, ..change_to_pb(change) });
        let answer = match link.answer(2 * CHANGE_TIMEOUT, link.client().change(request)).await {
            Ok(answer) => answer,
            Err(CallError::Lost(why)) => return Err(StoreError::Unknown(format!("member {leader}: {why}")).into()),
            Err(error) => return Err(unavailable(format!("member {leader}: {}", error.message()))),
        };
        use pb::change_response::Result as Pb;
        match answer.result {
            Some(Pb::Done(voters)) => Ok(voters.node_ids),
            Some(Pb::Refused(refusal)) => Err(refusal_from_pb(refusal)),
            Some(Pb::NotLeader(_)) => Err(unavailable(format!("member {leader} no longer leads"))),
            Some(Pb::Unknown(why)) => Err(StoreError::Unknown(why).into()),
            None => Err(StoreError::Unknown("the leader's answer is not complete".into()).into()),
        }
    }

    /// Hands the leadership to the voter that is closest, and waits until somebody else leads.
    pub(crate) async fn step_down_here(&self) {
        let me = self.identity().node_id;
        let metrics = self.raft.metrics().borrow_watched().clone();
        let (Some(replication), Some(heartbeat)) = (metrics.replication, metrics.heartbeat) else { return };
        let fresh = self.patience.election;
        let answers =
            |id: &NodeId| heartbeat.get(id).is_some_and(|at| at.as_ref().is_some_and(|at| at.elapsed() < fresh));
        let mut heirs: Vec<NodeId> =
            metrics.membership_config.voter_ids().filter(|id| *id != me && answers(id)).collect();
        heirs.sort_by_key(|id| std::cmp::Reverse(replication.get(id).copied().flatten()));
        for heir in heirs.into_iter().take(2) {
            tracing::info!(target: "smg", member = heir, "handing the leadership over");
            if self.raft.trigger().transfer_leader(heir).await.is_err() {
                return;
            }
            let wait = self.raft.wait(Some(fresh));
            let handed = wait.metrics(|now| now.current_leader.is_some_and(|leader| leader != me), "another leads");
            if handed.await.is_ok() {
                return;
            }
        }
    }

    /// One look at the membership.
    async fn tend(&self) {
        let me = self.identity().node_id;
        for (id, peer) in self.membership().nodes().filter(|(id, _)| **id != me) {
            // Whoever moved is called where it is now; an address that is none was told of already.
            let _ = self.links.to(*id, &peer.address, peer.storage_id);
        }
        if self.leads() {
            let mut kept_up = self.kept_up.lock().await;
            let fresh = self.patience.election.max(4 * self.patience.heartbeat);
            let step = self.view(&mut kept_up, fresh).and_then(|view| view.next());
            let Some(step) = step else { return self.flatten().await };
            tracing::info!(target: "smg", ?step, "changing the membership");
            if let Err(error) = self.change_membership(change_of(step)).await {
                tracing::warn!(target: "smg", %error, "the membership has not changed yet");
            }
            return;
        }
        self.kept_up.lock().await.clear();
        let told = self.published.state.load().member(me).is_some_and(|member| member.retired);
        if told && self.membership().get_node(&me).is_none() {
            self.links.retired().send_replace(true);
        }
    }

    /// Ends a joint configuration that a leader left behind.
    async fn flatten(&self) {
        let left_behind = {
            let metrics = self.raft.metrics();
            let metrics = metrics.borrow_watched();
            let config = &metrics.membership_config;
            config == &metrics.committed_membership_config && config.get_joint_config().len() > 1
        };
        if left_behind && let Err(error) = self.change_membership(ChangeMembers::AddVoterIds(BTreeSet::new())).await {
            tracing::warn!(target: "smg", %error, "a change of the membership is not finished yet");
        }
    }

    /// Asks other members who leads. One that knows that this member was removed says so.
    async fn seek(&self) {
        let peers: Vec<NodeId> = {
            let membership = self.membership();
            let me = self.identity().node_id;
            membership.nodes().map(|(id, _)| *id).filter(|id| *id != me).collect()
        };
        for id in peers {
            if let Ok(link) = self.link_to(id) {
                let request = link.request(pb::StatusRequest {});
                // What matters is a refusal, and the link notes that.
                let _ = link.answer(self.patience.election, link.client().status(request)).await;
            }
        }
    }
}

/// How long ago something was.
fn since(at: &openraft::type_config::alias::SerdeInstantOf<TypeConfig>) -> Duration {
    at.elapsed()
}

/// Looks after the membership until the store stops or is dropped.
pub(crate) async fn tend(store: Weak<RaftStore>) {
    let mut tick = interval(TICK);
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut sought = Instant::now();
    loop {
        tick.tick().await;
        let Some(store) = store.upgrade() else { return };
        if store.check().is_err() {
            return;
        }
        store.tend().await;
        if !store.contact() && sought.elapsed() > Duration::from_secs(1) {
            sought = Instant::now();
            store.seek().await;
        }
    }
}

/// Tells the cluster this member's addresses, until they are in the registry.
pub(crate) async fn announce(store: Weak<RaftStore>, addresses: super::join::Addresses, join: Vec<String>) {
    let mut complaint = None;
    loop {
        let Some(store) = store.upgrade() else { return };
        if store.check().is_err() {
            return;
        }
        let me = store.identity();
        let known = store.published.state.load().member(me.node_id).cloned();
        if known.is_some_and(|member| {
            member.retired || (member.peer_address == addresses.peer && member.api_address == addresses.api)
        }) {
            return;
        }
        // A member without any state may only just have joined: then the leader calls it soon.
        let known = store.published.state.load().revision() > 0;
        if known || !store.contact() {
            let command = Command::RegisterMember {
                node_id: Some(me.node_id),
                storage_id: me.storage_id,
                peer_address: addresses.peer.clone(),
                api_address: addresses.api.clone(),
            };
            let told = if known { store.propose_anywhere(store.own_envelope(command)).await.is_ok() } else { false };
            if !told {
                // Whoever leads looks for this member at its old address, so ask everybody.
                let known = store.membership();
                let known = known.nodes().filter(|(id, _)| **id != me.node_id).map(|(_, peer)| peer.address.clone());
                let asked: Vec<String> = join.iter().cloned().chain(known).collect();
                let request = addresses.moved(&me, store.published.state.load().history_id());
                if let Err(error) = super::join::ask(&asked, store.links.way(), &request).await {
                    let reason = error.to_string();
                    if complaint.as_ref() != Some(&reason) {
                        tracing::warn!(target: "smg", reason, "the cluster does not know this member's address yet");
                        complaint = Some(reason);
                    }
                }
            }
        }
        drop(store);
        sleep(TICK).await;
    }
}
