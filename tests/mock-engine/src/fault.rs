//! Faults that an engine is told to have.
//!
//! A fault says which requests it meets, how many of them, and in what way their answers go wrong. Its parts combine:
//! `Fault::generation().delay_head(d).reset_after_events(2).times(1)` delays the head of the next generation request
//! and resets its connection after two events.

use std::time::Duration;

use bytes::Bytes;
use parking_lot::Mutex;

use crate::http::{Body, Pieces, Reply, Request};

/// Requests that a fault meets.
#[derive(Clone, Debug)]
enum Scope {
    Generation,
    Health,
    Path(String),
    All,
}

/// What becomes of the connection at the end of a faulty answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ending {
    /// The answer ends as HTTP says, though perhaps early.
    Proper,
    /// FIN while the answer is unfinished.
    Close,
    /// TCP reset.
    Reset,
    /// Nothing more is sent and the connection stays open.
    Stall,
}

/// How much of the body is sent before the ending.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Limit {
    Bytes(u64),
    Events(u64),
    /// The whole body; only the ending is wrong.
    Whole,
}

#[derive(Clone, Debug)]
struct Answer {
    status: u16,
    headers: Vec<(String, String)>,
    pieces: Scripted,
}

#[derive(Clone, Debug)]
enum Scripted {
    Whole(Bytes),
    Pieces(Vec<(Duration, Bytes)>),
}

fn owned<B: Into<Bytes>>(pieces: impl IntoIterator<Item = (Duration, B)>) -> Vec<(Duration, Bytes)> {
    pieces.into_iter().map(|(pause, piece)| (pause, piece.into())).collect()
}

/// One fault. See the module's head.
#[derive(Clone, Debug)]
pub struct Fault {
    scope: Scope,
    left: Option<u32>,
    pub(crate) delay_head: Duration,
    pub(crate) delay_body: Duration,
    pub(crate) hang: bool,
    /// Ends the connection without any answer.
    pub(crate) unanswered: Option<Ending>,
    pub(crate) malformed: bool,
    pub(crate) drip: Option<Duration>,
    pub(crate) end: Option<(Limit, Ending)>,
    /// Written instead of an HTTP answer.
    pub(crate) raw: Option<Vec<(Duration, Bytes)>>,
    answer: Option<Answer>,
}

impl Fault {
    fn new(scope: Scope) -> Self {
        Fault {
            scope,
            left: None,
            delay_head: Duration::ZERO,
            delay_body: Duration::ZERO,
            hang: false,
            unanswered: None,
            malformed: false,
            drip: None,
            end: None,
            raw: None,
            answer: None,
        }
    }

    /// A fault of requests for generated text, on any of the routes that give it.
    pub fn generation() -> Self {
        Self::new(Scope::Generation)
    }

    /// A fault of `/health`.
    pub fn health() -> Self {
        Self::new(Scope::Health)
    }

    /// A fault of one path.
    pub fn path(path: impl Into<String>) -> Self {
        Self::new(Scope::Path(path.into()))
    }

    /// A fault of every request.
    pub fn all() -> Self {
        Self::new(Scope::All)
    }

    /// Only the next `requests` requests in scope meet it; without this, all do.
    pub fn times(mut self, requests: u32) -> Self {
        self.left = Some(requests);
        self
    }

    /// Answers with this status and JSON body; the engine does not see the request.
    pub fn status(mut self, status: u16, body: impl Into<Bytes>) -> Self {
        self.answer = Some(Answer {
            status,
            headers: vec![("content-type".to_owned(), "application/json".to_owned())],
            pieces: Scripted::Whole(body.into()),
        });
        self
    }

    /// Answers 200 with this event stream: each piece is one write, sent after its pause. The engine does not see the
    /// request.
    pub fn script<B: Into<Bytes>>(mut self, pieces: impl IntoIterator<Item = (Duration, B)>) -> Self {
        self.answer = Some(Answer {
            status: 200,
            headers: vec![("content-type".to_owned(), "text/event-stream; charset=utf-8".to_owned())],
            pieces: Scripted::Pieces(owned(pieces)),
        });
        self
    }

    /// Writes these bytes to the socket instead of an HTTP answer, each after its pause, then closes or does what the
    /// fault's ending says.
    pub fn raw<B: Into<Bytes>>(mut self, pieces: impl IntoIterator<Item = (Duration, B)>) -> Self {
        self.raw = Some(owned(pieces));
        self
    }

    /// Sets a header of the answer given with [`Fault::status`] or [`Fault::script`].
    pub fn header(mut self, name: &str, value: &str) -> Self {
        if let Some(answer) = &mut self.answer {
            answer.headers.retain(|(key, _)| !key.eq_ignore_ascii_case(name));
            answer.headers.push((name.to_owned(), value.to_owned()));
        }
        self
    }

    /// Waits before the engine sees the request, hence before the head.
    pub fn delay_head(mut self, delay: Duration) -> Self {
        self.delay_head = delay;
        self
    }

    /// Waits between the head and the body.
    pub fn delay_body(mut self, delay: Duration) -> Self {
        self.delay_body = delay;
        self
    }

    /// Never answers; the connection stays open.
    pub fn hang(mut self) -> Self {
        self.hang = true;
        self
    }

    /// Closes (FIN) without having answered anything.
    pub fn close_unanswered(mut self) -> Self {
        self.unanswered = Some(Ending::Close);
        self
    }

    /// Resets without having answered anything.
    pub fn reset_unanswered(mut self) -> Self {
        self.unanswered = Some(Ending::Reset);
        self
    }

    /// Sends the body's JSON cut in half: whole-body answers keep status and length valid, events end early.
    pub fn malformed(mut self) -> Self {
        self.malformed = true;
        self
    }

    /// Sends the body one byte per write (and per chunk), `gap` apart.
    pub fn drip(mut self, gap: Duration) -> Self {
        self.drip = Some(gap);
        self
    }

    /// Resets after this many bytes of the body.
    pub fn reset_after_bytes(self, bytes: u64) -> Self {
        self.ending(Limit::Bytes(bytes), Ending::Reset)
    }

    /// Resets after this many events.
    pub fn reset_after_events(self, events: u64) -> Self {
        self.ending(Limit::Events(events), Ending::Reset)
    }

    /// Closes (FIN) after this many bytes of the body, the answer unfinished.
    pub fn close_after_bytes(self, bytes: u64) -> Self {
        self.ending(Limit::Bytes(bytes), Ending::Close)
    }

    /// Closes (FIN) after this many events, the answer unfinished.
    pub fn close_after_events(self, events: u64) -> Self {
        self.ending(Limit::Events(events), Ending::Close)
    }

    /// Ends the answer properly after this many events.
    pub fn end_after_events(self, events: u64) -> Self {
        self.ending(Limit::Events(events), Ending::Proper)
    }

    /// Falls silent after this many events, the connection open.
    pub fn stall_after_events(self, events: u64) -> Self {
        self.ending(Limit::Events(events), Ending::Stall)
    }

    /// Sends the whole body, then neither ends the answer nor closes.
    pub fn stall_at_end(self) -> Self {
        self.ending(Limit::Whole, Ending::Stall)
    }

    fn ending(mut self, limit: Limit, ending: Ending) -> Self {
        self.end = Some((limit, ending));
        self
    }

    fn meets(&self, request: &Request) -> bool {
        self.left != Some(0)
            && match &self.scope {
                Scope::Generation => request.is_generation(),
                Scope::Health => request.path == "/health",
                Scope::Path(path) => request.path == *path,
                Scope::All => true,
            }
    }

    /// The answer that stands in for the engine's own.
    pub(crate) fn reply(&self) -> Option<Reply> {
        let answer = self.answer.as_ref()?;
        let body = match &answer.pieces {
            Scripted::Whole(body) => Body::Whole(body.clone()),
            Scripted::Pieces(pieces) => Body::Pieces(Box::new(Script(pieces.clone().into_iter()))),
        };
        Some(Reply::new(answer.status, answer.headers.clone(), body))
    }
}

struct Script(std::vec::IntoIter<(Duration, Bytes)>);

impl Pieces for Script {
    fn next(&mut self, out: &mut Vec<u8>) -> Option<Duration> {
        let (pause, piece) = self.0.next()?;
        out.extend_from_slice(&piece);
        Some(pause)
    }

    fn one_write_each(&self) -> bool {
        true
    }
}

/// The faults an engine has at present.
#[derive(Default)]
pub(crate) struct Faults(Mutex<Vec<Fault>>);

impl Faults {
    pub(crate) fn add(&self, fault: Fault) {
        self.0.lock().push(fault);
    }

    pub(crate) fn clear(&self) {
        self.0.lock().clear();
    }

    /// The first fault that meets this request, counted down.
    pub(crate) fn meeting(&self, request: &Request) -> Option<Fault> {
        let mut faults = self.0.lock();
        let fault = faults.iter_mut().find(|fault| fault.meets(request))?;
        if let Some(left) = &mut fault.left {
            *left -= 1;
        }
        let met = fault.clone();
        if met.left == Some(0) {
            faults.retain(|fault| fault.left != Some(0));
        }
        Some(met)
    }
}
