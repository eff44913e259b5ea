//! Tests of the store as a whole, and what they share.

use std::path::Path;

use smg_fleet::{Origin, WorkerId, WorkerSpec, WorkerType};
use smg_state::codec::encode_state;

use super::*;

mod conformance;
mod reopening;

fn envelope(command: Command) -> Envelope {
    Envelope {
        command_id: Uuid::new_v4(),
        actor: "test".into(),
        proposed_at_unix_ms: 1_000,
        expected_revision: None,
        command,
    }
}

/// A command that creates the worker of a URL.
fn create(url: &str) -> Envelope {
    let spec = Box::new(WorkerSpec::new(url, WorkerType::Prefill));
    envelope(Command::CreateWorker { id: WorkerId(Uuid::now_v7()), spec, origin: Origin::Api })
}

fn options(path: &Path) -> RaftOptions {
    RaftOptions::new(path, "127.0.0.1:7443").bootstrap(true)
}

async fn open(path: &Path) -> Arc<RaftStore> {
    RaftStore::open(options(path)).await.unwrap()
}

/// The canonical bytes of the applied state.
fn bytes(store: &impl ClusterStore) -> Vec<u8> {
    encode_state(&store.local())
}
