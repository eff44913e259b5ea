//! What routing may read of a request.
//!
//! Hints are the client's wishes: one that is malformed is no wish, never an error. The prompt is read only when a policy asks for it, and
//! once for all legs.

use std::borrow::Cow;
use std::cell::OnceCell;

use http::{HeaderMap, HeaderName};
use smg_engines::ClientBody;
use smg_engines::field::Field;
use smg_policies::{Partition, Policy, RequestView};

/// Longest routing key, in bytes.
const MAX_ROUTING_KEY: usize = 128;

/// The header by which a client names a worker of the leg, counted from 0 in the order of registration (SMG docs, consistent hashing).
const TARGET_WORKER: HeaderName = HeaderName::from_static("x-smg-target-worker");

/// What tells clients apart where there is no routing key, in this order.
const CLIENT: [&str; 2] = ["x-forwarded-for", "cookie"];

/// What routing may read of a request.
#[derive(Debug)]
pub struct Hints<'a> {
    body: &'a ClientBody,
    tokens: Option<&'a [u32]>,
    prompt: OnceCell<Prompt<'a>>,
    routing_key: Option<&'a str>,
    session: OnceCell<Option<String>>,
    client: Option<&'a str>,
    target_worker: Option<usize>,
}

#[derive(Debug)]
struct Prompt<'a> {
    text: Cow<'a, str>,
    token_ids: Option<Cow<'a, [u32]>>,
    cache_salt: Option<Cow<'a, str>>,
    extra_key: Option<Cow<'a, str>>,
    lora_path: Option<Cow<'a, str>>,
}

impl<'a> Hints<'a> {
    /// The hints of a request; the first of `routing_key_headers` (lower case) with a valid key counts.
    pub fn new(headers: &'a HeaderMap, body: &'a ClientBody, routing_key_headers: &[String]) -> Self {
        let valid = |key: &&str| key.len() <= MAX_ROUTING_KEY;
        Self {
            body,
            tokens: None,
            prompt: OnceCell::new(),
            routing_key: routing_key_headers.iter().find_map(|name| text(headers, name).filter(valid)),
            session: OnceCell::new(),
            client: CLIENT.iter().find_map(|name| text(headers, name)),
            target_worker: text(headers, TARGET_WORKER.as_str()).and_then(|index| index.parse().ok()),
        }
    }

    /// With the prompt as the gateway itself has tokenized it: what it will be in the caches of engines, template and tools included.
    #[must_use]
    pub fn with_tokens(mut self, tokens: Option<&'a [u32]>) -> Self {
        self.tokens = tokens;
        self
    }

    fn prompt(&self) -> &Prompt<'a> {
        self.prompt.get_or_init(|| Prompt::read(self.body, self.tokens))
    }

    /// The client's routing key.
    pub fn routing_key(&self) -> Option<&'a str> {
        self.routing_key
    }

    /// The place of the worker that the client insists on, among all workers of the leg.
    pub fn target_worker(&self) -> Option<usize> {
        self.target_worker
    }

    /// What the prompt costs to compute, in tokens: their number where the client sent tokens, else 1.3 for each word; at least 1.
    pub fn prompt_cost(&self) -> u64 {
        let prompt = self.prompt();
        let words = || (prompt.text.split_whitespace().count() as f64 * 1.3).ceil() as u64;
        prompt.token_ids.as_ref().map_or_else(words, |ids| ids.len() as u64).max(1)
    }

    /// What `policy` sees of the request.
    pub fn view<'v>(&'v self, model: &'v str, policy: &dyn Policy, now_ms: u64) -> RequestView<'v> {
        let view = RequestView::new(model).with_routing_key(self.routing_key).with_client(self.client).at(now_ms);
        let session = || self.session.get_or_init(|| lineage(&self.body.routing_string(Field::Rid)?)).as_deref();
        let view = if policy.reads_session() { view.with_session(session()) } else { view };
        if !policy.reads_prompt() {
            return view;
        }
        let prompt = self.prompt();
        let partition = Partition {
            cache_salt: prompt.cache_salt.as_deref(),
            extra_key: prompt.extra_key.as_deref(),
            lora_path: prompt.lora_path.as_deref(),
        };
        view.with_text(Some(&prompt.text)).with_token_ids(prompt.token_ids.as_deref()).with_partition(partition)
    }
}

impl<'a> Prompt<'a> {
    fn read(body: &'a ClientBody, tokens: Option<&'a [u32]>) -> Self {
        Self {
            // Where tokens are known they go before the text.
            text: if tokens.is_some() { Cow::Borrowed("") } else { body.routing_text() },
            token_ids: tokens.map(Cow::Borrowed).or_else(|| body.routing_token_ids().map(Cow::Owned)),
            cache_salt: body.routing_value(Field::CacheSalt),
            extra_key: body.routing_value(Field::ExtraKey),
            lora_path: body.routing_value(Field::LoraPath),
        }
    }
}

/// What the ids of a session's requests have in common: turns (`_t3`) and retries (`_r1`) are told apart at their ends.
fn lineage(id: &str) -> Option<String> {
    let mut rest = id;
    while let Some((before, number)) = rest.rsplit_once('_')
        && let Some(digits) = number.strip_prefix(['t', 'r'])
        && !digits.is_empty()
        && digits.bytes().all(|digit| digit.is_ascii_digit())
    {
        rest = before;
    }
    (1..=MAX_ROUTING_KEY).contains(&rest.len()).then(|| rest.to_owned())
}

/// A header's first value, if it is text and not empty.
fn text<'a>(headers: &'a HeaderMap, name: &str) -> Option<&'a str> {
    std::str::from_utf8(headers.get(name)?.as_bytes()).ok().filter(|text| !text.is_empty())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use bytes::Bytes;
    use http::HeaderValue;
    use smg_engines::Route;
    use smg_policies::{Leg, PolicyName, build};

    use super::*;

    fn headers(pairs: &[(&'static str, &[u8])]) -> HeaderMap {
        pairs
            .iter()
            .map(|(name, value)| (HeaderName::from_static(name), HeaderValue::from_bytes(value).unwrap()))
            .collect()
    }

    fn body(text: &'static str) -> ClientBody {
        ClientBody::parse(Bytes::from_static(text.as_bytes()), Route::Generate).unwrap()
    }

    fn names() -> Vec<String> {
        ["x-mine", "x-smg-routing-key"].map(str::to_owned).to_vec()
    }

    #[test]
    fn the_first_header_with_a_valid_key_counts_and_invalid_hints_are_none() {
        let body = body("{}");
        let long = [b'k'; 129];
        for (pairs, key) in [
            (&[("x-smg-routing-key", &b"alice"[..])][..], Some("alice")),
            (&[("x-smg-routing-key", b"alice"), ("x-mine", b"bob")], Some("bob")),
            (&[("x-smg-routing-key", b"alice"), ("x-mine", b"")], Some("alice")),
            (&[("x-smg-routing-key", b"alice"), ("x-mine", &long)], Some("alice")),
            (&[("x-smg-routing-key", &long[..128])], Some(std::str::from_utf8(&long[..128]).unwrap())),
            (&[("x-smg-routing-key", b"caf\xc3\xa9")], Some("caf\u{e9}")),
            (&[("x-smg-routing-key", b"caf\xe9")], None),
            (&[], None),
        ] {
            assert_eq!(Hints::new(&headers(pairs), &body, &names()).routing_key(), key, "{pairs:?}");
        }
        for (value, index) in [(&b"2"[..], Some(2)), (b"-1", None), (b"two", None), (b"", None)] {
            assert_eq!(Hints::new(&headers(&[("x-smg-target-worker", value)]), &body, &names()).target_worker(), index);
        }
    }

    #[test]
    fn the_session_of_an_id_is_what_stands_before_turns_and_retries() {
        for (id, session) in [
            ("chat-7", Some("chat-7")),
            ("chat-7_t1", Some("chat-7")),
            ("chat-7_t12_r3", Some("chat-7")),
            ("chat_7_t", Some("chat_7_t")),
            ("chat_x1_t2", Some("chat_x1")),
            ("_t1", None),
            ("", None),
        ] {
            assert_eq!(lineage(id).as_deref(), session, "{id}");
        }
        assert_eq!(lineage(&"k".repeat(129)), None);
        let sticky = smg_policies::Tuning { sticky: Some(Default::default()), ..Default::default() };
        let policy = smg_policies::build_with(PolicyName::Random, Leg::Prefill, &sticky).unwrap();
        for (text, session) in [(r#"{"rid":"a_t1"}"#, Some("a")), (r#"{"rid":["a"]}"#, None), ("{}", None)] {
            let (headers, body) = (headers(&[]), body(text));
            assert_eq!(Hints::new(&headers, &body, &names()).view("m", &*policy, 0).session, session, "{text}");
        }
    }

    #[test]
    fn a_prompt_costs_its_tokens_or_a_little_more_than_its_words() {
        let headers = headers(&[]);
        for (text, cost) in [
            (r#"{"input_ids":[1,2,3,4,5]}"#, 5),
            (r#"{"text":"once upon a time"}"#, 6),
            (r#"{"text":"one"}"#, 2),
            ("{}", 1),
        ] {
            assert_eq!(Hints::new(&headers, &body(text), &names()).prompt_cost(), cost, "{text}");
        }
    }

    #[test]
    fn the_prompt_is_read_for_policies_that_ask_for_it_only() {
        let body = body(r#"{"text":"once","cache_salt":"s","lora_path":["l"]}"#);
        let headers = headers(&[("cookie", b"c"), ("x-forwarded-for", b"10.0.0.1")]);
        let hints = Hints::new(&headers, &body, &names());
        let policy = |name| build(name, Leg::Prefill).unwrap();
        let blind = hints.view("m", &*policy(PolicyName::Manual), 3);
        assert_eq!((blind.text, blind.client, blind.now_ms), (None, Some("10.0.0.1"), 3));
        assert!(hints.prompt.get().is_none());
        let seeing = hints.view("m", &*policy(PolicyName::CacheAware), 3);
        assert_eq!((seeing.text, seeing.token_ids), (Some("once"), None));
        let partition = Partition { cache_salt: Some("s"), extra_key: None, lora_path: Some(r#"["l"]"#) };
        assert_eq!(seeing.partition, partition);
    }

    #[test]
    fn a_prompt_that_the_gateway_tokenized_is_seen_as_its_tokens() {
        let body = body(r#"{"text":"once upon a time","cache_salt":"s"}"#);
        let headers = headers(&[]);
        let hints = Hints::new(&headers, &body, &names()).with_tokens(Some(&[7, 8, 9]));
        let view = hints.view("m", &*build(PolicyName::PrefixHash, Leg::Prefill).unwrap(), 0);
        assert_eq!((view.token_ids, view.text, view.partition.cache_salt), (Some(&[7, 8, 9][..]), Some(""), Some("s")));
        assert_eq!(hints.prompt_cost(), 3);
    }
}
