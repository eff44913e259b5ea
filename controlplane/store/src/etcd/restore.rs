//! How a backup becomes a fleet in etcd.
//!
//! Where nothing lies under a prefix, the restored state becomes a snapshot as a writer would leave one, after the first entry of a log whose
//! entries are removed already. The parts come first; then, in one transaction, the key that names them and the head of the log. Before
//! that there is no fleet, so what a crash leaves behind is in nobody's way, and the next attempt takes its place.

use std::sync::Arc;

use smg_messages::disk;
use smg_services::etcd as pb;
use smg_state::{State, codec};
use tokio::time::{Instant, sleep};
use uuid::Uuid;

use super::client::Etcd;
use super::keys::{self, Keys};
use super::{EtcdError, EtcdOptions, PAUSE, START, snapshot};
use crate::call::CallError;
use crate::frame::frame;

/// The place of the restored state in the new log.
const INDEX: u64 = 1;

/// Makes what lies under an empty prefix that of a new history of `state`'s cluster. Returns the history. Members are started afterwards.
/// Must be called within a tokio runtime.
///
/// # Errors
/// When there is something under the prefix, or etcd does not answer within half a minute.
pub async fn restore(options: &EtcdOptions, state: State) -> Result<Uuid, EtcdError> {
    let deadline = Instant::now() + START;
    let etcd = Etcd::new(&options.endpoints, options.tls.as_ref(), Arc::default()).map_err(EtcdError::Start)?;
    let keys = Keys::new(&options.prefix);
    let taken = || EtcdError::Taken(options.prefix.clone());
    let start = |error: &dyn std::fmt::Display| EtcdError::Start(error.to_string());
    let parts = keys.parts_of(INDEX);
    let others = [(keys.all(), parts.clone()), (keys::below(&parts), keys::below(&keys.all()))];
    for (key, range_end) in others {
        let range = pb::RangeRequest { key, range_end, limit: 1, ..pb::RangeRequest::default() };
        if !etcd.range(range, deadline).await.map_err(|error| start(&error))?.kvs.is_empty() {
            return Err(taken());
        }
    }
    let history_id = Uuid::new_v4();
    let bytes = codec::encode_state(&state.begin_anew_elsewhere(history_id));
    // Those of an attempt that did not get further.
    until(deadline, || etcd.delete(parts.clone(), keys::below(&parts))).await?;
    let (mut count, mut etcd_revision) = (0, 0);
    for part in bytes.chunks(snapshot::PART) {
        etcd_revision = until(deadline, || etcd.put(keys.part(INDEX, count), part.to_vec(), 0)).await?;
        count += 1;
    }
    let named = disk::EtcdSnapshot {
        index: INDEX,
        parts: u32::try_from(count).map_err(|error| start(&error))?,
        state_bytes: bytes.len() as u64,
        state_crc32c: crc32c::crc32c(&bytes),
        previous_index: 0,
        etcd_revision,
    };
    let txn = pb::TxnRequest {
        compare: vec![keys::created_at(keys.head(), 0), keys::created_at(keys.snapshot(), 0)],
        success: vec![
            keys::write(keys.snapshot(), frame(&named), 0),
            keys::write(keys.head(), frame(&disk::EtcdHead { index: INDEX }), 0),
        ],
        failure: Vec::new(),
    };
    if until(deadline, || etcd.txn(txn.clone())).await?.succeeded {
        return Ok(history_id);
    }
    // An attempt whose answer was lost may have been the one that succeeded.
    match snapshot::newest(&etcd, &keys, deadline).await.map_err(|error| start(&error))? {
        Some(Ok((found, _))) if found == named => Ok(history_id),
        _ => Err(taken()),
    }
}

/// Does what may be done twice until it is done.
async fn until<T, F>(deadline: Instant, mut call: impl FnMut() -> F) -> Result<T, EtcdError>
where
    F: Future<Output = Result<T, CallError>>,
{
    loop {
        match call().await {
            Ok(done) => return Ok(done),
            Err(error) if Instant::now() >= deadline => return Err(EtcdError::Start(error.message().to_owned())),
            Err(_) => sleep(PAUSE).await,
        }
    }
}
