//! Request ids: the client's, or one minted here.

use http::{HeaderMap, HeaderName, HeaderValue};
use rand::Rng;

/// The header of a request's id.
pub const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
/// Longest accepted id, in bytes.
const MAX_BYTES: usize = 128;
/// Random characters of a minted id.
const MINTED_CHARS: usize = 24;

/// The id of a request: the first acceptable one of `headers_in_order`, else one minted for `path`.
pub fn of(headers: &HeaderMap, headers_in_order: &[String], path: &str) -> String {
    let sent = headers_in_order.iter().filter_map(|name| headers.get(name)).find_map(accept);
    sent.unwrap_or_else(|| mint(path))
}

/// An id of 1 to 128 visible ASCII characters.
fn accept(value: &HeaderValue) -> Option<String> {
    let text = value.to_str().ok()?;
    let visible = text.bytes().all(|byte| (0x21..=0x7e).contains(&byte));
    (visible && !text.is_empty() && text.len() <= MAX_BYTES).then(|| text.to_owned())
}

fn mint(path: &str) -> String {
    let prefix = [
        ("/chat/completions", "chatcmpl-"),
        ("/completions", "cmpl-"),
        ("/generate", "gnt-"),
        ("/responses", "resp-"),
        ("/messages", "msg_"),
    ]
    .into_iter()
    .find(|(suffix, _)| path.ends_with(suffix))
    .map_or("req-", |(_, prefix)| prefix);
    let mut id = String::with_capacity(prefix.len() + MINTED_CHARS);
    id.push_str(prefix);
    id.extend(rand::rng().sample_iter(rand::distr::Alphanumeric).take(MINTED_CHARS).map(char::from));
    id
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn names() -> Vec<String> {
        ["x-request-id", "x-trace-id"].map(str::to_owned).to_vec()
    }

    #[test]
    fn the_first_acceptable_id_is_taken_as_it_is() {
        let mut headers = HeaderMap::new();
        headers.insert("x-trace-id", HeaderValue::from_static("t-1"));
        assert_eq!(of(&headers, &names(), "/"), "t-1");
        headers.insert("x-request-id", HeaderValue::from_static("r 1"));
        assert_eq!(of(&headers, &names(), "/"), "t-1", "white space is not accepted");
        headers.insert("x-request-id", HeaderValue::from_static("r-1"));
        assert_eq!(of(&headers, &names(), "/"), "r-1");
        headers.insert("x-request-id", HeaderValue::from_str(&"a".repeat(129)).unwrap());
        assert_eq!(of(&headers, &names(), "/"), "t-1");
    }

    #[test]
    fn a_minted_id_says_its_endpoint_and_is_new_each_time() {
        let mint = |path| of(&HeaderMap::new(), &names(), path);
        for (path, prefix) in [
            ("/v1/chat/completions", "chatcmpl-"),
            ("/v1/completions", "cmpl-"),
            ("/generate", "gnt-"),
            ("/workers", "req-"),
        ] {
            let id = mint(path);
            assert!(id.starts_with(prefix) && id.len() == prefix.len() + 24, "{id}");
            assert_ne!(id, mint(path));
        }
    }
}
