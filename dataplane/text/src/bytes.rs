//! The bytes of each token of a byte-level tokenizer.
//!
//! Most models of today have a vocabulary of byte strings, written in an alphabet of 256 printable characters (GPT-2's). What
//! such a token reads like does not depend on its neighbours, so its bytes can be looked up once and for all: decoding is
//! then putting bytes together, many times cheaper than asking the tokenizer again for every token.

use tokenizers::{DecoderWrapper, Tokenizer};

/// Ids that a table may have: no model has as many, and a damaged file shall not take the memory.
const MOST: usize = 1 << 22;

/// Bytes by id.
#[derive(Debug)]
pub(crate) struct ByteTable {
    /// Where each id's bytes begin, and at last where they end.
    starts: Vec<u32>,
    bytes: Vec<u8>,
    longest: usize,
}

impl ByteTable {
    /// The table of a tokenizer, if its tokens are bytes.
    pub(crate) fn new(tokenizer: &Tokenizer) -> Option<Self> {
        if !matches!(tokenizer.get_decoder(), Some(DecoderWrapper::ByteLevel(_))) {
            return None;
        }
        let count = tokenizer.get_vocab(true).values().max().map_or(0, |id| *id as usize + 1);
        if count > MOST {
            return None;
        }
        let alphabet = alphabet();
        let mut table = Self { starts: Vec::with_capacity(count + 1), bytes: Vec::new(), longest: 1 };
        for id in 0..count {
            table.starts.push(u32::try_from(table.bytes.len()).ok()?);
            let Some(token) = u32::try_from(id).ok().and_then(|id| tokenizer.id_to_token(id)) else { continue };
            let before = table.bytes.len();
            for next in token.chars() {
                let byte = alphabet.get(next as usize).copied().flatten();
                let Some(byte) = byte else {
                    // Not in the alphabet: an added token, which stands for itself.
                    table.bytes.truncate(before);
                    table.bytes.extend_from_slice(token.as_bytes());
                    break;
                };
                table.bytes.push(byte);
            }
            table.longest = table.longest.max(table.bytes.len() - before);
        }
        table.starts.push(u32::try_from(table.bytes.len()).ok()?);
        Some(table)
    }

    /// The bytes of a token; none for an id that is none.
    pub(crate) fn get(&self, id: u32) -> &[u8] {
        match self.starts.get(id as usize..).unwrap_or_default() {
            [start, end, ..] => self.bytes.get(*start as usize..*end as usize).unwrap_or_default(),
            _ => &[],
        }
    }

    /// Bytes of the longest token.
    pub(crate) fn longest(&self) -> usize {
        self.longest
    }
}

/// The byte that each character of the alphabet stands for: printable ones for themselves, the others in order from U+0100.
fn alphabet() -> [Option<u8>; 0x144] {
    let mut alphabet = [None; 0x144];
    let mut other = 0x100;
    for byte in 0..=u8::MAX {
        let printable = matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
        let at = if printable { usize::from(byte) } else { other };
        other += usize::from(!printable);
        if let Some(entry) = alphabet.get_mut(at) {
            *entry = Some(byte);
        }
    }
    alphabet
}

/// Moves what is whole characters from the beginning of `bytes` to `text`; what can be none becomes U+FFFD. At most three
/// bytes stay: the beginning of a character.
pub(crate) fn take_characters(bytes: &mut Vec<u8>, text: &mut String) {
    let mut rest = bytes.as_slice();
    loop {
        match std::str::from_utf8(rest) {
            Ok(valid) => {
                text.push_str(valid);
                bytes.clear();
                return;
            }
            Err(error) => {
                let (valid, after) = rest.split_at(error.valid_up_to());
                text.push_str(std::str::from_utf8(valid).unwrap_or_default());
                let Some(wrong) = error.error_len() else {
                    let kept = after.len();
                    bytes.drain(..bytes.len() - kept);
                    return;
                };
                text.push(char::REPLACEMENT_CHARACTER);
                rest = &after[wrong..];
            }
        }
    }
}
