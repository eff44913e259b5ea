//! The bodies that engines receive are what the client sent, byte for byte, but for the members that the handoff needs.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod support;

use std::collections::{BTreeMap, HashSet};

use bytes::Bytes;
use futures::future::join_all;
use futures::{StreamExt, stream};
use mock_engine::Recorded;
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use serde_json::value::RawValue;
use serde_json::{Value, json};
use support::*;

const ROOMS: [&str; 3] = ["bootstrap_host", "bootstrap_port", "bootstrap_room"];
const TAG: &str = r#"{"do_remote_decode":true,"do_remote_prefill":false}"#;

impl Legs {
    /// Sends a body, and returns what reached the engines.
    async fn of(serving: &Serving, path: &str, body: impl Into<reqwest::Body>) -> Self {
        serving.engines().for_each(MockEngine::clear_requests);
        let response = serving.smg.post_bytes(path, body).await;
        assert_eq!(response.status(), 200, "{}", response.text().await.unwrap());
        let received = |engine: &MockEngine| {
            let mut requests = engine.generations();
            assert!(requests.len() <= 1);
            requests.pop()
        };
        Self { prefill: serving.prefill.as_ref().and_then(received), output: received(&serving.output).unwrap() }
    }

    fn prefill(&self) -> &Recorded {
        self.prefill.as_ref().unwrap()
    }

    fn all(&self) -> impl Iterator<Item = &Recorded> {
        self.prefill.iter().chain([&self.output])
    }
}

/// The requests that one client request became.
struct Legs {
    prefill: Option<Recorded>,
    output: Recorded,
}

/// The top-level members as they are written, in order, duplicates included.
fn members(body: &[u8]) -> Vec<(String, String)> {
    struct Members(Vec<(String, String)>);
    impl<'de> serde::Deserialize<'de> for Members {
        fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
            struct Visitor;
            impl<'de> serde::de::Visitor<'de> for Visitor {
                type Value = Members;
                fn expecting(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                    formatter.write_str("an object")
                }
                fn visit_map<A: serde::de::MapAccess<'de>>(self, mut map: A) -> Result<Members, A::Error> {
                    let mut members = Vec::new();
                    while let Some((name, value)) = map.next_entry::<String, &RawValue>()? {
                        members.push((name, value.get().to_owned()));
                    }
                    Ok(Members(members))
                }
            }
            deserializer.deserialize_map(Visitor)
        }
    }
    serde_json::from_slice::<Members>(body).unwrap().0
}

fn without(members: &[(String, String)], names: &[&str]) -> Vec<(String, String)> {
    members.iter().filter(|(name, _)| !names.contains(&name.as_str())).cloned().collect()
}

fn occurrences<'a>(members: &'a [(String, String)], name: &str) -> Vec<&'a str> {
    members.iter().filter(|(key, _)| key == name).map(|(_, value)| value.as_str()).collect()
}

#[tokio::test]
async fn fields_the_gateway_does_not_know_reach_both_legs() {
    let extensions = json!({
        "chat_template_kwargs": {"enable_thinking": false},
        "rid": "r1",
        "return_routed_experts": true,
        "x_future": {"a": [1, null, "é"]},
    });
    let mut body = chat();
    for (name, value) in extensions.as_object().unwrap() {
        body[name] = value.clone();
        body["messages"][0][name] = value.clone();
    }
    body["tools"] = json!([{"type": "function", "function": extensions}]);
    body["tools"][0]["function"]["name"] = json!("f");
    body["response_format"] = extensions.clone();
    body["response_format"]["type"] = json!("json_object");
    let text = body.to_string();
    let sent = members(text.as_bytes());

    let serving = Serving::accepting(Dispatch::Parallel, &[]).await;
    let legs = Legs::of(&serving, "/v1/chat/completions", text.clone()).await;
    for leg in legs.all() {
        let received = members(&leg.body);
        assert_eq!(without(&received, &ROOMS), sent);
        assert_eq!(received.len(), sent.len() + 3);
    }
    let serving = Serving::accepting(Dispatch::Sequential, &[]).await;
    let legs = Legs::of(&serving, "/v1/chat/completions", text.clone()).await;
    let edited = ["kv_transfer_params", "max_tokens", "stream"];
    assert_eq!(without(&members(&legs.prefill().body), &edited), without(&sent, &edited));
    assert_eq!(without(&members(&legs.output.body), &["kv_transfer_params"]), sent);
    let serving = Serving::accepting(Dispatch::Regular, &[]).await;
    assert_eq!(Legs::of(&serving, "/v1/chat/completions", text.clone()).await.output.body, text);
}

#[tokio::test]
async fn keys_keep_the_clients_order() {
    let schema = r#"{"zebra":{"type":"string"},"apple":{"type":"string"},"mango":{"type":"string"}}"#;
    let body = format!(
        r#"{{"zeta":1,"model":"m","messages":[{{"role":"user","content":"hi"}}],"alpha":2,"response_format":{{"type":"json_schema","json_schema":{{"name":"s","schema":{{"type":"object","properties":{schema}}}}}}},"tools":[{{"type":"function","function":{{"name":"f","parameters":{{"type":"object","properties":{schema}}}}}}}],"max_tokens":8,"beta":3}}"#
    );
    let order = |body: &[u8]| -> Vec<String> { members(body).into_iter().map(|(name, _)| name).collect() };
    for dispatch in DISPATCHES {
        let serving = Serving::accepting(dispatch, &[]).await;
        let legs = Legs::of(&serving, "/v1/chat/completions", body.clone()).await;
        for leg in legs.all() {
            let text = std::str::from_utf8(&leg.body).unwrap();
            assert_eq!(text.matches(schema).count(), 2, "{dispatch:?}: {text}");
            let sent = order(body.as_bytes());
            let kept: Vec<String> = order(&leg.body).into_iter().filter(|name| sent.contains(name)).collect();
            assert_eq!(kept, sent, "{dispatch:?}");
        }
    }
}

#[tokio::test]
async fn only_the_engine_judges_what_the_gateway_does_not_read() {
    let quirks = [
        json!({"tools": [{"type": "function", "function": {"name": "f"}}]}),
        json!({"messages": [{"role": "developer", "content": "hi"}]}),
        json!({"messages": [{"role": "user", "content": [{"type": "x_new"}]}]}),
        json!({"messages": "not a list"}),
        json!({"stop": null}),
        json!({"max_tokens": 8.0}),
        json!({"user": ""}),
        json!({"model": null}),
        json!({"stream": null, "n": null}),
        json!({"temperature": "hot"}),
    ];
    for dispatch in DISPATCHES {
        let serving = Serving::accepting(dispatch, &[]).await;
        for quirk in &quirks {
            let mut body = chat();
            for (name, value) in quirk.as_object().unwrap() {
                body[name] = value.clone();
            }
            let legs = Legs::of(&serving, "/v1/chat/completions", body.to_string()).await;
            assert_eq!(legs.all().count(), serving.engines().count(), "{dispatch:?} {quirk}");
            let output = legs.output.json();
            for (name, value) in quirk.as_object().unwrap() {
                assert_eq!(output[name], *value, "{dispatch:?}");
            }
        }
        serving.engines().for_each(MockEngine::clear_requests);
        for body in ["", "[]", "\"text\"", "null", "1", "{\"model\":\"m\"", "{\"model\":\"m\"}x", "{'model':'m'}"] {
            let response = serving.smg.post_bytes("/v1/chat/completions", body).await;
            assert_eq!(response.status(), 400, "{body:?}");
            let error: Value = response.json().await.unwrap();
            assert!(error["error"]["message"].is_string() && error["error"]["code"].is_string(), "{error}");
        }
        assert!(serving.engines().all(|engine| engine.generations().is_empty()), "no engine saw any of these");
    }
}

#[tokio::test]
async fn a_prefill_leg_asks_for_one_token_and_a_decode_leg_for_what_the_client_asked() {
    let serving = Serving::accepting(Dispatch::Sequential, &[]).await;
    let mut body = chat_stream();
    body["max_tokens"] = json!(500);
    body["min_tokens"] = json!(100);
    body["stream_options"] = json!({"include_usage": true});
    let legs = Legs::of(&serving, "/v1/chat/completions", body.to_string()).await;
    let mut expected = body.clone();
    for name in ["min_tokens", "stream_options"] {
        expected.as_object_mut().unwrap().remove(name);
    }
    expected["max_tokens"] = json!(1);
    expected["stream"] = json!(false);
    expected["kv_transfer_params"] = serde_json::from_str(TAG).unwrap();
    assert_eq!(legs.prefill().json(), expected);
    body["kv_transfer_params"] = serde_json::from_str(HANDOFF).unwrap();
    assert_eq!(legs.output.json(), body);
    assert_eq!(occurrences(&members(&legs.output.body), "kv_transfer_params"), [HANDOFF], "relayed byte for byte");
}

#[tokio::test]
async fn a_cap_that_the_client_did_not_set_is_not_set_for_decode() {
    let serving = Serving::accepting(Dispatch::Sequential, &[]).await;
    let legs = Legs::of(&serving, "/v1/completions", r#"{"model":"m","prompt":"hi"}"#).await;
    assert_eq!(legs.prefill().json()["max_tokens"], 1);
    assert_eq!(occurrences(&members(&legs.output.body), "max_tokens"), [""; 0]);
    // A chat request that uses the newer name keeps it.
    let mut body = chat();
    body["max_completion_tokens"] = json!(77);
    let legs = Legs::of(&serving, "/v1/chat/completions", body.to_string()).await;
    let prefill = legs.prefill().json();
    assert_eq!((&prefill["max_completion_tokens"], prefill.get("max_tokens")), (&json!(1), None));
    let output = legs.output.json();
    assert_eq!((&output["max_completion_tokens"], &output["max_tokens"]), (&json!(77), &json!(8)));
}

#[tokio::test]
async fn rooms_are_63_bit_integers_equal_on_both_legs_and_never_the_same_twice() {
    let requests = if soaks() { 20_000 } else { 2_000 };
    let engine = |role| MockEngine::builder().engine(Engine::Sglang).role(role).model(MODEL).records(requests + 1_000);
    let (prefill, decode) = (engine(Role::Prefill).start().await.unwrap(), engine(Role::Decode).start().await.unwrap());
    prefill.set_fault(anything());
    decode.set_fault(anything());
    let smg = Smg::launch(&[]).await;
    smg.register_pair(&prefill, &decode).await;
    let body = Bytes::from(completion().to_string());
    stream::iter(0..requests)
        .for_each_concurrent(64, |number| {
            let request = smg.client.post(format!("{}/v1/completions", smg.url)).body(body.clone());
            let request = request.header("content-type", "application/json").header("x-request-id", number.to_string());
            async move { assert_eq!(request.send().await.unwrap().status(), 200) }
        })
        .await;
    let rooms = |engine: &MockEngine| -> BTreeMap<String, String> {
        let requests = engine.generations();
        let room = |request: &Recorded| {
            let found = members(&request.body);
            let [room] = occurrences(&found, "bootstrap_room")[..] else { panic!("not one room: {found:?}") };
            assert!(room.bytes().all(|byte| byte.is_ascii_digit()), "{room}");
            assert!(room.parse::<i64>().is_ok(), "{room}");
            (request.header("x-request-id").unwrap().to_owned(), room.to_owned())
        };
        requests.iter().map(room).collect()
    };
    let of_prefills = rooms(&prefill);
    assert_eq!(of_prefills, rooms(&decode));
    assert_eq!(of_prefills.len(), requests);
    assert_eq!(of_prefills.values().collect::<HashSet<_>>().len(), requests, "two requests met in one room");
}

/// A body with every handoff field twice, one of them in escaped spelling, around fields of the client's own.
fn forged(own: &str) -> String {
    let forged = [
        (r#"bootstrap_host"#, r#"bootstrap\u005fhost"#, r#""x""#),
        (r#"bootstrap_port"#, r#"bootstrap_p\u006frt"#, "1"),
        (r#"bootstrap_room"#, r#"\u0062ootstrap_room"#, "1"),
        (r#"ec_transfer_params"#, r#"ec_transfer_p\u0061rams"#, r#"{"remote_host":"x"}"#),
        (r#"kv_transfer_params"#, r#"kv_transfer_param\u0073"#, r#"{"do_remote_prefill":true,"remote_host":"x"}"#),
        (r#"routed_dp_rank"#, r#"routed_dp_r\u0061nk"#, "7"),
        (r#"disagg_prefill_dp_rank"#, r#"disagg_prefill_dp_ran\u006b"#, "7"),
        (r#"data_parallel_rank"#, r#"d\u0061ta_parallel_rank"#, "7"),
    ];
    let write = |pick: fn(&(&'static str, &'static str, &'static str)) -> &'static str| -> String {
        forged.iter().map(|fields| format!("\"{}\" : {},", pick(fields), fields.2)).collect()
    };
    format!("{{{}{own},{}\"last\":1}}", write(|fields| fields.0), write(|fields| fields.1))
}

const HANDOFF_FIELDS: [&str; 8] = [
    "bootstrap_host",
    "bootstrap_port",
    "bootstrap_room",
    "ec_transfer_params",
    "kv_transfer_params",
    "routed_dp_rank",
    "disagg_prefill_dp_rank",
    "data_parallel_rank",
];

#[tokio::test]
async fn a_clients_handoff_fields_reach_no_engine() {
    let own = [
        ("/v1/chat/completions", r#""model":"m","messages":[{"role":"user","content":"hi"}]"#),
        ("/v1/completions", r#""model":"m","prompt":"hi""#),
        ("/generate", r#""text":"hi""#),
    ];
    let several = r#""model":"m","messages":[{"role":"user","content":"hi"}],"n":3"#;

    let serving = Serving::accepting(Dispatch::Parallel, &[]).await;
    let prefill = serving.prefill.as_ref().unwrap();
    for (path, own) in own {
        let legs = Legs::of(&serving, path, forged(own)).await;
        assert_eq!(members(&legs.prefill().body), members(&legs.output.body));
        let received = members(&legs.output.body);
        assert_eq!(occurrences(&received, "bootstrap_host"), [r#""127.0.0.1""#], "{path}");
        assert_eq!(occurrences(&received, "bootstrap_port"), [prefill.bootstrap_port().unwrap().to_string()]);
        assert_eq!(occurrences(&received, "bootstrap_room").len(), 1);
        for name in &HANDOFF_FIELDS[3..] {
            assert_eq!(occurrences(&received, name), [""; 0], "{path}");
        }
        let own = format!("{{{own},\"last\":1}}");
        assert_eq!(without(&received, &ROOMS), members(own.as_bytes()));
    }
    let legs = Legs::of(&serving, "/v1/chat/completions", forged(several)).await;
    for leg in legs.all() {
        let received = members(&leg.body);
        let [rooms] = occurrences(&received, "bootstrap_room")[..] else { panic!("{received:?}") };
        assert_eq!(serde_json::from_str::<HashSet<u64>>(rooms).unwrap().len(), 3);
        assert!(HANDOFF_FIELDS[3..].iter().all(|name| occurrences(&received, name).is_empty()));
    }

    let serving = Serving::accepting(Dispatch::Sequential, &[]).await;
    for (path, own) in own {
        let legs = Legs::of(&serving, path, forged(own)).await;
        assert_eq!(occurrences(&members(&legs.prefill().body), "kv_transfer_params"), [TAG], "{path}");
        assert_eq!(occurrences(&members(&legs.output.body), "kv_transfer_params"), [HANDOFF], "{path}");
        for leg in legs.all() {
            let received = members(&leg.body);
            for name in HANDOFF_FIELDS.iter().filter(|name| **name != "kv_transfer_params") {
                assert_eq!(occurrences(&received, name), [""; 0], "{path}");
            }
        }
    }
    let legs = Legs::of(&serving, "/v1/chat/completions", forged(several)).await;
    assert!(legs.prefill.is_none(), "several samples have no handoff");
    assert_eq!(legs.output.body, format!("{{{several},\"last\":1}}"));

    let serving = Serving::accepting(Dispatch::Regular, &[]).await;
    for (path, own) in own {
        let legs = Legs::of(&serving, path, forged(own)).await;
        assert_eq!(legs.output.body, format!("{{{own},\"last\":1}}"), "{path}");
    }
}

#[tokio::test]
async fn a_passthrough_pair_gets_no_handoff_fields_from_clients() {
    let (prefill, decode) = (vllm(Role::Prefill, Connector::None).await, vllm(Role::Decode, Connector::None).await);
    prefill.set_fault(Fault::generation().status(200, r#"{"object":"x"}"#));
    decode.set_fault(anything());
    let smg = Smg::launch(&["--pd-pairing-mode", "off"]).await;
    smg.register_pair(&prefill, &decode).await;
    let serving = Serving { smg, prefill: Some(prefill), output: decode };
    let own = r#""model":"m","prompt":"hi""#;
    let legs = Legs::of(&serving, "/v1/completions", forged(own)).await;
    assert_eq!(legs.output.body, format!("{{{own},\"last\":1}}"));
    let prefill = members(&legs.prefill().body);
    assert!(HANDOFF_FIELDS.iter().all(|name| occurrences(&prefill, name).is_empty()), "{prefill:?}");
}

#[tokio::test]
async fn one_client_room_sent_many_times_becomes_many_rooms() {
    let serving = Serving::accepting(Dispatch::Parallel, &[]).await;
    let mut body = completion();
    body["bootstrap_room"] = json!(1);
    join_all((0..50).map(|_| serving.smg.post("/v1/completions", &body))).await;
    for engine in serving.engines() {
        let rooms: HashSet<u64> =
            engine.generations().iter().map(|request| request.json()["bootstrap_room"].as_u64().unwrap()).collect();
        assert_eq!(rooms.len(), 50);
    }
}

#[tokio::test]
async fn handoff_fields_are_let_through_where_the_policy_says_so() {
    let own = r#""model":"m","prompt":"hi""#;
    let body = forged(own);
    for dispatch in DISPATCHES {
        let serving = Serving::accepting(dispatch, &[]).await;
        serving.smg.set_policy("default", &json!({"client_handoff_fields": "forward"})).await;
        let forwarded = Legs::of(&serving, "/v1/completions", body.clone()).await;
        for leg in forwarded.all() {
            let received = members(&leg.body);
            assert_eq!(occurrences(&received, "disagg_prefill_dp_rank"), ["7", "7"], "{dispatch:?}");
        }
        let handoff = members(&forwarded.output.body);
        match dispatch {
            // What the gateway itself says about the handoff stands alone.
            Dispatch::Parallel => {
                assert_eq!(occurrences(&handoff, "bootstrap_host"), [r#""127.0.0.1""#]);
                assert_eq!(occurrences(&handoff, "bootstrap_room").len(), 1);
            }
            Dispatch::Sequential => assert_eq!(occurrences(&handoff, "kv_transfer_params"), [HANDOFF]),
            Dispatch::Regular => assert_eq!(forwarded.output.body, body),
        }
    }
}

#[tokio::test]
async fn media_arrives_byte_for_byte_on_both_legs() {
    let image: String = (0..8 * 1024 * 1024 + 512 * 1024)
        .map(|index| char::from(b"ABCDEFGHIJKLMNOPabcdefghijklmnop0123456789+/"[index * 7919 % 44]))
        .collect();
    let part = format!(
        r#"{{"type":"image_url", "image_url":{{"url":"data:image\/png;base64,{image}==","detail":"high","x":1e2}}}}"#
    );
    let body = format!(
        r#"{{"model":"m","messages":[{{"role":"user","content":[{part},{{"type":"text","text":"what?"}}]}}],"max_tokens":8}}"#
    );
    for dispatch in DISPATCHES {
        let serving = Serving::accepting(dispatch, &[]).await;
        let legs = Legs::of(&serving, "/v1/chat/completions", body.clone()).await;
        for leg in legs.all() {
            assert!(memchr::memmem::find(&leg.body, part.as_bytes()).is_some(), "{dispatch:?}");
            assert_eq!(leg.header("content-length"), Some(&*leg.body.len().to_string()));
        }
    }
}

/// A piece of JSON as a client might write it: any spacing, escapes, number spellings and duplicate keys.
fn any_value() -> impl Strategy<Value = String> {
    let leaf = prop_oneof![
        Just("null".to_owned()),
        Just("true".to_owned()),
        "-?(0|[1-9][0-9]{0,25})(\\.[0-9]{1,20})?([eE][+-]?[0-9]{1,3})?",
        any_string(),
    ];
    leaf.prop_recursive(3, 24, 5, |inner| {
        let element = (space(), inner.clone(), space()).prop_map(|(before, value, after)| before + &value + &after);
        let member = (space(), any_string(), space(), inner, space())
            .prop_map(|(before, key, between, value, after)| format!("{before}{key}{between}:{value}{after}"));
        prop_oneof![
            proptest::collection::vec(element, 0..5).prop_map(|elements| format!("[{}]", elements.join(","))),
            proptest::collection::vec(member, 0..5).prop_map(|members| format!("{{{}}}", members.join(","))),
        ]
    })
}

fn space() -> impl Strategy<Value = String> {
    "[ \t\r\n]{0,2}"
}

fn any_string() -> impl Strategy<Value = String> {
    let piece = prop_oneof![
        "[a-z_ 0-9{}\\[\\]:,]{1,6}",
        Just("é".to_owned()),
        Just("🙂".to_owned()),
        Just("\\\"".to_owned()),
        Just("\\\\".to_owned()),
        Just("\\n".to_owned()),
        Just("\\/".to_owned()),
        Just("\\u00e9".to_owned()),
        Just("\\ud83d\\ude42".to_owned()),
    ];
    proptest::collection::vec(piece, 0..4).prop_map(|pieces| format!("\"{}\"", pieces.concat()))
}

/// The members of a body, each with its spacing; those that legs edit are marked.
fn any_members() -> impl Strategy<Value = Vec<(bool, String)>> {
    let edited = prop_oneof![
        Just("\"max_tokens\":8"),
        Just("\"stream\" : false"),
        Just("\"min_tokens\":2"),
        Just("\"kv_transfer_params\": {\"a\":[]}"),
        Just("\"bootstrap_room\":\"x\""),
        Just("\"stream_options\":null"),
    ];
    let own = (space(), any_string(), space(), space(), any_value(), space()).prop_map(
        |(before, key, between, then, value, after)| {
            // Keys of the client's own, none of which the gateway knows.
            (false, format!("{before}\"x{}{between}:{then}{value}{after}", &key[1..]))
        },
    );
    proptest::collection::vec(prop_oneof![3 => own, 1 => edited.prop_map(|member| (true, member.to_owned()))], 0..8)
}

/// Checks that the client's own members stand in `body`, byte for byte and in order.
fn assert_kept(body: &[u8], members: &[(bool, String)]) {
    assert!(serde_json::from_slice::<&RawValue>(body).is_ok(), "{}", String::from_utf8_lossy(body));
    let mut rest = body;
    for (_, member) in members.iter().filter(|(edited, _)| !edited) {
        let member = member.trim();
        let found = memchr::memmem::find(rest, member.as_bytes());
        let found = found.unwrap_or_else(|| panic!("{member} is not in {}", String::from_utf8_lossy(body)));
        rest = &rest[found + member.len()..];
    }
}

#[test]
fn any_body_arrives_byte_for_byte_outside_the_edited_members() {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let servings: Vec<(Dispatch, Serving)> = DISPATCHES
        .into_iter()
        .map(|dispatch| (dispatch, runtime.block_on(Serving::accepting(dispatch, &[]))))
        .collect();
    let mut runner = TestRunner::new(Config { cases: 48, failure_persistence: None, ..Config::default() });
    let bodies = (any_members(), space(), space());
    runner
        .run(&bodies, |(members, before, after)| {
            let inside: Vec<&str> = members.iter().map(|(_, member)| member.as_str()).collect();
            let body = format!("{before}{{{}}}{after}", inside.join(","));
            for (dispatch, serving) in &servings {
                let legs = runtime.block_on(Legs::of(serving, "/v1/completions", body.clone()));
                for leg in legs.all() {
                    assert_kept(&leg.body, &members);
                }
                if *dispatch == Dispatch::Regular && members.iter().all(|(edited, _)| !edited) {
                    prop_assert_eq!(&legs.output.body, &body);
                }
                if *dispatch == Dispatch::Parallel {
                    prop_assert_eq!(&legs.output.body, &legs.prefill().body);
                }
            }
            Ok(())
        })
        .unwrap();
    runtime.block_on(async {
        for (_, serving) in &servings {
            serving.smg.until_idle().await;
        }
    });
}
