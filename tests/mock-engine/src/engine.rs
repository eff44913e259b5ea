//! An engine: its settings, its state, its life.

mod handle;

use std::collections::{BTreeMap, BTreeSet};
use std::future::Future;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use parking_lot::Mutex;
use tokio::net::{TcpListener, TcpStream};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::builder::Builder;
use crate::fabric::{self, Fabric, Holder};
use crate::fault::{Fault, Faults};
use crate::grpc::{self, Abort, Call, CallFault, CallFaults, Calls};
use crate::http::{self, Reply, Request};
use crate::ledger::Ledger;
use crate::load::Load;
use crate::record::{Recorded, Recorder, Tally};
use crate::{sglang, vllm};

pub use handle::{MockEngine, TimedOut};

/// Which engine is played.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Engine {
    /// SGLang, native and OpenAI routes.
    Sglang,
    /// vLLM 0.32, OpenAI routes.
    Vllm,
    /// TokenSpeed, over gRPC only.
    Tokenspeed,
}

/// The engine's part in disaggregated serving.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Role {
    /// Serves requests alone.
    Regular,
    /// Computes prompts and hands their KV over.
    Prefill,
    /// Generates from KV that a prefill engine computed.
    Decode,
}

/// vLLM's KV connector. SGLang has its own transfer and ignores this.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Connector {
    /// No connector: transfer fields are ignored.
    None,
    /// `NixlConnector`: sequential, pull by request id.
    Nixl,
    /// `MooncakeConnector`: concurrent, pull by transfer id through a bootstrap server.
    Mooncake,
    /// `MoRIIOConnector` in READ mode: sequential, pull by transfer id.
    MoriioRead,
    /// `MoRIIOConnector` in WRITE mode: the prefill pushes, the decode waits for the push.
    MoriioWrite,
    /// Any other, by name: transfer fields are ignored and every prompt is computed locally.
    Other(String),
    /// `MultiConnector` over children, each with the engine id it may have of its own.
    Multi(Vec<(Connector, Option<String>)>),
}

impl Connector {
    /// The connector that a servicer reports and the engine acts as: the one NIXL or Mooncake child of several, else itself.
    pub(crate) fn projected(&self) -> &Connector {
        self.one_child().map_or(self, |(child, _)| child)
    }

    /// The engine id that comes with it.
    fn projected_id(&self) -> Option<&str> {
        self.one_child().and_then(|(_, id)| id.as_deref())
    }

    fn one_child(&self) -> Option<&(Connector, Option<String>)> {
        let Connector::Multi(children) = self else { return None };
        let mut moving = children.iter().filter(|(child, _)| matches!(child, Connector::Nixl | Connector::Mooncake));
        moving.next().filter(|_| moving.next().is_none())
    }

    /// The name in `--kv-transfer-config`; empty when there is none.
    pub(crate) fn reported_name(&self) -> String {
        match self {
            Connector::None => "",
            Connector::Nixl => "NixlConnector",
            Connector::Mooncake => "MooncakeConnector",
            Connector::MoriioRead | Connector::MoriioWrite => "MoRIIOConnector",
            Connector::Multi(_) => "MultiConnector",
            Connector::Other(name) => name,
        }
        .to_owned()
    }
}

impl std::str::FromStr for Connector {
    type Err = std::convert::Infallible;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        Ok(match name {
            "none" | "" => Connector::None,
            "nixl" | "NixlConnector" => Connector::Nixl,
            "mooncake" | "MooncakeConnector" => Connector::Mooncake,
            "moriio-read" => Connector::MoriioRead,
            "moriio-write" | "MoRIIOConnector" => Connector::MoriioWrite,
            other => Connector::Other(other.to_owned()),
        })
    }
}

/// What does not change in an engine's life.
pub(crate) struct Settings {
    pub(crate) engine: Engine,
    pub(crate) role: Role,
    pub(crate) connector: Connector,
    pub(crate) model: String,
    pub(crate) max_model_len: usize,
    pub(crate) max_running: Option<usize>,
    pub(crate) dp_size: Option<u64>,
    pub(crate) prefill_delay: Duration,
    pub(crate) prefill_delay_per_token: Duration,
    pub(crate) token_delay: Duration,
    pub(crate) patience: Duration,
    pub(crate) early_head: bool,
    pub(crate) idle_close: Option<Duration>,
    pub(crate) server_info: Vec<(String, serde_json::Value)>,
    pub(crate) api_key: Option<String>,
    pub(crate) overrides: Vec<(String, u16, Bytes)>,
    pub(crate) records: usize,
    pub(crate) grpc: bool,
    pub(crate) cached_tokens: usize,
    pub(crate) tokens_per_chunk: usize,
    pub(crate) default_sampling: String,
    pub(crate) overlooks_drops: bool,
}

impl Settings {
    /// Where the model is said to lie.
    pub(crate) fn model_path(&self) -> String {
        format!("/models/{}", self.model)
    }
}

/// Ports listened on; 0 asks the system for one and becomes what it gave.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Ports {
    pub(crate) http: u16,
    pub(crate) bootstrap: Option<u16>,
    pub(crate) side_channel: Option<u16>,
    pub(crate) notify: Option<u16>,
}

/// What a restart replaces.
struct Incarnation {
    engine_id: Arc<str>,
    /// When its process was started, in seconds since 1970.
    started: f64,
    ledger: Arc<Ledger>,
}

/// The tasks of the listening engine.
struct Life {
    accepting: CancellationToken,
    serving: CancellationToken,
    listeners: TaskTracker,
    connections: TaskTracker,
}

impl Life {
    fn new() -> Self {
        Life {
            accepting: CancellationToken::new(),
            serving: CancellationToken::new(),
            listeners: TaskTracker::new(),
            connections: TaskTracker::new(),
        }
    }
}

/// Tokens that a running request is said to hold.
const USED_TOKENS: usize = 128;

/// What a load report over gRPC says.
pub(crate) struct Report {
    pub(crate) running: i32,
    pub(crate) waiting: i32,
    pub(crate) max_running: i32,
    pub(crate) used_tokens: i32,
    pub(crate) usage: f64,
    pub(crate) timestamp: String,
}

/// The state that every connection shares.
pub(crate) struct Core {
    pub(crate) settings: Settings,
    pub(crate) recorder: Arc<Recorder>,
    pub(crate) faults: Faults,
    pub(crate) load: Load,
    pub(crate) fabric: Fabric,
    /// Numbers the blocks that are handed over, as a block manager does.
    pub(crate) blocks: AtomicU64,
    /// What replaces fields of MoRI-IO handoffs.
    pub(crate) handoff_patch: Mutex<Option<serde_json::Value>>,
    /// What every answer over gRPC says, instead of words that follow from the prompt.
    pub(crate) script: Mutex<Option<Vec<u32>>>,
    pub(crate) calls: Calls,
    pub(crate) call_faults: CallFaults,
    /// Calls received, by method.
    call_counts: Mutex<BTreeMap<String, u64>>,
    healthy: AtomicBool,
    ports: Mutex<Ports>,
    incarnation: Mutex<Incarnation>,
    life: Mutex<Life>,
    connections_seen: AtomicU64,
}

/// Seconds since 1970.
pub(crate) fn now() -> f64 {
    std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64())
}

impl Core {
    /// When the process was started, in seconds since 1970.
    pub(crate) fn started(&self) -> f64 {
        self.incarnation.lock().started
    }

    pub(crate) fn ports(&self) -> Ports {
        *self.ports.lock()
    }

    pub(crate) fn engine_id(&self) -> Arc<str> {
        Arc::clone(&self.incarnation.lock().engine_id)
    }

    pub(crate) fn ledger(&self) -> Arc<Ledger> {
        Arc::clone(&self.incarnation.lock().ledger)
    }

    /// The time it takes to compute `tokens` of prompt.
    pub(crate) async fn compute(&self, tokens: usize) {
        let settings = &self.settings;
        let per_token = settings.prefill_delay_per_token.saturating_mul(u32::try_from(tokens).unwrap_or(u32::MAX));
        let delay = settings.prefill_delay.saturating_add(per_token);
        if !delay.is_zero() {
            tokio::time::sleep(delay).await;
        }
        self.load.local_tokens.fetch_add(tokens as u64, Ordering::Relaxed);
    }

    /// Stops listening; connections go on.
    pub(crate) async fn close_listeners(&self) {
        let listeners = {
            let life = self.life.lock();
            life.accepting.cancel();
            life.listeners.close();
            life.listeners.clone()
        };
        listeners.wait().await;
    }

    /// Resets every connection and drops all KV.
    pub(crate) fn close_connections(&self) {
        self.ledger().fail_all("the engine has stopped");
        let life = self.life.lock();
        life.serving.cancel();
        life.connections.close();
    }

    /// What the engine answers to health checks over gRPC.
    pub(crate) fn health(&self) -> (bool, String) {
        let healthy = self.healthy.load(Ordering::Relaxed);
        (healthy, if healthy { "Health" } else { "the engine is not well" }.to_owned())
    }

    pub(crate) fn count_call(&self, method: &str) {
        *self.call_counts.lock().entry(method.to_owned()).or_default() += 1;
    }

    /// Ends when the engine stops.
    pub(crate) fn serving(&self) -> CancellationToken {
        self.life.lock().serving.clone()
    }

    /// Whether a prompt can be served at all.
    pub(crate) fn check_prompt(&self, ids: &[u32]) -> Result<(), tonic::Status> {
        let longest = self.settings.max_model_len;
        if ids.is_empty() {
            return Err(tonic::Status::invalid_argument("The decoder prompt cannot be empty"));
        }
        if ids.len() >= longest {
            let message = format!("the prompt has {} tokens and the model's context {longest}", ids.len());
            return Err(tonic::Status::invalid_argument(message));
        }
        Ok(())
    }

    /// The engine dies: it listens no more and every connection is cut.
    pub(crate) fn crash(&self) {
        self.life.lock().accepting.cancel();
        self.close_connections();
    }

    /// Tokens that the engine's KV cache holds.
    pub(crate) fn kv_tokens(&self) -> i32 {
        1_048_576
    }

    /// How busy the engine says it is.
    pub(crate) fn report(&self) -> Report {
        let (running, active) = (self.load.running(), self.load.active());
        let whole = |number: usize| i32::try_from(number).unwrap_or(i32::MAX);
        let used = whole(running.saturating_mul(USED_TOKENS));
        Report {
            running: whole(running),
            waiting: whole(active.saturating_sub(running)),
            max_running: self.settings.max_running.map_or(0, whole),
            used_tokens: used,
            usage: f64::from(used) / f64::from(self.kv_tokens()),
            timestamp: "2026-01-01T00:00:00.000000+00:00".to_owned(),
        }
    }

    async fn stop(&self) {
        self.close_listeners().await;
        self.close_connections();
        let connections = self.life.lock().connections.clone();
        connections.wait().await;
        self.recorder.changed();
    }

    async fn listen(self: &Arc<Self>) -> io::Result<()> {
        let wanted = self.ports();
        let main = bind(wanted.http).await?;
        let mut ports = Ports { http: main.local_addr()?.port(), ..Ports::default() };
        let mut fabric = Vec::new();
        for (wanted, port) in [
            (wanted.bootstrap, &mut ports.bootstrap),
            (wanted.side_channel, &mut ports.side_channel),
            (wanted.notify, &mut ports.notify),
        ] {
            if let Some(wanted) = wanted {
                let listener = bind(wanted).await?;
                *port = Some(listener.local_addr()?.port());
                fabric.push(listener);
            }
        }
        *self.ports.lock() = ports;
        let life = Life::new();
        for listener in fabric {
            let (core, serving) = (Arc::clone(self), life.serving.clone());
            accept(&life, listener, move |stream| {
                let (core, serving) = (Arc::clone(&core), serving.clone());
                async move {
                    let holder = || Holder {
                        ledger: core.ledger(),
                        engine_id: core.engine_id(),
                        side_channel: core.ports().side_channel.unwrap_or_default(),
                        ranks: core.settings.dp_size.unwrap_or(1),
                    };
                    tokio::select! {
                        // A peer that breaks the transfer's protocol loses its connection, which is all it needs to know.
                        _ = fabric::serve(stream, holder) => {}
                        () = serving.cancelled() => {}
                    }
                }
            });
        }
        let (core, serving) = (Arc::clone(self), life.serving.clone());
        if core.settings.grpc {
            accept(&life, main, move |stream| grpc::serve(stream, Arc::clone(&core), serving.clone()));
        } else {
            accept(&life, main, move |stream| {
                let number = core.connections_seen.fetch_add(1, Ordering::Relaxed);
                http::serve(stream, number, Arc::clone(&core), serving.clone())
            });
        }
        *self.life.lock() = life;
        Ok(())
    }
}

/// Free ports this process has given to engines. None is given twice: whoever remembers an engine that is gone by its address must not meet
/// another one there.
static GIVEN: Mutex<BTreeSet<u16>> = Mutex::new(BTreeSet::new());

/// Listens on a port; 0 = on one that no engine of this process had before.
async fn bind(port: u16) -> io::Result<TcpListener> {
    // Held until a new one is found, so that the system does not offer them again.
    let mut known = Vec::new();
    loop {
        let listener = TcpListener::bind(("127.0.0.1", port)).await?;
        if port != 0 || GIVEN.lock().insert(listener.local_addr()?.port()) {
            return Ok(listener);
        }
        known.push(listener);
    }
}

fn accept<Serve, Served>(life: &Life, listener: TcpListener, serve: Serve)
where
    Serve: Fn(TcpStream) -> Served + Send + 'static,
    Served: Future<Output = ()> + Send + 'static,
{
    let (accepting, connections) = (life.accepting.clone(), life.connections.clone());
    life.listeners.spawn(async move {
        loop {
            let accepted = tokio::select! {
                accepted = listener.accept() => accepted,
                () = accepting.cancelled() => return,
            };
            match accepted {
                Ok((stream, _)) => {
                    connections.spawn(serve(stream));
                }
                // Out of file descriptors, most likely: let some connections end.
                Err(_) => tokio::time::sleep(Duration::from_millis(10)).await,
            }
        }
    });
}

/// Answers a request as the engine does.
pub(crate) async fn handle(core: &Arc<Core>, request: &Request) -> Reply {
    if let Some(key) = &core.settings.api_key {
        let given = request.header("authorization");
        if given.and_then(|value| value.strip_prefix("Bearer ")) != Some(key) {
            return Reply::json(401, r#"{"error":"Unauthorized"}"#);
        }
    }
    let instead = core.settings.overrides.iter().find(|(path, ..)| *path == request.path);
    if let Some((_, status, body)) = instead {
        return Reply::json(*status, body.clone());
    }
    match core.settings.engine {
        Engine::Sglang => sglang::handle(core, request).await,
        Engine::Vllm => vllm::handle(core, request).await,
        // It does not start without gRPC.
        Engine::Tokenspeed => Reply::not_found(),
    }
}

fn new_engine_id() -> String {
    uuid::Uuid::new_v4().to_string()
}
