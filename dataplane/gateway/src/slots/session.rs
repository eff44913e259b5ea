//! The stream to the leader of the control plane, dialed again whenever it breaks.
//!
//! Only the leader has the ledger's desk; other members say that they have none, and the next one is asked. While there is no leader the
//! lease goes on; what it comes to is the windows' business.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use smg_admission::{Report, Shares, Standing, WorkerKey, wire};
use smg_messages::admission as pb;
use smg_net::backoff::Backoff;
use smg_services::sync::sync_client::SyncClient;
use smg_telemetry::SMG;
use tokio::sync::{mpsc, oneshot};
use tokio::time::{Instant, MissedTickBehavior, interval, sleep, sleep_until, timeout, timeout_at};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Status, Streaming};
use uuid::Uuid;

use super::checkpoint::{Checkpoints, Predecessor, SETTLED};
use super::nobody;
use crate::admission::lease::Lease;
use crate::clock::since_boot;
use crate::core::Core;
use crate::sync::dial::Dial;

const REDIALS: Backoff =
    Backoff { initial: Duration::from_millis(50), max: Duration::from_secs(1), multiplier: 1.5, jitter: 0.5 };
/// Between two reports when nothing happens.
const KEEPALIVES: Duration = Duration::from_secs(1);
/// Least time between two reports: what happens meanwhile is said together.
const TOGETHER: Duration = Duration::from_millis(50);
/// Those who wait at the same moment are said together.
const GATHERED: Duration = Duration::from_millis(5);
/// The leader answers each report within a tick. A stream on which nothing comes for so long is dead.
const SILENCE: Duration = Duration::from_secs(5);
/// For a member to take the stream.
const OPENING: Duration = Duration::from_secs(3);
/// How often the control plane is looked for before it counts as away.
const LOOKS: u32 = 6;
/// Our messages that wait to be sent.
const UP_QUEUE: usize = 16;
/// Before a gateway whose name another one has asks again.
const DISPLACED: Duration = Duration::from_secs(10);
/// For the last report to be taken.
const LAST_WORDS: Duration = Duration::from_millis(500);
/// What is kept on disk is at most so old while nothing changes.
const KEPT: Duration = Duration::from_secs(30);

/// Reports until the gateway ends; goes on as the process `before`, if there is one.
pub(super) async fn run(
    core: &Arc<Core>,
    dial: &Dial,
    checkpoints: Option<Checkpoints>,
    before: Option<Predecessor>,
    mut leaving: oneshot::Receiver<()>,
) {
    let lease = Arc::clone(core.table.load().lease());
    let (shares, known, leases) = (nobody(core), BTreeSet::new(), [Duration::ZERO; 2]);
    let mut reporter = Reporter { core, lease, shares, leases, known, checkpoints, kept: None };
    if let Some(before) = before {
        tokio::select! {
            () = sleep(SETTLED) => {}
            _ = &mut leaving => return,
        }
        reporter.inherit(&before);
    }
    let mut failures = 0u32;
    for attempt in usize::from(rand::random::<u16>()).. {
        let Some(ended) = reporter.session(dial, attempt, &mut leaving).await else { return };
        let pause = reporter.after(&ended, &mut failures);
        reporter.show();
        tokio::select! {
            () = sleep(pause) => {}
            _ = &mut leaving => return,
        }
    }
}

struct Reporter<'a> {
    core: &'a Arc<Core>,
    lease: Arc<Lease>,
    shares: Shares,
    /// How long leases last, as the control plane says.
    leases: [Duration; 2],
    /// The workers of which something was said.
    known: BTreeSet<WorkerKey>,
    checkpoints: Option<Checkpoints>,
    /// When something was kept last.
    kept: Option<Instant>,
}

/// How a stream ended.
struct Ended {
    /// Whether anything came on it.
    held: bool,
    status: Status,
}

impl Reporter<'_> {
    /// Goes on as the process before, whose leases may last.
    fn inherit(&mut self, found: &Predecessor) {
        tracing::info!(target: SMG, workers = found.grants.len(), "going on with the slots of the process before");
        // More than any number that the process before can have come to: it counted from the start of its own time.
        let number = u64::try_from(since_boot().as_micros()).unwrap_or(u64::MAX / 2);
        self.leases = found.leases;
        self.shares.set_times(found.leases[0], found.leases[1]);
        self.shares.resume(found.process, found.epoch, number, found.heard, &found.grants);
        self.put_into_use();
    }

    /// What follows from the end of a stream, and how long to wait before the next.
    fn after(&mut self, ended: &Ended, failures: &mut u32) -> Duration {
        let Ended { held, status } = ended;
        *failures = if *held { 0 } else { failures.saturating_add(1) };
        let gateway = &self.core.options.gateway_id;
        match status.code() {
            // The next member is asked at once, a few times: one of them leads.
            Code::FailedPrecondition => {}
            Code::AlreadyExists if self.kept.is_none() && self.shares.epoch() > 0 => {
                tracing::info!(target: SMG, "another process took over the slots of the process before");
                self.begin_anew();
            }
            Code::AlreadyExists => {
                tracing::error!(target: SMG, gateway, "another gateway of this name has taken its place: names must differ");
                self.lease.note_away();
                return DISPLACED;
            }
            _ => {
                let reason = status.message();
                tracing::warn!(target: SMG, reason, "no stream for slot reports: serving within the shares held");
            }
        }
        if *failures >= LOOKS {
            self.lease.note_away();
        }
        REDIALS.delay(*failures, rand::random())
    }

    /// Goes on as a process of which no ledger has heard.
    fn begin_anew(&mut self) {
        self.core.process.send_replace(Uuid::new_v4());
        self.shares = nobody(self.core);
        self.share_out();
    }

    /// One stream. `None` when the gateway ends.
    async fn session(&mut self, dial: &Dial, attempt: usize, leaving: &mut oneshot::Receiver<()>) -> Option<Ended> {
        let broken = |status: Status| Some(Ended { held: false, status });
        let (up, receiver) = mpsc::channel(UP_QUEUE);
        let opened = tokio::select! {
            opened = timeout(OPENING, open(dial, attempt, receiver)) => opened,
            _ = &mut *leaving => return None,
        };
        let mut down = match opened {
            Ok(Ok(down)) => down,
            Ok(Err(status)) => return broken(status),
            Err(_) => return broken(Status::deadline_exceeded("the control plane did not take the stream in time")),
        };
        self.shares.forget_mark();
        let mut held = false;
        let mut revision = self.core.revision.subscribe();
        let mut keepalives = interval(KEEPALIVES);
        keepalives.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut all = true;
        let mut last = Instant::now();
        // Not anew with each turn of the loop: what this gateway says must not keep a silent stream alive.
        let mut silent_at = Instant::now() + SILENCE;
        let mut due = None;
        loop {
            let message = tokio::select! {
                message = timeout_at(silent_at, down.message()) => message,
                _ = keepalives.tick() => {
                    self.show();
                    due = None;
                    last = Instant::now();
                    if let Err(status) = send(&up, self.report(std::mem::take(&mut all), false)) {
                        return Some(Ended { held, status });
                    }
                    continue;
                }
                () = sleep_until(due.unwrap_or(last)), if due.is_some() => {
                    due = None;
                    last = Instant::now();
                    if let Err(status) = send(&up, self.report(std::mem::take(&mut all), false)) {
                        return Some(Ended { held, status });
                    }
                    continue;
                }
                () = self.lease.rung(), if due.is_none() => {
                    due = Some((last + TOGETHER).max(Instant::now() + GATHERED));
                    continue;
                }
                _ = revision.changed() => {
                    self.share_out();
                    due = due.or(Some(last + TOGETHER));
                    continue;
                }
                _ = &mut *leaving => {
                    let report = Report { leaving: true, ..self.report(true, false) };
                    // From here on the slots may be another one's: the next process begins anew.
                    self.checkpoints.iter().for_each(Checkpoints::remove);
                    if send(&up, report).is_ok() {
                        drop(up);
                        // Until the desk has read it and ends the stream.
                        let _ = timeout(LAST_WORDS, async { while let Ok(Some(_)) = down.message().await {} }).await;
                    }
                    return None;
                }
            };
            let message = match message {
                Ok(Ok(Some(message))) => message,
                Ok(Ok(None)) => {
                    return Some(Ended { held, status: Status::unavailable("the control plane ended the stream") });
                }
                Ok(Err(status)) => return Some(Ended { held, status }),
                Err(_) => {
                    return Some(Ended { held, status: Status::deadline_exceeded("the control plane fell silent") });
                }
            };
            silent_at = Instant::now() + SILENCE;
            if !held {
                held = true;
                tracing::info!(target: SMG, "reporting slots of decode workers");
            }
            match self.take(message) {
                Ok(Some(marked)) => {
                    last = Instant::now();
                    if let Err(status) = send(&up, self.report(false, marked)) {
                        return Some(Ended { held, status });
                    }
                }
                Ok(None) => {}
                Err(status) => return Some(Ended { held, status }),
            }
        }
    }

    /// Takes an answer in. Something when it is to be reported on at once: whether it asks for what is surely in engines.
    fn take(&mut self, message: pb::Update) -> Result<Option<bool>, Status> {
        let leases = [message.float_millis, message.anchor_millis].map(Duration::from_millis);
        let gateway = &self.core.options.gateway_id;
        let update = wire::update_from_pb(message, gateway, self.shares.process())
            .map_err(|error| Status::internal(error.to_string()))?;
        let (mark, epoch) = (self.shares.mark(), self.shares.epoch());
        if update.epoch < epoch {
            // The leader's word is final, and a stream keeps its order: this is another ledger, which has never heard of this process.
            self.begin_anew();
            return Err(Status::aborted("the control plane has begun another ledger"));
        }
        self.leases = leases;
        self.shares.set_times(leases[0], leases[1]);
        let news = self.shares.apply(&update, since_boot());
        self.put_into_use();
        let is_due = self.kept.is_none_or(|kept| kept.elapsed() > KEPT);
        if let Some(checkpoints) = self.checkpoints.as_ref().filter(|_| news || is_due || epoch != self.shares.epoch())
        {
            checkpoints.store(gateway, &self.shares, self.leases);
            self.kept = Some(Instant::now());
        }
        let marked = self.shares.mark() > mark;
        Ok((news || marked).then_some(marked))
    }

    /// Lets windows know their shares, then lets these count.
    fn put_into_use(&mut self) {
        self.share_out();
        if let Some(ends) = self.shares.ends() {
            self.lease.renew(ends);
        }
        for (_, window) in self.core.table.load().windows() {
            window.look();
        }
    }

    /// Lets windows know their shares, and forgets workers that have left.
    fn share_out(&mut self) {
        let table = self.core.table.load();
        let mut here = BTreeSet::new();
        for (id, window) in table.windows() {
            let worker = id.0.as_u128();
            let (limit, anchored) = self.shares.told(worker);
            window.share(limit, anchored);
            here.insert(worker);
        }
        for gone in self.known.difference(&here) {
            self.shares.forget(*gone);
        }
        self.known = here;
    }

    fn show(&self) {
        let metrics = &self.core.metrics;
        metrics.decode_slot_lease.set(match self.lease.standing() {
            Standing::Whole => 2,
            Standing::Anchored => 1,
            Standing::Nothing => 0,
        });
        let table = self.core.table.load();
        for (id, window) in table.windows() {
            let (Some(usage), Some(worker)) = (window.usage(), table.workers.get(&id)) else { continue };
            let states = [
                ("granted", usage.limit),
                ("anchored", usage.anchored),
                ("in_use", usage.in_use),
                ("waiting", usage.waiting),
            ];
            for (state, slots) in states {
                let labels = [worker.spec.url.as_str(), state];
                metrics.gateway_decode_slots.with_label_values(&labels).set(i64::from(slots));
            }
        }
    }

    fn report(&mut self, all: bool, marked: bool) -> Report {
        let table = self.core.table.load();
        let windows: BTreeMap<WorkerKey, _> = table.windows().map(|(id, window)| (id.0.as_u128(), window)).collect();
        let use_of = |worker: WorkerKey| {
            let window = windows.get(&worker);
            let usage = window.and_then(|window| window.usage());
            let (in_use, waiting) = usage.map_or((0, 0), |usage| (usage.in_use, usage.waiting));
            let surely = window.filter(|_| marked).map_or(0, |window| window.surely());
            (in_use, in_use.saturating_add(waiting), surely)
        };
        self.shares.report(windows.keys().copied(), use_of, all)
    }
}

async fn open(
    dial: &Dial,
    attempt: usize,
    receiver: mpsc::Receiver<pb::Report>,
) -> Result<Streaming<pb::Update>, Status> {
    let channel = dial.connect(attempt).await.map_err(Status::unavailable)?;
    let mut client = SyncClient::new(channel).max_decoding_message_size(16 * 1024 * 1024);
    Ok(client.slots(ReceiverStream::new(receiver)).await?.into_inner())
}

/// Sends a report. A full queue is a dead connection.
fn send(up: &mpsc::Sender<pb::Report>, report: Report) -> Result<(), Status> {
    let message = wire::report_to_pb(&report, since_boot());
    up.try_send(message).map_err(|_| Status::unavailable("reports are not taken any more"))
}
