//! Flags whose effect shows in no other test: each does what it says.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod support;

use std::fs::File;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use futures::StreamExt;
use reqwest::StatusCode;
use serde_json::{Value, json};
use support::*;

const CHAT: &str = "/v1/chat/completions";

#[tokio::test]
async fn a_silent_stream_gets_comments_at_the_interval_asked_for() {
    let output = [(0, "data: {\"a\":1}\n\n"), (2500, "data: [DONE]\n\n")];
    for (seconds, comments) in [("1", 1..=2), ("0", 0..=0)] {
        let serving = Serving::scripted(Dispatch::Sequential, &["--sse-keepalive-secs", seconds]).await;
        let script = output.map(|(pause, piece)| (Duration::from_millis(pause), piece));
        serving.output.set_fault(Fault::generation().script(script));
        let text = serving.smg.post(CHAT, &chat_stream()).await.text().await.unwrap();
        // A slow machine may be late with a comment, or with the end.
        let found = text.matches(": ping\n\n").count();
        assert!(comments.contains(&found) || (seconds == "1" && found > 2), "{seconds}: {text:?}");
        assert_eq!(text.replace(": ping\n\n", ""), output.map(|(_, piece)| piece).concat());
    }
}

#[tokio::test]
async fn a_request_id_is_looked_for_in_the_headers_that_were_named() {
    let (smg, prefill, decode) = sglang_pair(&["--request-id-headers", "x-mine", "x-other"]).await;
    let ask =
        smg.client.post(format!("{}{CHAT}", smg.url)).header("x-other", "abc").header("x-request-id", "not-asked");
    let response = ask.json(&chat()).send().await.unwrap();
    assert_eq!((response.status(), &response.headers()["x-request-id"]), (StatusCode::OK, &"abc".parse().unwrap()));
    for engine in [&prefill, &decode] {
        assert_eq!(engine.generations()[0].header("x-request-id"), Some("abc"));
    }
}

#[tokio::test]
async fn the_process_runs_and_logs_and_measures_as_it_was_told() {
    let flags = ["--runtime-worker-threads", "3", "--log-json", "--prometheus-duration-buckets", "0.5", "7"];
    let (smg, _prefill, _decode) = sglang_pair(&flags).await;
    assert_eq!(smg.post(CHAT, &chat()).await.status(), StatusCode::OK);
    smg.until_idle().await;
    let metrics = smg.metrics().await;
    assert_eq!(samples(&metrics, "smg_tokio_workers", &[]).values().sum::<f64>(), 3.0);
    let labels = [("path", CHAT)];
    let bounds: Vec<String> =
        samples(&metrics, "smg_http_request_duration_seconds_bucket", &labels).into_keys().collect();
    assert_eq!(bounds.len(), 3, "{bounds:?}");
    assert!(["0.5", "7", "+Inf"].iter().all(|le| bounds.iter().any(|bound| bound.contains(&format!("le=\"{le}\"")))));
    smg.logged(&["smg::response", CHAT]).await;
    let log = smg.log();
    assert!(log.lines().count() > 2);
    for line in log.lines() {
        let line: Value = serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}"));
        assert!(line["level"].is_string() && line["target"].is_string(), "{line}");
    }
}

#[tokio::test]
async fn every_request_is_one_line_as_loud_as_its_status_and_its_query_is_no_part_of_it() {
    let (smg, _prefill, decode) = sglang_pair(&["--log-json", "--disable-retries"]).await;
    assert_eq!(smg.post(&format!("{CHAT}?key=secret-1"), &chat()).await.status(), StatusCode::OK);
    assert_eq!(smg.post("/no/such/path?key=secret-2", &chat()).await.status(), StatusCode::NOT_FOUND);
    decode.set_fault(Fault::path(CHAT).status(500, "{}"));
    assert_eq!(smg.post(CHAT, &chat()).await.status(), StatusCode::INTERNAL_SERVER_ERROR);
    smg.get("/health").await;
    smg.until_idle().await;
    let lines = || {
        let lines = smg.log();
        let lines = lines.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
        lines.filter(|line| line["target"] == "smg::response").collect::<Vec<_>>()
    };
    let lines =
        eventually("a line for each request", || async { Some(lines()).filter(|lines| lines.len() >= 3) }).await;
    let shown = |line: &Value| (line["level"].clone(), line["path"].clone(), line["status"].clone());
    let of = |path: &str| lines.iter().filter(|line| line["path"] == path).map(shown).collect::<Vec<_>>();
    assert_eq!(of(CHAT), [(json!("INFO"), json!(CHAT), json!(200)), (json!("ERROR"), json!(CHAT), json!(500))]);
    assert_eq!(of("/no/such/path"), [(json!("WARN"), json!("/no/such/path"), json!(404))]);
    assert!(of("/health").is_empty());
    let first = lines.iter().find(|line| line["path"] == CHAT).unwrap();
    assert!(
        first["request_id"].is_string() && first["worker"] == decode.url() && first["duration_ms"].is_u64(),
        "{first}"
    );
    assert!(!smg.log().contains("secret-"));
}

/// Starts it with both of its outputs at `console`.
fn spawn_at(console: &Path, arguments: &[&str], level: &str) -> Smg {
    let port = free_port();
    let mut command = Command::new("sh");
    command.args(["-c", "exec \"$0\" \"$@\" >\"$CONSOLE\" 2>&1", env!("CARGO_BIN_EXE_smg")]);
    let all = ["launch", "--pd-disaggregation", "--host", "127.0.0.1", "--port", &port.to_string()];
    let all = [&all[..], arguments].concat();
    Smg::spawn_by(command, &all, port, &[("RUST_LOG", level), ("CONSOLE", console.to_str().unwrap())])
}

/// A pipe that is full and that nobody reads. It ends with the handle.
fn full_pipe(path: &Path) -> File {
    const O_NONBLOCK: i32 = 0o4000;
    assert!(Command::new("mkfifo").arg(path).status().unwrap().success());
    let mut pipe = File::options().read(true).write(true).custom_flags(O_NONBLOCK).open(path).unwrap();
    while matches!(pipe.write(&[b'x'; 4096]), Ok(4096)) {}
    pipe
}

/// The one log file in a directory, if there is one.
fn log_file(directory: &Path) -> Option<PathBuf> {
    let mut names = std::fs::read_dir(directory).ok()?;
    Some(names.next()?.ok()?.path())
}

#[tokio::test]
async fn a_console_that_takes_nothing_holds_no_request_up_and_what_it_misses_is_counted() {
    let directory = tempfile::tempdir().unwrap();
    let (console, logs) = (directory.path().join("console"), directory.path().join("new").join("logs"));
    let _pipe = full_pipe(&console);
    let flags = ["--log-dir", logs.to_str().unwrap(), "--shutdown-grace-period-secs", "1"];
    let mut smg = spawn_at(&console, &flags, "trace");
    smg.ready("/liveness").await;
    let (prefill, decode) = (sglang(Role::Prefill).await, sglang(Role::Decode).await);
    smg.register_pair(&prefill, &decode).await;
    eventually_within(Duration::from_secs(60), "lines are dropped", || async {
        smg.post(CHAT, &chat()).await;
        (smg.metric("smg_log_dropped_lines", &[("sink", "console")]).await > 0.0).then_some(())
    })
    .await;
    assert_eq!(smg.post(CHAT, &chat()).await.status(), StatusCode::OK);
    let file = log_file(&logs).unwrap();
    let name = file.file_name().unwrap().to_str().unwrap();
    assert!(name.starts_with("smg.") && name.ends_with(".log"), "{name}");
    assert!(std::fs::read_to_string(&file).unwrap().contains("serving clients"));
    // Nor does it hold up the end, be it one with last words.
    smg.signal("TERM");
    assert_eq!(smg.exited().await.code(), Some(0));
    let mut refused = spawn_at(&console, &["--tls-cert-path", "/none", "--tls-key-path", "/none"], "info");
    assert_eq!(refused.exited().await.code(), Some(1));
}

#[tokio::test]
async fn a_request_is_served_and_a_line_counted_where_logs_have_no_room_and_files_go_on_when_they_have() {
    let directory = tempfile::tempdir().unwrap();
    let logs = directory.path().join("logs");
    let smg = spawn_at(Path::new("/dev/full"), &["--log-dir", logs.to_str().unwrap()], "info");
    smg.ready("/liveness").await;
    let engine = sglang(Role::Regular).await;
    smg.register(&spec(&engine, "regular")).await;
    let dropped = async |sink| smg.metric("smg_log_dropped_lines", &[("sink", sink)]).await;
    eventually("lines are counted", || async { (dropped("console").await > 0.0).then_some(()) }).await;
    assert_eq!(dropped("files").await, 0.0);
    let ask = async || assert_eq!(smg.post(CHAT, &chat()).await.status(), StatusCode::OK);
    let until_written = async |what: &str| {
        eventually(what, || async {
            ask().await;
            let text = std::fs::read_to_string(log_file(&logs)?).ok()?;
            text.contains("smg::response").then_some(text)
        })
        .await
    };
    let told = until_written("lines are in a file").await;
    assert!(told.contains("log lines were dropped") && told.contains("No space left"), "{told}");
    // The disk is full.
    let file = log_file(&logs).unwrap();
    std::fs::remove_file(&file).unwrap();
    std::os::unix::fs::symlink("/dev/full", &file).unwrap();
    eventually("lines are counted", || async {
        ask().await;
        (dropped("files").await > 0.0).then_some(())
    })
    .await;
    std::fs::remove_file(&file).unwrap();
    until_written("there is room again").await;
    std::fs::remove_dir_all(&logs).unwrap();
    until_written("the directory is there again").await;
}

#[tokio::test]
async fn after_the_end_of_a_process_every_request_has_its_line_on_the_console_and_in_the_file() {
    const REQUESTS: usize = 400;
    let directory = tempfile::tempdir().unwrap();
    let (console, logs) = (directory.path().join("console"), directory.path().join("logs"));
    let flags = ["--log-dir", logs.to_str().unwrap(), "--log-json", "--shutdown-grace-period-secs", "1"];
    let mut smg = spawn_at(&console, &flags, "info");
    smg.ready("/liveness").await;
    let engine = sglang(Role::Regular).await;
    smg.register(&spec(&engine, "regular")).await;
    let ask = |number: usize| {
        let smg = &smg;
        async move { assert_eq!(smg.post_as(&format!("asked-{number}"), CHAT, &chat()).await.status(), StatusCode::OK) }
    };
    futures::stream::iter(0..REQUESTS).for_each_concurrent(16, ask).await;
    assert_eq!(smg.metric("smg_log_dropped_lines", &[]).await, 0.0);
    smg.signal("TERM");
    assert_eq!(smg.exited().await.code(), Some(0));
    for file in [console, log_file(&logs).unwrap()] {
        let text = std::fs::read_to_string(&file).unwrap();
        let lines = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
        let answered = lines.filter(|line| line["target"] == "smg::response");
        let mut ids: Vec<_> = answered.map(|line| line["request_id"].as_str().unwrap().to_owned()).collect();
        ids.sort_unstable();
        ids.dedup();
        let asked = ids.iter().filter(|id| id.starts_with("asked-")).count();
        assert_eq!(asked, REQUESTS, "{}", file.display());
    }
}

#[tokio::test]
async fn a_directory_that_takes_no_log_files_stops_the_start() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("file");
    std::fs::write(&file, "").unwrap();
    let mut smg = Smg::spawn(&["launch", "--log-dir", file.to_str().unwrap()], free_port(), &[]);
    assert_eq!(smg.exited().await.code(), Some(73), "{}", smg.log());
    assert!(smg.log().contains("log files cannot be written to"), "{}", smg.log());
}

#[tokio::test]
async fn a_rate_lets_a_burst_through_and_the_rest_come_later() {
    let flags = ["--max-concurrent-requests", "2", "--rate-limit-tokens-per-second", "0.2", "--queue-size", "0"];
    let (smg, _prefill, _decode) = sglang_pair(&flags).await;
    for _ in 0..2 {
        assert_eq!(smg.post(CHAT, &chat()).await.status(), StatusCode::OK);
    }
    let refused = smg.post(CHAT, &chat()).await;
    assert_eq!(
        (refused.status(), &refused.headers()["x-smg-error-code"]),
        (StatusCode::TOO_MANY_REQUESTS, &"admission_queue_full".parse().unwrap())
    );
    eventually("the next one is let in", || async { (smg.post(CHAT, &chat()).await.status() == 200).then_some(()) })
        .await;
}

#[tokio::test]
async fn a_request_whose_time_is_over_before_its_turn_asks_no_worker_and_blames_none() {
    let waits = ["--max-concurrent-requests", "1", "--rate-limit-tokens-per-second", "0.3"];
    let (smg, prefill, decode) = sglang_pair(&[&waits[..], &["--request-timeout-secs", "2"]].concat()).await;
    assert_eq!(smg.post(CHAT, &chat()).await.status(), StatusCode::OK);
    let late = smg.post(CHAT, &chat()).await;
    assert_eq!(
        (late.status().as_u16(), &late.headers()["x-smg-error-code"]),
        (504, &"request_timeout".parse().unwrap())
    );
    assert_eq!([prefill.generation_count(), decode.generation_count()], [1, 1]);
    assert_eq!(smg.metric("smg_worker_cb_outcomes_total", &[("outcome", "failure")]).await, 0.0);
}

#[tokio::test]
async fn workers_are_probed_where_operators_say_or_not_at_all() {
    let every_second = ["--health-check-interval-secs", "1", "--health-failure-threshold", "1"];
    let probed =
        |engine: &MockEngine, path: &str| engine.requests().iter().filter(|request| request.path == path).count();
    // Their own endpoint.
    let engine = sglang(Role::Regular).await;
    engine.set_fault(Fault::health().status(500, "{}"));
    let smg = Smg::launch(&[&every_second[..], &["--health-check-endpoint", "/v1/models"]].concat()).await;
    let id = smg.register(&spec(&engine, "regular")).await;
    let before = probed(&engine, "/v1/models");
    eventually("it was probed there", || async { (probed(&engine, "/v1/models") >= before + 3).then_some(()) }).await;
    smg.until_healthy(&id).await;
    // None.
    let engine = sglang(Role::Regular).await;
    let smg = Smg::launch(&[&every_second[..], &["--disable-health-check"]].concat()).await;
    let id = smg.register(&spec(&engine, "regular")).await;
    let before = probed(&engine, "/health");
    engine.set_fault(Fault::health().status(500, "{}"));
    let watched = tokio::time::Instant::now();
    eventually("several intervals have passed", || async {
        (watched.elapsed() >= Duration::from_secs(3)).then_some(())
    })
    .await;
    assert_eq!(probed(&engine, "/health"), before);
    smg.until_healthy(&id).await;
}

#[tokio::test]
async fn regular_workers_of_the_start_command_serve() {
    let engines = [sglang(Role::Regular).await, sglang(Role::Regular).await];
    let urls = engines.each_ref().map(|engine| engine.url());
    let port = free_port();
    let text = port.to_string();
    let start = [
        "launch",
        "--host",
        "127.0.0.1",
        "--port",
        &text,
        "--policy",
        "round_robin",
        "--worker-urls",
        &urls[0],
        &urls[1],
    ];
    let smg = Smg::spawn(&start, port, &[]);
    eventually("both serve", || async {
        let asked = smg.client.post(format!("{}{CHAT}", smg.url)).json(&chat()).send().await.ok()?;
        (asked.status() == 200 && engines.iter().all(|engine| engine.generation_count() > 0)).then_some(())
    })
    .await;
}

#[tokio::test]
async fn the_soft_limit_of_open_files_is_raised_to_the_hard_one() {
    let mut command = Command::new("sh");
    command.args(["-c", "ulimit -Sn 256 && ulimit -Hn 1000 && exec \"$@\"", "sh", env!("CARGO_BIN_EXE_smg")]);
    let port = free_port();
    let smg = Smg::spawn_by(command, &["launch", "--host", "127.0.0.1", "--port", &port.to_string()], port, &[]);
    smg.ready("/liveness").await;
    let limits = std::fs::read_to_string(format!("/proc/{}/limits", smg.pid())).unwrap();
    let files = limits.lines().find_map(|line| line.strip_prefix("Max open files")).unwrap();
    assert_eq!(files.split_whitespace().take(2).collect::<Vec<_>>(), ["1000", "1000"]);
    smg.logged(&["limit of open files"]).await;
    smg.logged(&["few files may be open"]).await;
}
