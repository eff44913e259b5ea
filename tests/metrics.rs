//! Series have the documented names, types and labels, move when they should, and never carry what a client made up.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod support;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use futures::{StreamExt, stream};
use reqwest::StatusCode;
use serde_json::{Value, json};
use support::*;

/// The documented series of HTTP prefill/decode serving: name, type, labels (SMG metrics reference).
const DOCUMENTED: &[(&str, &str, &[&str])] = &[
    ("smg_http_requests_total", "counter", &["method", "path"]),
    ("smg_http_request_duration_seconds", "histogram", &["method", "path"]),
    ("smg_http_responses_total", "counter", &["path", "status_code", "error_code"]),
    ("smg_http_connections_active", "gauge", &[]),
    ("smg_http_inflight_request_age_count", "gauge", &["gt", "le"]),
    (
        "smg_router_requests_total",
        "counter",
        &["router_type", "backend_type", "connection_mode", "model", "endpoint", "streaming"],
    ),
    (
        "smg_router_request_duration_seconds",
        "histogram",
        &["router_type", "backend_type", "connection_mode", "model", "endpoint"],
    ),
    (
        "smg_router_request_errors_total",
        "counter",
        &["router_type", "backend_type", "connection_mode", "model", "endpoint", "error_type"],
    ),
    ("smg_router_stage_duration_seconds", "histogram", &["router_type", "stage"]),
    ("smg_router_upstream_responses_total", "counter", &["router_type", "status_code", "error_code"]),
    ("smg_pd_ttft_seconds", "histogram", &["backend_type", "model", "runtime"]),
    ("smg_pd_prefill_duration_seconds", "histogram", &["backend_type", "model", "runtime"]),
    ("smg_pd_decode_ttft_seconds", "histogram", &["backend_type", "model", "runtime"]),
    ("smg_pd_kv_connector_mode_total", "counter", &["mode"]),
    ("smg_pd_kv_transfer_failures_total", "counter", &[]),
    ("smg_pd_rendezvous_failures_total", "counter", &["leg", "phase"]),
    ("smg_worker_pool_size", "gauge", &["worker_type", "connection_mode", "model"]),
    ("smg_worker_connections_active", "gauge", &["worker_type", "connection_mode"]),
    ("smg_worker_requests_active", "gauge", &["worker"]),
    ("smg_worker_health", "gauge", &["worker"]),
    ("smg_worker_http2", "gauge", &["worker"]),
    ("smg_worker_requests_total", "counter", &["worker", "model"]),
    ("smg_worker_health_checks_total", "counter", &["worker_type", "result"]),
    ("smg_worker_selection_total", "counter", &["worker_type", "connection_mode", "model", "policy"]),
    ("smg_worker_errors_total", "counter", &["worker_type", "connection_mode", "error_type"]),
    ("smg_worker_cb_state", "gauge", &["worker"]),
    ("smg_worker_cb_consecutive_failures", "gauge", &["worker"]),
    ("smg_worker_cb_consecutive_successes", "gauge", &["worker"]),
    ("smg_worker_cb_transitions_total", "counter", &["worker", "from", "to"]),
    ("smg_worker_cb_outcomes_total", "counter", &["worker", "outcome"]),
    ("smg_worker_retries_total", "counter", &["worker_type", "endpoint"]),
    ("smg_worker_retries_exhausted_total", "counter", &["worker_type", "endpoint"]),
    ("smg_worker_retry_backoff_seconds", "histogram", &["attempt"]),
    ("smg_tokio_workers", "gauge", &[]),
    ("smg_log_dropped_lines", "gauge", &["sink"]),
    ("smg_tokio_alive_tasks", "gauge", &[]),
    ("smg_tokio_global_queue_depth", "gauge", &[]),
    ("smg_tokio_worker_parks_total", "counter", &[]),
    ("smg_tokio_worker_busy_ratio", "gauge", &[]),
    ("smg_tokio_event_loop_delay_seconds", "histogram", &[]),
    ("smg_tokio_event_loop_stalls_total", "counter", &[]),
    ("smg_worker_stalled", "gauge", &["worker", "reason"]),
    ("smg_worker_stall_transitions_total", "counter", &["worker", "reason"]),
];

/// The documented series of policies, which move only while the policy is used.
const OF_POLICIES: &[(&str, &str, &[&str])] = &[
    ("smg_manual_policy_branch_total", "counter", &["branch"]),
    ("smg_consistent_hashing_policy_branch_total", "counter", &["branch"]),
    ("smg_prefix_hash_policy_branch_total", "counter", &["branch"]),
    ("smg_cache_aware_policy_branch_total", "counter", &["branch"]),
    ("smg_manual_policy_cache_entries", "gauge", &[]),
    ("smg_worker_routing_keys_active", "gauge", &["worker"]),
    ("smg_routing_key_source_total", "counter", &["source"]),
    ("smg_cache_aware_match_ratio", "histogram", &[]),
    ("smg_cache_tree_chars", "gauge", &["model"]),
    ("smg_cache_tree_tokens", "gauge", &["model"]),
    ("smg_cache_placement_entries", "gauge", &["model"]),
    ("smg_cache_tree_tenants", "gauge", &["model", "tree"]),
];

/// Documented series that count tokens, and why they are absent here. The tests of workers that speak gRPC move them.
const OVER_GRPC: &[(&str, &str)] = &[
    ("smg_router_ttft_seconds", "output is told from other bytes by its tokens"),
    ("smg_router_tpot_seconds", "tokens are not counted over HTTP"),
    ("smg_router_generation_duration_seconds", "tokens are not counted over HTTP"),
    ("smg_router_tokens_total", "tokens are not counted over HTTP"),
];

/// Documented series that have no meaning in this version, and why. What names a prefix means every series that begins so.
const WITHOUT_MEANING: &[(&str, &str)] = &[
    ("smg_router_request_body_path_total", "every body is spliced: there is one path"),
    ("smg_router_request_body_buffers_released_early_bytes_total", "bodies are shared, not copied"),
    ("smg_policy_inflight_reconciled_total", "loads are counted by guards and cannot drift"),
    ("smg_discovery_", "no service discovery"),
    ("smg_scheduler_", "no priority scheduler"),
    ("smg_allocator_", "the allocator is not asked"),
    ("smg_history_", "no stored conversations"),
    ("smg_kv_event_", "no events of KV caches"),
    ("smg_kv_index_", "no index of KV caches"),
    ("smg_tokenizer_", "HTTP traffic is not tokenized here"),
    ("smg_mm_", "no multimodal processing"),
    ("smg_mcp_", "no MCP"),
    ("smg_db_", "no database"),
    ("smg_responses_", "responses belong to the engine"),
    ("smg_detokenize_", "HTTP traffic is not tokenized here"),
    (
        "smg_worker_liveness_fallback_total",
        "a worker that nobody can connect to gets nothing, though it is the last one",
    ),
];

/// Series of the documented table that only gRPC workers move: present, and zero here. The tests of that wire move them.
const AT_REST: &[&str] = &["smg_pd_admission_waits_total", "smg_pd_admission_sheds_total"];

/// Bounds of the documented duration histograms, in seconds.
const DURATION_BOUNDS: &[&str] = &[
    "0.001", "0.005", "0.01", "0.025", "0.05", "0.1", "0.25", "0.5", "1", "2.5", "5", "10", "15", "30", "45", "60",
    "90", "120", "180", "240", "300", "480", "900", "1200", "1800", "2700", "3600", "5400", "7200", "+Inf",
];

/// One family of the exposition text.
#[derive(Debug, Default)]
struct Family {
    kind: String,
    help: String,
    label_names: BTreeSet<Vec<String>>,
    bounds: Vec<String>,
    /// Sum of the values of a counter or gauge, of the counts of a histogram.
    total: f64,
}

/// Names and values of a sample's labels.
fn labels(text: &str) -> Vec<(String, String)> {
    let mut rest = text;
    let mut found = Vec::new();
    while let Some((name, after)) = rest.split_once("=\"") {
        let mut value = String::new();
        let mut characters = after.char_indices();
        let end = loop {
            match characters.next().unwrap() {
                (_, '\\') => value.push(characters.next().unwrap().1),
                (end, '"') => break end,
                (_, character) => value.push(character),
            }
        };
        found.push((name.trim_start_matches(',').to_owned(), value));
        rest = &after[end + 1..];
    }
    found
}

fn families(text: &str) -> BTreeMap<String, Family> {
    let mut families: BTreeMap<String, Family> = BTreeMap::new();
    let mut current = String::new();
    for line in text.lines() {
        if let Some(rest) = line.strip_prefix("# HELP ") {
            let (name, help) = rest.split_once(' ').unwrap();
            families.entry(name.to_owned()).or_default().help = help.to_owned();
        } else if let Some(rest) = line.strip_prefix("# TYPE ") {
            let (name, kind) = rest.split_once(' ').unwrap();
            families.entry(name.to_owned()).or_default().kind = kind.to_owned();
            current = name.to_owned();
        } else {
            let family = families.get_mut(&current).unwrap();
            let (sample, value) = line.rsplit_once(' ').unwrap();
            let (name, label_text) = sample.split_once('{').unwrap_or((sample, ""));
            let mut labels = labels(label_text.trim_end_matches('}'));
            let bound = labels.iter().position(|(name, _)| family.kind == "histogram" && name == "le");
            if let Some(at) = bound {
                let (_, bound) = labels.remove(at);
                if !family.bounds.contains(&bound) {
                    family.bounds.push(bound);
                }
            }
            family.label_names.insert(labels.into_iter().map(|(name, _)| name).collect());
            if name == current || name.ends_with("_count") {
                family.total += value.parse::<f64>().unwrap();
            }
        }
    }
    families
}

/// A request with a body for `model`.
fn for_model(mut body: Value, model: &str) -> Value {
    body["model"] = json!(model);
    body
}

async fn vllm_pair(smg: &Smg, connector: Connector, name: Option<&str>, model: &str) -> (MockEngine, MockEngine) {
    let start =
        |role| MockEngine::builder().engine(Engine::Vllm).role(role).connector(connector.clone()).model(model).start();
    let (prefill, decode) = (start(Role::Prefill).await.unwrap(), start(Role::Decode).await.unwrap());
    let mut fields = json!({});
    if let Some(name) = name {
        fields["kv_connector"] = json!(name);
        fields["kv_engine_id"] = json!(prefill.engine_id());
    }
    smg.register(&spec_with(&prefill, "prefill", fields.clone())).await;
    fields["kv_engine_id"] = json!(decode.engine_id());
    smg.register(&spec_with(&decode, "decode", fields)).await;
    (prefill, decode)
}

#[tokio::test]
async fn every_documented_series_of_http_serving_moves_under_its_documented_name_and_labels() {
    let flags = [
        "--retry-max-retries",
        "2",
        "--retry-initial-backoff-ms",
        "1",
        "--cb-failure-threshold",
        "3",
        "--health-check-interval-secs",
        "1",
        "--policy",
        "round_robin",
    ];
    let (smg, prefill, decode) = sglang_pair(&flags).await;
    let chat_path = "/v1/chat/completions";
    let ask = async |body: Value, expected: u16| {
        let response = smg.post(chat_path, &body).await;
        assert_eq!(response.status().as_u16(), expected);
        response.bytes().await.unwrap()
    };

    // SGLang, streamed and not; each connector mode of vLLM; a worker without a partner.
    for path in [chat_path, "/v1/completions", "/generate"] {
        for stream in [false, true] {
            let mut body = json!({"model": MODEL, "prompt": "hi", "text": "hi", "stream": stream});
            body["messages"] = chat()["messages"].clone();
            let response = smg.post(path, &body).await;
            assert_eq!(response.status(), StatusCode::OK, "{path}");
            response.bytes().await.unwrap();
        }
    }
    let (nixl_prefill, _nixl_decode) = vllm_pair(&smg, Connector::Nixl, Some("NixlConnector"), "nixl").await;
    let _mooncake = vllm_pair(&smg, Connector::Mooncake, Some("MooncakeConnector"), "mooncake").await;
    let _undeclared = vllm_pair(&smg, Connector::None, None, "undeclared").await;
    for model in ["nixl", "mooncake", "undeclared"] {
        ask(for_model(chat(), model), 200).await;
        ask(for_model(chat_stream(), model), 200).await;
    }
    let regular = MockEngine::builder().engine(Engine::Sglang).model("alone").start().await.unwrap();
    smg.register(&spec(&regular, "regular")).await;
    ask(for_model(chat(), "alone"), 200).await;

    // A handoff that did not happen.
    let answer = r#"{"id":"x","object":"chat.completion","choices":[]}"#;
    nixl_prefill.set_fault(Fault::generation().status(200, answer).times(1));
    ask(for_model(chat(), "nixl"), 200).await;
    // Samples that would share one rendezvous.
    let shared = smg.post("/v1/completions", &json!({"model": MODEL, "prompt": "hi", "n": 2})).await;
    assert_eq!(shared.status(), StatusCode::BAD_REQUEST);
    // A retry that succeeds, then attempts until the circuit is open.
    decode.set_fault(Fault::generation().status(500, "{}").times(1));
    ask(chat(), 200).await;
    decode.set_fault(Fault::generation().status(503, r#"{"error":"busy"}"#));
    ask(chat(), 503).await;
    ask(chat(), 503).await;
    decode.clear_faults();
    // A bootstrap port that nobody listens on, and an engine that is gone.
    let lonely = sglang(Role::Prefill).await;
    let mut fields = spec_with(&lonely, "prefill", json!({"bootstrap_port": free_port()}));
    fields["models"] = json!([{"id": "lonely"}]);
    smg.register(&fields).await;
    regular.stop().await;
    let refused = smg.post(chat_path, &for_model(chat(), "alone")).await;
    assert!(refused.status().is_server_error());
    eventually("probes have been made", || async {
        (smg.metric("smg_worker_health_checks_total", &[]).await > 0.0).then_some(())
    })
    .await;
    eventually("the bootstrap port was tried", || async {
        (smg.metric("smg_pd_rendezvous_failures_total", &[("leg", "prefill"), ("phase", "probe")]).await > 0.0)
            .then_some(())
    })
    .await;
    smg.until_idle().await;

    eventually("the runtime has been measured", || async {
        (smg.metric("smg_tokio_event_loop_delay_seconds_count", &[]).await > 0.0).then_some(())
    })
    .await;
    let text = smg.metrics().await;
    let families = families(&text);
    for (name, kind, labels) in DOCUMENTED {
        let family = families.get(*name).unwrap_or_else(|| panic!("{name} is not exported"));
        assert_eq!(family.kind, *kind, "{name}");
        assert!(!family.help.is_empty(), "{name} has no help");
        let found: Vec<BTreeSet<&str>> =
            family.label_names.iter().map(|names| names.iter().map(String::as_str).collect()).collect();
        assert_eq!(found, [labels.iter().copied().collect::<BTreeSet<_>>()], "{name}");
        let still = [
            "smg_worker_requests_active",
            "smg_worker_cb_consecutive_failures",
            // It is 1 for workers that speak gRPC.
            "smg_worker_http2",
            "smg_tokio_global_queue_depth",
            "smg_log_dropped_lines",
            "smg_tokio_event_loop_stalls_total",
            "smg_tokio_worker_busy_ratio",
            // They are shown to move where something is in flight.
            "smg_http_inflight_request_age_count",
            "smg_worker_connections_active",
        ];
        assert!(family.total > 0.0 || still.contains(name), "{name} did not move");
        if *kind == "histogram" && name.ends_with("duration_seconds") || name.ends_with("ttft_seconds") {
            assert_eq!(family.bounds, DURATION_BOUNDS, "{name}");
        }
    }
    for name in AT_REST {
        assert_eq!((families[*name].kind.as_str(), families[*name].total), ("counter", 0.0), "{name}");
    }

    for (prefix, why) in OVER_GRPC.iter().chain(WITHOUT_MEANING) {
        let exported: Vec<_> = families.keys().filter(|name| name.starts_with(prefix)).collect();
        assert!(exported.is_empty(), "{exported:?} is exported now, and not without meaning ({why}): give it a row");
    }

    assert_eq!(families["smg_pd_bootstrap_failures_total"].total, 1.0);

    let count = async |name: &str, labels: &[(&str, &str)]| smg.metric(name, labels).await;
    for (runtime, model, answers) in
        [("sglang", MODEL, 7.0), ("vllm", "nixl", 3.0), ("vllm", "mooncake", 2.0), ("vllm", "undeclared", 2.0)]
    {
        let labels = [("backend_type", "pd"), ("model", model), ("runtime", runtime)];
        assert_eq!(count("smg_pd_ttft_seconds_count", &labels).await, answers, "{model}");
        assert!(count("smg_pd_prefill_duration_seconds_count", &labels).await >= answers, "{model}");
    }
    for (mode, dispatches) in [("nixl", 3.0), ("mooncake", 2.0), ("passthrough", 2.0)] {
        assert_eq!(count("smg_pd_kv_connector_mode_total", &[("mode", mode)]).await, dispatches, "{mode}");
    }
    assert_eq!(count("smg_pd_kv_transfer_failures_total", &[]).await, 1.0);
    for leg in ["prefill", "decode"] {
        let labels = [("worker_type", leg), ("connection_mode", "http"), ("model", MODEL), ("policy", "round_robin")];
        assert!(count("smg_worker_selection_total", &labels).await >= 9.0, "{leg}");
    }
    let decode_url = decode.url();
    let open = [("worker", decode_url.as_str()), ("from", "closed"), ("to", "open")];
    assert_eq!(count("smg_worker_cb_transitions_total", &open).await, 1.0);
    assert_eq!(count("smg_worker_cb_outcomes_total", &[("worker", &decode_url), ("outcome", "failure")]).await, 4.0);
    assert_eq!(count("smg_worker_cb_outcomes_total", &[("worker", &prefill.url()), ("outcome", "failure")]).await, 0.0);
    let errors = [("worker_type", "decode"), ("connection_mode", "http"), ("error_type", "backend_error")];
    assert_eq!(count("smg_worker_errors_total", &errors).await, 4.0);
    assert!(count("smg_worker_retries_total", &[("worker_type", "pd"), ("endpoint", "chat")]).await >= 2.0);
    assert!(count("smg_worker_retries_exhausted_total", &[("worker_type", "pd"), ("endpoint", "chat")]).await >= 1.0);
    assert_eq!(count("smg_worker_stalled", &[("worker", &regular.url()), ("reason", "unreachable")]).await, 1.0);
    let failed = [("path", chat_path), ("status_code", "503"), ("error_code", "decode_unavailable")];
    assert!(count("smg_http_responses_total", &failed).await >= 1.0);
    let streamed = [("backend_type", "pd"), ("endpoint", "generate"), ("streaming", "true")];
    assert_eq!(count("smg_router_requests_total", &streamed).await, 1.0);
    assert_eq!(count("smg_router_requests_total", &[("backend_type", "regular")]).await, 2.0);
}

#[tokio::test]
async fn every_documented_series_of_policies_moves_while_its_policy_is_used() {
    let (smg, prefill, decode) = sglang_pair(&[]).await;
    let mut of_manual = String::new();
    for policy in ["manual", "consistent_hashing", "prefix_hash", "cache_aware"] {
        smg.set_policy("default", &json!({"policy": policy})).await;
        for _ in 0..2 {
            let ask = smg.client.post(format!("{}/v1/chat/completions", smg.url)).header("x-smg-routing-key", "k");
            assert_eq!(ask.json(&chat()).send().await.unwrap().status(), StatusCode::OK, "{policy}");
        }
        if policy == "manual" {
            eventually("the pinned keys are counted", || async {
                let pinned = [&prefill, &decode].map(|engine| engine.url());
                let [one, other] = pinned.each_ref().map(|url| [("worker", url.as_str())]);
                let on = |labels| smg.metric("smg_worker_routing_keys_active", labels);
                let entries = smg.metric("smg_manual_policy_cache_entries", &[]).await;
                (entries > 0.0 && on(&one).await == 1.0 && on(&other).await == 1.0).then_some(())
            })
            .await;
            of_manual = smg.metrics().await;
        }
    }
    let tokens = json!({"model": MODEL, "prompt": [1, 2, 3, 4], "max_tokens": 2});
    assert_eq!(smg.post("/v1/completions", &tokens).await.status(), StatusCode::OK);
    eventually("what the tree remembers is counted", || async {
        let names = ["smg_cache_tree_chars", "smg_cache_tree_tokens", "smg_cache_tree_tenants"];
        let [chars, tokens, tenants] = names.map(|name| smg.metric(name, &[]));
        (chars.await > 0.0 && tokens.await > 0.0 && tenants.await > 0.0).then_some(())
    })
    .await;
    let mut text = smg.metrics().await;
    let heads = json!({"policy": "cache_aware", "cache_aware": {"index": "hash", "boundaries": [2]}});
    smg.set_policy("default", &heads).await;
    assert_eq!(smg.post("/v1/completions", &tokens).await.status(), StatusCode::OK);
    eventually("the heads of prompts are counted", || async {
        (smg.metric("smg_cache_placement_entries", &[("model", MODEL)]).await == 2.0).then_some(())
    })
    .await;
    text.push_str(&smg.metrics().await);
    text.push_str(&of_manual);
    let families = families(&text);
    for (name, kind, labels) in OF_POLICIES {
        let family = families.get(*name).unwrap_or_else(|| panic!("{name} is not exported"));
        assert_eq!((family.kind.as_str(), family.help.is_empty()), (*kind, false), "{name}");
        let found: Vec<BTreeSet<&str>> =
            family.label_names.iter().map(|names| names.iter().map(String::as_str).collect()).collect();
        assert_eq!(found, [labels.iter().copied().collect::<BTreeSet<_>>()], "{name}");
        assert!(family.total > 0.0, "{name} did not move");
    }
}

#[tokio::test]
async fn what_is_in_flight_is_counted_by_age_and_its_connections_by_role() {
    let (smg, prefill, decode) = sglang_pair(&[]).await;
    let young = [("gt", "0"), ("le", "30")];
    assert_eq!(smg.metric("smg_http_inflight_request_age_count", &[]).await, 0.0);
    for engine in [&prefill, &decode] {
        engine.set_fault(Fault::generation().hang());
    }
    let asked = smg.client.post(format!("{}/v1/chat/completions", smg.url)).json(&chat()).send();
    let hanging = tokio::spawn(asked);
    for engine in [&prefill, &decode] {
        engine.wait_for_generations(1, PATIENCE).await.unwrap();
    }
    let text = smg.metrics().await;
    assert_eq!(samples(&text, "smg_http_inflight_request_age_count", &young).values().sum::<f64>(), 1.0);
    assert_eq!(samples(&text, "smg_http_inflight_request_age_count", &[]).len(), 12);
    for role in ["prefill", "decode"] {
        let labels = [("worker_type", role), ("connection_mode", "http")];
        assert_eq!(samples(&text, "smg_worker_connections_active", &labels).values().sum::<f64>(), 1.0, "{role}");
    }
    hanging.abort();
    smg.until_idle().await;
    assert_eq!(smg.metric("smg_http_inflight_request_age_count", &[]).await, 0.0);
    assert_eq!(smg.metric("smg_worker_connections_active", &[]).await, 0.0);
}

#[tokio::test]
async fn a_moriio_pair_or_handoff_that_fails_its_check_counts_as_a_failed_transfer() {
    let smg = Smg::launch(&["--disable-retries", "--drain-settle-secs", "0"]).await;
    let failures = async || smg.metric("smg_pd_kv_transfer_failures_total", &[]).await;
    let labelled = |engine: &MockEngine, role: &str, labels: Value| {
        spec_with(engine, role, json!({"kv_connector": "MoRIIOConnector", "labels": labels}))
    };
    let prefill = vllm(Role::Prefill, Connector::MoriioRead).await;
    let decode = vllm(Role::Decode, Connector::MoriioRead).await;
    // Without a mode the pair is misconfigured.
    let engines = [(&prefill, "prefill"), (&decode, "decode")];
    let mut ids = Vec::new();
    for (engine, role) in engines {
        ids.push(smg.register(&labelled(engine, role, json!({}))).await);
    }
    let answer = smg.post("/v1/chat/completions", &chat()).await;
    assert_eq!(answer.headers()["x-smg-error-code"], "moriio_pair_misconfigured");
    assert_eq!(failures().await, 1.0);
    for id in ids {
        smg.remove(&id).await;
    }
    for (engine, role) in engines {
        smg.register(&labelled(engine, role, json!({"moriio_mode": "read"}))).await;
    }
    prefill.set_fault(Fault::generation().status(200, r#"{"kv_transfer_params":{}}"#).times(1));
    let answer = smg.post("/v1/chat/completions", &chat()).await;
    assert_eq!(answer.headers()["x-smg-error-code"], "moriio_handoff_invalid");
    assert_eq!(failures().await, 2.0);
}

#[tokio::test]
async fn what_clients_make_up_never_becomes_a_label() {
    let (smg, _prefill, _decode) = sglang_pair(&[]).await;
    let ask = async |number: usize| {
        let mut body = chat();
        body["model"] = json!(format!("made-up-model-{number}"));
        let response = smg.post("/v1/chat/completions", &body).await;
        assert_eq!(response.status(), StatusCode::NOT_FOUND);
        let response = smg.get(&format!("/made-up-path-{number}")).await;
        assert_eq!(response.status(), StatusCode::NOT_FOUND);
        if !number.is_multiple_of(10) {
            return;
        }
        let response = smg.get(&format!("/workers/made-up-worker-{number}")).await;
        assert!(response.status().is_client_error());
        let method = reqwest::Method::from_bytes(format!("MADEUP{number}").as_bytes()).unwrap();
        let response = smg.client.request(method, format!("{}/liveness", smg.url)).send().await.unwrap();
        assert_eq!(response.status(), StatusCode::METHOD_NOT_ALLOWED);
    };
    let samples = |text: &str| text.lines().filter(|line| !line.starts_with('#')).count();
    // The first of each kind makes the series that all others share.
    ask(0).await;
    let before = samples(&smg.metrics().await);
    stream::iter(1..=1000).for_each_concurrent(8, ask).await;
    let text = smg.metrics().await;
    // The fleet's own series may begin meanwhile.
    assert!(
        samples(&text) < before + 50,
        "samples grow with what clients make up: from {before} to {}",
        samples(&text)
    );
    let lower = text.to_lowercase();
    assert!(!lower.contains("made-up") && !lower.contains("madeup"));
    let refusals = [("path", "/v1/chat/completions"), ("status_code", "404"), ("error_code", "model_not_found")];
    assert_eq!(smg.metric("smg_http_responses_total", &refusals).await, 1001.0);
    let unknown = [("path", "other"), ("status_code", "404"), ("error_code", "unknown_url")];
    assert_eq!(smg.metric("smg_http_responses_total", &unknown).await, 1001.0);
}

#[tokio::test]
async fn the_series_of_a_worker_leave_with_it() {
    let (smg, _prefill, decode) = sglang_pair(&["--drain-settle-secs", "0"]).await;
    assert_eq!(smg.post("/v1/chat/completions", &chat()).await.status(), StatusCode::OK);
    let list = smg.get_json("/workers").await;
    let workers = list["workers"].as_array().unwrap();
    let id = workers.iter().find(|worker| worker["url"] == decode.url()).unwrap()["id"].as_str().unwrap();
    let url = format!("{}/workers/{id}", smg.url);
    assert_eq!(smg.client.delete(&url).send().await.unwrap().status(), StatusCode::ACCEPTED);
    eventually("no series names the worker", || async { (!smg.metrics().await.contains(&decode.url())).then_some(()) })
        .await;
}

#[tokio::test]
async fn the_debug_log_names_both_workers_of_each_selected_pair() {
    let (prefill, decode) = (sglang(Role::Prefill).await, sglang(Role::Decode).await);
    let (port, bootstrap) = (free_port(), prefill.bootstrap_port().unwrap().to_string());
    let (prefill_url, decode_url, port_text) = (prefill.url(), decode.url(), port.to_string());
    let arguments = [
        "launch",
        "--pd-disaggregation",
        "--prefill",
        &prefill_url,
        &bootstrap,
        "--decode",
        &decode_url,
        "--worker-startup-check-interval",
        "1",
        "--host",
        "127.0.0.1",
        "--port",
        &port_text,
    ];
    let smg = Smg::spawn(&arguments, port, &[("RUST_LOG", "smg=info,smg::routers=debug")]);
    eventually("it is ready", || async {
        let response = smg.client.get(format!("{}/readiness", smg.url)).send().await.ok()?;
        response.status().is_success().then_some(())
    })
    .await;
    let ask = smg.client.post(format!("{}/v1/chat/completions", smg.url)).header("x-request-id", "logged-1");
    assert_eq!(ask.json(&chat()).send().await.unwrap().status(), StatusCode::OK);
    smg.logged(&["logged-1", "selected pair"]).await;
    let log = smg.log();
    let line = log.lines().find(|line| line.contains("logged-1") && line.contains("selected pair")).expect(&log);
    assert!(line.contains("DEBUG") && line.contains("smg::routers"), "{line}");
    assert!(line.contains(&prefill_url) && line.contains(&decode_url), "{line}");
    assert!(log.lines().any(|line| line.contains(" INFO ") && line.contains(" smg: ")), "{log}");
    let debugs = log.lines().filter(|line| line.contains("DEBUG"));
    assert!(debugs.clone().all(|line| line.contains("smg::routers")), "{:?}", debugs.collect::<Vec<_>>());
    tokio::time::timeout(Duration::from_secs(1), smg.until_idle()).await.unwrap();
}
