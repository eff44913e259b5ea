//! Snapshots in etcd: the state after an entry, in parts that fit into requests.
//!
//! The parts come first, then, under the writer's fence, the key that names them; whoever finds that key finds whole parts, unless a later
//! snapshot removed them meanwhile, which is noticed. The state after an entry is the same on every member, so parts that a writer left
//! half written are no danger to the next one.

use smg_messages::disk;
use smg_services::etcd as pb;
use smg_state::{State, codec};
use tokio::time::Instant;

use super::client::Etcd;
use super::keys::{self, Keys};
use crate::StoreError;
use crate::call::CallError;
use crate::frame::{frame, unframe};

/// Largest part, in bytes. A request may have 1.5 MiB unless etcd is told otherwise.
pub(crate) const PART: usize = 512 * 1024;
/// Parts that are read at once.
const AT_ONCE: i64 = 16;

/// What comes of reading a snapshot.
#[derive(Debug)]
pub(crate) enum Loaded {
    /// There is none.
    None,
    /// The state after an entry.
    State(u64, Box<State>),
    /// A newer one took its place meanwhile.
    Replaced,
    /// It is not what it was when it was written.
    Damaged(String),
}

/// The key of the newest snapshot, as it is.
pub(crate) async fn newest(
    etcd: &Etcd,
    keys: &Keys,
    deadline: Instant,
) -> Result<Option<Result<(disk::EtcdSnapshot, i64), String>>, StoreError> {
    let found = etcd.range(keys::one(keys.snapshot()), deadline).await?;
    let read = |found: &pb::KeyValue| match unframe::<disk::EtcdSnapshot>(&found.value) {
        Ok(snapshot) => Ok((snapshot, found.mod_revision)),
        Err(error) => Err(format!("the snapshot's head in etcd: {error}")),
    };
    Ok(found.kvs.first().map(read))
}

/// Reads the newest snapshot.
pub(crate) async fn load(etcd: &Etcd, keys: &Keys, deadline: Instant) -> Result<Loaded, StoreError> {
    let snapshot = match newest(etcd, keys, deadline).await? {
        None => return Ok(Loaded::None),
        Some(Err(reason)) => return Ok(Loaded::Damaged(reason)),
        Some(Ok((snapshot, _))) => snapshot,
    };
    let path = keys.parts_of(snapshot.index);
    let (mut bytes, mut next) = (Vec::new(), 0_usize);
    while next < snapshot.parts as usize {
        let found = etcd.range(keys::from(keys.part(snapshot.index, next), &path, AT_ONCE), deadline).await?;
        for part in &found.kvs {
            if part.key != keys.part(snapshot.index, next) {
                return Ok(Loaded::Replaced);
            }
            bytes.extend_from_slice(&part.value);
            next += 1;
        }
        if found.kvs.is_empty() {
            return Ok(Loaded::Replaced);
        }
    }
    if bytes.len() as u64 != snapshot.state_bytes || crc32c::crc32c(&bytes) != snapshot.state_crc32c {
        return Ok(Loaded::Damaged(format!("the snapshot in etcd after entry {} is damaged", snapshot.index)));
    }
    Ok(match codec::decode_state(&bytes) {
        Ok(state) => Loaded::State(snapshot.index, Box::new(state)),
        Err(error) => Loaded::Damaged(format!("the snapshot in etcd cannot be read: {error}")),
    })
}

/// What a writer knows when it writes a snapshot.
pub(crate) struct Fence {
    /// The revision at which it became the writer.
    pub writer: i64,
    /// Entries to keep behind a snapshot.
    pub keep: u64,
    /// Whether etcd is told to forget what nobody needs.
    pub compact: bool,
}

/// Writes the state after an entry as the newest snapshot, removes what it makes needless, and lets etcd forget.
pub(crate) async fn save(
    etcd: &Etcd,
    keys: &Keys,
    fence: &Fence,
    index: u64,
    state: &State,
    deadline: Instant,
) -> Result<(), String> {
    let unavailable = |error: StoreError| error.to_string();
    let failed = |error: CallError| error.message().to_owned();
    let before = newest(etcd, keys, deadline).await.map_err(unavailable)?.transpose()?;
    let (previous, changed_at) = before.map_or((None, 0), |(snapshot, at)| (Some(snapshot), at));
    if previous.as_ref().is_some_and(|previous| previous.index >= index) {
        return Ok(());
    }
    let bytes = codec::encode_state(state);
    let mut parts = 0;
    let mut etcd_revision = 0;
    for part in bytes.chunks(PART) {
        etcd_revision = etcd.put(keys.part(index, parts), part.to_vec(), 0).await.map_err(failed)?;
        parts += 1;
    }
    let snapshot = disk::EtcdSnapshot {
        index,
        parts: u32::try_from(parts).map_err(|_| "the state is too large".to_owned())?,
        state_bytes: bytes.len() as u64,
        state_crc32c: crc32c::crc32c(&bytes),
        previous_index: previous.as_ref().map_or(0, |previous| previous.index),
        etcd_revision,
    };
    let named = etcd
        .txn(pb::TxnRequest {
            compare: vec![keys::created_at(keys.writer(), fence.writer), keys::changed_at(keys.snapshot(), changed_at)],
            success: vec![keys::write(keys.snapshot(), frame(&snapshot), 0)],
            failure: Vec::new(),
        })
        .await
        .map_err(failed)?;
    if !named.succeeded {
        return Err("another member is the writer now".to_owned());
    }
    // Whoever reads the previous one just now may finish.
    etcd.delete(keys.parts(), keys.parts_of(snapshot.previous_index)).await.map_err(failed)?;
    etcd.delete(keys.log(), keys.entry(index.saturating_sub(fence.keep).saturating_add(1))).await.map_err(failed)?;
    if let Some(previous) = previous.filter(|previous| fence.compact && previous.etcd_revision > 0) {
        match etcd.compact(previous.etcd_revision).await {
            // Others that use this etcd cluster may have done more.
            Ok(()) | Err(CallError::Refused(_)) => {}
            Err(error) => return Err(error.message().to_owned()),
        }
    }
    Ok(())
}
