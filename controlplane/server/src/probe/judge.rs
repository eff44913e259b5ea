//! What probes mean. Pure: no clock, no I/O.
//!
//! The thresholds are those of the documented system: a ready worker leaves rotation after `failure_threshold` failures in a row, counts as
//! failed after three times as many more, and returns after `success_threshold` successes in a row from either.

use std::collections::BTreeMap;
use std::time::Duration;

use smg_fleet::settings::Probe;
use smg_fleet::{Health, WorkerId};

/// The streak of one worker.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Judge {
    /// The committed verdict that the streaks are counted under.
    under: Option<Health>,
    failures: u32,
    successes: u32,
}

impl Judge {
    /// Takes in a probe of a worker whose committed health is `current`. Returns the verdict that should be committed now; it is returned
    /// again with each further probe until it has been.
    pub fn observe(&mut self, current: Health, succeeded: bool, probe: &Probe) -> Option<Health> {
        if self.under != Some(current) {
            *self = Self { under: Some(current), ..Self::default() };
        }
        if succeeded {
            self.failures = 0;
            self.successes = self.successes.saturating_add(1);
        } else {
            self.successes = 0;
            self.failures = self.failures.saturating_add(1);
        }
        match current {
            Health::Ready if self.failures >= probe.failure_threshold => Some(Health::NotReady),
            Health::NotReady if self.failures >= probe.failure_threshold.saturating_mul(3) => Some(Health::Failed),
            Health::NotReady | Health::Failed if self.successes >= probe.success_threshold => Some(Health::Ready),
            _ => None,
        }
    }
}

/// Smallest fleet that can panic: in a smaller one, most of it failing at once is nothing remarkable.
const SMALLEST_PANIC: usize = 4;
/// Ejections within this time count as one event.
const PANIC_WINDOW: Duration = Duration::from_secs(30);

/// The panic rule: when more than half of the fleet would leave rotation within half a minute, the prober is more likely broken than the
/// fleet, and nobody is ejected. Gateways still judge for their own traffic.
///
/// Times are durations since any fixed moment.
#[derive(Debug, Clone, Default)]
pub struct PanicRule {
    /// When each worker was last ejected, or would have been.
    ejections: BTreeMap<WorkerId, Duration>,
}

impl PanicRule {
    /// Whether `worker`, one of `registered`, may be ejected at `now`. Workers are probed every `interval`; two ejections that far apart may
    /// still be one event.
    pub fn allows(&mut self, worker: WorkerId, registered: usize, now: Duration, interval: Duration) -> bool {
        let window = PANIC_WINDOW.max(interval);
        self.ejections.retain(|_, at| now.saturating_sub(*at) <= window);
        self.ejections.insert(worker, now);
        registered < SMALLEST_PANIC || self.ejections.len() * 2 <= registered
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use smg_fleet::Settings;
    use uuid::Uuid;

    use super::*;

    fn probe() -> Probe {
        Settings::resolve(None, None).probe
    }

    /// Runs probes and commits each verdict at once.
    fn run(start: Health, outcomes: impl IntoIterator<Item = bool>) -> Vec<Health> {
        let (mut judge, mut current) = (Judge::default(), start);
        let mut seen = Vec::new();
        for succeeded in outcomes {
            current = judge.observe(current, succeeded, &probe()).unwrap_or(current);
            seen.push(current);
        }
        seen
    }

    #[test]
    fn the_documented_thresholds_hold() {
        use Health::{Failed, NotReady, Ready};
        assert_eq!(run(Ready, [false, false, false]), [Ready, Ready, NotReady]);
        assert_eq!(run(Ready, [false, false, true, false, false]), [Ready; 5], "a success ends the streak");
        let mut expected = vec![NotReady; 8];
        expected.push(Failed);
        assert_eq!(run(NotReady, [false; 9]), expected, "three times as many, counted anew");
        assert_eq!(run(NotReady, [true, true]), [NotReady, Ready]);
        assert_eq!(run(Failed, [true, false, true, true]), [Failed, Failed, Failed, Ready]);
        assert_eq!(run(Failed, [false; 40]), [Failed; 40]);
    }

    #[test]
    fn a_verdict_that_was_not_committed_is_given_again() {
        let mut judge = Judge::default();
        let verdicts: Vec<_> = (0..5).map(|_| judge.observe(Health::Ready, false, &probe())).collect();
        assert_eq!(verdicts, [None, None, Some(Health::NotReady), Some(Health::NotReady), Some(Health::NotReady)]);
    }

    proptest! {
        #[test]
        fn health_changes_only_after_a_streak(outcomes in proptest::collection::vec(any::<bool>(), 0..200)) {
            let seen = run(Health::Ready, outcomes.iter().copied());
            let before = std::iter::once(Health::Ready).chain(seen.iter().copied());
            for (index, (before, after)) in before.zip(seen.iter().copied()).enumerate() {
                if before == after {
                    continue;
                }
                let streak = outcomes[..=index].iter().rev().take_while(|outcome| **outcome == outcomes[index]).count();
                let needed = match (before, after) {
                    (Health::Ready, Health::NotReady) => 3,
                    (Health::NotReady, Health::Failed) => 9,
                    (_, Health::Ready) => 2,
                    other => return Err(TestCaseError::fail(format!("{other:?}"))),
                };
                prop_assert!(streak >= needed);
            }
        }
    }

    fn id(n: usize) -> WorkerId {
        WorkerId(Uuid::from_u128(n as u128))
    }

    #[test]
    fn when_most_of_the_fleet_fails_at_once_only_half_of_it_is_ejected() {
        let mut rule = PanicRule::default();
        let allowed = (0..10).filter(|n| rule.allows(id(*n), 10, Duration::from_secs(1), Duration::ZERO)).count();
        assert_eq!(allowed, 5);
        assert!(!rule.allows(id(9), 10, Duration::from_secs(20), Duration::ZERO), "and it holds while they fail");
    }

    #[test]
    fn failures_far_apart_are_no_panic_and_a_small_fleet_never_panics() {
        let mut rule = PanicRule::default();
        for n in 0..10 {
            assert!(rule.allows(id(n), 10, Duration::from_secs(31 * n as u64), Duration::from_secs(1)));
        }
        let mut rule = PanicRule::default();
        assert!((0..3).all(|n| rule.allows(id(n), 3, Duration::ZERO, Duration::ZERO)));
    }
}
