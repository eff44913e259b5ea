//! MoRI-IO: every row of the label table, the refusals, the legs and the handoff checks.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use bytes::Bytes;
use serde_json::{Value, json};
use smg_engines::moriio::{
    HandoffError, LabelError, Leg, Pair, PairRefusal, RequestRefusal, Settings, TransferId, check_request,
};
use smg_engines::{ClientBody, ClientHandoffFields, Route, vllm};
use uuid::Uuid;

type Labels<'a> = &'a [(&'a str, &'a str)];
type Worker = Result<Settings, LabelError>;

const UUID: Uuid = Uuid::from_u128(0x0190_0000_0000_7000_8000_0000_0000_0001);
const ID: &str = "tx-01900000000070008000000000000001";

fn worker(host: &str, labels: Labels<'_>) -> Worker {
    Settings::read(|name| labels.iter().find(|(key, _)| *key == name).map(|(_, value)| *value), host)
}

fn parse(text: &str, route: Route) -> ClientBody {
    ClientBody::parse(Bytes::copy_from_slice(text.as_bytes()), route).unwrap()
}

/// The `kv_transfer_params` of the prefill leg of an empty chat request.
fn prefill_params(pair: &Pair<'_>) -> String {
    let leg =
        pair.prefill_leg(&parse("{}", Route::ChatCompletions), ClientHandoffFields::Strip, &TransferId::new(UUID));
    let leg = String::from_utf8(leg.to_bytes().to_vec()).unwrap();
    let start = leg.find(r#""kv_transfer_params":"#).unwrap() + r#""kv_transfer_params":"#.len();
    leg[start..leg.len() - 1].to_owned()
}

#[test]
fn labels_are_trimmed_and_have_their_documented_defaults() {
    let prefill = worker("p", &[("moriio_mode", "write")]);
    let defaults = worker("[fd00::1]", &[("moriio_mode", " WRITE "), ("moriio_host", " "), ("tp_size", "")]);
    let pair = Pair::check(Some(&prefill), Some(&defaults)).unwrap();
    assert!(!pair.is_concurrent());
    assert_eq!(
        prefill_params(&pair),
        format!(
            r#"{{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,"remote_block_ids":null,"transfer_id":"{ID}","remote_dp_size":1,"remote_host":"[fd00::1]","remote_handshake_port":6301,"remote_notify_port":61005}}"#
        )
    );
    let all = worker(
        "d",
        &[
            ("moriio_mode", "Write"),
            ("moriio_host", " 10.0.0.9 "),
            ("moriio_handshake_port", "7001 "),
            ("moriio_notify_port", "7002"),
            ("moriio_write_dispatch", "Concurrent"),
            ("tp_size", "8"),
            ("dp_size", "1"),
        ],
    );
    let pair = Pair::check(Some(&prefill), Some(&all)).unwrap();
    assert!(pair.is_concurrent());
    assert_eq!(
        prefill_params(&pair),
        format!(
            r#"{{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,"remote_block_ids":null,"transfer_id":"{ID}","remote_dp_size":1,"remote_tp_size":8,"remote_host":"10.0.0.9","remote_handshake_port":7001,"remote_notify_port":7002}}"#
        )
    );
}

#[test]
fn a_label_that_means_nothing_is_named() {
    assert_eq!(worker("p", &[]), Err(LabelError::ModeMissing));
    assert_eq!(worker("p", &[("moriio_mode", " ")]), Err(LabelError::ModeMissing));
    for (name, value) in [
        ("moriio_mode", "pull"),
        ("moriio_host", "a b"),
        ("moriio_host", "http://a"),
        ("moriio_handshake_port", "0"),
        ("moriio_handshake_port", "65536"),
        ("moriio_notify_port", "x"),
        ("moriio_notify_port", "-1"),
        ("moriio_write_dispatch", "parallel"),
        ("tp_size", "0"),
        ("tp_size", "+2"),
        ("tp_size", "two"),
        ("dp_size", "0"),
        ("dp_size", "1.5"),
    ] {
        let labels = [(name, value), ("moriio_mode", "read")];
        match worker("p", &labels) {
            Err(LabelError::Invalid { name: named, value: shown, .. }) => assert_eq!((named, &*shown), (name, value)),
            other => panic!("{name}={value}: {other:?}"),
        }
    }
    assert_eq!(worker("p", &[("moriio_mode", "read"), ("dp_size", "2")]), Err(LabelError::DataParallel(2)));
}

#[test]
fn a_pair_that_cannot_work_is_refused_with_its_reason() {
    let check = |prefill: Option<&Worker>, decode: Option<&Worker>| Pair::check(prefill, decode).map(|_| ());
    let read = worker("10.0.0.1", &[("moriio_mode", "read")]);
    let write = worker("10.0.0.2", &[("moriio_mode", "write")]);
    assert_eq!(check(None, Some(&read)), Err(PairRefusal::OtherConnector(Leg::Prefill)));
    assert_eq!(check(Some(&read), None), Err(PairRefusal::OtherConnector(Leg::Decode)));
    assert!(matches!(check(Some(&read), Some(&write)), Err(PairRefusal::Modes { .. })));
    let bad = worker("p", &[("moriio_mode", "read"), ("moriio_write_dispatch", "both")]);
    assert!(matches!(check(Some(&bad), Some(&read)), Err(PairRefusal::Labels(Leg::Prefill, _))));
    assert!(matches!(check(Some(&read), Some(&bad)), Err(PairRefusal::Labels(Leg::Decode, _))));
    let wide = worker("p", &[("moriio_mode", "read"), ("dp_size", "2")]);
    assert_eq!(
        check(Some(&wide), Some(&wide)),
        Err(PairRefusal::Labels(Leg::Prefill, LabelError::DataParallel(2))),
        "equal sizes are no excuse"
    );
}

#[test]
fn a_side_channel_must_be_reachable_in_write_mode_only() {
    let on = |host: &str, ports: [&str; 2], mode: &str, dispatch: &str| {
        let labels = [
            ("moriio_mode", mode),
            ("moriio_host", host),
            ("moriio_handshake_port", ports[0]),
            ("moriio_notify_port", ports[1]),
            ("moriio_write_dispatch", dispatch),
        ];
        worker("unused", &labels)
    };
    for local in
        ["localhost", "LOCALHOST.", "127.0.0.1", "127.8.8.8", "0.0.0.0", "[::]", "::", "[::1]", "[::ffff:127.0.0.1]"]
    {
        for (dispatch, prefill_too) in [("sequential", false), ("concurrent", true)] {
            let far = on("10.0.0.1", ["1", "2"], "write", dispatch);
            let near = on(local, ["3", "4"], "write", dispatch);
            let refused = Err(PairRefusal::Unreachable(Leg::Decode, local.to_owned()));
            assert_eq!(Pair::check(Some(&far), Some(&near)).map(|_| ()), refused, "{local}");
            let refused = prefill_too.then(|| PairRefusal::Unreachable(Leg::Prefill, local.to_owned()));
            assert_eq!(Pair::check(Some(&near), Some(&far)).err(), refused, "{local}, {dispatch}");
        }
        let both = (on(local, ["1", "2"], "write", ""), on("127.0.0.1", ["3", "4"], "write", ""));
        assert!(Pair::check(Some(&both.0), Some(&both.1)).is_ok(), "{local}: engines on one machine");
        let read = (on("10.0.0.1", ["1", "2"], "read", ""), on(local, ["1", "2"], "read", "concurrent"));
        let pair = Pair::check(Some(&read.0), Some(&read.1)).unwrap();
        assert!(!pair.is_concurrent(), "READ stays sequential");
    }
    for (one, other, ports, refused) in [
        ("10.0.0.1", "10.0.0.1", ["1", "9"], true),
        ("10.0.0.1", "10.0.0.1", ["9", "2"], true),
        ("10.0.0.1", "10.0.0.1", ["9", "8"], false),
        ("10.0.0.1", "10.0.0.2", ["1", "2"], false),
        ("127.0.0.1", "localhost", ["1", "9"], true),
        ("Node-A", "node-a", ["1", "9"], true),
        ("[fd00::1]", "fd00:0::1", ["9", "2"], true),
    ] {
        let (prefill, decode) = (on(one, ["1", "2"], "write", ""), on(other, ports, "write", ""));
        let shared = matches!(Pair::check(Some(&prefill), Some(&decode)), Err(PairRefusal::SharedSideChannel(_)));
        assert_eq!(shared, refused, "{one} {other} {ports:?}");
    }
}

#[test]
fn requests_that_cannot_be_served_are_refused_in_order() {
    use RequestRefusal::{FanOut, PromptLogprobs, RequestId};
    use Route::{ChatCompletions, Completions, Generate};
    const MARKED: &str = "a___prefill_addr_10.0.0.9:1___decode_addr_10.0.0.8:2_b";
    let check = |text: &str, route, id: &str| check_request(&parse(text, route), [id.as_bytes()]);
    for (text, route, expected) in [
        (r#"{"n":2,"text":"a"}"#, Generate, Some(RequestRefusal::Route)),
        (r#"{"messages":[]}"#, ChatCompletions, None),
        (r#"{"n":1}"#, ChatCompletions, None),
        (r#"{"n":2}"#, ChatCompletions, Some(FanOut)),
        (r#"{"n":2.0}"#, Completions, Some(FanOut)),
        (r#"{"use_beam_search":true}"#, ChatCompletions, Some(FanOut)),
        (r#"{"use_beam_search":1}"#, ChatCompletions, Some(FanOut)),
        (r#"{"use_beam_search":false}"#, ChatCompletions, None),
        (r#"{"use_beam_search":null}"#, ChatCompletions, None),
        (r#"{"prompt":"a"}"#, Completions, None),
        (r#"{"prompt":["a"]}"#, Completions, None),
        (r#"{"prompt":[1,2,3]}"#, Completions, None),
        (r#"{"prompt":[[1,2]]}"#, Completions, None),
        (r#"{"prompt":["a","b"]}"#, Completions, Some(FanOut)),
        (r#"{"prompt":[[1],[2]]}"#, Completions, Some(FanOut)),
        (r#"{"prompt":["a","b"]}"#, ChatCompletions, None),
        (r#"{"prompt_embeds":"x"}"#, Completions, None),
        (r#"{"prompt_embeds":["x"]}"#, Completions, None),
        (r#"{"prompt_embeds":["x","y"]}"#, Completions, Some(FanOut)),
        (r#"{"prompt":"","prompt_embeds":["x"]}"#, Completions, None),
        (r#"{"prompt":"a","prompt_embeds":["x"]}"#, Completions, Some(FanOut)),
        (r#"{"request_id":"mine"}"#, Completions, None),
        (r#"{"request_id":5}"#, Completions, None),
        (r#"{"request_id":"a___prefill_addr_b"}"#, Completions, Some(RequestId)),
        (r#"{"request_id":"a\u005f__decode_addr_b"}"#, Completions, Some(RequestId)),
        (r#"{"request_id":"\ud800__\u005fdecode_addr_b"}"#, Completions, Some(RequestId)),
        (r#"{"n":2,"request_id":"a___prefill_addr_b"}"#, Completions, Some(FanOut)),
    ] {
        assert_eq!(check(text, route, "id").err(), expected, "{text}");
    }
    assert_eq!(check("{}", ChatCompletions, MARKED), Err(RequestId));
    assert_eq!(check("{}", ChatCompletions, "a___decode_addr_b"), Err(RequestId));
    assert_eq!(check("{}", ChatCompletions, "a__prefill_addr_b"), Ok(()));
    for (refusal, status, code) in [
        (RequestRefusal::Route, 501, "moriio_route_unsupported"),
        (FanOut, 400, "moriio_fanout_unsupported"),
        (PromptLogprobs, 400, "moriio_prompt_logprobs_unsupported"),
        (RequestId, 400, "moriio_request_id_reserved"),
    ] {
        assert_eq!((refusal.status().as_u16(), refusal.code()), (status, code));
    }
}

fn read_pair() -> (Worker, Worker) {
    (worker("p", &[("moriio_mode", "read")]), worker("d", &[("moriio_mode", "read"), ("tp_size", "4")]))
}

#[test]
fn a_read_prefill_leg_names_no_side_channel_and_cannot_end_before_its_cap() {
    let (prefill, decode) = read_pair();
    let pair = Pair::check(Some(&prefill), Some(&decode)).unwrap();
    let body = parse(
        r#"{"prompt":"a","stream":true,"stop":["x"],"max_tokens":9,"ignore_eos":false,"stop_token_ids":[1],"kv_transfer_params":{}}"#,
        Route::Completions,
    );
    let leg = pair.prefill_leg(&body, ClientHandoffFields::Strip, &TransferId::new(UUID)).to_bytes();
    let expected = format!(
        r#"{{"prompt":"a","stream":false,"max_tokens":1,"ignore_eos":true,"kv_transfer_params":{{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,"remote_block_ids":null,"transfer_id":"{ID}","remote_dp_size":1,"remote_tp_size":4}}}}"#
    );
    assert_eq!(leg, expected);
}

#[test]
fn a_concurrent_decode_leg_names_the_prefills_side_channel() {
    let prefill = worker("10.0.0.1", &[("moriio_mode", "write"), ("moriio_notify_port", "7002"), ("tp_size", "2")]);
    let decode =
        worker("10.0.0.2", &[("moriio_mode", "write"), ("moriio_write_dispatch", "concurrent"), ("tp_size", "8")]);
    let pair = Pair::check(Some(&prefill), Some(&decode)).unwrap();
    assert_eq!(
        pair.decode_params(&TransferId::new(UUID)),
        format!(
            r#"{{"do_remote_decode":false,"do_remote_prefill":true,"remote_engine_id":null,"remote_block_ids":null,"transfer_id":"{ID}","remote_dp_size":1,"remote_host":"10.0.0.1","remote_handshake_port":6301,"remote_notify_port":7002,"remote_tp_size":2}}"#
        )
    );
    assert!(prefill_params(&pair).contains(r#""remote_tp_size":8,"remote_host":"10.0.0.2""#));
}

#[test]
fn only_the_decode_worker_asks_for_concurrent_dispatch() {
    let write = |host, dispatch| worker(host, &[("moriio_mode", "write"), ("moriio_write_dispatch", dispatch)]);
    let (plain, asking) = (write("a", ""), write("b", "concurrent"));
    assert!(!Pair::check(Some(&asking), Some(&plain)).unwrap().is_concurrent());
    assert!(Pair::check(Some(&plain), Some(&asking)).unwrap().is_concurrent());
}

/// A handoff as vLLM's connector writes it.
fn handoff() -> Value {
    json!({
        "do_remote_prefill": true, "do_remote_decode": false, "remote_block_ids": [[4, 5]], "remote_engine_id": "e",
        "remote_host": "10.0.0.1", "remote_handshake_port": 6301, "remote_notify_port": 61005, "remote_dp_rank": 0,
        "remote_dp_size": 1, "tp_size": 1, "transfer_id": ID,
    })
}

fn check_in(pair: &Pair<'_>, handoff: &Value) -> Result<Bytes, HandoffError> {
    let response = Bytes::from(json!({"id": "x", "kv_transfer_params": handoff}).to_string());
    pair.check_handoff(&response, &TransferId::new(UUID))
}

fn with(name: &str, value: Value) -> Value {
    let mut handoff = handoff();
    handoff[name] = value;
    handoff
}

#[test]
fn each_shape_the_decode_engine_parses_is_accepted() {
    let (prefill, decode) = read_pair();
    let pair = Pair::check(Some(&prefill), Some(&decode)).unwrap();
    for (name, value) in [
        ("remote_block_ids", json!([1, 2])),
        ("remote_block_ids", json!([[1], [2]])),
        ("remote_block_ids", json!([[1], []])),
        ("remote_block_ids", json!([0])),
        ("remote_host", json!("node-7.another.interface")),
        ("remote_handshake_port", json!("6301")),
        ("remote_notify_port", json!(1)),
        ("remote_notify_port", json!("65535")),
        ("remote_dp_size", json!("1")),
        ("remote_dp_size", Value::Null),
        ("remote_dp_size_local", json!(1)),
        ("remote_dp_rank", json!("0")),
        ("tp_size", Value::Null),
        ("remote_tp_size", json!(8)),
        ("something_new", json!({"a": [1.5]})),
    ] {
        let handoff = with(name, value);
        let params = check_in(&pair, &handoff).unwrap_or_else(|error| panic!("{handoff}: {error}"));
        assert_eq!(params, handoff.to_string(), "verbatim");
    }
    let mut without_counts = handoff();
    for name in ["remote_dp_rank", "remote_dp_size", "tp_size"] {
        without_counts.as_object_mut().unwrap().remove(name);
    }
    check_in(&pair, &without_counts).unwrap();
}

#[test]
fn each_field_of_a_wrong_shape_is_refused_by_name() {
    let (prefill, decode) = read_pair();
    let pair = Pair::check(Some(&prefill), Some(&decode)).unwrap();
    let cases: [(&'static str, &[Value]); 12] = [
        ("do_remote_prefill", &[json!(false), Value::Null, json!("true"), json!(1)]),
        ("remote_engine_id", &[json!(""), Value::Null, json!(7), json!(["e"])]),
        (
            "remote_block_ids",
            &[
                Value::Null,
                json!("1"),
                json!(1),
                json!({}),
                json!([]),
                json!([[]]),
                json!([1, "2"]),
                json!([1, [2]]),
                json!([[1], [[2]]]),
                json!([[1], ["2"]]),
                json!([[1], null]),
                json!([-1]),
                json!([1.5]),
                json!([true]),
            ],
        ),
        ("remote_host", &[Value::Null, json!(""), json!("a b"), json!(" a"), json!("a\n"), json!(5)]),
        (
            "remote_handshake_port",
            &[
                Value::Null,
                json!(0),
                json!("0"),
                json!(65536),
                json!("x"),
                json!(""),
                json!(-1),
                json!(1.5),
                json!([1]),
            ],
        ),
        ("remote_notify_port", &[Value::Null, json!(0), json!("00"), json!(true)]),
        ("remote_dp_size", &[json!("x"), json!(1.5), json!(-1), json!([]), json!("")]),
        ("remote_dp_size_local", &[json!("x"), json!(true)]),
        ("remote_dp_rank", &[json!("-1"), json!({})]),
        ("tp_size", &[json!("1.0"), json!("one")]),
        ("remote_tp_size", &[json!(" 1"), json!(false)]),
        ("remote_engine_id", &[json!(true)]),
    ];
    for (name, values) in cases {
        for value in values {
            match check_in(&pair, &with(name, value.clone())) {
                Err(HandoffError::Field { field, .. }) => assert_eq!(field, name),
                other => panic!("{name}={value}: {other:?}"),
            }
        }
    }
    for name in ["do_remote_prefill", "remote_engine_id", "remote_block_ids", "remote_host", "remote_notify_port"] {
        let mut handoff = handoff();
        handoff.as_object_mut().unwrap().remove(name);
        assert!(matches!(check_in(&pair, &handoff), Err(HandoffError::Field { field, .. }) if field == name));
    }
}

#[test]
fn a_handoff_that_is_missing_or_belongs_to_another_request_is_refused() {
    let (prefill, decode) = read_pair();
    let pair = Pair::check(Some(&prefill), Some(&decode)).unwrap();
    assert_eq!(check_in(&pair, &Value::Null), Err(HandoffError::Missing));
    assert_eq!(check_in(&pair, &json!([])), Err(HandoffError::Malformed));
    assert_eq!(
        pair.check_handoff(&Bytes::from_static(b"<html>"), &TransferId::new(UUID)),
        Err(HandoffError::Malformed)
    );
    for id in [json!("tx-other"), Value::Null, json!(1), json!(ID.to_uppercase())] {
        assert_eq!(check_in(&pair, &with("transfer_id", id)), Err(HandoffError::Foreign));
    }
}

#[test]
fn the_last_of_repeated_fields_is_the_one_that_is_judged() {
    let (prefill, decode) = read_pair();
    let pair = Pair::check(Some(&prefill), Some(&decode)).unwrap();
    let text = handoff().to_string();
    let response = |extra: &str| {
        let handoff = format!("{},{extra}}}", text.strip_suffix('}').unwrap());
        Bytes::from(format!(r#"{{"kv_transfer_params":{handoff}}}"#))
    };
    let check = |extra| pair.check_handoff(&response(extra), &TransferId::new(UUID)).err();
    assert_eq!(check(r#""tp_size":2"#), None);
    assert!(matches!(check(r#""remote_engine_id":"""#), Some(HandoffError::Field { .. })));
    assert!(matches!(check(r#""\u0072emote_host":3"#), Some(HandoffError::Field { .. })));
}

#[test]
fn a_concurrent_handoff_must_report_the_ports_the_decode_leg_was_told() {
    let prefill = worker("10.0.0.1", &[("moriio_mode", "write")]);
    let decode = worker("10.0.0.2", &[("moriio_mode", "write"), ("moriio_write_dispatch", "concurrent")]);
    let pair = Pair::check(Some(&prefill), Some(&decode)).unwrap();
    check_in(&pair, &with("remote_host", json!("elsewhere"))).unwrap();
    check_in(&pair, &with("remote_notify_port", json!("61005"))).unwrap();
    for name in ["remote_handshake_port", "remote_notify_port"] {
        let refused = check_in(&pair, &with(name, json!(9)));
        assert!(matches!(refused, Err(HandoffError::Port { field, reported: 9, .. }) if field == name));
        let (read_prefill, read_decode) = read_pair();
        let sequential = Pair::check(Some(&read_prefill), Some(&read_decode)).unwrap();
        check_in(&sequential, &with(name, json!(9))).unwrap();
    }
}

#[test]
fn the_decode_leg_is_the_clients_request_with_the_handoff() {
    let body = parse(r#"{"prompt":"a","stop":["x"],"n":1}"#, Route::Completions);
    let params = Bytes::from(handoff().to_string());
    let leg = vllm::decode_leg(&body, ClientHandoffFields::Strip, Some(&params), false).to_bytes();
    assert_eq!(leg, format!(r#"{{"prompt":"a","stop":["x"],"n":1,"kv_transfer_params":{}}}"#, handoff()));
}
