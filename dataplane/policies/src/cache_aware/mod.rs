//! `cache_aware`: a prompt goes where most of its KV already is.
//!
//! The policy records every prompt under the worker it chose. A new prompt that shares more than `cache_threshold` of its
//! length with recorded ones goes to a worker that holds the longest shared part, unless all of those are far busier than
//! the rest; every other prompt goes to the least expected wait, ties at random, so that unrelated prompts spread evenly.
//! Where reports show KV caches about to overflow or unevenly full, the prompt's history does not count at all.
//!
//! Prompts of different models, salts, extra keys or adapters never match: engines do not share KV between them. Token
//! ids and text are recorded apart, each within `max_tree_size`.
//!
//! With the hash index, the heads of token prompts are recorded instead: up to each of `boundaries`, the lengths at which engines keep
//! state they can use again, for as long as they are expected to keep it. The longest head known decides. Prompts of text, or shorter
//! than every boundary, go to the least expected wait.

mod heads;
mod holders;
mod tree;
#[cfg(test)]
mod tree_tests;

use parking_lot::Mutex;
use smallvec::SmallVec;
use smg_fleet::policy::PolicyName;
use smg_fleet::tuning::CacheIndex;
use xxhash_rust::xxh3::Xxh3;

use self::heads::Heads;
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
    /// What is recorded (`--cache-index`).
    pub index: CacheIndex,
    /// Of the hash index: lengths of heads in tokens, ascending (`--cache-boundaries`).
    pub boundaries: Vec<usize>,
    /// Of the hash index: how long a placement counts, in milliseconds (`--cache-ttl-secs`).
    pub ttl_ms: u64,
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
            index: CacheIndex::Tree,
            boundaries: Vec::new(),
            ttl_ms: 180_000,
        }
    }
}

/// Affinity to recorded prompts.
#[derive(Debug)]
pub struct CacheAware {
    tuning: CacheAwareTuning,
    text: Mutex<Tree>,
    tokens: Mutex<Tree>,
    heads: Mutex<Heads>,
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
        Self { text: tree(), tokens: tree(), heads: Mutex::new(Heads::new(tuning.max_tree_size)), tuning }
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

    /// Places a prompt by its heads.
    fn decide_by_heads(&self, candidates: &[Candidate<'_>], request: &RequestView<'_>, entropy: u64) -> Pick {
        let ids = match request.prompt() {
            Some(Prompt::Tokens(ids)) => ids,
            _ => &[],
        };
        let partition = partition(request);
        let reached = self.tuning.boundaries.iter().rev().filter_map(|tokens| ids.get(..*tokens));
        let keys: SmallVec<[(u128, usize); 4]> = reached.map(|head| (head_key(partition, head), head.len())).collect();
        let since = request.now_ms.saturating_sub(self.tuning.ttl_ms);
        let mut heads = self.heads.lock();
        let known = keys.iter().find_map(|(key, tokens)| {
            let holders: Vec<bool> =
                candidates.iter().map(|candidate| heads.holds(*key, candidate.id, since)).collect();
            holders.contains(&true).then_some((holders, *tokens))
        });
        let (holders, matched) = known.unwrap_or_default();
        let ratio = matched as f64 / ids.len().max(1) as f64;
        let pick = self.choose(candidates, entropy, ratio, (matched > 0).then_some(("hash_match", &*holders)));
        if let Some(candidate) = pick.index.and_then(|index| candidates.get(index)) {
            keys.iter().for_each(|(key, _)| heads.place(*key, candidate.id, request.now_ms));
        }
        pick
    }

    /// Chooses among the holders of a match, named by how it was found, or among all.
    fn choose(
        &self,
        candidates: &[Candidate<'_>],
        entropy: u64,
        ratio: f64,
        matched: Option<(&'static str, &[bool])>,
    ) -> Pick {
        let waits = expected_waits(candidates, &WaitTuning::default());
        let shortest_wait = |branch| Pick::new(least(&waits, |_| true, entropy), branch);
        let pick = if self.kv_pressure(candidates) {
            shortest_wait("kv_pressure_expected_wait")
        } else if let Some((found, holders)) = matched {
            let gate = self.spill_gate(candidates);
            let open = |index: usize| holders[index] && candidates[index].load as f64 <= gate;
            match least(&waits, open, entropy) {
                Some(index) => Pick::new(Some(index), found),
                None => shortest_wait("spill"),
            }
        } else {
            shortest_wait("expected_wait_fallback")
        };
        Pick { match_ratio: Some(ratio), ..pick }
    }
}

/// The key of a head.
fn head_key(partition: u128, head: &[u32]) -> u128 {
    let mut hasher = Xxh3::new();
    hasher.update(&partition.to_le_bytes());
    head.iter().for_each(|id| hasher.update(&id.to_le_bytes()));
    hasher.digest128()
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
        if self.tuning.index == CacheIndex::Hash {
            return self.decide_by_heads(candidates, request, entropy);
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
            let matched = (ratio > self.tuning.cache_threshold).then_some(("tree_match", &*holders));
            let pick = self.choose(candidates, entropy, ratio, matched);
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
        self.heads.lock().retain(|worker| workers.contains(&worker));
    }

    fn footprint(&self) -> Footprint {
        let text = self.text.lock();
        let tokens = self.tokens.lock();
        let heads = self.heads.lock();
        Footprint {
            entries: text.len() + tokens.len() + heads.len(),
            bytes: text.bytes() + tokens.bytes() + heads.bytes(),
            text_bytes: text.label_bytes(),
            tokens: tokens.label_bytes() / size_of::<u32>(),
            placements: heads.len(),
            workers: text.workers().max(tokens.workers()),
        }
    }
}
