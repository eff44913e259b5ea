//! The state as a backup holds it, and as the first state of a new history.
//!
//! * The keys of engines are taken out, to be sealed or left out; digests of tokens stay, since nothing can be guessed from them and a fleet
//!   without its tokens would be open.
//! * A restored state is one of another history: the same fleet, a revision later, no member of the old control plane in it but as retired.

use std::collections::BTreeMap;
use std::sync::Arc;

use smg_fleet::{Secret, Worker, WorkerId};
use uuid::Uuid;

use crate::departures::Departures;
use crate::members::{FOUNDER, Member, NodeId};
use crate::state::State;

/// The keys of one worker's engine.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct WorkerSecrets {
    /// The key in use.
    pub api_key: Option<Secret>,
    /// The key that an update job would install.
    pub proposed_api_key: Option<Secret>,
}

impl WorkerSecrets {
    fn take(worker: &mut Worker) -> Self {
        let proposed = worker.job.as_mut().and_then(|job| job.proposed.as_mut());
        Self { api_key: worker.spec.api_key.take(), proposed_api_key: proposed.and_then(|spec| spec.api_key.take()) }
    }

    fn put(&self, worker: &mut Worker) {
        worker.spec.api_key.clone_from(&self.api_key);
        if let Some(spec) = worker.job.as_mut().and_then(|job| job.proposed.as_mut()) {
            spec.api_key.clone_from(&self.proposed_api_key);
        }
    }
}

impl State {
    /// The state without the keys of engines, and those keys.
    pub fn without_secrets(&self) -> (State, BTreeMap<WorkerId, WorkerSecrets>) {
        let mut bare = self.clone();
        let mut secrets = BTreeMap::new();
        for (id, worker) in &mut bare.workers {
            let mut without = Worker::clone(worker);
            let taken = WorkerSecrets::take(&mut without);
            if taken != WorkerSecrets::default() {
                *worker = Arc::new(without);
                secrets.insert(*id, taken);
            }
        }
        (bare, secrets)
    }

    /// Puts the keys of engines back.
    pub fn put_secrets(&mut self, secrets: &BTreeMap<WorkerId, WorkerSecrets>) {
        for (id, secrets) in secrets {
            if let Some(worker) = self.workers.get_mut(id) {
                secrets.put(Arc::make_mut(worker));
            }
        }
    }

    /// The number of the one member that continues this state in another history: one that nobody ever had.
    pub fn next_founder(&self) -> NodeId {
        self.last_node_id.max(FOUNDER) + 1
    }

    /// The first state of another history, with one member. Those of the old one are retired.
    pub fn begin_anew(self, history_id: Uuid, storage_id: Uuid, peer_address: String) -> State {
        let node_id = self.next_founder();
        let mut state = self.begin_anew_elsewhere(history_id);
        let founder = Member { node_id, storage_id, peer_address, api_address: String::new(), retired: false };
        state.members.insert(node_id, Arc::new(founder));
        State { last_node_id: node_id, ..state }
    }

    /// The first state of another history, where members are not part of the state. Those of the old one are retired.
    ///
    /// Every field is named, so that whoever adds one decides what becomes of it here.
    pub fn begin_anew_elsewhere(self, history_id: Uuid) -> State {
        let retire = |member: Arc<Member>| Arc::new(Member { retired: true, ..Member::clone(&member) });
        let members = self.members.into_iter().map(|(id, member)| (id, retire(member))).collect();
        State {
            cluster_id: self.cluster_id,
            history_id,
            revision: self.revision + 1,
            workers: self.workers,
            by_url: self.by_url,
            policies: self.policies,
            tokens: self.tokens,
            settings: self.settings,
            settings_revision: self.settings_revision,
            members,
            last_node_id: self.last_node_id,
            ledger: Arc::new(self.ledger.begin_anew()),
            memory: self.memory,
            audit: self.audit,
            // Readers of another history start anew.
            departures: Departures::none_since(self.revision + 1),
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use smg_fleet::{Origin, WorkerSpec, WorkerType};

    use super::*;
    use crate::{Command, Envelope, codec};

    fn state() -> State {
        let mut state = State::default();
        let mut spec = WorkerSpec::new("http://p:1", WorkerType::Prefill);
        spec.api_key = Some("hush".into());
        let plain = WorkerSpec::new("http://d:1", WorkerType::Decode);
        let create = |n, spec| Command::CreateWorker {
            id: WorkerId(Uuid::from_u128(n)),
            spec: Box::new(spec),
            origin: Origin::Api,
        };
        let commands = [
            Command::InitCluster { cluster_id: Uuid::from_u128(7), history_id: Uuid::from_u128(8) },
            Command::RegisterMember {
                node_id: None,
                storage_id: Uuid::from_u128(9),
                peer_address: "a:1".into(),
                api_address: "a:2".into(),
            },
            create(1, spec),
            create(2, plain),
        ];
        for (n, command) in commands.into_iter().enumerate() {
            let envelope = Envelope {
                command_id: Uuid::from_u128(100 + n as u128),
                actor: "test".into(),
                proposed_at_unix_ms: 1,
                expected_revision: None,
                command,
            };
            state.apply(&envelope).accepted().unwrap();
        }
        state
    }

    #[test]
    fn keys_are_taken_out_and_put_back() {
        let whole = state();
        let (mut bare, secrets) = whole.without_secrets();
        let bytes = codec::encode_state(&bare);
        assert!(!bytes.windows(4).any(|window| window == b"hush"));
        assert_eq!(secrets.len(), 1);
        bare.put_secrets(&secrets);
        assert_eq!(bare, whole);
    }

    #[test]
    fn a_new_history_has_one_member_and_the_same_fleet() {
        let old = state();
        let new = old.clone().begin_anew(Uuid::from_u128(80), Uuid::from_u128(90), "b:1".into());
        assert_eq!((new.cluster_id(), new.history_id()), (old.cluster_id(), Uuid::from_u128(80)));
        assert_eq!(new.revision(), old.revision() + 1);
        let members: Vec<_> = new.members().map(|member| (member.node_id, member.retired)).collect();
        assert_eq!(members, [(2, true), (3, false)]);
        assert!(new.workers().eq(old.workers()));
        assert!(new.ledger().rounds() > old.ledger().rounds(), "who holds slots has changed since the copy was made");
        assert_eq!(codec::decode_state(&codec::encode_state(&new)).unwrap(), new);
    }
}
