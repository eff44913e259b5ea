//! A fleet in one thread: gateways, a control plane, engines and a bad network, driven by a seed.
//!
//! The real ledger and the real gateway side run against a model of all that can happen to them: messages lost, late, repeated and out of
//! order, clocks of different rates, partitions about as long as leases, dead gateways with and without abort of what they left behind, new
//! leaders. A run fails as soon as an engine holds more requests than its window, the ledger holds more slots than there are, or a process
//! has more requests than the ledger knows of. That the runs can fail is shown by planting faults ([`Mutant`]).
#![allow(clippy::unwrap_used, clippy::panic)]

mod runs;

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};
use std::time::Duration;

use crate::mutant::{Mutant, planted};
use crate::{Deadlines, EngineCount, Event, Leader, Ledger, Pace, ProcessId, Report, Shares, Times, Update, WorkerKey};

/// Micro-seconds of simulated time.
type Micros = u64;

const SECOND: Micros = 1_000_000;
const TICK: Micros = 100_000;
/// Latest end of a request, which gateways and engines both enforce.
const REQUEST: Micros = 40 * SECOND;
const TIMES: Times = Times {
    float: Duration::from_secs(10),
    anchor: Duration::from_secs(60),
    drift: 2,
    margin: Duration::from_millis(250),
};

/// A small generator, so that a seed means the same for ever (splitmix64).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        mixed ^ (mixed >> 31)
    }
    fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }
    fn chance(&mut self, probability: f64) -> bool {
        self.unit() < probability
    }
    fn between(&mut self, low: f64, high: f64) -> f64 {
        low + (high - low) * self.unit()
    }
    fn micros(&mut self, low: f64, high: f64) -> Micros {
        (self.between(low, high) * SECOND as f64) as Micros
    }
    fn exponential(&mut self, mean: f64) -> f64 {
        -mean * (1.0 - self.unit()).ln()
    }
    fn pick<T: Copy>(&mut self, of: &[T]) -> T {
        of[(self.next() % of.len() as u64) as usize]
    }
}

/// What differs between kinds of runs.
#[derive(Clone, Copy)]
struct Profile {
    /// Length of partitions, in seconds.
    partitions: &'static [f64],
    /// Share of messages that are late by up to three seconds.
    late: f64,
    /// Whether control planes, gateways and engines fail.
    faults: bool,
    /// Latest arrival of a dispatch at its engine.
    dispatch: Micros,
    /// Whether nothing is anchored, so that all depends on the short lease.
    floating_only: bool,
}

const GENERAL: Profile = Profile {
    partitions: &[1.0, 5.0, 9.0, 10.0, 10.2, 12.0, 30.0, 70.0],
    late: 0.15,
    faults: true,
    dispatch: SECOND / 2,
    floating_only: false,
};
/// Partitions about as long as the short lease, many late messages, slow dispatches.
const LEASES: Profile = Profile {
    partitions: &[9.8, 10.2, 11.0, 12.5, 14.0],
    late: 0.4,
    faults: true,
    dispatch: 3 * SECOND,
    floating_only: true,
};
const CALM: Profile =
    Profile { partitions: &[], late: 0.0, faults: false, dispatch: SECOND / 10, floating_only: false };

fn leader(profile: Profile) -> Leader {
    let deadlines =
        Deadlines { request: Duration::from_micros(REQUEST), dispatch: Duration::from_micros(profile.dispatch) };
    Leader::new(TIMES, deadlines)
}

#[derive(Debug)]
enum Happens {
    Tick,
    /// A round that somebody asked for.
    Early,
    Keepalive(usize, ProcessId),
    Arrive(usize),
    /// A dispatch reaches its engine.
    Reach {
        request: u64,
        gateway: usize,
        process: ProcessId,
        worker: WorkerKey,
    },
    Finish {
        request: u64,
        gateway: usize,
        process: ProcessId,
        worker: WorkerKey,
    },
    /// A gateway hears that its request is over, or gives it up.
    Over {
        request: u64,
        gateway: usize,
        process: ProcessId,
        worker: WorkerKey,
    },
    AtControlPlane(Report, Duration),
    AtGateway(usize, ProcessId, Update),
    Fault,
    Heal(usize),
    ControlPlaneBack,
    Restart(usize),
    Kill(WorkerKey, u64),
    Fence(WorkerKey, ProcessId),
    Fenced(WorkerKey, ProcessId),
}

struct Gateway {
    process: ProcessId,
    up: bool,
    rate: f64,
    offset: f64,
    shares: Shares,
    running: BTreeMap<WorkerKey, BTreeSet<u64>>,
    waiting: BTreeMap<WorkerKey, u32>,
    load: f64,
}

struct Simulation {
    random: Random,
    profile: Profile,
    now: Micros,
    queue: BinaryHeap<Reverse<(Micros, u64, usize)>>,
    pending: BTreeMap<usize, Happens>,
    ticket: u64,
    gateways: Vec<Gateway>,
    ledger: Ledger,
    leader: Leader,
    pace: Pace,
    asked: Option<Duration>,
    control_plane_up: bool,
    cut_off: BTreeSet<usize>,
    windows: BTreeMap<WorkerKey, u32>,
    engines: BTreeMap<WorkerKey, BTreeMap<u64, (usize, ProcessId)>>,
    request: u64,
    served: u64,
    messages: u64,
}

fn name(gateway: usize) -> String {
    format!("g{gateway}")
}

impl Simulation {
    fn new(seed: u64, profile: Profile, gateways: Option<usize>, window: Option<u32>) -> Self {
        let mut random = Random(seed.wrapping_mul(0x1234_5678_9ABC_DEF1) ^ 0x55);
        let count = gateways.unwrap_or_else(|| 2 + (random.next() % 7) as usize);
        let workers = if window.is_some() { 1 } else { 1 + random.next() % 2 };
        let windows: BTreeMap<WorkerKey, u32> = (1..=u128::from(workers))
            .map(|worker| (worker, window.unwrap_or_else(|| random.pick(&[8, 16, 32, 64]))))
            .collect();
        let gateways = (0..count)
            .map(|index| Gateway {
                process: 1 + index as u128 * 1000,
                up: true,
                rate: 1.0 + random.between(-0.002, 0.002),
                offset: random.between(0.0, 1000.0),
                shares: Shares::new(&name(index), 1 + index as u128 * 1000, TIMES, false),
                running: BTreeMap::new(),
                waiting: BTreeMap::new(),
                load: random.pick(&[0.1, 0.5, 1.0, 2.0, 4.0]),
            })
            .collect();
        let mut this = Self {
            random,
            profile,
            now: 0,
            queue: BinaryHeap::new(),
            pending: BTreeMap::new(),
            ticket: 0,
            gateways,
            ledger: Ledger::default(),
            leader: leader(profile),
            pace: Pace::new(Duration::from_micros(TICK), Duration::ZERO),
            asked: None,
            control_plane_up: true,
            cut_off: BTreeSet::new(),
            engines: windows.keys().map(|worker| (*worker, BTreeMap::new())).collect(),
            windows,
            request: 0,
            served: 0,
            messages: 0,
        };
        for (worker, window) in &this.windows {
            this.leader.push(Event::Window(*worker, Some(*window)));
        }
        this.after(TICK, Happens::Tick);
        for index in 0..count {
            let process = this.gateways[index].process;
            let (keepalive, arrival) = (this.random.micros(0.0, 1.0), this.random.micros(0.0, 0.1));
            this.after(keepalive, Happens::Keepalive(index, process));
            this.after(arrival, Happens::Arrive(index));
        }
        if profile.faults {
            let first = this.random.micros(1.0, 10.0);
            this.after(first, Happens::Fault);
        }
        this
    }

    fn after(&mut self, delay: Micros, happens: Happens) {
        self.ticket += 1;
        let slot = self.ticket as usize;
        self.pending.insert(slot, happens);
        self.queue.push(Reverse((self.now + delay, self.ticket, slot)));
    }

    /// The gateway's own clock.
    fn clock(&self, gateway: usize) -> Duration {
        let gateway = &self.gateways[gateway];
        Duration::from_secs_f64(self.now as f64 / SECOND as f64 * gateway.rate + gateway.offset)
    }

    fn delay(&mut self) -> Micros {
        if self.random.chance(self.profile.late) {
            self.random.micros(0.01, 3.0)
        } else {
            self.random.micros(0.0005, 0.01)
        }
    }

    fn passes(&mut self, gateway: usize) -> bool {
        self.messages += 1;
        let lost = self.profile.faults && self.random.chance(0.02);
        !lost && !self.cut_off.contains(&gateway)
    }

    fn run(&mut self, seconds: u64) -> Result<(), String> {
        while let Some(Reverse((at, _, slot))) = self.queue.peek().copied() {
            if at > seconds * SECOND {
                return Ok(());
            }
            self.queue.pop();
            self.now = at;
            let happens = self.pending.remove(&slot).unwrap();
            self.happen(happens)?;
        }
        Ok(())
    }

    fn happen(&mut self, happens: Happens) -> Result<(), String> {
        match happens {
            Happens::Tick => {
                self.after(TICK, Happens::Tick);
                if self.control_plane_up {
                    self.tick()?;
                }
            }
            Happens::Early => {
                if self.control_plane_up && self.asked.is_some() {
                    self.tick()?;
                }
            }
            Happens::Keepalive(gateway, process) => {
                if self.gateways[gateway].up && self.gateways[gateway].process == process {
                    // Many reports only say that the gateway is there.
                    let says = self.random.chance(0.5);
                    self.report(gateway, says);
                    let next = self.random.micros(0.8, 1.2);
                    self.after(next, Happens::Keepalive(gateway, process));
                }
            }
            Happens::Arrive(gateway) => self.arrive(gateway)?,
            Happens::Reach { request, gateway, process, worker } => {
                let engine = self.engines.get_mut(&worker).unwrap();
                engine.insert(request, (gateway, process));
                let (running, window) = (engine.len(), self.windows[&worker] as usize);
                if running > window {
                    return Err(format!("engine {worker} runs {running} of {window} at {}", self.now));
                }
                let time = ((self.random.exponential(4.0) * SECOND as f64) as Micros).min(REQUEST * 97 / 100);
                self.after(time, Happens::Finish { request, gateway, process, worker });
            }
            Happens::Finish { request, gateway, process, worker } => {
                if self.engines.get_mut(&worker).unwrap().remove(&request).is_some() {
                    self.served += 1;
                }
                let delay = self.random.micros(0.0002, 0.005);
                self.after(delay, Happens::Over { request, gateway, process, worker });
            }
            Happens::Over { request, gateway, process, worker } => {
                let its_own = self.gateways[gateway].process == process;
                if its_own && self.gateways[gateway].running.entry(worker).or_default().remove(&request) {
                    self.engines.get_mut(&worker).unwrap().remove(&request);
                    self.pump(gateway)?;
                }
            }
            Happens::AtControlPlane(report, sent) => {
                if self.control_plane_up {
                    self.hear(report, sent);
                }
            }
            Happens::AtGateway(gateway, process, update) => {
                let now = self.clock(gateway);
                if self.gateways[gateway].up && self.gateways[gateway].process == process {
                    if self.gateways[gateway].shares.apply(&update, now) {
                        self.report(gateway, true);
                    }
                    self.pump(gateway)?;
                }
            }
            Happens::Fault => self.fault(),
            Happens::Heal(gateway) => {
                self.cut_off.remove(&gateway);
            }
            Happens::ControlPlaneBack => {
                self.control_plane_up = true;
                // A new leader: what was not committed is lost, and everything lasts its full time again.
                self.leader = leader(self.profile);
                self.asked = None;
            }
            Happens::Restart(gateway) => {
                let process = self.gateways[gateway].process + 1;
                let subject = &mut self.gateways[gateway];
                subject.process = process;
                subject.up = true;
                subject.shares = Shares::new(&name(gateway), process, TIMES, false);
                self.after(0, Happens::Keepalive(gateway, process));
            }
            Happens::Kill(worker, request) => {
                self.engines.get_mut(&worker).unwrap().remove(&request);
            }
            Happens::Fence(worker, process) => {
                self.engines.get_mut(&worker).unwrap().retain(|_, (_, owner)| *owner != process);
                self.after(self.profile.dispatch, Happens::Fenced(worker, process));
            }
            Happens::Fenced(worker, process) => self.leader.push(Event::Fenced(worker, process)),
        }
        Ok(())
    }

    fn arrive(&mut self, gateway: usize) -> Result<(), String> {
        let workers: Vec<WorkerKey> = self.windows.keys().copied().collect();
        let worker = self.random.pick(&workers);
        let load = self.gateways[gateway].load;
        if self.gateways[gateway].up && load > 0.0 {
            *self.gateways[gateway].waiting.entry(worker).or_default() += 1;
            self.pump(gateway)?;
        }
        let slots: u32 = self.windows.values().sum();
        let rate = (load * f64::from(slots) / 4.0 / self.gateways.len() as f64).max(0.05);
        let next = self.random.exponential(1.0 / rate);
        self.after((next * SECOND as f64) as Micros, Happens::Arrive(gateway));
        Ok(())
    }

    /// Dispatches what waits and may run.
    fn pump(&mut self, gateway: usize) -> Result<(), String> {
        let now = self.clock(gateway);
        for worker in self.windows.keys().copied().collect::<Vec<_>>() {
            loop {
                let subject = &mut self.gateways[gateway];
                let running = subject.running.entry(worker).or_default();
                let waiting = subject.waiting.entry(worker).or_default();
                if !subject.up || *waiting == 0 || running.len() >= subject.shares.limit(worker, now) as usize {
                    break;
                }
                *waiting -= 1;
                self.request += 1;
                let request = self.request;
                running.insert(request);
                let (in_use, process) = (running.len() as u64, subject.process);
                let known = self.known(gateway, process, worker);
                if in_use > known {
                    return Err(format!(
                        "process {process} has {in_use} requests, the ledger knows of {known} at {}",
                        self.now
                    ));
                }
                let delay = self.random.micros(0.0002, self.profile.dispatch as f64 / SECOND as f64 * 0.9);
                self.after(delay, Happens::Reach { request, gateway, process, worker });
                self.after(REQUEST * 98 / 100, Happens::Over { request, gateway, process, worker });
            }
        }
        Ok(())
    }

    /// INV-2: what the ledger allows a process to have.
    fn known(&self, gateway: usize, process: ProcessId, worker: WorkerKey) -> u64 {
        let name = name(gateway);
        let Some(pool) = self.ledger.pools().get(&worker) else { return 0 };
        let current = self.ledger.sessions().get(&name).is_some_and(|session| session.process == process);
        let share = pool.rows().get(&name).filter(|_| current).map_or(0, |row| u64::from(row.share));
        let zombies = pool.zombies().iter().filter(|zombie| zombie.process == process);
        share + zombies.map(|zombie| u64::from(zombie.slots)).sum::<u64>()
    }

    fn report(&mut self, gateway: usize, says: bool) {
        let sent = self.clock(gateway);
        let workers: Vec<WorkerKey> = self.windows.keys().copied().collect();
        let subject = &mut self.gateways[gateway];
        let (running, waiting) = (&subject.running, &subject.waiting);
        let use_of = |worker: WorkerKey| {
            let in_use = running.get(&worker).map_or(0, BTreeSet::len) as u32;
            (in_use, in_use + waiting.get(&worker).copied().unwrap_or(0), 0)
        };
        // Messages get lost here one by one, which a stream does not do: so every report says everything.
        let workers = workers.into_iter().filter(|_| says);
        let report = subject.shares.report(workers, use_of, true);
        if self.passes(gateway) {
            let delay = self.delay();
            self.after(delay, Happens::AtControlPlane(report, sent));
        }
    }

    fn wall(&self) -> Duration {
        Duration::from_micros(self.now)
    }

    fn hear(&mut self, report: Report, sent: Duration) {
        let session = self.ledger.sessions().get(&report.gateway);
        let replaced = session.filter(|session| session.process < report.process).map(|session| session.process);
        // Some engines can abort by process. They are asked for the silent too: the ledger does not believe it, see the unit tests.
        let silent = self.ledger.sessions().iter().find(|(name, session)| !session.heard && **name != report.gateway);
        let silent = silent.map(|(_, session)| session.process);
        let now = self.wall();
        if self.leader.hear(&self.ledger, report, sent, now) && self.asked.is_none() {
            self.asked = Some(now);
            let due = self.pace.due(self.asked).saturating_sub(now);
            self.after(due.as_micros() as Micros, Happens::Early);
        }
        let fence = replaced.or_else(|| silent.filter(|_| self.random.chance(0.1)));
        if let Some(process) = fence {
            for worker in self.windows.keys().copied().collect::<Vec<_>>() {
                if self.random.chance(0.5) {
                    self.after(1000, Happens::Fence(worker, process));
                }
            }
        }
    }

    fn send(&mut self, gateway: usize, process: ProcessId, update: Update) {
        if self.passes(gateway) {
            let delay = self.delay();
            if self.profile.faults && self.random.chance(0.02) {
                let again = self.delay() * 3;
                let (epoch, echo, grants) = (update.epoch, update.echo, update.grants.clone());
                self.after(again, Happens::AtGateway(gateway, process, Update { epoch, echo, grants, mark: 0 }));
            }
            self.after(delay, Happens::AtGateway(gateway, process, update));
        }
    }

    fn tick(&mut self) -> Result<(), String> {
        let now = self.wall();
        let (ledger, engines) = (&self.ledger, &self.engines);
        let count = |worker: WorkerKey| {
            let engine = engines.get(&worker)?;
            let surely_heard = engine.values().filter(|(gateway, process)| {
                let session = ledger.sessions().get(&name(*gateway));
                session.is_some_and(|session| session.heard && session.process == *process)
            });
            Some(EngineCount { requests: engine.len() as u32, surely_heard: surely_heard.count() as u32 })
        };
        let events = self.leader.round(ledger, count, now);
        self.pace.opened(now, !events.is_empty());
        self.asked = None;
        let round = self.ledger.round(&events);
        for (worker, pool) in self.ledger.pools() {
            if pool.held() > u64::from(self.windows[worker]) {
                return Err(format!("the ledger of {worker} holds {} of {} at {}", pool.held(), pool.window, self.now));
            }
            for (gateway, row) in pool.rows() {
                let ordered = row.anchored_told <= row.anchored && row.anchored <= row.share && row.limit <= row.share;
                if !ordered && mutant_free() {
                    return Err(format!("row {gateway} {row:?}"));
                }
            }
        }
        let mut grants = round.grants;
        if self.profile.floating_only {
            grants.iter_mut().for_each(|grant| grant.anchored = 0);
        }
        for answer in self.leader.answers(&self.ledger, grants) {
            self.send(answer.gateway[1..].parse().unwrap(), answer.process, answer.update);
        }
        Ok(())
    }

    fn fault(&mut self) {
        let next = self.random.micros(0.5, 12.0);
        self.after(next, Happens::Fault);
        let gateway = (self.random.next() % self.gateways.len() as u64) as usize;
        let kind = self.random.unit();
        if kind < 0.25 {
            self.crash(gateway);
        } else if kind < 0.6 {
            let long = self.random.pick(self.profile.partitions);
            let length = self.random.micros(long * 0.95, long * 1.05);
            self.cut_off.insert(gateway);
            self.after(length, Happens::Heal(gateway));
        } else if kind < 0.8 {
            if self.control_plane_up {
                self.control_plane_up = false;
                let long = self.random.pick(&[0.5, 2.0, 8.0, 11.0, 20.0]);
                self.after((long * SECOND as f64) as Micros, Happens::ControlPlaneBack);
            }
        } else if kind < 0.9 {
            self.gateways[gateway].load = self.random.pick(&[0.0, 0.1, 1.0, 4.0, 8.0]);
        } else {
            for other in 0..self.gateways.len() {
                if self.random.chance(0.5) {
                    let length = self.random.micros(1.0, 12.0);
                    self.cut_off.insert(other);
                    self.after(length, Happens::Heal(other));
                }
            }
        }
    }

    fn crash(&mut self, gateway: usize) {
        let subject = &mut self.gateways[gateway];
        if !subject.up {
            return;
        }
        subject.up = false;
        let left = std::mem::take(&mut subject.running);
        subject.waiting.clear();
        for (worker, requests) in left {
            for request in requests {
                if self.random.chance(0.6) {
                    let delay = self.random.micros(0.01, 1.0);
                    self.after(delay, Happens::Kill(worker, request));
                }
            }
        }
        let back = self.random.micros(0.2, 25.0);
        self.after(back, Happens::Restart(gateway));
    }
}

fn mutant_free() -> bool {
    !planted(Mutant::AnchorLoweredEarly) && !planted(Mutant::ShareFallsToUse)
}
