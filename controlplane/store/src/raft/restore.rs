//! How a backup becomes a cluster again.
//!
//! An empty directory becomes that of the only member of a new history: a snapshot of the restored state, and a log that continues after it.
//! The member gets a number that nobody had and a disk of its own, and all members of the old history are retired: whoever is still
//! alive there is refused, and can refuse nobody here. The log is created last and whole, so a crash in between leaves a directory that is
//! refused, never one that looks restored.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::DirBuilder;
use std::os::unix::fs::DirBuilderExt;
use std::path::Path;
use std::sync::Arc;

use openraft::storage::Snapshot;
use smg_messages::disk as pb;
use smg_state::State;
use uuid::Uuid;

use super::convert;
use super::database::{COMMITTED, LAST_PURGED, VOTE};
use super::dir::{self, OpenError};
use super::options::NodeIdentity;
use super::snapshot;
use super::types::{LogId, Membership, Peer, SnapshotMeta, StoredMembership};
use crate::frame::frame;

/// The term in which the restored state counts as written. The first election is in a later one.
const TERM: u64 = 1;
/// The place of the restored state in the new log.
const INDEX: u64 = 1;
/// Until the member says at its first start where it is.
const NOWHERE: &str = "restored.invalid:7401";

/// Makes an empty or absent directory that of the one member of a new history of `state`'s cluster. Returns who that member is, and the
/// history.
///
/// # Errors
/// When the directory is not empty, or cannot be written.
pub fn restore(path: &Path, state: State) -> Result<(NodeIdentity, Uuid), OpenError> {
    DirBuilder::new().recursive(true).mode(0o700).create(path).map_err(OpenError::io("create", path))?;
    let lock = dir::lock_empty(path)?;
    let (history_id, storage_id, node_id) = (Uuid::new_v4(), Uuid::new_v4(), state.next_founder());
    let created_at_unix_ms = super::unix_millis();
    let identity = NodeIdentity { cluster_id: state.cluster_id(), node_id, storage_id, created_at_unix_ms };
    let state = state.begin_anew(history_id, storage_id, NOWHERE.to_owned());
    let id: LogId = convert::log_id_from_pb(&pb::LogId { term: TERM, node_id, index: INDEX });
    let members = BTreeMap::from([(node_id, Peer { address: NOWHERE.to_owned(), storage_id })]);
    let membership = Membership::new(vec![BTreeSet::from([node_id])], members);
    let membership = membership.map_err(|error| OpenError::Start(error.to_string()))?;
    let meta = SnapshotMeta { last_log_id: Some(id), last_membership: StoredMembership::new(Some(id), membership) };
    snapshot::write_first(path, &Snapshot { meta, snapshot: Arc::new(state) })
        .map_err(OpenError::io("write a snapshot into", path))?;
    let created = pb::NodeIdentity {
        cluster_id: identity.cluster_id.as_bytes().to_vec(),
        node_id,
        storage_id: storage_id.as_bytes().to_vec(),
        created_at_unix_ms,
    };
    let place = frame(&convert::log_id_to_pb(&id));
    let vote = frame(&pb::Vote { term: TERM, node_id, committed: false });
    dir::create_log(path, &created, &[(VOTE, vote), (COMMITTED, place.clone()), (LAST_PURGED, place)])?;
    drop(lock);
    Ok((identity, history_id))
}
