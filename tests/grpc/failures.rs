//! What engines do wrong, and what becomes of the request, its other leg and the next request.

use super::*;

#[tokio::test]
async fn a_sample_that_does_not_start_fails_the_request_and_aborts_the_others() {
    let pair = Pair::of(Engine::Sglang, &["--disable-retries"]).await;
    pair.prefill.set_call_fault(CallFault::generate().refuse(Code::ResourceExhausted, "full").times(1));
    pair.prefill.set_call_fault(CallFault::generate().hang());
    let mut body = chat();
    body["n"] = json!(4);
    let response = pair.smg.post(CHAT, &body).await;
    assert_eq!(response.status(), StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(response.headers()["x-smg-error-code"], "prefill_worker_failed_to_start");
    eventually("no prefill is left", || async { pair.prefill.open_requests().is_empty().then_some(()) }).await;
}

#[tokio::test]
async fn a_leg_that_an_engine_refuses_answers_with_its_status_and_words() {
    let flags = ["--disable-retries", "--disable-circuit-breaker"];
    let statuses = [
        (Code::InvalidArgument, 400),
        (Code::NotFound, 404),
        (Code::ResourceExhausted, 429),
        (Code::Internal, 500),
        (Code::Unavailable, 503),
        (Code::DeadlineExceeded, 504),
    ];
    for engine in PAIRS {
        let pair = Pair::of(engine, &flags).await;
        let legs = [
            (&pair.prefill, "Prefill", "prefill_worker_failed_to_start"),
            (&pair.decode, "Decode", "decode_worker_failed_to_start"),
        ];
        for (leg, name, error) in legs {
            for (code, status) in statuses {
                for body in [chat(), chat_stream()] {
                    leg.set_call_fault(CallFault::generate().refuse(code, "because").times(1));
                    let response = pair.smg.post(CHAT, &body).await;
                    assert_eq!(response.status().as_u16(), status, "{engine:?} {name} {code:?}");
                    assert_eq!(response.headers()["x-smg-error-code"], error);
                    let answer: Value = response.json().await.unwrap();
                    assert_eq!(answer["error"]["message"], format!("{name} worker failed to start: because"));
                }
            }
        }
        pair.is_clean().await;
    }
}

#[tokio::test]
async fn a_prefill_that_breaks_off_after_its_first_reply_says_so_and_its_decode_is_not_aborted_at_once() {
    for engine in [Engine::Sglang, Engine::Tokenspeed] {
        let decode = builder(engine, Role::Decode).token_delay(Duration::from_millis(20)).start().await.unwrap();
        let smg = Smg::launch(&["--disable-retries"]).await;
        let pair = Pair::behind(smg, grpc(engine, Role::Prefill).await, decode).await;
        pair.decode.set_max_running(Some(1));
        let mut long = chat_stream();
        long["max_tokens"] = json!(100_000);
        let mut held = pair.smg.post(CHAT, &long).await.bytes_stream();
        held.next().await.unwrap().unwrap();
        // The decode takes the KV over and says nothing yet: its engine has no place for it.
        pair.prefill.set_call_fault(CallFault::generate().fail_after(1, Code::Internal, "late").times(1));
        assert_refused(&pair.smg, CHAT, &chat_stream(), 500, "prefill_stream_error").await;
        assert_eq!(pair.smg.metric("smg_grpc_legs", &[("leg", "decode")]).await, 2.0, "{engine:?}");
        assert!(pair.decode.aborts().is_empty(), "{engine:?}");
        drop(held);
        pair.is_clean().await;
        let call = pair.decode.calls()[1].clone();
        assert_eq!(call.end, Some(CallEnd::Aborted), "{engine:?}");
        let abort = pair.decode.aborts().into_iter().find(|abort| abort.request_id == call.request_id()).unwrap();
        assert!(abort.at >= call.first_message_at.unwrap(), "{engine:?}");
    }
}

#[tokio::test]
async fn a_failed_prefill_is_charged_to_the_prefill_alone() {
    for engine in PAIRS {
        let pair = Pair::of(engine, &["--disable-retries"]).await;
        pair.prefill.set_call_fault(CallFault::generate().refuse(Code::Unavailable, "no"));
        for _ in 0..3 {
            assert_eq!(pair.smg.post(CHAT, &chat()).await.status(), StatusCode::SERVICE_UNAVAILABLE);
        }
        pair.is_clean().await;
        let failures = async |worker: &MockEngine| {
            let labels =
                [("worker", &*worker.url()), ("outcome", "failure")].map(|(name, value)| (name, value.to_owned()));
            let labels: Vec<(&str, &str)> = labels.iter().map(|(name, value)| (*name, value.as_str())).collect();
            pair.smg.metric("smg_worker_cb_outcomes_total", &labels).await
        };
        assert_eq!((failures(&pair.prefill).await, failures(&pair.decode).await), (3.0, 0.0), "{engine:?}");
        if engine == Engine::Vllm {
            assert!(pair.decode.calls().is_empty(), "a failed prefill never reaches the decode");
        }
    }
}

#[tokio::test]
async fn what_an_engine_sends_that_makes_no_sense_fails_its_request_alone() {
    for engine in PAIRS {
        let pair = Pair::of(engine, &["--disable-retries", "--disable-circuit-breaker"]).await;
        let faults: [(&str, CallFault); 6] = [
            ("garbage", CallFault::generate().garbage(&[0xff; 40])),
            ("wrong sample", CallFault::generate().wrong_sample()),
            ("empty message", CallFault::generate().empty_message()),
            ("cut", CallFault::generate().cut_after(0)),
            ("too early an end", CallFault::generate().end_after(0)),
            ("too large", CallFault::generate().too_large(65 << 20)),
        ];
        for (what, fault) in faults {
            pair.decode.set_call_fault(fault.times(1));
            let response = pair.smg.post(CHAT, &chat_stream()).await;
            assert!(response.status().is_server_error(), "{engine:?} {what}: {}", response.status());
            eventually("the next request is served", || async {
                (pair.smg.post(CHAT, &chat()).await.status() == StatusCode::OK).then_some(())
            })
            .await;
        }
        pair.is_clean().await;
    }
}

#[tokio::test]
async fn a_stream_that_breaks_says_so_and_is_not_begun_again() {
    for engine in PAIRS {
        let pair = Pair::of(engine, &[]).await;
        pair.decode.set_call_fault(CallFault::generate().fail_after(2, Code::Internal, "the scheduler died").times(1));
        let text = pair.smg.post(CHAT, &chat_stream()).await.text().await.unwrap();
        assert!(text.contains("the scheduler died") && text.contains("stream_error"), "{engine:?} {text}");
        assert!(text.ends_with("data: [DONE]\n\n"), "{text}");
        assert_eq!(pair.decode.calls().len(), 1);
        pair.is_clean().await;
    }
}

#[tokio::test]
async fn an_attempt_that_failed_is_made_again_with_other_ids_and_rooms() {
    for engine in PAIRS {
        let pair = Pair::of(engine, &[]).await;
        pair.prefill.set_call_fault(CallFault::generate().refuse(Code::Unavailable, "draining").times(1));
        let response = pair.smg.post(CHAT, &chat()).await;
        assert_eq!(response.status(), StatusCode::OK, "{engine:?} {}", response.text().await.unwrap());
        let calls = pair.decode.calls();
        let last = calls.last().unwrap();
        assert_eq!(last.end, Some(CallEnd::Completed));
        pair.is_clean().await;
    }
}

#[tokio::test]
async fn what_engines_do_wrong_has_a_code() {
    let flags = ["--disable-retries", "--disable-circuit-breaker"];
    let pair = Pair::of(Engine::Vllm, &flags).await;
    pair.prefill.set_call_fault(CallFault::generate().fail_after(1, Code::Internal, "late").times(1));
    assert_refused(&pair.smg, CHAT, &chat(), 500, "prefill_stream_error").await;
    let unable = CallFault::generate().refuse(Code::FailedPrecondition, "no such rule");
    pair.decode.set_call_fault(unable.trailer("smg-constraint-failed", "engine").times(1));
    assert_refused(&pair.smg, CHAT, &chat(), 422, "constraint_failed").await;
    pair.is_clean().await;

    let pair = Pair::of(Engine::Sglang, &flags).await;
    pair.decode.set_call_fault(CallFault::generate().fail_after(2, Code::Internal, "late").times(1));
    let mut watched = chat();
    watched["stop"] = json!(["nobody says this"]);
    assert_refused(&pair.smg, CHAT, &watched, 500, "worker_stream_failed").await;
    pair.decode.set_call_fault(CallFault::generate().end_after(2).times(1));
    assert_refused(&pair.smg, CHAT, &watched, 500, "no_responses_from_server").await;
    pair.is_clean().await;

    let worker = grpc(Engine::Sglang, Role::Regular).await;
    let smg = Smg::launch(&flags).await;
    smg.register(&spec(&worker, "regular")).await;
    worker.set_call_fault(CallFault::generate().refuse(Code::Unavailable, "no").times(1));
    assert_refused(&smg, CHAT, &chat(), 503, "worker_failed_to_start").await;
}

#[tokio::test]
async fn a_worker_that_says_nothing_is_given_up_when_the_request_has_no_more_time() {
    let flags = ["--disable-retries", "--request-timeout-secs", "2"];
    for engine in PAIRS {
        let pair = Pair::of(engine, &flags).await;
        for (leg, code) in
            [(&pair.prefill, "prefill_worker_failed_to_start"), (&pair.decode, "decode_worker_failed_to_start")]
        {
            for body in [chat(), chat_stream()] {
                leg.set_call_fault(CallFault::generate().hang().times(1));
                let response = pair.smg.post(CHAT, &body).await;
                assert_eq!(response.status(), StatusCode::GATEWAY_TIMEOUT, "{engine:?} {code}");
                let answered = response.headers()["x-smg-error-code"].to_str().unwrap().to_owned();
                // Of two silent legs that wait for each other either may be named.
                let silent = ["prefill_worker_failed_to_start", "decode_worker_failed_to_start"];
                assert!(silent.contains(&&*answered), "{engine:?} {answered}");
                if engine == Engine::Vllm {
                    assert_eq!(answered, code);
                }
            }
        }
    }
}

#[tokio::test]
async fn an_end_that_comes_before_its_output_fails_its_request_alone() {
    for engine in PAIRS {
        let pair = Pair::of(engine, &["--disable-retries", "--disable-circuit-breaker"]).await;
        // An answer that looks whole although its text is missing would be worse than none.
        pair.decode.set_call_fault(CallFault::generate().out_of_order().times(1));
        assert_refused(&pair.smg, CHAT, &chat_stream(), 502, "decode_worker_failed_to_start").await;
        assert_eq!(pair.smg.post(CHAT, &chat()).await.status(), StatusCode::OK, "{engine:?}");
        pair.is_clean().await;
    }
}

#[tokio::test]
async fn an_answer_of_which_a_part_was_lost_on_the_way_is_broken_and_never_looks_whole() {
    // vLLM counts the tokens of each message alone: there a loss in the middle cannot be told.
    for engine in [Engine::Sglang, Engine::Tokenspeed] {
        let pair = Pair::of(engine, &["--disable-retries", "--disable-circuit-breaker"]).await;
        for lost in [1, 3, 7] {
            let fault = CallFault::generate().lose(lost).times(1);
            pair.decode.set_call_fault(fault);
            let mut body = chat_stream();
            body["max_tokens"] = json!(8);
            let response = pair.smg.post(CHAT, &body).await;
            let status = response.status();
            let text = response.text().await.unwrap();
            assert!(text.contains("tokens of sample 0 and sent"), "{engine:?} {lost} {status} {text}");
            assert!(!text.contains("finish_reason\":\"length"), "{engine:?} {lost} {text}");
        }
        let whole = pair.smg.post(CHAT, &chat_stream()).await.text().await.unwrap();
        assert!(whole.ends_with("data: [DONE]\n\n") && !whole.contains("error"), "{engine:?} {whole}");
        pair.is_clean().await;
    }
}
