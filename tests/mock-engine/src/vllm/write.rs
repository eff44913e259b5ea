//! vLLM's answers: whole, and event by event.

use std::io::Write as _;

use crate::generate::{Api, Job, Step};
use crate::http::extend;
use crate::{CREATED, messages, responses};

const FINGERPRINT: &str = "vllm-0.32.0-4fde26ed";

pub(super) fn write_whole(job: &Job, transfer: Option<&str>) -> Vec<u8> {
    match job.api {
        Api::Messages => return messages::write_whole(job, transfer),
        Api::Responses => return responses::write_whole(job, transfer),
        Api::Chat | Api::Completions | Api::Generate => {}
    }
    let mut out = Vec::with_capacity(1024 + job.completion_tokens() * 8);
    let object = match job.api {
        Api::Chat => "chat.completion",
        _ => "text_completion",
    };
    extend(&mut out, &[r#"{"id":"#, &job.id_json, r#","object":""#, object]);
    // Writing to a vector cannot fail.
    let _ = write!(out, r#"","created":{CREATED},"model":{},"choices":["#, job.model);
    for (index, prompt) in job.samples.iter().enumerate() {
        if index > 0 {
            out.push(b',');
        }
        let text = match job.api {
            Api::Chat => r#","message":{"role":"assistant","content":""#,
            _ => r#","text":""#,
        };
        extend(&mut out, &[r#"{"index":"#, &index.to_string(), text]);
        prompt.write_tokens(job.length, &mut out);
        if job.api == Api::Chat {
            extend(
                &mut out,
                &[r#"","refusal":null,"annotations":null,"audio":null,"function_call":null,"reasoning":null}"#],
            );
        } else {
            out.push(b'"');
        }
        extend(&mut out, &[r#","logprobs":"#]);
        job.write_logprobs(*prompt, 0..job.length, &mut out);
        extend(&mut out, &[r#","finish_reason":""#, job.finish_reason(), r#"","stop_reason":null,"token_ids":null,"#]);
        if job.api != Api::Chat {
            extend(&mut out, &[r#""prompt_logprobs":"#]);
            job.write_prompt_logprobs(*prompt, &mut out);
            extend(&mut out, &[r#","prompt_token_ids":null,"#]);
        }
        extend(&mut out, &[r#""routed_experts":null}"#]);
    }
    extend(&mut out, &[r#"],"service_tier":null,"system_fingerprint":""#, FINGERPRINT, r#"","usage":"#]);
    write_usage(job, r#","prompt_tokens_details":null,"completion_tokens_details":null"#, &mut out);
    if let (Api::Chat, Some(prompt)) = (job.api, job.samples.first()) {
        extend(&mut out, &[r#","prompt_logprobs":"#]);
        job.write_prompt_logprobs(*prompt, &mut out);
        extend(&mut out, &[r#","prompt_token_ids":null,"prompt_text":null"#]);
    }
    extend(
        &mut out,
        &[r#","kv_transfer_params":"#, transfer.unwrap_or("null"), r#","ec_transfer_params":null,"metrics":null}"#],
    );
    out
}

fn write_usage(job: &Job, details: &str, out: &mut Vec<u8>) {
    let (prompt, completion) = (job.prompt_tokens(), job.completion_tokens());
    let _ = write!(
        out,
        r#"{{"prompt_tokens":{prompt},"total_tokens":{},"completion_tokens":{completion}{details}}}"#,
        prompt + completion
    );
}

pub(super) fn write_step(job: &Job, step: Step, out: &mut Vec<u8>) {
    match job.api {
        Api::Messages => return messages::write_step(job, step, out),
        Api::Responses => return responses::write_step(job, step, out),
        Api::Chat | Api::Completions | Api::Generate => {}
    }
    let chat = job.api == Api::Chat;
    let object = if chat { "chat.completion.chunk" } else { "text_completion" };
    let begin = |out: &mut Vec<u8>| {
        extend(out, &[r#"data: {"id":"#, &job.id_json, r#","object":""#]);
        let _ = write!(out, r#"{object}","created":{CREATED},"model":{},"choices":["#, job.model);
    };
    let fingerprint = |out: &mut Vec<u8>| {
        extend(out, &[r#","system_fingerprint":""#, FINGERPRINT, r#"""#]);
    };
    match step {
        Step::Open { sample } if chat => {
            begin(out);
            let _ = write!(
                out,
                r#"{{"index":{sample},"delta":{{"role":"assistant","content":""}},"logprobs":null,"finish_reason":null}}],"prompt_token_ids":null,"prompt_text":null}}"#
            );
        }
        Step::Token { sample, index } => {
            let Some(prompt) = job.samples.get(sample) else {
                return;
            };
            let last = index + 1 == job.length;
            begin(out);
            let text = if chat { r#","delta":{"content":""# } else { r#","text":""# };
            let _ = write!(out, r#"{{"index":{sample}{text}"#);
            prompt.write_token(index, out);
            extend(out, &[if chat { r#""}"# } else { r#"""# }, r#","logprobs":"#]);
            job.write_logprobs(*prompt, index..index + 1, out);
            extend(out, &[r#","finish_reason":"#]);
            if last {
                extend(out, &["\"", job.finish_reason(), "\""]);
            } else {
                extend(out, &["null"]);
            }
            if last || !chat {
                extend(out, &[r#","stop_reason":null"#]);
            }
            if !chat {
                extend(out, &[r#","prompt_token_ids":null"#]);
            }
            extend(out, &[r#","token_ids":null}]"#]);
            if last {
                fingerprint(out);
            }
            out.push(b'}');
        }
        Step::Usage if job.include_usage => {
            begin(out);
            extend(out, &[r#"],"usage":"#]);
            write_usage(job, "", out);
            fingerprint(out);
            out.push(b'}');
        }
        Step::Done => extend(out, &["data: [DONE]"]),
        Step::Open { .. } | Step::Close { .. } | Step::Usage => return,
    }
    extend(out, &["\n\n"]);
}
