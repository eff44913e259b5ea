//! Calls that a client demands: the schema that makes the engine write them.
//!
//! `required` becomes a JSON array of at least one `{"name": .., "parameters": ..}`, a named function its arguments alone.
//! The reader of the output reads just that (see [`crate::reader`]).

use serde_json::{Map, Value, json};
use smg_apis::generation::{Constraint, ToolChoice};
use thiserror::Error;

/// A choice of tools that cannot be served; the client's doing.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum ForcedError {
    /// Calls are demanded and no tool is offered.
    #[error("tool_choice demands a call, but there are no tools")]
    NoTools,
    /// The function demanded is not offered.
    #[error("tool_choice names the function `{0}`, which is not among the tools")]
    Unknown(String),
    /// A tool that is no function with a name.
    #[error("tool {0} is no function with a name")]
    Nameless(usize),
    /// Two tools define a schema of the same name differently.
    #[error("the tools define the schema `{0}` in different ways")]
    Conflict(String),
}

/// The constraint that a choice of tools puts on the output; `None` when no call is demanded.
///
/// # Errors
/// The choice does not fit the tools.
pub fn constraint(tools: &[Value], choice: &ToolChoice) -> Result<Option<Constraint>, ForcedError> {
    let schema = match choice {
        ToolChoice::None | ToolChoice::Auto => return Ok(None),
        _ if tools.is_empty() => return Err(ForcedError::NoTools),
        ToolChoice::Function(wanted) => {
            let mut named = tools.iter().enumerate().map(|(number, tool)| function(number, tool));
            let found = named.find(|tool| tool.as_ref().map_or(true, |(name, _)| name == wanted));
            found.transpose()?.ok_or_else(|| ForcedError::Unknown(wanted.clone()))?.1
        }
        ToolChoice::Required => {
            let mut definitions = Map::new();
            let mut either = Vec::new();
            for (number, tool) in tools.iter().enumerate() {
                let (name, mut parameters) = function(number, tool)?;
                // References are to the root of a schema, which the tool's no longer is.
                let own = parameters.as_object_mut().and_then(|parameters| parameters.remove("$defs"));
                for (key, definition) in own.as_ref().and_then(Value::as_object).into_iter().flatten() {
                    if definitions.get(key).is_some_and(|known| known != definition) {
                        return Err(ForcedError::Conflict(key.clone()));
                    }
                    definitions.insert(key.clone(), definition.clone());
                }
                either.push(json!({
                    "properties": {"name": {"type": "string", "enum": [name]}, "parameters": parameters},
                    "required": ["name", "parameters"],
                }));
            }
            let mut schema = json!({"type": "array", "minItems": 1, "items": {"type": "object", "anyOf": either}});
            if !definitions.is_empty() {
                schema["$defs"] = Value::Object(definitions);
            }
            schema
        }
    };
    Ok(Some(Constraint::JsonSchema(schema.to_string())))
}

/// Name and parameters of a tool.
fn function(number: usize, tool: &Value) -> Result<(&str, Value), ForcedError> {
    let function = tool.get("function").ok_or(ForcedError::Nameless(number))?;
    let name = function.get("name").and_then(Value::as_str).ok_or(ForcedError::Nameless(number))?;
    let parameters = function.get("parameters").filter(|parameters| parameters.is_object()).cloned();
    Ok((name, parameters.unwrap_or_else(|| json!({"type": "object", "properties": {}}))))
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::panic)]
mod tests {
    use super::*;

    fn tool(name: &str, parameters: Value) -> Value {
        json!({"type": "function", "function": {"name": name, "parameters": parameters}})
    }

    fn schema(tools: &[Value], choice: &ToolChoice) -> Value {
        match constraint(tools, choice).unwrap() {
            Some(Constraint::JsonSchema(text)) => serde_json::from_str(&text).unwrap(),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_named_function_is_held_to_its_own_schema() {
        let tools = [tool("a", json!({"type": "object"})), tool("b", json!({"type": "object", "required": ["x"]}))];
        assert_eq!(schema(&tools, &ToolChoice::Function("b".to_owned())), json!({"type": "object", "required": ["x"]}));
        let unknown = constraint(&tools, &ToolChoice::Function("c".to_owned()));
        assert_eq!(unknown, Err(ForcedError::Unknown("c".to_owned())));
    }

    #[test]
    fn required_calls_are_an_array_of_names_and_parameters() {
        let reference =
            json!({"type": "object", "properties": {"x": {"$ref": "#/$defs/X"}}, "$defs": {"X": {"type": "string"}}});
        let schema =
            schema(&[tool("a", reference.clone()), tool("b", json!({"type": "object"}))], &ToolChoice::Required);
        assert_eq!(schema["minItems"], 1);
        assert_eq!(schema["$defs"], json!({"X": {"type": "string"}}));
        assert_eq!(schema["items"]["anyOf"][0]["properties"]["name"]["enum"], json!(["a"]));
        let other = json!({"type": "object", "$defs": {"X": {"type": "integer"}}});
        let conflict = constraint(&[tool("a", reference), tool("b", other)], &ToolChoice::Required);
        assert_eq!(conflict, Err(ForcedError::Conflict("X".to_owned())));
    }

    #[test]
    fn a_choice_without_tools_is_refused_and_a_free_one_demands_nothing() {
        assert_eq!(constraint(&[], &ToolChoice::Required), Err(ForcedError::NoTools));
        assert_eq!(constraint(&[], &ToolChoice::Auto), Ok(None));
        assert_eq!(constraint(&[json!({})], &ToolChoice::Required), Err(ForcedError::Nameless(0)));
    }
}
