//! The engines: three prefills and three decodes of every kind of pair, and three that serve whole requests, each kind a model of its own,
//! behind one gateway.

use std::time::Duration;

use bytes::Bytes;
use futures::future::join_all;
use serde_json::{Value, json};

use crate::support::{Connector, Engine, MockEngine, PATIENCE, Role, Smg, eventually, samples, spec_with};
use crate::traffic::{Case, RERANKED, cases};

/// How long one side of a transfer waits for the other.
pub const TRANSFER_DEADLINE: Duration = Duration::from_secs(2);

/// The kind of pair of which prefill and decode run at once, though vLLM serves it.
const CONCURRENT: &str = "moriio-concurrent";

/// A kind of pair, or of workers without one.
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
    /// The roles of its engines.
    roles: &'static [Role],
}

impl Kind {
    pub fn is_moriio(&self) -> bool {
        matches!(self.connector, Connector::MoriioRead | Connector::MoriioWrite)
    }

    /// Whether both legs of a request run at once, so that one may end the other.
    pub fn runs_legs_at_once(&self) -> bool {
        self.engine == Engine::Sglang || self.model == CONCURRENT
    }

    /// The engine whose answer is the client's.
    pub fn answering(&self, case: &Case) -> Role {
        match self.roles {
            [Role::Regular] => Role::Regular,
            _ if case.counts_tokens() => Role::Prefill,
            _ => Role::Decode,
        }
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

/// Every kind of pair, and workers without one, each with a policy of its own.
pub fn kinds() -> [Kind; 7] {
    let kind = |model, engine, connector, policy, fields| Kind {
        model,
        engine,
        connector,
        fields,
        policy,
        roles: &[Role::Prefill, Role::Decode],
    };
    let alone = kind("alone", Engine::Vllm, Connector::None, "consistent_hashing", |_, _| json!({}));
    [
        Kind { roles: &[Role::Regular], ..alone },
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
        kind(CONCURRENT, Engine::Vllm, Connector::MoriioWrite, "random", |engine, _| {
            moriio(engine, "write", "concurrent")
        }),
    ]
}

/// The engines of one kind.
pub struct Family {
    pub kind: Kind,
    /// Three of each role.
    legs: Vec<(Role, Vec<MockEngine>)>,
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
                let builder = builder.override_path("/v1/rerank", 200, RERANKED);
                let builder = builder.prefill_delay(Duration::from_millis(2)).token_delay(Duration::from_millis(1));
                let closes_idle_connections = is_mortal(index);
                match closes_idle_connections {
                    true => builder.idle_close(Duration::from_millis(300)).start(),
                    false => builder.start(),
                }
            });
            join_all(start).await.into_iter().map(Result::unwrap).collect::<Vec<_>>()
        };
        let mut legs = Vec::new();
        for role in kind.roles {
            legs.push((*role, leg(*role).await));
        }
        let single = MockEngine::builder().engine(kind.engine).model(kind.model).records(0);
        let single = single.override_path("/v1/rerank", 200, RERANKED).start().await.unwrap();
        let cases = cases(&kind, &single).await;
        Self { kind, legs, cases }
    }

    /// All engines with their roles and their number in the leg.
    pub fn engines(&self) -> impl Iterator<Item = (Role, usize, &MockEngine)> {
        self.legs
            .iter()
            .flat_map(|(role, leg)| leg.iter().enumerate().map(move |(index, engine)| (*role, index, engine)))
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
                let worker_type = match role {
                    Role::Prefill => "prefill",
                    Role::Decode => "decode",
                    _ => "regular",
                };
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
        eventually("every permit is back, and nobody stands in a queue", || async {
            self.permits().await.into_iter().all(|held| held == 0.0).then_some(())
        })
        .await;
        let admitted = self.smg.metric("smg_http_rate_limit_total", &[("result", "allowed")]).await;
        assert!(admitted > 0.0, "no request was admitted under the limit");
    }

    /// The permits that are out, and those who wait for one: at the edge, and for each prefill worker.
    async fn permits(&self) -> Vec<f64> {
        let metrics = self.smg.metrics().await;
        let read = |name: &str| samples(&metrics, name, &[]).into_values().collect::<Vec<f64>>();
        let queues = ["smg_admission_inflight", "smg_admission_queue_depth", "smg_pd_prefill_admission_queued"];
        let mut permits = queues.map(read).concat();
        assert_eq!(permits.len(), queues.len());
        let prefills = read("smg_pd_prefill_admission_inflight");
        let registered = self.families.iter().flat_map(Family::engines).filter(|(role, ..)| *role == Role::Prefill);
        assert_eq!(prefills.len(), registered.count(), "each prefill worker has a limit");
        permits.extend(prefills);
        permits
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
