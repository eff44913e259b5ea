//! The binary: two processes exchange KV over sockets, announce themselves, and end on SIGTERM.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};

use common::*;
use serde_json::json;

struct Process(Child, String);

impl Process {
    fn start(arguments: &[&str]) -> Self {
        let mut child =
            Command::new(env!("CARGO_BIN_EXE_mock-engine")).args(arguments).stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        let mut out = BufReader::new(child.stdout.take().unwrap());
        out.read_line(&mut line).unwrap();
        let url = line.trim().strip_prefix("ready ").unwrap().to_owned();
        Process(child, url)
    }

    fn terminate(mut self) -> std::process::ExitStatus {
        let id = self.0.id().to_string();
        Command::new("kill").args(["-TERM", &id]).status().unwrap();
        self.0.wait().unwrap()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[tokio::test]
async fn two_processes_hand_kv_over() {
    let prefill = Process::start(&["--engine", "vllm", "--role", "prefill", "--connector", "nixl"]);
    let decode = Process::start(&["--engine", "vllm", "--role", "decode", "--connector", "nixl", "--no-record"]);
    let client = reqwest::Client::new();
    let post = |url: &str, body: &serde_json::Value| read(client.post(format!("{url}/v1/completions")).json(body));
    let tag = json!({"do_remote_decode": true, "do_remote_prefill": false});
    let leg = with(completion("hi"), json!({"max_tokens": 1, "kv_transfer_params": tag}));
    let params = post(&prefill.1, &leg).await.unwrap().json()["kv_transfer_params"].clone();
    let leg = with(completion("hi"), json!({"kv_transfer_params": params}));
    assert_eq!(post(&decode.1, &leg).await.unwrap().status, 200);
    assert_eq!(post(&decode.1, &leg).await.unwrap().status, 500);
    let metrics = read(client.get(format!("{}/metrics", decode.1))).await.unwrap();
    assert!(metrics.text.contains("source=\"external_kv_transfer\"} 1.0"));
    assert!(prefill.terminate().success());
    assert!(decode.terminate().success());
}
