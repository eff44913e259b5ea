//! vLLM over gRPC: prefill first, then decode.
//!
//! The prefill leg is the request cut down to one token that nothing but the limit ends, since older engines hand their
//! KV over only then. What is handed over, and by whom, is the prefill worker's connector's to say (SMG PD docs,
//! Connector Modes). A handoff serves one consumer: with several samples there is none, the prefill leg runs untagged,
//! and a Mooncake decode still gets the prefill's address in its older form.

use bytes::Bytes;
use smg_apis::generation::Constraint;
use smg_apis::output::MatchedStop;
use smg_messages::engines::vllm::{
    ChoiceConstraint, GenerateRequest, GenerateResponse, InputLogProbs, KvTransferParams, OutputLogProbs,
    SamplingParams, TokenizedInput, TopLogProbs, generate_complete, generate_request, generate_response,
    sampling_params,
};
use uuid::Uuid;

use super::answer::{Counted, Message, PromptLogprobs, ReadError, Reader, TokenLogprobs, raw};
use super::rendezvous::BOOTSTRAP_PORT;
use super::request::{Ask, RequestError, signed};
use crate::vllm::{Connector, MooncakePeer, PREFILL_TAG};

/// Most candidates that the engine lists beside a token.
const MOST_LOGPROBS: u32 = 20;

/// A pair that cannot run a handoff over gRPC (501).
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("MoRIIOConnector PD is supported by the HTTP PD router only")]
pub struct MoriioUnsupported;

impl MoriioUnsupported {
    /// The code in the error body and in `X-SMG-Error-Code`.
    pub const fn code(self) -> &'static str {
        "moriio_grpc_pd_unsupported"
    }
}

/// How to run one request on a pair.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan {
    /// `kv_transfer_params_json` of the prefill leg, if it is tagged.
    pub tag: Option<String>,
    /// What the decode leg carries.
    pub source: HandoffSource,
    /// The transfer id minted for this attempt, for the record.
    pub transfer_id: Option<String>,
}

/// Where the decode leg's handoff comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum HandoffSource {
    /// The prefill's answer must carry it; if it does not, the transfer failed and decode recomputes.
    Expected,
    /// The prefill's answer may carry it; it is no failure if it does not.
    Optional,
    /// The gateway minted it: `kv_transfer_params_json`. It is there once the prefill has ended by its limit, which alone
    /// makes the engine hold the KV (vLLM 0.32).
    Minted(String),
    /// The gateway names the prefill's bootstrap server in the older form and leaves the rest to the engine.
    Legacy {
        /// Host of the prefill worker.
        host: String,
        /// Port of its bootstrap server.
        port: u16,
    },
    /// There is none: decode recomputes.
    None,
}

/// The prefill worker of a pair.
#[derive(Debug, Clone, Copy)]
pub struct Prefill<'a> {
    /// Its connector.
    pub connector: Connector,
    /// Itself as decode engines name it, when its engine id is known.
    pub mooncake: Option<&'a MooncakePeer>,
    /// Host of its URL ([`crate::sglang::bootstrap_host`]).
    pub host: &'a str,
    /// The bootstrap port it was registered with.
    pub bootstrap_port: Option<u16>,
}

/// Plans one attempt. `transfer` must be a new version 7 UUID for every attempt.
///
/// # Errors
/// Either worker runs MoRI-IO, which this wire has no handoff for.
pub fn plan(prefill: Prefill<'_>, decode: Connector, samples: u32, transfer: Uuid) -> Result<Plan, MoriioUnsupported> {
    if prefill.connector == Connector::Moriio || decode == Connector::Moriio {
        return Err(MoriioUnsupported);
    }
    let one = samples <= 1;
    let untagged = |source| Plan { tag: None, source, transfer_id: None };
    Ok(match (prefill.connector, prefill.mooncake) {
        (Connector::Nixl, _) if one => {
            Plan { tag: Some(text(&Bytes::from_static(PREFILL_TAG))), ..untagged(HandoffSource::Expected) }
        }
        (Connector::Mooncake, Some(peer)) if one => {
            let transfer_id = format!("xfer-{transfer}");
            Plan {
                tag: Some(text(&MooncakePeer::prefill_tag(&transfer_id))),
                source: HandoffSource::Minted(text(&peer.decode_params(&transfer_id))),
                transfer_id: Some(transfer_id),
            }
        }
        (Connector::Mooncake, _) => untagged(HandoffSource::Legacy {
            host: prefill.host.to_owned(),
            port: prefill.bootstrap_port.unwrap_or(BOOTSTRAP_PORT),
        }),
        _ if one => untagged(HandoffSource::Optional),
        _ => untagged(HandoffSource::None),
    })
}

/// JSON that was written here, as text.
fn text(json: &Bytes) -> String {
    String::from_utf8_lossy(json).into_owned()
}

/// The request for one worker, without a handoff.
///
/// # Errors
/// Never, for this engine.
pub fn request(ask: &Ask<'_>) -> Result<GenerateRequest, RequestError> {
    let sampling = ask.sampling();
    // 0 candidates might be taken for no log probabilities at all.
    let candidates = |top: u32| signed(top.clamp(1, MOST_LOGPROBS));
    let logprobs = ask.generation.logprobs;
    let params = SamplingParams {
        temperature: sampling.temperature,
        top_p: sampling.top_p.unwrap_or(1.0),
        top_k: sampling.top_k.and_then(|top_k| u32::try_from(top_k).ok()).unwrap_or(0),
        min_p: sampling.min_p.unwrap_or(0.0),
        frequency_penalty: sampling.frequency_penalty.unwrap_or(0.0),
        presence_penalty: sampling.presence_penalty.unwrap_or(0.0),
        repetition_penalty: sampling.repetition_penalty.unwrap_or(1.0),
        max_tokens: sampling.max_tokens,
        min_tokens: sampling.min_tokens.unwrap_or(0),
        stop: sampling.stop,
        stop_token_ids: sampling.stop_token_ids,
        skip_special_tokens: ask.generation.reading.skip_special_tokens,
        spaces_between_special_tokens: true,
        ignore_eos: sampling.ignore_eos,
        n: ask.samples.max(1),
        logprobs: logprobs.map(|logprobs| candidates(logprobs.top)),
        prompt_logprobs: logprobs.filter(|logprobs| logprobs.prompt_from.is_some()).map(|it| candidates(it.top)),
        seed: sampling.seed.map(|seed| seed.clamp(i64::from(i32::MIN), i64::from(i32::MAX)) as i32),
        include_stop_str_in_output: sampling.keep_stop,
        logit_bias: sampling.logit_bias.iter().map(|(token, bias)| (signed(*token), *bias)).collect(),
        truncate_prompt_tokens: None,
        grammar_from_first_token: false,
        constraint: ask.generation.constraint.as_ref().map(constraint),
    };
    let tokenized = TokenizedInput { original_text: String::new(), input_ids: ask.token_ids.to_vec() };
    Ok(GenerateRequest {
        request_id: ask.request_id.to_owned(),
        input: Some(generate_request::Input::Tokenized(tokenized)),
        sampling_params: Some(params),
        stream: ask.stream,
        ..Default::default()
    })
}

fn constraint(constraint: &Constraint) -> sampling_params::Constraint {
    match constraint {
        Constraint::JsonSchema(schema) => sampling_params::Constraint::JsonSchema(schema.clone()),
        Constraint::Regex(regex) => sampling_params::Constraint::Regex(regex.clone()),
        Constraint::Grammar(grammar) => sampling_params::Constraint::Grammar(grammar.clone()),
        Constraint::StructuralTag(tag) => sampling_params::Constraint::StructuralTag(tag.clone()),
        Constraint::Choice(choices) => {
            sampling_params::Constraint::Choice(ChoiceConstraint { choices: choices.clone() })
        }
    }
}

/// The prefill leg: the prompt and one token; `rank` is the worker's data-parallel rank if it is one of several.
pub fn prefill_leg(request: &GenerateRequest, plan: &Plan, rank: Option<u32>) -> GenerateRequest {
    let mut leg = request.clone();
    if let Some(params) = &mut leg.sampling_params {
        params.max_tokens = Some(1);
        params.min_tokens = 0;
        params.n = 1;
        params.stop.clear();
        params.stop_token_ids.clear();
        params.ignore_eos = true;
    }
    leg.stream = false;
    leg.data_parallel_rank = rank.map(signed);
    leg.kv_transfer_params_json.clone_from(&plan.tag);
    leg
}

/// The decode leg: the request, and the handoff if there is one. `returned` is what the prefill's answer carried, or what
/// it holds as agreed ([`super::Complete::kv_transfer_params`]): of KV that no prefill holds a decode must not be told.
///
/// It is not asked for log probabilities of the prompt. The prefill tells them, and an engine that took KV over has not
/// computed them: what it lists in their place was never written (vLLM 0.32).
pub fn decode_leg(
    request: GenerateRequest,
    source: &HandoffSource,
    returned: Option<String>,
    rank: Option<u32>,
) -> GenerateRequest {
    let mut leg = request;
    leg.data_parallel_rank = rank.map(signed);
    if let Some(params) = &mut leg.sampling_params {
        params.prompt_logprobs = None;
    }
    match source {
        HandoffSource::Expected | HandoffSource::Optional | HandoffSource::Minted(_) => {
            leg.kv_transfer_params_json = returned;
        }
        HandoffSource::Legacy { host, port } => {
            leg.kv_transfer_params =
                Some(KvTransferParams { remote_host: host.clone(), remote_port: u32::from(*port) });
        }
        HandoffSource::None => {}
    }
    leg
}

/// Reads the next message of an answer.
///
/// # Errors
/// The engine does not keep to its protocol; the answer is worth nothing from here on.
pub fn read(reader: &mut Reader, response: GenerateResponse) -> Result<Message, ReadError> {
    match response.response.ok_or(ReadError::Empty)? {
        generate_response::Response::Chunk(chunk) => reader.chunk(raw::Chunk {
            index: chunk.index,
            token_ids: chunk.token_ids,
            prompt_tokens: chunk.prompt_tokens,
            completion_tokens: Counted::New(chunk.completion_tokens),
            cached_tokens: chunk.cached_tokens,
            reasoning_tokens: 0,
            logprobs: chunk.output_logprobs.map(token_logprobs).transpose()?,
            prompt_logprobs: chunk.input_logprobs.map(prompt_logprobs).transpose()?,
        }),
        generate_response::Response::Complete(complete) => reader.complete(raw::Complete {
            index: complete.index,
            token_ids: complete.output_ids,
            finish_reason: complete.finish_reason,
            prompt_tokens: complete.prompt_tokens,
            completion_tokens: Counted::New(complete.completion_tokens),
            cached_tokens: complete.cached_tokens,
            reasoning_tokens: 0,
            matched_stop: complete.matched_stop.map(|stop| match stop {
                generate_complete::MatchedStop::MatchedTokenId(token) => MatchedStop::Token(token),
                generate_complete::MatchedStop::MatchedStopStr(text) => MatchedStop::Text(text),
            }),
            logprobs: complete.output_logprobs.map(token_logprobs).transpose()?,
            prompt_logprobs: complete.input_logprobs.map(prompt_logprobs).transpose()?,
            kv_transfer_params: complete.kv_transfer_params_json.filter(|params| is_object(params)),
            weight_version: None,
        }),
    }
}

/// Whether `text` is a JSON object: nothing else may reach a decode engine.
fn is_object(text: &str) -> bool {
    text.trim_start().starts_with('{') && serde_json::from_str::<serde::de::IgnoredAny>(text).is_ok()
}

fn token_logprobs(logprobs: OutputLogProbs) -> Result<TokenLogprobs, ReadError> {
    TokenLogprobs::new(logprobs.token_ids, logprobs.token_logprobs, logprobs.top_logprobs.into_iter().map(top))
}

fn prompt_logprobs(logprobs: InputLogProbs) -> Result<PromptLogprobs, ReadError> {
    let values = logprobs.token_logprobs.into_iter().map(|logprob| logprob.value).collect();
    PromptLogprobs::new(logprobs.token_ids, values, logprobs.top_logprobs.into_iter().map(top))
}

fn top(top: TopLogProbs) -> (Vec<u32>, Vec<f32>) {
    (top.token_ids, top.values)
}
