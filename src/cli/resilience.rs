//! Fleet-wide retry and circuit-breaker flags. All optional: see the invariants of the parent module.

use clap::Args;
use smg_fleet::PolicyDocument;
use smg_fleet::policy::{BreakerPolicy, RetryPolicy};

use super::values;

/// Retry and circuit breaker.
#[derive(Debug, Clone, Default, PartialEq, Args)]
#[command(next_help_heading = "Retry and circuit breaker")]
pub struct ResilienceFlags {
    /// Attempts of one request, the first included [default: 5]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub retry_max_retries: Option<u32>,
    /// Wait before the first retry, in milliseconds [default: 50]
    #[arg(long, value_name = "MS")]
    pub retry_initial_backoff_ms: Option<u64>,
    /// Longest wait between attempts, in milliseconds [default: 30000]
    #[arg(long, value_name = "MS")]
    pub retry_max_backoff_ms: Option<u64>,
    /// Growth of the wait from attempt to attempt, at least 1 [default: 1.5]
    #[arg(long, value_name = "FACTOR", value_parser = values::at_least_one)]
    pub retry_backoff_multiplier: Option<f64>,
    /// Share by which a wait is varied either way, 0 to 1 [default: 0.2]
    #[arg(long, value_name = "SHARE", value_parser = values::share)]
    pub retry_jitter_factor: Option<f64>,
    /// Retries allowed for each request, as a share of the traffic, 0 to 1: an overload must not be multiplied [default: 0.2]
    #[arg(long, value_name = "SHARE", value_parser = values::share)]
    pub retry_budget_ratio: Option<f64>,
    /// Retries a second that are allowed however little traffic there is [default: 10]
    #[arg(long, value_name = "N")]
    pub retry_budget_min_per_sec: Option<u32>,
    /// Send every request once
    #[arg(long)]
    pub disable_retries: bool,
    /// Failures in a row that open a worker's circuit [default: 10]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub cb_failure_threshold: Option<u32>,
    /// Successes that close a half-open circuit [default: 3]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub cb_success_threshold: Option<u32>,
    /// Time an open circuit stays open, in seconds [default: 60]
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..))]
    pub cb_timeout_duration_secs: Option<u64>,
    /// Failures further apart than this do not add up, in seconds [default: 120]
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..))]
    pub cb_window_duration_secs: Option<u64>,
    /// Never open a circuit
    #[arg(long)]
    pub disable_circuit_breaker: bool,
}

impl ResilienceFlags {
    /// Writes what was given into the start-up policy document.
    pub(super) fn write_to(&self, document: &mut PolicyDocument) {
        let retry = RetryPolicy {
            max_retries: self.retry_max_retries,
            initial_backoff_ms: self.retry_initial_backoff_ms,
            max_backoff_ms: self.retry_max_backoff_ms,
            backoff_multiplier: self.retry_backoff_multiplier,
            jitter_factor: self.retry_jitter_factor,
            disabled: self.disable_retries.then_some(true),
            budget_ratio: self.retry_budget_ratio,
            budget_min_per_sec: self.retry_budget_min_per_sec,
        };
        let breaker = BreakerPolicy {
            failure_threshold: self.cb_failure_threshold,
            success_threshold: self.cb_success_threshold,
            timeout_secs: self.cb_timeout_duration_secs,
            window_secs: self.cb_window_duration_secs,
            disabled: self.disable_circuit_breaker.then_some(true),
        };
        document.retry = (retry != RetryPolicy::default()).then_some(retry);
        document.circuit_breaker = (breaker != BreakerPolicy::default()).then_some(breaker);
    }
}
