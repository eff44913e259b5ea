//! Flags of a gateway's client edge: where it listens, how long and how large a request may be.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use clap::Args;

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
    /// Time a request head may take, in seconds; 0 waits for ever
    #[arg(long, value_name = "SECONDS", default_value_t = 30)]
    pub header_read_timeout_secs: u64,
    /// Time a kept-alive client connection may be unused, in seconds; 0 keeps it
    #[arg(long, value_name = "SECONDS", default_value_t = 90)]
    pub idle_connection_timeout_secs: u64,
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
}

impl EdgeArgs {
    /// Where clients are served.
    pub fn address(&self) -> SocketAddr {
        SocketAddr::new(self.host, self.port)
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
