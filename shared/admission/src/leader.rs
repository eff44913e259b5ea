//! What the leader knows beside the ledger: time.
//!
//! It collects what gateways report, sees when leases and deadlines are over by its own clock, and turns both into the events of the next
//! round. All of it may be lost with the leader: the next one lets everything last its full time again.
//!
//! Invariants
//! * a report is answered only after the round that took it in was committed, one that says nothing new after the next round, if there is
//!   one: an answer renews the gateway's lease, and must not renew one that the ledger has ended;
//! * a lease ends here after it has ended at the gateway;
//! * what anchors follow is what was used for a whole minute of this leader's;
//! * nothing is concluded from an engine's count about requests that may still be under way to it.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use crate::ledger::{Event, Grant, Ledger, Report, Session};
use crate::mutant::{Mutant, planted};
use crate::pool::Zombie;
use crate::share::{Times, Update};
use crate::{ProcessId, WorkerKey};

/// How long requests take at most.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Deadlines {
    /// From its admission to its end: gateways and engines both enforce it.
    pub request: Duration,
    /// From its admission to its arrival at the engine.
    pub dispatch: Duration,
}

/// Requests in an engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EngineCount {
    /// All, running or waiting, whoever's they are.
    pub requests: u32,
    /// How many of them are surely of gateways that are heard of: a lower bound.
    pub surely_heard: u32,
}

/// What a gateway is to be sent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Answer {
    /// Whom.
    pub gateway: String,
    /// Which run of it.
    pub process: ProcessId,
    /// What.
    pub update: Update,
}

/// The soft state of a leader. All times are of its own clock.
#[derive(Debug)]
pub struct Leader {
    times: Times,
    deadlines: Deadlines,
    events: Vec<Event>,
    /// Reports since the last round, and when they were sent.
    answers: BTreeMap<(String, ProcessId), Duration>,
    /// Those that the last round took in.
    due: BTreeMap<(String, ProcessId), Duration>,
    heard: BTreeMap<String, Duration>,
    silent: BTreeSet<String>,
    zombies: BTreeMap<u64, Duration>,
    /// When anchored slots followed use last, or this leader began.
    followed: Option<Duration>,
}

/// Between two times at which anchored slots follow use.
const FOLLOWS: Duration = Duration::from_secs(60);

impl Leader {
    /// A new leader.
    pub fn new(times: Times, deadlines: Deadlines) -> Self {
        Self {
            times,
            deadlines,
            events: Vec::new(),
            answers: BTreeMap::new(),
            due: BTreeMap::new(),
            heard: BTreeMap::new(),
            silent: BTreeSet::new(),
            zombies: BTreeMap::new(),
            followed: None,
        }
    }

    /// Something happened that is not a report.
    pub fn push(&mut self, event: Event) {
        self.events.push(event);
    }

    /// A gateway reports; `sent` is when, on its own clock. True if slots may move because of it, so that a round should come early.
    pub fn hear(&mut self, ledger: &Ledger, report: Report, sent: Duration, now: Duration) -> bool {
        let stale = ledger.sessions().get(&report.gateway).is_some_and(|session| {
            session.is_replaced(report.process)
                || (session.process == report.process && report.number <= session.number)
        });
        if stale {
            return false;
        }
        let known = ledger
            .sessions()
            .get(&report.gateway)
            .is_some_and(|session| session.heard && session.process == report.process && session.epoch == report.epoch);
        self.heard.insert(report.gateway.clone(), now);
        self.silent.remove(&report.gateway);
        let answer = self.answers.entry((report.gateway.clone(), report.process)).or_insert(sent);
        *answer = sent.max(*answer);
        // That somebody is still there is nothing new: only time has to know, and time is not in the ledger.
        let moves = known && ledger.moves(&report);
        if !known || !report.rows.is_empty() || report.leaving {
            self.events.push(Event::Report(report));
        }
        moves
    }

    /// Whether reports are to be answered once the round is over.
    pub fn owes_answers(&self) -> bool {
        !self.due.is_empty()
    }

    /// The events of the next round. `count` asks for what an engine holds; `None` = it does not say.
    pub fn round(
        &mut self,
        ledger: &Ledger,
        count: impl Fn(WorkerKey) -> Option<EngineCount>,
        now: Duration,
    ) -> Vec<Event> {
        let mut events = std::mem::take(&mut self.events);
        for (whom, sent) in std::mem::take(&mut self.answers) {
            let due = self.due.entry(whom).or_insert(sent);
            *due = sent.max(*due);
        }
        self.heard.retain(|gateway, _| ledger.sessions().contains_key(gateway) || !self.silent.contains(gateway));
        for gateway in ledger.sessions().keys() {
            let age = now.saturating_sub(*self.heard.entry(gateway.clone()).or_insert(now));
            if age > self.times.at_control_plane(self.times.anchor) {
                events.push(Event::AnchorExpired(gateway.clone()));
            } else if age > self.times.at_control_plane(self.times.float) && self.silent.insert(gateway.clone()) {
                events.push(Event::FloatExpired(gateway.clone()));
            }
        }
        let followed = *self.followed.get_or_insert(now);
        if now.saturating_sub(followed) >= FOLLOWS && !ledger.sessions().is_empty() {
            self.followed = Some(now);
            events.push(Event::AnchorsFollow);
        }
        self.silent.retain(|gateway| ledger.sessions().contains_key(gateway));
        let mut known = BTreeSet::new();
        for (worker, pool) in ledger.pools() {
            let mut ended = Vec::new();
            for zombie in pool.zombies() {
                known.insert(zombie.id);
                let seen = *self.zombies.entry(zombie.id).or_insert(now);
                if now.saturating_sub(seen) > self.deadlines.request {
                    ended.push(zombie.id);
                }
            }
            if !ended.is_empty() {
                events.push(Event::ZombiesEnded(*worker, ended));
            }
            events.extend(self.evidence(*worker, pool.zombies(), &count, now));
        }
        self.zombies.retain(|zombie, _| known.contains(zombie));
        events
    }

    /// What follows from the engine's own count for zombies that were there before anything still under way was sent.
    fn evidence(
        &self,
        worker: WorkerKey,
        zombies: &[Zombie],
        count: impl Fn(WorkerKey) -> Option<EngineCount>,
        now: Duration,
    ) -> Option<Event> {
        let last = self.settled(zombies, now)?;
        let count = count(worker)?;
        let mut occupied = count.requests.saturating_sub(count.surely_heard);
        if planted(Mutant::EvidenceOfRunningOnly) {
            occupied /= 2;
        }
        Some(Event::Evidence { worker, last, occupied })
    }

    /// The last of a worker's zombies of which nothing can be under way any more at `now`: what the engine holds from then on says something
    /// about it and those before it.
    pub fn settled(&self, zombies: &[Zombie], now: Duration) -> Option<u64> {
        let guard = if planted(Mutant::EvidenceWithoutGuard) { Duration::ZERO } else { self.deadlines.dispatch };
        let is_old = |zombie: &&Zombie| self.zombies.get(&zombie.id).is_some_and(|seen| now >= *seen + guard);
        // Ids grow: zombies that came later are the young ones, unless a pool has seen none of them yet.
        zombies.iter().take_while(is_old).map(|zombie| zombie.id).last()
    }

    /// What to send, once the round is committed: its grants, and the answers to the reports that it took in.
    pub fn answers(&mut self, ledger: &Ledger, grants: Vec<Grant>) -> Vec<Answer> {
        let mut told: BTreeMap<(String, ProcessId), (Option<Duration>, Vec<Grant>)> = BTreeMap::new();
        for (whom, sent) in std::mem::take(&mut self.due) {
            told.entry(whom).or_default().0 = Some(sent);
        }
        for grant in grants {
            told.entry((grant.gateway.clone(), grant.process)).or_default().1.push(grant);
        }
        let answer = |((gateway, process), (echo, grants)): ((String, ProcessId), (Option<Duration>, Vec<Grant>))| {
            // Whose lease the ledger has just ended, while a report of it came in, must not take the answer for a renewal.
            let heard = |session: &&Session| session.process == process && session.heard;
            let session = ledger.sessions().get(&gateway).filter(heard)?;
            Some(Answer { update: Update { epoch: session.epoch, echo, grants, mark: 0 }, gateway, process })
        };
        told.into_iter().filter_map(answer).collect()
    }
}
