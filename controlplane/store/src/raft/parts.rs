//! A snapshot on its way: cut into parts, and put together again.
//!
//! Each part says where it belongs and carries its checksum; the first one carries the length and checksum of the whole. A part that is not
//! the next one, or a byte that changed, ends the transfer with nothing installed.

use std::sync::Arc;

use smg_services::raft::{SnapshotHead, SnapshotPart};
use thiserror::Error;

/// Largest part, in bytes.
pub(crate) const PART_BYTES: usize = 1 << 20;
/// Largest snapshot, in bytes.
pub(crate) const MAX_BYTES: u64 = 256 << 20;

/// Why a transfer ended.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub(crate) enum PartError {
    #[error("the first part of the snapshot has no head")]
    NoHead,
    #[error("the snapshot has a second head")]
    SecondHead,
    #[error("the snapshot has {0} bytes, more than {MAX_BYTES}")]
    TooLarge(u64),
    #[error("a part of the snapshot for byte {found} came instead of that for byte {expected}")]
    Order { expected: u64, found: u64 },
    #[error("a part of the snapshot is empty or too large")]
    Size,
    #[error("the snapshot changed on its way")]
    Checksum,
    #[error("the snapshot ended after {0} bytes")]
    Cut(u64),
}

/// The parts of a snapshot's bytes.
pub(crate) fn cut(bytes: Arc<[u8]>, vote: smg_messages::disk::Vote) -> impl Iterator<Item = SnapshotPart> + Send {
    let head = SnapshotHead { vote: Some(vote), total_bytes: bytes.len() as u64, crc32c: crc32c::crc32c(&bytes) };
    (0..bytes.len().div_ceil(PART_BYTES)).map(move |index| {
        let start = index * PART_BYTES;
        let data = bytes[start..bytes.len().min(start + PART_BYTES)].to_vec();
        let head = (index == 0).then_some(head);
        SnapshotPart { head, offset: start as u64, crc32c: crc32c::crc32c(&data), data }
    })
}

/// Puts parts together.
#[derive(Debug, Default)]
pub(crate) struct Assembly {
    head: Option<SnapshotHead>,
    bytes: Vec<u8>,
}

impl Assembly {
    /// Takes the next part.
    pub fn take(&mut self, part: SnapshotPart) -> Result<(), PartError> {
        let total = match (&self.head, part.head) {
            (None, None) => return Err(PartError::NoHead),
            (Some(_), Some(_)) => return Err(PartError::SecondHead),
            (None, Some(head)) => {
                self.head = Some(head);
                head.total_bytes
            }
            (Some(head), None) => head.total_bytes,
        };
        if total > MAX_BYTES {
            return Err(PartError::TooLarge(total));
        }
        let expected = self.bytes.len() as u64;
        if part.offset != expected {
            return Err(PartError::Order { expected, found: part.offset });
        }
        let length = part.data.len() as u64;
        if length == 0 || part.data.len() > PART_BYTES || expected + length > total {
            return Err(PartError::Size);
        }
        if crc32c::crc32c(&part.data) != part.crc32c {
            return Err(PartError::Checksum);
        }
        self.bytes.extend_from_slice(&part.data);
        Ok(())
    }

    /// The whole, once every part was taken.
    pub fn finish(self) -> Result<(SnapshotHead, Vec<u8>), PartError> {
        let head = self.head.ok_or(PartError::NoHead)?;
        let length = self.bytes.len() as u64;
        if length != head.total_bytes {
            return Err(PartError::Cut(length));
        }
        if crc32c::crc32c(&self.bytes) != head.crc32c {
            return Err(PartError::Checksum);
        }
        Ok((head, self.bytes))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn parts(length: usize) -> (Vec<u8>, Vec<SnapshotPart>) {
        let bytes: Vec<u8> = (0..length).map(|n| (n % 251) as u8).collect();
        let vote = smg_messages::disk::Vote { term: 3, node_id: 1, committed: true };
        let parts = cut(Arc::from(bytes.as_slice()), vote).collect();
        (bytes, parts)
    }

    fn assemble(parts: Vec<SnapshotPart>) -> Result<Vec<u8>, PartError> {
        let mut assembly = Assembly::default();
        parts.into_iter().try_for_each(|part| assembly.take(part))?;
        Ok(assembly.finish()?.1)
    }

    #[test]
    fn parts_make_the_whole() {
        for length in [1, PART_BYTES - 1, PART_BYTES, PART_BYTES + 1, 3 * PART_BYTES + 7] {
            let (bytes, parts) = parts(length);
            assert_eq!(parts.len(), length.div_ceil(PART_BYTES));
            assert_eq!(assemble(parts).unwrap(), bytes);
        }
    }

    #[test]
    fn nothing_damaged_missing_or_out_of_order_is_put_together() {
        let (_, whole) = parts(3 * PART_BYTES);
        let change = |change: &dyn Fn(&mut Vec<SnapshotPart>)| {
            let mut parts = whole.clone();
            change(&mut parts);
            assemble(parts).unwrap_err()
        };
        assert_eq!(change(&|parts| parts[1].data[77] ^= 1), PartError::Checksum);
        assert!(matches!(change(&|parts| parts.swap(1, 2)), PartError::Order { .. }));
        assert!(matches!(change(&|parts| drop(parts.remove(1))), PartError::Order { .. }));
        assert_eq!(change(&|parts| drop(parts.remove(0))), PartError::NoHead);
        assert_eq!(change(&|parts| drop(parts.pop())), PartError::Cut(2 * PART_BYTES as u64));
        assert_eq!(change(&|parts| parts[1].head = parts[0].head), PartError::SecondHead);
        assert_eq!(change(&|parts| parts[0].head.as_mut().unwrap().crc32c ^= 1), PartError::Checksum);
        assert_eq!(change(&|parts| parts[0].head.as_mut().unwrap().total_bytes = 1), PartError::Size);
        let huge = change(&|parts| parts[0].head.as_mut().unwrap().total_bytes = MAX_BYTES + 1);
        assert_eq!(huge, PartError::TooLarge(MAX_BYTES + 1));
        assert_eq!(assemble(Vec::new()), Err(PartError::NoHead));
    }
}
