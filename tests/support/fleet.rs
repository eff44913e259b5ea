//! A gateway over SGLang engines, and what tests of failures look at.

use reqwest::Response;
use serde_json::{Value, json};

use super::*;

/// Retries without a wait worth noticing.
pub const FAST: [&str; 4] = ["--retry-initial-backoff-ms", "1", "--retry-max-backoff-ms", "5"];

/// The dispatches over two legs.
pub const PAIRS: [Dispatch; 2] = [Dispatch::Parallel, Dispatch::Sequential];

/// A gateway over SGLang prefills and decodes. They report no load: placement depends on the gateway's own requests alone.
pub struct Fleet {
    /// The gateway.
    pub smg: Smg,
    /// Its prefills, in the order of registration.
    pub prefills: Vec<MockEngine>,
    /// Its decodes.
    pub decodes: Vec<MockEngine>,
}

/// Starts so many engines of each kind behind a gateway with these flags.
pub async fn fleet(prefills: usize, decodes: usize, flags: &[&str]) -> Fleet {
    let mut all = FAST.to_vec();
    all.extend(flags);
    let mut fleet = Fleet { smg: Smg::launch(&all).await, prefills: Vec::new(), decodes: Vec::new() };
    for _ in 0..prefills {
        let engine = silent(Role::Prefill, MODEL).await;
        fleet.smg.register(&spec(&engine, "prefill")).await;
        fleet.prefills.push(engine);
    }
    for _ in 0..decodes {
        let engine = silent(Role::Decode, MODEL).await;
        fleet.smg.register(&spec(&engine, "decode")).await;
        fleet.decodes.push(engine);
    }
    fleet
}

/// A pair under each kind of dispatch, with these flags.
pub async fn pair(dispatch: Dispatch, flags: &[&str]) -> (Smg, MockEngine, MockEngine) {
    let mut all = FAST.to_vec();
    all.extend(flags);
    let serving = Serving::start(dispatch, &all).await;
    (serving.smg, serving.prefill.unwrap(), serving.output)
}

/// How often the breaker of an engine was told of a failure.
pub async fn failures(smg: &Smg, engine: &MockEngine) -> f64 {
    smg.metric("smg_worker_cb_outcomes_total", &[("worker", &engine.url()), ("outcome", "failure")]).await
}

/// The state of an engine's breaker: 0 closed, 1 open, 2 half-open.
pub async fn breaker(smg: &Smg, engine: &MockEngine) -> f64 {
    smg.metric("smg_worker_cb_state", &[("worker", &engine.url())]).await
}

/// What `GET /workers` shows of an engine.
pub async fn shown(smg: &Smg, engine: &MockEngine) -> Value {
    let list = smg.get_json("/workers").await;
    list["workers"].as_array().unwrap().iter().find(|worker| worker["url"] == engine.url()).unwrap().clone()
}

/// The error code of a response.
pub fn code(response: &Response) -> String {
    response.headers()["x-smg-error-code"].to_str().unwrap().to_owned()
}

/// A load report of one rank.
pub fn report(waiting: u64, token_usage: f64) -> String {
    let load = json!({"dp_rank": 0, "num_running_reqs": 1, "num_waiting_reqs": waiting, "token_usage": token_usage});
    json!({"timestamp": "0", "version": "0.5", "dp_rank_count": 1, "loads": [load]}).to_string()
}

/// A SGLang engine that always reports this load.
pub async fn reporting(role: Role, waiting: u64, token_usage: f64) -> MockEngine {
    let engine = MockEngine::builder().engine(Engine::Sglang).role(role).model(MODEL);
    engine.override_path("/v1/loads", 200, report(waiting, token_usage)).start().await.unwrap()
}

/// Waits until a gateway has the load report of every engine.
pub async fn until_reported(smg: &Smg, engines: impl IntoIterator<Item = &MockEngine> + Clone) {
    eventually("every engine has reported", || async {
        let metrics = smg.metrics().await;
        let known = |engine: &MockEngine| {
            !samples(&metrics, "smg_engine_running_requests", &[("worker", &engine.url())]).is_empty()
        };
        engines.clone().into_iter().all(known).then_some(())
    })
    .await;
}
