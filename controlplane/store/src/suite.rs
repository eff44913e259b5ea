//! What every store promises, as tests that any of them runs: see [`store_suite`].
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::sync::Arc;
use std::time::{Duration, Instant};

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::TestRunner;
use smg_fleet::{Health, Intent, Origin, WorkerId, WorkerSpec, WorkerType};
use smg_state::{Command, Envelope, Outcome, State, codec};
use uuid::Uuid;

use crate::memory::MemoryStore;
use crate::{ClusterStore, Leadership, StoreError};

/// How long anything may take on a slow machine.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);

/// Places for three members of one cluster. All of them run at the beginning.
pub(crate) trait Site {
    /// Starts the member of a place.
    async fn start(&mut self, n: usize);
    /// Ends it as a crash would: nobody is told.
    async fn kill(&mut self, n: usize);
    /// The member of a place, which runs.
    fn store(&self, n: usize) -> Arc<dyn ClusterStore>;
    /// Places whose members run.
    fn running(&self) -> Vec<usize>;
}

/// Makes a test of each promise, on what `$site` makes.
macro_rules! store_suite {
    ($site:expr) => {
        $crate::suite::store_suite! { $site =>
            any_member_takes_writes_and_reads_and_another_one_leads_when_the_leader_dies
            a_repeated_command_is_answered_as_the_first_time
            commands_of_all_members_at_once_are_applied_once_each_and_in_one_order
            a_command_too_large_for_a_message_is_refused_before_it_is_tried
            a_store_that_was_shut_down_takes_nothing_and_leads_nobody
            no_acknowledged_write_is_lost_while_leaders_die
            a_leader_that_steps_down_is_followed_by_another
            every_store_answers_like_the_one_without_a_log
        }
    };
    ($site:expr => $($name:ident)+) => {
        $(
            #[tokio::test(flavor = "multi_thread")]
            async fn $name() {
                $crate::suite::$name(&mut $site.await).await;
            }
        )+
    };
}
pub(crate) use store_suite;

/// A command of a test.
pub(crate) fn envelope(command: Command) -> Envelope {
    Envelope {
        command_id: Uuid::new_v4(),
        actor: "test".into(),
        proposed_at_unix_ms: 1_000,
        expected_revision: None,
        command,
    }
}

/// A command that creates the worker of a URL.
pub(crate) fn create(url: &str) -> Envelope {
    let spec = Box::new(WorkerSpec::new(url, WorkerType::Prefill));
    envelope(Command::CreateWorker { id: WorkerId(Uuid::now_v7()), spec, origin: Origin::Api })
}

/// A spec of about 64 KiB.
fn large_spec(url: &str) -> WorkerSpec {
    let mut spec = WorkerSpec::new(url, WorkerType::Prefill);
    spec.labels.extend((0..16).map(|n| (format!("note-{n}"), "l".repeat(4_000))));
    spec
}

/// A command of about 64 KiB that creates the worker of a URL.
pub(crate) fn create_large(url: &str) -> Envelope {
    let (id, spec) = (WorkerId(Uuid::now_v7()), Box::new(large_spec(url)));
    envelope(Command::CreateWorker { id, spec, origin: Origin::Api })
}

/// A command of about so many times 64 KiB.
fn large(parts: usize) -> Envelope {
    let worker = |n| (WorkerId(Uuid::now_v7()), large_spec(&format!("http://w{n}:1")));
    envelope(Command::ReconcileStartup { workers: (0..parts).map(worker).collect() })
}

/// Polls a condition until it yields a value.
pub(crate) async fn eventually<T>(what: &str, mut condition: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(value) = condition() {
            return value;
        }
        assert!(Instant::now() < deadline, "not within {PATIENCE:?}: {what}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// Proposes until the command is acknowledged, as a client that knows about unknown outcomes does.
pub(crate) async fn acknowledged<S: ClusterStore + ?Sized>(store: &S, envelope: Envelope) -> Outcome {
    let deadline = Instant::now() + PATIENCE;
    loop {
        match store.propose(envelope.clone()).await {
            Ok(outcome) => return outcome,
            Err(error) => assert!(Instant::now() < deadline, "{error}"),
        }
    }
}

/// Waits until one of the members that run has the leader's duties; returns its place.
pub(crate) async fn leader<S: Site>(site: &S) -> usize {
    let running = site.running();
    let leads = |n: &usize| *site.store(*n).leadership().borrow() == Leadership::Leader;
    eventually("one of them has the leader's duties", || running.iter().copied().find(leads)).await
}

/// Waits until all members that run have the same state, and returns it.
pub(crate) async fn until_equal<S: Site>(site: &S) -> Arc<State> {
    let stores: Vec<_> = site.running().into_iter().map(|n| site.store(n)).collect();
    eventually("equal states", || {
        let states: Vec<Arc<State>> = stores.iter().map(|store| store.local()).collect();
        let bytes = codec::encode_state(&states[0]);
        states.iter().all(|state| codec::encode_state(state) == bytes).then(|| Arc::clone(&states[0]))
    })
    .await
}

async fn stop<S: Site>(site: &mut S) {
    for n in site.running() {
        site.store(n).shutdown().await;
    }
}

pub(crate) async fn any_member_takes_writes_and_reads_and_another_one_leads_when_the_leader_dies<S: Site>(
    site: &mut S,
) {
    for n in 0..3 {
        let command = create(&format!("http://w{n}:1"));
        let outcome = acknowledged(&*site.store(n), command.clone()).await;
        assert_eq!(acknowledged(&*site.store((n + 1) % 3), command).await, outcome, "the same command, elsewhere");
        // A read anywhere has everything that was acknowledged anywhere before it began.
        for reader in 0..3 {
            assert!(site.store(reader).read_barrier().await.unwrap() >= outcome.revision);
            assert_eq!(site.store(reader).local().workers().count(), n + 1);
        }
    }
    let old = leader(site).await;
    let duties = (0..3).filter(|n| *site.store(*n).leadership().borrow() == Leadership::Leader).count();
    assert_eq!(duties, 1);
    site.kill(old).await;
    let killed = Instant::now();
    let outcome = acknowledged(&*site.store((old + 1) % 3), create("http://after:1")).await;
    println!("leader killed -> next acknowledged write: {} ms", killed.elapsed().as_millis());
    assert!(outcome.rejection.is_none());
    assert_ne!(leader(site).await, old);
    site.start(old).await;
    let back = site.store(old);
    eventually("the restarted member has caught up", || (back.local().workers().count() == 4).then_some(())).await;
    assert_eq!(until_equal(site).await.workers().count(), 4);
    stop(site).await;
}

pub(crate) async fn a_repeated_command_is_answered_as_the_first_time<S: Site>(site: &mut S) {
    let store = site.store(0);
    let mut changes = store.changes();
    changes.mark_unchanged();
    let command = create("http://w:1");
    let outcome = acknowledged(&*store, command.clone()).await;
    assert!(store.local().worker(outcome.worker_id.unwrap()).is_some());
    assert!(changes.has_changed().unwrap());
    assert_eq!(store.propose(command.clone()).await.unwrap(), outcome);
    let rejected = store.propose(create("http://w:1")).await.unwrap();
    assert!(rejected.rejection.is_some());
    assert_eq!((rejected.revision, store.local().revision()), (outcome.revision, outcome.revision));
    for n in 0..3 {
        site.kill(n).await;
    }
    for n in 0..3 {
        site.start(n).await;
    }
    assert_eq!(acknowledged(&*site.store(1), command).await, outcome, "also after all members were away");
    stop(site).await;
}

pub(crate) async fn commands_of_all_members_at_once_are_applied_once_each_and_in_one_order<S: Site>(site: &mut S) {
    acknowledged(&*site.store(0), create("http://first:1")).await;
    let before = site.store(0).local().revision();
    let mut running = tokio::task::JoinSet::new();
    for n in 0..90 {
        let store = site.store(n % 3);
        running.spawn(async move { acknowledged(&*store, create(&format!("http://w{n}:1"))).await.revision });
    }
    let mut revisions = running.join_all().await;
    revisions.sort_unstable();
    assert_eq!(revisions, (before + 1..=before + 90).collect::<Vec<_>>());
    for n in 0..3 {
        site.store(n).read_barrier().await.unwrap();
    }
    assert_eq!(until_equal(site).await.workers().count(), 91);
    stop(site).await;
}

pub(crate) async fn a_command_too_large_for_a_message_is_refused_before_it_is_tried<S: Site>(site: &mut S) {
    let refused = site.store(0).propose(large(300)).await.unwrap_err();
    assert!(matches!(refused, StoreError::TooLarge(_)), "{refused}");
    assert_eq!(acknowledged(&*site.store(0), large(15)).await.rejection, None, "almost a MiB is fine");
    stop(site).await;
}

pub(crate) async fn a_store_that_was_shut_down_takes_nothing_and_leads_nobody<S: Site>(site: &mut S) {
    acknowledged(&*site.store(0), create("http://w:1")).await;
    let state = until_equal(site).await;
    assert!(!state.cluster_id().is_nil() && !state.history_id().is_nil());
    for n in 0..3 {
        let store = site.store(n);
        store.shutdown().await;
        assert_eq!(store.propose(create("http://w:2")).await, Err(StoreError::Closed));
        assert_eq!(store.read_barrier().await, Err(StoreError::Closed));
        assert_eq!(*store.leadership().borrow(), Leadership::Follower);
        assert_eq!(*store.failure().borrow(), None);
        assert_eq!(*store.local(), *state, "what it had can still be read");
    }
}

pub(crate) async fn no_acknowledged_write_is_lost_while_leaders_die<S: Site>(site: &mut S) {
    let mut urls = Vec::new();
    for round in 0..3 {
        let old = leader(site).await;
        let writes: Vec<_> = (0..20)
            .map(|n| {
                let (store, url) = (site.store(n % 3), format!("http://w{round}-{n}:1"));
                tokio::spawn(async move { store.propose(create(&url)).await.map(|_| url) })
            })
            .collect();
        site.kill(old).await;
        for write in writes {
            urls.extend(write.await.unwrap().ok());
        }
        let url = format!("http://survivor-{round}:1");
        acknowledged(&*site.store((old + 1) % 3), create(&url)).await;
        urls.push(url);
        site.start(old).await;
    }
    for n in 0..3 {
        let (store, deadline) = (site.store(n), Instant::now() + PATIENCE);
        while let Err(error) = store.read_barrier().await {
            assert!(Instant::now() < deadline, "{error}");
        }
    }
    let state = until_equal(site).await;
    for url in &urls {
        assert!(state.worker_by_url(url).is_some(), "{url} was acknowledged and is gone");
    }
    stop(site).await;
}

pub(crate) async fn a_leader_that_steps_down_is_followed_by_another<S: Site>(site: &mut S) {
    let old = leader(site).await;
    let began = Instant::now();
    site.store(old).step_down().await;
    let others: Vec<_> = (0..3).filter(|n| *n != old).map(|n| site.store(n)).collect();
    let leads = |store: &Arc<dyn ClusterStore>| *store.leadership().borrow() == Leadership::Leader;
    eventually("another one leads", || others.iter().any(leads).then_some(())).await;
    let resigned = site.store(old);
    eventually("and this one does not", || (!leads(&resigned)).then_some(())).await;
    acknowledged(&*others[0], create("http://w:1")).await;
    println!("leader stepped down -> next acknowledged write: {} ms", began.elapsed().as_millis());
    stop(site).await;
}

fn worker(n: u8) -> WorkerId {
    WorkerId(Uuid::from_u128(u128::from(n) + 1))
}

fn url(n: u8) -> String {
    format!("http://w:{}", u16::from(n) + 1)
}

/// Commands on few objects, so that they meet: repeated, conflicting and rejected ones among them.
fn commands() -> impl Strategy<Value = Command> {
    prop_oneof![
        (0..6u8, 0..6u8).prop_map(|(id, n)| Command::CreateWorker {
            id: worker(id),
            spec: Box::new(WorkerSpec::new(url(n), WorkerType::Decode)),
            origin: Origin::Api,
        }),
        (0..6u8).prop_map(|id| Command::RemoveWorker { id: worker(id) }),
        (0..6u8, 0..3u64).prop_map(|(id, number)| Command::CompleteJob { id: worker(id), number, facts: None }),
        (0..6u8).prop_map(|id| Command::SetHealth { id: worker(id), health: Health::ALL[1] }),
        (0..6u8).prop_map(|id| Command::SetIntent { id: worker(id), intent: Intent::Cordoned }),
        vec(0..6u8, 0..4).prop_map(|ids| Command::ReconcileStartup {
            workers: ids.iter().map(|n| (worker(n + 10), WorkerSpec::new(url(*n), WorkerType::Prefill))).collect(),
        }),
        (0..3u8).prop_map(|n| Command::PutPolicy { model: n.to_string(), document: Box::default() }),
        (0..3u8).prop_map(|n| Command::DeletePolicy { model: n.to_string() }),
    ]
}

/// Sequences of such commands. Few command ids, so that some are repeated.
pub(crate) fn envelopes() -> impl Strategy<Value = Vec<Envelope>> {
    let one = (commands(), 0..100u128, proptest::option::of(0..20u64));
    vec(one, 1..80).prop_map(|many| {
        many.into_iter()
            .map(|(command, id, expected_revision)| Envelope {
                command_id: Uuid::from_u128(id),
                expected_revision,
                ..envelope(command)
            })
            .collect()
    })
}

pub(crate) async fn every_store_answers_like_the_one_without_a_log<S: Site>(site: &mut S) {
    let memory = MemoryStore::default();
    leader(site).await;
    let named = until_equal(site).await;
    let name = Command::InitCluster { cluster_id: named.cluster_id(), history_id: named.history_id() };
    memory.propose(envelope(name)).await.unwrap();
    let mut runner = TestRunner::default();
    let many = vec(envelopes(), 2).new_tree(&mut runner).unwrap().current();
    for (n, envelope) in many.into_iter().flatten().enumerate() {
        let store = site.store(n % 3);
        let outcome = acknowledged(&*store, envelope.clone()).await;
        assert_eq!(outcome, memory.propose(envelope.clone()).await.unwrap(), "{envelope}");
    }
    assert_eq!(until_equal(site).await.snapshot(), memory.local().snapshot());
    stop(site).await;
}
