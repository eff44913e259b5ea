//! `smg workers`.

use std::fs;
use std::path::Path;
use std::time::Duration;

use http::Method;
use serde_json::{Value, json};
use tokio::time::{Instant, sleep};
use uuid::Uuid;

use super::failure::Failure;
use super::show::note;
use super::{Session, follow, list_path, object_in, table};
use crate::cli::{AddFlags, ChangeFlags, PatchFlags, SpecFlags, WorkersVerb};

/// Between two looks at what is waited for.
const PAUSE: Duration = Duration::from_millis(500);
/// How long gateways may need to say what they run on a worker: before that it is not known to be busy.
const WORD: Duration = Duration::from_secs(5);

/// Does what `smg workers` says.
pub(super) async fn run(session: &Session, verb: &WorkersVerb) -> Result<(), Failure> {
    match verb {
        WorkersVerb::List { model, follow } => {
            let path = list_path("/workers", follow, &[("model", model.as_deref())]);
            if follow.watch {
                return follow::list(session, &path, true, table::WORKERS).await;
            }
            session.show.list(&session.get(path).await?, "workers", table::WORKERS)
        }
        WorkersVerb::Get { worker } => {
            let id = id_of(session, worker).await?;
            session.show.one(&session.get(format!("/workers/{id}")).await?, table::WORKERS)
        }
        WorkersVerb::Add(flags) => add(session, flags).await,
        WorkersVerb::Patch(flags) => patch(session, flags).await,
        WorkersVerb::Drain { worker, timeout_secs, change } => {
            drain(session, worker, Duration::from_secs(*timeout_secs), change).await
        }
        WorkersVerb::Cordon { worker, change } => {
            let id = id_of(session, worker).await?;
            let answer = set_intent(session, &id, "cordoned", change).await?;
            session.changed(&answer, change, table::INTENT)
        }
        WorkersVerb::Uncordon { worker, change } => {
            let id = id_of(session, worker).await?;
            let answer = set_intent(session, &id, "active", change).await?;
            session.changed(&answer, change, table::INTENT)
        }
        WorkersVerb::Remove { worker, wait, change } => {
            let id = id_of(session, worker).await?;
            let mut answer = session.change(Method::DELETE, &format!("/workers/{id}"), None, change).await?;
            if *wait && !change.dry_run {
                until_gone(session, &id).await?;
                answer = json!({"status": "removed", "worker_id": id});
            }
            session.changed(&answer, change, table::ACCEPTED)
        }
    }
}

/// Waits until a worker is no more.
async fn until_gone(session: &Session, id: &str) -> Result<(), Failure> {
    loop {
        match session.get(format!("/workers/{id}")).await {
            Err(Failure::Refused { code, .. }) if code == "WORKER_NOT_FOUND" => return Ok(()),
            looked => drop(looked?),
        }
        sleep(PAUSE).await;
    }
}

/// The id of a worker that is named by its id or URL.
async fn id_of(session: &Session, worker: &str) -> Result<String, Failure> {
    if let Ok(id) = Uuid::parse_str(worker) {
        return Ok(id.to_string());
    }
    let list = session.get("/workers").await?;
    let url = worker.trim_end_matches('/');
    let mut known = list["workers"].as_array().into_iter().flatten();
    let found = known.find(|known| known["url"] == url).and_then(|known| known["id"].as_str());
    found.map(str::to_owned).ok_or_else(|| Failure::NotFound(format!("no worker has the id or the URL {worker}")))
}

/// The spec that flags and file describe.
pub(super) fn spec(flags: &SpecFlags) -> Result<Value, Failure> {
    let mut spec = flags.file.as_deref().map_or_else(|| Ok(json!({})), object_in)?;
    let mut set = |name: &str, value: Option<Value>| {
        if let Some(value) = value {
            spec[name] = value;
        }
    };
    set("url", flags.url.as_ref().map(|url| json!(url)));
    set("worker_type", flags.worker_type.map(|role| json!(role.as_str())));
    set("runtime_type", flags.runtime.as_ref().map(|runtime| json!(runtime)));
    set("bootstrap_port", flags.bootstrap_port.map(|port| json!(port)));
    set("kv_connector", flags.kv_connector.as_ref().map(|name| json!(name)));
    set("kv_role", flags.kv_role.as_ref().map(|name| json!(name)));
    set("priority", flags.priority.map(|priority| json!(priority)));
    set("cost", flags.cost.map(|cost| json!(cost)));
    set("api_key", flags.api_key_file.as_deref().map(key_in).transpose()?);
    if !flags.model.is_empty() {
        spec["models"] = flags.model.iter().map(|model| json!({"id": model})).collect();
    }
    label(&mut spec, &flags.label);
    Ok(spec)
}

fn label(object: &mut Value, labels: &[(String, String)]) {
    for (name, value) in labels {
        object["labels"][name] = json!(value);
    }
}

fn key_in(file: &Path) -> Result<Value, Failure> {
    let failed = |error: std::io::Error| Failure::Input(format!("{}: {error}", file.display()));
    Ok(json!(fs::read_to_string(file).map_err(failed)?.trim()))
}

async fn add(session: &Session, flags: &AddFlags) -> Result<(), Failure> {
    let answer = session.change(Method::POST, "/workers", Some(spec(&flags.spec)?), &flags.change).await?;
    if !flags.wait || flags.change.dry_run {
        return session.changed(&answer, &flags.change, table::ACCEPTED);
    }
    let location = answer["location"].as_str().ok_or_else(|| Failure::Answer(answer.to_string()))?.to_owned();
    let mut said = String::new();
    loop {
        let worker = session.get(location.as_str()).await?;
        // Why it takes long, once a reason.
        if let Some(message) = worker["job_status"]["message"].as_str().filter(|message| *message != said) {
            said = message.to_owned();
            note(message);
        }
        match worker["job_status"]["status"].as_str() {
            None => return session.show.one(&worker, table::WORKERS),
            Some("failed") => {
                let message = table::cell(&worker["job_status"]["message"]);
                return Err(Failure::Undone(format!("the registration failed: {message}")));
            }
            Some(_) => sleep(PAUSE).await,
        }
    }
}

async fn patch(session: &Session, flags: &PatchFlags) -> Result<(), Failure> {
    let id = id_of(session, &flags.worker).await?;
    let mut patch = flags.file.as_deref().map_or_else(|| Ok(json!({})), object_in)?;
    if let Some(priority) = flags.priority {
        patch["priority"] = json!(priority);
    }
    if let Some(cost) = flags.cost {
        patch["cost"] = json!(cost);
    }
    if let Some(file) = &flags.api_key_file {
        patch["api_key"] = key_in(file)?;
    }
    label(&mut patch, &flags.label);
    if patch.as_object().is_some_and(serde_json::Map::is_empty) {
        return Err(Failure::Input("nothing to change was given".to_owned()));
    }
    let answer = session.change(Method::PATCH, &format!("/workers/{id}"), Some(patch), &flags.change).await?;
    session.changed(&answer, &flags.change, table::ACCEPTED)
}

async fn set_intent(session: &Session, id: &str, intent: &str, change: &ChangeFlags) -> Result<Value, Failure> {
    let path = format!("/fleet/workers/{id}/intent");
    session.change(Method::PUT, &path, Some(json!({"intent": intent})), change).await
}

/// Takes a worker out of rotation and waits until it is idle.
async fn drain(session: &Session, worker: &str, limit: Duration, change: &ChangeFlags) -> Result<(), Failure> {
    let id = id_of(session, worker).await?;
    let answer = set_intent(session, &id, "cordoned", change).await?;
    if change.dry_run {
        return session.show.rehearsal(&answer);
    }
    let (deadline, mut said) = (Instant::now() + limit.max(WORD), String::new());
    loop {
        let occupation = session.get(format!("/fleet/workers/{id}/intent")).await?;
        if occupation["idle"] == true {
            return session.show.one(&occupation, table::INTENT);
        }
        let mut busy = format!("waiting for {}", table::cell(&occupation["busy_gateways"]));
        if occupation["unheard_members"].as_array().is_some_and(|members| !members.is_empty()) {
            busy += &format!("; no answer of members {}", table::cell(&occupation["unheard_members"]));
        }
        if busy != said {
            note(&busy);
            said = busy;
        }
        if Instant::now() > deadline {
            let limit = limit.as_secs();
            return Err(Failure::Undone(format!(
                "requests still run on the worker after {limit} s; it stays cordoned"
            )));
        }
        sleep(PAUSE).await;
    }
}
