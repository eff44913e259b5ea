//! One task for each worker that needs one.
//!
//! A duty says which workers need a task and why; the crew starts what is missing, cancels what is no longer wanted or wanted for another
//! reason, and leaves the rest alone. A task that ended by itself is not started again for the same reason.

use std::collections::BTreeMap;

use smg_fleet::WorkerId;
use tokio::task::JoinSet;
use tokio_util::sync::{CancellationToken, DropGuard};

/// The tasks of one duty. Dropping the crew cancels them all.
#[derive(Debug)]
pub(crate) struct Crew<Reason> {
    posts: BTreeMap<WorkerId, (Reason, DropGuard)>,
    tasks: JoinSet<()>,
}

impl<Reason: PartialEq> Crew<Reason> {
    /// No tasks.
    pub fn new() -> Self {
        Self { posts: BTreeMap::new(), tasks: JoinSet::new() }
    }

    /// Makes the tasks those of `wanted`.
    pub fn staff<F>(
        &mut self,
        wanted: BTreeMap<WorkerId, Reason>,
        start: impl Fn(WorkerId, &Reason, CancellationToken) -> F,
    ) where
        F: Future<Output = ()> + Send + 'static,
    {
        self.posts.retain(|id, (reason, _)| wanted.get(id) == Some(reason));
        for (id, reason) in wanted {
            if self.posts.contains_key(&id) {
                continue;
            }
            let token = CancellationToken::new();
            self.tasks.spawn(start(id, &reason, token.clone()));
            self.posts.insert(id, (reason, token.drop_guard()));
        }
    }

    /// Waits for a task to end and forgets it; for ever while there is none.
    pub async fn reap(&mut self) {
        match self.tasks.join_next().await {
            Some(Ok(())) => {}
            Some(Err(error)) => tracing::error!(target: "smg", %error, "a task for a worker died"),
            None => std::future::pending().await,
        }
    }

    /// How many tasks run.
    pub fn len(&self) -> usize {
        self.tasks.len()
    }
}
