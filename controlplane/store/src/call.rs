//! What is known of a call that has no answer.

use std::error::Error;

use tonic::{ConnectError, Status};

/// Why a call has no answer.
#[derive(Debug, Clone)]
pub(crate) enum CallError {
    /// It cannot have arrived.
    NotSent(String),
    /// It was refused before anything was done.
    Refused(String),
    /// It may have arrived.
    Lost(String),
}

impl CallError {
    /// What a status says that is not the other side's own.
    pub fn of_transport(status: &Status) -> Self {
        let mut cause: Option<&(dyn Error + 'static)> = status.source();
        while let Some(error) = cause {
            if error.is::<ConnectError>() {
                return Self::NotSent(describe(error));
            }
            cause = error.source();
        }
        // What the transport says of itself is no more than that it failed.
        Self::Lost(match status.source() {
            Some(cause) => describe(cause),
            None => status.message().to_owned(),
        })
    }

    /// Why there is none.
    pub fn message(&self) -> &str {
        match self {
            Self::NotSent(message) | Self::Refused(message) | Self::Lost(message) => message,
        }
    }
}

/// An error with its causes.
pub(crate) fn describe(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(inner) = cause {
        let inner_text = inner.to_string();
        if !text.contains(&inner_text) {
            text = format!("{text}: {inner_text}");
        }
        cause = inner.source();
    }
    text
}
