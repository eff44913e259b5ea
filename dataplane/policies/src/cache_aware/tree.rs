//! The record of prompts: a radix tree whose nodes know which workers hold the KV of the prefix that ends there.
//!
//! Every partition has a root of its own. A node's label is the part of a prompt, in bytes, between its parent and itself;
//! siblings differ in the first byte.
//!
//! Invariants:
//! - A worker that holds a node holds its parent: holders only shrink from the root down.
//! - `bytes` is what all nodes cost, and never exceeds the limit after an insertion. The leaf used longest ago goes first;
//!   a node whose last child goes is a leaf as old as the later of its own last use and that child.
//! - The list of leaves holds exactly the nodes without children.
//! - A node with one child has more holders than that child, or is a root: whatever prompts come and go, a path has no more
//!   nodes than it has branches and changes of holders.

use smallvec::SmallVec;

use super::holders::{Holders, Slots};
use crate::WorkerKey;
use crate::fingerprint::KeyMap;
use crate::lru::LruList;

/// No node.
const NONE: u32 = u32::MAX;

/// What a node costs beside its label: itself, its links, its place among its parent's children (which may be half empty),
/// and the allocator's rounding of two blocks.
const NODE_BYTES: usize = size_of::<Node>() + 8 + 2 * size_of::<(u8, u32)>() + 32;

/// A prompt may take this share of the limit; the rest of a longer one is not recorded.
const LARGEST_PROMPT: usize = 16;

#[derive(Debug)]
struct Node {
    label: Box<[u8]>,
    /// [`NONE`] for a root.
    parent: u32,
    /// By first byte, ascending.
    children: Vec<(u8, u32)>,
    holders: Holders,
    /// When a prompt last ended here.
    used: u64,
}

impl Node {
    fn bytes(&self) -> usize {
        NODE_BYTES + self.label.len() + self.holders.heap_bytes()
    }

    fn child(&self, byte: u8) -> Result<usize, usize> {
        self.children.binary_search_by_key(&byte, |(first, _)| *first)
    }
}

/// How far a prompt is known.
#[derive(Debug, Default)]
pub(super) struct Path {
    /// From the root: the node, and how many bytes of the prompt are matched with it. The last may be matched in part.
    steps: SmallVec<[(u32, usize); 16]>,
}

/// The radix tree.
#[derive(Debug)]
pub(super) struct Tree {
    nodes: Vec<Node>,
    free: Vec<u32>,
    roots: KeyMap<u32>,
    leaves: LruList,
    slots: Slots,
    label_bytes: usize,
    bytes: usize,
    limit: usize,
    clock: u64,
}

impl Tree {
    /// An empty tree that may take `limit` bytes.
    pub(super) fn new(limit: usize) -> Self {
        Self {
            nodes: Vec::new(),
            free: Vec::new(),
            roots: KeyMap::default(),
            leaves: LruList::default(),
            slots: Slots::default(),
            label_bytes: 0,
            bytes: 0,
            limit,
            clock: 0,
        }
    }

    /// The part of a prompt that is recorded.
    pub(super) fn recorded<'a>(&self, prompt: &'a [u8]) -> &'a [u8] {
        &prompt[..prompt.len().min(self.limit / LARGEST_PROMPT)]
    }

    /// Follows `prompt` as far as it is known.
    pub(super) fn walk(&self, partition: u128, prompt: &[u8]) -> Path {
        let mut path = Path::default();
        let Some(root) = self.roots.get(&partition) else { return path };
        let (mut node, mut end) = (*root, 0);
        path.steps.push((node, end));
        while let Some(byte) = prompt.get(end) {
            let parent = &self.nodes[node as usize];
            let Ok(place) = parent.child(*byte) else { break };
            node = parent.children[place].1;
            let label = &self.nodes[node as usize].label;
            // The first byte is the child's name: a label of one byte is not even read.
            let common = 1 + common_prefix(label.get(1..).unwrap_or_default(), &prompt[end + 1..]);
            end += common;
            path.steps.push((node, end));
            if common < label.len() {
                break;
            }
        }
        path
    }

    /// The longest part of the prompt that any of these workers holds, in bytes, and which of them hold it.
    pub(super) fn longest_match(
        &self,
        path: &Path,
        workers: impl Iterator<Item = WorkerKey>,
    ) -> (usize, SmallVec<[bool; 32]>) {
        let slots: SmallVec<[Option<u32>; 32]> = workers.map(|worker| self.slots.get(worker)).collect();
        for (node, end) in path.steps.iter().rev() {
            let holders = &self.nodes[*node as usize].holders;
            let held = |slot: &Option<u32>| slot.is_some_and(|slot| holders.contains(slot));
            if slots.iter().any(held) {
                return (*end, slots.iter().map(held).collect());
            }
        }
        (0, SmallVec::from_elem(false, slots.len()))
    }

    /// Records that `worker` holds `prompt`, whose path this is in the tree as it stands.
    pub(super) fn insert(&mut self, mut path: Path, partition: u128, prompt: &[u8], worker: WorkerKey) {
        if path.steps.is_empty() {
            let root = self.add(Node {
                label: partition.to_le_bytes().into(),
                parent: NONE,
                children: Vec::new(),
                holders: Holders::default(),
                used: 0,
            });
            self.leaves.push_newest(root);
            self.roots.insert(partition, root);
            path.steps.push((root, 0));
        }
        let slot = self.slots.get_or_assign(worker);
        let deepest = self.extend(&mut path, prompt, slot);
        for (node, _) in path.steps.iter().rev() {
            let gained = self.hold(*node, slot);
            // The node below may have gained this holder, and then be like this one.
            self.merge_if_alike(*node);
            if !gained {
                // Whoever holds a node holds all above it.
                break;
            }
        }
        self.clock += 1;
        self.nodes[deepest as usize].used = self.clock;
        if self.nodes[deepest as usize].children.is_empty() {
            self.leaves.touch(deepest);
        }
        while self.bytes > self.limit {
            let Some(oldest) = self.leaves.oldest() else { break };
            self.remove_leaf(oldest);
        }
    }

    /// Forgets all workers but those to be kept, and whatever only they held.
    pub(super) fn retain(&mut self, keep: impl Fn(WorkerKey) -> bool) {
        let removed = self.slots.retain(keep);
        if removed.is_empty() {
            return;
        }
        for node in &mut self.nodes {
            for slot in &removed {
                let before = node.holders.heap_bytes();
                node.holders.remove(*slot);
                self.bytes -= before - node.holders.heap_bytes();
            }
        }
        let unheld = |tree: &Self, node: u32| tree.nodes[node as usize].holders.is_empty();
        let mut orphans: Vec<u32> = self.leaves.iter().filter(|leaf| unheld(self, *leaf)).collect();
        while let Some(leaf) = orphans.pop() {
            if let Some(parent) = self.remove_leaf(leaf).filter(|parent| unheld(self, *parent)) {
                orphans.push(parent);
            }
        }
        for node in 0..self.nodes.len() as u32 {
            self.merge_if_alike(node);
        }
    }

    /// Nodes.
    pub(super) fn len(&self) -> usize {
        self.nodes.len() - self.free.len()
    }

    /// Bytes of all nodes.
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Bytes of prompts among them.
    pub(super) fn label_bytes(&self) -> usize {
        self.label_bytes
    }

    /// Workers that were recorded and not forgotten.
    pub(super) fn workers(&self) -> usize {
        self.slots.len()
    }

    /// Makes the path end with a node that covers the prompt and nothing that `slot` does not hold; returns that node.
    fn extend(&mut self, path: &mut Path, prompt: &[u8], slot: u32) -> u32 {
        let Some((mut last, end)) = path.steps.pop() else { return NONE };
        let before = path.steps.last().map_or(0, |(_, end)| *end);
        let matched = end - before;
        let node = &self.nodes[last as usize];
        let held_whole = end == prompt.len() && node.holders.contains(slot);
        // The root matches nothing and is never split.
        if !path.steps.is_empty() && matched < node.label.len() && !held_whole {
            last = self.split(last, matched);
        }
        path.steps.push((last, end));
        if end < prompt.len() {
            let holders = Holders::default();
            let leaf =
                self.add(Node { label: prompt[end..].into(), parent: last, children: Vec::new(), holders, used: 0 });
            let parent = &mut self.nodes[last as usize];
            if parent.children.is_empty() {
                self.leaves.remove(last);
            }
            if let Err(place) = parent.child(prompt[end]) {
                parent.children.insert(place, (prompt[end], leaf));
            }
            self.leaves.push_newest(leaf);
            path.steps.push((leaf, prompt.len()));
            last = leaf;
        }
        last
    }

    /// Puts a node with the first `at` bytes of `node`'s label above it; returns the new node.
    fn split(&mut self, node: u32, at: usize) -> u32 {
        let lower = &mut self.nodes[node as usize];
        let (parent, holders, used) = (lower.parent, lower.holders.clone(), lower.used);
        let upper_label: Box<[u8]> = lower.label[..at].into();
        let lower_label: Box<[u8]> = lower.label[at..].into();
        let (first, middle) = (upper_label[0], lower_label[0]);
        // The bytes of the lower label are counted already; `add` counts those of the upper.
        self.label_bytes -= upper_label.len();
        self.bytes -= upper_label.len();
        lower.label = lower_label;
        let upper = self.add(Node { label: upper_label, parent, children: vec![(middle, node)], holders, used });
        self.nodes[node as usize].parent = upper;
        self.replace_child(parent, first, upper);
        upper
    }

    fn replace_child(&mut self, parent: u32, byte: u8, child: u32) {
        let parent = &mut self.nodes[parent as usize];
        if let Ok(place) = parent.child(byte) {
            parent.children[place].1 = child;
        }
    }

    /// Returns whether the node was not held before.
    fn hold(&mut self, node: u32, slot: u32) -> bool {
        let holders = &mut self.nodes[node as usize].holders;
        let (gained, before) = (!holders.contains(slot), holders.heap_bytes());
        holders.insert(slot);
        self.bytes += holders.heap_bytes() - before;
        gained
    }

    /// Removes a leaf; returns its parent if that is a leaf now.
    fn remove_leaf(&mut self, leaf: u32) -> Option<u32> {
        self.leaves.remove(leaf);
        let Node { label, parent, used, .. } = self.take(leaf);
        if parent == NONE {
            if let Ok(partition) = <[u8; 16]>::try_from(&*label) {
                self.roots.remove(&u128::from_le_bytes(partition));
            }
            return None;
        }
        let node = &mut self.nodes[parent as usize];
        if let Some(place) = label.first().and_then(|byte| node.child(*byte).ok()) {
            node.children.remove(place);
        }
        if !node.children.is_empty() {
            self.merge_if_alike(parent);
            return None;
        }
        if node.used > used {
            self.leaves.push_newest(parent);
        } else {
            node.used = used;
            self.leaves.push_oldest(parent);
        }
        Some(parent)
    }

    /// Joins a node with its only child if the same workers hold both. The child takes the place.
    fn merge_if_alike(&mut self, id: u32) {
        let node = &self.nodes[id as usize];
        if let [(_, child)] = *node.children
            && node.parent != NONE
            && node.holders == self.nodes[child as usize].holders
        {
            self.merge(id, child);
        }
    }

    /// Joins a node with its only child, which takes its place.
    fn merge(&mut self, node: u32, child: u32) {
        let Node { label, parent, used, .. } = self.take(node);
        let lower = &mut self.nodes[child as usize];
        self.label_bytes += label.len();
        self.bytes += label.len();
        lower.label = [&*label, &*lower.label].concat().into();
        lower.parent = parent;
        lower.used = lower.used.max(used);
        if let Some(first) = label.first() {
            self.replace_child(parent, *first, child);
        }
    }

    fn add(&mut self, node: Node) -> u32 {
        self.label_bytes += node.label.len();
        self.bytes += node.bytes();
        match self.free.pop() {
            Some(id) => {
                self.nodes[id as usize] = node;
                id
            }
            None => {
                self.nodes.push(node);
                (self.nodes.len() - 1) as u32
            }
        }
    }

    /// Takes a node out and leaves its place free.
    fn take(&mut self, id: u32) -> Node {
        let vacant =
            Node { label: Box::default(), parent: NONE, children: Vec::new(), holders: Holders::default(), used: 0 };
        let node = std::mem::replace(&mut self.nodes[id as usize], vacant);
        self.free.push(id);
        self.label_bytes -= node.label.len();
        self.bytes -= node.bytes();
        node
    }
}

/// How many bytes two slices have in common at their start.
fn common_prefix(one: &[u8], other: &[u8]) -> usize {
    const CHUNK: usize = 32;
    let equal = one.chunks_exact(CHUNK).zip(other.chunks_exact(CHUNK)).take_while(|(one, other)| one == other);
    let start = equal.count() * CHUNK;
    start + one[start..].iter().zip(&other[start..]).take_while(|(one, other)| one == other).count()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
impl Tree {
    /// Panics if an invariant does not hold.
    pub(super) fn check(&self) {
        let free: std::collections::HashSet<_> = self.free.iter().collect();
        let live: Vec<u32> = (0..self.nodes.len() as u32).filter(|id| !free.contains(id)).collect();
        let mut leaves: Vec<u32> = self.leaves.iter().collect();
        leaves.sort_unstable();
        let childless = |id: &u32| self.nodes[*id as usize].children.is_empty();
        assert_eq!(leaves, live.iter().copied().filter(childless).collect::<Vec<_>>());
        assert_eq!(self.bytes, live.iter().map(|id| self.nodes[*id as usize].bytes()).sum::<usize>());
        assert_eq!(self.label_bytes, live.iter().map(|id| self.nodes[*id as usize].label.len()).sum::<usize>());
        assert!(self.bytes <= self.limit);
        for id in live {
            let node = &self.nodes[id as usize];
            assert!(!node.label.is_empty() && !node.holders.is_empty());
            assert!(node.children.is_sorted());
            for (byte, child) in &node.children {
                let child = &self.nodes[*child as usize];
                assert_eq!((child.parent, child.label[0]), (id, *byte));
                assert!(node.holders.includes(&child.holders));
                assert!(node.parent == NONE || node.children.len() > 1 || node.holders != child.holders);
            }
            if node.parent == NONE {
                let partition = u128::from_le_bytes((*node.label).try_into().unwrap());
                assert_eq!(self.roots.get(&partition), Some(&id));
            }
        }
    }
}
