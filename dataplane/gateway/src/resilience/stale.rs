//! Connections that the engine closed while they lay unused in the pool.
//!
//! An engine closes a kept-alive connection whenever it likes, and a request that is written at that moment is lost although nobody did
//! anything wrong. A request that was not begun to be written goes out again by itself ([`crate::connections`]). This module recognises the
//! other half: the request was written, and the connection turned out to be closed.
//!
//! A leg is sent again once, on a new connection, if all of this holds:
//! * the connection had rested in the pool (a fresh one that breaks is a fault of the engine);
//! * not one byte came back on it for this request;
//! * it broke within [`SOON`] (one that breaks later broke while the engine worked).
//!
//! Because it sees every byte it also bounds what may come before a response: an engine that sends interim heads (1xx) without end would
//! keep the HTTP library busy in a loop of its own, which no deadline can end.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// A stale connection breaks within a round trip. What breaks later was no stale connection.
pub const SOON: Duration = Duration::from_secs(1);

/// Most bytes that may come before the head of a response is complete. What is read along with it is far less.
const MAX_BEFORE_HEAD: usize = 1024 * 1024;
/// Stands for a response whose head has come: its body has no such limit.
const HEAD_CAME: usize = usize::MAX;

/// How much was read on a connection since the last exchange began, until the head of its response came.
#[derive(Debug, Clone, Default)]
pub struct Answered(Arc<AtomicUsize>);

impl Answered {
    /// An exchange begins.
    pub fn clear(&self) {
        self.0.store(0, Ordering::Relaxed);
    }

    /// The head of the response is there.
    pub fn head_came(&self) {
        self.0.store(HEAD_CAME, Ordering::Relaxed);
    }

    /// Notes that so many bytes came. Whether they were too many without a head.
    fn note(&self, bytes: usize) -> bool {
        let before = self.0.load(Ordering::Relaxed);
        if before == HEAD_CAME {
            return false;
        }
        self.0.store(before + bytes, Ordering::Relaxed);
        before > MAX_BEFORE_HEAD
    }

    /// Whether a byte came back since.
    pub fn is_set(&self) -> bool {
        self.0.load(Ordering::Relaxed) > 0
    }
}

/// A stream that notes when something is read. Costs a relaxed store for each read.
#[derive(Debug)]
pub struct Noting<T> {
    stream: T,
    answered: Answered,
}

impl<T> Noting<T> {
    /// Notes what is read of `stream` in `answered`.
    pub fn new(stream: T, answered: Answered) -> Self {
        Self { stream, answered }
    }
}

impl<T: AsyncRead + Unpin> AsyncRead for Noting<T> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let filled = buffer.filled().len();
        let polled = Pin::new(&mut self.stream).poll_read(cx, buffer);
        // The end of the stream fills nothing, and is no answer.
        let read = buffer.filled().len() - filled;
        if read > 0 && self.answered.note(read) {
            return Poll::Ready(Err(io::Error::other("the engine sends without end and no response head comes")));
        }
        polled
    }
}

impl<T: AsyncWrite + Unpin> AsyncWrite for Noting<T> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(cx, slices)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use tokio::io::AsyncReadExt;

    use super::*;

    #[tokio::test]
    async fn a_byte_is_an_answer_and_the_end_of_the_stream_is_none() {
        let answered = Answered::default();
        let mut stream = Noting::new(&b"x"[..], answered.clone());
        assert!(!answered.is_set());
        let mut buffer = [0; 8];
        assert_eq!(stream.read(&mut buffer).await.unwrap(), 1);
        assert!(answered.is_set());
        answered.clear();
        assert_eq!(stream.read(&mut buffer).await.unwrap(), 0);
        assert!(!answered.is_set());
    }

    #[tokio::test]
    async fn what_comes_before_a_head_has_a_limit_and_what_comes_after_it_has_none() {
        for head in [false, true] {
            let answered = Answered::default();
            let mut stream = Noting::new(tokio::io::repeat(b'1'), answered.clone());
            if head {
                answered.head_came();
            }
            let mut read = 0;
            let mut buffer = [0; 65536];
            while read < 4 * MAX_BEFORE_HEAD {
                match stream.read(&mut buffer).await {
                    Ok(bytes) => read += bytes,
                    Err(_) => break,
                }
            }
            assert_eq!(read >= 4 * MAX_BEFORE_HEAD, head, "{read} bytes");
        }
    }
}
