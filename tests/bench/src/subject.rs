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
    /// Another gateway.
    Peer {
        /// In front of what.
        pairs: Pairs,
        /// Its name in the table.
        name: String,
        /// How it is started.
        command: String,
    },
}

/// The engines behind a gateway.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pairs {
    /// SGLang.
    Sglang,
    /// vLLM with NIXL.
    Vllm,
    /// SGLang over gRPC.
    SglangGrpc,
}

impl Pairs {
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
            (_, Pairs::Vllm) => "vllm",
            (_, Pairs::Sglang) => "sglang",
            (_, Pairs::SglangGrpc) => "sglang over gRPC",
        };
        if let Some(engines) = self.started.get(name) {
            return Ok(Rc::clone(engines));
        }
        let engines = if *kind == Kind::Direct {
            let port = free_port()?;
            let engine = engine(&self.binaries, Pairs::Sglang, "regular", port, None, self.pace)?;
            answers(&format!("127.0.0.1:{port}"), "/health").await?;
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
    /// The name of a peer.
    pub fn name(&self) -> Option<String> {
        match self {
            Kind::Peer { name, .. } => Some(name.clone()),
            _ => None,
        }
    }

    /// The engines behind it.
    pub fn pairs(&self) -> Pairs {
        match self {
            Kind::Direct | Kind::SmgSglang => Pairs::Sglang,
            Kind::SmgVllm => Pairs::Vllm,
            Kind::SmgGrpc => Pairs::SglangGrpc,
            Kind::Peer { pairs, .. } => *pairs,
        }
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
            Kind::Peer { command, .. } => {
                let mut shell = Command::new("sh");
                shell.args(["-c", command]);
                shell
            }
            _ => smg(&fleet.binaries, port, metrics, kind.pairs() == Pairs::Vllm, &engines),
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
        let gateway = Process::start(command)?;
        if *kind == Kind::SmgVllm {
            answers(&address, "/liveness").await?;
            register(&address, &engines).await?;
        }
        serves(&address).await?;
        Ok(Self { kind: kind.clone(), address, gateway: Some(gateway), _engines: engines })
    }

    /// Whether engines are asked directly.
    pub fn is_direct(&self) -> bool {
        self.kind == Kind::Direct
    }

    /// Its name in the table.
    pub fn label(&self, workers: usize, several: bool) -> String {
        let name = match &self.kind {
            Kind::Direct => "direct (one engine)",
            Kind::SmgSglang => "smg, SGLang pairs",
            Kind::SmgVllm => "smg, vLLM NIXL pairs",
            Kind::SmgGrpc => "smg, SGLang pairs over gRPC",
            Kind::Peer { name, .. } => name,
        };
        if several { format!("{name}, {workers} workers") } else { name.to_owned() }
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
    let (engine, connector) = if pairs == Pairs::Vllm { ("vllm", "nixl") } else { ("sglang", "none") };
    let mut command = Command::new(binaries.join("mock-engine"));
    command.args(["--engine", engine, "--role", role, "--connector", connector, "--model", MODEL, "--no-record"]);
    if pairs == Pairs::SglangGrpc {
        command.arg("--grpc");
    }
    command.args(["--port", &port.to_string(), "--token-delay-ms", &token_delay_ms.to_string()]);
    if let Some(bootstrap) = bootstrap {
        command.args(["--bootstrap-port", &bootstrap.to_string()]);
    }
    Process::start(command)
}

async fn start_pairs(binaries: &Path, pairs: Pairs, workers: usize, pace: u64) -> Result<Engines> {
    let mut engines = Engines { processes: Vec::new(), prefills: Vec::new(), decodes: Vec::new() };
    for _ in 0..workers.div_ceil(2) {
        let (prefill, bootstrap, decode) = (free_port()?, free_port()?, free_port()?);
        let rendezvous = (pairs != Pairs::Vllm).then_some(bootstrap);
        engines.processes.push(engine(binaries, pairs, "prefill", prefill, rendezvous, pace)?);
        engines.processes.push(engine(binaries, pairs, "decode", decode, None, pace)?);
        let scheme = pairs.scheme();
        engines.prefills.push((format!("{scheme}://127.0.0.1:{prefill}"), bootstrap));
        engines.decodes.push(format!("{scheme}://127.0.0.1:{decode}"));
    }
    // Whoever speaks gRPC answers no GET: its gateway waits for it.
    let urls = engines.prefills.iter().map(|(url, _)| url).chain(&engines.decodes);
    for url in urls.filter(|url| url.starts_with("http://")) {
        answers(url.trim_start_matches("http://"), "/health").await?;
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

async fn register(address: &str, engines: &Engines) -> Result<()> {
    let spec = |url: &str, role: &str| json!({"url": url, "worker_type": role, "kv_connector": "NixlConnector"});
    let prefills = engines.prefills.iter().map(|(url, _)| spec(url, "prefill"));
    for spec in prefills.chain(engines.decodes.iter().map(|url| spec(url, "decode"))) {
        let (status, body) = call(Method::POST, address, "/workers", Some(&spec)).await?;
        if status != 202 {
            return Err(format!("registration answered {status}: {body}").into());
        }
    }
    Ok(())
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

async fn until(what: &str, mut attempt: impl AsyncFnMut() -> bool) -> Result<()> {
    let deadline = Instant::now() + START;
    while !attempt().await {
        if Instant::now() > deadline {
            return Err(format!("not within {START:?}: {what}").into());
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    Ok(())
}

async fn answers(address: &str, path: &str) -> Result<()> {
    until(&format!("{address}{path} answers"), async || {
        call(Method::GET, address, path, None).await.is_ok_and(|(status, _)| status == 200)
    })
    .await
}

/// Ready = one chat completion is served.
async fn serves(address: &str) -> Result<()> {
    let body = json!({"model": MODEL, "messages": [{"role": "user", "content": "ready?"}], "max_tokens": 1});
    until(&format!("{address} serves"), async || {
        call(Method::POST, address, "/v1/chat/completions", Some(&body)).await.is_ok_and(|(status, _)| status == 200)
    })
    .await
}
