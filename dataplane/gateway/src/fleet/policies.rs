//! What policies did and what they remember, as metrics.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use smg_fleet::policy::PolicyName;
use smg_telemetry::Metrics;

use super::table::{LEGS, RoutingTable};
use crate::core::Core;
use crate::decision::Picked;
use crate::hints::Hints;
use crate::select::leg_name;

/// How often gauges follow the policies' memory.
const REFRESH: Duration = Duration::from_secs(1);

/// Counts the decisions of one selection.
pub fn count(metrics: &Metrics, hints: &Hints<'_>, picks: &[Picked]) {
    let source = if hints.routing_key().is_some() { "header" } else { "none" };
    metrics.routing_key_source.with_label_values(&[source]).inc();
    for pick in picks {
        let branches = match pick.policy {
            PolicyName::Manual => &metrics.manual_policy_branch,
            PolicyName::ConsistentHashing => &metrics.consistent_hashing_policy_branch,
            PolicyName::PrefixHash => &metrics.prefix_hash_policy_branch,
            PolicyName::CacheAware => &metrics.cache_aware_policy_branch,
            _ => continue,
        };
        branches.with_label_values(&[pick.branch]).inc();
        if let Some(ratio) = pick.match_ratio {
            metrics.cache_aware_match_ratio.observe(ratio);
        }
    }
}

/// Keeps the gauges up to date until the gateway closes.
pub async fn show_for_ever(core: Arc<Core>) {
    let mut ticks = tokio::time::interval(REFRESH);
    let mut shown = Shown::default();
    loop {
        tokio::select! {
            () = core.closing.cancelled() => return,
            _ = ticks.tick() => shown.show(&core.metrics, &core.table.load()),
        }
    }
}

/// The series that are shown: those of models and policies that went away are removed.
#[derive(Debug, Default, PartialEq)]
struct Shown {
    manual_keys: i64,
    /// Text bytes, tokens and heads, by model.
    trees: BTreeMap<Arc<str>, [i64; 3]>,
    /// Workers, by model and leg.
    tenants: BTreeMap<(Arc<str>, &'static str), i64>,
    /// Bytes, by model, leg and policy.
    memory: BTreeMap<(Arc<str>, &'static str, &'static str), i64>,
    /// Pinned keys, by worker.
    keys: BTreeMap<String, i64>,
}

impl Shown {
    fn of(table: &RoutingTable) -> Self {
        let mut shown = Self::default();
        let number = |size: usize| i64::try_from(size).unwrap_or(i64::MAX);
        for pool in table.pools() {
            for leg in LEGS {
                let policy = pool.policies.of(leg);
                for worker in pool.workers(leg) {
                    let keys = policy.keys_on(worker.url.as_str());
                    if keys > 0 {
                        *shown.keys.entry(worker.url.as_str().to_owned()).or_default() += number(keys as usize);
                    }
                }
                let (name, leg, footprint) = (policy.name(), leg_name(leg), policy.footprint());
                if footprint.bytes > 0 {
                    shown.memory.insert((Arc::clone(&pool.model), leg, name.as_str()), number(footprint.bytes));
                }
                match name {
                    PolicyName::Manual => shown.manual_keys += number(footprint.entries),
                    PolicyName::CacheAware => {
                        let [text, tokens, heads] = shown.trees.entry(Arc::clone(&pool.model)).or_default();
                        *text += number(footprint.text_bytes);
                        *tokens += number(footprint.tokens);
                        *heads += number(footprint.placements);
                        shown.tenants.insert((Arc::clone(&pool.model), leg), number(footprint.workers));
                    }
                    _ => {}
                }
            }
        }
        shown
    }

    fn show(&mut self, metrics: &Metrics, table: &RoutingTable) {
        let next = Self::of(table);
        metrics.manual_policy_cache_entries.set(next.manual_keys);
        // Removing what is not there is no error worth a word.
        for model in self.trees.keys().filter(|model| !next.trees.contains_key(*model)) {
            let _ = metrics.cache_tree_chars.remove_label_values(&[model]);
            let _ = metrics.cache_tree_tokens.remove_label_values(&[model]);
            let _ = metrics.cache_placement_entries.remove_label_values(&[model]);
        }
        for (model, [text, tokens, heads]) in &next.trees {
            metrics.cache_tree_chars.with_label_values(&[model]).set(*text);
            metrics.cache_tree_tokens.with_label_values(&[model]).set(*tokens);
            metrics.cache_placement_entries.with_label_values(&[model]).set(*heads);
        }
        for (model, leg) in self.tenants.keys().filter(|key| !next.tenants.contains_key(*key)) {
            let _ = metrics.cache_tree_tenants.remove_label_values(&[&**model, leg]);
        }
        for ((model, leg), workers) in &next.tenants {
            metrics.cache_tree_tenants.with_label_values(&[&**model, leg]).set(*workers);
        }
        for (model, leg, policy) in self.memory.keys().filter(|key| !next.memory.contains_key(*key)) {
            let _ = metrics.policy_memory_bytes.remove_label_values(&[&**model, leg, policy]);
        }
        for ((model, leg, policy), bytes) in &next.memory {
            metrics.policy_memory_bytes.with_label_values(&[&**model, leg, policy]).set(*bytes);
        }
        for worker in self.keys.keys().filter(|worker| !next.keys.contains_key(*worker)) {
            let _ = metrics.worker_routing_keys_active.remove_label_values(&[worker]);
        }
        for (worker, keys) in &next.keys {
            metrics.worker_routing_keys_active.with_label_values(&[worker]).set(*keys);
        }
        *self = next;
    }
}
