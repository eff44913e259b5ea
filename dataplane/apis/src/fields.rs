//! Reading the members of a JSON object, one field at a time.
//!
//! Every reader takes its value out of the object, so that large values move instead of being copied. `null` reads as absent;
//! of repeated members the last one counts. A value of the wrong type is refused with the field's full name; members that nobody
//! asks for are ignored. Whole numbers may be written `2.0`, as the engines' own validation has it.

use std::ops::RangeInclusive;

use serde_json::{Map, Value};

use crate::refusal::Refusal;

/// An object whose members are being read.
#[derive(Debug)]
pub(crate) struct Fields {
    members: Map<String, Value>,
    /// What stands before a member's name in messages: empty, or a path with its dot.
    prefix: String,
}

impl Fields {
    /// The object that a request's body is.
    pub fn parse(body: &[u8]) -> Result<Self, Refusal> {
        match serde_json::from_slice(body) {
            Ok(Value::Object(members)) => Ok(Self { members, prefix: String::new() }),
            Ok(_) => Err(Refusal::json("the request body must be a JSON object")),
            Err(error) => Err(Refusal::json(format!("the request body is not valid JSON: {error}"))),
        }
    }

    /// The object that stands at `path`.
    pub fn of(value: Value, path: &str) -> Result<Self, Refusal> {
        match value {
            Value::Object(members) => Ok(Self { members, prefix: format!("{path}.") }),
            _ => Err(Refusal::wrong_type(path, "an object")),
        }
    }

    /// The full name of a member.
    pub fn path(&self, name: &str) -> String {
        format!("{}{name}", self.prefix)
    }

    /// Any value.
    pub fn value(&mut self, name: &str) -> Option<Value> {
        self.members.get_mut(name).map(Value::take).filter(|value| !value.is_null())
    }

    /// A look at a value, which stays.
    pub fn peek(&self, name: &str) -> Option<&Value> {
        self.members.get(name).filter(|value| !value.is_null())
    }

    fn read<T>(
        &mut self,
        name: &str,
        expected: &str,
        convert: impl FnOnce(Value) -> Option<T>,
    ) -> Result<Option<T>, Refusal> {
        let Some(value) = self.value(name) else { return Ok(None) };
        convert(value).map(Some).ok_or_else(|| Refusal::wrong_type(&self.path(name), expected))
    }

    /// A string.
    pub fn string(&mut self, name: &str) -> Result<Option<String>, Refusal> {
        self.read(name, "a string", string)
    }

    /// A string that must be there.
    pub fn required_string(&mut self, name: &str) -> Result<String, Refusal> {
        self.string(name)?.ok_or_else(|| Refusal::missing(&self.path(name)))
    }

    /// A boolean.
    pub fn boolean(&mut self, name: &str) -> Result<Option<bool>, Refusal> {
        self.read(name, "a boolean", |value| value.as_bool())
    }

    /// A number within `range`, as the engines' 32-bit floats.
    pub fn number(&mut self, name: &str, range: RangeInclusive<f64>) -> Result<Option<f32>, Refusal> {
        let Some(number) = self.read(name, "a number", |value| value.as_f64())? else { return Ok(None) };
        if range.contains(&number) && (number as f32).is_finite() {
            return Ok(Some(number as f32));
        }
        let problem = match (*range.start(), *range.end()) {
            (start, end) if end >= f64::from(f32::MAX) => format!("must be at least {start}"),
            (start, end) => format!("must be between {start} and {end}"),
        };
        Err(Refusal::value(&self.path(name), &problem))
    }

    /// A whole number within `range`.
    pub fn integer(&mut self, name: &str, range: RangeInclusive<i64>) -> Result<Option<i64>, Refusal> {
        let Some(number) = self.read(name, "an integer", |value| integer(&value))? else { return Ok(None) };
        match number.map(|number| (range.contains(&number), number)) {
            Some((true, number)) => Ok(Some(number)),
            _ => {
                let problem = format!("must be between {} and {}", range.start(), range.end());
                Err(Refusal::value(&self.path(name), &problem))
            }
        }
    }

    /// A whole number that fits 32 bits.
    pub fn count(&mut self, name: &str, range: RangeInclusive<u32>) -> Result<Option<u32>, Refusal> {
        let wide = i64::from(*range.start())..=i64::from(*range.end());
        Ok(self.integer(name, wide)?.and_then(|number| u32::try_from(number).ok()))
    }

    /// An array of at most `most` elements.
    pub fn array(&mut self, name: &str, most: usize) -> Result<Option<Vec<Value>>, Refusal> {
        let Some(elements) = self.read(name, "an array", array)? else { return Ok(None) };
        if elements.len() > most {
            return Err(too_many(&self.path(name), most));
        }
        Ok(Some(elements))
    }

    /// An object, to be read further.
    pub fn object(&mut self, name: &str) -> Result<Option<Fields>, Refusal> {
        let Some(value) = self.value(name) else { return Ok(None) };
        Fields::of(value, &self.path(name)).map(Some)
    }

    /// An object as it is.
    pub fn map(&mut self, name: &str) -> Result<Option<Map<String, Value>>, Refusal> {
        Ok(self.object(name)?.map(|fields| fields.members))
    }

    /// Refuses members that would change the answer and that nobody serves. Absent, `null`, `false`, zero and empty ones ask for
    /// nothing.
    pub fn refuse(&self, names: &[&str]) -> Result<(), Refusal> {
        let asked = |value: &Value| match value {
            Value::Null | Value::Bool(false) => false,
            Value::Array(elements) => !elements.is_empty(),
            Value::Object(members) => !members.is_empty(),
            Value::String(text) => !text.is_empty(),
            Value::Number(number) => number.as_f64() != Some(0.0),
            Value::Bool(true) => true,
        };
        match names.iter().find(|name| self.members.get(**name).is_some_and(asked)) {
            Some(name) => Err(Refusal::unsupported(&self.path(name))),
            None => Ok(()),
        }
    }
}

/// More than `most` elements at `path`.
pub(crate) fn too_many(path: &str, most: usize) -> Refusal {
    Refusal::value(path, &format!("may have at most {most} elements"))
}

/// A string.
pub(crate) fn string(value: Value) -> Option<String> {
    match value {
        Value::String(text) => Some(text),
        _ => None,
    }
}

fn array(value: Value) -> Option<Vec<Value>> {
    match value {
        Value::Array(elements) => Some(elements),
        _ => None,
    }
}

/// A whole number: none when the value is no whole number at all, an inner none when it is one that 64 bits do not hold.
fn integer(value: &Value) -> Option<Option<i64>> {
    /// Above 2^53 a float no longer names one whole number.
    const LARGEST_EXACT: f64 = 9_007_199_254_740_992.0;
    let number = value.as_number()?;
    if number.is_i64() || number.is_u64() {
        return Some(number.as_i64());
    }
    let float = number.as_f64().filter(|float| float.fract() == 0.0)?;
    Some((float.abs() <= LARGEST_EXACT).then_some(float as i64))
}

/// A token id.
pub(crate) fn token_id(value: &Value) -> Option<u32> {
    integer(value)
        .flatten()
        .filter(|id| (0..=crate::limits::TOKEN_ID).contains(id))
        .and_then(|id| u32::try_from(id).ok())
}

/// The token ids that a list holds; none when anything else is in it.
pub(crate) fn token_ids(elements: &[Value]) -> Option<Vec<u32>> {
    elements.iter().map(token_id).collect()
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
mod tests {
    use super::*;
    use serde_json::json;

    fn fields(value: Value) -> Fields {
        Fields::parse(value.to_string().as_bytes()).unwrap()
    }

    #[test]
    fn null_reads_as_absent_and_the_last_of_repeated_members_counts() {
        assert_eq!(fields(json!({"a": null})).string("a"), Ok(None));
        let mut repeated = Fields::parse(br#"{"a":"first","a":"last"}"#).unwrap();
        assert_eq!(repeated.string("a"), Ok(Some("last".to_owned())));
    }

    #[test]
    fn wrong_types_are_refused_with_the_full_name() {
        let mut outer = fields(json!({"sampling_params": {"top_k": "many"}}));
        let mut inner = outer.object("sampling_params").unwrap().unwrap();
        let refusal = inner.integer("top_k", 0..=9).unwrap_err();
        assert_eq!((refusal.status, refusal.code), (400, "invalid_type"));
        assert_eq!(refusal.message, "field `sampling_params.top_k` must be an integer");
    }

    #[test]
    fn whole_numbers_may_be_written_as_floats_and_are_bounded() {
        for (value, expected) in [
            (json!(2), Ok(Some(2))),
            (json!(2.0), Ok(Some(2))),
            (json!(1e2), Err("invalid_value")),
            (json!(-1), Err("invalid_value")),
            (json!(1.5), Err("invalid_type")),
            (json!(true), Err("invalid_type")),
            (json!(u64::MAX), Err("invalid_value")),
            (json!(1e300), Err("invalid_value")),
        ] {
            let read = fields(json!({"n": value})).integer("n", 0..=9).map_err(|refusal| refusal.code);
            assert_eq!(read, expected, "{value}");
        }
    }

    #[test]
    fn a_body_that_is_no_object_is_refused_as_on_the_http_path() {
        for (body, message) in [
            ("[]", "the request body must be a JSON object"),
            ("{", "the request body is not valid JSON: EOF while parsing an object at line 1 column 1"),
        ] {
            let refusal = Fields::parse(body.as_bytes()).unwrap_err();
            assert_eq!((refusal.status, refusal.code, refusal.message.as_str()), (400, "json_parse_error", message));
        }
    }
}
