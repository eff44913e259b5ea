//! Data-parallel ranks: each is a worker of its own, every leg says which one it is for, and the rank with the fewest tokens may be taken.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod support;

use std::collections::BTreeSet;

use reqwest::StatusCode;
use serde_json::{Value, json};
use support::*;

const CHAT: &str = "/v1/chat/completions";
const RANK: &str = "x-data-parallel-rank";

#[tokio::test]
async fn each_data_parallel_rank_is_a_worker_and_its_legs_carry_it() {
    let engine = |role| MockEngine::builder().engine(Engine::Sglang).role(role).model(MODEL).dp_size(2).start();
    let (prefill, decode) = (engine(Role::Prefill).await.unwrap(), engine(Role::Decode).await.unwrap());
    let smg = Smg::launch(&["--dp-aware", "--policy", "round_robin"]).await;
    let (_, engine_id) = smg.register_pair(&prefill, &decode).await;
    let list = smg.get_json("/workers").await;
    let workers = list["workers"].as_array().unwrap();
    let urls: BTreeSet<&str> = workers.iter().map(|worker| worker["url"].as_str().unwrap()).collect();
    let expected: BTreeSet<String> =
        [&prefill, &decode].iter().flat_map(|engine| (0..2).map(|rank| format!("{}@{rank}", engine.url()))).collect();
    assert_eq!(urls, expected.iter().map(String::as_str).collect());
    let rank = workers.iter().find(|worker| worker["url"] == format!("{}@1", decode.url())).unwrap();
    assert_eq!(
        (&rank["dp_base_url"], &rank["dp_rank"], &rank["dp_size"]),
        (&json!(decode.url()), &json!(1), &json!(2))
    );

    let mut routed = BTreeSet::new();
    for _ in 0..8 {
        let response = smg.post(CHAT, &chat()).await;
        assert_eq!(response.status(), 200);
        routed.insert(response.headers()["x-smg-routed-worker-id"].to_str().unwrap().to_owned());
    }
    assert_eq!(routed, (0..2).map(|rank| format!("{}@{rank}", decode.url())).collect());
    for (prefill_leg, decode_leg) in prefill.generations().iter().zip(&decode.generations()) {
        let (prefill_leg, decode_leg) = (prefill_leg.json(), decode_leg.json());
        assert!(
            prefill_leg["routed_dp_rank"].as_u64().unwrap() < 2 && decode_leg["routed_dp_rank"].as_u64().unwrap() < 2
        );
        assert_eq!(decode_leg["disagg_prefill_dp_rank"], prefill_leg["routed_dp_rank"]);
        assert_eq!(decode_leg["bootstrap_room"], prefill_leg["bootstrap_room"]);
    }

    // What is several workers cannot be replaced as one.
    let replaced = smg.client.put(format!("{}/workers/{engine_id}", smg.url)).json(&spec(&decode, "decode"));
    let refused = replaced.send().await.unwrap();
    assert_eq!(refused.status(), StatusCode::BAD_REQUEST);
    let error: Value = refused.json().await.unwrap();
    assert_eq!(error["code"], "BAD_REQUEST", "{error}");

    // A rank cannot go alone; its engine goes whole.
    let rank_id = rank["id"].as_str().unwrap();
    assert_eq!(smg.get_json(&format!("/workers/{rank_id}")).await["url"], rank["url"]);
    let refused = smg.client.delete(format!("{}/workers/{rank_id}", smg.url)).send().await.unwrap();
    assert_eq!(refused.status(), StatusCode::BAD_REQUEST);
    assert!(refused.text().await.unwrap().contains(&engine_id));
    smg.set_policy("default", &json!({"dp_aware": true, "health": {"drain_settle_secs": 1}})).await;
    smg.remove(&engine_id).await;
    assert_eq!(smg.get_json("/workers").await["total"], 2);
    smg.until_idle().await;
}

#[tokio::test]
async fn a_mooncake_prefill_computes_on_the_rank_whose_engine_id_is_minted() {
    let prefill = MockEngine::builder().engine(Engine::Vllm).role(Role::Prefill).connector(Connector::Mooncake);
    let prefill = prefill.model(MODEL).engine_id("E").dp_size(2).start().await.unwrap();
    let decode = vllm(Role::Decode, Connector::Mooncake).await;
    let smg = Smg::launch(&["--dp-aware", "--policy", "round_robin", "--disable-retries"]).await;
    let declared = json!({"kv_connector": "MooncakeConnector", "kv_engine_id": "E", "labels": {"dp_size": "2"}});
    smg.register(&spec_with(&prefill, "prefill", declared)).await;
    smg.register(&spec_with(&decode, "decode", json!({"kv_connector": "MooncakeConnector"}))).await;
    for _ in 0..4 {
        assert_eq!(smg.post(CHAT, &chat()).await.status(), 200);
    }
    let legs = |engine: &MockEngine| engine.generations();
    let minted: Vec<String> = legs(&decode)
        .iter()
        .map(|leg| leg.json()["kv_transfer_params"]["remote_engine_id"].as_str().unwrap().to_owned())
        .collect();
    assert_eq!(minted.iter().map(String::as_str).collect::<BTreeSet<_>>(), ["E_dp0", "E_dp1"].into());
    let computed: Vec<String> = legs(&prefill).iter().map(|leg| format!("E_dp{}", leg.header(RANK).unwrap())).collect();
    assert_eq!(computed, minted);
    assert!(legs(&decode).iter().all(|leg| leg.header(RANK).is_none()), "a worker of one rank names none");
    assert_eq!(decode.local_prompt_tokens(), 0);
    assert!(decode.external_prompt_tokens() > 0);
}

#[tokio::test]
async fn vllm_legs_name_their_rank_in_the_header_that_the_engine_reads() {
    let (prefill, decode) = (vllm(Role::Prefill, Connector::Nixl).await, vllm(Role::Decode, Connector::Nixl).await);
    let smg = Smg::launch(&[]).await;
    let pinned = |rank: &str| json!({"kv_connector": "NixlConnector", "labels": {"dp_rank": rank}});
    smg.register(&spec_with(&prefill, "prefill", pinned("1"))).await;
    smg.register(&spec_with(&decode, "decode", pinned("2"))).await;
    // A client has no say in it.
    let asked = smg.client.post(format!("{}{CHAT}", smg.url)).header(RANK, "7").json(&chat());
    assert_eq!(asked.send().await.unwrap().status(), 200);
    for (engine, rank) in [(&prefill, "1"), (&decode, "2")] {
        let leg = engine.generations().remove(0);
        assert_eq!(leg.header_values(RANK).collect::<Vec<_>>(), [rank]);
        assert!(leg.json().get("routed_dp_rank").is_none());
    }
    let regular = MockEngine::builder().engine(Engine::Vllm).model("alone").start().await.unwrap();
    smg.register(&spec_with(&regular, "regular", json!({"labels": {"dp_rank": "3"}}))).await;
    let mut body = chat();
    body["model"] = json!("alone");
    assert_eq!(smg.post(CHAT, &body).await.status(), 200);
    let leg = regular.generations().remove(0);
    assert_eq!((leg.header(RANK), &leg.json()["data_parallel_rank"]), (Some("3"), &json!(3)));
}

/// Ranks of an engine's legs, by the field that carries them.
fn ranks(engine: &MockEngine) -> Vec<u64> {
    engine.generations().iter().map(|leg| leg.json()["routed_dp_rank"].as_u64().unwrap()).collect()
}

#[tokio::test]
async fn the_rank_with_the_fewest_tokens_is_taken_where_operators_ask_for_it() {
    let engine = |role| MockEngine::builder().engine(Engine::Sglang).role(role).model(MODEL).dp_size(2);
    let prefill = engine(Role::Prefill).start().await.unwrap();
    let rank = |rank: u64, tokens: u64| json!({"dp_rank": rank, "num_running_reqs": 0, "num_waiting_reqs": 0, "num_used_tokens": tokens, "token_usage": 0.1});
    let report = json!({"loads": [rank(0, 5000), rank(1, 100)]}).to_string();
    let decode = engine(Role::Decode).override_path("/v1/loads", 200, report).start().await.unwrap();
    // The policy alone would keep the key on one rank of each engine, and no report comes in between.
    let flags = [
        "--dp-aware",
        "--dp-minimum-tokens-scheduler",
        "--policy",
        "consistent_hashing",
        "--load-monitor-interval",
        "3600",
    ];
    let smg = Smg::launch(&flags).await;
    smg.register_pair(&prefill, &decode).await;
    eventually("every rank has reported", || async {
        (samples(&smg.metrics().await, "smg_engine_running_requests", &[]).len() == 4).then_some(())
    })
    .await;
    let ask = async |text: &str| {
        let body = json!({"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": 2});
        let asked = smg.client.post(format!("{}{CHAT}", smg.url)).header("x-smg-routing-key", "k").json(&body);
        assert_eq!(asked.send().await.unwrap().status(), 200);
    };
    ask(&"word ".repeat(100)).await;
    for _ in 0..10 {
        ask("hi").await;
    }
    let of_prefill = ranks(&prefill);
    assert!(of_prefill[1..].iter().all(|rank| *rank == 1 - of_prefill[0]), "{of_prefill:?}");
    assert_eq!(ranks(&decode), [1; 11]);
    // Without the flag the key stays.
    smg.set_policy("default", &json!({"policy": "consistent_hashing", "dp_aware": true})).await;
    prefill.clear_requests();
    for _ in 0..4 {
        ask("hi").await;
    }
    assert_eq!(ranks(&prefill), [ranks(&prefill)[0]; 4]);
}
