//! The client edge: routes, request bodies, request ids, probes, and the one mapper from errors to responses.

pub mod admin;
mod engines;
pub mod error;
mod infer;
mod intake;
mod observe;
mod probes;
pub mod request_id;

use std::sync::Arc;

use axum::Router;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::middleware;
use axum::routing::{any, get, post};
use http::Response;
use smg_engines::Route;

use crate::core::Core;
use crate::sync::Link;
use error::GatewayError;

/// What handlers share.
#[derive(Clone)]
pub struct Front {
    /// The gateway.
    pub core: Arc<Core>,
    /// The way to the control plane.
    pub link: Arc<Link>,
}

/// The router of a gateway's API port.
pub fn router(core: Arc<Core>, link: Arc<Link>) -> Router {
    let front = Front { core, link };
    let mut router = Router::new();
    for route in Route::ALL {
        router = router.route(
            route.path(),
            post(move |state: State<Front>, request: Request| infer::handle(state.0.core, route, request)),
        );
    }
    router
        .route("/health", get(probes::alive))
        .route("/liveness", get(probes::alive))
        .route("/readiness", get(probes::readiness))
        .route("/v1/models", get(probes::models))
        .route("/v1/models/{*id}", get(probes::model))
        .route(
            "/rerank",
            post(|state: State<Front>, request: Request| infer::handle(state.0.core, Route::Rerank, request)),
        )
        .route("/get_server_info", get(engines::server_info))
        .route("/get_model_info", get(engines::model_info))
        .route("/health_generate", get(engines::health_generate))
        .route("/engine_metrics", get(engines::metrics))
        .route("/flush_cache", post(engines::flush_cache))
        .route("/fleet/decisions", get(probes::decisions))
        .route("/workers", any(admin::forward))
        .route("/workers/{id}", any(admin::forward))
        .route("/fleet/policies", any(admin::forward))
        .route("/fleet/policies/{*model}", any(admin::forward))
        .route("/fleet/pairing", any(admin::forward))
        .route("/fleet/pairing/explain", any(admin::forward))
        .route("/fleet/settings", any(admin::forward))
        .route("/fleet/gateways", any(admin::forward))
        .route("/fleet/cluster", any(admin::forward))
        .fallback(unknown_url)
        .method_not_allowed_fallback(method_not_allowed)
        .layer(middleware::from_fn_with_state(front.clone(), observe::observe))
        .with_state(front)
}

async fn unknown_url(request: Request) -> Response<Body> {
    GatewayError::UnknownUrl(request.method().to_string(), request.uri().path().to_owned()).into_response()
}

async fn method_not_allowed(request: Request) -> Response<Body> {
    GatewayError::MethodNotAllowed(request.method().to_string(), request.uri().path().to_owned()).into_response()
}
