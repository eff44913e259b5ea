//! Histories of the admin API are linearizable, whatever happens to the three real processes that are the control plane.
//!
//! Clients write, compare-and-set and read policy documents at any member while members are killed, alone and all at once, stopped and
//! continued, and cut off from each other by proxies between them. Each call is recorded with when it began, when it ended, and what is
//! known of it: what was answered, that it did not happen, or nothing. [`checker`] then looks for one order of the calls on each document
//! that explains every answer, in which nothing has a place that was said not to have happened; in addition no two writes may share a
//! revision, and no write may have a lower one than a write that ended before it began.
//!
//! Short in `make test`; `SMG_SOAK=1` runs ten minutes and writes `docs/reports/linearizability.md`. `SMG_SEED` repeats the choices of a
//! run, not its timing.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod checker;
mod proxies;
#[path = "../chaos/random.rs"]
mod random;
#[path = "../support/mod.rs"]
mod support;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use checker::{Answer, Call, Operation};
use proxies::Network;
use random::Random;
use reqwest::{Client, StatusCode};
use serde_json::{Value, json};
use support::cluster::*;
use support::*;

/// The documents that are written.
const DOCUMENTS: u64 = 4;
const CLIENTS: u64 = 8;
const MEMBERS: usize = 3;
/// How long a client waits. Longer than a member takes to say what it knows.
const WAIT: Duration = Duration::from_secs(8);

fn soaking() -> bool {
    std::env::var_os("SMG_SOAK").is_some()
}

/// What is known of a call.
enum Known {
    Answered(Answer),
    /// It did not happen and never will, or it was a read without an answer.
    Nothing,
    Unknown,
}

/// Asks once.
async fn ask(client: &Client, port: u16, operation: Operation, document: u64) -> Known {
    let url = format!("http://127.0.0.1:{port}/fleet/policies/document-{document}");
    let body = |value: u64| json!({"retry": {"initial_backoff_ms": value}});
    let request = match operation {
        Operation::Read => client.get(url),
        Operation::Write(value) => client.put(url).json(&body(value)),
        Operation::CompareAndSet { expected, value } => {
            client.put(url).header("if-match", expected.to_string()).json(&body(value))
        }
    };
    let response = match request.timeout(WAIT).send().await {
        Ok(response) => response,
        Err(error) if error.is_connect() || operation == Operation::Read => return Known::Nothing,
        Err(_) => return Known::Unknown,
    };
    let status = response.status();
    let Ok(body) = response.json::<Value>().await else {
        return if operation == Operation::Read { Known::Nothing } else { Known::Unknown };
    };
    match (status, body["outcome"].as_str()) {
        (StatusCode::OK, _) => {
            let value = body["document"]["retry"]["initial_backoff_ms"].as_u64();
            assert!(value.is_some(), "{body}");
            Known::Answered(Answer::Is { value, revision: body["mod_revision"].as_u64().unwrap() })
        }
        (StatusCode::NOT_FOUND, None) => Known::Answered(Answer::Is { value: None, revision: 0 }),
        (StatusCode::PRECONDITION_FAILED, Some("did_not_happen")) => Known::Answered(Answer::Conflict),
        (StatusCode::SERVICE_UNAVAILABLE, None) if operation == Operation::Read => Known::Nothing,
        (StatusCode::SERVICE_UNAVAILABLE, Some("did_not_happen")) => Known::Nothing,
        (StatusCode::SERVICE_UNAVAILABLE, Some("unknown")) => Known::Unknown,
        other => panic!("{operation:?}: {other:?}: {body}"),
    }
}

/// Calls until told to stop. Returns what it saw, and how many calls came to nothing.
async fn use_it(
    ports: Vec<u16>,
    mut random: Random,
    values: Arc<AtomicU64>,
    stop: Arc<AtomicBool>,
    began: Instant,
) -> (Vec<Call>, u64) {
    let client = Client::builder().no_proxy().build().unwrap();
    let (mut calls, mut nothing) = (Vec::new(), 0);
    let mut revisions: BTreeMap<u64, u64> = BTreeMap::new();
    while !stop.load(Ordering::Relaxed) {
        let (document, port) = (random.below(DOCUMENTS), *random.pick(&ports));
        let value = || values.fetch_add(1, Ordering::Relaxed);
        let operation = match (random.below(10), revisions.get(&document)) {
            (0..4, _) => Operation::Read,
            (4..7, Some(expected)) => Operation::CompareAndSet { expected: *expected, value: value() },
            _ => Operation::Write(value()),
        };
        let invoked = began.elapsed();
        let answer = match ask(&client, port, operation, document).await {
            Known::Answered(answer) => Some((began.elapsed(), answer)),
            Known::Unknown => None,
            Known::Nothing => {
                nothing += 1;
                tokio::time::sleep(Duration::from_millis(random.between(10, 50))).await;
                continue;
            }
        };
        if let Some((_, Answer::Is { revision, .. })) = answer {
            revisions.insert(document, revision);
        }
        calls.push(Call { document, operation, invoked, answer });
    }
    (calls, nothing)
}

/// Does one thing wrong, and makes it good again.
async fn disturb(members: &mut [Smg], places: &[Place], network: &Network, random: &mut Random) -> &'static str {
    let n = random.below(MEMBERS as u64) as usize;
    let length = Duration::from_millis(random.between(300, if soaking() { 5_000 } else { 1_500 }));
    match random.below(6) {
        0 | 1 => {
            members[n].kill();
            tokio::time::sleep(length / 2).await;
            members[n] = places[n].start(&[]);
            "killed"
        }
        2 => {
            members.iter_mut().for_each(Smg::kill);
            for (member, place) in members.iter_mut().zip(places) {
                *member = place.start(&[]);
            }
            "killed, all at once"
        }
        3 => {
            members[n].signal("STOP");
            tokio::time::sleep(length).await;
            members[n].signal("CONT");
            "stopped and continued"
        }
        4 => {
            network.isolate(n);
            tokio::time::sleep(length).await;
            network.mend();
            "cut off from both others"
        }
        _ => {
            network.cut(n, (n + 1) % MEMBERS);
            if random.chance(50) {
                network.cut(n, (n + 2) % MEMBERS);
            }
            tokio::time::sleep(length).await;
            network.mend();
            "cut off one way"
        }
    }
}

/// What every member says of every document in the end.
async fn read_all(places: &[Place], began: Instant) -> Vec<Call> {
    let client = Client::builder().no_proxy().build().unwrap();
    let mut calls = Vec::new();
    for document in 0..DOCUMENTS {
        for place in places {
            let call = eventually("an answer", || async {
                let invoked = began.elapsed();
                match ask(&client, place.port(), Operation::Read, document).await {
                    Known::Answered(answer) => {
                        let answer = Some((began.elapsed(), answer));
                        Some(Call { document, operation: Operation::Read, invoked, answer })
                    }
                    Known::Nothing | Known::Unknown => None,
                }
            });
            calls.push(call.await);
        }
    }
    calls
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn histories_under_kills_pauses_and_partitions_are_linearizable() {
    let seed = std::env::var("SMG_SEED").ok().and_then(|seed| seed.parse().ok());
    let seed = seed.unwrap_or_else(|| u64::from(std::process::id()));
    println!("seed {seed}");
    let mut random = Random::new(seed, 0);
    let places: Vec<Place> =
        (1..=MEMBERS).map(|n| Place::behind(&format!("127.0.2.{n}"), &format!("127.0.1.{n}"))).collect();
    let network = Network::before(&places).await;
    let mut members = cluster(&places).await;

    let (stop, values, began) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(1)), Instant::now());
    let ports: Vec<u16> = places.iter().map(Place::port).collect();
    let clients: Vec<_> = (1..=CLIENTS)
        .map(|n| {
            let (values, stop) = (Arc::clone(&values), Arc::clone(&stop));
            tokio::spawn(use_it(ports.clone(), Random::new(seed, n), values, stop, began))
        })
        .collect();
    let length = Duration::from_secs(if soaking() { 600 } else { 8 });
    let mut disturbances: BTreeMap<&str, u64> = BTreeMap::new();
    while began.elapsed() < length {
        *disturbances.entry(disturb(&mut members, &places, &network, &mut random).await).or_default() += 1;
        // Now and then the next thing goes wrong while the last one is not over.
        tokio::time::sleep(Duration::from_millis(random.below(2_500))).await;
    }
    until_voters(&members, MEMBERS).await;
    stop.store(true, Ordering::Relaxed);
    let (mut history, mut nothing) = (Vec::new(), 0);
    for client in clients {
        let (calls, without) = client.await.unwrap();
        history.extend(calls);
        nothing += without;
    }
    let took = began.elapsed();
    history.extend(read_all(&places, began).await);

    let counts = Counts::of(&history, nothing);
    println!("{counts:?} {disturbances:?}");
    assert!(counts.acknowledged > 10 && counts.reads > 10, "a history too short to show anything: {counts:?}");
    checker::check_revisions(&history).unwrap();
    for document in 0..DOCUMENTS {
        let calls: Vec<Call> = history.iter().filter(|call| call.document == document).cloned().collect();
        checker::check(&calls).unwrap_or_else(|reason| panic!("seed {seed}, document {document}: {reason:?}"));
    }
    if soaking() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/reports/linearizability.md");
        std::fs::write(path, report(seed, took, &counts, &disturbances)).unwrap();
    }
}

/// How many calls ended how.
#[derive(Debug, Default)]
struct Counts {
    reads: u64,
    acknowledged: u64,
    conflicts: u64,
    unknown: u64,
    nothing: u64,
}

impl Counts {
    fn of(history: &[Call], nothing: u64) -> Self {
        let mut counts = Self { nothing, ..Self::default() };
        for call in history {
            let count = match (call.operation, call.answer) {
                (_, None) => &mut counts.unknown,
                (_, Some((_, Answer::Conflict))) => &mut counts.conflicts,
                (Operation::Read, _) => &mut counts.reads,
                _ => &mut counts.acknowledged,
            };
            *count += 1;
        }
        counts
    }
}

fn report(seed: u64, took: Duration, counts: &Counts, disturbances: &BTreeMap<&str, u64>) -> String {
    let mut text = format!(
        "# Linearizability\n\n\
         The last long run of the check of histories (`SMG_SOAK=1 cargo nextest run -p smg --test linearizability`; what it is:\n\
         `tests/linearizability/main.rs`). There is no report unless one order of all calls on each document explains every answer.\n\n\
         Three control-plane processes, {CLIENTS} clients, {DOCUMENTS} documents, {:.0} s, seed {seed}.\n\n\
         | calls | how many |\n|---|---|\n\
         | reads answered | {} |\n| writes acknowledged | {} |\n| comparisons that failed | {} |\n\
         | writes of unknown outcome | {} |\n| writes that did not happen, and reads without an answer | {} |\n\n\
         | what was done to members | how often |\n|---|---|\n",
        took.as_secs_f64(),
        counts.reads,
        counts.acknowledged,
        counts.conflicts,
        counts.unknown,
        counts.nothing,
    );
    for (what, times) in disturbances {
        text += &format!("| {what} | {times} |\n");
    }
    text
}
