//! A deterministic simulation of the replicated control plane: whole clusters in one thread, driven by a seed.
//!
//! **What is real**: the consensus library with the configuration that is shipped, the log and its database, the writer's transactions, the
//! state machine and its snapshots, the messages between members and who may send them, the three classes of outcome, the rules of
//! membership, and on the way to gateways the feed and the session of the sync service. **What is simulated**: the runtime with its clock
//! ([`runtime`]), the network ([`network`]), the disk ([`disk`]), and those who use the cluster ([`clients`]).
//!
//! A run founds a cluster of three to five members and lets operators write and read and gateways follow, while everything goes wrong that
//! [`faults`] knows: partitions of all shapes, messages lost, late and repeated, deaths between and within writes with the loss of what was
//! not synced, lost disks, members that stand still, clocks of different rates and jumps on the wall, disks that stall, leaders that hand
//! over. [`checks`] says what must hold at every moment. Then all is made good, and within a bounded time there must be a leader, a new
//! write, all voters, equal states, and gateways that have the newest revision (liveness).
//!
//! The same seed gives the same run, event for event. That the checks can fail is shown by planting faults in the code that is shipped
//! ([`super::mutant`]) and in the gateways ([`Planted`]), each of which must be found.
//!
//! `make simulation` runs it long, in a release build, and writes `docs/reports/cluster-simulation.md`; `SEEDS=N` makes that N seeds instead
//! of 1,000, `JOBS=N` N at a time;
//! `SMG_MUTANT=NAME cargo nextest run -p smg-store every_planted` plants one fault only;
//! `SMG_SEED=N cargo nextest run -p smg-store one_seed --no-capture` shows one run, with `SMG_TRACE=1` message by message.

use std::cell::Cell;
use std::sync::Arc;
use std::time::Duration;

use openraft::AsyncRuntime;
use smg_state::{Command, NodeId, codec};
use tokio::sync::mpsc;

mod checks;
mod clients;
pub(super) mod disk;
mod faults;
mod member;
mod network;
pub(super) mod random;
mod runs;
mod runtime;
mod world;

use checks::Counts;
use random::Random;
use runtime::{Sim, WORLD};
use world::World;

/// How long things go wrong, in simulated seconds.
const TROUBLE: u64 = 20;
/// How long the cluster may take to be well again.
const RECOVERY: Duration = Duration::from_secs(60);

/// A fault of a gateway, made on purpose.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Planted {
    /// A gateway does not take workers away, and checks no result.
    GatewayForgetsRemovals,
    /// A gateway does not say what it has when it subscribes.
    GatewaySaysNothing,
}

thread_local! {
    static PLANTED: Cell<Option<Planted>> = const { Cell::new(None) };
}

fn planted_here(planted: Planted) -> bool {
    PLANTED.with(|now| now.get() == Some(planted))
}

/// The size of a run.
#[derive(Debug, Clone, Copy)]
struct Shape {
    members: usize,
    gateways: u64,
    operators: u64,
}

/// How often what went wrong.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Faults {
    partitions: u64,
    crashes: u64,
    crashes_in_writes: u64,
    disks_lost: u64,
    pauses: u64,
    stalls: u64,
    clock_jumps: u64,
    bad_networks: u64,
    transfers: u64,
}

/// What a run was.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Run {
    events: Vec<String>,
    counts: Counts,
    faults: Faults,
    /// Simulated microseconds.
    micros: u64,
    /// From the end of all faults until the cluster was well, in simulated microseconds.
    recovery: u64,
    /// Canonical bytes of the state at the end.
    state: Vec<u8>,
    polls: u64,
}

/// Runs a seed. Panics at the first thing that must not be.
fn run(seed: u64) -> Run {
    let (mut run, polls) = Sim::run(seed, scenario(seed));
    run.polls = polls;
    run
}

async fn scenario(seed: u64) -> Run {
    let mut random = Random::new(seed);
    let shape =
        Shape { members: 3 + random.below(3), gateways: 2 + random.next() % 7, operators: 2 + random.next() % 3 };
    let (dying, mut dead) = mpsc::unbounded_channel();
    let world = World::new(seed, dying);
    world.note(format_args!("seed {seed}: {shape:?}"));
    let reaper = Arc::clone(&world);
    Sim::spawn_as(WORLD, async move {
        while let Some(node) = dead.recv().await {
            reaper.kill(node);
            faults::back_later(&reaper, node, 50, 3_000);
        }
    });
    found(&world, shape.members).await;
    for operator in 0..shape.operators {
        Sim::spawn_as(WORLD, clients::operate(Arc::clone(&world), operator));
    }
    for gateway in 0..shape.gateways {
        Sim::spawn_as(WORLD, clients::follow(Arc::clone(&world), gateway));
    }
    let faults = faults::cause(Arc::clone(&world), shape, Sim::micros() + TROUBLE * 1_000_000).await;
    faults::end(&world);
    let ended = Sim::micros();
    let state = recover(&world, shape).await;
    let (counts, micros) = (world.checks.lock().counts, Sim::micros());
    Run { events: world.events(), counts, faults, micros, recovery: micros - ended, state, polls: 0 }
}

/// As many voters as so many members make.
fn voters_of(members: usize) -> usize {
    members - (members + 1) % 2
}

async fn found(world: &Arc<World>, members: usize) {
    let founder = smg_state::members::FOUNDER;
    let (storage_id, history_id) = {
        let mut random = world.random.lock();
        (random.uuid(), random.uuid())
    };
    world.place(founder, storage_id);
    member::start(world, founder);
    let name = Command::InitCluster { cluster_id: world.cluster_id, history_id };
    let register = Command::RegisterMember {
        node_id: Some(founder),
        storage_id,
        peer_address: world::address(founder),
        api_address: String::new(),
    };
    for command in [name, register] {
        while clients::write(world, "the founder", command.clone()).await.is_none() {
            Sim::sleep(Duration::from_millis(100)).await;
        }
    }
    for _ in 1..members {
        faults::join(world).await;
    }
    until("all have joined", || well(world).is_some()).await;
}

async fn until(what: &str, mut condition: impl FnMut() -> bool) {
    let deadline = Sim::micros() + u64::try_from(RECOVERY.as_micros()).unwrap();
    while !condition() {
        assert!(Sim::micros() < deadline, "not within {RECOVERY:?}: {what}");
        Sim::sleep(Duration::from_millis(50)).await;
    }
}

/// The leader, when there is one with all the voters there should be, and everybody runs.
fn well(world: &World) -> Option<NodeId> {
    let nodes = world.nodes();
    if nodes.iter().any(|node| world.running(*node).is_none()) {
        return None;
    }
    let leader = world.leader()?;
    let metrics = world.running(leader)?.metrics();
    let settled = metrics.membership_config == metrics.committed_membership_config
        && metrics.membership_config.get_joint_config().len() == 1;
    let voters: Vec<NodeId> = metrics.membership_config.voter_ids().collect();
    let right = voters.len() == voters_of(nodes.len()) && voters.iter().all(|voter| nodes.contains(voter));
    (settled && right).then_some(leader)
}

/// After all faults: the cluster must become well by itself. Returns the bytes of its state.
async fn recover(world: &Arc<World>, shape: Shape) -> Vec<u8> {
    until("a leader and all voters", || {
        // Whoever was killed is started again, unless that is under way or it is gone for good.
        well(world).is_some() && world.nodes().len() == shape.members
    })
    .await;
    world.silence();
    let last = Command::PutPolicy { model: "last".into(), document: Box::default() };
    let deadline = Sim::micros() + u64::try_from(RECOVERY.as_micros()).unwrap();
    while clients::write(world, "the last operator", last.clone()).await.is_none() {
        assert!(Sim::micros() < deadline, "no write was acknowledged after all faults");
    }
    until("equal states, and gateways that have them", || {
        let checks = world.checks.lock();
        let (revision, index) = (checks.revision(), checks.last());
        let same = |member: &Arc<member::Member>| {
            member.metrics().last_applied.is_some_and(|applied| applied.index() == index)
                && member.state().revision() == revision
        };
        world.members().iter().all(same) && (0..shape.gateways).all(|gateway| checks.gateway_has(gateway) == revision)
    })
    .await;
    let members = world.members();
    let bytes: Vec<Vec<u8>> = members.iter().map(|member| codec::encode_state(&member.state())).collect();
    assert!(bytes.windows(2).all(|pair| pair[0] == pair[1]), "the states differ at the end");
    members.iter().for_each(|member| world.checks.lock().finished(&member.state()));
    bytes.into_iter().next().unwrap_or_default()
}
