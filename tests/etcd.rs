//! A control plane whose state is in etcd: the real binary, a real etcd, and members of both that die.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod support;

use std::process::{Child, Command, Output, Stdio};

use reqwest::StatusCode;
use serde_json::{Value, json};
use support::{Connector, Role, Smg, eventually, free_port, spec, vllm};

/// An etcd cluster, which dies with the test.
struct Etcd {
    children: Vec<Child>,
    urls: Vec<String>,
    directory: tempfile::TempDir,
}

impl Etcd {
    /// One of so many members.
    fn of(count: usize) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let address = || format!("http://127.0.0.1:{}", free_port());
        let (urls, peers): (Vec<_>, Vec<_>) = (0..count).map(|_| (address(), address())).unzip();
        let all: Vec<String> = peers.iter().enumerate().map(|(n, peer)| format!("it{n}={peer}")).collect();
        let start = |n: usize| {
            let mut command = Command::new("etcd");
            command
                .args(["--name", &format!("it{n}")])
                .args(["--data-dir", directory.path().join(format!("data{n}")).to_str().unwrap()])
                .args(["--listen-client-urls", &urls[n], "--advertise-client-urls", &urls[n]])
                .args(["--listen-peer-urls", &peers[n], "--initial-advertise-peer-urls", &peers[n]])
                .args(["--initial-cluster", &all.join(",")])
                .stdin(Stdio::null())
                .stdout(Stdio::null())
                .stderr(std::fs::File::create(directory.path().join(format!("log{n}"))).unwrap());
            command.spawn().unwrap_or_else(|error| {
                panic!(
                    "this test needs etcd, which cannot be started ({error}): on Debian `apt-get install etcd-server`"
                )
            })
        };
        let children = (0..count).map(start).collect();
        Self { children, urls, directory }
    }

    /// Its members, as a flag.
    fn endpoints(&self) -> String {
        self.urls.join(",")
    }

    /// Which of its members leads.
    async fn leader(&self) -> usize {
        let client = reqwest::Client::builder().no_proxy().build().unwrap();
        eventually("etcd has a leader", || async {
            for (n, url) in self.urls.iter().enumerate() {
                let asked = client.post(format!("{url}/v3/maintenance/status")).json(&json!({})).send().await;
                let status: Value = asked.ok()?.json().await.ok()?;
                if status["leader"].is_string() && status["leader"] == status["header"]["member_id"] {
                    return Some(n);
                }
            }
            None
        })
        .await
    }

    /// Ends one of its members at once.
    fn kill(&mut self, n: usize) {
        let _ = self.children[n].kill();
        let _ = self.children[n].wait();
    }
}

impl Drop for Etcd {
    fn drop(&mut self) {
        for n in 0..self.children.len() {
            self.kill(n);
            if std::thread::panicking() {
                let log = self.directory.path().join(format!("log{n}"));
                eprintln!("{}", std::fs::read_to_string(log).unwrap_or_default());
            }
        }
    }
}

async fn member(etcd: &Etcd, port: u16) -> Smg {
    member_with(etcd, port, &["--bootstrap"]).await
}

async fn member_with(etcd: &Etcd, port: u16, flags: &[&str]) -> Smg {
    let (listen, endpoints) = (format!("127.0.0.1:{port}"), etcd.endpoints());
    let arguments = ["controlplane", "--insecure", "--store", "etcd", "--etcd-endpoints", &endpoints];
    let smg = Smg::spawn(&[&arguments[..], flags, &["--listen", &listen]].concat(), port, &[]);
    eventually("the member serves", || async {
        let client = reqwest::Client::builder().no_proxy().build().unwrap();
        client.get(format!("{}/fleet/cluster", smg.url)).send().await.ok()
    })
    .await;
    smg
}

/// Writes a policy document until that is acknowledged.
async fn until_written(smg: &Smg, model: &str) {
    eventually(&format!("{model} is written; log:\n{}", smg.log()), || async {
        let request = smg.client.put(format!("{}/fleet/policies/{model}", smg.url)).json(&json!({"policy": "random"}));
        request.send().await.unwrap().status().is_success().then_some(())
    })
    .await;
}

#[tokio::test]
async fn a_fleet_on_etcd_goes_on_when_its_writer_dies_and_forgets_nothing_when_all_members_do() {
    let etcd = Etcd::of(1);
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
    until_written(survivor, "default").await;
    assert!(asked().await, "no request notices");
    assert_eq!(survivor.get_json(&format!("/workers/{id}")).await["url"], prefill.url());

    first.kill();
    second.kill();
    assert!(asked().await, "nor when there is no control plane at all");
    let again = member(&etcd, ports[0]).await;
    assert_eq!(again.get_json("/fleet/policies/default").await["document"]["policy"], "random");
    assert_eq!(again.get_json(&format!("/workers/{id}")).await["url"], prefill.url());
}

#[tokio::test]
async fn when_the_leader_of_etcd_dies_writes_go_on_and_nothing_acknowledged_is_lost() {
    let mut etcd = Etcd::of(3);
    let leader = etcd.leader().await;
    let (first, second) = (member(&etcd, free_port()).await, member(&etcd, free_port()).await);
    for (n, smg) in [&first, &second].into_iter().enumerate() {
        until_written(smg, &format!("before-{n}")).await;
    }
    etcd.kill(leader);
    for (n, smg) in [&first, &second].into_iter().enumerate() {
        until_written(smg, &format!("after-{n}")).await;
    }
    for smg in [&first, &second] {
        let list = eventually("a linearizable read", || async {
            let answer = smg.get("/fleet/policies").await;
            (answer.status() == StatusCode::OK).then_some(answer)
        })
        .await;
        let list: Value = list.json().await.unwrap();
        let models: Vec<&str> =
            list["policies"].as_array().unwrap().iter().map(|record| record["model"].as_str().unwrap()).collect();
        assert_eq!(models, ["after-0", "after-1", "before-0", "before-1"]);
    }
}

fn smg_cluster(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_smg")).arg("cluster").args(arguments).output().unwrap()
}

#[tokio::test]
async fn a_backup_of_members_with_disks_becomes_a_fleet_in_etcd_that_gateways_follow() {
    let directories = tempfile::tempdir().unwrap();
    let (port, backup) = (free_port(), directories.path().join("backup"));
    let backup = backup.to_str().unwrap();
    let mut plane = Smg::controlplane(&directories.path().join("old"), port, &[]).await;
    let address = format!("127.0.0.1:{port}");
    let gateway = Smg::gateway(&address, &[]).await;
    let (prefill, decode) = (vllm(Role::Prefill, Connector::Nixl).await, vllm(Role::Decode, Connector::Nixl).await);
    let id = gateway.register(&spec(&prefill, "prefill")).await;
    gateway.register(&spec(&decode, "decode")).await;
    until_written(&plane, "m").await;
    let saved = smg_cluster(&["backup", backup, "--controlplane", &address, "-o", "json"]);
    assert!(saved.status.success(), "{saved:?}");
    let saved: Value = serde_json::from_slice(&saved.stdout).unwrap();
    plane.kill();

    let etcd = Etcd::of(1);
    etcd.leader().await;
    let restore = ["restore", backup, "--etcd-endpoints", &etcd.endpoints(), "--etcd-prefix", "/new", "-o", "json"]
        .map(str::to_owned);
    let restore: Vec<&str> = restore.iter().map(String::as_str).collect();
    let restored = smg_cluster(&restore);
    assert!(restored.status.success(), "{restored:?}");
    let restored: Value = serde_json::from_slice(&restored.stdout).unwrap();
    assert_eq!((&restored["restored_revision"], &restored["etcd_prefix"]), (&saved["revision"], &json!("/new")));
    assert_eq!(smg_cluster(&restore).status.code(), Some(79), "there is a fleet already");

    // Founding is not asked for: it is there. What comes after it is a revision of the new history.
    let plane = member_with(&etcd, port, &["--etcd-prefix", "/new"]).await;
    let cluster = plane.get_json("/fleet/cluster").await;
    assert_eq!((&cluster["history_id"], &cluster["cluster_id"]), (&restored["history_id"], &saved["cluster_id"]));
    assert_ne!(cluster["history_id"], saved["history_id"]);
    assert_eq!(plane.get_json(&format!("/workers/{id}")).await["url"], prefill.url());
    until_written(&plane, "after").await;
    let revision = plane.get_json("/fleet/cluster").await["revision"].as_u64().unwrap();
    assert!(revision > saved["revision"].as_u64().unwrap(), "{revision}");
    eventually("the gateway acknowledges the new history", || async {
        let gateways = plane.get_json("/fleet/gateways").await;
        let found = gateways["gateways"].as_array()?.iter().find(|gateway| gateway["connected"] == true)?.clone();
        (found["acked_revision"].as_u64()? >= revision && found["nack"].is_null()).then_some(())
    })
    .await;
    assert!(gateway.post("/v1/chat/completions", &support::chat()).await.status().is_success());
    // And back: what is in etcd is backed up like any other.
    let again = directories.path().join("again");
    let saved = smg_cluster(&["backup", again.to_str().unwrap(), "--controlplane", &address, "-o", "json"]);
    let saved: Value = serde_json::from_slice(&saved.stdout).unwrap();
    assert_eq!((&saved["history_id"], &saved["workers"]), (&restored["history_id"], &json!(2)));
}
