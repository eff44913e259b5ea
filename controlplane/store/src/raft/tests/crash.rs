//! Kills: a process that dies at any moment loses nothing it acknowledged.
//!
//! The writing process is this test binary again, told by [`DIRECTORY`] to write until it is killed. A killed process leaves the page cache
//! behind, so this is about the order of writes and about recovery; what a lost page does is in `storage_errors`.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::Instant;

use super::*;

const DIRECTORY: &str = "SMG_STORE_CRASH_DIRECTORY";
const ROUND: &str = "SMG_STORE_CRASH_ROUND";

/// Not a test by itself: writes until it is killed, when the other test starts it; otherwise nothing.
#[test]
fn the_writing_process_of_the_kill_test() {
    let Some(directory) = std::env::var_os(DIRECTORY) else { return };
    let round = std::env::var(ROUND).unwrap();
    let say = |line: String| {
        let mut out = std::io::stderr().lock();
        out.write_all(line.as_bytes()).unwrap();
    };
    tokio::runtime::Runtime::new().unwrap().block_on(async {
        let options = RaftOptions { snapshot_every: 40, keep_entries: 100, ..options(Path::new(&directory)) };
        let store = RaftStore::open(options).await.unwrap();
        let writers = (0..4).map(|writer| {
            let (store, round) = (&store, &round);
            async move {
                for number in 0.. {
                    let url = format!("http://r{round}-w{writer}-{number}:1");
                    say(format!("TRY {url}\n"));
                    let outcome = store.propose(create(&url)).await.unwrap();
                    say(format!("DONE {url} {}\n", outcome.revision));
                }
            }
        });
        futures::future::join_all(writers).await;
    });
}

fn start(directory: &Path, round: u32) -> (Child, Receiver<String>) {
    let mut child = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "raft::tests::crash::the_writing_process_of_the_kill_test", "--nocapture"])
        .env(DIRECTORY, directory)
        .env(ROUND, round.to_string())
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let lines = BufReader::new(child.stderr.take().unwrap()).lines();
    let (sender, receiver) = channel();
    std::thread::spawn(move || lines.map_while(Result::ok).try_for_each(|line| sender.send(line)));
    (child, receiver)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_killed_process_loses_no_acknowledged_write_and_halves_none() {
    let rounds = if std::env::var_os("SMG_SOAK").is_some() { 200 } else { 10 };
    let directory = tempfile::tempdir().unwrap();
    let mut choices = Choices::fresh();
    let mut tried = Vec::new();
    let mut done = BTreeMap::new();
    for round in 0..rounds {
        let (mut child, lines) = start(directory.path(), round);
        let deadline = Instant::now() + Duration::from_millis(choices.below(600));
        let mut note = |line: String| match line.split(' ').collect::<Vec<_>>()[..] {
            ["TRY", url] => tried.push(url.to_owned()),
            ["DONE", url, revision] => drop(done.insert(url.to_owned(), revision.parse::<u64>().unwrap())),
            _ => panic!("the writing process said: {line}"),
        };
        loop {
            match lines.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok(line) => note(line),
                Err(RecvTimeoutError::Timeout) => break,
                Err(RecvTimeoutError::Disconnected) => panic!("the writing process ended by itself"),
            }
        }
        child.kill().unwrap();
        child.wait().unwrap();
        // What it still said counts; a line may be cut in the middle only at the very end.
        let rest: Vec<String> = lines.iter().collect();
        rest.into_iter().filter(|line| !line.is_empty()).for_each(&mut note);

        let store = open(directory.path()).await;
        let state = store.local();
        for (url, revision) in &done {
            let worker = state.worker_by_url(url).unwrap_or_else(|| panic!("{url} was acknowledged and is lost"));
            assert_eq!(worker.mod_revision, *revision, "{url}");
        }
        let expected = WorkerSpec::new("", WorkerType::Prefill);
        for worker in state.workers() {
            assert!(tried.contains(&worker.spec.url), "{} was never proposed", worker.spec.url);
            assert_eq!(worker.spec, WorkerSpec { url: worker.spec.url.clone(), ..expected.clone() });
        }
        assert_eq!(state.revision(), 1 + state.workers().count() as u64);
        store.shutdown().await;
    }
    println!("{rounds} kills, {} tried, {} acknowledged", tried.len(), done.len());
    assert!(!done.is_empty());
}
