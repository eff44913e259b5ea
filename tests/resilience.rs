//! Failures stay with the leg that failed, and a request survives them as long as another pair can serve it.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod support;

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use support::*;

const CHAT: &str = "/v1/chat/completions";
const SOON: Duration = Duration::from_secs(10);
/// Retries without a wait worth noticing.
const FAST: [&str; 4] = ["--retry-initial-backoff-ms", "1", "--retry-max-backoff-ms", "5"];

/// A gateway over SGLang prefills and decodes.
struct Fleet {
    smg: Smg,
    prefills: Vec<MockEngine>,
    decodes: Vec<MockEngine>,
}

async fn fleet(prefills: usize, decodes: usize, flags: &[&str]) -> Fleet {
    let mut all = FAST.to_vec();
    all.extend(flags);
    let mut fleet = Fleet { smg: Smg::launch(&all).await, prefills: Vec::new(), decodes: Vec::new() };
    for _ in 0..prefills {
        let engine = sglang(Role::Prefill).await;
        fleet.smg.register(&spec(&engine, "prefill")).await;
        fleet.prefills.push(engine);
    }
    for _ in 0..decodes {
        let engine = sglang(Role::Decode).await;
        fleet.smg.register(&spec(&engine, "decode")).await;
        fleet.decodes.push(engine);
    }
    fleet
}

/// A pair under each kind of dispatch, with these flags.
async fn pair(dispatch: Dispatch, flags: &[&str]) -> (Smg, MockEngine, MockEngine) {
    let mut all = FAST.to_vec();
    all.extend(flags);
    let serving = Serving::start(dispatch, &all).await;
    (serving.smg, serving.prefill.unwrap(), serving.output)
}

const PAIRS: [Dispatch; 2] = [Dispatch::Parallel, Dispatch::Sequential];

async fn failures(smg: &Smg, engine: &MockEngine) -> f64 {
    smg.metric("smg_worker_cb_outcomes_total", &[("worker", &engine.url()), ("outcome", "failure")]).await
}

async fn breaker(smg: &Smg, engine: &MockEngine) -> f64 {
    smg.metric("smg_worker_cb_state", &[("worker", &engine.url())]).await
}

/// What `GET /workers` shows of an engine.
async fn shown(smg: &Smg, engine: &MockEngine) -> Value {
    let list = smg.get_json("/workers").await;
    list["workers"].as_array().unwrap().iter().find(|worker| worker["url"] == engine.url()).unwrap().clone()
}

fn code(response: &reqwest::Response) -> String {
    response.headers()["x-smg-error-code"].to_str().unwrap().to_owned()
}

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
async fn a_broken_worker_costs_a_few_attempts_and_no_request_whatever_the_policy() {
    let policies = [
        "random",
        "round_robin",
        "power_of_two",
        "least_load",
        "cache_aware",
        "prefix_hash",
        "consistent_hashing",
        "manual",
    ];
    let smg = Smg::launch(&[&FAST[..], &["--retry-max-retries", "2", "--cb-failure-threshold", "3"]].concat()).await;
    futures::future::join_all(policies.map(async |policy| {
        let start = |role| MockEngine::builder().engine(Engine::Sglang).role(role).model(policy).start();
        let prefill = start(Role::Prefill).await.unwrap();
        let (broken, good) = (start(Role::Decode).await.unwrap(), start(Role::Decode).await.unwrap());
        smg.register(&spec(&prefill, "prefill")).await;
        for decode in [&broken, &good] {
            smg.register(&spec(decode, "decode")).await;
        }
        smg.set_policy(policy, &json!({"policy": policy})).await;
        prefill.set_fault(anything());
        broken.set_fault(Fault::generation().status(500, "{}"));
        good.set_fault(anything());
        for number in 0..100 {
            let prompt = format!("{number} of many prompts that have nothing in common");
            let body = json!({"model": policy, "messages": [{"role": "user", "content": prompt}], "max_tokens": 1});
            let request = smg.client.post(format!("{}{CHAT}", smg.url)).json(&body);
            let request = request.header("x-smg-routing-key", number.to_string());
            assert_eq!(request.send().await.unwrap().status(), 200, "{policy}");
        }
        let visits = broken.generations();
        assert!((1..=3).contains(&visits.len()), "{policy}: the broken worker was asked {} times", visits.len());
        let requests: BTreeSet<_> = visits.iter().map(|visit| visit.header("x-request-id").unwrap()).collect();
        assert_eq!(requests.len(), visits.len(), "{policy}: a request came back to it");
        assert_eq!((good.generation_count(), breaker(&smg, &broken).await), (100, 1.0), "{policy}");
    }))
    .await;
}

#[tokio::test]
async fn of_a_crowd_a_half_open_worker_gets_its_trial_and_the_others_the_rest() {
    const CROWD: u64 = 50;
    let flags = ["--cb-failure-threshold", "1", "--cb-success-threshold", "1", "--cb-timeout-duration-secs", "1"];
    let fleet = fleet(1, 2, &[&flags[..], &["--policy", "round_robin"]].concat()).await;
    let (smg, weak, strong) = (&fleet.smg, &fleet.decodes[0], &fleet.decodes[1]);
    fleet.prefills[0].set_fault(anything());
    strong.set_fault(anything());
    weak.set_fault(Fault::generation().status(500, "{}").times(1));
    weak.set_fault(Fault::generation().hang());
    while breaker(smg, weak).await == 0.0 {
        assert_eq!(smg.post(CHAT, &chat()).await.status(), 200);
    }
    assert_eq!(weak.generation_count(), 1);
    // One crowd after the other until the breaker's time is over: of that crowd, one request tries the worker, and hangs.
    let trial = eventually("a trial", || async {
        let before = strong.generation_count();
        let ask = |_| tokio::spawn(smg.client.post(format!("{}{CHAT}", smg.url)).json(&chat()).send());
        let crowd: Vec<_> = (0..CROWD).map(ask).collect();
        eventually("the crowd is placed", || async {
            (strong.generation_count() - before + weak.generation_count() > CROWD).then_some(())
        })
        .await;
        (weak.generation_count() > 1).then_some(crowd)
    })
    .await;
    assert_eq!((weak.generation_count(), breaker(smg, weak).await), (2, 2.0), "one trial at a time");
    let mut answered = 0;
    for request in trial {
        let finished = tokio::time::timeout(Duration::from_millis(if answered == 0 { 5000 } else { 500 }), request);
        match finished.await {
            Ok(answer) => {
                assert_eq!(answer.unwrap().unwrap().status(), 200);
                answered += 1;
            }
            Err(_) => assert_eq!(weak.active(), 1),
        }
    }
    assert_eq!(answered, CROWD - 1);
    assert_eq!(weak.generation_count(), 2);
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
                for body in [chat(), chat_stream()] {
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
async fn a_failed_prefill_never_charges_the_decode_breaker_nor_a_failed_decode_the_prefills() {
    for dispatch in PAIRS {
        let (smg, prefill, decode) = pair(dispatch, &["--disable-retries", "--cb-failure-threshold", "100"]).await;
        for fault in [
            Fault::generation().status(500, "{}"),
            Fault::generation().status(503, "{}"),
            Fault::generation().reset_unanswered(),
        ] {
            for (failing, other) in [(&prefill, &decode), (&decode, &prefill)] {
                let before = (failures(&smg, failing).await, failures(&smg, other).await);
                failing.set_fault(fault.clone());
                assert!(smg.post(CHAT, &chat()).await.status().is_server_error());
                smg.until_idle().await;
                let after = (failures(&smg, failing).await, failures(&smg, other).await);
                assert_eq!(after, (before.0 + 1.0, before.1), "{dispatch:?} {fault:?}");
                failing.clear_faults();
            }
        }
    }
}

#[tokio::test]
async fn a_breaker_opens_tries_a_few_and_closes() {
    let flags = ["--disable-retries", "--cb-failure-threshold", "3", "--cb-success-threshold", "2"];
    let mut all = flags.to_vec();
    all.extend(["--cb-timeout-duration-secs", "1"]);
    let (smg, prefill, _decode) = pair(Dispatch::Sequential, &all).await;
    prefill.set_fault(Fault::generation().status(500, "{}").times(3));
    for _ in 0..3 {
        assert_eq!(smg.post(CHAT, &chat()).await.status(), 500);
    }
    assert_eq!(breaker(&smg, &prefill).await, 1.0);
    let refused = smg.post(CHAT, &chat()).await;
    assert_eq!((refused.status().as_u16(), code(&refused).as_str()), (503, "no_available_workers"));
    assert_eq!(refused.headers()["retry-after"], "1");
    let message = refused.text().await.unwrap();
    assert!(message.contains("prefill"), "{message}");
    assert_eq!(prefill.generation_count(), 3);

    // Half-open: as many at a time as successes are needed.
    prefill.set_fault(Fault::generation().hang().times(2));
    let ask = || tokio::spawn(smg.client.post(format!("{}{CHAT}", smg.url)).json(&chat()).send());
    let trials = eventually("the breaker lets requests through again", || async {
        let trial = ask();
        let hangs = prefill.wait_for_generations(4, Duration::from_millis(100)).await.is_ok();
        if !hangs {
            assert_eq!(trial.await.unwrap().unwrap().status(), 503);
        }
        hangs.then_some(())
    });
    trials.await;
    assert_eq!(breaker(&smg, &prefill).await, 2.0);
    let second = ask();
    prefill.wait_for_generations(5, SOON).await.unwrap();
    for _ in 0..3 {
        assert_eq!(code(&smg.post(CHAT, &chat()).await), "no_available_workers");
    }
    assert_eq!(prefill.generation_count(), 5);
    // A client that leaves says nothing about the worker; its place is free again.
    second.abort();
    eventually("the place is free", || async { (smg.post(CHAT, &chat()).await.status() == 200).then_some(()) }).await;
    assert_eq!(breaker(&smg, &prefill).await, 2.0);
    assert_eq!(smg.post(CHAT, &chat()).await.status(), 200);
    assert_eq!(breaker(&smg, &prefill).await, 0.0);
    let transition = |from, to| [("from", from), ("to", to)];
    for (from, to) in [("closed", "open"), ("open", "half_open"), ("half_open", "closed")] {
        assert_eq!(smg.metric("smg_worker_cb_transitions_total", &transition(from, to)).await, 1.0, "{from} {to}");
    }
}

#[tokio::test]
async fn one_failure_opens_a_half_open_breaker_again() {
    let mut flags = vec!["--disable-retries", "--cb-failure-threshold", "1"];
    flags.extend(["--cb-timeout-duration-secs", "1"]);
    let (smg, _prefill, decode) = pair(Dispatch::Parallel, &flags).await;
    decode.set_fault(Fault::generation().status(500, "{}").times(2));
    assert_eq!(smg.post(CHAT, &chat()).await.status(), 500);
    let refused = smg.post(CHAT, &chat()).await;
    assert!(refused.text().await.unwrap().contains("decode"), "the message names the leg");
    eventually("a trial", || async { (smg.post(CHAT, &chat()).await.status() == 500).then_some(()) }).await;
    assert_eq!(breaker(&smg, &decode).await, 1.0);
    eventually("the next trial", || async { (smg.post(CHAT, &chat()).await.status() == 200).then_some(()) }).await;
}

#[tokio::test]
async fn no_request_fails_while_a_dead_worker_has_a_substitute() {
    let fleet = fleet(2, 2, &["--health-check-interval-secs", "3600", "--policy", "round_robin"]).await;
    let smg = &fleet.smg;
    for dead in [&fleet.prefills[0], &fleet.decodes[1]] {
        for _ in 0..4 {
            assert_eq!(smg.post(CHAT, &chat()).await.status(), 200);
        }
        dead.stop().await;
        for _ in 0..8 {
            assert_eq!(smg.post(CHAT, &chat()).await.status(), 200);
        }
        let worker = shown(smg, dead).await;
        assert_eq!((&worker["stalled"], &worker["is_healthy"]), (&json!("unreachable"), &json!(false)));
        let id = format!("without-{}", dead.port());
        smg.post_as(&id, CHAT, &chat()).await.bytes().await.unwrap();
        let decision = smg.decision(&id).await;
        assert_eq!(decision["attempts"][0]["excluded"], json!([{"worker": dead.url(), "reason": "unreachable"}]));
        assert_eq!(decision["attempts"].as_array().unwrap().len(), 1);
        let ejections = [("worker", dead.url())];
        let ejections = ejections.each_ref().map(|(name, url)| (*name, url.as_str()));
        assert_eq!(smg.metric("smg_worker_stall_transitions_total", &ejections).await, 1.0);

        let before = dead.generation_count();
        dead.start_again().await.unwrap();
        eventually("it is back", || async { (shown(smg, dead).await["is_healthy"] == true).then_some(()) }).await;
        for _ in 0..4 {
            assert_eq!(smg.post(CHAT, &chat()).await.status(), 200);
        }
        assert!(dead.generation_count() > before);
    }
    smg.until_idle().await;
}

#[tokio::test]
async fn a_leg_whose_only_worker_is_gone_is_named_with_the_time_to_come_back() {
    let fleet = fleet(1, 1, &["--disable-retries", "--health-check-interval-secs", "3600"]).await;
    let smg = &fleet.smg;
    for (leg, other, engine) in [("decode", "prefill", &fleet.decodes[0]), ("prefill", "decode", &fleet.prefills[0])] {
        engine.stop().await;
        let first = smg.post(CHAT, &chat()).await;
        assert_eq!((first.status().as_u16(), code(&first)), (502, format!("{leg}_request_failed")));
        let second = smg.post(CHAT, &chat()).await;
        assert_eq!((second.status().as_u16(), code(&second).as_str()), (503, "no_available_workers"));
        assert_eq!(second.headers()["retry-after"], "1");
        let message = second.text().await.unwrap();
        assert!(message.contains(leg) && !message.contains(other), "{message}");
        assert_eq!(smg.get("/readiness").await.status(), 503);
        engine.start_again().await.unwrap();
        eventually("it is back", || async { (shown(smg, engine).await["is_healthy"] == true).then_some(()) }).await;
        assert_eq!(smg.get("/readiness").await.status(), 200);
    }
}

#[tokio::test]
async fn an_empty_leg_is_named() {
    let smg = Smg::launch(&[]).await;
    let prefill = sglang(Role::Prefill).await;
    smg.register(&spec(&prefill, "prefill")).await;
    let response = smg.post(CHAT, &chat()).await;
    assert_eq!((response.status().as_u16(), code(&response).as_str()), (503, "no_available_workers"));
    assert_eq!(response.headers()["retry-after"], "1");
    assert!(response.text().await.unwrap().contains("No decode workers available"));
    assert_eq!(prefill.generation_count(), 0);
}

#[tokio::test]
async fn probes_take_a_worker_out_of_rotation_and_bring_it_back() {
    let mut flags = vec!["--health-check-interval-secs", "1", "--health-failure-threshold", "1"];
    flags.extend(["--health-success-threshold", "1", "--policy", "round_robin"]);
    let fleet = fleet(1, 2, &flags).await;
    let (smg, sick) = (&fleet.smg, &fleet.decodes[0]);
    sick.set_fault(Fault::health().status(500, "{}"));
    eventually("it is not ready", || async { (shown(smg, sick).await["status"] == "not_ready").then_some(()) }).await;
    let before = sick.generation_count();
    for _ in 0..4 {
        assert_eq!(smg.post(CHAT, &chat()).await.status(), 200);
    }
    assert_eq!(sick.generation_count(), before);
    sick.clear_faults();
    eventually("it is ready", || async { (shown(smg, sick).await["status"] == "ready").then_some(()) }).await;
    for _ in 0..2 {
        assert_eq!(smg.post(CHAT, &chat()).await.status(), 200);
    }
    assert_eq!(sick.generation_count(), before + 1);
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
    prefill.set_fault(Fault::generation().status(400, r#"{"message":"no"}"#));
    for body in [chat(), chat_stream()] {
        let asked = Instant::now();
        let response = smg.post(CHAT, &body).await;
        assert_eq!((response.status().as_u16(), code(&response).as_str()), (400, "prefill_bad_request"));
        assert_eq!(response.text().await.unwrap(), r#"{"message":"no"}"#);
        assert!(asked.elapsed() < Duration::from_secs(1), "{:?}", asked.elapsed());
    }
    let closed = |engine: &MockEngine| engine.generations().iter().all(|leg| leg.peer_closed_at.is_some());
    decode.wait_until(SOON, closed).await.unwrap();
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
