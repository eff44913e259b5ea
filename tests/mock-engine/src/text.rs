//! Generated text as a pure function of the prompt.
//!
//! A prompt is reduced to a digest of its canonical form; token `i` of sample `s` is a function of (digest, s, i)
//! only. Whoever holds the prompt's KV therefore writes the same bytes, be it one engine or a prefill and decode pair,
//! and no wire detail (whitespace in the JSON, field order, transfer fields) can change the text.

use serde_json::value::RawValue;

use crate::json::{Invalid, Object, text};

/// Plain words, none of which needs escaping in JSON; some have several bytes a character.
const WORDS: [&str; 64] = [
    "amber", "basin", "cedar", "delta", "ember", "fjord", "grain", "harbor", "inlet", "jade", "kelp", "lagoon",
    "meadow", "north", "orchard", "pebble", "quartz", "river", "summit", "tundra", "umber", "valley", "willow",
    "xenon", "yarrow", "zephyr", "arch", "birch", "cliff", "dune", "eddy", "fern", "glade", "heath", "isle", "juniper",
    "knoll", "ledge", "marsh", "nectar", "oasis", "pine", "quill", "ridge", "spruce", "thicket", "upland", "vista",
    "wharf", "yonder", "zinnia", "aurora", "brook", "canyon", "drift", "estuary", "fôret", "grün", "élan", "川", "山",
    "море", "🙂", "🌊",
];

/// What a prompt comes to once it has been read: enough to compute every token of its answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Prompt {
    /// Digest of the canonical prompt.
    pub(crate) digest: u64,
    /// Length in tokens: words, or ids, plus the chat template's.
    pub(crate) tokens: usize,
}

impl Prompt {
    fn of_text(prompt: &str) -> Self {
        Prompt {
            digest: Digest::new().part(b"text").part(prompt.as_bytes()).0,
            tokens: prompt.split_whitespace().count().max(1),
        }
    }

    fn of_ids(ids: &[i64]) -> Self {
        let mut digest = Digest::new().part(b"ids");
        for id in ids {
            digest = digest.part(&id.to_le_bytes());
        }
        Prompt { digest: digest.0, tokens: ids.len().max(1) }
    }

    /// The prompt of these tokens.
    pub(crate) fn of_token_ids(ids: &[u32]) -> Self {
        Self::of_ids(&ids.iter().map(|id| i64::from(*id)).collect::<Vec<_>>())
    }

    /// The prompt of sample `number` of this prompt: sample 0 is the prompt itself.
    pub(crate) fn sample(self, number: usize) -> Self {
        Prompt {
            digest: match number {
                0 => self.digest,
                other => mix(self.digest ^ mix(other as u64)),
            },
            ..self
        }
    }

    /// Token id `index` of the answer.
    pub(crate) fn token_id(self, index: usize) -> usize {
        (mix(self.digest.wrapping_add(index as u64)) % WORDS.len() as u64) as usize
    }

    /// Word `index` of the answer.
    pub(crate) fn word(self, index: usize) -> &'static str {
        WORDS.get(self.token_id(index)).copied().unwrap_or_default()
    }

    /// Appends the text of token `index` of the answer.
    pub(crate) fn write_token(self, index: usize, out: &mut Vec<u8>) {
        if index > 0 {
            out.push(b' ');
        }
        out.extend_from_slice(WORDS[self.token_id(index)].as_bytes());
    }

    /// Appends the first `count` tokens.
    pub(crate) fn write_tokens(self, count: usize, out: &mut Vec<u8>) {
        for index in 0..count {
            self.write_token(index, out);
        }
    }
}

/// The prompts of a field that holds text or token ids, alone or as a batch: `"a"`, `["a","b"]`, `[1,2]`, `[[1],[2]]`.
/// The flag is true when the field is a batch.
pub(crate) fn prompts(name: &str, value: &RawValue) -> Result<(Vec<Prompt>, bool), Invalid> {
    if let Some(prompt) = text(value) {
        return Ok((vec![Prompt::of_text(&prompt)], false));
    }
    let raw = value.get();
    let invalid = || format!("{name}: must be text, token ids, or a list of these");
    let items: Vec<&RawValue> = serde_json::from_str(raw).map_err(|_| invalid())?;
    let Some(first) = items.first() else {
        return Err(format!("{name}: must not be empty"));
    };
    match first.get().as_bytes().first() {
        Some(b'"') => items
            .iter()
            .map(|item| text(item).map(|prompt| Prompt::of_text(&prompt)))
            .collect::<Option<Vec<_>>>()
            .map(|prompts| (prompts, true))
            .ok_or_else(invalid),
        Some(b'[') => items
            .iter()
            .map(|item| serde_json::from_str::<Vec<i64>>(item.get()).map(|ids| Prompt::of_ids(&ids)))
            .collect::<Result<Vec<_>, _>>()
            .map(|prompts| (prompts, true))
            .map_err(|_| invalid()),
        _ => {
            serde_json::from_str::<Vec<i64>>(raw).map(|ids| (vec![Prompt::of_ids(&ids)], false)).map_err(|_| invalid())
        }
    }
}

/// The prompt that a chat's messages make: roles and contents, text parts as text, other parts as they are written.
pub(crate) fn chat(messages: &RawValue) -> Result<Prompt, Invalid> {
    let messages: Vec<Object<'_>> =
        serde_json::from_str(messages.get()).map_err(|_| "messages: must be a list of objects".to_owned())?;
    if messages.is_empty() {
        return Err("messages: must not be empty".to_owned());
    }
    let mut digest = Digest::new().part(b"chat");
    let mut tokens = 3;
    for message in &messages {
        let role = message.string("role")?.ok_or_else(|| "messages: role is missing".to_owned())?;
        digest = digest.part(role.as_bytes());
        tokens += 4;
        let Some(content) = message.get("content") else {
            digest = digest.part(b"");
            continue;
        };
        if let Some(content) = text(content) {
            digest = digest.part(content.as_bytes());
            tokens += content.split_whitespace().count();
            continue;
        }
        let parts: Vec<&RawValue> = serde_json::from_str(content.get())
            .map_err(|_| "messages: content must be text or a list of parts".to_owned())?;
        for part in parts {
            let written =
                Object::parse(part.get().as_bytes()).ok().and_then(|object| object.string("text").ok().flatten());
            match written {
                Some(written) => {
                    digest = digest.part(written.as_bytes());
                    tokens += written.split_whitespace().count();
                }
                None => {
                    digest = digest.part(part.get().as_bytes());
                    tokens += 16;
                }
            }
        }
    }
    Ok(Prompt { digest: digest.0, tokens })
}

/// FNV-1a over length-delimited parts, so that parts cannot run into each other.
struct Digest(u64);

impl Digest {
    fn new() -> Self {
        Digest(0xcbf2_9ce4_8422_2325)
    }

    fn part(self, bytes: &[u8]) -> Self {
        let step = |hash: u64, byte: &u8| (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3);
        let hash = bytes.iter().fold(self.0, step);
        Digest((bytes.len() as u64).to_le_bytes().iter().fold(hash, step))
    }
}

/// A bijection of 64-bit numbers that spreads neighbours (the finaliser of splitmix64).
pub(crate) fn mix(number: u64) -> u64 {
    let number = number.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let number = (number ^ (number >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let number = (number ^ (number >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    number ^ (number >> 31)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn raw(json: &str) -> &RawValue {
        serde_json::from_str(json).unwrap()
    }

    #[test]
    fn the_text_depends_on_the_prompt_and_not_on_how_it_is_written() {
        let plain = chat(raw(r#"[{"role":"user","content":"hi"}]"#)).unwrap();
        let spaced = chat(raw(r#"[ {"content" : "\u0068i", "role":"user"} ]"#)).unwrap();
        let other = chat(raw(r#"[{"role":"user","content":"ho"}]"#)).unwrap();
        assert_eq!(plain, spaced);
        assert_ne!(plain.digest, other.digest);
    }

    #[test]
    fn a_prompt_is_text_ids_or_a_batch_of_either() {
        let shape = |json| prompts("prompt", raw(json)).map(|(list, batch)| (list.len(), batch));
        assert_eq!(shape(r#""a b""#), Ok((1, false)));
        assert_eq!(shape(r#"["a"]"#), Ok((1, true)));
        assert_eq!(shape("[1,2,3]"), Ok((1, false)));
        assert_eq!(shape("[[1],[2]]"), Ok((2, true)));
        for wrong in ["{}", "[]", "[{}]", "3", r#"["a",1]"#] {
            assert!(shape(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn no_word_needs_escaping_in_json() {
        for word in WORDS {
            assert_eq!(crate::json::quoted(word), format!("\"{word}\""));
        }
    }
}
