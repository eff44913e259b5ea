//! Logs: one line an event on standard error, and in files where a directory is given, as text or JSON.
//!
//! `RUST_LOG` wins over the level of the command line. With a plain level, the project's own crates log at it and libraries at `warn`.
//!
//! Invariants
//! * no request waits for a log: lines are written by threads of their own, and what a sink has not taken is bounded ([`sink`]);
//! * a line is written, or it is dropped and counted ([`DroppedLines`]);
//! * what was logged is written before the process ends by itself: [`Logs`] waits for it, [`LAST_LINES`] at most.

mod files;
mod sink;

use std::io::{self, IsTerminal};
use std::path::PathBuf;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use prometheus::core::{Collector, Desc};
use prometheus::proto::MetricFamily;
use prometheus::{IntGaugeVec, Opts};
use thiserror::Error;
use tracing_subscriber::fmt::time::UtcTime;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::registry::LookupSpan;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{EnvFilter, Layer};

use files::Files;
use sink::{Lines, Sink};

/// How long the end of a process waits for its last lines.
const LAST_LINES: Duration = Duration::from_secs(1);

/// The sinks of this process, by name. There is one set of logs a process, as there is one subscriber.
static SINKS: OnceLock<Vec<(&'static str, Sink)>> = OnceLock::new();

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
    /// Files cannot be written there.
    #[error("log files cannot be written to '{}': {reason}", directory.display())]
    Directory {
        /// What was given.
        directory: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// The system has no handle or thread left for lines.
    #[error("nothing to write lines with: {0}")]
    Resources(#[from] io::Error),
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
    /// Where to write files too; made when it is missing.
    pub directory: Option<PathBuf>,
}

/// The process's logs. Dropping them writes what waits.
#[derive(Debug)]
#[must_use]
pub struct Logs(Vec<(&'static str, Sink)>);

impl Drop for Logs {
    fn drop(&mut self) {
        let until = Instant::now() + LAST_LINES;
        self.0.iter().for_each(|(_, sink)| sink.end());
        self.0.iter().for_each(|(_, sink)| sink.wait(until));
    }
}

/// Sets up the process's logs.
///
/// # Errors
/// When the filter is malformed, the directory is of no use, or logs are set up already.
pub fn init(options: &LogOptions) -> Result<Logs, LogError> {
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
    let mut sinks = vec![("console", Sink::start("console", Lines::of_console()?)?)];
    if let Some(directory) = &options.directory {
        let unusable =
            |error: io::Error| LogError::Directory { directory: directory.clone(), reason: error.to_string() };
        let files = Files::open(directory, files::today).map_err(unusable)?;
        sinks.push(("files", Sink::start("files", files)?));
    }
    let colours = |name| name == "console" && io::stderr().is_terminal();
    let layers: Vec<_> = sinks.iter().map(|(name, sink)| lines(sink.clone(), options.json, colours(*name))).collect();
    tracing_subscriber::registry().with(layers).with(filter).try_init().map_err(|_| LogError::AlreadySet)?;
    SINKS.set(sinks.clone()).map_err(|_| LogError::AlreadySet)?;
    Ok(Logs(sinks))
}

/// A layer that writes lines to a sink.
fn lines<S>(sink: Sink, json: bool, colours: bool) -> Box<dyn Layer<S> + Send + Sync>
where
    S: tracing::Subscriber + for<'a> LookupSpan<'a>,
{
    let layer = tracing_subscriber::fmt::layer().with_writer(sink).with_ansi(colours).with_timer(UtcTime::rfc_3339());
    if json { layer.json().flatten_event(true).boxed() } else { layer.boxed() }
}

/// Lines that were dropped because their sink was too slow or failed, by sink. Cheap to clone.
#[derive(Debug, Clone)]
pub struct DroppedLines(IntGaugeVec);

impl DroppedLines {
    /// A family of this name, help and label (`sink`).
    ///
    /// # Errors
    /// When the names are none that metrics may have.
    pub fn new(options: Opts, labels: &[&str]) -> Result<Self, prometheus::Error> {
        Ok(Self(IntGaugeVec::new(options, labels)?))
    }
}

impl Collector for DroppedLines {
    fn desc(&self) -> Vec<&Desc> {
        self.0.desc()
    }

    fn collect(&self) -> Vec<MetricFamily> {
        for (name, sink) in SINKS.get().into_iter().flatten() {
            self.0.with_label_values(&[name]).set(i64::try_from(sink.dropped()).unwrap_or(i64::MAX));
        }
        self.0.collect()
    }
}
