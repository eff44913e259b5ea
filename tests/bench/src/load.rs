//! The load generator: raw HTTP/1.1 connections, one request at a time on each.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::{Request, header};
use http_body_util::{BodyExt, Full};
use hyper::client::conn::http1::{self, SendRequest};
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;

use crate::Result;

/// One kind of request.
#[derive(Debug, Clone)]
pub struct Shot {
    /// `HOST:PORT`.
    pub address: String,
    /// The JSON body of a chat completion.
    pub body: Bytes,
    /// Whether the answer is a stream.
    pub stream: bool,
}

/// What one answer took.
#[derive(Debug, Clone, Copy, Default)]
pub struct Timing {
    /// To the first bytes of the body.
    pub first: Duration,
    /// To its end.
    pub whole: Duration,
    /// Events of a stream.
    pub events: u64,
}

async fn connect(address: &str) -> Result<SendRequest<Full<Bytes>>> {
    let stream = TcpStream::connect(address).await?;
    stream.set_nodelay(true)?;
    let (sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
    tokio::spawn(connection);
    Ok(sender)
}

async fn fire(sender: &mut SendRequest<Full<Bytes>>, shot: &Shot, gaps: Option<&mut Vec<Duration>>) -> Result<Timing> {
    let request = Request::post("/v1/chat/completions")
        .header(header::HOST, shot.address.as_str())
        .header(header::CONTENT_TYPE, "application/json")
        .body(Full::new(shot.body.clone()))?;
    let started = Instant::now();
    sender.ready().await?;
    let response = sender.send_request(request).await?;
    if !response.status().is_success() {
        let status = response.status();
        let body = response.into_body().collect().await?.to_bytes();
        return Err(format!("answered {status}: {}", String::from_utf8_lossy(&body)).into());
    }
    let mut body = response.into_body();
    let mut timing = Timing::default();
    let mut last: Option<Instant> = None;
    let mut gaps = gaps;
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
        if shot.stream {
            timing.events += data.windows(6).filter(|window| window == b"data: ").count() as u64;
        }
    }
    timing.whole = started.elapsed();
    Ok(timing)
}

/// What a run saw.
#[derive(Debug, Default)]
pub struct Seen {
    /// Requests.
    pub requests: u64,
    /// Wall time.
    pub wall: Duration,
    /// Events of all streams.
    pub events: u64,
    /// Whole durations of the requests.
    pub whole: Vec<Duration>,
    /// Times to the first bytes.
    pub first: Vec<Duration>,
    /// Gaps between the reads of streams.
    pub gaps: Vec<Duration>,
}

/// Closed loop: `connections` connections, each sending its next request when the last is answered, `requests` in all.
pub async fn closed(shot: &Shot, connections: usize, requests: u64, keep_gaps: bool) -> Result<Seen> {
    let next = Arc::new(AtomicU64::new(0));
    let started = Instant::now();
    let runners = (0..connections).map(|_| {
        let (next, shot) = (Arc::clone(&next), shot.clone());
        tokio::spawn(async move {
            let mut sender = connect(&shot.address).await?;
            let mut seen = Seen::default();
            while next.fetch_add(1, Ordering::Relaxed) < requests {
                if sender.is_closed() {
                    sender = connect(&shot.address).await?;
                }
                let timing = fire(&mut sender, &shot, keep_gaps.then_some(&mut seen.gaps)).await?;
                seen.requests += 1;
                seen.events += timing.events;
                seen.whole.push(timing.whole);
                seen.first.push(timing.first);
            }
            Ok::<_, Box<dyn std::error::Error + Send + Sync>>(seen)
        })
    });
    let mut all = merge(runners.collect::<Vec<_>>()).await?;
    all.wall = started.elapsed();
    Ok(all)
}

/// Open loop: `rate` requests a second for `duration`, each timed from when it was meant to be sent, whatever the others do.
pub async fn open(shot: &Shot, rate: f64, duration: Duration) -> Result<Seen> {
    let started = Instant::now();
    let count = (rate * duration.as_secs_f64()) as u64;
    let pool = Arc::new(tokio::sync::Mutex::new(Vec::<SendRequest<Full<Bytes>>>::new()));
    let mut runners = Vec::new();
    for index in 0..count {
        let intended = started + Duration::from_secs_f64(index as f64 / rate);
        tokio::time::sleep_until(intended.into()).await;
        let (pool, shot) = (Arc::clone(&pool), shot.clone());
        runners.push(tokio::spawn(async move {
            let idle = pool.lock().await.pop();
            let mut sender = match idle.filter(|sender| !sender.is_closed()) {
                Some(sender) => sender,
                None => connect(&shot.address).await?,
            };
            let late = intended.elapsed();
            let timing = fire(&mut sender, &shot, None).await?;
            pool.lock().await.push(sender);
            Ok::<_, Box<dyn std::error::Error + Send + Sync>>(Seen {
                requests: 1,
                events: timing.events,
                whole: vec![timing.whole + late],
                first: vec![timing.first + late],
                ..Seen::default()
            })
        }));
    }
    let mut all = merge(runners).await?;
    all.wall = started.elapsed();
    Ok(all)
}

async fn merge(runners: Vec<tokio::task::JoinHandle<Result<Seen>>>) -> Result<Seen> {
    let mut all = Seen::default();
    for runner in runners {
        let seen = runner.await??;
        all.requests += seen.requests;
        all.events += seen.events;
        all.whole.extend(seen.whole);
        all.first.extend(seen.first);
        all.gaps.extend(seen.gaps);
    }
    Ok(all)
}

/// A stream that is held open.
pub struct Held {
    body: hyper::body::Incoming,
    _sender: SendRequest<Full<Bytes>>,
}

/// Opens `count` streams and waits until each has begun.
pub async fn hold(shot: &Shot, count: usize) -> Result<Vec<Held>> {
    let mut held = Vec::with_capacity(count);
    for chunk in 0..count.div_ceil(50) {
        let openings = (chunk * 50..count.min((chunk + 1) * 50)).map(|_| async {
            let mut sender = connect(&shot.address).await?;
            let request = Request::post("/v1/chat/completions")
                .header(header::HOST, shot.address.as_str())
                .header(header::CONTENT_TYPE, "application/json")
                .body(Full::new(shot.body.clone()))?;
            let response = sender.send_request(request).await?;
            if !response.status().is_success() {
                return Err(format!("answered {}", response.status()).into());
            }
            let mut body = response.into_body();
            body.frame().await.ok_or("the stream ended at once")??;
            Ok::<_, Box<dyn std::error::Error + Send + Sync>>(Held { body, _sender: sender })
        });
        held.extend(futures::future::try_join_all(openings).await?);
    }
    Ok(held)
}

/// Reads held streams to their ends.
pub async fn finish(held: Vec<Held>) -> Result<()> {
    let ends = held.into_iter().map(|held| async move {
        let mut body = held.body;
        while let Some(frame) = body.frame().await {
            frame?;
        }
        Ok::<_, hyper::Error>(())
    });
    futures::future::try_join_all(ends).await?;
    Ok(())
}
