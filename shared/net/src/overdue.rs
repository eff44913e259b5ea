//! Responses that outlive their time.
//!
//! A body is asked for its next piece only when the last one is on its way. A client that does not read therefore stops the clock of the body
//! itself: it would keep whatever the body holds (an engine's request, a permit, a place in a queue) for as long as it likes. So whoever
//! answers may say by when the response must have ended ([`EndBy`]), and the connection takes the body away at that time, asked or not.
//!
//! * What the body holds is released at most [`LOOK`] after its time, and soon after it where its time is shorter than that.
//! * On HTTP/1 the connection is closed with it; on HTTP/2 the others of the connection go on.
//! * A response without [`EndBy`] is never touched.

use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::task::{Context, Poll};
use std::time::Duration;

use http_body::{Body, Frame, SizeHint};
use tokio::sync::Notify;
use tokio::time::{Instant, sleep_until};

use crate::patience::InFlight;

/// By when a response must have ended, as an extension of it.
#[derive(Debug, Clone, Copy)]
pub struct EndBy(pub Instant);

/// How often a connection looks for responses that are overdue, at least.
const LOOK: Duration = Duration::from_secs(30);
/// The body itself has this much longer to end in its own words.
const GRACE: Duration = Duration::from_secs(1);

/// A body that can be taken away.
type Slot<B> = Mutex<Option<Held<B>>>;

struct Held<B> {
    body: Pin<Box<B>>,
    #[allow(dead_code, reason = "held for its drop")]
    in_flight: InFlight,
}

/// The responses of one connection that have to end by some time.
pub(crate) struct Overdue<B> {
    open: Mutex<Open<B>>,
    sooner: Notify,
}

struct Open<B> {
    bodies: Vec<(Instant, Weak<Slot<B>>)>,
    look: Instant,
}

impl<B> Overdue<B> {
    pub fn new() -> Arc<Self> {
        let open = Open { bodies: Vec::new(), look: Instant::now() + LOOK };
        Arc::new(Self { open: Mutex::new(open), sooner: Notify::new() })
    }

    fn add(&self, end_by: Instant, slot: &Arc<Slot<B>>) {
        let end = end_by + GRACE;
        let mut open = lock(&self.open);
        if open.bodies.len() == open.bodies.capacity() {
            open.bodies.retain(|(_, slot)| slot.strong_count() > 0);
        }
        open.bodies.push((end, Arc::downgrade(slot)));
        if end < open.look {
            open.look = end;
            self.sooner.notify_one();
        }
    }

    /// Takes away what is overdue at `now`. Whether there was any, and when to look again.
    fn cut(&self, now: Instant) -> (bool, Instant) {
        let mut overdue = Vec::new();
        let look = {
            let mut open = lock(&self.open);
            open.bodies.retain(|(end, slot)| match slot.upgrade() {
                Some(slot) if *end <= now => {
                    overdue.push(slot);
                    false
                }
                slot => slot.is_some(),
            });
            open.look = open.bodies.iter().map(|(end, _)| *end).fold(now + LOOK, Instant::min);
            open.look
        };
        let mut any = false;
        for slot in overdue {
            // Dropped outside of the lock.
            let held = lock(&slot).take();
            any |= held.is_some();
        }
        (any, look)
    }

    /// Takes bodies away as their time comes. Ends when one was taken of which `ends` says that the connection ends with it.
    pub async fn watch(&self, ends: impl Fn() -> bool) {
        loop {
            let (any, look) = self.cut(Instant::now());
            if any && ends() {
                return;
            }
            tokio::select! {
                () = sleep_until(look) => {}
                () = self.sooner.notified() => {}
            }
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The body of a response in flight.
pub(crate) struct Response<B>(Kind<B>);

enum Kind<B> {
    Free(Held<B>),
    Bound(Arc<Slot<B>>),
}

impl<B> Response<B> {
    pub fn new(body: B, in_flight: InFlight, end_by: Option<EndBy>, overdue: &Overdue<B>) -> Self {
        let held = Held { body: Box::pin(body), in_flight };
        let Some(EndBy(end_by)) = end_by else { return Self(Kind::Free(held)) };
        let slot = Arc::new(Mutex::new(Some(held)));
        overdue.add(end_by, &slot);
        Self(Kind::Bound(slot))
    }
}

/// A response was taken away because its time was over.
#[derive(Debug, thiserror::Error)]
#[error("the time of the request is over")]
struct TimeOver;

impl<B> Body for Response<B>
where
    B: Body<Error: Into<Box<dyn std::error::Error + Send + Sync>>>,
{
    type Data = B::Data;
    type Error = Box<dyn std::error::Error + Send + Sync>;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<B::Data>, Self::Error>>> {
        match &mut self.0 {
            Kind::Free(held) => held.body.as_mut().poll_frame(cx).map_err(Into::into),
            Kind::Bound(slot) => match lock(slot).as_mut() {
                Some(held) => held.body.as_mut().poll_frame(cx).map_err(Into::into),
                None => Poll::Ready(Some(Err(TimeOver.into()))),
            },
        }
    }

    fn is_end_stream(&self) -> bool {
        match &self.0 {
            Kind::Free(held) => held.body.is_end_stream(),
            Kind::Bound(slot) => lock(slot).as_ref().is_some_and(|held| held.body.is_end_stream()),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.0 {
            Kind::Free(held) => held.body.size_hint(),
            Kind::Bound(slot) => lock(slot).as_ref().map_or_else(SizeHint::default, |held| held.body.size_hint()),
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use http_body_util::{BodyExt, Full};

    use super::*;
    use crate::patience::Activity;

    fn body(end_by: Option<Instant>, overdue: &Overdue<Full<&'static [u8]>>) -> Response<Full<&'static [u8]>> {
        let in_flight = Activity::new().begin(http::Version::HTTP_11);
        Response::new(Full::new(&b"hello"[..]), in_flight, end_by.map(EndBy), overdue)
    }

    #[tokio::test(start_paused = true)]
    async fn a_body_is_taken_away_soon_after_its_time_and_others_stay() {
        let overdue = Overdue::new();
        let (free, long) = (body(None, &overdue), body(Some(Instant::now() + Duration::from_secs(100)), &overdue));
        let short = body(Some(Instant::now() + Duration::from_secs(4)), &overdue);
        let begun = Instant::now();
        overdue.watch(|| true).await;
        assert_eq!(begun.elapsed(), Duration::from_secs(5));
        assert_eq!(short.collect().await.unwrap_err().to_string(), "the time of the request is over");
        assert_eq!(free.collect().await.unwrap().to_bytes(), &b"hello"[..]);
        assert_eq!(long.collect().await.unwrap().to_bytes(), &b"hello"[..]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_time_that_is_set_while_nothing_is_due_is_kept_too() {
        let overdue = Overdue::new();
        let watched = Arc::clone(&overdue);
        let watch = tokio::spawn(async move { watched.watch(|| true).await });
        tokio::time::sleep(Duration::from_secs(10)).await;
        let short = body(Some(Instant::now() + Duration::from_secs(2)), &overdue);
        let begun = Instant::now();
        watch.await.unwrap();
        assert_eq!(begun.elapsed(), Duration::from_secs(3));
        drop(short);
    }

    #[tokio::test(start_paused = true)]
    async fn bodies_that_have_ended_are_forgotten() {
        let overdue = Overdue::new();
        for _ in 0..10_000 {
            drop(body(Some(Instant::now() + Duration::from_secs(100)), &overdue));
        }
        assert!(lock(&overdue.open).bodies.len() < 10);
        assert!(!overdue.cut(Instant::now() + Duration::from_secs(200)).0);
    }
}
