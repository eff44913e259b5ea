//! Who may call what on the API port.
//!
//! | routes | who |
//! |---|---|
//! | probes, `/health_generate`, `/engine_metrics`, `/v1/models`, `/get_*_info` | everybody |
//! | inference | holders of the gateway's key or of a tenant's; everybody when there are no keys |
//! | `/workers`, `/fleet`, `/flush_cache` | holders of an admin token whose role reaches; without any token in the fleet: holders of the gateway's key, nobody when only tenants have keys, everybody when there are no keys and the control plane is reached without TLS |
//!
//! What is forwarded to the control plane is judged there: the caller's `Authorization` travels along, and this gateway vouches for nobody.
//! Its certificate opens the subscription and nothing that a client asks for.
//! What this gateway answers itself it judges by the digests in its snapshot, so it needs nobody for that either.
//!
//! Invariant: a key that opened this gateway goes no further. It is taken off the request, so that no engine ever sees it.

use axum::body::Body;
use axum::extract::{Request, State};
use axum::middleware::Next;
use http::{HeaderMap, HeaderName, HeaderValue, Response, StatusCode, header};
use smg_fleet::access::{self, Denied};
use smg_fleet::{Role, TokenHash};

use super::Front;
use super::error::{Outcome, admin_error, envelope};
use crate::core::Core;
use crate::dispatch::explain::DECISION;

/// Where clients of Anthropic's API put their key.
const X_API_KEY: HeaderName = HeaderName::from_static("x-api-key");

/// The keys of the client edge, as digests.
#[derive(Debug, Clone, Default)]
pub struct Keys {
    /// The gateway's own key.
    pub gateway: Option<TokenHash>,
    /// The keys of tenants.
    pub tenants: Vec<TokenHash>,
}

impl Keys {
    /// Whether nobody needs a key.
    pub fn is_empty(&self) -> bool {
        self.gateway.is_none() && self.tenants.is_empty()
    }

    fn open_with(&self, secret: &str) -> bool {
        access::find(secret, self.gateway.iter().chain(&self.tenants), |key| key).is_some()
    }
}

fn bearer(headers: &HeaderMap) -> Option<&str> {
    headers.get(header::AUTHORIZATION).and_then(|value| value.to_str().ok()).and_then(access::bearer)
}

/// Lets an inference request in that carries a key, and takes the key off it.
pub(super) fn admit(keys: &Keys, headers: &mut HeaderMap) -> Result<(), Denied> {
    if keys.is_empty() {
        return Ok(());
    }
    let sent = bearer(headers);
    let other = headers.get(&X_API_KEY).and_then(|value| value.to_str().ok());
    if sent.is_some_and(|secret| keys.open_with(secret)) {
        headers.remove(header::AUTHORIZATION);
    } else if !other.is_some_and(|secret| keys.open_with(secret)) {
        return Err(if sent.or(other).is_some() { Denied::Unknown } else { Denied::Missing });
    }
    Ok(())
}

/// The refusal of an inference request, in the words of the documented system.
pub(super) fn refuse_inference(denied: Denied) -> Response<Body> {
    let (message, challenge) = match denied {
        Denied::Missing | Denied::Certificate(_) => {
            ("An API key is required: send `Authorization: Bearer <key>`", "Bearer realm=\"data-plane\"")
        }
        Denied::Unknown | Denied::Role { .. } => {
            ("Incorrect API key provided", "Bearer realm=\"data-plane\", error=\"invalid_token\"")
        }
    };
    let mut response = envelope(StatusCode::UNAUTHORIZED, "invalid_api_key", message);
    response.headers_mut().insert(header::WWW_AUTHENTICATE, HeaderValue::from_static(challenge));
    response
}

/// Judges an admin request that this gateway answers itself.
pub(super) fn judge(front: &Front, method: &http::Method, path: &str, headers: &HeaderMap) -> Result<(), Denied> {
    judge_secret(&front.core, bearer(headers), Role::required(method.as_str(), path))
}

/// Whether an inference request gets the decision on it as a header: its [`DECISION`] header carries what `Authorization` would have to
/// carry for `GET /fleet/decisions`, because its own `Authorization` is that of the data plane. Where everybody may read decisions, any
/// value asks but those that say no.
pub(super) fn may_see_its_decision(core: &Core, headers: &HeaderMap) -> bool {
    let Some(Ok(asked)) = headers.get(DECISION).map(HeaderValue::to_str) else { return false };
    if matches!(asked, "" | "0" | "false") {
        return false;
    }
    judge_secret(core, access::bearer(asked), Role::Viewer).is_ok()
}

fn judge_secret(core: &Core, secret: Option<&str>, need: Role) -> Result<(), Denied> {
    let table = core.table.load();
    let tokens = &table.snapshot.tokens;
    if tokens.is_empty() {
        return judge_by_key(core, secret);
    }
    let token = access::find(secret.ok_or(Denied::Missing)?, tokens.values(), |token| &token.hash);
    let have = token.ok_or(Denied::Unknown)?.role;
    if have >= need { Ok(()) } else { Err(Denied::Role { have, need }) }
}

/// Judges an admin request before it is forwarded: with tokens in the fleet, or a control plane that wants to know who asks, that is the
/// control plane's business.
pub(super) fn judge_forwarded(front: &Front, headers: &HeaderMap) -> Result<(), Denied> {
    let open = !front.core.options.guarded && front.core.table.load().snapshot.tokens.is_empty();
    if open { judge_by_key(&front.core, bearer(headers)) } else { Ok(()) }
}

fn judge_by_key(core: &Core, secret: Option<&str>) -> Result<(), Denied> {
    let keys = &core.options.keys;
    if keys.is_empty() && !core.options.guarded {
        return Ok(());
    }
    let secret = secret.ok_or(Denied::Missing)?;
    access::find(secret, keys.gateway.iter(), |key| key).map(drop).ok_or(Denied::Unknown)
}

/// Guards admin routes that this gateway answers itself.
pub(super) async fn administration(State(front): State<Front>, request: Request, next: Next) -> Response<Body> {
    let (method, path) = (request.method(), request.uri().path());
    match judge(&front, method, path, request.headers()) {
        Ok(()) => next.run(request).await,
        Err(denied) => refuse_administration(denied, Outcome::of_refused(method, path)),
    }
}

/// The refusal of an admin request, as the control plane words it.
pub(super) fn refuse_administration(denied: Denied, outcome: Option<Outcome>) -> Response<Body> {
    let (status, code, challenge) = match denied {
        Denied::Missing | Denied::Certificate(_) => {
            (StatusCode::UNAUTHORIZED, "UNAUTHORIZED", Some("Bearer realm=\"control-plane\""))
        }
        Denied::Unknown => {
            (StatusCode::UNAUTHORIZED, "UNAUTHORIZED", Some("Bearer realm=\"control-plane\", error=\"invalid_token\""))
        }
        Denied::Role { .. } => (StatusCode::FORBIDDEN, "FORBIDDEN", None),
    };
    let mut response = admin_error(status, code, &denied.to_string(), outcome);
    if let Some(challenge) = challenge {
        response.headers_mut().insert(header::WWW_AUTHENTICATE, HeaderValue::from_static(challenge));
    }
    response
}
