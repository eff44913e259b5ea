//! The open loop: requests that are sent when their time has come, whatever became of those before.
//!
//! Latencies of tenths of a millisecond need a generator that is punctual to hundredths. tokio's timers count whole milliseconds, so
//! every connection has a thread of its own, which takes the next moment, sleeps until it, sends, and waits for the answer. A thread
//! that runs late, because all were waiting or the machine was busy, does not shift anything: a request is timed from the moment
//! that it was meant for. How late they were is reported, since it is part of every latency.

use std::num::NonZeroU64;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Barrier, OnceLock};
use std::time::{Duration, Instant};

use crate::Result;
use crate::load::{Progress, Seen, Shot, connect, fire, merge};

/// Threads, each with a connection: many times as many as requests are under way at a time.
const CONNECTIONS: usize = 32;
/// Time between the last connection and the first request.
const HEAD_START: Duration = Duration::from_millis(20);

/// `rate` requests a second for `duration`, each timed from when it was meant to be sent.
///
/// # Errors
/// A connection cannot be opened, a request was not served, or none was for long. Threads that wait then are left behind.
pub async fn open(shot: &Shot, rate: f64, duration: Duration) -> Result<Seen> {
    let plan = Arc::new(Plan {
        shot: shot.clone(),
        rate,
        count: (rate * duration.as_secs_f64()) as u64,
        next: AtomicU64::new(0),
        connected: Barrier::new(CONNECTIONS),
        started: OnceLock::new(),
        progress: Progress::default(),
    });
    let threads = (0..CONNECTIONS).map(|_| {
        let plan = Arc::clone(&plan);
        tokio::task::spawn_blocking(move || plan.run())
    });
    let threads: Vec<_> = threads.collect();
    plan.progress.watch(merge(threads)).await
}

/// What the threads share.
struct Plan {
    shot: Shot,
    rate: f64,
    count: u64,
    next: AtomicU64,
    connected: Barrier,
    started: OnceLock<Instant>,
    progress: Progress,
}

impl Plan {
    fn run(&self) -> Result<Seen> {
        // Without timers: the runtime only waits for the socket, and the kernel wakes it at once.
        let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build();
        let connection = runtime.map_err(Into::into).and_then(|runtime| {
            rustix::thread::set_current_timer_slack(NonZeroU64::new(1))?;
            let sender = runtime.block_on(connect(&self.shot.address))?;
            Ok::<_, Box<dyn std::error::Error + Send + Sync>>((runtime, sender))
        });
        // A thread that failed lets the others go on.
        self.connected.wait();
        let (runtime, mut sender) = connection?;
        let started = *self.started.get_or_init(|| Instant::now() + HEAD_START);
        let mut seen = Seen::default();
        loop {
            let index = self.next.fetch_add(1, Ordering::Relaxed);
            if index >= self.count {
                seen.wall = started.elapsed();
                return Ok(seen);
            }
            let intended = started + Duration::from_secs_f64(index as f64 / self.rate);
            std::thread::sleep(intended.saturating_duration_since(Instant::now()));
            let late = intended.elapsed();
            let timing = runtime.block_on(fire(&mut sender, &self.shot, None))?;
            self.progress.made();
            seen.requests += 1;
            seen.tokens += timing.tokens;
            seen.whole.push(timing.whole + late);
            seen.first.push(timing.first + late);
            seen.late.push(late);
        }
    }
}
