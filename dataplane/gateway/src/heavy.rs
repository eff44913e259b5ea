//! Work that grows with the size of a request, kept from holding up everybody else.
//!
//! A thread that reads a body of many megabytes, or cuts a long prompt into tokens, serves nobody meanwhile. Such work gets a thread of its
//! own, at most as many at a time as there are cores. Its place is given back when the work is over, not when whoever asked for it has
//! left: clients that come and go cannot make more of it. Work whose client left before it began is never begun.

use std::sync::Arc;

use tokio::runtime::{Handle, RuntimeFlavor};
use tokio::sync::Semaphore;

/// The places for heavy work.
#[derive(Debug, Clone)]
pub struct Heavy(Arc<Semaphore>);

impl Default for Heavy {
    fn default() -> Self {
        Self(Arc::new(Semaphore::new(std::thread::available_parallelism().map_or(1, usize::from))))
    }
}

/// The work did not come to its end.
#[derive(Debug, Clone, Copy)]
pub struct Failed;

impl Heavy {
    /// Does work on `bytes` bytes: here if these are at most `small`, the way to another thread would take longer.
    ///
    /// # Errors
    /// When the work panics.
    pub async fn run<T: Send + 'static>(
        &self,
        bytes: usize,
        small: usize,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, Failed> {
        if bytes <= small {
            return Ok(work());
        }
        let place = Arc::clone(&self.0).acquire_owned().await.map_err(|_| Failed)?;
        let placed = move || {
            let done = work();
            drop(place);
            done
        };
        tokio::task::spawn_blocking(placed).await.map_err(|_| Failed)
    }
}

/// Does work on `bytes` bytes that borrows what it needs. What this thread had to do besides goes on elsewhere if the work is not `small`.
pub fn in_place<T>(bytes: usize, small: usize, work: impl FnOnce() -> T) -> T {
    let several = Handle::try_current().is_ok_and(|handle| handle.runtime_flavor() == RuntimeFlavor::MultiThread);
    if bytes > small && several { tokio::task::block_in_place(work) } else { work() }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::panic)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::mpsc;
    use std::time::Duration;

    use super::*;

    #[tokio::test]
    async fn clients_that_leave_make_no_more_work_at_a_time_than_there_are_places() {
        let heavy = Heavy(Arc::new(Semaphore::new(2)));
        let begun = Arc::new(AtomicUsize::new(0));
        let (release, held) = mpsc::channel::<()>();
        let held = Arc::new(std::sync::Mutex::new(held));
        for _ in 0..10 {
            let (begun, held) = (Arc::clone(&begun), Arc::clone(&held));
            let work = move || {
                begun.fetch_add(1, Ordering::SeqCst);
                let _ = held.lock().unwrap().recv();
            };
            let left = tokio::time::timeout(Duration::from_millis(20), heavy.run(2, 1, work)).await;
            assert!(left.is_err());
        }
        assert!(begun.load(Ordering::SeqCst) <= 2);
        assert_eq!(heavy.0.available_permits(), 0);
        drop(release);
        heavy.run(2, 1, || ()).await.unwrap();
        assert!(begun.load(Ordering::SeqCst) <= 2, "what nobody waits for any more never begins");
    }

    #[tokio::test]
    async fn a_panic_gives_its_place_back() {
        let heavy = Heavy(Arc::new(Semaphore::new(1)));
        assert!(heavy.run(2, 1, || panic!("on purpose")).await.is_err());
        assert_eq!(heavy.run(2, 1, || 7).await.unwrap(), 7);
    }
}
