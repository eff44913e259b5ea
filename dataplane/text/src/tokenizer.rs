//! A model's tokenizer.

use std::collections::HashSet;

use serde_json::Value;
use thiserror::Error;

use crate::bytes::ByteTable;
use crate::source::{Files, SourceError};

/// What went wrong with a text or with tokens.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum TokenizeError {
    /// The text cannot be tokenized.
    #[error("the text cannot be tokenized: {0}")]
    Encode(String),
    /// The tokens have no text.
    #[error("the tokens cannot be decoded: {0}")]
    Decode(String),
}

/// A tokenizer and what its configuration says about its special tokens.
#[derive(Debug)]
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    bytes: Option<ByteTable>,
    special: HashSet<u32>,
    eos: Vec<u32>,
    named: Vec<(String, String)>,
}

/// The special tokens that configurations name, and chat templates use.
const NAMED: [&str; 7] = ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];

impl Tokenizer {
    /// Reads `tokenizer.json`, and special tokens from `tokenizer_config.json`, `special_tokens_map.json`,
    /// `generation_config.json` and `config.json`, which may be missing.
    ///
    /// # Errors
    /// `tokenizer.json` is missing, or one of the files is not what it should be.
    pub fn new(files: &Files) -> Result<Self, SourceError> {
        let bytes = files.get("tokenizer.json").ok_or(SourceError::NoTokenizer)?;
        let unreadable = |error: tokenizers::Error| SourceError::Unreadable {
            file: "tokenizer.json".to_owned(),
            reason: error.to_string(),
        };
        let mut inner = tokenizers::Tokenizer::from_bytes(bytes).map_err(unreadable)?;
        // Prompts are neither cut nor filled up, whatever the file was saved with.
        inner.with_padding(None);
        inner.with_truncation(None).map_err(unreadable)?;

        let added = inner.get_added_tokens_decoder();
        let special = added.iter().filter(|(_, token)| token.special).map(|(id, _)| *id).collect();

        let configs = ["tokenizer_config.json", "special_tokens_map.json"].map(|file| files.json(file));
        let mut named = Vec::new();
        for name in NAMED {
            for config in &configs {
                let token = config.as_ref().map_err(Clone::clone)?.as_ref().and_then(|config| config.get(name));
                // Either the token itself or an object with its text.
                let text = token.and_then(|token| token.as_str().or_else(|| token.get("content")?.as_str()));
                if let Some(text) = text {
                    named.push((name.to_owned(), text.to_owned()));
                    break;
                }
            }
        }

        let mut eos = Vec::new();
        if let Some((_, text)) = named.iter().find(|(name, _)| name == "eos_token") {
            eos.extend(inner.token_to_id(text));
        }
        let configured = match files.json("generation_config.json")? {
            Some(config) if config.get("eos_token_id").is_some() => Some(config),
            _ => files.json("config.json")?,
        };
        match configured.as_ref().and_then(|config| config.get("eos_token_id")) {
            Some(Value::Array(ids)) => eos.extend(ids.iter().filter_map(id)),
            Some(one) => eos.extend(id(one)),
            None => {}
        }
        eos.sort_unstable();
        eos.dedup();
        Ok(Self { bytes: ByteTable::new(&inner), inner, special, eos, named })
    }

    /// The ids of `text`. `special`: whether the tokens that frame a text are added; a rendered chat prompt has them already.
    ///
    /// # Errors
    /// [`TokenizeError::Encode`].
    pub fn encode(&self, text: &str, special: bool) -> Result<Vec<u32>, TokenizeError> {
        let encoding = self.inner.encode_fast(text, special);
        let encoding = encoding.map_err(|error| TokenizeError::Encode(error.to_string()))?;
        Ok(encoding.get_ids().to_vec())
    }

    /// The text of `ids`.
    ///
    /// # Errors
    /// [`TokenizeError::Decode`].
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> Result<String, TokenizeError> {
        self.inner.decode(ids, skip_special).map_err(|error| TokenizeError::Decode(error.to_string()))
    }

    /// The text of one token on its own, special tokens spelled out; U+FFFD where it is not whole characters.
    #[must_use]
    pub fn text_of(&self, id: u32) -> String {
        match self.bytes_of(id) {
            Some(bytes) => String::from_utf8_lossy(bytes).into_owned(),
            None => self.decode(&[id], false).unwrap_or_default(),
        }
    }

    /// The bytes of one token, where tokens are bytes; empty if there is no such token.
    #[must_use]
    pub fn bytes_of(&self, id: u32) -> Option<&[u8]> {
        self.bytes.as_ref().map(|table| table.get(id))
    }

    /// The fewest tokens that a text of this many bytes can become: enough to refuse a text that cannot fit into a model's
    /// window before any work goes into it. 0 where nothing can be said.
    #[must_use]
    pub fn fewest_tokens(&self, bytes: usize) -> usize {
        let grows = self.inner.get_normalizer().is_some()
            || self.inner.get_added_tokens_decoder().values().any(|token| token.lstrip || token.rstrip);
        self.bytes.as_ref().filter(|_| !grows).map_or(0, |table| bytes.div_ceil(table.longest()))
    }

    /// The id of a token by its text.
    #[must_use]
    pub fn id_of(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }

    /// Whether `id` is a special token.
    #[must_use]
    pub fn is_special(&self, id: u32) -> bool {
        self.special.contains(&id)
    }

    /// The tokens that end a sequence, in ascending order.
    #[must_use]
    pub fn eos_ids(&self) -> &[u32] {
        &self.eos
    }

    /// The id of a stop string that is exactly one token, which an engine without a tokenizer can watch for.
    #[must_use]
    pub fn single_token(&self, text: &str) -> Option<u32> {
        match self.encode(text, false).as_deref() {
            // Some tokenizers put a space before what they are given: then the token is that of another text.
            Ok([id]) if self.decode(&[*id], false).is_ok_and(|decoded| decoded == text) => Some(*id),
            _ => None,
        }
    }

    /// Named special tokens (`bos_token`, ...) and their texts.
    #[must_use]
    pub fn named_tokens(&self) -> &[(String, String)] {
        &self.named
    }

    /// Number of ids, those of added tokens included.
    #[must_use]
    pub fn vocabulary(&self) -> usize {
        self.inner.get_vocab_size(true)
    }
}

fn id(value: &Value) -> Option<u32> {
    value.as_u64().and_then(|id| u32::try_from(id).ok())
}
