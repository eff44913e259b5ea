//! The hash ring: a key's worker depends on the key and the candidates' URLs alone.
//!
//! Each URL owns [`VIRTUAL_NODES`] points of a circle of 64-bit numbers; a key belongs to the first point at or after its
//! own position. Removing a worker moves its keys and no others, which is why a ring over the workers that may be used
//! equals walking a ring over all of them to the first usable one.
//!
//! The hash (XXH3, a fixed function of its input) is part of the contract: all gateways of a fleet must place alike, across
//! versions too. The order of candidates plays no role.
//!
//! Rings are remembered per candidate set: at most [`MAX_RINGS`], of at most [`MAX_POINTS`] points together, the one used
//! longest ago goes first. A ring larger than that is kept alone.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::RwLock;
use xxhash_rust::xxh3::xxh3_64;

use crate::Candidate;
use crate::fingerprint::{KeyMap, fingerprint};

/// Points per URL.
pub const VIRTUAL_NODES: usize = 150;

/// Most rings that are remembered.
pub const MAX_RINGS: usize = 64;

/// Most points of all remembered rings, 16 bytes each.
const MAX_POINTS: usize = 1 << 19;

/// Where `bytes` lie on the circle.
pub(crate) fn position(bytes: &[u8]) -> u64 {
    xxh3_64(bytes)
}

/// A ring over one candidate set.
#[derive(Debug)]
pub(crate) struct Ring {
    /// Positions in ascending order, with the index of the candidate.
    points: Vec<(u64, u32)>,
}

impl Ring {
    fn new(candidates: &[Candidate<'_>]) -> Self {
        let mut points = Vec::with_capacity(candidates.len() * VIRTUAL_NODES);
        let mut name = Vec::new();
        for (candidate, index) in candidates.iter().zip(0_u32..) {
            for node in 0..VIRTUAL_NODES {
                name.clear();
                name.extend_from_slice(candidate.url.as_bytes());
                name.extend_from_slice(format!("#{node}").as_bytes());
                points.push((position(&name), index));
            }
        }
        // Should points of two URLs ever coincide, the URLs and not the order of candidates decide.
        points.sort_unstable_by_key(|(point, index)| (*point, candidates[*index as usize].url, *index));
        Self { points }
    }

    /// The candidate that owns `position`.
    pub(crate) fn owner(&self, position: u64) -> Option<usize> {
        let next = self.points.partition_point(|(point, _)| *point < position);
        self.points.get(next).or_else(|| self.points.first()).map(|(_, index)| *index as usize)
    }
}

/// The rings of the candidate sets in use.
#[derive(Debug, Default)]
pub(crate) struct Rings {
    known: RwLock<KeyMap<Known>>,
    /// Counts look-ups; tells which ring was used longest ago.
    clock: AtomicU64,
}

#[derive(Debug)]
struct Known {
    ring: Arc<Ring>,
    last_used: AtomicU64,
}

impl Rings {
    /// The ring over these candidates.
    pub(crate) fn of(&self, candidates: &[Candidate<'_>]) -> Arc<Ring> {
        let set = fingerprint(candidates, |candidate| u128::from(position(candidate.url.as_bytes())));
        let now = self.clock.fetch_add(1, Ordering::Relaxed);
        if let Some(known) = self.known.read().get(&set) {
            known.last_used.store(now, Ordering::Relaxed);
            return known.ring.clone();
        }
        let ring = Arc::new(Ring::new(candidates));
        let mut known = self.known.write();
        let points = |known: &KeyMap<Known>| known.values().map(|known| known.ring.points.len()).sum::<usize>();
        while !known.is_empty() && (known.len() >= MAX_RINGS || points(&known) + ring.points.len() > MAX_POINTS) {
            let oldest = known.iter().min_by_key(|(_, known)| known.last_used.load(Ordering::Relaxed));
            let Some(oldest) = oldest.map(|(set, _)| *set) else { break };
            known.remove(&oldest);
        }
        known.insert(set, Known { ring: ring.clone(), last_used: AtomicU64::new(now) });
        ring
    }

    /// How many rings are remembered.
    pub(crate) fn len(&self) -> usize {
        self.known.read().len()
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
mod tests {
    use super::*;

    fn candidates(urls: &[String]) -> Vec<Candidate<'_>> {
        urls.iter().zip(1..).map(|(url, id)| Candidate::new(id, url, 0)).collect()
    }

    fn urls(count: usize) -> Vec<String> {
        (0..count).map(|index| format!("http://10.0.0.{index}:30000")).collect()
    }

    #[test]
    fn positions_never_change_between_versions() {
        // The published test vectors of XXH3-64 with seed 0.
        assert_eq!(position(b""), 0x2D06_8005_38D3_94C2);
        let ring = Ring::new(&candidates(&urls(3)));
        assert_eq!(ring.points.len(), 3 * VIRTUAL_NODES);
        assert!(ring.points.is_sorted());
    }

    #[test]
    fn every_worker_owns_a_fair_share_of_the_circle() {
        let ring = Ring::new(&candidates(&urls(8)));
        let mut counts = [0_u32; 8];
        for key in 0..80_000_u32 {
            counts[ring.owner(position(&key.to_le_bytes())).unwrap()] += 1;
        }
        // 150 points a worker: the standard deviation of a share is about 8 %.
        assert!(counts.iter().all(|count| (6_500..13_500).contains(count)), "{counts:?}");
    }

    #[test]
    fn a_position_beyond_the_last_point_wraps_to_the_first() {
        let ring = Ring::new(&candidates(&urls(2)));
        assert_eq!(ring.owner(u64::MAX), ring.owner(0));
        assert_eq!(Ring::new(&[]).owner(7), None);
    }

    #[test]
    fn the_number_of_remembered_rings_and_their_points_is_bounded() {
        let rings = Rings::default();
        let fleet = urls(200);
        for index in 0..fleet.len() {
            rings.of(&candidates(&fleet[index..=index]));
            assert!(rings.len() <= MAX_RINGS);
        }
        let large: Vec<String> = (0..1800).map(|index| format!("http://large-{index}")).collect();
        rings.of(&candidates(&large));
        rings.of(&candidates(&large[1..]));
        // 270,000 points each: there is room for one.
        let points: usize = rings.known.read().values().map(|known| known.ring.points.len()).sum();
        assert!(points <= MAX_POINTS, "{points}");
    }
}
