//! Side-by-side benchmarks: mock engines, gateways and a load generator on one machine, in one run.
//!
//! Every subject is measured in turn, repetition by repetition, so that what else the machine does hits all alike; the table shows medians
//! and ratios. CPU per request (user and system time of the gateway's process tree, from `/proc`) is the figure to trust on a busy machine;
//! rates and latencies are ratios at best.

mod load;
mod process;
mod subject;
mod table;
mod workload;

use clap::Parser;

use subject::{Fleet, Kind, Pairs, Subject};
use workload::Workload;

/// Any failure ends the run with words: a benchmark that goes on after one measures nothing.
pub type Result<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;

/// What to measure.
#[derive(Debug, Parser)]
#[command(about = "Measures smg beside other gateways; prints a table")]
struct Arguments {
    /// Repetitions of each measurement; the table shows medians
    #[arg(long, default_value_t = 3)]
    reps: usize,
    /// Fewer requests per measurement
    #[arg(long)]
    quick: bool,
    /// Only these workloads, comma separated: small, b32k, b256k, stream, paced, grpc-small, grpc-b32k, grpc-stream, latency, memory,
    /// scale
    #[arg(long, value_delimiter = ',')]
    only: Vec<String>,
    /// Folder of the smg and mock-engine binaries [default: that of this program]
    #[arg(long)]
    binaries: Option<std::path::PathBuf>,
    /// Another gateway in front of the SGLang pair: NAME=COMMAND, run by sh with BENCH_PORT, BENCH_METRICS_PORT, BENCH_PREFILL,
    /// BENCH_DECODE (space separated URLs), BENCH_BOOTSTRAP (ports, in the order of the prefills), BENCH_REGULAR (URL of an engine outside of pairs) and BENCH_MODEL set
    #[arg(long)]
    peer: Vec<String>,
    /// The same in front of the vLLM pair
    #[arg(long)]
    vllm_peer: Vec<String>,
    /// The same in front of the SGLang pair whose engines speak gRPC
    #[arg(long)]
    grpc_peer: Vec<String>,
}

#[tokio::main]
async fn main() -> std::process::ExitCode {
    match run(Arguments::parse()).await {
        Ok(()) => std::process::ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("benchmark failed: {error}");
            std::process::ExitCode::FAILURE
        }
    }
}

async fn run(arguments: Arguments) -> Result<()> {
    let binaries = match arguments.binaries {
        Some(folder) => folder,
        None => std::env::current_exe()?.parent().ok_or("no folder of this program")?.to_owned(),
    };
    let of = |peers: &[String], pairs| -> Result<Vec<Kind>> {
        let one = |peer: &String| {
            let (name, command) = peer.split_once('=').ok_or("a peer is NAME=COMMAND")?;
            Ok(Kind::Peer { pairs, name: name.to_owned(), command: command.to_owned() })
        };
        peers.iter().map(one).collect()
    };
    let mut peers = of(&arguments.peer, Pairs::Sglang)?;
    peers.extend(of(&arguments.vllm_peer, Pairs::Vllm)?);
    let grpc_peers = of(&arguments.grpc_peer, Pairs::SglangGrpc)?;
    let floor = binaries.join("smg-bench-floor").display().to_string();
    let floor = Kind::Peer { pairs: Pairs::Sglang, name: "floor".to_owned(), command: format!("exec '{floor}'") };
    let base = peers.first().unwrap_or(&floor).name();
    let wanted =
        |workload: &Workload| arguments.only.is_empty() || arguments.only.iter().any(|name| name == workload.name());
    let workloads: Vec<Workload> = Workload::all(arguments.quick).into_iter().filter(wanted).collect();
    if workloads.is_empty() {
        return Err("no such workload".into());
    }
    println!("{}", process::machine());
    for workload in workloads {
        let mut kinds = vec![Kind::Direct, Kind::SmgSglang, Kind::SmgVllm, floor.clone()];
        kinds.extend(peers.iter().cloned());
        kinds.push(Kind::SmgGrpc);
        kinds.extend(grpc_peers.iter().cloned());
        let base = if workload.is_over_grpc() { grpc_peers.first().and_then(Kind::name) } else { base.clone() };
        let mut rows = table::Rows::new(workload.name(), workload.describe(), base);
        for workers in workload.worker_counts() {
            // All subjects are up at once, so that repetitions interleave.
            let mut fleet = Fleet::new(&binaries, workers, &workload);
            let mut subjects = Vec::new();
            for kind in kinds.iter().filter(|kind| workload.includes(kind)) {
                subjects.push(Subject::start(kind, &mut fleet).await?);
            }
            let rested = workload.rest(&subjects).await?;
            for _ in 0..workload.repetitions(arguments.reps) {
                let mut direct = None;
                for (index, subject) in subjects.iter().enumerate() {
                    let mut measured = workload.measure(subject, rested.get(index).copied()).await?;
                    if subject.is_direct() {
                        direct = Some(measured.clone());
                    }
                    if let Some(direct) = &direct {
                        workload.compare(direct, &mut measured);
                    }
                    rows.add(&subject.label(workers, workload.worker_counts().len() > 1), measured);
                }
            }
        }
        println!("{}", rows.render());
        println!("\n{}", process::load());
    }
    Ok(())
}
