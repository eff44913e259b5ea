//! The queue in front of the prefill workers of one model: a ledger. Pure: no clock, no tasks.
//!
//! Invariants
//! * first in, first out: only the head may choose a worker, so nobody who came later takes the place that it waits for;
//! * at most `room` requests wait;
//! * whoever leaves, served or not, leaves nothing behind, and the next one in line is the head at once.

use std::collections::VecDeque;

/// A place in the line.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Ticket(u64);

/// The line.
#[derive(Debug, Default)]
pub struct Line {
    waiting: VecDeque<Ticket>,
    next: u64,
}

impl Line {
    /// Takes the last place; `None` if `room` requests wait already.
    pub fn join(&mut self, room: u64) -> Option<Ticket> {
        if self.waiting.len() as u64 >= room {
            return None;
        }
        let ticket = Ticket(self.next);
        self.next += 1;
        self.waiting.push_back(ticket);
        Some(ticket)
    }

    /// Who chooses next.
    pub fn head(&self) -> Option<Ticket> {
        self.waiting.front().copied()
    }

    /// Gives a place up. True if it was the head's: then another one is the head, if anybody waits.
    pub fn leave(&mut self, ticket: Ticket) -> bool {
        let was_head = self.head() == Some(ticket);
        if was_head {
            self.waiting.pop_front();
        } else {
            self.waiting.retain(|waiting| *waiting != ticket);
        }
        was_head
    }

    /// How many wait.
    pub fn len(&self) -> usize {
        self.waiting.len()
    }

    /// Whether nobody waits.
    pub fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn whoever_came_first_chooses_first_and_nobody_jumps_the_line() {
        let mut line = Line::default();
        let tickets: Vec<Ticket> = (0..3).map(|_| line.join(3).unwrap()).collect();
        assert_eq!(line.join(3), None, "there is no room");
        assert_eq!(line.head(), Some(tickets[0]));
        assert!(!line.leave(tickets[1]), "giving up in the middle moves nobody to the head");
        assert!(line.leave(tickets[0]));
        assert_eq!(line.head(), Some(tickets[2]));
        assert!(!line.leave(tickets[0]), "leaving twice takes nobody's place");
        assert!(line.leave(tickets[2]) && line.is_empty());
    }

    #[test]
    fn a_queue_without_room_lets_nobody_wait() {
        assert_eq!(Line::default().join(0), None);
    }

    proptest! {
        #[test]
        fn heads_come_in_the_order_of_arrival_whoever_gives_up(steps in proptest::collection::vec((0u8..3, 0usize..8), 0..200)) {
            let (mut line, mut model) = (Line::default(), Vec::new());
            for (step, which) in steps {
                match step {
                    0 => match line.join(6) {
                        Some(ticket) => {
                            prop_assert!(model.len() < 6);
                            model.push(ticket);
                        }
                        None => prop_assert_eq!(model.len(), 6),
                    },
                    1 if !model.is_empty() => prop_assert!(line.leave(model.remove(0))),
                    _ if !model.is_empty() => {
                        let index = which % model.len();
                        prop_assert_eq!(line.leave(model.remove(index)), index == 0);
                    }
                    _ => {}
                }
                prop_assert_eq!(line.head(), model.first().copied());
                prop_assert_eq!(line.len(), model.len());
            }
        }
    }
}
