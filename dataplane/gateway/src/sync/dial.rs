//! Reaching a control plane node: over TCP, or inside the process.
//!
//! A name may stand for several nodes, and its addresses may change: it is resolved anew at each attempt, and every address of every name
//! is a node of its own. Attempts go round them from a random one on, so that gateways spread and no node is tried twice in a row while
//! there is another.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use hyper_util::rt::TokioIo;
use smg_net::memory;
use smg_net::mutual::MutualTls;
use smg_net::mutual::connect::Connector;
use tonic::transport::{Channel, Endpoint};

const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
const RESOLVE_TIMEOUT: Duration = Duration::from_secs(2);

/// Where the control plane is.
#[derive(Debug, Clone)]
pub enum Dial {
    /// `HOST:PORT` of its nodes, or of a name for all of them.
    Tcp {
        /// The addresses.
        names: Vec<String>,
        /// What is presented to the nodes, and what they must present; none = nothing.
        tls: Option<Arc<MutualTls>>,
    },
    /// This process.
    Memory(memory::Connector),
}

impl Dial {
    /// Connects; `attempt` chooses among several nodes.
    ///
    /// # Errors
    /// When the node cannot be reached; the message says why.
    pub async fn connect(&self, attempt: usize) -> Result<Channel, String> {
        let tuned = |endpoint: Endpoint| {
            endpoint
                .connect_timeout(CONNECT_TIMEOUT)
                .http2_keep_alive_interval(Duration::from_secs(5))
                .keep_alive_timeout(Duration::from_secs(5))
                .keep_alive_while_idle(true)
                .tcp_nodelay(true)
        };
        match self {
            Dial::Tcp { names, tls } => {
                let address = choose(&resolve(names).await?, attempt).ok_or("no control plane address is given")?;
                let scheme = if tls.is_some() { "https" } else { "http" };
                let endpoint = Endpoint::from_shared(format!("{scheme}://{address}"));
                let endpoint = tuned(endpoint.map_err(|error| error.to_string())?);
                let connected = match tls {
                    None => endpoint.connect().await,
                    Some(tls) => {
                        let connector = Connector::of_part(Arc::clone(tls), None, CONNECT_TIMEOUT);
                        endpoint.connect_with_connector(connector).await
                    }
                };
                connected.map_err(|error| format!("{address}: {}", crate::relay::describe(&error)))
            }
            Dial::Memory(connector) => {
                let connector = connector.clone();
                let service = tower::service_fn(move |_: http::Uri| {
                    let connector = connector.clone();
                    async move { connector.connect().await.map(TokioIo::new) }
                });
                let endpoint = tuned(Endpoint::from_static("http://in-process"));
                endpoint.connect_with_connector(service).await.map_err(|error| crate::relay::describe(&error))
            }
        }
    }
}

/// Every address of every name that can be resolved now.
async fn resolve(names: &[String]) -> Result<BTreeSet<SocketAddr>, String> {
    let (mut addresses, mut last) = (BTreeSet::new(), None);
    for name in names {
        match tokio::time::timeout(RESOLVE_TIMEOUT, tokio::net::lookup_host(name.as_str())).await {
            Ok(Ok(found)) => addresses.extend(found),
            Ok(Err(error)) => last = Some(format!("{name}: {error}")),
            Err(_) => last = Some(format!("{name}: its address was not found in time")),
        }
    }
    match last {
        Some(error) if addresses.is_empty() => Err(error),
        _ => Ok(addresses),
    }
}

fn choose(addresses: &BTreeSet<SocketAddr>, attempt: usize) -> Option<SocketAddr> {
    addresses.iter().nth(attempt % addresses.len().max(1)).copied()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn every_address_is_a_node_and_attempts_go_round_them() {
        let names = ["127.0.0.1:1", "127.0.0.2:1", "127.0.0.1:1", "no-such-name.invalid:1"].map(str::to_owned);
        let addresses = resolve(&names).await.unwrap();
        assert_eq!(addresses.len(), 2, "a name that is not known does not hide the others");
        assert_ne!(choose(&addresses, 7), choose(&addresses, 8));
        assert_eq!(choose(&addresses, 7), choose(&addresses, 9));
        assert!(resolve(&names[3..]).await.is_err());
        assert_eq!(choose(&BTreeSet::new(), 3), None);
    }
}
