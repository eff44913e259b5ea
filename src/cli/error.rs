//! Why a command line does not start anything.

/// Exit code of every error of this module: `EX_USAGE` of sysexits.
pub const EXIT_USAGE: u8 = 64;

/// A command line that starts nothing. All variants exit with [`EXIT_USAGE`].
#[derive(Debug, thiserror::Error)]
pub enum CliError {
    /// The arguments could not be parsed; the text is complete, with usage and suggestion.
    #[error("{0}")]
    Syntax(#[from] clap::Error),
    /// A flag names something this version does not have.
    #[error("error: {flag}: {reason}")]
    Refused {
        /// The flag with its dashes, or the environment variable.
        flag: String,
        /// What is missing, and what can be given instead.
        reason: String,
    },
    /// Flags that parse one by one but contradict each other or the process.
    #[error("error: {flag}: {reason}")]
    Conflict {
        /// The flag to change.
        flag: String,
        /// The rule that does not hold.
        reason: String,
    },
}

impl CliError {
    pub(super) fn refused(flag: &str, reason: impl Into<String>) -> Self {
        Self::Refused { flag: flag.to_owned(), reason: reason.into() }
    }

    pub(super) fn conflict(flag: &str, reason: impl Into<String>) -> Self {
        Self::Conflict { flag: flag.to_owned(), reason: reason.into() }
    }
}
