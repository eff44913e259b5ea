//! The routing table of one snapshot.
//!
//! Everything that does not depend on the request or on this moment is worked out here, once per snapshot and off the hot path: which
//! workers serve a model, which prefill pairs with which decode, which settings hold. Building one is a pure function of the snapshot and
//! of the runtimes and policy instances kept from the table before; publishing it is one pointer swap.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use smg_fleet::pairing::{self, PairingMode};
use smg_fleet::policy::ExpiredSlots;
use smg_fleet::{Health, Intent, Settings, Snapshot, Wire, Worker, WorkerId, WorkerType, dp, info};
use smg_policies::{Leg, Policy, Tuning, WorkerKey};
use smg_telemetry::{Metrics, SMG};
use thiserror::Error;

use super::worker::{RoutedWorker, WorkerRuntime};
use crate::admission::decode::DecodeWindow;
use crate::admission::lease::Lease;
use crate::admission::{PrefillQueue, Released};
use crate::clock::Clock;
use crate::resilience::budget::Budget;

/// The label of requests that name no model that a worker declared.
pub const UNKNOWN_MODEL: &str = "unknown";

/// Why a snapshot cannot be routed with.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum TableError {
    /// A policy this version does not have.
    #[error("policy document '{model}': {reason}")]
    Policy {
        /// Which document.
        model: String,
        /// What is wrong.
        reason: String,
    },
    /// A worker whose address makes no request target.
    #[error("worker {id}: its url is not usable")]
    Worker {
        /// Which worker.
        id: WorkerId,
    },
}

/// A prefill with the decodes it can hand over to.
#[derive(Debug)]
pub struct PrefillEntry {
    /// The worker.
    pub worker: Arc<RoutedWorker>,
    /// Positions in [`ModelPool::decodes`], ascending.
    pub partners: Vec<usize>,
}

/// Why no prefill pairs with any decode.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mismatch {
    /// The model, where the message names it.
    pub model: Option<Arc<str>>,
    /// Every component that keeps a pair apart.
    pub components: Vec<String>,
    /// The prefills' keys.
    pub prefill_keys: Vec<String>,
    /// The decodes' keys.
    pub decode_keys: Vec<String>,
}

impl Mismatch {
    /// The model as messages name it.
    pub fn of_model(&self) -> String {
        self.model.as_ref().map(|model| format!(" for model '{model}'")).unwrap_or_default()
    }
}

/// The instances of one model's policies. Each leg has its own, so that stateful ones do not disturb each other.
#[derive(Debug)]
pub struct ModelPolicies {
    regular: Arc<dyn Policy>,
    prefill: Arc<dyn Policy>,
    decode: Arc<dyn Policy>,
    tuning: Tuning,
}

impl ModelPolicies {
    /// What `settings` ask for. An instance of `before` that is asked for again goes on: a rotation where it was, a record with what it
    /// knows.
    fn build(settings: &Settings, before: Option<&Self>) -> Result<Self, smg_policies::PolicyError> {
        let tuning = Tuning::from(&settings.tuning);
        let instance = |leg, name| {
            let known = before.filter(|before| before.tuning.is_same_for(name, &tuning)).map(|before| before.of(leg));
            match known.filter(|known| known.name() == name) {
                Some(known) => Ok(Arc::clone(known)),
                None => smg_policies::build_with(name, leg, &tuning).map(Arc::from),
            }
        };
        Ok(Self {
            regular: instance(Leg::Regular, settings.regular_policy)?,
            prefill: instance(Leg::Prefill, settings.prefill_policy)?,
            decode: instance(Leg::Decode, settings.decode_policy)?,
            tuning,
        })
    }

    /// The instance of a leg.
    pub fn of(&self, leg: Leg) -> &Arc<dyn Policy> {
        match leg {
            Leg::Regular => &self.regular,
            Leg::Prefill => &self.prefill,
            Leg::Decode => &self.decode,
        }
    }
}

/// Every leg.
pub const LEGS: [Leg; 3] = [Leg::Regular, Leg::Prefill, Leg::Decode];

/// The workers and settings of one model.
#[derive(Debug)]
pub struct ModelPool {
    /// The canonical id: also the `model` label of metrics.
    pub model: Arc<str>,
    /// What holds for it.
    pub settings: Settings,
    /// Its policy instances.
    pub policies: ModelPolicies,
    /// Workers that serve whole requests.
    pub regulars: Vec<Arc<RoutedWorker>>,
    /// Prefills, paired.
    pub prefills: Vec<PrefillEntry>,
    /// Decodes.
    pub decodes: Vec<Arc<RoutedWorker>>,
    /// The wires of its workers.
    pub wires: Wires,
    /// What its requests may spend on retries. Outlives snapshots.
    pub budget: Arc<Budget>,
    /// Where its requests wait for a prefill worker. Outlives snapshots.
    pub queue: Arc<PrefillQueue>,
    /// Set when both legs have workers and none pair.
    pub mismatch: Option<Mismatch>,
}

/// The wires that the workers of a model speak.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Wires {
    /// Some speak HTTP.
    pub http: bool,
    /// Some speak gRPC.
    pub grpc: bool,
}

impl Wires {
    fn of(members: &[Arc<Worker>]) -> Self {
        let speaks = |wire| members.iter().any(|worker| worker.wire() == wire);
        Self { http: speaks(Wire::Http), grpc: speaks(Wire::Grpc) }
    }

    /// The one wire that all of them speak; `None` when they do not agree.
    pub fn only(self) -> Option<Wire> {
        match (self.http, self.grpc) {
            (true, true) => None,
            (false, true) => Some(Wire::Grpc),
            _ => Some(Wire::Http),
        }
    }
}

impl ModelPool {
    /// Whether some regular worker speaks HTTP.
    pub fn has_regular_http(&self) -> bool {
        self.regulars.iter().any(|worker| worker.record.wire() == Wire::Http)
    }

    /// Whether its workers of this wire can serve a request: one alone, or a pair.
    pub fn serves_over(&self, wire: Wire) -> bool {
        let paired = |entry: &PrefillEntry| entry.worker.record.wire() == wire && !entry.partners.is_empty();
        self.regulars.iter().any(|worker| worker.record.wire() == wire) || self.prefills.iter().any(paired)
    }

    /// The workers of a leg, available or not.
    pub fn workers(&self, leg: Leg) -> impl Iterator<Item = &Arc<RoutedWorker>> {
        let (regulars, prefills, decodes): (&[Arc<RoutedWorker>], &[PrefillEntry], &[Arc<RoutedWorker>]) = match leg {
            Leg::Regular => (&self.regulars, &[], &[]),
            Leg::Prefill => (&[], &self.prefills, &[]),
            Leg::Decode => (&[], &[], &self.decodes),
        };
        regulars.iter().chain(prefills.iter().map(|entry| &entry.worker)).chain(decodes)
    }

    /// Who the policy of a leg chooses among, available or not. That of whole requests is asked for a lone prefill too.
    fn members(&self, leg: Leg) -> Vec<WorkerKey> {
        let key = |worker: &Arc<RoutedWorker>| worker.key();
        match leg {
            Leg::Regular => {
                self.regulars.iter().chain(self.prefills.iter().map(|entry| &entry.worker)).map(key).collect()
            }
            Leg::Prefill => self.prefills.iter().map(|entry| key(&entry.worker)).collect(),
            Leg::Decode => self.decodes.iter().map(key).collect(),
        }
    }
}

/// The routing table of one snapshot.
#[derive(Debug)]
pub struct RoutingTable {
    /// The snapshot it was built from.
    pub snapshot: Arc<Snapshot>,
    /// Its workers as requests are routed to them: ranks of an engine each for itself, where the fleet is `dp_aware`.
    pub workers: BTreeMap<WorkerId, Arc<Worker>>,
    models: HashMap<Arc<str>, Arc<ModelPool>>,
    canonical: BTreeSet<Arc<str>>,
    /// Workers that serve any model.
    wildcard: Option<Arc<ModelPool>>,
    runtimes: BTreeMap<WorkerId, Arc<WorkerRuntime>>,
    /// Tells waiting requests that a prefill worker has a place again. One for all tables of a gateway.
    released: Arc<Released>,
    /// How much of this gateway's shares of decode workers counts. One for all tables.
    lease: Arc<Lease>,
}

/// What a request's model leads to.
#[derive(Debug)]
pub enum Lookup {
    /// Its pool.
    Pool(Arc<ModelPool>),
    /// Workers declare models and none is this one.
    UnknownModel,
    /// The request names no model and several are served.
    ModelRequired,
    /// There is no registered worker at all.
    NoWorkers,
}

impl RoutingTable {
    /// The table of an empty fleet.
    pub fn empty(lease: Arc<Lease>) -> Self {
        Self {
            snapshot: Arc::default(),
            workers: BTreeMap::new(),
            models: HashMap::new(),
            canonical: BTreeSet::new(),
            wildcard: None,
            runtimes: BTreeMap::new(),
            released: Arc::default(),
            lease,
        }
    }

    /// Builds the table of `snapshot`, keeping what `previous` knows about workers and policies.
    ///
    /// # Errors
    /// When the snapshot asks for something this version does not have; the previous table stays in use.
    pub fn build(
        snapshot: Arc<Snapshot>,
        previous: &RoutingTable,
        clock: Clock,
        metrics: &Arc<Metrics>,
    ) -> Result<Self, TableError> {
        let mut runtimes = BTreeMap::new();
        let workers = dp::routed(&snapshot.workers, snapshot.settings("").dp_aware);
        for worker in workers.values() {
            let known = previous.runtimes.get(&worker.id).cloned();
            let runtime = known.unwrap_or_else(|| {
                let (released, lease) = (Arc::clone(&previous.released), Arc::clone(&previous.lease));
                Arc::new(WorkerRuntime::new(worker, clock, Arc::clone(metrics), released, lease))
            });
            let old = previous.workers.get(&worker.id);
            if old.is_some_and(|old| old.kv_engine_id() != worker.kv_engine_id()) {
                runtime.forget_mooncake();
            }
            let was_down = old.is_some_and(|old| old.health != Health::Ready);
            if was_down && worker.health == Health::Ready {
                runtime.health_returned();
            }
            if worker.spec.worker_type == WorkerType::Decode && worker.wire() == Wire::Grpc {
                let window = worker.running_window();
                runtime.window.resize(window);
                let shown = metrics.pd_admission_window.with_label_values(&[worker.spec.url.as_str()]);
                shown.set(i64::from(window.unwrap_or(0)));
            }
            runtimes.insert(worker.id, runtime);
        }
        let mut builder = Builder {
            snapshot: &snapshot,
            routed: &workers,
            previous,
            runtimes: &runtimes,
            metrics,
            workers: BTreeMap::new(),
        };
        let (models, canonical, wildcard) = builder.pools()?;
        previous.lease.set_hold(snapshot.settings("").expired_slots == ExpiredSlots::Hold);
        let (released, lease) = (Arc::clone(&previous.released), Arc::clone(&previous.lease));
        Ok(Self { models, canonical, wildcard, runtimes, released, lease, workers, snapshot })
    }

    /// What `model` leads to. No model means the only one.
    pub fn lookup(&self, model: Option<&str>) -> Lookup {
        let found = match model {
            Some(model) => self.models.get(model),
            None if self.canonical.len() == 1 => self.canonical.first().and_then(|only| self.models.get(only)),
            None if self.canonical.len() > 1 => return Lookup::ModelRequired,
            None => None,
        };
        match found.or(self.wildcard.as_ref()) {
            Some(pool) => Lookup::Pool(Arc::clone(pool)),
            None if !self.canonical.is_empty() => Lookup::UnknownModel,
            None => Lookup::NoWorkers,
        }
    }

    /// The canonical ids of the models served, in order, each with whether it has a registered worker.
    pub fn models(&self) -> impl Iterator<Item = &Arc<str>> {
        self.canonical.iter()
    }

    /// Whether some worker serves any model.
    pub fn has_wildcard(&self) -> bool {
        self.wildcard.is_some()
    }

    /// What this gateway knows about a worker.
    pub fn runtime(&self, id: WorkerId) -> Option<&Arc<WorkerRuntime>> {
        self.runtimes.get(&id)
    }

    /// How much of this gateway's shares of decode workers counts.
    pub fn lease(&self) -> &Arc<Lease> {
        &self.lease
    }

    /// The workers whose slots the fleet shares, each with its window.
    pub fn windows(&self) -> impl Iterator<Item = (WorkerId, &Arc<DecodeWindow>)> {
        let windows = self.runtimes.iter().map(|(id, runtime)| (*id, &runtime.window));
        windows.filter(|(_, window)| window.window().is_some())
    }

    /// What this gateway knows about every worker.
    pub fn runtimes(&self) -> impl Iterator<Item = &Arc<WorkerRuntime>> {
        self.runtimes.values()
    }

    /// What this gateway knows about a registered worker: about each of its ranks, where these are routed to.
    pub fn runtimes_of(&self, worker: &Worker) -> impl Iterator<Item = (&Arc<WorkerRuntime>, Option<u32>)> {
        let (id, width) = (worker.id, dp::width(worker));
        let whole = self.runtimes.get(&id).map(|runtime| (runtime, None));
        let ranks = (0..if whole.is_none() { width } else { 0 })
            .filter_map(move |rank| Some((self.runtimes.get(&dp::rank_id(id, rank))?, Some(rank))));
        whole.into_iter().chain(ranks)
    }

    /// The pools, each once.
    pub fn pools(&self) -> impl Iterator<Item = &Arc<ModelPool>> {
        self.canonical.iter().filter_map(|model| self.models.get(model)).chain(self.wildcard.as_ref())
    }

    /// The pool of a canonical model, or the one of workers that serve any.
    fn pool(&self, model: &str) -> Option<&Arc<ModelPool>> {
        self.models.get(model).or_else(|| self.wildcard.as_ref().filter(|pool| &*pool.model == model))
    }

    /// Lets policies forget the workers that have left their leg since `previous`.
    pub fn forget_departed(&self, previous: &RoutingTable) {
        for pool in self.pools() {
            for leg in LEGS {
                let members = pool.members(leg);
                let before = previous.pool(&pool.model).map(|pool| pool.members(leg)).unwrap_or_default();
                if before.iter().any(|worker| !members.contains(worker)) {
                    pool.policies.of(leg).retain(&members);
                }
            }
        }
    }

    /// Runtimes of workers that are not in `newer`.
    pub fn departed<'a>(&'a self, newer: &'a RoutingTable) -> impl Iterator<Item = &'a Arc<WorkerRuntime>> {
        self.runtimes.iter().filter(|(id, _)| !newer.runtimes.contains_key(id)).map(|(_, runtime)| runtime)
    }

    /// Counts for readiness: healthy workers per role, all registered workers, all healthy ones.
    pub fn census(&self) -> Census {
        let mut census = Census::default();
        for worker in self.workers.values() {
            census.total += 1;
            let reachable = self.runtimes.get(&worker.id).is_none_or(|runtime| !runtime.is_unreachable());
            if worker.is_routable() && reachable {
                census.healthy += 1;
                match worker.spec.worker_type {
                    WorkerType::Regular => census.regulars += 1,
                    WorkerType::Prefill => census.prefills += 1,
                    WorkerType::Decode => census.decodes += 1,
                    WorkerType::Encode => {}
                }
            }
        }
        census
    }
}

/// Counts of workers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[allow(missing_docs)]
pub struct Census {
    pub total: usize,
    pub healthy: usize,
    pub regulars: usize,
    pub prefills: usize,
    pub decodes: usize,
}

impl Census {
    /// Whether a whole request can be served: one regular worker, or both legs.
    pub fn is_ready(&self) -> bool {
        self.regulars > 0 || (self.prefills > 0 && self.decodes > 0)
    }
}

type Pools = (HashMap<Arc<str>, Arc<ModelPool>>, BTreeSet<Arc<str>>, Option<Arc<ModelPool>>);

struct Builder<'a> {
    snapshot: &'a Arc<Snapshot>,
    routed: &'a BTreeMap<WorkerId, Arc<Worker>>,
    previous: &'a RoutingTable,
    runtimes: &'a BTreeMap<WorkerId, Arc<WorkerRuntime>>,
    metrics: &'a Arc<Metrics>,
    workers: BTreeMap<(WorkerId, Arc<str>), Arc<RoutedWorker>>,
}

impl Builder<'_> {
    fn pools(&mut self) -> Result<Pools, TableError> {
        // Draining workers get no request again: they are not part of the table. Nor are those of a wire that is not spoken here.
        let routed: Vec<_> = self
            .routed
            .values()
            .filter(|worker| worker.facts.is_some() && worker.intent != Intent::Draining && worker.wire() != Wire::Zmq)
            .cloned()
            .collect();
        let mut names: BTreeMap<Arc<str>, Arc<str>> = BTreeMap::new();
        for worker in &routed {
            for card in worker.models() {
                let canonical: Arc<str> = Arc::from(card.id.as_str());
                names.insert(Arc::clone(&canonical), Arc::clone(&canonical));
                for alias in &card.aliases {
                    names.entry(Arc::from(alias.as_str())).or_insert_with(|| Arc::clone(&canonical));
                }
            }
        }
        let canonical: BTreeSet<Arc<str>> = names.values().cloned().collect();
        let mut pools: HashMap<Arc<str>, Arc<ModelPool>> = HashMap::new();
        for model in &canonical {
            let members: Vec<_> = routed.iter().filter(|worker| info::serves(worker, model)).cloned().collect();
            pools.insert(Arc::clone(model), Arc::new(self.pool(model, &members)?));
        }
        let models = names
            .iter()
            .filter_map(|(name, canonical)| Some((Arc::clone(name), Arc::clone(pools.get(canonical)?))))
            .collect();
        let any: Vec<_> = routed.iter().filter(|worker| worker.models().is_empty()).cloned().collect();
        let wildcard = if any.is_empty() { None } else { Some(Arc::new(self.pool(&Arc::from(UNKNOWN_MODEL), &any)?)) };
        Ok((models, canonical, wildcard))
    }

    fn pool(&mut self, model: &Arc<str>, members: &[Arc<smg_fleet::Worker>]) -> Result<ModelPool, TableError> {
        let mut settings = self.snapshot.settings(model);
        // Retries concern a model, so of what its workers ask for the last registration holds.
        let asking = members.iter().filter(|member| member.spec.resilience.is_of_retries());
        if let Some(last) = asking.max_by_key(|member| (member.create_revision, member.id)) {
            settings.retry = settings.retry.overridden(&last.spec.resilience);
        }
        let policies = self.policies(model, &settings)?;
        let (mut regulars, mut prefills, mut decodes) = (Vec::new(), Vec::new(), Vec::new());
        for member in members {
            let worker = self.routed(model, member, &settings)?;
            match member.spec.worker_type {
                WorkerType::Regular => regulars.push(worker),
                WorkerType::Prefill => prefills.push(worker),
                WorkerType::Decode => decodes.push(worker),
                WorkerType::Encode => {}
            }
        }
        let (prefills, mismatch) = pair(prefills, &decodes, settings.pairing_mode);
        if let Some(mismatch) = &mismatch {
            tracing::warn!(
                target: SMG,
                %model,
                components = ?mismatch.components,
                prefill = ?mismatch.prefill_keys,
                decode = ?mismatch.decode_keys,
                "no prefill shares a KV transfer protocol with any decode"
            );
        }
        let before = self.previous.pool(model);
        let budget = before.map(|pool| Arc::clone(&pool.budget)).unwrap_or_default();
        let queue = before.map(|pool| Arc::clone(&pool.queue)).unwrap_or_else(|| {
            let queued = self.metrics.pd_prefill_admission_queued.clone();
            Arc::new(PrefillQueue::new(Arc::clone(&self.previous.released), queued))
        });
        Ok(ModelPool {
            model: Arc::clone(model),
            settings,
            policies,
            regulars,
            prefills,
            decodes,
            wires: Wires::of(members),
            budget,
            queue,
            mismatch,
        })
    }

    fn routed(
        &mut self,
        model: &Arc<str>,
        member: &Arc<smg_fleet::Worker>,
        settings: &Settings,
    ) -> Result<Arc<RoutedWorker>, TableError> {
        let key = (member.id, Arc::clone(model));
        if let Some(known) = self.workers.get(&key) {
            return Ok(Arc::clone(known));
        }
        let runtime = self.runtimes.get(&member.id).cloned().ok_or(TableError::Worker { id: member.id })?;
        let worker = RoutedWorker::new(Arc::clone(member), runtime, settings, self.metrics)
            .ok_or(TableError::Worker { id: member.id })?;
        let worker = Arc::new(worker);
        self.workers.insert(key, Arc::clone(&worker));
        Ok(worker)
    }

    fn policies(&self, model: &Arc<str>, settings: &Settings) -> Result<ModelPolicies, TableError> {
        let before = self.previous.pool(model).map(|pool| &pool.policies);
        ModelPolicies::build(settings, before)
            .map_err(|error| TableError::Policy { model: model.to_string(), reason: error.to_string() })
    }
}

/// Works out which prefill pairs with which decode. Equal descriptors are compared once.
fn pair(
    prefills: Vec<Arc<RoutedWorker>>,
    decodes: &[Arc<RoutedWorker>],
    mode: PairingMode,
) -> (Vec<PrefillEntry>, Option<Mismatch>) {
    let mut partners_of = HashMap::new();
    let mut components = BTreeSet::new();
    let mut entries = Vec::with_capacity(prefills.len());
    for worker in prefills {
        let partners = match &worker.descriptor {
            None => Vec::new(),
            Some(descriptor) => partners_of
                .entry(descriptor.clone())
                .or_insert_with(|| {
                    let compare = |decode: &Arc<RoutedWorker>| match &decode.descriptor {
                        Some(other) => pairing::mismatch(descriptor, other, mode),
                        None => vec!["runtime".to_owned()],
                    };
                    let mut partners = Vec::new();
                    for (index, decode) in decodes.iter().enumerate() {
                        let differing = compare(decode);
                        if differing.is_empty() {
                            partners.push(index);
                        } else {
                            components.extend(differing);
                        }
                    }
                    partners
                })
                .clone(),
        };
        entries.push(PrefillEntry { worker, partners });
    }
    let unpaired = !entries.is_empty() && !decodes.is_empty() && entries.iter().all(|entry| entry.partners.is_empty());
    let mismatch = unpaired.then(|| Mismatch {
        model: None,
        components: components.into_iter().collect(),
        prefill_keys: keys(entries.iter().map(|entry| &entry.worker)),
        decode_keys: keys(decodes.iter()),
    });
    (entries, mismatch)
}

fn keys<'a>(workers: impl Iterator<Item = &'a Arc<RoutedWorker>>) -> Vec<String> {
    let keys: BTreeSet<String> =
        workers.filter_map(|worker| worker.descriptor.as_ref()).map(pairing::Descriptor::key).collect();
    keys.into_iter().collect()
}
