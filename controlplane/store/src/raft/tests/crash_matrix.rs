//! The crash matrix: a fixed history of the log, cut off in every one of its disk operations, with every kind of loss of what was not synced.
//!
//! After each cut the file must open, and hold what the history had written up to the last change that was acknowledged, or that and the
//! change that was being made: votes never go back, no entry is missing in between, nothing acknowledged is lost, nothing is half there.

use std::collections::BTreeMap;

use openraft::EntryPayload;
use openraft::entry::RaftEntry;
use redb::{Database, ReadableDatabase, ReadableTable};
use tokio::sync::oneshot;

use super::*;
use crate::frame::frame;
use crate::raft::database::{self, LAST_PURGED, LOG, META, VOTE};
use crate::raft::log::Shared;
use crate::raft::simulation::disk::{Disk, Loss};
use crate::raft::simulation::random::Random;
use crate::raft::types::{Entry, LogId, Vote};
use crate::raft::writer::{Done, Framed, Write, Writer};

type LeaderId = openraft::impls::leader_id_adv::LeaderId<u64, u64>;

/// What a log holds: the vote and the purged log id as they are framed, and the entries.
#[derive(Debug, Clone, Default, PartialEq)]
struct Held {
    vote: Option<Vec<u8>>,
    purged: Option<Vec<u8>>,
    entries: BTreeMap<u64, Vec<u8>>,
}

impl Held {
    fn change(&mut self, write: &Write) {
        match write {
            Write::Vote(vote) => self.vote = Some(vote.clone()),
            Write::Append(entries) => {
                self.entries.extend(entries.iter().map(|(index, frame)| (*index, frame.to_vec())));
            }
            Write::Truncate(from) => drop(self.entries.split_off(from)),
            Write::Purge(upto, id) => {
                self.entries = self.entries.split_off(&(upto + 1));
                self.purged = Some(id.clone());
            }
            Write::Committed(_) | Write::Close => {}
        }
    }

    fn read(database: &Database) -> Self {
        let transaction = database.begin_read().unwrap();
        let meta = transaction.open_table(META).unwrap();
        let named = |name: &str| meta.get(name).unwrap().map(|bytes| bytes.value().to_vec());
        let log = transaction.open_table(LOG).unwrap();
        let entry = |item: Result<(redb::AccessGuard<'_, u64>, redb::AccessGuard<'_, &[u8]>), _>| {
            let (index, frame) = item.unwrap();
            (index.value(), frame.value().to_vec())
        };
        Self { vote: named(VOTE), purged: named(LAST_PURGED), entries: log.iter().unwrap().map(entry).collect() }
    }
}

fn log_id(term: u64, index: u64) -> LogId {
    LogId::new(LeaderId { term, node_id: 1 }, index)
}

fn vote(term: u64) -> Write {
    Write::Vote(frame(&convert::vote_to_pb(&Vote::new(term, 1))))
}

fn append(term: u64, indices: std::ops::Range<u64>) -> Write {
    let framed = |index: u64| -> Framed {
        // Some entries larger than a page of the file, most of them small.
        let payload =
            if index.is_multiple_of(3) { EntryPayload::Normal(put_policies(index)) } else { EntryPayload::Blank };
        let mut entry = Entry { log_id: log_id(term, index), payload };
        entry.set_log_id(log_id(term, index));
        (index, Arc::from(frame(&convert::entry_to_pb(&entry))))
    };
    Write::Append(indices.map(framed).collect())
}

fn purge(term: u64, upto: u64) -> Write {
    Write::Purge(upto, frame(&convert::log_id_to_pb(&log_id(term, upto))))
}

fn committed(term: u64, index: u64) -> Write {
    Write::Committed(frame(&convert::log_id_to_pb(&log_id(term, index))))
}

/// A command that fills pages.
fn put_policies(n: u64) -> Envelope {
    envelope(Command::PutPolicy {
        model: "m".repeat(3_000 + n as usize),
        document: Box::new(PolicyDocument::default()),
    })
}

/// What a member lives through: elections, appends, conflicts that are cut off, purges. Each group is one transaction.
fn history() -> Vec<Vec<Write>> {
    vec![
        vec![vote(1)],
        vec![append(1, 0..4)],
        vec![committed(1, 2), append(1, 4..9)],
        vec![vote(2), append(2, 9..11)],
        vec![Write::Truncate(6)],
        vec![append(3, 6..12), committed(3, 8)],
        vec![purge(1, 4)],
        vec![vote(4)],
        vec![append(4, 12..30)],
        vec![purge(4, 20), append(4, 30..32)],
        vec![Write::Truncate(25), append(5, 25..27), vote(5)],
    ]
}

/// Runs the history until the disk dies. Returns what is held after the last acknowledged transaction, and what the next one would have made of it.
fn live(disk: &Disk) -> (Held, Held) {
    let opened = database::open_with(|builder| builder.create_with_backend(disk.handle()));
    let Ok((database, recovered)) = opened else { return Default::default() };
    let mut writer = Writer::new(Arc::new(Shared::new(database, &recovered)));
    let mut held = Held::default();
    for group in history() {
        let mut next = held.clone();
        group.iter().for_each(|write| next.change(write));
        let (jobs, mut answers): (Vec<_>, Vec<_>) = group
            .into_iter()
            .map(|write| {
                let (done, answer) = oneshot::channel();
                ((write, Done::Caller(done)), answer)
            })
            .unzip();
        writer.turn(jobs);
        if answers.iter_mut().all(|answer| matches!(answer.try_recv(), Ok(Ok(())))) {
            held = next;
        } else {
            return (held, next);
        }
    }
    (held.clone(), held)
}

fn new_disk() -> Disk {
    let disk = Disk::default();
    database::create_in(disk.handle(), &pb::NodeIdentity::default(), &[]).unwrap();
    disk.flush();
    disk
}

#[test]
fn a_log_cut_off_in_any_operation_with_any_loss_holds_all_that_was_acknowledged_and_no_half_of_anything() {
    let mut random = Random::new(1);
    let whole = new_disk();
    let (all, _) = live(&whole);
    assert_eq!(all.entries.keys().copied().collect::<Vec<_>>(), (21..27).collect::<Vec<_>>());
    let draws = if std::env::var_os("SMG_SOAK").is_some() { 50 } else { 1 };
    let (mut cuts, mut kept_the_last) = (0, 0);
    for operations in 0.. {
        let mut died = false;
        for (loss, draws) in [(Loss::Everything, 1), (Loss::Nothing, 1), (Loss::Some, draws), (Loss::Torn, draws)] {
            for _ in 0..draws {
                let disk = new_disk();
                disk.burn(operations);
                let (before, after) = live(&disk);
                died = disk.is_burnt();
                if !died {
                    break;
                }
                disk.crash(loss, &mut random);
                let (database, _) = database::open_with(|builder| builder.create_with_backend(disk.handle()))
                    .unwrap_or_else(|error| panic!("cut off after {operations} operations, {loss:?} lost: {error}"));
                let held = Held::read(&database);
                assert!(
                    held == before || held == after,
                    "cut off after {operations} operations, {loss:?} lost: {held:?}"
                );
                cuts += 1;
                kept_the_last += usize::from(held != before);
            }
        }
        if !died {
            break;
        }
    }
    println!("{cuts} cuts; in {kept_the_last} of them the change that was being made is there");
    assert!(cuts > 100, "{cuts}");
    assert!(kept_the_last > 0 && kept_the_last < cuts, "both outcomes are seen: {kept_the_last} of {cuts}");
}
