//! The clients: what they ask, how they behave, and the judge of what they get.
//!
//! Answers depend on nothing but the request and its id, so a single engine says once what is right, and every answer is compared with
//! that byte for byte: one that belongs to another request, or to another prompt, is seen at once.

use std::collections::BTreeSet;
use std::time::Duration;

use bytes::Bytes;
use futures::StreamExt;
use futures::future::join_all;
use serde_json::{Value, json};

use crate::faults::{OTHER_BODY, OTHER_EVENTS};
use crate::fleet::{Kind, bytes};
use crate::random::Random;
use crate::support::{Engine, MockEngine};

/// Longer than the gateway's own deadline by far: who waits this long has been forgotten.
pub const FORGOTTEN: Duration = Duration::from_secs(120);
/// Stands for the request id in recorded answers.
const ID: &str = "@request-id@";
const BROKEN: &[u8] = b"data: {\"error\":{\"message\":\"Stream error: ";
/// The same in the events of `/v1/messages`.
const BROKEN_MESSAGE: &[u8] = b"event: error\ndata: {";
/// What engines answer on a route that they do not have themselves.
pub const RERANKED: &str = r#"{"results":[{"index":1,"relevance_score":0.5}]}"#;
const MESSAGES: &str = "/v1/messages";
const COUNT_TOKENS: &str = "/v1/messages/count_tokens";
const DONE: &[u8] = b"data: [DONE]\n\n";

/// What is right for a request.
enum Right {
    /// This answer, with [`ID`] for the request id.
    Answer(String),
    /// A refusal by the gateway.
    Refusal(u16, &'static str),
}

/// A request that clients send.
pub struct Case {
    path: &'static str,
    body: Bytes,
    streamed: bool,
    right: Right,
    /// The answer carries the prompt's log probabilities: the prefill's, merged.
    merged: bool,
}

impl Case {
    /// Whether it costs much more than others.
    pub fn is_large(&self) -> bool {
        self.body.len() > 100_000
    }

    /// Whether it is served by one engine of a pair: the prefill.
    pub fn counts_tokens(&self) -> bool {
        self.path == COUNT_TOKENS
    }
}

fn prompt(words: usize, salt: usize) -> String {
    (0..words).map(|word| format!("w{}", word * 7 + salt)).collect::<Vec<_>>().join(" ")
}

/// The requests of a kind, with the answers of `single`, an engine that serves whole requests.
pub async fn cases(kind: &Kind, single: &MockEngine) -> Vec<Case> {
    let chat = |content: String, more: Value| {
        let body = json!({"model": kind.model, "messages": [{"role": "user", "content": content}], "max_tokens": 12});
        ("/v1/chat/completions", with(body, more))
    };
    let completion = |prompt: Value, more: Value| {
        ("/v1/completions", with(json!({"model": kind.model, "prompt": prompt, "max_tokens": 12}), more))
    };
    let generate = |text: Value, more: Value| {
        let body = json!({"model": kind.model, "text": text, "sampling_params": {"max_new_tokens": 12}});
        ("/generate", with(body, more))
    };
    // Some 256 KiB.
    let large = prompt(40_000, 3);
    let mut requests = Vec::new();
    for salt in 0..4 {
        requests.push(chat(prompt(5 + salt, salt), json!({})));
        requests.push(completion(json!(prompt(5 + salt, salt)), json!({})));
    }
    requests.push(chat(large.clone(), json!({})));
    requests.push(completion(json!(large), json!({})));
    requests.push(completion(json!([1, 2, 3, 4, 5]), json!({})));
    requests.push(completion(json!("a long answer"), json!({"max_tokens": 120})));
    requests.push(chat("log probabilities".to_owned(), json!({"logprobs": true})));
    if kind.engine == Engine::Sglang {
        for salt in 0..4 {
            requests.push(generate(json!(prompt(6, salt)), json!({})));
        }
        requests.push(generate(json!("log probabilities of the prompt"), json!({"return_logprob": true})));
        requests.push(generate(json!(["two", "prompts"]), json!({"return_logprob": true})));
        requests.push(completion(json!(["two", "prompts"]), json!({})));
    }
    let message = |words: String, more: Value| {
        let body = json!({"model": kind.model, "messages": [{"role": "user", "content": words}], "max_tokens": 12});
        (MESSAGES, with(body, more))
    };
    let response =
        |words: String| ("/v1/responses", json!({"model": kind.model, "input": words, "max_output_tokens": 12}));
    let rerank = "/v1/rerank";
    let reranked = json!({"model": kind.model, "query": "which", "documents": ["this", "that"]});
    let counted = json!({"model": kind.model, "messages": [{"role": "user", "content": "how many"}]});
    if !kind.is_moriio() {
        requests.push(chat("several samples".to_owned(), json!({"n": 2})));
        for salt in 0..3 {
            requests.push(message(prompt(5 + salt, salt), json!({})));
            requests.push(response(prompt(5 + salt, salt)));
        }
    }
    let mut all = Vec::new();
    for (path, body) in requests {
        all.push((path, body.clone(), false));
        let mut more = json!({"stream": true});
        if path.ends_with("completions") {
            more["stream_options"] = json!({"include_usage": true});
        }
        all.push((path, with(body, more), true));
    }
    if !kind.is_moriio() {
        all.push((rerank, reranked.clone(), false));
    }
    all.push((COUNT_TOKENS, counted, false));
    let answers = all.into_iter().map(|(path, body, streamed)| async move {
        let answer = ask(single, path, &body).await;
        let merged = body["return_logprob"] == true;
        Case { path, body: bytes(&body), streamed, right: Right::Answer(answer), merged }
    });
    let mut cases = join_all(answers).await;
    let mut refuse = |(path, body): (&'static str, Value), code| {
        let right = Right::Refusal(if code == "moriio_route_unsupported" { 501 } else { 400 }, code);
        cases.push(Case { path, body: bytes(&body), streamed: false, right, merged: false });
    };
    match kind.engine {
        Engine::Sglang | Engine::Tokenspeed => {
            refuse(completion(json!("x"), json!({"n": 2})), "parallel_sampling_unsupported")
        }
        Engine::Vllm if kind.is_moriio() => {
            refuse(chat("x".to_owned(), json!({"n": 2})), "moriio_fanout_unsupported");
            refuse(message("x".to_owned(), json!({})), "moriio_route_unsupported");
            refuse(response("x".to_owned()), "moriio_route_unsupported");
            refuse((rerank, reranked), "moriio_route_unsupported");
        }
        Engine::Vllm => refuse(chat("x".to_owned(), json!({"n": "2"})), "invalid_type"),
    }
    cases
}

fn with(mut body: Value, more: Value) -> Value {
    for (name, value) in more.as_object().unwrap() {
        body[name] = value.clone();
    }
    body
}

async fn ask(single: &MockEngine, path: &str, body: &Value) -> String {
    let client = reqwest::Client::builder().no_proxy().build().unwrap();
    let request = client.post(format!("{}{path}", single.url())).header("x-request-id", ID).json(body);
    let response = request.send().await.unwrap();
    assert_eq!(response.status(), 200, "{body}");
    response.text().await.unwrap()
}

/// How a client behaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Manner {
    Plain,
    /// Leaves after a while, whatever it has by then.
    Leaves(Duration),
    /// Leaves after the first bytes of the answer.
    LeavesMidway,
    /// Takes the answer in small bites.
    ReadsSlowly,
    /// Sends the body in pieces.
    SendsSlowly,
}

impl Manner {
    pub fn draw(random: &mut Random) -> Self {
        match random.below(100) {
            0..60 => Self::Plain,
            60..75 => Self::Leaves(Duration::from_millis(random.between(0, 60))),
            75..82 => Self::LeavesMidway,
            82..92 => Self::ReadsSlowly,
            _ => Self::SendsSlowly,
        }
    }
}

/// How a request ended for its client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ending {
    /// The right answer, or the refusal that is due.
    Right,
    /// An error with a documented status and code.
    Error { status: u16, code: String },
    /// The answer began and broke off, and the client can tell.
    BrokenOff,
    /// What an engine said in the place of its answer.
    Altered,
    /// The client left.
    Left,
    /// None of these.
    Wrong(String),
}

/// What a client has received.
#[derive(Default)]
struct Answer {
    status: u16,
    code: Option<String>,
    body: Vec<u8>,
    complete: bool,
}

/// Sends `case` as `id` and judges what comes.
pub async fn send(client: &reqwest::Client, url: &str, case: &Case, id: &str, manner: Manner) -> Ending {
    let exchange = tokio::time::timeout(FORGOTTEN, exchange(client, url, case, id, manner));
    let ended = match manner {
        Manner::Leaves(after) => match tokio::time::timeout(after, exchange).await {
            Ok(ended) => ended,
            Err(_) => return Ending::Left,
        },
        _ => exchange.await,
    };
    match ended {
        Ok(Ok(Some(answer))) => judge(case, id, &answer),
        Ok(Ok(None)) => Ending::Left,
        Ok(Err(error)) => Ending::Wrong(format!("no answer: {error:?}")),
        Err(_) => Ending::Wrong("no answer, and no end of the waiting".to_owned()),
    }
}

/// `None`: the client left in the middle.
async fn exchange(
    client: &reqwest::Client,
    url: &str,
    case: &Case,
    id: &str,
    manner: Manner,
) -> reqwest::Result<Option<Answer>> {
    let request = client.post(format!("{url}{}", case.path)).header("x-request-id", id);
    let request = request.header("content-type", "application/json");
    let body = match manner {
        Manner::SendsSlowly => {
            let size = case.body.len().div_ceil(4);
            let pieces: Vec<Bytes> = case.body.chunks(size).map(Bytes::copy_from_slice).collect();
            reqwest::Body::wrap_stream(futures::stream::iter(pieces).then(|piece| async {
                tokio::time::sleep(Duration::from_millis(5)).await;
                Ok::<_, std::io::Error>(piece)
            }))
        }
        _ => case.body.clone().into(),
    };
    let mut response = request.body(body).send().await?;
    let code = response.headers().get("x-smg-error-code").map(|code| code.to_str().unwrap().to_owned());
    let mut answer = Answer { status: response.status().as_u16(), code, ..Answer::default() };
    loop {
        match response.chunk().await {
            Ok(Some(chunk)) => answer.body.extend_from_slice(&chunk),
            Ok(None) => {
                answer.complete = true;
                return Ok(Some(answer));
            }
            Err(_) => return Ok(Some(answer)),
        }
        match manner {
            Manner::LeavesMidway => return Ok(None),
            Manner::ReadsSlowly => tokio::time::sleep(Duration::from_millis(3)).await,
            _ => {}
        }
    }
}

/// Codes of the gateway's errors and the statuses that each may come with (API reference).
const CODES: [(&str, &[u16]); 29] = [
    ("no_available_workers", &[503]),
    ("prefill_request_failed", &[502, 504]),
    ("prefill_read_failed", &[502, 504]),
    ("decode_request_failed", &[502, 504]),
    ("decode_read_failed", &[502, 504]),
    ("moriio_handoff_invalid", &[502]),
    ("moriio_fanout_unsupported", &[400]),
    ("moriio_route_unsupported", &[501]),
    ("prefill_count_tokens_failed", &[502, 504]),
    ("no_prefill_servers", &[503]),
    ("request_timeout", &[504]),
    ("worker_request_failed", &[502, 504]),
    ("worker_read_failed", &[502, 504]),
    ("parallel_sampling_unsupported", &[400]),
    ("invalid_type", &[400]),
    ("prefill_bad_request", &[400]),
    ("prefill_not_found", &[404]),
    ("prefill_internal_error", &[500]),
    ("prefill_bad_gateway", &[502]),
    ("prefill_unavailable", &[503]),
    ("decode_bad_request", &[400]),
    ("decode_not_found", &[404]),
    ("decode_internal_error", &[500]),
    ("decode_bad_gateway", &[502]),
    ("decode_unavailable", &[503]),
    // Whatever other status the engine answered.
    ("prefill_upstream_error", &[]),
    ("prefill_error", &[]),
    ("decode_error", &[]),
    ("worker_upstream_error", &[]),
];

fn is_documented(status: u16, code: &str) -> bool {
    let statuses = CODES.iter().find(|(known, _)| *known == code).map(|(_, statuses)| *statuses);
    statuses.is_some_and(|statuses| statuses.is_empty() && status >= 400 || statuses.contains(&status))
}

fn judge(case: &Case, id: &str, answer: &Answer) -> Ending {
    let wrong = |what: &str| {
        let shown = String::from_utf8_lossy(&answer.body[..answer.body.len().min(2000)]).into_owned();
        let request = String::from_utf8_lossy(&case.body[..case.body.len().min(200)]).into_owned();
        Ending::Wrong(format!(
            "{what}: {} {:?}, complete: {}\n{request}\n{shown}",
            answer.status, answer.code, answer.complete
        ))
    };
    let (status, code) = (answer.status, answer.code.clone());
    if !(200..300).contains(&status) {
        let Some(code) = code else { return wrong("an error without a code") };
        if !is_documented(status, &code) {
            return wrong("an error that is not documented");
        }
        return match case.right {
            Right::Refusal(refused, reason) if refused == status && code == reason && answer.complete => Ending::Right,
            _ => Ending::Error { status, code },
        };
    }
    let Right::Answer(right) = &case.right else { return wrong("an answer where a refusal is due") };
    if code.is_some() {
        return wrong("an answer with an error code");
    }
    let right = right.replace(ID, id);
    let body = &answer.body[..];
    let forms =
        [right.as_bytes().to_vec(), halved(&right, case.streamed), OTHER_EVENTS.concat().into(), OTHER_BODY.into()];
    if answer.complete && (body == &forms[0][..] || case.merged && same_but_for_merging(&right, body)) {
        return Ending::Right;
    }
    if let Some(begun) = before_the_break(case, answer) {
        let begins = |form: &Vec<u8>| {
            form.starts_with(begun) || begun.strip_suffix(b"\n\n").is_some_and(|begun| form.starts_with(begun))
        };
        return if case.merged || forms.iter().any(begins) {
            Ending::BrokenOff
        } else {
            wrong("a broken answer of another request")
        };
    }
    if !answer.complete {
        return wrong("an answer that breaks off without saying so");
    }
    let cut_short = |form: &Vec<u8>| form.starts_with(body) && (body.is_empty() || body.ends_with(b"\n\n"));
    if forms.iter().any(|form| form == body) || case.streamed && (forms.iter().any(cut_short) || case.merged) {
        return Ending::Altered;
    }
    if case.merged && serde_json::from_slice::<Value>(body).is_err() {
        return Ending::Altered;
    }
    wrong("not the answer to this request")
}

/// What was answered before the answer broke off; none when it did not.
fn before_the_break<'a>(case: &Case, answer: &'a Answer) -> Option<&'a [u8]> {
    if !case.streamed {
        return (!answer.complete).then_some(&answer.body[..]);
    }
    // An aborted stream is told to be broken by its missing end.
    if !answer.complete {
        return None;
    }
    if case.path == MESSAGES {
        let place = memchr::memmem::rfind(&answer.body, BROKEN_MESSAGE)?;
        return answer.body.ends_with(b"\n\n").then_some(&answer.body[..place]);
    }
    let place = memchr::memmem::rfind(&answer.body, BROKEN)?;
    answer.body.ends_with(DONE).then_some(&answer.body[..place])
}

/// The answer of an engine that cuts its JSON in half: the body, or each event.
fn halved(right: &str, streamed: bool) -> Vec<u8> {
    let half = |text: &str| text.as_bytes()[..text.len() / 2].to_vec();
    if !streamed {
        return half(right);
    }
    let mut out = Vec::new();
    for event in right.split_inclusive("\n\n") {
        out.extend(half(event));
        out.extend(b"\n\n");
    }
    out
}

/// Whether two answers with log probabilities of the prompt are the same, wherever these stand: a stream carries them once, and not at all
/// when the prefill's could not be read.
fn same_but_for_merging(right: &str, body: &[u8]) -> bool {
    let Ok(body) = std::str::from_utf8(body) else { return false };
    let strip = |text: &str| {
        let events = text.split("\n\n").filter(|event| !event.is_empty() && *event != "data: [DONE]");
        events.map(|event| stripped(event.strip_prefix("data: ").unwrap_or(event))).collect::<Option<Vec<_>>>()
    };
    // Whatever is said of a prompt is said at the place of that prompt.
    let said = |text: &str| {
        let events = text.split("\n\n").filter(|event| !event.is_empty() && *event != "data: [DONE]");
        events.flat_map(|event| said_of_prompts(event.strip_prefix("data: ").unwrap_or(event))).collect::<BTreeSet<_>>()
    };
    matches!((strip(right), strip(body)), (Some(right), Some(body)) if right == body)
        && said(body).is_subset(&said(right))
        && right.ends_with("data: [DONE]\n\n") == body.ends_with("data: [DONE]\n\n")
}

/// The log probabilities of prompts in an answer or event, each with the place of its prompt.
fn said_of_prompts(text: &str) -> Vec<(u64, String)> {
    let one = |(place, answer): (u64, &Value)| {
        let said = answer["meta_info"]["input_token_logprobs"].as_array().filter(|said| !said.is_empty())?;
        Some((answer["index"].as_u64().unwrap_or(place), Value::Array(said.clone()).to_string()))
    };
    match serde_json::from_str::<Value>(text).unwrap_or_default() {
        Value::Array(answers) => (0..).zip(&answers).filter_map(one).collect(),
        other => one((0, &other)).into_iter().collect(),
    }
}

fn stripped(text: &str) -> Option<Value> {
    let mut answer: Value = serde_json::from_str(text).ok()?;
    let one = |answer: &mut Value| {
        if let Some(meta) = answer.get_mut("meta_info").and_then(Value::as_object_mut) {
            meta.remove("input_token_logprobs");
        }
    };
    match &mut answer {
        Value::Array(answers) => answers.iter_mut().for_each(one),
        other => one(other),
    }
    Some(answer)
}
