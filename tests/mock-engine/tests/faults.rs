//! Each fault does what it says, and what was received is recorded.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use std::io::ErrorKind;
use std::time::{Duration, Instant};

use common::*;
use mock_engine::{Connector, Fault, MockEngine, Role};
use serde_json::{Value, json};

const PATH: &str = "/v1/completions";

async fn engine() -> MockEngine {
    vllm(Role::Regular, Connector::None).start().await.unwrap()
}

fn stream() -> Value {
    with(completion("hi"), json!({"stream": true}))
}

#[tokio::test]
async fn a_status_replaces_the_answer_for_the_next_requests_only() {
    let engine = engine().await;
    let fault = Fault::generation().status(429, r#"{"busy":true}"#).header("retry-after", "7").times(2);
    engine.set_fault(fault);
    for _ in 0..2 {
        let answer = post(&engine, PATH, &completion("hi")).await;
        assert_eq!((answer.status, answer.text.as_str()), (429, r#"{"busy":true}"#));
        assert_eq!(answer.headers["retry-after"], "7");
        assert_eq!(answer.headers["content-type"], "application/json");
    }
    assert_eq!(post(&engine, PATH, &completion("hi")).await.status, 200);
    engine.set_fault(Fault::health().status(503, ""));
    assert_eq!(get(&engine, "/health").await.status, 503);
    assert_eq!(get(&engine, "/version").await.status, 200);
    engine.clear_faults();
    assert_eq!(get(&engine, "/health").await.status, 200);
}

#[tokio::test]
async fn delays_come_before_the_head_or_before_the_body() {
    let engine = engine().await;
    let delay = Duration::from_millis(80);
    engine.set_fault(Fault::generation().delay_head(delay).times(1));
    let start = Instant::now();
    Raw::post(&engine, PATH, &stream()).await.until("HTTP/1.1").await;
    assert!(start.elapsed() >= delay);

    engine.set_fault(Fault::generation().delay_body(Duration::from_secs(60)).times(1));
    let head = Raw::post(&engine, PATH, &stream()).await.until("\r\n\r\n").await;
    assert!(head.ends_with("\r\n\r\n"), "{head}");
}

#[tokio::test]
async fn a_hanging_engine_sees_its_client_leave() {
    let engine = engine().await;
    engine.set_fault(Fault::generation().hang());
    let raw = Raw::post(&engine, PATH, &stream()).await;
    engine.wait_until(SOON, |engine| engine.active() == 1).await.unwrap();
    drop(raw);
    engine.wait_until(SOON, |engine| engine.requests()[0].finished_at.is_some()).await.unwrap();
    let seen = &engine.requests()[0];
    assert!(seen.peer_closed_at.is_some());
    assert_eq!((seen.status, seen.bytes_sent), (None, 0));
    assert_eq!(engine.active(), 0);
}

#[tokio::test]
async fn a_reset_comes_after_the_events_it_was_told_to_send() {
    let engine = engine().await;
    engine.set_fault(Fault::generation().reset_after_events(2));
    let (bytes, end) = Raw::post(&engine, PATH, &stream()).await.end().await;
    assert_eq!(String::from_utf8_lossy(&bytes).matches("data: ").count(), 2);
    assert_eq!(end.err().unwrap().kind(), ErrorKind::ConnectionReset);
}

#[tokio::test]
async fn a_reset_comes_after_the_bytes_it_was_told_to_send() {
    let engine = engine().await;
    engine.set_fault(Fault::generation().reset_after_bytes(10));
    let (bytes, end) = Raw::post(&engine, PATH, &completion("hi")).await.end().await;
    let text = String::from_utf8(bytes).unwrap();
    let (_, body) = text.split_once("\r\n\r\n").unwrap();
    assert_eq!(body.len(), 10);
    assert_eq!(end.err().unwrap().kind(), ErrorKind::ConnectionReset);
}

#[tokio::test]
async fn an_early_close_leaves_the_answer_unfinished_and_an_early_end_finishes_it() {
    let engine = engine().await;
    engine.set_fault(Fault::generation().close_after_events(1).times(1));
    let (bytes, end) = Raw::post(&engine, PATH, &stream()).await.end().await;
    assert!(end.is_ok());
    assert!(!bytes.ends_with(b"0\r\n\r\n"));
    assert!(bytes.ends_with(b"\n\n\r\n"));

    engine.set_fault(Fault::generation().end_after_events(3).times(1));
    let answer = post(&engine, PATH, &stream()).await.text;
    assert_eq!(answer.matches("data: ").count(), 3);
    assert!(!answer.contains("[DONE]"));
}

#[tokio::test]
async fn a_stall_keeps_the_connection_open() {
    let engine = engine().await;
    engine.set_fault(Fault::generation().stall_at_end());
    let mut raw = Raw::post(&engine, PATH, &stream()).await;
    raw.until("[DONE]\n\n").await;
    assert_eq!(engine.active(), 1);
    drop(raw);
    engine.wait_until(SOON, |engine| engine.active() == 0).await.unwrap();
}

#[tokio::test]
async fn a_script_is_sent_byte_for_byte_one_write_each() {
    let engine = engine().await;
    let text = "data: {\"delta\":\"你好🙂\"}\n\ndata: [DONE]\n\n";
    let bytes = text.bytes().map(|byte| (Duration::ZERO, vec![byte]));
    engine.set_fault(Fault::generation().script(bytes));
    let answer = post(&engine, PATH, &stream()).await;
    assert_eq!(answer.text, text);
    let gaps = [(Duration::ZERO, "a"), (Duration::from_millis(60), "b"), (Duration::ZERO, "c")];
    engine.clear_faults();
    engine.set_fault(Fault::generation().script(gaps));
    let mut raw = Raw::post(&engine, PATH, &stream()).await;
    raw.until("1\r\na\r\n").await;
    let start = Instant::now();
    raw.until("1\r\nc\r\n0\r\n\r\n").await;
    assert!(start.elapsed() >= Duration::from_millis(30));
}

#[tokio::test]
async fn raw_bytes_stand_in_for_an_answer() {
    let engine = engine().await;
    engine.set_fault(Fault::generation().raw([(Duration::ZERO, "HTTP/1.1 2")]));
    let (bytes, end) = Raw::post(&engine, PATH, &stream()).await.end().await;
    assert_eq!(bytes, b"HTTP/1.1 2");
    assert!(end.is_ok());
}

#[tokio::test]
async fn a_drip_changes_the_pace_and_not_the_bytes() {
    let engine = engine().await;
    let expected = [post(&engine, PATH, &stream()).await.text, post(&engine, PATH, &completion("hi")).await.text];
    engine.set_fault(Fault::generation().drip(Duration::ZERO));
    assert_eq!(post(&engine, PATH, &stream()).await.text, expected[0]);
    assert_eq!(post(&engine, PATH, &completion("hi")).await.text, expected[1]);
    let mut raw = Raw::post(&engine, PATH, &stream()).await;
    raw.until("\r\n1\r\nd\r\n1\r\na\r\n1\r\nt\r\n").await;
}

#[tokio::test]
async fn malformed_json_comes_under_a_good_head() {
    let engine = engine().await;
    engine.set_fault(Fault::generation().malformed());
    let whole = post(&engine, PATH, &completion("hi")).await;
    assert_eq!(whole.status, 200);
    assert!(serde_json::from_str::<Value>(&whole.text).is_err());
    let events = post(&engine, PATH, &stream()).await;
    let first = events.text.split("\n\n").next().unwrap();
    let data = first.strip_prefix("data: ").unwrap();
    assert!(serde_json::from_str::<Value>(data).is_err());
}

#[tokio::test]
async fn a_connection_can_end_without_any_answer() {
    let engine = engine().await;
    engine.set_fault(Fault::generation().close_unanswered().times(1));
    engine.set_fault(Fault::generation().reset_unanswered().times(1));
    let (bytes, end) = Raw::post(&engine, PATH, &stream()).await.end().await;
    assert!(bytes.is_empty() && end.is_ok());
    let (bytes, end) = Raw::post(&engine, PATH, &stream()).await.end().await;
    assert!(bytes.is_empty());
    assert_eq!(end.err().unwrap().kind(), ErrorKind::ConnectionReset);
}

#[tokio::test]
async fn an_idle_connection_is_closed_when_told_to() {
    let engine = vllm(Role::Regular, Connector::None).idle_close(Duration::from_millis(50)).start().await.unwrap();
    let mut raw = Raw::post(&engine, PATH, &completion("hi")).await;
    let (bytes, end) = raw.end().await;
    assert!(end.is_ok());
    assert!(bytes.starts_with(b"HTTP/1.1 200 OK\r\n"));
}

#[tokio::test]
async fn a_stopped_engine_resets_and_refuses_until_it_starts_again() {
    let engine = engine().await;
    engine.set_fault(Fault::generation().hang());
    let mut raw = Raw::post(&engine, PATH, &stream()).await;
    engine.wait_for_generations(1, SOON).await.unwrap();
    engine.stop().await;
    let (_, end) = raw.end().await;
    assert_eq!(end.err().unwrap().kind(), ErrorKind::ConnectionReset);
    let refused = try_post(&engine, PATH, &completion("hi")).await.err().unwrap();
    assert!(refused.is_connect());
    let id = engine.engine_id();
    engine.clear_faults();
    engine.start_again().await.unwrap();
    assert_eq!(engine.engine_id(), id);
    assert_eq!(post(&engine, PATH, &completion("hi")).await.status, 200);
}

#[tokio::test]
async fn an_early_head_turns_a_failure_into_an_event() {
    let decode = sglang(Role::Decode).early_head(true).start().await.unwrap();
    let body = with(stream(), json!({"bootstrap_host": "127.0.0.1", "bootstrap_port": 1, "bootstrap_room": 1}));
    let answer = post(&decode, PATH, &body).await;
    assert_eq!(answer.status, 200);
    assert_eq!(answer.events()[0]["code"], 500);
}

#[tokio::test]
async fn a_key_is_demanded_on_every_path() {
    let engine = vllm(Role::Regular, Connector::None).api_key("k1").start().await.unwrap();
    for path in ["/health", "/v1/models", "/metrics", "/nope"] {
        assert_eq!(get(&engine, path).await.status, 401);
        let with_key = reqwest::Client::new().get(engine.url() + path).bearer_auth("k1");
        assert_ne!(read(with_key).await.unwrap().status, 401);
    }
}

#[tokio::test]
async fn a_path_can_be_overridden() {
    let engine = vllm(Role::Regular, Connector::None)
        .override_path("/version", 404, r#"{"detail":"Not Found"}"#)
        .start()
        .await
        .unwrap();
    engine.clear_faults();
    assert_eq!(get(&engine, "/version").await.status, 404);
}

#[tokio::test]
async fn requests_are_recorded_as_they_were_sent() {
    let engine = engine().await;
    let mut raw = Raw::post(&engine, PATH, &completion("hi")).await;
    raw.until("\"metrics\":null}").await;
    raw.send(PATH, &completion("ho")).await;
    raw.until("\"metrics\":null}").await;
    get(&engine, "/health?a=b").await;
    engine
        .wait_until(SOON, |engine| {
            let requests = engine.requests();
            requests.len() == 3 && requests.iter().all(|seen| seen.finished_at.is_some())
        })
        .await
        .unwrap();
    let requests = engine.requests();
    let first = &requests[0];
    assert_eq!((first.method.as_str(), first.path.as_str()), ("POST", PATH));
    let names: Vec<&str> = first.headers.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names, ["Host", "X-Twice", "x-Other", "X-Twice", "Content-Length"]);
    let twice: Vec<&str> = first.header_values("x-twice").collect();
    assert_eq!(twice, ["a", "c"]);
    assert_eq!(first.body, completion("hi").to_string());
    assert_eq!(first.json(), completion("hi"));
    assert_eq!(first.status, Some(200));
    assert!(first.bytes_sent > 0 && first.peer_closed_at.is_none());
    assert_eq!(first.connection, requests[1].connection);
    assert_ne!(first.connection, requests[2].connection);
    assert_eq!(requests[2].query, "a=b");
    assert_eq!(engine.generations().len(), 2);
}

#[tokio::test]
async fn the_record_is_bounded_and_can_be_off() {
    for (records, kept) in [(3, 3), (0, 0)] {
        let engine = vllm(Role::Regular, Connector::None).records(records).start().await.unwrap();
        for _ in 0..5 {
            post(&engine, PATH, &completion("hi")).await;
        }
        assert_eq!(engine.requests().len(), kept);
        assert_eq!(engine.generation_count(), 5);
    }
}

#[tokio::test]
async fn chunked_and_expected_bodies_are_read() {
    use tokio::io::AsyncWriteExt;
    let engine = engine().await;
    let body = completion("hi").to_string();
    let mut raw = Raw::connect(&engine).await;
    let head = format!("POST {PATH} HTTP/1.1\r\nTransfer-Encoding: chunked\r\nExpect: 100-continue\r\n\r\n");
    raw.0.write_all(head.as_bytes()).await.unwrap();
    raw.until("HTTP/1.1 100 Continue\r\n\r\n").await;
    let (front, back) = body.split_at(5);
    let chunks = format!("{:x}\r\n{front}\r\n{:x}\r\n{back}\r\n0\r\n\r\n", front.len(), back.len());
    raw.0.write_all(chunks.as_bytes()).await.unwrap();
    raw.until("HTTP/1.1 200 OK").await;
    assert_eq!(engine.requests()[0].body, body);
}

#[tokio::test]
async fn the_running_batch_is_limited_and_its_peak_is_known() {
    let engine = vllm(Role::Regular, Connector::None)
        .max_running(2)
        .prefill_delay(Duration::from_millis(30))
        .start()
        .await
        .unwrap();
    let body = completion("hi");
    let requests = (0..6).map(|_| post(&engine, PATH, &body));
    let answers = futures::future::join_all(requests).await;
    assert!(answers.iter().all(|answer| answer.status == 200));
    engine.wait_until(SOON, |engine| engine.active() == 0 && engine.running() == 0).await.unwrap();
    assert_eq!(engine.peak_running(), 2);
    assert!(engine.peak_active() > 2);
}

#[tokio::test]
async fn tokens_are_paced() {
    let engine = vllm(Role::Regular, Connector::None).token_delay(Duration::from_millis(20)).start().await.unwrap();
    for body in [completion("hi"), stream()] {
        let start = Instant::now();
        post(&engine, PATH, &body).await;
        assert!(start.elapsed() >= Duration::from_millis(7 * 20));
    }
}

#[tokio::test]
async fn a_client_that_stops_reading_stops_the_stream() {
    let engine = vllm(Role::Regular, Connector::None).max_model_len(10_000_000).start().await.unwrap();
    let body = with(stream(), json!({"max_tokens": 1_000_000}));
    let mut raw = Raw::post(&engine, PATH, &body).await;
    raw.until("data: ").await;
    // The socket's buffers fill, then nothing moves any more.
    let sent = || engine.requests()[0].bytes_sent;
    let mut last = 0;
    while sent() != last {
        last = sent();
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    assert!(last < 64 * 1024 * 1024, "{last} bytes");
    assert_eq!(engine.active(), 1);
}
