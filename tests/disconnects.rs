//! A client that leaves, whenever that is, ends its legs and leaves nothing behind: no load, no request, no socket, no charge.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod support;

use std::time::{Duration, Instant};

use futures::StreamExt;
use futures::future::join_all;
use serde_json::{Value, json};
use support::*;
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use tokio::task::JoinHandle;

/// How soon an engine must see that the client of its leg has left.
const PROMPT: Duration = Duration::from_secs(3);
/// Longer than any test.
const FOREVER: Duration = Duration::from_secs(600);
const EVENT: &str = "data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"a\"}}]}\n\n";

/// Where a request stands when its client leaves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// No engine has answered.
    BeforeHeads,
    /// The prefill has answered (over: in sequential dispatch), the other leg has not.
    PrefillHead,
    /// The decode has answered, the prefill has not. Only in parallel dispatch.
    DecodeHead,
    /// The client has the head and, of a stream, some output; the engine is silent.
    Midway,
}

impl Phase {
    const ALL: [Self; 4] = [Self::BeforeHeads, Self::PrefillHead, Self::DecodeHead, Self::Midway];

    fn exists(self, dispatch: Dispatch) -> bool {
        match self {
            Self::BeforeHeads | Self::Midway => true,
            Self::PrefillHead => dispatch != Dispatch::Regular,
            Self::DecodeHead => dispatch == Dispatch::Parallel,
        }
    }
}

/// An answer whose head comes at once, and of a stream one event, and whose rest never does.
fn silent_after_the_head(stream: bool) -> Fault {
    if stream {
        Fault::generation().script(at_once([EVENT, EVENT])).stall_after_events(1)
    } else {
        Fault::generation().status(200, json!({"late": true}).to_string()).delay_body(FOREVER)
    }
}

fn with_faults(serving: &Serving, dispatch: Dispatch, phase: Phase, stream: bool) {
    serving.engines().for_each(MockEngine::clear_faults);
    let hang = || Fault::generation().hang();
    if let Some(prefill) = &serving.prefill {
        prefill.set_fault(match phase {
            Phase::BeforeHeads | Phase::DecodeHead => hang(),
            Phase::PrefillHead if dispatch == Dispatch::Parallel => silent_after_the_head(false),
            Phase::PrefillHead | Phase::Midway => instant_prefill(),
        });
    }
    serving.output.set_fault(match phase {
        Phase::BeforeHeads | Phase::PrefillHead => hang(),
        Phase::DecodeHead | Phase::Midway => silent_after_the_head(stream),
    });
}

/// Sends a request and takes what comes, until it is aborted.
fn client(smg: &Smg, path: &str, body: &Value) -> JoinHandle<()> {
    let request = smg.client.post(format!("{}{path}", smg.url)).json(body);
    tokio::spawn(async move {
        let response = request.send().await.unwrap();
        let mut stream = response.bytes_stream();
        while stream.next().await.is_some() {}
    })
}

/// Waits until the last request of `engine` meets `condition`.
async fn until_last(engine: &MockEngine, what: &str, condition: impl Fn(&mock_engine::Recorded) -> bool) {
    let met = engine.wait_until(PATIENCE, |engine| engine.generations().last().is_some_and(&condition)).await;
    assert!(met.is_ok(), "{what}: {:?}", engine.generations().last());
}

async fn assert_nothing_is_left(serving: &Serving) {
    serving.smg.until_idle().await;
    serving.smg.until_disconnected(serving.engines()).await;
    for engine in serving.engines() {
        assert_eq!(engine.active(), 0);
        assert_eq!(serving.failures(engine).await, 0.0, "a client that leaves is nobody's failure");
    }
    let workers = serving.smg.get_json("/workers").await;
    for worker in workers["workers"].as_array().unwrap() {
        assert_eq!(worker["load"], 0, "{worker}");
    }
}

#[tokio::test]
async fn a_client_that_leaves_closes_its_legs_at_once_in_every_phase() {
    join_all(DISPATCHES.map(|dispatch| async move {
        let serving = Serving::start(dispatch, &["--upstream-pool-idle-timeout-secs", "1"]).await;
        let mut all_noticed = Vec::new();
        for phase in Phase::ALL.into_iter().filter(|phase| phase.exists(dispatch)) {
            for stream in [true, false] {
                with_faults(&serving, dispatch, phase, stream);
                for (path, body) in requests() {
                    let case = format!("{dispatch:?} {phase:?} {path}, streamed: {stream}");
                    let counts: Vec<u64> = serving.engines().map(MockEngine::generation_count).collect();
                    let client = client(&serving.smg, path, &if stream { streamed(body) } else { body });
                    // Every leg of this phase is under way.
                    let waits_for_prefill = dispatch == Dispatch::Sequential && phase == Phase::BeforeHeads;
                    for (engine, count) in serving.engines().zip(counts) {
                        let is_output = std::ptr::eq(engine, &serving.output);
                        if is_output && waits_for_prefill {
                            continue;
                        }
                        engine.wait_for_generations(count + 1, PATIENCE).await.expect(&case);
                        let answered = match phase {
                            Phase::BeforeHeads => false,
                            Phase::PrefillHead => !is_output,
                            Phase::DecodeHead => is_output,
                            Phase::Midway => true,
                        };
                        if answered {
                            until_last(engine, &case, |request| request.status.is_some()).await;
                        }
                    }
                    let left = Instant::now();
                    client.abort();
                    for engine in serving.engines() {
                        let is_output = std::ptr::eq(engine, &serving.output);
                        if is_output && waits_for_prefill {
                            continue;
                        }
                        // A prefill that has answered completely has nothing left to close.
                        let complete = !is_output
                            && (phase == Phase::Midway
                                || (phase == Phase::PrefillHead && dispatch == Dispatch::Sequential));
                        if !complete {
                            until_last(engine, &case, |request| request.peer_closed_at.is_some()).await;
                            let closed = engine.generations().pop().unwrap().peer_closed_at.unwrap();
                            let noticed = closed.saturating_duration_since(left);
                            assert!(noticed <= PROMPT, "{case}: after {noticed:?}");
                            all_noticed.push(noticed);
                        }
                    }
                    serving.smg.until_idle().await;
                }
            }
        }
        assert_nothing_is_left(&serving).await;
        // A busy machine may be late now and then, but not most of the time.
        let usually = usual(all_noticed);
        assert!(usually < Duration::from_secs(1), "{dispatch:?}: usually after {usually:?}");
    }))
    .await;
}

#[tokio::test]
async fn a_prefill_is_read_to_its_end_though_the_client_has_left_the_stream() {
    let serving = Serving::start(Dispatch::Parallel, &["--upstream-pool-idle-timeout-secs", "1"]).await;
    let prefill = serving.prefill.as_ref().unwrap();
    prefill.set_fault(Fault::generation().status(200, "{}").delay_body(Duration::from_millis(1500)));
    serving.output.set_fault(silent_after_the_head(true));
    let response = serving.smg.post("/v1/chat/completions", &chat_stream()).await;
    let mut stream = response.bytes_stream();
    assert_eq!(stream.next().await.unwrap().unwrap(), EVENT);
    drop(stream);
    until_last(&serving.output, "decode is closed", |request| request.peer_closed_at.is_some()).await;
    let left = Instant::now();
    assert_eq!(prefill.active(), 1);
    let load = serving.smg.metric("smg_worker_requests_active", &[("worker", &prefill.url())]).await;
    assert_eq!(load, 1.0, "the drain still counts as load");
    until_last(prefill, "prefill ends", |request| request.finished_at.is_some()).await;
    let request = prefill.generations().remove(0);
    assert_eq!(request.peer_closed_at, None, "the transfer was cut short");
    assert!(request.finished_at.unwrap() > left);
    assert_nothing_is_left(&serving).await;
    let outcome = [("worker", &*prefill.url()), ("outcome", "success")];
    assert_eq!(serving.smg.metric("smg_worker_cb_outcomes_total", &outcome).await, 1.0);
}

#[tokio::test]
async fn an_engine_stops_writing_soon_after_the_client_has_left_the_stream() {
    let one_at_a_time =
        ["--upstream-pool-idle-timeout-secs", "1", "--max-concurrent-requests", "1", "--queue-size", "0"];
    join_all(DISPATCHES.map(|dispatch| async move {
        let serving = Serving::scripted(dispatch, &one_at_a_time).await;
        let pieces = (0..600).map(|_| (Duration::from_millis(100), EVENT));
        serving.output.set_fault(Fault::generation().script(pieces));
        let response = serving.smg.post("/v1/chat/completions", &chat_stream()).await;
        let mut stream = response.bytes_stream();
        for _ in 0..5 {
            assert_eq!(stream.next().await.unwrap().unwrap(), EVENT);
        }
        drop(stream);
        let left = Instant::now();
        until_last(&serving.output, "the engine sees the close", |request| request.peer_closed_at.is_some()).await;
        let request = serving.output.generations().remove(0);
        let noticed = request.peer_closed_at.unwrap().saturating_duration_since(left);
        assert!(noticed < Duration::from_secs(1), "{dispatch:?}: after {noticed:?}");
        let events = request.bytes_sent as usize / EVENT.len();
        assert!(events <= 20, "{dispatch:?}: {events} events were written");
        assert_nothing_is_left(&serving).await;
        // Its place at the edge is free again.
        serving.output.clear_faults();
        serving.output.set_fault(anything());
        assert_eq!(serving.smg.post("/v1/chat/completions", &chat()).await.status(), 200, "{dispatch:?}");
    }))
    .await;
}

#[tokio::test]
async fn a_handoff_that_no_decode_took_is_counted_and_named() {
    let (smg, prefill, decode) = nixl_pair(&[]).await;
    // The decode's port takes connections and reads nothing: a request larger than the buffers between is never sent.
    let port = decode.port();
    decode.stop().await;
    let _listener = std::net::TcpListener::bind(("127.0.0.1", port)).unwrap();
    let mut body = completion();
    body["prompt"] = json!("w".repeat(8 * 1024 * 1024));
    let client = {
        let request = smg.client.post(format!("{}/v1/completions", smg.url)).json(&body);
        tokio::spawn(async move {
            let _ = request.send().await;
        })
    };
    let answered = |engine: &MockEngine| engine.generations().first().is_some_and(|first| first.finished_at.is_some());
    prefill.wait_until(PATIENCE, answered).await.unwrap();
    eventually("decode is dispatched", || async { (smg.sockets_to(port) > 0).then_some(()) }).await;
    assert_eq!(smg.metric("smg_pd_orphaned_handoffs_total", &[]).await, 0.0);
    client.abort();
    smg.until_idle().await;
    assert_eq!(smg.metric("smg_pd_orphaned_handoffs_total", &[]).await, 1.0);
    smg.logged(&["handoff", "remote_request_id"]).await;
}

#[tokio::test]
async fn a_mooncake_handoff_is_counted_though_the_client_left_before_the_prefills_answer_was_read() {
    let (prefill, decode) =
        (vllm(Role::Prefill, Connector::Mooncake).await, vllm(Role::Decode, Connector::Mooncake).await);
    let smg = Smg::launch(&[]).await;
    let declared = json!({"kv_connector": "MooncakeConnector", "kv_engine_id": prefill.engine_id()});
    smg.register(&spec_with(&prefill, "prefill", declared)).await;
    smg.register(&spec_with(&decode, "decode", json!({"kv_connector": "MooncakeConnector"}))).await;
    let orphans = async || smg.metric("smg_pd_orphaned_handoffs_total", &[]).await;
    assert_eq!(smg.post("/v1/completions", &completion()).await.status(), 200);
    assert_eq!(orphans().await, 0.0, "this one was taken");
    // The head says that the engine is done; its body never comes.
    prefill.set_fault(Fault::generation().delay_body(FOREVER));
    let url = format!("{}/v1/completions", smg.url);
    let request = smg.client.post(url).header("x-request-id", "left").json(&completion()).send();
    let heads = async || smg.metric("smg_router_upstream_responses_total", &[("status_code", "200")]).await;
    let answering =
        eventually("the head of the prefill's answer comes", || async { (heads().await == 3.0).then_some(()) });
    tokio::select! {
        _ = request => panic!("nobody answers"),
        () = answering => {}
    }
    eventually("it is counted", || async { (orphans().await == 1.0).then_some(()) }).await;
    smg.logged(&["handoff", "xfer-", "left"]).await;
    assert_eq!(decode.generation_count(), 1);
    smg.until_idle().await;
}

#[tokio::test]
async fn clients_that_leave_around_the_end_of_prefill_leave_nothing_behind() {
    let serving = Serving::start(Dispatch::Sequential, &["--upstream-pool-idle-timeout-secs", "1"]).await;
    let prefill = serving.prefill.as_ref().unwrap();
    prefill.set_fault(Fault::generation().delay_head(Duration::from_millis(60)));
    let leave_after = async |milliseconds| {
        let url = format!("{}/v1/chat/completions", serving.smg.url);
        let request = serving.smg.client.post(url).json(&chat()).timeout(Duration::from_millis(milliseconds));
        let _ = request.send().await;
    };
    for milliseconds in (40..100).step_by(2) {
        leave_after(milliseconds).await;
    }
    assert_nothing_is_left(&serving).await;
    assert!(serving.output.generation_count() < prefill.generation_count());
    // A long prefill: its client leaves long before its end, and a millisecond on either side of it.
    let (prefills, decodes) = (prefill.generation_count(), serving.output.generation_count());
    prefill.clear_faults();
    prefill.set_fault(Fault::generation().delay_head(Duration::from_secs(2)));
    join_all([1000, 1999, 2001].map(leave_after)).await;
    assert_nothing_is_left(&serving).await;
    assert_eq!(prefill.generation_count() - prefills, 3);
    assert!(serving.output.generation_count() - decodes < 3);
}

struct TwoPairs {
    smg: Smg,
    prefills: [MockEngine; 2],
    decodes: [MockEngine; 2],
}

impl TwoPairs {
    async fn start(flags: &[&str]) -> Self {
        let prefills = [silent(Role::Prefill, MODEL).await, silent(Role::Prefill, MODEL).await];
        let decodes = [silent(Role::Decode, MODEL).await, silent(Role::Decode, MODEL).await];
        let smg = Smg::launch(flags).await;
        join_all([0, 1].map(|index| smg.register_pair(&prefills[index], &decodes[index]))).await;
        Self { smg, prefills, decodes }
    }

    fn engines(&self) -> impl Iterator<Item = &MockEngine> {
        self.prefills.iter().chain(&self.decodes)
    }

    fn faults(&self, prefill: &Fault, decode: &Fault) {
        self.engines().for_each(MockEngine::clear_faults);
        self.prefills.iter().for_each(|engine| engine.set_fault(prefill.clone()));
        self.decodes.iter().for_each(|engine| engine.set_fault(decode.clone()));
    }

    fn generations(engines: &[MockEngine; 2]) -> u64 {
        engines.iter().map(MockEngine::generation_count).sum()
    }

    async fn assert_no_load(&self) {
        self.smg.until_idle().await;
        let workers = self.smg.get_json("/workers").await;
        for worker in workers["workers"].as_array().unwrap() {
            assert_eq!(worker["load"], 0, "{worker}");
        }
    }
}

#[tokio::test]
async fn loads_are_true_after_hundreds_of_clients_have_left() {
    const WAVE: usize = 300;
    // A starved machine takes seconds for a wave, and the retries of the last one wait for longer than that.
    const WHILE: Duration = Duration::from_secs(90);
    let flags = [
        "--policy",
        "least_load",
        "--retry-budget-ratio",
        "1",
        "--disable-circuit-breaker",
        "--retry-initial-backoff-ms",
        "300000",
        "--retry-max-backoff-ms",
        "300000",
    ];
    let fleet = TwoPairs::start(&flags).await;
    let wave = || (0..WAVE).map(|_| client(&fleet.smg, "/v1/chat/completions", &chat_stream())).collect::<Vec<_>>();

    let mut all_free = Vec::new();
    let mut leave = async |clients: Vec<JoinHandle<()>>| {
        clients.iter().for_each(JoinHandle::abort);
        let left = Instant::now();
        fleet.assert_no_load().await;
        all_free.push(left.elapsed());
    };

    // Held before the head.
    let hang = Fault::generation().hang();
    fleet.faults(&hang, &hang);
    let clients = wave();
    eventually_within(WHILE, "all requests are held", || async {
        let held = |engines| TwoPairs::generations(engines) == WAVE as u64;
        (held(&fleet.prefills) && held(&fleet.decodes)).then_some(())
    })
    .await;
    leave(clients).await;

    // In the middle of the stream.
    fleet.faults(&instant_prefill(), &silent_after_the_head(true));
    let clients = wave();
    eventually_within(WHILE, "all requests stream", || async {
        let active = fleet.decodes.iter().map(MockEngine::active).sum::<usize>();
        let prefilling = fleet.prefills.iter().map(MockEngine::active).sum::<usize>();
        (active == WAVE && prefilling == 0 && TwoPairs::generations(&fleet.prefills) == 2 * WAVE as u64).then_some(())
    })
    .await;
    leave(clients).await;

    // Between two attempts.
    let busy = Fault::generation().status(503, r#"{"error":"busy"}"#);
    fleet.faults(&busy, &hang);
    let clients = wave();
    eventually_within(WHILE, "all requests wait for their second attempt", || async {
        (fleet.smg.metric("smg_worker_retries_total", &[]).await == WAVE as f64).then_some(())
    })
    .await;
    leave(clients).await;

    assert!(best(all_free.clone()) < Duration::from_secs(2), "{all_free:?}");

    // Nothing that was counted tilts the choice. Equal loads are chosen among at random: the bound is four deviations wide.
    let ok = Fault::generation().status(200, "{}");
    fleet.faults(&ok, &ok);
    let before: Vec<u64> = fleet.engines().map(MockEngine::generation_count).collect();
    for _ in 0..400 {
        assert_eq!(fleet.smg.post("/v1/chat/completions", &chat()).await.status(), 200);
    }
    for (engine, before) in fleet.engines().zip(before) {
        let served = engine.generation_count() - before;
        assert!((160..=240).contains(&served), "{served} of 400");
    }
}

#[tokio::test]
async fn health_checks_leave_loads_as_they_are() {
    let prefill = silent(Role::Prefill, MODEL).await;
    prefill.set_fault(instant_prefill());
    let [first, second] = [silent(Role::Decode, MODEL).await, silent(Role::Decode, MODEL).await];
    for decode in [&first, &second] {
        decode.set_fault(silent_after_the_head(true));
    }
    let smg = Smg::launch(&["--policy", "least_load", "--health-check-interval-secs", "1"]).await;
    smg.register_pair(&prefill, &first).await;
    let ten = || (0..10).map(|_| client(&smg, "/v1/chat/completions", &chat_stream())).collect::<Vec<_>>();
    let mut clients = ten();
    first.wait_for_generations(10, PATIENCE).await.unwrap();
    smg.register(&spec(&second, "decode")).await;

    let probes = |engine: &MockEngine| engine.requests().iter().filter(|request| request.path == "/health").count();
    let before = probes(&first);
    eventually("fifteen rounds of health checks", || async {
        let loads = [&first, &second].map(|engine| engine.url());
        let loads = [&loads[0], &loads[1]].map(|url| [("worker", url.as_str())]);
        assert_eq!(smg.metric("smg_worker_requests_active", &loads[0]).await, 10.0);
        assert_eq!(smg.metric("smg_worker_requests_active", &loads[1]).await, 0.0);
        (probes(&first) >= before + 15).then_some(())
    })
    .await;
    clients.extend(ten());
    second.wait_for_generations(10, PATIENCE).await.unwrap();
    assert_eq!(first.generation_count(), 10);
    clients.iter().for_each(JoinHandle::abort);
    smg.until_idle().await;
}

#[tokio::test]
async fn a_client_that_leaves_is_noticed_whatever_it_sent_after_its_request() {
    let serving = Serving::start(Dispatch::Regular, &[]).await;
    serving.output.set_fault(Fault::generation().delay_head(FOREVER));
    let body = chat_stream().to_string();
    for more in ["", "\r\n", "GET /liveness HTTP/1.1\r\nhost: a\r\n\r\n", "what is this"] {
        let count = serving.output.generation_count();
        let mut client = TcpStream::connect(("127.0.0.1", serving.smg.port)).await.unwrap();
        let head = "POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n";
        let request = format!("{head}content-length: {}\r\n\r\n{body}{more}", body.len());
        client.write_all(request.as_bytes()).await.unwrap();
        serving.output.wait_for_generations(count + 1, PATIENCE).await.unwrap();
        drop(client);
        serving.output.wait_until(PATIENCE, |engine| engine.active() == 0).await.expect(more);
        serving.smg.until_idle().await;
    }
}
