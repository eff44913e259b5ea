//! Asking an engine what it is.
//!
//! Only an engine that cannot be reached is asked again; one that answers nonsense has answered. Whatever it does, discovery ends within
//! its budget and yields facts: an engine about which nothing can be learned counts as SGLang, as in the documented system.

use std::collections::BTreeMap;
use std::time::Duration;

use http::StatusCode;
use serde_json::Value;
use smg_fleet::listing::{self, ListedModel};
use smg_fleet::{Facts, Runtime, Wire, WorkerSpec, WorkerUrl, mooncake};
use tokio::time::{Instant, sleep};

use super::facts::{self};
use super::grpc_facts;
use crate::probe::client::{Answer, ProbeClient, ProbeError};
use crate::probe::engine::Address;

/// Attempts of one call while the engine cannot be reached.
const ATTEMPTS: u32 = 3;

/// How long discovery may take.
#[derive(Debug, Clone, Copy)]
pub struct Budget {
    /// One call.
    pub call: Duration,
    /// Finding out which engine it is.
    pub detection: Duration,
    /// Between two attempts, times the number of attempts so far.
    pub pause: Duration,
}

impl Default for Budget {
    fn default() -> Self {
        Self { call: Duration::from_secs(10), detection: Duration::from_secs(10), pause: Duration::from_secs(1) }
    }
}

/// Everything that can be learned of an engine, whatever it speaks. `whole`: see [`super::facts`].
///
/// # Errors
/// When an engine that speaks gRPC does not say what must be known. One that speaks HTTP may say nothing.
pub(super) async fn facts(
    client: &ProbeClient,
    spec: &WorkerSpec,
    budget: Budget,
    whole: bool,
) -> Result<Facts, String> {
    match smg_fleet::WorkerUrl::parse(&spec.url).map(|url| url.scheme().wire()) {
        Ok(Wire::Grpc) => grpc(client, spec, budget, whole).await,
        _ => Ok(Engine { client, spec, budget }.facts().await),
    }
}

/// What an engine says over gRPC. What it says of its model must be known; without the rest it can be served, but
/// pairing and admission know less.
async fn grpc(client: &ProbeClient, spec: &WorkerSpec, budget: Budget, whole: bool) -> Result<Facts, String> {
    let at = Address { url: &spec.url, key: spec.api_key.as_deref(), limit: budget.call };
    let engines = client.engines();
    let asked = |what: &str, error: ProbeError| format!("{} was asked for its {what} in vain: {error}", spec.url);
    let runtime = match spec.runtime {
        Runtime::Unspecified => {
            engines.detect(at, Runtime::Unspecified).await.map_err(|error| asked("health", error))?
        }
        declared => declared,
    };
    let model = persistent(budget, || engines.model_info(at, runtime)).await;
    let model = model.map_err(|error| asked("model", error))?;
    let server = match persistent(budget, || engines.server_info(at, runtime)).await {
        Ok(server) => server,
        Err(error) if whole => return Err(asked("arguments", error)),
        Err(error) => {
            tracing::warn!(
                target: "smg", worker = spec.url, %error,
                "the engine does not say how it was started: its KV transport, layout and running window are not known"
            );
            None
        }
    };
    let said = grpc_facts::said(model.as_ref(), server.as_ref());
    let mut merged = said.labels.clone();
    merged.extend(spec.labels.clone());
    Ok(Facts {
        wire: Wire::Grpc,
        runtime,
        models: facts::cards(&merged, &[]),
        labels: said.labels,
        http2: true,
        kv_connector: said.kv_connector,
        kv_role: said.kv_role,
        kv_engine_id: said.kv_engine_id,
        owned_by: None,
    })
}

/// A call, repeated while the connection fails.
async fn persistent<T, Call>(budget: Budget, call: impl Fn() -> Call) -> Result<T, ProbeError>
where
    Call: Future<Output = Result<T, ProbeError>>,
{
    for _ in 1..ATTEMPTS {
        match call().await {
            Err(ProbeError::Transport(_)) => sleep(budget.pause).await,
            answer => return answer,
        }
    }
    call().await
}

/// One engine that speaks HTTP and how to ask it.
struct Engine<'a> {
    client: &'a ProbeClient,
    spec: &'a WorkerSpec,
    budget: Budget,
}

impl Engine<'_> {
    /// Everything that can be learned.
    async fn facts(&self) -> Facts {
        let runtime = match self.spec.runtime {
            Runtime::Unspecified => self.detect().await,
            declared => declared,
        };
        let mut kv_engine_id = None;
        let (labels, models) = match runtime {
            Runtime::Sglang => {
                let (server, model, models) = tokio::join!(
                    self.first_found(["/server_info", "/get_server_info"]),
                    self.first_found(["/model_info", "/get_model_info"]),
                    self.models(),
                );
                (facts::sglang_labels(server.as_ref(), model.as_ref(), &models), models)
            }
            Runtime::Vllm => {
                let (version, models, engine_id) =
                    tokio::join!(self.json("/version"), self.models(), self.mooncake_engine_id());
                kv_engine_id = engine_id;
                (facts::vllm_labels(version.as_ref(), &models), models)
            }
            _ => (BTreeMap::new(), self.models().await),
        };
        let mut merged = labels.clone();
        merged.extend(self.spec.labels.clone());
        let owned_by = models.first().and_then(|model| model.owned_by.clone());
        let models = facts::cards(&merged, &models);
        Facts { wire: Wire::Http, runtime, labels, models, owned_by, kv_engine_id, ..Facts::default() }
    }

    /// The KV engine id, by the bootstrap server of a Mooncake prefill engine. That server has no key to ask for.
    async fn mooncake_engine_id(&self) -> Option<String> {
        let url = WorkerUrl::parse(&self.spec.url).ok()?;
        let query = mooncake::query_url(self.spec, Runtime::Vllm, url.host())?;
        let width = self.spec.labels.get("dp_size").and_then(|size| size.parse().ok()).unwrap_or(1);
        match self.client.get(&query, None, self.budget.call).await {
            Ok(answer) if answer.status.is_success() => mooncake::engine_id(&answer.body, width),
            Ok(_) => None,
            Err(error) => {
                tracing::debug!(target: "smg", worker = self.spec.url, query, %error, "the bootstrap server was asked in vain");
                None
            }
        }
    }

    async fn detect(&self) -> Runtime {
        let deadline = Instant::now() + self.budget.detection;
        let mut attempt = 0;
        loop {
            let (known, unreachable) = self.detect_once().await;
            attempt += 1;
            let pause = self.budget.pause * attempt;
            match known {
                Some(runtime) => return runtime,
                None if unreachable && Instant::now() + pause < deadline => sleep(pause).await,
                None => {
                    tracing::warn!(
                        target: "smg", worker = self.spec.url,
                        "the engine does not say what it is and is taken for SGLang: declare runtime_type if it is not"
                    );
                    return Runtime::Sglang;
                }
            }
        }
    }

    /// The runtime, and whether some call did not reach the engine.
    async fn detect_once(&self) -> (Option<Runtime>, bool) {
        let listed = self.call(listing::PATH).await;
        let models = listed.as_ref().ok().filter(|answer| answer.status.is_success());
        let models = models.and_then(|answer| listing::models(&answer.body));
        if let Some(runtime) = models.as_deref().and_then(facts::runtime_of) {
            return (Some(runtime), false);
        }
        let (version, server_info) = tokio::join!(self.call("/version"), self.call("/server_info"));
        let answered = |answer: &Result<Answer, ProbeError>| answer.as_ref().is_ok_and(|a| a.status.is_success());
        let known = facts::runtime_by_endpoints(models.is_some(), answered(&version), answered(&server_info));
        (known, listed.is_err() || version.is_err() || server_info.is_err())
    }

    async fn models(&self) -> Vec<ListedModel> {
        let answer = self.patiently(listing::PATH).await;
        let answer = answer.filter(|answer| answer.status.is_success());
        answer.and_then(|answer| listing::models(&answer.body)).unwrap_or_default()
    }

    /// The JSON under the first of two names that the engine knows.
    async fn first_found(&self, [name, old_name]: [&str; 2]) -> Option<Value> {
        let answer = self.patiently(name).await?;
        if answer.status == StatusCode::NOT_FOUND {
            return self.json(old_name).await;
        }
        parse(&answer)
    }

    async fn json(&self, path: &str) -> Option<Value> {
        parse(&self.patiently(path).await?)
    }

    /// A call, repeated while the connection fails. An answer that is too large or too slow will not get better.
    async fn patiently(&self, path: &str) -> Option<Answer> {
        for attempt in 1..=ATTEMPTS {
            match self.call(path).await {
                Ok(answer) => return Some(answer),
                Err(ProbeError::Transport(_)) if attempt < ATTEMPTS => sleep(self.budget.pause).await,
                Err(error) => {
                    tracing::debug!(target: "smg", worker = self.spec.url, path, %error, "the engine was asked in vain");
                    return None;
                }
            }
        }
        None
    }

    async fn call(&self, path: &str) -> Result<Answer, ProbeError> {
        let url = format!("{}{path}", self.spec.url);
        self.client.get(&url, self.spec.api_key.as_deref(), self.budget.call).await
    }
}

fn parse(answer: &Answer) -> Option<Value> {
    answer.status.is_success().then(|| serde_json::from_slice(&answer.body).ok()).flatten()
}
