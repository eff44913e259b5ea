//! The calls that engines answer, each in the dialect of its runtime.

use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use futures::stream::Stream;
use smg_engines::grpc::{self as wire, Message, Reader};
use smg_fleet::Runtime;
use smg_services::engines::common::{FlushCacheRequest, GetTokenizerChunk, GetTokenizerRequest};
use smg_services::engines::sglang::sglang_scheduler_client::SglangSchedulerClient;
use smg_services::engines::tokenspeed::token_speed_scheduler_client::TokenSpeedSchedulerClient;
use smg_services::engines::vllm::vllm_engine_client::VllmEngineClient;
use smg_services::engines::{sglang, tokenspeed, vllm};
use tonic::metadata::MetadataMap;
use tonic::transport::Channel;
use tonic::{Request, Status, Streaming};

use super::leg::{Exchange, Reply};
use super::status::LegFailure;

/// Largest message of an engine.
const MAX_MESSAGE: usize = 64 * 1024 * 1024;
/// What an abort gives as its reason.
const REASON: &str = "Stream dropped";

/// Which engine of a kind it is. Empty = it does not say.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EngineIdentity {
    /// The name of its model.
    pub served_model_name: String,
    /// What it was loaded from.
    pub model_path: String,
    /// How vLLM moves KV.
    pub kv_connector: String,
    /// What this process of vLLM is called by those that fetch KV from it.
    pub kv_engine_id: String,
}

/// The client of one engine.
#[derive(Debug, Clone)]
pub enum Client {
    /// SGLang.
    Sglang(SglangSchedulerClient<Channel>),
    /// vLLM.
    Vllm(VllmEngineClient<Channel>),
    /// TokenSpeed.
    Tokenspeed(TokenSpeedSchedulerClient<Channel>),
}

impl Client {
    /// The client of an engine of this runtime behind `channel`; `None` when nothing is known of how it speaks gRPC.
    pub fn new(runtime: Runtime, channel: Channel) -> Option<Self> {
        Some(match runtime {
            Runtime::Sglang | Runtime::Unspecified => {
                Self::Sglang(SglangSchedulerClient::new(channel).max_decoding_message_size(MAX_MESSAGE))
            }
            Runtime::Vllm => Self::Vllm(VllmEngineClient::new(channel).max_decoding_message_size(MAX_MESSAGE)),
            Runtime::Tokenspeed => {
                Self::Tokenspeed(TokenSpeedSchedulerClient::new(channel).max_decoding_message_size(MAX_MESSAGE))
            }
            _ => return None,
        })
    }

    /// Whether the engine is well, by its own word.
    ///
    /// # Errors
    /// When it does not say.
    pub async fn is_healthy(&self) -> Result<bool, Status> {
        Ok(match self.clone() {
            Self::Sglang(mut client) => client.health_check(sglang::HealthCheckRequest {}).await?.into_inner().healthy,
            Self::Vllm(mut client) => client.health_check(vllm::HealthCheckRequest {}).await?.into_inner().healthy,
            Self::Tokenspeed(mut client) => {
                client.health_check(tokenspeed::HealthCheckRequest {}).await?.into_inner().healthy
            }
        })
    }

    /// What the engine says of its model and its KV connector.
    ///
    /// # Errors
    /// When it does not say.
    pub async fn identity(&self) -> Result<EngineIdentity, Status> {
        Ok(match self.clone() {
            Self::Sglang(mut client) => {
                let model = client.get_model_info(sglang::GetModelInfoRequest {}).await?.into_inner();
                EngineIdentity {
                    served_model_name: model.served_model_name,
                    model_path: model.model_path,
                    kv_connector: String::new(),
                    kv_engine_id: String::new(),
                }
            }
            Self::Vllm(mut client) => {
                let model = client.get_model_info(vllm::GetModelInfoRequest {}).await?.into_inner();
                let server = client.get_server_info(vllm::GetServerInfoRequest {}).await?.into_inner();
                EngineIdentity {
                    served_model_name: model.served_model_name,
                    model_path: model.model_path,
                    kv_connector: server.kv_connector,
                    kv_engine_id: server.kv_engine_id,
                }
            }
            Self::Tokenspeed(mut client) => {
                let model = client.get_model_info(tokenspeed::GetModelInfoRequest {}).await?.into_inner();
                EngineIdentity {
                    served_model_name: model.served_model_name,
                    model_path: model.model_path,
                    kv_connector: String::new(),
                    kv_engine_id: String::new(),
                }
            }
        })
    }

    /// Lets the engine drop its prefix cache.
    ///
    /// # Errors
    /// When it does not.
    pub async fn flush_cache(&self, limit: Duration) -> Result<(), Status> {
        let request = FlushCacheRequest { timeout_s: limit.as_secs_f32() };
        let answer = match self.clone() {
            Self::Sglang(mut client) => client.flush_cache(request).await?,
            Self::Vllm(mut client) => client.flush_cache(request).await?,
            Self::Tokenspeed(mut client) => client.flush_cache(request).await?,
        };
        let answer = answer.into_inner();
        if answer.success { Ok(()) } else { Err(Status::failed_precondition(answer.message)) }
    }

    /// The engine's tokenizer, in pieces.
    ///
    /// # Errors
    /// When it has none.
    pub async fn tokenizer(&self) -> Result<Streaming<GetTokenizerChunk>, Status> {
        let request = GetTokenizerRequest {};
        Ok(match self.clone() {
            Self::Sglang(mut client) => client.get_tokenizer(request).await?,
            Self::Vllm(mut client) => client.get_tokenizer(request).await?,
            Self::Tokenspeed(mut client) => client.get_tokenizer(request).await?,
        }
        .into_inner())
    }

    async fn abort(self, request_id: String) -> Result<(), Status> {
        let reason = REASON.to_owned();
        match self {
            Self::Sglang(mut client) => {
                client.abort(sglang::AbortRequest { request_id, reason }).await?;
            }
            Self::Vllm(mut client) => {
                client.abort(vllm::AbortRequest { request_ids: vec![request_id] }).await?;
            }
            Self::Tokenspeed(mut client) => {
                client.abort(tokenspeed::AbortRequest { request_id, reason }).await?;
            }
        }
        Ok(())
    }
}

/// A request in the dialect of its engine.
#[derive(Debug, Clone)]
pub enum EngineRequest {
    /// SGLang's.
    Sglang(Box<sglang::GenerateRequest>),
    /// vLLM's.
    Vllm(Box<vllm::GenerateRequest>),
    /// TokenSpeed's.
    Tokenspeed(Box<tokenspeed::GenerateRequest>),
}

impl EngineRequest {
    /// Whether its answer comes in pieces.
    fn streams(&self) -> bool {
        match self {
            Self::Sglang(request) => request.stream,
            Self::Vllm(request) => request.stream,
            Self::Tokenspeed(request) => request.stream,
        }
    }
}

/// One request to one engine, as a leg runs it.
#[derive(Debug)]
pub struct Call {
    client: Client,
    request: Option<EngineRequest>,
    request_id: String,
    metadata: MetadataMap,
    samples: u32,
    handoff: Option<String>,
}

impl Call {
    /// A call for so many samples that will be known to the engine under `request_id`.
    pub fn new(
        client: Client,
        request: EngineRequest,
        request_id: String,
        metadata: MetadataMap,
        samples: u32,
    ) -> Self {
        Self { client, request: Some(request), request_id, metadata, samples, handoff: None }
    }

    /// For a prefill that hands over without saying so: what it then holds.
    pub fn handing_over(mut self, params: Option<String>) -> Self {
        self.handoff = params;
        self
    }
}

impl Reply for Message {
    fn completes(&self) -> bool {
        matches!(self, Message::Complete(_))
    }
}

impl Exchange for Call {
    type Reply = Message;
    type Replies = Replies;

    fn open(&mut self) -> impl Future<Output = Result<Replies, LegFailure>> + Send + 'static {
        let (client, request, metadata) =
            (self.client.clone(), self.request.take(), std::mem::take(&mut self.metadata));
        let reader = Reader::new(self.samples, request.as_ref().is_some_and(EngineRequest::streams))
            .handing_over(self.handoff.take());
        async move {
            let stream = match (client, request) {
                (Client::Sglang(mut client), Some(EngineRequest::Sglang(request))) => {
                    client.generate(with(metadata, *request)).await.map(|replies| Dialect::Sglang(replies.into_inner()))
                }
                (Client::Vllm(mut client), Some(EngineRequest::Vllm(request))) => {
                    client.generate(with(metadata, *request)).await.map(|replies| Dialect::Vllm(replies.into_inner()))
                }
                (Client::Tokenspeed(mut client), Some(EngineRequest::Tokenspeed(request))) => client
                    .generate(with(metadata, *request))
                    .await
                    .map(|replies| Dialect::Tokenspeed(replies.into_inner())),
                _ => Err(Status::internal("the request is not in the engine's dialect")),
            };
            let stream = stream.map_err(|status| LegFailure::of(&status))?;
            Ok(Replies { stream, reader })
        }
    }

    fn abort(&self) -> impl Future<Output = Result<(), LegFailure>> + Send + 'static {
        let call = self.client.clone().abort(self.request_id.clone());
        async { call.await.map_err(|status| LegFailure::of(&status)) }
    }
}

fn with<T>(metadata: MetadataMap, message: T) -> Request<T> {
    let mut request = Request::new(message);
    *request.metadata_mut() = metadata;
    request
}

/// An engine's stream, read.
#[derive(Debug)]
pub struct Replies {
    stream: Dialect,
    reader: Reader,
}

#[derive(Debug)]
enum Dialect {
    Sglang(Streaming<sglang::GenerateResponse>),
    Vllm(Streaming<vllm::GenerateResponse>),
    Tokenspeed(Streaming<tokenspeed::GenerateResponse>),
}

impl Stream for Replies {
    type Item = Result<Message, LegFailure>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let Self { stream, reader } = &mut *self;
        let read = match stream {
            Dialect::Sglang(replies) => ready!(Pin::new(replies).poll_next(cx))
                .map(|reply| reply.map(|reply| wire::sglang::read(reader, reply))),
            Dialect::Vllm(replies) => {
                ready!(Pin::new(replies).poll_next(cx)).map(|reply| reply.map(|reply| wire::vllm::read(reader, reply)))
            }
            Dialect::Tokenspeed(replies) => ready!(Pin::new(replies).poll_next(cx))
                .map(|reply| reply.map(|reply| wire::tokenspeed::read(reader, reply))),
        };
        Poll::Ready(read.map(|read| match read {
            Ok(message) => message.map_err(LegFailure::from),
            Err(status) => Err(LegFailure::of(&status)),
        }))
    }
}
