//! `smg cluster`: the members of the control plane.

use std::path::PathBuf;

use clap::{Args, Subcommand, ValueEnum};
use smg_fleet::Secret;
use smg_net::mutual::Files;
use smg_net::mutual::identity::Part;

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

/// Where the control plane is, and how it is spoken to.
#[derive(Debug, Clone, Args)]
struct TargetFlags {
    /// Members of the control plane, asked in turn until one answers; port 7400 where none is given
    #[arg(long, global = true, value_delimiter = ',', value_name = "HOST:PORT,…",
          default_value = "127.0.0.1:7400", value_parser = values::control_plane_address)]
    controlplane: Vec<String>,
    /// Directory with ca.crt, tls.crt and tls.key, as `smg cluster ca issue --role admin` makes it [env: SMG_TLS_DIR]
    #[arg(long, global = true, value_name = "DIR", conflicts_with_all = ["ca", "cert", "key"])]
    tls_dir: Option<PathBuf>,
    /// Roots of the members' certificates; PEM. With it the members are spoken to over TLS [env: SMG_CA]
    #[arg(long, global = true, value_name = "FILE")]
    ca: Option<PathBuf>,
    /// Certificate to present; PEM [env: SMG_CERT]
    #[arg(long, global = true, value_name = "FILE")]
    cert: Option<PathBuf>,
    /// Key of that certificate; PEM [env: SMG_KEY]
    #[arg(long, global = true, value_name = "FILE")]
    key: Option<PathBuf>,
    /// Token of the admin API; other users of this host can see it, unlike one in a file or in the environment [env: SMG_TOKEN]
    #[arg(long, global = true, value_name = "TOKEN", conflicts_with = "token_file")]
    token: Option<Secret>,
    /// File whose content is a token of the admin API [env: SMG_TOKEN_FILE]
    #[arg(long, global = true, value_name = "FILE")]
    token_file: Option<PathBuf>,
    /// How results are written
    #[arg(short, long, global = true, value_enum, default_value = "table")]
    output: Output,
}

/// What is trusted and presented.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OperatorTls {
    /// Roots of the members' certificates.
    pub roots: PathBuf,
    /// Certificate and key.
    pub identity: Option<(PathBuf, PathBuf)>,
}

/// Where the control plane is, and how it is spoken to.
#[derive(Debug, Clone)]
pub struct TargetArgs {
    /// Members of the control plane, each `HOST:PORT`; at least one.
    pub controlplane: Vec<String>,
    /// TLS; none = without.
    pub tls: Option<OperatorTls>,
    /// A token of the admin API.
    pub token: Option<Secret>,
    /// File with a token of the admin API.
    pub token_file: Option<PathBuf>,
}

impl TargetFlags {
    /// Flags win over the environment, and what belongs together comes from one of them.
    fn resolve(self, environment: impl Fn(&str) -> Option<String>) -> Result<TargetArgs, CliError> {
        let path = |name: &str| environment(name).map(PathBuf::from);
        let (mut tls_dir, mut ca, mut cert, mut key) = (self.tls_dir, self.ca, self.cert, self.key);
        if tls_dir.is_none() && ca.is_none() && cert.is_none() && key.is_none() {
            (tls_dir, ca, cert, key) = (path("SMG_TLS_DIR"), path("SMG_CA"), path("SMG_CERT"), path("SMG_KEY"));
        }
        let tls = match (tls_dir, ca, cert, key) {
            (Some(directory), ..) => {
                let Files { roots, certificate, key } = Files::within(&directory);
                Some(OperatorTls { roots, identity: Some((certificate, key)) })
            }
            (None, Some(roots), None, None) => Some(OperatorTls { roots, identity: None }),
            (None, Some(roots), Some(cert), Some(key)) => Some(OperatorTls { roots, identity: Some((cert, key)) }),
            (None, None, None, None) => None,
            (None, None, ..) => return Err(CliError::conflict("--cert", "needs --ca")),
            (None, Some(_), Some(_), None) => return Err(CliError::conflict("--cert", "needs --key")),
            (None, Some(_), None, Some(_)) => return Err(CliError::conflict("--key", "needs --cert")),
        };
        let (mut token, mut token_file) = (self.token, self.token_file);
        if token.is_none() && token_file.is_none() {
            (token, token_file) = (environment("SMG_TOKEN").map(Secret::from), path("SMG_TOKEN_FILE"));
        }
        Ok(TargetArgs { controlplane: self.controlplane, tls, token, token_file })
    }
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
    /// How results are written.
    pub output: Output,
}

impl ClusterFlags {
    /// Checks the flags.
    pub(super) fn resolve(self, environment: impl Fn(&str) -> Option<String>) -> Result<ClusterArgs, CliError> {
        let output = self.target.output;
        Ok(ClusterArgs { verb: self.verb, target: self.target.resolve(environment)?, output })
    }
}
