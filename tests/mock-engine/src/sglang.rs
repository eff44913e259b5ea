//! SGLang 0.5: native and OpenAI routes, bootstrap rendezvous, server info, loads, metrics.
//!
//! In disaggregated serving both legs get the request at once with the same `bootstrap_host`, `bootstrap_port` and
//! `bootstrap_room`, scalars or one entry per prompt. The prefill engine computes the prompt, and its answer is complete
//! only when the KV was fetched; the decode engine waits at the prefill's bootstrap port for the room. A room serves one
//! sample once: samples beyond the rooms never get KV and starve until the deadline.

mod probes;
mod write;

use std::sync::Arc;
use std::sync::atomic::Ordering;

use serde::Deserialize;

use crate::answer::{Failure, Format, Prefilled, deliver};
use crate::engine::{Core, Role};
use crate::fabric::{NoKv, Take, starve};
use crate::generate::{Api, Job};
use crate::http::{Reply, Request};
use crate::json::{Object, quoted};
use crate::ledger::{Key, Kv};
use crate::messages;

const FORMAT: Format = Format {
    step: write::write_step,
    whole: write::write_whole,
    error: |job, failure| error(job.api, failure.status, &failure.message),
};

/// Answers a request as the engine does.
pub(crate) async fn handle(core: &Arc<Core>, request: &Request) -> Reply {
    let get = request.method == "GET" || request.method == "HEAD";
    match (request.path.as_str(), Api::of(&request.path)) {
        (_, Some(api)) if request.method == "POST" => generate(core, api, request).await,
        (_, Some(_)) => Reply::wrong_method("POST"),
        ("/v1/messages/count_tokens", _) if request.method == "POST" => match messages::prompt_tokens(&request.body) {
            Ok(tokens) => Reply::json(200, messages::count(tokens)),
            Err(message) => Reply::json(400, messages::error(400, &message)),
        },
        ("/health" | "/health_generate", _) if get => Reply::empty(),
        ("/v1/models", _) if get => Reply::json(200, probes::models(core)),
        ("/server_info" | "/get_server_info", _) if get => Reply::json(200, probes::server_info(core)),
        ("/model_info" | "/get_model_info", _) if get => Reply::json(200, probes::model_info(core)),
        ("/v1/loads", _) if get => Reply::json(200, probes::loads(core)),
        ("/metrics", _) if get => Reply::text(probes::metrics(core)),
        ("/flush_cache", _) => Reply::text("Cache flushed.\n"),
        _ => Reply::not_found(),
    }
}

/// An error as SGLang writes it: bare on OpenAI routes, wrapped on its own.
fn error(api: Api, status: u16, message: &str) -> String {
    if api == Api::Messages {
        return messages::error(status, message);
    }
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
    let read = routed_rank(core, &object)
        .and_then(|rank| Ok((Rendezvous::read(core, &object, &job, rank)?, rank.unwrap_or_default())));
    let (rendezvous, rank) = match read {
        Ok(read) => read,
        Err(failure) => return refuse(&failure),
    };
    if settings.role == Role::Prefill {
        job.only_first_token();
    }
    job.input_logprobs = settings.role != Role::Decode;
    let job = Arc::new(job);
    let work = work(Arc::clone(core), Arc::clone(&job), rendezvous, rank);
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

/// The data-parallel rank that the request asks for.
fn routed_rank(core: &Core, object: &Object<'_>) -> Result<Option<u64>, Failure> {
    let rank = |name: &str| {
        let rank = object.count(name).map_err(|message| Failure::new(400, message))?;
        match (rank, core.settings.dp_size) {
            (Some(rank), Some(size)) if rank >= size => {
                Err(Failure::new(400, format!("{name}={rank} out of range [0, {size})")))
            }
            (rank, _) => Ok(rank),
        }
    };
    Ok(rank("routed_dp_rank")?.or(rank("data_parallel_rank")?))
}

impl Rendezvous {
    fn read(core: &Core, object: &Object<'_>, job: &Job, rank: Option<u64>) -> Result<Self, Failure> {
        let invalid = |message: String| Failure::new(400, message);
        if core.settings.role == Role::Regular {
            return Ok(Rendezvous::None);
        }
        let Some(rooms) = object
            .read::<Each<u64>>("bootstrap_room")
            .map_err(|_| invalid("bootstrap_room: must be an integer or a list of integers".to_owned()))?
        else {
            return Err(invalid("bootstrap_room: required by a disaggregated engine".to_owned()));
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
            return Ok(Rendezvous::Prefill { rooms, rank });
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

async fn work(core: Arc<Core>, job: Arc<Job>, rendezvous: Rendezvous, own: u64) -> Result<Prefilled, Failure> {
    let failed = |reason: String| Failure::new(500, format!("KV transfer failed: {reason}"));
    let running = match rendezvous {
        Rendezvous::None => {
            let running = core.load.run_on(own).await;
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
            let running = core.load.run_on(own).await;
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
            core.load.run_on(own).await
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
            core.load.run_on(own).await
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
