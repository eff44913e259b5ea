//! One leg over gRPC: a request to one worker, from its dispatch until the engine is done with it.
//!
//! Problem: an engine goes on with a request until it is told to stop, and a decode engine that waits for a KV cache says nothing, not even
//! a response head, because servicers send it with their first message. So a leg is a task of its own. It knows its request id from the
//! moment of dispatch, notices at once when its reader goes away, and can abort a request that has not been answered yet.
//!
//! Rules (SMG PD docs, "Failures, Cancellation, and Streaming")
//! * a leg whose reader left is aborted: a prefill or a lone worker at once; a decode after its first reply or [`DEFERRAL`], whichever is
//!   first, because its engine may be in the middle of a transfer; a decode whose prefill never started, and which therefore receives
//!   nothing, at once too;
//! * a leg that ended by itself, or whose output is complete, is not aborted; one whose stream broke off on the way, or cannot be read, or of
//!   whose samples the engine failed one, is: its engine goes on;
//! * an abort that overtook its request would be lost, so it is repeated as long as the engine keeps the stream open.
//!
//! Invariants
//! * what the leg holds (its load, its place in the decode window, its room) is given back when the leg is over, and not before;
//! * each leg is over in bounded time: at its deadline, or [`DEFERRAL`] and [`WIND_DOWN`] after its reader left;
//! * replies wait in a bounded channel: a slow reader slows the engine down;
//! * what happens is charged to this leg's worker and to no other; a leg that was cut short before its first reply says nothing about it.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use futures::FutureExt;
use futures::stream::{Stream, StreamExt};
use tokio::sync::mpsc;
use tokio::time::{Instant, Sleep, sleep, sleep_until, timeout};
use tokio_util::sync::CancellationToken;

use super::status::LegFailure;

/// How long the abort of a decode leg waits for its first reply.
pub const DEFERRAL: Duration = Duration::from_secs(30);
/// How long a leg waits for its engine to end an aborted or complete request.
pub const WIND_DOWN: Duration = Duration::from_secs(10);
/// The same when the process is about to end.
const LAST_WIND_DOWN: Duration = Duration::from_secs(2);
/// How long an abort may take.
const ABORT_TIMEOUT: Duration = Duration::from_secs(10);
/// The pause before an abort is repeated. Doubles each time.
const REPEAT: Duration = Duration::from_millis(500);
/// Replies that wait for their reader.
const QUEUE: usize = 32;

/// What a leg is for: it decides when an abort is sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part {
    /// Computes the KV cache.
    Prefill,
    /// Takes it over.
    Decode,
    /// Serves alone.
    Regular,
}

impl Part {
    /// The name in labels and messages.
    pub fn as_str(self) -> &'static str {
        match self {
            Part::Prefill => "prefill",
            Part::Decode => "decode",
            Part::Regular => "regular",
        }
    }
}

/// A message of an engine's stream, as far as a leg reads it.
pub trait Reply: Send + 'static {
    /// Whether it is the last of one sample.
    fn completes(&self) -> bool;
}

/// The conversation with the engine.
pub trait Exchange: Send + 'static {
    /// Its messages.
    type Reply: Reply;
    /// Its stream.
    type Replies: Stream<Item = Result<Self::Reply, LegFailure>> + Send + Unpin + 'static;

    /// Sends the request. Called once.
    fn open(&mut self) -> impl Future<Output = Result<Self::Replies, LegFailure>> + Send + 'static;

    /// Tells the engine to stop. An engine that does not know the request says so without an error.
    fn abort(&self) -> impl Future<Output = Result<(), LegFailure>> + Send + 'static;
}

/// What a leg holds and who learns how it went. Dropped when the leg is over.
pub trait Account<R>: Send + 'static {
    /// The engine has answered for the first time.
    fn answered(&mut self);
    /// Whether the request is surely in the engine: it has answered, its end was not seen, and all that it said was read.
    fn is_sure(&mut self, _sure: bool) {}
    /// The leg broke off.
    fn failed(&mut self, failure: &LegFailure);
    /// An abort was sent, and taken or not.
    fn aborted(&mut self, taken: bool);
    /// A reply that nobody waited for any more.
    fn discarded(&mut self, reply: R);
}

/// A leg to be run.
pub struct Order<E, A> {
    /// The conversation.
    pub exchange: E,
    /// What it holds.
    pub account: A,
    /// What it is for.
    pub part: Part,
    /// Samples whose output it brings.
    pub samples: u32,
    /// When its time is over.
    pub deadline: Instant,
    /// When the process ends.
    pub closing: CancellationToken,
}

/// The reader's end of a leg. Dropping it ends the leg.
#[derive(Debug)]
pub struct Leg<R> {
    replies: mpsc::Receiver<Result<R, LegFailure>>,
    at_once: Arc<AtomicBool>,
}

impl<R> Leg<R> {
    /// The next reply; none when the leg has ended well.
    pub async fn next(&mut self) -> Option<Result<R, LegFailure>> {
        self.replies.recv().await
    }

    /// The same, for bodies.
    pub fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<R, LegFailure>>> {
        self.replies.poll_recv(cx)
    }

    /// What the engine has said and nobody has read. The leg ends with it.
    pub fn unread(&mut self) -> impl Iterator<Item = Result<R, LegFailure>> {
        let replies = &mut self.replies;
        replies.close();
        std::iter::from_fn(move || replies.try_recv().ok())
    }

    /// Ends the leg although its engine may not have answered: nothing is being transferred to it.
    pub fn give_up(self) {
        self.at_once.store(true, Ordering::Release);
    }
}

/// Prepares a leg: its reader's end, and the task that runs it.
pub fn prepare<E: Exchange, A: Account<E::Reply>>(
    order: Order<E, A>,
) -> (Leg<E::Reply>, impl Future<Output = ()> + Send + 'static) {
    let (sender, replies) = mpsc::channel(QUEUE);
    let at_once = Arc::new(AtomicBool::new(false));
    let leg = Leg { replies, at_once: Arc::clone(&at_once) };
    (leg, Supervisor::new(order, at_once).run(sender))
}

/// How the reading of a leg ended.
enum Stopped {
    /// The stream ended well.
    Ended,
    /// The stream broke off.
    Failed(LegFailure),
    /// The reader went away or the time was over: the engine is not done.
    Unfinished,
}

/// What came of waiting for the first reply of a request that nobody waits for any more.
enum Waited {
    /// The engine goes on with it.
    Goes,
    /// The engine has ended it.
    Ended,
    /// The engine goes on, but what it says cannot be heard.
    Lost,
}

struct Supervisor<E: Exchange, A> {
    exchange: E,
    account: A,
    part: Part,
    unfinished: u32,
    answered: bool,
    sure: bool,
    deadline: Instant,
    closing: CancellationToken,
    at_once: Arc<AtomicBool>,
    source: Source<E>,
}

impl<E: Exchange, A: Account<E::Reply>> Supervisor<E, A> {
    fn new(mut order: Order<E, A>, at_once: Arc<AtomicBool>) -> Self {
        let source = Source::Opening(Box::pin(order.exchange.open()));
        Self {
            exchange: order.exchange,
            account: order.account,
            part: order.part,
            unfinished: order.samples.max(1),
            answered: false,
            sure: false,
            deadline: order.deadline,
            closing: order.closing,
            at_once,
            source,
        }
    }

    async fn run(mut self, sender: mpsc::Sender<Result<E::Reply, LegFailure>>) {
        let stopped = self.relay(&sender).await;
        self.set_sure(false);
        match stopped {
            Stopped::Failed(failure) if failure.leaves_engine_running(self.unfinished) => {
                tokio::join!(async { drop(sender.send(Err(failure)).await) }, self.abort_unseen());
            }
            // What the leg holds is given back before its reader learns that it is over: the next leg finds room, and the breaker knows.
            Stopped::Ended => drop(self),
            Stopped::Failed(failure) => {
                drop(self);
                let _ = sender.send(Err(failure)).await;
            }
            Stopped::Unfinished => {
                drop(sender);
                self.wind_down().await;
            }
        }
    }

    /// Passes replies on until the stream ends or nobody wants it any more.
    async fn relay(&mut self, sender: &mpsc::Sender<Result<E::Reply, LegFailure>>) -> Stopped {
        let closing = self.closing.clone();
        let mut deadline = std::pin::pin!(sleep_until(self.deadline));
        loop {
            let next = match self.unread() {
                Some(next) => next,
                None => tokio::select! {
                    biased;
                    () = sender.closed() => return Stopped::Unfinished,
                    next = self.source.next() => next,
                    () = closing.cancelled() => return Stopped::Unfinished,
                    () = &mut deadline => {
                        let failure = LegFailure::timed_out();
                        self.account.failed(&failure);
                        // A reader that is behind notices its own deadline.
                        let _ = sender.try_send(Err(failure));
                        return Stopped::Unfinished;
                    }
                },
            };
            match next {
                Some(Ok(reply)) => {
                    self.note(&reply);
                    let reply = match sender.try_send(Ok(reply)) {
                        Ok(()) => continue,
                        Err(unsent) => unsent.into_inner(),
                    };
                    // While the reader is slow the engine is not heard.
                    self.set_sure(false);
                    let Ok(reply) = reply else { continue };
                    tokio::select! {
                        sent = sender.send(Ok(reply)) => if let Err(mpsc::error::SendError(unread)) = sent {
                            unread.into_iter().for_each(|reply| self.account.discarded(reply));
                            return Stopped::Unfinished;
                        },
                        () = closing.cancelled() => return Stopped::Unfinished,
                        // The reader was too slow: that says nothing about the worker.
                        () = &mut deadline => return Stopped::Unfinished,
                    }
                }
                Some(Err(failure)) => return self.fail(failure),
                None if self.unfinished > 0 => return self.fail(LegFailure::incomplete()),
                None => return Stopped::Ended,
            }
        }
    }

    /// What the engine has said and nobody read, when it is not known whether there is anything.
    fn unread(&mut self) -> Option<Option<Result<E::Reply, LegFailure>>> {
        if self.sure || !self.answered || self.unfinished == 0 {
            return None;
        }
        let unread = self.source.next().now_or_never();
        if unread.is_none() {
            self.set_sure(true);
        }
        unread
    }

    fn set_sure(&mut self, sure: bool) {
        if self.sure != sure {
            self.sure = sure;
            self.account.is_sure(sure);
        }
    }

    fn fail(&mut self, failure: LegFailure) -> Stopped {
        self.account.failed(&failure);
        Stopped::Failed(failure)
    }

    fn note(&mut self, reply: &E::Reply) {
        if !self.answered {
            self.answered = true;
            self.account.answered();
        }
        self.unfinished = self.unfinished.saturating_sub(u32::from(reply.completes()));
        if self.unfinished == 0 {
            self.set_sure(false);
        }
    }

    /// Ends a request that nobody waits for any more.
    async fn wind_down(mut self) {
        let deferred = self.part == Part::Decode && !self.at_once.load(Ordering::Acquire);
        if deferred && !self.answered {
            match self.await_first_reply().await {
                Waited::Goes => {}
                Waited::Ended => return,
                Waited::Lost => return self.abort_unseen().await,
            }
        }
        let limit = if self.closing.is_cancelled() { LAST_WIND_DOWN } else { WIND_DOWN };
        let mut limit = std::pin::pin!(sleep(limit));
        if self.unfinished == 0 {
            tokio::select! {
                () = self.source.drain() => {}
                () = &mut limit => {}
            }
            return;
        }
        let mut pause = REPEAT;
        while self.abort(pause, limit.as_mut()).await {
            pause *= 2;
        }
    }

    /// Waits for the first reply of an engine that may be receiving a KV cache.
    async fn await_first_reply(&mut self) -> Waited {
        let closing = self.closing.clone();
        let next = tokio::select! {
            next = self.source.next() => next,
            () = sleep(DEFERRAL) => return Waited::Goes,
            () = closing.cancelled() => return Waited::Goes,
        };
        match next {
            Some(Ok(reply)) => {
                self.note(&reply);
                self.account.discarded(reply);
                Waited::Goes
            }
            Some(Err(failure)) if failure.leaves_engine_running(self.unfinished) => Waited::Lost,
            Some(Err(_)) | None => Waited::Ended,
        }
    }

    /// Sends one abort to an engine of which nothing is heard any more.
    async fn abort_unseen(&mut self) {
        let result = timeout(ABORT_TIMEOUT, self.exchange.abort()).await;
        self.account.aborted(matches!(result, Ok(Ok(()))));
    }

    /// Sends an abort and reads on until the stream ends. True when it should be repeated: the engine goes on after `pause`.
    async fn abort(&mut self, pause: Duration, mut limit: Pin<&mut Sleep>) -> bool {
        let mut again = std::pin::pin!(sleep(pause));
        let mut call = std::pin::pin!(timeout(ABORT_TIMEOUT, self.exchange.abort()));
        let mut called = false;
        loop {
            tokio::select! {
                biased;
                result = &mut call, if !called => {
                    called = true;
                    self.account.aborted(matches!(result, Ok(Ok(()))));
                }
                next = self.source.next() => match next {
                    Some(Ok(reply)) => self.account.discarded(reply),
                    Some(Err(failure)) if failure.leaves_engine_running(self.unfinished) && !called => {
                        self.account.aborted(matches!(call.await, Ok(Ok(()))));
                        return false;
                    }
                    _ => return false,
                },
                () = &mut again, if called => return true,
                () = &mut limit => return false,
            }
        }
    }
}

type Opening<E> = Pin<Box<dyn Future<Output = Result<<E as Exchange>::Replies, LegFailure>> + Send>>;

/// The engine's stream, the time before its head included.
enum Source<E: Exchange> {
    Opening(Opening<E>),
    Open(E::Replies),
    Ended,
}

impl<E: Exchange> Source<E> {
    /// The next message. Can be dropped and called again.
    async fn next(&mut self) -> Option<Result<E::Reply, LegFailure>> {
        loop {
            let ended = match self {
                Source::Opening(opening) => match opening.await {
                    Ok(replies) => {
                        *self = Source::Open(replies);
                        continue;
                    }
                    Err(failure) => Some(Err(failure)),
                },
                Source::Open(replies) => match replies.next().await {
                    Some(Ok(reply)) => return Some(Ok(reply)),
                    Some(Err(failure)) => Some(Err(failure)),
                    None => None,
                },
                Source::Ended => None,
            };
            *self = Source::Ended;
            return ended;
        }
    }

    async fn drain(&mut self) {
        while let Some(Ok(_)) = self.next().await {}
    }
}

#[cfg(test)]
#[path = "leg_tests.rs"]
mod tests;
