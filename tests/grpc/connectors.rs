//! How vLLM pairs hand over, by their connector.

use super::*;

fn mooncake(role: Role) -> mock_engine::Builder {
    builder(Engine::Vllm, role).connector(Connector::Mooncake)
}

/// The handoff of a leg.
fn handoff(call: &mock_engine::Call) -> Option<Value> {
    let json = call.vllm().unwrap().kv_transfer_params_json.clone()?;
    Some(serde_json::from_str(&json).unwrap())
}

#[tokio::test]
async fn a_mooncake_decode_is_told_who_has_the_kv_and_takes_it_over() {
    let prefill = mooncake(Role::Prefill).engine_id("E").start().await.unwrap();
    let decode = mooncake(Role::Decode).start().await.unwrap();
    let pair = Pair::behind(Smg::launch(&[]).await, prefill, decode).await;
    for body in [chat(), chat_stream()] {
        assert_eq!(pair.smg.post(CHAT, &body).await.status(), StatusCode::OK);
    }
    pair.is_clean().await;
    for (prefill, decode) in pair.prefill.calls().iter().zip(&pair.decode.calls()) {
        let (tag, taken) = (handoff(prefill).unwrap(), handoff(decode).unwrap());
        assert_eq!((&tag["do_remote_decode"], &tag["do_remote_prefill"]), (&json!(true), &json!(false)));
        assert!(tag["transfer_id"].as_str().unwrap().starts_with("xfer-"));
        let port = pair.prefill.bootstrap_port().unwrap();
        assert_eq!(
            taken,
            json!({
                "do_remote_decode": false, "do_remote_prefill": true, "transfer_id": tag["transfer_id"],
                "remote_engine_id": "E", "remote_bootstrap_addr": format!("http://127.0.0.1:{port}"),
            })
        );
    }
    assert_eq!(pair.decode.local_prompt_tokens(), 0, "nothing is computed again");
    assert_eq!(pair.smg.metric("smg_pd_kv_connector_mode_total", &[("mode", "mooncake")]).await, 2.0);
}

#[tokio::test]
async fn a_rank_of_a_mooncake_prefill_has_an_engine_id_of_its_own() {
    let prefill = mooncake(Role::Prefill).engine_id("E").dp_size(2).start().await.unwrap();
    let decode = mooncake(Role::Decode).start().await.unwrap();
    let smg = Smg::launch(&["--dp-aware", "--policy", "round_robin", "--disable-retries"]).await;
    let pair = Pair::behind(smg, prefill, decode).await;
    for _ in 0..4 {
        let response = pair.smg.post(CHAT, &chat()).await;
        assert_eq!(response.status(), StatusCode::OK, "{}", response.text().await.unwrap());
    }
    let mut named = std::collections::BTreeSet::new();
    for (prefill, decode) in pair.prefill.calls().iter().zip(&pair.decode.calls()) {
        let id = handoff(decode).unwrap()["remote_engine_id"].as_str().unwrap().to_owned();
        assert_eq!(id, format!("E_dp{}", prefill.rank.unwrap()));
        named.insert(id);
    }
    assert_eq!(named.len(), 2, "{named:?}");
}

#[tokio::test]
async fn a_mooncake_prefill_without_an_engine_id_and_several_samples_get_the_older_form() {
    let nameless = mooncake(Role::Prefill).server_info("kv_engine_id", "").start().await.unwrap();
    let decode = mooncake(Role::Decode).start().await.unwrap();
    let pair = Pair::behind(Smg::launch(&[]).await, nameless, decode).await;
    assert_eq!(pair.smg.post(CHAT, &chat()).await.status(), StatusCode::OK);
    is_in_the_older_form(&pair);

    let named = mooncake(Role::Prefill).start().await.unwrap();
    let decode = mooncake(Role::Decode).start().await.unwrap();
    let pair = Pair::behind(Smg::launch(&[]).await, named, decode).await;
    let mut body = chat();
    body["n"] = json!(2);
    let answer: Value = pair.smg.post(CHAT, &body).await.json().await.unwrap();
    assert_eq!(answer["choices"].as_array().map(Vec::len), Some(2), "{answer}");
    is_in_the_older_form(&pair);
    pair.is_clean().await;
}

fn is_in_the_older_form(pair: &Pair) {
    let [prefill, decode] = pair.engines().map(|engine| engine.calls()[0].vllm().unwrap().clone());
    assert_eq!((prefill.kv_transfer_params_json, prefill.kv_transfer_params), (None, None), "the prefill is untagged");
    assert_eq!(decode.kv_transfer_params_json, None);
    let told = decode.kv_transfer_params.unwrap();
    let port = u32::from(pair.prefill.bootstrap_port().unwrap());
    assert_eq!((told.remote_host.as_str(), told.remote_port), ("127.0.0.1", port));
}

#[tokio::test]
async fn a_prefill_that_came_back_is_asked_for_its_engine_id_before_requests_reach_it() {
    let probes =
        ["--health-check-interval-secs", "1", "--health-failure-threshold", "1", "--health-success-threshold", "1"];
    // The control plane asks with its probes, and the gateway before it takes a worker back: each is enough.
    for flags in [&probes[..], &["--disable-health-check"]] {
        let prefill = mooncake(Role::Prefill).start().await.unwrap();
        let decode = mooncake(Role::Decode).start().await.unwrap();
        let pair = Pair::behind(Smg::launch(flags).await, prefill, decode).await;
        assert_eq!(pair.smg.post(CHAT, &chat()).await.status(), StatusCode::OK);
        let before = pair.prefill.engine_id();
        pair.prefill.stop().await;
        eventually("it is out of rotation", || async {
            (pair.smg.post(CHAT, &chat()).await.status() == StatusCode::SERVICE_UNAVAILABLE).then_some(())
        })
        .await;
        pair.decode.clear_requests();
        pair.prefill.restart().await.unwrap();
        assert_ne!(pair.prefill.engine_id(), before);
        eventually("it is back", || async {
            (pair.smg.post(CHAT, &chat()).await.status() == StatusCode::OK).then_some(())
        })
        .await;
        for call in pair.decode.calls() {
            assert_eq!(handoff(&call).unwrap()["remote_engine_id"], pair.prefill.engine_id(), "never the old one");
        }
    }
}
