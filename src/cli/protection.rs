//! Fleet-wide flags of overload protection and prefill admission. All optional: see the invariants of the parent module.

use clap::Args;
use smg_fleet::PolicyDocument;
use smg_fleet::protection::{OverloadPolicy, PrefillAdmissionPolicy};

use super::error::CliError;
use super::values;

/// Overload protection and prefill admission.
#[derive(Debug, Clone, Default, PartialEq, Args)]
#[command(next_help_heading = "Overload protection and prefill admission")]
pub struct ProtectionFlags {
    /// Pass over overloaded workers: this is the default
    #[arg(long)]
    worker_overload_protection: bool,
    /// Pass over no worker for its load
    #[arg(long, conflicts_with = "worker_overload_protection")]
    disable_worker_overload_protection: bool,
    /// Waiting requests from which a worker is overloaded [default: 8]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    worker_overload_waiting_requests: Option<u64>,
    /// Share of its KV cache from which a worker is overloaded, above 0 and at most 1 [default: 0.8]
    #[arg(long, value_name = "SHARE", value_parser = values::positive_share)]
    worker_overload_token_usage: Option<f64>,
    /// Refuse requests (503 worker_overload_protection_shed) while every worker is overloaded, instead of sending them to the least
    /// loaded one
    #[arg(long)]
    worker_overload_shed: bool,
    /// Most requests in the prefill phase of each prefill worker; 0 or less is no limit [default: -1]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    prefill_max_inflight_requests_per_worker: Option<i64>,
    /// Most requests that wait for a prefill worker; 0 is nobody [default: 100]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(..=1 << 20))]
    prefill_queue_size: Option<u64>,
    /// Time a request waits for a prefill worker, in seconds [default: 60]
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..=24 * 3600))]
    prefill_queue_timeout_secs: Option<u64>,
}

impl ProtectionFlags {
    /// Refuses flags of the prefill queue that no limit makes use of.
    pub(super) fn check(&self) -> Result<(), CliError> {
        if self.prefill_max_inflight_requests_per_worker.is_some_and(|limit| limit > 0) {
            return Ok(());
        }
        let queue = [
            ("--prefill-queue-size", self.prefill_queue_size.is_some()),
            ("--prefill-queue-timeout-secs", self.prefill_queue_timeout_secs.is_some()),
        ];
        match queue.into_iter().find(|(_, given)| *given) {
            Some((flag, _)) => {
                Err(CliError::conflict(flag, "needs a positive --prefill-max-inflight-requests-per-worker".to_owned()))
            }
            None => Ok(()),
        }
    }

    /// Writes what was given into the start-up policy document.
    pub(super) fn write_to(&self, document: &mut PolicyDocument) {
        let disabled = match (self.disable_worker_overload_protection, self.worker_overload_protection) {
            (true, _) => Some(true),
            (false, true) => Some(false),
            (false, false) => None,
        };
        let overload = OverloadPolicy {
            disabled,
            waiting_requests: self.worker_overload_waiting_requests,
            token_usage: self.worker_overload_token_usage,
            shed: self.worker_overload_shed.then_some(true),
        };
        let admission = PrefillAdmissionPolicy {
            max_inflight_per_worker: self.prefill_max_inflight_requests_per_worker,
            queue_size: self.prefill_queue_size,
            queue_timeout_secs: self.prefill_queue_timeout_secs,
        };
        document.overload = (overload != OverloadPolicy::default()).then_some(overload);
        document.prefill_admission = (admission != PrefillAdmissionPolicy::default()).then_some(admission);
    }
}
