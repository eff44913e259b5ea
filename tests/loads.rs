//! What engines report of themselves: their load, that they are there, and that they were started anew.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod support;

use serde_json::json;
use support::fleet::*;
use support::*;

const CHAT: &str = "/v1/chat/completions";
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
    let prefill = silent(Role::Prefill, MODEL).await;
    let (busy, idle) = (silent(Role::Decode, MODEL).await, silent(Role::Decode, MODEL).await);
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
    smg.logged(&["does not report its load", &busy.url()]).await;
    assert_eq!(warned(busy.url()), 1);
    hanging.iter().for_each(tokio::task::JoinHandle::abort);
}

#[tokio::test]
async fn what_an_engine_reports_is_shown_under_the_documented_names() {
    let rank = |rank: u64| {
        json!({
            "dp_rank": rank, "num_running_reqs": 3 + rank, "num_waiting_reqs": 2, "token_usage": 0.25, "gen_throughput": 120.5,
            "cache_hit_rate": 0.5, "kv_transfer_latency_ms": 7.5, "kv_transfer_speed_gb_s": 11.0, "prefill_queue_reqs": 4,
            "decode_queue_reqs": 5,
        })
    };
    let report =
        json!({"timestamp": "0", "version": "0.5", "dp_rank_count": 2, "loads": [rank(0), rank(1)]}).to_string();
    let engine = MockEngine::builder().engine(Engine::Sglang).role(Role::Decode).model(MODEL);
    let engine = engine.override_path("/v1/loads", 200, report).start().await.unwrap();
    let smg = Smg::launch(&[]).await;
    smg.register(&spec(&engine, "decode")).await;
    until_reported(&smg, [&engine]).await;
    let (metrics, url) = (smg.metrics().await, engine.url());
    let of_model = [("worker", url.as_str()), ("model", MODEL), ("dp_rank", "1")];
    for (name, value) in [
        ("smg_engine_running_requests", 4.0),
        ("smg_engine_waiting_requests", 2.0),
        ("smg_engine_token_usage", 0.25),
        ("smg_engine_gen_throughput", 120.5),
        ("smg_engine_cache_hit_rate", 0.5),
    ] {
        assert_eq!(samples(&metrics, name, &of_model).into_values().collect::<Vec<_>>(), [value], "{name}");
    }
    let of_role = [("worker", url.as_str()), ("role", "decode"), ("dp_rank", "1")];
    for (name, value) in [
        ("smg_engine_pd_kv_transfer_latency_ms", 7.5),
        ("smg_engine_pd_kv_transfer_speed_gb_s", 11.0),
        ("smg_engine_pd_prefill_queue_reqs", 4.0),
        ("smg_engine_pd_decode_queue_reqs", 5.0),
    ] {
        assert_eq!(samples(&metrics, name, &of_role).into_values().collect::<Vec<_>>(), [value], "{name}");
    }
}

#[tokio::test]
async fn an_engine_that_is_gone_leaves_rotation_before_a_request_meets_it() {
    let flags = ["--load-monitor-interval", "1", "--worker-stall-secs", "1", "--disable-health-check"];
    let (smg, prefill, decode) = sglang_pair(&flags).await;
    until_reported(&smg, [&prefill, &decode]).await;
    decode.stop().await;
    let stalled = |gone: f64| {
        let (smg, url) = (&smg, decode.url());
        async move {
            eventually("the gateway has noticed", || async {
                let stalled = [("worker", url.as_str()), ("reason", "unreachable")];
                (smg.metric("smg_worker_stalled", &stalled).await == gone).then_some(())
            })
            .await;
        }
    };
    stalled(1.0).await;
    assert_eq!(smg.get("/readiness").await.status(), 503);
    assert_eq!(smg.metric("smg_worker_errors_total", &[]).await, 0.0, "no request was lost to find out");
    decode.start_again().await.unwrap();
    stalled(0.0).await;
    assert_eq!(smg.post(CHAT, &chat()).await.status(), 200);
}

#[tokio::test]
async fn an_engine_that_is_too_busy_to_report_stays_in_rotation() {
    let flags = ["--load-monitor-interval", "1", "--worker-stall-secs", "0", "--disable-health-check"];
    let (smg, prefill, decode) = sglang_pair(&flags).await;
    until_reported(&smg, [&prefill, &decode]).await;
    decode.set_fault(Fault::path("/v1/loads").status(503, "{}"));
    let failed = || async {
        let labels = [("worker", decode.url()), ("mode", "failed".to_owned())];
        let labels = labels.each_ref().map(|(name, value)| (*name, value.as_str()));
        (smg.metric("smg_engine_load_polls_total", &labels).await >= 2.0).then_some(())
    };
    eventually("it was asked in vain", failed).await;
    assert_eq!(smg.post(CHAT, &chat()).await.status(), 200);
}

#[tokio::test]
async fn engines_are_asked_for_their_load_where_it_is_wanted_though_nothing_needs_it() {
    let idle = [
        "--disable-load-monitoring",
        "--disable-worker-overload-protection",
        "--load-monitor-interval",
        "1",
        "--policy",
        "round_robin",
    ];
    let (wanted, _prefill, _decode) = sglang_pair(&[&idle[..], &["--engine-metrics"]].concat()).await;
    let (unwanted, prefill, decode) = sglang_pair(&idle).await;
    let asked = |engine: &MockEngine| engine.requests().iter().any(|request| request.path == "/v1/loads");
    eventually("three rounds of questions", || async {
        (wanted.metric("smg_engine_load_polls_total", &[]).await >= 6.0).then_some(())
    })
    .await;
    assert_eq!(unwanted.metric("smg_engine_load_polls_total", &[]).await, 0.0);
    assert!(!asked(&prefill) && !asked(&decode));
}

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
    let asked = || prefill.requests().iter().filter(|request| request.path == "/version").count();
    let before = asked();
    prefill.restart().await.unwrap();
    eventually("the restart was noticed", || async {
        (smg.metric("smg_worker_restarts_total", &[("worker_type", "prefill")]).await == 1.0).then_some(())
    })
    .await;
    eventually("it was asked again", || async { (asked() > before).then_some(()) }).await;
    let worker = smg.get_json(&format!("/workers/{id}")).await;
    assert_eq!(worker["kv_engine_id"], "registered");
    smg.logged(&["the engine was started anew"]).await;
}
