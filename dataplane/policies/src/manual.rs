//! `manual`: a routing key stays where it is.
//!
//! Unlike a hash ring, new workers never move a key: it is assigned once and pinned. A key whose worker is not a candidate
//! gets a second pin, and returns to the first when that is back. Pins name URLs, so that a worker that is registered anew
//! keeps its keys. Requests without a key are spread by the assignment mode and not pinned.
//!
//! Invariants: at most `max_keys` keys are remembered, the one used longest ago goes first; a key that nobody used for
//! `max_idle_ms` is as good as unknown, and is forgotten as other keys are used.

use parking_lot::Mutex;
use smg_fleet::policy::PolicyName;
use smg_fleet::tuning::AssignmentMode;

use crate::fingerprint::KeyMap;
use crate::lru::LruList;
use crate::wait::{Waits, least};
use crate::{Candidate, Footprint, Pick, Policy, RequestView, uniform};
use xxhash_rust::xxh3::{Xxh3, xxh3_64};

/// Workers a key may be pinned to.
const MAX_PINS: usize = 2;

/// Forgotten keys per request, so that no request pays for many.
const EXPIRED_PER_PICK: usize = 4;

/// How `manual` assigns and forgets.
#[derive(Debug, Clone, PartialEq)]
pub struct ManualTuning {
    /// How a new key gets its worker (`--assignment-mode`).
    pub assignment: AssignmentMode,
    /// A key that is idle for longer is forgotten, in milliseconds (`--max-idle-secs`).
    pub max_idle_ms: u64,
    /// Most keys that are remembered, about 100 bytes each.
    pub max_keys: usize,
}

impl Default for ManualTuning {
    fn default() -> Self {
        Self { assignment: AssignmentMode::Random, max_idle_ms: 14_400_000, max_keys: 1 << 20 }
    }
}

/// Sticky keys.
#[derive(Debug, Default)]
pub struct Manual {
    tuning: ManualTuning,
    pins: Mutex<Pins>,
}

impl Manual {
    /// With this tuning.
    pub fn new(tuning: ManualTuning) -> Self {
        Self { tuning, pins: Mutex::default() }
    }

    fn assign(&self, candidates: &[Candidate<'_>], pins: &Pins, entropy: u64) -> Option<usize> {
        let by = |weight: &dyn Fn(&Candidate<'_>) -> u64| {
            let weights: Waits = candidates.iter().map(|candidate| weight(candidate) as f64).collect();
            least(&weights, |_| true, entropy)
        };
        match self.tuning.assignment {
            AssignmentMode::Random => Some(uniform(entropy, candidates.len())),
            // There is no other policy to leave the choice to.
            AssignmentMode::MinLoad | AssignmentMode::Delegate => by(&|candidate| candidate.load),
            AssignmentMode::MinGroup => by(&|candidate| pins.group_size(worker(candidate))),
        }
    }
}

/// A worker as pins name it: a hash of its URL.
fn worker(candidate: &Candidate<'_>) -> u64 {
    xxh3_64(candidate.url.as_bytes())
}

/// A key of one model. Hashed, since clients choose keys, and keys may name people.
fn hashed(model: &str, key: &str) -> u128 {
    let mut hasher = Xxh3::new();
    hasher.update(&(model.len() as u64).to_le_bytes());
    hasher.update(model.as_bytes());
    hasher.update(key.as_bytes());
    hasher.digest128()
}

impl Policy for Manual {
    fn name(&self) -> PolicyName {
        PolicyName::Manual
    }

    fn pick(&self, candidates: &[Candidate<'_>], request: &RequestView<'_>, entropy: u64) -> Option<usize> {
        self.decide(candidates, request, entropy).index
    }

    fn decide(&self, candidates: &[Candidate<'_>], request: &RequestView<'_>, entropy: u64) -> Pick {
        if candidates.is_empty() {
            return Pick::new(None, "no_healthy_workers");
        }
        let mut pins = self.pins.lock();
        let Some(key) = request.key() else {
            return Pick::new(self.assign(candidates, &pins, entropy), "no_routing_id");
        };
        let key = hashed(request.model, key);
        let idle_since = request.now_ms.saturating_sub(self.tuning.max_idle_ms);
        pins.expire(idle_since);
        let known = pins.of(key, idle_since);
        let pinned = known
            .into_iter()
            .flatten()
            .find_map(|pin| candidates.iter().position(|candidate| worker(candidate) == pin));
        if pinned.is_some() {
            pins.touch(key, request.now_ms);
            return Pick::new(pinned, "occupied_hit");
        }
        let assigned = self.assign(candidates, &pins, entropy);
        if let Some(candidate) = assigned.and_then(|index| candidates.get(index)) {
            pins.pin(key, worker(candidate), request.now_ms, self.tuning.max_keys);
        }
        Pick::new(assigned, if known[0].is_some() { "occupied_miss" } else { "vacant" })
    }

    fn footprint(&self) -> Footprint {
        let pins = self.pins.lock();
        Footprint {
            entries: pins.slots.len(),
            bytes: pins.entries.len() * BYTES_PER_KEY,
            workers: pins.groups.len(),
            ..Footprint::default()
        }
    }
}

/// An entry, its links and its place in the map.
const BYTES_PER_KEY: usize = size_of::<Entry>() + 8 + 2 * size_of::<(u128, u32)>();

#[derive(Debug, Default)]
struct Pins {
    slots: KeyMap<u32>,
    entries: Vec<Entry>,
    free: Vec<u32>,
    order: LruList,
    /// How many keys are pinned to each worker.
    groups: std::collections::HashMap<u64, u64>,
}

#[derive(Debug, Clone, Copy)]
struct Entry {
    key: u128,
    pins: [Option<u64>; MAX_PINS],
    used_ms: u64,
}

impl Pins {
    fn group_size(&self, worker: u64) -> u64 {
        self.groups.get(&worker).copied().unwrap_or(0)
    }

    /// The pins of `key`, the first first; none if it was not used since `idle_since`.
    fn of(&self, key: u128, idle_since: u64) -> [Option<u64>; MAX_PINS] {
        let entry = self.slots.get(&key).map(|slot| &self.entries[*slot as usize]);
        entry.filter(|entry| entry.used_ms >= idle_since).map_or([None; MAX_PINS], |entry| entry.pins)
    }

    fn touch(&mut self, key: u128, now_ms: u64) {
        if let Some(slot) = self.slots.get(&key) {
            self.entries[*slot as usize].used_ms = now_ms;
            self.order.touch(*slot);
        }
    }

    /// Pins `key` to `worker` behind its earlier pin. Of two earlier pins the older goes.
    fn pin(&mut self, key: u128, worker: u64, now_ms: u64, max_keys: usize) {
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
    fn expire(&mut self, idle_since: u64) {
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

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn groups_count_exactly_the_pins_that_are_remembered(
            steps in prop::collection::vec((0_u8..30, 0_usize..5, 0_u64..50), 1..300),
        ) {
            let tuning = ManualTuning { max_keys: 8, max_idle_ms: 100, ..Default::default() };
            let policy = Manual::new(tuning);
            let urls = ["http://a", "http://b", "http://c", "http://d", "http://e"];
            let mut now_ms = 1000;
            for (key, absent, pause) in steps {
                now_ms += pause;
                let candidates: Vec<_> = urls
                    .iter()
                    .enumerate()
                    .filter(|(index, _)| *index != absent)
                    .map(|(index, url)| Candidate::new(index as u128, url, 0))
                    .collect();
                let key = format!("key-{key}");
                let request = RequestView::new("m").with_routing_key(Some(&key)).at(now_ms);
                policy.pick(&candidates, &request, u64::from(pause as u32) << 55).unwrap();
                let pins = policy.pins.lock();
                prop_assert!(pins.slots.len() <= 8);
                prop_assert_eq!(pins.order.iter().count(), pins.slots.len());
                let mut counted = std::collections::HashMap::new();
                for slot in pins.slots.values() {
                    for worker in pins.entries[*slot as usize].pins.into_iter().flatten() {
                        *counted.entry(worker).or_insert(0_u64) += 1;
                    }
                }
                prop_assert_eq!(&counted, &pins.groups);
            }
        }
    }
}
