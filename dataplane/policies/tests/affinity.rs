//! Policies that keep like requests together: by recorded prompts, by hash, by pinned keys.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use proptest::prelude::*;
use smg_policies::{
    AssignmentMode, CacheAware, CacheAwareTuning, CacheIndex, Candidate, ConsistentHashing, LoadReport, MAX_RINGS,
    Manual, ManualTuning, Partition, Policy, PrefixHash, PrefixHashTuning, RequestView,
};

const URLS: [&str; 8] =
    ["http://a:1", "http://b:1", "http://c:1", "http://d:1", "http://e:1", "http://f:1", "http://g:1", "http://h:1"];

fn workers(loads: &[u64]) -> Vec<Candidate<'static>> {
    loads.iter().enumerate().map(|(index, load)| Candidate::new(index as u128 + 1, URLS[index], *load)).collect()
}

fn word(seed: u64) -> u64 {
    let mixed = seed.wrapping_add(1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    let mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    mixed ^ (mixed >> 31)
}

/// Two kilobytes that no other seed shares.
fn prompt(seed: u64) -> String {
    (0..128).map(|part| format!("{:016x}", word(seed * 1000 + part))).collect()
}

fn text(text: &str) -> RequestView<'_> {
    RequestView::new("m").with_text(Some(text))
}

// --- cache_aware

#[test]
fn unrelated_prompts_spread_evenly_and_repeats_return() {
    let policy = CacheAware::default();
    let fleet = workers(&[0; 4]);
    let mut counts = [0; 4];
    let firsts: Vec<usize> =
        (0..400).map(|seed| policy.pick(&fleet, &text(&prompt(seed)), word(seed)).unwrap()).collect();
    firsts.iter().for_each(|first| counts[*first] += 1);
    assert!(counts.iter().all(|count| (60..=140).contains(count)), "{counts:?}");
    let returned = (0..100)
        .filter(|seed| policy.pick(&fleet, &text(&prompt(*seed)), word(seed + 7)) == Some(firsts[*seed as usize]));
    assert_eq!(returned.count(), 100);
}

#[test]
fn a_match_decides_only_above_the_threshold() {
    let policy = CacheAware::default();
    let known = "k".repeat(300);
    assert_eq!(policy.pick(&workers(&[1, 0]), &text(&known), 0), Some(1));
    for (letter, unknown, branch, index) in [("u", 699, "tree_match", 1), ("v", 701, "expected_wait_fallback", 0)] {
        // Worker 1 holds the start, worker 0 is idle.
        let prompt = known.clone() + &letter.repeat(unknown);
        let pick = policy.decide(&workers(&[0, 1]), &text(&prompt), 0);
        assert_eq!((pick.branch, pick.index), (branch, Some(index)));
        assert!((pick.match_ratio.unwrap() - 300.0 / (300 + unknown) as f64).abs() < 1e-9);
    }
}

#[test]
fn of_several_holders_the_least_loaded_serves() {
    let policy = CacheAware::default();
    for index in 0..3 {
        let alone = &workers(&[0; 4])[index..=index];
        assert_eq!(policy.pick(alone, &text("the prompt"), 0), Some(0));
    }
    assert_eq!(policy.pick(&workers(&[3, 1, 2, 0]), &text("the prompt"), 0), Some(1));
}

#[test]
fn a_holder_far_busier_than_the_rest_is_passed_over() {
    // (loads, holder passed over): the gate is above max(1.5 · mean, mean + min(64, max(4, ceil(2·sqrt(mean))))).
    for (loads, spills) in [
        ([0, 5, 0, 0], false),  // mean 1.25, gate 5.25
        ([0, 8, 0, 0], true),   // mean 2, gate 6
        ([9, 16, 9, 9], false), // mean 10.75, gate 17.75
        ([9, 24, 9, 9], true),  // mean 12.75, gate 20.75
        ([10_000, 14_000, 10_000, 10_000], false),
        ([1_000, 2_300, 1_000, 1_000], true),
    ] {
        let policy = CacheAware::default();
        policy.pick(&workers(&[1, 0, 1, 1]), &text("the prompt"), 0);
        let pick = policy.decide(&workers(&loads), &text("the prompt"), 0);
        assert_eq!(pick.index == Some(1), !spills, "{loads:?}");
        assert_eq!(pick.branch, if spills { "spill" } else { "tree_match" });
    }
}

#[test]
fn pressure_on_the_kv_cache_suspends_affinity() {
    let reports = |usages: [f64; 2]| -> Vec<_> {
        let with = |(worker, kv_usage): (Candidate<'static>, f64)| {
            worker.with_report(Some(LoadReport { kv_usage, ..Default::default() }))
        };
        workers(&[0; 2]).into_iter().zip(usages).map(with).collect()
    };
    for (balance, overload, usages, suspended) in [
        (1.0, 1.0, [0.0, 1.0], false),
        (0.5, 1.0, [0.2, 0.6], false),
        (0.5, 1.0, [0.2, 0.8], true),
        (1.0, 0.9, [0.8, 0.85], false),
        (1.0, 0.9, [0.8, 0.95], true),
    ] {
        let policy = CacheAware::new(CacheAwareTuning {
            balance_token_usage_threshold: balance,
            overload_token_usage_threshold: overload,
            ..Default::default()
        });
        policy.pick(&workers(&[1, 0]), &text("the prompt"), 0);
        let pick = policy.decide(&reports(usages), &text("the prompt"), 0);
        assert_eq!(pick.branch, if suspended { "kv_pressure_expected_wait" } else { "tree_match" });
        assert_eq!(pick.index, Some(usize::from(!suspended)));
    }
}

#[test]
fn prompts_of_different_partitions_never_match() {
    let policy = CacheAware::default();
    let salted = |salt, key, lora| {
        text("prompt").with_partition(Partition { cache_salt: salt, extra_key: key, lora_path: lora })
    };
    let requests = [
        text("prompt"),
        RequestView::new("n").with_text(Some("prompt")),
        salted(Some("x"), None, None),
        salted(None, Some("x"), None),
        salted(None, None, Some("x")),
        salted(Some(""), None, None),
        salted(Some("x"), Some("x"), None),
        RequestView::new("m").with_token_ids(Some(&[1, 2, 3])),
    ];
    for request in &requests {
        assert_eq!(policy.decide(&workers(&[0; 2]), request, 0).match_ratio, Some(0.0));
    }
    for request in &requests {
        assert_eq!(policy.decide(&workers(&[0; 2]), request, 0).match_ratio, Some(1.0));
    }
}

#[test]
fn token_ids_match_token_by_token() {
    let policy = CacheAware::default();
    let ids: Vec<u32> = (0..100).collect();
    let tokens = |ids| RequestView::new("m").with_token_ids(Some(ids));
    assert_eq!(policy.pick(&workers(&[1, 0]), &tokens(&ids), 0), Some(1));
    assert_eq!(policy.pick(&workers(&[0, 1]), &tokens(&ids[..50]), 0), Some(1));
    assert_eq!(policy.footprint().tokens, 104); // 100, and 16 bytes of the partition
}

#[test]
fn the_record_stays_within_its_limit_and_forgets_removed_workers() {
    let limit = 256 * 1024;
    let policy = CacheAware::new(CacheAwareTuning { max_tree_size: limit, ..Default::default() });
    for seed in 0..2_000 {
        policy.pick(&workers(&[0; 4]), &text(&prompt(seed)), word(seed));
        assert!(policy.footprint().bytes <= limit);
    }
    let full = policy.footprint();
    assert!(full.bytes > limit / 2);
    assert_eq!(full.workers, 4);
    policy.retain(&[1, 2]);
    let half = policy.footprint();
    assert!(half.bytes < full.bytes * 3 / 4);
    assert_eq!(half.workers, 2);
    policy.retain(&[]);
    assert_eq!(policy.footprint(), Default::default());
}

#[test]
fn without_a_prompt_the_least_loaded_serves() {
    for request in [RequestView::new("m"), text("")] {
        assert_eq!(CacheAware::default().pick(&workers(&[3, 1, 2]), &request, 0), Some(1));
    }
}

// --- prefix_hash and consistent_hashing

#[test]
fn a_key_leads_to_the_same_worker_on_every_gateway_whatever_the_order() {
    let fleet = workers(&[0; 8]);
    let mut reversed = fleet.clone();
    reversed.reverse();
    let (one, other) = (ConsistentHashing::default(), ConsistentHashing::default());
    for index in 0..500 {
        let name = format!("user-{index}");
        let chosen = one.pick(&fleet, &keyed(&name, 0), 1).unwrap();
        assert_eq!(reversed[other.pick(&reversed, &keyed(&name, 0), 2).unwrap()].url, fleet[chosen].url);
    }
}

proptest! {
    #[test]
    fn removing_a_worker_moves_its_own_keys_only(removed in 0_usize..8, key in "[a-z]{1,20}") {
        let policy = ConsistentHashing::default();
        let request = RequestView::new("m").with_routing_key(Some(&key));
        let fleet = workers(&[0; 8]);
        let before = fleet[policy.pick(&fleet, &request, 0).unwrap()].url;
        let mut rest = fleet.clone();
        rest.remove(removed);
        let after = rest[policy.pick(&rest, &request, 9).unwrap()].url;
        if before != fleet[removed].url {
            prop_assert_eq!(before, after);
        }
    }

    #[test]
    fn a_prefix_is_never_kept_on_an_overloaded_worker_while_another_is_not(
        loads in prop::collection::vec(0_u64..200, 1..8),
        prompt in "[a-z]{1,40}",
        entropy: u64,
    ) {
        let policy = PrefixHash::default();
        let mean = (loads.iter().sum::<u64>() + 1) as f64 / loads.len() as f64;
        let limit = (1.25 * mean).max(mean + 10.0);
        let picked = policy.pick(&workers(&loads), &text(&prompt), entropy).unwrap();
        // The least loaded is always below the limit.
        prop_assert!(loads[picked] as f64 <= limit);
    }
}

#[test]
fn consistent_hashing_takes_the_first_hint_it_finds() {
    let policy = ConsistentHashing::default();
    let fleet = workers(&[0; 8]);
    let request = RequestView::new("m");
    let client = request.with_client(Some("10.1.1.1"));
    let keyed = client.with_routing_key(Some("user-7"));
    let targeted = keyed.with_target_worker(Some(5));
    for (request, branch) in [
        (request, "random_fallback"),
        (request.with_client(Some("")).with_routing_key(Some("")), "random_fallback"),
        (client, "implicit_key_hit"),
        (keyed, "routing_key_hit"),
        (targeted, "target_worker_hit"),
        (keyed.with_target_worker(Some(8)), "target_worker_miss"),
    ] {
        assert_eq!(policy.decide(&fleet, &request, 0).branch, branch);
    }
    assert_eq!(policy.pick(&fleet, &targeted, 0), Some(5));
    assert_eq!(policy.pick(&fleet[..5], &targeted, 0), None);
    let only_key = request.with_routing_key(Some("user-7"));
    assert_eq!(policy.pick(&fleet, &keyed, 0), policy.pick(&fleet, &only_key, 99));
    assert_eq!(policy.decide(&[], &keyed, 0).branch, "no_healthy_workers");
}

#[test]
fn prompts_that_begin_alike_share_a_worker() {
    let policy = PrefixHash::new(PrefixHashTuning { prefix_token_count: 4, ..Default::default() });
    let fleet = workers(&[0; 8]);
    let pick = |request: RequestView<'_>| policy.pick(&fleet, &request, 0).unwrap();
    for index in 0..50 {
        let head = format!("{index:016}");
        let (one, other) = (format!("{head} one"), format!("{head} other"));
        assert_eq!(pick(text(&one)), pick(text(&other)));
        let ids = [index, 2, 3, 4, 5];
        let tokens = RequestView::new("m").with_token_ids(Some(&ids));
        assert_eq!(pick(tokens), pick(tokens.with_token_ids(Some(&ids[..4])).with_text(Some(&one))));
        // A routing key goes before the prompt.
        assert_eq!(pick(text(&one).with_routing_key(Some("k"))), pick(text(&other).with_routing_key(Some("k"))));
    }
    let mut used: Vec<_> = (0..200).map(|seed| pick(text(&prompt(seed)))).collect();
    used.sort_unstable();
    used.dedup();
    assert_eq!(used.len(), 8);
}

#[test]
fn an_overloaded_worker_sheds_its_prefixes_together() {
    let policy = PrefixHash::default();
    let prompt = prompt(1);
    let target = policy.decide(&workers(&[0; 8]), &text(&prompt), 0);
    assert_eq!(target.branch, "ring_hit");
    let mut loads = [0; 8];
    loads[target.index.unwrap()] = 10;
    assert_eq!(policy.pick(&workers(&loads), &text(&prompt), 0), target.index);
    loads[target.index.unwrap()] = 50;
    let spilled = policy.decide(&workers(&loads), &text(&prompt), 0);
    assert_eq!(spilled.branch, "load_balance_walk");
    assert_ne!(spilled.index, target.index);
    assert!((0..50).all(|entropy| policy.pick(&workers(&loads), &text(&prompt), word(entropy)) == spilled.index));
    assert_eq!(policy.decide(&workers(&[2, 1]), &RequestView::new("m"), 0).index, Some(1));
    assert_eq!(policy.decide(&workers(&[2, 1]), &RequestView::new("m"), 0).branch, "no_routing_key");
}

#[test]
fn the_deepest_boundary_makes_the_key_and_shallower_ones_take_over() {
    let tuning = PrefixHashTuning { prefix_token_count: 1, boundaries: vec![2, 4], ..Default::default() };
    let policy = PrefixHash::new(tuning);
    let fleet = workers(&[0; 8]);
    let plain = |tokens| PrefixHash::new(PrefixHashTuning { prefix_token_count: tokens, ..Default::default() });
    let plain = [plain(1), plain(2), plain(4)];
    for seed in 0..40 {
        let prompt = prompt(seed);
        for (length, tokens) in [(7, 0), (8, 1), (15, 1), (16, 2), (2000, 2)] {
            let request = text(&prompt[..length]);
            assert_eq!(policy.pick(&fleet, &request, 0), plain[tokens].pick(&fleet, &request, 0));
        }
        let shallow = plain[1].pick(&fleet, &text(&prompt), 0);
        let deep = plain[2].pick(&fleet, &text(&prompt), 0);
        if deep != shallow {
            let mut loads = [0; 8];
            loads[deep.unwrap()] = 100;
            let pick = policy.decide(&workers(&loads), &text(&prompt), 0);
            assert_eq!((pick.index, pick.branch), (shallow, "ring_hit"));
        }
    }
}

#[test]
fn rings_are_bounded_whatever_sets_come() {
    let policy = ConsistentHashing::default();
    let fleet = workers(&[0; 8]);
    for set in 1_u32..256 {
        let candidates: Vec<_> = (0..8).filter(|bit| set >> bit & 1 == 1).map(|bit| fleet[bit]).collect();
        let request = RequestView::new("m").with_routing_key(Some("key"));
        assert!(policy.pick(&candidates, &request, 0).unwrap() < candidates.len());
        assert!(policy.footprint().entries <= MAX_RINGS);
    }
}

// --- manual

fn keyed(key: &str, now_ms: u64) -> RequestView<'_> {
    RequestView::new("m").with_routing_key(Some(key)).at(now_ms)
}

#[test]
fn a_key_stays_gets_a_second_worker_when_needed_and_returns() {
    let policy = Manual::default();
    let fleet = workers(&[0; 4]);
    let first = policy.decide(&fleet, &keyed("user", 0), 0);
    assert_eq!((first.index, first.branch), (Some(0), "vacant"));
    for entropy in 0..20 {
        let again = policy.decide(&fleet, &keyed("user", 1), word(entropy));
        assert_eq!((again.index, again.branch), (Some(0), "occupied_hit"));
    }
    let second = policy.decide(&fleet[1..], &keyed("user", 2), 0);
    assert_eq!((second.index, second.branch), (Some(0), "occupied_miss"));
    assert_eq!(policy.pick(&fleet[1..], &keyed("user", 3), u64::MAX), Some(0));
    assert_eq!(policy.pick(&fleet, &keyed("user", 4), u64::MAX), Some(0));
    // A third worker takes the place of the first pin.
    assert_eq!(policy.pick(&fleet[2..], &keyed("user", 5), 0), Some(0));
    assert_eq!(policy.pick(&fleet, &keyed("user", 6), 0), Some(1));
    assert_eq!(policy.footprint().entries, 1);
}

#[test]
fn an_idle_key_is_forgotten_at_its_time_and_not_before() {
    let policy = Manual::new(ManualTuning { max_idle_ms: 1000, ..Default::default() });
    let fleet = workers(&[0; 2]);
    policy.pick(&fleet, &keyed("user", 5_000), 0);
    assert_eq!(policy.decide(&fleet, &keyed("user", 6_000), 0).branch, "occupied_hit");
    assert_eq!(policy.decide(&fleet, &keyed("user", 7_001), 0).branch, "vacant");
    policy.pick(&fleet, &keyed("other", 7_500), 0);
    assert_eq!(policy.footprint().entries, 2);
    policy.pick(&fleet, &keyed("other", 8_500), 0);
    assert_eq!(policy.footprint().entries, 1);
}

#[test]
fn new_keys_are_assigned_as_the_mode_says_and_requests_without_key_are_not_pinned() {
    let manual = |assignment| Manual::new(ManualTuning { assignment, ..Default::default() });
    let by_load = manual(AssignmentMode::from_name("delegate").unwrap());
    assert_eq!(by_load.pick(&workers(&[3, 1, 2]), &keyed("user", 0), 0), Some(1));
    assert_eq!(by_load.pick(&workers(&[3, 9, 2]), &keyed("user", 0), 0), Some(1));
    let unkeyed = by_load.decide(&workers(&[3, 9, 2]), &RequestView::new("m"), 0);
    assert_eq!((unkeyed.index, unkeyed.branch), (Some(2), "no_routing_id"));
    assert_eq!(by_load.footprint().entries, 1);

    let by_group = manual(AssignmentMode::from_name("min_group").unwrap());
    let mut counts = [0; 4];
    for user in 0..400 {
        counts[by_group.pick(&workers(&[9, 0, 5, 1]), &keyed(&format!("{user}"), 0), word(user)).unwrap()] += 1;
    }
    assert_eq!(counts, [100; 4]);

    let random = manual(AssignmentMode::from_name("random").unwrap());
    let picks: Vec<_> =
        [0, u64::MAX].map(|entropy| random.pick(&workers(&[0; 4]), &keyed(&format!("{entropy}"), 0), entropy)).into();
    assert_eq!(picks, [Some(0), Some(3)]);
    assert_eq!(AssignmentMode::from_name("sticky"), None);
}

#[test]
fn remembered_keys_are_bounded_and_those_in_use_stay() {
    let policy = Manual::new(ManualTuning { max_keys: 100, ..Default::default() });
    let fleet = workers(&[0; 4]);
    policy.pick(&fleet, &keyed("regular", 0), 0);
    for user in 0..10_000 {
        policy.pick(&fleet, &keyed(&format!("{user}"), user), word(user));
        assert_eq!(policy.pick(&fleet, &keyed("regular", user), word(user)), Some(0));
        assert!(policy.footprint().entries <= 100);
    }
}

#[test]
fn the_hash_index_follows_the_longest_known_head_of_token_prompts_for_a_time() {
    let tuning = CacheAwareTuning {
        index: CacheIndex::Hash,
        boundaries: vec![4, 8],
        ttl_ms: 1000,
        ..CacheAwareTuning::default()
    };
    let policy = CacheAware::new(tuning);
    let workers: Vec<Candidate<'_>> =
        ["http://a", "http://b", "http://c"].iter().zip(1..).map(|(url, id)| Candidate::new(id, url, 0)).collect();
    let place = |ids: &[u32], now: u64, entropy: u64| {
        policy.decide(&workers, &RequestView::new("m").with_token_ids(Some(ids)).at(now), entropy)
    };
    let long: Vec<u32> = (0..20).collect();
    let home = place(&long, 5000, 0);
    assert_eq!((home.branch, home.match_ratio), ("expected_wait_fallback", Some(0.0)));
    // The same head of 8, then only that of 4, whatever chance says.
    for (ids, ratio) in [(&long[..10], 0.8), (&[0, 1, 2, 3, 9, 9, 9, 9, 9, 9][..], 0.4)] {
        let pick = place(ids, 5500, u64::MAX);
        assert_eq!((pick.index, pick.branch, pick.match_ratio), (home.index, "hash_match", Some(ratio)));
    }
    assert_eq!(place(&long[..3], 5500, 0).branch, "expected_wait_fallback", "shorter than every boundary");
    assert_eq!(place(&long, 6501, 0).branch, "expected_wait_fallback", "engines have forgotten it");
    let text = RequestView::new("m").with_text(Some("0 1 2 3 4 5 6 7 8 9")).at(5500);
    assert_eq!(policy.decide(&workers, &text, 0).branch, "expected_wait_fallback");
    assert!(policy.footprint().entries > 0);
    policy.retain(&[]);
    assert_eq!(policy.footprint().entries, 0);
    // A holder that is far busier than the rest is passed over.
    let busy = place(&long, 9000, 0).index.unwrap();
    let mut loaded = workers.clone();
    loaded[busy].load = 100;
    let pick = policy.decide(&loaded, &RequestView::new("m").with_token_ids(Some(&long)).at(9000), 0);
    assert_eq!(pick.branch, "spill");
    assert_ne!(pick.index, Some(busy));
}
