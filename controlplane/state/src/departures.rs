//! What left the fleet lately: the names of workers and policy documents that are no more, and when they went.
//!
//! Problem: whoever follows the fleet may have heard of it from one member up to any revision, and asks another one what happened since. Each
//! object carries the revision of its last change, so the state itself tells what is new or changed since then; what is gone it cannot tell.
//! So the names of what is gone are a part of the state, and every member answers alike.
//!
//! Invariants
//! * an object that was there at a revision not before [`Departures::since`] and is no more is named, with the revision that took it away;
//! * names are bounded: the oldest are forgotten first, and `since` moves on.

use std::collections::{BTreeSet, VecDeque};

use smg_fleet::{Revision, WorkerId};

use crate::state::State;

/// Most names.
pub const MAX_DEPARTURES: usize = 2_048;

/// The name of something that is gone. It may be back: a policy document under the same name.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Departed {
    /// A worker.
    Worker(WorkerId),
    /// The policy document of a model; empty = the fleet's own.
    Policy(String),
}

/// The newest of them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Departures {
    /// What went at or before this revision may be forgotten.
    pub(crate) since: Revision,
    /// In the order in which they went.
    pub(crate) names: VecDeque<(Revision, Departed)>,
}

impl Departures {
    /// None so far, and nothing is known of the time up to this revision.
    pub fn none_since(since: Revision) -> Self {
        Self { since, names: VecDeque::new() }
    }

    /// Notes what a revision takes away.
    pub(crate) fn add(&mut self, revision: Revision, departed: Departed) {
        self.names.push_back((revision, departed));
        while self.names.len() > MAX_DEPARTURES {
            if let Some((revision, _)) = self.names.pop_front() {
                self.since = revision;
            }
        }
    }

    /// What went after a revision, each name once; `None` when some of it may be forgotten.
    pub fn after(&self, revision: Revision) -> Option<BTreeSet<&Departed>> {
        let later = self.names.iter().rev().take_while(|(at, _)| *at > revision);
        (revision >= self.since).then(|| later.map(|(_, departed)| departed).collect())
    }
}

impl State {
    /// What left the fleet lately.
    pub fn departures(&self) -> &Departures {
        &self.departures
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn policy(n: usize) -> Departed {
        Departed::Policy(n.to_string())
    }

    #[test]
    fn what_went_after_a_revision_is_told_once_as_long_as_it_is_remembered() {
        let mut departures = Departures::default();
        for (revision, n) in [(3, 1), (3, 2), (5, 1)] {
            departures.add(revision, policy(n));
        }
        let told = |revision| departures.after(revision).map(|names| names.into_iter().cloned().collect::<Vec<_>>());
        assert_eq!(told(0), Some(vec![policy(1), policy(2)]));
        assert_eq!(told(3), Some(vec![policy(1)]));
        assert_eq!(told(5), Some(vec![]));
        assert_eq!(Departures::none_since(7).after(6), None, "nobody knows what went before");
        assert_eq!(Departures::none_since(7).after(7), Some(BTreeSet::new()));
    }

    #[test]
    fn the_oldest_names_are_forgotten_and_nobody_is_told_too_little() {
        let mut departures = Departures::default();
        for n in 0..MAX_DEPARTURES + 3 {
            departures.add(10 + n as Revision / 2, policy(n));
        }
        assert_eq!(departures.names.len(), MAX_DEPARTURES);
        // 0, 1 and 2 are forgotten; 3 went with 2, at revision 11.
        assert_eq!(departures.after(10), None);
        assert_eq!(departures.after(11).unwrap().len(), MAX_DEPARTURES - 1);
    }
}
