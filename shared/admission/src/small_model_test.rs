//! Everything that can happen to two gateways before an engine that runs three requests, to a certain number of steps.
//!
//! A step is one of: a gateway reports; one of its reports arrives, or is lost; the ledger closes a round; an answer arrives, late or out of
//! order, or twice, or is lost; a request begins or ends; a lease ends at the gateway and after that in the ledger; a gateway is started
//! again while requests of the process before go on; such a request ends; anchored slots follow use. Time is not in it: the order of events
//! is all that clocks decide. Nor is it in the numbers of reports, grants and sessions how long ago something was: what differs only in
//! the size of numbers whose order is the same is the same world.
#![allow(clippy::unwrap_used)]

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::time::Duration;

use crate::{Event, Grant, Ledger, ProcessId, Report, ReportRow, WorkerKey};

const WORKER: WorkerKey = 1;
const WINDOW: u32 = 3;
const NAMES: [&str; 2] = ["a", "b"];
/// Messages under way to or from one gateway.
const UNDER_WAY: usize = 2;

/// What a gateway believes.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Gateway {
    process: ProcessId,
    epoch: u64,
    seq: u64,
    limit: u32,
    anchored: u32,
    /// Whether its short lease lasts.
    floats: bool,
    number: u64,
    in_use: u32,
    wants: u32,
    /// Requests that earlier processes left in the engine.
    left: BTreeMap<ProcessId, u32>,
}

impl Gateway {
    fn usable(&self) -> u32 {
        if self.floats { self.limit } else { self.limit.min(self.anchored) }
    }
}

#[derive(Debug, Clone, Hash)]
struct World {
    ledger: Ledger,
    gateways: [Gateway; 2],
    reports: [Vec<Report>; 2],
    answers: [Vec<(u64, Vec<Grant>)>; 2],
    restarts: u32,
    lapses: u32,
    follows: u32,
}

impl World {
    fn new() -> Self {
        let gateway = |process| Gateway {
            process,
            epoch: 0,
            seq: 0,
            limit: 0,
            anchored: 0,
            floats: false,
            number: 0,
            in_use: 0,
            wants: 0,
            left: BTreeMap::new(),
        };
        let mut ledger = Ledger::default();
        ledger.round(&[Event::Window(WORKER, Some(WINDOW))]);
        let gateways = [gateway(1), gateway(2)];
        let (reports, answers) = Default::default();
        Self { ledger, gateways, reports, answers, restarts: 0, lapses: 0, follows: 0 }
    }

    fn round(&mut self, events: &[Event]) -> Vec<Grant> {
        let grants = self.ledger.round(events).grants;
        self.ledger.rounds = 0;
        grants
    }

    /// Makes all numbers as small as their order allows.
    fn renumber(&mut self) {
        let Self { ledger, gateways, reports, answers, .. } = self;
        let (mut seqs, mut epochs) = (vec![&mut ledger.counters.seq], vec![&mut ledger.counters.epoch]);
        let mut zombies = vec![&mut ledger.counters.zombie];
        let mut numbers: [Vec<&mut u64>; 2] = Default::default();
        for pool in ledger.pools.values_mut() {
            seqs.extend(pool.rows.values_mut().map(|row| &mut row.seq));
            zombies.extend(pool.zombies.iter_mut().map(|zombie| &mut zombie.id));
        }
        for (name, session) in &mut ledger.sessions {
            let index = usize::from(name == NAMES[1]);
            epochs.push(&mut session.epoch);
            numbers[index].push(&mut session.number);
        }
        for (index, gateway) in gateways.iter_mut().enumerate() {
            seqs.push(&mut gateway.seq);
            epochs.push(&mut gateway.epoch);
            numbers[index].push(&mut gateway.number);
        }
        for (index, report) in
            reports.iter_mut().enumerate().flat_map(|(index, all)| all.iter_mut().map(move |report| (index, report)))
        {
            epochs.push(&mut report.epoch);
            numbers[index].push(&mut report.number);
            seqs.extend(report.rows.iter_mut().map(|row| &mut row.applied));
        }
        for (epoch, grants) in answers.iter_mut().flatten() {
            epochs.push(epoch);
            for grant in grants {
                epochs.push(&mut grant.epoch);
                seqs.push(&mut grant.seq);
            }
        }
        let [first, second] = numbers;
        for mut numbers in [seqs, epochs, zombies, first, second] {
            let order: BTreeSet<u64> = numbers.iter().map(|number| **number).filter(|number| *number > 0).collect();
            for number in &mut numbers {
                **number = order.range(..=**number).count() as u64;
            }
        }
    }

    /// What makes two worlds the same.
    fn name(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        self.hash(&mut hasher);
        hasher.finish()
    }

    fn check(&self) {
        let pool = &self.ledger.pools()[&WORKER];
        assert!(pool.held() <= u64::from(WINDOW), "INV-1: {self:#?}");
        let mut engine = 0;
        for (name, gateway) in NAMES.iter().zip(&self.gateways) {
            let of = |process: ProcessId| {
                let session = self.ledger.sessions().get(*name).filter(|session| session.process == process);
                let share = session.and_then(|_| pool.rows().get(*name)).map_or(0, |row| row.share);
                let zombies = pool.zombies().iter().filter(|zombie| zombie.process == process);
                share + zombies.map(|zombie| zombie.slots).sum::<u32>()
            };
            assert!(gateway.in_use <= of(gateway.process), "INV-2 of {name}: {self:#?}");
            for (process, requests) in &gateway.left {
                assert!(*requests <= of(*process), "INV-2 of what {name} left: {self:#?}");
            }
            engine += gateway.in_use + gateway.left.values().sum::<u32>();
        }
        assert!(engine <= WINDOW, "the engine has {engine} requests: {self:#?}");
    }

    fn next(&self) -> Vec<World> {
        let mut worlds = Vec::new();
        let mut then = |change: &dyn Fn(&mut World) -> bool| {
            let mut world = self.clone();
            if change(&mut world) {
                world.renumber();
                worlds.push(world);
            }
        };
        then(&World::follow);
        for index in 0..2 {
            then(&|world| world.report(index));
            for wants in [0, WINDOW] {
                then(&|world| std::mem::replace(&mut world.gateways[index].wants, wants) != wants);
            }
            then(&|world| world.begin(index));
            then(&|world| world.end(index));
            then(&|world| world.lapse(index));
            then(&|world| world.expire(index));
            then(&|world| world.restart(index));
            for process in self.gateways[index].left.keys() {
                then(&|world| world.leave(index, *process));
            }
            for message in 0..self.reports[index].len() {
                then(&|world| world.hear(index, message, false));
                then(&|world| world.hear(index, message, true));
                then(&|world| {
                    world.reports[index].remove(message);
                    true
                });
            }
            for message in 0..self.answers[index].len() {
                then(&|world| world.learn(index, message, false));
                then(&|world| world.learn(index, message, true));
            }
        }
        worlds
    }

    fn report(&mut self, index: usize) -> bool {
        if self.reports[index].len() >= UNDER_WAY {
            return false;
        }
        let gateway = &mut self.gateways[index];
        gateway.number += 1;
        let wants = gateway.wants.max(gateway.in_use);
        let row = ReportRow { worker: WORKER, applied: gateway.seq, in_use: gateway.in_use, wants, surely: 0 };
        let (name, process, epoch, number) = (NAMES[index].to_owned(), gateway.process, gateway.epoch, gateway.number);
        let report = Report { gateway: name, process, epoch, number, rows: vec![row], leaving: false, mark: 0 };
        self.reports[index].push(report);
        true
    }

    /// A report arrives, and a round is closed; the answer is under way.
    fn hear(&mut self, index: usize, message: usize, again: bool) -> bool {
        let report = self.reports[index][message].clone();
        if !again {
            self.reports[index].remove(message);
        }
        let grants = self.round(&[Event::Report(report)]);
        self.answer(&grants);
        true
    }

    /// Answers that a round gives are under way.
    fn answer(&mut self, grants: &[Grant]) {
        for (index, name) in NAMES.iter().enumerate() {
            let session = self.ledger.sessions().get(*name).filter(|session| session.heard);
            let own: Vec<Grant> = grants.iter().filter(|grant| grant.gateway == *name).cloned().collect();
            if let Some(session) = session
                && !own.is_empty()
                && self.answers[index].len() < UNDER_WAY
            {
                self.answers[index].push((session.epoch, own));
            }
        }
    }

    fn follow(&mut self) -> bool {
        self.follows += 1;
        let grants = self.round(&[Event::AnchorsFollow]);
        self.answer(&grants);
        self.follows <= 2
    }

    fn learn(&mut self, index: usize, message: usize, again: bool) -> bool {
        let (epoch, grants) = self.answers[index][message].clone();
        if !again {
            self.answers[index].remove(message);
        }
        let gateway = &mut self.gateways[index];
        if epoch < gateway.epoch {
            return !again;
        }
        if epoch > gateway.epoch {
            (gateway.epoch, gateway.seq, gateway.limit, gateway.anchored) = (epoch, 0, 0, 0);
        }
        for grant in grants {
            if grant.process != gateway.process || grant.seq <= gateway.seq {
                continue;
            }
            (gateway.seq, gateway.limit, gateway.anchored) = (grant.seq, grant.limit, grant.anchored);
            // The answer to a report that was sent while the ledger heard of it: its lease lasts.
            let heard = self.ledger.sessions().get(NAMES[index]);
            gateway.floats |= heard.is_some_and(|session| session.heard && session.epoch == epoch);
        }
        true
    }

    fn begin(&mut self, index: usize) -> bool {
        let gateway = &mut self.gateways[index];
        let may = gateway.in_use < gateway.usable();
        gateway.in_use += u32::from(may);
        may
    }

    fn end(&mut self, index: usize) -> bool {
        let gateway = &mut self.gateways[index];
        let may = gateway.in_use > 0;
        gateway.in_use -= u32::from(may);
        may
    }

    fn lapse(&mut self, index: usize) -> bool {
        let may = self.gateways[index].floats && self.lapses < 1;
        if may {
            self.gateways[index].floats = false;
            self.lapses += 1;
        }
        may
    }

    /// The ledger ends a lease after the gateway did.
    fn expire(&mut self, index: usize) -> bool {
        let session = self.ledger.sessions().get(NAMES[index]);
        let may = !self.gateways[index].floats && session.is_some_and(|session| session.heard) && self.lapses > 0;
        if may {
            self.round(&[Event::FloatExpired(NAMES[index].to_owned())]);
        }
        may
    }

    fn restart(&mut self, index: usize) -> bool {
        if self.restarts > 0 {
            return false;
        }
        self.restarts += 1;
        let gateway = &mut self.gateways[index];
        if gateway.in_use > 0 {
            gateway.left.insert(gateway.process, gateway.in_use);
        }
        let (process, left) = (gateway.process + 10, std::mem::take(&mut gateway.left));
        *gateway = Gateway { process, left, ..World::new().gateways[index].clone() };
        true
    }

    /// A request of an earlier process ends.
    fn leave(&mut self, index: usize, process: ProcessId) -> bool {
        let left = &mut self.gateways[index].left;
        let requests = left.get_mut(&process).unwrap();
        *requests -= 1;
        if *requests == 0 {
            left.remove(&process);
        }
        true
    }
}

#[test]
fn two_gateways_and_three_slots_whatever_happens_in_whatever_order() {
    let (depth, limit) = match std::env::var_os("SMG_SOAK") {
        Some(_) => (11, Duration::from_secs(1200)),
        None => (7, Duration::from_secs(20)),
    };
    let began = std::time::Instant::now();
    let (mut known, mut front) = (HashSet::new(), vec![World::new()]);
    for step in 1..=depth {
        let mut next = Vec::new();
        for world in &front {
            if began.elapsed() > limit {
                break;
            }
            for world in world.next() {
                if known.insert(world.name()) {
                    world.check();
                    // Where the last step leads is looked at, and not gone on from.
                    if step < depth {
                        next.push(world);
                    }
                }
            }
        }
        front = next;
        println!("{step} steps: {} worlds after {} ms", known.len(), began.elapsed().as_millis());
    }
    assert!(known.len() > 1_000);
}
