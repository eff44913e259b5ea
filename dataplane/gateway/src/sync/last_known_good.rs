//! The last snapshot that was good, kept on disk so that a gateway can start while the control plane is away.
//!
//! The file is written whole under another name and renamed, so it is the old one or the new one, never a mixture. It holds API keys of
//! workers and is readable by its owner only.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use smg_fleet::{Snapshot, wire};
use smg_telemetry::SMG;

use crate::core::Core;

const NAME: &str = "last-known-good.smgsnap";
const MAGIC: &[u8; 8] = b"SMGLKG1\n";

/// The file of one gateway.
#[derive(Debug, Clone)]
pub struct LastKnownGood {
    directory: PathBuf,
}

impl LastKnownGood {
    /// The file in `directory`, which is made when needed.
    pub fn new(directory: PathBuf) -> Self {
        Self { directory }
    }

    /// Puts the stored snapshot into use, if there is a good one, and returns its age.
    pub(super) fn restore(&self, core: &Arc<Core>) -> Option<Duration> {
        match self.load() {
            Ok(None) => None,
            Ok(Some(snapshot)) => {
                let revision = snapshot.revision;
                match super::install(core, snapshot) {
                    Ok(()) => {
                        tracing::info!(target: SMG, revision, "starting from the last known good snapshot");
                        Some(self.age())
                    }
                    Err(error) => {
                        tracing::warn!(target: SMG, %error, "the stored snapshot cannot be used");
                        None
                    }
                }
            }
            Err(error) => {
                tracing::warn!(target: SMG, %error, path = %self.directory.display(), "the stored snapshot cannot be read");
                None
            }
        }
    }

    /// The time since the snapshot was stored. Zero when the clock was set back since.
    fn age(&self) -> Duration {
        let stored = fs::metadata(self.directory.join(NAME)).and_then(|file| file.modified());
        stored.ok().and_then(|stored| stored.elapsed().ok()).unwrap_or_default()
    }

    /// The stored snapshot.
    ///
    /// # Errors
    /// When the file is there and is not a whole snapshot.
    pub fn load(&self) -> io::Result<Option<Snapshot>> {
        let mut bytes = Vec::new();
        match File::open(self.directory.join(NAME)) {
            Ok(mut file) => file.read_to_end(&mut bytes)?,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error),
        };
        let damaged = |what: &str| io::Error::new(io::ErrorKind::InvalidData, format!("damaged snapshot file: {what}"));
        let rest = bytes.strip_prefix(MAGIC).ok_or_else(|| damaged("wrong beginning"))?;
        let (checksum, body) = rest.split_first_chunk::<4>().ok_or_else(|| damaged("too short"))?;
        if u32::from_le_bytes(*checksum) != wire::checksum(body) {
            return Err(damaged("wrong checksum"));
        }
        wire::decode_snapshot(body).map(Some).map_err(|error| damaged(&error.to_string()))
    }

    /// Stores a snapshot.
    ///
    /// # Errors
    /// When the disk does not take it; the file before stays.
    pub fn store(&self, snapshot: &Snapshot) -> io::Result<()> {
        if !self.directory.exists() {
            fs::DirBuilder::new().recursive(true).mode(0o700).create(&self.directory)?;
        }
        let body = wire::encode_snapshot(snapshot);
        let temporary = self.directory.join(format!("{NAME}.new"));
        let mut file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&temporary)?;
        file.write_all(MAGIC)?;
        file.write_all(&wire::checksum(&body).to_le_bytes())?;
        file.write_all(&body)?;
        file.sync_all()?;
        fs::rename(&temporary, self.directory.join(NAME))?;
        sync_directory(&self.directory)
    }
}

fn sync_directory(directory: &Path) -> io::Result<()> {
    File::open(directory)?.sync_all()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn what_was_stored_is_loaded_and_only_the_owner_may_read_it() {
        let directory = tempfile::tempdir().unwrap();
        let stored = LastKnownGood::new(directory.path().join("gateway"));
        assert!(stored.load().unwrap().is_none());
        let snapshot = Snapshot { revision: 7, ..Default::default() };
        stored.store(&snapshot).unwrap();
        assert_eq!(stored.load().unwrap(), Some(snapshot));
        let mode = fs::metadata(stored.directory.join(NAME)).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
    }

    #[test]
    fn a_damaged_file_is_an_error_and_not_a_fleet() {
        let directory = tempfile::tempdir().unwrap();
        let stored = LastKnownGood::new(directory.path().to_owned());
        stored.store(&Snapshot { revision: 7, ..Default::default() }).unwrap();
        let path = directory.path().join(NAME);
        let good = fs::read(&path).unwrap();
        for position in 0..good.len() {
            let mut bad = good.clone();
            bad[position] ^= 1;
            fs::write(&path, &bad).unwrap();
            assert!(stored.load().is_err(), "byte {position}");
        }
        fs::write(&path, &good[..good.len() - 1]).unwrap();
        assert!(stored.load().is_err());
    }
}
