//! Flags of a gateway's client edge: where it listens, how long and how large a request may be.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use axum::http::HeaderValue;
use clap::Args;
use smg_gateway::{Keys, Origins};
use smg_net::tls::ServerFiles;

use super::error::CliError;
use super::tls::ServerTlsFlags;
use super::trace::TraceArgs;
use super::values;

/// Headers that carry a client's request id, most telling first.
const REQUEST_ID_HEADERS: [&str; 4] = ["x-request-id", "x-correlation-id", "x-trace-id", "request-id"];

/// The header that carries a client's routing key.
const ROUTING_KEY_HEADER: &str = "x-smg-routing-key";

/// The client edge of one gateway.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Client edge")]
pub struct EdgeArgs {
    /// IP address to serve on
    #[arg(long, value_name = "IP", default_value_t = IpAddr::V4(Ipv4Addr::UNSPECIFIED))]
    pub host: IpAddr,
    /// Port to serve on; 0 takes a free one
    #[arg(long, default_value_t = 30000)]
    pub port: u16,
    /// Time one request may take, its body included, in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 1800, value_parser = clap::value_parser!(u64).range(1..))]
    pub request_timeout_secs: u64,
    /// Silence after which an open event stream carries a keep-alive comment, in seconds; 0 sends none
    #[arg(long, value_name = "SECONDS", default_value_t = 15)]
    pub sse_keepalive_secs: u64,
    /// Time an unused connection to an engine is kept, in seconds; 0 keeps it for ever
    #[arg(long, value_name = "SECONDS", default_value_t = 3)]
    pub upstream_pool_idle_timeout_secs: u64,
    /// Largest request body, in bytes
    #[arg(long, value_name = "BYTES", default_value_t = 536_870_912, value_parser = clap::value_parser!(u64).range(1..))]
    pub max_payload_size: u64,
    /// Time a request body may stand still, in seconds; 0 waits for ever
    #[arg(long, value_name = "SECONDS", default_value_t = 300)]
    pub stream_body_stall_timeout_secs: u64,
    /// Time a whole request body may take, in seconds; 0 waits as long as a request may take
    #[arg(long, value_name = "SECONDS", default_value_t = 600)]
    pub request_body_timeout_secs: u64,
    /// Requests served at once, streams included; -1 = 1024 for each core, at least 4096; 0 = any number
    #[arg(long, value_name = "N", default_value_t = -1, allow_negative_numbers = true, value_parser = clap::value_parser!(i64).range(-1..))]
    pub max_concurrent_requests: i64,
    /// Requests that wait while that many are served; 0 = none waits
    #[arg(long, value_name = "N", default_value_t = 100)]
    pub queue_size: usize,
    /// Time a request may wait there, in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 60)]
    pub queue_timeout_secs: u64,
    /// Requests admitted per second in the long run, in bursts of up to --max-concurrent-requests; 0 = any number
    #[arg(long, value_name = "N", value_parser = values::amount)]
    pub rate_limit_tokens_per_second: Option<f64>,
    /// Origins whose pages may call, such as https://example.com, or * alone for any
    #[arg(long, num_args = 0.., value_name = "ORIGIN")]
    cors_allowed_origins: Vec<String>,
    /// Age at which a client connection is asked to close after its request, in seconds, give or take a tenth; 0 = never
    #[arg(long, value_name = "SECONDS", default_value_t = 300)]
    pub max_connection_age_secs: u64,
    /// Time a request head may take, in seconds; 0 waits for ever
    #[arg(long, value_name = "SECONDS", default_value_t = 30)]
    pub header_read_timeout_secs: u64,
    /// Time a kept-alive client connection may be unused, in seconds; 0 keeps it
    #[arg(long, value_name = "SECONDS", default_value_t = 90)]
    pub idle_connection_timeout_secs: u64,
    /// Pause between two load reports of one engine, in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..))]
    pub load_monitor_interval: u64,
    /// Silence of an engine after which a load report that breaks off takes it out of rotation, in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 2)]
    pub worker_stall_secs: u64,
    /// Ask engines for their load only while a policy or overload protection needs it
    #[arg(long)]
    pub disable_load_monitoring: bool,
    /// Ask engines for their load whether anything needs it or not: this is the default
    #[arg(long)]
    pub engine_metrics: bool,
    /// Headers to look for a request id in, first match wins
    /// [default: x-request-id x-correlation-id x-trace-id request-id]
    #[arg(long, num_args = 0.., value_name = "HEADER", value_parser = values::header_name)]
    pub request_id_headers: Vec<String>,
    /// Headers to look for a client's routing key in, first valid value wins [default: x-smg-routing-key]
    #[arg(long, num_args = 0.., value_name = "HEADER", value_parser = values::header_name)]
    pub routing_key_headers: Vec<String>,
    /// Traces.
    #[command(flatten)]
    pub trace: TraceArgs,
    #[command(flatten)]
    tls: ServerTlsFlags,
}

impl EdgeArgs {
    /// Where clients are served.
    pub fn address(&self) -> SocketAddr {
        SocketAddr::new(self.host, self.port)
    }

    /// Checks the flags against each other.
    pub(super) fn check(&self) -> Result<(), CliError> {
        self.tls.resolve()?;
        self.cors_origins()?;
        let limited = self.max_concurrent_requests != 0;
        if limited && self.queue_size > 0 && self.queue_timeout_secs == 0 {
            return Err(CliError::conflict("--queue-timeout-secs", "must be above 0 when there is a queue"));
        }
        if !limited && self.rate().is_some() {
            let reason = "needs --max-concurrent-requests: that is how large a burst may be";
            return Err(CliError::conflict("--rate-limit-tokens-per-second", reason));
        }
        Ok(())
    }

    /// Requests admitted per second, when that is limited.
    pub fn rate(&self) -> Option<f64> {
        self.rate_limit_tokens_per_second.filter(|rate| *rate > 0.0)
    }

    /// The files of TLS, when it is asked for.
    pub fn tls(&self) -> Option<ServerFiles> {
        self.tls.resolve().ok().flatten()
    }

    /// Whose pages may call.
    pub fn cors_origins(&self) -> Result<Origins, CliError> {
        let given = &self.cors_allowed_origins;
        let wrong = |reason: &str| Err(CliError::conflict("--cors-allowed-origins", reason));
        if given.iter().any(|origin| origin == "*") {
            return if given.len() == 1 { Ok(Origins::Any) } else { wrong("* stands alone") };
        }
        if given.is_empty() {
            return Ok(Origins::None);
        }
        let origin = |text: &String| {
            let (scheme, rest) = text.split_once("://")?;
            let is_origin = !scheme.is_empty() && !rest.is_empty() && !rest.contains(['/', '?', '#', '@', ' ']);
            is_origin.then(|| HeaderValue::from_str(text).ok()).flatten()
        };
        match given.iter().map(origin).collect() {
            Some(origins) => Ok(Origins::These(origins)),
            None => wrong("each must be an origin, such as https://example.com, without a path"),
        }
    }

    /// A warning when whoever reaches the host may use it.
    pub(super) fn open_warning(&self, keys: &Keys) -> Option<String> {
        let open = keys.is_empty() && !self.host.is_loopback();
        open.then(|| format!("no --api-key is given: whoever reaches {} may send requests", self.address()))
    }

    /// The headers to look for a request id in: those given, else the documented four.
    pub fn request_id_headers(&self) -> Vec<String> {
        if self.request_id_headers.is_empty() {
            REQUEST_ID_HEADERS.map(str::to_owned).to_vec()
        } else {
            self.request_id_headers.clone()
        }
    }

    /// The headers to look for a routing key in: those given, else the documented one.
    pub fn routing_key_headers(&self) -> Vec<String> {
        if self.routing_key_headers.is_empty() {
            vec![ROUTING_KEY_HEADER.to_owned()]
        } else {
            self.routing_key_headers.clone()
        }
    }
}
