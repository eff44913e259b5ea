//! What a store answers when it cannot do what it is asked to.

use std::sync::mpsc;

use super::*;

#[tokio::test(flavor = "multi_thread")]
async fn a_write_beyond_the_bound_is_refused_and_did_not_happen() {
    let directory = fast_directory();
    let store = open(directory.path()).await;
    let all = Arc::clone(&store.in_flight).acquire_many_owned(MAX_IN_FLIGHT as u32).await.unwrap();
    assert_eq!(store.in_flight(), MAX_IN_FLIGHT);
    let refused = store.propose(create("http://w:1")).await.unwrap_err();
    assert_eq!(refused, StoreError::Unavailable("too many writes in flight".into()));
    drop(all);
    store.propose(create("http://w:2")).await.unwrap();
    assert_eq!(store.local().workers().count(), 1);
    store.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_write_that_is_not_confirmed_in_time_is_unknown_and_can_be_repeated() {
    let directory = fast_directory();
    let store = open(directory.path()).await;
    // The writer waits for this lock as it would for a disk that hangs.
    let (release, released) = mpsc::channel::<()>();
    let (locked, is_locked) = mpsc::channel::<()>();
    let shared = Arc::clone(&store.shared);
    let hanging = std::thread::spawn(move || {
        let _database = shared.database.write();
        locked.send(()).unwrap();
        released.recv().unwrap();
    });
    is_locked.recv().unwrap();
    let command = create("http://w:1");
    let unknown = store.propose(command.clone()).await.unwrap_err();
    let StoreError::Unknown(message) = unknown else { panic!("{unknown:?}") };
    assert!(message.contains(&command.command_id.to_string()), "{message}");
    assert_eq!(store.in_flight(), 1, "the write is still on its way");
    release.send(()).unwrap();
    hanging.join().unwrap();
    let outcome = store.propose(command).await.unwrap();
    assert_eq!(outcome.revision, 2, "it was applied once");
    store.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_member_without_a_quorum_opens_and_answers_that_it_does_not_lead() {
    let directory = fast_directory();
    let options = options(directory.path());
    let Files { log, writer, snapshots, shared, identity } = Files::open(&options).unwrap();
    let machine = Machine::new(snapshots, Arc::clone(&shared.failure));
    let links = Links::new(identity, machine.published(), links::Way::default());
    let peers = network::Peers::new(1, Arc::new(links));
    let config = Arc::new(options.config().validate().unwrap());
    let raft = RaftNode::new(identity.node_id, config, peers, log, machine).await.unwrap();
    let members = BTreeMap::from([
        (1, Peer { address: "127.0.0.1:1".into(), ..Peer::default() }),
        (2, Peer { address: "127.0.0.1:2".into(), ..Peer::default() }),
    ]);
    raft.initialize(members).await.unwrap();
    raft.shutdown().await.unwrap();
    writer.close().await;

    let store = RaftStore::open(options).await.unwrap();
    assert_eq!(*store.leadership().borrow(), Leadership::Follower);
    let refused = store.propose(create("http://w:1")).await.unwrap_err();
    assert!(matches!(refused, StoreError::Unavailable(_)), "{refused:?}");
    let refused = store.read_barrier().await.unwrap_err();
    assert!(matches!(refused, StoreError::Unavailable(_)), "{refused:?}");
    store.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn writes_that_wait_together_share_a_transaction() {
    let directory = tempfile::tempdir().unwrap();
    let store = open(directory.path()).await;
    let before = store.stats();
    propose_all(&store, (0..400).map(|n| put_policy(n % 10)), 200).await;
    let after = store.stats();
    assert!(after.entries - before.entries >= 400);
    assert!(after.commits - before.commits < 200, "{after:?}");
    assert!(after.commit_time > Duration::ZERO && after.slowest_commit > Duration::ZERO);
    store.shutdown().await;
}
