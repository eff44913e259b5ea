//! Fleet-wide flags that tune policies. All optional: see the invariants of the parent module.
//!
//! Both legs and regular workers take the same tuning. One flag may tune several policies; each gets it in its own block of the document.

use clap::Args;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use smg_fleet::PolicyDocument;
use smg_fleet::tuning::{
    AssignmentMode, BucketTuning, CacheAwareTuning, CacheIndex, LeastLoadTuning, LoadMetric, ManualTuning,
    PowerOfTwoTuning, PrefixHashTuning,
};

use super::values;

fn load_metric() -> impl TypedValueParser<Value = LoadMetric> {
    let names = PossibleValuesParser::new(LoadMetric::ALL.iter().map(|name| name.as_str()));
    names.try_map(|name| LoadMetric::from_name(&name).ok_or("unknown metric"))
}

fn cache_index() -> impl TypedValueParser<Value = CacheIndex> {
    let names = PossibleValuesParser::new(CacheIndex::ALL.iter().map(|name| name.as_str()));
    names.try_map(|name| CacheIndex::from_name(&name).ok_or("unknown index"))
}

fn assignment_mode() -> impl TypedValueParser<Value = AssignmentMode> {
    let names = PossibleValuesParser::new(AssignmentMode::ALL.iter().map(|name| name.as_str()));
    names.try_map(|name| AssignmentMode::from_name(&name).ok_or("unknown mode"))
}

/// Tuning of policies.
#[derive(Debug, Clone, Default, PartialEq, Args)]
#[command(next_help_heading = "Tuning of policies")]
pub struct TuningFlags {
    /// cache_aware: share of a prompt above which a match with earlier prompts decides, 0 to 1 [default: 0.3]
    #[arg(long, alias = "cache-match-threshold", value_name = "SHARE", value_parser = values::share)]
    cache_threshold: Option<f64>,
    /// cache_aware: requests by which a worker may exceed the mean load and still get its prompts; bucket: characters by which
    /// workers may differ [default: 64]
    #[arg(long, alias = "spill-abs-threshold", value_name = "N")]
    balance_abs_threshold: Option<u64>,
    /// cache_aware: multiple of the mean load, bucket: of the least given characters, that must be exceeded as well
    /// [default: 1.5]
    #[arg(long, alias = "spill-rel-threshold", value_name = "FACTOR", value_parser = values::at_least_one)]
    balance_rel_threshold: Option<f64>,
    /// cache_aware: difference of KV use between workers above which only the wait counts; 1 is never [default: 1]
    #[arg(long, value_name = "SHARE", value_parser = values::positive)]
    balance_token_usage_threshold: Option<f64>,
    /// cache_aware: KV use of any worker above which only the wait counts; 1 is never [default: 1]
    #[arg(long, value_name = "SHARE", value_parser = values::positive)]
    overload_token_usage_threshold: Option<f64>,
    /// cache_aware: bytes of each record of prompts [default: 67108864]
    #[arg(long, value_name = "BYTES", value_parser = clap::value_parser!(u64).range(1..=64 << 30))]
    max_tree_size: Option<u64>,
    /// cache_aware: what is recorded: whole prompts, or, for a time, the heads of token prompts at --cache-boundaries [default: tree]
    #[arg(long, value_parser = cache_index(), value_name = "INDEX", requires_if("hash", "cache_boundaries"))]
    cache_index: Option<CacheIndex>,
    /// cache_aware with --cache-index hash: how long a placement counts, in seconds [default: 180]
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..=31_536_000))]
    cache_ttl_secs: Option<u64>,
    /// Accepted for compatibility: what policies remember is bounded at every request [default: 120]
    #[arg(long, alias = "eviction-interval-secs", value_name = "SECONDS")]
    eviction_interval: Option<u64>,
    /// prefix_hash: tokens at the head of a prompt that make its key; four characters are one [default: 256]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=1 << 32))]
    prefix_token_count: Option<u64>,
    /// prefix_hash: ascending lengths in tokens that make deeper keys for longer prompts; cache_aware with --cache-index hash:
    /// lengths of the heads that are recorded [default: none]
    #[arg(long, value_delimiter = ',', value_name = "N,…", value_parser = clap::value_parser!(u64).range(1..))]
    cache_boundaries: Option<Vec<u64>>,
    /// prefix_hash: multiple of the mean load above which a worker is overloaded [default: 1.25]
    #[arg(long, value_name = "FACTOR", value_parser = values::at_least_one)]
    prefix_hash_load_factor: Option<f64>,
    /// prefix_hash: requests by which the mean must be exceeded as well [default: 10]
    #[arg(long, value_name = "N", value_parser = values::amount)]
    prefix_hash_balance_abs_threshold: Option<f64>,
    /// least_load: weight of a full KV cache, in seconds [default: 0.15]
    #[arg(long, value_name = "SECONDS", value_parser = values::amount)]
    least_load_kv_pressure_weight: Option<f64>,
    /// least_load: tokens per second of an engine that does not report its speed [default: 2000]
    #[arg(long, value_name = "N", value_parser = values::positive)]
    least_load_default_throughput: Option<f64>,
    /// least_load: tokens of a prompt of unknown length [default: 1024]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=1 << 32))]
    least_load_mean_prefill_tokens: Option<u64>,
    /// least_load: requests waiting at which a worker is passed over; 0 is no cap [default: 0]
    #[arg(long, value_name = "N")]
    least_load_max_waiting_requests: Option<u64>,
    /// power_of_two: what is compared [default: expected_wait]
    #[arg(long, value_parser = load_metric(), value_name = "METRIC")]
    power_of_two_load_metric: Option<LoadMetric>,
    /// manual, sessions: how a new key gets its worker [default: random; delegate for sessions]
    #[arg(long, value_parser = assignment_mode(), value_name = "MODE")]
    assignment_mode: Option<AssignmentMode>,
    /// manual, sessions: time after which an unused key is forgotten, in seconds [default: 14400]
    #[arg(long, alias = "sticky-key-idle-secs", value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..=31_536_000))]
    max_idle_secs: Option<u64>,
    /// Keep the requests of a session on one worker, whatever the policy: the routing key names it, else the request's `rid`
    #[arg(long, alias = "sticky-sessions")]
    routing_key_override: bool,
    /// bucket: how often the ranges of lengths are cut anew, in seconds [default: 5]
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..=31_536_000))]
    bucket_adjust_interval_secs: Option<u64>,
}

/// A block of which something was given.
fn given<T: Default + PartialEq>(block: T) -> Option<T> {
    (block != T::default()).then_some(block)
}

impl TuningFlags {
    /// Writes what was given into the start-up policy document.
    pub(super) fn write_to(&self, document: &mut PolicyDocument) {
        document.cache_aware = given(CacheAwareTuning {
            cache_threshold: self.cache_threshold,
            balance_abs_threshold: self.balance_abs_threshold,
            balance_rel_threshold: self.balance_rel_threshold,
            balance_token_usage_threshold: self.balance_token_usage_threshold,
            overload_token_usage_threshold: self.overload_token_usage_threshold,
            max_tree_size: self.max_tree_size,
            index: self.cache_index,
            boundaries: self.cache_boundaries.clone(),
            ttl_secs: self.cache_ttl_secs,
        });
        document.bucket = given(BucketTuning {
            adjust_interval_secs: self.bucket_adjust_interval_secs,
            balance_abs_threshold: self.balance_abs_threshold,
            balance_rel_threshold: self.balance_rel_threshold,
        });
        document.prefix_hash = given(PrefixHashTuning {
            prefix_token_count: self.prefix_token_count,
            boundaries: self.cache_boundaries.clone(),
            load_factor: self.prefix_hash_load_factor,
            balance_abs_threshold: self.prefix_hash_balance_abs_threshold,
        });
        document.least_load = given(LeastLoadTuning {
            kv_pressure_weight: self.least_load_kv_pressure_weight,
            default_throughput: self.least_load_default_throughput,
            mean_prefill_tokens: self.least_load_mean_prefill_tokens,
            max_waiting_requests: self.least_load_max_waiting_requests,
        });
        document.power_of_two = given(PowerOfTwoTuning { load_metric: self.power_of_two_load_metric });
        document.manual = given(ManualTuning {
            assignment_mode: self.assignment_mode,
            max_idle_secs: self.max_idle_secs,
            max_keys: None,
            sticky_sessions: self.routing_key_override.then_some(true),
        });
    }
}
