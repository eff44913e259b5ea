//! What handlers read from a request: a bounded JSON body, conditions, identity, consistency.

use std::str::FromStr;
use std::time::Duration;

use axum::body::Body;
use axum::extract::{FromRequestParts, Path};
use axum::http::request::Parts;
use axum::http::{HeaderMap, Uri, header};
use bytes::Bytes;
use http_body_util::{BodyExt, LengthLimitError, Limited};
use serde::de::DeserializeOwned;
use smg_fleet::{Revision, WorkerId};
use smg_state::CommandId;
use uuid::Uuid;

use super::access::Identity;
use super::error::ApiError;
use super::service::{Call, Consistency};

/// How long a client may take to send a body.
const BODY_DEADLINE: Duration = Duration::from_secs(30);

/// The one parameter of a path, decoded.
pub(super) struct PathParameter(pub String);

impl<S: Send + Sync> FromRequestParts<S> for PathParameter {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ApiError> {
        match Path::from_request_parts(parts, state).await {
            Ok(Path(text)) => Ok(Self(text)),
            Err(rejection) => Err(ApiError::BadRequest(rejection.body_text())),
        }
    }
}

/// The consistency that the query asks for.
pub(super) fn consistency(uri: &Uri) -> Result<Consistency, ApiError> {
    match query(uri, "consistency")?.as_deref() {
        None | Some("linearizable") => Ok(Consistency::Linearizable),
        Some("stale") => Ok(Consistency::Stale),
        Some(other) => Err(ApiError::BadRequest(format!("consistency must be linearizable or stale, not '{other}'"))),
    }
}

/// A query parameter that is true or false; absent = false.
pub(super) fn flag(uri: &Uri, name: &str) -> Result<bool, ApiError> {
    match query(uri, name)?.as_deref() {
        None | Some("false" | "0") => Ok(false),
        Some("true" | "1" | "") => Ok(true),
        Some(other) => Err(ApiError::BadRequest(format!("{name} must be true or false, not '{}'", clip(other)))),
    }
}

/// A query parameter that is read from text.
pub(super) fn parsed<T: FromStr>(uri: &Uri, name: &str) -> Result<Option<T>, ApiError> {
    let Some(text) = query(uri, name)? else { return Ok(None) };
    let unreadable = |_| ApiError::BadRequest(format!("'{}' is no value of {name}", clip(&text)));
    text.parse().map(Some).map_err(unreadable)
}

/// One query parameter, decoded; the first one of that name.
pub(super) fn query(uri: &Uri, name: &str) -> Result<Option<String>, ApiError> {
    Ok(parameters(uri)?.into_iter().find(|(key, _)| key == name).map(|(_, value)| value))
}

/// All query parameters, decoded.
pub(super) fn parameters(uri: &Uri) -> Result<Vec<(String, String)>, ApiError> {
    let pairs = axum::extract::Query::<Vec<(String, String)>>::try_from_uri(uri);
    Ok(pairs.map_err(|error| ApiError::BadRequest(error.body_text()))?.0)
}

/// A worker id of a path.
pub(super) fn worker_id(text: &str) -> Result<WorkerId, ApiError> {
    WorkerId::from_str(text).map_err(|_| ApiError::BadRequest(format!("'{}' is not a worker id: a UUID", clip(text))))
}

/// A body of at most `limit` bytes.
pub(super) async fn body(parts: &Parts, body: Body, limit: usize) -> Result<Bytes, ApiError> {
    let announced = parts.headers.get(header::CONTENT_LENGTH).and_then(|value| value.to_str().ok());
    if announced.and_then(|value| value.parse::<u64>().ok()).is_some_and(|length| length > limit as u64) {
        return Err(ApiError::TooLarge(limit));
    }
    match tokio::time::timeout(BODY_DEADLINE, Limited::new(body, limit).collect()).await {
        Ok(Ok(collected)) => Ok(collected.to_bytes()),
        Ok(Err(error)) if error.is::<LengthLimitError>() => Err(ApiError::TooLarge(limit)),
        Ok(Err(error)) => Err(ApiError::BadRequest(format!("the body could not be read: {error}"))),
        Err(_) => Err(ApiError::BadRequest("the body did not arrive in time".to_owned())),
    }
}

/// A JSON body: an object. Derived readers would also take a list, its entries as the fields in order.
pub(super) fn json<T: DeserializeOwned>(parts: &Parts, bytes: &[u8]) -> Result<T, ApiError> {
    let declared = parts.headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default();
    let essence = declared.split(';').next().unwrap_or_default().trim().to_ascii_lowercase();
    let is_json = essence == "application/json" || (essence.starts_with("application/") && essence.ends_with("+json"));
    if !is_json {
        return Err(ApiError::BadRequest("the content type must be application/json".to_owned()));
    }
    let read = serde_json::from_slice(bytes);
    let read = read.map_err(|error| ApiError::BadRequest(format!("invalid JSON body: {error}")))?;
    if !bytes.trim_ascii_start().starts_with(b"{") {
        return Err(ApiError::BadRequest("the body must be a JSON object".to_owned()));
    }
    Ok(read)
}

/// Who asks for a change, and how.
pub(super) fn call(parts: &Parts, body: &[u8]) -> Result<Call, ApiError> {
    Ok(Call {
        actor: parts.extensions.get::<Identity>().map_or_else(|| "admin-api".to_owned(), Identity::actor),
        command_id: command_id(parts, body)?,
        expected_revision: if_match(&parts.headers)?,
        dry_run: flag(&parts.uri, "dry_run")?,
    })
}

/// The revision in `If-Match`, quoted or bare.
fn if_match(headers: &HeaderMap) -> Result<Option<Revision>, ApiError> {
    let Some(value) = headers.get(header::IF_MATCH) else { return Ok(None) };
    let text = value.to_str().unwrap_or_default().trim();
    let number = text.strip_prefix('"').and_then(|rest| rest.strip_suffix('"')).unwrap_or(text);
    let revision = number.parse().map_err(|_| ApiError::BadRequest("If-Match must be one mod_revision".to_owned()))?;
    Ok(Some(revision))
}

/// The command id of a request with an `Idempotency-Key`.
///
/// It is the key, with a checksum of the request mixed in: a key that a client reuses by mistake for another request is another command,
/// so that no write is ever acknowledged with the answer to a different one.
fn command_id(parts: &Parts, body: &[u8]) -> Result<Option<CommandId>, ApiError> {
    let Some(key) = parts.headers.get("idempotency-key") else { return Ok(None) };
    let text = key.to_str().unwrap_or_default().trim();
    let text = text.strip_prefix('"').and_then(|rest| rest.strip_suffix('"')).unwrap_or(text);
    let key = Uuid::parse_str(text).map_err(|_| ApiError::BadRequest("Idempotency-Key must be a UUID".to_owned()))?;
    let mut request = format!("{} {}\n", parts.method, parts.uri.path()).into_bytes();
    request.extend_from_slice(parts.headers.get(header::IF_MATCH).map_or(&[][..], |value| value.as_bytes()));
    request.push(b'\n');
    request.extend_from_slice(body);
    let checksum = u128::from(smg_fleet::wire::checksum(&request));
    Ok(Some(Uuid::from_u128(key.as_u128() ^ checksum)))
}

/// The beginning of something a client sent, for a message.
fn clip(text: &str) -> String {
    text.chars().take(64).collect()
}
