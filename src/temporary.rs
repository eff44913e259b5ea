//! The state directory of a process that was given none. It ends with the process.
//!
//! A process that is killed cannot remove its directory, so the next one does. Whether the owner of a directory still lives is told by a lock
//! on a file in it, which the kernel releases with the process, however that ended; process ids would be used again.

use std::fs::{self, File};
use std::io;
use std::path::Path;

use smg_telemetry::SMG;
use tempfile::TempDir;

/// What the names of such directories begin with.
const PREFIX: &str = "smg-state-";
/// The file whose lock says that the owner lives.
const LOCK: &str = "owner.lock";

/// A directory, removed when this is dropped.
pub struct Temporary {
    directory: TempDir,
    _lock: File,
}

impl Temporary {
    /// A new directory below `parent`, after those of owners that live no more were removed.
    pub fn create(parent: &Path) -> io::Result<Self> {
        remove_abandoned(parent);
        let directory = tempfile::Builder::new().prefix(PREFIX).tempdir_in(parent)?;
        // Locked before it has its name: under that name it is never seen unlocked while its owner lives.
        let unnamed = directory.path().join("new.lock");
        let lock = File::create(&unnamed)?;
        lock.lock()?;
        fs::rename(&unnamed, directory.path().join(LOCK))?;
        Ok(Self { directory, _lock: lock })
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        self.directory.path()
    }
}

/// Removes what dead owners left. What cannot be looked at or removed is somebody else's.
fn remove_abandoned(parent: &Path) {
    let Ok(entries) = fs::read_dir(parent) else { return };
    for entry in entries.flatten() {
        let is_ours = entry.file_name().to_str().is_some_and(|name| name.starts_with(PREFIX));
        if !is_ours || !entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            continue;
        }
        let Ok(lock) = File::open(entry.path().join(LOCK)) else { continue };
        if lock.try_lock().is_ok() && fs::remove_dir_all(entry.path()).is_ok() {
            tracing::info!(target: SMG, directory = %entry.path().display(), "removed the state of a process that was killed");
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn entries(parent: &Path) -> usize {
        fs::read_dir(parent).unwrap().count()
    }

    #[test]
    fn the_directory_of_a_living_owner_stays_and_that_of_a_dead_one_goes() {
        let parent = tempfile::tempdir().unwrap();
        let living = Temporary::create(parent.path()).unwrap();
        let killed = Temporary::create(parent.path()).unwrap();
        fs::write(killed.path().join("state"), "…").unwrap();
        // As a kill does: the lock goes, the directory stays.
        let Temporary { directory, _lock } = killed;
        let left = directory.keep();
        drop(_lock);
        let next = Temporary::create(parent.path()).unwrap();
        assert!(living.path().exists() && next.path().exists() && !left.exists());
        drop((living, next));
        assert_eq!(entries(parent.path()), 0);
    }

    #[test]
    fn what_is_not_such_a_directory_is_left_alone() {
        let parent = tempfile::tempdir().unwrap();
        for name in ["smg-state-nobody", "other", "smg-state-"] {
            fs::create_dir(parent.path().join(name)).unwrap();
        }
        fs::write(parent.path().join("other").join(LOCK), "").unwrap();
        drop(Temporary::create(parent.path()).unwrap());
        assert_eq!(entries(parent.path()), 3);
    }
}
