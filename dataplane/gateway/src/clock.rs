//! The gateway's monotonic clock, in milliseconds since its start.

use std::time::Instant;

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
