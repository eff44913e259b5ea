//! Conversions of the blocks that tune policies.

use smg_messages::state as pb;

use super::{WireError, named};
use crate::protection::{OverloadPolicy, PrefillAdmissionPolicy};
use crate::tuning::{
    AssignmentMode, BucketTuning, CacheAwareTuning, CacheIndex, LeastLoadTuning, LoadMetric, ManualTuning,
    PowerOfTwoTuning, PrefixHashTuning,
};

/// A block whose fields are the same on both sides, in both directions.
macro_rules! alike {
    ($($to:ident, $from:ident: $block:ident { $($field:ident),+ })+) => {
        $(
            pub(super) fn $to(block: &$block) -> pb::$block {
                pb::$block { $($field: block.$field),+ }
            }

            pub(super) fn $from(block: pb::$block) -> $block {
                $block { $($field: block.$field),+ }
            }
        )+
    };
}

alike! {
    least_load_to_pb, least_load_from_pb: LeastLoadTuning {
        kv_pressure_weight, default_throughput, mean_prefill_tokens, max_waiting_requests
    }
    overload_to_pb, overload_from_pb: OverloadPolicy { disabled, waiting_requests, token_usage, shed }
    prefill_admission_to_pb, prefill_admission_from_pb: PrefillAdmissionPolicy {
        max_inflight_per_worker, queue_size, queue_timeout_secs
    }
    bucket_to_pb, bucket_from_pb: BucketTuning { adjust_interval_secs, balance_abs_threshold, balance_rel_threshold }
}

pub(super) fn power_of_two_to_pb(block: &PowerOfTwoTuning) -> pb::PowerOfTwoTuning {
    pb::PowerOfTwoTuning { load_metric: block.load_metric.map(|metric| metric.as_str().to_owned()) }
}

pub(super) fn power_of_two_from_pb(block: pb::PowerOfTwoTuning) -> Result<PowerOfTwoTuning, WireError> {
    Ok(PowerOfTwoTuning { load_metric: named(block.load_metric, LoadMetric::from_name, "power_of_two.load_metric")? })
}

pub(super) fn cache_aware_to_pb(block: &CacheAwareTuning) -> pb::CacheAwareTuning {
    pb::CacheAwareTuning {
        cache_threshold: block.cache_threshold,
        balance_abs_threshold: block.balance_abs_threshold,
        balance_rel_threshold: block.balance_rel_threshold,
        balance_token_usage_threshold: block.balance_token_usage_threshold,
        overload_token_usage_threshold: block.overload_token_usage_threshold,
        max_tree_size: block.max_tree_size,
        index: block.index.map(|index| index.as_str().to_owned()),
        boundaries: block.boundaries.clone().map(|tokens| pb::PrefixBoundaries { tokens }),
        ttl_secs: block.ttl_secs,
    }
}

pub(super) fn cache_aware_from_pb(block: pb::CacheAwareTuning) -> Result<CacheAwareTuning, WireError> {
    Ok(CacheAwareTuning {
        cache_threshold: block.cache_threshold,
        balance_abs_threshold: block.balance_abs_threshold,
        balance_rel_threshold: block.balance_rel_threshold,
        balance_token_usage_threshold: block.balance_token_usage_threshold,
        overload_token_usage_threshold: block.overload_token_usage_threshold,
        max_tree_size: block.max_tree_size,
        index: named(block.index, CacheIndex::from_name, "cache_aware.index")?,
        boundaries: block.boundaries.map(|boundaries| boundaries.tokens),
        ttl_secs: block.ttl_secs,
    })
}

pub(super) fn prefix_hash_to_pb(block: &PrefixHashTuning) -> pb::PrefixHashTuning {
    pb::PrefixHashTuning {
        prefix_token_count: block.prefix_token_count,
        // An empty list says something too: a message of its own tells it from none.
        boundaries: block.boundaries.clone().map(|tokens| pb::PrefixBoundaries { tokens }),
        load_factor: block.load_factor,
        balance_abs_threshold: block.balance_abs_threshold,
    }
}

pub(super) fn prefix_hash_from_pb(block: pb::PrefixHashTuning) -> PrefixHashTuning {
    PrefixHashTuning {
        prefix_token_count: block.prefix_token_count,
        boundaries: block.boundaries.map(|boundaries| boundaries.tokens),
        load_factor: block.load_factor,
        balance_abs_threshold: block.balance_abs_threshold,
    }
}

pub(super) fn manual_to_pb(block: &ManualTuning) -> pb::ManualTuning {
    pb::ManualTuning {
        assignment_mode: block.assignment_mode.map(|mode| mode.as_str().to_owned()),
        max_idle_secs: block.max_idle_secs,
        max_keys: block.max_keys,
        sticky_sessions: block.sticky_sessions,
    }
}

pub(super) fn manual_from_pb(block: pb::ManualTuning) -> Result<ManualTuning, WireError> {
    Ok(ManualTuning {
        assignment_mode: named(block.assignment_mode, AssignmentMode::from_name, "manual.assignment_mode")?,
        max_idle_secs: block.max_idle_secs,
        max_keys: block.max_keys,
        sticky_sessions: block.sticky_sessions,
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use crate::PolicyDocument;
    use crate::wire::{document_from_pb, document_to_pb};

    #[test]
    fn every_field_of_every_block_comes_back() {
        let text = r#"{
            "power_of_two": {"load_metric": "least_requests"},
            "least_load": {"kv_pressure_weight": 0.5, "default_throughput": 10.0, "mean_prefill_tokens": 7, "max_waiting_requests": 3},
            "cache_aware": {"cache_threshold": 0.4, "balance_abs_threshold": 5, "balance_rel_threshold": 2.5,
                "balance_token_usage_threshold": 0.6, "overload_token_usage_threshold": 0.7, "max_tree_size": 1000,
                "index": "hash", "boundaries": [64, 512], "ttl_secs": 60},
            "prefix_hash": {"prefix_token_count": 8, "boundaries": [], "load_factor": 1.5, "balance_abs_threshold": 4.0},
            "manual": {"assignment_mode": "min_group", "max_idle_secs": 9, "max_keys": 11, "sticky_sessions": true},
            "bucket": {"adjust_interval_secs": 12, "balance_abs_threshold": 13, "balance_rel_threshold": 1.25},
            "overload": {"disabled": true, "waiting_requests": 2, "token_usage": 0.5, "shed": true},
            "prefill_admission": {"max_inflight_per_worker": -1, "queue_size": 0, "queue_timeout_secs": 4},
            "retry": {"budget_ratio": 0.5, "budget_min_per_sec": 0},
            "health": {"drain_timeout_secs": 9},
            "dp_aware": true,
            "pd_admission_wait_secs": 7,
            "dp_minimum_tokens": true,
            "expired_slots": "hold"
        }"#;
        let document: PolicyDocument = serde_json::from_str(text).unwrap();
        assert_eq!(serde_json::to_value(&document).unwrap(), serde_json::from_str::<serde_json::Value>(text).unwrap());
        assert_eq!(document_from_pb(document_to_pb(&document)).unwrap(), document);
        document.validate("").unwrap();
    }

    #[test]
    fn a_name_of_a_newer_version_is_an_error_not_a_guess() {
        let mut message = document_to_pb(&PolicyDocument::default());
        message.manual =
            Some(smg_messages::state::ManualTuning { assignment_mode: Some("astrology".into()), ..Default::default() });
        assert!(document_from_pb(message).is_err());
    }
}
