//! Policy documents: what operators decided on how requests are served.
//!
//! A document says only what somebody decided; what holds then is in [`crate::settings`]. Documents that nothing could be served by are refused
//! before they are stored.

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::Revision;
use crate::pairing::PairingMode;
use crate::protection::{self, OverloadPolicy, PrefillAdmissionPolicy};
use crate::tuning::{
    self, BucketTuning, CacheAwareTuning, LeastLoadTuning, ManualTuning, PowerOfTwoTuning, PrefixHashTuning,
};
use crate::worker::named;

/// Longest wait for rooms on a decode worker.
const MAX_ADMISSION_WAIT_SECS: u64 = 86_400;

named! {
    /// The routing policies of the documented system.
    PolicyName {
        /// Uniform over the available workers.
        Random = "random",
        /// One after the other.
        RoundRobin = "round_robin",
        /// The less loaded of two random workers.
        PowerOfTwo = "power_of_two",
        /// The least loaded worker.
        LeastLoad = "least_load",
        /// Prompt-prefix affinity from the gateway's own record.
        #[default]
        CacheAware = "cache_aware",
        /// Affinity by a hash of the prompt's prefix.
        PrefixHash = "prefix_hash",
        /// Affinity by a hash of a client key.
        ConsistentHashing = "consistent_hashing",
        /// Sticky keys.
        Manual = "manual",
        /// By prompt length.
        Bucket = "bucket",
        /// No choice: regular mode only.
        Passthrough = "passthrough",
    }
}

impl PolicyName {
    /// Whether this version has the policy.
    pub fn is_available(self) -> bool {
        self != Self::Passthrough
    }
}

named! {
    /// What happens to handoff fields that a client sends.
    ClientHandoffFields {
        /// They never reach an engine.
        #[default]
        Strip = "strip",
        /// They are the client's business.
        Forward = "forward",
    }
}

named! {
    /// What a gateway does with its slots of decode workers when the control plane was away for longer than the long lease of them.
    ExpiredSlots {
        /// It admits nothing more on them: no engine ever gets more than its window.
        #[default]
        Drain = "drain",
        /// It serves on within them: it never stops, and slots may be another one's by then.
        Hold = "hold",
    }
}

/// Retry settings of a document.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(default, deny_unknown_fields)]
#[allow(missing_docs)]
pub struct RetryPolicy {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_retries: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub initial_backoff_ms: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_backoff_ms: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub backoff_multiplier: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub jitter_factor: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub disabled: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub budget_ratio: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub budget_min_per_sec: Option<u32>,
}

/// Circuit breaker settings of a document.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(default, deny_unknown_fields)]
#[allow(missing_docs)]
pub struct BreakerPolicy {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub failure_threshold: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub success_threshold: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub timeout_secs: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub window_secs: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub disabled: Option<bool>,
}

/// Active probe settings of a document.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(default, deny_unknown_fields)]
#[allow(missing_docs)]
pub struct HealthPolicy {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub endpoint: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub timeout_secs: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub check_interval_secs: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub success_threshold: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub failure_threshold: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub disabled: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub drain_settle_secs: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub drain_timeout_secs: Option<u64>,
}

/// Registration job settings of a document.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(default, deny_unknown_fields)]
#[allow(missing_docs)]
pub struct RegistrationPolicy {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub timeout_secs: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub check_interval_secs: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub delay_secs: Option<u64>,
}

/// A policy document: the body of `PUT /fleet/policies/{default|model}`. Unknown keys are refused.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct PolicyDocument {
    /// Policy of both legs and of regular workers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub policy: Option<PolicyName>,
    /// Policy of the prefill leg.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prefill_policy: Option<PolicyName>,
    /// Policy of the decode leg.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub decode_policy: Option<PolicyName>,
    /// How strictly legs must share a KV transfer protocol.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pairing_mode: Option<PairingMode>,
    /// What happens to handoff fields that a client sends.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub client_handoff_fields: Option<ClientHandoffFields>,
    /// Retries.
    #[serde(deserialize_with = "crate::object::optional", skip_serializing_if = "Option::is_none")]
    pub retry: Option<RetryPolicy>,
    /// Circuit breaker.
    #[serde(deserialize_with = "crate::object::optional", skip_serializing_if = "Option::is_none")]
    pub circuit_breaker: Option<BreakerPolicy>,
    /// Active probes. Fleet-wide: only the default document's is used.
    #[serde(deserialize_with = "crate::object::optional", skip_serializing_if = "Option::is_none")]
    pub health: Option<HealthPolicy>,
    /// Registration jobs. Fleet-wide: only the default document's is used.
    #[serde(deserialize_with = "crate::object::optional", skip_serializing_if = "Option::is_none")]
    pub registration: Option<RegistrationPolicy>,
    /// How `power_of_two` decides.
    #[serde(deserialize_with = "crate::object::optional", skip_serializing_if = "Option::is_none")]
    pub power_of_two: Option<PowerOfTwoTuning>,
    /// How `least_load` decides.
    #[serde(deserialize_with = "crate::object::optional", skip_serializing_if = "Option::is_none")]
    pub least_load: Option<LeastLoadTuning>,
    /// How `cache_aware` decides.
    #[serde(deserialize_with = "crate::object::optional", skip_serializing_if = "Option::is_none")]
    pub cache_aware: Option<CacheAwareTuning>,
    /// How `prefix_hash` decides.
    #[serde(deserialize_with = "crate::object::optional", skip_serializing_if = "Option::is_none")]
    pub prefix_hash: Option<PrefixHashTuning>,
    /// How `manual` decides.
    #[serde(deserialize_with = "crate::object::optional", skip_serializing_if = "Option::is_none")]
    pub manual: Option<ManualTuning>,
    /// How `bucket` decides.
    #[serde(deserialize_with = "crate::object::optional", skip_serializing_if = "Option::is_none")]
    pub bucket: Option<BucketTuning>,
    /// When a worker is overloaded, and what follows.
    #[serde(deserialize_with = "crate::object::optional", skip_serializing_if = "Option::is_none")]
    pub overload: Option<OverloadPolicy>,
    /// How many requests a prefill worker computes at a time, and who waits.
    #[serde(deserialize_with = "crate::object::optional", skip_serializing_if = "Option::is_none")]
    pub prefill_admission: Option<PrefillAdmissionPolicy>,
    /// Whether requests are routed to single data-parallel ranks. Fleet-wide: only the default document's is used.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dp_aware: Option<bool>,
    /// How long a request waits for rooms on its decode worker, where engines speak token ids. 0 = not at all.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pd_admission_wait_secs: Option<u64>,
    /// Whether the policy's choice of a data-parallel rank gives way to the rank of the same engine with the fewest tokens.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dp_minimum_tokens: Option<bool>,
    /// What becomes of slots of decode workers whose long lease is over. Fleet-wide: only the default document's is used.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub expired_slots: Option<ExpiredSlots>,
}

named! {
    /// Who wrote a policy document last.
    PolicySource {
        /// The admin API.
        #[default]
        Api = "api",
        /// Start-up flags.
        Startup = "startup",
    }
}

/// A stored policy document.
#[derive(Debug, Clone, PartialEq)]
pub struct PolicyRecord {
    /// The model it is for; empty = the fleet default.
    pub model: String,
    /// What it says.
    pub document: PolicyDocument,
    /// Who wrote it last.
    pub source: PolicySource,
    /// What the start-up flags last asked for: an API write wins until this changes.
    pub startup: Option<PolicyDocument>,
    /// Revision of its last change.
    pub mod_revision: Revision,
}

/// Why a document was refused.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[allow(missing_docs)]
pub enum PolicyError {
    #[error("policy '{0}' is not available in this version")]
    NotAvailable(PolicyName),
    #[error("policy 'bucket' cannot be used for decode")]
    BucketDecode,
    #[error("retry.max_retries must be at least 1")]
    Attempts,
    #[error("retry.backoff_multiplier must be a finite number of at least 1")]
    Multiplier,
    #[error("retry.jitter_factor must be between 0 and 1")]
    Jitter,
    #[error("{0} must be at least 1")]
    Threshold(&'static str),
    #[error("{field} must be {rule}")]
    Range { field: &'static str, rule: &'static str },
    #[error("{field} must be between 1 and {most}")]
    Count { field: &'static str, most: u64 },
    #[error("boundaries must be at most {0} ascending numbers of at least 1")]
    Boundaries(usize),
    #[error("health.endpoint must be a path that starts with '/'")]
    Endpoint,
    #[error("'{0}' is fleet-wide: set it in the default document")]
    FleetWide(&'static str),
    #[error("the model name must be 1 to 512 bytes without control characters")]
    ModelName,
}

impl PolicyDocument {
    /// Checks the document for `model` (empty = the fleet default).
    ///
    /// # Errors
    /// The first rule it breaks.
    pub fn validate(&self, model: &str) -> Result<(), PolicyError> {
        if model.len() > 512 || model.chars().any(char::is_control) {
            return Err(PolicyError::ModelName);
        }
        if self.decode_policy.or(self.policy) == Some(PolicyName::Bucket) {
            return Err(PolicyError::BucketDecode);
        }
        for name in [self.policy, self.prefill_policy, self.decode_policy].into_iter().flatten() {
            if !name.is_available() {
                return Err(PolicyError::NotAvailable(name));
            }
        }
        if let Some(retry) = &self.retry {
            if retry.max_retries == Some(0) {
                return Err(PolicyError::Attempts);
            }
            if retry.backoff_multiplier.is_some_and(|value| !value.is_finite() || value < 1.0) {
                return Err(PolicyError::Multiplier);
            }
            if retry.jitter_factor.is_some_and(|value| !(0.0..=1.0).contains(&value)) {
                return Err(PolicyError::Jitter);
            }
            if retry.budget_ratio.is_some_and(|value| !(0.0..=1.0).contains(&value)) {
                return Err(PolicyError::Range { field: "retry.budget_ratio", rule: "between 0 and 1" });
            }
        }
        let mut at_least_one = Vec::new();
        if let Some(breaker) = &self.circuit_breaker {
            at_least_one.push((breaker.failure_threshold.map(u64::from), "circuit_breaker.failure_threshold"));
            at_least_one.push((breaker.success_threshold.map(u64::from), "circuit_breaker.success_threshold"));
            at_least_one.push((breaker.window_secs, "circuit_breaker.window_secs"));
        }
        if let Some(health) = &self.health {
            if !model.is_empty() {
                return Err(PolicyError::FleetWide("health"));
            }
            let is_path =
                |path: &str| path.starts_with('/') && !path.contains(|c: char| c.is_whitespace() || c.is_control());
            if !health.endpoint.as_deref().is_none_or(is_path) {
                return Err(PolicyError::Endpoint);
            }
            at_least_one.push((health.timeout_secs, "health.timeout_secs"));
            at_least_one.push((health.check_interval_secs, "health.check_interval_secs"));
            at_least_one.push((health.success_threshold.map(u64::from), "health.success_threshold"));
            at_least_one.push((health.failure_threshold.map(u64::from), "health.failure_threshold"));
        }
        if let Some(registration) = &self.registration {
            if !model.is_empty() {
                return Err(PolicyError::FleetWide("registration"));
            }
            at_least_one.push((registration.timeout_secs, "registration.timeout_secs"));
            at_least_one.push((registration.check_interval_secs, "registration.check_interval_secs"));
        }
        if self.dp_aware.is_some() && !model.is_empty() {
            return Err(PolicyError::FleetWide("dp_aware"));
        }
        if self.expired_slots.is_some() && !model.is_empty() {
            return Err(PolicyError::FleetWide("expired_slots"));
        }
        if self.pd_admission_wait_secs.is_some_and(|secs| secs > MAX_ADMISSION_WAIT_SECS) {
            return Err(PolicyError::Range { field: "pd_admission_wait_secs", rule: "at most 86400" });
        }
        protection::validate(self)?;
        match at_least_one.into_iter().find(|(value, _)| *value == Some(0)) {
            Some((_, name)) => Err(PolicyError::Threshold(name)),
            None => tuning::validate(self),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_keys_and_absent_policies_are_refused() {
        assert!(serde_json::from_str::<PolicyDocument>(r#"{"polcy":"random"}"#).is_err());
        assert!(serde_json::from_str::<PolicyDocument>(r#"{"retry":{"max":1}}"#).is_err());
        let absent = PolicyDocument { policy: Some(PolicyName::Passthrough), ..Default::default() };
        assert_eq!(absent.validate(""), Err(PolicyError::NotAvailable(PolicyName::Passthrough)));
        let bucket = PolicyDocument { policy: Some(PolicyName::Bucket), ..Default::default() };
        assert_eq!(bucket.validate("m"), Err(PolicyError::BucketDecode));
        let prefill = PolicyDocument { decode_policy: Some(PolicyName::Random), ..bucket };
        assert_eq!(prefill.validate("m"), Ok(()));
        let scoped = PolicyDocument { health: Some(HealthPolicy::default()), ..Default::default() };
        assert_eq!(scoped.validate("m"), Err(PolicyError::FleetWide("health")));
        for (endpoint, valid) in [("/health?full=1", true), ("health", false), ("/a b", false), ("/a\nb", false)] {
            let health = HealthPolicy { endpoint: Some(endpoint.to_owned()), ..Default::default() };
            let document = PolicyDocument { health: Some(health), ..Default::default() };
            assert_eq!(document.validate("").is_ok(), valid, "{endpoint:?}");
        }
    }
}
