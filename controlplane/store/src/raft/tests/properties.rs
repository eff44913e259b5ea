//! A durable store and one without a log lead to the same state.

use proptest::prelude::*;

use super::*;
use crate::memory::MemoryStore;
use crate::suite::envelopes;

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
