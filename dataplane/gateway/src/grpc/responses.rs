//! The responses that this gateway keeps (OpenAI responses API, `store`): in memory, for as long as there is room.
//!
//! A response can be read, deleted, and gone on from by later requests. It is kept by the gateway that gave it and by no other, dies with the
//! process, and leaves when newer ones need its room: whoever needs more keeps the conversation himself.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use parking_lot::Mutex;
use smg_apis::responses::Stored;

/// Most responses kept.
const MOST: usize = 10_000;
/// Most bytes that they take together.
const MOST_BYTES: usize = 256 * 1024 * 1024;
/// What one costs beside its texts.
const OVERHEAD: usize = 512;

/// The kept responses.
#[derive(Debug, Default)]
pub struct Shelf {
    kept: Mutex<Kept>,
}

#[derive(Debug, Default)]
struct Kept {
    by_id: HashMap<String, (Arc<Stored>, usize)>,
    /// Ids, the oldest first; deleted ones may be among them.
    order: VecDeque<String>,
    bytes: usize,
}

impl Shelf {
    /// Keeps a response. One that is larger than the whole room is not kept.
    pub fn keep(&self, stored: Stored) {
        self.keep_within(stored, MOST, MOST_BYTES);
    }

    fn keep_within(&self, stored: Stored, most: usize, most_bytes: usize) {
        let conversation: usize = stored.conversation.iter().map(size_of_value).sum();
        let bytes = stored.response.len() + conversation + stored.id.len() * 2 + OVERHEAD;
        if bytes > most_bytes {
            return;
        }
        let mut kept = self.kept.lock();
        while (kept.by_id.len() >= most || kept.bytes + bytes > most_bytes)
            && let Some(oldest) = kept.order.pop_front()
        {
            kept.remove(&oldest);
        }
        let id = stored.id.clone();
        kept.remove(&id);
        kept.bytes += bytes;
        kept.order.push_back(id.clone());
        kept.by_id.insert(id, (Arc::new(stored), bytes));
        // Ids of deleted responses go when they are half of all.
        if kept.order.len() > kept.by_id.len() * 2 + 16 {
            let Kept { by_id, order, .. } = &mut *kept;
            order.retain(|id| by_id.contains_key(id));
        }
    }

    /// A kept response.
    pub fn get(&self, id: &str) -> Option<Arc<Stored>> {
        self.kept.lock().by_id.get(id).map(|(stored, _)| Arc::clone(stored))
    }

    /// Forgets a response; false when there is none of that id.
    pub fn delete(&self, id: &str) -> bool {
        self.kept.lock().remove(id)
    }
}

impl Kept {
    fn remove(&mut self, id: &str) -> bool {
        let Some((_, bytes)) = self.by_id.remove(id) else { return false };
        self.bytes -= bytes;
        true
    }
}

/// About how many bytes a value takes.
fn size_of_value(value: &serde_json::Value) -> usize {
    use serde_json::Value;
    let inside = match value {
        Value::Null | Value::Bool(_) | Value::Number(_) => 0,
        Value::String(text) => text.len(),
        Value::Array(elements) => elements.iter().map(size_of_value).sum(),
        Value::Object(members) => members.iter().map(|(name, value)| name.len() + 32 + size_of_value(value)).sum(),
    };
    inside + size_of::<Value>()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stored(id: &str, bytes: usize) -> Stored {
        Stored { id: id.to_owned(), response: vec![b'x'; bytes].into(), conversation: Vec::new() }
    }

    #[test]
    fn the_oldest_leave_when_there_is_no_more_room() {
        let shelf = Shelf::default();
        for id in ["a", "b", "c"] {
            shelf.keep_within(stored(id, 10), 2, 1 << 20);
        }
        assert!(shelf.get("a").is_none() && shelf.get("b").is_some() && shelf.get("c").is_some());
        shelf.keep_within(stored("d", 1000), 10, 2000);
        assert!(shelf.get("b").is_none(), "bytes count too");
        shelf.keep_within(stored("e", 5000), 10, 2000);
        assert!(shelf.get("e").is_none() && shelf.get("d").is_some(), "what never fits pushes nobody out");
    }

    #[test]
    fn a_deleted_response_is_gone_and_leaves_nothing_behind() {
        let shelf = Shelf::default();
        for round in 0..100 {
            let id = format!("r{round}");
            shelf.keep_within(stored(&id, 10), 10, 1 << 20);
            assert!(shelf.delete(&id) && !shelf.delete(&id) && shelf.get(&id).is_none());
        }
        let kept = shelf.kept.lock();
        assert_eq!((kept.bytes, kept.by_id.len()), (0, 0));
        assert!(kept.order.len() < 32);
    }
}
