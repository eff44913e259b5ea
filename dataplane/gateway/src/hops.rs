//! Requests that come back.
//!
//! A worker's URL may lead to a gateway: to another fleet's, which is a way to stack fleets, or, by mistake, back to this one, which would
//! multiply each request until its time is over. So whatever a gateway sends to a worker over HTTP names the gateways it has come through,
//! and a request that names this one, or too many, goes no further.
//!
//! Invariant: what a client writes into the header can have its own request refused, and nothing else; only what could be the name of a
//! gateway is sent on.

use http::{HeaderMap, HeaderName, HeaderValue};

/// The gateways that a request has come through, oldest first: names separated by commas.
pub const HOPS: HeaderName = HeaderName::from_static("x-smg-hops");
/// Most gateways before this one.
const MAX_HOPS: usize = 3;
/// Longest name that is taken for a gateway's, in bytes.
const MAX_NAME: usize = 64;

/// What this gateway calls itself towards others. Two gateways may be given the same id by their operators; no two processes have the same
/// name.
#[derive(Debug)]
pub struct Hops {
    own: HeaderValue,
}

impl Hops {
    /// Those of the gateway process of this name, which must be fit for a header.
    pub fn new(name: &str) -> Self {
        // A name that is not fit would be no name: then loops end after the most hops.
        Self { own: HeaderValue::from_str(name).unwrap_or(HeaderValue::from_static("smg")) }
    }

    /// What a request says that begins here.
    pub fn own(&self) -> HeaderValue {
        self.own.clone()
    }

    /// What a request says that is sent on behalf of one with these headers.
    pub fn onward(&self, inbound: &HeaderMap) -> HeaderValue {
        if !inbound.contains_key(HOPS) {
            return self.own();
        }
        let names: Vec<&[u8]> = names(inbound).chain([self.own.as_bytes()]).collect();
        HeaderValue::from_bytes(&names.join(&b", "[..])).unwrap_or_else(|_| self.own())
    }

    /// Whether a request with these headers has been here before, or has come a way that is too long to be meant.
    pub fn is_loop(&self, inbound: &HeaderMap) -> bool {
        names(inbound).any(|name| name == self.own.as_bytes()) || names(inbound).nth(MAX_HOPS).is_some()
    }
}

fn names(headers: &HeaderMap) -> impl Iterator<Item = &[u8]> {
    let names = headers.get_all(HOPS).into_iter().flat_map(|value| value.as_bytes().split(|byte| *byte == b','));
    let fits = |name: &&[u8]| (1..=MAX_NAME).contains(&name.len()) && name.iter().all(u8::is_ascii_graphic);
    names.map(<[u8]>::trim_ascii).filter(fits)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn inbound(values: &[&str]) -> HeaderMap {
        values.iter().map(|value| (HOPS, HeaderValue::from_bytes(value.as_bytes()).unwrap())).collect()
    }

    #[test]
    fn a_request_is_refused_when_it_has_been_here_or_has_come_too_far() {
        let hops = Hops::new("me");
        for (values, is_loop) in [
            (&[][..], false),
            (&["a"], false),
            (&["a, b", "c"], false),
            (&["a, b,c, d"], true),
            (&["a,me"], true),
            (&["a", " me "], true),
            (&["me2"], false),
            (&["a,,b, ,c"], false),
        ] {
            assert_eq!(hops.is_loop(&inbound(values)), is_loop, "{values:?}");
        }
    }

    #[test]
    fn what_is_sent_on_names_those_before_and_this_one_and_nothing_that_is_no_name() {
        let hops = Hops::new("me");
        let long = "x".repeat(65);
        for (values, onward) in [
            (&[][..], "me"),
            (&["a"], "a, me"),
            (&["a,b", "c"], "a, b, c, me"),
            (&["n\u{e4}me", "a b", &long, ""], "me"),
        ] {
            assert_eq!(hops.onward(&inbound(values)), onward, "{values:?}");
        }
        assert_eq!(hops.own(), "me");
    }
}
