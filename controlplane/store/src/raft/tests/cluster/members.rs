//! Who belongs to the cluster, and how that changes.

use super::*;

fn refusal<T: std::fmt::Debug>(result: Result<T, ChangeError>) -> Refusal {
    match result.unwrap_err() {
        ChangeError::Refused { code, .. } => code,
        other => panic!("{other:?}"),
    }
}

fn member_ids(store: &Arc<RaftStore>) -> Vec<NodeId> {
    store.membership().nodes().map(|(id, _)| *id).collect()
}

fn voter_ids(store: &Arc<RaftStore>) -> Vec<NodeId> {
    store.membership().voter_ids().collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn members_join_follow_and_become_voters_when_their_number_is_odd() {
    let mut cluster = Cluster::prepare(3, |_| {}).await;
    cluster.start(0).await;
    cluster.start(1).await;
    let founder = Arc::clone(cluster.store(0));
    eventually("the second member follows", || (member_ids(&founder) == [1, 2]).then_some(())).await;
    let second = Arc::clone(cluster.store(1));
    eventually("it has the state", || (second.local().revision() > 0).then_some(())).await;
    assert_eq!(second.local().cluster_id(), founder.identity().cluster_id);
    assert_eq!(second.identity().node_id, 2);
    // A follower that is no voter takes writes too.
    acknowledged(&*second, create("http://w:1")).await;
    assert_eq!(voter_ids(&founder), [1], "two voters survive less than one");

    cluster.start(2).await;
    cluster.until_voters(3).await;
    let status = second.cluster(false).await.unwrap();
    assert_eq!((status.leader, status.members.len()), (Some(1), 3));
    eventually("everybody has everything", || {
        let status = founder.status_here();
        status.members.iter().all(|member| member.matched_index == Some(status.last_log_index)).then_some(())
    })
    .await;
    for (n, member) in status.members.iter().enumerate() {
        assert!(member.voter && member.heard_ms.is_some(), "{member:?}");
        assert_eq!(member.api_address, format!("api-{n}:7400"));
        assert_eq!(member.storage_id, cluster.store(n).identity().storage_id);
    }

    // A restart finds the identity on disk, asks nobody, and needs no flag.
    let before = cluster.store(2).identity();
    cluster.kill(2).await;
    let mut options = cluster.options(2);
    options.join = Vec::new();
    cluster.start_with(2, options).await;
    assert_eq!(cluster.store(2).identity(), before);
    acknowledged(&**cluster.store(2), create("http://w:2")).await;
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_member_that_lost_its_disk_comes_back_as_a_new_one_and_takes_the_place_of_the_old() {
    let mut cluster = Cluster::of(3, |_| {}).await;
    let leader = cluster.leader().await;
    // One that joined: it can ask the founder for a place.
    let lost = (1..3).find(|n| *n != leader).unwrap();
    let old = cluster.store(lost).identity().node_id;
    acknowledged(&**cluster.store(leader), create("http://w:1")).await;
    cluster.kill(lost).await;
    cluster.places[lost].directory = fast_directory();

    // With no order to join, an empty directory is refused; the old number does not come back by itself.
    let mut options = cluster.options(lost);
    options.join = Vec::new();
    assert!(matches!(RaftStore::open(options).await.unwrap_err(), OpenError::Empty(_)));

    let mut options = cluster.options(lost);
    options.join = vec![cluster.places[leader].address.clone()];
    cluster.start_with(lost, options).await;
    let new = cluster.store(lost).identity().node_id;
    assert_eq!(new, 4, "no number is given out twice");
    let store = Arc::clone(cluster.store(leader));
    // The old number is refused at the old address, where the new member answers.
    eventually("the leader is told that this is another member", || {
        store.links.trouble(old)?.contains("wiped member").then_some(())
    })
    .await;

    let replace = |new| MemberChange::Replace { old, new };
    let voters = loop {
        match cluster.store(lost).change_members(replace(None)).await {
            Ok(voters) => break voters,
            Err(ChangeError::Refused { code: Refusal::NotCaughtUp | Refusal::InProgress, .. }) => {
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
            Err(other) => panic!("{other:?}"),
        }
    };
    let expected: Vec<NodeId> = [1, 2, 3, 4].into_iter().filter(|id| *id != old).collect();
    assert_eq!(voters, expected);
    cluster.until_voters(3).await;
    assert_eq!(member_ids(&store), expected);
    assert!(store.local().member(old).unwrap().retired);
    acknowledged(&**cluster.store(lost), create("http://w:2")).await;
    cluster.until_equal().await;
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_removed_member_is_told_and_cannot_come_back() {
    let mut cluster = Cluster::of(3, |_| {}).await;
    let leader = cluster.leader().await;
    let gone = (leader + 1) % 3;
    let id = cluster.store(gone).identity().node_id;
    let remove = |allow_even| MemberChange::Remove { node_ids: vec![id], allow_even };
    assert_eq!(refusal(cluster.store(gone).change_members(remove(false)).await), Refusal::EvenVoters);
    let unknown = MemberChange::Remove { node_ids: vec![77], allow_even: true };
    assert_eq!(refusal(cluster.store(gone).change_members(unknown).await), Refusal::NotAMember);
    let other = Arc::clone(cluster.store((leader + 2) % 3));
    assert_eq!(other.change_members(remove(true)).await.unwrap().len(), 2);

    let mut retired = cluster.store(gone).retired();
    tokio::time::timeout(PATIENCE, retired.wait_for(|retired| *retired)).await.unwrap().unwrap();
    cluster.kill(gone).await;
    // It may be started again by mistake: it asks, is told, and changes nothing.
    cluster.start(gone).await;
    let mut retired = cluster.store(gone).retired();
    tokio::time::timeout(PATIENCE, retired.wait_for(|retired| *retired)).await.unwrap().unwrap();
    acknowledged(&*other, create("http://w:1")).await;
    assert_eq!(member_ids(&other).len(), 2);
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_leader_can_be_removed_and_the_others_go_on() {
    let cluster = Cluster::of(3, |_| {}).await;
    let leader = cluster.leader().await;
    let id = cluster.store(leader).identity().node_id;
    let other = Arc::clone(cluster.store((leader + 1) % 3));
    let remove = MemberChange::Remove { node_ids: vec![id], allow_even: true };
    let removed = other.change_members(remove).await;
    assert!(removed.is_ok() || matches!(removed, Err(ChangeError::Store(StoreError::Unknown(_)))), "{removed:?}");
    eventually("the others are among themselves", || (member_ids(&other).len() == 2).then_some(())).await;
    let mut retired = cluster.store(leader).retired();
    tokio::time::timeout(PATIENCE, retired.wait_for(|retired| *retired)).await.unwrap().unwrap();
    acknowledged(&*other, create("http://w:1")).await;
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_change_that_would_lose_the_quorum_is_refused_with_its_reason() {
    let mut cluster = Cluster::of(3, |_| {}).await;
    let leader = cluster.leader().await;
    let dead = (leader + 1) % 3;
    let (dead_id, living_id) =
        (cluster.store(dead).identity().node_id, cluster.store((leader + 2) % 3).identity().node_id);
    cluster.kill(dead).await;
    let store = Arc::clone(cluster.store(leader));
    // What would be left is the leader and a dead member.
    let remove = MemberChange::Remove { node_ids: vec![living_id], allow_even: true };
    assert_eq!(refusal(store.change_members(remove).await), Refusal::QuorumAtRisk);
    let replace = MemberChange::Replace { old: dead_id, new: None };
    assert_eq!(refusal(store.change_members(replace).await), Refusal::NotCaughtUp);
    acknowledged(&*store, create("http://w:1")).await;
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_member_that_moved_is_found_at_its_new_address() {
    let mut cluster = Cluster::of(3, |_| {}).await;
    let leader = cluster.leader().await;
    let moved = (leader + 1) % 3;
    let id = cluster.store(moved).identity().node_id;
    cluster.kill(moved).await;
    let elsewhere = Cluster::prepare(1, |_| {}).await.places.remove(0);
    let directory = std::mem::replace(&mut cluster.places[moved].directory, fast_directory());
    let address = elsewhere.address.clone();
    // Cut off from where it was, as a machine that is gone.
    cluster.places[moved] = Place { directory, ..elsewhere };
    let mut options = cluster.options(moved);
    options.bootstrap = false;
    options.join = vec![cluster.places[leader].address.clone()];
    cluster.start_with(moved, options).await;
    let store = Arc::clone(cluster.store(leader));
    eventually("the membership has its new address", || {
        (store.membership().get_node(&id)?.address == address).then_some(())
    })
    .await;
    acknowledged(&**cluster.store(moved), create("http://w:1")).await;
    cluster.until_equal().await;
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_member_of_another_cluster_is_refused() {
    let mut ours = Cluster::of(1, |_| {}).await;
    let mut theirs = Cluster::prepare(1, |_| {}).await;
    theirs.start(0).await;
    let stranger = Arc::clone(theirs.store(0));
    let link = stranger.links.to(1, &ours.places[0].address, Uuid::nil()).unwrap();
    let request = link.request(smg_services::raft::StatusRequest {});
    let refused = link.answer(Duration::from_secs(5), link.client().status(request)).await.unwrap_err();
    assert!(refused.message().contains("cluster"), "{}", refused.message());
    assert!(stranger.links.trouble(1).is_some());
    ours.kill(0).await;
    theirs.kill(0).await;
}
