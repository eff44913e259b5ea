//! Logs: one line an event on standard error, and in files where a directory is given, as text or JSON.
//!
//! `RUST_LOG` wins over the level of the command line. With a plain level, the project's own crates log at it and libraries at `warn`.
//!
//! Invariants
//! * no request waits for a log: lines are written by threads of their own, and what a sink has not taken is bounded ([`MAX_WAITING`]).
//!   Lines beyond are dropped and counted ([`DroppedLines`]);
//! * what was logged is written before the process ends by itself: [`Logs`] waits for it, a second at most for each sink;
//! * a directory keeps the files of the last [`KEPT_FILES`] days.

use std::io::{self, IsTerminal};
use std::path::PathBuf;
use std::sync::OnceLock;

use prometheus::core::{Collector, Desc};
use prometheus::proto::MetricFamily;
use prometheus::{IntGaugeVec, Opts};
use thiserror::Error;
use tracing_appender::non_blocking::{ErrorCounter, NonBlocking, NonBlockingBuilder, WorkerGuard};
use tracing_appender::rolling::{RollingFileAppender, Rotation};
use tracing_subscriber::fmt::time::UtcTime;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::registry::LookupSpan;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{EnvFilter, Layer};

/// Most lines that wait for a sink.
const MAX_WAITING: usize = 16_384;
/// Most files in a directory of logs; there is one a day.
const KEPT_FILES: usize = 14;

/// What the sinks of this process did not take. There is one set of logs a process, as there is one subscriber.
static DROPPED: OnceLock<Vec<(&'static str, ErrorCounter)>> = OnceLock::new();

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
pub struct Logs {
    _sinks: Vec<WorkerGuard>,
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
    let (console, console_sink) = waiting_room("smg-log-console").finish(io::stderr());
    let mut dropped = vec![("console", console.error_counter())];
    let mut sinks = vec![console_sink];
    let mut layers = vec![lines(console, options.json, io::stderr().is_terminal())];
    if let Some(directory) = &options.directory {
        let unusable = |reason: String| LogError::Directory { directory: directory.clone(), reason };
        std::fs::create_dir_all(directory).map_err(|error| unusable(error.to_string()))?;
        let files = RollingFileAppender::builder()
            .rotation(Rotation::DAILY)
            .filename_prefix("smg")
            .filename_suffix("log")
            .max_log_files(KEPT_FILES)
            .build(directory)
            .map_err(|error| unusable(with_causes(&error)))?;
        let (files, files_sink) = waiting_room("smg-log-files").finish(files);
        dropped.push(("files", files.error_counter()));
        sinks.push(files_sink);
        layers.push(lines(files, options.json, false));
    }
    tracing_subscriber::registry().with(layers).with(filter).try_init().map_err(|_| LogError::AlreadySet)?;
    DROPPED.set(dropped).map_err(|_| LogError::AlreadySet)?;
    Ok(Logs { _sinks: sinks })
}

fn waiting_room(thread: &str) -> NonBlockingBuilder {
    NonBlockingBuilder::default().lossy(true).buffered_lines_limit(MAX_WAITING).thread_name(thread)
}

/// A layer that writes lines to a sink.
fn lines<S>(sink: NonBlocking, json: bool, colours: bool) -> Box<dyn Layer<S> + Send + Sync>
where
    S: tracing::Subscriber + for<'a> LookupSpan<'a>,
{
    let layer = tracing_subscriber::fmt::layer().with_writer(sink).with_ansi(colours).with_timer(UtcTime::rfc_3339());
    if json { layer.json().flatten_event(true).boxed() } else { layer.boxed() }
}

/// An error and what caused it: the library's own message names no cause.
fn with_causes(error: &dyn std::error::Error) -> String {
    let mut words = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        words = format!("{words}: {error}");
        cause = error.source();
    }
    words
}

/// Lines that were dropped because their sink was too slow, by sink. Cheap to clone.
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
        for (sink, dropped) in DROPPED.get().into_iter().flatten() {
            self.0.with_label_values(&[sink]).set(i64::try_from(dropped.dropped_lines()).unwrap_or(i64::MAX));
        }
        self.0.collect()
    }
}
