//! Workers as they are registered and watched: one address is one worker, dead ones stop nothing, probes judge patiently, keys stay
//! secret, and of concurrent changes none is lost.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod support;

use std::time::{Duration, Instant};

use futures::future::join_all;
use reqwest::{Method, Response, StatusCode};
use serde_json::{Value, json};
use support::*;

const CHAT: &str = "/v1/chat/completions";

/// What `GET /workers` shows of the worker with this URL.
async fn shown(smg: &Smg, url: &str) -> Value {
    let list = smg.get_json("/workers").await;
    let found = list["workers"].as_array().unwrap().iter().find(|worker| worker["url"] == url).cloned();
    found.unwrap_or(Value::Null)
}

async fn until_ready(smg: &Smg) {
    eventually(&format!("it is ready; log:\n{}", smg.log()), || async {
        (smg.get("/readiness").await.status() == StatusCode::OK).then_some(())
    })
    .await;
}

#[tokio::test]
async fn one_address_is_one_worker_however_it_is_spelled() {
    let (prefill, decode) = (sglang(Role::Prefill).await, sglang(Role::Decode).await);
    let (slashed, port) = (format!("{}/", prefill.url()), prefill.bootstrap_port().unwrap().to_string());
    let smg = Smg::launch(&["--prefill", &slashed, &port]).await;
    let declared = spec_with(&decode, "decode", json!({"url": format!("{}/", decode.url())}));
    let response = smg.post("/workers", &declared).await;
    assert_eq!(response.status(), StatusCode::ACCEPTED);
    let accepted: Value = response.json().await.unwrap();
    assert_eq!(accepted["url"], decode.url());
    smg.until_healthy(accepted["worker_id"].as_str().unwrap()).await;
    until_ready(&smg).await;
    for url in [prefill.url(), decode.url(), format!("{}//", decode.url()), format!("{}/%2e/", decode.url())] {
        let again = smg.post("/workers", &json!({"url": url, "worker_type": "decode"})).await;
        assert_eq!(again.status(), StatusCode::CONFLICT, "{url}");
    }
    for (number, url) in ["http://127.0.0.1:80/", "http://127.0.0.1"].into_iter().enumerate() {
        let response = smg.post("/workers", &json!({"url": url, "worker_type": "decode"})).await;
        assert_eq!(response.status().as_u16(), [202, 409][number], "{url}: the port that its scheme implies");
    }
    assert_eq!(smg.get_json("/workers").await["total"], 3);
    assert_eq!(smg.post(CHAT, &chat()).await.status(), StatusCode::OK);
    for engine in [&prefill, &decode] {
        let requests = engine.requests();
        assert!(requests.iter().any(|request| request.method == "GET" && request.path == "/health"));
        assert!(requests.iter().any(|request| request.method == "POST" && request.path == CHAT));
        assert!(requests.iter().all(|request| !request.path.contains("//")), "{requests:?}");
    }
}

#[tokio::test]
async fn a_worker_is_addressed_by_the_host_it_was_registered_with_and_not_by_the_clients() {
    let (prefill, decode) = (sglang(Role::Prefill).await, sglang(Role::Decode).await);
    let smg = Smg::launch(&[]).await;
    let named = |engine: &MockEngine| format!("localhost:{}", engine.port());
    for (engine, role) in [(&prefill, "prefill"), (&decode, "decode")] {
        smg.register(&spec_with(engine, role, json!({"url": format!("http://{}", named(engine))}))).await;
        engine.set_fault(anything());
    }
    let request = smg.client.post(format!("{}{CHAT}", smg.url)).header("host", "api.example.test").json(&chat());
    assert_eq!(request.send().await.unwrap().status(), StatusCode::OK);
    for engine in [&prefill, &decode] {
        let requests = engine.requests();
        for path in ["/health", CHAT] {
            assert!(requests.iter().any(|request| request.path == path), "{path}");
        }
        for request in requests {
            assert_eq!(request.header_values("host").collect::<Vec<_>>(), [named(engine)], "{}", request.path);
        }
    }
}

/// A port of `[::1]` that leads to `port` of `127.0.0.1`.
async fn ipv6_door(port: u16) -> u16 {
    let listener = tokio::net::TcpListener::bind("[::1]:0").await.unwrap();
    let door = listener.local_addr().unwrap().port();
    tokio::spawn(async move {
        while let Ok((mut outside, _)) = listener.accept().await {
            tokio::spawn(async move {
                let mut inside = tokio::net::TcpStream::connect(("127.0.0.1", port)).await.unwrap();
                let _ = tokio::io::copy_bidirectional(&mut outside, &mut inside).await;
            });
        }
    });
    door
}

#[tokio::test]
async fn ipv6_workers_are_probed_served_and_named_in_brackets() {
    if std::net::TcpListener::bind("[::1]:0").is_err() {
        return;
    }
    let smg = Smg::launch(&["--disable-retries"]).await;
    let (prefill, decode) = (sglang(Role::Prefill).await, sglang(Role::Decode).await);
    for (engine, role) in [(&prefill, "prefill"), (&decode, "decode")] {
        let url = format!("http://[::1]:{}", ipv6_door(engine.port()).await);
        smg.register(&spec_with(engine, role, json!({"url": url}))).await;
        engine.set_fault(anything());
    }
    assert_eq!(smg.post(CHAT, &chat()).await.status(), StatusCode::OK);
    for engine in [&prefill, &decode] {
        let leg = engine.generations().remove(0).json();
        assert_eq!(leg["bootstrap_host"], "[::1]");
        let address = format!("{}:{}", leg["bootstrap_host"].as_str().unwrap(), leg["bootstrap_port"]);
        assert!(address.parse::<std::net::SocketAddr>().is_ok(), "{address}");
    }

    let model = "mooncake";
    let start = |role| MockEngine::builder().role(role).connector(Connector::Mooncake).model(model).start();
    let (prefill, decode) = (start(Role::Prefill).await.unwrap(), start(Role::Decode).await.unwrap());
    for (engine, role) in [(&prefill, "prefill"), (&decode, "decode")] {
        let url = format!("http://[::1]:{}", ipv6_door(engine.port()).await);
        let declared =
            json!({"url": url, "kv_connector": "MooncakeConnector", "kv_engine_id": "E1", "bootstrap_port": 8998});
        smg.register(&spec_with(engine, role, declared)).await;
        engine.set_fault(anything());
    }
    let mut body = chat();
    body["model"] = json!(model);
    assert_eq!(smg.post(CHAT, &body).await.status(), StatusCode::OK);
    let params = decode.generations().remove(0).json()["kv_transfer_params"].clone();
    assert_eq!(
        (&params["remote_bootstrap_addr"], &params["remote_engine_id"]),
        (&json!("http://[::1]:8998"), &json!("E1"))
    );
}

#[tokio::test]
async fn a_start_with_dead_workers_serves_with_the_rest_and_they_join_when_they_come_up() {
    let (prefill, alive, dead) = (sglang(Role::Prefill).await, sglang(Role::Decode).await, sglang(Role::Decode).await);
    let (urls, port) = ([prefill.url(), alive.url(), dead.url()], prefill.bootstrap_port().unwrap().to_string());
    let flags = ["--policy", "round_robin", "--prefill", &urls[0], &port, "--decode", &urls[1], "--decode", &urls[2]];
    let started = async || {
        let began = Instant::now();
        let smg = Smg::launch(&flags).await;
        until_ready(&smg).await;
        (smg, began.elapsed())
    };
    // What a start takes on this machine.
    let (_, with_all) = started().await;
    dead.stop().await;
    let (smg, without_one) = started().await;
    assert!(
        without_one < Duration::from_secs(5).max(2 * with_all),
        "{without_one:?}, and {with_all:?} with all workers"
    );
    for _ in 0..4 {
        assert_eq!(smg.post(CHAT, &chat()).await.status(), StatusCode::OK);
    }
    let worker = shown(&smg, &dead.url()).await;
    assert_eq!(worker["is_healthy"], false, "{worker}");
    dead.start_again().await.unwrap();
    smg.until_healthy(worker["id"].as_str().unwrap()).await;
    for _ in 0..4 {
        assert_eq!(smg.post(CHAT, &chat()).await.status(), StatusCode::OK);
    }
    assert_eq!(dead.generation_count(), 2);
    drop(smg);

    alive.stop().await;
    dead.stop().await;
    let smg = Smg::launch(&flags).await;
    eventually("the prefill is registered", || async {
        (shown(&smg, &prefill.url()).await["is_healthy"] == true).then_some(())
    })
    .await;
    assert_eq!(smg.get("/liveness").await.status(), StatusCode::OK);
    assert_eq!(smg.get("/readiness").await.status(), StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(smg.post(CHAT, &chat()).await.headers()["x-smg-error-code"], "no_available_workers");
}

/// Flags under which probes judge within seconds.
const QUICK: [&str; 8] = [
    "--health-check-interval-secs",
    "1",
    "--health-check-timeout-secs",
    "1",
    "--health-success-threshold",
    "1",
    "--policy",
    "round_robin",
];

#[tokio::test]
async fn a_worker_that_failed_for_long_comes_back_without_being_asked() {
    let flags = [&QUICK[..], &["--health-failure-threshold", "1"]].concat();
    let (smg, prefill, decode) = sglang_pair(&flags).await;
    decode.stop().await;
    eventually("it counts as failed", || async {
        (shown(&smg, &decode.url()).await["status"] == "failed").then_some(())
    })
    .await;
    assert_eq!(smg.get("/readiness").await.status(), StatusCode::SERVICE_UNAVAILABLE);
    // The prefill, which is probed once a second, is the clock: it is as late as everything else on a busy machine.
    let seconds = || prefill.requests().iter().filter(|request| request.path == "/health").count();
    let long_failed = seconds() + if soaks() { 60 } else { 3 };
    eventually_within(6 * PATIENCE, "it has failed for long", || async { (seconds() >= long_failed).then_some(()) })
        .await;
    let before = seconds();
    decode.start_again().await.unwrap();
    until_ready(&smg).await;
    let took = seconds() - before;
    assert!(took <= 3, "an interval for each success that is needed, and two seconds: {took}");
    assert_eq!(shown(&smg, &decode.url()).await["status"], "ready");
    assert_eq!(smg.post(CHAT, &chat()).await.status(), StatusCode::OK);
}

/// Waits until `engine` has answered another probe with 200.
async fn until_probed(engine: &MockEngine) {
    let good = |engine: &MockEngine| {
        engine.requests().iter().filter(|request| request.path == "/health" && request.status == Some(200)).count()
    };
    let before = good(engine);
    engine.wait_until(PATIENCE, |engine| good(engine) > before).await.unwrap();
}

#[tokio::test]
async fn a_busy_worker_stays_in_rotation_and_one_that_leaves_it_ends_what_it_runs() {
    let flags = [&QUICK[..], &["--health-failure-threshold", "3"]].concat();
    let (smg, prefill, busy) = sglang_pair(&flags).await;
    let event = "data: {\"a\":1}\n\n";
    // Two rounds of three probes; in the long variant two minutes of them.
    let (rounds, events) = if soaks() { (24, 3200) } else { (2, 300) };
    let pieces = (0..events).map(|_| (Duration::from_millis(50), event));
    let pieces = pieces.chain([(Duration::ZERO, "data: [DONE]\n\n")]);
    prefill.set_fault(instant_prefill());
    busy.set_fault(Fault::generation().script(pieces.collect::<Vec<_>>()).times(1));
    let mut running = smg.post(CHAT, &streamed(chat())).await;
    assert_eq!(running.chunk().await.unwrap().unwrap(), event);
    prefill.clear_faults();
    // Two of three probes fail: one by its lateness, one in time or, in the long variant, by its lateness too.
    for _ in 0..rounds {
        let other = if soaks() { Fault::health().hang() } else { Fault::health().status(503, "{}") };
        busy.set_fault(other.times(1));
        busy.set_fault(Fault::health().hang().times(1));
        until_probed(&busy).await;
        assert_eq!(shown(&smg, &busy.url()).await["status"], "ready");
        assert_eq!(smg.post(CHAT, &chat()).await.status(), StatusCode::OK);
    }
    busy.set_fault(Fault::health().status(503, "{}"));
    eventually("it leaves rotation", || async {
        (shown(&smg, &busy.url()).await["status"] == "not_ready").then_some(())
    })
    .await;
    let refused = smg.post(CHAT, &chat()).await;
    assert_eq!(
        (refused.status().as_u16(), &refused.headers()["x-smg-error-code"]),
        (503, &"no_available_workers".parse().unwrap())
    );
    assert!(refused.text().await.unwrap().contains("decode"));
    let gauge = smg.metric("smg_worker_health", &[("worker", &busy.url())]).await;
    assert_eq!(gauge, 0.0, "a metric shows it");
    assert_eq!(busy.active(), 1, "the stream was to run on until here");
    let mut rest = Vec::new();
    while let Some(chunk) = running.chunk().await.expect("the running stream is not cut") {
        rest.extend_from_slice(&chunk);
    }
    assert!(rest.ends_with(b"data: [DONE]\n\n"));
    busy.clear_faults();
    until_ready(&smg).await;
}

#[tokio::test]
async fn a_workers_key_goes_with_every_question_and_is_shown_nowhere() {
    let key = "k1-of-the-worker";
    let start = |role| MockEngine::builder().engine(Engine::Sglang).role(role).model(MODEL).api_key(key).start();
    let (prefill, decode) = (start(Role::Prefill).await.unwrap(), start(Role::Decode).await.unwrap());
    let smg = Smg::launch(&QUICK).await;
    let mut ids = Vec::new();
    for (engine, role) in [(&prefill, "prefill"), (&decode, "decode")] {
        ids.push(smg.register(&spec_with(engine, role, json!({"api_key": key}))).await);
    }
    until_probed(&decode).await;
    for engine in [&prefill, &decode] {
        let asked = |engine: &MockEngine| engine.requests().iter().any(|request| request.path == "/v1/loads");
        engine.wait_until(PATIENCE, asked).await.expect("it is asked for its load");
    }
    assert_eq!(smg.post(CHAT, &chat()).await.status(), StatusCode::OK);
    for path in ["/get_server_info", "/health_generate", "/engine_metrics"] {
        assert_eq!(smg.get(path).await.status(), StatusCode::OK, "{path}");
    }
    for engine in [&prefill, &decode] {
        let requests = engine.requests();
        assert!(requests.iter().any(|request| request.path == "/health"));
        for request in requests {
            let credentials: Vec<_> = request.header_values("authorization").collect();
            assert_eq!(credentials, [format!("Bearer {key}")], "{}", request.path);
        }
    }
    // A wrong key is a reason that can be read.
    let locked = start(Role::Decode).await.unwrap();
    let response = smg.post("/workers", &spec_with(&locked, "decode", json!({"api_key": "k2-is-wrong"}))).await;
    let location = response.headers()["location"].to_str().unwrap().to_owned();
    let refused = eventually("the reason is shown", || async {
        let worker = smg.get_json(&location).await;
        let reason = worker["job_status"]["message"].as_str().is_some_and(|message| message.contains("401"));
        reason.then_some(worker)
    })
    .await;
    assert_eq!(refused["is_healthy"], false);
    let mut outputs = vec![smg.log(), smg.metrics().await, smg.get("/workers").await.text().await.unwrap()];
    outputs.push(smg.get(&format!("/workers/{}", ids[0])).await.text().await.unwrap());
    outputs.push(refused.to_string());
    for output in outputs {
        assert!(!output.contains(key) && !output.contains("k2-is-wrong"), "{output}");
    }
}

#[tokio::test]
async fn a_key_that_no_request_could_carry_is_refused() {
    let engine = sglang(Role::Regular).await;
    let smg = Smg::launch(&QUICK).await;
    let path = format!("/workers/{}", smg.register(&spec(&engine, "regular")).await);
    for key in ["a\r\nx: y", "", " a", "schl\u{fc}ssel"] {
        let field = json!({"api_key": key});
        let added = smg.post("/workers", &json!({"url": "http://h:1", "api_key": key})).await;
        for refused in [added, change(&smg, Method::PATCH, &path, None, Some(&field)).await] {
            assert_eq!(refused.status(), StatusCode::BAD_REQUEST, "{key:?}");
            let answer: Value = refused.json().await.unwrap();
            assert_eq!((&answer["code"], &answer["outcome"]), (&json!("BAD_REQUEST"), &json!("did_not_happen")));
            assert!(answer["error"].as_str().unwrap().contains("api_key"), "{answer}");
        }
    }
    assert_eq!(smg.post(CHAT, &chat()).await.status(), StatusCode::OK);
}

#[tokio::test]
async fn a_prefill_without_its_bootstrap_port_is_warned_about() {
    let (with, without) = (sglang(Role::Prefill).await, sglang(Role::Prefill).await);
    let smg = Smg::launch(&[]).await;
    smg.register(&spec(&with, "prefill")).await;
    let mut bare = spec(&without, "prefill");
    bare.as_object_mut().unwrap().remove("bootstrap_port");
    smg.register(&bare).await;
    smg.logged(&["WARN", "NO BOOTSTRAP PORT IS REGISTERED", &without.url()]).await;
    assert!(!smg.log().lines().any(|line| line.contains("NO BOOTSTRAP PORT") && line.contains(&with.url())));
    assert!(shown(&smg, &without.url()).await["warning"].as_str().unwrap().contains("bootstrap_port"));
    assert!(shown(&smg, &with.url()).await.get("warning").is_none());
}

#[tokio::test]
async fn a_gateway_of_the_same_fleet_is_no_worker_and_another_fleets_is_one() {
    let (smg, other) = (Smg::launch(&QUICK).await, Smg::launch(&QUICK).await);
    let engine = sglang(Role::Regular).await;
    other.register(&spec(&engine, "regular")).await;
    // Whatever the fleet's probes ask for.
    for endpoint in ["/readiness", "/health_generate", "/health"] {
        smg.set_policy("default", &json!({"health": {"endpoint": endpoint}})).await;
        let response = smg.post("/workers", &json!({"url": smg.url, "worker_type": "regular"})).await;
        assert_eq!(response.status(), StatusCode::ACCEPTED);
        let location = response.headers()["location"].to_str().unwrap().to_owned();
        let failed = eventually("the registration fails", || async {
            let worker = smg.get_json(&location).await;
            (worker["job_status"]["status"] == "failed").then_some(worker)
        })
        .await;
        let reason = failed["job_status"]["message"].as_str().unwrap();
        assert!(reason.contains("a gateway of this fleet answers there, not an engine"), "{reason}");
        smg.remove(failed["id"].as_str().unwrap()).await;
    }
    smg.register(&json!({"url": other.url, "worker_type": "regular"})).await;
    assert_eq!(smg.post(CHAT, &chat()).await.status(), StatusCode::OK);
    let hops: Vec<String> =
        engine.generations().iter().map(|seen| seen.header("x-smg-hops").unwrap().to_owned()).collect();
    assert_eq!(hops.len(), 1);
    assert_eq!(hops[0].split(", ").count(), 2, "{hops:?}");
}

async fn change(smg: &Smg, method: Method, path: &str, seen: Option<&str>, body: Option<&Value>) -> Response {
    let mut request = smg.client.request(method, format!("{}{path}", smg.url));
    if let Some(seen) = seen {
        request = request.header("if-match", seen);
    }
    if let Some(body) = body {
        request = request.json(body);
    }
    request.send().await.unwrap()
}

/// Adds one to `field` as often as `rounds` says, each time from what was read and only if that still holds.
async fn count_up(smg: &Smg, path: &str, method: Method, field: &str, rounds: usize) {
    // Each round is a commit, and every conflict another.
    let deadline = Instant::now() + 3 * PATIENCE;
    let mut done = 0;
    while done < rounds {
        assert!(Instant::now() < deadline, "only {done} of {rounds} changes to {field} were let through");
        let read = smg.get(path).await;
        let seen = read.headers()["etag"].to_str().unwrap().to_owned();
        let worker: Value = read.json().await.unwrap();
        let next = json!(worker[field].as_u64().unwrap() + 1);
        let mut body = json!({field: next});
        if method == Method::PUT {
            body["url"] = worker["url"].clone();
            body["worker_type"] = worker["worker_type"].clone();
            body["bootstrap_port"] = worker["bootstrap_port"].clone();
        }
        match change(smg, method.clone(), path, Some(&seen), Some(&body)).await.status() {
            StatusCode::ACCEPTED => done += 1,
            StatusCode::PRECONDITION_FAILED => tokio::task::yield_now().await,
            other => panic!("{other}"),
        }
    }
}

#[tokio::test]
async fn of_concurrent_changes_under_a_condition_none_is_lost() {
    let (smg, _prefill, _decode) = sglang_pair(&[]).await;
    let list = smg.get_json("/workers").await;
    let worker = list["workers"].as_array().unwrap().iter().find(|worker| worker["worker_type"] == "decode").unwrap();
    let path = format!("/workers/{}", worker["id"].as_str().unwrap());
    let first = worker["priority"].as_u64().unwrap();
    for (method, clients, rounds) in [(Method::PATCH, 4, 4), (Method::PUT, 3, 2)] {
        let before = smg.get_json(&path).await["priority"].as_u64().unwrap();
        join_all((0..clients).map(|_| count_up(&smg, &path, method.clone(), "priority", rounds))).await;
        let expected = json!(before + (clients * rounds) as u64);
        eventually(&format!("every {method} counts"), || async {
            let worker = smg.get_json(&path).await;
            (worker["job_status"].is_null() && worker["priority"] == expected).then_some(())
        })
        .await;
    }
    assert!(smg.get_json(&path).await["priority"].as_u64().unwrap() > first);
    assert_eq!(smg.post(CHAT, &chat()).await.status(), StatusCode::OK);
}

#[tokio::test]
async fn racing_changes_and_removals_of_one_worker_end_in_an_answer_each() {
    let (smg, _prefill, decode) = sglang_pair(&["--drain-settle-secs", "0"]).await;
    let declared = spec(&decode, "decode");
    for _ in 0..4 {
        let id = shown(&smg, &decode.url()).await["id"].as_str().unwrap().to_owned();
        let path = format!("/workers/{id}");
        let writer = async |number: usize| {
            for round in 0..6 {
                let label = json!({"labels": {format!("label-{number}-{round}"): "x"}});
                let answer = match (number + round) % 3 {
                    0 => change(&smg, Method::PUT, &path, None, Some(&declared)).await,
                    1 => change(&smg, Method::PATCH, &path, None, Some(&label)).await,
                    _ if round < 3 => smg.get(&path).await,
                    _ => change(&smg, Method::DELETE, &path, None, None).await,
                };
                let (status, text) = (answer.status().as_u16(), answer.text().await.unwrap());
                assert!([200, 202, 400, 404].contains(&status), "{status}: {text}");
                assert!(status != 400 || text.contains("being removed"), "{text}");
            }
        };
        join_all((0..6).map(writer)).await;
        let removed = change(&smg, Method::DELETE, &path, None, None).await.status().as_u16();
        assert!([202, 404].contains(&removed), "{removed}");
        eventually("the worker is gone", || async { (smg.get(&path).await.status() == 404).then_some(()) }).await;
        smg.register(&declared).await;
        assert_eq!(smg.post(CHAT, &chat()).await.status(), StatusCode::OK);
    }
}
