//! What all subscribers share: the newest snapshot, and which objects changed since earlier ones.
//!
//! The ring keeps the *names* of changed objects, not old snapshots: a delta from a remembered revision is the union of the names since then
//! with their newest values. A revision between two published ones is not remembered, nor is one from before this process: that of a
//! subscriber which followed another member. For these the whole state is looked through: each object says when it was changed last, and the
//! state names what is gone ([`smg_state::departures`]). Only where that is too long ago does a subscriber get everything.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use smg_fleet::{Delta, PolicyRecord, Revision, Snapshot, Worker, WorkerId, wire};
use smg_state::{Departed, Departures, State};
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
        Some(latest.delta(revision, split(workers, &snapshot.workers), split(policies, &snapshot.policies)))
    }
}

/// Objects that are new or changed, and names of those that are gone.
type Changes<V, K> = (Vec<Arc<V>>, Vec<K>);

fn split<K: Ord, V>(names: BTreeSet<K>, objects: &BTreeMap<K, Arc<V>>) -> Changes<V, K> {
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
    /// What was gone by then.
    departures: Departures,
}

impl Published {
    /// Encodes what gateways receive of `state`.
    pub fn new(state: &State) -> Self {
        Self::of(state.snapshot(), state.departures().clone())
    }

    fn of(snapshot: Snapshot, departures: Departures) -> Self {
        let bytes = Bytes::from(wire::encode_snapshot(&snapshot));
        let checksum = wire::checksum(&bytes);
        Self { snapshot, bytes, checksum, at: Instant::now(), departures }
    }

    /// The delta from any revision of the same history since which it is known what is gone.
    fn since(&self, history_id: Uuid, revision: Revision) -> Option<Delta> {
        let snapshot = &self.snapshot;
        if history_id != snapshot.history_id || revision > snapshot.revision {
            return None;
        }
        let (mut gone_workers, mut gone_policies) = (Vec::new(), Vec::new());
        for departed in self.departures.after(revision)? {
            match departed {
                Departed::Worker(id) if !snapshot.workers.contains_key(id) => gone_workers.push(*id),
                Departed::Policy(model) if !snapshot.policies.contains_key(model) => gone_policies.push(model.clone()),
                // It is back.
                Departed::Worker(_) | Departed::Policy(_) => {}
            }
        }
        let workers = snapshot.workers.values().filter(|worker| worker.mod_revision > revision).cloned().collect();
        let policies = snapshot.policies.values().filter(|record| record.mod_revision > revision).cloned().collect();
        Some(self.delta(revision, (workers, gone_workers), (policies, gone_policies)))
    }

    fn delta(
        &self,
        from: Revision,
        workers: Changes<Worker, WorkerId>,
        policies: Changes<PolicyRecord, String>,
    ) -> Delta {
        let snapshot = &self.snapshot;
        Delta {
            history_id: snapshot.history_id,
            from_revision: from,
            to_revision: snapshot.revision,
            upserted_workers: workers.0,
            removed_workers: workers.1,
            upserted_policies: policies.0,
            removed_policies: policies.1,
            tokens: snapshot.tokens.values().cloned().collect(),
            result_checksum: self.checksum,
        }
    }
}

/// The feed: one publisher, many subscribers.
#[derive(Debug)]
pub struct Feed {
    latest: watch::Sender<Arc<Published>>,
    ring: parking_lot::Mutex<Ring>,
}

impl Feed {
    /// A feed that starts at a state.
    pub fn new(state: &State) -> Self {
        Self::starting(Published::new(state))
    }

    pub(super) fn starting(published: Published) -> Self {
        let ring = Ring { history_id: published.snapshot.history_id, ..Ring::default() };
        Self { latest: watch::Sender::new(Arc::new(published)), ring: parking_lot::Mutex::new(ring) }
    }

    /// Announces each newly published snapshot.
    pub fn subscribe(&self) -> watch::Receiver<Arc<Published>> {
        self.latest.subscribe()
    }

    /// The delta from `revision` of `history_id` to `latest`, unless that revision is too long ago, of another history, or yet to come.
    pub fn delta(&self, history_id: Uuid, revision: Revision, latest: &Published) -> Option<Delta> {
        let remembered = self.ring.lock().delta(history_id, revision, latest);
        remembered.or_else(|| latest.since(history_id, revision))
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
            let encoded = tokio::task::spawn_blocking(move || Published::new(&state)).await;
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
    use smg_fleet::{Health, Intent, Origin, PolicyDocument, WorkerSpec, WorkerType};
    use smg_state::{Command, Envelope};

    use super::*;

    impl Published {
        /// A snapshot of which nobody knows what is gone.
        pub(in crate::sync) fn forgetful(snapshot: Snapshot) -> Self {
            let departures = Departures::none_since(snapshot.revision);
            Self::of(snapshot, departures)
        }
    }

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
            let feed = Feed::starting(Published::forgetful(snapshots[0].clone()));
            let mut published = vec![0];
            for step in steps {
                let at = (published[published.len() - 1] + step).min(snapshots.len() - 1);
                feed.publish(Published::forgetful(snapshots[at].clone()));
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

    /// One of a few commands that add, change and take away.
    fn command(kind: u8, n: u8) -> Command {
        let (id, model) = (WorkerId(Uuid::from_u128(u128::from(n))), format!("m{n}"));
        match kind {
            0 => {
                let spec = Box::new(WorkerSpec::new(format!("http://h:{}", 1 + u16::from(n)), WorkerType::Decode));
                Command::CreateWorker { id, spec, origin: Origin::Api }
            }
            1 => Command::SetIntent { id, intent: Intent::Cordoned },
            2 => Command::RemoveWorker { id },
            3 => Command::PutPolicy { model, document: Box::new(PolicyDocument::default()) },
            _ => Command::DeletePolicy { model },
        }
    }

    proptest! {
        #[test]
        fn a_subscriber_of_another_member_is_told_what_it_lacks_and_nothing_else(
            commands in proptest::collection::vec((0u8..5, 0u8..4), 1..60),
            quiet in proptest::collection::vec(any::<bool>(), 60),
        ) {
            let mut state = State::default();
            let named = Command::InitCluster { cluster_id: Uuid::from_u128(1), history_id: Uuid::from_u128(2) };
            let commands = std::iter::once(named).chain(commands.into_iter().map(|(kind, n)| command(kind, n)));
            let mut all = Vec::new();
            // This member publishes some of the revisions, and began with one in the middle.
            let mut feed = None;
            for (n, (command, quiet)) in commands.zip(std::iter::once(false).chain(quiet)).enumerate() {
                let command_id = Uuid::from_u128(100 + n as u128);
                let (actor, expected_revision) = ("test".to_owned(), None);
                state.apply(&Envelope { command_id, actor, proposed_at_unix_ms: 1, expected_revision, command });
                all.push(state.snapshot());
                match &feed {
                    None if n >= 10 => feed = Some(Feed::new(&state)),
                    Some(feed) if !quiet => feed.publish(Published::new(&state)),
                    _ => {}
                }
            }
            let feed = feed.unwrap_or_else(|| Feed::new(&state));
            let latest = Arc::clone(&feed.latest.borrow());
            for have in all.iter().filter(|have| have.revision <= latest.snapshot.revision) {
                let delta = feed.delta(have.history_id, have.revision, &latest).unwrap();
                prop_assert_eq!(&have.apply(&delta).unwrap(), &latest.snapshot);
                prop_assert!(delta.upserted_workers.iter().all(|worker| worker.mod_revision > have.revision));
                prop_assert!(delta.upserted_policies.iter().all(|record| record.mod_revision > have.revision));
            }
        }
    }

    #[test]
    fn what_neither_the_ring_nor_the_state_knows_has_no_delta() {
        let feed = Feed::starting(Published::forgetful(snapshot(5, &BTreeMap::new())));
        let latest = || Arc::clone(&feed.latest.borrow());
        assert!(feed.delta(Uuid::nil(), 4, &latest()).is_none(), "before the ring");
        assert!(feed.delta(Uuid::nil(), 6, &latest()).is_none(), "yet to come");
        assert!(feed.delta(Uuid::from_u128(1), 5, &latest()).is_none(), "another history");
        assert!(feed.delta(Uuid::nil(), 5, &latest()).is_some());
        for revision in 6..=(7 + MAX_STEPS as u64) {
            feed.publish(Published::forgetful(snapshot(revision, &[(1, revision as u32)].into())));
        }
        assert!(feed.delta(Uuid::nil(), 5, &latest()).is_none(), "the ring is bounded");
        assert!(feed.delta(Uuid::nil(), 7, &latest()).is_some());
        let restored = Snapshot { history_id: Uuid::from_u128(1), ..snapshot(2, &BTreeMap::new()) };
        feed.publish(Published::forgetful(restored));
        assert!(feed.delta(Uuid::nil(), 7, &latest()).is_none(), "a restore starts anew");
        assert!(feed.delta(Uuid::from_u128(1), 2, &latest()).is_some());
    }
}
