//! The applied state as readers of this process see it.

use std::sync::Arc;

use arc_swap::ArcSwap;
use smg_fleet::Revision;
use smg_state::State;
use tokio::sync::watch;

/// The applied state, for readers.
#[derive(Debug)]
pub(crate) struct Published {
    /// The state.
    pub state: ArcSwap<State>,
    /// Its revision.
    pub revision: watch::Sender<Revision>,
}

impl Published {
    /// Readers see `state`.
    pub fn new(state: Arc<State>) -> Self {
        Self { revision: watch::Sender::new(state.revision()), state: ArcSwap::new(state) }
    }

    /// Readers see `state` from now on, and those who wait are woken.
    pub fn publish(&self, state: Arc<State>) {
        let revision = state.revision();
        self.state.store(state);
        self.revision.send_if_modified(|known| std::mem::replace(known, revision) != revision);
    }
}
