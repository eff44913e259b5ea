//! The circuit breaker of one worker. Pure: time is passed in.
//!
//! ```text
//!           failure_threshold failures in a row,            timeout over, or
//!           none further apart than the window              active probes succeed again
//!  closed ─────────────────────────────────────────► open ─────────────────────────────► half-open
//!    ▲                                                 ▲                                     │ │
//!    │                                                 └───────────── one failure ───────────┘ │
//!    └───────────────────────────── success_threshold successes ──────────────────────────────┘
//! ```
//!
//! Invariants
//! * half-open admits at most `success_threshold` requests at a time, so that a recovering worker is not run over;
//! * every admitted request ends in exactly one [`Verdict`]; a cancelled one counts as neither success nor failure;
//! * an outcome of a request admitted before the breaker opened does not close it.

use smg_fleet::settings::Breaker as Settings;

/// How a request ended for the worker that ran it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// It served.
    Success,
    /// It failed.
    Failure,
    /// It says nothing about the worker: cancelled by the client, or refused for capacity.
    Neutral,
}

/// The state shown in metrics.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Phase {
    Closed,
    Open,
    HalfOpen,
}

impl Phase {
    /// The label used in metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            Phase::Closed => "closed",
            Phase::Open => "open",
            Phase::HalfOpen => "half_open",
        }
    }

    /// The value of the state gauge.
    pub fn gauge(self) -> i64 {
        match self {
            Phase::Closed => 0,
            Phase::Open => 1,
            Phase::HalfOpen => 2,
        }
    }
}

/// Proof of admission. `trial` holds the half-open episode it belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Admission {
    trial: Option<u64>,
}

#[derive(Debug, Clone, Copy)]
enum State {
    Closed,
    Open { until_ms: u64 },
    HalfOpen { episode: u64, in_flight: u32, successes: u32 },
}

/// A circuit breaker.
#[derive(Debug)]
pub struct Breaker {
    state: State,
    failures: u32,
    successes: u32,
    last_failure_ms: u64,
    episodes: u64,
}

impl Default for Breaker {
    fn default() -> Self {
        Self { state: State::Closed, failures: 0, successes: 0, last_failure_ms: 0, episodes: 0 }
    }
}

impl Breaker {
    /// The current phase.
    pub fn phase(&self) -> Phase {
        match self.state {
            State::Closed => Phase::Closed,
            State::Open { .. } => Phase::Open,
            State::HalfOpen { .. } => Phase::HalfOpen,
        }
    }

    /// Failures and successes in a row.
    pub fn streaks(&self) -> (u32, u32) {
        (self.failures, self.successes)
    }

    /// Whether [`Breaker::admit`] would admit a request.
    pub fn is_available(&self, now_ms: u64, settings: &Settings) -> bool {
        match self.state {
            _ if settings.is_disabled() => true,
            State::Closed => true,
            State::Open { until_ms } => now_ms >= until_ms,
            State::HalfOpen { in_flight, .. } => in_flight < settings.success_threshold,
        }
    }

    /// Admits a request, if the breaker lets one through.
    pub fn admit(&mut self, now_ms: u64, settings: &Settings) -> Option<Admission> {
        // Switched off while it was open: it must not go on refusing.
        if settings.is_disabled() {
            self.state = State::Closed;
        }
        if let State::Open { until_ms } = self.state
            && now_ms >= until_ms
        {
            self.half_open();
        }
        match &mut self.state {
            State::Closed => Some(Admission { trial: None }),
            State::Open { .. } => None,
            State::HalfOpen { episode, in_flight, .. } => {
                if *in_flight >= settings.success_threshold {
                    return None;
                }
                *in_flight += 1;
                Some(Admission { trial: Some(*episode) })
            }
        }
    }

    /// Records how an admitted request ended. Returns the transition it caused, if any.
    pub fn record(
        &mut self,
        admission: Admission,
        verdict: Verdict,
        now_ms: u64,
        settings: &Settings,
    ) -> Option<(Phase, Phase)> {
        let before = self.phase();
        match verdict {
            Verdict::Success => (self.failures, self.successes) = (0, self.successes.saturating_add(1)),
            Verdict::Failure => {
                let far_apart = now_ms.saturating_sub(self.last_failure_ms) > settings.window_secs.saturating_mul(1000);
                self.failures = if far_apart { 1 } else { self.failures.saturating_add(1) };
                self.successes = 0;
                self.last_failure_ms = now_ms;
            }
            Verdict::Neutral => {}
        }
        match &mut self.state {
            State::Closed => {
                if verdict == Verdict::Failure && settings.failure_threshold.is_some_and(|limit| self.failures >= limit)
                {
                    self.open(now_ms, settings);
                }
            }
            State::HalfOpen { episode, in_flight, successes } if admission.trial == Some(*episode) => {
                *in_flight = in_flight.saturating_sub(1);
                match verdict {
                    Verdict::Failure => self.open(now_ms, settings),
                    Verdict::Success => {
                        *successes += 1;
                        if *successes >= settings.success_threshold {
                            self.state = State::Closed;
                        }
                    }
                    Verdict::Neutral => {}
                }
            }
            // A straggler of an earlier phase.
            State::HalfOpen { .. } | State::Open { .. } => {}
        }
        let after = self.phase();
        (before != after).then_some((before, after))
    }

    /// Active probes succeed again: an open breaker tries at once, a closed one forgets its failures.
    pub fn health_returned(&mut self) -> Option<(Phase, Phase)> {
        match self.state {
            State::Open { .. } => {
                self.half_open();
                Some((Phase::Open, Phase::HalfOpen))
            }
            State::Closed => {
                self.failures = 0;
                None
            }
            State::HalfOpen { .. } => None,
        }
    }

    fn open(&mut self, now_ms: u64, settings: &Settings) {
        self.state = State::Open { until_ms: now_ms.saturating_add(settings.timeout_secs.saturating_mul(1000)) };
    }

    fn half_open(&mut self) {
        self.episodes += 1;
        self.state = State::HalfOpen { episode: self.episodes, in_flight: 0, successes: 0 };
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SETTINGS: Settings =
        Settings { failure_threshold: Some(3), success_threshold: 2, timeout_secs: 60, window_secs: 120 };

    fn run(breaker: &mut Breaker, now_ms: u64, verdict: Verdict) {
        let admission = breaker.admit(now_ms, &SETTINGS).unwrap();
        breaker.record(admission, verdict, now_ms, &SETTINGS);
    }

    fn opened() -> Breaker {
        let mut breaker = Breaker::default();
        (0..3).for_each(|_| run(&mut breaker, 0, Verdict::Failure));
        breaker
    }

    #[test]
    fn failures_in_a_row_open_it_and_a_success_starts_the_count_anew() {
        let mut breaker = Breaker::default();
        for verdict in [Verdict::Failure, Verdict::Failure, Verdict::Success, Verdict::Failure, Verdict::Failure] {
            run(&mut breaker, 0, verdict);
        }
        assert_eq!(breaker.phase(), Phase::Closed);
        run(&mut breaker, 0, Verdict::Failure);
        assert_eq!(breaker.phase(), Phase::Open);
        assert!(breaker.admit(59_999, &SETTINGS).is_none());
    }

    #[test]
    fn failures_further_apart_than_the_window_do_not_add_up() {
        let mut breaker = Breaker::default();
        (0..10).for_each(|n| run(&mut breaker, n * 120_001, Verdict::Failure));
        assert_eq!(breaker.phase(), Phase::Closed);
    }

    #[test]
    fn half_open_admits_a_bounded_number_of_trials() {
        let mut breaker = opened();
        let first = breaker.admit(60_000, &SETTINGS).unwrap();
        let second = breaker.admit(60_000, &SETTINGS).unwrap();
        assert!(!breaker.is_available(60_000, &SETTINGS) && breaker.admit(60_000, &SETTINGS).is_none());
        breaker.record(first, Verdict::Success, 60_001, &SETTINGS);
        assert_eq!(breaker.phase(), Phase::HalfOpen);
        breaker.record(second, Verdict::Success, 60_001, &SETTINGS);
        assert_eq!(breaker.phase(), Phase::Closed);
    }

    #[test]
    fn one_failed_trial_opens_it_again_and_a_cancelled_one_frees_its_place() {
        let mut breaker = opened();
        let first = breaker.admit(60_000, &SETTINGS).unwrap();
        let second = breaker.admit(60_000, &SETTINGS).unwrap();
        breaker.record(first, Verdict::Neutral, 60_001, &SETTINGS);
        assert!(breaker.is_available(60_001, &SETTINGS));
        breaker.record(second, Verdict::Failure, 60_001, &SETTINGS);
        assert_eq!(breaker.phase(), Phase::Open);
        assert!(!breaker.is_available(120_000, &SETTINGS) && breaker.is_available(120_001, &SETTINGS));
    }

    #[test]
    fn a_straggler_admitted_before_it_opened_neither_closes_nor_reopens_it() {
        let mut breaker = Breaker::default();
        let straggler = breaker.admit(0, &SETTINGS).unwrap();
        (0..3).for_each(|_| run(&mut breaker, 0, Verdict::Failure));
        let _trial = breaker.admit(60_000, &SETTINGS).unwrap();
        breaker.record(straggler, Verdict::Success, 60_001, &SETTINGS);
        assert_eq!(breaker.phase(), Phase::HalfOpen);
        breaker.record(straggler, Verdict::Failure, 60_001, &SETTINGS);
        assert_eq!(breaker.phase(), Phase::HalfOpen);
    }

    #[test]
    fn returning_health_lets_an_open_breaker_try_at_once() {
        let mut breaker = opened();
        assert_eq!(breaker.health_returned(), Some((Phase::Open, Phase::HalfOpen)));
        assert!(breaker.admit(1, &SETTINGS).is_some());
    }

    #[test]
    fn a_disabled_breaker_never_opens() {
        let settings = Settings { failure_threshold: None, ..SETTINGS };
        let mut breaker = Breaker::default();
        for _ in 0..1000 {
            let admission = breaker.admit(0, &settings).unwrap();
            breaker.record(admission, Verdict::Failure, 0, &settings);
        }
        assert_eq!(breaker.phase(), Phase::Closed);
    }

    #[test]
    fn a_breaker_that_is_switched_off_while_open_admits_everything() {
        let settings = Settings { failure_threshold: None, ..SETTINGS };
        let mut breaker = opened();
        assert!(!breaker.is_available(0, &SETTINGS) && breaker.is_available(0, &settings));
        assert!((0..10).all(|_| breaker.admit(0, &settings).is_some()));
        assert_eq!(breaker.phase(), Phase::Closed);
    }

    proptest! {
        #[test]
        fn trials_in_flight_never_exceed_the_threshold_and_none_is_lost(
            steps in proptest::collection::vec((0u8..4, 0u64..40_000), 1..200),
        ) {
            let mut breaker = Breaker::default();
            let mut running: Vec<Admission> = Vec::new();
            let mut now = 0;
            for (step, wait) in steps {
                now += wait;
                match step {
                    0 => running.extend(breaker.admit(now, &SETTINGS)),
                    verdict => if let Some(admission) = running.pop() {
                        let verdict = [Verdict::Success, Verdict::Failure, Verdict::Neutral][verdict as usize - 1];
                        breaker.record(admission, verdict, now, &SETTINGS);
                    }
                }
                if let State::HalfOpen { episode, in_flight, .. } = breaker.state {
                    let mine = running.iter().filter(|admission| admission.trial == Some(episode)).count();
                    prop_assert_eq!(in_flight as usize, mine);
                    prop_assert!(in_flight <= SETTINGS.success_threshold);
                }
            }
        }
    }
}
