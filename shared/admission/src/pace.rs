//! When the leader closes a round.
//!
//! A round with news is an entry of the replicated log, so rounds come at a steady rate. A gateway that needs slots of others would wait for
//! two of them: for the one that tells the others to let go, and for the one that takes in that they have. So a round may come early when
//! somebody asks ([`crate::Leader::hear`]), as soon as what is said together has had time to arrive.
//!
//! Invariants
//! * over any time there are at most [`AHEAD`] rounds with news more than the steady rate gives;
//! * nobody waits longer than for the next round of the steady rate.

use std::time::Duration;

/// Rounds that may come early before as many steady ones have had no news.
pub const AHEAD: u32 = 4;

/// Decides when the next round is due. All times are of one clock.
#[derive(Debug, Clone, Copy)]
pub struct Pace {
    every: Duration,
    /// When the last round was opened.
    last: Duration,
    /// The time that rounds with news have used up, if each had taken its turn.
    used: Duration,
}

impl Pace {
    /// A round `every` so long, the first at once.
    pub fn new(every: Duration, now: Duration) -> Self {
        Self { every, last: now.saturating_sub(every), used: now }
    }

    /// When the next round is due; `asked` is when somebody asked for an early one.
    pub fn due(&self, asked: Option<Duration>) -> Duration {
        let steady = self.last + self.every;
        let Some(asked) = asked else { return steady };
        let gathered = asked.max(self.last) + self.every / 10;
        steady.min(gathered.max(self.used.saturating_sub(self.every * (AHEAD - 1))))
    }

    /// A round was opened at `now`; `news`: it became an entry of the log.
    pub fn opened(&mut self, now: Duration, news: bool) {
        self.last = now;
        if news {
            self.used = self.used.max(now) + self.every;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const EVERY: Duration = Duration::from_millis(100);

    fn millis(millis: u64) -> Duration {
        Duration::from_millis(millis)
    }

    #[test]
    fn rounds_come_steadily_and_early_when_somebody_asks() {
        let mut pace = Pace::new(EVERY, millis(1_000));
        assert_eq!(pace.due(None), millis(1_000));
        pace.opened(millis(1_000), true);
        assert_eq!(pace.due(None), millis(1_100));
        assert_eq!(pace.due(Some(millis(1_030))), millis(1_040), "a moment for what is said together");
        assert_eq!(pace.due(Some(millis(990))), millis(1_010), "who asked while a round was under way");
        assert_eq!(pace.due(Some(millis(1_095))), millis(1_100), "never later than the steady one");
    }

    #[test]
    fn over_any_time_there_are_only_few_more_rounds_than_the_steady_rate_gives() {
        let mut pace = Pace::new(EVERY, Duration::ZERO);
        let mut rounds = 0;
        let mut now = Duration::ZERO;
        while now < Duration::from_secs(10) {
            // Somebody asks all the time.
            now = pace.due(Some(now));
            pace.opened(now, true);
            rounds += 1;
        }
        assert!((100..=100 + AHEAD + 1).contains(&rounds), "{rounds}");
    }

    #[test]
    fn rounds_without_news_save_early_ones_up() {
        let mut pace = Pace::new(EVERY, Duration::ZERO);
        let mut early = |from: u64| {
            let mut now = millis(from);
            pace.opened(now, false);
            let mut count = 0;
            while pace.due(Some(now)) < pace.due(None) {
                now = pace.due(Some(now));
                pace.opened(now, true);
                count += 1;
            }
            count
        };
        let first = early(1_000);
        assert!((2..=AHEAD + 1).contains(&first), "{first}");
        assert_eq!(early(10_000), first);
    }
}
