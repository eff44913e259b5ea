//! Who gets a part of which worker at all.
//!
//! A hundred gateways cannot each hold a useful part of a worker that runs 32 requests. So each gateway belongs to some of the workers only:
//! as many as give it parts of [`LEAST_PART`] slots. Elsewhere it gets slots when it asks for some.
//!
//! Who belongs where is a pure function of the names, by rendezvous hashing: each worker takes the gateways that rank highest for it. A
//! gateway or worker that comes or goes moves few others.

use std::collections::{BTreeMap, BTreeSet};

use crate::WorkerKey;

/// Slots that make a part worth having.
pub const LEAST_PART: u32 = 8;

/// The gateways that belong to each worker. `windows`: workers and how many requests they run at a time.
pub fn members<'a>(
    gateways: &[&'a str],
    windows: impl Iterator<Item = (WorkerKey, u32)>,
) -> BTreeMap<WorkerKey, BTreeSet<&'a str>> {
    windows
        .map(|(worker, window)| {
            let places = ((window / LEAST_PART) as usize).max(1);
            if places >= gateways.len() {
                return (worker, gateways.iter().copied().collect());
            }
            let mut ranked: Vec<_> = gateways.iter().map(|gateway| (rank(worker, gateway), *gateway)).collect();
            ranked.sort_unstable();
            (worker, ranked.into_iter().take(places).map(|(_, gateway)| gateway).collect())
        })
        .collect()
}

/// FNV-1a with a final mix: the same on every replica, and good enough to spread names.
fn rank(worker: WorkerKey, gateway: &str) -> u64 {
    let bytes = worker.to_le_bytes().into_iter().chain(gateway.bytes());
    let hash =
        bytes.fold(0xcbf2_9ce4_8422_2325u64, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3));
    let hash = (hash ^ (hash >> 33)).wrapping_mul(0xff51_afd7_ed55_8ccd);
    hash ^ (hash >> 33)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn names(count: usize) -> Vec<String> {
        (0..count).map(|number| format!("gateway-{number}")).collect()
    }

    #[test]
    fn few_gateways_belong_everywhere() {
        let names = names(4);
        let gateways: Vec<_> = names.iter().map(String::as_str).collect();
        let members = members(&gateways, [(1, 32), (2, 64)].into_iter());
        assert!(members.values().all(|members| members.len() == 4));
    }

    #[test]
    fn many_gateways_share_the_workers_out_evenly() {
        let names = names(100);
        let gateways: Vec<_> = names.iter().map(String::as_str).collect();
        let members = members(&gateways, (0..500).map(|worker| (worker, 32)));
        assert!(members.values().all(|members| members.len() == 4), "parts of 8 slots");
        let mut count: BTreeMap<&str, usize> = BTreeMap::new();
        members.values().flatten().for_each(|gateway| *count.entry(gateway).or_default() += 1);
        let (least, most) = (count.values().min().unwrap(), count.values().max().unwrap());
        assert_eq!(count.len(), 100);
        assert!(*least >= 5 && *most <= 40, "20 workers each on average: {least} to {most}");
    }

    #[test]
    fn a_gateway_that_leaves_moves_nobody_else_away() {
        let names = names(20);
        let all: Vec<_> = names.iter().map(String::as_str).collect();
        let before = members(&all, (0..100).map(|worker| (worker, 32)));
        let after = members(&all[1..], (0..100).map(|worker| (worker, 32)));
        for (worker, members) in before {
            assert!(
                members.iter().filter(|gateway| **gateway != all[0]).all(|gateway| after[&worker].contains(gateway))
            );
        }
    }
}
