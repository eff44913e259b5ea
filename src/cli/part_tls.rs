//! Flags of TLS between the parts of the fleet.

use std::path::PathBuf;

use clap::Args;

use super::error::CliError;

/// How a part speaks to the others.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Fleet")]
pub(super) struct PartTlsFlags {
    /// Directory with this part's ca.crt, tls.crt and tls.key, for TLS between the parts of the fleet; read again when they change. `smg cluster ca` makes them
    #[arg(long, value_name = "DIR", conflicts_with = "insecure")]
    tls_dir: Option<PathBuf>,
    /// Speak to other parts of the fleet without TLS, and let everybody on the network do so
    #[arg(long)]
    pub(super) insecure: bool,
}

/// What a part without certificates is told.
const ADVICE: &str = "needs --tls-dir DIR with its certificate (`smg cluster ca init DIR` and `smg cluster ca issue DIR \
                      --role ROLE --name NAME` make one), or --insecure on a trusted network";

impl PartTlsFlags {
    /// The directory; none = without TLS. `what` cannot do without being told.
    pub(super) fn required(&self, what: &str) -> Result<Option<PathBuf>, CliError> {
        if self.tls_dir.is_none() && !self.insecure {
            return Err(CliError::refused(what, ADVICE));
        }
        Ok(self.tls_dir.clone())
    }

    /// The directory, where there may be nobody to talk to.
    pub(super) fn given(&self) -> bool {
        self.tls_dir.is_some()
    }
}
