//! Fleet-wide health, draining and worker start-up flags. All optional: see the invariants of the parent module.

use clap::Args;
use smg_fleet::PolicyDocument;
use smg_fleet::policy::{HealthPolicy, RegistrationPolicy};

use super::values;

/// Health probes, draining and worker start-up.
#[derive(Debug, Clone, Default, PartialEq, Args)]
#[command(next_help_heading = "Worker health and start-up")]
pub struct HealthFlags {
    /// Path that is probed [default: /health]
    #[arg(long, value_name = "PATH", value_parser = values::url_path)]
    pub health_check_endpoint: Option<String>,
    /// Time one probe may take, in seconds [default: 5]
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..))]
    pub health_check_timeout_secs: Option<u64>,
    /// Time between probes of one worker, in seconds [default: 60]
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..))]
    pub health_check_interval_secs: Option<u64>,
    /// Failed probes in a row that take a worker out of rotation [default: 3]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub health_failure_threshold: Option<u32>,
    /// Good probes in a row that bring it back [default: 2]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub health_success_threshold: Option<u32>,
    /// Probe nothing: registered workers count as healthy
    #[arg(long)]
    pub disable_health_check: bool,
    /// Time a removed worker stays at least, in seconds; 0 removes it at once [default: 5]
    #[arg(long, value_name = "SECONDS")]
    pub drain_settle_secs: Option<u64>,
    /// Time a removed worker stays at most, while requests still run on it, in seconds [default: 1800]
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..))]
    pub drain_timeout_secs: Option<u64>,
    /// Time a worker may take to answer after it was registered, in seconds [default: 1800]
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..))]
    pub worker_startup_timeout_secs: Option<u64>,
    /// Wait before the first check of a registered worker, in seconds [default: 0]
    #[arg(long, value_name = "SECONDS")]
    pub worker_startup_delay: Option<u64>,
    /// Time between the checks of a starting worker, in seconds [default: 30]
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..))]
    pub worker_startup_check_interval: Option<u64>,
}

impl HealthFlags {
    /// Writes what was given into the start-up policy document.
    pub(super) fn write_to(&self, document: &mut PolicyDocument) {
        let health = HealthPolicy {
            endpoint: self.health_check_endpoint.clone(),
            timeout_secs: self.health_check_timeout_secs,
            check_interval_secs: self.health_check_interval_secs,
            success_threshold: self.health_success_threshold,
            failure_threshold: self.health_failure_threshold,
            disabled: self.disable_health_check.then_some(true),
            drain_settle_secs: self.drain_settle_secs,
            drain_timeout_secs: self.drain_timeout_secs,
        };
        let registration = RegistrationPolicy {
            timeout_secs: self.worker_startup_timeout_secs,
            check_interval_secs: self.worker_startup_check_interval,
            delay_secs: self.worker_startup_delay,
        };
        document.health = (health != HealthPolicy::default()).then_some(health);
        document.registration = (registration != RegistrationPolicy::default()).then_some(registration);
    }
}
