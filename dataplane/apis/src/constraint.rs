//! What a client says that the output must look like.
//!
//! Three dialects name the same few things: OpenAI's `response_format`, SGLang's `regex`, `ebnf`, `json_schema` and
//! `structural_tag`, vLLM's `structured_outputs` and the older `guided_*`. Engines take one constraint; a request with several is
//! refused, whatever the dialects.

use serde_json::{Value, json};

use crate::fields::{Fields, string};
use crate::generation::Constraint;
use crate::limits;
use crate::refusal::Refusal;

/// The constraint of a request in any of the dialects.
pub(crate) fn read(fields: &mut Fields) -> Result<Option<Constraint>, Refusal> {
    let mut found = Found::default();
    if let Some(format) = fields.value("response_format") {
        let path = fields.path("response_format");
        found.add(&path, response_format(format, &path)?)?;
    }
    sglang(fields, &mut found)?;
    vllm(fields, "guided_", &mut found)?;
    if let Some(mut outputs) = fields.object("structured_outputs")? {
        vllm(&mut outputs, "", &mut found)?;
    }
    Ok(found.constraint)
}

/// The constraint of SGLang's `sampling_params`.
pub(crate) fn of_sampling_params(fields: &mut Fields) -> Result<Option<Constraint>, Refusal> {
    let mut found = Found::default();
    sglang(fields, &mut found)?;
    Ok(found.constraint)
}

/// The constraint that a format of the responses API (`text.format`) or of the messages API stands for.
pub(crate) fn of_format(format: Value, path: &str) -> Result<Option<Constraint>, Refusal> {
    let mut fields = Fields::of(format, path)?;
    match fields.required_string("type")?.as_str() {
        "text" => Ok(None),
        "json_object" => Ok(Some(any_object())),
        "json_schema" => required_schema(&mut fields, "schema").map(Some),
        _ => Err(Refusal::value(&fields.path("type"), "must be text, json_object or json_schema")),
    }
}

fn response_format(format: Value, path: &str) -> Result<Option<Constraint>, Refusal> {
    let kind = format.get("type").and_then(Value::as_str);
    if kind == Some("structural_tag") {
        return Ok(Some(Constraint::StructuralTag(format.to_string())));
    }
    let mut fields = Fields::of(format, path)?;
    match fields.required_string("type")?.as_str() {
        "text" => Ok(None),
        "json_object" => Ok(Some(any_object())),
        "json_schema" => {
            let path = fields.path("json_schema");
            let mut inner = fields.object("json_schema")?.ok_or_else(|| Refusal::missing(&path))?;
            required_schema(&mut inner, "schema").map(Some)
        }
        _ => Err(Refusal::value(&fields.path("type"), "must be text, json_object, json_schema or structural_tag")),
    }
}

fn sglang(fields: &mut Fields, found: &mut Found) -> Result<(), Refusal> {
    found.add(&fields.path("regex"), fields.string("regex")?.map(Constraint::Regex))?;
    found.add(&fields.path("ebnf"), fields.string("ebnf")?.map(Constraint::Grammar))?;
    found.add(&fields.path("json_schema"), json_text(fields, "json_schema")?.map(Constraint::JsonSchema))?;
    found.add(&fields.path("structural_tag"), json_text(fields, "structural_tag")?.map(Constraint::StructuralTag))
}

fn vllm(fields: &mut Fields, prefix: &str, found: &mut Found) -> Result<(), Refusal> {
    let named = |name: &str| format!("{prefix}{name}");
    let (json, regex, grammar, choice) = (named("json"), named("regex"), named("grammar"), named("choice"));
    found.add(&fields.path(&json), json_text(fields, &json)?.map(Constraint::JsonSchema))?;
    found.add(&fields.path(&regex), fields.string(&regex)?.map(Constraint::Regex))?;
    found.add(&fields.path(&grammar), fields.string(&grammar)?.map(Constraint::Grammar))?;
    if let Some(choices) = fields.array(&choice, limits::CHOICES)? {
        let path = fields.path(&choice);
        let choices: Option<Vec<_>> = choices.into_iter().map(string).collect();
        let choices = choices.filter(|choices| !choices.is_empty());
        let choices = choices.ok_or_else(|| Refusal::wrong_type(&path, "a non-empty array of strings"))?;
        found.add(&path, Some(Constraint::Choice(choices)))?;
    }
    if prefix.is_empty() {
        let any = fields.boolean("json_object")?.unwrap_or(false);
        found.add(&fields.path("json_object"), any.then(any_object))?;
        found
            .add(&fields.path("structural_tag"), json_text(fields, "structural_tag")?.map(Constraint::StructuralTag))?;
    }
    Ok(())
}

/// The constraint found, and the field that it was found in.
#[derive(Default)]
struct Found {
    constraint: Option<Constraint>,
    field: String,
}

impl Found {
    fn add(&mut self, field: &str, constraint: Option<Constraint>) -> Result<(), Refusal> {
        let Some(constraint) = constraint else { return Ok(()) };
        if self.constraint.is_some() {
            let message = format!("only one constraint can be given, not both `{}` and `{field}`", self.field);
            return Err(Refusal::bad("invalid_value", message));
        }
        self.constraint = Some(constraint);
        self.field = field.to_owned();
        Ok(())
    }
}

/// What `json_object` asks for.
fn any_object() -> Constraint {
    Constraint::JsonSchema(json!({"type": "object"}).to_string())
}

fn required_schema(fields: &mut Fields, name: &str) -> Result<Constraint, Refusal> {
    let path = fields.path(name);
    match fields.map(name)? {
        Some(schema) => Ok(Constraint::JsonSchema(Value::Object(schema).to_string())),
        None => Err(Refusal::missing(&path)),
    }
}

/// JSON that may come as an object or as its text.
fn json_text(fields: &mut Fields, name: &str) -> Result<Option<String>, Refusal> {
    let path = fields.path(name);
    match fields.value(name) {
        None => Ok(None),
        Some(Value::String(text)) => match serde_json::from_str::<serde::de::IgnoredAny>(&text) {
            Ok(_) => Ok(Some(text)),
            Err(error) => Err(Refusal::value(&path, &format!("is not valid JSON: {error}"))),
        },
        Some(object @ Value::Object(_)) => Ok(Some(object.to_string())),
        Some(_) => Err(Refusal::wrong_type(&path, "an object or its JSON text")),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
mod tests {
    use super::*;

    fn of(value: Value) -> Result<Option<Constraint>, Refusal> {
        read(&mut Fields::parse(value.to_string().as_bytes()).unwrap())
    }

    #[test]
    fn every_dialect_is_understood() {
        let schema = |text: &str| Some(Constraint::JsonSchema(text.to_owned()));
        for (fact, request, expected) in [
            ("OpenAI text", json!({"response_format": {"type": "text"}}), None),
            ("OpenAI json_object", json!({"response_format": {"type": "json_object"}}), schema(r#"{"type":"object"}"#)),
            (
                "OpenAI json_schema",
                json!({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"a": 1}}}}),
                schema(r#"{"a":1}"#),
            ),
            ("SGLang regex", json!({"regex": "a+"}), Some(Constraint::Regex("a+".to_owned()))),
            ("SGLang ebnf", json!({"ebnf": "root ::= x"}), Some(Constraint::Grammar("root ::= x".to_owned()))),
            ("SGLang json_schema text", json!({"json_schema": "{\"a\": 1}"}), schema("{\"a\": 1}")),
            ("vLLM guided_json", json!({"guided_json": {"a": 1}}), schema(r#"{"a":1}"#)),
            ("vLLM guided_choice", json!({"guided_choice": ["x"]}), Some(Constraint::Choice(vec!["x".to_owned()]))),
            ("vLLM guided_grammar", json!({"guided_grammar": "g"}), Some(Constraint::Grammar("g".to_owned()))),
            (
                "vLLM structured_outputs",
                json!({"structured_outputs": {"regex": "b"}}),
                Some(Constraint::Regex("b".to_owned())),
            ),
            ("vLLM json_object", json!({"structured_outputs": {"json_object": true}}), schema(r#"{"type":"object"}"#)),
            ("nothing", json!({}), None),
        ] {
            assert_eq!(of(request), Ok(expected), "{fact}");
        }
        let tag = of(json!({"response_format": {"type": "structural_tag", "triggers": ["<f"]}})).unwrap();
        assert!(
            matches!(tag, Some(Constraint::StructuralTag(text)) if text.contains("triggers")),
            "SGLang structural_tag"
        );
    }

    #[test]
    fn several_constraints_are_refused() {
        for request in [
            json!({"regex": "a", "ebnf": "b"}),
            json!({"response_format": {"type": "json_object"}, "regex": "a"}),
            json!({"structured_outputs": {"regex": "a", "choice": ["b"]}}),
        ] {
            let refusal = of(request.clone()).unwrap_err();
            assert_eq!((refusal.status, refusal.code), (400, "invalid_value"), "{request}");
        }
        assert!(of(json!({"response_format": {"type": "text"}, "regex": "a"})).is_ok(), "text constrains nothing");
    }

    #[test]
    fn constraints_that_say_nothing_are_refused() {
        for (request, code) in [
            (json!({"response_format": {"type": "json_schema"}}), "missing_required_parameter"),
            (json!({"response_format": {"type": "json_schema", "json_schema": {}}}), "missing_required_parameter"),
            (json!({"response_format": {"type": "yaml"}}), "invalid_value"),
            (json!({"response_format": {}}), "missing_required_parameter"),
            (json!({"response_format": "json"}), "invalid_type"),
            (json!({"regex": 1}), "invalid_type"),
            (json!({"json_schema": "{"}), "invalid_value"),
            (json!({"guided_choice": []}), "invalid_type"),
        ] {
            assert_eq!(of(request.clone()).unwrap_err().code, code, "{request}");
        }
    }
}
