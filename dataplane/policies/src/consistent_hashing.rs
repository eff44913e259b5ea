//! `consistent_hashing`: a client's key always leads to the same worker.
//!
//! In this order: the worker the client names by index, strictly (out of range is no pick, never another worker); the
//! routing key; whatever else tells clients apart; a random candidate. A key's worker depends on the key and the candidates'
//! URLs alone.

use smg_fleet::policy::PolicyName;

use crate::ring::{Rings, position};
use crate::{Candidate, Footprint, Pick, Policy, RequestView, uniform};

/// A hash ring over the candidates.
#[derive(Debug, Default)]
pub struct ConsistentHashing {
    rings: Rings,
}

impl Policy for ConsistentHashing {
    fn name(&self) -> PolicyName {
        PolicyName::ConsistentHashing
    }

    fn pick(&self, candidates: &[Candidate<'_>], request: &RequestView<'_>, entropy: u64) -> Option<usize> {
        self.decide(candidates, request, entropy).index
    }

    fn decide(&self, candidates: &[Candidate<'_>], request: &RequestView<'_>, entropy: u64) -> Pick {
        if candidates.is_empty() {
            return Pick::new(None, "no_healthy_workers");
        }
        if let Some(index) = request.target_worker {
            let hit = index < candidates.len();
            return Pick::new(hit.then_some(index), if hit { "target_worker_hit" } else { "target_worker_miss" });
        }
        let on_ring = |key: &str| self.rings.of(candidates).owner(position(key.as_bytes()));
        if let Some(key) = request.key() {
            return Pick::new(on_ring(key), "routing_key_hit");
        }
        if let Some(client) = request.client.filter(|client| !client.is_empty()) {
            return Pick::new(on_ring(client), "implicit_key_hit");
        }
        Pick::new(Some(uniform(entropy, candidates.len())), "random_fallback")
    }

    fn footprint(&self) -> Footprint {
        Footprint { entries: self.rings.len(), ..Footprint::default() }
    }
}
