//! What a policy sees: the candidates, and of the request only what placement may depend on.

use smallvec::SmallVec;

/// Identity of a worker, stable over its registration: the 128 bits of its id.
pub type WorkerKey = u128;

/// Characters that stand for one token where only text is known: the usual ratio of English text.
pub(crate) const CHARS_PER_TOKEN: usize = 4;

/// A worker that may serve the leg.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Candidate<'a> {
    /// Its identity.
    pub id: WorkerKey,
    /// Its URL, with the rank suffix if it is one rank of an engine.
    pub url: &'a str,
    /// Requests this gateway has in flight on it.
    pub load: u64,
    /// What its engine last reported. None if it never did, or so long ago that it no longer counts.
    pub report: Option<LoadReport>,
}

impl<'a> Candidate<'a> {
    /// A worker that has reported nothing.
    pub const fn new(id: WorkerKey, url: &'a str, load: u64) -> Self {
        Self { id, url, load, report: None }
    }

    /// The same worker with its engine's report.
    #[must_use]
    pub const fn with_report(mut self, report: Option<LoadReport>) -> Self {
        self.report = report;
        self
    }
}

/// An engine's own account of its load, summed over its ranks, and what this gateway sent it since.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct LoadReport {
    /// Requests running.
    pub running: u64,
    /// Requests waiting.
    pub waiting: u64,
    /// Prompt tokens of the waiting requests that no cache holds, where the engine counts them.
    pub waiting_uncached_tokens: Option<u64>,
    /// Share of the KV cache in use, 0 to 1, averaged over ranks.
    pub kv_usage: f64,
    /// Tokens per second, where the engine measures it.
    pub throughput: Option<f64>,
    /// Requests this gateway has sent since the report.
    pub dispatched_requests: u64,
    /// Their prompt tokens, estimated where unknown.
    pub dispatched_tokens: u64,
}

/// What keeps the KV of equal prompts apart: engines never share KV between different values.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Partition<'a> {
    /// `cache_salt` of the request.
    pub cache_salt: Option<&'a str>,
    /// `extra_key` of the request.
    pub extra_key: Option<&'a str>,
    /// `lora_path` of the request.
    pub lora_path: Option<&'a str>,
}

/// What policies may know about the request. Whatever is absent, no policy fails: it falls back as it documents.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct RequestView<'a> {
    /// The model that serves the request.
    pub model: &'a str,
    /// The prompt's text.
    pub text: Option<&'a str>,
    /// The prompt's token ids; where both are known they go before the text.
    pub token_ids: Option<&'a [u32]>,
    /// What keeps its KV apart from that of equal prompts.
    pub partition: Partition<'a>,
    /// The client's routing key (`X-SMG-Routing-Key`), already checked by the caller.
    pub routing_key: Option<&'a str>,
    /// What the ids of a session's requests have in common, where there is no routing key.
    pub session: Option<&'a str>,
    /// What else tells clients apart where there is no routing key: `X-Forwarded-For`, else `Cookie`.
    pub client: Option<&'a str>,
    /// The candidate that the client insists on (`X-SMG-Target-Worker`), as an index.
    pub target_worker: Option<usize>,
    /// Milliseconds on a clock that never runs backwards. Left at 0, nothing ever expires.
    pub now_ms: u64,
}

impl<'a> RequestView<'a> {
    /// A request for `model` of which nothing else is known.
    pub const fn new(model: &'a str) -> Self {
        Self {
            model,
            text: None,
            token_ids: None,
            partition: Partition { cache_salt: None, extra_key: None, lora_path: None },
            routing_key: None,
            session: None,
            client: None,
            target_worker: None,
            now_ms: 0,
        }
    }

    /// With the prompt's text.
    #[must_use]
    pub const fn with_text(mut self, text: Option<&'a str>) -> Self {
        self.text = text;
        self
    }

    /// With the prompt's token ids.
    #[must_use]
    pub const fn with_token_ids(mut self, token_ids: Option<&'a [u32]>) -> Self {
        self.token_ids = token_ids;
        self
    }

    /// With what keeps its KV apart.
    #[must_use]
    pub const fn with_partition(mut self, partition: Partition<'a>) -> Self {
        self.partition = partition;
        self
    }

    /// With the client's routing key.
    #[must_use]
    pub const fn with_routing_key(mut self, routing_key: Option<&'a str>) -> Self {
        self.routing_key = routing_key;
        self
    }

    /// With what the ids of its session's requests have in common.
    #[must_use]
    pub const fn with_session(mut self, session: Option<&'a str>) -> Self {
        self.session = session;
        self
    }

    /// With what else tells clients apart.
    #[must_use]
    pub const fn with_client(mut self, client: Option<&'a str>) -> Self {
        self.client = client;
        self
    }

    /// With the candidate that the client insists on.
    #[must_use]
    pub const fn with_target_worker(mut self, target_worker: Option<usize>) -> Self {
        self.target_worker = target_worker;
        self
    }

    /// At this time.
    #[must_use]
    pub const fn at(mut self, now_ms: u64) -> Self {
        self.now_ms = now_ms;
        self
    }

    /// The routing key; an empty one is none.
    pub(crate) fn key(&self) -> Option<&'a str> {
        self.routing_key.filter(|key| !key.is_empty())
    }

    /// What names the session.
    pub(crate) fn session(&self) -> Option<&'a str> {
        self.key().or_else(|| self.session.filter(|session| !session.is_empty()))
    }

    /// The prompt in its better known form; an empty one is none.
    pub(crate) fn prompt(&self) -> Option<Prompt<'a>> {
        let tokens = self.token_ids.filter(|ids| !ids.is_empty()).map(Prompt::Tokens);
        tokens.or_else(|| self.text.filter(|text| !text.is_empty()).map(Prompt::Text))
    }
}

/// A prompt that is not empty.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Prompt<'a> {
    Tokens(&'a [u32]),
    Text(&'a str),
}

impl<'a> Prompt<'a> {
    /// Its length in characters, tokens counted as [`CHARS_PER_TOKEN`] each.
    pub(crate) fn chars(self) -> u64 {
        match self {
            Self::Tokens(ids) => ids.len() as u64 * CHARS_PER_TOKEN as u64,
            Self::Text(text) => text.chars().count() as u64,
        }
    }

    /// Whether it is at least `tokens` long.
    pub(crate) fn reaches(self, tokens: usize) -> bool {
        match self {
            Self::Tokens(ids) => ids.len() >= tokens,
            Self::Text(text) => tokens == 0 || text.chars().nth(tokens.saturating_mul(CHARS_PER_TOKEN) - 1).is_some(),
        }
    }

    /// The part within its first `tokens` tokens.
    pub(crate) fn head(self, tokens: usize) -> Self {
        match self {
            Self::Tokens(ids) => Self::Tokens(&ids[..ids.len().min(tokens)]),
            Self::Text(text) => {
                let end = text.char_indices().nth(tokens.saturating_mul(CHARS_PER_TOKEN));
                Self::Text(end.map_or(text, |(end, _)| &text[..end]))
            }
        }
    }

    /// Runs `with` on its bytes: UTF-8, or four little-endian bytes a token.
    pub(crate) fn bytes<R>(self, with: impl FnOnce(&[u8]) -> R) -> R {
        match self {
            Self::Text(text) => with(text.as_bytes()),
            Self::Tokens(ids) => {
                let mut bytes = SmallVec::<[u8; 2048]>::with_capacity(ids.len() * 4);
                for id in ids {
                    bytes.extend_from_slice(&id.to_le_bytes());
                }
                with(&bytes)
            }
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
mod tests {
    use super::*;

    fn text(prompt: Prompt<'_>) -> &str {
        match prompt {
            Prompt::Text(text) => text,
            Prompt::Tokens(_) => panic!("tokens"),
        }
    }

    #[test]
    fn a_head_of_text_counts_characters_and_never_cuts_one() {
        let prompt = Prompt::Text("äöüß🙂abc");
        assert_eq!(text(prompt.head(1)), "äöüß");
        assert_eq!(text(prompt.head(2)), "äöüß🙂abc");
        assert_eq!(text(prompt.head(usize::MAX)), "äöüß🙂abc");
        assert_eq!(text(prompt.head(0)), "");
        assert!(prompt.reaches(0) && prompt.reaches(2) && !prompt.reaches(3));
        assert_eq!(prompt.chars(), 8);
    }

    #[test]
    fn token_ids_go_before_text_and_empty_values_are_absent() {
        let request = RequestView::new("m").with_text(Some("text")).with_token_ids(Some(&[1, 2]));
        assert!(matches!(request.prompt(), Some(Prompt::Tokens([1, 2]))));
        assert!(matches!(request.with_token_ids(Some(&[])).prompt(), Some(Prompt::Text("text"))));
        assert!(request.with_token_ids(None).with_text(Some("")).prompt().is_none());
        assert_eq!(request.with_routing_key(Some("")).key(), None);
    }
}
