//! `smg cluster backup` and `smg cluster restore`.
//!
//! A backup gets its name only when it is whole and verified. A restore makes a directory for one new member, or what members on etcd start
//! from; no member is asked, so the old control plane must be gone, or be stopped, before the new one serves.

use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use http_body_util::BodyExt;
use serde_json::json;
use smg_controlplane::backup::{self, Summary};
use smg_state::State;
#[cfg(feature = "etcd")]
use smg_store::etcd::{self, EtcdError, EtcdOptions};
use smg_store::raft;

use crate::admin::show::{Show, note};
#[cfg(feature = "etcd")]
use crate::admin::table::RESTORED_IN_ETCD;
use crate::admin::table::{BACKUP, RESTORED};
use crate::admin::{Failure, Session};
use crate::cli::{ClusterArgs, StoreArgs};
use crate::controlplane::STATE_DIRECTORY;
use crate::operator::Question;
use crate::process::passphrase;

fn failed(path: &Path) -> impl Fn(io::Error) -> Failure {
    let path = path.display().to_string();
    move |error| Failure::Undone(format!("{path}: {error}"))
}

/// Writes a backup to a file.
///
/// # Errors
/// When there is none, or it cannot be written.
pub async fn save(args: &ClusterArgs, file: &Path, show: Show) -> Result<(), Failure> {
    let mut name = file.as_os_str().to_owned();
    name.push(".part");
    let part = Path::new(&name);
    if file.exists() {
        return Err(Failure::Exists(format!("{}: there is a file already", file.display())));
    }
    let session = Session::new(&args.target, show)?;
    let mut body = session.open(&Question::get("/fleet/backup")).await?;
    let mut out = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(part);
    let out = out.as_mut().map_err(|error| Failure::Undone(format!("{}: {error}", part.display())))?;
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|error| Failure::Undone(format!("the backup broke off: {error}")))?;
        if let Ok(data) = frame.into_data() {
            out.write_all(&data).map_err(failed(part))?;
        }
    }
    out.sync_all().map_err(failed(part))?;
    let bytes = fs::read(part).map_err(failed(part))?;
    let summary = backup::verify(&bytes).map_err(|error| Failure::Answer(error.to_string()))?;
    fs::rename(part, file).map_err(failed(file))?;
    if summary.keys == "left_out" {
        let count = summary.workers_with_keys;
        note(&format!("the keys of {count} workers are not in the backup: the control plane has no --backup-key-file"));
    }
    let mut answer = json!(summary);
    answer["file"] = json!(file.display().to_string());
    answer["bytes"] = json!(bytes.len());
    show.one(&answer, BACKUP)
}

/// The state in a backup, and what the backup says of itself.
///
/// # Errors
/// When the backup cannot be used, or keys of engines would be lost without the operator's word.
pub fn usable(file: &Path, key_file: Option<&Path>, without_keys: bool) -> Result<(State, Summary), Failure> {
    let bytes = fs::read(file).map_err(|error| Failure::Input(format!("{}: {error}", file.display())))?;
    let key = key_file.map(passphrase).transpose().map_err(Failure::Input)?;
    let unusable = |error: backup::BackupError| Failure::Input(format!("{}: {error}", file.display()));
    let (state, summary) = backup::read(&bytes, key.as_ref()).map_err(unusable)?;
    let reason = match summary.keys {
        "sealed" if key.is_none() => Some("are sealed: give --backup-key-file, or restore --without-keys"),
        "left_out" => Some("are not in the backup: restore --without-keys"),
        _ => None,
    };
    if let Some(reason) = reason.filter(|_| !without_keys) {
        let count = summary.workers_with_keys;
        let text = format!("the keys of {count} worker(s) {reason} and set them again with `smg workers patch`");
        return Err(Failure::Input(text));
    }
    Ok((state, summary))
}

/// Makes a control plane from a backup: the directory of its one member, or what etcd keeps for its members.
///
/// # Errors
/// When there is something already, or it cannot be written.
pub fn restore((state, summary): (State, Summary), into: &StoreArgs, show: Show) -> Result<(), Failure> {
    let cluster_id = state.cluster_id();
    let mut answer = json!({
        "cluster_id": cluster_id,
        "restored_from_history_id": summary.history_id,
        "restored_revision": summary.revision,
    });
    match into {
        StoreArgs::Raft { data_dir } => {
            let restored = raft::restore(&data_dir.join(STATE_DIRECTORY), state);
            let (member, history_id) = restored.map_err(|error| match error {
                raft::OpenError::Taken(_) => Failure::Exists(error.to_string()),
                _ => Failure::Undone(error.to_string()),
            })?;
            answer["history_id"] = json!(history_id);
            answer["node_id"] = json!(member.node_id);
            answer["data_dir"] = json!(data_dir.display().to_string());
            show.one(&answer, RESTORED)
        }
        #[cfg(feature = "etcd")]
        StoreArgs::Etcd(into) => crate::admin::block_on(async {
            let tls = into.tls.load().map_err(|error| Failure::Input(format!("TLS towards etcd: {error}")))?;
            let options = EtcdOptions { tls: Some(tls), ..EtcdOptions::new(into.endpoints.clone(), &into.prefix) };
            let history_id = etcd::restore(&options, state).await.map_err(|error| match error {
                EtcdError::Taken(_) => Failure::Exists(error.to_string()),
                _ => Failure::Undone(error.to_string()),
            })?;
            answer["history_id"] = json!(history_id);
            answer["etcd_prefix"] = json!(into.prefix);
            show.one(&answer, RESTORED_IN_ETCD)
        }),
        #[cfg(not(feature = "etcd"))]
        StoreArgs::Etcd(_) => Err(Failure::Input("this smg was built without etcd".to_owned())),
    }
}
