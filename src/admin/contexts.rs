//! The configuration file of operators: names for fleets, and how to reach them.
//!
//! `~/.config/smg/config` (or `$XDG_CONFIG_HOME/smg/config`, or `$SMG_CONFIG`) is one JSON object, `{"current": "prod", "contexts": {"prod":
//! {"server": ["cp-1:7400"], "ca", "cert", "key", "token", "token_file"}}}`. It may hold tokens, so it is written whole, readable by its owner
//! only, and not used when others can read it.
//!
//! A context gives what the command line and the environment leave open. Where servers are named there, no context is looked at unless it
//! is named too: the credentials of one fleet are not shown to another.

use std::collections::BTreeMap;
use std::fs::{self, DirBuilder, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize, Serializer};
use smg_fleet::Secret;
use thiserror::Error;

use crate::cli::{ContextVerb, OperatorTls, TargetArgs};

/// Who is asked when nothing says otherwise.
const DEFAULT_SERVER: &str = "127.0.0.1:7400";

/// Why the configuration file cannot be used.
#[derive(Debug, Error)]
pub enum ContextError {
    /// Nothing says where it is.
    #[error("there is no place for a configuration file: set HOME, XDG_CONFIG_HOME or SMG_CONFIG")]
    Nowhere,
    /// It cannot be read or written.
    #[error("{path}: {error}")]
    File {
        /// The file.
        path: PathBuf,
        /// Why.
        error: io::Error,
    },
    /// It is not what it should be.
    #[error("{path}: {reason}")]
    Unusable {
        /// The file.
        path: PathBuf,
        /// Why.
        reason: String,
    },
    /// It has no such entry.
    #[error("{path} has no context '{name}'")]
    Unknown {
        /// The file.
        path: PathBuf,
        /// The name.
        name: String,
    },
    /// The entry would be of no use.
    #[error("name the servers of the context with --controlplane")]
    NoServer,
}

/// One fleet, and how to reach it.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Context {
    /// Members or gateways.
    pub server: Vec<String>,
    /// Roots of their certificates.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ca: Option<PathBuf>,
    /// Certificate to present.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cert: Option<PathBuf>,
    /// Its key.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<PathBuf>,
    /// A token.
    #[serde(default, skip_serializing_if = "Option::is_none", serialize_with = "reveal")]
    token: Option<Secret>,
    /// A file with a token.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub token_file: Option<PathBuf>,
}

/// The file.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Configuration {
    /// The entry in use.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub current: Option<String>,
    /// The entries.
    #[serde(default)]
    pub contexts: BTreeMap<String, Context>,
}

/// Writes a token in full: the file is where it belongs.
fn reveal<S: Serializer>(secret: &Option<Secret>, serializer: S) -> Result<S::Ok, S::Error> {
    secret.as_deref().serialize(serializer)
}

impl Context {
    /// The entry that flags and environment describe.
    fn of(target: &TargetArgs) -> Result<Self, ContextError> {
        if target.controlplane.is_empty() {
            return Err(ContextError::NoServer);
        }
        // Commands run in other directories find the same files.
        let whole = |path: &PathBuf| std::path::absolute(path).unwrap_or_else(|_| path.clone());
        let identity = target.tls.as_ref().and_then(|tls| tls.identity.as_ref());
        Ok(Self {
            server: target.controlplane.clone(),
            ca: target.tls.as_ref().map(|tls| whole(&tls.roots)),
            cert: identity.map(|(certificate, _)| whole(certificate)),
            key: identity.map(|(_, key)| whole(key)),
            token: target.token.as_ref().map(|token| Secret::from(token.trim())),
            token_file: target.token_file.as_ref().map(whole),
        })
    }

    /// How it says who is asking: `token`, `token-file`, `certificate`, or nothing.
    pub fn credentials(&self) -> Option<&'static str> {
        match (&self.token, &self.token_file, &self.cert) {
            (Some(_), ..) => Some("token"),
            (None, Some(_), _) => Some("token-file"),
            (None, None, Some(_)) => Some("certificate"),
            (None, None, None) => None,
        }
    }
}

/// The target with what it leaves open taken from the context.
///
/// # Errors
/// When the file cannot be used, or has no such context.
pub fn complete(target: &TargetArgs) -> Result<TargetArgs, ContextError> {
    let mut target = target.clone();
    let context = match (&target.context, target.controlplane.is_empty()) {
        (None, false) => None,
        (Some(name), _) => {
            let path = target.configuration.as_deref().ok_or(ContextError::Nowhere)?;
            let unknown = || ContextError::Unknown { path: path.to_owned(), name: name.clone() };
            Some(read(path)?.contexts.remove(name).ok_or_else(unknown)?)
        }
        (None, true) => match &target.configuration {
            None => None,
            Some(path) => {
                let mut configuration = read(path)?;
                match configuration.current {
                    None => None,
                    Some(name) => {
                        let unknown = ContextError::Unknown { path: path.clone(), name: name.clone() };
                        Some(configuration.contexts.remove(&name).ok_or(unknown)?)
                    }
                }
            }
        },
    };
    if let Some(context) = context {
        if target.controlplane.is_empty() {
            target.controlplane = context.server;
        }
        if target.tls.is_none()
            && let Some(roots) = context.ca
        {
            target.tls = Some(OperatorTls { roots, identity: context.cert.zip(context.key) });
        }
        if target.token.is_none() && target.token_file.is_none() {
            target.token = context.token;
            target.token_file = context.token_file;
        }
    }
    if target.controlplane.is_empty() {
        target.controlplane = vec![DEFAULT_SERVER.to_owned()];
    }
    Ok(target)
}

/// Does what `smg context` says. Returns the file as it is afterwards.
///
/// # Errors
/// When the file cannot be used, or has no such entry.
pub fn run(verb: &ContextVerb, target: &TargetArgs) -> Result<Configuration, ContextError> {
    let path = target.configuration.as_deref().ok_or(ContextError::Nowhere)?;
    let mut configuration = read(path)?;
    let unknown = |name: &str| ContextError::Unknown { path: path.to_owned(), name: name.to_owned() };
    match verb {
        ContextVerb::List => return Ok(configuration),
        ContextVerb::Use { name } => {
            if !configuration.contexts.contains_key(name) {
                return Err(unknown(name));
            }
            configuration.current = Some(name.clone());
        }
        ContextVerb::Set { name } => {
            configuration.contexts.insert(name.clone(), Context::of(target)?);
            configuration.current.get_or_insert_with(|| name.clone());
        }
        ContextVerb::Delete { name } => {
            configuration.contexts.remove(name).ok_or_else(|| unknown(name))?;
            configuration.current = configuration.current.filter(|current| current != name);
        }
    }
    write(path, &configuration)?;
    Ok(configuration)
}

fn file_error(path: &Path) -> impl Fn(io::Error) -> ContextError {
    let path = path.to_owned();
    move |error| ContextError::File { path: path.clone(), error }
}

/// The file; an absent one is empty.
fn read(path: &Path) -> Result<Configuration, ContextError> {
    let unusable = |reason: String| ContextError::Unusable { path: path.to_owned(), reason };
    let metadata = match fs::metadata(path) {
        Ok(metadata) => metadata,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Configuration::default()),
        Err(error) => return Err(file_error(path)(error)),
    };
    if metadata.mode() & 0o077 != 0 {
        return Err(unusable("others can read or change it, and it may hold tokens: chmod 600".to_owned()));
    }
    let text = fs::read(path).map_err(file_error(path))?;
    // Only the place of an error: its text could quote a token.
    serde_json::from_slice(&text)
        .map_err(|error| unusable(format!("not understood at line {} column {}", error.line(), error.column())))
}

fn write(path: &Path, configuration: &Configuration) -> Result<(), ContextError> {
    let beside = path.with_extension("new");
    let written = || {
        if let Some(directory) = path.parent() {
            DirBuilder::new().recursive(true).mode(0o700).create(directory)?;
        }
        let _ = fs::remove_file(&beside);
        let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&beside)?;
        file.write_all(format!("{:#}\n", serde_json::to_value(configuration)?).as_bytes())?;
        file.sync_all()?;
        fs::rename(&beside, path)
    };
    written().map_err(file_error(path))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn at(path: &Path) -> TargetArgs {
        TargetArgs { configuration: Some(path.to_owned()), ..TargetArgs::default() }
    }

    fn set(path: &Path, name: &str, server: &str, token: &str) {
        let target = TargetArgs { controlplane: vec![server.to_owned()], token: Some(Secret::from(token)), ..at(path) };
        run(&ContextVerb::Set { name: name.to_owned() }, &target).unwrap();
    }

    #[test]
    fn a_context_gives_what_the_command_line_leaves_open() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("smg/config");
        assert_eq!(complete(&at(&path)).unwrap().controlplane, [DEFAULT_SERVER]);
        set(&path, "prod", "cp:7400", "hush");
        set(&path, "test", "other:7400", "sst");
        let current = complete(&at(&path)).unwrap();
        assert_eq!((current.controlplane, current.token), (vec!["cp:7400".to_owned()], Some(Secret::from("hush"))));
        let named = complete(&TargetArgs { context: Some("test".into()), ..at(&path) }).unwrap();
        assert_eq!(named.controlplane, ["other:7400"]);
        let elsewhere = complete(&TargetArgs { controlplane: vec!["x:1".into()], ..at(&path) }).unwrap();
        assert_eq!((elsewhere.controlplane, elsewhere.token), (vec!["x:1".to_owned()], None), "no token for strangers");
        let mine = TargetArgs { token: Some(Secret::from("mine")), ..at(&path) };
        assert_eq!(complete(&mine).unwrap().token, Some(Secret::from("mine")));
        run(&ContextVerb::Use { name: "test".into() }, &at(&path)).unwrap();
        assert_eq!(complete(&at(&path)).unwrap().controlplane, ["other:7400"]);
        run(&ContextVerb::Delete { name: "test".into() }, &at(&path)).unwrap();
        assert_eq!(complete(&at(&path)).unwrap().controlplane, [DEFAULT_SERVER]);
        let unknown = complete(&TargetArgs { context: Some("test".into()), ..at(&path) });
        assert!(matches!(unknown, Err(ContextError::Unknown { .. })));
        assert!(matches!(run(&ContextVerb::Set { name: "x".into() }, &at(&path)), Err(ContextError::NoServer)));
    }

    #[test]
    fn the_file_is_its_owners_alone_and_is_not_used_otherwise() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("config");
        set(&path, "prod", "cp:7400", "hush");
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
        fs::set_permissions(&path, fs::Permissions::from_mode(0o640)).unwrap();
        let open = complete(&at(&path)).unwrap_err().to_string();
        assert!(open.contains("chmod 600"), "{open}");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
        fs::write(&path, "{\"contexts\": {\"a\": {\"token\": \"hush\", \"x\": 1}}}").unwrap();
        let broken = complete(&at(&path)).unwrap_err().to_string();
        assert!(!broken.contains("hush") && broken.contains("line 1"), "{broken}");
    }
}
