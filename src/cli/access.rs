//! Flags that say who may call what.
//!
//! Keys are digested here: past the command line nothing holds one.

use std::path::PathBuf;

use clap::Args;
use smg_fleet::access::check_name;
use smg_fleet::{Role, Secret, StartupToken, TokenHash};
use smg_gateway::Keys;

use super::error::CliError;

/// Keys of the client edge.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Access")]
pub struct KeyFlags {
    /// Key that inference requests need (`Authorization: Bearer`). It is never sent to a worker
    #[arg(long, value_name = "KEY")]
    api_key: Option<Secret>,
    /// Key of one tenant, as good as --api-key for inference; repeat for each
    #[arg(long, value_name = "TENANT:KEY")]
    tenant_api_key: Vec<Secret>,
}

impl KeyFlags {
    /// The keys as digests.
    pub(super) fn resolve(&self) -> Result<Keys, CliError> {
        let gateway = match self.api_key.as_deref() {
            Some("") => return Err(CliError::conflict("--api-key", "the key is empty")),
            key => key.map(TokenHash::of),
        };
        let tenants = self.tenant_api_key.iter().map(|given| match given.split_once(':') {
            Some((tenant, key)) if !tenant.is_empty() && !key.is_empty() => Ok(TokenHash::of(key)),
            _ => Err(CliError::conflict("--tenant-api-key", "must be TENANT:KEY")),
        });
        Ok(Keys { gateway, tenants: tenants.collect::<Result<_, _>>()? })
    }
}

/// Tokens of the admin API.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Access")]
pub struct TokenFlags {
    /// Tokens of the admin API; ROLE is viewer (or user), operator or admin. With any token, by flag or by API, the admin API needs one
    #[arg(long, num_args = 0.., value_name = "ID:NAME:ROLE:KEY")]
    control_plane_api_keys: Vec<Secret>,
    /// File whose content is an admin's token, named `bootstrap`
    #[arg(long, value_name = "FILE")]
    admin_token_file: Option<PathBuf>,
    /// File with the passphrase that seals the keys of engines in backups. Without it they are left out
    #[arg(long, value_name = "FILE")]
    backup_key_file: Option<PathBuf>,
    /// Log changes by holders of admin tokens (the default)
    #[arg(long)]
    control_plane_audit_enabled: bool,
    /// Do not log them
    #[arg(long, conflicts_with = "control_plane_audit_enabled")]
    disable_audit_logging: bool,
}

/// Who may call the admin API, as far as the command line says it.
#[derive(Debug, Clone, Default)]
pub struct TokenArgs {
    /// Tokens given as flags or in the environment.
    pub tokens: Vec<StartupToken>,
    /// File with another one, of an admin.
    pub file: Option<PathBuf>,
    /// Whether changes are logged.
    pub audit: bool,
    /// File with the passphrase of backups.
    pub backup_key_file: Option<PathBuf>,
}

/// Name of the token in `--admin-token-file`.
pub const BOOTSTRAP: &str = "bootstrap";

impl TokenFlags {
    /// Reads the flags and `CONTROL_PLANE_API_KEYS`, whose entries are separated by white space.
    pub(super) fn resolve(&self, environment: Option<String>) -> Result<TokenArgs, CliError> {
        const FLAG: &str = "--control-plane-api-keys";
        let environment = environment.unwrap_or_default();
        let given = self.control_plane_api_keys.iter().map(|given| (FLAG, &**given));
        // As documented, the flag wins over the variable.
        let environment = environment.split_whitespace().map(|given| ("CONTROL_PLANE_API_KEYS", given));
        let given: Vec<_> =
            if self.control_plane_api_keys.is_empty() { environment.collect() } else { given.collect() };
        let mut tokens: Vec<StartupToken> = Vec::new();
        for (source, given) in given {
            let token = token(given).ok_or_else(|| {
                CliError::conflict(
                    source,
                    "each entry must be ID:NAME:ROLE:KEY, with the role viewer, user, operator or admin",
                )
            })?;
            if tokens.iter().any(|known| known.name == token.name) || token.name == BOOTSTRAP {
                return Err(CliError::conflict(
                    source,
                    format!("the name '{}' is given twice, or reserved", token.name),
                ));
            }
            tokens.push(token);
        }
        Ok(TokenArgs {
            tokens,
            file: self.admin_token_file.clone(),
            audit: !self.disable_audit_logging,
            backup_key_file: self.backup_key_file.clone(),
        })
    }
}

/// `ID:NAME:ROLE:KEY`; a key may contain colons. The token is called by both id and name, since two ids may share a name.
fn token(given: &str) -> Option<StartupToken> {
    let mut parts = given.splitn(4, ':');
    let (id, name, role, key) = (parts.next()?, parts.next()?, Role::from_name(parts.next()?)?, parts.next()?);
    let name = format!("{id}:{name}");
    (!id.is_empty() && !key.is_empty() && check_name(&name).is_ok()).then(|| StartupToken {
        name,
        role,
        hash: TokenHash::of(key),
    })
}
