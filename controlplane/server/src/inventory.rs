//! Keeps the fleet's gauges in step with the committed state.

use std::sync::Arc;
use std::time::Duration;

use smg_store::ClusterStore;
use smg_telemetry::Metrics;
use smg_telemetry::fleet::FleetGauges;
use tokio_util::sync::CancellationToken;

/// Gauges follow the state at most this often.
const PAUSE: Duration = Duration::from_millis(250);

/// Sets the gauges after each change of the state, until `shutdown`.
pub(crate) async fn follow(store: Arc<dyn ClusterStore>, metrics: Arc<Metrics>, shutdown: CancellationToken) {
    let mut changes = store.changes();
    let mut gauges = FleetGauges::default();
    loop {
        changes.borrow_and_update();
        gauges.show(&metrics, store.local().workers().map(AsRef::as_ref));
        let changed = async {
            tokio::time::sleep(PAUSE).await;
            changes.changed().await.is_ok()
        };
        tokio::select! {
            alive = changed => if !alive { return },
            () = shutdown.cancelled() => return,
        }
    }
}
