//! The log against a plain vector: after any sequence of operations, and after any restart, both hold the same.
//!
//! `SMG_SOAK` in the environment makes the sequence longer.

use openraft::EntryPayload;
use openraft::storage::{IOFlushed, RaftLogReader, RaftLogStorage};
use openraft::type_config::TypeConfigExt;

use super::*;
use crate::raft::types::{Entry, LogId, Vote};

type LeaderId = openraft::impls::leader_id_adv::LeaderId<u64, u64>;

#[derive(Default)]
struct Model {
    entries: Vec<Entry>,
    purged: Option<LogId>,
    vote: Option<Vote>,
    committed: Option<LogId>,
    term: u64,
}

impl Model {
    fn last(&self) -> Option<LogId> {
        self.entries.last().map(|entry| entry.log_id).or(self.purged)
    }

    fn first(&self) -> u64 {
        self.purged.map_or(0, |id| id.index() + 1)
    }

    fn next(&self) -> u64 {
        self.last().map_or(0, |id| id.index() + 1)
    }
}

fn open_log(path: &Path) -> (LogStore, WriterThread) {
    let (database, recovered) = database::open(path).unwrap();
    let shared = Arc::new(Shared::new(database, &recovered));
    let writer = WriterThread::spawn(Arc::clone(&shared), None).unwrap();
    (LogStore::new(shared, writer.jobs()), writer)
}

fn random_entry(choices: &mut Choices, term: u64, index: u64) -> Entry {
    let payload = match choices.below(3) {
        0 => EntryPayload::Blank,
        1 => EntryPayload::Normal(put_policy(choices.below(100))),
        _ => EntryPayload::Membership(openraft::Membership::new_with_defaults(vec![[1, index].into()], [])),
    };
    Entry { log_id: LogId::new(LeaderId { term, node_id: 1 }, index), payload }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_log_behaves_like_a_vector() {
    let operations = if std::env::var_os("SMG_SOAK").is_some() { 100_000 } else { 20_000 };
    let directory = fast_directory();
    let path = directory.path().join("log");
    database::create(&path, &pb::NodeIdentity::default(), &[]).unwrap();
    let (mut log, mut writer) = open_log(&path);
    let (mut choices, mut model) = (Choices::fresh(), Model { term: 1, ..Model::default() });
    for _ in 0..operations {
        match choices.below(1_000) {
            // Appends, most of them not awaited: they must be readable at once.
            0..400 => {
                let (next, count) = (model.next(), 1 + choices.below(5));
                let entries: Vec<Entry> =
                    (next..next + count).map(|index| random_entry(&mut choices, model.term, index)).collect();
                model.entries.extend(entries.iter().cloned());
                if choices.below(20) == 0 {
                    let (done, flushed) = TypeConfig::oneshot();
                    <LogStore as RaftLogStorage<TypeConfig>>::append(&mut log, entries, IOFlushed::signal(done))
                        .await
                        .unwrap();
                    flushed.await.unwrap().unwrap();
                } else {
                    <LogStore as RaftLogStorage<TypeConfig>>::append(&mut log, entries, IOFlushed::noop())
                        .await
                        .unwrap();
                }
            }
            400..440 if !model.entries.is_empty() => {
                let keep = choices.below(model.entries.len() as u64 + 1) as usize;
                model.entries.truncate(keep);
                <LogStore as RaftLogStorage<TypeConfig>>::truncate_after(&mut log, model.last()).await.unwrap();
                model.term += 1;
            }
            440..460 if !model.entries.is_empty() => {
                let gone = 1 + choices.below(model.entries.len() as u64) as usize;
                let upto = model.entries[gone - 1].log_id;
                model.entries.drain(..gone);
                model.purged = Some(upto);
                <LogStore as RaftLogStorage<TypeConfig>>::purge(&mut log, upto).await.unwrap();
            }
            460..500 => {
                let vote = Vote::new(model.term, choices.below(5));
                <LogStore as RaftLogStorage<TypeConfig>>::save_vote(&mut log, &vote).await.unwrap();
                model.vote = Some(vote);
            }
            500..600 if model.last().is_some() => {
                model.committed = model.last();
                <LogStore as RaftLogStorage<TypeConfig>>::save_committed(&mut log, model.committed).await.unwrap();
            }
            600..605 => {
                writer.close().await;
                (log, writer) = open_log(&path);
                assert_eq!(
                    <LogStore as RaftLogStorage<TypeConfig>>::read_committed(&mut log).await.unwrap(),
                    model.committed
                );
            }
            605..650 => {
                let state = <LogStore as RaftLogStorage<TypeConfig>>::get_log_state(&mut log).await.unwrap();
                assert_eq!((state.last_purged_log_id, state.last_log_id), (model.purged, model.last()));
                assert_eq!(<LogStore as RaftLogReader<TypeConfig>>::read_vote(&mut log).await.unwrap(), model.vote);
            }
            _ => {
                let (first, next) = (model.first(), model.next());
                let start = first + choices.below(next - first + 2);
                let end = start + choices.below(20);
                let expected: Vec<&Entry> =
                    model.entries.iter().filter(|entry| (start..end).contains(&entry.log_id.index())).collect();
                let found =
                    <LogStore as RaftLogReader<TypeConfig>>::try_get_log_entries(&mut log, start..end).await.unwrap();
                assert!(found.iter().eq(expected), "{start}..{end}");
            }
        }
    }
    writer.close().await;
    let (mut log, writer) = open_log(&path);
    assert_eq!(
        <LogStore as RaftLogReader<TypeConfig>>::try_get_log_entries(&mut log, ..).await.unwrap(),
        model.entries
    );
    writer.close().await;
}
