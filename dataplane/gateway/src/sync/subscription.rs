//! The subscription stream, dialed again whenever it breaks.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use smg_fleet::{Intent, Snapshot, Worker, WorkerId, wire};
use smg_net::backoff::Backoff;
use smg_services::sync::sync_client::SyncClient;
use smg_services::sync::{Ack, Down, FullChunk, Heartbeat, Hello, Nack, Resync, Up, down, up};
use smg_telemetry::SMG;
use tokio::sync::mpsc;
use tokio::time::MissedTickBehavior;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Status;

use super::dial::Dial;
use super::last_known_good::LastKnownGood;
use super::{Link, install};
use crate::core::Core;
use crate::fleet::table::RoutingTable;

const REDIALS: Backoff =
    Backoff { initial: Duration::from_millis(100), max: Duration::from_secs(5), multiplier: 2.0, jitter: 0.5 };
/// A stream on which nothing comes for so long is dead: the control plane sends a heartbeat every 5 s.
const SILENCE: Duration = Duration::from_secs(15);
const HEARTBEATS: Duration = Duration::from_secs(5);
/// How often it is looked what still runs on draining workers.
const DRAINS: Duration = Duration::from_millis(200);
/// Most of them that are named in one message.
const MAX_BUSY: usize = 1_000;
/// Largest accepted snapshot.
const MAX_SNAPSHOT: usize = 256 * 1024 * 1024;
/// Our messages that wait to be sent.
const UP_QUEUE: usize = 16;

/// How a stream ended.
enum Ended {
    /// It broke.
    Broken(String),
    /// The control plane asked for a pause.
    GoAway(Duration),
    /// This gateway closes.
    Closing,
}

pub(super) async fn run(core: Arc<Core>, link: Arc<Link>, dial: Dial, stored: Option<LastKnownGood>) {
    let mut failures = 0u32;
    for attempt in usize::from(rand::random::<u16>()).. {
        let (before, begun) = (*core.revision.borrow(), Instant::now());
        let ended = tokio::select! {
            ended = subscribe(&core, &link, &dial, attempt, stored.as_ref()) => ended,
            () = core.closing.cancelled() => Ended::Closing,
            () = watch_staleness(&core, &link) => Ended::Closing,
        };
        link.connected.store(false, Ordering::Release);
        let pause = match ended {
            Ended::Closing => return,
            Ended::GoAway(pause) => {
                failures = 0;
                pause
            }
            Ended::Broken(reason) => {
                // A stream that held is no failed attempt, however little it had to say.
                let held = *core.revision.borrow() != before || begun.elapsed() > REDIALS.max;
                failures = if held { 0 } else { failures.saturating_add(1) };
                tracing::warn!(target: SMG, reason, "no stream from the control plane: routing with the last snapshot");
                REDIALS.delay(failures, rand::random())
            }
        };
        link.channel.store(None);
        tokio::select! {
            () = core.closing.cancelled() => return,
            () = tokio::time::sleep(pause) => {}
        }
    }
}

/// Keeps the staleness gauge up to date; never ends.
async fn watch_staleness(core: &Core, link: &Link) {
    let mut ticks = tokio::time::interval(Duration::from_secs(1));
    loop {
        ticks.tick().await;
        let stale = link.status().stale_seconds.unwrap_or(0);
        core.metrics.config_stale_seconds.set(i64::try_from(stale).unwrap_or(i64::MAX));
    }
}

fn up(message: up::Message) -> Up {
    Up { message: Some(message) }
}

async fn subscribe(
    core: &Arc<Core>,
    link: &Link,
    dial: &Dial,
    attempt: usize,
    stored: Option<&LastKnownGood>,
) -> Ended {
    let channel = match dial.connect(attempt).await {
        Ok(channel) => channel,
        Err(reason) => return Ended::Broken(reason),
    };
    link.channel.store(Some(Arc::new(channel.clone())));
    let mut process = core.process.subscribe();
    let process_id = *process.borrow_and_update();
    let have = Arc::clone(&core.table.load().snapshot);
    let (sender, receiver) = mpsc::channel(UP_QUEUE);
    let hello = Hello {
        gateway_id: core.options.gateway_id.clone(),
        process_id: process_id.as_bytes().to_vec(),
        have_history_id: if have.revision == 0 { Vec::new() } else { have.history_id.as_bytes().to_vec() },
        have_revision: have.revision,
        version: env!("CARGO_PKG_VERSION").to_owned(),
    };
    if sender.send(up(up::Message::Hello(hello))).await.is_err() {
        return Ended::Broken("the stream closed before it began".to_owned());
    }
    let mut client = SyncClient::new(channel).max_decoding_message_size(MAX_SNAPSHOT);
    let mut stream = match client.subscribe(ReceiverStream::new(receiver)).await {
        Ok(response) => response.into_inner(),
        Err(status) => return Ended::Broken(describe(&status)),
    };
    let mut heartbeats = tokio::time::interval(HEARTBEATS);
    let mut drains = tokio::time::interval(DRAINS);
    drains.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut told = Drains::default();
    // Not anew with each turn of the loop: what this gateway says must not keep a silent stream alive.
    let mut silent_at = tokio::time::Instant::now() + SILENCE;
    let mut stream_state = Stream { core, stored, partial: Vec::new() };
    loop {
        let message = tokio::select! {
            message = tokio::time::timeout_at(silent_at, stream.message()) => message,
            // To the control plane this is another process from now on.
            Ok(()) = process.changed() => return Ended::GoAway(Duration::ZERO),
            _ = heartbeats.tick() => {
                told = Drains::of(&core.table.load());
                if sender.send(up(up::Message::Heartbeat(told.heartbeat(core)))).await.is_err() {
                    return Ended::Broken("the stream closed".to_owned());
                }
                continue;
            }
            // Who waits for a worker to leave need not wait for the next heartbeat.
            _ = drains.tick() => {
                let now = Drains::of(&core.table.load());
                if now != told && !(now.is_nothing() && told.is_nothing()) {
                    told = now;
                    if sender.send(up(up::Message::Heartbeat(told.heartbeat(core)))).await.is_err() {
                        return Ended::Broken("the stream closed".to_owned());
                    }
                }
                continue;
            }
        };
        let message = match message {
            Ok(Ok(Some(message))) => message,
            Ok(Ok(None)) => return Ended::Broken("the control plane ended the stream".to_owned()),
            Ok(Err(status)) => return Ended::Broken(describe(&status)),
            Err(_) => return Ended::Broken("the control plane fell silent".to_owned()),
        };
        silent_at = tokio::time::Instant::now() + SILENCE;
        link.heard();
        link.connected.store(true, Ordering::Release);
        match stream_state.receive(message).await {
            Answer::Nothing => {}
            Answer::Send(message) => {
                if sender.send(up(message)).await.is_err() {
                    return Ended::Broken("the stream closed".to_owned());
                }
            }
            Answer::End(ended) => return ended,
        }
    }
}

/// What the control plane says, or else what happened to the connection: the transport itself says no more than that it failed.
fn describe(status: &Status) -> String {
    match std::error::Error::source(status) {
        Some(cause) => crate::relay::describe(cause),
        None => status.message().to_owned(),
    }
}

/// What this gateway still runs on workers that are out of rotation: draining, or cordoned.
#[derive(Debug, Default, PartialEq)]
struct Drains {
    revision: u64,
    draining: usize,
    busy: Vec<WorkerId>,
    more: bool,
}

impl Drains {
    fn of(table: &RoutingTable) -> Self {
        let out = || table.snapshot.workers.values().filter(|worker| worker.intent != Intent::Active);
        let runs = |worker: &&Arc<Worker>| table.runtimes_of(worker).any(|(runtime, _)| runtime.load() > 0);
        let mut busy: Vec<WorkerId> = out().filter(runs).map(|worker| worker.id).take(MAX_BUSY + 1).collect();
        let more = busy.len() > MAX_BUSY;
        busy.truncate(MAX_BUSY);
        Self { revision: table.snapshot.revision, draining: out().count(), busy, more }
    }

    /// Whether nobody is out of rotation.
    fn is_nothing(&self) -> bool {
        self.draining == 0
    }

    fn heartbeat(&self, core: &Core) -> Heartbeat {
        Heartbeat {
            acked_revision: self.revision,
            in_flight_requests: u64::try_from(core.metrics.http_requests_active.get()).unwrap_or(0),
            busy_draining: self.busy.iter().map(|id| wire::worker_id_bytes(*id)).collect(),
            more_busy_draining: self.more,
        }
    }
}

enum Answer {
    Nothing,
    Send(up::Message),
    End(Ended),
}

struct Stream<'a> {
    core: &'a Arc<Core>,
    stored: Option<&'a LastKnownGood>,
    /// Chunks of a full snapshot so far.
    partial: Vec<u8>,
}

impl Stream<'_> {
    async fn receive(&mut self, message: Down) -> Answer {
        match message.message {
            Some(down::Message::Full(chunk)) => self.full(chunk).await,
            Some(down::Message::Delta(message)) => {
                let Some(delta) = message.delta else { return Answer::Nothing };
                let revision = delta.to_revision;
                let current = Arc::clone(&self.core.table.load().snapshot);
                let next = wire::delta_from_pb(delta)
                    .map_err(|error| error.to_string())
                    .and_then(|delta| current.apply(&delta).map_err(|error| error.to_string()));
                match next {
                    Ok(next) => self.take("delta", message.nonce, revision, next).await,
                    Err(reason) => {
                        tracing::warn!(target: SMG, reason, revision, "a delta does not fit: asking for the whole snapshot");
                        self.count("delta", "resync");
                        Answer::Send(up::Message::Resync(Resync { reason }))
                    }
                }
            }
            Some(down::Message::GoAway(go_away)) => {
                let pause = Duration::from_millis(go_away.reconnect_after_ms.min(60_000));
                Answer::End(Ended::GoAway(pause))
            }
            Some(down::Message::Heartbeat(_)) | None => Answer::Nothing,
        }
    }

    async fn full(&mut self, chunk: FullChunk) -> Answer {
        if self.partial.len() + chunk.data.len() > MAX_SNAPSHOT {
            self.partial = Vec::new();
            return Answer::End(Ended::Broken("the snapshot is larger than this gateway accepts".to_owned()));
        }
        self.partial.extend_from_slice(&chunk.data);
        if !chunk.last {
            return Answer::Nothing;
        }
        let bytes = std::mem::take(&mut self.partial);
        match wire::decode_snapshot(&bytes) {
            Ok(snapshot) => match self.another_cluster(&snapshot) {
                Some(reason) => {
                    self.count("full", "refused");
                    Answer::End(Ended::Broken(reason))
                }
                None => self.take("full", chunk.nonce, chunk.revision, snapshot).await,
            },
            Err(error) => self.refuse("full", chunk.nonce, chunk.revision, error.to_string()),
        }
    }

    /// Why the state is not of the fleet that this gateway serves. A cluster keeps its id for ever, over restored backups too: another id is
    /// another cluster, founded by mistake at an address of this one, and whoever took its empty state would refuse every request.
    fn another_cluster(&self, snapshot: &Snapshot) -> Option<String> {
        let known = Arc::clone(&self.core.table.load().snapshot);
        if known.revision == 0 || known.cluster_id == snapshot.cluster_id {
            return None;
        }
        let (ours, theirs) = (known.cluster_id, snapshot.cluster_id);
        tracing::error!(
            target: SMG, %ours, %theirs,
            "this member of the control plane is of another cluster and is not listened to; was it started with --bootstrap on an empty disk?"
        );
        Some(format!("it is of cluster {theirs}, and this gateway serves {ours}"))
    }

    async fn take(&mut self, kind: &str, nonce: u64, revision: u64, snapshot: Snapshot) -> Answer {
        if let Err(refused) = install(self.core, snapshot) {
            return self.refuse(kind, nonce, revision, refused.to_string());
        }
        self.count(kind, "applied");
        tracing::info!(target: SMG, revision, kind, "fleet state applied");
        if let Some(stored) = self.stored.cloned() {
            let snapshot = Arc::clone(&self.core.table.load().snapshot);
            // Never on the request path: an fsync can take long.
            let written = tokio::task::spawn_blocking(move || stored.store(&snapshot)).await;
            if let Ok(Err(error)) = written {
                tracing::warn!(target: SMG, %error, "the snapshot could not be stored for the next start");
            }
        }
        Answer::Send(up::Message::Ack(Ack { nonce, revision }))
    }

    fn refuse(&self, kind: &str, nonce: u64, revision: u64, reason: String) -> Answer {
        tracing::error!(target: SMG, reason, revision, "fleet state refused: the last good one stays in use");
        self.count(kind, "refused");
        Answer::Send(up::Message::Nack(Nack { nonce, revision, reason }))
    }

    fn count(&self, kind: &str, result: &str) {
        self.core.metrics.config_updates.with_label_values(&[kind, result]).inc();
    }
}
