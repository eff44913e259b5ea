#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
//! The rules of a leg, with an engine played by a channel and time that moves by itself.

use futures::stream;
use parking_lot::Mutex;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

use super::super::status::FailureKind;
use super::*;

/// A reply; true = the last one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Said(bool);

impl Reply for Said {
    fn completes(&self) -> bool {
        self.0
    }
}

type Line = Result<Said, LegFailure>;

/// What happened to the leg, with the seconds since the test began.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Event {
    Answered,
    Failed(FailureKind),
    Abort(u64),
    Over(u64),
}

#[derive(Clone)]
struct Journal {
    events: Arc<Mutex<Vec<Event>>>,
    begun: Instant,
}

impl Journal {
    fn new() -> Self {
        Self { events: Arc::default(), begun: Instant::now() }
    }

    fn note(&self, event: Event) {
        self.events.lock().push(event);
    }

    fn seconds(&self) -> u64 {
        self.begun.elapsed().as_secs()
    }

    fn aborts(&self) -> Vec<u64> {
        let aborts = self.events.lock();
        aborts.iter().filter_map(|event| if let Event::Abort(at) = event { Some(*at) } else { None }).collect()
    }
}

/// What a leg holds in these tests.
struct Held(Journal);

impl Account<Said> for Held {
    fn answered(&mut self) {
        self.0.note(Event::Answered);
    }

    fn failed(&mut self, failure: &LegFailure) {
        self.0.note(Event::Failed(failure.kind));
    }

    fn aborted(&mut self, _: bool) {}

    fn discarded(&mut self, _: Said) {}
}

impl Drop for Held {
    fn drop(&mut self) {
        self.0.note(Event::Over(self.0.seconds()));
    }
}

/// An engine. The head of its response comes with its first message; an abort ends its stream if it `obeys`.
struct Mock {
    lines: Option<UnboundedReceiver<Line>>,
    journal: Journal,
    obeys: Option<Arc<Mutex<Option<UnboundedSender<Line>>>>>,
}

impl Exchange for Mock {
    type Reply = Said;
    type Replies = Pin<Box<dyn Stream<Item = Line> + Send>>;

    fn open(&mut self) -> impl Future<Output = Result<Self::Replies, LegFailure>> + Send + 'static {
        let mut lines = self.lines.take().unwrap();
        async move {
            let first = lines.recv().await;
            let first = match first {
                Some(Err(failure)) => return Err(failure),
                first => stream::iter(first),
            };
            let rest = stream::unfold(lines, |mut lines| async move { Some((lines.recv().await?, lines)) });
            Ok(Box::pin(first.chain(rest)) as Self::Replies)
        }
    }

    fn abort(&self) -> impl Future<Output = Result<(), LegFailure>> + Send + 'static {
        self.journal.note(Event::Abort(self.journal.seconds()));
        if let Some(line) = &self.obeys {
            line.lock().take();
        }
        async { Ok(()) }
    }
}

struct Playing {
    leg: Leg<Said>,
    line: Arc<Mutex<Option<UnboundedSender<Line>>>>,
    journal: Journal,
    task: tokio::task::JoinHandle<()>,
    closing: CancellationToken,
}

impl Playing {
    fn start(part: Part, obeys: bool) -> Self {
        Self::of(part, obeys, 1)
    }

    fn of(part: Part, obeys: bool, samples: u32) -> Self {
        let (line, lines) = unbounded_channel();
        let (line, journal) = (Arc::new(Mutex::new(Some(line))), Journal::new());
        let closing = CancellationToken::new();
        let exchange = Mock { lines: Some(lines), journal: journal.clone(), obeys: obeys.then(|| Arc::clone(&line)) };
        let order = Order {
            exchange,
            account: Held(journal.clone()),
            part,
            samples,
            deadline: Instant::now() + Duration::from_secs(600),
            closing: closing.clone(),
        };
        let (leg, task) = prepare(order);
        Self { leg, line, journal, task: tokio::spawn(task), closing }
    }

    fn say(&self, line: Line) {
        let _ = self.line.lock().as_ref().unwrap().send(line);
    }

    fn hang_up(&self) {
        self.line.lock().take();
    }
}

/// Lets the tasks of a paused test run until all of them wait.
async fn settle() {
    for _ in 0..20 {
        tokio::task::yield_now().await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_prefill_whose_client_leaves_is_aborted_at_once_though_it_never_answered() {
    for part in [Part::Prefill, Part::Regular] {
        let playing = Playing::start(part, true);
        settle().await;
        drop(playing.leg);
        playing.task.await.unwrap();
        assert_eq!(*playing.journal.events.lock(), [Event::Abort(0), Event::Over(0)], "{part:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_decode_that_has_not_answered_is_aborted_with_its_first_reply() {
    let playing = Playing::start(Part::Decode, true);
    drop(playing.leg);
    tokio::time::sleep(Duration::from_secs(3)).await;
    assert_eq!(playing.journal.aborts(), [] as [u64; 0]);
    playing.line.lock().as_ref().unwrap().send(Ok(Said(false))).unwrap();
    playing.task.await.unwrap();
    assert_eq!(*playing.journal.events.lock(), [Event::Answered, Event::Abort(3), Event::Over(3)]);
}

#[tokio::test(start_paused = true)]
async fn a_decode_that_stays_silent_is_aborted_after_thirty_seconds_and_holds_its_place_until_then() {
    let playing = Playing::start(Part::Decode, true);
    drop(playing.leg);
    playing.task.await.unwrap();
    assert_eq!(*playing.journal.events.lock(), [Event::Abort(30), Event::Over(30)]);
}

#[tokio::test(start_paused = true)]
async fn a_decode_that_ends_by_itself_is_not_aborted() {
    for last in [Some(Ok(Said(true))), Some(Err(LegFailure::sample("gone"))), None] {
        let playing = Playing::start(Part::Decode, true);
        drop(playing.leg);
        tokio::time::sleep(Duration::from_secs(2)).await;
        if let Some(last) = last {
            playing.line.lock().as_ref().unwrap().send(last).unwrap();
        }
        playing.line.lock().take();
        playing.task.await.unwrap();
        assert_eq!(playing.journal.aborts(), [] as [u64; 0]);
        assert_eq!(playing.journal.events.lock().last(), Some(&Event::Over(2)));
    }
}

#[tokio::test(start_paused = true)]
async fn a_decode_that_was_answering_is_aborted_at_once() {
    let mut playing = Playing::start(Part::Decode, true);
    playing.say(Ok(Said(false)));
    assert_eq!(playing.leg.next().await, Some(Ok(Said(false))));
    drop(playing.leg);
    playing.task.await.unwrap();
    assert_eq!(*playing.journal.events.lock(), [Event::Answered, Event::Abort(0), Event::Over(0)]);
}

#[tokio::test(start_paused = true)]
async fn a_decode_whose_prefill_never_started_is_aborted_at_once() {
    let playing = Playing::start(Part::Decode, true);
    settle().await;
    playing.leg.give_up();
    playing.task.await.unwrap();
    assert_eq!(*playing.journal.events.lock(), [Event::Abort(0), Event::Over(0)]);
}

#[tokio::test(start_paused = true)]
async fn an_abort_is_repeated_while_the_engine_goes_on_and_the_leg_ends_all_the_same() {
    let playing = Playing::start(Part::Prefill, false);
    drop(playing.leg);
    playing.task.await.unwrap();
    let aborts = playing.journal.aborts();
    assert!(aborts.len() > 2, "{aborts:?}");
    assert_eq!(playing.journal.events.lock().last(), Some(&Event::Over(10)));
}

#[tokio::test(start_paused = true)]
async fn a_complete_output_is_never_aborted() {
    let mut playing = Playing::start(Part::Decode, false);
    playing.say(Ok(Said(true)));
    assert_eq!(playing.leg.next().await, Some(Ok(Said(true))));
    drop(playing.leg);
    playing.task.await.unwrap();
    assert_eq!(*playing.journal.events.lock(), [Event::Answered, Event::Over(10)]);
}

#[tokio::test(start_paused = true)]
async fn what_a_leg_holds_is_given_back_before_its_reader_learns_the_end() {
    for (line, kind) in [
        (Some(Ok(Said(true))), None),
        (Some(Err(LegFailure::sample("no"))), Some(FailureKind::Sample)),
        (None, Some(FailureKind::Incomplete)),
    ] {
        let mut playing = Playing::start(Part::Prefill, true);
        if let Some(line) = line {
            playing.say(line);
        }
        playing.hang_up();
        let mut failure = None;
        while let Some(next) = playing.leg.next().await {
            failure = next.err().map(|failure| failure.kind);
        }
        assert_eq!(failure, kind);
        assert_eq!(playing.journal.events.lock().last(), Some(&Event::Over(0)));
        assert_eq!(playing.journal.aborts(), [] as [u64; 0]);
    }
}

#[tokio::test(start_paused = true)]
async fn an_engine_whose_stream_broke_or_cannot_be_read_is_told_to_stop_and_holds_its_place_until_then() {
    for part in [Part::Prefill, Part::Decode] {
        let mut playing = Playing::start(part, false);
        playing.say(Err(LegFailure::broken("no message of this engine")));
        let failure = playing.leg.next().await.unwrap().unwrap_err();
        assert_eq!(failure.kind, FailureKind::Broken);
        playing.task.await.unwrap();
        let events = playing.journal.events.lock();
        assert_eq!(*events, [Event::Failed(FailureKind::Broken), Event::Abort(0), Event::Over(0)], "{part:?}");
    }
    // The same when nobody waits for it any more.
    let playing = Playing::start(Part::Decode, false);
    drop(playing.leg);
    tokio::time::sleep(Duration::from_secs(3)).await;
    playing.line.lock().as_ref().unwrap().send(Err(LegFailure::broken("no message of this engine"))).unwrap();
    playing.task.await.unwrap();
    assert_eq!(*playing.journal.events.lock(), [Event::Abort(3), Event::Over(3)]);
}

#[tokio::test(start_paused = true)]
async fn an_engine_that_failed_one_of_several_samples_is_told_to_stop_with_the_others() {
    let mut playing = Playing::of(Part::Decode, false, 2);
    playing.say(Ok(Said(false)));
    playing.say(Err(LegFailure::sample("no KV")));
    assert_eq!(playing.leg.next().await, Some(Ok(Said(false))));
    assert_eq!(playing.leg.next().await.unwrap().unwrap_err().kind, FailureKind::Sample);
    playing.task.await.unwrap();
    let events = playing.journal.events.lock();
    assert_eq!(*events, [Event::Answered, Event::Failed(FailureKind::Sample), Event::Abort(0), Event::Over(0)]);
}

#[tokio::test(start_paused = true)]
async fn what_nobody_has_read_of_a_leg_can_be_looked_at_when_it_ends() {
    let mut playing = Playing::start(Part::Prefill, true);
    playing.say(Ok(Said(false)));
    playing.say(Ok(Said(true)));
    assert_eq!(playing.leg.next().await, Some(Ok(Said(false))));
    settle().await;
    assert_eq!(playing.leg.unread().collect::<Vec<_>>(), [Ok(Said(true))]);
    playing.hang_up();
    playing.task.await.unwrap();
    assert_eq!(playing.journal.aborts(), [] as [u64; 0]);
}

#[tokio::test(start_paused = true)]
async fn a_leg_whose_time_is_over_fails_and_is_aborted() {
    let mut playing = Playing::start(Part::Prefill, true);
    let failure = playing.leg.next().await.unwrap().unwrap_err();
    assert_eq!(failure.kind, FailureKind::TimedOut);
    playing.task.await.unwrap();
    assert_eq!(
        *playing.journal.events.lock(),
        [Event::Failed(FailureKind::TimedOut), Event::Abort(600), Event::Over(600)]
    );
}

#[tokio::test(start_paused = true)]
async fn a_reader_that_stops_reading_stops_the_engine_and_its_leaving_is_noticed() {
    let playing = Playing::start(Part::Decode, true);
    for _ in 0..10 * QUEUE {
        playing.say(Ok(Said(false)));
    }
    settle().await;
    drop(playing.leg);
    playing.task.await.unwrap();
    assert_eq!(playing.journal.aborts(), [0]);
}

#[tokio::test(start_paused = true)]
async fn a_process_that_ends_does_not_wait_for_a_silent_decode() {
    let playing = Playing::start(Part::Decode, true);
    let closing = playing.closing.clone();
    drop(playing.leg);
    tokio::time::sleep(Duration::from_secs(1)).await;
    closing.cancel();
    playing.task.await.unwrap();
    assert_eq!(*playing.journal.events.lock(), [Event::Abort(1), Event::Over(1)]);
}
