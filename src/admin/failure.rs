//! Why a command of an operator has no result, and its exit code.
//!
//! The codes keep apart what a script must tell apart: what was refused and why, what did not happen, and what nobody knows.

use std::io;
use std::process::ExitCode;

use http::StatusCode;
use serde_json::Value;
use thiserror::Error;

use super::contexts::ContextError;
use crate::authority::AuthorityError;
use crate::operator::AskError;

/// Exit code of a request that is malformed or breaks a rule (`EX_DATAERR`).
const EXIT_INVALID: u8 = 65;
/// Exit code of what does not exist (`EX_NOINPUT`).
const EXIT_NOT_FOUND: u8 = 66;
/// Exit code when nobody could be asked, or could do it: it did not happen (`EX_UNAVAILABLE`).
const EXIT_UNREACHABLE: u8 = 69;
/// Exit code when nobody knows whether it happened (`EX_TEMPFAIL`).
const EXIT_UNKNOWN: u8 = 75;
/// Exit code of what the caller may not do (`EX_NOPERM`).
const EXIT_DENIED: u8 = 77;
/// Exit code of a configuration file that cannot be used (`EX_CONFIG`).
const EXIT_CONFIGURATION: u8 = 78;
/// Exit code of what does not fit the present state: changed meanwhile, there already, or unsafe now.
const EXIT_CONFLICT: u8 = 79;

/// Why there is no result.
#[derive(Debug, Error)]
pub enum Failure {
    /// No runtime.
    #[error("runtime: {0}")]
    Runtime(io::Error),
    /// Nobody answers.
    #[error(transparent)]
    Ask(#[from] AskError),
    /// It said no.
    #[error("{message} ({code})")]
    Refused {
        /// Its status.
        status: StatusCode,
        /// The code of the API.
        code: String,
        /// In words.
        message: String,
        /// What became of a change: `did_not_happen`, `happened` or `unknown`.
        outcome: Option<String>,
    },
    /// The answer makes no sense.
    #[error("the answer cannot be read: {0}")]
    Answer(String),
    /// What was asked for went wrong, or did not happen in time.
    #[error("{0}")]
    Undone(String),
    /// An input cannot be used.
    #[error("{0}")]
    Input(String),
    /// No such object.
    #[error("{0}")]
    NotFound(String),
    /// There is no certificate.
    #[error(transparent)]
    Authority(#[from] AuthorityError),
    /// The configuration file cannot be used.
    #[error(transparent)]
    Context(#[from] ContextError),
    /// The control plane has no leader, as far as the member that answered hears.
    #[error("member {0} hears of no leader: what is shown is what it last knew")]
    NoLeader(String),
    /// There is a file already, where one was to be written.
    #[error("{0}")]
    Exists(String),
    /// The result could not be written.
    #[error("writing the result: {0}")]
    Output(#[from] io::Error),
}

impl Failure {
    /// The answer as JSON, or why there is none.
    ///
    /// # Errors
    /// When the status is one of failure, or the body no JSON.
    pub fn read(status: StatusCode, body: &[u8]) -> Result<Value, Self> {
        if status == StatusCode::NO_CONTENT {
            return Ok(Value::Null);
        }
        let read = serde_json::from_slice::<Value>(body);
        if status.is_success() {
            return read.map_err(|error| Self::Answer(error.to_string()));
        }
        let answer = read.unwrap_or_default();
        // The client edge of a gateway words errors in its own way.
        let error = if answer["error"].is_object() { &answer["error"] } else { &answer };
        let text = |value: &Value| value.as_str().map(str::to_owned);
        let message = text(&answer["error"]).or_else(|| text(&error["message"]));
        Err(Self::Refused {
            status,
            code: text(&error["code"]).unwrap_or_else(|| status.as_u16().to_string()),
            message: message.unwrap_or_else(|| format!("the server answered {status}")),
            outcome: text(&answer["outcome"]),
        })
    }

    /// The exit code.
    pub fn exit_code(&self) -> ExitCode {
        let code = match self {
            Self::Ask(AskError::Unreachable(_)) | Self::NoLeader(_) => EXIT_UNREACHABLE,
            Self::Ask(AskError::Context(_)) => EXIT_CONFIGURATION,
            Self::Ask(AskError::Setup(_)) => EXIT_INVALID,
            Self::Exists(_) | Self::Authority(AuthorityError::Exists(_)) => EXIT_CONFLICT,
            Self::Authority(_) => EXIT_INVALID,
            Self::Ask(AskError::Unknown(_)) => EXIT_UNKNOWN,
            Self::Input(_) => EXIT_INVALID,
            Self::NotFound(_) => EXIT_NOT_FOUND,
            Self::Context(_) => EXIT_CONFIGURATION,
            Self::Refused { outcome: Some(outcome), .. } if outcome == "unknown" => EXIT_UNKNOWN,
            Self::Refused { code, .. } if code == "OUTCOME_UNKNOWN" => EXIT_UNKNOWN,
            Self::Refused { status, .. } => match *status {
                StatusCode::BAD_REQUEST | StatusCode::PAYLOAD_TOO_LARGE => EXIT_INVALID,
                StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => EXIT_DENIED,
                StatusCode::NOT_FOUND => EXIT_NOT_FOUND,
                StatusCode::CONFLICT | StatusCode::PRECONDITION_FAILED => EXIT_CONFLICT,
                StatusCode::SERVICE_UNAVAILABLE => EXIT_UNREACHABLE,
                _ => return ExitCode::FAILURE,
            },
            _ => return ExitCode::FAILURE,
        };
        ExitCode::from(code)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn code(status: u16, body: Value) -> Option<ExitCode> {
        let status = StatusCode::from_u16(status).ok()?;
        Failure::read(status, body.to_string().as_bytes()).err().map(|failure| failure.exit_code())
    }

    #[test]
    fn outcomes_stay_apart() {
        let error = |code: &str| json!({"error": "why", "code": code, "outcome": "did_not_happen"});
        for (status, body, exit) in [
            (400, error("BAD_REQUEST"), 65),
            (401, error("UNAUTHORIZED"), 77),
            (403, error("FORBIDDEN"), 77),
            (404, error("WORKER_NOT_FOUND"), 66),
            (409, error("QUORUM_AT_RISK"), 79),
            (412, error("REVISION_CONFLICT"), 79),
            (503, error("CONTROL_PLANE_UNAVAILABLE"), 69),
            (503, json!({"error": "why", "code": "OUTCOME_UNKNOWN", "outcome": "unknown"}), 75),
            (503, json!({"error": "why", "code": "OUTCOME_UNKNOWN"}), 75),
            (500, json!("?"), 1),
            (404, json!({"error": {"code": "unknown_url", "message": "no such route"}}), 66),
        ] {
            assert_eq!(code(status, body.clone()), Some(ExitCode::from(exit)), "{status} {body}");
        }
        assert_eq!(code(200, json!({})), None);
    }
}
