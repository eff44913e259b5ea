//! Admin tokens as messages.

use smg_messages::state as pb;

use super::{WireError, id_from_bytes, origin, origin_number, role, role_number};
use crate::access::{AdminToken, TokenHash};

/// A token as a message.
pub fn token_to_pb(token: &AdminToken) -> pb::AdminToken {
    pb::AdminToken {
        id: token.id.as_bytes().to_vec(),
        name: token.name.clone(),
        role: role_number(token.role),
        sha256: token.hash.as_bytes().to_vec(),
        origin: origin_number(token.origin),
        created_at_unix_ms: token.created_at_unix_ms,
        mod_revision: token.mod_revision,
    }
}

/// A token from a message.
///
/// # Errors
/// When a field is missing or unknown.
pub fn token_from_pb(token: pb::AdminToken) -> Result<AdminToken, WireError> {
    Ok(AdminToken {
        id: id_from_bytes(&token.id, "token id")?,
        name: token.name,
        role: role(token.role)?,
        hash: TokenHash::from_bytes(&token.sha256).ok_or(WireError::Field("sha256"))?,
        origin: origin(token.origin)?,
        created_at_unix_ms: token.created_at_unix_ms,
        mod_revision: token.mod_revision,
    })
}
