//! vLLM legs: every row of the connector table, and the legs seen between a gateway and real vLLM 0.32 servers.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use bytes::Bytes;
use serde_json::Value;
use smg_engines::vllm::{
    Connector, Handoff, HandoffSource, MooncakePeer, Plan, decode_leg, extract_kv_transfer_params, plan, prefill_leg,
};
use smg_engines::{ClientBody, ClientHandoffFields, Route};
use uuid::Uuid;

use ClientHandoffFields::{Forward, Strip};
use Route::{ChatCompletions, Completions, Generate};

const TAG: &str = r#"{"do_remote_decode":true,"do_remote_prefill":false}"#;
const TRANSFER: Uuid = Uuid::from_u128(0x0190_0000_0000_7000_8000_0000_0000_0001);

fn parse(text: &str, route: Route) -> ClientBody {
    ClientBody::parse(Bytes::copy_from_slice(text.as_bytes()), route).unwrap()
}

fn prefill_text(text: &str, route: Route, tag: Option<&str>) -> String {
    let tag = tag.map(|tag| Bytes::copy_from_slice(tag.as_bytes()));
    String::from_utf8(prefill_leg(&parse(text, route), Strip, tag.as_ref()).to_bytes().to_vec()).unwrap()
}

fn planned(text: &str, connector: Connector, peer: Option<&MooncakePeer>) -> Plan {
    plan(&parse(text, Completions), connector, peer, TRANSFER)
}

#[test]
fn connectors_are_told_apart_by_name() {
    for (name, connector, label) in [
        (Some("NixlConnector"), Connector::Nixl, "nixl"),
        (Some("MooncakeConnector"), Connector::Mooncake, "mooncake"),
        (Some("MoRIIOConnector"), Connector::Moriio, "moriio"),
        (Some("MooncakeStoreConnector"), Connector::Store, "passthrough"),
        (Some("SharedStorageConnector"), Connector::Store, "passthrough"),
        (Some("FlexKVConnectorV1"), Connector::Store, "passthrough"),
        (Some("HF3FSConnector"), Connector::Store, "passthrough"),
        (Some("LMCacheConnectorV1"), Connector::Passthrough, "passthrough"),
        (Some(""), Connector::Passthrough, "passthrough"),
        (None, Connector::Passthrough, "passthrough"),
    ] {
        assert_eq!((Connector::classify(name), connector.mode_label()), (connector, label), "{name:?}");
    }
}

#[test]
fn the_prefill_leg_asks_for_one_token_without_a_stream() {
    for (text, route, expected) in [
        ("{}", Completions, r#"{"stream":false,"max_tokens":1}"#),
        (r#"{"prompt":"hi"}"#, Completions, r#"{"prompt":"hi","stream":false,"max_tokens":1}"#),
        (
            r#"{"stream":true,"stream_options":{"include_usage":true},"max_tokens":500,"min_tokens":100,"n":1}"#,
            ChatCompletions,
            r#"{"stream":false,"max_tokens":1,"n":1}"#,
        ),
        (
            r#"{"max_tokens":9,"max_completion_tokens":500}"#,
            ChatCompletions,
            r#"{"max_completion_tokens":1,"stream":false}"#,
        ),
        (
            r#"{"max_completion_tokens":null}"#,
            ChatCompletions,
            r#"{"max_completion_tokens":null,"stream":false,"max_tokens":1}"#,
        ),
        (
            r#"{"max_completion_tokens":500}"#,
            Completions,
            r#"{"max_completion_tokens":500,"stream":false,"max_tokens":1}"#,
        ),
        (r#"{"text":"a"}"#, Generate, r#"{"text":"a","stream":false,"max_tokens":1}"#),
        (
            r#"{"stop":null,"max_tokens":8.0,"temperature":0.0}"#,
            Completions,
            r#"{"stop":null,"max_tokens":1,"temperature":0.0,"stream":false}"#,
        ),
    ] {
        assert_eq!(prefill_text(text, route, None), expected, "{text}");
    }
}

#[test]
fn the_decode_leg_is_the_clients_body_plus_the_handoff() {
    let text = r#"{ "stream":true, "max_tokens":500,"min_tokens":100,"x":8.0 }"#;
    let body = parse(text, ChatCompletions);
    assert_eq!(decode_leg(&body, Strip, None, false).to_bytes(), text);
    let params = Bytes::from_static(br#"{"remote_port": 1, "x":1.0}"#);
    assert_eq!(
        decode_leg(&body, Strip, Some(&params), false).to_bytes(),
        r#"{ "stream":true, "max_tokens":500,"min_tokens":100,"x":8.0,"kv_transfer_params":{"remote_port": 1, "x":1.0} }"#
    );
}

#[test]
fn a_clients_own_handoff_reaches_no_leg_unless_it_is_allowed_to() {
    let text =
        r#"{"kv_transfer_params":{"do_remote_prefill":true},"a":1,"\u006bv_transfer_params":{"remote_host":"x"}}"#;
    let body = parse(text, Completions);
    let tag = Bytes::from_static(TAG.as_bytes());
    let prefill = prefill_leg(&body, Strip, Some(&tag)).to_bytes();
    assert_eq!(prefill, format!(r#"{{"a":1,"kv_transfer_params":{TAG},"stream":false,"max_tokens":1}}"#));
    assert_eq!(decode_leg(&body, Strip, None, false).to_bytes(), r#"{"a":1}"#);
    assert_eq!(decode_leg(&body, Forward, None, false).to_bytes(), text);
    let overwritten = decode_leg(&body, Forward, Some(&tag), false).to_bytes();
    assert_eq!(overwritten, format!(r#"{{"a":1,"kv_transfer_params":{TAG}}}"#));
}

#[test]
fn nixl_tags_the_prefill_and_expects_a_handoff() {
    assert_eq!(
        planned(r#"{"prompt":"a","n":1}"#, Connector::Nixl, None),
        Plan::PrefillThenDecode {
            tag: Some(Bytes::from_static(TAG.as_bytes())),
            source: HandoffSource::Expected,
            transfer_id: None
        }
    );
}

#[test]
fn mooncake_mints_both_sides_of_the_transfer() {
    let peer = MooncakePeer::resolve(Some("engine-7"), None, None, "prefill-0", Some(8999)).unwrap();
    let Plan::PrefillThenDecode { tag, source, transfer_id } = planned("{}", Connector::Mooncake, Some(&peer)) else {
        panic!("Mooncake runs both legs");
    };
    assert_eq!(transfer_id.unwrap(), "xfer-01900000-0000-7000-8000-000000000001");
    assert_eq!(
        tag.unwrap(),
        r#"{"do_remote_decode":true,"do_remote_prefill":false,"transfer_id":"xfer-01900000-0000-7000-8000-000000000001"}"#
    );
    let minted = r#"{"do_remote_decode":false,"do_remote_prefill":true,"transfer_id":"xfer-01900000-0000-7000-8000-000000000001","remote_engine_id":"engine-7","remote_bootstrap_addr":"http://prefill-0:8999"}"#;
    assert_eq!(source, HandoffSource::Minted(minted.into()));
}

#[test]
fn mooncake_without_an_engine_id_mints_nothing() {
    assert_eq!(
        planned("{}", Connector::Mooncake, None),
        Plan::PrefillThenDecode { tag: None, source: HandoffSource::None, transfer_id: None }
    );
}

#[test]
fn a_mooncake_engine_is_named_only_when_its_id_is_certain() {
    for (engine, dp_size, rank, expected) in [
        (Some("e"), None, None, Some("e")),
        (Some("e"), Some("1"), None, Some("e")),
        (Some("e"), Some("1"), Some(0), Some("e")),
        (Some("e"), Some("4"), Some(2), Some("e_dp2")),
        (Some("e"), Some("4"), None, None),
        (Some("e"), Some("four"), Some(2), None),
        (Some("e"), Some("0"), Some(2), None),
        (Some("e"), Some("-1"), None, None),
        (Some(""), None, None, None),
        (None, None, None, None),
        (None, Some("4"), Some(2), None),
    ] {
        let peer = MooncakePeer::resolve(engine, dp_size, rank, "h", None);
        assert_eq!(peer.as_ref().map(MooncakePeer::engine_id), expected, "{engine:?} {dp_size:?} {rank:?}");
    }
}

#[test]
fn a_mooncake_bootstrap_address_has_a_default_port_and_brackets() {
    for (host, port, expected) in [
        ("prefill-0", None, "http://prefill-0:8998"),
        ("prefill-0", Some(9000), "http://prefill-0:9000"),
        ("[fd00::1]", None, "http://[fd00::1]:8998"),
        ("fd00::1", Some(1), "http://[fd00::1]:1"),
    ] {
        let peer = MooncakePeer::resolve(Some("e"), None, None, host, port).unwrap();
        assert_eq!(peer.bootstrap_address(), expected);
    }
}

#[test]
fn other_connectors_are_not_tagged_and_relay_what_comes_back() {
    for connector in [Connector::Passthrough, Connector::Store] {
        assert_eq!(
            planned("{}", connector, None),
            Plan::PrefillThenDecode { tag: None, source: HandoffSource::Optional, transfer_id: None }
        );
    }
}

#[test]
fn several_samples_skip_the_prefill_leg() {
    let peer = MooncakePeer::resolve(Some("e"), None, None, "h", None);
    for connector in [Connector::Nixl, Connector::Mooncake, Connector::Store, Connector::Passthrough] {
        assert_eq!(planned(r#"{"prompt":"a","n":2}"#, connector, peer.as_ref()), Plan::DecodeOnly);
    }
}

#[test]
fn several_prompts_never_share_one_handoff() {
    let peer = MooncakePeer::resolve(Some("e"), None, None, "h", None);
    let none = Plan::PrefillThenDecode { tag: None, source: HandoffSource::None, transfer_id: None };
    for prompts in
        [r#"{"prompt":["a","b"]}"#, r#"{"prompt":[[1],[2,3]]}"#, r#"{"prompt":"","prompt_embeds":["x","y"]}"#]
    {
        for connector in [Connector::Nixl, Connector::Mooncake] {
            assert_eq!(planned(prompts, connector, peer.as_ref()), Plan::DecodeOnly, "{prompts}");
        }
        assert_eq!(planned(prompts, Connector::Store, None), none, "{prompts}");
        assert_eq!(planned(prompts, Connector::Passthrough, None), none, "{prompts}");
    }
    assert_ne!(planned(r#"{"prompt":["a"]}"#, Connector::Nixl, None), Plan::DecodeOnly);
}

#[test]
fn a_handoff_is_taken_byte_for_byte_and_only_when_it_is_an_object() {
    for (response, expected) in [
        (r#"{"id":"x","kv_transfer_params": {"b":1.0, "a":[ 1 ]} ,"z":1}"#, Some(r#"{"b":1.0, "a":[ 1 ]}"#)),
        (r#"{"\u006bv_transfer_params":{"a":1}}"#, Some(r#"{"a":1}"#)),
        (r#"{"kv_transfer_params":{"a":1},"kv_transfer_params":{"a":2}}"#, Some(r#"{"a":2}"#)),
    ] {
        let response = Bytes::from(response);
        let handoff = extract_kv_transfer_params(&response);
        assert_eq!(handoff.params().map(|params| &params[..]), expected.map(str::as_bytes));
        let params = handoff.params().unwrap().as_ptr() as usize;
        assert!((response.as_ptr() as usize..response.as_ptr() as usize + response.len()).contains(&params));
    }
    for (response, expected) in [
        (r#"{"id":"x"}"#, Handoff::Missing),
        (r#"{"kv_transfer_params":null}"#, Handoff::Missing),
        (r#"{"choices":[{"kv_transfer_params":{"a":1}}]}"#, Handoff::Missing),
        (r#"{"kv_transfer_params":"x"}"#, Handoff::Malformed),
        (r#"{"kv_transfer_params":[{}]}"#, Handoff::Malformed),
        (r#"{"kv_transfer_params":{"a":1}"#, Handoff::Malformed),
        ("<html>", Handoff::Malformed),
        ("", Handoff::Malformed),
        ("[]", Handoff::Malformed),
    ] {
        let handoff = extract_kv_transfer_params(&Bytes::from(response));
        assert_eq!(handoff.params(), None);
        assert_eq!(handoff, expected, "{response}");
    }
    assert_eq!(extract_kv_transfer_params(&Bytes::from_static(b"{\"a\":\"\xff\"}")), Handoff::Malformed);
}

/// Legs recorded between a gateway and two vLLM 0.32 servers with `NixlConnector`.
mod recorded {
    use super::*;

    const PROMPT: &str = "tapped one: The quick brown fox jumps over the lazy dog. The with statement is used to wrap the execution of a block with methods defined by a context manager.";

    const PARAMS: &str = r#"{"do_remote_prefill":true,"do_remote_decode":false,"remote_block_ids":[[1]],"remote_engine_id":"8eb05400-12dc-41b4-8daf-901269c5a0cc","remote_request_id":"chatcmpl-tap-1-8ccde411","remote_host":"127.0.0.1","remote_port":19100,"tp_size":1,"dcp_size":1,"pp_size":1,"remote_num_tokens":83,"remote_blocks_expiry_time":null,"transfer_mode":"pull","remote_prefill_cached_tokens":0}"#;

    fn client(stream: bool) -> String {
        format!(
            r#"{{"messages":[{{"role":"user","content":"{PROMPT}"}}],"model":"tiny","logprobs":false,"max_tokens":4,"stream":{stream},"temperature":0.0}}"#
        )
    }

    fn recorded_prefill() -> String {
        format!(
            r#"{{"messages":[{{"role":"user","content":"{PROMPT}"}}],"model":"tiny","logprobs":false,"max_tokens":1,"stream":false,"temperature":0.0,"kv_transfer_params":{{"do_remote_decode":true,"do_remote_prefill":false}}}}"#
        )
    }

    fn recorded_decode(stream: bool) -> String {
        format!(
            r#"{{"messages":[{{"role":"user","content":"{PROMPT}"}}],"model":"tiny","logprobs":false,"max_tokens":4,"stream":{stream},"temperature":0.0,"kv_transfer_params":{PARAMS}}}"#
        )
    }

    fn recorded_prefill_response() -> String {
        format!(
            r#"{{"id":"chatcmpl-tap-1","object":"chat.completion","created":1795977135,"model":"tiny","choices":[{{"index":0,"message":{{"role":"assistant","content":" se","refusal":null,"annotations":null,"audio":null,"function_call":null,"reasoning":null}},"logprobs":null,"finish_reason":"length","stop_reason":null,"token_ids":null,"routed_experts":null}}],"service_tier":null,"system_fingerprint":"vllm-0.32.0-4fde26ed","usage":{{"prompt_tokens":83,"total_tokens":84,"completion_tokens":1,"prompt_tokens_details":null,"completion_tokens_details":null}},"prompt_logprobs":null,"prompt_token_ids":null,"prompt_text":null,"kv_transfer_params":{PARAMS},"ec_transfer_params":null,"metrics":null}}"#
        )
    }

    fn assert_same_fields(actual: &str, recorded: &str) {
        let actual: Value = serde_json::from_str(actual).unwrap();
        let recorded: Value = serde_json::from_str(recorded).unwrap();
        let (actual, recorded) = (actual.as_object().unwrap(), recorded.as_object().unwrap());
        for (name, value) in recorded {
            assert_eq!(actual.get(name), Some(value), "field {name}");
        }
        assert_eq!(actual.len(), recorded.len());
    }

    #[test]
    fn nixl_legs_equal_those_that_real_engines_accepted() {
        for stream in [false, true] {
            let body = parse(&client(stream), ChatCompletions);
            let Plan::PrefillThenDecode { tag, source: HandoffSource::Expected, .. } =
                plan(&body, Connector::Nixl, None, TRANSFER)
            else {
                panic!("NIXL runs both legs and expects a handoff");
            };
            let prefill = prefill_leg(&body, Strip, tag.as_ref()).to_bytes();
            assert_eq!(prefill, recorded_prefill());
            let handoff = extract_kv_transfer_params(&recorded_prefill_response().into());
            assert_eq!(handoff, Handoff::Params(PARAMS.into()));
            let decode = decode_leg(&body, Strip, handoff.params(), false).to_bytes();
            assert_eq!(decode, recorded_decode(stream));
            assert_same_fields(std::str::from_utf8(&prefill).unwrap(), &recorded_prefill());
            assert_same_fields(std::str::from_utf8(&decode).unwrap(), &recorded_decode(stream));
        }
    }

    #[test]
    fn an_undeclared_connector_sends_the_leg_that_real_engines_saw() {
        let body = parse(&client(true), ChatCompletions);
        let expected = recorded_prefill().replace(&format!(",\"kv_transfer_params\":{TAG}"), "");
        assert_eq!(prefill_leg(&body, Strip, None).to_bytes(), expected);
    }

    #[test]
    fn a_decode_response_carries_no_further_handoff() {
        let response = recorded_prefill_response().replace(PARAMS, "null");
        assert_eq!(extract_kv_transfer_params(&response.into()), Handoff::Missing);
    }
}

#[test]
fn log_probabilities_of_the_prompt_are_not_asked_of_a_decode_whose_prefill_tells_them() {
    let text = r#"{"prompt":"a", "prompt_logprobs" : 2,"logprobs":1}"#;
    let body = parse(text, Completions);
    assert_eq!(decode_leg(&body, Strip, None, true).to_bytes(), r#"{"prompt":"a","logprobs":1}"#);
    assert_eq!(decode_leg(&body, Strip, None, false).to_bytes(), text);
}

#[test]
fn there_is_no_handoff_where_only_an_engine_that_computed_the_prompt_can_answer() {
    for connector in [Connector::Nixl, Connector::Mooncake, Connector::Store, Connector::Passthrough] {
        for text in
            [r#"{"prompt":"a","echo":true,"logprobs":1}"#, r#"{"prompt":"a","stream":true,"prompt_logprobs":0}"#]
        {
            assert_eq!(planned(text, connector, None), Plan::DecodeOnly, "{text}");
        }
        for text in [r#"{"prompt":"a","echo":true}"#, r#"{"prompt":"a","prompt_logprobs":0}"#] {
            assert_ne!(planned(text, connector, None), Plan::DecodeOnly, "{text}");
        }
    }
}
