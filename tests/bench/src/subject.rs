//! What is measured: an engine asked directly, `smg` in front of pairs, and other gateways.

use std::collections::BTreeMap;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::rc::Rc;
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::{Method, Request, header};
use http_body_util::{BodyExt, Full};
use hyper_util::client::legacy::Client;
use hyper_util::rt::TokioExecutor;
use serde_json::{Value, json};

use crate::Result;
use crate::process::Process;
use crate::workload::{MODEL, Workload};

/// Longest start of a subject: some take long with hundreds of workers.
const START: Duration = Duration::from_secs(180);
/// Longest wait for one answer meanwhile.
const ATTEMPT: Duration = Duration::from_secs(10);

/// Who is measured.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Kind {
    /// One regular engine, no gateway.
    Direct,
    /// `smg launch` over SGLang pairs.
    SmgSglang,
    /// `smg launch` over vLLM NIXL pairs.
    SmgVllm,
    /// `smg launch` over SGLang pairs that speak gRPC.
    SmgGrpc,
    /// The least that a proxy of this kind can do, in front of the SGLang pairs.
    Floor,
    /// Another gateway.
    Peer {
        /// What it stands in front of.
        pairs: Pairs,
        /// Its name in the table.
        name: String,
        /// How it is started.
        command: String,
    },
}

/// The engines behind a gateway, and how it is told of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pairs {
    /// SGLang pairs, when it starts.
    Sglang,
    /// vLLM pairs with NIXL, when it starts.
    Vllm,
    /// vLLM pairs with NIXL, by `POST /workers` with their connector, as SMG wants it.
    VllmRegistered,
    /// SGLang pairs that speak gRPC, when it starts.
    SglangGrpc,
}

impl Pairs {
    fn are_vllm(self) -> bool {
        matches!(self, Self::Vllm | Self::VllmRegistered)
    }

    /// Whether both are of the same engines.
    pub fn is_alike(self, other: Self) -> bool {
        self.are_vllm() == other.are_vllm() && self.is_comparable(other)
    }

    /// Whether both share a table: over gRPC gateways do other work.
    pub fn is_comparable(self, other: Self) -> bool {
        self.scheme() == other.scheme()
    }

    fn scheme(self) -> &'static str {
        if self == Self::SglangGrpc { "grpc" } else { "http" }
    }
}

/// A running subject with its engines.
pub struct Subject {
    kind: Kind,
    /// Where requests go.
    pub address: String,
    /// The gateway; none when engines are asked directly.
    pub gateway: Option<Process>,
    _engines: Rc<Engines>,
}

/// Below the range that connections take their own ports from (Linux: 32768 on): a port that is free now would be gone when hundreds of
/// processes have started and connected.
const PORTS: std::ops::Range<u16> = 10_000..32_000;

/// A port that nobody listens on, never the same twice.
fn free_port() -> Result<u16> {
    static NEXT: AtomicU16 = AtomicU16::new(PORTS.start);
    loop {
        let port = NEXT.fetch_add(1, Ordering::Relaxed);
        if !PORTS.contains(&port) {
            return Err("no port is left".into());
        }
        if TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return Ok(port);
        }
    }
}

/// The engines of one measurement, by what they are: every gateway stands in front of the same ones.
pub struct Fleet {
    binaries: PathBuf,
    workers: usize,
    pace: u64,
    started: BTreeMap<&'static str, Rc<Engines>>,
}

impl Fleet {
    /// Engines of `workload`, `workers` of a kind, half of them prefills.
    pub fn new(binaries: &Path, workers: usize, workload: &Workload) -> Self {
        let (binaries, pace) = (binaries.to_owned(), workload.token_delay_ms());
        Self { binaries, workers, pace, started: BTreeMap::new() }
    }

    async fn of(&mut self, kind: &Kind) -> Result<Rc<Engines>> {
        let name = match (kind, kind.pairs()) {
            (Kind::Direct, _) => "regular",
            (_, Pairs::Vllm | Pairs::VllmRegistered) => "vllm",
            (_, Pairs::Sglang) => "sglang",
            (_, Pairs::SglangGrpc) => "sglang over gRPC",
        };
        if let Some(engines) = self.started.get(name) {
            return Ok(Rc::clone(engines));
        }
        let engines = if *kind == Kind::Direct {
            let port = free_port()?;
            let mut engine = engine(&self.binaries, Pairs::Sglang, "regular", port, None, self.pace)?;
            answers(&mut engine, &format!("127.0.0.1:{port}"), "/health").await?;
            Engines { processes: vec![engine], prefills: Vec::new(), decodes: vec![format!("http://127.0.0.1:{port}")] }
        } else {
            start_pairs(&self.binaries, kind.pairs(), self.workers, self.pace).await?
        };
        let engines = Rc::new(engines);
        self.started.insert(name, Rc::clone(&engines));
        Ok(engines)
    }
}

impl Kind {
    /// The engines behind it.
    pub fn pairs(&self) -> Pairs {
        match self {
            Kind::Direct | Kind::SmgSglang | Kind::Floor => Pairs::Sglang,
            Kind::SmgVllm => Pairs::VllmRegistered,
            Kind::SmgGrpc => Pairs::SglangGrpc,
            Kind::Peer { pairs, .. } => *pairs,
        }
    }

    /// Its name in the table, in front of `workers` where there are rows with `several` numbers of them.
    pub fn label(&self, workers: usize, several: bool) -> String {
        let name = match self {
            Kind::Direct => "direct (one engine)",
            Kind::SmgSglang => "smg, SGLang pairs",
            Kind::SmgVllm => "smg, vLLM NIXL pairs",
            Kind::SmgGrpc => "smg, SGLang pairs over gRPC",
            Kind::Floor => "floor",
            Kind::Peer { name, .. } => name,
        };
        if several { format!("{name}, {workers} workers") } else { name.to_owned() }
    }
}

struct Engines {
    #[allow(dead_code, reason = "held for its drop")]
    processes: Vec<Process>,
    prefills: Vec<(String, u16)>,
    decodes: Vec<String>,
}

impl Subject {
    /// Starts a subject in front of engines of `fleet`.
    pub async fn start(kind: &Kind, fleet: &mut Fleet) -> Result<Self> {
        let engines = fleet.of(kind).await?;
        let address = |url: &String| url.trim_start_matches("http://").to_owned();
        if let (Kind::Direct, Some(engine)) = (kind, engines.decodes.first()) {
            return Ok(Self { kind: kind.clone(), address: address(engine), gateway: None, _engines: engines });
        }
        let (port, metrics) = (free_port()?, free_port()?);
        let address = format!("127.0.0.1:{port}");
        let mut command = match kind {
            Kind::Floor => Command::new(fleet.binaries.join("smg-bench-floor")),
            Kind::Peer { command, .. } => {
                let mut shell = Command::new("sh");
                shell.args(["-c", command]).env("PATH", search_path());
                shell
            }
            _ => smg(&fleet.binaries, port, metrics, kind.pairs() == Pairs::VllmRegistered, &engines),
        };
        let list = |items: Vec<String>| items.join(" ");
        if matches!(kind, Kind::Peer { .. }) {
            command.env("BENCH_REGULAR", list(fleet.of(&Kind::Direct).await?.decodes.clone()));
        }
        command
            .env("BENCH_PORT", port.to_string())
            .env("BENCH_METRICS_PORT", metrics.to_string())
            .env("BENCH_PREFILL", list(engines.prefills.iter().map(|(url, _)| url.clone()).collect()))
            .env("BENCH_BOOTSTRAP", list(engines.prefills.iter().map(|(_, port)| port.to_string()).collect()))
            .env("BENCH_DECODE", list(engines.decodes.clone()))
            .env("BENCH_MODEL", MODEL);
        let mut gateway = Process::start(&kind.label(0, false), command)?;
        if kind.pairs() == Pairs::VllmRegistered {
            answers(&mut gateway, &address, "/liveness").await?;
            register(&mut gateway, &address, &engines).await?;
        }
        serves(&mut gateway, &address).await?;
        Ok(Self { kind: kind.clone(), address, gateway: Some(gateway), _engines: engines })
    }

    /// Whether engines are asked directly.
    pub fn is_direct(&self) -> bool {
        self.kind == Kind::Direct
    }

    /// Who it is.
    pub fn kind(&self) -> &Kind {
        &self.kind
    }

    /// What the gateway printed last, for an error.
    pub fn told(&self) -> String {
        self.gateway.as_ref().map_or_else(String::new, Process::told)
    }
}

fn engine(
    binaries: &Path,
    pairs: Pairs,
    role: &str,
    port: u16,
    bootstrap: Option<u16>,
    token_delay_ms: u64,
) -> Result<Process> {
    let (engine, connector) = if pairs.are_vllm() { ("vllm", "nixl") } else { ("sglang", "none") };
    let mut command = Command::new(binaries.join("mock-engine"));
    command.args(["--engine", engine, "--role", role, "--connector", connector, "--model", MODEL, "--no-record"]);
    if pairs == Pairs::SglangGrpc {
        command.arg("--grpc");
    }
    command.args(["--port", &port.to_string(), "--token-delay-ms", &token_delay_ms.to_string()]);
    if let Some(bootstrap) = bootstrap {
        command.args(["--bootstrap-port", &bootstrap.to_string()]);
    }
    Process::start(&format!("{engine} {role} engine on port {port}"), command)
}

async fn start_pairs(binaries: &Path, pairs: Pairs, workers: usize, pace: u64) -> Result<Engines> {
    let mut engines = Engines { processes: Vec::new(), prefills: Vec::new(), decodes: Vec::new() };
    for _ in 0..workers.div_ceil(2) {
        let (prefill, bootstrap, decode) = (free_port()?, free_port()?, free_port()?);
        let rendezvous = (!pairs.are_vllm()).then_some(bootstrap);
        engines.processes.push(engine(binaries, pairs, "prefill", prefill, rendezvous, pace)?);
        engines.processes.push(engine(binaries, pairs, "decode", decode, None, pace)?);
        let scheme = pairs.scheme();
        engines.prefills.push((format!("{scheme}://127.0.0.1:{prefill}"), bootstrap));
        engines.decodes.push(format!("{scheme}://127.0.0.1:{decode}"));
    }
    // In the order of their processes: the two legs of a pair are started one after the other.
    let urls = engines.prefills.iter().zip(&engines.decodes).flat_map(|((prefill, _), decode)| [prefill, decode]);
    // Whoever speaks gRPC answers no GET: its gateway waits for it.
    for (url, process) in urls.zip(&mut engines.processes).filter(|(url, _)| url.starts_with("http://")) {
        answers(process, url.trim_start_matches("http://"), "/health").await?;
    }
    Ok(engines)
}

fn smg(binaries: &Path, port: u16, metrics: u16, vllm: bool, engines: &Engines) -> Command {
    let mut command = Command::new(binaries.join("smg"));
    command.args(["launch", "--pd-disaggregation", "--host", "127.0.0.1", "--port", &port.to_string()]);
    command.args(["--prometheus-host", "127.0.0.1", "--prometheus-port", &metrics.to_string(), "--log-level", "warn"]);
    // A rotation costs least of all policies, and every gateway has one: what differs is the gateway.
    command.args(["--policy", "round_robin"]);
    if !vllm {
        for (url, bootstrap) in &engines.prefills {
            command.args(["--prefill", url, &bootstrap.to_string()]);
        }
        for url in &engines.decodes {
            command.args(["--decode", url]);
        }
    }
    command
}

/// Registers all engines and waits until the gateway shows every one as healthy.
async fn register(gateway: &mut Process, address: &str, engines: &Engines) -> Result<()> {
    let spec = |url: &str, role: &str| json!({"url": url, "worker_type": role, "runtime_type": "vllm", "kv_connector": "NixlConnector", "kv_role": "kv_both"});
    let prefills = engines.prefills.iter().map(|(url, _)| spec(url, "prefill"));
    for spec in prefills.chain(engines.decodes.iter().map(|url| spec(url, "decode"))) {
        let answer = tokio::time::timeout(ATTEMPT, call(Method::POST, address, "/workers", Some(&spec))).await;
        let (status, body) = answer.map_err(|_| format!("registration did not answer for {ATTEMPT:?}"))??;
        if status != 202 {
            return Err(format!("{}: registration answered {status}: {body}", gateway.told()).into());
        }
    }
    let count = engines.prefills.len() + engines.decodes.len();
    until(gateway, &format!("{count} healthy workers"), async || {
        let listed = call(Method::GET, address, "/workers", None).await;
        let listed = listed.ok().and_then(|(_, body)| serde_json::from_str::<Value>(&body).ok());
        let healthy = |worker: &&Value| worker.get("is_healthy").and_then(Value::as_bool) == Some(true);
        let workers = listed.as_ref().and_then(|listed| listed.get("workers")?.as_array());
        workers.is_some_and(|workers| workers.iter().filter(healthy).count() == count)
    })
    .await
}

async fn call(method: Method, address: &str, path: &str, body: Option<&Value>) -> Result<(u16, String)> {
    let client = Client::builder(TokioExecutor::new()).build_http::<Full<Bytes>>();
    let bytes = body.map(ToString::to_string).unwrap_or_default();
    let request = Request::builder()
        .method(method)
        .uri(format!("http://{address}{path}"))
        .header(header::CONTENT_TYPE, "application/json")
        .body(Full::new(Bytes::from(bytes)))?;
    let response = client.request(request).await?;
    let status = response.status().as_u16();
    let body = response.into_body().collect().await?.to_bytes();
    Ok((status, String::from_utf8_lossy(&body).into_owned()))
}

/// Waits for what `process` should come to; one that ends instead is told at once, with what it printed. One that has ended has not come
/// to it either: who answered then is somebody else.
async fn until(process: &mut Process, what: &str, mut attempt: impl AsyncFnMut() -> bool) -> Result<()> {
    let deadline = Instant::now() + START;
    loop {
        // An attempt may hang on a process that accepts and does not answer.
        let came = tokio::time::timeout(ATTEMPT, attempt()).await.unwrap_or(false);
        if let Some(status) = process.ended()? {
            return Err(format!("{}\nIt ended ({status}) before this was so: {what}", process.told()).into());
        }
        if came {
            return Ok(());
        }
        if Instant::now() > deadline {
            return Err(format!("{}\nNot within {START:?}: {what}", process.told()).into());
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

async fn answers(process: &mut Process, address: &str, path: &str) -> Result<()> {
    until(process, &format!("{address}{path} answers"), async || {
        call(Method::GET, address, path, None).await.is_ok_and(|(status, _)| status == 200)
    })
    .await
}

/// Ready = one chat completion is served.
async fn serves(process: &mut Process, address: &str) -> Result<()> {
    let body = json!({"model": MODEL, "messages": [{"role": "user", "content": "ready?"}], "max_tokens": 1});
    until(process, &format!("{address} serves"), async || {
        call(Method::POST, address, "/v1/chat/completions", Some(&body)).await.is_ok_and(|(status, _)| status == 200)
    })
    .await
}

/// Where peers are looked for: servers such as nginx lie where only root looks by default.
fn search_path() -> String {
    format!("{}:/usr/local/sbin:/usr/sbin:/sbin", std::env::var("PATH").unwrap_or_default())
}
