//! Registrations and removals end, whatever engines say or fail to say, and their end stays readable.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::time::Duration;

use mock_engine::{CallFault, Connector, Engine, MockEngine, Role};
use serde_json::{Value, json};
use smg_fleet::{Health, JobKind, JobStatus, PolicyDocument, Runtime, WorkerId, WorkerSpec, WorkerType};
use smg_store::{ClusterStore, Leadership};
use tokio::net::TcpListener;

use crate::testing::{Answer, FakeEngine, Plane, TestStore, dead_url, eventually};

fn spec(url: &str, role: &str) -> Value {
    json!({"url": url, "worker_type": role})
}

async fn accept(plane: &Plane, spec: Value) -> WorkerId {
    let reply = plane.call("POST", "/workers", Some(spec)).await;
    assert_eq!(reply.status, 202, "{reply:?}");
    reply.id()
}

async fn failed(plane: &Plane, id: WorkerId) -> String {
    let is_failed = |state: &smg_state::State| {
        state.worker(id).and_then(|worker| worker.job.as_ref()).is_some_and(|job| job.status == JobStatus::Failed)
    };
    let state = plane.until("failed", is_failed).await;
    state.worker(id).unwrap().job.clone().unwrap().message.unwrap()
}

/// Waits until the job of a worker says why it is not done.
async fn says(plane: &Plane, id: WorkerId, reason: &str) {
    let said = |state: &smg_state::State| {
        let job = state.worker(id).and_then(|worker| worker.job.as_ref());
        job.and_then(|job| job.message.as_ref()).is_some_and(|message| message.contains(reason))
    };
    plane.until(reason, said).await;
}

#[tokio::test]
async fn a_vllm_worker_is_registered_with_what_it_says() {
    let (plane, engine) = (Plane::start(), FakeEngine::vllm().await);
    let mut body = spec(&engine.url, "prefill");
    body["kv_connector"] = json!("NixlConnector");
    body["labels"] = json!({"version": "mine"});
    let id = plane.register(body).await;
    let shown = plane.get(&format!("/workers/{id}")).await.body;
    assert_eq!(shown["model_id"], "tiny");
    assert_eq!(shown["models"], json!([{"id": "tiny", "context_length": 2048}]));
    assert_eq!((&shown["runtime_type"], &shown["connection_mode"]), (&json!("vllm"), &json!("http")));
    assert_eq!((&shown["status"], &shown["is_healthy"]), (&json!("ready"), &json!(true)));
    let labels = json!({
        "max_model_len": "2048", "model_path": "MODELS/tiny", "served_model_name": "tiny", "version": "mine",
    });
    assert_eq!(shown["labels"], labels, "the operator's label wins");
    assert_eq!(shown["pd_pairing"], "vllm/nixl/?");
    assert!(shown.get("job_status").is_none(), "done jobs are not shown");
    let done = plane.metrics.registration_jobs.with_label_values(&["AddWorker", "success"]);
    eventually("counted", || done.get() == 1).await;
}

#[tokio::test]
async fn an_sglang_worker_is_asked_under_its_old_names_too() {
    let (plane, engine) = (Plane::start(), FakeEngine::start().await);
    engine.says("/v1/models", 200, r#"{"data":[{"id":"s","owned_by":"sglang","max_model_len":4096}]}"#);
    engine.says("/get_server_info", 200, r#"{"tp_size":2,"version":"0.5.3","disaggregation_mode":"decode"}"#);
    engine.says("/get_model_info", 200, r#"{"model_path":"/m","is_generation":true}"#);
    let id = plane.register(spec(&engine.url, "decode")).await;
    let worker = plane.worker(id);
    assert_eq!(worker.runtime(), Runtime::Sglang);
    assert_eq!((worker.label("tp_size"), worker.label("is_generation")), (Some("2"), Some("true")));
    assert_eq!((worker.label("model_path"), worker.model_id()), (Some("/m"), "s"));
}

#[tokio::test]
async fn the_runtime_is_detected_as_documented() {
    let plane = Plane::start();
    let models = |owner: &str| format!(r#"{{"data":[{{"id":"m","owned_by":"{owner}"}}]}}"#);
    let cases: Vec<(Vec<(&str, String)>, Runtime)> = vec![
        (vec![("/v1/models", models("sglang"))], Runtime::Sglang),
        (vec![("/v1/models", models("nvidia"))], Runtime::Sglang),
        (vec![("/v1/models", models("vllm")), ("/server_info", "{}".into())], Runtime::Vllm),
        (vec![("/v1/models", models("acme")), ("/version", "{}".into()), ("/server_info", "{}".into())], Runtime::Vllm),
        (vec![("/v1/models", models("acme")), ("/server_info", "{}".into())], Runtime::Sglang),
        (vec![("/v1/models", models("acme"))], Runtime::Generic),
        (vec![("/v1/models", "<html>".into())], Runtime::Sglang),
        (vec![("/version", "0.32".into())], Runtime::Vllm),
        (vec![], Runtime::Sglang),
    ];
    for (says, expected) in cases {
        let engine = FakeEngine::start().await;
        says.iter().for_each(|(path, text)| engine.says(path, 200, text));
        let id = plane.register(spec(&engine.url, "regular")).await;
        assert_eq!(plane.worker(id).runtime(), expected, "{says:?}");
    }
    let engine = FakeEngine::start().await;
    let mut declared = spec(&engine.url, "regular");
    declared["runtime_type"] = json!("trtllm");
    let id = plane.register(declared).await;
    assert_eq!(plane.worker(id).runtime(), Runtime::Trtllm);
    assert_eq!((engine.asked("/version"), engine.asked("/v1/models")), (0, 1), "a declared runtime is not detected");
}

#[tokio::test]
async fn engines_that_behave_like_the_real_ones_are_recognised_by_themselves() {
    let plane = Plane::start();
    let vllm = MockEngine::builder().engine(Engine::Vllm).role(Role::Prefill).connector(Connector::Nixl).model("m");
    let sglang = MockEngine::builder().engine(Engine::Sglang).role(Role::Decode).model("m").api_key("k");
    let (vllm, sglang) = (vllm.start().await.unwrap(), sglang.start().await.unwrap());
    let id = plane.register(spec(&vllm.url(), "prefill")).await;
    let worker = plane.worker(id);
    assert_eq!((worker.runtime(), worker.model_id()), (Runtime::Vllm, "m"));
    assert!(worker.label("version").is_some() && worker.models()[0].context_length.is_some());
    let mut body = spec(&sglang.url(), "decode");
    body["api_key"] = json!("k");
    let id = plane.register(body).await;
    let worker = plane.worker(id);
    assert_eq!((worker.runtime(), worker.model_id()), (Runtime::Sglang, "m"));
    assert!(worker.label("tp_size").is_some() && worker.label("model_path").is_some());
}

#[tokio::test]
async fn engines_that_speak_grpc_are_recognised_by_the_health_check_they_answer() {
    let plane = Plane::start();
    let start = |engine, role| MockEngine::builder().engine(engine).role(role).model("m").grpc();
    let nixl = start(Engine::Vllm, Role::Prefill).connector(Connector::Nixl).engine_id("e").max_running(8);
    let nixl = nixl.start().await.unwrap();
    let id = plane.register(spec(&nixl.url(), "prefill")).await;
    let shown = plane.get(&format!("/workers/{id}")).await.body;
    assert_eq!((&shown["runtime_type"], &shown["connection_mode"]), (&json!("vllm"), &json!("grpc")));
    assert_eq!(
        (&shown["kv_connector"], &shown["kv_role"], &shown["kv_engine_id"]),
        (&json!("NixlConnector"), &json!("kv_producer"), &json!("e"))
    );
    assert_eq!(shown["pd_pairing"], "vllm/nixl/dtype=auto,page=128,attn=flash_attn,model=torch.bfloat16");
    assert!(shown["labels"].get("kv_connector").is_none() && shown["labels"].get("version").is_none());
    assert!(shown.get("warning").is_none(), "its connector is known");
    assert_eq!((&shown["labels"]["max_num_seqs"], &shown["model_id"]), (&json!("8"), &json!("m")));
    assert_eq!(shown["models"], json!([{"id": "m", "context_length": 131_072}]));

    let sglang = start(Engine::Sglang, Role::Decode).max_running(16).default_sampling(r#"{"top_k":20}"#);
    let sglang = sglang.start().await.unwrap();
    let worker = plane.worker(plane.register(spec(&sglang.url(), "decode")).await);
    assert_eq!((worker.runtime(), worker.kv_connector()), (Runtime::Sglang, None));
    assert_eq!((worker.label("max_running_requests"), worker.label("page_size")), (Some("16"), Some("1")));
    assert_eq!(worker.label("default_sampling_params_json"), Some(r#"{"top_k":20}"#));
    assert!(worker.label("version").is_some() && worker.label("disaggregation_transfer_backend").is_some());

    let tokenspeed = start(Engine::Tokenspeed, Role::Prefill).server_info("pairing_protocol", "mine");
    let tokenspeed = tokenspeed.dp_size(4).start().await.unwrap();
    let id = plane.register(spec(&tokenspeed.url(), "prefill")).await;
    assert_eq!((plane.worker(id).runtime(), plane.worker(id).label("dp_size")), (Runtime::Tokenspeed, Some("4")));
    assert_eq!(plane.get(&format!("/workers/{id}")).await.body["pd_pairing"], "mine");
}

#[tokio::test]
async fn what_is_declared_for_a_grpc_worker_wins_over_what_it_says() {
    let plane = Plane::start();
    let engine = MockEngine::builder().engine(Engine::Vllm).connector(Connector::Mooncake).api_key("k").grpc();
    let engine = engine.start().await.unwrap();
    let mut body = spec(&engine.url(), "prefill");
    body["api_key"] = json!("k");
    body["runtime_type"] = json!("vllm");
    body["kv_engine_id"] = json!("mine");
    body["labels"] = json!({"page_size": "16", "served_model_name": "renamed"});
    let worker = plane.worker(plane.register(body).await);
    assert_eq!((worker.kv_connector(), worker.kv_engine_id()), (Some("MooncakeConnector"), Some("mine")));
    assert_eq!((worker.label("page_size"), worker.model_id()), (Some("16"), "renamed"));
    assert_eq!(engine.call_count("HealthCheck"), engine.call_count("GetModelInfo"), "it is not detected");
}

#[tokio::test]
async fn an_engine_that_does_not_say_its_model_is_not_registered_and_one_that_says_no_more_is() {
    let plane = Plane::start();
    let engine = MockEngine::builder().engine(Engine::Sglang).grpc().start().await.unwrap();
    let silent = |method| CallFault::method(method).refuse(tonic::Code::Internal, "no");
    engine.set_call_fault(silent("GetServerInfo"));
    let worker = plane.worker(plane.register(spec(&engine.url(), "regular")).await);
    assert_eq!((worker.model_id(), worker.label("version")), ("m", None));
    let other = MockEngine::builder().engine(Engine::Sglang).grpc().start().await.unwrap();
    other.set_call_fault(silent("GetModelInfo"));
    let message = failed(&plane, accept(&plane, spec(&other.url(), "regular")).await).await;
    assert!(message.contains("model") && message.contains("Internal"), "{message}");
}

#[tokio::test]
async fn an_engine_that_speaks_grpc_is_waited_for_until_it_is_well() {
    let plane = Plane::start();
    let engine = MockEngine::builder().engine(Engine::Tokenspeed).grpc().start().await.unwrap();
    engine.set_healthy(false);
    let id = accept(&plane, spec(&engine.url(), "regular")).await;
    says(&plane, id, "not healthy").await;
    engine.set_healthy(true);
    plane.until("registered", |state| state.worker(id).is_some_and(|worker| worker.facts.is_some())).await;
    let http = FakeEngine::start().await;
    let id = accept(&plane, spec(&http.url.replacen("http", "grpc", 1), "regular")).await;
    says(&plane, id, "health check").await;
}

#[tokio::test]
async fn an_engine_is_asked_with_its_own_key() {
    let (plane, engine) = (Plane::start(), FakeEngine::vllm().await);
    let mut body = spec(&engine.url, "regular");
    body["api_key"] = json!("k1");
    plane.register(body).await;
    assert!(engine.keys().iter().all(|key| key.as_deref() == Some("Bearer k1")));
}

#[tokio::test]
async fn the_configured_health_endpoint_is_asked_first_and_the_common_one_is_enough() {
    let (plane, engine) = (Plane::start(), FakeEngine::vllm().await);
    plane.call("PUT", "/fleet/policies/default", Some(json!({"health": {"endpoint": "/healthz"}}))).await;
    plane.register(spec(&engine.url, "regular")).await;
    assert!(engine.asked("/healthz") >= 1 && engine.asked("/health") == 1);
    let other = FakeEngine::vllm().await;
    other.says("/healthz", 200, "");
    plane.register(spec(&other.url, "regular")).await;
    assert_eq!(other.asked("/health"), 0);
}

#[tokio::test]
async fn while_it_waits_a_job_shows_the_last_probe_error() {
    let (plane, engine) = (Plane::start(), FakeEngine::vllm().await);
    let message = |id: WorkerId, text: &'static str| {
        move |state: &smg_state::State| {
            let job = state.worker(id).and_then(|worker| worker.job.clone());
            job.is_some_and(|job| job.status == JobStatus::Processing && job.message.unwrap_or_default().contains(text))
        }
    };
    let refused = accept(&plane, spec(&dead_url().await, "regular")).await;
    plane.until("refused", message(refused, "refused")).await;
    engine.says("/health", 401, "");
    let id = accept(&plane, spec(&engine.url, "regular")).await;
    plane.until("visible", message(id, "answered 401")).await;
    engine.says("/health", 503, "");
    plane.until("visible", message(id, "answered 503")).await;
    engine.says("/health", 200, "");
    plane.until("registered", |state| state.worker(id).is_some_and(|worker| worker.facts.is_some())).await;
}

#[tokio::test]
async fn a_failed_registration_stays_readable_and_is_then_forgotten() {
    let plane = Plane::with(|options| options.jobs.failed_for = Duration::from_millis(400));
    let policy = json!({"registration": {"timeout_secs": 2, "check_interval_secs": 1}});
    plane.call("PUT", "/fleet/policies/default", Some(policy)).await;
    let url = dead_url().await;
    let id = accept(&plane, spec(&url, "regular")).await;
    let message = failed(&plane, id).await;
    assert!(message.contains("not healthy within 2 s") && message.contains("refused"), "{message}");
    let shown = plane.get(&format!("/workers/{id}")).await;
    assert_eq!((shown.status.as_u16(), &shown.body["status"]), (200, &json!("failed")));
    assert_eq!(shown.body["job_status"]["status"], "failed");
    let again = accept(&plane, spec(&url, "regular")).await;
    assert_eq!(again, id, "the url keeps its id and starts anew");
    failed(&plane, id).await;
    plane.until("forgotten", |state| state.worker(id).is_none()).await;
    assert_eq!(plane.get(&format!("/workers/{id}")).await.code(), (404, "WORKER_NOT_FOUND"));
}

#[tokio::test]
async fn what_this_version_cannot_serve_is_accepted_and_fails_with_the_reason() {
    let plane = Plane::start();
    let cases = [
        (json!({"url": "ipc:///tmp/p", "worker_type": "prefill"}), "ipc://"),
        (json!({"url": "ipc:///tmp/d", "worker_type": "decode"}), "ipc://"),
        (json!({"url": "ipc:///tmp/e", "worker_type": "encode"}), "ipc://"),
        (json!({"url": "http://127.0.0.1:9", "worker_type": "prefill", "runtime_type": "trtllm"}), "trtllm"),
        (json!({"url": "http://127.0.0.1:10", "worker_type": "decode", "runtime_type": "mlx"}), "mlx"),
        (json!({"url": "http://127.0.0.1:11", "worker_type": "decode", "runtime": "tokenspeed"}), "tokenspeed"),
    ];
    for (body, reason) in cases {
        let id = accept(&plane, body).await;
        let message = failed(&plane, id).await;
        assert!(message.contains(reason), "{message}");
    }
}

#[tokio::test]
async fn a_removal_cancels_a_pending_registration() {
    let (plane, engine) = (Plane::start(), FakeEngine::start().await);
    engine.says("/health", 503, "");
    let id = accept(&plane, spec(&engine.url, "regular")).await;
    eventually("probed", || engine.asked("/health") > 0).await;
    assert_eq!(plane.metrics.registration_jobs_active.get(), 1);
    assert_eq!(plane.call("DELETE", &format!("/workers/{id}"), None).await.status, 202);
    assert!(plane.store.local().worker(id).is_none());
    eventually("cancelled", || plane.metrics.registration_jobs_active.get() == 0).await;
}

#[tokio::test]
async fn a_removed_worker_drains_first_and_an_unhealthy_one_goes_at_once() {
    let (plane, engine) = (Plane::start(), FakeEngine::vllm().await);
    let mut body = spec(&engine.url, "regular");
    body["health"] = json!({"drain_settle_secs": 10});
    let id = plane.register(body.clone()).await;
    let started = std::time::Instant::now();
    plane.call("DELETE", &format!("/workers/{id}"), None).await;
    assert_eq!(plane.get(&format!("/workers/{id}")).await.body["status"], "draining");
    assert_eq!(plane.call("POST", "/workers", Some(body.clone())).await.code().0, 409);
    plane.until("removed", |state| state.worker(id).is_none()).await;
    assert!(started.elapsed() >= crate::testing::SECOND * 10);

    body["health"] = json!({"drain_settle_secs": 1_000_000, "disable_health_check": false});
    let id = plane.register(body).await;
    let command = smg_state::Command::SetHealth { id, health: Health::Failed };
    engine.says("/health", 503, "");
    plane.plane.writer().write(crate::writer::Write::of("test", command)).await.unwrap();
    plane.call("DELETE", &format!("/workers/{id}"), None).await;
    plane.until("removed", |state| state.worker(id).is_none()).await;
}

#[tokio::test]
async fn a_new_control_plane_resumes_the_jobs_of_the_old_one() {
    let store = TestStore::new(Leadership::Leader);
    let engine = FakeEngine::vllm().await;
    engine.says("/health", 503, "");
    let (adding, removing);
    {
        let old = Plane::on(store.clone(), |_| {});
        let other = FakeEngine::vllm().await;
        removing = old.register(json!({"url": other.url, "health": {"drain_settle_secs": 5}})).await;
        adding = accept(&old, spec(&engine.url, "regular")).await;
        eventually("probed", || engine.asked("/health") > 0).await;
        old.call("DELETE", &format!("/workers/{removing}"), None).await;
        old.plane.stop().await;
    }
    assert!(store.local().worker(removing).is_some());
    engine.says("/health", 200, "");
    let new = Plane::on(store, |_| {});
    new.until("finished", |state| {
        state.worker(removing).is_none() && state.worker(adding).is_some_and(|worker| worker.facts.is_some())
    })
    .await;
}

#[tokio::test]
async fn only_the_leader_runs_jobs() {
    let store = TestStore::new(Leadership::Follower);
    let engine = FakeEngine::vllm().await;
    let plane = Plane::on(store.clone(), |_| {});
    let id = accept(&plane, spec(&engine.url, "regular")).await;
    tokio::task::yield_now().await;
    assert_eq!(engine.asked("/health"), 0);
    store.lead(Leadership::Leader);
    plane.until("registered", |state| state.worker(id).is_some_and(|worker| worker.facts.is_some())).await;
    store.lead(Leadership::Follower);
    engine.says("/health", 503, "");
    plane.call("PUT", &format!("/workers/{id}"), Some(spec(&engine.url, "regular"))).await;
    store.lead(Leadership::Leader);
    engine.says("/health", 200, "");
    plane.until("updated", |state| state.worker(id).is_some_and(|worker| worker.job.is_none())).await;
}

#[tokio::test]
async fn lying_engines_neither_hang_a_job_nor_fill_the_memory() {
    let plane = Plane::start();
    let endless: [(&str, Answer); 4] = [
        ("endless", Answer::Endless),
        ("silent", Answer::Silence),
        ("garbage", Answer::Text(200, "\u{0}{]".repeat(1_000))),
        ("huge", Answer::Text(200, format!(r#"{{"data":[{{"id":"{}"}}]}}"#, "x".repeat(2_000_000)))),
    ];
    for (name, answer) in endless {
        let engine = FakeEngine::start().await;
        for path in ["/v1/models", "/version", "/server_info", "/get_server_info", "/model_info", "/get_model_info"] {
            engine.answers(path, answer.clone());
        }
        let id = plane.register(spec(&engine.url, "regular")).await;
        let worker = plane.worker(id);
        assert!(worker.models().is_empty() && worker.labels().is_empty(), "{name}: {worker:?}");
    }
}

#[tokio::test]
async fn an_endless_or_missing_health_answer_is_judged_by_its_head_and_redirects_are_not_followed() {
    let plane = Plane::start();
    let (endless, target, redirecting) = (FakeEngine::vllm().await, FakeEngine::vllm().await, FakeEngine::vllm().await);
    endless.answers("/health", Answer::Endless);
    plane.register(spec(&endless.url, "regular")).await;
    redirecting.answers("/health", Answer::Redirect(format!("{}/health", target.url)));
    let id = accept(&plane, spec(&redirecting.url, "regular")).await;
    plane
        .until("visible", |state| {
            let job = state.worker(id).and_then(|worker| worker.job.clone());
            job.and_then(|job| job.message).is_some_and(|message| message.contains("answered 302"))
        })
        .await;
    assert_eq!(target.asked("/health"), 0);
}

#[tokio::test]
async fn an_update_registers_anew_and_a_concurrent_patch_wins_over_it() {
    let (plane, engine) = (Plane::start(), FakeEngine::vllm().await);
    let id = plane.register(spec(&engine.url, "prefill")).await;
    let path = format!("/workers/{id}");
    engine.says("/version", 200, r#"{"version":"0.33.0"}"#);
    let mut body = spec(&engine.url, "prefill");
    body["kv_connector"] = json!("MooncakeConnector");
    plane.call("PUT", &path, Some(body.clone())).await;
    plane.until("updated", |state| state.worker(id).is_some_and(|worker| worker.job.is_none())).await;
    let worker = plane.worker(id);
    assert_eq!(worker.spec.kv_connector.as_deref(), Some("MooncakeConnector"));
    assert_eq!(worker.label("version"), Some("0.33.0"));

    engine.says("/health", 503, "");
    body["priority"] = json!(1);
    plane.call("PUT", &path, Some(body)).await;
    assert_eq!(plane.worker(id).job.unwrap().kind, JobKind::UpdateWorker);
    plane.call("PATCH", &path, Some(json!({"priority": 2}))).await;
    assert!(failed(&plane, id).await.contains("superseded"));
    assert_eq!(plane.worker(id).spec.priority, 2);
    assert_eq!(plane.get(&path).await.body["model_id"], "tiny", "the worker stays as it was");
}

#[tokio::test]
async fn a_bootstrap_port_that_does_not_answer_is_counted_and_stops_nothing() {
    let (plane, engine) = (Plane::start(), FakeEngine::start().await);
    let failures = plane.metrics.pd_rendezvous_failures.with_label_values(&["prefill", "probe"]);
    let dead = dead_url().await.rsplit(':').next().unwrap().parse::<u16>().unwrap();
    let mut body = spec(&engine.url, "prefill");
    body["bootstrap_port"] = json!(dead);
    plane.register(body).await;
    eventually("counted", || failures.get() == 1).await;

    let (listener, engine) = (TcpListener::bind("127.0.0.1:0").await.unwrap(), FakeEngine::start().await);
    let mut body = spec(&engine.url, "prefill");
    body["bootstrap_port"] = json!(listener.local_addr().unwrap().port());
    plane.register(body).await;
    listener.accept().await.unwrap();
    assert_eq!(failures.get(), 1);
}

#[tokio::test]
async fn an_undeclared_connector_is_shown_and_counted() {
    let (plane, engine) = (Plane::start(), FakeEngine::vllm().await);
    let id = plane.register(spec(&engine.url, "prefill")).await;
    let shown = plane.get(&format!("/workers/{id}")).await.body;
    assert!(shown["warning"].as_str().unwrap().contains("kv_connector"));
    eventually("counted", || plane.metrics.pd_undeclared_connectors.get() == 1).await;
    let pool = plane.metrics.worker_pool_size.with_label_values(&["prefill", "http", "tiny"]);
    assert_eq!(pool.get(), 1);
    assert_eq!(plane.metrics.worker_health.with_label_values(&[&engine.url]).get(), 1);
    plane.call("PATCH", &format!("/workers/{id}"), Some(json!({"health": {"drain_settle_secs": 0}}))).await;
    plane.call("DELETE", &format!("/workers/{id}"), None).await;
    let shown = || String::from_utf8(plane.metrics.render().unwrap()).unwrap();
    eventually("gone", || !shown().contains("smg_worker_pool_size{") && !shown().contains(&engine.url)).await;
}

#[tokio::test]
async fn start_up_flags_are_upserts_and_unnamed_workers_leave() {
    let plane = Plane::start();
    let (one, two, three) = (FakeEngine::vllm().await, FakeEngine::vllm().await, FakeEngine::vllm().await);
    let by_api = plane.register(spec(&three.url, "regular")).await;
    let worker = |engine: &FakeEngine| WorkerSpec::new(format!("{}/", engine.url), WorkerType::Regular);
    let document = PolicyDocument { policy: Some(smg_fleet::policy::PolicyName::Random), ..Default::default() };
    let revision = plane.plane.apply_startup(vec![worker(&one), worker(&two)], document.clone()).await.unwrap();
    assert_eq!(revision, plane.store.local().revision().min(revision));
    let ready = |state: &smg_state::State| state.workers().filter(|worker| worker.facts.is_some()).count() == 3;
    plane.until("registered", ready).await;
    assert_eq!(plane.store.local().policy("").unwrap().document, document);

    let mut changed = worker(&one);
    changed.priority = 9;
    changed.health.drain_settle_secs = Some(0);
    plane.plane.apply_startup(vec![changed], document.clone()).await.unwrap();
    plane
        .until("reconciled", |state| {
            let urls: Vec<_> = state.workers().map(|worker| worker.spec.url.clone()).collect();
            let changed = state.worker_by_url(&one.url).is_some_and(|worker| worker.spec.priority == 9);
            changed && !urls.contains(&two.url) && state.worker(by_api).is_some()
        })
        .await;

    let before = plane.store.local().revision();
    let twice = plane.plane.apply_startup(vec![worker(&two), worker(&two)], document.clone()).await;
    assert!(twice.unwrap_err().to_string().contains("twice"));
    let invalid = plane.plane.apply_startup(vec![WorkerSpec::new("h:1", WorkerType::Regular)], document).await;
    assert!(invalid.unwrap_err().to_string().contains("h:1"));
    assert_eq!(plane.store.local().revision(), before);
}
