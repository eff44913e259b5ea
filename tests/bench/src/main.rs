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

use subject::{Kind, Subject};
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
    /// Only these workloads, comma separated: small, b32k, b256k, stream, paced, latency, memory, scale
    #[arg(long, value_delimiter = ',')]
    only: Vec<String>,
    /// Folder of the smg and mock-engine binaries [default: that of this program]
    #[arg(long)]
    binaries: Option<std::path::PathBuf>,
    /// Another gateway in front of the SGLang pair: NAME=COMMAND, run by sh with BENCH_PORT, BENCH_METRICS_PORT, BENCH_PREFILL,
    /// BENCH_DECODE (space separated URLs), BENCH_BOOTSTRAP (ports, in the order of the prefills) and BENCH_MODEL set
    #[arg(long)]
    peer: Vec<String>,
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
    let peers = arguments.peer.iter().map(|peer| {
        let (name, command) = peer.split_once('=').ok_or("a peer is NAME=COMMAND")?;
        Ok(Kind::Peer { name: name.to_owned(), command: command.to_owned() })
    });
    let peers = peers.collect::<Result<Vec<_>>>()?;
    let wanted =
        |workload: &Workload| arguments.only.is_empty() || arguments.only.iter().any(|name| name == workload.name());
    let workloads: Vec<Workload> = Workload::all(arguments.quick).into_iter().filter(wanted).collect();
    if workloads.is_empty() {
        return Err("no such workload".into());
    }
    println!("{}", process::machine());
    for workload in workloads {
        let mut kinds = vec![Kind::Direct, Kind::SmgSglang, Kind::SmgVllm];
        kinds.extend(peers.iter().cloned());
        let mut rows = table::Rows::new(workload.name(), workload.describe());
        for workers in workload.worker_counts() {
            // All subjects are up at once, each with engines of its own settings, so that repetitions interleave.
            let mut subjects = Vec::new();
            for kind in kinds.iter().filter(|kind| workload.includes(kind)) {
                subjects.push(Subject::start(&binaries, kind, workers, &workload).await?);
            }
            for _ in 0..arguments.reps {
                for subject in &subjects {
                    let measured = workload.measure(subject).await?;
                    rows.add(&subject.label(workers, workload.worker_counts().len() > 1), measured);
                }
            }
        }
        println!("{}", rows.render());
    }
    Ok(())
}
