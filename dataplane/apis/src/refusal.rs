//! Why a request is refused before any engine hears of it.

use thiserror::Error;

/// A request that cannot be served, and whose fault that is. The words are for the client.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{message}")]
pub struct Refusal {
    /// The HTTP status: 400 for a fault of the request, 501 for what is documented by the API but not served here.
    pub status: u16,
    /// The documented code.
    pub code: &'static str,
    /// What is wrong, naming the field.
    pub message: String,
}

impl Refusal {
    /// A fault of the request.
    pub fn bad(code: &'static str, message: impl Into<String>) -> Self {
        Self { status: 400, code, message: message.into() }
    }

    /// Part of the API, but not served here.
    pub fn not_implemented(code: &'static str, message: impl Into<String>) -> Self {
        Self { status: 501, code, message: message.into() }
    }

    /// The body is no JSON, or no object.
    pub(crate) fn json(message: impl Into<String>) -> Self {
        Self::bad("json_parse_error", message)
    }

    /// `field` has the wrong type. `expected` comes with its article.
    pub(crate) fn wrong_type(field: &str, expected: &str) -> Self {
        Self::bad("invalid_type", format!("field `{field}` must be {expected}"))
    }

    /// `field` has the right type, but not a value that means something.
    pub(crate) fn value(field: &str, problem: &str) -> Self {
        Self::bad("invalid_value", format!("field `{field}` {problem}"))
    }

    /// `field` must be there.
    pub(crate) fn missing(field: &str) -> Self {
        Self::bad("missing_required_parameter", format!("Missing required parameter: '{field}'."))
    }

    /// `field` asks for something that these engines cannot do here. To leave it out silently would change the answer.
    pub(crate) fn unsupported(field: &str) -> Self {
        Self::bad("unsupported_parameter", format!("field `{field}` is not supported by the engines of this model"))
    }

    /// Tools or the choice among them make no sense.
    pub(crate) fn tools(message: impl Into<String>) -> Self {
        Self::bad("invalid_tool_configuration", message)
    }

    /// Media, which no engine gets from here.
    pub(crate) fn media(kind: &str) -> Self {
        Self::bad("multimodal_not_supported", format!("{kind} inputs are not supported by the engines of this model"))
    }

    /// A part of a message that no API here documents.
    pub(crate) fn part(place: &str, kind: &str) -> Self {
        Self::bad("unsupported_content_part", format!("{place}: content of type `{kind}` is not supported"))
    }

    /// Messages that make no conversation.
    pub(crate) fn messages(message: impl Into<String>) -> Self {
        Self::bad("process_messages_failed", message)
    }
}
