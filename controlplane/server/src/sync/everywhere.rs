//! The gateways of all members.
//!
//! Problem: a gateway is connected to one member, any of them, and operators and the leader's duties want to know about all. Nothing about
//! gateways is replicated: what they say changes with every heartbeat. So the other members are asked when somebody wants to know, each for a
//! bounded time; one that does not answer is named, not waited for.
//!
//! A gateway that went from one member to another is known to both: what the one says that has it now counts.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use serde::Serialize;
use smg_fleet::{Revision, WorkerId};
use smg_state::NodeId;
use smg_store::{ClusterStore, StoreError};
use tokio::time::Instant;

use super::gateways::{GatewayRecord, Gateways};

/// Who waits for workers to drain asks the members no more often than this.
const LOOK: Duration = Duration::from_millis(200);
/// What a member said last counts for so long when it does not answer: by then its gateways are with other members.
const REMEMBERED: Duration = Duration::from_secs(30);

/// A gateway, and which member has it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Seen {
    /// The member it is, or was last, connected to.
    pub member: NodeId,
    /// What that member knows of it.
    #[serde(flatten)]
    pub record: GatewayRecord,
}

/// A member that was asked.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Asked {
    /// Its number.
    pub node_id: NodeId,
    /// Whether its gateways are in the list.
    pub answered: bool,
    /// Why not.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// What all members together know.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Everywhere {
    /// The gateways, by name.
    pub gateways: Vec<Seen>,
    /// The members, this one first.
    pub members: Vec<Asked>,
}

/// Asks the members.
pub struct AllGateways {
    store: Arc<dyn ClusterStore>,
    here: Arc<Gateways>,
    remembered: tokio::sync::Mutex<Remembered>,
}

/// What the members said last to whom waits for workers to drain.
#[derive(Debug, Default)]
struct Remembered {
    asked_at: Option<Instant>,
    by_member: BTreeMap<NodeId, (Instant, Vec<GatewayRecord>)>,
}

impl AllGateways {
    /// The gateways in `here` and those of the other members of `store`, who are told about `here` from now on.
    pub fn new(store: Arc<dyn ClusterStore>, here: Arc<Gateways>) -> Arc<Self> {
        let told = Arc::clone(&here);
        // A record has nothing that cannot be written.
        store.tell_gateways(Arc::new(move || serde_json::to_vec(&told.list()).unwrap_or_default()));
        Arc::new(Self { store, here, remembered: tokio::sync::Mutex::default() })
    }

    /// Those of this member.
    pub fn here(&self) -> &Gateways {
        &self.here
    }

    /// Those of all members, or with `local` of this one alone.
    ///
    /// # Errors
    /// When this member does not know its own number.
    pub async fn list(&self, local: bool) -> Result<Everywhere, StoreError> {
        let me = self.store.cluster(true).await?.node_id;
        let mut members = vec![Asked { node_id: me, answered: true, error: None }];
        let mut known = vec![(me, self.here.list())];
        if !local {
            for (node_id, answer) in self.ask().await {
                members.push(Asked { node_id, answered: answer.is_ok(), error: answer.as_ref().err().cloned() });
                known.extend(answer.ok().map(|records| (node_id, records)));
            }
        }
        Ok(Everywhere { gateways: merge(known), members })
    }

    async fn ask(&self) -> Vec<(NodeId, Result<Vec<GatewayRecord>, String>)> {
        let read = |json: Vec<u8>| match json.as_slice() {
            [] => Ok(Vec::new()),
            json => serde_json::from_slice(json).map_err(|error| format!("its answer cannot be read: {error}")),
        };
        let answers = self.store.ask_gateways().await.into_iter();
        answers.map(|(node_id, answer)| (node_id, answer.and_then(read))).collect()
    }

    /// Whether no gateway that is connected to any member runs anything on a worker that drains since `revision`. A gateway that has not said
    /// so yet does.
    pub async fn have_drained(&self, worker: WorkerId, revision: Revision) -> bool {
        let mut remembered = self.remembered.lock().await;
        if remembered.asked_at.is_none_or(|at| at.elapsed() >= LOOK) {
            let answers = self.ask().await;
            remembered.take(answers, Instant::now());
        }
        self.here.have_drained(worker, revision) && remembered.have_drained(worker, revision, &self.here.list())
    }
}

impl Remembered {
    fn take(&mut self, answers: Vec<(NodeId, Result<Vec<GatewayRecord>, String>)>, now: Instant) {
        self.asked_at = Some(now);
        for (member, answer) in answers {
            if let Ok(records) = answer {
                self.by_member.insert(member, (now, records));
            }
        }
        self.by_member.retain(|_, (at, _)| now.duration_since(*at) < REMEMBERED);
    }

    fn have_drained(&self, worker: WorkerId, revision: Revision, here: &[GatewayRecord]) -> bool {
        let connected = |records: &'_ [GatewayRecord]| {
            let connected = records.iter().filter(|record| record.connected);
            connected.map(|record| (record.gateway_id.clone(), record.process_id.clone())).collect::<BTreeSet<_>>()
        };
        let answered = |at: &Instant| Some(*at) == self.asked_at;
        let fresh = self.by_member.values().filter(|(at, _)| answered(at)).flat_map(|(_, records)| connected(records));
        let found: BTreeSet<_> = fresh.chain(connected(here)).collect();
        let counts = |at: &Instant, record: &GatewayRecord| {
            // A member that is silent may have lost it to one that is not.
            let moved = !answered(at) && found.contains(&(record.gateway_id.clone(), record.process_id.clone()));
            record.connected && !moved
        };
        self.by_member.values().all(|(at, records)| {
            records.iter().filter(|record| counts(at, record)).all(|record| record.drains.is_done(worker, revision))
        })
    }
}

/// One record for each gateway and process: of the member it is connected to, or that heard it last.
fn merge(known: Vec<(NodeId, Vec<GatewayRecord>)>) -> Vec<Seen> {
    let mut merged: BTreeMap<(String, String), Seen> = BTreeMap::new();
    for (member, records) in known {
        for record in records {
            let key = (record.gateway_id.clone(), record.process_id.clone());
            // Of two that have it, one has not noticed yet that it left; the clocks of members may differ, so they come last.
            let rank = |record: &GatewayRecord| (record.connected, record.acked_revision, record.last_seen_unix_ms);
            if merged.get(&key).is_none_or(|other| rank(&other.record) < rank(&record)) {
                merged.insert(key, Seen { member, record });
            }
        }
    }
    merged.into_values().collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sync::gateways::Drains;

    fn record(gateway_id: &str, connected: bool, acked_revision: u64) -> GatewayRecord {
        let drains = Drains { as_of: acked_revision, ..Drains::default() };
        GatewayRecord {
            gateway_id: gateway_id.to_owned(),
            connected,
            acked_revision,
            drains,
            ..GatewayRecord::default()
        }
    }

    #[test]
    fn a_gateway_that_moved_is_where_it_is_now() {
        let known = vec![
            (1, vec![record("a", false, 5), record("b", true, 1)]),
            (2, vec![record("a", true, 3), record("b", true, 9)]),
            (3, vec![record("c", false, 1)]),
        ];
        let seen: Vec<_> = merge(known).into_iter().map(|seen| (seen.record.gateway_id, seen.member)).collect();
        assert_eq!(seen, [("a".to_owned(), 2), ("b".to_owned(), 2), ("c".to_owned(), 3)]);
    }

    #[test]
    fn a_silent_member_is_believed_for_a_while_unless_its_gateways_have_turned_up_elsewhere() {
        let (worker, begun) = (WorkerId(uuid::Uuid::from_u128(1)), Instant::now());
        let silent = || (2, Err("no answer".to_owned()));
        let mut remembered = Remembered::default();
        remembered.take(vec![(2, Ok(vec![record("a", true, 4)])), (3, Ok(Vec::new()))], begun);
        assert!(!remembered.have_drained(worker, 5, &[]), "it has not said so");
        remembered.take(vec![silent(), (3, Ok(Vec::new()))], begun + Duration::from_secs(1));
        assert!(!remembered.have_drained(worker, 5, &[]));
        assert!(remembered.have_drained(worker, 5, &[record("a", true, 5)]), "it is here now");
        remembered.take(vec![silent(), (3, Ok(vec![record("a", true, 5)]))], begun + Duration::from_secs(2));
        assert!(remembered.have_drained(worker, 5, &[]), "it is there now");
        remembered.take(vec![silent(), (3, Ok(Vec::new()))], begun + REMEMBERED);
        assert!(remembered.have_drained(worker, 5, &[]), "it is nowhere");
    }

    #[test]
    fn a_record_reaches_other_members_whole() {
        let drains = Drains { as_of: 7, busy: [WorkerId(uuid::Uuid::from_u128(1))].into(), more: true };
        let sent = GatewayRecord { drains, ..record("a", true, 5) };
        let json = serde_json::to_vec(&[&sent]).unwrap_or_default();
        assert_eq!(serde_json::from_slice::<Vec<GatewayRecord>>(&json).unwrap_or_default(), [sent]);
    }
}
