//! What is measured: an engine asked directly, `smg` in front of pairs, and other gateways.

use std::net::TcpListener;
use std::path::Path;
use std::process::Command;
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

/// Longest start of a subject.
const START: Duration = Duration::from_secs(60);

/// Who is measured.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Kind {
    /// One regular engine, no gateway.
    Direct,
    /// `smg launch` over SGLang pairs.
    SmgSglang,
    /// `smg launch` over vLLM NIXL pairs.
    SmgVllm,
    /// Another gateway over SGLang pairs.
    Peer {
        /// Its name in the table.
        name: String,
        /// How it is started.
        command: String,
    },
}

/// A running subject with its engines.
pub struct Subject {
    kind: Kind,
    /// Where requests go.
    pub address: String,
    /// The gateway; none when engines are asked directly.
    pub gateway: Option<Process>,
    _engines: Vec<Process>,
}

fn free_port() -> Result<u16> {
    Ok(TcpListener::bind("127.0.0.1:0")?.local_addr()?.port())
}

struct Engines {
    processes: Vec<Process>,
    prefills: Vec<(String, u16)>,
    decodes: Vec<String>,
}

impl Subject {
    /// Starts engines (`workers` in all, half of them prefills) and the subject in front of them.
    pub async fn start(binaries: &Path, kind: &Kind, workers: usize, workload: &Workload) -> Result<Self> {
        let pace = workload.token_delay_ms();
        if *kind == Kind::Direct {
            let port = free_port()?;
            let engine = engine(binaries, "sglang", "regular", "none", port, None, pace)?;
            let address = format!("127.0.0.1:{port}");
            answers(&address, "/health").await?;
            return Ok(Self { kind: kind.clone(), address, gateway: None, _engines: vec![engine] });
        }
        let vllm = *kind == Kind::SmgVllm;
        let engines = start_pairs(binaries, vllm, workers, pace).await?;
        let (port, metrics) = (free_port()?, free_port()?);
        let address = format!("127.0.0.1:{port}");
        let mut command = match kind {
            Kind::Peer { command, .. } => {
                let mut shell = Command::new("sh");
                shell.args(["-c", command]);
                shell
            }
            _ => smg(binaries, port, metrics, vllm, &engines),
        };
        let list = |items: Vec<String>| items.join(" ");
        command
            .env("BENCH_PORT", port.to_string())
            .env("BENCH_METRICS_PORT", metrics.to_string())
            .env("BENCH_PREFILL", list(engines.prefills.iter().map(|(url, _)| url.clone()).collect()))
            .env("BENCH_BOOTSTRAP", list(engines.prefills.iter().map(|(_, port)| port.to_string()).collect()))
            .env("BENCH_DECODE", list(engines.decodes.clone()))
            .env("BENCH_MODEL", MODEL);
        let gateway = Process::start(command)?;
        if vllm {
            answers(&address, "/liveness").await?;
            register(&address, &engines).await?;
        }
        serves(&address).await?;
        Ok(Self { kind: kind.clone(), address, gateway: Some(gateway), _engines: engines.processes })
    }

    /// Its name in the table.
    pub fn label(&self, workers: usize, several: bool) -> String {
        let name = match &self.kind {
            Kind::Direct => "direct (one engine)",
            Kind::SmgSglang => "smg, SGLang pairs",
            Kind::SmgVllm => "smg, vLLM NIXL pairs",
            Kind::Peer { name, .. } => name,
        };
        if several { format!("{name}, {workers} workers") } else { name.to_owned() }
    }
}

fn engine(
    binaries: &Path,
    engine: &str,
    role: &str,
    connector: &str,
    port: u16,
    bootstrap: Option<u16>,
    token_delay_ms: u64,
) -> Result<Process> {
    let mut command = Command::new(binaries.join("mock-engine"));
    command.args(["--engine", engine, "--role", role, "--connector", connector, "--model", MODEL, "--no-record"]);
    command.args(["--port", &port.to_string(), "--token-delay-ms", &token_delay_ms.to_string()]);
    if let Some(bootstrap) = bootstrap {
        command.args(["--bootstrap-port", &bootstrap.to_string()]);
    }
    Process::start(command)
}

async fn start_pairs(binaries: &Path, vllm: bool, workers: usize, pace: u64) -> Result<Engines> {
    let (name, connector) = if vllm { ("vllm", "nixl") } else { ("sglang", "none") };
    let mut engines = Engines { processes: Vec::new(), prefills: Vec::new(), decodes: Vec::new() };
    for _ in 0..workers.div_ceil(2) {
        let (prefill, bootstrap, decode) = (free_port()?, free_port()?, free_port()?);
        let rendezvous = (!vllm).then_some(bootstrap);
        engines.processes.push(engine(binaries, name, "prefill", connector, prefill, rendezvous, pace)?);
        engines.processes.push(engine(binaries, name, "decode", connector, decode, None, pace)?);
        engines.prefills.push((format!("http://127.0.0.1:{prefill}"), bootstrap));
        engines.decodes.push(format!("http://127.0.0.1:{decode}"));
    }
    for url in engines.prefills.iter().map(|(url, _)| url).chain(&engines.decodes) {
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
