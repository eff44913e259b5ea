//! Connections to workers.
//!
//! A connection is driven by whoever uses it, in the task of the request: it has no task of its own, so that neither a request nor a token
//! crosses from one thread to another on its way. In return a connection at rest is not watched: it is looked at when it is taken.
//!
//! Invariants
//! * a connection carries one exchange at a time and goes back to its pool only when that exchange has ended properly, both ways;
//! * dropping an exchange, or the body of its response, closes the connection: that is how engines learn that nobody waits any more;
//! * a request that finds its connection closed by the worker before anything was sent goes out again on another one; what else may go
//!   out again is decided by the leg ([`crate::resilience::stale`]).

mod bell;

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use bytes::{Bytes, BytesMut};
use http::{Request, Response, Uri};
use http_body::{Body, Frame, SizeHint};
use hyper::body::Incoming;
use hyper::client::conn::http1::{Builder, Connection, SendRequest};
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use prometheus::IntGauge;
use smg_net::tls::WorkerConnector;
use thiserror::Error;
use tower::Service;

use bell::Bell;

use crate::core::Core;
use crate::dispatch::leg::LegBody;
use crate::resilience::stale::{Answered, Noting};

/// How often connections at rest are looked at.
const SWEEP: Duration = Duration::from_secs(1);
/// Pieces of a response that arrived together leave together, as long as they are smaller than this.
const GATHERED: usize = 16 * 1024;
/// Most connections at rest per worker.
const MAX_IDLE: usize = 500;

/// Why an exchange has no response.
#[derive(Debug, Error)]
pub enum ExchangeError {
    /// There is no connection to the worker.
    #[error("cannot connect")]
    Connect(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// The connection broke.
    #[error("the connection broke")]
    Broken(#[from] hyper::Error),
    /// It broke without a byte of an answer, and it had rested before: the worker may have closed it without having seen the request.
    #[error("the connection had been closed")]
    Stale(#[source] hyper::Error),
}

/// How connections are made.
#[derive(Debug, Clone)]
pub struct Connections {
    connector: WorkerConnector,
    http: Builder,
    idle_timeout: Duration,
}

impl Connections {
    /// Connections made by `connector` that read ahead at most `buffer` bytes and rest at most `idle_timeout`.
    pub fn new(connector: WorkerConnector, buffer: usize, idle_timeout: Duration) -> Self {
        let mut http = Builder::new();
        http.max_buf_size(buffer);
        Self { connector, http, idle_timeout }
    }

    /// Sends `request` to the worker at `address` and waits for the head of its response. The target of the request is a path, and it has a
    /// `Host`.
    ///
    /// # Errors
    /// When there is no head.
    pub async fn exchange(
        &self,
        pool: &Arc<Pool>,
        address: &Uri,
        mut request: Request<LegBody>,
    ) -> Result<Response<Answer>, ExchangeError> {
        loop {
            let rested = pool.take(self.idle_timeout);
            let (mut link, is_new) = match rested {
                Some(link) => (link, false),
                None => (self.connect(pool, address).await?, true),
            };
            match link.send(request).await {
                Ok(response) => {
                    let pool = Arc::clone(pool);
                    return Ok(response.map(|incoming| Answer::new(incoming, link, pool)));
                }
                Err(mut error) => match error.take_message() {
                    Some(unsent) if !is_new => request = unsent,
                    None if !is_new && !link.answered.is_set() => return Err(ExchangeError::Stale(error.into_error())),
                    _ => return Err(error.into_error().into()),
                },
            }
        }
    }

    /// As [`Connections::exchange`], on a connection that nobody has used.
    ///
    /// # Errors
    /// When there is no head.
    pub async fn exchange_anew(
        &self,
        pool: &Arc<Pool>,
        address: &Uri,
        request: Request<LegBody>,
    ) -> Result<Response<Answer>, ExchangeError> {
        let mut link = self.connect(pool, address).await?;
        let response = link.send(request).await.map_err(|error| error.into_error())?;
        let pool = Arc::clone(pool);
        Ok(response.map(|incoming| Answer::new(incoming, link, pool)))
    }

    async fn connect(&self, pool: &Pool, address: &Uri) -> Result<Box<Link>, ExchangeError> {
        let stream = self.connector.clone().call(address.clone()).await.map_err(ExchangeError::Connect)?;
        let answered = Answered::default();
        let stream = TokioIo::new(Noting::new(TokioIo::new(stream), answered.clone()));
        let (sender, connection) = self.http.handshake(stream).await?;
        let (bell, _open) = (Bell::new(), Open::new(&pool.open));
        let waker = Waker::from(Arc::clone(&bell));
        Ok(Box::new(Link { sender, connection, answered, waker, bell, ended: false, _open }))
    }
}

/// Closes connections that rested too long, until the gateway closes.
pub async fn sweep_for_ever(core: Arc<Core>) {
    let mut ticks = tokio::time::interval(SWEEP);
    loop {
        tokio::select! {
            () = core.closing.cancelled() => return,
            _ = ticks.tick() => {
                core.table.load().runtimes().for_each(|worker| worker.connections().sweep(core.options.pool_idle_timeout));
            }
        }
    }
}

/// Connections at rest to one worker.
#[derive(Debug)]
pub struct Pool {
    /// The one used last is the last, and the first to be used again.
    idle: Mutex<Vec<(Box<Link>, Instant)>>,
    /// Counts those in use too.
    open: IntGauge,
}

impl Pool {
    /// No connection yet; `open` counts those that are made.
    pub fn new(open: IntGauge) -> Self {
        Self { idle: Mutex::default(), open }
    }

    /// A connection that the worker has not closed, as far as is known.
    fn take(&self, idle_timeout: Duration) -> Option<Box<Link>> {
        loop {
            let (mut link, since) = self.idle.lock().pop()?;
            if since.elapsed() > idle_timeout {
                // All others have rested longer.
                self.idle.lock().clear();
                return None;
            }
            if link.is_usable() {
                return Some(link);
            }
        }
    }

    fn put(&self, link: Box<Link>) {
        let mut idle = self.idle.lock();
        if idle.len() < MAX_IDLE {
            idle.push((link, Instant::now()));
        }
    }

    /// Closes what has rested longer than `idle_timeout`, or was closed by the worker.
    pub fn sweep(&self, idle_timeout: Duration) {
        self.idle.lock().retain_mut(|(link, since)| since.elapsed() <= idle_timeout && link.is_usable());
    }
}

/// Bytes to and from a worker, with TLS or without.
type Socket = <WorkerConnector as Service<Uri>>::Response;

/// One connection: what drives it, and what gives it work.
struct Link {
    sender: SendRequest<LegBody>,
    connection: Connection<TokioIo<Noting<TokioIo<Socket>>>, LegBody>,
    answered: Answered,
    /// Rings when there is something to drive.
    bell: Arc<Bell>,
    /// That bell's.
    waker: Waker,
    ended: bool,
    _open: Open,
}

/// Counts one connection as open until it is dropped.
struct Open(IntGauge);

impl Open {
    fn new(gauge: &IntGauge) -> Self {
        gauge.inc();
        Self(gauge.clone())
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        self.0.dec();
    }
}

impl std::fmt::Debug for Link {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Link").field("ended", &self.ended).finish_non_exhaustive()
    }
}

impl Link {
    /// Moves bytes both ways, if any can be moved. What ended the connection is told to whoever waits for a response or its body.
    fn drive(&mut self) {
        if self.bell.rung() && !self.ended {
            self.ended = Pin::new(&mut self.connection).poll(&mut Context::from_waker(&self.waker)).is_ready();
        }
    }

    /// Whether it can carry another exchange, as far as is known.
    fn is_usable(&mut self) -> bool {
        self.drive();
        !self.ended && self.sender.is_ready()
    }

    async fn send(
        &mut self,
        request: Request<LegBody>,
    ) -> Result<Response<Incoming>, hyper::client::conn::TrySendError<Request<LegBody>>> {
        self.answered.clear();
        let mut response = std::pin::pin!(self.sender.try_send_request(request));
        std::future::poll_fn(|cx| {
            if self.bell.rung() && !self.ended {
                self.ended = Pin::new(&mut self.connection).poll(&mut Context::from_waker(&self.waker)).is_ready();
            }
            // The answer comes from what was just driven: nobody else has to wake this task for it.
            let polled = response.as_mut().poll(&mut Context::from_waker(Waker::noop()));
            match &polled {
                Poll::Pending => self.bell.wake_when_rung(cx.waker()),
                Poll::Ready(Ok(_)) => self.answered.head_came(),
                Poll::Ready(Err(_)) => {}
            }
            polled
        })
        .await
    }
}

type Piece = Result<Frame<Bytes>, hyper::Error>;

/// The body of a worker's response.
#[derive(Debug)]
pub struct Answer {
    incoming: Incoming,
    /// What ended the last gathering, unless it was a lack of more: a frame that is no data, a failure, or the end.
    next: Option<Option<Piece>>,
    /// Gone when the body has ended or the connection has broken.
    link: Option<Box<Link>>,
    pool: Arc<Pool>,
}

impl Answer {
    fn new(incoming: Incoming, link: Box<Link>, pool: Arc<Pool>) -> Self {
        let mut answer = Self { incoming, next: None, link: Some(link), pool };
        if answer.incoming.is_end_stream() {
            answer.release();
        }
        answer
    }

    /// The exchange has ended: its connection rests if it can.
    fn release(&mut self) {
        if let Some(mut link) = self.link.take()
            && link.is_usable()
        {
            self.pool.put(link);
        }
    }

    fn poll_piece(&mut self, cx: &mut Context<'_>) -> Poll<Option<Piece>> {
        if let Some(next) = self.next.take() {
            return Poll::Ready(next);
        }
        if let Some(link) = &mut self.link {
            link.drive();
        }
        // The frames come from what was just driven: nobody else has to wake this task for them.
        let polled = Pin::new(&mut self.incoming).poll_frame(&mut Context::from_waker(Waker::noop()));
        match &polled {
            Poll::Ready(Some(Ok(_))) if !self.incoming.is_end_stream() => {}
            Poll::Ready(_) => self.release(),
            Poll::Pending => {
                if let Some(link) = &self.link {
                    link.bell.wake_when_rung(cx.waker());
                }
            }
        }
        polled
    }

    /// `first`, and what else has arrived by now. An engine that sends each token in a chunk of its own would otherwise cost the client a
    /// write for each.
    fn gather(&mut self, first: Bytes, cx: &mut Context<'_>) -> Bytes {
        let mut gathered = BytesMut::new();
        while first.len().max(gathered.len()) < GATHERED && !self.incoming.is_end_stream() {
            match self.poll_piece(cx) {
                Poll::Ready(Some(Ok(frame))) if frame.is_data() => {
                    if gathered.is_empty() {
                        gathered.reserve(GATHERED / 4);
                        gathered.extend_from_slice(&first);
                    }
                    gathered.extend_from_slice(frame.data_ref().map_or(&[], |data| data));
                }
                Poll::Ready(other) => {
                    self.next = Some(other);
                    break;
                }
                Poll::Pending => break,
            }
        }
        if gathered.is_empty() { first } else { gathered.freeze() }
    }
}

impl Body for Answer {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Piece>> {
        let piece = std::task::ready!(self.poll_piece(cx));
        Poll::Ready(match piece.map(|piece| piece.map(Frame::into_data)) {
            Some(Ok(Ok(data))) => Some(Ok(Frame::data(self.gather(data, cx)))),
            Some(Ok(Err(other))) => Some(Ok(other)),
            Some(Err(error)) => Some(Err(error)),
            None => None,
        })
    }

    fn is_end_stream(&self) -> bool {
        self.next.is_none() && self.incoming.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.incoming.size_hint()
    }
}
