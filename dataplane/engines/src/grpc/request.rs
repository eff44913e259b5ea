//! What one dispatch asks of an engine, before it is any engine's request.

use serde_json::Value;
use smg_apis::Generation;
use smg_apis::generation::Sampling;

/// One dispatch: one prompt, all or one of its samples.
#[derive(Debug, Clone)]
pub struct Ask<'a> {
    /// The id that both legs carry. New for every attempt: an engine that holds KV for a decode to come keeps the id
    /// in use until its lease ends.
    pub request_id: &'a str,
    /// What the client wants.
    pub generation: &'a Generation,
    /// The prompt.
    pub token_ids: &'a [u32],
    /// Tokens that are one of the client's stop strings each: all that an engine without a tokenizer (SGLang) can be told
    /// of stop strings.
    pub stop_tokens: &'a [u32],
    /// What the model's publisher recommends where the client says nothing.
    pub defaults: &'a SamplingDefaults,
    /// Samples of this dispatch; at least 1.
    pub samples: u32,
    /// Whether the engine answers token by token.
    pub stream: bool,
}

impl Ask<'_> {
    /// How tokens are drawn: as the client says, else as the model's publisher does.
    pub(super) fn sampling(&self) -> Sampling {
        let mut sampling = self.generation.sampling.clone();
        self.defaults.fill(&mut sampling);
        sampling
    }
}

/// A request that the chosen engine cannot be sent. The client's fault (400).
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum RequestError {
    /// TokenSpeed counts seeds from 0.
    #[error("`seed` is {seed}: the engine that serves this model takes seeds from 0")]
    NegativeSeed {
        /// The seed asked for.
        seed: i64,
    },
}

/// Sampling parameters that a model's publisher recommends: a worker's `default_sampling_params_json` label.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct SamplingDefaults {
    temperature: Option<f32>,
    top_p: Option<f32>,
    top_k: Option<i32>,
    min_p: Option<f32>,
    repetition_penalty: Option<f32>,
}

impl SamplingDefaults {
    /// No recommendation.
    pub const NONE: Self = Self { temperature: None, top_p: None, top_k: None, min_p: None, repetition_penalty: None };

    /// Reads a label. What is no object or no number is no default.
    pub fn parse(label: Option<&str>) -> Self {
        let parsed = label.and_then(|label| serde_json::from_str::<Value>(label).ok());
        let number = |name: &str| parsed.as_ref()?.get(name)?.as_f64().filter(|number| number.is_finite());
        let float = |name: &str| number(name).map(|number| number as f32);
        Self {
            temperature: float("temperature"),
            top_p: float("top_p"),
            top_k: number("top_k").map(|number| number as i32),
            min_p: float("min_p"),
            repetition_penalty: float("repetition_penalty"),
        }
    }

    /// Sets what is unset.
    pub fn fill(&self, sampling: &mut Sampling) {
        sampling.temperature = sampling.temperature.or(self.temperature);
        sampling.top_p = sampling.top_p.or(self.top_p);
        sampling.top_k = sampling.top_k.or(self.top_k);
        sampling.min_p = sampling.min_p.or(self.min_p);
        sampling.repetition_penalty = sampling.repetition_penalty.or(self.repetition_penalty);
    }
}

/// The id of sample `index` of a dispatch that is sent sample by sample (SMG PD docs, Parallel Sampling).
pub fn sample_id(request_id: &str, index: u32) -> String {
    format!("{request_id}-{index}")
}

/// A regular expression for one of `choices`, for engines that know no choices.
pub(super) fn choice_regex(choices: &[String]) -> String {
    let mut regex = String::from("(");
    for (index, choice) in choices.iter().enumerate() {
        if index > 0 {
            regex.push('|');
        }
        for character in choice.chars() {
            if r"\.+*?()|[]{}^$".contains(character) {
                regex.push('\\');
            }
            regex.push(character);
        }
    }
    regex.push(')');
    regex
}

/// A `u32` as the wire's signed number.
pub(super) fn signed(number: u32) -> i32 {
    i32::try_from(number).unwrap_or(i32::MAX)
}
