//! The gateway's monotonic clock, in milliseconds since its start; and the machine's, which counts while the machine sleeps.

use std::time::{Duration, Instant};

/// A monotonic clock. Copies agree.
#[derive(Debug, Clone, Copy)]
pub struct Clock {
    start: Instant,
}

impl Clock {
    /// Starts at 0.
    pub fn start() -> Self {
        Self { start: Instant::now() }
    }

    /// Milliseconds since the start.
    pub fn now_ms(&self) -> u64 {
        u64::try_from(self.start.elapsed().as_millis()).unwrap_or(u64::MAX)
    }
}

/// Time since the machine was started, the time that it slept included: what a lease is measured by. Another process of the same machine, or
/// a later one, reads the same clock.
pub fn since_boot() -> Duration {
    #[cfg(any(target_os = "linux", target_os = "android"))]
    let clock = rustix::time::ClockId::Boottime;
    #[cfg(not(any(target_os = "linux", target_os = "android")))]
    let clock = rustix::time::ClockId::Monotonic;
    let time = rustix::time::clock_gettime(clock);
    Duration::new(u64::try_from(time.tv_sec).unwrap_or(0), u32::try_from(time.tv_nsec).unwrap_or(0))
}
