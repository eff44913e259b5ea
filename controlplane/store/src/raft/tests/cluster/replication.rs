//! Election, replication, forwarding, failover, snapshots.

use super::*;

#[tokio::test(flavor = "multi_thread")]
async fn any_member_takes_writes_and_reads_and_another_one_leads_when_the_leader_dies() {
    let mut cluster = Cluster::of(3, |_| {}).await;
    for n in 0..3 {
        let command = create(&format!("http://w{n}:1"));
        let outcome = cluster.store(n).propose(command.clone()).await.unwrap();
        assert_eq!(cluster.store((n + 1) % 3).propose(command).await.unwrap(), outcome, "the same command, elsewhere");
        // A read anywhere has everything that was acknowledged anywhere before it began.
        for reader in 0..3 {
            assert!(cluster.store(reader).read_barrier().await.unwrap() >= outcome.revision);
            assert_eq!(cluster.store(reader).local().workers().count(), n + 1);
        }
    }
    eventually("one of them has the leader's duties", || {
        let duty = |store: &&Arc<RaftStore>| *store.leadership().borrow() == Leadership::Leader;
        (cluster.stores().filter(duty).count() == 1).then_some(())
    })
    .await;

    let leader = cluster.leader().await;
    cluster.kill(leader).await;
    let killed = Instant::now();
    let survivor = (leader + 1) % 3;
    let outcome = acknowledged(cluster.store(survivor), create("http://after:1")).await;
    println!("leader killed -> next acknowledged write: {} ms", killed.elapsed().as_millis());
    assert!(outcome.rejection.is_none());
    assert_ne!(cluster.leader().await, leader);

    cluster.start(leader).await;
    let store = Arc::clone(cluster.store(leader));
    eventually("the restarted member has caught up", || (store.local().workers().count() == 4).then_some(())).await;
    assert_eq!(cluster.until_equal().await.workers().count(), 4);
    cluster.stop().await;
}

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
    acknowledged(cluster.store(other), create("http://w:1")).await;
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
        let mut spec = WorkerSpec::new(format!("http://w{n}:1"), WorkerType::Prefill);
        spec.labels.extend((0..16).map(|n| (format!("note-{n}"), "l".repeat(4_000))));
        let id = WorkerId(Uuid::now_v7());
        let command = envelope(Command::CreateWorker { id, spec: Box::new(spec), origin: Origin::Api });
        let outcome = acknowledged(cluster.store(leader), command).await;
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

#[tokio::test(flavor = "multi_thread")]
async fn a_command_too_large_for_a_message_is_refused_before_it_is_tried() {
    let directory = fast_directory();
    let store = open(directory.path()).await;
    let workers = (0..300)
        .map(|n| {
            let mut spec = WorkerSpec::new(format!("http://w{n}:1"), WorkerType::Prefill);
            spec.labels.extend((0..16).map(|n| (format!("note-{n}"), "l".repeat(4_000))));
            (WorkerId(Uuid::now_v7()), spec)
        })
        .collect();
    let refused = store.propose(envelope(Command::ReconcileStartup { workers })).await.unwrap_err();
    assert!(matches!(refused, StoreError::TooLarge(_)), "{refused}");
    store.shutdown().await;
}
