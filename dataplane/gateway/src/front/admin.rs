//! Admin routes of a gateway: forwarded to the control plane, reads overlaid with what this gateway knows.
//!
//! Every command that works against the control plane works against any gateway. A read waits until this gateway routes with the revision
//! that answered it, so that what a client reads here is what its next request meets. Without the control plane, reads come from the
//! snapshot in use, marked with its age, and writes are refused within a bounded time.

use std::time::Duration;

use axum::body::Body;
use axum::extract::{Query, Request, State};
use bytes::Bytes;
use http::{HeaderName, HeaderValue, Method, Response, StatusCode, Uri, header};
use http_body_util::{BodyExt, Limited};
use serde_json::{Value, json};
use smg_admission::Standing;
use smg_fleet::access::Denied;
use smg_fleet::validate::worker_spec;
use smg_fleet::{Snapshot, WorkerId, WorkerSpec, info, matrix};

use super::error::{Outcome, admin_error};
use super::{Front, access, intake};
use crate::resilience::breaker::Phase;
use crate::sync::RequestError;

/// The revision that a control plane answer reflects.
const REVISION: HeaderName = HeaderName::from_static("x-smg-revision");
/// Age, in seconds, of an answer that does not come from the control plane.
const STALE: HeaderName = HeaderName::from_static("x-smg-stale");
/// Who holds which slots.
const ADMISSION: &str = "/fleet/admission";
/// Largest admin request body.
const MAX_ADMIN_BODY: usize = 1024 * 1024;
/// Largest control plane answer.
const MAX_ANSWER: usize = 64 * 1024 * 1024;
/// How long the answer may take where it takes long: a change of the control plane's members waits for a quorum in the old set and in the
/// new one, and a backup is sealed before it is sent.
const SLOW_TIMEOUT: Duration = Duration::from_secs(25);
/// How long a read waits for this gateway to catch up with the control plane.
const CATCH_UP: Duration = Duration::from_secs(2);

/// Forwards an admin request.
pub(super) async fn forward(State(front): State<Front>, request: Request) -> Response<Body> {
    let unmade = Outcome::of_refused(request.method(), request.uri().path());
    if let Err(denied) = access::judge_forwarded(&front, request.headers()) {
        return access::refuse_administration(denied, unmade);
    }
    let (head, body) = request.into_parts();
    let limits = intake::Limits::of(&front.core.options);
    let limits = intake::Limits { bytes: MAX_ADMIN_BODY.min(limits.bytes), ..limits };
    let body = match intake::read(&head.headers, body, limits).await {
        Ok(body) => body,
        Err(error) => return admin_error(error.status(), admin_code(error.status()), &error.to_string(), unmade),
    };
    let asked = Asked {
        uri: head.uri.clone(),
        is_get: head.method == Method::GET,
        unmade,
        body: body.clone(),
        judged: access::judge(&front, &head.method, head.uri.path(), &head.headers),
    };
    let mut forwarded = http::Request::new(body);
    *forwarded.method_mut() = head.method;
    *forwarded.uri_mut() = head.uri;
    for name in
        [header::CONTENT_TYPE, header::IF_MATCH, header::AUTHORIZATION, HeaderName::from_static("idempotency-key")]
    {
        if let Some(value) = head.headers.get(&name) {
            forwarded.headers_mut().insert(name, value.clone());
        }
    }
    let timeout = front.core.options.control_plane_timeout;
    let timeout = if asked.is_slow() { timeout.max(SLOW_TIMEOUT) } else { timeout };
    if asked.streams() {
        return match tokio::time::timeout(timeout, front.link.request(forwarded)).await {
            Ok(Ok(response)) => response.map(Body::new),
            Ok(Err(error)) => without_control_plane(&front, &asked, &error.to_string()),
            Err(_) => without_control_plane(&front, &asked, "the control plane did not answer in time"),
        };
    }
    let answer = tokio::time::timeout(timeout, async {
        let response = front.link.request(forwarded).await?;
        let (head, body) = response.into_parts();
        let body = Limited::new(body, MAX_ANSWER).collect().await;
        let body = body.map_err(|error| RequestError::Lost(error.to_string()))?.to_bytes();
        Ok::<_, RequestError>((head, body))
    });
    let (mut head, body) = match answer.await {
        Ok(Ok(answer)) => answer,
        Ok(Err(RequestError::Lost(reason))) if asked.changes() => return outcome_unknown(&reason),
        Ok(Err(error)) => return without_control_plane(&front, &asked, &error.to_string()),
        Err(_) if asked.changes() => return outcome_unknown("the control plane did not answer in time"),
        Err(_) => return without_control_plane(&front, &asked, "the control plane did not answer in time"),
    };
    if let Some(revision) = head.headers.get(&REVISION).and_then(|value| value.to_str().ok()?.parse().ok()) {
        catch_up(&front, revision).await;
    }
    let body = match asked.uri.path() {
        _ if !asked.is_get || !head.status.is_success() => body,
        ADMISSION => lay_over(body, |answer| answer["here"] = slots_here(&front)),
        path if path.starts_with("/workers") => lay_over(body, |answer| overlay_value(&front, answer)),
        _ => body,
    };
    head.headers.remove(header::CONTENT_LENGTH);
    head.headers.remove(header::TRANSFER_ENCODING);
    let mut response = Response::new(Body::from(body));
    *response.status_mut() = head.status;
    *response.headers_mut() = head.headers;
    response
}

/// What a client asked the control plane for.
struct Asked {
    uri: Uri,
    is_get: bool,
    /// What becomes of it when it is refused here.
    unmade: Option<Outcome>,
    body: Bytes,
    /// What this gateway's snapshot says about the caller: the control plane has the word, unless it is away.
    judged: Result<(), Denied>,
}

impl Asked {
    /// Whether it may change the fleet.
    fn changes(&self) -> bool {
        self.unmade.is_some()
    }

    /// Whether its answer takes long.
    fn is_slow(&self) -> bool {
        self.uri.path() == "/fleet/backup" || (!self.is_get && self.uri.path().starts_with("/fleet/cluster/"))
    }

    /// Whether its answer goes on for long, or is large: it is passed on as it comes, without what this gateway knows.
    fn streams(&self) -> bool {
        let watches = || {
            let parameters = Query::<Vec<(String, String)>>::try_from_uri(&self.uri);
            parameters.is_ok_and(|Query(list)| list.iter().any(|(name, value)| name == "watch" && value != "false"))
        };
        self.is_get && (self.uri.path() == "/fleet/backup" || watches())
    }
}

async fn catch_up(front: &Front, revision: u64) {
    let mut current = front.core.revision.subscribe();
    let _ = tokio::time::timeout(CATCH_UP, current.wait_for(|current| *current >= revision)).await;
}

/// A write that was sent and not answered may have happened. Repeating it under its `Idempotency-Key` finds out.
fn outcome_unknown(reason: &str) -> Response<Body> {
    let message = format!("the outcome is unknown: {reason}");
    admin_error(StatusCode::SERVICE_UNAVAILABLE, "OUTCOME_UNKNOWN", &message, Some(Outcome::Unknown))
}

fn admin_code(status: StatusCode) -> &'static str {
    match status {
        StatusCode::PAYLOAD_TOO_LARGE => "PAYLOAD_TOO_LARGE",
        _ => "BAD_REQUEST",
    }
}

fn without_control_plane(front: &Front, asked: &Asked, reason: &str) -> Response<Body> {
    // A gateway that has never heard of the fleet knows no token of it: that says nothing about the caller's.
    let unheard = front.core.options.guarded && front.core.table.load().snapshot.revision == 0;
    if let Err(denied) = asked.judged
        && !unheard
    {
        return access::refuse_administration(denied, asked.unmade);
    }
    let status = front.link.status();
    if !asked.streams()
        && let Some(stored) = from_snapshot(front, asked)
    {
        let (code, mut body) = stored;
        overlay_value(front, &mut body);
        let mut response = super::probes::json_response(code, &body);
        response.headers_mut().insert(STALE, HeaderValue::from(status.stale_seconds.unwrap_or(0)));
        return response;
    }
    let message = format!("the control plane cannot be reached: {reason}");
    admin_error(StatusCode::SERVICE_UNAVAILABLE, "CONTROL_PLANE_UNAVAILABLE", &message, asked.unmade)
}

/// What the snapshot in use says about a read.
fn from_snapshot(front: &Front, asked: &Asked) -> Option<(StatusCode, Value)> {
    let table = front.core.table.load();
    let snapshot = &table.snapshot;
    // Without a snapshot nothing is known: an empty list would be a lie.
    if snapshot.revision == 0 {
        return None;
    }
    let path = asked.uri.path();
    if let "/fleet/pairing" | "/fleet/pairing/explain" = path {
        return Some(pairing(snapshot, asked).unwrap_or_else(|reason| bad_request(&reason)));
    }
    if !asked.is_get {
        return None;
    }
    if path == ADMISSION {
        return Some((StatusCode::OK, json!({"here": slots_here(front)})));
    }
    if path == "/workers" {
        return Some((StatusCode::OK, info::worker_list(table.workers.values().map(AsRef::as_ref))));
    }
    let id = path.strip_prefix("/workers/")?;
    let Ok(id) = id.parse::<WorkerId>() else {
        return Some(bad_request(&format!("'{id}' is not a worker id")));
    };
    Some(match snapshot.workers.get(&id).or_else(|| table.workers.get(&id)) {
        Some(worker) => (StatusCode::OK, info::worker_info(worker)),
        None => (StatusCode::NOT_FOUND, json!({"error": format!("worker {id} not found"), "code": "WORKER_NOT_FOUND"})),
    })
}

fn bad_request(reason: &str) -> (StatusCode, Value) {
    (StatusCode::BAD_REQUEST, json!({"error": reason, "code": "BAD_REQUEST"}))
}

/// The pairing matrix, or what a worker that is not registered would find in it.
fn pairing(snapshot: &Snapshot, asked: &Asked) -> Result<(StatusCode, Value), String> {
    let parameters = Query::<Vec<(String, String)>>::try_from_uri(&asked.uri).map_err(|error| error.body_text())?.0;
    let query = matrix::Query::parse(parameters).map_err(|error| error.to_string())?;
    let answer = if asked.is_get {
        serde_json::to_value(matrix::matrix(snapshot, &query).map_err(|error| error.to_string())?)
    } else {
        let mut spec: WorkerSpec =
            serde_json::from_slice(&asked.body).map_err(|error| format!("invalid JSON body: {error}"))?;
        worker_spec(&mut spec).map_err(|error| error.to_string())?;
        serde_json::to_value(matrix::explain(snapshot, spec, &query).map_err(|error| error.to_string())?)
    };
    Ok((StatusCode::OK, answer.map_err(|error| error.to_string())?))
}

fn lay_over(body: Bytes, what: impl FnOnce(&mut Value)) -> Bytes {
    let Ok(mut value) = serde_json::from_slice::<Value>(&body) else { return body };
    what(&mut value);
    Bytes::from(value.to_string())
}

/// The slots of decode workers as this gateway has them.
fn slots_here(front: &Front) -> Value {
    let table = front.core.table.load();
    let shown = |(id, window): (WorkerId, &std::sync::Arc<crate::admission::decode::DecodeWindow>)| {
        let (usage, worker) = (window.usage()?, table.workers.get(&id)?);
        Some(json!({
            "worker_id": id.to_string(),
            "url": worker.spec.url,
            "window": usage.window,
            "limit": usage.limit,
            "anchored": usage.anchored,
            "in_use": usage.in_use,
            "waiting": usage.waiting,
        }))
    };
    let workers: Vec<Value> = table.windows().filter_map(shown).collect();
    let lease = match table.lease().standing() {
        _ if table.lease().is_alone() => "alone",
        Standing::Whole => "whole",
        Standing::Anchored => "anchored",
        Standing::Nothing => "none",
    };
    json!({"gateway_id": front.core.options.gateway_id, "lease": lease, "workers": workers})
}

/// Lays this gateway's load, breaker and ejection over the fleet's view of workers.
fn overlay_value(front: &Front, value: &mut Value) {
    let table = front.core.table.load();
    let overlay_one = |worker: &mut Value| {
        let id = worker.get("id").and_then(Value::as_str).and_then(|id| id.parse::<WorkerId>().ok());
        let Some(runtime) = id.and_then(|id| table.runtime(id)) else { return };
        if worker.get("status").is_none() {
            return;
        }
        worker["load"] = json!(runtime.load());
        if let Some(reported) = runtime.last_report.get() {
            worker["engine_load"] = super::loads::of_worker(&reported);
        }
        let phase = runtime.breaker_phase();
        if phase != Phase::Closed {
            worker["circuit_breaker"] = json!(phase.as_str());
        }
        if runtime.is_unreachable() {
            worker["stalled"] = json!("unreachable");
            if worker["status"] == "ready" {
                worker["status"] = json!("not_ready");
                worker["is_healthy"] = json!(false);
            }
        }
    };
    match value.get_mut("workers").and_then(Value::as_array_mut) {
        Some(workers) => workers.iter_mut().for_each(overlay_one),
        None => overlay_one(value),
    }
}
