//! Sticky sessions on any policy: the requests of one session go to one worker.
//!
//! A session is named by the routing key, else by what its requests' ids have in common. Its first request is placed by the policy
//! underneath, or as the assignment mode says, and pins the session. A pin whose worker is no candidate, or already runs
//! [`MAX_CONCURRENT`] requests of the session, is passed over: the request goes elsewhere and the session gets a second pin there.
//! Requests without a session are the policy's own.
//!
//! What runs is counted by [`Lease`]s: the caller takes one when it has claimed the chosen worker, and drops it with the request.

use std::sync::Arc;

use parking_lot::Mutex;
use smallvec::SmallVec;
use smg_fleet::policy::PolicyName;
use smg_fleet::tuning::AssignmentMode;

use crate::manual::ManualTuning;
use crate::pins::{Pins, assign, at, hashed, worker};
use crate::{Candidate, Footprint, Pick, Policy, RequestView, WorkerKey};

/// Requests of one session that may run on its worker before another gets the next.
pub const MAX_CONCURRENT: u32 = 2;

/// Requests in flight, by session and worker.
type Running = std::collections::HashMap<(u128, u64), u32>;

/// A policy under sessions that stay where they are.
#[derive(Debug)]
pub struct Sticky {
    inner: Box<dyn Policy>,
    tuning: ManualTuning,
    pins: Mutex<Pins>,
    running: Arc<Mutex<Running>>,
}

/// One request in flight. Dropping it ends it.
#[derive(Debug)]
pub struct Lease {
    running: Arc<Mutex<Running>>,
    place: (u128, u64),
}

impl Drop for Lease {
    fn drop(&mut self) {
        let mut running = self.running.lock();
        if let Some(count) = running.get_mut(&self.place) {
            *count -= 1;
            if *count == 0 {
                running.remove(&self.place);
            }
        }
    }
}

impl Sticky {
    /// `inner` under sticky sessions.
    pub fn new(inner: Box<dyn Policy>, tuning: ManualTuning) -> Self {
        Self { inner, tuning, pins: Mutex::default(), running: Arc::default() }
    }

    fn place(&self, candidates: &[Candidate<'_>], request: &RequestView<'_>, entropy: u64) -> Pick {
        match self.tuning.assignment {
            AssignmentMode::Delegate => self.inner.decide(candidates, request, entropy),
            mode => Pick::new(assign(mode, candidates, &self.pins.lock(), entropy), "session_assigned"),
        }
    }
}

impl Policy for Sticky {
    fn name(&self) -> PolicyName {
        self.inner.name()
    }

    fn pick(&self, candidates: &[Candidate<'_>], request: &RequestView<'_>, entropy: u64) -> Option<usize> {
        self.decide(candidates, request, entropy).index
    }

    fn decide(&self, candidates: &[Candidate<'_>], request: &RequestView<'_>, entropy: u64) -> Pick {
        let Some(session) = request.session() else { return self.inner.decide(candidates, request, entropy) };
        let key = hashed(request.model, session);
        let idle_since = request.now_ms.saturating_sub(self.tuning.max_idle_ms);
        let full: SmallVec<[u64; 2]> = {
            let mut pins = self.pins.lock();
            pins.expire(idle_since);
            let known = pins.of(key, idle_since);
            let running = self.running.lock();
            let is_full = |pin: &u64| running.get(&(key, *pin)).is_some_and(|count| *count >= MAX_CONCURRENT);
            let place = |pin: u64| candidates.iter().position(|candidate| worker(candidate) == pin);
            let free = known.into_iter().flatten().filter(|pin| !is_full(pin)).find_map(place);
            if free.is_some() {
                pins.touch(key, request.now_ms);
                return Pick::new(free, "session_hit");
            }
            known.into_iter().flatten().filter(is_full).collect()
        };
        let others: SmallVec<[usize; 32]> =
            (0..candidates.len()).filter(|index| !full.contains(&worker(&candidates[*index]))).collect();
        let pick = if full.is_empty() || others.is_empty() {
            self.place(candidates, request, entropy)
        } else {
            let rest: SmallVec<[Candidate<'_>; 32]> = others.iter().map(|index| candidates[*index]).collect();
            let pick = self.place(&rest, request, entropy);
            Pick { index: pick.index.and_then(|index| others.get(index).copied()), ..pick }
        };
        // A burst beyond two workers passes: the session keeps the pins it has.
        if full.len() < 2
            && let Some(candidate) = pick.index.and_then(|index| candidates.get(index))
        {
            let mut pins = self.pins.lock();
            let chosen = worker(candidate);
            if pins.of(key, idle_since).contains(&Some(chosen)) {
                pins.touch(key, request.now_ms);
            } else {
                pins.pin(key, chosen, request.now_ms, self.tuning.max_keys);
            }
        }
        pick
    }

    fn reads_prompt(&self) -> bool {
        self.inner.reads_prompt()
    }

    fn reads_session(&self) -> bool {
        true
    }

    fn begin(&self, candidate: &Candidate<'_>, request: &RequestView<'_>) -> Option<Lease> {
        let place = (hashed(request.model, request.session()?), worker(candidate));
        *self.running.lock().entry(place).or_insert(0) += 1;
        Some(Lease { running: Arc::clone(&self.running), place })
    }

    fn retain(&self, workers: &[WorkerKey]) {
        self.inner.retain(workers);
    }

    fn keys_on(&self, url: &str) -> u64 {
        self.inner.keys_on(url) + self.pins.lock().group_size(at(url))
    }

    fn footprint(&self) -> Footprint {
        let (inner, pins) = (self.inner.footprint(), self.pins.lock().footprint());
        Footprint { bytes: inner.bytes + pins.bytes, ..inner }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
mod tests {
    use super::*;
    use crate::{Leg, Tuning, build, build_with};

    const URLS: [&str; 3] = ["http://a", "http://b", "http://c"];

    fn candidates() -> Vec<Candidate<'static>> {
        URLS.iter().enumerate().map(|(index, url)| Candidate::new(index as u128, url, 0)).collect()
    }

    fn sticky(assignment: AssignmentMode) -> Sticky {
        let tuning = ManualTuning { assignment, max_idle_ms: 1000, ..ManualTuning::default() };
        Sticky::new(build(PolicyName::RoundRobin, Leg::Prefill).unwrap(), tuning)
    }

    fn of(session: &str) -> RequestView<'_> {
        RequestView::new("m").with_routing_key(Some(session)).at(5000)
    }

    #[test]
    fn a_session_stays_and_everything_else_goes_on_as_the_policy_says() {
        let policy = sticky(AssignmentMode::Delegate);
        let all = candidates();
        let home = policy.decide(&all, &of("s"), 0).index.unwrap();
        let none = RequestView::new("m").at(5000);
        let rotation: Vec<_> = (0..3).map(|_| policy.decide(&all, &none, 0).index.unwrap()).collect();
        assert_eq!(rotation, [(home + 1) % 3, (home + 2) % 3, home]);
        for _ in 0..3 {
            let pick = policy.decide(&all, &of("s"), 0);
            assert_eq!((pick.index, pick.branch), (Some(home), "session_hit"));
        }
        let by_id = RequestView::new("m").with_session(Some("s")).at(5000);
        assert_eq!(policy.decide(&all, &by_id, 0).index, Some(home), "named by its requests' ids");
    }

    #[test]
    fn a_session_whose_worker_is_away_or_full_gets_a_second_one_and_returns_to_the_first() {
        let policy = sticky(AssignmentMode::Delegate);
        let all = candidates();
        let home = policy.decide(&all, &of("s"), 0).index.unwrap();
        let mut without = all.clone();
        without.remove(home);
        let second = without[policy.decide(&without, &of("s"), 0).index.unwrap()].id as usize;
        assert_ne!(second, home);
        assert_eq!(policy.decide(&all, &of("s"), 0).index, Some(home));
        let mut leases: Vec<_> = (0..2).map(|_| policy.begin(&all[home], &of("s")).unwrap()).collect();
        assert_eq!(policy.decide(&all, &of("s"), 0).index, Some(second));
        assert_eq!(policy.decide(&all, &of("t"), 0).branch, "round_robin", "another session has its own count");
        leases.extend((0..2).map(|_| policy.begin(&all[second], &of("s")).unwrap()));
        let third = policy.decide(&all, &of("s"), 0).index.unwrap();
        assert!(third != home && third != second);
        drop(leases);
        assert_eq!(policy.decide(&all, &of("s"), 0).index, Some(home), "a burst unpins nothing");
        assert!(policy.running.lock().is_empty());
    }

    #[test]
    fn a_session_that_nobody_used_for_long_is_placed_anew() {
        for mode in
            [AssignmentMode::Delegate, AssignmentMode::MinLoad, AssignmentMode::MinGroup, AssignmentMode::Random]
        {
            let policy = sticky(mode);
            let mut all = candidates();
            let home = policy.decide(&all, &of("s"), 0).index.unwrap();
            all[home].load = 9;
            assert_eq!(policy.decide(&all, &of("s").at(6000), u64::MAX).index, Some(home));
            assert_ne!(policy.decide(&all, &of("s").at(7001), u64::MAX).branch, "session_hit", "{mode}");
            assert_eq!(policy.decide(&[], &of("new"), 0).index, None);
        }
    }

    #[test]
    fn policies_that_follow_keys_anyway_stay_as_they_are() {
        let tuning = Tuning { sticky: Some(ManualTuning::default()), ..Tuning::default() };
        for (name, sticky) in
            [(PolicyName::Manual, false), (PolicyName::ConsistentHashing, false), (PolicyName::CacheAware, true)]
        {
            let policy = build_with(name, Leg::Prefill, &tuning).unwrap();
            assert_eq!((policy.name(), policy.reads_session()), (name, sticky));
            assert_eq!(tuning.is_same_for(name, &Tuning::default()), !sticky);
        }
    }
}
