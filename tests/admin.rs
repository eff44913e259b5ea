//! The commands of operators, run as operators run them: against a gateway that forwards, and against a control plane.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod support;

use std::process::{Output, Stdio};

use serde_json::{Value, json};
use smg_messages::state;
use smg_services::admin as rpc;
use smg_services::admin::admin_client::AdminClient;
use support::{Connector, PATIENCE, Role, Smg, eventually, free_port, sglang, spec, vllm};
use tokio::io::{AsyncBufReadExt, BufReader, Lines};
use tokio::process::{Child, ChildStdout, Command};
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;
use tonic_reflection::pb::v1::ServerReflectionRequest;
use tonic_reflection::pb::v1::server_reflection_client::ServerReflectionClient;
use tonic_reflection::pb::v1::server_reflection_request::MessageRequest;
use tonic_reflection::pb::v1::server_reflection_response::MessageResponse;

/// An operator with a home of their own.
struct Operator {
    home: tempfile::TempDir,
    server: String,
}

impl Operator {
    fn of(smg: &Smg) -> Self {
        Self { home: tempfile::tempdir().unwrap(), server: format!("127.0.0.1:{}", smg.port) }
    }

    /// A command without any server.
    fn bare(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_smg"));
        command.args(arguments).env_clear().env("HOME", self.home.path()).stdin(Stdio::null()).kill_on_drop(true);
        command
    }

    async fn run(&self, arguments: &[&str]) -> Output {
        self.bare(arguments).args(["--controlplane", &self.server]).output().await.unwrap()
    }

    /// The answer as JSON.
    async fn json(&self, arguments: &[&str]) -> Value {
        let output = self.bare(arguments).args(["--controlplane", &self.server, "-o", "json"]).output().await.unwrap();
        assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
        serde_json::from_slice(&output.stdout).unwrap_or(Value::Null)
    }

    async fn table(&self, arguments: &[&str]) -> String {
        text(&self.run(arguments).await)
    }

    /// The exit code of what is refused; nothing of it is on standard output.
    async fn refused(&self, arguments: &[&str]) -> (i32, String) {
        let output = self.run(arguments).await;
        assert!(output.stdout.is_empty(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stdout));
        (output.status.code().unwrap(), String::from_utf8(output.stderr).unwrap())
    }

    /// A command that goes on, and what it prints.
    fn follow(&self, arguments: &[&str]) -> (Child, Lines<BufReader<ChildStdout>>) {
        let mut command = self.bare(arguments);
        command.args(["--controlplane", &self.server]).stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        (child, lines)
    }
}

fn text(output: &Output) -> String {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout.clone()).unwrap()
}

async fn next_line(lines: &mut Lines<BufReader<ChildStdout>>) -> String {
    let line = tokio::time::timeout(PATIENCE, lines.next_line()).await.expect("a line in time");
    line.unwrap().expect("a line")
}

#[tokio::test]
async fn an_operator_registers_changes_drains_and_removes_a_worker_through_a_gateway() {
    let engine = vllm(Role::Prefill, Connector::Nixl).await;
    let smg = Smg::launch(&["--drain-settle-secs", "0"]).await;
    let operator = Operator::of(&smg);
    let url = engine.url();
    let rehearsed = operator.json(&["workers", "add", &url, "--type", "prefill", "--dry-run"]).await;
    assert_eq!((&rehearsed["dry_run"], &rehearsed["result"]["url"]), (&json!(true), &json!(url)));
    assert_eq!(operator.json(&["workers", "list"]).await["total"], 0, "a rehearsal registers nothing");

    let connector = ["--kv-connector", "NixlConnector", "--label", "zone=a", "--wait"];
    let added = operator.json(&[&["workers", "add", &url, "--type", "prefill"], &connector[..]].concat()).await;
    assert_eq!((&added["status"], &added["labels"]["zone"]), (&json!("ready"), &json!("a")));
    let id = added["id"].as_str().unwrap();
    assert_eq!(operator.refused(&["workers", "add", &url]).await.0, 79, "it is there already");
    let table = operator.table(&["workers", "list"]).await;
    assert!(table.starts_with("ID ") && table.contains(id) && table.lines().count() == 2, "{table}");
    let yaml = text(&operator.run(&["workers", "get", &url, "-o", "yaml"]).await);
    assert!(yaml.contains("worker_type: prefill"), "{yaml}");

    let revision = added["mod_revision"].to_string();
    operator.json(&["workers", "patch", &url, "--priority", "9", "--expected-revision", &revision]).await;
    let stale =
        operator.refused(&["workers", "patch", &url, "--priority", "8", "--expected-revision", &revision]).await;
    assert_eq!(stale.0, 79, "{}", stale.1);
    assert_eq!(operator.json(&["workers", "get", id]).await["priority"], 9);

    // It is idle: no time is needed for that.
    assert_eq!(operator.json(&["workers", "drain", id, "--timeout-secs", "0"]).await["intent"], "cordoned");
    assert_eq!(operator.json(&["workers", "get", id]).await["intent"], "cordoned");
    assert_eq!(operator.json(&["workers", "uncordon", id]).await["intent"], "active");
    let records = operator.json(&["audit", "--object", &format!("worker/{id}")]).await;
    let actions: Vec<&str> =
        records["records"].as_array().unwrap().iter().map(|record| record["action"].as_str().unwrap()).collect();
    assert_eq!(actions, ["set_intent", "set_intent", "patch_worker", "create_worker"]);
    assert!(operator.table(&["audit"]).await.contains("priority: 50 → 9"));

    let removed = operator.json(&["workers", "remove", id, "--wait"]).await;
    assert_eq!(removed, json!({"status": "removed", "worker_id": id}), "it was waited for");
    assert_eq!(operator.refused(&["workers", "get", id]).await.0, 66);
    assert_eq!(operator.refused(&["workers", "get", "http://nobody:1"]).await.0, 66);
    assert_eq!(operator.refused(&["workers", "add", "http://h:1", "--label", "dp_size=0"]).await.0, 65);
    let output = operator.bare(&["workers", "list", "--controlplane", "127.0.0.1:9"]).output().await.unwrap();
    assert_eq!((output.status.code(), output.stdout.len()), (Some(69), 0));
    let output = operator.bare(&["workers", "fly"]).output().await.unwrap();
    assert_eq!(output.status.code(), Some(64));
    let stale = operator.run(&["workers", "list", "--stale"]).await;
    assert!(String::from_utf8_lossy(&stale.stderr).starts_with("stale: revision "), "{stale:?}");
    assert!(operator.run(&["workers", "list"]).await.stderr.is_empty());
}

#[tokio::test]
async fn a_drained_worker_gets_nothing_new_until_it_is_brought_back() {
    let (smg, _prefill, decode) = support::sglang_pair(&[]).await;
    let operator = Operator::of(&smg);
    let body = json!({"model": support::MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4});
    assert!(smg.post("/v1/chat/completions", &body).await.status().is_success());
    let drained = operator.json(&["workers", "drain", &decode.url(), "--timeout-secs", "20"]).await;
    assert_eq!((&drained["idle"], &drained["busy_gateways"]), (&json!(true), &json!([])));
    let refused = smg.post("/v1/chat/completions", &body).await;
    assert_eq!(refused.status(), 503, "a cordoned decode gets nothing new");
    operator.json(&["workers", "uncordon", &decode.url()]).await;
    assert!(smg.post("/v1/chat/completions", &body).await.status().is_success());
}

#[tokio::test]
async fn policies_and_pairing_are_shown_and_changed_by_command() {
    let (smg, _prefill, _decode) = support::sglang_pair(&[]).await;
    let operator = Operator::of(&smg);
    operator.json(&["policies", "set", "default", "retry.max_retries=3", "policy=random"]).await;
    operator.json(&["policies", "set", "default", "retry.max_retries="]).await;
    let shown = operator.json(&["policies", "get"]).await;
    assert_eq!(shown["document"]["policy"], "random");
    assert!(shown["document"]["retry"].get("max_retries").is_none(), "{shown}");
    operator
        .json(&[
            "policies",
            "set",
            "org/m",
            "pairing_mode=strict",
            "--idempotency-key",
            "7b1f0a52-8f65-4f0e-a9f4-51a1e1cf3c11",
        ])
        .await;
    let before = operator.json(&["policies", "get", "org/m"]).await["mod_revision"].clone();
    assert_eq!(operator.refused(&["policies", "set", "org/m", "pairing_mode=sideways"]).await.0, 65);
    operator.json(&["policies", "delete", "org/m", "--dry-run"]).await;
    assert_eq!(operator.json(&["policies", "get", "org/m"]).await["mod_revision"], before);
    assert!(operator.table(&["policies", "delete", "org/m"]).await.is_empty());
    assert_eq!(operator.refused(&["policies", "get", "org/m"]).await.0, 66);

    let pairing = operator.json(&["pairing", "show"]).await;
    assert_eq!(pairing["cells"][0]["pairs"], true, "{pairing}");
    let explained =
        operator.json(&["pairing", "explain", "http://new:1", "--type", "prefill", "--runtime", "vllm"]).await;
    assert_eq!(explained["facts_from"], "spec");
    assert!(operator.table(&["gateways", "-o", "wide"]).await.contains("GATEWAY"));
    let gateways = operator.json(&["gateways"]).await;
    assert_eq!((&gateways["gateways"][0]["connected"], &gateways["gateways"][0]["nack"]), (&json!(true), &Value::Null));
}

#[tokio::test]
async fn tokens_guard_what_they_should_and_a_context_holds_one() {
    let smg = Smg::launch(&[]).await;
    let operator = Operator::of(&smg);
    let admin = operator.json(&["tokens", "create", "ada", "--role", "admin"]).await;
    let secret = admin["token"].as_str().unwrap();
    let denied = operator.refused(&["tokens", "list"]).await;
    assert_eq!(denied.0, 77, "{}", denied.1);
    let server = ["--controlplane", operator.server.as_str()];
    let set = operator.bare(&["context", "set", "here", "--token", secret]).args(server).output().await.unwrap();
    assert!(set.status.success(), "{set:?}");
    let shown = text(&operator.bare(&["context", "list", "-o", "json"]).output().await.unwrap());
    assert!(shown.contains("here") && !shown.contains(secret), "{shown}");
    let listed = text(&operator.bare(&["tokens", "list"]).output().await.unwrap());
    assert!(listed.contains("ada") && !listed.contains(secret), "{listed}");
    assert_eq!(operator.refused(&["tokens", "list"]).await.0, 77, "a server that is named gets no other's token");
    let bob = operator.bare(&["tokens", "create", "bob", "--role", "viewer", "-o", "json"]).output().await.unwrap();
    let bob: Value = serde_json::from_slice(&bob.stdout).unwrap();
    let as_bob = ["workers", "add", "http://h:1", "--token", bob["token"].as_str().unwrap()];
    assert_eq!(operator.bare(&as_bob).output().await.unwrap().status.code(), Some(77));
    assert!(operator.bare(&["tokens", "revoke", "bob"]).output().await.unwrap().status.success());
    assert_eq!(operator.bare(&["tokens", "revoke", "bob"]).output().await.unwrap().status.code(), Some(66));
    assert_eq!(operator.bare(&["tokens", "revoke", "ada"]).output().await.unwrap().status.code(), Some(79));
    assert!(text(&operator.bare(&["audit"]).output().await.unwrap()).contains("token:ada"));
    for (nothing, code) in [
        (&["context", "use", "there"][..], 78),
        (&["workers", "list", "--context", "there"], 78),
        (&["workers", "list", "--token-file", "/nowhere/token"], 65),
        (&["cluster", "restore", "/nowhere/backup", "--data-dir", "/nowhere/else"], 65),
    ] {
        assert_eq!(operator.bare(nothing).output().await.unwrap().status.code(), Some(code), "{nothing:?}");
    }
    for shell in ["bash", "zsh", "fish"] {
        assert!(text(&operator.bare(&["completions", shell]).output().await.unwrap()).contains("policies"), "{shell}");
    }
}

/// A request with a token.
fn bearing<T>(secret: &str, message: T) -> tonic::Request<T> {
    let mut request = tonic::Request::new(message);
    request.metadata_mut().insert("authorization", format!("Bearer {secret}").parse().unwrap());
    request
}

#[tokio::test]
async fn an_operator_registers_and_drains_a_worker_by_grpc_and_a_viewer_only_looks() {
    let directory = tempfile::tempdir().unwrap();
    let smg = Smg::controlplane(directory.path(), free_port(), &[]).await;
    let operator = Operator::of(&smg);
    let ada = operator.json(&["tokens", "create", "ada", "--role", "admin"]).await["token"].clone();
    let ada = ada.as_str().unwrap();
    let channel = tonic::transport::Channel::from_shared(smg.url.clone()).unwrap().connect().await.unwrap();
    let mut client = AdminClient::new(channel.clone());
    let viewer = rpc::CreateTokenRequest { options: None, name: "eve".into(), role: state::Role::Viewer as i32 };
    let eve = client.create_token(bearing(ada, viewer)).await.unwrap().into_inner().secret;

    let engine = vllm(Role::Prefill, Connector::Nixl).await;
    let spec = state::WorkerSpec {
        url: engine.url(),
        worker_type: state::WorkerType::Prefill as i32,
        priority: 50,
        cost: 1.0,
        kv_connector: Some("NixlConnector".into()),
        max_connection_attempts: 20,
        ..state::WorkerSpec::default()
    };
    let create = rpc::CreateWorkerRequest { options: None, spec: Some(spec) };
    let refused = client.create_worker(bearing(&eve, create.clone())).await.unwrap_err();
    assert_eq!(refused.code(), tonic::Code::PermissionDenied);
    assert_eq!(refused.metadata().get("smg-outcome").unwrap(), "did_not_happen");
    assert_eq!(client.create_worker(create.clone()).await.unwrap_err().code(), tonic::Code::Unauthenticated);
    client.create_worker(bearing(ada, create)).await.unwrap();
    let worker = eventually("the worker is registered", || {
        let mut client = client.clone();
        let request = bearing(&eve, rpc::ListWorkersRequest::default());
        async move {
            let listed = client.list_workers(request).await.unwrap().into_inner();
            listed.workers.into_iter().find(|worker| worker.facts.is_some())
        }
    })
    .await;
    let id = worker.id.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    let cordon = rpc::SetWorkerIntentRequest { options: None, id: id.clone(), intent: state::Intent::Cordoned as i32 };
    assert_eq!(
        client.set_worker_intent(bearing(&eve, cordon.clone())).await.unwrap_err().code(),
        tonic::Code::PermissionDenied
    );
    client.set_worker_intent(bearing(ada, cordon)).await.unwrap();
    let shown = client.get_worker(bearing(&eve, rpc::GetWorkerRequest { stale: false, id })).await.unwrap();
    assert!(shown.get_ref().idle, "no gateway is connected");
    assert_eq!(shown.get_ref().worker.as_ref().unwrap().intent(), state::Intent::Cordoned);

    let mut health = HealthClient::new(channel.clone());
    let check = HealthCheckRequest { service: "smg.admin.v1.Admin".into() };
    assert_eq!(health.check(check).await.unwrap().get_ref().status(), ServingStatus::Serving);
    let mut reflection = ServerReflectionClient::new(channel);
    let list = ServerReflectionRequest {
        host: String::new(),
        message_request: Some(MessageRequest::ListServices(String::new())),
    };
    let answers = reflection.server_reflection_info(futures::stream::iter([list])).await.unwrap();
    let answer = answers.into_inner().message().await.unwrap().unwrap();
    let Some(MessageResponse::ListServicesResponse(list)) = answer.message_response else { panic!("{answer:?}") };
    assert!(list.service.iter().any(|service| service.name == "smg.admin.v1.Admin"), "{list:?}");
}

#[tokio::test]
async fn a_list_is_followed_through_a_gateway() {
    let smg = Smg::launch(&[]).await;
    let operator = Operator::of(&smg);
    operator.json(&["policies", "set", "a", "policy=random"]).await;
    let (_child, mut lines) = operator.follow(&["policies", "list", "--watch", "-o", "json"]);
    // The flags of the start are a document too.
    let seen = async |lines: &mut Lines<BufReader<ChildStdout>>, kind: &str, name: &str| {
        loop {
            let event: Value = serde_json::from_str(&next_line(lines).await).unwrap();
            let named = event["name"] == name || event["object"]["model"] == name;
            if event["type"] == kind && named {
                return event;
            }
        }
    };
    let first = seen(&mut lines, "put", "a").await;
    assert_eq!(first["object"]["document"]["policy"], "random");
    operator.json(&["policies", "set", "b", "policy=round_robin"]).await;
    assert_eq!(seen(&mut lines, "put", "b").await["object"]["document"]["policy"], "round_robin");
    operator.table(&["policies", "delete", "a"]).await;
    seen(&mut lines, "deleted", "a").await;
    let (_child, mut table) = operator.follow(&["workers", "list", "--watch"]);
    assert!(next_line(&mut table).await.starts_with("EVENT"));
    let engine = sglang(Role::Prefill).await;
    smg.register(&spec(&engine, "prefill")).await;
    while !next_line(&mut table).await.contains(&engine.url()) {}
}

/// Writes policy documents until it is told to stop. Returns the highest revision that was acknowledged.
fn write_on(smg: &Smg) -> (tokio::sync::oneshot::Sender<()>, tokio::task::JoinHandle<u64>) {
    let (client, url) = (smg.client.clone(), smg.url.clone());
    let (stop, mut stopped) = tokio::sync::oneshot::channel();
    let writer = tokio::spawn(async move {
        let mut revision = 0;
        for n in 0.. {
            if stopped.try_recv().is_ok() {
                break;
            }
            let request = client.put(format!("{url}/fleet/policies/m{}", n % 50)).json(&json!({"policy": "random"}));
            if let Ok(answer) = request.send().await
                && answer.status().is_success()
            {
                revision = answer.headers()["x-smg-revision"].to_str().unwrap().parse().unwrap();
            }
        }
        revision
    });
    (stop, writer)
}

#[tokio::test]
async fn a_backup_under_load_becomes_a_new_control_plane_that_gateways_follow() {
    let (prefill, decode) = (sglang(Role::Prefill).await, sglang(Role::Decode).await);
    let directories = tempfile::tempdir().unwrap();
    let at = |name: &str| directories.path().join(name);
    std::fs::write(at("key"), "correct horse battery staple\n").unwrap();
    let path = |name: &str| at(name).to_str().unwrap().to_owned();
    let key = ["--backup-key-file", &path("key")].map(str::to_owned);
    let flags: Vec<&str> = key.iter().map(String::as_str).collect();
    let port = free_port();
    let mut plane = Smg::controlplane(&at("old"), port, &flags).await;
    let gateway = Smg::gateway(&format!("127.0.0.1:{port}"), &[]).await;
    let mut guarded = spec(&prefill, "prefill");
    guarded["api_key"] = json!("hush-hush-hush");
    gateway.register(&guarded).await;
    gateway.register(&spec(&decode, "decode")).await;

    let operator = Operator::of(&gateway);
    let (stop, writer) = write_on(&plane);
    eventually("writes go on", || async {
        (plane.get_json("/fleet/cluster").await["revision"].as_u64()? > 20).then_some(())
    })
    .await;
    let backup = operator.json(&["cluster", "backup", &path("backup")]).await;
    stop.send(()).unwrap();
    let last = writer.await.unwrap();
    let revision = backup["revision"].as_u64().unwrap();
    assert!(revision > 0 && revision <= last, "{revision} of {last}");
    assert_eq!((&backup["keys"], &backup["workers"]), (&json!("sealed"), &json!(2)));
    let bytes = std::fs::read(at("backup")).unwrap();
    assert!(!bytes.windows(14).any(|window| window == b"hush-hush-hush"));
    assert_eq!(operator.refused(&["cluster", "backup", &path("backup")]).await.0, 79, "it overwrites nothing");

    plane.kill();
    let cut = operator.run(&["workers", "list", "-o", "json"]).await;
    let words = String::from_utf8_lossy(&cut.stderr);
    assert!(words.starts_with("stale: ") && words.contains("does not reach the control plane"), "{words}");
    assert_eq!(serde_json::from_slice::<Value>(&cut.stdout).unwrap()["total"], 2, "data is data");
    let restore = ["cluster", "restore", &path("backup"), "--data-dir", &path("new")].map(str::to_owned);
    let restore: Vec<&str> = restore.iter().map(String::as_str).collect();
    assert_eq!(
        operator.bare(&restore).output().await.unwrap().status.code(),
        Some(65),
        "keys are not dropped silently"
    );
    let old_history = backup["history_id"].clone();
    let restored = operator.bare(&[&restore[..], &flags[..], &["-o", "json"]].concat()).output().await.unwrap();
    assert!(restored.status.success(), "{}", String::from_utf8_lossy(&restored.stderr));
    let restored: Value = serde_json::from_slice(&restored.stdout).unwrap();
    assert_eq!(restored["restored_revision"], revision);
    assert_ne!(restored["history_id"], old_history);
    let again = operator.bare(&[&restore[..], &flags[..]].concat()).output().await.unwrap();
    assert_eq!(again.status.code(), Some(79), "there is data already");

    let plane = Smg::controlplane(&at("new"), port, &flags).await;
    let cluster = plane.get_json("/fleet/cluster").await;
    assert_eq!((&cluster["history_id"], &cluster["node_id"]), (&restored["history_id"], &restored["node_id"]));
    assert_eq!((&cluster["cluster_id"], &cluster["workers"]), (&backup["cluster_id"], &json!(2)));
    // The gateway follows the new history, and a write to it reaches the engines' pair.
    let written = plane.client.put(format!("{}/fleet/policies/after", plane.url)).json(&json!({"policy": "random"}));
    let written = written.send().await.unwrap();
    let after: u64 = written.headers()["x-smg-revision"].to_str().unwrap().parse().unwrap();
    eventually("the gateway acknowledges the new history", || async {
        let gateways = plane.get_json("/fleet/gateways").await;
        let found = gateways["gateways"].as_array()?.iter().find(|gateway| gateway["connected"] == true)?.clone();
        (found["acked_revision"].as_u64()? == after && found["nack"].is_null()).then_some(())
    })
    .await;
    let body = json!({"model": support::MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4});
    assert!(gateway.post("/v1/chat/completions", &body).await.status().is_success());
    let with_key = plane.client.put(format!("{}/fleet/policies/default", plane.url)).json(&json!({}));
    assert!(with_key.send().await.unwrap().status().is_success());
}

/// The process of a gateway as `/fleet/gateways` and `/fleet/admission` show it, when both do and it is connected.
async fn processes(plane: &Smg, gateway: &str) -> Option<[Value; 2]> {
    let (gateways, admission) = (plane.get_json("/fleet/gateways").await, plane.get_json("/fleet/admission").await);
    let of = |list: &Value| list["gateways"].as_array()?.iter().find(|shown| shown["gateway_id"] == gateway).cloned();
    let connected = gateways["gateways"].as_array()?.iter().find(|shown| shown["connected"] == true)?.clone();
    assert_eq!(connected["gateway_id"], gateway);
    let heard = of(&admission).filter(|shown| shown["heard"] == true)?;
    Some([connected["process_id"].clone(), heard["process_id"].clone()])
}

#[tokio::test]
async fn a_gateway_is_the_same_process_wherever_it_is_shown() {
    let (directory, own) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let plane = Smg::controlplane(directory.path(), free_port(), &[]).await;
    let flags = ["--gateway-id", "g", "--data-dir", own.path().to_str().unwrap()];
    let start = || Smg::gateway(&plane.url[7..], &flags);
    let mut gateway = start().await;
    let same = async || {
        eventually("both views know the gateway, and agree", || async {
            let [subscribed, reports] = processes(&plane, "g").await?;
            (subscribed == reports).then_some(subscribed)
        })
        .await
    };
    let first = same().await;
    let kept = own.path().join("slots.smgckpt");
    eventually("its slots are kept on disk", || async { kept.exists().then_some(()) }).await;
    gateway.kill();
    // It comes back to its own disk, and goes on with the slots that it had: to the control plane it is the process that it was.
    gateway = start().await;
    gateway.logged(&["going on with the slots of the process before"]).await;
    assert_eq!(same().await, first);
}
