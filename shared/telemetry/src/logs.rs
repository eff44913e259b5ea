//! Logs: one line an event on standard error, as text or JSON.
//!
//! `RUST_LOG` wins over the level of the command line. With a plain level, the project's own crates log at it and libraries at `warn`.

use std::io::IsTerminal;

use thiserror::Error;
use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::time::UtcTime;

/// Why logging could not be set up.
#[derive(Debug, Error)]
pub enum LogError {
    /// The filter does not parse.
    #[error("invalid log filter '{filter}': {reason}")]
    Filter {
        /// What was given.
        filter: String,
        /// What is wrong with it.
        reason: String,
    },
    /// Logging was set up before.
    #[error("logging is already set up")]
    AlreadySet,
}

/// How to log.
#[derive(Debug, Clone, Default)]
pub struct LogOptions {
    /// `error`, `warn`, `info`, `debug` or `trace`; overridden by `RUST_LOG`.
    pub level: String,
    /// JSON lines instead of text.
    pub json: bool,
}

/// Sets up the process's logs.
///
/// # Errors
/// When the filter is malformed, or logs are set up already.
pub fn init(options: &LogOptions) -> Result<(), LogError> {
    let directives = match std::env::var("RUST_LOG") {
        Ok(directives) if !directives.trim().is_empty() => directives,
        _ => {
            let level = if options.level.is_empty() { "info" } else { options.level.as_str() };
            // Crate targets start with `smg_`, the documented ones with `smg`: one directive covers both.
            // The consensus library warns of each heartbeat to a member that is gone; who is gone is told once, by the store.
            format!("warn,openraft=error,smg={level}")
        }
    };
    let filter = EnvFilter::try_new(&directives)
        .map_err(|error| LogError::Filter { filter: directives.clone(), reason: error.to_string() })?;
    let builder = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .with_timer(UtcTime::rfc_3339());
    let result = if options.json { builder.json().flatten_event(true).try_init() } else { builder.try_init() };
    result.map_err(|_| LogError::AlreadySet)
}
