//! Log probabilities of a response's texts, by item.

use bytes::BytesMut;

use crate::logprobs::Waiting;
use crate::output::Step;
use crate::write::Put as _;

/// Entries of every item, as the insides of JSON arrays.
#[derive(Debug, Default)]
pub(super) struct Entries {
    waiting: Waiting,
    items: Vec<BytesMut>,
}

impl Entries {
    /// The entries that a step's visible content settles; they belong to the first text of the step.
    pub fn settle(&mut self, step: &Step, top: Option<u32>) -> BytesMut {
        self.waiting.settle(step, top)
    }

    /// Keeps entries of an item.
    pub fn keep(&mut self, item: usize, entries: &[u8]) {
        if entries.is_empty() {
            return;
        }
        if self.items.len() <= item {
            self.items.resize_with(item + 1, BytesMut::new);
        }
        if let Some(kept) = self.items.get_mut(item) {
            let first = kept.is_empty();
            kept.comma(first).extend_from_slice(entries);
        }
    }

    /// The entries of an item.
    pub fn of(&self, item: usize) -> &[u8] {
        self.items.get(item).map_or(&[], |entries| entries)
    }

    /// Entries as an array.
    pub fn write(entries: &[u8], out: &mut BytesMut) {
        out.raw("[").extend_from_slice(entries);
        out.raw("]");
    }
}
