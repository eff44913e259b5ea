//! `smg cluster ca`: a certificate authority in a directory, for fleets that have no other one.
//!
//! The authority is two files, `ca.crt` and `ca.key`; whoever has the key can be any part of the fleet. Each certificate gets a directory of its
//! own with the three files that a part reads, to be copied to where the part runs. Issuing again renews: new key, same place. Files are
//! readable by their owner only, and each one is replaced whole.

use std::fs::{self, OpenOptions, Permissions};
use std::io::{self, Write};
use std::net::IpAddr;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rcgen::string::Ia5String;
use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose, PublicKeyData, SanType,
};
use smg_net::mutual::Files;
use smg_net::mutual::identity::{Identity, Part, authority_uri, cluster_of};
use smg_net::tls::first_certificate;
use thiserror::Error;

use crate::cli::CaVerb;

/// Name of the authority's key in its directory.
const KEY: &str = "ca.key";
/// Clocks of hosts may differ by so much.
const SKEW: Duration = Duration::from_secs(3600);

/// Why there is no certificate.
#[derive(Debug, Error)]
pub enum AuthorityError {
    /// There is an authority already.
    #[error("{0} exists: this directory has an authority already")]
    Exists(PathBuf),
    /// A file cannot be read or written.
    #[error("{path}: {error}")]
    File {
        /// Which.
        path: PathBuf,
        /// Why.
        error: io::Error,
    },
    /// The files are no authority.
    #[error("{path}: {reason}")]
    Unusable {
        /// The file that says so.
        path: PathBuf,
        /// Why.
        reason: String,
    },
}

fn unusable(path: &Path, reason: impl std::fmt::Display) -> AuthorityError {
    AuthorityError::Unusable { path: path.to_owned(), reason: reason.to_string() }
}

/// Does what the command line says. Returns the directory or file that was written.
///
/// # Errors
/// When files are missing, unusable, or there already.
pub fn run(verb: &CaVerb) -> Result<PathBuf, AuthorityError> {
    match verb {
        CaVerb::Init { directory, cluster_name, days } => init(directory, cluster_name, *days),
        CaVerb::Issue { directory, role, name, host, days } => issue(directory, *role, name, host, *days),
    }
}

/// What the authority of a cluster says about itself. The same at each call: it is how certificates name their issuer.
fn authority(cluster: &str) -> Result<CertificateParams, rcgen::Error> {
    let mut params = CertificateParams::new(Vec::new())?;
    params.distinguished_name = called(format!("smg {cluster} authority"));
    params.subject_alt_names = vec![SanType::URI(Ia5String::try_from(authority_uri(cluster))?)];
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    Ok(params)
}

fn called(name: String) -> DistinguishedName {
    let mut called = DistinguishedName::new();
    called.push(DnType::CommonName, name);
    called
}

fn last(params: &mut CertificateParams, days: u32) {
    let now = rcgen::date_time_ymd(1970, 1, 1) + Duration::from_millis(smg_net::unix_millis());
    params.not_before = now - SKEW;
    params.not_after = now + Duration::from_secs(u64::from(days) * 86_400);
}

fn init(directory: &Path, cluster: &str, days: u32) -> Result<PathBuf, AuthorityError> {
    let (certificate, key_file) = (directory.join(Files::ROOTS), directory.join(KEY));
    if let Some(taken) = [&key_file, &certificate].into_iter().find(|path| path.exists()) {
        return Err(AuthorityError::Exists(taken.clone()));
    }
    let made = || {
        let key = KeyPair::generate()?;
        let mut params = authority(cluster)?;
        last(&mut params, days);
        Ok::<_, rcgen::Error>((params.self_signed(&key)?.pem(), key.serialize_pem()))
    };
    let (pem, key) = made().map_err(|error| unusable(directory, error))?;
    private_directory(directory)?;
    write(&key_file, &key)?;
    write(&certificate, &pem)?;
    Ok(directory.to_owned())
}

fn issue(directory: &Path, part: Part, name: &str, hosts: &[String], days: u32) -> Result<PathBuf, AuthorityError> {
    let (roots, key_file) = (directory.join(Files::ROOTS), directory.join(KEY));
    let (trusted, key) = (read(&roots)?, read(&key_file)?);
    // Only the error's kind: its text could quote the file.
    let key = KeyPair::from_pem(&key).map_err(|_| unusable(&key_file, "not the key of an authority, in PEM form"))?;
    // Further ones are of authorities that the parts trust too, such as the one that this one replaces.
    let first = first_certificate(&roots).map_err(|error| unusable(&roots, error))?;
    let cluster = cluster_of(&first).map_err(|error| unusable(&roots, error))?;
    let public = key.subject_public_key_info();
    if !first.windows(public.len()).any(|part| part == public) {
        return Err(unusable(&key_file, "not the key of the first certificate in ca.crt"));
    }
    let identity = Identity { cluster: cluster.clone(), part, name: name.to_owned() };
    let made = || {
        let issuer = Issuer::new(authority(&cluster)?, key);
        let key = KeyPair::generate()?;
        let mut params = CertificateParams::new(Vec::new())?;
        params.distinguished_name = called(format!("{part} {name}"));
        params.subject_alt_names = names(&identity, hosts)?;
        params.is_ca = IsCa::ExplicitNoCa;
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = match part {
            // A member answers others and calls them.
            Part::ControlPlane => vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth],
            Part::Gateway | Part::Admin => vec![ExtendedKeyUsagePurpose::ClientAuth],
        };
        params.use_authority_key_identifier_extension = true;
        last(&mut params, days);
        Ok::<_, rcgen::Error>((params.signed_by(&key, &issuer)?.pem(), key.serialize_pem()))
    };
    let (pem, key) = made().map_err(|error| unusable(directory, error))?;
    let issued = directory.join(format!("{part}-{name}"));
    private_directory(&issued)?;
    let files = Files::within(&issued);
    write(&files.roots, &trusted)?;
    write(&files.key, &key)?;
    write(&files.certificate, &pem)?;
    Ok(issued)
}

/// The identity, and for members the hosts under which tools that look at host names find them: between parts they mean nothing.
fn names(identity: &Identity, hosts: &[String]) -> Result<Vec<SanType>, rcgen::Error> {
    let mut names = vec![SanType::URI(Ia5String::try_from(identity.to_string())?)];
    let local: &[&str] = if identity.part == Part::ControlPlane { &["localhost", "127.0.0.1", "::1"] } else { &[] };
    for host in hosts.iter().map(String::as_str).chain(local.iter().copied()) {
        names.push(match host.parse::<IpAddr>() {
            Ok(address) => SanType::IpAddress(address),
            Err(_) => SanType::DnsName(Ia5String::try_from(host)?),
        });
    }
    Ok(names)
}

fn file_error(path: &Path) -> impl FnOnce(io::Error) -> AuthorityError {
    let path = path.to_owned();
    move |error| AuthorityError::File { path, error }
}

fn read(path: &Path) -> Result<String, AuthorityError> {
    fs::read_to_string(path).map_err(file_error(path))
}

fn private_directory(path: &Path) -> Result<(), AuthorityError> {
    fs::DirBuilder::new().recursive(true).mode(0o700).create(path).map_err(file_error(path))
}

/// Writes a file that its owner alone can read, whole or not at all.
fn write(path: &Path, text: &str) -> Result<(), AuthorityError> {
    let beside = path.with_extension("new");
    let written = || {
        let mut file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&beside)?;
        // It may have been there, with other rights.
        file.set_permissions(Permissions::from_mode(0o600))?;
        file.write_all(text.as_bytes())?;
        file.sync_all()?;
        fs::rename(&beside, path)
    };
    written().map_err(file_error(path))
}
