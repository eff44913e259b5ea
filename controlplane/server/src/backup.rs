//! Backups: the whole state at one revision, in one file.
//!
//! `{"SMGBACK1", header length u32 LE, header crc32c u32 LE, header, state, sealed keys}`. The header names the cluster, the history and the
//! revision, and carries the SHA-256 of the state, so that a backup that was cut off or changed is noticed before anything is made of it.
//!
//! The keys of engines are sealed under a passphrase (ChaCha20-Poly1305; the key from PBKDF2-HMAC-SHA256), bound to the state beside them.
//! Without a passphrase they are left out, and the backup says how many workers lack one.

use std::collections::BTreeMap;
use std::num::NonZeroU32;

use bytes::Bytes;
use prost::Message;
use ring::aead::{Aad, CHACHA20_POLY1305, LessSafeKey, NONCE_LEN, Nonce, UnboundKey};
use ring::digest::{SHA256, digest};
use ring::pbkdf2;
use serde::Serialize;
use smg_fleet::{Revision, Secret, wire};
use smg_messages::disk as pb;
use smg_state::backup::WorkerSecrets;
use smg_state::{State, codec};
use thiserror::Error;
use uuid::Uuid;

const MAGIC: &[u8; 8] = b"SMGBACK1";
const HEAD: usize = 16;
/// Rounds of the key derivation: a guess costs a good part of a second.
const ITERATIONS: u32 = 600_000;
/// Most rounds that a backup may ask for.
const MAX_ITERATIONS: u32 = 10_000_000;
const SALT_BYTES: usize = 16;

/// What a backup says about itself.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Summary {
    /// Which cluster.
    pub cluster_id: Uuid,
    /// Which history of it.
    pub history_id: Uuid,
    /// The revision that it holds.
    pub revision: Revision,
    /// When it was made, by the clock of the member that made it.
    pub created_at_unix_ms: u64,
    /// Workers in it.
    pub workers: usize,
    /// Policy documents in it.
    pub policies: usize,
    /// Admin tokens in it.
    pub tokens: usize,
    /// `sealed`, `left_out`, or `none` when no worker has a key.
    pub keys: &'static str,
    /// How many workers have keys.
    pub workers_with_keys: u64,
}

/// Why there is no backup, or it cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum BackupError {
    /// The file is no backup, or not whole.
    #[error("the backup {0}")]
    Damaged(String),
    /// Keys are sealed and cannot be opened.
    #[error("the keys in the backup cannot be opened: another passphrase sealed them, or they were changed")]
    Passphrase,
    /// The system has no randomness, or the key derivation failed.
    #[error("the keys cannot be sealed: {0}")]
    Crypto(&'static str),
}

fn damaged<T>(reason: impl Into<String>) -> Result<T, BackupError> {
    Err(BackupError::Damaged(reason.into()))
}

/// The state as a backup. Takes the better part of a second with a passphrase.
///
/// # Errors
/// When keys cannot be sealed.
pub fn write(state: &State, passphrase: Option<&Secret>, now_unix_ms: u64) -> Result<Bytes, BackupError> {
    let (bare, secrets) = state.without_secrets();
    let encoded = codec::encode_state(&bare);
    let state_sha256 = digest(&SHA256, &encoded).as_ref().to_vec();
    let sealed = match passphrase {
        Some(passphrase) if !secrets.is_empty() => Some(seal(passphrase, &secrets, &state_sha256)?),
        _ => None,
    };
    let header = pb::BackupHeader {
        cluster_id: state.cluster_id().as_bytes().to_vec(),
        history_id: state.history_id().as_bytes().to_vec(),
        revision: state.revision(),
        created_at_unix_ms: now_unix_ms,
        state_bytes: encoded.len() as u64,
        state_sha256,
        workers_with_keys: secrets.len() as u64,
        seal: sealed.as_ref().map(|(seal, _)| seal.clone()),
    }
    .encode_to_vec();
    let sealed = sealed.map(|(_, bytes)| bytes).unwrap_or_default();
    let mut bytes = Vec::with_capacity(HEAD + header.len() + encoded.len() + sealed.len());
    bytes.extend_from_slice(MAGIC);
    bytes.extend_from_slice(&u32::try_from(header.len()).unwrap_or(u32::MAX).to_le_bytes());
    bytes.extend_from_slice(&wire::checksum(&header).to_le_bytes());
    bytes.extend_from_slice(&header);
    bytes.extend_from_slice(&encoded);
    bytes.extend_from_slice(&sealed);
    Ok(Bytes::from(bytes))
}

/// A backup whose parts fit together.
struct Parts<'a> {
    header: pb::BackupHeader,
    state: State,
    sealed: &'a [u8],
}

fn parts(bytes: &[u8]) -> Result<Parts<'_>, BackupError> {
    let cut = || BackupError::Damaged("is cut off".to_owned());
    let (magic, rest) = bytes.split_first_chunk::<8>().ok_or_else(cut)?;
    if magic != MAGIC {
        return damaged("is no backup of this version");
    }
    let (length, rest) = rest.split_first_chunk::<4>().ok_or_else(cut)?;
    let (checksum, rest) = rest.split_first_chunk::<4>().ok_or_else(cut)?;
    let length = usize::try_from(u32::from_le_bytes(*length)).map_err(|_| cut())?;
    let (header, rest) = rest.split_at_checked(length).ok_or_else(cut)?;
    if wire::checksum(header) != u32::from_le_bytes(*checksum) {
        return damaged("has a damaged header");
    }
    let header =
        pb::BackupHeader::decode(header).map_err(|error| BackupError::Damaged(format!("has no header: {error}")))?;
    let state_bytes = usize::try_from(header.state_bytes).map_err(|_| cut())?;
    let (state, sealed) = rest.split_at_checked(state_bytes).ok_or_else(cut)?;
    if digest(&SHA256, state).as_ref() != header.state_sha256 {
        return damaged("does not match its checksum");
    }
    if sealed.len() as u64 != header.seal.as_ref().map_or(0, |seal| seal.sealed_bytes) {
        return Err(cut());
    }
    let state = codec::decode_state(state).map_err(|error| BackupError::Damaged(format!("cannot be read: {error}")))?;
    let (cluster_id, history_id) = (state.cluster_id(), state.history_id());
    let held = (&cluster_id.as_bytes()[..], &history_id.as_bytes()[..], state.revision());
    if held != (&header.cluster_id[..], &header.history_id[..], header.revision) {
        return damaged("holds another state than its header says");
    }
    Ok(Parts { header, state, sealed })
}

impl Parts<'_> {
    fn summary(&self) -> Summary {
        let Self { header, state, .. } = self;
        Summary {
            cluster_id: state.cluster_id(),
            history_id: state.history_id(),
            revision: state.revision(),
            created_at_unix_ms: header.created_at_unix_ms,
            workers: state.workers().count(),
            policies: state.policies().count(),
            tokens: state.tokens().count(),
            keys: match (&header.seal, header.workers_with_keys) {
                (_, 0) => "none",
                (Some(_), _) => "sealed",
                (None, _) => "left_out",
            },
            workers_with_keys: header.workers_with_keys,
        }
    }
}

/// Verifies a backup: that it is whole, and can be read.
///
/// # Errors
/// What is wrong with it.
pub fn verify(bytes: &[u8]) -> Result<Summary, BackupError> {
    Ok(parts(bytes)?.summary())
}

/// The state in a backup, with the keys of engines when they are in it and a passphrase is given.
///
/// # Errors
/// When it is damaged, or the passphrase is another.
pub fn read(bytes: &[u8], passphrase: Option<&Secret>) -> Result<(State, Summary), BackupError> {
    let parts = parts(bytes)?;
    let summary = parts.summary();
    let Parts { header, mut state, sealed } = parts;
    if let (Some(seal), Some(passphrase)) = (&header.seal, passphrase) {
        state.put_secrets(&open(passphrase, seal, sealed, &header.state_sha256)?);
    }
    Ok((state, summary))
}

fn key(passphrase: &Secret, salt: &[u8], iterations: u32) -> Result<LessSafeKey, BackupError> {
    let iterations = NonZeroU32::new(iterations).filter(|rounds| rounds.get() <= MAX_ITERATIONS);
    let iterations = iterations.ok_or_else(|| BackupError::Damaged("asks for too much work".to_owned()))?;
    let mut derived = [0; 32];
    pbkdf2::derive(pbkdf2::PBKDF2_HMAC_SHA256, iterations, salt, passphrase.as_bytes(), &mut derived);
    let key = UnboundKey::new(&CHACHA20_POLY1305, &derived);
    Ok(LessSafeKey::new(key.map_err(|_| BackupError::Crypto("the derived key is not usable"))?))
}

fn seal(
    passphrase: &Secret,
    secrets: &BTreeMap<smg_fleet::WorkerId, WorkerSecrets>,
    state_sha256: &[u8],
) -> Result<(pb::Seal, Vec<u8>), BackupError> {
    let text = |secret: &Option<Secret>| secret.as_deref().map(str::to_owned);
    let worker = |(id, secrets): (&smg_fleet::WorkerId, &WorkerSecrets)| pb::WorkerSecrets {
        worker_id: wire::worker_id_bytes(*id),
        api_key: text(&secrets.api_key),
        proposed_api_key: text(&secrets.proposed_api_key),
    };
    let mut bytes = pb::BackupSecrets { workers: secrets.iter().map(worker).collect() }.encode_to_vec();
    let (salt, nonce): ([u8; SALT_BYTES], [u8; NONCE_LEN]) = (rand::random(), rand::random());
    let key = key(passphrase, &salt, ITERATIONS)?;
    let sealed = key.seal_in_place_append_tag(Nonce::assume_unique_for_key(nonce), Aad::from(state_sha256), &mut bytes);
    sealed.map_err(|_| BackupError::Crypto("they are too many"))?;
    let (salt, nonce) = (salt.to_vec(), nonce.to_vec());
    Ok((pb::Seal { salt, iterations: ITERATIONS, nonce, sealed_bytes: bytes.len() as u64 }, bytes))
}

fn open(
    passphrase: &Secret,
    seal: &pb::Seal,
    sealed: &[u8],
    state_sha256: &[u8],
) -> Result<BTreeMap<smg_fleet::WorkerId, WorkerSecrets>, BackupError> {
    let key = key(passphrase, &seal.salt, seal.iterations)?;
    let nonce = Nonce::try_assume_unique_for_key(&seal.nonce).map_err(|_| BackupError::Passphrase)?;
    let mut sealed = sealed.to_vec();
    let opened = key.open_in_place(nonce, Aad::from(state_sha256), &mut sealed).map_err(|_| BackupError::Passphrase)?;
    let secrets = pb::BackupSecrets::decode(&*opened);
    let secrets = secrets.map_err(|error| BackupError::Damaged(format!("has no keys: {error}")))?;
    let worker = |worker: pb::WorkerSecrets| {
        let id = wire::worker_id(&worker.worker_id);
        let id = id.map_err(|error| BackupError::Damaged(format!("has a key of nobody: {error}")))?;
        let secret = |text: Option<String>| text.map(Secret::from);
        let secrets =
            WorkerSecrets { api_key: secret(worker.api_key), proposed_api_key: secret(worker.proposed_api_key) };
        Ok((id, secrets))
    };
    secrets.workers.into_iter().map(worker).collect()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use smg_fleet::{Origin, WorkerId, WorkerSpec, WorkerType};
    use smg_state::{Command, Envelope};

    use super::*;

    fn state() -> State {
        let mut state = State::default();
        let mut spec = WorkerSpec::new("http://p:1", WorkerType::Prefill);
        spec.api_key = Some("hush-hush".into());
        let id = WorkerId(Uuid::from_u128(1));
        for (n, command) in [
            Command::InitCluster { cluster_id: Uuid::from_u128(7), history_id: Uuid::from_u128(8) },
            Command::CreateWorker { id, spec: Box::new(spec), origin: Origin::Api },
        ]
        .into_iter()
        .enumerate()
        {
            let command_id = Uuid::from_u128(100 + n as u128);
            let actor = "test".to_owned();
            state.apply(&Envelope { command_id, actor, proposed_at_unix_ms: 1, expected_revision: None, command });
        }
        state
    }

    #[test]
    fn what_was_backed_up_is_what_is_restored() {
        let (state, passphrase) = (state(), Secret::from("correct horse"));
        let sealed = write(&state, Some(&passphrase), 5).unwrap();
        assert!(!sealed.windows(9).any(|window| window == b"hush-hush"));
        assert_eq!(read(&sealed, Some(&passphrase)).unwrap().0, state);
        let summary = verify(&sealed).unwrap();
        assert_eq!((summary.keys, summary.workers_with_keys, summary.workers), ("sealed", 1, 1));
        assert_eq!(read(&sealed, Some(&"wrong".into())), Err(BackupError::Passphrase));
        assert_eq!(read(&sealed, None).unwrap().0, state.without_secrets().0);
    }

    #[test]
    fn without_a_passphrase_keys_are_left_out_and_the_backup_says_so() {
        let bytes = write(&state(), None, 5).unwrap();
        assert!(!bytes.windows(9).any(|window| window == b"hush-hush"));
        let (restored, summary) = read(&bytes, Some(&"any".into())).unwrap();
        assert_eq!((summary.keys, restored), ("left_out", state().without_secrets().0));
    }

    #[test]
    fn a_backup_that_was_cut_off_or_changed_is_refused() {
        let bytes = write(&state(), None, 5).unwrap();
        for length in 0..bytes.len() {
            assert!(verify(&bytes[..length]).is_err(), "{length} bytes");
        }
        for at in 0..bytes.len() {
            let mut changed = bytes.to_vec();
            changed[at] ^= 1;
            assert!(verify(&changed).is_err(), "byte {at}");
        }
        assert!(verify(&[&bytes[..], b"x"].concat()).is_err());
    }
}
