//! TLS: certificates from files, for listeners and towards workers.
//!
//! A listener reads its files anew when they change, so that a certificate is replaced without a restart: connections that exist keep
//! theirs, later ones get the new one. Files that cannot be used are reported and the last good ones stay in use; at the start they are an
//! error that names the file and what is wrong with it.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use arc_swap::ArcSwap;
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy::connect::HttpConnector;
pub use rustls::ClientConfig;
use rustls::crypto::{CryptoProvider, ring};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::{RootCertStore, ServerConfig};
use thiserror::Error;
use tokio_rustls::TlsAcceptor;

use crate::mutual::validity::Validity;

/// How often a listener looks whether its files have changed.
const LOOK: Duration = Duration::from_secs(1);

/// Why files cannot be used for TLS.
#[derive(Debug, Error)]
pub enum TlsError {
    /// A file cannot be read.
    #[error("{path}: {error}")]
    Read {
        /// Which file.
        path: PathBuf,
        /// Why.
        error: io::Error,
    },
    /// A file is no PEM, or holds nothing of the kind.
    #[error("{path}: no {what} in PEM form: {reason}")]
    Pem {
        /// Which file.
        path: PathBuf,
        /// What was looked for.
        what: &'static str,
        /// Why it was not found.
        reason: String,
    },
    /// The parts do not make a whole, such as a key that is not the certificate's.
    #[error("{path}: {reason}")]
    Unusable {
        /// The file that names the problem best.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
}

fn read(path: &Path) -> Result<Vec<u8>, TlsError> {
    std::fs::read(path).map_err(|error| TlsError::Read { path: path.to_owned(), error })
}

pub(crate) fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let what = "certificate";
    let pem = |reason: String| TlsError::Pem { path: path.to_owned(), what, reason };
    let found: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&read(path)?).collect();
    let found = found.map_err(|error| pem(error.to_string()))?;
    if found.is_empty() { Err(pem("the file holds none".to_owned())) } else { Ok(found) }
}

/// The first certificate of a file.
///
/// # Errors
/// When there is none.
pub fn first_certificate(path: &Path) -> Result<CertificateDer<'static>, TlsError> {
    let none = || TlsError::Unusable { path: path.to_owned(), reason: "the file holds no certificate".to_owned() };
    certificates(path)?.into_iter().next().ok_or_else(none)
}

pub(crate) fn private_key(path: &Path) -> Result<PrivateKeyDer<'static>, TlsError> {
    let what = "private key";
    let pem =
        |error: rustls::pki_types::pem::Error| TlsError::Pem { path: path.to_owned(), what, reason: error.to_string() };
    PrivateKeyDer::from_pem_slice(&read(path)?).map_err(pem)
}

pub(crate) fn add_roots(roots: &mut RootCertStore, path: &Path) -> Result<(), TlsError> {
    for certificate in certificates(path)? {
        let unusable = |error: rustls::Error| TlsError::Unusable { path: path.to_owned(), reason: error.to_string() };
        roots.add(certificate).map_err(unusable)?;
    }
    Ok(())
}

pub(crate) fn provider() -> Arc<CryptoProvider> {
    Arc::new(ring::default_provider())
}

/// The files of a listener.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServerFiles {
    /// Its certificate, followed by those that lead to a root; PEM.
    pub certificate: PathBuf,
    /// The key of the certificate; PEM.
    pub key: PathBuf,
    /// Roots of client certificates; PEM. With any, clients without a certificate of theirs are refused.
    pub client_roots: Vec<PathBuf>,
}

impl ServerFiles {
    fn load(&self) -> Result<Served, TlsError> {
        let (chain, key) = (certificates(&self.certificate)?, private_key(&self.key)?);
        let unusable = |path: &Path, reason: String| TlsError::Unusable { path: path.to_owned(), reason };
        let builder = ServerConfig::builder_with_provider(provider())
            .with_safe_default_protocol_versions()
            .map_err(|error| unusable(&self.certificate, error.to_string()))?;
        let builder = match self.client_roots.first() {
            None => builder.with_no_client_auth(),
            Some(first) => {
                let mut roots = RootCertStore::empty();
                self.client_roots.iter().try_for_each(|path| add_roots(&mut roots, path))?;
                let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider()).build();
                builder.with_client_cert_verifier(verifier.map_err(|error| unusable(first, error.to_string()))?)
            }
        };
        let validity = chain.first().and_then(|certificate| Validity::of(certificate));
        let config = builder.with_single_cert(chain, key);
        let mut config = config.map_err(|error| unusable(&self.key, error.to_string()))?;
        config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
        Ok(Served { config: Arc::new(config), validity })
    }

    fn all(&self) -> Vec<PathBuf> {
        [&self.certificate, &self.key].into_iter().chain(&self.client_roots).cloned().collect()
    }
}

/// What changes when any of the files does.
fn fingerprint(files: &[PathBuf]) -> Vec<Option<(SystemTime, u64)>> {
    // Links are followed: that is how an orchestrator replaces several files at once.
    let look = |path: &PathBuf| std::fs::metadata(path).ok().and_then(|file| Some((file.modified().ok()?, file.len())));
    files.iter().map(look).collect()
}

/// Follows files for ever: what `load` makes of them goes to `put`. Both see every change within moments of it.
pub(crate) async fn follow<T: Send + 'static>(
    files: Vec<PathBuf>,
    certificate: &Path,
    load: impl Fn() -> Result<T, TlsError> + Clone + Send + 'static,
    put: impl Fn(T),
) {
    let files = Arc::new(files);
    let mut seen = fingerprint(&files);
    let mut complaint = None;
    let mut ticks = tokio::time::interval(LOOK);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        let looking = Arc::clone(&files);
        let looked = tokio::task::spawn_blocking(move || fingerprint(&looking)).await.unwrap_or_default();
        // Files that could not be used are tried again: a key is often written a moment after its certificate.
        if looked == seen && complaint.is_none() {
            continue;
        }
        seen = looked;
        let Ok(loaded) = tokio::task::spawn_blocking(load.clone()).await else { continue };
        match loaded {
            Ok(loaded) => {
                put(loaded);
                complaint = None;
                let certificate = certificate.display();
                tracing::info!(target: "smg", %certificate, "new connections use the new certificate");
            }
            Err(error) => {
                let error = error.to_string();
                if complaint.as_ref() != Some(&error) {
                    tracing::error!(target: "smg", error, "the new certificate cannot be used: the last good one stays");
                }
                complaint = Some(error);
            }
        }
    }
}

/// What was read from the files.
#[derive(Debug)]
struct Served {
    config: Arc<ServerConfig>,
    validity: Option<Validity>,
}

/// TLS of a listener.
#[derive(Debug)]
pub struct ServerTls {
    files: ServerFiles,
    served: ArcSwap<Served>,
}

impl ServerTls {
    /// Reads the files.
    ///
    /// # Errors
    /// When one cannot be used.
    pub fn load(files: ServerFiles) -> Result<Arc<Self>, TlsError> {
        let served = ArcSwap::from_pointee(files.load()?);
        Ok(Arc::new(Self { files, served }))
    }

    /// What accepts the next connection.
    pub(crate) fn acceptor(&self) -> TlsAcceptor {
        TlsAcceptor::from(Arc::clone(&self.served.load().config))
    }

    /// Follows the files for ever.
    pub async fn follow(self: Arc<Self>) {
        let files = self.files.clone();
        let load = move || files.load();
        follow(self.files.all(), &self.files.certificate, load, |served| self.served.store(Arc::new(served))).await;
    }

    /// From when to when the certificate is valid.
    pub fn validity(&self) -> Option<Validity> {
        self.served.load().validity
    }
}

/// The files for connections to workers.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ClientFiles {
    /// Roots besides those of the system; PEM.
    pub roots: Vec<PathBuf>,
    /// Certificate and key to present; PEM.
    pub identity: Option<(PathBuf, PathBuf)>,
}

impl ClientFiles {
    /// Reads the files.
    ///
    /// # Errors
    /// When one cannot be used.
    pub fn load(&self) -> Result<ClientConfig, TlsError> {
        let mut roots = RootCertStore::empty();
        // A system without roots is no error: workers may have none of their certificates from there.
        roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
        self.roots.iter().try_for_each(|path| add_roots(&mut roots, path))?;
        let builder = ClientConfig::builder_with_provider(provider()).with_safe_default_protocol_versions();
        let versions = |error: rustls::Error| TlsError::Unusable { path: PathBuf::new(), reason: error.to_string() };
        let builder = builder.map_err(versions)?.with_root_certificates(roots);
        let Some((certificate, key)) = &self.identity else { return Ok(builder.with_no_client_auth()) };
        let config = builder.with_client_auth_cert(certificates(certificate)?, private_key(key)?);
        config.map_err(|error| TlsError::Unusable { path: key.clone(), reason: error.to_string() })
    }
}

/// Connects to workers: plain for `http://`, with TLS for `https://`.
pub type WorkerConnector = HttpsConnector<HttpConnector>;

/// A connector that trusts what `config` says. Without one, no `https://` worker is trusted.
pub fn worker_connector(mut http: HttpConnector, config: Option<&ClientConfig>) -> WorkerConnector {
    http.enforce_http(false);
    let untrusting = || ClientConfig::builder().with_root_certificates(RootCertStore::empty()).with_no_client_auth();
    let config = config.cloned().unwrap_or_else(untrusting);
    HttpsConnectorBuilder::new().with_tls_config(config).https_or_http().enable_http1().wrap_connector(http)
}
