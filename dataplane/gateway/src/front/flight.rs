//! An errand that many ask for and that runs once at a time.
//!
//! Whoever asks while it runs waits for the same outcome, so that any number of callers costs engines no more than one. It runs as long as
//! anybody waits for it, and ends when nobody does.

use futures::FutureExt;
use futures::future::{BoxFuture, WeakShared};
use parking_lot::Mutex;

/// An errand whose outcome is a `T`.
pub(super) struct Flight<T: Clone>(Mutex<Option<WeakShared<BoxFuture<'static, T>>>>);

impl<T: Clone> Default for Flight<T> {
    fn default() -> Self {
        Self(Mutex::new(None))
    }
}

impl<T: Clone + Send + Sync + 'static> Flight<T> {
    /// The outcome of the errand that runs, or of a new one that `begin` makes.
    pub(super) async fn join<F>(&self, begin: impl FnOnce() -> F) -> T
    where
        F: Future<Output = T> + Send + 'static,
    {
        let flight = {
            let mut current = self.0.lock();
            let running = current.as_ref().and_then(WeakShared::upgrade).filter(|flight| flight.peek().is_none());
            running.unwrap_or_else(|| {
                let flight = begin().boxed().shared();
                *current = flight.downgrade();
                flight
            })
        };
        flight.await
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use tokio::sync::Semaphore;

    use super::*;

    #[tokio::test]
    async fn callers_at_the_same_time_share_one_errand_and_the_next_one_gets_a_new_one() {
        let (flight, begun, gate) = (Flight::default(), Arc::new(AtomicUsize::new(0)), Arc::new(Semaphore::new(0)));
        let errand = || {
            let (number, gate) = (begun.fetch_add(1, Ordering::Relaxed), Arc::clone(&gate));
            async move {
                let _permit = gate.acquire().await;
                number
            }
        };
        let crowd = futures::future::join_all((0..100).map(|_| flight.join(errand)));
        let opens = async {
            tokio::task::yield_now().await;
            gate.add_permits(1);
        };
        let (outcomes, ()) = tokio::join!(crowd, opens);
        assert_eq!(outcomes, [0; 100]);
        assert_eq!(flight.join(errand).await, 1, "what is over is not asked again for its outcome");
    }

    #[tokio::test]
    async fn an_errand_that_nobody_waits_for_ends_and_one_caller_that_leaves_ends_nothing() {
        let flight = Flight::default();
        let (sender, alive) = tokio::sync::watch::channel(());
        let errand = || async move {
            let _alive = alive;
            std::future::pending::<u8>().await
        };
        let mut first = Box::pin(flight.join(errand));
        assert!(first.as_mut().now_or_never().is_none());
        let mut second = Box::pin(flight.join(|| async { 1 }));
        assert!(second.as_mut().now_or_never().is_none(), "it joins the one that runs");
        drop(first);
        assert_eq!(sender.receiver_count(), 1);
        drop(second);
        assert_eq!(sender.receiver_count(), 0);
    }
}
