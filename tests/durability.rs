//! What was acknowledged survives: kills at any moment, a damaged file, a second process, a full disk.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod support;

use std::collections::BTreeMap;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use futures::future::join_all;
use reqwest::{Client, Method, StatusCode};
use serde_json::{Value, json};
use support::*;

const KILLS: u64 = 50;
const WRITERS: u64 = 6;
/// Objects of one writer: enough to never run dry, few enough to keep restarts short.
const OBJECTS: u64 = 12;

/// The states that one object may be in: one after an acknowledged write, several after an unacknowledged one.
#[derive(Debug)]
struct Object {
    allowed: Vec<Option<Value>>,
    id: Option<String>,
}

impl Object {
    fn absent() -> Self {
        Self { allowed: vec![None], id: None }
    }

    fn known(&self) -> Option<&Value> {
        self.allowed.last().and_then(Option::as_ref)
    }
}

/// A writer's view of its own objects: workers by URL, and one policy document.
struct Writer {
    number: u64,
    step: u64,
    workers: BTreeMap<String, Object>,
    policy: Object,
}

/// What one writer did until the kill.
#[derive(Default)]
struct Tally {
    acknowledged: u64,
    /// When the write was begun that got no answer.
    unanswered: Option<Instant>,
}

impl Writer {
    fn new(number: u64) -> Self {
        Self { number, step: 0, workers: BTreeMap::new(), policy: Object::absent() }
    }

    fn model(&self) -> String {
        format!("writer-{}", self.number)
    }

    /// Writes one after the other until one gets no answer; counts itself as `warm` once it has written.
    async fn write(&mut self, client: &Client, base: &str, warm: &AtomicU64) -> Tally {
        let mut tally = Tally::default();
        loop {
            self.step += 1;
            let (object, method, path, body, next) = self.next_write();
            let mut request = client.request(method, format!("{base}{path}"));
            if let Some(body) = &body {
                request = request.json(body);
            }
            let begun = Instant::now();
            let answer = request.send().await;
            let object = match &object {
                Some(url) => self.workers.get_mut(url).unwrap(),
                None => &mut self.policy,
            };
            match answer {
                Ok(response) => {
                    let (status, text) = (response.status(), response.text().await);
                    let (true, Ok(text)) = (status.is_success(), text) else {
                        panic!("a write was refused: {status}");
                    };
                    if let Some(id) = serde_json::from_str::<Value>(&text)
                        .ok()
                        .and_then(|body| body["worker_id"].as_str().map(str::to_owned))
                    {
                        object.id = Some(id);
                    }
                    object.allowed = vec![next];
                    tally.acknowledged += 1;
                    if tally.acknowledged == 1 {
                        warm.fetch_add(1, Ordering::AcqRel);
                    }
                }
                Err(_) => {
                    object.allowed.push(next);
                    tally.unanswered = Some(begun);
                    return tally;
                }
            }
        }
    }

    /// The next write: the worker it concerns (none: the policy), the request, and what it leads to.
    fn next_write(&mut self) -> (Option<String>, Method, String, Option<Value>, Option<Value>) {
        if self.step.is_multiple_of(7) {
            let document = json!({"policy": "random", "retry": {"max_retries": self.step}, "circuit_breaker": {"timeout_secs": self.step}});
            let path = format!("/fleet/policies/{}", self.model());
            return (None, Method::PUT, path, Some(document.clone()), Some(document));
        }
        // Nothing listens on port 9: a registration is acknowledged long before an engine answers.
        let url = format!("http://127.0.0.1:9/{}/{}", self.number, self.step % OBJECTS);
        let object = self.workers.entry(url.clone()).or_insert_with(Object::absent);
        let Some((spec, id)) = object.known().cloned().zip(object.id.clone()) else {
            let spec = self.spec(&url);
            return (Some(url), Method::POST, "/workers".to_owned(), Some(spec.clone()), Some(spec));
        };
        if self.step.is_multiple_of(2) {
            let patch = json!({"priority": self.step, "labels": {"patched": self.step.to_string()}});
            let mut next = spec;
            next["priority"] = patch["priority"].clone();
            next["labels"]["patched"] = patch["labels"]["patched"].clone();
            return (Some(url), Method::PATCH, format!("/workers/{id}"), Some(patch), Some(next));
        }
        (Some(url), Method::DELETE, format!("/workers/{id}"), None, None)
    }

    fn spec(&self, url: &str) -> Value {
        let text = format!("{}-{}", self.number, self.step);
        let role = ["prefill", "decode", "regular"][(self.step % 3) as usize];
        json!({
            "url": url,
            "worker_type": role,
            "runtime_type": "vllm",
            "models": [{"id": text, "context_length": self.step}],
            "priority": self.step,
            "cost": 2.5,
            "bootstrap_port": 1 + self.step % 60_000,
            "kv_connector": "MooncakeConnector",
            "kv_role": "kv_both",
            "kv_engine_id": text,
            "labels": {"text": "x".repeat(1 + (self.step % 64) as usize * 16), "written_by": text},
            "health": {"timeout_secs": 7},
            "resilience": {"cb_failure_threshold": 3},
        })
    }

    /// Compares what is there with what may be there, and goes on from what is there.
    fn check(&mut self, workers: &BTreeMap<String, Value>, policies: &BTreeMap<String, Value>) {
        for (url, object) in &mut self.workers {
            // A removal is a job: a worker that is on its way out is an acknowledged removal.
            let found = workers.get(url);
            let leaving = found.is_some_and(|worker| worker["job_status"]["job_type"] == "RemoveWorker");
            let matching = object.allowed.iter().rposition(|allowed| match (allowed, found) {
                (None, None) => true,
                (None, Some(_)) => leaving,
                (Some(spec), Some(worker)) => !leaving && is_part(spec, worker),
                (Some(_), None) => false,
            });
            let Some(matching) = matching else {
                panic!("{url} is {found:?}, which is none of {:?}", object.allowed);
            };
            object.allowed = vec![object.allowed.swap_remove(matching)];
            object.id = found.and_then(|worker| worker["id"].as_str().map(str::to_owned));
        }
        let found = policies.get(&self.model());
        let matching = self.policy.allowed.iter().rposition(|allowed| allowed.as_ref() == found);
        let Some(matching) = matching else {
            panic!("policy {} is {found:?}, which is none of {:?}", self.model(), self.policy.allowed);
        };
        self.policy.allowed = vec![self.policy.allowed.swap_remove(matching)];
    }
}

/// Whether every field of `part` is in `whole` with the same value.
fn is_part(part: &Value, whole: &Value) -> bool {
    match (part, whole) {
        (Value::Object(part), Value::Object(whole)) => {
            part.iter().all(|(key, value)| whole.get(key).is_some_and(|found| is_part(value, found)))
        }
        (Value::Array(part), Value::Array(whole)) => {
            part.len() == whole.len() && part.iter().zip(whole).all(|(part, whole)| is_part(part, whole))
        }
        _ => part == whole,
    }
}

async fn workers_and_policies(smg: &Smg) -> (BTreeMap<String, Value>, BTreeMap<String, Value>) {
    let by = |list: &Value, key: &str| -> BTreeMap<String, Value> {
        let entries = list.as_array().unwrap().iter();
        entries.map(|entry| (entry[key].as_str().unwrap().to_owned(), entry.clone())).collect()
    };
    let list = eventually("a list from the control plane", || async {
        let response = smg.get("/workers").await;
        let current = response.status() == StatusCode::OK && !response.headers().contains_key("x-smg-stale");
        if current { response.json::<Value>().await.ok() } else { None }
    })
    .await;
    let policies = smg.get_json("/fleet/policies").await;
    let policies = by(&policies["policies"], "model");
    (
        by(&list["workers"], "url"),
        policies.into_iter().map(|(model, record)| (model, record["document"].clone())).collect(),
    )
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fifty_kills_amid_writes_lose_nothing_acknowledged_and_tear_nothing() {
    let started = Instant::now();
    let directory = tempfile::tempdir().unwrap();
    // Jobs of workers that never answer stay out of the way.
    let flags = ["--worker-startup-delay", "3600"];
    let mut writers: Vec<Writer> = (0..WRITERS).map(Writer::new).collect();
    let (mut acknowledged, mut kills_in_flight, mut writes_in_flight) = (0, 0, 0);
    for kill in 0..=KILLS {
        let mut smg = Smg::durable(directory.path(), &flags).await;
        let (workers, policies) = workers_and_policies(&smg).await;
        for writer in &mut writers {
            writer.check(&workers, &policies);
        }
        let known = |url: &String| writers.iter().any(|writer| writer.workers.contains_key(url));
        assert!(workers.keys().all(known), "there is a worker that nobody wrote");
        if kill == KILLS {
            break;
        }
        let warm = Arc::new(AtomicU64::new(0));
        let base = smg.url.clone();
        let writing = join_all(writers.iter_mut().map(|writer| {
            let (client, base, warm) = (smg.client.clone(), base.clone(), Arc::clone(&warm));
            async move { writer.write(&client, &base, &warm).await }
        }));
        let killing = async {
            eventually("every writer has written once", || async {
                (warm.load(Ordering::Acquire) == WRITERS).then_some(())
            })
            .await;
            // The moment of the kill is the experiment: 0 to 200 ms into the writing.
            tokio::time::sleep(Duration::from_millis(kill * 83 % 201)).await;
            let at = Instant::now();
            smg.kill();
            at
        };
        let (tallies, at) = tokio::join!(writing, killing);
        let in_flight = tallies.iter().filter(|tally| tally.unanswered.is_some_and(|begun| begun < at)).count();
        acknowledged += tallies.iter().map(|tally| tally.acknowledged).sum::<u64>();
        writes_in_flight += in_flight;
        kills_in_flight += usize::from(in_flight > 0);
    }
    println!(
        "{KILLS} kills in {:?}: {acknowledged} writes acknowledged, {kills_in_flight} kills hit {writes_in_flight} writes in flight",
        started.elapsed()
    );
    assert!(kills_in_flight >= 30, "only {kills_in_flight} kills hit a write in flight");
    assert!(acknowledged >= KILLS * WRITERS, "only {acknowledged} writes were acknowledged");
}

#[tokio::test]
async fn a_data_directory_in_use_is_refused_and_its_user_goes_on() {
    let directory = tempfile::tempdir().unwrap();
    let smg = Smg::durable(directory.path(), &[]).await;
    let path = directory.path().to_str().unwrap();
    let port = free_port().to_string();
    let listen = format!("127.0.0.1:{port}");
    let launch = vec!["launch", "--pd-disaggregation", "--data-dir", path, "--host", "127.0.0.1", "--port", &port];
    let member = vec!["controlplane", "--insecure", "--data-dir", path, "--listen", &listen, "--bootstrap"];
    for arguments in [launch, member] {
        let mut second = Smg::spawn(&arguments, 0, &[]);
        assert_eq!(second.exited().await.code(), Some(73), "{}", second.log());
        assert!(second.log().contains("in use by another process"), "{}", second.log());
    }
    let response = smg.post("/workers", &json!({"url": "http://127.0.0.1:9", "worker_type": "decode"})).await;
    assert_eq!(response.status(), StatusCode::ACCEPTED);
}

/// Every file below `directory` with its bytes, lock files aside.
fn contents(directory: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut found = BTreeMap::new();
    for entry in std::fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            found.extend(contents(&path));
        } else {
            found.insert(path.clone(), std::fs::read(&path).unwrap());
        }
    }
    found
}

#[tokio::test]
async fn a_damaged_data_file_stops_the_start_and_is_left_as_it_is() {
    let directory = tempfile::tempdir().unwrap();
    let mut smg = Smg::durable(directory.path(), &[]).await;
    let response = smg.post("/workers", &json!({"url": "http://127.0.0.1:9", "worker_type": "decode"})).await;
    assert_eq!(response.status(), StatusCode::ACCEPTED);
    smg.kill();
    let whole = contents(directory.path());
    let log = whole.keys().find(|path| path.ends_with("raft.redb")).unwrap().clone();
    let bytes = &whole[&log];
    let damages = [
        ("cut in half", bytes[..bytes.len() / 2].to_vec()),
        ("empty", Vec::new()),
        ("another file's head", [&[0x55; 4096][..], &bytes[4096..]].concat()),
        ("noise", (0..bytes.len()).map(|at| (at * 31 % 251) as u8).collect()),
    ];
    for (what, damaged) in damages {
        std::fs::write(&log, &damaged).unwrap();
        let before = contents(directory.path());
        let port = free_port().to_string();
        let mut smg = Smg::spawn(
            &["launch", "--data-dir", directory.path().to_str().unwrap(), "--host", "127.0.0.1", "--port", &port],
            0,
            &[],
        );
        assert_eq!(smg.exited().await.code(), Some(73), "{what}: {}", smg.log());
        let words = smg.log();
        assert!(words.contains("raft.redb") && words.contains("damaged"), "{what}: {words}");
        assert!(contents(directory.path()) == before, "{what}: the start changed a file");
    }
    std::fs::write(&log, bytes).unwrap();
    let smg = Smg::durable(directory.path(), &[]).await;
    let (workers, _) = workers_and_policies(&smg).await;
    assert!(workers.contains_key("http://127.0.0.1:9"));
}

#[tokio::test]
async fn the_temporary_state_of_a_killed_process_goes_with_the_next_start() {
    let place = tempfile::tempdir().unwrap();
    let start = async || {
        let port = free_port();
        let text = port.to_string();
        let environment = [("TMPDIR", place.path().to_str().unwrap())];
        let smg = Smg::spawn(&["launch", "--host", "127.0.0.1", "--port", &text], port, &environment);
        eventually("it serves", || async { smg.client.get(format!("{}/liveness", smg.url)).send().await.ok() }).await;
        smg
    };
    let states = || {
        let entries = std::fs::read_dir(place.path()).unwrap().map(|entry| entry.unwrap().file_name());
        entries.filter(|name| name.to_str().unwrap().starts_with("smg-state-")).collect::<Vec<_>>()
    };
    let mut killed = start().await;
    let left = states();
    assert_eq!(left.len(), 1);
    let mut living = start().await;
    assert_eq!(states().len(), 2, "the state of a process that lives stays");
    killed.kill();
    let mut last = start().await;
    assert!(states().len() == 2 && !states().contains(&left[0]));
    for smg in [&mut living, &mut last] {
        smg.signal("TERM");
        smg.exited().await;
    }
    assert!(states().is_empty());
}

/// A small file system of its own, unmounted at the end.
struct Disk {
    path: tempfile::TempDir,
}

impl Disk {
    /// `None` where mounting is not permitted.
    fn mount(size: &str) -> Option<Self> {
        let path = tempfile::tempdir().unwrap();
        let options = format!("size={size},mode=0700");
        let mounted = Command::new("mount").args(["-t", "tmpfs", "-o", &options, "tmpfs"]).arg(path.path()).output();
        match mounted {
            Ok(output) if output.status.success() => Some(Self { path }),
            Ok(output) => {
                println!("skipped: no tmpfs can be mounted: {}", String::from_utf8_lossy(&output.stderr).trim());
                None
            }
            Err(error) => {
                println!("skipped: no mount command: {error}");
                None
            }
        }
    }

    fn data(&self) -> PathBuf {
        self.path.path().join("data")
    }

    fn filler(&self) -> PathBuf {
        self.path.path().join("filler")
    }

    /// Fills it to the last byte.
    fn fill(&self) {
        let mut file = std::fs::File::create(self.filler()).unwrap();
        for size in [1 << 20, 4096, 1] {
            while file.write_all(&vec![0; size]).is_ok() {}
        }
    }

    fn free(&self) {
        std::fs::remove_file(self.filler()).unwrap();
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(self.path.path()).status();
    }
}

/// A registration that takes much room.
fn bulky(number: usize) -> Value {
    let labels: BTreeMap<String, String> = (0..14).map(|label| (format!("l{label}"), "x".repeat(4000))).collect();
    json!({"url": format!("http://127.0.0.1:9/{number}"), "worker_type": "regular", "labels": labels})
}

/// Registers bulky workers until one is not accepted. Returns the URLs of the accepted ones and the refusal.
async fn write_until_refused(smg: &Smg) -> (Vec<String>, StatusCode, Value) {
    let mut accepted = Vec::new();
    for number in 0..2000 {
        let spec = bulky(number);
        let response = smg.post("/workers", &spec).await;
        if response.status() != StatusCode::ACCEPTED {
            return (accepted, response.status(), response.json().await.unwrap());
        }
        accepted.push(spec["url"].as_str().unwrap().to_owned());
    }
    panic!("the disk never filled up");
}

#[tokio::test]
async fn a_full_disk_ends_writes_and_not_serving_and_loses_nothing_acknowledged() {
    let Some(disk) = Disk::mount("48m") else { return };
    let (prefill, decode) = (sglang(Role::Prefill).await, sglang(Role::Decode).await);
    let mut smg = Smg::durable(&disk.data(), &[]).await;
    smg.register_pair(&prefill, &decode).await;
    disk.fill();
    let (accepted, status, refusal) = write_until_refused(&smg).await;
    assert_eq!(status, StatusCode::SERVICE_UNAVAILABLE, "{refusal}");
    let codes = [json!("STORE_FAILED"), json!("OUTCOME_UNKNOWN")];
    assert!(codes.contains(&refusal["code"]), "{refusal}");
    for (path, body) in [("/workers", bulky(5000)), ("/workers", json!({"url": "http://127.0.0.1:9/small"}))] {
        let response = smg.post(path, &body).await;
        assert_eq!(response.status(), StatusCode::SERVICE_UNAVAILABLE);
        let body: Value = response.json().await.unwrap();
        assert_eq!(body["code"], "STORE_FAILED", "{body}");
        assert!(body["error"].as_str().is_some_and(|words| !words.is_empty()));
    }
    for body in [chat(), chat_stream()] {
        assert_eq!(smg.post("/v1/chat/completions", &body).await.status(), StatusCode::OK);
    }
    let readiness = smg.get("/readiness").await;
    assert_eq!(readiness.status(), StatusCode::OK);
    let readiness: Value = readiness.json().await.unwrap();
    assert!(readiness["store_failure"].as_str().is_some_and(|reason| !reason.is_empty()), "{readiness}");
    smg.kill();

    disk.free();
    let smg = Smg::durable(&disk.data(), &[]).await;
    let (workers, _) = workers_and_policies(&smg).await;
    for url in accepted.iter().chain([&prefill.url(), &decode.url()]) {
        assert!(workers.contains_key(url), "{url} was acknowledged and is gone");
    }
    for (url, worker) in workers.iter().filter(|(url, _)| url.contains(":9/")) {
        let number = url.rsplit('/').next().unwrap().parse().unwrap();
        assert!(is_part(&bulky(number), worker), "{url} is torn");
    }
    assert!(!workers.contains_key("http://127.0.0.1:9/5000"), "a write after the failure was applied");
    let response = smg.post("/workers", &json!({"url": "http://127.0.0.1:9/after"})).await;
    assert_eq!(response.status(), StatusCode::ACCEPTED);
    drop(smg);
}

#[tokio::test]
async fn a_control_plane_whose_disk_is_full_exits_with_its_own_code() {
    let Some(disk) = Disk::mount("48m") else { return };
    let port = free_port();
    let mut smg = Smg::controlplane(&disk.data(), port, &[]).await;
    disk.fill();
    // The process may be gone before the refusal is read.
    let mut accepted = 0;
    for number in 0..2000 {
        let sent = smg.client.post(format!("{}/workers", smg.url)).json(&bulky(number)).send().await;
        match sent {
            Ok(response) if response.status() == StatusCode::ACCEPTED => accepted += 1,
            _ => break,
        }
    }
    assert!(accepted < 2000, "the disk never filled up");
    assert_eq!(smg.exited().await.code(), Some(74), "{}", smg.log());
    assert!(smg.log().contains("the store has stopped"), "{}", smg.log());
    disk.free();
    let smg = Smg::controlplane(&disk.data(), port, &[]).await;
    let (workers, _) = workers_and_policies(&smg).await;
    assert!(workers.len() >= accepted, "{} of {accepted} acknowledged workers are there", workers.len());
    drop(smg);
}
