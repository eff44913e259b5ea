//! Failures stay with the leg that failed, and a request survives them as long as another pair can serve it.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod support;

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use support::fleet::*;
use support::*;

const CHAT: &str = "/v1/chat/completions";
const SOON: Duration = Duration::from_secs(10);

#[tokio::test]
async fn a_retry_meets_in_a_new_room_under_the_same_request_id() {
    let (smg, prefill, decode) = pair(Dispatch::Parallel, &[]).await;
    prefill.set_fault(Fault::generation().status(503, "{}").times(2));
    assert_eq!(smg.post_as("mine", CHAT, &chat()).await.status(), 200);
    let attempts = prefill.generations();
    assert_eq!(attempts.len(), 3);
    let rooms: BTreeSet<u64> = attempts.iter().map(|leg| leg.json()["bootstrap_room"].as_u64().unwrap()).collect();
    assert_eq!(rooms.len(), 3);
    assert!(attempts.iter().chain(&decode.generations()).all(|leg| leg.header("x-request-id") == Some("mine")));
    let decision = smg.decision("mine").await;
    assert_eq!(decision["attempts"].as_array().unwrap().len(), 3);
    assert_eq!((&decision["outcome"], &decision["status"]), (&json!("completed"), &json!(200)));
    smg.until_idle().await;
}

#[tokio::test]
async fn the_other_leg_of_a_failed_attempt_is_closed_before_the_next_begins() {
    let (smg, prefill, decode) = sglang_pair(&["--retry-initial-backoff-ms", "500"]).await;
    prefill.set_fault(Fault::generation().hang().times(1));
    decode.set_fault(Fault::generation().status(503, "{}").times(1));
    let response = smg.post_as("mine", CHAT, &chat()).await;
    assert_eq!((response.status().as_u16(), &response.headers()["x-request-id"]), (200, &"mine".parse().unwrap()));
    let (prefills, decodes) = (prefill.generations(), decode.generations());
    assert_eq!((prefills.len(), decodes.len()), (2, 2));
    assert!(prefills[0].peer_closed_at.unwrap() <= prefills[1].arrived_at, "the engine still worked for the first");
    let room = |leg: &mock_engine::Recorded| leg.json()["bootstrap_room"].as_u64().unwrap();
    let rooms: Vec<_> = prefills.iter().map(room).collect();
    assert_eq!(rooms, decodes.iter().map(room).collect::<Vec<_>>(), "the legs of an attempt meet in one room");
    assert_ne!(rooms[0], rooms[1]);
}

#[tokio::test]
async fn a_retry_over_mooncake_has_a_transfer_id_of_its_own() {
    let (p, d) = (vllm(Role::Prefill, Connector::Mooncake).await, vllm(Role::Decode, Connector::Mooncake).await);
    let smg = Smg::launch(&FAST).await;
    let declared = json!({"kv_connector": "MooncakeConnector", "kv_engine_id": p.engine_id()});
    smg.register(&spec_with(&p, "prefill", declared)).await;
    smg.register(&spec_with(&d, "decode", json!({"kv_connector": "MooncakeConnector"}))).await;
    d.set_fault(Fault::generation().status(500, "{}").times(1));
    assert_eq!(smg.post(CHAT, &chat()).await.status(), 200);
    for engine in [&p, &d] {
        let ids: BTreeSet<String> = engine
            .generations()
            .iter()
            .map(|leg| leg.json()["kv_transfer_params"]["transfer_id"].as_str().unwrap().to_owned())
            .collect();
        assert_eq!(ids.len(), 2);
    }
}

#[tokio::test]
async fn a_retry_avoids_the_failed_worker_while_others_exist() {
    let fleet = fleet(2, 2, &["--disable-circuit-breaker"]).await;
    for broken in [&fleet.prefills[0], &fleet.decodes[0]] {
        broken.set_fault(Fault::generation().status(500, "{}"));
        for number in 0..8 {
            let id = format!("{}-{number}", broken.port());
            assert_eq!(fleet.smg.post_as(&id, CHAT, &chat()).await.status(), 200);
            let decision = fleet.smg.decision(&id).await;
            let attempts = decision["attempts"].as_array().unwrap();
            let met = |attempt: &&Value| attempt["prefill"] == broken.url() || attempt["decode"] == broken.url();
            assert!(attempts.iter().filter(met).count() <= 1, "{decision}");
            assert!(attempts.len() <= 2, "{decision}");
        }
        broken.clear_faults();
    }
}

#[tokio::test]
async fn a_retry_takes_another_pair_when_the_failed_worker_is_the_only_one() {
    let fleet = fleet(1, 2, &[]).await;
    fleet.prefills[0].set_fault(Fault::generation().status(500, "{}").times(1));
    assert_eq!(fleet.smg.post_as("r", CHAT, &chat()).await.status(), 200);
    let decision = fleet.smg.decision("r").await;
    assert_ne!(decision["attempts"][0]["decode"], decision["attempts"][1]["decode"]);
}

#[tokio::test]
async fn an_engines_refusal_reaches_the_client_as_it_is_and_is_neither_retried_nor_charged() {
    for dispatch in PAIRS {
        let (smg, prefill, decode) = pair(dispatch, &["--cb-failure-threshold", "3"]).await;
        for (leg, engine) in [("prefill", &prefill), ("decode", &decode)] {
            for status in [400, 401, 404, 413, 422] {
                for body in [chat(), chat_stream(), chat(), chat_stream()] {
                    let refusal = format!("{{ \"detail\": [\"{leg} says {status}\"], \"ü\":1 }}\n");
                    let fault = Fault::generation()
                        .status(status, refusal.clone())
                        .header("content-type", "application/problem+json");
                    engine.set_fault(fault.header("x-smg-error-code", "forged"));
                    let before = engine.generation_count();
                    let response = smg.post(CHAT, &body).await;
                    assert_eq!(response.status(), status, "{dispatch:?} {leg}");
                    assert_eq!(code(&response), expected_code(dispatch, leg, status));
                    assert_eq!(response.headers()["content-type"], "application/problem+json");
                    assert_eq!(response.headers()["content-length"], refusal.len().to_string());
                    assert_eq!(response.bytes().await.unwrap(), refusal);
                    assert_eq!(engine.generation_count(), before + 1, "{dispatch:?} {leg} {status} was tried again");
                    engine.clear_faults();
                }
            }
        }
        for engine in [&prefill, &decode] {
            assert_eq!((failures(&smg, engine).await, breaker(&smg, engine).await), (0.0, 0.0));
        }
        assert_eq!(smg.post(CHAT, &chat()).await.status(), 200, "{dispatch:?}");
        assert_eq!(smg.metric("smg_worker_retries_total", &[]).await, 0.0);
        smg.until_idle().await;
    }
}

fn expected_code(dispatch: Dispatch, leg: &str, status: u16) -> String {
    if dispatch == Dispatch::Sequential && leg == "prefill" {
        return "prefill_upstream_error".to_owned();
    }
    let suffix = match status {
        400 => "bad_request",
        404 => "not_found",
        _ => "error",
    };
    format!("{leg}_{suffix}")
}

#[tokio::test]
async fn a_full_engine_is_tried_again_and_not_charged() {
    for dispatch in PAIRS {
        let (smg, prefill, decode) = pair(dispatch, &["--cb-failure-threshold", "1"]).await;
        for engine in [&prefill, &decode] {
            engine.set_fault(Fault::generation().status(429, "{}").times(1));
            assert_eq!(smg.post(CHAT, &chat()).await.status(), 200, "{dispatch:?}");
            assert_eq!(failures(&smg, engine).await, 0.0);
            assert_eq!(breaker(&smg, engine).await, 0.0);
        }
        assert_eq!(smg.metric("smg_worker_retries_total", &[("endpoint", "chat")]).await, 2.0);
        assert_eq!(smg.metric("smg_worker_retries_exhausted_total", &[]).await, 0.0);
        prefill.set_fault(Fault::generation().status(429, r#"{"busy":true}"#));
        let response = smg.post(CHAT, &chat()).await;
        assert_eq!((response.status().as_u16(), code(&response)), (429, refused_as(dispatch, "prefill")));
        assert_eq!(response.text().await.unwrap(), r#"{"busy":true}"#);
        assert_eq!(failures(&smg, &prefill).await, 0.0);
    }
}

fn refused_as(dispatch: Dispatch, leg: &str) -> String {
    expected_code(dispatch, leg, 429)
}

#[tokio::test]
async fn exhausted_retries_answer_with_the_engines_own_error_and_are_counted() {
    let (smg, prefill, _decode) = pair(Dispatch::Sequential, &["--retry-max-retries", "3"]).await;
    prefill.set_fault(Fault::generation().status(503, r#"{"error":"busy"}"#));
    let response = smg.post(CHAT, &chat()).await;
    assert_eq!((response.status().as_u16(), code(&response).as_str()), (503, "prefill_upstream_error"));
    assert_eq!(response.text().await.unwrap(), r#"{"error":"busy"}"#);
    assert_eq!(prefill.generation_count(), 3);
    let labels = [("endpoint", "chat")];
    assert_eq!(smg.metric("smg_worker_retries_total", &labels).await, 2.0);
    assert_eq!(smg.metric("smg_worker_retries_exhausted_total", &labels).await, 1.0);
    for attempt in ["1", "2"] {
        assert_eq!(smg.metric("smg_worker_retry_backoff_seconds_count", &[("attempt", attempt)]).await, 1.0);
    }
}

#[tokio::test]
async fn a_registration_decides_how_often_requests_for_its_model_are_tried() {
    let (prefill, decode) = (sglang(Role::Prefill).await, sglang(Role::Decode).await);
    decode.set_fault(Fault::path(CHAT).status(500, "{}"));
    for (resilience, attempts) in [(json!({"max_retries": 2}), 2), (json!({"disable_retry": true}), 1), (json!({}), 3)]
    {
        let smg = Smg::launch(&["--retry-initial-backoff-ms", "1", "--retry-max-retries", "3"]).await;
        smg.register(&spec_with(&prefill, "prefill", json!({"resilience": resilience}))).await;
        smg.register(&spec(&decode, "decode")).await;
        let before = decode.generation_count();
        assert_eq!(smg.post(CHAT, &chat()).await.status(), 500);
        assert_eq!(decode.generation_count() - before, attempts, "{resilience}");
    }
}

#[tokio::test]
async fn nothing_is_tried_again_after_the_first_byte() {
    for dispatch in PAIRS {
        let (smg, prefill, decode) = pair(dispatch, &[]).await;
        decode.set_fault(Fault::generation().reset_after_events(2));
        let response = smg.post(CHAT, &chat_stream()).await;
        assert_eq!(response.status(), 200);
        let text = response.text().await.unwrap();
        assert!(text.contains("stream_error") && text.ends_with("data: [DONE]\n\n"), "{text}");
        assert_eq!((prefill.generation_count(), decode.generation_count()), (1, 1));
        smg.until_idle().await;
        assert_eq!((failures(&smg, &prefill).await, failures(&smg, &decode).await), (0.0, 1.0), "{dispatch:?}");
    }
}

#[tokio::test]
async fn a_refusal_by_prefill_does_not_wait_for_a_silent_decode() {
    let (smg, prefill, decode) = pair(Dispatch::Parallel, &[]).await;
    decode.set_fault(Fault::generation().hang());
    let refusal = Fault::generation().status(400, r#"{"message":"no"}"#);
    prefill.set_fault(refusal.delay_head(Duration::from_millis(50)));
    let closed = |engine: &MockEngine| engine.generations().iter().all(|leg| leg.peer_closed_at.is_some());
    let (mut all_answered, mut all_closed) = (Vec::new(), Vec::new());
    for body in [chat(), chat_stream()] {
        let asked = Instant::now();
        let response = smg.post(CHAT, &body).await;
        assert_eq!((response.status().as_u16(), code(&response).as_str()), (400, "prefill_bad_request"));
        assert_eq!(response.text().await.unwrap(), r#"{"message":"no"}"#);
        let answered = Instant::now();
        all_answered.push(answered - asked);
        decode.wait_until(SOON, closed).await.unwrap();
        let closed_at = decode.generations().pop().unwrap().peer_closed_at.unwrap();
        all_closed.push(closed_at.saturating_duration_since(answered));
    }
    let second = Duration::from_secs(1);
    assert!(
        best(all_answered.clone()) < second && best(all_closed.clone()) < second,
        "{all_answered:?} {all_closed:?}"
    );
    assert_eq!((failures(&smg, &prefill).await, failures(&smg, &decode).await), (0.0, 0.0));
    assert_eq!((prefill.generation_count(), smg.metric("smg_worker_retries_total", &[]).await), (2, 0.0));

    // A failure is tried again, and the last one answers.
    smg.set_policy("default", &json!({"retry": {"max_retries": 2, "initial_backoff_ms": 1}})).await;
    prefill.clear_faults();
    prefill.set_fault(Fault::generation().status(500, r#"{"message":"broken"}"#));
    let response = smg.post(CHAT, &chat_stream()).await;
    assert_eq!((response.status().as_u16(), code(&response).as_str()), (500, "prefill_internal_error"));
    assert_eq!(response.text().await.unwrap(), r#"{"message":"broken"}"#);
    assert_eq!((prefill.generation_count(), failures(&smg, &decode).await), (4, 0.0));
    decode.wait_until(SOON, closed).await.unwrap();
    smg.until_idle().await;
}

#[tokio::test]
async fn a_refusal_by_decode_closes_the_prefill_leg() {
    let (smg, prefill, decode) = pair(Dispatch::Parallel, &[]).await;
    prefill.set_fault(Fault::generation().hang());
    decode.set_fault(Fault::generation().status(422, "{}"));
    let asked = Instant::now();
    assert_eq!(smg.post(CHAT, &chat()).await.status(), 422);
    assert!(asked.elapsed() < Duration::from_secs(1), "{:?}", asked.elapsed());
    let closed = |engine: &MockEngine| engine.generations().iter().all(|leg| leg.peer_closed_at.is_some());
    prefill.wait_until(SOON, closed).await.unwrap();
    smg.until_idle().await;
}
