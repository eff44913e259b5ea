//! Decode admission: the rooms of one decode worker, as requests of this gateway wait for them.
//!
//! [`smg_admission::Window`] is the ledger; here its waiting claims wait and its rooms are held.
//!
//! Invariants
//! * a [`Permit`] gives its rooms back when it is dropped, however that comes; whoever holds it decides how long the engine is taken to be
//!   busy with the request;
//! * between looking at the ledger and claiming from it nothing is awaited;
//! * a claim whose waiter went away gives up its place in line, or its rooms if they were granted in that moment.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use prometheus::IntCounter;
use smg_admission::{Claim, Ticket, Window};
use tokio::sync::oneshot;
use tokio::time::timeout;

/// Most requests that wait for one decode worker.
const LONGEST_LINE: usize = 16_384;

/// The rooms of one decode worker.
#[derive(Debug)]
pub struct DecodeWindow {
    ledger: Mutex<Ledger>,
    waits: IntCounter,
    sheds: IntCounter,
}

#[derive(Debug)]
struct Ledger {
    window: Window,
    calls: HashMap<Ticket, oneshot::Sender<Outcome>>,
}

/// What a waiter is told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Outcome {
    Granted,
    TooWide,
}

/// Why a request was not admitted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shed {
    /// Rooms it needed.
    pub rooms: u32,
    /// What the engine runs at a time.
    pub window: u32,
}

/// Rooms of a decode worker. Dropping it gives them back.
#[derive(Debug)]
pub struct Permit {
    window: Arc<DecodeWindow>,
    rooms: u32,
}

impl DecodeWindow {
    /// A worker that has not said yet what it runs at a time: not gated. `waits` counts claims granted after a wait, `sheds` refused ones.
    pub fn new(waits: IntCounter, sheds: IntCounter) -> Self {
        let window = Window::new(None, LONGEST_LINE);
        Self { ledger: Mutex::new(Ledger { window, calls: HashMap::new() }), waits, sheds }
    }

    /// What the engine runs at a time has become known or changed; `None` = it reports no window.
    pub fn resize(&self, window: Option<u32>) {
        let mut ledger = self.ledger.lock();
        if ledger.window.window() == window {
            return;
        }
        let (mut granted, mut refused) = (Vec::new(), Vec::new());
        ledger.window.resize(window, None, &mut granted, &mut refused);
        ledger.tell(granted, Outcome::Granted);
        ledger.tell(refused, Outcome::TooWide);
    }

    /// Claims `rooms`, waiting up to `wait` for them; without one, there is one try.
    ///
    /// # Errors
    /// The rooms did not become free in time, are more than the worker has, or too many requests wait for it already.
    pub async fn claim(self: &Arc<Self>, rooms: u32, wait: Duration) -> Result<Permit, Shed> {
        let mut waiting = {
            let mut ledger = self.ledger.lock();
            match ledger.window.claim(rooms) {
                Claim::Granted => return Ok(self.permit(rooms)),
                Claim::TooWide | Claim::LineFull => return Err(self.shed(&ledger, rooms)),
                Claim::Waits(ticket) => {
                    let (call, called) = oneshot::channel();
                    ledger.calls.insert(ticket, call);
                    Waiting { window: self, ticket, rooms, called, served: false }
                }
            }
        };
        let outcome = if wait.is_zero() { None } else { timeout(wait, &mut waiting.called).await.ok() };
        match outcome {
            Some(Ok(Outcome::Granted)) => {
                waiting.served = true;
                self.waits.inc();
                Ok(self.permit(rooms))
            }
            _ => {
                drop(waiting);
                Err(self.shed(&self.ledger.lock(), rooms))
            }
        }
    }

    /// Rooms in use by this gateway.
    pub fn in_use(&self) -> u32 {
        self.ledger.lock().window.in_use()
    }

    /// What the engine runs at a time; `None` = it reports no window.
    pub fn window(&self) -> Option<u32> {
        self.ledger.lock().window.window()
    }

    /// Requests that wait for rooms.
    pub fn waiting(&self) -> usize {
        self.ledger.lock().window.waiting()
    }

    fn permit(self: &Arc<Self>, rooms: u32) -> Permit {
        Permit { window: Arc::clone(self), rooms }
    }

    fn shed(&self, ledger: &Ledger, rooms: u32) -> Shed {
        self.sheds.inc();
        Shed { rooms, window: ledger.window.window().unwrap_or(0) }
    }
}

impl Ledger {
    /// Calls waiters. One that went away without its call gives up by itself, see [`Waiting`].
    fn tell(&mut self, tickets: Vec<Ticket>, outcome: Outcome) {
        for ticket in tickets {
            if let Some(call) = self.calls.remove(&ticket) {
                let _ = call.send(outcome);
            }
        }
    }

    fn release(&mut self, rooms: u32) {
        let mut granted = Vec::new();
        self.window.release(rooms, &mut granted);
        self.tell(granted, Outcome::Granted);
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.window.ledger.lock().release(self.rooms);
    }
}

/// A place in line. Dropping it unserved gives up the place, or the rooms that came with a call nobody heard.
struct Waiting<'a> {
    window: &'a Arc<DecodeWindow>,
    ticket: Ticket,
    rooms: u32,
    called: oneshot::Receiver<Outcome>,
    served: bool,
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        if self.served {
            return;
        }
        let mut ledger = self.window.ledger.lock();
        ledger.calls.remove(&self.ticket);
        let mut granted = Vec::new();
        if ledger.window.give_up(self.ticket, &mut granted) {
            ledger.tell(granted, Outcome::Granted);
        } else if self.called.try_recv() == Ok(Outcome::Granted) {
            ledger.release(self.rooms);
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn window(size: u32) -> Arc<DecodeWindow> {
        let counter = |name: &str| IntCounter::new(name, "x").unwrap();
        let window = Arc::new(DecodeWindow::new(counter("waits"), counter("sheds")));
        window.resize(Some(size));
        window
    }

    const LONG: Duration = Duration::from_secs(30);

    #[tokio::test]
    async fn a_full_worker_sheds_at_once_when_nobody_may_wait() {
        let window = window(2);
        let permit = window.claim(2, Duration::ZERO).await.unwrap();
        assert_eq!(window.claim(1, Duration::ZERO).await.unwrap_err(), Shed { rooms: 1, window: 2 });
        drop(permit);
        assert!(window.claim(1, Duration::ZERO).await.is_ok());
        assert_eq!((window.in_use(), window.waiting(), window.sheds.get(), window.waits.get()), (0, 0, 1, 0));
    }

    #[tokio::test]
    async fn a_request_that_needs_more_than_the_worker_has_does_not_wait() {
        let window = window(2);
        assert_eq!(window.claim(3, LONG).await.unwrap_err(), Shed { rooms: 3, window: 2 });
    }

    #[tokio::test]
    async fn rooms_that_are_given_back_go_to_whoever_waits() {
        let window = window(1);
        let permit = window.claim(1, LONG).await.unwrap();
        let waiting = {
            let window = Arc::clone(&window);
            tokio::spawn(async move { window.claim(1, LONG).await })
        };
        while window.waiting() == 0 {
            tokio::task::yield_now().await;
        }
        drop(permit);
        let permit = waiting.await.unwrap().unwrap();
        assert_eq!((window.in_use(), window.waits.get()), (1, 1));
        drop(permit);
        assert_eq!(window.in_use(), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn a_wait_ends_in_a_shed_when_its_time_is_over() {
        let window = window(1);
        let _permit = window.claim(1, LONG).await.unwrap();
        assert_eq!(window.claim(1, Duration::from_secs(3)).await.unwrap_err(), Shed { rooms: 1, window: 1 });
        assert_eq!((window.waiting(), window.in_use(), window.sheds.get()), (0, 1, 1));
    }

    #[tokio::test]
    async fn a_client_that_leaves_gives_up_its_place_and_rooms_granted_in_that_moment() {
        let window = window(1);
        for leave_before_grant in [true, false] {
            let permit = window.claim(1, LONG).await.unwrap();
            let mut claim = Box::pin(window.claim(1, LONG));
            assert!(futures::poll!(&mut claim).is_pending());
            if leave_before_grant {
                drop(claim);
                drop(permit);
            } else {
                drop(permit);
                drop(claim);
            }
            assert_eq!((window.in_use(), window.waiting()), (0, 0), "{leave_before_grant}");
        }
    }

    #[tokio::test]
    async fn a_worker_whose_window_shrinks_sheds_whoever_needs_more() {
        let window = window(4);
        let _permit = window.claim(4, LONG).await.unwrap();
        let mut wide = Box::pin(window.claim(3, LONG));
        assert!(futures::poll!(&mut wide).is_pending());
        window.resize(Some(2));
        assert_eq!(wide.await.unwrap_err(), Shed { rooms: 3, window: 2 });
    }
}
