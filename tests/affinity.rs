//! Policies that keep like requests together or watch loads: through the real binary, per leg, per model, on several gateways.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod support;

use futures::StreamExt as _;
use reqwest::Response;
use serde_json::{Value, json};
use support::*;

const CHAT: &str = "/v1/chat/completions";

/// SGLang prefills and decodes of one model behind one gateway. They report no load: placement depends on requests alone.
struct Fleet {
    smg: Smg,
    prefills: Vec<MockEngine>,
    decodes: Vec<MockEngine>,
    /// Their ids, in the order of registration.
    ids: Vec<String>,
}

async fn engines(smg: &Smg, role: Role, worker_type: &str, count: usize) -> (Vec<MockEngine>, Vec<String>) {
    let (mut engines, mut ids) = (Vec::new(), Vec::new());
    for _ in 0..count {
        let engine = silent(role, MODEL).await;
        ids.push(smg.register(&spec(&engine, worker_type)).await);
        engines.push(engine);
    }
    (engines, ids)
}

async fn fleet(prefills: usize, decodes: usize, flags: &[&str]) -> Fleet {
    let smg = Smg::launch(flags).await;
    let (prefills, mut ids) = engines(&smg, Role::Prefill, "prefill", prefills).await;
    let (decodes, decode_ids) = engines(&smg, Role::Decode, "decode", decodes).await;
    ids.extend(decode_ids);
    Fleet { smg, prefills, decodes, ids }
}

fn prompt(text: &str) -> Value {
    json!({"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": 4})
}

/// Two kilobytes that no other seed shares.
fn unrelated(seed: u64) -> String {
    let word = |part: u64| {
        let mixed = (seed << 32 | part).wrapping_add(1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        (mixed ^ (mixed >> 29)).wrapping_mul(0xBF58_476D_1CE4_E5B9)
    };
    (0..128).map(|part| format!("{:016x}", word(part))).collect()
}

impl Fleet {
    async fn ask(&self, body: &Value, headers: &[(&str, &str)]) -> Response {
        ask(&self.smg, body, headers).await
    }

    /// Serves a request and says which prefill and which decode did.
    async fn placed(&self, body: &Value, headers: &[(&str, &str)]) -> (usize, usize) {
        let before = self.counts();
        assert_eq!(self.ask(body, headers).await.status(), 200);
        let after = self.counts();
        let grown =
            |before: &[u64], after: &[u64]| before.iter().zip(after).position(|(one, other)| one < other).unwrap();
        (grown(&before.0, &after.0), grown(&before.1, &after.1))
    }

    fn counts(&self) -> (Vec<u64>, Vec<u64>) {
        (counts(&self.prefills), counts(&self.decodes))
    }
}

fn counts(engines: &[MockEngine]) -> Vec<u64> {
    engines.iter().map(MockEngine::generation_count).collect()
}

async fn ask(smg: &Smg, body: &Value, headers: &[(&str, &str)]) -> Response {
    let mut request = smg.client.post(format!("{}{CHAT}", smg.url)).json(body);
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    let response = request.send().await.unwrap();
    let (status, headers) = (response.status(), response.headers().clone());
    // The whole body: the legs are over when this returns.
    let body = response.bytes().await.unwrap();
    let mut whole = http::Response::builder().status(status).body(body).unwrap();
    *whole.headers_mut() = headers;
    whole.into()
}

#[tokio::test]
async fn cache_aware_spreads_unrelated_prompts_and_sends_repeats_where_they_went_first() {
    let fleet = fleet(4, 1, &["--prefill-policy", "cache_aware", "--decode-policy", "random"]).await;
    let mut firsts = Vec::new();
    for seed in 0..400 {
        firsts.push(fleet.placed(&prompt(&unrelated(seed)), &[]).await.0);
    }
    let counts = counts(&fleet.prefills);
    assert!(counts.iter().all(|count| (60..=140).contains(count)), "{counts:?}");
    let mut returned = 0;
    for seed in 0..100 {
        returned += u64::from(fleet.placed(&prompt(&unrelated(seed)), &[]).await.0 == firsts[seed as usize]);
    }
    assert_eq!(returned, 100);
    let branch = async |branch| fleet.smg.metric("smg_cache_aware_policy_branch_total", &[("branch", branch)]).await;
    assert_eq!(branch("expected_wait_fallback").await, 400.0);
    assert_eq!(branch("tree_match").await, 100.0);
    assert_eq!(fleet.smg.metric("smg_cache_aware_match_ratio_count", &[]).await, 500.0);
}

#[tokio::test]
async fn cache_aware_is_what_runs_where_nothing_was_said() {
    let fleet = fleet(2, 2, &[]).await;
    let home = fleet.placed(&prompt(&unrelated(1)), &[]).await;
    for _ in 0..4 {
        assert_eq!(fleet.placed(&prompt(&unrelated(1)), &[]).await, home);
    }
    for leg in ["prefill", "decode"] {
        let labels = [("worker_type", leg), ("policy", "cache_aware"), ("model", MODEL)];
        assert_eq!(fleet.smg.metric("smg_worker_selection_total", &labels).await, 5.0);
    }
}

#[tokio::test]
async fn the_record_of_prompts_is_bounded_shown_and_forgets_removed_workers() {
    let flags = ["--prefill-policy", "cache_aware", "--max-tree-size", "65536"];
    let fleet = fleet(2, 1, &flags).await;
    for seed in 0..100 {
        assert_eq!(fleet.ask(&prompt(&unrelated(seed)), &[]).await.status(), 200);
    }
    let labels = [("model", MODEL), ("leg", "prefill"), ("policy", "cache_aware")];
    let bytes = || fleet.smg.metric("smg_policy_memory_bytes", &labels);
    let full =
        eventually("the gauge shows a full record", || async { Some(bytes().await).filter(|bytes| *bytes > 60000.0) })
            .await;
    assert!(full <= 65536.0, "{full}");
    fleet.smg.remove(&fleet.ids[0]).await;
    eventually("the record shrinks", || async { (bytes().await < full * 0.9).then_some(()) }).await;
    assert_eq!(fleet.smg.metric("smg_cache_tree_tenants", &[("model", MODEL), ("tree", "prefill")]).await, 1.0);
}

#[tokio::test]
async fn memory_stays_flat_while_prompts_never_repeat() {
    // More than ten times what the record may hold, half of it before the first look.
    let (limit, requests) = if soaks() { (64 << 20, 500_000_u64) } else { (2 << 20, 16_000) };
    let smg = Smg::launch(&["--prefill-policy", "cache_aware", "--max-tree-size", &limit.to_string()]).await;
    let mut engines = Vec::new();
    for (role, name) in [(Role::Prefill, "prefill"), (Role::Prefill, "prefill"), (Role::Decode, "decode")] {
        let engine = MockEngine::builder().engine(Engine::Sglang).role(role).model(MODEL).records(0);
        let engine = engine.start().await.unwrap();
        engine.set_fault(anything());
        smg.register(&spec(&engine, name)).await;
        engines.push(engine);
    }
    let heads: Vec<String> = (0..16).map(|head| unrelated(u64::from(u32::MAX) - head)).collect();
    // Four kilobytes, their beginning shared with some of the others.
    let mixed = |seed: u64| {
        let shared = (seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 40) as usize;
        let head = &heads[shared % heads.len()][..shared / heads.len() % 2000];
        let mut text = format!("{head}{}{}", unrelated(2 * seed), unrelated(2 * seed + 1));
        text.truncate(4096);
        text
    };
    let serve = async |seeds: std::ops::Range<u64>| {
        futures::stream::iter(seeds)
            .for_each_concurrent(16, |seed| {
                let (smg, body) = (&smg, prompt(&mixed(seed)));
                async move { assert_eq!(smg.post(CHAT, &body).await.status(), 200) }
            })
            .await;
        smg.until_idle().await;
        smg.resident_bytes()
    };
    let half = serve(0..requests / 2).await;
    let whole = serve(requests / 2..requests).await;
    assert!(half.abs_diff(whole) < half / 10, "{half} bytes after half of the prompts, {whole} after all of them");
    let labels = [("model", MODEL), ("leg", "prefill")];
    let remembered = smg.metric("smg_policy_memory_bytes", &labels).await;
    assert!(remembered > f64::from(limit) * 0.9 && remembered <= f64::from(limit), "{remembered}");
}

#[tokio::test]
async fn another_salt_is_another_prompt() {
    let fleet = fleet(4, 1, &["--prefill-policy", "cache_aware", "--decode-policy", "random"]).await;
    let mut salted = prompt(&unrelated(1));
    for salt in 0..8 {
        salted["cache_salt"] = json!(format!("salt {salt}"));
        fleet.placed(&salted, &[]).await;
    }
    let matches = fleet.smg.metric("smg_cache_aware_policy_branch_total", &[("branch", "tree_match")]).await;
    assert_eq!(matches, 0.0);
}

#[tokio::test]
async fn a_rotation_or_record_goes_on_while_other_settings_and_workers_change() {
    let fleet = fleet(4, 1, &["--prefill-policy", "cache_aware", "--decode-policy", "random"]).await;
    let home = fleet.placed(&prompt(&unrelated(7)), &[]).await.0;
    let policies =
        json!({"prefill_policy": "cache_aware", "decode_policy": "random", "least_load": {"mean_prefill_tokens": 5}});
    fleet.smg.set_policy("default", &policies).await;
    let (_more, _) = engines(&fleet.smg, Role::Prefill, "prefill", 1).await;
    for _ in 0..3 {
        assert_eq!(fleet.placed(&prompt(&unrelated(7)), &[]).await.0, home);
    }
    let matches = || fleet.smg.metric("smg_cache_aware_policy_branch_total", &[("branch", "tree_match")]);
    assert_eq!(matches().await, 3.0);
    // Another tuning of its own makes it another policy, which knows nothing.
    let tuned =
        json!({"prefill_policy": "cache_aware", "decode_policy": "random", "cache_aware": {"cache_threshold": 0.5}});
    fleet.smg.set_policy("default", &tuned).await;
    assert_eq!(fleet.ask(&prompt(&unrelated(7)), &[]).await.status(), 200);
    assert_eq!(matches().await, 3.0);
}

#[tokio::test]
async fn manual_keeps_a_key_on_its_pair_and_leaves_other_keys_alone() {
    let fleet = fleet(3, 3, &["--policy", "manual", "--assignment-mode", "min_group"]).await;
    let body = prompt("hello");
    let mut homes = Vec::new();
    for key in ["a", "b", "c"] {
        homes.push(fleet.placed(&body, &[("x-smg-routing-key", key)]).await);
    }
    for leg in [|home: &(usize, usize)| home.0, |home: &(usize, usize)| home.1] {
        let mut used: Vec<_> = homes.iter().map(leg).collect();
        used.sort_unstable();
        assert_eq!(used, [0, 1, 2], "the fewest keys: one each, on each leg");
    }
    for (key, home) in ["a", "b", "c"].iter().zip(&homes) {
        assert_eq!(fleet.placed(&body, &[("x-smg-routing-key", key)]).await, *home);
    }
    let branch = async |branch| fleet.smg.metric("smg_manual_policy_branch_total", &[("branch", branch)]).await;
    assert_eq!((branch("vacant").await, branch("occupied_hit").await), (6.0, 6.0));
    assert_eq!(fleet.smg.metric("smg_routing_key_source_total", &[("source", "header")]).await, 6.0);
    eventually("both legs' keys are shown", || async {
        (fleet.smg.metric("smg_manual_policy_cache_entries", &[]).await == 6.0).then_some(())
    })
    .await;
}

#[tokio::test]
async fn sessions_stay_on_their_pair_whatever_the_policy_until_it_is_full() {
    let fleet = fleet(3, 3, &["--policy", "round_robin", "--routing-key-override"]).await;
    let turn = |number: usize| {
        let mut body = prompt("hello");
        body["rid"] = json!(format!("session-1_t{number}"));
        body
    };
    let home = fleet.placed(&turn(0), &[]).await;
    for number in 1..4 {
        let other = fleet.placed(&prompt("hello"), &[("x-smg-routing-key", &format!("other-{number}"))]).await;
        assert_eq!(fleet.placed(&prompt("hello"), &[("x-smg-routing-key", &format!("other-{number}"))]).await, other);
        assert_eq!(fleet.placed(&turn(number), &[]).await, home);
    }
    // Two turns at once are at home, the third goes elsewhere; then home is free again.
    let decode = &fleet.decodes[home.1];
    decode.set_fault(Fault::generation().hang().times(2));
    let so_far = decode.generation_count();
    let url = format!("{}{CHAT}", fleet.smg.url);
    let hanging: Vec<_> = (0..2).map(|_| tokio::spawn(fleet.smg.client.post(&url).json(&turn(9)).send())).collect();
    decode.wait_for_generations(so_far + 2, PATIENCE).await.unwrap();
    assert_ne!(fleet.placed(&turn(9), &[]).await.1, home.1);
    hanging.iter().for_each(tokio::task::JoinHandle::abort);
    fleet.smg.until_idle().await;
    assert_eq!(fleet.placed(&turn(10), &[]).await, home);
}

#[tokio::test]
async fn a_key_that_is_too_long_is_no_key_and_no_error() {
    let fleet = fleet(2, 2, &["--policy", "manual", "--routing-key-headers", "x-session"]).await;
    let long = "k".repeat(129);
    for headers in [[("x-session", long.as_str())], [("x-smg-routing-key", "not the header asked for")]] {
        assert_eq!(fleet.ask(&prompt("hello"), &headers).await.status(), 200);
    }
    assert_eq!(fleet.smg.metric("smg_manual_policy_branch_total", &[("branch", "no_routing_id")]).await, 4.0);
    fleet.placed(&prompt("hello"), &[("x-session", "k")]).await;
    assert_eq!(fleet.smg.metric("smg_manual_policy_branch_total", &[("branch", "vacant")]).await, 2.0);
}

#[tokio::test]
async fn hash_policies_place_alike_on_every_gateway() {
    let directory = tempfile::tempdir().unwrap();
    let port = free_port();
    let control = Smg::controlplane(directory.path(), port, &[]).await;
    let address = format!("127.0.0.1:{port}");
    let (one, two) = (Smg::gateway(&address, &[]).await, Smg::gateway(&address, &[]).await);
    let (prefills, _) = engines(&one, Role::Prefill, "prefill", 3).await;
    let (decodes, _) = engines(&one, Role::Decode, "decode", 3).await;
    let policies = json!({"prefill_policy": "prefix_hash", "decode_policy": "consistent_hashing"});
    control.set_policy("default", &policies).await;
    let revision = control.get_json("/fleet/policies/default").await["mod_revision"].as_f64().unwrap();
    for gateway in [&one, &two] {
        eventually("the gateway has the policy", || async {
            (gateway.metric("smg_config_revision", &[]).await >= revision).then_some(())
        })
        .await;
    }
    let mut used = std::collections::BTreeSet::new();
    for key in 0..200 {
        let text = unrelated(key);
        let client = format!("10.0.0.{key}");
        let mut places = Vec::new();
        for gateway in [&one, &two] {
            let before = (counts(&prefills), counts(&decodes));
            assert_eq!(ask(gateway, &prompt(&text), &[("x-forwarded-for", &client)]).await.status(), 200);
            let after = (counts(&prefills), counts(&decodes));
            let grown =
                |before: &[u64], after: &[u64]| before.iter().zip(after).position(|(one, two)| one < two).unwrap();
            places.push((grown(&before.0, &after.0), grown(&before.1, &after.1)));
        }
        assert_eq!(places[0], places[1], "key {key}");
        used.insert(places[0]);
    }
    assert!(used.len() > 3, "{used:?}");
}

#[tokio::test]
async fn a_client_that_names_a_worker_gets_that_one_or_an_error() {
    let fleet = fleet(3, 1, &["--prefill-policy", "consistent_hashing", "--retry-max-retries", "1"]).await;
    for index in 0..3 {
        let wanted = index.to_string();
        let placed = fleet.placed(&prompt("hello"), &[("x-smg-target-worker", &wanted)]).await;
        assert_eq!(placed.0, index);
    }
    let refused = fleet.ask(&prompt("hello"), &[("x-smg-target-worker", "3")]).await;
    assert_eq!(refused.status(), 503);
    let error = refused.json::<Value>().await.unwrap();
    assert_eq!(error["error"]["code"], "no_available_workers");
    let message = error["error"]["message"].as_str().unwrap();
    assert!(message.contains("Policy consistent_hashing failed to select a prefill worker"), "{message}");
    assert_eq!(fleet.ask(&prompt("hello"), &[("x-smg-target-worker", "none")]).await.status(), 200);
}

#[tokio::test]
async fn load_policies_count_their_own_requests_where_engines_report_nothing() {
    for policy in ["least_load", "power_of_two"] {
        let fleet = fleet(1, 2, &["--policy", policy]).await;
        let smg = &fleet.smg;
        let held = &fleet.decodes[0];
        held.set_fault(Fault::generation().hang());
        let send = || tokio::spawn(smg.client.post(format!("{}{CHAT}", smg.url)).json(&prompt("hello")).send());
        let served = || held.generation_count() + fleet.decodes[1].generation_count();
        let mut hanging = Vec::new();
        // A tie between idle workers is drawn: sooner or later one request hangs.
        while held.generation_count() == 0 {
            let so_far = served();
            hanging.push(send());
            eventually("the request is at its decode worker", || async { (served() > so_far).then_some(()) }).await;
        }
        let before = fleet.decodes[1].generation_count();
        for _ in 0..20 {
            assert_eq!(fleet.ask(&prompt("hello"), &[]).await.status(), 200);
        }
        assert_eq!(fleet.decodes[1].generation_count() - before, 20, "{policy}");
        hanging.iter().for_each(tokio::task::JoinHandle::abort);
        smg.until_idle().await;
    }
}

#[tokio::test]
async fn bucket_gives_each_prefill_prompts_of_like_length() {
    let fleet = fleet(2, 1, &["--prefill-policy", "bucket", "--balance-abs-threshold", "1000000"]).await;
    let (short, long) = (prompt(&"a".repeat(100)), prompt(&"b".repeat(4000)));
    let homes = (fleet.placed(&short, &[]).await.0, fleet.placed(&long, &[]).await.0);
    assert_ne!(homes.0, homes.1);
    for _ in 0..4 {
        assert_eq!((fleet.placed(&short, &[]).await.0, fleet.placed(&long, &[]).await.0), homes);
    }
}

#[tokio::test]
async fn the_decision_record_says_which_rule_decided() {
    let fleet = fleet(1, 1, &["--prefill-policy", "cache_aware", "--decode-policy", "manual"]).await;
    for _ in 0..2 {
        fleet.smg.post_as("asked", CHAT, &prompt(&unrelated(1))).await.bytes().await.unwrap();
    }
    let picks = fleet.smg.decision("asked").await["attempts"][0]["picks"].clone();
    assert_eq!(picks[0]["leg"], "prefill");
    assert_eq!((&picks[0]["policy"], &picks[0]["branch"]), (&json!("cache_aware"), &json!("tree_match")));
    assert_eq!(picks[0]["match_ratio"], 1.0);
    assert_eq!((&picks[1]["leg"], &picks[1]["branch"]), (&json!("decode"), &json!("no_routing_id")));
}
