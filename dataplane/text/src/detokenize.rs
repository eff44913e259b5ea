//! Token ids to text, as they arrive.
//!
//! A token need not be whole characters, and what a token reads like may depend on the one before it. So two offsets are
//! kept: text is decoded from `prefix` on, and what the tokens between `prefix` and `read` gave has been output. The
//! difference is output when it is longer and does not end with U+FFFD, the sign of a character whose other bytes are still
//! to come. Both offsets then move, so that each token is decoded a few times at most.

use crate::tokenizer::{TokenizeError, Tokenizer};

/// Tokens of a prompt that decide how its continuation reads.
pub const TAIL: usize = 5;

/// Tokens after which text is output even though it seems to end within a character. A character is four bytes, and so at
/// most four tokens: a longer run is no text.
const PATIENCE: usize = 16;

/// Decodes one sample's tokens.
#[derive(Debug, Clone)]
pub struct Detokenizer {
    /// Tokens from the prefix on.
    window: Vec<u32>,
    /// How many of them have been output.
    read: usize,
    /// What those read like.
    prefix: String,
    skip_special: bool,
}

impl Detokenizer {
    /// A detokenizer of what follows `prompt`, of which the last [`TAIL`] tokens count (none for a new conversation turn);
    /// `skip_special`: whether special tokens leave no text.
    ///
    /// # Errors
    /// The prompt's tokens cannot be decoded.
    pub fn new(tokenizer: &Tokenizer, prompt: &[u32], skip_special: bool) -> Result<Self, TokenizeError> {
        let window = prompt[prompt.len().saturating_sub(TAIL)..].to_vec();
        let prefix = if window.is_empty() { String::new() } else { tokenizer.decode(&window, skip_special)? };
        Ok(Self { read: window.len(), window, prefix, skip_special })
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
        self.window.push(id);
        let patient = self.window.len() - self.read < PATIENCE;
        self.advance(tokenizer, text, patient)
    }

    /// There are no more tokens: adds what was held back.
    ///
    /// # Errors
    /// The tokens cannot be decoded.
    pub fn finish(&mut self, tokenizer: &Tokenizer, text: &mut String) -> Result<(), TokenizeError> {
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
