//! Connections to workers that speak gRPC.
//!
//! A worker has one connection, which all its requests and probes share; it is made with the first of them, made anew when it broke, and
//! closed with the last handle, which lives as long as the worker. `grpc://` is plain, `grpcs://` trusts and presents what `https://`
//! workers are given.
//!
//! A stream's window is small beside the connection's: a client that reads slowly fills the window of its own stream and holds up no other.
//! Pings are rare, because servers built on grpc-core end connections that ping more often ("too many pings").

use std::time::Duration;

use http::Uri;
use hyper_util::client::legacy::connect::HttpConnector;
use smg_net::tls::{ClientConfig, WorkerConnector, http2_connector};
use tonic::transport::{Channel, Endpoint};

/// Time between two pings of a connection, at rest too.
const PING: Duration = Duration::from_secs(30);
/// How long a worker may take to answer one.
const PONG: Duration = Duration::from_secs(10);
/// Time between two probes of TCP.
const TCP_KEEPALIVE: Duration = Duration::from_secs(60);
/// Most bytes that one stream receives ahead of its reader.
const STREAM_WINDOW: u32 = 256 * 1024;
/// Most bytes that all streams of a connection receive ahead of their readers.
const CONNECTION_WINDOW: u32 = 512 * 1024 * 1024;

/// Makes connections.
#[derive(Debug, Clone)]
pub struct Connector {
    connector: WorkerConnector,
    timeout: Duration,
}

impl Connector {
    /// Connections that are made within `timeout`.
    pub fn new(timeout: Duration, tls: Option<&ClientConfig>) -> Self {
        let mut tcp = HttpConnector::new();
        tcp.set_nodelay(true);
        tcp.set_keepalive(Some(TCP_KEEPALIVE));
        tcp.set_connect_timeout(Some(timeout));
        Self { connector: http2_connector(tcp, tls), timeout }
    }

    /// The connection of the worker at `url` (`grpc://…` or `grpcs://…`); `None` when the URL is no address.
    pub fn channel(&self, url: &str) -> Option<Channel> {
        let address = match url.split_once("://")? {
            ("grpc", rest) => format!("http://{rest}"),
            ("grpcs", rest) => format!("https://{rest}"),
            _ => return None,
        };
        let endpoint = Endpoint::from(address.parse::<Uri>().ok()?)
            .connect_timeout(self.timeout)
            .http2_keep_alive_interval(PING)
            .keep_alive_timeout(PONG)
            .keep_alive_while_idle(true)
            .initial_stream_window_size(STREAM_WINDOW)
            .initial_connection_window_size(CONNECTION_WINDOW);
        Some(endpoint.connect_with_connector_lazy(self.connector.clone()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn only_addresses_of_this_wire_are_connected_to() {
        let connector = Connector::new(Duration::from_secs(1), None);
        for (url, connects) in [
            ("grpc://127.0.0.1:1", true),
            ("grpcs://engine:50051", true),
            ("grpc://[::1]:2", true),
            ("http://127.0.0.1:1", false),
            ("nonsense", false),
        ] {
            assert_eq!(connector.channel(url).is_some(), connects, "{url}");
        }
    }
}
