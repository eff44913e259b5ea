//! What goes wrong: a random fault of every switch that the engines have, one after another.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use serde_json::{Value, json};
use tokio::task::JoinSet;

use crate::fleet::{Family, Fleet, is_mortal};
use crate::random::Random;
use crate::support::{Connector, Fault, MockEngine, Role};

/// A body that an engine answers instead of its own.
pub const OTHER_BODY: &str = r#"{"instead":"of an answer"}"#;
/// A stream that an engine answers instead of its own.
pub const OTHER_EVENTS: [&str; 2] = ["data: {\"instead\":\"of an answer\"}\n\n", "data: [DONE]\n\n"];

const STATUSES: [u16; 13] = [200, 400, 401, 404, 408, 418, 422, 429, 500, 502, 503, 504, 507];
/// Bytes that are no answer, or the beginning of one.
const RAW: [&str; 5] = [
    "this is no HTTP\r\n\r\n",
    "HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\n\r\n",
    "HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n",
    "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
    "HTTP/1.1 500 Internal Server Error\r\ncontent-length: 1000\r\n\r\n{",
];
/// What MoRI-IO prefills say instead of the truth: nothing that a gateway may let pass.
fn untruths(connector: &Connector) -> Vec<Value> {
    let mut untruths = vec![
        Value::Null,
        json!([1]),
        json!({"transfer_id": "tx-of-another-request"}),
        json!({"remote_host": ""}),
        json!({"remote_block_ids": [[]]}),
        json!({"do_remote_prefill": false}),
        json!({"remote_notify_port": "0"}),
        json!({"tp_size": "two"}),
    ];
    if *connector == Connector::MoriioWrite {
        // Well formed: sequential dispatch lets it pass, and decode waits for its push in vain and says so.
        untruths.push(json!({"remote_handshake_port": 1}));
    }
    untruths
}

/// Draws a fault and names it.
fn draw(random: &mut Random) -> (&'static str, Fault) {
    let millis = Duration::from_millis(random.between(1, 60));
    let (few_bytes, few_events) = (random.between(1, 600), random.between(1, 6));
    let (scope, fault) = match random.below(8) {
        0 => ("all", Fault::all()),
        1 => ("path", Fault::path("/v1/chat/completions")),
        2 => ("health", Fault::health()),
        _ => ("", Fault::generation()),
    };
    let (name, fault) = match random.below(100) {
        0..12 => ("delay_head", fault.delay_head(millis)),
        12..18 => ("delay_body", fault.delay_body(millis)),
        18..20 => ("hang", fault.hang()),
        20..25 => ("close_unanswered", fault.close_unanswered()),
        25..30 => ("reset_unanswered", fault.reset_unanswered()),
        30..35 => ("malformed", fault.malformed()),
        35..38 => ("drip", fault.drip(Duration::ZERO)),
        38..43 => ("reset_after_bytes", fault.reset_after_bytes(few_bytes)),
        43..48 => ("reset_after_events", fault.reset_after_events(few_events)),
        48..53 => ("close_after_bytes", fault.close_after_bytes(few_bytes)),
        53..58 => ("close_after_events", fault.close_after_events(few_events)),
        58..62 => ("end_after_events", fault.end_after_events(few_events)),
        62..63 => ("stall_after_events", fault.stall_after_events(few_events)),
        63..64 => ("stall_at_end", fault.stall_at_end()),
        64..84 => ("status", fault.status(*random.pick(&STATUSES), OTHER_BODY).header("retry-after", "1")),
        84..88 => ("script", fault.script(OTHER_EVENTS.map(|event| (Duration::ZERO, event)))),
        88..93 => ("raw", fault.raw([(Duration::ZERO, *random.pick(&RAW))])),
        93..94 => ("raw, then silence", fault.raw([(millis, *random.pick(&RAW))]).stall_at_end()),
        94..97 => ("delay_head, reset_after_events", fault.delay_head(millis).reset_after_events(few_events)),
        _ => ("delay_head, status", fault.delay_head(millis).status(*random.pick(&STATUSES), OTHER_BODY)),
    };
    match scope {
        "all" => ("all paths", fault),
        "health" => ("health", fault),
        "path" => ("one path", fault),
        _ => (name, fault),
    }
}

/// Breaks things until `stop`, then mends everything. Returns how often it did what.
pub async fn sabotage(fleet: Arc<Fleet>, mut random: Random, stop: Arc<AtomicBool>) -> BTreeMap<&'static str, u64> {
    let mut done = BTreeMap::new();
    let mut absences = JoinSet::new();
    while !stop.load(Ordering::Acquire) {
        let which = random.below(fleet.families.len() as u64) as usize;
        let family = &fleet.families[which];
        let engines: Vec<_> = family.engines().collect();
        let place = random.below(engines.len() as u64) as usize;
        let (role, index, engine) = engines[place];
        let name = match random.below(100) {
            0..4 if is_mortal(index) && may_die(family, role) => {
                // One at a time, lest two tasks start one engine.
                while let Some(back) = absences.join_next().await {
                    back.unwrap();
                }
                let (fleet, absence) = (Arc::clone(&fleet), Duration::from_millis(random.between(50, 1500)));
                let restarts = random.chance(50) && family.kind.may_change_its_id();
                absences.spawn(async move {
                    be_absent(fleet.families[which].engines().nth(place).unwrap().2, absence, restarts).await;
                });
                if restarts { "restart" } else { "stop" }
            }
            4..10 => {
                engine.clear_faults();
                "clear_faults"
            }
            10..16 if family.kind.is_moriio() && role == Role::Prefill => {
                let untruths = untruths(&family.kind.connector);
                engine.alter_handoffs(random.chance(50).then(|| random.pick(&untruths).clone()));
                "alter_handoffs"
            }
            16..20 => {
                engine.set_max_running(random.chance(50).then(|| random.between(2, 6) as usize));
                "set_max_running"
            }
            _ => {
                let (name, fault) = draw(&mut random);
                // Mostly a hiccup, sometimes bad enough for a breaker.
                let times = if random.chance(10) { 20 } else { random.between(1, 3) };
                engine.set_fault(fault.times(times as u32));
                name
            }
        };
        *done.entry(name).or_default() += 1;
        tokio::time::sleep(Duration::from_millis(random.between(5, 50))).await;
    }
    while let Some(back) = absences.join_next().await {
        back.unwrap();
    }
    for engine in fleet.engines() {
        engine.clear_faults();
        engine.alter_handoffs(None);
        engine.set_max_running(None);
    }
    done
}

/// KV that dies with a READ prefill, after its handoff, makes the decode answer with other text; no gateway can know.
fn may_die(family: &Family, role: Role) -> bool {
    !(family.kind.connector == Connector::MoriioRead && role == Role::Prefill)
}

async fn be_absent(engine: &MockEngine, absence: Duration, restarts: bool) {
    if restarts {
        return engine.restart().await.unwrap();
    }
    engine.stop().await;
    tokio::time::sleep(absence).await;
    engine.start_again().await.unwrap();
}
