//! Faults that the simulation plants, one at a time, to see that it would find them.
//!
//! Outside of tests [`planted`] is `false` at compile time.

/// A rule that is broken on purpose.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mutant {
    /// Transactions of the log never wait for the disk.
    NothingFlushed,
    /// Entries count as durable before their transaction has begun.
    AcknowledgedEarly,
    /// A vote is not written.
    VoteNotSaved,
    /// One entry more than the snapshot has is dropped.
    PurgedTooFar,
    /// An installed snapshot moves the place in the log but not the state.
    SnapshotNotInstalled,
    /// A snapshot says that it has one entry more than it has.
    SnapshotOfTomorrow,
    /// Outcomes are handed out before the state that has them.
    AnsweredUnpublished,
    /// A part of the entries counts as all of them.
    PartCountsAsAll,
    /// A write that was not confirmed in time counts as one that did not happen.
    UnknownMeansNo,
    /// Whoever calls from a member's address counts as that member.
    AnyDisk,
}

#[cfg(test)]
thread_local! {
    static PLANTED: std::cell::Cell<Option<Mutant>> = const { std::cell::Cell::new(None) };
}

/// Plants a fault in this thread, or removes it.
#[cfg(test)]
pub(crate) fn plant(mutant: Option<Mutant>) {
    PLANTED.with(|planted| planted.set(mutant));
}

/// Whether this fault is planted.
#[cfg(test)]
pub(crate) fn planted(mutant: Mutant) -> bool {
    PLANTED.with(|planted| planted.get() == Some(mutant))
}

/// Whether this fault is planted: never.
#[cfg(not(test))]
pub(crate) const fn planted(_: Mutant) -> bool {
    false
}
