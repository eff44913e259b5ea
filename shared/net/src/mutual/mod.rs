//! TLS between the parts of a fleet: both sides show a certificate, and what it says decides what they may do.
//!
//! * [`identity`]: what a certificate says about its holder, and what a caller may open with it;
//! * [`connect`]: connections to members of the control plane;
//! * [`guard`]: services for one kind of part;
//! * [`validity`]: how long a certificate lasts;
//! * [`explain`]: what went wrong, in words.
//!
//! Invariants
//! * a certificate opens something only if it leads to a root in the files, is valid now, and names this cluster; TLS 1.3 only, and no session
//!   is resumed, so each connection is judged anew;
//! * new connections use what is in the files; those that exist keep what they were made with;
//! * files that cannot be used change nothing but the log.

pub mod connect;
pub mod explain;
pub mod guard;
pub mod identity;
mod plain;
mod seldom;
pub mod validity;

use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use arc_swap::ArcSwap;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::{NoServerSessionStorage, WebPkiClientVerifier};
use rustls::version::TLS13;
use rustls::{ClientConfig, RootCertStore, ServerConfig};
use tokio::net::TcpStream;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

use crate::tls::{TlsError, add_roots, certificates, follow, private_key, provider};
use connect::MemberVerifier;
use identity::{Caller, Identity, Part};
use plain::Begins;
use seldom::Seldom;
use validity::Validity;

/// The files of a part. Their usual names are those of a secret of Kubernetes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Files {
    /// Roots of the fleet's certificates; PEM.
    pub roots: PathBuf,
    /// This part's certificate, followed by those that lead to a root; PEM.
    pub certificate: PathBuf,
    /// The key of the certificate; PEM.
    pub key: PathBuf,
}

impl Files {
    /// Name of the roots in a directory.
    pub const ROOTS: &str = "ca.crt";
    /// Name of the certificate in a directory.
    pub const CERTIFICATE: &str = "tls.crt";
    /// Name of its key in a directory.
    pub const KEY: &str = "tls.key";

    /// The files of a directory.
    pub fn within(directory: &Path) -> Self {
        Self {
            roots: directory.join(Self::ROOTS),
            certificate: directory.join(Self::CERTIFICATE),
            key: directory.join(Self::KEY),
        }
    }

    fn all(&self) -> Vec<PathBuf> {
        vec![self.roots.clone(), self.certificate.clone(), self.key.clone()]
    }

    fn load(&self, part: Part) -> Result<Loaded, TlsError> {
        let unusable = |path: &Path, reason: &dyn std::fmt::Display| TlsError::Unusable {
            path: path.to_owned(),
            reason: reason.to_string(),
        };
        let (chain, key) = (certificates(&self.certificate)?, private_key(&self.key)?);
        let leaf = chain.first().ok_or_else(|| unusable(&self.certificate, &"the file holds no certificate"))?;
        let identity = Identity::of(leaf).map_err(|error| unusable(&self.certificate, &error))?;
        if identity.part != part {
            let reason =
                format!("{identity} has the role {}, and this process needs one with the role {part}", identity.part);
            return Err(unusable(&self.certificate, &reason));
        }
        let validity = Validity::of(leaf).ok_or_else(|| unusable(&self.certificate, &"its time cannot be read"))?;
        let authorities = certificates(&self.roots)?.iter().filter_map(|root| Validity::of(root)).collect();
        let mut roots = RootCertStore::empty();
        add_roots(&mut roots, &self.roots)?;
        let key_fault = |error: rustls::Error| unusable(&self.key, &error);
        let server = |callers: Callers| {
            let builder = WebPkiClientVerifier::builder_with_provider(Arc::new(roots.clone()), provider());
            let builder = match callers {
                Callers::Certified => builder,
                Callers::Anybody => builder.allow_unauthenticated(),
            };
            let verifier = builder.build().map_err(|error| unusable(&self.roots, &error))?;
            let config = ServerConfig::builder_with_provider(provider()).with_protocol_versions(&[&TLS13]);
            let config =
                config.map_err(|error| unusable(&self.certificate, &error))?.with_client_cert_verifier(verifier);
            let mut config = config.with_single_cert(chain.clone(), key.clone_key()).map_err(key_fault)?;
            config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
            // A resumed session would be served without a look at the certificate.
            config.session_storage = Arc::new(NoServerSessionStorage {});
            config.send_tls13_tickets = 0;
            Ok::<_, TlsError>(Arc::new(config))
        };
        let (certified, anybody) = (server(Callers::Certified)?, server(Callers::Anybody)?);
        let mut client = client(&roots, Some(identity.cluster.clone()), Some((chain.clone(), key.clone_key())))
            .map_err(key_fault)?;
        client.alpn_protocols = vec![b"h2".to_vec()];
        Ok(Loaded { identity: Arc::new(identity), validity, authorities, certified, anybody, client: Arc::new(client) })
    }
}

/// TLS towards members of the control plane.
fn client(
    roots: &RootCertStore,
    cluster: Option<String>,
    identity: Option<(Vec<CertificateDer<'static>>, PrivateKeyDer<'static>)>,
) -> Result<ClientConfig, rustls::Error> {
    let provider = provider();
    let verifier =
        MemberVerifier { roots: roots.clone(), cluster, algorithms: provider.signature_verification_algorithms };
    let builder = ClientConfig::builder_with_provider(provider).with_protocol_versions(&[&TLS13])?;
    let builder = builder.dangerous().with_custom_certificate_verifier(Arc::new(verifier));
    let mut config = match identity {
        Some((chain, key)) => builder.with_client_auth_cert(chain, key)?,
        None => builder.with_no_client_auth(),
    };
    config.resumption = rustls::client::Resumption::disabled();
    Ok(config)
}

/// Without a cluster of its own, who verifies goes by the one that the certificate names: the roots vouch for it.
fn cluster_or_any(cluster: Option<&str>, certificate: &CertificateDer<'_>) -> String {
    match cluster {
        Some(cluster) => cluster.to_owned(),
        None => Identity::of(certificate).map(|identity| identity.cluster).unwrap_or_default(),
    }
}

/// What an operator trusts (the roots in `roots`) and presents (certificate and key, if any). Speaks HTTP/1.1.
///
/// # Errors
/// When a file cannot be used.
pub fn operator(roots: &Path, identity: Option<(&Path, &Path)>) -> Result<Arc<ClientConfig>, TlsError> {
    let mut trusted = RootCertStore::empty();
    add_roots(&mut trusted, roots)?;
    let (presented, at, cluster) = match identity {
        None => (None, roots, None),
        Some((certificate, key)) => {
            let chain = certificates(certificate)?;
            let named = chain.first().map(Identity::of).transpose();
            let unusable = |error: identity::Nameless| TlsError::Unusable {
                path: certificate.to_owned(),
                reason: error.to_string(),
            };
            let cluster = named.map_err(unusable)?.map(|identity| identity.cluster);
            (Some((chain, private_key(key)?)), key, cluster)
        }
    };
    let config = client(&trusted, cluster, presented);
    config.map(Arc::new).map_err(|error| TlsError::Unusable { path: at.to_owned(), reason: error.to_string() })
}

/// Whom a listener lets in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Callers {
    /// Those with a certificate of the fleet.
    Certified,
    /// Those without one too, who must say by other means who they are. A certificate that is shown must be good.
    Anybody,
}

/// What was read from the files.
struct Loaded {
    identity: Arc<Identity>,
    validity: Validity,
    authorities: Vec<Validity>,
    certified: Arc<ServerConfig>,
    anybody: Arc<ServerConfig>,
    client: Arc<ClientConfig>,
}

/// A part's certificate, and the roots it trusts; as they are in its files.
pub struct MutualTls {
    files: Files,
    part: Part,
    loaded: ArcSwap<Loaded>,
    refusals: Seldom,
}

impl std::fmt::Debug for MutualTls {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("MutualTls").field("files", &self.files).field("part", &self.part).finish_non_exhaustive()
    }
}

impl MutualTls {
    /// Reads the files of a part.
    ///
    /// # Errors
    /// When one cannot be used, or the certificate is another part's.
    pub fn load(files: Files, part: Part) -> Result<Arc<Self>, TlsError> {
        let loaded = ArcSwap::from_pointee(files.load(part)?);
        Ok(Arc::new(Self { files, part, loaded, refusals: Seldom::default() }))
    }

    /// Follows the files for ever.
    pub async fn follow(self: Arc<Self>) {
        let (files, part) = (self.files.clone(), self.part);
        let load = move || files.load(part);
        let show = self.files.certificate.clone();
        follow(self.files.all(), &show, load, |loaded| self.loaded.store(Arc::new(loaded))).await;
    }

    /// Who this part is.
    pub fn identity(&self) -> Arc<Identity> {
        Arc::clone(&self.loaded.load().identity)
    }

    /// From when to when its certificate is valid.
    pub fn validity(&self) -> Validity {
        self.loaded.load().validity
    }

    /// The time of the root that ends last: when it does, no certificate of the fleet counts any more.
    pub fn authority_validity(&self) -> Option<Validity> {
        self.loaded.load().authorities.iter().max_by_key(|validity| validity.not_after).copied()
    }

    /// What the next connection to a member uses.
    fn client(&self) -> Arc<ClientConfig> {
        Arc::clone(&self.loaded.load().client)
    }

    /// Agrees on TLS with a caller. Whoever cannot be served is told why as far as that is possible, and so is the log, now and then.
    pub(crate) async fn accept(
        &self,
        stream: TcpStream,
        from: SocketAddr,
        callers: Callers,
    ) -> Option<(TlsStream<TcpStream>, Caller)> {
        let loaded = self.loaded.load_full();
        let config = match callers {
            Callers::Certified => &loaded.certified,
            Callers::Anybody => &loaded.anybody,
        };
        match plain::begins(&stream).await {
            Ok(Begins::Tls) => {}
            Ok(Begins::Plain) => {
                self.refuse(from, "the caller does not speak TLS: is it run with --insecure?");
                plain::refuse(stream).await;
                return None;
            }
            // Nobody has said anything: a port check, or a connection that was given up.
            Err(_) => return None,
        }
        match TlsAcceptor::from(Arc::clone(config)).accept(stream).into_fallible().await {
            Ok(stream) => {
                let certificate = stream.get_ref().1.peer_certificates().and_then(<[_]>::first);
                let caller = Caller::of(certificate, &loaded.identity.cluster);
                Some((stream, caller))
            }
            Err((error, stream)) => {
                self.refuse(from, &explain::explain(&error));
                if error.kind() == io::ErrorKind::InvalidData {
                    plain::hang_up(stream).await;
                }
                None
            }
        }
    }

    fn refuse(&self, from: SocketAddr, reason: &str) {
        if let Some(unsaid) = self.refusals.may_speak() {
            tracing::warn!(target: "smg", %from, reason, unsaid, "no TLS connection with a caller");
        }
    }
}
