#![allow(clippy::unwrap_used)]
use super::*;

const WORKER: WorkerKey = 7;

fn report(gateway: &str, process: ProcessId, epoch: u64, number: u64, row: Option<(u64, u32, u32)>) -> Event {
    let rows = row.map(|(applied, in_use, wants)| ReportRow { worker: WORKER, applied, in_use, wants, surely: 0 });
    let rows = rows.into_iter().collect();
    Event::Report(Report { gateway: gateway.to_owned(), process, epoch, number, rows, leaving: false, mark: 0 })
}

fn with_window(window: u32) -> Ledger {
    let mut ledger = Ledger::default();
    ledger.round(&[Event::Window(WORKER, Some(window))]);
    ledger
}

fn row(ledger: &Ledger, gateway: &str) -> crate::pool::Row {
    ledger.pools()[&WORKER].rows()[gateway]
}

/// Reports of a gateway that applied all it was told.
fn acknowledge(ledger: &mut Ledger, gateway: &str, in_use: u32, wants: u32) -> Round {
    let session = ledger.sessions()[gateway].clone();
    let seq = row(ledger, gateway).seq;
    ledger.round(&[report(gateway, session.process, session.epoch, session.number + 1, Some((seq, in_use, wants)))])
}

#[test]
fn one_gateway_holds_the_whole_window() {
    let mut ledger = with_window(32);
    let round = ledger.round(&[report("a", 1, 0, 1, None)]);
    assert_eq!(round.grants.len(), 1);
    assert_eq!((round.grants[0].limit, round.grants[0].anchored), (32, 16));
}

#[test]
fn a_second_gateway_gets_slots_only_when_the_first_has_let_go_of_them() {
    let mut ledger = with_window(32);
    ledger.round(&[report("a", 1, 0, 1, None)]);
    acknowledge(&mut ledger, "a", 32, 40);
    let round = ledger.round(&[report("b", 2, 0, 1, Some((0, 0, 40)))]);
    assert_eq!((row(&ledger, "a").limit, row(&ledger, "a").share), (16, 32), "told, not believed");
    assert_eq!(row(&ledger, "b").share, 0);
    assert!(round.grants.iter().any(|grant| grant.gateway == "a" && grant.limit == 16));
    acknowledge(&mut ledger, "a", 20, 40);
    assert_eq!((row(&ledger, "a").share, row(&ledger, "b").share), (20, 12), "what runs keeps its slot until it ends");
    acknowledge(&mut ledger, "a", 10, 40);
    assert_eq!((row(&ledger, "a").share, row(&ledger, "b").share), (16, 16));
}

#[test]
fn a_silent_gateway_keeps_its_anchored_slots_and_the_rest_are_zombies() {
    let mut ledger = with_window(32);
    ledger.round(&[report("a", 1, 0, 1, None)]);
    acknowledge(&mut ledger, "a", 32, 32);
    ledger.round(&[Event::FloatExpired("a".to_owned())]);
    let pool = &ledger.pools()[&WORKER];
    assert_eq!((pool.rows()["a"].share, pool.zombies()[0].slots, pool.held()), (16, 16, 32));
    // It is heard of again: its zombies are its own requests.
    ledger.round(&[report("a", 1, ledger.sessions()["a"].epoch, 9, Some((0, 32, 32)))]);
    assert_eq!((row(&ledger, "a").share, ledger.pools()[&WORKER].zombies()), (32, &[][..]));
}

#[test]
fn a_replaced_process_leaves_zombies_until_a_fence_and_its_late_reports_count_for_nothing() {
    let mut ledger = with_window(32);
    ledger.round(&[report("a", 1, 0, 1, None)]);
    acknowledge(&mut ledger, "a", 32, 32);
    ledger.round(&[report("a", 2, 0, 1, Some((0, 0, 5)))]);
    assert_eq!((row(&ledger, "a").share, ledger.pools()[&WORKER].zombies()[0].slots), (0, 32));
    let before = ledger.clone();
    ledger.round(&[report("a", 1, before.sessions()["a"].epoch, 99, Some((0, 32, 32)))]);
    assert_eq!((ledger.pools(), ledger.sessions()), (before.pools(), before.sessions()));
    ledger.round(&[Event::Fenced(WORKER, 1)]);
    assert_eq!(row(&ledger, "a").share, 32);
}

#[test]
fn a_fence_of_a_process_that_is_only_silent_frees_nothing() {
    let mut ledger = with_window(32);
    ledger.round(&[report("a", 1, 0, 1, None)]);
    ledger.round(&[Event::FloatExpired("a".to_owned())]);
    let before = ledger.clone();
    ledger.round(&[Event::Fenced(WORKER, 1)]);
    assert_eq!(ledger.pools(), before.pools());
}

#[test]
fn repeated_and_late_reports_change_nothing() {
    let mut ledger = with_window(32);
    ledger.round(&[report("a", 1, 0, 1, None)]);
    acknowledge(&mut ledger, "a", 4, 4);
    let before = ledger.clone();
    let epoch = before.sessions()["a"].epoch;
    ledger.round(&[report("a", 1, epoch, 2, Some((row(&before, "a").seq, 30, 30)))]);
    ledger.round(&[report("a", 1, epoch, 1, None)]);
    assert_eq!((ledger.pools(), ledger.sessions()), (before.pools(), before.sessions()));
}

#[test]
fn a_window_that_shrinks_below_what_is_held_is_a_debt_that_only_falls() {
    let mut ledger = with_window(32);
    ledger.round(&[report("a", 1, 0, 1, None)]);
    acknowledge(&mut ledger, "a", 32, 40);
    ledger.round(&[Event::Window(WORKER, Some(8))]);
    assert_eq!((row(&ledger, "a").limit, ledger.pools()[&WORKER].held()), (8, 32));
    ledger.round(&[report("b", 2, 0, 1, Some((0, 0, 9)))]);
    for in_use in [20, 9, 3] {
        acknowledge(&mut ledger, "a", in_use, 40);
        let held = ledger.pools()[&WORKER].held();
        assert!(held <= u64::from(in_use.max(8)), "{held}");
    }
    acknowledge(&mut ledger, "a", 3, 40);
    assert_eq!(ledger.pools()[&WORKER].held(), 8);
}

#[test]
fn a_gateway_that_uses_more_than_it_may_is_counted_and_gains_nothing() {
    let mut ledger = with_window(8);
    ledger.round(&[report("a", 1, 0, 1, None)]);
    let round = acknowledge(&mut ledger, "a", 9, 9);
    assert_eq!((round.overdrawn, ledger.pools()[&WORKER].held()), (1, 8));
}

#[test]
fn a_worker_that_left_takes_its_slots_with_it() {
    let mut ledger = with_window(8);
    ledger.round(&[report("a", 1, 0, 1, None)]);
    ledger.round(&[Event::Window(WORKER, None)]);
    assert!(ledger.pools().is_empty());
    let round = ledger.round(&[report("a", 1, ledger.sessions()["a"].epoch, 5, Some((1, 3, 3)))]);
    assert_eq!(round, Round::default());
}

#[test]
fn a_gateway_forgotten_after_the_long_lease_starts_anew_with_what_may_still_run() {
    let mut ledger = with_window(32);
    ledger.round(&[report("a", 1, 0, 1, None)]);
    acknowledge(&mut ledger, "a", 32, 32);
    ledger.round(&[Event::FloatExpired("a".to_owned())]);
    ledger.round(&[Event::AnchorExpired("a".to_owned())]);
    assert!(ledger.sessions().is_empty());
    assert_eq!(ledger.pools()[&WORKER].held(), 32);
    let round = ledger.round(&[report("a", 1, 1, 50, Some((0, 32, 32)))]);
    assert_eq!((row(&ledger, "a").share, round.overdrawn), (32, 0));
}

#[test]
fn a_process_that_says_goodbye_leaves_no_more_than_it_leaves_running() {
    let mut ledger = with_window(32);
    ledger.round(&[report("a", 1, 0, 1, None)]);
    acknowledge(&mut ledger, "a", 3, 3);
    let (session, seq) = (ledger.sessions()["a"].clone(), row(&ledger, "a").seq);
    let Event::Report(last) = report("a", 1, session.epoch, session.number + 1, Some((seq, 2, 2))) else { return };
    ledger.round(&[Event::Report(Report { leaving: true, ..last })]);
    assert!(ledger.sessions().is_empty());
    assert_eq!(ledger.pools()[&WORKER].held(), 2);
    let zombies: Vec<u32> = ledger.pools()[&WORKER].zombies().iter().map(|zombie| zombie.slots).collect();
    assert_eq!(zombies, [2]);
}

#[test]
fn a_ledger_that_was_lost_begins_with_what_gateways_run_and_is_later_than_all_they_were_told() {
    let mut old = with_window(16);
    old.round(&[report("a", 1, 0, 1, None)]);
    let (told, epoch) = (row(&old, "a").seq, old.sessions()["a"].epoch);
    let mut ledger = old.begin_anew();
    assert!(ledger.sessions().is_empty() && ledger.pools().is_empty());
    ledger.round(&[
        Event::Window(WORKER, Some(16)),
        report("a", 1, epoch, 500, Some((told + 9, 10, 20))),
        report("b", 2, epoch + 3, 700, Some((told + 7, 6, 20))),
    ]);
    assert_eq!((row(&ledger, "a").share, row(&ledger, "b").share), (10, 6), "what runs keeps its slots");
    assert!(row(&ledger, "a").seq > told + 9 && ledger.sessions()["b"].epoch > epoch + 3);
}

#[test]
fn a_report_of_more_than_was_given_is_noticed() {
    let mut ledger = with_window(8);
    ledger.round(&[report("a", 1, 0, 1, None)]);
    let epoch = ledger.sessions()["a"].epoch;
    let says = |in_use| match report("a", 1, epoch, 2, Some((1, in_use, in_use))) {
        Event::Report(report) => ledger.overdrawn(&report),
        _ => 0,
    };
    assert_eq!((says(8), says(9)), (0, 1));
}

#[test]
fn what_is_anchored_follows_what_was_used_for_a_whole_minute_as_far_as_three_quarters() {
    let mut ledger = with_window(32);
    ledger.round(&[report("a", 1, 0, 1, None)]);
    acknowledge(&mut ledger, "a", 32, 40);
    ledger.round(&[Event::AnchorsFollow]);
    assert_eq!(row(&ledger, "a").anchored_told, 16, "nobody knows yet what was used for a minute");
    acknowledge(&mut ledger, "a", 32, 40);
    let round = ledger.round(&[Event::AnchorsFollow]);
    assert_eq!((round.grants[0].limit, round.grants[0].anchored), (32, 24));
    // An idle moment, and what was anchored is an upper bound until the gateway knows.
    acknowledge(&mut ledger, "a", 20, 20);
    ledger.round(&[Event::AnchorsFollow]);
    assert_eq!((row(&ledger, "a").anchored_told, row(&ledger, "a").anchored), (20, 24));
    acknowledge(&mut ledger, "a", 0, 0);
    assert_eq!(row(&ledger, "a").anchored, 20);
    ledger.round(&[Event::AnchorsFollow]);
    assert_eq!(row(&ledger, "a").anchored_told, 16);
    // Who is not heard of keeps what it was told.
    ledger.round(&[Event::FloatExpired("a".to_owned())]);
    let before = ledger.clone();
    assert_eq!(ledger.round(&[Event::AnchorsFollow]).grants, []);
    assert_eq!(ledger.pools(), before.pools());
}

#[test]
fn slots_move_when_somebody_needs_more_than_before_or_lets_go_of_what_others_wait_for() {
    let mut ledger = with_window(32);
    ledger.round(&[report("a", 1, 0, 1, None), report("b", 2, 0, 1, None)]);
    let moves = |ledger: &Ledger, gateway: &str, in_use: u32, wants: u32| {
        let (session, seq) = (&ledger.sessions()[gateway], row(ledger, gateway).seq);
        match report(gateway, session.process, session.epoch, 99, Some((seq, in_use, wants))) {
            Event::Report(report) => ledger.moves(&report),
            _ => false,
        }
    };
    acknowledge(&mut ledger, "a", 0, 0);
    acknowledge(&mut ledger, "b", 16, 16);
    assert!(!moves(&ledger, "a", 4, 4), "it has what it needs, and nobody waits for what it lets go");
    assert!(moves(&ledger, "a", 16, 30));
    acknowledge(&mut ledger, "b", 16, 40);
    assert!(moves(&ledger, "a", 0, 0), "another one waits for what it lets go");
    acknowledge(&mut ledger, "a", 16, 30);
    acknowledge(&mut ledger, "b", 16, 40);
    acknowledge(&mut ledger, "a", 16, 60);
    assert!(!moves(&ledger, "a", 16, 62), "hardly more than before");
}
