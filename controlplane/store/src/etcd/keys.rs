//! Where everything lies in etcd. All of a fleet's keys begin with one prefix, so that fleets can share an etcd cluster.

use std::fmt::Display;

use smg_services::etcd as pb;
use smg_state::NodeId;
use uuid::Uuid;

/// The keys of a fleet.
#[derive(Debug, Clone)]
pub(crate) struct Keys {
    prefix: String,
}

impl Keys {
    /// Those under a prefix.
    pub fn new(prefix: &str) -> Self {
        Self { prefix: format!("{}/", prefix.trim_end_matches('/')) }
    }

    fn key(&self, name: impl Display) -> Vec<u8> {
        format!("{}{name}", self.prefix).into_bytes()
    }

    /// Where all of them lie.
    pub fn all(&self) -> Vec<u8> {
        self.key("")
    }

    /// The number of the last entry.
    pub fn head(&self) -> Vec<u8> {
        self.key("head")
    }

    /// Who may append: exists while there is one, under that member's lease.
    pub fn writer(&self) -> Vec<u8> {
        self.key("writer")
    }

    /// The highest number that a member was given.
    pub fn last_member(&self) -> Vec<u8> {
        self.key("last-member")
    }

    /// The newest snapshot.
    pub fn snapshot(&self) -> Vec<u8> {
        self.key("snapshot")
    }

    /// Where entries lie, in their order.
    pub fn log(&self) -> Vec<u8> {
        self.key("log/")
    }

    /// An entry.
    pub fn entry(&self, index: u64) -> Vec<u8> {
        self.key(format_args!("log/{index:020}"))
    }

    /// Where the parts of snapshots lie.
    pub fn parts(&self) -> Vec<u8> {
        self.key("parts/")
    }

    /// Where the parts of a snapshot lie, in their order.
    pub fn parts_of(&self, index: u64) -> Vec<u8> {
        self.key(format_args!("parts/{index:020}/"))
    }

    /// A part of a snapshot.
    pub fn part(&self, index: u64, number: usize) -> Vec<u8> {
        self.key(format_args!("parts/{index:020}/{number:06}"))
    }

    /// Where commands wait for the writer.
    pub fn queue(&self) -> Vec<u8> {
        self.key("queue/")
    }

    /// A command that waits.
    pub fn waiting(&self, attempt: Uuid) -> Vec<u8> {
        self.key(format_args!("queue/{attempt}"))
    }

    /// Where members are listed, each under its lease.
    pub fn members(&self) -> Vec<u8> {
        self.key("members/")
    }

    /// A member.
    pub fn member(&self, node_id: NodeId) -> Vec<u8> {
        self.key(format_args!("members/{node_id:020}"))
    }

    /// Where questions to all members lie.
    pub fn questions(&self) -> Vec<u8> {
        self.key("questions/")
    }

    /// A question.
    pub fn question(&self, id: Uuid) -> Vec<u8> {
        self.key(format_args!("questions/{id}"))
    }

    /// Where the answers to a question lie.
    pub fn answers(&self, id: Uuid) -> Vec<u8> {
        self.key(format_args!("answers/{id}/"))
    }

    /// A member's answer.
    pub fn answer(&self, id: Uuid, node_id: NodeId) -> Vec<u8> {
        self.key(format_args!("answers/{id}/{node_id:020}"))
    }
}

/// What comes after the last path segment of a key.
pub(crate) fn name(key: &[u8]) -> &str {
    std::str::from_utf8(key).ok().and_then(|key| key.rsplit('/').next()).unwrap_or_default()
}

/// The end of a range of all keys below a path, which ends with a slash.
pub(crate) fn below(path: &[u8]) -> Vec<u8> {
    let mut end = path.to_vec();
    if let Some(last) = end.last_mut() {
        // `/` is followed by `0`.
        *last += 1;
    }
    end
}

/// Asks for one key.
pub(crate) fn one(key: Vec<u8>) -> pb::RangeRequest {
    pb::RangeRequest { key, ..pb::RangeRequest::default() }
}

/// Asks for the keys from one on that lie below a path, in their order.
pub(crate) fn from(key: Vec<u8>, path: &[u8], limit: i64) -> pb::RangeRequest {
    use pb::range_request::SortOrder;
    pb::RangeRequest { key, range_end: below(path), limit, sort_order: SortOrder::Ascend as i32, sort_target: 0 }
}

/// Asks for all keys below a path, in the order in which they were written.
pub(crate) fn oldest_first(path: Vec<u8>, limit: i64) -> pb::RangeRequest {
    use pb::range_request::SortTarget;
    pb::RangeRequest { sort_target: SortTarget::Create as i32, ..from(path.clone(), &path, limit) }
}

/// Holds if the key was created at this revision; 0 = it does not exist.
pub(crate) fn created_at(key: Vec<u8>, revision: i64) -> pb::Compare {
    use pb::compare::{CompareTarget, TargetUnion};
    pb::Compare {
        target: CompareTarget::Create as i32,
        key,
        target_union: Some(TargetUnion::CreateRevision(revision)),
        ..pb::Compare::default()
    }
}

/// Holds if the key was changed at this revision last; 0 = it does not exist.
pub(crate) fn changed_at(key: Vec<u8>, revision: i64) -> pb::Compare {
    use pb::compare::{CompareTarget, TargetUnion};
    pb::Compare {
        target: CompareTarget::Mod as i32,
        key,
        target_union: Some(TargetUnion::ModRevision(revision)),
        ..pb::Compare::default()
    }
}

/// A step of a transaction.
pub(crate) fn read(range: pb::RangeRequest) -> pb::RequestOp {
    pb::RequestOp { request: Some(pb::request_op::Request::RequestRange(range)) }
}

/// A step of a transaction.
pub(crate) fn write(key: Vec<u8>, value: Vec<u8>, lease: i64) -> pb::RequestOp {
    pb::RequestOp { request: Some(pb::request_op::Request::RequestPut(pb::PutRequest { key, value, lease })) }
}

/// A step of a transaction: deletes a key, or a range when there is an end.
pub(crate) fn remove(key: Vec<u8>, range_end: Vec<u8>) -> pb::RequestOp {
    let range = pb::DeleteRangeRequest { key, range_end };
    pb::RequestOp { request: Some(pb::request_op::Request::RequestDeleteRange(range)) }
}

/// What a transaction read, in the order of its reads.
pub(crate) fn reads(answer: pb::TxnResponse) -> impl Iterator<Item = pb::RangeResponse> {
    answer.responses.into_iter().filter_map(|step| match step.response {
        Some(pb::response_op::Response::ResponseRange(range)) => Some(range),
        _ => None,
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn keys_of_one_kind_lie_in_their_order_and_apart_from_those_of_others() {
        let keys = Keys::new("/fleets/a/");
        assert_eq!(keys.entry(7), b"/fleets/a/log/00000000000000000007");
        assert!(keys.entry(9) < keys.entry(10) && keys.entry(u64::MAX) < below(&keys.log()));
        assert!(keys.part(1, 9) < keys.part(1, 10) && keys.part(1, 10) < below(&keys.parts_of(1)));
        assert!(below(&keys.parts_of(1)) < keys.part(2, 0));
        assert_eq!(Keys::new("/fleets/a").head(), keys.head());
        assert_eq!(name(&keys.entry(7)).parse::<u64>().unwrap(), 7);
    }
}
