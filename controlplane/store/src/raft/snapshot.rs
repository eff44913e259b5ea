//! Snapshots of the state, as files.
//!
//! `{"SMGSNAP1", header length u32 LE, header crc32c u32 LE, header, state}`; the header carries the state's length and checksum. A file
//! gets its name only when it is whole and durable, so a damaged one was damaged later. The newest [`KEEP`] are kept: when the newest is
//! damaged an older one serves, as long as the log still holds everything since.

use std::fs::{self, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use openraft::storage::Snapshot;
use parking_lot::Mutex;
use prost::Message;
use smg_messages::disk as pb;
use smg_state::{State, codec};

use super::convert;
use super::database::Recovered;
use super::dir::{self, OpenError, SNAPSHOT, UNFINISHED};
use super::types::SnapshotMeta;

const MAGIC: &[u8; 8] = b"SMGSNAP1";
const HEAD: usize = 16;
/// How many snapshots stay.
const KEEP: usize = 3;

pub(crate) type StateSnapshot = Snapshot<
    openraft::type_config::alias::CommittedLeaderIdOf<super::types::TypeConfig>,
    u64,
    super::types::Peer,
    Arc<State>,
>;

/// A snapshot's place in the log, as its file name says it. Ordered by index: every snapshot is of committed state.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Name {
    index: u64,
    term: u64,
}

impl Name {
    fn of(meta: &SnapshotMeta) -> Self {
        meta.last_log_id
            .map_or(Self { index: 0, term: 0 }, |id| Self { index: id.index(), term: id.committed_leader_id().term })
    }

    fn parse(name: &str) -> Option<Self> {
        let (term, index) = name.strip_prefix("snap-")?.strip_suffix(SNAPSHOT)?.split_once('-')?;
        Some(Self { index: index.parse().ok()?, term: term.parse().ok()? })
    }

    fn file(self) -> String {
        format!("snap-{}-{}{SNAPSHOT}", self.term, self.index)
    }
}

/// The snapshots of one directory.
#[derive(Debug)]
pub(crate) struct Snapshots {
    directory: PathBuf,
    /// The newest one, in memory.
    current: Mutex<Option<StateSnapshot>>,
    /// Held while a file is written: two never are at once, and nobody who only reads waits for the disk.
    saving: Mutex<()>,
}

impl Snapshots {
    /// Loads the newest snapshot that is whole and that the log continues.
    pub fn open(directory: &Path, recovered: &Recovered) -> Result<Self, OpenError> {
        let damaged = |reason| OpenError::Damaged { path: directory.to_owned(), reason };
        let mut names: Vec<Name> = dir::names(directory)?.iter().filter_map(|name| Name::parse(name)).collect();
        names.sort_unstable_by(|a, b| b.cmp(a));
        let (first_needed, last_held) = (recovered.last_purged, recovered.last);
        let mut skipped: Vec<String> = Vec::new();
        for name in &names {
            let path = directory.join(name.file());
            let bytes = fs::read(&path).map_err(OpenError::io("read", &path))?;
            match decode(&bytes) {
                Ok(snapshot) if Name::of(&snapshot.meta) == *name => {
                    let last = snapshot.meta.last_log_id;
                    let newest = names.first().unwrap_or(name);
                    // What a skipped snapshot knew must be in the log, from the entry after this snapshot on.
                    let covered = first_needed <= last
                        && (skipped.is_empty() || last_held.is_some_and(|held| held.index() >= newest.index));
                    if !covered {
                        let list = skipped.join("; ");
                        return Err(damaged(format!(
                            "the log does not hold every entry since {}{}{list}",
                            name.file(),
                            if list.is_empty() { "" } else { ", the newest snapshot that is whole: " },
                        )));
                    }
                    return Ok(Self::new(directory, Some(snapshot)));
                }
                Ok(_) => skipped.push(format!("{} holds another snapshot than its name says", name.file())),
                Err(reason) => skipped.push(format!("{} {reason}", name.file())),
            }
            tracing::warn!(file = %path.display(), reason = skipped.last(), "skipping a damaged snapshot");
        }
        if first_needed.is_some() || !skipped.is_empty() {
            let list = if skipped.is_empty() { "there is no snapshot".into() } else { skipped.join("; ") };
            return Err(damaged(format!("the log starts after its first entry and {list}")));
        }
        Ok(Self::new(directory, None))
    }

    fn new(directory: &Path, current: Option<StateSnapshot>) -> Self {
        Self { directory: directory.to_owned(), current: Mutex::new(current), saving: Mutex::new(()) }
    }

    /// The newest snapshot.
    pub fn current(&self) -> Option<StateSnapshot> {
        self.current.lock().clone()
    }

    /// Makes a snapshot durable and, if none is newer, the current one. Blocks on the disk.
    pub fn save(&self, snapshot: StateSnapshot) -> io::Result<()> {
        let _saving = self.saving.lock();
        let name = Name::of(&snapshot.meta);
        let unfinished = self.directory.join(format!("{}{UNFINISHED}", name.file()));
        let written = write(&unfinished, &encode(&snapshot))
            .and_then(|()| fs::rename(&unfinished, self.directory.join(name.file())));
        if let Err(error) = written {
            // Its space may be what is missing. The name says it is unfinished, so leaving it does no harm.
            let _ = fs::remove_file(&unfinished);
            return Err(error);
        }
        dir::sync(&self.directory)?;
        self.remove_old()?;
        let mut current = self.current.lock();
        if current.as_ref().is_none_or(|current| current.meta.last_log_id <= snapshot.meta.last_log_id) {
            *current = Some(snapshot);
        }
        Ok(())
    }

    fn remove_old(&self) -> io::Result<()> {
        let mut names = Vec::new();
        for entry in fs::read_dir(&self.directory)? {
            names.extend(Name::parse(&entry?.file_name().to_string_lossy()));
        }
        names.sort_unstable_by(|a: &Name, b| b.cmp(a));
        names.iter().skip(KEEP).try_for_each(|name| fs::remove_file(self.directory.join(name.file())))
    }
}

/// Makes the first snapshot of a directory durable.
pub(crate) fn write_first(directory: &Path, snapshot: &StateSnapshot) -> io::Result<()> {
    let name = Name::of(&snapshot.meta).file();
    let unfinished = directory.join(format!("{name}{UNFINISHED}"));
    write(&unfinished, &encode(snapshot))?;
    fs::rename(&unfinished, directory.join(name))?;
    dir::sync(directory)
}

fn write(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(path)?;
    file.write_all(bytes)?;
    file.sync_all()
}

/// A snapshot as the bytes of a file.
pub(crate) fn encode(snapshot: &StateSnapshot) -> Vec<u8> {
    let state = codec::encode_state(&snapshot.snapshot);
    let header = pb::SnapshotHeader {
        last_log_id: snapshot.meta.last_log_id.as_ref().map(convert::log_id_to_pb),
        membership: Some(convert::stored_membership_to_pb(&snapshot.meta.last_membership)),
        revision: snapshot.snapshot.revision(),
        state_bytes: state.len() as u64,
        state_crc32c: crc32c::crc32c(&state),
    }
    .encode_to_vec();
    let mut bytes = Vec::with_capacity(HEAD + header.len() + state.len());
    bytes.extend_from_slice(MAGIC);
    bytes.extend_from_slice(&u32::try_from(header.len()).unwrap_or(u32::MAX).to_le_bytes());
    bytes.extend_from_slice(&crc32c::crc32c(&header).to_le_bytes());
    bytes.extend_from_slice(&header);
    bytes.extend_from_slice(&state);
    bytes
}

/// The snapshot in a file's bytes, or what is wrong with them.
pub(crate) fn decode(bytes: &[u8]) -> Result<StateSnapshot, String> {
    let cut = || "is cut off".to_owned();
    let (magic, rest) = bytes.split_first_chunk::<8>().ok_or_else(cut)?;
    if magic != MAGIC {
        return Err("is no snapshot of this version".into());
    }
    let (length, rest) = rest.split_first_chunk::<4>().ok_or_else(cut)?;
    let (checksum, rest) = rest.split_first_chunk::<4>().ok_or_else(cut)?;
    let length = usize::try_from(u32::from_le_bytes(*length)).map_err(|_| cut())?;
    let (header, state) = rest.split_at_checked(length).ok_or_else(cut)?;
    if crc32c::crc32c(header) != u32::from_le_bytes(*checksum) {
        return Err("has a damaged header".into());
    }
    let unreadable = |error: &dyn std::fmt::Display| format!("cannot be read: {error}");
    let header = pb::SnapshotHeader::decode(header).map_err(|error| unreadable(&error))?;
    if state.len() as u64 != header.state_bytes {
        return Err("has not the length its header says".into());
    }
    if crc32c::crc32c(state) != header.state_crc32c {
        return Err("does not match its checksum".into());
    }
    let state = codec::decode_state(state).map_err(|error| unreadable(&error))?;
    let meta = convert::snapshot_meta_from_pb(&header).map_err(|error| unreadable(&error))?;
    Ok(Snapshot { meta, snapshot: Arc::new(state) })
}
