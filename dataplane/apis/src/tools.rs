//! The tools that a client offers, and which of them the model may call.
//!
//! Whatever the API, tools come out in the shape of the OpenAI chat API, which chat templates know, and a choice that makes no sense
//! with them is refused (`invalid_tool_configuration`).

use serde_json::{Map, Value, json};

use crate::fields::Fields;
use crate::generation::ToolChoice;
use crate::limits;
use crate::refusal::Refusal;

/// Tools and the choice among them.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Offer {
    /// What the template shows: all that may be called, and all others unless none may be.
    pub tools: Vec<Value>,
    /// What may be called.
    pub choice: ToolChoice,
}

/// A choice as the client made it.
#[derive(Debug, PartialEq)]
pub(crate) enum Choice {
    None,
    Auto,
    Required,
    Function(String),
    /// Only these, at the model's liking or at least one of them.
    Among(Vec<String>, Box<Choice>),
}

/// A function that may be called.
#[derive(Debug)]
pub(crate) struct Function {
    pub name: String,
    pub description: Option<String>,
    pub parameters: Option<Map<String, Value>>,
    pub strict: Option<bool>,
}

impl Function {
    /// Reads a function's members; `parameters` is the name of its schema.
    pub fn read(fields: &mut Fields, parameters: &str) -> Result<Self, Refusal> {
        let as_tool_fault = |refusal: Refusal| Refusal::tools(refusal.message);
        let name = fields.required_string("name").map_err(as_tool_fault)?;
        if name.is_empty() || name.len() > limits::NAME_BYTES {
            let most = limits::NAME_BYTES;
            return Err(Refusal::tools(format!(
                "field `{}` must have between 1 and {most} bytes",
                fields.path("name")
            )));
        }
        Ok(Self {
            name,
            description: fields.string("description").map_err(as_tool_fault)?,
            parameters: fields.map(parameters).map_err(as_tool_fault)?,
            strict: fields.boolean("strict").map_err(as_tool_fault)?,
        })
    }

    /// The tool in the shape of the chat API.
    pub fn into_tool(self) -> Value {
        let mut function = Map::new();
        function.insert("name".to_owned(), Value::String(self.name));
        if let Some(description) = self.description {
            function.insert("description".to_owned(), Value::String(description));
        }
        if let Some(parameters) = self.parameters {
            function.insert("parameters".to_owned(), Value::Object(parameters));
        }
        if let Some(strict) = self.strict {
            function.insert("strict".to_owned(), Value::Bool(strict));
        }
        json!({"type": "function", "function": function})
    }
}

/// Tools and choice of the chat API.
pub(crate) fn read_chat(fields: &mut Fields) -> Result<Offer, Refusal> {
    let mut tools = Vec::new();
    for (at, tool) in fields.array("tools", limits::TOOLS)?.unwrap_or_default().into_iter().enumerate() {
        let path = format!("tools[{at}]");
        let mut tool = Fields::of(tool, &path)?;
        match tool.string("type")?.as_deref() {
            Some("function") | None => {}
            Some(kind) => return Err(Refusal::tools(format!("{path}: tools of type `{kind}` are not supported"))),
        }
        let missing = || Refusal::tools(format!("{path}: a tool must have a `function`"));
        let mut function = tool.object("function")?.ok_or_else(missing)?;
        tools.push(Function::read(&mut function, "parameters")?);
    }
    let choice = match fields.value("tool_choice") {
        Some(choice) => Some(chat_choice(choice)?),
        None => None,
    };
    settle(tools, choice)
}

fn chat_choice(choice: Value) -> Result<Choice, Refusal> {
    let name = |choice: &Value| choice.pointer("/function/name").and_then(Value::as_str).map(str::to_owned);
    match &choice {
        Value::String(word) => word_choice(word),
        Value::Object(_) => match choice.get("type").and_then(Value::as_str) {
            Some("function") => {
                let missing = || Refusal::tools("tool_choice: a function must have a `name`");
                name(&choice).map(Choice::Function).ok_or_else(missing)
            }
            Some("allowed_tools") => {
                let allowed = choice.get("allowed_tools").unwrap_or(&Value::Null);
                among(allowed, name)
            }
            _ => Err(Refusal::tools("tool_choice: its `type` must be function or allowed_tools")),
        },
        _ => Err(Refusal::wrong_type("tool_choice", "a string or an object")),
    }
}

/// A choice in one word.
pub(crate) fn word_choice(word: &str) -> Result<Choice, Refusal> {
    match word {
        "none" => Ok(Choice::None),
        "auto" => Ok(Choice::Auto),
        "required" => Ok(Choice::Required),
        _ => Err(Refusal::tools(format!("tool_choice: `{word}` is not none, auto or required"))),
    }
}

/// A choice of some of the tools (OpenAI, `allowed_tools`).
pub(crate) fn among(allowed: &Value, name: impl Fn(&Value) -> Option<String>) -> Result<Choice, Refusal> {
    let mode = match allowed.get("mode").and_then(Value::as_str) {
        Some("auto") => Choice::Auto,
        Some("required") => Choice::Required,
        _ => return Err(Refusal::tools("tool_choice: the `mode` of allowed_tools must be auto or required")),
    };
    let names = allowed.get("tools").and_then(Value::as_array).map(|tools| tools.iter().map(name).collect());
    match names.flatten() {
        Some(names) => Ok(Choice::Among(names, Box::new(mode))),
        None => Err(Refusal::tools("tool_choice: allowed_tools must list functions with their names")),
    }
}

/// What tools and choice come to together.
pub(crate) fn settle(mut tools: Vec<Function>, choice: Option<Choice>) -> Result<Offer, Refusal> {
    if tools.is_empty() {
        return match choice {
            None | Some(Choice::None | Choice::Auto) => Ok(Offer::default()),
            Some(_) => Err(Refusal::tools("tool_choice: there are no tools to call")),
        };
    }
    let unknown = |name: &str| Refusal::tools(format!("tool_choice: there is no tool `{name}`"));
    let choice = match choice.unwrap_or(Choice::Auto) {
        Choice::None => {
            tools.clear();
            ToolChoice::None
        }
        Choice::Auto => ToolChoice::Auto,
        Choice::Required => ToolChoice::Required,
        Choice::Function(name) => match tools.iter().any(|tool| tool.name == name) {
            true => ToolChoice::Function(name),
            false => return Err(unknown(&name)),
        },
        Choice::Among(names, mode) => {
            if let Some(name) = names.iter().find(|name| !tools.iter().any(|tool| tool.name == **name)) {
                return Err(unknown(name));
            }
            if names.is_empty() {
                return Err(Refusal::tools("tool_choice: allowed_tools must list at least one tool"));
            }
            tools.retain(|tool| names.contains(&tool.name));
            if matches!(*mode, Choice::Required) { ToolChoice::Required } else { ToolChoice::Auto }
        }
    };
    Ok(Offer { tools: tools.into_iter().map(Function::into_tool).collect(), choice })
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
mod tests {
    use super::*;

    fn of(mut request: Value) -> Result<Offer, Refusal> {
        if request.get("tools").is_none() {
            request["tools"] = json!([{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}},
                {"type": "function", "function": {"name": "g"}}]);
        }
        read_chat(&mut Fields::parse(request.to_string().as_bytes()).unwrap())
    }

    #[test]
    fn choices_are_understood() {
        let named = |name: &str| json!({"type": "function", "function": {"name": name}});
        for (choice, expected, shown) in [
            (json!(null), ToolChoice::Auto, 2),
            (json!("auto"), ToolChoice::Auto, 2),
            (json!("none"), ToolChoice::None, 0),
            (json!("required"), ToolChoice::Required, 2),
            (named("g"), ToolChoice::Function("g".to_owned()), 2),
            (
                json!({"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [named("f")]}}),
                ToolChoice::Required,
                1,
            ),
        ] {
            let offer = of(json!({"tool_choice": choice})).unwrap();
            assert_eq!((offer.choice, offer.tools.len()), (expected, shown), "{choice}");
        }
    }

    #[test]
    fn choices_that_make_no_sense_are_refused() {
        for request in [
            json!({"tool_choice": "some"}),
            json!({"tool_choice": {"type": "function"}}),
            json!({"tool_choice": {"type": "function", "function": {"name": "h"}}}),
            json!({"tool_choice": {"type": "custom", "custom": {"name": "f"}}}),
            json!({"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}}),
            json!({"tool_choice": {"type": "allowed_tools"}}),
            json!({"tool_choice": "required", "tools": []}),
            json!({"tools": [{"type": "function"}]}),
            json!({"tools": [{"type": "custom", "custom": {"name": "x"}}]}),
            json!({"tools": [{"type": "function", "function": {"name": ""}}]}),
            json!({"tools": [{"type": "function", "function": {"name": 1}}]}),
            json!({"tools": [{"type": "function", "function": {"name": "x", "parameters": "y"}}]}),
        ] {
            let refusal = of(request.clone()).unwrap_err();
            assert_eq!((refusal.status, refusal.code), (400, "invalid_tool_configuration"), "{request}");
        }
        assert_eq!(of(json!({"tools": 1})).unwrap_err().code, "invalid_type");
    }

    #[test]
    fn auto_and_none_need_no_tools() {
        assert_eq!(of(json!({"tools": [], "tool_choice": "auto"})), Ok(Offer::default()));
        assert_eq!(of(json!({"tools": null, "tool_choice": "none"})), Ok(Offer::default()));
    }
}
