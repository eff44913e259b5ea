//! Side-by-side benchmarks: mock engines, gateways and a load generator on one machine, in one run.
//!
//! Every subject is measured in turn, repetition by repetition and each time another one first, so that what else the machine does hits
//! all alike; the table shows medians and ratios. CPU per request (user and system time of the gateway's process tree, from `/proc`) is the figure to trust on a busy machine;
//! rates and latencies are ratios at best.

mod answer;
mod load;
mod open_loop;
mod process;
mod subject;
mod table;
mod workload;

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::builder::PossibleValuesParser;
use clap::error::ErrorKind;
use clap::{CommandFactory, Parser};
use tokio::signal::unix::{SignalKind, signal};

use subject::{Fleet, Kind, Pairs, Subject};
use table::Figures;
use workload::Workload;

/// Any failure ends the run with words: a benchmark that goes on after one measures nothing.
pub type Result<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;

/// The command line is wrong, or the machine cannot do it; nothing was started.
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
    /// outside of pairs), BENCH_MODEL and BENCH_FOLDER (a folder of its own, with what it prints; removed at the end) set
    #[arg(long, value_parser = Named::parse)]
    peer: Vec<Named>,
    /// The same in front of the vLLM pairs
    #[arg(long, value_parser = Named::parse)]
    vllm_peer: Vec<Named>,
    /// The same, told of the vLLM pairs by `POST /workers` with their connector once it answers `/liveness`
    #[arg(long, value_parser = Named::parse)]
    vllm_registered_peer: Vec<Named>,
    /// The same in front of the SGLang pairs whose engines speak gRPC
    #[arg(long, value_parser = Named::parse)]
    grpc_peer: Vec<Named>,
}

/// A peer as it is given.
#[derive(Debug, Clone)]
struct Named {
    name: String,
    command: String,
}

impl Named {
    fn parse(text: &str) -> std::result::Result<Self, &'static str> {
        let (name, command) = text.split_once('=').ok_or("a peer is NAME=COMMAND")?;
        Ok(Self { name: name.to_owned(), command: command.to_owned() })
    }
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let field = match Field::of(&arguments) {
        Ok(field) => field,
        Err(taken) => Arguments::command().error(ErrorKind::ValueValidation, taken).exit(),
    };
    let _only_run = match process::raise_file_limit().and_then(|()| process::lock()) {
        Ok(lock) => lock,
        Err(error) => {
            complain(format_args!("the benchmark cannot run here: {error}"));
            return ExitCode::from(EXIT_MISSING);
        }
    };
    let runtime = match tokio::runtime::Runtime::new() {
        Ok(runtime) => runtime,
        Err(error) => {
            complain(format_args!("benchmark failed: {error}"));
            return ExitCode::FAILURE;
        }
    };
    let code = runtime.block_on(async {
        // Leaving `run` early ends every process that it has started.
        tokio::select! {
            ended = run(arguments, field) => match ended {
                Ok(()) => ExitCode::SUCCESS,
                Err(error) => {
                    complain(format_args!("benchmark failed: {error}"));
                    ExitCode::FAILURE
                }
            },
            told = interrupted() => {
                match told {
                    Ok(()) => complain(format_args!("benchmark interrupted; what it started is stopped")),
                    Err(error) => complain(format_args!("benchmark failed: no signal handlers: {error}")),
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

/// Prints a part of the report.
fn say(text: std::fmt::Arguments<'_>) -> Result<()> {
    let mut output = std::io::stdout().lock();
    let written = writeln!(output, "{text}").and_then(|()| output.flush());
    written.map_err(|error| format!("the report cannot be printed: {error}").into())
}

/// Tells why there is no report; that nobody can read it changes nothing.
fn complain(text: std::fmt::Arguments<'_>) {
    let _ = writeln!(std::io::stderr(), "{text}");
}

/// Who takes part. The peers come last: first all `--peer`, then all `--vllm-registered-peer`, `--vllm-peer` and `--grpc-peer`, those of
/// one option in the order they were named.
#[derive(Debug)]
struct Field {
    kinds: Vec<Kind>,
    own: usize,
}

impl Field {
    fn of(arguments: &Arguments) -> std::result::Result<Self, String> {
        let mut kinds = vec![Kind::Direct, Kind::SmgSglang, Kind::SmgVllm, Kind::SmgGrpc, Kind::Floor];
        let own = kinds.len();
        let given = [
            (&arguments.peer, Pairs::Sglang),
            (&arguments.vllm_registered_peer, Pairs::VllmRegistered),
            (&arguments.vllm_peer, Pairs::Vllm),
            (&arguments.grpc_peer, Pairs::SglangGrpc),
        ];
        for (peer, pairs) in given.iter().flat_map(|(peers, pairs)| peers.iter().map(move |peer| (peer, *pairs))) {
            let Named { name, command } = peer.clone();
            let kind = Kind::Peer { pairs, name, command };
            // Engines that speak gRPC have tables of their own.
            let same_table = |other: &&Kind| (other.pairs() == Pairs::SglangGrpc) == (pairs == Pairs::SglangGrpc);
            if kinds.iter().filter(same_table).any(|other| other.label(0, false) == peer.name) {
                return Err(format!("two rows would be called {}", peer.name));
            }
            kinds.push(kind);
        }
        Ok(Self { kinds, own })
    }

    /// Whom the ratios of a row are to: the first peer (in the order of [`Field`]) in front of the same kind of pairs, or else the first that
    /// shares its table, or else the floor.
    fn base_of(&self, kind: &Kind) -> Option<&Kind> {
        let peers = || self.kinds.iter().skip(self.own).filter(|peer| peer.pairs().is_comparable(kind.pairs()));
        let floor = self.kinds.get(self.own - 1).filter(|floor| floor.pairs().is_comparable(kind.pairs()));
        peers().find(|peer| peer.pairs().is_alike(kind.pairs())).or_else(|| peers().next()).or(floor)
    }
}

async fn run(arguments: Arguments, field: Field) -> Result<()> {
    let binaries = match &arguments.binaries {
        Some(folder) => folder.clone(),
        None => std::env::current_exe()?.parent().ok_or("no folder of this program")?.to_owned(),
    };
    say(format_args!("{}", process::machine()))?;
    let base = |kind| field.base_of(kind).map_or_else(|| "nothing".to_owned(), |base| base.label(0, false));
    say(format_args!(
        "\nRatios in brackets: rows in front of vLLM pairs to {}, of engines that speak gRPC to {}, all others to {}.",
        base(&Kind::SmgVllm),
        base(&Kind::SmgGrpc),
        base(&Kind::SmgSglang)
    ))?;
    let wanted =
        |workload: &Workload| arguments.only.is_empty() || arguments.only.iter().any(|name| name == workload.name());
    for workload in Workload::all(arguments.quick).iter().filter(|workload| wanted(workload)) {
        let mut rows = table::Rows::new(workload.name(), workload.describe());
        for workers in workload.worker_counts() {
            let turns_of_processes = if workload.wants_fresh_processes() { 1 } else { arguments.reps };
            for first in (0..arguments.reps).step_by(turns_of_processes.into()) {
                let turns = first..first + turns_of_processes;
                round(workload, workers, turns, &binaries, &field, &mut rows).await?;
            }
        }
        say(format_args!("{}\n\n{}", rows.render(), process::load()))?;
    }
    Ok(())
}

/// Starts all subjects, so that repetitions interleave, and measures each of them in every turn, another one first each time.
async fn round(
    workload: &Workload,
    workers: usize,
    turns: std::ops::Range<u16>,
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
    for turn in turns {
        let mut measured: Vec<(usize, Figures)> = Vec::new();
        let mut order: Vec<usize> = (0..subjects.len()).collect();
        order.rotate_left(usize::from(turn) % subjects.len().max(1));
        for index in order {
            let Some(subject) = subjects.get(index) else { continue };
            let label = subject.kind().label(workers, several);
            let figures = workload.measure(subject, rested.get(index).copied()).await;
            let figures =
                figures.map_err(|error| format!("{}, {label}: {error}\n{}", workload.name(), subject.told()))?;
            measured.push((index, figures));
        }
        // Rows are those of the subjects, whoever was first.
        measured.sort_by_key(|(index, _)| *index);
        let is_direct = |index: &usize| subjects.get(*index).is_some_and(Subject::is_direct);
        let direct = measured.iter().find(|(index, _)| is_direct(index)).map(|(_, figures)| figures.clone());
        for (subject, (_, mut figures)) in subjects.iter().zip(measured) {
            if let Some(direct) = &direct {
                workload.compare(direct, &mut figures);
            }
            let base = field.base_of(subject.kind()).map(|base| base.label(workers, several));
            rows.add(&subject.kind().label(workers, several), base, figures);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    fn field(given: &[&str]) -> std::result::Result<Field, String> {
        Field::of(&Arguments::try_parse_from(["smg-bench"].iter().chain(given)).map_err(|error| error.to_string())?)
    }

    fn base(field: &Field, kind: Kind) -> String {
        field.base_of(&kind).unwrap().label(0, false)
    }

    #[test]
    fn a_peer_without_a_command_or_with_a_name_that_is_taken_is_a_wrong_command_line() {
        assert!(field(&["--peer", "nosep"]).unwrap_err().contains("a peer is NAME=COMMAND"));
        assert!(field(&["--peer", "floor=x"]).unwrap_err().contains("two rows would be called floor"));
        assert!(field(&["--peer", "a=x", "--vllm-peer", "a=x"]).unwrap_err().contains("two rows would be called a"));
        // Tables of their own.
        assert!(field(&["--peer", "a=x", "--grpc-peer", "a=x"]).is_ok());
    }

    #[test]
    fn ratios_are_to_the_first_peer_in_front_of_alike_pairs_wherever_it_was_named() {
        let given = [
            "--vllm-peer",
            "vllm=x",
            "--grpc-peer",
            "grpc=x",
            "--vllm-registered-peer",
            "told=x",
            "--peer",
            "sglang=x=y",
        ];
        let field = field(&given).unwrap();
        assert_eq!(base(&field, Kind::SmgSglang), "sglang");
        assert_eq!(base(&field, Kind::Floor), "sglang");
        assert_eq!(base(&field, Kind::SmgVllm), "told");
        assert_eq!(base(&field, Kind::SmgGrpc), "grpc");
    }

    #[test]
    fn without_peers_ratios_are_to_the_floor_which_has_no_engines_that_speak_grpc() {
        let field = field(&[]).unwrap();
        assert_eq!(base(&field, Kind::SmgVllm), "floor");
        assert!(field.base_of(&Kind::SmgGrpc).is_none());
    }
}
