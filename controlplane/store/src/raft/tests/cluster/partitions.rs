//! Members that cannot hear each other.

use super::*;

#[tokio::test(flavor = "multi_thread")]
async fn a_leader_that_is_cut_off_acknowledges_nothing_and_follows_when_it_is_back() {
    let cluster = Cluster::of(3, |_| {}).await;
    let old = cluster.leader().await;
    let (one, other) = ((old + 1) % 3, (old + 2) % 3);
    acknowledged(&**cluster.store(old), create("http://before:1")).await;

    cluster.isolate(old, true);
    let cut = Instant::now();
    let lonely = {
        let store = Arc::clone(cluster.store(old));
        tokio::spawn(async move { store.propose(create("http://lonely:1")).await })
    };
    acknowledged(&**cluster.store(one), create("http://during:1")).await;
    println!("leader cut off -> next acknowledged write: {} ms", cut.elapsed().as_millis());
    let lonely = lonely.await.unwrap().unwrap_err();
    assert!(matches!(lonely, StoreError::Unknown(_) | StoreError::Unavailable(_)), "{lonely}");
    let stale = cluster.store(old).read_barrier().await.unwrap_err();
    assert!(matches!(stale, StoreError::Unavailable(_)), "a read there could miss the newest write: {stale}");
    assert!(cluster.store(old).local().worker_by_url("http://during:1").is_none());
    let store = Arc::clone(cluster.store(old));
    eventually("it knows that it is alone", || (!store.in_contact()).then_some(())).await;
    let term = cluster.store(one).status_here().term;

    cluster.isolate(old, false);
    acknowledged(&**cluster.store(old), create("http://after:1")).await;
    let state = cluster.until_equal().await;
    for url in ["http://before:1", "http://during:1", "http://after:1"] {
        assert!(state.worker_by_url(url).is_some(), "{url}");
    }
    // The one that came back asked before it stood: nobody had to be elected again.
    assert_eq!(cluster.store(other).status_here().term, term);
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_leader_that_reaches_others_but_hears_nothing_of_them_is_replaced() {
    let cluster = Cluster::of(3, |_| {}).await;
    let old = cluster.leader().await;
    // The others cannot call it; its own calls still arrive, so heartbeats do, and it goes on leading.
    for other in [(old + 1) % 3, (old + 2) % 3] {
        cluster.cut(other, old, true);
    }
    acknowledged(&**cluster.store(old), create("http://one-way:1")).await;
    // Whoever must ask the leader cannot: what they say is "did not happen" or "unknown", never a lie.
    for other in [(old + 1) % 3, (old + 2) % 3] {
        match cluster.store(other).propose(create(&format!("http://from-{other}:1"))).await {
            Ok(_) => {}
            Err(error) => assert!(matches!(error, StoreError::Unknown(_) | StoreError::Unavailable(_)), "{error}"),
        }
        cluster.cut(other, old, false);
    }
    for other in [(old + 1) % 3, (old + 2) % 3] {
        acknowledged(&**cluster.store(other), create(&format!("http://again-{other}:1"))).await;
    }
    cluster.until_equal().await;
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn no_acknowledged_write_is_lost_while_leaders_come_and_go() {
    let mut cluster = Cluster::of(3, |options| options.snapshot_every = 50).await;
    let mut choices = Choices::fresh();
    let mut acknowledged_urls = Vec::new();
    for round in 0..4 {
        let leader = cluster.leader().await;
        let writers: Vec<Arc<RaftStore>> = cluster.stores().cloned().collect();
        let writes: Vec<_> = (0..20)
            .map(|n| {
                let store = Arc::clone(&writers[n % writers.len()]);
                let url = format!("http://w{round}-{n}:1");
                tokio::spawn(async move { store.propose(create(&url)).await.map(|_| url) })
            })
            .collect();
        let isolated = choices.below(2) == 0;
        if isolated {
            cluster.isolate(leader, true);
        } else {
            cluster.kill(leader).await;
        }
        for write in writes {
            acknowledged_urls.extend(write.await.unwrap().ok());
        }
        let survivor = (leader + 1 + choices.below(2) as usize) % 3;
        let url = format!("http://survivor-{round}:1");
        acknowledged(&**cluster.store(survivor), create(&url)).await;
        acknowledged_urls.push(url);
        if isolated {
            cluster.isolate(leader, false);
        } else {
            cluster.start(leader).await;
        }
    }
    for store in cluster.stores() {
        let deadline = Instant::now() + Duration::from_secs(30);
        while let Err(error) = store.read_barrier().await {
            assert!(Instant::now() < deadline, "{error}");
        }
    }
    let state = cluster.until_equal().await;
    for url in &acknowledged_urls {
        assert!(state.worker_by_url(url).is_some(), "{url} was acknowledged and is gone");
    }
    cluster.stop().await;
}
