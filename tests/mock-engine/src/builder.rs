//! Setting up an engine.

use std::io;
use std::time::Duration;

use bytes::Bytes;

use crate::engine::{Connector, Engine, MockEngine, Ports, Role, Settings};

/// Sets up a [`MockEngine`]. Every method has a default that suits most tests.
pub struct Builder {
    settings: Settings,
    ports: Ports,
    engine_id: Option<String>,
}

impl Builder {
    pub(crate) fn new() -> Self {
        Builder {
            settings: Settings {
                engine: Engine::Vllm,
                role: Role::Regular,
                connector: Connector::None,
                model: "m".to_owned(),
                max_model_len: 131_072,
                max_running: None,
                dp_size: None,
                prefill_delay: Duration::ZERO,
                prefill_delay_per_token: Duration::ZERO,
                token_delay: Duration::ZERO,
                patience: Duration::from_secs(120),
                early_head: false,
                idle_close: None,
                server_info: Vec::new(),
                api_key: None,
                overrides: Vec::new(),
                records: 10_000,
                grpc: false,
                cached_tokens: 0,
                tokens_per_chunk: 1,
                default_sampling: String::new(),
                overlooks_drops: false,
            },
            ports: Ports::default(),
            engine_id: None,
        }
    }

    /// Which engine is played; vLLM by default.
    pub fn engine(mut self, engine: Engine) -> Self {
        self.settings.engine = engine;
        self
    }

    /// The engine's part; regular by default.
    pub fn role(mut self, role: Role) -> Self {
        self.settings.role = role;
        self
    }

    /// vLLM's KV connector; none by default.
    pub fn connector(mut self, connector: Connector) -> Self {
        self.settings.connector = connector;
        self
    }

    /// Name of the served model; `m` by default.
    pub fn model(mut self, model: impl Into<String>) -> Self {
        self.settings.model = model.into();
        self
    }

    /// Longest prompt and answer together, in tokens; 131,072 by default.
    pub fn max_model_len(mut self, tokens: usize) -> Self {
        self.settings.max_model_len = tokens;
        self
    }

    /// Places in the running batch: more requests wait. No limit by default, and then none is reported.
    pub fn max_running(mut self, requests: usize) -> Self {
        self.settings.max_running = Some(requests);
        self
    }

    /// Data parallel ranks: rank fields of requests are checked against it. Unchecked by default.
    pub fn dp_size(mut self, ranks: u64) -> Self {
        self.settings.dp_size = Some(ranks);
        self
    }

    /// Time to compute any prompt.
    pub fn prefill_delay(mut self, delay: Duration) -> Self {
        self.settings.prefill_delay = delay;
        self
    }

    /// Time to compute a prompt, per token.
    pub fn prefill_delay_per_token(mut self, delay: Duration) -> Self {
        self.settings.prefill_delay_per_token = delay;
        self
    }

    /// Time between two tokens of an answer.
    pub fn token_delay(mut self, delay: Duration) -> Self {
        self.settings.token_delay = delay;
        self
    }

    /// How long one side of a transfer waits for the other, and how long unfetched KV is kept; 120 s by default.
    pub fn transfer_deadline(mut self, patience: Duration) -> Self {
        self.settings.patience = patience;
        self
    }

    /// Sends the head of a streamed answer before the work is done, so that its failure is an event under a 200.
    pub fn early_head(mut self, early: bool) -> Self {
        self.settings.early_head = early;
        self
    }

    /// Closes connections that carry no request for this long. uvicorn's default is 5 s; here they stay open.
    pub fn idle_close(mut self, after: Duration) -> Self {
        self.settings.idle_close = Some(after);
        self
    }

    /// Speaks gRPC instead of HTTP.
    pub fn grpc(mut self) -> Self {
        self.settings.grpc = true;
        self
    }

    /// Prompt tokens that the engine says it had in its cache, over gRPC; none by default.
    pub fn cached_tokens(mut self, tokens: usize) -> Self {
        self.settings.cached_tokens = tokens;
        self
    }

    /// Tokens in one message of a streamed answer over gRPC; 1 by default.
    pub fn tokens_per_chunk(mut self, tokens: usize) -> Self {
        self.settings.tokens_per_chunk = tokens;
        self
    }

    /// What the model's publisher recommends (`default_sampling_params_json` over gRPC); nothing by default.
    pub fn default_sampling(mut self, json: impl Into<String>) -> Self {
        self.settings.default_sampling = json.into();
        self
    }

    /// Overlooks that a gRPC call was dropped: its request ends only when it is done or aborted. Servicers abort it, as far
    /// as they learn of it.
    pub fn overlooks_dropped_calls(mut self, overlooks: bool) -> Self {
        self.settings.overlooks_drops = overlooks;
        self
    }

    /// Sets or replaces a field of what the engine says of itself: SGLang's server info, and over gRPC `server_args` or
    /// vLLM's field of that name.
    pub fn server_info(mut self, name: impl Into<String>, value: impl Into<serde_json::Value>) -> Self {
        self.settings.server_info.push((name.into(), value.into()));
        self
    }

    /// Demands `Authorization: Bearer <key>` on every path.
    pub fn api_key(mut self, key: impl Into<String>) -> Self {
        self.settings.api_key = Some(key.into());
        self
    }

    /// Answers this path with this status and JSON body, whatever the method.
    pub fn override_path(mut self, path: impl Into<String>, status: u16, body: impl Into<Bytes>) -> Self {
        self.settings.overrides.push((path.into(), status, body.into()));
        self
    }

    /// Exchanges remembered; 0 turns recording off. 10,000 by default.
    pub fn records(mut self, exchanges: usize) -> Self {
        self.settings.records = exchanges;
        self
    }

    /// HTTP port; a free one by default.
    pub fn port(mut self, port: u16) -> Self {
        self.ports.http = port;
        self
    }

    /// Bootstrap port of a prefill engine (SGLang, Mooncake); a free one by default.
    pub fn bootstrap_port(mut self, port: u16) -> Self {
        self.ports.bootstrap = Some(port);
        self
    }

    /// Side channel port of vLLM with NIXL or Mooncake, MoRI-IO's handshake port; a free one by default.
    pub fn side_channel_port(mut self, port: u16) -> Self {
        self.ports.side_channel = Some(port);
        self
    }

    /// The engine's first id; a random UUID by default, and after each restart.
    pub fn engine_id(mut self, id: impl Into<String>) -> Self {
        self.engine_id = Some(id.into());
        self
    }

    /// Starts listening on 127.0.0.1.
    pub async fn start(self) -> io::Result<MockEngine> {
        let Builder { settings, mut ports, engine_id } = self;
        if settings.engine == Engine::Tokenspeed && !settings.grpc {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "TokenSpeed speaks gRPC only"));
        }
        let vllm = settings.engine == Engine::Vllm;
        let connector = settings.connector.projected();
        let moriio = vllm && matches!(connector, Connector::MoriioRead | Connector::MoriioWrite);
        let transfers = moriio || vllm && matches!(connector, Connector::Nixl | Connector::Mooncake);
        let bootstraps = settings.role == Role::Prefill && (!vllm || *connector == Connector::Mooncake);
        if transfers {
            ports.side_channel.get_or_insert(0);
        }
        if moriio {
            ports.notify.get_or_insert(0);
        }
        if bootstraps {
            ports.bootstrap.get_or_insert(0);
        }
        MockEngine::start(settings, ports, engine_id).await
    }
}
