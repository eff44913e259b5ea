//! The slots of one decode worker: who may use how many.
//!
//! What a gateway was told and what it believes are two things while messages are under way. So a row keeps both: [`Row::limit`] is what the
//! gateway was last told, [`Row::share`] is what it may still use for all that is known. A share grows at once with a grant, and falls only
//! when the gateway says that it applied a smaller limit, or when its lease is over; then what it may have left running becomes a
//! [`Zombie`], which holds its slots until somebody knows better.
//!
//! Invariants
//! * INV-1: shares and zombies together never grow past the window; above it (the window has shrunk) they only fall;
//! * of each row: `anchored_told <= limit <= share` and `anchored_told <= anchored <= share`.

use std::collections::BTreeMap;

use crate::ProcessId;
use crate::allocate::{Claimant, divide};
use crate::ledger::ReportRow;
use crate::mutant::{Mutant, planted};

/// What one gateway may use of a worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Hash)]
pub struct Row {
    /// Most slots that the gateway may use, for all that is known.
    pub share: u32,
    /// Most slots that the gateway may believe to be its own even when nothing is heard of the control plane.
    pub anchored: u32,
    /// The limit it was last told.
    pub limit: u32,
    /// The anchored part of it.
    pub anchored_told: u32,
    /// Number of what it was last told; grows with each change.
    pub seq: u64,
    /// Slots in use, as it last said.
    pub in_use: u32,
    /// Slots that it uses or waits for, as it last said.
    pub wants: u32,
    /// Whether it belongs to the worker, and so gets a part without asking.
    pub member: bool,
    /// Slots in use at every report since anchored slots followed use last.
    pub steady: u32,
    /// What that came to then.
    pub followed: u32,
}

/// Slots that may still be occupied by somebody who is not heard of.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Zombie {
    /// Names it; later ones have larger numbers.
    pub id: u64,
    /// How many.
    pub slots: u32,
    /// Whose they were.
    pub gateway: String,
    /// Which run of it.
    pub process: ProcessId,
}

/// How much of a limit lasts without the control plane: half, and up to three quarters of it where so many were `followed`, in use all the
/// time.
fn anchored_part(limit: u32, followed: u32) -> u32 {
    limit.div_ceil(2).max(followed.min(limit - limit.div_ceil(4)))
}

/// The slots of one decode worker.
#[derive(Debug, Clone, PartialEq, Eq, Default, Hash)]
pub struct Pool {
    /// What the engine runs at a time.
    pub window: u32,
    /// Slots used by others than gateways of this fleet, as far as is known.
    pub foreign: u32,
    pub(crate) rows: BTreeMap<String, Row>,
    pub(crate) zombies: Vec<Zombie>,
}

/// The slots of a worker by what they are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Totals {
    /// What the engine runs at a time.
    pub window: u64,
    /// What gateways may use.
    pub granted: u64,
    /// What they said to use.
    pub in_use: u64,
    /// What waits for slots.
    pub waiting: u64,
    /// Of gateways that are not heard of.
    pub zombie: u64,
    /// Used by others than gateways.
    pub foreign: u64,
    /// Nobody's.
    pub free: u64,
}

impl Totals {
    /// Those of a worker.
    pub fn of(pool: &Pool) -> Self {
        let sum = |slots: fn(&Row) -> u32| pool.rows.values().map(|row| u64::from(slots(row))).sum::<u64>();
        let (window, foreign) = (u64::from(pool.window), u64::from(pool.foreign));
        Self {
            window,
            granted: sum(|row| row.share),
            in_use: sum(|row| row.in_use),
            waiting: sum(|row| row.wants.saturating_sub(row.in_use)),
            zombie: pool.zombies.iter().map(|zombie| u64::from(zombie.slots)).sum(),
            foreign,
            free: window.saturating_sub(pool.held() + foreign),
        }
    }

    /// Each with its name.
    pub fn named(&self) -> [(&'static str, u64); 7] {
        [
            ("window", self.window),
            ("granted", self.granted),
            ("in_use", self.in_use),
            ("waiting", self.waiting),
            ("zombie", self.zombie),
            ("foreign", self.foreign),
            ("free", self.free),
        ]
    }
}

/// Counters that run through the whole ledger.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Hash)]
pub(crate) struct Counters {
    pub(crate) seq: u64,
    pub(crate) zombie: u64,
    pub(crate) epoch: u64,
}

impl Counters {
    pub(crate) fn next(counter: &mut u64) -> u64 {
        *counter += 1;
        *counter
    }
}

impl Pool {
    /// The rows, by gateway.
    pub fn rows(&self) -> &BTreeMap<String, Row> {
        &self.rows
    }

    /// Slots of the silent.
    pub fn zombies(&self) -> &[Zombie] {
        &self.zombies
    }

    /// All slots that somebody may use: what INV-1 bounds.
    pub fn held(&self) -> u64 {
        let shares: u64 = self.rows.values().map(|row| u64::from(row.share)).sum();
        shares + self.zombies.iter().map(|zombie| u64::from(zombie.slots)).sum::<u64>()
    }

    /// A gateway says what it uses, and by which of its grants. False if it uses more than its share, which INV-2 forbids.
    pub(crate) fn report(&mut self, gateway: &str, report: &ReportRow, acknowledges: bool) -> bool {
        let free = u64::from(self.window).saturating_sub(self.held() + u64::from(self.foreign));
        let row = self.rows.entry(gateway.to_owned()).or_default();
        (row.in_use, row.wants) = (report.in_use, report.wants.max(report.in_use));
        row.steady = row.steady.min(report.in_use);
        if row.seq == 0 && report.in_use > row.share {
            // It was never told anything, by this ledger: what it runs was given to it by one that is lost.
            row.share += (report.in_use - row.share).min(u32::try_from(free).unwrap_or(u32::MAX));
        }
        let within = report.in_use <= row.share;
        if acknowledges && (report.applied == row.seq || planted(Mutant::AckOfOlderUpdate)) {
            row.anchored = row.anchored_told;
            // Slots come home: what runs above the new limit keeps its slot until it ends.
            row.share = row.limit.max(report.in_use.min(row.share));
            if planted(Mutant::ShareFallsToUse) {
                row.share = report.in_use.min(row.share);
                row.limit = row.limit.min(row.share);
            }
        }
        within
    }

    /// The short lease of a gateway is over: what is not anchored may still run, but is not its any more.
    pub(crate) fn float_expired(&mut self, gateway: &str, process: ProcessId, counters: &mut Counters) {
        let Some(row) = self.rows.get_mut(gateway) else { return };
        let over = row.share - row.anchored;
        row.share = row.anchored;
        row.limit = row.limit.min(row.anchored_told);
        row.seq = Counters::next(&mut counters.seq);
        row.wants = 0;
        self.bury(gateway, process, over, counters);
    }

    /// A gateway is gone, or its long lease is over: all that it had may still run.
    pub(crate) fn gone(&mut self, gateway: &str, process: ProcessId, counters: &mut Counters) {
        let Some(row) = self.rows.remove(gateway) else { return };
        self.bury(gateway, process, row.share, counters);
    }

    /// A gateway has ended and said what it leaves running.
    pub(crate) fn left(&mut self, gateway: &str, process: ProcessId, counters: &mut Counters) {
        let Some(row) = self.rows.remove(gateway) else { return };
        self.bury(gateway, process, row.in_use.min(row.share), counters);
    }

    fn bury(&mut self, gateway: &str, process: ProcessId, slots: u32, counters: &mut Counters) {
        if slots > 0 && !planted(Mutant::NoZombies) {
            let id = Counters::next(&mut counters.zombie);
            self.zombies.push(Zombie { id, slots, gateway: gateway.to_owned(), process });
        }
    }

    /// A silent process is heard of again: its zombies are its requests.
    pub(crate) fn returned(&mut self, gateway: &str, process: ProcessId, counters: &mut Counters) {
        let mut own = 0u32;
        self.zombies.retain(|zombie| {
            let its_own = zombie.process == process && zombie.gateway == gateway;
            own += if its_own { zombie.slots } else { 0 };
            !its_own
        });
        if own == 0 && !self.rows.contains_key(gateway) {
            return;
        }
        let row = self.rows.entry(gateway.to_owned()).or_default();
        row.share += own;
        row.limit = row.anchored_told;
        row.seq = Counters::next(&mut counters.seq);
    }

    /// Slots of the silent that are known to be free.
    pub(crate) fn end_zombies(&mut self, ended: impl Fn(&Zombie) -> bool) {
        self.zombies.retain(|zombie| !ended(zombie));
    }

    /// The engine runs at most `occupied` requests that are not those of gateways it hears of: no zombie up to `last` holds more.
    pub(crate) fn evidence(&mut self, last: u64, occupied: u32) {
        for zombie in self.zombies.iter_mut().filter(|zombie| zombie.id <= last) {
            zombie.slots = zombie.slots.min(occupied);
        }
        self.zombies.retain(|zombie| zombie.slots > 0);
    }

    /// Another minute is over: what is anchored of gateways that are heard of follows what they used all the time. Rows that changed are in
    /// `told`.
    pub(crate) fn anchors_follow(
        &mut self,
        hears: impl Fn(&str) -> bool,
        counters: &mut Counters,
        mut told: impl FnMut(&str),
    ) {
        for (gateway, row) in self.rows.iter_mut().filter(|(gateway, _)| hears(gateway)) {
            (row.followed, row.steady) = (row.steady, row.in_use);
            let anchored = anchored_part(row.limit, row.followed);
            if anchored != row.anchored_told {
                row.anchored_told = anchored;
                row.anchored = row.anchored.max(anchored);
                row.seq = Counters::next(&mut counters.seq);
                told(gateway);
            }
        }
    }

    /// Gives and takes slots. `hears` tells which gateways are heard of. Rows that changed are in `told`.
    pub(crate) fn settle(&mut self, hears: impl Fn(&str) -> bool, counters: &mut Counters, told: &mut Vec<String>) {
        let silent: u64 =
            self.rows.iter().filter(|(gateway, _)| !hears(gateway)).map(|(_, row)| u64::from(row.share)).sum();
        let dead: u64 = self.zombies.iter().map(|zombie| u64::from(zombie.slots)).sum();
        let window = u64::from(self.window);
        let slots = window.saturating_sub(silent + dead + u64::from(self.foreign));
        let live: Vec<&String> = self.rows.keys().filter(|gateway| hears(gateway)).collect();
        let claimant = |row: &Row| Claimant { wants: row.wants, belongs: row.member };
        let claimants: Vec<Claimant> =
            live.iter().filter_map(|gateway| self.rows.get(*gateway)).map(claimant).collect();
        let targets = divide(u32::try_from(slots).unwrap_or(u32::MAX), &claimants);
        let targets: BTreeMap<String, u32> = live.into_iter().cloned().zip(targets).collect();
        let free = window.saturating_sub(self.held() + u64::from(self.foreign));
        let somebody_starves = free == 0
            && targets
                .iter()
                .any(|(gateway, target)| self.rows.get(gateway).is_some_and(|row| row.limit < row.wants.min(*target)));
        for (gateway, target) in &targets {
            let Some(row) = self.rows.get_mut(gateway) else { continue };
            // A little more than its part may stay where nobody misses it: every change is a message.
            let slack = if somebody_starves || (!row.member && row.wants == 0) { 0 } else { (self.window / 20).max(1) };
            if row.limit.saturating_sub(*target) > slack {
                row.limit = *target;
                row.anchored_told = anchored_part(*target, row.followed);
                if planted(Mutant::AnchorLoweredEarly) {
                    row.anchored = row.anchored_told;
                }
                row.seq = Counters::next(&mut counters.seq);
                told.push(gateway.clone());
            }
        }
        self.grow(&targets, counters, told);
        self.rows.retain(|_, row| row.member || row.share > 0 || row.wants > 0);
    }

    /// Grants what is free, to whoever is furthest from its part first.
    fn grow(&mut self, targets: &BTreeMap<String, u32>, counters: &mut Counters, told: &mut Vec<String>) {
        let window = u64::from(self.window);
        let mut free = u32::try_from(window.saturating_sub(self.held() + u64::from(self.foreign))).unwrap_or(u32::MAX);
        let mut order: Vec<(&String, u32)> = targets.iter().map(|(gateway, target)| (gateway, *target)).collect();
        order.sort_by_key(|(gateway, target)| {
            i64::from(self.rows.get(*gateway).map_or(0, |row| row.share)) - i64::from(*target)
        });
        for (gateway, target) in order {
            let Some(row) = self.rows.get_mut(gateway) else { continue };
            let mut grown = row.limit.max(target.min(row.share));
            if target > row.share {
                let more = if planted(Mutant::Overgrant) { target - row.share } else { free.min(target - row.share) };
                row.share += more;
                free = free.saturating_sub(more);
                grown = row.share;
            }
            if grown > row.limit {
                row.limit = grown;
                row.anchored_told = anchored_part(grown, row.followed);
                row.anchored = row.anchored.max(row.anchored_told);
                row.seq = Counters::next(&mut counters.seq);
                told.push(gateway.clone());
            }
        }
    }
}
