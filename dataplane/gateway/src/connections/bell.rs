//! Waking for what is driven by hand.
//!
//! Whoever drives a connection in its own task is also the one who takes its frames, and taking one wakes whoever drives the connection:
//! without this, each token would wake the very task that has just relayed it, for nothing. A [`Bell`] stands between: what wakes the
//! connection is remembered, and the task is woken only while it waits.
//!
//! Invariants
//! * a ring is never lost: it is kept until [`Bell::rung`] takes it;
//! * a task that waits ([`Bell::wake_when_rung`]) is woken by each ring, also by one that came before;
//! * a task that does not wait is not woken: it asks again before it waits.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Wake, Waker};

use futures::task::AtomicWaker;

/// Remembers that something happened, and wakes whoever waits for it.
#[derive(Debug)]
pub struct Bell {
    rung: AtomicBool,
    waiting: AtomicWaker,
}

impl Bell {
    /// A bell that has rung: what is new has to be looked at.
    pub fn new() -> Arc<Self> {
        Arc::new(Self { rung: AtomicBool::new(true), waiting: AtomicWaker::new() })
    }

    /// Whether it has rung since it was last asked. Nobody waits any more.
    pub fn rung(&self) -> bool {
        drop(self.waiting.take());
        self.rung.swap(false, Ordering::AcqRel)
    }

    /// Wakes `task` when it rings, at once if it has.
    pub fn wake_when_rung(&self, task: &Waker) {
        self.waiting.register(task);
        if self.rung.load(Ordering::Acquire) {
            self.waiting.wake();
        }
    }
}

impl Wake for Bell {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.rung.store(true, Ordering::Release);
        self.waiting.wake();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;

    use super::*;

    #[derive(Default)]
    struct Counting(AtomicUsize);

    impl Wake for Counting {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    #[test]
    fn a_ring_wakes_whoever_waits_and_is_kept_for_whoever_does_not() {
        let (bell, task) = (Bell::new(), Arc::new(Counting::default()));
        let (ring, waker) = (Waker::from(Arc::clone(&bell)), Waker::from(Arc::clone(&task)));
        let woken = || task.0.load(Ordering::Relaxed);
        assert!(bell.rung(), "what is new has to be looked at");
        assert!(!bell.rung());

        ring.wake_by_ref();
        assert_eq!(woken(), 0, "nobody waits");
        bell.wake_when_rung(&waker);
        assert_eq!(woken(), 1, "it had rung before");
        assert!(bell.rung());

        bell.wake_when_rung(&waker);
        assert_eq!(woken(), 1);
        ring.wake_by_ref();
        assert_eq!(woken(), 2);
        assert!(bell.rung());
        ring.wake_by_ref();
        assert_eq!(woken(), 2, "it was asked: it does not wait any more");
        assert!(bell.rung());
    }
}
