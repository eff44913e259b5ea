//! Snapshots: how many stay, what the log keeps, and what a damaged one costs.

use std::fs;

use super::*;
use crate::raft::snapshot::Snapshots;

fn snapshot_files(path: &Path) -> Vec<PathBuf> {
    let mut files: Vec<(u64, PathBuf)> = fs::read_dir(path)
        .unwrap()
        .filter_map(|entry| {
            let path = entry.unwrap().path();
            let name = path.file_name()?.to_str()?.strip_suffix(dir::SNAPSHOT)?.to_owned();
            Some((name.rsplit('-').next()?.parse().ok()?, path))
        })
        .collect();
    files.sort_unstable();
    files.into_iter().map(|(_, path)| path).collect()
}

fn first_index(path: &Path) -> Option<u64> {
    let (database, recovered) = database::open(&path.join("raft.redb")).unwrap();
    database.close().unwrap();
    recovered.last_purged.map(|id| id.index() + 1)
}

fn flip(path: &Path, at: usize) {
    let mut bytes = fs::read(path).unwrap();
    let at = at.min(bytes.len() - 1);
    bytes[at] ^= 0x10;
    fs::write(path, bytes).unwrap();
}

/// Fills a store and stops it; returns its state.
async fn filled(options: &RaftOptions, commands: u64) -> Arc<State> {
    let store = RaftStore::open(options.clone()).await.unwrap();
    propose_all(&store, (0..commands).map(|n| put_policy(n % 50)), 256).await;
    let state = store.local();
    store.shutdown().await;
    state
}

#[tokio::test(flavor = "multi_thread")]
async fn a_long_history_leaves_three_snapshots_and_a_short_log() {
    let directory = fast_directory();
    let options = RaftOptions { snapshot_every: 2_000, keep_entries: 1_000, ..options(directory.path()) };
    let before = filled(&options, 12_000).await;
    assert_eq!(before.revision(), 12_001);
    assert!((1..=3).contains(&snapshot_files(directory.path()).len()));
    assert!(first_index(directory.path()).unwrap() > 5_000);
    let store = RaftStore::open(options).await.unwrap();
    assert_eq!(store.local(), before);
    store.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_damaged_snapshot_is_skipped_while_the_log_covers_the_gap() {
    let directory = fast_directory();
    let options = RaftOptions { snapshot_every: 500, keep_entries: 10_000, ..options(directory.path()) };
    let before = filled(&options, 2_500).await;
    let files = snapshot_files(directory.path());
    assert!(files.len() >= 2, "{files:?}");
    // From the newest to the oldest; at the end the log alone holds everything.
    for (round, file) in files.iter().rev().enumerate() {
        let newest_whole = files.len() - 1 - round;
        flip(file, [3, 20, usize::MAX][round % 3]);
        let damaged = fs::read(file).unwrap();
        let opened = RaftStore::open(RaftOptions { snapshot_every: 1_000_000, ..options.clone() }).await;
        if newest_whole == 0 {
            let error = opened.unwrap_err();
            assert!(matches!(error, OpenError::Damaged { .. }), "{error}");
        } else {
            let store = opened.unwrap();
            assert_eq!(store.local(), before);
            store.shutdown().await;
        }
        assert_eq!(fs::read(file).unwrap(), damaged, "nothing is repaired in place");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_damaged_snapshot_whose_entries_are_gone_refuses_to_open() {
    let directory = fast_directory();
    let options = RaftOptions { snapshot_every: 1_000, keep_entries: 10, ..options(directory.path()) };
    filled(&options, 5_000).await;
    let files = snapshot_files(directory.path());
    flip(files.last().unwrap(), 60);
    let listing = dir::names(directory.path()).unwrap();
    let error = RaftStore::open(options).await.unwrap_err();
    assert!(matches!(error, OpenError::Damaged { .. }), "{error}");
    assert!(error.to_string().contains("does not hold every entry since"), "{error}");
    assert_eq!(dir::names(directory.path()).unwrap(), listing, "nothing was removed");
}

#[tokio::test(flavor = "multi_thread")]
async fn any_flipped_bit_of_a_snapshot_is_noticed() {
    let directory = fast_directory();
    let options = RaftOptions { snapshot_every: 20, ..options(directory.path()) };
    filled(&options, 30).await;
    let file = snapshot_files(directory.path()).pop().unwrap();
    let good = fs::read(&file).unwrap();
    let (database, recovered) = database::open(&directory.path().join("raft.redb")).unwrap();
    database.close().unwrap();
    // Alone in a directory, so that no other snapshot hides what is noticed.
    let alone = fast_directory();
    let copy = alone.path().join(file.file_name().unwrap());
    let open = |bytes: &[u8]| {
        fs::write(&copy, bytes).unwrap();
        Snapshots::open(alone.path(), &recovered)
    };
    open(&good).unwrap();
    for at in 0..good.len() {
        let mut bad = good.clone();
        bad[at] ^= 1 << (at % 8);
        assert!(open(&bad).is_err(), "byte {at}");
    }
    for cut in (0..good.len()).step_by(7) {
        assert!(open(&good[..cut]).is_err(), "cut at {cut}");
    }
}
