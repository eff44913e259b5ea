//! The gRPC client that talks to engines on behalf of the control plane.
//!
//! As over HTTP, engines are not trusted and each call has its own connection and one deadline for everything. Which
//! engine it is shows in which service it answers: every servicer has a health check of its own, and answers the others'
//! with UNIMPLEMENTED.

use std::time::Duration;

use http::uri::PathAndQuery;
use smg_fleet::{Runtime, Wire, WorkerUrl};
use smg_net::engine::{self, EngineError};
use smg_net::tls::ClientConfig;
use smg_services::engines::sglang::sglang_scheduler_client::SglangSchedulerClient;
use smg_services::engines::tokenspeed::token_speed_scheduler_client::TokenSpeedSchedulerClient;
use smg_services::engines::vllm::vllm_engine_client::VllmEngineClient;
use smg_services::engines::{sglang, tokenspeed, vllm};
use tokio::time::timeout;
use tonic::metadata::AsciiMetadataValue;
use tonic::transport::Channel;
use tonic::{Code, Request, Response, Status};
use tonic_prost::ProstCodec;

use super::client::{MAX_BODY_BYTES, ProbeError};

/// Engines by their health checks, in the order they are asked. All have the same messages.
const HEALTH_CHECKS: [(Runtime, &str); 5] = [
    (Runtime::Sglang, "/sglang.grpc.scheduler.SglangScheduler/HealthCheck"),
    (Runtime::Vllm, "/vllm.grpc.engine.VllmEngine/HealthCheck"),
    (Runtime::Trtllm, "/trtllm.TrtllmService/HealthCheck"),
    (Runtime::Tokenspeed, "/tokenspeed.grpc.scheduler.TokenSpeedScheduler/HealthCheck"),
    (Runtime::Mlx, "/mlx.grpc.engine.MlxEngine/HealthCheck"),
];

/// The header that bears an engine's key, if it has one.
type Key = Option<AsciiMetadataValue>;

/// An engine and how to ask it.
#[derive(Debug, Clone, Copy)]
pub struct Address<'a> {
    /// `grpc://` or `grpcs://`.
    pub url: &'a str,
    /// Its bearer key.
    pub key: Option<&'a str>,
    /// How long one call may take, connecting included.
    pub limit: Duration,
}

/// What an engine says of its model.
#[derive(Debug, Clone, PartialEq)]
pub enum ModelInfo {
    /// SGLang does.
    Sglang(sglang::GetModelInfoResponse),
    /// vLLM does.
    Vllm(vllm::GetModelInfoResponse),
    /// TokenSpeed does.
    TokenSpeed(tokenspeed::GetModelInfoResponse),
}

/// What an engine says of itself.
#[derive(Debug, Clone, PartialEq)]
pub enum ServerInfo {
    /// SGLang does.
    Sglang(sglang::GetServerInfoResponse),
    /// vLLM does.
    Vllm(Box<vllm::GetServerInfoResponse>),
    /// TokenSpeed does.
    TokenSpeed(tokenspeed::GetServerInfoResponse),
}

/// Requests in one rank of an engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RankCount {
    /// Which rank.
    pub rank: u32,
    /// How many, running or not.
    pub requests: u32,
}

impl RankCount {
    /// The sum of what it says of its parts, or the total that it says, whichever is larger.
    fn of(rank: i32, total: i32, parts: &[i32]) -> Self {
        let count = |number: i32| u32::try_from(number).unwrap_or(0);
        let sum = parts.iter().fold(0u32, |sum, part| sum.saturating_add(count(*part)));
        Self { rank: count(rank), requests: sum.max(count(total)) }
    }
}

/// SGLang counts requests that wait for their KV cache apart; an engine that does not say how many there are says nothing.
fn of_sglang(load: &sglang::SchedulerLoad) -> Option<RankCount> {
    let transfers = load.disaggregation.as_ref()?;
    let parts = [
        load.num_running_reqs,
        load.num_waiting_reqs,
        transfers.decode_prealloc_queue_reqs,
        transfers.decode_transfer_queue_reqs,
        transfers.decode_retracted_queue_reqs,
    ];
    Some(RankCount::of(load.dp_rank, load.num_total_reqs, &parts))
}

/// Whether the worker at `url` speaks gRPC.
pub fn speaks_grpc(url: &str) -> bool {
    WorkerUrl::parse(url).is_ok_and(|url| url.scheme().wire() == Wire::Grpc)
}

/// The client. Cheap to clone.
#[derive(Debug, Clone, Default)]
pub struct EngineClient {
    tls: Option<ClientConfig>,
}

impl EngineClient {
    /// A client. `tls` says what connections to `grpcs://` workers trust and present; without it no such worker is trusted.
    pub fn new(tls: Option<&ClientConfig>) -> Self {
        Self { tls: tls.cloned() }
    }

    /// Asks an engine of a known kind whether it is well.
    ///
    /// # Errors
    /// When it is not, or does not answer.
    pub async fn health(&self, at: Address<'_>, runtime: Runtime) -> Result<(), ProbeError> {
        let Some((_, path)) = HEALTH_CHECKS.iter().find(|(known, _)| *known == runtime) else {
            return Err(ProbeError::Request(format!("{runtime} has no health check over gRPC")));
        };
        self.check(at, path).await
    }

    /// Finds out which engine it is, and whether it is well; `hint` is asked first.
    ///
    /// # Errors
    /// When none of the known engines answers, or the one that does is not well.
    pub async fn detect(&self, at: Address<'_>, hint: Runtime) -> Result<Runtime, ProbeError> {
        let hinted = HEALTH_CHECKS.iter().filter(|(runtime, _)| *runtime == hint);
        let others = HEALTH_CHECKS.iter().filter(|(runtime, _)| *runtime != hint);
        let mut last = None;
        for (runtime, path) in hinted.chain(others) {
            match self.check(at, path).await {
                Ok(()) => return Ok(*runtime),
                Err(error @ ProbeError::Status(Code::Unimplemented, _)) => last = Some(error),
                Err(error) => return Err(error),
            }
        }
        Err(last.unwrap_or_else(|| ProbeError::Request("there is no engine to ask for".to_owned())))
    }

    /// What an engine says of its model; `None` when nothing is asked of such an engine.
    ///
    /// # Errors
    /// When it does not answer.
    pub async fn model_info(&self, at: Address<'_>, runtime: Runtime) -> Result<Option<ModelInfo>, ProbeError> {
        Ok(Some(match runtime {
            Runtime::Sglang => {
                let call = |channel: Channel, key: Key| async move {
                    let mut client = SglangSchedulerClient::new(channel).max_decoding_message_size(MAX_BODY_BYTES);
                    client.get_model_info(keyed(sglang::GetModelInfoRequest {}, key)).await
                };
                ModelInfo::Sglang(self.call(at, call).await?)
            }
            Runtime::Vllm => {
                let call = |channel: Channel, key: Key| async move {
                    let mut client = VllmEngineClient::new(channel).max_decoding_message_size(MAX_BODY_BYTES);
                    client.get_model_info(keyed(vllm::GetModelInfoRequest {}, key)).await
                };
                ModelInfo::Vllm(self.call(at, call).await?)
            }
            Runtime::Tokenspeed => {
                let call = |channel: Channel, key: Key| async move {
                    let mut client = TokenSpeedSchedulerClient::new(channel).max_decoding_message_size(MAX_BODY_BYTES);
                    client.get_model_info(keyed(tokenspeed::GetModelInfoRequest {}, key)).await
                };
                ModelInfo::TokenSpeed(self.call(at, call).await?)
            }
            _ => return Ok(None),
        }))
    }

    /// What an engine says of itself; `None` when nothing is asked of such an engine.
    ///
    /// # Errors
    /// When it does not answer.
    pub async fn server_info(&self, at: Address<'_>, runtime: Runtime) -> Result<Option<ServerInfo>, ProbeError> {
        Ok(Some(match runtime {
            Runtime::Sglang => {
                let call = |channel: Channel, key: Key| async move {
                    let mut client = SglangSchedulerClient::new(channel).max_decoding_message_size(MAX_BODY_BYTES);
                    client.get_server_info(keyed(sglang::GetServerInfoRequest {}, key)).await
                };
                ServerInfo::Sglang(self.call(at, call).await?)
            }
            Runtime::Vllm => {
                let call = |channel: Channel, key: Key| async move {
                    let mut client = VllmEngineClient::new(channel).max_decoding_message_size(MAX_BODY_BYTES);
                    client.get_server_info(keyed(vllm::GetServerInfoRequest {}, key)).await
                };
                ServerInfo::Vllm(Box::new(self.call(at, call).await?))
            }
            Runtime::Tokenspeed => {
                let call = |channel: Channel, key: Key| async move {
                    let mut client = TokenSpeedSchedulerClient::new(channel).max_decoding_message_size(MAX_BODY_BYTES);
                    client.get_server_info(keyed(tokenspeed::GetServerInfoRequest {}, key)).await
                };
                ServerInfo::TokenSpeed(self.call(at, call).await?)
            }
            _ => return Ok(None),
        }))
    }

    /// How many requests an engine holds, running or not, of each of its ranks; `None` when nothing is asked of such an engine, or when it
    /// leaves out those that wait for a KV cache.
    ///
    /// # Errors
    /// When it does not answer.
    pub async fn requests(&self, at: Address<'_>, runtime: Runtime) -> Result<Option<Vec<RankCount>>, ProbeError> {
        let include = || ["core", "disagg", "queues"].map(str::to_owned).to_vec();
        let counts: Option<Vec<RankCount>> = match runtime {
            Runtime::Sglang => {
                let call = |channel: Channel, key: Key| async move {
                    let mut client = SglangSchedulerClient::new(channel).max_decoding_message_size(MAX_BODY_BYTES);
                    client.get_loads(keyed(sglang::GetLoadsRequest { dp_rank: None, include: include() }, key)).await
                };
                self.call(at, call).await?.loads.iter().map(of_sglang).collect()
            }
            Runtime::Vllm => {
                let call = |channel: Channel, key: Key| async move {
                    let mut client = VllmEngineClient::new(channel).max_decoding_message_size(MAX_BODY_BYTES);
                    client.get_loads(keyed(vllm::GetLoadsRequest { dp_rank: None, include: include() }, key)).await
                };
                let counts = self.call(at, call).await?.loads.into_iter();
                let parts = |load: vllm::SchedulerLoad| {
                    let parts = [load.num_running_reqs, load.num_waiting_reqs];
                    RankCount::of(load.dp_rank, load.num_total_reqs, &parts)
                };
                Some(counts.map(parts).collect())
            }
            Runtime::Tokenspeed => {
                let call = |channel: Channel, key: Key| async move {
                    let mut client = TokenSpeedSchedulerClient::new(channel).max_decoding_message_size(MAX_BODY_BYTES);
                    let request = tokenspeed::GetLoadsRequest { dp_rank: None, include: include() };
                    client.get_loads(keyed(request, key)).await
                };
                let counts = self.call(at, call).await?.loads.into_iter();
                let parts = |load: tokenspeed::SchedulerLoad| {
                    let queues = load.queues.unwrap_or_default();
                    let waiting = load.num_waiting_reqs.max(queues.waiting);
                    let parts = [load.num_running_reqs, waiting, queues.grammar, queues.paused, queues.retracted];
                    RankCount::of(load.dp_rank, load.num_total_reqs, &parts)
                };
                Some(counts.map(parts).collect())
            }
            _ => None,
        };
        Ok(counts.filter(|counts| !counts.is_empty()))
    }

    async fn check(&self, at: Address<'_>, path: &'static str) -> Result<(), ProbeError> {
        let call = |channel: Channel, key: Key| async move {
            let mut client = tonic::client::Grpc::new(channel).max_decoding_message_size(MAX_BODY_BYTES);
            client.ready().await.map_err(|error| Status::unavailable(engine::root_cause(&error)))?;
            let codec = ProstCodec::<sglang::HealthCheckRequest, sglang::HealthCheckResponse>::default();
            client.unary(keyed(sglang::HealthCheckRequest {}, key), PathAndQuery::from_static(path), codec).await
        };
        let answer = self.call(at, call).await?;
        if answer.healthy { Ok(()) } else { Err(ProbeError::Unhealthy(answer.message)) }
    }

    /// One call on a connection of its own.
    async fn call<T, Answer>(&self, at: Address<'_>, call: impl FnOnce(Channel, Key) -> Answer) -> Result<T, ProbeError>
    where
        Answer: Future<Output = Result<Response<T>, Status>>,
    {
        let key = match at.key.map(|key| format!("Bearer {key}").parse()) {
            None => None,
            Some(Ok(key)) => Some(key),
            Some(Err(_)) => return Err(ProbeError::Request("the key cannot be sent".to_owned())),
        };
        let answer = async {
            let channel = engine::connect(at.url, self.tls.as_ref()).await.map_err(|error| match error {
                EngineError::Url(_) => ProbeError::Request(error.to_string()),
                EngineError::Transport(reason) => ProbeError::Transport(reason),
            })?;
            match call(channel, key).await {
                Ok(answer) => Ok(answer.into_inner()),
                Err(status) => Err(ProbeError::Status(status.code(), status.message().to_owned())),
            }
        };
        timeout(at.limit, answer).await.unwrap_or(Err(ProbeError::Timeout(at.limit)))
    }
}

/// A request that bears the engine's key.
fn keyed<T>(message: T, key: Key) -> Request<T> {
    let mut request = Request::new(message);
    if let Some(key) = key {
        request.metadata_mut().insert("authorization", key);
    }
    request
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_that_wait_for_their_cache_count_and_an_engine_that_hides_them_says_nothing() {
        let mut load = sglang::SchedulerLoad {
            dp_rank: 1,
            num_running_reqs: 3,
            num_waiting_reqs: -1,
            num_total_reqs: 3,
            ..Default::default()
        };
        assert_eq!(of_sglang(&load), None);
        load.disaggregation = Some(sglang::DisaggregationMetrics {
            decode_prealloc_queue_reqs: 2,
            decode_transfer_queue_reqs: 4,
            ..Default::default()
        });
        assert_eq!(of_sglang(&load), Some(RankCount { rank: 1, requests: 9 }));
    }
}
