//! SGLang legs: every row of the documented table, in raw bytes.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use bytes::Bytes;
use proptest::prelude::*;
use smg_engines::sglang::{
    Legs, MAX_SAMPLES, Ranks, Rendezvous, Shape, UnsupportedRequest, bootstrap_host, legs, room_from_random,
};
use smg_engines::{ClientBody, ClientHandoffFields, Route, regular};

use ClientHandoffFields::{Forward, Strip};
use Route::{ChatCompletions, Completions, Generate};

fn parse(text: &str, route: Route) -> ClientBody {
    ClientBody::parse(Bytes::copy_from_slice(text.as_bytes()), route).unwrap()
}

/// Rooms 11, 12, 13, …
fn rendezvous(body: &ClientBody, port: Option<u16>) -> Rendezvous {
    let mut next = 10;
    Rendezvous::mint("prefill-0", port, Shape::of(body).unwrap(), || {
        next += 1;
        next
    })
}

fn texts(legs: &Legs) -> (String, String) {
    let text = |bytes: Bytes| String::from_utf8(bytes.to_vec()).unwrap();
    (text(legs.prefill.to_bytes()), text(legs.decode.to_bytes()))
}

fn build(text: &str, route: Route, port: Option<u16>, ranks: Ranks) -> (String, String) {
    let body = parse(text, route);
    texts(&legs(&body, Strip, &rendezvous(&body, port), ranks))
}

#[test]
fn one_prompt_meets_in_one_room_on_both_legs() {
    let (prefill, decode) = build(r#"{"prompt":"hi"}"#, Completions, Some(8998), Ranks::default());
    assert_eq!(prefill, r#"{"prompt":"hi","bootstrap_host":"prefill-0","bootstrap_port":8998,"bootstrap_room":11}"#);
    assert_eq!(prefill, decode);
}

#[test]
fn rooms_of_many_requests_are_63_bit_integers_equal_on_both_legs() {
    let body = parse(r#"{"model":"m","prompt":"hi","max_tokens":8}"#, Completions);
    let room_in = |leg: &str| {
        let mut written = leg.split(r#""bootstrap_room":"#);
        let [Some(_), Some(room), None] = [written.next(), written.next(), written.next()] else { panic!("{leg}") };
        let room = room.trim_end_matches('}');
        assert!(room.bytes().all(|byte| byte.is_ascii_digit()), "{leg}");
        room.parse::<i64>().expect(leg)
    };
    // The ends of the range first, then words that differ in all of their bits.
    let words = [0, 1, u64::MAX >> 1, u64::MAX - 1].into_iter();
    let words = words.chain((1..=20_000).map(|number: u64| number.wrapping_mul(0x9E37_79B9_7F4A_7C15)));
    let mut rooms = std::collections::HashSet::new();
    for word in words {
        let rendezvous = Rendezvous::mint("prefill-0", Some(8998), Shape::of(&body).unwrap(), || word);
        let (prefill, decode) = texts(&legs(&body, Strip, &rendezvous, Ranks::default()));
        let room = room_in(&prefill);
        assert_eq!(room, room_in(&decode));
        assert_eq!(room, i64::try_from(room_from_random(word)).unwrap());
        assert!(rooms.insert(room), "two requests meet in {room}");
    }
    assert_eq!(rooms.len(), 20_004);
}

#[test]
fn a_worker_without_a_port_is_sent_null() {
    let (prefill, decode) = build(r#"{"text":"hi"}"#, Generate, None, Ranks::default());
    assert_eq!(prefill, r#"{"text":"hi","bootstrap_host":"prefill-0","bootstrap_port":null,"bootstrap_room":11}"#);
    assert_eq!(prefill, decode);
}

#[test]
fn batches_and_chat_samples_get_one_room_each() {
    let two = r#""bootstrap_host":["prefill-0","prefill-0"],"bootstrap_port":[8998,8998],"bootstrap_room":[11,12]}"#;
    let one = r#""bootstrap_host":["prefill-0"],"bootstrap_port":[8998],"bootstrap_room":[11]}"#;
    let scalar = r#""bootstrap_host":"prefill-0","bootstrap_port":8998,"bootstrap_room":11}"#;
    for (text, route, expected) in [
        (r#"{"prompt":["a","b"]"#, Completions, two),
        (r#"{"prompt":[[1,2],[3]]"#, Completions, two),
        (r#"{"prompt":["a"]"#, Completions, one),
        (r#"{"prompt":[[1,2]]"#, Completions, one),
        (r#"{"prompt":[1,2]"#, Completions, scalar),
        (r#"{"prompt":"a","n":1"#, Completions, scalar),
        (r#"{"input_ids":[[1],[2]]"#, Generate, two),
        (r#"{"input_ids":[1,2]"#, Generate, scalar),
        (r#"{"text":["a","b"]"#, Generate, two),
        (r#"{"text":"a","sampling_params":{"n":1}"#, Generate, scalar),
        (r#"{"messages":[],"n":2"#, ChatCompletions, two),
        (r#"{"messages":[],"n":1"#, ChatCompletions, scalar),
        (r#"{"messages":[]"#, ChatCompletions, scalar),
    ] {
        let (prefill, decode) = build(&format!("{text}}}"), route, Some(8998), Ranks::default());
        assert_eq!(prefill, format!("{text},{expected}"));
        assert_eq!(prefill, decode);
    }
    let (prefill, _) = build(r#"{"prompt":["a","b"]}"#, Completions, None, Ranks::default());
    assert!(prefill.contains(r#""bootstrap_port":[null,null]"#), "{prefill}");
}

#[test]
fn several_samples_of_one_completion_are_refused_and_the_message_names_grpc_workers() {
    for (text, route) in [
        (r#"{"prompt":"a","n":2}"#, Completions),
        (r#"{"prompt":[1,2],"n":2}"#, Completions),
        (r#"{"prompt":["a","b"],"n":2}"#, Completions),
        (r#"{"text":"a","sampling_params":{"n":2}}"#, Generate),
        (r#"{"text":["a","b"],"sampling_params":[{"n":1},{"n":2}]}"#, Generate),
    ] {
        let error = Shape::of(&parse(text, route)).unwrap_err();
        assert_eq!(error, UnsupportedRequest::ParallelSampling { samples: 2, path: route.path() }, "{text}");
        assert_eq!(error.code(), "parallel_sampling_unsupported");
        assert!(error.to_string().contains("gRPC workers"), "{error}");
    }
}

#[test]
fn the_number_of_rooms_a_few_bytes_can_ask_for_is_bounded() {
    let many = parse(&format!(r#"{{"n":{MAX_SAMPLES}}}"#), ChatCompletions);
    assert_eq!(Shape::of(&many).unwrap().rooms() as u64, MAX_SAMPLES);
    let more = parse(r#"{"n":1000000000000}"#, ChatCompletions);
    assert_eq!(Shape::of(&more).unwrap_err(), UnsupportedRequest::TooManySamples { samples: 1_000_000_000_000 });
}

#[test]
fn ranks_are_named_per_leg() {
    let base = r#"{"bootstrap_host":"prefill-0","bootstrap_port":1,"bootstrap_room":11"#;
    for (ranks, prefill, decode) in [
        (Ranks { prefill: Some(3), decode: None }, r#","routed_dp_rank":3}"#, r#","disagg_prefill_dp_rank":3}"#),
        (Ranks { prefill: None, decode: Some(5) }, "}", r#","routed_dp_rank":5}"#),
        (
            Ranks { prefill: Some(3), decode: Some(5) },
            r#","routed_dp_rank":3}"#,
            r#","routed_dp_rank":5,"disagg_prefill_dp_rank":3}"#,
        ),
    ] {
        let built = build("{}", Completions, Some(1), ranks);
        assert_eq!(built, (format!("{base}{prefill}"), format!("{base}{decode}")));
    }
}

#[test]
fn a_clients_own_rendezvous_is_replaced_and_never_doubled() {
    let text = r#"{"\u0062ootstrap_room":1,"prompt":"a","bootstrap_host":"x","bootstrap_port":1,"bootstrap_room":2,"routed_dp_rank":9,"kv_transfer_params":{},"x":8.0}"#;
    let (prefill, decode) = build(text, Completions, Some(8998), Ranks::default());
    assert_eq!(
        prefill,
        r#"{"prompt":"a","bootstrap_host":"prefill-0","bootstrap_port":8998,"bootstrap_room":11,"x":8.0}"#
    );
    assert_eq!(prefill, decode);
    let body = parse(text, Completions);
    let (forwarded, _) = texts(&legs(&body, Forward, &rendezvous(&body, Some(8998)), Ranks::default()));
    assert_eq!(
        forwarded,
        r#"{"prompt":"a","bootstrap_host":"prefill-0","bootstrap_port":8998,"bootstrap_room":11,"routed_dp_rank":9,"kv_transfer_params":{},"x":8.0}"#
    );
}

#[test]
fn a_regular_leg_is_the_clients_body_without_handoff_fields() {
    let body = parse(r#"{"model":"m", "data_parallel_rank":7,"x_future":{"a":[1,null,"é"]}}"#, ChatCompletions);
    let leg = |fields, rank| regular::leg(&body, fields, rank).to_bytes();
    assert_eq!(leg(Strip, None), r#"{"model":"m","x_future":{"a":[1,null,"é"]}}"#);
    assert_eq!(leg(Strip, Some(2)), r#"{"model":"m", "data_parallel_rank":2,"x_future":{"a":[1,null,"é"]}}"#);
    assert_eq!(leg(Forward, None), body.bytes());
}

#[test]
fn the_bootstrap_host_is_the_urls_host() {
    for (url, host) in [
        ("http://prefill-0:8000", Some("prefill-0")),
        ("http://prefill-0:8000@3", Some("prefill-0")),
        ("http://prefill-0/base/path@12", Some("prefill-0")),
        ("https://10.0.0.7", Some("10.0.0.7")),
        ("http://[fd00::1]:8000", Some("[fd00::1]")),
        ("http://[fd00::1]:8000@0", Some("[fd00::1]")),
        ("nonsense", None),
    ] {
        assert_eq!(bootstrap_host(url).as_deref(), host, "{url}");
    }
}

#[test]
fn a_host_is_written_as_a_json_string() {
    let rendezvous = Rendezvous::mint("odd\"host", Some(1), Shape::Scalar, || 5);
    let (prefill, _) = texts(&legs(&parse("{}", Completions), Strip, &rendezvous, Ranks::default()));
    assert!(prefill.starts_with(r#"{"bootstrap_host":"odd\"host","#), "{prefill}");
}

proptest! {
    #[test]
    fn rooms_are_integers_that_a_signed_64_bit_field_can_hold(random: u64) {
        let room = room_from_random(random);
        prop_assert!(i64::try_from(room).is_ok());
        prop_assert_eq!(room, random & 0x7fff_ffff_ffff_ffff);
        let rendezvous = Rendezvous::mint("h", None, Shape::Scalar, || random);
        prop_assert_eq!(rendezvous.rooms(), [room]);
        let (prefill, decode) = texts(&legs(&parse("{}", Completions), Strip, &rendezvous, Ranks::default()));
        let expected = format!("\"bootstrap_room\":{room}}}");
        prop_assert!(prefill.ends_with(&expected));
        prop_assert_eq!(prefill, decode);
    }
}
