//! Flags of TLS: towards clients and towards workers.

use std::path::PathBuf;

use clap::Args;
use smg_net::tls::{ClientFiles, ServerFiles};

use super::error::CliError;

/// TLS of the client edge.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "TLS")]
pub struct ServerTlsFlags {
    /// Certificate to serve with, followed by those that lead to a root; PEM. Read again when it changes
    #[arg(long, value_name = "FILE")]
    tls_cert_path: Option<PathBuf>,
    /// Key of that certificate; PEM
    #[arg(long, value_name = "FILE")]
    tls_key_path: Option<PathBuf>,
    /// Roots of client certificates; PEM. With any, clients need a certificate
    #[arg(long, num_args = 1.., value_name = "FILE")]
    tls_client_ca_paths: Vec<PathBuf>,
}

impl ServerTlsFlags {
    /// The files, if TLS is asked for.
    pub(super) fn resolve(&self) -> Result<Option<ServerFiles>, CliError> {
        let client_roots = self.tls_client_ca_paths.clone();
        match (self.tls_cert_path.clone(), self.tls_key_path.clone()) {
            (Some(certificate), Some(key)) => Ok(Some(ServerFiles { certificate, key, client_roots })),
            (None, None) if client_roots.is_empty() => Ok(None),
            (Some(_), None) => Err(CliError::conflict("--tls-cert-path", "needs --tls-key-path")),
            (None, Some(_)) => Err(CliError::conflict("--tls-key-path", "needs --tls-cert-path")),
            (None, None) => {
                Err(CliError::conflict("--tls-client-ca-paths", "needs --tls-cert-path and --tls-key-path"))
            }
        }
    }
}

/// TLS towards `https://` workers.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "TLS")]
pub struct WorkerTlsFlags {
    /// Roots of worker certificates besides those of the system; PEM
    #[arg(long, num_args = 0.., value_name = "FILE")]
    ca_cert_paths: Vec<PathBuf>,
    /// Certificate to present to workers; PEM
    #[arg(long, value_name = "FILE")]
    client_cert_path: Option<PathBuf>,
    /// Key of that certificate; PEM
    #[arg(long, value_name = "FILE")]
    client_key_path: Option<PathBuf>,
}

impl WorkerTlsFlags {
    /// The files.
    pub(super) fn resolve(&self) -> Result<ClientFiles, CliError> {
        let identity = match (self.client_cert_path.clone(), self.client_key_path.clone()) {
            (Some(certificate), Some(key)) => Some((certificate, key)),
            (None, None) => None,
            (Some(_), None) => return Err(CliError::conflict("--client-cert-path", "needs --client-key-path")),
            (None, Some(_)) => return Err(CliError::conflict("--client-key-path", "needs --client-cert-path")),
        };
        Ok(ClientFiles { roots: self.ca_cert_paths.clone(), identity })
    }
}
