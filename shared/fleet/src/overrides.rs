//! What a registration overrides of the fleet's settings, for its worker.

use serde::{Deserialize, Serialize};

/// Per-worker override of the health settings.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(default)]
#[allow(missing_docs)]
pub struct HealthOverride {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub timeout_secs: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub check_interval_secs: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub success_threshold: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub failure_threshold: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub disable_health_check: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub drain_settle_secs: Option<u64>,
}

impl HealthOverride {
    /// Whether nothing is overridden.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// Lays `newer` over this one, field by field.
    pub fn merge(&mut self, newer: &Self) {
        self.timeout_secs = newer.timeout_secs.or(self.timeout_secs);
        self.check_interval_secs = newer.check_interval_secs.or(self.check_interval_secs);
        self.success_threshold = newer.success_threshold.or(self.success_threshold);
        self.failure_threshold = newer.failure_threshold.or(self.failure_threshold);
        self.disable_health_check = newer.disable_health_check.or(self.disable_health_check);
        self.drain_settle_secs = newer.drain_settle_secs.or(self.drain_settle_secs);
    }
}

/// Per-worker override of retries and the circuit breaker.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(default)]
#[allow(missing_docs)]
pub struct ResilienceOverride {
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
    pub disable_retry: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cb_failure_threshold: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cb_success_threshold: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cb_timeout_secs: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cb_window_secs: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub disable_circuit_breaker: Option<bool>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub retryable_status_codes: Vec<u16>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub capacity_status_codes: Vec<u16>,
}

impl ResilienceOverride {
    /// Whether nothing is overridden.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// Whether it says something about retries, which concern the model and not only the worker.
    pub fn is_of_retries(&self) -> bool {
        self.disable_retry.is_some()
            || self.max_retries.is_some()
            || self.initial_backoff_ms.is_some()
            || self.max_backoff_ms.is_some()
            || self.backoff_multiplier.is_some()
            || self.jitter_factor.is_some()
    }
}
