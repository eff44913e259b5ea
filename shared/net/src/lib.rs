//! Listeners, HTTP client, drain, backoff, named tasks.
