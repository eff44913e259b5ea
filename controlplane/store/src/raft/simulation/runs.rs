//! The runs, and what they show.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, Once};
use std::time::Instant;

use super::super::mutant::{Mutant, plant};
use super::*;

/// Whether the long variant was asked for, which is for release builds: `make simulation`.
fn long() -> bool {
    std::env::var_os("SMG_SIMULATION").is_some()
}

fn number(variable: &str) -> Option<u64> {
    std::env::var(variable).ok()?.parse().ok()
}

/// Every fault that is planted, and how many seeds may pass before it is found.
const MUTANTS: [Mutant; 10] = [
    Mutant::NothingFlushed,
    Mutant::AcknowledgedEarly,
    Mutant::VoteNotSaved,
    Mutant::PurgedTooFar,
    Mutant::SnapshotNotInstalled,
    Mutant::SnapshotOfTomorrow,
    Mutant::AnsweredUnpublished,
    Mutant::PartCountsAsAll,
    Mutant::UnknownMeansNo,
    Mutant::AnyDisk,
];
const GATEWAY_FAULTS: [Planted; 2] = [Planted::GatewayForgetsRemovals, Planted::GatewaySaysNothing];
/// Most seeds for one of them.
const PATIENCE: u64 = 60;

#[test]
fn one_seed_can_be_shown() {
    let seed = number("SMG_SEED").unwrap_or(1);
    let began = Instant::now();
    let run = run(seed);
    for event in &run.events {
        println!("{event}");
    }
    println!("{:?}\n{:?}\n{} polls, {:?}", run.counts, run.faults, run.polls, began.elapsed());
}

#[test]
fn the_same_seed_gives_the_same_run() {
    for seed in 0..if long() { 20 } else { 2 } {
        let (one, other) = (run(seed), run(seed));
        for (left, right) in one.events.iter().zip(&other.events) {
            assert_eq!(left, right, "seed {seed}");
        }
        assert!(one == other, "seed {seed}");
    }
}

thread_local! {
    static SILENT: Cell<bool> = const { Cell::new(false) };
}

/// Runs a seed, silently. What was violated, if anything.
fn violation(seed: u64) -> Result<Run, String> {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let usual = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            if !SILENT.with(Cell::get) {
                usual(panic);
            }
        }));
    });
    SILENT.with(|silent| silent.set(true));
    let result = catch_unwind(AssertUnwindSafe(|| run(seed)));
    SILENT.with(|silent| silent.set(false));
    result.map_err(|panic| {
        let text = panic.downcast_ref::<String>().cloned();
        text.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned())).unwrap_or_default()
    })
}

/// How many runs there are: as many as fit into a time, or a number.
struct Budget {
    began: Instant,
    time: Duration,
    least: u64,
}

impl Budget {
    fn lasts(&self, done: u64) -> bool {
        done < self.least || self.began.elapsed() < self.time
    }
}

#[derive(Debug, Default)]
struct Total {
    runs: u64,
    counts: Counts,
    faults: Faults,
    micros: u64,
    recoveries: Vec<u64>,
}

impl Total {
    fn add(&mut self, run: &Run) {
        self.runs += 1;
        self.micros += run.micros;
        self.recoveries.push(run.recovery);
        let (all, one) = (&mut self.counts, &run.counts);
        all.elections += one.elections;
        all.entries += one.entries;
        all.applications += one.applications;
        all.acknowledged += one.acknowledged;
        all.denied += one.denied;
        all.unknown += one.unknown;
        all.reads += one.reads;
        all.gateway_states += one.gateway_states;
        all.snapshots_installed += one.snapshots_installed;
        all.restarts += one.restarts;
        let (all, one) = (&mut self.faults, &run.faults);
        all.partitions += one.partitions;
        all.crashes += one.crashes;
        all.crashes_in_writes += one.crashes_in_writes;
        all.disks_lost += one.disks_lost;
        all.pauses += one.pauses;
        all.stalls += one.stalls;
        all.clock_jumps += one.clock_jumps;
        all.bad_networks += one.bad_networks;
        all.transfers += one.transfers;
    }

    fn recovery(&mut self, percent: usize) -> f64 {
        self.recoveries.sort_unstable();
        let at = (self.recoveries.len() * percent / 100).min(self.recoveries.len() - 1);
        self.recoveries[at] as f64 / 1e6
    }
}

/// The seeds of the clean runs begin here.
const FIRST_SEED: u64 = 1_000;

/// Clean runs, so many at a time, each in one thread: none may violate anything.
fn survive(budget: &Budget, at_a_time: u64) -> Total {
    let (next, total) = (AtomicU64::new(0), Mutex::new(Total::default()));
    let work = || loop {
        let begun = next.fetch_add(1, Ordering::Relaxed);
        if !budget.lasts(begun) {
            return;
        }
        let seed = FIRST_SEED + begun;
        match violation(seed) {
            Ok(run) => {
                let mut total = total.lock().unwrap();
                total.add(&run);
                if total.runs.is_multiple_of(50) {
                    println!("{} runs in {:?}", total.runs, budget.began.elapsed());
                }
            }
            Err(reason) => panic!("seed {seed}: {reason}"),
        }
    };
    std::thread::scope(|threads| {
        for _ in 0..at_a_time {
            threads.spawn(work);
        }
    });
    total.into_inner().unwrap()
}

/// The seed with which a planted fault is found, and how.
fn find(name: &str, planted: impl Fn(bool)) -> (u64, String) {
    planted(true);
    let found = (0..PATIENCE).find_map(|seed| violation(seed).err().map(|reason| (seed, reason)));
    planted(false);
    found.unwrap_or_else(|| panic!("{name} is planted, and {PATIENCE} runs did not notice"))
}

/// Plants one fault after the other, or only that of `SMG_MUTANT`. What found each.
fn find_all() -> Vec<(String, u64, String)> {
    let only = std::env::var("SMG_MUTANT").ok();
    let mut found = Vec::new();
    let mut search = |name: String, planted: &dyn Fn(bool)| {
        if only.as_ref().is_some_and(|only| *only != name) {
            return;
        }
        let (seed, reason) = find(&name, planted);
        println!("{name}: seed {seed}: {reason}");
        found.push((name, seed, reason));
    };
    for mutant in MUTANTS {
        search(format!("{mutant:?}"), &|on| plant(on.then_some(mutant)));
    }
    for fault in GATEWAY_FAULTS {
        search(format!("{fault:?}"), &|on| PLANTED.with(|planted| planted.set(on.then_some(fault))));
    }
    found
}

#[test]
fn every_planted_fault_is_found() {
    find_all();
}

#[test]
fn clusters_survive_everything_that_goes_wrong() {
    let (least, seconds) = if long() { (number("SMG_SEEDS").unwrap_or(1_000), 0) } else { (3, 20) };
    let budget = Budget { began: Instant::now(), time: Duration::from_secs(seconds), least };
    let at_a_time = number("SMG_JOBS").unwrap_or(1).max(1);
    let mut total = survive(&budget, at_a_time);
    let took = budget.began.elapsed();
    println!("{} runs in {took:?}: {total:?}", total.runs);
    if long() {
        let report = report(&mut total, &find_all(), took, at_a_time);
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/reports/cluster-simulation.md");
        std::fs::write(path, report).unwrap();
    }
}

fn report(total: &mut Total, found: &[(String, u64, String)], took: Duration, at_a_time: u64) -> String {
    let Total { runs, counts, faults, micros, .. } = &*total;
    let build = if cfg!(debug_assertions) { "debug" } else { "release" };
    let mut text = format!(
        "# Cluster simulation\n\n\
         The last long run of the deterministic simulation of the replicated control plane (`make simulation SEEDS={runs} JOBS={at_a_time}`, {build}\n\
         build; what it is: `controlplane/store/src/raft/simulation/mod.rs`). Any violation fails it, and then there is no report.\n\n\
         | what | how many |\n|---|---|\n\
         | seeds, all without a violation | {runs} ({FIRST_SEED} to {}) |\n\
         | simulated time | {:.1} hours |\n\
         | elections | {} |\n| entries written to disks | {} |\n| batches applied and compared with the reference | {} |\n\
         | writes acknowledged / reported as not happened / unknown | {} / {} / {} |\n\
         | linearizable reads | {} |\n| snapshots that gateways put into use | {} |\n| snapshots that members installed | {} |\n\
         | disks opened after a crash or a start | {} |\n\
         | partitions | {} |\n| deaths between writes / in the middle of one | {} / {} |\n| disks lost for good | {} |\n\
         | members that stood still / disks that stalled | {} / {} |\n| clock jumps | {} |\n| changes of the network's loss, delay and repetition | {} |\n\
         | leaders told to hand over | {} |\n",
        FIRST_SEED + runs - 1,
        *micros as f64 / 3.6e9,
        counts.elections,
        counts.entries,
        counts.applications,
        counts.acknowledged,
        counts.denied,
        counts.unknown,
        counts.reads,
        counts.gateway_states,
        counts.snapshots_installed,
        counts.restarts,
        faults.partitions,
        faults.crashes,
        faults.crashes_in_writes,
        faults.disks_lost,
        faults.pauses,
        faults.stalls,
        faults.clock_jumps,
        faults.bad_networks,
        faults.transfers,
    );
    let each = took.as_secs_f64() * at_a_time as f64 / total.runs as f64;
    text += &format!(
        "\nFrom the end of all faults until there was a leader, all voters, a new write, equal states and up-to-date gateways: p50 {:.1} s,\n\
         p99 {:.1} s, most {:.1} s (simulated). All seeds together took {:.0} minutes, {:.1} s each.\n\n\
         ## Faults planted on purpose\n\nEach must be found; the seed is the first of 0, 1, 2, … that finds it.\n\n\
         | fault | seed | found by |\n|---|---|---|\n",
        total.recovery(50),
        total.recovery(99),
        total.recovery(100),
        took.as_secs_f64() / 60.0,
        each,
    );
    for (name, seed, reason) in found {
        let first = reason.lines().next().unwrap_or_default().replace('|', "\\|");
        text += &format!("| `{name}` | {seed} | {} |\n", first.chars().take(140).collect::<String>());
    }
    text
}
