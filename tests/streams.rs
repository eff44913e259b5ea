//! Streams pass through byte for byte, at once, under back-pressure, and a broken one is recognisable as broken.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod support;

use std::time::{Duration, Instant};

use bytes::Bytes;
use futures::StreamExt;
use futures::future::join_all;
use serde_json::{Value, json};
use support::*;

const DONE: &str = "data: [DONE]\n\n";

fn event(text: &str) -> String {
    format!("data: {}\n\n", json!({"choices": [{"index": 0, "delta": {"content": text}}]}))
}

/// The payloads of a stream's events, comments left out.
fn payloads(stream: &str) -> Vec<&str> {
    stream.lines().filter_map(|line| line.strip_prefix("data: ")).collect()
}

fn has_error(stream: &str) -> bool {
    payloads(stream)
        .into_iter()
        .filter_map(|payload| serde_json::from_str::<Value>(payload).ok())
        .any(|payload| payload["error"].is_object())
}

/// What arrived of a body, and whether it was broken off.
async fn read(response: reqwest::Response) -> (String, bool) {
    let mut stream = response.bytes_stream();
    let mut body = Vec::new();
    while let Some(chunk) = stream.next().await {
        match chunk {
            Ok(chunk) => body.extend_from_slice(&chunk),
            Err(_) => return (String::from_utf8(body).unwrap(), true),
        }
    }
    (String::from_utf8(body).unwrap(), false)
}

#[tokio::test]
async fn characters_that_are_cut_between_writes_arrive_whole() {
    let stream = "data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"你好🙂\"}}]}\n\ndata: [DONE]\n\n";
    join_all(DISPATCHES.map(|dispatch| async move {
        let serving = Serving::scripted(dispatch, &[]).await;
        let pieces = stream.bytes().map(|byte| (Duration::from_millis(1), Bytes::copy_from_slice(&[byte])));
        let pieces: Vec<_> = pieces.collect();
        serving.output.set_fault(Fault::generation().script(pieces.clone()));
        serving.output.set_fault(Fault::path("/v1/messages").script(pieces));
        if let Some(prefill) = &serving.prefill {
            prefill.set_fault(Fault::path("/v1/messages").status(200, "{}"));
        }
        for (path, body) in requests().into_iter().chain([("/v1/messages", chat())]) {
            let response = serving.smg.post(path, &streamed(body)).await;
            assert_eq!(response.bytes().await.unwrap(), stream, "{dispatch:?} {path}");
        }
        serving.smg.until_idle().await;
    }))
    .await;
}

#[tokio::test]
async fn comments_are_neither_output_nor_errors() {
    let pause = Duration::from_secs(1);
    let (first, second) = (event("a"), event("b"));
    let pieces = [(Duration::ZERO, ": ping\n\n"), (pause, ": ping\n\n"), (pause, ": ping\n\n")];
    let pieces: Vec<_> = pieces.into_iter().chain([(Duration::ZERO, &*first), (Duration::ZERO, &second)]).collect();
    join_all([Dispatch::Parallel, Dispatch::Sequential].map(|dispatch| {
        let pieces: Vec<_> = pieces.iter().map(|(pause, piece)| (*pause, (*piece).to_owned())).collect();
        let (first, second) = (first.clone(), second.clone());
        async move {
            let serving = Serving::scripted(dispatch, &[]).await;
            let script = pieces.into_iter().chain([(Duration::ZERO, DONE.to_owned())]);
            serving.output.set_fault(Fault::generation().script(script));
            let response = serving.smg.post("/v1/chat/completions", &chat_stream()).await;
            assert_eq!(response.status(), 200);
            let stream = response.text().await.unwrap();
            let expected = format!(": ping\n\n: ping\n\n: ping\n\n{first}{second}{DONE}");
            assert_eq!(stream, expected, "{dispatch:?}");
            let first_output = serving.smg.metric("smg_pd_ttft_seconds_sum", &[]).await;
            assert!(first_output >= 1.95, "a comment counted as output: {first_output}");
        }
    }))
    .await;
}

#[tokio::test]
async fn a_usage_event_leaves_its_neighbours_as_they_are() {
    let serving = Serving::scripted(Dispatch::Sequential, &[]).await;
    let finish = "data: {\"choices\":[{\"index\":0,\"delta\":{},\"finish_reason\":\"stop\"}]}\n\n";
    let usage = "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":1,\"completion_tokens\":1,\"total_tokens\":2}}\n\n";
    let stream = format!("{}{finish}{usage}{DONE}", event("a"));
    serving.output.set_fault(Fault::generation().script(at_once([&*stream])));
    let mut body = chat_stream();
    body["stream_options"] = json!({"include_usage": true});
    let received = serving.smg.post("/v1/chat/completions", &body).await.text().await.unwrap();
    assert_eq!(received, stream);
    let prefill = serving.prefill.as_ref().unwrap().generations().remove(0).json();
    assert_eq!(prefill.get("stream_options"), None);
    assert_eq!(serving.output.generations()[0].json()["stream_options"], json!({"include_usage": true}));
}

#[tokio::test]
async fn a_stream_that_breaks_is_recognisable_and_charged_to_the_engine_that_broke_it() {
    join_all(DISPATCHES.map(|dispatch| async move {
        let serving = Serving::scripted(dispatch, &[]).await;
        let mut all_idle = Vec::new();
        // The reset comes after a pause: a reset discards what the peer has not read yet.
        let pieces = [(Duration::ZERO, event("a")), (Duration::ZERO, event("b"))];
        let pieces = pieces.into_iter().chain([(Duration::from_millis(300), ": last\n\n".to_owned())]);
        let fault = Fault::generation().script(pieces.collect::<Vec<_>>());
        for (number, fault) in
            [fault.clone().reset_after_events(3), fault.close_after_events(3)].into_iter().enumerate()
        {
            serving.output.clear_faults();
            serving.output.set_fault(fault);
            for (route, (path, body)) in requests().into_iter().enumerate() {
                let response = serving.smg.post(path, &streamed(body)).await;
                assert_eq!(response.status(), 200);
                let (stream, broken) = read(response).await;
                assert!(stream.starts_with(&format!("{}{}", event("a"), event("b"))), "{dispatch:?} {path}: {stream}");
                assert!(broken || has_error(&stream), "{dispatch:?} {path}: it looks complete: {stream}");
                let broke = Instant::now();
                serving.smg.until_idle().await;
                all_idle.push(broke.elapsed());
                let broken_so_far = number * 3 + route + 1;
                assert_eq!(serving.output.generation_count(), broken_so_far as u64, "nothing is tried again");
                assert_eq!(serving.failures(&serving.output).await, broken_so_far as f64);
                if let Some(prefill) = &serving.prefill {
                    assert_eq!(serving.failures(prefill).await, 0.0, "{dispatch:?}");
                }
            }
        }
        assert!(usual(all_idle) < Duration::from_secs(1), "{dispatch:?}: nothing counts as active any more");
    }))
    .await;
}

#[tokio::test]
async fn an_answer_that_breaks_is_broken_off_and_not_completed() {
    join_all(DISPATCHES.map(|dispatch| async move {
        let serving = Serving::scripted(dispatch, &[]).await;
        let answer = json!({"choices": ["a long enough answer"]}).to_string();
        serving.output.set_fault(Fault::generation().status(200, answer.clone()).close_after_bytes(9));
        for (path, body) in requests() {
            let response = serving.smg.post(path, &body).await;
            assert_eq!(response.content_length(), Some(answer.len() as u64));
            let (received, broken) = read(response).await;
            assert!(broken && answer.starts_with(&received), "{dispatch:?} {path}: {received}");
        }
        serving.smg.until_idle().await;
        assert_eq!(serving.failures(&serving.output).await, 3.0);
    }))
    .await;
}

#[tokio::test]
async fn an_answer_that_breaks_before_its_first_byte_is_an_error_with_a_code() {
    join_all(DISPATCHES.map(|dispatch| async move {
        let serving = Serving::scripted(dispatch, &["--disable-retries", "--cb-failure-threshold", "100"]).await;
        let code = if dispatch == Dispatch::Regular { "worker_read_failed" } else { "decode_read_failed" };
        let whole = Fault::generation().status(200, r#"{"choices":[]}"#);
        // Head and end at once, and the end after a while.
        let late = whole.clone().delay_body(Duration::from_millis(150));
        let faults = [whole.clone().close_after_bytes(0), late.clone().close_after_bytes(0), late.reset_after_bytes(0)];
        let mut failed = 0.0;
        for fault in faults {
            serving.output.clear_faults();
            serving.output.set_fault(fault);
            for (path, body) in requests() {
                let response = serving.smg.post(path, &body).await;
                assert_eq!(response.status(), 502, "{dispatch:?} {path}");
                assert_eq!(response.headers()["x-smg-error-code"], code, "{dispatch:?} {path}");
                let error: Value = response.json().await.unwrap();
                assert_eq!((&error["error"]["code"], &error["error"]["type"]), (&json!(code), &json!("server_error")));
                failed += 1.0;
                serving.smg.until_idle().await;
                assert_eq!(serving.failures(&serving.output).await, failed, "{dispatch:?} {path}");
            }
        }
        if let Some(prefill) = &serving.prefill {
            assert_eq!(serving.failures(prefill).await, 0.0);
        }
        // Nothing has reached the client, so another attempt may still serve it.
        let retry = json!({"max_retries": 2, "initial_backoff_ms": 1});
        let document = json!({"retry": retry, "circuit_breaker": {"failure_threshold": 100}});
        serving.smg.set_policy("default", &document).await;
        serving.output.clear_faults();
        serving.output.set_fault(whole.clone().close_after_bytes(0).times(1));
        serving.output.set_fault(whole);
        assert_eq!(serving.smg.post("/v1/completions", &completion()).await.text().await.unwrap(), r#"{"choices":[]}"#);
        // An engine's error keeps its status even when its words are lost.
        serving.output.clear_faults();
        serving.output.set_fault(Fault::generation().status(422, "lost").close_after_bytes(0));
        let response = serving.smg.post("/v1/completions", &completion()).await;
        assert_eq!(response.status(), 422, "{dispatch:?}");
        assert!(response.json::<Value>().await.unwrap()["error"]["message"].as_str().unwrap().contains("422"));
    }))
    .await;
}

#[tokio::test]
async fn the_end_marker_arrives_exactly_as_often_as_the_engine_sent_it() {
    join_all(DISPATCHES.map(|dispatch| async move {
        let serving = Serving::scripted(dispatch, &[]).await;
        for end in [DONE, ""] {
            let stream = format!("{}{end}", event("a"));
            serving.output.clear_faults();
            serving.output.set_fault(Fault::generation().script(at_once([&*stream])));
            let mut all_late = Vec::new();
            for (path, body) in requests() {
                let received = read(serving.smg.post(path, &streamed(body)).await).await;
                let ended = Instant::now();
                assert_eq!(received, (stream.clone(), false), "{dispatch:?} {path}");
                let done = |engine: &MockEngine| engine.generations().last().unwrap().finished_at.is_some();
                serving.output.wait_until(PATIENCE, done).await.unwrap();
                let engine_ended = serving.output.generations().pop().unwrap().finished_at.unwrap();
                all_late.push(ended.saturating_duration_since(engine_ended));
            }
            assert!(best(all_late) < Duration::from_millis(200), "{dispatch:?}: a stream ends with its engine's");
        }
        serving.smg.until_idle().await;
        assert_eq!(serving.failures(&serving.output).await, 0.0);
    }))
    .await;
}

#[tokio::test]
async fn a_stream_ends_after_its_end_marker_though_the_engine_keeps_the_connection() {
    let all_took = join_all(DISPATCHES.map(|dispatch| async move {
        let serving = Serving::scripted(dispatch, &[]).await;
        let stream = format!("{}{DONE}", event("a"));
        serving.output.set_fault(Fault::generation().script(at_once([&*stream])).stall_at_end());
        let response = serving.smg.post("/v1/chat/completions", &chat_stream()).await;
        let begun = Instant::now();
        assert_eq!(read(response).await, (stream, false), "{dispatch:?}");
        serving.smg.until_idle().await;
        let took = begun.elapsed();
        assert_eq!(serving.failures(&serving.output).await, 0.0);
        let closed = |engine: &MockEngine| engine.generations()[0].peer_closed_at.is_some();
        serving.output.wait_until(PATIENCE, closed).await.unwrap();
        took
    }))
    .await;
    // A second after its end marker the relay ends a stream; the rest is what polling takes.
    assert!(best(all_took.clone()) < Duration::from_millis(1500), "{all_took:?}");
}

#[tokio::test]
async fn an_event_reaches_the_client_before_the_engine_writes_the_next() {
    join_all(DISPATCHES.map(|dispatch| async move {
        let serving = Serving::scripted(dispatch, &[]).await;
        let gap = Duration::from_secs(3);
        let first = "data: {\"choices\":[{\"delta\":\"abcdef\"}]}\n\n".to_owned();
        assert_eq!(first.len(), 40);
        let pieces = [(Duration::ZERO, first.clone()), (gap, event("b")), (Duration::ZERO, DONE.to_owned())];
        serving.output.set_fault(Fault::generation().script(pieces));
        let held_back = join_all(requests().map(async |(path, body)| {
            let response = serving.smg.post(path, &streamed(body)).await;
            assert_eq!(response.headers().get("content-length"), None);
            let kind = response.headers()["content-type"].to_str().unwrap();
            assert!(kind.starts_with("text/event-stream"), "{kind}");
            let mut stream = response.bytes_stream();
            assert_eq!(stream.next().await.unwrap().unwrap(), first, "{dispatch:?} {path}");
            let seen = Instant::now();
            stream.next().await.unwrap().unwrap();
            let held_back = gap.saturating_sub(seen.elapsed());
            assert!(held_back < gap / 2, "{dispatch:?} {path}: the first event was held back for {held_back:?}");
            held_back
        }))
        .await;
        // One event may be late on a busy machine; a buffer would hold back all of them.
        assert!(best(held_back.clone()) < Duration::from_millis(200), "{dispatch:?}: {held_back:?}");
    }))
    .await;
}

#[tokio::test]
async fn nothing_is_tried_again_once_output_has_been_sent() {
    let prefill = sglang(Role::Prefill).await;
    prefill.set_fault(instant_prefill());
    let decodes = [sglang(Role::Decode).await, sglang(Role::Decode).await];
    let smg = Smg::launch(&["--retry-max-retries", "3", "--retry-initial-backoff-ms", "1"]).await;
    smg.register(&spec(&prefill, "prefill")).await;
    for decode in &decodes {
        let pieces = [(Duration::ZERO, event("once")), (Duration::from_millis(50), ": last\n\n".to_owned())];
        decode.set_fault(Fault::generation().script(pieces).close_after_events(2));
        smg.register(&spec(decode, "decode")).await;
    }
    let (stream, broken) = read(smg.post("/v1/chat/completions", &chat_stream()).await).await;
    assert_eq!(stream.matches("once").count(), 1, "{stream}");
    assert!(broken || has_error(&stream), "{stream}");
    assert_eq!(decodes[0].generation_count() + decodes[1].generation_count(), 1);
    assert_eq!(prefill.generation_count(), 1);
    smg.until_idle().await;
}

#[tokio::test]
async fn a_client_that_stops_reading_stops_the_engine_and_costs_no_memory() {
    const PIECE: usize = 16 * 1024;
    const PIECES: usize = 200 * 1024 * 1024 / PIECE;
    let serving = Serving::scripted(Dispatch::Parallel, &[]).await;
    // Each piece differs from all others: sixteen events of its number.
    let piece = |number: usize| Bytes::from(format!("data: {number:01016}\n\n").repeat(PIECE / 1024));
    serving.output.set_fault(Fault::generation().script(at_once([&*event("warm"), DONE])).times(1));
    serving.smg.post("/v1/chat/completions", &chat_stream()).await.bytes().await.unwrap();
    serving.output.set_fault(Fault::generation().script((0..PIECES).map(|number| (Duration::ZERO, piece(number)))));
    let before = serving.smg.resident_bytes();

    let response = serving.smg.post("/v1/chat/completions", &chat_stream()).await;
    let mut stream = response.bytes_stream();
    let mut pending = stream.next().await.unwrap().unwrap().to_vec();
    let (mut sent, mut unchanged) = (0, 0);
    // Half a second; in the long variant as long as a client may well pause.
    let pause = if soaks() { 2000 } else { 50 };
    eventually_within(3 * PATIENCE, "the engine stands still", || {
        let now = serving.output.generations()[1].bytes_sent;
        unchanged = if now == sent { unchanged + 1 } else { 0 };
        sent = now;
        let still = (unchanged == pause).then_some(());
        async move { still }
    })
    .await;
    assert!(sent < (PIECES * PIECE / 4) as u64, "the engine was let run on: {sent} bytes");
    let grown = serving.smg.resident_bytes().saturating_sub(before);
    assert!(grown < 8 * 1024 * 1024, "the gateway stored {grown} bytes");

    let mut number = 0;
    loop {
        let size = piece(number).len();
        while pending.len() >= size {
            assert!(pending[..size] == piece(number)[..], "piece {number} is damaged or out of order");
            pending.drain(..size);
            number += 1;
        }
        match stream.next().await {
            Some(chunk) => pending.extend_from_slice(&chunk.unwrap()),
            None => break,
        }
    }
    assert_eq!((number, pending.len()), (PIECES, 0));
    let grown = serving.smg.resident_bytes().saturating_sub(before);
    assert!(grown < 8 * 1024 * 1024, "the gateway stored {grown} bytes");
}
