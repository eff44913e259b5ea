//! A service that only one kind of part may call.
//!
//! Calls over a listener without TLS, and from inside the process, pass: who may make them was decided when the process was started. Everybody
//! else is judged by certificate, for each call, before the service sees it. The refusal is an answer of gRPC (`PERMISSION_DENIED`), so that
//! the caller knows why and that nothing was done.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use http::{HeaderValue, Request, Response, header};
use tower::Service;

use super::identity::{Caller, Part};
use super::seldom::Seldom;

/// `PERMISSION_DENIED` of gRPC.
const PERMISSION_DENIED: HeaderValue = HeaderValue::from_static("7");

/// A guarded gRPC service.
#[derive(Debug, Clone)]
pub struct Guard<S> {
    inner: S,
    part: Part,
    refusals: Arc<Seldom>,
}

impl<S> Guard<S> {
    /// Lets `part` call `inner`.
    pub fn new(inner: S, part: Part) -> Self {
        Self { inner, part, refusals: Arc::default() }
    }
}

impl<S, Q, B> Service<Request<Q>> for Guard<S>
where
    S: Service<Request<Q>, Response = Response<B>>,
    S::Future: Send + 'static,
    S::Error: Send + 'static,
    B: Default + Send + 'static,
{
    type Response = Response<B>;
    type Error = S::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Response<B>, S::Error>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: Request<Q>) -> Self::Future {
        let judged = request.extensions().get::<Caller>().map(|caller| caller.must_be(self.part).map(drop));
        let Some(Err(refused)) = judged else { return Box::pin(self.inner.call(request)) };
        let reason = refused.to_string();
        if let Some(unsaid) = self.refusals.may_speak() {
            let path = request.uri().path();
            tracing::warn!(target: "smg", path, reason, unsaid, "a call was refused");
        }
        let response = refuse(&reason);
        Box::pin(async move { Ok(response) })
    }
}

fn refuse<B: Default>(reason: &str) -> Response<B> {
    let mut response = Response::new(B::default());
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
    headers.insert("grpc-status", PERMISSION_DENIED);
    if let Ok(message) = HeaderValue::from_str(&percent_encoded(reason)) {
        headers.insert("grpc-message", message);
    }
    response
}

/// As gRPC wants messages: printable ASCII, everything else as bytes in hexadecimal.
fn percent_encoded(text: &str) -> String {
    let encode = |byte: u8| match byte {
        b' '..=b'$' | b'&'..=b'~' => char::from(byte).to_string(),
        other => format!("%{other:02X}"),
    };
    text.bytes().map(encode).collect()
}
