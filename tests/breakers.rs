//! A worker that keeps failing leaves rotation, costs no request meanwhile, is tried a little, and comes back.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod support;

use std::collections::BTreeSet;
use std::time::Duration;

use serde_json::json;
use support::fleet::*;
use support::*;

const CHAT: &str = "/v1/chat/completions";
const SOON: Duration = Duration::from_secs(10);

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
        let prefill = silent(Role::Prefill, policy).await;
        let (broken, good) = (silent(Role::Decode, policy).await, silent(Role::Decode, policy).await);
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
    let flags = ["--cb-failure-threshold", "1", "--cb-success-threshold", "1", "--cb-timeout-duration-secs", "2"];
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
    let fleet = fleet(2, 2, &["--disable-health-check", "--policy", "round_robin"]).await;
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
    let fleet = fleet(1, 1, &["--disable-retries", "--disable-health-check"]).await;
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
async fn a_worker_whose_health_returns_is_tried_at_once_though_its_breaker_is_open() {
    let flags = [
        "--disable-retries",
        "--cb-failure-threshold",
        "1",
        "--cb-success-threshold",
        "1",
        "--cb-timeout-duration-secs",
        "3600",
        "--health-check-interval-secs",
        "1",
        "--health-failure-threshold",
        "1",
        "--health-success-threshold",
        "1",
    ];
    let (smg, _prefill, decode) = pair(Dispatch::Parallel, &flags).await;
    decode.set_fault(Fault::generation().status(500, "{}").times(1));
    assert_eq!(smg.post(CHAT, &chat()).await.status(), 500);
    assert_eq!(breaker(&smg, &decode).await, 1.0);
    decode.set_fault(Fault::health().status(500, "{}"));
    eventually("it is not ready", || async { (shown(&smg, &decode).await["status"] == "not_ready").then_some(()) })
        .await;
    decode.clear_faults();
    eventually("it is tried", || async { (smg.post(CHAT, &chat()).await.status() == 200).then_some(()) }).await;
    assert_eq!(breaker(&smg, &decode).await, 0.0);
    let readmitted = [("worker", decode.url())];
    let readmitted = readmitted.each_ref().map(|(name, value)| (*name, value.as_str()));
    assert_eq!(smg.metric("smg_worker_cb_health_readmissions_total", &readmitted).await, 1.0);
}
