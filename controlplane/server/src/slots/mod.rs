//! The slot ledger's desk: gateways report here which slots of decode workers they use and want, and are told what they may use.
//!
//! Only the leader has one. Ten times a second, and sometimes earlier when slots are to move ([`Pace`]), it turns what was reported, and what
//! its clock says, into one round of the ledger, commits it, and tells each gateway what is new for it. Nothing of a request waits for any
//! of this.
//!
//! Invariants
//! * what a gateway is told is committed, and a lease is renewed only by a node that a quorum takes for the leader at that moment;
//! * a round that may not have been committed ends all streams: gateways dial again and say everything anew, so that nothing that was said
//!   is lost;
//! * one stream per gateway, a few messages in its channel: who does not read is cut off.
//!
//! Slots of gateways that are not heard of any more are free as soon as [`evidence`] says so, which engines give.

use std::collections::BTreeMap;
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::Stream;
use parking_lot::Mutex;
use smg_admission::pool::{Pool, Totals};
use smg_admission::{Answer, Deadlines, Event, Leader, Ledger, Pace, ProcessId, Times, Update, WorkerKey, wire};
use smg_fleet::{Wire, Worker, WorkerType, dp};
use smg_messages::admission as pb;
use smg_state::{Command, State};
use smg_telemetry::Metrics;
use tokio::sync::{Notify, mpsc};
use tokio::time::{sleep_until, timeout};
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::{CancellationToken, DropGuard};
use tonic::{Response, Status, Streaming};
use uuid::Uuid;

use crate::probe::client::ProbeClient;
use crate::writer::{Write, Writer};

mod evidence;
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
    /// Between two rounds, unless one comes early.
    pub tick: Duration,
    /// How long reports are gathered before the first round of a term, where the ledger knows nobody although it was in use: it was
    /// restored, and gateways have requests running that it does not know of.
    pub gather: Duration,
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
            gather: Duration::from_secs(3),
            silence: Duration::from_secs(10),
            leases: Times::default(),
            deadlines: Deadlines { request: Duration::from_secs(1800), dispatch: Duration::from_secs(2) },
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
    client: ProbeClient,
    metrics: Arc<Metrics>,
    timing: Timing,
    term: Mutex<Option<Term>>,
    /// Rung when slots are to move.
    moves: Notify,
}

/// What lives as long as this node leads.
struct Term {
    begun: Instant,
    leader: Leader,
    seats: BTreeMap<String, Seat>,
    next_seat: u64,
    /// The last mark that gateways were to be sent.
    mark: u64,
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
    /// The last mark that it repeated, and what it said then to be surely in engines ever since the mark before.
    answer: (u64, BTreeMap<WorkerKey, u32>),
    down: mpsc::Sender<Result<pb::Update, Status>>,
}

type Updates = Pin<Box<dyn Stream<Item = Result<pb::Update, Status>> + Send>>;

impl Desk {
    /// A desk that is closed until [`Desk::run`].
    pub fn new(writer: Writer, client: ProbeClient, metrics: Arc<Metrics>, timing: Timing) -> Self {
        Self {
            shared: Arc::new(Shared { writer, client, metrics, timing, term: Mutex::new(None), moves: Notify::new() }),
        }
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
        tokio::select! {
            () = self.shared.rounds() => {}
            () = evidence::gather(&self.shared) => {}
            () = term.cancelled() => {}
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
        *self.term.lock() =
            Some(Term { begun: Instant::now(), leader, seats: BTreeMap::new(), next_seat: 0, mark: 0, over });
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
                let (sent, answer) = (BTreeMap::new(), (0, BTreeMap::new()));
                let taken = Seat { number, process, epoch: 0, sent, answer, down: down.clone() };
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
        if let Some(seat) = term.seats.get_mut(&report.gateway).filter(|seat| report.mark > seat.answer.0) {
            seat.answer = (report.mark, report.rows.iter().map(|row| (row.worker, row.surely)).collect());
        }
        let overdrawn = ledger.overdrawn(&report);
        if overdrawn > 0 {
            let gateway = &report.gateway;
            tracing::error!(target: "smg", gateway, overdrawn, "INV-2: a gateway uses more slots than it was given");
            self.metrics.slot_invariant_failures.with_label_values(&["INV-2"]).inc_by(overdrawn as u64);
        }
        let now = term.begun.elapsed();
        if term.leader.hear(ledger, report, sent, now) {
            self.moves.notify_one();
        }
        Ok(())
    }

    /// Closes rounds for ever.
    async fn rounds(&self) {
        let begun = Instant::now();
        let mut pace = Pace::new(self.timing.tick, Duration::ZERO);
        loop {
            let mut asked = None;
            loop {
                let due = begun + pace.due(asked);
                tokio::select! {
                    () = sleep_until(due.into()) => break,
                    () = self.moves.notified() => asked = asked.or_else(|| Some(begun.elapsed())),
                }
            }
            let now = begun.elapsed();
            pace.opened(now, self.round().await);
        }
    }

    /// One round: what happened, committed, and told. True if something has happened.
    async fn round(&self) -> bool {
        let state = self.writer.store().local();
        let (events, owes_answers) = {
            let mut term = self.term.lock();
            let Some(term) = &mut *term else { return false };
            let ledger = state.ledger();
            let forgetful = ledger.rounds() > 0 && ledger.sessions().is_empty();
            if forgetful && term.begun.elapsed() < self.timing.gather {
                return false;
            }
            for event in changed_windows(&state) {
                term.leader.push(event);
            }
            let now = term.begun.elapsed();
            (term.leader.round(state.ledger(), |_| None, now), term.leader.owes_answers())
        };
        let news = !events.is_empty();
        let agreed = if news {
            let number = state.ledger().rounds() + 1;
            let write = Write::of("leader", Command::LedgerRound { number, events });
            self.writer.write(write).await.map(drop).map_err(|error| error.to_string())
        } else if owes_answers {
            // An answer renews leases. Who was a leader once, and has not heard yet that another one is, must not renew what that one ends.
            self.writer.barrier().await.map(drop).map_err(|error| error.to_string())
        } else {
            Ok(())
        };
        if let Err(error) = agreed {
            tracing::warn!(target: "smg", error, "a round of the slot ledger was not committed: gateways are asked to report anew");
            if self.term.lock().is_some() {
                self.reopen();
            }
            return news;
        }
        let after = self.writer.store().local();
        if !Arc::ptr_eq(state.ledger(), after.ledger()) {
            self.check(state.ledger(), after.ledger());
            self.show(&after);
        }
        self.tell(after.ledger());
        news
    }

    /// INV-1: what is given away of a worker is no more than it has, or at least not growing.
    fn check(&self, before: &Ledger, after: &Ledger) {
        for (worker, pool) in after.pools() {
            let held = pool.held();
            let bound = before.pools().get(worker).map_or(0, Pool::held).max(u64::from(pool.window));
            if held > bound {
                tracing::error!(target: "smg", worker = %Uuid::from_u128(*worker), held, window = pool.window, "INV-1: more slots are given away than there are");
                self.metrics.slot_invariant_failures.with_label_values(&["INV-1"]).inc();
            }
        }
    }

    /// The ledger as gauges.
    fn show(&self, state: &State) {
        for worker in gated(state) {
            let Some(pool) = state.ledger().pools().get(&worker.id.0.as_u128()) else { continue };
            let totals = Totals::of(pool);
            for (name, slots) in totals.named() {
                let gauge = self.metrics.decode_slots.with_label_values(&[worker.spec.url.as_str(), name]);
                gauge.set(i64::try_from(slots).unwrap_or(i64::MAX));
            }
        }
    }

    /// Lets gateways repeat a new mark, which it returns; `None` when this node does not lead any more.
    fn mark(&self) -> Option<u64> {
        let mut term = self.term.lock();
        let term = term.as_mut()?;
        term.mark += 1;
        let mark = term.mark;
        for (gateway, seat) in term.seats.iter_mut().filter(|(_, seat)| seat.epoch > 0) {
            let update = Update { epoch: seat.epoch, echo: None, grants: Vec::new(), mark };
            // One that does not read loses its seat with the next answer.
            self.send(seat, gateway, &update);
        }
        Some(mark)
    }

    /// Sends a gateway something; false when it does not read.
    fn send(&self, seat: &Seat, gateway: &str, update: &Update) -> bool {
        let message = wire::update_to_pb(update, self.timing.leases.float, self.timing.leases.anchor);
        let sent = seat.down.try_send(Ok(message)).is_ok();
        if !sent {
            tracing::warn!(target: "smg", gateway, "a gateway does not read what it is told of its slots");
        }
        sent
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
        let mark = term.mark;
        for Answer { gateway, process, update } in term.leader.answers(ledger, grants) {
            let Some(seat) = term.seats.get_mut(&gateway).filter(|seat| seat.process == process) else { continue };
            if !self.send(seat, &gateway, &Update { mark, ..update }) {
                term.seats.remove(&gateway);
            }
        }
        self.metrics.slot_sessions.set(i64::try_from(term.seats.len()).unwrap_or(i64::MAX));
    }
}

/// The decode workers whose windows count, each of the ranks for itself where requests are routed to ranks.
pub(crate) fn gated(state: &State) -> impl Iterator<Item = Arc<Worker>> {
    let aware = state.policy("").is_some_and(|record| record.document.dp_aware == Some(true));
    let decodes =
        state.workers().filter(|worker| worker.spec.worker_type == WorkerType::Decode && worker.wire() == Wire::Grpc);
    decodes.flat_map(move |worker| if aware { dp::ranks(worker) } else { vec![Arc::clone(worker)] })
}

/// Decode workers whose window is not what the ledger has.
fn changed_windows(state: &State) -> Vec<Event> {
    let ledger = state.ledger();
    let wanted: BTreeMap<WorkerKey, u32> =
        gated(state).filter_map(|worker| Some((worker.id.0.as_u128(), worker.running_window()?))).collect();
    let gone = ledger.pools().keys().filter(|worker| !wanted.contains_key(worker));
    let mut events: Vec<Event> = gone.map(|worker| Event::Window(*worker, None)).collect();
    events.extend(wanted.iter().filter_map(|(worker, window)| {
        let known = ledger.pools().get(worker).map(|pool| pool.window);
        (known != Some(*window)).then_some(Event::Window(*worker, Some(*window)))
    }));
    events
}
