//! How an empty directory becomes a member of a cluster that exists.
//!
//! The new member draws an id for its disk, keeps it, and asks for a number; any member can answer, because the number comes from the log.
//! Only then is its directory created, with the cluster, the number and the disk in it. It asks with the same disk after a crash, so it
//! gets the same number. The leader sees the new number in the registry and begins to replicate to it.

use std::fmt;
use std::time::Duration;

use smg_messages::disk as disk_pb;
use smg_services::raft as pb;
use smg_services::raft::peer_client::PeerClient;
use smg_state::NodeId;
use tokio::time::{sleep, timeout};
use tonic::{Code, Request};
use uuid::Uuid;

use super::dir::{self, OpenError};
use super::identity::PROTOCOL;
use super::links::{Way, classify};
use super::options::{NodeIdentity, RaftOptions};
use crate::call::CallError;

/// For one member's answer, which waits for a commit.
const TIMEOUT: Duration = Duration::from_secs(6);
/// Before all are asked again.
const PAUSE: Duration = Duration::from_millis(500);

/// Where others find this member.
#[derive(Debug, Clone)]
pub(crate) struct Addresses {
    pub peer: String,
    pub api: String,
}

impl Addresses {
    pub fn of(options: &RaftOptions) -> Self {
        Self { peer: options.address.clone(), api: options.api_address.clone() }
    }

    /// A request for a place at these addresses.
    pub fn request(&self, storage_id: Uuid) -> pb::JoinRequest {
        pb::JoinRequest {
            protocol: PROTOCOL,
            storage_id: storage_id.as_bytes().to_vec(),
            peer_address: self.peer.clone(),
            api_address: self.api.clone(),
            ..pb::JoinRequest::default()
        }
    }

    /// As [`Self::request`], of a member that has a place already, in this history, and has moved.
    pub fn moved(&self, me: &NodeIdentity, history_id: Uuid) -> pb::JoinRequest {
        pb::JoinRequest {
            cluster_id: me.cluster_id.as_bytes().to_vec(),
            node_id: Some(me.node_id),
            history_id: history_id.as_bytes().to_vec(),
            ..self.request(me.storage_id)
        }
    }
}

/// Why nobody gave a place.
#[derive(Debug)]
pub(crate) enum NoPlace {
    /// The cluster refused; asking again is no use.
    Refused(String),
    /// Nobody answered.
    NoAnswer(String),
}

impl fmt::Display for NoPlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Refused(why) | Self::NoAnswer(why) => f.write_str(why),
        }
    }
}

/// Asks members for a place, one after the other, until one answers.
pub(crate) async fn ask(addresses: &[String], way: &Way, request: &pb::JoinRequest) -> Result<(Uuid, NodeId), NoPlace> {
    let mut last = "there is nobody to ask".to_owned();
    for address in addresses {
        let channel = match way.channel(address) {
            Ok(channel) => channel,
            Err(why) => {
                last = why;
                continue;
            }
        };
        let mut client = PeerClient::new(channel);
        match timeout(TIMEOUT, client.join(Request::new(request.clone()))).await {
            Err(_) => last = format!("{address}: no answer within {} s", TIMEOUT.as_secs()),
            Ok(Ok(answer)) => {
                let answer = answer.into_inner();
                match Uuid::from_slice(&answer.cluster_id) {
                    Ok(cluster_id) if answer.node_id != 0 => return Ok((cluster_id, answer.node_id)),
                    _ => last = format!("{address}: the answer is not complete"),
                }
            }
            Ok(Err(status)) if matches!(status.code(), Code::FailedPrecondition | Code::InvalidArgument) => {
                return Err(NoPlace::Refused(format!("{address}: {}", status.message())));
            }
            Ok(Err(status)) => match classify(&status) {
                // No other member will say anything else.
                CallError::Refused(why) if status.code() == Code::PermissionDenied => {
                    return Err(NoPlace::Refused(format!("{address}: {why}")));
                }
                error => last = format!("{address}: {}", error.message()),
            },
        }
    }
    Err(NoPlace::NoAnswer(last))
}

/// Makes an empty directory that of a new member. Waits until the cluster answers; one that has data already is left as it is.
pub(crate) async fn enter(options: &RaftOptions) -> Result<(), OpenError> {
    let path = options.data_dir.clone();
    let blocking = |error: tokio::task::JoinError| OpenError::Start(error.to_string());
    let prepared = {
        let path = path.clone();
        tokio::task::spawn_blocking(move || dir::prepare_joining(&path)).await.map_err(blocking)??
    };
    let Some((storage_id, lock)) = prepared else { return Ok(()) };
    let (request, way) = (Addresses::of(options).request(storage_id), Way::of(options));
    let mut told = None;
    let (cluster_id, node_id) = loop {
        match ask(&options.join, &way, &request).await {
            Ok(place) => break place,
            Err(NoPlace::Refused(why)) => return Err(OpenError::Join(why)),
            Err(NoPlace::NoAnswer(why)) => {
                if told.as_ref() != Some(&why) {
                    tracing::warn!(target: "smg", reason = why, "no member of the cluster answers: asking on");
                    told = Some(why);
                }
            }
        }
        sleep(PAUSE).await;
    };
    tracing::info!(target: "smg", member = node_id, cluster = %cluster_id, "joining a cluster");
    let identity = disk_pb::NodeIdentity {
        cluster_id: cluster_id.as_bytes().to_vec(),
        node_id,
        storage_id: storage_id.as_bytes().to_vec(),
        created_at_unix_ms: super::unix_millis(),
    };
    tokio::task::spawn_blocking(move || {
        let joined = dir::finish_joining(&path, &identity);
        drop(lock);
        joined
    })
    .await
    .map_err(blocking)?
}
