//! What every change has in common: rehearsals, conditions, records, outcomes; and lists that are followed.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use serde_json::{Value, json};
use smg_fleet::{Intent, TokenHash};
use smg_store::{ClusterStore, StoreError};
use uuid::Uuid;

use crate::testing::{FakeEngine, Lines, Plane, dead_url};

const JSON: (&str, &str) = ("content-type", "application/json");

async fn registered(plane: &Plane) -> (FakeEngine, String) {
    let engine = FakeEngine::vllm().await;
    let spec = json!({"url": engine.url, "worker_type": "prefill", "kv_connector": "NixlConnector"});
    let id = plane.register(spec).await;
    (engine, id.to_string())
}

#[tokio::test]
async fn a_rehearsal_answers_as_the_change_would_and_changes_nothing() {
    let plane = Plane::start();
    let (_engine, id) = registered(&plane).await;
    plane.call("POST", "/fleet/tokens", None).await;
    let before = plane.store.local();
    let url = dead_url().await;
    let cases = [
        ("POST", "/workers".to_owned(), Some(json!({"url": url}))),
        ("PATCH", format!("/workers/{id}"), Some(json!({"priority": 9}))),
        ("PUT", format!("/fleet/workers/{id}/intent"), Some(json!({"intent": "cordoned"}))),
        ("PUT", "/fleet/policies/m".to_owned(), Some(json!({"policy": "random"}))),
        ("PUT", "/fleet/settings".to_owned(), Some(json!({"name": "x"}))),
        ("POST", "/fleet/tokens".to_owned(), Some(json!({"name": "a", "role": "admin"}))),
        ("DELETE", format!("/workers/{id}"), None),
    ];
    for (method, path, body) in cases {
        let reply = plane.call(method, &format!("{path}?dry_run=true"), body).await;
        assert_eq!((reply.status.as_u16(), &reply.body["dry_run"]), (200, &json!(true)), "{method} {path} {reply:?}");
        assert_eq!(reply.body["revision"], before.revision() + 1, "{method} {path}");
        assert!(reply.body["result"].get("token").is_none(), "no secret of a token that does not exist");
    }
    let patched = plane.call("PATCH", &format!("/workers/{id}?dry_run=true"), Some(json!({"priority": 9}))).await;
    assert_eq!((&patched.body["result"]["priority"], &patched.body["result"]["id"]), (&json!(9), &json!(id)));
    let refused = plane.call("DELETE", "/fleet/policies/absent?dry_run=true", None).await;
    assert_eq!(refused.code(), (404, "POLICY_NOT_FOUND"), "what is refused is refused in a rehearsal too");
    let nonsense = plane.call("DELETE", "/fleet/policies/absent?dry_run=perhaps", None).await;
    assert_eq!(nonsense.code(), (400, "BAD_REQUEST"));
    assert_eq!(*plane.store.local(), *before);
}

#[tokio::test]
async fn a_change_that_did_not_succeed_says_what_became_of_it() {
    let plane = Plane::start();
    let unknown = format!("/workers/{}", Uuid::now_v7());
    let refused = plane.call("DELETE", &unknown, None).await;
    assert_eq!(refused.body["outcome"], "did_not_happen");
    assert!(plane.get(&unknown).await.body.get("outcome").is_none(), "a read has no outcome");
    plane.store.fail(vec![StoreError::Unavailable("no leader".into())]);
    let unavailable = plane.call("PUT", "/fleet/policies/m", Some(json!({}))).await;
    assert_eq!(
        (unavailable.code().1, &unavailable.body["outcome"]),
        ("CONTROL_PLANE_UNAVAILABLE", &json!("did_not_happen"))
    );
    let key = Uuid::now_v7().to_string();
    let headers = [JSON, ("idempotency-key", key.as_str())];
    let body = json!({"name": "ada", "role": "admin"});
    let first = plane.call_with("POST", "/fleet/tokens", &headers, Some(body.clone())).await;
    assert_eq!(first.status, 201);
    let secret = first.body["token"].as_str().unwrap();
    let bearer = format!("Bearer {secret}");
    let again = [JSON, ("idempotency-key", key.as_str()), ("authorization", bearer.as_str())];
    let repeated = plane.call_with("POST", "/fleet/tokens", &again, Some(body)).await;
    assert_eq!((repeated.code(), &repeated.body["outcome"]), ((409, "ALREADY_HAPPENED"), &json!("happened")));
    assert!(plane.store.local().tokens().any(|token| token.hash == TokenHash::of(secret)));
}

#[tokio::test]
async fn a_worker_is_taken_out_of_rotation_and_brought_back() {
    let plane = Plane::start();
    let (_engine, id) = registered(&plane).await;
    let path = format!("/fleet/workers/{id}/intent");
    let active = plane.get(&path).await;
    assert_eq!((&active.body["intent"], &active.body["idle"]), (&json!("active"), &json!(false)));
    let tag = active.header("etag").to_owned();
    let cordon = plane.call_with("PUT", &path, &[JSON, ("if-match", &tag)], Some(json!({"intent": "cordoned"}))).await;
    assert_eq!((cordon.status.as_u16(), &cordon.body["intent"]), (200, &json!("cordoned")));
    let shown = plane.get(&format!("/workers/{id}")).await.body;
    assert_eq!((&shown["intent"], &shown["mod_revision"]), (&json!("cordoned"), &cordon.body["mod_revision"]));
    assert_eq!(plane.get(&path).await.body["idle"], true, "no gateway is connected: nothing runs");
    let stale = plane.call_with("PUT", &path, &[JSON, ("if-match", &tag)], Some(json!({"intent": "active"}))).await;
    assert_eq!(stale.code(), (412, "REVISION_CONFLICT"));
    assert_eq!(plane.call("PUT", &path, Some(json!({"intent": "draining"}))).await.code(), (400, "BAD_REQUEST"));
    assert_eq!(plane.call("PUT", &path, Some(json!({"intent": "active"}))).await.status, 200);
    assert_eq!(plane.worker(id.parse().unwrap()).intent, Intent::Active);
    let nobody = format!("/fleet/workers/{}/intent", Uuid::now_v7());
    assert_eq!(plane.call("PUT", &nobody, Some(json!({"intent": "active"}))).await.code().0, 404);
}

#[tokio::test]
async fn every_change_is_on_record() {
    let plane = Plane::start();
    let (_engine, id) = registered(&plane).await;
    let path = format!("/workers/{id}");
    plane.call("PATCH", &path, Some(json!({"priority": 9, "api_key": "hush"}))).await;
    plane.call("PUT", "/fleet/policies/default", Some(json!({"policy": "random"}))).await;
    let audit = plane.get("/fleet/audit").await;
    let records = audit.body["records"].as_array().unwrap();
    let objects: Vec<&str> = records.iter().map(|record| record["object"].as_str().unwrap()).collect();
    let worker = format!("worker/{id}");
    assert_eq!(objects, ["policy/default", &worker, &worker], "newest first, and none of what jobs do");
    assert_eq!(records[0]["revision"], plane.store.local().revision());
    assert_eq!((&records[0]["actor"], &records[0]["action"]), (&json!("admin-api"), &json!("put_policy")));
    assert_eq!(records[0]["changes"], json!([{"field": "policy", "after": "random"}]));
    let priority = json!({"field": "priority", "before": 50, "after": 9});
    assert!(records[1]["changes"].as_array().unwrap().contains(&priority), "{audit:?}");
    assert!(!audit.body.to_string().contains("hush"));
    let some = plane.get(&format!("/fleet/audit?object={worker}&action=patch&limit=5")).await.body;
    assert_eq!(some["total"], 1);
}

fn names(events: &[Value]) -> Vec<String> {
    let name = |event: &Value| match event["type"].as_str().unwrap() {
        "put" => format!("+{}", event["object"]["model"].as_str().or_else(|| event["object"]["id"].as_str()).unwrap()),
        "deleted" => format!("-{}", event["name"].as_str().unwrap()),
        other => other.to_owned(),
    };
    events.iter().map(name).collect()
}

/// Steps until one brings news.
async fn news(lines: &mut Lines) -> Vec<Value> {
    loop {
        let events = lines.step().await;
        if events.len() > 1 || events[0]["type"] == "end" {
            return events;
        }
    }
}

#[tokio::test]
async fn a_list_that_is_followed_shows_what_is_there_and_then_each_change() {
    let plane = Plane::start();
    plane.call("PUT", "/fleet/policies/a", Some(json!({"policy": "random"}))).await;
    let mut lines = plane.follow("/fleet/policies?watch=true").await;
    let first = lines.step().await;
    assert_eq!(names(&first), ["+a", "bookmark"]);
    assert_eq!(first[0]["object"]["document"]["policy"], "random");
    plane.call("PUT", "/fleet/policies/b", Some(json!({}))).await;
    assert_eq!(names(&news(&mut lines).await), ["+b", "bookmark"]);
    plane.call("DELETE", "/fleet/policies/a", None).await;
    let last = news(&mut lines).await;
    assert_eq!(names(&last), ["-a", "bookmark"]);
    drop(lines);
    plane.call("DELETE", "/fleet/policies/b", None).await;
    let (revision, history) = (&last[1]["revision"], last[1]["history_id"].as_str().unwrap());
    let mut resumed = plane.follow(&format!("/fleet/policies?watch=true&from={revision}&history={history}")).await;
    assert_eq!(names(&news(&mut resumed).await), ["-b", "bookmark"], "nothing in between is missed");
}

#[tokio::test]
async fn a_watch_from_what_is_no_longer_known_says_so_and_ends() {
    let plane = Plane::start();
    plane.call("PUT", "/fleet/policies/a", Some(json!({}))).await;
    let other = Uuid::now_v7();
    for from in ["from=9999".to_owned(), format!("from={}&history={other}", plane.store.local().revision())] {
        let mut lines = plane.follow(&format!("/fleet/policies?watch=true&{from}")).await;
        let end = lines.step().await;
        assert_eq!((&end[0]["type"], &end[0]["reason"]), (&json!("end"), &json!("compacted")), "{from}");
        assert_eq!(lines.next().await, None);
    }
    assert_eq!(plane.get("/fleet/policies?watch=true&from=x").await.code(), (400, "BAD_REQUEST"));
    assert_eq!(plane.get("/fleet/gateways?watch=true&from=1").await.code(), (400, "BAD_REQUEST"));
}

#[tokio::test]
async fn a_member_that_serves_as_many_watches_as_it_may_says_so_until_one_ends() {
    let plane = Plane::start();
    let path = "/fleet/policies?watch=true";
    let mut watches = Vec::new();
    for _ in 0..super::service::MAX_WATCHES {
        watches.push(plane.follow(path).await);
    }
    assert_eq!(plane.get(path).await.code(), (503, "BUSY"));
    watches.pop();
    plane.follow(path).await;
}

#[tokio::test]
async fn workers_and_tokens_are_followed_too_and_the_end_of_the_process_ends_a_watch() {
    let plane = Plane::start();
    let (_engine, id) = registered(&plane).await;
    let mut all = plane.follow("/workers?watch=true").await;
    assert_eq!(names(&all.step().await), [format!("+{id}"), "bookmark".to_owned()]);
    let mut none = plane.follow("/workers?watch=true&model=another").await;
    assert_eq!(names(&none.step().await), ["bookmark"]);
    let mut tokens = plane.follow("/fleet/tokens?watch=true").await;
    assert_eq!(names(&tokens.step().await), ["bookmark"]);
    plane.call("PUT", &format!("/fleet/workers/{id}/intent"), Some(json!({"intent": "cordoned"}))).await;
    assert_eq!(news(&mut all).await[0]["object"]["intent"], "cordoned");
    let created = plane.call("POST", "/fleet/tokens", Some(json!({"name": "ada", "role": "admin"}))).await;
    let shown = news(&mut tokens).await;
    assert_eq!((&shown[0]["object"]["name"], shown[0]["object"].get("token")), (&json!("ada"), None));
    assert_eq!(created.status, 201);
    plane.plane.stop().await;
    let end = loop {
        match all.next().await {
            Some(event) if event["type"] == "end" => break event,
            Some(_) => {}
            None => panic!("it ended without a word"),
        }
    };
    assert_eq!(end["reason"], "shutdown");
}
