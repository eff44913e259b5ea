//! What a gateway does about failing workers, for its own traffic and at once.
//!
//! * [`breaker`]: a worker that keeps failing gets no traffic for a while, then a few trials (pure);
//! * [`retry`]: which failures are tried again, and when (pure);
//! * [`ejection`]: a worker that refuses connections leaves rotation on the first refusal and is probed until it is back.

pub mod breaker;
pub mod ejection;
pub mod retry;
