//! Gauges that mirror the fleet's state: pool sizes, health, undeclared connectors.
//!
//! A control plane shows what is committed; a gateway shows the snapshot it routes with and lays its own ejections over it.

use std::collections::BTreeMap;

use smg_fleet::info::runs_undeclared_passthrough;
use smg_fleet::{Health, Worker};

use crate::Metrics;

type Pool = (&'static str, &'static str, String);

/// The series that are shown now; those that vanish must be removed.
#[derive(Debug, Default)]
pub struct FleetGauges {
    pools: BTreeMap<Pool, i64>,
    health: BTreeMap<String, i64>,
    http2: BTreeMap<String, i64>,
}

impl FleetGauges {
    /// Shows these workers, and no others any more. Workers that never registered are left out.
    pub fn show<'a>(&mut self, metrics: &Metrics, workers: impl Iterator<Item = &'a Worker>) {
        let mut next = Self::default();
        let mut undeclared = 0;
        for worker in workers.filter(|worker| worker.facts.is_some()) {
            let pool = (worker.spec.worker_type.as_str(), worker.wire().as_str(), worker.model_id().to_owned());
            *next.pools.entry(pool).or_default() += 1;
            next.health.insert(worker.spec.url.clone(), i64::from(worker.health == Health::Ready));
            let http2 = worker.facts.as_ref().is_some_and(|facts| facts.http2);
            next.http2.insert(worker.spec.url.clone(), i64::from(http2));
            undeclared += i64::from(runs_undeclared_passthrough(worker));
        }
        metrics.pd_undeclared_connectors.set(undeclared);
        for pool in self.pools.keys().filter(|pool| !next.pools.contains_key(pool)) {
            // Removing what is not there is no error worth a word.
            let _ = metrics.worker_pool_size.remove_label_values(&[pool.0, pool.1, &pool.2]);
        }
        for (pool, size) in &next.pools {
            metrics.worker_pool_size.with_label_values(&[pool.0, pool.1, &pool.2]).set(*size);
        }
        for worker in self.health.keys().filter(|worker| !next.health.contains_key(*worker)) {
            let _ = metrics.worker_health.remove_label_values(&[worker]);
            let _ = metrics.worker_http2.remove_label_values(&[worker]);
        }
        for (worker, http2) in &next.http2 {
            metrics.worker_http2.with_label_values(&[worker]).set(*http2);
        }
        for (worker, healthy) in &next.health {
            // Only what changed: in a process with both planes the gateway lays its own verdict over it.
            if self.health.get(worker) != Some(healthy) {
                metrics.worker_health.with_label_values(&[worker]).set(*healthy);
            }
        }
        *self = next;
    }
}
