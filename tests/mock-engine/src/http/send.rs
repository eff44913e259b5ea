//! Writing an answer, as its fault demands.

use std::io;
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use tokio::io::AsyncWriteExt;
use tokio::net::tcp::WriteHalf;

use super::{Body, Pieces, Reply, Text, extend};
use crate::fault::{Ending, Fault, Limit};
use crate::record::Exchange;

/// Bytes of events that are collected into one write when none of them has to wait.
const WRITE_SIZE: usize = 16 * 1024;

pub(super) struct Sender<'a> {
    pub(super) write: WriteHalf<'a>,
    pub(super) exchange: &'a Exchange,
    pub(super) out: Vec<u8>,
}

impl Sender<'_> {
    /// Sends `reply` and says what becomes of the connection.
    pub(super) async fn send(
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

    /// Writes bytes that need not be HTTP.
    pub(super) async fn raw(&mut self, pieces: &[(Duration, Bytes)], ending: Ending) -> io::Result<Ending> {
        for (pause, piece) in pieces {
            tokio::time::sleep(*pause).await;
            self.out.extend_from_slice(piece);
            self.flush().await?;
        }
        if ending == Ending::Stall {
            std::future::pending::<()>().await;
        }
        Ok(ending)
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
        let mut piece = Vec::new();
        let pause = self.0.next(&mut piece)?;
        let mut rest = &piece[..];
        while !rest.is_empty() {
            let end = rest.windows(2).position(|bytes| bytes == b"\n\n").map_or(rest.len(), |place| place + 2);
            let (event, after) = rest.split_at(end);
            out.extend_from_slice(&event[..end / 2]);
            out.extend_from_slice(b"\n\n");
            rest = after;
        }
        Some(pause)
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
