//! The shapes of answers, as the OpenAPI document shows them.
//!
//! Answers are written where they are made; these types only describe them. A test asks for each and compares.
#![allow(dead_code)]

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use smg_fleet::{ClusterSettings, Intent, PolicyDocument, WorkerSpec};

/// An error.
#[derive(JsonSchema, Serialize, Deserialize)]
pub(super) struct Failure {
    /// In words.
    error: String,
    /// What clients key on.
    code: String,
    /// What became of a change: `did_not_happen`, `happened` or `unknown`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    outcome: Option<String>,
}

/// What a rehearsal would lead to.
#[derive(JsonSchema, Serialize, Deserialize)]
pub(super) struct Rehearsal {
    /// True.
    dry_run: bool,
    /// The revision that the change would have.
    revision: u64,
    /// The object as it would be; null = it would be gone.
    result: Value,
}

/// One line of a watch.
#[derive(JsonSchema, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "lowercase")]
pub(super) enum WatchEvent {
    /// New or changed.
    Put {
        /// The object, as the list shows it.
        object: Value,
    },
    /// Gone, or no longer in the list.
    Deleted {
        /// Its id or name.
        name: String,
    },
    /// All up to here was shown.
    Bookmark {
        /// The revision.
        revision: u64,
        /// The history of that revision.
        history_id: String,
    },
    /// Nothing follows.
    End {
        /// `compacted`, `expired` or `shutdown`.
        reason: String,
        /// The revision.
        revision: u64,
        /// The history of that revision.
        history_id: String,
    },
}

/// A job of a worker.
#[derive(JsonSchema, Serialize, Deserialize)]
pub(super) struct JobStatus {
    job_type: String,
    worker_url: String,
    status: String,
    /// The last error.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    message: Option<String>,
    /// Unix time in seconds.
    timestamp: u64,
}

/// A worker: its id, its spec, and what the fleet knows.
#[derive(JsonSchema, Serialize, Deserialize)]
pub(super) struct WorkerInfo {
    id: String,
    /// Once it is registered.
    #[serde(default)]
    model_id: Option<String>,
    #[serde(flatten)]
    spec: WorkerSpec,
    /// Of a data-parallel rank: the engine's own address.
    #[serde(default)]
    dp_base_url: Option<String>,
    #[serde(default)]
    dp_rank: Option<u64>,
    #[serde(default)]
    dp_size: Option<u64>,
    /// `http` or `grpc`.
    connection_mode: String,
    is_healthy: bool,
    /// `pending`, `ready`, `not_ready`, `failed` or `draining`.
    status: String,
    /// Requests in flight of the gateway that answers; 0 where the control plane does.
    load: u64,
    http2: bool,
    /// The pairing key.
    #[serde(default)]
    pd_pairing: Option<String>,
    #[serde(default)]
    warning: Option<String>,
    intent: Intent,
    /// `api` or `startup`.
    origin: String,
    mod_revision: u64,
    /// While a job runs, or after it failed.
    #[serde(default)]
    job_status: Option<JobStatus>,
}

/// How many workers of each role there are.
#[derive(JsonSchema, Serialize, Deserialize)]
pub(super) struct WorkerStats {
    prefill_count: u64,
    decode_count: u64,
    regular_count: u64,
}

/// Workers.
#[derive(JsonSchema, Serialize, Deserialize)]
pub(super) struct WorkerList {
    total: u64,
    workers: Vec<WorkerInfo>,
    stats: WorkerStats,
}

/// A change that is durable and carried out by a job.
#[derive(JsonSchema, Serialize, Deserialize)]
pub(super) struct Accepted {
    status: String,
    worker_id: String,
    /// Of a registration.
    #[serde(default)]
    url: Option<String>,
    /// Of a registration: where the worker and its job can be read.
    #[serde(default)]
    location: Option<String>,
    message: String,
}

/// What an operator wants with a worker.
#[derive(JsonSchema, Serialize, Deserialize)]
pub(super) struct Occupation {
    worker_id: String,
    url: String,
    intent: Intent,
    mod_revision: u64,
    /// Out of rotation, and nothing runs on it any more.
    idle: bool,
    /// Gateways that run requests on it, or have not said yet.
    busy_gateways: Vec<String>,
    /// Members that did not answer: nobody knows of their gateways.
    unheard_members: Vec<u64>,
}

/// A worker that was taken out of rotation or brought back.
#[derive(JsonSchema, Serialize, Deserialize)]
pub(super) struct IntentSet {
    worker_id: String,
    intent: Intent,
    mod_revision: u64,
}

/// A policy document.
#[derive(JsonSchema, Serialize, Deserialize)]
pub(super) struct Policy {
    /// `default` = the fleet's own.
    model: String,
    document: PolicyDocument,
    /// `api` or `startup`.
    source: String,
    mod_revision: u64,
}

/// Policy documents.
#[derive(JsonSchema, Serialize, Deserialize)]
pub(super) struct PolicyList {
    total: u64,
    policies: Vec<Policy>,
}

/// A leg of a pair.
#[derive(JsonSchema, Serialize, Deserialize)]
pub(super) struct Leg {
    /// Absent = not registered.
    #[serde(default)]
    id: Option<String>,
    url: String,
    pd_pairing: String,
}

/// What keeps two legs apart.
#[derive(JsonSchema, Serialize, Deserialize)]
pub(super) struct Reason {
    component: String,
    #[serde(default)]
    prefill: Option<String>,
    #[serde(default)]
    decode: Option<String>,
}

/// A prefill and a decode.
#[derive(JsonSchema, Serialize, Deserialize)]
pub(super) struct Cell {
    model: String,
    prefill: Leg,
    decode: Leg,
    pairs: bool,
    #[serde(default)]
    reasons: Vec<Reason>,
}

/// The matrix of one model in numbers.
#[derive(JsonSchema, Serialize, Deserialize)]
pub(super) struct MatrixSummary {
    model: String,
    pairing_mode: String,
    prefills: u64,
    decodes: u64,
    pairs: u64,
    non_pairs: u64,
    reasons: BTreeMap<String, u64>,
    unpaired_prefills: u64,
    unpaired_decodes: u64,
    #[serde(default)]
    unpaired: Vec<String>,
}

/// Which prefill pairs with which decode.
#[derive(JsonSchema, Serialize, Deserialize)]
pub(super) struct Matrix {
    models: Vec<MatrixSummary>,
    models_total: u64,
    total: u64,
    offset: u64,
    limit: u64,
    cells: Vec<Cell>,
}

/// With whom a worker would pair.
#[derive(JsonSchema, Serialize, Deserialize)]
pub(super) struct Explanation {
    worker: Leg,
    worker_type: String,
    /// `registration` or `spec`.
    facts_from: String,
    #[serde(flatten)]
    matrix: Matrix,
}

/// The settings of the cluster.
#[derive(JsonSchema, Serialize, Deserialize)]
pub(super) struct Settings {
    settings: ClusterSettings,
    mod_revision: u64,
}

/// An admin token without its secret.
#[derive(JsonSchema, Serialize, Deserialize)]
pub(super) struct Token {
    id: String,
    name: String,
    role: String,
    origin: String,
    /// Unix time in seconds.
    created_at: u64,
    mod_revision: u64,
}

/// An admin token and its secret, which is shown this once.
#[derive(JsonSchema, Serialize, Deserialize)]
pub(super) struct CreatedToken {
    #[serde(flatten)]
    of: Token,
    token: String,
}

/// Admin tokens.
#[derive(JsonSchema, Serialize, Deserialize)]
pub(super) struct TokenList {
    total: u64,
    tokens: Vec<Token>,
}

/// A token that is no more.
#[derive(JsonSchema, Serialize, Deserialize)]
pub(super) struct Revoked {
    status: String,
    id: String,
}

/// As whom the caller is known.
#[derive(JsonSchema, Serialize, Deserialize)]
pub(super) struct Whoami {
    name: Option<String>,
    role: Option<String>,
}

/// What a gateway refused.
#[derive(JsonSchema, Serialize, Deserialize)]
pub(super) struct Refusal {
    revision: u64,
    reason: String,
    at_unix_ms: u64,
}

/// What a gateway says of workers out of rotation.
#[derive(JsonSchema, Serialize, Deserialize)]
pub(super) struct Drains {
    /// The revision that it speaks of.
    as_of: u64,
    /// On these it still runs requests.
    busy: Vec<String>,
    /// On others too, which it did not name.
    more: bool,
}

/// A member that was asked.
#[derive(JsonSchema, Serialize, Deserialize)]
pub(super) struct Asked {
    node_id: u64,
    answered: bool,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    error: Option<String>,
}

/// A gateway.
#[derive(JsonSchema, Serialize, Deserialize)]
pub(super) struct Gateway {
    /// The member that it is, or was last, connected to.
    member: u64,
    gateway_id: String,
    process_id: String,
    version: String,
    connected: bool,
    connected_at_unix_ms: u64,
    last_seen_unix_ms: u64,
    acked_revision: u64,
    in_flight_requests: u64,
    nack: Option<Refusal>,
    /// Workers out of rotation that it still uses.
    drains: Drains,
    /// Revisions that it has not acknowledged.
    behind: u64,
    /// Since it was heard.
    silent_ms: u64,
}

/// The gateways of all members.
#[derive(JsonSchema, Serialize, Deserialize)]
pub(super) struct GatewayList {
    total: u64,
    gateways: Vec<Gateway>,
    /// The members, that which answers first.
    members: Vec<Asked>,
}

/// A field that was changed.
#[derive(JsonSchema, Serialize, Deserialize)]
pub(super) struct AuditChange {
    field: String,
    /// Absent = it had no value.
    #[serde(default)]
    before: Option<Value>,
    /// Absent = it has no value.
    #[serde(default)]
    after: Option<Value>,
}

/// A change of the fleet.
#[derive(JsonSchema, Serialize, Deserialize)]
pub(super) struct AuditRecord {
    revision: u64,
    at_unix_ms: u64,
    actor: String,
    action: String,
    object: String,
    command_id: String,
    changes: Vec<AuditChange>,
}

/// Changes of the fleet.
#[derive(JsonSchema, Serialize, Deserialize)]
pub(super) struct AuditList {
    total: u64,
    records: Vec<AuditRecord>,
}

/// The members that vote.
#[derive(JsonSchema, Serialize, Deserialize)]
pub(super) struct Voters {
    voters: Vec<u64>,
}

/// A revision.
#[derive(JsonSchema, Serialize, Deserialize)]
pub(super) struct Revision {
    revision: u64,
}
