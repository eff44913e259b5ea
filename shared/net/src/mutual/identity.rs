//! What a certificate says about its holder.
//!
//! An identity is a SPIFFE ID in the certificate's URI name, `spiffe://<cluster>/<part>/<name>`, so that any authority that issues such names
//! can serve a fleet. The part decides what the holder may open; the name is for people. Host names in a certificate mean nothing between
//! parts: members are found by addresses that change, and what counts is what they are.

use std::fmt;
use std::sync::Arc;

use rustls::pki_types::CertificateDer;
use thiserror::Error;

/// Longest name of a cluster or of a part, in bytes.
const MAX_NAME_BYTES: usize = 128;
const SCHEME: &str = "spiffe://";

/// What a part of the fleet is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part {
    /// A member of the control plane: it talks to the other members, and serves gateways and operators.
    ControlPlane,
    /// A gateway: it follows the control plane.
    Gateway,
    /// An operator, who may do what an admin's token allows.
    Admin,
}

impl Part {
    /// Every part.
    pub const ALL: [Part; 3] = [Self::ControlPlane, Self::Gateway, Self::Admin];

    /// Its name in identities and flags.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::ControlPlane => "controlplane",
            Self::Gateway => "gateway",
            Self::Admin => "admin",
        }
    }

    /// The part of this name.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|part| part.as_str() == name)
    }
}

impl fmt::Display for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// Who holds a certificate.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Identity {
    /// The cluster; identities of another one count for nothing.
    pub cluster: String,
    /// What the holder is.
    pub part: Part,
    /// What people call it.
    pub name: String,
}

impl fmt::Display for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{SCHEME}{}/{}/{}", self.cluster, self.part, self.name)
    }
}

/// A certificate says nothing that counts.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum Nameless {
    /// It is none.
    #[error("the certificate cannot be read: {0}")]
    Unreadable(String),
    /// It has no identity, or several.
    #[error(
        "the certificate must have exactly one URI name spiffe://<cluster>/<part>/<name>, with the part controlplane, \
         gateway or admin; it has {0}"
    )]
    Names(String),
}

/// Whether a text can be the name of a part.
pub fn is_name(text: &str) -> bool {
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || b".-_".contains(&byte);
    (1..=MAX_NAME_BYTES).contains(&text.len()) && text.bytes().all(allowed) && !matches!(text, "." | "..")
}

/// Whether a text can be the name of a cluster: as [`is_name`], in lower case.
pub fn is_cluster_name(text: &str) -> bool {
    is_name(text) && !text.bytes().any(|byte| byte.is_ascii_uppercase())
}

impl Identity {
    /// Reads an identity.
    pub fn parse(uri: &str) -> Option<Self> {
        let mut words = uri.strip_prefix(SCHEME)?.split('/');
        let (cluster, part, name) = (words.next()?, Part::from_name(words.next()?)?, words.next()?);
        let sound = words.next().is_none() && is_cluster_name(cluster) && is_name(name);
        sound.then(|| Self { cluster: cluster.to_owned(), part, name: name.to_owned() })
    }

    /// The identity in a certificate, whoever signed it.
    ///
    /// # Errors
    /// When there is none, or more than one.
    pub fn of(certificate: &CertificateDer<'_>) -> Result<Self, Nameless> {
        let names = uri_names(certificate)?;
        match names.as_slice() {
            [one] => Self::parse(one).ok_or_else(|| Nameless::Names(one.clone())),
            [] => Err(Nameless::Names("none".to_owned())),
            several => Err(Nameless::Names(several.join(" "))),
        }
    }
}

fn uri_names(certificate: &CertificateDer<'_>) -> Result<Vec<String>, Nameless> {
    let parsed = webpki::EndEntityCert::try_from(certificate);
    let parsed = parsed.map_err(|error| Nameless::Unreadable(error.to_string()))?;
    Ok(parsed.valid_uri_names().map(str::to_owned).collect())
}

/// The cluster that an authority serves, as its own certificate says: `spiffe://<cluster>`.
///
/// # Errors
/// When it names none.
pub fn cluster_of(authority: &CertificateDer<'_>) -> Result<String, Nameless> {
    let names = uri_names(authority)?;
    let cluster = names.iter().find_map(|name| name.strip_prefix(SCHEME)).filter(|cluster| is_cluster_name(cluster));
    cluster.map(str::to_owned).ok_or_else(|| Nameless::Names("no cluster".to_owned()))
}

/// The URI name of an authority of a cluster.
pub fn authority_uri(cluster: &str) -> String {
    format!("{SCHEME}{cluster}")
}

/// Who is at the other end of a connection over TLS between parts. Every request over such a connection has it among its extensions;
/// requests without it came from inside the process, or over a listener without TLS, where nobody can be told from anybody.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Caller {
    /// Somebody without a certificate.
    Anonymous,
    /// Somebody with a certificate that says nothing about this cluster.
    Stranger(Arc<str>),
    /// A part of this cluster.
    Part(Arc<Identity>),
}

/// A caller is not what it must be.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum NotAllowed {
    /// It showed nothing.
    #[error("this needs a certificate with the role {0}, and none was presented")]
    Anonymous(Part),
    /// It showed something that does not count.
    #[error("this needs a certificate with the role {0} in this cluster: {1}")]
    Stranger(Part, Arc<str>),
    /// It is another part.
    #[error("this needs a certificate with the role {0}, and the caller is {1}")]
    Other(Part, Arc<Identity>),
}

impl Caller {
    /// Judges a certificate that leads to a trusted root.
    pub(crate) fn of(certificate: Option<&CertificateDer<'_>>, cluster: &str) -> Self {
        let Some(certificate) = certificate else { return Self::Anonymous };
        match Identity::of(certificate) {
            Ok(identity) if identity.cluster == cluster => Self::Part(Arc::new(identity)),
            Ok(identity) => Self::Stranger(format!("{identity} belongs to another one").into()),
            Err(nameless) => Self::Stranger(nameless.to_string().into()),
        }
    }

    /// The caller, if it is a part of this kind.
    ///
    /// # Errors
    /// When it is anything else.
    pub fn must_be(&self, part: Part) -> Result<&Identity, NotAllowed> {
        match self {
            Self::Part(identity) if identity.part == part => Ok(identity),
            Self::Part(identity) => Err(NotAllowed::Other(part, Arc::clone(identity))),
            Self::Stranger(reason) => Err(NotAllowed::Stranger(part, Arc::clone(reason))),
            Self::Anonymous => Err(NotAllowed::Anonymous(part)),
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn an_identity_is_written_as_it_is_read() {
        for text in ["spiffe://prod/controlplane/cp-1", "spiffe://a.b/gateway/G_1", "spiffe://prod/admin/alice"] {
            assert_eq!(Identity::parse(text).unwrap().to_string(), text);
        }
    }

    #[test]
    fn what_is_no_identity_is_none() {
        for text in [
            "",
            "prod/admin/alice",
            "https://prod/admin/alice",
            "spiffe://prod/admin",
            "spiffe://prod/admin/",
            "spiffe:///admin/alice",
            "spiffe://Prod/admin/alice",
            "spiffe://prod/root/alice",
            "spiffe://prod/admin/alice/",
            "spiffe://prod/admin/..",
            "spiffe://prod/admin/a b",
            "spiffe://prod/admin/alice?x",
            "spiffe://u@prod/admin/alice",
        ] {
            assert_eq!(Identity::parse(text), None, "{text}");
        }
    }

    #[test]
    fn a_caller_passes_as_what_it_is_and_as_nothing_else() {
        let gateway = Caller::Part(Arc::new(Identity::parse("spiffe://prod/gateway/g").unwrap()));
        assert!(gateway.must_be(Part::Gateway).is_ok());
        for part in [Part::ControlPlane, Part::Admin] {
            assert!(matches!(gateway.must_be(part), Err(NotAllowed::Other(..))));
        }
        assert_eq!(Caller::Anonymous.must_be(Part::Gateway), Err(NotAllowed::Anonymous(Part::Gateway)));
        assert!(matches!(Caller::Stranger("".into()).must_be(Part::Admin), Err(NotAllowed::Stranger(..))));
    }
}
