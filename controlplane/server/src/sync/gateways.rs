//! The gateways that are, or lately were, connected to this node. In memory only: a gateway reconnects and is known again.

use std::collections::{BTreeMap, BTreeSet};

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use smg_fleet::{Revision, WorkerId};
use smg_telemetry::Metrics;
use std::sync::Arc;

/// Most gateways that are remembered, those that left included.
pub const MAX_GATEWAYS: usize = 2_000;
/// How long a gateway that left is remembered.
const REMEMBERED_MS: u64 = 600_000;

/// What a gateway refused last.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Refusal {
    /// The revision.
    pub revision: Revision,
    /// Why, in the gateway's words.
    pub reason: String,
    /// When.
    pub at_unix_ms: u64,
}

/// One gateway, as `/fleet/gateways` shows it.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct GatewayRecord {
    /// The name it gave.
    pub gateway_id: String,
    /// Its process, as in the slot ledger: new after each start, unless it goes on with the slots of the one before.
    pub process_id: String,
    /// Its version.
    pub version: String,
    /// Whether it is connected to this node now.
    pub connected: bool,
    /// When it connected last.
    pub connected_at_unix_ms: u64,
    /// When it was heard last.
    pub last_seen_unix_ms: u64,
    /// The revision it routes with; 0 = none yet.
    pub acked_revision: Revision,
    /// Its requests in flight, as of its last heartbeat.
    pub in_flight_requests: u64,
    /// What it refused last, until it acknowledges something newer.
    pub nack: Option<Refusal>,
    /// What it says of draining workers.
    pub drains: Drains,
    #[serde(skip)]
    pub(super) session: u64,
}

impl GatewayRecord {
    /// What tells two values of a record apart, apart from when it was heard.
    pub fn looks(&self) -> String {
        let refused = self.nack.as_ref().map(|refusal| refusal.revision);
        format!(
            "{} {} {} {} {refused:?} {:?}",
            self.connected, self.connected_at_unix_ms, self.acked_revision, self.in_flight_requests, self.drains.busy
        )
    }
}

/// What a gateway says of draining workers.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Drains {
    /// The revision it spoke of.
    pub as_of: Revision,
    /// On these it still runs requests.
    pub busy: BTreeSet<WorkerId>,
    /// On others too, which it did not name.
    pub more: bool,
}

impl Drains {
    /// Whether the gateway is known to run nothing on a worker that is out of rotation since `revision`.
    pub(crate) fn is_done(&self, worker: WorkerId, revision: Revision) -> bool {
        self.as_of >= revision && !self.more && !self.busy.contains(&worker)
    }
}

/// The registry.
#[derive(Debug)]
pub struct Gateways {
    metrics: Arc<Metrics>,
    inner: Mutex<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    sessions: u64,
    /// By gateway and process.
    records: BTreeMap<(String, String), GatewayRecord>,
}

/// A gateway's place in the registry while it is connected.
#[derive(Debug)]
pub struct Membership {
    gateways: Arc<Gateways>,
    key: (String, String),
    session: u64,
}

impl Gateways {
    /// An empty registry.
    pub fn new(metrics: Arc<Metrics>) -> Self {
        Self { metrics, inner: Mutex::default() }
    }

    /// All records, by name.
    pub fn list(&self) -> Vec<GatewayRecord> {
        self.inner.lock().records.values().cloned().collect()
    }

    /// Whether no gateway that is connected to this node runs anything on a worker that drains since `revision`. A gateway that has not
    /// said so yet does.
    pub fn have_drained(&self, worker: WorkerId, revision: Revision) -> bool {
        let inner = self.inner.lock();
        inner.records.values().filter(|record| record.connected).all(|record| record.drains.is_done(worker, revision))
    }

    /// How many are connected.
    pub fn connected(&self) -> usize {
        self.inner.lock().records.values().filter(|record| record.connected).count()
    }

    /// Registers a connection.
    pub fn join(
        self: &Arc<Self>,
        gateway_id: &str,
        process_id: &str,
        version: &str,
        have_revision: Revision,
    ) -> Membership {
        let now = smg_net::unix_millis();
        let key = (gateway_id.to_owned(), process_id.to_owned());
        let mut inner = self.inner.lock();
        inner.sessions += 1;
        let session = inner.sessions;
        let record = GatewayRecord {
            gateway_id: gateway_id.to_owned(),
            process_id: process_id.to_owned(),
            version: version.to_owned(),
            connected: true,
            connected_at_unix_ms: now,
            last_seen_unix_ms: now,
            acked_revision: have_revision,
            in_flight_requests: 0,
            nack: None,
            drains: Drains::default(),
            session,
        };
        inner.records.insert(key.clone(), record);
        inner.forget(now);
        drop(inner);
        self.metrics.sync_subscribers.set(self.connected() as i64);
        Membership { gateways: Arc::clone(self), key, session }
    }
}

impl Inner {
    /// Drops records of gateways that left long ago, and the oldest ones beyond the bound.
    fn forget(&mut self, now: u64) {
        self.records.retain(|_, record| record.connected || record.last_seen_unix_ms + REMEMBERED_MS > now);
        while self.records.len() > MAX_GATEWAYS {
            let oldest = self.records.iter().min_by_key(|(_, record)| (record.connected, record.last_seen_unix_ms));
            let Some(key) = oldest.map(|(key, _)| key.clone()) else { break };
            self.records.remove(&key);
        }
    }
}

impl Membership {
    /// Notes that the gateway was heard, and what follows from what it said.
    pub fn heard(&self, change: impl FnOnce(&mut GatewayRecord)) {
        let mut inner = self.gateways.inner.lock();
        if let Some(record) = inner.records.get_mut(&self.key)
            && record.session == self.session
        {
            record.last_seen_unix_ms = smg_net::unix_millis();
            change(record);
        }
    }
}

impl Drop for Membership {
    fn drop(&mut self) {
        self.heard(|record| record.connected = false);
        self.gateways.metrics.sync_subscribers.set(self.gateways.connected() as i64);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_old_connection_that_ends_late_does_not_disconnect_the_new_one() {
        let gateways = Arc::new(Gateways::new(Arc::new(Metrics::default())));
        let old = gateways.join("g", "p", "1", 0);
        let new = gateways.join("g", "p", "1", 4);
        drop(old);
        assert_eq!(gateways.connected(), 1);
        new.heard(|record| record.acked_revision = 5);
        assert_eq!(gateways.list()[0].acked_revision, 5);
        drop(new);
        assert_eq!((gateways.connected(), gateways.list().len()), (0, 1));
    }

    #[test]
    fn a_worker_has_drained_once_every_connected_gateway_has_said_so_of_the_revision_that_drains_it() {
        let gateways = Arc::new(Gateways::new(Arc::new(Metrics::default())));
        let worker = WorkerId(uuid::Uuid::from_u128(7));
        assert!(gateways.have_drained(worker, 5), "nobody is connected");
        let (one, other) = (gateways.join("a", "p", "1", 5), gateways.join("b", "p", "1", 5));
        let say = |member: &Membership, as_of, busy: &[WorkerId], more| {
            member.heard(|record| record.drains = Drains { as_of, busy: busy.iter().copied().collect(), more });
        };
        assert!(!gateways.have_drained(worker, 5), "neither has spoken");
        say(&one, 5, &[], false);
        say(&other, 4, &[], false);
        assert!(!gateways.have_drained(worker, 5), "one spoke of the time before");
        say(&other, 6, &[worker], false);
        assert!(!gateways.have_drained(worker, 5));
        say(&other, 6, &[], true);
        assert!(!gateways.have_drained(worker, 5), "there were more than it could name");
        say(&other, 6, &[], false);
        assert!(gateways.have_drained(worker, 5));
        say(&one, 6, &[worker], false);
        drop(one);
        assert!(gateways.have_drained(worker, 5), "whoever left is not waited for");
    }

    #[test]
    fn the_registry_is_bounded() {
        let gateways = Arc::new(Gateways::new(Arc::new(Metrics::default())));
        for n in 0..=MAX_GATEWAYS {
            gateways.join("g", &n.to_string(), "1", 0);
        }
        assert_eq!(gateways.list().len(), MAX_GATEWAYS);
    }
}
