//! What members ask each other, through etcd: how far they are, and which gateways they have.
//!
//! A question is a key, an answer is another one, both under the lease of who asks: nothing of them stays. Who does not answer in time is
//! named, not waited for.

use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use smg_messages::disk;
use smg_services::etcd as pb;
use smg_state::NodeId;
use tokio::time::{Instant, sleep, timeout_at};
use uuid::Uuid;

use super::EtcdStore;
use super::client::Etcd;
use super::keys;
use super::log::Shared;
use super::watch::Watcher;
use crate::StoreError;
use crate::cluster::{ClusterStatus, GatewayAnswer, GatewayReport, MemberStatus};
use crate::frame::{frame, unframe};

/// For the answers of all members.
const LIMIT: Duration = Duration::from_secs(1);
/// Largest answer, in bytes.
const MAX_ANSWER: usize = 1 << 20;
const PAUSE: Duration = Duration::from_millis(500);

/// Answers the questions of other members.
pub(crate) struct Answering {
    pub etcd: Arc<Etcd>,
    pub shared: Arc<Shared>,
    pub node_id: NodeId,
    pub gateways: Arc<OnceLock<GatewayReport>>,
}

impl Answering {
    /// Answers until the store stops.
    pub async fn run(self) {
        let stop = self.shared.stop.clone();
        loop {
            tokio::select! {
                // Questions that were asked meanwhile are not answered any more: who asked them waits for a moment only.
                _ = self.follow() => {}
                () = stop.cancelled() => return,
            }
            tokio::select! {
                () = sleep(PAUSE) => {}
                () = stop.cancelled() => return,
            }
        }
    }

    async fn follow(&self) -> Result<(), String> {
        let path = self.shared.keys.questions();
        let range = keys::from(path.clone(), &path, 1);
        let found = self.etcd.range(range, Instant::now() + LIMIT).await.map_err(|error| error.to_string())?;
        let revision = found.header.map_or(0, |header| header.revision);
        let mut watcher = Watcher::open(&self.etcd, path, revision + 1).await?;
        loop {
            for event in watcher.next().await? {
                let put = event.r#type() == pb::event::EventType::Put;
                let Some(question) = event.kv.filter(|_| put) else { continue };
                let (Ok(id), Ok(asked)) =
                    (Uuid::parse_str(keys::name(&question.key)), unframe::<disk::EtcdQuestion>(&question.value))
                else {
                    continue;
                };
                if asked.asked_by != self.node_id {
                    self.answer(id, &asked).await;
                }
            }
        }
    }

    async fn answer(&self, id: Uuid, asked: &disk::EtcdQuestion) {
        let gateways = self.gateways.get().filter(|_| asked.gateways).map(|report| report()).unwrap_or_default();
        let fits = gateways.len() <= MAX_ANSWER;
        if !fits {
            tracing::warn!(target: "smg", bytes = gateways.len(), "too many gateways to tell another member of them");
            return;
        }
        let applied_index = self.shared.applied.borrow().index;
        let answer = frame(&disk::EtcdAnswer { applied_index, gateways });
        // Who asked is told nothing then, and says so.
        let _ = self.etcd.put(self.shared.keys.answer(id, self.node_id), answer, asked.lease).await;
    }
}

impl EtcdStore {
    /// The members that have a lease.
    async fn members(&self, deadline: Instant) -> Result<Vec<disk::EtcdMember>, StoreError> {
        let path = self.shared.keys.members();
        let found = self.etcd.range(keys::from(path.clone(), &path, 0), deadline).await?;
        Ok(found.kvs.iter().filter_map(|member| unframe(&member.value).ok()).collect())
    }

    /// Asks the other members among `members`, all at once.
    async fn ask(&self, members: &[disk::EtcdMember], gateways: bool) -> BTreeMap<NodeId, disk::EtcdAnswer> {
        let mut answers = BTreeMap::new();
        let others = members.iter().filter(|member| member.node_id != self.node_id).count();
        let Some(lease) = self.keeper.now().filter(|_| others > 0) else { return answers };
        let id = Uuid::new_v4();
        let (question, path) = (self.shared.keys.question(id), self.shared.keys.answers(id));
        let asked = frame(&disk::EtcdQuestion { asked_by: self.node_id, lease, gateways });
        let asking = async {
            let revision = self.etcd.put(question.clone(), asked, lease).await.ok()?;
            let mut watcher = Watcher::open(&self.etcd, path.clone(), revision + 1).await.ok()?;
            while answers.len() < others {
                for answer in watcher.next().await.ok()?.into_iter().filter_map(|event| event.kv) {
                    if let (Ok(member), Ok(said)) = (keys::name(&answer.key).parse(), unframe(&answer.value)) {
                        answers.insert(member, said);
                    }
                }
            }
            Some(())
        };
        let _ = timeout_at(Instant::now() + LIMIT, asking).await;
        // Where this fails, they end with the lease.
        let forget = pb::TxnRequest {
            success: vec![keys::remove(question, Vec::new()), keys::remove(path.clone(), keys::below(&path))],
            ..pb::TxnRequest::default()
        };
        let etcd = Arc::clone(&self.etcd);
        smg_net::spawn("etcd-forget-question", async move {
            let _ = etcd.txn(forget).await;
        });
        answers
    }

    pub(crate) async fn gateways_elsewhere(&self) -> Vec<GatewayAnswer> {
        let Ok(members) = self.members(Instant::now() + LIMIT).await else { return Vec::new() };
        let mut answers = self.ask(&members, true).await;
        let others = members.iter().map(|member| member.node_id).filter(|id| *id != self.node_id);
        let answer = |id: NodeId| match answers.remove(&id) {
            Some(said) => (id, Ok(said.gateways)),
            None => (id, Err("it did not answer in time".to_owned())),
        };
        others.map(answer).collect()
    }

    pub(crate) async fn status(&self, local: bool) -> Result<ClusterStatus, StoreError> {
        let applied_index = self.shared.applied.borrow().index;
        let here = ClusterStatus {
            node_id: self.node_id,
            // What it has applied is all that it knows without asking.
            last_log_index: applied_index,
            committed_index: applied_index,
            applied_index,
            snapshot_index: self.shared.snapshot_index.load(std::sync::atomic::Ordering::Relaxed),
            ..ClusterStatus::default()
        };
        if local {
            return Ok(here);
        }
        let deadline = Instant::now() + LIMIT;
        let members = self.members(deadline).await?;
        let writer = self.etcd.range(keys::one(self.shared.keys.writer()), deadline).await?;
        let writer = writer.kvs.first();
        let leader = writer.and_then(|writer| std::str::from_utf8(&writer.value).ok()?.parse().ok());
        let head = self.etcd.range(keys::one(self.shared.keys.head()), deadline).await?;
        let head = head.kvs.first().and_then(|head| unframe::<disk::EtcdHead>(&head.value).ok());
        let head = head.map_or(0, |head| head.index);
        let answers = self.ask(&members, false).await;
        let member = |member: &disk::EtcdMember| {
            let itself = member.node_id == self.node_id;
            let said = answers.get(&member.node_id);
            MemberStatus {
                node_id: member.node_id,
                storage_id: Uuid::from_slice(&member.storage_id).unwrap_or_default(),
                peer_address: String::new(),
                api_address: member.api_address.clone(),
                voter: true,
                matched_index: if itself { Some(here.applied_index) } else { said.map(|said| said.applied_index) },
                heard_ms: (itself || said.is_some()).then_some(0),
                trouble: (!itself && said.is_none()).then(|| "it did not answer in time".to_owned()),
            }
        };
        Ok(ClusterStatus {
            leader,
            term: writer.map_or(0, |writer| writer.create_revision.unsigned_abs()),
            last_log_index: head,
            committed_index: head,
            members: members.iter().map(member).collect(),
            ..here
        })
    }
}
