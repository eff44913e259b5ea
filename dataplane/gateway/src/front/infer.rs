//! The inference routes.

use std::sync::Arc;
use std::time::Instant;

use axum::body::Body;
use axum::extract::Request;
use http::Response;
use smg_engines::{ClientBody, Route};

use super::intake;
use super::observe::RequestId;
use crate::core::Core;
use crate::dispatch::{self, Inbound};

pub(super) async fn handle(core: Arc<Core>, route: Route, request: Request) -> Response<Body> {
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
    let request_id = head.extensions.get::<RequestId>().map(|id| id.0.to_string()).unwrap_or_default();
    dispatch::serve(&core, Inbound { route, headers: head.headers, body, request_id, arrived }).await
}
