//! One member of the simulated cluster: the log, the database, the state machine, the snapshots, the identity checks and the rules of
//! membership that are shipped, on a simulated disk and network.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use futures::{Stream, TryStreamExt};
use openraft::async_runtime::WatchReceiver;
use openraft::errors::Fatal;
use openraft::storage::{EntryResponder, RaftLogReader, RaftStateMachine};
use openraft::type_config::TypeConfigExt;
use openraft::{AsyncRuntime, ChangeMembers, OptionalSend, Raft, RaftMetrics, ServerState};
use parking_lot::Mutex;
use smg_controlplane::sync::feed::{Feed, Published as PublishedSnapshot};
use smg_fleet::Revision;
use smg_state::{Envelope, NodeId, Outcome, State};
use tokio::sync::mpsc;

use super::super::Files;
use super::super::database;
use super::super::log::{LogStore, Shared};
use super::super::machine::{Builder, Machine};
use super::super::members::{KeptUp, change_of, view};
use super::super::options::{NodeIdentity, RaftOptions};
use super::super::propose::{Attempts, DEADLINE, LEADER_DEADLINE, Local, LocalRead, PAUSE};
use super::super::snapshot::StateSnapshot;
use super::super::types::{LogId, Peer, SnapshotMeta, StoredMembership};
use super::super::writer::{Job, Write, Writer, batch};
use super::checks::Held;
use super::network::{Answer, Message, Peers, call};
use super::runtime::{Owner, Sim};
use super::world::{World, address};
use crate::StoreError;
use crate::published::Published;

openraft::declare_raft_types!(
    /// What is shipped, on the simulated runtime.
    pub(super) SimConfig:
        D = Envelope,
        R = Option<Outcome>,
        NodeId = u64,
        Node = Peer,
        Term = u64,
        LeaderId = openraft::impls::leader_id_adv::LeaderId<Self::Term, Self::NodeId>,
        AsyncRuntime = Sim,
);

pub(super) type Node = Raft<SimConfig, Observed>;

/// Entries between two snapshots, and to keep behind one: few, so that snapshots and purges are part of every run.
const SNAPSHOT_EVERY: u64 = 20;
const KEEP_ENTRIES: u64 = 8;
const SETTLE: Duration = Duration::from_millis(300);
const TICK: Duration = Duration::from_millis(250);

/// A running process of a member.
pub(super) struct Member {
    pub owner: Owner,
    pub identity: NodeIdentity,
    pub raft: Node,
    pub published: Arc<Published>,
    pub feed: Arc<Feed>,
    pub options: RaftOptions,
}

impl Member {
    pub fn metrics(&self) -> RaftMetrics<SimConfig> {
        self.raft.metrics().borrow_watched().clone()
    }

    pub fn leads(&self) -> bool {
        self.raft.metrics().borrow_watched().state == ServerState::Leader
    }

    pub fn state(&self) -> Arc<State> {
        self.published.state.load_full()
    }

    /// Makes a command durable if this member leads.
    pub async fn propose_here(&self, envelope: Envelope) -> Local {
        let raft = self.raft.clone();
        let write = Sim::spawn(async move { raft.client_write(envelope).await });
        match Sim::timeout(LEADER_DEADLINE, write).await {
            Err(_) => Local::unconfirmed(),
            Ok(Err(killed)) => Local::Unknown(killed.to_string()),
            Ok(Ok(result)) => {
                let local = Local::of(result);
                if let Local::Done(outcome) = &local {
                    let seen = self.state().revision();
                    assert!(
                        seen >= outcome.revision,
                        "an outcome at {} came when {seen} could be read",
                        outcome.revision
                    );
                }
                local
            }
        }
    }

    /// Makes a command durable, here or on the member that leads.
    pub async fn propose(self: &Arc<Self>, world: &Arc<World>, envelope: Envelope) -> Result<Outcome, StoreError> {
        let deadline = SimConfig::now() + DEADLINE;
        let mut attempts = Attempts::new(envelope.command_id);
        while SimConfig::now() + attempts.worthwhile() < deadline {
            let leader = self.metrics().current_leader;
            let here = leader == Some(self.identity.node_id);
            let left = deadline - SimConfig::now();
            let attempt = match leader {
                Some(_) if here => Sim::timeout(left, self.propose_here(envelope.clone())).await,
                Some(leader) => {
                    let message = Message::Propose(Box::new(smg_state::codec::envelope_to_pb(&envelope)));
                    Ok(match call(world, &self.identity, leader, message, left).await {
                        Ok(Answer::Proposed(local)) => local,
                        Ok(_) => unreachable!("another answer"),
                        Err(error) => error.of_proposal(),
                    })
                }
                None => Ok(Local::NotLeader(None)),
            };
            let attempt = attempt.unwrap_or_else(|_| Local::Unknown("no answer in time".into()));
            if let Some(answer) = attempts.take(attempt, here) {
                return answer;
            }
            Sim::sleep(PAUSE).await;
        }
        Err(attempts.end())
    }

    /// A linearizable read: the revision that this member sees after a barrier. `None` = it could not be had.
    pub async fn read(self: &Arc<Self>, world: &Arc<World>) -> Option<Revision> {
        let leader = self.metrics().current_leader?;
        let read = if leader == self.identity.node_id {
            Sim::timeout(LEADER_DEADLINE, LocalRead::ask(&self.raft)).await.ok()?
        } else {
            match call(world, &self.identity, leader, Message::ReadIndex, LEADER_DEADLINE).await {
                Ok(Answer::Read(read)) => read,
                _ => return None,
            }
        };
        let LocalRead::Index(index) = read else { return None };
        let wait = self.raft.wait(Some(LEADER_DEADLINE));
        wait.applied_index_at_least(Some(index), "a linearizable read").await.ok()?;
        Some(self.state().revision())
    }
}

/// Starts the process of a member on its disk. It founds the cluster if it is the first.
pub(super) fn start(world: &Arc<World>, node: NodeId) {
    let owner = world.owner();
    Sim::drift(owner, i64::try_from(world.random.lock().below(20_000)).unwrap() - 10_000);
    let (disk, path, identity) = {
        let mut places = world.places.lock();
        let place = places.get_mut(&node).unwrap();
        assert_eq!(place.owner.replace(owner), None, "it runs already");
        (place.disk.clone(), place.path.clone(), place.identity)
    };
    let world = Arc::clone(world);
    Sim::spawn_as(owner, async move {
        let opened = database::open_with(|builder| builder.create_with_backend(disk.handle()));
        let (database, recovered) =
            opened.unwrap_or_else(|error| panic!("member {node} cannot open its disk: {error}"));
        let (found, snapshots) =
            Files::fit(&path, &recovered).unwrap_or_else(|error| panic!("member {node} cannot use its disk: {error}"));
        assert_eq!(found, identity);
        let shared = Arc::new(Shared::new(database, &recovered));
        let (sender, jobs) = mpsc::channel(1024);
        let mut log = LogStore::new(Arc::clone(&shared), sender);
        world.trace(|| format!("member {node} recovered {recovered:?}"));
        let snapshot = snapshots.current().and_then(|snapshot| snapshot.meta.last_log_id);
        let held = held(&mut log, recovered.last_purged, snapshot).await;
        world.checks.lock().reopened(node, held);
        Sim::spawn(write(Arc::clone(&world), node, Arc::clone(&shared), jobs));

        let machine = Machine::new(snapshots, Arc::clone(&shared.failure));
        let published = machine.published();
        let observed = Observed { node, machine, published: Arc::clone(&published), world: Arc::clone(&world) };
        let options = RaftOptions {
            with_peers: true,
            snapshot_every: SNAPSHOT_EVERY,
            keep_entries: KEEP_ENTRIES,
            settle: SETTLE,
            ..RaftOptions::new(&path, address(node))
        };
        let config = Arc::new(options.config().validate().unwrap());
        let peers = Peers { world: Arc::clone(&world), identity };
        let raft = Node::new(node, config, peers, log, observed).await;
        let raft = raft.unwrap_or_else(|error| panic!("member {node} does not start: {error}"));
        let feed = Arc::new(Feed::new(&published.state.load()));
        let member = Arc::new(Member { owner, identity, raft: raft.clone(), published, feed, options });
        world.places.lock().get_mut(&node).unwrap().running = Some(Arc::clone(&member));
        world.note(format_args!("member {node} runs as {owner}"));
        if !raft.is_initialized().await.unwrap() {
            if world.checks.lock().is_empty() {
                let peer = world.places.lock()[&node].peer();
                raft.initialize(std::collections::BTreeMap::from([(node, peer)])).await.unwrap();
            }
        } else if raft.voter_ids().eq([node]) {
            raft.trigger().elect(false).await.unwrap();
        }
        Sim::spawn(publish(Arc::clone(&member)));
        tend(&world, &member).await;
    });
}

/// What a disk holds.
async fn held(log: &mut LogStore, purged: Option<LogId>, snapshot: Option<LogId>) -> Held {
    let vote = RaftLogReader::<SimConfig>::read_vote(log).await.unwrap();
    let entries = RaftLogReader::<SimConfig>::try_get_log_entries(log, ..).await.unwrap();
    Held {
        log: entries.into_iter().map(|entry| (entry.log_id.index(), entry.log_id)).collect(),
        purged,
        snapshot: snapshot.map_or(0, |id| id.index()),
        truncating: None,
        vote,
    }
}

/// The log's writer, without its thread: each transaction takes its time, and then happens at once.
async fn write(world: Arc<World>, node: NodeId, shared: Arc<Shared>, mut jobs: mpsc::Receiver<Job>) {
    let owner = Sim::owner();
    let disk = world.places.lock()[&node].disk.clone();
    let mut writer = Writer::new(Arc::clone(&shared));
    while let Some(first) = jobs.recv().await {
        Sim::sleep(world.write_time(node)).await;
        let jobs = batch(first, &mut jobs);
        let writes: Vec<Write> = jobs.iter().map(|(write, _)| write.clone()).collect();
        writer.turn(jobs);
        if disk.is_burnt() {
            // It is dead from here on; the world clears it away.
            world.checks.lock().dying(node, &writes);
            Sim::pause(owner, true);
            let _ = world.dying.send(node);
            return std::future::pending().await;
        }
        if let Some(reason) = shared.failure.reason() {
            panic!("the store of member {node} has failed: {reason}");
        }
        world.checks.lock().written(node, owner, &writes);
        world.trace(|| format!("member {node} has written {}", summary(&writes)));
    }
}

/// What was written, in short.
fn summary(writes: &[Write]) -> String {
    let each = writes.iter().map(|write| match write {
        Write::Append(framed) => format!("append {:?}", framed.iter().map(|(index, _)| *index).collect::<Vec<_>>()),
        Write::Truncate(from) => format!("truncate from {from}"),
        Write::Purge(upto, _) => format!("purge up to {upto}"),
        Write::Vote(_) => "vote".into(),
        Write::Committed(_) => "committed".into(),
        Write::Close => "close".into(),
    });
    each.collect::<Vec<_>>().join(", ")
}

/// Publishes the state to gateways as it changes.
async fn publish(member: Arc<Member>) {
    loop {
        let state = member.state();
        let known = member.feed.subscribe().borrow().snapshot.revision;
        if state.revision() != known {
            member.feed.publish(PublishedSnapshot::new(&state));
        }
        Sim::sleep(Duration::from_millis(25)).await;
    }
}

/// Looks after the membership while this member leads.
async fn tend(world: &Arc<World>, member: &Arc<Member>) {
    let kept_up = Mutex::new(KeptUp::<SimConfig>::default());
    loop {
        Sim::sleep(TICK).await;
        let metrics = member.metrics();
        if let Err(fatal) = &metrics.running_state {
            assert!(matches!(fatal, Fatal::Stopped), "member {} has stopped: {fatal}", member.identity.node_id);
            return;
        }
        if metrics.state != ServerState::Leader {
            kept_up.lock().clear();
            continue;
        }
        let patience = member.options.patience;
        let fresh = patience.election.max(4 * patience.heartbeat);
        let registered = member.state().members().cloned().collect();
        let step = view(&metrics, registered, &mut kept_up.lock(), fresh, SETTLE).and_then(|view| view.next());
        let left_behind = metrics.membership_config == metrics.committed_membership_config
            && metrics.membership_config.get_joint_config().len() > 1;
        let change = match step {
            Some(step) => {
                world.note(format_args!("member {} changes the membership: {step:?}", member.identity.node_id));
                change_of(step)
            }
            None if left_behind => ChangeMembers::AddVoterIds(Default::default()),
            None => continue,
        };
        let _ = Sim::timeout(Duration::from_secs(10), member.raft.change_membership(change, false)).await;
    }
}

/// The state machine, and what is checked around it.
pub(super) struct Observed {
    node: NodeId,
    machine: Machine,
    published: Arc<Published>,
    world: Arc<World>,
}

impl RaftStateMachine<SimConfig> for Observed {
    type SnapshotData = Arc<State>;
    type SnapshotBuilder = Builder;

    async fn applied_state(&mut self) -> Result<(Option<LogId>, StoredMembership), io::Error> {
        RaftStateMachine::<SimConfig>::applied_state(&mut self.machine).await
    }

    async fn apply<S>(&mut self, entries: S) -> Result<(), io::Error>
    where
        S: Stream<Item = Result<EntryResponder<SimConfig>, io::Error>> + Unpin + OptionalSend,
    {
        let (world, node) = (Arc::clone(&self.world), self.node);
        let mut last = None;
        let entries = entries.inspect_ok(|(entry, _)| {
            world.checks.lock().applying(node, entry);
            last = Some(entry.log_id.index());
        });
        RaftStateMachine::<SimConfig>::apply(&mut self.machine, entries).await?;
        if let Some(last) = last {
            world.checks.lock().applied(node, last, &self.published.state.load());
        }
        Ok(())
    }

    async fn get_snapshot_builder(&mut self) -> Builder {
        RaftStateMachine::<SimConfig>::get_snapshot_builder(&mut self.machine).await
    }

    async fn install_snapshot(&mut self, meta: &SnapshotMeta, state: Arc<State>) -> Result<(), io::Error> {
        RaftStateMachine::<SimConfig>::install_snapshot(&mut self.machine, meta, state).await?;
        self.world.checks.lock().installed(self.node, meta.last_log_id, &self.published.state.load());
        self.world.note(format_args!("member {} has a snapshot up to {:?}", self.node, meta.last_log_id));
        Ok(())
    }

    async fn get_current_snapshot(&mut self) -> Result<Option<StateSnapshot>, io::Error> {
        RaftStateMachine::<SimConfig>::get_current_snapshot(&mut self.machine).await
    }
}
