//! Three control-plane processes and two gateways: leaders die, members come and go, and nothing that was acknowledged is lost.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod support;

use std::path::Path;
use std::process::{Command, Output};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use reqwest::{Client, StatusCode};
use serde_json::{Value, json};
use support::cluster::*;
use support::*;
use tokio::io::{AsyncBufReadExt, BufReader};

/// What became of a write.
#[derive(Debug, PartialEq)]
enum Write {
    Acknowledged,
    /// It did not happen.
    Refused,
    Unknown,
}

/// Writes a policy document for a model at one member.
async fn write(client: &Client, address: &str, model: &str, key: &str) -> Write {
    let request = client.put(format!("http://{address}/fleet/policies/{model}")).header("idempotency-key", key);
    match request.json(&json!({"policy": "random"})).timeout(Duration::from_secs(8)).send().await {
        Ok(response) if response.status() == StatusCode::OK => Write::Acknowledged,
        Ok(response) => {
            assert_eq!(response.status(), StatusCode::SERVICE_UNAVAILABLE, "{model}");
            let body: Value = response.json().await.unwrap_or_default();
            match body["code"].as_str() {
                Some("CONTROL_PLANE_UNAVAILABLE") => Write::Refused,
                _ => Write::Unknown,
            }
        }
        Err(error) if error.is_connect() => Write::Refused,
        Err(_) => Write::Unknown,
    }
}

async fn models(smg: &Smg) -> Vec<String> {
    let list = eventually("a linearizable read", || async {
        let response = smg.client.get(format!("{}/fleet/policies", smg.url)).send().await.ok()?;
        if response.status() == StatusCode::OK { response.json::<Value>().await.ok() } else { None }
    })
    .await;
    let policies = list["policies"].as_array().unwrap().iter();
    policies
        .map(|record| {
            assert_eq!(record["document"]["policy"], "random", "whole or absent: {record}");
            record["model"].as_str().unwrap().to_owned()
        })
        .collect()
}

/// Sends requests through a gateway until told to stop. Returns how many were answered, and every failure.
fn traffic(url: String, stop: Arc<AtomicBool>) -> tokio::task::JoinHandle<(u64, Vec<String>)> {
    tokio::spawn(async move {
        let client = Client::builder().no_proxy().build().unwrap();
        let (mut served, mut failures) = (0, Vec::new());
        while !stop.load(Ordering::Relaxed) {
            let sent = client.post(format!("{url}/v1/chat/completions")).json(&chat()).send().await;
            match sent {
                Ok(response) if response.status() == StatusCode::OK => served += 1,
                Ok(response) => failures.push(format!("{}: {}", response.status(), response.text().await.unwrap())),
                Err(error) => failures.push(error.to_string()),
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        (served, failures)
    })
}

#[tokio::test]
async fn killing_leaders_loses_no_acknowledged_write_and_fails_no_request() {
    let places: Vec<Place> = (0..3).map(|_| Place::new()).collect();
    let addresses: Vec<String> = places.iter().map(Place::address).collect();
    let mut members = cluster(&places).await;
    let all = addresses.join(",");
    let (first, second) = (Smg::gateway(&all, &[]).await, Smg::gateway(&all, &[]).await);
    let (prefill, decode) = (sglang(Role::Prefill).await, sglang(Role::Decode).await);
    let (prefill_id, decode_id) = first.register_pair(&prefill, &decode).await;
    second.until_healthy(&prefill_id).await;
    second.until_healthy(&decode_id).await;

    let stop = Arc::new(AtomicBool::new(false));
    let streams = [traffic(first.url.clone(), stop.clone()), traffic(second.url.clone(), stop.clone())];
    // Writers ask any member; what is unknown is asked again under its key, elsewhere, until it is known.
    let number = Arc::new(AtomicU64::new(0));
    let writers: Vec<_> = (0..3)
        .map(|offset: usize| {
            let (addresses, stop, number) = (addresses.clone(), stop.clone(), number.clone());
            tokio::spawn(async move {
                let client = Client::builder().no_proxy().build().unwrap();
                let mut acknowledged = Vec::new();
                let mut target = offset;
                while !stop.load(Ordering::Relaxed) {
                    let model = format!("model-{}", number.fetch_add(1, Ordering::Relaxed));
                    let key =
                        format!("00000000-0000-4000-8000-{:012}", number.load(Ordering::Relaxed) * 10 + offset as u64);
                    let began = Instant::now();
                    loop {
                        match write(&client, &addresses[target % 3], &model, &key).await {
                            Write::Acknowledged => {
                                acknowledged.push((model, began, Instant::now()));
                                break;
                            }
                            Write::Refused | Write::Unknown if stop.load(Ordering::Relaxed) => break,
                            Write::Refused | Write::Unknown => target += 1,
                        }
                    }
                    tokio::time::sleep(Duration::from_millis(30)).await;
                }
                acknowledged
            })
        })
        .collect();

    let mut kills = Vec::new();
    for _ in 0..3 {
        let lost = leader(&members).await;
        members[lost].kill();
        kills.push(Instant::now());
        let survivors: Vec<usize> = (0..3).filter(|n| *n != lost).collect();
        eventually("another member leads", || async {
            for n in &survivors {
                if status(&members[*n]).await.is_some_and(|status| status["role"] == "leader") {
                    return Some(());
                }
            }
            None
        })
        .await;
        members[lost] = places[lost].start(&[]);
        until_voters(&members, 3).await;
    }
    stop.store(true, Ordering::Relaxed);
    let mut acknowledged = Vec::new();
    for writer in writers {
        acknowledged.extend(writer.await.unwrap());
    }
    for killed in kills {
        // A write that began before may have been committed before.
        let after = acknowledged.iter().filter(|(_, began, _)| *began > killed);
        let next = after.map(|(_, _, at)| *at).min().unwrap();
        println!("leader killed -> next acknowledged write: {} ms", (next - killed).as_millis());
    }
    for smg in &members {
        let models = models(smg).await;
        for (model, ..) in &acknowledged {
            assert!(models.contains(model), "{model} was acknowledged and is gone from {}", smg.url);
        }
    }
    for stream in streams {
        let (served, failures) = stream.await.unwrap();
        println!("{served} requests served, {} writes acknowledged", acknowledged.len());
        assert!(served > 0 && failures.is_empty(), "{failures:?}");
    }
    // Both gateways follow: a change made at any member reaches them.
    let extra = sglang(Role::Decode).await;
    let id = second.register(&spec(&extra, "decode")).await;
    first.until_healthy(&id).await;
    // Every member knows both, whichever they are connected to, and names a member that does not answer.
    for smg in &members {
        until_gateways(smg, 2, &[true, true, true]).await;
    }
    let lost = leader(&members).await;
    members[lost].kill();
    until_gateways(&members[(lost + 1) % 3], 2, &[false, true, true]).await;
}

/// Waits until a member lists so many connected gateways and says of each member whether it answered.
async fn until_gateways(smg: &Smg, count: usize, expected: &[bool]) {
    eventually(&format!("{count} gateways"), || async {
        let list: Value = smg.client.get(format!("{}/fleet/gateways", smg.url)).send().await.ok()?.json().await.ok()?;
        let connected = list["gateways"].as_array()?.iter().filter(|gateway| gateway["connected"] == true).count();
        let mut answered: Vec<bool> =
            list["members"].as_array()?.iter().map(|member| member["answered"] == true).collect();
        answered.sort_unstable();
        (connected == count && answered == expected).then_some(())
    })
    .await;
}

/// Runs `smg cluster` against members.
fn smg_cluster(addresses: &str, arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_smg"));
    command.args(["cluster", "--controlplane", addresses]).args(arguments).output().unwrap()
}

fn stdout_json(output: &Output) -> Value {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

#[tokio::test]
async fn members_restart_one_by_one_and_are_replaced_by_command_while_writes_go_on() {
    let places: Vec<Place> = (0..4).map(|_| Place::new()).collect();
    let mut members = cluster(&places[..3]).await;
    let client = Client::builder().no_proxy().build().unwrap();
    let all = places.iter().map(Place::address).collect::<Vec<_>>().join(",");

    // A rolling restart: the leader hands over before it stops.
    for n in 0..3 {
        members[n].signal("TERM");
        assert_eq!(members[n].exited().await.code(), Some(0), "{}", members[n].log());
        let other = places[(n + 1) % 3].address();
        let began = Instant::now();
        let key = format!("00000000-0000-4000-9000-{n:012}");
        eventually("a write while a member is away", || async {
            (write(&client, &other, &format!("rolling-{n}"), &key).await == Write::Acknowledged).then_some(())
        })
        .await;
        println!("member stopped -> acknowledged write: {} ms", began.elapsed().as_millis());
        members[n] = places[n].start(&[]);
        until_voters(&members, 3).await;
    }

    // The operator's view, as data and as a table.
    let shown = stdout_json(&smg_cluster(&all, &["status", "-o", "json"]));
    assert_eq!(voters(&shown), [1, 2, 3]);
    let table = String::from_utf8(smg_cluster(&all, &["status"]).stdout).unwrap();
    assert!(table.contains("NODE") && table.contains("leader") && table.contains("voter"), "{table}");
    assert_eq!(smg_cluster("127.0.0.1:9", &["status"]).status.code(), Some(69));

    // One member is lost for good; a new one takes its place in one step.
    let lost = (leader(&members).await + 1) % 3;
    let lost_id = status(&members[lost]).await.unwrap()["node_id"].to_string();
    members[lost].kill();
    let refused = smg_cluster(&all, &["remove", &lost_id]);
    assert_eq!(refused.status.code(), Some(79));
    assert!(String::from_utf8_lossy(&refused.stderr).contains("EVEN_VOTERS"), "{refused:?}");
    let living = places[(lost + 1) % 3].peer_address();
    let fourth = places[3].start(&["--join", &living]);
    fourth_follows(&fourth).await;
    let replaced = eventually("the replacement", || async {
        let output = smg_cluster(&all, &["replace", &lost_id, "-o", "json"]);
        output.status.success().then(|| stdout_json(&output))
    })
    .await;
    assert!(replaced["voters"].as_array().unwrap().contains(&json!(4)), "{replaced}");
    // What would be left is said before it is done.
    let two: Vec<String> = replaced["voters"].as_array().unwrap()[..2].iter().map(Value::to_string).collect();
    let rehearsed = eventually("a rehearsal", || async {
        let output = smg_cluster(&all, &["remove", &two[0], &two[1], "--dry-run"]);
        output.status.success().then_some(output)
    })
    .await;
    assert!(String::from_utf8_lossy(&rehearsed.stderr).contains("1 voter survives the loss of none"), "{rehearsed:?}");

    // The lost one comes back: it is told, and ends with a code of its own.
    let mut late = places[lost].start(&[]);
    assert_eq!(late.exited().await.code(), Some(77), "{}", late.log());
    assert!(late.log().contains("removed from the cluster"), "{}", late.log());
    members[lost] = fourth;
    until_voters(&members, 3).await;
    for smg in &members {
        let models = models(smg).await;
        assert!((0..3).all(|n| models.contains(&format!("rolling-{n}"))), "{models:?}");
    }
    assert_stale_reads(&members[0]).await;
}

async fn fourth_follows(smg: &Smg) {
    eventually(&format!("the new member follows; log:\n{}", smg.log()), || async {
        let status = status(smg).await?;
        let members = status["members"].as_array()?.clone();
        members.iter().any(|member| member["node_id"] == 4 && member["health"] == "ok").then_some(())
    })
    .await;
}

/// A member answers from what it has when the reader accepts that.
async fn assert_stale_reads(smg: &Smg) {
    let response = smg.get("/fleet/policies?consistency=stale").await;
    assert_eq!(response.status(), StatusCode::OK);
    assert!(response.headers().contains_key("x-smg-revision"));
    let response = smg.get("/fleet/cluster?consistency=stale").await.json::<Value>().await.unwrap();
    assert_eq!(response["seen_by"], response["node_id"]);
}

#[tokio::test]
async fn a_member_that_waits_for_its_cluster_stops_when_told_to() {
    let place = Place::new();
    let nobody = format!("127.0.0.1:{}", free_port());
    let mut smg = place.start(&["--join", &nobody]);
    eventually("it says whom it asks", || async { smg.log().contains("asking on").then_some(()) }).await;
    smg.signal("TERM");
    assert_eq!(smg.exited().await.code(), Some(0), "{}", smg.log());
    assert!(!Path::new(place.directory.path()).join("controlplane/raft.redb").exists());
}

/// How long the control plane is away.
fn outage() -> Duration {
    Duration::from_secs(if std::env::var_os("SMG_SOAK").is_some() { 60 } else { 4 })
}

#[tokio::test]
async fn without_any_control_plane_no_request_fails_and_new_gateways_start_from_what_was_stored() {
    let places: Vec<Place> = (0..3).map(|_| Place::new()).collect();
    let all = places.iter().map(Place::address).collect::<Vec<_>>().join(",");
    let mut members = cluster(&places).await;
    let (own, elsewhere) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let start = async |directory: &Path| Smg::gateway(&all, &["--data-dir", directory.to_str().unwrap()]).await;
    let (first, mut second) = (Smg::gateway(&all, &[]).await, start(own.path()).await);
    let (prefill, decode) = (sglang(Role::Prefill).await, sglang(Role::Decode).await);
    let (prefill_id, decode_id) = first.register_pair(&prefill, &decode).await;
    for id in [&prefill_id, &decode_id] {
        second.until_healthy(id).await;
    }
    // A gateway acknowledges what it has stored: when both have, the file is there.
    until_acknowledged(&members[0], 2, first.metric("smg_config_revision", &[]).await).await;
    second.signal("TERM");
    second.exited().await;

    let stop = Arc::new(AtomicBool::new(false));
    let mut streams = vec![traffic(first.url.clone(), stop.clone())];
    members.iter_mut().for_each(Smg::kill);
    let began = Instant::now();
    // One gateway comes back to its own disk, another one starts on a new disk with a copy of the file.
    let file = "last-known-good.smgsnap";
    std::fs::copy(own.path().join(file), elsewhere.path().join(file)).unwrap();
    let (second, third) = (start(own.path()).await, start(elsewhere.path()).await);
    for gateway in [&second, &third] {
        eventually("a gateway without a control plane is ready", || async {
            (gateway.get("/readiness").await.status() == StatusCode::OK).then_some(())
        })
        .await;
        streams.push(traffic(gateway.url.clone(), stop.clone()));
    }
    tokio::time::sleep(outage().saturating_sub(began.elapsed())).await;
    for gateway in [&first, &second, &third] {
        let change = gateway.client.put(format!("{}/fleet/policies/m", gateway.url)).json(&json!({"policy": "random"}));
        assert_eq!(change.send().await.unwrap().status(), StatusCode::SERVICE_UNAVAILABLE, "only changes wait");
    }

    let away = began.elapsed();
    let members: Vec<Smg> = places.iter().map(|place| place.start(&[])).collect();
    until_voters(&members, 3).await;
    // All of them follow again, and go on with what is new.
    let extra = sglang(Role::Decode).await;
    let id = first.register(&spec(&extra, "decode")).await;
    for gateway in [&second, &third] {
        gateway.until_healthy(&id).await;
    }
    stop.store(true, Ordering::Relaxed);
    let mut all_served = 0;
    for stream in streams {
        let (served, failures) = stream.await.unwrap();
        assert!(served > 0 && failures.is_empty(), "{failures:?}");
        all_served += served;
    }
    println!("{all_served} requests served, the control plane away for {} ms", away.as_millis());
    if std::env::var_os("SMG_SOAK").is_some() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/reports/static-stability.md");
        let (away, total) = (away.as_secs_f64(), began.elapsed().as_secs_f64());
        std::fs::write(path, report(all_served, away, total)).unwrap();
    }
}

fn report(served: u64, away: f64, total: f64) -> String {
    format!(
        "# Static stability\n\n\
         The last long run of the outage of a whole control plane (`SMG_SOAK=1 cargo nextest run -p smg --test cluster without_any`). There\n\
         is no report when one request fails.\n\n\
         All three control-plane processes were killed with SIGKILL under traffic and stayed away for {away:.0} s. One gateway ran on; one was\n\
         started again in the meantime from its last-known-good file, and one on a new disk with a copy of that file. Then the control plane\n\
         came back, and all three gateways got a worker that was registered after it.\n\n\
         | what | how many |\n|---|---|\n\
         | requests, each for a prefill and a decode engine, in {total:.0} s | {served} |\n\
         | requests that failed | 0 |\n"
    )
}

/// Waits until so many gateways have acknowledged a revision.
async fn until_acknowledged(smg: &Smg, count: usize, revision: f64) {
    eventually(&format!("{count} gateways at revision {revision}"), || async {
        let list: Value = smg.client.get(format!("{}/fleet/gateways", smg.url)).send().await.ok()?.json().await.ok()?;
        let gateways = list["gateways"].as_array()?.iter();
        let current = gateways.filter(|gateway| gateway["acked_revision"].as_f64() >= Some(revision)).count();
        (current >= count).then_some(())
    })
    .await;
}

#[tokio::test]
async fn members_of_the_time_before_a_restore_are_named_as_such() {
    let places: Vec<Place> = (0..3).map(|_| Place::new()).collect();
    let mut members = cluster(&places).await;
    let directory = tempfile::tempdir().unwrap();
    let backup = directory.path().join("backup");
    let backup = backup.to_str().unwrap();
    let saved = smg_cluster(&places[0].address(), &["backup", backup]);
    assert!(saved.status.success(), "{saved:?}");
    // One is gone; in its place, at its address, the cluster begins anew. Nobody stopped the others.
    members[0].kill();
    let anew = places[0].emptied();
    let restored =
        smg_cluster(&anew.address(), &["restore", backup, "--data-dir", anew.directory.path().to_str().unwrap()]);
    assert!(restored.status.success(), "{restored:?}");
    let restored = anew.start(&[]);
    let told = |old: &Smg| {
        let words = ["a member refuses this one", "of the time before this cluster was restored", "stop it for good"];
        old.log().lines().any(|line| words.iter().all(|word| line.contains(word)))
    };
    // Whoever of them leads calls where it knows a member.
    eventually("an old member is told", || async { members[1..].iter().any(told).then_some(()) }).await;
    restored.logged(&["refusing a call of another member", "of the time before this cluster was restored"]).await;
    eventually("the new history goes on", || async {
        let client = Client::builder().no_proxy().build().unwrap();
        let key = "00000000-0000-4000-a000-000000000001";
        (write(&client, &anew.address(), "m", key).await == Write::Acknowledged).then_some(())
    })
    .await;
}

#[tokio::test]
async fn a_watch_whose_member_dies_goes_on_at_another_one_and_shows_each_change_once() {
    const DOCUMENTS: usize = 120;
    let places: Vec<Place> = (0..3).map(|_| Place::new()).collect();
    let mut members = cluster(&places).await;
    let all = places.iter().map(Place::address).collect::<Vec<_>>().join(",");
    // Servers are asked in turn: the watch is at the first member.
    let mut watch = tokio::process::Command::new(env!("CARGO_BIN_EXE_smg"));
    watch.args(["policies", "list", "--watch", "-o", "json", "--controlplane", &all]).env_clear();
    watch.stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::piped()).kill_on_drop(true);
    let mut watch = watch.spawn().unwrap();
    let mut lines = BufReader::new(watch.stdout.take().unwrap()).lines();
    // Writes go to the others, as fast as they are acknowledged: members publish them in steps of their own.
    let (wrote, survivors) = (Arc::new(AtomicU64::new(0)), [places[1].address(), places[2].address()]);
    let writer = {
        let wrote = Arc::clone(&wrote);
        tokio::spawn(async move {
            let client = Client::builder().no_proxy().build().unwrap();
            for n in 0..DOCUMENTS {
                let (model, key) = (format!("m{n}"), format!("00000000-0000-4000-b000-{n:012}"));
                let mut target = n;
                while write(&client, &survivors[target % 2], &model, &key).await != Write::Acknowledged {
                    target += 1;
                }
                // Each third one is taken away again, the one before it.
                if n % 3 == 2 {
                    let path = format!("http://{}/fleet/policies/m{}", survivors[target % 2], n - 1);
                    eventually("it is deleted", || async {
                        let status = client.delete(&path).send().await.ok()?.status();
                        (status.is_success() || status == StatusCode::NOT_FOUND).then_some(())
                    })
                    .await;
                }
                wrote.store(1 + n as u64, Ordering::Relaxed);
            }
        })
    };
    eventually_within(Duration::from_secs(60), "writes are under way", || async {
        (wrote.load(Ordering::Relaxed) >= DOCUMENTS as u64 / 3).then_some(())
    })
    .await;
    members[0].kill();
    let (mut shown, mut deleted): (Vec<(String, u64)>, Vec<String>) = (Vec::new(), Vec::new());
    writer.await.unwrap();
    // The second one comes in a step of its own: then that of the first one is shown whole.
    for (n, last) in ["last", "very-last"].into_iter().enumerate() {
        let key = format!("00000000-0000-4000-b001-{n:012}");
        while write(&members[1].client, &places[1].address(), last, &key).await != Write::Acknowledged {}
        while shown.iter().all(|(model, _)| model != last) {
            let line = tokio::time::timeout(Duration::from_secs(60), lines.next_line()).await.expect("a line in time");
            let event: Value = serde_json::from_str(&line.unwrap().expect("a line")).unwrap();
            match event["type"].as_str().unwrap() {
                "put" => {
                    let (model, revision) = (&event["object"]["model"], &event["object"]["mod_revision"]);
                    shown.push((model.as_str().unwrap().to_owned(), revision.as_u64().unwrap()));
                }
                "deleted" => deleted.push(event["name"].as_str().unwrap().to_owned()),
                other => panic!("{other}"),
            }
        }
    }
    watch.start_kill().unwrap();
    let said = watch.wait_with_output().await.unwrap();
    let said = String::from_utf8_lossy(&said.stderr).into_owned();
    assert!(!said.contains("starts anew"), "{said}");
    // What was written and is still there was shown, and nothing twice.
    for n in (0..DOCUMENTS).filter(|n| n % 3 != 1) {
        assert_eq!(shown.iter().filter(|(model, _)| *model == format!("m{n}")).count(), 1, "m{n}");
    }
    // What came and went within a step was never shown; a deletion is of what was shown, or of what another member had.
    for n in (1..DOCUMENTS).step_by(3) {
        let (puts, deletions) = (
            shown.iter().filter(|(model, _)| *model == format!("m{n}")).count(),
            deleted.iter().filter(|model| **model == format!("m{n}")).count(),
        );
        assert!(
            puts <= 1 && deletions <= 1 && puts <= deletions,
            "m{n}: {puts} times shown, {deletions} times deleted"
        );
    }
    let mut revisions: Vec<u64> = shown.iter().map(|(_, revision)| *revision).collect();
    revisions.sort_unstable();
    revisions.dedup();
    assert_eq!(revisions.len(), shown.len(), "each change is a revision of its own");
}
