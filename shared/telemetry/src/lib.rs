//! What a process tells about itself: metrics, logs and traces.
//!
//! Every metric is declared once, in [`metrics`], with its help text and labels; nothing else registers one. Log targets are those of the
//! documented system, whatever our crates are called: [`SMG`] for the life of the process, [`ROUTERS`] for routing decisions.

pub mod ages;
pub mod fleet;
pub mod logs;
pub mod metrics;
pub mod trace;

pub use metrics::Metrics;

/// Log target of the process.
pub const SMG: &str = "smg";
/// Log target of routing decisions: each selected pair at debug level.
pub const ROUTERS: &str = "smg::routers";
