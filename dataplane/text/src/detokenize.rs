//! Token ids to text, as they arrive.
//!
//! A token need not be whole characters. Where tokens are bytes, these are put together and whole characters are output; at
//! most three bytes wait for the rest of theirs.
//!
//! Elsewhere what a token reads like may depend on the one before it, so two offsets are kept: text is decoded from `prefix`
//! on, and what the tokens between `prefix` and `read` gave has been output. The difference is output when it is longer and
//! does not end with U+FFFD, the sign of a character whose other bytes are still to come. Both offsets then move, so that
//! each token is decoded a few times at most.

use crate::bytes::take_characters;
use crate::tokenizer::{TokenizeError, Tokenizer};

/// Tokens of a prompt that decide how its continuation reads.
pub const TAIL: usize = 5;

/// Tokens after which text is output even though it seems to end within a character. A character is four bytes, and so at
/// most four tokens: a longer run is no text.
const PATIENCE: usize = 16;

/// Decodes one sample's tokens.
#[derive(Debug, Clone)]
pub struct Detokenizer {
    skip_special: bool,
    /// The beginning of a character, where tokens are bytes.
    bytes: Vec<u8>,
    /// Elsewhere, tokens from the prefix on.
    window: Vec<u32>,
    /// How many of them have been output.
    read: usize,
    /// What those read like.
    prefix: String,
}

impl Detokenizer {
    /// A detokenizer of what follows `prompt`, of which the last [`TAIL`] tokens count (none for a new conversation turn);
    /// `skip_special`: whether special tokens leave no text.
    ///
    /// # Errors
    /// The prompt's tokens cannot be decoded.
    pub fn new(tokenizer: &Tokenizer, prompt: &[u32], skip_special: bool) -> Result<Self, TokenizeError> {
        let tail = &prompt[prompt.len().saturating_sub(TAIL)..];
        let mut new = Self { skip_special, bytes: Vec::new(), window: Vec::new(), read: 0, prefix: String::new() };
        if tokenizer.bytes_of(0).is_some() {
            // The prompt may end within a character, which the output completes.
            let mut seen = String::new();
            for id in tail {
                new.push(tokenizer, *id, &mut seen)?;
            }
        } else if !tail.is_empty() {
            new.window = tail.to_vec();
            new.read = tail.len();
            new.prefix = tokenizer.decode(tail, skip_special)?;
        }
        Ok(new)
    }

    /// Takes the next token and adds what is certain to `text`.
    ///
    /// # Errors
    /// The token cannot be decoded.
    pub fn push(&mut self, tokenizer: &Tokenizer, id: u32, text: &mut String) -> Result<(), TokenizeError> {
        // It leaves no text, and would only make the window longer.
        if self.skip_special && tokenizer.is_special(id) {
            return Ok(());
        }
        if let Some(bytes) = tokenizer.bytes_of(id) {
            self.bytes.extend_from_slice(bytes);
            take_characters(&mut self.bytes, text);
            return Ok(());
        }
        self.window.push(id);
        let patient = self.window.len() - self.read < PATIENCE;
        self.advance(tokenizer, text, patient)
    }

    /// There are no more tokens: adds what was held back.
    ///
    /// # Errors
    /// The tokens cannot be decoded.
    pub fn finish(&mut self, tokenizer: &Tokenizer, text: &mut String) -> Result<(), TokenizeError> {
        if !std::mem::take(&mut self.bytes).is_empty() {
            text.push(char::REPLACEMENT_CHARACTER);
        }
        if self.window.len() == self.read { Ok(()) } else { self.advance(tokenizer, text, false) }
    }

    fn advance(&mut self, tokenizer: &Tokenizer, text: &mut String, patient: bool) -> Result<(), TokenizeError> {
        let decoded = tokenizer.decode(&self.window, self.skip_special)?;
        if patient && (decoded.len() <= self.prefix.len() || decoded.ends_with(char::REPLACEMENT_CHARACTER)) {
            return Ok(());
        }
        // The prefix reads the same whatever follows it, except where half a character was output in impatience.
        let common = decoded.char_indices().zip(self.prefix.chars()).find(|((_, one), other)| one != other);
        let from = common.map_or_else(|| self.prefix.len().min(decoded.len()), |((at, _), _)| at);
        text.push_str(decoded.get(from..).unwrap_or_default());
        self.window.drain(..self.read);
        self.read = self.window.len();
        self.prefix = tokenizer.decode(&self.window, self.skip_special)?;
        Ok(())
    }
}
