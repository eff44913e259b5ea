//! Choosing the workers of one attempt.
//!
//! The prefill policy picks among the prefills that have an available compatible decode, then the decode policy picks among that prefill's
//! available partners. An attempt avoids what the attempts before it tried, as long as something else is there. Pure but for the claims:
//! availability and loads are read once, randomness is passed in.

use std::sync::Arc;

use smallvec::SmallVec;
use smg_engines::Legs;
use smg_fleet::WorkerId;
use smg_policies::{Candidate, Policy, RequestView};
use thiserror::Error;

use crate::decision::Exclusion;
use crate::fleet::table::{Mismatch, ModelPool};
use crate::fleet::worker::{InFlight, RoutedWorker};

/// Why no worker was selected.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum SelectError {
    /// A leg has no workers at all.
    #[error("No available servers: No {0} workers available. Please check if {0} servers are configured and healthy.")]
    Empty(&'static str),
    /// A leg has workers, and none of them is available.
    #[error("No available servers: No available {0} workers (all circuits open or unhealthy)")]
    Unavailable(&'static str),
    /// Nobody can answer without a second leg.
    #[error("No prefill servers available")]
    NoPrefillServers,
    /// Workers are available, but none of a prefill's partners is.
    #[error("No available servers: No available decode workers that can pair with an available prefill worker")]
    NoPartner,
    /// No prefill shares a KV transfer protocol with any decode.
    #[error("No prefill/decode pair shares a KV transfer protocol (mismatch on {:?}; prefill: {:?}, decode: {:?})", .0.components, .0.prefill_keys, .0.decode_keys)]
    Incompatible(Mismatch),
}

/// The workers of one attempt, claimed.
#[derive(Debug)]
pub enum Selection {
    /// One worker serves the whole request.
    Regular(InFlight),
    /// A prefill hands over to a decode.
    Pair {
        /// The prefill.
        prefill: InFlight,
        /// The decode.
        decode: InFlight,
    },
}

/// What earlier attempts of the same request tried.
#[derive(Debug, Default)]
pub struct Tried {
    failed: SmallVec<[WorkerId; 4]>,
    pairs: SmallVec<[(WorkerId, WorkerId); 4]>,
    ruled_out: SmallVec<[(WorkerId, WorkerId); 4]>,
}

impl Tried {
    /// Notes an attempt. `failed` is the worker that failed it, if one did.
    pub fn note(&mut self, prefill: WorkerId, decode: WorkerId, failed: Option<WorkerId>) {
        self.pairs.push((prefill, decode));
        self.failed.extend(failed);
    }

    /// No further attempt may use this pair: it would fail in the same way.
    pub fn rule_out(&mut self, prefill: WorkerId, decode: WorkerId) {
        self.ruled_out.push((prefill, decode));
    }

    fn is_empty(&self) -> bool {
        self.pairs.is_empty() && self.ruled_out.is_empty()
    }
}

/// How strictly an attempt avoids what was tried. Tried in this order until something is left.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Avoid {
    FailedWorkers,
    TriedPairs,
    Nothing,
}

impl Avoid {
    fn allows(self, tried: &Tried, prefill: &RoutedWorker, decode: &RoutedWorker) -> bool {
        let pair = (prefill.id(), decode.id());
        if tried.ruled_out.contains(&pair) {
            return false;
        }
        let pair_is_new = || !tried.pairs.contains(&pair);
        match self {
            Avoid::FailedWorkers => {
                !tried.failed.contains(&prefill.id()) && !tried.failed.contains(&decode.id()) && pair_is_new()
            }
            Avoid::TriedPairs => pair_is_new(),
            Avoid::Nothing => true,
        }
    }
}

type Indices = SmallVec<[usize; 32]>;

/// Picks and claims the workers of an attempt. `entropy` yields random numbers; `exclusions` receives why workers were passed over.
///
/// # Errors
/// When nothing can be picked, and why.
pub fn select(
    pool: &ModelPool,
    tried: &Tried,
    mut entropy: impl FnMut() -> u64,
    exclusions: &mut Vec<Exclusion>,
) -> Result<Selection, SelectError> {
    let regulars = available(pool.regulars.iter(), exclusions);
    let prefills = available(pool.prefills.iter().map(|entry| &entry.worker), exclusions);
    let decodes = available(pool.decodes.iter(), exclusions);
    let paired = !prefills.is_empty() && !decodes.is_empty() && pool.mismatch.is_none();
    // Where a model has both kinds of workers, each kind gets its share of the traffic.
    let regular_share = regulars.len() as u64;
    let pair_share = if paired { (prefills.len() + decodes.len()) as u64 } else { 0 };
    if regular_share > 0 && (pair_share == 0 || entropy() % (regular_share + pair_share) < regular_share) {
        return select_regular(pool, tried, &regulars, entropy);
    }
    if !paired {
        return Err(why_nothing(pool, prefills.is_empty()));
    }
    select_pair(pool, tried, &prefills, &decodes, entropy)
}

/// Picks and claims one worker for a route that has no second leg.
///
/// # Errors
/// When nothing can be picked, and why.
pub fn select_one(
    pool: &ModelPool,
    legs: Legs,
    tried: &Tried,
    mut entropy: impl FnMut() -> u64,
    exclusions: &mut Vec<Exclusion>,
) -> Result<Selection, SelectError> {
    let regulars = available(pool.regulars.iter(), exclusions);
    if !regulars.is_empty() || legs == Legs::RegularOnly {
        return select_regular(pool, tried, &regulars, entropy);
    }
    let mut prefills = available(pool.prefills.iter().map(|entry| &entry.worker), exclusions);
    // The policy of whole requests, not that of the prefill leg: no KV cache is built.
    while !prefills.is_empty() {
        let workers = prefills.iter().map(|index| &pool.prefills[*index].worker);
        let picked = pick(&*pool.policies.regular, workers, pool, entropy());
        let Some(index) = prefills.get(picked).copied() else { break };
        if let Some(claim) = pool.prefills[index].worker.claim() {
            return Ok(Selection::Regular(claim));
        }
        prefills.remove(picked);
    }
    Err(SelectError::NoPrefillServers)
}

fn select_regular(
    pool: &ModelPool,
    tried: &Tried,
    available: &Indices,
    mut entropy: impl FnMut() -> u64,
) -> Result<Selection, SelectError> {
    let mut rest: Indices =
        available.iter().copied().filter(|index| !tried.failed.contains(&pool.regulars[*index].id())).collect();
    if rest.is_empty() {
        rest = available.clone();
    }
    // A breaker may close its door between the check and the claim: then the next candidate is asked.
    while !rest.is_empty() {
        let picked = pick(&*pool.policies.regular, rest.iter().map(|index| &pool.regulars[*index]), pool, entropy());
        let Some(index) = rest.get(picked).copied() else { break };
        if let Some(claim) = pool.regulars[index].claim() {
            return Ok(Selection::Regular(claim));
        }
        rest.remove(picked);
    }
    Err(SelectError::Unavailable("regular"))
}

fn select_pair(
    pool: &ModelPool,
    tried: &Tried,
    prefills: &Indices,
    decodes: &Indices,
    mut entropy: impl FnMut() -> u64,
) -> Result<Selection, SelectError> {
    let levels: &[Avoid] =
        if tried.is_empty() { &[Avoid::Nothing] } else { &[Avoid::FailedWorkers, Avoid::TriedPairs, Avoid::Nothing] };
    for avoid in levels {
        let partners = |prefill: usize| {
            let entry = &pool.prefills[prefill];
            let allowed = |decode: &usize| avoid.allows(tried, &entry.worker, &pool.decodes[*decode]);
            both(&entry.partners, decodes).filter(allowed)
        };
        let mut candidates: Indices =
            prefills.iter().copied().filter(|index| partners(*index).next().is_some()).collect();
        while !candidates.is_empty() {
            let workers = candidates.iter().map(|index| &pool.prefills[*index].worker);
            let picked = pick(&*pool.policies.prefill, workers, pool, entropy());
            let Some(index) = candidates.get(picked).copied() else { break };
            let Some(prefill) = pool.prefills[index].worker.claim() else {
                candidates.remove(picked);
                continue;
            };
            let mut rest: Indices = partners(index).collect();
            while !rest.is_empty() {
                let picked =
                    pick(&*pool.policies.decode, rest.iter().map(|index| &pool.decodes[*index]), pool, entropy());
                let Some(index) = rest.get(picked).copied() else { break };
                if let Some(decode) = pool.decodes[index].claim() {
                    return Ok(Selection::Pair { prefill, decode });
                }
                rest.remove(picked);
            }
            drop(prefill);
            candidates.remove(picked);
        }
    }
    Err(SelectError::NoPartner)
}

/// The common members of two ascending lists.
fn both<'a>(one: &'a [usize], other: &'a [usize]) -> impl Iterator<Item = usize> + 'a {
    let mut other = other.iter().copied().peekable();
    one.iter().copied().filter(move |wanted| {
        while other.next_if(|next| next < wanted).is_some() {}
        other.peek() == Some(wanted)
    })
}

fn pick<'a>(
    policy: &dyn Policy,
    workers: impl Iterator<Item = &'a Arc<RoutedWorker>>,
    pool: &ModelPool,
    entropy: u64,
) -> usize {
    let candidates: SmallVec<[Candidate<'_>; 32]> = workers
        .map(|worker| Candidate::new(worker.id().0.as_u128(), worker.url.as_str(), worker.runtime.load()))
        .collect();
    policy.pick(&candidates, &RequestView::new(&pool.model), entropy).unwrap_or(usize::MAX)
}

fn available<'a>(workers: impl Iterator<Item = &'a Arc<RoutedWorker>>, exclusions: &mut Vec<Exclusion>) -> Indices {
    let mut indices = Indices::new();
    for (index, worker) in workers.enumerate() {
        match worker.unavailable() {
            None => indices.push(index),
            Some(reason) => exclusions.push(Exclusion { worker: worker.url.as_str().to_owned(), reason }),
        }
    }
    indices
}

fn why_nothing(pool: &ModelPool, no_prefill: bool) -> SelectError {
    if pool.prefills.is_empty() && pool.decodes.is_empty() && !pool.regulars.is_empty() {
        return SelectError::Unavailable("regular");
    }
    if pool.prefills.is_empty() {
        return SelectError::Empty("prefill");
    }
    if pool.decodes.is_empty() {
        return SelectError::Empty("decode");
    }
    match &pool.mismatch {
        Some(mismatch) => SelectError::Incompatible(mismatch.clone()),
        None if no_prefill => SelectError::Unavailable("prefill"),
        None => SelectError::Unavailable("decode"),
    }
}
