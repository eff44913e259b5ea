//! Decode admission: the rooms of one decode worker, as requests of this gateway wait for them.
//!
//! [`smg_admission::Window`] is the ledger; here its waiting claims wait and its rooms are held. How many rooms are this gateway's is its
//! share, which the control plane tells, and counts as far as the [`Lease`] says.
//!
//! Invariants
//! * a [`Permit`] gives its rooms back when it is dropped, however that comes; whoever holds it decides how long the engine is taken to be
//!   busy with the request;
//! * between looking at the lease and the ledger and claiming from it nothing is awaited;
//! * a claim whose waiter went away gives up its place in line, or its rooms if they were granted in that moment;
//! * rooms that were claimed under a lease which has ended since are used only as far as the share of today covers them
//!   ([`Permit::dispatch`]): for all the control plane knows, nobody has them.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use prometheus::IntCounter;
use smg_admission::{Claim, Standing, Ticket, Window};
use tokio::sync::oneshot;
use tokio::time::{Instant, timeout_at};

use super::lease::Lease;

/// Most requests that wait for one decode worker.
const LONGEST_LINE: usize = 16_384;

/// How often whoever waits looks whether there is anything to wait for.
const LOOK_AGAIN: Duration = Duration::from_secs(1);

/// The rooms of one decode worker.
#[derive(Debug)]
pub struct DecodeWindow {
    ledger: Mutex<Ledger>,
    lease: Arc<Lease>,
    /// Read by whoever chooses a worker, without waiting for the ledger.
    full: AtomicBool,
    waits: IntCounter,
    sheds: IntCounter,
}

#[derive(Debug)]
struct Ledger {
    window: Window,
    calls: HashMap<Ticket, oneshot::Sender<Outcome>>,
    /// What the control plane last told: the limit, and how much of it lasts without the control plane.
    share: (u32, u32),
    /// Rooms in use whose requests were sent.
    sent: u32,
    /// Rooms in use that were claimed under a lease which has ended, and not sent by then.
    forfeited: u32,
    /// Grows whenever rooms are forfeited.
    generation: u64,
    /// The lease, as it was last seen.
    lapses: u64,
    lapsed: bool,
    sure: Sure,
}

/// Requests that are surely in the engine: it has answered, and all that it said was read.
#[derive(Debug, Default)]
struct Sure {
    now: u32,
    /// Grows with each report of them.
    interval: u64,
    /// Those that were there when the interval began.
    since: u32,
}

/// What a waiter is told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Outcome {
    /// The rooms are its own, as of this generation.
    Granted(u64),
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

/// How a worker's rooms are used by this gateway.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Usage {
    /// What the engine runs at a time.
    pub window: u32,
    /// How many rooms are this gateway's.
    pub limit: u32,
    /// How many of them last without the control plane.
    pub anchored: u32,
    /// In use, those not counted whose lease has ended before their requests were sent.
    pub in_use: u32,
    /// What waiting requests need.
    pub waiting: u32,
}

/// Rooms of a decode worker. Dropping it gives them back.
#[derive(Debug)]
pub struct Permit {
    window: Arc<DecodeWindow>,
    rooms: u32,
    /// Rooms whose requests were not sent yet.
    unsent: AtomicU32,
    generation: u64,
}

impl DecodeWindow {
    /// A worker that has not said yet what it runs at a time: not gated. `waits` counts claims granted after a wait, `sheds` refused ones.
    pub fn new(lease: Arc<Lease>, waits: IntCounter, sheds: IntCounter) -> Self {
        let ledger = Ledger {
            window: Window::new(None, LONGEST_LINE),
            calls: HashMap::new(),
            share: (0, 0),
            sent: 0,
            forfeited: 0,
            generation: 0,
            lapses: lease.lapses(),
            lapsed: false,
            sure: Sure::default(),
        };
        Self { ledger: Mutex::new(ledger), lease, full: AtomicBool::new(false), waits, sheds }
    }

    /// What the engine runs at a time has become known or changed; `None` = it reports no window.
    pub fn resize(&self, window: Option<u32>) {
        let mut ledger = self.ledger.lock();
        if ledger.window.window() == window {
            return;
        }
        let limit =
            if self.lease.is_alone() { None } else { Some(self.lease.standing().of(ledger.share.0, ledger.share.1)) };
        let (mut granted, mut refused) = (Vec::new(), Vec::new());
        ledger.window.resize(window, limit, &mut granted, &mut refused);
        ledger.grant(granted);
        ledger.tell(refused, Outcome::TooWide);
        self.note(&ledger);
    }

    /// The control plane has told this gateway's share: its limit, and how much of it lasts without the control plane.
    pub fn share(&self, limit: u32, anchored: u32) {
        let mut ledger = self.ledger.lock();
        ledger.share = (limit, anchored);
        ledger.look_at(&self.lease);
        self.note(&ledger);
    }

    /// Lets whoever waits see what the lease has become.
    pub fn look(&self) {
        let mut ledger = self.ledger.lock();
        ledger.look_at(&self.lease);
        self.note(&ledger);
    }

    /// Claims `rooms`, waiting up to `wait` for them; without one, or when there is nothing to wait for, there is one try.
    ///
    /// # Errors
    /// The rooms did not become free in time, are more than the worker has, or too many requests wait for it already.
    pub async fn claim(self: &Arc<Self>, rooms: u32, wait: Duration) -> Result<Permit, Shed> {
        let mut waiting = {
            let mut ledger = self.ledger.lock();
            ledger.look_at(&self.lease);
            let claim = ledger.window.claim(rooms);
            self.note(&ledger);
            match claim {
                Claim::Granted => return Ok(self.permit(ledger.generation, rooms)),
                Claim::TooWide | Claim::LineFull => return Err(self.shed(&ledger, rooms)),
                Claim::Waits(ticket) => {
                    let (call, called) = oneshot::channel();
                    ledger.calls.insert(ticket, call);
                    Waiting { window: self, ticket, rooms, called, served: false }
                }
            }
        };
        self.lease.ring();
        let outcome = self.wait(&mut waiting.called, wait).await;
        match outcome {
            Some(Outcome::Granted(generation)) => {
                waiting.served = true;
                self.waits.inc();
                Ok(self.permit(generation, rooms))
            }
            _ => {
                drop(waiting);
                Err(self.shed(&self.ledger.lock(), rooms))
            }
        }
    }

    /// Waits for the call, unless there is nothing to wait for, or not any more.
    async fn wait(&self, called: &mut oneshot::Receiver<Outcome>, wait: Duration) -> Option<Outcome> {
        let deadline = Instant::now() + wait;
        while !wait.is_zero() && !self.lease.is_hopeless() {
            let now = Instant::now();
            match timeout_at(deadline.min(now + LOOK_AGAIN), &mut *called).await {
                Ok(outcome) => return outcome.ok(),
                Err(_) if Instant::now() >= deadline => return None,
                Err(_) => {}
            }
        }
        None
    }

    /// Rooms in use by this gateway.
    pub fn in_use(&self) -> u32 {
        self.ledger.lock().window.in_use()
    }

    /// Whether a request would have had to wait when rooms were last taken or given.
    pub fn is_full(&self) -> bool {
        self.full.load(Ordering::Relaxed)
    }

    fn note(&self, ledger: &Ledger) {
        let has_room = ledger.window.free().is_none_or(|free| free > 0 && ledger.window.waiting() == 0);
        self.full.store(!has_room, Ordering::Relaxed);
    }

    /// What the engine runs at a time; `None` = it reports no window.
    pub fn window(&self) -> Option<u32> {
        self.ledger.lock().window.window()
    }

    /// Requests that wait for rooms.
    pub fn waiting(&self) -> usize {
        self.ledger.lock().window.waiting()
    }

    /// How it is used; `None` = it reports no window.
    pub fn usage(&self) -> Option<Usage> {
        let mut ledger = self.ledger.lock();
        ledger.look_at(&self.lease);
        let window = ledger.window.window()?;
        Some(Usage {
            window,
            limit: ledger.window.limit().unwrap_or(window),
            anchored: if self.lease.is_alone() { window } else { ledger.share.1 },
            in_use: ledger.window.in_use().saturating_sub(ledger.forfeited),
            waiting: u32::try_from(ledger.window.wanted()).unwrap_or(u32::MAX),
        })
    }

    /// A request is surely in the engine from now on, until [`DecodeWindow::is_unsure`] is told the same number.
    pub fn is_sure(&self) -> u64 {
        let sure = &mut self.ledger.lock().sure;
        sure.now += 1;
        sure.interval
    }

    /// It may not be there any more.
    pub fn is_unsure(&self, interval: u64) {
        let sure = &mut self.ledger.lock().sure;
        sure.now = sure.now.saturating_sub(1);
        if interval < sure.interval {
            sure.since = sure.since.saturating_sub(1);
        }
    }

    /// Requests that were surely in the engine ever since this was last asked. It also counts those that begin now, for the next time.
    pub fn surely(&self) -> u32 {
        let sure = &mut self.ledger.lock().sure;
        sure.interval += 1;
        std::mem::replace(&mut sure.since, sure.now)
    }

    fn permit(self: &Arc<Self>, generation: u64, rooms: u32) -> Permit {
        Permit { window: Arc::clone(self), rooms, unsent: AtomicU32::new(rooms), generation }
    }

    fn shed(&self, ledger: &Ledger, rooms: u32) -> Shed {
        self.sheds.inc();
        Shed { rooms, window: ledger.window.window().unwrap_or(0) }
    }
}

impl Ledger {
    /// Lets the share count as far as the lease goes now.
    fn look_at(&mut self, lease: &Lease) {
        if lease.is_alone() {
            return;
        }
        let (standing, lapses) = (lease.standing(), lease.lapses());
        let lapsed = standing != Standing::Whole;
        if lapses != self.lapses || (lapsed && !self.lapsed) {
            self.generation += 1;
            self.forfeited = self.window.in_use().saturating_sub(self.sent);
        }
        (self.lapses, self.lapsed) = (lapses, lapsed);
        let mut granted = Vec::new();
        self.window.limit_to(standing.of(self.share.0, self.share.1), &mut granted);
        self.grant(granted);
    }

    fn grant(&mut self, tickets: Vec<Ticket>) {
        self.tell(tickets, Outcome::Granted(self.generation));
    }

    /// Calls waiters. One that went away without its call gives up by itself, see [`Waiting`].
    fn tell(&mut self, tickets: Vec<Ticket>, outcome: Outcome) {
        for ticket in tickets {
            if let Some(call) = self.calls.remove(&ticket) {
                let _ = call.send(outcome);
            }
        }
    }

    /// Takes rooms back, of which so many had not been sent, that were claimed in this generation.
    fn release(&mut self, rooms: u32, unsent: u32, generation: u64) {
        self.sent = self.sent.saturating_sub(rooms.saturating_sub(unsent));
        if generation != self.generation {
            self.forfeited = self.forfeited.saturating_sub(unsent);
        }
        let mut granted = Vec::new();
        self.window.release(rooms, &mut granted);
        self.grant(granted);
    }
}

impl Permit {
    /// Whose rooms they are.
    pub fn window(&self) -> &Arc<DecodeWindow> {
        &self.window
    }

    /// The request of so many of its rooms is about to be sent: nothing may be awaited between this and that.
    ///
    /// # Errors
    /// The lease under which the rooms were claimed has ended, and today's share has none for them.
    pub fn dispatch(&self, rooms: u32) -> Result<(), Shed> {
        let mut ledger = self.window.ledger.lock();
        let rooms = rooms.min(self.unsent.load(Ordering::Relaxed));
        ledger.look_at(&self.window.lease);
        if self.generation != ledger.generation && ledger.window.window().is_some() {
            let limit = ledger.window.limit().unwrap_or(u32::MAX);
            if ledger.sent.saturating_add(rooms) > limit {
                return Err(self.window.shed(&ledger, rooms));
            }
            ledger.forfeited = ledger.forfeited.saturating_sub(rooms);
        }
        ledger.sent = ledger.sent.saturating_add(rooms);
        self.unsent.fetch_sub(rooms, Ordering::Relaxed);
        Ok(())
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        let window = &self.window;
        let unsent = *self.unsent.get_mut();
        let recalled = {
            let mut ledger = window.ledger.lock();
            ledger.look_at(&window.lease);
            // More is in use than this gateway still may: what is given back is another one's.
            let recalled = ledger.window.limit().is_some_and(|limit| ledger.window.in_use() > limit);
            ledger.release(self.rooms, unsent, self.generation);
            window.note(&ledger);
            recalled
        };
        if recalled {
            window.lease.ring();
        }
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
            ledger.grant(granted);
        } else if let Ok(Outcome::Granted(generation)) = self.called.try_recv() {
            ledger.release(self.rooms, self.rooms, generation);
        }
        self.window.note(&ledger);
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::clock::since_boot;

    fn window(size: u32) -> Arc<DecodeWindow> {
        let counter = |name: &str| IntCounter::new(name, "x").unwrap();
        let window = DecodeWindow::new(Arc::default(), counter("waits"), counter("sheds"));
        window.resize(Some(size));
        Arc::new(window)
    }

    fn leased(size: u32) -> (Arc<DecodeWindow>, Arc<Lease>) {
        let counter = |name: &str| IntCounter::new(name, "x").unwrap();
        let lease = Arc::new(Lease::new(false));
        let window = DecodeWindow::new(Arc::clone(&lease), counter("waits"), counter("sheds"));
        window.resize(Some(size));
        (Arc::new(window), lease)
    }

    /// Ends of leases: over, or far away.
    fn ends(float: bool, anchor: bool) -> [Duration; 2] {
        [float, anchor].map(|lasts| if lasts { since_boot() + LONG } else { Duration::from_nanos(1) })
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

    #[tokio::test]
    async fn what_is_admitted_is_the_share_as_far_as_the_lease_goes() {
        let (window, lease) = leased(8);
        assert!(window.claim(1, Duration::ZERO).await.is_err(), "nothing is its own");
        window.share(4, 2);
        assert!(window.claim(1, Duration::ZERO).await.is_err(), "a share without a lease is none");
        lease.renew(ends(true, true));
        let permits = [window.claim(3, Duration::ZERO).await.unwrap(), window.claim(1, Duration::ZERO).await.unwrap()];
        assert!(window.is_full());
        window.share(2, 1);
        drop(permits);
        assert!(window.claim(3, Duration::ZERO).await.is_err());
        assert!(window.claim(2, Duration::ZERO).await.is_ok());
        let usage = Usage { window: 8, limit: 2, anchored: 1, in_use: 0, waiting: 0 };
        assert_eq!(window.usage(), Some(usage));
    }

    #[tokio::test]
    async fn a_request_waits_for_a_share_unless_nobody_can_give_one() {
        let (window, lease) = leased(8);
        let mut claim = Box::pin(window.claim(1, LONG));
        assert!(futures::poll!(&mut claim).is_pending());
        assert_eq!(window.usage().unwrap().waiting, 1);
        lease.rung().await;
        window.share(4, 2);
        lease.renew(ends(true, true));
        window.look();
        assert!(claim.await.is_ok());
        let (window, lease) = leased(8);
        lease.note_away();
        assert!(window.claim(1, LONG).await.is_err(), "at once");
    }

    #[tokio::test]
    async fn rooms_of_a_lease_that_has_ended_are_used_only_as_far_as_the_share_of_today_goes() {
        let (window, lease) = leased(8);
        window.share(8, 2);
        lease.renew([since_boot() + Duration::from_millis(200), since_boot() + LONG]);
        let mut permits = Vec::new();
        for _ in 0..4 {
            permits.push(window.claim(1, Duration::ZERO).await.unwrap());
        }
        permits[0].dispatch(1).unwrap();
        while lease.standing() == Standing::Whole {
            tokio::task::yield_now().await;
        }
        assert_eq!(window.usage().unwrap().in_use, 1, "what was not sent is nobody's");
        permits[1].dispatch(1).unwrap();
        assert!(permits[2].dispatch(1).is_err(), "two are anchored and in use");
        lease.renew(ends(true, true));
        permits[2].dispatch(1).unwrap();
        assert_eq!(window.usage().unwrap().in_use, 3);
        drop(permits);
        assert_eq!((window.usage().unwrap().in_use, window.in_use()), (0, 0));
        let ledger = window.ledger.lock();
        assert_eq!((ledger.sent, ledger.forfeited), (0, 0));
    }

    #[test]
    fn only_requests_that_were_there_all_the_time_are_surely_there() {
        let window = window(8);
        let [first, second] = [window.is_sure(), window.is_sure()];
        assert_eq!(window.surely(), 0, "nobody knows what was before");
        let third = window.is_sure();
        window.is_unsure(first);
        assert_eq!(window.surely(), 1, "the second alone was there at the beginning and at the end");
        assert_eq!(window.surely(), 2);
        window.is_unsure(second);
        window.is_unsure(third);
        assert_eq!((window.surely(), window.surely()), (0, 0));
    }
}
