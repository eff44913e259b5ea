//! Stopping a gateway and removing a worker let running answers end.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod support;

use std::time::{Duration, Instant};

use futures::future::join_all;
use reqwest::{Client, Response, StatusCode};
use serde_json::json;
use support::*;

const TOKENS: u64 = 20;

/// A pair whose streams last [`TOKENS`] times `token_delay`.
async fn slow_pair(token_delay: Duration, flags: &[&str]) -> (Smg, MockEngine, MockEngine) {
    let (prefill, decode) = (sglang(Role::Prefill).await, slow_decode(token_delay).await);
    let smg = Smg::launch(flags).await;
    smg.register_pair(&prefill, &decode).await;
    (smg, prefill, decode)
}

async fn slow_decode(token_delay: Duration) -> MockEngine {
    let engine = MockEngine::builder().engine(Engine::Sglang).role(Role::Decode).model(MODEL);
    engine.token_delay(token_delay).start().await.unwrap()
}

/// A stream whose first bytes have arrived, and these bytes.
async fn begin(smg: &Smg) -> (Response, Vec<u8>) {
    let mut body = chat_stream();
    body["max_tokens"] = json!(TOKENS);
    body["ignore_eos"] = json!(true);
    let mut response = smg.post("/v1/chat/completions", &body).await;
    assert_eq!(response.status(), StatusCode::OK);
    let first = response.chunk().await.unwrap().unwrap();
    (response, first.to_vec())
}

/// The rest of a stream: all its bytes when it ends properly.
async fn finish((mut response, mut bytes): (Response, Vec<u8>)) -> Result<String, reqwest::Error> {
    while let Some(chunk) = response.chunk().await? {
        bytes.extend_from_slice(&chunk);
    }
    Ok(String::from_utf8(bytes).unwrap())
}

/// Every connection is a new one.
fn fresh() -> Client {
    Client::builder().no_proxy().pool_max_idle_per_host(0).build().unwrap()
}

#[tokio::test]
async fn a_stop_signal_lets_streams_end_with_their_last_byte_and_then_refuses_connections() {
    let (mut smg, prefill, decode) =
        slow_pair(Duration::from_millis(400), &["--shutdown-grace-period-secs", "20"]).await;
    let streams = join_all((0..50).map(|_| begin(&smg))).await;
    let client = fresh();
    let url = |path: &str| format!("{}{path}", smg.url);
    // What asking takes on this machine.
    let mut asking = Vec::new();
    for _ in 0..10 {
        let asked = Instant::now();
        assert_eq!(client.get(url("/readiness")).send().await.unwrap().status(), StatusCode::OK);
        asking.push(asked.elapsed());
    }
    smg.signal("TERM");
    let signalled = Instant::now();
    // Not ready at once, alive throughout; whoever still comes is answered and asked to leave.
    eventually("readiness turns false", || async {
        let response = client.get(url("/readiness")).send().await.expect("new connections are still answered");
        (response.status() == StatusCode::SERVICE_UNAVAILABLE).then_some(())
    })
    .await;
    let turned = signalled.elapsed();
    assert!(turned < Duration::from_millis(200).max(10 * usual(asking.clone())), "{turned:?}, asking takes {asking:?}");
    let readiness = client.get(url("/readiness")).send().await.unwrap();
    assert_eq!(readiness.headers()["connection"], "close");
    assert!(readiness.text().await.unwrap().contains("draining"));
    let alive = client.get(url("/liveness")).send().await.unwrap();
    assert_eq!((alive.status(), &alive.headers()["connection"]), (StatusCode::OK, &"close".parse().unwrap()));
    let late = client.post(url("/v1/chat/completions")).json(&chat()).send().await.unwrap();
    assert_eq!((late.status(), &late.headers()["connection"]), (StatusCode::OK, &"close".parse().unwrap()));
    let ending = tokio::spawn(join_all(streams.into_iter().map(finish)));
    eventually("new connections are refused", || async {
        let refused = client.get(url("/liveness")).send().await.err()?;
        refused.is_connect().then_some(())
    })
    .await;
    assert!(signalled.elapsed() >= Duration::from_secs(4), "notice was {:?}", signalled.elapsed());
    for ended in ending.await.unwrap() {
        let text = ended.expect("a running stream is not cut");
        assert!(text.ends_with("data: [DONE]\n\n"), "{text}");
        assert!(!text.contains("\"error\""), "{text}");
    }
    let last_byte = Instant::now();
    assert_eq!(smg.exited().await.code(), Some(0));
    assert!(last_byte.elapsed() < Duration::from_secs(2), "it lingered for {:?}", last_byte.elapsed());
    assert_eq!((prefill.generation_count(), decode.generation_count()), (51, 51), "nothing was sent twice");
}

#[tokio::test]
async fn streams_that_outlast_the_grace_period_end_as_errors_and_engines_see_it() {
    const GRACE: Duration = Duration::from_secs(3);
    let (mut smg, prefill, decode) = slow_pair(Duration::ZERO, &["--shutdown-grace-period-secs", "3"]).await;
    // Both legs go on for long.
    prefill.set_fault(Fault::generation().status(200, "{}").delay_body(10 * PATIENCE));
    let events = (0..60).map(|number| (Duration::from_secs(number.min(1)), "data: {\"a\":1}\n\n"));
    decode.set_fault(Fault::generation().script(events.collect::<Vec<_>>()));
    let streams = join_all((0..4).map(|_| begin(&smg))).await;
    let signalled = Instant::now();
    smg.signal("TERM");
    for ended in join_all(streams.into_iter().map(finish)).await {
        assert!(ended.is_err(), "a cut stream looked complete: {ended:?}");
    }
    smg.exited().await;
    let took = signalled.elapsed();
    assert!(took >= GRACE && took < GRACE + Duration::from_secs(8), "{took:?}");
    let closed = |engine: &MockEngine| engine.generations().iter().all(|request| request.peer_closed_at.is_some());
    for engine in [&prefill, &decode] {
        engine.wait_until(PATIENCE, |engine| engine.active() == 0 && closed(engine)).await.unwrap();
    }
}

#[tokio::test]
async fn a_second_signal_ends_at_once() {
    let (mut smg, _prefill, decode) = slow_pair(Duration::from_secs(5), &["--shutdown-grace-period-secs", "120"]).await;
    let stream = begin(&smg).await;
    smg.signal("TERM");
    eventually("it drains", || async {
        let response = fresh().get(format!("{}/readiness", smg.url)).send().await.ok()?;
        (response.status() == StatusCode::SERVICE_UNAVAILABLE).then_some(())
    })
    .await;
    let signalled = Instant::now();
    smg.signal("TERM");
    assert!(finish(stream).await.is_err());
    smg.exited().await;
    assert!(signalled.elapsed() < Duration::from_secs(8), "{:?}", signalled.elapsed());
    decode.wait_until(PATIENCE, |engine| engine.active() == 0).await.unwrap();
}

#[tokio::test]
async fn a_removed_worker_ends_what_it_runs_and_gets_nothing_new() {
    // Streams of three seconds, and of ten in the long variant.
    let token = Duration::from_millis(if soaks() { 500 } else { 150 });
    let (smg, _prefill, leaving) = slow_pair(token, &["--drain-settle-secs", "1"]).await;
    let stream = begin(&smg).await;
    let staying = sglang(Role::Decode).await;
    smg.register(&spec(&staying, "decode")).await;
    let list = smg.get_json("/workers").await;
    let workers = list["workers"].as_array().unwrap();
    let id = workers.iter().find(|worker| worker["url"] == leaving.url()).unwrap()["id"].as_str().unwrap().to_owned();
    let path = format!("/workers/{id}");

    let removed = smg.client.delete(format!("{}{path}", smg.url)).send().await.unwrap();
    assert_eq!(removed.status(), StatusCode::ACCEPTED);
    let count = leaving.generation_count();
    let shown = smg.get_json(&path).await;
    assert_eq!(shown["status"], "draining", "{shown}");
    assert_eq!(shown["load"], 1);
    for _ in 0..50 {
        let response = smg.post("/v1/chat/completions", &chat()).await;
        assert_eq!(response.status(), StatusCode::OK);
        assert_eq!(response.headers()["x-smg-routed-worker-id"], staying.url());
    }
    assert_eq!((leaving.generation_count(), staying.generation_count()), (count, 50));
    let text = finish(stream).await.expect("the running stream is not cut");
    assert!(text.ends_with("data: [DONE]\n\n") && !text.contains("\"error\""), "{text}");
    eventually("the worker is gone", || async {
        (smg.get(&path).await.status() == StatusCode::NOT_FOUND).then_some(())
    })
    .await;
    assert_eq!(smg.metric("smg_worker_cb_transitions_total", &[]).await, 0.0);
    assert_eq!(smg.metric("smg_worker_errors_total", &[]).await, 0.0);
    smg.until_idle().await;
}

async fn id_of(smg: &Smg, engine: &MockEngine) -> String {
    let list = smg.get_json("/workers").await;
    let workers = list["workers"].as_array().unwrap();
    workers.iter().find(|worker| worker["url"] == engine.url()).unwrap()["id"].as_str().unwrap().to_owned()
}

#[tokio::test]
async fn a_removed_worker_stays_until_it_is_idle() {
    let (smg, _prefill, leaving) = slow_pair(Duration::from_millis(200), &["--drain-settle-secs", "1"]).await;
    let stream = begin(&smg).await;
    let path = format!("/workers/{}", id_of(&smg, &leaving).await);
    let removed = Instant::now();
    assert_eq!(smg.client.delete(format!("{}{path}", smg.url)).send().await.unwrap().status(), StatusCode::ACCEPTED);
    let ending = tokio::spawn(finish(stream));
    let mut seen_after_settling = false;
    while !ending.is_finished() {
        let shown = smg.get(&path).await;
        // Between the last byte and this answer it may have gone.
        if ending.is_finished() {
            break;
        }
        assert_eq!(shown.status(), StatusCode::OK, "it left after {:?} with a request running", removed.elapsed());
        assert_eq!(shown.json::<serde_json::Value>().await.unwrap()["status"], "draining");
        seen_after_settling |= removed.elapsed() > Duration::from_millis(1500);
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert!(seen_after_settling);
    assert!(ending.await.unwrap().unwrap().ends_with("data: [DONE]\n\n"));
    eventually("the worker is gone", || async { (smg.get(&path).await.status() == 404).then_some(()) }).await;
}

#[tokio::test]
async fn a_removed_worker_leaves_at_its_deadline_and_what_it_runs_is_not_cut() {
    let flags = ["--drain-settle-secs", "1", "--drain-timeout-secs", "2"];
    let (smg, _prefill, leaving) = slow_pair(Duration::from_millis(300), &flags).await;
    let stream = begin(&smg).await;
    let id = id_of(&smg, &leaving).await;
    smg.remove(&id).await;
    assert_eq!(leaving.active(), 1, "it still runs its request");
    let text = finish(stream).await.expect("the running stream is not cut");
    assert!(text.ends_with("data: [DONE]\n\n") && !text.contains("\"error\""), "{text}");
    smg.logged(&["still runs requests"]).await;
    smg.until_idle().await;
}
