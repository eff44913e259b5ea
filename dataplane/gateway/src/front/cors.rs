//! Answering browsers that call from pages of other origins (the Fetch standard, CORS protocol).
//!
//! Off unless origins are named. Then an answer to a request from one of them says so, and a preflight is answered here: it carries no
//! credentials, so it needs none.

use axum::body::Body;
use axum::extract::{Request, State};
use axum::middleware::Next;
use http::{HeaderMap, HeaderValue, Method, Response, StatusCode, header};

use super::Front;

/// Methods a page may use, as documented.
const METHODS: HeaderValue = HeaderValue::from_static("GET, POST, PATCH, DELETE, OPTIONS");
/// Headers of answers that a page may read besides the plain ones.
const EXPOSED: HeaderValue = HeaderValue::from_static("x-request-id, x-smg-error-code, retry-after");
/// Seconds a browser may remember a preflight.
const MAX_AGE: HeaderValue = HeaderValue::from_static("3600");

/// Whose pages may call.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum Origins {
    /// Nobody's.
    #[default]
    None,
    /// Everybody's.
    Any,
    /// Those of these origins.
    These(Vec<HeaderValue>),
}

impl Origins {
    /// What `Access-Control-Allow-Origin` says to a page of `origin`.
    fn allow(&self, origin: &HeaderValue) -> Option<HeaderValue> {
        match self {
            Self::None => None,
            Self::Any => Some(HeaderValue::from_static("*")),
            Self::These(origins) => origins.contains(origin).then(|| origin.clone()),
        }
    }
}

/// Answers preflights, and marks the answers to others.
pub(super) async fn answer(State(front): State<Front>, request: Request, next: Next) -> Response<Body> {
    let origins = &front.core.options.cors_origins;
    let allowed = request.headers().get(header::ORIGIN).and_then(|origin| origins.allow(origin));
    let asked = request.headers().get(header::ACCESS_CONTROL_REQUEST_METHOD);
    if request.method() == Method::OPTIONS && request.headers().contains_key(header::ORIGIN) && asked.is_some() {
        let wanted = request.headers().get(header::ACCESS_CONTROL_REQUEST_HEADERS).cloned();
        let mut response = Response::new(Body::empty());
        *response.status_mut() = StatusCode::NO_CONTENT;
        if allowed.is_some() {
            let headers = response.headers_mut();
            headers.insert(header::ACCESS_CONTROL_ALLOW_METHODS, METHODS);
            headers.insert(header::ACCESS_CONTROL_MAX_AGE, MAX_AGE);
            wanted.map(|wanted| headers.insert(header::ACCESS_CONTROL_ALLOW_HEADERS, wanted));
        }
        mark(response.headers_mut(), allowed, origins);
        return response;
    }
    let mut response = next.run(request).await;
    if allowed.is_some() {
        response.headers_mut().insert(header::ACCESS_CONTROL_EXPOSE_HEADERS, EXPOSED);
    }
    mark(response.headers_mut(), allowed, origins);
    response
}

fn mark(headers: &mut HeaderMap, allowed: Option<HeaderValue>, origins: &Origins) {
    // What an engine says about origins is between it and this gateway.
    headers.remove(header::ACCESS_CONTROL_ALLOW_ORIGIN);
    allowed.map(|allowed| headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, allowed));
    if let Origins::These(_) = origins {
        headers.append(header::VARY, HeaderValue::from_static("origin"));
    }
}
