//! The data directory: who may use it, and what is in it.
//!
//! * `LOCK`: locked by the process that uses the directory;
//! * `raft.redb`: the log ([`super::database`]);
//! * `JOINING`: instead of a log while a new member has no number yet, the id of its disk;
//! * `snap-<term>-<index>.smgsnap`: snapshots of the state ([`super::snapshot`]).
//!
//! Only the owner may read them: they hold the engines' API keys. Opening never removes or overwrites anything but unfinished files of
//! its own (`*.tmp`); whatever else is unexpected is refused with words for the operator.

use std::fs::{self, DirBuilder, File, OpenOptions, TryLockError};
use std::io::{self, Write as _};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use redb::Database;
use smg_messages::disk as pb;
use smg_state::members::FOUNDER;
use thiserror::Error;
use uuid::Uuid;

use super::database::{self, DATA_VERSION, Recovered, Unusable};
use crate::frame::{frame, unframe};

const LOCK: &str = "LOCK";
const LOG: &str = "raft.redb";
const JOINING: &str = "JOINING";
/// Ends the name of a file that is being written.
pub(crate) const UNFINISHED: &str = ".tmp";
/// Ends the name of a snapshot.
pub(crate) const SNAPSHOT: &str = ".smgsnap";
/// What file systems put into the root of an empty volume.
const LOST_AND_FOUND: &str = "lost+found";

/// Why a store did not open. Nothing on disk was removed or overwritten.
#[derive(Debug, Error)]
pub enum OpenError {
    /// Another process uses the directory.
    #[error("the data directory {0} is in use by another process: stop that process, or choose another directory")]
    InUse(PathBuf),
    /// There is no data, and no order to start a new cluster.
    #[error(
        "there is no cluster data in {0}: check the path, or start a new cluster with --bootstrap, or join one with --join"
    )]
    Empty(PathBuf),
    /// A backup goes only where nothing is.
    #[error("there is a cluster's data in {0} already: restore into an empty directory")]
    Taken(PathBuf),
    /// The directory is not empty and not ours.
    #[error("{path} holds '{name}', which is not of this program: a new cluster needs an empty directory of its own")]
    Foreign {
        /// The directory.
        path: PathBuf,
        /// The first unexpected name.
        name: String,
    },
    /// Snapshots without their log.
    #[error(
        "{0} has snapshots but no raft.redb: restore the whole directory from a backup, or move it away and start an empty member"
    )]
    LogMissing(PathBuf),
    /// The layout is of another version.
    #[error(
        "the data in {path} has layout version {found}, this program knows {DATA_VERSION}: run the version that wrote it"
    )]
    Version {
        /// The directory.
        path: PathBuf,
        /// The version of its data.
        found: u32,
    },
    /// Data that cannot be trusted.
    #[error(
        "{path} is damaged: {reason}. Nothing was changed. Restore it from a backup, or replace this member with an empty one"
    )]
    Damaged {
        /// The file, or the directory when its files do not fit together.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// The operating system refused.
    #[error("cannot {action} {path}: {source}")]
    Io {
        /// What was tried.
        action: &'static str,
        /// On what.
        path: PathBuf,
        /// The answer.
        source: io::Error,
    },
    /// The cluster does not take this member.
    #[error("the cluster does not take this member: {0}")]
    Join(String),
    /// The log is fine but the member did not come up.
    #[error("the control plane's log did not start: {0}")]
    Start(String),
}

impl OpenError {
    pub(crate) fn io(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> OpenError {
        let path = path.to_owned();
        move |source| OpenError::Io { action, path, source }
    }
}

/// A locked directory with its log.
#[derive(Debug)]
pub(crate) struct Opened {
    pub database: Database,
    pub recovered: Recovered,
    /// Held as long as the directory is in use.
    pub lock: File,
}

/// Opens a directory. With `bootstrap`, an absent or empty one becomes the first member of a new cluster.
pub(crate) fn open(path: &Path, bootstrap: bool) -> Result<Opened, OpenError> {
    let log = path.join(LOG);
    let exists = || log.try_exists().map_err(OpenError::io("look for", &log));
    if bootstrap {
        DirBuilder::new().recursive(true).mode(0o700).create(path).map_err(OpenError::io("create", path))?;
    } else if !exists()? {
        // Before the lock, so that a mistyped path leaves no trace.
        if path.is_dir() {
            check_empty(path, false)?;
        }
        return Err(OpenError::Empty(path.to_owned()));
    }
    let lock = lock(path)?;
    if !exists()? {
        check_empty(path, false)?;
        let identity = pb::NodeIdentity {
            cluster_id: Uuid::new_v4().as_bytes().to_vec(),
            node_id: FOUNDER,
            storage_id: Uuid::new_v4().as_bytes().to_vec(),
            created_at_unix_ms: super::unix_millis(),
        };
        create_log(path, &identity, &[])?;
    }
    remove_unfinished(path)?;
    let (database, recovered) = database::open(&log).map_err(|error| unusable(&log, "open", error))?;
    Ok(Opened { database, recovered, lock })
}

fn lock(path: &Path) -> Result<File, OpenError> {
    let name = path.join(LOCK);
    let file = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .open(&name)
        .map_err(OpenError::io("open", &name))?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(TryLockError::WouldBlock) => Err(OpenError::InUse(path.to_owned())),
        Err(TryLockError::Error(source)) => Err(OpenError::Io { action: "lock", path: name, source }),
    }
}

/// The names in a directory, sorted.
pub(crate) fn names(path: &Path) -> Result<Vec<String>, OpenError> {
    let list = || -> io::Result<Vec<String>> {
        fs::read_dir(path)?.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned())).collect()
    };
    let mut names = list().map_err(OpenError::io("list", path))?;
    names.sort_unstable();
    Ok(names)
}

/// Prepares an empty directory for a member that has no number yet: the id of its disk, the same at each call. `None` when the directory has
/// a log already. The directory is locked until the file is closed.
pub(crate) fn prepare_joining(path: &Path) -> Result<Option<(Uuid, File)>, OpenError> {
    let log = path.join(LOG);
    if log.try_exists().map_err(OpenError::io("look for", &log))? {
        return Ok(None);
    }
    DirBuilder::new().recursive(true).mode(0o700).create(path).map_err(OpenError::io("create", path))?;
    let lock = lock(path)?;
    check_empty(path, true)?;
    let joining = path.join(JOINING);
    if joining.try_exists().map_err(OpenError::io("look for", &joining))? {
        let bytes = fs::read(&joining).map_err(OpenError::io("read", &joining))?;
        let kept = unframe::<pb::Joining>(&bytes).ok().and_then(|kept| Uuid::from_slice(&kept.storage_id).ok());
        let reason = "it does not say whose disk this is".to_owned();
        return kept.map(|id| Some((id, lock))).ok_or(OpenError::Damaged { path: joining, reason });
    }
    let storage_id = Uuid::new_v4();
    let unfinished = path.join(format!("{JOINING}{UNFINISHED}"));
    let written = || -> io::Result<()> {
        let mut file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&unfinished)?;
        file.write_all(&frame(&pb::Joining { storage_id: storage_id.as_bytes().to_vec() }))?;
        file.sync_all()?;
        fs::rename(&unfinished, &joining)?;
        sync(path)
    };
    written().map_err(OpenError::io("write", &joining))?;
    Ok(Some((storage_id, lock)))
}

/// Gives a prepared directory its log.
pub(crate) fn finish_joining(path: &Path, identity: &pb::NodeIdentity) -> Result<(), OpenError> {
    create_log(path, identity, &[])?;
    let joining = path.join(JOINING);
    fs::remove_file(&joining).map_err(OpenError::io("remove", &joining))
}

fn check_empty(path: &Path, joining: bool) -> Result<(), OpenError> {
    for name in names(path)? {
        if name.ends_with(SNAPSHOT) {
            return Err(OpenError::LogMissing(path.to_owned()));
        }
        let expected = name == LOCK || name == LOST_AND_FOUND || is_unfinished(&name) || (joining && name == JOINING);
        if !expected {
            return Err(OpenError::Foreign { path: path.to_owned(), name });
        }
    }
    Ok(())
}

fn is_unfinished(name: &str) -> bool {
    name.strip_suffix(UNFINISHED).is_some_and(|name| name == LOG || name == JOINING || name.ends_with(SNAPSHOT))
}

fn remove_unfinished(path: &Path) -> Result<(), OpenError> {
    for name in names(path)?.into_iter().filter(|name| is_unfinished(name)) {
        let file = path.join(name);
        fs::remove_file(&file).map_err(OpenError::io("remove the unfinished", &file))?;
    }
    Ok(())
}

/// Locks a directory that has nothing in it. It is locked until the file is closed.
pub(crate) fn lock_empty(path: &Path) -> Result<File, OpenError> {
    let lock = lock(path)?;
    let log = path.join(LOG);
    if log.try_exists().map_err(OpenError::io("look for", &log))? {
        return Err(OpenError::Taken(path.to_owned()));
    }
    check_empty(path, false)?;
    Ok(lock)
}

/// Creates the log, with framed messages besides its identity, whole or not at all.
pub(crate) fn create_log(path: &Path, identity: &pb::NodeIdentity, named: &[(&str, Vec<u8>)]) -> Result<(), OpenError> {
    let (log, unfinished) = (path.join(LOG), path.join(format!("{LOG}{UNFINISHED}")));
    database::create(&unfinished, identity, named).map_err(|error| unusable(&unfinished, "create", error))?;
    fs::rename(&unfinished, &log).map_err(OpenError::io("name", &log))?;
    sync(path).map_err(OpenError::io("sync", path))
}

/// Makes the names in a directory durable.
pub(crate) fn sync(path: &Path) -> io::Result<()> {
    File::open(path)?.sync_all()
}

fn unusable(path: &Path, action: &'static str, error: Unusable) -> OpenError {
    let directory = path.parent().unwrap_or(path).to_owned();
    match error {
        Unusable::InUse => OpenError::InUse(directory),
        Unusable::Version(found) => OpenError::Version { path: directory, found },
        Unusable::Io(source) => OpenError::Io { action, path: path.to_owned(), source },
        Unusable::Damaged(reason) => OpenError::Damaged { path: path.to_owned(), reason },
    }
}
