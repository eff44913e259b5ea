//! The mock engines' tokenizer: a byte-level BPE whose files lie in `testdata/tokenizer`.
//!
//! A gateway has to read the files as it reads a published model's. Here is all that an engine needs of them: the bytes
//! of each token, and some way to say a text in tokens. Any sequence of tokens with the right bytes will do, as with a
//! real model, so this one is simply the longest token first.

use std::collections::HashMap;
use std::path::Path;
use std::sync::LazyLock;

use serde::Deserialize;

const TOKENIZER: &str = include_str!("../testdata/tokenizer/tokenizer.json");

/// The files that describe the tokenizer, by name.
pub(crate) const FILES: [(&str, &str); 5] = [
    ("tokenizer.json", TOKENIZER),
    ("tokenizer_config.json", include_str!("../testdata/tokenizer/tokenizer_config.json")),
    ("special_tokens_map.json", include_str!("../testdata/tokenizer/special_tokens_map.json")),
    ("generation_config.json", include_str!("../testdata/tokenizer/generation_config.json")),
    ("config.json", include_str!("../testdata/tokenizer/config.json")),
];

/// The folder with the tokenizer's files, for a gateway that loads them from disk.
pub fn tokenizer_path() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/testdata/tokenizer"))
}

/// The tokens of a text.
pub fn encode(text: &str) -> Vec<u32> {
    VOCABULARY.encode(text.as_bytes())
}

/// The text of tokens; special ones have none, and bytes that are no text are replaced.
pub fn decode(tokens: &[u32]) -> String {
    let bytes: Vec<u8> = tokens.iter().flat_map(|token| bytes_of(*token)).copied().collect();
    String::from_utf8_lossy(&bytes).into_owned()
}

/// The token that ends an answer.
pub fn end_of_answer() -> u32 {
    VOCABULARY.end
}

/// Number of tokens.
pub fn size() -> u32 {
    u32::try_from(VOCABULARY.bytes.len()).unwrap_or(u32::MAX)
}

/// The bytes of a token; none for special and unknown ones.
pub(crate) fn bytes_of(token: u32) -> &'static [u8] {
    let found = VOCABULARY.bytes.get(token as usize).filter(|_| !VOCABULARY.special.contains(&token));
    found.map_or(&[], Vec::as_slice)
}

#[derive(Deserialize)]
struct File {
    model: Model,
    added_tokens: Vec<Added>,
}

#[derive(Deserialize)]
struct Model {
    vocab: HashMap<String, u32>,
}

#[derive(Deserialize)]
struct Added {
    id: u32,
    content: String,
    special: bool,
}

struct Vocabulary {
    /// By token id.
    bytes: Vec<Vec<u8>>,
    /// Tokens that are no text.
    special: Vec<u32>,
    ids: HashMap<Vec<u8>, u32>,
    longest: usize,
    end: u32,
}

static VOCABULARY: LazyLock<Vocabulary> = LazyLock::new(Vocabulary::read);

impl Vocabulary {
    fn read() -> Self {
        // The file is part of this crate; a test reads it too.
        let file = serde_json::from_str::<File>(TOKENIZER)
            .unwrap_or_else(|_| File { model: Model { vocab: HashMap::new() }, added_tokens: Vec::new() });
        let stands_for = byte_characters();
        let plain = file.model.vocab.iter().map(|(spelled, id)| {
            (*id, spelled.chars().filter_map(|character| stands_for.get(&character).copied()).collect::<Vec<u8>>())
        });
        let added = file.added_tokens.iter().map(|token| (token.id, token.content.clone().into_bytes()));
        let mut all: Vec<(u32, Vec<u8>)> = plain.chain(added).collect();
        all.sort_by_key(|(id, _)| *id);
        let named = |name: &str| file.added_tokens.iter().find(|token| token.content == name).map(|token| token.id);
        Vocabulary {
            special: file.added_tokens.iter().filter(|token| token.special).map(|token| token.id).collect(),
            ids: all.iter().map(|(id, bytes)| (bytes.clone(), *id)).collect(),
            longest: all.iter().map(|(_, bytes)| bytes.len()).max().unwrap_or(0),
            end: named("<|im_end|>").unwrap_or_default(),
            bytes: all.into_iter().map(|(_, bytes)| bytes).collect(),
        }
    }

    fn encode(&self, mut text: &[u8]) -> Vec<u32> {
        let mut tokens = Vec::new();
        while !text.is_empty() {
            let found = (1..=self.longest.min(text.len())).rev().find_map(|length| {
                let (first, rest) = text.split_at(length);
                self.ids.get(first).map(|id| (*id, rest))
            });
            // Every byte is a token, so one is always found.
            let Some((token, rest)) = found else { return tokens };
            tokens.push(token);
            text = rest;
        }
        tokens
    }
}

/// Byte-level vocabularies spell every byte as one printable character: itself where it is one, else the next above 255.
fn byte_characters() -> HashMap<char, u8> {
    let mut moved = 0;
    (0..=u8::MAX)
        .map(|byte| {
            let printable = matches!(byte, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
            let code = if printable {
                u32::from(byte)
            } else {
                moved += 1;
                0xff + moved
            };
            (char::from_u32(code).unwrap_or_default(), byte)
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_text_has_tokens_and_they_have_its_bytes() {
        assert_eq!(size(), 892);
        for text in ["", " river summit", "naïve 川 🙂\n\t\u{0}", "<think>\nhm</think>", r#"{"name":"f"}"#] {
            let tokens = encode(text);
            assert_eq!(decode(&tokens), text);
            assert!(tokens.len() <= text.len());
        }
        assert_eq!(encode(" river").len(), 1);
        assert_eq!(encode("🙂").len(), 4, "some characters are several tokens");
        assert_eq!(encode("<tool_call>").len(), 1);
    }

    #[test]
    fn special_tokens_are_no_text() {
        assert_eq!(decode(&[end_of_answer()]), "");
        assert_eq!(encode("<|im_end|>"), [end_of_answer()]);
    }
}
