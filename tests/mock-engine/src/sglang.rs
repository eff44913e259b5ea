//! SGLang 0.5: native and OpenAI routes, bootstrap rendezvous, server info, loads, metrics.
//!
//! In disaggregated serving both legs get the request at once with the same `bootstrap_host`, `bootstrap_port` and
//! `bootstrap_room`, scalars or one entry per prompt. The prefill engine computes the prompt, and its answer is complete
//! only when the KV was fetched; the decode engine waits at the prefill's bootstrap port for the room. A room serves one
//! sample once: samples beyond the rooms never get KV and starve until the deadline.

use std::fmt::Write as _;
use std::io::Write as _;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use serde::Deserialize;
use serde_json::{Value, json};

use crate::engine::{Core, Failure, Format, Prefilled, Role, deliver};
use crate::fabric::{NoKv, Take, starve};
use crate::generate::{Api, Job, Step, logprob};
use crate::http::{Reply, Request, extend};
use crate::json::{Object, quoted};
use crate::ledger::{Key, Kv};
use crate::text::Prompt;
use crate::{CREATED, VERSION_SGLANG as VERSION};

const FORMAT: Format = Format {
    step: write_step,
    whole: write_whole,
    error: |job, failure| error(job.api, failure.status, &failure.message),
};

/// Answers a request as the engine does.
pub(crate) async fn handle(core: &Arc<Core>, request: &Request) -> Reply {
    let get = request.method == "GET" || request.method == "HEAD";
    match (request.path.as_str(), Api::of(&request.path)) {
        (_, Some(api)) if request.method == "POST" => generate(core, api, request).await,
        (_, Some(_)) => Reply::wrong_method("POST"),
        ("/health" | "/health_generate", _) if get => Reply::empty(),
        ("/v1/models", _) if get => Reply::json(200, models(core)),
        ("/server_info" | "/get_server_info", _) if get => Reply::json(200, server_info(core)),
        ("/model_info" | "/get_model_info", _) if get => Reply::json(200, model_info(core)),
        ("/v1/loads", _) if get => Reply::json(200, loads(core)),
        ("/metrics", _) if get => Reply::text(metrics(core)),
        ("/flush_cache", _) => Reply::text(
            "Cache flushed.\nPlease check backend logs for more details. (When there are running or waiting requests, the operation will not be performed.)\n",
        ),
        _ => Reply::not_found(),
    }
}

/// An error as SGLang writes it: bare on OpenAI routes, wrapped on its own.
fn error(api: Api, status: u16, message: &str) -> String {
    let message = quoted(message);
    if api == Api::Generate {
        return format!(r#"{{"error":{{"message":{message}}}}}"#);
    }
    let kind = match status {
        400 => "BadRequest",
        404 => "NotFoundError",
        _ => "InternalServerError",
    };
    format!(r#"{{"object":"error","message":{message},"type":"{kind}","param":null,"code":{status}}}"#)
}

async fn generate(core: &Arc<Core>, api: Api, request: &Request) -> Reply {
    let refuse = |failure: &Failure| Reply::json(failure.status, error(api, failure.status, &failure.message));
    let bad = |message: String| refuse(&Failure::new(400, message));
    let object = match Object::parse(&request.body) {
        Ok(object) => object,
        Err(message) => return bad(message),
    };
    let settings = &core.settings;
    let read = Job::read(api, request, &object, &settings.model, settings.max_model_len);
    let mut job = match read {
        Ok(job) => job,
        Err(message) => return bad(message),
    };
    let rendezvous = match Rendezvous::read(core, &object, &job) {
        Ok(rendezvous) => rendezvous,
        Err(failure) => return refuse(&failure),
    };
    if settings.role == Role::Prefill {
        job.only_first_token();
    }
    job.input_logprobs = settings.role != Role::Decode;
    let job = Arc::new(job);
    let work = work(Arc::clone(core), Arc::clone(&job), rendezvous);
    deliver(core, job, &FORMAT, work).await
}

/// How a request's legs find each other.
enum Rendezvous {
    /// They do not: the engine serves alone.
    None,
    Prefill {
        rooms: Vec<u64>,
        rank: Option<u64>,
    },
    Decode {
        meetings: Vec<Meeting>,
        rank: Option<u64>,
    },
}

struct Meeting {
    host: String,
    port: u16,
    room: u64,
}

/// A value, or one for each prompt.
#[derive(Deserialize)]
#[serde(untagged)]
enum Each<T> {
    One(T),
    Many(Vec<T>),
}

impl<T> Each<T> {
    fn into_list(self) -> (Vec<T>, bool) {
        match self {
            Each::One(value) => (vec![value], false),
            Each::Many(values) => (values, true),
        }
    }
}

impl Rendezvous {
    fn read(core: &Core, object: &Object<'_>, job: &Job) -> Result<Self, Failure> {
        let invalid = |message: String| Failure::new(400, message);
        let rank = |name: &str| {
            let rank = object.count(name).map_err(invalid)?;
            match (rank, core.settings.dp_size) {
                (Some(rank), Some(size)) if rank >= size => {
                    Err(invalid(format!("{name}={rank} out of range [0, {size})")))
                }
                (rank, _) => Ok(rank),
            }
        };
        let routed = rank("routed_dp_rank")?.or(rank("data_parallel_rank")?);
        if core.settings.role == Role::Regular {
            return Ok(Rendezvous::None);
        }
        let Some(rooms) = object
            .read::<Each<u64>>("bootstrap_room")
            .map_err(|_| invalid("bootstrap_room: must be an integer or a list of integers".to_owned()))?
        else {
            return Err(invalid(
                "Invalid request: Disaggregated request received without bootstrap room id.".to_owned(),
            ));
        };
        let (rooms, listed) = rooms.into_list();
        if rooms.iter().any(|room| i64::try_from(*room).is_err()) {
            return Err(invalid("bootstrap_room: must fit a signed 64-bit integer".to_owned()));
        }
        if rooms.is_empty() || rooms.len() > job.samples.len() {
            return Err(invalid(format!("bootstrap_room: {} rooms for {} samples", rooms.len(), job.samples.len())));
        }
        if !listed && job.batch {
            return Err(invalid("bootstrap_room: a batch needs a list with one room per prompt".to_owned()));
        }
        if core.settings.role == Role::Prefill {
            return Ok(Rendezvous::Prefill { rooms, rank: routed });
        }
        let hosts = object
            .read::<Each<String>>("bootstrap_host")
            .map_err(|_| invalid("bootstrap_host: must be a string or a list of strings".to_owned()))?;
        let ports = object
            .read::<Each<Option<u16>>>("bootstrap_port")
            .map_err(|_| invalid("bootstrap_port: must be a port or a list of ports".to_owned()))?;
        let (Some(hosts), Some(ports)) = (hosts, ports) else {
            return Err(Failure::new(
                500,
                "the prefill's bootstrap server is unknown: bootstrap_host or bootstrap_port is missing",
            ));
        };
        let ((hosts, _), (ports, _)) = (hosts.into_list(), ports.into_list());
        if hosts.len() != rooms.len() || ports.len() != rooms.len() {
            return Err(invalid("bootstrap_host, bootstrap_port and bootstrap_room differ in length".to_owned()));
        }
        let meetings = hosts
            .into_iter()
            .zip(ports)
            .zip(rooms)
            .map(|((host, port), room)| {
                let port =
                    port.ok_or_else(|| Failure::new(500, "the prefill's bootstrap port is unknown: it is null"))?;
                Ok(Meeting { host, port, room })
            })
            .collect::<Result<_, Failure>>()?;
        Ok(Rendezvous::Decode {
            meetings,
            // A rank of the prefill engine, whose number of ranks is not known here.
            rank: object.count("disagg_prefill_dp_rank").map_err(invalid)?,
        })
    }
}

async fn work(core: Arc<Core>, job: Arc<Job>, rendezvous: Rendezvous) -> Result<Prefilled, Failure> {
    let failed = |reason: String| Failure::new(500, format!("KV transfer failed: {reason}"));
    let running = match rendezvous {
        Rendezvous::None => {
            let running = core.load.run().await;
            core.compute(job.prompt_tokens()).await;
            running
        }
        Rendezvous::Prefill { rooms, rank } => {
            let ledger = core.ledger();
            let holds = rooms
                .iter()
                .map(|room| ledger.begin(&Key::Room(*room)))
                .collect::<Result<Vec<_>, _>>()
                .map_err(failed)?;
            let running = core.load.run().await;
            core.compute(job.prompt_tokens()).await;
            for (hold, prompt) in holds.iter().zip(&job.samples) {
                hold.ready(Kv { prompt: *prompt, rank });
            }
            // The batch has moved on while the KV waits for its decode engine.
            drop(running);
            for hold in &holds {
                hold.taken().await.map_err(failed)?;
            }
            starve_the_rest(&core, &job, rooms.len()).await?;
            core.load.run().await
        }
        Rendezvous::Decode { meetings, rank } => {
            let fetches = meetings.iter().zip(&job.samples).map(|(meeting, prompt)| {
                let core = &core;
                async move {
                    let take =
                        Take { key: Key::Room(meeting.room), engine_id: None, prompt: prompt.digest, rank, wait: true };
                    let fetch = core.fabric.take(&meeting.host, meeting.port, &take);
                    match tokio::time::timeout(core.settings.patience, fetch).await {
                        Ok(Ok(kv)) if kv.prompt == *prompt => Ok(()),
                        Ok(Ok(_)) => Err("the KV belongs to another prompt".to_owned()),
                        Ok(Err(NoKv::Unreachable(reason) | NoKv::Refused(reason))) => Err(reason),
                        Ok(Err(NoKv::WrongEngine)) => Err("another engine".to_owned()),
                        Err(_) => Err("no KV in time".to_owned()),
                    }
                }
            });
            futures::future::try_join_all(fetches).await.map_err(failed)?;
            starve_the_rest(&core, &job, meetings.len()).await?;
            core.load.external_tokens.fetch_add(job.prompt_tokens() as u64, Ordering::Relaxed);
            core.load.run().await
        }
    };
    Ok(Prefilled { running, transfer: None })
}

/// Samples without a room of their own never get their KV.
async fn starve_the_rest(core: &Core, job: &Job, rooms: usize) -> Result<(), Failure> {
    if job.samples.len() > rooms {
        starve(core.settings.patience).await;
        return Err(Failure::new(500, "KV transfer failed: samples without a bootstrap room"));
    }
    Ok(())
}

fn write_whole(job: &Job, _transfer: Option<&str>) -> Vec<u8> {
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

fn write_step(job: &Job, step: Step, out: &mut Vec<u8>) {
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

fn models(core: &Core) -> String {
    let model = quoted(&core.settings.model);
    format!(
        r#"{{"object":"list","data":[{{"id":{model},"object":"model","created":{CREATED},"owned_by":"sglang","root":{model},"parent":null,"max_model_len":{}}}]}}"#,
        core.settings.max_model_len
    )
}

fn server_info(core: &Core) -> String {
    let settings = &core.settings;
    let mut info = json!({
        "model_path": settings.model,
        "tokenizer_path": settings.model,
        "served_model_name": settings.model,
        "host": "127.0.0.1",
        "port": core.ports().http,
        "tp_size": 1,
        "pp_size": 1,
        "dp_size": settings.dp_size.unwrap_or(1),
        "enable_dp_attention": false,
        "load_balance_method": "round_robin",
        "disaggregation_mode": match settings.role {
            Role::Regular => "null",
            Role::Prefill => "prefill",
            Role::Decode => "decode",
        },
        "disaggregation_bootstrap_port": core.ports().bootstrap.unwrap_or(8998),
        "is_embedding": false,
        "context_length": settings.max_model_len,
        "max_total_tokens": settings.max_model_len,
        "max_running_requests": settings.max_running,
        "max_total_num_tokens": settings.max_model_len,
        "weight_version": "default",
        "status": "ready",
        "version": VERSION,
    });
    for (name, value) in &settings.server_info {
        info[name.as_str()] = value.clone();
    }
    info.to_string()
}

fn model_info(core: &Core) -> String {
    json!({
        "model_path": core.settings.model,
        "tokenizer_path": core.settings.model,
        "is_generation": true,
        "preferred_sampling_params": null,
        "weight_version": "default",
        "has_image_understanding": false,
        "has_audio_understanding": false,
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
    })
    .to_string()
}

fn usage(core: &Core) -> f64 {
    match core.settings.max_running {
        Some(places) if places > 0 => (core.load.running() as f64 / places as f64).min(1.0),
        _ => 0.0,
    }
}

fn loads(core: &Core) -> String {
    let (running, waiting) = (core.load.running(), core.load.waiting());
    let usage = usage(core);
    let now =
        std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64());
    let mut load = json!({
        "dp_rank": 0,
        "num_running_reqs": running,
        "num_waiting_reqs": waiting,
        "num_waiting_uncached_tokens": 0,
        "num_total_reqs": running + waiting,
        "num_used_tokens": (usage * core.settings.max_model_len as f64) as u64,
        "max_total_num_tokens": core.settings.max_model_len,
        "token_usage": usage,
        "gen_throughput": 0.0,
        "cache_hit_rate": 0.0,
        "utilization": usage,
        "max_running_requests": core.settings.max_running.unwrap_or(0),
        "memory": {"weight_gb": 0.0, "kv_cache_gb": 0.0, "graph_gb": 0.0, "token_capacity": core.settings.max_model_len},
        "queues": {"waiting": waiting, "grammar": 0, "paused": 0, "retracted": 0},
    });
    match core.settings.role {
        Role::Regular => {}
        Role::Prefill => {
            load["disagg_mode"] = "prefill".into();
            load["prefill_queue_reqs"] = waiting.into();
        }
        Role::Decode => {
            load["disagg_mode"] = "decode".into();
            load["decode_queue_reqs"] = waiting.into();
        }
    }
    json!({
        "timestamp": now.to_string(),
        "version": VERSION,
        "dp_rank_count": 1,
        "loads": [load],
        "aggregate": {
            "total_running_reqs": running,
            "total_waiting_reqs": waiting,
            "total_reqs": running + waiting,
            "avg_token_usage": usage,
            "avg_throughput": 0.0,
            "avg_utilization": usage,
        },
    })
    .to_string()
}

fn metrics(core: &Core) -> String {
    let mut out = String::with_capacity(1024);
    let model = quoted(&core.settings.model);
    let load = &core.load;
    for (name, help, value) in [
        ("num_running_reqs", "The number of running requests.", load.running() as f64),
        ("num_queue_reqs", "The number of requests in the waiting queue.", load.waiting() as f64),
        ("token_usage", "The token usage.", usage(core)),
        ("gen_throughput", "The generation throughput (token/s).", 0.0),
        ("cache_hit_rate", "The prefix cache hit rate.", 0.0),
        ("utilization", "The utilization.", usage(core)),
    ] {
        // Writing to a string cannot fail.
        let _ = writeln!(
            out,
            "# HELP sglang:{name} {help}\n# TYPE sglang:{name} gauge\nsglang:{name}{{model_name={model}}} {value:?}"
        );
    }
    out
}
