//! vLLM over HTTP: prefill first, then decode.
//!
//! The prefill leg is the client's request cut down to one token, so that the engine computes and keeps the prompt's KV
//! cache. Its `kv_transfer_params` say for whom. The decode leg is the client's request as it is, plus the
//! `kv_transfer_params` that tell the decode engine where the KV cache lies. The prefill worker's KV connector decides
//! what the two carry (SMG PD docs, Connector Modes; field texts as seen on vLLM 0.32).
//!
//! A handoff serves one consumer. With `n > 1` there is none: the prefill leg is skipped and decode computes the prompt.
//! The same holds where only an engine that computed the prompt can answer ([`crate::prompt_logprobs`]).
//! vLLM's decode server may stop for good on an incomplete handoff, so the decode leg carries either the prefill's own
//! object byte for byte, an object minted here, or nothing.

use bytes::Bytes;
use http::HeaderName;
use smg_fleet::policy::ClientHandoffFields;
use uuid::Uuid;

use crate::body::{ClientBody, Route};
use crate::field::Field;
use crate::json;
use crate::prompt_logprobs::PromptLogprobs;
use crate::splice::{Edits, SplicedBody};

/// Port of Mooncake's bootstrap server when the prefill worker was registered without one.
pub const MOONCAKE_BOOTSTRAP_PORT: u16 = smg_fleet::mooncake::BOOTSTRAP_PORT;

/// The header by which vLLM's API server is told the data-parallel rank of a request (vLLM 0.32). A rank has its own KV cache and, over
/// Mooncake, its own engine id: a leg that is meant for one rank and computed by another hands nothing over.
pub const DATA_PARALLEL_RANK: HeaderName = HeaderName::from_static("x-data-parallel-rank");

/// Tag that makes a prefill engine keep the KV cache for another engine.
pub(crate) const PREFILL_TAG: &[u8] = br#"{"do_remote_decode":true,"do_remote_prefill":false}"#;

/// KV connectors, as far as they differ in what legs carry.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Connector {
    /// Decode pulls; the prefill response names the place.
    Nixl,
    /// Prefill pushes; the gateway names the place.
    Mooncake,
    /// RDMA with MoRI-IO; such a decode engine never recomputes, so it has rules of its own ([`crate::moriio`]).
    Moriio,
    /// A shared store that the engines find without the gateway.
    Store,
    /// None declared, or one without rules here.
    Passthrough,
}

impl Connector {
    /// The connector called `name` in the engine's `--kv-transfer-config`.
    pub fn classify(name: Option<&str>) -> Self {
        match name {
            Some("NixlConnector") => Self::Nixl,
            Some("MooncakeConnector") => Self::Mooncake,
            Some("MoRIIOConnector") => Self::Moriio,
            Some("MooncakeStoreConnector" | "SharedStorageConnector") => Self::Store,
            Some(name) if name.starts_with("FlexKV") || name.starts_with("HF3FS") => Self::Store,
            _ => Self::Passthrough,
        }
    }

    /// Value of the `mode` label of `smg_pd_kv_connector_mode_total`.
    pub const fn mode_label(self) -> &'static str {
        match self {
            Self::Nixl => "nixl",
            Self::Mooncake => "mooncake",
            Self::Moriio => "moriio",
            Self::Store | Self::Passthrough => "passthrough",
        }
    }
}

/// A Mooncake prefill engine that decode engines can name. Depends on the worker alone, so it can be kept with it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MooncakePeer {
    engine_id: String,
    bootstrap_address: String,
}

impl MooncakePeer {
    /// The peer of a prefill worker, or none when its engine id cannot be known: it reported none, or it runs several
    /// data-parallel ranks (`dp_size` above 1, or not a positive number) and the worker is not pinned to one of them.
    ///
    /// `engine_id` is the worker's `kv_engine_id`, `dp_size` its label of that name, `host` its bootstrap host
    /// ([`crate::sglang::bootstrap_host`]).
    pub fn resolve(
        engine_id: Option<&str>,
        dp_size: Option<&str>,
        dp_rank: Option<u32>,
        host: &str,
        port: Option<u16>,
    ) -> Option<Self> {
        let base = engine_id.filter(|id| !id.is_empty())?;
        let width: u32 = dp_size.map_or(Some(1), |label| label.trim().parse().ok().filter(|width| *width > 0))?;
        let engine_id = if width == 1 { base.to_owned() } else { format!("{base}_dp{}", dp_rank?) };
        let port = port.unwrap_or(MOONCAKE_BOOTSTRAP_PORT);
        let host = if host.contains(':') && !host.starts_with('[') { format!("[{host}]") } else { host.to_owned() };
        Some(Self { engine_id, bootstrap_address: format!("http://{host}:{port}") })
    }

    /// The engine id that decode engines will ask for.
    pub fn engine_id(&self) -> &str {
        &self.engine_id
    }

    /// `http://<host>:<port>` of the bootstrap server.
    pub fn bootstrap_address(&self) -> &str {
        &self.bootstrap_address
    }

    pub(crate) fn prefill_tag(transfer_id: &str) -> Bytes {
        format!(r#"{{"do_remote_decode":true,"do_remote_prefill":false,"transfer_id":{}}}"#, quoted(transfer_id)).into()
    }

    pub(crate) fn decode_params(&self, transfer_id: &str) -> Bytes {
        format!(
            r#"{{"do_remote_decode":false,"do_remote_prefill":true,"transfer_id":{},"remote_engine_id":{},"remote_bootstrap_addr":{}}}"#,
            quoted(transfer_id),
            quoted(&self.engine_id),
            quoted(&self.bootstrap_address),
        )
        .into()
    }
}

fn quoted(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}

/// How to run one request on a sequential pair.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Plan {
    /// No prefill leg: nothing could be handed over. Decode computes the prompt.
    DecodeOnly,
    /// Prefill, then decode.
    PrefillThenDecode {
        /// `kv_transfer_params` of the prefill leg, if it is tagged.
        tag: Option<Bytes>,
        /// Where the decode leg's `kv_transfer_params` come from.
        source: HandoffSource,
        /// The transfer id minted for this attempt, for the record.
        transfer_id: Option<String>,
    },
}

/// Where the decode leg's `kv_transfer_params` come from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum HandoffSource {
    /// The prefill response must carry them; if it does not, the transfer failed and decode recomputes.
    Expected,
    /// The prefill response may carry them; it is no failure if it does not.
    Optional,
    /// The gateway minted them; the response is not looked at.
    Minted(Bytes),
    /// There are none: decode recomputes.
    None,
}

/// Plans one attempt. `mooncake` is the prefill worker's peer if it has one; `transfer` must be a new version 7 UUID for
/// every attempt. Pairs of which either worker runs MoRI-IO are not planned here but in [`crate::moriio`].
pub fn plan(body: &ClientBody, prefill: Connector, mooncake: Option<&MooncakePeer>, transfer: Uuid) -> Plan {
    // A handoff serves one engine request: several samples, or several prompts, would all load the KV of the first.
    let several_prompts = body.prompt_count() > 1;
    let handed_over = matches!(prefill, Connector::Nixl | Connector::Mooncake);
    let by_itself = PromptLogprobs::of(body) == PromptLogprobs::Mixed;
    if by_itself || body.samples() > 1 || (several_prompts && handed_over) {
        return Plan::DecodeOnly;
    }
    let (tag, source, transfer_id) = match (prefill, mooncake) {
        (Connector::Nixl, _) => (Some(Bytes::from_static(PREFILL_TAG)), HandoffSource::Expected, None),
        (Connector::Mooncake, Some(peer)) => {
            let transfer_id = format!("xfer-{transfer}");
            let tag = MooncakePeer::prefill_tag(&transfer_id);
            (Some(tag), HandoffSource::Minted(peer.decode_params(&transfer_id)), Some(transfer_id))
        }
        (Connector::Mooncake, None) => (None, HandoffSource::None, None),
        // A shared store still profits from the prefill leg; whatever else comes back is not for several prompts.
        _ if several_prompts => (None, HandoffSource::None, None),
        _ => (None, HandoffSource::Optional, None),
    };
    Plan::PrefillThenDecode { tag, source, transfer_id }
}

/// The prefill leg's body: the prompt, one token, no stream; `tag` from the [`Plan`].
pub fn prefill_leg(body: &ClientBody, client_fields: ClientHandoffFields, tag: Option<&Bytes>) -> SplicedBody {
    let mut edits = prefill_edits(body, client_fields);
    if let Some(tag) = tag {
        edits.set(Field::KvTransferParams, tag.clone());
    }
    body.splice(&edits)
}

/// The edits that every vLLM prefill leg has, whatever its connector.
pub(crate) fn prefill_edits(body: &ClientBody, client_fields: ClientHandoffFields) -> Edits {
    let mut edits = Edits::for_leg(body, client_fields);
    edits.set(Field::Stream, Bytes::from_static(b"false"));
    edits.remove(Field::StreamOptions);
    if body.has(Field::N) {
        edits.set(Field::N, Bytes::from_static(b"1"));
    }
    // vLLM refuses a request whose minimum lies above its cap.
    edits.remove(Field::MinTokens);
    let newer_cap = body.route() == Route::ChatCompletions && body.value(Field::MaxCompletionTokens).is_some();
    if body.route() == Route::Responses {
        edits.set(Field::MaxOutputTokens, Bytes::from_static(b"1"));
    } else if newer_cap {
        edits.set(Field::MaxCompletionTokens, Bytes::from_static(b"1"));
        edits.remove(Field::MaxTokens);
    } else {
        edits.set(Field::MaxTokens, Bytes::from_static(b"1"));
    }
    edits
}

/// The decode leg's body: the client's, plus the handoff if there is one. `prompt_told`: the prefill tells the log
/// probabilities of the prompt, so that this leg is not asked for them.
pub fn decode_leg(
    body: &ClientBody,
    client_fields: ClientHandoffFields,
    params: Option<&Bytes>,
    prompt_told: bool,
) -> SplicedBody {
    let mut edits = Edits::for_leg(body, client_fields);
    if prompt_told {
        edits.remove(Field::PromptLogprobs);
    }
    if let Some(params) = params {
        edits.set(Field::KvTransferParams, params.clone());
    }
    body.splice(&edits)
}

/// What a prefill response (2xx) hands over.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Handoff {
    /// The object, byte for byte; shares the response's memory.
    Params(Bytes),
    /// No `kv_transfer_params`, or `null`.
    Missing,
    /// The response is no JSON object, or its `kv_transfer_params` is no object. Nothing of it may reach a decode
    /// engine; for the request this is the same as [`Handoff::Missing`], but an operator wants to know the difference.
    Malformed,
}

impl Handoff {
    /// The params for [`decode_leg`].
    pub fn params(&self) -> Option<&Bytes> {
        match self {
            Self::Params(params) => Some(params),
            Self::Missing | Self::Malformed => None,
        }
    }
}

/// Finds the handoff in the body of a prefill response.
pub fn extract_kv_transfer_params(response: &Bytes) -> Handoff {
    let Ok(text) = std::str::from_utf8(response) else { return Handoff::Malformed };
    let mut found = None;
    let walk = json::each_member(text, |key, value| {
        if json::string(key).is_some_and(|key| key == Field::KvTransferParams.name()) {
            found = Some(value);
        }
    });
    match (walk, found) {
        (Err(_), _) => Handoff::Malformed,
        (Ok(()), None | Some("null")) => Handoff::Missing,
        (Ok(()), Some(params)) if params.starts_with('{') => Handoff::Params(response.slice_ref(params.as_bytes())),
        (Ok(()), Some(_)) => Handoff::Malformed,
    }
}
