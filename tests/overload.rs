//! Nobody is run over: retries have a budget, engines get the pauses they ask for, overloaded ones are passed over.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod support;

use std::time::Duration;

use futures::future::join_all;
use reqwest::StatusCode;
use serde_json::json;
use support::*;

const CHAT: &str = "/v1/chat/completions";
/// Retries without a wait worth noticing.
const FAST: [&str; 4] = ["--retry-initial-backoff-ms", "1", "--retry-max-backoff-ms", "5"];

/// A gateway over SGLang engines.
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
        fleet.prefills.push(sglang(Role::Prefill).await);
        fleet.smg.register(&spec(fleet.prefills.last().unwrap(), "prefill")).await;
    }
    for _ in 0..decodes {
        fleet.decodes.push(sglang(Role::Decode).await);
        fleet.smg.register(&spec(fleet.decodes.last().unwrap(), "decode")).await;
    }
    fleet
}

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
    let engine = |role| {
        let engine = MockEngine::builder().engine(Engine::Sglang).role(role).model(MODEL);
        engine.idle_close(Duration::from_millis(300)).start()
    };
    let (prefill, decode) = (engine(Role::Prefill).await.unwrap(), engine(Role::Decode).await.unwrap());
    let smg = Smg::launch(&["--disable-retries"]).await;
    smg.register_pair(&prefill, &decode).await;
    let lane = |lane: u64| {
        let smg = &smg;
        async move {
            for round in 0..12u64 {
                assert_eq!(smg.post(CHAT, &chat()).await.status(), 200);
                // Around the moment at which the engine closes.
                tokio::time::sleep(Duration::from_millis(285 + (lane * 7 + round * 3) % 30)).await;
            }
        }
    };
    join_all((0..8).map(lane)).await;
    assert_eq!((prefill.generation_count(), decode.generation_count()), (96, 96));
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

// ------------------------------------------------------------------ load reports

/// What `GET /workers` shows of an engine.
async fn shown(smg: &Smg, engine: &MockEngine) -> serde_json::Value {
    let list = smg.get_json("/workers").await;
    list["workers"].as_array().unwrap().iter().find(|worker| worker["url"] == engine.url()).unwrap().clone()
}

/// A load report of one rank.
fn report(waiting: u64, token_usage: f64) -> String {
    let load = json!({"dp_rank": 0, "num_running_reqs": 1, "num_waiting_reqs": waiting, "token_usage": token_usage});
    json!({"timestamp": "0", "version": "0.5", "dp_rank_count": 1, "loads": [load]}).to_string()
}

/// A SGLang engine that always reports this load.
async fn reporting(role: Role, waiting: u64, token_usage: f64) -> MockEngine {
    let engine = MockEngine::builder().engine(Engine::Sglang).role(role).model(MODEL);
    engine.override_path("/v1/loads", 200, report(waiting, token_usage)).start().await.unwrap()
}

/// Waits until a gateway has the load report of every engine.
async fn until_reported(smg: &Smg, engines: impl IntoIterator<Item = &MockEngine> + Clone) {
    eventually("every engine has reported", || async {
        let metrics = smg.metrics().await;
        let known = |engine: &MockEngine| {
            !samples(&metrics, "smg_engine_running_requests", &[("worker", &engine.url())]).is_empty()
        };
        engines.clone().into_iter().all(known).then_some(())
    })
    .await;
}

const EACH_SECOND: [&str; 2] = ["--load-monitor-interval", "1"];

#[tokio::test]
async fn engines_are_asked_for_their_load_in_the_way_each_of_them_knows() {
    let (smg, prefill, decode) = sglang_pair(&EACH_SECOND).await;
    let vllm = MockEngine::builder().engine(Engine::Vllm).role(Role::Decode).model(MODEL).max_running(4);
    let vllm = vllm.start().await.unwrap();
    smg.register(&spec(&vllm, "decode")).await;
    until_reported(&smg, [&prefill, &decode, &vllm]).await;
    for (engine, mode) in [(&prefill, "loads"), (&decode, "loads"), (&vllm, "metrics")] {
        let labels = [("worker", engine.url()), ("mode", mode.to_owned())];
        let labels = labels.each_ref().map(|(name, value)| (*name, value.as_str()));
        assert!(smg.metric("smg_engine_load_polls_total", &labels).await >= 1.0, "{mode}");
    }
    assert!(!vllm.requests().iter().any(|request| request.path == "/v1/loads"));

    decode.set_fault(Fault::generation().hang());
    let client = smg.client.clone();
    let hanging = tokio::spawn(client.post(format!("{}{CHAT}", smg.url)).json(&chat()).send());
    eventually("the prefill reports its queue", || async {
        let queue =
            smg.metric("smg_engine_pd_prefill_queue_reqs", &[("worker", &prefill.url()), ("role", "prefill")]).await;
        let shown = shown(&smg, &prefill).await;
        (queue >= 0.0 && shown["engine_load"]["dp_rank_count"] == 1).then_some(())
    })
    .await;
    hanging.abort();

    let loads = smg.get_json("/loads").await;
    assert_eq!(loads["dp_rank_count"], 3, "{loads}");
    assert!(loads["version"].as_str().unwrap().starts_with("smg-"));
    let entry = loads["loads"].as_array().unwrap().iter().find(|entry| entry["worker"] == vllm.url()).unwrap();
    assert_eq!((&entry["worker_type"], &entry["dp_rank"]), (&json!("decode"), &json!(0)));
    assert!(entry.get("memory").is_none() && entry["token_usage"] == 0.0, "{entry}");
    assert_eq!(
        loads["aggregate"]["total_reqs"].as_u64().unwrap(),
        loads["aggregate"]["total_running_reqs"].as_u64().unwrap()
    );
    assert_eq!(smg.get_json("/get_loads?model=nobody").await["dp_rank_count"], 0);
}

#[tokio::test]
async fn an_engine_that_reports_no_load_is_said_so_once_and_own_requests_decide() {
    let silent = |role| {
        let engine = MockEngine::builder().engine(Engine::Sglang).role(role).model(MODEL);
        engine.override_path("/v1/loads", 404, "{}").override_path("/metrics", 404, "{}").start()
    };
    let prefill = silent(Role::Prefill).await.unwrap();
    let (busy, idle) = (silent(Role::Decode).await.unwrap(), silent(Role::Decode).await.unwrap());
    let flags = ["--load-monitor-interval", "1", "--policy", "power_of_two", "--retry-max-retries", "1"];
    let smg = Smg::launch(&flags).await;
    smg.register_pair(&prefill, &busy).await;
    busy.set_fault(Fault::generation().hang());
    let hanging: Vec<_> =
        (0..20).map(|_| tokio::spawn(smg.client.post(format!("{}{CHAT}", smg.url)).json(&chat()).send())).collect();
    busy.wait_for_generations(20, PATIENCE).await.unwrap();
    smg.register(&spec(&idle, "decode")).await;
    for engine in [&prefill, &busy, &idle] {
        eventually("it was asked in vain", || async {
            let labels = [("worker", engine.url()), ("mode", "absent".to_owned())];
            let labels = labels.each_ref().map(|(name, value)| (*name, value.as_str()));
            (smg.metric("smg_engine_load_polls_total", &labels).await == 1.0).then_some(())
        })
        .await;
        assert!(shown(&smg, engine).await.get("engine_load").is_none());
    }
    for _ in 0..20 {
        assert_eq!(smg.post(CHAT, &chat()).await.status(), 200);
    }
    assert_eq!(idle.generation_count(), 20);
    let warned = |url: String| {
        smg.log().lines().filter(|line| line.contains("does not report its load") && line.contains(&url)).count()
    };
    assert_eq!(warned(busy.url()), 1);
    hanging.iter().for_each(tokio::task::JoinHandle::abort);
}

// ------------------------------------------------------------------ overload protection

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
    assert_eq!((response.status().as_u16(), code(&response)), (503, "worker_overload_protection_shed"));
    assert_eq!(response.headers()["retry-after"], "2");
    let body: serde_json::Value = response.json().await.unwrap();
    assert_eq!(body["error"]["message"], format!("All workers for model '{MODEL}' are overloaded"));
    assert_eq!((prefill.generation_count(), decode.generation_count()), (0, 0));
    assert_eq!(smg.metric("smg_worker_overload_shed_total", &[("stage", "selection")]).await, 1.0);
    assert_eq!(smg.metric("smg_worker_retries_total", &[]).await, 0.0);
    // Switched off, the same worker serves.
    smg.set_policy("default", &json!({"overload": {"disabled": true, "shed": true}})).await;
    assert_eq!(smg.post(CHAT, &chat()).await.status(), 200);
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
    let refused = smg.post(CHAT, &chat()).await;
    assert_eq!((refused.status().as_u16(), code(&refused)), (429, "pd_prefill_queue_full"));
    assert_eq!(refused.headers()["retry-after"], "1");
    let over = waiting.await.unwrap();
    assert_eq!((over.status().as_u16(), code(&over)), (429, "pd_prefill_queue_timeout"));
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

// ------------------------------------------------------------------ restarts

#[tokio::test]
async fn an_engine_that_was_started_anew_is_asked_again_and_keeps_its_registered_engine_id() {
    let engine = || MockEngine::builder().engine(Engine::Vllm).role(Role::Prefill).connector(Connector::Mooncake);
    let prefill = engine().model(MODEL).start().await.unwrap();
    let smg = Smg::launch(&["--health-check-interval-secs", "1", "--load-monitor-interval", "1"]).await;
    let declared = json!({"kv_connector": "MooncakeConnector", "kv_engine_id": "registered", "runtime_type": "vllm"});
    let id = smg.register(&spec_with(&prefill, "prefill", declared)).await;
    eventually("its start time is known", || async {
        (prefill.requests().iter().filter(|request| request.path == "/metrics").count() >= 3).then_some(())
    })
    .await;
    let asked = || prefill.requests().iter().filter(|request| request.path == "/v1/models").count();
    let before = asked();
    prefill.restart().await.unwrap();
    eventually("the restart was noticed", || async {
        (smg.metric("smg_worker_restarts_total", &[("worker_type", "prefill")]).await == 1.0).then_some(())
    })
    .await;
    eventually("it was asked again", || async { (asked() > before).then_some(()) }).await;
    let worker = smg.get_json(&format!("/workers/{id}")).await;
    assert_eq!(worker["kv_engine_id"], "registered");
    assert!(smg.log().contains("the engine was started anew"));
}

// ------------------------------------------------------------------ data-parallel ranks

#[tokio::test]
async fn each_data_parallel_rank_is_a_worker_and_its_legs_carry_it() {
    let engine = |role| MockEngine::builder().engine(Engine::Sglang).role(role).model(MODEL).dp_size(2).start();
    let (prefill, decode) = (engine(Role::Prefill).await.unwrap(), engine(Role::Decode).await.unwrap());
    let smg = Smg::launch(&["--dp-aware", "--policy", "round_robin"]).await;
    let (_, engine_id) = smg.register_pair(&prefill, &decode).await;
    let list = smg.get_json("/workers").await;
    let workers = list["workers"].as_array().unwrap();
    let urls: std::collections::BTreeSet<&str> = workers.iter().map(|worker| worker["url"].as_str().unwrap()).collect();
    let expected: std::collections::BTreeSet<String> =
        [&prefill, &decode].iter().flat_map(|engine| (0..2).map(|rank| format!("{}@{rank}", engine.url()))).collect();
    assert_eq!(urls, expected.iter().map(String::as_str).collect());
    let rank = workers.iter().find(|worker| worker["url"] == format!("{}@1", decode.url())).unwrap();
    assert_eq!(
        (&rank["dp_base_url"], &rank["dp_rank"], &rank["dp_size"]),
        (&json!(decode.url()), &json!(1), &json!(2))
    );

    let mut routed = std::collections::BTreeSet::new();
    for _ in 0..8 {
        let response = smg.post(CHAT, &chat()).await;
        assert_eq!(response.status(), 200);
        routed.insert(response.headers()["x-smg-routed-worker-id"].to_str().unwrap().to_owned());
    }
    assert_eq!(routed, (0..2).map(|rank| format!("{}@{rank}", decode.url())).collect());
    for (prefill_leg, decode_leg) in prefill.generations().iter().zip(&decode.generations()) {
        let (prefill_leg, decode_leg) = (prefill_leg.json(), decode_leg.json());
        assert!(
            prefill_leg["routed_dp_rank"].as_u64().unwrap() < 2 && decode_leg["routed_dp_rank"].as_u64().unwrap() < 2
        );
        assert_eq!(decode_leg["disagg_prefill_dp_rank"], prefill_leg["routed_dp_rank"]);
        assert_eq!(decode_leg["bootstrap_room"], prefill_leg["bootstrap_room"]);
    }

    // A rank cannot go alone; its engine goes whole.
    let rank_id = rank["id"].as_str().unwrap();
    assert_eq!(smg.get_json(&format!("/workers/{rank_id}")).await["url"], rank["url"]);
    let refused = smg.client.delete(format!("{}/workers/{rank_id}", smg.url)).send().await.unwrap();
    assert_eq!(refused.status(), StatusCode::BAD_REQUEST);
    assert!(refused.text().await.unwrap().contains(&engine_id));
    smg.set_policy("default", &json!({"dp_aware": true, "health": {"drain_settle_secs": 1}})).await;
    smg.remove(&engine_id).await;
    assert_eq!(smg.get_json("/workers").await["total"], 2);
    smg.until_idle().await;
}

#[tokio::test]
async fn a_mooncake_rank_mints_the_engine_id_of_its_rank() {
    let (prefill, decode) =
        (vllm(Role::Prefill, Connector::Mooncake).await, vllm(Role::Decode, Connector::Mooncake).await);
    let smg = Smg::launch(&["--dp-aware", "--policy", "round_robin", "--disable-retries"]).await;
    let declared = json!({"kv_connector": "MooncakeConnector", "kv_engine_id": "E", "labels": {"dp_size": "2"}});
    smg.register(&spec_with(&prefill, "prefill", declared)).await;
    smg.register(&spec_with(&decode, "decode", json!({"kv_connector": "MooncakeConnector"}))).await;
    for engine in [&prefill, &decode] {
        engine.set_fault(anything());
    }
    for _ in 0..4 {
        assert_eq!(smg.post(CHAT, &chat()).await.status(), 200);
    }
    let minted: std::collections::BTreeSet<String> = decode
        .generations()
        .iter()
        .map(|leg| leg.json()["kv_transfer_params"]["remote_engine_id"].as_str().unwrap().to_owned())
        .collect();
    assert_eq!(minted, ["E_dp0", "E_dp1"].map(str::to_owned).into());
}
