//! Shows in metrics how this node stands: whether it leads, what it knows of the log, and how far the others are.

use std::sync::Arc;
use std::time::Duration;

use smg_store::{ClusterStore, Leadership};
use smg_telemetry::Metrics;
use tokio_util::sync::CancellationToken;

/// Between two looks.
const LOOK: Duration = Duration::from_secs(1);

/// Sets the gauges every second and with each change of the leadership, until `shutdown`.
pub(crate) async fn follow(store: Arc<dyn ClusterStore>, metrics: Arc<Metrics>, shutdown: CancellationToken) {
    let mut leadership = store.leadership();
    loop {
        let leads = *leadership.borrow_and_update() == Leadership::Leader;
        show(&*store, &metrics, leads).await;
        let next = async {
            match tokio::time::timeout(LOOK, leadership.changed()).await {
                // The store is gone.
                Ok(Err(_)) => false,
                _ => true,
            }
        };
        tokio::select! {
            goes_on = next => if !goes_on { return },
            () = shutdown.cancelled() => return,
        }
    }
}

async fn show(store: &dyn ClusterStore, metrics: &Metrics, leads: bool) {
    let number = |value: u64| i64::try_from(value).unwrap_or(i64::MAX);
    metrics.store_leading.set(leads.into());
    metrics.store_in_contact.set(store.in_contact().into());
    let commits = &metrics.store_commits;
    commits.inc_by(store.commits().saturating_sub(commits.get()));
    // What this node knows itself is never refused.
    let Ok(status) = store.cluster(true).await else { return };
    metrics.store_term.set(number(status.term));
    metrics.store_committed_index.set(number(status.committed_index));
    metrics.store_applied_index.set(number(status.applied_index));
    // Members that left must not stay.
    metrics.store_member_lag.reset();
    for member in status.members.iter().filter(|_| leads) {
        if let Some(matched) = member.matched_index {
            let lag = metrics.store_member_lag.with_label_values(&[&member.node_id.to_string()]);
            lag.set(number(status.last_log_index.saturating_sub(matched)));
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use serde_json::json;
    use smg_store::StoreError;

    use super::*;
    use crate::testing::Plane;

    #[tokio::test]
    async fn metrics_show_who_leads_and_what_became_of_writes() {
        let plane = Plane::start();
        plane.call("PUT", "/fleet/policies/m", Some(json!({}))).await;
        plane.call("DELETE", "/fleet/policies/absent", None).await;
        plane.store.fail(vec![StoreError::Unavailable("no leader".into())]);
        plane.call("PUT", "/fleet/policies/m", Some(json!({}))).await;
        let writes = |outcome: &str| plane.metrics.store_writes.with_label_values(&[outcome]).get();
        assert_eq!((writes("rejected"), writes("did_not_happen"), writes("unknown")), (1, 1, 0));
        assert!(writes("happened") >= 1 && plane.metrics.store_write_duration.get_sample_count() >= 2);
        let leads = async {
            while plane.metrics.store_leading.get() != 1 {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(20), leads).await.unwrap();
    }
}
