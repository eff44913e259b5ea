//! What start-up flags say about the fleet, as commands.

use std::sync::Arc;
use std::time::Duration;

use smg_fleet::policy::PolicyError;
use smg_fleet::validate::{SpecError, worker_spec};
use smg_fleet::{PolicyDocument, Revision, StartupToken, WorkerId, WorkerSpec};
use smg_state::Command;
use thiserror::Error;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::ControlPlane;
use crate::admin::access::AccessOptions;
use crate::writer::{Write, WriteError, Writer};

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
    /// removed, those added by API stay, and so it is with admin tokens; the policy document of the flags holds until an API write, and again once it changes.
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
        self.writer().write(Write::of("startup", tokens(&self.access.startup_tokens))).await?;
        let workers = workers.into_iter().map(|spec| (WorkerId(Uuid::now_v7()), spec)).collect();
        let outcome = self.writer().write(Write::of("startup", Command::ReconcileStartup { workers })).await?;
        Ok(outcome.revision)
    }
}

fn tokens(named: &[StartupToken]) -> Command {
    let tokens = named.iter().map(|token| (Uuid::now_v7(), token.clone())).collect();
    Command::ReconcileStartupTokens { tokens }
}

/// Pause before another attempt to store tokens.
const RETRY: Duration = Duration::from_secs(1);

/// Stores the tokens of this process's flags, so that gateways learn them: a duty of the leader. Members should name the same ones: those
/// of the last leader hold. Without flags nothing is revoked.
pub(crate) async fn store_tokens(writer: Writer, access: Arc<AccessOptions>, term: CancellationToken) {
    while !access.startup_tokens.is_empty() && !term.is_cancelled() {
        match writer.write(Write::of("startup", tokens(&access.startup_tokens))).await {
            Ok(_) => break,
            Err(error) => tracing::warn!(target: "smg", %error, "the tokens of the start-up flags are not stored yet"),
        }
        tokio::select! {
            () = term.cancelled() => {}
            () = tokio::time::sleep(RETRY) => {}
        }
    }
    term.cancelled().await;
}
