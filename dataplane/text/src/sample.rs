//! One sample of an engine's output: ids in, pieces out.

use std::sync::Arc;

use smg_apis::{MatchedStop, Piece};

use crate::detokenize::Detokenizer;
use crate::model::TextModel;
use crate::reader::{self, OutputReader};
use crate::stop::StopMatcher;
use crate::tokenizer::TokenizeError;

/// How a sample's output ends and what is shown of it.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct SampleRules {
    /// Strings that end it.
    pub stop: Vec<String>,
    /// Tokens within which no stop string ends it.
    pub stops_behind: u32,
    /// Tokens that end it, beside the model's own.
    pub stop_token_ids: Vec<u32>,
    /// The model's own tokens do not end it.
    pub ignore_eos: bool,
    /// What ended it is shown.
    pub keep_stop: bool,
    /// Special tokens leave no text.
    pub skip_special_tokens: bool,
}

/// One sample while it arrives.
///
/// After a stop, whatever the engine still sends is ignored: the stream may be read to its end.
pub struct Sample {
    model: Arc<TextModel>,
    detokenizer: Detokenizer,
    stops: StopMatcher,
    /// Tokens still to come within which no stop string counts.
    unstoppable: u32,
    stop_tokens: Vec<u32>,
    keep_stop: bool,
    reader: Box<dyn OutputReader>,
    stopped_by: Option<u32>,
    reasoning_tokens: u32,
    finished: bool,
}

impl Sample {
    /// A sample of what follows `prompt` (empty for a turn of a chat), read by `reader`.
    ///
    /// # Errors
    /// The prompt's last tokens cannot be decoded.
    pub fn new(
        model: Arc<TextModel>,
        prompt: &[u32],
        rules: SampleRules,
        reader: Box<dyn OutputReader>,
    ) -> Result<Self, TokenizeError> {
        let detokenizer = Detokenizer::new(&model.tokenizer, prompt, rules.skip_special_tokens)?;
        let mut stop_tokens = rules.stop_token_ids;
        if !rules.ignore_eos {
            stop_tokens.extend(model.tokenizer.eos_ids());
        }
        stop_tokens.sort_unstable();
        Ok(Self {
            model,
            detokenizer,
            stops: StopMatcher::new(rules.stop, rules.keep_stop),
            unstoppable: rules.stops_behind,
            stop_tokens,
            keep_stop: rules.keep_stop,
            reader,
            stopped_by: None,
            reasoning_tokens: 0,
            finished: false,
        })
    }

    /// Takes the next tokens and returns what is certain by now.
    ///
    /// # Errors
    /// A token cannot be decoded: the engine speaks of another vocabulary. The sample is of no use any more.
    pub fn push(&mut self, ids: &[u32]) -> Result<Vec<Piece>, TokenizeError> {
        let mut pieces = Vec::new();
        let mut text = String::new();
        for id in ids {
            if self.stopped() || self.finished {
                break;
            }
            self.reasoning_tokens += u32::from(self.reader.reasoning());
            let stops = self.stop_tokens.binary_search(id).is_ok();
            if stops {
                self.stopped_by = Some(*id);
            }
            if !stops || self.keep_stop {
                self.detokenizer.push(&self.model.tokenizer, *id, &mut text)?;
                self.show(&mut text, &mut pieces);
            }
            self.unstoppable = self.unstoppable.saturating_sub(1);
        }
        Ok(pieces)
    }

    /// The output has ended: returns what was held back. What comes after it is ignored.
    ///
    /// # Errors
    /// The last tokens cannot be decoded.
    pub fn finish(&mut self) -> Result<Vec<Piece>, TokenizeError> {
        let mut pieces = Vec::new();
        if std::mem::replace(&mut self.finished, true) {
            return Ok(pieces);
        }
        let mut text = String::new();
        if self.stops.matched().is_none() {
            self.detokenizer.finish(&self.model.tokenizer, &mut text)?;
            self.show(&mut text, &mut pieces);
        }
        let held = self.stops.finish();
        let pushed = self.reader.push(&held);
        for piece in pushed.into_iter().chain(self.reader.finish()) {
            reader::append(&mut pieces, piece);
        }
        Ok(pieces)
    }

    fn show(&mut self, text: &mut String, pieces: &mut Vec<Piece>) {
        if text.is_empty() {
            return;
        }
        let visible = if self.unstoppable > 0 { self.stops.pass(text) } else { self.stops.push(text) };
        text.clear();
        for piece in self.reader.push(&visible) {
            reader::append(pieces, piece);
        }
    }

    /// Whether a stop has come: the engine need not go on.
    #[must_use]
    pub fn stopped(&self) -> bool {
        self.stopped_by.is_some() || self.stops.matched().is_some()
    }

    /// What ended the output: a stop string, or a token, be it the request's or the model's own.
    #[must_use]
    pub fn matched_stop(&self) -> Option<MatchedStop> {
        let text = self.stops.matched().map(|text| MatchedStop::Text(text.to_owned()));
        text.or_else(|| self.stopped_by.map(MatchedStop::Token))
    }

    /// Tokens so far that were part of the reasoning.
    #[must_use]
    pub fn reasoning_tokens(&self) -> u32 {
        self.reasoning_tokens
    }
}

impl std::fmt::Debug for Sample {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Sample").field("stopped", &self.stopped()).finish_non_exhaustive()
    }
}
