//! The load generator: raw HTTP/1.1 connections, one request at a time on each.
//!
//! A subject that hangs fails the run: nothing waits for answers longer than [`STALL`] while none comes.

use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::{Request, header};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::client::conn::http1::{self, SendRequest};
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;
use tokio::task::JoinSet;

use crate::Result;
use crate::answer::{Answer, Expected};

/// Streams that are opened at the same time by [`Held::open`]: a burst of all of them would measure the kernel's queue of connections.
const OPENING: usize = 50;

/// Longest time without any answer: many times as long as the slowest stream of a workload takes.
const STALL: Duration = Duration::from_secs(60);

/// How many answers there were, for whoever waits for more.
#[derive(Debug, Clone, Default)]
pub struct Progress(Arc<AtomicU64>);

impl Progress {
    /// One more.
    pub fn made(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }

    /// Waits for `work`, which tells this of its answers.
    ///
    /// # Errors
    /// Those of `work`, or there was no answer for [`STALL`].
    pub async fn watch<T>(&self, work: impl Future<Output = Result<T>>) -> Result<T> {
        self.watch_for(STALL, work).await
    }

    async fn watch_for<T>(&self, stall: Duration, work: impl Future<Output = Result<T>>) -> Result<T> {
        let mut work = pin!(work);
        let (mut answers, mut since) = (0, Instant::now());
        loop {
            if let Ok(done) = tokio::time::timeout(stall / 60, work.as_mut()).await {
                return done;
            }
            let now = self.0.load(Ordering::Relaxed);
            if now != answers {
                (answers, since) = (now, Instant::now());
            } else if since.elapsed() > stall {
                return Err(format!("it hangs: no answer for {stall:?}, after {answers}").into());
            }
        }
    }
}

/// One kind of request.
#[derive(Debug, Clone)]
pub struct Shot {
    /// `HOST:PORT`.
    pub address: String,
    /// The JSON body of a chat completion.
    pub body: Bytes,
    /// What its answer must hold.
    pub expected: Expected,
}

/// What one answer took.
#[derive(Debug, Clone, Copy, Default)]
pub struct Timing {
    /// To the first bytes of the body.
    pub first: Duration,
    /// To its end.
    pub whole: Duration,
    /// Tokens of a stream.
    pub tokens: u64,
}

/// Opens a connection.
///
/// # Errors
/// It cannot be opened.
pub async fn connect(address: &str) -> Result<SendRequest<Full<Bytes>>> {
    let stream = TcpStream::connect(address).await?;
    stream.set_nodelay(true)?;
    let (sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
    tokio::spawn(connection);
    Ok(sender)
}

async fn begin(sender: &mut SendRequest<Full<Bytes>>, shot: &Shot) -> Result<Incoming> {
    let request = Request::post("/v1/chat/completions")
        .header(header::HOST, shot.address.as_str())
        .header(header::CONTENT_TYPE, "application/json")
        .body(Full::new(shot.body.clone()))?;
    sender.ready().await?;
    let response = sender.send_request(request).await?;
    if !response.status().is_success() {
        let status = response.status();
        let body = response.into_body().collect().await?.to_bytes();
        return Err(format!("answered {status}: {}", String::from_utf8_lossy(&body)).into());
    }
    Ok(response.into_body())
}

/// Sends one request and reads its answer.
///
/// # Errors
/// It was not served, or not as expected.
pub async fn fire(
    sender: &mut SendRequest<Full<Bytes>>,
    shot: &Shot,
    mut gaps: Option<&mut Vec<Duration>>,
) -> Result<Timing> {
    let started = Instant::now();
    let mut body = begin(sender, shot).await?;
    let mut answer = Answer::new(shot.expected);
    let mut timing = Timing::default();
    let mut last: Option<Instant> = None;
    while let Some(frame) = body.frame().await {
        let Ok(data) = frame?.into_data() else { continue };
        let now = Instant::now();
        match last {
            None => timing.first = now - started,
            Some(last) => {
                if let Some(gaps) = gaps.as_deref_mut() {
                    gaps.push(now - last);
                }
            }
        }
        last = Some(now);
        answer.read(&data);
    }
    timing.whole = started.elapsed();
    timing.tokens = answer.end()?;
    Ok(timing)
}

/// What a run saw.
#[derive(Debug, Default)]
pub struct Seen {
    /// Requests.
    pub requests: u64,
    /// Wall time.
    pub wall: Duration,
    /// Tokens of all streams.
    pub tokens: u64,
    /// Whole durations of the requests.
    pub whole: Vec<Duration>,
    /// Times to the first bytes.
    pub first: Vec<Duration>,
    /// Gaps between the reads of streams.
    pub gaps: Vec<Duration>,
    /// How late the generator itself was with each request; the durations of an open loop have it in them.
    pub late: Vec<Duration>,
}

/// Closed loop: `connections` connections, each sending its next request when the last is answered, `requests` in all.
///
/// # Errors
/// A request was not served.
pub async fn closed(shot: &Shot, connections: usize, requests: u64, keep_gaps: bool) -> Result<Seen> {
    let (next, progress) = (Arc::new(AtomicU64::new(0)), Progress::default());
    let started = Instant::now();
    let runners = (0..connections).map(|_| {
        let (next, progress, shot) = (Arc::clone(&next), progress.clone(), shot.clone());
        tokio::spawn(async move {
            let mut sender = connect(&shot.address).await?;
            let mut seen = Seen::default();
            while next.fetch_add(1, Ordering::Relaxed) < requests {
                if sender.is_closed() {
                    sender = connect(&shot.address).await?;
                }
                let timing = fire(&mut sender, &shot, keep_gaps.then_some(&mut seen.gaps)).await?;
                progress.made();
                seen.requests += 1;
                seen.tokens += timing.tokens;
                seen.whole.push(timing.whole);
                seen.first.push(timing.first);
            }
            seen.wall = started.elapsed();
            Ok::<_, Box<dyn std::error::Error + Send + Sync>>(seen)
        })
    });
    let runners: Vec<_> = runners.collect();
    progress.watch(merge(runners)).await
}

/// Adds up what runners saw.
///
/// # Errors
/// What the first of them failed with.
pub async fn merge(runners: Vec<tokio::task::JoinHandle<Result<Seen>>>) -> Result<Seen> {
    let mut all = Seen::default();
    for runner in runners {
        let seen = runner.await??;
        all.requests += seen.requests;
        all.wall = all.wall.max(seen.wall);
        all.tokens += seen.tokens;
        all.whole.extend(seen.whole);
        all.first.extend(seen.first);
        all.gaps.extend(seen.gaps);
        all.late.extend(seen.late);
    }
    Ok(all)
}

/// Streams that are read as they come, until this is dropped.
pub struct Held(JoinSet<Result<()>>);

impl Held {
    /// Opens `count` streams and waits until each has brought something.
    ///
    /// # Errors
    /// A stream cannot be opened, or brings nothing.
    pub async fn open(shot: &Shot, count: usize) -> Result<Self> {
        let progress = Progress::default();
        progress.watch(Self::open_all(shot, count, &progress)).await
    }

    async fn open_all(shot: &Shot, count: usize, progress: &Progress) -> Result<Self> {
        let mut streams = JoinSet::new();
        while streams.len() < count {
            let openings = (0..OPENING.min(count - streams.len())).map(|_| async {
                let mut sender = connect(&shot.address).await?;
                let mut body = begin(&mut sender, shot).await?;
                let mut answer = Answer::new(shot.expected);
                let first = body.frame().await.ok_or("a stream ended at once")??;
                first.data_ref().into_iter().for_each(|data| answer.read(data));
                progress.made();
                Ok::<_, Box<dyn std::error::Error + Send + Sync>>((sender, body, answer))
            });
            for (sender, mut body, mut answer) in futures::future::try_join_all(openings).await? {
                streams.spawn(async move {
                    let _connection = sender;
                    while let Some(frame) = body.frame().await {
                        frame?.data_ref().into_iter().for_each(|data| answer.read(data));
                        answer.check()?;
                    }
                    answer.end().map(drop)
                });
            }
        }
        Ok(Self(streams))
    }

    /// How many there are, every one of which is still open.
    ///
    /// # Errors
    /// One has ended, well or not.
    pub fn still_open(&mut self) -> Result<usize> {
        match self.0.try_join_next() {
            None => Ok(self.0.len()),
            Some(ended) => {
                ended??;
                Err("a stream had its end before memory was read: not all were open at once".into())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    const SHORT: Duration = Duration::from_millis(60);

    #[tokio::test]
    async fn a_peer_that_accepts_and_never_answers_is_told_of() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let shot = Shot {
            address: listener.local_addr().unwrap().to_string(),
            body: Bytes::new(),
            expected: Expected::Document,
        };
        let mut sender = connect(&shot.address).await.unwrap();
        let hung = Progress::default().watch_for(SHORT, fire(&mut sender, &shot, None)).await;
        assert!(hung.unwrap_err().to_string().starts_with("it hangs"));
    }

    #[tokio::test]
    async fn work_may_take_longer_than_a_stall_while_there_are_answers() {
        let progress = Progress::default();
        let work = async {
            let started = Instant::now();
            while started.elapsed() < 3 * SHORT {
                progress.made();
                tokio::task::yield_now().await;
            }
            Ok(())
        };
        progress.watch_for(SHORT, work).await.unwrap();
    }
}
