//! What integration tests share: the real binary as a child process, mock engines, and an HTTP client.
//!
//! Every process gets free ports and temporary directories, and ends with its handle. Nothing waits by sleeping: conditions are polled
//! with a deadline.
#![allow(dead_code, unused_imports, clippy::unwrap_used, clippy::expect_used, clippy::panic)]

pub mod cluster;
pub mod fleet;
pub mod refusals;

use std::collections::BTreeMap;
use std::collections::hash_map::RandomState;
use std::fs::File;
use std::future::Future;
use std::hash::{BuildHasher, Hasher};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

pub use mock_engine::{Connector, Engine, Fault, MockEngine, Role};
use reqwest::{Client, Response, StatusCode};
use serde_json::{Value, json};

/// How long a condition may take before a test fails. Generous: machines are slow and shared.
pub const PATIENCE: Duration = Duration::from_secs(20);
/// The model of all mock engines.
pub const MODEL: &str = "m";

/// A port that nobody else takes while this process lives: outside the range from which the system serves connections, and kept
/// from other test processes by a lock.
pub fn free_port() -> u16 {
    static HELD: Mutex<Vec<File>> = Mutex::new(Vec::new());
    let locks = std::env::temp_dir().join("smg-test-ports");
    std::fs::create_dir_all(&locks).unwrap();
    loop {
        let port = 10_000 + (RandomState::new().build_hasher().finish() % 20_000) as u16;
        let lock = File::create(locks.join(port.to_string())).unwrap();
        if lock.try_lock().is_ok() && TcpListener::bind(("127.0.0.1", port)).is_ok() {
            HELD.lock().unwrap().push(lock);
            return port;
        }
    }
}

/// Whether tests run in their long variants.
pub fn soaks() -> bool {
    std::env::var_os("SMG_SOAK").is_some()
}

/// The best of several measurements. A busy machine is late now and then; a timer or a buffer would make all of them late.
pub fn best(measured: impl IntoIterator<Item = Duration>) -> Duration {
    measured.into_iter().min().unwrap()
}

/// What is usual among several measurements.
pub fn usual(measured: impl IntoIterator<Item = Duration>) -> Duration {
    let mut measured: Vec<_> = measured.into_iter().collect();
    measured.sort_unstable();
    measured[measured.len() / 2]
}

/// Polls `condition` until it yields a value.
pub async fn eventually<T, F: Future<Output = Option<T>>>(what: &str, condition: impl FnMut() -> F) -> T {
    eventually_within(PATIENCE, what, condition).await
}

/// As [`eventually`], for conditions that are hundreds of requests away.
pub async fn eventually_within<T, F: Future<Output = Option<T>>>(
    limit: Duration,
    what: &str,
    mut condition: impl FnMut() -> F,
) -> T {
    let deadline = Instant::now() + limit;
    loop {
        if let Some(value) = condition().await {
            return value;
        }
        assert!(Instant::now() < deadline, "not within {limit:?}: {what}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// A directory for a process's own files, in memory where the system has such a place: only tests of durability need a disk.
fn scratch() -> tempfile::TempDir {
    tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap()
}

/// The `smg` binary as a child process.
pub struct Smg {
    child: Child,
    /// `http://127.0.0.1:PORT` of the API (for a control plane: of the admin API).
    pub url: String,
    /// Port of the API.
    pub port: u16,
    /// Port of the metrics.
    pub metrics_port: u16,
    log: PathBuf,
    /// An HTTP client without redirects, proxies or retries.
    pub client: Client,
    _directory: tempfile::TempDir,
}

static COUNTER: AtomicU64 = AtomicU64::new(0);

impl Smg {
    /// `smg launch --pd-disaggregation` with further flags, answering probes.
    pub async fn launch(flags: &[&str]) -> Self {
        let mut all = vec!["launch", "--pd-disaggregation", "--worker-startup-check-interval", "1"];
        all.extend(flags);
        Self::start(&all).await
    }

    /// `smg launch` that keeps its state in `directory`.
    pub async fn durable(directory: &Path, flags: &[&str]) -> Self {
        let directory = directory.to_str().unwrap();
        let mut all = vec!["--data-dir", directory];
        all.extend(flags);
        Self::launch(&all).await
    }

    /// `smg gateway` of the control planes at `addresses` (`HOST:PORT,…`).
    pub async fn gateway(addresses: &str, flags: &[&str]) -> Self {
        let mut all = vec!["gateway", "--insecure", "--controlplane", addresses];
        all.extend(flags);
        Self::start(&all).await
    }

    /// `smg controlplane` on `port` that keeps its state in `directory`.
    pub async fn controlplane(directory: &Path, port: u16, flags: &[&str]) -> Self {
        let listen = format!("127.0.0.1:{port}");
        let mut all = vec!["controlplane", "--insecure", "--bootstrap", "--data-dir", directory.to_str().unwrap()];
        all.extend(["--listen", &listen, "--peer-listen", "127.0.0.1:0"]);
        all.extend(flags);
        let smg = Self::spawn(&all, port, &[]);
        smg.ready("/fleet/cluster").await;
        smg
    }

    async fn start(arguments: &[&str]) -> Self {
        let port = free_port();
        let port_text = port.to_string();
        let mut all = arguments.to_vec();
        all.extend(["--host", "127.0.0.1", "--port", &port_text]);
        let smg = Self::spawn(&all, port, &[]);
        smg.ready("/liveness").await;
        smg
    }

    /// Starts the binary without waiting for anything.
    pub fn spawn(arguments: &[&str], port: u16, environment: &[(&str, &str)]) -> Self {
        Self::spawn_by(Command::new(env!("CARGO_BIN_EXE_smg")), arguments, port, environment)
    }

    /// As [`Self::spawn`], by a command that becomes the binary.
    pub fn spawn_by(mut command: Command, arguments: &[&str], port: u16, environment: &[(&str, &str)]) -> Self {
        let directory = scratch();
        let log = directory.path().join(format!("smg-{}.log", COUNTER.fetch_add(1, Ordering::Relaxed)));
        let metrics_port = free_port();
        let child = command
            .args(arguments)
            .args(["--prometheus-host", "127.0.0.1", "--prometheus-port", &metrics_port.to_string()])
            .env("RUST_LOG", "warn,smg=info,smg::routers=debug")
            .env("TMPDIR", directory.path())
            .envs(environment.iter().copied())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(std::fs::File::create(&log).unwrap())
            .spawn()
            .unwrap();
        let client = Client::builder().redirect(reqwest::redirect::Policy::none()).no_proxy().build().unwrap();
        Self { child, url: format!("http://127.0.0.1:{port}"), port, metrics_port, log, client, _directory: directory }
    }

    /// Waits until `path` answers.
    pub async fn ready(&self, path: &str) {
        eventually(&format!("{path} answers; log:\n{}", self.log()), || async {
            self.client.get(format!("{}{path}", self.url)).send().await.ok()
        })
        .await;
    }

    /// What it has logged so far.
    pub fn log(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// Waits until it has logged a line that has all of these words in it. A request's answer may come before its lines.
    pub async fn logged(&self, words: &[&str]) {
        eventually(&format!("a line with {words:?} is logged"), || async {
            self.log().lines().any(|line| words.iter().all(|word| line.contains(word))).then_some(())
        })
        .await;
    }

    /// The process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Sends a signal.
    pub fn signal(&self, name: &str) {
        let status = Command::new("kill").args([&format!("-{name}"), &self.pid().to_string()]).status().unwrap();
        assert!(status.success());
    }

    /// Kills it with SIGKILL and waits until it is gone.
    pub fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// Waits until it has exited by itself.
    pub async fn exited(&mut self) -> ExitStatus {
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status;
            }
            assert!(Instant::now() < deadline, "it did not exit; log:\n{}", self.log());
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    /// `GET path`.
    pub async fn get(&self, path: &str) -> Response {
        self.client.get(format!("{}{path}", self.url)).send().await.unwrap()
    }

    /// `GET path` as JSON.
    pub async fn get_json(&self, path: &str) -> Value {
        self.get(path).await.json().await.unwrap()
    }

    /// `POST path` with a JSON body.
    pub async fn post(&self, path: &str, body: &Value) -> Response {
        self.client.post(format!("{}{path}", self.url)).json(body).send().await.unwrap()
    }

    /// `POST path` with these bytes as a JSON body.
    pub async fn post_bytes(&self, path: &str, body: impl Into<reqwest::Body>) -> Response {
        let request = self.client.post(format!("{}{path}", self.url)).header("content-type", "application/json");
        request.body(body).send().await.unwrap()
    }

    /// `POST path` with a JSON body under a request id.
    pub async fn post_as(&self, request_id: &str, path: &str, body: &Value) -> Response {
        let request = self.client.post(format!("{}{path}", self.url)).header("x-request-id", request_id);
        request.json(body).send().await.unwrap()
    }

    /// Writes the policy document of a model (`default` = the fleet's). It holds for this process when this returns.
    pub async fn set_policy(&self, model: &str, document: &Value) {
        let request = self.client.put(format!("{}/fleet/policies/{model}", self.url)).json(document);
        let response = request.send().await.unwrap();
        assert_eq!(response.status(), StatusCode::OK, "{}", response.text().await.unwrap());
    }

    /// Removes a worker and waits until it is gone.
    pub async fn remove(&self, id: &str) {
        let path = format!("/workers/{id}");
        let response = self.client.delete(format!("{}{path}", self.url)).send().await.unwrap();
        assert_eq!(response.status(), StatusCode::ACCEPTED);
        eventually("the worker is gone", || async { (self.get(&path).await.status() == 404).then_some(()) }).await;
    }

    /// Registers a worker and waits until this process routes to it. Returns its id.
    pub async fn register(&self, spec: &Value) -> String {
        // A starved machine may commit too late for the answer: then the same is asked again, and may be there already.
        let asked = AtomicU64::new(0);
        let response = eventually("the control plane answers", || async {
            asked.fetch_add(1, Ordering::Relaxed);
            let response = self.post("/workers", spec).await;
            (response.status() != StatusCode::SERVICE_UNAVAILABLE).then_some(response)
        })
        .await;
        let again = asked.load(Ordering::Relaxed) > 1;
        let id = if again && response.status() == StatusCode::CONFLICT {
            let list = self.get_json("/workers").await;
            let known = list["workers"].as_array().unwrap().iter().find(|worker| worker["url"] == spec["url"]).cloned();
            known.unwrap()["id"].as_str().unwrap().to_owned()
        } else {
            assert_eq!(response.status(), StatusCode::ACCEPTED, "{}", response.text().await.unwrap());
            let accepted: Value = response.json().await.unwrap();
            accepted["worker_id"].as_str().unwrap().to_owned()
        };
        self.until_healthy(&id).await;
        id
    }

    /// Waits until a worker is healthy.
    pub async fn until_healthy(&self, id: &str) {
        eventually(&format!("worker {id} is healthy; log:\n{}", self.log()), || async {
            let worker = self.get_json(&format!("/workers/{id}")).await;
            (worker["is_healthy"] == true).then_some(())
        })
        .await;
    }

    /// Registers a prefill and a decode engine as a pair, with the connector the engines have.
    pub async fn register_pair(&self, prefill: &MockEngine, decode: &MockEngine) -> (String, String) {
        (self.register(&spec(prefill, "prefill")).await, self.register(&spec(decode, "decode")).await)
    }

    /// The metrics text.
    pub async fn metrics(&self) -> String {
        let url = format!("http://127.0.0.1:{}/metrics", self.metrics_port);
        self.client.get(url).send().await.unwrap().text().await.unwrap()
    }

    /// The sum of a metric's samples whose labels contain all of `labels`; 0 when there is none.
    pub async fn metric(&self, name: &str, labels: &[(&str, &str)]) -> f64 {
        samples(&self.metrics().await, name, labels).into_values().sum()
    }

    /// Waits until every in-flight gauge is back at zero: nothing leaked.
    pub async fn until_idle(&self) {
        eventually("all in-flight gauges are 0", || async {
            let metrics = self.metrics().await;
            let workers = samples(&metrics, "smg_worker_requests_active", &[]).values().sum::<f64>();
            let requests = samples(&metrics, "smg_http_requests_active", &[]).values().sum::<f64>();
            (workers == 0.0 && requests == 0.0).then_some(())
        })
        .await;
    }

    /// The decision record of a request, once it says how the request ended.
    pub async fn decision(&self, request_id: &str) -> Value {
        eventually(&format!("a finished decision record of {request_id}"), || async {
            let found = self.get_json(&format!("/fleet/decisions?request_id={request_id}")).await;
            let record = found["decisions"].get(0)?.clone();
            record["outcome"].is_string().then_some(record)
        })
        .await
    }
}

impl Drop for Smg {
    fn drop(&mut self) {
        self.kill();
        if std::thread::panicking() {
            eprintln!("--- log of smg on {}\n{}", self.url, self.log());
        }
    }
}

/// The samples of a metric, by label text, whose labels contain all of `labels`.
pub fn samples(metrics: &str, name: &str, labels: &[(&str, &str)]) -> BTreeMap<String, f64> {
    metrics
        .lines()
        .filter_map(|line| {
            let rest = line.strip_prefix(name)?;
            let (label_text, value) = match rest.strip_prefix('{') {
                Some(rest) => rest.rsplit_once("} ")?,
                None => ("", rest.strip_prefix(' ')?),
            };
            let wanted = labels.iter().all(|(key, value)| label_text.contains(&format!("{key}=\"{value}\"")));
            wanted.then(|| (label_text.to_owned(), value.parse().unwrap()))
        })
        .collect()
}

/// The registration of a mock engine, its connector and ports declared as an operator would.
pub fn spec(engine: &MockEngine, worker_type: &str) -> Value {
    let mut spec = json!({"url": engine.url(), "worker_type": worker_type});
    if let Some(port) = engine.bootstrap_port() {
        spec["bootstrap_port"] = json!(port);
    }
    spec
}

/// As [`spec`], with fields added or replaced.
pub fn spec_with(engine: &MockEngine, worker_type: &str, fields: Value) -> Value {
    let mut spec = spec(engine, worker_type);
    for (name, value) in fields.as_object().unwrap() {
        spec[name] = value.clone();
    }
    spec
}

/// A SGLang engine.
pub async fn sglang(role: Role) -> MockEngine {
    MockEngine::builder().engine(Engine::Sglang).role(role).model(MODEL).start().await.unwrap()
}

/// A SGLang engine that reports no load: placement depends on the gateway's own requests alone.
pub async fn silent(role: Role, model: &str) -> MockEngine {
    let engine = MockEngine::builder().engine(Engine::Sglang).role(role).model(model);
    engine.override_path("/v1/loads", 404, "{}").override_path("/metrics", 404, "{}").start().await.unwrap()
}

/// A vLLM engine with a connector.
pub async fn vllm(role: Role, connector: Connector) -> MockEngine {
    MockEngine::builder().engine(Engine::Vllm).role(role).connector(connector).model(MODEL).start().await.unwrap()
}

/// A SGLang pair behind a gateway.
pub async fn sglang_pair(flags: &[&str]) -> (Smg, MockEngine, MockEngine) {
    let (prefill, decode) = (sglang(Role::Prefill).await, sglang(Role::Decode).await);
    let smg = Smg::launch(flags).await;
    smg.register_pair(&prefill, &decode).await;
    (smg, prefill, decode)
}

/// A vLLM NIXL pair behind a gateway.
pub async fn nixl_pair(flags: &[&str]) -> (Smg, MockEngine, MockEngine) {
    let (prefill, decode) = (vllm(Role::Prefill, Connector::Nixl).await, vllm(Role::Decode, Connector::Nixl).await);
    let smg = Smg::launch(flags).await;
    smg.register(&spec_with(&prefill, "prefill", json!({"kv_connector": "NixlConnector"}))).await;
    smg.register(&spec_with(&decode, "decode", json!({"kv_connector": "NixlConnector"}))).await;
    (smg, prefill, decode)
}

/// Asserts that a vLLM pair tells of its prompts what one engine tells, and asks its decode for nothing of it.
pub async fn assert_prompt_logprobs_are_those_of_one_engine(smg: &Smg, decode: &MockEngine) {
    let single = vllm(Role::Regular, Connector::None).await;
    for (path, mut body) in [("/v1/chat/completions", chat()), ("/v1/completions", completion())] {
        body["prompt_logprobs"] = json!(1);
        let url = format!("{}{path}", single.url());
        let alone = smg.client.post(url).header("x-request-id", "same").json(&body).send().await.unwrap();
        let alone = alone.text().await.unwrap();
        let paired = smg.post_as("same", path, &body).await;
        assert_eq!(paired.headers()["content-type"], "application/json", "{path}");
        assert_eq!(paired.text().await.unwrap(), alone, "{path}");
        assert!(alone.contains(r#""prompt_logprobs":[null"#), "{alone}");
        let asked = decode.generations().pop().unwrap().json();
        assert!(asked.get("prompt_logprobs").is_none() && asked["kv_transfer_params"].is_object(), "{asked}");
    }
}

/// A chat completion request.
pub fn chat() -> Value {
    json!({"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8})
}

/// A streamed chat completion request.
pub fn chat_stream() -> Value {
    let mut body = chat();
    body["stream"] = json!(true);
    body
}

/// A completion request.
pub fn completion() -> Value {
    json!({"model": MODEL, "prompt": "hi", "max_tokens": 8})
}

/// A completion request of SGLang's own API.
pub fn generate() -> Value {
    json!({"text": "hi", "sampling_params": {"max_new_tokens": 8}})
}

/// The generation routes, each with a request of its own shape.
pub fn requests() -> [(&'static str, Value); 3] {
    [("/v1/chat/completions", chat()), ("/v1/completions", completion()), ("/generate", generate())]
}

/// `body` as a request for a stream.
pub fn streamed(mut body: Value) -> Value {
    body["stream"] = json!(true);
    body
}

/// How a request runs over its legs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dispatch {
    /// Both legs at once: SGLang.
    Parallel,
    /// Prefill, then decode: vLLM with NIXL.
    Sequential,
    /// One leg.
    Regular,
}

/// All kinds of dispatch.
pub const DISPATCHES: [Dispatch; 3] = [Dispatch::Parallel, Dispatch::Sequential, Dispatch::Regular];

/// What a NIXL prefill answers, for tests whose decode engine is scripted.
pub const HANDOFF: &str = r#"{"do_remote_prefill":true,"remote_engine_id":"e","remote_request_id":"r","remote_block_ids":[1,2],"remote_host":"127.0.0.1","remote_port":5600,"tp_size":1}"#;

/// A gateway over the workers of one kind of dispatch, whose output a test scripts.
pub struct Serving {
    /// The gateway.
    pub smg: Smg,
    /// The prefill engine, unless the dispatch is regular.
    pub prefill: Option<MockEngine>,
    /// The engine whose answer the client gets.
    pub output: MockEngine,
}

impl Serving {
    /// Starts it. The prefill engine works as it should.
    pub async fn start(dispatch: Dispatch, flags: &[&str]) -> Self {
        match dispatch {
            Dispatch::Parallel => {
                let (smg, prefill, output) = sglang_pair(flags).await;
                Self { smg, prefill: Some(prefill), output }
            }
            Dispatch::Sequential => {
                let (smg, prefill, output) = nixl_pair(flags).await;
                Self { smg, prefill: Some(prefill), output }
            }
            Dispatch::Regular => {
                let output = sglang(Role::Regular).await;
                let smg = Smg::launch(flags).await;
                smg.register(&spec(&output, "regular")).await;
                Self { smg, prefill: None, output }
            }
        }
    }

    /// As [`Serving::start`], with a prefill engine that is done at once, because no decode engine will ask it for KV.
    pub async fn scripted(dispatch: Dispatch, flags: &[&str]) -> Self {
        let serving = Self::start(dispatch, flags).await;
        if let Some(prefill) = &serving.prefill {
            prefill.set_fault(instant_prefill());
        }
        serving
    }

    /// As [`Serving::start`], with engines that take every body: for tests that look at requests only.
    pub async fn accepting(dispatch: Dispatch, flags: &[&str]) -> Self {
        let serving = Self::start(dispatch, flags).await;
        serving.engines().for_each(|engine| engine.set_fault(anything()));
        serving
    }

    /// Both engines, or the one there is.
    pub fn engines(&self) -> impl Iterator<Item = &MockEngine> {
        self.prefill.iter().chain([&self.output])
    }

    /// How often the breaker of `engine` was told of a failure.
    pub async fn failures(&self, engine: &MockEngine) -> f64 {
        self.smg.metric("smg_worker_cb_outcomes_total", &[("worker", &engine.url()), ("outcome", "failure")]).await
    }
}

/// A prefill that is done at once and hands over [`HANDOFF`].
pub fn instant_prefill() -> Fault {
    Fault::generation().status(200, format!(r#"{{"object":"prefill","kv_transfer_params":{HANDOFF}}}"#))
}

/// An answer of any engine.
pub fn anything() -> Fault {
    Fault::generation().status(200, format!(r#"{{"object":"anything","kv_transfer_params":{HANDOFF}}}"#))
}

/// A script whose pieces follow each other without a pause.
pub fn at_once<'a>(pieces: impl IntoIterator<Item = &'a str>) -> Vec<(Duration, String)> {
    pieces.into_iter().map(|piece| (Duration::ZERO, piece.to_owned())).collect()
}

impl Smg {
    /// How many sockets of this process are connected to a local port.
    pub fn sockets_to(&self, port: u16) -> usize {
        let own: std::collections::BTreeSet<String> = std::fs::read_dir(format!("/proc/{}/fd", self.pid()))
            .unwrap()
            .filter_map(|entry| std::fs::read_link(entry.ok()?.path()).ok()?.into_os_string().into_string().ok())
            .filter_map(|target| Some(target.strip_prefix("socket:[")?.strip_suffix(']')?.to_owned()))
            .collect();
        let remote = format!(":{port:04X}");
        let connections = std::fs::read_to_string(format!("/proc/{}/net/tcp", self.pid())).unwrap();
        connections
            .lines()
            .map(|line| line.split_whitespace().collect::<Vec<_>>())
            .filter(|fields| fields.len() > 9 && fields[2].ends_with(&remote) && own.contains(fields[9]))
            .count()
    }

    /// Waits until no socket of this process is connected to the engines.
    pub async fn until_disconnected(&self, engines: impl Iterator<Item = &MockEngine>) {
        for engine in engines {
            eventually(&format!("no socket to {}", engine.url()), || async {
                (self.sockets_to(engine.port()) == 0).then_some(())
            })
            .await;
        }
    }

    /// Resident memory of this process in bytes, without the parts of files (such as its own code) that are mapped into it.
    pub fn resident_bytes(&self) -> u64 {
        let pages = std::fs::read_to_string(format!("/proc/{}/statm", self.pid())).unwrap();
        let pages: Vec<u64> = pages.split_whitespace().map(|pages| pages.parse().unwrap()).collect();
        (pages[1] - pages[2]) * 4096
    }
}
