//! `prefix_hash`: prompts that begin alike go to the same worker, as long as it is not far busier than the rest.
//!
//! The key is the routing key, else the head of the prompt: up to the deepest configured boundary that the prompt reaches,
//! else its first tokens. The key's worker on the hash ring serves the request unless it is overloaded; then the worker of
//! the next shallower boundary that is not, then the least loaded of those that are not, then the key's worker after all.
//! Among equally loaded ones the key decides, so that what spills from one worker spills together.

use smallvec::SmallVec;
use smg_fleet::policy::PolicyName;

use crate::ring::{Rings, position};
use crate::wait::{Waits, least};
use crate::{Candidate, Footprint, Pick, Policy, RequestView, next_word};

/// How `prefix_hash` keys and spills.
#[derive(Debug, Clone, PartialEq)]
pub struct PrefixHashTuning {
    /// Tokens of the prompt that make the key; four characters count as one (`--prefix-token-count`).
    pub prefix_token_count: usize,
    /// Ascending lengths in tokens that make deeper keys for prompts that reach them (`--cache-boundaries`).
    pub boundaries: Vec<usize>,
    /// A worker is overloaded above this multiple of the mean load … (`--prefix-hash-load-factor`).
    pub load_factor: f64,
    /// … if it also exceeds the mean by more than this (`--prefix-hash-balance-abs-threshold`).
    pub balance_abs_threshold: f64,
}

impl Default for PrefixHashTuning {
    fn default() -> Self {
        Self { prefix_token_count: 256, boundaries: Vec::new(), load_factor: 1.25, balance_abs_threshold: 10.0 }
    }
}

/// A hash ring keyed by the head of the prompt, with bounded load.
#[derive(Debug, Default)]
pub struct PrefixHash {
    tuning: PrefixHashTuning,
    rings: Rings,
}

impl PrefixHash {
    /// With this tuning.
    pub fn new(tuning: PrefixHashTuning) -> Self {
        Self { tuning, rings: Rings::default() }
    }

    /// The positions of the request's keys, the deepest first.
    fn keys(&self, request: &RequestView<'_>) -> SmallVec<[u64; 4]> {
        if let Some(key) = request.key() {
            return SmallVec::from_iter([position(key.as_bytes())]);
        }
        let Some(prompt) = request.prompt() else { return SmallVec::new() };
        let key = |tokens: usize| prompt.head(tokens).bytes(position);
        let reached = self.tuning.boundaries.iter().rev().copied().filter(|tokens| prompt.reaches(*tokens));
        let keys: SmallVec<[u64; 4]> = reached.map(key).collect();
        if keys.is_empty() { SmallVec::from_iter([key(self.tuning.prefix_token_count)]) } else { keys }
    }

    /// The load above which a worker is overloaded, this request counted.
    fn limit(&self, candidates: &[Candidate<'_>]) -> f64 {
        let total: f64 = candidates.iter().map(|candidate| candidate.load as f64).sum();
        let mean = (total + 1.0) / candidates.len() as f64;
        (mean * self.tuning.load_factor).max(mean + self.tuning.balance_abs_threshold)
    }
}

impl Policy for PrefixHash {
    fn name(&self) -> PolicyName {
        PolicyName::PrefixHash
    }

    fn pick(&self, candidates: &[Candidate<'_>], request: &RequestView<'_>, entropy: u64) -> Option<usize> {
        self.decide(candidates, request, entropy).index
    }

    fn decide(&self, candidates: &[Candidate<'_>], request: &RequestView<'_>, entropy: u64) -> Pick {
        if candidates.is_empty() {
            return Pick::new(None, "no_healthy_workers");
        }
        let loads: Waits = candidates.iter().map(|candidate| candidate.load as f64).collect();
        let keys = self.keys(request);
        let Some(deepest) = keys.first() else {
            return Pick::new(least(&loads, |_| true, entropy), "no_routing_key");
        };
        let ring = self.rings.of(candidates);
        let limit = self.limit(candidates);
        let acceptable = |index: &usize| loads.get(*index).is_some_and(|load| *load <= limit);
        if let Some(index) = keys.iter().find_map(|key| ring.owner(*key).filter(acceptable)) {
            return Pick::new(Some(index), "ring_hit");
        }
        match least(&loads, |index| acceptable(&index), next_word(*deepest)) {
            Some(index) => Pick::new(Some(index), "load_balance_walk"),
            None => Pick::new(ring.owner(*deepest), "fallback_least_load"),
        }
    }

    fn reads_prompt(&self) -> bool {
        true
    }

    fn footprint(&self) -> Footprint {
        Footprint { entries: self.rings.len(), ..Footprint::default() }
    }
}
