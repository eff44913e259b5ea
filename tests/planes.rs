//! One control plane, several gateways: one fleet state everywhere, and serving that does not depend on it.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod support;

use std::path::Path;
use std::time::{Duration, Instant};

use reqwest::StatusCode;
use serde_json::{Value, json};
use support::*;

async fn gateway(address: &str, name: &str, directory: Option<&Path>) -> Smg {
    let mut flags = vec!["--gateway-id", name];
    if let Some(directory) = directory {
        flags.extend(["--data-dir", directory.to_str().unwrap()]);
    }
    Smg::gateway(address, &flags).await
}

/// Waits until `/fleet/gateways` shows all of `names` connected with the current revision, and returns that revision.
async fn until_synced(through: &Smg, names: &[&str]) -> u64 {
    eventually("every gateway has acknowledged the current revision", || async {
        let response = through.client.get(format!("{}/fleet/gateways", through.url)).send().await.ok()?;
        let revision: u64 = response.headers().get("x-smg-revision")?.to_str().ok()?.parse().ok()?;
        let shown: Value = response.json().await.ok()?;
        let synced = |name: &&str| {
            shown["gateways"].as_array().is_some_and(|gateways| {
                gateways.iter().any(|gateway| {
                    gateway["gateway_id"] == **name
                        && gateway["connected"] == true
                        && gateway["acked_revision"] == revision
                })
            })
        };
        names.iter().all(synced).then_some(revision)
    })
    .await
}

async fn assert_serves(smg: &Smg) {
    for body in [chat(), chat_stream()] {
        let response = smg.post("/v1/chat/completions", &body).await;
        let status = response.status();
        assert_eq!(status, StatusCode::OK, "{}", response.text().await.unwrap());
    }
}

async fn updates(smg: &Smg, kind: &str) -> f64 {
    smg.metric("smg_config_updates_total", &[("kind", kind), ("result", "applied")]).await
}

#[tokio::test]
async fn what_one_gateway_registered_is_at_once_what_the_other_shows_and_routes_to() {
    let directory = tempfile::tempdir().unwrap();
    let port = free_port();
    let address = format!("127.0.0.1:{port}");
    let control_plane = Smg::controlplane(directory.path(), port, &[]).await;
    let (first, second) = (gateway(&address, "first", None).await, gateway(&address, "second", None).await);
    until_synced(&control_plane, &["first", "second"]).await;
    let (prefill, decode) = (sglang(Role::Prefill).await, sglang(Role::Decode).await);

    // Read-your-writes: an acknowledged registration is there on any gateway, at the first look.
    for (engine, role, writer, reader) in [(&prefill, "prefill", &first, &second), (&decode, "decode", &second, &first)]
    {
        let response = writer.post("/workers", &spec(engine, role)).await;
        assert_eq!(response.status(), StatusCode::ACCEPTED);
        let location = response.headers()["location"].to_str().unwrap().to_owned();
        assert!(response.headers().contains_key("x-smg-revision"));
        for smg in [reader, writer] {
            let response = smg.get(&location).await;
            assert_eq!(response.status(), StatusCode::OK, "{location} through {}", smg.url);
            assert!(!response.headers().contains_key("x-smg-stale"));
            assert_eq!(response.json::<Value>().await.unwrap()["url"], engine.url());
        }
        let id = location.rsplit('/').next().unwrap();
        reader.until_healthy(id).await;
        let changed = writer.client.patch(format!("{}{location}", writer.url)).json(&json!({"priority": 77}));
        assert_eq!(changed.send().await.unwrap().status(), StatusCode::ACCEPTED);
        assert_eq!(reader.get_json(&location).await["priority"], 77);
    }
    // A gateway that showed a worker as healthy routes to it: the first request is served.
    first.get("/workers").await;
    second.get("/workers").await;
    assert_serves(&first).await;
    assert_serves(&second).await;
    assert_eq!((prefill.generation_count(), decode.generation_count()), (4, 4));

    // A policy written through one gateway holds on the other.
    let put = first.client.put(format!("{}/fleet/policies/default", first.url)).json(&json!({"policy": "random"}));
    assert_eq!(put.send().await.unwrap().status(), StatusCode::OK);
    assert_eq!(second.get_json("/fleet/policies/default").await["document"]["policy"], "random");
    let before = second.metric("smg_worker_selection_total", &[("policy", "random")]).await;
    assert_serves(&second).await;
    assert_eq!(second.metric("smg_worker_selection_total", &[("policy", "random")]).await, before + 4.0);

    // The state came through the sync service: one whole snapshot each, then deltas.
    let revision = until_synced(&control_plane, &["first", "second"]).await;
    for smg in [&first, &second] {
        assert_eq!(updates(smg, "full").await, 1.0);
        assert!(updates(smg, "delta").await >= 2.0);
        assert_eq!(smg.metric("smg_config_revision", &[]).await, revision as f64);
    }
    assert_eq!(control_plane.metric("smg_sync_subscribers", &[]).await, 2.0);
}

#[tokio::test]
async fn launch_gets_its_fleet_through_the_sync_service_too() {
    let (smg, _prefill, _decode) = sglang_pair(&["--gateway-id", "itself"]).await;
    until_synced(&smg, &["itself"]).await;
    assert_eq!(updates(&smg, "full").await, 1.0);
    assert!(updates(&smg, "delta").await >= 1.0);
    let shown = smg.get_json("/fleet/gateways").await;
    assert_eq!(shown["total"], 1, "{shown}");
}

#[tokio::test]
async fn serving_goes_on_without_the_control_plane_and_changes_wait_for_it() {
    let (directory, kept) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let port = free_port();
    let address = format!("127.0.0.1:{port}");
    let mut control_plane = Smg::controlplane(directory.path(), port, &[]).await;
    let first = gateway(&address, "first", None).await;
    let mut second = gateway(&address, "second", Some(kept.path())).await;
    let (prefill, decode) = (sglang(Role::Prefill).await, sglang(Role::Decode).await);
    let (prefill_id, _) = first.register_pair(&prefill, &decode).await;
    let revision = until_synced(&control_plane, &["first", "second"]).await;
    let cluster = control_plane.get_json("/fleet/cluster").await;
    control_plane.kill();

    let without = async |smg: &Smg| {
        assert_serves(smg).await;
        for path in ["/workers".to_owned(), format!("/workers/{prefill_id}")] {
            let response = smg.get(&path).await;
            assert_eq!(response.status(), StatusCode::OK, "{path}");
            let age = response.headers()["x-smg-stale"].to_str().unwrap().to_owned();
            assert!(age.parse::<u64>().is_ok(), "{age}");
            let text = response.text().await.unwrap();
            assert!(text.contains(&prefill.url()), "{path}: {text}");
        }
        let started = Instant::now();
        let response = smg.post("/workers", &json!({"url": "http://127.0.0.1:9", "worker_type": "decode"})).await;
        assert!(started.elapsed() < Duration::from_millis(2500), "{:?}", started.elapsed());
        assert_eq!(response.status(), StatusCode::SERVICE_UNAVAILABLE);
        assert_eq!(response.json::<Value>().await.unwrap()["code"], "CONTROL_PLANE_UNAVAILABLE");
        eventually("readiness tells of the lost control plane", || async {
            let response = smg.get("/readiness").await;
            assert_eq!(response.status(), StatusCode::OK);
            let body: Value = response.json().await.unwrap();
            (body["control_plane"]["connected"] == false).then_some(())
        })
        .await;
    };
    without(&first).await;
    without(&second).await;

    // A gateway that starts now serves from what it kept.
    second.kill();
    let stored = std::fs::File::options().write(true).open(kept.path().join("last-known-good.smgsnap")).unwrap();
    stored.set_modified(std::time::SystemTime::now() - Duration::from_secs(3600)).unwrap();
    let second = gateway(&address, "second", Some(kept.path())).await;
    without(&second).await;
    let age = second.get("/workers").await.headers()["x-smg-stale"].to_str().unwrap().to_owned();
    assert!(
        (3600..3660).contains(&age.parse::<u64>().unwrap()),
        "the age of what was kept, not of this process: {age}"
    );
    assert_eq!(updates(&second, "full").await, 0.0);
    // One that kept nothing says so, and does not claim an empty fleet.
    let third = gateway(&address, "third", None).await;
    let response = third.get("/workers").await;
    assert_eq!(response.status(), StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(response.json::<Value>().await.unwrap()["code"], "CONTROL_PLANE_UNAVAILABLE");
    assert_eq!(third.get("/readiness").await.status(), StatusCode::SERVICE_UNAVAILABLE);

    // It comes back with its data: same history, and gateways go on from what they have.
    let control_plane = Smg::controlplane(directory.path(), port, &[]).await;
    let again = control_plane.get_json("/fleet/cluster").await;
    assert_eq!((&again["cluster_id"], &again["history_id"]), (&cluster["cluster_id"], &cluster["history_id"]));
    assert!(again["revision"].as_u64().unwrap() >= revision);
    until_synced(&control_plane, &["first", "second", "third"]).await;
    let extra = sglang(Role::Decode).await;
    let id = first.register(&spec(&extra, "decode")).await;
    second.until_healthy(&id).await;
    let response = second.get("/workers").await;
    assert!(!response.headers().contains_key("x-smg-stale"));
    assert!(until_synced(&control_plane, &["first", "second", "third"]).await > revision);
    assert_eq!(updates(&first, "full").await, 1.0, "it had the same history: deltas are enough");
    assert_eq!(updates(&second, "full").await, 0.0, "it had the same history: deltas are enough");
    assert_eq!(updates(&third, "full").await, 1.0);
    let readiness = first.get_json("/readiness").await;
    assert!(readiness.get("control_plane").is_none(), "{readiness}");
    assert_serves(&first).await;
    assert_serves(&second).await;
}

#[tokio::test]
async fn a_gateway_does_not_listen_to_another_cluster_at_an_address_of_its_own() {
    let (directory, empty) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let port = free_port();
    let mut control_plane = Smg::controlplane(directory.path(), port, &[]).await;
    let gateway = gateway(&format!("127.0.0.1:{port}"), "faithful", None).await;
    let (prefill, decode) = (sglang(Role::Prefill).await, sglang(Role::Decode).await);
    control_plane.register_pair(&prefill, &decode).await;
    until_synced(&control_plane, &["faithful"]).await;
    assert_serves(&gateway).await;
    // Its disk is lost, and it is started as it was the first time.
    control_plane.kill();
    let mut founded = Smg::controlplane(empty.path(), port, &[]).await;
    gateway.logged(&["ERROR", "is of another cluster"]).await;
    assert_serves(&gateway).await;
    founded.kill();
    let control_plane = Smg::controlplane(directory.path(), port, &[]).await;
    until_synced(&control_plane, &["faithful"]).await;
    assert_serves(&gateway).await;
}

#[tokio::test]
async fn workers_of_the_start_command_follow_it_and_those_of_the_api_stay() {
    let directory = tempfile::tempdir().unwrap();
    let (prefill, first, second) =
        (sglang(Role::Prefill).await, sglang(Role::Decode).await, sglang(Role::Decode).await);
    let by_api = sglang(Role::Decode).await;
    let port = prefill.bootstrap_port().unwrap().to_string();
    let prefill_url = prefill.url();
    let start = async |decode: &MockEngine| {
        let decode = decode.url();
        let flags = ["--prefill", &prefill_url, &port, "--decode", &decode, "--policy", "round_robin"];
        let smg = Smg::durable(directory.path(), &flags).await;
        eventually("both legs are ready", || async {
            (smg.get("/readiness").await.status() == StatusCode::OK).then_some(())
        })
        .await;
        smg
    };
    let origins = async |smg: &Smg| -> Vec<(String, String)> {
        let list = smg.get_json("/workers").await;
        let workers = list["workers"].as_array().unwrap().iter();
        let mut origins: Vec<_> = workers
            .map(|worker| (worker["url"].as_str().unwrap().to_owned(), worker["origin"].as_str().unwrap().to_owned()))
            .collect();
        origins.sort();
        origins
    };
    let expected = |decode: &MockEngine| {
        let mut expected = vec![
            (prefill.url(), "startup".to_owned()),
            (decode.url(), "startup".to_owned()),
            (by_api.url(), "api".to_owned()),
        ];
        expected.sort();
        expected
    };

    let mut smg = start(&first).await;
    let id = smg.register(&spec(&by_api, "decode")).await;
    let prefill_id = async |smg: &Smg| -> Value {
        let list = smg.get_json("/workers").await;
        let mut workers = list["workers"].as_array().unwrap().iter();
        workers.find(|worker| worker["url"] == prefill.url()).unwrap()["id"].clone()
    };
    let before = prefill_id(&smg).await;
    assert_eq!(origins(&smg).await, expected(&first));
    smg.kill();

    let smg = start(&second).await;
    eventually("the decode that is no longer named is gone", || async {
        (origins(&smg).await == expected(&second)).then_some(())
    })
    .await;
    assert_eq!(prefill_id(&smg).await, before, "an unchanged worker keeps its id");
    smg.until_healthy(&id).await;
    for _ in 0..4 {
        assert_serves(&smg).await;
    }
    assert_eq!(first.generation_count(), 0);
    assert!(second.generation_count() > 0 && by_api.generation_count() > 0);
}

#[tokio::test]
async fn a_policy_written_by_api_holds_until_the_flags_change() {
    let directory = tempfile::tempdir().unwrap();
    let show = async |smg: &Smg| {
        let shown = smg.get_json("/fleet/policies/default").await;
        (shown["document"]["policy"].clone(), shown["source"].clone())
    };
    let start = async |policy: &str| {
        let smg = Smg::durable(directory.path(), &["--policy", policy]).await;
        eventually("the control plane answers", || async {
            (smg.get("/fleet/cluster").await.status() == StatusCode::OK).then_some(())
        })
        .await;
        smg
    };
    let mut smg = start("random").await;
    assert_eq!(show(&smg).await, (json!("random"), json!("startup")));
    let document = json!({"policy": "power_of_two"});
    let put = smg.client.put(format!("{}/fleet/policies/default", smg.url)).json(&document).send().await.unwrap();
    assert_eq!(put.status(), StatusCode::OK);
    assert_eq!(show(&smg).await, (json!("power_of_two"), json!("api")));
    smg.kill();
    let mut smg = start("random").await;
    assert_eq!(show(&smg).await, (json!("power_of_two"), json!("api")), "the flags are the same as before");
    smg.kill();
    let smg = start("round_robin").await;
    assert_eq!(show(&smg).await, (json!("round_robin"), json!("startup")), "the flags changed");
}

#[tokio::test]
async fn the_name_of_a_cluster_is_kept_and_shown() {
    let directory = tempfile::tempdir().unwrap();
    let mut smg = Smg::durable(directory.path(), &[]).await;
    let put = |smg: &Smg, name: &str, seen: &str| {
        let request = smg.client.put(format!("{}/fleet/settings", smg.url)).header("if-match", seen);
        request.json(&json!({"name": name})).send()
    };
    assert_eq!(put(&smg, "east", "\"0\"").await.unwrap().status(), 200);
    assert_eq!(put(&smg, "west", "\"0\"").await.unwrap().status(), 412);
    assert_eq!(put(&smg, "", "*").await.unwrap().status(), 400);
    smg.kill();
    let smg = Smg::durable(directory.path(), &[]).await;
    assert_eq!(smg.get_json("/fleet/cluster").await["name"], "east");
    assert_eq!(smg.get_json("/fleet/settings").await["settings"]["name"], "east");
}
