//! Where lines go: each sink has a thread of its own, which writes what is queued for it.
//!
//! Invariants
//! * whoever logs queues a line and goes on: nobody waits for what the sink writes to, and at most [`MAX_WAITING`] lines wait;
//! * a line is written whole and in its turn, or it is counted: there was no room for it, or writing it failed. What follows a line of which
//!   only a part was written begins on a line of its own;
//! * lines that were lost are told of in the log itself, once in [`TOLD_EVERY`]: another sink may take what this one does not.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, ErrorKind, Write};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use tracing_subscriber::fmt::MakeWriter;

use crate::SMG;

/// Most lines that wait for a sink.
const MAX_WAITING: usize = 16_384;
/// How often lost lines are told of.
const TOLD_EVERY: Duration = Duration::from_secs(60);
/// How long what would block is left alone before it is tried again.
const PAUSE: Duration = Duration::from_millis(10);

/// What a sink writes to.
pub trait Target: Send + 'static {
    /// Writes a line, its end included, whole.
    ///
    /// # Errors
    /// When it was not written, or not whole.
    fn write_line(&mut self, line: &[u8]) -> io::Result<()>;
}

/// A queue of lines and the thread that writes them. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Sink(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    queue: Mutex<Queue>,
    /// There is a line, or the end.
    work: Condvar,
    /// The end came, and everything before it is written.
    over: Condvar,
    dropped: AtomicU64,
}

#[derive(Debug, Default)]
struct Queue {
    lines: VecDeque<Vec<u8>>,
    ended: bool,
    over: bool,
}

impl Sink {
    /// Starts a sink under this name.
    ///
    /// # Errors
    /// When the system has no thread for it.
    pub fn start(name: &'static str, target: impl Target) -> io::Result<Self> {
        let sink = Self(Arc::default());
        let shared = Arc::clone(&sink.0);
        thread::Builder::new().name(format!("smg-log-{name}")).spawn(move || write_all(name, &shared, target))?;
        Ok(sink)
    }

    /// Queues a line.
    pub fn push(&self, line: &[u8]) {
        let line = line.to_vec();
        let mut queue = self.0.queue.lock();
        if queue.lines.len() < MAX_WAITING {
            queue.lines.push_back(line);
            drop(queue);
            self.0.work.notify_one();
        } else {
            self.0.count_dropped();
        }
    }

    /// How many lines were dropped so far.
    pub fn dropped(&self) -> u64 {
        self.0.dropped.load(Ordering::Relaxed)
    }

    /// Says that no more lines will come.
    pub fn end(&self) {
        self.0.queue.lock().ended = true;
        self.0.work.notify_one();
    }

    /// Waits until all that was queued before the end is written, or `until`.
    pub fn wait(&self, until: Instant) {
        let mut queue = self.0.queue.lock();
        self.0.over.wait_while_for(&mut queue, |queue| !queue.over, until.saturating_duration_since(Instant::now()));
    }
}

impl Shared {
    /// The next line, once there is one; `None` after the end.
    fn next(&self) -> Option<Vec<u8>> {
        let mut queue = self.queue.lock();
        self.work.wait_while(&mut queue, |queue| queue.lines.is_empty() && !queue.ended);
        let line = queue.lines.pop_front();
        if line.is_none() {
            queue.over = true;
            self.over.notify_all();
        }
        line
    }

    fn count_dropped(&self) {
        self.dropped.fetch_add(1, Ordering::Relaxed);
    }
}

/// Writes what is queued until the end.
fn write_all(name: &str, shared: &Shared, mut target: impl Target) {
    let (mut told_of, mut told_at) = (0, None::<Instant>);
    let mut reason = None;
    while let Some(line) = shared.next() {
        if let Err(error) = target.write_line(&line) {
            shared.count_dropped();
            reason = Some(error.to_string());
        }
        let dropped = shared.dropped.load(Ordering::Relaxed);
        if dropped > told_of && told_at.is_none_or(|at| at.elapsed() >= TOLD_EVERY) {
            let lines = dropped - told_of;
            (told_of, told_at) = (dropped, Some(Instant::now()));
            let reason = reason.take().unwrap_or_else(|| "it is too slow".to_owned());
            tracing::warn!(target: SMG, sink = name, lines, reason, "log lines were dropped");
        }
    }
}

impl Write for &Sink {
    /// A line, as the formatting layer writes it: one call for each event.
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        self.push(line);
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl<'a> MakeWriter<'a> for Sink {
    type Writer = &'a Sink;

    fn make_writer(&'a self) -> Self::Writer {
        self
    }
}

/// Something that lines are appended to.
#[derive(Debug)]
pub struct Lines<W> {
    pub(super) out: W,
    /// Of its last line only a part was written.
    pub(super) torn: bool,
}

impl Lines<File> {
    /// Standard error, by a handle of its own: who else writes there does not wait for a line of ours.
    ///
    /// # Errors
    /// When the system has no handle left.
    pub fn of_console() -> io::Result<Self> {
        Ok(Self { out: File::from(io::stderr().as_fd().try_clone_to_owned()?), torn: false })
    }
}

impl<W: Write> Lines<W> {
    fn write(&mut self, mut rest: &[u8]) -> io::Result<()> {
        while !rest.is_empty() {
            match self.out.write(rest) {
                Ok(0) => return Err(ErrorKind::WriteZero.into()),
                Ok(written) => {
                    rest = rest.get(written..).unwrap_or_default();
                    self.torn = !rest.is_empty();
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                // Whoever started us may have made it so.
                Err(error) if error.kind() == ErrorKind::WouldBlock => thread::sleep(PAUSE),
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

impl<W: Write + Send + 'static> Target for Lines<W> {
    fn write_line(&mut self, line: &[u8]) -> io::Result<()> {
        if self.torn {
            self.write(b"\n")?;
        }
        self.write(line)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::sync::mpsc::{Receiver, Sender, channel};

    use super::*;

    const PATIENCE: Duration = Duration::from_secs(20);

    /// Takes a line when it is let, and hands it on.
    struct Gate {
        open: Receiver<()>,
        lines: Sender<Vec<u8>>,
    }

    impl Target for Gate {
        fn write_line(&mut self, line: &[u8]) -> io::Result<()> {
            let _ = self.open.recv();
            let _ = self.lines.send(line.to_vec());
            Ok(())
        }
    }

    fn gate() -> (Sink, Sender<()>, Receiver<Vec<u8>>) {
        let (key, open) = channel();
        let (lines, written) = channel();
        (Sink::start("test", Gate { open, lines }).unwrap(), key, written)
    }

    #[test]
    fn lines_beyond_those_that_may_wait_are_counted_and_nobody_waits() {
        let (sink, key, written) = gate();
        for number in 0..MAX_WAITING + 100 {
            sink.push(number.to_string().as_bytes());
        }
        // One may be with the target already.
        assert!((99..=100).contains(&sink.dropped()), "{}", sink.dropped());
        let kept = MAX_WAITING as u64 + 100 - sink.dropped();
        drop(key);
        for number in 0..kept {
            assert_eq!(written.recv_timeout(PATIENCE).unwrap(), number.to_string().as_bytes());
        }
    }

    #[test]
    fn the_end_waits_for_what_was_queued_before_it() {
        let (sink, key, written) = gate();
        for number in 0..1000 {
            sink.push(number.to_string().as_bytes());
        }
        drop(key);
        sink.end();
        sink.wait(Instant::now() + PATIENCE);
        assert_eq!(written.try_iter().count(), 1000);
        assert_eq!(sink.dropped(), 0);
    }

    #[test]
    fn the_end_waits_no_longer_than_it_is_told_for_what_takes_nothing() {
        let (sink, key, written) = gate();
        sink.push(b"stuck\n");
        sink.end();
        let began = Instant::now();
        sink.wait(began + Duration::from_millis(50));
        assert!(began.elapsed() >= Duration::from_millis(50));
        assert_eq!(written.try_iter().count(), 0);
        drop(key);
        sink.wait(Instant::now() + PATIENCE);
        assert_eq!(written.try_iter().count(), 1);
    }

    /// Takes as many bytes as each of its answers says, or fails.
    struct Scripted {
        answers: VecDeque<Result<usize, ErrorKind>>,
        taken: Vec<u8>,
    }

    impl Write for Scripted {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            let taken = self.answers.pop_front().unwrap_or(Ok(usize::MAX))?.min(bytes.len());
            self.taken.extend_from_slice(&bytes[..taken]);
            Ok(taken)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn scripted(answers: impl IntoIterator<Item = Result<usize, ErrorKind>>) -> Lines<Scripted> {
        Lines { out: Scripted { answers: answers.into_iter().collect(), taken: Vec::new() }, torn: false }
    }

    #[test]
    fn what_follows_a_line_that_was_cut_begins_on_a_line_of_its_own() {
        let full = Err(ErrorKind::StorageFull);
        let mut lines = scripted([Ok(3), full, full, Ok(1), full]);
        for lost in 0..3 {
            assert!(lines.write_line(b"lost line\n").is_err(), "{lost}");
        }
        for kept in [&b"one\n"[..], b"two\n"] {
            lines.write_line(kept).unwrap();
        }
        assert_eq!(lines.out.taken, b"los\none\ntwo\n");
    }

    #[test]
    fn what_would_block_or_is_interrupted_is_tried_again() {
        let mut lines =
            scripted([Err(ErrorKind::WouldBlock), Ok(2), Err(ErrorKind::Interrupted), Err(ErrorKind::WouldBlock)]);
        lines.write_line(b"whole\n").unwrap();
        assert_eq!(lines.out.taken, b"whole\n");
    }

    #[test]
    fn lines_that_cannot_be_written_are_counted() {
        let sink = Sink::start("test", scripted([Err(ErrorKind::BrokenPipe); 7])).unwrap();
        for _ in 0..10 {
            sink.push(b"line\n");
        }
        sink.end();
        sink.wait(Instant::now() + PATIENCE);
        assert_eq!(sink.dropped(), 7);
    }
}
