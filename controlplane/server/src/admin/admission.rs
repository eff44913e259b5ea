//! `/fleet/admission`: the slots of decode workers, who holds them, and why.
//!
//! The ledger is a part of the replicated state, so every member answers. What gateways use and wait for is as they last said.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::http::request::Parts;
use axum::response::Response;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use smg_admission::Ledger;
use smg_admission::pool::{Pool, Row, Totals, Zombie};
use smg_fleet::Worker;
use smg_services::admin as pb;
use smg_state::State as Fleet;
use uuid::Uuid;

use super::error::ApiError;
use super::{Admin, at_revision, intake};
use crate::slots;

/// The slots of all decode workers whose windows gateways share.
#[derive(Serialize, Deserialize, JsonSchema)]
#[schemars(rename = "Admission")]
pub(super) struct Shown {
    workers: Vec<WorkerSlots>,
    gateways: Vec<SlotGateway>,
    /// How often the ledger was carried on.
    rounds: u64,
    /// Where a gateway answers: its own lease and slots.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    here: Option<Value>,
}

/// The slots of one decode worker.
#[derive(Serialize, Deserialize, JsonSchema)]
struct WorkerSlots {
    worker_id: String,
    url: String,
    /// Requests that the engine runs at a time.
    window: u64,
    /// What gateways may use.
    granted: u64,
    /// What they said to use.
    in_use: u64,
    /// What requests wait for.
    waiting: u64,
    /// Of gateways that are not heard of, and may still run requests there.
    zombie: u64,
    /// Used by others than gateways.
    foreign: u64,
    /// Nobody's.
    free: u64,
    holders: Vec<SlotHolder>,
    zombies: Vec<KeptSlots>,
}

/// What one gateway holds of a worker.
#[derive(Serialize, Deserialize, JsonSchema)]
struct SlotHolder {
    gateway_id: String,
    /// Most that it may use, for all that is known.
    granted: u32,
    /// Most that it was told to use.
    limit: u32,
    /// What it keeps without the control plane.
    anchored: u32,
    in_use: u32,
    waiting: u32,
    /// Whether it is heard of.
    heard: bool,
    why: String,
}

/// Slots that are kept for requests of a silent process.
#[derive(Serialize, Deserialize, JsonSchema)]
struct KeptSlots {
    gateway_id: String,
    process_id: String,
    slots: u32,
    why: String,
}

/// A gateway that reports.
#[derive(Serialize, Deserialize, JsonSchema)]
struct SlotGateway {
    gateway_id: String,
    process_id: String,
    heard: bool,
}

pub(super) async fn show(State(admin): State<Admin>, parts: Parts) -> Result<Response, ApiError> {
    let state = admin.service.read(intake::consistency(&parts.uri)?).await?;
    Ok(at_revision(state.revision(), Json(shown(&state))))
}

/// What `state` says of slots.
pub(super) fn shown(state: &Fleet) -> Shown {
    let ledger = state.ledger();
    let of_worker = |worker: Arc<Worker>| {
        let pool = ledger.pools().get(&worker.id.0.as_u128())?;
        Some(of_worker(&worker, pool, ledger))
    };
    let gateway = |(gateway, session): (&String, &smg_admission::ledger::Session)| SlotGateway {
        gateway_id: gateway.clone(),
        process_id: Uuid::from_u128(session.process).to_string(),
        heard: session.heard,
    };
    Shown {
        workers: slots::gated(state).filter_map(of_worker).collect(),
        gateways: ledger.sessions().iter().map(gateway).collect(),
        rounds: ledger.rounds(),
        here: None,
    }
}

fn of_worker(worker: &Worker, pool: &Pool, ledger: &Ledger) -> WorkerSlots {
    let Totals { window, granted, in_use, waiting, zombie, foreign, free } = Totals::of(pool);
    WorkerSlots {
        worker_id: worker.id.to_string(),
        url: worker.spec.url.clone(),
        window,
        granted,
        in_use,
        waiting,
        zombie,
        foreign,
        free,
        holders: pool.rows().iter().map(|(gateway, row)| holder(gateway, *row, ledger)).collect(),
        zombies: pool.zombies().iter().map(|zombie| kept(zombie, ledger)).collect(),
    }
}

fn holder(gateway: &str, row: Row, ledger: &Ledger) -> SlotHolder {
    let heard = ledger.sessions().get(gateway).is_some_and(|session| session.heard);
    let why = match (heard, row.share > row.limit, row.member) {
        (false, ..) => {
            "anchored: the gateway is not heard of, and keeps these until its long lease ends or it is replaced"
        }
        (_, true, _) => "recalled: it was told a smaller limit, and has not given the rest back yet",
        (_, _, true) => "its part",
        (_, _, false) => "asked for",
    };
    SlotHolder {
        gateway_id: gateway.to_owned(),
        granted: row.share,
        limit: row.limit,
        anchored: row.anchored,
        in_use: row.in_use,
        waiting: row.wants.saturating_sub(row.in_use),
        heard,
        why: why.to_owned(),
    }
}

fn kept(zombie: &Zombie, ledger: &Ledger) -> KeptSlots {
    let lives = ledger.sessions().get(&zombie.gateway).is_some_and(|session| session.process == zombie.process);
    let why = if lives {
        "its short lease has ended, and its requests may still run"
    } else {
        "the process is gone, and its requests may still run"
    };
    KeptSlots {
        gateway_id: zombie.gateway.clone(),
        process_id: Uuid::from_u128(zombie.process).to_string(),
        slots: zombie.slots,
        why: why.to_owned(),
    }
}

impl Shown {
    /// The answer over gRPC.
    pub(super) fn into_pb(self, revision: u64) -> pb::GetAdmissionResponse {
        let gateway = |gateway: SlotGateway| pb::SlotGateway {
            gateway_id: gateway.gateway_id,
            process_id: gateway.process_id,
            heard: gateway.heard,
        };
        pb::GetAdmissionResponse {
            revision,
            workers: self.workers.into_iter().map(WorkerSlots::into_pb).collect(),
            gateways: self.gateways.into_iter().map(gateway).collect(),
            rounds: self.rounds,
        }
    }
}

impl WorkerSlots {
    fn into_pb(self) -> pb::WorkerSlots {
        let holder = |holder: SlotHolder| pb::SlotHolder {
            gateway_id: holder.gateway_id,
            granted: holder.granted,
            limit: holder.limit,
            anchored: holder.anchored,
            in_use: holder.in_use,
            waiting: holder.waiting,
            heard: holder.heard,
            why: holder.why,
        };
        let kept = |kept: KeptSlots| pb::KeptSlots {
            gateway_id: kept.gateway_id,
            process_id: kept.process_id,
            slots: kept.slots,
            why: kept.why,
        };
        pb::WorkerSlots {
            worker_id: self.worker_id,
            url: self.url,
            window: self.window,
            granted: self.granted,
            in_use: self.in_use,
            waiting: self.waiting,
            zombie: self.zombie,
            foreign: self.foreign,
            free: self.free,
            holders: self.holders.into_iter().map(holder).collect(),
            zombies: self.zombies.into_iter().map(kept).collect(),
        }
    }
}
