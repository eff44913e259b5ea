//! What start-up flags say about the fleet, as commands.

use smg_fleet::policy::PolicyError;
use smg_fleet::validate::{SpecError, worker_spec};
use smg_fleet::{PolicyDocument, Revision, WorkerId, WorkerSpec};
use smg_state::Command;
use thiserror::Error;
use uuid::Uuid;

use crate::ControlPlane;
use crate::writer::{Write, WriteError};

/// Why start-up flags could not be applied.
#[derive(Debug, Error)]
#[allow(missing_docs)]
pub enum StartupError {
    #[error("worker '{url}': {error}")]
    Worker { url: String, error: SpecError },
    #[error("worker '{0}' is named twice")]
    Twice(String),
    #[error(transparent)]
    Policy(#[from] PolicyError),
    #[error(transparent)]
    Write(#[from] WriteError),
}

impl ControlPlane {
    /// Makes the state follow the start-up flags: workers named by them are created or updated, those named last time and no longer are
    /// removed, those added by API stay; the policy document of the flags holds until an API write, and again once it changes.
    ///
    /// Returns the revision that holds all of it.
    ///
    /// # Errors
    /// When a flag is invalid (nothing is changed then) or the store does not answer.
    pub async fn apply_startup(
        &self,
        mut workers: Vec<WorkerSpec>,
        policy: PolicyDocument,
    ) -> Result<Revision, StartupError> {
        let mut named = std::collections::BTreeSet::new();
        for spec in &mut workers {
            worker_spec(spec).map_err(|error| StartupError::Worker { url: spec.url.clone(), error })?;
            if !named.insert(spec.url.clone()) {
                return Err(StartupError::Twice(spec.url.clone()));
            }
        }
        policy.validate("")?;
        let document = Command::ApplyStartupPolicy { document: Box::new(policy) };
        self.writer().write(Write::of("startup", document)).await?;
        let workers = workers.into_iter().map(|spec| (WorkerId(Uuid::now_v7()), spec)).collect();
        let outcome = self.writer().write(Write::of("startup", Command::ReconcileStartup { workers })).await?;
        Ok(outcome.revision)
    }
}
