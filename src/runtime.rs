//! What the tokio runtime tells about itself (SMG metrics reference, `smg_tokio_*`).
//!
//! Counts are read when somebody scrapes. How late timers fire and how busy the threads are needs watching: one task sleeps and looks.
//! A timer that fires late means that every request waited as long: something blocks the threads, or they have too much to do.

use std::sync::Arc;
use std::time::Duration;

use smg_telemetry::Metrics;
use tokio::runtime::{Handle, RuntimeMetrics};
use tokio::time::{Instant, sleep_until};

/// How often it is looked.
const PERIOD: Duration = Duration::from_secs(1);
/// A timer that fires later than this is a stall.
const STALL: Duration = Duration::from_millis(100);

/// Shows what can be read at any moment.
pub fn show(metrics: &Metrics) {
    let runtime = Handle::current().metrics();
    let count = |number: usize| i64::try_from(number).unwrap_or(i64::MAX);
    metrics.tokio_workers.set(count(runtime.num_workers()));
    metrics.tokio_alive_tasks.set(count(runtime.num_alive_tasks()));
    metrics.tokio_global_queue_depth.set(count(runtime.global_queue_depth()));
    let parks: u64 = (0..runtime.num_workers()).map(|worker| runtime.worker_park_count(worker)).sum();
    metrics.tokio_worker_parks.inc_by(parks.saturating_sub(metrics.tokio_worker_parks.get()));
}

/// Measures until the process ends.
pub async fn measure(metrics: Arc<Metrics>) {
    let runtime = Handle::current().metrics();
    let threads = runtime.num_workers().max(1) as f64;
    let mut busy = busy_time(&runtime);
    let mut begun = Instant::now();
    loop {
        let due = begun + PERIOD;
        sleep_until(due).await;
        let now = Instant::now();
        let late = now.saturating_duration_since(due);
        metrics.tokio_event_loop_delay.observe(late.as_secs_f64());
        if late > STALL {
            metrics.tokio_event_loop_stalls.inc();
        }
        let so_far = busy_time(&runtime);
        let share = so_far.saturating_sub(busy).as_secs_f64() / (now - begun).as_secs_f64() / threads;
        metrics.tokio_worker_busy_ratio.set(share.clamp(0.0, 1.0));
        (busy, begun) = (so_far, now);
    }
}

fn busy_time(runtime: &RuntimeMetrics) -> Duration {
    (0..runtime.num_workers()).map(|worker| runtime.worker_total_busy_duration(worker)).sum()
}
