//! `random`: uniform over the candidates.

use smg_fleet::policy::PolicyName;

use crate::{Candidate, Policy, RequestView, uniform};

/// Uniform choice.
#[derive(Debug, Clone, Copy, Default)]
pub struct Random;

impl Policy for Random {
    fn name(&self) -> PolicyName {
        PolicyName::Random
    }

    fn pick(&self, candidates: &[Candidate<'_>], _request: &RequestView<'_>, entropy: u64) -> Option<usize> {
        (!candidates.is_empty()).then(|| uniform(entropy, candidates.len()))
    }
}
