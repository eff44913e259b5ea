//! What a MoRI-IO prefill hands over, checked field by field.
//!
//! The decode engine parses these fields in its scheduler step, where a value of the wrong shape raises instead of
//! failing one request. Accepted is what it parses, nothing else; fields not named here pass as they are. `null` reads
//! as absent, and of repeated fields the last one counts, as in the engine's own parser.

use std::borrow::Cow;

use bytes::Bytes;
use smallvec::SmallVec;

use super::decimal;
use crate::json;
use crate::vllm::{Handoff, extract_kv_transfer_params};

/// Counts that may be missing.
const COUNTS: [&str; 5] = ["remote_dp_size", "remote_dp_size_local", "remote_dp_rank", "tp_size", "remote_tp_size"];

/// Why a handoff cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum HandoffError {
    /// The response has none.
    #[error("the prefill returned no kv_transfer_params")]
    Missing,
    /// The response is no JSON object, or its `kv_transfer_params` is none.
    #[error("the prefill's kv_transfer_params could not be read")]
    Malformed,
    /// It belongs to another request.
    #[error("the prefill's handoff carries another transfer_id than this request's")]
    Foreign,
    /// A field the decode engine could not parse.
    #[error("`{field}` of the prefill's handoff must be {expected}")]
    Field {
        /// The field.
        field: &'static str,
        /// What it has to be.
        expected: &'static str,
    },
    /// The decode engine was told another port than the prefill engine has.
    #[error("`{field}` of the prefill's handoff is {reported}, the decode leg was told {told}")]
    Port {
        /// The field.
        field: &'static str,
        /// The prefill's own.
        reported: u16,
        /// The label's.
        told: u16,
    },
}

/// The handoff in `response`, if it is one for `transfer_id`. `told` = the handshake and notify ports that a decode leg
/// already in flight was given.
pub(super) fn check(response: &Bytes, transfer_id: &str, told: Option<(u16, u16)>) -> Result<Bytes, HandoffError> {
    let params = match extract_kv_transfer_params(response) {
        Handoff::Params(params) => params,
        Handoff::Missing => return Err(HandoffError::Missing),
        Handoff::Malformed => return Err(HandoffError::Malformed),
    };
    let text = std::str::from_utf8(&params).map_err(|_| HandoffError::Malformed)?;
    check_fields(text, transfer_id, told)?;
    Ok(params)
}

fn check_fields(text: &str, transfer_id: &str, told: Option<(u16, u16)>) -> Result<(), HandoffError> {
    let members = Members::of(text)?;
    members.require("do_remote_prefill", "true", |raw| (raw == "true").then_some(()))?;
    if members.get("transfer_id").and_then(json::string).as_deref() != Some(transfer_id) {
        return Err(HandoffError::Foreign);
    }
    members.require("remote_engine_id", "a non-empty string", |raw| json::string(raw).filter(|id| !id.is_empty()))?;
    members.require("remote_block_ids", "a list of block ids, or one list per KV cache group", block_ids)?;
    members.require("remote_host", "a non-empty string without white space", |raw| {
        json::string(raw).filter(|host| !host.is_empty() && !host.contains(char::is_whitespace))
    })?;
    let port = |field| members.require(field, "a port from 1 to 65535, as a number or a string", port);
    let handshake = port("remote_handshake_port")?;
    let notify = port("remote_notify_port")?;
    for field in COUNTS {
        if members.get(field).is_some() {
            members.require(field, "a count, as a number or a decimal string", count)?;
        }
    }
    if let Some((handshake_told, notify_told)) = told {
        for (field, reported, told) in
            [("remote_handshake_port", handshake, handshake_told), ("remote_notify_port", notify, notify_told)]
        {
            if reported != told {
                return Err(HandoffError::Port { field, reported, told });
            }
        }
    }
    Ok(())
}

/// The members of the handoff, values as they are written.
struct Members<'a>(SmallVec<[(Cow<'a, str>, &'a str); 24]>);

impl<'a> Members<'a> {
    fn of(text: &'a str) -> Result<Self, HandoffError> {
        let mut members = SmallVec::new();
        json::each_member(text, |key, value| members.extend(json::string(key).map(|key| (key, value))))
            .map_err(|_| HandoffError::Malformed)?;
        Ok(Self(members))
    }

    fn get(&self, name: &str) -> Option<&'a str> {
        let (_, value) = self.0.iter().rfind(|(key, _)| key == name)?;
        Some(*value).filter(|value| *value != "null")
    }

    fn require<T>(
        &self,
        field: &'static str,
        expected: &'static str,
        read: impl FnOnce(&'a str) -> Option<T>,
    ) -> Result<T, HandoffError> {
        self.get(field).and_then(read).ok_or(HandoffError::Field { field, expected })
    }
}

/// A count in either spelling.
fn count(raw: &str) -> Option<u64> {
    match json::string(raw) {
        Some(text) if !text.is_empty() => decimal(&text),
        Some(_) => None,
        None => decimal(raw),
    }
}

fn port(raw: &str) -> Option<u16> {
    count(raw).and_then(|port| u16::try_from(port).ok()).filter(|port| *port != 0)
}

/// `[1,2]` or `[[1,2],[3]]` with at least one id: a prompt has at least one block.
fn block_ids(raw: &str) -> Option<()> {
    let of_groups = || sum(raw, |group| sum(group, block_id));
    let ids = sum(raw, block_id).or_else(of_groups)?;
    (ids > 0).then_some(())
}

fn block_id(raw: &str) -> Option<usize> {
    decimal(raw).map(|_| 1)
}

/// The sum of what `count` makes of the elements of the list `raw`; none when it makes nothing of one.
fn sum(raw: &str, count: impl Fn(&str) -> Option<usize>) -> Option<usize> {
    let mut total = Some(0);
    json::each_element(raw, |element| total = total.zip(count(element)).map(|(sum, more)| sum + more)).ok()?;
    total
}
