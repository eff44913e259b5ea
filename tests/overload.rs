//! Nobody is run over: retries have a budget, engines get the pauses they ask for, overloaded ones are passed over.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod support;

use std::time::Duration;

use futures::future::join_all;
use reqwest::StatusCode;
use serde_json::json;
use support::fleet::*;
use support::refusals::*;
use support::*;

const CHAT: &str = "/v1/chat/completions";

fn code(response: &reqwest::Response) -> &str {
    response.headers()["x-smg-error-code"].to_str().unwrap()
}

// ------------------------------------------------------------------ retry budget

#[tokio::test]
async fn an_outage_is_not_multiplied_by_retries() {
    let budget = ["--retry-budget-ratio", "0.2", "--retry-budget-min-per-sec", "0", "--disable-circuit-breaker"];
    let fleet = fleet(1, 1, &budget).await;
    fleet.decodes[0].set_fault(Fault::generation().status(503, "{}"));
    for _ in 0..50 {
        assert_eq!(fleet.smg.post(CHAT, &chat()).await.status(), 503);
    }
    let sent = fleet.decodes[0].generation_count();
    assert!((50..=60).contains(&sent), "50 requests made {sent} attempts");
    let smg = &fleet.smg;
    assert!(smg.metric("smg_worker_retries_total", &[]).await <= 10.0);
    assert!(smg.metric("smg_worker_retries_refused_total", &[("endpoint", "chat")]).await >= 40.0);
}

#[tokio::test]
async fn a_fleet_that_fails_now_and_then_retries_as_before() {
    let fleet = fleet(1, 1, &[]).await;
    for _ in 0..20 {
        fleet.decodes[0].set_fault(Fault::generation().status(503, "{}").times(1));
        assert_eq!(fleet.smg.post(CHAT, &chat()).await.status(), 200);
    }
    assert_eq!(fleet.smg.metric("smg_worker_retries_refused_total", &[]).await, 0.0);
}

// ------------------------------------------------------------------ Retry-After

#[tokio::test]
async fn a_worker_that_asks_for_a_pause_is_left_in_peace_and_the_client_hears_of_it() {
    let fleet = fleet(1, 1, &[]).await;
    let decode = &fleet.decodes[0];
    decode.set_fault(Fault::generation().status(429, r#"{"busy":true}"#).header("retry-after", "7").times(1));
    let response = fleet.smg.post(CHAT, &chat()).await;
    assert_eq!(
        (response.status(), &response.headers()["retry-after"]),
        (StatusCode::TOO_MANY_REQUESTS, &"7".parse().unwrap())
    );
    assert_eq!(response.text().await.unwrap(), r#"{"busy":true}"#);
    assert_eq!(decode.generation_count(), 1, "no attempt within the pause");
    assert_eq!(fleet.smg.metric("smg_worker_paced_total", &[("worker", &decode.url())]).await, 1.0);
    // Where there is nobody else, a new request is not refused for it.
    assert_eq!(fleet.smg.post(CHAT, &chat()).await.status(), 200);
}

#[tokio::test]
async fn traffic_goes_elsewhere_while_a_worker_pauses() {
    let fleet = fleet(2, 2, &["--policy", "round_robin"]).await;
    for (paused, other) in [(&fleet.prefills[0], &fleet.prefills[1]), (&fleet.decodes[0], &fleet.decodes[1])] {
        paused.set_fault(Fault::generation().status(503, "{}").header("retry-after", "120"));
        let before = other.generation_count();
        for _ in 0..10 {
            assert_eq!(fleet.smg.post(CHAT, &chat()).await.status(), 200);
        }
        assert!(other.generation_count() >= before + 10);
        let before = paused.generation_count();
        paused.clear_faults();
        for number in 0..6 {
            let id = format!("{}-{number}", paused.port());
            assert_eq!(fleet.smg.post_as(&id, CHAT, &chat()).await.status(), 200);
            let excluded = fleet.smg.decision(&id).await["attempts"][0]["excluded"].to_string();
            assert!(excluded.contains(&paused.url()) && excluded.contains("retry_after"), "{excluded}");
        }
        assert_eq!(paused.generation_count(), before);
    }
}

#[tokio::test]
async fn a_pause_ends() {
    let fleet = fleet(1, 2, &["--policy", "round_robin"]).await;
    let paused = &fleet.decodes[0];
    paused.set_fault(Fault::generation().status(503, "{}").header("retry-after", "1").times(1));
    eventually("the worker has asked for its pause", || async {
        assert_eq!(fleet.smg.post(CHAT, &chat()).await.status(), 200);
        (paused.generation_count() == 1).then_some(())
    })
    .await;
    eventually("it is chosen again", || async {
        assert_eq!(fleet.smg.post(CHAT, &chat()).await.status(), 200);
        (paused.generation_count() > 1).then_some(())
    })
    .await;
}

// ------------------------------------------------------------------ stale connections

#[tokio::test]
async fn connections_that_engines_close_while_unused_cost_no_request() {
    // The time after which an engine closes; in the long variant that of the common servers.
    let idle = Duration::from_millis(if soaks() { 5000 } else { 300 });
    let engine = |role| {
        let engine = MockEngine::builder().engine(Engine::Sglang).role(role).model(MODEL);
        engine.idle_close(idle).start()
    };
    let (prefill, decode) = (engine(Role::Prefill).await.unwrap(), engine(Role::Decode).await.unwrap());
    let smg = Smg::launch(&["--disable-retries"]).await;
    smg.register_pair(&prefill, &decode).await;
    let lane = |lane: u64| {
        let smg = &smg;
        async move {
            for round in 0..10u64 {
                assert_eq!(smg.post(CHAT, &chat()).await.status(), 200);
                // Around the moment at which the engine closes.
                let late = Duration::from_millis((lane * 7 + round * 3) % 30) * if soaks() { 17 } else { 1 };
                tokio::time::sleep(idle.mul_f64(0.96) + late).await;
                assert_eq!(smg.post(CHAT, &chat()).await.status(), 200);
            }
        }
    };
    join_all((0..20).map(lane)).await;
    assert_eq!((prefill.generation_count(), decode.generation_count()), (400, 400));
}

#[tokio::test]
async fn a_leg_that_met_a_closed_connection_is_sent_again_once() {
    // Nobody but the test opens connections to the engines.
    let quiet = ["--disable-load-monitoring", "--disable-worker-overload-protection", "--policy", "random"];
    let fleet = fleet(1, 1, &[&quiet[..], &["--disable-retries"]].concat()).await;
    let (smg, decode) = (&fleet.smg, &fleet.decodes[0]);
    let resent = || smg.metric("smg_router_upstream_send_retries_total", &[]);
    // A fresh connection that breaks is a fault of the engine.
    decode.set_fault(Fault::generation().close_unanswered().times(1));
    let response = smg.post(CHAT, &chat()).await;
    assert_eq!((response.status().as_u16(), code(&response)), (502, "decode_request_failed"));
    assert_eq!(resent().await, 0.0);

    // What is sent again is sent on a connection that is not kept.
    let keep_a_connection = || async { assert_eq!(smg.post(CHAT, &chat()).await.status(), 200) };
    for fault in [Fault::generation().close_unanswered(), Fault::generation().reset_unanswered()] {
        keep_a_connection().await;
        let (before, count) = (decode.generation_count(), resent().await);
        decode.set_fault(fault.times(1));
        assert_eq!(smg.post(CHAT, &chat()).await.status(), 200);
        assert_eq!((decode.generation_count() - before, resent().await - count), (2, 1.0));
    }

    // An answer that had begun is no stale connection.
    keep_a_connection().await;
    let (before, count) = (decode.generation_count(), resent().await);
    decode.set_fault(Fault::generation().raw([(Duration::ZERO, "HTTP/1.1 20")]).times(1));
    assert_eq!(smg.post(CHAT, &chat()).await.status(), 502);
    assert_eq!((decode.generation_count() - before, resent().await - count), (1, 0.0));
    smg.until_idle().await;
}

#[tokio::test]
async fn overloaded_workers_are_passed_over_while_others_exist() {
    for (waiting, token_usage) in [(8, 0.0), (0, 0.8)] {
        let (p1, p2) = (reporting(Role::Prefill, waiting, token_usage).await, reporting(Role::Prefill, 7, 0.79).await);
        let (d1, d2) = (reporting(Role::Decode, 7, 0.79).await, reporting(Role::Decode, waiting, token_usage).await);
        let smg = Smg::launch(&["--load-monitor-interval", "1", "--policy", "round_robin"]).await;
        smg.register_pair(&p1, &d1).await;
        smg.register_pair(&p2, &d2).await;
        until_reported(&smg, [&p1, &p2, &d1, &d2]).await;
        for number in 0..10 {
            assert_eq!(smg.post_as(&format!("r{number}"), CHAT, &chat()).await.status(), 200);
        }
        assert_eq!([&p1, &p2, &d1, &d2].map(MockEngine::generation_count), [0, 10, 10, 0]);
        let excluded = smg.decision("r9").await["attempts"][0]["excluded"].to_string();
        assert!(excluded.contains(&p1.url()) && excluded.contains("overloaded"), "{excluded}");
        assert_eq!(smg.metric("smg_workers_overloaded", &[("model", MODEL)]).await, 2.0);
        assert_eq!(smg.metric("smg_worker_overload_fallback_total", &[]).await, 0.0);
    }
}

#[tokio::test]
async fn where_every_worker_is_overloaded_the_least_loaded_one_serves() {
    let prefill = reporting(Role::Prefill, 0, 0.0).await;
    let (more, less) = (reporting(Role::Decode, 50, 0.1).await, reporting(Role::Decode, 9, 0.1).await);
    let smg = Smg::launch(&["--load-monitor-interval", "1", "--policy", "round_robin"]).await;
    smg.register_pair(&prefill, &more).await;
    smg.register(&spec(&less, "decode")).await;
    until_reported(&smg, [&more, &less]).await;
    for _ in 0..6 {
        assert_eq!(smg.post(CHAT, &chat()).await.status(), 200);
    }
    assert_eq!((more.generation_count(), less.generation_count()), (0, 6));
    assert_eq!(smg.metric("smg_worker_overload_fallback_total", &[("stage", "selection")]).await, 6.0);
}

#[tokio::test]
async fn with_the_shed_flag_requests_are_refused_with_a_hint_and_not_retried() {
    let (prefill, decode) = (reporting(Role::Prefill, 0, 0.0).await, reporting(Role::Decode, 50, 0.1).await);
    let smg = Smg::launch(&["--load-monitor-interval", "2", "--worker-overload-shed"]).await;
    smg.register_pair(&prefill, &decode).await;
    until_reported(&smg, [&decode]).await;
    let response = smg.post_as("shed", CHAT, &chat()).await;
    assert_eq!(response.headers()["retry-after"], "2");
    let message = refused(response, 503, "worker_overload_protection_shed").await;
    assert_eq!(message, format!("All workers for model '{MODEL}' are overloaded"));
    assert_eq!((prefill.generation_count(), decode.generation_count()), (0, 0));
    assert_eq!(smg.metric("smg_worker_overload_shed_total", &[("stage", "selection")]).await, 1.0);
    assert_eq!(smg.metric("smg_worker_retries_total", &[]).await, 0.0);
    // Switched off, the same worker serves.
    smg.set_policy("default", &json!({"overload": {"disabled": true, "shed": true}})).await;
    assert_eq!(smg.post(CHAT, &chat()).await.status(), 200);
}

#[tokio::test]
async fn with_the_shed_flag_a_decode_worker_that_became_overloaded_during_prefill_gets_no_leg() {
    let (smg, prefill, decode) = nixl_pair(&["--load-monitor-interval", "1", "--worker-overload-shed"]).await;
    until_reported(&smg, [&prefill, &decode]).await;
    let smg = &smg;
    let overloaded = |workers: f64| {
        eventually("the load is known", move || async move {
            (smg.metric("smg_workers_overloaded", &[("model", MODEL)]).await == workers).then_some(())
        })
    };
    // On a slow machine the report may come too late for a short prefill.
    for prefill_takes in [2, 4, 8, 16] {
        prefill.set_fault(Fault::generation().delay_head(Duration::from_secs(prefill_takes)));
        let (sent, served) = (prefill.generation_count(), decode.generation_count());
        let asked = in_background(smg, "late");
        prefill.wait_for_generations(sent + 1, PATIENCE).await.unwrap();
        decode.set_fault(
            Fault::path("/metrics").status(200, "vllm:num_requests_waiting 50\nvllm:kv_cache_usage_perc 0.1\n"),
        );
        overloaded(1.0).await;
        let response = asked.await.unwrap();
        if response.status() == 200 {
            decode.clear_faults();
            overloaded(0.0).await;
            continue;
        }
        assert_eq!(response.headers()["retry-after"], "1");
        let expected = format!("Worker '{}' for model '{MODEL}' became overloaded before dispatch", decode.url());
        assert_eq!(refused(response, 503, "worker_overload_protection_shed").await, expected);
        assert_eq!(decode.generation_count(), served);
        assert_eq!(smg.metric("smg_worker_overload_shed_total", &[("stage", "dispatch")]).await, 1.0);
        assert_eq!(smg.metric("smg_pd_orphaned_handoffs_total", &[]).await, 1.0);
        assert_eq!(smg.metric("smg_worker_retries_total", &[]).await, 0.0);
        smg.until_idle().await;
        return;
    }
    panic!("no report came within 16 s");
}

#[tokio::test]
async fn a_workers_own_thresholds_protect_it_where_protection_is_off() {
    let prefill = reporting(Role::Prefill, 0, 0.0).await;
    let (protected, other) = (reporting(Role::Decode, 3, 0.0).await, reporting(Role::Decode, 50, 1.0).await);
    let flags = ["--load-monitor-interval", "1", "--policy", "round_robin", "--disable-worker-overload-protection"];
    let smg = Smg::launch(&flags).await;
    smg.register(&spec(&prefill, "prefill")).await;
    smg.register(&spec_with(&protected, "decode", json!({"overload": {"waiting_requests": 3}}))).await;
    smg.register(&spec(&other, "decode")).await;
    until_reported(&smg, [&protected, &other]).await;
    for _ in 0..6 {
        assert_eq!(smg.post(CHAT, &chat()).await.status(), 200);
    }
    assert_eq!((protected.generation_count(), other.generation_count()), (0, 6));
    let refused = smg.post("/workers", &json!({"url": "http://127.0.0.1:1", "overload": {"token_usage": 2}})).await;
    assert_eq!(refused.status(), 400);
}

// ------------------------------------------------------------------ prefill admission

/// One prefill worker with a limit of one request at a time, its engine taking its time over each.
async fn limited(dispatch: Dispatch, prefill_takes: Duration, flags: &[&str]) -> (Smg, MockEngine, MockEngine) {
    let engine = |role| {
        let engine = MockEngine::builder().role(role).model(MODEL).prefill_delay(prefill_takes);
        match dispatch {
            Dispatch::Sequential => engine.engine(Engine::Vllm).connector(Connector::Nixl).start(),
            _ => engine.engine(Engine::Sglang).start(),
        }
    };
    let (prefill, decode) = (engine(Role::Prefill).await.unwrap(), engine(Role::Decode).await.unwrap());
    let mut all = vec!["--prefill-max-inflight-requests-per-worker", "1"];
    all.extend(flags);
    let smg = Smg::launch(&all).await;
    let connector = match dispatch {
        Dispatch::Sequential => json!({"kv_connector": "NixlConnector"}),
        _ => json!({}),
    };
    smg.register(&spec_with(&prefill, "prefill", connector.clone())).await;
    smg.register(&spec_with(&decode, "decode", connector)).await;
    (smg, prefill, decode)
}

fn in_background(smg: &Smg, id: &str) -> tokio::task::JoinHandle<reqwest::Response> {
    let request = smg.client.post(format!("{}{CHAT}", smg.url)).header("x-request-id", id).json(&chat());
    tokio::spawn(async move { request.send().await.unwrap() })
}

async fn until_queued(smg: &Smg, count: f64) {
    eventually(&format!("{count} requests wait"), || async {
        (smg.metric("smg_pd_prefill_admission_queued", &[]).await == count).then_some(())
    })
    .await;
}

#[tokio::test]
async fn a_prefill_worker_computes_no_more_prompts_than_its_limit_and_the_rest_wait_in_line() {
    for dispatch in [Dispatch::Parallel, Dispatch::Sequential] {
        let (smg, prefill, _decode) = limited(dispatch, Duration::from_millis(50), &[]).await;
        let body = chat();
        let answers = join_all((0..10).map(|_| smg.post(CHAT, &body))).await;
        assert!(answers.iter().all(|answer| answer.status() == 200), "{dispatch:?}");
        assert_eq!((prefill.generation_count(), prefill.peak_active()), (10, 1), "{dispatch:?}");
        assert!(smg.metric("smg_pd_prefill_admission_wait_seconds_count", &[]).await >= 1.0);
        smg.until_idle().await;
        assert_eq!(smg.metric("smg_pd_prefill_admission_inflight", &[]).await, 0.0);
        assert_eq!(smg.metric("smg_pd_prefill_admission_queued", &[]).await, 0.0);
        assert_eq!(smg.metric("smg_pd_prefill_admission_rejections_total", &[]).await, 0.0);
    }
}

#[tokio::test]
async fn a_full_queue_and_a_wait_that_is_over_are_refused_with_a_hint_and_not_retried() {
    let flags = ["--prefill-queue-size", "1", "--prefill-queue-timeout-secs", "1"];
    let (smg, prefill, _decode) = limited(Dispatch::Sequential, Duration::ZERO, &flags).await;
    prefill.set_fault(Fault::generation().hang());
    let running = in_background(&smg, "running");
    prefill.wait_for_generations(1, PATIENCE).await.unwrap();
    let waiting = in_background(&smg, "waiting");
    until_queued(&smg, 1.0).await;
    let full = smg.post(CHAT, &chat()).await;
    assert_eq!(full.headers()["retry-after"], "1");
    refused(full, 429, "pd_prefill_queue_full").await;
    refused(waiting.await.unwrap(), 429, "pd_prefill_queue_timeout").await;
    for reason in ["queue_full", "queue_timeout"] {
        assert_eq!(smg.metric("smg_pd_prefill_admission_rejections_total", &[("reason", reason)]).await, 1.0);
    }
    assert_eq!(smg.metric("smg_worker_retries_total", &[]).await, 0.0);
    assert_eq!(prefill.generation_count(), 1);
    running.abort();
    smg.until_idle().await;
}

#[tokio::test]
async fn a_client_that_leaves_the_line_makes_room_and_those_behind_it_move_up() {
    let (smg, prefill, _decode) = limited(Dispatch::Sequential, Duration::ZERO, &["--prefill-queue-size", "2"]).await;
    prefill.set_fault(Fault::generation().hang().times(1));
    let running = in_background(&smg, "running");
    prefill.wait_for_generations(1, PATIENCE).await.unwrap();
    let leaving = in_background(&smg, "leaving");
    until_queued(&smg, 1.0).await;
    let staying = in_background(&smg, "staying");
    until_queued(&smg, 2.0).await;
    leaving.abort();
    until_queued(&smg, 1.0).await;
    assert_eq!(prefill.generation_count(), 1);
    running.abort();
    assert_eq!(staying.await.unwrap().status(), 200);
    smg.until_idle().await;
}

#[tokio::test]
async fn another_prefill_worker_with_room_is_taken_before_anybody_waits() {
    let (smg, prefill, _decode) = limited(Dispatch::Sequential, Duration::ZERO, &[]).await;
    let other = vllm(Role::Prefill, Connector::Nixl).await;
    smg.register(&spec_with(&other, "prefill", json!({"kv_connector": "NixlConnector"}))).await;
    prefill.set_fault(Fault::generation().hang());
    other.set_fault(Fault::generation().hang());
    let both = [in_background(&smg, "a"), in_background(&smg, "b")];
    for engine in [&prefill, &other] {
        engine.wait_for_generations(1, PATIENCE).await.unwrap();
    }
    let third = in_background(&smg, "c");
    until_queued(&smg, 1.0).await;
    both.iter().chain([&third]).for_each(tokio::task::JoinHandle::abort);
    smg.until_idle().await;
}
