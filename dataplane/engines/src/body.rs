//! A client's request body: kept as bytes, read once.
//!
//! Engines must see what the client wrote, so the body is never turned into a typed request and back. One pass checks
//! that it is one JSON object and notes where each member stands; routing reads a few fields, and [`crate::splice`]
//! edits by those positions.
//!
//! Invariants:
//! - Every span lies inside `bytes`, on character boundaries, and spans are in ascending order.
//! - Only `model`, `stream` and `n` can make a valid JSON object unacceptable, because routing depends on them. All
//!   other fields are judged by the engine; here an unexpected shape reads as "not asked for".
//! - `null` reads as absent. Of duplicates the last one counts, as in the engines' own parser.

use std::borrow::Cow;
use std::ops::Range;

use bytes::Bytes;
use smallvec::SmallVec;

use crate::field::Field;
use crate::json;

/// The routes that lead to engines.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Route {
    /// OpenAI chat completions.
    ChatCompletions,
    /// OpenAI completions.
    Completions,
    /// SGLang's native generation.
    Generate,
    /// Anthropic messages.
    Messages,
    /// OpenAI responses.
    Responses,
    /// Reranking.
    Rerank,
    /// Token counting of Anthropic messages: generates nothing.
    CountTokens,
    /// Embeddings: there is nothing to decode.
    Embeddings,
    /// Classification: there is nothing to decode.
    Classify,
}

/// Which workers can serve a route.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Legs {
    /// A prefill and a decode, or one regular worker.
    Pair,
    /// One prefill, or one regular worker.
    PrefillOnly,
    /// One regular worker.
    RegularOnly,
}

impl Route {
    /// Every route, in declaration order.
    pub const ALL: [Route; 9] = [
        Self::ChatCompletions,
        Self::Completions,
        Self::Generate,
        Self::Messages,
        Self::Responses,
        Self::Rerank,
        Self::CountTokens,
        Self::Embeddings,
        Self::Classify,
    ];

    /// The path, the same at the gateway and at the engine.
    pub const fn path(self) -> &'static str {
        match self {
            Self::ChatCompletions => "/v1/chat/completions",
            Self::Completions => "/v1/completions",
            Self::Generate => "/generate",
            Self::Messages => "/v1/messages",
            Self::Responses => "/v1/responses",
            Self::Rerank => "/v1/rerank",
            Self::CountTokens => "/v1/messages/count_tokens",
            Self::Embeddings => "/v1/embeddings",
            Self::Classify => "/v1/classify",
        }
    }

    /// Value of the `endpoint` metric label.
    pub const fn endpoint_label(self) -> &'static str {
        match self {
            Self::ChatCompletions => "chat",
            Self::Completions => "completions",
            Self::Generate => "generate",
            Self::Messages => "messages",
            Self::Responses => "responses",
            Self::Rerank => "rerank",
            Self::CountTokens | Self::Embeddings | Self::Classify => "other",
        }
    }

    /// Which workers can serve it.
    pub const fn legs(self) -> Legs {
        match self {
            Self::CountTokens => Legs::PrefillOnly,
            Self::Embeddings | Self::Classify => Legs::RegularOnly,
            _ => Legs::Pair,
        }
    }

    /// Whether its errors and events have the shape of Anthropic's API.
    pub const fn is_anthropic(self) -> bool {
        matches!(self, Self::Messages | Self::CountTokens)
    }
}

/// Why a body is refused before any engine sees it. All of these are the client's fault (400).
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BodyError {
    /// The bytes are no JSON document.
    #[error("the request body is not valid JSON: {0}")]
    NotJson(String),
    /// The document is JSON but no object.
    #[error("the request body must be a JSON object")]
    NotAnObject,
    /// A field that routing reads has the wrong type.
    #[error("field `{field}` must be {expected}")]
    WrongType {
        /// Name of the field.
        field: &'static str,
        /// What it has to be, with its article.
        expected: &'static str,
    },
    /// The body is 4 GiB or larger.
    #[error("the request body is too large")]
    TooLarge,
}

/// What a prompt field holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Prompt {
    /// Absent, `null`, or of a shape no engine documents.
    Other,
    /// One prompt, as text or as one flat list of token ids.
    One,
    /// A list of this many prompts, also when it has just one.
    Batch(usize),
}

/// Position of a piece of the body, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Span {
    start: u32,
    end: u32,
}

impl Span {
    pub(crate) fn start(self) -> usize {
        self.start as usize
    }

    pub(crate) fn end(self) -> usize {
        self.end as usize
    }

    pub(crate) fn range(self) -> Range<usize> {
        self.start()..self.end()
    }
}

/// One `"key": value` of the top-level object.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Member {
    /// The key literal with its quotes.
    pub(crate) key: Span,
    pub(crate) value: Span,
    /// The field this key names, however it is spelled.
    pub(crate) field: Option<Field>,
}

/// A client's body, checked and indexed. Cloning it is cheap in bytes (they are shared) but copies the index.
#[derive(Debug, Clone)]
pub struct ClientBody {
    bytes: Bytes,
    route: Route,
    /// Position just behind the opening brace.
    pub(crate) inside: usize,
    pub(crate) members: SmallVec<[Member; 16]>,
    model: Option<String>,
    stream: bool,
    n: Option<u64>,
}

impl ClientBody {
    /// Checks and indexes a body received on `route`.
    pub fn parse(bytes: Bytes, route: Route) -> Result<Self, BodyError> {
        u32::try_from(bytes.len()).map_err(|_| BodyError::TooLarge)?;
        let text = std::str::from_utf8(&bytes).map_err(|error| BodyError::NotJson(error.to_string()))?;
        let base = text.as_ptr().addr();
        // Both casts are lossless: the part lies inside a text shorter than 4 GiB.
        let span = |part: &str| {
            let start = (part.as_ptr().addr() - base) as u32;
            Span { start, end: start + part.len() as u32 }
        };
        let mut members = SmallVec::new();
        json::each_member(text, |key, value| {
            let field = json::string(key).and_then(|name| Field::from_name(&name));
            members.push(Member { key: span(key), value: span(value), field });
        })
        .map_err(|error| {
            if error.is_data() { BodyError::NotAnObject } else { BodyError::NotJson(error.to_string()) }
        })?;
        let inside = memchr::memchr(b'{', &bytes).map_or(0, |brace| brace + 1);

        let mut body = Self { bytes, route, inside, members, model: None, stream: false, n: None };
        body.model = body.read(Field::Model, "a string", |raw| json::string(raw).map(Cow::into_owned))?;
        body.stream = body.read(Field::Stream, "a boolean", |raw| raw.parse().ok())?.unwrap_or(false);
        body.n = body.read(Field::N, "a positive integer", json::positive_integer)?;
        Ok(body)
    }

    fn read<T>(
        &self,
        field: Field,
        expected: &'static str,
        convert: impl FnOnce(&str) -> Option<T>,
    ) -> Result<Option<T>, BodyError> {
        self.value(field)
            .map(|raw| convert(raw).ok_or_else(|| BodyError::WrongType { field: field.name(), expected }))
            .transpose()
    }

    /// The bytes as the client sent them.
    pub fn bytes(&self) -> &Bytes {
        &self.bytes
    }

    /// The route the body came in on.
    pub fn route(&self) -> Route {
        self.route
    }

    /// The model the client asks for.
    pub fn model(&self) -> Option<&str> {
        self.model.as_deref()
    }

    /// Whether the client wants a stream.
    pub fn stream(&self) -> bool {
        self.stream
    }

    /// How many samples of each prompt the client wants: `n`, on `/generate` also `sampling_params.n` (the largest of
    /// them when there is one per prompt). At least 1.
    pub fn samples(&self) -> u64 {
        let n = self.n.unwrap_or(1);
        if self.route != Route::Generate {
            return n;
        }
        let mut samples = n;
        let mut consider = |parameters: &str| {
            let n = json::member(parameters, Field::N.name()).and_then(json::positive_integer);
            samples = samples.max(n.unwrap_or(1));
        };
        if let Some(parameters) = self.value(Field::SamplingParams) {
            if parameters.starts_with('[') {
                // The text was checked when the body was parsed, so the walk cannot fail.
                let _ = json::each_element(parameters, consider);
            } else {
                consider(parameters);
            }
        }
        samples
    }

    /// Whether the key occurs at all, be it with `null`.
    pub fn has(&self, field: Field) -> bool {
        self.members.iter().any(|member| member.field == Some(field))
    }

    /// The raw JSON text of a field; none when absent or `null`.
    pub fn value(&self, field: Field) -> Option<&str> {
        let member = self.members.iter().rfind(|member| member.field == Some(field))?;
        std::str::from_utf8(&self.bytes[member.value.range()]).ok().filter(|raw| *raw != "null")
    }

    /// Whether the client asks for log probabilities, in the manner of its route.
    pub fn wants_logprobs(&self) -> bool {
        match self.route {
            Route::ChatCompletions => self.value(Field::Logprobs) == Some("true"),
            Route::Completions => self.value(Field::Logprobs).is_some(),
            Route::Generate => match self.value(Field::ReturnLogprob) {
                Some("true") => true,
                // One flag per prompt of a batch.
                Some(list) if list.starts_with('[') => {
                    let mut any = false;
                    let _ = json::each_element(list, |flag| any |= flag == "true");
                    any
                }
                _ => false,
            },
            _ => false,
        }
    }

    /// What the route's prompt field holds. Messages are one prompt.
    pub fn prompt(&self) -> Prompt {
        match self.route {
            Route::Completions => self.value(Field::Prompt).map_or(Prompt::Other, prompt_shape),
            Route::Generate => {
                self.value(Field::InputIds).or_else(|| self.value(Field::Text)).map_or(Prompt::Other, prompt_shape)
            }
            _ => Prompt::One,
        }
    }

    /// How many prompts the request has. A completion may have text and embeddings side by side; an empty text is none then.
    pub fn prompt_count(&self) -> usize {
        let embeds = match self.value(Field::PromptEmbeds).filter(|_| self.route == Route::Completions) {
            Some(list) if list.starts_with('[') => {
                let mut embeds = 0;
                // The text was checked when the body was parsed, so the walk cannot fail.
                let _ = json::each_element(list, |_| embeds += 1);
                embeds
            }
            Some(_) => 1,
            None => 0,
        };
        let texts = match self.prompt() {
            Prompt::Batch(prompts) => prompts,
            Prompt::One if embeds > 0 && self.value(Field::Prompt) == Some("\"\"") => 0,
            Prompt::One => 1,
            Prompt::Other => 0,
        };
        texts + embeds
    }

    /// The text that content-based policies look at: chat message texts (reasoning included) joined by single spaces,
    /// the first prompt of a completion, `text` of `/generate`, system and text blocks of messages, the input of a
    /// response, the query of a reranking; empty when there is none, as with token ids.
    ///
    /// Computed on every call; only policies that need it should ask.
    pub fn routing_text(&self) -> Cow<'_, str> {
        match self.route {
            Route::ChatCompletions => Cow::Owned(joined(&[self.value(Field::Messages).map(chat_text)])),
            Route::Messages | Route::CountTokens => {
                let system = self.value(Field::System).map(content_text);
                Cow::Owned(joined(&[system, self.value(Field::Messages).map(chat_text)]))
            }
            Route::Responses => {
                let input = self.value(Field::Input);
                let text = input.map(|raw| if raw.starts_with('[') { chat_text(raw) } else { content_text(raw) });
                Cow::Owned(joined(&[self.value(Field::Instructions).map(content_text), text]))
            }
            Route::Rerank => self.value(Field::Query).and_then(json::string).unwrap_or_default(),
            Route::Embeddings | Route::Classify => self.value(Field::Input).and_then(first_text).unwrap_or_default(),
            Route::Completions => self.value(Field::Prompt).and_then(first_text).unwrap_or_default(),
            Route::Generate => self.value(Field::Text).and_then(first_text).unwrap_or_default(),
        }
    }

    /// The token ids that content-based policies look at, where the prompt is one or a list of them: those of the first
    /// prompt.
    ///
    /// Computed on every call; only policies that need it should ask.
    pub fn routing_token_ids(&self) -> Option<Vec<u32>> {
        let prompt = match self.route {
            Route::Completions => self.value(Field::Prompt),
            Route::Generate => self.value(Field::InputIds),
            Route::Embeddings | Route::Classify => self.value(Field::Input),
            _ => None,
        }?;
        if let Ok(ids) = serde_json::from_str(prompt) {
            return Some(ids);
        }
        let mut first = None;
        json::each_element(prompt, |element| {
            first.get_or_insert(element);
        })
        .ok()?;
        serde_json::from_str(first?).ok()
    }

    /// What `field` says, if it is a string.
    pub fn routing_string(&self, field: Field) -> Option<Cow<'_, str>> {
        self.value(field).and_then(json::string)
    }

    /// What `field` says, for comparing: the text of a string, the JSON text of anything else.
    pub fn routing_value(&self, field: Field) -> Option<Cow<'_, str>> {
        self.value(field).map(|raw| json::string(raw).unwrap_or(Cow::Borrowed(raw)))
    }
}

/// Judges a prompt by its first element: engines do not accept mixed lists.
fn prompt_shape(raw: &str) -> Prompt {
    if raw.starts_with('"') {
        return Prompt::One;
    }
    let Some(list) = raw.strip_prefix('[') else { return Prompt::Other };
    match list.trim_start().bytes().next() {
        Some(b'0'..=b'9' | b'-') => Prompt::One,
        Some(b'"' | b'[' | b']') => {
            let mut prompts = 0;
            let _ = json::each_element(raw, |_| prompts += 1);
            Prompt::Batch(prompts)
        }
        _ => Prompt::Other,
    }
}

/// The string itself, or the first string of a list.
fn first_text(raw: &str) -> Option<Cow<'_, str>> {
    if raw.starts_with('"') {
        return json::string(raw);
    }
    let mut first = None;
    json::each_element(raw, |element| {
        first.get_or_insert(element);
    })
    .ok()?;
    first.and_then(json::string)
}

/// The non-empty ones, joined by single spaces.
fn joined(texts: &[Option<String>]) -> String {
    let texts = texts.iter().flatten().filter(|text| !text.is_empty()).map(String::as_str);
    texts.collect::<Vec<_>>().join(" ")
}

/// A string, or the texts of a list of content parts.
fn content_text(raw: &str) -> String {
    let mut text = String::new();
    add_content(&mut text, raw);
    text
}

fn add_content(text: &mut String, raw: &str) {
    let mut add = |raw: &str| {
        if let Some(piece) = json::string(raw).filter(|piece| !piece.is_empty()) {
            if !text.is_empty() {
                text.push(' ');
            }
            text.push_str(&piece);
        }
    };
    if !raw.starts_with('[') {
        return add(raw);
    }
    let _ = json::each_element(raw, |part| {
        if let Some(piece) = json::member(part, "text") {
            add(piece);
        }
    });
}

fn chat_text(messages: &str) -> String {
    let mut text = String::new();
    let _ = json::each_element(messages, |message| {
        for name in ["content", "reasoning_content", "reasoning"] {
            if let Some(content) = json::member(message, name) {
                add_content(&mut text, content);
            }
        }
    });
    text
}
