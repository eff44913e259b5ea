//! The memory of applied commands: a repeated command id returns the first outcome.
//!
//! Bounded by count and by the time in the envelopes, both deterministic: what is forgotten depends on the log alone.

use std::collections::{BTreeMap, VecDeque};

use crate::command::{CommandId, Outcome};

/// Most remembered commands.
pub(crate) const MAX_REMEMBERED: usize = 10_000;
/// How long a command is remembered, by envelope time.
pub(crate) const REMEMBERED_MS: u64 = 3_600_000;

/// One remembered command.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Remembered {
    pub command_id: CommandId,
    pub at_unix_ms: u64,
    pub outcome: Outcome,
}

#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct CommandMemory {
    order: VecDeque<CommandId>,
    known: BTreeMap<CommandId, Remembered>,
}

impl CommandMemory {
    pub fn outcome(&self, id: &CommandId) -> Option<&Outcome> {
        self.known.get(id).map(|remembered| &remembered.outcome)
    }

    pub fn remember(&mut self, remembered: Remembered) {
        let now = remembered.at_unix_ms;
        self.order.push_back(remembered.command_id);
        self.known.insert(remembered.command_id, remembered);
        while let Some(oldest) = self.order.front() {
            let expired = self.known.get(oldest).is_none_or(|old| old.at_unix_ms.saturating_add(REMEMBERED_MS) < now);
            if self.order.len() <= MAX_REMEMBERED && !expired {
                break;
            }
            if let Some(oldest) = self.order.pop_front() {
                self.known.remove(&oldest);
            }
        }
    }

    /// In the order in which they were applied.
    pub fn iter(&self) -> impl Iterator<Item = &Remembered> {
        self.order.iter().filter_map(|id| self.known.get(id))
    }
}
