//! Answers of `/v1/messages` in the shapes of Anthropic's Messages API (version 2023-06-01), which SGLang and vLLM serve alike.

use std::io::Write as _;

use crate::generate::{Job, Step};
use crate::http::extend;
use crate::json::{Invalid, Object, quoted};
use crate::text;

/// An error as the API writes it.
pub(crate) fn error(status: u16, message: &str) -> String {
    let kind = match status {
        404 => "not_found_error",
        400..=499 => "invalid_request_error",
        _ => "api_error",
    };
    format!(r#"{{"type":"error","error":{{"type":"{kind}","message":{}}}}}"#, quoted(message))
}

/// The tokens of a request to count them.
pub(crate) fn prompt_tokens(body: &[u8]) -> Result<usize, Invalid> {
    let object = Object::parse(body)?;
    let messages = object.get("messages").ok_or("messages: field required")?;
    Ok(text::chat(messages)?.tokens)
}

/// The answer of `/v1/messages/count_tokens`.
pub(crate) fn count(tokens: usize) -> String {
    format!(r#"{{"input_tokens":{tokens}}}"#)
}

fn stop_reason(job: &Job) -> &'static str {
    if job.capped { "max_tokens" } else { "end_turn" }
}

/// The whole answer, with what a prefill hands over beside it.
pub(crate) fn write_whole(job: &Job, transfer: Option<&str>) -> Vec<u8> {
    let mut out = Vec::with_capacity(512 + job.completion_tokens() * 8);
    extend(&mut out, &[r#"{"id":"#, &job.id_json, r#","type":"message","role":"assistant","model":"#, &job.model]);
    extend(&mut out, &[r#","content":[{"type":"text","text":""#]);
    if let Some(prompt) = job.samples.first() {
        prompt.write_tokens(job.length, &mut out);
    }
    extend(&mut out, &[r#""}],"stop_reason":""#, stop_reason(job), r#"","stop_sequence":null,"usage":"#]);
    // Writing to a vector cannot fail.
    let _ = write!(out, r#"{{"input_tokens":{},"output_tokens":{}}}"#, job.prompt_tokens(), job.length);
    if let Some(transfer) = transfer {
        extend(&mut out, &[r#","kv_transfer_params":"#, transfer]);
    }
    out.push(b'}');
    out
}

/// The events of a streamed answer: named, and without an end marker.
pub(crate) fn write_step(job: &Job, step: Step, out: &mut Vec<u8>) {
    match step {
        Step::Open { .. } => {
            extend(out, &["event: message_start\ndata: ", r#"{"type":"message_start","message":{"id":"#, &job.id_json]);
            extend(out, &[r#","type":"message","role":"assistant","model":"#, &job.model]);
            let _ = write!(
                out,
                r#","content":[],"stop_reason":null,"stop_sequence":null,"usage":{{"input_tokens":{},"output_tokens":0}}}}}}"#,
                job.prompt_tokens()
            );
            extend(out, &["\n\nevent: content_block_start\ndata: "]);
            extend(out, &[r#"{"type":"content_block_start","index":0,"content_block":{"type":"text","text":""}}"#]);
        }
        Step::Token { sample, index } => {
            let Some(prompt) = job.samples.get(sample) else { return };
            extend(out, &["event: content_block_delta\ndata: "]);
            extend(out, &[r#"{"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":""#]);
            prompt.write_token(index, out);
            extend(out, &[r#""}}"#]);
        }
        Step::Close { .. } => {
            extend(out, &["event: content_block_stop\ndata: ", r#"{"type":"content_block_stop","index":0}"#]);
            extend(out, &["\n\nevent: message_delta\ndata: ", r#"{"type":"message_delta","delta":{"stop_reason":""#]);
            extend(out, &[stop_reason(job), r#"","stop_sequence":null},"usage":{"output_tokens":"#]);
            let _ = write!(out, "{}}}}}", job.length);
            extend(out, &["\n\nevent: message_stop\ndata: ", r#"{"type":"message_stop"}"#]);
        }
        Step::Usage | Step::Done => return,
    }
    extend(out, &["\n\n"]);
}
