//! The tokenizer's files as one zip archive, as `GetTokenizer` sends it: entries stored as they are.

use std::sync::LazyLock;

use sha2::{Digest as _, Sha256};
use smg_services::engines::common::GetTokenizerChunk;

use crate::vocabulary::FILES;

/// Bytes of a piece: servicers send 64 KiB, but this archive is to come in more than one.
const PIECE: usize = 16 * 1024;

static ARCHIVE: LazyLock<Vec<u8>> = LazyLock::new(|| zip(&FILES.map(|(name, text)| (name, text.as_bytes()))));

/// The pieces of the archive; the last one bears the hash of all.
pub(super) fn pieces() -> Vec<GetTokenizerChunk> {
    let mut pieces: Vec<GetTokenizerChunk> =
        ARCHIVE.chunks(PIECE).map(|piece| GetTokenizerChunk { data: piece.to_vec(), sha256: String::new() }).collect();
    if let Some(last) = pieces.last_mut() {
        last.sha256 = Sha256::digest(&*ARCHIVE).iter().map(|byte| format!("{byte:02x}")).collect();
    }
    pieces
}

/// A zip archive of files, uncompressed. Sizes must fit 32 bits.
fn zip(files: &[(&str, &[u8])]) -> Vec<u8> {
    let (mut archive, mut directory) = (Vec::new(), Vec::new());
    for (name, content) in files {
        let offset = archive.len() as u32;
        // Version 2.0, no flags, stored, 1980-01-01.
        let mut facts = Vec::new();
        for half in [20u16, 0, 0, 0, 0x21] {
            facts.extend(half.to_le_bytes());
        }
        for word in [crc32(content), content.len() as u32, content.len() as u32] {
            facts.extend(word.to_le_bytes());
        }
        facts.extend((name.len() as u16).to_le_bytes());
        facts.extend(0u16.to_le_bytes());
        archive.extend(b"PK\x03\x04");
        archive.extend(&facts);
        archive.extend(name.as_bytes());
        archive.extend(*content);
        directory.extend(b"PK\x01\x02");
        directory.extend(20u16.to_le_bytes());
        directory.extend(&facts);
        // No comment, disk 0, no attributes.
        directory.extend([0; 10]);
        directory.extend(offset.to_le_bytes());
        directory.extend(name.as_bytes());
    }
    let (start, length) = (archive.len() as u32, directory.len() as u32);
    archive.extend(&directory);
    archive.extend(b"PK\x05\x06\0\0\0\0");
    for _ in 0..2 {
        archive.extend((files.len() as u16).to_le_bytes());
    }
    archive.extend(length.to_le_bytes());
    archive.extend(start.to_le_bytes());
    archive.extend(0u16.to_le_bytes());
    archive
}

/// The checksum that zip archives use.
fn crc32(bytes: &[u8]) -> u32 {
    let step = |crc: u32| if crc & 1 == 1 { crc >> 1 ^ 0xedb8_8320 } else { crc >> 1 };
    !bytes.iter().fold(u32::MAX, |crc, byte| (0..8).fold(crc ^ u32::from(*byte), |crc, _| step(crc)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_checksum_is_the_usual_one() {
        assert_eq!(crc32(b"123456789"), 0xcbf4_3926);
    }

    #[test]
    fn the_archive_comes_in_pieces_and_the_last_bears_the_hash() {
        let pieces = pieces();
        assert!(pieces.len() >= 2);
        let (last, others) = pieces.split_last().unzip();
        assert!(others.is_some_and(|others| others.iter().all(|piece| piece.sha256.is_empty())));
        assert_eq!(last.map(|piece| piece.sha256.len()), Some(64));
    }
}
