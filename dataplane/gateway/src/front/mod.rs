//! The client edge: routes, request bodies, request ids, probes, and the one mapper from errors to responses.

pub mod access;
pub mod admin;
pub mod admission;
pub mod cors;
pub(crate) mod engines;
pub mod error;
mod exposition;
mod flight;
mod infer;
mod intake;
mod loads;
pub(crate) mod observe;
mod probes;
pub mod request_id;
mod responses;

use std::borrow::Cow;
use std::convert::Infallible;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use axum::body::Body;
use axum::extract::{Request, State};
use axum::middleware;
use axum::routing::{any, get, post};
use axum::{Extension, Router};
use http::{Method, Response};
use hyper::body::Incoming;
use smg_engines::Route;

use crate::core::Core;
use crate::sync::Link;
use error::GatewayError;
use observe::RequestId;

/// What handlers share.
#[derive(Clone)]
pub struct Front {
    /// The gateway.
    pub core: Arc<Core>,
    /// The way to the control plane.
    pub link: Arc<Link>,
    /// What is asked of engines right now.
    asks: Arc<engines::Asks>,
}

/// The service of a gateway's API port: inference by the shortest way, everything else through a router.
#[derive(Clone)]
pub struct Api {
    front: Front,
    router: Router,
}

impl Api {
    /// The service of a gateway.
    pub fn new(core: Arc<Core>, link: Arc<Link>) -> Self {
        let front = Front { core, link, asks: Arc::default() };
        Self { router: router(front.clone()), front }
    }
}

impl tower::Service<http::Request<Incoming>> for Api {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Body>, Infallible>> + Send>>;

    fn poll_ready(&mut self, _cx: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Incoming>) -> Self::Future {
        let path = request.uri().path();
        // Answers to pages of other origins are marked on their way through the router.
        let short = request.method() == Method::POST && self.front.core.options.cors_origins == cors::Origins::None;
        let inference = Route::ALL.into_iter().find(|route| short && route.path() == path);
        match inference {
            Some(route) => {
                let front = self.front.clone();
                Box::pin(async move {
                    let answer = |request, id| infer::handle(Arc::clone(&front.core), route, request, id);
                    Ok(observe::observed(&front, Cow::Borrowed(route.path()), request, answer).await)
                })
            }
            None => Box::pin(tower::Service::call(&mut self.router, request)),
        }
    }
}

/// An inference request that came through the router.
async fn routed(route: Route, state: State<Front>, id: Extension<RequestId>, request: Request) -> Response<Body> {
    infer::handle(state.0.core, route, request, id.0.0).await
}

fn router(front: Front) -> Router {
    let router = inference()
        .merge(open(&front))
        .merge(administration(&front))
        .fallback(unknown_url)
        .method_not_allowed_fallback(method_not_allowed)
        .layer(middleware::from_fn_with_state(front.clone(), observe::routed));
    if front.core.options.cors_origins == cors::Origins::None {
        return router.with_state(front);
    }
    router.layer(middleware::from_fn_with_state(front.clone(), cors::answer)).with_state(front)
}

/// Routes that workers serve.
fn inference() -> Router<Front> {
    let mut router = Router::new();
    for route in Route::ALL {
        router = router.route(
            route.path(),
            post(move |state: State<Front>, id: Extension<RequestId>, request: Request| {
                routed(route, state, id, request)
            }),
        );
    }
    router.route(
        "/rerank",
        post(|state: State<Front>, id: Extension<RequestId>, request: Request| {
            routed(Route::Rerank, state, id, request)
        }),
    )
}

/// Routes that need nothing.
fn open(front: &Front) -> Router<Front> {
    Router::new()
        .route("/get_server_info", get(engines::server_info))
        .route("/get_model_info", get(engines::model_info))
        .route("/health_generate", get(engines::health_generate))
        .route("/engine_metrics", get(engines::metrics))
        .route_layer(middleware::from_fn_with_state(front.clone(), engines::once))
        .route("/health", get(probes::alive))
        .route("/liveness", get(probes::alive))
        .route("/readiness", get(probes::readiness))
        .route_layer(middleware::map_response_with_state(front.clone(), probes::name_the_fleet))
        .route("/v1/models", get(probes::models))
        .route("/v1/models/{*id}", get(probes::model))
        .route("/v1/responses/{id}", get(responses::get).delete(responses::delete))
        .route("/loads", get(loads::loads))
}

/// Routes that operators use: those answered here, and those forwarded to the control plane, which judges them itself.
fn administration(front: &Front) -> Router<Front> {
    Router::new()
        .route("/flush_cache", post(engines::flush_cache))
        .route_layer(middleware::from_fn_with_state(front.clone(), engines::once))
        .route("/get_loads", get(loads::loads))
        .route("/fleet/decisions", get(probes::decisions))
        .route_layer(middleware::from_fn_with_state(front.clone(), access::administration))
        .route("/workers", any(admin::forward))
        .route("/workers/{id}", any(admin::forward))
        .route("/fleet/workers/{id}/intent", any(admin::forward))
        .route("/fleet/policies", any(admin::forward))
        .route("/fleet/policies/{*model}", any(admin::forward))
        .route("/fleet/pairing", any(admin::forward))
        .route("/fleet/pairing/explain", any(admin::forward))
        .route("/fleet/settings", any(admin::forward))
        .route("/fleet/gateways", any(admin::forward))
        .route("/fleet/admission", any(admin::forward))
        .route("/fleet/audit", any(admin::forward))
        .route("/fleet/backup", any(admin::forward))
        .route("/fleet/cluster", any(admin::forward))
        .route("/fleet/cluster/join", any(admin::forward))
        .route("/fleet/cluster/remove", any(admin::forward))
        .route("/fleet/cluster/replace", any(admin::forward))
        .route("/fleet/tokens", any(admin::forward))
        .route("/fleet/tokens/{id}", any(admin::forward))
        .route("/fleet/whoami", any(admin::forward))
        .route("/fleet/openapi.json", any(admin::forward))
}

async fn unknown_url(request: Request) -> Response<Body> {
    GatewayError::UnknownUrl(request.method().to_string(), request.uri().path().to_owned()).into_response()
}

async fn method_not_allowed(request: Request) -> Response<Body> {
    GatewayError::MethodNotAllowed(request.method().to_string(), request.uri().path().to_owned()).into_response()
}
