//! Bootstrap rooms: where the two legs of a parallel dispatch meet.
//!
//! A room belongs to one dispatch. SGLang's rooms are numbers of 31 bits over gRPC, so that a busy gateway would draw the same one twice
//! before long; two dispatches in one room would mix up their KV caches or stall. So a room that is in use by this gateway is not drawn
//! again before both of its legs are over, the time of a deferred abort included.

use std::collections::HashSet;
use std::sync::Arc;

use parking_lot::Mutex;

/// Draws before a room is taken although it might be in use: with fewer than a billion rooms in use this does not happen.
const DRAWS: usize = 64;

/// The rooms in use by this gateway.
#[derive(Debug, Default)]
pub struct Rooms {
    used: Mutex<HashSet<u64>>,
}

/// A room in use. Dropping the last handle gives it back.
#[derive(Debug)]
pub struct Room {
    number: u64,
    rooms: Arc<Rooms>,
}

impl Room {
    /// Its number.
    pub fn number(&self) -> u64 {
        self.number
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        self.rooms.used.lock().remove(&self.number);
    }
}

impl Rooms {
    /// A room that no other dispatch of this gateway uses; `draw` yields rooms at random.
    pub fn take(self: &Arc<Self>, mut draw: impl FnMut() -> u64) -> Arc<Room> {
        let mut used = self.used.lock();
        let mut number = draw();
        for _ in 0..DRAWS {
            if used.insert(number) {
                break;
            }
            number = draw();
        }
        drop(used);
        Arc::new(Room { number, rooms: Arc::clone(self) })
    }

    /// How many are in use.
    pub fn len(&self) -> usize {
        self.used.lock().len()
    }

    /// Whether none is in use.
    pub fn is_empty(&self) -> bool {
        self.used.lock().is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_room_in_use_is_not_drawn_again_until_its_last_leg_is_over() {
        let rooms = Arc::new(Rooms::default());
        let mut next = [7, 7, 7, 8, 7].into_iter();
        let mut draw = || next.next().unwrap_or(99);
        let first = rooms.take(&mut draw);
        let other_leg = Arc::clone(&first);
        let second = rooms.take(&mut draw);
        assert_eq!((first.number(), second.number()), (7, 8));
        drop(first);
        assert_eq!(rooms.len(), 2);
        drop(other_leg);
        assert_eq!(rooms.len(), 1);
        assert_eq!(rooms.take(&mut draw).number(), 7);
    }
}
