//! What is told of workers that speak gRPC, how they are placed, and TLS.

use super::*;

#[tokio::test]
async fn the_load_that_engines_report_over_grpc_is_shown() {
    let flags = ["--load-monitor-interval", "1"];
    let pair = Pair::of(Engine::Sglang, &flags).await;
    eventually("both engines have reported", || async {
        let loads = pair.smg.get_json("/loads").await;
        (loads["loads"].as_array().map(Vec::len) == Some(2)).then_some(())
    })
    .await;
}

#[tokio::test]
async fn what_engines_say_about_themselves_and_their_model_is_told() {
    for engine in PAIRS {
        let pair = Pair::of(engine, &[]).await;
        let server = pair.smg.get("/get_server_info").await;
        assert_eq!(server.status(), StatusCode::OK, "{engine:?}");
        let server: Value = server.json().await.unwrap();
        let model = pair.smg.get_json("/get_model_info").await;
        assert_eq!(model["served_model_name"], MODEL, "{engine:?} {model}");
        assert_eq!((&model["max_context_length"], model["vocab_size"].as_u64() > Some(0)), (&json!(131_072), true));
        match engine {
            Engine::Vllm => {
                assert_eq!(server["kv_connector"], "NixlConnector", "{server}");
                assert_eq!(server["kv_engine_id"], pair.prefill.engine_id());
            }
            _ => {
                assert_eq!(server["disaggregation_mode"], "prefill", "{server}");
                assert!(server["version"].is_string() && server["scheduler_info"].is_object(), "{server}");
            }
        }
        pair.prefill.set_call_fault(CallFault::method("GetServerInfo").refuse(Code::Internal, "busy"));
        let failed = pair.smg.get("/get_server_info").await;
        assert_eq!(failed.status(), StatusCode::BAD_GATEWAY, "{engine:?}");
        assert_eq!(failed.headers()["x-smg-error-code"], "prefill_request_failed");
    }
}

#[tokio::test]
async fn prompts_are_placed_by_their_tokens_however_the_client_wrote_them() {
    let smg = Smg::launch(&["--prefill-policy", "prefix_hash"]).await;
    let mut prefills = Vec::new();
    for _ in 0..4 {
        let prefill = grpc(Engine::Sglang, Role::Prefill).await;
        smg.register(&spec(&prefill, "prefill")).await;
        prefills.push(prefill);
    }
    let decode = grpc(Engine::Sglang, Role::Decode).await;
    smg.register(&spec(&decode, "decode")).await;
    let placed = async |prompt: Value| -> String {
        prefills.iter().for_each(MockEngine::clear_requests);
        let body = json!({"model": MODEL, "prompt": prompt, "max_tokens": 2});
        assert_eq!(smg.post("/v1/completions", &body).await.status(), StatusCode::OK);
        let served: Vec<&MockEngine> = prefills.iter().filter(|prefill| !prefill.calls().is_empty()).collect();
        assert_eq!(served.len(), 1);
        served[0].url()
    };
    let mut seen = std::collections::BTreeSet::new();
    for topic in 0..12 {
        let text = format!("Topic {topic} is a matter of its own. {}", "And so on. ".repeat(20));
        let of_text = placed(json!(text)).await;
        let tokens = decode.calls().last().unwrap().token_ids().to_vec();
        assert_eq!(placed(json!(tokens)).await, of_text, "topic {topic}");
        seen.insert(of_text);
    }
    assert!(seen.len() > 1, "not all on one worker");
}

#[tokio::test]
async fn traces_reach_both_legs_as_metadata() {
    const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";
    let collector = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = collector.local_addr().unwrap().to_string();
    for engine in PAIRS {
        let pair = Pair::of(engine, &["--enable-trace", "--otlp-traces-endpoint", &address]).await;
        let request = pair.smg.client.post(format!("{}{CHAT}", pair.smg.url)).json(&chat());
        let request = request.header("traceparent", format!("00-{TRACE}-00f067aa0ba902b7-01"));
        assert_eq!(request.send().await.unwrap().status(), StatusCode::OK);
        let spans = pair.engines().map(|leg| {
            let metadata = leg.calls()[0].metadata.clone();
            let parents: Vec<String> =
                metadata.into_iter().filter(|(name, _)| name == "traceparent").map(|(_, value)| value).collect();
            assert_eq!(parents.len(), 1, "{engine:?}");
            let parts: Vec<&str> = parents[0].split('-').collect();
            assert_eq!((parts[0], parts[1], parts[3]), ("00", TRACE, "01"), "{parents:?}");
            parts[2].to_owned()
        });
        assert_ne!(spans[0], spans[1], "{engine:?}: each leg has a span of its own");
    }
}

#[tokio::test]
async fn each_rank_is_a_worker_and_both_legs_run_on_the_rank_that_was_chosen() {
    for engine in PAIRS {
        let ranked = |role| builder(engine, role).dp_size(4).start();
        let (prefill, decode) = (ranked(Role::Prefill).await.unwrap(), ranked(Role::Decode).await.unwrap());
        let flags = ["--dp-aware", "--policy", "round_robin"];
        let pair = Pair::behind(Smg::launch(&flags).await, prefill, decode).await;
        let mut ranks = std::collections::BTreeSet::new();
        for number in 0..8 {
            let id = format!("ranked-{number}");
            let response = pair.smg.post_as(&id, CHAT, &chat()).await;
            assert_eq!(response.status(), StatusCode::OK, "{engine:?} {}", response.text().await.unwrap());
            let record = pair.smg.decision(&id).await;
            let chosen = ["prefill", "decode"].map(|leg| {
                let url = record["attempts"][0][leg].as_str().unwrap();
                url.rsplit_once('@').unwrap().1.parse::<u64>().unwrap()
            });
            let calls = pair.engines().map(|engine| engine.calls().last().cloned().unwrap());
            assert_eq!(calls[0].rank, Some(chosen[0]), "{engine:?}: the prefill runs on its rank");
            ranks.insert(chosen[0]);
            match engine {
                Engine::Tokenspeed => {
                    assert_eq!(room(&calls[0]) % 4, i64::try_from(chosen[0]).unwrap(), "the room decides both ranks");
                    assert_eq!(room(&calls[1]), room(&calls[0]));
                    assert_eq!(calls[1].rank, calls[0].rank);
                }
                _ => assert_eq!(calls[1].rank, Some(chosen[1]), "{engine:?}"),
            }
        }
        assert_eq!(ranks.len(), 4, "{engine:?}: {ranks:?}");
        pair.is_clean().await;
    }
}

#[tokio::test]
async fn an_engine_that_reports_too_much_load_gets_no_leg_where_requests_are_refused_then() {
    for engine in PAIRS {
        let decode = builder(engine, Role::Decode).token_delay(Duration::from_millis(20)).start().await.unwrap();
        let smg = Smg::launch(&["--load-monitor-interval", "1", "--worker-overload-shed"]).await;
        let pair = Pair::behind(smg, grpc(engine, Role::Prefill).await, decode).await;
        pair.decode.set_max_running(Some(1));
        let mut body = chat_stream();
        body["max_tokens"] = json!(100_000);
        let url = format!("{}{CHAT}", pair.smg.url);
        // One runs, the others wait inside the engine: with the eighth of these it is overloaded.
        let held: Vec<_> = (0..9).map(|_| tokio::spawn(pair.smg.client.post(&url).json(&body).send())).collect();
        eventually("the load is known", || async {
            (pair.smg.metric("smg_workers_overloaded", &[("model", MODEL)]).await == 1.0).then_some(())
        })
        .await;
        let sent = pair.engines().map(|engine| engine.calls().len());
        let shed = pair.smg.post(CHAT, &chat()).await;
        assert_eq!(shed.status(), StatusCode::SERVICE_UNAVAILABLE, "{engine:?}");
        assert_eq!(shed.headers()["x-smg-error-code"], "worker_overload_protection_shed");
        assert_eq!(shed.headers()["retry-after"], "1");
        assert_eq!(pair.engines().map(|engine| engine.calls().len()), sent, "{engine:?}");
        // The answers that have begun are in the handles.
        held.iter().for_each(tokio::task::JoinHandle::abort);
        drop(held);
        pair.is_clean().await;
    }
}
