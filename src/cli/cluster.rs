//! `smg cluster`: the members of the control plane.

use std::path::PathBuf;

use clap::{Args, Subcommand, ValueEnum};

use super::error::CliError;
use super::values;

/// How results are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
#[value(rename_all = "lower")]
pub enum Output {
    /// For people.
    Table,
    /// The answer of the API.
    Json,
}

/// The flags of `smg cluster` as written.
#[derive(Debug, Clone, Args)]
pub(super) struct ClusterFlags {
    #[command(subcommand)]
    verb: ClusterVerb,
    #[command(flatten)]
    target: TargetFlags,
}

/// Where the control plane is.
#[derive(Debug, Clone, Args)]
struct TargetFlags {
    /// Members of the control plane, asked in turn until one answers; port 7400 where none is given
    #[arg(long, global = true, value_delimiter = ',', value_name = "HOST:PORT,…",
          default_value = "127.0.0.1:7400", value_parser = values::control_plane_address)]
    controlplane: Vec<String>,
    /// File whose content is a token of the admin API
    #[arg(long, global = true, value_name = "FILE")]
    token_file: Option<PathBuf>,
    /// How results are written
    #[arg(short, long, global = true, value_enum, default_value = "table")]
    output: Output,
}

/// What to do with the members.
#[derive(Debug, Clone, PartialEq, Eq, Subcommand)]
pub enum ClusterVerb {
    /// Show the members, who leads, and how far each is
    Status {
        /// Ask only the member that answers, not the leader
        #[arg(long)]
        stale: bool,
    },
    /// Let members that follow vote; by itself that happens when it makes their number odd
    Join {
        /// Numbers of the members
        #[arg(required = true, value_name = "NODE_ID")]
        node_ids: Vec<u64>,
        /// Accept an even number of voters
        #[arg(long)]
        allow_even: bool,
    },
    /// Remove members for good
    Remove {
        /// Numbers of the members
        #[arg(required = true, value_name = "NODE_ID")]
        node_ids: Vec<u64>,
        /// Accept an even number of voters
        #[arg(long)]
        allow_even: bool,
    },
    /// Replace a voter, dead or alive, by a member that has caught up
    Replace {
        /// Number of the voter that leaves for good
        #[arg(value_name = "NODE_ID")]
        node_id: u64,
        /// Number of the member that takes its place [default: the only one that can]
        #[arg(long, value_name = "NODE_ID")]
        with: Option<u64>,
    },
}

/// A checked `smg cluster`.
#[derive(Debug, Clone)]
pub struct ClusterArgs {
    /// What to do.
    pub verb: ClusterVerb,
    /// Members of the control plane, each `HOST:PORT`; at least one.
    pub controlplane: Vec<String>,
    /// File with a token of the admin API.
    pub token_file: Option<PathBuf>,
    /// How results are written.
    pub output: Output,
}

impl ClusterFlags {
    /// Checks the flags.
    pub(super) fn resolve(self) -> Result<ClusterArgs, CliError> {
        let TargetFlags { controlplane, token_file, output } = self.target;
        Ok(ClusterArgs { verb: self.verb, controlplane, token_file, output })
    }
}
