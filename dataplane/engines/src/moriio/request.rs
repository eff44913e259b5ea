//! Requests that MoRI-IO cannot serve, whatever the pair.

use http::StatusCode;

use crate::body::{ClientBody, Route};
use crate::field::Field;
use crate::json;
use crate::prompt_logprobs::PromptLogprobs;

/// The connector reads its peers from a request id that carries these, before it reads the explicit fields.
const PEER_MARKERS: [&str; 2] = ["___prefill_addr_", "___decode_addr_"];

/// Why a request is refused before either leg is contacted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum RequestRefusal {
    /// The route has no MoRI-IO form.
    #[error("MoRIIOConnector pairs serve only /v1/chat/completions and /v1/completions")]
    Route,
    /// Several sequences would share one handoff.
    #[error(
        "MoRIIOConnector pairs serve one sequence per request: n must be 1, prompts cannot be batched, and beam search is not supported"
    )]
    FanOut,
    /// Only an engine that computed the prompt could answer, and a decode engine never computes one.
    #[error(
        "MoRIIOConnector pairs cannot give the log probabilities of the prompt in a stream or with `echo`: ask with `prompt_logprobs` alone"
    )]
    PromptLogprobs,
    /// Whoever sets a peer's address in a request id steers where KV goes.
    #[error("request ids must not contain `___prefill_addr_` or `___decode_addr_`")]
    RequestId,
}

impl RequestRefusal {
    /// The status.
    pub const fn status(self) -> StatusCode {
        match self {
            Self::Route => StatusCode::NOT_IMPLEMENTED,
            Self::FanOut | Self::PromptLogprobs | Self::RequestId => StatusCode::BAD_REQUEST,
        }
    }

    /// The code.
    pub const fn code(self) -> &'static str {
        match self {
            Self::Route => "moriio_route_unsupported",
            Self::FanOut => "moriio_fanout_unsupported",
            Self::PromptLogprobs => "moriio_prompt_logprobs_unsupported",
            Self::RequestId => "moriio_request_id_reserved",
        }
    }
}

/// Checks a request. `request_ids` are the values of `X-Request-Id`, the client's and the one that goes to the engines.
///
/// # Errors
/// The first reason to refuse it: route, then fan-out, then log probabilities, then request ids.
pub fn check_request<'a>(
    body: &ClientBody,
    request_ids: impl IntoIterator<Item = &'a [u8]>,
) -> Result<(), RequestRefusal> {
    if !matches!(body.route(), Route::ChatCompletions | Route::Completions) {
        return Err(RequestRefusal::Route);
    }
    let beam_search = body.value(Field::UseBeamSearch).is_some_and(|raw| raw != "false");
    if body.samples() > 1 || beam_search || body.prompt_count() > 1 {
        return Err(RequestRefusal::FanOut);
    }
    if PromptLogprobs::of(body) == PromptLogprobs::Mixed {
        return Err(RequestRefusal::PromptLogprobs);
    }
    let in_body = body.value(Field::RequestId).filter(|raw| raw.starts_with('"'));
    // An id that is no Unicode cannot be looked into here, but an engine might.
    let in_body = in_body.is_some_and(|raw| json::string(raw).is_none_or(|id| names_a_peer(id.as_bytes())));
    if in_body || request_ids.into_iter().any(names_a_peer) {
        return Err(RequestRefusal::RequestId);
    }
    Ok(())
}

fn names_a_peer(id: &[u8]) -> bool {
    PEER_MARKERS.iter().any(|marker| memchr::memmem::find(id, marker.as_bytes()).is_some())
}
