//! What gateways receive.
//!
//! A [`Snapshot`] is the fleet at one revision. A [`Delta`] leads from one snapshot to a later one of the same history and carries a
//! checksum of the result, so that a gateway notices when its copy has drifted and asks for everything again.
//!
//! Invariant: `diff(a, b)` applied to `a` is `b`, byte for byte in the canonical encoding.

use std::collections::BTreeMap;
use std::sync::Arc;

use thiserror::Error;
use uuid::Uuid;

use crate::access::AdminToken;
use crate::policy::PolicyRecord;
use crate::settings::Settings;
use crate::worker::{Worker, WorkerId};
use crate::{Revision, wire};

/// The response header by which a gateway's probes name the cluster it serves, so that no control plane takes one of its own gateways for
/// an engine. In lower case.
pub const FLEET_HEADER: &str = "x-smg-fleet";

/// The fleet at one revision. Cheap to clone: objects are shared.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Snapshot {
    /// Which cluster.
    pub cluster_id: Uuid,
    /// Which history of it: new after a restore.
    pub history_id: Uuid,
    /// The revision within the history.
    pub revision: Revision,
    /// All workers, those still being registered included.
    pub workers: BTreeMap<WorkerId, Arc<Worker>>,
    /// All policy documents by model; the empty name is the fleet default.
    pub policies: BTreeMap<String, Arc<PolicyRecord>>,
    /// All admin tokens, so that gateways judge for themselves whom they tell about the fleet.
    pub tokens: BTreeMap<Uuid, Arc<AdminToken>>,
}

/// The way from one snapshot to a later one.
#[derive(Debug, Clone, PartialEq, Default)]
#[allow(missing_docs)]
pub struct Delta {
    pub history_id: Uuid,
    pub from_revision: Revision,
    pub to_revision: Revision,
    pub upserted_workers: Vec<Arc<Worker>>,
    pub removed_workers: Vec<WorkerId>,
    pub upserted_policies: Vec<Arc<PolicyRecord>>,
    pub removed_policies: Vec<String>,
    /// All of them, changed or not: there are few.
    pub tokens: Vec<Arc<AdminToken>>,
    /// [`Snapshot::checksum`] of the result.
    pub result_checksum: u32,
}

/// Why a delta does not fit.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[allow(missing_docs)]
pub enum DeltaError {
    #[error("delta is of another history")]
    History,
    #[error("delta starts at revision {from}, this copy is at {have}")]
    Revision { from: Revision, have: Revision },
    #[error("the result does not match the delta's checksum")]
    Checksum,
}

impl Snapshot {
    /// The settings of a model.
    pub fn settings(&self, model: &str) -> Settings {
        let document = |name: &str| self.policies.get(name).map(|record| &record.document);
        Settings::resolve(document(model).filter(|_| !model.is_empty()), document(""))
    }

    /// Checksum of the canonical encoding.
    pub fn checksum(&self) -> u32 {
        wire::checksum(&wire::encode_snapshot(self))
    }

    /// The delta from this snapshot to `newer`, which is of the same history.
    pub fn diff(&self, newer: &Snapshot, result_checksum: u32) -> Delta {
        let (upserted_workers, removed_workers) = diff_maps(&self.workers, &newer.workers);
        let (upserted_policies, removed_policies) = diff_maps(&self.policies, &newer.policies);
        Delta {
            history_id: newer.history_id,
            from_revision: self.revision,
            to_revision: newer.revision,
            upserted_workers,
            removed_workers,
            upserted_policies,
            removed_policies,
            tokens: newer.tokens.values().cloned().collect(),
            result_checksum,
        }
    }

    /// The snapshot that `delta` leads to.
    ///
    /// # Errors
    /// When the delta is not for this snapshot, or its result is not what its author had.
    pub fn apply(&self, delta: &Delta) -> Result<Snapshot, DeltaError> {
        if delta.history_id != self.history_id {
            return Err(DeltaError::History);
        }
        if delta.from_revision != self.revision {
            return Err(DeltaError::Revision { from: delta.from_revision, have: self.revision });
        }
        let mut next = self.clone();
        next.revision = delta.to_revision;
        for id in &delta.removed_workers {
            next.workers.remove(id);
        }
        for model in &delta.removed_policies {
            next.policies.remove(model);
        }
        next.workers.extend(delta.upserted_workers.iter().map(|worker| (worker.id, Arc::clone(worker))));
        next.policies.extend(delta.upserted_policies.iter().map(|record| (record.model.clone(), Arc::clone(record))));
        next.tokens = delta.tokens.iter().map(|token| (token.id, Arc::clone(token))).collect();
        if next.checksum() == delta.result_checksum { Ok(next) } else { Err(DeltaError::Checksum) }
    }
}

fn diff_maps<K: Ord + Clone, V: PartialEq>(
    old: &BTreeMap<K, Arc<V>>,
    new: &BTreeMap<K, Arc<V>>,
) -> (Vec<Arc<V>>, Vec<K>) {
    let same =
        |key: &K, value: &Arc<V>| old.get(key).is_some_and(|before| Arc::ptr_eq(before, value) || before == value);
    let upserted = new.iter().filter(|(key, value)| !same(key, value)).map(|(_, value)| Arc::clone(value)).collect();
    let removed = old.keys().filter(|key| !new.contains_key(key)).cloned().collect();
    (upserted, removed)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::worker::{Health, Intent, Origin, WorkerSpec, WorkerType};

    fn worker(n: u8, priority: u32) -> Arc<Worker> {
        let mut spec = WorkerSpec::new(format!("http://h:{}", 1 + u16::from(n)), WorkerType::Decode);
        spec.priority = priority;
        Arc::new(Worker {
            id: WorkerId(Uuid::from_u128(u128::from(n))),
            spec,
            facts: None,
            health: Health::Ready,
            intent: Intent::Active,
            origin: Origin::Api,
            job: None,
            create_revision: 1,
            mod_revision: 1,
        })
    }

    fn snapshot(revision: Revision, workers: &[(u8, u32)]) -> Snapshot {
        let workers = workers.iter().map(|(n, priority)| worker(*n, *priority)).map(|w| (w.id, w)).collect();
        Snapshot { revision, workers, ..Default::default() }
    }

    proptest! {
        #[test]
        fn a_delta_leads_from_one_snapshot_to_the_other(
            old in proptest::collection::vec((0u8..20, 0u32..3), 0..20),
            new in proptest::collection::vec((0u8..20, 0u32..3), 0..20),
        ) {
            let (old, new) = (snapshot(1, &old), snapshot(2, &new));
            let delta = old.diff(&new, new.checksum());
            let delta = wire::decode_delta(&wire::encode_delta(&delta)).unwrap();
            prop_assert_eq!(old.apply(&delta).unwrap(), new);
        }
    }

    #[test]
    fn a_delta_that_does_not_fit_changes_nothing() {
        let (old, new) = (snapshot(1, &[(1, 1)]), snapshot(2, &[(2, 1)]));
        let delta = old.diff(&new, new.checksum());
        assert_eq!(new.apply(&delta), Err(DeltaError::Revision { from: 1, have: 2 }));
        let drifted = snapshot(1, &[(1, 1), (3, 1)]);
        assert_eq!(drifted.apply(&delta), Err(DeltaError::Checksum));
        let restored = Snapshot { history_id: Uuid::from_u128(9), ..old };
        assert_eq!(restored.apply(&delta), Err(DeltaError::History));
    }
}
