//! Relayed bodies: the bytes out are the bytes in, however they were cut and however long the engine paused between them.
//!
//! Input: one byte of flags, eight bytes that cut the stream and place pauses, then the stream. Expected is what a plain reading of the
//! whole stream says: all of it, or all up to the end marker; between two events a keep-alive may stand; a stream of events that is broken,
//! or unfinished when the request's time is over, ends with an error event on lines of its own.
#![no_main]

use std::collections::VecDeque;
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http_body::{Body, Frame};
use libfuzzer_sys::fuzz_target;
use smg_gateway::relay::{Dialect, Ended, OnEnd, Relay};
use tokio::time::{Instant, Sleep, sleep};

const KEEP_ALIVE: Duration = Duration::from_secs(10);
const PAUSE: Duration = Duration::from_secs(15);
const PING: &[u8] = b": ping\n\n";
const NAMED_PING: &[u8] = b"event: ping\ndata: {\"type\":\"ping\"}\n\n";

enum Step {
    Data(Bytes),
    /// Silence, longer than a keep-alive.
    Pause,
    Broken,
}

/// What an engine was asked for last.
#[derive(Clone, Copy, Default)]
struct Progress {
    /// Bytes of the stream it has handed over.
    handed_over: usize,
    /// It had nothing when it was asked last.
    silent: bool,
}

/// A scripted engine.
struct Engine {
    steps: VecDeque<Step>,
    pause: Option<Pin<Box<Sleep>>>,
    progress: Arc<Mutex<Progress>>,
}

impl Body for Engine {
    type Data = Bytes;
    type Error = std::io::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        loop {
            if let Some(pause) = &mut self.pause {
                let pending = pause.as_mut().poll(cx).is_pending();
                self.progress.lock().unwrap().silent = pending;
                if pending {
                    return Poll::Pending;
                }
                self.pause = None;
            }
            match self.steps.pop_front() {
                None => return Poll::Ready(None),
                Some(Step::Broken) => return Poll::Ready(Some(Err(std::io::ErrorKind::ConnectionReset.into()))),
                Some(Step::Pause) => self.pause = Some(Box::pin(sleep(PAUSE))),
                Some(Step::Data(data)) => {
                    self.progress.lock().unwrap().handed_over += data.len();
                    return Poll::Ready(Some(Ok(Frame::data(data))));
                }
            }
        }
    }
}

#[derive(Default)]
struct Ends(Arc<Mutex<Vec<Ended>>>);

impl OnEnd for Ends {
    fn first_output(&mut self) {}

    fn ended(&mut self, ended: Ended) {
        self.0.lock().unwrap().push(ended);
    }
}

/// The lines of a stream, each with the place behind its end. An unfinished line is left out.
fn lines(stream: &[u8]) -> Vec<(&[u8], usize)> {
    let mut lines = Vec::new();
    let (mut start, mut at) = (0, 0);
    while at < stream.len() {
        let ending = match (stream[at], stream.get(at + 1)) {
            (b'\r', Some(b'\n')) => 2,
            (b'\r' | b'\n', _) => 1,
            _ => 0,
        };
        if ending == 0 {
            at += 1;
            continue;
        }
        lines.push((&stream[start..at], at + ending));
        at += ending;
        start = at;
    }
    lines
}

/// Where the stream ends: behind the blank line after the end marker.
fn end_of_stream(stream: &[u8]) -> Option<usize> {
    let lines = lines(stream);
    let is_marker = |line: &[u8]| line == b"data: [DONE]" || line == b"data:[DONE]";
    let mut last_text: Option<&[u8]> = None;
    for (line, end) in lines {
        if !line.is_empty() {
            last_text = Some(line);
        } else if last_text.is_some_and(is_marker) {
            return Some(end);
        }
    }
    None
}

/// Whether something may be put in behind `stream`.
fn is_between_events(stream: &[u8]) -> bool {
    let lines = lines(stream);
    match lines.last() {
        None => stream.is_empty(),
        Some((line, end)) => line.is_empty() && *end == stream.len(),
    }
}

struct Out {
    data: Vec<u8>,
    /// Bytes of the stream before each keep-alive.
    pings: Vec<usize>,
    aborted: bool,
    handed_over: usize,
}

/// Bytes of the stream before the second pause.
fn before_the_second_pause(steps: &VecDeque<Step>) -> Option<usize> {
    let (second, _) = steps.iter().enumerate().filter(|(_, step)| matches!(step, Step::Pause)).nth(1)?;
    let lengths = steps.iter().take(second).map(|step| if let Step::Data(data) = step { data.len() } else { 0 });
    Some(lengths.sum())
}

/// `may_be_late` = a silent engine may be cut off.
async fn collect(mut relay: Relay<Ends, Engine>, progress: &Mutex<Progress>, may_be_late: bool) -> Out {
    let mut out = Out { data: Vec::new(), pings: Vec::new(), aborted: false, handed_over: 0 };
    loop {
        let frame = poll_fn(|cx| Pin::new(&mut relay).poll_frame(cx)).await;
        let Progress { handed_over, silent } = *progress.lock().unwrap();
        out.handed_over = handed_over;
        match frame {
            None => return out,
            Some(Err(_)) => {
                out.aborted = true;
                return out;
            }
            Some(Ok(frame)) => {
                let data = frame.into_data().expect("there are no trailers");
                let ping = [PING, NAMED_PING].contains(&&data[..]);
                if silent && (ping || !may_be_late) {
                    assert!(ping, "a silent engine has no bytes");
                    out.pings.push(handed_over);
                } else {
                    out.data.extend_from_slice(&data);
                }
            }
        }
    }
}

fuzz_target!(|data: &[u8]| {
    let Some(([flags, cuts @ ..], stream)) = data.split_first_chunk::<9>() else { return };
    let events = match flags & 3 {
        0 => None,
        1 => Some(Dialect::Anthropic),
        _ => Some(Dialect::OpenAi),
    };
    let (mut broken, rewriting) = (flags & 4 != 0, flags & 8 != 0);
    // Over in the middle of the second pause, or when it ends and the engine goes on.
    let time = match flags & 0x30 {
        0 => None,
        0x10 => Some(PAUSE * 3 / 2),
        _ => Some(PAUSE * 2),
    };
    let mut steps = VecDeque::new();
    let (mut stream, mut rest, mut cut) = (stream, stream, 0);
    while !rest.is_empty() {
        let code = usize::from(cuts[cut % cuts.len()]);
        cut += 1;
        if code & 0x80 != 0 && steps.len() < 64 {
            steps.push_back(Step::Pause);
        }
        let length = (1 + (code & 0x1f) * (1 + cut / cuts.len())).min(rest.len());
        let (chunk, after) = rest.split_at(length);
        steps.push_back(Step::Data(Bytes::copy_from_slice(chunk)));
        rest = after;
    }
    if broken {
        steps.push_back(Step::Broken);
    }

    let late = time.and_then(|_| before_the_second_pause(&steps));

    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
    let ends = Arc::new(Mutex::new(Vec::new()));
    let progress = Arc::new(Mutex::new(Progress::default()));
    let out = runtime.block_on(async {
        let engine = Engine { steps, pause: None, progress: Arc::clone(&progress) };
        let deadline = Instant::now() + time.unwrap_or(Duration::from_secs(86_400));
        let relay = Relay::new(engine, events, deadline, Some(KEEP_ALIVE), Ends(Arc::clone(&ends)));
        // Held back, read as text, and put out again as it was.
        let relay = relay.rewriting(rewriting.then(|| Box::new(|data: &str| Some(data.to_owned())) as _));
        collect(relay, &progress, time.is_some()).await
    });
    let ends = ends.lock().unwrap();
    assert_eq!(ends.len(), 1, "told once: {ends:?}");

    // What has ended in time is not late.
    let late = late.filter(|place| events.is_none() || end_of_stream(&stream[..*place]).is_none());
    if let Some(place) = late {
        (stream, broken) = (&stream[..place], true);
    }
    let marker = events.and_then(|_| end_of_stream(stream));
    let mut body = &out.data[..];
    match marker {
        None if broken && events.is_some() => {
            let error = if events == Some(Dialect::OpenAi) { &b"data: {\"error\""[..] } else { b"event: error\n" };
            assert!(body.starts_with(stream), "all that came before the break");
            let mut tail = &body[stream.len()..];
            if !is_between_events(stream) {
                tail = tail.strip_prefix(b"\n\n").expect("the cut event is ended");
            }
            assert!(tail.starts_with(error) && tail.ends_with(b"\n\n"));
            body = stream;
        }
        None => assert_eq!(out.aborted, broken),
        Some(_) => assert!(!out.aborted),
    }
    // A chunk may end between the CR and the LF of the last line.
    let end = marker.unwrap_or(stream.len());
    let without_lf = marker.filter(|end| stream[..*end].ends_with(b"\r\n")).map(|end| end - 1);
    assert!(
        body == &stream[..end] || without_lf.is_some_and(|end| body == &stream[..end]),
        "the bytes are the stream's"
    );
    assert!(marker.is_some() || late.is_some() || out.handed_over == stream.len());
    for place in &out.pings {
        assert!(events.is_some() && is_between_events(&stream[..*place]), "a keep-alive stands between two events");
    }
    assert!(marker.is_none() || ends[0] == Ended::Complete);
    assert_eq!(late.is_some(), matches!(ends[0], Ended::TimedOut | Ended::OutOfTime));
    assert_eq!(marker.is_none() && broken && late.is_none(), matches!(ends[0], Ended::Broken(_)));
});
