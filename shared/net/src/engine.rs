//! Connections to engines that speak gRPC.
//!
//! An engine is asked by both planes and by many requests at once, over one HTTP/2 connection. Its settings follow from
//! how engines' servers and slow clients behave:
//! * pings every 30 s: grpc-core servers end connections that are pinged more often;
//! * a small window for each stream and a large one for the connection: a client that reads slowly holds up its own
//!   answer and no other, and no stream piles up so many small frames that the connection is taken for an attack.

use std::time::Duration;

use http::Uri;
use hyper_rustls::HttpsConnectorBuilder;
use hyper_util::client::legacy::connect::HttpConnector;
use rustls::{ClientConfig, RootCertStore};
use thiserror::Error;
use tonic::transport::{Channel, Endpoint};
use tower::Service as _;

/// How long connecting may take.
pub const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Window of a stream, in bytes.
const STREAM_WINDOW: u32 = 256 * 1024;
/// Window of the connection, in bytes.
const CONNECTION_WINDOW: u32 = 512 * 1024 * 1024;
/// Between two pings, also while nothing is asked.
const PING_INTERVAL: Duration = Duration::from_secs(30);
/// How long the answer to a ping may take.
const PING_TIMEOUT: Duration = Duration::from_secs(10);
/// Between two probes of TCP.
const TCP_KEEPALIVE: Duration = Duration::from_secs(60);

/// Why there is no connection to an engine.
#[derive(Debug, Error)]
pub enum EngineError {
    /// The URL is none of `grpc://` or `grpcs://`.
    #[error("{0} is no address of an engine that speaks gRPC")]
    Url(String),
    /// The engine cannot be reached.
    #[error("{0}")]
    Transport(String),
}

/// Connects to the engine at `url`, `grpc://` or `grpcs://`. Engines behind TLS must be trusted by `tls`; without it none
/// is.
///
/// # Errors
/// When the engine cannot be reached.
pub async fn connect(url: &str, tls: Option<&ClientConfig>) -> Result<Channel, EngineError> {
    let (endpoint, target) = endpoint(url)?;
    let connected = endpoint.connect_with_connector(connector(target, tls)).await;
    connected.map_err(|error| EngineError::Transport(root_cause(&error)))
}

/// A channel to the engine at `url` that connects when it is first used, and again whenever the connection is lost.
///
/// # Errors
/// When the URL cannot be one.
pub fn channel(url: &str, tls: Option<&ClientConfig>) -> Result<Channel, EngineError> {
    let (endpoint, target) = endpoint(url)?;
    Ok(endpoint.connect_with_connector_lazy(connector(target, tls)))
}

/// The innermost error: the outer ones only say that a client failed.
pub fn root_cause(error: &(dyn std::error::Error + 'static)) -> String {
    let mut cause = error;
    while let Some(source) = cause.source() {
        cause = source;
    }
    cause.to_string()
}

/// The profile, and where to connect to.
fn endpoint(url: &str) -> Result<(Endpoint, Uri), EngineError> {
    let invalid = || EngineError::Url(url.to_owned());
    let rest = |scheme: &str| url.strip_prefix(scheme);
    let target = match (rest("grpc://"), rest("grpcs://")) {
        (Some(rest), _) => format!("http://{rest}"),
        (_, Some(rest)) => format!("https://{rest}"),
        _ => return Err(invalid()),
    };
    let target: Uri = target.parse().map_err(|_| invalid())?;
    let authority = target.authority().ok_or_else(invalid)?;
    // The connector below sees to TLS, so the transport must not refuse what it has no TLS of its own for.
    let plain: Uri = format!("http://{authority}").parse().map_err(|_| invalid())?;
    let endpoint = Endpoint::from(plain)
        .origin(target.clone())
        .connect_timeout(CONNECT_TIMEOUT)
        .http2_keep_alive_interval(PING_INTERVAL)
        .keep_alive_timeout(PING_TIMEOUT)
        .keep_alive_while_idle(true)
        .http2_adaptive_window(false)
        .initial_stream_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW);
    Ok((endpoint, target))
}

/// Connects to `target`, whatever it is asked for.
fn connector(
    target: Uri,
    tls: Option<&ClientConfig>,
) -> impl tower::Service<
    Uri,
    Response = <hyper_rustls::HttpsConnector<HttpConnector> as tower::Service<Uri>>::Response,
    Error = Box<dyn std::error::Error + Send + Sync>,
    Future = impl Future + Send + 'static,
> + Send
+ 'static {
    let mut http = HttpConnector::new();
    http.enforce_http(false);
    http.set_nodelay(true);
    http.set_keepalive(Some(TCP_KEEPALIVE));
    http.set_connect_timeout(Some(CONNECT_TIMEOUT));
    let untrusting = || ClientConfig::builder().with_root_certificates(RootCertStore::empty()).with_no_client_auth();
    let config = tls.cloned().unwrap_or_else(untrusting);
    let mut https =
        HttpsConnectorBuilder::new().with_tls_config(config).https_or_http().enable_http2().wrap_connector(http);
    tower::service_fn(move |_: Uri| https.call(target.clone()))
}
