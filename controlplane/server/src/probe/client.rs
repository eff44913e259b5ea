//! The HTTP client that talks to engines on behalf of the control plane. Its gRPC counterpart is [`EngineClient`].
//!
//! Engines are not trusted: a call has one deadline for everything, bodies are capped, redirects are not followed, and each call has its
//! own connection, since whether the engine accepts one is what a probe asks.

use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response, StatusCode, header};
use http_body_util::{BodyExt, Empty, LengthLimitError, Limited};
use hyper::body::Incoming;
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use smg_fleet::snapshot::FLEET_HEADER;
use smg_net::engine::root_cause;
use smg_net::tls::{ClientConfig, WorkerConnector, worker_connector};
use thiserror::Error;
use tokio::time::timeout;
use uuid::Uuid;

use super::engine::EngineClient;

/// Largest body that is read, in bytes.
pub const MAX_BODY_BYTES: usize = 1024 * 1024;

/// Why an engine did not answer.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum ProbeError {
    /// The URL or the key cannot be sent.
    #[error("the request cannot be made: {0}")]
    Request(String),
    /// No answer within the limit.
    #[error("no answer within {0:?}")]
    Timeout(Duration),
    /// The body is larger than [`MAX_BODY_BYTES`].
    #[error("the answer is larger than {MAX_BODY_BYTES} bytes")]
    TooLarge,
    /// Whoever answers is a gateway of the fleet that asks: with such a worker requests would go in circles.
    #[error("a gateway of this fleet answers there, not an engine")]
    OwnGateway,
    /// The connection was refused, cut, or carried something that is not HTTP.
    #[error("{0}")]
    Transport(String),
    /// Over gRPC: it answered with an error.
    #[error("it answered {0:?}: {1}")]
    Status(tonic::Code, String),
    /// Over gRPC: it says that it is not well.
    #[error("it says that it is not healthy: {0}")]
    Unhealthy(String),
}

/// An engine's answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Answer {
    /// The status.
    pub status: StatusCode,
    /// The body.
    pub body: Bytes,
}

/// The client. Cheap to clone.
#[derive(Debug, Clone)]
pub struct ProbeClient {
    client: Client<WorkerConnector, Empty<Bytes>>,
    engines: EngineClient,
}

impl Default for ProbeClient {
    fn default() -> Self {
        Self::new(None)
    }
}

impl ProbeClient {
    /// A client. `tls` says what connections to `https://` workers trust and present; without it no such worker is trusted.
    pub fn new(tls: Option<&ClientConfig>) -> Self {
        let connector = worker_connector(HttpConnector::new(), tls);
        let client = Client::builder(TokioExecutor::new()).pool_max_idle_per_host(0).build(connector);
        Self { client, engines: EngineClient::new(tls) }
    }

    /// The client for engines that speak gRPC.
    pub fn engines(&self) -> &EngineClient {
        &self.engines
    }

    /// The status of a GET; the body is not read. `fleet` is the cluster that asks.
    ///
    /// # Errors
    /// When no head arrives within `limit`, or it is that of a gateway of the same fleet.
    pub async fn status(
        &self,
        url: &str,
        key: Option<&str>,
        fleet: Uuid,
        limit: Duration,
    ) -> Result<StatusCode, ProbeError> {
        let response = timeout(limit, self.send(url, key)).await.unwrap_or(Err(ProbeError::Timeout(limit)))?;
        let theirs = response.headers().get(FLEET_HEADER).and_then(|value| value.to_str().ok()?.parse().ok());
        if theirs.is_some_and(|theirs: Uuid| theirs == fleet && !fleet.is_nil()) {
            return Err(ProbeError::OwnGateway);
        }
        Ok(response.status())
    }

    /// A GET with its body.
    ///
    /// # Errors
    /// When the answer is not complete within `limit`, or too large.
    pub async fn get(&self, url: &str, key: Option<&str>, limit: Duration) -> Result<Answer, ProbeError> {
        let answer = async {
            let response = self.send(url, key).await?;
            let status = response.status();
            match Limited::new(response.into_body(), MAX_BODY_BYTES).collect().await {
                Ok(body) => Ok(Answer { status, body: body.to_bytes() }),
                Err(error) if error.is::<LengthLimitError>() => Err(ProbeError::TooLarge),
                Err(error) => Err(ProbeError::Transport(root_cause(error.as_ref()))),
            }
        };
        timeout(limit, answer).await.unwrap_or(Err(ProbeError::Timeout(limit)))
    }

    async fn send(&self, url: &str, key: Option<&str>) -> Result<Response<Incoming>, ProbeError> {
        let mut request = Request::get(url).header(header::ACCEPT, "application/json");
        if let Some(key) = key {
            request = request.header(header::AUTHORIZATION, format!("Bearer {key}"));
        }
        let request = request.body(Empty::new()).map_err(|error| ProbeError::Request(error.to_string()))?;
        self.client.request(request).await.map_err(|error| ProbeError::Transport(root_cause(&error)))
    }
}
