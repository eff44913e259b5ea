//! What goes wrong, one thing after the other and several at once, until it is told to end; then all of it is made good.

use std::sync::Arc;
use std::time::Duration;

use openraft::AsyncRuntime;
use smg_state::{Command, NodeId};

use super::clients::write;
use super::member::start;
use super::runtime::{Sim, WORLD};
use super::world::{GATEWAYS, World};
use super::{Faults, Shape};

/// Causes faults until `until`, in microseconds.
pub(super) async fn cause(world: Arc<World>, shape: Shape, until: u64) -> Faults {
    let mut faults = Faults::default();
    let mut disk_may_be_lost = true;
    while Sim::micros() < until {
        Sim::sleep(world.millis(200, 2_000)).await;
        let kind = world.random.lock().below(16);
        match kind {
            0..4 => {
                partition(&world, shape.gateways);
                faults.partitions += 1;
            }
            4 | 5 => {
                let Some(node) = victim(&world) else { continue };
                world.kill(node);
                back_later(&world, node, 50, 3_000);
                faults.crashes += 1;
            }
            6 => {
                let Some(node) = victim(&world) else { continue };
                let operations = world.random.lock().below(60);
                world.places.lock()[&node].disk.burn(operations);
                world.note(format_args!("member {node} will die after {operations} operations of its disk"));
                faults.crashes_in_writes += 1;
            }
            7 => {
                let Some(member) = victim(&world).and_then(|node| world.running(node)) else { continue };
                let pause = world.millis(100, 4_000);
                Sim::pause(member.owner, true);
                world.note(format_args!("member {} stands still for {pause:?}", member.identity.node_id));
                Sim::spawn_as(WORLD, async move {
                    Sim::sleep(pause).await;
                    Sim::pause(member.owner, false);
                });
                faults.pauses += 1;
            }
            8 => {
                let Some(node) = victim(&world) else { continue };
                let stall = world.millis(200, 5_000);
                let until = Sim::micros() + u64::try_from(stall.as_micros()).unwrap();
                world.trouble.lock().stalled.insert(node, until);
                world.note(format_args!("the disk of member {node} stalls for {stall:?}"));
                faults.stalls += 1;
            }
            9 => {
                let jump = i64::try_from(world.random.lock().below(1_200_000)).unwrap() - 600_000;
                world.trouble.lock().wall = jump;
                world.note(format_args!("the clocks on the wall are {jump} ms wrong"));
                faults.clock_jumps += 1;
            }
            10 | 11 => {
                let mut random = world.random.lock();
                let (lost, twice, late) = (random.next() % 12, random.next() % 20, random.next() % 40);
                drop(random);
                let mut trouble = world.trouble.lock();
                (trouble.lost, trouble.twice, trouble.late) = (lost, twice, late);
                faults.bad_networks += 1;
            }
            12 => {
                let Some(leader) = world.leader().and_then(|node| world.running(node)) else { continue };
                let voters: Vec<NodeId> = leader.raft.voter_ids().collect();
                let Some(heir) = world.pick(&voters) else { continue };
                let _ = leader.raft.trigger().transfer_leader(heir).await;
                faults.transfers += 1;
            }
            _ if disk_may_be_lost && lose_disk(&world) => {
                disk_may_be_lost = false;
                faults.disks_lost += 1;
            }
            _ => {}
        }
    }
    faults
}

/// Ends all that is wrong: everybody runs, and reaches everybody.
pub(super) fn end(world: &Arc<World>) {
    *world.trouble.lock() = Default::default();
    world.places.lock().values().for_each(|place| place.disk.defuse());
    for member in world.members() {
        Sim::pause(member.owner, false);
    }
    world.note("everything works again");
}

/// A member that runs; often the leader.
fn victim(world: &World) -> Option<NodeId> {
    let running: Vec<NodeId> = world.members().iter().map(|member| member.identity.node_id).collect();
    let leader = world.leader().filter(|_| world.chance(40));
    leader.or_else(|| world.pick(&running))
}

/// Has a member's process start again.
pub(super) fn back_later(world: &Arc<World>, node: NodeId, low: u64, high: u64) {
    let (world, pause) = (Arc::clone(world), world.millis(low, high));
    Sim::spawn_as(WORLD, async move {
        Sim::sleep(pause).await;
        let back = world.places.lock().get(&node).is_some_and(|place| !place.gone && place.owner.is_none());
        if back {
            start(&world, node);
        }
    });
}

/// Cuts the network somewhere, and mends it later.
fn partition(world: &Arc<World>, gateways: u64) {
    let hosts: Vec<u64> = world.nodes().into_iter().chain((0..gateways).map(|gateway| GATEWAYS + gateway)).collect();
    let lonely = world.leader().filter(|_| world.chance(50)).or_else(|| world.pick(&world.nodes())).unwrap_or_default();
    let mut random = world.random.lock();
    let sides: Vec<bool> = hosts.iter().map(|_| random.chance(50)).collect();
    let (shape, length) = (random.below(5), random.millis(200, 3_500));
    let one = hosts[random.below(hosts.len())];
    drop(random);
    let mut cuts = Vec::new();
    for (from, left) in hosts.iter().zip(&sides) {
        for (to, other_left) in hosts.iter().zip(&sides).filter(|(to, _)| *to != from) {
            let is_cut = match shape {
                // In two halves.
                0 => left != other_left,
                // One half does not reach the other one.
                1 => *left && !other_left,
                // One is alone.
                2 => *from == lonely || *to == lonely,
                // One hears others and is not heard, or the other way round.
                3 => {
                    if sides[0] {
                        *from == lonely
                    } else {
                        *to == lonely
                    }
                }
                // Two halves that only one can reach.
                _ => left != other_left && *from != one && *to != one,
            };
            if is_cut {
                cuts.push((*from, *to));
            }
        }
    }
    world
        .note(format_args!("a partition of shape {shape} around {lonely} for {length:?}: {} ways are cut", cuts.len()));
    world.trouble.lock().cuts.extend(cuts.iter().copied());
    let world = Arc::clone(world);
    Sim::spawn_as(WORLD, async move {
        Sim::sleep(length).await;
        cuts.iter().for_each(|cut| {
            world.trouble.lock().cuts.remove(cut);
        });
    });
}

/// A member's disk is lost. For a while somebody runs an empty one in its place, which nobody may listen to; then it is retired, and a new
/// member with an empty disk joins. Whether there is a member that can be missed.
fn lose_disk(world: &Arc<World>) -> bool {
    let Some(leader) = world.leader().and_then(|node| world.running(node)) else { return false };
    let metrics = leader.metrics();
    let settled = metrics.membership_config == metrics.committed_membership_config;
    let voters: Vec<NodeId> = leader.raft.voter_ids().collect();
    if !settled || voters.len() < 3 || voters.iter().any(|voter| world.running(*voter).is_none()) {
        return false;
    }
    let Some(node) = world.pick(&voters) else { return false };
    world.kill(node);
    world.note(format_args!("the disk of member {node} is lost"));
    let world = Arc::clone(world);
    Sim::spawn_as(WORLD, async move {
        let real = world.places.lock().remove(&node).unwrap();
        world.checks.lock().disk_lost(node);
        let impostor = world.random.lock().uuid();
        world.place(node, impostor);
        start_impostor(&world, node).await;
        world.kill(node);
        world.places.lock().insert(node, super::world::Place { gone: true, ..real });
        while write(&world, "operator", Command::RetireMembers { node_ids: vec![node] }).await.is_none() {
            Sim::sleep(Duration::from_millis(300)).await;
        }
        join(&world).await;
    });
    true
}

/// Runs a wiped member under its old number for some seconds.
async fn start_impostor(world: &Arc<World>, node: NodeId) {
    world.note(format_args!("an empty disk runs as member {node}"));
    start(world, node);
    Sim::sleep(world.millis(1_000, 5_000)).await;
}

/// A new member gets its number and runs.
pub(super) async fn join(world: &Arc<World>) {
    let storage_id = world.random.lock().uuid();
    loop {
        let peer_address = format!("{storage_id}:7401");
        let command = Command::RegisterMember { node_id: None, storage_id, peer_address, api_address: String::new() };
        if let Some(node) = write(world, "a new member", command).await.and_then(|outcome| outcome.node_id) {
            world.place(node, storage_id);
            return start(world, node);
        }
        Sim::sleep(Duration::from_millis(300)).await;
    }
}
