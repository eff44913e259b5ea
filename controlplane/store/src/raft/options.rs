//! How to open a store, and who a member is.

use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use openraft::{Config, SnapshotPolicy};
use smg_messages::disk as pb;
use smg_net::mutual::MutualTls;
use smg_state::NodeId;
use uuid::Uuid;

/// Most writes on their way.
pub(crate) const MAX_IN_FLIGHT: usize = 1024;

/// How soon members notice that another one is gone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Patience {
    /// Between two signs of life of the leader.
    pub heartbeat: Duration,
    /// For so long after a sign of life nobody stands against the leader. An election begins half of it to all of it later, at random.
    pub election: Duration,
}

impl Default for Patience {
    /// For disks whose fsync may take a while and for networks between zones: an election begins 1.5 to 2 s after the last sign of life.
    fn default() -> Self {
        Self { heartbeat: Duration::from_millis(250), election: Duration::from_millis(1_000) }
    }
}

/// Where and how to open a store.
#[derive(Debug, Clone)]
pub struct RaftOptions {
    /// A directory of the store's own.
    pub data_dir: PathBuf,
    /// `host:port` under which other members reach this one.
    pub address: String,
    /// The local address of calls to other members; absent = the system's choice.
    pub source: Option<IpAddr>,
    /// TLS of calls to other members; absent = they are called without.
    pub tls: Option<Arc<MutualTls>>,
    /// `host:port` under which operators and gateways reach this member; shown to them.
    pub api_address: String,
    /// Whether this member serves other members. Without, it stays alone.
    pub with_peers: bool,
    /// Whether an empty directory may become the first member of a new cluster. Without effect on a directory that has one.
    pub bootstrap: bool,
    /// Members of a cluster that an empty directory may join, each `host:port`. A member that moved asks them too.
    pub join: Vec<String>,
    /// Entries between two snapshots.
    pub snapshot_every: u64,
    /// Entries to keep behind a snapshot, so that a member that was away for a moment needs no snapshot and a damaged one can be skipped.
    pub keep_entries: u64,
    /// How soon members notice that another one is gone.
    pub patience: Patience,
    /// How long a member must have kept up before it becomes a voter by itself.
    pub settle: Duration,
}

impl RaftOptions {
    /// The usual cadence, for a directory that has a cluster already.
    pub fn new(data_dir: impl Into<PathBuf>, address: impl Into<String>) -> Self {
        Self {
            data_dir: data_dir.into(),
            address: address.into(),
            source: None,
            tls: None,
            api_address: String::new(),
            with_peers: false,
            bootstrap: false,
            join: Vec::new(),
            snapshot_every: 5_000,
            keep_entries: 10_000,
            patience: Patience::default(),
            settle: Duration::from_secs(3),
        }
    }

    /// Lets an empty directory become the first member of a new cluster.
    #[must_use]
    pub fn bootstrap(mut self, bootstrap: bool) -> Self {
        self.bootstrap = bootstrap;
        self
    }

    pub(crate) fn config(&self) -> Config {
        let millis = |duration: Duration| u64::try_from(duration.as_millis()).unwrap_or(u64::MAX);
        let election = millis(self.patience.election);
        Config {
            cluster_name: "smg".into(),
            heartbeat_interval: millis(self.patience.heartbeat),
            // The library waits for the lease, which is the maximum, and then for a time between the two.
            election_timeout_min: election.div_ceil(2),
            election_timeout_max: election,
            install_snapshot_timeout: 10_000,
            snapshot_policy: SnapshotPolicy::LogsSinceLast(self.snapshot_every),
            max_in_snapshot_log_to_keep: self.keep_entries,
            replication_lag_threshold: self.snapshot_every.saturating_mul(3) / 2,
            purge_batch_size: self.keep_entries.clamp(1, 256),
            api_channel_size: Some(2 * MAX_IN_FLIGHT as u64),
            enable_pre_vote: Some(true),
            // A leader that reaches others but hears nothing back must not keep them from electing another one.
            quorum_loss_probe_interval: Some(2 * election),
            // A leader that comes back must be elected again: only a new term proves what was committed.
            enable_leader_restore: Some(false),
            ..Config::default()
        }
    }
}

/// Who a member is, as its directory says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NodeIdentity {
    /// The cluster it belongs to.
    pub cluster_id: Uuid,
    /// Its number in the cluster; never used twice.
    pub node_id: NodeId,
    /// Its disk: a wiped one is another member.
    pub storage_id: Uuid,
    /// When the directory was created.
    pub created_at_unix_ms: u64,
}

impl NodeIdentity {
    pub(crate) fn from_pb(identity: &pb::NodeIdentity) -> Option<Self> {
        Some(Self {
            cluster_id: Uuid::from_slice(&identity.cluster_id).ok()?,
            node_id: identity.node_id,
            storage_id: Uuid::from_slice(&identity.storage_id).ok()?,
            created_at_unix_ms: identity.created_at_unix_ms,
        })
    }
}
