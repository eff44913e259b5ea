//! What all subscribers share: the newest snapshot, and which objects changed since earlier ones.
//!
//! The ring keeps the *names* of changed objects, not old snapshots: a delta from a remembered revision is the union of the names since then
//! with their newest values. An object named without need is sent without harm. A revision between two published ones is not remembered:
//! an object that came and went between them is named nowhere, so a gateway that has it gets everything instead.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use smg_fleet::{Delta, Revision, Snapshot, WorkerId, wire};
use smg_store::ClusterStore;
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

/// Most remembered steps.
pub const MAX_STEPS: usize = 1_024;
/// Most remembered names over all steps.
const MAX_NAMES: usize = 262_144;

/// The objects that changed between two published snapshots.
#[derive(Debug, Default)]
struct Step {
    from: Revision,
    workers: Vec<WorkerId>,
    policies: Vec<String>,
}

impl Step {
    fn names(&self) -> usize {
        self.workers.len() + self.policies.len()
    }
}

/// The steps that led to the newest snapshot, oldest first.
#[derive(Debug, Default)]
pub struct Ring {
    history_id: Uuid,
    steps: VecDeque<Step>,
    names: usize,
}

impl Ring {
    /// Remembers the step from `old` to `new`. Another history starts anew.
    fn advance(&mut self, old: &Snapshot, new: &Snapshot) {
        if old.history_id != new.history_id || old.revision > new.revision {
            *self = Self { history_id: new.history_id, ..Self::default() };
            return;
        }
        self.history_id = new.history_id;
        let delta = old.diff(new, 0);
        let workers = delta.upserted_workers.iter().map(|worker| worker.id).chain(delta.removed_workers);
        let policies = delta.upserted_policies.iter().map(|record| record.model.clone()).chain(delta.removed_policies);
        let step = Step { from: old.revision, workers: workers.collect(), policies: policies.collect() };
        self.names += step.names();
        self.steps.push_back(step);
        while self.steps.len() > MAX_STEPS || self.names > MAX_NAMES {
            match self.steps.pop_front() {
                Some(oldest) => self.names -= oldest.names(),
                None => break,
            }
        }
    }

    /// The delta from `revision` of `history_id` to `latest`; `None` when that revision is too long ago, of another history, yet to come, or
    /// was never published here.
    fn delta(&self, history_id: Uuid, revision: Revision, latest: &Published) -> Option<Delta> {
        let snapshot = &latest.snapshot;
        if history_id != snapshot.history_id || history_id != self.history_id || revision > snapshot.revision {
            return None;
        }
        let start = match self.steps.binary_search_by_key(&revision, |step| step.from) {
            Ok(start) => start,
            Err(_) if revision == snapshot.revision => self.steps.len(),
            Err(_) => return None,
        };
        let (mut workers, mut policies) = (BTreeSet::new(), BTreeSet::new());
        for step in self.steps.iter().skip(start) {
            workers.extend(step.workers.iter().copied());
            policies.extend(step.policies.iter().cloned());
        }
        let (upserted_workers, removed_workers) = split(workers, &snapshot.workers);
        let (upserted_policies, removed_policies) = split(policies, &snapshot.policies);
        Some(Delta {
            history_id,
            from_revision: revision,
            to_revision: snapshot.revision,
            upserted_workers,
            removed_workers,
            upserted_policies,
            removed_policies,
            tokens: snapshot.tokens.values().cloned().collect(),
            result_checksum: latest.checksum,
        })
    }
}

fn split<K: Ord, V>(names: BTreeSet<K>, objects: &BTreeMap<K, Arc<V>>) -> (Vec<Arc<V>>, Vec<K>) {
    let (mut present, mut gone) = (Vec::new(), Vec::new());
    for name in names {
        match objects.get(&name) {
            Some(object) => present.push(Arc::clone(object)),
            None => gone.push(name),
        }
    }
    (present, gone)
}

/// A snapshot ready to be sent.
#[derive(Debug)]
pub struct Published {
    /// The snapshot.
    pub snapshot: Snapshot,
    /// Its canonical bytes.
    pub bytes: Bytes,
    /// Their checksum.
    pub checksum: u32,
    /// When this node saw it first.
    pub at: Instant,
}

impl Published {
    /// Encodes `snapshot`.
    pub fn new(snapshot: Snapshot) -> Self {
        let bytes = Bytes::from(wire::encode_snapshot(&snapshot));
        let checksum = wire::checksum(&bytes);
        Self { snapshot, bytes, checksum, at: Instant::now() }
    }
}

/// The feed: one publisher, many subscribers.
#[derive(Debug)]
pub struct Feed {
    latest: watch::Sender<Arc<Published>>,
    ring: parking_lot::Mutex<Ring>,
}

impl Feed {
    /// A feed that starts at `snapshot`.
    pub fn new(snapshot: Snapshot) -> Self {
        let ring = Ring { history_id: snapshot.history_id, ..Ring::default() };
        let latest = watch::Sender::new(Arc::new(Published::new(snapshot)));
        Self { latest, ring: parking_lot::Mutex::new(ring) }
    }

    /// Announces each newly published snapshot.
    pub fn subscribe(&self) -> watch::Receiver<Arc<Published>> {
        self.latest.subscribe()
    }

    /// The delta from `revision` of `history_id` to `latest`, when it is remembered.
    pub fn delta(&self, history_id: Uuid, revision: Revision, latest: &Published) -> Option<Delta> {
        self.ring.lock().delta(history_id, revision, latest)
    }

    /// Publishes `published`, when it is newer or of another history.
    pub fn publish(&self, published: Published) {
        let mut ring = self.ring.lock();
        let before = Arc::clone(&self.latest.borrow());
        let same_history = before.snapshot.history_id == published.snapshot.history_id;
        if same_history && published.snapshot.revision <= before.snapshot.revision {
            return;
        }
        ring.advance(&before.snapshot, &published.snapshot);
        self.latest.send_replace(Arc::new(published));
    }

    /// Follows the store until `shutdown`: a change after a quiet time is published at once, a storm at most once in `window`, or slower
    /// when encoding takes long, so that it never takes more than a third of a core.
    pub async fn follow(self: Arc<Self>, store: Arc<dyn ClusterStore>, window: Duration, shutdown: CancellationToken) {
        let mut changes = store.changes();
        loop {
            changes.borrow_and_update();
            let started = Instant::now();
            let state = store.local();
            let encoded = tokio::task::spawn_blocking(move || Published::new(state.snapshot())).await;
            match encoded {
                Ok(published) => self.publish(Published { at: started, ..published }),
                Err(error) => tracing::error!(target: "smg", %error, "a snapshot could not be encoded"),
            }
            let next = started + window.max(started.elapsed() * 3);
            let changed = async {
                let alive = changes.changed().await.is_ok();
                sleep_until(next).await;
                alive
            };
            tokio::select! {
                alive = changed => if !alive { return },
                () = shutdown.cancelled() => return,
            }
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use proptest::prelude::*;
    use smg_fleet::{Health, Intent, Origin, Worker, WorkerSpec, WorkerType};

    use super::*;

    fn snapshot(revision: Revision, workers: &BTreeMap<u8, u32>) -> Snapshot {
        let worker = |(n, priority): (&u8, &u32)| {
            let mut spec = WorkerSpec::new(format!("http://h:{}", 1 + u16::from(*n)), WorkerType::Decode);
            spec.priority = *priority;
            let worker = Worker {
                id: WorkerId(Uuid::from_u128(u128::from(*n))),
                spec,
                facts: None,
                health: Health::Ready,
                intent: Intent::Active,
                origin: Origin::Api,
                job: None,
                create_revision: 1,
                mod_revision: 1,
            };
            (worker.id, Arc::new(worker))
        };
        Snapshot { revision, workers: workers.iter().map(worker).collect(), ..Default::default() }
    }

    proptest! {
        #[test]
        fn a_delta_from_any_remembered_revision_leads_to_the_newest_snapshot(
            changes in proptest::collection::vec((0u8..12, proptest::option::of(0u32..3)), 1..40),
            steps in proptest::collection::vec(1usize..4, 1..40),
        ) {
            let mut workers = BTreeMap::new();
            let mut snapshots = vec![snapshot(1, &workers)];
            for (revision, (n, priority)) in changes.into_iter().enumerate() {
                match priority {
                    Some(priority) => drop(workers.insert(n, priority)),
                    None => drop(workers.remove(&n)),
                }
                snapshots.push(snapshot(2 + revision as u64, &workers));
            }
            let feed = Feed::new(snapshots[0].clone());
            let mut published = vec![0];
            for step in steps {
                let at = (published[published.len() - 1] + step).min(snapshots.len() - 1);
                feed.publish(Published::new(snapshots[at].clone()));
                published.push(at);
            }
            let latest = Arc::clone(&feed.latest.borrow());
            for (at, have) in snapshots.iter().enumerate() {
                let delta = feed.delta(Uuid::nil(), have.revision, &latest);
                prop_assert_eq!(delta.is_some(), published.contains(&at));
                if let Some(delta) = delta {
                    prop_assert_eq!(&have.apply(&delta).unwrap(), &latest.snapshot);
                }
            }
        }
    }

    #[test]
    fn what_the_ring_does_not_hold_has_no_delta() {
        let feed = Feed::new(snapshot(5, &BTreeMap::new()));
        let latest = || Arc::clone(&feed.latest.borrow());
        assert!(feed.delta(Uuid::nil(), 4, &latest()).is_none(), "before the ring");
        assert!(feed.delta(Uuid::nil(), 6, &latest()).is_none(), "yet to come");
        assert!(feed.delta(Uuid::from_u128(1), 5, &latest()).is_none(), "another history");
        assert!(feed.delta(Uuid::nil(), 5, &latest()).is_some());
        for revision in 6..=(7 + MAX_STEPS as u64) {
            feed.publish(Published::new(snapshot(revision, &[(1, revision as u32)].into())));
        }
        assert!(feed.delta(Uuid::nil(), 5, &latest()).is_none(), "the ring is bounded");
        assert!(feed.delta(Uuid::nil(), 7, &latest()).is_some());
        let restored = Snapshot { history_id: Uuid::from_u128(1), ..snapshot(2, &BTreeMap::new()) };
        feed.publish(Published::new(restored));
        assert!(feed.delta(Uuid::nil(), 7, &latest()).is_none(), "a restore starts anew");
        assert!(feed.delta(Uuid::from_u128(1), 2, &latest()).is_some());
    }
}
