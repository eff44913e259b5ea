//! How long one connection may make us wait, and how old it may grow.
//!
//! Three limits, each with its own clock:
//! * *header read*: from being accepted, or from the first byte of a further request, until the head of the request is complete;
//! * *idle*: from the end of the last request (its response included) until the next one begins. Starts with the first request;
//! * *age*: from being accepted until the connection is asked to close after its current request. Behind a DNS name that is what brings
//!   traffic to a gateway that was added.
//!
//! A request in flight stops the first two: how long it may take is the business of those who serve it, who say it with
//! [`EndBy`](crate::overdue::EndBy).
//!
//! What a connection is doing is kept in a few atomics that the socket and the service write; one timer a connection looks at them when the
//! earliest limit could have passed. So a request costs no timer.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use pin_project_lite::pin_project;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Instant, sleep_until};

/// The limits of a connection. Absent ones do not hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Patience {
    /// How long the head of a request may take.
    pub header_read: Option<Duration>,
    /// How long a connection may have no request in flight.
    pub idle: Option<Duration>,
    /// How old a connection may grow, give or take a tenth.
    pub max_age: Option<Duration>,
}

impl Default for Patience {
    fn default() -> Self {
        let secs = |secs| Some(Duration::from_secs(secs));
        Self { header_read: secs(30), idle: secs(90), max_age: None }
    }
}

/// The limit that a client broke.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Timeout {
    /// The head of a request, or a TLS handshake, took too long.
    HeaderRead,
    /// No request for too long.
    Idle,
}

impl Timeout {
    /// Its name in metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::HeaderRead => "header_read",
            Self::Idle => "idle",
        }
    }
}

/// What a connection is doing.
#[derive(Debug)]
pub(crate) struct Activity {
    accepted: Instant,
    /// Requests whose response has not ended.
    in_flight: AtomicU32,
    /// Without a request in flight: whether a head is awaited or being read, rather than nothing at all.
    reading_head: AtomicBool,
    /// Since when it does what it does, in milliseconds after `accepted`.
    since_ms: AtomicU64,
    http2: AtomicBool,
    /// Whether the next response says that it is the last one.
    retiring: AtomicBool,
}

impl Activity {
    pub fn new() -> Arc<Self> {
        Arc::new(Self {
            accepted: Instant::now(),
            in_flight: AtomicU32::new(0),
            reading_head: AtomicBool::new(true),
            since_ms: AtomicU64::new(0),
            http2: AtomicBool::new(false),
            retiring: AtomicBool::new(false),
        })
    }

    fn stamp(&self) {
        let since = self.accepted.elapsed().as_millis();
        self.since_ms.store(u64::try_from(since).unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    /// Bytes came. On an idle HTTP/1 connection they begin a head; on HTTP/2 they may be anything, so only requests count there.
    fn bytes_came(&self) {
        let idle = !self.reading_head.load(Ordering::Relaxed) && self.in_flight.load(Ordering::Relaxed) == 0;
        if idle && !self.http2.load(Ordering::Relaxed) {
            self.stamp();
            self.reading_head.store(true, Ordering::Release);
        }
    }

    /// A request begins. It is in flight until the guard is dropped.
    pub fn begin(self: &Arc<Self>, version: http::Version) -> InFlight {
        if version == http::Version::HTTP_2 {
            self.http2.store(true, Ordering::Relaxed);
        }
        self.in_flight.fetch_add(1, Ordering::AcqRel);
        self.reading_head.store(false, Ordering::Relaxed);
        InFlight(Arc::clone(self))
    }

    pub fn is_http2(&self) -> bool {
        self.http2.load(Ordering::Relaxed)
    }

    /// Ends when a request of an HTTP/1 connection is in flight. Asked once its client has closed its side, so it is not asked for long.
    pub async fn until_answering_on_http1(&self) {
        while self.is_http2() || self.in_flight.load(Ordering::Acquire) == 0 {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    pub fn retire(&self) {
        self.retiring.store(true, Ordering::Relaxed);
    }

    pub fn is_retiring(&self) -> bool {
        self.retiring.load(Ordering::Relaxed)
    }

    /// The limit that is broken at `now`, or when to look again; `None` = no limit holds.
    fn judge(&self, patience: &Patience, now: Instant) -> Result<Option<Instant>, Timeout> {
        let limits = [patience.header_read, patience.idle];
        // Whatever begins from now on cannot break a limit before this.
        let later = limits.into_iter().flatten().min().map(|shortest| now + shortest);
        if self.in_flight.load(Ordering::Acquire) > 0 {
            return Ok(later);
        }
        let (limit, timeout) = if self.reading_head.load(Ordering::Acquire) {
            (patience.header_read, Timeout::HeaderRead)
        } else {
            (patience.idle, Timeout::Idle)
        };
        let Some(limit) = limit else { return Ok(later) };
        let end = self.accepted + Duration::from_millis(self.since_ms.load(Ordering::Relaxed)) + limit;
        if end <= now { Err(timeout) } else { Ok(later.map(|later| later.min(end))) }
    }

    /// Ends when a limit is broken.
    pub async fn broken(&self, patience: Patience) -> Timeout {
        loop {
            match self.judge(&patience, Instant::now()) {
                Err(timeout) => return timeout,
                Ok(Some(at)) => sleep_until(at).await,
                Ok(None) => std::future::pending().await,
            }
        }
    }
}

/// A request in flight.
#[derive(Debug)]
pub(crate) struct InFlight(Arc<Activity>);

impl Drop for InFlight {
    fn drop(&mut self) {
        // The stamp comes first: whoever sees no request in flight sees since when.
        self.0.stamp();
        self.0.in_flight.fetch_sub(1, Ordering::AcqRel);
    }
}

pin_project! {
    /// A socket that notes when bytes come.
    pub(crate) struct Noted<IO> {
        #[pin]
        io: IO,
        activity: Arc<Activity>,
    }
}

impl<IO> Noted<IO> {
    pub fn new(io: IO, activity: Arc<Activity>) -> Self {
        Self { io, activity }
    }
}

impl<IO: AsyncRead> AsyncRead for Noted<IO> {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<std::io::Result<()>> {
        let this = self.project();
        let before = buffer.filled().len();
        ready!(this.io.poll_read(cx, buffer))?;
        if buffer.filled().len() > before {
            this.activity.bytes_came();
        }
        Poll::Ready(Ok(()))
    }
}

impl<IO: AsyncWrite> AsyncWrite for Noted<IO> {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<std::io::Result<usize>> {
        self.project().io.poll_write(cx, bytes)
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        self.project().io.poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        self.project().io.poll_shutdown(cx)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[std::io::IoSlice<'_>],
    ) -> Poll<std::io::Result<usize>> {
        self.project().io.poll_write_vectored(cx, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PATIENCE: Patience =
        Patience { header_read: Some(Duration::from_secs(30)), idle: Some(Duration::from_secs(90)), max_age: None };

    async fn after(secs: u64) -> Instant {
        tokio::time::advance(Duration::from_secs(secs)).await;
        Instant::now()
    }

    #[tokio::test(start_paused = true)]
    async fn a_head_has_its_limit_from_the_connection_or_from_its_first_byte() {
        let activity = Activity::new();
        assert_eq!(activity.judge(&PATIENCE, after(29).await), Ok(Some(Instant::now() + Duration::from_secs(1))));
        assert_eq!(activity.judge(&PATIENCE, after(1).await), Err(Timeout::HeaderRead));
        let activity = Activity::new();
        drop(activity.begin(http::Version::HTTP_11));
        let idle_for = after(89).await;
        assert_eq!(activity.judge(&PATIENCE, idle_for), Ok(Some(idle_for + Duration::from_secs(1))));
        activity.bytes_came();
        assert!(activity.judge(&PATIENCE, after(29).await).is_ok(), "the head has begun: it is not idle");
        activity.bytes_came();
        assert_eq!(activity.judge(&PATIENCE, after(1).await), Err(Timeout::HeaderRead), "further bytes buy no time");
    }

    #[tokio::test(start_paused = true)]
    async fn a_connection_is_idle_only_after_its_last_response() {
        let activity = Activity::new();
        let (first, second) = (activity.begin(http::Version::HTTP_2), activity.begin(http::Version::HTTP_2));
        assert!(activity.judge(&PATIENCE, after(1_000).await).is_ok());
        drop(first);
        assert!(activity.judge(&PATIENCE, after(1_000).await).is_ok());
        drop(second);
        activity.bytes_came();
        assert!(activity.judge(&PATIENCE, after(89).await).is_ok());
        assert_eq!(activity.judge(&PATIENCE, after(1).await), Err(Timeout::Idle), "pings of HTTP/2 are no request");
    }

    #[tokio::test(start_paused = true)]
    async fn a_limit_that_is_absent_never_breaks_and_the_other_one_holds() {
        let activity = Activity::new();
        let without_head = Patience { header_read: None, ..PATIENCE };
        assert!(activity.judge(&without_head, after(100_000).await).is_ok());
        drop(activity.begin(http::Version::HTTP_11));
        assert_eq!(activity.judge(&without_head, after(90).await), Err(Timeout::Idle));
        let without_idle = Patience { idle: None, ..PATIENCE };
        assert!(activity.judge(&without_idle, after(100_000).await).is_ok());
        let none = Patience { header_read: None, idle: None, max_age: None };
        assert_eq!(activity.judge(&none, Instant::now()), Ok(None));
    }
}
