//! Edited bodies against a second, naive implementation that works on the pieces a body was made of.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::pin::Pin;
use std::task::{Context, Poll, Waker};

use bytes::Bytes;
use http_body::Body as _;
use proptest::prelude::*;
use smg_engines::{ClientBody, ClientHandoffFields, Edits, Field, HANDOFF_FIELDS, Route, SplicedBody};

/// One member as it is spelled in the body.
#[derive(Debug, Clone)]
struct Piece {
    /// Comma and white space before it; not written in front of the first member.
    gap: String,
    name: String,
    key: String,
    colon: String,
    value: String,
}

#[derive(Debug, Clone)]
struct Pieces {
    before: String,
    lead: String,
    members: Vec<Piece>,
    trail: String,
    after: String,
}

impl Pieces {
    fn text(&self) -> String {
        let mut text = format!("{}{{{}", self.before, self.lead);
        for (index, member) in self.members.iter().enumerate() {
            if index > 0 {
                text.push_str(&member.gap);
            }
            text.push_str(&member.key);
            text.push_str(&member.colon);
            text.push_str(&member.value);
        }
        text.push_str(&self.trail);
        text.push('}');
        text.push_str(&self.after);
        text
    }

    /// The same edits, on pieces.
    fn edited(&self, edits: &[(Field, Option<String>)]) -> Self {
        let mut result = self.clone();
        for (field, value) in edits {
            let last = result.members.iter().rposition(|member| member.name == field.name());
            let mut index = 0;
            result.members.retain_mut(|member| {
                let here = index;
                index += 1;
                if member.name != field.name() {
                    return true;
                }
                if let (Some(value), true) = (value, Some(here) == last) {
                    member.key = format!("\"{}\"", field.name());
                    member.value = value.clone();
                    return true;
                }
                false
            });
            if let (Some(value), None) = (value, last) {
                result.members.push(Piece {
                    gap: ",".into(),
                    name: field.name().into(),
                    key: format!("\"{}\"", field.name()),
                    colon: ":".into(),
                    value: value.clone(),
                });
            }
        }
        result
    }
}

fn space() -> impl Strategy<Value = String> {
    prop_oneof![4 => Just(String::new()), 1 => "[ \t\r\n]{1,3}"]
}

/// `name` as a JSON literal with some characters written as escapes.
fn spelled(name: &str, escaped: u32) -> String {
    let mut literal = String::from("\"");
    for (index, character) in name.chars().enumerate() {
        let must = matches!(character, '"' | '\\') || character < ' ';
        if must || (escaped >> (index % 32)) & 1 == 1 {
            for unit in character.encode_utf16(&mut [0; 2]) {
                literal.push_str(&format!("\\u{unit:04X}"));
            }
        } else {
            literal.push(character);
        }
    }
    literal.push('"');
    literal
}

fn value_text() -> impl Strategy<Value = String> {
    let atoms = prop_oneof![
        Just("null".to_owned()),
        Just("true".to_owned()),
        Just("8.0".to_owned()),
        Just("-0".to_owned()),
        Just("1E+3".to_owned()),
        Just("18446744073709551616".to_owned()),
        Just(r#""a\"b\\, } ] :""#.to_owned()),
        Just(r#""\ud83d\ude00 é 漢 \/""#.to_owned()),
        Just(r#""\ud800""#.to_owned()),
        any::<i64>().prop_map(|number| number.to_string()),
        "\\PC{0,8}".prop_map(|text| serde_json::Value::from(text).to_string()),
    ];
    atoms.prop_recursive(3, 16, 4, |inner| {
        prop_oneof![
            (prop::collection::vec(inner.clone(), 0..4), space())
                .prop_map(|(items, space)| format!("[{space}{}{space}]", items.join(&format!("{space},")))),
            (prop::collection::vec(inner, 0..3), space()).prop_map(|(items, space)| {
                let members: Vec<_> = items.iter().map(|item| format!("\"k\"{space}:{item}")).collect();
                format!("{{{}{space}}}", members.join(","))
            }),
        ]
    })
}

/// A value that routing accepts for `name`: `value` itself, unless the field's type is checked.
fn well_typed(name: &str, value: String, number: u64) -> String {
    match name {
        "model" => format!("\"m{number}\""),
        "stream" => (number == 1).to_string(),
        "n" => number.to_string(),
        _ => value,
    }
}

fn member() -> impl Strategy<Value = Piece> {
    let name = prop_oneof![
        3 => prop::sample::select(Field::ALL).prop_map(|field| field.name().to_owned()),
        1 => prop::sample::select(vec!["temperature", "user", "Stream", "nn", ""]).prop_map(str::to_owned),
        1 => "\\PC{0,6}",
    ];
    let escapes = prop_oneof![2 => Just(0_u32), 1 => any::<u32>()];
    (name, escapes, value_text(), 1_u64..4, [space(), space(), space(), space()]).prop_map(
        |(name, escapes, value, number, [a, b, c, d])| {
            let value = well_typed(&name, value, number);
            Piece { gap: format!("{a},{b}"), key: spelled(&name, escapes), name, colon: format!("{c}:{d}"), value }
        },
    )
}

fn pieces() -> impl Strategy<Value = Pieces> {
    (prop::collection::vec(member(), 0..24), [space(), space(), space(), space()]).prop_map(
        |(members, [before, lead, trail, after])| {
            // In an empty object all white space stands behind the place of new members.
            let lead = if members.is_empty() { String::new() } else { lead };
            Pieces { before, lead, members, trail, after }
        },
    )
}

/// Edits with at most one per field.
fn edits() -> impl Strategy<Value = Vec<(Field, Option<String>)>> {
    let edit = (prop::sample::select(Field::ALL), prop::option::of(value_text()), 1_u64..4).prop_map(
        |(field, value, number): (Field, _, _)| (field, value.map(|value| well_typed(field.name(), value, number))),
    );
    prop::collection::vec(edit, 0..10).prop_map(|edits| {
        let mut unique: Vec<(Field, Option<String>)> = Vec::new();
        for edit in edits {
            unique.retain(|(field, _)| *field != edit.0);
            unique.push(edit);
        }
        unique
    })
}

fn apply(body: &ClientBody, edits: &[(Field, Option<String>)]) -> SplicedBody {
    let mut prepared = Edits::default();
    for (field, value) in edits {
        match value {
            Some(value) => prepared.set(*field, value.clone()),
            None => prepared.remove(*field),
        }
    }
    body.splice(&prepared)
}

fn parse(text: &str) -> ClientBody {
    ClientBody::parse(Bytes::copy_from_slice(text.as_bytes()), Route::Generate).unwrap()
}

/// Every frame of the body, checking its announcements on the way.
fn frames(mut body: SplicedBody) -> Vec<Bytes> {
    let mut context = Context::from_waker(Waker::noop());
    let mut frames: Vec<Bytes> = Vec::new();
    let total = body.len();
    loop {
        let sent: usize = frames.iter().map(Bytes::len).sum();
        assert_eq!(body.size_hint().exact(), Some(total - sent as u64));
        assert_eq!(body.is_end_stream(), sent as u64 == total);
        match Pin::new(&mut body).poll_frame(&mut context) {
            Poll::Ready(Some(frame)) => frames.push(frame.unwrap().into_data().unwrap()),
            Poll::Ready(None) => return frames,
            Poll::Pending => panic!("a spliced body is always ready"),
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn every_byte_outside_the_edited_members_stays(pieces in pieces(), edits in edits()) {
        let spliced = apply(&parse(&pieces.text()), &edits);
        let expected = pieces.edited(&edits).text();
        let result = String::from_utf8(spliced.to_bytes().to_vec()).unwrap();
        prop_assert_eq!(&result, &expected);
        // Valid JSON again, with each set field once and no removed field, under any spelling.
        let reparsed = parse(&result);
        for (field, value) in &edits {
            prop_assert_eq!(reparsed.has(*field), value.is_some());
            let again = pieces.edited(&edits);
            prop_assert_eq!(
                again.members.iter().filter(|member| member.name == field.name()).count(),
                usize::from(value.is_some())
            );
            let expected = value.as_deref().filter(|value| *value != "null");
            prop_assert_eq!(reparsed.value(*field), expected);
        }
    }

    #[test]
    fn frames_add_up_to_the_announced_length(pieces in pieces(), edits in edits()) {
        let spliced = apply(&parse(&pieces.text()), &edits);
        let whole = spliced.to_bytes();
        prop_assert_eq!(spliced.len(), whole.len() as u64);
        let frames = frames(spliced);
        prop_assert!(frames.iter().all(|frame| !frame.is_empty()));
        prop_assert_eq!(frames.concat(), whole);
    }

    #[test]
    fn a_body_without_edits_is_the_clients_own_memory(pieces in pieces()) {
        let body = parse(&pieces.text());
        let spliced = body.splice(&Edits::default());
        let bytes = spliced.to_bytes();
        prop_assert_eq!(bytes.as_ptr(), body.bytes().as_ptr());
        prop_assert_eq!(&bytes, body.bytes());
    }

    #[test]
    fn stripped_handoff_fields_never_remain(pieces in pieces()) {
        let body = parse(&pieces.text());
        let result = body.splice(&Edits::for_leg(&body, ClientHandoffFields::Strip)).to_bytes();
        let result = ClientBody::parse(result, Route::Generate).unwrap();
        for field in HANDOFF_FIELDS {
            prop_assert!(!result.has(field));
        }
        let forwarded = body.splice(&Edits::for_leg(&body, ClientHandoffFields::Forward)).to_bytes();
        prop_assert_eq!(forwarded, pieces.text());
    }

    #[test]
    fn routing_reads_what_a_full_parser_reads(pieces in pieces()) {
        let text = pieces.text();
        let body = parse(&text);
        // A lone surrogate is no Unicode text, so the full parser refuses such documents.
        if let Ok(document) = serde_json::from_str::<serde_json::Value>(&text) {
            prop_assert_eq!(body.model(), document["model"].as_str());
            prop_assert_eq!(body.stream(), document["stream"].as_bool().unwrap_or(false));
            for field in Field::ALL {
                let expected = document.get(field.name()).filter(|value| !value.is_null());
                let read = body.value(*field).map(|raw| serde_json::from_str::<serde_json::Value>(raw).unwrap());
                prop_assert_eq!(read.as_ref(), expected);
            }
        }
    }
}

fn spliced(text: &str, edits: &[(Field, Option<&str>)]) -> String {
    let edits: Vec<_> = edits.iter().map(|(field, value)| (*field, value.map(str::to_owned))).collect();
    String::from_utf8(apply(&parse(text), &edits).to_bytes().to_vec()).unwrap()
}

#[test]
fn edges_of_an_object_are_cut_cleanly() {
    let set = |field, value| (field, Some(value));
    let remove = |field| (field, None);
    for (text, edits, expected) in [
        ("{}", vec![set(Field::Stream, "false")], r#"{"stream":false}"#),
        ("{ } \n", vec![set(Field::Stream, "false")], "{\"stream\":false } \n"),
        (r#"{"n":1}"#, vec![remove(Field::N)], "{}"),
        (r#"{ "n" : 1 , "stream" : true }"#, vec![remove(Field::N), remove(Field::Stream)], "{  }"),
        (r#"{"n":1,"a":2}"#, vec![remove(Field::N)], r#"{"a":2}"#),
        (r#"{"a":2,"n":1}"#, vec![remove(Field::N)], r#"{"a":2}"#),
        (r#"{"a":2,"n":1,"b":3}"#, vec![remove(Field::N)], r#"{"a":2,"b":3}"#),
        (r#"{"n":1}"#, vec![remove(Field::N), set(Field::Stream, "true")], r#"{"stream":true}"#),
        (r#"{"n":1,"a":2,"n":3}"#, vec![set(Field::N, "9")], r#"{"a":2,"n":9}"#),
        (r#"{"\u006e":1,"a":8.0,"a":8.00}"#, vec![set(Field::N, "9")], r#"{"n":9,"a":8.0,"a":8.00}"#),
    ] {
        let result = spliced(text, &edits);
        assert_eq!(result, expected, "{text}");
    }
}

#[test]
fn neighbouring_additions_share_one_segment() {
    let text = r#"{"prompt":"hello"}"#;
    let edits = [Field::BootstrapHost, Field::BootstrapPort, Field::BootstrapRoom].map(|f| (f, Some("1".to_owned())));
    assert_eq!(frames(apply(&parse(text), &edits)).len(), 3);
}

#[test]
fn a_clone_can_be_sent_again() {
    let body = apply(&parse(r#"{"prompt":"hello"}"#), &[(Field::Stream, Some("false".to_owned()))]);
    let again = body.clone();
    assert_eq!(frames(body).concat(), frames(again).concat());
}

#[test]
fn a_later_edit_of_a_field_replaces_the_earlier_one() {
    let body = parse(r#"{"kv_transfer_params":{"x":1},"n":2,"kv_transfer_params":3}"#);
    let mut edits = Edits::for_leg(&body, ClientHandoffFields::Strip);
    edits.set(Field::KvTransferParams, "{}");
    edits.set(Field::N, "1");
    edits.remove(Field::N);
    assert_eq!(body.splice(&edits).to_bytes(), r#"{"kv_transfer_params":{}}"#);
}

#[test]
fn handoff_fields_are_also_removed_where_vllm_looks_for_them_a_second_time() {
    let stripped = |text: &str| {
        let body = parse(text);
        body.splice(&Edits::for_leg(&body, ClientHandoffFields::Strip)).to_bytes()
    };
    for (text, expected) in [
        (r#"{"a":1,"vllm_xargs":{"kv_transfer_params":""},"b":2}"#, r#"{"a":1,"vllm_xargs":{},"b":2}"#),
        (
            r#"{"vllm_xargs" : { "x" : 1.0, "kv_transfer_param\u0073":"", "y":[ 2 ], "ec_transfer_params":{}, "kv_transfer_params":1 } }"#,
            r#"{"vllm_xargs" : {"x":1.0,"y":[ 2 ]} }"#,
        ),
        (r#"{"vllm_\u0078args":{"kv_transfer_params":"","z":"}"}}"#, r#"{"vllm_xargs":{"z":"}"}}"#),
        // The last one counts.
        (
            r#"{"vllm_xargs":{"kv_transfer_params":"a"},"vllm_xargs":{"kv_transfer_params":"b"}}"#,
            r#"{"vllm_xargs":{}}"#,
        ),
    ] {
        assert_eq!(stripped(text), expected, "{text}");
    }
    for untouched in [
        r#"{"vllm_xargs" : { "x" : 1.0 , "deeper":{"kv_transfer_params":1}} }"#,
        r#"{"vllm_xargs":["kv_transfer_params"]}"#,
        r#"{"vllm_xargs":null}"#,
    ] {
        assert_eq!(stripped(untouched), untouched);
    }
    let hidden = parse(r#"{"vllm_xargs":{"kv_transfer_params":""}}"#);
    assert_eq!(hidden.splice(&Edits::for_leg(&hidden, ClientHandoffFields::Forward)).to_bytes(), hidden.bytes());
}
