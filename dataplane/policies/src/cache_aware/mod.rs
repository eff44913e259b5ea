//! `cache_aware`: a prompt goes where most of its KV already is.
//!
//! The policy records every prompt under the worker it chose. A new prompt that shares more than `cache_threshold` of its
//! length with recorded ones goes to a worker that holds the longest shared part, unless all of those are far busier than
//! the rest; every other prompt goes to the least expected wait, ties at random, so that unrelated prompts spread evenly.
//! Where reports show KV caches about to overflow or unevenly full, the prompt's history does not count at all.
//!
//! Prompts of different models, salts, extra keys or adapters never match: engines do not share KV between them. Token
//! ids and text are recorded apart, each within `max_tree_size`.

mod holders;
mod tree;
#[cfg(test)]
mod tree_tests;

use parking_lot::Mutex;
use smg_fleet::policy::PolicyName;
use xxhash_rust::xxh3::Xxh3;

use self::tree::Tree;
use crate::request::Prompt;
use crate::wait::{WaitTuning, expected_waits, kv_usage, least};
use crate::{Candidate, Footprint, Pick, Policy, RequestView, WorkerKey};

/// When prompts follow their history.
#[derive(Debug, Clone, PartialEq)]
pub struct CacheAwareTuning {
    /// The share of a prompt above which a match decides (`--cache-threshold`).
    pub cache_threshold: f64,
    /// The most by which a holder's load may exceed the mean … (`--balance-abs-threshold`)
    pub balance_abs_threshold: f64,
    /// … once it also exceeds this multiple of the mean (`--balance-rel-threshold`).
    pub balance_rel_threshold: f64,
    /// History does not count while KV use differs by more than this between workers; 1 or more is off
    /// (`--balance-token-usage-threshold`).
    pub balance_token_usage_threshold: f64,
    /// History does not count while any worker uses more than this share of its KV; 1 or more is off
    /// (`--overload-token-usage-threshold`).
    pub overload_token_usage_threshold: f64,
    /// Bytes that each record may take, bookkeeping included (`--max-tree-size`).
    pub max_tree_size: usize,
}

impl Default for CacheAwareTuning {
    fn default() -> Self {
        Self {
            cache_threshold: 0.3,
            balance_abs_threshold: 64.0,
            balance_rel_threshold: 1.5,
            balance_token_usage_threshold: 1.0,
            overload_token_usage_threshold: 1.0,
            max_tree_size: 64 << 20,
        }
    }
}

/// Affinity to recorded prompts.
#[derive(Debug)]
pub struct CacheAware {
    tuning: CacheAwareTuning,
    text: Mutex<Tree>,
    tokens: Mutex<Tree>,
}

impl Default for CacheAware {
    fn default() -> Self {
        Self::new(CacheAwareTuning::default())
    }
}

impl CacheAware {
    /// With this tuning.
    pub fn new(tuning: CacheAwareTuning) -> Self {
        let tree = || Mutex::new(Tree::new(tuning.max_tree_size));
        Self { text: tree(), tokens: tree(), tuning }
    }

    fn record(&self, prompt: Prompt<'_>) -> &Mutex<Tree> {
        match prompt {
            Prompt::Text(_) => &self.text,
            Prompt::Tokens(_) => &self.tokens,
        }
    }

    /// Whether KV caches are so full, or so unevenly full, that only the wait counts.
    fn kv_pressure(&self, candidates: &[Candidate<'_>]) -> bool {
        let usages = || candidates.iter().filter_map(|candidate| candidate.report.as_ref()).map(kv_usage);
        let Some(hottest) = usages().reduce(f64::max) else { return false };
        let coolest = usages().fold(hottest, f64::min);
        hottest > self.tuning.overload_token_usage_threshold
            || hottest - coolest > self.tuning.balance_token_usage_threshold
    }

    /// The load above which a holder is passed over. The margin grows with the noise of the mean, up to the threshold.
    fn spill_gate(&self, candidates: &[Candidate<'_>]) -> f64 {
        let total: f64 = candidates.iter().map(|candidate| candidate.load as f64).sum();
        let mean = total / candidates.len() as f64;
        let margin = self.tuning.balance_abs_threshold.min((2.0 * mean.sqrt()).ceil().max(4.0));
        (mean * self.tuning.balance_rel_threshold).max(mean + margin)
    }

    fn choose(&self, candidates: &[Candidate<'_>], entropy: u64, ratio: f64, holders: &[bool]) -> Pick {
        let waits = expected_waits(candidates, &WaitTuning::default());
        let shortest_wait = |branch| Pick::new(least(&waits, |_| true, entropy), branch);
        let pick = if self.kv_pressure(candidates) {
            shortest_wait("kv_pressure_expected_wait")
        } else if ratio > self.tuning.cache_threshold {
            let gate = self.spill_gate(candidates);
            let open = |index: usize| holders[index] && candidates[index].load as f64 <= gate;
            match least(&waits, open, entropy) {
                Some(index) => Pick::new(Some(index), "tree_match"),
                None => shortest_wait("spill"),
            }
        } else {
            shortest_wait("expected_wait_fallback")
        };
        Pick { match_ratio: Some(ratio), ..pick }
    }
}

/// What keeps the request's KV apart from that of equal prompts.
fn partition(request: &RequestView<'_>) -> u128 {
    let mut hasher = Xxh3::new();
    let parts = request.partition;
    for part in [Some(request.model), parts.cache_salt, parts.extra_key, parts.lora_path] {
        // The length tells where a part ends, and an absent part from an empty one.
        hasher.update(&part.map_or(u64::MAX, |part| part.len() as u64).to_le_bytes());
        hasher.update(part.unwrap_or_default().as_bytes());
    }
    hasher.digest128()
}

impl Policy for CacheAware {
    fn name(&self) -> PolicyName {
        PolicyName::CacheAware
    }

    fn pick(&self, candidates: &[Candidate<'_>], request: &RequestView<'_>, entropy: u64) -> Option<usize> {
        self.decide(candidates, request, entropy).index
    }

    fn decide(&self, candidates: &[Candidate<'_>], request: &RequestView<'_>, entropy: u64) -> Pick {
        if candidates.is_empty() {
            return Pick::new(None, "first_healthy_fallback");
        }
        let Some(prompt) = request.prompt() else {
            let waits = expected_waits(candidates, &WaitTuning::default());
            return Pick::new(least(&waits, |_| true, entropy), "expected_wait_fallback");
        };
        let partition = partition(request);
        prompt.bytes(|bytes| {
            let mut tree = self.record(prompt).lock();
            let bytes = tree.recorded(bytes);
            let path = tree.walk(partition, bytes);
            let (matched, holders) = tree.longest_match(&path, candidates.iter().map(|candidate| candidate.id));
            let ratio = matched as f64 / bytes.len().max(1) as f64;
            let pick = self.choose(candidates, entropy, ratio, &holders);
            if let Some(candidate) = pick.index.and_then(|index| candidates.get(index)) {
                tree.insert(path, partition, bytes, candidate.id);
            }
            pick
        })
    }

    fn reads_prompt(&self) -> bool {
        true
    }

    fn retain(&self, workers: &[WorkerKey]) {
        for tree in [&self.text, &self.tokens] {
            tree.lock().retain(|worker| workers.contains(&worker));
        }
    }

    fn footprint(&self) -> Footprint {
        let text = self.text.lock();
        let tokens = self.tokens.lock();
        Footprint {
            entries: text.len() + tokens.len(),
            bytes: text.bytes() + tokens.bytes(),
            text_bytes: text.label_bytes(),
            tokens: tokens.label_bytes() / size_of::<u32>(),
            workers: text.workers().max(tokens.workers()),
        }
    }
}
