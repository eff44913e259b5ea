//! Gateways are told what they may use, and no two may use the same.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::time::Instant;

use smg_admission::{Shares, Update};
use smg_fleet::{Origin, WorkerId, WorkerSpec};
use smg_services::sync::sync_client::SyncClient;
use smg_store::{ClusterStore, Leadership, StoreError};
use tonic::Code;
use tonic::transport::Channel;
use uuid::Uuid;

use super::*;
use crate::testing::{DEADLINE, Plane, TestStore, channel, eventually};

const WORKER: WorkerKey = 0x0192_0000_0000_7000_8000_0000_0000_0001;

/// A plane that knows one decode worker with a window.
async fn plane(window: u32, leases: Times) -> Plane {
    let plane = Plane::with(|options| {
        options.slots.tick = Duration::from_millis(5);
        options.slots.gather = Duration::ZERO;
        options.slots.leases = leases;
    });
    declare(&plane, window).await;
    plane
}

async fn declare(plane: &Plane, window: u32) {
    let mut spec = WorkerSpec::new("grpc://127.0.0.1:1", WorkerType::Decode);
    spec.labels.insert("max_num_seqs".to_owned(), window.to_string());
    let id = WorkerId(Uuid::from_u128(WORKER));
    let command = Command::CreateWorker { id, spec: Box::new(spec), origin: Origin::Api };
    plane.plane.writer().write(Write::of("test", command)).await.unwrap();
}

/// A gateway that uses what it may, up to what it wants.
struct Gateway {
    name: &'static str,
    process: ProcessId,
    shares: Shares,
    begun: Instant,
    up: mpsc::Sender<pb::Report>,
    down: Streaming<pb::Update>,
    in_use: u32,
    wants: u32,
}

impl Gateway {
    async fn open(channel: &Channel, name: &'static str, process: ProcessId, wants: u32) -> Self {
        let (up, receiver) = mpsc::channel(8);
        let mut client = SyncClient::new(channel.clone());
        let down = client.slots(ReceiverStream::new(receiver)).await.unwrap().into_inner();
        let shares = Shares::new(name, process, Times::default(), false);
        let mut gateway = Self { name, process, shares, begun: Instant::now(), up, down, in_use: 0, wants };
        gateway.say(true).await;
        gateway
    }

    fn limit(&self) -> u32 {
        self.shares.limit(WORKER, self.begun.elapsed())
    }

    async fn say(&mut self, all: bool) {
        self.in_use = self.in_use.max(self.wants.min(self.limit()));
        let (in_use, wants) = (self.in_use, self.wants);
        let report = self.shares.report([WORKER].into_iter(), |_| (in_use, wants.max(in_use), 0), all);
        self.up.send(wire::report_to_pb(&report, self.begun.elapsed())).await.unwrap();
    }

    async fn hear(&mut self) -> Result<Update, Status> {
        let message = timeout(DEADLINE, self.down.message()).await.expect("an answer in time")?;
        let message = message.ok_or_else(|| Status::unavailable("the stream ended"))?;
        let update = wire::update_from_pb(message, self.name, self.process).unwrap();
        if self.shares.apply(&update, self.begun.elapsed()) {
            self.say(false).await;
        }
        Ok(update)
    }

    async fn until_limit(&mut self, wanted: impl Fn(u32) -> bool) {
        while !wanted(self.limit()) {
            self.hear().await.unwrap();
        }
    }
}

#[tokio::test]
async fn one_gateway_is_told_the_whole_window_and_two_share_it() {
    let plane = plane(32, Times::default()).await;
    let channel = channel(&plane).await;
    let mut first = Gateway::open(&channel, "a", 1, 40).await;
    first.until_limit(|limit| limit == 32).await;
    let mut second = Gateway::open(&channel, "b", 2, 40).await;
    first.until_limit(|limit| limit == 16).await;
    assert_eq!(second.limit(), 0, "what the first still runs is not the second's");
    // Its requests end, but for ten.
    first.in_use = 10;
    first.wants = 10;
    first.say(false).await;
    second.until_limit(|limit| limit >= 16).await;
    let held = plane.store.local().ledger().pools()[&WORKER].held();
    assert!(first.limit() + second.limit() <= 32 && held <= 32, "{} {} {held}", first.limit(), second.limit());
}

#[tokio::test]
async fn a_gateway_that_falls_silent_keeps_only_what_is_anchored() {
    let leases = Times { float: Duration::from_millis(300), margin: Duration::from_millis(10), ..Times::default() };
    let plane = plane(32, leases).await;
    let mut gateway = Gateway::open(&channel(&plane).await, "a", 1, 4).await;
    gateway.until_limit(|limit| limit == 32).await;
    let store = Arc::clone(&plane.store);
    eventually("the lease ends", || {
        let state = store.local();
        let ledger = state.ledger();
        let row = ledger.pools()[&WORKER].rows().get("a").copied().unwrap_or_default();
        row.share == 16 && ledger.pools()[&WORKER].zombies().iter().map(|zombie| zombie.slots).sum::<u32>() == 16
    })
    .await;
}

#[tokio::test]
async fn a_round_that_may_be_lost_makes_gateways_report_anew() {
    let plane = plane(8, Times::default()).await;
    let channel = channel(&plane).await;
    let mut gateway = Gateway::open(&channel, "a", 1, 2).await;
    gateway.until_limit(|limit| limit == 8).await;
    plane.store.fail(vec![StoreError::Unavailable("no leader".to_owned())]);
    gateway.wants = 6;
    gateway.say(true).await;
    while gateway.hear().await.is_ok() {}
    let mut again = Gateway::open(&channel, "a", 1, 6).await;
    again.shares = gateway.shares;
    again.say(true).await;
    eventually("the new stream counts", || {
        let state = plane.store.local();
        state.ledger().pools()[&WORKER].rows()["a"].wants == 6
    })
    .await;
}

#[tokio::test]
async fn who_does_not_lead_says_so_and_senseless_reports_are_refused() {
    let follower = Plane::on(TestStore::new(Leadership::Follower), |_| {});
    let (_up, receiver) = mpsc::channel(1);
    let mut client = SyncClient::new(channel(&follower).await);
    let refused = client.slots(ReceiverStream::new(receiver)).await.unwrap_err();
    assert_eq!(refused.code(), Code::FailedPrecondition);

    let plane = plane(8, Times::default()).await;
    let channel = channel(&plane).await;
    let nameless = pb::Report { process: vec![0; 16], ..pb::Report::default() };
    let short = pb::Report { gateway: "a".to_owned(), process: vec![0; 3], ..pb::Report::default() };
    for report in [nameless, short] {
        let (up, receiver) = mpsc::channel(1);
        let mut client = SyncClient::new(channel.clone());
        let mut down = client.slots(ReceiverStream::new(receiver)).await.unwrap().into_inner();
        up.send(report).await.unwrap();
        let end = timeout(DEADLINE, down.message()).await.unwrap().unwrap_err();
        assert_eq!(end.code(), Code::InvalidArgument);
    }
}
