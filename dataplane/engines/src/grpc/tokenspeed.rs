//! TokenSpeed over gRPC: both legs at once, one sample each.
//!
//! The engine places both legs on rank `room % ranks`, so neither names a rank.

use smg_apis::generation::Constraint;
use smg_apis::output::MatchedStop;
use smg_messages::engines::tokenspeed::{
    GenerateRequest, GenerateResponse, KvBootstrapInfo, OutputLogProbs, SamplingParams, TokenizedInput, TopLogProbs,
    generate_complete, generate_response, sampling_params,
};

use super::answer::{Counted, Message, ReadError, Reader, TokenLogprobs, raw};
use super::rendezvous::{self, Rendezvous, Residue};
use super::request::{Ask, RequestError, choice_regex, sample_id, signed};

/// Rooms are below this: the engine stores them in 64 bits, signed.
const ROOMS: u64 = i64::MAX as u64;

/// The bodies of both legs.
#[derive(Debug, Clone, PartialEq)]
pub struct Legs {
    /// Goes to the prefill worker.
    pub prefill: GenerateRequest,
    /// Goes to the decode worker.
    pub decode: GenerateRequest,
}

/// A room from a random word, on the prefill worker's rank.
pub fn room(random: u64, residue: Option<Residue>) -> u64 {
    rendezvous::room(random, ROOMS, residue)
}

/// The request for one worker, without a rendezvous.
///
/// # Errors
/// The request cannot be sent to this engine.
pub fn request(ask: &Ask<'_>) -> Result<GenerateRequest, RequestError> {
    let sampling = ask.sampling();
    let logprobs = ask.generation.logprobs;
    let seed = match sampling.seed {
        None => None,
        Some(seed) => Some(u64::try_from(seed).map_err(|_| RequestError::NegativeSeed { seed })?),
    };
    let params = SamplingParams {
        temperature: Some(sampling.temperature.unwrap_or(1.0)),
        top_p: Some(sampling.top_p.unwrap_or(1.0)),
        top_k: Some(sampling.top_k.unwrap_or(-1)),
        min_p: Some(sampling.min_p.unwrap_or(0.0)),
        frequency_penalty: Some(sampling.frequency_penalty.unwrap_or(0.0)),
        presence_penalty: Some(sampling.presence_penalty.unwrap_or(0.0)),
        repetition_penalty: Some(sampling.repetition_penalty.unwrap_or(1.0)),
        max_new_tokens: sampling.max_tokens,
        min_new_tokens: sampling.min_tokens.unwrap_or(0),
        stop: sampling.stop,
        stop_token_ids: sampling.stop_token_ids,
        ignore_eos: sampling.ignore_eos,
        skip_special_tokens: ask.generation.reading.skip_special_tokens,
        spaces_between_special_tokens: true,
        n: ask.samples.max(1),
        logit_bias: sampling.logit_bias.iter().map(|(token, bias)| (token.to_string(), *bias)).collect(),
        no_stop_trim: sampling.keep_stop,
        sampling_seed: seed,
        constraint: ask.generation.constraint.as_ref().map(constraint),
    };
    Ok(GenerateRequest {
        request_id: ask.request_id.to_owned(),
        tokenized: Some(TokenizedInput { input_ids: ask.token_ids.to_vec(), original_text: String::new() }),
        sampling_params: Some(params),
        return_logprob: logprobs.is_some(),
        logprob_start_len: Some(logprobs.and_then(|logprobs| logprobs.prompt_from).map_or(-1, signed)),
        top_logprobs_num: logprobs.map_or(0, |logprobs| signed(logprobs.top)),
        stream: ask.stream,
        ..Default::default()
    })
}

fn constraint(constraint: &Constraint) -> sampling_params::Constraint {
    match constraint {
        Constraint::JsonSchema(schema) => sampling_params::Constraint::JsonSchema(schema.clone()),
        Constraint::Regex(regex) => sampling_params::Constraint::Regex(regex.clone()),
        Constraint::Grammar(grammar) => sampling_params::Constraint::EbnfGrammar(grammar.clone()),
        Constraint::StructuralTag(tag) => sampling_params::Constraint::StructuralTag(tag.clone()),
        Constraint::Choice(choices) => sampling_params::Constraint::Regex(choice_regex(choices)),
    }
}

/// Sample `index` of a request for several, as a request of its own. Samples of one seed would all be the same, so each
/// has the next seed.
pub fn sample(request: &GenerateRequest, index: u32) -> GenerateRequest {
    let mut sample = request.clone();
    sample.request_id = sample_id(&request.request_id, index);
    if let Some(params) = &mut sample.sampling_params {
        params.n = 1;
        params.sampling_seed = params.sampling_seed.map(|seed| seed.wrapping_add(u64::from(index)));
    }
    sample
}

/// Both legs of one sample, meeting at `rendezvous`.
pub fn legs(request: GenerateRequest, rendezvous: &Rendezvous) -> Legs {
    let mut prefill = request;
    prefill.kv_bootstrap_info = Some(KvBootstrapInfo {
        bootstrap_host: rendezvous.host.clone(),
        bootstrap_port: i32::from(rendezvous.port),
        bootstrap_room: i64::try_from(rendezvous.room).unwrap_or(i64::MAX),
    });
    Legs { decode: prefill.clone(), prefill }
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
            completion_tokens: Counted::SoFarWithStop(chunk.completion_tokens),
            cached_tokens: chunk.cached_tokens,
            reasoning_tokens: 0,
            logprobs: chunk.output_logprobs.map(token_logprobs).transpose()?,
            prompt_logprobs: None,
        }),
        generate_response::Response::Complete(complete) => reader.complete(raw::Complete {
            index: complete.index,
            token_ids: complete.output_ids,
            finish_reason: complete.finish_reason,
            prompt_tokens: complete.prompt_tokens,
            completion_tokens: Counted::SoFarWithStop(complete.completion_tokens),
            cached_tokens: complete.cached_tokens,
            reasoning_tokens: 0,
            matched_stop: complete.matched_stop.map(|stop| match stop {
                generate_complete::MatchedStop::MatchedTokenId(token) => MatchedStop::Token(token),
                generate_complete::MatchedStop::MatchedStopStr(text) => MatchedStop::Text(text),
            }),
            logprobs: complete.output_logprobs.map(token_logprobs).transpose()?,
            prompt_logprobs: None,
            kv_transfer_params: None,
            weight_version: complete.weight_version,
        }),
    }
}

fn token_logprobs(logprobs: OutputLogProbs) -> Result<TokenLogprobs, ReadError> {
    TokenLogprobs::new(logprobs.token_ids, logprobs.token_logprobs, logprobs.top_logprobs.into_iter().map(top))
}

fn top(top: TopLogProbs) -> (Vec<u32>, Vec<f32>) {
    (top.token_ids, top.values)
}
