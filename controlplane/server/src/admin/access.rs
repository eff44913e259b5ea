//! Who may call the admin API.
//!
//! Secrets are judged here, whichever way a call came: a gateway forwards the caller's own `Authorization`, it vouches for nobody. Its
//! certificate, and that of another member, give no rights here: what a client may do depends on what the client itself can show.
//!
//! * A secret that is sent is what counts: with any token, stored or named by this process's flags, one whose role reaches is needed.
//! * None is sent, but the connection has an admin's certificate: that is enough.
//! * No token, but a key of the client edge: that key is needed. It counts as an admin's, as in the documented system.
//! * None of them: the API is open, unless the call came over TLS between parts.
//!
//! Tokens of this process's flags count from the first request on, before they are stored.

use axum::extract::{Request, State};
use axum::http::{HeaderValue, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use smg_fleet::access::{self, Denied};
use smg_fleet::{Role, StartupToken, TokenHash};
use smg_net::mutual::identity::{Caller, Part};

use super::Admin;
use super::error::ApiError;
use super::service::Service;

/// What a process knows about who may call its admin API, besides what is stored.
#[derive(Debug, Clone, Default)]
pub struct AccessOptions {
    /// Tokens that its flags name.
    pub startup_tokens: Vec<StartupToken>,
    /// The key of the client edge in the same process: without tokens it guards the admin API too.
    pub shared_key: Option<TokenHash>,
    /// Whether changes are logged.
    pub audit: bool,
    /// The passphrase that seals the keys of engines in backups; none = they are left out.
    pub backup_key: Option<smg_fleet::Secret>,
}

/// Who makes a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Identity {
    /// How they are known.
    pub by: Proof,
    /// What they may do.
    pub role: Role,
}

/// How somebody is known.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Proof {
    /// Nobody has to say who they are.
    None,
    /// By the token of this name.
    Token(String),
    /// By the certificate of this name.
    Certificate(String),
}

impl Identity {
    /// The author of what they change.
    pub(super) fn actor(&self) -> String {
        match &self.by {
            Proof::None => "admin-api".to_owned(),
            Proof::Token(name) => format!("token:{name}"),
            Proof::Certificate(name) => format!("certificate:{name}"),
        }
    }

    /// This identity, if it may do what needs a role.
    pub(super) fn at_least(self, need: Role) -> Result<Self, Denied> {
        if self.role >= need { Ok(self) } else { Err(Denied::Role { have: self.role, need }) }
    }

    /// The name of the token or certificate.
    pub(super) fn name(&self) -> Option<&str> {
        match &self.by {
            Proof::None => None,
            Proof::Token(name) | Proof::Certificate(name) => Some(name),
        }
    }
}

/// Judges the secret of a request and, if it came over TLS between parts, its caller.
pub(super) fn identify(service: &Service, secret: Option<&str>, caller: Option<&Caller>) -> Result<Identity, Denied> {
    if secret.is_none()
        && let Some(Ok(operator)) = caller.map(|caller| caller.must_be(Part::Admin))
    {
        return Ok(Identity { by: Proof::Certificate(operator.name.clone()), role: Role::Admin });
    }
    let state = service.local();
    let AccessOptions { startup_tokens, shared_key, .. } = &*service.access;
    let stored = state.tokens().map(|token| (&token.name, token.role, &token.hash));
    let named = startup_tokens.iter().map(|token| (&token.name, token.role, &token.hash));
    let tokens: Vec<_> = stored.chain(named).collect();
    if !tokens.is_empty() {
        let secret = secret.ok_or_else(|| unproven(caller))?;
        let (name, role, _) = access::find(secret, tokens.iter(), |(_, _, hash)| *hash).ok_or(Denied::Unknown)?;
        return Ok(Identity { by: Proof::Token((*name).clone()), role: *role });
    }
    if caller.is_some() {
        return Err(if secret.is_some() { Denied::Unknown } else { unproven(caller) });
    }
    if let Some(key) = shared_key {
        let secret = secret.ok_or(Denied::Missing)?;
        access::find(secret, std::iter::once(key), |key| key).ok_or(Denied::Unknown)?;
    }
    Ok(Identity { by: Proof::None, role: Role::Admin })
}

/// Why a caller without a secret is nobody here.
fn unproven(caller: Option<&Caller>) -> Denied {
    match caller {
        None | Some(Caller::Anonymous) => Denied::Missing,
        Some(Caller::Stranger(_)) => Denied::Certificate("of no part of this cluster"),
        Some(Caller::Part(identity)) => Denied::Certificate(match identity.part {
            Part::Gateway => "that of a gateway",
            Part::ControlPlane => "that of a member of the control plane",
            Part::Admin => "that of an admin",
        }),
    }
}

/// Refuses whoever may not make a request, and says to handlers who may.
pub(super) async fn authenticate(State(admin): State<Admin>, mut request: Request, next: Next) -> Response {
    let authorization = request.headers().get(header::AUTHORIZATION).and_then(|value| value.to_str().ok());
    let secret = authorization.and_then(access::bearer);
    let judged = identify(&admin.service, secret, request.extensions().get::<Caller>())
        .and_then(|identity| identity.at_least(Role::required(request.method().as_str(), request.uri().path())));
    let identity = match judged {
        Ok(identity) => identity,
        Err(denied) => {
            let (method, path) = (request.method(), request.uri().path());
            tracing::warn!(target: "smg::audit", %method, path, reason = %denied, "an admin request was refused");
            return ApiError::Denied(denied).into_response();
        }
    };
    let audited = admin.service.access.audit && identity.by != Proof::None && !request.method().is_safe();
    let record = audited.then(|| (identity.actor(), request.method().clone(), request.uri().path().to_owned()));
    request.extensions_mut().insert(identity);
    let response = next.run(request).await;
    if let Some((actor, method, path)) = record {
        tracing::info!(target: "smg::audit", actor, %method, path, status = response.status().as_u16(), "admin request");
    }
    response
}

/// Refuses whoever comes over TLS between parts without a certificate of one.
pub(super) async fn parts_only(request: Request, next: Next) -> Response {
    match request.extensions().get::<Caller>() {
        None | Some(Caller::Part(_)) => next.run(request).await,
        Some(Caller::Anonymous | Caller::Stranger(_)) => ApiError::Denied(Denied::Missing).into_response(),
    }
}

/// The challenge of a 401 (RFC 6750 section 3).
pub(super) fn challenge(denied: Denied) -> Option<HeaderValue> {
    match denied {
        Denied::Missing | Denied::Certificate(_) => Some(HeaderValue::from_static("Bearer realm=\"control-plane\"")),
        Denied::Unknown => Some(HeaderValue::from_static("Bearer realm=\"control-plane\", error=\"invalid_token\"")),
        Denied::Role { .. } => None,
    }
}
