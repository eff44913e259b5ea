//! The log as openraft sees it.
//!
//! An append returns once its entries are readable, before they are durable; its callback follows the commit. Until then the entries are
//! in [`Shared::unflushed`], which always holds the newest end of the log, and readers look there first. All other writes are awaited.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::io;
use std::ops::{Bound, RangeBounds};
use std::sync::Arc;

use openraft::OptionalSend;
use openraft::storage::{IOFlushed, LogState, RaftLogReader, RaftLogStorage};
use parking_lot::{Mutex, RwLock};
use redb::{Database, ReadTransaction, ReadableDatabase, ReadableTable};
use tokio::sync::{mpsc, oneshot};

use super::convert;
use super::database::{self, LAST_PURGED, LOG, META, Recovered, Unusable, VOTE};
use super::mutant::{Mutant, planted};
use super::types::{Config, Entry, LogId, Vote};
use super::writer::{Counters, Done, Framed, Job, Write};
use crate::failure::Failure;
use crate::frame::frame;

/// What the log's readers and its writer share.
#[derive(Debug)]
pub(crate) struct Shared {
    /// Absent once closed. Held for the length of one read or one transaction.
    pub database: RwLock<Option<Database>>,
    pub failure: Arc<Failure>,
    pub counters: Counters,
    unflushed: Mutex<BTreeMap<u64, Arc<[u8]>>>,
    committed: Mutex<Option<LogId>>,
}

impl Shared {
    pub fn new(database: Database, recovered: &Recovered) -> Self {
        Self {
            database: RwLock::new(Some(database)),
            failure: Arc::default(),
            counters: Counters::default(),
            unflushed: Mutex::default(),
            committed: Mutex::new(recovered.committed),
        }
    }

    /// These entries can be read from the file from now on.
    pub fn flushed(&self, entries: &[Framed]) {
        let mut unflushed = self.unflushed.lock();
        for (index, frame) in entries {
            if unflushed.get(index).is_some_and(|waiting| Arc::ptr_eq(waiting, frame)) {
                unflushed.remove(index);
            }
        }
    }

    /// Runs a read on the file as it is now. A failed read fails the store.
    fn read<T>(&self, read: impl FnOnce(&ReadTransaction) -> Result<T, Unusable>) -> io::Result<T> {
        self.failure.check()?;
        let database = self.database.read();
        let database = database.as_ref().ok_or_else(|| io::Error::other("the log is closed"))?;
        let result = database.begin_read().map_err(Unusable::from).and_then(|transaction| read(&transaction));
        result.map_err(|error| self.failure.fail(format!("reading the log failed: {error}")))
    }
}

/// A handle of the log: reads by itself, writes through the writer's channel.
#[derive(Debug, Clone)]
pub(crate) struct LogStore {
    shared: Arc<Shared>,
    writer: mpsc::Sender<Job>,
}

impl LogStore {
    pub fn new(shared: Arc<Shared>, writer: mpsc::Sender<Job>) -> Self {
        Self { shared, writer }
    }

    async fn send(&self, write: Write, done: Done) -> io::Result<()> {
        self.shared.failure.check()?;
        let sent = self.writer.send((write, done)).await;
        sent.map_err(|_| io::Error::other("the log is closed"))
    }

    async fn write(&self, write: Write) -> io::Result<()> {
        let (done, finished) = oneshot::channel();
        self.send(write, Done::Caller(done)).await?;
        finished.await.unwrap_or_else(|_| Err(self.shared.failure.fail("the log's writer is gone")))
    }

    /// The unflushed entries of a range, oldest first.
    fn unflushed(&self, start: u64, end: u64) -> Vec<Framed> {
        let unflushed = self.shared.unflushed.lock();
        unflushed.range(start..end).map(|(index, frame)| (*index, Arc::clone(frame))).collect()
    }

    fn entries(&self, start: u64, end: u64) -> io::Result<Vec<Entry>> {
        if start >= end {
            return Ok(Vec::new());
        }
        // In this order: an entry that left memory before the first look is in the file at the second.
        let newest = self.unflushed(start, end);
        let end_of_file_part = newest.first().map_or(end, |(index, _)| *index);
        let mut entries: Vec<Entry> = if start < end_of_file_part {
            self.shared.read(|transaction| {
                let log = transaction.open_table(LOG)?;
                let mut entries = Vec::new();
                for item in ReadableTable::range(&log, start..end_of_file_part)? {
                    let (index, bytes) = item?;
                    entries.push(database::decode_entry(index.value(), bytes.value()).map_err(Unusable::Damaged)?);
                }
                Ok(entries)
            })?
        } else {
            Vec::new()
        };
        for (index, bytes) in newest {
            entries.push(database::decode_entry(index, &bytes).map_err(|reason| self.shared.failure.fail(reason))?);
        }
        let hole = entries.windows(2).find(|pair| pair[0].log_id.index() + 1 != pair[1].log_id.index());
        if let Some([before, _]) = hole {
            let reason = format!("entry {} of the log is missing", before.log_id.index() + 1);
            return Err(self.shared.failure.fail(reason));
        }
        Ok(entries)
    }
}

impl<C: Config> RaftLogReader<C> for LogStore {
    async fn try_get_log_entries<RB: RangeBounds<u64> + Clone + Debug + OptionalSend>(
        &mut self,
        range: RB,
    ) -> Result<Vec<Entry>, io::Error> {
        let start = match range.start_bound() {
            Bound::Included(start) => *start,
            Bound::Excluded(start) => start.saturating_add(1),
            Bound::Unbounded => 0,
        };
        let end = match range.end_bound() {
            Bound::Included(end) => end.saturating_add(1),
            Bound::Excluded(end) => *end,
            Bound::Unbounded => u64::MAX,
        };
        self.entries(start, end)
    }

    async fn read_vote(&mut self) -> Result<Option<Vote>, io::Error> {
        self.shared.read(|transaction| {
            let vote = database::read_meta(&transaction.open_table(META)?, VOTE)?;
            Ok(vote.as_ref().map(convert::vote_from_pb))
        })
    }
}

impl<C: Config> RaftLogStorage<C> for LogStore {
    type LogReader = Self;

    async fn get_log_state(&mut self) -> Result<LogState<C>, io::Error> {
        let newest = self.unflushed(0, u64::MAX).pop();
        let (last_purged_log_id, last_in_file) = self.shared.read(|transaction| {
            let purged = database::read_meta(&transaction.open_table(META)?, LAST_PURGED)?;
            let last = match transaction.open_table(LOG)?.last()? {
                Some((index, bytes)) => {
                    Some(database::decode_entry(index.value(), bytes.value()).map_err(Unusable::Damaged)?.log_id)
                }
                None => None,
            };
            Ok((purged.as_ref().map(convert::log_id_from_pb), last))
        })?;
        let last = match newest {
            Some((index, bytes)) => {
                let entry = database::decode_entry(index, &bytes).map_err(|reason| self.shared.failure.fail(reason))?;
                Some(entry.log_id)
            }
            None => last_in_file,
        };
        Ok(LogState { last_purged_log_id, last_log_id: last.or(last_purged_log_id) })
    }

    async fn get_log_reader(&mut self) -> Self {
        self.clone()
    }

    async fn save_vote(&mut self, vote: &Vote) -> Result<(), io::Error> {
        self.write(Write::Vote(frame(&convert::vote_to_pb(vote)))).await
    }

    async fn save_committed(&mut self, committed: Option<LogId>) -> Result<(), io::Error> {
        let Some(committed) = committed else { return Ok(()) };
        *self.shared.committed.lock() = Some(committed);
        self.send(Write::Committed(frame(&convert::log_id_to_pb(&committed))), Done::Nobody).await
    }

    async fn read_committed(&mut self) -> Result<Option<LogId>, io::Error> {
        Ok(*self.shared.committed.lock())
    }

    async fn append<I>(&mut self, entries: I, callback: IOFlushed<C>) -> Result<(), io::Error>
    where
        I: IntoIterator<Item = Entry> + OptionalSend,
        I::IntoIter: OptionalSend,
    {
        let framed: Vec<Framed> = entries
            .into_iter()
            .map(|entry| (entry.log_id.index(), frame(&convert::entry_to_pb(&entry)).into()))
            .collect();
        self.shared.unflushed.lock().extend(framed.iter().map(|(index, frame)| (*index, Arc::clone(frame))));
        if planted(Mutant::AcknowledgedEarly) {
            callback.io_completed(Ok(()));
            return self.send(Write::Append(framed), Done::Nobody).await;
        }
        self.send(Write::Append(framed), Done::Raft(Box::new(|result| callback.io_completed(result)))).await
    }

    async fn truncate_after(&mut self, last: Option<LogId>) -> Result<(), io::Error> {
        let from = last.map_or(0, |last| last.index() + 1);
        drop(self.shared.unflushed.lock().split_off(&from));
        self.write(Write::Truncate(from)).await
    }

    async fn purge(&mut self, upto: LogId) -> Result<(), io::Error> {
        self.write(Write::Purge(upto.index(), frame(&convert::log_id_to_pb(&upto)))).await
    }
}
