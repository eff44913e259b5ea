//! How fast and how large the replicated control plane is, measured on real processes.
//!
//! `SMG_SOAK=1 cargo nextest run -p smg --test figures` measures and writes `docs/reports/control-plane.md`. Without it the same program runs
//! with small numbers, so that it is known to work; times are never asserted, because machines are slow and shared.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod gateways;
#[path = "../support/mod.rs"]
mod support;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use futures::StreamExt;
use reqwest::{Client, StatusCode};
use serde_json::{Value, json};
use smg_fleet::{Facts, Origin, WorkerId, WorkerSpec, WorkerType};
use smg_state::{Command, Envelope};
use smg_store::raft::{RaftOptions, RaftStore};
use smg_store::{ClusterStore, StoreError};
use support::cluster::*;
use support::*;
use uuid::Uuid;

/// How much is measured.
struct Size {
    kills: usize,
    gateways: usize,
    workers: usize,
    changes: usize,
    /// Bytes of the large state.
    state: usize,
    many_workers: usize,
    writing: Duration,
}

fn size() -> Size {
    if std::env::var_os("SMG_SOAK").is_some() {
        Size {
            kills: 40,
            gateways: 100,
            workers: 1_000,
            changes: 300,
            state: 64 << 20,
            many_workers: 10_000,
            writing: Duration::from_secs(10),
        }
    } else {
        Size {
            kills: 1,
            gateways: 8,
            workers: 50,
            changes: 5,
            state: 1 << 20,
            many_workers: 100,
            writing: Duration::from_millis(500),
        }
    }
}

/// Sorted times, in milliseconds.
struct Times(Vec<f64>);

impl Times {
    fn of(times: Vec<Duration>) -> Self {
        let mut millis: Vec<f64> = times.iter().map(|time| time.as_secs_f64() * 1e3).collect();
        millis.sort_unstable_by(f64::total_cmp);
        Self(millis)
    }

    /// The time that so many of a hundred do not exceed.
    fn percentile(&self, percent: usize) -> f64 {
        self.0[(self.0.len() * percent / 100).min(self.0.len() - 1)]
    }

    fn row(&self) -> String {
        format!("{:.0} / {:.0} / {:.0} ms", self.percentile(50), self.percentile(99), self.percentile(100))
    }
}

/// A place whose first member already has so many workers, each with `padding` bytes of labels.
async fn prepared(workers: usize, padding: usize) -> Place {
    let place = Place::new();
    let data = place.directory.path().join("controlplane");
    let store = RaftStore::open(RaftOptions::new(data, place.peer_address()).bootstrap(true)).await.unwrap();
    let propose = async |command: Command| {
        let envelope = Envelope {
            command_id: Uuid::new_v4(),
            actor: "figures".into(),
            proposed_at_unix_ms: 1_700_000_000_000,
            expected_revision: None,
            command,
        };
        // On a starved machine the outcome may be unknown for a while.
        loop {
            match store.propose(envelope.clone()).await {
                Ok(outcome) => return outcome.accepted().unwrap(),
                Err(StoreError::Unknown(_)) => {}
                Err(error) => panic!("{error}"),
            }
        }
    };
    let propose = &propose;
    let register = |n: usize| async move {
        let (high, low) = (n / 250, n % 250);
        let mut spec = WorkerSpec::new(format!("http://127.9.{high}.{}:9", low + 1), WorkerType::Decode);
        spec.health.disable_health_check = Some(true);
        for (part, start) in (0..padding).step_by(200).enumerate() {
            spec.labels.insert(format!("figures/{part}"), "x".repeat((padding - start).min(200)));
        }
        let id = WorkerId(Uuid::from_u128(n as u128 + 1));
        let created = propose(Command::CreateWorker { id, spec: Box::new(spec), origin: Origin::Api }).await;
        propose(Command::CompleteJob { id, number: created.revision, facts: Some(Box::new(Facts::default())) }).await;
    };
    futures::stream::iter(0..workers).for_each_concurrent(64, register).await;
    store.shutdown().await;
    place
}

async fn put(client: &Client, address: &str, model: &str, value: u64) -> Option<u64> {
    let request = client.put(format!("http://{address}/fleet/policies/{model}"));
    let request = request.json(&json!({"retry": {"initial_backoff_ms": value}})).timeout(Duration::from_secs(8));
    let response = request.send().await.ok().filter(|response| response.status() == StatusCode::OK)?;
    response.headers().get("x-smg-revision")?.to_str().ok()?.parse().ok()
}

/// From the kill of a leader to the next acknowledged write, by a client that asks the survivors in turn.
async fn leader_kills(count: usize) -> Times {
    let places: Vec<Place> = (0..3).map(|_| Place::new()).collect();
    let mut members = cluster(&places).await;
    let client = Client::builder().no_proxy().build().unwrap();
    let mut times = Vec::new();
    for n in 0..count {
        let lost = leader(&members).await;
        members[lost].kill();
        let killed = Instant::now();
        for target in 1.. {
            let address = places[(lost + 1 + target % 2) % 3].address();
            if put(&client, &address, "failover", n as u64 + 1).await.is_some() {
                break;
            }
        }
        times.push(killed.elapsed());
        members[lost] = places[lost].start(&[]);
        until_voters(&members, 3).await;
    }
    Times::of(times)
}

struct Spread {
    propagation: Times,
    writes_per_second: f64,
    write_times: Times,
}

/// From an acknowledged write until all gateways have acknowledged its revision; and how many writes there are in a second.
async fn propagation(size: &Size) -> Spread {
    let mut places = vec![prepared(size.workers, 0).await];
    places.extend((1..3).map(|_| Place::new()));
    let members = cluster(&places).await;
    let addresses: Vec<String> = places.iter().map(Place::address).collect();
    let gateways = gateways::start(&addresses, size.gateways);
    let client = Client::builder().no_proxy().build().unwrap();
    let mut times = Vec::new();
    for n in 0..=size.changes {
        let revision = put(&client, &addresses[n % 3], "propagation", n as u64 + 1).await.unwrap();
        let written = Instant::now();
        gateways.until_all_have(revision).await;
        // The first one waits until all are there.
        if n > 0 {
            times.push(written.elapsed());
        }
    }
    drop(gateways);
    let leader = addresses[leader(&members).await].clone();
    let (began, count) = (Instant::now(), Arc::new(AtomicU64::new(1)));
    let writers: Vec<_> = (0..64)
        .map(|writer| {
            let (leader, count, until) = (leader.clone(), Arc::clone(&count), began + size.writing);
            tokio::spawn(async move {
                let client = Client::builder().no_proxy().build().unwrap();
                let mut times = Vec::new();
                while Instant::now() < until {
                    let (value, sent) = (count.fetch_add(1, Ordering::Relaxed), Instant::now());
                    put(&client, &leader, &format!("writer-{writer}"), value).await.unwrap();
                    times.push(sent.elapsed());
                }
                times
            })
        })
        .collect();
    let mut write_times = Vec::new();
    for writer in writers {
        write_times.extend(writer.await.unwrap());
    }
    let writes_per_second = write_times.len() as f64 / began.elapsed().as_secs_f64();
    Spread { propagation: Times::of(times), writes_per_second, write_times: Times::of(write_times) }
}

/// How long a follower with a large state takes from its start to its first linearizable answer, and how large the snapshots are.
async fn restart(bytes: usize) -> (Duration, u64) {
    let padding = 6_400;
    let mut places = vec![prepared(bytes / (padding + 800) + 1, padding).await];
    places.extend((1..3).map(|_| Place::new()));
    let mut members = cluster(&places).await;
    let follower = (leader(&members).await + 1) % 3;
    members[follower].kill();
    let began = Instant::now();
    members[follower] = places[follower].start(&[]);
    eventually_within(Duration::from_secs(300), "a linearizable answer", || async {
        let url = format!("{}/fleet/policies", members[follower].url);
        let answer = members[follower].client.get(url).timeout(Duration::from_secs(6)).send().await.ok()?;
        (answer.status() == StatusCode::OK).then_some(())
    })
    .await;
    let took = began.elapsed();
    let files = std::fs::read_dir(places[follower].directory.path().join("controlplane")).unwrap();
    let snapshots = files.flatten().filter(|file| file.path().extension().is_some_and(|end| end == "smgsnap"));
    (took, snapshots.map(|file| file.metadata().unwrap().len()).max().unwrap_or_default())
}

/// Resident memory of the members of a cluster with many workers: the leader's and the largest other one's.
async fn memory(workers: usize) -> (u64, u64) {
    let mut places = vec![prepared(workers, 0).await];
    places.extend((1..3).map(|_| Place::new()));
    let members = cluster(&places).await;
    let leads = leader(&members).await;
    for smg in &members {
        eventually_within(Duration::from_secs(60), "all workers", || async {
            let list: Value = smg.client.get(format!("{}/workers", smg.url)).send().await.ok()?.json().await.ok()?;
            (list["workers"].as_array()?.len() == workers).then_some(())
        })
        .await;
    }
    let others = (0..3).filter(|n| *n != leads).map(|n| members[n].resident_bytes()).max().unwrap();
    (members[leads].resident_bytes(), others)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_figures_of_the_control_plane_are_measured() {
    let size = size();
    let kills = leader_kills(size.kills).await;
    println!("leader killed -> next acknowledged write: {}", kills.row());
    let spread = propagation(&size).await;
    println!(
        "write -> acknowledged by all gateways: {}; {:.0} writes/s",
        spread.propagation.row(),
        spread.writes_per_second
    );
    let (restarted, snapshot) = restart(size.state).await;
    println!("a follower with a state of {} bytes: {restarted:?}", snapshot);
    let (leading, following) = memory(size.many_workers).await;
    println!("resident: {leading} bytes leading, {following} bytes following");
    if std::env::var_os("SMG_SOAK").is_some() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/reports/control-plane.md");
        std::fs::write(path, report(&size, &kills, &spread, restarted, snapshot, leading, following)).unwrap();
    }
}

fn report(
    size: &Size,
    kills: &Times,
    spread: &Spread,
    restarted: Duration,
    snapshot: u64,
    leading: u64,
    following: u64,
) -> String {
    let mebibytes = |bytes: u64| bytes as f64 / f64::from(1 << 20);
    let build = if cfg!(debug_assertions) { "debug" } else { "release" };
    let cores = std::thread::available_parallelism().map_or(0, usize::from);
    let load = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    let load = load.split(' ').next().unwrap_or_default();
    format!(
        "# The control plane in figures\n\n\
         The last run of `SMG_SOAK=1 cargo nextest run -p smg --test figures`: three control-plane processes on one machine, beside their\n\
         clients. {build} build, {cores} cores, load average {load} at the end (more than the cores = other programs ran beside it).\n\n\
         | what | p50 / p99 / most | goal |\n|---|---|---|\n\
         | leader killed with SIGKILL → next acknowledged write ({} kills) | {} | p99 ≤ 3000 ms |\n\
         | write acknowledged → its revision acknowledged by all of {} gateways, {} workers ({} changes) | {} | p99 ≤ 300 ms |\n\
         | one write among 64 concurrent writers at the leader | {} | |\n\n\
         | what | figure | goal |\n|---|---|---|\n\
         | writes, 64 concurrent writers at the leader | {:.0} /s | |\n\
         | restart of a follower with a snapshot of {:.0} MiB: start → first linearizable answer | {:.1} s | |\n\
         | resident memory with {} workers, leader / largest follower | {:.0} / {:.0} MiB | ≤ 200 MiB |\n\n\
         Gateways are simulated: they decode every message and acknowledge it, all of them in one process.\n",
        size.kills,
        kills.row(),
        size.gateways,
        size.workers,
        size.changes,
        spread.propagation.row(),
        spread.write_times.row(),
        spread.writes_per_second,
        mebibytes(snapshot),
        restarted.as_secs_f64(),
        size.many_workers,
        mebibytes(leading),
        mebibytes(following),
    )
}
