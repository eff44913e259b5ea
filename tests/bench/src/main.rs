//! Side-by-side benchmarks: mock engines, gateways and a load generator on one machine, in one run.
//!
//! Every subject is measured in turn, repetition by repetition, so that what else the machine does hits all alike; the table shows medians
//! and ratios. CPU per request (user and system time of the gateway's process tree, from `/proc`) is the figure to trust on a busy machine;
//! rates and latencies are ratios at best.

mod answer;
mod load;
mod open_loop;
mod process;
mod subject;
mod table;
mod workload;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Parser;
use clap::builder::PossibleValuesParser;
use tokio::signal::unix::{SignalKind, signal};

use subject::{Fleet, Kind, Pairs, Subject};
use workload::Workload;

/// Any failure ends the run with words: a benchmark that goes on after one measures nothing.
pub type Result<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;

/// The machine cannot do it; nothing was started.
const EXIT_MISSING: u8 = 2;
/// A signal ended the run.
const EXIT_INTERRUPTED: u8 = 130;

/// What to measure.
#[derive(Debug, Parser)]
#[command(about = "Measures smg beside other gateways; prints a table")]
struct Arguments {
    /// Repetitions of each measurement; the table shows medians
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u16).range(1..))]
    reps: u16,
    /// Fewer requests per measurement
    #[arg(long)]
    quick: bool,
    /// Only these workloads, comma separated
    #[arg(long, value_delimiter = ',', value_parser = PossibleValuesParser::new(workload::NAMES))]
    only: Vec<String>,
    /// Folder of the smg and mock-engine binaries [default: that of this program]
    #[arg(long)]
    binaries: Option<PathBuf>,
    /// Another gateway in front of the SGLang pairs: NAME=COMMAND, run by sh with BENCH_PORT, BENCH_METRICS_PORT, BENCH_PREFILL,
    /// BENCH_DECODE (space separated URLs), BENCH_BOOTSTRAP (ports, in the order of the prefills), BENCH_REGULAR (URL of an engine
    /// outside of pairs), BENCH_MODEL and BENCH_FOLDER (an empty folder, removed at the end) set
    #[arg(long)]
    peer: Vec<String>,
    /// The same in front of the vLLM pairs
    #[arg(long)]
    vllm_peer: Vec<String>,
    /// The same, told of the vLLM pairs by `POST /workers` with their connector once it answers `/liveness`
    #[arg(long)]
    vllm_registered_peer: Vec<String>,
    /// The same in front of the SGLang pairs whose engines speak gRPC
    #[arg(long)]
    grpc_peer: Vec<String>,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    if let Err(error) = process::raise_file_limit() {
        eprintln!("the benchmark cannot run here: {error}");
        return ExitCode::from(EXIT_MISSING);
    }
    let runtime = match tokio::runtime::Runtime::new() {
        Ok(runtime) => runtime,
        Err(error) => {
            eprintln!("benchmark failed: {error}");
            return ExitCode::FAILURE;
        }
    };
    let code = runtime.block_on(async {
        // Leaving `run` early ends every process that it has started.
        tokio::select! {
            ended = run(arguments) => match ended {
                Ok(()) => ExitCode::SUCCESS,
                Err(error) => {
                    eprintln!("benchmark failed: {error}");
                    ExitCode::FAILURE
                }
            },
            told = interrupted() => {
                match told {
                    Ok(()) => eprintln!("benchmark interrupted; what it started is stopped"),
                    Err(error) => eprintln!("benchmark failed: no signal handlers: {error}"),
                }
                ExitCode::from(EXIT_INTERRUPTED)
            }
        }
    });
    // Threads that wait for answers of processes that are gone.
    runtime.shutdown_background();
    code
}

async fn interrupted() -> std::io::Result<()> {
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut terminate = signal(SignalKind::terminate())?;
    let mut hangup = signal(SignalKind::hangup())?;
    tokio::select! {
        _ = interrupt.recv() => {}
        _ = terminate.recv() => {}
        _ = hangup.recv() => {}
    }
    Ok(())
}

/// Who takes part; the peers, in the order they were named, come last.
struct Field {
    kinds: Vec<Kind>,
    own: usize,
}

impl Field {
    fn of(arguments: &Arguments, binaries: &Path) -> Result<Self> {
        let floor = binaries.join("smg-bench-floor").display().to_string();
        let floor = Kind::Peer { pairs: Pairs::Sglang, name: "floor".to_owned(), command: format!("exec '{floor}'") };
        let mut kinds = vec![Kind::Direct, Kind::SmgSglang, Kind::SmgVllm, Kind::SmgGrpc, floor];
        let own = kinds.len();
        let given = [
            (&arguments.peer, Pairs::Sglang),
            (&arguments.vllm_registered_peer, Pairs::VllmRegistered),
            (&arguments.vllm_peer, Pairs::Vllm),
            (&arguments.grpc_peer, Pairs::SglangGrpc),
        ];
        for (peer, pairs) in given.iter().flat_map(|(peers, pairs)| peers.iter().map(move |peer| (peer, *pairs))) {
            let (name, command) = peer.split_once('=').ok_or("a peer is NAME=COMMAND")?;
            let kind = Kind::Peer { pairs, name: name.to_owned(), command: command.to_owned() };
            // Engines that speak gRPC have tables of their own.
            let same_table = |other: &&Kind| (other.pairs() == Pairs::SglangGrpc) == (pairs == Pairs::SglangGrpc);
            if kinds.iter().filter(same_table).any(|other| other.label(0, false) == name) {
                return Err(format!("two rows would be called {name}").into());
            }
            kinds.push(kind);
        }
        Ok(Self { kinds, own })
    }

    /// Whom the ratios of a row are to: the first peer in front of the same kind of pairs, or else the first of all, or else the floor.
    fn base_of(&self, kind: &Kind) -> Option<&Kind> {
        let peers = || self.kinds.iter().skip(self.own).filter(|peer| peer.pairs().is_comparable(kind.pairs()));
        let floor = self.kinds.get(self.own - 1).filter(|floor| floor.pairs().is_comparable(kind.pairs()));
        peers().find(|peer| peer.pairs().is_alike(kind.pairs())).or_else(|| peers().next()).or(floor)
    }
}

async fn run(arguments: Arguments) -> Result<()> {
    let binaries = match &arguments.binaries {
        Some(folder) => folder.clone(),
        None => std::env::current_exe()?.parent().ok_or("no folder of this program")?.to_owned(),
    };
    let field = Field::of(&arguments, &binaries)?;
    println!("{}", process::machine());
    let base = |kind| field.base_of(kind).map_or_else(|| "nothing".to_owned(), |base| base.label(0, false));
    println!(
        "\nRatios in brackets: rows in front of vLLM pairs to {}, of engines that speak gRPC to {}, all others to {}.",
        base(&Kind::SmgVllm),
        base(&Kind::SmgGrpc),
        base(&Kind::SmgSglang)
    );
    let wanted =
        |workload: &Workload| arguments.only.is_empty() || arguments.only.iter().any(|name| name == workload.name());
    for workload in Workload::all(arguments.quick).iter().filter(|workload| wanted(workload)) {
        let mut rows = table::Rows::new(workload.name(), workload.describe());
        for workers in workload.worker_counts() {
            let (rounds, turns) =
                if workload.wants_fresh_processes() { (arguments.reps, 1) } else { (1, arguments.reps) };
            for _ in 0..rounds {
                round(workload, workers, turns, &binaries, &field, &mut rows).await?;
            }
        }
        println!("{}", rows.render());
        println!("\n{}", process::load());
    }
    Ok(())
}

/// Starts all subjects, so that repetitions interleave, and measures each of them in turn.
async fn round(
    workload: &Workload,
    workers: usize,
    turns: u16,
    binaries: &Path,
    field: &Field,
    rows: &mut table::Rows,
) -> Result<()> {
    let several = workload.worker_counts().len() > 1;
    let mut fleet = Fleet::new(binaries, workers, workload);
    let mut subjects = Vec::new();
    for kind in field.kinds.iter().filter(|kind| workload.includes(kind)) {
        subjects.push(Subject::start(kind, &mut fleet).await?);
    }
    let rested = workload.rest(&subjects).await?;
    for _ in 0..turns {
        let mut direct = None;
        for (index, subject) in subjects.iter().enumerate() {
            let label = subject.kind().label(workers, several);
            let measured = workload.measure(subject, rested.get(index).copied()).await;
            let mut measured =
                measured.map_err(|error| format!("{}, {label}: {error}\n{}", workload.name(), subject.told()))?;
            if subject.is_direct() {
                direct = Some(measured.clone());
            }
            if let Some(direct) = &direct {
                workload.compare(direct, &mut measured);
            }
            let base = field.base_of(subject.kind()).map(|base| base.label(workers, several));
            rows.add(&label, base, measured);
        }
    }
    Ok(())
}
