//! The decision on a request, on its own response: one line for whoever asks with [`DECISION`], short enough for a header.
//!
//! It says what is known when the response head goes out; the record at `/fleet/decisions` goes on to the end.

use std::fmt::Write as _;

use http::{HeaderName, HeaderValue};

use crate::decision::{Attempt, Millis, Record};

/// Asks for the decision on a request, and carries it back.
pub const DECISION: HeaderName = HeaderName::from_static("x-smg-decision");

/// The line; `None` when it would make no header.
pub fn header(record: &Record) -> Option<HeaderValue> {
    let mut line = format!("revision={}; attempts={}", record.revision, record.attempts.len());
    if let Some(attempt) = record.attempts.last() {
        describe(&mut line, attempt);
    }
    let failed: Vec<&str> =
        record.attempts.iter().filter(|attempt| attempt.failed_ms.is_some()).filter_map(code).collect();
    if !failed.is_empty() {
        let _ = write!(line, "; failed={}", failed.join(","));
    }
    HeaderValue::try_from(line).ok()
}

fn describe(line: &mut String, attempt: &Attempt) {
    let _ = write!(line, "; dispatch={}", attempt.dispatch);
    let workers = [("prefill", &attempt.prefill), ("decode", &attempt.decode), ("regular", &attempt.regular)];
    for (leg, worker) in workers {
        let Some(worker) = worker else { continue };
        let _ = write!(line, "; {leg}={worker}");
        // The worker picked last is the one that let the request in.
        if let Some(pick) = attempt.picks.iter().rev().find(|pick| pick.leg == leg) {
            let _ = write!(line, "; {leg}_policy={}/{}", pick.policy.as_str(), pick.branch);
        }
    }
    if !attempt.excluded.is_empty() {
        let _ = write!(line, "; excluded={}", attempt.excluded.len());
    }
    if let Some(mode) = attempt.connector_mode {
        let _ = write!(line, "; kv_connector_mode={mode}");
    }
    if let Some(handed_over) = attempt.kv_handoff {
        let _ = write!(line, "; kv_handoff={handed_over}");
    }
    let times: [(&str, Option<Millis>); 5] = [
        ("selected_ms", Some(attempt.selected_ms)),
        ("prefill_head_ms", attempt.prefill_head_ms),
        ("prefill_done_ms", attempt.prefill_done_ms),
        ("decode_sent_ms", attempt.decode_sent_ms),
        ("decode_head_ms", attempt.decode_head_ms),
    ];
    for (name, time) in times {
        if let Some(time) = time {
            let _ = write!(line, "; {name}={time}");
        }
    }
}

/// The code with which the message of a failed attempt begins.
fn code(attempt: &Attempt) -> Option<&str> {
    let code = attempt.error.as_deref()?.split(':').next()?;
    let is_code = !code.is_empty() && code.bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'_');
    Some(if is_code { code } else { "other" })
}
