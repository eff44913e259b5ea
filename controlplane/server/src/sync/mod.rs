//! The sync service: how gateways learn the fleet's state.
//!
//! A gateway opens one stream and says what it has; it gets a delta from there, or everything, and then each change as it happens. The
//! parts: [`feed`] holds what all subscribers share, [`session`] decides what one of them is sent, [`gateways`] remembers who they are,
//! [`everywhere`] asks other members for theirs, and this file moves messages.
//!
//! Bounds: one un-acknowledged message a gateway, a few messages in a channel, a limit on subscribers, and a limit on every wait: for the
//! first message, for any sign of life, for room to send, for an acknowledgement.

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use futures::Stream;
use smg_fleet::Revision;
use smg_fleet::wire::worker_id;
use smg_net::mutual::guard::Guard;
use smg_net::mutual::identity::Part;
use smg_services::sync::sync_server::{Sync, SyncServer};
use smg_services::sync::{Down, GoAway, Hello, ServerHeartbeat, Up, down, up};
use smg_store::ClusterStore;
use smg_telemetry::Metrics;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio::time::{Instant, MissedTickBehavior, interval_at, sleep_until, timeout};
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status, Streaming};
use uuid::Uuid;

pub mod everywhere;
pub mod feed;
pub mod gateways;
pub mod session;
#[cfg(test)]
mod tests;

use crate::slots::Desk;
use feed::Feed;
use gateways::{Drains, Gateways, Membership, Refusal};
use session::{Pauses, Session, Step, down};

/// Largest message accepted from a gateway, in bytes.
const MAX_UP_BYTES: usize = 1024 * 1024;
/// Longest gateway name and version, in bytes.
const MAX_NAME_BYTES: usize = 256;
/// Longest remembered reason of a refusal, in characters.
const MAX_REASON_CHARS: usize = 1_024;
/// Most draining workers in one report of a gateway.
const MAX_BUSY: usize = 1_000;
/// A node that has not heard a leader for so many heartbeats sends its gateways to others, which may have.
const LONELY_HEARTBEATS: u32 = 1;
/// Messages between the session and the transport.
const CHANNEL: usize = 4;

/// How patient the sync service is.
#[derive(Debug, Clone, Copy)]
pub struct Timing {
    /// Changes within this time are sent together.
    pub window: Duration,
    /// For the first message of a stream.
    pub hello: Duration,
    /// Between two heartbeats of the server.
    pub heartbeat: Duration,
    /// Without any message from the gateway, or without room to send to it.
    pub silence: Duration,
    /// For an acknowledgement.
    pub acknowledgement: Duration,
    /// See [`Pauses`].
    pub pauses: Pauses,
    /// Most subscribers at once.
    pub max_subscribers: usize,
}

impl Default for Timing {
    fn default() -> Self {
        Self {
            window: Duration::from_millis(25),
            hello: Duration::from_secs(5),
            heartbeat: Duration::from_secs(5),
            silence: Duration::from_secs(15),
            acknowledgement: Duration::from_secs(60),
            pauses: Pauses { refused: Duration::from_secs(5), full: Duration::from_secs(1) },
            max_subscribers: 1_000,
        }
    }
}

/// The service. Cheap to clone.
#[derive(Clone)]
pub struct SyncService {
    shared: Arc<Shared>,
}

struct Shared {
    store: Arc<dyn ClusterStore>,
    feed: Arc<Feed>,
    gateways: Arc<Gateways>,
    desk: Desk,
    seats: Arc<Semaphore>,
    metrics: Arc<Metrics>,
    shutdown: CancellationToken,
    timing: Timing,
}

impl SyncService {
    /// The service and its publisher, which must run until `shutdown`.
    pub fn new(
        store: Arc<dyn ClusterStore>,
        desk: Desk,
        metrics: Arc<Metrics>,
        shutdown: CancellationToken,
        timing: Timing,
    ) -> (Self, impl Future<Output = ()> + Send + use<>) {
        let feed = Arc::new(Feed::new(&store.local()));
        let publisher = Arc::clone(&feed).follow(Arc::clone(&store), timing.window, shutdown.clone());
        let shared = Shared {
            store,
            feed,
            gateways: Arc::new(Gateways::new(Arc::clone(&metrics))),
            desk,
            seats: Arc::new(Semaphore::new(timing.max_subscribers)),
            metrics,
            shutdown,
            timing,
        };
        (Self { shared: Arc::new(shared) }, publisher)
    }

    /// Who is connected.
    pub fn gateways(&self) -> Arc<Gateways> {
        Arc::clone(&self.shared.gateways)
    }

    /// What gateways follow.
    pub(crate) fn feed(&self) -> Arc<Feed> {
        Arc::clone(&self.shared.feed)
    }

    /// The service as routes; over TLS between parts for gateways only. Unlike tonic's own router this one has no fallback, so that it merges with others.
    pub fn router(&self) -> Router {
        let server = SyncServer::new(self.clone()).max_decoding_message_size(MAX_UP_BYTES);
        Router::new().route_service("/smg.sync.v1.Sync/{*method}", Guard::new(server, Part::Gateway))
    }
}

#[tonic::async_trait]
impl Sync for SyncService {
    type SlotsStream = Pin<Box<dyn Stream<Item = Result<smg_messages::admission::Update, Status>> + Send>>;

    async fn slots(
        &self,
        request: Request<Streaming<smg_messages::admission::Report>>,
    ) -> Result<Response<Self::SlotsStream>, Status> {
        if self.shared.shutdown.is_cancelled() {
            return Err(Status::unavailable("the control plane is shutting down"));
        }
        self.shared.desk.session(request.into_inner())
    }

    type SubscribeStream = Pin<Box<dyn Stream<Item = Result<Down, Status>> + Send>>;

    async fn subscribe(&self, request: Request<Streaming<Up>>) -> Result<Response<Self::SubscribeStream>, Status> {
        if self.shared.shutdown.is_cancelled() {
            return Err(Status::unavailable("the control plane is shutting down"));
        }
        let seat = Arc::clone(&self.shared.seats).try_acquire_owned();
        let seat = seat.map_err(|_| Status::resource_exhausted("this node has no room for another gateway"))?;
        let (sender, receiver) = mpsc::channel(CHANNEL);
        let subscription =
            Subscription { shared: Arc::clone(&self.shared), up: request.into_inner(), down: sender, _seat: seat };
        tokio::spawn(subscription.run());
        Ok(Response::new(Box::pin(ReceiverStream::new(receiver))))
    }
}

/// One gateway's stream.
struct Subscription {
    shared: Arc<Shared>,
    up: Streaming<Up>,
    down: mpsc::Sender<Result<Down, Status>>,
    _seat: OwnedSemaphorePermit,
}

/// Why a subscription ended. `None` = the gateway has gone.
type End = Option<Status>;

impl Subscription {
    async fn run(mut self) {
        if let Err(Some(status)) = self.serve().await {
            tracing::info!(target: "smg", code = ?status.code(), reason = status.message(), "a gateway's subscription was cut");
            // Nobody may be reading; the stream ends either way.
            let _ = self.down.try_send(Err(status));
        }
    }

    async fn serve(&mut self) -> Result<(), End> {
        let hello = self.hello().await?;
        let have = have(&hello)?;
        let process = Uuid::from_slice(&hello.process_id)
            .map_err(|_| Some(Status::invalid_argument("process_id must be a UUID of 16 bytes")))?;
        let mut latest = self.shared.feed.subscribe();
        let history = latest.borrow().snapshot.history_id;
        let resumes_at = have.filter(|(of, _)| *of == history).map_or(0, |(_, revision)| revision);
        let process_name = process.to_string();
        let member = self.shared.gateways.join(&hello.gateway_id, &process_name, &hello.version, resumes_at);
        tracing::info!(target: "smg", gateway = hello.gateway_id, %process, ?have, "a gateway subscribed");
        let timing = self.shared.timing;
        let shutdown = self.shared.shutdown.clone();
        let mut session = Session::new(timing.pauses, have);
        let mut heartbeat = interval_at(Instant::now() + timing.heartbeat, timing.heartbeat);
        heartbeat.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut heard = Instant::now();
        let mut lonely = 0;
        // At once, so that the gateway knows the revision it is going to reach.
        let revision = latest.borrow().snapshot.revision;
        self.heartbeat(revision).await?;
        loop {
            let published = Arc::clone(&latest.borrow_and_update());
            let mut wake = heard + timing.silence;
            match session.step(&self.shared.feed, &published, Instant::now()) {
                Step::Send(messages) => {
                    for message in messages {
                        self.send(message).await?;
                    }
                }
                Step::WaitUntil(at) => wake = wake.min(at),
                Step::Wait => {}
            }
            let overdue = session.unacked_since().map(|sent| sent + timing.acknowledgement);
            wake = overdue.map_or(wake, |at| wake.min(at));
            tokio::select! {
                message = self.up.message() => {
                    heard = Instant::now();
                    match message {
                        Ok(Some(Up { message: Some(message) })) => self.take(message, &mut session, &member)?,
                        Ok(Some(Up { message: None })) => {}
                        Ok(None) | Err(_) => return Err(None),
                    }
                }
                changed = latest.changed() => changed.map_err(|_| Some(Status::unavailable("the feed has ended")))?,
                _ = heartbeat.tick() => {
                    lonely = if self.shared.store.in_contact() { 0 } else { lonely + 1 };
                    if lonely > LONELY_HEARTBEATS {
                        return self.go_away("this member does not hear the leader").await;
                    }
                    self.heartbeat(published.snapshot.revision).await?;
                }
                () = sleep_until(wake) => {
                    let now = Instant::now();
                    if now >= heard + timing.silence {
                        return Err(Some(Status::deadline_exceeded("the gateway was silent for too long")));
                    }
                    if overdue.is_some_and(|at| now >= at) {
                        return Err(Some(Status::deadline_exceeded("the gateway did not acknowledge in time")));
                    }
                }
                () = shutdown.cancelled() => return self.go_away("the control plane is shutting down").await,
            }
        }
    }

    async fn hello(&mut self) -> Result<Hello, End> {
        let first = timeout(self.shared.timing.hello, self.up.message()).await;
        match first {
            Err(_) => Err(Some(Status::deadline_exceeded("no hello in time"))),
            Ok(Err(_) | Ok(None)) => Err(None),
            Ok(Ok(Some(Up { message: Some(up::Message::Hello(hello)) }))) => Ok(hello),
            Ok(Ok(Some(_))) => Err(Some(Status::invalid_argument("the first message must be a hello"))),
        }
    }

    /// Takes a message of the gateway in.
    fn take(&self, message: up::Message, session: &mut Session, member: &Membership) -> Result<(), End> {
        let now = Instant::now();
        match message {
            up::Message::Hello(_) => return Err(Some(Status::invalid_argument("a second hello"))),
            up::Message::Ack(ack) => {
                if let Some((revision, took)) = session.ack(ack.nonce, now) {
                    if let Some(took) = took {
                        self.shared.metrics.sync_propagation.observe(took.as_secs_f64());
                    }
                    member.heard(|record| {
                        record.acked_revision = revision;
                        record.nack = None;
                    });
                }
            }
            up::Message::Nack(nack) => {
                if let Some(revision) = session.nack(nack.nonce, now) {
                    let reason: String = nack.reason.chars().take(MAX_REASON_CHARS).collect();
                    member.heard(|record| {
                        tracing::warn!(
                            target: "smg", gateway = record.gateway_id, revision, reason,
                            "a gateway refused a revision and keeps the one it has"
                        );
                        record.nack = Some(Refusal { revision, reason, at_unix_ms: smg_net::unix_millis() });
                    });
                }
            }
            up::Message::Resync(resync) => {
                let reason: String = resync.reason.chars().take(MAX_REASON_CHARS).collect();
                session.resync();
                member.heard(|record| {
                    tracing::warn!(target: "smg", gateway = record.gateway_id, reason, "a gateway asked for everything");
                });
            }
            up::Message::Heartbeat(heartbeat) => {
                let busy = heartbeat.busy_draining.iter().filter_map(|id| worker_id(id).ok());
                let drains = Drains {
                    as_of: heartbeat.acked_revision,
                    busy: busy.take(MAX_BUSY).collect(),
                    more: heartbeat.more_busy_draining || heartbeat.busy_draining.len() > MAX_BUSY,
                };
                member.heard(|record| {
                    record.in_flight_requests = heartbeat.in_flight_requests;
                    record.drains = drains;
                });
            }
        }
        Ok(())
    }

    async fn send(&self, message: Down) -> Result<(), End> {
        match timeout(self.shared.timing.silence, self.down.send(Ok(message))).await {
            Ok(Ok(())) => Ok(()),
            Ok(Err(_)) => Err(None),
            Err(_) => Err(Some(Status::deadline_exceeded("the gateway does not read"))),
        }
    }

    async fn heartbeat(&self, revision: Revision) -> Result<(), End> {
        let heartbeat = ServerHeartbeat { revision, server_unix_ms: smg_net::unix_millis() };
        self.send(down(down::Message::Heartbeat(heartbeat))).await
    }

    async fn go_away(&self, reason: &str) -> Result<(), End> {
        // Spread out, so that the gateways of a node do not all arrive at the next one at once.
        let reconnect_after_ms = rand::random_range(0..1_000);
        let reason = reason.to_owned();
        self.send(down(down::Message::GoAway(GoAway { reconnect_after_ms, reason }))).await
    }
}

/// What a gateway says it has.
fn have(hello: &Hello) -> Result<Option<(Uuid, Revision)>, End> {
    if hello.gateway_id.is_empty() || hello.gateway_id.len() > MAX_NAME_BYTES || hello.version.len() > MAX_NAME_BYTES {
        let message = format!("gateway_id must be 1 to {MAX_NAME_BYTES} bytes, version at most that");
        return Err(Some(Status::invalid_argument(message)));
    }
    if hello.have_history_id.is_empty() {
        return Ok(None);
    }
    let history = Uuid::from_slice(&hello.have_history_id)
        .map_err(|_| Some(Status::invalid_argument("have_history_id must be 16 bytes or empty")))?;
    Ok(Some((history, hello.have_revision)))
}
