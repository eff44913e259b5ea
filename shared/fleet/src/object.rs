//! Reading nested objects of what clients send.
//!
//! Derived readers take a struct from a list as well, its fields by position. Nothing here means that: a list in the place of an object is
//! a mistake, and reading it would set fields nobody named.

use serde::Deserialize;
use serde::de::{DeserializeOwned, Deserializer, Error};
use serde_json::{Map, Value};

fn read<T: DeserializeOwned, E: Error>(fields: Map<String, Value>) -> Result<T, E> {
    T::deserialize(Value::Object(fields)).map_err(E::custom)
}

/// Reads a struct from an object.
pub(crate) fn required<'de, D: Deserializer<'de>, T: DeserializeOwned>(from: D) -> Result<T, D::Error> {
    read(Map::deserialize(from)?)
}

/// Reads a struct from an object, or nothing from `null`.
pub(crate) fn optional<'de, D: Deserializer<'de>, T: DeserializeOwned>(from: D) -> Result<Option<T>, D::Error> {
    Option::<Map<String, Value>>::deserialize(from)?.map(read).transpose()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use crate::policy::PolicyDocument;
    use crate::worker::{WorkerPatch, WorkerSpec};

    #[test]
    fn a_list_is_never_read_as_an_object() {
        for text in [r#"{"retry":[5]}"#, r#"{"circuit_breaker":[]}"#, r#"{"health":["/x"]}"#, r#"{"registration":[1]}"#]
        {
            assert!(serde_json::from_str::<PolicyDocument>(text).is_err(), "{text}");
        }
        for text in [r#"{"url":"http://w","health":[]}"#, r#"{"url":"http://w","resilience":[3]}"#] {
            assert!(serde_json::from_str::<WorkerSpec>(text).is_err(), "{text}");
        }
        assert!(serde_json::from_str::<WorkerPatch>(r#"{"health":[1]}"#).is_err());
    }

    #[test]
    fn objects_null_and_nothing_are_read() {
        let document: PolicyDocument = serde_json::from_str(r#"{"retry":{"max_retries":2},"health":null}"#).unwrap();
        assert_eq!(document.retry.unwrap().max_retries, Some(2));
        assert_eq!((document.health, document.circuit_breaker), (None, None));
        let spec: WorkerSpec = serde_json::from_str(r#"{"url":"http://w","health":{"timeout_secs":1}}"#).unwrap();
        assert_eq!(spec.health.timeout_secs, Some(1));
    }
}
