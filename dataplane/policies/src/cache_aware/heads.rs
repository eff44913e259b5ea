//! The record of prompt heads: which workers were given a head lately. Exact, in contrast to the tree: a head is known or it is not.
//!
//! Invariants: what the heads cost never exceeds the limit after an insertion, the head used longest ago goes first; a placement older
//! than the engines keep their caches does not count.

use smallvec::SmallVec;

use crate::WorkerKey;
use crate::fingerprint::KeyMap;
use crate::lru::LruList;

/// Workers remembered for one head; the one placed longest ago makes room.
const MAX_PLACEMENTS: usize = 2;

/// A head, its links and its place in the map.
const HEAD_BYTES: usize = size_of::<Head>() + 8 + 2 * size_of::<(u128, u32)>();

#[derive(Debug)]
struct Head {
    key: u128,
    /// Workers and when they were last given it.
    placements: SmallVec<[(WorkerKey, u64); MAX_PLACEMENTS]>,
}

/// The record of heads.
#[derive(Debug)]
pub(super) struct Heads {
    slots: KeyMap<u32>,
    heads: Vec<Head>,
    free: Vec<u32>,
    order: LruList,
    most: usize,
}

impl Heads {
    /// An empty record that may take `limit` bytes.
    pub(super) fn new(limit: usize) -> Self {
        Self {
            slots: KeyMap::default(),
            heads: Vec::new(),
            free: Vec::new(),
            order: LruList::default(),
            most: (limit / HEAD_BYTES).max(1),
        }
    }

    /// Whether `worker` was given the head since `since`.
    pub(super) fn holds(&self, key: u128, worker: WorkerKey, since: u64) -> bool {
        let Some(slot) = self.slots.get(&key) else { return false };
        self.heads[*slot as usize].placements.iter().any(|(holder, at)| *holder == worker && *at >= since)
    }

    /// Notes that `worker` is given the head at `now`.
    pub(super) fn place(&mut self, key: u128, worker: WorkerKey, now: u64) {
        let slot = match self.slots.get(&key) {
            Some(slot) => {
                self.order.touch(*slot);
                *slot
            }
            None => self.add(key),
        };
        let placements = &mut self.heads[slot as usize].placements;
        placements.retain(|(holder, _)| *holder != worker);
        if placements.len() == MAX_PLACEMENTS {
            placements.remove(0);
        }
        placements.push((worker, now));
    }

    /// Forgets the workers that are not to be kept.
    pub(super) fn retain(&mut self, keep: impl Fn(WorkerKey) -> bool) {
        let mut emptied = Vec::new();
        for slot in self.slots.values() {
            let placements = &mut self.heads[*slot as usize].placements;
            placements.retain(|(worker, _)| keep(*worker));
            if placements.is_empty() {
                emptied.push(*slot);
            }
        }
        emptied.into_iter().for_each(|slot| self.forget(slot));
    }

    pub(super) fn len(&self) -> usize {
        self.slots.len()
    }

    pub(super) fn bytes(&self) -> usize {
        self.slots.len() * HEAD_BYTES
    }

    fn add(&mut self, key: u128) -> u32 {
        while self.slots.len() >= self.most
            && let Some(oldest) = self.order.oldest()
        {
            self.forget(oldest);
        }
        let head = Head { key, placements: SmallVec::new() };
        let slot = match self.free.pop() {
            Some(slot) => {
                self.heads[slot as usize] = head;
                slot
            }
            None => {
                self.heads.push(head);
                (self.heads.len() - 1) as u32
            }
        };
        self.slots.insert(key, slot);
        self.order.push_newest(slot);
        slot
    }

    fn forget(&mut self, slot: u32) {
        self.slots.remove(&self.heads[slot as usize].key);
        self.order.remove(slot);
        self.free.push(slot);
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn the_record_is_bounded_and_knows_the_latest_placements(
            steps in prop::collection::vec((0_u128..12, 0_u128..4, 0_u64..5), 1..200),
        ) {
            let mut heads = Heads::new(HEAD_BYTES * 6);
            let (mut now, mut order) = (100, Vec::new());
            for (key, worker, pause) in steps {
                now += pause;
                heads.place(key, worker, now);
                order.retain(|known| *known != key);
                order.push(key);
                if order.len() > 6 {
                    order.remove(0);
                }
                prop_assert!(heads.holds(key, worker, now) && !heads.holds(key, worker, now + 1));
                prop_assert_eq!(heads.len(), order.len());
                prop_assert!(order.iter().all(|key| heads.slots.contains_key(key)));
                prop_assert!(heads.bytes() <= HEAD_BYTES * 6);
            }
            heads.retain(|worker| worker != 1);
            prop_assert!((0..12).all(|key| !heads.holds(key, 1, 0)));
            let holders = (0..12).map(|key| (0..4).any(|worker| heads.holds(key, worker, 0))).filter(|held| *held).count();
            prop_assert_eq!(holders, heads.len());
            heads.retain(|_| false);
            prop_assert_eq!((heads.len(), heads.order.iter().count()), (0, 0));
        }
    }
}
