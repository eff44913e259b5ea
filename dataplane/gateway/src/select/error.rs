//! Why nothing was selected, in the documented words.

use std::sync::Arc;

use smg_fleet::policy::PolicyName;
use thiserror::Error;

use crate::fleet::table::{Mismatch, ModelPool};

/// Why no worker was selected.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum SelectError {
    /// A leg has no workers at all.
    #[error("No available servers: No {0} workers available. Please check if {0} servers are configured and healthy.")]
    Empty(&'static str),
    /// A leg has workers, and none of them is available.
    #[error("No available servers: No available {0} workers (all circuits open or unhealthy)")]
    Unavailable(&'static str),
    /// Nobody can answer without a second leg.
    #[error("No prefill servers available")]
    NoPrefillServers,
    /// Workers are available, but none of a prefill's partners is.
    #[error("No available servers: No available decode workers that can pair with an available prefill worker")]
    NoPartner,
    /// A policy would have none of the available workers: a client's strict wish, or a cap that all have reached.
    #[error("No available servers: Policy {policy} failed to select a {leg} worker")]
    Declined {
        /// The policy.
        policy: PolicyName,
        /// The leg it chose for.
        leg: &'static str,
    },
    /// Every prefill worker that could serve runs as many prefill phases as it may.
    #[error("Every prefill worker is at its limit of requests")]
    PrefillFull,
    /// Every worker that could serve is overloaded, and requests are refused then.
    #[error("All workers for model '{model}' are overloaded")]
    Overloaded {
        /// Which model.
        model: Arc<str>,
        /// Seconds after which engines will have reported again.
        retry_after_secs: u32,
    },
    /// No prefill shares a KV transfer protocol with any decode.
    #[error("No prefill/decode pair{} shares a KV transfer protocol (mismatch on {:?}; prefill: {:?}, decode: {:?})", .0.of_model(), .0.components, .0.prefill_keys, .0.decode_keys)]
    Incompatible(Mismatch),
    /// The model's workers speak gRPC, and one leg has none.
    #[error(
        "No {leg} worker is registered for model '{model}' at the moment (its other leg is): the pair is incomplete"
    )]
    Incomplete {
        /// The leg without workers.
        leg: &'static str,
        /// Which model.
        model: Arc<str>,
    },
    /// The model's workers speak gRPC, and those that there are cannot serve now.
    #[error("All workers for model '{0}' are unavailable (unhealthy or circuit breaker open)")]
    AllUnavailable(Arc<str>),
}

impl SelectError {
    /// The same in the words documented for models whose workers speak gRPC.
    #[must_use]
    pub fn over_grpc(self, model: &Arc<str>) -> Self {
        let model = Arc::clone(model);
        match self {
            Self::Empty(leg) => Self::Incomplete { leg, model },
            Self::Unavailable(_) | Self::NoPartner => Self::AllUnavailable(model),
            Self::Incompatible(mismatch) => Self::Incompatible(Mismatch { model: Some(model), ..mismatch }),
            other => other,
        }
    }
}

/// Why a model has no pair to choose.
pub(super) fn why_nothing(pool: &ModelPool, no_prefill: bool) -> SelectError {
    if pool.prefills.is_empty() && pool.decodes.is_empty() && !pool.regulars.is_empty() {
        return SelectError::Unavailable("regular");
    }
    if pool.prefills.is_empty() {
        return SelectError::Empty("prefill");
    }
    if pool.decodes.is_empty() {
        return SelectError::Empty("decode");
    }
    match &pool.mismatch {
        Some(mismatch) => SelectError::Incompatible(mismatch.clone()),
        None if no_prefill => SelectError::Unavailable("prefill"),
        None => SelectError::Unavailable("decode"),
    }
}
