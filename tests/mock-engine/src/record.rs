//! What an engine has received and how each exchange ended, for assertions.
//!
//! The ring is bounded: the oldest exchanges are forgotten first. Counting goes on when recording is off.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use bytes::Bytes;
use parking_lot::Mutex;
use tokio::sync::watch;

use crate::http::Request;

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
    changes: watch::Sender<()>,
}

impl Recorder {
    /// `capacity` 0 turns recording off.
    pub(crate) fn new(capacity: usize) -> Self {
        Recorder { capacity, ring: Mutex::default(), arrived: AtomicU64::new(0), changes: watch::Sender::new(()) }
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
        Exchange { entry, recorder: Arc::clone(self) }
    }

    pub(crate) fn all(&self) -> Vec<Recorded> {
        self.ring.lock().iter().map(|entry| entry.snapshot()).collect()
    }

    /// Generation requests since the start, forgotten and unrecorded ones included.
    pub(crate) fn generations(&self) -> u64 {
        self.arrived.load(Ordering::Relaxed)
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
}

impl Exchange {
    pub(crate) fn status(&self, status: u16) {
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
        if let Some(entry) = &self.entry {
            entry.end.lock().peer_closed_at = Some(Instant::now());
        }
    }
}

impl Drop for Exchange {
    fn drop(&mut self) {
        if let Some(entry) = &self.entry {
            entry.end.lock().finished_at = Some(Instant::now());
        }
        self.recorder.changed();
    }
}
