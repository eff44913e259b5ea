//! The slot ledger's desk: gateways report here which slots of decode workers they use and want, and are told what they may use.
//!
//! Only the leader has one. Ten times a second it turns what was reported, and what its clock says, into one round of the ledger, commits
//! it, and tells each gateway what is new for it. Nothing of a request waits for any of this.
//!
//! Invariants
//! * what a gateway is told is committed;
//! * a round that may not have been committed ends all streams: gateways dial again and say everything anew, so that nothing that was said
//!   is lost;
//! * one stream per gateway, a few messages in its channel: who does not read is cut off.

use std::collections::BTreeMap;
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::Stream;
use parking_lot::Mutex;
use smg_admission::{Answer, Deadlines, Event, Leader, Ledger, ProcessId, Times, WorkerKey, wire};
use smg_fleet::{Wire, WorkerType, dp};
use smg_messages::admission as pb;
use smg_state::{Command, State};
use smg_telemetry::Metrics;
use tokio::sync::mpsc;
use tokio::time::{MissedTickBehavior, interval, timeout};
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::{CancellationToken, DropGuard};
use tonic::{Response, Status, Streaming};

use crate::writer::{Write, Writer};

#[cfg(test)]
mod tests;

/// Longest gateway name, in bytes.
const MAX_NAME_BYTES: usize = 256;
/// Most workers in one report.
const MAX_ROWS: usize = 20_000;
/// Messages between the desk and the transport.
const CHANNEL: usize = 16;

/// How patient the desk is.
#[derive(Debug, Clone, Copy)]
pub struct Timing {
    /// Between two rounds.
    pub tick: Duration,
    /// For any report on a stream.
    pub silence: Duration,
    /// The leases.
    pub leases: Times,
    /// How long requests take at most.
    pub deadlines: Deadlines,
    /// Most gateways.
    pub max_sessions: usize,
}

impl Default for Timing {
    fn default() -> Self {
        Self {
            tick: Duration::from_millis(100),
            silence: Duration::from_secs(10),
            leases: Times::default(),
            deadlines: Deadlines { request: Duration::from_secs(1800), dispatch: Duration::from_secs(5) },
            max_sessions: 1_000,
        }
    }
}

/// The desk. Cheap to clone.
#[derive(Clone)]
pub struct Desk {
    shared: Arc<Shared>,
}

struct Shared {
    writer: Writer,
    metrics: Arc<Metrics>,
    timing: Timing,
    term: Mutex<Option<Term>>,
}

/// What lives as long as this node leads.
struct Term {
    begun: Instant,
    leader: Leader,
    seats: BTreeMap<String, Seat>,
    next_seat: u64,
    /// Ends all streams with the term.
    over: DropGuard,
}

/// A gateway's stream.
struct Seat {
    number: u64,
    process: ProcessId,
    epoch: u64,
    /// The grants it was sent, by worker.
    sent: BTreeMap<WorkerKey, u64>,
    down: mpsc::Sender<Result<pb::Update, Status>>,
}

type Updates = Pin<Box<dyn Stream<Item = Result<pb::Update, Status>> + Send>>;

impl Desk {
    /// A desk that is closed until [`Desk::run`].
    pub fn new(writer: Writer, metrics: Arc<Metrics>, timing: Timing) -> Self {
        Self { shared: Arc::new(Shared { writer, metrics, timing, term: Mutex::new(None) }) }
    }

    /// Keeps the desk open for the term in which this node leads.
    pub(crate) async fn run(self, term: CancellationToken) {
        // What was committed before must be seen before anything is added to it.
        while let Err(error) = self.shared.writer.barrier().await {
            tracing::warn!(target: "smg", %error, "the slot ledger waits for the store");
            if term.is_cancelled() {
                return;
            }
            tokio::task::yield_now().await;
        }
        self.shared.reopen();
        let mut ticks = interval(self.shared.timing.tick);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                _ = ticks.tick() => self.shared.round().await,
                () = term.cancelled() => break,
            }
        }
        *self.shared.term.lock() = None;
    }

    /// Serves a gateway's stream.
    ///
    /// # Errors
    /// When this node does not lead, or has no room.
    pub(crate) fn session(&self, up: Streaming<pb::Report>) -> Result<Response<Updates>, Status> {
        let over = match &*self.shared.term.lock() {
            Some(term) => term.over.token().clone(),
            None => return Err(Status::failed_precondition("this member of the control plane does not lead")),
        };
        let (down, receiver) = mpsc::channel(CHANNEL);
        let shared = Arc::clone(&self.shared);
        smg_net::spawn("slot-session", async move { shared.listen(up, down, over).await });
        Ok(Response::new(Box::pin(ReceiverStream::new(receiver))))
    }
}

impl Shared {
    fn reopen(&self) {
        let leader = Leader::new(self.timing.leases, self.timing.deadlines);
        let over = CancellationToken::new().drop_guard();
        *self.term.lock() = Some(Term { begun: Instant::now(), leader, seats: BTreeMap::new(), next_seat: 0, over });
    }

    /// Takes a gateway's reports in until its stream ends.
    async fn listen(
        &self,
        mut up: Streaming<pb::Report>,
        down: mpsc::Sender<Result<pb::Update, Status>>,
        over: CancellationToken,
    ) {
        let mut seat = None;
        let end = loop {
            let message = tokio::select! {
                message = timeout(self.timing.silence, up.message()) => message,
                () = over.cancelled() => break Some(Status::aborted("the ledger begins anew: report everything")),
            };
            let message = match message {
                Ok(Ok(Some(message))) => message,
                Ok(Ok(None) | Err(_)) => break None,
                Err(_) => break Some(Status::deadline_exceeded("the gateway was silent for too long")),
            };
            if let Err(status) = self.take(message, &down, &mut seat) {
                break Some(status);
            }
        };
        if let Some(status) = end {
            tracing::info!(target: "smg", code = ?status.code(), reason = status.message(), "a gateway's slot session was cut");
            // Nobody may be reading; the stream ends either way.
            let _ = down.try_send(Err(status));
        }
        if let Some((gateway, number)) = seat
            && let Some(term) = &mut *self.term.lock()
            && term.seats.get(&gateway).is_some_and(|seat| seat.number == number)
        {
            term.seats.remove(&gateway);
        }
    }

    /// Takes one report in. The first one takes the gateway's seat; another process of it, or another stream, loses it.
    fn take(
        &self,
        message: pb::Report,
        down: &mpsc::Sender<Result<pb::Update, Status>>,
        seat: &mut Option<(String, u64)>,
    ) -> Result<(), Status> {
        if message.gateway.is_empty() || message.gateway.len() > MAX_NAME_BYTES || message.rows.len() > MAX_ROWS {
            let limits = format!("a report needs a name of 1 to {MAX_NAME_BYTES} bytes and at most {MAX_ROWS} rows");
            return Err(Status::invalid_argument(limits));
        }
        let (report, sent) =
            wire::report_from_pb(message).map_err(|error| Status::invalid_argument(error.to_string()))?;
        let state = self.writer.store().local();
        let ledger = state.ledger();
        if ledger.sessions().get(&report.gateway).is_some_and(|session| session.is_replaced(report.process)) {
            return Err(Status::already_exists("another process of this gateway took its place"));
        }
        let mut term = self.term.lock();
        let Some(term) = &mut *term else {
            return Err(Status::failed_precondition("this member of the control plane does not lead any more"));
        };
        match seat {
            None => {
                if term.seats.len() >= self.timing.max_sessions && !term.seats.contains_key(&report.gateway) {
                    return Err(Status::resource_exhausted("the control plane has no room for another gateway"));
                }
                term.next_seat += 1;
                let (number, process) = (term.next_seat, report.process);
                let taken = Seat { number, process, epoch: 0, sent: BTreeMap::new(), down: down.clone() };
                term.seats.insert(report.gateway.clone(), taken);
                *seat = Some((report.gateway.clone(), number));
            }
            Some((gateway, number)) => {
                let its_own = term.seats.get(gateway).is_some_and(|seat| seat.number == *number);
                if !its_own || *gateway != report.gateway {
                    return Err(Status::aborted(
                        "another stream of this gateway took its place, or the ledger begins anew",
                    ));
                }
            }
        }
        let now = term.begun.elapsed();
        term.leader.hear(ledger, report, sent, now);
        Ok(())
    }

    /// One round: what happened, committed, and told.
    async fn round(&self) {
        let state = self.writer.store().local();
        let events = {
            let mut term = self.term.lock();
            let Some(term) = &mut *term else { return };
            for event in changed_windows(&state) {
                term.leader.push(event);
            }
            let now = term.begun.elapsed();
            term.leader.round(state.ledger(), |_| None, now)
        };
        if !events.is_empty() {
            let number = state.ledger().rounds() + 1;
            let write = Write::of("leader", Command::LedgerRound { number, events });
            if let Err(error) = self.writer.write(write).await {
                tracing::warn!(target: "smg", %error, "a round of the slot ledger was not committed: gateways are asked to report anew");
                if self.term.lock().is_some() {
                    self.reopen();
                }
                return;
            }
        }
        let state = self.writer.store().local();
        self.tell(state.ledger());
    }

    /// Tells each gateway what is new for it.
    fn tell(&self, ledger: &Ledger) {
        let mut term = self.term.lock();
        let Some(term) = &mut *term else { return };
        let mut grants = Vec::new();
        for (gateway, seat) in &mut term.seats {
            let Some(session) = ledger.sessions().get(gateway).filter(|session| session.process == seat.process) else {
                continue;
            };
            if seat.epoch != session.epoch {
                (seat.epoch, seat.sent) = (session.epoch, BTreeMap::new());
            }
            for grant in ledger.grants_of(gateway) {
                if seat.sent.insert(grant.worker, grant.seq) != Some(grant.seq) {
                    grants.push(grant);
                }
            }
        }
        let answers = term.leader.answers(ledger, grants);
        for Answer { gateway, process, update } in answers {
            let Some(seat) = term.seats.get(&gateway).filter(|seat| seat.process == process) else { continue };
            let message = wire::update_to_pb(&update, self.timing.leases.float, self.timing.leases.anchor);
            if seat.down.try_send(Ok(message)).is_err() {
                tracing::warn!(target: "smg", gateway, "a gateway does not read what it is told of its slots");
                term.seats.remove(&gateway);
            }
        }
        self.metrics.slot_sessions.set(i64::try_from(term.seats.len()).unwrap_or(i64::MAX));
    }
}

/// Decode workers whose window is not what the ledger has.
fn changed_windows(state: &State) -> Vec<Event> {
    let ledger = state.ledger();
    let aware = state.policy("").is_some_and(|record| record.document.dp_aware == Some(true));
    let decodes =
        state.workers().filter(|worker| worker.spec.worker_type == WorkerType::Decode && worker.wire() == Wire::Grpc);
    let ranks = decodes.flat_map(|worker| if aware { dp::ranks(worker) } else { vec![Arc::clone(worker)] });
    let wanted: BTreeMap<WorkerKey, u32> =
        ranks.filter_map(|worker| Some((worker.id.0.as_u128(), worker.running_window()?))).collect();
    let gone = ledger.pools().keys().filter(|worker| !wanted.contains_key(worker));
    let mut events: Vec<Event> = gone.map(|worker| Event::Window(*worker, None)).collect();
    events.extend(wanted.iter().filter_map(|(worker, window)| {
        let known = ledger.pools().get(worker).map(|pool| pool.window);
        (known != Some(*window)).then_some(Event::Window(*worker, Some(*window)))
    }));
    events
}
