//! A durable store and one without a log lead to the same state.

use proptest::collection::vec;
use proptest::prelude::*;

use super::*;
use crate::memory::MemoryStore;

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

fn envelopes() -> impl Strategy<Value = Vec<Envelope>> {
    // Few command ids, so that some are repeated.
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

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    #[test]
    fn both_stores_answer_alike_and_hold_the_same(envelopes in envelopes()) {
        tokio::runtime::Runtime::new().unwrap().block_on(async {
            let directory = fast_directory();
            let options = RaftOptions { snapshot_every: 20, keep_entries: 5, ..options(directory.path()) };
            let durable = RaftStore::open(options.clone()).await.unwrap();
            let memory = MemoryStore::default();
            let named = durable.local();
            let name = Command::InitCluster { cluster_id: named.cluster_id(), history_id: named.history_id() };
            memory.propose(envelope(name)).await.unwrap();
            for envelope in envelopes {
                let outcome = durable.propose(envelope.clone()).await.unwrap();
                assert_eq!(outcome, memory.propose(envelope).await.unwrap());
            }
            let before = durable.local();
            assert_eq!(before.snapshot(), memory.local().snapshot());
            durable.shutdown().await;
            let durable = RaftStore::open(options).await.unwrap();
            assert_eq!(durable.local(), before);
            durable.shutdown().await;
        });
    }
}
