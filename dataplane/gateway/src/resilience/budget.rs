//! The retry budget of one model: retries are a share of the traffic. Pure: time is passed in.
//!
//! Problem: when engines are overloaded every request fails, and with five attempts each the overload is multiplied by five. So a request
//! earns a fraction of a retry ([`Retry::budget_ratio`]), and what was earned is forgotten over [`WINDOW_MS`]. So that retries also work
//! with little traffic, [`Retry::budget_min_per_sec`] retries a second are always earned.
//!
//! Invariants
//! * over any time the retries allowed are at most `ratio · requests + min · seconds` and what one full window had left over;
//! * counting a request costs one relaxed addition: all arithmetic happens when somebody wants to retry.

use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;
use smg_fleet::settings::Retry;

/// What was earned and not used is worth nothing after about this time.
const WINDOW_MS: u64 = 10_000;

/// A retry budget.
#[derive(Debug, Default)]
pub struct Budget {
    /// Requests since the account was last settled.
    requests: AtomicU64,
    account: Mutex<Option<Account>>,
}

#[derive(Debug, Clone, Copy)]
struct Account {
    /// Retries that may be made, fractions included.
    balance: f64,
    settled_ms: u64,
}

impl Budget {
    /// Counts a request, not an attempt.
    pub fn earn(&self) {
        self.requests.fetch_add(1, Ordering::Relaxed);
    }

    /// Takes one retry; false when there is none.
    pub fn spend(&self, now_ms: u64, settings: &Retry) -> bool {
        let mut account = self.account.lock();
        let requests = self.requests.swap(0, Ordering::Relaxed) as f64;
        let minimum = f64::from(settings.budget_min_per_sec) / 1000.0;
        // The first retry of all finds what a whole window earns without traffic, however young the process is.
        let before = account.unwrap_or(Account { balance: minimum * WINDOW_MS as f64, settled_ms: 0 });
        let elapsed = now_ms.saturating_sub(before.settled_ms);
        let counted = elapsed.min(WINDOW_MS) as f64;
        // Of requests that were counted over more than a window, only the window's share.
        let recent = if elapsed > WINDOW_MS { WINDOW_MS as f64 / elapsed as f64 } else { 1.0 };
        let kept = before.balance * (1.0 - counted / WINDOW_MS as f64);
        let balance = kept + requests * recent * settings.budget_ratio + counted * minimum;
        let allowed = balance >= 1.0;
        *account = Some(Account { balance: if allowed { balance - 1.0 } else { balance }, settled_ms: now_ms });
        allowed
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn settings(budget_ratio: f64, budget_min_per_sec: u32) -> Retry {
        Retry {
            attempts: 5,
            initial_backoff_ms: 1,
            max_backoff_ms: 1,
            multiplier: 1.0,
            jitter: 0.0,
            budget_ratio,
            budget_min_per_sec,
        }
    }

    fn spent(budget: &Budget, now_ms: u64, wanted: usize, settings: &Retry) -> usize {
        (0..wanted).filter(|_| budget.spend(now_ms, settings)).count()
    }

    #[test]
    fn an_outage_is_not_multiplied() {
        let (budget, settings) = (Budget::default(), settings(0.2, 0));
        let mut retries = 0;
        // A hundred requests a second for a minute, each of which would like four more attempts.
        for second in 0..60 {
            for _ in 0..100 {
                budget.earn();
                retries += spent(&budget, 20_000 + second * 1000, 4, &settings);
            }
        }
        assert!((1100..=1200).contains(&retries), "{retries}");
    }

    #[test]
    fn little_traffic_may_retry_at_the_minimum() {
        let (budget, settings) = (Budget::default(), settings(0.2, 10));
        assert_eq!(spent(&budget, 50_000, 1000, &settings), 100, "what a window had earned");
        assert_eq!(spent(&Budget::default(), 3, 1000, &settings), 100, "also in a young process");
        assert_eq!(spent(&budget, 51_000, 1000, &settings), 10);
    }

    #[test]
    fn what_was_earned_long_ago_is_forgotten() {
        let (budget, settings) = (Budget::default(), settings(0.5, 0));
        assert!(!budget.spend(0, &settings));
        (0..1000).for_each(|_| budget.earn());
        assert!(budget.spend(1, &settings));
        assert_eq!(spent(&budget, 60_000, 1000, &settings), 0);
        (0..1000).for_each(|_| budget.earn());
        assert_eq!(spent(&budget, 160_000, 1000, &settings), 50, "a tenth of them fell into the last window");
    }

    #[test]
    fn a_budget_of_nothing_allows_no_retry() {
        let (budget, settings) = (Budget::default(), settings(0.0, 0));
        (0..1000).for_each(|_| budget.earn());
        assert_eq!(spent(&budget, 5_000, 10, &settings), 0);
    }

    proptest! {
        #[test]
        fn retries_never_exceed_their_share(
            steps in proptest::collection::vec((0u64..500, 0usize..20, 0usize..40), 1..200),
            ratio in 0.0f64..=1.0,
            minimum in 0u32..20,
        ) {
            let (budget, settings) = (Budget::default(), settings(ratio, minimum));
            let (start, mut now, mut requests, mut retries) = (100_000, 100_000, 0, 0);
            for (pause, arriving, wanted) in steps {
                now += pause;
                (0..arriving).for_each(|_| budget.earn());
                requests += arriving;
                retries += spent(&budget, now, wanted, &settings);
                let seconds = (now - start + WINDOW_MS) as f64 / 1000.0;
                let limit = ratio * requests as f64 + f64::from(minimum) * seconds;
                prop_assert!(retries as f64 <= limit + 1e-6, "{} > {}", retries, limit);
            }
        }
    }
}
