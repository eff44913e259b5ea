//! The closed set of commands, and what comes back.

use std::fmt;

use smg_admission::Event;
use smg_fleet::worker::WorkerPatch;
use smg_fleet::{
    ClusterSettings, Facts, Health, Intent, JobStatus, Origin, PolicyDocument, Revision, StartupToken, WorkerId,
    WorkerSpec,
};
use uuid::Uuid;

use crate::members::NodeId;

/// Identity of a command, chosen by its author: retrying with the same id cannot apply it twice.
pub type CommandId = Uuid;

/// A change to the fleet's state.
#[derive(Debug, Clone, PartialEq)]
pub enum Command {
    /// Names the cluster. First command of a history.
    InitCluster {
        /// Which cluster.
        cluster_id: Uuid,
        /// Which history of it.
        history_id: Uuid,
    },
    /// Gives a disk its number as a member of the control plane, or notes its new addresses.
    RegisterMember {
        /// The number it has; absent = the next one.
        node_id: Option<NodeId>,
        /// Its disk.
        storage_id: Uuid,
        /// `HOST:PORT` for other members.
        peer_address: String,
        /// `HOST:PORT` for operators and gateways.
        api_address: String,
    },
    /// Tells members of the control plane to leave for good.
    RetireMembers {
        /// Their numbers.
        node_ids: Vec<NodeId>,
    },
    /// Carries on the slot ledger. Not remembered: its number keeps it from being applied twice.
    LedgerRound {
        /// One more than the rounds before it.
        number: u64,
        /// What has happened since.
        events: Vec<Event>,
    },
    /// Replaces the settings of the cluster.
    PutSettings {
        /// The settings.
        settings: ClusterSettings,
    },
    /// Accepts a worker; a job registers it.
    CreateWorker {
        /// The id to give it, unless its URL already has one.
        id: WorkerId,
        /// A validated spec.
        spec: Box<WorkerSpec>,
        /// Who asks.
        origin: Origin,
    },
    /// Accepts a new spec for a worker; a job installs it.
    ReplaceWorker {
        /// Which worker.
        id: WorkerId,
        /// A validated spec with the worker's URL.
        spec: Box<WorkerSpec>,
    },
    /// Changes a few fields at once.
    PatchWorker {
        /// Which worker.
        id: WorkerId,
        /// What to change.
        patch: Box<WorkerPatch>,
    },
    /// Starts draining a worker; a job removes it. One that never registered goes at once.
    RemoveWorker {
        /// Which worker.
        id: WorkerId,
    },
    /// A job succeeded.
    CompleteJob {
        /// Which worker.
        id: WorkerId,
        /// Which job of it.
        number: u64,
        /// What the engine said; absent for removals.
        facts: Option<Box<Facts>>,
    },
    /// A job goes on, or failed for good.
    ReportJob {
        /// Which worker.
        id: WorkerId,
        /// Which job of it.
        number: u64,
        /// Processing or failed.
        status: JobStatus,
        /// The last error.
        message: String,
    },
    /// Active probes changed their verdict.
    SetHealth {
        /// Which worker.
        id: WorkerId,
        /// The verdict.
        health: Health,
    },
    /// The engine behind a worker was started anew, or answers again: what it says now, and the verdict of active probes.
    RefreshFacts {
        /// Which worker.
        id: WorkerId,
        /// What the engine says.
        facts: Box<Facts>,
        /// The verdict.
        health: Health,
    },
    /// An operator changes what they want with a worker.
    SetIntent {
        /// Which worker.
        id: WorkerId,
        /// The intent.
        intent: Intent,
    },
    /// Clears a failed job that was readable long enough; a worker that never registered goes with it.
    ForgetJob {
        /// Which worker.
        id: WorkerId,
        /// Which job of it.
        number: u64,
    },
    /// The workers named by start-up flags: creates and updates them, and removes those named before and no longer.
    ReconcileStartup {
        /// Ids to give to new ones, and validated specs.
        workers: Vec<(WorkerId, WorkerSpec)>,
    },
    /// Stores a policy document.
    PutPolicy {
        /// Which model; empty = the fleet default.
        model: String,
        /// The document.
        document: Box<PolicyDocument>,
    },
    /// Deletes a policy document.
    DeletePolicy {
        /// Which model; empty = the fleet default.
        model: String,
    },
    /// What the start-up flags say about policies: an API write wins until this changes.
    ApplyStartupPolicy {
        /// The document of the flags that were given.
        document: Box<PolicyDocument>,
    },
    /// Creates an admin token.
    CreateToken {
        /// The id to give it.
        id: Uuid,
        /// Its name, its role and the digest of its secret.
        token: StartupToken,
    },
    /// Revokes an admin token.
    RevokeToken {
        /// Which token.
        id: Uuid,
    },
    /// The tokens named by start-up flags: creates and updates them, and revokes those named before and no longer.
    ReconcileStartupTokens {
        /// Ids to give to new ones, and what the flags say.
        tokens: Vec<(Uuid, StartupToken)>,
    },
}

/// A command with its author and its conditions.
#[derive(Debug, Clone, PartialEq)]
pub struct Envelope {
    /// Identity for retries.
    pub command_id: CommandId,
    /// Who asks, for the audit record.
    pub actor: String,
    /// The author's clock. Data, never compared with another clock by `apply`.
    pub proposed_at_unix_ms: u64,
    /// The object's `mod_revision` that the author saw; absent = unconditional.
    pub expected_revision: Option<Revision>,
    /// The change.
    pub command: Command,
}

impl fmt::Display for Envelope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} by {}", self.command.name(), self.actor)
    }
}

impl Command {
    /// A name for logs.
    pub fn name(&self) -> &'static str {
        match self {
            Command::InitCluster { .. } => "init_cluster",
            Command::RegisterMember { .. } => "register_member",
            Command::RetireMembers { .. } => "retire_members",
            Command::LedgerRound { .. } => "ledger_round",
            Command::PutSettings { .. } => "put_settings",
            Command::CreateWorker { .. } => "create_worker",
            Command::ReplaceWorker { .. } => "replace_worker",
            Command::PatchWorker { .. } => "patch_worker",
            Command::RemoveWorker { .. } => "remove_worker",
            Command::CompleteJob { .. } => "complete_job",
            Command::ReportJob { .. } => "report_job",
            Command::SetHealth { .. } => "set_health",
            Command::RefreshFacts { .. } => "refresh_facts",
            Command::SetIntent { .. } => "set_intent",
            Command::ForgetJob { .. } => "forget_job",
            Command::ReconcileStartup { .. } => "reconcile_startup",
            Command::PutPolicy { .. } => "put_policy",
            Command::DeletePolicy { .. } => "delete_policy",
            Command::ApplyStartupPolicy { .. } => "apply_startup_policy",
            Command::CreateToken { .. } => "create_token",
            Command::RevokeToken { .. } => "revoke_token",
            Command::ReconcileStartupTokens { .. } => "reconcile_startup_tokens",
        }
    }
}

/// Why a command was refused. The numbers are those of the schema.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)]
#[repr(i32)]
pub enum RejectionCode {
    WorkerNotFound = 1,
    WorkerAlreadyExists = 2,
    WorkerCreateInProgress = 3,
    RevisionConflict = 4,
    Invalid = 5,
    JobSuperseded = 6,
    PolicyNotFound = 7,
    Limit = 8,
    TokenNotFound = 20,
    TokenAlreadyExists = 21,
    LastAdminToken = 22,
    MemberNotFound = 9,
    MemberRetired = 10,
}

impl RejectionCode {
    /// Every code.
    pub const ALL: [RejectionCode; 13] = [
        Self::WorkerNotFound,
        Self::WorkerAlreadyExists,
        Self::WorkerCreateInProgress,
        Self::RevisionConflict,
        Self::Invalid,
        Self::JobSuperseded,
        Self::PolicyNotFound,
        Self::Limit,
        Self::TokenNotFound,
        Self::TokenAlreadyExists,
        Self::LastAdminToken,
        Self::MemberNotFound,
        Self::MemberRetired,
    ];
}

/// A refusal, with words for the author.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rejection {
    /// What kind.
    pub code: RejectionCode,
    /// Why.
    pub message: String,
}

impl fmt::Display for Rejection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

/// What applying a command led to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Outcome {
    /// The state's revision after it.
    pub revision: Revision,
    /// The worker it was about: for a creation, the id that the URL now has.
    pub worker_id: Option<WorkerId>,
    /// The member of the control plane it was about.
    pub node_id: Option<NodeId>,
    /// Whether it was refused.
    pub rejection: Option<Rejection>,
}

impl Outcome {
    /// The outcome, or the refusal.
    ///
    /// # Errors
    /// The refusal.
    pub fn accepted(self) -> Result<Outcome, Rejection> {
        match self.rejection {
            Some(rejection) => Err(rejection),
            None => Ok(self),
        }
    }
}
