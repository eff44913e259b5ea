//! What a gateway does about failing workers, for its own traffic and at once.
//!
//! * [`breaker`]: a worker that keeps failing gets no traffic for a while, then a few trials (pure);
//! * [`retry`]: which failures are tried again, and when (pure);
//! * [`budget`]: retries are a share of the traffic, so that they cannot multiply an overload (pure);
//! * [`pace`]: a worker that asks for a pause gets one (pure);
//! * [`stale`]: a leg that met a connection which the engine had closed is sent again at once;
//! * [`ejection`]: a worker that refuses connections leaves rotation on the first refusal and is probed until it is back;
//! * [`identity`]: who comes back is asked who it is before it gets a request.

pub mod breaker;
pub mod budget;
pub mod ejection;
pub mod identity;
pub mod pace;
pub mod retry;
pub mod stale;
