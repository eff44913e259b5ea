//! A JSON object read once, keys in order, values left as text.
//!
//! Engines read a handful of fields of bodies that may be large. Keeping each value as a slice of the body makes the
//! parse one pass without a tree. As in Python's `json`, the last of several equal keys wins, and `null` is absence.

use std::borrow::Cow;
use std::fmt;

use serde::de::{Deserialize, Deserializer, Error as _, MapAccess, Visitor};
use serde_json::value::RawValue;

/// The fields of one JSON object.
pub(crate) struct Object<'a>(Vec<(Cow<'a, str>, &'a RawValue)>);

/// What is wrong with a field, in words for the client.
pub(crate) type Invalid = String;

impl<'a> Object<'a> {
    /// An object without fields.
    pub(crate) fn empty() -> Self {
        Object(Vec::new())
    }

    /// Reads `bytes`; anything but one JSON object is an error.
    pub(crate) fn parse(bytes: &'a [u8]) -> Result<Self, Invalid> {
        serde_json::from_slice(bytes).map_err(|error| error.to_string())
    }

    /// The text of a field that is present and not null.
    pub(crate) fn get(&self, name: &str) -> Option<&'a RawValue> {
        let (_, value) = self.0.iter().rev().find(|(key, _)| key == name)?;
        (value.get() != "null").then_some(value)
    }

    /// A field of a type that serde knows.
    pub(crate) fn read<T: Deserialize<'a>>(&self, name: &str) -> Result<Option<T>, Invalid> {
        self.get(name)
            .map(|value| serde_json::from_str(value.get()))
            .transpose()
            .map_err(|error| format!("{name}: {error}"))
    }

    /// A string field, escapes resolved.
    pub(crate) fn string(&self, name: &str) -> Result<Option<Cow<'a, str>>, Invalid> {
        self.get(name).map(|value| text(value).ok_or_else(|| format!("{name}: must be a string"))).transpose()
    }

    /// A boolean field; absent is false.
    pub(crate) fn flag(&self, name: &str) -> Result<bool, Invalid> {
        Ok(self.read(name)?.unwrap_or(false))
    }

    /// A count; `8.0` is taken as 8, as the engines' validation does.
    pub(crate) fn count(&self, name: &str) -> Result<Option<u64>, Invalid> {
        match self.read::<f64>(name)? {
            None => Ok(None),
            Some(number) if number >= 0.0 && number.fract() == 0.0 && number < 9e15 => Ok(Some(number as u64)),
            Some(number) => Err(format!("{name}: must be a whole number, got {number}")),
        }
    }

    /// A nested object; absent is empty.
    pub(crate) fn object(&self, name: &str) -> Result<Object<'a>, Invalid> {
        self.get(name).map_or_else(
            || Ok(Object::empty()),
            |value| Object::parse(value.get().as_bytes()).map_err(|error| format!("{name}: {error}")),
        )
    }

    /// True when no field is there.
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// The string that `value` is, if it is one. Borrows when nothing is escaped.
pub(crate) fn text(value: &RawValue) -> Option<Cow<'_, str>> {
    let raw = value.get();
    let inner = raw.strip_prefix('"')?.strip_suffix('"')?;
    if inner.contains('\\') {
        return serde_json::from_str(raw).ok().map(Cow::Owned);
    }
    Some(Cow::Borrowed(inner))
}

/// `text` as a JSON string with its quotes.
pub(crate) fn quoted(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}

impl<'de: 'a, 'a> Deserialize<'de> for Object<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Fields;
        impl<'de> Visitor<'de> for Fields {
            type Value = Vec<(Cow<'de, str>, &'de RawValue)>;
            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("a JSON object")
            }
            fn visit_map<M: MapAccess<'de>>(self, mut map: M) -> Result<Self::Value, M::Error> {
                let mut fields = Vec::with_capacity(16);
                while let Some((key, value)) = map.next_entry::<&RawValue, &RawValue>()? {
                    let key = text(key).ok_or_else(|| M::Error::custom("a key is no string"))?;
                    fields.push((key, value));
                }
                Ok(fields)
            }
        }
        deserializer.deserialize_map(Fields).map(Object)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn the_last_of_equal_keys_wins_and_null_is_absence() {
        let body = br#"{"n":1,"\u006e":2.0,"model":null,"text":"a\"b"}"#;
        let object = Object::parse(body).unwrap();
        assert_eq!(object.count("n").unwrap(), Some(2));
        assert!(object.get("model").is_none());
        assert_eq!(object.string("text").unwrap().unwrap(), "a\"b");
    }

    #[test]
    fn only_an_object_is_a_body() {
        for body in ["[1]", "3", "\"x\"", "{\"a\":", ""] {
            assert!(Object::parse(body.as_bytes()).is_err(), "{body}");
        }
    }
}
