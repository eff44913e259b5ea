//! Each command does to the state what its documentation says, and the same log always gives the same state.
#![allow(clippy::unwrap_used, clippy::panic)]

use proptest::prelude::*;
use smg_fleet::WorkerType;
use uuid::Uuid;

use super::*;
use crate::codec;

fn id(n: u128) -> WorkerId {
    WorkerId(Uuid::from_u128(n))
}

fn spec(url: &str) -> WorkerSpec {
    WorkerSpec::new(url, WorkerType::Prefill)
}

struct Machine {
    state: State,
    commands: u128,
}

impl Machine {
    fn new() -> Self {
        let mut machine = Self { state: State::default(), commands: 0 };
        machine.run(Command::InitCluster { cluster_id: Uuid::from_u128(1), history_id: Uuid::from_u128(2) });
        machine
    }

    fn run(&mut self, command: Command) -> Outcome {
        self.run_expecting(command, None)
    }

    fn run_expecting(&mut self, command: Command, expected_revision: Option<u64>) -> Outcome {
        self.commands += 1;
        self.state.apply(&Envelope {
            command_id: Uuid::from_u128(self.commands),
            actor: "test".into(),
            proposed_at_unix_ms: 1_000 * self.commands as u64,
            expected_revision,
            command,
        })
    }

    fn create(&mut self, n: u128, url: &str) -> Outcome {
        self.run(Command::CreateWorker { id: id(n), spec: Box::new(spec(url)), origin: Origin::Api })
    }

    fn job_number(&self, n: u128) -> u64 {
        self.state.worker(id(n)).unwrap().job.as_ref().unwrap().number
    }

    fn complete(&mut self, n: u128) -> Outcome {
        let number = self.job_number(n);
        self.run(Command::CompleteJob { id: id(n), number, facts: Some(Box::default()) })
    }

    fn registered(&mut self, n: u128, url: &str) {
        self.create(n, url);
        assert_eq!(self.complete(n).rejection, None);
    }
}

fn code(outcome: &Outcome) -> Option<RejectionCode> {
    outcome.rejection.as_ref().map(|rejection| rejection.code)
}

#[test]
fn a_created_worker_is_pending_until_its_job_completes() {
    let mut machine = Machine::new();
    let outcome = machine.create(1, "http://p:1");
    assert_eq!((outcome.worker_id, outcome.revision), (Some(id(1)), 2));
    assert!(!machine.state.worker(id(1)).unwrap().is_routable());
    machine.complete(1);
    let worker = machine.state.worker(id(1)).unwrap();
    assert!(worker.is_routable() && worker.job.is_none());
    assert_eq!((worker.create_revision, worker.mod_revision), (2, 3));
}

#[test]
fn one_url_is_one_worker_and_one_creation_at_a_time() {
    let mut machine = Machine::new();
    machine.create(1, "http://p:1");
    assert_eq!(code(&machine.create(2, "http://p:1")), Some(RejectionCode::WorkerCreateInProgress));
    machine.complete(1);
    assert_eq!(code(&machine.create(3, "http://p:1")), Some(RejectionCode::WorkerAlreadyExists));
    assert_eq!(machine.state.workers().count(), 1);
}

#[test]
fn a_failed_creation_stays_readable_and_the_url_keeps_its_id() {
    let mut machine = Machine::new();
    machine.create(1, "http://p:1");
    let number = machine.job_number(1);
    machine.run(Command::ReportJob { id: id(1), number, status: JobStatus::Failed, message: "refused".into() });
    assert_eq!(machine.state.worker(id(1)).unwrap().job.as_ref().unwrap().message.as_deref(), Some("refused"));
    assert_eq!(machine.create(2, "http://p:1").worker_id, Some(id(1)));
    let number = machine.job_number(1);
    machine.run(Command::ReportJob { id: id(1), number, status: JobStatus::Failed, message: "refused".into() });
    machine.run(Command::ForgetJob { id: id(1), number });
    assert!(machine.state.worker(id(1)).is_none());
    assert!(machine.state.worker_by_url("http://p:1").is_none());
}

#[test]
fn a_report_of_an_older_job_changes_nothing() {
    let mut machine = Machine::new();
    machine.create(1, "http://p:1");
    let old = machine.job_number(1);
    machine.run(Command::ReportJob { id: id(1), number: old, status: JobStatus::Failed, message: "x".into() });
    machine.create(1, "http://p:1");
    let revision = machine.state.revision();
    let outcome = machine.run(Command::CompleteJob { id: id(1), number: old, facts: Some(Box::default()) });
    assert_eq!(code(&outcome), Some(RejectionCode::JobSuperseded));
    assert_eq!(machine.state.revision(), revision);
}

#[test]
fn an_update_installs_its_spec_only_when_its_job_completes() {
    let mut machine = Machine::new();
    machine.registered(1, "http://p:1");
    let mut changed = spec("http://p:1");
    changed.kv_engine_id = Some("E2".into());
    machine.run(Command::ReplaceWorker { id: id(1), spec: Box::new(changed) });
    assert_eq!(machine.state.worker(id(1)).unwrap().spec.kv_engine_id, None);
    machine.complete(1);
    assert_eq!(machine.state.worker(id(1)).unwrap().spec.kv_engine_id.as_deref(), Some("E2"));
}

#[test]
fn a_patch_makes_a_concurrent_update_fail_instead_of_being_overwritten() {
    let mut machine = Machine::new();
    machine.registered(1, "http://p:1");
    machine.run(Command::ReplaceWorker { id: id(1), spec: Box::new(spec("http://p:1")) });
    let patch = WorkerPatch { priority: Some(7), ..Default::default() };
    machine.run(Command::PatchWorker { id: id(1), patch: Box::new(patch) });
    assert_eq!(code(&machine.complete(1)), Some(RejectionCode::JobSuperseded));
    assert_eq!(machine.state.worker(id(1)).unwrap().spec.priority, 7);
}

#[test]
fn a_spec_made_from_what_was_read_during_an_update_does_not_undo_it() {
    let mut machine = Machine::new();
    machine.registered(1, "http://p:1");
    let mut changed = spec("http://p:1");
    changed.priority = 7;
    machine.run(Command::ReplaceWorker { id: id(1), spec: Box::new(changed) });
    let read = machine.state.worker(id(1)).unwrap().clone();
    let replace = |cost| {
        let mut spec = read.spec.clone();
        spec.cost = cost;
        Command::ReplaceWorker { id: id(1), spec: Box::new(spec) }
    };
    let outcome = machine.run_expecting(replace(2.0), Some(read.mod_revision));
    assert_eq!(code(&outcome), Some(RejectionCode::RevisionConflict));
    machine.complete(1);
    assert_eq!(machine.state.worker(id(1)).unwrap().spec.priority, 7);
    // Without a condition the last writer wins, at any time.
    machine.run(replace(3.0));
    assert_eq!(machine.run(replace(4.0)).rejection, None);
    machine.complete(1);
    assert_eq!(machine.state.worker(id(1)).unwrap().spec.cost, 4.0);
}

#[test]
fn a_patch_merges_labels_and_cannot_smuggle_connector_facts() {
    let mut machine = Machine::new();
    machine.registered(1, "http://p:1");
    let label = |name: &str| WorkerPatch { labels: [(name.to_owned(), "v".to_owned())].into(), ..Default::default() };
    machine.run(Command::PatchWorker { id: id(1), patch: Box::new(label("a")) });
    machine.run(Command::PatchWorker { id: id(1), patch: Box::new(label("b")) });
    assert_eq!(machine.state.worker(id(1)).unwrap().spec.labels.len(), 2);
    let outcome = machine.run(Command::PatchWorker { id: id(1), patch: Box::new(label("kv_engine_id")) });
    assert_eq!(code(&outcome), Some(RejectionCode::Invalid));
}

#[test]
fn a_removal_drains_first_and_a_worker_that_never_registered_goes_at_once() {
    let mut machine = Machine::new();
    machine.registered(1, "http://p:1");
    machine.create(2, "http://p:2");
    machine.run(Command::RemoveWorker { id: id(1) });
    machine.run(Command::RemoveWorker { id: id(2) });
    let worker = machine.state.worker(id(1)).unwrap();
    assert!(!worker.is_routable() && worker.intent == Intent::Draining);
    assert!(machine.state.worker(id(2)).is_none());
    let number = machine.job_number(1);
    machine.run(Command::CompleteJob { id: id(1), number, facts: None });
    assert!(machine.state.worker(id(1)).is_none());
}

#[test]
fn writes_may_name_the_revision_they_saw() {
    let mut machine = Machine::new();
    machine.registered(1, "http://p:1");
    let stale = machine.run_expecting(Command::RemoveWorker { id: id(1) }, Some(1));
    assert_eq!(code(&stale), Some(RejectionCode::RevisionConflict));
    let seen = machine.state.worker(id(1)).unwrap().mod_revision;
    assert_eq!(machine.run_expecting(Command::RemoveWorker { id: id(1) }, Some(seen)).rejection, None);
}

#[test]
fn a_repeated_command_id_returns_the_first_outcome() {
    let mut state = State::default();
    let envelope = Envelope {
        command_id: Uuid::from_u128(9),
        actor: "test".into(),
        proposed_at_unix_ms: 1,
        expected_revision: None,
        command: Command::CreateWorker { id: id(1), spec: Box::new(spec("http://p:1")), origin: Origin::Api },
    };
    let first = state.apply(&envelope);
    assert_eq!(state.apply(&envelope), first);
    assert_eq!(state.revision(), 1);
}

#[test]
fn startup_flags_upsert_their_workers_remove_those_no_longer_named_and_leave_api_workers_alone() {
    let mut machine = Machine::new();
    machine.registered(1, "http://api:1");
    let named = |urls: &[(u128, &str)]| Command::ReconcileStartup {
        workers: urls.iter().map(|(n, url)| (id(*n), spec(url))).collect(),
    };
    machine.run(named(&[(2, "http://a:1"), (3, "http://b:1"), (4, "http://api:1")]));
    assert_eq!(machine.state.workers().count(), 3);
    machine.complete(2);
    machine.complete(3);
    let revision = machine.state.revision();
    machine.run(named(&[(5, "http://a:1"), (6, "http://b:1")]));
    assert_eq!(machine.state.revision(), revision, "the same flags change nothing");
    machine.run(named(&[(7, "http://b:1")]));
    assert_eq!(machine.state.worker(id(2)).unwrap().intent, Intent::Draining);
    assert!(machine.state.worker(id(3)).unwrap().is_routable());
    assert!(machine.state.worker(id(1)).unwrap().is_routable());
}

#[test]
fn a_policy_written_by_api_wins_until_the_flag_changes() {
    use smg_fleet::policy::PolicyName;
    let document = |policy| Box::new(PolicyDocument { policy: Some(policy), ..Default::default() });
    let mut machine = Machine::new();
    let current = |machine: &Machine| machine.state.policy("").unwrap().document.policy;
    machine.run(Command::ApplyStartupPolicy { document: document(PolicyName::Random) });
    assert_eq!(current(&machine), Some(PolicyName::Random));
    machine.run(Command::PutPolicy { model: String::new(), document: document(PolicyName::PowerOfTwo) });
    machine.run(Command::ApplyStartupPolicy { document: document(PolicyName::Random) });
    assert_eq!(current(&machine), Some(PolicyName::PowerOfTwo));
    machine.run(Command::ApplyStartupPolicy { document: document(PolicyName::RoundRobin) });
    assert_eq!(current(&machine), Some(PolicyName::RoundRobin));
}

#[test]
fn settings_are_replaced_under_the_revision_that_was_seen() {
    let mut machine = Machine::new();
    let named = |name: &str| Command::PutSettings { settings: ClusterSettings { name: Some(name.into()) } };
    assert_eq!(machine.run_expecting(named("east"), Some(0)).rejection, None);
    let stale = machine.run_expecting(named("west"), Some(0));
    assert_eq!(code(&stale), Some(RejectionCode::RevisionConflict));
    assert_eq!(code(&machine.run(named(""))), Some(RejectionCode::Invalid));
    let (settings, revision) = machine.state.settings();
    assert_eq!((settings.name.as_deref(), revision), (Some("east"), machine.state.revision()));
}

fn any_command() -> impl Strategy<Value = Command> {
    let worker = 0u128..6;
    let url = (0u8..4).prop_map(|n| format!("http://h:{}", n + 1));
    prop_oneof![
        (worker.clone(), url.clone()).prop_map(|(n, url)| Command::CreateWorker {
            id: id(n),
            spec: Box::new(spec(&url)),
            origin: Origin::Api
        }),
        (worker.clone(), url.clone())
            .prop_map(|(n, url)| Command::ReplaceWorker { id: id(n), spec: Box::new(spec(&url)) }),
        (worker.clone(), 0u32..9).prop_map(|(n, priority)| Command::PatchWorker {
            id: id(n),
            patch: Box::new(WorkerPatch { priority: Some(priority), ..Default::default() })
        }),
        worker.clone().prop_map(|n| Command::RemoveWorker { id: id(n) }),
        (worker.clone(), 0u64..40, any::<bool>()).prop_map(|(n, number, facts)| Command::CompleteJob {
            id: id(n),
            number,
            facts: facts.then(Box::default)
        }),
        (worker.clone(), 0u64..40, any::<bool>()).prop_map(|(n, number, failed)| Command::ReportJob {
            id: id(n),
            number,
            status: if failed { JobStatus::Failed } else { JobStatus::Processing },
            message: "m".into()
        }),
        (worker.clone(), 0usize..3)
            .prop_map(|(n, health)| Command::SetHealth { id: id(n), health: Health::ALL[health] }),
        (worker.clone(), 0u64..40).prop_map(|(n, number)| Command::ForgetJob { id: id(n), number }),
        (worker, proptest::collection::vec(url, 0..3)).prop_map(|(n, urls)| Command::ReconcileStartup {
            workers: urls.iter().enumerate().map(|(i, url)| (id(100 + n + i as u128), spec(url))).collect()
        }),
        Just(Command::PutSettings { settings: ClusterSettings { name: Some("n".into()) } }),
        Just(Command::DeletePolicy { model: "m".into() }),
        Just(Command::PutPolicy { model: "m".into(), document: Box::default() }),
    ]
}

proptest! {
    #[test]
    fn the_same_log_gives_the_same_bytes_however_it_is_chunked(
        commands in proptest::collection::vec((any_command(), proptest::option::of(0u64..20)), 1..60),
        restart_at in 0usize..60,
    ) {
        let mut straight = State::default();
        let mut restarted = State::default();
        for (index, (command, expected_revision)) in commands.into_iter().enumerate() {
            let envelope = Envelope {
                command_id: Uuid::from_u128(index as u128 / 2),
                actor: "test".into(),
                proposed_at_unix_ms: index as u64,
                expected_revision,
                command,
            };
            let envelope = codec::envelope_from_pb(codec::envelope_to_pb(&envelope)).unwrap();
            let before = straight.revision();
            let outcome = straight.apply(&envelope);
            prop_assert_eq!(&outcome, &restarted.apply(&envelope));
            prop_assert!(straight.revision() == before || straight.revision() == before + 1);
            prop_assert!(outcome.rejection.is_none() || straight.revision() == before);
            if index == restart_at {
                restarted = codec::decode_state(&codec::encode_state(&restarted)).unwrap();
            }
            for worker in straight.workers() {
                prop_assert_eq!(straight.worker_by_url(&worker.spec.url).map(|w| w.id), Some(worker.id));
            }
        }
        prop_assert_eq!(codec::encode_state(&straight), codec::encode_state(&restarted));
        prop_assert_eq!(straight, restarted);
    }
}

#[test]
fn a_round_of_the_ledger_is_applied_once_and_is_no_revision() {
    let mut machine = Machine::new();
    let round = |number| Command::LedgerRound { number, events: vec![smg_admission::Event::Window(7, Some(32))] };
    let before = machine.state.revision();
    assert_eq!(machine.run(round(1)).rejection, None);
    let ledger = Arc::clone(machine.state.ledger());
    assert_eq!((ledger.rounds(), ledger.pools()[&7].window), (1, 32));
    // The proposal of a leader that did not know of that round, and the same one a second time.
    assert_eq!(code(&machine.run(round(1))), Some(RejectionCode::RevisionConflict));
    assert_eq!(code(&machine.run(round(3))), Some(RejectionCode::RevisionConflict));
    assert_eq!((machine.state.ledger(), machine.state.revision()), (&ledger, before));
    let decoded = codec::decode_state(&codec::encode_state(&machine.state)).unwrap();
    assert_eq!(decoded, machine.state);
}
