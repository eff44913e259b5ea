//! A store without a log: state lives in this process and dies with it.

use std::sync::Arc;

use arc_swap::ArcSwap;
use futures::FutureExt;
use futures::future::BoxFuture;
use parking_lot::Mutex;
use smg_fleet::Revision;
use smg_state::{Envelope, Outcome, State};
use tokio::sync::watch;

use crate::cluster::ClusterStatus;
use crate::{ClusterStore, Leadership, StoreError};

/// The in-memory store. It is always its own leader.
#[derive(Debug)]
pub struct MemoryStore {
    writer: Mutex<State>,
    applied: ArcSwap<State>,
    changes: watch::Sender<Revision>,
    leadership: watch::Sender<Leadership>,
    failure: watch::Sender<Option<String>>,
}

impl Default for MemoryStore {
    fn default() -> Self {
        Self {
            writer: Mutex::default(),
            applied: ArcSwap::default(),
            changes: watch::Sender::new(0),
            leadership: watch::Sender::new(Leadership::Leader),
            failure: watch::Sender::new(None),
        }
    }
}

impl ClusterStore for MemoryStore {
    fn propose(&self, envelope: Envelope) -> BoxFuture<'_, Result<Outcome, StoreError>> {
        async move {
            let mut state = self.writer.lock();
            let outcome = state.apply(&envelope);
            self.applied.store(Arc::new(state.clone()));
            self.changes.send_replace(state.revision());
            Ok(outcome)
        }
        .boxed()
    }

    fn read_barrier(&self) -> BoxFuture<'_, Result<Revision, StoreError>> {
        async move { Ok(self.applied.load().revision()) }.boxed()
    }

    fn local(&self) -> Arc<State> {
        self.applied.load_full()
    }

    fn changes(&self) -> watch::Receiver<Revision> {
        self.changes.subscribe()
    }

    fn leadership(&self) -> watch::Receiver<Leadership> {
        self.leadership.subscribe()
    }

    fn failure(&self) -> watch::Receiver<Option<String>> {
        self.failure.subscribe()
    }

    fn cluster(&self, _local: bool) -> BoxFuture<'_, Result<ClusterStatus, StoreError>> {
        async move { Ok(ClusterStatus { leader: Some(0), ..ClusterStatus::default() }) }.boxed()
    }

    fn shutdown(&self) -> BoxFuture<'_, ()> {
        async {}.boxed()
    }
}
