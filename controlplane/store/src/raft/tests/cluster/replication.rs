//! Election, replication, forwarding, failover, snapshots.

use super::*;

#[tokio::test(flavor = "multi_thread")]
async fn a_leader_that_stops_hands_over_first_and_writes_hardly_wait() {
    let mut cluster = Cluster::of(3, |options| {
        // So long that only a transfer explains a new leader.
        options.patience = Patience { heartbeat: Duration::from_millis(500), election: Duration::from_secs(20) };
    })
    .await;
    let leader = cluster.leader().await;
    let other = (leader + 1) % 3;
    let began = Instant::now();
    cluster.store(leader).step_down().await;
    cluster.kill(leader).await;
    acknowledged(&**cluster.store(other), create("http://w:1")).await;
    println!("leader stopped -> next acknowledged write: {} ms", began.elapsed().as_millis());
    assert!(began.elapsed() < Duration::from_secs(15), "{:?}", began.elapsed());
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_member_that_was_away_for_long_gets_a_snapshot_in_parts() {
    let mut cluster = Cluster::of(3, |options| {
        options.snapshot_every = 40;
        options.keep_entries = 10;
    })
    .await;
    let leader = cluster.leader().await;
    let away = (leader + 1) % 3;
    cluster.kill(away).await;
    // More than three parts of one MiB.
    for n in 0..60 {
        let command = crate::suite::create_large(&format!("http://w{n}:1"));
        let outcome = acknowledged(&**cluster.store(leader), command).await;
        assert_eq!(outcome.rejection, None);
    }
    let store = Arc::clone(cluster.store(leader));
    let purged = || store.raft.metrics().borrow_watched().purged.map(|id| id.index());
    eventually("the log no longer begins at its beginning", || purged().filter(|purged| *purged > 20)).await;
    cluster.start(away).await;
    let returned = Arc::clone(cluster.store(away));
    eventually("it has the state", || (returned.local().workers().count() == 60).then_some(())).await;
    assert!(returned.status_here().snapshot_index > 20, "{:?}", returned.status_here());
    cluster.until_equal().await;
    // What was installed is also what a restart finds.
    cluster.kill(away).await;
    cluster.start(away).await;
    let returned = Arc::clone(cluster.store(away));
    eventually("it still has the state", || (returned.local().workers().count() == 60).then_some(())).await;
    cluster.stop().await;
}
