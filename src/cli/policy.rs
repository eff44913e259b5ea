//! Fleet-wide routing flags: the policy of each leg and the pairing of legs.
//!
//! A policy name falls in one of three classes: available, known but absent (refused by its name), and unknown (a
//! usage error). `bucket` is a third case: it cuts prompts by length and never fits a decode leg, so it is refused
//! there whether it is named for the leg or inherited from `--policy` (SMG docs, Per-Phase Policies).

use clap::{Args, ValueEnum};

use super::error::CliError;

/// Every policy of the documented gateway.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
#[value(rename_all = "snake_case")]
pub enum PolicyName {
    /// Uniform over the available workers.
    Random,
    /// In turn.
    RoundRobin,
    /// The less loaded of two drawn workers.
    PowerOfTwo,
    /// Prompt-prefix affinity. Absent.
    CacheAware,
    /// Shortest expected wait. Absent.
    LeastLoad,
    /// Affinity by a hash of the prompt's head. Absent.
    PrefixHash,
    /// Affinity by a hash of a key. Absent.
    ConsistentHashing,
    /// Sticky keys. Absent.
    Manual,
    /// Prompt-length ranges, prefill only. Absent.
    Bucket,
    /// No choice at all, regular workers only. Absent.
    Passthrough,
}

impl PolicyName {
    /// The name in flags, documents and labels.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Random => "random",
            Self::RoundRobin => "round_robin",
            Self::PowerOfTwo => "power_of_two",
            Self::CacheAware => "cache_aware",
            Self::LeastLoad => "least_load",
            Self::PrefixHash => "prefix_hash",
            Self::ConsistentHashing => "consistent_hashing",
            Self::Manual => "manual",
            Self::Bucket => "bucket",
            Self::Passthrough => "passthrough",
        }
    }

    fn is_available(self) -> bool {
        matches!(self, Self::Random | Self::RoundRobin | Self::PowerOfTwo)
    }
}

/// Which prefill and decode workers may be paired (SMG docs, Pairing Modes).
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
#[value(rename_all = "snake_case")]
pub enum PairingModeName {
    /// Any with any.
    Off,
    /// No fact that both report may differ.
    Lenient,
    /// As lenient, and unknown facts and different versions refuse too.
    Strict,
}

impl PairingModeName {
    /// The name in flags and documents.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Off => "off",
            Self::Lenient => "lenient",
            Self::Strict => "strict",
        }
    }
}

/// What `power_of_two` compares.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
#[value(rename_all = "snake_case")]
pub enum LoadMetricName {
    /// Expected wait of the drawn two.
    ExpectedWait,
    /// Requests in flight of the drawn two.
    Requests,
    /// Requests in flight of all workers.
    LeastRequests,
}

impl LoadMetricName {
    /// The name in flags and documents.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::ExpectedWait => "expected_wait",
            Self::Requests => "requests",
            Self::LeastRequests => "least_requests",
        }
    }
}

/// Policies and pairing.
#[derive(Debug, Clone, Default, PartialEq, Args)]
#[command(next_help_heading = "Routing")]
pub struct PolicyFlags {
    /// Policy of every leg that has none of its own [default: round_robin]
    #[arg(long, value_enum, hide_possible_values = true, value_name = "round_robin|random|power_of_two")]
    pub policy: Option<PolicyName>,
    /// Policy of the prefill leg [default: --policy]
    #[arg(long, value_enum, hide_possible_values = true, value_name = "POLICY")]
    pub prefill_policy: Option<PolicyName>,
    /// Policy of the decode leg [default: --policy]
    #[arg(long, value_enum, hide_possible_values = true, value_name = "POLICY")]
    pub decode_policy: Option<PolicyName>,
    /// What power_of_two compares [default: expected_wait]
    #[arg(long, value_enum, value_name = "METRIC")]
    pub power_of_two_load_metric: Option<LoadMetricName>,
    /// Which prefill and decode workers may be paired [default: lenient]
    #[arg(long, value_enum, value_name = "MODE")]
    pub pd_pairing_mode: Option<PairingModeName>,
    /// Accepted for compatibility: several models and both wires are always served
    #[arg(long)]
    pub enable_igw: bool,
}

impl PolicyFlags {
    /// The per-leg flags that were given, for messages.
    pub(super) fn leg_flags(&self) -> Vec<&'static str> {
        let given = [
            ("--prefill-policy", self.prefill_policy.is_some()),
            ("--decode-policy", self.decode_policy.is_some()),
            ("--pd-pairing-mode", self.pd_pairing_mode.is_some()),
        ];
        given.into_iter().filter_map(|(flag, given)| given.then_some(flag)).collect()
    }

    /// Refuses policies that cannot run. `prefills` and `decodes` count the start-up workers of a PD start, which an
    /// explicit `power_of_two` needs two of.
    pub(super) fn check(&self, legs: Option<(usize, usize)>) -> Result<(), CliError> {
        let decode_policy = [("--decode-policy", self.decode_policy), ("--policy", self.policy)];
        let decode_policy = decode_policy.into_iter().find_map(|(flag, name)| Some((flag, name?)));
        if let (Some((flag, PolicyName::Bucket)), Some(_)) | (Some((flag @ "--decode-policy", PolicyName::Bucket)), _) =
            (decode_policy, legs)
        {
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
                let reason = format!(
                    "the policy `{}` is not available in this version; available are round_robin, random, power_of_two",
                    name.as_str()
                );
                return Err(CliError::refused(flag, reason));
            }
        }
        let Some((prefills, decodes)) = legs.filter(|_| !self.enable_igw) else { return Ok(()) };
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
