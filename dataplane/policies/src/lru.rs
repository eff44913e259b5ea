//! A list of small numbers from the most to the least recently used, every operation in constant time.

/// The end of the list.
const END: u32 = u32::MAX;

/// Doubly linked list over the ids of a slab. An id is in the list at most once: the caller removes it before it adds it
/// again.
#[derive(Debug)]
pub(crate) struct LruList {
    links: Vec<Link>,
    newest: u32,
    oldest: u32,
}

#[derive(Debug, Clone, Copy)]
struct Link {
    newer: u32,
    older: u32,
}

impl Default for LruList {
    fn default() -> Self {
        Self { links: Vec::new(), newest: END, oldest: END }
    }
}

impl LruList {
    /// Adds `id` as the most recently used.
    pub(crate) fn push_newest(&mut self, id: u32) {
        let older = std::mem::replace(&mut self.newest, id);
        self.link(id, Link { newer: END, older });
    }

    /// Adds `id` as the least recently used.
    pub(crate) fn push_oldest(&mut self, id: u32) {
        let newer = std::mem::replace(&mut self.oldest, id);
        self.link(id, Link { newer, older: END });
    }

    /// Takes `id`, which is in the list, out of it.
    pub(crate) fn remove(&mut self, id: u32) {
        let Link { newer, older } = self.links[id as usize];
        self.set_older(newer, older);
        self.set_newer(older, newer);
    }

    /// Makes `id`, which is in the list, the most recently used.
    pub(crate) fn touch(&mut self, id: u32) {
        if self.newest != id {
            self.remove(id);
            self.push_newest(id);
        }
    }

    /// The least recently used.
    pub(crate) fn oldest(&self) -> Option<u32> {
        (self.oldest != END).then_some(self.oldest)
    }

    /// From the least to the most recently used.
    pub(crate) fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        std::iter::successors(self.oldest(), |id| {
            let newer = self.links[*id as usize].newer;
            (newer != END).then_some(newer)
        })
    }

    fn link(&mut self, id: u32, link: Link) {
        let slot = id as usize;
        if slot >= self.links.len() {
            self.links.resize(slot + 1, Link { newer: END, older: END });
        }
        self.links[slot] = link;
        self.set_older(link.newer, id);
        self.set_newer(link.older, id);
    }

    fn set_older(&mut self, of: u32, older: u32) {
        match self.links.get_mut(of as usize) {
            Some(link) if of != END => link.older = older,
            _ => self.newest = older,
        }
    }

    fn set_newer(&mut self, of: u32, newer: u32) {
        match self.links.get_mut(of as usize) {
            Some(link) if of != END => link.newer = newer,
            _ => self.oldest = newer,
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn the_list_behaves_like_a_deque(operations in prop::collection::vec((0_u32..20, 0_u8..3), 1..200)) {
            let mut list = LruList::default();
            let mut model = std::collections::VecDeque::new();
            for (id, operation) in operations {
                let known = model.contains(&id);
                match (operation, known) {
                    (0, true) => {
                        list.remove(id);
                        model.retain(|other| *other != id);
                    }
                    (_, true) => {
                        list.touch(id);
                        model.retain(|other| *other != id);
                        model.push_back(id);
                    }
                    (1, false) => {
                        list.push_oldest(id);
                        model.push_front(id);
                    }
                    (_, false) => {
                        list.push_newest(id);
                        model.push_back(id);
                    }
                }
                prop_assert_eq!(list.iter().collect::<Vec<_>>(), Vec::from(model.clone()));
                prop_assert_eq!(list.oldest(), model.front().copied());
            }
        }
    }
}
