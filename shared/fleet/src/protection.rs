//! What keeps engines from being run over: overload protection and prefill admission.
//!
//! As everywhere in a document absent fields inherit, field by field: model document, default document, documented value. A worker's own
//! `overload` block (SMG worker API) goes before all of them and protects that worker even where protection is off.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::policy::{PolicyDocument, PolicyError};
use crate::tuning::block;
use crate::worker::WorkerSpec;

block! {
    /// When a worker is overloaded, and what follows.
    OverloadPolicy {
        /// Nobody is passed over for load.
        disabled: bool,
        /// A worker with so many requests waiting is overloaded, all its ranks together.
        waiting_requests: u64,
        /// A worker that uses this share of its KV cache is overloaded, on average over its ranks.
        token_usage: f64,
        /// Where every worker is overloaded, requests are refused instead of sent to the least loaded one.
        shed: bool,
    }
}

block! {
    /// How many requests a prefill worker computes at a time, and who waits.
    PrefillAdmissionPolicy {
        /// Most requests in the prefill phase of each worker; 0 or less is no limit.
        max_inflight_per_worker: i64,
        /// Most requests that wait for a prefill worker; 0 is nobody.
        queue_size: u64,
        /// How long one waits, in seconds.
        queue_timeout_secs: u64,
    }
}

/// From which load a worker is overloaded.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Thresholds {
    /// Waiting requests.
    pub waiting_requests: u64,
    /// Share of the KV cache in use, above 0 and at most 1.
    pub token_usage: f64,
}

impl Default for Thresholds {
    fn default() -> Self {
        Self { waiting_requests: 8, token_usage: 0.8 }
    }
}

impl Thresholds {
    /// Whether an engine that reports this load is overloaded. Both comparisons are inclusive.
    pub fn exceeded(&self, waiting: u64, token_usage: f64) -> bool {
        waiting >= self.waiting_requests || token_usage >= self.token_usage
    }
}

/// Overload protection in force for one model.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Overload {
    /// `None` = protection is off.
    pub thresholds: Option<Thresholds>,
    /// See [`OverloadPolicy::shed`].
    pub shed: bool,
}

impl Overload {
    pub(crate) fn resolve(model: Option<&PolicyDocument>, default: Option<&PolicyDocument>) -> Self {
        let block = |document: Option<&PolicyDocument>| document.and_then(|document| document.overload.clone());
        let block = block(model).unwrap_or_default().or(block(default).unwrap_or_default());
        let documented = Thresholds::default();
        let thresholds = Thresholds {
            waiting_requests: block.waiting_requests.unwrap_or(documented.waiting_requests),
            token_usage: block.token_usage.unwrap_or(documented.token_usage),
        };
        let disabled = block.disabled.unwrap_or(false);
        Self { thresholds: (!disabled).then_some(thresholds), shed: block.shed.unwrap_or(false) }
    }

    /// The thresholds of one worker: a field of its own block goes before the model's. Where protection is off, only the fields that the
    /// worker names count.
    pub fn for_worker(&self, spec: &WorkerSpec) -> Option<Thresholds> {
        let own = WorkerOverload::of(spec);
        if own == WorkerOverload::default() {
            return self.thresholds;
        }
        let base = self.thresholds.unwrap_or(Thresholds { waiting_requests: u64::MAX, token_usage: f64::INFINITY });
        Some(Thresholds {
            waiting_requests: own.waiting_requests.unwrap_or(base.waiting_requests),
            token_usage: own.token_usage.unwrap_or(base.token_usage),
        })
    }
}

/// The `overload` block of a worker.
#[derive(Debug, Clone, Copy, PartialEq, Default, Deserialize)]
#[serde(default)]
struct WorkerOverload {
    waiting_requests: Option<u64>,
    token_usage: Option<f64>,
}

impl WorkerOverload {
    fn of(spec: &WorkerSpec) -> Self {
        spec.extra.get("overload").and_then(|block| Self::deserialize(block).ok()).unwrap_or_default()
    }
}

/// Whether a worker's `overload` block can be used.
pub(crate) fn is_valid_block(block: &Value) -> bool {
    let fields = |block: WorkerOverload| {
        block.waiting_requests != Some(0) && block.token_usage.is_none_or(|usage| usage > 0.0 && usage <= 1.0)
    };
    block.is_object() && WorkerOverload::deserialize(block).is_ok_and(fields)
}

/// Prefill admission in force for one model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PrefillAdmission {
    /// Most requests in the prefill phase of each worker; `None` = no limit, and nobody waits.
    pub limit: Option<u64>,
    /// Most requests that wait.
    pub queue_size: u64,
    /// How long one waits, in seconds.
    pub queue_timeout_secs: u64,
}

impl PrefillAdmission {
    pub(crate) fn resolve(model: Option<&PolicyDocument>, default: Option<&PolicyDocument>) -> Self {
        let block =
            |document: Option<&PolicyDocument>| document.and_then(|document| document.prefill_admission.clone());
        let block = block(model).unwrap_or_default().or(block(default).unwrap_or_default());
        Self {
            limit: block.max_inflight_per_worker.and_then(|limit| u64::try_from(limit).ok()).filter(|limit| *limit > 0),
            queue_size: block.queue_size.unwrap_or(100),
            queue_timeout_secs: block.queue_timeout_secs.unwrap_or(60),
        }
    }
}

/// Longest prefill queue.
const MAX_QUEUE: u64 = 1 << 20;
/// Longest wait, in seconds: a day.
const MAX_WAIT: u64 = 24 * 3600;

/// Checks the blocks of a document.
pub(crate) fn validate(document: &PolicyDocument) -> Result<(), PolicyError> {
    if let Some(overload) = &document.overload {
        if overload.waiting_requests == Some(0) {
            return Err(PolicyError::Threshold("overload.waiting_requests"));
        }
        if overload.token_usage.is_some_and(|usage| usage.is_nan() || usage <= 0.0 || usage > 1.0) {
            return Err(PolicyError::Range { field: "overload.token_usage", rule: "above 0 and at most 1" });
        }
    }
    if let Some(admission) = &document.prefill_admission {
        if admission.queue_size.is_some_and(|size| size > MAX_QUEUE) {
            return Err(PolicyError::Range { field: "prefill_admission.queue_size", rule: "at most 1048576" });
        }
        if admission.queue_timeout_secs.is_some_and(|secs| !(1..=MAX_WAIT).contains(&secs)) {
            return Err(PolicyError::Count { field: "prefill_admission.queue_timeout_secs", most: MAX_WAIT });
        }
    }
    Ok(())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::Settings;
    use crate::worker::WorkerType;

    fn document(text: &str) -> PolicyDocument {
        serde_json::from_str(text).unwrap()
    }

    fn worker(overload: Value) -> WorkerSpec {
        let mut spec = WorkerSpec::new("http://w:1", WorkerType::Decode);
        spec.extra.insert("overload".to_owned(), overload);
        spec
    }

    #[test]
    fn protection_is_on_by_default_and_steers_at_eight_waiting_or_four_fifths_of_the_cache() {
        let overload = Settings::resolve(None, None).overload;
        assert!(!overload.shed);
        let thresholds = overload.thresholds.unwrap();
        for (waiting, usage, exceeded) in [(7, 0.79, false), (8, 0.0, true), (0, 0.8, true)] {
            assert_eq!(thresholds.exceeded(waiting, usage), exceeded, "{waiting} {usage}");
        }
    }

    #[test]
    fn a_workers_own_block_protects_it_even_where_protection_is_off() {
        let off = Settings::resolve(None, Some(&document(r#"{"overload":{"disabled":true}}"#))).overload;
        assert_eq!(off.for_worker(&WorkerSpec::new("http://w:1", WorkerType::Decode)), None);
        let own = off.for_worker(&worker(serde_json::json!({"waiting_requests": 2}))).unwrap();
        assert!(own.exceeded(2, 0.0) && !own.exceeded(1, 1.0));
        let on = Settings::resolve(None, None).overload.for_worker(&worker(serde_json::json!({"token_usage": 0.5})));
        assert_eq!(on, Some(Thresholds { waiting_requests: 8, token_usage: 0.5 }));
    }

    #[test]
    fn admission_is_off_until_a_positive_limit_is_set_and_fields_inherit() {
        assert_eq!(Settings::resolve(None, None).prefill_admission.limit, None);
        let default = document(r#"{"prefill_admission":{"max_inflight_per_worker":4,"queue_size":7}}"#);
        let model = document(r#"{"prefill_admission":{"queue_timeout_secs":3}}"#);
        let admission = Settings::resolve(Some(&model), Some(&default)).prefill_admission;
        assert_eq!(admission, PrefillAdmission { limit: Some(4), queue_size: 7, queue_timeout_secs: 3 });
        for off in ["-1", "0"] {
            let text = format!(r#"{{"prefill_admission":{{"max_inflight_per_worker":{off}}}}}"#);
            assert_eq!(Settings::resolve(None, Some(&document(&text))).prefill_admission.limit, None);
        }
    }

    #[test]
    fn thresholds_that_would_veto_every_worker_are_refused() {
        for text in [
            r#"{"overload":{"waiting_requests":0}}"#,
            r#"{"overload":{"token_usage":0}}"#,
            r#"{"overload":{"token_usage":1.5}}"#,
            r#"{"prefill_admission":{"queue_timeout_secs":0}}"#,
            r#"{"retry":{"budget_ratio":1.5}}"#,
        ] {
            assert!(document(text).validate("m").is_err(), "{text}");
        }
        assert!(!is_valid_block(&serde_json::json!({"waiting_requests": 0})));
        assert!(!is_valid_block(&serde_json::json!([1])) && !is_valid_block(&serde_json::json!({"token_usage": "x"})));
        assert!(is_valid_block(&serde_json::json!({"token_usage": 1.0})));
    }
}
