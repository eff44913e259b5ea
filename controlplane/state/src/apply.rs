//! The one function that changes the state.

use std::sync::Arc;

use smg_fleet::policy::PolicySource;
use smg_fleet::worker::WorkerPatch;
use smg_fleet::{
    ClusterSettings, Facts, Health, Intent, Job, JobKind, JobStatus, Origin, PolicyDocument, PolicyRecord, Worker,
    WorkerId, WorkerSpec, validate,
};

use crate::audit::Before;
use crate::command::{Command, Envelope, Outcome, Rejection, RejectionCode};
use crate::departures::Departed;
use crate::members::NodeId;
use crate::memory::Remembered;
use crate::state::State;

/// Most workers of a fleet, those that never registered included.
pub const MAX_WORKERS: usize = 10_000;
/// Most policy documents of a fleet.
pub const MAX_POLICIES: usize = 1_000;
/// Longest stored job message, in bytes.
const MAX_MESSAGE_BYTES: usize = 2_048;

/// What a command did: the worker it was about, and whether the state changed.
pub(crate) struct Effect {
    pub worker_id: Option<WorkerId>,
    pub node_id: Option<NodeId>,
    pub changed: bool,
}

impl Effect {
    pub(crate) fn on(id: WorkerId) -> Self {
        Self { worker_id: Some(id), node_id: None, changed: true }
    }

    pub(crate) fn none(worker_id: Option<WorkerId>) -> Self {
        Self { worker_id, node_id: None, changed: false }
    }

    pub(crate) fn whole() -> Self {
        Self { worker_id: None, node_id: None, changed: true }
    }

    /// The registry of members is no part of the fleet that gateways follow, so a change of it is no revision.
    pub(crate) fn on_member(node_id: NodeId) -> Self {
        Self { worker_id: None, node_id: Some(node_id), changed: false }
    }
}

pub(crate) fn reject<T>(code: RejectionCode, message: impl Into<String>) -> Result<T, Rejection> {
    Err(Rejection { code, message: message.into() })
}

impl State {
    /// Applies a command. A repeated command id returns the first outcome and changes nothing.
    pub fn apply(&mut self, envelope: &Envelope) -> Outcome {
        if let Some(outcome) = self.memory.outcome(&envelope.command_id) {
            return outcome.clone();
        }
        if let Command::LedgerRound { number, events } = &envelope.command {
            return self.ledger_round(*number, events);
        }
        let before = Before::look(self, &envelope.command);
        let outcome = match self.change(envelope) {
            Ok(effect) => {
                if effect.changed {
                    self.revision += 1;
                }
                Outcome {
                    revision: self.revision,
                    worker_id: effect.worker_id,
                    node_id: effect.node_id,
                    rejection: None,
                }
            }
            Err(rejection) => {
                Outcome { revision: self.revision, worker_id: None, node_id: None, rejection: Some(rejection) }
            }
        };
        if outcome.rejection.is_none()
            && let Some(record) = before.and_then(|before| before.record(self, envelope, &outcome))
        {
            self.audit.add(record);
        }
        self.memory.remember(Remembered {
            command_id: envelope.command_id,
            at_unix_ms: envelope.proposed_at_unix_ms,
            outcome: outcome.clone(),
        });
        outcome
    }

    /// Changes objects as of the next revision, or nothing at all.
    fn change(&mut self, envelope: &Envelope) -> Result<Effect, Rejection> {
        let at = envelope.proposed_at_unix_ms;
        let expected = envelope.expected_revision;
        match &envelope.command {
            Command::InitCluster { cluster_id, history_id } => {
                if self.revision > 0 {
                    return Ok(Effect::none(None));
                }
                self.cluster_id = *cluster_id;
                self.history_id = *history_id;
                Ok(Effect::whole())
            }
            Command::RegisterMember { node_id, storage_id, peer_address, api_address } => {
                self.register_member(*node_id, *storage_id, peer_address, api_address)
            }
            Command::RetireMembers { node_ids } => self.retire_members(node_ids),
            // Taken care of before: it is neither remembered nor a revision.
            Command::LedgerRound { .. } => Ok(Effect::none(None)),
            Command::PutSettings { settings } => self.put_settings(settings, expected),
            Command::CreateWorker { id, spec, origin } => self.create_worker(*id, spec, *origin, at),
            Command::ReplaceWorker { id, spec } => {
                let worker = self.existing(*id, expected)?;
                if worker.spec.url != spec.url {
                    return reject(RejectionCode::Invalid, "the url of a worker cannot change");
                }
                if worker.intent == Intent::Draining {
                    return reject(RejectionCode::Invalid, "the worker is being removed");
                }
                // Until an update is carried out, readers see the spec before it: a spec made from that would undo it.
                if expected.is_some() && worker.job.as_ref().is_some_and(is_active_update) {
                    return reject(RejectionCode::RevisionConflict, format!("an update of worker {id} is in progress"));
                }
                let mut spec = spec.clone();
                // The key is write-only: a body built from what was read does not carry it.
                spec.api_key = spec.api_key.take().or_else(|| worker.spec.api_key.clone());
                self.start_update(*id, *spec, at)
            }
            Command::PatchWorker { id, patch } => {
                self.existing(*id, expected)?;
                self.patch_worker(*id, patch, at)
            }
            Command::RemoveWorker { id } => {
                self.existing(*id, expected)?;
                Ok(self.remove_worker(*id, at))
            }
            Command::CompleteJob { id, number, facts } => self.complete_job(*id, *number, facts.as_deref()),
            Command::ReportJob { id, number, status, message } => {
                let message = truncate(message);
                let job = self.current_job(*id, *number)?;
                if job.status == *status && job.message.as_deref() == Some(message) {
                    return Ok(Effect::none(Some(*id)));
                }
                let (status, message) = (*status, Some(message.to_owned()));
                self.update(*id, |worker| {
                    if let Some(job) = &mut worker.job {
                        (job.status, job.message, job.at_unix_ms) = (status, message, at);
                    }
                })
            }
            Command::SetHealth { id, health } => {
                let worker = self.existing(*id, None)?;
                if worker.facts.is_none() || worker.health == *health {
                    return Ok(Effect::none(Some(*id)));
                }
                self.update(*id, |worker| worker.health = *health)
            }
            Command::RefreshFacts { id, facts, health } => {
                let worker = self.existing(*id, None)?;
                let known = worker.facts.as_ref() == Some(facts) && worker.health == *health;
                if worker.facts.is_none() || worker.intent == Intent::Draining || known {
                    return Ok(Effect::none(Some(*id)));
                }
                let (facts, health) = (Some(Facts::clone(facts)), *health);
                self.update(*id, |worker| (worker.facts, worker.health) = (facts, health))
            }
            Command::SetIntent { id, intent } => {
                let worker = self.existing(*id, expected)?;
                if worker.intent == Intent::Draining || *intent == Intent::Draining {
                    return reject(RejectionCode::Invalid, "draining is started by a removal and cannot be undone");
                }
                if worker.intent == *intent {
                    return Ok(Effect::none(Some(*id)));
                }
                self.update(*id, |worker| worker.intent = *intent)
            }
            Command::ForgetJob { id, number } => {
                if self.current_job(*id, *number)?.status != JobStatus::Failed {
                    return Ok(Effect::none(Some(*id)));
                }
                if self.existing(*id, None)?.facts.is_none() {
                    self.drop_worker(*id);
                    return Ok(Effect::on(*id));
                }
                self.update(*id, |worker| worker.job = None)
            }
            Command::ReconcileStartup { workers } => self.reconcile_startup(workers, at),
            Command::PutPolicy { model, document } => self.put_policy(model, document, expected),
            Command::DeletePolicy { model } => {
                self.check_policy_revision(model, expected)?;
                match self.policies.remove(model) {
                    Some(_) => {
                        self.departures.add(self.revision + 1, Departed::Policy(model.clone()));
                        Ok(Effect::whole())
                    }
                    None => reject(RejectionCode::PolicyNotFound, format!("no policy document for '{model}'")),
                }
            }
            Command::ApplyStartupPolicy { document } => self.apply_startup_policy(document),
            Command::CreateToken { id, token } => self.create_token(*id, token, at),
            Command::RevokeToken { id } => self.revoke_token(*id, expected),
            Command::ReconcileStartupTokens { tokens } => Ok(self.reconcile_startup_tokens(tokens, at)),
        }
    }

    /// Ten of these come each second: remembering them would push out the commands of operators.
    fn ledger_round(&mut self, number: u64, events: &[smg_admission::Event]) -> Outcome {
        let next = self.ledger.rounds() + 1;
        let rejection = (number != next).then(|| Rejection {
            code: RejectionCode::RevisionConflict,
            message: format!("the next round of the ledger is {next}, not {number}"),
        });
        if rejection.is_none() {
            Arc::make_mut(&mut self.ledger).round(events);
        }
        Outcome { revision: self.revision, worker_id: None, node_id: None, rejection }
    }

    fn put_settings(&mut self, settings: &ClusterSettings, expected: Option<u64>) -> Result<Effect, Rejection> {
        let current = self.settings_revision;
        if expected.is_some_and(|expected| expected != current) {
            return reject(RejectionCode::RevisionConflict, format!("the settings are at revision {current}"));
        }
        if let Err(error) = settings.validate() {
            return reject(RejectionCode::Invalid, error.to_string());
        }
        self.settings = settings.clone();
        self.settings_revision = self.revision + 1;
        Ok(Effect::whole())
    }

    // === workers ===

    fn existing(&self, id: WorkerId, expected: Option<u64>) -> Result<&Arc<Worker>, Rejection> {
        let Some(worker) = self.workers.get(&id) else {
            return reject(RejectionCode::WorkerNotFound, format!("worker {id} not found"));
        };
        match expected {
            Some(revision) if revision != worker.mod_revision => reject(
                RejectionCode::RevisionConflict,
                format!("worker {id} is at revision {}, not {revision}", worker.mod_revision),
            ),
            _ => Ok(worker),
        }
    }

    fn current_job(&self, id: WorkerId, number: u64) -> Result<&Job, Rejection> {
        match &self.existing(id, None)?.job {
            Some(job) if job.number == number => Ok(job),
            _ => reject(
                RejectionCode::JobSuperseded,
                format!("job {number} of worker {id} is no longer the current one"),
            ),
        }
    }

    fn update(&mut self, id: WorkerId, change: impl FnOnce(&mut Worker)) -> Result<Effect, Rejection> {
        let revision = self.revision + 1;
        if let Some(worker) = self.workers.get_mut(&id) {
            let worker = Arc::make_mut(worker);
            change(worker);
            worker.mod_revision = revision;
        }
        Ok(Effect::on(id))
    }

    fn job(&self, kind: JobKind, at_unix_ms: u64, proposed: Option<WorkerSpec>) -> Job {
        Job {
            number: self.revision + 1,
            kind,
            status: JobStatus::Pending,
            message: None,
            at_unix_ms,
            proposed: proposed.map(Box::new),
        }
    }

    fn check_spec(spec: &WorkerSpec) -> Result<(), Rejection> {
        let mut normalised = spec.clone();
        match validate::worker_spec(&mut normalised) {
            Ok(_) if normalised == *spec => Ok(()),
            Ok(_) => reject(RejectionCode::Invalid, "the worker spec is not in its normal form"),
            Err(error) => reject(RejectionCode::Invalid, error.to_string()),
        }
    }

    fn create_worker(&mut self, id: WorkerId, spec: &WorkerSpec, origin: Origin, at: u64) -> Result<Effect, Rejection> {
        Self::check_spec(spec)?;
        if let Some(worker) = self.worker_by_url(&spec.url) {
            let job_status = worker.job.as_ref().map(|job| job.status);
            if worker.facts.is_some() || worker.intent == Intent::Draining {
                return reject(
                    RejectionCode::WorkerAlreadyExists,
                    format!("a worker with url {} already exists: {}", spec.url, worker.id),
                );
            }
            if job_status != Some(JobStatus::Failed) {
                return reject(
                    RejectionCode::WorkerCreateInProgress,
                    format!("another creation of {} is in progress: {}", spec.url, worker.id),
                );
            }
            // The last attempt failed: the URL keeps its id and starts anew.
            let id = worker.id;
            let job = self.job(JobKind::AddWorker, at, None);
            return self.update(id, |worker| {
                worker.spec = spec.clone();
                worker.origin = origin;
                worker.job = Some(job);
            });
        }
        if self.workers.len() >= MAX_WORKERS {
            return reject(RejectionCode::Limit, format!("the fleet already has {MAX_WORKERS} workers"));
        }
        if self.workers.contains_key(&id) {
            return reject(RejectionCode::Invalid, format!("worker id {id} is taken"));
        }
        let revision = self.revision + 1;
        let worker = Worker {
            id,
            spec: spec.clone(),
            facts: None,
            health: Health::Ready,
            intent: Intent::Active,
            origin,
            job: Some(self.job(JobKind::AddWorker, at, None)),
            create_revision: revision,
            mod_revision: revision,
        };
        self.by_url.insert(spec.url.clone(), id);
        self.workers.insert(id, Arc::new(worker));
        Ok(Effect::on(id))
    }

    fn start_update(&mut self, id: WorkerId, spec: WorkerSpec, at: u64) -> Result<Effect, Rejection> {
        Self::check_spec(&spec)?;
        let registered = self.existing(id, None)?.facts.is_some();
        let kind = if registered { JobKind::UpdateWorker } else { JobKind::AddWorker };
        let job = self.job(kind, at, registered.then(|| spec.clone()));
        self.update(id, |worker| {
            if !registered {
                worker.spec = spec;
            }
            worker.job = Some(job);
        })
    }

    fn patch_worker(&mut self, id: WorkerId, patch: &WorkerPatch, at: u64) -> Result<Effect, Rejection> {
        if let Err(error) = validate::worker_patch(patch) {
            return reject(RejectionCode::Invalid, error.to_string());
        }
        let mut spec = self.existing(id, None)?.spec.clone();
        spec.priority = patch.priority.unwrap_or(spec.priority);
        spec.cost = patch.cost.unwrap_or(spec.cost);
        spec.labels.extend(patch.labels.iter().map(|(name, value)| (name.clone(), value.clone())));
        spec.api_key = patch.api_key.clone().or(spec.api_key);
        spec.health.merge(&patch.health);
        // Connector facts are fixed at registration; a label must not bring them in through the side door.
        for name in ["kv_connector", "kv_role", "kv_engine_id"] {
            if patch.labels.contains_key(name) {
                return reject(RejectionCode::Invalid, format!("'{name}' cannot be patched: use PUT"));
            }
        }
        Self::check_spec(&spec)?;
        let unprobed = patch.health.disable_health_check == Some(true);
        self.update(id, |worker| {
            worker.spec = spec;
            if unprobed {
                worker.health = Health::Ready;
            }
            // An update that saw the worker before this patch must not overwrite it.
            if let Some(job) = worker.job.as_mut().filter(|job| is_active_update(job)) {
                job.status = JobStatus::Failed;
                job.message = Some("superseded by a concurrent change".to_owned());
                job.at_unix_ms = at;
            }
        })
    }

    fn remove_worker(&mut self, id: WorkerId, at: u64) -> Effect {
        let Some(worker) = self.workers.get(&id) else { return Effect::none(None) };
        if worker.facts.is_none() {
            self.drop_worker(id);
            return Effect::on(id);
        }
        if worker.intent == Intent::Draining {
            return Effect::none(Some(id));
        }
        let job = self.job(JobKind::RemoveWorker, at, None);
        let revision = self.revision + 1;
        if let Some(worker) = self.workers.get_mut(&id) {
            let worker = Arc::make_mut(worker);
            worker.intent = Intent::Draining;
            worker.job = Some(job);
            worker.mod_revision = revision;
        }
        Effect::on(id)
    }

    fn drop_worker(&mut self, id: WorkerId) {
        if let Some(worker) = self.workers.remove(&id) {
            self.by_url.remove(&worker.spec.url);
            self.departures.add(self.revision + 1, Departed::Worker(id));
        }
    }

    fn complete_job(&mut self, id: WorkerId, number: u64, facts: Option<&Facts>) -> Result<Effect, Rejection> {
        let job = self.current_job(id, number)?;
        if job.status == JobStatus::Failed {
            return reject(RejectionCode::JobSuperseded, format!("job {number} of worker {id} has already failed"));
        }
        match (job.kind, facts) {
            (JobKind::RemoveWorker, _) => {
                self.drop_worker(id);
                Ok(Effect::on(id))
            }
            (_, None) => reject(RejectionCode::Invalid, "a registration needs facts"),
            (kind, Some(facts)) => {
                let proposed = job.proposed.clone();
                self.update(id, |worker| {
                    if let Some(spec) = proposed {
                        worker.spec = *spec;
                    }
                    worker.facts = Some(facts.clone());
                    worker.job = None;
                    if kind == JobKind::AddWorker {
                        worker.health = Health::Ready;
                    }
                })
            }
        }
    }

    fn reconcile_startup(&mut self, workers: &[(WorkerId, WorkerSpec)], at: u64) -> Result<Effect, Rejection> {
        for (_, spec) in workers {
            Self::check_spec(spec)?;
        }
        if self.workers.len() + workers.len() > MAX_WORKERS {
            return reject(RejectionCode::Limit, format!("the fleet would have more than {MAX_WORKERS} workers"));
        }
        let mut changed = false;
        let unnamed: Vec<WorkerId> = self
            .workers
            .values()
            .filter(|worker| worker.origin == Origin::Startup)
            .filter(|worker| workers.iter().all(|(_, spec)| spec.url != worker.spec.url))
            .map(|worker| worker.id)
            .collect();
        for id in unnamed {
            changed |= self.remove_worker(id, at).changed;
        }
        for (id, spec) in workers {
            changed |= match self.worker_by_url(&spec.url).cloned() {
                None => self.create_worker(*id, spec, Origin::Startup, at)?.changed,
                // What an operator registered by API is theirs.
                Some(worker) if worker.origin == Origin::Api => false,
                Some(worker) if worker.intent == Intent::Draining => self.readmit(worker.id, spec, at)?.changed,
                Some(worker) if worker.facts.is_none() => self.start_update(worker.id, spec.clone(), at)?.changed,
                Some(worker) if worker.spec != *spec => self.start_update(worker.id, spec.clone(), at)?.changed,
                Some(_) => false,
            };
        }
        Ok(Effect { changed, ..Effect::none(None) })
    }

    /// A start-up flag names a worker again whose removal is not finished.
    fn readmit(&mut self, id: WorkerId, spec: &WorkerSpec, at: u64) -> Result<Effect, Rejection> {
        self.start_update(id, spec.clone(), at)?;
        self.update(id, |worker| worker.intent = Intent::Active)
    }

    // === policies ===

    fn check_policy_revision(&self, model: &str, expected: Option<u64>) -> Result<(), Rejection> {
        let Some(expected) = expected else { return Ok(()) };
        let current = self.policies.get(model).map_or(0, |record| record.mod_revision);
        if current == expected {
            return Ok(());
        }
        reject(RejectionCode::RevisionConflict, format!("the policy document is at revision {current}, not {expected}"))
    }

    fn put_policy(
        &mut self,
        model: &str,
        document: &PolicyDocument,
        expected: Option<u64>,
    ) -> Result<Effect, Rejection> {
        self.check_policy_revision(model, expected)?;
        if let Err(error) = document.validate(model) {
            return reject(RejectionCode::Invalid, error.to_string());
        }
        let existing = self.policies.get(model);
        if existing.is_none() && self.policies.len() >= MAX_POLICIES {
            return reject(RejectionCode::Limit, format!("the fleet already has {MAX_POLICIES} policy documents"));
        }
        let startup = existing.and_then(|record| record.startup.clone());
        self.store_policy(model, document, PolicySource::Api, startup);
        Ok(Effect::whole())
    }

    fn apply_startup_policy(&mut self, document: &PolicyDocument) -> Result<Effect, Rejection> {
        if let Err(error) = document.validate("") {
            return reject(RejectionCode::Invalid, error.to_string());
        }
        let existing = self.policies.get("");
        let unchanged = existing.is_some_and(|record| record.startup.as_ref() == Some(document));
        if unchanged || (existing.is_none() && *document == PolicyDocument::default()) {
            return Ok(Effect::none(None));
        }
        self.store_policy("", document, PolicySource::Startup, Some(document.clone()));
        Ok(Effect::whole())
    }

    fn store_policy(
        &mut self,
        model: &str,
        document: &PolicyDocument,
        source: PolicySource,
        startup: Option<PolicyDocument>,
    ) {
        let record = PolicyRecord {
            model: model.to_owned(),
            document: document.clone(),
            source,
            startup,
            mod_revision: self.revision + 1,
        };
        self.policies.insert(model.to_owned(), Arc::new(record));
    }
}

fn is_active_update(job: &Job) -> bool {
    job.kind == JobKind::UpdateWorker && job.status != JobStatus::Failed
}

fn truncate(message: &str) -> &str {
    let mut end = message.len().min(MAX_MESSAGE_BYTES);
    while !message.is_char_boundary(end) {
        end -= 1;
    }
    message.get(..end).unwrap_or_default()
}

#[cfg(test)]
#[path = "apply_test.rs"]
mod tests;
