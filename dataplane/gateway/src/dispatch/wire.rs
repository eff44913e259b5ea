//! Which wire a request needs, where its model has workers of both.
//!
//! Workers that speak HTTP take whatever the client sent; over gRPC the gateway has to understand a request to ask for it. So a request that
//! turns out not to be servable over gRPC, after a pair of that wire was selected, is given to workers that speak HTTP before it is refused.

use smg_engines::field::Field;
use smg_engines::{Legs, Route};
use smg_fleet::Wire;

use super::Inbound;
use crate::core::Core;
use crate::fleet::table::ModelPool;

/// Whether only workers that speak HTTP can serve a route: over gRPC engines generate, and the gateway counts tokens itself.
pub(super) fn needs_http(route: Route) -> bool {
    matches!(route, Route::Rerank | Route::Embeddings | Route::Classify)
}

/// Whether some worker of `pool` can serve a route that needs HTTP.
pub(super) fn speaks_http(route: Route, pool: &ModelPool) -> bool {
    if route.legs() == Legs::RegularOnly { pool.has_regular_http() } else { pool.wires.http }
}

/// The wire that alone can serve a request, as far as that is known before anybody was asked.
pub(super) fn sole(core: &Core, request: &Inbound, pool: &ModelPool) -> Option<Wire> {
    if needs_http(request.route) || request.route == Route::CountTokens {
        return Some(Wire::Http);
    }
    // A response that this gateway keeps is known to no engine.
    let kept = || {
        let previous = request.body.routing_string(Field::PreviousResponseId)?;
        core.responses.get(&previous)
    };
    let goes_on = request.route == Route::Responses && pool.wires.grpc && pool.wires.http && kept().is_some();
    goes_on.then_some(Wire::Grpc)
}
