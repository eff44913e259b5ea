//! The tuning of all policies: what documents say, laid over the documented defaults.

use smg_fleet::policy::PolicyName;
use smg_fleet::tuning as document;

use crate::{
    AssignmentMode, BucketTuning, CacheAwareTuning, LeastLoadTuning, LoadMetric, ManualTuning, PrefixHashTuning,
    WaitTuning,
};

const MILLISECONDS: u64 = 1000;

/// The tuning of all policies; the default is the documented one.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Tuning {
    /// Of `power_of_two`.
    pub power_of_two: LoadMetric,
    /// Of `least_load`.
    pub least_load: LeastLoadTuning,
    /// Of `cache_aware`.
    pub cache_aware: CacheAwareTuning,
    /// Of `prefix_hash`.
    pub prefix_hash: PrefixHashTuning,
    /// Of `manual`.
    pub manual: ManualTuning,
    /// Of `bucket`.
    pub bucket: BucketTuning,
    /// Of sticky sessions, where they are on.
    pub sticky: Option<ManualTuning>,
}

/// Whether sticky sessions apply: `manual` and `consistent_hashing` follow keys by themselves.
pub(crate) fn follows_sessions(policy: PolicyName) -> bool {
    !matches!(policy, PolicyName::Manual | PolicyName::ConsistentHashing)
}

impl Tuning {
    /// Whether an instance of `policy` with this tuning decides as one with the other would.
    pub fn is_same_for(&self, policy: PolicyName, other: &Self) -> bool {
        if follows_sessions(policy) && self.sticky != other.sticky {
            return false;
        }
        match policy {
            PolicyName::PowerOfTwo => self.power_of_two == other.power_of_two,
            PolicyName::LeastLoad => self.least_load == other.least_load,
            PolicyName::CacheAware => self.cache_aware == other.cache_aware,
            PolicyName::PrefixHash => self.prefix_hash == other.prefix_hash,
            PolicyName::Manual => self.manual == other.manual,
            PolicyName::Bucket => self.bucket == other.bucket,
            PolicyName::RoundRobin | PolicyName::Random | PolicyName::ConsistentHashing | PolicyName::Passthrough => {
                true
            }
        }
    }
}

impl From<&document::Tuning> for Tuning {
    fn from(said: &document::Tuning) -> Self {
        let default = Self::default();
        Self {
            power_of_two: said.power_of_two.load_metric.unwrap_or(default.power_of_two),
            least_load: said.least_load.over(default.least_load),
            cache_aware: said.cache_aware.over(default.cache_aware),
            prefix_hash: said.prefix_hash.over(default.prefix_hash),
            manual: said.manual.over(default.manual),
            bucket: said.bucket.over(default.bucket),
            sticky: said.manual.sticky_sessions.unwrap_or_default().then(|| {
                let delegate = ManualTuning { assignment: AssignmentMode::Delegate, ..ManualTuning::default() };
                said.manual.over(delegate)
            }),
        }
    }
}

/// A block of a document that says only what somebody decided.
trait Over<T> {
    /// What it says, over a default.
    fn over(&self, default: T) -> T;
}

impl Over<LeastLoadTuning> for document::LeastLoadTuning {
    fn over(&self, default: LeastLoadTuning) -> LeastLoadTuning {
        LeastLoadTuning {
            wait: WaitTuning {
                kv_pressure_weight: self.kv_pressure_weight.unwrap_or(default.wait.kv_pressure_weight),
                default_throughput: self.default_throughput.unwrap_or(default.wait.default_throughput),
                mean_prefill_tokens: self.mean_prefill_tokens.unwrap_or(default.wait.mean_prefill_tokens),
            },
            max_waiting_requests: self.max_waiting_requests.unwrap_or(default.max_waiting_requests),
        }
    }
}

impl Over<CacheAwareTuning> for document::CacheAwareTuning {
    fn over(&self, default: CacheAwareTuning) -> CacheAwareTuning {
        CacheAwareTuning {
            cache_threshold: self.cache_threshold.unwrap_or(default.cache_threshold),
            balance_abs_threshold: self
                .balance_abs_threshold
                .map_or(default.balance_abs_threshold, |requests| requests as f64),
            balance_rel_threshold: self.balance_rel_threshold.unwrap_or(default.balance_rel_threshold),
            balance_token_usage_threshold: self
                .balance_token_usage_threshold
                .unwrap_or(default.balance_token_usage_threshold),
            overload_token_usage_threshold: self
                .overload_token_usage_threshold
                .unwrap_or(default.overload_token_usage_threshold),
            max_tree_size: self.max_tree_size.map_or(default.max_tree_size, size),
            index: self.index.unwrap_or(default.index),
            boundaries: self
                .boundaries
                .as_ref()
                .map_or(default.boundaries, |lengths| lengths.iter().copied().map(size).collect()),
            ttl_ms: self.ttl_secs.map_or(default.ttl_ms, |secs| secs.saturating_mul(MILLISECONDS)),
        }
    }
}

impl Over<PrefixHashTuning> for document::PrefixHashTuning {
    fn over(&self, default: PrefixHashTuning) -> PrefixHashTuning {
        PrefixHashTuning {
            prefix_token_count: self.prefix_token_count.map_or(default.prefix_token_count, size),
            boundaries: self
                .boundaries
                .as_ref()
                .map_or(default.boundaries, |lengths| lengths.iter().copied().map(size).collect()),
            load_factor: self.load_factor.unwrap_or(default.load_factor),
            balance_abs_threshold: self.balance_abs_threshold.unwrap_or(default.balance_abs_threshold),
        }
    }
}

impl Over<ManualTuning> for document::ManualTuning {
    fn over(&self, default: ManualTuning) -> ManualTuning {
        ManualTuning {
            assignment: self.assignment_mode.unwrap_or(default.assignment),
            max_idle_ms: self.max_idle_secs.map_or(default.max_idle_ms, |secs| secs.saturating_mul(MILLISECONDS)),
            max_keys: self.max_keys.map_or(default.max_keys, size),
        }
    }
}

impl Over<BucketTuning> for document::BucketTuning {
    fn over(&self, default: BucketTuning) -> BucketTuning {
        BucketTuning {
            adjust_interval_ms: self
                .adjust_interval_secs
                .map_or(default.adjust_interval_ms, |secs| secs.saturating_mul(MILLISECONDS)),
            balance_abs_threshold: self.balance_abs_threshold.unwrap_or(default.balance_abs_threshold),
            balance_rel_threshold: self.balance_rel_threshold.unwrap_or(default.balance_rel_threshold),
        }
    }
}

fn size(number: u64) -> usize {
    usize::try_from(number).unwrap_or(usize::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_said_is_the_documented_tuning() {
        assert_eq!(Tuning::from(&document::Tuning::default()), Tuning::default());
    }

    #[test]
    fn what_is_said_goes_over_the_defaults_and_matters_to_its_policy_only() {
        let mut said = document::Tuning::default();
        said.cache_aware.max_tree_size = Some(1000);
        said.manual.max_idle_secs = Some(2);
        said.bucket.adjust_interval_secs = Some(3);
        said.prefix_hash.boundaries = Some(vec![1, 2]);
        let (tuning, default) = (Tuning::from(&said), Tuning::default());
        assert_eq!(tuning.cache_aware, CacheAwareTuning { max_tree_size: 1000, ..CacheAwareTuning::default() });
        assert_eq!((tuning.manual.max_idle_ms, tuning.bucket.adjust_interval_ms), (2000, 3000));
        assert_eq!(tuning.prefix_hash.boundaries, [1, 2]);
        for policy in [PolicyName::CacheAware, PolicyName::Manual, PolicyName::Bucket, PolicyName::PrefixHash] {
            assert!(!tuning.is_same_for(policy, &default), "{policy}");
        }
        for policy in [PolicyName::LeastLoad, PolicyName::PowerOfTwo, PolicyName::RoundRobin] {
            assert!(tuning.is_same_for(policy, &default), "{policy}");
        }
    }
}
