//! Policy documents, the settings of the cluster, and what follows from both for pairing.

use std::sync::Arc;

use smg_fleet::matrix::{self, Explanation, Matrix, MatrixError, Query};
use smg_fleet::policy::PolicySource;
use smg_fleet::validate::worker_spec;
use smg_fleet::{ClusterSettings, PolicyDocument, PolicyRecord, Revision, Snapshot, WorkerSpec};
use smg_state::{Command, State};

use super::{Call, Change, Consistency, Service};
use crate::admin::error::ApiError;

/// What people call the fleet's own document, whose stored name is empty.
const DEFAULT: &str = "default";

/// The stored name of a document.
fn stored(model: &str) -> String {
    if model == DEFAULT { String::new() } else { model.to_owned() }
}

/// The name of a document that people know.
pub(crate) fn shown(record: &PolicyRecord) -> &str {
    if record.model.is_empty() { DEFAULT } else { &record.model }
}

impl From<MatrixError> for ApiError {
    fn from(error: MatrixError) -> Self {
        Self::BadRequest(error.to_string())
    }
}

impl Service {
    /// One document, by the name people know. A fleet without a default document has an empty one at revision 0, so that an expected
    /// revision of 0 means "nobody wrote one yet".
    pub(crate) async fn policy(
        &self,
        consistency: Consistency,
        model: &str,
    ) -> Result<(Arc<State>, Arc<PolicyRecord>), ApiError> {
        let state = self.read(consistency).await?;
        let name = stored(model);
        let record = match state.policy(&name) {
            Some(record) => Arc::clone(record),
            None if name.is_empty() => Arc::new(PolicyRecord {
                model: name,
                document: PolicyDocument::default(),
                source: PolicySource::default(),
                startup: None,
                mod_revision: 0,
            }),
            None => return Err(ApiError::PolicyNotFound(model.to_owned())),
        };
        Ok((state, record))
    }

    /// Stores a document. Returns it as it is stored now.
    pub(crate) async fn put_policy(
        &self,
        call: Call,
        model: &str,
        document: PolicyDocument,
    ) -> Result<(Change, PolicyRecord), ApiError> {
        let model = stored(model);
        document.validate(&model).map_err(|error| ApiError::BadRequest(error.to_string()))?;
        let command = Command::PutPolicy { model: model.clone(), document: Box::new(document.clone()) };
        let change = self.change(call, command).await?;
        let mod_revision = change.outcome.revision;
        Ok((change, PolicyRecord { model, document, source: PolicySource::Api, startup: None, mod_revision }))
    }

    /// Deletes a document.
    pub(crate) async fn delete_policy(&self, call: Call, model: &str) -> Result<Change, ApiError> {
        self.change(call, Command::DeletePolicy { model: stored(model) }).await
    }

    /// Replaces the settings of the cluster.
    pub(crate) async fn put_settings(&self, call: Call, settings: ClusterSettings) -> Result<Change, ApiError> {
        settings.validate().map_err(|error| ApiError::BadRequest(error.to_string()))?;
        self.change(call, Command::PutSettings { settings }).await
    }

    /// Which prefill pairs with which decode.
    pub(crate) async fn pairing(&self, consistency: Consistency, query: Query) -> Result<(Revision, Matrix), ApiError> {
        self.work_out(consistency, move |snapshot| matrix::matrix(snapshot, &query)).await
    }

    /// What a worker that is not registered would find. Nothing is registered or probed.
    pub(crate) async fn explain_pairing(
        &self,
        consistency: Consistency,
        query: Query,
        mut spec: WorkerSpec,
    ) -> Result<(Revision, Explanation), ApiError> {
        worker_spec(&mut spec).map_err(|error| ApiError::BadRequest(error.to_string()))?;
        self.work_out(consistency, move |snapshot| matrix::explain(snapshot, spec, &query)).await
    }

    /// Works out an answer off the runtime's threads: a matrix may have millions of cells to count.
    async fn work_out<T: Send + 'static>(
        &self,
        consistency: Consistency,
        work_out: impl FnOnce(&Snapshot) -> Result<T, MatrixError> + Send + 'static,
    ) -> Result<(Revision, T), ApiError> {
        let state = self.read(consistency).await?;
        let revision = state.revision();
        let worked_out = tokio::task::spawn_blocking(move || work_out(&state.snapshot())).await;
        let Ok(answer) = worked_out else { return Err(ApiError::Internal("the matrix could not be worked out")) };
        Ok((revision, answer?))
    }
}
