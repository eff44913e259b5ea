//! How much of this gateway's shares of decode workers counts right now.
//!
//! One for all workers of a gateway. It is read with every claim, by the clock that goes on while the machine sleeps: a process that was
//! frozen for longer than its lease must not serve from it in the moment before some other thread has noticed.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use smg_admission::Standing;
use tokio::sync::Notify;

use crate::clock::since_boot;

/// The lease of a gateway.
#[derive(Debug)]
pub struct Lease {
    /// Nobody shares the workers with this gateway: every window is its own, for ever.
    alone: bool,
    /// When the short lease ends, in nanoseconds of the machine's clock; 0 = there is none.
    float_end: AtomicU64,
    /// When the long one ends.
    anchor_end: AtomicU64,
    /// Whether anchored slots are kept when even their lease is over.
    hold: AtomicBool,
    /// How often the short lease had ended before it was renewed.
    lapses: AtomicU64,
    /// The control plane was looked for and not found.
    away: AtomicBool,
    /// Rung when something is to be reported at once.
    bell: Notify,
}

impl Default for Lease {
    /// That of a gateway which is alone.
    fn default() -> Self {
        Self::new(true)
    }
}

impl Lease {
    /// A lease. Unless the gateway is `alone`, nothing counts until it is renewed.
    pub fn new(alone: bool) -> Self {
        Self {
            alone,
            float_end: AtomicU64::new(0),
            anchor_end: AtomicU64::new(0),
            hold: AtomicBool::new(false),
            lapses: AtomicU64::new(0),
            away: AtomicBool::new(false),
            bell: Notify::new(),
        }
    }

    /// Whether every window is this gateway's own.
    pub fn is_alone(&self) -> bool {
        self.alone
    }

    /// How much counts now.
    pub fn standing(&self) -> Standing {
        if self.alone {
            return Standing::Whole;
        }
        let now = nanos(since_boot());
        if now < self.float_end.load(Ordering::Acquire) {
            return Standing::Whole;
        }
        let anchor_end = self.anchor_end.load(Ordering::Acquire);
        let holds = anchor_end > 0 && self.hold.load(Ordering::Relaxed);
        if now < anchor_end || holds { Standing::Anchored } else { Standing::Nothing }
    }

    /// The control plane was heard: the leases last until then. Called by one thread only, after the windows know their shares.
    pub fn renew(&self, [float, anchor]: [Duration; 2]) {
        let before = self.float_end.load(Ordering::Acquire);
        if before > 0 && nanos(since_boot()) >= before {
            self.lapses.fetch_add(1, Ordering::AcqRel);
        }
        self.anchor_end.fetch_max(nanos(anchor), Ordering::AcqRel);
        self.float_end.fetch_max(nanos(float), Ordering::AcqRel);
        self.away.store(false, Ordering::Release);
    }

    /// How often the short lease had ended before it was renewed. What was claimed before and not used then counts for nothing.
    pub fn lapses(&self) -> u64 {
        self.lapses.load(Ordering::Acquire)
    }

    /// Whether anchored slots are kept when even their lease is over.
    pub fn set_hold(&self, hold: bool) {
        self.hold.store(hold, Ordering::Relaxed);
    }

    /// The control plane cannot be found.
    pub fn note_away(&self) {
        self.away.store(true, Ordering::Release);
    }

    /// Whether there is nothing to wait for: this gateway holds nothing, and nobody is there who could give it anything.
    pub fn is_hopeless(&self) -> bool {
        self.away.load(Ordering::Acquire) && self.standing() == Standing::Nothing
    }

    /// Something is to be reported at once.
    pub fn ring(&self) {
        if !self.alone {
            self.bell.notify_one();
        }
    }

    /// Waits until something is to be reported.
    pub async fn rung(&self) {
        self.bell.notified().await;
    }
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn in_secs(secs: u64) -> Duration {
        since_boot() + Duration::from_secs(secs)
    }

    #[test]
    fn whoever_is_alone_needs_no_lease() {
        let lease = Lease::default();
        assert_eq!((lease.standing(), lease.is_hopeless()), (Standing::Whole, false));
    }

    #[test]
    fn nothing_counts_before_the_first_renewal_and_then_as_long_as_the_leases_last() {
        let lease = Lease::new(false);
        assert_eq!(lease.standing(), Standing::Nothing);
        assert!(!lease.is_hopeless(), "it may be found yet");
        lease.note_away();
        assert!(lease.is_hopeless());
        lease.renew([Duration::from_nanos(1), Duration::from_nanos(2)]);
        assert_eq!(lease.standing(), Standing::Nothing);
        assert!(!lease.is_hopeless(), "it was found");
        lease.set_hold(true);
        assert_eq!(lease.standing(), Standing::Anchored);
        lease.set_hold(false);
        lease.renew([Duration::from_nanos(1), in_secs(60)]);
        assert_eq!((lease.standing(), lease.lapses()), (Standing::Anchored, 1));
        lease.renew([in_secs(60), in_secs(60)]);
        assert_eq!((lease.standing(), lease.lapses()), (Standing::Whole, 2));
        lease.renew([in_secs(90), in_secs(90)]);
        assert_eq!(lease.lapses(), 2, "it had not ended");
    }
}
