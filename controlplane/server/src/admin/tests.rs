//! The admin API as an operator meets it: its answers, its refusals, its conditional and repeated writes.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use axum::body::Body;
use axum::http::Request;
use serde_json::{Value, json};
use smg_fleet::Health;
use smg_store::{ClusterStore, StoreError};
use uuid::Uuid;

use crate::testing::{FakeEngine, Plane, dead_url};

const JSON: (&str, &str) = ("content-type", "application/json");

fn spec(url: &str) -> Value {
    json!({"url": url, "worker_type": "prefill", "runtime_type": "vllm", "kv_connector": "NixlConnector"})
}

#[tokio::test]
async fn a_creation_is_accepted_with_the_documented_answer_and_is_readable_at_its_location() {
    let plane = Plane::start();
    let url = dead_url().await;
    let reply = plane.call("POST", "/workers", Some(spec(&url))).await;
    let id = reply.id();
    assert_eq!(reply.status, 202);
    assert_eq!(reply.header("location"), format!("/workers/{id}"));
    let expected = json!({
        "status": "accepted", "worker_id": id, "url": url, "location": format!("/workers/{id}"),
        "message": "Worker addition queued for background processing",
    });
    assert_eq!(reply.body, expected);
    assert_eq!(id.0.get_version_num(), 7);
    let shown = plane.get(reply.header("location")).await;
    assert_eq!(shown.status, 200);
    assert_eq!(shown.body["status"], "pending");
    assert_eq!(shown.body["is_healthy"], false);
    assert_eq!(shown.body["job_status"]["job_type"], "AddWorker");
    assert_eq!(shown.body["job_status"]["worker_url"], url);
}

#[tokio::test]
async fn every_error_has_its_status_and_code() {
    let plane = Plane::with(|options| options.max_body_bytes = 1_000);
    let unknown = format!("/workers/{}", Uuid::now_v7());
    let url = dead_url().await;
    let body = |value: Value| Some(value);
    let large = json!({"url": url, "labels": {"x": "y".repeat(2_000)}});
    let cases: Vec<(&str, &str, Option<Value>, u16, &str)> = vec![
        ("GET", &unknown, None, 404, "WORKER_NOT_FOUND"),
        ("PUT", &unknown, body(spec(&url)), 404, "WORKER_NOT_FOUND"),
        ("PATCH", &unknown, body(json!({})), 404, "WORKER_NOT_FOUND"),
        ("DELETE", &unknown, None, 404, "WORKER_NOT_FOUND"),
        ("GET", "/workers/7", None, 400, "BAD_REQUEST"),
        ("PUT", "/workers/7", body(spec(&url)), 400, "BAD_REQUEST"),
        ("PATCH", "/workers/7", body(json!({})), 400, "BAD_REQUEST"),
        ("DELETE", "/workers/7", None, 400, "BAD_REQUEST"),
        ("POST", "/workers", None, 400, "BAD_REQUEST"),
        ("POST", "/workers", body(json!([])), 400, "BAD_REQUEST"),
        ("POST", "/workers", body(json!({})), 400, "BAD_REQUEST"),
        ("POST", "/workers", body(json!({"url": 7})), 400, "BAD_REQUEST"),
        ("POST", "/workers", body(json!({"url": "h:1"})), 400, "BAD_REQUEST"),
        ("POST", "/workers", body(json!({"url": url, "worker_type": "both"})), 400, "BAD_REQUEST"),
        ("POST", "/workers", body(json!({"url": url, "priority": -1})), 400, "BAD_REQUEST"),
        ("POST", "/workers", body(json!({"url": url, "cost": 0})), 400, "BAD_REQUEST"),
        ("POST", "/workers", body(json!({"url": url, "bootstrap_port": 0})), 400, "BAD_REQUEST"),
        ("POST", "/workers", body(json!({"url": url, "bootstrap_port": 65536})), 400, "BAD_REQUEST"),
        ("POST", "/workers", body(json!({"url": url, "labels": {"dp_size": "0"}})), 400, "BAD_REQUEST"),
        ("POST", "/workers", body(json!({"url": url, "provider": "openai"})), 400, "PROVIDER_NOT_COMPILED"),
        ("POST", "/workers", body(json!({"url": url, "runtime": "external"})), 400, "PROVIDER_NOT_COMPILED"),
        ("POST", "/workers", body(large.clone()), 413, "PAYLOAD_TOO_LARGE"),
        ("PUT", &unknown, body(large), 413, "PAYLOAD_TOO_LARGE"),
        ("GET", "/workers?consistency=maybe", None, 400, "BAD_REQUEST"),
        ("GET", "/fleet/policies/absent", None, 404, "POLICY_NOT_FOUND"),
        ("DELETE", "/fleet/policies/absent", None, 404, "POLICY_NOT_FOUND"),
        ("PUT", "/fleet/policies/default", body(json!({"polcy": "random"})), 400, "BAD_REQUEST"),
        ("PUT", "/fleet/policies/default", body(json!({"policy": "passthrough"})), 400, "BAD_REQUEST"),
        ("PUT", "/fleet/policies/m", body(json!({"health": {}})), 400, "BAD_REQUEST"),
        ("GET", "/nope", None, 404, "NOT_FOUND"),
        ("GET", "/workers/a/b", None, 404, "NOT_FOUND"),
    ];
    for (method, path, body, status, code) in cases {
        let shown = format!("{method} {path} {body:?}");
        let reply = plane.call(method, path, body).await;
        assert_eq!(reply.code(), (status, code), "{shown}");
        assert!(reply.body["error"].as_str().is_some_and(|error| !error.is_empty()), "{shown}");
        assert!(!reply.header("x-smg-revision").is_empty(), "{shown}");
    }
    assert_eq!(plane.store.local().revision(), 1, "only the cluster was named");
}

#[tokio::test]
async fn a_wrong_method_names_the_right_ones() {
    let plane = Plane::start();
    for (method, path, allowed) in [
        ("DELETE", "/workers", "GET,HEAD,POST"),
        ("POST", "/workers/7", "GET,HEAD,PUT,PATCH,DELETE"),
        ("POST", "/fleet/cluster", "GET,HEAD"),
    ] {
        let reply = plane.call(method, path, Some(json!({}))).await;
        assert_eq!(reply.code(), (405, "METHOD_NOT_ALLOWED"));
        let mut named: Vec<&str> = reply.header("allow").split(',').map(str::trim).collect();
        let mut expected: Vec<&str> = allowed.split(',').collect();
        named.sort_unstable();
        expected.sort_unstable();
        assert_eq!(named, expected, "{path}");
    }
}

#[tokio::test]
async fn a_body_must_be_declared_as_json_and_be_json() {
    let plane = Plane::start();
    let body = spec("http://127.0.0.1:9");
    let none = plane.call_with("POST", "/workers", &[], Some(body.clone())).await;
    assert_eq!(none.code(), (400, "BAD_REQUEST"));
    let text = plane.call_with("POST", "/workers", &[("content-type", "text/plain")], Some(body.clone())).await;
    assert_eq!(text.code(), (400, "BAD_REQUEST"));
    let request = Request::post("/workers").header("content-type", "application/json").body(Body::from("{\"url\":"));
    assert_eq!(plane.send(request.unwrap()).await.code(), (400, "BAD_REQUEST"));
    let charset = ("content-type", "application/json; charset=utf-8");
    assert_eq!(plane.call_with("POST", "/workers", &[charset], Some(body)).await.status, 202);
}

#[tokio::test]
async fn a_body_without_a_length_is_cut_at_the_limit() {
    let plane = Plane::with(|options| options.max_body_bytes = 1_000);
    let pieces = futures::stream::repeat_with(|| Ok::<_, std::io::Error>(vec![b' '; 100]));
    let request = Request::post("/workers").header("content-type", "application/json").body(Body::from_stream(pieces));
    assert_eq!(plane.send(request.unwrap()).await.code(), (413, "PAYLOAD_TOO_LARGE"));
}

#[tokio::test]
async fn of_concurrent_creations_of_one_url_exactly_one_is_accepted() {
    let plane = Plane::start();
    let url = dead_url().await;
    let spellings = [url.clone(), format!("{url}/"), format!("{url}//")];
    let creations = (0..8).map(|n| plane.call("POST", "/workers", Some(spec(&spellings[n % 3]))));
    let replies = futures::future::join_all(creations).await;
    assert_eq!(replies.iter().filter(|reply| reply.status == 202).count(), 1);
    let refused: Vec<_> = replies.iter().filter(|reply| reply.status != 202).map(|reply| reply.code()).collect();
    assert_eq!(refused, [(409, "WORKER_CREATE_IN_PROGRESS"); 7]);
}

#[tokio::test]
async fn a_registered_url_cannot_be_registered_again_and_cannot_change() {
    let plane = Plane::start();
    let engine = FakeEngine::vllm().await;
    let id = plane.register(spec(&engine.url)).await;
    let again = plane.call("POST", "/workers", Some(spec(&engine.url))).await;
    assert_eq!(again.code(), (409, "WORKER_ALREADY_EXISTS"));
    let moved = plane.call("PUT", &format!("/workers/{id}"), Some(spec("http://127.0.0.1:9"))).await;
    assert_eq!(moved.code(), (400, "BAD_REQUEST"));
    let put = plane.call("PUT", &format!("/workers/{id}"), Some(spec(&format!("{}/", engine.url)))).await;
    assert_eq!(put.status, 202);
    let expected = json!({
        "status": "accepted", "worker_id": id, "message": "Worker update queued for background processing",
    });
    assert_eq!(put.body, expected);
}

#[tokio::test]
async fn a_patch_merges_labels_and_leaves_the_rest_alone() {
    let plane = Plane::start();
    let engine = FakeEngine::vllm().await;
    let mut body = spec(&engine.url);
    body["labels"] = json!({"zone": "a", "rack": "1"});
    let id = plane.register(body).await;
    let path = format!("/workers/{id}");
    let patch = json!({"priority": 7, "labels": {"zone": "b"}, "health": {"failure_threshold": 9}, "api_key": "k"});
    let reply = plane.call("PATCH", &path, Some(patch)).await;
    assert_eq!(reply.status, 202);
    let shown = plane.get(&path).await.body;
    assert_eq!((shown["priority"].as_u64(), shown["cost"].as_f64()), (Some(7), Some(1.0)));
    assert_eq!((&shown["labels"]["zone"], &shown["labels"]["rack"]), (&json!("b"), &json!("1")));
    assert_eq!(shown["health"], json!({"failure_threshold": 9}));
    assert_eq!(shown["pd_pairing"], "vllm/nixl/?");
    assert_eq!(plane.worker(id).spec.api_key.as_deref(), Some("k"));
    assert!(shown.get("api_key").is_none());
    for broken in [json!({"labels": {"kv_connector": "x"}}), json!({"cost": -1}), json!({"labels": {"a b": "x"}})] {
        assert_eq!(plane.call("PATCH", &path, Some(broken)).await.code(), (400, "BAD_REQUEST"));
    }
    plane.store.lead(smg_store::Leadership::Follower);
    plane
        .plane
        .writer()
        .write(crate::writer::Write::of("test", smg_state::Command::SetHealth { id, health: Health::Failed }))
        .await
        .unwrap();
    plane.call("PATCH", &path, Some(json!({"health": {"disable_health_check": true}}))).await;
    assert_eq!(plane.get(&path).await.body["status"], "ready", "an unprobed worker is ready");
}

#[tokio::test]
async fn the_list_counts_roles_and_filters_by_model() {
    let plane = Plane::start();
    let empty =
        json!({"workers": [], "total": 0, "stats": {"prefill_count": 0, "decode_count": 0, "regular_count": 0}});
    assert_eq!(plane.get("/workers").await.body, empty);
    for (role, model) in [("prefill", "a"), ("decode", "a"), ("decode", "b"), ("regular", ""), ("encode", "a")] {
        let mut body = json!({"url": dead_url().await, "worker_type": role});
        if !model.is_empty() {
            body["models"] = json!([{"id": model, "aliases": [format!("{model}-alias")]}]);
        }
        assert_eq!(plane.call("POST", "/workers", Some(body)).await.status, 202);
    }
    let counts = |body: &Value| {
        let stats =
            ["prefill_count", "decode_count", "regular_count"].map(|name| body["stats"][name].as_u64().unwrap());
        (body["total"].as_u64().unwrap(), stats)
    };
    assert_eq!(counts(&plane.get("/workers").await.body), (5, [1, 2, 1]));
    assert_eq!(counts(&plane.get("/workers?model=a").await.body), (4, [1, 1, 1]), "one without models serves any");
    assert_eq!(counts(&plane.get("/workers?model=b-alias").await.body), (2, [0, 1, 1]));
    assert_eq!(counts(&plane.get("/workers?model=c").await.body), (1, [0, 0, 1]));
}

#[tokio::test]
async fn no_answer_ever_shows_a_key() {
    let plane = Plane::start();
    let engine = FakeEngine::vllm().await;
    let mut body = spec(&engine.url);
    body["api_key"] = json!("hush-hush");
    let id = plane.register(body.clone()).await;
    for path in ["/workers".to_owned(), format!("/workers/{id}")] {
        assert!(!plane.get(&path).await.body.to_string().contains("hush"));
    }
    assert!(!plane.call("POST", "/workers", Some(body)).await.body.to_string().contains("hush"));
}

#[tokio::test]
async fn a_conditional_write_holds_only_for_the_revision_that_was_read() {
    let plane = Plane::start();
    let engine = FakeEngine::vllm().await;
    let id = plane.register(spec(&engine.url)).await;
    let path = format!("/workers/{id}");
    let shown = plane.get(&path).await;
    let tag = shown.header("etag").to_owned();
    assert_eq!(tag, format!("\"{}\"", shown.body["mod_revision"]));
    let patch = |n: u32| Some(json!({"priority": n}));
    let first = plane.call_with("PATCH", &path, &[JSON, ("if-match", &tag)], patch(1)).await;
    assert_eq!(first.status, 202);
    let second = plane.call_with("PATCH", &path, &[JSON, ("if-match", &tag)], patch(2)).await;
    assert_eq!(second.code(), (412, "REVISION_CONFLICT"));
    assert_eq!(plane.worker(id).spec.priority, 1);
    let bare = plane.worker(id).mod_revision.to_string();
    assert_eq!(plane.call_with("PATCH", &path, &[JSON, ("if-match", &bare)], patch(3)).await.status, 202);
    for nonsense in ["*", "\"a\"", "\"1\", \"2\"", ""] {
        let reply = plane.call_with("DELETE", &path, &[("if-match", nonsense)], None).await;
        assert_eq!(reply.code(), (400, "BAD_REQUEST"), "{nonsense}");
    }
    assert_eq!(plane.call_with("DELETE", &path, &[("if-match", &bare)], None).await.code().0, 412);
    let reply = plane.call_with("PUT", &path, &[JSON, ("if-match", "1")], Some(spec(&engine.url))).await;
    assert_eq!(reply.code(), (412, "REVISION_CONFLICT"));
}

#[tokio::test]
async fn a_write_that_is_repeated_with_its_key_is_answered_again_and_not_applied_again() {
    let plane = Plane::start();
    let key = Uuid::now_v7().to_string();
    let headers = [JSON, ("idempotency-key", key.as_str())];
    let body = spec(&dead_url().await);
    let first = plane.call_with("POST", "/workers", &headers, Some(body.clone())).await;
    let second = plane.call_with("POST", "/workers", &headers, Some(body)).await;
    assert_eq!(first.status, 202);
    assert_eq!((second.status, &second.body), (first.status, &first.body));
    assert_eq!(second.header("x-smg-revision"), first.header("x-smg-revision"));
    let path = format!("/workers/{}", first.id());
    let removed = plane.call_with("DELETE", &path, &headers, None).await;
    assert_eq!(removed.status, 202, "a reused key does not hide another request");
    assert!(plane.store.local().worker(first.id()).is_none());
    let again = plane.call_with("DELETE", &path, &headers, None).await;
    assert_eq!((again.status, &again.body), (removed.status, &removed.body));
    let reply = plane.call_with("DELETE", &path, &[("idempotency-key", "mine")], None).await;
    assert_eq!(reply.code(), (400, "BAD_REQUEST"));
}

#[tokio::test]
async fn policies_are_stored_shown_and_deleted() {
    let plane = Plane::start();
    let path = "/fleet/policies/default";
    let none = plane.get(path).await;
    assert_eq!((none.status.as_u16(), none.header("etag")), (200, "\"0\""));
    assert_eq!(none.body["document"], json!({}));
    let document = json!({"policy": "random", "retry": {"max_retries": 2}});
    let put = plane.call_with("PUT", path, &[JSON, ("if-match", "\"0\"")], Some(document.clone())).await;
    assert_eq!(put.status, 200, "{put:?}");
    assert_eq!(put.body["document"], document);
    let shown = plane.get(path).await;
    assert_eq!((&shown.body, shown.header("etag")), (&put.body, put.header("etag")));
    assert_eq!(shown.body["source"], "api");
    let stale = plane.call_with("PUT", path, &[JSON, ("if-match", "\"0\"")], Some(document.clone())).await;
    assert_eq!(stale.code(), (412, "REVISION_CONFLICT"));
    let model = "/fleet/policies/org/model-7B";
    assert_eq!(plane.call("PUT", model, Some(json!({"pairing_mode": "strict"}))).await.status, 200);
    assert_eq!(plane.get("/fleet/policies/org%2Fmodel-7B").await.body["document"]["pairing_mode"], "strict");
    let list = plane.get("/fleet/policies").await.body;
    assert_eq!(list["total"], 2);
    let models: Vec<_> = list["policies"].as_array().unwrap().iter().map(|policy| &policy["model"]).collect();
    assert_eq!(models, ["default", "org/model-7B"]);
    assert_eq!(plane.call_with("DELETE", model, &[("if-match", "1")], None).await.code().0, 412);
    assert_eq!(plane.call("DELETE", model, None).await.status, 204);
    assert_eq!(plane.get(model).await.code(), (404, "POLICY_NOT_FOUND"));
}

#[tokio::test]
async fn a_write_names_the_revision_that_holds_it_and_a_read_the_one_it_saw() {
    let plane = Plane::start();
    let revision = |reply: &crate::testing::Reply| reply.header("x-smg-revision").parse::<u64>().unwrap();
    let put = plane.call("PUT", "/fleet/policies/m", Some(json!({}))).await;
    assert_eq!(revision(&put), plane.store.local().revision());
    let read = plane.get("/fleet/policies").await;
    assert_eq!(revision(&read), revision(&put));
    let next = plane.call("PUT", "/fleet/policies/m", Some(json!({}))).await;
    assert_eq!(revision(&next), revision(&put) + 1);
}

#[tokio::test]
async fn a_store_that_does_not_answer_is_named_for_what_it_is() {
    let plane = Plane::start();
    plane.call("PUT", "/fleet/policies/m", Some(json!({}))).await;
    let cases = [
        (StoreError::Failed("disk full".into()), "STORE_FAILED"),
        (StoreError::Unavailable("no leader".into()), "CONTROL_PLANE_UNAVAILABLE"),
        (StoreError::Closed, "CONTROL_PLANE_UNAVAILABLE"),
    ];
    for (error, code) in cases {
        for (method, path) in [("GET", "/workers"), ("GET", "/fleet/policies"), ("PUT", "/fleet/policies/m")] {
            plane.store.fail(vec![error.clone()]);
            let reply = plane.call(method, path, Some(json!({}))).await;
            assert_eq!(reply.code(), (503, code), "{method} {path}");
        }
        plane.store.fail(vec![error]);
        assert_eq!(plane.get("/fleet/policies?consistency=stale").await.status, 200, "a stale read does not ask");
        assert_eq!(plane.get("/fleet/cluster").await.status, 200);
        plane.store.fail(Vec::new());
    }
}

#[tokio::test]
async fn an_unknown_outcome_is_asked_for_again_with_the_same_identity() {
    let plane = Plane::start();
    plane.call("PUT", "/fleet/policies/m", Some(json!({}))).await;
    let before = plane.store.local().revision();
    plane.store.fail(vec![StoreError::Unknown("slow".into()), StoreError::Unknown("slow".into())]);
    let reply = plane.call("PUT", "/fleet/policies/m", Some(json!({"policy": "random"}))).await;
    assert_eq!(reply.status, 200);
    assert_eq!(plane.store.local().revision(), before + 1);
}

#[tokio::test]
async fn the_cluster_says_who_it_is() {
    let plane = Plane::start();
    plane.call("PUT", "/fleet/policies/m", Some(json!({}))).await;
    let cluster = plane.get("/fleet/cluster").await.body;
    assert_eq!((&cluster["role"], &cluster["store_failure"]), (&json!("leader"), &Value::Null));
    assert_eq!(cluster["cluster_id"], json!(plane.store.local().cluster_id()));
    assert_ne!(cluster["cluster_id"], json!(Uuid::nil()));
    assert_eq!(cluster["revision"], plane.store.local().revision());
    assert_eq!(
        plane.get("/fleet/gateways").await.body,
        json!({"total": 0, "gateways": [], "members": [{"node_id": 0, "answered": true}]})
    );
}
