//! HTTP/1.1 on a plain socket, with every byte and every end of a connection under control.
//!
//! A library server hides what tests of a gateway need: header order and case, the moment a peer leaves, resets, one
//! byte per write, an answer that never ends. One task owns a connection; while an answer is under way it also watches
//! for the peer's FIN or reset, and drops the answer (with everything it holds) when that comes.

mod receive;
mod send;

use std::borrow::Cow;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use futures::future::BoxFuture;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::net::tcp::{ReadHalf, WriteHalf};
use tokio_util::sync::CancellationToken;

use self::receive::read_request;
use self::send::Sender;
use crate::engine::Core;
use crate::fault::{Ending, Fault};
use crate::record::Exchange;

/// Bytes of a next request that are read while an answer is under way. Behind more of them the end of a peer that left would not be seen.
const READ_AHEAD: usize = 1024 * 1024;

/// A request, read to its end.
pub(crate) struct Request {
    pub(crate) method: String,
    pub(crate) path: String,
    pub(crate) query: String,
    pub(crate) headers: Vec<(String, Vec<u8>)>,
    pub(crate) body: Bytes,
    keep_alive: bool,
}

/// Whether `path` is one that generates text.
pub(crate) fn is_generation(path: &str) -> bool {
    matches!(path, "/v1/chat/completions" | "/v1/completions" | "/generate" | "/v1/messages" | "/v1/responses")
}

impl Request {
    pub(crate) fn is_generation(&self) -> bool {
        self.method == "POST" && is_generation(&self.path)
    }

    /// The first value of a header; the name is compared without case.
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        let (_, value) = self.headers.iter().find(|(key, _)| key.eq_ignore_ascii_case(name))?;
        std::str::from_utf8(value).ok()
    }
}

/// A body that comes in pieces.
pub(crate) trait Pieces: Send {
    /// Appends the next piece to `out` and says how long to wait before it is sent; `None` at the end.
    fn next(&mut self, out: &mut Vec<u8>) -> Option<Duration>;

    /// Whether pieces may not share a write.
    fn one_write_each(&self) -> bool {
        false
    }
}

pub(crate) enum Body {
    /// Sent with its length.
    Whole(Bytes),
    /// Sent chunked, one piece a chunk.
    Pieces(Box<dyn Pieces>),
    /// Chunked; the head goes out before the pieces are known.
    Later(BoxFuture<'static, Box<dyn Pieces>>),
}

type Text = Cow<'static, str>;

/// An answer.
pub(crate) struct Reply {
    pub(crate) status: u16,
    pub(crate) headers: Vec<(Text, Text)>,
    pub(crate) body: Body,
    /// The engine dies of this request.
    pub(crate) fatal: bool,
}

impl Reply {
    pub(crate) fn new<N: Into<Text>, V: Into<Text>>(
        status: u16,
        headers: impl IntoIterator<Item = (N, V)>,
        body: Body,
    ) -> Self {
        Reply {
            status,
            headers: headers.into_iter().map(|(name, value)| (name.into(), value.into())).collect(),
            body,
            fatal: false,
        }
    }

    pub(crate) fn json(status: u16, body: impl Into<Bytes>) -> Self {
        Self::new(status, [("content-type", "application/json")], Body::Whole(body.into()))
    }

    pub(crate) fn text(body: impl Into<Bytes>) -> Self {
        let kind = "text/plain; version=0.0.4; charset=utf-8";
        Self::new(200, [("content-type", kind)], Body::Whole(body.into()))
    }

    pub(crate) fn empty() -> Self {
        Self::new::<&str, &str>(200, [], Body::Whole(Bytes::new()))
    }

    pub(crate) fn events(body: Body) -> Self {
        let kind = "text/event-stream; charset=utf-8";
        Self::new(200, [("content-type", kind)], body)
    }

    pub(crate) fn not_found() -> Self {
        Self::json(404, r#"{"detail":"Not Found"}"#)
    }

    /// The answer of a router to a known path with another method.
    pub(crate) fn wrong_method(allow: &'static str) -> Self {
        let mut reply = Self::json(405, r#"{"detail":"Method Not Allowed"}"#);
        reply.headers.insert(0, ("allow".into(), allow.into()));
        reply
    }
}

/// Serves one connection until either side closes it, or until `stopped`, which resets it.
pub(crate) async fn serve(mut stream: TcpStream, number: u64, core: Arc<Core>, stopped: CancellationToken) {
    let ending = tokio::select! {
        // An exchange that ends by itself keeps its own ending.
        biased;
        ending = converse(&mut stream, number, &core) => ending,
        () = stopped.cancelled() => Ending::Reset,
    };
    if ending == Ending::Reset {
        // Should this fail, the close is a FIN, and the test that wanted a reset says so.
        let _ = stream.set_zero_linger();
    }
}

async fn converse(stream: &mut TcpStream, number: u64, core: &Arc<Core>) -> Ending {
    if stream.set_nodelay(true).is_err() {
        return Ending::Close;
    }
    let mut buffer = BytesMut::with_capacity(8 * 1024);
    loop {
        let idle_close = core.settings.idle_close;
        let request = match read_request(stream, &mut buffer, idle_close).await {
            Ok(Some(request)) => request,
            Ok(None) => return Ending::Close,
            Err(error) => {
                if error.kind() == io::ErrorKind::InvalidData {
                    let answer = b"HTTP/1.1 400 Bad Request\r\ncontent-type: text/plain; charset=utf-8\r\nconnection: close\r\ncontent-length: 30\r\n\r\nInvalid HTTP request received.";
                    let _ = stream.write_all(answer).await;
                }
                return Ending::Close;
            }
        };
        let keep_alive = request.keep_alive;
        let exchange = core.recorder.arrived(&request, number);
        let (mut read, write) = stream.split();
        let ending = tokio::select! {
            ending = answer(core, request, write, &exchange) => ending,
            () = peer_gone(&mut read, &mut buffer) => {
                exchange.peer_closed();
                return Ending::Close;
            }
        };
        if ending == Ending::Proper {
            exchange.complete();
        }
        drop(exchange);
        match ending {
            Ending::Proper if keep_alive => {}
            other => return other,
        }
    }
}

async fn peer_gone(read: &mut ReadHalf<'_>, buffer: &mut BytesMut) {
    while buffer.len() < READ_AHEAD {
        match read.read_buf(buffer).await {
            Ok(0) | Err(_) => return,
            Ok(_) => {}
        }
    }
    std::future::pending().await
}

/// Answers one request, as its fault demands. The result says how the connection goes on.
async fn answer(core: &Arc<Core>, request: Request, write: WriteHalf<'_>, exchange: &Exchange) -> Ending {
    let _active = request.is_generation().then(|| core.load.enter());
    let fault = core.faults.meeting(&request);
    if let Some(fault) = &fault {
        exchange.faulty();
        if !fault.delay_head.is_zero() {
            tokio::time::sleep(fault.delay_head).await;
        }
        if fault.hang {
            std::future::pending::<()>().await;
        }
        if let Some(ending) = fault.unanswered {
            return ending;
        }
    }
    let mut sender = Sender { write, exchange, out: Vec::with_capacity(2 * 1024) };
    if let Some(raw) = fault.as_ref().and_then(|fault| fault.raw.as_deref()) {
        let end = fault.as_ref().and_then(|fault| fault.end);
        return sender.raw(raw, end.map_or(Ending::Close, |(_, ending)| ending)).await.unwrap_or(Ending::Close);
    }
    let scripted = fault.as_ref().and_then(Fault::reply);
    let reply = match scripted {
        Some(reply) => reply,
        None => crate::engine::handle(core, &request).await,
    };
    let _death = if reply.fatal {
        core.close_listeners().await;
        Some(Death(core))
    } else {
        None
    };
    let (bodiless, status) = (request.method == "HEAD", reply.status);
    match sender.send(reply, fault.as_ref(), request.keep_alive, bodiless).await {
        Ok(ending) => {
            if ending == Ending::Proper {
                core.recorder.answered(&request, status);
            }
            ending
        }
        Err(_) => {
            exchange.peer_closed();
            Ending::Close
        }
    }
}

/// Ends the engine once the answer that it dies of is out or abandoned.
struct Death<'a>(&'a Core);

impl Drop for Death<'_> {
    fn drop(&mut self) {
        self.0.close_connections();
    }
}

pub(crate) fn extend(out: &mut Vec<u8>, parts: &[&str]) {
    for part in parts {
        out.extend_from_slice(part.as_bytes());
    }
}
