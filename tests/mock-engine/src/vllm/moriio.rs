//! `MoRIIOConnector`: KV that a decode engine pulls (READ) or that a prefill engine pushes (WRITE).
//!
//! - prefill (`do_remote_decode`): hands over only when the answer ends by its token limit, so not when an end-of-sequence
//!   token or a stop condition may end it first; WRITE pushes the KV to the side channel it is given before it answers;
//! - READ decode (`do_remote_prefill`): pulls by `transfer_id` from the side channel it is given;
//! - WRITE decode: says hello to that side channel and waits for the push on its own;
//! - a decode engine never computes a prompt: without KV, READ answers with other text and WRITE waits;
//! - fields of a wrong shape kill the engine, as they raise in the real one's scheduler.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use serde_json::value::RawValue;
use serde_json::{Value, json};

use super::{BLOCK, FORMAT, Unusable, check_hold};
use crate::answer::{Failure, Prefilled, deliver};
use crate::engine::{Connector, Core, Role};
use crate::fabric::{Take, starve};
use crate::generate::Job;
use crate::http::Reply;
use crate::json::Object;
use crate::ledger::{Key, Kv};

/// The side channel of the other engine.
struct Peer {
    host: String,
    handshake_port: u16,
    notify_port: u16,
}

/// What a request's `kv_transfer_params` ask for.
enum Plan {
    /// Compute the prompt; its KV stays here.
    Compute,
    /// READ prefill.
    Hold(String),
    /// WRITE prefill.
    Push(String, Peer),
    /// READ decode.
    Pull(String, Peer),
    /// WRITE decode.
    Await(String, Peer),
    /// A decode without a handoff.
    Nothing,
}

pub(super) async fn generate(core: &Arc<Core>, object: &Object<'_>, mut job: Job) -> Reply {
    let plan = match Plan::read(core, object, &job) {
        Ok(plan) => plan,
        Err(unusable) => return unusable.reply(),
    };
    let hands_over = matches!(plan, Plan::Hold(_) | Plan::Push(..));
    job.input_logprobs = hands_over;
    if hands_over && may_end_early(object) {
        job.capped = false;
    }
    if core.settings.connector == Connector::MoriioRead {
        let have = match &plan {
            Plan::Pull(transfer_id, peer) => pull(core, transfer_id, peer, &job).await,
            Plan::Nothing => false,
            _ => true,
        };
        if !have {
            for prompt in &mut job.samples {
                prompt.digest = !prompt.digest;
            }
        }
    }
    let job = Arc::new(job);
    let work = work(Arc::clone(core), Arc::clone(&job), plan);
    deliver(core, job, &FORMAT, work).await
}

fn may_end_early(object: &Object<'_>) -> bool {
    let ignores_eos = object.flag("ignore_eos").unwrap_or(false);
    !ignores_eos || object.get("stop").is_some() || object.get("stop_token_ids").is_some()
}

impl Plan {
    fn read(core: &Core, object: &Object<'_>, job: &Job) -> Result<Self, Unusable> {
        let params = object.object("kv_transfer_params")?;
        let write = core.settings.connector == Connector::MoriioWrite;
        let transfer_id = || match params.string("transfer_id") {
            Ok(Some(id)) => Ok(id.into_owned()),
            _ => Err(Unusable::Fatal),
        };
        if params.flag("do_remote_decode")? {
            check_hold(job)?;
            return Ok(if write { Plan::Push(transfer_id()?, peer(&params)?) } else { Plan::Hold(transfer_id()?) });
        }
        if params.flag("do_remote_prefill")? {
            check_shapes(&params, write)?;
            let (transfer_id, peer) = (transfer_id()?, peer(&params)?);
            return Ok(if write { Plan::Await(transfer_id, peer) } else { Plan::Pull(transfer_id, peer) });
        }
        Ok(if core.settings.role == Role::Decode { Plan::Nothing } else { Plan::Compute })
    }
}

fn peer(params: &Object<'_>) -> Result<Peer, Unusable> {
    let host = params.string("remote_host").ok().flatten();
    let host = host.filter(|host| !host.is_empty() && !host.contains(char::is_whitespace)).ok_or(Unusable::Fatal)?;
    let port = |name| {
        let port = params.get(name).and_then(integer).and_then(|port| u16::try_from(port).ok());
        port.filter(|port| *port > 0).ok_or(Unusable::Fatal)
    };
    Ok(Peer {
        host: host.into_owned(),
        handshake_port: port("remote_handshake_port")?,
        notify_port: port("remote_notify_port")?,
    })
}

/// An integer as Python's `int()` takes it.
fn integer(value: &RawValue) -> Option<i64> {
    match serde_json::from_str(value.get()).ok()? {
        Value::Number(number) => number.as_i64(),
        Value::String(text) => text.trim().parse().ok(),
        _ => None,
    }
}

fn check_shapes(params: &Object<'_>, write: bool) -> Result<(), Unusable> {
    let engine_id = params.string("remote_engine_id").map_err(|_| Unusable::Fatal)?;
    let blocks = params.get("remote_block_ids").map(|blocks| blocks.get());
    let are_blocks =
        |raw: &str| serde_json::from_str::<Vec<u64>>(raw).is_ok() || serde_json::from_str::<Vec<Vec<u64>>>(raw).is_ok();
    // A WRITE decode allocates blocks of its own and need not know the others.
    let known = write && engine_id.is_none() && blocks.is_none()
        || engine_id.is_some_and(|id| !id.is_empty()) && blocks.is_some_and(are_blocks);
    let counts = ["remote_dp_size", "remote_dp_size_local", "remote_dp_rank", "tp_size", "remote_tp_size"];
    let counted = counts.iter().all(|name| params.get(name).is_none_or(|value| integer(value).is_some()));
    if known && counted { Ok(()) } else { Err(Unusable::Fatal) }
}

/// Fetches the KV of a READ decode; false when there is none.
async fn pull(core: &Core, transfer_id: &str, peer: &Peer, job: &Job) -> bool {
    let take = Take {
        key: Key::Transfer(transfer_id.to_owned()),
        engine_id: None,
        prompt: job.samples.first().map_or(0, |prompt| prompt.digest),
        rank: None,
        wait: false,
    };
    match core.fabric.take(&peer.host, peer.handshake_port, &take).await {
        Ok(kv) => use_kv(core, job, kv).is_ok(),
        Err(_) => false,
    }
}

/// One piece of KV serves one prompt.
fn use_kv(core: &Core, job: &Job, kv: Kv) -> Result<(), Failure> {
    if job.samples.iter().any(|prompt| *prompt != kv.prompt) {
        return Err(internal());
    }
    core.load.external_tokens.fetch_add(kv.prompt.tokens as u64, Ordering::Relaxed);
    Ok(())
}

fn internal() -> Failure {
    Failure::new(500, "Internal server error")
}

async fn work(core: Arc<Core>, job: Arc<Job>, plan: Plan) -> Result<Prefilled, Failure> {
    let handed_over = |transfer_id: &str| job.capped.then(|| handoff(&core, &job, transfer_id)).flatten();
    match plan {
        Plan::Compute => {
            let running = core.load.run().await;
            core.compute(job.prompt_tokens()).await;
            Ok(Prefilled { running, transfer: None })
        }
        Plan::Hold(transfer_id) => {
            let hold = core.ledger().begin(&Key::Transfer(transfer_id.clone())).map_err(|_| internal())?;
            let running = core.load.run().await;
            core.compute(job.prompt_tokens()).await;
            if job.capped
                && let Some(prompt) = job.samples.first()
            {
                hold.ready(Kv { prompt: *prompt, rank: None });
                hold.keep();
            }
            Ok(Prefilled { running, transfer: handed_over(&transfer_id) })
        }
        Plan::Push(transfer_id, peer) => {
            let running = core.load.run().await;
            core.compute(job.prompt_tokens()).await;
            if job.capped
                && let Some(prompt) = job.samples.first()
                && core.fabric.hello(&peer.host, peer.handshake_port).await
            {
                // Should it fail, the decode engine waits in vain, and nobody here learns of it.
                let key = Key::Transfer(transfer_id.clone());
                core.fabric.push(&peer.host, peer.notify_port, &key, *prompt).await;
            }
            Ok(Prefilled { running, transfer: handed_over(&transfer_id) })
        }
        // The KV was pulled before, or there is none and the text is another.
        Plan::Pull(..) => Ok(Prefilled { running: core.load.run().await, transfer: None }),
        Plan::Nothing if core.settings.connector == Connector::MoriioRead => {
            Ok(Prefilled { running: core.load.run().await, transfer: None })
        }
        Plan::Await(transfer_id, peer) => {
            let reached = core.fabric.hello(&peer.host, peer.handshake_port).await
                && core.fabric.hello(&peer.host, peer.notify_port).await;
            if !reached {
                starve(core.settings.patience).await;
                return Err(internal());
            }
            let prompt = job.samples.first().map_or(0, |prompt| prompt.digest);
            let kv = core.ledger().take(&Key::Transfer(transfer_id), prompt, None, true).await;
            use_kv(&core, &job, kv.map_err(|_| internal())?)?;
            Ok(Prefilled { running: core.load.run().await, transfer: None })
        }
        Plan::Nothing => {
            starve(core.settings.patience).await;
            Err(internal())
        }
    }
}

/// `kv_transfer_params` of a prefill's answer, as falsified as the engine was told to.
fn handoff(core: &Core, job: &Job, transfer_id: &str) -> Option<String> {
    let blocks = job.prompt_tokens().div_ceil(BLOCK) as u64;
    let first = core.blocks.fetch_add(blocks, Ordering::Relaxed);
    let ports = core.ports();
    let mut handoff = json!({
        "do_remote_prefill": true,
        "do_remote_decode": false,
        "remote_block_ids": [(first..first + blocks).collect::<Vec<u64>>()],
        "remote_engine_id": &*core.engine_id(),
        "remote_host": "127.0.0.1",
        "remote_handshake_port": ports.side_channel,
        "remote_notify_port": ports.notify,
        "remote_dp_size": 1,
        "remote_dp_rank": 0,
        "tp_size": 1,
        "transfer_id": transfer_id,
    });
    match &*core.handoff_patch.lock() {
        None => {}
        Some(Value::Object(fields)) => {
            for (name, value) in fields {
                handoff[name] = value.clone();
            }
        }
        Some(instead) => handoff = instead.clone(),
    }
    (!handoff.is_null()).then(|| handoff.to_string())
}
