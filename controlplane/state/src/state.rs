//! The state and its read model.

use std::collections::BTreeMap;
use std::sync::Arc;

use smg_admission::Ledger;
use smg_fleet::{AdminToken, ClusterSettings, PolicyRecord, Revision, Snapshot, Worker, WorkerId};
use uuid::Uuid;

use crate::audit::AuditTrail;
use crate::command::{CommandId, Outcome};
use crate::departures::Departures;
use crate::members::{Member, NodeId};
use crate::memory::CommandMemory;

/// The fleet's state at one revision. Clones share their objects, so a snapshot for a reader or a file costs pointers only.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct State {
    pub(crate) cluster_id: Uuid,
    pub(crate) history_id: Uuid,
    pub(crate) revision: Revision,
    pub(crate) workers: BTreeMap<WorkerId, Arc<Worker>>,
    /// Derived from `workers`: one URL is one worker.
    pub(crate) by_url: BTreeMap<String, WorkerId>,
    pub(crate) policies: BTreeMap<String, Arc<PolicyRecord>>,
    pub(crate) tokens: BTreeMap<Uuid, Arc<AdminToken>>,
    pub(crate) settings: ClusterSettings,
    pub(crate) settings_revision: Revision,
    pub(crate) members: BTreeMap<NodeId, Arc<Member>>,
    /// The highest number ever given to a member.
    pub(crate) last_node_id: NodeId,
    pub(crate) ledger: Arc<Ledger>,
    pub(crate) memory: CommandMemory,
    pub(crate) audit: AuditTrail,
    pub(crate) departures: Departures,
}

impl State {
    /// Which cluster; nil until named.
    pub fn cluster_id(&self) -> Uuid {
        self.cluster_id
    }

    /// Which history of the cluster; nil until named.
    pub fn history_id(&self) -> Uuid {
        self.history_id
    }

    /// What came of a command that is still remembered.
    pub fn outcome(&self, id: CommandId) -> Option<&Outcome> {
        self.memory.outcome(&id)
    }

    /// Counts the commands that changed something.
    pub fn revision(&self) -> Revision {
        self.revision
    }

    /// All workers in the order of their ids, which is that of their creation.
    pub fn workers(&self) -> impl Iterator<Item = &Arc<Worker>> {
        self.workers.values()
    }

    /// One worker.
    pub fn worker(&self, id: WorkerId) -> Option<&Arc<Worker>> {
        self.workers.get(&id)
    }

    /// The worker of a normalised URL.
    pub fn worker_by_url(&self, url: &str) -> Option<&Arc<Worker>> {
        self.by_url.get(url).and_then(|id| self.workers.get(id))
    }

    /// All policy documents; the empty model is the fleet default.
    pub fn policies(&self) -> impl Iterator<Item = &Arc<PolicyRecord>> {
        self.policies.values()
    }

    /// One policy document.
    pub fn policy(&self, model: &str) -> Option<&Arc<PolicyRecord>> {
        self.policies.get(model)
    }

    /// All admin tokens.
    pub fn tokens(&self) -> impl Iterator<Item = &Arc<AdminToken>> {
        self.tokens.values()
    }

    /// One admin token.
    pub fn token(&self, id: Uuid) -> Option<&Arc<AdminToken>> {
        self.tokens.get(&id)
    }

    /// Who may use how many slots of which decode worker. No part of the fleet that gateways follow: it changes without a revision.
    pub fn ledger(&self) -> &Arc<Ledger> {
        &self.ledger
    }

    /// The settings of the cluster and the revision of their last change; 0 = never.
    pub fn settings(&self) -> (&ClusterSettings, Revision) {
        (&self.settings, self.settings_revision)
    }

    /// The highest number ever given to a member of the control plane; 0 = none was registered.
    pub fn last_node_id(&self) -> NodeId {
        self.last_node_id
    }

    /// What gateways receive.
    pub fn snapshot(&self) -> Snapshot {
        Snapshot {
            cluster_id: self.cluster_id,
            history_id: self.history_id,
            revision: self.revision,
            workers: self.workers.clone(),
            policies: self.policies.clone(),
            tokens: self.tokens.clone(),
        }
    }
}
