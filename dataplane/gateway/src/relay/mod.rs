//! The way back: an engine's response body, forwarded as it comes.
//!
//! Invariants
//! * bytes are forwarded as received and in order; nothing is collected (but a line of a stream whose events are to be rewritten), so a slow client slows the engine down through the sockets;
//! * a stream that breaks after a 2xx head is recognisable as broken: an error event in a stream of events, an aborted body otherwise;
//! * after the end marker of a stream nothing more is forwarded, and the response ends at the latest a second later;
//! * whatever way the body ends (complete, broken, client gone), [`OnEnd`] is told exactly once.

pub mod sse;

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http_body::{Body, Frame, SizeHint};
use serde_json::json;
use tokio::time::{Instant, Sleep};

use sse::Scanner;

use crate::connections::Answer;

/// How long an engine may keep its connection open after the end marker before the response ends without it.
const AFTER_DONE: Duration = Duration::from_secs(1);
/// Longest line that is held back to be rewritten.
const MAX_HELD_LINE: usize = 16 * 1024 * 1024;

/// Whose manner of events a stream has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Dialect {
    /// `data:` lines, ended by `[DONE]`.
    #[default]
    OpenAi,
    /// Named events without an end marker.
    Anthropic,
}

impl Dialect {
    /// What keeps a silent stream alive.
    pub(crate) fn keep_alive(self) -> &'static [u8] {
        match self {
            Dialect::OpenAi => b": ping\n\n",
            Dialect::Anthropic => b"event: ping\ndata: {\"type\":\"ping\"}\n\n",
        }
    }

    /// The last event of a broken stream.
    fn error_event(self, message: &str, at_boundary: bool) -> Bytes {
        // An event cut in half is ended first, so that ours stands on lines of its own.
        let lead = if at_boundary { "" } else { "\n\n" };
        Bytes::from(match self {
            Dialect::OpenAi => {
                let error = json!({"error": {"message": message, "type": "stream_error"}});
                format!("{lead}data: {error}\n\ndata: [DONE]\n\n")
            }
            Dialect::Anthropic => {
                let error = json!({"type": "error", "error": {"type": "api_error", "message": message}});
                format!("{lead}event: error\ndata: {error}\n\n")
            }
        })
    }
}

/// How a relayed body ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Ended {
    /// The engine ended it.
    Complete,
    /// The engine broke it off; the message says how.
    Broken(String),
    /// The request's time was over while the engine was silent.
    TimedOut,
    /// The request's time was over while the engine was sending: it had too much to say, or its client reads slowly.
    OutOfTime,
    /// The client left. `output` = some output had been forwarded.
    ClientLeft {
        /// Whether some output had been forwarded.
        output: bool,
    },
}

/// Who wants to know about a relayed body.
pub trait OnEnd: Send + 'static {
    /// The first output passed through.
    fn first_output(&mut self);
    /// The body ended.
    fn ended(&mut self, ended: Ended);
}

/// An engine's response body on its way to the client.
pub struct Relay<E: OnEnd, B = Answer> {
    upstream: B,
    /// A piece that was read before.
    first: Option<Frame<Bytes>>,
    events: Option<Scanner>,
    dialect: Dialect,
    output: bool,
    finished: bool,
    /// How the body breaks off, once what came before is on its way.
    broken: Option<BrokenBody>,
    /// When the response ends, once the end marker has passed.
    done: Option<Instant>,
    deadline: Instant,
    /// After how much silence a comment is sent.
    keep_alive: Option<Duration>,
    /// The end of the last silence.
    heard: Instant,
    /// One timer for all of these, set when there is first something to wait for.
    timer: Option<Pin<Box<Sleep>>>,
    rewriting: Option<Rewriting>,
    on_end: Option<E>,
}

/// What becomes of the data of each event of a stream; none leaves it as it is.
pub type Rewrite = Box<dyn FnMut(&str) -> Option<String> + Send>;

/// A stream whose data lines are rewritten. A line that has no end yet is held back.
struct Rewriting {
    held: BytesMut,
    rewrite: Rewrite,
}

impl Rewriting {
    /// What can go on: whole lines. With `all`, whatever there is.
    fn pass(&mut self, data: &[u8], all: bool) -> Bytes {
        self.held.extend_from_slice(data);
        let lines = memchr::memrchr2(b'\n', b'\r', &self.held).map_or(0, |end| end + 1);
        let whole = if all || self.held.len() - lines > MAX_HELD_LINE { self.held.len() } else { lines };
        let part = self.held.split_to(whole).freeze();
        let Ok(text) = std::str::from_utf8(&part) else { return part };
        let mut rewritten = None;
        let mut position = 0;
        for line in text.split(['\n', '\r']) {
            let Some(data) = line.strip_prefix("data:").map(str::trim) else { continue };
            let Some(new) = (self.rewrite)(data) else { continue };
            let start = data.as_ptr().addr() - text.as_ptr().addr();
            let out = rewritten.get_or_insert_with(|| String::with_capacity(text.len() + new.len()));
            out.push_str(text.get(position..start).unwrap_or_default());
            out.push_str(&new);
            position = start + data.len();
        }
        match rewritten {
            Some(out) => Bytes::from(out + text.get(position..).unwrap_or_default()),
            None => part,
        }
    }
}

impl<E: OnEnd, B: Body> Relay<E, B> {
    /// Puts a piece of the body that was read already before the rest.
    pub fn starting_with(mut self, first: Option<Frame<Bytes>>) -> Self {
        self.first = first;
        // Nobody asks an empty body of known length for its end.
        if self.first.is_none() && self.upstream.is_end_stream() {
            self.end(Ended::Complete);
        }
        self
    }
}

impl<E: OnEnd, B> Relay<E, B> {
    /// Forwards `upstream` until `deadline`. `events` = the body is a stream of server-sent events of this dialect, kept alive after
    /// `keep_alive` of silence.
    pub fn new(
        upstream: B,
        events: Option<Dialect>,
        deadline: Instant,
        keep_alive: Option<Duration>,
        on_end: E,
    ) -> Self {
        Self {
            upstream,
            first: None,
            events: events.map(|_| Scanner::default()),
            dialect: events.unwrap_or_default(),
            output: false,
            finished: false,
            broken: None,
            done: None,
            deadline,
            keep_alive: keep_alive.filter(|period| events.is_some() && !period.is_zero()),
            heard: Instant::now(),
            timer: None,
            rewriting: None,
            on_end: Some(on_end),
        }
    }

    /// Rewrites the data of a stream's events.
    pub fn rewriting(mut self, rewrite: Option<Rewrite>) -> Self {
        let rewrite = rewrite.filter(|_| self.events.is_some());
        self.rewriting = rewrite.map(|rewrite| Rewriting { held: BytesMut::new(), rewrite });
        self
    }

    fn end(&mut self, ended: Ended) {
        self.finished = true;
        if let Some(mut on_end) = self.on_end.take() {
            on_end.ended(ended);
        }
    }

    /// Ends a broken body: an event for streams of events, an aborted body for the rest.
    fn break_off(
        &mut self,
        ended: Ended,
        message: &str,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BrokenBody>>> {
        let event = self.events.as_ref().map(|scanner| self.dialect.error_event(message, scanner.at_boundary()));
        self.end(ended);
        match (event, self.rewriting.take()) {
            (Some(event), Some(rewriting)) => {
                Poll::Ready(Some(Ok(Frame::data([rewriting.held.freeze(), event].concat().into()))))
            }
            (Some(event), None) => Poll::Ready(Some(Ok(Frame::data(event)))),
            (None, _) => {
                // An error drops what the server has not sent yet, the head too: it comes with the next poll.
                self.broken = Some(BrokenBody(message.to_owned()));
                cx.waker().wake_by_ref();
                Poll::Pending
            }
        }
    }

    /// The part of `data` that goes to the client.
    fn pass(&mut self, mut data: Bytes) -> Bytes {
        let mut output = !data.is_empty();
        if let Some(scanner) = &mut self.events {
            if let Some(end) = scanner.feed(&data) {
                data.truncate(end);
                self.done = Some(Instant::now() + AFTER_DONE);
            }
            output = scanner.has_output();
        }
        if output && !self.output {
            self.output = true;
            if let Some(on_end) = &mut self.on_end {
                on_end.first_output();
            }
        }
        match &mut self.rewriting {
            Some(rewriting) => rewriting.pass(&data, self.done.is_some()),
            None => data,
        }
    }
}

/// A response body that the engine did not finish.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct BrokenBody(String);

impl<E, B> Body for Relay<E, B>
where
    E: OnEnd + Unpin,
    B: Body<Data = Bytes, Error: std::error::Error + 'static> + Unpin,
{
    type Data = Bytes;
    type Error = BrokenBody;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BrokenBody>>> {
        let this = &mut *self;
        if let Some(broken) = this.broken.take() {
            return Poll::Ready(Some(Err(broken)));
        }
        while !this.finished {
            let polled = match this.first.take() {
                Some(first) => Poll::Ready(Some(Ok(first))),
                None => Pin::new(&mut this.upstream).poll_frame(cx),
            };
            let polled = match polled {
                Poll::Ready(polled) => polled,
                Poll::Pending => {
                    ready!(this.poll_timers(cx));
                    if this.finished {
                        break;
                    }
                    if this.deadline <= Instant::now() {
                        return this.break_off(Ended::TimedOut, "Stream error: the request timed out", cx);
                    }
                    return Poll::Ready(Some(Ok(Frame::data(Bytes::from_static(this.dialect.keep_alive())))));
                }
            };
            match polled {
                Some(Ok(frame)) => {
                    let now = Instant::now();
                    if now >= this.deadline && this.done.is_none() {
                        return this.break_off(Ended::OutOfTime, "Stream error: the request timed out", cx);
                    }
                    this.heard = now;
                    match frame.into_data() {
                        // Late output of an engine that has already ended its stream.
                        Ok(_) if this.done.is_some() => {}
                        Ok(data) => {
                            let data = this.pass(data);
                            // A body of known length is not asked for an end: its last byte is the end.
                            if this.events.is_none() && this.upstream.is_end_stream() {
                                this.end(Ended::Complete);
                            }
                            if !data.is_empty() {
                                return Poll::Ready(Some(Ok(Frame::data(data))));
                            }
                        }
                        Err(trailers) => return Poll::Ready(Some(Ok(trailers))),
                    }
                }
                None => {
                    this.end(Ended::Complete);
                    if let Some(mut rewriting) = this.rewriting.take().filter(|rewriting| !rewriting.held.is_empty()) {
                        return Poll::Ready(Some(Ok(Frame::data(rewriting.pass(&[], true)))));
                    }
                }
                Some(Err(_)) if this.done.is_some() => this.end(Ended::Complete),
                Some(Err(error)) => {
                    let message = format!("Stream error: {}", describe(&error));
                    return this.break_off(Ended::Broken(message.clone()), &message, cx);
                }
            }
        }
        Poll::Ready(None)
    }

    fn is_end_stream(&self) -> bool {
        self.finished && self.broken.is_none()
    }

    fn size_hint(&self) -> SizeHint {
        if self.events.is_some() {
            return SizeHint::default();
        }
        let mut hint = self.upstream.size_hint();
        let read = self.first.as_ref().and_then(Frame::data_ref).map_or(0, Bytes::len) as u64;
        if let Some(upper) = hint.upper() {
            hint.set_upper(upper + read);
        }
        hint.set_lower(hint.lower() + read);
        hint
    }
}

impl<E: OnEnd, B> Relay<E, B> {
    /// Ready when time wants something: the end after the end marker, the deadline, or a keep-alive comment.
    fn poll_timers(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        loop {
            let silence = self.keep_alive.map(|period| self.heard + period);
            let next = self.done.unwrap_or_else(|| silence.map_or(self.deadline, |silence| silence.min(self.deadline)));
            let timer = self.timer.get_or_insert_with(|| Box::pin(tokio::time::sleep_until(next)));
            // A timer that rings too early is asked again: that is cheaper than to set it anew for each token.
            if timer.deadline() > next {
                timer.as_mut().reset(next);
            }
            ready!(timer.as_mut().poll(cx));
            let now = Instant::now();
            if now < next {
                timer.as_mut().reset(next);
                continue;
            }
            if self.done.is_some() {
                self.end(Ended::Complete);
                return Poll::Ready(());
            }
            if now >= self.deadline {
                return Poll::Ready(());
            }
            self.heard = now;
            if self.events.as_ref().is_some_and(Scanner::at_boundary) {
                return Poll::Ready(());
            }
        }
    }
}

impl<E: OnEnd, B> Drop for Relay<E, B> {
    fn drop(&mut self) {
        // After the end marker the client has everything: its leaving changes nothing.
        let ended = if self.done.is_some() { Ended::Complete } else { Ended::ClientLeft { output: self.output } };
        self.end(ended);
    }
}

/// The innermost cause of a transport error, which is the part that helps.
pub fn describe(error: &dyn std::error::Error) -> String {
    let mut cause = error;
    while let Some(source) = cause.source() {
        cause = source;
    }
    let (outer, inner) = (error.to_string(), cause.to_string());
    if outer == inner { outer } else { format!("{outer}: {inner}") }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::io;

    use futures::StreamExt;
    use http_body_util::{BodyExt, StreamBody};

    use super::*;

    struct Unheard;

    impl OnEnd for Unheard {
        fn first_output(&mut self) {}
        fn ended(&mut self, _: Ended) {}
    }

    #[tokio::test]
    async fn an_empty_answer_of_known_length_is_complete_though_nobody_asks_for_its_end() {
        struct Heard(std::sync::mpsc::Sender<Ended>);
        impl OnEnd for Heard {
            fn first_output(&mut self) {}
            fn ended(&mut self, ended: Ended) {
                self.0.send(ended).unwrap();
            }
        }
        let deadline = Instant::now() + Duration::from_secs(60);
        for (body, expected) in [("", Ended::Complete), ("x", Ended::ClientLeft { output: false })] {
            let (sender, receiver) = std::sync::mpsc::channel();
            let body = http_body_util::Full::new(Bytes::from(body));
            drop(Relay::new(body, None, deadline, None, Heard(sender)).starting_with(None));
            assert_eq!(receiver.recv().unwrap(), expected);
        }
    }

    #[tokio::test]
    async fn what_is_held_back_of_a_line_passes_when_the_stream_breaks() {
        let cut = "data: {\"text\":\"a";
        let pieces = [Ok(Frame::data(Bytes::from(cut))), Err(io::Error::from(io::ErrorKind::ConnectionReset))];
        let engine = StreamBody::new(futures::stream::iter(pieces));
        let deadline = Instant::now() + Duration::from_secs(60);
        let relay = Relay::new(engine, Some(Dialect::OpenAi), deadline, None, Unheard);
        let relay = relay.rewriting(Some(Box::new(|_| Some("{}".to_owned()))));
        let received = relay.collect().await.unwrap().to_bytes();
        let error = received.strip_prefix(cut.as_bytes()).unwrap();
        assert!(error.starts_with(b"\n\ndata: {\"error\"") && error.ends_with(b"data: [DONE]\n\n"), "{received:?}");
    }

    #[test]
    fn data_lines_are_rewritten_however_they_are_cut_and_all_else_stays() {
        let stream = ": ping\n\nevent: e\ndata: {\"n\":1}\r\n\r\ndata:{\"n\":2}\n\ndata: [DONE]\n\n";
        let expected = stream.replace("{\"n\":2}", "new");
        for size in 1..stream.len() {
            let rewrite = |data: &str| (data == "{\"n\":2}").then(|| "new".to_owned());
            let mut rewriting = Rewriting { held: BytesMut::new(), rewrite: Box::new(rewrite) };
            let mut passed = Vec::new();
            for piece in stream.as_bytes().chunks(size) {
                passed.extend_from_slice(&rewriting.pass(piece, false));
            }
            assert!(rewriting.held.is_empty());
            assert_eq!(String::from_utf8(passed).unwrap(), expected, "pieces of {size}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn an_engine_that_never_pauses_is_cut_at_the_deadline_too() {
        let pieces =
            futures::stream::iter(0..).map(|n| Ok::<_, io::Error>(Frame::data(format!("data: {n}\n\n").into())));
        let deadline = Instant::now() + Duration::from_secs(4);
        let mut relay = Relay::new(StreamBody::new(pieces), Some(Dialect::OpenAi), deadline, None, Unheard);
        for _ in 0..3 {
            assert!(relay.frame().await.unwrap().unwrap().data_ref().unwrap().starts_with(b"data: "));
        }
        tokio::time::advance(Duration::from_secs(4)).await;
        let rest = relay.collect().await.unwrap().to_bytes();
        assert!(rest.starts_with(b"data: {\"error\"") && rest.ends_with(b"data: [DONE]\n\n"), "{rest:?}");
    }
}
