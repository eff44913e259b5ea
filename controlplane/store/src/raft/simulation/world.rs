//! What a run consists of besides its tasks: the places of the members, the network between them, the clocks, the log of events.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use smg_messages::disk as pb;
use smg_state::{Command, Envelope, NodeId};
use tempfile::TempDir;
use tokio::sync::mpsc;
use uuid::Uuid;

use super::super::database;
use super::super::options::NodeIdentity;
use super::super::types::Peer;
use super::checks::Checks;
use super::disk::{Disk, Loss};
use super::member::Member;
use super::random::Random;
use super::runtime::{Owner, Sim};

/// A member or a gateway, on the network.
pub(super) type Host = u64;
/// The hosts of gateways begin here.
pub(super) const GATEWAYS: Host = 1_000;

/// What is wrong with the network and the disks now.
#[derive(Debug, Clone, Default)]
pub(super) struct Trouble {
    /// Who does not reach whom.
    pub cuts: BTreeSet<(Host, Host)>,
    /// Of a hundred messages, how many are lost, come twice, or come late.
    pub lost: u64,
    pub twice: u64,
    pub late: u64,
    /// Until when a disk takes no write, in microseconds.
    pub stalled: BTreeMap<NodeId, u64>,
    /// How wrong the clocks on the wall are, in milliseconds.
    pub wall: i64,
}

/// Where a member lives, which outlives its processes.
pub(super) struct Place {
    pub disk: Disk,
    pub path: PathBuf,
    pub identity: NodeIdentity,
    /// Its process.
    pub owner: Option<Owner>,
    /// Its process, once it has come up.
    pub running: Option<Arc<Member>>,
    /// It will never run again.
    pub gone: bool,
}

impl Place {
    pub fn peer(&self) -> Peer {
        Peer { address: address(self.identity.node_id), storage_id: self.identity.storage_id }
    }
}

/// Where a member is reached; nothing listens there.
pub(super) fn address(node: NodeId) -> String {
    format!("member-{node}:7401")
}

pub(super) struct World {
    pub checks: Mutex<Checks>,
    pub random: Mutex<Random>,
    pub places: Mutex<BTreeMap<NodeId, Place>>,
    pub trouble: Mutex<Trouble>,
    pub cluster_id: Uuid,
    /// Members whose process dies in the middle of a write.
    pub dying: mpsc::UnboundedSender<NodeId>,
    /// Whether every message is noted.
    traced: bool,
    /// Operators write no more.
    quiet: AtomicBool,
    events: Mutex<Vec<String>>,
    directory: TempDir,
    owners: AtomicU64,
}

impl World {
    pub fn new(seed: u64, dying: mpsc::UnboundedSender<NodeId>) -> Arc<Self> {
        let mut random = Random::new(seed ^ 0x5eed);
        Arc::new(Self {
            checks: Mutex::default(),
            cluster_id: random.uuid(),
            random: Mutex::new(random),
            places: Mutex::default(),
            trouble: Mutex::default(),
            dying,
            traced: std::env::var_os("SMG_TRACE").is_some(),
            quiet: AtomicBool::new(false),
            events: Mutex::default(),
            directory: TempDir::new_in("/dev/shm").unwrap_or_else(|_| TempDir::new().unwrap()),
            owners: AtomicU64::new(1),
        })
    }

    /// Notes an event.
    pub fn note(&self, event: impl std::fmt::Display) {
        let line = format!("{:>9.3} {event}", Sim::micros() as f64 / 1_000.0);
        if self.traced {
            println!("{line}");
        }
        self.events.lock().push(line);
    }

    /// Notes what is only of use when one run is looked at (`SMG_TRACE`).
    pub fn trace(&self, event: impl FnOnce() -> String) {
        if self.traced {
            self.note(event());
        }
    }

    pub fn events(&self) -> Vec<String> {
        self.events.lock().clone()
    }

    pub fn is_quiet(&self) -> bool {
        self.quiet.load(Ordering::Relaxed)
    }

    pub fn silence(&self) {
        self.quiet.store(true, Ordering::Relaxed);
    }

    /// A number for a process.
    pub fn owner(&self) -> Owner {
        self.owners.fetch_add(1, Ordering::Relaxed)
    }

    pub fn chance(&self, percent: u64) -> bool {
        self.random.lock().chance(percent)
    }

    pub fn millis(&self, low: u64, high: u64) -> Duration {
        self.random.lock().millis(low, high)
    }

    pub fn pick<T: Copy>(&self, of: &[T]) -> Option<T> {
        self.random.lock().pick(of)
    }

    /// A command of somebody, at the time on the wall.
    pub fn envelope(&self, actor: &str, command: Command) -> Envelope {
        let now = 1_700_000_000_000 + i64::try_from(Sim::micros() / 1_000).unwrap() + self.trouble.lock().wall;
        Envelope {
            command_id: self.random.lock().uuid(),
            actor: actor.into(),
            proposed_at_unix_ms: u64::try_from(now).unwrap(),
            expected_revision: None,
            command,
        }
    }

    /// Gives a member a place with an empty log.
    pub fn place(&self, node_id: NodeId, storage_id: Uuid) {
        let (disk, path) = (Disk::default(), self.directory.path().join(format!("{node_id}-{storage_id}")));
        std::fs::create_dir(&path).unwrap();
        let identity = NodeIdentity { cluster_id: self.cluster_id, node_id, storage_id, created_at_unix_ms: 0 };
        let message = pb::NodeIdentity {
            cluster_id: self.cluster_id.as_bytes().to_vec(),
            node_id,
            storage_id: storage_id.as_bytes().to_vec(),
            created_at_unix_ms: 0,
        };
        database::create_in(disk.handle(), &message, &[]).unwrap();
        disk.flush();
        let place = Place { disk, path, identity, owner: None, running: None, gone: false };
        self.places.lock().insert(node_id, place);
    }

    pub fn running(&self, node: NodeId) -> Option<Arc<Member>> {
        self.places.lock().get(&node).and_then(|place| place.running.clone())
    }

    /// The members whose processes run.
    pub fn members(&self) -> Vec<Arc<Member>> {
        self.places.lock().values().filter_map(|place| place.running.clone()).collect()
    }

    /// The members that run or will run again.
    pub fn nodes(&self) -> Vec<NodeId> {
        self.places.lock().iter().filter(|(_, place)| !place.gone).map(|(id, _)| *id).collect()
    }

    /// Whoever leads, as far as it knows.
    pub fn leader(&self) -> Option<NodeId> {
        self.members().into_iter().find(|member| member.leads()).map(|member| member.identity.node_id)
    }

    pub fn is_cut(&self, from: Host, to: Host) -> bool {
        self.trouble.lock().cuts.contains(&(from, to))
    }

    /// How long a message is on its way; `None` = it is lost.
    pub fn journey(&self, from: Host, to: Host) -> Option<Duration> {
        let trouble = self.trouble.lock();
        let mut random = self.random.lock();
        if trouble.cuts.contains(&(from, to)) || random.chance(trouble.lost) {
            return None;
        }
        Some(if random.chance(trouble.late) { random.millis(5, 1_500) } else { random.millis(0, 3) })
    }

    /// How long a disk takes for a transaction.
    pub fn write_time(&self, node: NodeId) -> Duration {
        let stalled = self.trouble.lock().stalled.get(&node).copied().unwrap_or_default();
        let left = Duration::from_micros(stalled.saturating_sub(Sim::micros()));
        left + self.millis(0, 4)
    }

    /// Ends a member's process, as a power failure would.
    pub fn kill(&self, node: NodeId) {
        let mut places = self.places.lock();
        let Some(place) = places.get_mut(&node) else { return };
        let Some(owner) = place.owner.take() else { return };
        place.running = None;
        let mut random = self.random.lock();
        let loss = [Loss::Everything, Loss::Nothing, Loss::Some, Loss::Torn][random.below(4)];
        place.disk.crash(loss, &mut random);
        drop(random);
        drop(places);
        Sim::kill(owner);
        self.note(format_args!("member {node} dies"));
    }
}
