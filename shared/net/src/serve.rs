//! One accept loop for every listener.
//!
//! The end of a server has two phases, each a token of [`Shutdown`]:
//! 1. *notice*: connections are asked to close after their current request, new ones are still answered, so that whoever still finds this
//!    process in DNS gets an answer;
//! 2. *closing*: nothing is accepted any more; running requests go on until they end, or until the deadline cuts them.
//!
//! A connection that is cut ends without its terminating chunk: clients see an error, never a short success.

use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use hyper::body::Incoming;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpSocket};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::memory;

/// The phases of the end of a server.
#[derive(Debug, Clone, Default)]
pub struct Shutdown {
    /// Connections should close after their current request.
    pub notice: CancellationToken,
    /// Nothing is accepted any more.
    pub closing: CancellationToken,
}

impl Shutdown {
    /// Both phases at once.
    pub fn now(&self) {
        self.notice.cancel();
        self.closing.cancel();
    }
}

/// Observes the number of open connections.
pub type ConnectionObserver = Arc<dyn Fn(i64) + Send + Sync>;

/// How to serve.
#[derive(Clone)]
pub struct ServeOptions {
    /// How long a client may take to send the head of a request, idle time on a kept-alive connection included.
    pub header_read_timeout: Duration,
    /// Called with +1 and -1.
    pub observer: Option<ConnectionObserver>,
}

impl Default for ServeOptions {
    fn default() -> Self {
        Self { header_read_timeout: Duration::from_secs(30), observer: None }
    }
}

/// What a connection carries.
pub trait Stream: AsyncRead + AsyncWrite + Unpin + Send + 'static {}
impl<T: AsyncRead + AsyncWrite + Unpin + Send + 'static> Stream for T {}

/// The service behind a listener: any HTTP tower service that does not fail.
pub trait HttpService<B>:
    tower::Service<http::Request<Incoming>, Response = http::Response<B>, Error = Infallible, Future: Send>
    + Clone
    + Send
    + 'static
{
}
impl<B, S> HttpService<B> for S where
    S: tower::Service<http::Request<Incoming>, Response = http::Response<B>, Error = Infallible, Future: Send>
        + Clone
        + Send
        + 'static
{
}

/// Connections of one or more listeners that end together.
#[derive(Clone)]
pub struct Server {
    options: ServeOptions,
    shutdown: Shutdown,
    cut: CancellationToken,
    connections: TaskTracker,
}

/// Binds a listener whose address can be bound again at once after a restart.
///
/// # Errors
/// When the address cannot be bound.
pub fn bind(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    socket.listen(4096)
}

impl Server {
    /// A server that ends with `shutdown`.
    pub fn new(options: ServeOptions, shutdown: Shutdown) -> Self {
        Self { options, shutdown, cut: CancellationToken::new(), connections: TaskTracker::new() }
    }

    /// Accepts connections until the server closes.
    pub async fn listen<S, B>(&self, listener: TcpListener, service: S)
    where
        S: HttpService<B>,
        B: http_body::Body<Data: Send, Error: Into<Box<dyn std::error::Error + Send + Sync>>> + Send + 'static,
    {
        loop {
            let accepted = tokio::select! {
                biased;
                () = self.shutdown.closing.cancelled() => return,
                accepted = listener.accept() => accepted,
            };
            match accepted {
                Ok((stream, _)) => {
                    // Tokens are small writes: waiting to fill a packet would hold each back.
                    let _ = stream.set_nodelay(true);
                    self.serve_connection(stream, service.clone());
                }
                Err(error) => {
                    tracing::warn!(target: "smg", %error, "a connection could not be accepted");
                    // Out of descriptors: accepting again at once would spin.
                    tokio::time::sleep(Duration::from_millis(50)).await;
                }
            }
        }
    }

    /// Accepts connections made inside the process until the server closes.
    pub async fn listen_in_memory<S, B>(&self, mut listener: memory::Listener, service: S)
    where
        S: HttpService<B>,
        B: http_body::Body<Data: Send, Error: Into<Box<dyn std::error::Error + Send + Sync>>> + Send + 'static,
    {
        loop {
            let accepted = tokio::select! {
                biased;
                () = self.shutdown.closing.cancelled() => return,
                accepted = listener.accept() => accepted,
            };
            match accepted {
                Some(stream) => self.serve_connection(stream, service.clone()),
                None => return,
            }
        }
    }

    /// Serves one connection in a task of its own.
    pub fn serve_connection<IO, S, B>(&self, stream: IO, service: S)
    where
        IO: Stream,
        S: HttpService<B>,
        B: http_body::Body<Data: Send, Error: Into<Box<dyn std::error::Error + Send + Sync>>> + Send + 'static,
    {
        let (shutdown, cut) = (self.shutdown.clone(), self.cut.clone());
        let options = self.options.clone();
        self.connections.spawn(async move {
            let _open = options.observer.as_ref().map(Open::new);
            let mut builder = auto::Builder::new(TokioExecutor::new());
            builder
                .http1()
                .timer(TokioTimer::new())
                .header_read_timeout(options.header_read_timeout)
                .keep_alive(!shutdown.notice.is_cancelled());
            builder
                .http2()
                .timer(TokioTimer::new())
                .keep_alive_interval(Duration::from_secs(20))
                .keep_alive_timeout(Duration::from_secs(20));
            let begun = CancellationToken::new();
            let service = {
                let (begun, service) = (begun.clone(), TowerToHyperService::new(service));
                hyper::service::service_fn(move |request| {
                    begun.cancel();
                    hyper::service::Service::call(&service, request)
                })
            };
            let connection = builder.serve_connection(TokioIo::new(stream), service);
            tokio::pin!(connection);
            // Whoever connected and has not asked yet gets an answer too: closing before would be a refusal without words.
            let leave = async {
                shutdown.notice.cancelled().await;
                tokio::select! {
                    () = begun.cancelled() => {}
                    () = shutdown.closing.cancelled() => {}
                }
            };
            let ended = tokio::select! {
                ended = connection.as_mut() => ended,
                () = cut.cancelled() => return,
                () = leave => {
                    connection.as_mut().graceful_shutdown();
                    tokio::select! {
                        ended = connection.as_mut() => ended,
                        () = cut.cancelled() => return,
                    }
                }
            };
            if let Err(error) = ended {
                tracing::debug!(target: "smg", error, "a connection ended with an error");
            }
        });
    }

    /// Waits until every connection has ended, at most `limit`; then cuts the rest. Returns how many were cut.
    pub async fn drain(&self, limit: Duration) -> usize {
        self.connections.close();
        if tokio::time::timeout(limit, self.connections.wait()).await.is_ok() {
            return 0;
        }
        let remaining = self.connections.len();
        self.cut.cancel();
        self.connections.wait().await;
        remaining
    }
}

struct Open(ConnectionObserver);

impl Open {
    fn new(observer: &ConnectionObserver) -> Self {
        observer(1);
        Self(Arc::clone(observer))
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        (self.0)(-1);
    }
}
