//! Sets of workers, and the small numbers that stand for workers in them.

use smallvec::SmallVec;

use crate::WorkerKey;
use crate::fingerprint::KeyMap;

/// A set of worker slots; up to 128 workers take no memory of their own.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Holders {
    /// Bit `i % 64` of word `i / 64`. The last word is never zero, so that equal sets compare equal.
    words: SmallVec<[u64; 2]>,
}

impl Holders {
    pub(super) fn contains(&self, slot: u32) -> bool {
        self.words.get(slot as usize / 64).is_some_and(|word| word >> (slot % 64) & 1 == 1)
    }

    pub(super) fn insert(&mut self, slot: u32) {
        let word = slot as usize / 64;
        if word >= self.words.len() {
            self.words.resize(word + 1, 0);
        }
        self.words[word] |= 1 << (slot % 64);
    }

    pub(super) fn remove(&mut self, slot: u32) {
        if let Some(word) = self.words.get_mut(slot as usize / 64) {
            *word &= !(1 << (slot % 64));
        }
        while self.words.last() == Some(&0) {
            self.words.pop();
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.words.is_empty()
    }

    /// Whether every member of `other` is in this set.
    #[cfg(test)]
    pub(super) fn includes(&self, other: &Self) -> bool {
        self.words.len() >= other.words.len()
            && self.words.iter().zip(&other.words).all(|(mine, others)| others & !mine == 0)
    }

    /// Bytes it takes beyond its own size.
    pub(super) fn heap_bytes(&self) -> usize {
        if self.words.spilled() { self.words.capacity() * size_of::<u64>() } else { 0 }
    }
}

/// The slots of the workers that hold something. A slot is reused once nothing refers to it.
#[derive(Debug, Default)]
pub(super) struct Slots {
    by_worker: KeyMap<u32>,
    free: Vec<u32>,
}

impl Slots {
    pub(super) fn get(&self, worker: WorkerKey) -> Option<u32> {
        self.by_worker.get(&worker).copied()
    }

    pub(super) fn get_or_assign(&mut self, worker: WorkerKey) -> u32 {
        let next = self.by_worker.len() as u32;
        let free = &mut self.free;
        // Without free slots, those in use are exactly 0..len.
        *self.by_worker.entry(worker).or_insert_with(|| free.pop().unwrap_or(next))
    }

    /// Removes the workers that are not to be kept; returns their slots, to which nothing may refer from now on.
    pub(super) fn retain(&mut self, keep: impl Fn(WorkerKey) -> bool) -> Vec<u32> {
        let mut removed = Vec::new();
        self.by_worker.retain(|worker, slot| {
            let kept = keep(*worker);
            if !kept {
                removed.push(*slot);
            }
            kept
        });
        removed.sort_unstable();
        self.free.extend_from_slice(&removed);
        removed
    }

    pub(super) fn len(&self) -> usize {
        self.by_worker.len()
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn holders_behave_like_a_set(operations in prop::collection::vec((0_u32..300, any::<bool>()), 0..200)) {
            let mut holders = Holders::default();
            let mut model = std::collections::BTreeSet::new();
            for (slot, insert) in operations {
                if insert {
                    holders.insert(slot);
                    model.insert(slot);
                } else {
                    holders.remove(slot);
                    model.remove(&slot);
                }
                prop_assert_eq!(holders.contains(slot), insert);
                prop_assert_eq!(holders.is_empty(), model.is_empty());
                let mut rebuilt = Holders::default();
                model.iter().for_each(|slot| rebuilt.insert(*slot));
                prop_assert_eq!(&rebuilt, &holders);
            }
            prop_assert!((0..300).all(|slot| holders.contains(slot) == model.contains(&slot)));
        }

        #[test]
        fn slots_are_unique_and_reused(rounds in prop::collection::vec((0_u128..40, 0_u128..40), 1..100)) {
            let mut slots = Slots::default();
            for (worker, removed) in rounds {
                slots.get_or_assign(worker);
                slots.retain(|worker| worker != removed);
                let mut used: Vec<_> = slots.by_worker.values().copied().collect();
                used.sort_unstable();
                used.dedup();
                prop_assert_eq!(used.len(), slots.len());
                prop_assert!(used.iter().all(|slot| *slot < 40));
            }
        }
    }
}
