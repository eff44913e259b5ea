//! HTTP/1.1 on a plain socket, with every byte and every end of a connection under control.
//!
//! A library server hides what tests of a gateway need: header order and case, the moment a peer leaves, resets, one
//! byte per write, an answer that never ends. One task owns a connection; while an answer is under way it also watches
//! for the peer's FIN or reset, and drops the answer (with everything it holds) when that comes.

use std::borrow::Cow;
use std::io;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use bytes::{Buf, Bytes, BytesMut};
use futures::future::BoxFuture;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::net::tcp::{ReadHalf, WriteHalf};
use tokio_util::sync::CancellationToken;

use crate::engine::Core;
use crate::fault::{Ending, Fault, Limit};
use crate::record::Exchange;

/// Longest request head, in bytes.
const LONGEST_HEAD: usize = 256 * 1024;
/// Longest request body, in bytes.
const LONGEST_BODY: u64 = 512 * 1024 * 1024;
/// Bytes of events that are collected into one write when none of them has to wait.
const WRITE_SIZE: usize = 16 * 1024;
/// Bytes of a next request that are read while an answer is under way.
const READ_AHEAD: usize = 64 * 1024;

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
    matches!(path, "/v1/chat/completions" | "/v1/completions" | "/generate")
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

fn invalid(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what.to_owned())
}

async fn read_request(
    stream: &mut TcpStream,
    buffer: &mut BytesMut,
    idle_close: Option<Duration>,
) -> io::Result<Option<Request>> {
    if buffer.is_empty() {
        let first = stream.read_buf(buffer);
        let length = match idle_close {
            Some(limit) => tokio::time::timeout(limit, first).await.unwrap_or(Ok(0))?,
            None => first.await?,
        };
        if length == 0 {
            return Ok(None);
        }
    }
    let (mut request, framing, head) = loop {
        if let Some(parsed) = parse_head(buffer)? {
            break parsed;
        }
        if buffer.len() > LONGEST_HEAD {
            return Err(invalid("the head is too long"));
        }
        if stream.read_buf(buffer).await? == 0 {
            return Ok(None);
        }
    };
    buffer.advance(head);
    let complete = match framing {
        Framing::Length(length) => buffer.len() as u64 >= length,
        Framing::Chunked => false,
    };
    if !complete && request.header("expect").is_some_and(|value| value.eq_ignore_ascii_case("100-continue")) {
        stream.write_all(b"HTTP/1.1 100 Continue\r\n\r\n").await?;
    }
    request.body = match framing {
        Framing::Length(length) => {
            let length = usize::try_from(length).map_err(|_| invalid("too long"))?;
            buffer.reserve(length.saturating_sub(buffer.len()));
            fill(stream, buffer, length).await?;
            buffer.split_to(length).freeze()
        }
        Framing::Chunked => read_chunks(stream, buffer).await?,
    };
    Ok(Some(request))
}

enum Framing {
    Length(u64),
    Chunked,
}

fn parse_head(buffer: &[u8]) -> io::Result<Option<(Request, Framing, usize)>> {
    let mut headers = [httparse::EMPTY_HEADER; 128];
    let mut parsed = httparse::Request::new(&mut headers);
    let status = parsed.parse(buffer).map_err(|error| invalid(&error.to_string()))?;
    let httparse::Status::Complete(length) = status else {
        return Ok(None);
    };
    let target = parsed.path.unwrap_or("/");
    let (path, query) = target.split_once('?').unwrap_or((target, ""));
    let request = Request {
        method: parsed.method.unwrap_or_default().to_owned(),
        path: path.to_owned(),
        query: query.to_owned(),
        headers: parsed.headers.iter().map(|header| (header.name.to_owned(), header.value.to_vec())).collect(),
        body: Bytes::new(),
        keep_alive: false,
    };
    let connection = request.header("connection").unwrap_or_default();
    let keep_alive = match parsed.version {
        Some(1) => !connection.eq_ignore_ascii_case("close"),
        _ => connection.eq_ignore_ascii_case("keep-alive"),
    };
    let chunked =
        request.header("transfer-encoding").is_some_and(|coding| coding.to_ascii_lowercase().ends_with("chunked"));
    let framing = match request.header("content-length") {
        _ if chunked => Framing::Chunked,
        None => Framing::Length(0),
        Some(length) => match length.trim().parse() {
            Ok(length) if length <= LONGEST_BODY => Framing::Length(length),
            _ => return Err(invalid("bad content-length")),
        },
    };
    Ok(Some((Request { keep_alive, ..request }, framing, length)))
}

/// Reads until `buffer` holds `length` bytes.
async fn fill(stream: &mut TcpStream, buffer: &mut BytesMut, length: usize) -> io::Result<()> {
    while buffer.len() < length {
        if stream.read_buf(buffer).await? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
    }
    Ok(())
}

async fn read_chunks(stream: &mut TcpStream, buffer: &mut BytesMut) -> io::Result<Bytes> {
    let mut body = BytesMut::new();
    loop {
        let parsed = httparse::parse_chunk_size(buffer).map_err(|_| invalid("bad chunk size"))?;
        let httparse::Status::Complete((head, size)) = parsed else {
            let next = buffer.len() + 1;
            fill(stream, buffer, next).await?;
            continue;
        };
        buffer.advance(head);
        if size == 0 {
            // Trailers, if any, end with an empty line; none are expected of a gateway.
            fill(stream, buffer, 2).await?;
            buffer.advance(2);
            return Ok(body.freeze());
        }
        if body.len() as u64 + size > LONGEST_BODY {
            return Err(invalid("the body is too long"));
        }
        let size = usize::try_from(size).map_err(|_| invalid("too long"))?;
        fill(stream, buffer, size + 2).await?;
        body.extend_from_slice(&buffer[..size]);
        buffer.advance(size + 2);
    }
}

/// Answers one request, as its fault demands. The result says how the connection goes on.
async fn answer(core: &Arc<Core>, request: Request, write: WriteHalf<'_>, exchange: &Exchange) -> Ending {
    let _active = request.is_generation().then(|| core.load.enter());
    let fault = core.faults.meeting(&request);
    if let Some(fault) = &fault {
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
    let scripted = fault.as_ref().and_then(Fault::reply);
    let reply = match scripted {
        Some(reply) => reply,
        None => crate::engine::handle(core, &request).await,
    };
    let fatal = reply.fatal;
    if fatal {
        core.close_listeners().await;
    }
    let mut sender = Sender { write, exchange, out: Vec::with_capacity(2 * 1024) };
    let bodiless = request.method == "HEAD";
    let ending = sender
        .send(reply, fault.as_ref(), request.keep_alive, bodiless)
        .await
        // The peer does not read any more: the same as its close.
        .unwrap_or(Ending::Close);
    if fatal {
        core.close_connections();
        return Ending::Close;
    }
    ending
}

struct Sender<'a> {
    write: WriteHalf<'a>,
    exchange: &'a Exchange,
    out: Vec<u8>,
}

impl Sender<'_> {
    async fn send(
        &mut self,
        reply: Reply,
        fault: Option<&Fault>,
        keep_alive: bool,
        bodiless: bool,
    ) -> io::Result<Ending> {
        let malformed = fault.is_some_and(|fault| fault.malformed);
        let mut body = reply.body;
        if malformed && let Body::Whole(bytes) = &mut body {
            bytes.truncate(bytes.len() / 2);
        }
        let length = match &body {
            Body::Whole(bytes) => Some(bytes.len()),
            Body::Pieces(_) | Body::Later(_) => None,
        };
        self.head(reply.status, &reply.headers, length, keep_alive);
        self.exchange.status(reply.status);
        if bodiless {
            self.flush().await?;
            return Ok(Ending::Proper);
        }
        if let Some(fault) = fault
            && !fault.delay_body.is_zero()
        {
            self.flush().await?;
            tokio::time::sleep(fault.delay_body).await;
        }
        match body {
            Body::Whole(bytes) if fault.is_none() => {
                self.out.extend_from_slice(&bytes);
                self.flush().await?;
                Ok(Ending::Proper)
            }
            Body::Whole(bytes) => self.pieces(Box::new(Once(Some(bytes))), false, fault).await,
            Body::Pieces(pieces) if malformed => self.pieces(Box::new(Halved(pieces)), true, fault).await,
            Body::Pieces(pieces) => self.pieces(pieces, true, fault).await,
            Body::Later(pieces) => {
                self.flush().await?;
                let pieces = pieces.await;
                self.pieces(pieces, true, fault).await
            }
        }
    }

    /// The head in uvicorn's order: date, server, length, the answer's own headers.
    fn head(&mut self, status: u16, headers: &[(Text, Text)], length: Option<usize>, keep_alive: bool) {
        let date = httpdate::fmt_http_date(SystemTime::now());
        let reason = reason(status);
        let out = &mut self.out;
        extend(out, &["HTTP/1.1 ", &status.to_string(), " ", reason]);
        extend(out, &["\r\ndate: ", &date, "\r\nserver: uvicorn\r\n"]);
        if let Some(length) = length {
            extend(out, &["content-length: ", &length.to_string(), "\r\n"]);
        }
        for (name, value) in headers {
            extend(out, &[name, ": ", value, "\r\n"]);
        }
        if !keep_alive {
            extend(out, &["connection: close\r\n"]);
        }
        if length.is_none() {
            extend(out, &["transfer-encoding: chunked\r\n"]);
        }
        extend(out, &["\r\n"]);
    }

    async fn pieces(
        &mut self,
        mut pieces: Box<dyn Pieces>,
        chunked: bool,
        fault: Option<&Fault>,
    ) -> io::Result<Ending> {
        let (limit, ending) = fault.and_then(|fault| fault.end).unwrap_or((Limit::Whole, Ending::Proper));
        let drip = fault.and_then(|fault| fault.drip);
        let (mut bytes_left, mut events_left) = match limit {
            Limit::Bytes(bytes) => (bytes, u64::MAX),
            Limit::Events(events) => (u64::MAX, events),
            Limit::Whole => (u64::MAX, u64::MAX),
        };
        let mut complete = false;
        let mut piece = Vec::with_capacity(512);
        while bytes_left > 0 && events_left > 0 {
            piece.clear();
            let Some(pause) = pieces.next(&mut piece) else {
                complete = true;
                break;
            };
            if !pause.is_zero() {
                self.flush().await?;
                tokio::time::sleep(pause).await;
            }
            piece.truncate(usize::try_from(bytes_left).unwrap_or(usize::MAX));
            bytes_left -= piece.len() as u64;
            events_left -= 1;
            match drip {
                None => self.frame(&piece, chunked),
                Some(gap) => {
                    for byte in &piece {
                        self.flush().await?;
                        tokio::time::sleep(gap).await;
                        self.frame(std::slice::from_ref(byte), chunked);
                    }
                }
            }
            if self.out.len() >= WRITE_SIZE || pieces.one_write_each() {
                self.flush().await?;
            }
        }
        if ending == Ending::Proper && chunked {
            self.out.extend_from_slice(b"0\r\n\r\n");
        }
        self.flush().await?;
        match ending {
            // The declared length was not reached: only a close can end it.
            Ending::Proper if !chunked && !complete => Ok(Ending::Close),
            Ending::Stall => std::future::pending().await,
            other => Ok(other),
        }
    }

    fn frame(&mut self, piece: &[u8], chunked: bool) {
        if piece.is_empty() {
            // An empty chunk would end the body.
            return;
        }
        if chunked {
            extend(&mut self.out, &[&format!("{:x}\r\n", piece.len())]);
        }
        self.out.extend_from_slice(piece);
        if chunked {
            self.out.extend_from_slice(b"\r\n");
        }
    }

    async fn flush(&mut self) -> io::Result<()> {
        let mut rest = self.out.as_slice();
        while !rest.is_empty() {
            let written = self.write.write(rest).await?;
            if written == 0 {
                return Err(io::ErrorKind::WriteZero.into());
            }
            self.exchange.sent(written);
            rest = &rest[written..];
        }
        self.out.clear();
        Ok(())
    }
}

struct Once(Option<Bytes>);

impl Pieces for Once {
    fn next(&mut self, out: &mut Vec<u8>) -> Option<Duration> {
        out.extend_from_slice(&self.0.take()?);
        Some(Duration::ZERO)
    }
}

/// Each event cut in half.
struct Halved(Box<dyn Pieces>);

impl Pieces for Halved {
    fn next(&mut self, out: &mut Vec<u8>) -> Option<Duration> {
        let start = out.len();
        let pause = self.0.next(out)?;
        out.truncate(start + (out.len() - start) / 2);
        out.extend_from_slice(b"\n\n");
        Some(pause)
    }
}

pub(crate) fn extend(out: &mut Vec<u8>, parts: &[&str]) {
    for part in parts {
        out.extend_from_slice(part.as_bytes());
    }
}

fn reason(status: u16) -> &'static str {
    match status {
        200 => "OK",
        202 => "Accepted",
        400 => "Bad Request",
        401 => "Unauthorized",
        403 => "Forbidden",
        404 => "Not Found",
        405 => "Method Not Allowed",
        408 => "Request Timeout",
        413 => "Request Entity Too Large",
        422 => "Unprocessable Entity",
        429 => "Too Many Requests",
        500 => "Internal Server Error",
        501 => "Not Implemented",
        502 => "Bad Gateway",
        503 => "Service Unavailable",
        504 => "Gateway Timeout",
        _ => "Status",
    }
}
