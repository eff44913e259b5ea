//! `/fleet/tokens`: who may call the admin API.
//!
//! A secret is in the answer to its creation and nowhere else.

use axum::Json;
use axum::body::Body;
use axum::extract::State;
use axum::http::request::Parts;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::Deserialize;
use serde_json::{Value, json};
use smg_fleet::{AdminToken, Role, StartupToken, TokenHash, access};
use smg_state::Command;
use uuid::Uuid;

use super::access::Identity;
use super::error::ApiError;
use super::intake::PathParameter;
use super::{Admin, at_revision, intake, tagged};

/// The body of `POST /fleet/tokens`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct NewToken {
    name: String,
    role: Role,
}

/// A token without its secret.
fn shown(token: &AdminToken) -> Value {
    json!({
        "id": token.id,
        "name": token.name,
        "role": token.role.as_str(),
        "origin": token.origin.as_str(),
        "created_at": token.created_at_unix_ms / 1000,
        "mod_revision": token.mod_revision,
    })
}

/// A secret nobody can guess: 256 random bits.
fn mint() -> String {
    let random: [u8; 32] = rand::random();
    random.iter().fold("smg_".to_owned(), |text, byte| text + &format!("{byte:02x}"))
}

pub(super) async fn list(State(admin): State<Admin>, parts: Parts) -> Result<Response, ApiError> {
    let state = admin.read(intake::consistency(&parts.uri)?).await?;
    let tokens: Vec<Value> = state.tokens().map(|token| shown(token)).collect();
    Ok(at_revision(state.revision(), Json(json!({"total": tokens.len(), "tokens": tokens}))))
}

pub(super) async fn show(
    State(admin): State<Admin>,
    PathParameter(id): PathParameter,
    parts: Parts,
) -> Result<Response, ApiError> {
    let id = token_id(&id)?;
    let state = admin.read(intake::consistency(&parts.uri)?).await?;
    let token = state.token(id).ok_or_else(|| ApiError::TokenNotFound(id.to_string()))?;
    Ok(tagged(token.mod_revision, at_revision(state.revision(), Json(shown(token)))))
}

pub(super) async fn create(State(admin): State<Admin>, parts: Parts, body: Body) -> Result<Response, ApiError> {
    let bytes = intake::body(&parts, body, admin.max_body_bytes).await?;
    let NewToken { name, role } = intake::json(&parts, &bytes)?;
    access::check_name(&name).map_err(|error| ApiError::BadRequest(error.to_string()))?;
    let (id, secret) = (Uuid::now_v7(), mint());
    let token = StartupToken { name, role, hash: TokenHash::of(&secret) };
    let write = intake::write(&parts, &bytes, Command::CreateToken { id, token })?;
    let outcome = admin.writer.write(write).await?;
    let state = admin.writer.store().local();
    // A repeated Idempotency-Key is answered with the first outcome: the token exists, and its secret was shown then.
    let Some(token) = state.token(id) else {
        let message = "the token was created by an earlier request with this Idempotency-Key, which showed its secret";
        return Err(ApiError::BadRequest(message.to_owned()));
    };
    let mut created = shown(token);
    created["token"] = json!(secret);
    let answer = (StatusCode::CREATED, [(header::LOCATION, format!("/fleet/tokens/{id}"))], Json(created));
    Ok(tagged(token.mod_revision, at_revision(outcome.revision, answer)))
}

pub(super) async fn revoke(
    State(admin): State<Admin>,
    PathParameter(id): PathParameter,
    parts: Parts,
) -> Result<Response, ApiError> {
    let id = token_id(&id)?;
    let outcome = admin.writer.write(intake::write(&parts, &[], Command::RevokeToken { id })?).await?;
    Ok(at_revision(outcome.revision, Json(json!({"status": "revoked", "id": id}))))
}

/// `GET /fleet/whoami`: as whom the caller is known.
pub(super) async fn whoami(State(admin): State<Admin>, parts: Parts) -> Response {
    let identity = parts.extensions.get::<Identity>();
    let name = identity.and_then(Identity::name);
    let role = identity.map(|identity| identity.role.as_str());
    at_revision(admin.writer.store().local().revision(), Json(json!({"name": name, "role": role})).into_response())
}

fn token_id(text: &str) -> Result<Uuid, ApiError> {
    Uuid::parse_str(text).map_err(|_| ApiError::BadRequest("a token id is a UUID".to_owned()))
}
