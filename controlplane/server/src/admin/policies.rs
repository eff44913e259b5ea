//! `/fleet/policies`: the policy documents, one for the fleet (`default`) and one for each model that differs.

use axum::Json;
use axum::body::Body;
use axum::extract::State;
use axum::http::StatusCode;
use axum::http::request::Parts;
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};
use smg_fleet::{PolicyDocument, PolicyRecord};

use super::error::ApiError;
use super::intake::PathParameter;
use super::service::watch::Followed;
use super::{Admin, at_revision, changed, intake, service, tagged, watches};

pub(super) fn view(record: &PolicyRecord) -> Value {
    json!({
        "model": service::shown_model(record),
        "document": record.document,
        "source": record.source,
        "mod_revision": record.mod_revision,
    })
}

pub(super) async fn list(State(admin): State<Admin>, parts: Parts) -> Result<Response, ApiError> {
    if watches::is_asked(&parts.uri)? {
        return watches::answer(&admin, &parts.uri, Followed::Policies).await;
    }
    let state = admin.service.read(intake::consistency(&parts.uri)?).await?;
    let policies: Vec<Value> = state.policies().map(|record| view(record)).collect();
    Ok(at_revision(state.revision(), Json(json!({"total": policies.len(), "policies": policies}))))
}

pub(super) async fn show(
    State(admin): State<Admin>,
    PathParameter(model): PathParameter,
    parts: Parts,
) -> Result<Response, ApiError> {
    let (state, record) = admin.service.policy(intake::consistency(&parts.uri)?, &model).await?;
    Ok(tagged(record.mod_revision, at_revision(state.revision(), Json(view(&record)))))
}

pub(super) async fn put(
    State(admin): State<Admin>,
    PathParameter(model): PathParameter,
    parts: Parts,
    body: Body,
) -> Result<Response, ApiError> {
    let bytes = intake::body(&parts, body, admin.max_body_bytes).await?;
    let document: PolicyDocument = intake::json(&parts, &bytes)?;
    let call = intake::call(&parts, &bytes)?;
    let (change, record) = admin.service.put_policy(call, &model, document).await?;
    let view = view(&record);
    let made = || tagged(record.mod_revision, Json(&view).into_response());
    Ok(changed(&change, || view.clone(), made))
}

pub(super) async fn delete(
    State(admin): State<Admin>,
    PathParameter(model): PathParameter,
    parts: Parts,
) -> Result<Response, ApiError> {
    let change = admin.service.delete_policy(intake::call(&parts, &[])?, &model).await?;
    Ok(changed(&change, || Value::Null, || StatusCode::NO_CONTENT.into_response()))
}
