//! The tree against a list of prompts, and its bounds.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use proptest::prelude::*;

use super::tree::Tree;
use crate::WorkerKey;

fn insert(tree: &mut Tree, partition: u128, prompt: &[u8], worker: WorkerKey) {
    let prompt = tree.recorded(prompt).to_vec();
    let path = tree.walk(partition, &prompt);
    tree.insert(path, partition, &prompt, worker);
}

fn matched(tree: &Tree, partition: u128, prompt: &[u8], workers: &[WorkerKey]) -> (usize, Vec<bool>) {
    let path = tree.walk(partition, prompt);
    let (matched, holders) = tree.longest_match(&path, workers.iter().copied());
    (matched, holders.to_vec())
}

fn common(one: &[u8], other: &[u8]) -> usize {
    one.iter().zip(other).take_while(|(one, other)| one == other).count()
}

/// Prompts of few letters, so that they share prefixes of all lengths.
fn prompts() -> impl Strategy<Value = Vec<u8>> {
    prop_oneof![
        prop::collection::vec(0_u8..2, 1..12),
        prop::collection::vec(0_u8..2, 60..70),
        (prop::collection::vec(0_u8..2, 1..4), 1_usize..40).prop_map(|(tail, zeros)| {
            let mut prompt = vec![0; zeros];
            prompt.extend(tail);
            prompt
        }),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn a_match_is_the_longest_prefix_that_a_candidate_was_given(
        history in prop::collection::vec((0_u128..2, prompts(), 0_u128..4), 1..40),
        removed in 0_u128..6,
        partition in 0_u128..2,
        prompt in prompts(),
        workers in prop::sample::subsequence(vec![0_u128, 1, 2, 3, 9], 1..5),
    ) {
        let mut tree = Tree::new(1 << 20);
        for (partition, prompt, worker) in &history {
            insert(&mut tree, *partition, prompt, *worker);
            tree.check();
        }
        tree.retain(|worker| worker != removed);
        tree.check();
        let known = |worker: WorkerKey| {
            let given = history.iter().filter(|(other, _, holder)| {
                *other == partition && *holder == worker && worker != removed
            });
            given.map(|(_, given, _)| common(given, &prompt)).max()
        };
        let longest = workers.iter().filter_map(|worker| known(*worker)).max();
        let (length, holders) = matched(&tree, partition, &prompt, &workers);
        prop_assert_eq!(length, longest.unwrap_or(0));
        for (worker, held) in workers.iter().zip(holders) {
            prop_assert_eq!(held, known(*worker).is_some_and(|known| Some(known) == longest));
        }
    }

    #[test]
    fn however_small_the_limit_it_holds_and_the_tree_stays_sound(
        history in prop::collection::vec((0_u128..3, prompts(), 0_u128..140, any::<bool>()), 1..60),
        limit in 0_usize..6000,
    ) {
        let mut tree = Tree::new(limit);
        for (partition, prompt, worker, remove) in history {
            insert(&mut tree, partition, &prompt, worker);
            tree.check();
            if remove {
                tree.retain(|other| other % 7 != worker % 7);
                tree.check();
            }
        }
        tree.retain(|_| false);
        tree.check();
        prop_assert_eq!((tree.len(), tree.bytes(), tree.label_bytes(), tree.workers()), (0, 0, 0, 0));
    }
}

#[test]
fn the_prompt_used_longest_ago_goes_first() {
    let prompt = |index: u8| vec![index; 300];
    let mut tree = Tree::new(16 * 1024);
    for index in 0..40 {
        insert(&mut tree, 0, &prompt(index), 1);
        // Prompt 0 is used again and again.
        insert(&mut tree, 0, &prompt(0), 1);
    }
    tree.check();
    let known: Vec<u8> = (0..40).filter(|index| matched(&tree, 0, &prompt(*index), &[1]).0 == 300).collect();
    assert_eq!(known[0], 0);
    assert!(known.len() > 10);
    let latest: Vec<u8> = (40 - (known.len() as u8 - 1)..40).collect();
    assert_eq!(known[1..], latest);
}

#[test]
fn removing_a_worker_shrinks_the_tree_to_what_the_others_hold() {
    let mut tree = Tree::new(1 << 20);
    for index in 0..100_u8 {
        insert(&mut tree, 0, &[&[7; 50][..], &[index; 50]].concat(), u128::from(index % 2));
    }
    let before = tree.bytes();
    tree.retain(|worker| worker == 0);
    tree.check();
    assert!(tree.bytes() < before * 6 / 10);
    assert_eq!(matched(&tree, 0, &[[7; 50], [1; 50]].concat(), &[0, 1]), (50, vec![true, false]));
}

#[test]
fn a_partition_that_is_forgotten_leaves_nothing_behind() {
    let mut tree = Tree::new(8 * 1024);
    for partition in 0..10_000 {
        insert(&mut tree, partition, b"the same prompt", 1);
    }
    tree.check();
    assert!(tree.len() < 100);
    assert_eq!(matched(&tree, 0, b"the same prompt", &[1]).0, 0);
    assert_eq!(matched(&tree, 9_999, b"the same prompt", &[1]).0, 15);
}

#[test]
fn prompts_that_share_random_parts_of_a_hot_one_do_not_cut_it_up_for_ever() {
    let hot: Vec<u8> = (0..1000_u32).map(|index| (index * 7 % 251) as u8).collect();
    let mut tree = Tree::new(64 * 1024);
    for round in 0..3000_usize {
        let mut prompt = hot[..round * 37 % 1000].to_vec();
        prompt.extend(format!("tail {round}").repeat(20).bytes());
        insert(&mut tree, 0, &prompt, (round % 3) as u128);
        insert(&mut tree, 0, &hot, (round % 4) as u128);
    }
    tree.check();
    // Each node costs at least a hundred bytes: what survives are the tails that fit, and their branches.
    assert!(tree.len() < 64 * 1024 / 100);
    assert_eq!(matched(&tree, 0, &hot, &[0, 1, 2, 3]), (1000, vec![true; 4]));
}
