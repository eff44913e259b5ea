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

use crate::pins::{Pins, assign, at, hashed, worker};
use crate::{Candidate, Footprint, Pick, Policy, RequestView};

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
            return Pick::new(assign(self.tuning.assignment, candidates, &pins, entropy), "no_routing_id");
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
        let assigned = assign(self.tuning.assignment, candidates, &pins, entropy);
        if let Some(candidate) = assigned.and_then(|index| candidates.get(index)) {
            pins.pin(key, worker(candidate), request.now_ms, self.tuning.max_keys);
        }
        Pick::new(assigned, if known[0].is_some() { "occupied_miss" } else { "vacant" })
    }

    fn keys_on(&self, url: &str) -> u64 {
        self.pins.lock().group_size(at(url))
    }

    fn footprint(&self) -> Footprint {
        self.pins.lock().footprint()
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
