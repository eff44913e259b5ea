//! A prefill hands over only to decodes that share its KV transfer protocol: the rules, their modes, and what operators see.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod support;

use serde_json::{Value, json};
use support::*;

/// Whether a prefill and a decode pair.
enum Verdict {
    Pairs,
    /// The components that keep them apart.
    Differ(&'static [&'static str]),
}

use Verdict::{Differ, Pairs};

impl Verdict {
    fn components(&self) -> Vec<&'static str> {
        match self {
            Pairs => Vec::new(),
            Differ(components) => components.to_vec(),
        }
    }
}

/// Two legs, and what each mode says of them: `off`, `lenient`, `strict`.
struct Case {
    name: &'static str,
    prefill: (Engine, Value),
    decode: (Engine, Value),
    keys: [&'static str; 2],
    modes: [Verdict; 3],
}

fn vllm_leg(fields: Value) -> (Engine, Value) {
    (Engine::Vllm, fields)
}

fn nixl(labels: Value) -> (Engine, Value) {
    (Engine::Vllm, json!({"kv_connector": "NixlConnector", "labels": labels}))
}

fn sglang_leg(labels: Value) -> (Engine, Value) {
    (Engine::Sglang, json!({"labels": labels}))
}

fn case(
    name: &'static str,
    prefill: (Engine, Value),
    decode: (Engine, Value),
    keys: [&'static str; 2],
    modes: [Verdict; 3],
) -> Case {
    Case { name, prefill, decode, keys, modes }
}

fn cases() -> Vec<Case> {
    let explicit = |label: &str, connector: &str| {
        vllm_leg(json!({"kv_connector": connector, "labels": {"pairing_protocol": label}}))
    };
    let layout = json!({"kv_cache_dtype": "FP8", "block_size": "16", "attention_backend": "fa", "model_dtype": "bf16"});
    let other_layout =
        json!({"kv_cache_dtype": "auto", "page_size": "32", "attention_backend": "fa", "model_dtype": "bf16"});
    vec![
        case("equal", nixl(json!({})), nixl(json!({})), ["vllm/nixl/?", "vllm/nixl/?"], [Pairs, Pairs, Pairs]),
        case(
            "runtime",
            nixl(json!({})),
            sglang_leg(json!({"disaggregation_transfer_backend": "nixl"})),
            ["vllm/nixl/?", "sglang/nixl/?"],
            [Pairs, Differ(&["runtime"]), Differ(&["runtime"])],
        ),
        case(
            "transport",
            nixl(json!({})),
            vllm_leg(json!({"kv_connector": "MooncakeConnector"})),
            ["vllm/nixl/?", "vllm/mooncake/?"],
            [Pairs, Differ(&["transport"]), Differ(&["transport"])],
        ),
        case(
            "other-connector",
            vllm_leg(json!({"kv_connector": "LMCacheConnectorV1"})),
            vllm_leg(json!({"labels": {"kv_connector": "LMCacheConnectorV1"}})),
            ["vllm/lmcacheconnectorv1/?", "vllm/lmcacheconnectorv1/?"],
            [Pairs, Pairs, Pairs],
        ),
        case(
            "sglang-transport",
            sglang_leg(json!({"disaggregation_transfer_backend": "Mooncake"})),
            sglang_leg(json!({"disaggregation_transfer_backend": "nixl"})),
            ["sglang/mooncake/?", "sglang/nixl/?"],
            [Pairs, Differ(&["transport"]), Differ(&["transport"])],
        ),
        case(
            "nothing-reported",
            sglang_leg(json!({})),
            sglang_leg(json!({})),
            ["sglang/?/?", "sglang/?/?"],
            [Pairs, Pairs, Differ(&["unknown transport"])],
        ),
        case(
            "undeclared",
            vllm_leg(json!({})),
            nixl(json!({})),
            ["vllm/?/?", "vllm/nixl/?"],
            [Pairs, Pairs, Differ(&["unknown transport"])],
        ),
        case(
            "layout",
            nixl(layout.clone()),
            nixl(other_layout),
            ["vllm/nixl/dtype=fp8,page=16,attn=fa,model=bf16", "vllm/nixl/dtype=auto,page=32,attn=fa,model=bf16"],
            [Pairs, Differ(&["kv_cache_dtype", "page_size"]), Differ(&["kv_cache_dtype", "page_size"])],
        ),
        case(
            "layout-of-one-leg",
            nixl(layout),
            nixl(json!({"kv_cache_dtype": "fp8", "page_size": "16", "model_dtype": "BF16"})),
            ["vllm/nixl/dtype=fp8,page=16,attn=fa,model=bf16", "vllm/nixl/dtype=fp8,page=16,model=bf16"],
            [Pairs, Pairs, Differ(&["unknown attention_backend"])],
        ),
        case(
            "version",
            nixl(json!({"version": "0.31.0"})),
            nixl(json!({})),
            ["vllm/nixl/?", "vllm/nixl/?"],
            [Pairs, Pairs, Differ(&["version"])],
        ),
        case(
            "explicit",
            explicit("rack-7", "NixlConnector"),
            explicit("rack-7", "MooncakeConnector"),
            ["rack-7", "rack-7"],
            [Pairs, Pairs, Pairs],
        ),
        case(
            "explicit-differs",
            explicit("rack-7", "NixlConnector"),
            explicit("rack-8", "NixlConnector"),
            ["rack-7", "rack-8"],
            [Pairs, Differ(&["pairing_protocol"]), Differ(&["pairing_protocol"])],
        ),
        case(
            "explicit-other-runtime",
            explicit("rack-7", "NixlConnector"),
            sglang_leg(json!({"pairing_protocol": "rack-7"})),
            ["rack-7", "rack-7"],
            [Pairs, Differ(&["runtime"]), Differ(&["runtime"])],
        ),
        case(
            "explicit-by-field",
            vllm_leg(json!({"pairing_protocol": "rack-7"})),
            explicit("rack-7", "NixlConnector"),
            ["rack-7", "rack-7"],
            [Pairs, Pairs, Pairs],
        ),
        case(
            "the-label-wins",
            vllm_leg(json!({"pairing_protocol": "rack-8", "labels": {"pairing_protocol": "rack-7"}})),
            explicit("rack-8", "NixlConnector"),
            ["rack-7", "rack-8"],
            [Pairs, Differ(&["pairing_protocol"]), Differ(&["pairing_protocol"])],
        ),
        case(
            "one-sided",
            explicit("rack-7", "NixlConnector"),
            nixl(json!({})),
            ["rack-7", "vllm/nixl/?"],
            [Pairs, Pairs, Differ(&["pairing_protocol"])],
        ),
        case(
            "one-sided-differs",
            explicit("rack-7", "NixlConnector"),
            vllm_leg(json!({"kv_connector": "MooncakeConnector"})),
            ["rack-7", "vllm/mooncake/?"],
            [Pairs, Differ(&["transport"]), Differ(&["pairing_protocol"])],
        ),
        case(
            "moriio-modes",
            vllm_leg(json!({"kv_connector": "MoRIIOConnector", "labels": {"moriio_mode": "read"}})),
            vllm_leg(json!({"kv_connector": "MoRIIOConnector", "labels": {"moriio_mode": "WRITE"}})),
            ["vllm/moriio-read/?", "vllm/moriio-write/?"],
            [Pairs, Differ(&["transport"]), Differ(&["transport"])],
        ),
    ]
}

/// An engine whose generation requests are all answered 200 at once: pairing is tested, not the transfer.
async fn leg(engine: Engine, role: Role, model: &str) -> MockEngine {
    let engine = MockEngine::builder().engine(engine).role(role).model(model).start().await.unwrap();
    engine.set_fault(Fault::generation().status(200, "{}"));
    engine
}

async fn ask(smg: &Smg, model: &str) -> reqwest::Response {
    smg.post_as(model, "/v1/chat/completions", &json!({"model": model, "messages": [], "max_tokens": 1})).await
}

/// Workers by URL, as `GET /workers` shows their pairing key.
async fn shown_key(smg: &Smg, id: &str) -> String {
    smg.get_json(&format!("/workers/{id}")).await["pd_pairing"].as_str().unwrap().to_owned()
}

/// What the matrix says of the one pair of a model. A registration of either leg, asked about beforehand, is told the same.
async fn shown_reasons(smg: &Smg, specs: &[Value; 2], model: &str) -> Vec<String> {
    let cell = |matrix: &Value| {
        assert_eq!((&matrix["total"], &matrix["models"][0]["model"]), (&json!(1), &json!(model)), "{matrix}");
        let cell = &matrix["cells"][0];
        let reasons = cell["reasons"].as_array().cloned().unwrap_or_default();
        assert_eq!(cell["pairs"], json!(reasons.is_empty()), "{cell}");
        assert_eq!([&cell["prefill"]["url"], &cell["decode"]["url"]], [&specs[0]["url"], &specs[1]["url"]]);
        reasons.iter().map(|reason| reason["component"].as_str().unwrap().to_owned()).collect::<Vec<_>>()
    };
    let shown = cell(&smg.get_json(&format!("/fleet/pairing?model={model}")).await);
    for spec in specs {
        let asked = smg.post(&format!("/fleet/pairing/explain?model={model}"), spec).await;
        assert_eq!(asked.status(), 200);
        assert_eq!(cell(&asked.json().await.unwrap()), shown, "{spec}");
    }
    shown
}

#[tokio::test]
async fn each_rule_keeps_legs_apart_as_its_mode_says() {
    let smg = Smg::launch(&[]).await;
    for case in cases() {
        let model = case.name;
        let prefill = leg(case.prefill.0, Role::Prefill, model).await;
        let decode = leg(case.decode.0, Role::Decode, model).await;
        let specs = [spec_with(&prefill, "prefill", case.prefill.1), spec_with(&decode, "decode", case.decode.1)];
        let (prefill_id, decode_id) = tokio::join!(smg.register(&specs[0]), smg.register(&specs[1]));
        assert_eq!([shown_key(&smg, &prefill_id).await, shown_key(&smg, &decode_id).await], case.keys, "{model}");
        for (mode, verdict) in ["off", "lenient", "strict"].into_iter().zip(case.modes) {
            smg.set_policy(model, &json!({"pairing_mode": mode})).await;
            assert_eq!(shown_reasons(&smg, &specs, model).await, verdict.components(), "{model} under {mode}");
            let before = decode.generation_count() + prefill.generation_count();
            let response = ask(&smg, model).await;
            let (status, code) = (response.status().as_u16(), response.headers().get("x-smg-error-code").cloned());
            let contacted = decode.generation_count() + prefill.generation_count() - before;
            match verdict {
                // MoRI-IO engines pair by their own rules, and their pairs are refused afterwards.
                Pairs if model.starts_with("moriio") => assert_eq!(code.unwrap(), "moriio_pair_misconfigured"),
                Pairs => assert_eq!((status, contacted), (200, 2), "{model} under {mode}"),
                Differ(components) => {
                    assert_eq!((status, contacted), (503, 0), "{model} under {mode}");
                    assert_eq!(code.unwrap(), "no_compatible_pd_pair");
                    let body: Value = response.json().await.unwrap();
                    let message = body["error"]["message"].as_str().unwrap();
                    let [prefill, decode] = case.keys;
                    let mismatch =
                        format!("(mismatch on {components:?}; prefill: [{prefill:?}], decode: [{decode:?}])");
                    assert!(message.contains(&mismatch), "{model} under {mode}: {message}");
                }
            }
        }
    }
}

#[tokio::test]
async fn an_incompatible_fleet_is_refused_at_once_and_said_in_the_log() {
    let smg = Smg::launch(&["--retry-initial-backoff-ms", "5000"]).await;
    let (prefill, decode) = (leg(Engine::Vllm, Role::Prefill, "m").await, leg(Engine::Vllm, Role::Decode, "m").await);
    smg.register(&spec_with(&prefill, "prefill", json!({"kv_connector": "NixlConnector"}))).await;
    smg.register(&spec_with(&decode, "decode", json!({"kv_connector": "MooncakeConnector"}))).await;
    let response = ask(&smg, "m").await;
    assert_eq!(response.status(), 503);
    assert!(!response.headers().contains_key("retry-after"), "waiting changes nothing");
    let decision = smg.decision("m").await;
    assert_eq!(decision["attempts"].as_array().unwrap().len(), 1);
    assert_eq!(decision["error_code"], "no_compatible_pd_pair");
    assert_eq!(smg.metric("smg_worker_retries_total", &[]).await, 0.0);
    smg.logged(&["WARN", "transport", "vllm/nixl/?", "vllm/mooncake/?"]).await;
    smg.until_idle().await;
}

#[tokio::test]
async fn a_prefill_without_a_compatible_decode_gets_nothing_while_others_can_pair() {
    let smg = Smg::launch(&["--drain-settle-secs", "0"]).await;
    let nixl = leg(Engine::Vllm, Role::Prefill, "m").await;
    let mooncake = leg(Engine::Vllm, Role::Prefill, "m").await;
    let decode = leg(Engine::Vllm, Role::Decode, "m").await;
    smg.register(&spec_with(&nixl, "prefill", json!({"kv_connector": "NixlConnector"}))).await;
    let id = smg.register(&spec_with(&mooncake, "prefill", json!({"kv_connector": "MooncakeConnector"}))).await;
    smg.register(&spec_with(&decode, "decode", json!({"kv_connector": "MooncakeConnector"}))).await;
    for _ in 0..100 {
        assert_eq!(ask(&smg, "m").await.status(), 200);
    }
    assert_eq!([&nixl, &mooncake, &decode].map(MockEngine::generation_count), [0, 100, 100]);
    smg.remove(&id).await;
    let message = eventually("no pair is left", || async {
        let response = ask(&smg, "m").await;
        (response.headers()["x-smg-error-code"] == "no_compatible_pd_pair").then_some(response)
    })
    .await;
    assert_eq!(message.status(), 503);
    let message = message.text().await.unwrap();
    assert!(["transport", "vllm/nixl/?", "vllm/mooncake/?"].iter().all(|part| message.contains(part)), "{message}");
    smg.set_policy("default", &json!({"pairing_mode": "off"})).await;
    assert_eq!(ask(&smg, "m").await.status(), 200);
    assert_eq!((nixl.generation_count(), mooncake.generation_count()), (1, 100));
}

#[tokio::test]
async fn pairs_follow_the_workers_that_join_and_leave() {
    let smg = Smg::launch(&["--drain-settle-secs", "0"]).await;
    let prefill = leg(Engine::Vllm, Role::Prefill, "m").await;
    let (fits, differs) = (leg(Engine::Vllm, Role::Decode, "m").await, leg(Engine::Vllm, Role::Decode, "m").await);
    smg.register(&spec_with(&prefill, "prefill", json!({"kv_connector": "NixlConnector"}))).await;
    smg.register(&spec_with(&differs, "decode", json!({"kv_connector": "MooncakeConnector"}))).await;
    assert_eq!(ask(&smg, "m").await.headers()["x-smg-error-code"], "no_compatible_pd_pair");
    let id = smg.register(&spec_with(&fits, "decode", json!({"kv_connector": "NixlConnector"}))).await;
    for _ in 0..3 {
        assert_eq!(ask(&smg, "m").await.status(), 200);
    }
    assert_eq!((fits.generation_count(), differs.generation_count()), (3, 0));
    smg.remove(&id).await;
    eventually("the pair is gone", || async {
        (ask(&smg, "m").await.headers().get("x-smg-error-code")? == "no_compatible_pd_pair").then_some(())
    })
    .await;
}

#[tokio::test]
async fn a_compatible_decode_that_is_down_is_missing_rather_than_incompatible() {
    let smg = Smg::launch(&["--disable-retries"]).await;
    let prefill = leg(Engine::Vllm, Role::Prefill, "m").await;
    let (fits, differs) = (leg(Engine::Vllm, Role::Decode, "m").await, leg(Engine::Vllm, Role::Decode, "m").await);
    smg.register(&spec_with(&prefill, "prefill", json!({"kv_connector": "NixlConnector"}))).await;
    smg.register(&spec_with(&differs, "decode", json!({"kv_connector": "MooncakeConnector"}))).await;
    smg.register(&spec_with(&fits, "decode", json!({"kv_connector": "NixlConnector"}))).await;
    fits.stop().await;
    assert_eq!(ask(&smg, "m").await.headers()["x-smg-error-code"], "decode_request_failed");
    let response = ask(&smg, "m").await;
    assert_eq!(response.status(), 503);
    assert_eq!(response.headers()["x-smg-error-code"], "no_available_workers");
    assert_eq!(response.headers()["retry-after"], "1");
    assert!(response.text().await.unwrap().contains("decode"));
}

#[tokio::test]
async fn a_models_document_overrides_the_fleets_pairing_mode() {
    let smg = Smg::launch(&["--pd-pairing-mode", "strict"]).await;
    let mut engines = Vec::new();
    for model in ["one", "two"] {
        for (role, name) in [(Role::Prefill, "prefill"), (Role::Decode, "decode")] {
            let engine = leg(Engine::Sglang, role, model).await;
            smg.register(&spec(&engine, name)).await;
            engines.push(engine);
        }
    }
    for model in ["one", "two"] {
        assert_eq!(ask(&smg, model).await.headers()["x-smg-error-code"], "no_compatible_pd_pair");
    }
    smg.set_policy("two", &json!({"pairing_mode": "lenient"})).await;
    assert_eq!(ask(&smg, "one").await.status(), 503);
    assert_eq!(ask(&smg, "two").await.status(), 200);
    let deleted = smg.client.delete(format!("{}/fleet/policies/two", smg.url)).send().await.unwrap();
    assert_eq!(deleted.status(), 204);
    assert_eq!(ask(&smg, "two").await.status(), 503);
}

#[tokio::test]
async fn asking_what_if_registers_nothing_and_the_answer_says_what_differs() {
    let smg = Smg::launch(&[]).await;
    let decode = leg(Engine::Vllm, Role::Decode, "m").await;
    smg.register(&spec_with(&decode, "decode", json!({"kv_connector": "NixlConnector"}))).await;
    let mut hypothetical = json!({"url": "http://not-there:1", "worker_type": "prefill", "runtime_type": "vllm"});
    hypothetical["kv_connector"] = json!("MooncakeConnector");
    let explain = async |spec: &Value| {
        let response = smg.post("/fleet/pairing/explain", spec).await;
        (response.status().as_u16(), response.json::<Value>().await.unwrap())
    };
    let (status, answer) = explain(&hypothetical).await;
    assert_eq!((status, &answer["facts_from"]), (200, &json!("spec")));
    assert_eq!(answer["worker"], json!({"url": "http://not-there:1", "pd_pairing": "vllm/mooncake/?"}));
    let reasons = json!([{"component": "transport", "prefill": "mooncake", "decode": "nixl"}]);
    assert_eq!(answer["cells"][0]["reasons"], reasons);
    hypothetical["kv_connector"] = json!("NixlConnector");
    assert_eq!(explain(&hypothetical).await.1["models"][0]["pairs"], 1);
    assert_eq!(smg.get_json("/workers").await["total"], 1);
    for (change, said) in [
        (json!({"worker_type": "regular"}), "pairs with nobody"),
        (json!({"url": "nonsense"}), "invalid url"),
        (json!({"labels": {"dp_size": 7}}), "invalid JSON"),
    ] {
        let mut wrong = hypothetical.clone();
        wrong.as_object_mut().unwrap().extend(change.as_object().unwrap().clone());
        let (status, answer) = explain(&wrong).await;
        assert_eq!((status, &answer["code"]), (400, &json!("BAD_REQUEST")), "{answer}");
        assert!(answer["error"].as_str().unwrap().contains(said), "{answer}");
    }
    let refused = smg.get("/fleet/pairing?limit=many").await;
    assert_eq!(refused.status(), 400);
}

#[tokio::test]
async fn a_gateway_without_control_plane_answers_about_pairs_from_its_snapshot() {
    let directory = tempfile::tempdir().unwrap();
    let port = free_port();
    let mut plane = Smg::controlplane(directory.path(), port, &[]).await;
    let gateway = Smg::gateway(&format!("127.0.0.1:{port}"), &[]).await;
    let (prefill, decode) = (leg(Engine::Vllm, Role::Prefill, "m").await, leg(Engine::Vllm, Role::Decode, "m").await);
    let prefill_spec = spec_with(&prefill, "prefill", json!({"kv_connector": "NixlConnector"}));
    gateway.register(&prefill_spec).await;
    gateway.register(&spec_with(&decode, "decode", json!({"kv_connector": "MooncakeConnector"}))).await;
    let with = gateway.get_json("/fleet/pairing").await;
    let explained: Value = gateway.post("/fleet/pairing/explain", &prefill_spec).await.json().await.unwrap();
    plane.kill();
    let without = gateway.get("/fleet/pairing").await;
    assert!(without.headers().contains_key("x-smg-stale"));
    assert_eq!(without.json::<Value>().await.unwrap(), with);
    assert_eq!(with["models"][0]["reasons"], json!({"transport": 1}));
    let again = gateway.post("/fleet/pairing/explain", &prefill_spec).await;
    assert!(again.headers().contains_key("x-smg-stale"));
    assert_eq!(again.json::<Value>().await.unwrap(), explained);
    assert_eq!(gateway.get("/fleet/pairing?pairs=7").await.status(), 400);
}
