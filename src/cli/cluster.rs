//! `smg cluster`: the members of the control plane.

use std::path::PathBuf;

use clap::{Args, Subcommand};
use smg_net::mutual::identity::Part;

use super::controlplane::{EtcdFlags, StoreArgs, WITHOUT_ETCD};
use super::error::CliError;
use super::target::{Output, TargetArgs, TargetFlags};
use super::values;

/// The flags of `smg cluster` as written.
#[derive(Debug, Clone, Args)]
pub(super) struct ClusterFlags {
    #[command(subcommand)]
    verb: ClusterVerb,
    #[command(flatten)]
    target: TargetFlags,
}

/// What to do with the members.
#[derive(Debug, Clone, PartialEq, Eq, Subcommand)]
pub enum ClusterVerb {
    /// Show the members, who leads, and how far each is
    Status {
        /// Ask only the member that answers, not the leader
        #[arg(long)]
        stale: bool,
        /// Show it again whenever it changes
        #[arg(long)]
        watch: bool,
    },
    /// Let members that follow vote; by itself that happens when it makes their number odd
    Join {
        /// Numbers of the members
        #[arg(required = true, value_name = "NODE_ID")]
        node_ids: Vec<u64>,
        /// Accept an even number of voters
        #[arg(long)]
        allow_even: bool,
        /// Say what would come of it, and change nothing
        #[arg(long)]
        dry_run: bool,
    },
    /// Remove members for good
    Remove {
        /// Numbers of the members
        #[arg(required = true, value_name = "NODE_ID")]
        node_ids: Vec<u64>,
        /// Accept an even number of voters
        #[arg(long)]
        allow_even: bool,
        /// Say what would come of it, and change nothing
        #[arg(long)]
        dry_run: bool,
    },
    /// Replace a voter, dead or alive, by a member that has caught up
    Replace {
        /// Number of the voter that leaves for good
        #[arg(value_name = "NODE_ID")]
        node_id: u64,
        /// Number of the member that takes its place [default: the only one that can]
        #[arg(long, value_name = "NODE_ID")]
        with: Option<u64>,
        /// Say what would come of it, and change nothing
        #[arg(long)]
        dry_run: bool,
    },
    /// Write the whole state of the fleet to a file, and verify it
    Backup {
        /// The file; it must not exist
        #[arg(value_name = "FILE")]
        file: PathBuf,
    },
    /// Make a new control plane from a backup: the directory of one member, or the state in etcd; speaks to no member
    Restore {
        /// The file
        #[arg(value_name = "FILE")]
        file: PathBuf,
        /// Empty directory of the new member, for `smg controlplane --data-dir` or `smg launch --data-dir`
        #[arg(long, value_name = "DIR", required_unless_present = "etcd_endpoints", conflicts_with = "etcd_endpoints")]
        data_dir: Option<PathBuf>,
        /// File with the passphrase that sealed the keys of engines
        #[arg(long, value_name = "FILE")]
        backup_key_file: Option<PathBuf>,
        /// Restore without the keys of engines, where they are missing or sealed
        #[arg(long)]
        without_keys: bool,
        /// Where the state of a control plane on etcd goes: nothing may lie below the prefix
        #[command(flatten)]
        etcd: Box<EtcdFlags>,
    },
    /// Make certificates for the parts of a fleet; speaks to nobody
    #[command(subcommand)]
    Ca(CaVerb),
}

/// What a local certificate authority does.
#[derive(Debug, Clone, PartialEq, Eq, Subcommand)]
pub enum CaVerb {
    /// Make an authority: DIR/ca.crt, which every part trusts, and DIR/ca.key, which must stay secret
    Init {
        /// Directory of the authority
        #[arg(value_name = "DIR")]
        directory: PathBuf,
        /// Name of the cluster; certificates of another one count for nothing
        #[arg(long, value_name = "NAME", default_value = "smg", value_parser = values::cluster_name)]
        cluster_name: String,
        /// Days until the authority ends
        #[arg(long, default_value_t = 3650, value_parser = clap::value_parser!(u32).range(1..=36_500))]
        days: u32,
    },
    /// Make or renew a certificate: DIR/ROLE-NAME with the files that --tls-dir wants
    Issue {
        /// Directory of the authority
        #[arg(value_name = "DIR")]
        directory: PathBuf,
        /// What its holder is: controlplane, gateway or admin
        #[arg(long, value_name = "ROLE", value_parser = values::part)]
        role: Part,
        /// What its holder is called
        #[arg(long, value_name = "NAME", value_parser = values::part_name)]
        name: String,
        /// Host name or address under which tools such as curl find it; repeat for each
        #[arg(long, value_name = "HOST")]
        host: Vec<String>,
        /// Days until it ends
        #[arg(long, default_value_t = 365, value_parser = clap::value_parser!(u32).range(1..=36_500))]
        days: u32,
    },
}

/// A checked `smg cluster`.
#[derive(Debug, Clone)]
pub struct ClusterArgs {
    /// What to do.
    pub verb: ClusterVerb,
    /// Where the control plane is.
    pub target: TargetArgs,
    /// What a restored control plane keeps its state in.
    pub into: Option<StoreArgs>,
    /// How results are written.
    pub output: Output,
}

impl ClusterFlags {
    /// Checks the flags.
    pub(super) fn resolve(self, environment: impl Fn(&str) -> Option<String>) -> Result<ClusterArgs, CliError> {
        let output = self.target.output;
        let into = match &self.verb {
            ClusterVerb::Restore { etcd, .. } if etcd.is_given() && !cfg!(feature = "etcd") => {
                return Err(CliError::refused("--etcd-endpoints", WITHOUT_ETCD));
            }
            ClusterVerb::Restore { etcd, .. } if etcd.is_given() => {
                Some(StoreArgs::Etcd(etcd.as_ref().clone().resolve(true)?))
            }
            ClusterVerb::Restore { data_dir: Some(data_dir), .. } => {
                Some(StoreArgs::Raft { data_dir: data_dir.clone() })
            }
            _ => None,
        };
        Ok(ClusterArgs { verb: self.verb, target: self.target.resolve(environment)?, into, output })
    }
}
