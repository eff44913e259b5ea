//! The data plane: a stateless gateway that routes with the fleet's last snapshot.
//!
//! ```text
//!  front ──► select ──► dispatch ──► relay          per request
//!    │         ▲
//!    │         │ routing table, swapped whole
//!  admin ──► sync ◄── control plane                 per change of the fleet
//! ```
//!
//! A gateway needs nothing from the control plane to route: a lost stream delays changes and fails no request.

pub mod admission;
pub mod clock;
pub mod connections;
pub mod core;
pub mod decision;
pub mod dispatch;
pub mod fleet;
pub mod front;
pub mod grpc;
pub mod heavy;
pub mod hints;
pub mod hops;
pub mod load;
pub mod options;
pub mod relay;
pub mod resilience;
pub mod select;
pub mod slots;
pub mod sync;
pub mod trace;
mod words;

use std::sync::Arc;

use smg_telemetry::Metrics;

pub use crate::core::Core;
pub use front::access::Keys;
pub use front::admission::AdmissionOptions;
pub use front::cors::Origins;
pub use grpc::tokenizers::TextOptions;
pub use options::{GatewayOptions, LoadMonitorOptions};
pub use sync::Link;
pub use sync::dial::Dial;

/// How long what is ended at last may take for it.
const LAST_WORDS: std::time::Duration = std::time::Duration::from_secs(2);

/// A running gateway, without its listener.
pub struct Gateway {
    core: Arc<Core>,
    link: Arc<Link>,
    /// Taken by the end.
    slots: parking_lot::Mutex<Option<slots::Reporter>>,
}

impl Gateway {
    /// Starts the subscription to the control plane, and the reports of slots.
    pub fn start(options: GatewayOptions, metrics: Arc<Metrics>, dial: Dial) -> Self {
        let core = Core::new(options, metrics);
        let slots = parking_lot::Mutex::new(slots::start(&core, dial.clone()));
        let link = sync::start(Arc::clone(&core), dial);
        smg_net::spawn("connection-sweep", connections::sweep_for_ever(Arc::clone(&core)));
        smg_net::spawn("policy-gauges", fleet::policies::show_for_ever(Arc::clone(&core)));
        smg_net::spawn("tokenizers", grpc::tokenizers::follow_the_fleet(Arc::clone(&core)));
        smg_net::spawn("load-monitor", load::monitor::watch(Arc::clone(&core)));
        Self { core, link, slots }
    }

    /// The service of its API port.
    pub fn api(&self) -> front::Api {
        front::Api::new(Arc::clone(&self.core), Arc::clone(&self.link))
    }

    /// What its parts share.
    pub fn core(&self) -> &Arc<Core> {
        &self.core
    }

    /// Its way to the control plane.
    pub fn link(&self) -> &Arc<Link> {
        &self.link
    }

    /// Waits until it routes with a snapshot of the fleet, at most until `limit`.
    pub async fn synced(&self, limit: std::time::Duration) {
        let mut revision = self.core.revision.subscribe();
        let _ = tokio::time::timeout(limit, revision.wait_for(|revision| *revision > 0)).await;
    }

    /// From now on it is not ready; requests are still served.
    pub fn begin_drain(&self) {
        self.core.draining.cancel();
    }

    /// Waits for work that outlives its requests, at most until `limit`, and ends the rest.
    pub async fn close(&self, limit: std::time::Duration) {
        self.core.background.close();
        let _ = tokio::time::timeout(limit, self.core.background.wait()).await;
        self.core.closing.cancel();
        // Legs over gRPC tell their engines before the process ends.
        let _ = tokio::time::timeout(limit.min(LAST_WORDS), self.core.background.wait()).await;
        let reporter = self.slots.lock().take();
        if let Some(reporter) = reporter {
            reporter.leave(LAST_WORDS).await;
        }
        if let Some(tracer) = &self.core.options.tracer {
            tracer.flush(limit).await;
        }
    }
}
