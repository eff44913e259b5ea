//! SGLang's answers: whole, and event by event.

use std::io::Write as _;

use serde_json::{Value, json};

use crate::generate::{Api, Job, Step, logprob};
use crate::http::extend;
use crate::text::Prompt;
use crate::{CREATED, messages, responses};

pub(super) fn write_whole(job: &Job, transfer: Option<&str>) -> Vec<u8> {
    match job.api {
        Api::Messages => return messages::write_whole(job, transfer),
        Api::Responses => return responses::write_whole(job, transfer),
        Api::Chat | Api::Completions | Api::Generate => {}
    }
    let mut out = Vec::with_capacity(1024 + job.completion_tokens() * 8);
    if job.api == Api::Generate {
        let many = job.batch || job.samples.len() > 1;
        if many {
            out.push(b'[');
        }
        for sample in 0..job.samples.len() {
            if sample > 0 {
                out.push(b',');
            }
            write_generated(job, sample, job.length, false, &mut out);
        }
        if many {
            out.push(b']');
        }
        return out;
    }
    let chat = job.api == Api::Chat;
    let object = if chat { "chat.completion" } else { "text_completion" };
    begin(job, object, &mut out);
    for (index, prompt) in job.samples.iter().enumerate() {
        if index > 0 {
            out.push(b',');
        }
        let text = if chat { r#","message":{"role":"assistant","content":""# } else { r#","text":""# };
        extend(&mut out, &[r#"{"index":"#, &index.to_string(), text]);
        prompt.write_tokens(job.length, &mut out);
        extend(
            &mut out,
            &[if chat { r#"","reasoning_content":null,"tool_calls":null}"# } else { r#"""# }, r#","logprobs":"#],
        );
        job.write_logprobs(*prompt, 0..job.length, &mut out);
        extend(&mut out, &[r#","finish_reason":""#, job.finish_reason(), r#"","matched_stop":null}"#]);
    }
    extend(&mut out, &[r#"],"usage":"#]);
    write_usage(job, &mut out);
    extend(&mut out, &[r#","metadata":{"weight_version":"default"}}"#]);
    out
}

fn begin(job: &Job, object: &str, out: &mut Vec<u8>) {
    extend(out, &[r#"{"id":"#, &job.id_json, r#","object":""#, object]);
    // Writing to a vector cannot fail.
    let _ = write!(out, r#"","created":{CREATED},"model":{},"choices":["#, job.model);
}

fn write_usage(job: &Job, out: &mut Vec<u8>) {
    let (prompt, completion) = (job.prompt_tokens(), job.completion_tokens());
    let _ = write!(
        out,
        r#"{{"prompt_tokens":{prompt},"total_tokens":{},"completion_tokens":{completion},"prompt_tokens_details":null,"reasoning_tokens":0}}"#,
        prompt + completion
    );
}

/// One sample of `/generate` with its first `tokens` tokens.
fn write_generated(job: &Job, sample: usize, tokens: usize, streamed: bool, out: &mut Vec<u8>) {
    let Some(prompt) = job.samples.get(sample).copied() else {
        return;
    };
    extend(out, &[r#"{"text":""#]);
    prompt.write_tokens(tokens, out);
    extend(out, &[r#"","output_ids":["#]);
    for index in 0..tokens {
        let comma = if index > 0 { "," } else { "" };
        let _ = write!(out, "{comma}{}", prompt.token_id(index));
    }
    extend(out, &[r#"],"meta_info":{"id":"#, &job.id_json]);
    extend(out, &[r#","finish_reason":"#]);
    if tokens < job.length {
        extend(out, &["null"]);
    } else if job.capped {
        let _ = write!(out, r#"{{"type":"length","length":{}}}"#, job.length);
    } else {
        extend(out, &[r#"{"type":"stop","matched":0}"#]);
    }
    let _ = write!(out, r#","prompt_tokens":{},"weight_version":"default","total_retractions":0"#, prompt.tokens);
    if job.logprobs {
        write_token_logprobs(job, prompt, tokens, out);
    }
    let _ = write!(out, r#","completion_tokens":{tokens},"cached_tokens":0,"e2e_latency":0.0}}"#);
    if streamed && job.samples.len() > 1 {
        let _ = write!(out, r#","index":{sample}"#);
    }
    out.push(b'}');
}

/// `[logprob, token id, null]` for each token. The prompt's are known where it was computed: not on a decode engine.
fn write_token_logprobs(job: &Job, prompt: Prompt, tokens: usize, out: &mut Vec<u8>) {
    let input: Vec<Value> = if job.input_logprobs {
        (0..prompt.tokens)
            .map(|index| {
                let id = prompt.token_id(usize::MAX - index);
                match index {
                    0 => json!([null, id, null]),
                    _ => json!([logprob(id), id, null]),
                }
            })
            .collect()
    } else {
        Vec::new()
    };
    let output: Vec<Value> = (0..tokens)
        .map(|index| {
            let id = prompt.token_id(index);
            json!([logprob(id), id, null])
        })
        .collect();
    let _ = write!(
        out,
        r#","input_token_logprobs":{},"output_token_logprobs":{}"#,
        Value::from(input),
        Value::from(output)
    );
}

pub(super) fn write_step(job: &Job, step: Step, out: &mut Vec<u8>) {
    match job.api {
        Api::Messages => return messages::write_step(job, step, out),
        Api::Responses => return responses::write_step(job, step, out),
        Api::Chat | Api::Completions | Api::Generate => {}
    }
    let start = out.len();
    extend(out, &["data: "]);
    match (job.api, step) {
        (_, Step::Done) => extend(out, &["[DONE]"]),
        (Api::Generate, Step::Token { sample, index }) => {
            write_generated(job, sample, index + 1, true, out);
        }
        (Api::Chat, Step::Open { sample }) => {
            begin(job, "chat.completion.chunk", out);
            let _ = write!(
                out,
                r#"{{"index":{sample},"delta":{{"role":"assistant","content":"","reasoning_content":null,"tool_calls":null}},"logprobs":null,"finish_reason":null,"matched_stop":null}}],"usage":null}}"#
            );
        }
        (Api::Chat, Step::Token { sample, index }) => {
            let Some(prompt) = job.samples.get(sample).copied() else {
                return;
            };
            begin(job, "chat.completion.chunk", out);
            let _ = write!(out, r#"{{"index":{sample},"delta":{{"role":null,"content":""#);
            prompt.write_token(index, out);
            extend(out, &[r#"","reasoning_content":null,"tool_calls":null},"logprobs":"#]);
            job.write_logprobs(prompt, index..index + 1, out);
            extend(out, &[r#","finish_reason":null,"matched_stop":null}],"usage":null}"#]);
        }
        (Api::Chat, Step::Close { sample }) => {
            begin(job, "chat.completion.chunk", out);
            let _ = write!(
                out,
                r#"{{"index":{sample},"delta":{{"role":null,"content":null,"reasoning_content":null,"tool_calls":null}},"logprobs":null,"finish_reason":"{}","matched_stop":null}}],"usage":null}}"#,
                job.finish_reason()
            );
        }
        (Api::Completions, Step::Token { sample, index }) => {
            let Some(prompt) = job.samples.get(sample).copied() else {
                return;
            };
            begin(job, "text_completion", out);
            let _ = write!(out, r#"{{"index":{sample},"text":""#);
            prompt.write_token(index, out);
            extend(out, &[r#"","logprobs":"#]);
            job.write_logprobs(prompt, index..index + 1, out);
            extend(out, &[r#","finish_reason":"#]);
            if index + 1 == job.length {
                extend(out, &["\"", job.finish_reason(), "\""]);
            } else {
                extend(out, &["null"]);
            }
            extend(out, &[r#","matched_stop":null}],"usage":null}"#]);
        }
        (Api::Chat | Api::Completions, Step::Usage) if job.include_usage => {
            let object = match job.api {
                Api::Chat => "chat.completion.chunk",
                _ => "text_completion",
            };
            begin(job, object, out);
            extend(out, &[r#"],"usage":"#]);
            write_usage(job, out);
            out.push(b'}');
        }
        _ => {
            out.truncate(start);
            return;
        }
    }
    extend(out, &["\n\n"]);
}
