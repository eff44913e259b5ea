//! Each engine and KV connector gets the handoff it expects: what the legs carry, what the decode engine computes, what is counted.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod support;

use mock_engine::Recorded;
use serde_json::{Value, json};
use support::*;

const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";

/// A vLLM prefill and decode, registered with these fields.
async fn vllm_pair(connectors: [Connector; 2], prefill: Value, decode: Value) -> (Smg, MockEngine, MockEngine) {
    let [prefill_connector, decode_connector] = connectors;
    let (p, d) = (vllm(Role::Prefill, prefill_connector).await, vllm(Role::Decode, decode_connector).await);
    let smg = Smg::launch(&["--disable-retries"]).await;
    smg.register(&spec_with(&p, "prefill", prefill)).await;
    smg.register(&spec_with(&d, "decode", decode)).await;
    (smg, p, d)
}

/// A vLLM prefill and decode without a connector, of a model of their own, both registered with these fields.
async fn model_pair(smg: &Smg, model: &str, fields: &Value) -> [MockEngine; 2] {
    let start = |role| MockEngine::builder().engine(Engine::Vllm).role(role).model(model).start();
    let pair = [start(Role::Prefill).await.unwrap(), start(Role::Decode).await.unwrap()];
    for (engine, worker_type) in pair.iter().zip(["prefill", "decode"]) {
        smg.register(&spec_with(engine, worker_type, fields.clone())).await;
    }
    pair
}

fn nixl() -> Value {
    json!({"kv_connector": "NixlConnector"})
}

/// The text of a completion that one engine gives alone.
async fn alone(path: &str, body: &Value) -> Value {
    let single = vllm(Role::Regular, Connector::None).await;
    let answer = reqwest::Client::new().post(format!("{}{path}", single.url())).json(body).send().await.unwrap();
    answer.json::<Value>().await.unwrap()["choices"].clone()
}

async fn served(smg: &Smg, path: &str, body: &Value) -> Value {
    let response = smg.post(path, body).await;
    assert_eq!(response.status(), 200, "{}", response.text().await.unwrap());
    response.json().await.unwrap()
}

/// The only generation request an engine got.
fn only(engine: &MockEngine) -> Recorded {
    let mut all = engine.generations();
    assert_eq!(all.len(), 1);
    all.remove(0)
}

fn text(request: &Recorded) -> String {
    String::from_utf8(request.body.to_vec()).unwrap()
}

/// Prompt tokens by source, as the engine's own metrics say.
async fn prompt_tokens(engine: &MockEngine, source: &str) -> f64 {
    let metrics = reqwest::get(format!("{}/metrics", engine.url())).await.unwrap().text().await.unwrap();
    samples(&metrics, "vllm:prompt_tokens_by_source_total", &[("source", source)]).into_values().sum()
}

async fn mode(smg: &Smg, mode: &str) -> f64 {
    smg.metric("smg_pd_kv_connector_mode_total", &[("mode", mode)]).await
}

async fn failures(smg: &Smg) -> f64 {
    smg.metric("smg_pd_kv_transfer_failures_total", &[]).await
}

#[tokio::test]
async fn a_nixl_pair_moves_the_kv_and_answers_what_one_engine_answers() {
    let (smg, prefill, decode) = vllm_pair([Connector::Nixl, Connector::Nixl], nixl(), nixl()).await;
    for (path, body) in [(CHAT, chat()), (COMPLETIONS, completion())] {
        assert_eq!(served(&smg, path, &body).await["choices"], alone(path, &body).await);
    }
    let leg = prefill.generations()[0].json();
    assert_eq!(leg["kv_transfer_params"], json!({"do_remote_decode": true, "do_remote_prefill": false}));
    assert_eq!((&leg["max_tokens"], &leg["stream"]), (&json!(1), &json!(false)));
    assert_eq!(prompt_tokens(&decode, "local_compute").await, 0.0);
    assert!(prompt_tokens(&decode, "external_kv_transfer").await > 0.0);
    assert_eq!(prefill.held_kv(), 0);
    assert_eq!((mode(&smg, "nixl").await, failures(&smg).await), (2.0, 0.0));
}

#[tokio::test]
async fn nixl_params_reach_decode_byte_for_byte() {
    let (smg, prefill, decode) = vllm_pair([Connector::None, Connector::None], nixl(), nixl()).await;
    let params = r#"{ "remote_block_ids":[[1, 2],[ ]] , "x":1.0e5,"big":123456789012345678901234567890,"u":"\u00e9\/é", "dup":1,"dup":2,"nil":null }"#;
    let answer = format!(
        r#"{{"id":"a","choices":[{{"kv_transfer_params":7}}], "kv_transfer_params" : {params} ,"usage":null}}"#
    );
    prefill.set_fault(Fault::generation().status(200, answer));
    served(&smg, COMPLETIONS, &completion()).await;
    assert!(text(&only(&decode)).contains(&format!(r#""kv_transfer_params":{params}"#)), "{}", text(&only(&decode)));
}

#[tokio::test]
async fn a_nixl_prefill_that_hands_nothing_over_is_counted_and_decode_recomputes() {
    // The engine runs without a connector, though it was registered with one.
    let (smg, prefill, decode) = vllm_pair([Connector::None, Connector::Nixl], nixl(), nixl()).await;
    let expected = alone(COMPLETIONS, &completion()).await;
    assert_eq!(served(&smg, COMPLETIONS, &completion()).await["choices"], expected);
    assert_eq!(failures(&smg).await, 1.0);
    assert!(only(&decode).json().get("kv_transfer_params").is_none());
    assert!(prompt_tokens(&decode, "local_compute").await > 0.0);
    for (count, answer) in
        [(2.0, r#"{"kv_transfer_params":null}"#), (3.0, r#"{"kv_transfer_params":[]}"#), (4.0, "not json")]
    {
        prefill.set_fault(Fault::generation().status(200, answer).times(1));
        assert_eq!(served(&smg, COMPLETIONS, &completion()).await["choices"], expected);
        assert_eq!(failures(&smg).await, count, "{answer}");
    }
    smg.logged(&["returned no kv_transfer_params"]).await;
    assert_eq!(mode(&smg, "nixl").await, 4.0);
}

#[tokio::test]
async fn a_mooncake_pair_meets_through_an_id_minted_for_each_request() {
    let (p, d) = (vllm(Role::Prefill, Connector::Mooncake).await, vllm(Role::Decode, Connector::Mooncake).await);
    let smg = Smg::launch(&["--disable-retries"]).await;
    let declared = json!({"kv_connector": "MooncakeConnector", "kv_engine_id": p.engine_id()});
    smg.register(&spec_with(&p, "prefill", declared)).await;
    smg.register(&spec_with(&d, "decode", json!({"kv_connector": "MooncakeConnector"}))).await;
    for _ in 0..2 {
        assert_eq!(served(&smg, CHAT, &chat()).await["choices"], alone(CHAT, &chat()).await);
    }
    let (prefills, decodes) = (p.generations(), d.generations());
    let mut ids = Vec::new();
    for (prefill, decode) in prefills.iter().zip(&decodes) {
        let id = prefill.json()["kv_transfer_params"]["transfer_id"].as_str().unwrap().to_owned();
        let tag = json!({"do_remote_decode": true, "do_remote_prefill": false, "transfer_id": id});
        assert_eq!(prefill.json()["kv_transfer_params"], tag);
        let address = format!("http://127.0.0.1:{}", p.bootstrap_port().unwrap());
        let params = json!({"do_remote_decode": false, "do_remote_prefill": true, "transfer_id": id,
            "remote_engine_id": p.engine_id(), "remote_bootstrap_addr": address});
        assert_eq!(decode.json()["kv_transfer_params"], params);
        ids.push(id);
    }
    assert_ne!(ids[0], ids[1]);
    assert_eq!(prompt_tokens(&d, "local_compute").await, 0.0);
    assert!(prompt_tokens(&d, "external_kv_transfer").await > 0.0);
    assert_eq!((mode(&smg, "mooncake").await, failures(&smg).await), (2.0, 0.0));
}

#[tokio::test]
async fn a_registered_engine_id_is_kept_and_a_new_one_counts_from_the_next_request() {
    let declared = json!({"kv_connector": "MooncakeConnector", "kv_engine_id": "E1"});
    let (p, d) = (vllm(Role::Prefill, Connector::Mooncake).await, vllm(Role::Decode, Connector::Mooncake).await);
    let smg = Smg::launch(&[]).await;
    let mut registered = spec_with(&p, "prefill", declared);
    let id = smg.register(&registered).await;
    smg.register(&spec_with(&d, "decode", json!({"kv_connector": "MooncakeConnector"}))).await;
    [&p, &d].into_iter().for_each(|engine| engine.set_fault(anything()));
    let named = async || {
        served(&smg, CHAT, &chat()).await;
        d.generations().pop().unwrap().json()["kv_transfer_params"]["remote_engine_id"].clone()
    };
    assert_eq!(named().await, "E1", "what the operator said, not what the engine calls itself");
    registered["kv_engine_id"] = json!("E2");
    let path = format!("/workers/{id}");
    let put = smg.client.put(format!("{}{path}", smg.url)).json(&registered).send().await.unwrap();
    assert_eq!(put.status(), 202);
    eventually("the update is carried out", || async {
        let worker = smg.get_json(&path).await;
        (worker["kv_engine_id"] == "E2" && worker["job_status"].is_null()).then_some(())
    })
    .await;
    assert_eq!(named().await, "E2");
}

#[tokio::test]
async fn a_mooncake_prefill_without_a_bootstrap_port_is_addressed_on_8998() {
    let declared = json!({"kv_connector": "MooncakeConnector", "kv_engine_id": "engine-7"});
    let decode_spec = json!({"kv_connector": "MooncakeConnector"});
    let (smg, _prefill, decode) = vllm_pair([Connector::None, Connector::None], declared, decode_spec).await;
    served(&smg, CHAT, &chat()).await;
    let params = only(&decode).json()["kv_transfer_params"].clone();
    assert_eq!(params["remote_bootstrap_addr"], "http://127.0.0.1:8998");
    assert_eq!(params["remote_engine_id"], "engine-7");
}

#[tokio::test]
async fn the_engine_id_of_a_mooncake_prefill_is_learned_from_its_bootstrap_server_and_anew_after_each_start() {
    let declared = json!({"kv_connector": "MooncakeConnector", "runtime_type": "vllm"});
    let (p, d) = (vllm(Role::Prefill, Connector::Mooncake).await, vllm(Role::Decode, Connector::Mooncake).await);
    // Active probes come too late to help.
    let smg = Smg::launch(&["--disable-health-check", "--disable-retries"]).await;
    let id = smg.register(&spec_with(&p, "prefill", declared.clone())).await;
    smg.register(&spec_with(&d, "decode", declared)).await;
    let worker = smg.get_json(&format!("/workers/{id}")).await;
    assert_eq!((&worker["kv_engine_id"], worker["labels"].get("kv_engine_id")), (&json!(p.engine_id()), None));
    let named = || d.generations().pop().unwrap().json()["kv_transfer_params"]["remote_engine_id"].clone();
    served(&smg, CHAT, &chat()).await;
    assert_eq!(named(), p.engine_id());
    p.stop().await;
    assert_eq!(smg.post(CHAT, &chat()).await.status(), 502);
    p.restart().await.unwrap();
    eventually("the prefill is taken back", || async { (smg.post(CHAT, &chat()).await.status() == 200).then_some(()) })
        .await;
    assert_eq!(named(), p.engine_id(), "no decode engine was told the id of the process that is gone");
    assert_eq!(d.local_prompt_tokens(), 0);
    assert_eq!(smg.get_json(&format!("/workers/{id}")).await["is_healthy"], true);
}

#[tokio::test]
async fn an_engine_id_that_the_fleet_learned_is_replaced_and_one_that_was_registered_is_warned_about() {
    let declared = json!({"kv_connector": "MooncakeConnector", "runtime_type": "vllm"});
    let (p, d) = (vllm(Role::Prefill, Connector::Mooncake).await, vllm(Role::Decode, Connector::Mooncake).await);
    let smg = Smg::launch(&["--health-check-interval-secs", "1", "--load-monitor-interval", "3600"]).await;
    let id = smg.register(&spec_with(&p, "prefill", declared.clone())).await;
    let mut registered = spec_with(&d, "prefill", declared);
    registered["kv_engine_id"] = json!("E1");
    registered["bootstrap_port"] = json!(p.bootstrap_port());
    smg.register(&registered).await;
    eventually("the difference is said", || async { smg.log().contains("another kv_engine_id").then_some(()) }).await;
    eventually("its start time is known", || async {
        (p.requests().iter().filter(|request| request.path == "/metrics").count() >= 3).then_some(())
    })
    .await;
    p.restart().await.unwrap();
    eventually("the new id is known to the fleet", || async {
        (smg.get_json(&format!("/workers/{id}")).await["kv_engine_id"] == json!(p.engine_id())).then_some(())
    })
    .await;
    let workers = smg.get_json("/workers").await["workers"].clone();
    let ids: Vec<&str> =
        workers.as_array().unwrap().iter().map(|worker| worker["kv_engine_id"].as_str().unwrap()).collect();
    assert!(ids.contains(&"E1"), "{ids:?}");
}

#[tokio::test]
async fn an_engine_id_that_changed_while_nobody_watched_is_learned_anew() {
    let declared = json!({"kv_connector": "MooncakeConnector", "runtime_type": "vllm"});
    let p = vllm(Role::Prefill, Connector::Mooncake).await;
    let directory = tempfile::tempdir().unwrap();
    let flags = ["--health-check-interval-secs", "1", "--load-monitor-interval", "3600"];
    let smg = Smg::durable(directory.path(), &flags).await;
    let id = smg.register(&spec_with(&p, "prefill", declared)).await;
    drop(smg);
    let before = p.engine_id();
    p.restart().await.unwrap();
    assert_ne!(p.engine_id(), before);
    let smg = Smg::durable(directory.path(), &flags).await;
    eventually("the new id is known to the fleet", || async {
        (smg.get_json(&format!("/workers/{id}")).await["kv_engine_id"] == json!(p.engine_id())).then_some(())
    })
    .await;
}

#[tokio::test]
async fn a_mooncake_prefill_without_an_engine_id_mints_nothing_and_decode_recomputes() {
    let declared = json!({"kv_connector": "MooncakeConnector"});
    // Nobody there could tell the id either.
    let unheard = json!({"kv_connector": "MooncakeConnector", "bootstrap_port": free_port()});
    let pair = [Connector::Mooncake, Connector::Mooncake];
    let (smg, prefill, decode) = vllm_pair(pair, unheard, declared).await;
    assert_eq!(served(&smg, CHAT, &chat()).await["choices"], alone(CHAT, &chat()).await);
    assert!(only(&prefill).json().get("kv_transfer_params").is_none());
    assert!(only(&decode).json().get("kv_transfer_params").is_none());
    assert!(prompt_tokens(&decode, "local_compute").await > 0.0);
    assert_eq!(mode(&smg, "mooncake").await, 1.0);
}

#[tokio::test]
async fn passthrough_relays_what_comes_back_or_nothing() {
    let smg = Smg::launch(&["--disable-retries"]).await;
    let expected = alone(CHAT, &chat()).await;
    for (model, connector) in [
        ("none", json!({})),
        ("other", json!({"kv_connector": "LMCacheConnectorV1"})),
        ("store", json!({"kv_connector": "MooncakeStoreConnector"})),
    ] {
        let [prefill, decode] = model_pair(&smg, model, &connector).await;
        let mut body = chat();
        body["model"] = json!(model);
        assert_eq!(served(&smg, CHAT, &body).await["choices"], expected, "{connector}");
        assert!(only(&prefill).json().get("kv_transfer_params").is_none());
        assert!(only(&decode).json().get("kv_transfer_params").is_none());
        assert!(prompt_tokens(&decode, "local_compute").await > 0.0);
        prefill.set_fault(Fault::generation().status(200, r#"{"kv_transfer_params":{ "k" :1}}"#));
        served(&smg, CHAT, &body).await;
        assert!(text(&decode.generations()[1]).contains(r#""kv_transfer_params":{ "k" :1}"#));
    }
    assert_eq!((mode(&smg, "passthrough").await, failures(&smg).await), (6.0, 0.0));
}

#[tokio::test]
async fn several_samples_skip_the_prefill_leg_and_leave_the_body_alone() {
    let smg = Smg::launch(&["--disable-retries"]).await;
    let mooncake = json!({"kv_connector": "MooncakeConnector", "kv_engine_id": "e"});
    for (connector, name) in [(nixl(), "nixl"), (mooncake, "mooncake"), (json!({}), "passthrough")] {
        let [prefill, decode] = model_pair(&smg, name, &connector).await;
        let body = format!(r#"{{ "model":"{name}", "prompt":"hi",  "n" : 2, "max_tokens":3 }}"#);
        let response = smg.post_bytes(COMPLETIONS, body.clone()).await;
        assert_eq!(response.status(), 200);
        assert_eq!(response.json::<Value>().await.unwrap()["choices"].as_array().unwrap().len(), 2);
        assert_eq!(prefill.generation_count(), 0);
        assert_eq!(text(&only(&decode)), body);
        assert_eq!(mode(&smg, name).await, 1.0);
    }
}

#[tokio::test]
async fn a_vllm_prefill_without_a_declared_connector_is_warned_about_loudly_and_once() {
    let (smg, prefill, _decode) = vllm_pair([Connector::Nixl, Connector::Nixl], json!({}), nixl()).await;
    for _ in 0..3 {
        served(&smg, CHAT, &chat()).await;
    }
    smg.logged(&["NO KV CONNECTOR IS DECLARED"]).await;
    let warnings = smg.log().lines().filter(|line| line.contains("NO KV CONNECTOR IS DECLARED")).count();
    assert_eq!(warnings, 1);
    let list = smg.get_json("/workers").await;
    for worker in list["workers"].as_array().unwrap() {
        let warned = worker["warning"].as_str().is_some_and(|warning| warning.contains("kv_connector"));
        assert_eq!(warned, worker["url"] == prefill.url());
    }
    assert_eq!(smg.metric("smg_pd_undeclared_connectors", &[]).await, 1.0);
}

#[tokio::test]
async fn a_moriio_decode_with_another_prefill_is_refused_before_any_leg_is_contacted() {
    let moriio = json!({"kv_connector": "MoRIIOConnector", "labels": {"moriio_mode": "read"}});
    let (smg, p, d) = vllm_pair([Connector::None, Connector::None], json!({}), moriio).await;
    for body in [chat(), chat_stream()] {
        let response = smg.post(CHAT, &body).await;
        assert_eq!(response.status(), 503);
        assert_eq!(response.headers()["x-smg-error-code"], "moriio_pair_misconfigured");
        assert_eq!(response.json::<Value>().await.unwrap()["error"]["code"], "moriio_pair_misconfigured");
    }
    assert_eq!((p.generation_count(), d.generation_count()), (0, 0));
    assert_eq!(failures(&smg).await, 2.0);
    smg.until_idle().await;
}

#[tokio::test]
async fn sglang_legs_meet_in_one_room_at_the_prefills_bootstrap_server() {
    let (smg, prefill, decode) = sglang_pair(&["--disable-retries"]).await;
    served(&smg, CHAT, &chat()).await;
    let (p, d) = (only(&prefill).json(), only(&decode).json());
    for leg in [&p, &d] {
        assert_eq!(leg["bootstrap_host"], "127.0.0.1");
        assert_eq!(leg["bootstrap_port"], prefill.bootstrap_port().unwrap());
        assert!(leg["bootstrap_room"].as_u64().unwrap() < 1 << 63);
    }
    assert_eq!(p["bootstrap_room"], d["bootstrap_room"]);
    assert!(decode.external_prompt_tokens() > 0);
    assert_eq!(decode.local_prompt_tokens(), 0);
    assert_eq!(mode(&smg, "passthrough").await, 0.0, "a vLLM metric");
}

#[tokio::test]
async fn sglang_batches_get_a_room_for_each_entry() {
    let (smg, prefill, decode) = sglang_pair(&["--disable-retries"]).await;
    let mut samples = chat();
    samples["n"] = json!(3);
    for (path, body, entries) in [
        (COMPLETIONS, json!({"model": "m", "prompt": ["a", "b"], "max_tokens": 2}), 2),
        (COMPLETIONS, json!({"model": "m", "prompt": ["a"], "max_tokens": 2}), 1),
        (COMPLETIONS, json!({"model": "m", "prompt": [[1, 2], [3]], "max_tokens": 2}), 2),
        ("/generate", json!({"input_ids": [[1, 2], [3]], "sampling_params": {"max_new_tokens": 2}}), 2),
        ("/generate", json!({"text": ["a", "b"], "sampling_params": {"max_new_tokens": 2}}), 2),
        (CHAT, samples, 3),
    ] {
        served(&smg, path, &body).await;
        let (p, d) = (prefill.generations().pop().unwrap().json(), decode.generations().pop().unwrap().json());
        for field in ["bootstrap_host", "bootstrap_port", "bootstrap_room"] {
            assert_eq!(p[field], d[field]);
            assert_eq!(p[field].as_array().map(Vec::len), Some(entries), "{field} of {path} {body}");
        }
        let mut rooms: Vec<u64> = p["bootstrap_room"].as_array().unwrap().iter().map(|r| r.as_u64().unwrap()).collect();
        rooms.sort_unstable();
        rooms.dedup();
        assert_eq!(rooms.len(), entries);
    }
    assert_eq!(decode.local_prompt_tokens(), 0);
}

#[tokio::test]
async fn a_missing_bootstrap_port_is_forwarded_as_null() {
    let (prefill, decode) = (sglang(Role::Prefill).await, sglang(Role::Decode).await);
    let smg = Smg::launch(&["--disable-retries"]).await;
    smg.register(&json!({"url": prefill.url(), "worker_type": "prefill"})).await;
    smg.register(&spec(&decode, "decode")).await;
    for engine in [&prefill, &decode] {
        engine.set_fault(Fault::generation().status(200, "{}"));
    }
    served(&smg, CHAT, &chat()).await;
    for engine in [&prefill, &decode] {
        assert_eq!(only(engine).json().get("bootstrap_port"), Some(&Value::Null));
    }
}

#[tokio::test]
async fn legs_name_the_data_parallel_ranks_of_their_workers() {
    let ranked = |role| MockEngine::builder().engine(Engine::Sglang).role(role).model(MODEL).dp_size(4).start();
    let (prefill, decode) = (ranked(Role::Prefill).await.unwrap(), ranked(Role::Decode).await.unwrap());
    let smg = Smg::launch(&["--disable-retries"]).await;
    smg.register(&spec_with(&prefill, "prefill", json!({"labels": {"dp_rank": "1"}}))).await;
    smg.register(&spec_with(&decode, "decode", json!({"labels": {"dp_rank": "2"}}))).await;
    served(&smg, CHAT, &chat()).await;
    let (p, d) = (only(&prefill).json(), only(&decode).json());
    assert_eq!((&p["routed_dp_rank"], p.get("disagg_prefill_dp_rank")), (&json!(1), None));
    assert_eq!((&d["routed_dp_rank"], &d["disagg_prefill_dp_rank"]), (&json!(2), &json!(1)));

    let regular = MockEngine::builder().engine(Engine::Sglang).model("alone").dp_size(4).start().await.unwrap();
    smg.register(&spec_with(&regular, "regular", json!({"labels": {"dp_rank": "3"}}))).await;
    let mut body = chat();
    body["model"] = json!("alone");
    served(&smg, CHAT, &body).await;
    assert_eq!(only(&regular).json()["data_parallel_rank"], 3);
}

#[tokio::test]
async fn several_samples_of_a_completion_are_refused_before_any_sglang_leg() {
    let (smg, prefill, decode) = sglang_pair(&[]).await;
    for (path, body) in [
        (COMPLETIONS, json!({"model": "m", "prompt": "a", "n": 2})),
        (COMPLETIONS, json!({"model": "m", "prompt": ["a", "b"], "n": 2, "stream": true})),
        ("/generate", json!({"text": "a", "sampling_params": {"n": 2}})),
    ] {
        let response = smg.post(path, &body).await;
        assert_eq!(response.status(), 400, "{body}");
        assert_eq!(response.headers()["x-smg-error-code"], "parallel_sampling_unsupported");
        let message = response.json::<Value>().await.unwrap()["error"]["message"].as_str().unwrap().to_owned();
        assert!(message.contains("gRPC"), "{message}");
    }
    assert_eq!((prefill.generation_count(), decode.generation_count()), (0, 0));
    smg.until_idle().await;
}

#[tokio::test]
async fn several_prompts_of_one_request_are_not_decoded_over_the_kv_of_the_first() {
    let (smg, prefill, decode) = nixl_pair(&[]).await;
    let single = vllm(Role::Regular, Connector::None).await;
    let body = json!({"model": MODEL, "prompt": ["one two three", "four five six seven"], "max_tokens": 8});
    let choices = |answer: Value| answer["choices"].clone();
    let alone = smg.client.post(format!("{}/v1/completions", single.url())).json(&body).send().await.unwrap();
    let paired = smg.post("/v1/completions", &body).await;
    assert_eq!(choices(paired.json().await.unwrap()), choices(alone.json().await.unwrap()));
    assert_eq!((prefill.generation_count(), decode.generation_count()), (0, 1));
}
