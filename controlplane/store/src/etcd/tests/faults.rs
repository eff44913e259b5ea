//! etcd that is away, members that are cut off from it, and what only people can mend.

use super::*;

async fn three() -> Members {
    Members::three(|options| (options.snapshot_every, options.keep_entries) = (20, 5)).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_writer_that_is_cut_off_acknowledges_nothing_and_follows_when_it_is_back() {
    let site = three().await;
    let old = leader(&site).await;
    let one = (old + 1) % 3;
    acknowledged(&*site.store(old), create("http://before:1")).await;
    site.proxies[old].cut(true);
    let lonely = site.store(old).propose(create("http://lonely:1")).await.unwrap_err();
    assert!(matches!(lonely, StoreError::Unknown(_) | StoreError::Unavailable(_)), "{lonely}");
    let stale = site.store(old).read_barrier().await.unwrap_err();
    assert!(matches!(stale, StoreError::Unavailable(_)), "a read there could miss the newest write: {stale}");
    // More than the log keeps, so that it comes back to a snapshot and to revisions that etcd has forgotten.
    for n in 0..60 {
        acknowledged(&*site.store(one), create(&format!("http://during-{n}:1"))).await;
    }
    let member = Arc::clone(site.member(old));
    eventually("it knows that it is alone", || (!member.in_contact()).then_some(())).await;
    assert_eq!(*member.leadership().borrow(), Leadership::Follower);
    site.proxies[old].cut(false);
    acknowledged(&*site.store(old), create("http://after:1")).await;
    let state = until_equal(&site).await;
    for url in ["http://before:1", "http://during-59:1", "http://after:1"] {
        assert!(state.worker_by_url(url).is_some(), "{url}");
    }
    eventually("it is in contact again", || member.in_contact().then_some(())).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_command_that_did_not_happen_never_does() {
    let mut site = three().await;
    let old = leader(&site).await;
    let one = (old + 1) % 3;
    // Nobody writes for a while: the writer is gone and its lease is not, and the others have handed over.
    for n in (0..3).filter(|n| *n != old) {
        site.store(n).step_down().await;
    }
    site.kill(old).await;
    let refused = site.store(one).propose(create("http://w:1")).await.unwrap_err();
    assert!(matches!(refused, StoreError::Unavailable(_)), "{refused}");
    site.start(old).await;
    acknowledged(&*site.store(old), create("http://other:1")).await;
    assert!(until_equal(&site).await.worker_by_url("http://w:1").is_none());
}

#[tokio::test(flavor = "multi_thread")]
async fn while_etcd_is_away_reads_and_writes_are_refused_and_afterwards_everything_is_there() {
    let mut site = three().await;
    acknowledged(&*site.store(0), create("http://before:1")).await;
    until_equal(&site).await;
    site.server.kill();
    let refused = site.store(0).propose(create("http://w:1")).await.unwrap_err();
    assert!(matches!(refused, StoreError::Unknown(_) | StoreError::Unavailable(_)), "{refused}");
    assert!(matches!(site.store(1).read_barrier().await, Err(StoreError::Unavailable(_))));
    assert_eq!(site.store(2).local().workers().count(), 1, "what was applied can be read");
    site.server.restart().await;
    acknowledged(&*site.store(1), create("http://after:1")).await;
    let state = until_equal(&site).await;
    assert!(state.worker_by_url("http://before:1").is_some() && state.worker_by_url("http://after:1").is_some());
}

#[tokio::test(flavor = "multi_thread")]
async fn an_etcd_that_went_back_in_time_stops_the_store() {
    let mut site = three().await;
    acknowledged(&*site.store(0), create("http://before:1")).await;
    until_equal(&site).await;
    site.server.kill();
    site.server.restart_empty().await;
    for n in 0..3 {
        let mut failure = site.store(n).failure();
        let failed = tokio::time::timeout(suite::PATIENCE, failure.wait_for(Option::is_some)).await;
        assert!(failed.is_ok(), "member {n} goes on");
        assert!(matches!(site.store(n).propose(create("http://w:1")).await, Err(StoreError::Failed(_))));
        assert_eq!(site.store(n).local().workers().count(), 1);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn damage_in_the_log_stops_the_store_and_a_new_member_does_not_start() {
    let site = three().await;
    acknowledged(&*site.store(0), create("http://w:1")).await;
    let (server, keys) = (site.server.client(), Keys::new("/smg/test"));
    let index = site.member(0).shared.applied.borrow().index;
    server.put(keys.entry(index + 1), b"nonsense".to_vec(), 0).await.unwrap();
    let mut failure = site.store(0).failure();
    let reason =
        tokio::time::timeout(suite::PATIENCE, failure.wait_for(Option::is_some)).await.unwrap().unwrap().clone();
    assert!(reason.unwrap().contains("in etcd"));
    server.put(keys.entry(2), b"nonsense".to_vec(), 0).await.unwrap();
    let refused = EtcdStore::open(site.options(0)).await.unwrap_err();
    assert!(matches!(refused, EtcdError::Damaged(_)), "{refused}");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_append_under_an_old_fence_changes_nothing() {
    let site = three().await;
    acknowledged(&*site.store(0), create("http://w:1")).await;
    let (server, keys) = (site.server.client(), Keys::new("/smg/test"));
    let deadline = Instant::now() + suite::PATIENCE;
    let fence = server.range(keys::one(keys.writer()), deadline).await.unwrap().kvs[0].create_revision;
    let head = server.range(keys::one(keys.head()), deadline).await.unwrap().kvs[0].clone();
    let old = leader(&site).await;
    site.store(old).step_down().await;
    let deadline = Instant::now() + suite::PATIENCE;
    // The next writer may not have written anything yet: the head is as it was, the fence alone tells.
    loop {
        let writer = server.range(keys::one(keys.writer()), deadline).await.unwrap();
        if writer.kvs.first().is_some_and(|writer| writer.create_revision != fence) {
            break;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let txn = pb::TxnRequest {
        compare: vec![keys::created_at(keys.writer(), fence), keys::changed_at(keys.head(), head.mod_revision)],
        success: vec![keys::write(keys.head(), frame(&disk::EtcdHead { index: 99 }), 0)],
        failure: Vec::new(),
    };
    assert!(!server.txn(txn).await.unwrap().succeeded);
    acknowledged(&*site.store((old + 1) % 3), create("http://after:1")).await;
}
