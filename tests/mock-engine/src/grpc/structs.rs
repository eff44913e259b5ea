//! JSON as the wire's `Struct`, in which SGLang and TokenSpeed say what they were started with.

use prost_types::value::Kind;
use prost_types::{ListValue, Struct, Value};
use serde_json::Value as Json;

/// Fields, the later of two with one name.
pub(super) fn of_fields<'a>(fields: impl IntoIterator<Item = (&'a str, Json)>) -> Struct {
    Struct { fields: fields.into_iter().map(|(name, value)| (name.to_owned(), of_json(value))).collect() }
}

fn of_json(json: Json) -> Value {
    let kind = match json {
        Json::Null => Kind::NullValue(0),
        Json::Bool(flag) => Kind::BoolValue(flag),
        Json::Number(number) => Kind::NumberValue(number.as_f64().unwrap_or_default()),
        Json::String(text) => Kind::StringValue(text),
        Json::Array(items) => Kind::ListValue(ListValue { values: items.into_iter().map(of_json).collect() }),
        Json::Object(fields) => Kind::StructValue(Struct {
            fields: fields.into_iter().map(|(name, value)| (name, of_json(value))).collect(),
        }),
    };
    Value { kind: Some(kind) }
}
