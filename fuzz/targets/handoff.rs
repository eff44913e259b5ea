//! Handoffs: nothing is accepted that a decode engine could not parse, nothing valid is refused, and what passes is the prefill's own text.
//!
//! Input: one byte for the mode of the pair, then a prefill's response. The judge is a second validator, over a parsed document.
#![no_main]

use bytes::Bytes;
use libfuzzer_sys::fuzz_target;
use serde_json::{Map, Value};
use smg_engines::moriio::{Pair, Settings, TransferId};
use smg_engines::vllm::{Handoff, extract_kv_transfer_params};

const HANDSHAKE: &str = "7301";
const NOTIFY: &str = "7501";

fn settings(mode: &'static str, dispatch: &'static str, shift: bool) -> Settings {
    let label = move |name: &str| match name {
        "moriio_mode" => Some(mode),
        "moriio_write_dispatch" => Some(dispatch),
        "moriio_handshake_port" => Some(if shift { "7302" } else { HANDSHAKE }),
        "moriio_notify_port" => Some(if shift { "7502" } else { NOTIFY }),
        _ => None,
    };
    Settings::read(label, "127.0.0.1").expect("these labels are right")
}

fn count(value: &Value) -> Option<u64> {
    match value {
        // A number that is written with a fraction or an exponent is none that the engine takes.
        Value::Number(number) => number.as_u64().filter(|_| !number.is_f64()),
        Value::String(text) if !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit()) => text.parse().ok(),
        _ => None,
    }
}

fn is_port(value: Option<&Value>, told: Option<&str>) -> bool {
    let port = value.and_then(count).filter(|port| (1..=65535).contains(port));
    port.is_some_and(|port| told.is_none_or(|told| told == port.to_string()))
}

fn is_list_of_ids(value: &Value) -> Option<usize> {
    value.as_array()?.iter().map(|id| id.as_u64()).collect::<Option<Vec<_>>>().map(|ids| ids.len())
}

fn are_blocks(value: &Value) -> bool {
    let grouped = || value.as_array()?.iter().map(is_list_of_ids).sum::<Option<usize>>();
    is_list_of_ids(value).or_else(grouped).is_some_and(|ids| ids > 0)
}

fn is_text(value: Option<&Value>, may_hold_space: bool) -> bool {
    let text = value.and_then(Value::as_str).filter(|text| !text.is_empty());
    text.is_some_and(|text| may_hold_space || !text.contains(char::is_whitespace))
}

fn is_valid(params: &Map<String, Value>, transfer_id: &str, told: bool) -> bool {
    let get = |name: &str| params.get(name).filter(|value| !value.is_null());
    let counts = ["remote_dp_size", "remote_dp_size_local", "remote_dp_rank", "tp_size", "remote_tp_size"];
    get("do_remote_prefill") == Some(&Value::Bool(true))
        && get("transfer_id").and_then(Value::as_str) == Some(transfer_id)
        && is_text(get("remote_engine_id"), true)
        && get("remote_block_ids").is_some_and(are_blocks)
        && is_text(get("remote_host"), false)
        && is_port(get("remote_handshake_port"), told.then_some(HANDSHAKE))
        && is_port(get("remote_notify_port"), told.then_some(NOTIFY))
        && counts.iter().all(|name| get(name).is_none_or(|value| count(value).is_some()))
}

fuzz_target!(|data: &[u8]| {
    let Some((mode, response)) = data.split_first() else { return };
    let (mode, dispatch) =
        [("read", "sequential"), ("write", "sequential"), ("write", "concurrent")][usize::from(*mode) % 3];
    let (prefill, decode) = (Ok(settings(mode, dispatch, false)), Ok(settings(mode, dispatch, true)));
    let pair = Pair::check(Some(&prefill), Some(&decode)).expect("these two are a pair");
    let transfer_id = TransferId::new(uuid::Uuid::nil());
    let response = Bytes::copy_from_slice(response);

    let found = extract_kv_transfer_params(&response);
    let checked = pair.check_handoff(&response, &transfer_id);
    if let Ok(params) = &checked {
        assert_eq!(found, Handoff::Params(params.clone()));
        let inside = response.as_ptr_range();
        assert!(inside.contains(&params.as_ptr()), "what passes is the prefill's own text");
    }
    // Documents that a full parser refuses (a lone surrogate, a number beyond its range) have no second opinion.
    let Ok(document) = serde_json::from_slice::<Value>(&response) else { return };
    let params = document.get("kv_transfer_params").and_then(Value::as_object);
    assert_eq!(matches!(found, Handoff::Params(_)), params.is_some());
    let valid = params.is_some_and(|params| is_valid(params, &transfer_id.to_string(), pair.is_concurrent()));
    assert_eq!(checked.is_ok(), valid, "{checked:?}");
});
