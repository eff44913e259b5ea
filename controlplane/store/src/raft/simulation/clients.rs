//! Those who write and read: operators that know of the three classes of outcome, and gateways that follow.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use openraft::AsyncRuntime;
use smg_controlplane::sync::session::{Pauses, Session, Step};
use smg_fleet::worker::WorkerPatch;
use smg_fleet::{Intent, Origin, PolicyDocument, Snapshot, WorkerId, WorkerSpec, WorkerType, wire};
use smg_services::sync::{Down, down};
use smg_state::Command;
use tokio::sync::mpsc;
use uuid::Uuid;

use super::member::Member;
use super::runtime::Sim;
use super::world::{GATEWAYS, World};
use super::{Planted, planted_here};
use crate::StoreError;

/// The workers that are written.
const WORKERS: u128 = 4;
/// How often an operator repeats a command of whose outcome it knows nothing.
const REPEATS: usize = 3;

fn worker(n: usize) -> WorkerId {
    WorkerId(Uuid::from_u128(0xa000 + n as u128 % WORKERS))
}

/// A command on one of few objects, each different from all others.
fn command(world: &World, member: &Member, number: u64) -> Command {
    let (kind, n) = {
        let mut random = world.random.lock();
        (random.below(10), random.below(WORKERS as usize))
    };
    match kind {
        0..3 => {
            let spec = Box::new(WorkerSpec::new(format!("http://worker-{n}:1"), WorkerType::Decode));
            Command::CreateWorker { id: worker(n), spec, origin: Origin::Api }
        }
        3..7 => {
            let priority = Some(u32::try_from(number % 1_000_000).unwrap());
            Command::PatchWorker { id: worker(n), patch: Box::new(WorkerPatch { priority, ..WorkerPatch::default() }) }
        }
        7 => match member.state().worker(worker(n)).and_then(|worker| worker.job.clone()) {
            Some(job) => Command::CompleteJob { id: worker(n), number: job.number, facts: Some(Box::default()) },
            None => Command::SetIntent { id: worker(n), intent: Intent::Draining },
        },
        8 => Command::RemoveWorker { id: worker(n) },
        _ => Command::PutPolicy { model: format!("model-{n}"), document: Box::new(PolicyDocument::default()) },
    }
}

/// Writes and reads until it is quiet, at any member that runs.
pub(super) async fn operate(world: Arc<World>, name: u64) {
    let mut number = name * 100_000;
    while !world.is_quiet() {
        Sim::sleep(world.millis(5, 80)).await;
        let members = world.members();
        let Some(member) = pick(&world, &members) else { continue };
        if world.chance(25) {
            let before = world.checks.lock().highest;
            if let Ok(Some(seen)) = Sim::timeout(Duration::from_secs(9), member.read(&world)).await {
                // A process that died meanwhile has answered nobody.
                if is_alive(&world, &member) {
                    world.checks.lock().read(before, seen);
                }
            }
            continue;
        }
        number += 1;
        let command = command(&world, &member, number);
        write(&world, &format!("operator {name}"), command).await;
    }
}

fn pick(world: &World, members: &[Arc<Member>]) -> Option<Arc<Member>> {
    (!members.is_empty()).then(|| Arc::clone(&members[world.random.lock().below(members.len())]))
}

fn is_alive(world: &World, member: &Member) -> bool {
    world.running(member.identity.node_id).is_some_and(|now| now.owner == member.owner)
}

/// Has one command done, at one member after the other while the outcome is unknown. Returns whether it is known to have happened.
pub(super) async fn write(world: &Arc<World>, actor: &str, command: Command) -> Option<smg_state::Outcome> {
    let envelope = world.envelope(actor, command);
    let id = envelope.command_id;
    let mut unknown = false;
    for _ in 0..REPEATS {
        let members = world.members();
        let Some(member) = pick(world, &members) else { break };
        let (sender, answer) = tokio::sync::oneshot::channel();
        let (here, at, proposed) = (Arc::clone(world), Arc::clone(&member), envelope.clone());
        // In the member's process: when it dies, the connection breaks.
        Sim::spawn_as(member.owner, async move {
            let result = at.propose(&here, proposed).await;
            if let Ok(outcome) = &result {
                here.checks.lock().acknowledged(id, outcome);
            }
            drop(sender.send(result));
        });
        match answer.await {
            Ok(Ok(outcome)) => {
                world.note(format_args!("{actor}: {} done at {}", envelope.command.name(), outcome.revision));
                return Some(outcome);
            }
            Ok(Err(StoreError::Unavailable(_) | StoreError::Closed)) if !unknown => {
                world.checks.lock().denied(id);
                return None;
            }
            Ok(Err(_)) | Err(_) => {
                unknown = true;
                world.checks.lock().counts.unknown += 1;
                Sim::sleep(world.millis(10, 400)).await;
            }
        }
    }
    None
}

/// A gateway: subscribes at some member, stays while the stream holds, resumes elsewhere, and starts again from what it has stored.
pub(super) async fn follow(world: Arc<World>, gateway: u64) {
    let mut have = Snapshot::default();
    let mut stored = have.clone();
    loop {
        Sim::sleep(world.millis(20, 600)).await;
        if world.chance(5) {
            // The process starts anew.
            have = stored.clone();
            world.checks.lock().gateway_restarts(gateway, have.revision);
        }
        let members = world.members();
        let Some(member) = pick(&world, &members) else { continue };
        let node = member.identity.node_id;
        let (down, mut received) = mpsc::channel(4);
        let (up, acknowledged) = mpsc::channel(4);
        let known = (have.revision > 0 && !planted_here(Planted::GatewaySaysNothing))
            .then_some((have.history_id, have.revision));
        Sim::spawn_as(member.owner, serve(Arc::clone(&world), member, gateway, known, down, acknowledged));
        let mut partial = Vec::new();
        // A stream that is silent for long is dead.
        while let Ok(Some(message)) = Sim::timeout(Duration::from_secs(3), received.recv()).await {
            if world.is_cut(node, GATEWAYS + gateway) {
                break;
            }
            let Some((nonce, next)) = take(&have, &mut partial, message) else { continue };
            let answer = match next {
                Ok(next) => {
                    have = next;
                    world.checks.lock().gateway(gateway, &have);
                    if world.chance(50) {
                        stored = have.clone();
                    }
                    Up::Ack(nonce)
                }
                Err(()) => Up::Resync,
            };
            Sim::sleep(world.millis(0, 20)).await;
            if up.send(answer).await.is_err() || world.chance(3) {
                break;
            }
        }
    }
}

/// What a gateway says.
enum Up {
    Ack(u64),
    Resync,
}

/// What a gateway makes of a message: the snapshot that it leads to, or that it does not fit.
fn take(have: &Snapshot, partial: &mut Vec<u8>, message: Down) -> Option<(u64, Result<Snapshot, ()>)> {
    match message.message? {
        down::Message::Full(chunk) => {
            partial.extend_from_slice(&chunk.data);
            if !chunk.last {
                return None;
            }
            Some((chunk.nonce, wire::decode_snapshot(&std::mem::take(partial)).map_err(drop)))
        }
        down::Message::Delta(message) => {
            let mut delta = wire::delta_from_pb(message.delta?).unwrap();
            if planted_here(Planted::GatewayForgetsRemovals) {
                delta.removed_workers.clear();
                delta.result_checksum = unchecked(have, &delta);
            }
            Some((message.nonce, have.apply(&delta).map_err(drop)))
        }
        _ => None,
    }
}

/// The checksum of whatever a delta leads to.
fn unchecked(have: &Snapshot, delta: &smg_fleet::Delta) -> u32 {
    let mut next = Snapshot { revision: delta.to_revision, ..have.clone() };
    delta.removed_workers.iter().for_each(|id| drop(next.workers.remove(id)));
    delta.removed_policies.iter().for_each(|model| drop(next.policies.remove(model)));
    next.workers.extend(delta.upserted_workers.iter().map(|worker| (worker.id, Arc::clone(worker))));
    next.policies.extend(delta.upserted_policies.iter().map(|record| (record.model.clone(), Arc::clone(record))));
    next.tokens = delta.tokens.iter().map(|token| (token.id, Arc::clone(token))).collect();
    next.checksum()
}

/// The member's side of a stream: the session that is shipped, and a slow network under it.
async fn serve(
    world: Arc<World>,
    member: Arc<Member>,
    gateway: u64,
    have: Option<(Uuid, u64)>,
    down: mpsc::Sender<Down>,
    mut up: mpsc::Receiver<Up>,
) {
    let pauses = Pauses { refused: Duration::from_millis(500), full: Duration::from_millis(200) };
    let (mut session, begun) = (Session::new(pauses, have), tokio::time::Instant::now());
    let latest = member.feed.subscribe();
    let mut on_the_way: VecDeque<Down> = VecDeque::new();
    let mut idle = 0;
    loop {
        let now = begun + Duration::from_micros(Sim::micros());
        while let Ok(answer) = up.try_recv() {
            match answer {
                Up::Ack(nonce) => drop(session.ack(nonce, now)),
                Up::Resync => session.resync(),
            }
        }
        let published = Arc::clone(&latest.borrow());
        if let Step::Send(messages) = session.step(&member.feed, &published, now) {
            on_the_way.extend(messages);
        }
        if !world.is_cut(member.identity.node_id, GATEWAYS + gateway) {
            while let Some(message) = on_the_way.pop_front() {
                Sim::sleep(world.millis(0, 5)).await;
                if down.send(message).await.is_err() {
                    return;
                }
                idle = 0;
            }
        }
        idle += 1;
        if down.is_closed() || idle > 500 {
            return;
        }
        Sim::sleep(Duration::from_millis(20)).await;
    }
}
