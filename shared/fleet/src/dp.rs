//! Data-parallel ranks as workers of their own (SMG worker API, DP expansion).
//!
//! An engine with several data-parallel ranks keeps the KV cache of each apart. With `dp_aware` a gateway chooses the rank, so every rank of
//! an engine is one worker to it: `{url}@{rank}`, with the labels `dp_base_url`, `dp_rank` and `dp_size`. Registration, health and removal
//! stay those of the engine: a rank is derived from it, never stored.
//!
//! Invariants
//! * the id of a rank follows from the engine's id and the rank, so that all gateways and all snapshots agree on it;
//! * an engine of one rank, or of unknown width, is one worker as before;
//! * the running window that an engine with data-parallel attention reports is split over its ranks; one that an operator wrote is not.

use std::collections::BTreeMap;
use std::sync::Arc;

use uuid::Uuid;

use crate::worker::{Worker, WorkerId};

/// Most ranks of one engine: what claims to have more is one worker.
pub const MAX_RANKS: u32 = 1024;
/// Labels of a running window.
const WINDOWS: [&str; 2] = ["max_running_requests", "max_num_seqs"];

/// How many ranks an engine has, by what it said or its operator wrote.
pub fn width(worker: &Worker) -> u32 {
    let size =
        |name: &str| worker.label(name).and_then(|text| text.parse::<u32>().ok()).filter(|size| *size > 0).unwrap_or(1);
    let width = size("dp_size").saturating_mul(size("attn_dp_size"));
    if width > MAX_RANKS || worker.facts.is_none() || worker.label("dp_rank").is_some() { 1 } else { width }
}

/// The id of one rank of an engine.
pub fn rank_id(engine: WorkerId, rank: u32) -> WorkerId {
    // The last 62 bits of an id are random: no two ids differ in the lowest ten of them only.
    WorkerId(Uuid::from_u128(engine.0.as_u128() ^ (u128::from(rank) + 1)))
}

/// The workers that requests are routed to: every rank of an engine, every other worker as it is. Without `aware` all as they are.
pub fn routed(workers: &BTreeMap<WorkerId, Arc<Worker>>, aware: bool) -> BTreeMap<WorkerId, Arc<Worker>> {
    if !aware {
        return workers.clone();
    }
    let mut routed = BTreeMap::new();
    for worker in workers.values() {
        for rank in ranks(worker) {
            routed.insert(rank.id, rank);
        }
    }
    routed
}

/// The ranks of an engine, or the worker itself if it is not several.
pub fn ranks(worker: &Arc<Worker>) -> Vec<Arc<Worker>> {
    match width(worker) {
        1 => vec![Arc::clone(worker)],
        width => (0..width).map(|rank| Arc::new(rank_of(worker, rank, width))).collect(),
    }
}

fn rank_of(engine: &Worker, rank: u32, width: u32) -> Worker {
    let mut worker = engine.clone();
    worker.id = rank_id(engine.id, rank);
    let splits = engine.label("attn_dp_size").is_some_and(|size| size != "1")
        || engine.label("enable_dp_attention") == Some("true");
    if let Some(facts) = &mut worker.facts {
        for name in WINDOWS {
            if let Some(window) = facts.labels.get_mut(name).filter(|_| splits)
                && let Ok(whole) = window.parse::<u64>()
            {
                *window = (whole / u64::from(width)).max(1).to_string();
            }
        }
        facts.labels.insert("dp_base_url".to_owned(), engine.spec.url.clone());
        facts.labels.insert("dp_rank".to_owned(), rank.to_string());
    }
    worker.spec.url = format!("{}@{rank}", engine.spec.url);
    worker
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::worker::{Facts, Health, Intent, Origin, WorkerSpec, WorkerType};

    fn engine(labels: &[(&str, &str)]) -> Arc<Worker> {
        let labels = labels.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
        Arc::new(Worker {
            id: WorkerId(Uuid::from_u128(0xFF00)),
            spec: WorkerSpec::new("http://e:1", WorkerType::Prefill),
            facts: Some(Facts { labels, ..Facts::default() }),
            health: Health::Ready,
            intent: Intent::Active,
            origin: Origin::Api,
            job: None,
            create_revision: 1,
            mod_revision: 1,
        })
    }

    #[test]
    fn every_rank_is_a_worker_with_an_id_of_its_own_and_the_engines_address() {
        let engine = engine(&[("dp_size", "2")]);
        let routed = routed(&[(engine.id, Arc::clone(&engine))].into(), true);
        let urls: Vec<_> = routed.values().map(|rank| rank.spec.url.as_str()).collect();
        assert_eq!(urls, ["http://e:1@0", "http://e:1@1"]);
        for (rank, (id, worker)) in routed.iter().enumerate() {
            assert_eq!(*id, rank_id(engine.id, rank as u32));
            assert_eq!(worker.url().unwrap().as_str(), "http://e:1");
            assert_eq!(worker.label("dp_rank"), Some(rank.to_string().as_str()));
            assert_eq!(worker.label("dp_base_url"), Some("http://e:1"));
        }
        assert_eq!(super::routed(&[(engine.id, Arc::clone(&engine))].into(), false).len(), 1);
    }

    #[test]
    fn one_rank_or_an_unknown_number_is_one_worker() {
        for labels in [&[][..], &[("dp_size", "1")], &[("dp_size", "x")], &[("dp_size", "0")], &[("dp_size", "99999")]]
        {
            assert_eq!(ranks(&engine(labels)).len(), 1, "{labels:?}");
        }
        assert_eq!(ranks(&engine(&[("dp_size", "2"), ("attn_dp_size", "2")])).len(), 4);
        assert_eq!(ranks(&engine(&[("dp_size", "4"), ("dp_rank", "1")])).len(), 1, "it is pinned already");
    }

    #[test]
    fn a_reported_window_is_split_and_an_operators_is_not() {
        let split = [("dp_size", "4"), ("enable_dp_attention", "true"), ("max_running_requests", "10")];
        assert_eq!(ranks(&engine(&split))[3].label("max_running_requests"), Some("2"));
        assert_eq!(ranks(&engine(&[split[0], split[2]]))[3].label("max_running_requests"), Some("10"));
        let mut own = Worker::clone(&engine(&split));
        own.spec.labels.insert("max_running_requests".into(), "10".into());
        assert_eq!(ranks(&Arc::new(own))[0].label("max_running_requests"), Some("10"));
    }
}
