//! SGLang over gRPC: both legs at once, one sample each.

use smg_apis::generation::Constraint;
use smg_apis::output::MatchedStop;
use smg_messages::engines::sglang::{
    DisaggregatedParams, GenerateRequest, GenerateResponse, InputLogProbs, OutputLogProbs, SamplingParams,
    TokenizedInput, TopLogProbs, generate_complete, generate_response, sampling_params,
};

use super::answer::{Counted, Message, PromptLogprobs, ReadError, Reader, TokenLogprobs, raw};
use super::rendezvous::{self, Rendezvous, Residue};
use super::request::{Ask, RequestError, choice_regex, sample_id, signed};
use crate::sglang::Ranks;

/// Rooms are below this: the engine stores them in 32 bits, signed.
const ROOMS: u64 = i32::MAX as u64;

/// The bodies of both legs.
#[derive(Debug, Clone, PartialEq)]
pub struct Legs {
    /// Goes to the prefill worker.
    pub prefill: GenerateRequest,
    /// Goes to the decode worker.
    pub decode: GenerateRequest,
}

/// A room from a random word.
pub fn room(random: u64, residue: Option<Residue>) -> u64 {
    rendezvous::room(random, ROOMS, residue)
}

/// The request for one worker, without a rendezvous.
///
/// The engine runs without a tokenizer and refuses stop strings, so they stay here: the gateway matches them. A seed
/// has no field.
///
/// # Errors
/// Never, for this engine.
pub fn request(ask: &Ask<'_>) -> Result<GenerateRequest, RequestError> {
    let sampling = ask.sampling();
    let logprobs = ask.generation.logprobs;
    let mut stop_token_ids = sampling.stop_token_ids;
    stop_token_ids
        .extend(ask.stop_tokens.iter().filter(|token| !ask.generation.sampling.stop_token_ids.contains(token)));
    let params = SamplingParams {
        // Unset is 0 on this wire, and 0 is greedy.
        temperature: sampling.temperature.unwrap_or(1.0),
        top_p: sampling.top_p.unwrap_or(1.0),
        top_k: sampling.top_k.unwrap_or(-1),
        min_p: sampling.min_p.unwrap_or(0.0),
        frequency_penalty: sampling.frequency_penalty.unwrap_or(0.0),
        presence_penalty: sampling.presence_penalty.unwrap_or(0.0),
        repetition_penalty: sampling.repetition_penalty.unwrap_or(1.0),
        max_new_tokens: sampling.max_tokens,
        stop: Vec::new(),
        stop_token_ids,
        skip_special_tokens: ask.generation.reading.skip_special_tokens,
        spaces_between_special_tokens: true,
        n: ask.samples.max(1),
        min_new_tokens: sampling.min_tokens.unwrap_or(0),
        ignore_eos: sampling.ignore_eos,
        no_stop_trim: sampling.keep_stop,
        stream_interval: None,
        logit_bias: sampling.logit_bias.iter().map(|(token, bias)| (token.to_string(), *bias)).collect(),
        constraint: ask.generation.constraint.as_ref().map(constraint),
    };
    Ok(GenerateRequest {
        request_id: ask.request_id.to_owned(),
        tokenized: Some(TokenizedInput { original_text: String::new(), input_ids: ask.token_ids.to_vec() }),
        sampling_params: Some(params),
        return_logprob: logprobs.is_some(),
        logprob_start_len: logprobs.and_then(|logprobs| logprobs.prompt_from).map_or(-1, signed),
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

/// Sample `index` of a request for several, as a request of its own.
pub fn sample(request: &GenerateRequest, index: u32) -> GenerateRequest {
    let mut sample = request.clone();
    sample.request_id = sample_id(&request.request_id, index);
    if let Some(params) = &mut sample.sampling_params {
        params.n = 1;
    }
    sample
}

/// Both legs of one sample, meeting at `rendezvous`.
pub fn legs(request: GenerateRequest, rendezvous: &Rendezvous, ranks: Ranks) -> Legs {
    let mut prefill = request;
    prefill.disaggregated_params = Some(DisaggregatedParams {
        bootstrap_host: rendezvous.host.clone(),
        bootstrap_port: i32::from(rendezvous.port),
        bootstrap_room: i32::try_from(rendezvous.room).unwrap_or(i32::MAX),
    });
    let mut decode = prefill.clone();
    prefill.data_parallel_rank = ranks.prefill.map(signed);
    decode.data_parallel_rank = ranks.decode.map(signed);
    Legs { prefill, decode }
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
            completion_tokens: Counted::SoFar(chunk.completion_tokens),
            cached_tokens: chunk.cached_tokens,
            reasoning_tokens: chunk.reasoning_tokens,
            logprobs: chunk.output_logprobs.map(token_logprobs).transpose()?,
            prompt_logprobs: chunk.input_logprobs.map(prompt_logprobs).transpose()?,
        }),
        generate_response::Response::Complete(complete) => reader.complete(raw::Complete {
            // The engine numbers all samples of an answer that is not streamed 0.
            index: reader.index_of_complete(complete.index),
            token_ids: complete.output_ids,
            finish_reason: complete.finish_reason,
            prompt_tokens: complete.prompt_tokens,
            completion_tokens: Counted::SoFar(complete.completion_tokens),
            cached_tokens: complete.cached_tokens,
            reasoning_tokens: complete.reasoning_tokens,
            matched_stop: complete.matched_stop.map(|stop| match stop {
                generate_complete::MatchedStop::MatchedTokenId(token) => MatchedStop::Token(token),
                generate_complete::MatchedStop::MatchedStopStr(text) => MatchedStop::Text(text),
            }),
            logprobs: complete.output_logprobs.map(token_logprobs).transpose()?,
            prompt_logprobs: complete.input_logprobs.map(prompt_logprobs).transpose()?,
            kv_transfer_params: None,
            weight_version: None,
        }),
    }
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
