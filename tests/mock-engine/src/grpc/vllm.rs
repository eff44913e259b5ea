//! vLLM's servicer.
//!
//! The handoff rules are those of [`crate::vllm`], with the fields in `kv_transfer_params_json`. A NIXL prefill files its
//! KV under the request id itself, as vLLM before 0.13 does: an id that is used again collides.

use std::sync::Arc;

use serde_json::{Map, Value};
use smg_services::engines::common::{
    FlushCacheRequest, FlushCacheResponse, GetTokenizerChunk, GetTokenizerRequest, ProfileResponse,
    StartProfileRequest, StopProfileRequest,
};
use smg_services::engines::vllm::vllm_engine_server::VllmEngine;
use smg_services::engines::vllm::{
    AbortRequest, AbortResponse, GenerateComplete, GenerateRequest, GenerateResponse, GenerateStreamChunk,
    GetLoadsRequest, GetLoadsResponse, GetModelInfoRequest, GetModelInfoResponse, GetServerInfoRequest,
    GetServerInfoResponse, HealthCheckRequest, HealthCheckResponse, InputLogProbs, InputTokenLogProb, KvTransferParams,
    OutputLogProbs, SchedulerLoad, TopLogProbs, generate_complete, generate_request, generate_response,
};
use tonic::{Request, Response, Status};

use super::work::{self, Event, Job, Logprobs, Matched, Meeting, PromptLogprobs, Source};
use super::{Answer, Asked, Dialect, generate, tokenizer, uptime};
use crate::VERSION_VLLM;
use crate::engine::{Connector, Core, Role};
use crate::fabric::Take;
use crate::ledger::Key;
use crate::text::Prompt;
use crate::vocabulary;

pub(super) struct Servicer(pub(super) Arc<Core>);

const DIALECT: Dialect<GenerateRequest, GenerateResponse> =
    Dialect { asked: Asked::Vllm, read, rank: |_, request| rank(request), write };

fn rank(request: &GenerateRequest) -> Option<u64> {
    request.data_parallel_rank.and_then(|rank| u64::try_from(rank).ok())
}

fn read(core: &Core, request: &GenerateRequest) -> Result<Job, Status> {
    let invalid = |message: &str| Status::invalid_argument(message);
    let settings = &core.settings;
    let Some(generate_request::Input::Tokenized(tokenized)) = &request.input else {
        return Err(invalid("The decoder prompt cannot be empty"));
    };
    let params = request.sampling_params.clone().unwrap_or_default();
    core.check_prompt(&tokenized.input_ids)?;
    if let (Some(rank), Some(size)) = (request.data_parallel_rank, settings.dp_size)
        && !(0..i64::try_from(size).unwrap_or(i64::MAX)).contains(&i64::from(rank))
    {
        return Err(invalid("data_parallel_rank is out of range"));
    }
    let most = params.max_tokens.map_or(usize::MAX, |most| most as usize);
    if most == 0 || params.min_tokens as usize > most {
        return Err(invalid("max_tokens must be at least 1 and min_tokens not more"));
    }
    let prompt = Prompt::of_token_ids(&tokenized.input_ids);
    let meeting = meeting(core, request, params.n.max(1), prompt)?;
    Ok(Job {
        id: request.request_id.clone(),
        prompt,
        prompt_ids: tokenized.input_ids.clone(),
        samples: params.n.max(1),
        seed: params.seed.and_then(|seed| u64::try_from(seed).ok()),
        // What ends a prefill leg is the request's own limit.
        max_tokens: work::limit(Role::Regular, params.max_tokens),
        min_tokens: params.min_tokens as usize,
        stop: params.stop,
        stop_tokens: params.stop_token_ids,
        ignore_eos: params.ignore_eos,
        trims_stop_token: false,
        stream: request.stream,
        logprobs: params.logprobs.map(|top| usize::try_from(top).unwrap_or(0)),
        prompt_logprobs_from: params.prompt_logprobs.map(|_| 0),
        meeting,
    })
}

/// What the request's handoff asks for.
fn meeting(core: &Core, request: &GenerateRequest, samples: u32, prompt: Prompt) -> Result<Meeting, Status> {
    let invalid = |message: &str| Status::invalid_argument(message);
    let legacy =
        |legacy: &KvTransferParams| !legacy.remote_host.is_empty() && (1..=65_535).contains(&legacy.remote_port);
    let params: Map<String, Value> = match (&request.kv_transfer_params_json, &request.kv_transfer_params) {
        (Some(json), _) => {
            serde_json::from_str(json).map_err(|_| invalid("kv_transfer_params_json must be a JSON object"))?
        }
        (None, Some(given)) if !legacy(given) => {
            return Err(invalid("kv_transfer_params needs remote_host and a remote_port from 1 to 65535"));
        }
        // The older form says whom to ask and not what for: the prompt is computed here.
        _ => Map::new(),
    };
    let flag = |name: &str| params.get(name).and_then(Value::as_bool).unwrap_or(false);
    let text = |name: &str| params.get(name).and_then(Value::as_str).map(str::to_owned);
    let (hold, fetch) = (flag("do_remote_decode"), flag("do_remote_prefill"));
    let connector = core.settings.connector.projected();
    if !matches!(connector, Connector::Nixl | Connector::Mooncake) {
        return Ok(Meeting::None);
    }
    if hold && (request.stream || samples > 1) {
        return Err(invalid("do_remote_decode needs one sample and an answer that is not streamed"));
    }
    let take = |key, engine_id, wait| Take { key, engine_id: Some(engine_id), prompt: prompt.digest, rank: None, wait };
    match connector {
        Connector::Nixl if fetch => {
            let port = params.get("remote_port").and_then(Value::as_u64).and_then(|port| u16::try_from(port).ok());
            let blocks = params.get("remote_block_ids").and_then(Value::as_array);
            let found = (text("remote_engine_id"), text("remote_request_id"), text("remote_host"), port, blocks);
            let (Some(engine_id), Some(id), Some(host), Some(port), Some(_)) = found else {
                // A field that is missing trips an assertion, which ends the engine.
                core.crash();
                return Err(Status::internal(
                    "EngineCore encountered an issue. See stack trace (above) for the root cause.",
                ));
            };
            Ok(Meeting::Fetch { source: Source::Engine { host, port }, take: take(Key::Request(id), engine_id, false) })
        }
        Connector::Nixl if hold => Ok(Meeting::Hold { key: Key::Request(request.request_id.clone()), named: true }),
        Connector::Mooncake if fetch => {
            let found = (text("transfer_id"), text("remote_engine_id"), text("remote_bootstrap_addr"));
            let (Some(id), Some(engine_id), Some(address)) = found else {
                return Err(Status::internal("the handoff is incomplete"));
            };
            Ok(Meeting::Fetch {
                source: Source::Bootstrap { address, engine_id: engine_id.clone() },
                take: take(Key::Transfer(id), engine_id, true),
            })
        }
        Connector::Mooncake if hold => Ok(match text("transfer_id") {
            Some(id) => Meeting::Hold { key: Key::Transfer(id), named: false },
            None => Meeting::None,
        }),
        _ => Ok(Meeting::None),
    }
}

fn write(job: &Job, event: Event) -> GenerateResponse {
    let prompt_tokens = u32::try_from(job.prompt_ids.len()).unwrap_or(u32::MAX);
    let count = |tokens: &[u32]| u32::try_from(tokens.len()).unwrap_or(u32::MAX);
    let response = match event {
        Event::Chunk { index, tokens, cached, logprobs, prompt_logprobs, .. } => {
            generate_response::Response::Chunk(GenerateStreamChunk {
                prompt_tokens,
                completion_tokens: count(&tokens),
                token_ids: tokens,
                cached_tokens: cached,
                output_logprobs: logprobs.map(output_logprobs),
                input_logprobs: prompt_logprobs.map(input_logprobs),
                index,
            })
        }
        Event::Complete(end) => generate_response::Response::Complete(GenerateComplete {
            finish_reason: end.reason.to_owned(),
            prompt_tokens,
            completion_tokens: count(&end.tokens),
            output_ids: end.tokens,
            cached_tokens: end.cached,
            output_logprobs: end.logprobs.map(output_logprobs),
            input_logprobs: end.prompt_logprobs.map(input_logprobs),
            index: end.index,
            kv_transfer_params: end.kv_transfer_params.as_deref().and_then(legacy),
            // The end of the sequence is no stop that the engine names.
            matched_stop: end.matched.and_then(|matched| match matched {
                Matched::End(_) => None,
                Matched::Token(token) => Some(generate_complete::MatchedStop::MatchedTokenId(token)),
                Matched::Text(text) => Some(generate_complete::MatchedStop::MatchedStopStr(text)),
            }),
            kv_transfer_params_json: end.kv_transfer_params,
            ..Default::default()
        }),
    };
    GenerateResponse { response: Some(response) }
}

/// The older form of a handoff.
fn legacy(json: &str) -> Option<KvTransferParams> {
    let params: Map<String, Value> = serde_json::from_str(json).ok()?;
    let port = params.get("remote_port")?.as_u64().filter(|port| (1..=65_535).contains(port))?;
    Some(KvTransferParams {
        remote_host: params.get("remote_host")?.as_str()?.to_owned(),
        remote_port: u32::try_from(port).ok()?,
    })
}

fn output_logprobs(logprobs: Logprobs) -> OutputLogProbs {
    OutputLogProbs {
        token_logprobs: logprobs.values,
        token_ids: logprobs.tokens,
        top_logprobs: logprobs.top.into_iter().map(top).collect(),
    }
}

fn input_logprobs(logprobs: PromptLogprobs) -> InputLogProbs {
    InputLogProbs {
        token_logprobs: logprobs.values.into_iter().map(|value| InputTokenLogProb { value }).collect(),
        token_ids: logprobs.tokens,
        top_logprobs: logprobs.top.into_iter().map(top).collect(),
    }
}

fn top((token_ids, values): (Vec<u32>, Vec<f32>)) -> TopLogProbs {
    TopLogProbs { values, token_ids }
}

/// Lays what a test wants the engine to say of itself over what it says.
fn overlay(info: &mut GetServerInfoResponse, fields: &[(String, Value)]) {
    for (name, value) in fields {
        let text = || value.as_str().unwrap_or_default().to_owned();
        let number = || value.as_i64().and_then(|number| i32::try_from(number).ok()).unwrap_or_default();
        match name.as_str() {
            "kv_connector" => info.kv_connector = text(),
            "kv_role" => info.kv_role = text(),
            "kv_engine_id" => info.kv_engine_id = text(),
            "kv_cache_dtype" => info.kv_cache_dtype = text(),
            "attention_backend" => info.attention_backend = text(),
            "model_dtype" => info.model_dtype = text(),
            "pairing_protocol" => info.pairing_protocol = text(),
            "engine_reasoning_parser" => info.engine_reasoning_parser = text(),
            "data_parallel_size" => info.data_parallel_size = number(),
            "block_size" => info.block_size = number(),
            "max_num_seqs" => info.max_num_seqs = number(),
            _ => {}
        }
    }
}

#[tonic::async_trait]
impl VllmEngine for Servicer {
    type GenerateStream = Answer<GenerateResponse>;
    type GetTokenizerStream = Answer<GetTokenizerChunk>;

    async fn generate(&self, request: Request<GenerateRequest>) -> Result<Response<Self::GenerateStream>, Status> {
        generate(&self.0, request, &DIALECT).await
    }

    async fn health_check(
        &self,
        _request: Request<HealthCheckRequest>,
    ) -> Result<Response<HealthCheckResponse>, Status> {
        let (healthy, message) = self.0.health();
        Ok(Response::new(HealthCheckResponse { healthy, message }))
    }

    async fn abort(&self, request: Request<AbortRequest>) -> Result<Response<AbortResponse>, Status> {
        for request_id in request.into_inner().request_ids {
            self.0.calls.abort(&request_id, "", |id| id == request_id);
        }
        Ok(Response::new(AbortResponse {}))
    }

    async fn get_model_info(
        &self,
        _request: Request<GetModelInfoRequest>,
    ) -> Result<Response<GetModelInfoResponse>, Status> {
        let settings = &self.0.settings;
        Ok(Response::new(GetModelInfoResponse {
            model_path: settings.model_path(),
            is_generation: true,
            max_context_length: u32::try_from(settings.max_model_len).unwrap_or(u32::MAX),
            vocab_size: vocabulary::size(),
            served_model_name: settings.model.clone(),
            tokenizer_path: settings.model_path(),
            model_type: "mock".to_owned(),
            architectures: vec!["MockForCausalLM".to_owned()],
            eos_token_ids: vec![vocabulary::end_of_answer() as i32],
            max_req_input_len: i32::try_from(settings.max_model_len).unwrap_or(i32::MAX),
            default_sampling_params_json: settings.default_sampling.clone(),
            ..Default::default()
        }))
    }

    async fn get_server_info(
        &self,
        _request: Request<GetServerInfoRequest>,
    ) -> Result<Response<GetServerInfoResponse>, Status> {
        let (core, settings) = (&self.0, &self.0.settings);
        let kv_role = match settings.role {
            Role::Regular => "kv_both",
            Role::Prefill => "kv_producer",
            Role::Decode => "kv_consumer",
        };
        let connector = settings.connector.projected();
        let has_connector = *connector != Connector::None;
        let mut info = GetServerInfoResponse {
            active_requests: u32::try_from(core.load.active()).unwrap_or(u32::MAX),
            uptime_seconds: uptime(core),
            server_type: "vllm-grpc".to_owned(),
            kv_connector: connector.reported_name(),
            kv_role: if has_connector { kv_role.to_owned() } else { String::new() },
            kv_engine_id: if has_connector { core.engine_id().to_string() } else { String::new() },
            data_parallel_size: settings.dp_size.and_then(|size| i32::try_from(size).ok()).unwrap_or(1),
            shm_namespace_id: "mock".to_owned(),
            kv_cache_dtype: "auto".to_owned(),
            block_size: 128,
            attention_backend: "flash_attn".to_owned(),
            model_dtype: "torch.bfloat16".to_owned(),
            max_num_seqs: settings.max_running.and_then(|most| i32::try_from(most).ok()).unwrap_or(0),
            ..Default::default()
        };
        overlay(&mut info, &settings.server_info);
        Ok(Response::new(info))
    }

    async fn get_loads(&self, _request: Request<GetLoadsRequest>) -> Result<Response<GetLoadsResponse>, Status> {
        let (core, report) = (&self.0, self.0.report());
        Ok(Response::new(GetLoadsResponse {
            timestamp: report.timestamp,
            version: VERSION_VLLM.to_owned(),
            dp_rank_count: 1,
            loads: vec![SchedulerLoad {
                num_running_reqs: report.running,
                num_waiting_reqs: report.waiting,
                num_total_reqs: report.running + report.waiting,
                num_used_tokens: report.used_tokens,
                max_total_num_tokens: core.kv_tokens(),
                token_usage: report.usage,
                max_running_requests: report.max_running,
                ..Default::default()
            }],
        }))
    }

    async fn get_tokenizer(
        &self,
        _request: Request<GetTokenizerRequest>,
    ) -> Result<Response<Self::GetTokenizerStream>, Status> {
        Ok(Response::new(tokenizer()))
    }

    async fn flush_cache(&self, _request: Request<FlushCacheRequest>) -> Result<Response<FlushCacheResponse>, Status> {
        let message = "Local KV prefix cache flushed successfully".to_owned();
        Ok(Response::new(FlushCacheResponse { success: true, message }))
    }

    async fn start_profile(&self, _request: Request<StartProfileRequest>) -> Result<Response<ProfileResponse>, Status> {
        Err(Status::internal("Profiling is not enabled"))
    }

    async fn stop_profile(&self, _request: Request<StopProfileRequest>) -> Result<Response<ProfileResponse>, Status> {
        Err(Status::internal("Profiling is not enabled"))
    }
}
