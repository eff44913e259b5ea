//! Which change of the membership comes next: a pure function of what the leader sees.
//!
//! What is wanted: every registered member is in the membership at its address; retired ones are not; as many of those that keep up are
//! voters as make an odd number, at most [`MAX_VOTERS`]. An even number survives no more failures than the odd one below it, so the second
//! member of a cluster follows until the third has caught up, and both become voters in one step.
//!
//! Never: a set of voters of which too few answer now, or none at all.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use smg_state::{Member, NodeId};

use super::types::Peer;
use crate::cluster::{ChangeError, MAX_VOTERS, MemberChange, Refusal};

/// What the leader sees.
#[derive(Debug, Clone, Default)]
pub(crate) struct View {
    /// The voters of the membership.
    pub voters: BTreeSet<NodeId>,
    /// All members of the membership.
    pub peers: BTreeMap<NodeId, Peer>,
    /// The registry, retired members included.
    pub registered: Vec<Arc<Member>>,
    /// Who answered lately; the leader too.
    pub reachable: BTreeSet<NodeId>,
    /// Who has the log up to a few entries and answered lately.
    pub caught_up: BTreeSet<NodeId>,
    /// Who has been caught up for so long that it may become a voter by itself.
    pub settled: BTreeSet<NodeId>,
}

fn refuse<T>(code: Refusal, message: impl Into<String>) -> Result<T, ChangeError> {
    Err(ChangeError::refused(code, message))
}

/// One change of the membership.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Step {
    /// New members that follow.
    Add(BTreeMap<NodeId, Peer>),
    /// New addresses of members.
    Move(BTreeMap<NodeId, Peer>),
    /// Members that follow no longer.
    Forget(BTreeSet<NodeId>),
    /// Another set of voters. Voters that are not in it leave.
    Voters(BTreeSet<NodeId>),
}

impl View {
    fn retired(&self) -> BTreeSet<NodeId> {
        self.registered.iter().filter(|member| member.retired).map(|member| member.node_id).collect()
    }

    fn learners(&self) -> BTreeSet<NodeId> {
        self.peers.keys().copied().filter(|id| !self.voters.contains(id)).collect()
    }

    /// Whether a set of voters could commit something now.
    fn survives(&self, voters: &BTreeSet<NodeId>) -> bool {
        voters.intersection(&self.reachable).count() > voters.len() / 2
    }

    /// `base` and as many of `candidates` as make an odd number; `base` itself when none do.
    fn fill(base: &BTreeSet<NodeId>, candidates: impl Iterator<Item = NodeId>) -> BTreeSet<NodeId> {
        let candidates: Vec<NodeId> = candidates.collect();
        let room = MAX_VOTERS.saturating_sub(base.len()).min(candidates.len());
        let most = (0..=room).rev().find(|count| (base.len() + count) % 2 == 1).unwrap_or(0);
        base.iter().copied().chain(candidates.into_iter().take(most)).collect()
    }

    /// The voters that follow from `leaving`.
    fn voters_without(&self, leaving: &BTreeSet<NodeId>) -> BTreeSet<NodeId> {
        let base: BTreeSet<NodeId> = self.voters.difference(leaving).copied().collect();
        let candidates = self.learners().into_iter().filter(|id| self.settled.contains(id) && !leaving.contains(id));
        Self::fill(&base, candidates)
    }

    /// The next step; `None` when there is nothing to do, or nothing that is safe.
    pub fn next(&self) -> Option<Step> {
        let retired = self.retired();
        let active = || self.registered.iter().filter(|member| !member.retired);
        let peer = |member: &Member| Peer { address: member.peer_address.clone(), storage_id: member.storage_id };
        let missing: BTreeMap<NodeId, Peer> = active()
            .filter(|member| !self.peers.contains_key(&member.node_id))
            .map(|member| (member.node_id, peer(member)))
            .collect();
        if !missing.is_empty() {
            return Some(Step::Add(missing));
        }
        let moved: BTreeMap<NodeId, Peer> = active()
            .map(|member| (member.node_id, peer(member)))
            .filter(|(id, peer)| self.peers.get(id).is_some_and(|known| known != peer))
            .collect();
        if !moved.is_empty() {
            return Some(Step::Move(moved));
        }
        let voters = self.voters_without(&retired);
        if voters != self.voters && !voters.is_empty() && self.survives(&voters) {
            return Some(Step::Voters(voters));
        }
        let gone: BTreeSet<NodeId> = self.learners().intersection(&retired).copied().collect();
        (!gone.is_empty()).then_some(Step::Forget(gone))
    }

    /// What an operator's change leads to: who leaves for good, and the voters after it.
    ///
    /// # Errors
    /// The refusal, when the change is unsafe or makes no sense.
    pub fn check(&self, change: &MemberChange) -> Result<(BTreeSet<NodeId>, BTreeSet<NodeId>), ChangeError> {
        let known = |id: &NodeId| match self.peers.contains_key(id) {
            true => Ok(()),
            false => refuse(Refusal::NotAMember, format!("there is no member {id}")),
        };
        let (leaving, voters, allow_even) = match change {
            MemberChange::Promote { node_ids, allow_even } => {
                node_ids.iter().try_for_each(known)?;
                let new: BTreeSet<NodeId> = node_ids.iter().copied().filter(|id| !self.voters.contains(id)).collect();
                if new.is_empty() {
                    return refuse(Refusal::Already, "these members are voters already");
                }
                if let Some(behind) = new.iter().find(|id| !self.caught_up.contains(id)) {
                    return refuse(Refusal::NotCaughtUp, format!("member {behind} has not caught up yet"));
                }
                (BTreeSet::new(), self.voters.union(&new).copied().collect(), *allow_even)
            }
            MemberChange::Remove { node_ids, allow_even } => {
                node_ids.iter().try_for_each(known)?;
                let leaving: BTreeSet<NodeId> = node_ids.iter().copied().collect();
                if leaving.is_empty() {
                    return refuse(Refusal::Already, "no member is named");
                }
                let voters = self.voters_without(&leaving);
                (leaving, voters, *allow_even)
            }
            MemberChange::Replace { old, new } => {
                known(old)?;
                if !self.voters.contains(old) {
                    return refuse(Refusal::NotAMember, format!("member {old} is no voter: remove it instead"));
                }
                let new = match new {
                    Some(new) => *new,
                    None => {
                        let able: Vec<NodeId> = self.learners().intersection(&self.caught_up).copied().collect();
                        match able.as_slice() {
                            [one] => *one,
                            [] => {
                                let message =
                                    "no member has caught up that could take its place: start one with --join";
                                return refuse(Refusal::NotCaughtUp, message);
                            }
                            several => {
                                let message = format!("several members could take its place, name one of {several:?}");
                                return refuse(Refusal::NotCaughtUp, message);
                            }
                        }
                    }
                };
                known(&new)?;
                if self.voters.contains(&new) {
                    return refuse(Refusal::Already, format!("member {new} is a voter already"));
                }
                if !self.caught_up.contains(&new) {
                    return refuse(Refusal::NotCaughtUp, format!("member {new} has not caught up yet"));
                }
                let voters = self.voters.iter().copied().filter(|id| id != old).chain([new]).collect();
                // The number of voters stays what it is.
                (BTreeSet::from([*old]), voters, true)
            }
        };
        if voters.is_empty() {
            return refuse(Refusal::QuorumAtRisk, "a cluster needs at least one voter");
        }
        if voters.len() > MAX_VOTERS {
            return refuse(Refusal::TooManyVoters, format!("there would be more than {MAX_VOTERS} voters"));
        }
        if !self.survives(&voters) {
            let answering: Vec<NodeId> = voters.intersection(&self.reachable).copied().collect();
            let message = format!("of the voters {voters:?} that there would be, only {answering:?} answer now");
            return refuse(Refusal::QuorumAtRisk, message);
        }
        if voters != self.voters && voters.len().is_multiple_of(2) && !allow_even {
            let message =
                format!("there would be {} voters, which survive no more failures than one less", voters.len());
            return refuse(Refusal::EvenVoters, message);
        }
        Ok((leaving, voters))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use uuid::Uuid;

    use super::*;

    fn peer(id: NodeId) -> Peer {
        Peer { address: format!("h{id}:1"), storage_id: Uuid::from_u128(u128::from(id)) }
    }

    fn member(id: NodeId, retired: bool) -> Arc<Member> {
        let Peer { address, storage_id } = peer(id);
        Arc::new(Member { node_id: id, storage_id, peer_address: address, api_address: String::new(), retired })
    }

    /// Everybody answers and has caught up; the rest follow.
    fn view(voters: &[NodeId], learners: &[NodeId]) -> View {
        let all: BTreeSet<NodeId> = voters.iter().chain(learners).copied().collect();
        View {
            voters: voters.iter().copied().collect(),
            peers: all.iter().map(|id| (*id, peer(*id))).collect(),
            registered: all.iter().map(|id| member(*id, false)).collect(),
            reachable: all.clone(),
            caught_up: all.clone(),
            settled: all,
        }
    }

    fn voters(ids: &[NodeId]) -> Option<Step> {
        Some(Step::Voters(ids.iter().copied().collect()))
    }

    fn code<T: std::fmt::Debug>(result: Result<T, ChangeError>) -> Refusal {
        match result.unwrap_err() {
            ChangeError::Refused { code, .. } => code,
            other => unreachable!("{other:?}"),
        }
    }

    #[test]
    fn members_become_voters_when_they_make_an_odd_number() {
        assert_eq!(view(&[1], &[]).next(), None);
        assert_eq!(view(&[1], &[2]).next(), None);
        assert_eq!(view(&[1], &[2, 3]).next(), voters(&[1, 2, 3]));
        assert_eq!(view(&[1, 2, 3], &[4]).next(), None);
        assert_eq!(view(&[1, 2, 3], &[4, 5, 6]).next(), voters(&[1, 2, 3, 4, 5]));
        assert_eq!(view(&[1, 2, 3, 4, 5], &[6, 7]).next(), None);
        assert_eq!(view(&[1, 2], &[3]).next(), voters(&[1, 2, 3]), "an even number is mended");
        let mut young = view(&[1], &[2, 3]);
        young.settled.remove(&3);
        assert_eq!(young.next(), None);
    }

    #[test]
    fn the_membership_follows_the_registry() {
        let mut view = view(&[1, 2, 3], &[]);
        view.registered.push(member(4, false));
        assert_eq!(view.next(), Some(Step::Add([(4, peer(4))].into())));
        view.peers.insert(4, Peer { address: "old:1".into(), ..peer(4) });
        assert_eq!(view.next(), Some(Step::Move([(4, peer(4))].into())));
        view.peers.insert(4, peer(4));
        assert_eq!(view.next(), None);
        view.registered[3] = member(4, true);
        assert_eq!(view.next(), Some(Step::Forget([4].into())));
    }

    #[test]
    fn a_retired_voter_leaves_even_if_its_removal_was_interrupted() {
        let mut three = view(&[1, 2, 3], &[4]);
        three.registered[2] = member(3, true);
        three.reachable.remove(&3);
        assert_eq!(three.next(), voters(&[1, 2, 4]), "in one step with who takes its place");
        let mut alone = view(&[1, 2, 3], &[]);
        alone.registered[2] = member(3, true);
        assert_eq!(alone.next(), voters(&[1, 2]), "an operator allowed the even number");
        alone.reachable = [1].into();
        assert_eq!(alone.next(), None, "one of two would commit nothing");
    }

    #[test]
    fn a_change_that_would_lose_the_quorum_is_refused() {
        let mut view = view(&[1, 2, 3, 4, 5], &[]);
        view.reachable = [1, 2, 3].into();
        let remove = |node_ids: Vec<NodeId>| MemberChange::Remove { node_ids, allow_even: false };
        assert_eq!(code(view.check(&remove(vec![2, 3]))), Refusal::QuorumAtRisk);
        assert_eq!(code(view.check(&remove(vec![1, 2, 3, 4, 5]))), Refusal::QuorumAtRisk);
        let (leaving, voters) = view.check(&remove(vec![4, 5])).unwrap();
        assert_eq!((leaving, voters), ([4, 5].into(), [1, 2, 3].into()));
        assert_eq!(code(view.check(&remove(vec![9]))), Refusal::NotAMember);
    }

    #[test]
    fn an_even_number_of_voters_needs_the_operator_s_word() {
        let three = view(&[1, 2, 3], &[]);
        let remove = |allow_even| MemberChange::Remove { node_ids: vec![3], allow_even };
        assert_eq!(code(three.check(&remove(false))), Refusal::EvenVoters);
        assert_eq!(three.check(&remove(true)).unwrap().1, [1, 2].into());
        assert_eq!(
            view(&[1, 2, 3], &[4]).check(&remove(false)).unwrap().1,
            [1, 2, 4].into(),
            "a spare takes the place"
        );
        let four = view(&[1, 2, 3], &[4]);
        let promote = |allow_even| MemberChange::Promote { node_ids: vec![4], allow_even };
        assert_eq!(code(four.check(&promote(false))), Refusal::EvenVoters);
        assert_eq!(four.check(&promote(true)).unwrap().1, [1, 2, 3, 4].into());
        assert_eq!(code(view(&[1, 2, 3, 4], &[]).check(&promote(true))), Refusal::Already);
        let many = MemberChange::Promote { node_ids: vec![6, 7], allow_even: false };
        assert_eq!(code(view(&[1, 2, 3, 4, 5], &[6, 7]).check(&many)), Refusal::TooManyVoters);
    }

    #[test]
    fn a_voter_is_replaced_by_one_that_has_caught_up() {
        let mut view = view(&[1, 2, 3], &[4, 5]);
        view.reachable.remove(&3);
        let replace = |old, new| MemberChange::Replace { old, new };
        assert_eq!(code(view.check(&replace(3, None))), Refusal::NotCaughtUp, "two could");
        assert_eq!(view.check(&replace(3, Some(5))).unwrap(), ([3].into(), [1, 2, 5].into()));
        view.caught_up.remove(&5);
        assert_eq!(code(view.check(&replace(3, Some(5)))), Refusal::NotCaughtUp);
        assert_eq!(view.check(&replace(3, None)).unwrap().1, [1, 2, 4].into());
        assert_eq!(code(view.check(&replace(4, None))), Refusal::NotAMember);
        assert_eq!(code(view.check(&replace(3, Some(2)))), Refusal::Already);
        view.reachable = [1, 4].into();
        assert_eq!(view.check(&replace(3, None)).unwrap().1, [1, 2, 4].into());
        view.reachable = [1].into();
        assert_eq!(code(view.check(&replace(3, None))), Refusal::QuorumAtRisk);
    }
}
