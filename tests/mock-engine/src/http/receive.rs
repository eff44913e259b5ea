//! Reading a request: head, body by length or in chunks.

use std::io;
use std::time::Duration;

use bytes::{Buf, Bytes, BytesMut};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::Request;

/// Longest request head, in bytes.
const LONGEST_HEAD: usize = 256 * 1024;
/// Longest request body, in bytes.
const LONGEST_BODY: u64 = 512 * 1024 * 1024;

fn invalid(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what.to_owned())
}

/// The next request of a connection; `None` when the peer has closed it, or has been idle for too long.
pub(super) async fn read_request(
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
