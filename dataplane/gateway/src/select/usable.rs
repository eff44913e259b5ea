//! The workers of a leg that can serve, by how willingly they are chosen.

use smallvec::SmallVec;

use crate::decision::Exclusion;
use crate::fleet::table::ModelPool;
use crate::fleet::worker::Standing;

/// Places in a list of workers.
pub(super) type Indices = SmallVec<[usize; 32]>;

/// The usable workers of a leg by how willingly they are chosen: positions, ascending.
#[derive(Debug, Default)]
pub(super) struct Usable {
    pub(super) fine: Indices,
    pub(super) paced: Indices,
    pub(super) overloaded: Indices,
}

impl Usable {
    /// Whether there is none.
    pub(super) fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// How many there are.
    pub(super) fn len(&self) -> usize {
        self.fine.len() + self.paced.len() + self.overloaded.len()
    }

    /// Those that are chosen most willingly.
    pub(super) fn best(&self) -> (Indices, Standing) {
        if !self.fine.is_empty() {
            (self.fine.clone(), Standing::Fine)
        } else if !self.paced.is_empty() {
            (self.paced.clone(), Standing::Paced)
        } else {
            (self.overloaded.clone(), Standing::Overloaded)
        }
    }

    /// Passes over prefill workers that run as many prefill phases as they may. Returns whether there were any.
    pub(super) fn keep_those_with_room(&mut self, pool: &ModelPool, exclusions: &mut Vec<Exclusion>) -> bool {
        let before = self.len();
        for indices in [&mut self.fine, &mut self.paced, &mut self.overloaded] {
            indices.retain(|index| {
                let worker = &pool.prefills[*index].worker;
                let full = worker.is_full();
                if full {
                    exclusions.push(Exclusion { worker: worker.url.as_str().to_owned(), reason: "prefill_full" });
                }
                !full
            });
        }
        self.len() < before
    }

    /// All of them, or all but the overloaded ones.
    pub(super) fn up_to(&self, standing: Standing) -> Indices {
        let mut all = self.fine.clone();
        all.extend_from_slice(&self.paced);
        if standing == Standing::Overloaded {
            all.extend_from_slice(&self.overloaded);
        }
        all.sort_unstable();
        all
    }
}
