//! Routing policies: how each spreads traffic over a leg, and how documents change them while requests are served.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod support;

use reqwest::StatusCode;
use serde_json::{Value, json};
use support::*;

const CHAT: &str = "/v1/chat/completions";

/// A gateway over SGLang prefills and decodes of one model.
struct Fleet {
    smg: Smg,
    prefills: Vec<MockEngine>,
    decodes: Vec<MockEngine>,
}

async fn engines(smg: &Smg, model: &str, role: Role, worker_type: &str, count: usize) -> Vec<MockEngine> {
    let mut engines = Vec::new();
    for _ in 0..count {
        let engine = silent(role, model).await;
        smg.register(&spec(&engine, worker_type)).await;
        engines.push(engine);
    }
    engines
}

async fn fleet(prefills: usize, decodes: usize, flags: &[&str]) -> Fleet {
    let smg = Smg::launch(flags).await;
    let prefills = engines(&smg, MODEL, Role::Prefill, "prefill", prefills).await;
    let decodes = engines(&smg, MODEL, Role::Decode, "decode", decodes).await;
    Fleet { smg, prefills, decodes }
}

fn counts(engines: &[MockEngine]) -> Vec<u64> {
    engines.iter().map(MockEngine::generation_count).collect()
}

async fn serve(smg: &Smg, requests: usize) {
    for _ in 0..requests {
        assert_eq!(smg.post(CHAT, &chat()).await.status(), 200);
    }
}

async fn selections(smg: &Smg, worker_type: &str, policy: &str, model: &str) -> f64 {
    let labels = [("worker_type", worker_type), ("policy", policy), ("model", model), ("connection_mode", "http")];
    smg.metric("smg_worker_selection_total", &labels).await
}

#[tokio::test]
async fn round_robin_is_even_on_each_leg() {
    let fleet = fleet(3, 2, &["--policy", "round_robin"]).await;
    serve(&fleet.smg, 12).await;
    assert_eq!(counts(&fleet.prefills), [4, 4, 4]);
    assert_eq!(counts(&fleet.decodes), [6, 6]);
    assert_eq!(selections(&fleet.smg, "prefill", "round_robin", MODEL).await, 12.0);
    assert_eq!(selections(&fleet.smg, "decode", "round_robin", MODEL).await, 12.0);
}

#[tokio::test]
async fn round_robin_is_even_over_regular_workers() {
    let smg = Smg::launch(&["--policy", "round_robin"]).await;
    let engines = engines(&smg, MODEL, Role::Regular, "regular", 3).await;
    serve(&smg, 9).await;
    assert_eq!(counts(&engines), [3, 3, 3]);
}

#[tokio::test]
async fn random_reaches_every_worker() {
    let fleet = fleet(2, 2, &["--policy", "random"]).await;
    // A worker that is never picked in 40 draws of two is a chance of one in a million million.
    serve(&fleet.smg, 40).await;
    for engines in [&fleet.prefills, &fleet.decodes] {
        assert!(counts(engines).iter().all(|count| *count > 0), "{:?}", counts(engines));
    }
    assert_eq!(selections(&fleet.smg, "prefill", "random", MODEL).await, 40.0);
    assert_eq!(selections(&fleet.smg, "decode", "random", MODEL).await, 40.0);
}

#[tokio::test]
async fn power_of_two_goes_to_the_less_loaded_worker() {
    let fleet = fleet(2, 2, &["--policy", "power_of_two"]).await;
    for decode in &fleet.decodes {
        decode.set_fault(Fault::generation().hang().times(1));
    }
    let hanging = tokio::spawn(fleet.smg.client.post(format!("{}{CHAT}", fleet.smg.url)).json(&chat()).send());
    eventually("both legs are busy", || async {
        let busy = |engines: &[MockEngine]| engines.iter().any(|engine| engine.generation_count() == 1);
        (busy(&fleet.prefills) && busy(&fleet.decodes)).then_some(())
    })
    .await;
    fleet.decodes.iter().for_each(MockEngine::clear_faults);
    serve(&fleet.smg, 8).await;
    for engines in [&fleet.prefills, &fleet.decodes] {
        let mut counts = counts(engines);
        counts.sort_unstable();
        assert_eq!(counts, [1, 8]);
    }
    hanging.abort();
    let _ = hanging.await;
    fleet.smg.until_idle().await;
}

#[tokio::test]
async fn each_leg_has_its_own_policy() {
    let flags = ["--prefill-policy", "random", "--decode-policy", "power_of_two", "--enable-igw"];
    let fleet = fleet(1, 1, &flags).await;
    serve(&fleet.smg, 1).await;
    assert_eq!(selections(&fleet.smg, "prefill", "random", MODEL).await, 1.0);
    assert_eq!(selections(&fleet.smg, "decode", "power_of_two", MODEL).await, 1.0);
}

#[tokio::test]
async fn a_model_with_a_document_of_its_own_leaves_the_others_alone() {
    let smg = Smg::launch(&[]).await;
    let mut kept = Vec::new();
    for model in ["one", "two"] {
        kept.extend(engines(&smg, model, Role::Prefill, "prefill", 1).await);
        kept.extend(engines(&smg, model, Role::Decode, "decode", 1).await);
    }
    smg.set_policy("two", &json!({"prefill_policy": "random"})).await;
    for model in ["one", "two"] {
        let mut body = chat();
        body["model"] = json!(model);
        assert_eq!(smg.post(CHAT, &body).await.status(), 200);
    }
    assert_eq!(selections(&smg, "prefill", "cache_aware", "one").await, 1.0);
    assert_eq!(selections(&smg, "prefill", "random", "two").await, 1.0);
    assert_eq!(selections(&smg, "decode", "cache_aware", "two").await, 1.0);
}

#[tokio::test]
async fn a_written_document_holds_for_the_next_request() {
    let fleet = fleet(1, 1, &["--policy", "random"]).await;
    let smg = &fleet.smg;
    let policies = || async {
        smg.post_as("asked", CHAT, &chat()).await.bytes().await.unwrap();
        let attempt = smg.decision("asked").await["attempts"][0].clone();
        [attempt["prefill_policy"].clone(), attempt["decode_policy"].clone()]
    };
    assert_eq!(policies().await, ["random", "random"]);
    smg.set_policy("default", &json!({"policy": "power_of_two"})).await;
    assert_eq!(policies().await, ["power_of_two", "power_of_two"]);
    smg.set_policy(MODEL, &json!({"decode_policy": "round_robin"})).await;
    assert_eq!(policies().await, ["power_of_two", "round_robin"]);
    let deleted = smg.client.delete(format!("{}/fleet/policies/{MODEL}", smg.url)).send().await.unwrap();
    assert_eq!(deleted.status(), StatusCode::NO_CONTENT);
    assert_eq!(policies().await, ["power_of_two", "power_of_two"]);
}

#[tokio::test]
async fn of_two_writers_who_read_the_same_document_one_is_told() {
    let smg = Smg::launch(&[]).await;
    let path = format!("{}/fleet/policies/default", smg.url);
    let read = smg.get("/fleet/policies/default").await;
    let tag = read.headers()["etag"].to_str().unwrap().to_owned();
    let write = |policy: &str| smg.client.put(&path).header("if-match", &tag).json(&json!({"policy": policy})).send();
    assert_eq!(write("random").await.unwrap().status(), 200);
    let late = write("power_of_two").await.unwrap();
    assert_eq!(late.status(), StatusCode::PRECONDITION_FAILED);
    assert_eq!(late.json::<Value>().await.unwrap()["code"], "REVISION_CONFLICT");
    let document = smg.get_json("/fleet/policies/default").await;
    assert_eq!(document["document"]["policy"], "random");
}

#[tokio::test]
async fn documents_that_cannot_hold_are_refused_and_change_nothing() {
    let smg = Smg::launch(&[]).await;
    let before = smg.get_json("/fleet/policies/default").await;
    for document in [
        json!({"polcy": "random"}),
        json!({"retry": {"attempts": 3}}),
        json!({"policy": "fastest"}),
        json!({"policy": "bucket"}),
        json!({"decode_policy": "bucket"}),
        json!({"cache_aware": {"cache_threshold": 2}}),
        json!({"least_load": {"weight": 1}}),
        json!({"manual": {"assignment_mode": "first"}}),
        json!({"retry": {"max_retries": 0}}),
        json!({"circuit_breaker": {"failure_threshold": 0}}),
        json!([]),
        json!({"retry": [3]}),
    ] {
        let request = smg.client.put(format!("{}/fleet/policies/default", smg.url)).json(&document);
        let response = request.send().await.unwrap();
        assert_eq!(response.status(), 400, "{document}");
        assert_eq!(response.json::<Value>().await.unwrap()["code"], "BAD_REQUEST");
    }
    assert_eq!(smg.get_json("/fleet/policies/default").await, before);
    assert_eq!(smg.get("/fleet/policies/nobody").await.status(), 404);
}

#[tokio::test]
async fn a_start_with_a_policy_that_cannot_run_is_refused() {
    for flags in [
        &["--decode-policy", "bucket"][..],
        &["--policy", "bucket"],
        &["--policy", "fastest"],
        &["--prefill-policy", "power_of_two", "--prefill", "http://127.0.0.1:1"],
    ] {
        let mut arguments = vec!["launch", "--pd-disaggregation"];
        arguments.extend(flags);
        let mut smg = Smg::spawn(&arguments, free_port(), &[]);
        assert_eq!(smg.exited().await.code(), Some(64), "{flags:?}");
        assert!(smg.log().contains(flags[0]), "{}", smg.log());
    }
}

#[tokio::test]
async fn a_policy_this_version_lacks_is_refused_by_name_in_documents_and_at_start() {
    let smg = Smg::launch(&[]).await;
    let name = "passthrough";
    let request = smg.client.put(format!("{}/fleet/policies/{MODEL}", smg.url)).json(&json!({"policy": name}));
    let response = request.send().await.unwrap();
    assert_eq!(response.status(), StatusCode::BAD_REQUEST);
    assert!(response.text().await.unwrap().contains(name));
    let mut refused = Smg::spawn(&["launch", "--pd-disaggregation", "--policy", name], free_port(), &[]);
    assert_eq!(refused.exited().await.code(), Some(64));
    assert!(refused.log().contains(name), "{}", refused.log());
}
