//! This gateway's part in the slot ledger: it tells the control plane which slots of decode workers it uses and wants, and is told how many
//! are its own.
//!
//! It runs on a thread and a runtime of its own, so that a gateway that is busy with requests keeps its lease. No request waits for it
//! unless there is no slot for the request; a gateway that is alone in its fleet is told whole windows ahead of any demand.
//!
//! Invariants
//! * windows know a share before the lease under which it counts is renewed;
//! * what is kept on disk for the next process is never more than the control plane has been told is known here ([`checkpoint`]);
//! * a process that ends says last what it leaves running.

pub mod checkpoint;
mod session;

use std::sync::Arc;
use std::thread;
use std::time::Duration;

use smg_admission::{Shares, Times};
use smg_telemetry::SMG;
use tokio::sync::oneshot;
use uuid::Uuid;

use crate::clock::since_boot;
use crate::core::Core;
use crate::sync::dial::Dial;
use checkpoint::Checkpoints;

/// Tells the reporter that the gateway ends, and is told when it has said so.
#[derive(Debug)]
pub struct Reporter {
    leave: oneshot::Sender<()>,
    left: oneshot::Receiver<()>,
}

impl Reporter {
    /// Says that the gateway ends. Waits at most until `limit`.
    pub async fn leave(self, limit: Duration) {
        let _ = self.leave.send(());
        let _ = tokio::time::timeout(limit, self.left).await;
    }
}

/// Starts reporting; nothing to report where the gateway is alone.
pub fn start(core: &Arc<Core>, dial: Dial) -> Option<Reporter> {
    if core.options.alone {
        return None;
    }
    let (leave, leaving) = oneshot::channel();
    let (said, left) = oneshot::channel();
    let core = Arc::clone(core);
    let checkpoints = core.options.data_dir.clone().and_then(Checkpoints::open);
    let before = checkpoints.as_ref().and_then(|kept| kept.load(&core.options.gateway_id));
    let before = before.filter(|before| since_boot() < before.heard + before.leases[1]);
    if let Some(before) = &before {
        // To the control plane this is the process that it knows.
        core.process.send_replace(Uuid::from_u128(before.process));
    }
    let run = move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        match runtime {
            Ok(runtime) => runtime.block_on(async {
                session::run(&core, &dial, checkpoints, before, leaving).await;
            }),
            Err(error) => {
                tracing::error!(target: SMG, %error, "no runtime for slot reports: windowed decode workers are not served")
            }
        }
        let _ = said.send(());
    };
    if let Err(error) = thread::Builder::new().name("slots".to_owned()).spawn(run) {
        tracing::error!(target: SMG, %error, "no thread for slot reports: windowed decode workers are not served");
    }
    Some(Reporter { leave, left })
}

/// A process that was told nothing yet.
fn nobody(core: &Core) -> Shares {
    Shares::new(&core.options.gateway_id, core.process.borrow().as_u128(), Times::default(), false)
}
