//! What a store holds after it was stopped and opened again, and who may open it.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::time::Instant;

use super::*;

#[tokio::test(flavor = "multi_thread")]
async fn a_new_store_names_its_cluster_and_leads_it() {
    let directory = tempfile::tempdir().unwrap();
    let store = open(directory.path()).await;
    assert_eq!(*store.leadership().borrow(), Leadership::Leader);
    assert_eq!(store.local().cluster_id(), store.identity().cluster_id);
    assert!(!store.local().history_id().is_nil());
    assert_eq!(store.identity().node_id, 1);
    store.shutdown().await;
    assert_eq!(store.propose(create("http://w:1")).await, Err(StoreError::Closed));
    assert_eq!(store.read_barrier().await, Err(StoreError::Closed));
    assert_eq!(*store.leadership().borrow(), Leadership::Follower);
    assert_eq!(*store.failure().borrow(), None);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reopened_store_leads_at_once_and_has_every_write_and_the_same_identity() {
    let directory = fast_directory();
    let store = open(directory.path()).await;
    for number in 1..=10 {
        let outcome = store.propose(create(&format!("http://w:{number}"))).await.unwrap();
        assert_eq!(outcome.revision, number + 1);
    }
    let (before, identity) = (store.local(), store.identity());
    store.shutdown().await;
    for bootstrap in [false, true, false] {
        let started = Instant::now();
        let store = RaftStore::open(options(directory.path()).bootstrap(bootstrap)).await.unwrap();
        // The election timeout is a second and more; a lone voter does not wait for it.
        assert!(started.elapsed() < Duration::from_millis(900), "{:?}", started.elapsed());
        assert_eq!(store.local(), before);
        assert_eq!(store.identity(), identity);
        assert_eq!(*store.changes().borrow(), before.revision());
        store.shutdown().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_acknowledged_write_is_visible_and_its_repetition_returns_the_first_outcome() {
    let directory = fast_directory();
    let store = open(directory.path()).await;
    let mut changes = store.changes();
    changes.mark_unchanged();
    let command = create("http://w:1");
    let outcome = store.propose(command.clone()).await.unwrap();
    assert!(store.local().worker(outcome.worker_id.unwrap()).is_some());
    assert!(changes.has_changed().unwrap());
    assert_eq!(store.propose(command.clone()).await.unwrap(), outcome);
    store.shutdown().await;
    let store = open(directory.path()).await;
    assert_eq!(store.propose(command).await.unwrap(), outcome);
    assert_eq!(store.read_barrier().await.unwrap(), outcome.revision);
    store.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_directory_in_use_is_refused_until_its_store_has_stopped() {
    let directory = fast_directory();
    let store = open(directory.path()).await;
    let refused = RaftStore::open(options(directory.path())).await.unwrap_err();
    assert!(matches!(refused, OpenError::InUse(_)), "{refused}");
    store.propose(create("http://w:1")).await.unwrap();
    store.shutdown().await;
    open(directory.path()).await.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dropped_store_releases_its_directory() {
    let directory = fast_directory();
    drop(open(directory.path()).await);
    let deadline = Instant::now() + Duration::from_secs(10);
    loop {
        match RaftStore::open(options(directory.path())).await {
            Ok(store) => return store.shutdown().await,
            Err(OpenError::InUse(_)) if Instant::now() < deadline => tokio::task::yield_now().await,
            Err(error) => panic!("{error}"),
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn only_the_owner_may_read_the_files() {
    let parent = fast_directory();
    let path = parent.path().join("a/b");
    let options = RaftOptions { snapshot_every: 5, ..options(&path) };
    let store = RaftStore::open(options).await.unwrap();
    propose_all(&store, (0..20).map(put_policy), 1).await;
    store.shutdown().await;
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(&path), 0o700);
    let files: Vec<_> = fs::read_dir(&path).unwrap().map(|entry| entry.unwrap().path()).collect();
    assert!(files.len() > 2, "{files:?}");
    for file in files {
        assert_eq!(mode(&file), 0o600, "{}", file.display());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_directory_without_data_needs_the_order_to_bootstrap_and_stays_as_it_was() {
    let parent = fast_directory();
    for path in [parent.path().join("absent"), parent.path().to_owned()] {
        let refused = RaftStore::open(options(&path).bootstrap(false)).await.unwrap_err();
        assert!(matches!(refused, OpenError::Empty(_)), "{refused}");
    }
    assert_eq!(fs::read_dir(parent.path()).unwrap().count(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_bootstrap_that_was_cut_short_is_finished_by_the_next_one() {
    let directory = fast_directory();
    // The log exists, the cluster does not.
    let opened = dir::open(directory.path(), true).unwrap();
    let cluster_id = NodeIdentity::from_pb(&opened.recovered.identity).unwrap().cluster_id;
    drop(opened);
    let refused = RaftStore::open(options(directory.path()).bootstrap(false)).await.unwrap_err();
    assert!(matches!(refused, OpenError::Empty(_)), "{refused}");
    let store = open(directory.path()).await;
    assert_eq!(store.local().cluster_id(), cluster_id);
    store.shutdown().await;
}
