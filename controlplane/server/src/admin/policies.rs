//! `/fleet/policies`: the policy documents, one for the fleet (`default`) and one for each model that differs.

use axum::Json;
use axum::body::Body;
use axum::extract::State;
use axum::http::StatusCode;
use axum::http::request::Parts;
use axum::response::Response;
use serde_json::{Value, json};
use smg_fleet::{PolicyDocument, PolicyRecord};
use smg_state::Command;

use super::error::ApiError;
use super::intake::PathParameter;
use super::{Admin, at_revision, intake, tagged};

/// The path of the fleet's own document.
const DEFAULT: &str = "default";

/// `default` in a path is the fleet's own document, whose stored name is empty.
fn model_of(path: &str) -> String {
    if path == DEFAULT { String::new() } else { path.to_owned() }
}

fn view(record: &PolicyRecord) -> Value {
    let model = if record.model.is_empty() { DEFAULT } else { &record.model };
    json!({
        "model": model,
        "document": record.document,
        "source": record.source,
        "mod_revision": record.mod_revision,
    })
}

pub(super) async fn list(State(admin): State<Admin>, parts: Parts) -> Result<Response, ApiError> {
    let state = admin.read(intake::consistency(&parts.uri)?).await?;
    let policies: Vec<Value> = state.policies().map(|record| view(record)).collect();
    Ok(at_revision(state.revision(), Json(json!({"total": policies.len(), "policies": policies}))))
}

/// A fleet without a default document has an empty one at revision 0, so that `If-Match: "0"` means "nobody wrote one yet".
pub(super) async fn show(
    State(admin): State<Admin>,
    PathParameter(path): PathParameter,
    parts: Parts,
) -> Result<Response, ApiError> {
    let state = admin.read(intake::consistency(&parts.uri)?).await?;
    let model = model_of(&path);
    let record = match state.policy(&model) {
        Some(record) => PolicyRecord::clone(record),
        None if model.is_empty() => PolicyRecord {
            model,
            document: PolicyDocument::default(),
            source: Default::default(),
            startup: None,
            mod_revision: 0,
        },
        None => return Err(ApiError::PolicyNotFound(path)),
    };
    Ok(tagged(record.mod_revision, at_revision(state.revision(), Json(view(&record)))))
}

pub(super) async fn put(
    State(admin): State<Admin>,
    PathParameter(path): PathParameter,
    parts: Parts,
    body: Body,
) -> Result<Response, ApiError> {
    let model = model_of(&path);
    let bytes = intake::body(&parts, body, admin.max_body_bytes).await?;
    let document: PolicyDocument = intake::json(&parts, &bytes)?;
    document.validate(&model).map_err(|error| ApiError::BadRequest(error.to_string()))?;
    let command = Command::PutPolicy { model: model.clone(), document: Box::new(document.clone()) };
    let outcome = admin.writer.write(intake::write(&parts, &bytes, command)?).await?;
    let record = PolicyRecord {
        model,
        document,
        source: smg_fleet::policy::PolicySource::Api,
        startup: None,
        mod_revision: outcome.revision,
    };
    Ok(tagged(outcome.revision, at_revision(outcome.revision, Json(view(&record)))))
}

pub(super) async fn delete(
    State(admin): State<Admin>,
    PathParameter(path): PathParameter,
    parts: Parts,
) -> Result<Response, ApiError> {
    let write = intake::write(&parts, &[], Command::DeletePolicy { model: model_of(&path) })?;
    let outcome = admin.writer.write(write).await?;
    Ok(at_revision(outcome.revision, StatusCode::NO_CONTENT))
}
