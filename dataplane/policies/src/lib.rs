//! Routing policies.
