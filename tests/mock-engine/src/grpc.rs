//! gRPC servicers of SGLang, vLLM and TokenSpeed.
//!
//! They share the wire's messages with the gateway and nothing else. What they keep to, as the servicers (release 0.14.1)
//! do:
//! - each answers the methods of its own service only, anything else is UNIMPLEMENTED;
//! - headers go out with the first message, so a leg that waits for KV is silent;
//! - a request is aborted by `Abort`, and when its call is dropped (unless told to overlook that);
//! - `Abort` of an unknown id is no error.

mod bundle;
mod calls;
mod fault;
mod sglang;
mod structs;
mod tokenspeed;
mod vllm;
mod work;

use std::collections::VecDeque;
use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;

use bytes::Bytes;
use futures::{Stream, StreamExt as _};
use http_body_util::StreamBody;
use hyper::body::{Frame, Incoming};
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::net::TcpStream;
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};
use tokio_util::sync::CancellationToken;
use tonic::body::Body;
use tonic::service::Routes;
use tonic::{Request, Response, Status};
use tower::Service as _;

pub(crate) use self::calls::Calls;
use self::calls::Open;
pub use self::calls::{Abort, Asked, Call, CallEnd};
pub use self::fault::CallFault;
pub(crate) use self::fault::CallFaults;
use self::fault::Ending;
use self::work::{End, Event, Job};
use crate::engine::{Core, Engine};

/// Largest message accepted, in bytes.
const LARGEST_MESSAGE: usize = 64 * 1024 * 1024;

/// An answer that comes message by message.
type Answer<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

/// Ends the connection that a call came on.
#[derive(Clone)]
struct Cut(CancellationToken);

/// The fault that a call meets.
#[derive(Clone)]
struct Met(Box<CallFault>);

/// The tokens that an engine answers this prompt with, if it is not told what to say and no seed is given: the first
/// `count`.
pub fn expected_tokens(prompt: &[u32], count: usize) -> Vec<u32> {
    work::expected(prompt, count)
}

/// Serves one connection until it closes.
pub(crate) async fn serve(stream: TcpStream, core: Arc<Core>, serving: CancellationToken) {
    if stream.set_nodelay(true).is_err() {
        return;
    }
    let cut = CancellationToken::new();
    let routes = routes(&core);
    let service = hyper::service::service_fn(|mut request: http::Request<Incoming>| {
        request.extensions_mut().insert(Cut(cut.clone()));
        answer(Arc::clone(&core), routes.clone(), request)
    });
    let connection =
        hyper::server::conn::http2::Builder::new(TokioExecutor::new()).serve_connection(TokioIo::new(stream), service);
    tokio::select! {
        _ = connection => {}
        () = serving.cancelled() => {}
        () = cut.cancelled() => {}
    }
}

fn routes(core: &Arc<Core>) -> Routes {
    use smg_services::engines::sglang::sglang_scheduler_server::SglangSchedulerServer;
    use smg_services::engines::tokenspeed::token_speed_scheduler_server::TokenSpeedSchedulerServer;
    use smg_services::engines::vllm::vllm_engine_server::VllmEngineServer;
    let core = Arc::clone(core);
    match core.settings.engine {
        Engine::Sglang => {
            Routes::new(SglangSchedulerServer::new(sglang::Servicer(core)).max_decoding_message_size(LARGEST_MESSAGE))
        }
        Engine::Vllm => {
            Routes::new(VllmEngineServer::new(vllm::Servicer(core)).max_decoding_message_size(LARGEST_MESSAGE))
        }
        Engine::Tokenspeed => Routes::new(
            TokenSpeedSchedulerServer::new(tokenspeed::Servicer(core)).max_decoding_message_size(LARGEST_MESSAGE),
        ),
    }
}

/// Answers a call: with the key checked, and as its fault says if it meets one.
async fn answer(
    core: Arc<Core>,
    mut routes: Routes,
    mut request: http::Request<Incoming>,
) -> Result<http::Response<Body>, Infallible> {
    if let Some(key) = &core.settings.api_key {
        let given = request.headers().get(http::header::AUTHORIZATION).and_then(|value| value.to_str().ok());
        if given.and_then(|value| value.strip_prefix("Bearer ")) != Some(key) {
            return Ok(Status::unauthenticated("Unauthorized").into_http());
        }
    }
    let method = request.uri().path().rsplit('/').next().unwrap_or_default().to_owned();
    core.count_call(&method);
    if let Some(fault) = core.call_faults.meeting(&method) {
        tokio::time::sleep(fault.delay).await;
        if let Some(frames) = &fault.frames {
            return Ok(raw(frames.clone()));
        }
        if method != "Generate" {
            if fault.hang {
                std::future::pending::<()>().await;
            }
            if fault.status.is_some() {
                return Ok(fault.refusal().into_http());
            }
        }
        request.extensions_mut().insert(Met(Box::new(fault)));
    }
    routes.call(request).await
}

/// An answer of these bytes, which need be no messages.
fn raw(frames: Bytes) -> http::Response<Body> {
    let trailers = http::HeaderMap::from_iter([(
        http::HeaderName::from_static("grpc-status"),
        http::HeaderValue::from_static("0"),
    )]);
    let frames = [Ok::<_, Status>(Frame::data(frames)), Ok(Frame::trailers(trailers))];
    let mut response = http::Response::new(Body::new(StreamBody::new(futures::stream::iter(frames))));
    response.headers_mut().insert(http::header::CONTENT_TYPE, http::HeaderValue::from_static("application/grpc"));
    response
}

/// How an engine's `Generate` differs from another's.
struct Dialect<R, T> {
    asked: fn(Box<R>) -> Asked,
    read: fn(&Core, &R) -> Result<Job, Status>,
    /// The data-parallel rank that a request runs on.
    rank: fn(&Core, &R) -> Option<u64>,
    write: fn(&Job, Event) -> T,
}

/// Answers `Generate`.
async fn generate<R, T>(
    core: &Arc<Core>,
    request: Request<R>,
    dialect: &Dialect<R, T>,
) -> Result<Response<Answer<T>>, Status>
where
    R: Clone,
    T: Default + Send + 'static,
{
    let entered = core.load.enter();
    let (metadata, extensions, asked) = request.into_parts();
    let metadata = metadata
        .into_headers()
        .iter()
        .map(|(name, value)| (name.to_string(), String::from_utf8_lossy(value.as_bytes()).into_owned()))
        .collect();
    let fault = extensions.get::<Met>().map(|met| (*met.0).clone());
    let cut = extensions.get::<Cut>().cloned();
    let read = (dialect.read)(core, &asked);
    let rank = (dialect.rank)(core, &asked);
    let (open, is_new) = core.calls.arrived((dialect.asked)(Box::new(asked)), metadata, rank);
    let refuse = |status: Status, end: Option<CallEnd>| {
        let end = end.unwrap_or_else(|| CallEnd::Failed(status.code(), status.message().to_owned()));
        core.calls.ended(&open, end);
        Err(status)
    };
    if let Some(fault) = fault.as_ref().filter(|fault| fault.status.is_some() && fault.end.is_none()) {
        return refuse(fault.refusal(), Some(CallEnd::Faulty));
    }
    if !is_new {
        return refuse(Status::invalid_argument("the request id is in use"), None);
    }
    let job = match read {
        Ok(job) => Arc::new(job),
        Err(status) => return refuse(status, None),
    };
    let caller = Caller { core: Arc::clone(core), open: Arc::clone(&open) };
    let (events, received) = unbounded_channel();
    let hangs = fault.as_ref().is_some_and(|fault| fault.hang);
    let (task_core, task_job) = (Arc::clone(core), Arc::clone(&job));
    let serving = core.serving();
    tokio::spawn(async move {
        let _entered = entered;
        let (core, job) = (task_core, task_job);
        let work = async {
            if hangs {
                std::future::pending::<()>().await;
            }
            work::work(&core, &job, &events).await
        };
        let result = tokio::select! {
            result = work => result.map(|()| CallEnd::Completed),
            () = open.aborted.cancelled() => Ok(CallEnd::Aborted),
            () = open.abandoned.cancelled() => Ok(CallEnd::Dropped),
            () = serving.cancelled() => Ok(CallEnd::Dropped),
        };
        match result {
            Ok(end) => {
                let aborted = end == CallEnd::Aborted;
                core.calls.ended(&open, end);
                for index in (0..job.samples).filter(|_| aborted) {
                    let _ = events.send(Ok(Event::Complete(Box::new(End::aborted(index)))));
                }
            }
            Err(status) => {
                core.calls.ended(&open, CallEnd::Failed(status.code(), status.message().to_owned()));
                let _ = events.send(Err(status));
            }
        }
    });
    let script = Script { fault, cut, said: 0, sent: 0, over: false };
    let mut answer = Box::pin(messages(caller, received, job, dialect.write, script));
    // Headers go out with the first message.
    let first = match answer.next().await {
        Some(Ok(first)) => first,
        Some(Err(status)) => return Err(status),
        None => return Err(Status::internal("the engine has nothing to say")),
    };
    Ok(Response::new(Box::pin(futures::stream::iter([Ok(first)]).chain(answer))))
}

/// Whoever waits for an answer. Its end before the answer's is the end of the call.
struct Caller {
    core: Arc<Core>,
    open: Arc<Open>,
}

impl Drop for Caller {
    fn drop(&mut self) {
        self.open.dropped();
        if !self.core.settings.overlooks_drops {
            self.open.abandoned.cancel();
        }
    }
}

/// How an answer is spoilt on its way out.
struct Script {
    fault: Option<CallFault>,
    cut: Option<Cut>,
    /// What the engine said, and how much of it was sent.
    said: u64,
    sent: u64,
    over: bool,
}

/// The messages of an answer, as they come, or as the fault has it.
fn messages<T: Default + Send + 'static>(
    caller: Caller,
    received: UnboundedReceiver<Result<Event, Status>>,
    job: Arc<Job>,
    write: fn(&Job, Event) -> T,
    script: Script,
) -> impl Stream<Item = Result<T, Status>> + Send {
    let state = (caller, received, job, script, VecDeque::new());
    futures::stream::unfold(state, move |(caller, mut received, job, mut script, mut waiting)| async move {
        if script.over {
            return None;
        }
        if let Some(fault) = &script.fault {
            match &fault.end {
                Some((messages, ending)) if script.sent >= *messages => {
                    let ending = ending.clone();
                    if !matches!(ending, Ending::Stall) {
                        caller.core.calls.spoilt(&caller.open);
                    }
                    match ending {
                        Ending::Ok => return None,
                        Ending::Status => {
                            script.over = true;
                            let refusal = fault.refusal();
                            return Some((Err(refusal), (caller, received, job, script, waiting)));
                        }
                        Ending::Cut => {
                            if let Some(Cut(token)) = &script.cut {
                                token.cancel();
                            }
                            std::future::pending::<()>().await;
                        }
                        Ending::Stall => std::future::pending::<()>().await,
                    }
                }
                _ => {}
            }
            if fault.empty_first && script.sent == 0 {
                script.sent += 1;
                return Some((Ok(T::default()), (caller, received, job, script, waiting)));
            }
            if fault.end_first && script.sent == 0 {
                while let Some(Ok(event)) = received.recv().await {
                    let ends = matches!(event, Event::Complete(_));
                    if ends { waiting.push_front(event) } else { waiting.push_back(event) }
                }
            }
        }
        let event = loop {
            let event = match waiting.pop_front() {
                Some(event) => Ok(event),
                None => received.recv().await?,
            };
            script.said += 1;
            if script.fault.as_ref().is_none_or(|fault| fault.lost != Some(script.said)) {
                break event;
            }
        };
        caller.open.first_message();
        let message = match event {
            Ok(mut event) => {
                if script.fault.as_ref().is_some_and(|fault| fault.wrong_sample) {
                    event.renumber(job.samples);
                }
                caller.open.sent();
                script.sent += 1;
                Ok(write(&job, event))
            }
            Err(status) => {
                script.over = true;
                Err(status)
            }
        };
        Some((message, (caller, received, job, script, waiting)))
    })
}

/// The pieces of the tokenizer's archive.
fn tokenizer() -> Answer<smg_services::engines::common::GetTokenizerChunk> {
    Box::pin(futures::stream::iter(bundle::pieces().into_iter().map(Ok)))
}

/// Seconds since an engine of this process may be said to run.
fn uptime(core: &Core) -> f64 {
    (crate::engine::now() - core.started()).max(0.0)
}
