//! How many requests this gateway serves at once, and how many wait.
//!
//! A request is admitted when fewer than the limit are being served and, if a rate is set, the rate allows one more; it counts until its
//! response has ended, streams included. Otherwise it waits in a bounded queue, first come first served, for a bounded time.
//!
//! Uploads are not counted: a permit is taken once the body is there, so a client that sends slowly keeps nobody out. What a full queue
//! would refuse anyway is refused before its body is read.
//!
//! Invariant: a permit and a place in the queue are released whatever way their holder ends.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::Body;
use bytes::Bytes;
use http::Response;
use http_body::{Frame, SizeHint};
use parking_lot::Mutex;
use prometheus::IntGauge;
use smg_telemetry::Metrics;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, sleep_until, timeout_at};

/// How many requests may be served at once.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdmissionOptions {
    /// Requests served at once, at least one.
    pub limit: usize,
    /// Requests that wait.
    pub queue: usize,
    /// How long each waits.
    pub wait: Duration,
    /// Requests admitted per second in the long run; bursts reach `limit`.
    pub rate: Option<f64>,
}

/// Why a request is not served.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum NotAdmitted {
    /// The queue is full.
    #[error("too many requests: the admission queue is full")]
    Full,
    /// It waited too long.
    #[error("too many requests: no place became free in time")]
    Timeout,
}

/// When the next request may be admitted by rate: each moves the theoretical arrival time on by one interval, and it may run ahead of the
/// clock by the burst.
#[derive(Debug)]
struct Rate {
    interval: Duration,
    burst: Duration,
    next: Mutex<Option<Instant>>,
}

impl Rate {
    fn new(per_second: f64, burst: usize) -> Self {
        let interval = Duration::from_secs_f64((1.0 / per_second).clamp(1e-9, 1e6));
        let burst = interval.saturating_mul(u32::try_from(burst.saturating_sub(1)).unwrap_or(u32::MAX));
        Self { interval, burst, next: Mutex::new(None) }
    }

    /// Takes the next turn, if it comes at `latest` or earlier, and says when it is.
    fn reserve(&self, now: Instant, latest: Instant) -> Option<Instant> {
        let mut next = self.next.lock();
        let arrival = next.map_or(now, |next| next.max(now));
        let turn = arrival.checked_sub(self.burst).map_or(now, |turn| turn.max(now));
        if turn > latest {
            return None;
        }
        *next = Some(arrival + self.interval);
        Some(turn)
    }
}

/// The limit of one gateway.
pub struct Admission {
    options: AdmissionOptions,
    places: Arc<Semaphore>,
    waiting: AtomicUsize,
    rate: Option<Rate>,
    metrics: Arc<Metrics>,
}

impl Admission {
    /// A limit with nobody inside.
    pub fn new(options: AdmissionOptions, metrics: Arc<Metrics>) -> Self {
        let places = options.limit.clamp(1, Semaphore::MAX_PERMITS);
        let rate = options.rate.map(|rate| Rate::new(rate, places));
        Self { options, places: Arc::new(Semaphore::new(places)), waiting: AtomicUsize::new(0), rate, metrics }
    }

    /// Refuses what would find the queue full.
    ///
    /// # Errors
    /// When it is.
    pub fn look(&self) -> Result<(), NotAdmitted> {
        if self.places.available_permits() > 0 || self.waiting.load(Ordering::Relaxed) < self.options.queue {
            return Ok(());
        }
        Err(self.refuse(NotAdmitted::Full))
    }

    /// Waits for a permit.
    ///
    /// # Errors
    /// When the queue is full, or the wait too long.
    pub async fn admit(&self) -> Result<Permit, NotAdmitted> {
        let now = Instant::now();
        let free = Arc::clone(&self.places).try_acquire_owned().ok();
        if let Some(place) = free {
            match self.rate.as_ref().map_or(Some(now), |rate| rate.reserve(now, now)) {
                Some(_) => return Ok(self.permit(place)),
                // The turn comes later: the place goes back, and the request waits like the others.
                None => drop(place),
            }
        }
        let queued = Queued::enter(self).ok_or(NotAdmitted::Full).map_err(|full| self.refuse(full))?;
        let place = self.wait(now + self.options.wait).await.ok_or(NotAdmitted::Timeout);
        drop(queued);
        place.map(|place| self.permit(place)).map_err(|timeout| self.refuse(timeout))
    }

    async fn wait(&self, deadline: Instant) -> Option<OwnedSemaphorePermit> {
        let place = timeout_at(deadline, Arc::clone(&self.places).acquire_owned()).await.ok()?.ok()?;
        if let Some(rate) = &self.rate {
            sleep_until(rate.reserve(Instant::now(), deadline)?).await;
        }
        Some(place)
    }

    fn permit(&self, place: OwnedSemaphorePermit) -> Permit {
        self.metrics.http_rate_limit.with_label_values(&["allowed"]).inc();
        self.metrics.admission_inflight.inc();
        Permit { _place: place, gauge: self.metrics.admission_inflight.clone() }
    }

    fn refuse(&self, why: NotAdmitted) -> NotAdmitted {
        let reason = match why {
            NotAdmitted::Full => "full",
            NotAdmitted::Timeout => "timeout",
        };
        self.metrics.http_rate_limit.with_label_values(&["rejected"]).inc();
        self.metrics.admission_queue_rejected.with_label_values(&[reason]).inc();
        why
    }
}

/// A place in the queue.
struct Queued<'a>(&'a Admission);

impl<'a> Queued<'a> {
    fn enter(admission: &'a Admission) -> Option<Self> {
        let room = |waiting: usize| (waiting < admission.options.queue).then_some(waiting + 1);
        admission.waiting.fetch_update(Ordering::AcqRel, Ordering::Relaxed, room).ok()?;
        admission.metrics.admission_queue_depth.inc();
        Some(Self(admission))
    }
}

impl Drop for Queued<'_> {
    fn drop(&mut self) {
        self.0.waiting.fetch_sub(1, Ordering::AcqRel);
        self.0.metrics.admission_queue_depth.dec();
    }
}

/// The right to be served.
pub struct Permit {
    _place: OwnedSemaphorePermit,
    gauge: IntGauge,
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.gauge.dec();
    }
}

/// Holds a permit until the response has ended.
pub fn hold(response: Response<Body>, permit: Permit) -> Response<Body> {
    response.map(|body| Body::new(Held { body, _permit: permit }))
}

struct Held {
    body: Body,
    _permit: Permit,
}

impl http_body::Body for Held {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.body).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn admission(limit: usize, queue: usize, rate: Option<f64>) -> Arc<Admission> {
        let options = AdmissionOptions { limit, queue, wait: Duration::from_secs(60), rate };
        Arc::new(Admission::new(options, Arc::new(Metrics::default())))
    }

    fn gauges(admission: &Admission) -> (i64, i64) {
        (admission.metrics.admission_inflight.get(), admission.metrics.admission_queue_depth.get())
    }

    async fn until_waiting(admission: &Admission, waiting: usize) {
        while admission.waiting.load(Ordering::Acquire) != waiting {
            tokio::task::yield_now().await;
        }
    }

    #[tokio::test(start_paused = true)]
    async fn who_finds_no_place_waits_in_order_and_who_finds_no_queue_is_refused() {
        let admission = admission(1, 2, None);
        let first = admission.admit().await.unwrap();
        let waiter = |admission: Arc<Admission>| tokio::spawn(async move { admission.admit().await });
        let second = waiter(Arc::clone(&admission));
        until_waiting(&admission, 1).await;
        let third = waiter(Arc::clone(&admission));
        until_waiting(&admission, 2).await;
        assert_eq!(gauges(&admission), (1, 2));
        assert_eq!(admission.look(), Err(NotAdmitted::Full));
        assert_eq!(admission.admit().await.err(), Some(NotAdmitted::Full));
        drop(first);
        let second = second.await.unwrap().unwrap();
        assert!(!third.is_finished());
        third.abort();
        assert!(third.await.is_err());
        assert_eq!(gauges(&admission), (1, 0), "who leaves gives its place in the queue back");
        drop(second);
        assert_eq!(gauges(&admission), (0, 0));
        assert!(admission.admit().await.is_ok());
    }

    #[tokio::test(start_paused = true)]
    async fn a_wait_ends_with_its_time() {
        let admission = admission(1, 1, None);
        let held = admission.admit().await.unwrap();
        let asked = Instant::now();
        assert_eq!(admission.admit().await.err(), Some(NotAdmitted::Timeout));
        assert_eq!(asked.elapsed(), Duration::from_secs(60));
        drop(held);
        assert_eq!(gauges(&admission), (0, 0));
    }

    #[tokio::test(start_paused = true)]
    async fn a_rate_lets_a_burst_through_and_then_spreads_requests_out() {
        let admission = admission(3, 200, Some(2.0));
        let begun = Instant::now();
        let mut admitted = Vec::new();
        for _ in 0..7 {
            drop(admission.admit().await.unwrap());
            admitted.push(begun.elapsed().as_millis());
        }
        assert_eq!(admitted[..3], [0, 0, 0], "the burst is the limit");
        for (index, at) in admitted.iter().enumerate().skip(3) {
            let due = 500 * (index as u128 - 2);
            assert!((due..due + 5).contains(at), "{admitted:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_turn_that_would_come_too_late_is_refused_and_not_used_up() {
        let options = AdmissionOptions { limit: 1, queue: 9, wait: Duration::from_secs(1), rate: Some(0.1) };
        let admission = Admission::new(options, Arc::new(Metrics::default()));
        drop(admission.admit().await.unwrap());
        for _ in 0..3 {
            assert_eq!(admission.admit().await.err(), Some(NotAdmitted::Timeout));
        }
        tokio::time::advance(Duration::from_secs(9)).await;
        assert!(admission.admit().await.is_ok(), "its turn comes ten seconds after the first");
    }
}
