//! What an engine has received and how each exchange ended, for assertions.
//!
//! The ring is bounded: the oldest exchanges are forgotten first. Counting goes on when recording is off.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use parking_lot::Mutex;
use tokio::sync::watch;

use crate::http::Request;

/// Statuses that say that the engine failed, rather than the request.
const BLAMING: [u16; 5] = [408, 500, 502, 503, 504];
/// Refusals whose ids are remembered: the first ones.
const MOST_REFUSALS: usize = 65_536;

/// One exchange, as far as it has gone.
#[derive(Clone, Debug)]
pub struct Recorded {
    /// Request method as sent.
    pub method: String,
    /// Path without the query.
    pub path: String,
    /// Query without the question mark, empty when there is none.
    pub query: String,
    /// Every header line in order, duplicates included, names in the case they were sent.
    pub headers: Vec<(String, Vec<u8>)>,
    /// Raw body, transfer coding removed.
    pub body: Bytes,
    /// Number of the connection it came on: equal numbers are a reused connection.
    pub connection: u64,
    /// When the request had been read.
    pub arrived_at: Instant,
    /// When the engine was done with the exchange, whatever its end.
    pub finished_at: Option<Instant>,
    /// When the peer was seen to close the connection before the answer was complete.
    pub peer_closed_at: Option<Instant>,
    /// Bytes of the answer written to the socket so far, head and chunk framing included.
    pub bytes_sent: u64,
    /// Status of the answer; `None` until a head was written.
    pub status: Option<u16>,
}

impl Recorded {
    /// The values of a header, in order, by case-insensitive name; values that are no UTF-8 are left out.
    pub fn header_values<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a str> {
        self.headers
            .iter()
            .filter(move |(key, _)| key.eq_ignore_ascii_case(name))
            .filter_map(|(_, value)| std::str::from_utf8(value).ok())
    }

    /// The first value of a header.
    pub fn header<'a>(&'a self, name: &'a str) -> Option<&'a str> {
        self.header_values(name).next()
    }

    /// The body as JSON; `Null` when it is none.
    pub fn json(&self) -> serde_json::Value {
        serde_json::from_slice(&self.body).unwrap_or_default()
    }

    /// Whether the request asks for generated text.
    pub fn is_generation(&self) -> bool {
        self.method == "POST" && crate::http::is_generation(&self.path)
    }
}

/// How the exchanges of an engine have ended since its start: whatever was posted. Each is counted once; unfinished ones have only arrived.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// All that arrived.
    pub arrived: u64,
    /// Answered as it should be, with any status that does not blame the engine.
    pub served: u64,
    /// Met a fault, whatever became of it.
    pub faulty: u64,
    /// Met none, and was answered with 408 or 5xx.
    pub failed: u64,
    /// Met none, and the engine cut it off: it was stopped.
    pub cut: u64,
    /// Met none, and the peer left before the answer was out.
    pub abandoned: u64,
    /// As `abandoned`, after a wait longer than the transfer deadline.
    pub abandoned_late: u64,
}

/// An exchange in the ring.
pub(crate) struct Entry {
    request: Recorded,
    sent: AtomicU64,
    end: Mutex<End>,
}

#[derive(Default)]
struct End {
    status: Option<u16>,
    finished_at: Option<Instant>,
    peer_closed_at: Option<Instant>,
}

impl Entry {
    fn snapshot(&self) -> Recorded {
        let end = self.end.lock();
        Recorded {
            bytes_sent: self.sent.load(Ordering::Relaxed),
            status: end.status,
            finished_at: end.finished_at,
            peer_closed_at: end.peer_closed_at,
            ..self.request.clone()
        }
    }
}

/// The ring and the signal that something in it has changed.
pub(crate) struct Recorder {
    capacity: usize,
    ring: Mutex<VecDeque<Arc<Entry>>>,
    arrived: AtomicU64,
    tally: Mutex<Tally>,
    refusals: Mutex<Vec<String>>,
    /// After this an abandoned exchange is a late one.
    patience: Duration,
    changes: watch::Sender<()>,
}

impl Recorder {
    /// `capacity` 0 turns recording off.
    pub(crate) fn new(capacity: usize, patience: Duration) -> Self {
        Recorder {
            capacity,
            ring: Mutex::default(),
            arrived: AtomicU64::new(0),
            tally: Mutex::default(),
            refusals: Mutex::default(),
            patience,
            changes: watch::Sender::new(()),
        }
    }

    /// A request has been read; the answer is an exchange that writes its progress into the ring.
    pub(crate) fn arrived(self: &Arc<Self>, request: &Request, connection: u64) -> Exchange {
        if request.is_generation() {
            self.arrived.fetch_add(1, Ordering::Relaxed);
        }
        let entry = (self.capacity > 0).then(|| {
            let entry = Arc::new(Entry {
                request: Recorded {
                    method: request.method.clone(),
                    path: request.path.clone(),
                    query: request.query.clone(),
                    headers: request.headers.clone(),
                    body: request.body.clone(),
                    connection,
                    arrived_at: Instant::now(),
                    finished_at: None,
                    peer_closed_at: None,
                    bytes_sent: 0,
                    status: None,
                },
                sent: AtomicU64::new(0),
                end: Mutex::default(),
            });
            let mut ring = self.ring.lock();
            if ring.len() == self.capacity {
                ring.pop_front();
            }
            ring.push_back(Arc::clone(&entry));
            entry
        });
        self.changed();
        let counts = request.method == "POST";
        if counts {
            self.tally.lock().arrived += 1;
        }
        Exchange { entry, recorder: Arc::clone(self), counts, arrived_at: Instant::now(), fate: Mutex::default() }
    }

    pub(crate) fn all(&self) -> Vec<Recorded> {
        self.ring.lock().iter().map(|entry| entry.snapshot()).collect()
    }

    /// Generation requests since the start, forgotten and unrecorded ones included.
    pub(crate) fn generations(&self) -> u64 {
        self.arrived.load(Ordering::Relaxed)
    }

    pub(crate) fn tally(&self) -> Tally {
        *self.tally.lock()
    }

    /// An answer is out, with this status.
    pub(crate) fn answered(&self, request: &Request, status: u16) {
        if !BLAMING.contains(&status) {
            return;
        }
        let mut refusals = self.refusals.lock();
        if let Some(id) = request.header("x-request-id").filter(|_| refusals.len() < MOST_REFUSALS) {
            refusals.push(id.to_owned());
        }
    }

    pub(crate) fn refusals(&self) -> Vec<String> {
        self.refusals.lock().clone()
    }

    pub(crate) fn clear(&self) {
        self.ring.lock().clear();
    }

    pub(crate) fn subscribe(&self) -> watch::Receiver<()> {
        self.changes.subscribe()
    }

    /// Wakes everybody who waits for a condition.
    pub(crate) fn changed(&self) {
        self.changes.send_replace(());
    }
}

/// The recording side of one exchange. Its drop is the exchange's end.
pub(crate) struct Exchange {
    entry: Option<Arc<Entry>>,
    recorder: Arc<Recorder>,
    counts: bool,
    arrived_at: Instant,
    fate: Mutex<Fate>,
}

/// What is known of an exchange's end.
#[derive(Default)]
struct Fate {
    faulty: bool,
    status: Option<u16>,
    complete: bool,
    peer_closed: bool,
}

impl Exchange {
    pub(crate) fn faulty(&self) {
        self.fate.lock().faulty = true;
    }

    /// The answer is out as it should be.
    pub(crate) fn complete(&self) {
        self.fate.lock().complete = true;
    }

    fn count(&self) {
        let fate = self.fate.lock();
        let mut tally = self.recorder.tally.lock();
        let count = match *fate {
            Fate { faulty: true, .. } => &mut tally.faulty,
            Fate { complete: true, status: Some(408 | 500..), .. } => &mut tally.failed,
            Fate { complete: true, .. } => &mut tally.served,
            Fate { peer_closed: false, .. } => &mut tally.cut,
            _ if self.arrived_at.elapsed() > self.recorder.patience => &mut tally.abandoned_late,
            _ => &mut tally.abandoned,
        };
        *count += 1;
    }

    pub(crate) fn status(&self, status: u16) {
        self.fate.lock().status = Some(status);
        if let Some(entry) = &self.entry {
            entry.end.lock().status = Some(status);
        }
    }

    pub(crate) fn sent(&self, bytes: usize) {
        if let Some(entry) = &self.entry {
            entry.sent.fetch_add(bytes as u64, Ordering::Relaxed);
        }
    }

    pub(crate) fn peer_closed(&self) {
        self.fate.lock().peer_closed = true;
        if let Some(entry) = &self.entry {
            entry.end.lock().peer_closed_at = Some(Instant::now());
        }
    }
}

impl Drop for Exchange {
    fn drop(&mut self) {
        if self.counts {
            self.count();
        }
        if let Some(entry) = &self.entry {
            entry.end.lock().finished_at = Some(Instant::now());
        }
        self.recorder.changed();
    }
}
