//! The registry of the control plane's members.
//!
//! Problem: a member whose disk was wiped would, under its old number, vote a second time in a term in which it has voted already, and
//! could forget entries that it has acknowledged. So a member is a number *and* a disk: the log gives each disk a number of its own, and
//! no number twice. Retired members stay listed: whoever comes back with one of their disks is told so.

use std::sync::Arc;

use uuid::Uuid;

use crate::apply::{Effect, reject};
use crate::command::{Rejection, RejectionCode};
use crate::state::State;

/// The number of a member, never given out twice.
pub type NodeId = u64;

/// The member that founds a cluster. All others get their number from the log.
pub const FOUNDER: NodeId = 1;
/// Most members at a time.
pub const MAX_MEMBERS: usize = 32;
/// Longest address, in bytes.
const MAX_ADDRESS_BYTES: usize = 256;

/// One member of the control plane.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Member {
    /// Its number.
    pub node_id: NodeId,
    /// Its disk.
    pub storage_id: Uuid,
    /// `HOST:PORT` at which other members reach it.
    pub peer_address: String,
    /// `HOST:PORT` at which operators and gateways reach it; may be empty.
    pub api_address: String,
    /// Whether it was told to leave for good.
    pub retired: bool,
}

fn sound(address: &str) -> bool {
    address.len() <= MAX_ADDRESS_BYTES && !address.contains(|c: char| c.is_control() || c.is_whitespace())
}

impl State {
    /// Every member ever registered, in the order of their numbers.
    pub fn members(&self) -> impl Iterator<Item = &Arc<Member>> {
        self.members.values()
    }

    /// One member.
    pub fn member(&self, node_id: NodeId) -> Option<&Arc<Member>> {
        self.members.get(&node_id)
    }

    /// Registers a disk, or notes its new addresses. Without a number it gets the next one.
    pub(crate) fn register_member(
        &mut self,
        node_id: Option<NodeId>,
        storage_id: Uuid,
        peer_address: &str,
        api_address: &str,
    ) -> Result<Effect, Rejection> {
        if storage_id.is_nil() || peer_address.is_empty() || !sound(peer_address) || !sound(api_address) {
            return reject(RejectionCode::Invalid, "a member needs a disk and a HOST:PORT for other members");
        }
        let known = self.members.values().find(|member| member.storage_id == storage_id).cloned();
        let node_id = match (known, node_id) {
            (Some(known), _) if known.retired => {
                let message = format!("member {} was removed for good: start it anew on an empty disk", known.node_id);
                return reject(RejectionCode::MemberRetired, message);
            }
            (Some(known), asked) if asked.is_some_and(|asked| asked != known.node_id) => {
                return reject(RejectionCode::Invalid, format!("this disk is that of member {}", known.node_id));
            }
            (Some(known), _) => {
                let unchanged = known.peer_address == peer_address && known.api_address == api_address;
                if unchanged {
                    return Ok(Effect::on_member(known.node_id));
                }
                known.node_id
            }
            (None, Some(asked)) if self.members.contains_key(&asked) => {
                let message = format!("member {asked} has another disk: a wiped member comes back only as a new one");
                return reject(RejectionCode::Invalid, message);
            }
            (None, Some(asked)) => asked,
            (None, None) => self.last_node_id.max(FOUNDER) + 1,
        };
        let others = self.members.values().filter(|member| !member.retired && member.node_id != node_id).count();
        if others >= MAX_MEMBERS {
            return reject(RejectionCode::Limit, format!("the control plane already has {MAX_MEMBERS} members"));
        }
        let member = Member {
            node_id,
            storage_id,
            peer_address: peer_address.to_owned(),
            api_address: api_address.to_owned(),
            retired: false,
        };
        self.last_node_id = self.last_node_id.max(node_id);
        self.members.insert(node_id, Arc::new(member));
        Ok(Effect::on_member(node_id))
    }

    /// Retires members, all of them or none.
    pub(crate) fn retire_members(&mut self, node_ids: &[NodeId]) -> Result<Effect, Rejection> {
        if let Some(unknown) = node_ids.iter().find(|node_id| !self.members.contains_key(node_id)) {
            return reject(RejectionCode::MemberNotFound, format!("there is no member {unknown}"));
        }
        for node_id in node_ids {
            if let Some(member) = self.members.get_mut(node_id) {
                Arc::make_mut(member).retired = true;
            }
        }
        Ok(Effect::none(None))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::codec::{decode_state, encode_state};
    use crate::{Command, Envelope, Outcome};

    fn apply(state: &mut State, command: Command) -> Result<Outcome, Rejection> {
        let envelope = Envelope {
            command_id: Uuid::from_u128(
                1 + u128::from(state.revision()) + ((state.memory.iter().count() as u128) << 64),
            ),
            actor: "test".into(),
            proposed_at_unix_ms: 1,
            expected_revision: None,
            command,
        };
        state.apply(&envelope).accepted()
    }

    fn register(state: &mut State, node_id: Option<NodeId>, disk: u128, address: &str) -> Result<u64, RejectionCode> {
        let command = Command::RegisterMember {
            node_id,
            storage_id: Uuid::from_u128(disk),
            peer_address: address.into(),
            api_address: "a:7400".into(),
        };
        match apply(state, command) {
            Ok(outcome) => Ok(outcome.node_id.unwrap()),
            Err(rejection) => Err(rejection.code),
        }
    }

    #[test]
    fn each_disk_gets_a_number_of_its_own_and_no_number_is_given_out_twice() {
        let mut state = State::default();
        assert_eq!(register(&mut state, Some(FOUNDER), 10, "a:1"), Ok(1));
        assert_eq!(register(&mut state, None, 11, "b:1"), Ok(2));
        assert_eq!(register(&mut state, None, 12, "c:1"), Ok(3));
        let revision = state.revision();
        assert_eq!(register(&mut state, None, 12, "c:1"), Ok(3), "asking again is the same question");
        assert_eq!(state.revision(), revision);
        apply(&mut state, Command::RetireMembers { node_ids: vec![3] }).unwrap();
        assert_eq!(register(&mut state, None, 13, "c:1"), Ok(4), "the address of a retired member, another disk");
        assert_eq!(decode_state(&encode_state(&state)).unwrap(), state);
    }

    #[test]
    fn a_wiped_disk_cannot_take_the_number_of_the_old_one() {
        let mut state = State::default();
        register(&mut state, None, 11, "b:1").unwrap();
        assert_eq!(register(&mut state, Some(2), 99, "b:1"), Err(RejectionCode::Invalid));
        assert_eq!(register(&mut state, Some(7), 11, "b:1"), Err(RejectionCode::Invalid));
    }

    #[test]
    fn a_retired_disk_never_comes_back() {
        let mut state = State::default();
        register(&mut state, None, 11, "b:1").unwrap();
        apply(&mut state, Command::RetireMembers { node_ids: vec![2] }).unwrap();
        assert_eq!(register(&mut state, None, 11, "b:1"), Err(RejectionCode::MemberRetired));
        assert_eq!(register(&mut state, Some(2), 11, "elsewhere:1"), Err(RejectionCode::MemberRetired));
        let unknown = apply(&mut state, Command::RetireMembers { node_ids: vec![2, 9] }).unwrap_err();
        assert_eq!(unknown.code, RejectionCode::MemberNotFound);
    }

    #[test]
    fn a_member_may_move_to_another_address() {
        let mut state = State::default();
        register(&mut state, None, 11, "b:1").unwrap();
        assert_eq!(register(&mut state, Some(2), 11, "b:2"), Ok(2));
        assert_eq!(state.member(2).unwrap().peer_address, "b:2");
        assert_eq!(register(&mut state, None, 12, "no space"), Err(RejectionCode::Invalid));
    }
}
