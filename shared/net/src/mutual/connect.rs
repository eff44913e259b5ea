//! Connections to members of the control plane.
//!
//! A connection is made only to a member of the cluster: its certificate must lead to a trusted root and name a control plane of the cluster that
//! this side's own certificate names. The name under which it was dialed is not looked at.

use std::io;
use std::net::IpAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use http::Uri;
use hyper::rt::{Read, ReadBufCursor, Write};
use hyper_util::client::legacy::connect::{Connected, Connection, HttpConnector};
use hyper_util::rt::TokioIo;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::verify_server_cert_signed_by_trust_anchor;
use rustls::crypto::{WebPkiSupportedAlgorithms, verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::server::ParsedCertificate;
use rustls::{
    CertificateError, ClientConfig, DigitallySignedStruct, Error, OtherError, RootCertStore, SignatureScheme,
};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tower::Service;

use super::explain::{explain, refusal};
use super::identity::{Caller, Part};
use super::{MutualTls, cluster_or_any};

/// Verifies that a server is a member of the control plane.
#[derive(Debug)]
pub(super) struct MemberVerifier {
    pub roots: RootCertStore,
    /// The cluster; none = any that the roots vouch for.
    pub cluster: Option<String>,
    pub algorithms: WebPkiSupportedAlgorithms,
}

impl ServerCertVerifier for MemberVerifier {
    fn verify_server_cert(
        &self,
        certificate: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        _dialed: &ServerName<'_>,
        _ocsp: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        let parsed = ParsedCertificate::try_from(certificate)?;
        verify_server_cert_signed_by_trust_anchor(&parsed, &self.roots, intermediates, now, self.algorithms.all)?;
        let cluster = cluster_or_any(self.cluster.as_deref(), certificate);
        match Caller::of(Some(certificate), &cluster).must_be(Part::ControlPlane) {
            Ok(_) => Ok(ServerCertVerified::assertion()),
            Err(other) => {
                let other = OtherError(Arc::new(NotAMember(other.to_string())));
                Err(Error::InvalidCertificate(CertificateError::Other(other)))
            }
        }
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls12_signature(message, certificate, signed, &self.algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls13_signature(message, certificate, signed, &self.algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.algorithms.supported_schemes()
    }
}

#[derive(Debug, thiserror::Error)]
#[error("the other side is no member of the control plane: {0}")]
struct NotAMember(String);

/// Why a connection was not made.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct NotConnected(String);

/// What a connector trusts and presents.
#[derive(Debug, Clone)]
enum Trust {
    Files(Arc<MutualTls>),
    Fixed(Arc<ClientConfig>),
}

/// Connects to members of the control plane, with the certificate that is in the files by then. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Connector {
    trust: Trust,
    http: HttpConnector,
    limit: Duration,
}

impl Connector {
    /// For a part of the fleet. `source` = the local address of its connections; `limit` is for one connection, the handshake included.
    pub fn of_part(tls: Arc<MutualTls>, source: Option<IpAddr>, limit: Duration) -> Self {
        Self::new(Trust::Files(tls), source, limit)
    }

    /// For an operator; see [`super::operator`].
    pub fn of_operator(config: Arc<ClientConfig>, limit: Duration) -> Self {
        Self::new(Trust::Fixed(config), None, limit)
    }

    fn new(trust: Trust, source: Option<IpAddr>, limit: Duration) -> Self {
        let mut http = HttpConnector::new();
        http.enforce_http(false);
        http.set_local_address(source);
        http.set_connect_timeout(Some(limit));
        http.set_nodelay(true);
        Self { trust, http, limit }
    }
}

impl Service<Uri> for Connector {
    type Response = Stream;
    type Error = NotConnected;
    type Future = Pin<Box<dyn Future<Output = Result<Stream, NotConnected>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), NotConnected>> {
        self.http.poll_ready(context).map_err(|error| NotConnected(describe(&error)))
    }

    fn call(&mut self, uri: Uri) -> Self::Future {
        let config = match &self.trust {
            Trust::Files(tls) => tls.client(),
            Trust::Fixed(config) => Arc::clone(config),
        };
        let limit = self.limit;
        let host = uri.host().unwrap_or_default().trim_matches(['[', ']']).to_owned();
        let dialing = self.http.call(uri);
        let connecting = async move {
            let stream: TokioIo<TcpStream> = dialing.await.map_err(|error| NotConnected(describe(&error)))?;
            let name = ServerName::try_from(host).or_else(|_| ServerName::try_from("controlplane"));
            let name = name.map_err(|error| NotConnected(error.to_string()))?;
            let stream = TlsConnector::from(config).connect(name, stream.into_inner()).await;
            let stream = stream.map_err(|error| NotConnected(explain(&error)))?;
            Ok(Stream { inner: TokioIo::new(stream), heard: false })
        };
        Box::pin(async move {
            let late = || NotConnected(format!("no TLS connection within {} ms", limit.as_millis()));
            tokio::time::timeout(limit, connecting).await.unwrap_or_else(|_| Err(late()))
        })
    }
}

fn describe(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(inner) = cause {
        text = format!("{text}: {inner}");
        cause = inner.source();
    }
    text
}

/// A connection to a member.
#[derive(Debug)]
pub struct Stream {
    inner: TokioIo<TlsStream<TcpStream>>,
    /// Whether anything has come in.
    heard: bool,
}

impl Connection for Stream {
    fn connected(&self) -> Connected {
        let connected = Connected::new();
        let protocol = self.inner.inner().get_ref().1.alpn_protocol();
        if protocol == Some(b"h2") { connected.negotiated_h2() } else { connected }
    }
}

impl Read for Stream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: ReadBufCursor<'_>,
    ) -> Poll<io::Result<()>> {
        let read = Pin::new(&mut self.inner).poll_read(context, buffer);
        match read {
            Poll::Ready(Ok(())) => {
                self.heard = true;
                Poll::Ready(Ok(()))
            }
            Poll::Ready(Err(error)) if !self.heard => match refusal(&error) {
                Some(refused) => Poll::Ready(Err(io::Error::new(io::ErrorKind::PermissionDenied, refused))),
                None => Poll::Ready(Err(error)),
            },
            other => other,
        }
    }
}

impl Write for Stream {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.inner).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_shutdown(context)
    }
}
