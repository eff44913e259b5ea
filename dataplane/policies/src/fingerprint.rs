//! Fingerprints of candidate sets, and a map that is keyed by fingerprints and ids.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

use crate::Candidate;

/// Folds what tells the candidates apart, in order. Each step is a bijection of the state for a given word, with an odd
/// multiplier and a shift that carries high bits down.
pub(crate) fn fingerprint<'a>(candidates: &[Candidate<'a>], word: impl Fn(&Candidate<'a>) -> u128) -> u128 {
    const MULTIPLIER: u128 = 0x2360_ED05_1FC6_5DA4_4385_DF64_9FCC_F645;
    candidates.iter().fold(candidates.len() as u128, |state, candidate| {
        let mixed = (state ^ word(candidate)).wrapping_mul(MULTIPLIER);
        mixed ^ (mixed >> 64)
    })
}

/// A map whose keys are spread already: worker ids and 128-bit hashes.
pub(crate) type KeyMap<V> = HashMap<u128, V, BuildHasherDefault<KeyHasher>>;

/// Folds a 128-bit key into 64 bits.
#[derive(Debug, Default, Clone, Copy)]
pub(crate) struct KeyHasher(u64);

impl Hasher for KeyHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.write_u128(u128::from(*byte));
        }
    }

    fn write_u128(&mut self, key: u128) {
        let folded = (key as u64) ^ ((key >> 64) as u64).rotate_left(32) ^ self.0;
        let mixed = folded.wrapping_mul(0x9E37_79B9_7F4A_7C15);
        self.0 = mixed ^ (mixed >> 32);
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
mod tests {
    use super::*;

    #[test]
    fn the_order_of_candidates_makes_the_set() {
        let forward: Vec<_> = (0..5).map(|id| Candidate::new(id, "http://worker", 0)).collect();
        let backward: Vec<_> = forward.iter().rev().copied().collect();
        let of = |candidates: &[Candidate<'_>]| fingerprint(candidates, |candidate| candidate.id);
        assert_ne!(of(&forward), of(&backward));
        assert_ne!(of(&forward), of(&forward[..4]));
    }
}
