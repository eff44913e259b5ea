//! How one gateway process runs. Everything that holds for the fleet is a policy document instead.

use std::path::PathBuf;
use std::time::Duration;

use smg_telemetry::trace::Tracer;

use crate::front::access::Keys;
use crate::front::admission::AdmissionOptions;
use crate::front::cors::Origins;
use crate::grpc::tokenizers::TextOptions;

/// Settings of a gateway process.
#[derive(Debug, Clone)]
pub struct GatewayOptions {
    /// Name of this gateway in `/fleet/gateways`.
    pub gateway_id: String,
    /// Whether no other gateway sends requests to the same workers: then it shares their windows with nobody, and asks nobody.
    pub alone: bool,
    /// Directory of the last-known-good snapshot; none = nothing is kept.
    pub data_dir: Option<PathBuf>,
    /// Largest request body, in bytes.
    pub max_payload_bytes: usize,
    /// How long an upload may take as a whole.
    pub upload_timeout: Duration,
    /// How long an upload may stand still.
    pub upload_stall_timeout: Duration,
    /// Longest request, the response body included.
    pub request_timeout: Duration,
    /// Longest wait for a connection to a worker.
    pub connect_timeout: Duration,
    /// How long an unused connection to a worker is kept.
    pub pool_idle_timeout: Duration,
    /// Silence after which a stream gets a comment; zero = never.
    pub sse_keep_alive: Duration,
    /// Headers that may carry a request id, in order of preference, lower case.
    pub request_id_headers: Vec<String>,
    /// Headers that may carry a routing key, in order of preference, lower case.
    pub routing_key_headers: Vec<String>,
    /// How many requests may be served at once; none = any number.
    pub admission: Option<AdmissionOptions>,
    /// Whose pages may call.
    pub cors_origins: Origins,
    /// What connections to `https://` workers trust and present; none = such workers are not trusted.
    pub worker_tls: Option<smg_net::tls::ClientConfig>,
    /// Keys that inference needs.
    pub keys: Keys,
    /// Whether the control plane serves nobody who does not say who they are: then admin requests are not open here either.
    pub guarded: bool,
    /// How engines are asked for their load.
    pub load: LoadMonitorOptions,
    /// How requests become tokens where workers speak gRPC.
    pub text: TextOptions,
    /// How long writes wait for the control plane.
    pub control_plane_timeout: Duration,
    /// Where traces go; none = requests are not traced.
    pub tracer: Option<Tracer>,
}

/// How engines are asked for their load.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LoadMonitorOptions {
    /// Pause between two reports of one engine.
    pub interval: Duration,
    /// Ask only while a policy or overload protection needs the answers.
    pub only_if_needed: bool,
    /// Silence after which an engine that cannot be asked leaves rotation.
    pub stall: Duration,
}

impl LoadMonitorOptions {
    /// The interval in whole seconds, at least 1: what a refused client is told to wait.
    pub fn interval_secs(&self) -> u32 {
        u32::try_from(self.interval.as_secs()).unwrap_or(u32::MAX).max(1)
    }
}

impl Default for LoadMonitorOptions {
    fn default() -> Self {
        Self { interval: Duration::from_secs(10), only_if_needed: false, stall: Duration::from_secs(2) }
    }
}

impl Default for GatewayOptions {
    fn default() -> Self {
        let headers = ["x-request-id", "x-correlation-id", "x-trace-id", "request-id"];
        Self {
            gateway_id: "gateway".to_owned(),
            alone: true,
            data_dir: None,
            max_payload_bytes: 512 * 1024 * 1024,
            upload_timeout: Duration::from_secs(600),
            upload_stall_timeout: Duration::from_secs(300),
            request_timeout: Duration::from_secs(1800),
            connect_timeout: Duration::from_secs(10),
            pool_idle_timeout: Duration::from_secs(3),
            sse_keep_alive: Duration::from_secs(15),
            request_id_headers: headers.map(str::to_owned).to_vec(),
            routing_key_headers: vec!["x-smg-routing-key".to_owned()],
            admission: None,
            cors_origins: Origins::None,
            worker_tls: None,
            keys: Keys::default(),
            guarded: false,
            load: LoadMonitorOptions::default(),
            text: TextOptions::default(),
            control_plane_timeout: Duration::from_secs(2),
            tracer: None,
        }
    }
}
