//! Pinned keys: which workers a key was given, bounded in number and in time. Shared by the policies that keep keys where they are.
//!
//! A key has at most two pins: the worker it was given, and the one it got while that one would not do. Keys and workers are hashed:
//! clients choose keys, and keys may name people; workers are known by their URL, so that one that is registered anew keeps its keys.

use smg_fleet::tuning::AssignmentMode;
use xxhash_rust::xxh3::{Xxh3, xxh3_64};

use crate::fingerprint::KeyMap;
use crate::lru::LruList;
use crate::wait::{Waits, least};
use crate::{Candidate, Footprint, uniform};

/// Workers a key may be pinned to.
const MAX_PINS: usize = 2;

/// Forgotten keys per request, so that no request pays for many.
const EXPIRED_PER_PICK: usize = 4;

/// A worker as pins name it: a hash of its URL.
pub(crate) fn worker(candidate: &Candidate<'_>) -> u64 {
    at(candidate.url)
}

/// The worker at `url` as pins name it.
pub(crate) fn at(url: &str) -> u64 {
    xxh3_64(url.as_bytes())
}

/// A key of one model.
pub(crate) fn hashed(model: &str, key: &str) -> u128 {
    let mut hasher = Xxh3::new();
    hasher.update(&(model.len() as u64).to_le_bytes());
    hasher.update(model.as_bytes());
    hasher.update(key.as_bytes());
    hasher.digest128()
}

/// The worker of a new key. No policy is at hand to delegate to.
pub(crate) fn assign(mode: AssignmentMode, candidates: &[Candidate<'_>], pins: &Pins, entropy: u64) -> Option<usize> {
    let by = |weight: &dyn Fn(&Candidate<'_>) -> u64| {
        let weights: Waits = candidates.iter().map(|candidate| weight(candidate) as f64).collect();
        least(&weights, |_| true, entropy)
    };
    match mode {
        AssignmentMode::Random if candidates.is_empty() => None,
        AssignmentMode::Random => Some(uniform(entropy, candidates.len())),
        AssignmentMode::MinLoad | AssignmentMode::Delegate => by(&|candidate| candidate.load),
        AssignmentMode::MinGroup => by(&|candidate| pins.group_size(worker(candidate))),
    }
}

/// An entry, its links and its place in the map.
const BYTES_PER_KEY: usize = size_of::<Entry>() + 8 + 2 * size_of::<(u128, u32)>();

/// The keys and their pins.
#[derive(Debug, Default)]
pub(crate) struct Pins {
    pub(crate) slots: KeyMap<u32>,
    pub(crate) entries: Vec<Entry>,
    free: Vec<u32>,
    pub(crate) order: LruList,
    /// How many keys are pinned to each worker.
    pub(crate) groups: std::collections::HashMap<u64, u64>,
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct Entry {
    key: u128,
    pub(crate) pins: [Option<u64>; MAX_PINS],
    used_ms: u64,
}

impl Pins {
    /// What they take.
    pub(crate) fn footprint(&self) -> Footprint {
        Footprint {
            entries: self.slots.len(),
            bytes: self.entries.len() * BYTES_PER_KEY,
            workers: self.groups.len(),
            ..Footprint::default()
        }
    }

    pub(crate) fn group_size(&self, worker: u64) -> u64 {
        self.groups.get(&worker).copied().unwrap_or(0)
    }

    /// The pins of `key`, the first first; none if it was not used since `idle_since`.
    pub(crate) fn of(&self, key: u128, idle_since: u64) -> [Option<u64>; MAX_PINS] {
        let entry = self.slots.get(&key).map(|slot| &self.entries[*slot as usize]);
        entry.filter(|entry| entry.used_ms >= idle_since).map_or([None; MAX_PINS], |entry| entry.pins)
    }

    pub(crate) fn touch(&mut self, key: u128, now_ms: u64) {
        if let Some(slot) = self.slots.get(&key) {
            self.entries[*slot as usize].used_ms = now_ms;
            self.order.touch(*slot);
        }
    }

    /// Pins `key` to `worker` behind its earlier pin. Of two earlier pins the older goes.
    pub(crate) fn pin(&mut self, key: u128, worker: u64, now_ms: u64, max_keys: usize) {
        let earlier = self.slots.get(&key).map(|slot| self.entries[*slot as usize].pins);
        let pins = match earlier {
            Some([Some(first), None]) => [Some(first), Some(worker)],
            Some([_, Some(second)]) => [Some(second), Some(worker)],
            _ => [Some(worker), None],
        };
        if let Some(slot) = self.slots.get(&key).copied() {
            self.forget(slot);
        }
        while self.slots.len() >= max_keys.max(1) {
            let Some(oldest) = self.order.oldest() else { break };
            self.forget(oldest);
        }
        let entry = Entry { key, pins, used_ms: now_ms };
        let slot = match self.free.pop() {
            Some(slot) => {
                self.entries[slot as usize] = entry;
                slot
            }
            None => {
                self.entries.push(entry);
                (self.entries.len() - 1) as u32
            }
        };
        self.slots.insert(key, slot);
        self.order.push_newest(slot);
        for worker in pins.into_iter().flatten() {
            *self.groups.entry(worker).or_insert(0) += 1;
        }
    }

    /// Forgets some keys that were not used since `idle_since`.
    pub(crate) fn expire(&mut self, idle_since: u64) {
        for _ in 0..EXPIRED_PER_PICK {
            match self.order.oldest() {
                Some(oldest) if self.entries[oldest as usize].used_ms < idle_since => self.forget(oldest),
                _ => break,
            }
        }
    }

    fn forget(&mut self, slot: u32) {
        let entry = self.entries[slot as usize];
        self.slots.remove(&entry.key);
        self.order.remove(slot);
        self.free.push(slot);
        for worker in entry.pins.into_iter().flatten() {
            if let Some(size) = self.groups.get_mut(&worker) {
                *size -= 1;
                if *size == 0 {
                    self.groups.remove(&worker);
                }
            }
        }
    }
}
