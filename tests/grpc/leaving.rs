//! Clients that leave, and clients that read slowly.

use super::*;

#[tokio::test]
async fn a_prefill_is_aborted_when_the_client_leaves_and_a_silent_decode_is_not_yet() {
    for engine in [Engine::Sglang, Engine::Tokenspeed] {
        let pair = Pair::of(engine, &[]).await;
        pair.prefill.set_call_fault(CallFault::generate().hang());
        pair.decode.set_call_fault(CallFault::generate().delay(Duration::from_secs(3)).hang());
        let request = pair.smg.client.post(format!("{}{CHAT}", pair.smg.url)).json(&chat_stream()).send();
        let arrived = pair.arrived(&pair.prefill, 1);
        tokio::select! {
            _ = request => panic!("nobody answers"),
            () = arrived => {}
        }
        let left = Instant::now();
        eventually("the prefill is aborted", || async { (!pair.prefill.aborts().is_empty()).then_some(()) }).await;
        assert!(pair.decode.aborts().is_empty(), "{engine:?}: its engine may be receiving the KV cache");
        assert!(left.elapsed() < Duration::from_secs(20));
        assert_eq!(pair.smg.metric("smg_grpc_legs", &[("leg", "decode")]).await, 1.0, "the decode holds its place");
    }
}

#[tokio::test]
async fn a_client_that_leaves_a_running_stream_leaves_nothing_inside_the_engines() {
    for engine in PAIRS {
        let decode = builder(engine, Role::Decode).token_delay(Duration::from_millis(20)).start().await.unwrap();
        let pair = Pair::behind(Smg::launch(&[]).await, grpc(engine, Role::Prefill).await, decode).await;
        let mut body = chat_stream();
        body["max_tokens"] = json!(1000);
        let response = pair.smg.post(CHAT, &body).await;
        let mut stream = response.bytes_stream();
        stream.next().await.unwrap().unwrap();
        drop(stream);
        pair.is_clean().await;
        let end = pair.decode.calls()[0].end.clone();
        assert_eq!(end, Some(CallEnd::Aborted), "{engine:?}");
    }
}

#[tokio::test]
async fn the_first_token_reaches_the_client_while_the_engine_has_no_second() {
    for engine in PAIRS {
        let pair = Pair::of(engine, &[]).await;
        pair.decode.set_call_fault(CallFault::generate().stall_after(1).times(1));
        let response = pair.smg.post(CHAT, &chat_stream()).await;
        assert_eq!(response.headers()["content-type"], "text/event-stream");
        assert!(!response.headers().contains_key("content-length"));
        let (mut stream, mut text) = (response.bytes_stream(), String::new());
        let first = expected(&pair.decode, 0, 1);
        while deltas(&text) != first {
            let part =
                tokio::time::timeout(PATIENCE, stream.next()).await.unwrap_or_else(|_| panic!("{engine:?} {text}"));
            text.push_str(std::str::from_utf8(&part.unwrap().unwrap()).unwrap());
        }
        drop(stream);
        pair.is_clean().await;
    }
}

#[tokio::test]
async fn a_decode_that_was_silent_when_the_client_left_is_aborted_with_its_first_reply_and_not_before() {
    for engine in [Engine::Sglang, Engine::Tokenspeed] {
        let decode = builder(engine, Role::Decode).token_delay(Duration::from_millis(20)).start().await.unwrap();
        let pair = Pair::behind(Smg::launch(&[]).await, grpc(engine, Role::Prefill).await, decode).await;
        pair.decode.set_max_running(Some(1));
        let mut long = chat_stream();
        long["max_tokens"] = json!(100_000);
        let mut held = pair.smg.post(CHAT, &long).await.bytes_stream();
        held.next().await.unwrap().unwrap();
        // The KV of the next one is taken over, but its engine has no place for it yet: it says nothing.
        let request = pair.smg.client.post(format!("{}{CHAT}", pair.smg.url)).json(&chat_stream()).send();
        tokio::select! {
            _ = request => panic!("nobody answers"),
            () = pair.arrived(&pair.decode, 2) => {}
        }
        eventually("the gateway has noticed", || async {
            (pair.smg.metric("smg_http_requests_active", &[]).await == 1.0).then_some(())
        })
        .await;
        assert!(pair.decode.aborts().is_empty(), "{engine:?}");
        assert_eq!(pair.smg.metric("smg_grpc_legs", &[("leg", "decode")]).await, 2.0, "it holds its place");
        drop(held);
        pair.is_clean().await;
        let call = pair.decode.calls()[1].clone();
        assert_eq!(call.end, Some(CallEnd::Aborted), "{engine:?}");
        let abort = pair.decode.aborts().into_iter().find(|abort| abort.request_id == call.request_id()).unwrap();
        assert!(abort.at >= call.first_message_at.unwrap(), "{engine:?}: not before its first reply");
    }
}

#[tokio::test]
async fn a_decode_that_ends_by_itself_after_the_client_left_is_not_aborted() {
    for engine in [Engine::Sglang, Engine::Tokenspeed] {
        let pair = Pair::of(engine, &["--disable-retries"]).await;
        let late = CallFault::generate().delay(Duration::from_secs(1)).refuse(Code::Unavailable, "shutting down");
        pair.decode.set_call_fault(late.times(1));
        let request = pair.smg.client.post(format!("{}{CHAT}", pair.smg.url)).json(&chat_stream()).send();
        tokio::select! {
            _ = request => panic!("nobody answers"),
            () = pair.arrived(&pair.prefill, 1) => {}
        }
        eventually("the prefill is aborted", || async { (!pair.prefill.aborts().is_empty()).then_some(()) }).await;
        pair.is_clean().await;
        assert!(pair.decode.aborts().is_empty(), "{engine:?}");
    }
}

#[tokio::test]
async fn a_client_that_leaves_a_sequential_dispatch_in_either_leg_leaves_nothing_behind() {
    let decode = builder(Engine::Vllm, Role::Decode).token_delay(Duration::from_millis(20)).start().await.unwrap();
    let pair = Pair::behind(Smg::launch(&[]).await, grpc(Engine::Vllm, Role::Prefill).await, decode).await;
    let mut body = chat_stream();
    body["max_tokens"] = json!(100_000);
    let ask = || pair.smg.client.post(format!("{}{CHAT}", pair.smg.url)).json(&body).send();
    pair.prefill.set_call_fault(CallFault::generate().hang().times(1));
    tokio::select! {
        _ = ask() => panic!("nobody answers"),
        () = pair.arrived(&pair.prefill, 1) => {}
    }
    pair.is_clean().await;
    assert_eq!((pair.prefill.calls()[0].end.clone(), pair.decode.calls().len()), (Some(CallEnd::Aborted), 0));

    pair.decode.set_call_fault(CallFault::generate().delay(Duration::from_secs(1)).times(1));
    let sent =
        eventually("the decode leg is sent", || async { (pair.decode.call_count("Generate") == 1).then_some(()) });
    tokio::select! {
        _ = ask() => panic!("nobody answers"),
        () = sent => {}
    }
    pair.arrived(&pair.decode, 1).await;
    pair.is_clean().await;
    let call = pair.decode.calls()[0].clone();
    assert_eq!(call.end, Some(CallEnd::Aborted));
    let abort = &pair.decode.aborts()[0];
    assert!(abort.known && abort.at >= call.first_message_at.unwrap(), "not before its first reply");
    assert_eq!(pair.smg.metric("smg_pd_orphaned_handoffs_total", &[]).await, 0.0, "the handoff was taken");
}

#[tokio::test]
async fn a_handoff_that_no_decode_took_because_the_client_had_left_is_counted_and_named() {
    // NIXL's prefill says what it holds; of Mooncake's the gateway knows it.
    for connector in [Connector::Nixl, Connector::Mooncake] {
        let start = |role| builder(Engine::Vllm, role).connector(connector.clone()).start();
        let (prefill, decode) = (start(Role::Prefill).await.unwrap(), start(Role::Decode).await.unwrap());
        let pair = Pair::behind(Smg::launch(&[]).await, prefill, decode).await;
        let orphans = async || pair.smg.metric("smg_pd_orphaned_handoffs_total", &[]).await;
        assert_eq!(pair.smg.post(CHAT, &chat()).await.status(), StatusCode::OK);
        pair.is_clean().await;
        assert_eq!(orphans().await, 0.0, "{connector:?}: this one was taken");
        // Its last message comes, the end of its stream does not.
        pair.prefill.set_call_fault(CallFault::generate().stall_after(1).times(1));
        let request = pair.smg.client.post(format!("{}{CHAT}", pair.smg.url)).json(&chat_stream()).send();
        let handed_over = eventually("the handoff comes", || async {
            let calls = pair.prefill.calls();
            calls.get(1).is_some_and(|call| call.messages == 1).then_some(())
        });
        tokio::select! {
            _ = request => panic!("nobody answers"),
            () = handed_over => {}
        }
        eventually("it is counted", || async { (orphans().await == 1.0).then_some(()) }).await;
        let call = pair.prefill.calls()[1].clone();
        let id = match connector {
            Connector::Nixl => call.request_id().to_owned(),
            _ => transfer_id(&call),
        };
        assert!(pair.smg.log().lines().any(|line| line.contains("handoff") && line.contains(&id)), "{connector:?}");
        assert_eq!(pair.decode.calls().len(), 1);
        // That ends the stream.
        pair.prefill.stop().await;
        pair.is_clean().await;
        assert_eq!(orphans().await, 1.0, "{connector:?}: once");
    }
}

/// What a Mooncake prefill was told to hold its KV for.
fn transfer_id(call: &mock_engine::Call) -> String {
    let tag = call.vllm().unwrap().kv_transfer_params_json.clone().unwrap();
    let tag: Value = serde_json::from_str(&tag).unwrap();
    tag["transfer_id"].as_str().unwrap().to_owned()
}

/// Resident memory of a process, in KiB.
fn resident(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.split_whitespace().next().unwrap().parse().unwrap()
}

#[tokio::test]
async fn a_client_that_stops_reading_stops_the_engine_and_costs_no_memory() {
    const TOKENS: usize = 6000;
    let pair = Pair::of(Engine::Sglang, &[]).await;
    // Each event of some KiB: far more than sockets hold.
    let mut body = chat_stream();
    (body["max_tokens"], body["logprobs"], body["top_logprobs"]) = (json!(TOKENS), json!(true), json!(20));
    assert_eq!(pair.smg.post(CHAT, &chat_stream()).await.status(), StatusCode::OK);
    let before = resident(pair.smg.pid());
    let response = pair.smg.post(CHAT, &body).await;
    pair.arrived(&pair.decode, 2).await;
    let sent = || pair.decode.calls()[1].messages;
    // It comes to rest.
    let (mut last, mut same) = (0, 0);
    eventually("the engine is not read any more", || {
        let now = sent();
        same = if now == last && now > 0 { same + 1 } else { 0 };
        last = now;
        let rests = same >= 100;
        async move { rests.then_some(()) }
    })
    .await;
    assert!(sent() < TOKENS as u64, "the engine was read to its end");
    let grown = resident(pair.smg.pid()).saturating_sub(before);
    assert!(grown < 16 * 1024, "{grown} KiB");
    let text = response.text().await.unwrap();
    assert!(text.ends_with("data: [DONE]\n\n"));
    assert_eq!(deltas(&text), expected(&pair.decode, 1, TOKENS), "all of it, in order");
    pair.is_clean().await;
}
