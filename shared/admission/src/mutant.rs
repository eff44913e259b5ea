//! Faults that the tests plant, one at a time, to see that they would be found.
//!
//! Outside of tests [`planted`] is `false` at compile time.

/// A rule that is broken on purpose.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mutant {
    /// What a gateway believes to be anchored is lowered before it said that it knows.
    AnchorLoweredEarly,
    /// Updates are applied whatever their order.
    UpdatesOutOfOrder,
    /// A report counts as an acknowledgement of what it has not seen.
    AckOfOlderUpdate,
    /// The lease runs from the arrival of the answer.
    LeaseFromAnswer,
    /// The lease has no margin for clocks.
    LeaseWithoutMargin,
    /// The control plane lets leases end before the gateway does.
    ExpiredEarly,
    /// Slots of the silent are free at once.
    NoZombies,
    /// More is granted than is free.
    Overgrant,
    /// A share falls to what is in use, below what the gateway may still admit.
    ShareFallsToUse,
    /// Evidence counts before dispatches under way have arrived.
    EvidenceWithoutGuard,
    /// Evidence forgets the requests that wait in the engine.
    EvidenceOfRunningOnly,
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
