//! Frames: how a message lies in a table of the log.
//!
//! `{format u8, crc32c of the payload u32 LE, payload}`. The database has checksums of its own over whole pages; a frame's checksum also
//! covers what happens between its encoder and the page, and is checked on every read.

use prost::Message;
use thiserror::Error;

/// The one format so far.
const FORMAT: u8 = 1;
const HEAD: usize = 5;

/// Why bytes are not the frame they should be.
#[derive(Debug, Error)]
pub(crate) enum FrameError {
    /// Shorter than its head.
    #[error("the frame is cut off")]
    Short,
    /// A format of another version.
    #[error("unknown frame format {0}: the data was written by another version")]
    Format(u8),
    /// The bytes changed since they were written.
    #[error("the checksum does not match: the data is damaged")]
    Checksum,
    /// Intact bytes that are not this message.
    #[error("the payload does not decode: {0}")]
    Payload(#[from] prost::DecodeError),
}

/// The frame of a message.
pub(crate) fn frame(message: &impl Message) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(HEAD + message.encoded_len());
    bytes.extend_from_slice(&[FORMAT, 0, 0, 0, 0]);
    // A Vec grows as needed, so encoding into it cannot fail.
    let _ = message.encode(&mut bytes);
    let checksum = crc32c::crc32c(&bytes[HEAD..]);
    bytes[1..HEAD].copy_from_slice(&checksum.to_le_bytes());
    bytes
}

/// The message in a frame.
pub(crate) fn unframe<M: Message + Default>(bytes: &[u8]) -> Result<M, FrameError> {
    let (head, payload) = bytes.split_first_chunk::<HEAD>().ok_or(FrameError::Short)?;
    let [format, checksum @ ..] = *head;
    if format != FORMAT {
        return Err(FrameError::Format(format));
    }
    if u32::from_le_bytes(checksum) != crc32c::crc32c(payload) {
        return Err(FrameError::Checksum);
    }
    Ok(M::decode(payload)?)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use smg_messages::disk as pb;

    #[test]
    fn any_flipped_bit_of_a_frame_is_noticed() {
        let vote = pb::Vote { term: 7, node_id: 3, committed: true };
        let good = frame(&vote);
        assert_eq!(unframe::<pb::Vote>(&good).unwrap(), vote);
        for bit in 0..good.len() * 8 {
            let mut bad = good.clone();
            bad[bit / 8] ^= 1 << (bit % 8);
            assert!(unframe::<pb::Vote>(&bad).is_err(), "bit {bit}");
        }
        for cut in 0..good.len() {
            assert!(unframe::<pb::Vote>(&good[..cut]).is_err(), "cut at {cut}");
        }
    }
}
