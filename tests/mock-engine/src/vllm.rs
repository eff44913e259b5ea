//! vLLM 0.32: OpenAI routes, NIXL, Mooncake and MoRI-IO handoffs, metrics.
//!
//! What the engine does with handoff fields:
//! - NIXL prefill (`do_remote_decode`): holds the KV when the answer ends by its token limit and names it in
//!   `kv_transfer_params`; the KV stays until it is fetched or expires;
//! - NIXL decode (`do_remote_prefill`): fetches from the address it is given; a failure is a 500; fields that are
//!   missing kill the engine, as an assertion does in the real one;
//! - Mooncake: the same by `transfer_id`, found through the prefill's bootstrap server, and decode may come first;
//! - MoRI-IO: see [`moriio`];
//! - without them, or without a connector that knows them, the prompt is computed here, and the metrics say so;
//! - log probabilities of a prompt that was not computed here are told all the same, and mean nothing.

mod moriio;
mod probes;
mod write;

use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::VERSION_VLLM as VERSION;
use crate::answer::{Failure, Format, Prefilled, deliver};
use crate::engine::{Connector, Core};
use crate::fabric::{NoKv, Take, starve};
use crate::generate::{Api, Job};
use crate::http::{Reply, Request};
use crate::json::{Object, quoted};
use crate::ledger::{Key, Kv};
use crate::messages;

/// Tokens in a block of KV.
const BLOCK: usize = 128;

const FORMAT: Format = Format {
    step: write::write_step,
    whole: write::write_whole,
    error: |job, failure| error_of(job.api, failure.status, &failure.message, None),
};

/// Answers a request as the engine does.
pub(crate) async fn handle(core: &Arc<Core>, request: &Request) -> Reply {
    let get = request.method == "GET" || request.method == "HEAD";
    let mut reply = match request.path.as_str() {
        "/health" | "/ping" if get => Reply::empty(),
        "/version" if get => Reply::json(200, format!(r#"{{"version":"{VERSION}"}}"#)),
        "/v1/models" if get => Reply::json(200, probes::models(core)),
        "/load" if get => Reply::json(200, format!(r#"{{"server_load":{}}}"#, core.load.active())),
        "/metrics" if get => Reply::text(probes::metrics(core)),
        path if served(path).is_some() && request.method == "POST" => match served(path) {
            Some(api) => generate(core, api, request).await,
            None => Reply::not_found(),
        },
        "/v1/messages/count_tokens" if request.method == "POST" => count_tokens(request),
        "/health" | "/ping" | "/version" | "/v1/models" | "/load" | "/metrics" => Reply::wrong_method("GET"),
        path if served(path).is_some() => Reply::wrong_method("POST"),
        _ => Reply::not_found(),
    };
    reply.headers.push(("vary".into(), "Origin".into()));
    reply
}

/// What a path generates; `/generate` is SGLang's own.
fn served(path: &str) -> Option<Api> {
    Api::of(path).filter(|api| *api != Api::Generate)
}

fn count_tokens(request: &Request) -> Reply {
    match messages::prompt_tokens(&request.body) {
        Ok(tokens) => Reply::json(200, messages::count(tokens)),
        Err(message) => Reply::json(400, messages::error(400, &message)),
    }
}

/// An error as vLLM writes it.
fn error(status: u16, message: &str, param: Option<&str>) -> String {
    let kind = match status {
        400 => "BadRequestError",
        404 => "NotFoundError",
        _ => "InternalServerError",
    };
    let param = param.map_or_else(|| "null".to_owned(), quoted);
    format!(r#"{{"error":{{"message":{},"type":"{kind}","param":{param},"code":{status}}}}}"#, quoted(message))
}

/// An error in the shape of the API it is of.
fn error_of(api: Api, status: u16, message: &str, param: Option<&str>) -> String {
    if api == Api::Messages { messages::error(status, message) } else { error(status, message, param) }
}

fn bad_request(message: &str) -> Reply {
    Reply::json(400, error(400, message, None))
}

async fn generate(core: &Arc<Core>, api: Api, request: &Request) -> Reply {
    let object = match Object::parse(&request.body) {
        Ok(object) => object,
        Err(message) => return Reply::json(400, error_of(api, 400, &message, None)),
    };
    let settings = &core.settings;
    let read = Job::read(api, request, &object, &settings.model, settings.max_model_len);
    let mut job = match read.and_then(|job| check(&object, &job).map(|()| job)) {
        Ok(job) => job,
        Err(message) => return Reply::json(400, error_of(api, 400, &message, None)),
    };
    if job.model != quoted(&settings.model) {
        let message = format!("The model `{}` does not exist.", job.model.trim_matches('"'));
        return Reply::json(404, error_of(api, 404, &message, Some("model")));
    }
    if let Connector::MoriioRead | Connector::MoriioWrite = settings.connector {
        return moriio::generate(core, &object, job).await;
    }
    let rank = match routed_rank(core, request) {
        Ok(rank) => rank,
        Err(message) => return Reply::json(400, error_of(api, 400, &message, None)),
    };
    let handoff = match Handoff::read(core, &object, &job, rank) {
        Ok(handoff) => handoff,
        Err(unusable) => return unusable.reply(),
    };
    job.input_logprobs = !matches!(handoff, Handoff::Fetch { .. });
    let job = Arc::new(job);
    let work = work(Arc::clone(core), Arc::clone(&job), handoff);
    deliver(core, job, &FORMAT, work).await
}

/// The data-parallel rank that the request asks for; without one the engine chooses by itself.
fn routed_rank(core: &Core, request: &Request) -> Result<Option<u64>, String> {
    let Some(text) = request.header("x-data-parallel-rank") else { return Ok(None) };
    let rank: u64 = text.parse().map_err(|_| format!("X-data-parallel-rank: {text} is no rank"))?;
    match core.settings.dp_size {
        Some(size) if rank >= size => Err(format!("data_parallel_rank {rank} is out of range [0, {size}).")),
        _ => Ok(Some(rank)),
    }
}

/// Validation beyond types.
fn check(object: &Object<'_>, job: &Job) -> Result<(), String> {
    if !job.stream && !object.object("stream_options")?.is_empty() {
        return Err("Stream options can only be defined when `stream=True`.".to_owned());
    }
    let min_tokens = object.count("min_tokens")?.unwrap_or(0);
    if job.capped && min_tokens > job.length as u64 {
        return Err(format!("min_tokens must be less than or equal to max_tokens={}, got {min_tokens}.", job.length));
    }
    Ok(())
}

/// What the request's `kv_transfer_params` ask for.
enum Handoff {
    /// Nothing: the prompt is computed here and its KV stays here.
    None,
    /// Compute the prompt and hold its KV under this key; NIXL names it in the answer.
    Hold { key: Key, named: bool, rank: Option<u64> },
    /// Fetch the KV.
    Fetch { source: Source, take: Take },
}

enum Source {
    /// NIXL: the side channel of the prefill engine.
    Engine { host: String, port: u16 },
    /// Mooncake: the bootstrap server that knows it.
    Bootstrap { address: String, engine_id: String },
    /// Mooncake with an incomplete request: nothing can be fetched.
    Nowhere,
}

enum Unusable {
    Request(String),
    Fatal,
}

impl Unusable {
    fn reply(self) -> Reply {
        match self {
            Unusable::Request(message) => bad_request(&message),
            Unusable::Fatal => {
                let message = "EngineCore encountered an issue. See stack trace (above) for the root cause.";
                let mut reply = Reply::json(500, error(500, message, None));
                reply.fatal = true;
                reply
            }
        }
    }
}

/// A prefill whose KV another engine will have gives one whole answer.
fn check_hold(job: &Job) -> Result<(), Unusable> {
    if job.stream {
        return Err(Unusable::Request("do_remote_decode needs an answer that is not streamed".to_owned()));
    }
    if job.n() > 1 {
        return Err(Unusable::Request(
            "do_remote_decode needs n=1, one KV transfer cannot serve several samples".to_owned(),
        ));
    }
    Ok(())
}

impl From<String> for Unusable {
    fn from(message: String) -> Self {
        Unusable::Request(message)
    }
}

impl Handoff {
    fn read(core: &Core, object: &Object<'_>, job: &Job, rank: Option<u64>) -> Result<Self, Unusable> {
        let connector = &core.settings.connector;
        if !matches!(connector, Connector::Nixl | Connector::Mooncake) {
            return Ok(Handoff::None);
        }
        let params = object.object("kv_transfer_params")?;
        let fetch = params.flag("do_remote_prefill")?;
        let hold = params.flag("do_remote_decode")?;
        if hold {
            check_hold(job)?;
        }
        let first = job.samples.first().map_or(0, |prompt| prompt.digest);
        match connector {
            Connector::Nixl if fetch => {
                let take = || -> Result<Option<(Source, Take)>, String> {
                    let engine_id = params.string("remote_engine_id")?;
                    let request_id = params.string("remote_request_id")?;
                    let host = params.string("remote_host")?;
                    let port = params.read::<u16>("remote_port")?;
                    let blocks = params.read::<Vec<serde_json::Value>>("remote_block_ids")?;
                    let (Some(engine_id), Some(request_id), Some(host), Some(port), Some(_)) =
                        (engine_id, request_id, host, port, blocks)
                    else {
                        return Ok(None);
                    };
                    let source = Source::Engine { host: host.into_owned(), port };
                    let take = Take {
                        key: Key::Request(request_id.into_owned()),
                        engine_id: Some(engine_id.into_owned()),
                        prompt: first,
                        rank: None,
                        wait: false,
                    };
                    Ok(Some((source, take)))
                };
                // A field of a wrong type trips the same assertions as a missing one.
                let (source, take) = take().ok().flatten().ok_or(Unusable::Fatal)?;
                Ok(Handoff::Fetch { source, take })
            }
            Connector::Nixl if hold => {
                let unique: u32 = rand::random();
                let key = match job.api {
                    Api::Chat => format!("{}-{unique:08x}", job.id),
                    _ => format!("{}-0-{unique:08x}", job.id),
                };
                Ok(Handoff::Hold { key: Key::Request(key), named: true, rank })
            }
            Connector::Mooncake if fetch => {
                let transfer_id = params.string("transfer_id")?;
                let engine_id = params.string("remote_engine_id")?;
                let address = params.string("remote_bootstrap_addr")?;
                let take = Take {
                    key: Key::Transfer(transfer_id.clone().unwrap_or_default().into_owned()),
                    engine_id: engine_id.clone().map(std::borrow::Cow::into_owned),
                    prompt: first,
                    // Several ranks have ids of their own: the KV lies with the one that computed it.
                    rank: engine_id.as_deref().and_then(|id| id.rsplit_once("_dp")?.1.parse().ok()),
                    wait: true,
                };
                let source = match (transfer_id, engine_id, address) {
                    (Some(_), Some(engine_id), Some(address)) => {
                        Source::Bootstrap { address: address.into_owned(), engine_id: engine_id.into_owned() }
                    }
                    _ => Source::Nowhere,
                };
                Ok(Handoff::Fetch { source, take })
            }
            Connector::Mooncake if hold => {
                let Some(transfer_id) = params.string("transfer_id")? else {
                    return Ok(Handoff::None);
                };
                Ok(Handoff::Hold { key: Key::Transfer(transfer_id.into_owned()), named: false, rank })
            }
            _ => Ok(Handoff::None),
        }
    }
}

async fn work(core: Arc<Core>, job: Arc<Job>, handoff: Handoff) -> Result<Prefilled, Failure> {
    let internal = || Failure::new(500, "Internal server error");
    match handoff {
        Handoff::None => {
            let running = core.load.run().await;
            core.compute(job.prompt_tokens()).await;
            Ok(Prefilled { running, transfer: None })
        }
        Handoff::Hold { key, named, rank } => {
            let hold = core.ledger().begin(&key).map_err(|_| internal())?;
            let running = core.load.run().await;
            core.compute(job.prompt_tokens()).await;
            // An answer that ends by itself is finished for good: only one that was cut has a decode to come.
            let mut transfer = None;
            if job.capped
                && let Some(prompt) = job.samples.first()
            {
                hold.ready(Kv { prompt: *prompt, rank });
                hold.keep();
                if named && let Key::Request(id) = &key {
                    transfer = Some(transfer_params(&core, id, prompt.tokens));
                }
            }
            Ok(Prefilled { running, transfer })
        }
        Handoff::Fetch { source, take } => {
            let patience = core.settings.patience;
            let fetched = tokio::time::timeout(patience, fetch(&core, &source, &take)).await;
            let kv = match fetched {
                Ok(Ok(kv)) => kv,
                // Mooncake does not learn that it asked the wrong engine: it waits.
                Ok(Err(NoKv::WrongEngine)) if matches!(source, Source::Bootstrap { .. }) => {
                    starve(patience).await;
                    return Err(internal());
                }
                Ok(Err(_)) | Err(_) => return Err(internal()),
            };
            // One piece of KV serves one prompt.
            if job.samples.iter().any(|prompt| *prompt != kv.prompt) {
                return Err(internal());
            }
            core.load.external_tokens.fetch_add(kv.prompt.tokens as u64, Ordering::Relaxed);
            Ok(Prefilled { running: core.load.run().await, transfer: None })
        }
    }
}

async fn fetch(core: &Core, source: &Source, take: &Take) -> Result<Kv, NoKv> {
    match source {
        Source::Engine { host, port } => core.fabric.take(host, *port, take).await,
        Source::Bootstrap { address, engine_id } => {
            let (host, port) = core.fabric.query(address, engine_id).await?;
            core.fabric.take(&host, port, take).await
        }
        Source::Nowhere => Err(NoKv::Refused("the handoff is incomplete".to_owned())),
    }
}

/// `kv_transfer_params` of a NIXL prefill's answer.
pub(crate) fn transfer_params(core: &Core, request_id: &str, tokens: usize) -> String {
    let blocks = tokens.div_ceil(BLOCK) as u64;
    let first = core.blocks.fetch_add(blocks, Ordering::Relaxed);
    let ids: Vec<String> = (first..first + blocks).map(|id| id.to_string()).collect();
    format!(
        r#"{{"do_remote_prefill":true,"do_remote_decode":false,"remote_block_ids":[[{}]],"remote_engine_id":{},"remote_request_id":{},"remote_host":"127.0.0.1","remote_port":{},"tp_size":1,"dcp_size":1,"pp_size":1,"remote_num_tokens":{tokens},"remote_blocks_expiry_time":null,"transfer_mode":"pull","remote_prefill_cached_tokens":0}}"#,
        ids.join(","),
        quoted(&core.engine_id()),
        quoted(request_id),
        core.ports().side_channel.unwrap_or_default(),
    )
}
