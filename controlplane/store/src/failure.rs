//! The one-way switch of a store: after its first storage error it has failed, and stays so.
//!
//! A failed fsync says nothing about which pages reached the disk, and a retried one may succeed without having written them. So nothing
//! is tried twice: the first error is kept, every later operation is refused with it, and only a new process that reads the files back
//! knows what they hold.

use std::io;

use tokio::sync::watch;

/// Where the first storage error of a store is kept.
#[derive(Debug)]
pub(crate) struct Failure(watch::Sender<Option<String>>);

impl Default for Failure {
    fn default() -> Self {
        Self(watch::Sender::new(None))
    }
}

impl Failure {
    /// Records a storage error, unless there was one before, and returns the one that counts.
    pub fn fail(&self, reason: impl ToString) -> io::Error {
        self.0.send_if_modified(|first| {
            let is_first = first.is_none();
            if is_first {
                let reason = reason.to_string();
                tracing::error!(%reason, "the store has stopped after a storage error");
                *first = Some(reason);
            }
            is_first
        });
        io::Error::other(self.reason().unwrap_or_default())
    }

    /// The first storage error.
    pub fn reason(&self) -> Option<String> {
        self.0.borrow().clone()
    }

    /// Refuses once there was a storage error.
    pub fn check(&self) -> io::Result<()> {
        match &*self.0.borrow() {
            Some(reason) => Err(io::Error::other(reason.clone())),
            None => Ok(()),
        }
    }

    /// A receiver of the first storage error.
    pub fn subscribe(&self) -> watch::Receiver<Option<String>> {
        self.0.subscribe()
    }
}
