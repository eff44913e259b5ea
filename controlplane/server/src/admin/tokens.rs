//! `/fleet/tokens`: who may call the admin API.
//!
//! A secret is in the answer to its creation and nowhere else.

use axum::Json;
use axum::body::Body;
use axum::extract::State;
use axum::http::request::Parts;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::{Value, json};
use smg_fleet::{AdminToken, Role};
use uuid::Uuid;

use super::access::Identity;
use super::error::ApiError;
use super::intake::PathParameter;
use super::service::watch::Followed;
use super::{Admin, at_revision, changed, intake, tagged, watches};

/// The body of `POST /fleet/tokens`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct NewToken {
    name: String,
    role: Role,
}

/// A token without its secret.
pub(super) fn shown(token: &AdminToken) -> Value {
    json!({
        "id": token.id,
        "name": token.name,
        "role": token.role.as_str(),
        "origin": token.origin.as_str(),
        "created_at": token.created_at_unix_ms / 1000,
        "mod_revision": token.mod_revision,
    })
}

pub(super) async fn list(State(admin): State<Admin>, parts: Parts) -> Result<Response, ApiError> {
    if watches::is_asked(&parts.uri)? {
        return watches::answer(&admin, &parts.uri, Followed::Tokens).await;
    }
    let state = admin.service.read(intake::consistency(&parts.uri)?).await?;
    let tokens: Vec<Value> = state.tokens().map(|token| shown(token)).collect();
    Ok(at_revision(state.revision(), Json(json!({"total": tokens.len(), "tokens": tokens}))))
}

pub(super) async fn show(
    State(admin): State<Admin>,
    PathParameter(id): PathParameter,
    parts: Parts,
) -> Result<Response, ApiError> {
    let (state, token) = admin.service.token(intake::consistency(&parts.uri)?, token_id(&id)?).await?;
    Ok(tagged(token.mod_revision, at_revision(state.revision(), Json(shown(&token)))))
}

pub(super) async fn create(State(admin): State<Admin>, parts: Parts, body: Body) -> Result<Response, ApiError> {
    let bytes = intake::body(&parts, body, admin.max_body_bytes).await?;
    let NewToken { name, role } = intake::json(&parts, &bytes)?;
    let new = admin.service.create_token(intake::call(&parts, &bytes)?, name, role).await?;
    let token = &new.token;
    let made = || {
        let mut created = shown(token);
        created["token"] = json!(new.secret);
        let location = [(header::LOCATION, format!("/fleet/tokens/{}", token.id))];
        tagged(token.mod_revision, (StatusCode::CREATED, location, Json(created)).into_response())
    };
    Ok(changed(&new.change, || shown(token), made))
}

pub(super) async fn revoke(
    State(admin): State<Admin>,
    PathParameter(id): PathParameter,
    parts: Parts,
) -> Result<Response, ApiError> {
    let id = token_id(&id)?;
    let change = admin.service.revoke_token(intake::call(&parts, &[])?, id).await?;
    Ok(changed(&change, || Value::Null, || Json(json!({"status": "revoked", "id": id})).into_response()))
}

/// `GET /fleet/whoami`: as whom the caller is known.
pub(super) async fn whoami(State(admin): State<Admin>, parts: Parts) -> Response {
    let identity = parts.extensions.get::<Identity>();
    let name = identity.and_then(Identity::name);
    let role = identity.map(|identity| identity.role.as_str());
    at_revision(admin.service.local().revision(), Json(json!({"name": name, "role": role})))
}

fn token_id(text: &str) -> Result<Uuid, ApiError> {
    Uuid::parse_str(text).map_err(|_| ApiError::BadRequest("a token id is a UUID".to_owned()))
}
