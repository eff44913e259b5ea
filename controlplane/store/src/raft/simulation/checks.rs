//! What must hold at every moment of a run. The first thing that does not ends the run.
//!
//! The reference is one state to which each committed entry is applied once, in the order of the log, when the first member applies it.
//! From it and from what every disk holds follow
//! * **election safety**: a leader's name (term, member) is used by one process; no member's vote ever goes back;
//! * **log matching**: an entry's place (leader, index) says what it holds and which entry is before it;
//! * **durability**: an entry is applied only when a majority of the voters has it on disk, and a disk that was acknowledged to holds it after
//!   any crash;
//! * **state machine safety**: all members apply the same entry at an index, and have equal states at equal indices;
//! * **clients**: an outcome that was acknowledged is that of the command's one application; what was said not to have happened never
//!   happens; whoever reads linearizably sees everything that was acknowledged before;
//! * **gateways**: what a gateway has at a revision is the reference at that revision, and no gateway goes back.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use openraft::EntryPayload;
use openraft::entry::RaftEntry;
use smg_fleet::{Revision, Snapshot, wire};
use smg_state::{CommandId, NodeId, Outcome, State};

use super::super::convert;
use super::super::database;
use super::super::types::{Entry, LogId, StoredMembership, Vote};
use super::super::writer::Write;
use super::runtime::Owner;
use crate::frame::unframe;

/// What a disk is known to hold: everything that was acknowledged.
#[derive(Debug, Clone, Default)]
pub(super) struct Held {
    pub log: BTreeMap<u64, LogId>,
    pub purged: Option<LogId>,
    pub snapshot: u64,
    /// The first entry that a transaction would have dropped in whose middle the process died.
    pub truncating: Option<u64>,
    pub vote: Option<Vote>,
}

impl Held {
    fn last(&self) -> Option<LogId> {
        self.log.last_key_value().map(|(_, id)| *id).or(self.purged)
    }

    fn has(&self, id: &LogId) -> bool {
        let below = |upto: u64| id.index() <= upto;
        self.log.get(&id.index()) == Some(id) || below(self.snapshot) || self.purged.is_some_and(|p| below(p.index()))
    }
}

/// The entry before one, and its bytes.
type Written = (Option<LogId>, Vec<u8>);

#[derive(Debug)]
pub(super) struct Checks {
    pub disks: BTreeMap<NodeId, Held>,
    /// What disks held that are lost.
    lost: BTreeMap<NodeId, Held>,
    /// Which process leads under which name.
    leaders: BTreeMap<(u64, NodeId), Owner>,
    /// Each entry ever written.
    entries: BTreeMap<(u64, u64, NodeId), Written>,
    /// The committed entries, and the state after each.
    committed: BTreeMap<u64, (LogId, Arc<State>)>,
    state: State,
    /// The newest membership among them.
    membership: StoredMembership,
    /// The first application of each command.
    applied: BTreeMap<CommandId, Outcome>,
    /// Commands of which clients were told that they did not happen.
    denied: BTreeSet<CommandId>,
    acknowledged: BTreeMap<CommandId, Outcome>,
    /// The checksums of what gateways may have.
    snapshots: BTreeMap<Revision, u32>,
    /// The highest revision that was acknowledged.
    pub highest: Revision,
    gateways: BTreeMap<u64, Revision>,
    pub counts: Counts,
}

/// What was checked.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Counts {
    pub elections: u64,
    pub entries: u64,
    pub applications: u64,
    pub acknowledged: u64,
    pub denied: u64,
    pub unknown: u64,
    pub reads: u64,
    pub gateway_states: u64,
    pub snapshots_installed: u64,
    pub restarts: u64,
}

impl Default for Checks {
    fn default() -> Self {
        Self {
            disks: BTreeMap::new(),
            lost: BTreeMap::new(),
            leaders: BTreeMap::new(),
            entries: BTreeMap::new(),
            committed: BTreeMap::new(),
            state: State::default(),
            membership: StoredMembership::default(),
            applied: BTreeMap::new(),
            denied: BTreeSet::new(),
            acknowledged: BTreeMap::new(),
            snapshots: BTreeMap::from([(0, checksum(&Snapshot::default()))]),
            highest: 0,
            gateways: BTreeMap::new(),
            counts: Counts::default(),
        }
    }
}

impl Checks {
    /// A process has written these, and the disk has said that it has them.
    pub fn written(&mut self, node: NodeId, owner: Owner, writes: &[Write]) {
        for write in writes {
            match write {
                Write::Vote(frame) => self.voted(node, owner, frame),
                Write::Append(framed) => {
                    for (index, frame) in framed {
                        self.appended(node, &database::decode_entry(*index, frame).unwrap(), frame);
                    }
                }
                Write::Truncate(from) => drop(self.disks.entry(node).or_default().log.split_off(from)),
                Write::Purge(upto, frame) => {
                    let held = self.disks.entry(node).or_default();
                    held.log = held.log.split_off(&(upto + 1));
                    held.purged = Some(convert::log_id_from_pb(&unframe(frame).unwrap()));
                }
                Write::Committed(_) | Write::Close => {}
            }
        }
    }

    fn voted(&mut self, node: NodeId, owner: Owner, frame: &[u8]) {
        let vote = convert::vote_from_pb(&unframe(frame).unwrap());
        let held = self.disks.entry(node).or_default();
        assert!(
            held.vote.is_none_or(|before| before <= vote),
            "member {node} went back from {:?} to {vote:?}",
            held.vote
        );
        held.vote = Some(vote);
        let leader = vote.leader_id();
        if vote.is_committed() && leader.node_id == node {
            let first = *self.leaders.entry((leader.term, node)).or_insert(owner);
            assert_eq!(first, owner, "two processes led as {leader}");
            self.counts.elections = self.leaders.len() as u64;
        }
    }

    fn appended(&mut self, node: NodeId, entry: &Entry, frame: &[u8]) {
        let held = self.disks.entry(node).or_default();
        let (id, before) = (entry.log_id(), held.last());
        let expected = before.map_or(0, |before| before.index() + 1);
        assert_eq!(id.index(), expected, "member {node} has a hole in its log");
        let leader = *id.committed_leader_id();
        let allowed = id.index() == 0 || held.vote.is_some_and(|vote| *vote.leader_id() >= leader);
        assert!(allowed, "member {node} has entry {id} of a leader that it has not recorded");
        held.log.insert(id.index(), id);
        let known = self.entries.entry((id.index(), leader.term, leader.node_id));
        let known = known.or_insert_with(|| (before, frame.to_vec()));
        // The entry before may be gone from this disk into a snapshot.
        assert!(known.1 == frame, "two entries have the name {id}");
        assert!(before.is_none() || known.0.is_none() || known.0 == before, "two entries are before {id}");
        self.counts.entries += 1;
    }

    /// A process died in the middle of writing these.
    pub fn dying(&mut self, node: NodeId, writes: &[Write]) {
        let from = writes.iter().filter_map(|write| if let Write::Truncate(from) = write { Some(*from) } else { None });
        self.disks.entry(node).or_default().truncating = from.min();
    }

    /// A disk was read after a crash.
    pub fn reopened(&mut self, node: NodeId, found: Held) {
        let held = self.disks.entry(node).or_default();
        assert!(held.vote <= found.vote, "member {node} forgot its vote {:?}; it has {:?}", held.vote, found.vote);
        for id in held.log.values() {
            let gone = found.purged.is_some_and(|purged| purged.index() >= id.index());
            let whole = found.log.get(&id.index()) == Some(id);
            let truncated = held.truncating.is_some_and(|from| id.index() >= from);
            assert!(whole || gone || truncated, "member {node} lost entry {id}, which was on its disk");
        }
        assert!(held.purged <= found.purged, "member {node} forgot what it has purged");
        assert!(held.snapshot <= found.snapshot, "member {node} lost a snapshot");
        *held = found;
        self.counts.restarts += 1;
    }

    /// A member is about to apply an entry.
    pub fn applying(&mut self, node: NodeId, entry: &Entry) {
        let id = entry.log_id();
        if let Some((known, _)) = self.committed.get(&id.index()) {
            assert_eq!(*known, id, "member {node} applies another entry at index {}", id.index());
            return;
        }
        let next = self.committed.last_key_value().map_or(0, |(index, _)| index + 1);
        assert_eq!(id.index(), next, "member {node} applies entry {id}, and nobody has applied the one before");
        if let EntryPayload::Membership(membership) = &entry.payload {
            self.membership = StoredMembership::new(Some(id), membership.clone());
        }
        // Of a joint membership only the new voters count for sure: the entries after it may be committed when the old ones have left.
        if let Some(config) = self.membership.membership().get_joint_config().last() {
            let has = |voter: &&NodeId| {
                let held = [self.disks.get(voter), self.lost.get(voter)];
                held.into_iter().flatten().any(|held| held.has(&id))
            };
            let have: Vec<_> = config.iter().filter(has).collect();
            assert!(2 * have.len() > config.len(), "entry {id} is committed, and of {config:?} only {have:?} have it");
        }
        if let EntryPayload::Normal(envelope) = &entry.payload {
            let denied = self.denied.contains(&envelope.command_id);
            assert!(!denied, "{envelope} happened although its author was told that it did not");
            let outcome = self.state.apply(envelope);
            self.applied.entry(envelope.command_id).or_insert(outcome);
            let revision = self.state.revision();
            let state = &self.state;
            self.snapshots.entry(revision).or_insert_with(|| checksum(&state.snapshot()));
        }
        let before = self.committed.last_key_value().map(|(_, (_, state))| Arc::clone(state));
        let state = before.filter(|before| **before == self.state).unwrap_or_else(|| Arc::new(self.state.clone()));
        self.committed.insert(id.index(), (id, state));
    }

    /// A member has this state after it applied the entry, or installed the snapshot, at an index.
    pub fn applied(&mut self, node: NodeId, index: u64, state: &State) {
        let (id, expected) = &self.committed[&index];
        assert!(**expected == *state, "the state of member {node} is not that after entry {id}");
        self.counts.applications += 1;
    }

    /// A snapshot was installed.
    pub fn installed(&mut self, node: NodeId, last: Option<LogId>, state: &State) {
        let Some(last) = last else { return };
        assert_eq!(
            self.committed.get(&last.index()).map(|(id, _)| *id),
            Some(last),
            "a snapshot of what is not committed"
        );
        self.disks.entry(node).or_default().snapshot = last.index();
        self.applied(node, last.index(), state);
        self.counts.snapshots_installed += 1;
    }

    /// A client has an outcome.
    pub fn acknowledged(&mut self, id: CommandId, outcome: &Outcome) {
        assert_eq!(self.applied.get(&id), Some(outcome), "the acknowledged outcome of {id}");
        self.acknowledged.insert(id, outcome.clone());
        self.highest = self.highest.max(outcome.revision);
        self.counts.acknowledged += 1;
    }

    /// A client was told that its command did not happen.
    pub fn denied(&mut self, id: CommandId) {
        assert!(!self.applied.contains_key(&id), "{id} happened, and its author is told that it did not");
        self.denied.insert(id);
        self.counts.denied += 1;
    }

    /// A client that began to read when `before` was acknowledged sees this revision.
    pub fn read(&mut self, before: Revision, seen: Revision) {
        assert!(seen >= before, "a read saw revision {seen}, and {before} was acknowledged before it began");
        self.counts.reads += 1;
    }

    /// A gateway has put a snapshot into use.
    pub fn gateway(&mut self, gateway: u64, snapshot: &Snapshot) {
        let expected = self.snapshots.get(&snapshot.revision);
        let same = expected == Some(&checksum(snapshot));
        assert!(same, "gateway {gateway} has something else than the state at revision {}", snapshot.revision);
        let before = self.gateways.insert(gateway, snapshot.revision);
        assert!(before <= Some(snapshot.revision), "gateway {gateway} went back from {before:?}");
        self.counts.gateway_states += 1;
    }

    /// A gateway starts again from this revision.
    pub fn gateway_restarts(&mut self, gateway: u64, revision: Revision) {
        self.gateways.insert(gateway, revision);
    }

    /// At the end: everything that was acknowledged is in this state, as the reference has it.
    pub fn finished(&self, state: &State) {
        assert!(self.state == *state, "a member does not end with the reference");
        for (id, outcome) in &self.acknowledged {
            assert_eq!(self.applied.get(id), Some(outcome), "{id} was acknowledged and is lost");
        }
    }

    /// The revision of the reference.
    pub fn revision(&self) -> Revision {
        self.state.revision()
    }

    /// Whether nothing was ever committed.
    pub fn is_empty(&self) -> bool {
        self.committed.is_empty()
    }

    /// A member's disk is lost. What it had acknowledged still says which entries were committed.
    pub fn disk_lost(&mut self, node: NodeId) {
        let held = self.disks.remove(&node).unwrap_or_default();
        self.lost.insert(node, held);
    }

    /// The revision that a gateway has.
    pub fn gateway_has(&self, gateway: u64) -> Revision {
        self.gateways.get(&gateway).copied().unwrap_or_default()
    }

    /// The last committed index.
    pub fn last(&self) -> u64 {
        self.committed.last_key_value().map_or(0, |(index, _)| *index)
    }
}

fn checksum(snapshot: &Snapshot) -> u32 {
    wire::checksum(&wire::encode_snapshot(snapshot))
}
