//! What holds for a model: the settings that follow from the policy documents.
//!
//! Absent fields inherit: model document, then the fleet's default document, then the built-in value. [`Settings::resolve`] is the one place
//! that knows the built-in values, but for those of the policies' tuning: see [`crate::tuning`].

use crate::overrides::{HealthOverride, ResilienceOverride};
use crate::pairing::PairingMode;
use crate::policy::{BreakerPolicy, ClientHandoffFields, ExpiredSlots, PolicyDocument, PolicyName, RetryPolicy};
use crate::protection::{Overload, PrefillAdmission};
use crate::tuning::Tuning;

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
    pub expired_slots: ExpiredSlots,
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
            expired_slots: default.and_then(|document| document.expired_slots).unwrap_or_default(),
        }
    }
}

impl Probe {
    /// The probe settings of one worker: its own overrides first.
    pub fn for_worker(&self, health: &HealthOverride) -> Probe {
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
}
