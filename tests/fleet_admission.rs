//! Several gateways before the same decode engines: together they never send more than the engines run, whoever dies, freezes or is cut off,
//! and what nobody uses goes to whoever needs it.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod support;

use std::time::Duration;

use mock_engine::Builder;
use reqwest::StatusCode;
use serde_json::json;
use support::cluster::*;
use support::*;

const CHAT: &str = "/v1/chat/completions";
/// Requests that a decode engine runs at a time.
const WINDOW: usize = 16;

fn engine(role: Role) -> Builder {
    MockEngine::builder().grpc().engine(Engine::Sglang).role(role).model(MODEL)
}

/// Decode engines that take 20 ms for a token.
async fn decodes(count: usize) -> Vec<MockEngine> {
    let mut engines = Vec::new();
    for _ in 0..count {
        let engine = engine(Role::Decode).max_running(WINDOW).token_delay(Duration::from_millis(20));
        engines.push(engine.start().await.unwrap());
    }
    engines
}

fn assert_never_exceeded(engines: &[MockEngine]) {
    for engine in engines {
        assert!(engine.peak_active() <= WINDOW, "{} requests in a window of {WINDOW}", engine.peak_active());
    }
}

/// Waits until a gateway has slots of so many workers.
async fn until_granted(gateway: &Smg, workers: usize) {
    eventually_within(Duration::from_secs(30), &format!("slots; log:\n{}", gateway.log()), || async {
        let granted = samples(&gateway.metrics().await, "smg_gateway_decode_slots", &[("state", "granted")]);
        (granted.values().filter(|slots| **slots > 0.0).count() >= workers).then_some(())
    })
    .await;
}

async fn assert_invariants_held(processes: &[&Smg]) {
    for smg in processes {
        assert_eq!(smg.metric("smg_slot_invariant_failures_total", &[]).await, 0.0, "{}", smg.log());
    }
}

/// Registers engines and waits until every gateway has slots of them.
async fn register(gateways: &[Smg], prefill: &MockEngine, decodes: &[MockEngine]) {
    let mut ids = vec![gateways[0].register(&spec(prefill, "prefill")).await];
    for decode in decodes {
        ids.push(gateways[0].register(&spec(decode, "decode")).await);
    }
    for gateway in gateways {
        for id in &ids {
            gateway.until_healthy(id).await;
        }
        until_granted(gateway, decodes.len()).await;
    }
}

#[tokio::test]
async fn who_starts_without_a_control_plane_serves_what_is_not_shared_and_what_was_its_own() {
    let place = Place::new();
    let mut control_plane = Smg::controlplane(place.directory.path(), place.port(), &[]).await;
    let directory = tempfile::tempdir().unwrap();
    let flags = ["--gateway-id", "a", "--data-dir", directory.path().to_str().unwrap()];
    let mut gateway = Smg::gateway(&place.address(), &flags).await;
    let (prefill, engines) = (engine(Role::Prefill).start().await.unwrap(), decodes(1).await);
    let ungated = [engine(Role::Prefill), engine(Role::Decode)].map(|engine| engine.model("ungated"));
    let [ungated_prefill, ungated_decode] = ungated.map(Builder::start);
    let (ungated_prefill, ungated_decode) = (ungated_prefill.await.unwrap(), ungated_decode.await.unwrap());
    register(std::slice::from_ref(&gateway), &prefill, &engines).await;
    gateway.register_pair(&ungated_prefill, &ungated_decode).await;
    assert_eq!(gateway.post(CHAT, &chat()).await.status(), StatusCode::OK);
    assert_eq!(gateway.metric("smg_gateway_decode_slots", &[("state", "granted")]).await, WINDOW as f64);
    let mut other_model = chat();
    other_model["model"] = json!("ungated");

    // A newcomer knows the fleet and holds nothing.
    control_plane.kill();
    let elsewhere = tempfile::tempdir().unwrap();
    let snapshot = "last-known-good.smgsnap";
    std::fs::copy(directory.path().join(snapshot), elsewhere.path().join(snapshot)).unwrap();
    let flags_elsewhere = ["--gateway-id", "b", "--data-dir", elsewhere.path().to_str().unwrap()];
    let newcomer = Smg::gateway(&place.address(), &flags_elsewhere).await;
    assert_eq!(newcomer.post(CHAT, &other_model).await.status(), StatusCode::OK);
    let shed = newcomer.post(CHAT, &chat()).await;
    assert_eq!(shed.status(), StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(shed.headers()["x-smg-error-code"], "worker_overload_protection_shed");
    assert!(shed.headers().contains_key("retry-after"));

    // One that is started again goes on with what was its own.
    gateway.kill();
    let gateway = Smg::gateway(&place.address(), &flags).await;
    assert_eq!(gateway.post(CHAT, &chat()).await.status(), StatusCode::OK, "{}", gateway.log());
    until_granted(&gateway, 1).await;

    // The control plane finds it to be the same, and loses no slot.
    let control_plane = Smg::controlplane(place.directory.path(), place.port(), &[]).await;
    eventually_within(Duration::from_secs(30), "everybody has a part of the window", || async {
        let granted = control_plane.metric("smg_decode_slots", &[("state", "granted")]).await;
        let zombies = control_plane.metric("smg_decode_slots", &[("state", "zombie")]).await;
        (granted == WINDOW as f64 && zombies == 0.0).then_some(())
    })
    .await;
    until_granted(&newcomer, 1).await;
    assert_eq!(newcomer.post(CHAT, &chat()).await.status(), StatusCode::OK);
    assert_invariants_held(&[&control_plane]).await;
    assert_never_exceeded(&engines);
}
