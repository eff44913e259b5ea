//! A socket that is watched while somebody else reads it.
//!
//! Problem: while an HTTP/1 request is answered nobody reads its connection as soon as bytes of a further request, or a stray line end, have
//! been read along with it. That the client has left is seen then only by a write that fails, which a silent engine may put off for ever.
//! The kernel knows it at once: so the socket is shared between who reads it and who waits for its end.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, Interest, ReadBuf};
use tokio::net::TcpStream;

/// The socket of whoever reads and writes.
#[derive(Debug)]
pub(crate) struct Watched(Arc<TcpStream>);

/// The socket of whoever waits for its end.
#[derive(Debug)]
pub(crate) struct Watch(Arc<TcpStream>);

/// Shares a socket.
pub(crate) fn watched(stream: TcpStream) -> (Watched, Watch) {
    let stream = Arc::new(stream);
    (Watched(Arc::clone(&stream)), Watch(stream))
}

impl Watch {
    /// Ends when the peer has closed its side, whatever it sent before and whoever has read it.
    pub async fn closed(&self) {
        // Readiness for urgent data, which nobody sends, comes with the end of the peer's side but not with its bytes.
        while let Ok(ready) = self.0.ready(Interest::PRIORITY).await {
            if ready.is_read_closed() {
                return;
            }
            tokio::task::yield_now().await;
        }
    }
}

impl AsyncRead for Watched {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        loop {
            ready!(self.0.poll_read_ready(cx))?;
            match self.0.try_read_buf(buffer) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                read => return Poll::Ready(read.map(|_| ())),
            }
        }
    }
}

impl Watched {
    fn poll_write_with(
        &self,
        cx: &mut Context<'_>,
        mut write: impl FnMut(&TcpStream) -> io::Result<usize>,
    ) -> Poll<io::Result<usize>> {
        loop {
            ready!(self.0.poll_write_ready(cx))?;
            match write(&self.0) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                written => return Poll::Ready(written),
            }
        }
    }
}

impl AsyncWrite for Watched {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.poll_write_with(cx, |stream| stream.try_write(bytes))
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.poll_write_with(cx, |stream| stream.try_write_vectored(slices))
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    /// The socket is closed when both of its owners are gone, which is next.
    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::time::Duration;

    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpListener;

    use super::*;

    #[tokio::test]
    async fn the_end_is_seen_though_bytes_before_it_are_unread_and_bytes_alone_are_no_end() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let mut client = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let (mut served, watch) = watched(listener.accept().await.unwrap().0);
        client.write_all(b"unread").await.unwrap();
        served.write_all(b"hello").await.unwrap();
        let mut hello = [0; 5];
        client.read_exact(&mut hello).await.unwrap();
        assert_eq!(&hello, b"hello");
        assert!(tokio::time::timeout(Duration::from_millis(50), watch.closed()).await.is_err());
        drop(client);
        tokio::time::timeout(Duration::from_secs(20), watch.closed()).await.unwrap();
        let mut rest = Vec::new();
        // What was unread by the client may have made an abrupt end of it.
        let _ = served.read_to_end(&mut rest).await;
        assert_eq!(rest, b"unread");
    }
}
