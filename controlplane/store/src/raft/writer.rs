//! The one thread that writes the log.
//!
//! Writes arrive on a bounded channel. The thread takes all that wait, applies them in the order of their arrival to one transaction,
//! commits it, and only then says that each is done (group commit). So votes and entries are never reordered, and whoever was told "done"
//! can rely on the disk. After the first error it never writes again ([`super::failure`]).

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use std::{fs, io, thread};

use redb::Database;
use tokio::sync::{mpsc, oneshot};

use super::database::{self, COMMITTED, LAST_PURGED, LOG, META, VOTE};
use super::log::Shared;
use super::mutant::{Mutant, planted};

/// Most writes that wait for the thread; senders wait beyond it.
const QUEUE: usize = 1024;
/// Most writes of one transaction.
const MAX_BATCH: usize = 1024;

/// An entry's index and frame. Shared with the log's readers until it is on disk.
pub(crate) type Framed = (u64, Arc<[u8]>);

/// A change to the file.
#[derive(Debug, Clone)]
pub(crate) enum Write {
    /// The vote, as a frame.
    Vote(Vec<u8>),
    /// Entries to add at the end.
    Append(Vec<Framed>),
    /// Drops the entries from this index on.
    Truncate(u64),
    /// Drops the entries up to this index; the frame of its log id.
    Purge(u64, Vec<u8>),
    /// The frame of the last committed log id. A hint that shortens recovery: it rides along with the next transaction.
    Committed(Vec<u8>),
    /// Writes what is left and closes the file.
    Close,
}

/// Who learns that a write is durable.
pub(crate) enum Done {
    Nobody,
    Caller(oneshot::Sender<io::Result<()>>),
    Raft(Box<dyn FnOnce(io::Result<()>) + Send>),
}

impl Done {
    fn complete(self, result: io::Result<()>) {
        match self {
            Done::Nobody => {}
            // A caller that no longer waits has nothing to learn.
            Done::Caller(caller) => drop(caller.send(result)),
            Done::Raft(callback) => callback(result),
        }
    }
}

pub(crate) type Job = (Write, Done);

/// How the thread fares. Counts since the store was opened.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    commits: AtomicU64,
    writes: AtomicU64,
    entries: AtomicU64,
    largest_batch: AtomicU64,
    commit_nanos: AtomicU64,
    slowest_commit_nanos: AtomicU64,
}

/// What the log's writer has done since the store was opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct StoreStats {
    /// Transactions committed, each durable before the next began.
    pub commits: u64,
    /// Writes in them: appends, votes, truncations, purges.
    pub writes: u64,
    /// Log entries in them.
    pub entries: u64,
    /// Most writes that shared one transaction.
    pub largest_batch: u64,
    /// Time spent in transactions, mostly in fsync.
    pub commit_time: Duration,
    /// The longest of them.
    pub slowest_commit: Duration,
}

impl Counters {
    fn count(&self, writes: u64, entries: u64, took: Duration) {
        let nanos = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
        self.commits.fetch_add(1, Ordering::Relaxed);
        self.writes.fetch_add(writes, Ordering::Relaxed);
        self.entries.fetch_add(entries, Ordering::Relaxed);
        self.largest_batch.fetch_max(writes, Ordering::Relaxed);
        self.commit_nanos.fetch_add(nanos, Ordering::Relaxed);
        self.slowest_commit_nanos.fetch_max(nanos, Ordering::Relaxed);
    }

    pub fn stats(&self) -> StoreStats {
        StoreStats {
            commits: self.commits.load(Ordering::Relaxed),
            writes: self.writes.load(Ordering::Relaxed),
            entries: self.entries.load(Ordering::Relaxed),
            largest_batch: self.largest_batch.load(Ordering::Relaxed),
            commit_time: Duration::from_nanos(self.commit_nanos.load(Ordering::Relaxed)),
            slowest_commit: Duration::from_nanos(self.slowest_commit_nanos.load(Ordering::Relaxed)),
        }
    }
}

/// The running thread. It also ends when every sender is gone.
#[derive(Debug)]
pub(crate) struct WriterThread {
    jobs: mpsc::Sender<Job>,
    thread: JoinHandle<()>,
}

impl WriterThread {
    /// Starts the thread. `lock` is released when it ends, after the file is closed.
    pub fn spawn(shared: Arc<Shared>, lock: Option<fs::File>) -> io::Result<Self> {
        let (jobs, receiver) = mpsc::channel(QUEUE);
        let thread = thread::Builder::new().name("smg-log-writer".into()).spawn(move || {
            Writer::new(shared).run(receiver);
            drop(lock);
        })?;
        Ok(Self { jobs, thread })
    }

    /// Where the thread takes its work from.
    pub fn jobs(&self) -> mpsc::Sender<Job> {
        self.jobs.clone()
    }

    /// Writes what is left, closes the file and waits for the end of the thread. After a failure nothing is written.
    pub async fn close(self) {
        // A thread that is gone has closed the file.
        let _ = self.jobs.send((Write::Close, Done::Nobody)).await;
        let _ = tokio::task::spawn_blocking(move || self.thread.join()).await;
    }
}

/// What the thread does, one transaction after the other.
pub(crate) struct Writer {
    shared: Arc<Shared>,
    /// The newest committed log id that is not on disk yet.
    committed: Option<Vec<u8>>,
}

/// The first job and all that wait behind it, up to one transaction's worth.
pub(crate) fn batch(first: Job, jobs: &mut mpsc::Receiver<Job>) -> Vec<Job> {
    let mut batch = vec![first];
    while batch.len() < MAX_BATCH && !matches!(batch.last(), Some((Write::Close, _))) {
        match jobs.try_recv() {
            Ok(job) => batch.push(job),
            Err(_) => break,
        }
    }
    batch
}

impl Writer {
    pub fn new(shared: Arc<Shared>) -> Self {
        Self { shared, committed: None }
    }

    fn run(mut self, mut jobs: mpsc::Receiver<Job>) {
        let mut closing = false;
        while !closing && let Some(first) = jobs.blocking_recv() {
            closing = self.turn(batch(first, &mut jobs));
        }
        if !closing {
            let _ = self.commit(vec![Write::Close]);
            self.close();
        }
    }

    /// Makes the jobs of one transaction durable and then says so. Returns whether the file is closed now.
    pub fn turn(&mut self, batch: Vec<Job>) -> bool {
        let (writes, done): (Vec<Write>, Vec<Done>) = batch.into_iter().unzip();
        let closing = matches!(writes.last(), Some(Write::Close));
        let result = self.commit(writes);
        if closing {
            self.close();
        }
        for whom in done {
            whom.complete(match &result {
                Ok(()) => Ok(()),
                Err(error) => Err(io::Error::other(error.to_string())),
            });
        }
        closing
    }

    fn close(&self) {
        // Waits for readers: they hold this lock while they read.
        let Some(database) = self.shared.database.write().take() else { return };
        // After an error the engine refuses to write; every commit before it is on disk already.
        if let Err(error) = database.close() {
            tracing::warn!(%error, "the log was not closed cleanly; the next start verifies it");
        }
    }

    /// Makes the writes durable, in their order.
    fn commit(&mut self, writes: Vec<Write>) -> io::Result<()> {
        self.shared.failure.check()?;
        let closing = writes.iter().any(|write| matches!(write, Write::Close));
        let mut changes = Vec::with_capacity(writes.len());
        for write in writes {
            match write {
                Write::Committed(frame) => self.committed = Some(frame),
                Write::Close => {}
                change => changes.push(change),
            }
        }
        if changes.is_empty() && !(closing && self.committed.is_some()) {
            return Ok(());
        }
        let started = Instant::now();
        let committed = self.committed.take();
        let result = catch_unwind(AssertUnwindSafe(|| {
            let database = self.shared.database.read();
            let database = database.as_ref().ok_or("the log is closed")?;
            transact(database, &changes, committed.as_deref()).map_err(|error| error.to_string())
        }));
        match result.unwrap_or_else(|_| Err("the database engine panicked".into())) {
            Ok(()) => {}
            Err(reason) => return Err(self.shared.failure.fail(format!("writing the log failed: {reason}"))),
        }
        let mut entries = 0;
        for change in &changes {
            if let Write::Append(framed) = change {
                entries += framed.len() as u64;
                self.shared.flushed(framed);
            }
        }
        self.shared.counters.count(changes.len() as u64, entries, started.elapsed());
        Ok(())
    }
}

fn transact(database: &Database, changes: &[Write], committed: Option<&[u8]>) -> Result<(), redb::Error> {
    let transaction = database::begin(database)?;
    {
        let mut log = transaction.open_table(LOG)?;
        let mut meta = transaction.open_table(META)?;
        for change in changes {
            match change {
                Write::Vote(_) if planted(Mutant::VoteNotSaved) => {}
                Write::Vote(frame) => drop(meta.insert(VOTE, frame.as_slice())?),
                Write::Append(entries) => {
                    for (index, frame) in entries {
                        log.insert(index, frame.as_ref())?;
                    }
                }
                Write::Truncate(from) => log.retain_in(*from.., |_, _| false)?,
                Write::Purge(upto, frame) => {
                    let upto = if planted(Mutant::PurgedTooFar) { upto.saturating_add(1) } else { *upto };
                    log.retain_in(..=upto, |_, _| false)?;
                    meta.insert(LAST_PURGED, frame.as_slice())?;
                }
                Write::Committed(_) | Write::Close => {}
            }
        }
        if let Some(frame) = committed {
            meta.insert(COMMITTED, frame)?;
        }
    }
    Ok(transaction.commit()?)
}
