//! The store on a real etcd: the promises of every store, and what is etcd's alone.

use super::*;
use crate::suite::{self, Site, acknowledged, create, eventually, leader, until_equal};

mod faults;
mod site;

use site::{Members, Server};

suite::store_suite!(Members::three(|_| {}));

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_founded_without_the_order_to_and_fleets_share_an_etcd_without_meeting() {
    let server = Server::alone().await;
    let options = |prefix: &str| EtcdOptions::new(vec![format!("http://127.0.0.1:{}", server.client)], prefix);
    let refused = EtcdStore::open(options("/a")).await.unwrap_err();
    assert!(matches!(refused, EtcdError::Empty(_)), "{refused}");
    let open = async |prefix: &str| EtcdStore::open(EtcdOptions { bootstrap: true, ..options(prefix) }).await.unwrap();
    let (a, b) = (open("/a").await, open("/ab").await);
    acknowledged(&*a, create("http://w:1")).await;
    b.read_barrier().await.unwrap();
    assert_ne!(a.local().cluster_id(), b.local().cluster_id());
    assert_eq!((a.local().workers().count(), b.local().workers().count()), (1, 0));
    let again = open("/a").await;
    assert_eq!(again.local().cluster_id(), a.local().cluster_id(), "a fleet is founded once");
    for store in [a, b, again] {
        store.shutdown().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn members_see_each_other_and_tell_of_their_gateways() {
    let mut site = Members::three(|_| {}).await;
    acknowledged(&*site.store(0), create("http://w:1")).await;
    for n in 0..3 {
        site.member(n).tell_gateways(Arc::new(move || format!("gateways of {n}").into_bytes()));
    }
    let ids: Vec<NodeId> = (0..3).map(|n| site.member(n).node_id()).collect();
    let deadline = Instant::now() + suite::PATIENCE;
    // Who has just started to listen for questions may miss one.
    let told = loop {
        let told = site.member(0).ask_gateways().await;
        if told.iter().all(|(_, said)| said.is_ok()) || Instant::now() > deadline {
            break told;
        }
    };
    let expected = [1, 2].map(|n| (ids[n], Ok(format!("gateways of {n}").into_bytes())));
    assert_eq!(told, expected);
    let writer = leader(&site).await;
    let status = site.member(0).cluster(false).await.unwrap();
    assert_eq!((status.node_id, status.leader, status.members.len()), (ids[0], Some(ids[writer]), 3));
    assert!(status.members.iter().all(|member| member.matched_index.is_some()), "{status:?}");
    assert_eq!(status.members[1].api_address, "api-1:7400");

    site.kill(2).await;
    let told = site.member(0).ask_gateways().await;
    assert!(
        told.iter().all(|(id, said)| said.is_ok() == (*id != ids[2])),
        "it is listed while its lease lasts: {told:?}"
    );
    let server = &site.server.client();
    let gone = async || {
        let keys = Keys::new("/smg/test");
        let found = server.range(keys::one(keys.member(ids[2])), Instant::now() + suite::PATIENCE).await;
        found.unwrap().kvs.is_empty()
    };
    while !gone().await {
        assert!(Instant::now() < deadline + suite::PATIENCE);
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert_eq!(site.member(0).cluster(false).await.unwrap().members.len(), 2);
    let refused = site.member(0).change_members(MemberChange::Replace { old: 1, new: None }).await.unwrap_err();
    assert!(matches!(refused, ChangeError::Refused { code: Refusal::Unsupported, .. }), "{refused}");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_etcd_holds_of_the_log_stays_bounded_and_a_late_member_gets_the_state_from_the_snapshot() {
    let site = Members::three(|options| (options.snapshot_every, options.keep_entries) = (40, 10)).await;
    // More than three parts.
    for n in 0..30 {
        assert_eq!(
            acknowledged(&*site.store(n % 3), suite::create_large(&format!("http://w{n}:1"))).await.rejection,
            None
        );
        acknowledged(&*site.store(n % 3), create(&format!("http://x{n}:1"))).await;
        acknowledged(&*site.store(n % 3), create(&format!("http://y{n}:1"))).await;
        acknowledged(&*site.store(n % 3), create(&format!("http://z{n}:1"))).await;
    }
    let (server, keys) = (site.server.client(), Keys::new("/smg/test"));
    let count = async |path: Vec<u8>| {
        let found = server.range(keys::from(path.clone(), &path, 0), Instant::now() + suite::PATIENCE).await.unwrap();
        found.kvs.len()
    };
    let deadline = Instant::now() + suite::PATIENCE;
    while count(keys.log()).await > 40 + 10 + 5 {
        assert!(Instant::now() < deadline, "{} entries", count(keys.log()).await);
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert_eq!(count(keys.queue()).await, 0);
    assert!(count(keys.parts()).await <= 40, "of two snapshots at most");
    let late = EtcdStore::open(site.options(1)).await.unwrap();
    late.read_barrier().await.unwrap();
    assert!(late.cluster(true).await.unwrap().snapshot_index >= 40);
    assert_eq!(*late.local(), *until_equal(&site).await);
    late.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn who_asks_leaves_nothing_in_etcd() {
    let site = Members::three(|_| {}).await;
    site.member(0).ask_gateways().await;
    let (server, path) = (site.server.client(), b"/smg/test/".to_vec());
    let deadline = Instant::now() + suite::PATIENCE;
    loop {
        let found = server.range(keys::from(path.clone(), &path, 0), Instant::now() + suite::PATIENCE).await.unwrap();
        let left = found.kvs.iter().map(|kv| String::from_utf8_lossy(&kv.key).into_owned());
        let left: Vec<String> = left.filter(|key| key.contains("questions/") || key.contains("answers/")).collect();
        if left.is_empty() {
            return;
        }
        assert!(Instant::now() < deadline, "{left:?}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}
