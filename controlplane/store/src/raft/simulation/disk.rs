//! A disk that forgets: what was written and not synced may be lost, wholly, in part or in the middle of a sector, when its process dies.
//!
//! The log's real database runs on it. Snapshots are files of a real directory in memory, which are written whole or not at all.

use std::io;
use std::sync::Arc;

use parking_lot::Mutex;
use redb::StorageBackend;

use super::random::Random;

/// The smallest part that a disk writes whole.
const SECTOR: usize = 512;

#[derive(Debug)]
enum Op {
    Write(usize, Vec<u8>),
    Length(usize),
}

#[derive(Debug, Default)]
struct Content {
    /// What a crash leaves for sure.
    durable: Vec<u8>,
    /// What readers see.
    seen: Vec<u8>,
    /// What is seen and not durable, oldest first.
    pending: Vec<Op>,
    /// Counts processes: a handle of a dead one does nothing any more.
    life: u64,
    /// Operations until the process dies in the middle of one.
    fuse: Option<usize>,
}

fn apply(bytes: &mut Vec<u8>, op: &Op) {
    match op {
        Op::Length(length) => bytes.resize(*length, 0),
        Op::Write(offset, data) => {
            if bytes.len() < offset + data.len() {
                bytes.resize(offset + data.len(), 0);
            }
            bytes[*offset..offset + data.len()].copy_from_slice(data);
        }
    }
}

/// What a crash takes of the operations that were not synced.
#[derive(Debug, Clone, Copy)]
pub(in crate::raft) enum Loss {
    /// All of them.
    Everything,
    /// None of them.
    Nothing,
    /// Any of them.
    Some,
    /// Any of them, and of large writes all but the first sectors.
    Torn,
}

/// One disk. It outlives the processes that use it.
#[derive(Debug, Clone, Default)]
pub(in crate::raft) struct Disk(Arc<Mutex<Content>>);

impl Disk {
    /// A handle for a process.
    pub fn handle(&self) -> Handle {
        Handle { life: self.0.lock().life, disk: self.clone() }
    }

    /// The process that writes is to die in the middle of its operation after so many others.
    pub fn burn(&self, operations: usize) {
        self.0.lock().fuse = Some(operations);
    }

    /// Makes everything durable, as a clean end does, and ends the process.
    pub fn flush(&self) {
        let mut content = self.0.lock();
        content.durable = content.seen.clone();
        content.pending.clear();
        content.life += 1;
    }

    /// It is not to die after all, unless it is dying.
    pub fn defuse(&self) {
        let mut content = self.0.lock();
        content.fuse = content.fuse.filter(|left| *left == 0);
    }

    /// Whether that has happened.
    pub fn is_burnt(&self) -> bool {
        self.0.lock().fuse == Some(0)
    }

    /// The process dies: of what was not synced anything may be lost.
    pub fn crash(&self, loss: Loss, random: &mut Random) {
        let mut content = self.0.lock();
        let content = &mut *content;
        for op in std::mem::take(&mut content.pending) {
            let kept = match loss {
                Loss::Everything => false,
                Loss::Nothing => true,
                Loss::Some | Loss::Torn => random.chance(50),
            };
            let torn = kept && matches!(loss, Loss::Torn);
            match op {
                Op::Write(offset, mut data) if torn && data.len() > SECTOR && random.chance(30) => {
                    data.truncate(SECTOR * (1 + random.below(data.len() / SECTOR)));
                    apply(&mut content.durable, &Op::Write(offset, data));
                }
                op if kept => apply(&mut content.durable, &op),
                _ => {}
            }
        }
        content.seen = content.durable.clone();
        content.life += 1;
        content.fuse = None;
    }
}

/// What a process has of a disk.
#[derive(Debug)]
pub(in crate::raft) struct Handle {
    disk: Disk,
    life: u64,
}

impl Handle {
    /// Runs an operation, unless the process is dead.
    fn run<T>(&self, changes: bool, run: impl FnOnce(&mut Content) -> T) -> io::Result<T> {
        let mut content = self.disk.0.lock();
        if content.life != self.life {
            return Err(io::Error::other("the process is dead"));
        }
        if changes && let Some(left) = &mut content.fuse {
            if *left == 0 {
                return Err(io::Error::other("the process dies"));
            }
            *left -= 1;
        }
        Ok(run(&mut content))
    }

    fn change(&self, op: Op) -> io::Result<()> {
        self.run(true, |content| {
            apply(&mut content.seen, &op);
            content.pending.push(op);
        })
    }
}

impl StorageBackend for Handle {
    fn len(&self) -> io::Result<u64> {
        self.run(false, |content| content.seen.len() as u64)
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        let offset = usize::try_from(offset).unwrap();
        self.run(false, |content| {
            let end = offset + out.len();
            let bytes = content.seen.get(offset..end).ok_or(io::ErrorKind::UnexpectedEof)?;
            out.copy_from_slice(bytes);
            Ok(())
        })?
    }

    fn set_len(&self, length: u64) -> io::Result<()> {
        self.change(Op::Length(usize::try_from(length).unwrap()))
    }

    fn sync_data(&self) -> io::Result<()> {
        self.run(true, |content| {
            for op in std::mem::take(&mut content.pending) {
                apply(&mut content.durable, &op);
            }
        })
    }

    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.change(Op::Write(usize::try_from(offset).unwrap(), data.to_vec()))
    }
}
