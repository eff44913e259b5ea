//! `/fleet/audit`: what operators changed.

use axum::Json;
use axum::extract::State;
use axum::http::request::Parts;
use axum::response::Response;
use serde_json::{Value, json};
use smg_state::AuditRecord;

use super::error::ApiError;
use super::{Admin, at_revision, intake};

/// Records of an answer, unless it is told another number.
const LIMIT: usize = 100;

pub(super) fn shown(record: &AuditRecord) -> Value {
    let value = |text: &str| serde_json::from_str(text).unwrap_or_else(|_| json!(text));
    let changes: Vec<Value> = record
        .changes
        .iter()
        .map(|change| {
            let mut shown = json!({"field": change.field});
            for (name, text) in [("before", &change.before), ("after", &change.after)] {
                if !text.is_empty() {
                    shown[name] = value(text);
                }
            }
            shown
        })
        .collect();
    json!({
        "revision": record.revision,
        "at_unix_ms": record.at_unix_ms,
        "actor": record.actor,
        "action": record.action,
        "object": record.object,
        "command_id": record.command_id,
        "changes": changes,
    })
}

/// Newest first; `actor`, `object` and `action` keep those that are, or begin with, what they say.
pub(super) async fn list(State(admin): State<Admin>, parts: Parts) -> Result<Response, ApiError> {
    let consistency = intake::consistency(&parts.uri)?;
    let limit = intake::parsed(&parts.uri, "limit")?.unwrap_or(LIMIT).min(smg_state::audit::MAX_RECORDS);
    let [actor, object, action] = ["actor", "object", "action"].map(|name| intake::query(&parts.uri, name));
    let (actor, object, action) = (actor?, object?, action?);
    let wanted = |record: &AuditRecord| {
        let is = |wanted: &Option<String>, value: &str| wanted.as_ref().is_none_or(|wanted| value.starts_with(wanted));
        is(&actor, &record.actor) && is(&object, &record.object) && is(&action, &record.action)
    };
    let (revision, records) = admin.service.audit(consistency, limit, wanted).await?;
    let records: Vec<Value> = records.iter().map(|record| shown(record)).collect();
    Ok(at_revision(revision, Json(json!({"total": records.len(), "records": records}))))
}
