//! A scripted engine: it records what it is asked and does what it is told. The head of its answer comes with the first message, as with the
//! engines' own servicers.

use std::collections::HashMap;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use futures::Stream;
use parking_lot::Mutex;
use smg_fleet::Runtime;
use smg_services::engines::common::*;
use smg_services::engines::{sglang, vllm};
use tokio::sync::{mpsc, watch};
use tokio_stream::StreamExt;
use tokio_stream::wrappers::{ReceiverStream, TcpListenerStream};
use tonic::{Code, Request, Response, Status};

/// What a NIXL prefill hands over.
pub const HANDOFF: &str = r#"{"do_remote_prefill":true,"remote_engine_id":"e","remote_block_ids":[1,2]}"#;
const OUTPUT: &[u8] = b"hello world";

/// What an engine does with a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Act {
    /// Answers.
    Serve,
    /// Says nothing until it is told something else, or the request is aborted.
    Silent,
    /// Answers, and goes on with the output again and again.
    Forever,
    /// Breaks off after the first token.
    BreakAfterFirst,
    /// Refuses.
    Fail(Code, &'static str),
    /// Refuses one request.
    FailOnce(Code, &'static str),
}

/// What an engine was asked.
#[derive(Debug, Clone, Default)]
pub struct Asked {
    pub id: String,
    pub prompt: Vec<u8>,
    pub room: Option<i32>,
    pub bootstrap: Option<(String, i32)>,
    pub handoff: Option<String>,
    pub max_tokens: Option<u32>,
    pub stream: bool,
}

struct State {
    act: watch::Sender<Act>,
    requests: Mutex<Vec<Asked>>,
    aborts: Mutex<Vec<String>>,
    aborted: watch::Sender<u64>,
    /// Rooms in which a prefill has arrived.
    rooms: watch::Sender<Vec<i32>>,
    running: Mutex<HashMap<String, ()>>,
}

#[derive(Clone)]
pub struct Engine {
    pub runtime: Runtime,
    pub connector: Option<&'static str>,
    port: u16,
    state: Arc<State>,
    meets: Arc<Mutex<Option<Arc<State>>>>,
}

impl Engine {
    pub async fn sglang() -> Self {
        Self::start(Runtime::Sglang, None).await
    }

    pub async fn vllm() -> Self {
        Self::start(Runtime::Vllm, Some("NixlConnector")).await
    }

    async fn start(runtime: Runtime, connector: Option<&'static str>) -> Self {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let state = State {
            act: watch::Sender::new(Act::Serve),
            requests: Mutex::default(),
            aborts: Mutex::default(),
            aborted: watch::Sender::new(0),
            rooms: watch::Sender::new(Vec::new()),
            running: Mutex::default(),
        };
        let port = listener.local_addr().unwrap().port();
        let engine = Self { runtime, connector, port, state: Arc::new(state), meets: Arc::default() };
        let server = tonic::transport::Server::builder();
        let (sglang, vllm) = (engine.clone(), engine.clone());
        tokio::spawn(async move {
            let mut server = server;
            server
                .add_service(sglang::sglang_scheduler_server::SglangSchedulerServer::new(sglang))
                .add_service(vllm::vllm_engine_server::VllmEngineServer::new(vllm))
                .serve_with_incoming(TcpListenerStream::new(listener))
                .await
        });
        engine
    }

    /// As the decode of `prefill`, which it waits for in their room.
    pub fn meeting(self, prefill: &Engine) -> Self {
        *self.meets.lock() = Some(Arc::clone(&prefill.state));
        self
    }

    pub fn url(&self) -> String {
        format!("grpc://127.0.0.1:{}", self.port)
    }

    pub fn set(&self, act: Act) {
        self.state.act.send_replace(act);
    }

    pub fn requests(&self) -> Vec<Asked> {
        self.state.requests.lock().clone()
    }

    pub fn aborts(&self) -> Vec<String> {
        self.state.aborts.lock().clone()
    }

    fn abort(&self, ids: Vec<String>) {
        self.state.aborts.lock().extend(ids);
        self.state.aborted.send_modify(|count| *count += 1);
    }

    /// Plays a request; tokens are bytes, and `None` is the end.
    async fn play(&self, asked: Asked) -> Result<mpsc::Receiver<Result<Option<Vec<u32>>, Status>>, Status> {
        let state = Arc::clone(&self.state);
        state.requests.lock().push(asked.clone());
        let act = *state.act.borrow();
        match act {
            Act::Fail(code, message) => return Err(Status::new(code, message)),
            Act::FailOnce(code, message) => {
                state.act.send_replace(Act::Serve);
                return Err(Status::new(code, message));
            }
            _ => {}
        }
        if let Some(room) = asked.room {
            state.rooms.send_modify(|rooms| rooms.push(room));
        }
        let partner = self.meets.lock().clone();
        let (sender, receiver) = mpsc::channel(4);
        state.running.lock().insert(asked.id.clone(), ());
        let playing = {
            let state = Arc::clone(&state);
            let (room, capped) = (asked.room, asked.max_tokens == Some(1));
            async move {
                if let (Some(partner), Some(room)) = (partner, room) {
                    let mut rooms = partner.rooms.subscribe();
                    let _ = rooms.wait_for(|rooms| rooms.contains(&room)).await;
                }
                let mut acts = state.act.subscribe();
                let act = *acts.wait_for(|act| *act != Act::Silent).await.unwrap();
                let output = if capped { &OUTPUT[..1] } else { OUTPUT };
                loop {
                    for (number, token) in output.iter().enumerate() {
                        if sender.send(Ok(Some(vec![u32::from(*token)]))).await.is_err() {
                            return;
                        }
                        if act == Act::BreakAfterFirst && number == 0 {
                            let _ = sender.send(Err(Status::internal("scheduler died"))).await;
                            return;
                        }
                        tokio::task::yield_now().await;
                    }
                    if act != Act::Forever {
                        break;
                    }
                    tokio::time::sleep(Duration::from_millis(1)).await;
                }
                let _ = sender.send(Ok(None)).await;
            }
        };
        tokio::spawn(async move {
            let id = asked.id;
            let mut aborted = state.aborted.subscribe();
            let over = async {
                loop {
                    if state.aborts.lock().contains(&id) {
                        return;
                    }
                    if aborted.changed().await.is_err() {
                        return;
                    }
                }
            };
            tokio::select! {
                () = playing => {}
                () = over => {}
            }
            state.running.lock().remove(&id);
        });
        Ok(receiver)
    }
}

type Replies<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

/// The head comes with the first message.
async fn with_first<T: Send + 'static>(
    mut replies: mpsc::Receiver<Result<Option<Vec<u32>>, Status>>,
    say: impl Fn(Option<Vec<u32>>) -> Vec<T> + Send + 'static,
) -> Result<Response<Replies<T>>, Status> {
    let Some(first) = replies.recv().await else { return Err(Status::cancelled("aborted")) };
    let first = first?;
    let rest = ReceiverStream::new(replies);
    let all = tokio_stream::once(Ok(first)).chain(rest);
    let said = futures::StreamExt::flat_map(all, move |reply| {
        futures::stream::iter(match reply {
            Ok(reply) => say(reply).into_iter().map(Ok).collect::<Vec<_>>(),
            Err(status) => vec![Err(status)],
        })
    });
    Ok(Response::new(Box::pin(said)))
}

#[tonic::async_trait]
impl sglang::sglang_scheduler_server::SglangScheduler for Engine {
    type GenerateStream = Replies<sglang::GenerateResponse>;
    type GetTokenizerStream = Replies<GetTokenizerChunk>;

    async fn generate(
        &self,
        request: Request<sglang::GenerateRequest>,
    ) -> Result<Response<Self::GenerateStream>, Status> {
        use sglang::generate_response::Response as Said;
        let request = request.into_inner();
        let params = request.sampling_params.unwrap_or_default();
        let meeting = request.disaggregated_params;
        let prompt = request.tokenized.unwrap_or_default().input_ids;
        let streams = request.stream;
        let replies = self
            .play(Asked {
                id: request.request_id,
                prompt: prompt.iter().map(|id| *id as u8).collect(),
                room: meeting.as_ref().map(|meeting| meeting.bootstrap_room),
                bootstrap: meeting.map(|meeting| (meeting.bootstrap_host, meeting.bootstrap_port)),
                max_tokens: params.max_new_tokens,
                stream: streams,
                ..Asked::default()
            })
            .await?;
        let cached = if self.meets.lock().is_some() { 10 } else { 3 };
        let so_far = Mutex::new(Vec::new());
        with_first(replies, move |reply| {
            let mut all = so_far.lock();
            let said = match reply {
                Some(tokens) => {
                    all.extend(tokens.iter().copied());
                    streams.then(|| {
                        Said::Chunk(sglang::GenerateStreamChunk {
                            token_ids: tokens,
                            prompt_tokens: 10,
                            completion_tokens: all.len() as u32,
                            cached_tokens: cached,
                            ..Default::default()
                        })
                    })
                }
                None => Some(Said::Complete(sglang::GenerateComplete {
                    output_ids: if streams { all[all.len() - 1..].to_vec() } else { all.clone() },
                    finish_reason: "stop".to_owned(),
                    prompt_tokens: 10,
                    completion_tokens: all.len() as u32,
                    cached_tokens: cached,
                    ..Default::default()
                })),
            };
            let reply = |said| sglang::GenerateResponse { request_id: String::new(), response: Some(said) };
            said.into_iter().map(reply).collect()
        })
        .await
    }

    async fn abort(&self, request: Request<sglang::AbortRequest>) -> Result<Response<sglang::AbortResponse>, Status> {
        Engine::abort(self, vec![request.into_inner().request_id]);
        Ok(Response::new(sglang::AbortResponse { success: true, message: String::new() }))
    }

    async fn health_check(
        &self,
        _: Request<sglang::HealthCheckRequest>,
    ) -> Result<Response<sglang::HealthCheckResponse>, Status> {
        Ok(Response::new(sglang::HealthCheckResponse { healthy: true, message: String::new() }))
    }

    async fn get_model_info(
        &self,
        _: Request<sglang::GetModelInfoRequest>,
    ) -> Result<Response<sglang::GetModelInfoResponse>, Status> {
        Ok(Response::new(Default::default()))
    }

    async fn get_server_info(
        &self,
        _: Request<sglang::GetServerInfoRequest>,
    ) -> Result<Response<sglang::GetServerInfoResponse>, Status> {
        Ok(Response::new(Default::default()))
    }

    async fn get_loads(
        &self,
        _: Request<sglang::GetLoadsRequest>,
    ) -> Result<Response<sglang::GetLoadsResponse>, Status> {
        Ok(Response::new(Default::default()))
    }

    async fn get_tokenizer(
        &self,
        _: Request<GetTokenizerRequest>,
    ) -> Result<Response<Self::GetTokenizerStream>, Status> {
        Err(Status::failed_precondition("no tokenizer path"))
    }

    async fn flush_cache(&self, _: Request<FlushCacheRequest>) -> Result<Response<FlushCacheResponse>, Status> {
        Ok(Response::new(Default::default()))
    }

    async fn start_profile(&self, _: Request<StartProfileRequest>) -> Result<Response<ProfileResponse>, Status> {
        Ok(Response::new(Default::default()))
    }

    async fn stop_profile(&self, _: Request<StopProfileRequest>) -> Result<Response<ProfileResponse>, Status> {
        Ok(Response::new(Default::default()))
    }
}

#[tonic::async_trait]
impl vllm::vllm_engine_server::VllmEngine for Engine {
    type GenerateStream = Replies<vllm::GenerateResponse>;
    type GetTokenizerStream = Replies<GetTokenizerChunk>;

    async fn generate(
        &self,
        request: Request<vllm::GenerateRequest>,
    ) -> Result<Response<Self::GenerateStream>, Status> {
        use vllm::generate_response::Response as Said;
        let request = request.into_inner();
        let params = request.sampling_params.unwrap_or_default();
        let tokens = match request.input {
            Some(vllm::generate_request::Input::Tokenized(tokenized)) => tokenized.input_ids,
            _ => return Err(Status::invalid_argument("no token ids")),
        };
        let streams = request.stream;
        let handoff = request.kv_transfer_params_json;
        let tagged = handoff.as_deref().is_some_and(|json| json.contains("\"do_remote_decode\":true"));
        let replies = self
            .play(Asked {
                id: request.request_id,
                prompt: tokens.iter().map(|id| *id as u8).collect(),
                handoff,
                max_tokens: params.max_tokens,
                stream: streams,
                ..Asked::default()
            })
            .await?;
        let so_far = Mutex::new(Vec::new());
        with_first(replies, move |reply| {
            let mut all = so_far.lock();
            let said = match reply {
                Some(tokens) => {
                    all.extend(tokens.iter().copied());
                    streams.then(|| {
                        Said::Chunk(vllm::GenerateStreamChunk {
                            completion_tokens: tokens.len() as u32,
                            token_ids: tokens,
                            prompt_tokens: 10,
                            ..Default::default()
                        })
                    })
                }
                None => Some(Said::Complete(vllm::GenerateComplete {
                    output_ids: if streams { all[all.len() - 1..].to_vec() } else { all.clone() },
                    finish_reason: if tagged { "length" } else { "stop" }.to_owned(),
                    prompt_tokens: 10,
                    completion_tokens: if streams { 1 } else { all.len() as u32 },
                    kv_transfer_params_json: tagged.then(|| HANDOFF.to_owned()),
                    ..Default::default()
                })),
            };
            said.into_iter().map(|said| vllm::GenerateResponse { response: Some(said) }).collect()
        })
        .await
    }

    async fn abort(&self, request: Request<vllm::AbortRequest>) -> Result<Response<vllm::AbortResponse>, Status> {
        Engine::abort(self, request.into_inner().request_ids);
        Ok(Response::new(vllm::AbortResponse {}))
    }

    async fn health_check(
        &self,
        _: Request<vllm::HealthCheckRequest>,
    ) -> Result<Response<vllm::HealthCheckResponse>, Status> {
        Ok(Response::new(vllm::HealthCheckResponse { healthy: true, message: String::new() }))
    }

    async fn get_model_info(
        &self,
        _: Request<vllm::GetModelInfoRequest>,
    ) -> Result<Response<vllm::GetModelInfoResponse>, Status> {
        Ok(Response::new(Default::default()))
    }

    async fn get_server_info(
        &self,
        _: Request<vllm::GetServerInfoRequest>,
    ) -> Result<Response<vllm::GetServerInfoResponse>, Status> {
        Ok(Response::new(Default::default()))
    }

    async fn get_loads(&self, _: Request<vllm::GetLoadsRequest>) -> Result<Response<vllm::GetLoadsResponse>, Status> {
        Ok(Response::new(Default::default()))
    }

    async fn get_tokenizer(
        &self,
        _: Request<GetTokenizerRequest>,
    ) -> Result<Response<Self::GetTokenizerStream>, Status> {
        Err(Status::failed_precondition("no tokenizer path"))
    }

    async fn flush_cache(&self, _: Request<FlushCacheRequest>) -> Result<Response<FlushCacheResponse>, Status> {
        Ok(Response::new(Default::default()))
    }

    async fn start_profile(&self, _: Request<StartProfileRequest>) -> Result<Response<ProfileResponse>, Status> {
        Ok(Response::new(Default::default()))
    }

    async fn stop_profile(&self, _: Request<StopProfileRequest>) -> Result<Response<ProfileResponse>, Status> {
        Ok(Response::new(Default::default()))
    }
}

/// A tokenizer whose tokens are bytes, each with its own number, and a chat template.
pub fn tokenizer() -> tempfile::TempDir {
    let mut next = 0;
    let vocabulary: serde_json::Map<String, serde_json::Value> = (0..=255u32)
        .map(|byte| {
            // The characters by which byte-level tokenizers write bytes.
            let printable = matches!(byte, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
            let written = if printable {
                byte
            } else {
                next += 1;
                0xff + next
            };
            (char::from_u32(written).unwrap().to_string(), byte.into())
        })
        .collect();
    let level =
        serde_json::json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false});
    let tokenizer = serde_json::json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
        "pre_tokenizer": level, "post_processor": null, "decoder": level,
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
                  "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
                  "vocab": vocabulary, "merges": []},
    });
    let template = "{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}a:";
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("tokenizer.json"), tokenizer.to_string()).unwrap();
    let config = serde_json::json!({"chat_template": template});
    std::fs::write(folder.path().join("tokenizer_config.json"), config.to_string()).unwrap();
    folder
}
