//! Fleet-wide routing flags: the policy of each leg and the pairing of legs.
//!
//! A policy name falls in one of three classes: available, known but absent (refused by its name), and unknown (a
//! usage error). `bucket` is a third case: it cuts prompts by length and never fits a decode leg, so it is refused
//! there whether it is named for the leg or inherited from `--policy` (SMG docs, Per-Phase Policies).

use clap::Args;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use smg_fleet::PolicyDocument;
use smg_fleet::pairing::PairingMode;
use smg_fleet::policy::PolicyName;

use super::error::CliError;

fn policy_name() -> impl TypedValueParser<Value = PolicyName> {
    let names = PossibleValuesParser::new(PolicyName::ALL.iter().map(|name| name.as_str()));
    names.try_map(|name| PolicyName::from_name(&name).ok_or("unknown policy"))
}

fn pairing_mode() -> impl TypedValueParser<Value = PairingMode> {
    let names = PossibleValuesParser::new(PairingMode::ALL.iter().map(|name| name.as_str()));
    names.try_map(|name| PairingMode::from_name(&name).ok_or("unknown pairing mode"))
}

/// Policies and pairing.
#[derive(Debug, Clone, Default, PartialEq, Args)]
#[command(next_help_heading = "Routing")]
pub struct PolicyFlags {
    /// Policy of every leg that has none of its own: cache_aware, prefix_hash, consistent_hashing, power_of_two, least_load,
    /// round_robin, random, manual, or bucket for prefill [default: cache_aware]
    #[arg(long, value_parser = policy_name(), hide_possible_values = true, value_name = "POLICY")]
    pub policy: Option<PolicyName>,
    /// Policy of the prefill leg [default: --policy]
    #[arg(long, value_parser = policy_name(), hide_possible_values = true, value_name = "POLICY")]
    pub prefill_policy: Option<PolicyName>,
    /// Policy of the decode leg [default: --policy]
    #[arg(long, value_parser = policy_name(), hide_possible_values = true, value_name = "POLICY")]
    pub decode_policy: Option<PolicyName>,
    /// Which prefill and decode workers may be paired [default: lenient]
    #[arg(long, value_parser = pairing_mode(), value_name = "MODE")]
    pub pd_pairing_mode: Option<PairingMode>,
    /// Route to single data-parallel ranks: each rank of an engine is one worker
    #[arg(long)]
    pub dp_aware: bool,
    /// Of the ranks of the engine that the policy chose, take the one with the fewest tokens; needs --dp-aware
    #[arg(long)]
    pub dp_minimum_tokens_scheduler: bool,
    /// Accepted for compatibility: several models and both wires are always served
    #[arg(long)]
    pub enable_igw: bool,
}

impl PolicyFlags {
    /// Writes what was given into the start-up policy document.
    pub(super) fn write_to(&self, document: &mut PolicyDocument) {
        document.policy = self.policy;
        document.prefill_policy = self.prefill_policy;
        document.decode_policy = self.decode_policy;
        document.pairing_mode = self.pd_pairing_mode;
        document.dp_aware = self.dp_aware.then_some(true);
        document.dp_minimum_tokens = self.dp_minimum_tokens_scheduler.then_some(true);
    }

    /// The per-leg flags that were given, for messages.
    pub(super) fn leg_flags(&self) -> Vec<&'static str> {
        let given = [
            ("--prefill-policy", self.prefill_policy.is_some()),
            ("--decode-policy", self.decode_policy.is_some()),
            ("--pd-pairing-mode", self.pd_pairing_mode.is_some()),
        ];
        given.into_iter().filter_map(|(flag, given)| given.then_some(flag)).collect()
    }

    /// Refuses policies that cannot run. `legs` counts the prefill and decode workers of a PD start: a leg's own
    /// `power_of_two` needs two.
    pub(super) fn check(&self, legs: Option<(usize, usize)>) -> Result<(), CliError> {
        // Prefill and decode workers may join at any time, so an inherited policy counts also where none are named.
        let decode_policy = [("--decode-policy", self.decode_policy), ("--policy", self.policy)];
        let decode_policy = decode_policy.into_iter().find_map(|(flag, name)| Some((flag, name?)));
        if let Some((flag, PolicyName::Bucket)) = decode_policy {
            let reason = "bucket cuts prompts by length and cannot choose decode workers; name another --decode-policy";
            return Err(CliError::refused(flag, reason));
        }
        let named = [
            ("--policy", self.policy),
            ("--prefill-policy", self.prefill_policy),
            ("--decode-policy", self.decode_policy),
        ];
        for (flag, name) in named {
            if let Some(name) = name.filter(|name| !name.is_available()) {
                let available = PolicyName::ALL.iter().filter(|name| name.is_available()).map(|name| name.as_str());
                let available = available.collect::<Vec<_>>().join(", ");
                let reason = format!("the policy `{name}` is not available in this version; available are {available}");
                return Err(CliError::refused(flag, reason));
            }
        }
        let Some((prefills, decodes)) = legs.filter(|_| !self.enable_igw && !self.dp_aware) else { return Ok(()) };
        let counted =
            [("--prefill-policy", self.prefill_policy, prefills), ("--decode-policy", self.decode_policy, decodes)];
        for (flag, name, workers) in counted {
            if name == Some(PolicyName::PowerOfTwo) && workers < 2 {
                let reason = format!(
                    "power_of_two needs at least two workers on that leg, {workers} given (not checked with --enable-igw)"
                );
                return Err(CliError::conflict(flag, reason));
            }
        }
        Ok(())
    }
}
