#![allow(clippy::unwrap_used)]
use super::*;

const WORKER: WorkerKey = 7;

fn at(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

fn grant(seq: u64, limit: u32, anchored: u32) -> Grant {
    Grant { gateway: "a".to_owned(), process: 1, epoch: 1, worker: WORKER, seq, limit, anchored }
}

fn shares(hold: bool) -> Shares {
    let mut shares = Shares::new("a", 1, Times::default(), hold);
    assert!(shares.apply(&Update { epoch: 1, echo: Some(at(100)), grants: vec![grant(1, 8, 5)], mark: 0 }, at(101)));
    shares
}

#[test]
fn slots_float_for_a_short_lease_and_anchored_ones_for_a_long_one() {
    let shares = shares(false);
    assert_eq!(shares.limit(WORKER, at(101)), 8);
    assert_eq!(
        shares.next_expiry(at(101)),
        Some(Duration::from_millis(109_730)),
        "from the sending, less drift and margin"
    );
    assert_eq!(shares.limit(WORKER, at(110)), 5);
    assert_eq!(shares.limit(WORKER, at(900)), 5);
    assert_eq!(shares.limit(WORKER, at(1000)), 0);
    assert_eq!(shares.next_expiry(at(1000)), None);
}

#[test]
fn who_would_rather_serve_than_stop_holds_anchored_slots_for_ever() {
    assert_eq!(shares(true).limit(WORKER, at(100_000)), 5);
}

#[test]
fn a_process_that_was_told_nothing_holds_nothing() {
    let shares = Shares::new("a", 1, Times::default(), true);
    assert_eq!((shares.limit(WORKER, at(1)), shares.next_expiry(at(1))), (0, None));
}

#[test]
fn updates_count_in_their_order_and_for_their_process_only() {
    let mut shares = shares(false);
    assert!(shares.apply(&Update { epoch: 1, echo: None, grants: vec![grant(5, 6, 3)], mark: 0 }, at(101)));
    assert!(!shares.apply(&Update { epoch: 1, echo: None, grants: vec![grant(4, 20, 9)], mark: 0 }, at(101)));
    let other = Grant { process: 2, ..grant(9, 30, 30) };
    assert!(!shares.apply(&Update { epoch: 1, echo: None, grants: vec![other], mark: 0 }, at(101)));
    assert_eq!(shares.limit(WORKER, at(101)), 6);
}

#[test]
fn an_answer_of_a_new_epoch_renews_the_lease_but_not_what_was_told_before() {
    let mut shares = shares(false);
    assert!(!shares.apply(&Update { epoch: 2, echo: Some(at(200)), grants: Vec::new(), mark: 0 }, at(200)));
    assert_eq!(shares.limit(WORKER, at(200)), 0);
    assert!(!shares.apply(&Update { epoch: 1, echo: Some(at(201)), grants: vec![grant(9, 8, 8)], mark: 0 }, at(201)));
    assert_eq!(shares.limit(WORKER, at(201)), 0, "an older epoch");
}

#[test]
fn reports_say_what_changed_and_what_was_applied() {
    let mut shares = shares(false);
    let first = shares.report([WORKER].into_iter(), |_| (3, 4, 0), false);
    assert_eq!(first.rows, [ReportRow { worker: WORKER, applied: 1, in_use: 3, wants: 4, surely: 0 }]);
    let second = shares.report([WORKER].into_iter(), |_| (3, 4, 0), false);
    assert_eq!((second.rows.len(), second.number, second.epoch), (0, 2, 1));
    assert_eq!(shares.report([WORKER].into_iter(), |_| (3, 4, 0), true).rows, first.rows);
}
