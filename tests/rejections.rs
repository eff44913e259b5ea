//! Registrations that are malformed, or whose engine is not there, sick or lying, end with readable words and harm nobody.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod support;

use std::time::Duration;

use reqwest::StatusCode;
use serde_json::{Value, json};
use support::refusals::*;
use support::*;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;

const CHAT: &str = "/v1/chat/completions";

#[tokio::test]
async fn malformed_registrations_are_refused_and_leave_nothing() {
    let smg = Smg::launch(&[]).await;
    let post = async |body: &str| smg.post_bytes("/workers", body.to_owned()).await;
    for body in ["", "{", "[]", "1", "{}", "{\"url\":7}", "{\"url\":\"http://127.0.0.1:9\",\"worker_type\":\"other\"}"]
    {
        admin_refused(post(body).await, 400, "BAD_REQUEST").await;
    }
    for (spec, word) in [
        (json!({"url": "ftp://127.0.0.1:9"}), "url"),
        (json!({"url": "http://127.0.0.1:9", "bootstrap_port": 0}), "bootstrap_port"),
        (json!({"url": "http://127.0.0.1:9", "bootstrap_port": 70000}), "u16"),
        (json!({"url": "http://127.0.0.1:9", "cost": 0}), "cost"),
        (json!({"url": "http://127.0.0.1:9", "labels": {"dp_size": "none"}}), "dp_size"),
    ] {
        let message = admin_refused(smg.post("/workers", &spec).await, 400, "BAD_REQUEST").await;
        assert!(message.to_lowercase().contains(word), "{spec}: {message}");
    }
    let plain = smg.client.post(format!("{}/workers", smg.url)).body("{\"url\":\"http://127.0.0.1:9\"}").send().await;
    admin_refused(plain.unwrap(), 400, "BAD_REQUEST").await;
    let provider = json!({"url": "http://127.0.0.1:9", "provider": "openai"});
    admin_refused(smg.post("/workers", &provider).await, 400, "PROVIDER_NOT_COMPILED").await;
    admin_refused(smg.get("/workers/not-an-id").await, 400, "BAD_REQUEST").await;
    admin_refused(smg.get("/workers/00000000-0000-7000-8000-000000000000").await, 404, "WORKER_NOT_FOUND").await;
    let unknown = smg.client.put(format!("{}/fleet/policies/default", smg.url)).json(&json!({"polizy": "random"}));
    admin_refused(unknown.send().await.unwrap(), 400, "BAD_REQUEST").await;
    assert_eq!(smg.get_json("/workers").await["total"], 0);

    let engine = sglang(Role::Decode).await;
    let id = smg.register(&spec(&engine, "decode")).await;
    admin_refused(smg.post("/workers", &spec(&engine, "decode")).await, 409, "WORKER_ALREADY_EXISTS").await;
    let moved = json!({"url": "http://127.0.0.1:9", "worker_type": "decode"});
    let put = smg.client.put(format!("{}/workers/{id}", smg.url)).json(&moved).send().await.unwrap();
    admin_refused(put, 400, "BAD_REQUEST").await;
}

/// Waits until a registration was given up, and returns the reason.
async fn failed_job(smg: &Smg, spec: &Value) -> String {
    let response = smg.post("/workers", spec).await;
    assert_eq!(response.status(), StatusCode::ACCEPTED);
    let location = response.headers()["location"].to_str().unwrap().to_owned();
    let shown = eventually(&format!("the registration of {spec} fails"), || async {
        let shown = smg.get_json(&location).await;
        assert_ne!(shown["is_healthy"], true, "{shown}");
        (shown["job_status"]["status"] == "failed").then_some(shown)
    })
    .await;
    assert_eq!(shown["status"], "failed", "{shown}");
    assert_eq!(shown["job_status"]["job_type"], "AddWorker");
    assert_eq!(shown["job_status"]["worker_url"], spec["url"]);
    shown["job_status"]["message"].as_str().filter(|words| !words.is_empty()).unwrap().to_owned()
}

#[tokio::test]
async fn workers_that_cannot_be_reached_or_never_become_healthy_fail_readably() {
    let smg = Smg::launch(&["--worker-startup-timeout-secs", "1", "--health-check-timeout-secs", "1"]).await;
    let (sick, moved, silent) = (sglang(Role::Decode).await, sglang(Role::Decode).await, sglang(Role::Decode).await);
    sick.set_fault(Fault::health().status(500, "{}"));
    moved.set_fault(Fault::health().status(302, "{}").header("location", &format!("{}/health", smg.url)));
    silent.set_fault(Fault::all().hang());
    let refused_url = format!("http://127.0.0.1:{}", free_port());
    let cases = [
        (refused_url, "refused"),
        ("http://no-such-host.invalid:1".to_owned(), "no-such-host.invalid"),
        (sick.url(), "500"),
        (moved.url(), "302"),
        (silent.url(), "no answer within"),
    ];
    let waiting = cases.iter().map(|(url, word)| {
        let smg = &smg;
        async move {
            let message = failed_job(smg, &json!({"url": url, "worker_type": "decode"})).await;
            assert!(message.contains(word) || *word == "no-such-host.invalid", "{url}: {message}");
        }
    });
    futures::future::join_all(waiting).await;
    assert_eq!(smg.get_json("/workers").await["total"], 5, "a failure stays readable");
    let ipc = smg.post("/workers", &json!({"url": "ipc:///tmp/engine", "worker_type": "prefill"})).await;
    if ipc.status() == StatusCode::ACCEPTED {
        let location = ipc.headers()["location"].to_str().unwrap().to_owned();
        eventually("the ipc registration fails", || async {
            (smg.get_json(&location).await["job_status"]["status"] == "failed").then_some(())
        })
        .await;
    } else {
        admin_refused(ipc, 400, "BAD_REQUEST").await;
    }
}

/// An engine that is healthy and answers everything else with an endless body.
async fn endless_engine() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    tokio::spawn(async move {
        while let Ok((mut socket, _)) = listener.accept().await {
            tokio::spawn(async move {
                let mut head = vec![0; 4096];
                let read = socket.read(&mut head).await.unwrap_or(0);
                if head[..read].starts_with(b"GET /health") {
                    let _ =
                        socket.write_all(b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 0\r\n\r\n").await;
                    return;
                }
                let begin = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n\r\n{\"data\":[";
                let mut alive = socket.write_all(begin).await.is_ok();
                while alive {
                    alive = socket.write_all(&[b' '; 65536]).await.is_ok();
                }
            });
        }
    });
    url
}

#[tokio::test]
async fn workers_that_lie_at_registration_do_no_harm() {
    let (smg, _prefill, _decode) = sglang_pair(&["--worker-startup-timeout-secs", "3"]).await;
    let garbage = vllm(Role::Regular, Connector::None).await;
    garbage.set_fault(Fault::path("/v1/models").status(200, "<html>not JSON</html>"));
    garbage.set_fault(Fault::path("/version").status(200, "[[["));
    let wrong = vllm(Role::Regular, Connector::None).await;
    wrong.set_fault(Fault::path("/v1/models").status(200, r#"{"data":[{"id":7,"owned_by":{}}]}"#));
    let raw = vllm(Role::Regular, Connector::None).await;
    raw.set_fault(Fault::path("/v1/models").raw([(Duration::ZERO, "garbage\r\n\r\n")]));
    let endless = endless_engine().await;
    let cases = [garbage.url(), wrong.url(), raw.url(), endless];
    let mut locations = Vec::new();
    for url in &cases {
        let response =
            smg.post("/workers", &json!({"url": url, "worker_type": "regular", "models": [{"id": "liar"}]})).await;
        assert_eq!(response.status(), StatusCode::ACCEPTED);
        locations.push(response.headers()["location"].to_str().unwrap().to_owned());
    }
    // Each registration ends, one way or the other, with readable facts; whoever was served before is served on.
    for location in &locations {
        let shown = eventually(&format!("the job of {location} ends"), || async {
            let shown = smg.get_json(location).await;
            let ended = shown["is_healthy"] == true || shown["job_status"]["status"] == "failed";
            assert_eq!(smg.post(CHAT, &chat()).await.status(), StatusCode::OK);
            ended.then_some(shown)
        })
        .await;
        if shown["job_status"]["status"] == "failed" {
            assert!(shown["job_status"]["message"].as_str().is_some_and(|words| !words.is_empty()), "{shown}");
        } else {
            assert_eq!(shown["model_id"], "liar", "{shown}");
        }
    }
    smg.until_idle().await;
}
