//! Who answers at an address from which a worker had gone.
//!
//! What comes back may be another engine process, and it may be another engine: of another model, runtime or connector than the one that was
//! registered there. It is asked before it gets a request again.
//!
//! Invariants
//! * an engine that contradicts what the fleet knows of it gets nothing. The control plane asks it too, with its next probe, and then the
//!   fleet knows what it is now; so the comparison is with the newest that this gateway has;
//! * an engine that is well and says nothing about itself comes back as what it was;
//! * a prefill whose KV engine id was learned, from its bootstrap server or over gRPC, is asked for it too: under the id of the process that
//!   died every decode engine would wait for minutes.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{Request, StatusCode, header};
use http_body_util::{BodyExt, Limited};
use smg_fleet::{Wire, Worker, WorkerUrl, listing, mooncake};

use crate::core::Core;
use crate::dispatch::leg::LegBody;
use crate::fleet::worker::RoutedWorker;

/// How long one question may take.
const PATIENCE: Duration = Duration::from_secs(5);
/// Largest answer.
const MAX_ANSWER: usize = 4 * 1024 * 1024;

/// Whether the engine that answers again is the one the fleet knows.
///
/// # Errors
/// What speaks against it, or that it could not be asked.
pub async fn verify(core: &Arc<Core>, worker: &RoutedWorker) -> Result<(), String> {
    let known = core.table.load().workers.get(&worker.id()).cloned();
    // What has left the fleet gets no request.
    let Some(known) = known else { return Ok(()) };
    match known.wire() {
        Wire::Grpc => over_grpc(core, worker, &known).await,
        _ => over_http(core, &known).await,
    }?;
    if knows_its_engine_id(core, worker).await {
        Ok(())
    } else {
        Err("its bootstrap server does not say its KV engine id".to_owned())
    }
}

async fn over_http(core: &Core, known: &Worker) -> Result<(), String> {
    let base = known.url().ok();
    let base = base.as_ref().map_or(known.spec.url.as_str(), WorkerUrl::as_str);
    let answer = ask(core, &format!("{base}{}", listing::PATH), known.spec.api_key.as_deref()).await;
    let (status, body) = answer.ok_or_else(|| "it did not say which models it serves".to_owned())?;
    let listed = if status.is_success() { listing::models(&body) } else { None };
    match listed.and_then(|listed| listing::contradiction(known, &listed)) {
        Some(contradiction) => Err(contradiction.reason),
        None => Ok(()),
    }
}

/// Another runtime shows before this: no engine answers another's health check.
async fn over_grpc(core: &Core, worker: &RoutedWorker, known: &Worker) -> Result<(), String> {
    let (Some(client), Some(facts)) = (core.client_as(worker, known.runtime()), &known.facts) else { return Ok(()) };
    let Ok(Ok(said)) = tokio::time::timeout(PATIENCE, client.identity()).await else {
        return if known.learned_engine_id().is_none() { Ok(()) } else { Err("it does not say what it is".to_owned()) };
    };
    let labelled = ["served_model_name", "model_path"].iter().filter_map(|name| facts.labels.get(*name));
    let known: Vec<&str> =
        facts.models.iter().map(|card| card.id.as_str()).chain(labelled.map(String::as_str)).collect();
    let names = [said.served_model_name.as_str(), said.model_path.as_str()];
    let mut names = names.into_iter().filter(|name| !name.is_empty());
    if let Some(first) = names.next().filter(|first| !known.is_empty() && !known.contains(first))
        && !names.any(|name| known.contains(&name))
    {
        return Err(format!("its model is '{first}' now and not '{}'", known.join("', '")));
    }
    match &facts.kv_connector {
        Some(before) if !said.kv_connector.is_empty() && *before != said.kv_connector => {
            return Err(format!("its KV connector is '{}' now and not '{before}'", said.kv_connector));
        }
        _ => {}
    }
    if facts.kv_engine_id.is_some() && !said.kv_engine_id.is_empty() {
        worker.learn_engine_id(&said.kv_engine_id);
    }
    Ok(())
}

/// Learns what the engine calls itself by now, where that decides whether its KV is found. False when it does not say, though it did before.
async fn knows_its_engine_id(core: &Core, worker: &RoutedWorker) -> bool {
    let record = &worker.record;
    let query = mooncake::query_url(&record.spec, record.runtime(), &worker.bootstrap_host);
    // Over gRPC an engine tells its id itself.
    let asked = record.wire() == Wire::Http && record.learned_engine_id().is_some();
    let Some(query) = query.filter(|_| asked) else { return true };
    let width = record.label("dp_size").and_then(|size| size.parse().ok()).unwrap_or(1);
    let answer = ask(core, &query, None).await.filter(|(status, _)| status.is_success());
    match answer.and_then(|(_, answer)| mooncake::engine_id(&answer, width)) {
        Some(engine_id) => {
            worker.learn_engine_id(&engine_id);
            true
        }
        // An id of the operator's counts either way.
        None => record.spec.kv_engine_id.is_some(),
    }
}

async fn ask(core: &Core, url: &str, key: Option<&str>) -> Option<(StatusCode, Bytes)> {
    let mut request = Request::get(url);
    if let Some(key) = key {
        request = request.header(header::AUTHORIZATION, format!("Bearer {key}"));
    }
    let request = request.body(LegBody::Empty).ok()?;
    let exchange = async {
        let response = core.client.request(request).await.ok()?;
        let status = response.status();
        Some((status, Limited::new(response.into_body(), MAX_ANSWER).collect().await.ok()?.to_bytes()))
    };
    tokio::time::timeout(PATIENCE, exchange).await.unwrap_or(None)
}
