//! Workers: what operators register, change, take out of rotation and remove.

use std::sync::Arc;

use smg_fleet::info::serves;
use smg_fleet::validate::{worker_patch, worker_spec};
use smg_fleet::worker::WorkerPatch;
use smg_fleet::{Intent, Origin, Runtime, Settings, Worker, WorkerId, WorkerSpec, dp};
use smg_state::{Command, NodeId, State};
use uuid::Uuid;

use super::{Call, Change, Consistency, Service};
use crate::admin::error::ApiError;
use crate::sync::everywhere::Everywhere;
use crate::sync::gateways::GatewayRecord;

/// What an operator wants with a worker, and whether requests still run on it.
#[derive(Debug, Clone)]
pub(crate) struct Occupation {
    /// The worker.
    pub worker: Arc<Worker>,
    /// Gateways that run requests on it, or have not said yet; known while it is out of rotation.
    pub busy_gateways: Vec<String>,
    /// Members of the control plane that did not answer: nobody knows of their gateways.
    pub unheard_members: Vec<NodeId>,
}

impl Occupation {
    /// Whether it is out of rotation and nothing runs on it any more.
    pub(crate) fn is_idle(&self) -> bool {
        self.worker.intent != Intent::Active && self.busy_gateways.is_empty() && self.unheard_members.is_empty()
    }
}

impl Service {
    /// All workers, or those that serve `model`. With data-parallel awareness each rank is one.
    pub(crate) async fn list_workers(
        &self,
        consistency: Consistency,
        model: Option<&str>,
    ) -> Result<(Arc<State>, Vec<Arc<Worker>>), ApiError> {
        let state = self.read(consistency).await?;
        let served = |worker: &&Arc<Worker>| model.is_none_or(|model| serves(worker, model));
        let aware = is_dp_aware(&state);
        let routed = |worker: &Arc<Worker>| if aware { dp::ranks(worker) } else { vec![Arc::clone(worker)] };
        let workers = state.workers().filter(served).flat_map(routed).collect();
        Ok((state, workers))
    }

    /// One worker, or one rank of a worker.
    pub(crate) async fn worker(
        &self,
        consistency: Consistency,
        id: WorkerId,
    ) -> Result<(Arc<State>, Arc<Worker>), ApiError> {
        let state = self.read(consistency).await?;
        let rank = || rank_with(&state, id).map(|(_, rank)| rank);
        let worker = state.worker(id).cloned().or_else(rank).ok_or_else(|| ApiError::WorkerNotFound(id.to_string()))?;
        Ok((state, worker))
    }

    /// Whether requests run on a worker that is out of rotation.
    pub(crate) async fn occupation(
        &self,
        consistency: Consistency,
        id: WorkerId,
    ) -> Result<(Arc<State>, Occupation), ApiError> {
        let (state, worker) = self.worker(consistency, id).await?;
        let Everywhere { gateways, members } = self.gateways.list(consistency == Consistency::Stale).await?;
        let busy = |record: &GatewayRecord| record.connected && !record.drains.is_done(worker.id, worker.mod_revision);
        let busy_gateways = gateways.into_iter().map(|seen| seen.record).filter(busy).map(|record| record.gateway_id);
        let busy_gateways = busy_gateways.collect();
        let unheard_members = members.iter().filter(|asked| !asked.answered).map(|asked| asked.node_id).collect();
        Ok((state, Occupation { worker, busy_gateways, unheard_members }))
    }

    /// Accepts a worker; a job registers it.
    pub(crate) async fn create_worker(
        &self,
        call: Call,
        spec: WorkerSpec,
    ) -> Result<(Change, WorkerId, String), ApiError> {
        let spec = normal(spec)?;
        let url = spec.url.clone();
        let command = Command::CreateWorker { id: WorkerId(Uuid::now_v7()), spec: Box::new(spec), origin: Origin::Api };
        let change = self.change(call, command).await?;
        let Some(id) = change.outcome.worker_id else {
            return Err(ApiError::BadRequest("the command with this Idempotency-Key created no worker".to_owned()));
        };
        Ok((change, id, url))
    }

    /// Accepts a new spec; a job installs it.
    pub(crate) async fn replace_worker(&self, call: Call, id: WorkerId, spec: WorkerSpec) -> Result<Change, ApiError> {
        let spec = Box::new(normal(spec)?);
        if is_dp_aware(&self.local()) {
            let message = "a worker cannot be replaced while data-parallel ranks are workers (dp_aware): remove it and register it anew";
            return Err(ApiError::BadRequest(message.to_owned()));
        }
        self.change(call, Command::ReplaceWorker { id, spec }).await
    }

    /// Changes a few fields at once.
    pub(crate) async fn patch_worker(&self, call: Call, id: WorkerId, patch: WorkerPatch) -> Result<Change, ApiError> {
        worker_patch(&patch).map_err(|error| ApiError::BadRequest(error.to_string()))?;
        self.change(call, Command::PatchWorker { id, patch: Box::new(patch) }).await
    }

    /// Takes a worker out of rotation, or brings it back.
    pub(crate) async fn set_intent(&self, call: Call, id: WorkerId, intent: Intent) -> Result<Change, ApiError> {
        self.change(call, Command::SetIntent { id, intent }).await
    }

    /// Drains a worker and removes it.
    pub(crate) async fn remove_worker(&self, call: Call, id: WorkerId) -> Result<Change, ApiError> {
        if let Some((engine, rank)) = rank_with(&self.local(), id) {
            let message = format!("{} is a rank of worker {engine}: remove that one", rank.spec.url);
            return Err(ApiError::BadRequest(message));
        }
        self.change(call, Command::RemoveWorker { id }).await
    }
}

/// Whether ranks are shown as workers.
fn is_dp_aware(state: &State) -> bool {
    Settings::resolve(None, state.policy("").map(|record| &record.document)).dp_aware
}

/// The data-parallel rank with this id, and its engine's id.
fn rank_with(state: &State, id: WorkerId) -> Option<(WorkerId, Arc<Worker>)> {
    if !is_dp_aware(state) || state.worker(id).is_some() {
        return None;
    }
    let ranks = |worker: &Arc<Worker>| Some((worker.id, dp::ranks(worker).into_iter().find(|rank| rank.id == id)?));
    state.workers().find_map(ranks)
}

/// A spec in the form that is stored.
fn normal(mut spec: WorkerSpec) -> Result<WorkerSpec, ApiError> {
    if spec.provider.is_some() || spec.runtime == Runtime::External {
        let message = "this build has no provider routers: a worker must be an engine of its own";
        return Err(ApiError::Provider(message.to_owned()));
    }
    worker_spec(&mut spec).map_err(|error| ApiError::BadRequest(error.to_string()))?;
    Ok(spec)
}
