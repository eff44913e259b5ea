//! What a policy document says about how policies decide.
//!
//! One block for each policy that can be tuned. As everywhere in a document absent fields inherit, field by field. What nobody decides is
//! the policy's own documented default, which lives with the policy; this module knows only names and bounds.

use serde::{Deserialize, Serialize};

use crate::policy::{PolicyDocument, PolicyError};
use crate::worker::named;

named! {
    /// What `power_of_two` compares.
    LoadMetric {
        /// The expected wait; requests in flight where no engine reports its load.
        #[default]
        ExpectedWait = "expected_wait",
        /// Requests in flight, of all workers instead of two.
        LeastRequests = "least_requests",
        /// Requests in flight.
        Requests = "requests",
    }
}

named! {
    /// How `manual` gives a new key its worker.
    AssignmentMode {
        /// Any worker.
        #[default]
        Random = "random",
        /// The one with the fewest requests in flight.
        MinLoad = "min_load",
        /// The one with the fewest keys.
        MinGroup = "min_group",
        /// The choice of the policy under sticky sessions; as `min_load` under `manual`, where there is none.
        Delegate = "delegate",
    }
}

named! {
    /// What `cache_aware` records.
    CacheIndex {
        /// Whole prompts, as a tree.
        #[default]
        Tree = "tree",
        /// The heads of token prompts, for a time.
        Hash = "hash",
    }
}

macro_rules! block {
    ($(#[$meta:meta])* $name:ident { $($(#[$field_meta:meta])* $field:ident: $kind:ty,)+ }) => {
        $(#[$meta])*
        #[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, schemars::JsonSchema)]
        #[serde(default, deny_unknown_fields)]
        pub struct $name {
            $($(#[$field_meta])* #[serde(skip_serializing_if = "Option::is_none")] pub $field: Option<$kind>,)+
        }

        impl $name {
            /// Field by field what this block says, else what the other one says.
            pub(crate) fn or(self, other: Self) -> Self {
                Self { $($field: self.$field.or(other.$field),)+ }
            }
        }
    };
}

pub(crate) use block;

block! {
    /// Of `power_of_two`.
    PowerOfTwoTuning {
        /// What is compared.
        load_metric: LoadMetric,
    }
}

block! {
    /// Of `least_load`.
    LeastLoadTuning {
        /// Weight of a full KV cache, in seconds.
        kv_pressure_weight: f64,
        /// Tokens per second of an engine that does not report its speed.
        default_throughput: f64,
        /// Tokens of a prompt of unknown length.
        mean_prefill_tokens: u64,
        /// A worker with so many requests waiting is passed over; 0 is no cap.
        max_waiting_requests: u64,
    }
}

block! {
    /// Of `cache_aware`.
    CacheAwareTuning {
        /// The share of a prompt above which a match decides.
        cache_threshold: f64,
        /// The most by which a worker's load may exceed the mean …
        balance_abs_threshold: u64,
        /// … once it also exceeds this multiple of the mean.
        balance_rel_threshold: f64,
        /// History does not count while KV use differs by more between workers; 1 or more is never.
        balance_token_usage_threshold: f64,
        /// History does not count while any worker uses more of its KV; 1 or more is never.
        overload_token_usage_threshold: f64,
        /// Bytes of each record of prompts.
        max_tree_size: u64,
        /// What is recorded.
        index: CacheIndex,
        /// Of the hash index: ascending lengths of heads in tokens.
        boundaries: Vec<u64>,
        /// Of the hash index: how long a placement counts.
        ttl_secs: u64,
    }
}

block! {
    /// Of `prefix_hash`.
    PrefixHashTuning {
        /// Tokens at the head of a prompt that make its key.
        prefix_token_count: u64,
        /// Ascending lengths in tokens that make deeper keys.
        boundaries: Vec<u64>,
        /// A worker is overloaded above this multiple of the mean load …
        load_factor: f64,
        /// … if it also exceeds the mean by more than this.
        balance_abs_threshold: f64,
    }
}

block! {
    /// Of `manual`, and of sticky sessions on other policies.
    ManualTuning {
        /// How a new key gets its worker.
        assignment_mode: AssignmentMode,
        /// A key that nobody used for so long is forgotten.
        max_idle_secs: u64,
        /// Most keys remembered.
        max_keys: u64,
        /// Whether every policy keeps the requests of a session on one worker.
        sticky_sessions: bool,
    }
}

block! {
    /// Of `bucket`.
    BucketTuning {
        /// How often the ranges of lengths are cut anew.
        adjust_interval_secs: u64,
        /// Work is uneven if workers differ by more characters than this …
        balance_abs_threshold: u64,
        /// … and by more than this factor.
        balance_rel_threshold: f64,
    }
}

/// The blocks that hold for one model.
#[derive(Debug, Clone, PartialEq, Default)]
#[allow(missing_docs)]
pub struct Tuning {
    pub power_of_two: PowerOfTwoTuning,
    pub least_load: LeastLoadTuning,
    pub cache_aware: CacheAwareTuning,
    pub prefix_hash: PrefixHashTuning,
    pub manual: ManualTuning,
    pub bucket: BucketTuning,
}

impl Tuning {
    /// What the first document says, else the second.
    pub(crate) fn resolve(first: Option<&PolicyDocument>, second: Option<&PolicyDocument>) -> Self {
        let (one, other) = (Self::of(first), Self::of(second));
        Self {
            power_of_two: one.power_of_two.or(other.power_of_two),
            least_load: one.least_load.or(other.least_load),
            cache_aware: one.cache_aware.or(other.cache_aware),
            prefix_hash: one.prefix_hash.or(other.prefix_hash),
            manual: one.manual.or(other.manual),
            bucket: one.bucket.or(other.bucket),
        }
    }

    fn of(document: Option<&PolicyDocument>) -> Self {
        let Some(document) = document else { return Self::default() };
        Self {
            power_of_two: document.power_of_two.clone().unwrap_or_default(),
            least_load: document.least_load.clone().unwrap_or_default(),
            cache_aware: document.cache_aware.clone().unwrap_or_default(),
            prefix_hash: document.prefix_hash.clone().unwrap_or_default(),
            manual: document.manual.clone().unwrap_or_default(),
            bucket: document.bucket.clone().unwrap_or_default(),
        }
    }
}

/// Largest record of prompts, in bytes.
const MAX_TREE_SIZE: u64 = 64 << 30;
/// Most keys that `manual` remembers; each takes about 100 bytes.
const MAX_KEYS: u64 = 1 << 24;
/// Most boundaries of `prefix_hash`: each costs every request a hash.
const MAX_BOUNDARIES: usize = 16;
/// Longest span of time, in seconds: a year.
const MAX_SECONDS: u64 = 365 * 24 * 3600;

/// Checks the blocks of a document.
pub(crate) fn validate(document: &PolicyDocument) -> Result<(), PolicyError> {
    let Tuning { least_load, cache_aware, prefix_hash, manual, bucket, power_of_two: _ } = Tuning::of(Some(document));
    let share = |value: f64| (0.0..=1.0).contains(&value);
    let factor = |value: f64| value.is_finite() && value >= 1.0;
    let amount = |value: f64| value.is_finite() && value >= 0.0;
    let positive = |value: f64| value.is_finite() && value > 0.0;
    const SHARE: &str = "between 0 and 1";
    const FACTOR: &str = "a finite number of at least 1";
    const AMOUNT: &str = "a finite number of at least 0";
    const POSITIVE: &str = "a finite number above 0";
    let numbers = [
        ("least_load.kv_pressure_weight", least_load.kv_pressure_weight.is_none_or(amount), AMOUNT),
        ("least_load.default_throughput", least_load.default_throughput.is_none_or(positive), POSITIVE),
        ("cache_aware.cache_threshold", cache_aware.cache_threshold.is_none_or(share), SHARE),
        ("cache_aware.balance_rel_threshold", cache_aware.balance_rel_threshold.is_none_or(factor), FACTOR),
        (
            "cache_aware.balance_token_usage_threshold",
            cache_aware.balance_token_usage_threshold.is_none_or(positive),
            POSITIVE,
        ),
        (
            "cache_aware.overload_token_usage_threshold",
            cache_aware.overload_token_usage_threshold.is_none_or(positive),
            POSITIVE,
        ),
        ("prefix_hash.load_factor", prefix_hash.load_factor.is_none_or(factor), FACTOR),
        ("prefix_hash.balance_abs_threshold", prefix_hash.balance_abs_threshold.is_none_or(amount), AMOUNT),
        ("bucket.balance_rel_threshold", bucket.balance_rel_threshold.is_none_or(factor), FACTOR),
    ];
    if let Some((field, _, rule)) = numbers.into_iter().find(|(_, holds, _)| !holds) {
        return Err(PolicyError::Range { field, rule });
    }
    let counts = [
        ("least_load.mean_prefill_tokens", least_load.mean_prefill_tokens, 1 << 32),
        ("cache_aware.max_tree_size", cache_aware.max_tree_size, MAX_TREE_SIZE),
        ("cache_aware.ttl_secs", cache_aware.ttl_secs, MAX_SECONDS),
        ("prefix_hash.prefix_token_count", prefix_hash.prefix_token_count, 1 << 32),
        ("manual.max_idle_secs", manual.max_idle_secs, MAX_SECONDS),
        ("manual.max_keys", manual.max_keys, MAX_KEYS),
        ("bucket.adjust_interval_secs", bucket.adjust_interval_secs, MAX_SECONDS),
    ];
    for (field, value, most) in counts {
        if value.is_some_and(|value| !(1..=most).contains(&value)) {
            return Err(PolicyError::Count { field, most });
        }
    }
    let ascending = |lengths: &Vec<u64>| {
        lengths.len() <= MAX_BOUNDARIES && lengths.first() != Some(&0) && lengths.is_sorted_by(|one, next| one < next)
    };
    if ![&prefix_hash.boundaries, &cache_aware.boundaries].into_iter().flatten().all(ascending) {
        return Err(PolicyError::Boundaries(MAX_BOUNDARIES));
    }
    Ok(())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn document(text: &str) -> PolicyDocument {
        serde_json::from_str(text).unwrap()
    }

    #[test]
    fn blocks_inherit_field_by_field() {
        let default =
            document(r#"{"cache_aware":{"cache_threshold":0.5,"max_tree_size":1000},"manual":{"max_keys":7}}"#);
        let model = document(r#"{"cache_aware":{"cache_threshold":0.7}}"#);
        let tuning = Tuning::resolve(Some(&model), Some(&default));
        assert_eq!(tuning.cache_aware.cache_threshold, Some(0.7));
        assert_eq!(tuning.cache_aware.max_tree_size, Some(1000));
        assert_eq!(tuning.manual.max_keys, Some(7));
        assert_eq!(tuning.bucket, BucketTuning::default());
    }

    #[test]
    fn values_that_no_policy_can_work_with_are_refused_by_name() {
        for (text, field) in [
            (r#"{"least_load":{"kv_pressure_weight":-1}}"#, "least_load.kv_pressure_weight"),
            (r#"{"least_load":{"default_throughput":0}}"#, "least_load.default_throughput"),
            (r#"{"least_load":{"mean_prefill_tokens":0}}"#, "least_load.mean_prefill_tokens"),
            (r#"{"cache_aware":{"cache_threshold":1.1}}"#, "cache_aware.cache_threshold"),
            (r#"{"cache_aware":{"balance_rel_threshold":0.9}}"#, "cache_aware.balance_rel_threshold"),
            (r#"{"cache_aware":{"max_tree_size":0}}"#, "cache_aware.max_tree_size"),
            (r#"{"cache_aware":{"ttl_secs":0}}"#, "cache_aware.ttl_secs"),
            (r#"{"cache_aware":{"boundaries":[3,1]}}"#, "boundaries"),
            (r#"{"prefix_hash":{"prefix_token_count":0}}"#, "prefix_hash.prefix_token_count"),
            (r#"{"prefix_hash":{"boundaries":[2,2]}}"#, "boundaries"),
            (r#"{"prefix_hash":{"boundaries":[0,2]}}"#, "boundaries"),
            (r#"{"manual":{"max_idle_secs":0}}"#, "manual.max_idle_secs"),
            (r#"{"manual":{"max_keys":16777217}}"#, "manual.max_keys"),
            (r#"{"bucket":{"adjust_interval_secs":0}}"#, "bucket.adjust_interval_secs"),
        ] {
            let refused = document(text).validate("m").unwrap_err().to_string();
            assert!(refused.contains(field), "{text}: {refused}");
        }
        document(r#"{"least_load":{"max_waiting_requests":0},"prefix_hash":{"boundaries":[]}}"#).validate("m").unwrap();
    }

    #[test]
    fn unknown_keys_and_names_are_refused() {
        for text in [
            r#"{"cache_aware":{"treshold":0.5}}"#,
            r#"{"power_of_two":{"load_metric":"latency"}}"#,
            r#"{"manual":{"assignment_mode":"first"}}"#,
            r#"{"bucket":[5]}"#,
        ] {
            assert!(serde_json::from_str::<PolicyDocument>(text).is_err(), "{text}");
        }
    }
}
