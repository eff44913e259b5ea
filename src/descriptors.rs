//! How many files and connections this process may have open at once.
//!
//! Systems start programs with a soft limit of 1,024, for the sake of programs that use `select`. A gateway holds three connections for a
//! running request, so the limit is raised to the hard one, which is the operator's.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use smg_telemetry::SMG;

/// A process that may have fewer than this is told so: about as many connections as a thousand requests have.
const FEW: u64 = 4096;

/// Raises the soft limit of this process to its hard one.
pub fn raise_limit() {
    let before = getrlimit(Resource::Nofile);
    let mut now = before.current;
    if before.current != before.maximum {
        let wanted = Rlimit { current: before.maximum, maximum: before.maximum };
        match setrlimit(Resource::Nofile, wanted) {
            Ok(()) => {
                now = before.maximum;
                tracing::info!(target: SMG, soft = shown(before.current), raised_to = shown(now), "limit of open files");
            }
            Err(error) => {
                tracing::warn!(target: SMG, soft = shown(now), "the limit of open files cannot be raised: {error}")
            }
        }
    }
    if now.is_some_and(|files| files < FEW) {
        tracing::warn!(
            target: SMG,
            limit = shown(now),
            "few files may be open, and a running request takes three connections: raise the hard limit (ulimit -Hn, LimitNOFILE)"
        );
    }
}

fn shown(limit: Option<u64>) -> String {
    limit.map_or_else(|| "unlimited".to_owned(), |files| files.to_string())
}
