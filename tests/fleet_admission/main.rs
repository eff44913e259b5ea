//! Several gateways before the same decode engines: together they never send more than the engines run, whoever dies, freezes or is cut off,
//! and what nobody uses goes to whoever needs it.
//!
//! `make admission` makes the run of all processes long, alone on its machine, and lets it write the report.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod report;
mod stage;
#[path = "../support/mod.rs"]
mod support;

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use mock_engine::Builder;
use reqwest::StatusCode;
use serde_json::json;
use stage::*;
use support::cluster::*;
use support::*;
use tokio::time::sleep;

/// Slots that a burst on one gateway can get: each of the others keeps one of every worker, ready for its next request.
const REACHABLE: usize = ALL - ENGINES * (GATEWAYS.len() - 1);
/// A pause that is shorter than the time that a dispatch may take.
const SHORT: Duration = Duration::from_secs(1);

/// A burst on one of four idle gateways: how long until the slots for most of it are its own, and until so many requests are in the engines.
async fn burst(stage: &Stage) -> [Duration; 2] {
    let (wanted, began) = (REACHABLE * 85 / 100, Instant::now());
    let clients = stage.clients(0, REACHABLE + ALL / 2);
    let granted = eventually("the slots are its own", || async {
        let limit = held(&stage.ledger(0).await?, GATEWAYS[0], "limit")?;
        (limit as usize >= wanted).then(|| began.elapsed())
    });
    let (granted, arrived) = tokio::join!(granted, async {
        stage.until_active(wanted, PATIENCE).await;
        began.elapsed()
    });
    drop(clients);
    println!(
        "85 % of a burst: granted after {} ms, in the engines after {} ms",
        granted.as_millis(),
        arrived.as_millis()
    );
    [granted, arrived]
}

/// Three times what there is, spread equally.
async fn overload(stage: &mut Stage) {
    eventually("the burst is over", || async { (stage.active() == 0).then_some(()) }).await;
    stage.note("three times the capacity is asked for, equally of all gateways");
    for gateway in 0..GATEWAYS.len() {
        stage.load(gateway, true);
    }
    stage.until_active(ALL * 95 / 100, Duration::from_secs(30)).await;
}

/// Waits until what floated of a dead gateway serves others. Says how many slots stay its own.
async fn until_floating_slots_serve_others(stage: &Stage, dead: usize, member: usize) -> usize {
    eventually_within(Duration::from_secs(60), "its floating slots serve others", || async {
        let shown = stage.ledger(member).await?;
        let is_silent = shown["gateways"]
            .as_array()?
            .iter()
            .any(|gateway| gateway["gateway_id"] == GATEWAYS[dead] && gateway["heard"] == false);
        let zombies = total(&shown, |worker| worker["zombie"].as_f64())?;
        let anchored = held(&shown, GATEWAYS[dead], "granted")? as usize;
        (is_silent && zombies == 0.0 && stage.active() >= (ALL - anchored) * 95 / 100).then_some(anchored)
    })
    .await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_window_is_exceeded_whoever_dies_or_freezes_and_slots_go_where_they_are_needed() {
    match std::env::var_os("SMG_ADMISSION") {
        Some(_) => Box::pin(long_run()).await,
        None => Box::pin(short_run()).await,
    }
}

/// As much as `make test` has time for.
async fn short_run() {
    let mut stage = Stage::open().await;
    burst(&stage).await;
    overload(&mut stage).await;
    let calm = stage.now();
    sleep(Duration::from_secs(3)).await;
    let used = stage.used(calm, stage.now());
    println!("while nothing fails {:.1} % of all slots are in use", used * 100.0);
    assert!(used > 0.8, "{used}");

    let lost = leader(&stage.members).await;
    stage.gateways[1].signal("STOP");
    stage.members[lost].kill();
    stage.note("a gateway is frozen for a second, and the leader is killed");
    sleep(SHORT).await;
    stage.gateways[1].signal("CONT");
    let survivor = (lost + 1) % stage.members.len();
    leader(&stage.members).await;

    let killed = stage.now();
    stage.kill_gateway(3);
    stage.note("gateway d is killed");
    let anchored = until_floating_slots_serve_others(&stage, 3, survivor).await;
    println!("its floating slots serve others after {} ms, {anchored} are kept", (stage.now() - killed).as_millis());
    stage.start_gateway(3).await;
    stage.note("another process of it is started");
    stage.until_active(ALL * 95 / 100, Duration::from_secs(60)).await;
    stage.assert_never_exceeded(0);
    stage.assert_served(GATEWAYS[3], killed, stage.now());
    let living = stage.members.iter().enumerate().filter(|(member, _)| *member != lost).map(|(_, member)| member);
    assert_invariants_held(living).await;
}

/// The same with everything that can fail, for as long as anchors need to follow use, and with a report.
async fn long_run() {
    let mut stage = Stage::open().await;
    stage.note("a burst on gateway a, all others idle");
    let burst_times = burst(&stage).await;
    overload(&mut stage).await;
    let overloaded = stage.now();
    stage.until(40).await;
    let calm = stage.used(overloaded + Duration::from_secs(5), stage.now());

    for gateway in [1, 2] {
        stage.note(&format!("gateway {} is frozen for a second", GATEWAYS[gateway]));
        stage.gateways[gateway].signal("STOP");
        sleep(SHORT).await;
        stage.gateways[gateway].signal("CONT");
        sleep(SHORT).await;
    }
    stage.until(50).await;
    stage.note("a burst on gateway b, on top, for ten seconds");
    let more = stage.clients(1, ALL);
    stage.until(60).await;
    drop(more);

    stage.until(75).await;
    let killed = stage.now();
    stage.note("gateway d is killed");
    stage.kill_gateway(3);
    let anchored = until_floating_slots_serve_others(&stage, 3, 0).await;
    let floating = stage.now() - killed;
    stage.note(&format!("its floating slots serve others, {anchored} are kept"));
    stage.until(110).await;
    let started = stage.now();
    stage.note("gateway d is started again");
    stage.start_gateway(3).await;
    stage.until_active(ALL * 95 / 100, Duration::from_secs(60)).await;
    let replaced = stage.now() - started;
    let served_d = (killed, stage.now());

    stage.until(140).await;
    let lost = leader(&stage.members).await;
    stage.note("the leader is killed");
    stage.members[lost].kill();
    stage.until(160).await;
    stage.note("it is started again");
    stage.start_member(lost);
    until_voters(&stage.members, 3).await;
    stage.until(175).await;
    let lost = leader(&stage.members).await;
    stage.note("the leader is frozen for five seconds");
    stage.members[lost].signal("STOP");
    sleep(Duration::from_secs(5)).await;
    stage.members[lost].signal("CONT");
    stage.assert_never_exceeded(0);

    stage.until(200).await;
    stage.note("gateway b is frozen for twenty seconds");
    stage.gateways[1].signal("STOP");
    stage.until(220).await;
    stage.gateways[1].signal("CONT");
    stage.note("gateway b goes on");
    stage.until(310).await;

    stage.until_active(ALL * 95 / 100, Duration::from_secs(30)).await;
    let (minute, stopped) = (Duration::from_secs(60), stage.now());
    stage.note("the whole control plane is stopped");
    stage.members.iter().for_each(|member| member.signal("STOP"));
    sleep(2 * minute).await;
    let ended = stage.now();
    stage.members.iter().for_each(|member| member.signal("CONT"));
    stage.note("the control plane goes on");
    leader(&stage.members).await;
    stage.until_active(ALL * 95 / 100, Duration::from_secs(60)).await;
    sleep(Duration::from_secs(10)).await;
    stage.note("the end");

    let shed = stage.assert_served(GATEWAYS[3], served_d.0, served_d.1);
    let figures = report::Figures {
        burst: burst_times,
        calm,
        floating,
        anchored,
        replaced,
        rates: [stage.rate(stopped - minute, stopped), stage.rate(stopped, ended)],
        alone: stage.used(stopped + Duration::from_secs(15), ended),
        peak: stage.peak(),
        served: stage.tally.served.load(Ordering::Relaxed),
        shed,
    };
    report::write(&stage.seen.lock().unwrap(), &figures);
    // What the frozen gateway was about to send in that moment comes when the slot may be another one's.
    stage.assert_never_exceeded(1);
    assert!(figures.calm > 0.95, "{}", figures.calm);
    assert!(figures.floating < Duration::from_secs(15), "{:?}", figures.floating);
    assert!(figures.rates[1] > 0.6 * figures.rates[0], "{:?}", figures.rates);
    assert_invariants_held(stage.members.iter().chain(&stage.gateways)).await;
}

#[tokio::test]
async fn who_starts_without_a_control_plane_serves_what_is_not_shared_and_what_was_its_own() {
    let place = Place::new();
    let mut control_plane = Smg::controlplane(place.directory.path(), place.port(), &[]).await;
    let directory = tempfile::tempdir().unwrap();
    let flags = ["--gateway-id", "a", "--data-dir", directory.path().to_str().unwrap()];
    let mut gateway = Smg::gateway(&place.address(), &flags).await;
    let (prefill, engines) =
        (engine(Role::Prefill).start().await.unwrap(), decodes(1, Duration::from_millis(20)).await);
    let ungated = [engine(Role::Prefill), engine(Role::Decode)].map(|engine| engine.model("ungated"));
    let [ungated_prefill, ungated_decode] = ungated.map(Builder::start);
    let (ungated_prefill, ungated_decode) = (ungated_prefill.await.unwrap(), ungated_decode.await.unwrap());
    register(std::slice::from_ref(&gateway), &prefill, &engines).await;
    gateway.register_pair(&ungated_prefill, &ungated_decode).await;
    assert_eq!(gateway.post(CHAT, &chat()).await.status(), StatusCode::OK);
    assert_eq!(gateway.metric("smg_gateway_decode_slots", &[("state", "granted")]).await, WINDOW as f64);
    let mut other_model = chat();
    other_model["model"] = json!("ungated");

    // A newcomer knows the fleet and holds nothing.
    control_plane.kill();
    let elsewhere = tempfile::tempdir().unwrap();
    let snapshot = "last-known-good.smgsnap";
    std::fs::copy(directory.path().join(snapshot), elsewhere.path().join(snapshot)).unwrap();
    let flags_elsewhere = ["--gateway-id", "b", "--data-dir", elsewhere.path().to_str().unwrap()];
    let newcomer = Smg::gateway(&place.address(), &flags_elsewhere).await;
    assert_eq!(newcomer.post(CHAT, &other_model).await.status(), StatusCode::OK);
    let shed = newcomer.post(CHAT, &chat()).await;
    assert_eq!(shed.status(), StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(shed.headers()["x-smg-error-code"], "worker_overload_protection_shed");
    assert!(shed.headers().contains_key("retry-after"));

    // One that is started again goes on with what was its own.
    gateway.kill();
    let gateway = Smg::gateway(&place.address(), &flags).await;
    assert_eq!(gateway.post(CHAT, &chat()).await.status(), StatusCode::OK, "{}", gateway.log());
    until_granted(&gateway, 1).await;

    // The control plane finds it to be the same, and loses no slot.
    let control_plane = Smg::controlplane(place.directory.path(), place.port(), &[]).await;
    eventually_within(Duration::from_secs(30), "everybody has a part of the window", || async {
        let granted = control_plane.metric("smg_decode_slots", &[("state", "granted")]).await;
        let zombies = control_plane.metric("smg_decode_slots", &[("state", "zombie")]).await;
        (granted == WINDOW as f64 && zombies == 0.0).then_some(())
    })
    .await;
    until_granted(&newcomer, 1).await;
    assert_eq!(newcomer.post(CHAT, &chat()).await.status(), StatusCode::OK);
    assert_invariants_held([&control_plane]).await;
    assert!(engines[0].peak_active() <= WINDOW);
}
