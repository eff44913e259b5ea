//! Health checks take workers out of rotation and bring them back, and commit nothing but transitions.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use futures::future::join_all;
use mock_engine::{CallFault, Connector, Engine, MockEngine, Role};
use serde_json::{Value, json};
use smg_fleet::{Health, WorkerId};

use crate::testing::{FakeEngine, Plane, eventually};

/// Intervals and timeouts for engines in the same process.
async fn quick() -> Plane {
    let plane = Plane::start();
    let health = json!({"health": {"check_interval_secs": 1, "timeout_secs": 100}});
    assert_eq!(plane.call("PUT", "/fleet/policies/default", Some(health)).await.status, 200);
    plane
}

fn spec(engine: &FakeEngine) -> Value {
    json!({"url": engine.url, "runtime_type": "generic"})
}

async fn becomes(plane: &Plane, id: WorkerId, health: Health) {
    plane.until(health.as_str(), |state| state.worker(id).is_some_and(|worker| worker.health == health)).await;
}

#[tokio::test]
async fn a_worker_leaves_rotation_fails_and_returns_and_only_transitions_are_committed() {
    let (plane, engine) = (quick().await, FakeEngine::start().await);
    let id = plane.register(spec(&engine)).await;
    let before = plane.worker(id).mod_revision;
    let at = engine.asked("/health");
    eventually("probed", || engine.asked("/health") > at + 3).await;
    assert_eq!(plane.worker(id).mod_revision, before, "healthy probes write nothing");

    engine.says("/health", 500, "");
    becomes(&plane, id, Health::NotReady).await;
    assert_eq!(plane.get(&format!("/workers/{id}")).await.body["status"], "not_ready");
    becomes(&plane, id, Health::Failed).await;
    assert_eq!(plane.get(&format!("/workers/{id}")).await.body["status"], "failed");
    engine.says("/health", 200, "");
    becomes(&plane, id, Health::Ready).await;
    assert_eq!(plane.worker(id).mod_revision, before + 3);
    let count = |result| plane.metrics.worker_health_checks.with_label_values(&["regular", result]).get();
    assert!(count("success") >= 5 && count("failure") >= 12);
}

#[tokio::test]
async fn a_worker_may_have_its_own_thresholds_and_a_disabled_probe_means_ready() {
    let (plane, engine) = (quick().await, FakeEngine::start().await);
    let mut body = spec(&engine);
    body["health"] = json!({"failure_threshold": 1});
    let id = plane.register(body).await;
    engine.says("/health", 503, "");
    becomes(&plane, id, Health::NotReady).await;
    plane.call("PUT", "/fleet/policies/default", Some(json!({"health": {"disabled": true}}))).await;
    becomes(&plane, id, Health::Ready).await;
    let quick = json!({"health": {"check_interval_secs": 1, "timeout_secs": 100}});
    plane.call("PUT", "/fleet/policies/default", Some(quick)).await;
    becomes(&plane, id, Health::NotReady).await;
}

#[tokio::test]
async fn when_most_of_the_fleet_fails_at_once_half_of_it_stays() {
    let plane = quick().await;
    let engines = join_all((0..6).map(|_| FakeEngine::start())).await;
    for engine in &engines {
        let mut body = spec(engine);
        body["health"] = json!({"failure_threshold": 1});
        plane.register(body).await;
    }
    engines.iter().for_each(|engine| engine.says("/health", 500, ""));
    eventually("panic", || plane.metrics.health_panic.get() >= 6).await;
    let unready = |state: &smg_state::State| state.workers().filter(|worker| worker.health != Health::Ready).count();
    let state = plane.until("ejected", |state| unready(state) == 3).await;
    assert_eq!(unready(&state), 3);
    engines.iter().for_each(|engine| engine.says("/health", 200, ""));
    plane.until("all back", |state| unready(state) == 0).await;
}

#[tokio::test]
async fn the_prober_follows_the_configured_endpoint_and_key() {
    let (plane, engine) = (quick().await, FakeEngine::start().await);
    let mut body = spec(&engine);
    body["api_key"] = json!("k1");
    let id = plane.register(body).await;
    let health = json!({"health": {"check_interval_secs": 1, "timeout_secs": 100, "endpoint": "/ping"}});
    plane.call("PUT", "/fleet/policies/default", Some(health)).await;
    becomes(&plane, id, Health::NotReady).await;
    engine.says("/ping", 200, "");
    becomes(&plane, id, Health::Ready).await;
    plane.call("PATCH", &format!("/workers/{id}"), Some(json!({"api_key": "k2"}))).await;
    eventually("the new key", || engine.keys().contains(&Some("Bearer k2".to_owned()))).await;
}

async fn nixl_over_grpc() -> MockEngine {
    let engine = MockEngine::builder().engine(Engine::Vllm).role(Role::Prefill).connector(Connector::Nixl).grpc();
    engine.start().await.unwrap()
}

fn prefill(engine: &MockEngine) -> Value {
    json!({"url": engine.url(), "worker_type": "prefill"})
}

#[tokio::test]
async fn an_engine_that_speaks_grpc_says_itself_whether_it_is_well() {
    let (plane, engine) = (quick().await, nixl_over_grpc().await);
    let id = plane.register(prefill(&engine)).await;
    engine.set_healthy(false);
    becomes(&plane, id, Health::NotReady).await;
    engine.set_healthy(true);
    becomes(&plane, id, Health::Ready).await;
}

#[tokio::test]
async fn an_engine_that_was_started_anew_has_its_new_id_before_it_gets_traffic_again() {
    let (plane, engine) = (quick().await, nixl_over_grpc().await);
    let id = plane.register(prefill(&engine)).await;
    assert_eq!(plane.worker(id).kv_engine_id(), Some(&*engine.engine_id()));
    engine.stop().await;
    becomes(&plane, id, Health::NotReady).await;
    engine.restart().await.unwrap();
    let now = engine.engine_id();
    let state = plane.until("ready", |state| state.worker(id).is_some_and(|w| w.health == Health::Ready)).await;
    assert_eq!(state.worker(id).unwrap().kv_engine_id(), Some(&*now));
}

#[tokio::test]
async fn an_engine_that_does_not_say_its_id_keeps_the_old_one_and_is_asked_until_it_does() {
    let (plane, engine) = (quick().await, nixl_over_grpc().await);
    let id = plane.register(prefill(&engine)).await;
    let before = plane.worker(id).kv_engine_id().map(str::to_owned);
    engine.stop().await;
    becomes(&plane, id, Health::NotReady).await;
    engine.set_call_fault(CallFault::method("GetServerInfo").refuse(tonic::Code::Internal, "no"));
    engine.restart().await.unwrap();
    becomes(&plane, id, Health::Ready).await;
    assert_eq!(plane.worker(id).kv_engine_id().map(str::to_owned), before);
    engine.clear_faults();
    let now = engine.engine_id();
    plane.until("confirmed", |state| state.worker(id).is_some_and(|w| w.kv_engine_id() == Some(&*now))).await;
}

#[tokio::test]
async fn a_restart_between_two_probes_is_noticed_by_the_engines_id() {
    let (plane, engine) = (quick().await, nixl_over_grpc().await);
    let id = plane.register(prefill(&engine)).await;
    engine.restart().await.unwrap();
    let now = engine.engine_id();
    plane.until("known", |state| state.worker(id).is_some_and(|w| w.kv_engine_id() == Some(&*now))).await;
}
