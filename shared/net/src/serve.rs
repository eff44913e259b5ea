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

use futures::stream::FuturesUnordered;
use futures::{FutureExt, StreamExt};
use http::HeaderValue;
use http::header::CONNECTION;
use hyper::body::Incoming;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio_rustls::server::TlsStream;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::memory;
use crate::mutual::identity::Caller;
use crate::mutual::{Callers, MutualTls};
use crate::overdue::{EndBy, Overdue, Response};
use crate::patience::{Activity, Noted, Patience, Timeout};
use crate::tls::ServerTls;
use crate::watched::{Watch, Watched, watched};

/// How long an unused connection has for its last bytes once it is being closed.
const LAST_BYTES: Duration = Duration::from_secs(30);
/// How long a connection whose client has closed its side has for an answer.
const LAST_ANSWER: Duration = Duration::from_secs(1);
/// Longest TLS handshake when the head of a request has no limit.
const MAX_HANDSHAKE: Duration = Duration::from_secs(60);

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

/// What happens to connections.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ConnectionEvent {
    /// One was accepted.
    Opened,
    /// One has ended.
    Closed,
    /// One is being closed because its client broke a limit.
    TimedOut(Timeout),
    /// One is being closed because TLS was not agreed on.
    Refused,
}

/// Observes connections.
pub type ConnectionObserver = Arc<dyn Fn(ConnectionEvent) + Send + Sync>;

/// How to serve.
#[derive(Clone, Default)]
pub struct ServeOptions {
    /// How long a connection may make us wait, and how old it may grow.
    pub patience: Patience,
    /// TLS of accepted sockets; connections inside the process never have it.
    pub tls: Option<ListenerTls>,
    /// Told about every connection.
    pub observer: Option<ConnectionObserver>,
}

/// TLS of a listener.
#[derive(Clone)]
pub enum ListenerTls {
    /// For clients of any kind.
    Edge(Arc<ServerTls>),
    /// For parts of the fleet: every request says who makes it, as a [`Caller`] among its extensions.
    Parts(Arc<MutualTls>, Callers),
}

/// A connection on which TLS was agreed on.
enum Agreed {
    Edge(TlsStream<Watched>, Watch),
    Part(TlsStream<TcpStream>, Caller),
}

impl ListenerTls {
    /// Agrees on TLS; `None` = it was not agreed on.
    async fn accept(&self, stream: TcpStream, from: SocketAddr) -> Option<Agreed> {
        match self {
            Self::Edge(tls) => {
                let (stream, watch) = watched(stream);
                match tls.acceptor().accept(stream).await {
                    Ok(stream) => Some(Agreed::Edge(stream, watch)),
                    Err(error) => {
                        tracing::debug!(target: "smg", %error, "a TLS handshake failed");
                        None
                    }
                }
            }
            Self::Parts(tls, callers) => {
                let (stream, caller) = tls.accept(stream, from, *callers).await?;
                Some(Agreed::Part(stream, caller))
            }
        }
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

/// What may happen to a connection beside its requests.
enum Interruption {
    /// Its time to drain is over, or that of its request.
    Cut,
    /// The server asks it to close.
    Leave,
    /// It has grown old.
    Aged,
    /// Its client broke a limit.
    Broken(Timeout),
    /// Its client left while it was being answered.
    Left,
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
                Ok((stream, from)) => {
                    // Tokens are small writes: waiting to fill a packet would hold each back.
                    let _ = stream.set_nodelay(true);
                    match &self.options.tls {
                        None => {
                            let (stream, watch) = watched(stream);
                            self.serve_watched(stream, Some(watch), service.clone());
                        }
                        Some(tls) => self.serve_tls(stream, from, tls.clone(), service.clone()),
                    }
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
        self.serve_watched(stream, None, service);
    }

    fn serve_watched<IO, S, B>(&self, stream: IO, watch: Option<Watch>, service: S)
    where
        IO: Stream,
        S: HttpService<B>,
        B: http_body::Body<Data: Send, Error: Into<Box<dyn std::error::Error + Send + Sync>>> + Send + 'static,
    {
        let server = self.clone();
        self.connections.spawn(async move {
            let _open = Open::new(&server.options);
            server.drive(stream, watch, None, service).await;
        });
    }

    /// As [`Server::serve_connection`], behind a TLS handshake, which has the time of a request head.
    fn serve_tls<S, B>(&self, stream: TcpStream, from: SocketAddr, tls: ListenerTls, service: S)
    where
        S: HttpService<B>,
        B: http_body::Body<Data: Send, Error: Into<Box<dyn std::error::Error + Send + Sync>>> + Send + 'static,
    {
        let server = self.clone();
        self.connections.spawn(async move {
            let open = Open::new(&server.options);
            let limit = server.options.patience.header_read.unwrap_or(MAX_HANDSHAKE);
            let handshake = tokio::select! {
                () = server.cut.cancelled() => return,
                handshake = tokio::time::timeout(limit, tls.accept(stream, from)) => handshake,
            };
            match handshake {
                Ok(Some(Agreed::Edge(stream, watch))) => server.drive(stream, Some(watch), None, service).await,
                Ok(Some(Agreed::Part(stream, caller))) => server.drive(stream, None, Some(caller), service).await,
                Ok(None) => open.tell(ConnectionEvent::Refused),
                Err(_) => open.tell(ConnectionEvent::TimedOut(Timeout::HeaderRead)),
            }
        });
    }

    async fn drive<IO, S, B>(self, stream: IO, watch: Option<Watch>, caller: Option<Caller>, service: S)
    where
        IO: Stream,
        S: HttpService<B>,
        B: http_body::Body<Data: Send, Error: Into<Box<dyn std::error::Error + Send + Sync>>> + Send + 'static,
    {
        let Self { options, shutdown, cut, .. } = self;
        let activity = Activity::new();
        let overdue = Overdue::new();
        let mut builder = auto::Builder::new(TokioExecutor::new());
        // The limits of `patience` hold instead: they tell a slow head from an unused connection.
        builder
            .http1()
            .timer(TokioTimer::new())
            .header_read_timeout(None::<Duration>)
            .keep_alive(!shutdown.notice.is_cancelled());
        builder
            .http2()
            .timer(TokioTimer::new())
            .keep_alive_interval(Duration::from_secs(20))
            .keep_alive_timeout(Duration::from_secs(20));
        let begun = CancellationToken::new();
        let service = {
            let (begun, activity, service) = (begun.clone(), Arc::clone(&activity), TowerToHyperService::new(service));
            let overdue = Arc::clone(&overdue);
            hyper::service::service_fn(move |mut request: http::Request<Incoming>| {
                begun.cancel();
                if let Some(caller) = &caller {
                    request.extensions_mut().insert(caller.clone());
                }
                let in_flight = activity.begin(request.version());
                let last = (!activity.is_http2()).then(|| Arc::clone(&activity));
                let response = hyper::service::Service::call(&service, request);
                let overdue = Arc::clone(&overdue);
                async move {
                    let mut response = response.await?;
                    if last.is_some_and(|activity| activity.is_retiring()) {
                        response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
                    }
                    let end_by = response.extensions().get::<EndBy>().copied();
                    Ok::<_, Infallible>(response.map(|body| Response::new(body, in_flight, end_by, &overdue)))
                }
            })
        };
        let connection = builder.serve_connection(TokioIo::new(Noted::new(stream, Arc::clone(&activity))), service);
        tokio::pin!(connection);
        // Whoever connected and has not asked yet gets an answer too: closing before would be a refusal without words.
        let leave = async {
            shutdown.notice.cancelled().await;
            tokio::select! {
                () = begun.cancelled() => {}
                () = shutdown.closing.cancelled() => {}
            }
        };
        let aged = async {
            match options.patience.max_age {
                Some(age) => tokio::time::sleep(age.mul_f64(rand::random_range(0.9..1.1))).await,
                None => std::future::pending().await,
            }
        };
        let left = async {
            match watch {
                Some(watch) => watch.closed().await,
                None => std::future::pending().await,
            }
            // Mostly the connection itself sees it, and some have an answer still: that of an upload that broke off.
            tokio::time::sleep(LAST_ANSWER).await;
            activity.until_answering_on_http1().await;
        };
        // Looked at only when one of them has something to say: a connection that is woken by each token has not.
        let mut interruptions = FuturesUnordered::from_iter([
            cut.cancelled().map(|()| Interruption::Cut).boxed(),
            leave.map(|()| Interruption::Leave).boxed(),
            aged.map(|()| Interruption::Aged).boxed(),
            activity.broken(options.patience).map(Interruption::Broken).boxed(),
            left.map(|()| Interruption::Left).boxed(),
            overdue.watch(|| !activity.is_http2()).map(|()| Interruption::Cut).boxed(),
        ]);
        let mut closing = false;
        let ended = loop {
            tokio::select! {
                ended = connection.as_mut() => break ended,
                Some(interruption) = interruptions.next() => match interruption {
                    Interruption::Cut | Interruption::Left => return,
                    Interruption::Leave => {
                        closing = true;
                        connection.as_mut().graceful_shutdown();
                    }
                    Interruption::Aged if activity.is_http2() => {
                        closing = true;
                        connection.as_mut().graceful_shutdown();
                    }
                    // Closing an unused HTTP/1 connection now could meet a request on its way: its next answer says goodbye.
                    Interruption::Aged => activity.retire(),
                    Interruption::Broken(_) if closing => {}
                    Interruption::Broken(timeout) => {
                        if let Some(observer) = &options.observer {
                            observer(ConnectionEvent::TimedOut(timeout));
                        }
                        if timeout == Timeout::HeaderRead {
                            return;
                        }
                        connection.as_mut().graceful_shutdown();
                        // A client that does not read the end of its last answer must not stay for ever.
                        tokio::select! {
                            ended = connection.as_mut() => break ended,
                            () = cut.cancelled() => return,
                            () = tokio::time::sleep(LAST_BYTES) => return,
                        }
                    }
                }
            }
        };
        if let Err(error) = ended {
            tracing::debug!(target: "smg", error, "a connection ended with an error");
        }
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

/// A connection that is open, for those who count them.
struct Open(Option<ConnectionObserver>);

impl Open {
    fn new(options: &ServeOptions) -> Self {
        let open = Self(options.observer.clone());
        open.tell(ConnectionEvent::Opened);
        open
    }

    fn tell(&self, event: ConnectionEvent) {
        if let Some(observer) = &self.0 {
            observer(event);
        }
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        self.tell(ConnectionEvent::Closed);
    }
}
