//! A worker: what was registered, what the engine reported, what the fleet intends with it.
//!
//! Invariants
//! * the *spec* is what an operator wrote and only operators change it; *facts* are what the engine said and only the registration job
//!   changes them; what the fleet acts on is derived from the two on demand, never stored a third time;
//! * a worker without facts has never been registered successfully and gets no traffic;
//! * a job belongs to the revision that created it: a report of an older job changes nothing.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::Revision;
use crate::access::Secret;
pub use crate::overrides::{HealthOverride, ResilienceOverride};
use crate::url::{UrlError, WorkerUrl};

/// Identity of a worker: a UUIDv7, stable for one URL.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(transparent)]
pub struct WorkerId(pub Uuid);

impl fmt::Display for WorkerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl FromStr for WorkerId {
    type Err = uuid::Error;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Uuid::parse_str(text).map(Self)
    }
}

macro_rules! named {
    ($(#[$meta:meta])* $name:ident { $($(#[$variant_meta:meta])* $variant:ident = $text:literal),+ $(,)? }) => {
        $(#[$meta])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, serde::Serialize, serde::Deserialize, schemars::JsonSchema)]
        pub enum $name {
            $($(#[$variant_meta])* #[serde(rename = $text)] $variant,)+
        }

        impl $name {
            /// Every value, in declaration order.
            pub const ALL: &'static [$name] = &[$($name::$variant),+];

            /// The name used in REST, labels and metrics.
            pub fn as_str(self) -> &'static str {
                match self { $($name::$variant => $text,)+ }
            }

            /// The value with this name.
            pub fn from_name(name: &str) -> Option<Self> {
                match name { $($text => Some($name::$variant),)+ _ => None }
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(self.as_str())
            }
        }
    };
}
pub(crate) use named;

named! {
    /// The role of a worker.
    WorkerType {
        /// Serves whole requests by itself.
        #[default]
        Regular = "regular",
        /// Builds the prompt's KV cache.
        Prefill = "prefill",
        /// Takes the KV cache over and generates.
        Decode = "decode",
        /// Runs the vision tower.
        Encode = "encode",
    }
}

named! {
    /// The wire a worker speaks.
    Wire {
        /// HTTP.
        #[default]
        Http = "http",
        /// gRPC.
        Grpc = "grpc",
        /// ZMQ.
        Zmq = "zmq",
    }
}

named! {
    /// The engine behind a worker.
    Runtime {
        /// Not declared: detected at registration.
        #[default]
        Unspecified = "unspecified",
        /// SGLang.
        Sglang = "sglang",
        /// vLLM.
        Vllm = "vllm",
        /// TensorRT-LLM.
        Trtllm = "trtllm",
        /// MLX.
        Mlx = "mlx",
        /// TokenSpeed.
        Tokenspeed = "tokenspeed",
        /// Some OpenAI-compatible server.
        Generic = "generic",
        /// A provider's API.
        External = "external",
    }
}

named! {
    /// What active probes say.
    Health {
        /// Serves.
        #[default]
        Ready = "ready",
        /// Failed enough probes to leave rotation.
        NotReady = "not_ready",
        /// Failed for long; still probed.
        Failed = "failed",
    }
}

named! {
    /// What the operator wants with a worker.
    Intent {
        /// Gets traffic.
        #[default]
        Active = "active",
        /// Gets no new traffic, stays.
        Cordoned = "cordoned",
        /// Gets no new traffic, leaves.
        Draining = "draining",
    }
}

named! {
    /// Where a registration came from.
    Origin {
        /// The admin API.
        #[default]
        Api = "api",
        /// A start-up flag.
        Startup = "startup",
    }
}

named! {
    /// What a job does.
    JobKind {
        /// First registration.
        #[default]
        AddWorker = "AddWorker",
        /// Re-registration with a new spec.
        UpdateWorker = "UpdateWorker",
        /// Drain and removal.
        RemoveWorker = "RemoveWorker",
    }
}

named! {
    /// Where a job stands.
    JobStatus {
        /// Accepted, not started.
        #[default]
        Pending = "pending",
        /// Running; the message holds the last probe error.
        Processing = "processing",
        /// Given up; the message says why.
        Failed = "failed",
    }
}

/// A model a worker serves.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, schemars::JsonSchema)]
pub struct ModelCard {
    /// The canonical id.
    pub id: String,
    /// A name for people.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub display_name: Option<String>,
    /// Other names clients may use.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub aliases: Vec<String>,
    /// Context window in tokens.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub context_length: Option<u64>,
    /// Fields this version does not use, shown again as given.
    #[serde(flatten)]
    pub extra: BTreeMap<String, serde_json::Value>,
}

fn default_priority() -> u32 {
    50
}

fn default_cost() -> f64 {
    1.0
}

fn default_connection_attempts() -> u32 {
    20
}

/// What an operator registers: the body of `POST /workers`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct WorkerSpec {
    /// Base URL; normalised by [`crate::validate::worker_spec`].
    pub url: String,
    /// Models it serves; empty = what the engine reports, or any.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub models: Vec<ModelCard>,
    /// Role.
    #[serde(default)]
    pub worker_type: WorkerType,
    /// Engine; `unspecified` = detect.
    #[serde(default, rename = "runtime_type", alias = "runtime")]
    pub runtime: Runtime,
    /// Provider name of an external API.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub provider: Option<String>,
    /// Labels; they win over those the engine reports.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
    /// Routing priority.
    #[serde(default = "default_priority")]
    pub priority: u32,
    /// Relative cost.
    #[serde(default = "default_cost")]
    pub cost: f64,
    /// Bearer key of the engine. Accepted, never shown.
    #[serde(default, skip_serializing)]
    pub api_key: Option<Secret>,
    /// Bootstrap port (SGLang, TokenSpeed, vLLM Mooncake).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bootstrap_port: Option<u16>,
    /// vLLM KV connector.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kv_connector: Option<String>,
    /// vLLM KV role.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kv_role: Option<String>,
    /// vLLM KV engine id.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kv_engine_id: Option<String>,
    /// KV block size.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kv_block_size: Option<u64>,
    /// Explicit pairing protocol; the label of that name wins.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pairing_protocol: Option<String>,
    /// Health override.
    #[serde(default, deserialize_with = "crate::object::required", skip_serializing_if = "HealthOverride::is_empty")]
    pub health: HealthOverride,
    /// Retry and breaker override.
    #[serde(
        default,
        deserialize_with = "crate::object::required",
        skip_serializing_if = "ResilienceOverride::is_empty"
    )]
    pub resilience: ResilienceOverride,
    /// Shown only; the attempt budget comes from the policy.
    #[serde(default = "default_connection_attempts")]
    pub max_connection_attempts: u32,
    /// Documented fields this version does not act on, shown again as given.
    #[serde(flatten)]
    pub extra: BTreeMap<String, serde_json::Value>,
}

impl WorkerSpec {
    /// A spec with every default, for `url` in `worker_type`.
    pub fn new(url: impl Into<String>, worker_type: WorkerType) -> Self {
        Self {
            url: url.into(),
            models: Vec::new(),
            worker_type,
            runtime: Runtime::Unspecified,
            provider: None,
            labels: BTreeMap::new(),
            priority: default_priority(),
            cost: default_cost(),
            api_key: None,
            bootstrap_port: None,
            kv_connector: None,
            kv_role: None,
            kv_engine_id: None,
            kv_block_size: None,
            pairing_protocol: None,
            health: HealthOverride::default(),
            resilience: ResilienceOverride::default(),
            max_connection_attempts: default_connection_attempts(),
            extra: BTreeMap::new(),
        }
    }
}

/// The body of `PATCH /workers/{id}`. Labels merge; absent fields stay.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(default)]
#[allow(missing_docs)]
pub struct WorkerPatch {
    pub priority: Option<u32>,
    pub cost: Option<f64>,
    pub labels: BTreeMap<String, String>,
    #[serde(skip_serializing)]
    pub api_key: Option<Secret>,
    #[serde(deserialize_with = "crate::object::required")]
    pub health: HealthOverride,
}

/// What the registration job learned from the engine.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Facts {
    /// The wire that answered.
    pub wire: Wire,
    /// The engine, detected or declared.
    pub runtime: Runtime,
    /// Labels the engine reported.
    pub labels: BTreeMap<String, String>,
    /// Models the engine reported.
    pub models: Vec<ModelCard>,
    /// Who serves the first of them, as the engine lists it over HTTP.
    pub owned_by: Option<String>,
    /// Whether the engine speaks HTTP/2 without TLS.
    pub http2: bool,
    /// The engine's KV connector; vLLM over gRPC says it.
    pub kv_connector: Option<String>,
    /// Its part in the transfer.
    pub kv_role: Option<String>,
    /// The id by which other engines know it; another one after each start unless the operator of the engine pinned it.
    pub kv_engine_id: Option<String>,
}

/// An asynchronous change to a worker.
#[derive(Debug, Clone, PartialEq)]
pub struct Job {
    /// The revision that created the job.
    pub number: u64,
    /// What it does.
    pub kind: JobKind,
    /// Where it stands.
    pub status: JobStatus,
    /// The last probe error, or why it failed.
    pub message: Option<String>,
    /// When it last changed.
    pub at_unix_ms: u64,
    /// The spec an update installs when it succeeds.
    pub proposed: Option<Box<WorkerSpec>>,
}

/// One worker of the fleet.
#[derive(Debug, Clone, PartialEq)]
pub struct Worker {
    /// Identity.
    pub id: WorkerId,
    /// What the operator wrote, normalised.
    pub spec: WorkerSpec,
    /// What the engine said; absent until registered.
    pub facts: Option<Facts>,
    /// What active probes say.
    pub health: Health,
    /// What the operator wants.
    pub intent: Intent,
    /// Where it came from.
    pub origin: Origin,
    /// The job in flight, or the one that failed.
    pub job: Option<Job>,
    /// Revision of its creation.
    pub create_revision: Revision,
    /// Revision of its last change.
    pub mod_revision: Revision,
}

/// The status shown for a worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Status {
    Pending,
    Ready,
    NotReady,
    Failed,
    Draining,
}

impl Status {
    /// The name used in REST.
    pub fn as_str(self) -> &'static str {
        match self {
            Status::Pending => "pending",
            Status::Ready => "ready",
            Status::NotReady => "not_ready",
            Status::Failed => "failed",
            Status::Draining => "draining",
        }
    }
}

impl Worker {
    /// The parsed URL: of a data-parallel rank, that of its engine.
    ///
    /// # Errors
    /// Never for a spec that passed validation.
    pub fn url(&self) -> Result<WorkerUrl, UrlError> {
        WorkerUrl::parse(self.dp_base_url().unwrap_or(&self.spec.url))
    }

    /// The address of the engine that this worker is one data-parallel rank of: see [`crate::dp`].
    pub fn dp_base_url(&self) -> Option<&str> {
        self.facts.as_ref()?.labels.get("dp_base_url").map(String::as_str)
    }

    /// The wire: what answered, else what the URL scheme says.
    pub fn wire(&self) -> Wire {
        match &self.facts {
            Some(facts) => facts.wire,
            None => self.url().map_or(Wire::Http, |url| url.scheme().wire()),
        }
    }

    /// The engine: declared, else detected.
    pub fn runtime(&self) -> Runtime {
        match (self.spec.runtime, &self.facts) {
            (Runtime::Unspecified, Some(facts)) => facts.runtime,
            (declared, _) => declared,
        }
    }

    /// vLLM's KV connector: declared, else reported.
    pub fn kv_connector(&self) -> Option<&str> {
        let reported = || self.facts.as_ref().and_then(|facts| facts.kv_connector.as_deref());
        self.spec.kv_connector.as_deref().or_else(reported)
    }

    /// vLLM's KV role: declared, else reported.
    pub fn kv_role(&self) -> Option<&str> {
        let reported = || self.facts.as_ref().and_then(|facts| facts.kv_role.as_deref());
        self.spec.kv_role.as_deref().or_else(reported)
    }

    /// vLLM's KV engine id: declared, else reported. A restart of the engine may change it.
    pub fn kv_engine_id(&self) -> Option<&str> {
        self.spec.kv_engine_id.as_deref().or_else(|| self.learned_engine_id())
    }

    /// The KV engine id that the engine itself reported, or its bootstrap server ([`crate::mooncake`]).
    pub fn learned_engine_id(&self) -> Option<&str> {
        self.facts.as_ref()?.kv_engine_id.as_deref()
    }

    /// One label: the operator's, else the engine's.
    pub fn label(&self, name: &str) -> Option<&str> {
        let reported = || self.facts.as_ref().and_then(|facts| facts.labels.get(name));
        self.spec.labels.get(name).or_else(reported).map(String::as_str)
    }

    /// How many requests a decode engine runs at a time, by the label `max_num_seqs`, else `max_running_requests`: 1 to 65535. `None` when
    /// it says nothing usable: then nothing is known of its limit (SMG PD docs, Decode Admission Window).
    pub fn running_window(&self) -> Option<u32> {
        let label = self.label("max_num_seqs").or_else(|| self.label("max_running_requests"))?;
        let window = label.trim().parse::<u64>().ok().filter(|window| *window > 0)?;
        Some(u32::try_from(window.min(65_535)).unwrap_or(65_535))
    }

    /// All labels, the operator's laid over the engine's.
    pub fn labels(&self) -> BTreeMap<String, String> {
        let mut labels = self.facts.as_ref().map(|facts| facts.labels.clone()).unwrap_or_default();
        labels.extend(self.spec.labels.iter().map(|(name, value)| (name.clone(), value.clone())));
        labels
    }

    /// The models it serves: declared, else reported. Empty = any model.
    pub fn models(&self) -> &[ModelCard] {
        if !self.spec.models.is_empty() {
            return &self.spec.models;
        }
        self.facts.as_ref().map_or(&[], |facts| facts.models.as_slice())
    }

    /// The id it is listed under; `unknown` when nobody named one.
    pub fn model_id(&self) -> &str {
        if let Some(card) = self.models().first() {
            return &card.id;
        }
        ["served_model_name", "model_id", "model_path"].iter().find_map(|name| self.label(name)).unwrap_or("unknown")
    }

    /// Whether requests may be routed to it as far as the fleet is concerned. Gateways add their own verdict.
    pub fn is_routable(&self) -> bool {
        self.facts.is_some() && self.intent == Intent::Active && self.health == Health::Ready
    }

    /// The status shown in REST.
    pub fn status(&self) -> Status {
        if self.facts.is_none() {
            return match &self.job {
                Some(job) if job.status == JobStatus::Failed => Status::Failed,
                _ => Status::Pending,
            };
        }
        match (self.intent, self.health) {
            (Intent::Draining, _) => Status::Draining,
            (_, Health::Ready) => Status::Ready,
            (_, Health::NotReady) => Status::NotReady,
            (_, Health::Failed) => Status::Failed,
        }
    }
}
