//! `/fleet/admission`: the slots of decode workers, who holds them, and why.
//!
//! The ledger is a part of the replicated state, so every member answers. What gateways use and wait for is as they last said.

use axum::Json;
use axum::extract::State;
use axum::http::request::Parts;
use axum::response::Response;
use serde_json::{Value, json};
use smg_admission::Ledger;
use smg_admission::pool::{Pool, Row, Totals, Zombie};
use smg_fleet::Worker;
use uuid::Uuid;

use super::error::ApiError;
use super::service::Consistency;
use super::{Admin, at_revision, intake};
use crate::slots;

pub(super) async fn show(State(admin): State<Admin>, parts: Parts) -> Result<Response, ApiError> {
    if intake::consistency(&parts.uri)? != Consistency::Stale {
        admin.service.writer.barrier().await?;
    }
    let state = admin.service.local();
    let ledger = state.ledger();
    let shown = |worker: std::sync::Arc<Worker>| {
        let pool = ledger.pools().get(&worker.id.0.as_u128())?;
        Some(of_worker(&worker, pool, ledger))
    };
    let workers: Vec<Value> = slots::gated(&state).filter_map(shown).collect();
    let gateways: Vec<Value> = ledger
        .sessions()
        .iter()
        .map(|(gateway, session)| {
            let process = Uuid::from_u128(session.process).to_string();
            json!({"gateway_id": gateway, "process_id": process, "heard": session.heard})
        })
        .collect();
    let body = json!({"workers": workers, "gateways": gateways, "rounds": ledger.rounds()});
    Ok(at_revision(state.revision(), Json(body)))
}

fn of_worker(worker: &Worker, pool: &Pool, ledger: &Ledger) -> Value {
    let holders: Vec<Value> = pool.rows().iter().map(|(gateway, row)| holder(gateway, *row, ledger)).collect();
    let zombies: Vec<Value> = pool.zombies().iter().map(|zombie| kept(zombie, ledger)).collect();
    let mut shown =
        json!({"worker_id": worker.id.to_string(), "url": worker.spec.url, "holders": holders, "zombies": zombies});
    for (name, slots) in Totals::of(pool).named() {
        shown[name] = json!(slots);
    }
    shown
}

fn holder(gateway: &str, row: Row, ledger: &Ledger) -> Value {
    let heard = ledger.sessions().get(gateway).is_some_and(|session| session.heard);
    let why = match (heard, row.share > row.limit, row.member) {
        (false, ..) => {
            "anchored: the gateway is not heard of, and keeps these until its long lease ends or it is replaced"
        }
        (_, true, _) => "recalled: it was told a smaller limit, and has not given the rest back yet",
        (_, _, true) => "its part",
        (_, _, false) => "asked for",
    };
    json!({
        "gateway_id": gateway,
        "granted": row.share,
        "limit": row.limit,
        "anchored": row.anchored,
        "in_use": row.in_use,
        "waiting": row.wants.saturating_sub(row.in_use),
        "heard": heard,
        "why": why,
    })
}

fn kept(zombie: &Zombie, ledger: &Ledger) -> Value {
    let lives = ledger.sessions().get(&zombie.gateway).is_some_and(|session| session.process == zombie.process);
    let why = if lives {
        "its short lease has ended, and its requests may still run"
    } else {
        "the process is gone, and its requests may still run"
    };
    json!({
        "gateway_id": zombie.gateway,
        "process_id": Uuid::from_u128(zombie.process).to_string(),
        "slots": zombie.slots,
        "why": why,
    })
}
