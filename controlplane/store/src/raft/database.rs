//! The file of the log: a redb database with two tables.
//!
//! * `log`: index → framed entry, without holes, from the entry after `last_purged` on;
//! * `meta`: name → framed message: `data_version`, `node_identity`, `vote`, `committed`, `last_purged`.
//!
//! Every write transaction of the file's life commits in two phases and records what a restart needs ([`begin`] is the only way to start
//! one), so the primary slot on disk is whole at any moment. At open every page and every frame is verified before anything is trusted.

use std::fs::OpenOptions;
use std::os::unix::fs::OpenOptionsExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

use openraft::entry::RaftEntry;
use prost::Message;
use redb::backends::FileBackend;
use redb::{
    Builder, Database, Durability, ReadableDatabase, ReadableTable, StorageBackend, TableDefinition, TableError,
    WriteTransaction,
};
use smg_messages::disk as pb;
use thiserror::Error;

use super::convert;
use super::mutant::{Mutant, planted};
use super::types::{Entry, LogId};
use crate::frame::{frame, unframe};

pub(crate) const LOG: TableDefinition<'_, u64, &[u8]> = TableDefinition::new("log");
pub(crate) const META: TableDefinition<'_, &str, &[u8]> = TableDefinition::new("meta");

pub(crate) const VOTE: &str = "vote";
pub(crate) const COMMITTED: &str = "committed";
pub(crate) const LAST_PURGED: &str = "last_purged";
const IDENTITY: &str = "node_identity";
const VERSION: &str = "data_version";

/// The layout this code reads and writes.
pub(crate) const DATA_VERSION: u32 = 1;
/// Enough for every page of the log's tail; the whole file is rarely larger.
const CACHE_BYTES: usize = 32 << 20;

/// Why the file cannot be used. Nothing was changed in it.
#[derive(Debug, Error)]
pub(crate) enum Unusable {
    /// Another process has it open.
    #[error("another process has it open")]
    InUse,
    /// It has another layout.
    #[error("its layout has version {0}, this program knows {DATA_VERSION}")]
    Version(u32),
    /// It could not be read or written.
    #[error("{0}")]
    Io(std::io::Error),
    /// It is damaged, or no log at all.
    #[error("{0}")]
    Damaged(String),
}

impl From<redb::Error> for Unusable {
    fn from(error: redb::Error) -> Self {
        match error {
            redb::Error::DatabaseAlreadyOpen => Self::InUse,
            redb::Error::Io(error) if error.kind() != std::io::ErrorKind::InvalidData => Self::Io(error),
            other => Self::Damaged(other.to_string()),
        }
    }
}

macro_rules! from_redb {
    ($($error:ty),+) => { $(impl From<$error> for Unusable {
        fn from(error: $error) -> Self {
            redb::Error::from(error).into()
        }
    })+ };
}
from_redb!(
    redb::DatabaseError,
    redb::TransactionError,
    redb::TableError,
    redb::StorageError,
    redb::CommitError,
    redb::SetDurabilityError
);

/// What the file said when it was opened.
#[derive(Debug, Clone)]
pub(crate) struct Recovered {
    pub identity: pb::NodeIdentity,
    pub committed: Option<LogId>,
    pub last_purged: Option<LogId>,
    /// The last entry, or the last purged one of an empty log.
    pub last: Option<LogId>,
}

/// Starts a write transaction.
pub(crate) fn begin(database: &Database) -> Result<WriteTransaction, redb::Error> {
    let mut transaction = database.begin_write()?;
    let durability = if planted(Mutant::NothingFlushed) { Durability::None } else { Durability::Immediate };
    transaction.set_durability(durability)?;
    transaction.set_two_phase_commit(true);
    transaction.set_quick_repair(true);
    Ok(transaction)
}

/// Creates the file with its identity and other framed messages of the table of names, closed again. A crash leaves a file that [`open`] refuses, so create it beside its place and rename.
pub(crate) fn create(path: &Path, identity: &pb::NodeIdentity, named: &[(&str, Vec<u8>)]) -> Result<(), Unusable> {
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .open(path)
        .map_err(Unusable::Io)?;
    create_in(FileBackend::new(file)?, identity, named)
}

/// Creates the file's content.
pub(crate) fn create_in(
    backend: impl StorageBackend,
    identity: &pb::NodeIdentity,
    named: &[(&str, Vec<u8>)],
) -> Result<(), Unusable> {
    let database = Builder::new().set_cache_size(CACHE_BYTES).create_with_backend(backend)?;
    let transaction = begin(&database)?;
    {
        transaction.open_table(LOG)?;
        let mut meta = transaction.open_table(META)?;
        meta.insert(VERSION, frame(&pb::DataVersion { version: DATA_VERSION }).as_slice())?;
        meta.insert(IDENTITY, frame(identity).as_slice())?;
        for (name, frame) in named {
            meta.insert(*name, frame.as_slice())?;
        }
    }
    transaction.commit()?;
    Ok(database.close()?)
}

/// Opens the file and verifies all of it.
pub(crate) fn open(path: &Path) -> Result<(Database, Recovered), Unusable> {
    open_with(|builder| builder.open(path))
}

/// Opens a database by `open` and verifies all of it.
pub(crate) fn open_with(
    open: impl FnOnce(&Builder) -> Result<Database, redb::DatabaseError>,
) -> Result<(Database, Recovered), Unusable> {
    let opened = catch_unwind(AssertUnwindSafe(|| {
        let mut builder = Builder::new();
        builder.set_cache_size(CACHE_BYTES).set_check_integrity_on_open(true);
        let database = open(&builder)?;
        let recovered = verify(&database)?;
        Ok((database, recovered))
    }));
    // The engine is written not to panic on a damaged file that it checks first; if it does, the file is damaged all the same.
    opened.unwrap_or_else(|_| Err(Unusable::Damaged("the database engine gave up on it".into())))
}

fn verify(database: &Database) -> Result<Recovered, Unusable> {
    let transaction = database.begin_read()?;
    let missing = |error| match error {
        TableError::TableDoesNotExist(name) => {
            Unusable::Damaged(format!("it has no table '{name}', so it is not a log of this program"))
        }
        other => other.into(),
    };
    let meta = transaction.open_table(META).map_err(missing)?;
    let version: pb::DataVersion = required(read_meta(&meta, VERSION)?, VERSION)?;
    if version.version != DATA_VERSION {
        return Err(Unusable::Version(version.version));
    }
    let identity: pb::NodeIdentity = required(read_meta(&meta, IDENTITY)?, IDENTITY)?;
    read_meta::<pb::Vote>(&meta, VOTE)?;
    let committed = read_meta(&meta, COMMITTED)?.as_ref().map(convert::log_id_from_pb);
    let last_purged = read_meta(&meta, LAST_PURGED)?.as_ref().map(convert::log_id_from_pb);

    let log = transaction.open_table(LOG).map_err(missing)?;
    let mut last = last_purged;
    for item in log.iter()? {
        let (index, bytes) = item?;
        let index = index.value();
        let expected = last.map_or(0, |last| last.index() + 1);
        if index != expected {
            return Err(Unusable::Damaged(format!("entry {expected} of the log is missing; the next one is {index}")));
        }
        let id = decode_entry(index, bytes.value()).map_err(Unusable::Damaged)?.log_id();
        if last.is_some_and(|last| last > id) {
            return Err(Unusable::Damaged(format!("entry {index} of the log is older than the one before it")));
        }
        last = Some(id);
    }
    Ok(Recovered { identity, committed, last_purged, last })
}

fn required<M>(value: Option<M>, name: &str) -> Result<M, Unusable> {
    value.ok_or_else(|| Unusable::Damaged(format!("it has no '{name}'")))
}

/// Reads a message of the table of names.
pub(crate) fn read_meta<M: Message + Default>(
    meta: &impl ReadableTable<&'static str, &'static [u8]>,
    name: &str,
) -> Result<Option<M>, Unusable> {
    let Some(bytes) = meta.get(name)? else { return Ok(None) };
    unframe(bytes.value()).map(Some).map_err(|error| Unusable::Damaged(format!("'{name}': {error}")))
}

/// The entry of a frame at an index, or what is wrong with it.
pub(crate) fn decode_entry(index: u64, bytes: &[u8]) -> Result<Entry, String> {
    let message: pb::Entry = unframe(bytes).map_err(|error| format!("entry {index} of the log: {error}"))?;
    let entry = convert::entry_from_pb(message).map_err(|error| format!("entry {index} of the log: {error}"))?;
    if entry.index() != index {
        return Err(format!("entry {index} of the log says it is entry {}", entry.index()));
    }
    Ok(entry)
}
