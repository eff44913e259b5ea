//! How busy an engine is: requests inside, requests running, and what they have cost.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use parking_lot::Mutex;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// A counter that goes up and down and remembers its highest value.
#[derive(Default)]
struct Level {
    now: AtomicUsize,
    peak: AtomicUsize,
}

impl Level {
    fn up(&self) {
        let now = self.now.fetch_add(1, Ordering::Relaxed) + 1;
        self.peak.fetch_max(now, Ordering::Relaxed);
    }

    fn down(&self) {
        self.now.fetch_sub(1, Ordering::Relaxed);
    }
}

#[derive(Default)]
struct Levels {
    active: Level,
    waiting: Level,
    running: Level,
    ranks: Mutex<BTreeMap<u64, RankLevel>>,
}

/// Requests of one data-parallel rank.
#[derive(Clone, Copy, Default)]
pub(crate) struct RankLevel {
    pub(crate) waiting: usize,
    pub(crate) running: usize,
}

impl Levels {
    fn of_rank(&self, rank: u64, change: impl FnOnce(&mut RankLevel)) {
        change(self.ranks.lock().entry(rank).or_default());
    }
}

/// See the module's head.
#[derive(Default)]
pub(crate) struct Load {
    levels: Arc<Levels>,
    /// Places in the running batch; without a limit none are counted out.
    places: Mutex<Option<Arc<Semaphore>>>,
    /// Prompt tokens computed here.
    pub(crate) local_tokens: AtomicU64,
    /// Prompt tokens whose KV came from another engine.
    pub(crate) external_tokens: AtomicU64,
    /// Tokens generated.
    pub(crate) generated_tokens: AtomicU64,
}

impl Load {
    /// Limits the running batch from now on; requests that run keep their places.
    pub(crate) fn limit(&self, places: Option<usize>) {
        *self.places.lock() = places.map(|places| Arc::new(Semaphore::new(places)));
    }

    /// A generation request is inside the engine until the guard is dropped.
    pub(crate) fn enter(&self) -> Active {
        self.levels.active.up();
        Active(Arc::clone(&self.levels))
    }

    /// Waits for a place in the running batch.
    pub(crate) async fn run(&self) -> Running {
        self.run_on(0).await
    }

    /// As [`Load::run`], on this data-parallel rank. All ranks share the places.
    pub(crate) async fn run_on(&self, rank: u64) -> Running {
        let places = self.places.lock().clone();
        let permit = match places {
            None => None,
            Some(places) => {
                self.levels.waiting.up();
                self.levels.of_rank(rank, |level| level.waiting += 1);
                let _waiting = Waiting(&self.levels, rank);
                // Never closed, so it always comes.
                places.acquire_owned().await.ok()
            }
        };
        self.levels.running.up();
        self.levels.of_rank(rank, |level| level.running += 1);
        Running { levels: Arc::clone(&self.levels), rank, _permit: permit }
    }

    /// What waits and runs on one data-parallel rank.
    pub(crate) fn rank(&self, rank: u64) -> RankLevel {
        self.levels.ranks.lock().get(&rank).copied().unwrap_or_default()
    }

    pub(crate) fn active(&self) -> usize {
        self.levels.active.now.load(Ordering::Relaxed)
    }

    pub(crate) fn peak_active(&self) -> usize {
        self.levels.active.peak.load(Ordering::Relaxed)
    }

    pub(crate) fn running(&self) -> usize {
        self.levels.running.now.load(Ordering::Relaxed)
    }

    pub(crate) fn peak_running(&self) -> usize {
        self.levels.running.peak.load(Ordering::Relaxed)
    }

    pub(crate) fn waiting(&self) -> usize {
        self.levels.waiting.now.load(Ordering::Relaxed)
    }
}

pub(crate) struct Active(Arc<Levels>);

impl Drop for Active {
    fn drop(&mut self) {
        self.0.active.down();
    }
}

struct Waiting<'a>(&'a Levels, u64);

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.waiting.down();
        self.0.of_rank(self.1, |level| level.waiting -= 1);
    }
}

/// A place in the running batch.
pub(crate) struct Running {
    levels: Arc<Levels>,
    rank: u64,
    _permit: Option<OwnedSemaphorePermit>,
}

impl Drop for Running {
    fn drop(&mut self) {
        self.levels.running.down();
        self.levels.of_rank(self.rank, |level| level.running -= 1);
    }
}
