//! The commands of operators: `smg workers`, `policies`, `pairing`, `gateways`, `admission`, `tokens`, `audit` and `context`.

use std::path::PathBuf;

use clap::{Args, Subcommand};
use smg_fleet::{Role, WorkerType};

use super::error::CliError;
use super::target::{ChangeFlags, Output, TargetArgs, TargetFlags};

/// A command of operators as written.
#[derive(Debug, Clone, Args)]
pub(super) struct VerbFlags<V: Subcommand> {
    #[command(subcommand)]
    pub verb: V,
    #[command(flatten)]
    pub target: TargetFlags,
}

/// A command of operators without verbs.
#[derive(Debug, Clone, Args)]
pub(super) struct ListFlags<F: Args> {
    #[command(flatten)]
    pub list: F,
    #[command(flatten)]
    pub target: TargetFlags,
}

/// What an operator asks for.
#[derive(Debug, Clone, PartialEq)]
pub enum Verb {
    /// `smg workers`.
    Workers(WorkersVerb),
    /// `smg policies`.
    Policies(PoliciesVerb),
    /// `smg pairing`.
    Pairing(PairingVerb),
    /// `smg gateways`.
    Gateways(GatewaysFlags),
    /// `smg admission`.
    Admission(AdmissionFlags),
    /// `smg tokens`.
    Tokens(TokensVerb),
    /// `smg audit`.
    Audit(AuditFlags),
}

/// A checked command of operators.
#[derive(Debug, Clone)]
pub struct AdminArgs {
    /// What to do.
    pub verb: Verb,
    /// Whom to ask.
    pub target: TargetArgs,
    /// How results are written.
    pub output: Output,
}

impl AdminArgs {
    pub(super) fn new(
        verb: Verb,
        target: TargetFlags,
        environment: impl Fn(&str) -> Option<String>,
    ) -> Result<Self, CliError> {
        let output = target.output;
        Ok(Self { verb, target: target.resolve(environment)?, output })
    }
}

/// Flags of a list that can be followed.
#[derive(Debug, Clone, Default, PartialEq, Eq, Args)]
pub struct FollowFlags {
    /// Show every change as it happens
    #[arg(long)]
    pub watch: bool,
    /// Ask the server that answers for what it has, however old
    #[arg(long, conflicts_with = "watch")]
    pub stale: bool,
}

/// `smg workers`.
#[derive(Debug, Clone, PartialEq, Subcommand)]
pub enum WorkersVerb {
    /// List workers
    List {
        /// Only those that serve this model
        #[arg(long, value_name = "MODEL")]
        model: Option<String>,
        #[command(flatten)]
        follow: FollowFlags,
    },
    /// Show one worker
    Get {
        /// Its id or URL
        #[arg(value_name = "WORKER")]
        worker: String,
    },
    /// Register a worker
    Add(Box<AddFlags>),
    /// Change fields of a worker
    Patch(Box<PatchFlags>),
    /// Take a worker out of rotation and wait until nothing runs on it any more
    Drain {
        /// Its id or URL
        #[arg(value_name = "WORKER")]
        worker: String,
        /// How long to wait for what runs on it, in seconds; five at least, in which gateways say what that is
        #[arg(long, value_name = "SECONDS", default_value_t = 1800)]
        timeout_secs: u64,
        #[command(flatten)]
        change: ChangeFlags,
    },
    /// Take a worker out of rotation; what runs on it goes on
    Cordon {
        /// Its id or URL
        #[arg(value_name = "WORKER")]
        worker: String,
        #[command(flatten)]
        change: ChangeFlags,
    },
    /// Bring a worker back into rotation
    Uncordon {
        /// Its id or URL
        #[arg(value_name = "WORKER")]
        worker: String,
        #[command(flatten)]
        change: ChangeFlags,
    },
    /// Drain a worker and remove it
    Remove {
        /// Its id or URL
        #[arg(value_name = "WORKER")]
        worker: String,
        /// Wait until it is gone
        #[arg(long)]
        wait: bool,
        #[command(flatten)]
        change: ChangeFlags,
    },
}

/// What a worker is.
#[derive(Debug, Clone, Default, PartialEq, Args)]
pub struct SpecFlags {
    /// Its URL
    #[arg(value_name = "URL", required_unless_present = "file")]
    pub url: Option<String>,
    /// File with its spec, a JSON object as `POST /workers` takes it; `-` = standard input. Other flags win over it
    #[arg(short, long, value_name = "FILE")]
    pub file: Option<PathBuf>,
    /// Its role: regular, prefill, decode or encode
    #[arg(long = "type", value_name = "ROLE", value_parser = worker_type)]
    pub worker_type: Option<WorkerType>,
    /// Its engine [default: asked of it]
    #[arg(long, value_name = "ENGINE")]
    pub runtime: Option<String>,
    /// A model that it serves; repeat for each [default: asked of it]
    #[arg(long, value_name = "MODEL")]
    pub model: Vec<String>,
    /// A label; repeat for each
    #[arg(long, value_name = "NAME=VALUE", value_parser = pair)]
    pub label: Vec<(String, String)>,
    /// Bootstrap port of the engine
    #[arg(long, value_name = "PORT")]
    pub bootstrap_port: Option<u16>,
    /// KV connector of vLLM
    #[arg(long, value_name = "NAME")]
    pub kv_connector: Option<String>,
    /// KV role of vLLM
    #[arg(long, value_name = "NAME")]
    pub kv_role: Option<String>,
    /// Routing priority
    #[arg(long, value_name = "N")]
    pub priority: Option<u32>,
    /// Relative cost
    #[arg(long, value_name = "N")]
    pub cost: Option<f64>,
    /// File with the key of the engine
    #[arg(long, value_name = "FILE")]
    pub api_key_file: Option<PathBuf>,
}

/// `smg workers add`.
#[derive(Debug, Clone, Default, PartialEq, Args)]
pub struct AddFlags {
    #[command(flatten)]
    pub spec: SpecFlags,
    /// Wait until it is registered, or has failed to
    #[arg(long)]
    pub wait: bool,
    #[command(flatten)]
    pub change: ChangeFlags,
}

/// `smg workers patch`.
#[derive(Debug, Clone, Default, PartialEq, Args)]
pub struct PatchFlags {
    /// Its id or URL
    #[arg(value_name = "WORKER")]
    pub worker: String,
    /// File with a JSON object as `PATCH /workers/{id}` takes it; `-` = standard input. Other flags win over it
    #[arg(short, long, value_name = "FILE")]
    pub file: Option<PathBuf>,
    /// A label; repeat for each
    #[arg(long, value_name = "NAME=VALUE", value_parser = pair)]
    pub label: Vec<(String, String)>,
    /// Routing priority
    #[arg(long, value_name = "N")]
    pub priority: Option<u32>,
    /// Relative cost
    #[arg(long, value_name = "N")]
    pub cost: Option<f64>,
    /// File with the key of the engine
    #[arg(long, value_name = "FILE")]
    pub api_key_file: Option<PathBuf>,
    #[command(flatten)]
    pub change: ChangeFlags,
}

/// `smg policies`.
#[derive(Debug, Clone, PartialEq, Subcommand)]
pub enum PoliciesVerb {
    /// List the policy documents
    List {
        #[command(flatten)]
        follow: FollowFlags,
    },
    /// Show one document
    Get {
        /// A model, or `default` for the fleet's own document
        #[arg(value_name = "MODEL", default_value = "default")]
        model: String,
    },
    /// Replace a document, or change fields of it
    Set {
        /// A model, or `default` for the fleet's own document
        #[arg(value_name = "MODEL")]
        model: String,
        /// Fields to change, dots lead into objects; nothing after `=` removes the field
        #[arg(value_name = "FIELD=VALUE", value_parser = pair, required_unless_present = "file")]
        fields: Vec<(String, String)>,
        /// File with the whole document, a JSON object; `-` = standard input
        #[arg(short, long, value_name = "FILE", conflicts_with = "fields")]
        file: Option<PathBuf>,
        #[command(flatten)]
        change: ChangeFlags,
    },
    /// Delete a document
    Delete {
        /// A model, or `default` for the fleet's own document
        #[arg(value_name = "MODEL")]
        model: String,
        #[command(flatten)]
        change: ChangeFlags,
    },
}

/// What `smg pairing` looks at.
#[derive(Debug, Clone, Default, PartialEq, Eq, Args)]
pub struct PairingFlags {
    /// One model
    #[arg(long, value_name = "MODEL")]
    pub model: Option<String>,
    /// One prefill, by id or URL
    #[arg(long, value_name = "WORKER")]
    pub prefill: Option<String>,
    /// One decode, by id or URL
    #[arg(long, value_name = "WORKER")]
    pub decode: Option<String>,
    /// Only pairs, or only those that are none
    #[arg(long, value_name = "BOOL")]
    pub pairs: Option<bool>,
    /// Most cells shown
    #[arg(long, value_name = "N", default_value_t = 100)]
    pub limit: u32,
    /// Cells passed over
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub offset: u64,
}

/// `smg pairing`.
#[derive(Debug, Clone, PartialEq, Subcommand)]
pub enum PairingVerb {
    /// Show which prefill pairs with which decode
    Show {
        #[command(flatten)]
        of: PairingFlags,
        /// Show it again whenever it changes
        #[arg(long)]
        watch: bool,
    },
    /// Show with whom a worker would pair, which need not be registered
    Explain {
        #[command(flatten)]
        spec: Box<SpecFlags>,
        /// Only pairs, or only those that are none
        #[arg(long, value_name = "BOOL")]
        pairs: Option<bool>,
    },
}

/// `smg gateways`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Args)]
pub struct GatewaysFlags {
    /// Show every change as it happens
    #[arg(long)]
    pub watch: bool,
}

/// `smg admission`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Args)]
pub struct AdmissionFlags {
    /// Ask the server that answers for what it has, however old
    #[arg(long)]
    pub stale: bool,
}

/// `smg tokens`.
#[derive(Debug, Clone, PartialEq, Subcommand)]
pub enum TokensVerb {
    /// List tokens, without their secrets
    List {
        #[command(flatten)]
        follow: FollowFlags,
    },
    /// Create a token. Its secret is shown this once
    Create {
        /// What people call it
        #[arg(value_name = "NAME")]
        name: String,
        /// What its holder may do: viewer, operator or admin
        #[arg(long, value_name = "ROLE", value_parser = role)]
        role: Role,
        #[command(flatten)]
        change: ChangeFlags,
    },
    /// Revoke a token
    Revoke {
        /// Its id or name
        #[arg(value_name = "TOKEN")]
        revoked: String,
        #[command(flatten)]
        change: ChangeFlags,
    },
}

/// `smg audit`.
#[derive(Debug, Clone, PartialEq, Eq, Args)]
pub struct AuditFlags {
    /// Only changes whose author begins with this, such as `token:ada`
    #[arg(long, value_name = "NAME")]
    pub actor: Option<String>,
    /// Only changes of objects whose name begins with this, such as `worker/` or `policy/default`
    #[arg(long, value_name = "NAME")]
    pub object: Option<String>,
    /// Most changes shown, the newest ones
    #[arg(long, value_name = "N", default_value_t = 50)]
    pub limit: u32,
    /// Show it again whenever it changes
    #[arg(long)]
    pub watch: bool,
}

/// `smg context`.
#[derive(Debug, Clone, PartialEq, Eq, Subcommand)]
pub enum ContextVerb {
    /// List the entries of the configuration file
    List,
    /// Choose the entry that commands use
    Use {
        /// Its name
        #[arg(value_name = "NAME")]
        name: String,
    },
    /// Write an entry, with the servers, certificates and token that are given as flags
    Set {
        /// Its name
        #[arg(value_name = "NAME")]
        name: String,
    },
    /// Remove an entry
    Delete {
        /// Its name
        #[arg(value_name = "NAME")]
        name: String,
    },
}

/// A checked `smg context`.
#[derive(Debug, Clone)]
pub struct ContextArgs {
    /// What to do.
    pub verb: ContextVerb,
    /// What an entry gets.
    pub target: TargetArgs,
    /// How results are written.
    pub output: Output,
}

fn worker_type(text: &str) -> Result<WorkerType, String> {
    WorkerType::from_name(text).ok_or_else(|| "must be regular, prefill, decode or encode".to_owned())
}

fn role(text: &str) -> Result<Role, String> {
    Role::from_name(text).ok_or_else(|| "must be viewer, operator or admin".to_owned())
}

fn pair(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((name, value)) if !name.is_empty() => Ok((name.to_owned(), value.to_owned())),
        _ => Err("must be NAME=VALUE".to_owned()),
    }
}
