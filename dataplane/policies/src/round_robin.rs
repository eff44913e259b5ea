//! `round_robin`: one after the other.
//!
//! One shared counter would be even only while every request sees the same candidates. With pairing, models and
//! exclusions in retries, sets alternate, and a shared counter can then hit the same worker of each set every time.
//! So every distinct ordered candidate set has its own rotation.
//!
//! Invariants:
//! - While a set is remembered, any `k` consecutive picks from it spread over its `len` candidates so that no two
//!   differ by more than one, also when threads pick at once.
//! - At most [`MAX_CANDIDATE_SETS`] sets are remembered; beyond, the set used longest ago is forgotten and would start
//!   anew.
//! - A new set starts at an offset that advances with each new set, so that a stream of new sets (workers joining,
//!   retries) does not always hit the first worker.
//!
//! A pick from a known set takes a shared lock and allocates nothing. Sets are told apart by a 128-bit fingerprint of
//! their worker ids; should two ever collide they share a rotation, which costs evenness and nothing else.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::RwLock;
use smg_fleet::policy::PolicyName;

use crate::fingerprint::fingerprint;
use crate::{Candidate, Policy, RequestView};

/// Most candidate sets whose rotation is remembered.
pub const MAX_CANDIDATE_SETS: usize = 4096;

/// Rotation over the candidates.
#[derive(Debug, Default)]
pub struct RoundRobin {
    sets: RwLock<HashMap<u128, Rotation>>,
    /// Counts picks; tells which set was used longest ago.
    clock: AtomicU64,
    /// Start of the next new set.
    next_start: AtomicU64,
}

#[derive(Debug)]
struct Rotation {
    position: AtomicU64,
    last_used: AtomicU64,
}

impl Rotation {
    fn advance(&self, now: u64) -> u64 {
        self.last_used.store(now, Ordering::Relaxed);
        self.position.fetch_add(1, Ordering::Relaxed)
    }
}

impl RoundRobin {
    fn position(&self, set: u128) -> u64 {
        let now = self.clock.fetch_add(1, Ordering::Relaxed);
        if let Some(rotation) = self.sets.read().get(&set) {
            return rotation.advance(now);
        }
        let mut sets = self.sets.write();
        // Another thread may have been here first.
        if !sets.contains_key(&set) && sets.len() >= MAX_CANDIDATE_SETS {
            let oldest = sets.iter().min_by_key(|(_, rotation)| rotation.last_used.load(Ordering::Relaxed));
            if let Some(oldest) = oldest.map(|(set, _)| *set) {
                sets.remove(&oldest);
            }
        }
        let rotation = sets.entry(set).or_insert_with(|| Rotation {
            position: AtomicU64::new(self.next_start.fetch_add(1, Ordering::Relaxed)),
            last_used: AtomicU64::new(now),
        });
        rotation.advance(now)
    }

    #[cfg(test)]
    fn remembered(&self) -> usize {
        self.sets.read().len()
    }
}

impl Policy for RoundRobin {
    fn name(&self) -> PolicyName {
        PolicyName::RoundRobin
    }

    fn pick(&self, candidates: &[Candidate<'_>], _request: &RequestView<'_>, _entropy: u64) -> Option<usize> {
        match candidates.len() {
            0 => None,
            1 => Some(0),
            length => Some((self.position(fingerprint(candidates, |candidate| candidate.id)) % length as u64) as usize),
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
mod tests {
    use super::*;

    fn set(ids: std::ops::Range<u128>) -> Vec<Candidate<'static>> {
        ids.map(|id| Candidate::new(id, "http://worker", 0)).collect()
    }

    fn pick(policy: &RoundRobin, candidates: &[Candidate<'_>]) -> usize {
        policy.pick(candidates, &RequestView::default(), 0).unwrap()
    }

    #[test]
    fn the_number_of_remembered_sets_is_bounded_and_the_oldest_goes_first() {
        let policy = RoundRobin::default();
        let busy = set(0..3);
        let first = pick(&policy, &busy);
        for start in 0..(2 * MAX_CANDIDATE_SETS as u128) {
            pick(&policy, &set(100 + start..102 + start));
            pick(&policy, &busy);
            assert!(policy.remembered() <= MAX_CANDIDATE_SETS);
        }
        assert_eq!(policy.remembered(), MAX_CANDIDATE_SETS);
        // The busy set was never forgotten: its rotation has moved by exactly one per pick.
        assert_eq!(pick(&policy, &busy), (first + 2 * MAX_CANDIDATE_SETS + 1) % 3);
    }

    #[test]
    fn new_sets_do_not_all_start_with_their_first_worker() {
        let policy = RoundRobin::default();
        let mut firsts = [0_usize; 4];
        for start in 0..400 {
            firsts[pick(&policy, &set(start * 10..start * 10 + 4))] += 1;
        }
        assert_eq!(firsts, [100; 4]);
    }

    #[test]
    fn threads_that_pick_at_once_share_one_even_rotation() {
        let policy = RoundRobin::default();
        let candidates = set(0..7);
        let counts: [AtomicU64; 7] = Default::default();
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..7 * 250 {
                        counts[pick(&policy, &candidates)].fetch_add(1, Ordering::Relaxed);
                    }
                });
            }
        });
        assert!(counts.iter().all(|count| count.load(Ordering::Relaxed) == 1000));
    }
}
