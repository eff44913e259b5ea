//! `?watch=true` on a list: one JSON object a line (`application/x-ndjson`).
//!
//! ```text
//! {"type":"put","object":{…}}                          new or changed, as the list shows it
//! {"type":"deleted","name":"…"}                        gone, or no longer in the list
//! {"type":"bookmark","revision":7,"history_id":"…"}    all up to here was shown; at least every ten seconds
//! {"type":"end","reason":"compacted","revision":7}     nothing follows: `compacted` (start anew), `expired` or `shutdown` (resume)
//! ```
//!
//! `from=<revision>` (with `history=<history_id>`) of a bookmark goes on from there instead of showing the whole list.

use axum::body::Body;
use axum::http::{HeaderValue, Uri, header};
use axum::response::Response;
use bytes::Bytes;
use futures::StreamExt;
use serde_json::{Value, json};
use smg_fleet::Revision;
use smg_fleet::info::worker_info;

use super::error::ApiError;
use super::service::watch::{Batch, Followed, Object, Resume};
use super::{Admin, at_revision, fleet, intake, policies, tokens};

/// Whether a list is to be followed.
pub(super) fn is_asked(uri: &Uri) -> Result<bool, ApiError> {
    intake::flag(uri, "watch")
}

/// The answer to a list that is to be followed.
pub(super) async fn answer(admin: &Admin, uri: &Uri, followed: Followed) -> Result<Response, ApiError> {
    let history_id = intake::parsed(uri, "history")?;
    let resume = intake::parsed(uri, "from")?.map(|revision| Resume { revision, history_id });
    let revision = admin.service.local().revision();
    let lines = admin.service.watch(followed, resume).await?.map(|batch| Ok::<_, std::io::Error>(lines(&batch)));
    let mut response = at_revision(revision, Response::new(Body::from_stream(lines)));
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/x-ndjson"));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    Ok(response)
}

fn lines(batch: &Batch) -> Bytes {
    let mut text = String::new();
    let mut line = |value: Value| {
        text.push_str(&value.to_string());
        text.push('\n');
    };
    for object in &batch.put {
        line(json!({"type": "put", "object": shown(object, batch.revision)}));
    }
    for name in &batch.deleted {
        line(json!({"type": "deleted", "name": name}));
    }
    line(match batch.end {
        None => json!({"type": "bookmark", "revision": batch.revision, "history_id": batch.history_id}),
        Some(reason) => {
            json!({"type": "end", "reason": reason, "revision": batch.revision, "history_id": batch.history_id})
        }
    });
    Bytes::from(text)
}

fn shown(object: &Object, revision: Revision) -> Value {
    match object {
        Object::Worker(worker) => worker_info(worker),
        Object::Policy(record) => policies::view(record),
        Object::Token(token) => tokens::shown(token),
        Object::Gateway(record) => fleet::gateway(record, revision),
    }
}
