//! The slot ledger: which gateway may use how many slots of which decode worker.
//!
//! It is a part of the replicated state. One command per tick carries all that has happened since the last ([`Event`]) and is answered by what
//! gateways are to be told ([`Grant`]). Time is not in here: that a lease is over, or a deadline has passed, is an event which the leader
//! reports when its own clock says so; a leader that is new lets everything last its full time again.
//!
//! Invariants
//! * INV-1 and INV-2, see the crate;
//! * the same events give the same ledger on every replica;
//! * a process that was replaced is never heard of again;
//! * an event about what is not there any more changes nothing.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use crate::pool::{Counters, Pool};
use crate::subset;
use crate::{ProcessId, WorkerKey};

/// Replaced processes that a gateway's session remembers.
const REMEMBERED: usize = 16;

/// What a gateway says of one worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ReportRow {
    /// The worker.
    pub worker: WorkerKey,
    /// Number of the last grant that it applied; 0 = none.
    pub applied: u64,
    /// Slots in use.
    pub in_use: u32,
    /// Slots in use or waited for.
    pub wants: u32,
    /// Requests that were surely in the engine at every moment since the report before: a lower bound. The ledger does not read it.
    pub surely: u32,
}

/// What a gateway says.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Report {
    /// Its name.
    pub gateway: String,
    /// Which run of it.
    pub process: ProcessId,
    /// The epoch it knows; 0 = none.
    pub epoch: u64,
    /// Grows with each report of the process.
    pub number: u64,
    /// Workers of which something has changed; none = it only says that it is there.
    pub rows: Vec<ReportRow>,
    /// The process ends: what it still has in use is all that it will ever have. Its last report, with all its rows.
    pub leaving: bool,
    /// The last mark that it was sent. The ledger does not read it.
    pub mark: u64,
}

/// What has happened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// A worker reports how many requests it runs at a time; `None` = it is gone, or not gated any more.
    Window(WorkerKey, Option<u32>),
    /// Others than gateways of this fleet use so many slots of a worker.
    Foreign(WorkerKey, u32),
    /// A gateway reports.
    Report(Report),
    /// The short lease of a gateway is over.
    FloatExpired(String),
    /// The long lease of a gateway is over.
    AnchorExpired(String),
    /// A minute is over since the last of these: anchored slots follow use.
    AnchorsFollow,
    /// Nothing of these zombies can run any more: their requests' last deadline has passed.
    ZombiesEnded(WorkerKey, Vec<u64>),
    /// The engine has aborted everything of a replaced process, and what was under way has arrived since.
    Fenced(WorkerKey, ProcessId),
    /// Of the zombies up to the given one, at most so many slots are occupied.
    Evidence {
        /// The worker.
        worker: WorkerKey,
        /// The last zombie it says something about.
        last: u64,
        /// Requests in the engine, running or not, less those that are surely of gateways it hears of.
        occupied: u32,
    },
}

/// What a gateway is to be told of one worker.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Grant {
    /// The gateway.
    pub gateway: String,
    /// Which run of it.
    pub process: ProcessId,
    /// The epoch of its session.
    pub epoch: u64,
    /// The worker.
    pub worker: WorkerKey,
    /// Number of the grant.
    pub seq: u64,
    /// Most slots in use.
    pub limit: u32,
    /// How many of them stay when nothing is heard of the control plane.
    pub anchored: u32,
}

/// A gateway that is known.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Session {
    /// Which run of it.
    pub process: ProcessId,
    /// Grows whenever it was silent for too long; what was sent before counts for nothing.
    pub epoch: u64,
    /// Number of its last report.
    pub number: u64,
    /// Whether it is heard of.
    pub heard: bool,
    pub(crate) replaced: VecDeque<ProcessId>,
}

impl Session {
    /// Whether a process was replaced by a later one.
    pub fn is_replaced(&self, process: ProcessId) -> bool {
        self.replaced.contains(&process)
    }
}

/// The ledger.
#[derive(Debug, Clone, PartialEq, Eq, Default, Hash)]
pub struct Ledger {
    pub(crate) sessions: BTreeMap<String, Session>,
    pub(crate) pools: BTreeMap<WorkerKey, Pool>,
    pub(crate) counters: Counters,
    pub(crate) rounds: u64,
}

/// What a round came to.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Round {
    /// What gateways are to be told.
    pub grants: Vec<Grant>,
    /// Reports of a gateway that uses more than it may. Never, unless there is a fault in here or in the gateway.
    pub overdrawn: u32,
}

/// What a round touches.
#[derive(Default)]
struct Touched {
    pools: BTreeSet<WorkerKey>,
    /// Gateways that are to be told everything.
    all_of: BTreeSet<String>,
    rows: BTreeSet<(WorkerKey, String)>,
    members: bool,
    overdrawn: u32,
}

impl Ledger {
    /// The sessions, by gateway.
    pub fn sessions(&self) -> &BTreeMap<String, Session> {
        &self.sessions
    }

    /// The workers.
    pub fn pools(&self) -> &BTreeMap<WorkerKey, Pool> {
        &self.pools
    }

    /// The ledger of another history, which begins with a copy of the state that may be old: gateways have been told things since that are
    /// not in here. Nothing of it counts; what will be told is later than all that they can have been told.
    pub fn begin_anew(&self) -> Self {
        /// More than was ever told after the copy was made.
        const LEAP: u64 = 1 << 32;
        let Counters { seq, zombie, epoch } = self.counters;
        let later = |number: u64| number.saturating_add(LEAP);
        let counters = Counters { seq: later(seq), zombie: later(zombie), epoch: later(epoch) };
        Self { counters, rounds: self.rounds.saturating_add(1), ..Self::default() }
    }

    /// How many rounds there were. A leader that proposes round `rounds() + 1` cannot undo what another one has done since.
    pub fn rounds(&self) -> u64 {
        self.rounds
    }

    /// How many rows of a report say that more is in use than INV-2 allows: the share, and what is kept for that process as zombies.
    pub fn overdrawn(&self, report: &Report) -> usize {
        let known = self.sessions.get(&report.gateway);
        if known.is_none_or(|session| session.process != report.process || session.epoch != report.epoch) {
            return 0;
        }
        let exceeds = |row: &&ReportRow| {
            let Some(pool) = self.pools.get(&row.worker) else { return false };
            let share = pool.rows.get(&report.gateway).map_or(0, |row| row.share);
            let own = pool.zombies.iter().filter(|zombie| zombie.process == report.process);
            u64::from(row.in_use) > u64::from(share) + own.map(|zombie| u64::from(zombie.slots)).sum::<u64>()
        };
        report.rows.iter().filter(exceeds).count()
    }

    /// Whether slots are likely to move when this report is taken in: a gateway needs more than it may use and did not say so before, or
    /// lets go of what others wait for.
    pub fn moves(&self, report: &Report) -> bool {
        report.rows.iter().any(|said| {
            let Some(pool) = self.pools.get(&said.worker) else { return false };
            let Some(row) = pool.rows.get(&report.gateway) else { return said.wants > 0 };
            let needs = said.wants > row.limit && said.wants > row.wants + row.wants / 8;
            let lets_go = said.applied == row.seq && row.share > row.limit.max(said.in_use);
            needs || (lets_go && pool.rows.values().any(|other| other.wants > other.limit))
        })
    }

    /// Takes in what has happened, gives and takes slots, and says what to tell.
    pub fn round(&mut self, events: &[Event]) -> Round {
        self.rounds += 1;
        let mut touched = Touched::default();
        for event in events {
            self.take_in(event, &mut touched);
        }
        if touched.members {
            self.choose_members(&mut touched);
        }
        let Touched { pools, all_of, mut rows, overdrawn, .. } = touched;
        let sessions = &self.sessions;
        let hears = |gateway: &str| sessions.get(gateway).is_some_and(|session| session.heard);
        for worker in pools {
            let Some(pool) = self.pools.get_mut(&worker) else { continue };
            let mut told = Vec::new();
            pool.settle(hears, &mut self.counters, &mut told);
            rows.extend(told.into_iter().map(|gateway| (worker, gateway)));
        }
        for gateway in all_of {
            let workers = self.pools.iter().filter(|(_, pool)| pool.rows.contains_key(&gateway));
            rows.extend(workers.map(|(worker, _)| (*worker, gateway.clone())));
        }
        let grants = rows.into_iter().filter_map(|(worker, gateway)| self.grant(worker, gateway)).collect();
        Round { grants, overdrawn }
    }

    /// All that a gateway is to be told.
    pub fn grants_of(&self, gateway: &str) -> Vec<Grant> {
        self.pools.keys().filter_map(|worker| self.grant(*worker, gateway.to_owned())).collect()
    }

    fn grant(&self, worker: WorkerKey, gateway: String) -> Option<Grant> {
        let session = self.sessions.get(&gateway)?;
        let row = self.pools.get(&worker)?.rows.get(&gateway)?;
        let (process, epoch) = (session.process, session.epoch);
        let (seq, limit, anchored) = (row.seq, row.limit, row.anchored_told);
        Some(Grant { gateway, process, epoch, worker, seq, limit, anchored })
    }

    fn take_in(&mut self, event: &Event, touched: &mut Touched) {
        match event {
            Event::Window(worker, Some(window)) => {
                let pool = self.pools.entry(*worker).or_default();
                if pool.window != *window {
                    pool.window = *window;
                    touched.members = true;
                    touched.pools.insert(*worker);
                }
            }
            Event::Window(worker, None) => touched.members |= self.pools.remove(worker).is_some(),
            Event::Foreign(worker, slots) => {
                self.change(*worker, touched, |pool| pool.foreign = *slots);
            }
            Event::Report(report) => self.report(report, touched),
            Event::FloatExpired(gateway) => self.float_expired(gateway, touched),
            Event::AnchorExpired(gateway) => {
                if let Some(session) = self.sessions.remove(gateway) {
                    self.bury(gateway, session.process, touched);
                    touched.members = true;
                }
            }
            Event::AnchorsFollow => self.anchors_follow(touched),
            Event::ZombiesEnded(worker, ids) => {
                self.change(*worker, touched, |pool| pool.end_zombies(|zombie| ids.contains(&zombie.id)));
            }
            Event::Fenced(worker, process) => {
                let runs = self.sessions.values().any(|session| session.process == *process);
                if !runs {
                    self.change(*worker, touched, |pool| pool.end_zombies(|zombie| zombie.process == *process));
                }
            }
            Event::Evidence { worker, last, occupied } => {
                self.change(*worker, touched, |pool| pool.evidence(*last, *occupied));
            }
        }
    }

    fn change(&mut self, worker: WorkerKey, touched: &mut Touched, change: impl FnOnce(&mut Pool)) {
        if let Some(pool) = self.pools.get_mut(&worker) {
            change(pool);
            touched.pools.insert(worker);
        }
    }

    fn report(&mut self, report: &Report, touched: &mut Touched) {
        let gateway = report.gateway.as_str();
        match self.sessions.get(gateway) {
            None => self.open(gateway, report.process, VecDeque::new(), touched),
            Some(session) if session.is_replaced(report.process) => return,
            Some(session) if session.process != report.process => {
                let mut replaced = session.replaced.clone();
                replaced.push_back(session.process);
                if replaced.len() > REMEMBERED {
                    replaced.pop_front();
                }
                let old = session.process;
                self.bury(gateway, old, touched);
                self.open(gateway, report.process, replaced, touched);
            }
            Some(_) => {}
        }
        let Some(session) = self.sessions.get_mut(gateway) else { return };
        if report.number <= session.number {
            return;
        }
        session.number = report.number;
        if !session.heard {
            session.heard = true;
            session.epoch = Counters::next(&mut self.counters.epoch);
            for (worker, pool) in &mut self.pools {
                pool.returned(gateway, report.process, &mut self.counters);
                touched.pools.insert(*worker);
            }
            touched.members = true;
            touched.all_of.insert(gateway.to_owned());
        }
        let acknowledges = report.epoch == session.epoch;
        if !acknowledges {
            touched.all_of.insert(gateway.to_owned());
        }
        for row in &report.rows {
            let Some(pool) = self.pools.get_mut(&row.worker) else { continue };
            if !pool.report(gateway, row, acknowledges) {
                touched.overdrawn += 1;
            }
            if pool.rows.get(gateway).is_some_and(|known| known.seq != row.applied) {
                touched.rows.insert((row.worker, gateway.to_owned()));
            }
            touched.pools.insert(row.worker);
        }
        if report.leaving {
            self.sessions.remove(gateway);
            for (worker, pool) in &mut self.pools {
                pool.left(gateway, report.process, &mut self.counters);
                touched.pools.insert(*worker);
            }
            touched.members = true;
        }
    }

    /// A gateway, or another process of it, is heard of for the first time.
    fn open(&mut self, gateway: &str, process: ProcessId, replaced: VecDeque<ProcessId>, touched: &mut Touched) {
        let epoch = Counters::next(&mut self.counters.epoch);
        self.sessions.insert(gateway.to_owned(), Session { process, epoch, number: 0, heard: true, replaced });
        // It may have been forgotten while it was silent.
        for (worker, pool) in &mut self.pools {
            pool.returned(gateway, process, &mut self.counters);
            touched.pools.insert(*worker);
        }
        touched.members = true;
        touched.all_of.insert(gateway.to_owned());
    }

    fn bury(&mut self, gateway: &str, process: ProcessId, touched: &mut Touched) {
        for (worker, pool) in &mut self.pools {
            pool.gone(gateway, process, &mut self.counters);
            touched.pools.insert(*worker);
        }
    }

    fn float_expired(&mut self, gateway: &str, touched: &mut Touched) {
        let Some(session) = self.sessions.get_mut(gateway).filter(|session| session.heard) else { return };
        session.heard = false;
        let process = session.process;
        for (worker, pool) in &mut self.pools {
            pool.float_expired(gateway, process, &mut self.counters);
            touched.pools.insert(*worker);
        }
        touched.members = true;
    }

    fn anchors_follow(&mut self, touched: &mut Touched) {
        let sessions = &self.sessions;
        let hears = |gateway: &str| sessions.get(gateway).is_some_and(|session| session.heard);
        for (worker, pool) in &mut self.pools {
            pool.anchors_follow(hears, &mut self.counters, |gateway| {
                touched.rows.insert((*worker, gateway.to_owned()));
            });
        }
    }

    /// Who belongs where, among the gateways that are heard of.
    fn choose_members(&mut self, touched: &mut Touched) {
        let heard = self.sessions.iter().filter(|(_, session)| session.heard);
        let gateways: Vec<&str> = heard.map(|(gateway, _)| gateway.as_str()).collect();
        let members = subset::members(&gateways, self.pools.iter().map(|(worker, pool)| (*worker, pool.window)));
        for (worker, pool) in &mut self.pools {
            let Some(members) = members.get(worker) else { continue };
            for (gateway, row) in &mut pool.rows {
                if row.member != members.contains(gateway.as_str()) {
                    row.member = !row.member;
                    touched.pools.insert(*worker);
                }
            }
            for gateway in members {
                if !pool.rows.contains_key(*gateway) {
                    let row = pool.rows.entry((*gateway).to_owned()).or_default();
                    row.member = true;
                    touched.pools.insert(*worker);
                }
            }
        }
    }
}

#[cfg(test)]
#[path = "ledger_test.rs"]
mod tests;
