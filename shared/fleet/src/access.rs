//! Who may change the fleet: admin tokens, their roles, and how a presented secret is judged.
//!
//! A token is a secret of 256 random bits that is shown once. The fleet keeps its SHA-256: a plain digest is enough here, since there is
//! nothing to guess (a slow hash protects passwords, which people choose), and it lets every gateway judge a token without asking anybody.
//! Keys that operators choose themselves (start-up flags) are kept in the same way and must be as random.
//!
//! Invariants
//! * no secret is ever printed: [`Secret`] and [`TokenHash`] hide their value from `Debug`, and neither can be serialised;
//! * comparing takes the same time wherever two digests differ, and no token's match ends the search before the others were compared.

use std::fmt;

use serde::Deserialize;
use sha2::{Digest, Sha256};
use thiserror::Error;
use uuid::Uuid;

use crate::Revision;
use crate::worker::Origin;

/// Longest name of a token, in bytes.
const MAX_NAME_BYTES: usize = 128;

/// A text that is never printed: a key or a token.
#[derive(Clone, PartialEq, Eq, Default, Deserialize, schemars::JsonSchema)]
#[serde(transparent)]
pub struct Secret(String);

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(hidden)")
    }
}

impl std::ops::Deref for Secret {
    type Target = str;

    fn deref(&self) -> &str {
        &self.0
    }
}

impl From<String> for Secret {
    fn from(text: String) -> Self {
        Self(text)
    }
}

impl From<&str> for Secret {
    fn from(text: &str) -> Self {
        Self(text.to_owned())
    }
}

/// The SHA-256 of a secret.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct TokenHash([u8; 32]);

impl fmt::Debug for TokenHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("TokenHash(hidden)")
    }
}

impl TokenHash {
    /// The digest of a secret.
    pub fn of(secret: &str) -> Self {
        Self(Sha256::digest(secret.as_bytes()).into())
    }

    /// The digest itself, for disk and wire.
    pub fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }

    /// A digest that was stored.
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        bytes.try_into().ok().map(Self)
    }

    /// Whether both are digests of the same secret; takes the same time whatever the answer.
    pub fn matches(&self, other: &Self) -> bool {
        let difference = self.0.iter().zip(&other.0).fold(0u8, |sum, (a, b)| sum | (a ^ b));
        std::hint::black_box(difference) == 0
    }
}

/// What the holder of a token may do. Each role includes those before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// Read everything but tokens.
    #[serde(alias = "user")]
    Viewer,
    /// Change workers too: register, update, drain, remove, flush.
    Operator,
    /// Change policies, settings, tokens and the cluster too.
    Admin,
}

impl Role {
    /// Every role, in the order of the schema.
    pub const ALL: &'static [Role] = &[Self::Viewer, Self::Operator, Self::Admin];

    /// The name used in REST and flags.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Viewer => "viewer",
            Self::Operator => "operator",
            Self::Admin => "admin",
        }
    }

    /// The role of this name. `user` is what the documented system calls a viewer.
    pub fn from_name(name: &str) -> Option<Self> {
        match name {
            "viewer" | "user" => Some(Self::Viewer),
            "operator" => Some(Self::Operator),
            "admin" => Some(Self::Admin),
            _ => None,
        }
    }

    /// The least role that may make this request to the admin API. What is not listed needs the highest.
    pub fn required(method: &str, path: &str) -> Self {
        let below = |root: &str| path.strip_prefix(root).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'));
        let reads = matches!(method, "GET" | "HEAD") || path == "/fleet/pairing/explain";
        if below("/fleet/tokens") || path == "/fleet/backup" {
            Self::Admin
        } else if reads {
            Self::Viewer
        } else if below("/workers") || below("/fleet/workers") || path == "/flush_cache" {
            Self::Operator
        } else {
            Self::Admin
        }
    }
}

/// A token of the admin API as the fleet keeps it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AdminToken {
    /// Identity, for revocation.
    pub id: Uuid,
    /// What people call it; unique, and the author's name of what it changes.
    pub name: String,
    /// What its holder may do.
    pub role: Role,
    /// The digest of the secret.
    pub hash: TokenHash,
    /// Who created it: the API, or start-up flags.
    pub origin: Origin,
    /// When, by the clock of the node that created it.
    pub created_at_unix_ms: u64,
    /// The revision of its creation or last change.
    pub mod_revision: Revision,
}

/// A token that start-up flags name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StartupToken {
    /// What people call it.
    pub name: String,
    /// What its holder may do.
    pub role: Role,
    /// The digest of its secret.
    pub hash: TokenHash,
}

/// The name of a token is not usable.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("a token's name must be 1 to {MAX_NAME_BYTES} bytes without control characters")]
pub struct NameError;

/// Checks the name of a token.
///
/// # Errors
/// When it is empty, too long, or has control characters.
pub fn check_name(name: &str) -> Result<(), NameError> {
    let sound = !name.is_empty() && name.len() <= MAX_NAME_BYTES && !name.chars().any(char::is_control);
    if sound { Ok(()) } else { Err(NameError) }
}

/// Why a request was refused before it was looked at.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum Denied {
    /// No secret was presented.
    #[error("authentication is required: send `Authorization: Bearer <token>`")]
    Missing,
    /// The secret presented is not known.
    #[error("the token is not valid")]
    Unknown,
    /// No secret was presented, and the certificate of the connection is no admin's: whose it is.
    #[error(
        "the certificate presented is {0}: this needs one with the role admin (`smg cluster ca issue --role admin`), or a \
         token (`Authorization: Bearer <token>`)"
    )]
    Certificate(&'static str),
    /// The token's role does not reach.
    #[error("the token's role is {}, this needs {}", .have.as_str(), .need.as_str())]
    Role {
        /// The role of the token.
        have: Role,
        /// The role needed.
        need: Role,
    },
}

/// The secret in the value of an `Authorization` header, if it is a bearer one.
pub fn bearer(authorization: &str) -> Option<&str> {
    let (scheme, secret) = authorization.split_once(' ')?;
    let secret = secret.trim();
    (scheme.eq_ignore_ascii_case("bearer") && !secret.is_empty()).then_some(secret)
}

/// The entry whose digest is that of `secret`. Every entry is compared.
pub fn find<'a, T>(
    secret: &str,
    entries: impl Iterator<Item = &'a T>,
    hash: impl Fn(&T) -> &TokenHash,
) -> Option<&'a T> {
    let presented = TokenHash::of(secret);
    entries.fold(None, |found, entry| if hash(entry).matches(&presented) { Some(entry) } else { found })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_secret_matches_itself_alone_and_is_never_printed() {
        let hash = TokenHash::of("s3cret");
        assert!(hash.matches(&TokenHash::of("s3cret")));
        assert!(!hash.matches(&TokenHash::of("s3crets")) && !hash.matches(&TokenHash::of("")));
        assert_eq!(TokenHash::from_bytes(hash.as_bytes()), Some(hash));
        assert_eq!(TokenHash::from_bytes(&[0; 31]), None);
        assert!(!format!("{:?} {hash:?}", Secret::from("s3cret")).contains("s3cret"));
        let known = [TokenHash::of("a"), TokenHash::of("b")];
        assert_eq!(find("b", known.iter(), |hash| hash), Some(&known[1]));
        assert_eq!(find("c", known.iter(), |hash| hash), None);
    }

    #[test]
    fn only_bearer_credentials_count_in_any_case() {
        for (header, secret) in [
            ("Bearer k", Some("k")),
            ("bearer  k ", Some("k")),
            ("BEARER k", Some("k")),
            ("Bearer ", None),
            ("Bearer", None),
            ("Basic k", None),
            ("k", None),
        ] {
            assert_eq!(bearer(header), secret, "{header}");
        }
    }

    #[test]
    fn viewers_read_operators_change_workers_and_admins_the_rest() {
        for (method, path, role) in [
            ("GET", "/workers", Role::Viewer),
            ("HEAD", "/fleet/gateways", Role::Viewer),
            ("GET", "/fleet/decisions", Role::Viewer),
            ("POST", "/fleet/pairing/explain", Role::Viewer),
            ("POST", "/workers", Role::Operator),
            ("DELETE", "/workers/1", Role::Operator),
            ("POST", "/flush_cache", Role::Operator),
            ("PUT", "/fleet/policies/default", Role::Admin),
            ("PUT", "/fleet/settings", Role::Admin),
            ("GET", "/fleet/tokens", Role::Admin),
            ("GET", "/fleet/tokens/1", Role::Admin),
            ("PUT", "/fleet/workers/1/intent", Role::Operator),
            ("GET", "/fleet/backup", Role::Admin),
            ("GET", "/fleet/audit", Role::Viewer),
            ("POST", "/workersx", Role::Admin),
            ("POST", "/anything/new", Role::Admin),
        ] {
            assert_eq!(Role::required(method, path), role, "{method} {path}");
        }
        assert!(Role::Viewer < Role::Operator && Role::Operator < Role::Admin);
        for role in Role::ALL {
            assert_eq!(Role::from_name(role.as_str()), Some(*role));
        }
        assert_eq!((Role::from_name("user"), Role::from_name("root")), (Some(Role::Viewer), None));
    }
}
