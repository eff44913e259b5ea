//! What the failure of one leg means for the other: before the response nobody waits for a lost request any more; after it the client
//! gets all that decode produces, and the failure is still known.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod support;

use std::time::{Duration, Instant};

use reqwest::Response;
use serde_json::{Value, json};
use support::*;

const CHAT: &str = "/v1/chat/completions";
const EVENT: &str = "data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"a\"}}]}\n\n";
const DONE: &str = "data: [DONE]\n\n";
/// How soon an engine must see that nobody waits for its leg.
const PROMPT: Duration = Duration::from_secs(3);
/// Long enough for the response heads to have been read.
const A_WHILE: Duration = Duration::from_millis(150);

async fn assert_failures(serving: &Serving, expected: [f64; 2]) {
    serving.smg.until_idle().await;
    eventually(&format!("failures of prefill and decode are {expected:?}"), || async {
        let prefill = serving.failures(serving.prefill.as_ref().unwrap()).await;
        ([prefill, serving.failures(&serving.output).await] == expected).then_some(())
    })
    .await;
}

/// What the decision record says went wrong in the only attempt of a request.
async fn noted_error(smg: &Smg, request_id: &str) -> (Value, String) {
    let decision = smg.decision(request_id).await;
    assert_eq!(decision["attempts"].as_array().unwrap().len(), 1, "{decision}");
    let error = decision["attempts"][0]["error"].as_str().unwrap_or_default().to_owned();
    (decision, error)
}

#[tokio::test]
async fn a_prefill_that_breaks_off_after_its_head_is_charged_and_noted_and_harms_no_client() {
    let serving = Serving::start(Dispatch::Parallel, &["--cb-failure-threshold", "100"]).await;
    let prefill = serving.prefill.as_ref().unwrap();
    let whole = Fault::generation().delay_body(A_WHILE);
    let mut failed = 0.0;
    for body in [chat(), chat_stream()] {
        prefill.clear_faults();
        let unharmed = serving.smg.post_as("r", CHAT, &body).await.bytes().await.unwrap();
        for fault in [whole.clone().close_after_bytes(5), whole.clone().reset_after_bytes(5)] {
            prefill.clear_faults();
            prefill.set_fault(fault);
            let response = serving.smg.post_as("r", CHAT, &body).await;
            assert_eq!(response.status(), 200);
            assert_eq!(response.bytes().await.unwrap(), unharmed);
            failed += 1.0;
            assert_failures(&serving, [failed, 0.0]).await;
            let (decision, error) = noted_error(&serving.smg, "r").await;
            assert!(error.starts_with("prefill: "), "{decision}");
            assert_eq!((&decision["outcome"], &decision["status"]), (&json!("completed"), &json!(200)));
        }
    }
    let errors = [("worker_type", "prefill"), ("error_type", "backend_error")];
    assert_eq!(serving.smg.metric("smg_worker_errors_total", &errors).await, failed);
}

#[tokio::test]
async fn a_stream_goes_on_when_its_prefill_breaks_off_in_the_middle() {
    let serving = Serving::start(Dispatch::Parallel, &[]).await;
    let prefill = serving.prefill.as_ref().unwrap();
    prefill.set_fault(Fault::generation().status(200, r#"{"late":true}"#).delay_body(A_WHILE).close_after_bytes(3));
    let events = (0..12).map(|_| (Duration::from_millis(50), EVENT)).chain([(Duration::ZERO, DONE)]);
    serving.output.set_fault(Fault::generation().script(events));
    let text = serving.smg.post_as("r", CHAT, &chat_stream()).await.text().await.unwrap();
    assert_eq!(text, EVENT.repeat(12) + DONE);
    assert_failures(&serving, [1.0, 0.0]).await;
    let end = |engine: &MockEngine| engine.generations()[0].finished_at.unwrap();
    assert!(end(prefill) < end(&serving.output), "the prefill was to break off first");
}

#[tokio::test]
async fn a_stream_begins_and_ends_with_its_decode_while_the_prefills_body_goes_on() {
    let serving = Serving::start(Dispatch::Parallel, &["--disable-retries"]).await;
    let prefill = serving.prefill.as_ref().unwrap();
    // A prefill that keeps its connection busy with blanks for 3 s, and a decode that is done in 600 ms; in the long variant 20 s and 2 s.
    let (pause, pauses, output) = if soaks() { (1000, 20, 2000) } else { (200, 15, 600) };
    let [pause, output] = [pause, output].map(Duration::from_millis);
    let blanks = |text: &'static str| {
        let pieces = (0..pauses).map(|_| (pause, " ")).chain([(Duration::ZERO, text)]);
        let fault = Fault::generation().script(pieces.collect::<Vec<_>>());
        fault.header("content-type", "application/json")
    };
    prefill.set_fault(blanks("{}"));
    let events = [(Duration::ZERO, EVENT), (output, EVENT), (Duration::ZERO, DONE)];
    serving.output.set_fault(Fault::generation().script(events));
    let mut response = serving.smg.post(CHAT, &chat_stream()).await;
    assert_eq!(response.chunk().await.unwrap().unwrap(), EVENT);
    let begun = Instant::now();
    let mut rest = Vec::new();
    while let Some(chunk) = response.chunk().await.unwrap() {
        rest.extend_from_slice(&chunk);
    }
    assert_eq!(rest, format!("{EVENT}{DONE}").as_bytes());
    assert!(begun.elapsed() > output - Duration::from_millis(200), "the first event was held back");
    assert_eq!(prefill.active(), 1, "the stream ended with its decode");
    let outcomes = [("worker", &*prefill.url())];
    assert_eq!(serving.smg.metric("smg_worker_cb_outcomes_total", &outcomes).await, 0.0, "it is not over");
    let ended = |engine: &MockEngine| engine.generations()[0].finished_at.is_some();
    prefill.wait_until(2 * PATIENCE, ended).await.unwrap();
    assert_eq!(prefill.generations()[0].peer_closed_at, None, "its body is read to the end");
    serving.smg.until_idle().await;
    let succeeded = [outcomes[0], ("outcome", "success")];
    assert_eq!(serving.smg.metric("smg_worker_cb_outcomes_total", &outcomes).await, 1.0);
    assert_eq!(serving.smg.metric("smg_worker_cb_outcomes_total", &succeeded).await, 1.0);

    // With log probabilities the answer waits for the prefill's.
    prefill.clear_faults();
    prefill.set_fault(blanks(r#"{"meta_info":{"input_token_logprobs":[[-1.0,1,null]]}}"#));
    serving.output.clear_faults();
    serving.output.set_fault(Fault::generation().status(200, r#"{"meta_info":{"input_token_logprobs":[]}}"#));
    let asked = Instant::now();
    let answer = serving.smg.post("/generate", &json!({"text": "hi", "return_logprob": true})).await;
    assert_eq!(answer.text().await.unwrap(), r#"{"meta_info":{"input_token_logprobs":[[-1.0,1,null]]}}"#);
    assert!(asked.elapsed() > (pauses - 1) * pause);
}

#[tokio::test]
async fn a_decision_record_names_what_broke_on_both_legs() {
    let serving = Serving::start(Dispatch::Parallel, &[]).await;
    let prefill = serving.prefill.as_ref().unwrap();
    for (prefill_breaks, decode_breaks) in [(1, 3), (3, 1)] {
        serving.engines().for_each(MockEngine::clear_faults);
        let broken = Fault::generation().status(200, r#"{"late":true}"#).close_after_bytes(3);
        prefill.set_fault(broken.delay_body(prefill_breaks * A_WHILE));
        let late = [(Duration::ZERO, EVENT), (decode_breaks * A_WHILE, EVENT)];
        serving.output.set_fault(Fault::generation().script(late).reset_after_events(2));
        let id = format!("{prefill_breaks}");
        let text = serving.smg.post_as(&id, CHAT, &chat_stream()).await.text().await.unwrap();
        assert!(text.contains("stream_error"), "{text}");
        serving.smg.until_idle().await;
        let (decision, error) = noted_error(&serving.smg, &id).await;
        assert!(error.contains("prefill: ") && error.contains("Stream error: "), "{decision}");
        assert_eq!((&decision["outcome"], &decision["status"]), (&json!("failed"), &json!(502)));
    }
    assert_failures(&serving, [2.0, 2.0]).await;
}

/// Checks that the transport error of a leg is answered as such.
async fn assert_lost(response: Response, leg: &str) {
    let code = format!("{leg}_request_failed");
    assert_eq!(response.status(), 502);
    assert_eq!(response.headers()["x-smg-error-code"], code);
    let kind = response.headers()["content-type"].to_str().unwrap().to_owned();
    assert!(kind.starts_with("application/json"), "{kind}");
    let body: Value = response.json().await.unwrap();
    assert_eq!((&body["error"]["code"], &body["error"]["type"]), (&json!(code), &json!("server_error")));
}

/// Checks that `engine` has seen each of its legs closed, the last of them soon after `failure`.
async fn assert_closed(engine: &MockEngine, failure: Instant) {
    let closed = |engine: &MockEngine| {
        engine.active() == 0 && engine.generations().iter().all(|leg| leg.peer_closed_at.is_some())
    };
    assert!(engine.wait_until(PATIENCE, closed).await.is_ok(), "{:?}", engine.generations());
    for leg in engine.generations() {
        let noticed = leg.peer_closed_at.unwrap().saturating_duration_since(failure);
        assert!(noticed <= PROMPT, "after {noticed:?}");
    }
}

/// The pair as (name of the failing leg, failing engine, silent engine), both ways round.
fn both_ways(serving: &Serving) -> [(&'static str, &MockEngine, &MockEngine); 2] {
    let (prefill, decode) = (serving.prefill.as_ref().unwrap(), &serving.output);
    [("prefill", prefill, decode), ("decode", decode, prefill)]
}

async fn lossy_pair() -> Serving {
    let flags = ["--disable-retries", "--cb-failure-threshold", "100", "--disable-health-check"];
    Serving::start(Dispatch::Parallel, &flags).await
}

#[tokio::test]
async fn a_leg_that_is_cut_before_its_head_closes_the_silent_one() {
    let serving = lossy_pair().await;
    for (leg, failing, silent) in both_ways(&serving) {
        silent.clear_faults();
        silent.clear_requests();
        silent.set_fault(Fault::generation().hang());
        let late = Fault::generation().delay_head(A_WHILE);
        for fault in [late.clone().reset_unanswered(), late.close_unanswered()] {
            failing.clear_faults();
            failing.set_fault(fault);
            for body in [chat(), chat_stream()] {
                assert_lost(serving.smg.post(CHAT, &body).await, leg).await;
                let answered = Instant::now();
                assert_closed(silent, answered).await;
                serving.smg.until_idle().await;
            }
        }
    }
    assert_failures(&serving, [4.0, 4.0]).await;
}

#[tokio::test]
async fn an_engine_that_stops_closes_the_silent_leg_beside_it() {
    let serving = lossy_pair().await;
    for (leg, failing, silent) in both_ways(&serving) {
        for body in [chat(), chat_stream()] {
            serving.engines().for_each(|engine| {
                engine.clear_requests();
                engine.set_fault(Fault::generation().hang());
            });
            let counts = [failing, silent].map(MockEngine::generation_count);
            let request = serving.smg.client.post(format!("{}{CHAT}", serving.smg.url)).json(&body);
            let answer = tokio::spawn(request.send());
            for (engine, count) in [failing, silent].into_iter().zip(counts) {
                engine.wait_for_generations(count + 1, PATIENCE).await.unwrap();
            }
            // It dies of its request.
            failing.stop().await;
            let stopped = Instant::now();
            assert_lost(answer.await.unwrap().unwrap(), leg).await;
            assert_closed(silent, stopped).await;
            // It is down: the next connection is refused.
            assert_lost(serving.smg.post(CHAT, &body).await, leg).await;
            let refused = Instant::now();
            assert_closed(silent, refused).await;
            serving.smg.until_idle().await;

            failing.start_again().await.unwrap();
            eventually("it is back", || async {
                let workers = serving.smg.get_json("/workers").await;
                workers["workers"].as_array().unwrap().iter().all(|worker| worker["is_healthy"] == true).then_some(())
            })
            .await;
        }
    }
    assert_failures(&serving, [4.0, 4.0]).await;
}
