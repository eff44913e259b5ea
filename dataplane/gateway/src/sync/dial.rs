//! Reaching a control plane node: over TCP, or inside the process.

use std::time::Duration;

use hyper_util::rt::TokioIo;
use smg_net::memory;
use tonic::transport::{Channel, Endpoint};

const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);

/// Where the control plane is.
#[derive(Debug, Clone)]
pub enum Dial {
    /// `HOST:PORT` of its nodes, tried in turn. Names are resolved anew at each attempt.
    Tcp(Vec<String>),
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
            Dial::Tcp(nodes) => {
                let node = nodes.get(attempt % nodes.len().max(1)).ok_or("no control plane address is given")?;
                let endpoint = Endpoint::from_shared(format!("http://{node}")).map_err(|error| error.to_string())?;
                tuned(endpoint).connect().await.map_err(|error| format!("{node}: {}", crate::relay::describe(&error)))
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
