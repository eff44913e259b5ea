//! `smg`: a gateway fleet for prefill/decode disaggregated LLM serving.

mod admin;
mod authority;
mod backup;
mod certificates;
mod cli;
mod cluster;
mod controlplane;
mod descriptors;
mod gateway;
mod launch;
mod operator;
mod process;
mod runtime;
mod temporary;

use std::io::Write;
use std::process::ExitCode;
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

/// How long the end of a process waits for its last words.
const LAST_WORDS: Duration = Duration::from_secs(1);

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    let invocation = match cli::parse(std::env::args_os(), |name| {
        std::env::var_os(name).map(|value| value.to_string_lossy().into_owned())
    }) {
        Ok(invocation) => invocation,
        Err(error) => {
            complain(&error);
            return ExitCode::from(cli::EXIT_USAGE);
        }
    };
    let ended = match invocation {
        cli::Invocation::Print(text) => {
            // Whoever reads it may have read enough.
            let _ = std::io::stdout().write_all(text.as_bytes());
            Ok(())
        }
        cli::Invocation::Launch(args) => process::run(&args.process.clone(), launch::run(*args)),
        cli::Invocation::ControlPlane(args) => process::run(&args.process.clone(), controlplane::run(*args)),
        cli::Invocation::Gateway(args) => process::run(&args.process.clone(), gateway::run(*args)),
        cli::Invocation::Cluster(args) => return conclude(cluster::run(&args)),
        cli::Invocation::Admin(args) => return conclude(admin::run(&args)),
        cli::Invocation::Context(args) => return conclude(admin::run_context(&args)),
    };
    match ended {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            complain(&format_args!("error: {error}"));
            error.exit_code()
        }
    }
}

/// The end of an operator's command.
fn conclude(ended: Result<(), admin::Failure>) -> ExitCode {
    match ended {
        Ok(()) => ExitCode::SUCCESS,
        // Whoever read the result has read enough.
        Err(admin::Failure::Output(error)) if error.kind() == std::io::ErrorKind::BrokenPipe => ExitCode::SUCCESS,
        Err(error) => {
            complain(&format_args!("error: {error}"));
            error.exit_code()
        }
    }
}

/// Writes to standard error, which may be gone, or take nothing: then the process ends without these words.
fn complain(what: &dyn std::fmt::Display) {
    let words = format!("{what}\n");
    let (done, written) = mpsc::channel();
    let write = move || {
        let _ = std::io::stderr().write_all(words.as_bytes());
        let _ = done.send(());
    };
    if thread::Builder::new().spawn(write).is_ok() {
        let _ = written.recv_timeout(LAST_WORDS);
    }
}
