//! What a gateway was told of its slots, kept on disk: a gateway that is started again on the same machine goes on from there.
//!
//! Why it may: whoever holds the lock of the directory is the only process that uses it, so the process that wrote the file has ended. Its
//! connections to engines ended with it, and engines abort what nobody reads. After [`SETTLED`] none of its requests runs any more, and the
//! slots that the ledger keeps for it are free. Leases count by the clock of the machine, which both processes share; after a restart of
//! the machine the file counts for nothing.
//!
//! Invariants
//! * a share that has become smaller is on disk before it is acknowledged, else the next process would use what is another one's by then;
//! * the file is the old one or the new one, never a mixture.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use prost::Message;
use smg_admission::{Grant, Shares, wire};
use smg_messages::admission as pb;
use smg_telemetry::SMG;
use uuid::Uuid;

const NAME: &str = "slots.smgckpt";
const LOCK: &str = "slots.lock";
const MAGIC: &[u8; 8] = b"SMGSLT1\n";
/// A few hundred workers take some ten kilobytes.
const MAX_BYTES: u64 = 4 * 1024 * 1024;
/// How long engines may need to notice that the process before has ended, and to abort its requests.
pub const SETTLED: Duration = Duration::from_secs(5);

/// The file of one gateway.
#[derive(Debug)]
pub struct Checkpoints {
    directory: PathBuf,
    boot: String,
    /// Held as long as the process lives.
    _lock: File,
}

/// What the process before was told.
#[derive(Debug, PartialEq)]
pub struct Predecessor {
    /// Which process it was.
    pub process: u128,
    /// Its session.
    pub epoch: u64,
    /// When the last report that was answered had been sent.
    pub heard: Duration,
    /// The leases.
    pub leases: [Duration; 2],
    /// Its shares.
    pub grants: Vec<Grant>,
}

impl Checkpoints {
    /// The file in `directory`, if no other process uses it, and it is known which start of the machine this is.
    pub fn open(directory: PathBuf) -> Option<Self> {
        let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?.trim().to_owned();
        match lock(&directory) {
            Ok(lock) => Some(Self { directory, boot, _lock: lock }),
            Err(error) => {
                let path = directory.display();
                tracing::warn!(target: SMG, %error, %path, "slots are not kept for the next start: the directory cannot be locked");
                None
            }
        }
    }

    /// What the last process of `gateway` on this machine was told, if any of its leases may still last.
    pub fn load(&self, gateway: &str) -> Option<Predecessor> {
        match self.read() {
            Ok(message) => {
                let message = message.filter(|found| found.boot == self.boot && found.gateway == gateway)?;
                predecessor(&message)
            }
            Err(error) => {
                tracing::warn!(target: SMG, %error, "what was kept of slots cannot be read");
                None
            }
        }
    }

    fn read(&self) -> io::Result<Option<pb::Checkpoint>> {
        let path = self.directory.join(NAME);
        let bytes = match fs::metadata(&path) {
            Ok(file) if file.len() > MAX_BYTES => return Err(damaged("too large")),
            Ok(_) => fs::read(&path)?,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error),
        };
        let rest = bytes.strip_prefix(MAGIC).ok_or_else(|| damaged("wrong beginning"))?;
        let (checksum, body) = rest.split_first_chunk::<4>().ok_or_else(|| damaged("too short"))?;
        if u32::from_le_bytes(*checksum) != smg_fleet::wire::checksum(body) {
            return Err(damaged("wrong checksum"));
        }
        pb::Checkpoint::decode(body).map(Some).map_err(|error| damaged(&error.to_string()))
    }

    /// Keeps what this process was told. When the disk does not take it, nothing is kept.
    pub fn store(&self, gateway: &str, shares: &Shares, leases: [Duration; 2]) {
        let Some(heard) = shares.heard() else { return };
        let [float, anchor] = leases.map(|lease| u64::try_from(lease.as_millis()).unwrap_or(u64::MAX));
        let message = pb::Checkpoint {
            gateway: gateway.to_owned(),
            process: Uuid::from_u128(shares.process()).as_bytes().to_vec(),
            epoch: shares.epoch(),
            boot: self.boot.clone(),
            heard_micros: u64::try_from(heard.as_micros()).unwrap_or(u64::MAX),
            float_millis: float,
            anchor_millis: anchor,
            grants: shares.grants().iter().map(wire::grant_to_pb).collect(),
        };
        if let Err(error) = self.write(&message) {
            tracing::warn!(target: SMG, %error, "slots are not kept for the next start");
            self.remove();
        }
    }

    fn write(&self, message: &pb::Checkpoint) -> io::Result<()> {
        let body = message.encode_to_vec();
        let temporary = self.directory.join(format!("{NAME}.new"));
        let mut file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&temporary)?;
        file.write_all(MAGIC)?;
        file.write_all(&smg_fleet::wire::checksum(&body).to_le_bytes())?;
        file.write_all(&body)?;
        // Not synchronised: after a crash of the machine the file counts for nothing.
        fs::rename(&temporary, self.directory.join(NAME))
    }

    /// Keeps nothing.
    pub fn remove(&self) {
        let removed = fs::remove_file(self.directory.join(NAME));
        if let Err(error) =
            removed.or_else(|error| if error.kind() == io::ErrorKind::NotFound { Ok(()) } else { Err(error) })
        {
            tracing::error!(target: SMG, %error, "what was kept of slots cannot be removed: remove it by hand before the next start");
        }
    }
}

fn damaged(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("damaged: {what}"))
}

fn lock(directory: &Path) -> io::Result<File> {
    if !directory.exists() {
        fs::DirBuilder::new().recursive(true).mode(0o700).create(directory)?;
    }
    let file = OpenOptions::new().write(true).create(true).truncate(false).mode(0o600).open(directory.join(LOCK))?;
    file.try_lock().map_err(io::Error::from)?;
    Ok(file)
}

fn predecessor(message: &pb::Checkpoint) -> Option<Predecessor> {
    let process = u128::from_be_bytes(message.process.as_slice().try_into().ok()?);
    let epoch = message.epoch;
    let grant = |grant: &pb::Grant| wire::grant_from_pb(grant, &message.gateway, process, epoch).ok();
    Some(Predecessor {
        process,
        epoch,
        heard: Duration::from_micros(message.heard_micros),
        leases: [message.float_millis, message.anchor_millis].map(Duration::from_millis),
        grants: message.grants.iter().map(grant).collect::<Option<_>>()?,
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use smg_admission::{Times, Update};

    use super::*;

    const LEASES: [Duration; 2] = [Duration::from_secs(10), Duration::from_secs(900)];

    fn told() -> Shares {
        let mut shares = Shares::new("a", 9, Times::default(), false);
        let grant = Grant { gateway: "a".to_owned(), process: 9, epoch: 3, worker: 7, seq: 5, limit: 8, anchored: 4 };
        shares.apply(
            &Update { epoch: 3, echo: Some(Duration::from_secs(77)), grants: vec![grant], mark: 0 },
            Duration::ZERO,
        );
        shares
    }

    #[test]
    fn the_next_process_finds_what_this_one_was_told_and_no_other_gateway_does() {
        let directory = tempfile::tempdir().unwrap();
        let checkpoints = Checkpoints::open(directory.path().join("gateway")).unwrap();
        assert_eq!(checkpoints.load("a"), None);
        checkpoints.store("a", &told(), LEASES);
        let found = checkpoints.load("a").unwrap();
        assert_eq!((found.process, found.epoch, found.heard, found.leases), (9, 3, Duration::from_secs(77), LEASES));
        assert_eq!(found.grants, told().grants());
        assert_eq!(checkpoints.load("b"), None);
        checkpoints.remove();
        assert_eq!(checkpoints.load("a"), None);
        checkpoints.remove();
    }

    #[test]
    fn a_directory_in_use_by_another_process_keeps_nothing_for_this_one() {
        let directory = tempfile::tempdir().unwrap();
        let _held = Checkpoints::open(directory.path().to_owned()).unwrap();
        assert!(Checkpoints::open(directory.path().to_owned()).is_none());
    }

    #[test]
    fn a_damaged_file_and_one_from_before_the_machine_was_started_count_for_nothing() {
        let directory = tempfile::tempdir().unwrap();
        let mut checkpoints = Checkpoints::open(directory.path().to_owned()).unwrap();
        checkpoints.store("a", &told(), LEASES);
        let path = directory.path().join(NAME);
        let good = fs::read(&path).unwrap();
        for position in 0..good.len() {
            let mut bad = good.clone();
            bad[position] ^= 1;
            fs::write(&path, &bad).unwrap();
            assert_eq!(checkpoints.load("a"), None, "byte {position}");
        }
        fs::write(&path, &good).unwrap();
        assert!(checkpoints.load("a").is_some());
        checkpoints.boot = "another".to_owned();
        assert_eq!(checkpoints.load("a"), None);
    }
}
