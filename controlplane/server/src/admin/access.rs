//! Who may call the admin API.
//!
//! Secrets are judged here, whichever way a call came: a gateway forwards the caller's own `Authorization`, it vouches for nobody.
//!
//! * Any token, stored or named by this process's flags: one whose role reaches is needed.
//! * No token, but a key of the client edge: that key is needed. It counts as an admin's, as in the documented system.
//! * Neither: the API is open.
//!
//! Tokens of this process's flags count from the first request on, before they are stored.

use axum::extract::{Request, State};
use axum::http::{HeaderValue, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use smg_fleet::access::{self, Denied};
use smg_fleet::{Role, StartupToken, TokenHash};

use super::Admin;
use super::error::ApiError;

/// What a process knows about who may call its admin API, besides what is stored.
#[derive(Debug, Clone, Default)]
pub struct AccessOptions {
    /// Tokens that its flags name.
    pub startup_tokens: Vec<StartupToken>,
    /// The key of the client edge in the same process: without tokens it guards the admin API too.
    pub shared_key: Option<TokenHash>,
    /// Whether changes by identified callers are logged.
    pub audit: bool,
}

/// Who makes a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Identity {
    /// The token's name; none = nobody has to say who they are.
    pub name: Option<String>,
    /// What they may do.
    pub role: Role,
}

impl Identity {
    /// The author of what they change.
    pub(super) fn actor(&self) -> String {
        self.name.as_ref().map_or_else(|| "admin-api".to_owned(), |name| format!("token:{name}"))
    }
}

/// Judges the secret of a request.
fn identify(admin: &Admin, secret: Option<&str>) -> Result<Identity, Denied> {
    let state = admin.writer.store().local();
    let AccessOptions { startup_tokens, shared_key, .. } = &*admin.access;
    let stored = state.tokens().map(|token| (&token.name, token.role, &token.hash));
    let named = startup_tokens.iter().map(|token| (&token.name, token.role, &token.hash));
    let tokens: Vec<_> = stored.chain(named).collect();
    if !tokens.is_empty() {
        let secret = secret.ok_or(Denied::Missing)?;
        let (name, role, _) = access::find(secret, tokens.iter(), |(_, _, hash)| *hash).ok_or(Denied::Unknown)?;
        return Ok(Identity { name: Some((*name).clone()), role: *role });
    }
    if let Some(key) = shared_key {
        let secret = secret.ok_or(Denied::Missing)?;
        access::find(secret, std::iter::once(key), |key| key).ok_or(Denied::Unknown)?;
    }
    Ok(Identity { name: None, role: Role::Admin })
}

/// Refuses whoever may not make a request, and says to handlers who may.
pub(super) async fn authenticate(State(admin): State<Admin>, mut request: Request, next: Next) -> Response {
    let authorization = request.headers().get(header::AUTHORIZATION).and_then(|value| value.to_str().ok());
    let judged = identify(&admin, authorization.and_then(access::bearer)).and_then(|identity| {
        let (have, need) = (identity.role, Role::required(request.method().as_str(), request.uri().path()));
        if have >= need { Ok(identity) } else { Err(Denied::Role { have, need }) }
    });
    let identity = match judged {
        Ok(identity) => identity,
        Err(denied) => {
            let (method, path) = (request.method(), request.uri().path());
            tracing::warn!(target: "smg::audit", %method, path, reason = %denied, "an admin request was refused");
            return ApiError::Denied(denied).into_response();
        }
    };
    let audited = admin.access.audit && identity.name.is_some() && !request.method().is_safe();
    let record = audited.then(|| (identity.actor(), request.method().clone(), request.uri().path().to_owned()));
    request.extensions_mut().insert(identity);
    let response = next.run(request).await;
    if let Some((actor, method, path)) = record {
        tracing::info!(target: "smg::audit", actor, %method, path, status = response.status().as_u16(), "admin request");
    }
    response
}

/// The challenge of a 401 (RFC 6750 section 3).
pub(super) fn challenge(denied: Denied) -> HeaderValue {
    HeaderValue::from_static(match denied {
        Denied::Missing => "Bearer realm=\"control-plane\"",
        Denied::Unknown | Denied::Role { .. } => "Bearer realm=\"control-plane\", error=\"invalid_token\"",
    })
}
