//! Gateways get the fleet whole and then each change, and who breaks the protocol is cut.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::time::Duration;

use serde_json::json;
use smg_fleet::{PolicyDocument, Snapshot, wire};
use smg_services::sync::sync_client::SyncClient;
use smg_services::sync::{Ack, Down, Heartbeat, Hello, Nack, Resync, Up, down, up};
use smg_state::Command;
use smg_store::{ClusterStore, Leadership};
use tokio::sync::mpsc;
use tokio::time::timeout;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::Channel;
use tonic::{Code, Status, Streaming};
use uuid::Uuid;

use crate::testing::{DEADLINE, Plane, TestStore, channel, eventually};
use crate::writer::Write;

/// A gateway that does as it is told.
struct Gateway {
    up: mpsc::Sender<Up>,
    down: Streaming<Down>,
}

enum Received {
    Full(u64, Snapshot),
    Delta(u64, smg_fleet::Delta),
    GoAway,
}

impl Gateway {
    async fn open(channel: &Channel) -> Self {
        let (up, receiver) = mpsc::channel(8);
        let mut client = SyncClient::new(channel.clone());
        let down = client.subscribe(ReceiverStream::new(receiver)).await.unwrap().into_inner();
        Self { up, down }
    }

    async fn subscribe(channel: &Channel, name: &str, have: Option<&Snapshot>) -> Self {
        let gateway = Self::open(channel).await;
        let hello = Hello {
            gateway_id: name.to_owned(),
            process_id: Uuid::from_u128(1).as_bytes().to_vec(),
            have_history_id: have.map(|have| have.history_id.as_bytes().to_vec()).unwrap_or_default(),
            have_revision: have.map_or(0, |have| have.revision),
            version: "1".to_owned(),
        };
        gateway.say(up::Message::Hello(hello)).await;
        gateway
    }

    async fn say(&self, message: up::Message) {
        self.up.send(Up { message: Some(message) }).await.unwrap();
    }

    async fn message(&mut self) -> Result<Option<Down>, Status> {
        timeout(DEADLINE, self.down.message()).await.expect("a message in time")
    }

    /// The next message that is not a heartbeat.
    async fn next(&mut self) -> Received {
        let mut bytes = Vec::new();
        loop {
            match self.message().await.unwrap().expect("the stream goes on").message.unwrap() {
                down::Message::Heartbeat(_) => {}
                down::Message::GoAway(_) => return Received::GoAway,
                down::Message::Delta(message) => {
                    return Received::Delta(message.nonce, wire::delta_from_pb(message.delta.unwrap()).unwrap());
                }
                down::Message::Full(chunk) => {
                    bytes.extend_from_slice(&chunk.data);
                    if chunk.last {
                        let snapshot = wire::decode_snapshot(&bytes).unwrap();
                        assert_eq!(snapshot.revision, chunk.revision);
                        return Received::Full(chunk.nonce, snapshot);
                    }
                }
            }
        }
    }

    async fn full(&mut self) -> (u64, Snapshot) {
        match self.next().await {
            Received::Full(nonce, snapshot) => (nonce, snapshot),
            _ => panic!("not a full snapshot"),
        }
    }

    async fn delta(&mut self) -> (u64, smg_fleet::Delta) {
        match self.next().await {
            Received::Delta(nonce, delta) => (nonce, delta),
            _ => panic!("not a delta"),
        }
    }

    async fn ack(&self, nonce: u64, revision: u64) {
        self.say(up::Message::Ack(Ack { nonce, revision })).await;
    }

    /// The status that ends the stream.
    async fn end(&mut self) -> Code {
        loop {
            match self.message().await {
                Ok(Some(_)) => {}
                Ok(None) => return Code::Ok,
                Err(status) => return status.code(),
            }
        }
    }
}

/// Writes and waits until that is published: a gateway may otherwise still be given the state before it.
async fn write(plane: &Plane, model: &str) -> u64 {
    let revision = write_only(plane, model).await;
    published(plane, revision).await;
    revision
}

async fn write_only(plane: &Plane, model: &str) -> u64 {
    let command = Command::PutPolicy { model: model.to_owned(), document: Box::new(PolicyDocument::default()) };
    plane.plane.writer().write(Write::of("test", command)).await.unwrap().revision
}

async fn published(plane: &Plane, revision: u64) {
    let latest = plane.plane.sync.shared.feed.subscribe();
    eventually("published", || latest.borrow().snapshot.revision == revision).await;
}

#[tokio::test]
async fn a_gateway_gets_everything_and_then_each_change() {
    let plane = Plane::start();
    write(&plane, "a").await;
    let channel = channel(&plane).await;
    let mut gateway = Gateway::subscribe(&channel, "g1", None).await;
    let (nonce, mut have) = gateway.full().await;
    assert_eq!(have, plane.store.local().snapshot());
    gateway.ack(nonce, have.revision).await;
    for model in ["b", "c"] {
        write(&plane, model).await;
        let (nonce, delta) = gateway.delta().await;
        have = have.apply(&delta).unwrap();
        gateway.ack(nonce, have.revision).await;
    }
    assert_eq!(have, plane.store.local().snapshot());
    let acked = || plane.plane.sync.gateways().list()[0].acked_revision;
    eventually("acknowledged", || acked() == have.revision).await;
    assert!(plane.metrics.sync_propagation.get_sample_count() >= 1);
    assert_eq!(plane.metrics.sync_subscribers.get(), 1);
    let shown = plane.get("/fleet/gateways").await.body;
    assert_eq!((&shown["total"], &shown["gateways"][0]["gateway_id"]), (&json!(1), &json!("g1")));
    assert_eq!(shown["gateways"][0]["connected"], true);
    drop(gateway);
    eventually("gone", || plane.metrics.sync_subscribers.get() == 0).await;
}

#[tokio::test]
async fn changes_during_an_unacknowledged_message_arrive_together() {
    let plane = Plane::start();
    write(&plane, "a").await;
    let mut gateway = Gateway::subscribe(&channel(&plane).await, "g", None).await;
    let (nonce, have) = gateway.full().await;
    let mut last = 0;
    for n in 0..20 {
        last = write_only(&plane, &format!("m{n}")).await;
    }
    published(&plane, last).await;
    gateway.ack(nonce, have.revision).await;
    let (_, delta) = gateway.delta().await;
    assert_eq!((delta.from_revision, delta.to_revision), (have.revision, last));
    assert_eq!(have.apply(&delta).unwrap(), plane.store.local().snapshot());
}

#[tokio::test]
async fn a_gateway_that_returns_resumes_from_what_it_has() {
    let plane = Plane::start();
    write(&plane, "a").await;
    let channel = channel(&plane).await;
    let (_, have) = Gateway::subscribe(&channel, "g", None).await.full().await;
    let (_, empty) = Gateway::subscribe(&channel, "g", Some(&have)).await.delta().await;
    assert_eq!(have.apply(&empty).unwrap(), have);
    write(&plane, "b").await;
    let (_, delta) = Gateway::subscribe(&channel, "g", Some(&have)).await.delta().await;
    assert_eq!(have.apply(&delta).unwrap(), plane.store.local().snapshot());
    let foreign = Snapshot { history_id: Uuid::from_u128(9), ..have };
    Gateway::subscribe(&channel, "g", Some(&foreign)).await.full().await;
}

#[tokio::test]
async fn a_refusal_is_shown_and_the_next_revision_clears_it() {
    let plane = Plane::start();
    write(&plane, "a").await;
    let mut gateway = Gateway::subscribe(&channel(&plane).await, "g", None).await;
    let (nonce, have) = gateway.full().await;
    gateway.ack(nonce, have.revision).await;
    let refused = write(&plane, "b").await;
    let (nonce, _) = gateway.delta().await;
    let reason = "policy 'x' is not known".to_owned();
    gateway.say(up::Message::Nack(Nack { nonce, revision: refused, reason: reason.clone() })).await;
    let record = || plane.plane.sync.gateways().list()[0].clone();
    eventually("shown", || record().nack.is_some_and(|nack| nack.revision == refused && nack.reason == reason)).await;
    assert_eq!(record().acked_revision, have.revision);
    let next = write(&plane, "c").await;
    let (nonce, delta) = gateway.delta().await;
    assert_eq!((delta.from_revision, delta.to_revision), (have.revision, next));
    gateway.ack(nonce, next).await;
    eventually("cleared", || record().nack.is_none()).await;
}

#[tokio::test]
async fn a_refused_revision_is_sent_again_after_a_pause() {
    let pause = Duration::from_millis(50);
    let plane = Plane::with(|options| options.sync.pauses.refused = pause);
    write(&plane, "a").await;
    let mut gateway = Gateway::subscribe(&channel(&plane).await, "g", None).await;
    let (nonce, have) = gateway.full().await;
    gateway.ack(nonce, have.revision).await;
    write(&plane, "b").await;
    let (nonce, first) = gateway.delta().await;
    let refused = std::time::Instant::now();
    gateway.say(up::Message::Nack(Nack { nonce, revision: first.to_revision, reason: String::new() })).await;
    let (again, second) = gateway.delta().await;
    assert!(refused.elapsed() >= pause);
    assert_eq!((second, again), (first, nonce + 1));
}

#[tokio::test]
async fn a_gateway_with_a_damaged_copy_gets_everything_again() {
    let plane = Plane::start();
    write(&plane, "a").await;
    let channel = channel(&plane).await;
    let (_, mut have) = Gateway::subscribe(&channel, "g", None).await.full().await;
    have.policies.clear();
    let mut gateway = Gateway::subscribe(&channel, "g", Some(&have)).await;
    let (_, delta) = gateway.delta().await;
    assert_eq!(have.apply(&delta), Err(smg_fleet::snapshot::DeltaError::Checksum));
    gateway.say(up::Message::Resync(Resync { reason: "checksum".to_owned() })).await;
    let (_, whole) = gateway.full().await;
    assert_eq!(whole, plane.store.local().snapshot());
}

#[tokio::test]
async fn who_is_silent_or_does_not_follow_the_protocol_is_cut() {
    let plane = Plane::with(|options| {
        options.sync.hello = Duration::from_millis(50);
        options.sync.silence = Duration::from_millis(150);
        options.sync.acknowledgement = Duration::from_millis(300);
    });
    write(&plane, "a").await;
    let channel = channel(&plane).await;
    let heartbeat = || up::Message::Heartbeat(Heartbeat { in_flight_requests: 3, ..Default::default() });

    assert_eq!(Gateway::open(&channel).await.end().await, Code::DeadlineExceeded, "no hello");
    let mut rude = Gateway::open(&channel).await;
    rude.say(heartbeat()).await;
    assert_eq!(rude.end().await, Code::InvalidArgument, "not a hello");
    let nameless = Hello { process_id: vec![0; 16], ..Default::default() };
    let mut gateway = Gateway::open(&channel).await;
    gateway.say(up::Message::Hello(nameless)).await;
    assert_eq!(gateway.end().await, Code::InvalidArgument, "no name");
    assert_eq!(Gateway::subscribe(&channel, "silent", None).await.end().await, Code::DeadlineExceeded, "silent");

    let mut stuck = Gateway::subscribe(&channel, "stuck", None).await;
    let speaker = stuck.up.clone();
    let talk = tokio::spawn(async move {
        let mut tick = tokio::time::interval(Duration::from_millis(20));
        while speaker.send(Up { message: Some(heartbeat()) }).await.is_ok() {
            tick.tick().await;
        }
    });
    eventually("heard", || plane.plane.sync.gateways().list().iter().any(|g| g.in_flight_requests == 3)).await;
    assert_eq!(stuck.end().await, Code::DeadlineExceeded, "talks but never acknowledges");
    talk.abort();
    assert_eq!(plane.metrics.sync_subscribers.get(), 0);
}

#[tokio::test]
async fn the_server_keeps_its_gateways_informed_that_it_lives() {
    let plane = Plane::with(|options| options.sync.heartbeat = Duration::from_millis(20));
    let revision = write(&plane, "a").await;
    let mut gateway = Gateway::subscribe(&channel(&plane).await, "g", None).await;
    let mut heartbeats = 0;
    while heartbeats < 3 {
        if let Some(down::Message::Heartbeat(beat)) = gateway.message().await.unwrap().unwrap().message {
            heartbeats += 1;
            assert!(beat.revision <= revision && beat.server_unix_ms > 0);
        }
    }
}

#[tokio::test]
async fn gateways_are_sent_away_when_the_control_plane_stops() {
    let plane = Plane::start();
    write(&plane, "a").await;
    let channel = channel(&plane).await;
    let mut gateway = Gateway::subscribe(&channel, "g", None).await;
    let (nonce, have) = gateway.full().await;
    gateway.ack(nonce, have.revision).await;
    plane.plane.stop().await;
    assert!(matches!(gateway.next().await, Received::GoAway));
    assert_eq!(gateway.end().await, Code::Ok);
    let (_up, receiver) = mpsc::channel(1);
    let refused = SyncClient::new(channel).subscribe(ReceiverStream::new(receiver)).await;
    assert_eq!(refused.err().map(|status| status.code()), Some(Code::Unavailable));
}

#[tokio::test]
async fn a_gateway_that_does_not_acknowledge_holds_one_message_whatever_happens_meanwhile() {
    let plane = Plane::start();
    write(&plane, "a").await;
    let channel = channel(&plane).await;
    let mut slow = Gateway::subscribe(&channel, "slow", None).await;
    let (nonce, have) = slow.full().await;
    let mut brisk = Gateway::subscribe(&channel, "brisk", None).await;
    let (first, mut seen) = brisk.full().await;
    brisk.ack(first, seen.revision).await;
    let mut messages = 0;
    for n in 0..20 {
        let revision = write(&plane, &format!("m{}", n % 5)).await;
        while seen.revision < revision {
            let (nonce, delta) = brisk.delta().await;
            seen = seen.apply(&delta).unwrap();
            brisk.ack(nonce, seen.revision).await;
            messages += 1;
        }
    }
    assert!(messages >= 20, "{messages}");
    // Nothing was queued for it: what comes next, once it can take it, is one difference to the newest state.
    slow.ack(nonce, have.revision).await;
    let (_, delta) = slow.delta().await;
    assert_eq!(have.apply(&delta).unwrap(), plane.store.local().snapshot());
}

#[tokio::test]
async fn there_is_room_for_so_many_gateways_and_no_more() {
    let plane = Plane::with(|options| options.sync.max_subscribers = 1);
    write(&plane, "a").await;
    let channel = channel(&plane).await;
    let mut first = Gateway::subscribe(&channel, "g1", None).await;
    first.full().await;
    let subscribe = || async {
        let (_up, receiver) = mpsc::channel(1);
        SyncClient::new(channel.clone()).subscribe(ReceiverStream::new(receiver)).await
    };
    assert_eq!(subscribe().await.err().map(|status| status.code()), Some(Code::ResourceExhausted));
    drop(first);
    eventually("room", || plane.plane.sync.shared.seats.available_permits() == 1).await;
    assert!(subscribe().await.is_ok());
}

#[tokio::test]
async fn a_gateway_waits_while_the_cluster_has_no_name() {
    let plane = Plane::on(TestStore::unnamed(Leadership::Leader), |_| {});
    let mut gateway = Gateway::subscribe(&channel(&plane).await, "g", None).await;
    let first = gateway.message().await.unwrap().unwrap().message;
    assert!(matches!(first, Some(down::Message::Heartbeat(beat)) if beat.revision == 0));
    plane.store.name();
    let (_, snapshot) = gateway.full().await;
    assert_ne!(snapshot.history_id, Uuid::nil());
}

#[tokio::test]
async fn a_node_that_hears_no_leader_sends_its_gateways_to_others() {
    let plane = Plane::with(|options| options.sync.heartbeat = Duration::from_millis(20));
    let channel = channel(&plane).await;
    let mut gateway = Gateway::subscribe(&channel, "g", None).await;
    let (nonce, snapshot) = gateway.full().await;
    gateway.say(up::Message::Ack(Ack { nonce, revision: snapshot.revision })).await;
    plane.store.lose_contact();
    assert!(matches!(gateway.next().await, Received::GoAway));
}
