//! Policy documents, and the settings that result from them.
//!
//! A document says only what somebody decided; absent fields inherit: model document, then the fleet's default document, then the
//! built-in value. [`Settings::resolve`] is the one place that knows the built-in values, but for those of the policies' tuning: see
//! [`crate::tuning`].

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::Revision;
use crate::pairing::PairingMode;
use crate::protection::{self, Overload, OverloadPolicy, PrefillAdmission, PrefillAdmissionPolicy};
use crate::tuning::{
    self, BucketTuning, CacheAwareTuning, LeastLoadTuning, ManualTuning, PowerOfTwoTuning, PrefixHashTuning, Tuning,
};
use crate::worker::{ResilienceOverride, named};

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

/// Retry settings in force.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Retry {
    /// Attempts in total, at least 1.
    pub attempts: u32,
    /// First delay.
    pub initial_backoff_ms: u64,
    /// Longest delay.
    pub max_backoff_ms: u64,
    /// Growth per attempt.
    pub multiplier: f64,
    /// Share of the delay that varies, 0 to 1.
    pub jitter: f64,
    /// Further attempts allowed for each request, as a share of the traffic; 0 to 1.
    pub budget_ratio: f64,
    /// Further attempts a second that are allowed however little traffic there is.
    pub budget_min_per_sec: u32,
}

impl Retry {
    /// These settings with what a worker's registration overrides.
    #[must_use]
    pub fn overridden(self, overrides: &ResilienceOverride) -> Self {
        let attempts = match overrides.disable_retry {
            Some(true) => 1,
            _ => overrides.max_retries.map_or(self.attempts, |attempts| attempts.max(1)),
        };
        Self {
            attempts,
            initial_backoff_ms: overrides.initial_backoff_ms.unwrap_or(self.initial_backoff_ms),
            max_backoff_ms: overrides.max_backoff_ms.unwrap_or(self.max_backoff_ms),
            multiplier: overrides.backoff_multiplier.unwrap_or(self.multiplier),
            jitter: overrides.jitter_factor.unwrap_or(self.jitter),
            ..self
        }
    }
}

/// Circuit breaker settings in force.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Breaker {
    /// Consecutive failures that open it; `None` = never opens.
    pub failure_threshold: Option<u32>,
    /// Consecutive successes that close it again.
    pub success_threshold: u32,
    /// How long it stays open.
    pub timeout_secs: u64,
    /// Failures further apart than this do not add up.
    pub window_secs: u64,
}

impl Breaker {
    /// Whether it is switched off.
    pub fn is_disabled(&self) -> bool {
        self.failure_threshold.is_none()
    }
}

/// Active probe settings in force.
#[derive(Debug, Clone, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct Probe {
    pub endpoint: String,
    pub timeout_secs: u64,
    pub check_interval_secs: u64,
    pub success_threshold: u32,
    pub failure_threshold: u32,
    pub disabled: bool,
    /// Shortest stay of a removed worker; 0 = it leaves at once, idle or not.
    pub drain_settle_secs: u64,
    /// Longest stay of a removed worker that still runs requests.
    pub drain_timeout_secs: u64,
}

/// Registration job settings in force.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct Registration {
    pub timeout_secs: u64,
    pub check_interval_secs: u64,
    pub delay_secs: u64,
}

/// What holds for one model.
#[derive(Debug, Clone, PartialEq)]
#[allow(missing_docs)]
pub struct Settings {
    pub regular_policy: PolicyName,
    pub prefill_policy: PolicyName,
    pub decode_policy: PolicyName,
    pub tuning: Tuning,
    pub pairing_mode: PairingMode,
    pub client_handoff_fields: ClientHandoffFields,
    pub retry: Retry,
    pub breaker: Breaker,
    pub probe: Probe,
    pub registration: Registration,
    pub overload: Overload,
    pub prefill_admission: PrefillAdmission,
    pub dp_aware: bool,
    pub pd_admission_wait_secs: u64,
    pub dp_minimum_tokens: bool,
}

impl Settings {
    /// The settings that follow from a model's document and the fleet default.
    pub fn resolve(model: Option<&PolicyDocument>, default: Option<&PolicyDocument>) -> Self {
        let documents = [model, default];
        // The first document that decides wins; a document's own `policy` also decides for both its legs.
        fn first<T>(
            documents: [Option<&PolicyDocument>; 2],
            field: impl Fn(&PolicyDocument) -> Option<T>,
        ) -> Option<T> {
            documents.into_iter().flatten().find_map(field)
        }
        fn retry<T>(documents: [Option<&PolicyDocument>; 2], field: impl Fn(&RetryPolicy) -> Option<T>) -> Option<T> {
            first(documents, |document| document.retry.as_ref().and_then(&field))
        }
        fn breaker<T>(
            documents: [Option<&PolicyDocument>; 2],
            field: impl Fn(&BreakerPolicy) -> Option<T>,
        ) -> Option<T> {
            first(documents, |document| document.circuit_breaker.as_ref().and_then(&field))
        }
        let health = default.and_then(|document| document.health.clone()).unwrap_or_default();
        let registration = default.and_then(|document| document.registration.clone()).unwrap_or_default();
        let retries_disabled = retry(documents, |retry| retry.disabled).unwrap_or(false);
        let breaker_disabled = breaker(documents, |breaker| breaker.disabled).unwrap_or(false);
        let failures = breaker(documents, |breaker| breaker.failure_threshold).unwrap_or(10);
        Self {
            regular_policy: first(documents, |document| document.policy).unwrap_or_default(),
            prefill_policy: first(documents, |document| document.prefill_policy.or(document.policy))
                .unwrap_or_default(),
            decode_policy: first(documents, |document| document.decode_policy.or(document.policy)).unwrap_or_default(),
            tuning: Tuning::resolve(model, default),
            pairing_mode: first(documents, |document| document.pairing_mode).unwrap_or_default(),
            client_handoff_fields: first(documents, |document| document.client_handoff_fields).unwrap_or_default(),
            retry: Retry {
                attempts: if retries_disabled {
                    1
                } else {
                    retry(documents, |retry| retry.max_retries).unwrap_or(5).max(1)
                },
                initial_backoff_ms: retry(documents, |retry| retry.initial_backoff_ms).unwrap_or(50),
                max_backoff_ms: retry(documents, |retry| retry.max_backoff_ms).unwrap_or(30_000),
                multiplier: retry(documents, |retry| retry.backoff_multiplier).unwrap_or(1.5),
                jitter: retry(documents, |retry| retry.jitter_factor).unwrap_or(0.2),
                budget_ratio: retry(documents, |retry| retry.budget_ratio).unwrap_or(0.2),
                budget_min_per_sec: retry(documents, |retry| retry.budget_min_per_sec).unwrap_or(10),
            },
            breaker: Breaker {
                failure_threshold: (!breaker_disabled).then_some(failures),
                success_threshold: breaker(documents, |breaker| breaker.success_threshold).unwrap_or(3),
                timeout_secs: breaker(documents, |breaker| breaker.timeout_secs).unwrap_or(60),
                window_secs: breaker(documents, |breaker| breaker.window_secs).unwrap_or(120),
            },
            probe: Probe {
                endpoint: health.endpoint.unwrap_or_else(|| "/health".to_owned()),
                timeout_secs: health.timeout_secs.unwrap_or(5),
                check_interval_secs: health.check_interval_secs.unwrap_or(60),
                success_threshold: health.success_threshold.unwrap_or(2),
                failure_threshold: health.failure_threshold.unwrap_or(3),
                disabled: health.disabled.unwrap_or(false),
                drain_settle_secs: health.drain_settle_secs.unwrap_or(5),
                drain_timeout_secs: health.drain_timeout_secs.unwrap_or(1800),
            },
            registration: Registration {
                timeout_secs: registration.timeout_secs.unwrap_or(1800),
                check_interval_secs: registration.check_interval_secs.unwrap_or(30),
                delay_secs: registration.delay_secs.unwrap_or(0),
            },
            overload: Overload::resolve(model, default),
            prefill_admission: PrefillAdmission::resolve(model, default),
            dp_aware: default.and_then(|document| document.dp_aware).unwrap_or(false),
            pd_admission_wait_secs: first(documents, |document| document.pd_admission_wait_secs).unwrap_or(30),
            dp_minimum_tokens: first(documents, |document| document.dp_minimum_tokens).unwrap_or(false),
        }
    }
}

impl Probe {
    /// The probe settings of one worker: its own overrides first.
    pub fn for_worker(&self, health: &crate::worker::HealthOverride) -> Probe {
        Probe {
            endpoint: self.endpoint.clone(),
            timeout_secs: health.timeout_secs.unwrap_or(self.timeout_secs),
            check_interval_secs: health.check_interval_secs.unwrap_or(self.check_interval_secs),
            success_threshold: health.success_threshold.unwrap_or(self.success_threshold),
            failure_threshold: health.failure_threshold.unwrap_or(self.failure_threshold),
            disabled: health.disable_health_check.unwrap_or(self.disabled),
            drain_settle_secs: health.drain_settle_secs.unwrap_or(self.drain_settle_secs),
            drain_timeout_secs: self.drain_timeout_secs,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_registration_overrides_what_it_names_of_the_retries() {
        let retry = Settings::resolve(None, None).retry;
        assert_eq!(retry.overridden(&ResilienceOverride::default()), retry);
        let two = ResilienceOverride { max_retries: Some(2), initial_backoff_ms: Some(7), ..Default::default() };
        assert_eq!(retry.overridden(&two), Retry { attempts: 2, initial_backoff_ms: 7, ..retry });
        let none = ResilienceOverride { disable_retry: Some(true), ..two };
        assert_eq!(retry.overridden(&none).attempts, 1);
    }

    #[test]
    fn nothing_decided_means_the_documented_defaults() {
        let settings = Settings::resolve(None, None);
        assert_eq!(
            [settings.regular_policy, settings.prefill_policy, settings.decode_policy],
            [PolicyName::CacheAware; 3]
        );
        assert_eq!((settings.retry.attempts, settings.retry.initial_backoff_ms), (5, 50));
        assert_eq!(settings.breaker.failure_threshold, Some(10));
        assert_eq!(settings.pairing_mode, PairingMode::Lenient);
    }

    #[test]
    fn a_models_document_wins_over_the_default_field_by_field() {
        let default = PolicyDocument {
            policy: Some(PolicyName::Random),
            decode_policy: Some(PolicyName::PowerOfTwo),
            pairing_mode: Some(PairingMode::Strict),
            ..Default::default()
        };
        let model = PolicyDocument { prefill_policy: Some(PolicyName::RoundRobin), ..Default::default() };
        let settings = Settings::resolve(Some(&model), Some(&default));
        assert_eq!(settings.prefill_policy, PolicyName::RoundRobin);
        assert_eq!(settings.decode_policy, PolicyName::PowerOfTwo);
        assert_eq!(settings.regular_policy, PolicyName::Random);
        assert_eq!(settings.pairing_mode, PairingMode::Strict);
    }

    #[test]
    fn disabled_retries_mean_one_attempt_and_a_disabled_breaker_never_opens() {
        let document = PolicyDocument {
            retry: Some(RetryPolicy { disabled: Some(true), max_retries: Some(7), ..Default::default() }),
            circuit_breaker: Some(BreakerPolicy { disabled: Some(true), ..Default::default() }),
            ..Default::default()
        };
        let settings = Settings::resolve(None, Some(&document));
        assert_eq!((settings.retry.attempts, settings.breaker.failure_threshold), (1, None));
    }

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
