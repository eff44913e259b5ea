//! Sockets and time, for both planes.
//!
//! * [`serve`]: one accept loop for every listener, with a drain that cuts nothing before its deadline;
//! * [`patience`]: how long a connection may make us wait, and how old it may grow;
//! * [`overdue`]: responses that outlive their time;
//! * [`tls`]: certificates from files, for listeners and towards workers;
//! * [`mutual`]: TLS between the parts of a fleet, each with a certificate that says what it is;
//! * [`memory`]: a transport inside the process, so that one process with both planes runs the same services as two;
//! * [`backoff`]: how long to wait before trying again;
//! * [`spawn`]: named background tasks.

pub mod backoff;
pub mod engine;
pub mod memory;
pub mod mutual;
pub mod overdue;
pub mod patience;
pub mod serve;
pub mod tls;
mod watched;

use std::future::Future;

use tracing::Instrument;

/// Spawns a background task under a name, which is the span of its log lines.
pub fn spawn<F>(name: &'static str, task: F) -> tokio::task::JoinHandle<F::Output>
where
    F: Future + Send + 'static,
    F::Output: Send + 'static,
{
    tokio::spawn(task.instrument(tracing::info_span!(target: "smg", "task", task = name)))
}

/// Milliseconds since the Unix epoch, for records that people read. Never compared between hosts.
pub fn unix_millis() -> u64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}
