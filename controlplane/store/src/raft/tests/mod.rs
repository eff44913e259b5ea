//! Tests of the store as a whole, and what they share.

use std::path::{Path, PathBuf};

use smg_fleet::{PolicyDocument, WorkerSpec, WorkerType};
use smg_messages::disk as pb;
use tempfile::TempDir;

use super::*;
use crate::suite::{create, envelope};

mod cluster;
mod conformance;
mod crash;
mod crash_matrix;
mod damage;
mod limits;
mod model;
mod properties;
mod reopening;
mod restoring;
mod snapshots;
mod storage_errors;

/// A command that always changes the state and never makes it larger than `n` documents.
fn put_policy(n: u64) -> Envelope {
    envelope(Command::PutPolicy { model: format!("m{n}"), document: Box::new(PolicyDocument::default()) })
}

fn options(path: &Path) -> RaftOptions {
    RaftOptions::new(path, "127.0.0.1:7443").bootstrap(true)
}

async fn open(path: &Path) -> Arc<RaftStore> {
    RaftStore::open(options(path)).await.unwrap()
}

/// A directory in memory where there is one: these tests are about order and content, not about the disk.
fn fast_directory() -> TempDir {
    TempDir::new_in("/dev/shm").unwrap_or_else(|_| TempDir::new().unwrap())
}

/// Proposes commands with up to `width` on their way, and returns when all are acknowledged.
async fn propose_all(store: &Arc<RaftStore>, commands: impl Iterator<Item = Envelope>, width: usize) {
    let mut running = tokio::task::JoinSet::new();
    for command in commands {
        if running.len() >= width {
            running.join_next().await.unwrap().unwrap();
        }
        let store = Arc::clone(store);
        running.spawn(async move {
            store.propose(command).await.unwrap();
        });
    }
    while let Some(done) = running.join_next().await {
        done.unwrap();
    }
}

/// Deterministic choices of a test (splitmix64). The seed is part of the test or printed by it.
struct Choices(u64);

impl Choices {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)) % bound
    }

    /// A seed that differs from run to run.
    fn fresh() -> Self {
        let seed = Uuid::new_v4().as_u64_pair().1;
        println!("seed {seed}");
        Self(seed)
    }
}
