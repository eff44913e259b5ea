//! `power_of_two`: the better of two random candidates.
//!
//! Comparing two random workers avoids the herd that always picking the minimum causes when loads are known late, and
//! still keeps the longest queue short.

use smg_fleet::policy::PolicyName;
use smg_fleet::tuning::LoadMetric;

use crate::wait::{WaitTuning, Waits, expected_waits, least};
use crate::{Candidate, Policy, RequestView, next_word, uniform};

/// The better of two distinct random candidates.
#[derive(Debug, Clone, Copy, Default)]
pub struct PowerOfTwo {
    metric: LoadMetric,
}

impl PowerOfTwo {
    /// Comparing by `metric`.
    pub const fn new(metric: LoadMetric) -> Self {
        Self { metric }
    }
}

impl Policy for PowerOfTwo {
    fn name(&self) -> PolicyName {
        PolicyName::PowerOfTwo
    }

    fn pick(&self, candidates: &[Candidate<'_>], _request: &RequestView<'_>, entropy: u64) -> Option<usize> {
        let (first, second) = match candidates.len() {
            0 => return None,
            1 => return Some(0),
            length => two_distinct(length, entropy),
        };
        let requests = |index: usize| candidates[index].load;
        if self.metric == LoadMetric::LeastRequests {
            let loads: Waits = candidates.iter().map(|candidate| candidate.load as f64).collect();
            return least(&loads, |_| true, entropy);
        }
        let second_is_less = if self.metric == LoadMetric::Requests && requests(first) != requests(second) {
            requests(second) < requests(first)
        } else {
            let waits = expected_waits(&[candidates[first], candidates[second]], &WaitTuning::default());
            waits[1] < waits[0]
        };
        // On equal loads the first stays; both orders of a pair are equally likely, so this is a fair coin.
        Some(if second_is_less { second } else { first })
    }
}

/// An ordered pair of distinct indices below `length` (at least 2), uniform over all such pairs.
pub(crate) fn two_distinct(length: usize, entropy: u64) -> (usize, usize) {
    let first = uniform(entropy, length);
    let second = uniform(next_word(entropy), length - 1);
    (first, if second >= first { second + 1 } else { second })
}
