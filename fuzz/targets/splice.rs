//! Edited bodies: every byte outside the edited members stays, in its order, and each leg says what it must.
//!
//! Input: three bytes that choose the route and the edits, then a body. The expected bytes are made a second, naive way: from the places of
//! the members of the original, found by another walk.
#![no_main]

use std::fmt;

use bytes::Bytes;
use libfuzzer_sys::fuzz_target;
use serde::Deserializer as _;
use serde::de::{MapAccess, Visitor};
use serde_json::value::RawValue;
use smg_engines::sglang::{self, Ranks, Rendezvous, Shape};
use smg_engines::vllm::{self, Connector, Plan};
use smg_engines::{ClientBody, ClientHandoffFields, Edits, Field, HANDOFF_FIELDS, Route};

/// Values that edits set.
const VALUES: [&str; 6] = ["false", "1", "null", r#""x""#, r#"{"a":[1,{"b":null}]}"#, "[]"];

/// A member of an object: its name, and its key's and value's text.
struct Member<'a> {
    name: Option<String>,
    key: &'a str,
    value: &'a str,
}

struct Members;

impl<'de> Visitor<'de> for Members {
    type Value = Vec<Member<'de>>;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut members = Vec::new();
        while let Some((key, value)) = map.next_entry::<&'de RawValue, &'de RawValue>()? {
            let name = serde_json::from_str(key.get()).ok();
            members.push(Member { name, key: key.get(), value: value.get() });
        }
        Ok(members)
    }
}

fn members(text: &str) -> Option<Vec<Member<'_>>> {
    let mut deserializer = serde_json::Deserializer::from_str(text);
    let members = deserializer.deserialize_map(Members).ok()?;
    deserializer.end().ok()?;
    Some(members)
}

type Edit = (Field, Option<String>);

/// The body with `edits` applied, from the places of its members.
fn expected(text: &str, edits: &[Edit]) -> String {
    let members = members(text).expect("it was accepted");
    let position = |part: &str| part.as_ptr().addr() - text.as_ptr().addr();
    let edit_of = |member: &Member<'_>| edits.iter().find(|(field, _)| member.name.as_deref() == Some(field.name()));
    let mut kept = Vec::new();
    let mut end = text.find('{').expect("it is an object") + 1;
    let inside = end;
    for (index, member) in members.iter().enumerate() {
        let gap = &text[end..position(member.key)];
        end = position(member.value) + member.value.len();
        let colon = &text[position(member.key) + member.key.len()..position(member.value)];
        let last = !members[index + 1..].iter().any(|later| later.name == member.name);
        match edit_of(member) {
            None => kept.push((gap, format!("{}{colon}{}", member.key, member.value))),
            Some((field, Some(value))) if last => kept.push((gap, format!("\"{}\"{colon}{value}", field.name()))),
            Some(_) => {}
        }
    }
    let first = members.first().map_or(inside, |member| position(member.key));
    let mut out = text[..first].to_owned();
    for (index, (gap, member)) in kept.iter().enumerate() {
        if index > 0 {
            out.push_str(gap);
        }
        out.push_str(member);
    }
    let mut any = !kept.is_empty();
    for (field, value) in edits {
        let Some(value) = value else { continue };
        if members.iter().any(|member| member.name.as_deref() == Some(field.name())) {
            continue;
        }
        if any {
            out.push(',');
        }
        any = true;
        out.push_str(&format!("\"{}\":{value}", field.name()));
    }
    out.push_str(&text[end..]);
    out
}

/// The values of `field` in an object.
fn values(text: &str, field: Field) -> Vec<String> {
    let members = members(text).expect("an edited body is an object again");
    let named = members.into_iter().filter(|member| member.name.as_deref() == Some(field.name()));
    named.map(|member| member.value.to_owned()).collect()
}

fn text(bytes: &Bytes) -> &str {
    std::str::from_utf8(bytes).expect("an edited body is text again")
}

fn check_edits(body: &ClientBody, seed: [u8; 2]) {
    let mut edits: Vec<Edit> = Vec::new();
    let mut prepared = Edits::default();
    for step in 0..4_u8 {
        let number = usize::from(seed[0].wrapping_mul(step + 1).wrapping_add(step)) + usize::from(seed[1] >> step);
        let field = Field::ALL[number % Field::ALL.len()];
        let value = (number % 4 != 0).then(|| VALUES[number % VALUES.len()].to_owned());
        match &value {
            Some(value) => prepared.set(field, value.clone()),
            None => prepared.remove(field),
        }
        edits.retain(|(edited, _)| *edited != field);
        edits.push((field, value));
    }
    let spliced = body.splice(&prepared);
    let length = spliced.len();
    let out = spliced.to_bytes();
    assert_eq!(out.len() as u64, length);
    assert_eq!(text(&out), expected(text(body.bytes()), &edits));
    for (field, value) in edits {
        assert_eq!(values(text(&out), field), Vec::from_iter(value));
    }
    assert_eq!(body.splice(&Edits::default()).to_bytes(), body.bytes());
}

fn check_legs(body: &ClientBody) {
    let strip = ClientHandoffFields::Strip;
    let decode = vllm::decode_leg(body, strip, None, false).to_bytes();
    let mut stripped: Vec<Edit> = HANDOFF_FIELDS.into_iter().map(|field| (field, None)).collect();
    if let Some(extra) = body.value(Field::VllmXargs).and_then(members) {
        let is_handoff =
            |member: &Member<'_>| HANDOFF_FIELDS.iter().any(|it| member.name.as_deref() == Some(it.name()));
        if extra.iter().any(is_handoff) {
            let kept = extra.iter().filter(|member| !is_handoff(member));
            let kept: Vec<String> = kept.map(|member| format!("{}:{}", member.key, member.value)).collect();
            stripped.push((Field::VllmXargs, Some(format!("{{{}}}", kept.join(",")))));
        }
    }
    assert_eq!(text(&decode), expected(text(body.bytes()), &stripped));

    if let Plan::PrefillThenDecode { tag, .. } = vllm::plan(body, Connector::Nixl, None, uuid::Uuid::nil()) {
        let prefill = vllm::prefill_leg(body, strip, tag.as_ref()).to_bytes();
        let of = |field| values(text(&prefill), field);
        assert_eq!(of(Field::Stream), ["false"]);
        assert!(of(Field::StreamOptions).is_empty() && of(Field::MinTokens).is_empty());
        let caps = [Field::MaxTokens, Field::MaxCompletionTokens, Field::MaxOutputTokens].map(of);
        assert!(caps.iter().any(|cap| *cap == ["1"]), "{caps:?}");
        let reparsed = ClientBody::parse(prefill.clone(), body.route()).expect("a leg is a body");
        assert!(reparsed.samples() == 1 && !reparsed.stream() && reparsed.model() == body.model());
    }
    // A room per sample costs memory: that is bounded elsewhere, by the largest body.
    if let Ok(shape) = Shape::of(body) {
        let mut room = 0;
        let rendezvous = Rendezvous::mint("h", Some(1), shape, || {
            room += 1;
            room
        });
        let ranks = Ranks { prefill: Some(1), decode: Some(2) };
        let legs = sglang::legs(body, strip, &rendezvous, ranks);
        let (prefill, decode) = (legs.prefill.to_bytes(), legs.decode.to_bytes());
        for field in [Field::BootstrapHost, Field::BootstrapPort, Field::BootstrapRoom] {
            assert_eq!(values(text(&prefill), field), values(text(&decode), field));
            assert_eq!(values(text(&prefill), field).len(), 1);
        }
        assert_eq!(values(text(&prefill), Field::RoutedDpRank), ["1"]);
        assert_eq!(values(text(&decode), Field::RoutedDpRank), ["2"]);
        assert!(values(text(&prefill), Field::KvTransferParams).is_empty());
    }
}

fuzz_target!(|data: &[u8]| {
    let Some(([route, seed @ ..], body)) = data.split_first_chunk::<3>() else { return };
    let route = Route::ALL[usize::from(*route) % Route::ALL.len()];
    let Ok(body) = ClientBody::parse(Bytes::copy_from_slice(body), route) else { return };
    let _ = (body.samples(), body.prompt(), body.prompt_count(), body.wants_logprobs());
    let _ = (body.routing_text(), body.routing_token_ids(), body.routing_value(Field::LoraPath));
    check_edits(&body, *seed);
    check_legs(&body);
});
