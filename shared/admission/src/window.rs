//! The rooms of one decode worker, as one gateway hands them out.
//!
//! A claim takes all the rooms it needs or none. Claims that find too few wait in line. The line is first in, first out among claims of
//! equal size; a claim that needs fewer rooms than everybody before it may pass, so that a wide claim leaves no room unused while it
//! gathers its rooms. Whoever was passed by a whole window's worth of rooms is passed no more: nobody starves.
//!
//! Invariants
//! * rooms in use never grow past the limit, and while they are above it (the limit has fallen) they only fall;
//! * a claim wider than the worker's whole window never waits, because it would wait for ever;
//! * every claim is granted, refused or given up exactly once; what was granted is given back exactly once, by whoever holds it;
//! * the line is bounded.

use std::collections::VecDeque;

/// Names a waiting claim.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ticket(u64);

/// What becomes of a claim.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Claim {
    /// The rooms are the caller's.
    Granted,
    /// The claim waits under this ticket.
    Waits(Ticket),
    /// It needs more rooms than the worker has.
    TooWide,
    /// Too many claims wait already.
    LineFull,
}

#[derive(Debug)]
struct Waiter {
    ticket: Ticket,
    rooms: u32,
    /// Rooms granted to claims that came later.
    passed: u64,
}

/// The rooms of one decode worker.
#[derive(Debug)]
pub struct Window {
    /// What the engine runs at a time; `None` = it reports no window and every claim is granted.
    window: Option<u32>,
    /// How much of it this gateway may use.
    limit: u32,
    in_use: u32,
    line: VecDeque<Waiter>,
    next: u64,
    longest: usize,
}

impl Window {
    /// No rooms in use. At most `longest` claims wait.
    pub fn new(window: Option<u32>, longest: usize) -> Self {
        Self { window, limit: window.unwrap_or(0), in_use: 0, line: VecDeque::new(), next: 0, longest }
    }

    /// Claims `rooms` (at least 1).
    pub fn claim(&mut self, rooms: u32) -> Claim {
        let rooms = rooms.max(1);
        let Some(window) = self.window else {
            self.in_use = self.in_use.saturating_add(rooms);
            return Claim::Granted;
        };
        if rooms > window {
            return Claim::TooWide;
        }
        let fits = self.fits(rooms);
        if fits && self.may_pass_everybody(rooms) {
            self.charge_passing(self.line.len(), rooms);
            self.in_use += rooms;
            return Claim::Granted;
        }
        if self.line.len() >= self.longest {
            return Claim::LineFull;
        }
        let ticket = Ticket(self.next);
        self.next += 1;
        self.line.push_back(Waiter { ticket, rooms, passed: 0 });
        Claim::Waits(ticket)
    }

    /// Gives rooms back. The claims in `granted` have theirs from now on.
    pub fn release(&mut self, rooms: u32, granted: &mut Vec<Ticket>) {
        self.in_use = self.in_use.saturating_sub(rooms.max(1));
        self.settle(granted);
    }

    /// Gives a waiting claim up; whoever waited behind it may have rooms now. False if it does not wait (any more): then it was granted,
    /// and its rooms have to be given back.
    pub fn give_up(&mut self, ticket: Ticket, granted: &mut Vec<Ticket>) -> bool {
        let Some(position) = self.line.iter().position(|waiter| waiter.ticket == ticket) else { return false };
        self.line.remove(position);
        self.settle(granted);
        true
    }

    /// The engine's window and this gateway's part of it have changed. Claims that are too wide now are in `refused`.
    pub fn resize(
        &mut self,
        window: Option<u32>,
        limit: Option<u32>,
        granted: &mut Vec<Ticket>,
        refused: &mut Vec<Ticket>,
    ) {
        self.window = window;
        let Some(window) = window else {
            for waiter in self.line.drain(..) {
                self.in_use = self.in_use.saturating_add(waiter.rooms);
                granted.push(waiter.ticket);
            }
            return;
        };
        self.limit = limit.unwrap_or(window).min(window);
        self.line.retain(|waiter| {
            let stays = waiter.rooms <= window;
            if !stays {
                refused.push(waiter.ticket);
            }
            stays
        });
        self.settle(granted);
    }

    /// This gateway's part of the window has changed, and nothing else.
    pub fn limit_to(&mut self, limit: u32, granted: &mut Vec<Ticket>) {
        let limit = self.window.map_or(0, |window| limit.min(window));
        if self.limit != limit {
            self.limit = limit;
            self.settle(granted);
        }
    }

    /// Rooms in use.
    pub fn in_use(&self) -> u32 {
        self.in_use
    }

    /// What the engine runs at a time; `None` = no gate.
    pub fn window(&self) -> Option<u32> {
        self.window
    }

    /// Rooms this gateway may use; `None` = no gate.
    pub fn limit(&self) -> Option<u32> {
        self.window.map(|_| self.limit)
    }

    /// Rooms that could be claimed now; `None` = no gate.
    pub fn free(&self) -> Option<u32> {
        self.limit().map(|limit| limit.saturating_sub(self.in_use))
    }

    /// Claims that wait.
    pub fn waiting(&self) -> usize {
        self.line.len()
    }

    /// Rooms that waiting claims need together.
    pub fn wanted(&self) -> u64 {
        self.line.iter().map(|waiter| u64::from(waiter.rooms)).sum()
    }

    fn fits(&self, rooms: u32) -> bool {
        self.in_use.checked_add(rooms).is_some_and(|sum| sum <= self.limit)
    }

    /// Whether a claim behind the whole line may go before it.
    fn may_pass_everybody(&self, rooms: u32) -> bool {
        self.line.iter().all(|waiter| rooms < waiter.rooms && !self.is_barrier(waiter))
    }

    fn is_barrier(&self, waiter: &Waiter) -> bool {
        waiter.passed >= u64::from(self.window.unwrap_or(0))
    }

    /// The first `count` in line were passed by a claim of `rooms`.
    fn charge_passing(&mut self, count: usize, rooms: u32) {
        for waiter in self.line.iter_mut().take(count) {
            waiter.passed = waiter.passed.saturating_add(u64::from(rooms));
        }
    }

    /// Grants what can be granted, the oldest first.
    fn settle(&mut self, granted: &mut Vec<Ticket>) {
        let mut position = 0;
        let mut narrowest = u32::MAX;
        while self.in_use < self.limit {
            let Some(waiter) = self.line.get(position) else { return };
            let (ticket, rooms) = (waiter.ticket, waiter.rooms);
            if rooms < narrowest && self.fits(rooms) {
                self.line.remove(position);
                self.in_use += rooms;
                self.charge_passing(position, rooms);
                granted.push(ticket);
                continue;
            }
            if self.is_barrier(waiter) {
                return;
            }
            narrowest = narrowest.min(rooms);
            position += 1;
        }
    }
}

#[cfg(test)]
#[path = "window_test.rs"]
mod tests;
