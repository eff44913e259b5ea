//! TokenSpeed's servicer.
//!
//! Prefill and decode get a request at once and meet in a bootstrap room, which also decides their data-parallel rank:
//! room modulo ranks.

use std::sync::Arc;

use serde_json::json;
use smg_services::engines::common::{
    FlushCacheRequest, FlushCacheResponse, GetTokenizerChunk, GetTokenizerRequest, ProfileResponse,
    StartProfileRequest, StopProfileRequest,
};
use smg_services::engines::tokenspeed::token_speed_scheduler_server::TokenSpeedScheduler;
use smg_services::engines::tokenspeed::{
    AbortRequest, AbortResponse, AggregateMetrics, GenerateComplete, GenerateRequest, GenerateResponse,
    GenerateStreamChunk, GetLoadsRequest, GetLoadsResponse, GetModelInfoRequest, GetModelInfoResponse,
    GetServerInfoRequest, GetServerInfoResponse, HealthCheckRequest, HealthCheckResponse, MemoryMetrics,
    OutputLogProbs, QueueMetrics, SchedulerLoad, TopLogProbs, generate_complete, generate_response,
};
use tonic::{Request, Response, Status};

use super::work::{self, Event, Job, Logprobs, Matched, Meeting, Source};
use super::{Answer, Asked, Dialect, generate, structs, tokenizer, uptime};
use crate::VERSION_TOKENSPEED;
use crate::engine::{Core, Role};
use crate::fabric::Take;
use crate::ledger::Key;
use crate::text::Prompt;
use crate::vocabulary;

pub(super) struct Servicer(pub(super) Arc<Core>);

const DIALECT: Dialect<GenerateRequest, GenerateResponse> = Dialect { asked: Asked::TokenSpeed, read, rank, write };

/// The rank that the room leads to.
fn rank(core: &Core, request: &GenerateRequest) -> Option<u64> {
    let room = request.kv_bootstrap_info.as_ref()?.bootstrap_room;
    let ranks = core.settings.dp_size.filter(|ranks| *ranks > 1)?;
    u64::try_from(room).ok().map(|room| room % ranks)
}

fn read(core: &Core, request: &GenerateRequest) -> Result<Job, Status> {
    let invalid = |message: &str| Status::invalid_argument(message);
    let settings = &core.settings;
    let tokenized = request.tokenized.as_ref().ok_or_else(|| invalid("tokenized input is required"))?;
    let params = request.sampling_params.clone().unwrap_or_default();
    core.check_prompt(&tokenized.input_ids)?;
    let prompt = Prompt::of_token_ids(&tokenized.input_ids);
    let meeting = match settings.role {
        Role::Regular => Meeting::None,
        role => {
            let meeting = request.kv_bootstrap_info.as_ref();
            let meeting = meeting.ok_or_else(|| invalid("a disaggregated worker needs kv_bootstrap_info"))?;
            let room = u64::try_from(meeting.bootstrap_room).map_err(|_| invalid("bootstrap_room is negative"))?;
            let port = u16::try_from(meeting.bootstrap_port).map_err(|_| invalid("bootstrap_port is no port"))?;
            let (key, rank) = (Key::Room(room), rank(core, request));
            if role == Role::Prefill {
                Meeting::Serve { key, rank }
            } else {
                let take = Take { key, engine_id: None, prompt: prompt.digest, rank: None, wait: true };
                Meeting::Fetch { source: Source::Engine { host: meeting.bootstrap_host.clone(), port }, take }
            }
        }
    };
    let start = request.logprob_start_len.and_then(|start| usize::try_from(start).ok());
    if start.is_some() && request.return_logprob {
        return Err(invalid("log probabilities of the prompt are not supported"));
    }
    Ok(Job {
        id: request.request_id.clone(),
        prompt,
        prompt_ids: tokenized.input_ids.clone(),
        samples: params.n.max(1),
        seed: params.sampling_seed,
        max_tokens: work::limit(settings.role, params.max_new_tokens),
        min_tokens: params.min_new_tokens as usize,
        stop: params.stop,
        stop_tokens: params.stop_token_ids,
        ignore_eos: params.ignore_eos,
        trims_stop_token: !params.no_stop_trim,
        stream: request.stream,
        logprobs: request.return_logprob.then(|| usize::try_from(request.top_logprobs_num).unwrap_or(0)),
        prompt_logprobs_from: None,
        meeting,
    })
}

fn write(job: &Job, event: Event) -> GenerateResponse {
    let prompt_tokens = u32::try_from(job.prompt_ids.len()).unwrap_or(u32::MAX);
    let response = match event {
        Event::Chunk { index, tokens, count, cached, logprobs, .. } => {
            generate_response::Response::Chunk(GenerateStreamChunk {
                token_ids: tokens,
                prompt_tokens,
                completion_tokens: count,
                cached_tokens: cached,
                output_logprobs: logprobs.map(output_logprobs),
                index,
                weight_version: None,
            })
        }
        Event::Complete(end) => generate_response::Response::Complete(GenerateComplete {
            output_ids: end.tokens,
            finish_reason: end.reason.to_owned(),
            prompt_tokens,
            completion_tokens: end.count,
            cached_tokens: end.cached,
            output_logprobs: end.logprobs.map(output_logprobs),
            matched_stop: end.matched.map(|matched| match matched {
                Matched::End(token) | Matched::Token(token) => generate_complete::MatchedStop::MatchedTokenId(token),
                Matched::Text(text) => generate_complete::MatchedStop::MatchedStopStr(text),
            }),
            index: end.index,
            weight_version: Some("default".to_owned()),
            ..Default::default()
        }),
    };
    GenerateResponse { request_id: job.id.clone(), response: Some(response) }
}

fn output_logprobs(logprobs: Logprobs) -> OutputLogProbs {
    let top = |(token_ids, values): (Vec<u32>, Vec<f32>)| TopLogProbs { values, token_ids };
    OutputLogProbs {
        token_logprobs: logprobs.values,
        token_ids: logprobs.tokens,
        top_logprobs: logprobs.top.into_iter().map(top).collect(),
    }
}

#[tonic::async_trait]
impl TokenSpeedScheduler for Servicer {
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
        let AbortRequest { request_id, reason } = request.into_inner();
        let is_sample = |id: &str| {
            let number = id.strip_prefix(&request_id).and_then(|rest| rest.strip_prefix("-n"));
            number.is_some_and(|number| !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit()))
        };
        let success = self.0.calls.abort(&request_id, &reason, |id| id == request_id || is_sample(id));
        let message = if success {
            format!("Aborted 1 request(s) for {request_id}")
        } else {
            format!("Request {request_id} not found")
        };
        Ok(Response::new(AbortResponse { success, message }))
    }

    async fn get_model_info(
        &self,
        _request: Request<GetModelInfoRequest>,
    ) -> Result<Response<GetModelInfoResponse>, Status> {
        let settings = &self.0.settings;
        let window = i32::try_from(settings.max_model_len).unwrap_or(i32::MAX);
        Ok(Response::new(GetModelInfoResponse {
            model_path: settings.model_path(),
            tokenizer_path: settings.model_path(),
            served_model_name: settings.model.clone(),
            model_type: "mock".to_owned(),
            architectures: vec!["MockForCausalLM".to_owned()],
            max_context_length: window,
            max_req_input_len: window,
            vocab_size: vocabulary::size() as i32,
            eos_token_ids: vec![vocabulary::end_of_answer() as i32],
            weight_version: "default".to_owned(),
            default_sampling_params_json: settings.default_sampling.clone(),
            ..Default::default()
        }))
    }

    async fn get_server_info(
        &self,
        _request: Request<GetServerInfoRequest>,
    ) -> Result<Response<GetServerInfoResponse>, Status> {
        let (core, settings) = (&self.0, &self.0.settings);
        let mode = match settings.role {
            Role::Regular => "null",
            Role::Prefill => "prefill",
            Role::Decode => "decode",
        };
        let mut fields = vec![
            ("model", json!(settings.model_path())),
            ("served_model_name", json!(settings.model)),
            ("tokenizer", json!(settings.model_path())),
            ("attn_tp_size", json!(1)),
            ("data_parallel_size", json!(settings.dp_size.unwrap_or(1))),
            ("disaggregation_mode", json!(mode)),
            ("kv_cache_dtype", json!("auto")),
            ("attention_backend", json!("trtllm")),
        ];
        fields.extend(settings.max_running.map(|most| ("max_num_seqs", json!(most))));
        fields.extend(core.ports().bootstrap.map(|port| ("disaggregation_bootstrap_port", json!(port))));
        fields.extend(settings.server_info.iter().map(|(name, value)| (name.as_str(), value.clone())));
        Ok(Response::new(GetServerInfoResponse {
            server_args: Some(structs::of_fields(fields)),
            scheduler_info: Some(structs::of_fields([("shm_namespace_id", json!("mock"))])),
            active_requests: i32::try_from(core.load.active()).unwrap_or(i32::MAX),
            uptime_seconds: uptime(core),
            max_total_num_tokens: core.kv_tokens(),
            tokenspeed_version: VERSION_TOKENSPEED.to_owned(),
            constrained_decoding: "requested".to_owned(),
            ..Default::default()
        }))
    }

    async fn get_loads(&self, request: Request<GetLoadsRequest>) -> Result<Response<GetLoadsResponse>, Status> {
        let (core, asked) = (&self.0, request.into_inner());
        let wants = |section: &str| asked.include.iter().any(|wanted| wanted == section || wanted == "all");
        let report = core.report();
        let load = SchedulerLoad {
            num_running_reqs: report.running,
            num_waiting_reqs: report.waiting,
            num_total_reqs: report.running + report.waiting,
            num_used_tokens: report.used_tokens,
            max_total_num_tokens: core.kv_tokens(),
            max_running_requests: report.max_running,
            token_usage: report.usage,
            active_token_usage: Some(report.usage),
            memory: wants("memory").then(|| MemoryMetrics { token_capacity: core.kv_tokens(), ..Default::default() }),
            queues: wants("queues").then(|| QueueMetrics { waiting: report.waiting, ..Default::default() }),
            ..Default::default()
        };
        Ok(Response::new(GetLoadsResponse {
            timestamp: report.timestamp,
            version: VERSION_TOKENSPEED.to_owned(),
            dp_rank_count: 1,
            aggregate: Some(AggregateMetrics {
                total_running_reqs: load.num_running_reqs,
                total_waiting_reqs: load.num_waiting_reqs,
                total_reqs: load.num_total_reqs,
                avg_token_usage: load.token_usage,
                ..Default::default()
            }),
            loads: vec![load],
        }))
    }

    async fn get_tokenizer(
        &self,
        _request: Request<GetTokenizerRequest>,
    ) -> Result<Response<Self::GetTokenizerStream>, Status> {
        Ok(Response::new(tokenizer()))
    }

    async fn flush_cache(&self, _request: Request<FlushCacheRequest>) -> Result<Response<FlushCacheResponse>, Status> {
        Ok(Response::new(FlushCacheResponse { success: true, message: "Cache flushed.".to_owned() }))
    }

    async fn start_profile(&self, _request: Request<StartProfileRequest>) -> Result<Response<ProfileResponse>, Status> {
        Err(Status::internal("profiling is not enabled"))
    }

    async fn stop_profile(&self, _request: Request<StopProfileRequest>) -> Result<Response<ProfileResponse>, Status> {
        Err(Status::internal("profiling is not enabled"))
    }
}
