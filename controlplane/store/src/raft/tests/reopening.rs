//! What a store holds after it was stopped and opened again, and who may open it.

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
    assert_eq!(*store.leadership().borrow(), Leadership::Follower);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reopened_store_has_every_write_and_the_same_identity() {
    let directory = tempfile::tempdir().unwrap();
    let store = open(directory.path()).await;
    for number in 0..10 {
        let outcome = store.propose(create(&format!("http://w:{}", number + 1))).await.unwrap();
        assert_eq!(outcome.revision, number + 2);
    }
    let (before, identity) = (bytes(&*store), store.identity());
    store.shutdown().await;
    drop(store);
    for bootstrap in [false, true] {
        let started = Instant::now();
        let store = RaftStore::open(options(directory.path()).bootstrap(bootstrap)).await.unwrap();
        println!("reopened in {:?}", started.elapsed());
        assert_eq!(bytes(&*store), before);
        assert_eq!(store.identity(), identity);
        store.shutdown().await;
    }
}
