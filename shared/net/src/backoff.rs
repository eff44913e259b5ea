//! How long to wait before trying again. Pure: the random number is passed in.

use std::time::Duration;

/// Exponential backoff with a cap and jitter.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Backoff {
    /// Delay after the first failure.
    pub initial: Duration,
    /// Longest delay before jitter.
    pub max: Duration,
    /// Growth per failure, at least 1.
    pub multiplier: f64,
    /// Share of the delay that varies either way, 0 to 1.
    pub jitter: f64,
}

impl Backoff {
    /// The delay after failure number `failure` (0 = first), varied by `random` in 0..=1.
    pub fn delay(&self, failure: u32, random: f64) -> Duration {
        let grown = self.initial.as_secs_f64() * self.multiplier.powi(i32::try_from(failure).unwrap_or(i32::MAX));
        let capped = grown.min(self.max.as_secs_f64()).max(0.0);
        let varied = capped * (1.0 + self.jitter * (2.0 * random.clamp(0.0, 1.0) - 1.0));
        Duration::try_from_secs_f64(varied).unwrap_or(self.max)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BACKOFF: Backoff =
        Backoff { initial: Duration::from_millis(50), max: Duration::from_secs(30), multiplier: 1.5, jitter: 0.2 };

    #[test]
    fn delays_grow_to_the_cap_and_no_further() {
        assert_eq!(BACKOFF.delay(0, 0.5), Duration::from_millis(50));
        assert_eq!(BACKOFF.delay(1, 0.5), Duration::from_millis(75));
        assert_eq!(BACKOFF.delay(1_000_000, 0.5), Duration::from_secs(30));
    }

    #[test]
    fn jitter_varies_a_delay_by_its_share_either_way() {
        assert_eq!(BACKOFF.delay(0, 0.0), Duration::from_millis(40));
        assert_eq!(BACKOFF.delay(0, 1.0), Duration::from_millis(60));
    }
}
