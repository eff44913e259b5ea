//! Reading JSON text without building a tree.
//!
//! The gateway forwards what the client wrote, so it needs to know *where* a value stands, not to own a copy of it.
//! These helpers walk one level of an object or array and hand out the original text of each part. Every walk checks
//! the whole text it is given; nothing is allocated unless a string carries escapes.
//!
//! A repeated key counts with its last value, as in Python's `json` module, which the engines use.

use std::borrow::Cow;
use std::fmt;

use serde::Deserializer as _;
use serde::de::{MapAccess, SeqAccess, Visitor};
use serde_json::value::RawValue;

/// Calls `each` with the raw text of every key (quotes included) and value of the object `text`.
pub(crate) fn each_member<'a>(text: &'a str, each: impl FnMut(&'a str, &'a str)) -> serde_json::Result<()> {
    let mut deserializer = serde_json::Deserializer::from_str(text);
    deserializer.deserialize_map(Members(each))?;
    deserializer.end()
}

/// Calls `each` with the raw text of every element of the array `text`.
pub(crate) fn each_element<'a>(text: &'a str, each: impl FnMut(&'a str)) -> serde_json::Result<()> {
    let mut deserializer = serde_json::Deserializer::from_str(text);
    deserializer.deserialize_seq(Elements(each))?;
    deserializer.end()
}

/// The raw value of `name` in the object `text`; none when `text` is no object, or the member is absent or `null`.
pub(crate) fn member<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    let mut found = None;
    each_member(text, |key, value| {
        if string(key).is_some_and(|key| key == name) {
            found = Some(value);
        }
    })
    .ok()?;
    found.filter(|value| *value != "null")
}

/// The string that the JSON string literal `raw` stands for; none for any other value and for text that is no
/// Unicode (a lone surrogate escape).
pub(crate) fn string(raw: &str) -> Option<Cow<'_, str>> {
    let inner = raw.strip_prefix('"')?.strip_suffix('"')?;
    if memchr::memchr(b'\\', inner.as_bytes()).is_none() {
        return Some(Cow::Borrowed(inner));
    }
    serde_json::from_str::<String>(raw).ok().map(Cow::Owned)
}

/// The value of a JSON number that is a whole number of at least one. `2.0` counts as 2, as the engines' own
/// validation has it.
pub(crate) fn positive_integer(raw: &str) -> Option<u64> {
    /// Above 2^53 a float no longer names one whole number.
    const LARGEST_EXACT: f64 = 9_007_199_254_740_992.0;
    if let Ok(number) = raw.parse::<u64>() {
        return (number >= 1).then_some(number);
    }
    if !raw.starts_with(|first: char| first.is_ascii_digit()) {
        return None;
    }
    let number = raw.parse::<f64>().ok()?;
    (number.fract() == 0.0 && (1.0..=LARGEST_EXACT).contains(&number)).then_some(number as u64)
}

struct Members<F>(F);

impl<'de, F: FnMut(&'de str, &'de str)> Visitor<'de> for Members<F> {
    type Value = ();

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("a JSON object")
    }

    fn visit_map<A: MapAccess<'de>>(mut self, mut map: A) -> Result<(), A::Error> {
        while let Some((key, value)) = map.next_entry::<&'de RawValue, &'de RawValue>()? {
            (self.0)(key.get(), value.get());
        }
        Ok(())
    }
}

struct Elements<F>(F);

impl<'de, F: FnMut(&'de str)> Visitor<'de> for Elements<F> {
    type Value = ();

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("a JSON array")
    }

    fn visit_seq<A: SeqAccess<'de>>(mut self, mut sequence: A) -> Result<(), A::Error> {
        while let Some(element) = sequence.next_element::<&'de RawValue>()? {
            (self.0)(element.get());
        }
        Ok(())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
mod tests {
    use super::*;

    #[test]
    fn the_last_of_repeated_members_counts_and_null_is_absent() {
        assert_eq!(member(r#"{"a":1,"a" : [2] }"#, "a"), Some("[2]"));
        assert_eq!(member(r#"{"a":1,"a":null}"#, "a"), None);
        assert_eq!(member(r#"{"\u0061":3}"#, "a"), Some("3"));
        assert_eq!(member("[1]", "a"), None);
        assert_eq!(member(r#"{"a":1"#, "a"), None);
    }

    #[test]
    fn strings_are_unescaped_only_when_they_must_be() {
        assert!(matches!(string(r#""plain""#), Some(Cow::Borrowed("plain"))));
        assert_eq!(string(r#""a\nb""#).as_deref(), Some("a\nb"));
        assert_eq!(string(r#""\ud800""#), None);
        assert_eq!(string("12"), None);
    }

    #[test]
    fn whole_numbers_of_at_least_one_are_read() {
        for (raw, expected) in [
            ("1", Some(1)),
            ("128", Some(128)),
            ("2.0", Some(2)),
            ("1e2", Some(100)),
            ("0", None),
            ("-1", None),
            ("1.5", None),
            ("1e300", None),
            ("\"2\"", None),
            ("true", None),
            ("NaN", None),
            ("inf", None),
        ] {
            assert_eq!(positive_integer(raw), expected, "{raw}");
        }
    }
}
