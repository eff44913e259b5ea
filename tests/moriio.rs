//! MoRI-IO pairs: what each dispatch carries and answers, every refusal, every handoff check, and what becomes of the leg that is dropped.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod support;

use mock_engine::Recorded;
use serde_json::{Value, json};
use support::refusals::*;
use support::*;

const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";
const MARKED: &str = "a___prefill_addr_10.0.0.9:1___decode_addr_10.0.0.8:2_b";

/// The ways to serve a pair: mode of the engines, dispatch label, name in decision records.
const DISPATCHES: [(Connector, &str, &str); 3] = [
    (Connector::MoriioRead, "sequential", "sequential"),
    (Connector::MoriioWrite, "sequential", "sequential"),
    (Connector::MoriioWrite, "concurrent", "concurrent"),
];

/// The registration of a MoRI-IO engine, `labels` added to those that describe it truly.
fn moriio_spec(engine: &MockEngine, worker_type: &str, mode: &str, labels: Value) -> Value {
    let mut all = json!({
        "moriio_mode": mode,
        "moriio_handshake_port": engine.side_channel_port().unwrap().to_string(),
        "moriio_notify_port": engine.notify_port().unwrap().to_string(),
    });
    for (name, value) in labels.as_object().unwrap() {
        all[name] = value.clone();
    }
    spec_with(engine, worker_type, json!({"kv_connector": "MoRIIOConnector", "labels": all}))
}

fn mode_of(connector: &Connector) -> &'static str {
    if *connector == Connector::MoriioRead { "read" } else { "write" }
}

/// A MoRI-IO pair behind a gateway.
async fn pair(connector: Connector, dispatch: &str, flags: &[&str]) -> (Smg, MockEngine, MockEngine) {
    let (prefill, decode) = (vllm(Role::Prefill, connector.clone()).await, vllm(Role::Decode, connector.clone()).await);
    let smg = Smg::launch(flags).await;
    let mode = mode_of(&connector);
    let specs = [
        moriio_spec(&prefill, "prefill", mode, json!({})),
        moriio_spec(&decode, "decode", mode, json!({"moriio_write_dispatch": dispatch})),
    ];
    tokio::join!(smg.register(&specs[0]), smg.register(&specs[1]));
    (smg, prefill, decode)
}

/// Status and code of a response.
fn outcome(response: &reqwest::Response) -> (u16, String) {
    let code = response.headers().get("x-smg-error-code").map(|code| code.to_str().unwrap().to_owned());
    (response.status().as_u16(), code.unwrap_or_default())
}

async fn transfer_failures(smg: &Smg) -> f64 {
    smg.metric("smg_pd_kv_transfer_failures_total", &[]).await
}

/// Outcomes that the breaker of a worker was told.
async fn outcomes(smg: &Smg, engine: &MockEngine) -> f64 {
    smg.metric("smg_worker_cb_outcomes_total", &[("worker", &engine.url())]).await
}

/// Waits until an engine has seen its only generation request's connection close before the answer was out.
async fn until_dropped(engine: &MockEngine) {
    let dropped = |engine: &MockEngine| engine.generations().iter().all(|leg| leg.peer_closed_at.is_some());
    engine.wait_until(PATIENCE, dropped).await.unwrap();
}

fn last(engine: &MockEngine) -> Recorded {
    engine.generations().pop().unwrap()
}

#[tokio::test]
async fn each_dispatch_answers_byte_for_byte_what_one_engine_answers() {
    let single = vllm(Role::Regular, Connector::None).await;
    let client = reqwest::Client::new();
    for (connector, dispatch, recorded) in DISPATCHES {
        let (smg, prefill, decode) = pair(connector.clone(), dispatch, &[]).await;
        let requests = [(CHAT, chat()), (COMPLETIONS, completion()), (CHAT, chat_stream())];
        for (number, (path, mut body)) in requests.into_iter().enumerate() {
            body["stop"] = json!(["never"]);
            let id = format!("request-{number}");
            let url = format!("{}{path}", single.url());
            let alone = client.post(url).header("x-request-id", &id).json(&body).send().await.unwrap();
            let paired = smg.post_as(&id, path, &body).await;
            assert_eq!(paired.status(), 200);
            assert_eq!(paired.bytes().await.unwrap(), alone.bytes().await.unwrap(), "{connector:?} {dispatch} {path}");
            let decision = smg.decision(&id).await;
            let attempt = &decision["attempts"][0];
            assert_eq!((&attempt["dispatch"], &attempt["connector_mode"]), (&json!(recorded), &json!("moriio")));

            let (prefill_leg, decode_leg) = (last(&prefill).json(), last(&decode).json());
            assert_eq!(prefill_leg["ignore_eos"], true);
            assert_eq!((&prefill_leg["max_tokens"], &prefill_leg["stream"]), (&json!(1), &json!(false)));
            assert!(prefill_leg.get("stop").is_none() && decode_leg["stop"] == body["stop"]);
            let (sent, handed) = (&prefill_leg["kv_transfer_params"], &decode_leg["kv_transfer_params"]);
            assert_eq!(sent["transfer_id"], handed["transfer_id"]);
            assert_eq!(sent["transfer_id"], attempt["transfer_id"]);
            let told = sent.get("remote_notify_port").and_then(Value::as_u64);
            let wanted = (connector == Connector::MoriioWrite).then(|| u64::from(decode.notify_port().unwrap()));
            assert_eq!(told, wanted, "only WRITE names the decode's side channel");
            assert_eq!(handed["remote_handshake_port"], prefill.side_channel_port().unwrap());
            assert_eq!(handed["remote_engine_id"].is_null(), recorded == "concurrent", "minted, not relayed");
        }
        assert_eq!(decode.local_prompt_tokens(), 0);
        assert_eq!(decode.external_prompt_tokens(), prefill.local_prompt_tokens());
        assert_eq!(smg.metric("smg_pd_kv_connector_mode_total", &[("mode", "moriio")]).await, 3.0);
        assert_eq!(transfer_failures(&smg).await, 0.0);
        smg.until_idle().await;
    }
}

#[tokio::test]
async fn log_probabilities_of_the_prompt_are_the_prefills() {
    for (connector, dispatch, _) in DISPATCHES {
        let (smg, _prefill, decode) = pair(connector.clone(), dispatch, &[]).await;
        assert_prompt_logprobs_are_those_of_one_engine(&smg, &decode).await;
        assert_eq!(decode.local_prompt_tokens(), 0, "{connector:?} {dispatch}");
    }
}

#[tokio::test]
async fn a_misconfigured_pair_is_refused_before_either_leg_and_the_log_says_why() {
    let far = |host: &str| json!({"moriio_host": host});
    let concurrent = json!({"moriio_write_dispatch": "concurrent", "moriio_host": "10.0.0.9"});
    let same = json!({"moriio_host": "10.0.0.9", "moriio_notify_port": "7000"});
    // Labels laid over those of a WRITE pair; `null` = another connector.
    let rows = [
        ("other-prefill", Value::Null, json!({}), "the prefill worker is not a MoRIIOConnector worker"),
        ("other-decode", json!({}), Value::Null, "the decode worker is not a MoRIIOConnector worker"),
        ("modes", json!({"moriio_mode": "read"}), json!({}), "in read mode, the decode worker in write mode"),
        ("wide", json!({"dp_size": "2"}), json!({"dp_size": "2"}), "2 data-parallel ranks"),
        ("no-mode", json!({"moriio_mode": ""}), json!({}), "`moriio_mode` is missing"),
        ("bad-mode", json!({}), json!({"moriio_mode": "push"}), "`moriio_mode` is `push`"),
        ("bad-port", json!({"moriio_notify_port": "70000"}), json!({}), "`moriio_notify_port` is `70000`"),
        ("bad-tp", json!({}), json!({"tp_size": "all"}), "`tp_size` is `all`"),
        ("bad-dispatch", json!({"moriio_write_dispatch": "both"}), json!({}), "`moriio_write_dispatch` is `both`"),
        ("local-decode", far("10.0.0.9"), far("[::]"), "the decode worker's side channel is on `[::]`"),
        ("local-prefill", far("localhost"), concurrent, "the prefill worker's side channel is on `localhost`"),
        ("shared", same.clone(), same, "the same handshake or notify port"),
    ];
    let smg = Smg::launch(&["--pd-pairing-mode", "off"]).await;
    for (number, (model, prefill_labels, decode_labels, reason)) in rows.into_iter().enumerate() {
        let start = |role| MockEngine::builder().role(role).connector(Connector::MoriioWrite).model(model).start();
        let (prefill, decode) = (start(Role::Prefill).await.unwrap(), start(Role::Decode).await.unwrap());
        let registration = |engine: &MockEngine, worker_type: &str, labels: Value| match labels {
            Value::Null => spec_with(engine, worker_type, json!({"kv_connector": "NixlConnector"})),
            labels => moriio_spec(engine, worker_type, "write", labels),
        };
        let specs = [registration(&prefill, "prefill", prefill_labels), registration(&decode, "decode", decode_labels)];
        tokio::join!(smg.register(&specs[0]), smg.register(&specs[1]));
        // What is wrong with the request comes second.
        let body = json!({"model": model, "text": "a", "n": 2});
        let response = smg.post("/generate", &body).await;
        let message = refused(response, 503, "moriio_pair_misconfigured").await;
        assert!(!message.contains("10.0.0.9") && !message.contains("label"), "{model}: {message}");
        smg.logged(&[reason]).await;
        assert_eq!(prefill.generation_count() + decode.generation_count(), 0);
        assert_eq!(transfer_failures(&smg).await, (number + 1) as f64, "{model}: the pair is tried once");
    }
}

#[tokio::test]
async fn requests_that_moriio_cannot_serve_reach_no_engine() {
    for (connector, dispatch, _) in DISPATCHES {
        assert_refused(connector, dispatch).await;
    }
    let (other, _prefill, _decode) = nixl_pair(&[]).await;
    assert_eq!(other.post_as(MARKED, CHAT, &chat()).await.status(), 200, "other connectors read no markers");
}

async fn assert_refused(connector: Connector, dispatch: &str) {
    let (smg, prefill, decode) = pair(connector, dispatch, &[]).await;
    let with = |mut body: Value, name: &str, value: Value| {
        body[name] = value;
        body
    };
    let (fan_out, reserved) = ((400, "moriio_fanout_unsupported"), (400, "moriio_request_id_reserved"));
    let of_prompt = (400, "moriio_prompt_logprobs_unsupported");
    let rows = [
        ("/generate", json!({"text": "a", "n": 2}), "id", (501, "moriio_route_unsupported")),
        (CHAT, with(chat(), "n", json!(2)), MARKED, fan_out),
        (COMPLETIONS, with(completion(), "n", json!(2)), "id", fan_out),
        (COMPLETIONS, with(completion(), "prompt", json!(["a", "b"])), "id", fan_out),
        (COMPLETIONS, with(completion(), "prompt", json!([[1], [2]])), "id", fan_out),
        (COMPLETIONS, json!({"prompt_embeds": ["x", "y"]}), "id", fan_out),
        (CHAT, with(chat(), "use_beam_search", json!(true)), "id", fan_out),
        (CHAT, with(chat(), "echo", json!(true)), "id", of_prompt),
        (COMPLETIONS, with(with(completion(), "echo", json!(true)), "logprobs", json!(1)), "id", of_prompt),
        (CHAT, with(chat_stream(), "prompt_logprobs", json!(1)), "id", of_prompt),
        (CHAT, chat(), MARKED, reserved),
        (CHAT, chat(), "b___decode_addr_c", reserved),
        (CHAT, with(chat(), "request_id", json!(MARKED)), "id", reserved),
    ];
    for (path, body, id, (status, code)) in rows {
        refused(smg.post_as(id, path, &body).await, status, code).await;
    }
    let input = json!({"model": MODEL, "input": "a", "messages": chat()["messages"], "query": "a", "documents": ["b"]});
    for path in ["/v1/responses", "/v1/rerank"] {
        refused(smg.post(path, &input).await, 501, "moriio_route_unsupported").await;
    }
    let message = smg.post("/v1/messages", &input).await;
    assert_eq!(outcome(&message), (501, "moriio_route_unsupported".to_owned()));
    assert_eq!(message.json::<Value>().await.unwrap()["type"], "error", "in the words of that API");
    // Counting takes one prefill and no pair.
    assert_eq!(smg.post("/v1/messages/count_tokens", &input).await.status(), 200);
    let twice =
        smg.client.post(format!("{}{CHAT}", smg.url)).header("x-request-id", "good").header("x-request-id", MARKED);
    refused(twice.json(&chat()).send().await.unwrap(), 400, "moriio_request_id_reserved").await;
    assert_eq!(prefill.generation_count() + decode.generation_count(), 0);
    for body in [with(completion(), "prompt", json!(["a"])), with(completion(), "n", json!(1))] {
        assert_eq!(smg.post(COMPLETIONS, &body).await.status(), 200, "{body}");
    }
}

/// Falsified handoffs that no decode engine may see.
fn wrong_handoffs() -> Vec<Value> {
    let field = |name: &str, value: Value| json!({name: value});
    vec![
        Value::Null,
        json!("x"),
        field("transfer_id", json!("tx-another")),
        field("do_remote_prefill", json!(false)),
        field("remote_engine_id", json!("")),
        field("remote_block_ids", json!("1")),
        field("remote_block_ids", json!([1, "2"])),
        field("remote_host", json!("a b")),
        field("remote_handshake_port", json!("port")),
        field("remote_notify_port", json!(0)),
        field("remote_dp_size", json!("x")),
        field("remote_dp_size_local", json!([])),
        field("remote_dp_rank", json!(0.5)),
        field("tp_size", json!("one")),
        field("remote_tp_size", json!(true)),
    ]
}

#[tokio::test]
async fn a_handoff_of_a_wrong_shape_reaches_no_decode_engine() {
    let (smg, prefill, decode) = pair(Connector::MoriioRead, "", &[]).await;
    let wrong = wrong_handoffs();
    for (number, patch) in wrong.iter().enumerate() {
        prefill.alter_handoffs(Some(patch.clone()));
        refused(smg.post(CHAT, &chat()).await, 502, "moriio_handoff_invalid").await;
        assert_eq!(transfer_failures(&smg).await, (number + 1) as f64, "{patch}: the pair is tried once");
    }
    assert_eq!((prefill.generation_count(), decode.generation_count()), (wrong.len() as u64, 0));
    assert_eq!(outcomes(&smg, &decode).await, 0.0);
    for patch in [
        json!({}),
        json!({"remote_block_ids": [[1], [2]]}),
        json!({"remote_block_ids": [1, 2]}),
        json!({"tp_size": null, "remote_dp_size": "1"}),
        json!({
            "remote_handshake_port": prefill.side_channel_port().unwrap().to_string(),
            "remote_notify_port": prefill.notify_port().unwrap().to_string(),
        }),
    ] {
        prefill.alter_handoffs(Some(patch.clone()));
        assert_eq!(smg.post(CHAT, &chat()).await.status(), 200, "{patch}");
    }
    assert_eq!(decode.local_prompt_tokens(), 0);
    smg.until_idle().await;
}

#[tokio::test]
async fn under_concurrent_dispatch_no_answer_comes_out_before_its_handoff_has_passed() {
    let (smg, prefill, decode) = pair(Connector::MoriioWrite, "concurrent", &[]).await;
    let mut wrong = wrong_handoffs();
    wrong.push(json!({"remote_handshake_port": 9}));
    wrong.push(json!({"remote_notify_port": "9"}));
    for (number, patch) in wrong.iter().enumerate() {
        // The push has arrived by then, so the decode engine may well have answered already.
        prefill.alter_handoffs(Some(patch.clone()));
        let body = if number % 2 == 0 { chat() } else { chat_stream() };
        refused(smg.post(CHAT, &body).await, 502, "moriio_handoff_invalid").await;
    }
    assert_eq!(transfer_failures(&smg).await, wrong.len() as f64);
    assert_eq!(outcomes(&smg, &decode).await, 0.0, "a dropped leg says nothing about its worker");
    prefill.alter_handoffs(Some(json!({"remote_host": "another.interface"})));
    assert_eq!(smg.post(CHAT, &chat()).await.status(), 200, "the host is not compared");
    smg.until_idle().await;
}

#[tokio::test]
async fn a_complete_decode_answer_waits_for_the_prefill() {
    let (smg, prefill, decode) = pair(Connector::MoriioWrite, "concurrent", &["--disable-retries"]).await;
    decode.set_fault(Fault::generation().status(200, r#"{"early":true}"#));
    prefill.set_fault(
        Fault::generation()
            .status(200, r#"{"kv_transfer_params":null}"#)
            .delay_head(std::time::Duration::from_millis(300)),
    );
    refused(smg.post(CHAT, &chat()).await, 502, "moriio_handoff_invalid").await;
    assert_eq!(last(&decode).status, Some(200));
}

#[tokio::test]
async fn a_failed_prefill_ends_the_request_and_drops_the_waiting_decode_leg() {
    for (fault, expected) in [
        (Fault::generation().status(500, r#"{"error":"gone"}"#), (500, "prefill_upstream_error")),
        (Fault::generation().status(422, r#"{"error":"no"}"#), (422, "prefill_upstream_error")),
        (Fault::generation().reset_unanswered(), (502, "prefill_request_failed")),
    ] {
        let (smg, prefill, decode) = pair(Connector::MoriioWrite, "concurrent", &["--disable-retries"]).await;
        prefill.set_fault(fault.delay_head(std::time::Duration::from_millis(200)));
        let response = smg.post(CHAT, &chat()).await;
        assert_eq!(outcome(&response), (expected.0, expected.1.to_owned()));
        until_dropped(&decode).await;
        assert_eq!(outcomes(&smg, &decode).await, 0.0);
        smg.until_idle().await;
    }
}

#[tokio::test]
async fn a_failed_decode_ends_the_request_without_waiting_for_the_prefill() {
    for (fault, expected) in [
        (Fault::generation().status(400, r#"{"error":"too long"}"#), (400, "decode_bad_request")),
        (Fault::generation().status(503, r#"{"error":"busy"}"#), (503, "decode_unavailable")),
        (Fault::generation().reset_unanswered(), (502, "decode_request_failed")),
    ] {
        let (smg, prefill, decode) = pair(Connector::MoriioWrite, "concurrent", &["--disable-retries"]).await;
        prefill.set_fault(Fault::generation().hang());
        decode.set_fault(fault.delay_head(std::time::Duration::from_millis(200)));
        let response = smg.post(CHAT, &chat()).await;
        assert_eq!(outcome(&response), (expected.0, expected.1.to_owned()));
        until_dropped(&prefill).await;
        assert_eq!(outcomes(&smg, &prefill).await, 0.0);
        smg.until_idle().await;
    }
}

#[tokio::test]
async fn a_client_that_leaves_ends_both_legs_and_charges_nobody() {
    for (connector, dispatch, _) in DISPATCHES {
        let (smg, prefill, decode) = pair(connector, dispatch, &[]).await;
        prefill.set_fault(Fault::generation().hang());
        let (client, url) = (smg.client.clone(), format!("{}{CHAT}", smg.url));
        let request = tokio::spawn(async move { client.post(url).json(&chat()).send().await });
        prefill.wait_for_generations(1, PATIENCE).await.unwrap();
        if dispatch == "concurrent" {
            decode.wait_for_generations(1, PATIENCE).await.unwrap();
        }
        request.abort();
        until_dropped(&prefill).await;
        until_dropped(&decode).await;
        smg.until_idle().await;
        assert_eq!(outcomes(&smg, &prefill).await + outcomes(&smg, &decode).await, 0.0);
        prefill.clear_faults();
        assert_eq!(smg.post(CHAT, &chat()).await.status(), 200);
    }
}

#[tokio::test]
async fn a_prefill_that_hands_over_nothing_is_left_for_another() {
    for (connector, dispatch, _) in DISPATCHES {
        let (smg, first, decode) = pair(connector.clone(), dispatch, &[]).await;
        let second = vllm(Role::Prefill, connector.clone()).await;
        smg.register(&moriio_spec(&second, "prefill", mode_of(&connector), json!({}))).await;
        first.alter_handoffs(Some(Value::Null));
        for _ in 0..4 {
            assert_eq!(smg.post(CHAT, &chat()).await.status(), 200);
        }
        assert_eq!(second.generation_count(), 4);
        assert_eq!(transfer_failures(&smg).await, first.generation_count() as f64);
        assert_eq!(decode.local_prompt_tokens(), 0);
    }
}
