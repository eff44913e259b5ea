//! Policies that follow load: expected wait, requests in flight, prompt lengths.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use proptest::prelude::*;
use smg_policies::{
    Bucket, BucketTuning, Candidate, LeastLoad, LeastLoadTuning, LoadMetric, LoadReport, Policy, PowerOfTwo,
    RequestView,
};

fn workers(loads: &[u64]) -> Vec<Candidate<'static>> {
    loads.iter().zip(1..).map(|(load, id)| Candidate::new(id, "http://worker", *load)).collect()
}

fn waiting(waiting: u64) -> Option<LoadReport> {
    Some(LoadReport { waiting, ..Default::default() })
}

fn word(seed: u64) -> u64 {
    let mixed = seed.wrapping_add(1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    let mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    mixed ^ (mixed >> 31)
}

// --- least_load and power_of_two

proptest! {
    #[test]
    fn without_reports_the_fewest_requests_in_flight_win(loads in prop::collection::vec(0_u64..50, 1..30), entropy: u64) {
        let picked = LeastLoad::default().pick(&workers(&loads), &RequestView::default(), entropy).unwrap();
        prop_assert_eq!(loads[picked], *loads.iter().min().unwrap());
    }

    #[test]
    fn the_least_loaded_stays_so_when_others_get_more_work(
        mut queues in prop::collection::vec(1_u64..50, 2..20),
        more in 0_u64..50,
        entropy: u64,
    ) {
        let pick = |queues: &[u64]| {
            let fleet: Vec<_> =
                workers(&vec![0; queues.len()]).into_iter().zip(queues).map(|(w, q)| w.with_report(waiting(*q))).collect();
            LeastLoad::default().pick(&fleet, &RequestView::default(), entropy).unwrap()
        };
        queues[1] = 0;
        prop_assert_eq!(pick(&queues), 1);
        queues[0] += more;
        prop_assert_eq!(pick(&queues), 1);
    }
}

#[test]
fn ties_are_uniform_and_no_worker_of_an_idle_leg_is_preferred() {
    for reports in [None, waiting(3)] {
        let fleet: Vec<_> = workers(&[2; 4]).into_iter().map(|worker| worker.with_report(reports)).collect();
        let mut counts = [0_u32; 4];
        for seed in 0..4_000 {
            counts[LeastLoad::default().pick(&fleet, &RequestView::default(), word(seed)).unwrap()] += 1;
        }
        assert!(counts.iter().all(|count| count.abs_diff(1_000) < 150), "{counts:?}");
    }
}

#[test]
fn a_burst_between_two_reports_spreads() {
    // Worker 0 looked slightly better at the last report; what is sent to it since counts.
    let mut sent = [0_u64; 2];
    for seed in 0..100 {
        let report = |queued: u64, sent: u64| {
            let tokens = sent * 1024;
            Some(LoadReport {
                waiting: queued,
                dispatched_requests: sent,
                dispatched_tokens: tokens,
                ..Default::default()
            })
        };
        let fleet =
            [workers(&sent)[0].with_report(report(1, sent[0])), workers(&sent)[1].with_report(report(3, sent[1]))];
        sent[LeastLoad::default().pick(&fleet, &RequestView::default(), word(seed)).unwrap()] += 1;
    }
    assert_eq!(sent[0] - sent[1], 2);
}

#[test]
fn workers_at_the_waiting_cap_are_passed_over_and_all_at_the_cap_is_no_pick() {
    let policy = LeastLoad::new(LeastLoadTuning { max_waiting_requests: 4, ..Default::default() });
    let sent = |dispatched_requests| Some(LoadReport { waiting: 3, dispatched_requests, ..Default::default() });
    for (first, second, expected) in [
        (waiting(4), waiting(3), Some(1)),
        (waiting(2), waiting(3), Some(0)),
        (waiting(9), None, Some(1)),
        (sent(0), waiting(9), Some(0)),
        (sent(1), waiting(9), None),
    ] {
        let fleet = [workers(&[0, 70])[0].with_report(first), workers(&[0, 70])[1].with_report(second)];
        assert_eq!(policy.pick(&fleet, &RequestView::default(), 0), expected, "{first:?} {second:?}");
    }
    let uncapped = [workers(&[0])[0].with_report(waiting(1_000_000))];
    assert_eq!(LeastLoad::default().pick(&uncapped, &RequestView::default(), 0), Some(0));
}

#[test]
fn power_of_two_compares_what_its_metric_says() {
    // Worker 0 has more of this gateway's requests, worker 1 the longer queue.
    let fleet = [workers(&[5, 1])[0].with_report(waiting(1)), workers(&[5, 1])[1].with_report(waiting(30))];
    for (name, expected) in [("expected_wait", 0), ("requests", 1), ("least_requests", 1)] {
        let policy = PowerOfTwo::new(LoadMetric::from_name(name).unwrap());
        for seed in 0..50 {
            assert_eq!(policy.pick(&fleet, &RequestView::default(), word(seed)), Some(expected), "{name}");
        }
    }
    let even = [fleet[0], Candidate { load: 5, ..fleet[1] }];
    let by_requests = PowerOfTwo::new(LoadMetric::Requests);
    assert!((0..50).all(|seed| by_requests.pick(&even, &RequestView::default(), word(seed)) == Some(0)));
    let least = PowerOfTwo::new(LoadMetric::LeastRequests);
    assert!((0..50).all(|seed| least.pick(&workers(&[4, 3, 9, 2]), &RequestView::default(), word(seed)) == Some(3)));
    assert_eq!(LoadMetric::from_name("load"), None);
}

// --- bucket

fn of_length(text: &str, length: usize, now_ms: u64) -> RequestView<'_> {
    RequestView::new("m").with_text(Some(&text[..length])).at(now_ms)
}

/// Ranges alone: no imbalance ever overrides them.
fn ranges_only() -> Bucket {
    Bucket::new(BucketTuning { balance_abs_threshold: u64::MAX, ..Default::default() })
}

#[test]
fn at_first_lengths_up_to_4096_are_split_evenly() {
    let text = "x".repeat(10_000);
    let policy = ranges_only();
    for (length, worker) in [(1, 0), (1023, 0), (1024, 1), (2047, 1), (2048, 2), (3072, 3), (4095, 3), (10_000, 3)] {
        let pick = policy.decide(&workers(&[0; 4]), &of_length(&text, length, 0), 0);
        assert_eq!((pick.index, pick.branch), (Some(worker), "bucket_hit"), "{length}");
    }
}

#[test]
fn ranges_are_cut_anew_so_that_each_worker_gets_the_same_characters() {
    let text = "x".repeat(1_000);
    let policy = ranges_only();
    let fleet = workers(&[0; 4]);
    let length = |seed: u64| 1 + (word(seed) % 1_000) as usize;
    for seed in 0..2_000 {
        assert_eq!(policy.pick(&fleet, &of_length(&text, length(seed), 4_999), 0), Some(0));
    }
    let mut chars = [0; 4];
    for seed in 2_000..4_000 {
        chars[policy.pick(&fleet, &of_length(&text, length(seed), 5_000), 0).unwrap()] += length(seed);
    }
    let mean = chars.iter().sum::<usize>() / 4;
    assert!(chars.iter().all(|chars| chars.abs_diff(mean) < mean / 8), "{chars:?}");
    // A window without prompts changes nothing; and ranges stretch over whatever candidates there are.
    assert_eq!(policy.pick(&fleet, &of_length(&text, 1_000, 60_000), 0), Some(3));
    assert_eq!(policy.pick(&fleet[..2], &of_length(&text, 1_000, 60_000), 0), Some(1));
}

proptest! {
    #[test]
    fn longer_prompts_never_go_to_an_earlier_worker(
        history in prop::collection::vec(1_usize..9_000, 0..60),
        mut lengths in prop::collection::vec(1_usize..9_000, 2..20),
        count in 1_usize..8,
    ) {
        let text = "x".repeat(9_000);
        let policy = ranges_only();
        let fleet = workers(&vec![0; count]);
        for length in history {
            policy.pick(&fleet, &of_length(&text, length, 1), 0);
        }
        lengths.sort_unstable();
        let picks: Vec<_> =
            lengths.iter().map(|length| policy.pick(&fleet, &of_length(&text, *length, 6_000), 0).unwrap()).collect();
        prop_assert!(picks.is_sorted(), "{picks:?}");
    }
}

#[test]
fn the_least_laden_worker_serves_while_characters_are_uneven() {
    let text = "x".repeat(1_000);
    let policy = Bucket::default();
    let fleet = workers(&[0; 3]);
    let branches: Vec<_> = (0..4).map(|_| policy.decide(&fleet, &of_length(&text, 1_000, 0), 0)).collect();
    let indices: Vec<_> = branches.iter().filter_map(|pick| pick.index).collect();
    // One by its range; the other two catch up; then all are even.
    assert_eq!(indices, [0, 1, 2, 0]);
    assert_eq!(branches.iter().filter(|pick| pick.branch == "bucket_hit").count(), 2);
    // A new window starts even.
    assert_eq!(policy.decide(&fleet, &of_length(&text, 1_000, 5_000), 0).branch, "bucket_hit");
    assert_eq!(policy.decide(&fleet, &RequestView::new("m").at(5_000), 0).branch, "no_prompt");
    assert_eq!(policy.footprint().workers, 1);
    policy.retain(&[]);
    assert_eq!(policy.footprint().workers, 0);
}
