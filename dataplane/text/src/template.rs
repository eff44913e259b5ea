//! Chat templates: a conversation as the text that the model was trained on.
//!
//! Models bring their template along, written for Jinja2 as `transformers` runs it. It is run here by minijinja, made to
//! agree with `transformers` where a prompt would differ: blocks are trimmed, Python's methods exist, `tojson` and printed
//! values look like Python's, `raise_exception` refuses a conversation, `strftime_now` writes the date (which is passed in),
//! and `{% generation %}` marks nothing.
//!
//! Templates run on behalf of whoever sends a conversation, so they run on a budget of instructions and of output. Compiled
//! they are once.

mod python;

use std::collections::BTreeMap;
use std::io;

use minijinja::value::Kwargs;
use minijinja::{Environment, Error, ErrorKind, State, Value};
use serde_json::Value as Json;
use smg_apis::generation::ChatPrompt;
use thiserror::Error as ThisError;

/// What one rendering may take.
#[derive(Debug, Clone, Copy)]
struct Budget {
    /// Instructions.
    fuel: u64,
    /// Bytes written.
    output: usize,
}

/// A message takes a few hundred instructions: these are enough for ten thousand of them, and are done in a fraction of a
/// second. The output is larger than any model's window.
const BUDGET: Budget = Budget { fuel: 5_000_000, output: 64 << 20 };

/// A conversation as text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Prompt {
    /// The text, special tokens spelled out.
    pub text: String,
    /// The assistant's message at the end of it that the output goes on with.
    pub continued: Option<String>,
}

/// Why a conversation cannot be rendered; all but `Missing` and `Broken` are the client's doing.
#[derive(Debug, Clone, PartialEq, Eq, ThisError)]
pub enum TemplateError {
    /// There is no template.
    #[error("the model has no chat template; give it one with --chat-template or send a prompt instead of messages")]
    Missing,
    /// The template is none.
    #[error("the chat template cannot be compiled: {0}")]
    Broken(String),
    /// A message is not what it should be.
    #[error("message {index}: {reason}")]
    Message {
        /// Its position, from 0.
        index: usize,
        /// Why.
        reason: String,
    },
    /// A part of a message that is no text.
    #[error("message {index}: content parts of type `{kind}` are not supported")]
    Part {
        /// The message's position, from 0.
        index: usize,
        /// The part's type.
        kind: String,
    },
    /// The final message is to be continued and is none of the assistant's.
    #[error("continue_final_message needs a final message with role `assistant` and text as content")]
    NothingToContinue,
    /// The template refuses the conversation, or fails.
    #[error("{0}")]
    Refused(String),
    /// The template takes too long or writes too much for this conversation.
    #[error("the conversation exceeds what a chat template may take to render")]
    TooMuch,
}

impl TemplateError {
    /// The documented code of the error.
    #[must_use]
    pub fn code(&self) -> &'static str {
        if matches!(self, Self::Part { .. }) { "unsupported_content_part" } else { "process_messages_failed" }
    }
}

/// Whether a template wants the content of a message as a string or as parts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ContentFormat {
    /// A string; parts are joined.
    Text,
    /// Parts, each with its type; a string is passed as it is.
    Parts,
}

/// The chat templates of a model, compiled.
#[derive(Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    formats: BTreeMap<String, ContentFormat>,
    tokens: BTreeMap<String, Value>,
    output: usize,
}

impl ChatTemplate {
    /// Compiles `named` templates, of which one is called `default` or is the only one. `tokens`: named special tokens.
    ///
    /// # Errors
    /// One cannot be compiled, or there is none.
    pub fn new(named: Vec<(String, String)>, tokens: &[(String, String)]) -> Result<Self, TemplateError> {
        Self::on(BUDGET, named, tokens)
    }

    fn on(budget: Budget, named: Vec<(String, String)>, tokens: &[(String, String)]) -> Result<Self, TemplateError> {
        let mut environment = Environment::new();
        environment.set_trim_blocks(true);
        environment.set_lstrip_blocks(true);
        environment.set_fuel(Some(budget.fuel));
        environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.set_formatter(|output, _, value| output.write_str(&python::printed(value)?).map_err(Error::from));
        environment.add_filter("tojson", to_json);
        environment.add_function("raise_exception", |message: String| -> Result<Value, Error> {
            Err(Error::new(ErrorKind::InvalidOperation, message))
        });
        environment.add_function("strftime_now", |state: &State<'_, '_>, format: String| {
            let now = state.lookup(NOW).and_then(|now| now.as_i64()).unwrap_or(0);
            python::strftime(now, &format)
        });
        let names: Vec<String> = named.iter().map(|(name, _)| name.clone()).collect();
        for (name, source) in named {
            let source = without_generation(&source);
            environment.add_template_owned(name, source).map_err(|error| TemplateError::Broken(message(&error)))?;
        }
        if names.is_empty() {
            return Err(TemplateError::Missing);
        }
        let tokens = tokens.iter().map(|(name, text)| (name.clone(), Value::from(text.as_str()))).collect();
        let mut template = Self { environment, formats: BTreeMap::new(), tokens, output: budget.output };
        template.formats = names.into_iter().map(|name| (name.clone(), template.format_of(&name))).collect();
        Ok(template)
    }

    /// How a conversation with or without tools wants its content.
    #[must_use]
    pub fn format(&self, tools: bool) -> ContentFormat {
        self.choose(tools).1
    }

    /// Renders a conversation. `now`: seconds since 1970, UTC.
    ///
    /// # Errors
    /// The conversation is malformed, is refused by the template, or takes too much.
    pub fn render(&self, chat: &ChatPrompt, now: i64) -> Result<Prompt, TemplateError> {
        let (name, format) = self.choose(!chat.tools.is_empty());
        let messages = chat.messages.iter().enumerate();
        let mut messages: Vec<Json> =
            messages.map(|(index, message)| prepare(index, message, format)).collect::<Result<_, _>>()?;
        let continued = if chat.continue_final_message {
            let last = messages.pop().filter(|message| message["role"] == "assistant");
            let text = last.as_ref().and_then(|message| joined(message.get("content")?));
            Some(text.ok_or(TemplateError::NothingToContinue)?)
        } else {
            None
        };

        let mut variables = self.tokens.clone();
        variables.insert("add_generation_prompt".to_owned(), Value::from(true));
        variables.insert("documents".to_owned(), Value::from(()));
        for (name, value) in &chat.variables {
            variables.insert(name.clone(), Value::from_serialize(value));
        }
        let tools = if chat.tools.is_empty() { Value::from(()) } else { Value::from_serialize(&chat.tools) };
        variables.insert("messages".to_owned(), Value::from_serialize(&messages));
        variables.insert("tools".to_owned(), tools);
        variables.insert(NOW.to_owned(), Value::from(now));

        let mut text = self.run(name, variables)?;
        if let Some(continued) = &continued {
            text.push_str(continued);
        }
        Ok(Prompt { text, continued })
    }

    fn choose(&self, tools: bool) -> (&str, ContentFormat) {
        let wanted: &[&str] = if tools { &["tool_use", "default"] } else { &["default"] };
        let mut found = wanted.iter().filter_map(|name| self.formats.get_key_value(*name));
        let found = found.next().or_else(|| self.formats.first_key_value());
        found.map_or(("default", ContentFormat::Text), |(name, format)| (name.as_str(), *format))
    }

    fn run(&self, name: &str, variables: BTreeMap<String, Value>) -> Result<String, TemplateError> {
        let template = self.environment.get_template(name).map_err(|error| TemplateError::Broken(message(&error)))?;
        let mut output = Bounded { bytes: Vec::new(), limit: self.output };
        match template.render_captured_to(variables, &mut output) {
            Ok(_) => String::from_utf8(output.bytes).map_err(|error| TemplateError::Refused(error.to_string())),
            Err(error) if matches!(error.kind(), ErrorKind::OutOfFuel | ErrorKind::WriteFailure) => {
                Err(TemplateError::TooMuch)
            }
            Err(error) => Err(TemplateError::Refused(message(&error))),
        }
    }

    /// A template that takes the text out of a part wants parts; one that fails on them or prints them wants strings.
    fn format_of(&self, name: &str) -> ContentFormat {
        // No filter for letters changes it.
        const PROBE: &str = "8243170965";
        let part = serde_json::json!([{"type": "text", "text": PROBE}]);
        let message = serde_json::json!([{"role": "user", "content": part}]);
        let mut variables = self.tokens.clone();
        variables.insert("add_generation_prompt".to_owned(), Value::from(true));
        variables.insert("messages".to_owned(), Value::from_serialize(&message));
        variables.insert("tools".to_owned(), Value::from(()));
        match self.run(name, variables) {
            Ok(text) if text.contains(PROBE) && !text.contains("'type'") && !text.contains("\"type\"") => {
                ContentFormat::Parts
            }
            _ => ContentFormat::Text,
        }
    }
}

/// The variable that `strftime_now` reads; no template of the world has one of that name.
const NOW: &str = "__seconds_since_1970";

/// What a template's author or a client can use of an error.
fn message(error: &Error) -> String {
    match (error.detail(), error.line()) {
        (Some(detail), Some(line)) => format!("{detail} (chat template, line {line})"),
        _ => error.to_string(),
    }
}

/// `tojson` as `transformers` defines it: Python's `json.dumps` without escapes for HTML.
fn to_json(value: &Value, options: Kwargs) -> Result<String, Error> {
    let ascii: Option<bool> = options.get("ensure_ascii")?;
    let indent: Option<usize> = options.get("indent")?;
    let sorted: Option<bool> = options.get("sort_keys")?;
    let separators: Option<Vec<String>> = options.get("separators")?;
    options.assert_all_used()?;
    let (item, key) = match separators.as_deref() {
        Some([item, key]) => (item.clone(), key.clone()),
        _ => (if indent.is_some() { "," } else { ", " }.to_owned(), ": ".to_owned()),
    };
    let style = python::Style { ascii: ascii == Some(true), indent, sorted: sorted == Some(true), item, key };
    python::dumps(value, &style)
}

/// `{% generation %}` only marks what a model wrote, for training: here it holds whatever it holds.
fn without_generation(source: &str) -> String {
    let mut output = String::with_capacity(source.len());
    let mut rest = source;
    while let Some((before, tag)) = rest.split_once("{%") {
        output.push_str(before);
        output.push_str("{%");
        let Some((inner, after)) = tag.split_once("%}") else {
            rest = tag;
            continue;
        };
        let word = inner.trim_matches(|next: char| next.is_whitespace() || next == '-' || next == '+');
        match word {
            "generation" => output.push_str(&inner.replace(word, "if true")),
            "endgeneration" => output.push_str(&inner.replace(word, "endif")),
            _ => {
                rest = tag;
                continue;
            }
        }
        output.push_str("%}");
        rest = after;
    }
    output + rest
}

/// A message as the template wants it.
fn prepare(index: usize, message: &Json, format: ContentFormat) -> Result<Json, TemplateError> {
    let wrong = |reason: &str| TemplateError::Message { index, reason: reason.to_owned() };
    let mut message = message.clone();
    let fields = message.as_object_mut().ok_or_else(|| wrong("it is no object"))?;
    if !fields.get("role").is_some_and(Json::is_string) {
        return Err(wrong("it has no role"));
    }
    match fields.get("content") {
        Some(Json::Array(parts)) => {
            let odd = parts.iter().find(|part| part_text(part).is_none());
            if let Some(odd) = odd {
                let kind = odd.get("type").and_then(Json::as_str).unwrap_or("unknown").to_owned();
                return Err(TemplateError::Part { index, kind });
            }
        }
        None | Some(Json::Null | Json::String(_)) => {}
        Some(_) => return Err(wrong("its content is neither text nor parts")),
    }
    if format == ContentFormat::Text
        && let Some(content) = fields.get_mut("content").filter(|content| content.is_array())
    {
        *content = Json::from(joined(content));
    }
    let calls = fields.get_mut("tool_calls").and_then(Json::as_array_mut);
    for call in calls.into_iter().flatten() {
        let arguments = call.get_mut("function").and_then(|function| function.get_mut("arguments"));
        let Some(arguments) = arguments else { continue };
        let Some(text) = arguments.as_str() else { continue };
        *arguments = match text.trim() {
            "" => Json::Object(serde_json::Map::new()),
            text => serde_json::from_str(text).map_err(|_| wrong("the arguments of a tool call are no JSON"))?,
        };
    }
    Ok(message)
}

/// The text of a part, if it is one of text.
fn part_text(part: &Json) -> Option<&str> {
    match part {
        Json::String(text) => Some(text),
        Json::Object(fields) => match fields.get("type").and_then(Json::as_str)? {
            "text" | "input_text" | "output_text" => fields.get("text")?.as_str(),
            _ => None,
        },
        _ => None,
    }
}

/// Content as one text: that of its parts with spaces between.
fn joined(content: &Json) -> Option<String> {
    match content {
        Json::String(text) => Some(text.clone()),
        Json::Array(parts) => Some(parts.iter().filter_map(part_text).collect::<Vec<_>>().join(" ")),
        _ => None,
    }
}

/// Output with a limit.
struct Bounded {
    bytes: Vec<u8>,
    limit: usize,
}

impl io::Write for Bounded {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.bytes.len() + bytes.len() > self.limit {
            return Err(io::Error::other("too much output"));
        }
        self.bytes.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use serde_json::json;

    use super::*;

    fn template(source: &str) -> ChatTemplate {
        let tokens = [("bos_token".to_owned(), "<s>".to_owned()), ("eos_token".to_owned(), "</s>".to_owned())];
        ChatTemplate::new(vec![("default".to_owned(), source.to_owned())], &tokens).unwrap()
    }

    fn chat(messages: Json) -> ChatPrompt {
        ChatPrompt { messages: messages.as_array().unwrap().clone(), ..ChatPrompt::default() }
    }

    fn text(source: &str, chat: &ChatPrompt) -> String {
        template(source).render(chat, 0).unwrap().text
    }

    const HELLO: &str = r#"[{"role": "user", "content": "Hello"}]"#;

    fn hello() -> ChatPrompt {
        chat(serde_json::from_str(HELLO).unwrap())
    }

    #[test]
    fn special_tokens_and_variables_are_there() {
        let mut chat = hello();
        chat.variables.insert("enable_thinking".to_owned(), json!(false));
        let source =
            "{{ bos_token }}{% for m in messages %}<u>{{ m.content + eos_token }}{% endfor %}{{ enable_thinking }}";
        assert_eq!(text(source, &chat), "<s><u>Hello</s>False");
    }

    #[test]
    fn blocks_are_trimmed_and_values_printed_as_python_does() {
        let source = "{% for m in messages %}\n  {% if true %}\n{{ none }} {{ {'a': [1, 2.0, 'b\\'c']} }}\n  {% endif %}\n{% endfor %}";
        assert_eq!(text(source, &hello()), "None {'a': [1, 2.0, \"b'c\"]}\n");
    }

    #[test]
    fn tojson_is_pythons() {
        let mut chat = hello();
        chat.tools = vec![json!({"a": {"b": [1, "<é>\n", true, null, 1e300]}})];
        assert_eq!(text("{{ tools | tojson }}", &chat), r#"[{"a": {"b": [1, "<é>\n", true, null, 1e+300]}}]"#);
        assert_eq!(
            text("{{ tools[0] | tojson(indent=2) }}", &chat),
            "{\n  \"a\": {\n    \"b\": [\n      1,\n      \"<é>\\n\",\n      true,\n      null,\n      1e+300\n    ]\n  }\n}"
        );
        assert_eq!(
            text("{{ {'b': 1, 'a': 'é'} | tojson(sort_keys=true, ensure_ascii=true, separators=(',', ':')) }}", &chat),
            "{\"a\":\"\\u00e9\",\"b\":1}"
        );
    }

    #[test]
    fn the_date_is_the_one_that_is_passed_in() {
        let rendered =
            template("{{ strftime_now('%d %b %Y, %H:%M') }}").render(&hello(), 1_709_164_800 + 3_660).unwrap();
        assert_eq!(rendered.text, "29 Feb 2024, 01:01");
    }

    #[test]
    fn generation_marks_and_loop_controls_are_understood() {
        let source =
            "{% for m in messages %}{%- generation -%}{{ m.content }}{%- endgeneration %}{% break %}{% endfor %}";
        assert_eq!(text(source, &hello()), "Hello");
    }

    #[test]
    fn a_template_refuses_a_conversation_in_its_own_words() {
        let refused = template("{{ raise_exception('roles must alternate') }}").render(&hello(), 0).unwrap_err();
        assert!(refused.to_string().contains("roles must alternate"), "{refused}");
    }

    #[test]
    fn a_rendering_that_takes_or_writes_too_much_is_given_up() {
        let small = |source: &str| {
            let named = vec![("default".to_owned(), source.to_owned())];
            ChatTemplate::on(Budget { fuel: 20_000, output: 1_000_000 }, named, &[]).unwrap().render(&hello(), 0)
        };
        let endless = "{% for a in range(9999) %}{% for b in range(9999) %}{% set c = a %}{% endfor %}{% endfor %}";
        assert_eq!(small(endless), Err(TemplateError::TooMuch));
        let large = "{% for a in range(99) %}{{ 'x' * 100000 }}{% endfor %}";
        assert_eq!(small(large), Err(TemplateError::TooMuch));
        let deep = "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}";
        assert!(small(deep).is_err());
    }

    #[test]
    fn what_a_template_wants_as_content_is_found_out() {
        let strings = template("{% for m in messages %}{{ m['content'] }}{% endfor %}");
        let parts = template(
            "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}[{{ p.text }}]{% endfor %}{% endif %}{% endfor %}",
        );
        assert_eq!((strings.format(false), parts.format(false)), (ContentFormat::Text, ContentFormat::Parts));
        let chat =
            chat(json!([{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]));
        assert_eq!(strings.render(&chat, 0).unwrap().text, "a b");
        assert_eq!(parts.render(&chat, 0).unwrap().text, "[a][b]");
        assert_eq!(parts.render(&hello(), 0).unwrap().text, "Hello");
    }

    #[test]
    fn parts_that_are_no_text_are_refused_by_their_type() {
        let chat = chat(json!([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]));
        let refused = template("{{ messages[0].content }}").render(&chat, 0);
        assert_eq!(refused, Err(TemplateError::Part { index: 0, kind: "image_url".to_owned() }));
    }

    #[test]
    fn arguments_of_calls_are_objects_in_the_template() {
        let call = |arguments: &str| {
            chat(
                json!([{"role": "assistant", "content": null, "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}]),
            )
        };
        let source =
            "{% for k, v in messages[0].tool_calls[0].function.arguments.items() %}{{ k }}={{ v }};{% endfor %}";
        assert_eq!(text(source, &call("{\"a\": 1}")), "a=1;");
        assert_eq!(text(source, &call("")), "");
        assert!(matches!(template(source).render(&call("{"), 0), Err(TemplateError::Message { index: 0, .. })));
    }

    #[test]
    fn the_final_message_is_continued() {
        let mut chat = chat(json!([{"role": "user", "content": "Q"}, {"role": "assistant", "content": "The answer"}]));
        chat.continue_final_message = true;
        let source = "{% for m in messages %}[{{ m.content }}]{% endfor %}{% if add_generation_prompt %}A:{% endif %}";
        let prompt = template(source).render(&chat, 0).unwrap();
        assert_eq!(prompt, Prompt { text: "[Q]A:The answer".to_owned(), continued: Some("The answer".to_owned()) });
        chat.messages.pop();
        assert_eq!(template(source).render(&chat, 0), Err(TemplateError::NothingToContinue));
    }

    #[test]
    fn a_template_for_tools_is_used_when_there_are_tools() {
        let named =
            [("default", "plain"), ("tool_use", "tools")].map(|(name, text)| (name.to_owned(), text.to_owned()));
        let templates = ChatTemplate::new(named.to_vec(), &[]).unwrap();
        let mut chat = hello();
        assert_eq!(templates.render(&chat, 0).unwrap().text, "plain");
        chat.tools = vec![json!({"type": "function"})];
        assert_eq!(templates.render(&chat, 0).unwrap().text, "tools");
    }

    #[test]
    fn python_ways_of_templates_work() {
        let source = "{% set ns = namespace(found=false) %}{% for m in messages[::-1] %}{% if m.role == 'user' and not ns.found %}{% set ns.found = true %}{{ m.content.strip().upper().split('L')[0] }}{% endif %}{% endfor %}{{ tools is none }}{{ messages | selectattr('role', 'equalto', 'user') | list | length }}{{ missing is defined }}";
        assert_eq!(text(source, &hello()), "HETrue1False");
    }
}
