//! What is done to a subject, and what is read off it.

use std::time::{Duration, Instant};

use bytes::Bytes;
use serde_json::json;

use crate::Result;
use crate::answer::Expected;
use crate::load::{self, Held, Shot};
use crate::open_loop;
use crate::process::Process;
use crate::subject::{Kind, Pairs, Subject};
use crate::table::{Figures, percentile};

/// The model of all engines.
pub const MODEL: &str = "bench";

/// The workloads by name, in their order.
pub const NAMES: [&str; 11] = [
    "small",
    "b32k",
    "b256k",
    "stream",
    "paced",
    "grpc-small",
    "grpc-b32k",
    "grpc-stream",
    "latency",
    "memory",
    "scale",
];

/// Tokens of a measured stream.
const STREAM_TOKENS: u64 = 256;
/// How long a subject of `latency` is asked before it is measured: its connections, and those to its engines, are open then.
const WARM_UP: Duration = Duration::from_secs(1);
/// How long streams are held open for their memory, from when the last of them has begun.
const HELD: Duration = Duration::from_secs(4);

/// A workload.
#[derive(Debug, Clone)]
pub enum Workload {
    /// One output token, closed loop over 64 connections.
    Closed {
        /// Its name.
        name: &'static str,
        /// Of engines that speak gRPC.
        grpc: bool,
        /// Bytes of prompt.
        prompt: usize,
        /// Requests a repetition.
        requests: u64,
    },
    /// 64 concurrent streams of 256 tokens.
    Streams {
        /// Its name.
        name: &'static str,
        /// Of engines that speak gRPC.
        grpc: bool,
        /// Streams a repetition.
        streams: u64,
        /// Milliseconds between tokens.
        pace: u64,
    },
    /// Open loop, timed from the intended send.
    Latency {
        /// Requests a second.
        rate: f64,
        /// How long.
        duration: Duration,
    },
    /// Memory and CPU at rest, and memory with many slow streams open.
    Memory {
        /// Streams.
        streams: usize,
        /// How long to look at the idle process.
        idle: Duration,
    },
    /// The small closed loop over growing fleets.
    Scale {
        /// Requests a repetition.
        requests: u64,
        /// Fleet sizes.
        sizes: &'static [usize],
    },
}

impl Workload {
    /// Every workload.
    pub fn all(quick: bool) -> Vec<Workload> {
        let share = if quick { 5 } else { 1 };
        vec![
            Workload::Closed { name: "small", grpc: false, prompt: 24, requests: 20_000 / share },
            Workload::Closed { name: "b32k", grpc: false, prompt: 32 * 1024, requests: 10_000 / share },
            Workload::Closed { name: "b256k", grpc: false, prompt: 256 * 1024, requests: 2_500 / share },
            Workload::Streams { name: "stream", grpc: false, streams: 640 / share, pace: 0 },
            Workload::Streams { name: "paced", grpc: false, streams: 128, pace: 10 },
            Workload::Closed { name: "grpc-small", grpc: true, prompt: 24, requests: 10_000 / share },
            Workload::Closed { name: "grpc-b32k", grpc: true, prompt: 32 * 1024, requests: 1_500 / share },
            Workload::Streams { name: "grpc-stream", grpc: true, streams: 640 / share, pace: 0 },
            Workload::Latency { rate: 500.0, duration: Duration::from_secs(if quick { 2 } else { 6 }) },
            Workload::Memory { streams: 2_000 / share as usize, idle: Duration::from_secs(if quick { 5 } else { 60 }) },
            Workload::Scale { requests: 5_000 / share, sizes: if quick { &[2, 32] } else { &[2, 32, 128, 512] } },
        ]
    }

    /// Its name.
    pub fn name(&self) -> &'static str {
        match self {
            Workload::Closed { name, .. } | Workload::Streams { name, .. } => name,
            Workload::Latency { .. } => "latency",
            Workload::Memory { .. } => "memory",
            Workload::Scale { .. } => "scale",
        }
    }

    /// What it does, in words.
    pub fn describe(&self) -> String {
        match self {
            Workload::Closed { prompt, requests, .. } => format!(
                "{requests} requests of {prompt} prompt bytes and 1 output token, 64 connections, closed loop{}",
                self.wire()
            ),
            Workload::Streams { streams, pace, .. } => {
                format!(
                    "{streams} streams of {STREAM_TOKENS} tokens, 64 at a time, {pace} ms between tokens{}",
                    self.wire()
                )
            }
            Workload::Latency { rate, .. } => {
                format!("{rate} requests a second, open loop, timed from the intended send")
            }
            Workload::Memory { streams, idle } => {
                format!("at rest for {} s, then {streams} slow streams open at once", idle.as_secs())
            }
            Workload::Scale { requests, .. } => {
                format!("{requests} small requests over growing fleets, half of them prefills")
            }
        }
    }

    fn wire(&self) -> &'static str {
        if self.is_over_grpc() { "; engines speak gRPC" } else { "" }
    }

    /// Fleet sizes to measure.
    pub fn worker_counts(&self) -> Vec<usize> {
        match self {
            Workload::Scale { sizes, .. } => sizes.to_vec(),
            _ => vec![4],
        }
    }

    /// Whether each repetition has processes of its own: memory that was used once stays with its process.
    pub fn wants_fresh_processes(&self) -> bool {
        matches!(self, Workload::Memory { .. })
    }

    /// Adds what can only be said beside the engine that was asked directly in the same repetition.
    pub fn compare(&self, direct: &Figures, measured: &mut Figures) {
        let of = |figures: &Figures, wanted: &str| {
            figures.iter().find(|(name, _)| *name == wanted).map_or(f64::NAN, |(_, value)| *value)
        };
        match self {
            Workload::Latency { .. } => {
                // No more than the median: a difference of two tails is mostly what the generator itself was late.
                measured.push(("added p50 us", of(measured, "p50 us") - of(direct, "p50 us")));
            }
            Workload::Streams { .. } => {
                measured.push(("gap p50 / direct", of(measured, "gap p50 us") / of(direct, "gap p50 us")));
            }
            _ => {}
        }
    }

    /// Leaves all subjects at rest; for each its resident memory in KiB and the share of a core that it used meanwhile.
    pub async fn rest(&self, subjects: &[Subject]) -> Result<Vec<(u64, f64)>> {
        let Workload::Memory { idle, .. } = self else { return Ok(Vec::new()) };
        // What a start leaves behind is not rest.
        tokio::time::sleep(Duration::from_secs(2)).await;
        let used = || subjects.iter().map(|subject| subject.gateway.as_ref().map_or(Ok(0.0), Process::cpu_seconds));
        let (started, before) = (Instant::now(), used().collect::<Result<Vec<f64>>>()?);
        tokio::time::sleep(*idle).await;
        let (elapsed, after) = (started.elapsed().as_secs_f64(), used().collect::<Result<Vec<f64>>>()?);
        let shares = before.iter().zip(after).map(|(before, after)| (after - before) / elapsed);
        let resident = subjects.iter().map(|subject| subject.gateway.as_ref().map_or(Ok(0), Process::resident_kib));
        resident.zip(shares).map(|(resident, share)| Ok((resident?, share))).collect()
    }

    /// Whether its engines speak gRPC.
    pub fn is_over_grpc(&self) -> bool {
        matches!(self, Workload::Closed { grpc: true, .. } | Workload::Streams { grpc: true, .. })
    }

    /// Whether a subject takes part.
    pub fn includes(&self, kind: &Kind) -> bool {
        if self.is_over_grpc() || kind.pairs() == Pairs::SglangGrpc {
            return self.is_over_grpc() && kind.pairs() == Pairs::SglangGrpc;
        }
        !matches!((self, kind), (Workload::Memory { .. } | Workload::Scale { .. }, Kind::Direct))
    }

    /// Milliseconds between tokens of the engines.
    pub fn token_delay_ms(&self) -> u64 {
        match self {
            Workload::Streams { pace, .. } => *pace,
            Workload::Memory { .. } => 500,
            _ => 0,
        }
    }

    fn shot(&self, subject: &Subject) -> Shot {
        let (prompt, tokens, stream) = match self {
            Workload::Closed { prompt, .. } => (*prompt, 1, false),
            Workload::Streams { .. } => (24, STREAM_TOKENS, true),
            // Longer than any opening of all of them takes: who looks leaves before the end.
            Workload::Memory { .. } => (24, 60, true),
            Workload::Latency { .. } | Workload::Scale { .. } => (24, 1, false),
        };
        let expected = match (stream, self.is_over_grpc()) {
            (false, _) => Expected::Document,
            (true, false) => Expected::Tokens(tokens),
            // A gateway that makes the text itself may put several tokens into an event: a character can be several.
            (true, true) => Expected::Usage(tokens),
        };
        let content = "lorem ipsum ".chars().cycle().take(prompt).collect::<String>();
        let mut body = json!({
            "model": MODEL,
            "messages": [{"role": "user", "content": content}],
            "max_tokens": tokens,
            "stream": stream,
        });
        if matches!(expected, Expected::Usage(_)) {
            body["stream_options"] = json!({"include_usage": true});
        }
        Shot { address: subject.address.clone(), body: Bytes::from(body.to_string()), expected }
    }

    /// Measures a subject once; `rested` is what [`Self::rest`] said of it.
    pub async fn measure(&self, subject: &Subject, rested: Option<(u64, f64)>) -> Result<Figures> {
        let shot = self.shot(subject);
        let cpu = || subject.gateway.as_ref().map_or(Ok(f64::NAN), |gateway| gateway.cpu_seconds());
        if let Workload::Latency { rate, .. } = self {
            open_loop::open(&shot, *rate, WARM_UP).await?;
        }
        let before = cpu()?;
        match self {
            Workload::Closed { requests, .. } | Workload::Scale { requests, .. } => {
                let seen = load::closed(&shot, 64, *requests, false).await?;
                let used = cpu()? - before;
                Ok(vec![
                    ("req/s", seen.requests as f64 / seen.wall.as_secs_f64()),
                    ("gateway CPU us/req", used * 1e6 / seen.requests as f64),
                    ("p50 us", percentile(&seen.whole, 0.5)),
                    ("p99 us", percentile(&seen.whole, 0.99)),
                ])
            }
            Workload::Streams { streams, .. } => {
                let seen = load::closed(&shot, 64, *streams, true).await?;
                let used = cpu()? - before;
                Ok(vec![
                    ("tokens/s", seen.tokens as f64 / seen.wall.as_secs_f64()),
                    ("gateway CPU s/1M tokens", used * 1e6 / seen.tokens as f64),
                    ("first p50 us", percentile(&seen.first, 0.5)),
                    ("gap p50 us", percentile(&seen.gaps, 0.5)),
                    ("gap p99 us", percentile(&seen.gaps, 0.99)),
                ])
            }
            Workload::Latency { rate, duration } => {
                let seen = open_loop::open(&shot, *rate, *duration).await?;
                let used = cpu()? - before;
                Ok(vec![
                    ("p50 us", percentile(&seen.whole, 0.5)),
                    ("p99 us", percentile(&seen.whole, 0.99)),
                    ("gateway CPU us/req", used * 1e6 / seen.requests as f64),
                    ("late p99 us", percentile(&seen.late, 0.99)),
                ])
            }
            Workload::Memory { streams, .. } => memory(subject, &shot, *streams, rested.ok_or("not rested")?).await,
        }
    }
}

async fn memory(subject: &Subject, shot: &Shot, streams: usize, (at_rest, idle_cpu): (u64, f64)) -> Result<Figures> {
    let gateway = subject.gateway.as_ref().ok_or("memory is measured on gateways")?;
    gateway.forget_peak()?;
    let mut held = Held::open(shot, streams).await?;
    tokio::time::sleep(HELD).await;
    let peak = gateway.peak_kib()?;
    let open = held.still_open()?;
    drop(held);
    Ok(vec![
        ("RSS idle MiB", at_rest as f64 / 1024.0),
        ("idle CPU %", idle_cpu * 100.0),
        ("open streams", open as f64),
        ("RSS peak MiB", peak as f64 / 1024.0),
        ("KiB/stream", peak.saturating_sub(at_rest) as f64 / open as f64),
    ])
}
