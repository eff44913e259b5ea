//! Answers of `/v1/responses` in the shapes of OpenAI's Responses API, which SGLang and vLLM serve alike.

use std::ops::Range;

use serde_json::{Value, json};

use crate::CREATED;
use crate::generate::{Job, Step};
use crate::http::extend;

/// The output item's id.
const ITEM: &str = "msg_0";

fn text(job: &Job, tokens: Range<usize>) -> String {
    let mut text = Vec::new();
    if let Some(prompt) = job.samples.first() {
        tokens.for_each(|index| prompt.write_token(index, &mut text));
    }
    String::from_utf8_lossy(&text).into_owned()
}

fn part(text: &str) -> Value {
    json!({"type": "output_text", "text": text, "annotations": [], "logprobs": []})
}

fn item(status: &str, content: &[Value]) -> Value {
    json!({"id": ITEM, "type": "message", "role": "assistant", "status": status, "content": content})
}

fn response(job: &Job, status: &str, output: &[Value]) -> Value {
    let (input, generated) = (job.prompt_tokens(), job.length);
    let details = json!({"input": {"cached_tokens": 0}, "output": {"reasoning_tokens": 0}});
    let usage = (status == "completed").then(|| {
        json!({
            "input_tokens": input, "input_tokens_details": details["input"],
            "output_tokens": generated, "output_tokens_details": details["output"],
            "total_tokens": input + generated,
        })
    });
    json!({
        "id": job.id, "object": "response", "created_at": CREATED, "status": status,
        "model": job.model.trim_matches('"'), "output": output, "usage": usage,
        "error": null, "incomplete_details": null, "instructions": null, "metadata": {}, "parallel_tool_calls": true,
        "temperature": 1.0, "top_p": 1.0, "tool_choice": "auto", "tools": [],
    })
}

fn complete(job: &Job) -> Value {
    response(job, "completed", &[item("completed", &[part(&text(job, 0..job.length))])])
}

/// The whole answer, with what a prefill hands over beside it.
pub(crate) fn write_whole(job: &Job, transfer: Option<&str>) -> Vec<u8> {
    let mut answer = complete(job);
    if let Some(Ok(transfer)) = transfer.map(serde_json::from_str::<Value>) {
        answer["kv_transfer_params"] = transfer;
    }
    answer.to_string().into_bytes()
}

/// The events of a streamed answer: named and numbered, and without an end marker.
pub(crate) fn write_step(job: &Job, step: Step, out: &mut Vec<u8>) {
    let place = json!({"item_id": ITEM, "output_index": 0, "content_index": 0});
    let with = |name: &str, value: Value| {
        let mut event = place.clone();
        event[name] = value;
        event
    };
    let opened = 4;
    let events: Vec<(usize, &str, Value)> = match step {
        Step::Open { .. } => vec![
            (0, "response.created", json!({"response": response(job, "in_progress", &[])})),
            (1, "response.in_progress", json!({"response": response(job, "in_progress", &[])})),
            (2, "response.output_item.added", json!({"output_index": 0, "item": item("in_progress", &[])})),
            (3, "response.content_part.added", with("part", part(""))),
        ],
        Step::Token { index, .. } => {
            let mut event = with("delta", json!(text(job, index..index + 1)));
            event["logprobs"] = json!([]);
            vec![(opened + index, "response.output_text.delta", event)]
        }
        Step::Close { .. } => {
            let (text, next) = (text(job, 0..job.length), opened + job.length);
            let mut done = with("text", json!(text));
            done["logprobs"] = json!([]);
            let item = item("completed", &[part(&text)]);
            vec![
                (next, "response.output_text.done", done),
                (next + 1, "response.content_part.done", with("part", part(&text))),
                (next + 2, "response.output_item.done", json!({"output_index": 0, "item": item})),
                (next + 3, "response.completed", json!({"response": complete(job)})),
            ]
        }
        Step::Usage | Step::Done => return,
    };
    for (number, name, mut event) in events {
        (event["type"], event["sequence_number"]) = (json!(name), json!(number));
        extend(out, &["event: ", name, "\ndata: ", &event.to_string(), "\n\n"]);
    }
}
