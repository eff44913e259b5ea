//! The inference routes.

use std::sync::Arc;
use std::time::Instant;

use axum::body::Body;
use bytes::Bytes;
use http::{HeaderMap, Request, Response};
use smg_engines::{ClientBody, Route};

use super::intake;
use crate::core::Core;
use crate::dispatch::explain::DECISION;
use crate::dispatch::{self, Inbound};
use crate::trace::RequestTrace;

/// Answers an inference request.
pub(super) async fn handle<B>(
    core: Arc<Core>,
    route: Route,
    request: Request<B>,
    request_id: Arc<str>,
) -> Response<Body>
where
    B: http_body::Body<Data = Bytes, Error: std::error::Error> + Unpin + Send + 'static,
{
    let arrived = Instant::now();
    let (head, body) = request.into_parts();
    let limit = core.options.max_payload_bytes;
    let bytes = match intake::read(&head.headers, body, limit, core.options.upload_stall_timeout).await {
        Ok(bytes) => bytes,
        Err(error) => return error.into_response(),
    };
    let body = match ClientBody::parse(bytes, route) {
        Ok(body) => body,
        Err(error) => return super::error::GatewayError::Body(error).into_response(),
    };
    let trace = head.extensions.get::<Arc<RequestTrace>>().cloned();
    let explain = asks_for_the_decision(&head.headers);
    dispatch::serve(&core, Inbound { route, headers: head.headers, body, request_id, arrived, trace, explain }).await
}

/// Whether a client asks for the decision on its request: with any value but those that say no.
fn asks_for_the_decision(headers: &HeaderMap) -> bool {
    headers.get(DECISION).is_some_and(|value| !matches!(value.as_bytes(), b"" | b"0" | b"false"))
}
