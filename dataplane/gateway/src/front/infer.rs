//! The inference routes.

use std::sync::Arc;
use std::time::Instant;

use axum::body::Body;
use bytes::Bytes;
use http::{Request, Response};
use smg_engines::{ClientBody, Route};

use super::access;
use super::admission::{self, Admission};
use super::error::GatewayError;
use super::intake;
use crate::core::Core;
use crate::dispatch::{self, Inbound};
use crate::heavy;
use crate::trace::RequestTrace;

/// Bodies of at most so many bytes are read where they came in.
const SMALL: usize = 512 * 1024;

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
    let (mut head, body) = request.into_parts();
    if let Err(denied) = access::admit(&core.options.keys, &mut head.headers) {
        intake::linger(body);
        return access::refuse_inference(denied);
    }
    if core.hops.is_loop(&head.headers) {
        intake::linger(body);
        return GatewayError::LoopDetected.into_response();
    }
    if let Some(Err(refused)) = core.admission.as_ref().map(Admission::look) {
        intake::linger(body);
        return GatewayError::NotAdmitted(refused).into_response();
    }
    let bytes = match intake::read(&head.headers, body, intake::Limits::of(&core.options)).await {
        Ok(bytes) => bytes,
        Err(error) => return error.into_response(),
    };
    let length = bytes.len();
    let body = match core.heavy.run(length, SMALL, move || ClientBody::parse(bytes, route)).await {
        Ok(Ok(body)) => body,
        Ok(Err(error)) => return GatewayError::Body(error).into_response(),
        Err(heavy::Failed) => return GatewayError::BodyBroken("reading it failed".to_owned()).into_response(),
    };
    let trace = head.extensions.get::<Arc<RequestTrace>>().cloned();
    let explain = access::may_see_its_decision(&core, &head.headers);
    let inbound = Inbound { route, headers: head.headers, body, request_id, arrived, trace, explain };
    let Some(admission) = &core.admission else { return dispatch::serve(&core, inbound).await };
    match admission.admit().await {
        Ok(permit) => admission::hold(dispatch::serve(&core, inbound).await, permit),
        Err(refused) => GatewayError::NotAdmitted(refused).into_response(),
    }
}
