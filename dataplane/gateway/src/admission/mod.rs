//! Who waits in the gateway because an engine could not serve him yet. [`decode`] has the rooms of decode workers; the rest of this file is
//! prefill admission: each prefill worker computes a bounded number of prompts at a time, and whoever finds them all busy waits in line.
//!
//! The place in a prefill worker is the claim of the prefill leg, which is given back when the prefill phase ends; a claim that would
//! exceed the limit is not given. Here is the waiting: [`line`] is the ledger, this file lets its head wait for a place and the others for
//! their turn. Each model has a line of its own, so that one model's rush holds up no other.
//!
//! Invariants
//! * without a limit nothing here costs anything;
//! * a place in line is given up on every way out ([`Waiting`]), the client's leaving included;
//! * no wake-up is lost: a waiter listens before it looks. The head looks again once a second all the same, because workers also come,
//!   recover and leave.

pub mod decode;
pub mod lease;
pub mod line;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use prometheus::IntGauge;
use tokio::sync::Notify;
use tokio::time::{Instant, timeout_at};

use line::{Line, Ticket};

/// How often the head looks again although nobody gave a place back.
const LOOK_AGAIN: Duration = Duration::from_secs(1);

/// Tells those who wait that a prefill worker has a place again. One for all models of a gateway.
#[derive(Debug, Default)]
pub struct Released {
    waiting: AtomicUsize,
    notify: Notify,
}

impl Released {
    /// A place was given back. Costs one load while nobody waits.
    pub fn announce(&self) {
        if self.waiting.load(Ordering::Acquire) > 0 {
            self.notify.notify_waiters();
        }
    }
}

/// The line of one model.
#[derive(Debug)]
pub struct PrefillQueue {
    line: Mutex<Line>,
    /// The head has changed.
    moved: Notify,
    released: Arc<Released>,
    queued: IntGauge,
}

/// A place in line. Dropping it gives the place up.
#[derive(Debug)]
pub struct Waiting {
    queue: Arc<PrefillQueue>,
    ticket: Ticket,
}

impl PrefillQueue {
    /// An empty line. `queued` counts everybody who waits on this gateway.
    pub fn new(released: Arc<Released>, queued: IntGauge) -> Self {
        Self { line: Mutex::default(), moved: Notify::new(), released, queued }
    }

    /// Whether somebody waits: then nobody who arrives may choose before them.
    pub fn is_busy(&self) -> bool {
        !self.line.lock().is_empty()
    }

    /// Takes the last place in line; `None` if `room` requests wait already.
    pub fn join(self: &Arc<Self>, room: u64) -> Option<Waiting> {
        let ticket = self.line.lock().join(room)?;
        self.released.waiting.fetch_add(1, Ordering::AcqRel);
        self.queued.inc();
        Some(Waiting { queue: Arc::clone(self), ticket })
    }
}

impl Waiting {
    /// Waits for this one's turn and then asks `choose` until it yields something. `None` when `deadline` is over.
    pub async fn until<T>(&self, deadline: Instant, mut choose: impl FnMut() -> Option<T>) -> Option<T> {
        loop {
            // A listener hears what happens from its creation on: listening comes before looking.
            let moved = self.queue.moved.notified();
            let released = self.queue.released.notify.notified();
            let is_head = self.queue.line.lock().head() == Some(self.ticket);
            if is_head && let Some(chosen) = choose() {
                return Some(chosen);
            }
            if Instant::now() >= deadline {
                return None;
            }
            // Time that is over is no error here: it is looked at again.
            let _ = if is_head {
                timeout_at(deadline.min(Instant::now() + LOOK_AGAIN), released).await
            } else {
                timeout_at(deadline, moved).await
            };
        }
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        let was_head = self.queue.line.lock().leave(self.ticket);
        self.queue.released.waiting.fetch_sub(1, Ordering::AcqRel);
        self.queue.queued.dec();
        if was_head {
            self.queue.moved.notify_waiters();
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::sync::atomic::AtomicU32;

    use super::*;

    fn queue() -> (Arc<PrefillQueue>, Arc<Released>) {
        let released = Arc::new(Released::default());
        let gauge = IntGauge::new("queued", "x").unwrap();
        (Arc::new(PrefillQueue::new(Arc::clone(&released), gauge)), released)
    }

    fn far() -> Instant {
        Instant::now() + Duration::from_secs(20)
    }

    #[tokio::test]
    async fn places_are_handed_out_in_the_order_of_arrival() {
        let (queue, released) = queue();
        let places = Arc::new(AtomicU32::new(0));
        let order = Arc::new(Mutex::new(Vec::new()));
        let tasks: Vec<_> = (0..5)
            .map(|number| {
                let (waiting, places, order) = (queue.join(5).unwrap(), Arc::clone(&places), Arc::clone(&order));
                tokio::spawn(async move {
                    let take =
                        || places.fetch_update(Ordering::AcqRel, Ordering::Acquire, |free| free.checked_sub(1)).ok();
                    waiting.until(far(), take).await.unwrap();
                    order.lock().push(number);
                })
            })
            .collect();
        for _ in 0..5 {
            places.fetch_add(1, Ordering::AcqRel);
            released.announce();
            tokio::task::yield_now().await;
        }
        for task in tasks {
            task.await.unwrap();
        }
        assert_eq!(*order.lock(), [0, 1, 2, 3, 4]);
        assert_eq!((queue.is_busy(), queue.queued.get()), (false, 0));
    }

    #[tokio::test]
    async fn whoever_waits_too_long_gives_up_and_the_next_one_moves_up() {
        let (queue, _released) = queue();
        let (first, second) = (queue.join(2).unwrap(), queue.join(2).unwrap());
        assert!(queue.join(2).is_none());
        let waited = first.until(Instant::now() + Duration::from_millis(20), || None::<()>).await;
        assert_eq!(waited, None);
        let moving = tokio::spawn(async move { second.until(far(), || Some(7)).await });
        drop(first);
        assert_eq!(moving.await.unwrap(), Some(7));
        assert!(!queue.is_busy());
    }
}
