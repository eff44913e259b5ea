//! A format's parser as a function that runs from the first to the last character.
//!
//! Text arrives in pieces, but a format reads best as straight-line code: "a name, then a colon, then a value". So a parser
//! is an `async` function over a [`Cursor`], which waits inside whenever the text runs out; [`Coroutine`] feeds it and
//! collects what it wrote. No runtime is involved: a parser waits for nothing but text, and is resumed when there is some.
//!
//! A parser sees characters, never pieces, so what it decides depends on the text alone. That makes "any cutting gives the
//! same pieces" true of every format by construction, except for one thing that formats have to keep to themselves: they
//! never ask whether there is more text *now*.

use std::future::{Future, poll_fn};
use std::mem;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use parking_lot::Mutex;
use smg_apis::Piece;

use crate::markers::Markers;

/// Text that a parser went over and that proved not to be what it looked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Malformed;

/// What passes between a parser and the one who feeds it.
#[derive(Debug, Default)]
struct Exchange {
    /// Text that the parser has not taken yet.
    text: String,
    /// No more text will come.
    ended: bool,
    /// What the parser wrote since the last time.
    pieces: Vec<Piece>,
    reasoning: bool,
}

/// A parser at work.
pub(super) struct Coroutine {
    exchange: Arc<Mutex<Exchange>>,
    parser: Option<Pin<Box<dyn Future<Output = ()> + Send>>>,
}

impl Coroutine {
    /// Starts the parser that `parse` makes for a cursor, up to where it wants text.
    pub(super) fn start<F>(parse: impl FnOnce(Cursor) -> F) -> Self
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let exchange = Arc::new(Mutex::new(Exchange::default()));
        let cursor = Cursor {
            exchange: Arc::clone(&exchange),
            text: String::new(),
            at: 0,
            trail: None,
            pieces: Vec::new(),
            reasoning: false,
        };
        let parser: Pin<Box<dyn Future<Output = ()> + Send>> = Box::pin(parse(cursor));
        let mut coroutine = Self { exchange, parser: Some(parser) };
        coroutine.resume();
        coroutine
    }

    /// Feeds the next piece of text.
    pub(super) fn push(&mut self, text: &str) -> Vec<Piece> {
        self.exchange.lock().text.push_str(text);
        self.resume();
        mem::take(&mut self.exchange.lock().pieces)
    }

    /// Says that the text has ended.
    pub(super) fn finish(&mut self) -> Vec<Piece> {
        self.exchange.lock().ended = true;
        self.resume();
        mem::take(&mut self.exchange.lock().pieces)
    }

    /// Whether what comes next is reasoning, as far as is known.
    pub(super) fn reasoning(&self) -> bool {
        self.exchange.lock().reasoning
    }

    fn resume(&mut self) {
        let Some(parser) = &mut self.parser else { return };
        if parser.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_ready() {
            self.parser = None;
        }
    }
}

/// Where text without markup goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Sink {
    Content,
    Reasoning,
    /// The arguments of the call at this position, as they are.
    Arguments(usize),
    /// Nowhere.
    Dropped,
}

/// The text as a parser sees it, and the pieces that it writes.
pub(super) struct Cursor {
    exchange: Arc<Mutex<Exchange>>,
    /// Text taken over; what lies before `at` has been consumed.
    text: String,
    at: usize,
    /// What was consumed since [`Self::mark`].
    trail: Option<String>,
    pieces: Vec<Piece>,
    reasoning: bool,
}

impl Drop for Cursor {
    /// A parser that returns leaves what it wrote.
    fn drop(&mut self) {
        self.hand_over();
    }
}

impl Cursor {
    fn hand_over(&mut self) {
        let mut exchange = self.exchange.lock();
        exchange.pieces.append(&mut self.pieces);
        exchange.reasoning = self.reasoning;
    }

    /// Waits for more text; false when there is none to come.
    async fn more(&mut self) -> bool {
        poll_fn(|_| {
            self.hand_over();
            let mut exchange = self.exchange.lock();
            if exchange.text.is_empty() {
                return if exchange.ended { Poll::Ready(false) } else { Poll::Pending };
            }
            self.text.drain(..mem::take(&mut self.at));
            self.text.push_str(&mem::take(&mut exchange.text));
            Poll::Ready(true)
        })
        .await
    }

    fn rest(&self) -> &str {
        &self.text[self.at..]
    }

    /// Goes `bytes` further, up to a character's boundary.
    fn consume(&mut self, bytes: usize) {
        if let Some(trail) = &mut self.trail {
            trail.push_str(&self.text[self.at..self.at + bytes]);
        }
        self.at += bytes;
    }

    /// The next character, which stays.
    pub(super) async fn peek(&mut self) -> Option<char> {
        loop {
            match self.rest().chars().next() {
                Some(next) => return Some(next),
                None if self.more().await => {}
                None => return None,
            }
        }
    }

    /// Consumes the character that [`Self::peek`] returned.
    pub(super) fn take(&mut self, peeked: char) {
        self.consume(peeked.len_utf8());
    }

    /// Whether `text` comes next; it is consumed if it does.
    pub(super) async fn follows(&mut self, text: &str) -> bool {
        loop {
            if self.rest().starts_with(text) {
                self.consume(text.len());
                return true;
            }
            if !text.starts_with(self.rest()) || !self.more().await {
                return false;
            }
        }
    }

    /// `text`, which has to come next.
    pub(super) async fn expect(&mut self, text: &str) -> Result<(), Malformed> {
        if self.follows(text).await { Ok(()) } else { Err(Malformed) }
    }

    /// Consumes white space.
    pub(super) async fn space(&mut self) {
        while let Some(next) = self.peek().await.filter(|next| next.is_whitespace()) {
            self.take(next);
        }
    }

    /// Text up to one of `ends`, which is consumed; [`Malformed`] when it grows beyond `limit` bytes or the text ends.
    pub(super) async fn until(&mut self, ends: &[&str], limit: usize) -> Result<(String, usize), Malformed> {
        let markers = Markers::new(ends);
        let mut search = markers.search();
        let mut text = String::new();
        loop {
            let found = search.feed(&markers, self.rest());
            let taken = found.map_or_else(|| self.rest().len(), |found| found.end);
            text.push_str(&self.rest()[..taken]);
            self.consume(taken);
            if text.len() > limit {
                return Err(Malformed);
            }
            if let Some(found) = found {
                text.truncate(text.len() - found.length);
                return Ok((text, found.number));
            }
            if !self.more().await {
                return Err(Malformed);
            }
        }
    }

    /// Passes text on to `sink` up to one of `markers`, which is consumed and whose number is returned; `None` when the
    /// text ends. Nothing is held back but what may be the beginning of a marker.
    pub(super) async fn pass(&mut self, markers: &Markers, sink: Sink) -> Option<usize> {
        let mut search = markers.search();
        let mut searched = 0;
        loop {
            let rest = self.rest();
            if let Some(found) = search.feed(markers, &rest[searched..]) {
                let end = searched + found.end;
                let text = rest[..end - found.length].to_owned();
                self.write(sink, &text);
                self.consume(end);
                return Some(found.number);
            }
            let certain = rest.len() - search.held();
            searched = search.held();
            let text = rest[..certain].to_owned();
            self.write(sink, &text);
            self.consume(certain);
            if !self.more().await {
                let text = self.rest().to_owned();
                self.write(sink, &text);
                self.consume(text.len());
                return None;
            }
        }
    }

    /// As [`Self::pass`] with content, but white space before a marker is left out, and so is white space that is all there
    /// is to the end when `after` a marker: it belongs to the markup. The marker and the space before it begin a new trail.
    pub(super) async fn pass_trimmed(&mut self, markers: &Markers, after: bool) -> Option<usize> {
        let mut search = markers.search();
        let mut searched = 0;
        let (mut blank, mut solid) = (String::new(), false);
        loop {
            let rest = self.rest();
            let found = search.feed(markers, &rest[searched..]);
            let certain = found.map_or_else(|| rest.len() - search.held(), |found| searched + found.end - found.length);
            let trimmed = rest[..certain].trim_end().len();
            if trimmed > 0 {
                blank.push_str(&rest[..trimmed]);
                let trailing = rest[trimmed..certain].to_owned();
                self.write(Sink::Content, &mem::replace(&mut blank, trailing));
                solid = true;
            } else {
                blank.push_str(&rest[..certain]);
            }
            self.consume(certain);
            if let Some(found) = found {
                self.trail = Some(blank);
                self.consume(found.length);
                return Some(found.number);
            }
            searched = search.held();
            if !self.more().await {
                let held = self.rest().to_owned();
                self.consume(held.len());
                if solid || !after || !held.is_empty() {
                    self.write(Sink::Content, &(blank + &held));
                }
                return None;
            }
        }
    }

    /// Puts back a marker that has just been consumed: it is read again.
    pub(super) fn put_back(&mut self, marker: &str) {
        self.at -= marker.len().min(self.at);
        if let Some(trail) = &mut self.trail {
            trail.truncate(trail.len() - marker.len().min(trail.len()));
        }
    }

    /// Keeps what is consumed from here on, until [`Self::settle`] or [`Self::recover`].
    pub(super) fn mark(&mut self) {
        self.trail = Some(String::new());
    }

    /// Keeps what is consumed from here on, and `marker`, which has just been consumed.
    pub(super) fn mark_after(&mut self, marker: &str) {
        self.trail = Some(marker.to_owned());
    }

    /// What was consumed since the mark was rightly consumed.
    pub(super) fn settle(&mut self) {
        self.trail = None;
    }

    /// Writes what was consumed since the mark, if there is one, as content after all.
    pub(super) fn recover(&mut self) {
        self.recover_to(Sink::Content);
    }

    /// Writes what was consumed since the mark, if there is one, to `sink` after all.
    pub(super) fn recover_to(&mut self, sink: Sink) {
        if let Some(trail) = self.trail.take() {
            self.write(sink, &trail);
        }
    }

    /// Ends what may have been calls: markup is left behind if it was `well` formed, and white space before the end if there
    /// were calls (`after`); anything else is content.
    pub(super) async fn conclude(&mut self, well: Result<(), Malformed>, after: bool) {
        let blank = self.trail.as_ref().is_none_or(|trail| trail.trim().is_empty());
        if well.is_ok() || (after && blank && self.peek().await.is_none()) {
            self.settle();
        } else {
            self.recover();
        }
    }

    /// Bytes consumed since the mark.
    pub(super) fn trail(&self) -> usize {
        self.trail.as_ref().map_or(0, String::len)
    }

    /// Says whether what comes next is reasoning.
    pub(super) fn set_reasoning(&mut self, reasoning: bool) {
        self.reasoning = reasoning;
    }

    /// Writes text to where it belongs.
    pub(super) fn write(&mut self, sink: Sink, text: &str) {
        if text.is_empty() {
            return;
        }
        // Formats write character by character: what goes on is added in place.
        match (sink, self.pieces.last_mut()) {
            (Sink::Dropped, _) => {}
            (Sink::Content, Some(Piece::Content(last))) | (Sink::Reasoning, Some(Piece::Reasoning(last))) => {
                last.push_str(text);
            }
            (Sink::Arguments(this), Some(Piece::ToolArguments { index, fragment })) if this == *index => {
                fragment.push_str(text);
            }
            (Sink::Content, _) => self.pieces.push(Piece::Content(text.to_owned())),
            (Sink::Reasoning, _) => self.pieces.push(Piece::Reasoning(text.to_owned())),
            (Sink::Arguments(index), _) => {
                self.pieces.push(Piece::ToolArguments { index, fragment: text.to_owned() });
            }
        }
    }

    /// Writes a piece.
    pub(super) fn piece(&mut self, piece: Piece) {
        super::append(&mut self.pieces, piece);
    }
}
