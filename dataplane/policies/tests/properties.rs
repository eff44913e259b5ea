//! Properties that every policy keeps, and those that make each of them useful.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use proptest::prelude::*;
use smg_policies::{Candidate, Leg, Policy, PolicyName, PowerOfTwo, Random, RequestView, RoundRobin, build};

fn candidates(loads: &[u64]) -> Vec<Candidate<'static>> {
    loads.iter().zip(1..).map(|(load, id)| Candidate::new(id, "http://worker", *load)).collect()
}

fn all() -> Vec<Box<dyn Policy>> {
    [
        PolicyName::RoundRobin,
        PolicyName::Random,
        PolicyName::PowerOfTwo,
        PolicyName::LeastLoad,
        PolicyName::CacheAware,
        PolicyName::PrefixHash,
        PolicyName::ConsistentHashing,
        PolicyName::Manual,
        PolicyName::Bucket,
    ]
    .map(|name| build(name, Leg::Prefill).unwrap())
    .into()
}

/// A deterministic stream of words for tests that count outcomes.
fn words(seed: u64) -> impl Iterator<Item = u64> {
    let mut state = seed;
    std::iter::repeat_with(move || {
        state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mixed = (state ^ (state >> 33)).wrapping_mul(0xFF51_AFD7_ED55_8CCD);
        let mixed = (mixed ^ (mixed >> 33)).wrapping_mul(0xC4CE_B9FE_1A85_EC53);
        mixed ^ (mixed >> 33)
    })
}

#[test]
fn no_candidates_means_no_pick_and_one_candidate_is_always_picked() {
    for policy in all() {
        for word in words(1).take(100) {
            assert_eq!(policy.pick(&[], &RequestView::new("m"), word), None);
            assert_eq!(policy.pick(&candidates(&[9]), &RequestView::new("m"), word), Some(0));
        }
    }
}

#[test]
fn random_is_uniform() {
    for length in [2, 3, 7, 16] {
        let candidates = candidates(&vec![0; length]);
        let mut counts = vec![0_u64; length];
        let rounds = 20_000 * length as u64;
        for word in words(length as u64).take(rounds as usize) {
            counts[Random.pick(&candidates, &RequestView::default(), word).unwrap()] += 1;
        }
        // Five standard deviations of a binomial around 20,000.
        assert!(counts.iter().all(|count| count.abs_diff(20_000) < 710), "{counts:?}");
    }
}

#[test]
fn power_of_two_is_uniform_over_equal_loads() {
    let candidates = candidates(&[5; 6]);
    let mut counts = [0_u64; 6];
    for word in words(3).take(120_000) {
        counts[PowerOfTwo::default().pick(&candidates, &RequestView::default(), word).unwrap()] += 1;
    }
    assert!(counts.iter().all(|count| count.abs_diff(20_000) < 710), "{counts:?}");
}

#[test]
fn power_of_two_of_two_takes_the_less_loaded() {
    for word in words(4).take(1_000) {
        assert_eq!(PowerOfTwo::default().pick(&candidates(&[10, 0]), &RequestView::default(), word), Some(1));
        assert_eq!(PowerOfTwo::default().pick(&candidates(&[3, 4]), &RequestView::default(), word), Some(0));
    }
}

#[test]
fn power_of_two_compares_every_pair_equally_often() {
    // With distinct loads, the k-th lightest of n wins against the n-1-k heavier ones: (n-1-k) of all pairs.
    let candidates = candidates(&[0, 1, 2, 3, 4]);
    let mut counts = [0_u64; 5];
    for word in words(5).take(100_000) {
        counts[PowerOfTwo::default().pick(&candidates, &RequestView::default(), word).unwrap()] += 1;
    }
    for (count, expected) in counts.iter().zip([40_000, 30_000, 20_000, 10_000, 0]) {
        assert!(count.abs_diff(expected) < 800, "{counts:?}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn no_policy_ever_leaves_its_range_or_fails(
        loads in prop::collection::vec(any::<u64>(), 1..40),
        text in prop::option::of(".{0,40}"),
        token_ids in prop::option::of(prop::collection::vec(any::<u32>(), 0..20)),
        key in prop::option::of(".{0,10}"),
        now_ms: u64,
        entropy: u64,
    ) {
        let candidates = candidates(&loads);
        let request = RequestView::new("m")
            .with_text(text.as_deref())
            .with_token_ids(token_ids.as_deref())
            .with_routing_key(key.as_deref())
            .with_client(key.as_deref())
            .at(now_ms);
        for policy in all() {
            for _ in 0..2 {
                let pick = policy.decide(&candidates, &request, entropy);
                prop_assert!(pick.index.unwrap() < loads.len(), "{policy:?}");
            }
            policy.retain(&[]);
            prop_assert!(policy.pick(&candidates, &request, entropy).unwrap() < loads.len());
        }
    }

    #[test]
    fn equal_histories_make_equal_decisions(
        requests in prop::collection::vec(("[ab]{0,6}", "[ab]{0,2}", any::<u64>(), 0_u64..9_000), 1..40),
    ) {
        for (one, other) in all().into_iter().zip(all()) {
            for (text, key, entropy, now_ms) in &requests {
                let candidates = candidates(&[*entropy % 7, *entropy % 5, *entropy % 3]);
                let request = RequestView::new("m").with_text(Some(text)).with_routing_key(Some(key)).at(*now_ms);
                let (one, other) =
                    (one.decide(&candidates, &request, *entropy), other.decide(&candidates, &request, *entropy));
                prop_assert_eq!(one, other);
            }
        }
    }

    #[test]
    fn power_of_two_never_takes_the_one_most_loaded_worker(
        loads in prop::collection::vec(0_u64..1000, 2..40),
        heaviest: prop::sample::Index,
        entropy: u64,
    ) {
        let mut loads = loads;
        let heaviest = heaviest.index(loads.len());
        loads[heaviest] = 1000;
        let picked = PowerOfTwo::default().pick(&candidates(&loads), &RequestView::default(), entropy).unwrap();
        prop_assert_ne!(picked, heaviest);
    }

    #[test]
    fn power_of_two_never_prefers_the_more_loaded_of_its_pair(
        loads in prop::collection::vec(0_u64..4, 2..20),
        entropy: u64,
    ) {
        // The pair depends on the entropy alone: find it with loads that reveal each of the two in turn.
        let length = loads.len();
        let first = PowerOfTwo::default().pick(&candidates(&vec![0; length]), &RequestView::default(), entropy).unwrap();
        let mut revealing = vec![0; length];
        revealing[first] = 1;
        let second = PowerOfTwo::default().pick(&candidates(&revealing), &RequestView::default(), entropy).unwrap();
        prop_assert_ne!(first, second);
        let picked = PowerOfTwo::default().pick(&candidates(&loads), &RequestView::default(), entropy).unwrap();
        prop_assert!(picked == first || picked == second);
        prop_assert_eq!(loads[picked], loads[first].min(loads[second]));
    }

    #[test]
    fn round_robin_is_even_over_every_set_however_sets_alternate(
        lengths in prop::collection::vec(1_usize..12, 1..6),
        turns in prop::collection::vec(any::<prop::sample::Index>(), 1..400),
    ) {
        let policy = RoundRobin::default();
        // Sets overlap: each is a prefix of the same fleet, of a different length.
        let mut lengths = lengths;
        lengths.sort_unstable();
        lengths.dedup();
        let fleet = candidates(&[0; 12]);
        let mut counts: Vec<Vec<u64>> = lengths.iter().map(|length| vec![0; *length]).collect();
        for turn in turns {
            let turn = turn.index(lengths.len());
            let picked = policy.pick(&fleet[..lengths[turn]], &RequestView::default(), 0).unwrap();
            counts[turn][picked] += 1;
            let most = counts[turn].iter().max().unwrap();
            let least = counts[turn].iter().min().unwrap();
            prop_assert!(most - least <= 1, "{counts:?}");
        }
    }
}
