//! Gauges that mirror the state: pool sizes, committed health and undeclared connectors.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use smg_fleet::Health;
use smg_fleet::info::runs_undeclared_passthrough;
use smg_state::State;
use smg_store::ClusterStore;
use smg_telemetry::Metrics;
use tokio_util::sync::CancellationToken;

/// Gauges follow the state at most this often.
const PAUSE: Duration = Duration::from_millis(250);

type Pool = (&'static str, &'static str, String);

/// The series that are shown now; those that vanish must be removed.
#[derive(Default)]
struct Shown {
    pools: BTreeMap<Pool, i64>,
    health: BTreeMap<String, i64>,
}

/// Sets the gauges after each change of the state, until `shutdown`.
pub(crate) async fn follow(store: Arc<dyn ClusterStore>, metrics: Arc<Metrics>, shutdown: CancellationToken) {
    let mut changes = store.changes();
    let mut shown = Shown::default();
    loop {
        changes.borrow_and_update();
        shown = show(&store.local(), &metrics, shown);
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

fn show(state: &State, metrics: &Metrics, before: Shown) -> Shown {
    let mut shown = Shown::default();
    let mut undeclared = 0;
    for worker in state.workers().filter(|worker| worker.facts.is_some()) {
        let pool = (worker.spec.worker_type.as_str(), worker.wire().as_str(), worker.model_id().to_owned());
        *shown.pools.entry(pool).or_default() += 1;
        shown.health.insert(worker.spec.url.clone(), i64::from(worker.health == Health::Ready));
        undeclared += i64::from(runs_undeclared_passthrough(worker));
    }
    metrics.pd_undeclared_connectors.set(undeclared);
    for pool in before.pools.keys().filter(|pool| !shown.pools.contains_key(pool)) {
        // Removing what is not there is no error worth a word.
        let _ = metrics.worker_pool_size.remove_label_values(&[pool.0, pool.1, &pool.2]);
    }
    for (pool, size) in &shown.pools {
        metrics.worker_pool_size.with_label_values(&[pool.0, pool.1, &pool.2]).set(*size);
    }
    for worker in before.health.keys().filter(|worker| !shown.health.contains_key(*worker)) {
        let _ = metrics.worker_health.remove_label_values(&[worker]);
    }
    for (worker, healthy) in &shown.health {
        // Only what changed: a gateway in this process lays its own verdict over it.
        if before.health.get(worker) != Some(healthy) {
            metrics.worker_health.with_label_values(&[worker]).set(*healthy);
        }
    }
    shown
}
