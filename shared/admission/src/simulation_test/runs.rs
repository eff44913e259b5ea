//! What runs of the simulation must show.

use super::*;
use crate::mutant::plant;

/// Seeds of which a run breaks an invariant.
fn violations(profile: Profile, seeds: std::ops::Range<u64>) -> Vec<(u64, String)> {
    seeds
        .filter_map(|seed| Simulation::new(seed, profile, None, None).run(150).err().map(|error| (seed, error)))
        .collect()
}

fn seeds() -> u64 {
    match std::env::var_os("SMG_SOAK") {
        Some(_) => 5000,
        None => 60,
    }
}

#[test]
fn no_engine_ever_runs_more_than_its_window_whatever_fails() {
    assert_eq!(violations(GENERAL, 0..seeds()), []);
}

#[test]
fn leases_that_end_while_messages_are_late_never_let_two_use_one_slot() {
    assert_eq!(violations(LEASES, 0..seeds()), []);
}

#[test]
fn the_same_seed_gives_the_same_run() {
    let run = |seed| {
        let mut simulation = Simulation::new(seed, GENERAL, None, None);
        simulation.run(60).unwrap();
        (simulation.ledger, simulation.served, simulation.request)
    };
    assert_eq!(run(7), run(7));
}

/// Every rule that keeps two gateways off one slot is broken once, and a run must notice. Each comes with a seed that did when it was
/// written, to save time; others are tried after it.
#[test]
fn each_planted_fault_is_found() {
    let mutants = [
        (Mutant::AnchorLoweredEarly, 2),
        (Mutant::UpdatesOutOfOrder, 0),
        (Mutant::AckOfOlderUpdate, 0),
        (Mutant::LeaseFromAnswer, 6),
        (Mutant::LeaseWithoutMargin, 56),
        (Mutant::ExpiredEarly, 0),
        (Mutant::NoZombies, 4),
        (Mutant::Overgrant, 0),
        (Mutant::ShareFallsToUse, 0),
        (Mutant::EvidenceWithoutGuard, 850),
        (Mutant::EvidenceOfRunningOnly, 10),
    ];
    let mut survivors = Vec::new();
    for (mutant, likely) in mutants {
        plant(Some(mutant));
        let found = std::iter::once(likely).chain(0..1000).find(|seed| {
            [GENERAL, LEASES].into_iter().any(|profile| Simulation::new(*seed, profile, None, None).run(150).is_err())
        });
        plant(None);
        match found {
            Some(seed) => println!("{mutant:?}: found with seed {seed}"),
            None => survivors.push(mutant),
        }
    }
    assert_eq!(survivors, []);
}

/// A burst on one of eight idle gateways: how long until it has most of the slots that the others leave.
#[test]
fn a_burst_on_one_of_several_idle_gateways_gets_what_the_others_leave() {
    let mut simulation = Simulation::new(3, CALM, Some(8), Some(64));
    simulation.gateways.iter_mut().for_each(|gateway| gateway.load = 0.0);
    simulation.run(20).unwrap();
    simulation.gateways[0].waiting.insert(1, 200);
    simulation.pump(0).unwrap();
    simulation.report(0, true);
    let begun = simulation.now;
    let mut reached = None;
    while reached.is_none() && simulation.now < begun + 5 * SECOND {
        let Some(Reverse((at, _, slot))) = simulation.queue.pop() else { break };
        simulation.now = at;
        let happens = simulation.pending.remove(&slot).unwrap();
        simulation.happen(happens).unwrap();
        if simulation.gateways[0].shares.limit(1, simulation.clock(0)) >= 48 {
            reached = Some(simulation.now - begun);
        }
    }
    println!("85 % of the 57 free slots after {reached:?} us");
    assert!(reached.is_some_and(|time| time <= SECOND / 2), "{reached:?} us until 85 % of the 57 free slots");
}

/// While demand exceeds the window and nothing fails, the window is used.
#[test]
fn nearly_every_slot_is_used_while_demand_exceeds_the_window() {
    let mut simulation = Simulation::new(5, CALM, Some(4), Some(32));
    simulation.gateways.iter_mut().for_each(|gateway| gateway.load = 3.0);
    simulation.run(20).unwrap();
    let (mut samples, mut used) = (0u64, 0u64);
    for second in 20..60 {
        simulation.run(second).unwrap();
        samples += 1;
        used += simulation.gateways.iter().map(|gateway| gateway.running[&1].len() as u64).sum::<u64>();
    }
    assert!(used * 100 >= samples * 32 * 95, "{used} of {} slots", samples * 32);
}

#[test]
fn slots_of_a_dead_gateway_serve_others_after_the_lease() {
    let mut simulation = Simulation::new(9, CALM, Some(2), Some(32));
    simulation.gateways.iter_mut().for_each(|gateway| gateway.load = 4.0);
    simulation.run(20).unwrap();
    simulation.gateways[1].up = false;
    // Its requests end with it: the engine sees the connections close.
    simulation.engines.get_mut(&1).unwrap().retain(|_, (gateway, _)| *gateway == 0);
    simulation.run(35).unwrap();
    let limit = simulation.gateways[0].shares.limit(1, simulation.clock(0));
    let anchored = simulation.ledger.pools()[&1].rows()["g1"].share;
    assert!(limit >= 32 - anchored - 1, "{limit} of 32, {anchored} are anchored to the dead");
}
