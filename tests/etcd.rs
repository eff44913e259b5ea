//! A control plane whose state is in etcd: the real binary, a real etcd, and a member that dies.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod support;

use std::process::{Child, Command, Stdio};

use serde_json::json;
use support::{Connector, Role, Smg, eventually, free_port, spec, vllm};

/// One process of etcd, which dies with the test.
struct Etcd {
    child: Child,
    url: String,
    directory: tempfile::TempDir,
}

impl Etcd {
    fn start() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let (url, peer) = (format!("http://127.0.0.1:{}", free_port()), format!("http://127.0.0.1:{}", free_port()));
        let mut command = Command::new("etcd");
        command
            .args(["--name", "it", "--data-dir", directory.path().join("data").to_str().unwrap()])
            .args(["--listen-client-urls", &url, "--advertise-client-urls", &url])
            .args(["--listen-peer-urls", &peer, "--initial-advertise-peer-urls", &peer])
            .args(["--initial-cluster", &format!("it={peer}")])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(std::fs::File::create(directory.path().join("log")).unwrap());
        let child = command.spawn().unwrap_or_else(|error| {
            panic!("this test needs etcd, which cannot be started ({error}): on Debian `apt-get install etcd-server`")
        });
        Self { child, url, directory }
    }
}

impl Drop for Etcd {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if std::thread::panicking() {
            eprintln!("{}", std::fs::read_to_string(self.directory.path().join("log")).unwrap_or_default());
        }
    }
}

async fn member(etcd: &Etcd, port: u16) -> Smg {
    let listen = format!("127.0.0.1:{port}");
    let arguments = ["controlplane", "--insecure", "--store", "etcd", "--etcd-endpoints", &etcd.url];
    let smg = Smg::spawn(&[&arguments[..], &["--bootstrap", "--listen", &listen]].concat(), port, &[]);
    eventually("the member serves", || async {
        let client = reqwest::Client::builder().no_proxy().build().unwrap();
        client.get(format!("{}/fleet/cluster", smg.url)).send().await.ok()
    })
    .await;
    smg
}

#[tokio::test]
async fn a_fleet_on_etcd_goes_on_when_its_writer_dies_and_forgets_nothing_when_all_members_do() {
    let etcd = Etcd::start();
    let ports = [free_port(), free_port()];
    let mut first = member(&etcd, ports[0]).await;
    let mut second = member(&etcd, ports[1]).await;
    let gateway = Smg::gateway(&format!("127.0.0.1:{},127.0.0.1:{}", ports[0], ports[1]), &[]).await;
    let (prefill, decode) = (vllm(Role::Prefill, Connector::Nixl).await, vllm(Role::Decode, Connector::Nixl).await);
    let id = first.register(&spec(&prefill, "prefill")).await;
    second.register(&spec(&decode, "decode")).await;
    let asked = || async { gateway.post("/v1/chat/completions", &support::chat()).await.status().is_success() };
    eventually("the pair serves", || async { asked().await.then_some(()) }).await;

    let status = second.get_json("/fleet/cluster").await;
    assert_eq!(status["members"].as_array().unwrap().len(), 2, "{status}");
    let leader = status["leader"].as_u64().unwrap();
    let first_leads = first.get_json("/fleet/cluster?consistency=stale").await["node_id"].as_u64() == Some(leader);
    let survivor = if first_leads {
        first.kill();
        &second
    } else {
        second.kill();
        &first
    };
    eventually("the other one writes", || async {
        let client = reqwest::Client::builder().no_proxy().build().unwrap();
        let request = client.put(format!("{}/fleet/policies/default", survivor.url)).json(&json!({"policy": "random"}));
        request.send().await.unwrap().status().is_success().then_some(())
    })
    .await;
    assert!(asked().await, "no request notices");
    assert_eq!(survivor.get_json(&format!("/workers/{id}")).await["url"], prefill.url());

    first.kill();
    second.kill();
    assert!(asked().await, "nor when there is no control plane at all");
    let again = member(&etcd, ports[0]).await;
    assert_eq!(again.get_json("/fleet/policies/default").await["document"]["policy"], "random");
    assert_eq!(again.get_json(&format!("/workers/{id}")).await["url"], prefill.url());
}
