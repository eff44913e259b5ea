//! The engines: three prefills and three decodes of every kind of pair, each kind a model of its own, behind one gateway.

use std::time::Duration;

use bytes::Bytes;
use futures::future::join_all;
use serde_json::{Value, json};

use crate::support::{Connector, Engine, MockEngine, PATIENCE, Role, Smg, spec_with};
use crate::traffic::{Case, cases};

/// How long one side of a transfer waits for the other.
pub const TRANSFER_DEADLINE: Duration = Duration::from_secs(2);

/// A kind of pair.
pub struct Kind {
    /// Its model.
    pub model: &'static str,
    /// The engine on both sides.
    pub engine: Engine,
    /// What moves the KV.
    pub connector: Connector,
    /// Fields and labels of the registrations.
    fields: fn(&MockEngine, Role) -> Value,
    policy: &'static str,
}

impl Kind {
    pub fn is_moriio(&self) -> bool {
        matches!(self.connector, Connector::MoriioRead | Connector::MoriioWrite)
    }

    /// Whether its engines may come back under another id. MoRI-IO's peers hold on to it.
    pub fn may_change_its_id(&self) -> bool {
        !self.is_moriio()
    }
}

fn moriio(engine: &MockEngine, mode: &str, dispatch: &str) -> Value {
    json!({"kv_connector": "MoRIIOConnector", "labels": {
        "moriio_mode": mode,
        "moriio_write_dispatch": dispatch,
        "moriio_handshake_port": engine.side_channel_port().unwrap().to_string(),
        "moriio_notify_port": engine.notify_port().unwrap().to_string(),
    }})
}

/// Every kind of pair, with a policy of its own.
pub fn kinds() -> [Kind; 6] {
    let kind = |model, engine, connector, policy, fields| Kind { model, engine, connector, fields, policy };
    [
        kind("sglang", Engine::Sglang, Connector::None, "cache_aware", |_, _| json!({})),
        kind("nixl", Engine::Vllm, Connector::Nixl, "power_of_two", |_, _| json!({"kv_connector": "NixlConnector"})),
        // Its engine ids are learned, each time an engine was started.
        kind(
            "mooncake",
            Engine::Vllm,
            Connector::Mooncake,
            "least_load",
            |_, _| json!({"kv_connector": "MooncakeConnector"}),
        ),
        kind("moriio-read", Engine::Vllm, Connector::MoriioRead, "round_robin", |engine, _| {
            moriio(engine, "read", "sequential")
        }),
        kind("moriio-write", Engine::Vllm, Connector::MoriioWrite, "prefix_hash", |engine, _| {
            moriio(engine, "write", "sequential")
        }),
        kind("moriio-concurrent", Engine::Vllm, Connector::MoriioWrite, "random", |engine, _| {
            moriio(engine, "write", "concurrent")
        }),
    ]
}

/// The engines of one kind.
pub struct Family {
    pub kind: Kind,
    pub prefills: Vec<MockEngine>,
    pub decodes: Vec<MockEngine>,
    /// What clients ask it, with the right answers.
    pub cases: Vec<Case>,
}

impl Family {
    async fn start(kind: Kind) -> Self {
        let leg = async |role| {
            // A READ decode whose KV has expired answers with other text; no gateway can know. The others fail and say so.
            let deadline = match kind.connector {
                Connector::MoriioRead => Duration::from_secs(600),
                _ => TRANSFER_DEADLINE,
            };
            let start = (0..3).map(|index| {
                let builder = MockEngine::builder().engine(kind.engine).connector(kind.connector.clone()).role(role);
                let builder = builder.model(kind.model).records(0).transfer_deadline(deadline);
                let builder = builder.prefill_delay(Duration::from_millis(2)).token_delay(Duration::from_millis(1));
                let closes_idle_connections = is_mortal(index);
                match closes_idle_connections {
                    true => builder.idle_close(Duration::from_millis(300)).start(),
                    false => builder.start(),
                }
            });
            join_all(start).await.into_iter().map(Result::unwrap).collect::<Vec<_>>()
        };
        let (prefills, decodes) = (leg(Role::Prefill).await, leg(Role::Decode).await);
        let single = MockEngine::builder().engine(kind.engine).model(kind.model).records(0).start().await.unwrap();
        let cases = cases(&kind, &single).await;
        Self { kind, prefills, decodes, cases }
    }

    /// Both legs' engines with their roles and their number in the leg.
    pub fn engines(&self) -> impl Iterator<Item = (Role, usize, &MockEngine)> {
        let prefills = self.prefills.iter().enumerate().map(|(index, engine)| (Role::Prefill, index, engine));
        prefills.chain(self.decodes.iter().enumerate().map(|(index, engine)| (Role::Decode, index, engine)))
    }
}

/// Whether engine `index` of a leg is one that is stopped now and then, and closes connections under the gateway's hands.
pub fn is_mortal(index: usize) -> bool {
    index == 2
}

/// The gateway and all engines.
pub struct Fleet {
    pub smg: Smg,
    pub families: Vec<Family>,
}

impl Fleet {
    pub async fn start(flags: &[&str]) -> Self {
        let families = join_all(kinds().map(Family::start)).await;
        let smg = Smg::launch(flags).await;
        for family in &families {
            let kind = &family.kind;
            smg.set_policy(kind.model, &json!({"policy": kind.policy})).await;
            let register = family.engines().map(|(role, _, engine)| {
                let worker_type = if role == Role::Prefill { "prefill" } else { "decode" };
                let spec = spec_with(engine, worker_type, (kind.fields)(engine, role));
                let smg = &smg;
                async move { smg.register(&spec).await }
            });
            join_all(register).await;
        }
        Self { smg, families }
    }

    pub fn engines(&self) -> impl Iterator<Item = &MockEngine> {
        self.families.iter().flat_map(|family| family.engines().map(|(_, _, engine)| engine))
    }

    /// Waits until nothing is under way any more: no request, no load, no socket to an engine.
    pub async fn until_quiet(&self) {
        self.smg.until_idle().await;
        for engine in self.engines() {
            let idle = engine.wait_until(PATIENCE, |engine| engine.active() == 0).await;
            assert!(idle.is_ok(), "{} still works on {} requests", engine.url(), engine.active());
        }
        self.smg.until_disconnected(self.engines()).await;
        let workers = self.smg.get_json("/workers").await;
        for worker in workers["workers"].as_array().unwrap() {
            assert_eq!(worker["load"], 0, "{worker}");
        }
    }

    /// What the gateway's process holds while it is quiet.
    pub async fn holdings(&self) -> Holdings {
        Holdings {
            resident_bytes: self.smg.resident_bytes(),
            descriptors: std::fs::read_dir(format!("/proc/{}/fd", self.smg.pid())).unwrap().count(),
            tasks: self.smg.metric("smg_tokio_alive_tasks", &[]).await as usize,
        }
    }
}

/// Memory, open files and sockets, and tasks of a process.
#[derive(Clone, Copy, Debug)]
pub struct Holdings {
    pub resident_bytes: u64,
    pub descriptors: usize,
    pub tasks: usize,
}

/// A body as bytes.
pub fn bytes(body: &Value) -> Bytes {
    body.to_string().into()
}
