//! Metrics registry and logs.
